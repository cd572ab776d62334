"""Implementations with mistakes of the catalogue: as an adapter, and in float64 for the diagnosis."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import numpy as np

from alibi_core._arrays import checks
from alibi_core.conformance import reference
from alibi_core.conformance.adapter import FUNCTIONS, Offer
from alibi_core.conformance.caller import Caller
from alibi_core.conformance.case import FEATURES
from alibi_core.conformance.mistakes import CATALOGUE
from alibi_core.conformance.oracle import UNIT_ROUNDOFF, rounded
from alibi_core.conformance.reference import TENSORS, Active, Computation, Values


class Mistaken:
    """An adapter that makes the given mistakes and no others.

    Args:
        mistakes: Names in ``MISTAKES``.
        where: Name of a condition: with ``"mask"`` the mistakes are made only in calls with a mask, and so on. Default:
            in all calls.
        functions: Names of the functions that make the mistakes; the others are right.
        dtype: As in :class:`Adapter`: dtype of the arrays.
        features: As in :class:`Adapter`: the offered features. Default: all; in float64 all but ``"far"``, for which a
            bias must be counted from the nearest key.

    Example:
        >>> Mistaken("negated slopes").slopes(2).tolist()
        [-0.0625, -0.00390625]
    """

    def __init__(
        self,
        *mistakes: str,
        where: str | None = None,
        functions: Collection[str] = FUNCTIONS,
        dtype: str = "float32",
        features: Collection[str] | None = None,
    ) -> None:
        if unknown := set(mistakes) - set(CATALOGUE):
            raise ValueError(f"mistakes must be names of MISTAKES, got {', '.join(sorted(unknown))}")
        if where is not None:
            checks.one_of("where", where, tuple(reference.CONDITIONS | reference.STEP_CONDITIONS))
        functions = checks.some_of("functions", functions, FUNCTIONS)
        checks.one_of("dtype", dtype, tuple(UNIT_ROUNDOFF))
        self.name, self.dtype, self.features = " and ".join(mistakes) or "right", dtype, features
        if features is None:
            self.features = frozenset(FEATURES) - ({"far"} if dtype == "float64" else set())
        self.contract, made = "exact", [(CATALOGUE[name], where) for name in mistakes]
        self._made: dict[str, Active] = {function: made if function in functions else [] for function in FUNCTIONS}
        self._own = np.float64 if dtype == "float64" else np.float32
        self._state: dict[Any, Any] = {}

    def slopes(self, num_heads: int) -> Values:
        """Return ``[num_heads]``."""
        return reference.make_slopes(self._made["slopes"], num_heads, self.contract).astype(self._own)

    def bias(self, num_heads: int, q_len: int, kv_len: int, is_causal: bool) -> Values:
        """Return ``[num_heads, q_len, kv_len]``, -inf where masked."""
        slopes = reference.make_slopes(self._made["bias"], num_heads, self.contract)
        return reference.make_bias(self._made["bias"], slopes, q_len, kv_len, is_causal).astype(self._own)

    def attention(self, query: Values, key: Values, value: Values, slopes: Values, **arguments: Any) -> Values:
        """Return ``[batch, num_heads, q_len, head_dim]``."""
        made, state = self._made["attention"], self._state
        with np.errstate(all="ignore"):  # a mistake may overflow, or divide by zero
            return self._stored(reference.attend(Computation(made, state, query, key, value, slopes, **arguments)))

    def attention_grad(
        self, query: Values, key: Values, value: Values, slopes: Values, wrt: Any = None, **arguments: Any
    ) -> dict[str, Values]:
        """Return gradients by name."""
        made, state = self._made["attention_grad"], self._state
        with np.errstate(all="ignore"):
            found = reference.differentiate(Computation(made, state, query, key, value, slopes, **arguments))
        kept = {name: x for name, x in found.items() if wrt is None or name in wrt}
        return {name: self._stored(x) if name in TENSORS else x.astype(self._own) for name, x in kept.items()}

    def decode_step(self, query: Values, key: Values, value: Values, slopes: Values, cache: Any) -> tuple[Values, Any]:
        """Return the output of the next tokens, and all keys and values so far."""
        with np.errstate(all="ignore"):
            made, state = self._made["decode_step"], self._state
            output, cache = reference.decode_step(made, state, query, key, value, slopes, cache)
        return self._stored(output), cache

    def _stored(self, values: Values) -> Values:
        return rounded(values, self.dtype).astype({"float16": np.float16}.get(self.dtype, self._own))


def simulated(mistakes: Active, offer: Offer) -> Caller:
    """Return a caller of these mistakes, computed in float64 from inputs of the offer's dtype."""
    wrong = Mistaken(dtype="float64")
    wrong.contract, wrong._made = offer.contract, dict.fromkeys(FUNCTIONS, mistakes)
    return Caller(replace(offer, functions={name: getattr(wrong, name) for name in FUNCTIONS}))
