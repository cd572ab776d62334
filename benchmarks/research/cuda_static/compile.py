"""Make the kernels of a call as PyTorch would for a GPU that is not there, in a process of its own.

The call is traced on the CPU, with its plan and its gradients, the traced tensors are said to lie on a GPU, PyTorch
writes Triton, and Triton's own compilers make machine code. Nothing of it is run.

Much of this is private to PyTorch (here 2.13) and Triton (3.7): where another version differs, it fails and says so.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import tempfile
import types
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.harness import run_alone
from benchmarks.research.cuda_static.machine_code import loops

# What PyTorch asks of a GPU before it chooses sizes of blocks: multiprocessors, and shared memory of a block.
DEVICES = {90: (132, 232_448), 80: (108, 166_912)}
PASSES = ("forward", "backward", "decode")


@dataclass(frozen=True)
class Subject:
    """What is compiled: attention by FlexAttention, with this library's block mask."""

    architecture: int  # 80 or 90
    kind: str  # of ``PASSES``; decoding is one query over all keys
    num_heads: int  # of query and keys
    head_dim: int
    has_bias: bool = True  # False for no positions: the same blocks, no score modification
    is_causal: bool = True  # False for the symmetric form
    varies: bool = False  # lengths are unknown to the compiler, as from the second length on
    dtype: str = "bfloat16"
    length: int = 4096  # keys, and but for decoding queries
    options: tuple[tuple[str, Any], ...] = ()  # of the kernel, by name, in place of the library's own
    is_plan: bool = False  # what comes before the kernel, in place of it


def compiled(subject: Subject) -> list[dict[str, Any]]:
    """Return what there is to say of each kernel that FlexAttention's templates make, or of each of the plan's.

    Raises:
        RuntimeError: It does not compile. The message ends with the compiler's.
    """
    return run_alone("benchmarks.research.cuda_static.compile:_prepare", asdict(subject))["found"]


def _prepare(options: dict[str, Any]) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    return lambda: _kernels(Subject(**options)), lambda found: found


def _kernels(subject: Subject) -> list[dict[str, Any]]:
    graphs = _traced(subject)
    with _said_to_be_there(subject.architecture):
        which = "backward" if subject.kind == "backward" and not subject.is_plan else "forward"
        code = _triton(*graphs[which], is_backward=which == "backward")
        named = re.findall(r"async_compile\.triton\('(\w+)', '''(.*?)'''", code, re.S)
        chosen = [(name, source) for name, source in named if name.startswith("triton_tem") != subject.is_plan]
        return [_compiled_kernel(subject.architecture, *each) for each in chosen]


# --- Tracing --------------------------------------------------------------------------------------------------------


def _traced(subject: Subject) -> dict[str, tuple[Any, list[Any]]]:
    """Return the graphs of the forward and the backward pass, each with the tensors that it takes."""
    import array_api_compat.torch as xp
    import torch
    from functorch.compile import min_cut_rematerialization_partition
    from torch._functorch.aot_autograd import aot_module_simplified, make_boxed_func
    from torch._inductor.decomposition import select_decomp_table

    from alibi_core import AttentionCall
    from alibi_torch._flex import Gpu, flex_attention, has_exact_positions, options_on
    from alibi_torch._flex import mods as with_bias

    graphs: dict[str, tuple[Any, list[Any]]] = {}

    def keep(name: str) -> Callable[..., Any]:
        def compiler(graph: Any, inputs: Any) -> Any:
            graphs[name] = graph, list(inputs)
            return make_boxed_func(graph.forward)

        return compiler

    def backend(graph: Any, inputs: Any) -> Any:
        forward, backward = keep("forward"), keep("backward")
        options = {"fw_compiler": forward, "bw_compiler": backward, "inference_compiler": forward}
        options["partition_fn"] = min_cut_rematerialization_partition  # as where it runs
        aot_module_simplified(graph, inputs, decompositions=select_decomp_table(), **options)
        return done

    def done(*_: Any) -> Any:
        raise _DoneError

    def mods(*arguments: Any) -> Any:
        score_mods, mask_mod = with_bias(*arguments)
        return (score_mods if subject.has_bias else {"bias": None}), mask_mod

    backward, dtype = subject.kind == "backward", getattr(torch, subject.dtype)
    gpu = Gpu(DEVICES[subject.architecture][0], divmod(subject.architecture, 10))

    def tuning(call: Any, query: Any, lengths: Any, width: int) -> dict[str, Any]:
        return options_on(gpu, call, lengths, call.head_dim + width) | dict(subject.options)

    def flexible(call: Any, *tensors: Any) -> Any:
        return flex_attention(call, *tensors)

    # Not mocks, which cannot be traced.
    answers = {"kernel_options": tuning, "counts_in_float": has_exact_positions, "mods": mods, "_stored": lambda x: x}
    answers = {f"alibi_torch._flex.kernels.{name}": answer for name, answer in answers.items()}
    answers["torch.nn.attention.flex_attention._validate_device"] = lambda *_: None  # it refuses gradients on a CPU
    answers["torch._functorch.config.force_non_lazy_backward_lowering"] = True
    compiler = torch.compile(flexible, backend=backend, fullgraph=True)
    lengths = (subject.length, subject.length + 1024) if subject.varies else (subject.length,)
    with _answering(answers), torch.set_grad_enabled(backward):
        for length in lengths:  # by the second the compiler learns that lengths vary
            shapes = [(1 if subject.kind == "decode" and not i else length) for i in range(3)]
            tensors = [
                torch.zeros(1, subject.num_heads, n, subject.head_dim, dtype=dtype, requires_grad=backward)
                for n in shapes
            ]
            call = AttentionCall.check(*tensors, is_causal=subject.is_causal, xp=xp)
            with contextlib.suppress(_DoneError):
                compiler(call, *tensors)
    for graph, _ in graphs.values():
        for node in graph.graph.nodes:
            if "flex_attention" in str(node.target):  # which is asked for no log-sum-exp on a CPU
                changed = {"OUTPUT_LOGSUMEXP": backward}
                node.args = tuple(x | changed if isinstance(x, dict) and "PRESCALE_QK" in x else x for x in node.args)
    return graphs


class _DoneError(Exception):
    """All is traced."""


# --- A GPU that is not there ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _said_to_be_there(architecture: int) -> Iterator[None]:
    """Answer what PyTorch and Triton ask of a GPU."""
    import torch
    import torch._inductor.scheduler
    from torch._inductor.runtime.hints import DeviceProperties
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    multiprocessors, shared = DEVICES[architecture]
    major, minor = divmod(architecture, 10)
    known = {
        "multi_processor_count": multiprocessors,
        "major": major,
        "regs_per_multiprocessor": 65_536,
        "max_threads_per_multi_processor": 2048,
        "warp_size": 32,
    }
    properties = types.SimpleNamespace(
        name=f"sm_{architecture}", minor=minor, shared_memory_per_block_optin=shared, **known
    )
    device = DeviceProperties(type="cuda", index=0, cc=architecture, **known)
    target = GPUTarget("cuda", architecture, 32)
    driver.set_active(
        types.SimpleNamespace(
            get_current_target=lambda: target,
            get_current_device=lambda: 0,
            get_active_torch_device=lambda: torch.device("cuda", 0),
        )
    )
    answers = {
        "torch.cuda.is_available": lambda: True,
        "torch.cuda.device_count": lambda: 1,
        "torch.cuda.current_device": lambda: 0,
        "torch.cuda.get_device_capability": lambda *_: (major, minor),
        "torch.cuda.get_device_properties": lambda *_: properties,
        "torch.version.cuda": "13.0",
        "torch._inductor.config.compile_threads": 1,  # a pool of workers may outlast what it was started for
        "torch._inductor.scheduler.has_triton": lambda: True,
        "torch._inductor.runtime.triton_helpers.set_driver_to_gpu": lambda: None,
        "torch._inductor.runtime.hints.DeviceProperties.create": lambda *_: device,
        "torch._subclasses.fake_tensor.init_gpu_context": lambda *_: None,
    }
    with _answering(answers):
        yield


@contextlib.contextmanager
def _answering(answers: dict[str, Any]) -> Iterator[None]:
    """Put something else in the place of names."""
    with contextlib.ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch(name, answer))
        yield


def _triton(graph: Any, inputs: list[Any], is_backward: bool = False) -> str:
    """Return the Python program that PyTorch makes of a graph, with its kernels in Triton."""
    import torch
    from torch._inductor.debug import DebugContext
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V
    from torch.utils._pytree import tree_map_only

    fake_mode = next(x.fake_mode for x in inputs if isinstance(x, torch.Tensor))

    def on_gpu(tensor: Any) -> Any:
        with fake_mode:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda")

    inputs = tree_map_only(torch.Tensor, on_gpu, inputs)
    gpu = torch.device("cuda")
    for module in (graph, *(x for x in graph.children() if hasattr(x, "graph"))):
        for node in module.graph.nodes:
            node.args, node.kwargs = tree_map_only(torch.device, lambda _: gpu, (node.args, node.kwargs))
    for node in graph.graph.nodes:
        if "val" in node.meta:
            node.meta["val"] = tree_map_only(torch.Tensor, on_gpu, node.meta["val"])
    options = {"shape_env": fake_mode.shape_env, "is_backward": is_backward}  # going backward sizes have other names
    lowering = GraphLowering(graph, example_inputs=inputs, **options)
    with (
        V.set_debug_handler(DebugContext()),
        V.set_graph_handler(lowering),
        V.set_fake_mode(fake_mode),
        torch.no_grad(),
    ):
        lowering.run(*inputs)
        code, *_ = lowering.codegen()
    return getattr(code, "value", code)


# --- A kernel ---------------------------------------------------------------------------------------------------------


def _compiled_kernel(architecture: int, name: str, source: str) -> dict[str, Any]:
    import triton
    from torch._inductor.codecache import PyCodeCache
    from triton.backends.compiler import GPUTarget

    kernel = getattr(PyCodeCache.load(source), name)
    config = kernel.configs[0]  # a template has no other; of the plan's kernels the GPU would choose
    meta = kernel._create_compile_meta(config)
    program = triton.compiler.ASTSource(kernel.fn, meta["signature"], meta["constants"], meta["configs"][0])
    options = kernel._create_compile_options(config, meta)
    made = triton.compile(program, target=GPUTarget("cuda", architecture, 32), options=options)
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.TemporaryDirectory() as folder:
        ptx, binary = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        ptx.write_text(made.asm["ptx"], encoding="utf-8")
        binary.write_bytes(made.asm["cubin"])
        target = re.search(r"^\.target (\w+)", made.asm["ptx"], re.M)[1]
        said = _output(tools / "ptxas", "-v", "--gpu-name", target, ptx, "-o", Path(folder, "out"))
        listing = _output(tools / "cuobjdump", "-sass", binary)
    blocks = re.findall(r"(BLOCK_[MN]\d?|SPLIT_KV) ?: tl\.constexpr = (\d+)", source)
    return {
        "kernel": re.sub(r"^triton_(tem|poi|per|red)_fused_|_\d+$", "", name),
        "blocks": {name: int(size) for name, size in blocks},
        "warps": config.num_warps,
        "stages": config.num_stages,
        "registers": int(re.search(r"Used (\d+) registers", said)[1]),
        "spilled": sum(map(int, re.findall(r"(\d+) bytes spill", said))),
        "shared": made.metadata.shared,
        "loops": loops(listing),
    }


def _output(*command: Any) -> str:
    done = subprocess.run([str(x) for x in command], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{Path(command[0]).name} must accept the kernel, got {done.stderr.strip()[-1000:]}")
    return done.stdout + done.stderr
