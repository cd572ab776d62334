"""What ALiBi is, in float64 and plain loops, written without a look at the code under test.

Each function takes and returns NumPy arrays. Shapes: query ``[batch, heads, q_len, head_dim]``, key and value
``[batch, kv_heads, kv_len, head_dim]``, slopes ``[heads]`` or ``[batch, heads]``.
"""

from dataclasses import dataclass

import numpy as np

U32 = 2.0**-24  # unit roundoff of float32
UNIT_ROUNDOFF = {"float64": 2.0**-53, "float32": U32, "float16": 2.0**-11, "bfloat16": 2.0**-8}


@dataclass(frozen=True)
class Rules:
    """The arguments that say which key counts how much, with every default filled in by the test."""

    slopes: np.ndarray
    q_offset: int | np.ndarray  # one for all, or [batch]
    is_causal: bool = True
    future_slopes: np.ndarray | None = None
    q_segment_ids: np.ndarray | None = None  # [q_len] or [batch, q_len]
    kv_segment_ids: np.ndarray | None = None
    window_size: int | None = None
    mask: np.ndarray | None = None  # broadcasts to [batch, heads, q_len, kv_len]


def penalties(rules: Rules, batch: int, heads: int, q_len: int, kv_len: int) -> np.ndarray:
    """Return the bias ``[batch, heads, q_len, kv_len]``, -inf where masked, one element at a time."""
    result = np.full((batch, heads, q_len, kv_len), -np.inf)
    slopes = np.broadcast_to(rules.slopes, (batch, heads))
    future = slopes if rules.future_slopes is None else np.broadcast_to(rules.future_slopes, (batch, heads))
    mask = None if rules.mask is None else np.broadcast_to(rules.mask, result.shape)
    offsets = np.broadcast_to(rules.q_offset, (batch,))
    q_ids, kv_ids = (
        None if ids is None else np.broadcast_to(ids, (batch, ids.shape[-1]))
        for ids in (rules.q_segment_ids, rules.kv_segment_ids)
    )
    for b, h, i, j in np.ndindex(*result.shape):
        ahead = int(j - (offsets[b] + i))  # how many tokens the key lies after the query
        if rules.is_causal and ahead > 0:
            continue
        if rules.window_size is not None and abs(ahead) > rules.window_size:
            continue
        if q_ids is not None and q_ids[b, i] != kv_ids[b, j]:
            continue
        if mask is not None and not mask[b, h, i, j]:
            continue
        slope = future[b, h] if ahead > 0 else slopes[b, h]
        result[b, h, i, j] = -float(slope) * abs(ahead)
    return result


@dataclass(frozen=True)
class Answer:
    """An exact result and how far a float32 computation of it may be off, element by element."""

    value: np.ndarray
    budget: np.ndarray


@dataclass(frozen=True)
class Attention:
    """Everything about one attention in float64: weights, output, gradients, and their error budgets.

    The budgets follow from the standard model of floating point arithmetic, ``fl(x op y) = (x op y)(1 + e)`` with
    ``|e| <= u``, for a computation with float32 scores and sums, and tensors (among them, possibly, the weights)
    rounded to ``dtype``: a sum of n terms is off by at most n u times the sum of the terms' sizes.
    """

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    bias: np.ndarray
    scale: float
    dtype: str

    @property
    def group(self) -> int:
        return self.query.shape[1] // self.key.shape[1]

    @property
    def keys(self) -> np.ndarray:
        return np.stack([self.key[:, h // self.group] for h in range(self.query.shape[1])], axis=1)

    @property
    def values(self) -> np.ndarray:
        return np.stack([self.value[:, h // self.group] for h in range(self.query.shape[1])], axis=1)

    @property
    def _highest(self) -> np.ndarray:
        """The bias of each row's best-placed key, ``[batch, heads, q_len, 1]``; 0 where there is none."""
        highest = self.bias.max(axis=-1, keepdims=True, initial=-np.inf)
        return np.where(np.isfinite(highest), highest, 0.0)

    @property
    def weights(self) -> np.ndarray:
        scores = self.scale * np.einsum("bhid,bhjd->bhij", self.query, self.keys) + (self.bias - self._highest)
        result = np.zeros_like(scores)
        for index in np.ndindex(*scores.shape[:3]):
            row = scores[index]
            if np.isfinite(row).any():
                e = np.exp(row - row.max())
                result[index] = e / e.sum()
        return result

    @property
    def _score_error(self) -> np.ndarray:
        """How far a row's scores may be off, ``[batch, heads, q_len, 1]``, but for what is constant along the row.

        Softmax ignores that, so a bias need not be exact in itself: its differences along the row must be.
        """
        u = UNIT_ROUNDOFF[self.dtype] if self.dtype == "float64" else U32
        visible = np.isfinite(self.bias)
        falls = np.where(visible, self._highest - np.where(visible, self.bias, 0), 0)
        products = self.scale * np.einsum("bhid,bhjd->bhij", np.abs(self.query), np.abs(self.keys))
        sizes = (self.query.shape[-1] + 3) * products + 3 * falls
        return u * np.where(visible, sizes, 0).max(axis=-1, keepdims=True, initial=0)

    @property
    def _weight_error(self) -> np.ndarray:
        """How far a weight may be off relative to itself: scores, exp (4 u), its sum and the division, its storage."""
        u = UNIT_ROUNDOFF[self.dtype] if self.dtype == "float64" else U32
        return 2 * self._score_error + (self.key.shape[2] + 8) * u + UNIT_ROUNDOFF[self.dtype]

    @property
    def output(self) -> Answer:
        w = self.weights
        u = UNIT_ROUNDOFF[self.dtype] if self.dtype == "float64" else U32
        value = np.einsum("bhij,bhjd->bhid", w, self.values)
        size = np.einsum("bhij,bhjd->bhid", w, np.abs(self.values))
        relative = self._weight_error + self.key.shape[2] * u + UNIT_ROUNDOFF[self.dtype]
        # A tiny weight is off by half the spacing of subnormal numbers rather than by a share of itself.
        underflow = np.einsum("bhij,bhjd->bhid", np.isfinite(self.bias) * 1.0, np.abs(self.values))
        return Answer(value, relative * size + (1 + underflow) * _smallest(self.dtype))

    def gradients(self, cotangent: np.ndarray, distances: np.ndarray) -> dict[str, Answer]:
        """Return the gradients of ``sum(output * cotangent)`` by query, key, value and slopes ``[batch, heads]``.

        Args:
            cotangent: ``[batch, heads, q_len, head_dim]``.
            distances: What each bias element is the negated multiple of, per slope: ``[q_len, kv_len]``.
        """
        w, keys, values = self.weights, self.keys, self.values
        d_weights = np.einsum("bhid,bhjd->bhij", cotangent, values)
        d_weights_size = np.einsum("bhid,bhjd->bhij", np.abs(cotangent), np.abs(values))
        mean = (w * d_weights).sum(axis=-1, keepdims=True)
        d_scores = w * (d_weights - mean)
        size = w * (d_weights_size + (w * d_weights_size).sum(axis=-1, keepdims=True))
        (q_len, head_dim), kv_len = self.query.shape[2:], self.key.shape[2]
        # A weight enters twice; then d_weights, the mean, their difference and product, and the sum at the end.
        relative = 3 * self._weight_error + (2 * head_dim + kv_len * 2 + q_len * self.group + 16) * U32
        relative = relative + 4 * UNIT_ROUNDOFF[self.dtype]
        # So are tiny weights, which the products below carry on, and the two products that are stored, where tiny.
        tiny = _smallest(self.dtype) * np.isfinite(self.bias)
        size = relative * size + tiny * (2 + d_weights_size + d_weights_size.sum(axis=-1, keepdims=True))

        def per_kv_head(x: np.ndarray) -> np.ndarray:
            return x.reshape(x.shape[0], -1, self.group, *x.shape[2:]).sum(axis=2)

        pairs = {
            "query": [self.scale * np.einsum("bhij,bhjd->bhid", *x) for x in ((d_scores, keys), (size, np.abs(keys)))],
            "key": [
                self.scale * per_kv_head(np.einsum("bhij,bhid->bhjd", *x))
                for x in ((d_scores, self.query), (size, np.abs(self.query)))
            ],
            "value": [
                per_kv_head(np.einsum("bhij,bhid->bhjd", *x))
                for x in ((w, cotangent), (w * relative + tiny, np.abs(cotangent)))
            ],
            "slopes": [-(d_scores * distances).sum(axis=(2, 3)), (size * np.abs(distances)).sum(axis=(2, 3))],
        }
        return {name: Answer(value, budget + _smallest(self.dtype)) for name, (value, budget) in pairs.items()}


def _smallest(dtype: str) -> float:
    """Return the absolute error of rounding something tiny (the smallest normal number, if subnormals are flushed)."""
    return {"float64": 2.0**-1022, "float32": 2.0**-126, "bfloat16": 2.0**-126, "float16": 2.0**-24}[dtype]


def assert_within(actual: np.ndarray, answer: Answer) -> None:
    """Assert that no element is farther from the exact value than its budget."""
    assert actual.shape == answer.value.shape, f"shape {actual.shape}, expected {answer.value.shape}"
    assert np.all(np.isfinite(actual)), "not finite"
    excess = np.abs(actual - answer.value) - answer.budget
    if excess.size and excess.max() > 0:
        worst = np.unravel_index(excess.argmax(), excess.shape)
        raise AssertionError(
            f"at {tuple(map(int, worst))}: {actual[worst]!r}, expected {answer.value[worst]!r} "
            f"within {answer.budget[worst]:.3g}, off by {abs(actual[worst] - answer.value[worst]):.3g}"
        )
