"""The attention layers of BLOOM, MPT and Falcon, with attention computed by this library.

Projections and residuals are the model's. So is the bias: the library computes ``-slopes * distance`` and adds the
difference to the numbers of the model's own builder as a bias per key.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.bloom import modeling_bloom
from transformers.models.bloom.modeling_bloom import BloomAttention
from transformers.models.falcon import modeling_falcon
from transformers.models.falcon.modeling_falcon import FalconAttention
from transformers.models.mpt import modeling_mpt
from transformers.models.mpt.modeling_mpt import MptAttention

from alibi_torch.transformers._attend import Rules, attend
from alibi_torch.transformers._cache import append
from alibi_torch.transformers._names import by_name, cache_of, positional_names
from alibi_torch.transformers._state import State
from alibi_torch.transformers._tokens import carried, is_carrier


class AcceleratedAttention(nn.Module):
    """An attention layer of an accelerated model.

    Each family implements ``build``, the model's bias of each key, ``[batch or 1, num_heads, kv_len]``; ``_project``,
    from hidden states to queries, keys and values, ``[batch, heads, q_len, head_dim]``; and ``_output``, from the
    attention, ``[batch, q_len, features]``, and the call's arguments to the layer's result.
    """

    alibi_own: type[nn.Module]  # the original class of transformers
    alibi_slopes: tuple[float, ...]  # of each head of the bias, per token, before scaling and repeated addition
    alibi_state: State  # shared with the base model

    def _rules(self) -> Rules:
        build = None if self.alibi_state.contract == "exact" else self.build
        return Rules(self.alibi_slopes, self.inv_norm_factor, build)

    def dropped(self) -> float:
        """Return the current dropout probability of attention weights."""
        dropout = self.attention_dropout
        return float(dropout.p) if dropout.training else 0.0


def _forward(own: type[nn.Module]) -> Callable[..., Any]:
    """Return the ``forward`` of an accelerated layer."""
    names = positional_names(own.forward)

    @functools.wraps(own.forward)
    def forward(self: AcceleratedAttention, *args: Any, **kwargs: Any) -> Any:
        given = by_name(names, args, kwargs)
        mask, cache = given.get("attention_mask"), cache_of(given)
        if not is_carrier(mask):
            return own.forward(self, *args, **kwargs)
        query, key, value = self._project(given["hidden_states"])
        if cache is not None:
            key, value = append(cache, self.layer_idx, key, value)
        attended = attend(self._rules(), query, key, value, carried(mask, self.alibi_state.tokens))
        return self._output(attended.transpose(1, 2).flatten(2), given), None  # no weights

    return forward


class AcceleratedBloomAttention(AcceleratedAttention, BloomAttention):
    """BLOOM's attention layer."""

    alibi_own = BloomAttention
    forward = _forward(BloomAttention)

    @staticmethod
    def build(mask: Tensor, num_heads: int, dtype: torch.dtype) -> Tensor:
        """Return the bias that BLOOM adds to the scores of each key."""
        return modeling_bloom.build_alibi_tensor(mask, num_heads, dtype).unflatten(0, (-1, num_heads))[:, :, 0]

    def _project(self, hidden_states: Tensor) -> Any:
        return self._reshape(self.query_key_value(hidden_states))

    def _output(self, attended: Tensor, given: dict[str, Any]) -> Tensor:
        """Return residual + projection; with ``slow_but_exact``, the projection is summed over slices, without bias."""
        if self.pretraining_tp > 1 and self.slow_but_exact:
            width, weight = self.hidden_size // self.pretraining_tp, self.dense.weight
            if weight.device != attended.device:  # read outside of its module, whose hooks would fetch it
                raise ValueError(f"slow_but_exact must be False with weights offloaded to {weight.device}, got True")
            slices = zip(attended.split(width, dim=-1), weight.split(width, dim=1), strict=True)
            output = torch.stack([F.linear(x, w) for x, w in slices]).sum(dim=0)
        else:
            output = self.dense(attended)
        return given["residual"] + F.dropout(output, p=self.hidden_dropout, training=self.training)


class AcceleratedMptAttention(AcceleratedAttention, MptAttention):
    """MPT's attention layer. Distances count padding."""

    alibi_own = MptAttention
    forward = _forward(MptAttention)

    @staticmethod
    def build(mask: Tensor, num_heads: int, dtype: torch.dtype) -> Tensor:
        """Return the bias that MPT adds to the scores of each key."""
        return modeling_mpt.build_mpt_alibi_tensor(num_heads, mask.shape[-1], device=mask.device)[:, 0][None]

    def _rules(self) -> Rules:
        build = None if self.alibi_state.contract == "exact" else self.build
        return Rules(self.alibi_slopes, self.softmax_scale, build, counts_text=False, adds_mask=False)

    def _project(self, hidden_states: Tensor) -> Any:
        mixed = self.Wqkv(hidden_states)
        if self.clip_qkv:
            mixed = mixed.clamp(min=-self.clip_qkv, max=self.clip_qkv)
        # [batch, q_len, 3 * features] to three of [batch, heads, q_len, head_dim]
        return mixed.unflatten(-1, (3, self.n_heads, self.head_dim)).permute(2, 0, 3, 1, 4)

    def _output(self, attended: Tensor, given: dict[str, Any]) -> Tensor:
        return self.out_proj(attended)

    def dropped(self) -> float:
        """Return the current dropout probability of attention weights."""
        return float(self.attn_dropout_p) if self.training else 0.0


# How many times Falcon adds its bias: eager attention adds it to the scores, and again as part of the mask.
FALCON_ADDITIONS = {"sdpa": 1, "eager": 2}


class AcceleratedFalconAttention(AcceleratedAttention, FalconAttention):
    """Falcon's attention layer."""

    alibi_own = FalconAttention
    forward = _forward(FalconAttention)

    @staticmethod
    def build(mask: Tensor, num_heads: int, dtype: torch.dtype) -> Tensor:
        """Return the bias that Falcon builds for each key, not yet scaled."""
        return modeling_falcon.build_alibi_tensor(mask, num_heads, dtype).unflatten(0, (-1, num_heads))[:, :, 0]

    def _rules(self) -> Rules:
        rules = super()._rules()
        if rules.build is None:
            return rules
        additions = FALCON_ADDITIONS[self.config._attn_implementation]
        return rules._replace(divisor=math.sqrt(self.head_dim), additions=additions)

    def _project(self, hidden_states: Tensor) -> Any:
        split = self._split_heads(self.query_key_value(hidden_states))  # [batch, q_len, heads, head_dim] each
        return (x.transpose(1, 2) for x in split)

    def _output(self, attended: Tensor, given: dict[str, Any]) -> Tensor:
        return self.dense(attended)

    def dropped(self) -> float:
        """Return the current dropout probability of attention weights."""
        if self.config._attn_implementation == "sdpa":  # depends on the layer's training flag, not on the dropout's
            return float(self.attention_dropout.p) if self.training else 0.0
        return super().dropped()
