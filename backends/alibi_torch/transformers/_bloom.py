"""BLOOM of transformers, accelerated."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.bloom import modeling_bloom
from transformers.models.bloom.modeling_bloom import BloomAttention, BloomModel, BloomPreTrainedModel

from alibi_torch.transformers._layers import AcceleratedAttention, layer_forward
from alibi_torch.transformers._models import AcceleratedModel, model_forward
from alibi_torch.transformers._tokens import is_carrier


class AcceleratedBloomAttention(AcceleratedAttention, BloomAttention):
    """BLOOM's attention layer."""

    alibi_own = BloomAttention
    forward = layer_forward(BloomAttention)

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


class AcceleratedBloomModel(AcceleratedModel, BloomModel):
    """BLOOM's base model."""

    alibi_own, alibi_layer, alibi_family = BloomModel, AcceleratedBloomAttention, BloomPreTrainedModel
    forward = model_forward(BloomModel)

    @staticmethod
    def refusal(base: Any, layers: tuple[Any, ...]) -> str | None:
        """Return that scores have a factor, if so."""
        factors = [layer.beta for layer in layers if layer.beta != 1]
        return f"beta must be 1 for a model to be accelerated, got {factors[0]}" if factors else None

    def build_alibi_tensor(self, attention_mask: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the model's bias; an empty tensor if the library computes attention."""
        if is_carrier(attention_mask):
            return attention_mask.new_zeros(0)
        return super().build_alibi_tensor(attention_mask, *args, **kwargs)


MODEL = AcceleratedBloomModel
