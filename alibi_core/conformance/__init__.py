"""Is it ALiBi? Laws to check any implementation against, and a diagnosis of an implementation that breaks them.

An *adapter* wraps an implementation, with NumPy arrays in and out; :func:`check` checks it against the laws:

>>> import numpy as np
>>> from alibi_core import conformance
>>> class Mine:
...     def bias(self, num_heads, q_len, kv_len, is_causal):
...         slopes = 2.0 ** (-8 * np.arange(1, num_heads + 1) / num_heads)
...         back = np.arange(q_len)[:, None] + kv_len - q_len - np.arange(kv_len)
...         return np.where(back < 0, -np.inf, -slopes[:, None, None] * back).astype(np.float32)
>>> report = conformance.check(Mine())
>>> report.passed
False

Laws, mistakes and the features that an adapter may offer have names:

>>> conformance.LAWS[0].name, conformance.LAWS[0].statement
('slopes', 'Slopes are those of the contract, for 1 to 128 heads')
>>> conformance.MISTAKES["negated slopes"]
'They are negative: distance would be rewarded, where -slope * distance is added.'
>>> conformance.FEATURES["window"]
'window_size'

A package registers its adapters for :func:`installed_adapters` under this group of entry points:

>>> conformance.ENTRY_POINTS
'alibi_core.conformance'
"""

from alibi_core.conformance.adapter import Adapter
from alibi_core.conformance.case import FEATURES
from alibi_core.conformance.check import check
from alibi_core.conformance.golden import GoldenError, check_golden, write_golden
from alibi_core.conformance.laws import LAWS
from alibi_core.conformance.libraries import (
    ENTRY_POINTS,
    BackendAdapter,
    Library,
    installed_adapters,
    numpy_adapters,
)
from alibi_core.conformance.mistaken import Mistaken
from alibi_core.conformance.mistakes import MISTAKES
from alibi_core.conformance.report import Report
from alibi_core.conformance.worker import supervised as supervised

# fmt: off
__all__ = [
    "ENTRY_POINTS", "FEATURES", "LAWS", "MISTAKES", "Adapter", "BackendAdapter", "GoldenError", "Library", "Mistaken",
    "Report", "check", "check_golden", "installed_adapters", "numpy_adapters", "write_golden",
]
# fmt: on
