"""Mistakes in slopes: the list itself, and which head takes which."""

from __future__ import annotations

import numpy as np

from benchmarks.mutants._mutant import mutant
from benchmarks.mutants.reference import Array, Call, Reference, to_bfloat16


def power_list(num_heads: int, *, first: int = 1, bias_max: float = 8.0) -> Array:
    """Return ``2 ** (-bias_max * i / num_heads)`` for ``num_heads`` indices from ``first``."""
    return 2.0 ** (-bias_max * np.arange(first, first + num_heads) / num_heads)


# --- The list ---------------------------------------------------------------------------------------------------------


@mutant("slopes", "causal_bias", expected="geometric")
class GeometricSlopes(Reference):
    """Slopes are plain geometric for head counts that are no power of two (jaketae/alibi, attention-gym)."""

    def slope_list(self, num_heads: int) -> Array:
        return power_list(num_heads)


@mutant(
    "slopes",
    "causal_bias",
    expected="index|off by one|too early|too steep|from 0|starts? (at|with)|shift",
)
class SlopesFromIndexZero(Reference):
    """Slopes begin with 1: their index counts from 0."""

    def slope_list(self, num_heads: int) -> Array:
        power = 1 << (num_heads.bit_length() - 1)
        return np.concatenate([power_list(power, first=0), super().slope_list(num_heads)[power:]])


@mutant(
    "slopes",
    "causal_bias",
    expected="index|off by one|too late|too flat|from 2|starts? (at|with)|shift",
)
class SlopesFromIndexTwo(Reference):
    """Slopes begin one index late."""

    def slope_list(self, num_heads: int) -> Array:
        power = 1 << (num_heads.bit_length() - 1)
        return np.concatenate([power_list(power, first=2), super().slope_list(num_heads)[power:]])


@mutant("slopes", "causal_bias", expected="sort|order")
class SortedSlopes(Reference):
    """Slopes are the right ones, sorted from steep to flat (CROMA)."""

    def slope_list(self, num_heads: int) -> Array:
        return np.sort(super().slope_list(num_heads))[::-1]


@mutant("slopes", "causal_bias", expected="revers|order|flattest first|last head")
class ReversedSlopes(Reference):
    """Slopes are the right ones from the last head to the first."""

    def slope_list(self, num_heads: int) -> Array:
        return super().slope_list(num_heads)[::-1]


@mutant("slopes", "causal_bias", expected="next power|truncat|cut|of (twice|more|the next)|power of (two|2)")
class SlopesOfTheNextPowerOfTwo(Reference):
    """Slopes are the first of those of the next power of two."""

    def slope_list(self, num_heads: int) -> Array:
        power = 1 << (num_heads - 1).bit_length()
        return power_list(power)[:num_heads]


@mutant(
    "slopes",
    "causal_bias",
    expected="padd|multiple|of more heads|other (number|count)|rounded up|truncat|cut",
)
class SlopesOfPaddedHeads(Reference):
    """Slopes are the first of those of a number of heads padded to a multiple of 8 (TensorRT-LLM)."""

    def slope_list(self, num_heads: int) -> Array:
        return super().slope_list(-(-num_heads // 8) * 8)[:num_heads]


@mutant("slopes", "causal_bias", expected="linear|even(ly)? spaced|equally|arithmetic")
class EvenlySpacedSlopes(Reference):
    """Slopes are evenly spaced from 0.05 to 0.5."""

    def slope_list(self, num_heads: int) -> Array:
        return np.linspace(0.05, 0.5, num_heads)


@mutant("slopes", "causal_bias", expected="natural|base e|exp\\b|of e\\b|e to the")
class SlopesOfBaseE(Reference):
    """Slopes are powers of e instead of 2."""

    def slope_list(self, num_heads: int) -> Array:
        return super().slope_list(num_heads) ** np.log2(np.e)


@mutant("slopes", "causal_bias", expected="16|bias_max|max_bias")
class SlopesOfMaximum16(Reference):
    """Slopes have a bias_max of 16, as in MPT's long variants."""

    def slope_list(self, num_heads: int) -> Array:
        return super().slope_list(num_heads) ** 2


@mutant("slopes", "causal_bias", expected="sign|negat|reward")
class NegativeSlopes(Reference):
    """Slopes have their sign already, and lose it again in the bias."""

    def slope_list(self, num_heads: int) -> Array:
        return -super().slope_list(num_heads)


@mutant("slopes", "causal_bias", expected="every other|between|beyond|extra|even|no power|not a power|power of (two|2)")
class WrongHalfOfTwiceAsMany(Reference):
    """The slopes beyond a power of two are every other one of twice as many, but from the second on: repeated."""

    def slope_list(self, num_heads: int) -> Array:
        power = 1 << (num_heads.bit_length() - 1)
        return np.concatenate([power_list(power), power_list(2 * power)[1::2]])[:num_heads]


@mutant("slopes", "causal_bias", expected="bfloat16|bf16")
class SlopesInBfloat16(Reference):
    """Slopes are rounded to bfloat16 (Falcon)."""

    def slope_list(self, num_heads: int) -> Array:
        return to_bfloat16(super().slope_list(num_heads).astype(np.float32))


@mutant("slopes", "causal_bias", expected=r"(?<!b)float16|fp16|half")
class SlopesInFloat16(Reference):
    """Slopes are rounded to float16."""

    def slope_list(self, num_heads: int) -> Array:
        return super().slope_list(num_heads).astype(np.float16)


@mutant("slopes", expected="at most 64|64 heads|repeat|begin again|the first slopes again", is_diagnosable=False)
class SlopesOfAtMost64Heads(Reference):
    """The table of slopes ends with 64 heads, and begins again for more."""

    def slopes(self, num_heads: int) -> Array:
        return super().slopes(min(num_heads, 64))[np.arange(num_heads) % 64]


# --- Which head takes which -------------------------------------------------------------------------------------------


@mutant("causal", "combined", expected="slopes.*(ignor|not use|other|default|canonical|own)|(ignor|not use).*slopes")
class GivenSlopesIgnored(Reference):
    """Given slopes are ignored, and the canonical ones of the heads at hand used: wrong in every shard of heads."""

    def by_head(self, call: Call, slopes: Array) -> Array:
        return super().by_head(call, self.slopes(call.query.shape[1]))


@mutant("causal", "combined", expected="shard|local|repeat|first (half|slopes|heads)")
class ShardsTakeTheFirstSlopes(Reference):
    """Of two shards of heads each takes the first slopes instead of its own (Megatron-DeepSpeed)."""

    def by_head(self, call: Call, slopes: Array) -> Array:
        num_heads = slopes.shape[-1]
        return super().by_head(call, slopes[..., np.arange(num_heads) % -(-num_heads // 2)])


@mutant("grouped", "combined", expected=r"key/value head|kv.?head|num_kv_heads|group")
class SlopesByKvHead(Reference):
    """All query heads of a group take the slope of their key/value head's index."""

    def by_head(self, call: Call, slopes: Array) -> Array:
        return super().by_head(call, slopes[..., np.arange(slopes.shape[-1]) // call.group])


@mutant("batch_slopes", expected="first (batch )?entry|batch|entry")
class FirstEntrysSlopesForAll(Reference):
    """Slopes by batch entry are those of the first entry for all (a kernel whose batch stride is 0)."""

    def by_head(self, call: Call, slopes: Array) -> Array:
        return super().by_head(call, slopes if slopes.ndim == 1 else slopes[:1])


@mutant("causal", "combined", expected="batch|order|interleav|mixed|flatten")
class SlopesFlattenedTheWrongWay(Reference):
    """Heads and batch are one axis, along which slopes are repeated where they should be tiled."""

    def by_head(self, call: Call, slopes: Array) -> Array:
        batch, num_heads = call.query.shape[:2]
        flat = slopes.repeat(batch) if slopes.ndim == 1 else slopes
        return super().by_head(call, flat.reshape(batch, num_heads))


@mutant(
    "causal",
    "combined",
    expected="previous|next|neighbou?r|shift|off by one|another head|index|roll",
)
class SlopeOfTheNextHead(Reference):
    """Head h takes the slope of head h + 1: heads are counted from 1."""

    def by_head(self, call: Call, slopes: Array) -> Array:
        num_heads = slopes.shape[-1]
        return super().by_head(call, slopes[..., np.minimum(np.arange(num_heads) + 1, num_heads - 1)])


@mutant("causal", "combined", expected="same slope|first (head|slope)|all heads|every head")
class FirstSlopeForAllHeads(Reference):
    """All heads take the first slope."""

    def by_head(self, call: Call, slopes: Array) -> Array:
        return super().by_head(call, slopes[..., :1])
