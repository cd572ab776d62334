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

Values = np.ndarray[Any, Any]

HEADS = (8, 12)  # a power of two, and none
KV_LEN, Q_LEN, HEAD_DIM = 2048, 64, 16


@dataclass(frozen=True)
class Magnitude:
    """How far off one implementation is, in one dtype, with so many heads.

    Attributes:
        num_heads: Of the queries; as many of keys.
        slopes: The largest difference, relative to the exact slope; None for one whose slopes are the caller's.
        bias: The largest difference, absolute, once what is constant along a row is taken off; None for one that
            shows none.
        output: The largest difference of the attention of the last 64 of 2048 queries, relative to the largest value.
        contract_output: The same, to the attention that the bias of its own contract gives.
    """

    num_heads: int
    slopes: float | None
    bias: float | None
    output: float
    contract_output: float


def exact_slopes(num_heads: int, bias_max: float = 8) -> Values:
    """Return the slopes of the paper's code, float64."""
    power = 2 ** (num_heads.bit_length() - 1)
    exponents = [(h + 1) / power for h in range(power)]
    exponents += [(2 * h + 1) / (2 * power) for h in range(num_heads - power)]
    return 2.0 ** (-bias_max * np.asarray(exponents))


def exact_bias(num_heads: int, q_len: int, kv_len: int, bias_max: float = 8) -> Values:
    """Return the causal bias of the last queries, ``[num_heads, q_len, kv_len]``."""
    back = np.arange(kv_len - q_len, kv_len)[:, None] - np.arange(kv_len)
    return np.where(back < 0, -np.inf, -exact_slopes(num_heads, bias_max)[:, None, None] * back)


def measure(adapter: Any, num_heads: int, *, contract: str = "exact", bias_max: float = 8) -> Magnitude:
    """Return how far an adapter is from the paper.

    Args:
        adapter: With ``slopes``, ``bias`` or ``key_bias``, and ``attention``.
        num_heads: Of the queries and of the keys.
        contract: Which bias ``contract_output`` has.
        bias_max: What the exact slopes end at.
    """
    slopes = None
    if hasattr(adapter, "slopes"):
        slopes = float(np.abs(adapter.slopes(num_heads) / exact_slopes(num_heads, bias_max) - 1).max())
    expected = exact_bias(num_heads, Q_LEN, KV_LEN, bias_max)
    visible = np.isfinite(expected)
    bias = None
    if hasattr(adapter, "key_bias") or hasattr(adapter, "bias"):
        differences = centred(bias_of(adapter, num_heads))[visible] - expected[visible]
        bias = float(np.abs(differences).max())
    tensors = random_tensors(num_heads, adapter.dtype)
    output, largest = attention_of(adapter, *tensors), np.abs(tensors[2]).max()
    contract_bias = expected if contract == "exact" else contract_bias_of(contract, num_heads, adapter.dtype)
    errors = [np.abs(output - attend(*tensors, x)).max() / largest for x in (expected, contract_bias)]
    return Magnitude(num_heads, slopes, bias, *map(float, errors))


def bias_of(adapter: Any, num_heads: int) -> Values:
    """Return an adapter's bias for the last queries, float64, any number where it is masked."""
    if hasattr(adapter, "key_bias"):
        row = adapter.key_bias(num_heads, KV_LEN).astype(np.float64)[:, None]
        return np.broadcast_to(row, (num_heads, Q_LEN, KV_LEN))
    bias = adapter.bias(num_heads, Q_LEN, KV_LEN, True).astype(np.float64)
    return np.where(np.isfinite(bias), bias, 0)


def centred(bias: Values) -> Values:
    """Return a bias less that of each query's own key: softmax knows no more of it."""
    q_len, kv_len = bias.shape[1:]
    return bias - np.stack([bias[:, i, kv_len - q_len + i] for i in range(q_len)], axis=1)[:, :, None]


def contract_bias_of(contract: str, num_heads: int, dtype: str) -> Values:
    """Return the bias that a contract's models add to scaled scores, as this library has it."""
    if contract == "geometric":
        back = np.arange(KV_LEN - Q_LEN, KV_LEN)[:, None] - np.arange(KV_LEN)
        slopes = 2.0 ** (-8 / num_heads * np.arange(1, num_heads + 1))
        return np.where(back < 0, -np.inf, -slopes[:, None, None] * back)
    row = np.asarray(alibi_core.key_bias(num_heads, KV_LEN, contract=contract))[:, 0]
    row = row.astype(np.float64) if contract == "mpt" else rounded(row, dtype)
    row = row * HEAD_DIM**-0.5 if contract == "falcon" else row
    return np.where(np.isfinite(exact_bias(1, Q_LEN, KV_LEN)), row[:, None], -np.inf)


def random_tensors(num_heads: int, dtype: str) -> tuple[Values, Values, Values]:
    """Return query, key and value of 2048 tokens, normal, as ``dtype`` holds them."""
    rng = np.random.default_rng(0)
    shape = (1, num_heads, KV_LEN, HEAD_DIM)
    query, key, value = (rounded(rng.standard_normal(shape), dtype) for _ in range(3))
    return query, key, value


def attend(query: Values, key: Values, value: Values, bias: Values) -> Values:
    """Return the attention of the last queries, float64."""
    scores = HEAD_DIM**-0.5 * (query[:, :, -Q_LEN:] @ key.swapaxes(-1, -2)) + bias
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return (weights / weights.sum(axis=-1, keepdims=True)) @ value


def attention_of(adapter: Any, query: Values, key: Values, value: Values) -> Values:
    """Return an adapter's attention of the last queries."""
    own = {"float64": np.float64, "float16": np.float16}.get(adapter.dtype, np.float32)
    tensors = [x.astype(own) for x in (query, key, value)]
    slopes = exact_slopes(query.shape[1]).astype(np.float32)
    known = inspect.signature(adapter.attention).parameters

    def call(query: Values) -> Values:
        options = {"slopes": slopes, "is_causal": True, "q_offset": KV_LEN - query.shape[2]}
        takes_any = any(x.kind == x.VAR_KEYWORD for x in known.values())
        options = {name: x for name, x in options.items() if takes_any or name in known}
        return adapter.attention(query, *tensors[1:], **options)[:, :, -Q_LEN:].astype(np.float64)

    try:
        return call(tensors[0][:, :, -Q_LEN:])
    except NotImplementedError:  # as many queries as keys only
        return call(tensors[0])
