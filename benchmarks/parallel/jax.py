"""Sequence-parallel attention of alibi_jax, compiled for TPUs that are not there, in a process for each program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.harness import run_alone
from benchmarks.parallel.hlo import collectives
from benchmarks.tpu import devices_of, pretend

VERSIONS = ("jax", "jaxlib", "libtpu", "numpy")
TOPOLOGIES = {4: "v5e:2x2", 8: "v5e:2x4", 16: "v5e:4x4", 256: "v5e:16x16"}  # by how many devices they have


def program(*arguments: Any) -> dict[str, Any]:
    """Return what the compiler says of a program: ``temporaries``, in bytes a device, and ``collectives``.

    Arguments are those of :func:`prepared`.
    """
    found: dict[str, Any] = run_alone("benchmarks.parallel.jax:prepared", *arguments)["found"]
    return found


def prepared(
    num_devices: int, length: int, heads: int, head_dim: int, score_bound: float, tolerance: float, gradient: bool
) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """Return what compiles a program, and what describes it then."""
    pretend(f"v5litepod-{num_devices}")
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from alibi_jax import parallel

    mesh = Mesh(np.asarray(devices_of(TOPOLOGIES[num_devices])), ("tokens",))
    placed = NamedSharding(mesh, PartitionSpec(None, "tokens"))
    tensor = jax.ShapeDtypeStruct((1, length, heads, head_dim), jnp.bfloat16, sharding=placed)
    bounds = {"score_bound": score_bound, "tolerance": tolerance}

    def attend(*tensors: jax.Array) -> jax.Array:
        return parallel.sharded_attention(mesh, *tensors, axis_name="tokens", **bounds)

    def loss(*tensors: jax.Array) -> jax.Array:
        return jnp.sum(attend(*tensors).astype(jnp.float32) ** 2)

    function = jax.grad(loss, argnums=(0, 1, 2)) if gradient else attend
    lowered = jax.jit(function).lower(tensor, tensor, tensor)

    def describe(compiled: Any) -> dict[str, Any]:
        temporaries = compiled.memory_analysis().temp_size_in_bytes
        return {"temporaries": temporaries, "collectives": list(collectives(compiled.as_text()))}

    return lowered.compile, describe
