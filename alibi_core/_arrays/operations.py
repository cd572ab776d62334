"""Operations on arrays in which one library differs from the standard, or that the standard lacks."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

import array_api_compat
import numpy as np

from alibi_core._arrays.dtypes import floating_name, lacks_64_bits
from alibi_core._arrays.libraries import Device, DType, Namespace, brief, is_jax, is_mlx, is_numpy, library_name


def known_device(xp: Namespace, device: Device | None) -> Device | None:
    """Check that the library has ``device``, and return it."""
    if device is not None:
        placement = _placement(xp, device)
        try:
            xp.zeros((0,), **placement)
        except Exception as error:
            raise ValueError(f"device must be one that {library_name(xp)} has, got {brief(device)}") from error
    return device


def device_of(xp: Namespace, array: Any) -> Device | None:
    """Return the device for new arrays that are combined with ``array``; None where the library moves them itself."""
    # JAX moves uncommitted arrays by itself (and a traced array has no device); MLX has one memory for all.
    if is_mlx(xp) or is_jax(xp):
        return None
    if library_name(xp) == "torch":
        return array.device  # as array_api_compat.device does, but without its cache, which torch.compile warns of
    return array_api_compat.device(array)


def asarray(xp: Namespace, values: Any, dtype: DType, device: Device | None) -> Any:
    """``xp.asarray``, without the argument ``device`` if it is None."""
    if library_name(xp) == "torch" and isinstance(values, (int, float)):
        # full() passes the number to a GPU as a kernel argument; asarray would copy it and wait.
        return xp.full((), values, dtype=dtype, device=device)
    return xp.asarray(values, dtype=dtype, **_placement(xp, device))


def arange(xp: Namespace, stop: int, device: Device | None, start: int = 0) -> Any:
    """Return ``[start, ..., stop - 1]`` as int32, the one integer type that every library has by default."""
    return xp.arange(start, stop, 1, dtype=xp.int32, **_placement(xp, device))


def _placement(xp: Namespace, device: Device | None) -> dict[str, Device]:
    if device is not None and is_mlx(xp):
        raise ValueError(f"device must be None with MLX, whose arrays live in one memory, got {brief(device)}")
    return {} if device is None else {"device": device}


def adopted(xp: Namespace, slopes: Any, device: Device | None) -> Any:
    """Return slopes as an array of the library ``xp`` if they are a floating NumPy array, else unchanged."""
    if not is_numpy(slopes) or library_name(xp) == "numpy":
        return slopes
    if library_name(xp) == "torch" and sys.modules["torch"].compiler.is_compiling():
        return xp.asarray(slopes.copy(), device=device)  # torch.compile cannot trace the code below, NumPy's dtypes
    name = floating_name(slopes.dtype)
    if name is None:
        return slopes
    name = "float32" if name == "float64" and lacks_64_bits(xp) else name
    with np.errstate(over="ignore"):  # slopes that overflow to inf are refused later
        # Through NumPy and float32 (or float64): every library can read these.
        values = np.array(slopes, np.float64 if name == "float64" else np.float32, order="C")
    with _with_values(xp):
        return asarray(xp, values, getattr(xp, name), device)


def is_constant(value: Any, tensor: Any) -> bool:
    """Whether ``value`` is an array of NumPy that may come with ``tensor``: one of JAX, whose functions take both."""
    numbers = is_numpy(value) and value.dtype.kind in "biuf"
    return numbers and "jax" in sys.modules and isinstance(tensor, sys.modules["jax"].Array)


def constant(xp: Namespace, name: str, value: Any, device: Device | None) -> Any:
    """Return a NumPy array as the equal array of JAX.

    Raises:
        ValueError: If JAX has no dtype for its values, with 32 bits by default.
    """
    dtype = value.dtype
    if lacks_64_bits(xp) and dtype.itemsize == 8:
        dtype = np.dtype(f"{dtype.kind}4")
    with np.errstate(over="ignore", invalid="ignore"):
        narrow = value.astype(dtype)
    if dtype != value.dtype and not np.array_equal(narrow, value, equal_nan=True):
        raise ValueError(f"{name} must have values of {dtype}, got others in {value.dtype}; round them by astype")
    with _with_values(xp):
        return xp.asarray(narrow, device=device)


def _with_values(xp: Namespace) -> contextlib.AbstractContextManager[object]:
    """Return a context in which JAX makes arrays with values inside ``jax.jit`` too, so that these can be checked."""
    return sys.modules["jax"].ensure_compile_time_eval() if is_jax(xp) else contextlib.nullcontext()


def astype(xp: Namespace, array: Any, dtype: DType) -> Any:
    """``xp.astype``, without a copy if the array has the dtype already."""
    return array if array.dtype == dtype else xp.astype(array, dtype)


def narrowed(xp: Namespace, array: Any, dtype: DType) -> Any:
    """``astype`` of floats to a narrower dtype; overflow gives inf, without NumPy's warning."""
    if library_name(xp) != "numpy":
        return astype(xp, array, dtype)
    with np.errstate(over="ignore"):
        return astype(xp, array, dtype)


def signed(xp: Namespace, integers: Any) -> Any:
    """Return integers as int32, or as int64 where their dtype needs it and the library has int64.

    Equal values stay equal, but large unsigned values may wrap to negative ones.
    """
    needs_int64 = str(integers.dtype).rpartition(".")[2] in ("int64", "uint32", "uint64")
    return astype(xp, integers, xp.int64 if needs_int64 and not lacks_64_bits(xp) else xp.int32)


def running_sum(xp: Namespace, array: Any) -> Any:
    """Return the cumulative sum along the last axis."""
    if library_name(xp) == "torch":
        return xp.cumsum(array, dim=-1)  # not array_api_compat's: torch.compile warns of its cache
    return xp.cumulative_sum(array, axis=-1)


def running_max(xp: Namespace, array: Any) -> Any:
    """Return the cumulative maximum along the last axis; the standard has no such function."""
    if library_name(xp) == "torch":
        return xp.cummax(array, dim=-1).values
    if is_jax(xp):
        return sys.modules["jax"].lax.cummax(array, axis=array.ndim - 1)
    if library_name(xp) == "numpy":
        return np.maximum.accumulate(array, axis=-1)
    raise NotImplementedError(f"running_max must be given arrays of numpy, torch or jax, got {library_name(xp)}")


def along_axis(xp: Namespace, array: Any, index: Any, axis: int) -> Any:
    """``xp.take_along_axis`` that broadcasts the other axes; ``xp.take`` if ``index`` has one axis.

    All indices must be within the array.
    """
    if index.ndim == 1 < array.ndim:
        return xp.take(array, index if lacks_64_bits(xp) else astype(xp, index, xp.int64), axis=axis)  # as ndonnx asks
    others = [(*x.shape[:axis], 1, *x.shape[axis:][1:]) for x in (array, index)]
    if library_name(xp) == "torch":
        # Not take_along_dim, under which torch.export fixes all sizes. The axis itself is not broadcast.
        wide = list(xp.broadcast_shapes(*others))
        wide[axis] = -1
        return xp.gather(array.expand(wide), axis, index.long().expand(wide))
    if is_jax(xp):
        return xp.take_along_axis(array, index, axis=axis, mode="clip")  # the default mode tests each index
    if library_name(xp) == "dask.array":  # it lacks the function: NumPy's, in one block
        wide = list(np.broadcast_shapes(*others))
        whole = [
            xp.broadcast_to(x, (*wide[:axis], x.shape[axis], *wide[axis:][1:])).rechunk(-1) for x in (array, index)
        ]
        return xp.map_blocks(np.take_along_axis, *whole, axis, dtype=array.dtype, chunks=whole[1].shape)
    if is_mlx(xp):
        index = stop_gradient(xp, index)  # MLX would differentiate indices that depend on differentiated arrays
    return xp.take_along_axis(array, index, axis=axis)


def at_most(xp: Namespace, array: Any, limit: Any) -> Any:
    """Return the elementwise minimum of array and limit; a NaN in the array stays."""
    return array.clamp(max=limit) if _prefers_clamp(xp, array) else xp.where(array > limit, limit, array)


def at_least(xp: Namespace, array: Any, limit: Any) -> Any:
    """Return the elementwise maximum of array and limit; a NaN in the array stays."""
    return array.clamp(min=limit) if _prefers_clamp(xp, array) else xp.where(array < limit, limit, array)


def _prefers_clamp(xp: Namespace, array: Any) -> bool:
    """Whether to use ``clamp`` instead of a comparison and ``where``: for PyTorch's integers.

    torch.compile recomputes an operation's inputs at each use on GPUs. ``where`` uses its input twice, so twenty such
    steps in a row grew to a hundred thousand operations. (torch.compile cannot trace ``xp.clip``.)
    """
    return library_name(xp) == "torch" and array.dtype in (xp.int32, xp.int64)


def joined(xp: Namespace, one: Any, other: Any) -> Any:
    """``xp.concat`` along the last axis; one chunk in Dask, which would divide the result of each further step."""
    found = xp.concat([one, other], axis=-1)
    return found.rechunk(-1) if library_name(xp) == "dask.array" else found


def stop_gradient(xp: Namespace, array: Any) -> Any:
    """Return an array as a constant where gradients are taken."""
    if is_mlx(xp):
        return xp.stop_gradient(array)
    if is_jax(xp):
        return sys.modules["jax"].lax.stop_gradient(array)
    return array.detach() if library_name(xp) == "torch" else array


def extended(xp: Namespace, array: Any, missing: int) -> Any:
    """Return ``array`` padded along the last axis with ``missing`` copies of its last element."""
    length = array.shape[-1]
    if library_name(xp) == "torch":  # torch.compile fuses a gather with its consumers, but not a concatenation
        return xp.take(array, arange(xp, length + missing, array.device).clamp(max=length - 1), axis=-1)
    return xp.concat([array, xp.broadcast_to(array[..., -1:], (*array.shape[:-1], missing))], axis=-1)


def in_doubling_steps(xp: Namespace, step: Callable[[Any, Any], Any], arrays: Any, length: int) -> Any:
    """Return ``step(arrays, shifted)`` of arrays, again and again; shifted by 1, 2, 4, ... below ``length``.

    Shifted arrays begin 1, 2, 4, ... elements later along the last axis, and end with zeros. JAX compiles one step for
    all: unrolled, its compiler would compute each step again at each use, twice as often each step.
    """
    if is_jax(xp):
        lax = sys.modules["jax"].lax

        def later(index: Any, array: Any) -> Any:
            return lax.dynamic_slice_in_dim(joined(xp, array, xp.zeros_like(array)), 1 << index, length, array.ndim - 1)

        count = max(length - 1, 0).bit_length()
        return lax.fori_loop(0, count, lambda i, found: step(found, tuple(later(i, x) for x in found)), arrays)
    size = 1
    while size < length:
        arrays = step(arrays, tuple(joined(xp, x[..., size:], xp.zeros_like(x[..., :size])) for x in arrays))
        size *= 2
    return arrays


def on_host(xp: Namespace, array: Any) -> np.ndarray[Any, Any]:
    """Return an array as NumPy's; this waits for its values."""
    if library_name(xp) == "array_api_strict":  # NumPy reads its CPU_DEVICE only
        array = xp.asarray(array, device=xp.Device("CPU_DEVICE"))
    return np.asarray(array.detach().cpu() if library_name(xp) == "torch" else array)


def host_values(array: Any) -> np.ndarray[Any, Any] | None:
    """Return a small array's values as NumPy float64, or None if the host would have to wait for them.

    None is returned for an array that is traced (``jax.jit``, ``torch.compile``, ``mx.compile``, ``vmap``), a Dask
    graph, or on an accelerator. Argument checks that need values skip such arrays. A lazy MLX array is computed here:
    MLX does not tell whether it has been.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        # Reading would wait for an accelerator, and fail under a compiler.
        if torch.compiler.is_compiling() or array.device.type != "cpu" or array.is_complex():
            return None
        array = array.detach().double()
    elif _is_lazy_or_far(array):
        return None
    try:
        return np.asarray(array.tolist() if hasattr(array, "tolist") else array, dtype=np.float64)
    except Exception:
        return None


def _is_lazy_or_far(array: Any) -> bool:
    # Dask arrays are lazy; CuPy arrays are on a GPU.
    if array_api_compat.is_dask_array(array) or array_api_compat.is_cupy_array(array):
        return True
    if not array_api_compat.is_jax_array(array):
        return False
    try:
        # devices() raises for a traced array.
        return any(device.platform != "cpu" for device in array.devices())
    except Exception:
        return True
