"""A TPU that is not there, as the compiler of libtpu knows it, which needs none."""

from __future__ import annotations

import os
import sys
from typing import Any


def pretend(accelerator: str, flags: str = "") -> None:
    """Have libtpu take this process's machine for one with such TPUs: before JAX is imported."""
    if "jax" in sys.modules:
        raise RuntimeError("jax must not be imported before the environment is set")
    os.environ.update(
        ALLOW_MULTIPLE_LIBTPU_LOAD="1",  # there is no TPU that two processes could want at once
        JAX_ENABLE_COMPILATION_CACHE="false",  # what is not compiled is not written down
        JAX_PLATFORMS="cpu",
        LIBTPU_INIT_ARGS=flags,
        TPU_ACCELERATOR_TYPE=accelerator,
        TPU_SKIP_MDS_QUERY="1",
        TPU_WORKER_HOSTNAMES="localhost",
    )


def devices_of(topology: str) -> Any:
    """Return the devices of a topology."""
    from jax.experimental import topologies

    return topologies.get_topology_desc(topology, "tpu").devices
