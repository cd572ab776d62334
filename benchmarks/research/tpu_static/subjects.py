"""What is compiled for a TPU: ALiBi attention, splash attention without positions, and a dense bias.

All take query, key and value as ``[batch, length, heads, head_dim]``, in bfloat16. JAX is imported inside: the process
that compiles sets up its environment first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

BATCH, HEADS = 1, 8
BLOCK = 512  # queries and keys of a block, everywhere


def attention(
    name: str, length: int, head_dim: int, gradient: bool, options: Sequence[Any]
) -> tuple[Callable[..., Any], list[Any]]:
    """Return attention of that name, or a forward pass and the gradients of it, and the shapes that it takes.

    ``options`` are what the function of that name takes besides the length.
    """
    import jax
    import jax.numpy as jnp

    attend = {"alibi": alibi, "splash": splash, "dense": dense}[name](length, *options)
    shape = jax.ShapeDtypeStruct((BATCH, length, HEADS, head_dim), jnp.bfloat16)
    if not gradient:
        return attend, [shape] * 3

    def forward_and_backward(query: Any, key: Any, value: Any, cotangent: Any) -> Any:
        result, pullback = jax.vjp(attend, query, key, value)
        return result, pullback(cotangent)

    return forward_and_backward, [shape] * 4


def alibi(length: int) -> Callable[..., Any]:
    """Ours, causal, with the canonical slopes."""
    import alibi_jax

    return lambda query, key, value: alibi_jax.attention(query, key, value, implementation="tpu")


def splash(length: int, fused: bool) -> Callable[..., Any]:
    """JAX's kernel for causal attention without a bias, with its two backward kernels or the one that fuses them."""
    import jax
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

    names = ["block_q", "block_kv", "block_kv_compute", "block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute"]
    names += [] if fused else ["block_q_dq", "block_kv_dq"]
    sizes = splash_attention_kernel.BlockSizes(use_fused_bwd_kernel=fused, **dict.fromkeys(names, min(BLOCK, length)))
    mask = splash_attention_mask.MultiHeadMask([splash_attention_mask.CausalMask((length, length))] * HEADS)
    kernel = splash_attention_kernel.make_splash_mha(mask, head_shards=1, q_seq_shards=1, block_sizes=sizes)

    def attend(query: Any, key: Any, value: Any) -> Any:
        heads_first = (array.swapaxes(1, 2) for array in (query, key, value))
        return jax.vmap(kernel)(*heads_first).swapaxes(1, 2)

    return attend


def dense(length: int) -> Callable[..., Any]:
    """The attention that comes with JAX, given a dense bias, which is built on the way."""
    import jax
    import jax.numpy as jnp

    def attend(query: Any, key: Any, value: Any) -> Any:
        slopes = jnp.exp2(-8 / HEADS * jnp.arange(1, HEADS + 1, dtype=jnp.float32))
        steps = jnp.arange(length, dtype=jnp.float32)
        bias = slopes[None, :, None, None] * (steps[None, :] - steps[:, None])
        return jax.nn.dot_product_attention(query, key, value, bias, is_causal=True)

    return attend
