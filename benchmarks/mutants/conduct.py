"""Mistakes in conduct: calls that raise, hang, change their inputs, or return something else."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from benchmarks.mutants._mutant import mutant
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


@mutant("conduct", expected="changed its input query|query")
class QueryScaledInPlace(_Changed):
    """The query is scaled in place, and stays so."""

    def before(self, query: Array, key: Array, value: Array, slopes: Array) -> None:
        query *= query.dtype.type(query.shape[-1] ** -0.5)


@mutant("conduct", expected="changed its input slopes|slopes")
class SlopesNegatedInPlace(_Changed):
    """Slopes are negated in place, and stay so."""

    def before(self, query: Array, key: Array, value: Array, slopes: Array) -> None:
        slopes *= -1


@mutant("conduct", expected="float64")
class WrongDtypeOut(_Changed):
    """A float32 call returns float64."""

    def after(self, output: Array) -> Array:
        return output.astype(np.float64)


@mutant("causal", expected="float16|integer|int|dtype")
class IntegersOut(_Changed):
    """A call returns integers."""

    def after(self, output: Array) -> Array:
        return output.astype(np.int32)


@mutant("causal", expected="shape", is_diagnosable=False)
class LengthFirstOut(_Changed):
    """A call returns [batch, length, heads, head_dim]."""

    def after(self, output: Array) -> Array:
        return output.swapaxes(1, 2)


@mutant("causal", expected="nan")
class NanOut(_Changed):
    """A division by zero makes results NaN where the output should be 0."""

    def after(self, output: Array) -> Array:
        return np.where(output < 0, np.nan, output)


@mutant("lengths", expected="raised|not implemented|more queries")
class RaisesForMoreQueriesThanKeys(Reference):
    """More queries than keys are refused, though the adapter declares lengths."""

    def call(self, *args: Any, **options: Any) -> Call:
        call = super().call(*args, **options)
        if call.lengths[0] > call.lengths[1]:
            raise NotImplementedError("more queries than keys")
        return call


@mutant("empty", expected="raised|reduction|zero.size|empty")
class RaisesWithoutKeys(Reference):
    """The maximum of no scores raises."""

    def softmax(self, scores: Array) -> Array:
        scores.max(axis=-1)
        return super().softmax(scores)


@mutant("long", expected="raised|max_len|128")
class RaisesBeyondMaxLen(Reference):
    """Rows longer than max_len are refused (jaketae/alibi)."""

    def call(self, *args: Any, **options: Any) -> Call:
        call = super().call(*args, **options)
        if call.lengths[1] > 128:
            raise ValueError("sequence length must be at most max_len=128")
        return call


@mutant("window", expected="did not return|never return|hang|hung")
class HangsForWindowZero(Reference):
    """A loop over windows goes on by window_size tokens, and never ends for 0."""

    def visible_by_window(self, call: Call) -> Array | bool:
        if call.window_size == 0:
            time.sleep(3600)
        return super().visible_by_window(call)


@mutant("causal", expected="list|expected a NumPy array")
class ListOut(_Changed):
    """A call returns a list."""

    def after(self, output: Array) -> Any:
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
