"""Eight virtual devices give the answer of one: sharded automatically, explicitly, and by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

jax = pytest.importorskip("jax")
pytest.importorskip("flax")

PROGRAM = """
import contextlib
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from alibi_jax import TPU, attention

BATCH, LENGTH, HEADS, KV_HEADS, HEAD_DIM = 2, 300, 8, 4, 16
QUICKLY = {"xla_backend_optimization_level": 0}
IMPLEMENTATIONS = {"default": None, "tpu": TPU(128, 128, interpret=True)}
heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
arrays = [jax.random.normal(jax.random.key(seed), (BATCH, LENGTH, n, HEAD_DIM)) for seed, n in enumerate(heads)]
arrays.append(2.0 ** -jnp.arange(1.0, 9.0))
ids = jnp.arange(LENGTH)[None] // 120 + jnp.zeros((BATCH, 1), jnp.int32)


def loss(attend, query, key, value, cotangent, slopes):
    return jnp.sum(attend(query, key, value, slopes) * cotangent)


def gradients(attend, arrays):
    return jax.grad(loss, argnums=(1, 2, 3, 5))(attend, *arrays)


def one(*x, **options):
    return attention(*x, segment_ids=ids, **options)


def described(way, implementation):
    kind = AxisType.Explicit if way in ("explicit", "unset", "mapped") else AxisType.Auto
    mesh = jax.make_mesh((2, 4), ("data", "heads"), axis_types=(kind,) * 2)
    by_head = P("data", None, "heads")
    specs = [by_head] * 4 + [P("heads") if way == "by hand" else P()]

    def attend(*x):
        return one(*x, implementation=implementation)

    if way == "by hand":
        def local(ids, *x):
            return attention(*x, segment_ids=ids, implementation=implementation)

        in_specs = (P("data"), by_head, by_head, by_head, P("heads"))
        attend_locally = jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=by_head)

        def attend(*x):
            return attend_locally(ids, *x)

    if way == "mapped":
        def attend(query, key, value, slopes):
            def entry(*x):
                return attention(*x[:3], slopes, segment_ids=x[3], implementation=implementation)

            return jax.vmap(entry)(query, key, value, jax.sharding.reshard(ids, P("data")))

    if way == "mapped by hand":
        def entry(query, key, value, ids, slopes):
            return attention(query, key, value, slopes, segment_ids=ids, implementation=implementation)

        in_specs = (P(None, "heads"), P(None, "heads"), P(None, "heads"), P(), P("heads"))
        entry = jax.shard_map(entry, mesh=mesh, in_specs=in_specs, out_specs=P(None, "heads"))

        def attend(query, key, value, slopes):
            by_entry = jnp.broadcast_to(slopes, (BATCH, HEADS))  # JAX cannot add up their gradients over "data" itself
            return jax.vmap(entry, spmd_axis_name="data")(query, key, value, ids, by_entry)

    with contextlib.nullcontext() if way == "unset" else jax.set_mesh(mesh):
        placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs)]
        options = None if implementation is None else QUICKLY  # a kernel takes long to compile, and is interpreted
        compiled = jax.jit(lambda *x: gradients(attend, x), compiler_options=options).lower(*placed).compile()
        found = compiled(*placed)
        text = compiled.as_text()
    pairs = [(np.asarray(a), np.asarray(b)) for a, b in zip(found, expected)]
    errors = [float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs]
    moved = re.findall(r"= \\w+\\[([\\d,]*)\\]\\S* (?:all-gather|all-to-all|collective-permute)\\(", text)
    return {
        "errors": errors,
        "devices": [len(x.sharding.device_set) for x in found],
        "shards": [list(x.addressable_shards[0].data.shape) for x in found],
        "moved": [int(np.prod([int(n) for n in shape.split(",") if n])) for shape in moved],
    }


expected = jax.jit(lambda *x: gradients(lambda *x: one(*x, implementation="dense"), x))(*arrays)
for way, name in WAYS:
    print(json.dumps([way, name, described(way, IMPLEMENTATIONS[name])]), flush=True)
"""


WAYS = (
    ("automatic", "default"),
    ("explicit", "default"),
    ("explicit", "tpu"),
    ("unset", "default"),  # explicit, and no mesh is set
    *([] if jax.__version_info__ < (0, 9) else [("mapped", "default")]),  # which JAX refuses before
    ("mapped by hand", "default"),
    ("by hand", "default"),
    ("by hand", "tpu"),
)


@pytest.mark.slow
def test_eight_devices_give_the_answer_of_one() -> None:
    # All ways in one process: half of what it takes is to start one, and to compute what is expected.
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    command = [sys.executable, "-W", "error", "-c", f"WAYS = {WAYS}\n{PROGRAM}"]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    lines = [json.loads(line) for line in run.stdout.splitlines()]
    done = tuple((way, implementation) for way, implementation, _ in lines)
    assert (run.returncode, done) == (0, WAYS), run.stderr[-3000:]
    for *which, found in lines:
        # Float32, of gradients summed over 300 keys in another order.
        assert max(found["errors"]) < 300 * 2.0**-24, which
        assert found["devices"] == [8] * 4, which
        assert found["shards"][:3] == [[1, 300, 2, 16], [1, 300, 1, 16], [1, 300, 1, 16]], which
        # Gradients of slopes that all devices have. Under jax.vmap the compiler divides the mapped axis as it sees fit.
        assert which[0] == "mapped" or all(elements <= 8 for elements in found["moved"]), (which, found["moved"])
