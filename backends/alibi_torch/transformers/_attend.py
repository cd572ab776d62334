"""Attention of one accelerated layer by this library, with the bias in the model's own numbers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import NamedTuple

import array_api_compat.torch as xp
import torch
import torch.nn.functional as F
from torch import Tensor

from alibi_core.backend import AttentionCall
from alibi_torch._attention import run
from alibi_torch._dispatch import needs_gradients
from alibi_torch.transformers._tokens import Layout, Tokens, is_unreadable

# Up to this many scores a head and this many keys, one dense bias that all layers share takes less time than a plan for
# each layer.
SHARED_SCORES, SHARED_KEYS = 2**16, 2**10


class Rules(NamedTuple):
    """What one attention layer computes; layers with equal rules share what a pass works out.

    Attributes:
        slopes: By head, what the model's bias falls by with each token, before ``divisor`` and ``additions``.
        scale: Factor of the scores.
        contract: ``"model"`` or ``"exact"``.
        build: The model's builder of its bias, by mask ``[batch, kv_len]``, heads and dtype:
            ``[batch or 1, heads, kv_len]``.
        counts_text: Whether distances are counted in tokens of text, so that padding between them is none.
        divisor: What the model divides its bias by once it is built.
        additions: How often the model adds it.
    """

    slopes: tuple[float, ...]
    scale: float
    contract: str
    build: Callable[[Tensor, int, torch.dtype], Tensor]
    counts_text: bool
    divisor: float = 1.0
    additions: int = 1

    @property
    def bias_slopes(self) -> list[float]:
        """What the bias falls by with each token, as the scores see it."""
        factor = 1.0 if self.contract == "exact" else self.additions / self.divisor
        return [x * factor for x in self.slopes]

    def key_bias(self, layout: Layout, dtype: torch.dtype) -> Tensor | None:
        """Return the bias of each key, ``[batch or 1, num_heads, kv_len]``, float64, 0 where its sequence begins.

        None for ``slopes * column``, as of the exact contract without padding.
        """
        if self.contract == "model":
            return self._own_bias(layout, dtype)
        if not self.counts_text or layout.text is None:
            return None
        slopes = torch.tensor(self.bias_slopes, dtype=torch.float64, device=layout.columns.device)[:, None]
        return slopes * layout.counts()[:, None, :]

    def _own_bias(self, layout: Layout, dtype: torch.dtype) -> Tensor:
        """Return the same as the model rounds it."""
        num_heads, ones = len(self.slopes), torch.ones_like(layout.columns)[None]
        if layout.sequences is None:
            built = self.build(ones if layout.mask is None else layout.mask, num_heads, dtype)
        else:  # the builder would count through all sequences of a row
            counts = layout.counts() if self.counts_text else (layout.columns - layout.origins).clamp(min=0)
            index = counts[:, None, :].expand(-1, num_heads, -1)
            built = self.build(ones, num_heads, dtype).expand(len(index), -1, -1).gather(-1, index)
        bias = (built / self.divisor).double()
        if self.additions > 1:  # the others are formed before scores are rounded to the dtype
            bias = bias + (self.additions - 1) * (built.double() / self.divisor)
        origins = layout.origins[:, None, :].expand(-1, num_heads, -1)
        return bias - bias.expand(len(origins), -1, -1).gather(-1, origins)


def attend(rules: Rules, query: Tensor, key: Tensor, value: Tensor, tokens: Tokens) -> Tensor:
    """Return the causal attention of the last queries, ``[batch, num_heads, q_len, head_dim]``.

    Args:
        rules: Of the layer.
        query: Of that shape.
        key: ``[batch, num_kv_heads, kv_len, head_dim]``, those of all tokens, or all places of a static cache.
        value: As ``key``.
        tokens: Of the pass.
    """
    if key.dtype != query.dtype and torch.is_autocast_enabled(query.device.type):  # casts what a cache holds
        key, value = key.to(query.dtype), value.to(query.dtype)
    places, past = value, tokens.past
    if not torch.compiler.is_compiling() and key.shape[2] > past + query.shape[2]:
        key, value = (x[:, :, : past + query.shape[2]] for x in (key, value))
    facts = (rules, query.shape, key.shape, query.dtype, query.device)
    plan = tokens.once(facts, lambda: Plan(rules, tokens, query, key))
    if plan.is_small and not needs_gradients(query, key, value):
        result = _with_bias(query, key, value, plan.bias(query, key, value), rules.scale)
    else:
        result = run(plan.call(query, key, value), query, key, value, None, None)
    if plan.blind is None:
        return result
    # The models hide a key by a huge negative score: a query that sees no key gets the mean of all values.
    mean = places.mean(dim=2, keepdim=True).repeat_interleave(query.shape[1] // places.shape[1], dim=1)
    return torch.where(plan.blind[:, None, :, None], mean, result)


class Plan:
    """What the layers of one pass share.

    Attributes:
        blind: ``[batch, q_len]`` booleans, True for queries that see no key; None if there are none.
        is_small: Whether one dense bias for all layers costs less than a plan of each.
    """

    def __init__(self, rules: Rules, tokens: Tokens, query: Tensor, key: Tensor) -> None:
        self._rules, self._past = rules, tokens.past
        self._call: AttentionCall | None = None
        self._bias: Tensor | None = None
        q_len, kv_len = query.shape[2], key.shape[2]
        self._layout = tokens.layout(kv_len, query.device)
        self._working = torch.promote_types(query.dtype, torch.float32)
        self._key_bias = rules.key_bias(self._layout, query.dtype)
        self.blind = None
        if self._layout.text is not None:
            queries = (tokens.past + torch.arange(q_len, device=query.device)).clamp(max=kv_len - 1)
            blind = (self._layout.text.cumsum(dim=-1) == 0)[:, queries]
            self.blind = blind if is_unreadable(blind) or bool(blind.any()) else None
        is_plain = query.device.type == "cpu" and not is_unreadable(query)
        self.is_small = is_plain and q_len * kv_len <= SHARED_SCORES and kv_len <= SHARED_KEYS

    def call(self, query: Tensor, key: Tensor, value: Tensor) -> AttentionCall:
        """Return the call that each layer asks for, checked on the tensors of the first."""
        if self._call is None:
            self._call = self._checked(query, key, value)
        return self._call

    def _checked(self, query: Tensor, key: Tensor, value: Tensor) -> AttentionCall:
        layout, added = self._layout, self._key_bias
        slopes = torch.tensor(self._rules.bias_slopes, dtype=torch.float64, device=query.device)
        if added is not None:
            columns = (layout.columns - layout.origins)[:, None, :]  # [batch or 1, 1, kv_len]
            # Counted from where a sequence begins, the difference is so small that float32 holds it.
            added = (added - slopes[:, None] * columns).to(self._working)
            added = added[0] if len(added) == 1 else added
        call = AttentionCall.check(
            query,
            key,
            value,
            slopes.to(self._working),
            q_offset=self._past,
            segment_ids=layout.sequences,
            mask=None if layout.text is None else layout.text[:, None, None, :],
            scale=self._rules.scale,
            xp=xp,
        )
        return replace(call, added_key_bias=added)

    def bias(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the dense bias ``[batch or 1, num_kv_heads, heads a group * q_len, kv_len]``."""
        if self._bias is None:
            rows = query.shape[1] // key.shape[1] * query.shape[2]
            self._bias = self._dense(query, key, value).reshape(-1, key.shape[1], rows, key.shape[2])
        return self._bias

    def _dense(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if query.shape[2] > 1 or self._key_bias is None:
            return self.call(query, key, value).bias()[0]  # 0 for queries without keys
        # One query sees all keys of text, and counts distances from itself.
        bias = (self._key_bias - self._key_bias[..., -1:]).to(self._working)[:, :, None, :]
        text = self._layout.text
        return bias if text is None else bias.masked_fill(~text[:, None, None, :], -torch.inf)


def _with_bias(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float) -> Tensor:
    """Return attention by one call of PyTorch's kernel. Queries that share keys become rows of one head."""
    rows = query.reshape(query.shape[0], *bias.shape[1:3], query.shape[3])
    # Autocast would round the bias.
    with torch.autocast("cpu", enabled=False) if torch.is_autocast_enabled("cpu") else nullcontext():
        if rows.dtype != bias.dtype and query.shape[2] == 1:  # keys in low precision are read faster once they are cast
            rows, key, value = (x.to(bias.dtype) for x in (rows, key, value))
        result = F.scaled_dot_product_attention(rows, key, value, bias, scale=scale)
    return result.to(query.dtype).reshape(query.shape)
