"""Attention on sharded arrays.

Inside ``jax.shard_map``, an array's type has the mesh axes that it varies over. With explicit mesh axes
(``AxisType.Explicit``), the type has the sharding of the array's axes. With automatic mesh axes the type has neither:
XLA partitions the program, and cannot partition a kernel (nor take a rule for it: libtpu 0.0.51 lacks
``custom_partitioning``, https://github.com/jax-ml/jax/issues/38196), unless the caller states the sharding.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from alibi_core.backend import AttentionCall
from alibi_jax._call import MOVING, Operands
from alibi_jax._compatible import varying_alike
from alibi_jax._dispatch.choice import Implementation
from alibi_jax._dispatch.derivatives import dense, differentiable
from alibi_jax._dispatch.primitive import backward, forward
from alibi_jax._tpu import TPU

KEYS = ("key", "value", "key_norms")  # the operands with a key/value head


def attend(operands: Operands, implementation: Implementation | None) -> jax.Array:
    """Return attention; each device computes its own batch entries and heads, where the sharding is known.

    It is known of explicitly sharded arrays, and where the TPU kernel's options state it.

    Raises:
        NotImplementedError: If an explicitly sharded query is sharded along tokens or features.
    """
    stated = implementation.sharding if isinstance(implementation, TPU) else None
    sharding = jax.typeof(operands.query).sharding if stated is None else stated
    mesh, spec_of_query = sharding.mesh, (*sharding.spec, None, None, None, None)[:4]
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    names = {name for name, kind in kinds if kind == AxisType.Explicit or stated is not None}

    def call(operands: Operands) -> jax.Array:
        return _attend(implementation, varying_alike(operands.fitted()))

    if not names:
        return call(operands)
    # A stated sharding is the caller's, tokens before heads.
    batch, heads, tokens, features = spec_of_query if stated is None else (spec_of_query[i] for i in (0, 2, 1, 3))
    if tokens is not None or features is not None:
        given = PartitionSpec(batch, tokens, heads, features)
        raise NotImplementedError(
            f"query must be sharded along batch and heads alone, got {given}; jax.sharding.reshard it"
        )

    # If the key/value heads do not divide among the devices, each of them takes its heads of all: those that it would
    # have if each head was repeated so often that they divide.
    num_kv_heads, count = operands.key.shape[1], _size(mesh, heads)
    repeats = count // math.gcd(num_kv_heads, count)
    own = num_kv_heads * repeats // count

    def with_own_heads(operands: Operands) -> jax.Array:
        if num_kv_heads > 1 and repeats > 1:
            index = (jax.lax.axis_index(heads) * own + jnp.arange(own)) // repeats
            keys = ((name, getattr(operands, name)) for name in KEYS)
            operands = operands._replace(**{name: None if x is None else x[:, index] for name, x in keys})
        return call(operands)

    def spec(array: Any, has_heads: bool) -> PartitionSpec:
        """Return the sharding of an array; axes that do not divide, as those of length 1, are not sharded."""
        wanted = (batch, heads) if has_heads else (batch,)
        pairs = zip(wanted, array.shape, strict=False)
        return PartitionSpec(*(None if n % _size(mesh, axis) else axis for axis, n in pairs))

    of_call = {name: spec(x, name in (*MOVING, "mask")) for name, x in operands.call.arrays.items()}
    specs = jax.tree.map(lambda x: spec(x, True), operands)._replace(call=replace(operands.call, **of_call))
    if stated is None:
        operands = jax.tree.map(lambda x, to: jax.sharding.reshard(x, NamedSharding(mesh, to)), operands, specs)
    # Under jax.vmap with spmd_axis_name, mapped mesh axes must not be named; an empty set means all remaining axes.
    names = names if len(names) < len(mesh.axis_names) else set()
    divided = jax.shard_map(with_own_heads, mesh=mesh, in_specs=(specs,), out_specs=specs.query, axis_names=names)
    return divided(operands)


def attend_densely(call: AttentionCall, query: Any, *keys: Any, dropout_key: jax.Array | None = None) -> Any:
    """Return dense attention; a key and value that are explicitly sharded unlike the query are resharded like it.

    Key/value heads that do not divide among the query's shards are repeated until they do.
    """
    sharding = jax.typeof(query).sharding
    *batch, heads = sharding.spec[:-2]
    if any(jax.typeof(x).sharding.spec[:-2] != sharding.spec[:-2] for x in keys):
        repeats = math.lcm(call.num_kv_heads, _size(sharding.mesh, heads)) // call.num_kv_heads

        def placed(array: Any, heads: Any) -> jax.Array:
            return jax.sharding.reshard(array, NamedSharding(sharding.mesh, PartitionSpec(*batch, heads, None, None)))

        keys = tuple(placed(jnp.repeat(placed(x, None), repeats, axis=-3), heads) for x in keys)
        call = replace(call, num_kv_heads=call.num_kv_heads * repeats)
    return dense(call, query, *keys, dropout_key=dropout_key)


def _size(mesh: Any, axes: Any) -> int:
    """Return the number of devices along one mesh axis, several, or None."""
    return math.prod(mesh.shape[x] for x in (axes if isinstance(axes, tuple) else (axes,)) if x is not None)


_attend = differentiable(forward, backward)
