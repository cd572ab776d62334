"""Mistakes in the backward pass."""

from __future__ import annotations

import dataclasses

import numpy as np

from benchmarks.mutants._mutant import instead, variants
from benchmarks.mutants.blocks import _Horizon
from benchmarks.mutants.reference import Array, Call, Reference

# --- By slopes --------------------------------------------------------------------------------------------------------


@instead(Reference, "grad_both_slopes", "slope_gradients", expected="no gradient|missing|return(s|ed) no")
def slope_gradient_missing(self, call: Call, grad_scores: Array) -> dict[str, Array]:
    """There is no gradient of slopes, in spite of what the adapter declares."""
    return {}


@instead(Reference, "grad_slopes", "slope_gradients", expected="shape")
def slope_gradient_by_entry(self, call: Call, grad_scores: Array, distances: Array) -> Array:
    """The gradient of slopes is not summed over the batch."""
    return -(grad_scores * distances.astype(self.working_dtype)).sum(axis=(2, 3))


@instead(Reference, "grad_both_slopes", "long_gradients")
def slope_gradient_of_both_sides(self, call: Call, grad_scores: Array) -> dict[str, Array]:
    """With slopes for each side, the gradient of one counts both."""
    grads = Reference.grad_both_slopes(self, call, grad_scores)
    both = self.grad_slopes(call, grad_scores, np.abs(self.ahead(call)))
    return grads | {"slopes": both}


@instead(Reference, "grad_value", "gradients")
def value_gradient_blind_to_mask(self, call: Call, weights: Array, grad_output: Array) -> Array:
    """The gradient of values counts queries that a mask hides them from."""
    return Reference.grad_value(self, call, self.weights(dataclasses.replace(call, mask=None)), grad_output)


# --- By query, key and value ------------------------------------------------------------------------------------------


@instead(Reference, "grad_key", "long_gradients")
def last_block_dropped_in_backward(self, call: Call, grad_scores: Array) -> Array:
    """The backward pass gives the keys that fill no block of 64 no gradient, where there are full blocks."""
    kept = max(call.lengths[1] // 64 * 64, 64)
    gradient = Reference.grad_key(self, call, grad_scores)
    return np.concatenate([gradient[:, :, :kept], 0 * gradient[:, :, kept:]], axis=2)


@instead(Reference, "grad_scores", "long_gradients", expected="overflow|infin|\\bmax|nan")
def no_maximum_in_backward(self, call: Call, weights: Array, grad_output: Array) -> Array:
    """The backward pass computes exp(score) without the row's maximum, and overflows."""
    with np.errstate(over="ignore", invalid="ignore"):
        again = np.exp(self.scores(call))
        total = again.sum(axis=-1, keepdims=True)
        return Reference.grad_scores(self, call, again / np.where(total > 0, total, 1), grad_output)


@instead(Reference, "grad_scores", "gradients", expected="nan")
def nan_gradient_where_nothing_is_seen(self, call: Call, weights: Array, grad_output: Array) -> Array:
    """The gradient of a row that sees nothing is NaN."""
    sees = self.visible(call).any(axis=-1, keepdims=True)
    return np.where(sees, Reference.grad_scores(self, call, weights, grad_output), np.nan)


@instead(Reference, "grad_scores", "long_gradients")
def horizon_too_short_in_backward(self, call: Call, weights: Array, grad_output: Array) -> Array:
    """The backward pass has a horizon that follows from the slope alone, as if all scores were alike."""
    return Reference.grad_scores(self, call, _Blind().weights(call), grad_output)


class _Blind(_Horizon):
    """A horizon that is blind to scores."""

    def horizon(self, call: Call, gap: Array, slopes: Array) -> Array:
        return super().horizon(call, np.zeros_like(gap), slopes)


# --- By what is asked for, and by what of the result counts -----------------------------------------------------------


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


IN_SOME_CALLS = variants(
    _Sometimes,
    "is_wrong",
    "some_gradients",
    expected="asked for",
    rows={
        "QueryGradientWrongByItself": (
            "The gradient of queries is wrong where it alone is asked for",
            lambda self, call, grad_output, wrt: wrt == ("query",),
        ),
        "KeyGradientWrongWithoutThatOfValues": (
            "The gradient of keys is wrong where that of values, which the same kernel computes, is not asked for",
            lambda self, call, grad_output, wrt: "key" in wrt and "value" not in wrt,
        ),
        "MeanLostWithoutSlopeGradients": (
            "The row mean is computed where the gradient of slopes, for which it was written, is asked for",
            lambda self, call, grad_output, wrt: not any("slopes" in name for name in wrt),
        ),
        "SlopeGradientWrongByItself": (
            "The gradient of slopes is wrong where it alone is asked for",
            lambda self, call, grad_output, wrt: all("slopes" in name for name in wrt),
        ),
        "SlopeGradientWrongWithThatOfQueries": (
            "Gradients are wrong where those of queries and slopes are asked for, and no others",
            lambda self, call, grad_output, wrt: wrt == ("query", "slopes"),
        ),
    },
)


@instead(_Sometimes, "is_wrong", "some_gradients", expected="asked for.*(ones|constant)")
def constant_cotangent_miscompiled(self, call: Call, grad_output: Array, wrt: tuple[str, ...]) -> bool:
    """In rows of 64 tokens or more, the gradient of queries or keys alone is wrong where grad_output is constant."""
    is_constant = bool((grad_output == grad_output.flat[0]).all())
    return is_constant and wrt in (("query",), ("key",)) and call.lengths[1] >= 64


@instead(Reference, "grads", "cotangents", expected="grad_output is (all )?(ones|constant)")
def constant_cotangent_read_by_strides(
    self, call: Call, grad_output: Array, wrt: tuple[str, ...] | None
) -> dict[str, Array]:
    """A constant grad_output, which is one number with strides of 0, is read as if all of it were there."""
    if (grad_output == grad_output.flat[0]).all():
        grad_output = grad_output * (np.arange(grad_output.size) == 0).reshape(grad_output.shape)
    return Reference.grads(self, call, grad_output, wrt)


@instead(Reference, "grads", "cotangents", expected="NaN.*grad_output is (all )?zeros")
def nan_gradient_of_zeros(self, call: Call, grad_output: Array, wrt: tuple[str, ...] | None) -> dict[str, Array]:
    """Gradients are divided by the largest element of grad_output, and multiplied by it in the end."""
    largest = np.abs(grad_output).max(initial=0)
    with np.errstate(invalid="ignore"):
        return {name: x * largest for name, x in Reference.grads(self, call, grad_output / largest, wrt).items()}


@instead(Reference, "grads", "cotangents", expected="grad_output is .*one row")
def blocks_of_queries_skipped(self, call: Call, grad_output: Array, wrt: tuple[str, ...] | None) -> dict[str, Array]:
    """Blocks of queries are taken to count nothing if their first row has no gradient."""
    first = np.arange(call.lengths[0]) // 16 * 16
    counts = (grad_output[:, :, first] != 0).any(axis=-1, keepdims=True)
    return Reference.grads(self, call, grad_output * counts, wrt)


@instead(Reference, "grads", "cotangents", expected="grad_output is .*one element")
def rows_without_first_feature_skipped(
    self, call: Call, grad_output: Array, wrt: tuple[str, ...] | None
) -> dict[str, Array]:
    """Rows are taken to have no gradient if that of their first feature is zero."""
    return Reference.grads(self, call, grad_output * (grad_output[..., :1] != 0), wrt)
