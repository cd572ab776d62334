"""The catalogue: what implementations of ALiBi are known to do instead."""

from __future__ import annotations

from alibi_core.conformance._diagnosis._departures.departure import make
from alibi_core.conformance._diagnosis._departures.of_bias import DISTANCES, FACTORS, NUMBERED_DISTANCES, ROUNDINGS
from alibi_core.conformance._diagnosis._departures.of_masks import MASKS, OFFSETS
from alibi_core.conformance._diagnosis._departures.of_scores import SCORES
from alibi_core.conformance._diagnosis._departures.of_slopes import SLOPES

# No departure to be told: where slopes are not those given, future slopes may be.
FUTURE_RIGHT = make("future slopes right", "Future slopes are as given.", future="as given")

ATTENTION = (
    *(*FACTORS, *DISTANCES, *SLOPES, *SCORES, *MASKS, *OFFSETS, *NUMBERED_DISTANCES, *ROUNDINGS),
    FUTURE_RIGHT,
)

_FALCON = "This is the falcon contract: slopes, positions and their product in bfloat16, key-only"
_DECLARE = "Declare contract = 'falcon' if that is meant."
_IN_BFLOAT16 = {"slope_dtype": "bfloat16", "rounding": ("falcon", "bfloat16")}
# What a named contract does, all of it at once: told instead of its parts.
CONTRACTS = (
    make(
        "falcon contract",
        f"{_FALCON}, and divided by sqrt(head_dim). {_DECLARE}",
        **_IN_BFLOAT16,
        factor="bias scaled",
    ),
    make("falcon contract, unscaled", f"{_FALCON}. {_DECLARE}", **_IN_BFLOAT16),
)
