"""Adapters: the interface between the kit and an implementation of ALiBi in any language."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from alibi_core._arrays import checks
from alibi_core._contracts import named
from alibi_core.conformance.case import FEATURES, OFFERS, TO_DECLARE
from alibi_core.conformance.oracle import UNIT_ROUNDOFF

MOST_TOKENS = 544  # the longest decoded sequence: above 512, and no multiple of common block sizes
FUNCTIONS = ("slopes", "bias", "attention", "attention_grad", "decode_step")

_BASE = ("slopes", "grad_output", "is_causal", "q_offset")


class Adapter(Protocol):
    """An implementation to check: any object with at least one of these functions.

    Inputs and results are NumPy arrays, heads first: query ``[batch, num_heads, q_len, head_dim]``, key and value
    ``[batch, num_kv_heads, kv_len, head_dim]``, slopes ``[num_heads]``. They have the adapter's ``dtype``. NumPy lacks
    bfloat16: its numbers are passed as float32, rounded to bfloat16. Slopes and gates are float32 (float64
    in float64).

    All attributes are optional.

    Attributes:
        name: Name in reports. Default: the name of its class or module.
        dtype: ``"float32"`` (default), ``"float64"``, ``"float16"`` or ``"bfloat16"``.
        contract: The contract to check against: ``"exact"`` (default), ``"geometric"``, ``"bloom"``, ``"falcon"`` or
            ``"mpt"``.
        features: The names in ``FEATURES`` that it offers. If missing, those of each function are detected: by its
            parameters, and by whether a call raises NotImplementedError, TypeError or ValueError. This cannot detect
            ``batch_offsets``, ``batch_slopes``, ``far`` and ``continuations``, which are then not tried. If given, a
            call that raises fails its law.
        tolerance: Share of a query's softmax weight that it may leave out, below 1. Default: the unit roundoff of its
            dtype.

    Example:
        An adapter may have slopes alone. These follow the contract ``"geometric"``:

        >>> import numpy as np
        >>> from alibi_core.conformance import check
        >>> class Mine:
        ...     contract = "geometric"
        ...
        ...     def slopes(self, num_heads):
        ...         return (2.0 ** (-8 * np.arange(1, num_heads + 1) / num_heads)).astype(np.float32)
        >>> check(Mine(), laws=["slopes"]).passed
        True
    """

    def slopes(self, num_heads: int) -> Any:
        """Return ``[num_heads]``."""

    def bias(self, num_heads: int, q_len: int, kv_len: int, is_causal: bool) -> Any:
        """Return ``[num_heads, q_len, kv_len]``, -inf (or below -30,000) where masked; last query and key align."""

    def attention(self, query: Any, key: Any, value: Any, slopes: Any, is_causal: bool, q_offset: int) -> Any:
        """Return ``[batch, num_heads, q_len, head_dim]``.

        Query, key and value are passed by position, the rest by name.

        ``future_slopes``, ``window_size``, ``segment_ids``, ``mask``, ``scale``, ``log_gates`` and ``positions`` (with
        ``distance`` and ``law``) are passed by name in cases that need them, if the function has the parameter and the
        adapter offers the feature. A function without the parameter ``slopes`` must use the slopes of its contract.
        """

    def attention_grad(
        self, query: Any, key: Any, value: Any, slopes: Any, grad_output: Any, is_causal: bool, q_offset: int
    ) -> Any:
        """Return the gradients of ``sum(attention * grad_output)``: ``{"query": ..., "key": ..., ...}`` or a tuple.

        Users rarely need all gradients, and compilers remove unused ones. So a function with a parameter ``wrt`` gets
        the names of the needed gradients, such as ``("query",)`` or ``("key", "value")``; its default should be None,
        for all. Without the parameter all gradients are needed. A tuple is in the order of ``wrt``, or else of the
        parameters.

        If all elements of ``grad_output`` are equal, the loss is a sum or a mean of the result. An implementation that
        compiles its backward pass should then make ``grad_output`` inside the compiled function, as such a loss does:
        compilers treat constants and arguments differently.
        """

    def decode_step(self, query: Any, key: Any, value: Any, slopes: Any, cache: Any) -> Any:
        """Append tokens to a sequence: return their causal attention to all tokens so far, and the updated cache.

        ``cache`` is None at the beginning, then the cache that the previous step returned. A sequence has at most 544
        tokens.
        """


@dataclass(frozen=True)
class Offer:
    """A validated adapter: its attributes, with defaults filled in, and its functions by name."""

    name: str
    dtype: str
    contract: str
    tolerance: float
    declared: frozenset[str] | None  # features; None if they must be detected
    functions: Mapping[str, Callable[..., Any]]

    @classmethod
    def of(cls, adapter: Any) -> Offer:
        """Validate an adapter and return its offer; an offer is returned as it is."""
        if isinstance(adapter, Offer):
            return adapter
        functions = {name: getattr(adapter, name) for name in FUNCTIONS if callable(getattr(adapter, name, None))}
        if not functions:
            raise TypeError(f"adapter must have one of the functions {', '.join(FUNCTIONS)}, got {adapter!r}")
        if inspect.isclass(adapter) and any("self" in (_parameters(x) or ()) for x in functions.values()):
            raise TypeError(f"adapter must be an instance where its functions take self, got the class {adapter!r}")
        name = getattr(adapter, "name", getattr(adapter, "__name__", type(adapter).__name__))
        if not isinstance(name, str):
            raise TypeError(f"name of an adapter must be a string, got {type(name).__name__}")
        dtype = checks.one_of("dtype", getattr(adapter, "dtype", "float32"), tuple(UNIT_ROUNDOFF))
        contract = named(getattr(adapter, "contract", "exact")).name
        declared = getattr(adapter, "features", None)
        if declared is not None:
            declared = frozenset(checks.some_of("features", declared, tuple(FEATURES)))
        tolerance = getattr(adapter, "tolerance", None)
        tolerance = UNIT_ROUNDOFF[dtype] if tolerance is None else checks.probability("tolerance", tolerance)
        return cls(name, dtype, contract, tolerance, declared, functions)

    @property
    def main(self) -> str:
        """The name of the function whose calls are used to detect features."""
        return next((x for x in ("attention", "attention_grad", "bias") if x in self.functions), "decode_step")

    def features_of(self, function: str) -> frozenset[str]:
        """Return the features of a function: the declared ones, or else those that its parameters allow."""
        found = self.declared
        if found is None:
            known = (name for name, x in OFFERS.items() if not x.parameter or self.takes(function, x.parameter))
            found = frozenset(known) - TO_DECLARE
        return found if self.takes("attention_grad", "wrt") else found - {"some_gradients"}

    def takes(self, function: str, parameter: str) -> bool:
        """Return whether a function accepts a parameter of that name; True if its signature is unknown."""
        if function not in self.functions:
            return False
        parameters = _parameters(self.functions[function])
        if parameters is None or parameter in parameters:
            return True
        if parameter == "wrt" or not any(x.kind == x.VAR_KEYWORD for x in parameters.values()):
            return False
        # Without a declaration, **kwargs of attention is for base arguments; that of attention_grad, as in attention.
        is_like_attention = function == "attention_grad" and self.takes("attention", parameter)
        return self.declared is not None or parameter in _BASE or is_like_attention

    @property
    def has_slopes(self) -> bool:
        """Whether its attention takes slopes as an argument; if not, it uses the slopes of its contract."""
        return any(self.takes(function, "slopes") for function in ("attention", "attention_grad", "decode_step"))


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter] | None:
    """Return a function's parameters; None if they are unknown, as for built-in functions."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None
