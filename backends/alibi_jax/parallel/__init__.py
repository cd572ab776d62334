"""Sequence-parallel ALiBi attention: one sequence sharded among devices, exact, with little communication.

Because ALiBi's bias falls without bound, a shard of the sequence needs only the tokens of other shards that are within
the horizon of each head. Shards of keys and values are passed on by ``jax.lax.ppermute`` only as far as that, and
partial results are merged by log-sum-exps.
"""

from alibi_jax.parallel._attention import attention

__all__ = ["attention"]
