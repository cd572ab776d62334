"""Adapters for attention functions of array libraries: they convert NumPy arrays to the library's and back."""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import alibi_core
from alibi_core._arrays import checks
from alibi_core.conformance.adapter import MOST_TOKENS
from alibi_core.conformance.caller import GRADIENTS
from alibi_core.conformance.case import FEATURES
from alibi_core.conformance.oracle import UNIT_ROUNDOFF
from alibi_core.conformance.reference import TENSORS, Values

ENTRY_POINTS = "alibi_core.conformance"


@dataclass(frozen=True)
class Library:
    """Conversion of arrays to a library and back, and its gradients.

    Attributes:
        xp: The namespace.
        array: ``array(values, dtype)`` converts a NumPy array to the library's; ``dtype`` is a name, or None for the
            dtype of the values.
        numpy: ``numpy(array)`` converts an array to NumPy; bfloat16, which NumPy lacks, becomes float32.
        gradients: ``gradients(function, arguments, wrt, weight)`` returns the gradients of
            ``sum(function(**arguments) * weight)`` by the arguments named in ``wrt``; None without gradients.
            ``weight`` is an array, or a number if it is constant: then create it inside the compiled function, as a
            loss that is a sum does.
        compiled: Compiles a function as one program, for libraries that compile each operation for each shape; default:
            no compilation.

    Example:
        NumPy, which has no gradients and compiles nothing:

        >>> library = Library(np, lambda values, dtype: np.asarray(values, dtype), np.asarray)
        >>> library.array([1.0, 2.0], "float32").dtype
        dtype('float32')
    """

    xp: Any
    array: Callable[[Values, str | None], Any]
    numpy: Callable[[Any], Values]
    gradients: Callable[[Callable[..., Any], Mapping[str, Any], tuple[str, ...], Any], Sequence[Any]] | None = None
    compiled: Callable[[Callable[[], Any]], Callable[[], Any]] = lambda function: function


class BackendAdapter:
    """An attention function with the arguments of this library's backends, as an adapter.

    Args:
        name: Name in reports.
        library: Library of the function's arrays.
        attention: ``attention(query, key, value, slopes, **arguments)``.
        dtype: Name of the dtype of tensors.
        length_first: Whether its tensors are ``[batch, length, heads, head_dim]``, and gates ``[batch, length,
            heads]``.
        cached: Decoding step: ``cached(query, key, value, slopes, cache)`` returns ``(output, cache)``, heads first,
            for sequences of at most ``MAX_LENGTH`` tokens. Default: no decoding.
        lacks: The names in ``FEATURES`` that the functions do not have.

    Example:
        >>> from alibi_core.conformance import check
        >>> library = Library(np, lambda values, dtype: np.asarray(values, dtype), np.asarray)
        >>> mine = BackendAdapter("mine", library, alibi_core.attention)
        >>> check(mine, laws=["causal"]).passed
        True
    """

    MAX_LENGTH = MOST_TOKENS

    def __init__(
        self,
        name: str,
        library: Library,
        attention: Callable[..., Any],
        *,
        dtype: str = "float32",
        length_first: bool = False,
        cached: Callable[..., tuple[Any, Any]] | None = None,
        lacks: Iterable[str] = ("continuations",),
    ) -> None:
        self.name, self.dtype = name, dtype
        self.features = frozenset(FEATURES) - set(checks.some_of("lacks", lacks, tuple(FEATURES)))
        self._library, self._attention, self._length_first = library, attention, length_first
        if library.gradients is not None:
            self.attention_grad = self._attention_grad
        if cached is not None:
            self._cached = cached
            self.decode_step = self._decode_step

    @property
    def _wide(self) -> dict[str, Any]:
        xp = self._library.xp
        return {"xp": xp, "dtype": xp.float64 if self.dtype == "float64" else xp.float32}

    def slopes(self, num_heads: int) -> Values:
        """Return the core's slopes, computed in the library."""
        return self._library.numpy(alibi_core.slopes(num_heads, **self._wide))

    def bias(self, num_heads: int, q_len: int, kv_len: int, is_causal: bool) -> Values:
        """Return the core's bias, computed in the library."""
        bias = functools.partial(alibi_core.bias, num_heads, q_len, kv_len, is_causal=is_causal, **self._wide)
        return self._library.numpy(self._library.compiled(bias)())

    def attention(self, query: Values, key: Values, value: Values, slopes: Values, **arguments: Any) -> Values:
        """Return the function's result."""
        tensors = [self._tensor(x) for x in (query, key, value)]
        others = self._arguments(query, key, arguments)
        return self._result(self._attention(*tensors, self._place(slopes), **others), tensors[0])

    def _attention_grad(
        self,
        query: Values,
        key: Values,
        value: Values,
        slopes: Values,
        *,
        grad_output: Values,
        wrt: tuple[str, ...] | None = None,
        **arguments: Any,
    ) -> dict[str, Values]:
        """Return the library's gradients."""
        inputs = {name: self._tensor(x) for name, x in (("query", query), ("key", key), ("value", value))}
        inputs |= {"slopes": self._place(slopes), **self._arguments(query, key, arguments)}
        names = GRADIENTS if "slope_gradients" in self.features else TENSORS
        wrt = wrt or tuple(name for name in names if name in inputs)
        # A constant weight is passed as a number, so that a compiler sees a constant.
        is_constant = grad_output.size > 0 and bool((grad_output == grad_output.flat[0]).all())
        weight = float(grad_output.flat[0]) if is_constant else self._tensor(grad_output)
        assert self._library.gradients is not None
        found = self._library.gradients(self._attention, inputs, wrt, weight)
        return {
            name: self._library.numpy(x) if "slopes" in name else self._result(x, inputs[name])
            for name, x in zip(wrt, found, strict=True)
        }

    def _decode_step(self, query: Values, key: Values, value: Values, slopes: Values, cache: Any) -> tuple[Values, Any]:
        """Return the output of a decoding step of the library, and its cache."""
        tensors = [self._library.array(x, self.dtype) for x in (query, key, value)]
        result, cache = self._cached(*tensors, self._place(slopes), cache)
        return self._library.numpy(result), cache

    def _tensor(self, values: Values) -> Any:
        return self._library.array(self._laid_out(values), self.dtype)

    def _laid_out(self, values: Values) -> Values:
        return np.swapaxes(values, 1, 2) if self._length_first else values

    def _result(self, result: Any, like: Any) -> Values:
        if result.dtype != like.dtype:
            raise TypeError(f"{result.dtype} came of {like.dtype}")
        return self._laid_out(self._library.numpy(result))

    def _place(self, values: Any) -> Any:
        if isinstance(values, tuple):
            return tuple(self._place(x) for x in values)
        return self._library.array(values, None) if isinstance(values, np.ndarray) else values

    def _arguments(self, query: Values, key: Values, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments as arrays of the library, without arguments that have their default value."""
        defaults = {"is_causal": True, "q_offset": key.shape[2] - query.shape[2]}
        return {
            name: self._place(self._laid_out(x) if name == "log_gates" else x)
            for name, x in arguments.items()
            if name not in defaults or isinstance(x, np.ndarray) or x != defaults[name]
        }


def installed_adapters(*, dtypes: Iterable[str] | None = ("float32",)) -> list[Any]:
    """Return the adapters of installed backends and of other packages that register adapters.

    A package registers a function without arguments that returns adapters, as an entry point of the group
    ``alibi_core.conformance``. Packages whose framework is not installed are skipped.

    Args:
        dtypes: Names of the dtypes of the adapters to return; None for all.

    Example:
        >>> "alibi_core" in [adapter.name for adapter in installed_adapters(dtypes=["float64"])]
        True
    """
    if dtypes is not None:
        dtypes = checks.some_of("dtypes", dtypes, tuple(UNIT_ROUNDOFF))
    adapters: list[Any] = []
    for entry in sorted(importlib.metadata.entry_points(group=ENTRY_POINTS), key=lambda x: x.name):
        try:
            make = entry.load()
        except ModuleNotFoundError:
            continue
        adapters += make()
    return [x for x in adapters if dtypes is None or getattr(x, "dtype", "float32") in dtypes]


def numpy_adapters() -> list[BackendAdapter]:
    """Return adapters of the core's reference attention on NumPy arrays.

    Example:
        >>> [adapter.dtype for adapter in numpy_adapters()]
        ['float32', 'float64']
    """
    library = Library(np, lambda values, dtype: np.asarray(values, dtype), np.asarray)
    return [
        BackendAdapter("alibi_core", library, alibi_core.attention, dtype=dtype) for dtype in ("float32", "float64")
    ]
