"""ALiBi (Attention with Linear Biases, arXiv 2108.12409) for any array library.

The core defines ALiBi: its slopes, its bias, and the attention that every backend must agree with. It needs NumPy
and array-api-compat alone and works on the arrays of any library that follows the array API standard.
"""

from alibi_core._attention import attention
from alibi_core._bias import bias, bias_from_positions, key_bias
from alibi_core._fold import fold, fold_error_bound, fold_size
from alibi_core._gates import bias_from_gates
from alibi_core._horizon import horizon
from alibi_core._slopes import slopes

__version__ = "0.1.0"

__all__ = [
    "attention",
    "bias",
    "bias_from_gates",
    "bias_from_positions",
    "fold",
    "fold_error_bound",
    "fold_size",
    "horizon",
    "key_bias",
    "slopes",
]
