"""Attention on arrays whose types say how they are divided among devices.

Inside ``jax.shard_map`` types say which mesh axes arrays vary over; with explicit mesh axes (``AxisType.Explicit``),
which of their own axes are sharded. With automatic mesh axes they say nothing, and XLA divides the program.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from alibi_jax._call import Operands
from alibi_jax._compatible import varying_alike
from alibi_jax._dispatch.choice import Implementation
from alibi_jax._dispatch.primitive import forward


def attend(operands: Operands, implementation: Implementation | None) -> jax.Array:
    """Return attention; where arrays are explicitly sharded, each device computes its own batch entries and heads.

    Raises:
        NotImplementedError: If tokens or features of an explicitly sharded query are divided.
    """
    sharding = jax.typeof(operands.query).sharding
    mesh = sharding.mesh
    explicit = {name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Explicit}

    def call(operands: Operands) -> jax.Array:
        return forward(varying_alike(operands.fitted()), implementation, with_log_sum_exps=False)[0]

    if not explicit:
        return call(operands)
    batch, heads, tokens, features = (*sharding.spec, None, None, None, None)[:4]
    if tokens is not None or features is not None:
        given = PartitionSpec(batch, tokens, heads, features)
        raise NotImplementedError(
            f"query must be sharded along batch and heads alone, got {given}; jax.sharding.reshard it"
        )

    def spec(array: Any, has_heads: bool) -> PartitionSpec:
        """Return how to shard an array: along no axis of length 1, which stands for any length."""
        wanted = (batch, heads) if has_heads else (batch,)
        return PartitionSpec(*(None if n == 1 else axis for axis, n in zip(wanted, array.shape, strict=False)))

    of_call = {name: spec(x, name in ("slopes", "future_slopes", "mask")) for name, x in operands.call.arrays.items()}
    specs = jax.tree.map(lambda x: spec(x, True), operands)._replace(call=replace(operands.call, **of_call))
    operands = jax.tree.map(lambda x, to: jax.sharding.reshard(x, NamedSharding(mesh, to)), operands, specs)
    # jax.vmap may map over mesh axes, which must not be named; no names stand for all axes but those.
    names = explicit if len(explicit) < len(mesh.axis_names) else set()
    return jax.shard_map(call, mesh=mesh, in_specs=(specs,), out_specs=PartitionSpec(batch, heads), axis_names=names)(
        operands
    )
