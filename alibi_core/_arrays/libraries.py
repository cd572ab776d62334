"""Array libraries: the namespace of an array, and what sets one library apart.

The core is written against the array API standard of 2024.12 (data-apis.org/array-api), whose functions take Python
scalars beside arrays. Work-arounds for one library belong in this folder.
"""

from __future__ import annotations

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
    if xp is not None and is_mlx(xp):
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
    return MLXNamespace(namespace) if is_mlx(namespace) else namespace


def library_name(xp: Namespace) -> str:
    """Return the library's public name: ``torch``, ``jax.numpy``, ``mlx.core``, ..."""
    return str(xp.__name__).removeprefix("array_api_compat.")


def is_numpy(value: Any) -> bool:
    """Whether a value is a plain array of NumPy."""
    return type(value) is np.ndarray


def is_mlx(xp: Namespace) -> bool:
    return library_name(xp) == "mlx.core"


def is_jax(xp: Namespace) -> bool:
    return library_name(xp) == "jax.numpy"


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


def brief(value: Any) -> str:
    """Return the text of a value for a message, cut to 40 characters."""
    is_number = isinstance(value, (int, np.integer))
    try:
        shown = str(value) if is_number else repr(value)
    except ValueError:  # raised by Python for integers over 4,300 digits, by MLX for arrays that mx.compile traces
        return "an integer of thousands of digits" if is_number else "an array of no value yet"
    return shown if len(shown) <= 40 else f"{shown[:37]}..."


def divided_along(xp: Namespace, array: Any) -> list[str]:
    """Return the mesh axes along which an array may be divided by hand: inside ``jax.shard_map`` or ``jax.pmap``.

    Which of the array's axes they divide is not known.
    """
    if not is_jax(xp):
        return []
    jax = sys.modules["jax"]
    mesh = jax.sharding.get_abstract_mesh()

    def varies(value: Any, name: str) -> bool:
        kind = jax.typeof(value)
        return name in (kind.manual_axis_type.varying if hasattr(kind, "manual_axis_type") else kind.vma)

    axes = [name for name in mesh.manual_axes if mesh.shape[name] > 1]
    # With check_vma=False types do not say along which axes values vary: an index does not vary along its own.
    return [name for name in axes if varies(array, name) or not varies(jax.lax.axis_index(name), name)]


def constant_when_traced(function: Function) -> Function:
    """Mark a function so that ``torch.compile`` calls it while tracing and takes the result as a constant."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]  # like torch.compiler.assume_constant_result
    return function


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
