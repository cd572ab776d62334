"""ALiBi attention in float64, by its definition: what every result is compared with. NumPy alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

SCORES_AT_ONCE = 2**24  # 128 MiB in float64


def canonical_slopes(num_heads: int) -> np.ndarray:
    """Return the slopes for a power of two of heads, as float32 holds them, in float64."""
    return np.exp2(-8 / num_heads * np.arange(1, num_heads + 1)).astype(np.float32).astype(np.float64)


@dataclass
class Exact:
    """Of some queries of one head: their results, their gradients, and their part of the gradients of keys and values.

    All float64, ``[queries or keys, head_dim]``; gradients are None where no gradient of the result was given.
    """

    result: np.ndarray
    query_grad: np.ndarray | None = None
    key_grad: np.ndarray | None = None
    value_grad: np.ndarray | None = None


def attend(
    query: np.ndarray, key: np.ndarray, value: np.ndarray, slope: float, positions: np.ndarray, grad: Any = None
) -> Exact:
    """Return causal ALiBi attention of one head, over all keys.

    Args:
        query: ``[queries, head_dim]``, float64, as all of them.
        key: ``[kv_len, head_dim]``.
        value: Likewise.
        slope: 0 for attention without positions.
        positions: ``[queries]``, in tokens, increasing.
        grad: ``[queries, head_dim]``: the gradient of the result, to have those of the arguments too.
    """
    scale = query.shape[-1] ** -0.5
    exact = Exact(np.empty_like(query))
    if grad is not None:
        exact.query_grad, exact.key_grad, exact.value_grad = (np.zeros_like(x) for x in (query, key, value))
    step = max(1, SCORES_AT_ONCE // len(key))
    for start in range(0, len(query), step):
        rows = slice(start, start + step)
        place = positions[rows, None]
        stop = int(place[-1, 0]) + 1  # no query of these sees a key after it
        distance = place - np.arange(stop)
        scores = np.where(distance < 0, -np.inf, scale * (query[rows] @ key[:stop].T) - slope * distance)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        exact.result[rows] = weights @ value[:stop]
        if grad is not None:
            weight_grad = grad[rows] @ value[:stop].T
            mean = (weights * weight_grad).sum(axis=-1, keepdims=True)
            score_grad = scale * weights * (weight_grad - mean)
            exact.query_grad[rows] = score_grad @ key[:stop]
            exact.key_grad[:stop] += score_grad.T @ query[rows]
            exact.value_grad[:stop] += weights.T @ grad[rows]
    return exact


@dataclass(frozen=True)
class Error:
    """How far something is from what it should be: the worst element, and all of them relative to their size."""

    worst: float
    relative: float

    @classmethod
    def between(cls, pairs: Iterator[tuple[np.ndarray, np.ndarray]]) -> Error:
        """Compare arrays with exact ones."""
        worst = squares = size = 0.0
        for found, exact in pairs:
            difference = found - exact
            worst = np.fmax(worst, np.max(np.abs(difference))) if np.all(np.isfinite(found)) else np.inf
            squares, size = squares + np.sum(difference**2), size + np.sum(exact**2)
        relative = np.sqrt(squares / size) if np.isfinite(worst) else np.inf
        return cls(float(worst), float(relative))


def error_of_rows(
    found: Any,
    tensors: tuple[Any, Any, Any],
    rows: np.ndarray,
    as_float64: Callable[[Any], np.ndarray],
    *,
    has_bias: bool = True,
) -> Error:
    """Return the error of a result at some queries of each head, recomputed over all their keys.

    Args:
        found: ``[batch, num_heads, q_len, head_dim]``.
        tensors: Query, key and value, likewise; the queries are the last tokens.
        rows: Indices of queries, increasing.
        as_float64: Makes a NumPy array of a piece of a tensor.
        has_bias: False for attention without positions.
    """

    def pairs() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        batch, num_heads, q_len, _ = tensors[0].shape
        slopes = canonical_slopes(num_heads) * has_bias
        positions = rows + tensors[1].shape[2] - q_len
        for entry, head in np.ndindex(batch, num_heads):
            query, key, value = (as_float64(x[entry, head]) for x in tensors)
            yield as_float64(found[entry, head])[rows], attend(query[rows], key, value, slopes[head], positions).result

    return Error.between(pairs())


def errors_of_gradients(
    found: Sequence[Any], tensors: Sequence[Any], grad: Any, as_float64: Callable[[Any], np.ndarray]
) -> dict[str, Error]:
    """Return the errors of the gradients of query, key and value, all ``[batch, num_heads, length, head_dim]``."""
    batch, num_heads, length, _ = tensors[0].shape
    pairs: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {"query": [], "key": [], "value": []}
    for entry, head in np.ndindex(batch, num_heads):
        arrays = [as_float64(x[entry, head]) for x in (*tensors, grad)]
        exact = attend(*arrays[:3], canonical_slopes(num_heads)[head], np.arange(length), arrays[3])
        for index, name in enumerate(pairs):
            pairs[name].append((as_float64(found[index][entry, head]), getattr(exact, f"{name}_grad")))
    return {name: Error.between(iter(each)) for name, each in pairs.items()}


def sample(length: int, count: int) -> np.ndarray:
    """Return indices of so many queries, the first and the last among them, increasing."""
    drawn = np.random.default_rng(length).choice(length, min(count, length), replace=False)
    return np.unique(np.concatenate([drawn, [0, length - 1]]))
