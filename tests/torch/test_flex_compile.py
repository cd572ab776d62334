"""Attention on a GPU compiled by PyTorch's and Triton's compilers for an H100 that is described: none is needed.

    python -m tests.torch.test_flex_compile NAME        a line of JSON for each kernel of that case of test_flex

Calls are traced on the CPU, and the traced tensors said to lie on a device of the name "cuda", where PyTorch without
CUDA records no gradients and writes no elements. Much of this is private to PyTorch (2.11 to 2.15) and Triton (3.6 to
3.9): where another version differs, the test fails and says so.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import re
import subprocess
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("torch")

import torch

MISSING = importlib.util.find_spec("triton") is None
pytestmark = [pytest.mark.slow, pytest.mark.skipif(MISSING, reason="triton is not installed")]

SHARED = 232_448  # bytes that a block of threads may have on an H100
KNOWN = {"multi_processor_count": 132, "major": 9, "regs_per_multiprocessor": 65_536}
KNOWN |= {"max_threads_per_multi_processor": 2048, "warp_size": 32}


# --- In the process ---------------------------------------------------------------------------------------------------


class TracedError(Exception):
    """All is traced; nothing shall run."""


def traced(name: str) -> dict[str, Any]:
    """Return the graphs of a call and of its gradients, by all floating arguments, and the tensors that each takes."""
    from functorch.compile import min_cut_rematerialization_partition
    from torch._functorch.aot_autograd import aot_module_simplified, make_boxed_func
    from torch._inductor.decomposition import select_decomp_table

    from tests.torch.test_flex import NAMED, arguments_of, attend

    graphs: dict[str, Any] = {}

    def keep(name: str) -> Any:
        def compiler(graph: Any, inputs: Any) -> Any:
            graphs[name] = graph, list(inputs)
            return make_boxed_func(graph.forward)

        return compiler

    def backend(graph: Any, inputs: Any) -> Any:
        options = {
            "fw_compiler": keep("forward"),
            "inference_compiler": keep("inference"),
            "bw_compiler": keep("backward"),
        }
        options |= {"partition_fn": min_cut_rematerialization_partition, "decompositions": select_decomp_table()}
        aot_module_simplified(graph, inputs, **options)

        def stop(*_: Any) -> None:
            raise TracedError

        return stop

    arguments = arguments_of(NAMED[name])
    with mock.patch("torch.compile", partial(torch.compile, backend=backend)):
        for needs_gradients in (False, True):
            for tensor in ("query", "key", "value", "slopes"):
                arguments[tensor].requires_grad_(needs_gradients)
            with contextlib.suppress(TracedError):
                attend(**arguments).sum().backward()
    return graphs


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


def triton_of(graph: Any, inputs: list[Any], is_backward: bool) -> str:
    """Return the program that PyTorch makes of a graph, with its kernels in Triton."""
    from torch._inductor.debug import DebugContext
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    fake_mode = next(x.fake_mode for x in inputs if isinstance(x, torch.Tensor))
    lowering = GraphLowering(graph, inputs, shape_env=fake_mode.shape_env, is_backward=is_backward)
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
    config, *_ = kernel.configs  # of those that are tried on a GPU
    meta = kernel._create_compile_meta(config)
    program = triton.compiler.ASTSource(kernel.fn, meta["signature"], meta["constants"], meta["configs"][0])
    made = triton.compile(program, target=target, options=kernel._create_compile_options(config, meta))
    return {"kernel": name, "shared": made.metadata.shared}


def main(name: str) -> None:
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
        "alibi_torch._flex.kernels.COMPILED_ON": ("cpu",),
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
        for path, answer in answers.items():
            stack.enter_context(mock.patch(path, answer))
        graphs = traced(name)
        for path, answer in lowering.items():
            stack.enter_context(mock.patch(path, answer))
        for kind, (graph, inputs) in graphs.items():
            code = triton_of(graph, moved(graph, inputs), kind == "backward")
            is_divisible = "IS_DIVISIBLE : tl.constexpr = True" in code
            for kernel, source in re.findall(r"async_compile\.triton\('(\w+)', '''(.*?)'''", code, re.S):
                print(
                    json.dumps({"graph": kind, "is_divisible": is_divisible} | compiled(kernel, source, target)),
                    flush=True,
                )


# --- The test ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["1000", "1024", "one query before all keys", "mask by key", "segments by batch"])
def test_kernels_compile_and_fit_an_h100(name: str) -> None:
    command = [sys.executable, "-m", "tests.torch.test_flex_compile", name]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    kernels = [json.loads(line) for line in run.stdout.splitlines()]
    assert {kernel["graph"] for kernel in kernels} == {"inference", "forward", "backward"}
    for kernel in kernels:
        assert kernel["shared"] <= SHARED, kernel
        # Gradients pad to whole blocks.
        assert kernel["is_divisible"] == (name == "1024" or kernel["graph"] != "inference"), kernel


if __name__ == "__main__":
    main(sys.argv[1])
