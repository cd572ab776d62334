"""ALiBi attention in float64, by its definition: what every result is compared with. NumPy alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from alibi_core.conformance import rounded
from benchmarks.exact import exact_slopes

SCORES_AT_ONCE = 2**24  # 128 MiB in float64
MOST_HEADS = 32  # of a batch, all its entries counted, that are recomputed


def canonical_slopes(num_heads: int) -> np.ndarray:
    """Return the slopes as float32 holds them, in float64."""
    return exact_slopes(num_heads).astype(np.float32).astype(np.float64)


def row_of_biases(num_heads: int, length: int) -> np.ndarray:
    """Return the biases of the last of so many tokens, ``[1, num_heads, 1, length]``, float32."""
    distance = np.arange(length - 1, -1, -1)
    return (-canonical_slopes(num_heads)[:, None] * distance)[None, :, None].astype(np.float32)


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
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    slope: float,
    positions: np.ndarray,
    grad: Any = None,
    is_causal: bool = True,
) -> Exact:
    """Return ALiBi attention of one head, over all keys: ``[length, head_dim]``, float64.

    ``positions`` are those of the queries, in tokens, increasing; slope 0 is attention without positions. With
    ``grad``, the gradient of the result, those of the arguments are there, too.
    """
    scale = query.shape[-1] ** -0.5
    exact = Exact(np.empty_like(query))
    if grad is not None:
        exact.query_grad, exact.key_grad, exact.value_grad = (np.zeros_like(x) for x in (query, key, value))
    step = max(1, SCORES_AT_ONCE // len(key))
    for start in range(0, len(query), step):
        rows = slice(start, start + step)
        place = positions[rows, None]
        stop = int(place[-1, 0]) + 1 if is_causal else len(key)  # where causal, no query of these sees a key after it
        distance = place - np.arange(stop)
        scores = scale * (query[rows] @ key[:stop].T) - slope * np.abs(distance)
        scores = np.where(distance < 0, -np.inf, scores) if is_causal else scores
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
    """How far something is from what it should be."""

    worst: float  # of all elements
    relative: float  # of everything, as a part of its size
    # The same of each row, root mean square. Rows count alike: without positions the first rows, averages of few
    # values, are so much larger than the others that ``relative`` says little but of them.
    by_row: float

    @classmethod
    def between(cls, pairs: Iterable[tuple[np.ndarray, np.ndarray]]) -> Error:
        """Compare arrays ``[rows, head_dim]`` with exact ones."""
        found, exact = (np.concatenate(arrays) for arrays in zip(*pairs, strict=True))
        if not np.all(np.isfinite(found)):
            return cls(np.inf, np.inf, np.inf)
        errors, sizes = (np.sum(x**2, axis=-1) for x in (found - exact, exact))
        rows = errors[sizes > 0] / sizes[sizes > 0]
        return cls(
            worst=float(np.max(np.abs(found - exact))),
            relative=float(np.sqrt(np.sum(errors) / np.sum(sizes))),
            by_row=float(np.sqrt(np.mean(rows))),
        )


@dataclass(frozen=True)
class Reference:
    """Exact results of some queries of some heads, computed once and compared with many times."""

    rows: np.ndarray  # indices of queries, increasing
    exact: dict[tuple[int, int], np.ndarray]  # by batch entry and head, [rows, head_dim]
    as_float64: Callable[[Any], np.ndarray]

    @classmethod
    def of(
        cls,
        tensors: Sequence[Any],
        rows: np.ndarray,
        as_float64: Callable[[Any], np.ndarray],
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
        for entry, head in places[:: -(-len(places) // MOST_HEADS)]:
            query, key, value = (as_float64(x[entry, head]) for x in tensors[:3])
            chosen = None if grad is None else as_float64(grad[entry, head])[rows]
            found = attend(query[rows], key, value, slopes[head], positions, chosen, is_causal)
            exact[entry, head] = found.result if grad is None else found.query_grad
        return cls(rows, exact, as_float64)

    def error(self, found: Any) -> Error:
        """Return how far a result (or gradient), ``[batch, num_heads, q_len, head_dim]``, is from the exact one."""
        return Error.between((self.as_float64(found[place])[self.rows], exact) for place, exact in self.exact.items())

    def rounding(self, dtype: str) -> Error:
        """Return the error of the exact result once rounded to a dtype of 16 bits: no result has less."""
        return Error.between((rounded(exact, dtype), exact) for exact in self.exact.values())


def errors_of_gradients(
    found: Sequence[Any],
    tensors: Sequence[Any],
    grad: Any,
    as_float64: Callable[[Any], np.ndarray],
    is_causal: bool = True,
) -> dict[str, Error]:
    """Return the errors of the gradients of query, key and value, all ``[batch, num_heads, length, head_dim]``."""
    batch, num_heads, length, _ = tensors[0].shape
    pairs: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {"query": [], "key": [], "value": []}
    for entry, head in np.ndindex(batch, num_heads):
        arrays = [as_float64(x[entry, head]) for x in (*tensors, grad)]
        exact = attend(*arrays[:3], canonical_slopes(num_heads)[head], np.arange(length), arrays[3], is_causal)
        for index, name in enumerate(pairs):
            pairs[name].append((as_float64(found[index][entry, head]), getattr(exact, f"{name}_grad")))
    return {name: Error.between(each) for name, each in pairs.items()}


def sample(length: int, count: int) -> np.ndarray:
    """Return indices of so many queries, the first and the last among them, increasing."""
    drawn = np.random.default_rng(length).choice(length, min(count, length), replace=False)
    return np.unique(np.concatenate([drawn, [0, length - 1]]))
