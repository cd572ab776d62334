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


class Decoder(nn.Module):
    """A base model: embeddings, layers of attention and a feed-forward part, each with a norm before it, and a norm.

    A family says what a layer is made of (``of_layer``), what its layers share (``biases``), and how its attention and
    feed-forward modules are called (``attended``, ``fed``).
    """

    # The names of embeddings and layers; of a layer's norms and parts; of the last norm.
    parts: tuple[str, str, tuple[str, str, str, str], str]
    present_at = 1  # where in what an attention module returns keys and values are; its weights are the rest
    factor = 1.0  # of embeddings

    def __init__(self, config: Any, width: int, depth: int) -> None:
        super().__init__()
        self.config, self.width = config, width
        embeddings, stack, names, last = self.parts
        self.add_module(embeddings, nn.Embedding(config.vocab_size, width))
        layers = (dict(zip(names, self.of_layer(config, index), strict=True)) for index in range(depth))
        self.add_module(stack, nn.ModuleList(map(nn.ModuleDict, layers)))
        self.add_module(last, self.normed())

    def normed(self) -> nn.Module:
        return nn.LayerNorm(self.width)

    def forward(
        self,
        input_ids: Tensor,
        past_key_values: Cache = None,
        attention_mask: Any = None,
        use_cache: bool = False,
        output_attentions: bool = False,
    ) -> Any:
        embeddings, stack, names, last = self.parts
        x = getattr(self, embeddings)(input_ids) * self.factor
        past = past_key_values[0][0].shape[2] if past_key_values else 0
        shared, presents, weights = self.biases(x, past, attention_mask), [], []
        for index, layer in enumerate(getattr(self, stack)):
            first, attend, second, mlp = (layer[name] for name in names)
            earlier = past_key_values[index] if past_key_values else None
            attended, *others = self.attended(attend, first(x), earlier, shared, use_cache, output_attentions)
            presents.append(others.pop(self.present_at - 1))
            weights += others
            x = x + attended
            x = x + self.fed(mlp, second(x))
        hidden = getattr(self, last)(x)
        return SimpleNamespace(last_hidden_state=hidden, past_key_values=tuple(presents), attentions=weights)


def extended(past: Any, key: Tensor, value: Tensor, dim: int = 2) -> Any:
    """Keys and values after those of earlier tokens, if there are any."""
    return [torch.cat(pair, dim=dim) for pair in zip(past, (key, value), strict=True)] if past else (key, value)


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
        key, value = extended(past_key_value, key, value)
        bias = attention_mask[..., -query.shape[2] :, :]
        result, weights = attend(query, key, value, self.head_dim**-0.5, bias)
        return self.o_proj(result), weights if output_attentions else None, (key, value) if use_cache else None


class BaichuanModel(Decoder):
    names = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
    parts, present_at = ("embed_tokens", "layers", names, "norm"), 2

    def __init__(self, config: Any) -> None:
        super().__init__(config, config.hidden_size, config.num_hidden_layers)
        self.n_head, self.max_cache_pos = config.num_attention_heads, config.model_max_length
        self.first_run, self.alibi_mask = True, None

    def normed(self) -> nn.Module:
        return nn.RMSNorm(self.width, eps=self.config.rms_norm_eps)

    def of_layer(self, config: Any, index: int) -> tuple[nn.Module, ...]:
        width, middle = config.hidden_size, config.intermediate_size
        mlp = {"gate_proj": (width, middle), "up_proj": (width, middle), "down_proj": (middle, width)}
        return self.normed(), BaichuanAttention(config), self.normed(), linear(mlp, False)

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

    def biases(self, x: Tensor, past: int, mask: Any) -> tuple[Any, ...]:
        length = past + x.shape[1]
        if not self.training:
            bias = self.get_alibi_mask(x, length)
        else:
            if self.alibi_mask is None or self.alibi_mask.shape[-1] != length:
                self.alibi_mask = self.get_alibi_mask(x, length)
            bias = self.alibi_mask
        if mask is not None:
            text = mask != 0
            seen = (text[:, :, None] & text[:, None, :]).tril()[:, None]
            bias = bias + x.new_zeros(seen.shape).masked_fill(~seen, torch.finfo(x.dtype).min)
        return (bias,)

    def attended(self, attend: nn.Module, x: Tensor, past: Any, shared: Any, use_cache: bool, weights: bool) -> Any:
        return attend(x, *shared, past, weights, use_cache)

    def fed(self, mlp: Any, x: Tensor) -> Tensor:
        return mlp.down_proj(F.silu(mlp.gate_proj(x)) * mlp.up_proj(x))


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
        key, value = extended(layer_past, key, value)
        bias = torch.where(attention_mask, torch.finfo(query.dtype).min, alibi)
        result, weights = attend(query, key, value, self.head_dim**-0.5, bias)
        return self.c_proj(result), (key, value) if use_cache else None, *([weights] if output_attentions else [])


class GPTRefactModel(Decoder):
    parts = ("wte", "h", ("ln_1", "attn", "ln_2", "mlp"), "nothing")

    def __init__(self, config: Any) -> None:
        super().__init__(config, config.n_embd, config.n_layer)
        self.nothing, self.built = nn.Identity(), None

    def normed(self) -> nn.Module:
        return nn.LayerNorm(self.width, bias=False)

    def of_layer(self, config: Any, index: int) -> tuple[nn.Module, ...]:
        width, middle = config.n_embd, 256
        mlp = {"linear_1": (width, middle), "linear_3": (width, middle), "c_proj": (middle, width)}
        return self.normed(), Attention(config), self.normed(), linear(mlp, False)

    @staticmethod
    def _make_mask(length: int, past: int) -> Tensor:
        return torch.ones(length, past + length, dtype=torch.bool).triu(past + 1)

    def biases(self, x: Tensor, past: int, mask: Any) -> tuple[Any, ...]:
        length = x.shape[1]
        mask = self._make_mask(length, past) if mask is None else mask
        return mask, self.built(len(x), past + length, self.config.n_head, x.device, x.dtype)[:, :, -length:, :]

    def forward(self, input_ids: Tensor, **options: Any) -> Any:
        outer, self.built = self.built, get_alibi_biases  # named here, as in the original code
        output = super().forward(input_ids, **options)
        self.built = outer  # of a call that this one is within
        return output

    def attended(self, attend: nn.Module, x: Tensor, past: Any, shared: Any, use_cache: bool, weights: bool) -> Any:
        return attend(x, past, *shared, use_cache=use_cache, output_attentions=weights)

    def fed(self, mlp: Any, x: Tensor) -> Tensor:
        return mlp.c_proj(F.silu(mlp.linear_1(x)) * mlp.linear_3(x))


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
        key, value = extended(layer_past, key, value)
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


class JAISModel(Decoder):
    attention: Any = JAISAttention
    parts = ("wte", "h", ("ln_1", "attn", "ln_2", "mlp"), "ln_f")

    def __init__(self, config: Any) -> None:
        super().__init__(config, config.n_embd, config.n_layer)
        self.relative_pe, self.factor = AlibiPositionEmbeddingLayer(config), config.mup_embeddings_scale

    def of_layer(self, config: Any, index: int) -> tuple[nn.Module, ...]:
        width, middle = config.n_embd, config.n_inner or 4 * config.n_embd
        mlp = {"c_fc": (width, middle), "c_proj": (middle, width)}
        mlp |= {"c_fc2": (width, middle)} if config.activation_function == "swiglu" else {}
        return self.normed(), self.attention(config, index), self.normed(), linear(mlp, True, Conv1D)

    def biases(self, x: Tensor, past: int, mask: Any) -> tuple[Any, ...]:
        if mask is not None:
            mask = (1.0 - mask[:, None, None].to(x.dtype)) * torch.finfo(x.dtype).min
        return self.relative_pe(x.shape[1], x.shape[1], past), mask

    def attended(self, attend: nn.Module, x: Tensor, past: Any, shared: Any, use_cache: bool, weights: bool) -> Any:
        bias, mask = shared
        return attend(
            x,
            layer_past=past,
            attention_mask=mask,
            use_cache=use_cache,
            output_attentions=weights,
            position_bias=bias,
        )

    def fed(self, mlp: Any, x: Tensor) -> Tensor:
        if "c_fc2" in mlp:
            return mlp.c_proj(mlp.c_fc(x) * F.silu(mlp.c_fc2(x)))
        return mlp.c_proj(ACT2FN[self.config.activation_function](mlp.c_fc(x)))


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
            key, value = extended(past_key_value and self.merged(past_key_value), key, value, dim=1)
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
        self.attn_temperature_tuning = {"floor_scale": 8192, "attn_scale": 0.0}  # as its configs say by default

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


class MPTModel(Decoder):
    parts, present_at = ("wte", "blocks", ("norm_1", "attn", "norm_2", "ffn"), "norm_f"), 2

    def __init__(self, config: Any) -> None:
        super().__init__(config, config.d_model, config.n_layers)
        own = config.attn_config
        self.alibi, self.alibi_bias_max = own["alibi"], own["alibi_bias_max"]
        name = getattr(config, "ffn_config", {}).get("ffn_act_fn", {}).get("name", "gelu")
        self.activation = ACT2FN[name]

    def of_layer(self, config: Any, index: int) -> tuple[nn.Module, ...]:
        feed_forward, width = getattr(config, "ffn_config", {}), config.d_model
        middle = feed_forward.get("ffn_hidden_size") or config.expansion_ratio * width
        sizes = {"up_proj": (width, middle), "down_proj": (middle, width)}
        if feed_forward.get("ffn_type") == "mptglu":
            sizes["gate_proj"] = width, middle
        attention = MPT_ATTENTION[config.attn_config["attn_type"]](config)
        return self.normed(), attention, self.normed(), linear(sizes, not config.no_bias)

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

    def biases(self, x: Tensor, past: int, mask: Any) -> tuple[Any, ...]:
        return self._attn_bias(device=x.device, dtype=x.dtype, attention_mask=mask)

    def attended(self, attend: nn.Module, x: Tensor, past: Any, shared: Any, use_cache: bool, weights: bool) -> Any:
        bias, mask = shared
        past = () if use_cache and past is None else past
        return attend(x, past_key_value=past, attn_bias=bias, attention_mask=mask, needs_weights=weights)

    def fed(self, mlp: Any, x: Tensor) -> Tensor:
        up = mlp.up_proj(x)
        return mlp.down_proj(self.activation(mlp.gate_proj(x)) * up if "gate_proj" in mlp else self.activation(up))
