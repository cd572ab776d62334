"""Compile sequence-parallel attention for TPUs that are not there, and print what its devices would send, as JSON.

    python -m tests.support.parallel_topologies        a line for each topology

A process of its own: what libtpu is told through the environment it is told before JAX is imported.
"""

from __future__ import annotations

import json
import re
from typing import Any

from tests.support.divided import attention_of_whole
from tests.support.tpu import collectives, devices_of, pretend

# A topology, how many tokens a device has there, and whether gradients are compiled, too.
PROGRAMS = {"v5e:2x2": (8192, True), "v5e:4x4": (2048, False)}
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64


def main() -> None:
    pretend("v5litepod-16")
    for topology, (shard_len, with_gradients) in PROGRAMS.items():
        try:
            found = compiled(topology, shard_len, with_gradients)
        except Exception as error:  # the test that asks says which program it was
            found = {"error": f"{type(error).__name__}: {error}"[-2000:]}
        print(json.dumps({"name": topology} | found), flush=True)


def compiled(topology: str, shard_len: int, with_gradients: bool) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    devices = devices_of(topology)
    mesh = Mesh(np.asarray(devices), ("tokens",))
    placed = NamedSharding(mesh, PartitionSpec(None, "tokens"))
    length = shard_len * len(devices)
    tensors = [
        jax.ShapeDtypeStruct((1, length, n, HEAD_DIM), jnp.bfloat16, sharding=placed)
        for n in (HEADS, KV_HEADS, KV_HEADS)
    ]

    def attend(*tensors: jax.Array) -> jax.Array:
        return attention_of_whole(mesh, *tensors)

    def loss(*tensors: jax.Array) -> jax.Array:
        return jnp.sum(attend(*tensors).astype(jnp.float32))

    function = jax.grad(loss, argnums=(0, 1, 2)) if with_gradients else attend
    text = jax.jit(function).lower(*tensors).compile().as_text()
    return {
        "collectives": list(collectives(text)),
        "kernels": len(re.findall(r'custom_call_target="tpu_custom_call"', text)),
        "heads": HEADS,
        "head_dim": HEAD_DIM,
    }


if __name__ == "__main__":
    main()
