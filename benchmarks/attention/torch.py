"""The attention benchmark in PyTorch: data, clocks, and who computes attention."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import alibi_torch
from benchmarks import harness
from benchmarks.attention.backend import Call, Contestant, Decode
from benchmarks.attention.exact import Reference, sample
from benchmarks.attention.peers import PEERS, Prepared
from benchmarks.attention.sizes import Decoding, Shape

DISTRIBUTIONS = ("torch", "triton", "transformers")
OURS = "alibi_torch"
NO_POSITIONS = "SDPA, no positions"
FUSED = {
    "FLASH": SDPBackend.FLASH_ATTENTION,
    "CUDNN": SDPBackend.CUDNN_ATTENTION,
    "EFFICIENT": SDPBackend.EFFICIENT_ATTENTION,
}
SHARE_OF_MEMORY = 0.6  # of what is free: a contestant that needs more is left out, lest the machine swap


class Torch:
    """PyTorch on one kind of device."""

    name, ours, distributions, peers = "torch", OURS, DISTRIBUTIONS, PEERS

    def __init__(self, device: str | None = None) -> None:
        self.device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        torch.empty(0, device=self.device)  # fails here where there is none

    def machine(self) -> dict[str, Any]:
        """Describe what is special about this device."""
        if self.device == "cpu":
            return {"threads": torch.get_num_threads()}
        properties = torch.cuda.get_device_properties(self.device)
        return {"gpu": properties.name, "gpu_memory": properties.total_memory, "cuda": torch.version.cuda}

    # --- Data -------------------------------------------------------------------------------------------------------

    def tensors(self, shape: Shape, backward: bool = False) -> tuple[Tensor, ...]:
        """Return normally distributed query, key, value and, with ``backward``, gradient of the result, else None."""
        return (
            *(_normal(self.device, shape, seed) for seed in range(3)),
            _normal(self.device, shape, 3) if backward else None,
        )

    def as_float64(self, tensor: Tensor) -> np.ndarray:
        """Return a piece of a tensor as a NumPy array."""
        return tensor.detach().double().cpu().numpy()

    def free_bytes(self) -> float:
        """Return how much memory a contestant may take."""
        if self.device != "cpu":
            held = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()  # by PyTorch, for nobody
            return SHARE_OF_MEMORY * (torch.cuda.mem_get_info()[0] + held)
        return SHARE_OF_MEMORY * harness.available_memory()

    # --- Clocks -----------------------------------------------------------------------------------------------------

    def seconds(self, call: Call) -> float:
        """Return how long a call takes, until its result is there."""
        if self.device == "cpu":
            return harness.seconds_of(call)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        result = call()
        end.record()
        torch.cuda.synchronize()
        del result
        return start.elapsed_time(end) / 1e3

    # --- Passes -----------------------------------------------------------------------------------------------------

    def prepare(self, contestant: Contestant, tensors: tuple[Tensor, ...], backward: bool) -> Call:
        """Return the call to time, which returns the result, or with ``backward`` the gradients.

        Args:
            contestant: Whose.
            tensors: Query, key, value and the gradient of the result.
            backward: Whether to go on to the gradients.
        """
        *tensors, grad = tensors
        prepared = contestant.prepare(*(x.detach().requires_grad_(backward) for x in tensors))
        if backward:
            return lambda: torch.autograd.grad(prepared.attend(), prepared.leaves, grad)
        return torch.no_grad()(prepared.attend)

    def baseline(self, tensors: tuple[Tensor, ...], backward: bool) -> Contestant:
        """Return causal attention with no positions: on a GPU the fastest of those that PyTorch has."""
        if self.device == "cpu":
            return Contestant(NO_POSITIONS, _without_positions)
        times = {}
        for name, backend in FUSED.items():
            contestant = Contestant(f"SDPA {name}, no positions", partial(_without_positions, backend=backend))
            with suppress(RuntimeError):  # it does not take these
                call = self.prepare(contestant, tensors, backward)
                times[contestant] = statistics.median([self.seconds(call) for _ in range(5)][2:])
        return min(times, key=times.__getitem__)

    def contestant(self) -> Contestant:
        """Return this library."""
        return Contestant(OURS, _ours)

    # --- Decoding ---------------------------------------------------------------------------------------------------

    def decode(self, size: Decoding) -> Decode:
        """Fill a layer's cache and return who attends to it with one query."""
        shape = size.shape
        query, key, value, _ = self.tensors(shape)
        query = query[:, :, -1:].clone()
        layer = alibi_torch.AlibiAttention(
            shape.num_heads * shape.head_dim, shape.num_heads, device=self.device, dtype=getattr(torch, shape.dtype)
        )
        with torch.no_grad():
            cache = layer.make_cache(shape.batch, shape.length + 8)
            cache.append(key, value)
        key, value = (x[:, :, : shape.length] for x in (cache.key, cache.value))
        distance = torch.arange(shape.length - 1, -1, -1, device=self.device)
        slopes = torch.exp2(-8 / shape.num_heads * torch.arange(1, shape.num_heads + 1, device=self.device))
        row = (-slopes[:, None] * distance)[None, :, None].to(query.dtype)  # [1, num_heads, 1, kv_len]
        no_grad = torch.no_grad()
        return Decode(
            (query, key, value),
            no_grad(lambda: cache.attend(query)) if hasattr(cache, "attend") else None,
            no_grad(lambda: alibi_torch.attention(query, key, value)),
            no_grad(self._fastest_of_one_query(query, key, value)),
            no_grad(lambda: F.scaled_dot_product_attention(query, key, value, attn_mask=row)),
        )

    def _fastest_of_one_query(self, *tensors: Tensor) -> Call:
        plain = partial(F.scaled_dot_product_attention, *tensors)  # all keys are in the past of the last token
        if self.device == "cpu":
            return plain
        times = {}
        for backend in FUSED.values():
            call = partial(_with_backend, backend, plain)
            with suppress(RuntimeError), torch.no_grad():
                times[call] = statistics.median([self.seconds(call) for _ in range(5)][2:])
        return min(times, key=times.__getitem__)

    # --- Memory -----------------------------------------------------------------------------------------------------

    def extra_bytes(self, shape: Shape, backward: bool) -> int:
        """Return the peak memory of a pass of ours beyond its arguments, its result and its gradients."""
        if self.device == "cpu":
            peak = harness.peak_growth("benchmarks.attention.torch:peak_subject", asdict(shape), backward)
        else:
            call = self.prepare(self.contestant(), self.tensors(shape, backward), backward)
            call()
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            result = call()
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated() - before
            del result
        # What is made during the call, and is not extra: the result and, going backward, three gradients. The
        # arguments and the gradient of the result were there before.
        return peak - shape.tensor_bytes * (4 if backward else 1)

    def longest(self, shape: Shape, rows: int) -> dict[str, Any]:
        """Return what a very long forward pass costs, ``seconds`` and ``extra`` bytes, and its errors.

        Args:
            shape: Of the pass.
            rows: How many queries a head to recompute.
        """
        done = harness.run_alone("benchmarks.attention.torch:longest_subject", asdict(shape), rows)
        return {"seconds": done["seconds"], "extra": done["peak"] - shape.tensor_bytes} | done["found"]


def _normal(device: str, shape: Shape, seed: int) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape.dims, generator=generator, device=device).to(getattr(torch, shape.dtype))


def _ours(query: Tensor, key: Tensor, value: Tensor) -> Prepared:
    return Prepared(lambda: alibi_torch.attention(query, key, value), (query, key, value))


def _without_positions(query: Tensor, key: Tensor, value: Tensor, backend: SDPBackend | None = None) -> Prepared:
    call = partial(F.scaled_dot_product_attention, query, key, value, is_causal=True)
    return Prepared(call if backend is None else partial(_with_backend, backend, call), (query, key, value))


def _with_backend(backend: SDPBackend, call: Call) -> Tensor:
    with sdpa_kernel(backend):
        return call()


# --- In processes of their own ----------------------------------------------------------------------------------------


def peak_subject(sizes: dict[str, Any], backward: bool) -> Call:
    """Prepare a pass of ours on the CPU: arguments are made, and a small call starts whatever starts only once."""
    torch_cpu = Torch("cpu")
    shape = Shape(**sizes)
    small = Shape(shape.num_heads, shape.head_dim, min(256, shape.length), shape.dtype)
    torch_cpu.prepare(torch_cpu.contestant(), torch_cpu.tensors(small, backward), backward)()
    return torch_cpu.prepare(torch_cpu.contestant(), torch_cpu.tensors(shape, backward), backward)


def longest_subject(sizes: dict[str, Any], rows: int) -> tuple[Call, Callable[[Tensor], dict[str, float]]]:
    """Prepare a forward pass of ours on the CPU, and what tells the errors of some of its rows."""
    torch_cpu = Torch("cpu")
    tensors = torch_cpu.tensors(Shape(**sizes))
    chosen = sample(tensors[0].shape[2], rows)

    def examine(result: Tensor) -> dict[str, float]:
        return asdict(Reference.of(tensors, chosen, torch_cpu.as_float64).error(result))

    return torch_cpu.prepare(torch_cpu.contestant(), tensors, False), examine
