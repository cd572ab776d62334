"""The reference for results: ALiBi attention in float64 by its definition, and slopes by the paper's code.

It uses NumPy only, and no code of the measured library.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

ROUNDOFF = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
MOST_ERROR = 16  # Units of roundoff. A wrong slope, mask or offset causes far more; rounding the result about 0.5.
AsFloat64 = Callable[[Any], np.ndarray]  # converts one head of one batch entry, [length, head_dim]


def slopes(num_heads: int) -> np.ndarray:
    """Return the paper's slopes, rounded to float32 as models hold them; ``[num_heads]`` float64."""
    power = 2 ** (num_heads.bit_length() - 1)
    exponents = [(head + 1) / power for head in range(power)]
    exponents += [(2 * head + 1) / (2 * power) for head in range(num_heads - power)]
    return np.exp2(-8 * np.asarray(exponents)).astype(np.float32).astype(np.float64)


def distance_row(num_heads: int, length: int) -> np.ndarray:
    """Return the biases of the last of ``length`` tokens, ``[1, num_heads, 1, length]`` float32."""
    return (-slopes(num_heads)[:, None] * np.arange(length - 1, -1, -1))[None, :, None].astype(np.float32)


def attend(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    slope: float,
    positions: np.ndarray,
    grad: np.ndarray | None = None,
    is_causal: bool = True,
) -> tuple[np.ndarray, ...]:
    """Return the attention of one head and, where ``grad`` is given, the gradients of query, key and value.

    Args:
        query: ``[queries, head_dim]`` float64, the queries at ``positions``.
        key: ``[keys, head_dim]`` float64, all keys.
        value: ``[keys, head_dim]``.
        slope: Slope of the bias; 0 for attention without positions.
        positions: ``[queries]`` integers, the positions of the queries among the keys.
        grad: The gradient of the result.
        is_causal: Whether keys after a query are masked.
    """
    scale = query.shape[-1] ** -0.5
    distance = positions[:, None] - np.arange(len(key))  # [queries, keys]
    scores = scale * (query @ key.T) - slope * np.abs(distance)
    if is_causal:
        scores[distance < 0] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    result = weights @ value
    if grad is None:
        return (result,)
    weight_grad = grad @ value.T
    score_grad = scale * weights * (weight_grad - (weights * weight_grad).sum(axis=-1, keepdims=True))
    return result, score_grad @ key, score_grad.T @ query, weights.T @ grad


def relative_error(found: Sequence[np.ndarray], exact: Sequence[np.ndarray]) -> float:
    """Return the norm of all errors divided by the norm of the exact numbers; inf if a number is not finite."""
    found, exact = (np.concatenate([np.ravel(x) for x in arrays]) for arrays in (found, exact))
    if not np.all(np.isfinite(found)):
        return np.inf
    return float(np.linalg.norm(found - exact) / np.linalg.norm(exact))


def sample(length: int, count: int) -> np.ndarray:
    """Return ``count`` increasing indices of queries, including the first and the last."""
    drawn = np.random.default_rng(length).choice(length, min(count, length), replace=False)
    return np.unique(np.concatenate([drawn, [0, length - 1]]))


class Reference:
    """Exact results of a sample of queries of a causal call, computed once and compared with many results."""

    def __init__(
        self,
        tensors: Sequence[Any],
        as_float64: AsFloat64,
        rows: np.ndarray | None = None,
        *,
        biased: bool = True,
        gradients: bool = False,
        is_causal: bool = True,
    ) -> None:
        """Compute the results of the queries ``rows`` in at most eight heads; or of all queries, with gradients.

        The tensors are query, key, value and the gradient of the result, each ``[batch, heads, length, head_dim]``;
        ``tensor[entry, head]`` is one head. The queries are the last tokens.
        """
        batch, num_heads, q_len, _ = tensors[0].shape
        self.as_float64, self.rows = as_float64, np.arange(q_len) if rows is None else rows
        places = [(entry, head) for entry in range(batch) for head in range(num_heads)]
        self.exact = {}
        for place in places if gradients else places[:: -(-len(places) // 8)]:
            query, key, value, *grad = (as_float64(x[place]) for x in (tensors if gradients else tensors[:3]))
            slope = slopes(num_heads)[place[1]] * biased
            positions = self.rows + len(key) - q_len
            self.exact[place] = attend(query[self.rows], key, value, slope, positions, *grad, is_causal=is_causal)

    def error(self, result: Any) -> float:
        """Return the relative error of a result."""
        found = [self.as_float64(result[place])[self.rows] for place in self.exact]
        return relative_error(found, [exact[0] for exact in self.exact.values()])

    def gradient_errors(self, gradients: Sequence[Any]) -> dict[str, float]:
        """Return the relative errors of the gradients of query, key and value."""
        named = enumerate(zip(("query", "key", "value"), gradients, strict=True), start=1)
        return {
            name: relative_error(
                [self.as_float64(x[place]) for place in self.exact], [y[i] for y in self.exact.values()]
            )
            for i, (name, x) in named
        }
