"""Mistakes in conduct: calls that raise, hang, change their inputs, or return something else."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from benchmarks.mutants._mutant import instead, mutant
from benchmarks.mutants.reference import Array, Call, Reference


class _Changed(Reference):
    """Does something to its arguments or its result."""

    def before(self, query: Array, key: Array, value: Array, slopes: Array) -> None:
        pass

    def after(self, output: Array) -> Array:
        return output

    def attention(self, query: Array, key: Array, value: Array, slopes: Array, *args: Any, **options: Any) -> Array:
        output = super().attention(query, key, value, slopes, *args, **options)
        self.before(query, key, value, slopes)
        return self.after(output)


@instead(_Changed, "before", "conduct", expected="changed its input query|query")
def query_scaled_in_place(self, query: Array, key: Array, value: Array, slopes: Array) -> None:
    """The query is scaled in place, and stays so."""
    query *= query.dtype.type(query.shape[-1] ** -0.5)


@instead(_Changed, "before", "conduct", expected="changed its input slopes|slopes")
def slopes_negated_in_place(self, query: Array, key: Array, value: Array, slopes: Array) -> None:
    """Slopes are negated in place, and stay so."""
    slopes *= -1


@instead(_Changed, "attention", "conduct", expected="not contiguous")
def strides_ignored(self, query: Array, *args: Any, **options: Any) -> Array:
    """Queries are read as if they were contiguous."""
    read = np.lib.stride_tricks.as_strided(query, query.shape, np.empty(query.shape, query.dtype).strides)
    return Reference.attention(self, read, *args, **options)


@instead(_Changed, "after", "conduct", expected="float64")
def wrong_dtype_out(self, output: Array) -> Array:
    """A float32 call returns float64."""
    return output.astype(np.float64)


@instead(_Changed, "after", "causal", expected="float16|integer|int|dtype")
def integers_out(self, output: Array) -> Array:
    """A call returns integers."""
    return output.astype(np.int32)


@instead(_Changed, "after", "causal")
def length_first_out(self, output: Array) -> Array:
    """A call returns [batch, length, heads, head_dim]."""
    return output.swapaxes(1, 2)


@instead(_Changed, "after", "causal", expected="nan")
def nan_out(self, output: Array) -> Array:
    """A division by zero makes results NaN where the output should be 0."""
    return np.where(output < 0, np.nan, output)


@instead(Reference, "call", "lengths", expected="raised|not implemented|more queries")
def raises_for_more_queries_than_keys(self, *args: Any, **options: Any) -> Call:
    """More queries than keys are refused, though the adapter declares lengths."""
    call = Reference.call(self, *args, **options)
    if call.lengths[0] > call.lengths[1]:
        raise NotImplementedError("more queries than keys")
    return call


@instead(Reference, "softmax", "empty", expected="raised|reduction|zero.size|empty")
def raises_without_keys(self, scores: Array) -> Array:
    """The maximum of no scores raises."""
    scores.max(axis=-1)
    return Reference.softmax(self, scores)


@instead(Reference, "call", "long", expected="raised|max_len|128")
def raises_beyond_max_len(self, *args: Any, **options: Any) -> Call:
    """Rows longer than max_len are refused (jaketae/alibi)."""
    call = Reference.call(self, *args, **options)
    if call.lengths[1] > 128:
        raise ValueError("sequence length must be at most max_len=128")
    return call


@instead(Reference, "visible_by_window", "window", expected="did not return|never return|hang|hung")
def hangs_for_window_zero(self, call: Call) -> Array | bool:
    """A loop over windows goes on by window_size tokens, and never ends for 0."""
    if call.window_size == 0:
        time.sleep(3600)
    return Reference.visible_by_window(self, call)


@instead(_Changed, "after", "causal", expected="list|expected a NumPy array")
def list_out(self, output: Array) -> Any:
    """A call returns a list."""
    return output.tolist()


@mutant("conduct", expected="overwr|buffer|reus")
class BufferReused(_Changed):
    """Results lie in a buffer that the next call of the same shape overwrites."""

    def __init__(self) -> None:
        self.buffers: dict[tuple[int, ...], Array] = {}

    def after(self, output: Array) -> Array:
        buffer = self.buffers.setdefault(output.shape, np.empty_like(output))
        buffer[...] = output
        return buffer
