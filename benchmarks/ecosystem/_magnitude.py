"""How far an implementation is from the paper, in numbers: slopes, bias and attention at 2048 tokens.

All is compared with float64 NumPy that is written out here.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import numpy as np

import alibi_core
from alibi_core.conformance import rounded
from benchmarks.exact import exact_slopes

Values = np.ndarray[Any, Any]

HEADS = (8, 12)  # a power of two, and none
KV_LEN, Q_LEN, HEAD_DIM = 2048, 64, 16


@dataclass(frozen=True)
class Magnitude:
    """How far off one implementation is, in one dtype, with so many heads."""

    num_heads: int  # of the queries; as many of keys
    slopes: float | None  # the largest difference, relative; None for one whose slopes are the caller's
    bias: float | None  # the largest, once what is constant along a row is taken off; None for one that shows none
    output: float  # of the attention of the last 64 of 2048 queries, relative to the largest value
    contract_output: float  # the same, to the attention that the bias of its own contract gives


def exact_bias(slopes: Values) -> Values:
    """Return the causal bias of the last queries, ``[num_heads, q_len, kv_len]``."""
    back = np.arange(KV_LEN - Q_LEN, KV_LEN)[:, None] - np.arange(KV_LEN)
    return np.where(back < 0, -np.inf, -slopes[:, None, None] * back)


def measure(adapter: Any, num_heads: int, *, contract: str = "exact", bias_max: float = 8) -> Magnitude:
    """Return how far an adapter is from the paper, with slopes that end at ``bias_max``, and from its contract."""
    exact, slopes, bias = exact_slopes(num_heads, bias_max), None, None
    if hasattr(adapter, "slopes"):
        slopes = float(np.abs(adapter.slopes(num_heads) / exact - 1).max())
    expected = exact_bias(exact)
    if hasattr(adapter, "key_bias") or hasattr(adapter, "bias"):
        differences = (_centred_bias_of(adapter, num_heads) - expected)[np.isfinite(expected)]
        bias = float(np.abs(differences).max())
    rng = np.random.default_rng(0)
    tensors = [rounded(rng.standard_normal((1, num_heads, KV_LEN, HEAD_DIM)), adapter.dtype) for _ in range(3)]
    output, largest = _attention_of(adapter, *tensors), np.abs(tensors[2]).max()
    contract_bias = expected if contract == "exact" else _contract_bias_of(contract, num_heads, adapter.dtype)
    errors = [np.abs(output - _attend(*tensors, x)).max() / largest for x in (expected, contract_bias)]
    return Magnitude(num_heads, slopes, bias, *map(float, errors))


def _centred_bias_of(adapter: Any, num_heads: int) -> Values:
    """Return an adapter's bias, any number where it is masked, less each query's own: softmax knows no more of it."""
    if hasattr(adapter, "key_bias"):
        row = adapter.key_bias(num_heads, KV_LEN).astype(np.float64)[:, None]
        bias = np.broadcast_to(row, (num_heads, Q_LEN, KV_LEN))
    else:
        bias = adapter.bias(num_heads, Q_LEN, KV_LEN, True).astype(np.float64)
        bias = np.where(np.isfinite(bias), bias, 0)
    return bias - np.diagonal(bias, KV_LEN - Q_LEN, axis1=1, axis2=2)[:, :, None]


def _contract_bias_of(contract: str, num_heads: int, dtype: str) -> Values:
    """Return the bias that a contract's models add to scaled scores, as this library has it."""
    if contract == "geometric":
        return exact_bias(2.0 ** (-8 / num_heads * np.arange(1, num_heads + 1)))
    row = np.asarray(alibi_core.key_bias(num_heads, KV_LEN, contract=contract))[:, 0]
    row = row.astype(np.float64) if contract == "mpt" else rounded(row, dtype)
    row = row * HEAD_DIM**-0.5 if contract == "falcon" else row
    return np.where(np.isfinite(exact_bias(np.ones(1))), row[:, None], -np.inf)


def _attend(query: Values, key: Values, value: Values, bias: Values) -> Values:
    """Return the attention of the last queries, float64."""
    scores = HEAD_DIM**-0.5 * (query[:, :, -Q_LEN:] @ key.swapaxes(-1, -2)) + bias
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return (weights / weights.sum(axis=-1, keepdims=True)) @ value


def _attention_of(adapter: Any, *tensors: Values) -> Values:
    """Return an adapter's attention of the last queries."""
    query, key, value = (x.astype(np.float16 if adapter.dtype == "float16" else np.float32) for x in tensors)
    slopes = exact_slopes(query.shape[1]).astype(np.float32)
    known = inspect.signature(adapter.attention).parameters

    def call(query: Values) -> Values:
        options = {"slopes": slopes, "is_causal": True, "q_offset": KV_LEN - query.shape[2]}
        options = {name: x for name, x in options.items() if name in known}
        return adapter.attention(query, key, value, **options)[:, :, -Q_LEN:].astype(np.float64)

    try:
        return call(query[:, :, -Q_LEN:])
    except NotImplementedError:  # as many queries as keys only
        return call(query)
