"""A TPU that is not there, as libtpu's compiler describes it, and the collective operations of a compiled program."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Iterator
from typing import Any

KINDS = ("all-gather", "all-to-all", "collective-permute", "all-reduce", "reduce-scatter", "collective-broadcast")
ITEM_BYTES = {"bf16": 2, "f16": 2, "f32": 4, "s32": 4, "u32": 4}
FALLBACK = "alibi_fallback"  # in the name of operations that run only where data break the bound that was given
_SHAPE = re.compile(r"\b([a-z]+\d+)\[([\d,]*)\]")
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")


def pretend(accelerator: str) -> None:
    """Make libtpu take this machine for one with TPUs, before JAX is imported."""
    if "jax" in sys.modules:
        raise RuntimeError("jax must not be imported before the environment is set")
    os.environ.update(
        ALLOW_MULTIPLE_LIBTPU_LOAD="1",  # no TPU is there for two processes to compete for
        JAX_ENABLE_COMPILATION_CACHE="false",
        JAX_PLATFORMS="cpu",
        TPU_ACCELERATOR_TYPE=accelerator,
        TPU_SKIP_MDS_QUERY="1",
        TPU_WORKER_HOSTNAMES="localhost",
    )


def devices_of(topology: str) -> Any:
    """Return the devices of a topology."""
    from jax.experimental import topologies

    return topologies.get_topology_desc(topology, "tpu").devices


def collectives(text: str) -> Iterator[dict[str, Any]]:
    """Yield the collective operations of a program in HLO.

    Each with its kind, how many elements one device gives, the bytes that all devices send together (of a
    collective-permute; 0 of others), and whether it runs only where data break a bound.
    """
    for kind in KINDS:
        for match in re.finditer(rf"= ([^=\n]*?) {kind}(?:-start)?\((.*)", text):
            # An asynchronous one lists the operand in its result too, which is as large as what is sent.
            dtype, sizes = _SHAPE.findall(match[1])[0]
            elements = math.prod(int(n) for n in sizes.split(",") if n)
            pairs = _PAIRS.search(match[2])
            senders = pairs[1].count("{") if pairs else 0
            yield {
                "kind": kind,
                "elements": elements,
                "bytes": elements * ITEM_BYTES[dtype] * senders,
                "is_fallback": FALLBACK in match[2],
            }
