"""Attention compiled by the TPU's own compiler, for chips that are described: no TPU is needed, libtpu is."""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("jax")
pytest.importorskip("flax")

from tests.support.tpu_programs import DIVIDED, FIRST, SINGLE, TOPOLOGIES, TYPE_BYTES, names_of

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed"),
]

GRADIENT = ", gradient"
FORWARD_KERNELS = ["alibi_forward"]
ALL_KERNELS = ["alibi_backward_of_keys", "alibi_backward_of_queries", "alibi_forward"]
# Heads of 64 fill half the lanes of a register, so that they take twice the memory; and what is transposed is copied.
COPIES = 24
PLAN = 2**20  # bytes, that plans and loops take at any length here
# What libtpu 0.0.51 compiles but cannot print.
UNREADABLE = [(name, f"key mask, offsets, float32{GRADIENT}") for name in ("v5p:2x2x1", "v6e:2x2")]
ON_CHIP = 128 * 2**20  # bytes: the largest of a core's own memories


def programs(topology: str, kind: str) -> dict[str, dict[str, Any]]:
    """Return what became of all programs, by name; that they compile is part of it."""
    command = [sys.executable, "-m", "tests.support.tpu_programs", topology, kind]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    found = {line["name"]: line for line in map(json.loads, run.stdout.splitlines())}
    failed = {name: line["error"] for name, line in found.items() if "error" in line}
    assert not failed
    return found


def elements_of(sizes: tuple[int, ...], chips: int) -> int:
    """Return how many elements a tensor has, heads first, as it is padded in memory."""
    batch, num_heads, _, q_len, kv_len, head_dim = sizes
    longest = max(q_len, kv_len) + 511  # whole blocks
    return batch * num_heads // chips * longest * math.ceil(head_dim / 128) * 128


def assert_lean(found: dict[str, Any], sizes: tuple[int, ...], dtype: str, chips: int) -> None:
    """Assert that no array, and not all temporaries together, are of the size of the scores of one head."""
    tensor = elements_of(sizes, chips)
    assert found["temporaries"] <= COPIES * tensor * TYPE_BYTES[dtype] + PLAN
    if "unreadable" in found:
        return
    elements, shape = found["largest"]
    # All heads of a tensor, or scores of a tile; those of one head, let alone of all, are more.
    assert elements <= tensor, shape


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_the_kernel_compiles(topology: str) -> None:
    found = programs(topology, "single")
    assert {name.removesuffix(GRADIENT) for name in found} == set(names_of(topology))
    for name, line in found.items():
        sizes, dtype, _ = SINGLE[name.removesuffix(GRADIENT)]
        is_gradient = name.endswith(GRADIENT)
        assert_lean(line, sizes, dtype, 1)
        if "unreadable" in line:
            assert (topology, name) in UNREADABLE
            continue
        assert (line["names"], line["kernels"]) == ((ALL_KERNELS, 3) if is_gradient else (FORWARD_KERNELS, 1)), name
        assert line["collectives"] == [], name
    longer = found[f"causal, twice as long{GRADIENT}"]["temporaries"]
    if topology == FIRST:
        # Some of it, more of shorter rows, is in a core's own memory, and does not count.
        assert longer <= 2.2 * (found[f"causal, long{GRADIENT}"]["temporaries"] + ON_CHIP)
    # Queries, keys, values and cotangents, and the result in float32, whose place the gradient of queries takes; those
    # of keys and values take these two's places.
    sizes, dtype, _ = SINGLE["causal, twice as long"]
    assert longer <= elements_of(sizes, 1) * (4 * TYPE_BYTES[dtype] + TYPE_BYTES["float32"]) + PLAN


# Each generation takes the kernels; how axes are divided among chips is the same for all.
@pytest.mark.parametrize("topology", list(TOPOLOGIES)[:1])
def test_batch_and_heads_are_divided(topology: str) -> None:
    found = programs(topology, "divided")
    assert len(found) == 4 * len(DIVIDED)
    for name, line in found.items():
        sizes, dtype, _ = DIVIDED[name.split(" by ")[0].removesuffix(",")]
        is_gradient = name.endswith(GRADIENT)
        if "by hand" in name:
            assert line["names"] == (ALL_KERNELS if is_gradient else FORWARD_KERNELS), name
        else:  # a kernel cannot be divided by the compiler: plain operations, which can
            assert line["kernels"] == 0, name
        # Gradients of slopes are summed over the batch, and how far loops go is agreed on: a few numbers.
        assert all(x["kind"] == "all-reduce" and x["elements"] <= 64 for x in line["collectives"]), line["collectives"]
        if "by hand" in name and not is_gradient:
            assert line["collectives"] == [], name
        # What one chip holds.
        assert_lean(line, sizes, dtype, 4)
