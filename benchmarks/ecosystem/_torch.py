"""PyTorch code: what adapters have in common, and those of small packages, which are imported where they are asked.

curated-transformers, labml-nn's annotated implementation, x-transformers, and FlexAttention with the ALiBi of
attention-gym and of the text that introduced it; eager, on the CPU.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import alibi_core

Values = np.ndarray[Any, Any]
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def to_numpy(tensor: Tensor) -> Values:
    """Return a tensor as an array, what is bfloat16 in float32."""
    tensor = tensor.detach()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy().copy()


def hidden(q_len: int, kv_len: int) -> Tensor:
    """Return which keys lie ahead of a query, ``[q_len, kv_len]``; the last query is at the last key."""
    return torch.ones(q_len, kv_len, dtype=torch.bool).triu(kv_len - q_len + 1)


class TorchAdapter:
    """An implementation in PyTorch that has slopes of its own.

    Subclasses define ``attend``, and name the options that it takes in signatures of their own.
    """

    def __init__(self, dtype: str, contract: str) -> None:
        self.name, self.dtype, self.contract = type(self).__name__, dtype, contract
        self.torch_dtype: torch.dtype = getattr(torch, dtype)

    def tensor(self, array: Values) -> Tensor:
        """Return an array as a tensor of the adapter's dtype, with memory of its own."""
        return torch.tensor(array).to(self.torch_dtype)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        """Return the attention, ``[batch, num_heads, q_len, head_dim]``."""
        raise NotImplementedError

    def forward(self, query: Values, key: Values, value: Values, **options: Any) -> Values:
        """Return the attention of arrays."""
        with torch.no_grad():
            return to_numpy(self.attend(*map(self.tensor, (query, key, value)), **options))

    def backward(self, query: Values, key: Values, value: Values, grad_output: Values, **options: Any) -> Any:
        """Return the gradients of query, key and value."""
        leaves = [self.tensor(x).requires_grad_() for x in (query, key, value)]
        result = self.attend(*leaves, **options)
        return tuple(map(to_numpy, torch.autograd.grad(result, leaves, self.tensor(grad_output))))

    def attention(self, query: Values, key: Values, value: Values, is_causal: bool) -> Values:
        return self.forward(query, key, value, is_causal=is_causal)

    def attention_grad(self, query: Values, key: Values, value: Values, grad_output: Values, is_causal: bool) -> Any:
        return self.backward(query, key, value, grad_output, is_causal=is_causal)


# --- curated-transformers and labml-nn --------------------------------------------------------------------------------


class Curated(TorchAdapter):
    """``AttentionLinearBiases`` in ``ScaledDotProductAttention``: a row for all queries if causal, distances if not."""

    features = frozenset({"symmetric"})

    def slopes(self, num_heads: int) -> Values:
        return to_numpy(self.biases(num_heads, is_causal=True).slopes[0, :, 0, 0])

    def key_bias(self, num_heads: int, kv_len: int) -> Values:
        """Return the row that it adds if causal, ``[num_heads, kv_len]``."""
        row = self.biases(num_heads, is_causal=True).calculate_biases(kv_len)[0, :, 0]
        return to_numpy(row.to(self.torch_dtype))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        from curated_transformers.layers.attention import AttentionMask, ScaledDotProductAttention

        is_causal, kv_len = options["is_causal"], key.shape[2]
        biases = self.biases(query.shape[1], is_causal=is_causal)
        everything = AttentionMask(torch.ones(query.shape[0], kv_len, dtype=torch.bool))
        module = ScaledDotProductAttention(dropout_prob=0.0, linear_biases=biases).eval()
        return module(query=query, key=key, value=value, attention_mask=everything, use_causal_mask=is_causal)

    def biases(self, num_heads: int, *, is_causal: bool) -> nn.Module:
        """Return its module, in the adapter's dtype, as in a model of that dtype."""
        from curated_transformers.layers.attention import AttentionLinearBiases

        module = AttentionLinearBiases(n_attention_heads=num_heads, is_causal=is_causal, is_inverted=False)
        return module.to(self.torch_dtype)


class Labml(TorchAdapter):
    """``AlibiMultiHeadAttention``, causal; its layout is ``[length, batch, features]``."""

    features: frozenset[str] = frozenset()

    def slopes(self, num_heads: int) -> Values:
        from labml_nn.transformers.alibi import get_slopes

        return to_numpy(get_slopes(num_heads))

    def key_bias(self, num_heads: int, kv_len: int) -> Values:
        """Return the row of the last query, ``[num_heads, kv_len]``."""
        from labml_nn.transformers.alibi import get_alibi_biases

        return to_numpy(get_alibi_biases(num_heads, torch.ones(1, kv_len, dtype=torch.bool))[0].T)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        from labml_nn.transformers.alibi import AlibiMultiHeadAttention

        num_heads, length, head_dim = query.shape[1:]
        if key.shape[2] != length:
            raise NotImplementedError("as many queries as keys")
        module = AlibiMultiHeadAttention(num_heads, num_heads * head_dim, dropout_prob=0.0).eval()
        for projection in (module.query, module.key, module.value):
            projection.linear = nn.Identity()
        module.output = nn.Identity()
        features = [x.permute(2, 0, 1, 3).flatten(2) for x in (query, key, value)]
        visible = ~hidden(length, length)[:, :, None]
        result = module(query=features[0], key=features[1], value=features[2], mask=visible)
        return result.unflatten(2, (num_heads, head_dim)).permute(1, 2, 0, 3)


# --- x-transformers ---------------------------------------------------------------------------------------------------


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

    def rel_pos(self, num_heads: int, slopes: Values | None = None) -> nn.Module:
        """Return its bias, in the adapter's dtype, as in a model of that dtype."""
        from x_transformers.x_transformers import AlibiPositionalBias

        own = None if slopes is None else slopes.tolist()
        return AlibiPositionalBias(num_heads, slopes=own).to(self.torch_dtype)

    def module(self, query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool) -> nn.Module:
        """Return its attention, whose projections give back query, key and value."""
        from x_transformers.x_transformers import Attention

        num_heads, head_dim = query.shape[1], query.shape[3]
        sizes = {"dim_head": head_dim, "heads": num_heads, "kv_heads": key.shape[1]}
        module = Attention(num_heads * head_dim, causal=is_causal, flash=self.flash, **sizes).eval()
        module.to_q, module.to_k, module.to_v, module.to_out = nn.Identity(), Part(0), Part(1), nn.Identity()
        return module

    def call(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, Any]:
        """Return the attention and what it would keep."""
        features = [x.transpose(1, 2).flatten(2) for x in (query, key, value)]
        context = torch.cat(features[1:], dim=-1)
        options = {"return_intermediates": True, **options}
        result, seen = module(features[0], context=context, **options)
        return result.unflatten(2, query.shape[1::2]).transpose(1, 2), seen


class XTransformersFlash(XTransformers):
    """Its attention with ``flash=True``: PyTorch's fused one, with the bias for a mask."""

    flash = True


# --- FlexAttention ----------------------------------------------------------------------------------------------------


class Flex(TorchAdapter):
    """FlexAttention with a ``score_mod``, which takes slopes if they are the caller's."""

    features = frozenset({"symmetric", "grouped"})
    attention_grad = None  # FlexAttention has no backward pass on a CPU

    def bias(self, num_heads: int, q_len: int, kv_len: int, is_causal: bool) -> Values:
        indices = torch.arange(num_heads), torch.arange(kv_len - q_len, kv_len), torch.arange(kv_len)
        head, q_index, kv_index = torch.meshgrid(*indices, indexing="ij")
        nothing = torch.zeros(()), torch.zeros((), dtype=torch.int64)  # a score, and the batch entry
        bias = self.score_mod(num_heads)(*nothing, head, q_index, kv_index)
        return to_numpy(bias.masked_fill(q_index < kv_index, -torch.inf) if is_causal else bias)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        q_len, kv_len = query.shape[2], key.shape[2]
        if q_len != kv_len:
            raise NotImplementedError("as many queries as keys: both are counted from 0")
        mod, blocks = self.score_mod(query.shape[1], options.get("slopes")), None
        with warnings.catch_warnings():  # one says that it is slow where it is not compiled
            warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
            if options["is_causal"]:
                lengths = None, None, q_len, kv_len
                blocks = create_block_mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, *lengths, "cpu")
            is_grouped = query.shape[1] != key.shape[1]
            return flex_attention(query, key, value, mod, block_mask=blocks, enable_gqa=is_grouped)

    def score_mod(self, num_heads: int, slopes: Values | None = None) -> ScoreMod:
        """Return what changes a score."""
        raise NotImplementedError


class AttentionGym(Flex):
    """``attn_gym.mods.generate_alibi_bias``, with the slopes of the paper's text."""

    def slopes(self, num_heads: int) -> Values:
        return -self.bias(num_heads, 2, 2, False)[:, 1, 0]

    def score_mod(self, num_heads: int, slopes: Values | None = None) -> ScoreMod:
        from attn_gym.mods import generate_alibi_bias

        return generate_alibi_bias(num_heads)


class Example(Flex):
    """The example of the text that introduced FlexAttention, whose slopes are the caller's: ``slope * (key - query)``.

    https://pytorch.org/blog/flexattention/
    """

    sign = 1

    def attention(self, query: Values, key: Values, value: Values, slopes: Values, is_causal: bool) -> Values:
        return self.forward(query, key, value, slopes=slopes, is_causal=is_causal)

    def score_mod(self, num_heads: int, slopes: Values | None = None) -> ScoreMod:
        own = torch.tensor(alibi_core.slopes(num_heads) if slopes is None else slopes)
        return lambda score, batch, head, q_idx, kv_idx: score + own[head] * (self.sign * (kv_idx - q_idx))


class ExampleAsFirstPublished(Example):
    """The same as it stood at first, ``slope * (query - key)``: far keys gain.

    https://github.com/pytorch/pytorch.github.io/commit/67fc54cfbce71767a3a5d4192ed62fb81f624b88 turned it round.
    """

    sign = -1
