"""MPT of transformers, accelerated."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.models.mpt import modeling_mpt
from transformers.models.mpt.modeling_mpt import MptAttention, MptModel, MptPreTrainedModel

from alibi_torch.transformers._attend import Rules
from alibi_torch.transformers._layers import AcceleratedAttention, layer_forward
from alibi_torch.transformers._models import AcceleratedModel, model_forward


class AcceleratedMptAttention(AcceleratedAttention, MptAttention):
    """MPT's attention layer. Distances count padding."""

    alibi_own = MptAttention
    forward = layer_forward(MptAttention)

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


class AcceleratedMptModel(AcceleratedModel, MptModel):
    """MPT's base model."""

    alibi_own, alibi_layer, alibi_family = MptModel, AcceleratedMptAttention, MptPreTrainedModel
    forward = model_forward(MptModel)

    @staticmethod
    def refusal(base: Any, layers: tuple[Any, ...]) -> str | None:
        """Return that the model has no ALiBi, if so."""
        has_alibi = base.config.attn_config.alibi
        return None if has_alibi else "attn_config.alibi must be True for a model to be accelerated, got False"

    @staticmethod
    def bias_max(base: Any) -> float:
        """Return the config's ``alibi_bias_max``, which transformers' own builder ignores: it always uses 8."""
        return float(base.config.attn_config.alibi_bias_max)


MODEL = AcceleratedMptModel
