"""Mistakes in the bias: its sign, its shape on the far side of a query, its scale."""

from __future__ import annotations

import numpy as np

from benchmarks.mutants._mutant import mutant
from benchmarks.mutants.reference import Array, Call, Reference


@mutant("causal", "causal_bias", expected="sign|reward|positive|grows|favou?r")
class SignFlipped(Reference):
    """The bias rewards distance."""

    def steepness(self, call: Call) -> Array:
        return -super().steepness(call)


@mutant("causal", expected="no bias|bias.*(ignor|missing|lost|absent|left out|not applied)|without.*bias|no positions")
class BiasLost(Reference):
    """Attention takes no bias: a faster path was chosen that has no argument for it."""

    def position_bias(self, call: Call) -> Array:
        return 0 * super().position_bias(call)


@mutant("symmetric", "symmetric_bias", expected="future.*reward|signed|reward.*(future|ahead|to come)")
class SignedFuture(Reference):
    """Without a causal mask the bias is slope * (key - query): keys to come are rewarded (jaketae/alibi)."""

    def steepness(self, call: Call) -> Array:
        steepness = super().steepness(call)
        return steepness if call.is_causal else np.where(self.ahead(call) > 0, -steepness, steepness)


@mutant("symmetric", expected="key.only|signed|reward")
class KeyOnlyWhenSymmetric(Reference):
    """The key-only form, slope * key position, is used without a causal mask too."""

    def position_bias(self, call: Call) -> Array:
        if call.is_causal:
            return super().position_bias(call)
        return (self.by_head(call, call.slopes) * self.kv_positions(call)).astype(self.working_dtype)


@mutant("causal_bias", expected="key.only|row|query('s)? position|constant")
class KeyOnlyBias(Reference):
    """The bias is slope * key position: right for causal attention, but not the bias that it says it is."""

    def bias(self, num_heads: int, q_len: int, kv_len: int, is_causal: bool) -> Array:
        exact = super().bias(num_heads, q_len, kv_len, is_causal)
        if not is_causal:
            return exact
        key_only = self.slopes(num_heads)[:, None, None] * np.arange(kv_len, dtype=exact.dtype)
        return np.where(np.isfinite(exact), key_only, exact)


@mutant(
    "symmetric", "symmetric_bias", expected="clamp|(future|ahead|to come).*(0\\b|zero|no bias|no penalty|free|unpenal)"
)
class FutureClamped(Reference):
    """Without a causal mask keys to come have no bias."""

    def steepness(self, call: Call) -> Array:
        is_free = (self.ahead(call) > 0) & (call.future_slopes is None)
        return np.where(is_free, 0, super().steepness(call))


@mutant("asymmetric", expected="future_slopes.*(ignor|not use)|ignor.*future_slopes|symmetric instead")
class FutureSlopesIgnored(Reference):
    """Slopes of keys to come are ignored, and the others used on both sides."""

    def steepness(self, call: Call) -> Array:
        return np.broadcast_to(self.by_head(call, call.slopes), (*call.query.shape[:3], call.lengths[1]))


@mutant("asymmetric", expected="swap|exchang|interchang|revers|wrong side|mixed up")
class SlopesOfBothSidesSwapped(Reference):
    """Slopes of keys before and of keys to come are exchanged."""

    def steepness(self, call: Call) -> Array:
        future, past = self.by_head(call, call.slopes), call.future_slopes
        if past is None:
            return super().steepness(call)
        return np.where(self.ahead(call) > 0, future, self.by_head(call, past))


@mutant("asymmetric", expected="0|zero|clamp|ignor")
class FutureSlopesOfZeroAreNone(Reference):
    """Slopes of keys to come that are all 0 count as not given, and the form is symmetric."""

    def steepness(self, call: Call) -> Array:
        steepness = super().steepness(call)
        if call.future_slopes is None or np.any(call.future_slopes):
            return steepness
        return np.broadcast_to(self.by_head(call, call.slopes), steepness.shape)


@mutant("causal", "scale", expected="before.*scal|scaled? (too|as well)|bias.*(sqrt|scale|head_dim)|sqrt")
class BiasScaledToo(Reference):
    """The bias is added before scores are scaled, so that it is divided by sqrt(head_dim) (Falcon)."""

    def position_bias(self, call: Call) -> Array:
        return super().position_bias(call) * np.asarray(call.scale, self.working_dtype)


@mutant("causal", expected="twice|doubled|2 times|factor (of )?2|two times")
class BiasAddedTwice(Reference):
    """The bias is added by the model, and once more by its kernel."""

    def position_bias(self, call: Call) -> Array:
        return 2 * super().position_bias(call)


@mutant("causal", "causal_bias", expected="sqrt|square root")
class RootOfDistance(Reference):
    """The bias is the slope times the square root of the distance (vLLM's use_alibi_sqrt)."""

    def raw_bias(self, call: Call) -> Array:
        return -self.steepness(call) * np.sqrt(np.abs(self.ahead(call)))


@mutant("causal", "causal_bias", expected="square|quadrat")
class SquareOfDistance(Reference):
    """The bias is the slope times the square of the distance."""

    def raw_bias(self, call: Call) -> Array:
        return super().raw_bias(call) * np.abs(self.ahead(call))


@mutant("causal", "causal_bias", expected="one|off by|distance|\\+ 1")
class DistancesOneTooMany(Reference):
    """Distances are one too many, but for the own key's, which is 0."""

    def raw_bias(self, call: Call) -> Array:
        return super().raw_bias(call) - self.steepness(call) * (self.ahead(call) != 0)


@mutant("causal", expected="log2|log_?2|base.2|exp2|powers? of (2|two)|1\\.44|0\\.69|ln 2|log 2")
class BiasInBaseTwo(Reference):
    """A softmax in base 2 multiplies the scores by log2(e), but not the bias."""

    def position_bias(self, call: Call) -> Array:
        return super().position_bias(call) * np.asarray(np.log(2), self.working_dtype)


@mutant("causal", expected="log2|log_?2|base.2|exp2|powers? of (2|two)|1\\.44|0\\.69|ln 2|log 2")
class SoftmaxInBaseTwo(Reference):
    """A softmax in base 2 multiplies neither scores nor bias by log2(e)."""

    def scores(self, call: Call) -> Array:
        return super().scores(call) * np.asarray(np.log(2), self.working_dtype)


@mutant("causal_bias", expected="finite|mask|infin|not hidden|-?10.?000|1e-?4")
class CausalBiasOfMinusThousand(Reference):
    """What the causal mask hides has a bias of -1000, and is not hidden from large scores."""

    def bias(self, num_heads: int, q_len: int, kv_len: int, is_causal: bool) -> Array:
        return np.maximum(super().bias(num_heads, q_len, kv_len, is_causal), -1000)


@mutant("causal_bias", "symmetric_bias", expected="top.left|kv_len - q_len|first (query|key)|align")
class BiasAlignedTopLeft(Reference):
    """The first query of a bias is at the first key."""

    def bias(self, num_heads: int, q_len: int, kv_len: int, is_causal: bool) -> Array:
        length = max(q_len, kv_len)
        return super().bias(num_heads, length, length, is_causal)[:, :q_len, :kv_len]


@mutant("symmetric_bias", expected="signed|reward")
class SignedBias(Reference):
    """The bias without a causal mask is slope * (key - query), where attention has another of its own."""

    def bias(self, num_heads: int, q_len: int, kv_len: int, is_causal: bool) -> Array:
        exact = super().bias(num_heads, q_len, kv_len, is_causal)
        is_ahead = np.arange(kv_len) > np.arange(kv_len - q_len, kv_len)[:, None]
        return np.where(is_ahead & np.isfinite(exact), -exact, exact)
