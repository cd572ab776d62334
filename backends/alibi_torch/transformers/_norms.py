"""How large a query of a model can become, whatever the tokens: proved from its weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.bloom.modeling_bloom import BloomAttention, BloomBlock
from transformers.models.falcon.modeling_falcon import FalconAttention, FalconDecoderLayer, FalconLinear
from transformers.models.mpt.modeling_mpt import MptAttention, MptBlock

ROUNDING = 1.01  # products of low precision are rounded, these singular values too


def most_of_queries(model: nn.Module, module: nn.Module) -> float:
    """Return what no norm of a query of an attention module exceeds.

    A layer norm makes vectors whose norm, before its weight ``g`` and bias ``b``, is at most ``sqrt(n)`` of ``n``
    features. So a head's query ``W (g * x + b) + c`` is at most ``sqrt(n) |W diag(g)| + |W b + c|``, by the largest
    singular value.
    """
    norm, weight, bias = _parts(model, module)
    head_dim = module.head_dim
    with torch.no_grad():
        gain = norm.weight.double()
        shift = torch.zeros_like(gain) if norm.bias is None else norm.bias.double()
        constant = torch.zeros(weight.shape[0]) if bias is None else bias
        heads = weight.double().unflatten(0, (-1, head_dim))  # [num_heads, head_dim, hidden_size]
        offsets = heads @ shift + constant.to(gain).unflatten(0, (-1, head_dim))
        largest = torch.linalg.matrix_norm(heads * gain, ord=2)
        bounds = largest * gain.shape[0] ** 0.5 + offsets.norm(dim=-1)
        most = bounds.amax().item() * ROUNDING
    clip = getattr(module, "clip_qkv", None)
    return min(most, clip * head_dim**0.5 * ROUNDING) if clip else most


def _parts(model: nn.Module, module: Any) -> tuple[Any, Tensor, Tensor | None]:
    """Return the layer norm before a module's queries, and the weight and bias of its queries.

    Raises:
        ValueError: If the weights are not all there is to them.
    """
    projection = module.Wqkv if isinstance(module, MptAttention) else module.query_key_value
    kind = type(projection)
    if kind not in (nn.Linear, FalconLinear) or projection.weight.is_meta:
        raise ValueError(
            "projection of queries must be a plain linear layer whose weights are in memory, for a cache that evicts, "
            f"got {kind.__name__}; merge adapters, load what is offloaded, or make the cache with evict=False"
        )
    blocks = (x for x in model.modules() if isinstance(x, (BloomBlock, FalconDecoderLayer, MptBlock)))
    block: Any = next(x for x in blocks if module in x.children())
    if isinstance(block, MptBlock):
        return block.norm_1, projection.weight.chunk(3)[0], None
    if isinstance(module, FalconAttention):
        norm = block.ln_attn if hasattr(block, "ln_attn") else block.input_layernorm
        groups = module.num_kv_heads
    else:
        assert isinstance(module, BloomAttention)  # the third family
        norm, groups = block.input_layernorm, module.num_heads

    def queries(rows: Tensor) -> Tensor:
        of_groups = rows.unflatten(0, (groups, -1, module.head_dim))
        return of_groups[:, :-2].flatten(0, 2)

    return norm, queries(projection.weight), None if projection.bias is None else queries(projection.bias)
