"""Compile for a TPU that is not there, in a process of its own, and say what the compiled program takes.

The compiler is that of libtpu, which needs no TPU. What it is told through the environment it is told before JAX is
imported, and what it writes down about kernels is to be about these alone: therefore the process.

    found = compile_for("v5e:2x2", "module:build", 64)          build(64) returns a function, and shapes and dtypes
"""

from __future__ import annotations

import importlib
import os
import re
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import run_alone
from benchmarks.research.tpu_static import bundles as _tpu_bundles
from benchmarks.research.tpu_static.bundles import Kernel

# The topologies that are compiled for, and what libtpu calls a machine that has them.
TOPOLOGIES = {"v5e:2x2": "v5litepod-4", "v5p:2x2x1": "v5p-8", "v6e:2x2": "v6e-4"}
_TOTAL = re.compile(r"total scheduled bundles:\s+(\d+)")
_ENDINGS = {
    "total": r"schedule-analysis_final_bundles\.txt",
    "bundles": r"final_bundles\.txt",
    "utilization": r"final_hlo-static-per-bundle-utilization\.txt",
}
_KERNEL = re.compile(r'%([\w.-]+) = [^\n]*custom_call_target="tpu_custom_call"')


@dataclass(frozen=True)
class Compiled:
    """What the compiler says of a program.

    Attributes:
        temporaries: The memory it takes beside arguments and results, in bytes.
        kernels: Its Pallas kernels, in the order of their compilation; those whose schedule could be read.
        problem: Why a kernel's schedule could not be read; empty if all could.
    """

    temporaries: int
    kernels: tuple[Kernel, ...]
    problem: str = ""


def compile_for(topology: str, build: str, *arguments: Any) -> Compiled:
    """Compile what ``build`` returns and read what the compiler wrote down.

    Args:
        topology: One of ``TOPOLOGIES``.
        build: ``module:name`` of a function that returns the function to compile and, in a sequence, arguments that
            have a shape and a dtype.
        *arguments: Those of ``build``, as JSON can carry them.

    Raises:
        RuntimeError: It does not compile. The message ends with the compiler's.
    """
    found = run_alone("benchmarks.research.tpu_static.compile:_prepare", topology, build, *arguments)["found"]
    kernels, problem = [], "" if found["kernels"] else "there is no Pallas kernel in the program"
    for name, dumped in found["kernels"].items():
        try:
            kernels.append(_read(name, **dumped))
        except ValueError as error:
            problem = str(error)
    return Compiled(found["temporaries"], tuple(kernels), problem)


def _read(name: str, *, total: int | None = None, bundles: str = "", utilization: str | None = None) -> Kernel:
    if total is None:
        raise ValueError(f"the compiler must write down a schedule, got none for {name}")
    return _tpu_bundles.read(re.sub(r"\.\d+$", "", name), total, bundles, utilization)


def _prepare(topology: str, build: str, *arguments: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """Return the call that compiles, and what there is to say of its result, as JSON can carry it."""
    if "jax" in sys.modules:
        raise RuntimeError("jax must not be imported before the environment is set")
    dumps = tempfile.TemporaryDirectory(prefix="tpu-static-")
    os.environ.update(
        ALLOW_MULTIPLE_LIBTPU_LOAD="1",  # there is no TPU that two processes could want at once
        JAX_ENABLE_COMPILATION_CACHE="false",  # what is not compiled is not written down
        JAX_PLATFORMS="cpu",
        LIBTPU_INIT_ARGS=f"--xla_jf_dump_to={dumps.name} --xla_jf_dump_llo_text=true",
        TPU_ACCELERATOR_TYPE=TOPOLOGIES[topology],
        TPU_SKIP_MDS_QUERY="1",
        TPU_WORKER_HOSTNAMES="localhost",
    )
    import jax
    from jax.experimental import topologies
    from jax.sharding import SingleDeviceSharding

    module, name = build.split(":")
    function, shapes = getattr(importlib.import_module(module), name)(*arguments)
    one = SingleDeviceSharding(topologies.get_topology_desc(topology, "tpu").devices[0])
    described = [jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=one) for each in shapes]

    def examine(compiled: Any) -> dict[str, Any]:
        with dumps:  # deleted afterwards: they are large
            kernels = {name: _dumped(Path(dumps.name), name) for name in _KERNEL.findall(compiled.as_text())}
            return {"temporaries": compiled.memory_analysis().temp_size_in_bytes, "kernels": kernels}

    return lambda: jax.jit(function).lower(*described).compile(), examine


def _dumped(folder: Path, name: str) -> dict[str, Any]:
    """Return what was written down about a kernel; nothing if something is missing."""
    texts = {}
    for key, ending in _ENDINGS.items():
        paths = [path for path in folder.iterdir() if re.fullmatch(rf"\d+-{re.escape(name)}-\d+-{ending}", path.name)]
        if len(paths) == 1:
            texts[key] = paths[0].read_text(encoding="utf-8", errors="replace")
    # Of the analysis the head is enough: further down it holds the whole kernel in base64.
    total = _TOTAL.search(texts.pop("total", "")[:400])
    return texts | {"total": int(total[1])} if total else texts
