"""ALiBi attention in float64, by its definition: what every result is compared with. NumPy alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from alibi_core.conformance import rounded
from benchmarks.exact import exact_slopes

MOST_HEADS = 32  # of a batch, all its entries counted, that are recomputed
AsFloat64 = Callable[[Any], np.ndarray]


def canonical_slopes(num_heads: int) -> np.ndarray:
    """Return the slopes as float32 holds them, in float64."""
    return exact_slopes(num_heads).astype(np.float32).astype(np.float64)


def row_of_biases(num_heads: int, length: int) -> np.ndarray:
    """Return the biases of the last of so many tokens, ``[1, num_heads, 1, length]``, float32."""
    distance = np.arange(length - 1, -1, -1)
    return (-canonical_slopes(num_heads)[:, None] * distance)[None, :, None].astype(np.float32)


def attend(
    tensors: Sequence[np.ndarray],
    slope: float,
    positions: np.ndarray,
    grad: np.ndarray | None = None,
    *,
    is_causal: bool = True,
    at_once: int = 2**24,
) -> list[np.ndarray]:
    """Return ALiBi attention of one head, and where ``grad``, the result's gradient, is given, those of its arguments.

    All are ``[queries or keys, head_dim]``, float64. ``tensors`` are some queries, which stand at ``positions``,
    increasing, and all keys and values; slope 0 is attention without positions. ``at_once`` caps the scores in memory.
    """
    query, key, value = tensors
    scale = query.shape[-1] ** -0.5
    found = [np.zeros_like(x) for x in (query, *(tensors if grad is not None else ()))]
    step = max(1, at_once // len(key))
    for start in range(0, len(query), step):
        rows = slice(start, start + step)
        place = positions[rows, None]
        seen = slice(int(place[-1, 0]) + 1 if is_causal else None)  # where causal, no query of these sees more keys
        distance = place - np.arange(len(key))[seen]
        scores = scale * (query[rows] @ key[seen].T) - slope * np.abs(distance)
        scores = np.where(distance < 0, -np.inf, scores) if is_causal else scores
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        found[0][rows] = weights @ value[seen]
        if grad is not None:
            weight_grad = grad[rows] @ value[seen].T
            mean = (weights * weight_grad).sum(axis=-1, keepdims=True)
            score_grad = scale * weights * (weight_grad - mean)
            found[1][rows] = score_grad @ key[seen]
            found[2][seen] += score_grad.T @ query[rows]
            found[3][seen] += weights.T @ grad[rows]
    return found


@dataclass(frozen=True)
class Error:
    """How far something is from what it should be."""

    worst: float  # of all elements
    relative: float  # of everything, as a part of its size

    @classmethod
    def between(cls, pairs: Iterable[tuple[np.ndarray, np.ndarray]]) -> Error:
        """Compare arrays ``[rows, head_dim]`` with exact ones."""
        found, exact = (np.concatenate(arrays) for arrays in zip(*pairs, strict=True))
        if not np.all(np.isfinite(found)):
            return cls(np.inf, np.inf)
        away = found - exact
        return cls(float(np.max(np.abs(away))), float(np.linalg.norm(away) / np.linalg.norm(exact)))


@dataclass(frozen=True)
class Reference:
    """Exact results of some queries of some heads, computed once and compared with many times."""

    rows: np.ndarray  # indices of queries, increasing
    exact: dict[tuple[int, int], np.ndarray]  # by batch entry and head, [rows, head_dim]
    as_float64: AsFloat64

    @classmethod
    def of(
        cls,
        tensors: Sequence[Any],
        rows: np.ndarray,
        as_float64: AsFloat64,
        *,
        grad: Any = None,
        has_bias: bool = True,
        is_causal: bool = True,
    ) -> Reference:
        """Compute results, or where ``grad`` is given gradients of the query, over all keys of each query.

        Tensors are query, key and value, ``[batch, num_heads, length, head_dim]``; the queries are the last tokens.
        """
        batch, num_heads, q_len, _ = tensors[0].shape
        slopes = canonical_slopes(num_heads) * has_bias
        positions = rows + tensors[1].shape[2] - q_len
        places = list(np.ndindex(batch, num_heads))
        exact = {}
        for place in places[:: -(-len(places) // MOST_HEADS)]:
            query, *others = (as_float64(x[place]) for x in tensors[:3])
            chosen = None if grad is None else as_float64(grad[place])[rows]
            found = attend([query[rows], *others], slopes[place[1]], positions, chosen, is_causal=is_causal)
            exact[place] = found[grad is not None]
        return cls(rows, exact, as_float64)

    def error(self, found: Any) -> Error:
        """Return how far a result (or gradient), ``[batch, num_heads, q_len, head_dim]``, is from the exact one."""
        return Error.between((self.as_float64(found[place])[self.rows], exact) for place, exact in self.exact.items())

    def rounding(self, dtype: str) -> Error:
        """Return the error of the exact result once rounded to a dtype of 16 bits: no result has less."""
        return Error.between((rounded(exact, dtype), exact) for exact in self.exact.values())


def errors_of_gradients(
    found: Sequence[Any], tensors: Sequence[Any], grad: Any, as_float64: AsFloat64, is_causal: bool = True
) -> dict[str, Error]:
    """Return the errors of the gradients of query, key and value, all ``[batch, num_heads, length, head_dim]``."""
    batch, num_heads, length, _ = tensors[0].shape
    pairs = []
    for place in np.ndindex(batch, num_heads):
        *arrays, over = (as_float64(x[place]) for x in (*tensors, grad))
        slope = canonical_slopes(num_heads)[place[1]]
        exact = attend(arrays, slope, np.arange(length), over, is_causal=is_causal)[1:]
        pairs.append([(as_float64(x[place]), y) for x, y in zip(found, exact, strict=True)])
    return dict(zip(("query", "key", "value"), map(Error.between, zip(*pairs, strict=True)), strict=True))


def sample(length: int, count: int) -> np.ndarray:
    """Return indices of so many queries, the first and the last among them, increasing."""
    drawn = np.random.default_rng(length).choice(length, min(count, length), replace=False)
    return np.unique(np.concatenate([drawn, [0, length - 1]]))
