"""Array libraries: their namespaces, and the functions in which one of them differs from the standard.

The core is written against the array API standard of 2024.12 (data-apis.org/array-api), whose functions take Python
scalars beside arrays. Work-arounds for one library belong in this module.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import array_api_compat
import numpy as np

from alibi_core.capabilities import LIBRARIES

# A namespace is a module (or an object like one) with the functions of the array API standard. Modules have no
# useful structural type, so these aliases are for readers only.
Namespace = Any
DType = Any
Device = Any
Function = TypeVar("Function", bound=Callable[..., Any])

# Accepted names of a namespace: the module's name, or the name of the extra which installs the library.
NAMED = {name: name for name in (*LIBRARIES, "cupy")} | {"pytorch": "torch", "jax": "jax.numpy", "mlx": "mlx.core"}
FLOATING = ("float64", "float32", "bfloat16", "float16")  # the supported floating dtypes


class Array(Protocol):
    """An array of the array API standard, recognised by these attributes."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def ndim(self) -> int: ...
    @property
    def dtype(self) -> DType: ...


def namespace_of(*arrays: Array | None, xp: Namespace | None = None, names: Sequence[str] = ()) -> Namespace:
    """Return the array API namespace of ``arrays`` (NumPy if there are none), wrapped where its library needs it.

    Args:
        *arrays: Arrays of one library; None is passed over.
        xp: The namespace that the arrays must belong to, as the user imported it (``torch``, ``jax.numpy``, ...) or
            by its name; or None.
        names: Argument names of the arrays, one each, for the message.

    Raises:
        TypeError: If an argument is no array, if the arrays belong to different libraries, or if they do not belong
            to ``xp``.
    """
    if isinstance(xp, str) and xp in NAMED:
        xp = sys.modules.get(NAMED[xp]) or _imported(NAMED[xp])  # torch.compile cannot trace an import
    if xp is not None and not (hasattr(xp, "asarray") or hasattr(xp, "array")):
        raise TypeError(
            f"xp must be an array namespace such as numpy, torch or jax.numpy, or the name of one, got {brief(xp)}; "
            f"names are {', '.join(map(repr, NAMED))}"
        )
    # Compare names: torch and its compat wrapper are two modules of one library.
    found = [_namespace_of_one(array) for array in arrays if array is not None]
    libraries = {library_name(namespace) for namespace in found} | (set() if xp is None else {library_name(xp)})
    if len(libraries) > 1:
        listed = " and ".join(sorted(libraries))
        how = "convert them to one"
        if xp is not None:
            # Name the arguments that belong to another library than xp.
            strange = [x for x, of in zip(names, found, strict=False) if library_name(of) != library_name(xp)]
            which, listed_names = ("these", f": {', '.join(strange)}") if strange else ("the others", "")
            how = f"make {which} arrays of {library_name(xp)}, by {library_name(xp)}.asarray{listed_names}"
        raise TypeError(f"arrays must belong to one array namespace, got {listed}; {how}")
    if found:
        return found[0]
    # Without arrays the namespace is found from xp itself.
    if xp is not None and _is_mlx(xp):
        return MLXNamespace(xp)
    return _namespace_of_one((np if xp is None else xp).asarray(0))


def _imported(name: str) -> Namespace:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"xp must name a library that is installed, got {name!r}; {error}") from None


def _namespace_of_one(array: Any) -> Namespace:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        # Not array_api_compat.array_namespace: it is cached, and torch.compile warns when it traces through a cache.
        import array_api_compat.torch as namespace

        # Sparse tensors would fail later, with an unclear error.
        if array.layout != torch.strided:
            raise TypeError(f"arrays must be dense, got a tensor of layout {array.layout}; to_dense makes it one")
        return namespace
    mlx = sys.modules.get("mlx.core")
    if mlx is not None and isinstance(array, mlx.array):
        return MLXNamespace(mlx)  # same result as below in a tenth of the time: a call of MLX itself is short
    if not hasattr(array, "shape") or not hasattr(array, "dtype"):
        raise TypeError(f"argument must be an array of an array API library, got {type(array).__name__}")
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError("arrays must be plain, got a numpy.ma.MaskedArray, whose mask would be lost; pass its data")
    namespace = array_api_compat.array_namespace(array)
    return MLXNamespace(namespace) if _is_mlx(namespace) else namespace


def is_int(value: Any) -> bool:
    """Whether ``value`` is an integer of Python or NumPy, or a symbolic one of ``torch`` or ``jax.export``; no bool."""
    if isinstance(value, bool):
        return False
    torch = sys.modules.get("torch")
    is_number = isinstance(value, (int, np.integer)) or (torch is not None and isinstance(value, torch.SymInt))
    return is_number or is_dimension(value)


def is_dimension(value: Any) -> bool:
    """Whether ``value`` is a symbolic dimension of ``jax.export``: some comparisons of it raise."""
    export = sys.modules.get("jax.export")
    if export is None or isinstance(value, int):  # so are symbols of torch.compile, which cannot trace what follows
        return False
    return not hasattr(value, "dtype") and bool(export.is_symbolic_dim(value))


def is_nested(value: Any) -> bool:
    """Whether a value is a nested tensor of PyTorch, which may have no shape."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor) and bool(value.is_nested)


def brief(value: Any) -> str:
    """Return the text of a value for a message, cut to 40 characters."""
    is_number = isinstance(value, (int, np.integer))
    try:
        shown = str(value) if is_number else repr(value)
    except ValueError:  # raised by Python for integers over 4,300 digits, by MLX for arrays that mx.compile traces
        return "an integer of thousands of digits" if is_number else "an array of no value yet"
    return shown if len(shown) <= 40 else f"{shown[:37]}..."


def library_name(xp: Namespace) -> str:
    """Return the library's public name: ``torch``, ``jax.numpy``, ``mlx.core``, ..."""
    return str(xp.__name__).removeprefix("array_api_compat.")


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
    return sys.modules["jax"].ensure_compile_time_eval() if _is_jax(xp) else contextlib.nullcontext()


def is_numpy(value: Any) -> bool:
    """Whether a value is a plain array of NumPy."""
    return type(value) is np.ndarray


def _is_mlx(xp: Namespace) -> bool:
    return library_name(xp) == "mlx.core"


def _is_jax(xp: Namespace) -> bool:
    return library_name(xp) == "jax.numpy"


def divided_along(xp: Namespace, array: Any) -> list[str]:
    """Return the mesh axes along which an array may be divided by hand: inside ``jax.shard_map`` or ``jax.pmap``.

    Which of the array's axes they divide is not known.
    """
    if not _is_jax(xp):
        return []
    jax = sys.modules["jax"]
    mesh = jax.sharding.get_abstract_mesh()

    def varies(value: Any, name: str) -> bool:
        kind = jax.typeof(value)
        return name in (kind.manual_axis_type.varying if hasattr(kind, "manual_axis_type") else kind.vma)

    axes = [name for name in mesh.manual_axes if mesh.shape[name] > 1]
    # With check_vma=False types do not say along which axes values vary: an index does not vary along its own.
    return [name for name in axes if varies(array, name) or not varies(jax.lax.axis_index(name), name)]


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
    if _is_mlx(xp) or _is_jax(xp):
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
    if device is not None and _is_mlx(xp):
        raise ValueError(f"device must be None with MLX, whose arrays live in one memory, got {brief(device)}")
    return {} if device is None else {"device": device}


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
    if _is_jax(xp):
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
    if library_name(xp) == "torch":
        # Not take_along_dim, under which torch.export fixes all sizes. The axis itself is not broadcast.
        wide = list(xp.broadcast_shapes(*((*x.shape[:axis], 1, *x.shape[axis:][1:]) for x in (array, index))))
        wide[axis] = -1
        return xp.gather(array.expand(wide), axis, index.long().expand(wide))
    if _is_jax(xp):
        return xp.take_along_axis(array, index, axis=axis, mode="clip")  # the default mode tests each index
    if _is_mlx(xp):
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
    if _is_mlx(xp):
        return xp.stop_gradient(array)
    if _is_jax(xp):
        return sys.modules["jax"].lax.stop_gradient(array)
    return array.detach() if library_name(xp) == "torch" else array


def extended(xp: Namespace, array: Any, missing: int) -> Any:
    """Return ``array`` padded along the last axis with ``missing`` copies of its last element."""
    length = array.shape[-1]
    if library_name(xp) == "torch":  # torch.compile fuses a gather with its consumers, but not a concatenation
        return xp.take(array, arange(xp, length + missing, array.device).clamp(max=length - 1), axis=-1)
    return xp.concat([array, xp.broadcast_to(array[..., -1:], (*array.shape[:-1], missing))], axis=-1)


def associative_scan(xp: Namespace) -> Callable[..., Any] | None:
    """Return JAX's scan from the last element of the last axis; None for other libraries.

    JAX's compiler computes steps of a scan in the standard's operations again at each use, twice as often each step.
    """
    if not _is_jax(xp):
        return None
    scan = sys.modules["jax"].lax.associative_scan
    return lambda add, arrays: scan(add, arrays, reverse=True, axis=arrays[0].ndim - 1)


def on_host(xp: Namespace, array: Any) -> np.ndarray[Any, Any]:
    """Return an array as NumPy's; this waits for its values."""
    if library_name(xp) == "array_api_strict":  # NumPy reads its CPU_DEVICE only
        array = xp.asarray(array, device=xp.Device("CPU_DEVICE"))
    return np.asarray(array.detach().cpu() if library_name(xp) == "torch" else array)


def constant_when_traced(function: Function) -> Function:
    """Mark a function so that ``torch.compile`` calls it while tracing and takes the result as a constant."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]  # like torch.compiler.assume_constant_result
    return function


def lacks_64_bits(xp: Namespace) -> bool:
    """Whether ``xp`` silently narrows 64-bit dtypes to 32 bits (JAX without ``jax_enable_x64``)."""
    return _is_jax(xp) and "float64" not in xp.__array_namespace_info__().dtypes(kind="real floating")


def has_float64(xp: Namespace) -> bool:
    """Whether arrays of the library can be float64 on every device; MLX has it on the CPU alone."""
    return not (lacks_64_bits(xp) or _is_mlx(xp))


def is_exporting() -> bool:
    """Whether ``torch.export`` traces: it turns a comparison of dynamic sizes into a guard on them."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.compiler.is_exporting())


def is_never_negative(number: Any) -> bool:
    """Whether an integer is at least 0; False for a symbol of ``jax.export`` or ``torch.export`` that may be less."""
    if is_exporting() and not isinstance(number, int):
        proves = sys.modules["torch"].fx.experimental.symbolic_shapes.statically_known_true
        return bool(proves(number >= 0))  # bool() of the comparison would limit the lengths that the program takes
    try:
        return bool(number >= 0)
    except Exception:
        if is_dimension(number):  # jax.export cannot decide it
            return False
        raise


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


class MLXNamespace:
    """``mlx.core``, whose functions are those of the standard, without the faults of two of them."""

    def __init__(self, core: Namespace) -> None:
        self._core = core
        self.__name__ = core.__name__

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)

    def matmul(self, one: Any, other: Any) -> Any:
        if one.size and other.size:
            return self._core.matmul(one, other)
        # MLX on the CPU (0.32 and before) writes to freed memory if a matrix product is empty.
        # [*batch, rows, columns] of zeros
        batch = np.broadcast_shapes(one.shape[:-2], other.shape[:-2])
        return self._core.zeros((*batch, one.shape[-2], other.shape[-1]), dtype=one.dtype)

    def exp(self, array: Any) -> Any:
        # MLX (0.32 and before) computes exp of float64 in float32; its power is exact.
        if array.dtype != self._core.float64:
            return self._core.exp(array)
        return self._core.power(self._core.asarray(math.e, dtype=self._core.float64), array)
