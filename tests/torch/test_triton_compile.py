"""The kernels in Triton, compiled for GPUs that are described: none is needed.

python -m tests.torch.test_triton_compile ARCH DTYPE HEAD_DIM [FORM]     a line of JSON for each kernel of a call
"""

from __future__ import annotations

import collections
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

TARGETS = {
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "gfx942": ("hip", "gfx942", 64),
}
TYPES = {
    "bool": "i1",
    "uint8": "u8",
    "int32": "i32",
    "int64": "i64",
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
}


FORMS = ("causal", "symmetric", "window", "hidden", "two slopes")


def forms() -> dict[str, dict[str, Any]]:
    """Return arguments of calls, by name; together they reach each branch of the kernels."""
    import torch

    ids, mask = torch.arange(4096) // 999, torch.ones(2, 1, 1, 4096, dtype=torch.bool)
    rates = torch.rand(2, 8)
    return {
        "causal": {},
        "symmetric": {"is_causal": False},
        "window": {"window_size": 300, "q_offset": torch.zeros(2, dtype=torch.int32)},
        "hidden": {"segment_ids": ids, "mask": mask, "window_size": 300},
        "two slopes": {"slopes": rates, "future_slopes": rates, "is_causal": False, "window_size": 300, "mask": mask},
    }


def tool(name: str, *arguments: str) -> str:
    import triton

    path = Path(triton.__file__).parent / "backends/nvidia/bin" / name
    return subprocess.run([path, *arguments], capture_output=True, text=True, check=True).stdout


def loops(sass: str) -> list[collections.Counter[str]]:
    """Return the instructions of each loop of a program that holds products of tensor cores."""
    code = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\d+ )?(\S+)(.*?);", sass)
    places = {int(at, 16): index for index, (at, *_) in enumerate(code)}
    found = []
    for index, (_, name, rest) in enumerate(code):
        end = re.search(r"(0x[0-9a-f]+)", rest) if name.startswith("BRA") else None
        start = places.get(int(end[1], 16), index) if end else index
        body = collections.Counter(x.split(".")[0] for _, x, _ in code[start : index + 1])
        if start < index and (body["HGMMA"] or body["HMMA"]):
            found.append(body)
    return found


def report(made: Any, arch: str) -> dict[str, Any]:
    found = {"kernel": made.metadata.name, "shared": made.metadata.shared, "warps": made.metadata.num_warps}
    if arch.startswith("gfx"):
        text = made.asm["amdgcn"]
        for name in ("vgpr_spill_count", "sgpr_spill_count"):
            found[name] = int(re.search(rf"\.{name}:\s+(\d+)", text)[1])
        return found
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        usage = re.search(r"REG:(\d+) STACK:(\d+)", tool("cuobjdump", "-res-usage", file.name))
        found |= {"registers": int(usage[1]), "stack": int(usage[2])}
        found["loops"] = [sum(x.values()) for x in loops(tool("cuobjdump", "-sass", file.name))]
    return found


def main(arch: str, dtype: str, head_dim: str, form: str = "causal") -> None:
    import array_api_compat.torch as xp
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    from alibi_core.backend import AttentionCall
    from alibi_core.backend.horizon import KeyNorms

    described = {"get_current_target": GPUTarget(*TARGETS[arch]), "get_current_device": 0, "get_current_stream": 0}
    driver.set_active(SimpleNamespace(**{name: lambda *_, x=x: x for name, x in described.items()}))
    from triton.runtime import jit

    from alibi_torch._triton import launch, operator

    run = jit.JITFunction.run

    def compile_it(self: Any, *arguments: Any, warmup: bool, **options: Any) -> None:
        """Compile in place of a launch."""
        print(json.dumps({"form": form} | report(run(self, *arguments, warmup=True, **options), arch)), flush=True)

    jit.JITFunction.run = compile_it
    launch.machine = lambda _: {"sm_80": "other", "gfx942": "amd"}.get(arch, "hopper")
    query, key = (torch.empty(2, heads, 4096, int(head_dim), dtype=getattr(torch, dtype)) for heads in (8, 2))
    arguments = forms()[form]
    call = AttentionCall.check(query, key, key, xp=xp, **arguments)
    if form == "symmetric":
        call = replace(call, added_key_bias=torch.zeros(8, 4096))
    operator.forward(call, query, key, key, None, False)
    result, stats, planned = operator.forward(call, query, key, key, None, True)
    operator.backward(call, (result, query, key, key, result, stats), None, planned, form != "causal")
    if form in ("causal", "symmetric", "window"):
        last = query[:, :, -1:]
        rules = {name: x for name, x in arguments.items() if form == "window"}
        step = AttentionCall.check(last, key, key, xp=xp, **rules)
        operator.forward(step, last, key, key, KeyNorms(torch.empty(2, 2, 32), 128), False)


# Bytes that a block of threads may have; "other" GPUs, tried as sm_80, include some with less than that one.
SHARED = {"sm_80": 101_376, "sm_90": 232_448, "sm_100": 232_448, "gfx942": 65_536}
NO_SPILLS = ("attend", "split", "join")  # the hottest
LONGEST_LOOP = 640  # instructions for whole blocks of 128 queries and 128 keys on an H100
CALLS = [("sm_90", "bfloat16", 128, form) for form in FORMS]
CALLS += [
    ("sm_90", "bfloat16", 256, "causal"),
    ("sm_90", "float16", 64, "two slopes"),
    ("sm_90", "float32", 64, "causal"),
]
CALLS += [(arch, "bfloat16", 128, form) for arch in ("sm_80", "sm_100", "gfx942") for form in ("causal", "symmetric")]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize(("arch", "dtype", "head_dim", "form"), CALLS)
def test_kernels_compile_and_fit(arch: str, dtype: str, head_dim: int, form: str) -> None:
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "tests.torch.test_triton_compile",
        arch,
        dtype,
        str(head_dim),
        form,
    ]
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert run.returncode == 0, run.stderr[-2000:]
    kernels = [json.loads(line) for line in run.stdout.splitlines()]
    assert {"attend", "by_queries", "by_keys"} <= {kernel["kernel"] for kernel in kernels}
    for kernel in kernels:
        assert kernel["shared"] <= SHARED[arch], kernel
        if arch == "sm_90" and head_dim <= 128 and dtype != "float32" and kernel["kernel"] in NO_SPILLS:
            assert kernel["stack"] == 0, kernel
    if (arch, head_dim, form) == ("sm_90", 128, "causal"):
        (first, *_) = (kernel["loops"] for kernel in kernels if kernel["kernel"] == "attend")
        assert min(first) <= LONGEST_LOOP, first


if __name__ == "__main__":
    main(*sys.argv[1:])
