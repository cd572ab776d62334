"""MLX as an array API namespace: what ``mlx.core`` lacks in its older releases, or computes less exactly than asked.

Nothing of MLX is imported here; the module is handed over.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from alibi_core._arrays.typing import DType, Namespace


class MLXNamespace:
    """``mlx.core``, with the functions of the standard that the core uses and MLX 0.29 does not have.

    One definition serves all releases, so that what is tested with a new one is what runs with an old one.
    """

    def __init__(self, core: Namespace) -> None:
        self._core = core
        self.__name__ = core.__name__

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)

    def asarray(self, values: Any, *, dtype: DType | None = None) -> Any:
        # By way of NumPy: MLX 0.29 rounds Python floats to float32, also on their way to float64.
        return self._core.array(np.asarray(values), dtype=dtype)

    def astype(self, array: Any, dtype: DType) -> Any:
        return array.astype(dtype)

    def isdtype(self, dtype: DType, kind: str) -> bool:
        if kind == "bool":
            return bool(dtype == self._core.bool_)
        category = {"real floating": self._core.floating, "integral": self._core.integer}[kind]
        return bool(self._core.issubdtype(dtype, category))

    def matrix_transpose(self, array: Any) -> Any:
        return self._core.swapaxes(array, -1, -2)

    def matmul(self, one: Any, other: Any) -> Any:
        if one.size and other.size:
            return self._core.matmul(one, other)
        # MLX on the CPU, up to 0.32 at least, frees memory that it still writes to where a product has no rows.
        batch = np.broadcast_shapes(one.shape[:-2], other.shape[:-2])
        return self._core.zeros((*batch, one.shape[-2], other.shape[-1]), dtype=one.dtype)

    def flip(self, array: Any, *, axis: int) -> Any:
        return self._core.take(array, self._core.arange(array.shape[axis] - 1, -1, -1), axis=axis)

    def cumulative_sum(self, array: Any, *, axis: int) -> Any:
        return self._core.cumsum(array, axis=axis)

    def exp(self, array: Any) -> Any:
        # MLX computes the exponential of float64 in float32, up to 0.32 at least; its power is exact.
        if array.dtype != self._core.float64:
            return self._core.exp(array)
        return self._core.power(self.asarray(math.e, dtype=self._core.float64), array)
