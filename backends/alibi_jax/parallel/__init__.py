"""Sequence-parallel ALiBi attention: one sequence, divided among devices, exact and with little to send.

Because ALiBi's bias falls without bound, a shard of the sequence needs few tokens of the others: those within the
horizon of each head. Shards of keys and values travel by ``jax.lax.ppermute`` no farther than that, and results are
merged by log-sum-exps. ::

    from alibi_jax import parallel

    mesh = jax.make_mesh((2, 4), ("data", "tokens"))
    attend = functools.partial(parallel.sharded_attention, mesh, axis_name="tokens", batch_axis="data")
    result = jax.jit(attend)(query, key, value)
"""

from alibi_jax.parallel._attention import attention
from alibi_jax.parallel._mesh import sharded_attention

__all__ = ["attention", "sharded_attention"]
