"""The catalogue run as adapters: implementations of ALiBi with mistakes that are known by name."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from alibi_core._slopes import slope_values
from alibi_core.conformance._adapter import FEATURES, FUNCTIONS
from alibi_core.conformance._cases import Values, rounded
from alibi_core.conformance._diagnosis._departures import ATTENTION, FUTURE_RIGHT, GRADIENTS, Departure
from alibi_core.conformance._diagnosis._readings import CHANGES, RULES, GradientReading, Inputs
from alibi_core.conformance._diagnosis.bias import BIAS
from alibi_core.conformance._diagnosis.decoding import DECODING
from alibi_core.conformance._diagnosis.slopes import SENTENCES


def _by_name() -> dict[str, Departure]:
    """Return the catalogue by names: the key, and where several share one, what tells them apart."""
    departures = {(x.key, str(x.changes)): x for x in (*ATTENTION, *GRADIENTS, *BIAS, *DECODING)}
    count = Counter(key for key, _ in departures)
    found = {}
    for x in departures.values():
        kind = next(iter(x.changes.values()))
        if isinstance(kind, tuple):
            kind = kind[1] if isinstance(kind[1], int) and kind[1] else kind[0]
        detail = str(kind).split()[-1] if str(kind)[-1].isdigit() else kind
        found[x.key if count[x.key] == 1 else f"{x.key}: {detail}"] = x
    return found


_DEPARTURES = _by_name()
MISTAKES: Mapping[str, str] = {
    **{name: SENTENCES[name] for name in (*CHANGES, *RULES) if name != "mpt slopes"},
    **{name: x.sentence for name, x in _DEPARTURES.items() if name != FUTURE_RIGHT.key},
}


class Mistaken:
    """An adapter that makes mistakes of the catalogue, and none else.

    Args:
        mistakes: Names, of ``MISTAKES``. Those of slopes are made by ``slopes`` and ``bias`` where these make a list,
            and by the other functions in place of the slopes that they are given.
        functions: Which functions make them; the others are right.
        dtype: As in :class:`Adapter`.
        features: As in :class:`Adapter`. Default, all; in float64 all but ``"far"``, for which a bias has to be counted
            from the nearest key.

    Example:
        >>> Mistaken("negated slopes").slopes(2).tolist()
        [-0.0625, -0.00390625]
    """

    def __init__(
        self,
        *mistakes: str,
        functions: Collection[str] = FUNCTIONS,
        dtype: str = "float32",
        features: Collection[str] | None = None,
    ) -> None:
        if unknown := set(mistakes) - set(MISTAKES):
            raise ValueError(f"mistakes must be names of MISTAKES, got {', '.join(sorted(unknown))}")
        self.name, self.dtype, self.features = " and ".join(mistakes) or "right", dtype, features
        if features is None:
            self.features = frozenset(FEATURES) - ({"far"} if dtype == "float64" else set())
        self._mistakes, self._functions = mistakes, functions
        self._own = np.float64 if dtype == "float64" else np.float32

    def reading(self, function: str) -> GradientReading:
        """Return how a function reads ALiBi."""
        reading = GradientReading()
        for name in self._mistakes if function in self._functions else ():
            # A wrong list of slopes is made once, and is not the wrong way to take those that are given.
            if name in _DEPARTURES and not (function == "bias" and name in RULES.keys() | CHANGES.keys()):
                reading = dataclasses.replace(reading, **_DEPARTURES[name].changes)
        return reading

    def slopes(self, num_heads: int) -> Values:
        """Return ``[num_heads]``."""
        slopes = np.asarray(slope_values(num_heads))
        for name in self._mistakes if "slopes" in self._functions else ():
            slopes = RULES[name](num_heads) if name in RULES else CHANGES.get(name, np.asarray)(slopes)
        return slopes.astype(self._own)

    def bias(self, num_heads: int, q_len: int, kv_len: int, is_causal: bool) -> Values:
        """Return ``[num_heads, q_len, kv_len]``, -inf where masked."""
        query, key = (np.zeros((1, num_heads, n, 1)) for n in (q_len, kv_len))
        inputs = Inputs.given(query, key, key, self.slopes(num_heads), dtype="float64", is_causal=is_causal)
        reading = self.reading("bias")
        bias = np.where(reading.visible(inputs), reading.bias(inputs), -np.inf)[0]
        return np.asarray(bias, self._own)

    def attention(self, query: Values, key: Values, value: Values, slopes: Values, **arguments: Any) -> Values:
        """Return ``[batch, num_heads, q_len, head_dim]``."""
        return self._output("attention", Inputs.given(query, key, value, slopes, dtype=self.dtype, **arguments))

    @np.errstate(all="ignore")  # of a wrong reading, there may be overflows and divisions by zero
    def attention_grad(
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
        """Return gradients by name."""
        inputs = Inputs.given(query, key, value, slopes, dtype=self.dtype, **arguments)
        cotangent = np.asarray(grad_output, np.float64)
        found = self.reading("attention_grad").gradients(inputs, cotangent, shares_slopes=slopes.ndim == 1)
        kept = {name: x.value for name, x in found.items() if wrt is None or name in wrt}
        return {name: x.astype(self._own) if "slopes" in name else self._stored(x) for name, x in kept.items()}

    def decode_step(self, query: Values, key: Values, value: Values, slopes: Values, cache: Any) -> tuple[Values, Any]:
        """Return the output of some more tokens, and all keys and values so far."""
        if cache is not None:
            key, value = (np.concatenate(pair, axis=2) for pair in zip(cache, (key, value), strict=True))
        inputs = Inputs.given(query, key, value, slopes, dtype=self.dtype)
        return self._output("decode_step", inputs), (key, value)

    @np.errstate(all="ignore")
    def _output(self, function: str, inputs: Inputs) -> Values:
        return self._stored(self.reading(function).output(inputs))

    def _stored(self, values: Values) -> Values:
        return rounded(values, self.dtype).astype({"float16": np.float16}.get(self.dtype, self._own))
