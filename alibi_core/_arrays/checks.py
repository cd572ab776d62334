"""Argument checks. Each raises "{argument} must {rule}, got {value}" before anything is computed."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from alibi_core._arrays.dtypes import FLOATING, floating_name, is_kind, lacks_64_bits
from alibi_core._arrays.libraries import DType, Namespace, brief, is_dimension, is_exporting, is_nested, library_name
from alibi_core._arrays.libraries import is_int as is_int
from alibi_core._arrays.operations import host_values
from alibi_core.capabilities import LIBRARIES

# isinstance takes tuples of types throughout, not unions: torch.compile of PyTorch 2.9 cannot trace unions.

MAX_POSITION = 2**31 - 1  # positions are int32, the one integer type that every library has by default
_SUPPORTED = " or ".join(", ".join(FLOATING).rsplit(", ", 1))  # dtypes, as messages name them


def integer(name: str, value: Any, or_else: str = "") -> int:
    """Return ``value`` as Python's int, or as torch.compile's symbolic integer.

    ``or_else`` ends the error message for an array: it names a function that accepts arrays.
    """
    if not is_int(value):
        how = ""
        if getattr(value, "shape", None) == () and not isinstance(value, np.generic):
            how = f"; int() of an array is one, and a compiled function must take it as a static argument{or_else}"
        raise TypeError(f"{name} must be an integer, got {shown(value)}{how}")
    return int(value) if isinstance(value, np.integer) else value


def positive_int(name: str, value: Any) -> int:
    number = integer(name, value)
    if number < 1:
        raise ValueError(f"{name} must be at least 1, got {brief(value)}")
    return number


def known(name: str, value: int) -> int:
    """Check that a length is no symbol of ``jax.export``."""
    if is_dimension(value):
        raise ValueError(f"{name} must be a number, got the symbol {value}; export a program for each of a few lengths")
    return value


def size(name: str, value: Any) -> int:
    """Check the length of an axis: libraries may store lengths in 32 bits."""
    number = positive_int(name, value)
    if number > MAX_POSITION:
        raise ValueError(f"{name} must be at most {MAX_POSITION}, got {brief(value)}")
    return number


def non_negative_int(name: str, value: Any) -> int:
    number = integer(name, value)
    if number < 0:
        raise ValueError(f"{name} must not be negative, got {brief(value)}")
    return number


def window(value: Any) -> int:
    if isinstance(value, tuple | list):  # as flash-attn has it
        raise TypeError(f"window_size must be one integer, got {value}; is_causal tells whether later keys are seen")
    number = integer("window_size", value)
    if number < 0:  # other libraries take -1 for "no window"
        raise ValueError(f"window_size must not be negative, got {brief(value)}; None is for no window")
    return number


def positions_fit(q_offset: int, q_len: int, kv_len: int) -> None:
    """Check that all positions and distances fit int32, where they would wrap around silently.

    Skipped for symbolic lengths: a comparison would fix the length under torch.export, and raise under jax.export.
    """
    is_symbolic = is_exporting() or any(map(is_dimension, (q_offset, q_len, kv_len)))
    if not is_symbolic and abs(q_offset) + q_len + kv_len > MAX_POSITION:
        raise ValueError(
            f"q_offset and lengths must stay within {MAX_POSITION} tokens, got q_offset {brief(q_offset)}, q_len "
            f"{brief(q_len)}, kv_len {brief(kv_len)}"
        )


def positions_apart(q_positions: Any, kv_positions: Any) -> None:
    """Check that all distances fit int64, where they would wrap silently. Values of traced arrays are not checked."""
    pair = (q_positions, kv_positions)
    values = [host_values(x) for x in pair] if any("64" in str(x.dtype) for x in pair) else []
    found = [x for x in values if x is not None and x.size]
    if not found:
        return
    # Positions must also be less than 2**63 away from 0.
    least, most = min(0.0, *(x.min() for x in found)), max(0.0, *(x.max() for x in found))
    if most - least >= 2.0**63:
        raise ValueError(
            f"q_positions and kv_positions must be less than 2**63 apart, and from 0, got {least:.6g} to {most:.6g}"
        )


def real_number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise TypeError(f"{name} must be a real number, got {shown(value)}")
    if isinstance(value, np.floating):
        value = float(value)  # otherwise comparisons round the Python number to this NumPy precision
    if not -sys.float_info.max <= value <= sys.float_info.max:  # not math.isfinite, which torch.compile cannot trace
        raise ValueError(f"{name} must be finite, got {brief(value)}")
    return float(value)


def number_in(working: DType, name: str, value: Any) -> float:
    """Return ``value`` as a float, having checked that it is finite in the dtype ``working``."""
    number, kind = real_number(name, value), str(floating_name(working))
    if abs(number) > FLOATING[kind].largest:
        raise ValueError(f"{name} must be finite in {kind}, which is computed in, got {number}")
    return number


def positive_number(name: str, value: Any) -> float:
    if real_number(name, value) <= 0:
        raise ValueError(f"{name} must be positive, got {value}")
    return float(value)


def non_negative_number(name: str, value: Any) -> float:
    if real_number(name, value) < 0:
        raise ValueError(f"{name} must not be negative, got {value}")
    return float(value)


def probability(name: str, value: Any) -> float:
    if not 0 <= real_number(name, value) < 1:
        raise ValueError(f"{name} must be in [0, 1), got {value}")
    return float(value)


def boolean(name: str, value: Any) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be True or False, got {shown(value)}")
    return bool(value)


def direction(is_causal: Any, future_slopes: Any | None) -> None:
    """Check ``is_causal``, and that ``future_slopes`` are given only for attention that is not causal."""
    if boolean("is_causal", is_causal) and future_slopes is not None:
        raise ValueError(
            "future_slopes must be None when is_causal=True (there are no future keys), got an array; give "
            "is_causal=False for attention to keys after the query"
        )


def one_of(name: str, value: Any, choices: Sequence[str]) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a string, got {shown(value)}")
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")
    return value


def some_of(name: str, values: Iterable[str], choices: Sequence[str]) -> tuple[str, ...]:
    if isinstance(values, str):
        raise TypeError(f"{name} must be a collection of names, got the string {values!r}")
    return tuple(one_of(name, value, choices) for value in values)


def array(name: str, value: Any) -> Any:
    """Check that ``value`` has a shape and a dtype; ``namespace_of`` checks its library."""
    if is_nested(value):
        raise TypeError(
            f"{name} must be dense, got a nested tensor; give to_padded_tensor(0.0) of it and a mask, or texts packed "
            "into rows and segment_ids"
        )
    if type(value).__name__ == "DTensor":
        raise TypeError(
            f"{name} must be a process's own tensor, got a DTensor; give to_local() of each tensor, with the slopes of "
            "the heads that this process has"
        )
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        how = ""
        if name == "tokens" and isinstance(value, (str, list, tuple)) and any(isinstance(x, str) for x in value):
            how = "; a tokenizer makes tokens of texts"
        elif isinstance(value, (list, tuple)):
            how = "; numpy.asarray, or that of your framework, makes one"
        elif isinstance(value, str) and name == "slopes":
            how = "; alibi_core.slopes(num_heads, scheme=...) makes one"
        elif isinstance(value, str) and name == "mask":
            how = "; is_causal=True hides later keys without a mask"
        elif isinstance(value, float) and name == "slopes":
            how = "; an int stands for that many canonical slopes"
        raise TypeError(f"{name} must be an array, got {shown(value)}{how}")
    return value


def floating_dtype(xp: Namespace, name: str, dtype: DType) -> DType:
    """Return a floating dtype of the library ``xp``; ``dtype`` may also be its name."""
    # By name: the namespace has an attribute for each floating dtype.
    if isinstance(dtype, str) and dtype in FLOATING:
        dtype = getattr(xp, dtype, dtype)
    if not is_kind(xp, dtype, "real floating"):
        library = library_name(xp)
        how = f"; it has {', '.join(LIBRARIES[library].dtypes)}" if library in LIBRARIES else ""
        raise TypeError(f"{name} must be a real floating dtype of {library}, got {brief(dtype)}{how}")
    if floating_name(dtype) is None:
        raise TypeError(f"{name} must be {_SUPPORTED}, got {dtype}")
    if "float64" in str(dtype) and lacks_64_bits(xp):
        raise TypeError(f"{name} must be a dtype that JAX has enabled, got float64; set jax_enable_x64 first")
    return dtype


def floating_array(xp: Namespace, name: str, value: Any) -> Any:
    if not is_kind(xp, array(name, value).dtype, "real floating"):
        how = "; a mask is given as mask=" if name == "slopes" and is_kind(xp, value.dtype, "bool") else ""
        raise TypeError(f"{name} must have a real floating dtype, got {value.dtype}{how}")
    return value


def tensor(xp: Namespace, name: str, value: Any) -> Any:
    """Check for an array of float16, bfloat16, float32 or float64."""
    if floating_name(floating_array(xp, name, value).dtype) is None:
        raise TypeError(f"{name} must be of dtype {_SUPPORTED}, got {value.dtype}; cast it to one of these")
    return value


def integer_array(xp: Namespace, name: str, value: Any) -> Any:
    if not is_kind(xp, array(name, value).dtype, "integral"):
        how = "; cast a padding mask to int32" if is_kind(xp, value.dtype, "bool") else ""
        raise TypeError(f"{name} must have an integer dtype, got {value.dtype}{how}")
    return value


def slopes_shape(name: str, slopes: Any, num_heads: int, batch: tuple[int, ...] = (), axes: str = "") -> None:
    """Check for ``[num_heads]`` or ``[*batch, num_heads]``.

    ``axes`` are the query's axes, in words, for the message: slopes of a wrong length may mean that the query has its
    heads on another axis.
    """
    shape = tuple(slopes.shape)
    if shape not in ((num_heads,), (*batch, num_heads)):
        batched = f" or {(*batch, num_heads)} (batch, num_heads)" if batch else ""
        reminder = f"; query's axes are {axes}" if axes else ""
        raise ValueError(f"{name} must have shape {(num_heads,)} (num_heads){batched}, got {shape}{reminder}")


def slopes_count(name: str, count: Any, num_heads: int, axes: str, divided: Sequence[str] = ()) -> None:
    """Check that an int given for slopes is the number of heads.

    It is refused if mesh axes divide the query, because they may divide the heads.
    """
    if divided:
        raise ValueError(
            f"{name} must be an array where query is divided along {', '.join(map(repr, divided))}, as its {num_heads} "
            f"heads may be a part of all heads: give alibi_core.slopes({num_heads}) if they are not, else their part "
            f"of the slopes of all heads; got {brief(count)}"
        )
    if count == num_heads:
        return
    if name == "future_slopes":
        raise ValueError(
            f"{name} must be an array, or {num_heads} (num_heads) for canonical ones, got {brief(count)}; an array of "
            "zeros gives the clamped form"
        )
    raise ValueError(f"{name} must count the heads of query, {num_heads}, got {brief(count)}; its axes are {axes}")


def slopes_values(name: str, slopes: Any, *, allow_negative: bool, working: DType = "float64") -> None:
    """Check that slopes are finite and not negative, where reading the values does not make the host wait.

    Their products with distances must be finite in the dtype ``working``, float32 or float64, of any library.
    """
    values = host_values(slopes)
    if values is None:
        return
    if not np.all(np.isfinite(values)):
        raise ValueError(f"{name} must be finite, got {values.tolist()}")
    kind = floating_name(working) or "float64"
    # A larger slope times the largest distance overflows.
    most = FLOATING[kind].largest / (MAX_POSITION + 1)
    if np.any(np.abs(values) > most):
        raise ValueError(
            f"{name} must be at most {most:.4g} in size, for {kind} to hold their products with distances, got "
            f"{values.tolist()}"
        )
    if not allow_negative and np.any(values < 0):
        raise ValueError(
            f"{name} must not be negative (the bias is -slopes * distance), got {values.tolist()}; "
            "pass allow_negative_slopes=True if far keys are meant to be rewarded"
        )


def broadcasts(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    # Align the last axes, as broadcasting does.
    padded = (1,) * (len(target) - len(shape)) + tuple(shape)
    return len(shape) <= len(target) and all(n in (1, m) for n, m in zip(padded, target, strict=True))


def broadcastable(name: str, shape: tuple[int, ...], target: tuple[int, ...], axes: str, fix: str = "") -> None:
    """Check that ``shape`` broadcasts to ``target``, whose axes are called ``axes`` in the message."""
    if not broadcasts(shape, target):
        raise ValueError(f"{name} must broadcast to {target} ({axes}), got {tuple(shape)}{fix}")


def by_token(name: str, shape: tuple[int, ...], target: tuple[int, ...], axes: str) -> None:
    """Check that ``shape`` broadcasts to ``target``, with the tokens of its last axis one by one."""
    broadcastable(name, shape, target, axes)
    if tuple(shape)[-1:] != target[-1:]:
        raise ValueError(f"{name} must end in the axis {axes.split(', ')[-1]}, {target[-1]}, got shape {tuple(shape)}")


def read(name: str, array: Any) -> np.ndarray[Any, Any]:
    """Return an array of any library, or a list, as NumPy's; refuse one that a compiler or a mapping traces."""
    try:
        return np.asarray(array.cpu() if hasattr(array, "cpu") else array)
    except Exception:  # each library raises another error
        raise ValueError(
            f"{name} must be an array with values, got {shown(array)}; give NumPy's, or make the call outside of the "
            "compiled, exported or mapped function"
        ) from None


def shown(value: Any) -> str:
    """Return the text and the type of a value, for an error message."""
    return f"{brief(value)} ({type(value).__name__})"


def install_hint(extra: str) -> str:
    """Return the end of an error about a missing extra: how to install it. No package index has this library yet."""
    return f"install with pip install '.[{extra}]' in a checkout of alibi-core"
