"""Compile for a TPU that is not there, in a process of its own, and say what the compiled program takes.

What the compiler is told through the environment it is told before JAX is imported, and what it writes down about
kernels is to be about these alone: therefore the process.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from dataclasses import astuple, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.harness import run_alone
from benchmarks.research.tpu_static import subjects
from benchmarks.research.tpu_static.bundles import Kernel, read
from benchmarks.tpu import devices_of, pretend

# The topologies that are compiled for, and what libtpu calls a machine that has them.
TOPOLOGIES = {"v5e:2x2": "v5litepod-4", "v5p:2x2x1": "v5p-8", "v6e:2x2": "v6e-4"}
_TOTAL = re.compile(r"total scheduled bundles:\s+(\d+)")
_ENDINGS = {"total": "schedule-analysis_final_bundles.txt", "text": "final_bundles.txt"}
_KERNEL = re.compile(r'%([\w.-]+) = [^\n]*custom_call_target="tpu_custom_call"')


@dataclass(frozen=True)
class Program:
    """What is compiled: attention of that name, as of ``subjects``, for a topology."""

    topology: str
    name: str
    length: int
    head_dim: int
    gradient: bool
    options: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Compiled:
    """What the compiler says of a program."""

    temporaries: int | None  # the memory it takes beside arguments and results, in bytes; None if it does not compile
    kernels: tuple[Kernel, ...] = ()  # Pallas kernels whose schedule could be read, in the order of their compilation
    problem: str = ""  # why it does not compile, or a kernel's schedule could not be read


@cache
def compiled(program: Program) -> Compiled:
    """Return what the compiler says of a program."""
    try:
        found = run_alone("benchmarks.research.tpu_static.compile:_prepare", *astuple(program))["found"]
    except RuntimeError as error:
        return Compiled(None, problem=reason(str(error)))
    kernels, problem = [], "" if found["kernels"] else "there is no Pallas kernel in the program"
    for name, dumped in found["kernels"].items():
        try:
            if dumped.keys() != _ENDINGS.keys():
                raise ValueError(f"the compiler must write down a schedule, got none for {name}")
            kernels.append(read(re.sub(r"\.\d+$", "", name), **dumped))
        except ValueError as error:
            problem = str(error)
    return Compiled(found["temporaries"], tuple(kernels), problem)


def reason(text: str) -> str:
    """Return the line of a traceback that says what went wrong."""
    lines = re.findall(r"^[\w.]+(?:Error|Exception)\b.*(?:\n[^-\n].*)?", text, re.M)
    return " ".join((lines[-1] if lines else text).split())[:250]


def _prepare(topology: str, *arguments: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """Return the call that compiles, and what there is to say of its result, as JSON can carry it."""
    dumps = tempfile.TemporaryDirectory(prefix="tpu-static-")
    pretend(TOPOLOGIES[topology], f"--xla_jf_dump_to={dumps.name} --xla_jf_dump_llo_text=true")
    import jax
    from jax.sharding import SingleDeviceSharding

    function, shapes = subjects.attention(*arguments)
    one = SingleDeviceSharding(devices_of(topology)[0])
    described = [jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=one) for each in shapes]

    def examine(compiled: Any) -> dict[str, Any]:
        with dumps:  # deleted afterwards: they are large
            kernels = {name: _dumped(Path(dumps.name), name) for name in _KERNEL.findall(compiled.as_text())}
            return {"temporaries": compiled.memory_analysis().temp_size_in_bytes, "kernels": kernels}

    return lambda: jax.jit(function).lower(*described).compile(), examine


def _dumped(folder: Path, name: str) -> dict[str, Any]:
    """Return what was written down about a kernel; less if something is missing."""
    texts = {}
    for key, ending in _ENDINGS.items():
        pattern = rf"\d+-{re.escape(name)}-\d+-{re.escape(ending)}"
        for path in (path for path in folder.iterdir() if re.fullmatch(pattern, path.name)):
            texts[key] = path.read_text(encoding="utf-8", errors="replace")
    # Of the analysis the head is enough: further down it holds the whole kernel in base64.
    total = _TOTAL.search(texts.pop("total", "")[:400])
    return texts | {"total": int(total[1])} if total else texts
