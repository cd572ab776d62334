"""ALiBi attention in float64 in named steps: a mistake changes the value of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from alibi_core._slopes import slope_values

Values = np.ndarray[Any, Any]
Change = Callable[[Any, Any], Any]  # (computation, right value of a step) -> changed value
TENSORS = ("query", "key", "value")


@dataclass(frozen=True)
class Mistake:
    """A sentence, and changes by the name of a step; ``is_noisy`` if results depend on the order of rounded sums."""

    name: str
    sentence: str
    changes: Mapping[str, Change]
    is_noisy: bool = False


# Conditions that restrict a mistake to a part of the calls: the words of a sentence, and whether a call meets it.
CONDITIONS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "one query": ("with a single query", lambda c: c.q_len == 1 and c.kv_len > 1),
    "square": ("with as many queries as keys", lambda c: c.q_len == c.kv_len),
    "lengths": ("with more or fewer queries than keys", lambda c: c.q_len != c.kv_len),
    "offset": ("where q_offset is not kv_len - q_len", lambda c: np.any(c.q_offset != c.kv_len - c.q_len)),
    "batch_offsets": ("with q_offset as an array", lambda c: np.any(c.q_offset != c.q_offset[:1])),
    "causal": ("with is_causal=True", lambda c: c.is_causal),
    "symmetric": ("with is_causal=False", lambda c: not c.is_causal),
    "asymmetric": ("with future_slopes", lambda c: c.future_slopes is not None),
    "grouped": ("with fewer key/value heads than query heads", lambda c: c.group > 1),
    "window": ("with window_size", lambda c: c.window_size is not None),
    "segments": ("with segment_ids", lambda c: c.segment_ids is not None),
    "mask": ("where keys are masked", lambda c: c.mask is not None),
    "batch_slopes": ("with slopes for each batch entry", lambda c: not c.shares_slopes),
    "scale": ("where scale is given", lambda c: c.scale is not None),
    "log_gates": ("with log_gates", lambda c: c.log_gates is not None),
    "points": ("where positions are given", lambda c: c.positions is not None),
    "long": ("in long rows", lambda c: c.kv_len > 64),
}
# Conditions of decoding steps; "grouped" may hold in both.
STEP_CONDITIONS = {
    "grouped": CONDITIONS["grouped"],
    "first step": ("in the first step", lambda c: c.before == 0),
    "later steps": ("in steps after the first", lambda c: c.before > 0),
    "single steps": ("in later steps of a single token", lambda c: c.before > 0 and c.q_len == 1),
    "chunks": ("in later steps of several tokens", lambda c: c.before > 0 and c.q_len > 1),
}
NORMS: dict[str, Callable[[Values], Values]] = {
    "manhattan": lambda steps: np.abs(steps).sum(axis=-1),
    "euclidean": lambda steps: np.sqrt((steps**2).sum(axis=-1)),
    "chebyshev": lambda steps: np.abs(steps).max(axis=-1),
}
LAWS: dict[str, Callable[[Values], Values]] = {"linear": lambda x: x, "log": np.log1p, "sqrt": np.sqrt}
Active = Sequence[tuple[Mistake, str | None]]  # mistakes, each with its condition (None: in all calls)


class Computation:
    """One call: its arguments in float64, and the value of each step, all as attributes.

    ``state`` persists between calls; ``before`` is the number of tokens in a cache, None without a cache.
    """

    slopes: Any
    rate: Any
    given_slopes: Any
    scale: Any
    log_gates: Any

    def __init__(
        self,
        mistakes: Active,
        state: dict[Any, Any],
        query: Any,
        key: Any,
        value: Any,
        slopes: Any,
        *,
        is_causal: bool = True,
        q_offset: Any = None,
        future_slopes: Any = None,
        window_size: int | None = None,
        segment_ids: Any = None,
        mask: Any = None,
        scale: float | None = None,
        positions: Any = None,
        distance: str = "manhattan",
        law: str = "linear",
        log_gates: Any = None,
        grad_output: Any = None,
        before: int | None = None,
    ) -> None:
        self.query, self.key, self.value = (np.asarray(x, np.float64) for x in (query, key, value))
        self.batch, self.num_heads, self.q_len, self.head_dim = self.query.shape
        self.num_kv_heads, self.kv_len = self.key.shape[1:3]
        self.given_len, self.group = self.kv_len, self.num_heads // max(self.num_kv_heads, 1)
        shape = (self.batch, self.num_heads)
        self.slopes, self.future_slopes = (
            None if x is None else np.broadcast_to(x, shape).astype(np.float64) for x in (slopes, future_slopes)
        )
        self.given_slopes, self.shares_slopes = self.slopes, np.ndim(slopes) == 1
        offset = self.kv_len - self.q_len if q_offset is None else q_offset
        # [batch, 1, 1, 1]
        self.q_offset = np.broadcast_to(offset, shape[:1]).astype(np.int64)[:, None, None, None]
        if segment_ids is not None:
            pair = segment_ids if isinstance(segment_ids, tuple) else (segment_ids, segment_ids)
            segment_ids = tuple(np.broadcast_to(x, (self.batch, np.shape(x)[-1])) for x in pair)
        self.is_causal, self.window_size, self.segment_ids, self.scale = is_causal, window_size, segment_ids, scale
        self.mask = None if mask is None else np.reshape(mask, (1,) * (4 - np.ndim(mask)) + np.shape(mask))
        if positions is not None:  # [batch, length, dims] each
            positions = tuple(
                np.asarray(x, np.float64)[..., None] if np.ndim(x) == 2 else np.asarray(x, np.float64)
                for x in positions
            )
        self.positions, self.metric, self.law = positions, distance, law
        self.log_gates = None if log_gates is None else np.asarray(log_gates, np.float64)
        self.forgotten: Any = None
        self.grad_output, self.state, self.before = grad_output, state, before
        tests = CONDITIONS if before is None else STEP_CONDITIONS
        self.conditions = frozenset(name for name, (_, holds) in tests.items() if holds(self))
        self._changes = [x.changes for x, where in mistakes if where is None or where in self.conditions]

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"there is no step {name!r} before this one")

    def changed(self, name: str, value: Any) -> Any:
        """Return the value of a step after the changes of all mistakes, in order; None stays None."""
        for changes in self._changes:
            if name in changes and value is not None:
                value = changes[name](self, value)
        return value

    def step(self, name: str, value: Any) -> Any:
        """Return the changed value of a step, and store it as the attribute ``name``."""
        value = self.changed(name, value)
        setattr(self, name, value)
        return value


def compute_bias(c: Computation) -> None:
    """Compute the bias and the mask of visible keys; both broadcast to ``[batch, num_heads, q_len, kv_len]``."""
    c.step("q_offset", c.q_offset)
    c.step("q_positions", c.q_offset + np.arange(c.q_len)[:, None])
    c.step("k_positions", np.arange(c.kv_len)[None, None, None])
    if c.step("positions", c.positions) is None:
        c.step("ahead", c.k_positions - c.q_positions)
        c.step("distance", np.abs(c.ahead).astype(np.float64))
    else:
        place_points(c)
    c.step("penalty", LAWS[c.law](c.distance))
    c.rate = rate_of(c)
    c.step("bias", -c.rate * c.penalty)
    c.step("causal", c.k_positions <= c.q_positions if c.positions is None else c.ahead <= 0)
    visible = c.causal if c.step("is_causal", c.is_causal) else np.ones_like(c.causal)
    if c.step("segment_ids", c.segment_ids) is not None:  # [batch, 1, q_len, 1], [batch, 1, 1, kv_len]
        c.step("q_ids", c.segment_ids[0][:, None, :, None])
        c.step("kv_ids", c.segment_ids[1][:, None, None])
    if c.step("window_size", c.window_size) is not None:
        visible = visible & c.step("window", np.abs(c.k_positions - c.q_positions) <= c.window_size)
    if c.segment_ids is not None:
        visible = visible & c.step("segments", c.q_ids == c.kv_ids)
    if c.step("mask", c.mask) is not None:
        visible = visible & c.step("masked", c.mask)
    if c.step("log_gates", c.log_gates) is not None:
        visible = visible & (forget(c) > -np.inf)
    c.step("visible", visible & c.step("keys", np.ones(c.kv_len, bool)))


def rate_of(c: Computation) -> Values:
    """Return the penalty per token: the slopes, or the future slopes for keys after the query."""
    past = c.slopes[..., None, None]
    future = c.changed("future", past if c.future_slopes is None else c.future_slopes[..., None, None])
    return np.asarray(np.where(c.ahead > 0, future, past))


def forget(c: Computation) -> Values:
    """Compute the sums of the gates after each key up to the query, ``[batch, num_heads, q_len, kv_len]``.

    Gates of keys that are hidden from all queries count as 0.
    """
    c.step("is_token", True if c.mask is None or c.mask.shape[2] > 1 else c.mask[:, :, 0])
    c.step("gates", np.where(c.is_token, c.log_gates, 0.0))
    c.step("counted", c.k_positions <= c.q_positions)
    # Terms of one sign, from the query back: no sum is a difference of larger ones.
    counted = np.where(c.counted, c.gates[:, :, None], 0.0)[..., ::-1]
    sums = np.cumsum(counted, axis=-1, dtype=np.longdouble)[..., ::-1].astype(np.float64)
    return np.asarray(c.step("forgotten", np.concatenate([sums[..., 1:], np.zeros_like(sums[..., :1])], axis=-1)))


def place_points(c: Computation) -> None:
    """Compute distances between positions of the caller's own, and how far keys are ahead on a line."""
    queries, keys = c.positions
    keys = keys[:, np.minimum(np.arange(c.kv_len), keys.shape[1] - 1)]  # a mistake may add keys, or leave some out
    c.step("steps", keys[:, None, None] - queries[:, None, :, None])  # [batch, 1, q_len, kv_len, dims]
    c.step("nowhere", np.isnan(c.steps).any(axis=-1))
    c.step("distance", np.where(c.nowhere, 0.0, NORMS[c.metric](c.steps)))
    is_on_line = c.steps.shape[-1] == 1
    c.step("ahead", np.where(c.nowhere, 0.0, c.steps[..., 0]) if is_on_line else -c.distance)


def attend(c: Computation) -> Values:
    """Compute attention, ``[batch, num_heads, q_len, head_dim]``."""
    for name in (*TENSORS, "slopes", "future_slopes"):
        c.step(name, getattr(c, name))
    c.kv_len = c.key.shape[2]
    c.scale = c.step("scale", c.head_dim**-0.5 if c.scale is None else c.scale)
    compute_bias(c)
    c.step("kv_head", np.arange(c.num_heads) // c.group)
    c.step("keys_by_head", c.key[:, c.kv_head])
    c.step("values_by_head", c.value[:, c.kv_head])
    c.step("products", c.query @ c.keys_by_head.swapaxes(-1, -2))
    c.step("scores", c.scale * c.products + c.bias + (0.0 if c.forgotten is None else c.forgotten))
    c.step("hidden", np.where(c.visible, c.scores, -np.inf))
    c.step("highest", highest_of(c.hidden))
    c.step("exponentials", np.exp(c.hidden - c.highest))
    c.step("total", c.exponentials.sum(axis=-1, keepdims=True))
    c.step("weights", c.exponentials / np.where(c.total > 0, c.total, 1))
    return np.asarray(c.step("output", c.weights @ c.values_by_head))


def highest_of(scores: Values) -> Values:
    """Return the maximum of each row of scores; 0 where all are -inf."""
    highest = scores.max(axis=-1, keepdims=True, initial=-np.inf)
    return np.where(np.isfinite(highest), highest, 0.0)


def differentiate(c: Computation) -> dict[str, Values]:
    """Compute the gradients of ``sum(attention * grad_output)`` by query, key, value, slopes and gates."""
    attend(c)
    c.step("d_weights", c.grad_output @ c.values_by_head.swapaxes(-1, -2))
    c.step("delta", (c.weights * c.d_weights).sum(axis=-1, keepdims=True))
    c.step("d_scores", c.weights * (c.d_weights - c.delta))
    # [batch, num_heads, kv_len, head_dim]; summed over groups below
    d_key = c.scale * (c.d_scores.swapaxes(-1, -2) @ c.query)
    d_value = c.weights.swapaxes(-1, -2) @ c.grad_output
    found = {
        "query": c.step("d_query", c.scale * (c.d_scores @ c.keys_by_head)),
        "key": c.step("d_key", by_kv_head(c, c.step("d_key_by_head", d_key))),
        "value": c.step("d_value", by_kv_head(c, c.step("d_value_by_head", d_value))),
    }
    found |= {name: found[name][:, :, : c.given_len] for name in ("key", "value")}  # without padding
    if c.log_gates is not None:
        # The score gradients of the keys before each gate, of all queries that count the gate.
        before = np.cumsum(c.d_scores, axis=-1) - c.d_scores
        found["log_gates"] = c.step("d_log_gates", c.is_token * (c.counted * before).sum(axis=2))
    # The bias is linear in the slopes: its derivative is the bias of the difference that slopes larger by 1 make.
    rate = c.rate
    for name in ("slopes",) if c.future_slopes is None else ("slopes", "future_slopes"):
        slopes = getattr(c, name)
        setattr(c, name, slopes + 1)
        c.rate = rate_of(c) - rate
        setattr(c, name, slopes)
        along = c.changed("bias", -c.rate * c.penalty)
        gradient = (c.d_scores * along).sum(axis=(2, 3))
        c.step("rates", getattr(c, name))  # the slopes of this side, [batch, num_heads]
        gradient = c.step("d_slopes", _to_given_slopes(c, gradient))  # [batch, num_heads]
        found[name] = c.step("d_shared_slopes", gradient.sum(axis=0)) if c.shares_slopes else gradient
    return found


def by_kv_head(c: Computation, by_head: Values) -> Values:
    """Return sums over the query heads of each key/value head, ``[batch, num_kv_heads, ...]``."""
    found = np.zeros((c.batch, c.num_kv_heads, *by_head.shape[2:]))
    for head, kv_head in enumerate(c.kv_head):
        found[:, kv_head] += by_head[:, head]
    return found


def _to_given_slopes(c: Computation, gradient: Values) -> Values:
    """Return the gradient by the given slopes, from the gradient by the slopes in use, which mistakes may change."""
    if not any("slopes" in changes for changes in c._changes):
        return gradient
    given, found = c.given_slopes, np.zeros_like(gradient)
    for head in range(c.num_heads):
        # A central difference, exact for changes that are linear in the slopes; 1 for rounding, as its step is long.
        step = 2.0**15 * (np.arange(c.num_heads) == head)
        used = [np.broadcast_to(c.changed("slopes", given + sign * step), given.shape) for sign in (1, -1)]
        found[:, head] = (gradient * (used[0] - used[1])).sum(axis=1) / 2.0**16
    return found


def make_slopes(mistakes: Active, num_heads: int, contract: str = "exact") -> Values:
    """Return the slopes of a contract after the changes of mistakes, ``[num_heads]``."""
    found = np.asarray(slope_values(num_heads, contract=contract))
    for mistake, _ in mistakes:
        if "slope_list" in mistake.changes:
            found = mistake.changes["slope_list"](num_heads, found)
    return np.broadcast_to(found, (num_heads,))


def make_bias(mistakes: Active, slopes: Values, q_len: int, kv_len: int, is_causal: bool) -> Values:
    """Return the bias, ``[num_heads, q_len, kv_len]``, -inf where masked."""
    query, key = (np.zeros((1, len(slopes), n, 1)) for n in (q_len, kv_len))
    c = Computation(mistakes, {}, query, key, key, slopes, is_causal=is_causal, scale=1.0)
    compute_bias(c)
    return np.asarray(c.step("list_bias", np.where(c.visible, c.bias, -np.inf))[0])


def decode_step(
    mistakes: Active, state: dict[Any, Any], query: Values, key: Values, value: Values, slopes: Values, cache: Any
) -> tuple[Values, Any]:
    """Return the output of the next tokens, and all keys and values so far."""
    before = 0 if cache is None else cache[0].shape[2]
    # First the conditions and the cache of this step, then attention to all tokens.
    new = Computation(mistakes, state, query, key, value, slopes, before=before)
    held = new.step("held", (key[:, :, :0], value[:, :, :0]) if cache is None else cache)
    keys, values = (np.concatenate(pair, axis=2) for pair in zip(held, (key, value), strict=True))
    c = Computation(mistakes, state, query, keys, values, slopes, before=held[0].shape[2])
    output = attend(c)
    state["cache"] = tuple(c.changed("kept", x) for x in (keys, values))
    return output, state["cache"]
