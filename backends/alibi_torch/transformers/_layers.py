"""The attention layers of BLOOM, MPT and Falcon, their attention computed by this library.

Projections, their order and what follows them stay the model's. So does the bias: the model's own builder gives its
numbers, and the library adds what they differ by from ``-slopes * distance``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
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

from alibi_core import slopes as canonical_slopes
from alibi_torch.transformers._attend import Rules, attend
from alibi_torch.transformers._cache import append
from alibi_torch.transformers._names import by_name, cache_of, positional_names
from alibi_torch.transformers._tokens import Tokens, carried, is_carrier


@dataclass
class Running:
    """The pass under way in compiled code, or where masks are moved between devices: one object for all layers.

    Attributes:
        tokens: Those of the pass; None where the model's own code computes it.
    """

    tokens: Tokens | None = None


class AcceleratedAttention(nn.Module):
    """What the accelerated layers have in common.

    Attributes:
        alibi_slopes: What the bias falls by with each token, by head, added once and not yet scaled.
        alibi_contract: ``"model"`` for the model's own rounding of the bias, ``"exact"`` for none.
        alibi_running: Shared with the model.
    """

    alibi_slopes: tuple[float, ...]
    alibi_contract: str
    alibi_running: Running
    layer_idx: int

    def tokens_of(self, mask: Any) -> Tokens | None:
        """Return the tokens of the pass under way; None if the model's own code computes it."""
        if not is_carrier(mask):
            return None
        found = carried(mask) or self.alibi_running.tokens
        if found is None:
            raise ValueError(
                f"attention_mask of {type(self).__name__} must come from the model's pass under way, got one that has "
                "ended; undo with restore, or report how the layer was called"
            )
        return found

    def attend(self, query: Tensor, key: Tensor, value: Tensor, tokens: Tokens, cache: Any) -> Tensor:
        """Return the attention of ``[batch, heads, length, head_dim]``, heads merged: ``[batch, q_len, features]``."""
        if cache is not None:
            key, value = append(cache, self.layer_idx, key, value)
        result = attend(self.rules(), query, key, value, tokens)
        return result.transpose(1, 2).flatten(2)

    def rules(self) -> Rules:
        """Return what the layer computes now."""
        raise NotImplementedError

    def dropped(self) -> float:
        """Return the share of attention weights that a call drops now."""
        dropout = self.attention_dropout
        return float(dropout.p) if dropout.training else 0.0


def _own_slopes(module: Any, build: Callable[[Tensor, int, torch.dtype], Tensor], num_heads: int) -> tuple[float, ...]:
    """Return by what a model's own bias falls with each token, from the bias of two tokens."""
    device = next((x.device for x in module.parameters() if not x.is_meta), torch.device("cpu"))
    row = build(torch.ones(1, 2, dtype=torch.long, device=device), num_heads, torch.float32).double()
    return tuple((row[0, :, 1] - row[0, :, 0]).tolist())


# --- BLOOM ----------------------------------------------------------------------------------------------------------


def _bloom_bias(mask: Tensor, num_heads: int, dtype: torch.dtype) -> Tensor:
    """Return the bias that BLOOM adds to the scores of each key, ``[batch, num_heads, kv_len]``."""
    return modeling_bloom.build_alibi_tensor(mask, num_heads, dtype).unflatten(0, (-1, num_heads))[:, :, 0]


class AcceleratedBloomAttention(AcceleratedAttention, BloomAttention):
    """BLOOM's attention layer."""

    alibi_names = positional_names(BloomAttention.forward)

    @staticmethod
    def slopes_of(module: BloomAttention, config: Any, contract: str) -> tuple[float, ...]:
        """Return the slopes of a layer, or raise a ValueError if it computes something else than ALiBi."""
        if module.beta != 1:
            raise ValueError(f"beta must be 1 for a model to be accelerated, got {module.beta}")
        if contract == "exact":
            return tuple(canonical_slopes(module.num_heads, dtype="float64").tolist())
        return _own_slopes(module, _bloom_bias, module.num_heads)

    def rules(self) -> Rules:
        """Return what the layer computes now."""
        return Rules(self.alibi_slopes, self.inv_norm_factor, self.alibi_contract, _bloom_bias, counts_text=True)

    @functools.wraps(BloomAttention.forward)
    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        """Return what the model's own layer does; no weights where the library computes it."""
        given = by_name(self.alibi_names, args, kwargs)
        tokens = self.tokens_of(given["attention_mask"])
        if tokens is None:
            return BloomAttention.forward(self, *args, **kwargs)
        query, key, value = self._reshape(self.query_key_value(given["hidden_states"]))
        attended = self.attend(query, key, value, tokens, cache_of(given))
        if self.pretraining_tp > 1 and self.slow_but_exact:  # the sum of slices, without the projection's bias
            width = self.hidden_size // self.pretraining_tp
            slices = zip(attended.split(width, dim=-1), self.dense.weight.split(width, dim=1), strict=True)
            output = torch.stack([F.linear(x, weight) for x, weight in slices]).sum(dim=0)
        else:
            output = self.dense(attended)
        return given["residual"] + F.dropout(output, p=self.hidden_dropout, training=self.training), None


# --- MPT ------------------------------------------------------------------------------------------------------------


def _mpt_bias(mask: Tensor, num_heads: int, dtype: torch.dtype) -> Tensor:
    """Return the bias that MPT adds to the scores of each key, ``[1, num_heads, kv_len]``; padding counts."""
    return modeling_mpt.build_mpt_alibi_tensor(num_heads, mask.shape[-1], device=mask.device)[:, 0][None]


class AcceleratedMptAttention(AcceleratedAttention, MptAttention):
    """MPT's attention layer."""

    alibi_names = positional_names(MptAttention.forward)

    @staticmethod
    def slopes_of(module: MptAttention, config: Any, contract: str) -> tuple[float, ...]:
        """Return the slopes of a layer."""
        if contract == "exact":
            bias_max = config.attn_config.alibi_bias_max  # transformers' own builder knows 8 alone
            return tuple(canonical_slopes(module.n_heads, bias_max=bias_max, dtype="float64").tolist())
        return _own_slopes(module, _mpt_bias, module.n_heads)

    def rules(self) -> Rules:
        """Return what the layer computes now."""
        return Rules(self.alibi_slopes, self.softmax_scale, self.alibi_contract, _mpt_bias, counts_text=False)

    def dropped(self) -> float:
        """Return the share of attention weights that a call drops now."""
        return float(self.attn_dropout_p) if self.training else 0.0

    @functools.wraps(MptAttention.forward)
    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        """Return what the model's own layer does; no weights where the library computes it."""
        given = by_name(self.alibi_names, args, kwargs)
        tokens = self.tokens_of(given.get("attention_mask"))
        if tokens is None:
            return MptAttention.forward(self, *args, **kwargs)
        mixed = self.Wqkv(given["hidden_states"])
        if self.clip_qkv:
            mixed = mixed.clamp(min=-self.clip_qkv, max=self.clip_qkv)
        # [batch, q_len, 3 * features] to three of [batch, heads, q_len, head_dim]
        query, key, value = mixed.unflatten(-1, (3, self.n_heads, self.head_dim)).permute(2, 0, 3, 1, 4)
        return self.out_proj(self.attend(query, key, value, tokens, cache_of(given))), None


# --- Falcon ---------------------------------------------------------------------------------------------------------


def _falcon_bias(mask: Tensor, num_heads: int, dtype: torch.dtype) -> Tensor:
    """Return the bias that Falcon builds for each key, ``[batch, num_heads, kv_len]``, not yet scaled."""
    return modeling_falcon.build_alibi_tensor(mask, num_heads, dtype).unflatten(0, (-1, num_heads))[:, :, 0]


# How often Falcon adds its bias: its eager attention adds it to the scores, and once more with the mask.
FALCON_ADDITIONS = {"sdpa": 1, "eager": 2}


class AcceleratedFalconAttention(AcceleratedAttention, FalconAttention):
    """Falcon's attention layer."""

    alibi_names = positional_names(FalconAttention.forward)

    @staticmethod
    def slopes_of(module: FalconAttention, config: Any, contract: str) -> tuple[float, ...]:
        """Return the slopes of a layer, or raise a ValueError for an attention that has none of ALiBi."""
        chosen = module.config._attn_implementation
        if chosen not in FALCON_ADDITIONS:
            raise ValueError(
                f"attn_implementation must be 'sdpa' or 'eager' for a Falcon model with ALiBi, got {chosen!r}"
            )
        if contract == "exact":
            return tuple(canonical_slopes(module.num_heads, dtype="float64").tolist())
        return _own_slopes(module, _falcon_bias, module.num_heads)

    def rules(self) -> Rules:
        """Return what the layer computes now."""
        additions = 1 if self.alibi_contract == "exact" else FALCON_ADDITIONS[self.config._attn_implementation]
        divisor = math.sqrt(self.head_dim)
        return Rules(
            self.alibi_slopes, self.inv_norm_factor, self.alibi_contract, _falcon_bias, True, divisor, additions
        )

    def dropped(self) -> float:
        """Return the share of attention weights that a call drops now."""
        if self.config._attn_implementation == "sdpa":  # goes by the layer's flag, not by that of its dropout
            return float(self.attention_dropout.p) if self.training else 0.0
        return super().dropped()

    @functools.wraps(FalconAttention.forward)
    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        """Return what the model's own layer does; no weights where the library computes it."""
        given = by_name(self.alibi_names, args, kwargs)
        tokens = self.tokens_of(given["attention_mask"])
        if tokens is None:
            if given["alibi"] is None:  # would be computed with rotary positions
                raise ValueError(
                    "layers of an accelerated Falcon model must be called by their model, got a call without its bias; "
                    "call the model, or undo with restore"
                )
            return FalconAttention.forward(self, *args, **kwargs)
        split = self._split_heads(self.query_key_value(given["hidden_states"]))  # [batch, q_len, heads, head_dim] each
        query, key, value = (x.transpose(1, 2) for x in split)
        return self.dense(self.attend(query, key, value, tokens, cache_of(given))), None
