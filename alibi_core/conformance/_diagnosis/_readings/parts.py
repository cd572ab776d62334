"""Parts of readings: laws of distance, masks, the softmax."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from alibi_core.conformance._cases import Values, rounded

# Of distances: by how many slopes a key at most that far is penalised.
LAWS: dict[str, Callable[[Values, float], Values]] = {
    "squared distance": lambda x, n: x**2,
    "root of distance": lambda x, n: np.sqrt(x),
    "log distance": lambda x, n: np.log1p(x),
    "log2 distance": lambda x, n: np.log2(1 + x),
    "distance clipped": lambda x, n: np.minimum(x, n),
    "distance in steps": lambda x, n: x // n * n,
    "distance in blocks": lambda x, n: x // n,
    "int8 positions": lambda x, n: np.abs((x + 128) % 256 - 128),
    "power": lambda x, n: x**n,
}


def softmax(scores: Values, kind: str) -> Values:
    """Return weights of scores."""
    axis = -2 if kind == "softmax over queries" else -1
    highest = scores.max(axis=axis, keepdims=True, initial=-np.inf)
    highest = np.where(np.isfinite(highest), highest, 0.0)
    if kind == "no maximum in softmax":
        shown = np.exp(scores.astype(np.float32)).astype(np.float64)
        return np.asarray(shown / shown.sum(axis=-1, keepdims=True, dtype=np.float32))
    if kind == "not normalised":
        return np.asarray(np.exp(np.minimum(scores, 700)))
    weights = np.exp(scores - highest)
    if kind.startswith(("values not rescaled", "denominator not rescaled")):
        unscaled = _never_rescaled(scores, int(kind.split()[-1]))
        one, other = (unscaled, weights) if kind.startswith("values") else (weights, unscaled)
        total = other.sum(axis=-1, keepdims=True)
        return np.asarray(one / np.where(total > 0, total, 1.0))
    total = weights.sum(axis=axis, keepdims=True)
    if kind == "extra 1 in softmax":
        total = total + np.exp(np.minimum(-highest, 700))
    return np.asarray(weights / np.where(total > 0, total, 1.0))


def _never_rescaled(scores: Values, size: int) -> Values:
    """Return exponentials of scores less the largest of all blocks of keys so far, their own included."""
    kv_len = scores.shape[-1]
    ends = np.minimum((np.arange(kv_len) // size + 1) * size, kv_len) - 1
    highest = np.maximum.accumulate(scores, axis=-1)[..., ends]
    return np.asarray(np.exp(scores - np.where(np.isfinite(highest), highest, 0.0)))


def side_slopes(kind: str, past: Values, future: Values) -> tuple[Values, Values]:
    """Return the slopes of keys before and after the query."""
    kinds = {
        "signed": (past, -past),
        "signed, of its own slope": (past, -future),
        "clamped": (past, future * 0),
        "past clamped": (past * 0, future),
        "future slopes ignored": (past, past),
        "future slopes of 0 ignored": (past, future if np.any(future) else past),
        "future slopes swapped": (future, past),
        "future slopes for all": (future, future),
    }
    return kinds.get(kind, (past, future))


def is_in_order(kind: str, number: int, ahead: Values, columns: Values, q_len: int) -> Values:
    """Return which keys the causal mask shows."""
    if kind == "one query not causal" and q_len == 1:
        return np.ones((1, 1, 1, columns.size), dtype=bool)
    if kind == "causal reversed":
        return ahead >= 0
    if kind == "causal by blocks":
        return np.asarray(columns // number <= (columns - ahead) // number)
    return ahead <= {"causal hides own key": -1, "causal sees the next key": 1}.get(kind, 0)


def is_in_window(kind: str, ahead: Values, size: int) -> Values:
    """Return which keys the window shows."""
    if kind == "window 0 as none" and size == 0:
        return np.ones_like(ahead, dtype=bool)
    widths = {
        "window one less": size - 1,
        "window one more": size + 1,
        "window halved": size // 2,
        "window doubled": 2 * size,
    }
    width = widths.get(kind, size)
    if kind == "window on past side only":
        return -ahead <= width
    if kind == "window on future side only":
        return ahead <= width
    if kind == "window hides the future":
        return (ahead <= 0) & (-ahead <= width)
    return np.abs(ahead) <= width


def is_in_segment(kind: str, q_ids: Values, kv_ids: Values) -> Values:
    """Return which keys are in the query's segment, ``[batch, 1, q_len, kv_len]``."""
    q_len, kv_len = q_ids.shape[1], kv_ids.shape[1]
    if kind == "segments of first batch":
        q_ids, kv_ids = q_ids[:1], kv_ids[:1]
    if kind == "segments of keys only":
        q_ids = np.resize(kv_ids.T, (q_len, kv_ids.shape[0])).T
    if kind == "segments of last keys" and q_len <= kv_len:
        q_ids = kv_ids[:, kv_len - q_len :]
    if kind == "segments of queries only":
        kv_ids = np.resize(q_ids.T, (kv_len, q_ids.shape[0])).T
    one, other = q_ids[:, None, :, None], kv_ids[:, None, None, :]
    if kind == "segments see earlier ones":
        return np.asarray(one >= other)
    if kind == "segments inverted":
        return np.asarray(one != other)
    if kind == "segment 0 hidden":
        return np.asarray((one == other) & (other != 0))
    return np.asarray(one == other)


def taken_mask(kind: str, mask: Values) -> Values:
    """Return the mask, as it is taken."""
    kinds: dict[str, Callable[[], Values]] = {
        "mask inverted": lambda: ~mask,
        "mask of first batch": lambda: mask[:1],
        "mask of first head": lambda: mask[:, :1],
        "mask of first query": lambda: mask[:, :, :1],
    }
    return kinds[kind]() if kind in kinds else mask


def segment_starts(ids: Values) -> Values:
    """Return at every place the index of its segment's first place, where one begins, else 0."""
    is_first = np.concatenate([np.ones_like(ids[:, :1], bool), ids[:, 1:] != ids[:, :-1]], axis=1)
    return is_first * np.arange(ids.shape[1])


def low(values: Values, dtype: str) -> Values:
    """Return values rounded, also to TensorFloat-32, which keeps 11 significant bits of float32's range."""
    if dtype != "tf32":
        return rounded(values, dtype)
    mantissa, exponent = np.frexp(values)
    return np.ldexp(np.round(mantissa * 2**11) / 2**11, exponent)
