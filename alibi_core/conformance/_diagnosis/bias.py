"""What bias an implementation builds in place of that of its contract."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from alibi_core._slopes import slope_values
from alibi_core.conformance._cases import UNIT_ROUNDOFF, Answer
from alibi_core.conformance._diagnosis._departures import ATTENTION, Departure, make
from alibi_core.conformance._diagnosis._observations import Observation, make_case, sized
from alibi_core.conformance._diagnosis._readings import Reading
from alibi_core.conformance._trial import Caller, CallError

SHAPES = ((7, 7), (4, 11), (11, 5), (1, 9), (300, 300))

_KEY_ONLY = (
    "Softmax cannot tell it from the full bias under a causal mask, for it differs by what is constant along each row: "
    "declare contract = {!r} if that is meant."
)
_PARTS = {"causal", "bias_offset", "causal_offset", "distance", "slopes", "slope_dtype", "factor", "rounding"}
_OF_SCORES = (  # factors that a bias by itself knows nothing of
    *("bias scaled", "bias scaled by default", "bias scaled up", "bias scaled by d_model", "bias over head_dim"),
    "bias summed over the group",
)

BIAS = (
    make("key-only", "The bias is in key-only form, slope * j. " + _KEY_ONLY.format("bloom"), distance=("key only", 0)),
    make(
        "centred key-only",
        "The bias is in key-only form, slope * (j - (kv_len - 1)). " + _KEY_ONLY.format("mpt"),
        distance=("centred key only", 0),
    ),
    make("positive bias", "The bias is positive: slope * distance must be subtracted.", factor="negated bias"),
    make("distance one more", "Distances count one token too many: the own key's is 0.", distance=("one more", 0)),
    *(
        x
        for x in ATTENTION
        if not x.is_noisy and x.changes.keys() <= _PARTS and x.changes.get("factor") not in _OF_SCORES
    ),
)


@dataclass(frozen=True)
class BiasObservation(Observation):
    """A bias, and what it should be."""

    @property
    def leeway(self) -> dict[str, float]:
        """Nothing, of a bias."""
        return {}

    def answers(self, reading: Reading) -> dict[str, Answer]:
        """Return what the reading says; -inf where something is hidden."""
        bias = reading.bias(self.inputs)
        hidden = ~np.broadcast_to(reading.visible(self.inputs), bias.shape)
        relative = 2.0**-20 + 2 * UNIT_ROUNDOFF[self.dtype]
        budget = np.where(hidden, 0, relative * np.abs(bias) + 1e-30)
        return {"bias": Answer(np.where(hidden, -np.inf, bias), budget)}


def observed_biases(caller: Caller, features: frozenset[str]) -> Iterator[BiasObservation]:
    """Ask for biases and yield what came of it."""
    offer = caller.offer
    forms = ["causal", "symmetric"] if "symmetric" in features else ["causal"]
    for form, lengths in itertools.product(forms, SHAPES):
        if lengths[0] != lengths[1] and "lengths" not in features:
            continue
        case = make_case(offer, sized(lengths, num_heads=12, batch=1, head_dim=max(lengths)), form=form, one_hot=True)
        slopes = np.asarray(slope_values(case.num_heads, contract=offer.contract))
        try:
            bias = caller.bias(case.num_heads, *lengths, form == "causal")
        except CallError:
            continue
        yield BiasObservation.of(caller, case.with_arrays(slopes=slopes), {"bias": bias[None]}, slice(-8, None))


_CONTRACTS: dict[str, dict[str, Any]] = {
    "bloom": {"distance": ("key only", 0)},
    "mpt": {"distance": ("centred key only", 0)},
    "falcon": {"rounding": ("falcon", "bfloat16"), "slope_dtype": "bfloat16"},
}


def base_bias(contract: str) -> Reading:
    """Return how the bias of an adapter of this contract should be read."""
    return Reading(**_CONTRACTS.get(contract, {}))


CONTRACTS = (
    make(
        "bloom contract",
        "This is the bias of the bloom contract: slope * j. " + _KEY_ONLY.format("bloom"),
        **_CONTRACTS["bloom"],
    ),
    make(
        "falcon contract",
        "This is the bias of the falcon contract: slopes, positions and product in bfloat16, key-only. Declare "
        "contract = 'falcon' if that is meant.",
        **_CONTRACTS["falcon"],
    ),
)


def transposed(observations: list[BiasObservation]) -> list[Departure]:
    """Return whether the bias of a square is the right one transposed."""
    for x in observations:
        answer = x.answers(Reading())["bias"].value
        turned = answer.swapaxes(-1, -2)
        is_square = x.case.sizes.lengths == (7, 7)
        if is_square and not np.array_equal(answer, turned) and np.allclose(x.results["bias"], turned, rtol=1e-5):
            return [make("transposed bias", "Queries and keys are swapped: the bias is transposed.")]
    return []


def finite_where_hidden(observations: list[BiasObservation]) -> list[Departure]:
    """Return which number stands where minus infinity should."""
    for x in observations:
        hidden = np.isneginf(x.answers(Reading())["bias"].value)
        there = x.results["bias"][hidden]
        if there.size > 1 and np.all(np.isfinite(there)) and np.ptp(there) == 0:
            number = float(there[0])
            sentence = f"Where keys are hidden, the bias is {number:g} instead of minus infinity"
            if number == 0:
                return [make("causal ignored", f"{sentence}: the causal mask is missing.")]
            return [make("finite where hidden", f"{sentence}, which a steep slope reaches.")]
    return []
