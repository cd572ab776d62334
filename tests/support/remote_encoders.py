"""Small models with the names, parts and conventions of encoders that bring their own code, for tests.

A checkpoint's folder may hold a copy of this file as that code, so it imports nothing of this project. Recorded numbers
of the original code hold it to what it stands for.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.modeling_outputs import BaseModelOutput


def slopes_of(heads: int) -> list[float]:
    whole = 2 ** int(math.log2(heads))
    slopes = [2 ** (-8 * (i + 1) / whole) for i in range(whole)]
    return slopes + [2 ** (-4 * (i + 1) / whole) for i in range(0, 2 * (heads - whole), 2)]


def bias_of(heads: int, size: int, device: Any) -> Tensor:
    position = torch.arange(size, device=device)
    distance = (position[:, None] - position).abs()
    return -(torch.tensor(slopes_of(heads), device=device)[:, None, None] * distance)[None]


class StandInConfig(PretrainedConfig):
    model_type = "bert"


class Embeddings(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, tokens: Tensor, types: Tensor | None) -> Tensor:
        types = torch.zeros_like(tokens) if types is None else types
        return self.LayerNorm(self.word_embeddings(tokens) + self.token_type_embeddings(types))


class Normed(nn.Module):
    """A projection, the input added, and a norm."""

    def __init__(self, features: int, config: Any) -> None:
        super().__init__()
        self.dense = nn.Linear(features, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.LayerNorm(self.dense(x) + residual)


class Gated(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.act = F.relu if getattr(config, "feed_forward_type", "") == "reglu" else F.gelu
        self.gated_layers = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.wo = nn.Linear(config.intermediate_size, config.hidden_size)
        self.layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        gate, rest = self.gated_layers(x).chunk(2, dim=-1)
        return self.layernorm(self.wo(self.act(gate) * rest) + x)


class StandIn(PreTrainedModel):
    config_class = StandInConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.embeddings = Embeddings(config)
        self.encoder = self.encoder_class(config)
        self.pooler = nn.ModuleDict({"dense": nn.Linear(config.hidden_size, config.hidden_size)})
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embeddings.word_embeddings


# --- Jina-embeddings-v2 -----------------------------------------------------------------------------------------------


class JinaBertSelfAttention(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.num_attention_heads = config.num_attention_heads
        self.attention_head_size = config.hidden_size // config.num_attention_heads
        self.query, self.key, self.value = (nn.Linear(config.hidden_size, config.hidden_size) for _ in range(3))
        if config.is_for_code:
            self.layer_norm_q, self.layer_norm_k = (nn.LayerNorm(config.hidden_size, eps=1e-12) for _ in range(2))
        self.dropout = nn.Dropout(getattr(config, "attention_probs_dropout_prob", 0.0))

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        head_mask: Any = None,
        encoder_hidden_states: Any = None,
        encoder_attention_mask: Any = None,
        past_key_value: Any = None,
        output_attentions: bool = False,
        bias: Any = None,
    ) -> tuple[Tensor, ...]:
        query, key, value = self.query(hidden_states), self.key(hidden_states), self.value(hidden_states)
        if hasattr(self, "layer_norm_q"):
            query, key = self.layer_norm_q(query), self.layer_norm_k(key)
        query, key, value = (
            x.unflatten(-1, (self.num_attention_heads, -1)).transpose(1, 2) for x in (query, key, value)
        )
        scores = query @ key.mT / math.sqrt(self.attention_head_size) + attention_mask
        weights = self.dropout(torch.softmax(scores + bias, dim=-1))
        if head_mask is not None:
            weights = weights * head_mask
        result = (weights @ value).transpose(1, 2).flatten(2)
        return (result, scores) if output_attentions else (result,)


class JinaBertAttention(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.self, self.output = JinaBertSelfAttention(config), Normed(config.hidden_size, config)

    def forward(self, x: Tensor, *others: Any) -> tuple[Tensor, ...]:
        attended, *weights = self.self(x, *others)
        return self.output(attended, x), *weights


class JinaBertIntermediate(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.dense, self.act = nn.Linear(config.hidden_size, config.intermediate_size), ACT2FN[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.dense(x))


class CodeMLP(nn.Module):
    """Of the model for code: the gate comes second, if there is one."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.is_gated, features = config.feed_forward_type != "original", config.intermediate_size
        up = nn.Linear(config.hidden_size, features * (2 if self.is_gated else 1), bias=False)
        self.up_gated_layer, self.up_layer = (up, None) if self.is_gated else (None, up)
        self.down_layer = nn.Linear(features, config.hidden_size)
        self.act = {"geglu": F.gelu, "reglu": F.relu}.get(config.feed_forward_type, ACT2FN[config.hidden_act])

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_gated:
            return self.down_layer(self.act(self.up_layer(x)))
        rest, gate = self.up_gated_layer(x).chunk(2, dim=-1)
        return self.down_layer(rest * self.act(gate))


class JinaBertLayer(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.attention = JinaBertAttention(config)
        self.is_for_code, self.is_gated = config.is_for_code, config.feed_forward_type != "original"
        if self.is_for_code:
            self.layer_norm_1, self.layer_norm_2 = (nn.LayerNorm(config.hidden_size, eps=1e-12) for _ in range(2))
            self.mlp = CodeMLP(config)
        elif self.is_gated:
            self.mlp = Gated(config)
        else:
            self.intermediate = JinaBertIntermediate(config)
            self.output = Normed(config.intermediate_size, config)

    def forward(self, x: Tensor, *others: Any) -> tuple[Tensor, ...]:
        attended, *weights = self.attention(x, *others)
        if self.is_for_code:
            middle = self.layer_norm_1(x + attended)
            return self.layer_norm_2(middle + self.mlp(middle)), *weights
        result = self.mlp(attended) if self.is_gated else self.output(self.intermediate(attended), attended)
        return result, *weights


class JinaBertEncoder(nn.Module):
    """Builds the bias of each call, or keeps it, as the published files do one or the other."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.num_attention_heads = config.num_attention_heads
        self.layer = nn.ModuleList(JinaBertLayer(config) for _ in range(config.num_hidden_layers))
        self.built = 0
        if config.keeps_bias:
            self.register_buffer("alibi", self.rebuild_alibi_tensor(config.max_position_embeddings), persistent=False)

    def rebuild_alibi_tensor(self, size: int, device: Any = None) -> Tensor:
        self._current_alibi_size, self.built = size, self.built + 1
        return bias_of(self.num_attention_heads, size, device)

    def forward(self, x: Tensor, mask: Tensor, head_mask: Any, weights: bool) -> tuple[Tensor, tuple[Tensor, ...]]:
        length = x.shape[1]
        if not hasattr(self, "alibi"):
            bias = self.rebuild_alibi_tensor(size=length, device=x.device).to(x.dtype)
        else:
            if self._current_alibi_size < length:
                bias = self.rebuild_alibi_tensor(size=length, device=x.device).to(x.dtype)
                self.register_buffer("alibi", bias, persistent=False)
            bias = self.alibi[:, :, :length, :length]
        found = []
        for layer in self.layer:
            x, *of_layer = layer(x, mask, head_mask, None, None, None, weights, bias)
            found += of_layer
        return x, tuple(found)


class JinaBertModel(StandIn):
    encoder_class = JinaBertEncoder

    def forward(
        self,
        input_ids: Any = None,
        attention_mask: Any = None,
        token_type_ids: Any = None,
        position_ids: Any = None,
        head_mask: Any = None,
        output_attentions: Any = None,
        return_dict: Any = None,
    ) -> Any:
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        mask = mask[:, None, None] if mask.ndim == 2 else mask[:, None]
        hidden = (1.0 - mask.to(self.dtype)) * torch.finfo(self.dtype).min
        x = self.embeddings(input_ids, token_type_ids)
        x, weights = self.encoder(x, hidden, head_mask, bool(output_attentions))
        return BaseModelOutput(last_hidden_state=x, attentions=weights or None)


# --- MosaicBERT and DNABERT-2: padding is left out before the first layer ---------------------------------------------


class BertUnpadSelfAttention(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.num_attention_heads = config.num_attention_heads
        self.attention_head_size = config.hidden_size // config.num_attention_heads
        self.p_dropout = getattr(config, "attention_probs_dropout_prob", 0.0)
        self.dropout = nn.Dropout(self.p_dropout)
        self.Wqkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)

    def forward(
        self,
        hidden_states: Tensor,
        cu_seqlens: Tensor,
        max_seqlen_in_batch: int,
        indices: Tensor,
        attn_mask: Tensor,
        bias: Tensor,
    ) -> Tensor:
        rows = padded(self.Wqkv(hidden_states), indices, attn_mask.shape)
        query, key, value = rows.unflatten(-1, (3, self.num_attention_heads, -1)).permute(2, 0, 3, 1, 4).unbind()
        scores = query @ key.mT / math.sqrt(self.attention_head_size) + bias
        result = self.dropout(torch.softmax(scores, dim=-1)) @ value
        return result.transpose(1, 2).flatten(2).flatten(0, 1)[indices]


def padded(tokens: Tensor, indices: Tensor, shape: Any) -> Tensor:
    rows = tokens.new_zeros(shape.numel(), tokens.shape[-1])
    return rows.index_copy(0, indices, tokens).unflatten(0, shape)


class BertUnpadAttention(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.self, self.output = BertUnpadSelfAttention(config), Normed(config.hidden_size, config)


class BertLayer(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.attention, self.mlp = BertUnpadAttention(config), Gated(config)

    def forward(self, x: Tensor, *others: Any, **named: Any) -> Tensor:
        return self.mlp(self.attention.output(self.attention.self(x, *others, **named), x))


class BertEncoder(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.num_attention_heads = config.num_attention_heads
        self.layer = nn.ModuleList(BertLayer(config) for _ in range(config.num_hidden_layers))
        self.built = 0
        self.rebuild_alibi_tensor(size=config.alibi_starting_size)

    def rebuild_alibi_tensor(self, size: int, device: Any = None) -> None:
        self._current_alibi_size, self.built = size, self.built + 1
        self.alibi = bias_of(self.num_attention_heads, size, device)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        length, shape = x.shape[1], mask.shape
        indices = mask.flatten().nonzero().flatten()
        ends = F.pad(mask.sum(dim=1).cumsum(0, dtype=torch.int32), (1, 0))
        if self._current_alibi_size < length:
            self.rebuild_alibi_tensor(size=length, device=x.device)
        bias = (1.0 - mask[:, None, None].to(x.dtype)) * -10000.0 + self.alibi[:, :, :length, :length]
        x = x.flatten(0, 1)[indices]
        for layer in self.layer:
            x = layer(x, ends, length, indices, attn_mask=mask, bias=bias)
        return padded(x, indices, shape)


class BertModel(StandIn):
    encoder_class = BertEncoder

    def forward(
        self,
        input_ids: Any,
        token_type_ids: Any = None,
        attention_mask: Any = None,
        position_ids: Any = None,
        **_: Any,
    ) -> Any:
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        return BaseModelOutput(last_hidden_state=self.encoder(self.embeddings(input_ids, token_type_ids), mask))
