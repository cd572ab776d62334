"""Sequence-parallel ALiBi attention: one sequence sharded among devices, exact, with little communication.

Because ALiBi's bias falls without bound, a shard of the sequence needs only the tokens of other shards that are within
the horizon of each head. Shards of keys and values are passed on by ``jax.lax.ppermute`` only as far as that, and
partial results are merged by log-sum-exps. ::

    from alibi_jax import parallel

    mesh = jax.make_mesh((2, 4), ("data", "tokens"))
    attend = functools.partial(parallel.sharded_attention, mesh, axis_name="tokens", batch_axis="data")
    result = jax.jit(attend)(query, key, value)
"""

from alibi_jax.parallel._attention import attention
from alibi_jax.parallel._mesh import sharded_attention

__all__ = ["attention", "sharded_attention"]
