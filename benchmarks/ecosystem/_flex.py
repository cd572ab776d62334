"""FlexAttention with the ALiBi of attention-gym, and of the text that introduced it; eager, on the CPU."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from benchmarks.ecosystem._torch import TorchAdapter, Values, to_numpy

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def attend(query: Tensor, key: Tensor, value: Tensor, score_mod: ScoreMod, *, is_causal: bool) -> Tensor:
    """Return FlexAttention with a ``score_mod`` and the usual causal block mask."""
    q_len, kv_len = query.shape[2], key.shape[2]
    if q_len != kv_len:
        raise NotImplementedError("as many queries as keys: both are counted from 0")
    with warnings.catch_warnings():  # one says that it is slow where it is not compiled
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        blocks = None
        if is_causal:
            blocks = create_block_mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, None, None, q_len, kv_len, "cpu")
        is_grouped = query.shape[1] != key.shape[1]
        return flex_attention(query, key, value, score_mod, block_mask=blocks, enable_gqa=is_grouped)


def bias_of(score_mod: ScoreMod, num_heads: int, q_len: int, kv_len: int, *, is_causal: bool) -> Values:
    """Return what a ``score_mod`` adds to scores of 0 for the last queries, ``[num_heads, q_len, kv_len]``."""
    indices = torch.arange(num_heads), torch.arange(kv_len - q_len, kv_len), torch.arange(kv_len)
    head, q_index, kv_index = torch.meshgrid(*indices, indexing="ij")
    bias = score_mod(torch.zeros(()), torch.zeros((), dtype=torch.int64), head, q_index, kv_index)
    return to_numpy(bias.masked_fill(q_index < kv_index, -torch.inf) if is_causal else bias)


class AttentionGym(TorchAdapter):
    """``attn_gym.mods.generate_alibi_bias``, with the slopes of the paper's text."""

    features = frozenset({"symmetric", "grouped"})

    def slopes(self, num_heads: int) -> Values:
        return -self.bias(num_heads, 2, 2, False)[:, 1, 0]

    def bias(self, num_heads: int, q_len: int, kv_len: int, is_causal: bool) -> Values:
        return bias_of(self.score_mod(num_heads), num_heads, q_len, kv_len, is_causal=is_causal)

    def attention(self, query: Values, key: Values, value: Values, is_causal: bool) -> Values:
        return self.forward(query, key, value, is_causal=is_causal)

    attention_grad = None  # FlexAttention has no backward pass on a CPU

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        return attend(query, key, value, self.score_mod(query.shape[1]), **options)

    def score_mod(self, num_heads: int) -> ScoreMod:
        """Return what changes a score."""
        from attn_gym.mods import generate_alibi_bias

        return generate_alibi_bias(num_heads)


class Example(TorchAdapter):
    """The example of the text that introduced FlexAttention, whose slopes are the caller's: ``slope * (key - query)``.

    https://pytorch.org/blog/flexattention/
    """

    features = frozenset({"symmetric", "grouped"})
    sign = 1

    def bias(self, num_heads: int, q_len: int, kv_len: int, is_causal: bool) -> Values:
        import alibi_core

        mod = self.score_mod(torch.tensor(alibi_core.slopes(num_heads)))
        return bias_of(mod, num_heads, q_len, kv_len, is_causal=is_causal)

    def attention(self, query: Values, key: Values, value: Values, slopes: Values, is_causal: bool) -> Values:
        return self.forward(query, key, value, slopes=slopes, is_causal=is_causal)

    attention_grad = None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        mod = self.score_mod(torch.tensor(options["slopes"]))
        return attend(query, key, value, mod, is_causal=options["is_causal"])

    def score_mod(self, slopes: Tensor) -> ScoreMod:
        """Return what changes a score."""
        return lambda score, batch, head, q_idx, kv_idx: score + slopes[head] * (self.sign * (kv_idx - q_idx))


class ExampleAsFirstPublished(Example):
    """The same as it stood at first, ``slope * (query - key)``: far keys gain.

    https://github.com/pytorch/pytorch.github.io/commit/67fc54cfbce71767a3a5d4192ed62fb81f624b88 turned it round.
    """

    sign = -1
