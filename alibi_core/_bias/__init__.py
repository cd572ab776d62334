"""Slopes, and the bias that they give.

In go numbers of heads, slopes, lengths and positions, with the contract of a family of models if its own numbers are
wanted. Out come slopes, and the bias as it is added to scores.
"""

from alibi_core._bias.bias import (
    bias,
    bias_from_positions,
    key_bias,
    linear_bias,
    place_slopes,
    relative_positions,
    slopes_of_any_sign,
    with_head_axis,
    working_dtype,
)
from alibi_core._bias.contracts import Contract, named, power_below
from alibi_core._bias.slopes import slope_values, slopes

__all__ = [
    "Contract",
    "bias",
    "bias_from_positions",
    "key_bias",
    "linear_bias",
    "named",
    "place_slopes",
    "power_below",
    "relative_positions",
    "slope_values",
    "slopes",
    "slopes_of_any_sign",
    "with_head_axis",
    "working_dtype",
]
