"""Small models with the names, parts and conventions of decoders that bring their own code, for tests.

Recorded logits of the original code hold them to what they stand for.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.pytorch_utils import Conv1D

import alibi_core

Cache = Any  # a tuple or list, of each layer's keys and values


def slopes_of(heads: int, **options: Any) -> Tensor:
    return torch.from_numpy(alibi_core.slopes(heads, **options)).float()


def distances(q_len: int, kv_len: int) -> Tensor:
    return (torch.arange(kv_len) - torch.arange(kv_len - q_len, kv_len)[:, None]).abs()


def linear(sizes: dict[str, tuple[int, int]], has_bias: bool, kind: Any = nn.Linear) -> nn.ModuleDict:
    """Layers by their names, from features in and out."""
    if kind is Conv1D:
        return nn.ModuleDict({name: Conv1D(outs, ins) for name, (ins, outs) in sizes.items()})
    return nn.ModuleDict({name: nn.Linear(ins, outs, bias=has_bias) for name, (ins, outs) in sizes.items()})


class LanguageModel(nn.Module):
    """A base model under the name of its family, and logits."""

    def __init__(self, prefix: str, base: nn.Module, config: Any) -> None:
        super().__init__()
        self.prefix, self.config = prefix, config
        setattr(self, prefix, base)
        self.lm_head = nn.Linear(base.width, config.vocab_size, bias=False)
        self.ln_f = nn.LayerNorm(base.width, bias=False) if isinstance(base, GPTRefactModel) else nn.Identity()
        scale = getattr(config, "mup_output_alpha", 1.0) * getattr(config, "mup_width_scale", 1.0)
        self.scale = base.width**-0.5 if getattr(config, "logit_scale", None) else scale

    def forward(self, tokens: Tensor, **options: Any) -> Any:
        base: Any = getattr(self, self.prefix)
        output = base(tokens, **options)
        output.logits = self.lm_head(self.ln_f(output.last_hidden_state)) * self.scale
        return output


def output_of(hidden: Tensor, cache: list[Any], weights: list[Any]) -> Any:
    return SimpleNamespace(last_hidden_state=hidden, past_key_values=tuple(cache), attentions=weights)


def attend(query: Tensor, key: Tensor, value: Tensor, scale: float, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Attention with a bias that hides keys, ``[batch, length, features]``, and its weights."""
    lowest = torch.finfo(query.dtype).min
    weights = torch.softmax((query @ key.mT * scale + bias.to(query.dtype)).clamp(min=lowest), dim=-1)
    return (weights @ value).transpose(1, 2).flatten(2), weights


# --- Baichuan ---------------------------------------------------------------------------------------------------------


class BaichuanAttention(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.hidden_size, self.num_heads = config.hidden_size, config.num_attention_heads
        self.head_dim = self.hidden_size // self.num_heads
        self.W_pack = nn.Linear(self.hidden_size, 3 * self.hidden_size, bias=False)
        self.o_proj = nn.Linear(self.hidden_size, self.hidden_size, bias=False)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        past_key_value: Any = None,
        output_attentions: bool = False,
        use_cache: bool = False,
    ) -> Any:
        heads = self.W_pack(hidden_states).unflatten(-1, (3, self.num_heads, self.head_dim))
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind()
        if past_key_value is not None:
            key, value = (torch.cat(pair, dim=2) for pair in zip(past_key_value, (key, value), strict=True))
        bias = attention_mask[..., -query.shape[2] :, :]
        result, weights = attend(query, key, value, self.head_dim**-0.5, bias)
        return self.o_proj(result), weights if output_attentions else None, (key, value) if use_cache else None


class BaichuanModel(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.width = config, config.hidden_size
        self.n_head, self.max_cache_pos = config.num_attention_heads, config.model_max_length
        self.first_run, self.alibi_mask = True, None
        width, middle = config.hidden_size, config.intermediate_size
        self.embed_tokens = nn.Embedding(config.vocab_size, width)
        mlp = {"gate_proj": (width, middle), "up_proj": (width, middle), "down_proj": (middle, width)}
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "self_attn": BaichuanAttention(config),
                    "mlp": linear(mlp, False),
                    "input_layernorm": nn.RMSNorm(width, eps=config.rms_norm_eps),
                    "post_attention_layernorm": nn.RMSNorm(width, eps=config.rms_norm_eps),
                }
            )
            for _ in range(config.num_hidden_layers)
        )
        self.norm = nn.RMSNorm(width, eps=config.rms_norm_eps)

    def get_alibi_mask(self, tensor: Tensor, length: int) -> Tensor:
        if self.training:
            return self.built(length).to(tensor)
        if self.first_run or length > self.max_cache_pos:
            self.first_run, self.max_cache_pos = False, max(length, self.max_cache_pos)
            self.register_buffer("future_mask", self.built(self.max_cache_pos).to(tensor), persistent=False)
        return self.future_mask[:, :length, :length]

    def built(self, length: int) -> Tensor:
        future = torch.full((length, length), -math.inf).triu(1)
        return slopes_of(self.n_head)[:, None, None] * torch.arange(length) + future

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Any = None,
        past_key_values: Cache = None,
        use_cache: bool = False,
        output_attentions: bool = False,
    ) -> Any:
        x = self.embed_tokens(input_ids)
        length = input_ids.shape[1] + (past_key_values[0][0].shape[2] if past_key_values else 0)
        if not self.training:
            bias = self.get_alibi_mask(x, length)
        else:
            if self.alibi_mask is None or self.alibi_mask.shape[-1] != length:
                self.alibi_mask = self.get_alibi_mask(x, length)
            bias = self.alibi_mask
        if attention_mask is not None:
            text = attention_mask != 0
            seen = (text[:, :, None] & text[:, None, :]).tril()[:, None]
            bias = bias + x.new_zeros(seen.shape).masked_fill(~seen, torch.finfo(x.dtype).min)
        cache, weights = [], []
        for index, layer in enumerate(self.layers):
            past = past_key_values[index] if past_key_values else None
            normed = layer.input_layernorm(x)
            attended, of_layer, present = layer.self_attn(normed, bias, past, output_attentions, use_cache)
            x = x + attended
            y = layer.post_attention_layernorm(x)
            x = x + layer.mlp.down_proj(F.silu(layer.mlp.gate_proj(y)) * layer.mlp.up_proj(y))
            cache.append(present)
            weights.append(of_layer)
        return output_of(self.norm(x), cache, weights)


# --- Refact -----------------------------------------------------------------------------------------------------------


def get_alibi_biases(batch: int, length: int, heads: int, device: Any, dtype: Any) -> Tensor:
    bias = slopes_of(heads)[:, None, None] * torch.arange(1, length + 1).expand(length, -1).tril()
    return bias.to(dtype)[None].repeat(batch, 1, 1, 1)


class Attention(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.num_heads, self.head_dim = config.n_head, config.n_embd // config.n_head
        self.q, self.c_proj = (nn.Linear(config.n_embd, config.n_embd, bias=False) for _ in range(2))
        if config.is_joined:
            self.kv = nn.Linear(config.n_embd, 2 * self.head_dim, bias=False)
        else:
            self.k, self.v = (nn.Linear(config.n_embd, self.head_dim, bias=False) for _ in range(2))

    def forward(
        self,
        hidden_states: Tensor,
        layer_past: Any = None,
        attention_mask: Any = None,
        alibi: Any = None,
        use_cache: bool = False,
        output_attentions: bool = False,
    ) -> Any:
        query = self.q(hidden_states).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        apart = (
            self.kv(hidden_states).chunk(2, -1) if hasattr(self, "kv") else (f(hidden_states) for f in (self.k, self.v))
        )
        key, value = (x[:, None] for x in apart)
        if layer_past is not None:
            key, value = (torch.cat(pair, dim=2) for pair in zip(layer_past, (key, value), strict=True))
        bias = torch.where(attention_mask, torch.finfo(query.dtype).min, alibi)
        result, weights = attend(query, key, value, self.head_dim**-0.5, bias)
        return self.c_proj(result), (key, value) if use_cache else None, *([weights] if output_attentions else [])


class GPTRefactModel(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.width = config, config.n_embd
        width, middle = config.n_embd, 256
        self.wte = nn.Embedding(config.vocab_size, width)
        mlp = {"linear_1": (width, middle), "linear_3": (width, middle), "c_proj": (middle, width)}
        self.h = nn.ModuleList(
            nn.ModuleDict(
                {
                    "ln_1": nn.LayerNorm(width, bias=False),
                    "attn": Attention(config),
                    "ln_2": nn.LayerNorm(width, bias=False),
                    "mlp": linear(mlp, False),
                }
            )
            for _ in range(config.n_layer)
        )

    @staticmethod
    def _make_mask(length: int, past: int) -> Tensor:
        return torch.ones(length, past + length, dtype=torch.bool).triu(past + 1)

    def forward(
        self,
        input_ids: Tensor,
        past_key_values: Cache = None,
        attention_mask: Any = None,
        use_cache: bool = False,
        output_attentions: bool = False,
    ) -> Any:
        length, past = input_ids.shape[1], past_key_values[0][0].shape[2] if past_key_values else 0
        mask = self._make_mask(length, past) if attention_mask is None else attention_mask
        x = self.wte(input_ids)
        bias = get_alibi_biases(len(x), past + length, self.config.n_head, x.device, x.dtype)[:, :, -length:, :]
        cache, weights = [], []
        for index, layer in enumerate(self.h):
            past_of_layer = past_key_values[index] if past_key_values else None
            attended, present, *of_layer = layer.attn(
                layer.ln_1(x), past_of_layer, mask, bias, use_cache=use_cache, output_attentions=output_attentions
            )
            x = x + attended
            y = layer.ln_2(x)
            x = x + layer.mlp.c_proj(F.silu(layer.mlp.linear_1(y)) * layer.mlp.linear_3(y))
            cache.append(present)
            weights += of_layer
        return output_of(x, cache, weights)


# --- Jais and BTLM ----------------------------------------------------------------------------------------------------


class AlibiPositionEmbeddingLayer(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.alibi_scaling = getattr(config, "alibi_scaling", None)
        self.slopes = nn.Parameter(slopes_of(config.n_head)[:, None], requires_grad=False)

    def forward(self, length: int, key_length: int, past: int) -> Tensor:
        factor = self.alibi_scaling["factor"] if self.alibi_scaling else 1.0
        return (self.slopes / -factor)[:, None] * distances(length, past + key_length)


class JAISAttention(nn.Module):
    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim = config.n_head, config.n_embd // config.n_head
        self.layer_idx, self.scale_attn_weights = layer_idx, config.scale_attn_weights
        self.scale_attn_by_inverse_layer_idx = config.scale_attn_by_inverse_layer_idx
        self.attn_scale_power = 1.0 if config.mup_scale_qk_dot_by_d else 0.5
        causal = torch.ones(config.n_positions, config.n_positions, dtype=torch.bool).tril()
        self.register_buffer("bias", causal[None, None])
        self.c_attn, self.c_proj = Conv1D(3 * config.n_embd, config.n_embd), Conv1D(config.n_embd, config.n_embd)
        self.attn_dropout, self.resid_dropout = nn.Dropout(getattr(config, "attn_pdrop", 0.0)), nn.Dropout(0.0)

    def forward(
        self,
        hidden_states: Tensor,
        layer_past: Any = None,
        attention_mask: Any = None,
        head_mask: Any = None,
        encoder_hidden_states: Any = None,
        encoder_attention_mask: Any = None,
        use_cache: bool = False,
        output_attentions: bool = False,
        position_bias: Any = None,
    ) -> Any:
        heads = self.c_attn(hidden_states).unflatten(-1, (3, self.num_heads, self.head_dim))
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind()
        if layer_past is not None:
            key, value = (torch.cat(pair, dim=2) for pair in zip(layer_past, (key, value), strict=True))
        q_len, kv_len = query.shape[2], key.shape[2]
        seen = self.bias[:, :, kv_len - q_len : kv_len, :kv_len]
        bias = torch.where(seen, position_bias, torch.finfo(query.dtype).min)
        if attention_mask is not None:
            bias = bias + attention_mask
        scale = self.head_dim**-self.attn_scale_power
        scale /= self.layer_idx + 1 if self.scale_attn_by_inverse_layer_idx else 1
        result, weights = attend(query, key, value, scale, bias)
        weights = self.attn_dropout(weights)
        result = (weights @ value).transpose(1, 2).flatten(2) if self.training else result
        present = (key, value) if use_cache else None
        return self.c_proj(result), present, *([weights] if output_attentions else [])


class BTLMAttention(JAISAttention):
    pass


class JAISModel(nn.Module):
    attention: Any = JAISAttention

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.width = config, config.n_embd
        width, middle = config.n_embd, config.n_inner or 4 * config.n_embd
        mlp = {"c_fc": (width, middle), "c_proj": (middle, width)}
        mlp |= {"c_fc2": (width, middle)} if config.activation_function == "swiglu" else {}
        self.wte = nn.Embedding(config.vocab_size, width)
        self.h = nn.ModuleList(
            nn.ModuleDict(
                {
                    "ln_1": nn.LayerNorm(width),
                    "attn": self.attention(config, index),
                    "ln_2": nn.LayerNorm(width),
                    "mlp": linear(mlp, True, Conv1D),
                }
            )
            for index in range(config.n_layer)
        )
        self.ln_f, self.relative_pe = nn.LayerNorm(width), AlibiPositionEmbeddingLayer(config)

    def forward(
        self,
        input_ids: Tensor,
        past_key_values: Cache = None,
        attention_mask: Any = None,
        use_cache: bool = False,
        output_attentions: bool = False,
    ) -> Any:
        x, length = self.wte(input_ids) * self.config.mup_embeddings_scale, input_ids.shape[1]
        past = past_key_values[0][0].shape[2] if past_key_values else 0
        bias, mask = self.relative_pe(length, length, past), None
        if attention_mask is not None:
            mask = (1.0 - attention_mask[:, None, None].to(x.dtype)) * torch.finfo(x.dtype).min
        cache, weights = [], []
        for index, layer in enumerate(self.h):
            attended, present, *of_layer = layer.attn(
                layer.ln_1(x),
                layer_past=past_key_values[index] if past_key_values else None,
                attention_mask=mask,
                use_cache=use_cache,
                output_attentions=output_attentions,
                position_bias=bias,
            )
            x = x + attended
            y = layer.ln_2(x)
            if "c_fc2" in layer.mlp:
                y = layer.mlp.c_fc(y) * F.silu(layer.mlp.c_fc2(y))
            else:
                y = ACT2FN[self.config.activation_function](layer.mlp.c_fc(y))
            x = x + layer.mlp.c_proj(y)
            cache.append(present)
            weights += of_layer
        return output_of(self.ln_f(x), cache, weights)


class BTLMModel(JAISModel):
    attention = BTLMAttention


# --- MPT of llm-foundry, and its early form that Replit-code has ------------------------------------------------------


class MultiheadAttention(nn.Module):
    """That of Replit-code: keys and values are kept with their heads merged."""

    def __init__(self, config: Any, number: int | None = None) -> None:
        super().__init__()
        own = config.attn_config
        self.d_model, self.n_heads, self.number = config.d_model, config.n_heads, number or config.n_heads
        self.attn_impl, self.clip_qkv, self.qk_ln = own["attn_impl"], own["clip_qkv"], own["qk_ln"]
        size = config.d_model // config.n_heads
        self.softmax_scale, self.attn_dropout_p = own["softmax_scale"] or size**-0.5, own["attn_pdrop"]
        self.sizes = [config.d_model, self.number * size, self.number * size]
        self.Wqkv = nn.Linear(config.d_model, sum(self.sizes), bias=not config.no_bias)
        self.out_proj = nn.Linear(config.d_model, config.d_model, bias=not config.no_bias)

    def forward(
        self,
        x: Tensor,
        past_key_value: Any = None,
        attn_bias: Any = None,
        attention_mask: Any = None,
        is_causal: bool = True,
        needs_weights: bool = False,
    ) -> Any:
        mixed = self.Wqkv(x)
        if self.clip_qkv:
            mixed = mixed.clamp(min=-self.clip_qkv, max=self.clip_qkv)
        query, key, value = mixed.split(self.sizes, dim=-1)
        if past_key_value is not None:
            if len(past_key_value):
                key, value = (torch.cat(x, dim=1) for x in zip(self.merged(past_key_value), (key, value), strict=True))
            past_key_value = self.stored(key, value)
        size = self.d_model // self.n_heads
        query, key, value = (x.unflatten(-1, (-1, size)).transpose(1, 2) for x in (query, key, value))
        q_len, kv_len = query.shape[2], key.shape[2]
        hidden = torch.ones(q_len, kv_len, dtype=torch.bool).triu(kv_len - q_len + 1)
        bias = attn_bias[..., -kv_len:].masked_fill(hidden, torch.finfo(query.dtype).min)
        key, value = (x.repeat_interleave(self.n_heads // self.number, dim=1) for x in (key, value))
        result, weights = attend(query, key, value, self.softmax_scale, bias)
        return self.out_proj(result), weights if needs_weights else None, past_key_value

    def stored(self, key: Tensor, value: Tensor) -> Any:
        return key, value

    def merged(self, cache: Any) -> Any:
        return cache


class MultiQueryAttention(MultiheadAttention):
    def __init__(self, config: Any) -> None:
        super().__init__(config, 1)
        self.head_dim = config.d_model // config.n_heads


class GroupedQueryAttention(MultiheadAttention):
    """That of llm-foundry: keys are kept with their features before their length."""

    def __init__(self, config: Any) -> None:
        super().__init__(config, config.attn_config["kv_n_heads"])
        self.kv_n_heads = self.number

    def get_qkv(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.Wqkv(x).split(self.sizes, dim=-1)

    def stored(self, key: Tensor, value: Tensor) -> Any:
        key, value = (x.unflatten(-1, (self.number, -1)).transpose(1, 2) for x in (key, value))
        return key.mT, value

    def merged(self, cache: Any) -> Any:
        return cache[0].mT.transpose(1, 2).flatten(2), cache[1].transpose(1, 2).flatten(2)


MPT_ATTENTION = {
    "multihead_attention": MultiheadAttention,
    "multiquery_attention": MultiQueryAttention,
    "grouped_query_attention": GroupedQueryAttention,
}


class MPTModel(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.width = config, config.d_model
        own, width = config.attn_config, config.d_model
        self.alibi, self.alibi_bias_max = own["alibi"], own["alibi_bias_max"]
        feed_forward = getattr(config, "ffn_config", {})
        middle = feed_forward.get("ffn_hidden_size") or config.expansion_ratio * width
        self.activation = ACT2FN[feed_forward.get("ffn_act_fn", {}).get("name", "gelu")]
        sizes = {"up_proj": (width, middle), "down_proj": (middle, width)}
        if feed_forward.get("ffn_type") == "mptglu":
            sizes["gate_proj"] = width, middle
        self.wte = nn.Embedding(config.vocab_size, width)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm_1": self.normed(),
                    "attn": MPT_ATTENTION[own["attn_type"]](config),
                    "norm_2": self.normed(),
                    "ffn": linear(sizes, not config.no_bias),
                }
            )
            for _ in range(config.n_layers)
        )
        self.norm_f = self.normed()

    def normed(self) -> nn.Module:
        if self.config.norm_type == "rmsnorm":
            return nn.RMSNorm(self.width, eps=self.config.norm_eps)
        return nn.LayerNorm(self.width, bias=not self.config.no_bias)

    def _attn_bias(self, device: Any, dtype: Any, attention_mask: Any = None) -> tuple[Tensor, Any]:
        slopes = slopes_of(self.config.n_heads, bias_max=self.alibi_bias_max, contract="mpt")
        length = self.config.max_seq_len
        bias = (slopes[:, None, None] * torch.arange(1 - length, 1))[None].to(dtype)
        if attention_mask is not None:
            bias = bias[..., -attention_mask.shape[1] :]
            bias = bias.masked_fill(attention_mask[:, None, None] == 0, torch.finfo(dtype).min)
        return bias, attention_mask

    def forward(
        self,
        input_ids: Tensor,
        past_key_values: Cache = None,
        attention_mask: Any = None,
        use_cache: bool = False,
        output_attentions: bool = False,
    ) -> Any:
        x = self.wte(input_ids)
        bias, mask = self._attn_bias(device=x.device, dtype=x.dtype, attention_mask=attention_mask)
        cache, weights = past_key_values, []
        if use_cache and cache is None:
            cache = [() for _ in self.blocks]
        presents = []
        for index, block in enumerate(self.blocks):
            attended, of_layer, present = block.attn(
                block.norm_1(x),
                past_key_value=None if cache is None else cache[index],
                attn_bias=bias,
                attention_mask=mask,
                needs_weights=output_attentions,
            )
            x = x + attended
            y = block.norm_2(x)
            up = block.ffn.up_proj(y)
            gate = self.activation(block.ffn.gate_proj(y)) * up if "gate_proj" in block.ffn else self.activation(up)
            x = x + block.ffn.down_proj(gate)
            presents.append(present)
            weights.append(of_layer)
        return output_of(self.norm_f(x), presents, weights)
