"""ALiBi's slopes by the paper's code, in float64, for benchmarks that must not ask the library what is right."""

from __future__ import annotations

import numpy as np


def exact_slopes(num_heads: int, bias_max: float = 8) -> np.ndarray:
    """Return the slopes, ``[num_heads]``."""
    power = 2 ** (num_heads.bit_length() - 1)
    exponents = [(head + 1) / power for head in range(power)]
    exponents += [(2 * head + 1) / (2 * power) for head in range(num_heads - power)]
    return np.exp2(-bias_max * np.asarray(exponents))
