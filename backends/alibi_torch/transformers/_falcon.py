"""Falcon of transformers, accelerated."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor
from transformers.models.falcon import modeling_falcon
from transformers.models.falcon.modeling_falcon import FalconAttention, FalconModel, FalconPreTrainedModel

from alibi_torch.transformers._attend import Rules
from alibi_torch.transformers._layers import AcceleratedAttention, layer_forward
from alibi_torch.transformers._models import AcceleratedModel, model_forward

# How many times Falcon adds its bias: eager attention adds it to the scores, and again as part of the mask.
ADDITIONS = {"sdpa": 1, "eager": 2}


class AcceleratedFalconAttention(AcceleratedAttention, FalconAttention):
    """Falcon's attention layer."""

    alibi_own = FalconAttention
    forward = layer_forward(FalconAttention)

    @staticmethod
    def build(mask: Tensor, num_heads: int, dtype: torch.dtype) -> Tensor:
        """Return the bias that Falcon builds for each key, not yet scaled."""
        return modeling_falcon.build_alibi_tensor(mask, num_heads, dtype).unflatten(0, (-1, num_heads))[:, :, 0]

    def _rules(self) -> Rules:
        rules = super()._rules()
        if rules.build is None:
            return rules
        additions = ADDITIONS[self.config._attn_implementation]
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


class AcceleratedFalconModel(AcceleratedModel, FalconModel):
    """Falcon's base model. ``use_alibi``, which adds a bias to any mask, is False but where the original code runs."""

    alibi_own, alibi_layer, alibi_family = FalconModel, AcceleratedFalconAttention, FalconPreTrainedModel
    forward = model_forward(FalconModel)

    @staticmethod
    def refusal(base: Any, layers: tuple[Any, ...]) -> str | None:
        """Return that the model has no ALiBi, or adds the bias in another way, if so."""
        if not base.use_alibi:
            return "model must have ALiBi, got a Falcon model with alibi=False in its config (rotary positions)"
        name = base.config._attn_implementation
        if name not in ADDITIONS:
            return f"attn_implementation must be 'sdpa' or 'eager' for a Falcon model with ALiBi, got {name!r}"
        return None

    @staticmethod
    def switch(base: Any, is_own: bool) -> None:
        """Set ``use_alibi``: it would add a bias to the mask that carries the tokens."""
        base.use_alibi = is_own

    def _run_own(self, given: dict[str, Any]) -> Any:
        own = copy.copy(self)  # other threads may be in a pass of this model by the library
        own.use_alibi = True
        return super(AcceleratedFalconModel, own)._run_own(given)


MODEL = AcceleratedFalconModel
