"""ALiBi attention in float64, step by step: a mistake changes what a step returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from alibi_core._slopes import slope_values
from alibi_core.conformance.case import TENSORS, Case
from alibi_core.conformance.oracle import Values, rounded

Change = Callable[[Any, Any], Any]  # of the computation so far and the right value of a step, to what becomes of it


@dataclass(frozen=True)
class Mistake:
    """Steps of the reference, by name, and what becomes of their values.

    Attributes:
        name: By which it is known.
        sentence: What is done instead and, where it is not plain, what to do about it.
        changes: By step.
        is_noisy: Whether it rounds sums whose order nobody knows, so that results are only nearly those.
    """

    name: str
    sentence: str
    changes: Mapping[str, Change]
    is_noisy: bool = False


# What may be true of some calls only: how the name of a mistake ends there, and how its sentence begins.
CONDITIONS = {
    "one query": ("with a single query", "With a single query"),
    "square": ("with equal lengths", "With as many queries as keys"),
    "lengths": ("with unequal lengths", "With more or fewer queries than keys"),
    "offset": ("with q_offset", "Where q_offset is not kv_len - q_len"),
    "batch offsets": ("with q_offset by batch entry", "With q_offset as an array"),
    "causal": ("when causal", "With is_causal=True"),
    "symmetric": ("when symmetric", "With is_causal=False"),
    "asymmetric": ("with future slopes", "With future_slopes"),
    "grouped": ("with grouped heads", "With fewer key/value heads than query heads"),
    "window": ("with a window", "With window_size"),
    "segments": ("with segments", "With segment_ids"),
    "mask": ("where keys are masked", "Where keys are masked"),
    "batch slopes": ("with slopes by batch entry", "With slopes for each batch entry"),
    "scale": ("with scale", "Where scale is given"),
    "long": ("in long rows", "In long rows"),
    "first step": ("in the first step", "In the first step"),
    "later steps": ("in later steps", "In steps after the first"),
    "single steps": ("in steps of one token", "In later steps of a single token"),
    "chunks": ("in steps of several tokens", "In later steps of several tokens"),
}
LONG = 65  # keys, from which on a row is long
Active = Sequence[tuple[Mistake, str | None]]  # mistakes, each with the condition under which it is made


class Computation:
    """One call: its arguments, then the value of each step, all as attributes.

    Args:
        mistakes: Those that are made.
        state: What is kept from call to call.
        arguments: As those of ``attention``, in float64; ``before`` is the number of tokens in a cache, None for none.
    """

    def __init__(self, mistakes: Active, state: dict[Any, Any], **arguments: Any) -> None:
        self.state, self.before = state, None
        self.__dict__.update(arguments)
        self.batch, self.num_heads, self.q_len, self.head_dim = self.query.shape
        self.num_kv_heads, self.kv_len = self.key.shape[1:3]
        self.given_len = self.kv_len
        self.group = self.num_heads // max(self.num_kv_heads, 1)
        self.conditions = self._conditions()
        self._changes = [x.changes for x, where in mistakes if where is None or where in self.conditions]

    scale: Any
    keys_by_head: Values
    values_by_head: Values

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"there is no step {name!r} before this one")

    def _conditions(self) -> frozenset[str]:
        default = self.kv_len - self.q_len
        found = {
            "one query": self.q_len == 1 and self.kv_len > 1,
            "square": self.q_len == self.kv_len,
            "lengths": self.q_len != self.kv_len,
            "offset": self.before is None and bool(np.any(self.q_offset != default)),
            "batch offsets": self.before is None and bool(np.any(self.q_offset != self.q_offset[:1])),
            "causal": bool(self.is_causal),
            "symmetric": not self.is_causal,
            "asymmetric": self.future_slopes is not None,
            "grouped": self.group > 1,
            "window": self.window_size is not None,
            "segments": self.segment_ids is not None,
            "mask": self.mask is not None,
            "batch slopes": not self.shares_slopes,
            "scale": self.scale is not None,
            "long": self.kv_len >= LONG,
        }
        if self.before is not None:
            found = {"grouped": self.group > 1, "first step": self.before == 0, "later steps": self.before > 0}
            found |= {"single steps": self.before > 0 and self.q_len == 1, "chunks": self.before > 0 and self.q_len > 1}
        return frozenset(name for name, holds in found.items() if holds)

    def changed(self, name: str, value: Any) -> Any:
        """Return what the mistakes make of a value, in their order; None stays None."""
        for changes in self._changes:
            if name in changes and value is not None:
                value = changes[name](self, value)
        return value

    def step(self, name: str, value: Any) -> Any:
        """Return what the mistakes make of the value of a step, and keep it."""
        value = self.changed(name, value)
        setattr(self, name, value)
        return value


def compute_bias(c: Computation) -> None:
    """Compute the bias, and which keys are visible, both broadcastable to ``[batch, num_heads, q_len, kv_len]``."""
    c.step("q_offset", c.q_offset)
    c.step("q_positions", c.q_offset + np.arange(c.q_len)[:, None])
    c.step("k_positions", np.arange(c.kv_len)[None, None, None])
    c.step("ahead", c.k_positions - c.q_positions)
    c.step("distance", np.abs(c.ahead).astype(np.float64))
    past = c.slopes[..., None, None]
    c.step("future", past if c.future_slopes is None else c.future_slopes[..., None, None])
    c.step("rate", np.where(c.ahead > 0, c.future, past))
    c.step("bias", -c.rate * c.distance)
    c.step("causal_ahead", c.k_positions - c.q_positions)
    c.step("causal", c.causal_ahead <= 0)
    visible = c.causal if c.step("is_causal", c.is_causal) else np.ones_like(c.causal)
    c.step("window_ahead", c.k_positions - c.q_positions)
    if c.step("window_size", c.window_size) is not None:
        visible = visible & c.step("window", np.abs(c.window_ahead) <= c.window_size)
    if c.step("segment_ids", c.segment_ids) is not None:
        q_ids, kv_ids = c.segment_ids[0][:, None, :, None], c.segment_ids[1][:, None, None]
        visible = visible & c.step("segments", q_ids == kv_ids)
    if c.step("mask", c.mask) is not None:
        visible = visible & c.step("masked", c.mask)
    c.step("visible", visible & c.step("keys", np.ones(c.kv_len, bool)))


def attend(c: Computation) -> Values:
    """Compute attention, ``[batch, num_heads, q_len, head_dim]``."""
    for name in (*TENSORS, "slopes", "future_slopes"):
        c.step(name, getattr(c, name))
    c.kv_len = c.key.shape[2]
    c.scale = c.step("scale", c.head_dim**-0.5 if c.scale is None else c.scale)
    compute_bias(c)
    c.step("kv_head", np.arange(c.num_heads) // c.group)
    c.keys_by_head, c.values_by_head = c.key[:, c.kv_head], c.value[:, c.kv_head]
    c.step("products", c.query @ c.keys_by_head.swapaxes(-1, -2))
    c.step("scores", c.scale * c.products + c.bias)
    c.step("hidden", np.where(c.visible, c.scores, -np.inf))
    c.step("weights", softmax(c.hidden))
    return np.asarray(c.step("output", c.weights @ c.values_by_head))


def softmax(scores: Values, axis: int = -1) -> Values:
    """Return weights of scores; zeros where all are minus infinity."""
    highest = scores.max(axis=axis, keepdims=True, initial=-np.inf)
    weights = np.exp(scores - np.where(np.isfinite(highest), highest, 0))
    total = weights.sum(axis=axis, keepdims=True)
    return np.asarray(weights / np.where(total > 0, total, 1))


def differentiate(c: Computation) -> dict[str, Values]:
    """Compute the gradients of ``sum(attention * grad_output)`` by query, key, value and slopes."""
    attend(c)
    c.step("d_weights", c.grad_output @ c.values_by_head.swapaxes(-1, -2))
    c.step("delta", (c.weights * c.d_weights).sum(axis=-1, keepdims=True))
    c.step("d_scores", c.weights * (c.d_weights - c.delta))
    d_key = c.scale * (c.d_scores.swapaxes(-1, -2) @ c.query)
    d_value = c.weights.swapaxes(-1, -2) @ c.grad_output
    found = {
        "query": c.step("d_query", c.scale * (c.d_scores @ c.keys_by_head)),
        "key": c.step("d_key", by_kv_head(c, c.step("d_key_by_head", d_key))),
        "value": c.step("d_value", by_kv_head(c, c.step("d_value_by_head", d_value))),
    }
    found |= {name: found[name][:, :, : c.given_len] for name in ("key", "value")}  # without padding
    both = c.future_slopes is None
    sides = {"slopes": c.ahead <= 0 if not both else np.ones_like(c.ahead, bool)}
    sides |= {} if both else {"future_slopes": c.ahead > 0}
    for name, side in sides.items():
        along = c.changed("bias", -(side * c.distance))  # the bias of slopes of 1 on this side
        gradient = (c.d_scores * along).sum(axis=(2, 3))
        gradient = c.step("d_slopes", _to_given_slopes(c, gradient))  # [batch, num_heads]
        found[name] = c.step("d_shared_slopes", gradient.sum(axis=0)) if c.shares_slopes else gradient
    return found


def by_kv_head(c: Computation, by_head: Values) -> Values:
    """Return sums over the query heads that read each key/value head."""
    found = np.zeros((c.batch, c.num_kv_heads, *by_head.shape[2:]))
    for head, kv_head in enumerate(c.kv_head):
        found[:, kv_head] += by_head[:, head]
    return found


def _to_given_slopes(c: Computation, gradient: Values) -> Values:
    """Return the gradient by the slopes that were given, from that by those that were used."""
    given, found = c.given_slopes, np.zeros_like(gradient)
    for head in range(c.num_heads):
        step = np.arange(c.num_heads) == head
        used = [np.broadcast_to(c.changed("slopes", given + sign * step), given.shape) for sign in (1, -1)]
        found[:, head] = (gradient * (used[0] - used[1])).sum(axis=1) / 2
    return found


def arguments_of(
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
    **more: Any,
) -> dict[str, Any]:
    """Return the arguments of an attention call as a computation takes them."""
    (batch, heads, q_len, _), kv_len = query.shape, key.shape[2]
    wide = [None if x is None else np.broadcast_to(x, (batch, heads)) * 1.0 for x in (slopes, future_slopes)]
    offset = kv_len - q_len if q_offset is None else q_offset
    if segment_ids is not None:
        pair = segment_ids if isinstance(segment_ids, tuple) else (segment_ids, segment_ids)
        segment_ids = tuple(np.broadcast_to(x, (batch, np.shape(x)[-1])) for x in pair)
    return {
        **{name: np.asarray(x, np.float64) for name, x in zip(TENSORS, (query, key, value), strict=True)},
        "slopes": wide[0],
        "given_slopes": wide[0],
        "future_slopes": wide[1],
        "shares_slopes": np.ndim(slopes) == 1,
        "is_causal": is_causal,
        "q_offset": np.broadcast_to(offset, (batch,)).astype(np.int64)[:, None, None, None],
        "window_size": window_size,
        "segment_ids": segment_ids,
        "mask": None if mask is None else np.reshape(mask, (1,) * (4 - np.ndim(mask)) + np.shape(mask)),
        "scale": scale,
        **more,
    }


def call_of(case: Case, dtype: str) -> dict[str, Any]:
    """Return the arguments of a case, as they are once rounded to a dtype."""
    query, key, value = (rounded(case.arrays[name], dtype) for name in TENSORS)
    slopes = rounded(case.arrays["slopes"], "float64" if dtype == "float64" else "float32")
    cotangent = rounded(case.arrays["cotangent"], dtype)
    return arguments_of(query, key, value, slopes, grad_output=cotangent, **case.arguments)


def make_slopes(mistakes: Active, num_heads: int, contract: str = "exact") -> Values:
    """Return the slopes of so many heads, ``[num_heads]``."""
    found = np.asarray(slope_values(num_heads, contract=contract))
    for mistake, _ in mistakes:
        if "slope_list" in mistake.changes:
            found = mistake.changes["slope_list"](num_heads, found)
    return np.broadcast_to(found, (num_heads,))


def make_bias(mistakes: Active, slopes: Values, q_len: int, kv_len: int, is_causal: bool) -> Values:
    """Return the bias, ``[num_heads, q_len, kv_len]``, -inf where masked."""
    query, key = (np.zeros((1, len(slopes), n, 1)) for n in (q_len, kv_len))
    c = Computation(mistakes, {}, **arguments_of(query, key, key, slopes, is_causal=is_causal))
    c.scale = 1.0
    compute_bias(c)
    hidden = c.step("list_bias", np.where(c.visible, c.bias, -np.inf))
    return np.asarray(np.broadcast_to(hidden, (1, len(slopes), q_len, kv_len))[0])


def decode_step(
    mistakes: Active, state: dict[Any, Any], query: Values, key: Values, value: Values, slopes: Values, cache: Any
) -> tuple[Values, Any]:
    """Return the output of some more tokens, and all keys and values so far."""
    before = 0 if cache is None else cache[0].shape[2]
    new = Computation(mistakes, state, **arguments_of(query, key, value, slopes), before=before)
    held = new.step("held", (key[:, :, :0], value[:, :, :0]) if cache is None else cache)
    keys, values = (np.concatenate(pair, axis=2) for pair in zip(held, (key, value), strict=True))
    c = Computation(mistakes, state, **arguments_of(query, keys, values, slopes), before=held[0].shape[2])
    output = attend(c)
    state["cache"] = tuple(c.changed("kept", x) for x in (keys, values))
    return output, state["cache"]


class Simulation:
    """Mistakes in float64, asked as a caller asks an adapter.

    Args:
        mistakes: Those that are made, each with its condition.
        dtype: To which tensors are rounded before.
        contract: Whose slopes are right.
    """

    def __init__(self, mistakes: Active, dtype: str, contract: str) -> None:
        self.mistakes, self.dtype, self.contract, self.state = mistakes, dtype, contract, dict[Any, Any]()

    def slopes(self, num_heads: int) -> Values:
        """Return ``[num_heads]``."""
        return make_slopes(self.mistakes, num_heads, self.contract)

    def bias(self, num_heads: int, q_len: int, kv_len: int, is_causal: bool) -> Values:
        """Return ``[num_heads, q_len, kv_len]``, -inf where masked."""
        return make_bias(self.mistakes, self.slopes(num_heads), q_len, kv_len, is_causal)

    def attention(self, case: Case) -> Values:
        """Return ``[batch, num_heads, q_len, head_dim]``."""
        return attend(Computation(self.mistakes, self.state, **call_of(case, self.dtype)))

    def gradients(self, case: Case) -> dict[str, Values]:
        """Return gradients by name."""
        return differentiate(Computation(self.mistakes, self.state, **call_of(case, self.dtype)))

    def decode_step(self, tensors: Mapping[str, Values], slopes: Values, cache: Any) -> tuple[Values, Any]:
        """Return the output of some more tokens, and all keys and values so far."""
        query, key, value = (rounded(tensors[name], self.dtype) for name in TENSORS)
        return decode_step(self.mistakes, self.state, query, key, value, slopes, cache)
