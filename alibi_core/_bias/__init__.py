"""Slopes, and the bias that they give.

In go numbers of heads, slopes, lengths and positions, with the contract of a family of models if its own numbers are
wanted. Out come slopes, and the bias as it is added to scores.
"""

from alibi_core._bias.bias import bias as bias
from alibi_core._bias.bias import bias_from_positions as bias_from_positions
from alibi_core._bias.bias import key_bias as key_bias
from alibi_core._bias.bias import linear_bias as linear_bias
from alibi_core._bias.bias import place_slopes as place_slopes
from alibi_core._bias.bias import relative_positions as relative_positions
from alibi_core._bias.bias import slopes_of_any_sign as slopes_of_any_sign
from alibi_core._bias.bias import with_head_axis as with_head_axis
from alibi_core._bias.bias import working_dtype as working_dtype
from alibi_core._bias.contracts import Contract as Contract
from alibi_core._bias.contracts import named as named
from alibi_core._bias.contracts import power_below as power_below
from alibi_core._bias.slopes import slope_values as slope_values
from alibi_core._bias.slopes import slopes as slopes
