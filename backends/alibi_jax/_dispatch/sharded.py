"""Attention on arrays whose types say how they are divided among devices.

Inside ``jax.shard_map`` that is which mesh axes they vary over. With explicit mesh axes (``AxisType.Explicit``) it is
which of their own axes they are sharded along. With automatic ones they say nothing, and XLA divides the program.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from alibi_jax._call import Operands, Rules
from alibi_jax._compatible import varying_alike
from alibi_jax._dispatch.choice import Implementation
from alibi_jax._dispatch.primitive import forward


def attend(rules: Rules, implementation: Implementation | None, operands: Operands) -> jax.Array:
    """Return attention, each device's own batch entries and heads where arrays are explicitly sharded.

    Raises:
        NotImplementedError: If the tokens or the features of an explicitly sharded query are divided.
    """
    sharding = jax.typeof(operands.query).sharding
    explicit = [name for name, kind in zip(sharding.mesh.axis_names, sharding.mesh.axis_types, strict=True)
                if kind == AxisType.Explicit]  # fmt: skip

    def call(operands: Operands) -> jax.Array:
        return forward(rules, varying_alike(operands), implementation, with_log_sum_exps=False)[0]

    if not explicit:
        return call(operands)
    batch, tokens, heads, features = (*sharding.spec, None, None, None, None)[:4]
    if tokens is not None or features is not None:
        raise NotImplementedError(
            f"query must be sharded along batch and heads alone, got {sharding.spec}; jax.sharding.reshard it"
        )
    one = PartitionSpec(batch, None, heads)
    tensors = PartitionSpec(batch, heads) if rules.kv_heads_first else one
    axes = {
        "query": one,
        "key": tensors,
        "value": tensors,
        "slopes": PartitionSpec(batch, heads),
        "future_slopes": PartitionSpec(batch, heads),
        "mask": PartitionSpec(batch, heads),
        "key_norms": PartitionSpec(batch, heads),
    }

    def placed(name: str, array: Any) -> Any:
        """Return how an array is to be sharded: along no axis that has length 1 and stands for any."""
        wanted = axes.get(name, PartitionSpec(batch))
        return PartitionSpec(*(None if n == 1 else axis for axis, n in zip(wanted, array.shape, strict=False)))

    specs = Operands(*(None if x is None else placed(name, x) for name, x in operands._asdict().items()))
    mesh = sharding.mesh  # as nobody need have set one
    operands = jax.tree.map(lambda x, spec: jax.sharding.reshard(x, NamedSharding(mesh, spec)), operands, specs)
    # No names stand for all axes of the mesh but those that jax.vmap maps over, which are not to be named.
    names = set(explicit) if len(explicit) < len(mesh.axis_names) else set()
    return jax.shard_map(call, mesh=mesh, in_specs=(specs,), out_specs=one, axis_names=names)(operands)
