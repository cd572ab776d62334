"""Slips of an adapter, not of the implementation that it shows: the first sentence of the report says which."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from alibi_core.conformance import Mistaken, check


def attention(query: Any, key: Any, value: Any, slopes: Any, is_causal: bool, q_offset: int) -> tuple[Any, Any]:
    """Return weights and output of heads that are not grouped."""
    back = q_offset + np.arange(query.shape[2])[:, None] - np.arange(key.shape[2])
    scores = query @ key.swapaxes(-1, -2) * np.float32(query.shape[-1] ** -0.5)
    scores = scores - slopes[:, None, None] * np.abs(back).astype(np.float32)
    scores = np.where(is_causal & (back < 0), -np.inf, scores)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True, initial=-1e30))
    weights /= weights.sum(axis=-1, keepdims=True).clip(1e-30)
    return weights, weights @ value


def merged(output: Any) -> Any:
    return output.swapaxes(1, 2).reshape(output.shape[0], output.shape[2], -1)


def swapped(query: Any, key: Any, value: Any, **options: Any) -> Any:
    tensors = (x.swapaxes(1, 2) for x in (query, key, value))
    return attention(*tensors, **options)[1].swapaxes(1, 2)


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (lambda q, k, v, **rest: q, "The output is query, as it was given: no attention is computed."),
        (lambda q, k, v, **rest: np.zeros_like(q), "The output is 0 throughout: nothing is written to it."),
        (lambda *qkv, **rest: attention(*qkv, **rest)[0], "these are the weights; multiply them by value"),
        (lambda *qkv, **rest: attention(*qkv, **rest)[1].swapaxes(1, 2), "; swap axes 1 and 2"),
        (lambda *qkv, **rest: merged(attention(*qkv, **rest)[1]), "its heads are merged; make it [batch, heads, "),
        (lambda *qkv, **rest: attention(*qkv, **rest), "returned tuple, expected a NumPy array; return the output"),
        (lambda *qkv, **rest: None, "returned NoneType, expected a NumPy array; it lacks a return"),
        (swapped, "Query, key and value are [batch, num_heads, length, head_dim], slopes are [num_heads]."),
    ],
    ids=["query", "zeros", "weights", "layout", "merged", "pair", "nothing", "layout of inputs"],
)
def test_the_report_says_what_the_adapter_returned_instead(answer: Callable[..., Any], sentence: str) -> None:
    class Adapter:
        features = ("lengths", "offset")

        def attention(self, query: Any, key: Any, value: Any, slopes: Any, is_causal: bool, q_offset: int) -> Any:
            return answer(query, key, value, slopes=slopes, is_causal=is_causal, q_offset=q_offset)

    report = check(Adapter(), laws=["causal", "lengths"])
    assert not report.passed
    assert sentence in " ".join(x.sentence for x in report.diagnoses)


def test_zeros_for_short_rows_alone_are_a_mistake_of_the_kernel() -> None:
    report = check(Mistaken("last partial block dropped: 64"), laws=["causal"])
    assert [x.key for x in report.diagnoses] == ["last partial block dropped: 64"]
