"""Attention compiled by the TPU's own compiler for chips that are described: no TPU is needed, libtpu is.

    python -m tests.jax.test_tpu_compile v5e:2x2        prints a line of JSON for each program

The compiler runs in a process of its own: libtpu reads the environment when JAX is imported. It refuses kernels that
need more VMEM than the chip has.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
from typing import Any

import pytest

MISSING = [name for name in ("jax", "flax", "libtpu") if importlib.util.find_spec(name) is None]
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(MISSING), reason=f"{', '.join(MISSING)} not installed")]

TOPOLOGIES = {"v5e:2x2": "v5litepod-4", "v5p:2x2x1": "v5p-8", "v6e:2x2": "v6e-4"}  # and the machines that have them
BYTES = {"bfloat16": 2, "float32": 4}
DTYPES = {"future_slopes": "float32", "slopes": "float32", "segment_ids": "int32", "mask": "bool", "q_offset": "int32"}
# By name: batch, query heads, key/value heads, q_len, kv_len, head_dim; dtype; arguments, lists are shapes of arrays.
PROGRAMS: dict[str, tuple[tuple[int, ...], str, dict[str, Any]]] = {
    "long": ((1, 4, 4, 32768, 32768, 64), "bfloat16", {}),
    "twice as long": ((1, 4, 4, 65536, 65536, 64), "bfloat16", {}),
    "symmetric, odd": ((1, 2, 2, 1000, 1000, 80), "float32", {"is_causal": False}),
    "window": (
        (2, 2, 2, 2048, 2048, 128),
        "bfloat16",
        {"is_causal": False, "future_slopes": [2], "window_size": 700},
    ),
    "packed": ((2, 6, 2, 2048, 2048, 96), "bfloat16", {"segment_ids": [2, 2048], "slopes": [2, 6]}),
    "masked": ((2, 2, 1, 1000, 1500, 256), "float32", {"mask": [2, 1, 1, 1500], "q_offset": [2]}),
    "decoding": ((2, 8, 2, 1, 4096, 128), "bfloat16", {"q_offset": []}),
    "divided": ((4, 8, 4, 2048, 2048, 64), "bfloat16", {}),  # batch and heads, among four chips
    "stated": ((4, 8, 4, 2048, 2048, 64), "bfloat16", {}),  # the same, divided by XLA
    # Its tokens, among four chips; with keys so few that other work hides a transfer, no kernel needs to.
    "one sequence": ((1, 8, 8, 32768, 32768, 128), "bfloat16", {}),
}
# Steps of decoding: batch, query heads, key/value heads, head_dim; capacity that is asked for; whether rows differ.
STEPS: dict[str, tuple[tuple[int, int, int, int], int, bool]] = {
    "step, 4096": ((1, 32, 8, 128), 4096, False),
    "step, 5000": ((1, 32, 8, 128), 5000, False),
    "step, 8199": ((1, 32, 8, 128), 8199, False),
    "step, rows": ((4, 32, 8, 128), 5000, True),
    "step, heads of 64": ((1, 8, 8, 64), 5000, False),
    "step, one key head": ((2, 71, 1, 64), 32768, False),
}
# Bytes, of caches of up to 164 MB, that XLA's part of a step may read and write; more where a chip has two cores.
MOVED = dict.fromkeys(TOPOLOGIES, 3e6) | {"v5p:2x2x1": 3.2e6}
COLLECTIVES = "all-gather|all-to-all|collective-permute|all-reduce|reduce-scatter|collective-broadcast"
KERNELS = {"alibi_forward", "alibi_backward_of_keys", "alibi_backward_of_queries"}
PLAN = 2**20  # bytes that plans and loops take at any length here
ON_CHIP = 128 * 2**20  # bytes: the largest of a core's own memories, which temporaries do not count
DIVIDED = ("divided", "stated")
UNPRINTABLE = {"masked"}  # libtpu 0.0.51 compiles its gradients on v5p and v6e, but cannot print the program


# --- In the process ---------------------------------------------------------------------------------------------------


def lowered(name: str, devices: Any) -> Any:
    """Return the lowered program of attention with its gradients."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    import alibi_jax
    from tests.support.divided import attention_of_whole

    (batch, num_heads, num_kv_heads, q_len, kv_len, head_dim), dtype, arguments = PROGRAMS[name]
    is_divided, is_sequence = name in DIVIDED, name == "one sequence"
    chips = np.asarray(devices[: 4 if is_divided or is_sequence else 1]).reshape(-1, 1 + is_divided)
    mesh = jax.sharding.Mesh(chips, ("tokens" if is_sequence else "data", "heads"))
    heads = {"query": (q_len, num_heads), "key": (kv_len, num_kv_heads), "value": (kv_len, num_kv_heads)}
    shapes = {name: [batch, *sizes, head_dim] for name, sizes in heads.items()} | {"slopes": [num_heads]}
    shapes |= {name: x for name, x in arguments.items() if isinstance(x, list)}
    rest = {name: x for name, x in arguments.items() if not isinstance(x, list)}
    specs = {name: PartitionSpec() for name in shapes}
    if is_divided:
        specs = dict.fromkeys(heads, PartitionSpec("data", None, "heads")) | {"slopes": PartitionSpec("heads")}
    if is_sequence:
        specs |= dict.fromkeys(heads, PartitionSpec(None, "tokens"))
    inputs = {
        name: jax.ShapeDtypeStruct(x, DTYPES.get(name, dtype), sharding=NamedSharding(mesh, specs[name]))
        for name, x in shapes.items()
    }

    def attend(inputs: dict[str, Any]) -> Any:
        if is_sequence:
            return attention_of_whole(mesh, **inputs)
        stated = alibi_jax.TPU(sharding=NamedSharding(mesh, specs["query"])) if name == "stated" else None
        return alibi_jax.attention(**inputs, **rest, implementation=stated)

    if name == "divided":
        attend = jax.shard_map(attend, mesh=mesh, in_specs=(specs,), out_specs=specs["query"])

    def gradients(inputs: dict[str, Any]) -> Any:
        real = {name: x for name, x in inputs.items() if jnp.issubdtype(x.dtype, jnp.floating)}
        return jax.grad(lambda real: jnp.sum(attend(inputs | real).astype(jnp.float32) ** 2))(real)

    return jax.jit(gradients).lower(inputs)


def step(name: str, devices: Any) -> Any:
    """Return the lowered program of one step of decoding with a cache that it owns."""
    import jax
    import jax.numpy as jnp

    from alibi_jax import KVCache

    (batch, num_heads, num_kv_heads, head_dim), length, rows = STEPS[name]
    placed = jax.sharding.SingleDeviceSharding(devices[0])

    def array(shape: tuple[int, ...], dtype: Any = jnp.bfloat16) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=placed)

    def empty() -> KVCache:
        cache = KVCache(batch, num_kv_heads, length, head_dim, dtype=jnp.bfloat16)
        return cache.truncate(jnp.zeros(batch, jnp.int32)) if rows else cache

    cache = jax.tree.map(lambda x: array(x.shape, x.dtype), jax.eval_shape(empty))

    def attend(cache: Any, query: Any, key: Any, value: Any) -> Any:
        cache = cache.append(key, value)
        return cache.attend(query), cache

    new = array((batch, 1, num_kv_heads, head_dim))
    return jax.jit(attend, donate_argnums=0).lower(cache, array((batch, 1, num_heads, head_dim)), new, new)


def main(topology: str) -> None:
    """Make libtpu take this machine for one with TPUs, before JAX is imported, and describe each program."""
    os.environ.update(
        ALLOW_MULTIPLE_LIBTPU_LOAD="1",  # no TPU is there for two processes to compete for
        JAX_ENABLE_COMPILATION_CACHE="false",
        JAX_PLATFORMS="cpu",
        TPU_ACCELERATOR_TYPE=TOPOLOGIES[topology],
        TPU_SKIP_MDS_QUERY="1",
        TPU_WORKER_HOSTNAMES="localhost",
    )
    from jax.experimental import topologies

    devices = topologies.get_topology_desc(topology, "tpu").devices
    for name in (*PROGRAMS, *STEPS):
        found: dict[str, Any] = {"name": name}
        try:
            compiled = (step if name in STEPS else lowered)(name, devices).compile()
            found["accessed"] = compiled.cost_analysis()["bytes accessed"]
            found["temporaries"] = compiled.memory_analysis().temp_size_in_bytes
        except Exception as error:  # the test says which program it was
            found["error"] = f"{type(error).__name__}: {error}"[-2000:]
        else:
            with contextlib.suppress(RuntimeError):
                found |= described(compiled.as_text())
        print(json.dumps(found), flush=True)


def described(text: str) -> dict[str, Any]:
    """Return what a program in HLO does: its largest array, its kernels, and the elements that a device sends."""
    arrays = re.findall(r"\b(pred|[a-z]+(\d+))\[([\d,]+)\]", text)
    # In bytes; the compiler may move an array as int8.
    sizes = (math.prod(map(int, axes.split(","))) * int(bits or 8) // 8 for _, bits, axes in arrays)
    sent = re.findall(rf"= [^=\n]*?\b[a-z]+\d+\[([\d,]*)\][^=\n]*? ({COLLECTIVES})(?:-start)?\(", text)
    return {
        "largest": max(sizes, default=0),
        "kernels": sorted(set(re.findall(r"alibi_(?:forward|backward_of_\w+?)\b", text))),
        "declared": sum(map(int, re.findall(r'cost_estimate":.*?"bytes_accessed":"(\d+)"', text))),
        "blocks": [[int(n) for n in x.split(",")] for x in re.findall(r"%alibi_forward\S* = \w+\[([\d,]+)\]", text)],
        "exposed": exposed(text),
        "sent": [(kind, math.prod(int(n) for n in axes.split(",") if n)) for axes, kind in sent],
    }


def exposed(text: str) -> list[str]:
    """Return the transfers during which no kernel runs, in computations that have kernels, by the schedule."""
    found = []
    for computation in re.split(r"\n(?=\S)", text):
        under_way: dict[str, bool] = {}  # by name: whether a kernel has begun since
        order = (
            r"(%\S+) = .*? (collective-permute-(?:start|done)|custom-call)\((?:.*?(%collective-permute-start[.\d]*))?"
        )
        for name, kind, started in re.findall(order, computation if "%alibi_" in computation else ""):
            if kind.endswith("start"):
                under_way[name] = False
            elif kind.endswith("done") and not under_way[started]:
                found.append(started)
            elif "alibi_" in name:
                under_way = dict.fromkeys(under_way, True)
    return found


# --- The test ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_kernels_compile_with_temporaries_that_are_linear_in_the_length(topology: str) -> None:
    command = [sys.executable, "-m", "tests.jax.test_tpu_compile", topology]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    found = {line["name"]: line for line in map(json.loads, run.stdout.splitlines())}
    assert set(found) == {*PROGRAMS, *STEPS}
    for name, line in found.items():
        assert "error" not in line, (name, line)
        if name in STEPS:
            (batch, num_heads, num_kv_heads, head_dim), length, _ = STEPS[name]
            cache = 2 * batch * num_kv_heads * (length + 127) * head_dim * BYTES["bfloat16"]
            assert line["accessed"] - line["declared"] <= MOVED[topology], (name, line)
            assert line["declared"] <= cache + MOVED[topology]  # the kernel reads keys and values once
            # A block has the heads that share a key head, in whole tiles of 16 rows.
            rows = math.ceil(num_heads // num_kv_heads / 16) * 16
            assert line["blocks"] == [[batch * num_kv_heads, rows, head_dim]]
            continue
        if name == "one sequence" and "kernels" not in line:
            assert topology == "v5p:2x2x1", name  # libtpu 0.0.51 cannot print it
            continue
        if name == "one sequence":
            # Keys are passed on; largest norms, the mean of keys and numbers of hops are reduced.
            assert {kind for kind, _ in line["sent"]} == {"collective-permute", "all-reduce"}
            assert all(elements <= 8 * 128 for kind, elements in line["sent"] if kind == "all-reduce")
            assert line["kernels"]
            assert not line["exposed"]  # keys and gradients are under way while a kernel runs
            continue
        (batch, num_heads, _, q_len, kv_len, head_dim), dtype, _ = PROGRAMS[name]
        # A tensor as it lies in memory: whole blocks of tokens, and 128 lanes, which heads of 64 fill by half.
        elements = batch * num_heads // (4 if name in DIVIDED else 1) * (max(q_len, kv_len) + 511)
        elements *= math.ceil(head_dim / 128) * 128
        # Some copies of tensors; the scores of one head alone would be 128 tensors of a long row.
        assert line["temporaries"] <= 24 * elements * BYTES[dtype] + PLAN, name
        if name == "twice as long":
            # Query, key, value and cotangent, and the result in float32, whose place gradients take.
            assert line["temporaries"] <= elements * (4 * BYTES[dtype] + BYTES["float32"]) + PLAN
        if name in UNPRINTABLE and "kernels" not in line:
            continue
        assert set(line["kernels"]) == KERNELS, name
        assert line["largest"] <= 4 * elements, name  # no array has the bytes of the float32 scores of one head
        # Slopes' gradients are summed over the batch, and chips agree on how far loops go: a few numbers.
        assert all(kind == "all-reduce" and elements <= 64 for kind, elements in line["sent"]), name
        assert name in DIVIDED or not line["sent"], name
    longer = found["twice as long"]["temporaries"]
    assert longer <= 2.2 * (found["long"]["temporaries"] + ON_CHIP)


if __name__ == "__main__":
    main(*sys.argv[1:])
