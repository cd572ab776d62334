"""Mistakes in precision: what is rounded that must not be, and what overflows."""

from __future__ import annotations

import numpy as np

from benchmarks.mutants._mutant import mutant
from benchmarks.mutants.reference import Array, Call, Reference, to_bfloat16

BF16, FP16 = "(bfloat16|bf16)", r"((?<!b)float16|fp16)"


class _PositionsRounded(Reference):
    """Bias of positions that are rounded, and subtracted then; the masks know better."""

    def rounding(self, x: Array) -> Array:
        raise NotImplementedError

    def raw_bias(self, call: Call) -> Array:
        q, kv = (self.rounding(x.astype(np.float32)) for x in (self.q_positions(call), self.kv_positions(call)))
        return -self.steepness(call).astype(np.float64) * np.abs(kv.astype(np.float64) - q)


@mutant("precision", expected="position.*" + BF16)
class PositionsInBfloat16(_PositionsRounded):
    """Positions are in bfloat16, which holds integers up to 256."""

    dtype = "bfloat16"

    def rounding(self, x: Array) -> Array:
        return to_bfloat16(x)


@mutant("precision", expected="position.*" + FP16)
class PositionsInFloat16(_PositionsRounded):
    """Positions are in float16, which holds integers up to 2048 (FlashBias)."""

    dtype = "float16"
    features = Reference.features - {"far"}

    def rounding(self, x: Array) -> Array:
        with np.errstate(over="ignore"):
            return np.minimum(x.astype(np.float16), 65504).astype(np.float32)


@mutant("precision", expected="distance.*" + FP16)
class DistancesInFloat16(Reference):
    """Distances are exact integers, which float16 rounds beyond 2048."""

    dtype = "float16"
    features = Reference.features - {"far"}

    def raw_bias(self, call: Call) -> Array:
        return -self.steepness(call) * np.abs(self.ahead(call)).astype(np.float16).astype(np.float64)


@mutant("precision", "causal_bias", expected="bias.*" + BF16 + "|falcon")
class BiasInBfloat16(Reference):
    """The bias is rounded to the dtype of its model, bfloat16, and so is what it is computed from (Falcon)."""

    features = Reference.features - {"far"}
    dtype = "float32"

    def raw_bias(self, call: Call) -> Array:
        return to_bfloat16(super().raw_bias(call).astype(np.float32))

    def position_bias(self, call: Call) -> Array:
        return self.raw_bias(call)


@mutant("precision", expected="bias.*" + BF16)
class BiasInBfloat16WithItsModel(Reference):
    """In a bfloat16 model, the bias is rounded too, before it is added to scores (BLOOM, keras-hub)."""

    dtype = "bfloat16"
    features = Reference.features - {"far"}

    def position_bias(self, call: Call) -> Array:
        return to_bfloat16(self.raw_bias(call).astype(np.float32))


@mutant("precision", expected="bias.*" + FP16)
class BiasInFloat16WithItsModel(Reference):
    """In a float16 model, the bias is rounded too, before it is added to scores (TransformerEngine)."""

    dtype = "float16"
    features = Reference.features - {"far"}

    def position_bias(self, call: Call) -> Array:
        return self.raw_bias(call).astype(np.float16).astype(np.float32)


@mutant("precision", expected="key.only.*" + BF16)
class KeyOnlyBiasInBfloat16(Reference):
    """The key-only form in bfloat16: the last of 2048 keys have nine biases between them (BLOOM)."""

    dtype = "bfloat16"
    features = Reference.features - {"far"}

    def position_bias(self, call: Call) -> Array:
        if not call.is_causal:
            return super().position_bias(call)
        return to_bfloat16((self.by_head(call, call.slopes) * self.kv_positions(call)).astype(np.float32))


@mutant("precision", expected="slopes.*" + BF16)
class GivenSlopesInBfloat16(Reference):
    """Given slopes are rounded to the dtype of their model, bfloat16."""

    dtype = "bfloat16"

    def by_head(self, call: Call, slopes: Array) -> Array:
        return super().by_head(call, to_bfloat16(slopes))


@mutant("causal", "long", expected="slopes.*" + BF16)
class GivenSlopesInBfloat16Always(Reference):
    """Given slopes are rounded to bfloat16 in a model of float32 (Falcon)."""

    def by_head(self, call: Call, slopes: Array) -> Array:
        return super().by_head(call, to_bfloat16(slopes))


@mutant("precision", expected="slopes.*" + FP16)
class GivenSlopesInFloat16(Reference):
    """Given slopes are rounded to the dtype of their model, float16."""

    dtype = "float16"

    def by_head(self, call: Call, slopes: Array) -> Array:
        return super().by_head(call, slopes.astype(np.float16).astype(np.float32))


@mutant("long", expected="(scores|products).*" + FP16)
class ScoresInFloat16(Reference):
    """Products of queries and keys are stored in float16, with the bias on top."""

    dtype = "float16"

    def scores(self, call: Call) -> Array:
        with np.errstate(over="ignore"):
            return super().scores(call).astype(np.float16).astype(np.float32)


@mutant("long", expected="overflow|infin|" + FP16)
class ProductsOverflowFloat16(Reference):
    """Products of queries and keys overflow float16, before they are scaled."""

    dtype = "float16"

    def products(self, call: Call) -> Array:
        raw = call.query @ self.grouped(call, call.key).swapaxes(-1, -2)
        with np.errstate(over="ignore"):
            return raw.astype(np.float16).astype(np.float32) * np.float32(call.scale)


@mutant("long", expected="overflow|infin|\\bmax")
class NoMaximumSubtracted(Reference):
    """Weights are exp(score), without the row's maximum subtracted, and overflow."""

    def softmax(self, scores: Array) -> Array:
        with np.errstate(over="ignore", invalid="ignore"):
            weights = np.exp(scores)
            total = weights.sum(axis=-1, keepdims=True)
            return weights / np.where(total > 0, total, 1)


@mutant("offset", expected="far|digits|cent|count")
class FarBiasUncentred(Reference):
    """The bias is slope * position in float32, and loses its digits a million tokens on (flash-attn)."""

    def position_bias(self, call: Call) -> Array:
        return self.raw_bias(call).astype(np.float32)


@mutant("long", expected="tf32|10 bits|11 bits", is_diagnosable=False)
class ProductsInTf32(Reference):
    """Products of float32 tensors are computed with 10 bits of fraction, by default (TF32)."""

    def products(self, call: Call) -> Array:
        query, key = (
            (np.ascontiguousarray(x, np.float32).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
            for x in (call.query, self.grouped(call, call.key))
        )
        return (query @ key.swapaxes(-1, -2)) * np.float32(call.scale)


@mutant("precision", expected="(sum|denominator).*" + FP16, is_diagnosable=False)
class SumsInFloat16(Reference):
    """A row's weights are summed up in float16, one after the other."""

    dtype = "float16"

    def softmax(self, scores: Array) -> Array:
        highest = scores.max(axis=-1, keepdims=True, initial=-np.inf)
        weights = np.exp(scores - np.where(np.isfinite(highest), highest, 0)).astype(np.float16)
        total = np.add.accumulate(weights, axis=-1, dtype=np.float16)[..., -1:].astype(np.float32)
        return weights.astype(np.float32) / np.where(total > 0, total, 1)
