"""Attention on a GPU compiled by PyTorch's and Triton's compilers for an H100 that is described: none is needed.

    python -m tests.torch.test_flex_compile        prints a line of JSON for each kernel

Calls are traced with tensors of no memory on the CPU, and the traced tensors said to lie on a device of the name
"cuda", where PyTorch without CUDA records no gradients and writes no elements. Much of this is private to PyTorch
(2.13) and Triton (3.7): where another version differs, the test fails and says so.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import re
import subprocess
import sys
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("torch")

import torch

MISSING = importlib.util.find_spec("triton") is None
pytestmark = [pytest.mark.slow, pytest.mark.skipif(MISSING, reason="triton is not installed")]

SHARED = 232_448  # bytes that a block of threads may have on an H100
LENGTH = 4096
KNOWN = {"multi_processor_count": 132, "major": 9, "regs_per_multiprocessor": 65_536}
KNOWN |= {"max_threads_per_multi_processor": 2048, "warp_size": 32}


# --- In the process ---------------------------------------------------------------------------------------------------


class TracedError(Exception):
    """All is traced; nothing shall run."""


def traced() -> Any:
    """Return the graph of a call's gradients, by query, key and value, and the tensors that it takes."""
    from functorch.compile import min_cut_rematerialization_partition
    from torch._functorch.aot_autograd import aot_module_simplified, make_boxed_func
    from torch._inductor.decomposition import select_decomp_table
    from torch._subclasses.fake_tensor import FakeTensorMode

    import alibi_torch

    graphs: dict[str, Any] = {}

    def keep(name: str) -> Any:
        def compiler(graph: Any, inputs: Any) -> Any:
            graphs[name] = graph, list(inputs)
            return make_boxed_func(graph.forward)

        return compiler

    def backend(graph: Any, inputs: Any) -> Any:
        options = {
            "fw_compiler": keep("forward"),
            "inference_compiler": keep("forward"),
            "bw_compiler": keep("backward"),
        }
        options |= {"partition_fn": min_cut_rematerialization_partition, "decompositions": select_decomp_table()}
        aot_module_simplified(graph, inputs, **options)

        def stop(*_: Any) -> None:
            raise TracedError

        return stop

    attend = torch.compile(lambda *x: alibi_torch.attention(*x, implementation="flex"), backend=backend, fullgraph=True)
    with FakeTensorMode(), contextlib.suppress(TracedError):
        attend(*(torch.empty(1, 8, LENGTH, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)))
    return graphs["backward"]


def moved(graph: Any, inputs: list[Any]) -> list[Any]:
    """Say that a graph's tensors lie on the GPU, whose kernel returns log-sum-exps, and return its inputs there."""
    from torch.utils._pytree import tree_map_only

    fake_mode, gpu = next(x.fake_mode for x in inputs if isinstance(x, torch.Tensor)), torch.device("cuda")
    options = {"OUTPUT_LOGSUMEXP": True}

    def on_gpu(tensor: Any) -> Any:
        with fake_mode:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=gpu)

    for module in (graph, *(x for x in graph.children() if hasattr(x, "graph"))):
        for node in module.graph.nodes:
            node.args, node.kwargs = tree_map_only(torch.device, lambda _: gpu, (node.args, node.kwargs))
            node.args = tuple(options | x if isinstance(x, dict) and "PRESCALE_QK" in x else x for x in node.args)
            if "val" in node.meta:
                node.meta["val"] = tree_map_only(torch.Tensor, on_gpu, node.meta["val"])
    return tree_map_only(torch.Tensor, on_gpu, inputs)


def triton_of(graph: Any, inputs: list[Any]) -> str:
    """Return the program that PyTorch makes of a graph, with its kernels in Triton."""
    from torch._inductor.debug import DebugContext
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    fake_mode = next(x.fake_mode for x in inputs if isinstance(x, torch.Tensor))
    lowering = GraphLowering(graph, inputs, shape_env=fake_mode.shape_env, is_backward=True)
    with (
        V.set_debug_handler(DebugContext()),
        V.set_graph_handler(lowering),
        V.set_fake_mode(fake_mode),
        torch.no_grad(),
    ):
        lowering.run(*inputs)
        code, *_ = lowering.codegen()
    return getattr(code, "value", code)


def compiled(name: str, source: str, target: Any) -> dict[str, Any]:
    """Return the compilers' report on a kernel."""
    import triton
    from torch._inductor.codecache import PyCodeCache

    kernel = getattr(PyCodeCache.load(source), name)
    meta, (config,) = kernel._create_compile_meta(kernel.configs[0]), kernel.configs
    program = triton.compiler.ASTSource(kernel.fn, meta["signature"], meta["constants"], meta["configs"][0])
    made = triton.compile(program, target=target, options=kernel._create_compile_options(config, meta))
    return {"kernel": name, "shared": made.metadata.shared}


def main() -> None:
    import torch._inductor.scheduler
    from torch._inductor.runtime.hints import DeviceProperties
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    target, gpu = GPUTarget("cuda", 90, 32), torch.device("cuda", 0)
    described = {"get_current_target": target, "get_current_device": 0, "get_active_torch_device": gpu}
    driver.set_active(SimpleNamespace(**{name: lambda x=x: x for name, x in described.items()}))
    device = DeviceProperties(type="cuda", index=0, cc=90, **KNOWN)
    properties = SimpleNamespace(name="sm_90", minor=0, shared_memory_per_block_optin=SHARED, **KNOWN)
    answers = {
        "torch.Tensor.copy_": lambda self, *_: self,
        "torch.cuda.current_device": lambda: 0,
        "torch.cuda.device_count": lambda: 1,
        "torch.cuda.get_device_capability": lambda *_: (9, 0),
        "torch.cuda.get_device_properties": lambda *_: properties,
        "torch._functorch.config.force_non_lazy_backward_lowering": True,
        "torch._subclasses.fake_tensor.init_gpu_context": lambda *_: None,
        # These refuse gradients on a CPU.
        "torch.nn.attention.flex_attention._validate_device": lambda *_: None,
        "alibi_torch._dispatch.refusal": lambda *_: None,
    }
    lowering = {
        "torch.cuda.is_available": lambda: True,
        "torch.version.cuda": "13.0",
        "torch._inductor.config.compile_threads": 1,  # a pool of workers may outlive this process
        "torch._inductor.scheduler.has_triton": lambda: True,
        "torch._inductor.runtime.triton_helpers.set_driver_to_gpu": lambda: None,
        "torch._inductor.runtime.hints.DeviceProperties.create": lambda *_: device,
    }
    with contextlib.ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch(name, answer))
        graph, inputs = traced()
        inputs = moved(graph, inputs)
        for name, answer in lowering.items():
            stack.enter_context(mock.patch(name, answer))
        code = triton_of(graph, inputs)
        for name, source in re.findall(r"async_compile\.triton\('(\w+)', '''(.*?)'''", code, re.S):
            if name.startswith("triton_tem"):  # of FlexAttention's templates; others belong to the plan
                print(json.dumps(compiled(name, source, target)), flush=True)


# --- The test ---------------------------------------------------------------------------------------------------------


def test_the_kernel_of_gradients_fits_an_h100() -> None:
    command = [sys.executable, "-m", "tests.torch.test_flex_compile"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    kernels = [json.loads(line) for line in run.stdout.splitlines()]
    assert kernels
    for kernel in kernels:
        assert kernel["shared"] <= SHARED, kernel


if __name__ == "__main__":
    main()
