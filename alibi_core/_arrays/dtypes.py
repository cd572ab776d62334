"""Dtypes of any library, and the limits of the floating ones."""

from __future__ import annotations

import sys
from typing import NamedTuple

import numpy as np

from alibi_core._arrays.libraries import DType, Namespace, is_jax, is_mlx


class Limits(NamedTuple):
    """The numbers that a floating dtype can tell apart."""

    bits: int  # significant bits, the hidden one among them
    roundoff: float  # unit roundoff: smaller relative changes are lost in rounding; half the spacing at 1
    least: float  # the least normal number
    largest: float


FLOATING = {  # the supported floating dtypes
    "float64": Limits(53, 2.0**-53, 2.0**-1022, sys.float_info.max),
    "float32": Limits(24, 2.0**-24, 2.0**-126, 2.0**128 - 2.0**104),
    "bfloat16": Limits(8, 2.0**-8, 2.0**-126, 2.0**128 - 2.0**120),
    "float16": Limits(11, 2.0**-11, 2.0**-14, 65504.0),
}


def is_kind(xp: Namespace, dtype: DType, kind: str) -> bool:
    """``xp.isdtype``, but False for a non-dtype or a dtype outside the standard (JAX's random keys)."""
    try:
        return not _is_value(dtype) and bool(xp.isdtype(dtype, kind))
    except Exception:
        return False


def _is_value(dtype: DType) -> bool:
    """Whether ``dtype`` is really an array or a number: PyTorch and ``str`` would take an array for its dtype."""
    return isinstance(dtype, int) or (hasattr(dtype, "dtype") and not isinstance(dtype, type))


def floating_name(dtype: DType) -> str | None:
    """Return the name in FLOATING of a dtype of any library (or of a dtype's name); None for other dtypes."""
    if _is_value(dtype):
        return None
    # "bfloat16" contains "float16" too: FLOATING lists it first.
    shown = str(dtype)
    name = next((name for name in FLOATING if name in shown), None)
    if name is None and isinstance(dtype, np.dtype):  # str() of a byte-swapped dtype is ">f4", without a name
        name = next((name for name in FLOATING if name in dtype.name), None)
    return name


def lacks_64_bits(xp: Namespace) -> bool:
    """Whether ``xp`` silently narrows 64-bit dtypes to 32 bits (JAX without ``jax_enable_x64``)."""
    return is_jax(xp) and "float64" not in xp.__array_namespace_info__().dtypes(kind="real floating")


def has_float64(xp: Namespace) -> bool:
    """Whether arrays of the library can be float64 on every device; MLX has it on the CPU alone."""
    return not (lacks_64_bits(xp) or is_mlx(xp))
