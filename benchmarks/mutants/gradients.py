"""Mistakes in the backward pass."""

from __future__ import annotations

import dataclasses

import numpy as np

from benchmarks.mutants._mutant import mutant
from benchmarks.mutants.blocks import _Horizon
from benchmarks.mutants.reference import Array, Call, Reference

# --- By slopes --------------------------------------------------------------------------------------------------------


@mutant("slope_gradients", expected="no gradient|missing|return(s|ed) no")
class SlopeGradientMissing(Reference):
    """There is no gradient of slopes, in spite of what the adapter declares."""

    def grad_both_slopes(self, call: Call, grad_scores: Array) -> dict[str, Array]:
        return {}


@mutant("slope_gradients", expected="shape")
class SlopeGradientByEntry(Reference):
    """The gradient of slopes is not summed over the batch."""

    def grad_slopes(self, call: Call, grad_scores: Array, distances: Array) -> Array:
        return -(grad_scores * distances.astype(self.working_dtype)).sum(axis=(2, 3))


@mutant("long_gradients", expected="future|both sides|past|side", is_diagnosable=False)
class SlopeGradientOfBothSides(Reference):
    """With slopes for each side, the gradient of one counts both."""

    def grad_both_slopes(self, call: Call, grad_scores: Array) -> dict[str, Array]:
        grads = super().grad_both_slopes(call, grad_scores)
        both = self.grad_slopes(call, grad_scores, np.abs(self.ahead(call)))
        return grads | {"slopes": both}


@mutant("gradients", expected="mask", is_diagnosable=False)
class ValueGradientBlindToMask(Reference):
    """The gradient of values counts queries that a mask hides them from."""

    def grad_value(self, call: Call, weights: Array, grad_output: Array) -> Array:
        return super().grad_value(call, self.weights(dataclasses.replace(call, mask=None)), grad_output)


# --- By query, key and value ------------------------------------------------------------------------------------------


@mutant("long_gradients", expected="block|tail|tile|partial|last keys|multiple|drop|zero", is_diagnosable=False)
class LastBlockDroppedInBackward(Reference):
    """The backward pass gives the keys that fill no block of 64 no gradient, where there are full blocks."""

    def grad_key(self, call: Call, grad_scores: Array) -> Array:
        kept = max(call.lengths[1] // 64 * 64, 64)
        gradient = super().grad_key(call, grad_scores)
        return np.concatenate([gradient[:, :, :kept], 0 * gradient[:, :, kept:]], axis=2)


@mutant("long_gradients", expected="overflow|infin|\\bmax|nan")
class NoMaximumInBackward(Reference):
    """The backward pass computes exp(score) without the row's maximum, and overflows."""

    def grad_scores(self, call: Call, weights: Array, grad_output: Array) -> Array:
        with np.errstate(over="ignore", invalid="ignore"):
            again = np.exp(self.scores(call))
            total = again.sum(axis=-1, keepdims=True)
            return super().grad_scores(call, again / np.where(total > 0, total, 1), grad_output)


@mutant("gradients", expected="nan")
class NanGradientWhereNothingIsSeen(Reference):
    """The gradient of a row that sees nothing is NaN."""

    def grad_scores(self, call: Call, weights: Array, grad_output: Array) -> Array:
        sees = self.visible(call).any(axis=-1, keepdims=True)
        return np.where(sees, super().grad_scores(call, weights, grad_output), np.nan)


@mutant("long_gradients", expected="horizon|far|distant|drop|left out", is_diagnosable=False)
class HorizonTooShortInBackward(Reference):
    """The backward pass has a horizon that follows from the slope alone, as if all scores were alike."""

    def grad_scores(self, call: Call, weights: Array, grad_output: Array) -> Array:
        return super().grad_scores(call, _Blind().weights(call), grad_output)


class _Blind(_Horizon):
    """A horizon that is blind to scores."""

    def horizon(self, call: Call, gap: Array, slopes: Array) -> Array:
        return super().horizon(call, np.zeros_like(gap), slopes)


# --- By what is asked for, and by what of the result counts -----------------------------------------------------------

ASKED_FOR = "asked for"


class _Sometimes(Reference):
    """Gradients that are wrong in some calls only: without the row mean."""

    def is_wrong(self, call: Call, grad_output: Array, wrt: tuple[str, ...]) -> bool:
        raise NotImplementedError

    def grads(self, call: Call, grad_output: Array, wrt: tuple[str, ...] | None) -> dict[str, Array]:
        asked = ("query", "key", "value", "slopes", "future_slopes") if wrt is None else wrt
        self.lacks_mean = self.is_wrong(call, grad_output, asked)
        return super().grads(call, grad_output, wrt)

    def grad_scores(self, call: Call, weights: Array, grad_output: Array) -> Array:
        if not self.lacks_mean:
            return super().grad_scores(call, weights, grad_output)
        return weights * (grad_output @ self.grouped(call, call.value).swapaxes(-1, -2))


@mutant("some_gradients", expected=ASKED_FOR)
class QueryGradientWrongByItself(_Sometimes):
    """The gradient of queries is wrong where it alone is asked for."""

    def is_wrong(self, call: Call, grad_output: Array, wrt: tuple[str, ...]) -> bool:
        return wrt == ("query",)


@mutant("some_gradients", expected=ASKED_FOR + ".*(ones|constant)")
class ConstantCotangentMiscompiled(_Sometimes):
    """In rows of 64 tokens or more, the gradient of queries or keys alone is wrong where grad_output is constant."""

    def is_wrong(self, call: Call, grad_output: Array, wrt: tuple[str, ...]) -> bool:
        is_constant = bool((grad_output == grad_output.flat[0]).all())
        return is_constant and wrt in (("query",), ("key",)) and call.lengths[1] >= 64


@mutant("some_gradients", expected=ASKED_FOR)
class KeyGradientWrongWithoutThatOfValues(_Sometimes):
    """The gradient of keys is wrong where that of values, which the same kernel computes, is not asked for."""

    def is_wrong(self, call: Call, grad_output: Array, wrt: tuple[str, ...]) -> bool:
        return "key" in wrt and "value" not in wrt


@mutant("some_gradients", expected=ASKED_FOR)
class MeanLostWithoutSlopeGradients(_Sometimes):
    """The row mean is computed where the gradient of slopes, for which it was written, is asked for."""

    def is_wrong(self, call: Call, grad_output: Array, wrt: tuple[str, ...]) -> bool:
        return not any("slopes" in name for name in wrt)


@mutant("some_gradients", expected=ASKED_FOR)
class SlopeGradientWrongByItself(_Sometimes):
    """The gradient of slopes is wrong where it alone is asked for."""

    def is_wrong(self, call: Call, grad_output: Array, wrt: tuple[str, ...]) -> bool:
        return all("slopes" in name for name in wrt)


@mutant("some_gradients", expected=ASKED_FOR)
class SlopeGradientWrongWithThatOfQueries(_Sometimes):
    """Gradients are wrong where those of queries and slopes are asked for, and no others."""

    def is_wrong(self, call: Call, grad_output: Array, wrt: tuple[str, ...]) -> bool:
        return wrt == ("query", "slopes")


@mutant("cotangents", expected="grad_output is (all )?(ones|constant)")
class ConstantCotangentReadByStrides(Reference):
    """A constant grad_output, which is one number with strides of 0, is read as if all of it were there."""

    def grads(self, call: Call, grad_output: Array, wrt: tuple[str, ...] | None) -> dict[str, Array]:
        if (grad_output == grad_output.flat[0]).all():
            grad_output = grad_output * (np.arange(grad_output.size) == 0).reshape(grad_output.shape)
        return super().grads(call, grad_output, wrt)


@mutant("cotangents", expected="NaN.*grad_output is (all )?zeros")
class NanGradientOfZeros(Reference):
    """Gradients are divided by the largest element of grad_output, and multiplied by it in the end."""

    def grads(self, call: Call, grad_output: Array, wrt: tuple[str, ...] | None) -> dict[str, Array]:
        largest = np.abs(grad_output).max(initial=0)
        with np.errstate(invalid="ignore"):
            return {name: x * largest for name, x in super().grads(call, grad_output / largest, wrt).items()}


@mutant("cotangents", expected="grad_output is .*one row")
class BlocksOfQueriesSkipped(Reference):
    """Blocks of queries are taken to count nothing if their first row has no gradient."""

    def grads(self, call: Call, grad_output: Array, wrt: tuple[str, ...] | None) -> dict[str, Array]:
        first = np.arange(call.lengths[0]) // 16 * 16
        counts = (grad_output[:, :, first] != 0).any(axis=-1, keepdims=True)
        return super().grads(call, grad_output * counts, wrt)


@mutant("cotangents", expected="grad_output is .*one element")
class RowsWithoutFirstFeatureSkipped(Reference):
    """Rows are taken to have no gradient if that of their first feature is zero."""

    def grads(self, call: Call, grad_output: Array, wrt: tuple[str, ...] | None) -> dict[str, Array]:
        return super().grads(call, grad_output * (grad_output[..., :1] != 0), wrt)
