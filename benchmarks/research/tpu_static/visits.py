"""How many blocks of keys our TPU kernel visits, beside those that the horizon requires: arithmetic, on any machine."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from benchmarks.research.tpu_static.subjects import BATCH, BLOCK, HEADS

FINE = 128  # queries, and keys, that bounds are formed for to say what is required


def visits(length: int, head_dim: int) -> tuple[int, int]:
    """Return how many blocks of keys the forward pass visits, and how many hold a key that some query needs.

    Of normally distributed bfloat16 data, over heads and blocks of queries. What is needed is planned for each 128
    queries and each 128 keys; the kernel plans for blocks of 512 at once.
    """
    import jax
    import jax.numpy as jnp

    from alibi_core import AttentionCall
    from alibi_core._call import LENGTH_FIRST
    from alibi_jax import TPU
    from alibi_jax._call import needed_keys, take_apart
    from alibi_jax._explain import visited_blocks

    shape = (BATCH, length, HEADS, head_dim)
    tensors = [jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16) for seed in range(3)]
    rules, operands = take_apart(AttentionCall.check(*tensors, layout=LENGTH_FIRST, xp=jnp), *tensors)
    plan: Any = jax.jit(partial(needed_keys, rules, q_tile=FINE, kv_tile=FINE))
    first, stop = (np.asarray(x).reshape(BATCH, HEADS, -1, BLOCK // FINE) for x in plan(operands))
    required = -(-stop.max(axis=-1) // BLOCK) - first.min(axis=-1) // BLOCK
    return visited_blocks(rules, operands, TPU(BLOCK, BLOCK)), int(required.sum())
