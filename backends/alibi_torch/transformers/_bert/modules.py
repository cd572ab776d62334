"""The parts of BERT that know of positions, with symmetric ALiBi in their place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.models.bert.modeling_bert import BertEmbeddings, BertSelfAttention
from transformers.models.megatron_bert.modeling_megatron_bert import MegatronBertEmbeddings, MegatronBertSelfAttention

from alibi_torch._attention import attention
from alibi_torch.transformers import _rows


class EncoderAttention:
    """What the attention modules below have in common.

    Attributes:
        alibi_slopes: Of every head. Numbers, not a tensor, so that no cast of the model rounds them.
        alibi_future_slopes: For keys after the query; None for the same.
    """

    alibi_slopes: tuple[float, ...]
    alibi_future_slopes: tuple[float, ...] | None
    num_attention_heads: int
    attention_head_size: int
    training: bool
    query: Any
    key: Any
    value: Any
    dropout: Any

    def forward(self, hidden_states: Tensor, attention_mask: Any = None, *_: Any, **__: Any) -> tuple[Tensor, None]:
        """Return ``[batch, length, hidden_size]``, heads merged, and no weights."""
        if self.training and self.dropout.p > 0:
            raise ValueError(
                f"dropout of attention weights must be 0 in training, got {self.dropout.p}, as no weights are stored; "
                "with_alibi sets it to 0, so leave attention_probs_dropout_prob there"
            )
        query, key, value = (
            projection(hidden_states).unflatten(-1, (self.num_attention_heads, self.attention_head_size))
            for projection in (self.query, self.key, self.value)
        )  # [batch, length, heads, head_dim]
        working = torch.promote_types(query.dtype, torch.float32)
        slopes, future_slopes = (
            None if x is None else torch.tensor(x, dtype=working, device=query.device)
            for x in (self.alibi_slopes, self.alibi_future_slopes)
        )
        result = attention(
            *(x.transpose(1, 2) for x in (query, key, value)),
            slopes,
            is_causal=False,
            future_slopes=future_slopes,
            **_rows.decoded(attention_mask, query.device),
        )
        return result.transpose(1, 2).flatten(2), None


class AlibiBertSelfAttention(EncoderAttention, BertSelfAttention):
    """BERT's attention, symmetric ALiBi in it."""


class AlibiMegatronBertSelfAttention(EncoderAttention, MegatronBertSelfAttention):
    """Megatron BERT's attention, symmetric ALiBi in it."""


class AlibiBertEmbeddings(BertEmbeddings):
    """BERT's embeddings of tokens and their types, for rows of any length."""

    def forward(
        self,
        input_ids: Any = None,
        token_type_ids: Any = None,
        position_ids: Any = None,
        inputs_embeds: Any = None,
        **_: Any,
    ) -> Tensor:
        return self.dropout(self.LayerNorm(_of_tokens(self, input_ids, token_type_ids, inputs_embeds)))


class AlibiMegatronBertEmbeddings(MegatronBertEmbeddings):
    """Megatron BERT's embeddings of tokens and their types, which its layers normalise, for rows of any length."""

    def forward(
        self,
        input_ids: Any = None,
        token_type_ids: Any = None,
        position_ids: Any = None,
        inputs_embeds: Any = None,
        **_: Any,
    ) -> Tensor:
        return self.dropout(_of_tokens(self, input_ids, token_type_ids, inputs_embeds))


def _of_tokens(module: Any, input_ids: Any, token_type_ids: Any, inputs_embeds: Any) -> Tensor:
    embeddings = module.word_embeddings(input_ids) if inputs_embeds is None else inputs_embeds
    if token_type_ids is None:
        token_type_ids = torch.zeros(embeddings.shape[:-1], dtype=torch.long, device=embeddings.device)
    return embeddings + module.token_type_embeddings(token_type_ids)
