"""Attention of one accelerated layer by this library, with the bias as the model's builder rounds it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import array_api_compat.torch as xp
import torch
import torch.nn.functional as F
from torch import Tensor

from alibi_core.backend import AttentionCall
from alibi_torch._attention import run
from alibi_torch._dispatch import autocasted, needs_gradients, no_autocast
from alibi_torch._internals import in_transform, is_unreadable
from alibi_torch.transformers._tokens import Tokens

# Up to this many scores per head and this many keys, one dense bias, shared by all layers, is faster than tiled calls.
SHARED_SCORES, SHARED_KEYS = 2**16, 2**10


class Rules(NamedTuple):
    """The settings of one attention layer; layers with equal rules share a plan."""

    slopes: tuple[float, ...]  # of each head of the model's bias, per token, before `divisor` and `additions`
    scale: float
    # The model's function from a mask [batch, kv_len], the number of heads and a dtype to the bias [batch or 1, heads,
    # kv_len]; None for the exact contract.
    build: Callable[[Tensor, int, torch.dtype], Tensor] | None
    counts_text: bool = True  # distances count only text tokens, and skip padding
    divisor: float = 1.0  # the model divides the built bias by this
    additions: int = 1  # how many times the model adds the bias
    adds_mask: bool = True  # whether the model adds its mask to the scores, or replaces masked scores

    def key_bias(self, slopes: Tensor, tokens: Tokens, dtype: torch.dtype) -> Tensor | None:
        """Return the bias of each key, ``[batch or 1, num_heads, kv_len]``, float64, 0 where its sequence begins.

        None means exactly ``slopes * offset``: the exact contract without padding.
        """
        device = slopes.device
        if self.build is None:
            is_plain = tokens.mask is None or not self.counts_text
            return None if is_plain else slopes[:, None] * tokens.counts(device)[:, None, :]
        num_heads = len(self.slopes)
        ones = torch.ones(1, tokens.kv_len, dtype=torch.long, device=device)
        if tokens.sequences is None:
            built = self.build(ones if tokens.mask is None else tokens.mask, num_heads, dtype)
        else:  # the builder ignores sequence boundaries: build one row and gather by position in the sequence
            index = tokens.counts(device) if self.counts_text else tokens.offsets(device).clamp(min=0)
            index = index[:, None, :].expand(-1, num_heads, -1)
            built = self.build(ones, num_heads, dtype).expand(index.shape[0], -1, -1).gather(-1, index)
        bias = (built / self.divisor).double()
        if self.additions > 1:  # further additions are not rounded to the dtype
            bias = bias + (self.additions - 1) * (built.double() / self.divisor)
        if tokens.origins is None:
            return bias - bias[..., :1]
        origins = tokens.origins[:, None, :].expand(-1, num_heads, -1)
        return bias - bias.expand(origins.shape[0], -1, -1).gather(-1, origins)


def attend(rules: Rules, query: Tensor, key: Tensor, value: Tensor, tokens: Tokens) -> Tensor:
    """Return the causal attention of the last queries, ``[batch, num_heads, q_len, head_dim]``.

    ``key`` and ``value``, ``[batch, num_kv_heads, kv_len, head_dim]``, may have unused slots of a static cache at the
    end.
    """
    query, key, value = autocasted(query, key, value)  # cached keys may be float32
    places = key, value
    if key.shape[2] > tokens.kv_len:
        key, value = key[:, :, : tokens.kv_len], value[:, :, : tokens.kv_len]
    # A small call without gradients uses one dense bias for all layers; autograd and compilers take the tiled path.
    is_plain = query.is_cpu and not (torch.compiler.is_compiling() or in_transform())
    is_small = is_plain and key.shape[2] <= SHARED_KEYS and query.shape[2] * key.shape[2] <= SHARED_SCORES
    is_dense = is_small and not needs_gradients(query, key, value)
    facts = (rules, query.shape, key.shape, query.dtype, query.device, is_dense)
    plan, blind = tokens.once(facts, lambda: _plan(rules, tokens, query, key, value, is_dense))
    if isinstance(plan, Tensor):
        result = _with_bias(query, key, value, plan, rules.scale)
    else:
        result = run(plan, query, key, value, None, None)
    if blind is None:
        return result
    # The models mask by a huge negative score, so softmax of a fully masked row is uniform: the mean of all values.
    mean = _mean_of_values(rules, query, *places)
    return torch.where(blind[:, None, :, None], mean, result)


def _mean_of_values(rules: Rules, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return the result of queries that see no key, ``[batch, num_heads, 1 or q_len, head_dim]``.

    A mask that is added to scores absorbs their values, and leaves their gradients: those of softmax where all scores
    are equal. The covariance of keys and values, ``[head_dim, head_dim]``, gives them without a matrix of scores.
    """
    group = query.shape[1] // key.shape[1]
    mean = value.mean(dim=2, keepdim=True).repeat_interleave(group, dim=1)
    if rules.build is None or not rules.adds_mask or not needs_gradients(query, key):
        return mean
    with no_autocast(query.device.type):  # sums over all keys may overflow in float16
        working = torch.promote_types(value.dtype, torch.float32)
        query, key, value = (x.to(working) for x in (query, key, value.detach()))
        covariance = (key - key.mean(dim=2, keepdim=True)).mT @ value / key.shape[2]
        scored = rules.scale * query @ covariance.repeat_interleave(group, dim=1)
    return mean + (scored - scored.detach()).to(mean.dtype)  # adds 0


def _plan(
    rules: Rules, tokens: Tokens, query: Tensor, key: Tensor, value: Tensor, is_dense: bool
) -> tuple[AttentionCall | Tensor, Tensor | None]:
    """Return what layers with these rules share: a checked call, or a dense bias, and the queries that see no key.

    The bias is ``[batch or 1, num_kv_heads, heads per group * q_len, kv_len]``. The queries are ``[batch, q_len]``
    booleans, True for those that see no key; None if there are none.
    """
    q_len, device = query.shape[2], query.device
    tokens = tokens.beside(key)
    text, blind = tokens.text, None
    if text is not None:
        # A query is blind if no text token is at or before it.
        queries = (tokens.past + torch.arange(q_len, device=device)).clamp(max=tokens.kv_len - 1)
        blind = (text.cumsum(dim=-1) == 0)[:, queries]
        blind = blind if is_unreadable(blind) or bool(blind.any()) else None
    working = torch.promote_types(query.dtype, torch.float32)
    slopes = torch.tensor(rules.slopes, dtype=torch.float64, device=device) * (rules.additions / rules.divisor)
    key_bias = rules.key_bias(slopes, tokens, query.dtype)
    if key_bias is not None:
        # Keep only the difference to slopes * offset (the model's rounding): it is small enough for float32.
        key_bias = (key_bias - slopes[:, None] * tokens.offsets(device)[:, None, :]).to(working)
        key_bias = key_bias[0] if key_bias.shape[0] == 1 else key_bias
    call = AttentionCall.check(
        query,
        key,
        value,
        slopes.to(working),
        q_offset=tokens.past,
        segment_ids=tokens.sequences,
        mask=None if text is None else text[:, None, None, :],
        scale=rules.scale,
        xp=xp,
    )
    call = replace(call, added_key_bias=key_bias)
    if not is_dense:
        return call, blind
    # call.bias() is 0 for queries without keys.
    return call.bias()[0].reshape(-1, key.shape[1], query.shape[1] // key.shape[1] * q_len, key.shape[2]), blind


def _with_bias(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float) -> Tensor:
    """Return attention by one call of PyTorch's kernel. Query heads that share keys become rows of one head."""
    # [batch, num_kv_heads, heads per group * q_len, head_dim]
    rows = query.reshape(query.shape[0], *bias.shape[1:3], query.shape[3])
    with no_autocast("cpu"):  # which would round the bias
        if rows.dtype != bias.dtype and query.shape[2] == 1:  # for one query, a cast is faster than low precision
            rows, key, value = (x.to(bias.dtype) for x in (rows, key, value))
        result = F.scaled_dot_product_attention(rows, key, value, bias, scale=scale)
    return result.to(query.dtype).reshape(query.shape)
