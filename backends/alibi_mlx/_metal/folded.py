"""Causal attention as one call of MLX's kernel, which then needs no bias: ALiBi is folded into further features."""

from __future__ import annotations

import mlx.core as mx

from alibi_core import AttentionCall, fold
from alibi_mlx._compatible import padded


def folded_attention(
    call: AttentionCall, query: mx.array, key: mx.array, value: mx.array, head_dim: int, *, fused: bool
) -> mx.array:
    """Compute a call with one batch axis, causal, its last query at the last key, without masks, segments or a window.

    MLX's kernel is given ``head_dim`` features, at least ``alibi_core.fold_size`` more than there are. With ``fused``
    it is the fused one, in the dtype of the tensors; else all is computed in float32.
    """
    long_query, long_key = fold(query, key, call.slopes, scale=call.scale, head_dim=head_dim)
    tensors = [long_query, long_key, padded(value, 3, 0, head_dim - call.head_dim)]
    # Fused kernels keep scores in float32, which is what makes the products of limbs exact. MLX takes them by itself,
    # but not where gradients are traced, for want of theirs; ours are not its. Its other path, the only one on the CPU,
    # would round scores to the dtype of the tensors.
    forced = {"force_fused": True} if fused else {}
    if not fused:
        tensors = [x.astype(mx.float32) for x in tensors]
    out = mx.fast.scaled_dot_product_attention(*tensors, scale=call.scale, mask="causal", **forced)
    return out[..., : call.head_dim].astype(call.dtype)
