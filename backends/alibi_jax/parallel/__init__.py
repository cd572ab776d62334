"""Sequence-parallel ALiBi attention: one sequence, divided among devices, exact and with little to send.

Because ALiBi's bias falls without bound, a shard of the sequence needs few tokens of the others: those within the
horizon of each head. Keys and values travel by ``jax.lax.ppermute`` no farther than that, and what devices make of them
is merged by log-sum-exps. ::

    from alibi_jax import parallel

    mesh = jax.make_mesh((2, 4), ("data", "tokens"))
    attend = functools.partial(parallel.sharded_attention, mesh, axis_name="tokens", batch_axis="data", score_bound=16)
    result = jax.jit(attend)(query, key, value)
"""

from alibi_core import ShardPlan, Shards, shard_plan
from alibi_jax.parallel._attention import attention
from alibi_jax.parallel._decode import append, decode
from alibi_jax.parallel._mesh import sharded_attention

__all__ = ["ShardPlan", "Shards", "append", "attention", "decode", "shard_plan", "sharded_attention"]
