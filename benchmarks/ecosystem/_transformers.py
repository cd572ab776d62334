"""BLOOM, MPT and Falcon: the models of ``transformers``, with a given query, key and value in place of projections.

A whole model of one layer runs, so that bias, mask and cache are made by its own code. Its one block is replaced by a
probe that holds the model's own attention module, whose projections are identities.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from transformers.models.bloom import modeling_bloom
from transformers.models.falcon import modeling_falcon
from transformers.models.mpt import modeling_mpt

from alibi_core._contracts import named
from benchmarks.ecosystem._torch import TorchAdapter, Values, hidden, to_numpy

_TOKENS = {"vocab_size": 11, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


class Probe(nn.Module):
    """In place of a block: calls an attention module with ``fused`` and keeps what it was given and returns."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention
        for name in ("query_key_value", "Wqkv", "dense", "out_proj"):
            if hasattr(attention, name):
                setattr(attention, name, nn.Identity())
        self.fused = torch.empty(0)
        self.given: dict[str, Any] = {}
        self.result = torch.empty(0)

    def forward(self, hidden_states: Tensor, **given: Any) -> tuple[Tensor]:
        """Call the attention as the model's own block does."""
        self.given = given
        arguments = dict(given)
        if isinstance(self.attention, modeling_bloom.BloomAttention):
            arguments["residual"] = hidden_states.new_zeros(())  # BLOOM adds it to the result
        if isinstance(self.attention, modeling_mpt.MptAttention):
            arguments["past_key_values"] = arguments.pop("layer_past")
        self.result = self.attention(self.fused, **arguments)[0]
        return (hidden_states,)


class _Model(TorchAdapter):
    """A causal model. It counts from the first key, so softmax alone makes its bias ALiBi's."""

    features: frozenset[str] = frozenset()  # fewer queries than keys come with its cache, in decode_step
    kind: type[nn.Module]
    block: str  # where the model keeps its blocks, and the block its attention
    build_row: Any = None  # the model's function that builds a row of biases

    def __init__(self, dtype: str, contract: str) -> None:
        super().__init__(dtype, contract)
        if named(contract).is_key_only:  # then it shows its bias too, which is no distance
            self.bias = self.own_bias

    def own_bias(self, num_heads: int, q_len: int, kv_len: int, is_causal: bool) -> Values:
        """Return the model's bias, in the model's own form, ``[num_heads, q_len, kv_len]``."""
        if not is_causal:
            raise NotImplementedError("causal only")
        return np.where(hidden(q_len, kv_len), -np.inf, self.key_bias(num_heads, kv_len)[:, None])

    def slopes(self, num_heads: int) -> Values:
        first, second = self.key_bias(num_heads, 2, torch.float32).T
        return second - first

    def key_bias(self, num_heads: int, kv_len: int, dtype: torch.dtype | None = None) -> Values:
        """Return the row that the model's function builds, ``[num_heads, kv_len]``, for the adapter's dtype."""
        everything = torch.ones(1, kv_len, dtype=torch.int64)
        return to_numpy(self.build_row(everything, num_heads, dtype or self.torch_dtype)[:, 0])

    def config(self, num_heads: int, num_kv_heads: int, head_dim: int) -> Any:
        """Return the configuration of a model of one layer."""
        raise NotImplementedError

    def fuse(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return what the model's projection would have returned: of each head its query, its key, its value."""
        return torch.stack([query, key, value], dim=-2).transpose(1, 2).flatten(2)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        q_len, kv_len = query.shape[2], key.shape[2]
        if q_len > kv_len:
            raise NotImplementedError("no queries before the first key")
        cache, past = transformers.DynamicCache(), kv_len - q_len
        if past:  # earlier tokens first, as a prompt; whatever they ask for
            batch, num_heads, _, head_dim = query.shape
            _, cache = self.step(query.new_zeros(batch, num_heads, past, head_dim), key[:, :, :past],
                                 value[:, :, :past], cache)  # fmt: skip
        return self.step(query, key[:, :, past:], value[:, :, past:], cache)[0]

    def step(self, query: Tensor, key: Tensor, value: Tensor, cache: Any) -> tuple[Tensor, Any]:
        """Return the attention of some more tokens to all so far, and the model's cache."""
        batch, num_heads, q_len, head_dim = query.shape
        model, probe = self.model(num_heads, key.shape[1], head_dim)
        probe.fused = self.fuse(query, key, value)
        embedded = query.new_zeros(batch, q_len, num_heads * head_dim)
        everything = torch.ones(batch, q_len + cache.get_seq_length(), dtype=torch.int64)
        model(inputs_embeds=embedded, attention_mask=everything, past_key_values=cache, use_cache=True)
        return probe.result.unflatten(2, (num_heads, head_dim)).transpose(1, 2), cache

    def decode_step(self, query: Values, key: Values, value: Values, cache: Any) -> Any:
        with torch.no_grad():
            cache = transformers.DynamicCache() if cache is None else cache
            result, cache = self.step(*map(self.tensor, (query, key, value)), cache)
        return to_numpy(result), cache

    @lru_cache(maxsize=64)  # noqa: B019 -- an adapter lives as long as the process
    def model(self, num_heads: int, num_kv_heads: int, head_dim: int) -> tuple[nn.Module, Probe]:
        """Return a model and its probe."""
        model = self.kind(self.config(num_heads, num_kv_heads, head_dim)).eval().to(self.torch_dtype)
        blocks, attention = self.block.split(".")
        probe = Probe(getattr(getattr(model, blocks)[0], attention))
        setattr(model, blocks, nn.ModuleList([probe]))
        return model, probe


class Bloom(_Model):
    """BLOOM, eager: the only attention it has."""

    kind, block = transformers.BloomModel, "h.self_attention"
    build_row = staticmethod(modeling_bloom.build_alibi_tensor)

    def config(self, num_heads: int, num_kv_heads: int, head_dim: int) -> Any:
        _as_many(num_heads, num_kv_heads)
        return transformers.BloomConfig(hidden_size=num_heads * head_dim, n_head=num_heads, n_layer=1, **_TOKENS)


class Falcon(_Model):
    """Falcon with ``alibi=True`` and the default attention, "sdpa"."""

    features = frozenset({"grouped"})
    kind, block = transformers.FalconModel, "h.self_attention"
    build_row = staticmethod(modeling_falcon.build_alibi_tensor)
    attention_of_config = "sdpa"

    def config(self, num_heads: int, num_kv_heads: int, head_dim: int) -> Any:
        even = head_dim + head_dim % 2  # of rotary positions, which alibi=True does without; checked all the same
        config = transformers.FalconConfig(
            hidden_size=num_heads * even,
            num_attention_heads=num_heads,
            num_kv_heads=num_kv_heads,
            new_decoder_architecture=num_kv_heads != num_heads,  # the one that has groups
            num_hidden_layers=1,
            alibi=True,
            multi_query=False,
            parallel_attn=False,
            **_TOKENS,
        )
        config.hidden_size = num_heads * head_dim
        config._attn_implementation = self.attention_of_config
        return config

    def fuse(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if query.shape[1] == key.shape[1]:
            return super().fuse(query, key, value)
        groups = query.unflatten(1, (key.shape[1], -1))  # [batch, num_kv_heads, group, q_len, head_dim]
        fused = torch.cat([groups, key.unsqueeze(2), value.unsqueeze(2)], dim=2)
        return fused.permute(0, 3, 1, 2, 4).flatten(2)


class FalconEager(Falcon):
    """Falcon with ``alibi=True`` and ``attn_implementation="eager"``."""

    attention_of_config = "eager"


class Mpt(_Model):
    """MPT, eager: the only attention it has."""

    kind, block = transformers.MptModel, "blocks.attn"
    attention_config: dict[str, Any] = {}  # noqa: RUF012 -- read, never written

    def key_bias(self, num_heads: int, kv_len: int, dtype: torch.dtype | None = None) -> Values:
        """Return the row as the model gives it to its attention, float32 in every dtype."""
        model, probe = self.model(num_heads, num_heads, 2)
        batch_of_one = torch.zeros(1, 1, num_heads * 2, dtype=self.torch_dtype)
        probe.fused = batch_of_one.repeat(1, 1, 3)
        with torch.no_grad():
            model(inputs_embeds=batch_of_one)
        return to_numpy(probe.given["position_bias"][:, 0, -kv_len:])

    def config(self, num_heads: int, num_kv_heads: int, head_dim: int) -> Any:
        _as_many(num_heads, num_kv_heads)
        size = num_heads * head_dim
        attention = dict(self.attention_config)
        return transformers.MptConfig(d_model=size, n_heads=num_heads, n_layers=1, attn_config=attention, **_TOKENS)

    def fuse(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return torch.cat([x.transpose(1, 2).flatten(2) for x in (query, key, value)], dim=2)


class MptBiasMax16(Mpt):
    """MPT configured with ``alibi_bias_max=16``, as its StoryWriter checkpoint is."""

    attention_config = {"alibi_bias_max": 16}  # noqa: RUF012


def _as_many(num_heads: int, num_kv_heads: int) -> None:
    if num_heads != num_kv_heads:
        raise NotImplementedError("as many key/value heads as query heads")
