"""x-transformers: its ``Attention`` with its ``AlibiPositionalBias``; projections give back query, key and value."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from x_transformers.x_transformers import AlibiPositionalBias, Attention

from benchmarks.ecosystem._torch import TorchAdapter, Values, hidden, to_numpy


class Part(nn.Module):
    """Returns every other part of the features: keys at the beginning, values at the end."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index

    def forward(self, features: Tensor) -> Tensor:
        """Return one half of the features."""
        return features.chunk(2, dim=-1)[self.index]


class XTransformers(TorchAdapter):
    """Its attention, as it is by default: with scores in memory."""

    features = frozenset({"lengths", "symmetric", "grouped", "mask"})
    flash = False

    def slopes(self, num_heads: int) -> Values:
        return to_numpy(self.rel_pos(num_heads).slopes[:, 0, 0])

    def bias(self, num_heads: int, q_len: int, kv_len: int, is_causal: bool) -> Values:
        result = self.rel_pos(num_heads)(q_len, kv_len)
        return to_numpy(result.masked_fill(hidden(q_len, kv_len), -torch.inf) if is_causal else result)

    def attention(
        self, query: Values, key: Values, value: Values, slopes: Values, is_causal: bool, mask: Values | None = None
    ) -> Values:
        return self.forward(query, key, value, slopes=slopes, is_causal=is_causal, mask=mask)

    def attention_grad(
        self,
        query: Values,
        key: Values,
        value: Values,
        slopes: Values,
        grad_output: Values,
        is_causal: bool,
        mask: Values | None = None,
    ) -> Any:
        return self.backward(query, key, value, grad_output, slopes=slopes, is_causal=is_causal, mask=mask)

    def decode_step(self, query: Values, key: Values, value: Values, slopes: Values, cache: Any) -> Any:
        with torch.no_grad():
            tensors = [self.tensor(x) for x in (query, key, value)]
            if cache is None:
                cache = self.module(*tensors, is_causal=True), self.rel_pos(query.shape[1], slopes), None
            module, rel_pos, seen = cache
            result, seen = self.call(module, *tensors, rel_pos=rel_pos, cache=seen, return_intermediates=True)
        return to_numpy(result), (module, rel_pos, seen)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        module = self.module(query, key, value, is_causal=options["is_causal"])
        mask = None if options["mask"] is None else torch.tensor(options["mask"])
        rel_pos = self.rel_pos(query.shape[1], options["slopes"])
        return self.call(module, query, key, value, rel_pos=rel_pos, attn_mask=mask)[0]

    def rel_pos(self, num_heads: int, slopes: Values | None = None) -> AlibiPositionalBias:
        """Return its bias, in the adapter's dtype, as in a model of that dtype."""
        own = None if slopes is None else slopes.tolist()
        return AlibiPositionalBias(num_heads, slopes=own).to(self.torch_dtype)

    def module(self, query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool) -> Attention:
        """Return its attention, without projections."""
        num_heads, head_dim = query.shape[1], query.shape[3]
        sizes = {"dim_head": head_dim, "heads": num_heads, "kv_heads": key.shape[1]}
        module = Attention(num_heads * head_dim, causal=is_causal, flash=self.flash, **sizes).eval()
        module.to_q, module.to_k, module.to_v, module.to_out = nn.Identity(), Part(0), Part(1), nn.Identity()
        return module

    def call(self, module: Attention, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, Any]:
        """Return the attention and what it would keep."""
        features = [x.transpose(1, 2).flatten(2) for x in (query, key, value)]
        context = torch.cat(features[1:], dim=-1)
        options = {"return_intermediates": True, **options}
        result, seen = module(features[0], context=context, **options)
        return result.unflatten(2, query.shape[1::2]).transpose(1, 2), seen


class XTransformersFlash(XTransformers):
    """Its attention with ``flash=True``: PyTorch's fused one, with the bias for a mask."""

    flash = True
