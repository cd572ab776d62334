"""Who else computes ALiBi attention in PyTorch: a dense bias, FlexAttention, and the eager attention of BLOOM.

What a model builds once for all its layers, a bias or a mask, is built before anything is timed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.attention.backend import Call, Contestant
from benchmarks.attention.sizes import Shape

FLEX_BLOCK = 128


@dataclass(frozen=True)
class Prepared:
    """A pass that is ready to run.

    Attributes:
        attend: Returns the result, ``[batch, num_heads, length, head_dim]``.
        leaves: What gradients are due for.
    """

    attend: Call
    leaves: tuple[Tensor, ...]


def _slopes(num_heads: int, device: torch.device) -> Tensor:
    return torch.exp2(-8 / num_heads * torch.arange(1, num_heads + 1, device=device))


def _dense_bias(query: Tensor, key: Tensor, value: Tensor) -> Prepared:
    _, num_heads, length, _ = query.shape
    position = torch.arange(length, device=query.device, dtype=torch.float32)
    distance = position[:, None] - position
    hidden = distance < 0
    bias = torch.empty(1, num_heads, length, length, dtype=query.dtype, device=query.device)
    for head, slope in enumerate(_slopes(num_heads, query.device).tolist()):  # in place, so that one is held, not two
        bias[0, head] = (distance * -slope).masked_fill_(hidden, -math.inf)
    return Prepared(lambda: F.scaled_dot_product_attention(query, key, value, attn_mask=bias), (query, key, value))


def _dense_bias_bytes(shape: Shape) -> int:
    return (shape.scores // shape.batch) * shape.element_bytes + 3 * 4 * shape.length**2


def _flex(query: Tensor, key: Tensor, value: Tensor) -> Prepared:
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.reset()  # one compilation a shape: after some it would fall back to what is not compiled
    slopes = _slopes(query.shape[1], query.device)
    blocks = _causal_blocks(query.shape[2], query.device)
    compiled = torch.compile(flex_attention, fullgraph=True)

    def alibi(score: Tensor, batch: Tensor, head: Tensor, q_index: Tensor, kv_index: Tensor) -> Tensor:
        return score + slopes[head] * (kv_index - q_index)

    return Prepared(lambda: compiled(query, key, value, score_mod=alibi, block_mask=blocks), (query, key, value))


def _causal_blocks(length: int, device: torch.device) -> Any:
    """Return the usual causal block mask, from the ranges of blocks: from a predicate it takes minutes on a CPU."""
    from torch.nn.attention.flex_attention import BlockMask

    rows = torch.arange(-(-length // FLEX_BLOCK), dtype=torch.int32, device=device)
    indices = rows.expand(1, 1, len(rows), len(rows)).contiguous()
    on_diagonal = torch.zeros_like(indices)
    on_diagonal[..., 0] = rows  # of each row of blocks, the one that is masked in part; all before it are full
    return BlockMask.from_kv_blocks(
        torch.ones_like(rows)[None, None],
        on_diagonal,
        rows[None, None].contiguous(),
        indices,
        BLOCK_SIZE=FLEX_BLOCK,
        mask_mod=lambda batch, head, q_index, kv_index: q_index >= kv_index,
        seq_lengths=(length, length),
    )


def _bloom(query: Tensor, key: Tensor, value: Tensor) -> Prepared:
    from transformers import BloomConfig
    from transformers.models.bloom.modeling_bloom import BloomAttention, build_alibi_tensor

    batch, num_heads, length, head_dim = query.shape
    config = BloomConfig(hidden_size=num_heads * head_dim, n_head=num_heads, hidden_dropout=0.0, attention_dropout=0.0)
    module = BloomAttention(config, layer_idx=0).eval()
    module.query_key_value = module.dense = nn.Identity()  # the projections are no part of what is compared
    # BLOOM keeps the three together: [batch, length, num_heads, 3, head_dim].
    fused = torch.stack([x.detach() for x in (query, key, value)], dim=-2).transpose(1, 2).flatten(2).contiguous()
    fused.requires_grad_(query.requires_grad)
    everything = torch.ones(batch, length, dtype=torch.int64, device=query.device)
    alibi = build_alibi_tensor(everything, num_heads, query.dtype)
    lowest = torch.finfo(query.dtype).min
    mask = torch.full((1, 1, length, length), lowest, dtype=query.dtype, device=query.device).triu_(1)
    residual = torch.zeros_like(query).reshape(batch, length, -1)

    def attend() -> Tensor:
        result, _ = module(fused, residual, alibi, mask)
        return result.unflatten(2, (num_heads, head_dim)).transpose(1, 2)

    return Prepared(attend, (fused,))


def _bloom_bytes(shape: Shape) -> int:
    # Scores, those with the mask, and weights in float32, then in the dtype; going backward, no more at once.
    element = shape.element_bytes
    return shape.scores * (2 * element + 4 + (element if element < 4 else 0)) + shape.length**2 * element


PEERS = (
    Contestant(
        "SDPA, dense bias", _dense_bias, _dense_bias_bytes, note="the bias is built before, in the dtype of the query"
    ),
    Contestant(
        "FlexAttention",
        _flex,
        backward_on=("cuda",),
        note="compiled, score_mod and causal blocks of 128; blocks from ranges, not from a predicate",
    ),
    Contestant(
        "BLOOM, eager",
        _bloom,
        _bloom_bytes,
        note="transformers' BloomAttention without its projections; bias row and mask are built before",
    ),
)
