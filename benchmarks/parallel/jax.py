"""Sequence-parallel attention of alibi_jax, compiled for TPUs that are not there.

A process of its own for each program: what the TPU's compiler is told through the environment it is told before JAX is
imported.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from benchmarks.harness import run_alone
from benchmarks.parallel.hlo import collectives

NAME = "alibi_jax"
VERSIONS = ("jax", "jaxlib", "libtpu", "numpy")
TOPOLOGIES = {4: "v5e:2x2", 8: "v5e:2x4", 16: "v5e:4x4", 256: "v5e:16x16"}  # by how many devices they have


def program(
    num_devices: int, length: int, heads: int, head_dim: int, score_bound: float, tolerance: float, gradient: bool
) -> dict[str, Any]:
    """Return what the compiler says of a program: ``temporaries``, in bytes a device, and ``collectives``."""
    arguments = (num_devices, length, heads, head_dim, score_bound, tolerance, gradient)
    found: dict[str, Any] = run_alone("benchmarks.parallel.jax:prepared", *arguments)["found"]
    return found


def prepared(
    num_devices: int, length: int, heads: int, head_dim: int, score_bound: float, tolerance: float, gradient: bool
) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """Return what compiles a program, and what describes it then."""
    os.environ.update(
        ALLOW_MULTIPLE_LIBTPU_LOAD="1",
        JAX_ENABLE_COMPILATION_CACHE="false",
        JAX_PLATFORMS="cpu",
        TPU_ACCELERATOR_TYPE=f"v5litepod-{num_devices}",
        TPU_SKIP_MDS_QUERY="1",
        TPU_WORKER_HOSTNAMES="localhost",
    )
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from alibi_jax import parallel

    devices = topologies.get_topology_desc(TOPOLOGIES[num_devices], "tpu").devices
    mesh = Mesh(np.asarray(devices), ("tokens",))
    placed = NamedSharding(mesh, PartitionSpec(None, "tokens"))
    tensor = jax.ShapeDtypeStruct((1, length, heads, head_dim), jnp.bfloat16, sharding=placed)

    def attend(*tensors: jax.Array) -> jax.Array:
        return parallel.sharded_attention(
            mesh, *tensors, axis_name="tokens", score_bound=score_bound, tolerance=tolerance
        )

    def loss(*tensors: jax.Array) -> jax.Array:
        return jnp.sum(attend(*tensors).astype(jnp.float32) ** 2)

    function = jax.grad(loss, argnums=(0, 1, 2)) if gradient else attend
    lowered = jax.jit(function).lower(tensor, tensor, tensor)

    def describe(compiled: Any) -> dict[str, Any]:
        return {
            "temporaries": compiled.memory_analysis().temp_size_in_bytes,
            "collectives": list(collectives(compiled.as_text())),
        }

    return lowered.compile, describe
