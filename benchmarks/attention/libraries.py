"""The contestants in each framework: this library, the framework's attention without positions, and other ALiBi.

Tensors are ``[batch, heads, length, head_dim]``, in JAX ``[batch, length, heads, head_dim]``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from benchmarks import harness
from benchmarks.attention.exact import distance_row, slopes

Call = Callable[[], Any]
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
FLEX_BLOCK = 128
CYCLES = 2e9  # An upper bound of a GPU's clock rate, in Hz.


@dataclass(frozen=True)
class Shape:
    """The sizes of one attention call."""

    num_heads: int
    head_dim: int
    length: int
    dtype: str = "float32"
    batch: int = 1

    @property
    def heads(self) -> str:
        """The sizes except the length, as text."""
        return f"{self.num_heads} heads of {self.head_dim}, {self.dtype}"

    @property
    def tensor_bytes(self) -> int:
        """The size in bytes of each of query, key, value and result."""
        return self.batch * self.num_heads * self.length * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def scores(self) -> int:
        """The number of scores of dense attention."""
        return self.batch * self.num_heads * self.length**2


@dataclass(frozen=True)
class Contestant:
    """One implementation of attention.

    Attributes:
        make: Takes query, key and value; returns a function of these and of further arrays, and the further arrays,
            which a model builds once for all layers, such as a dense bias.
        bytes_needed: Memory of a pass beyond its arguments, in bytes.
        has_backward: Whether it has a backward pass on this device.
    """

    make: Callable[..., tuple[Callable[..., Any], tuple[Any, ...]]]
    bytes_needed: float = 0
    has_backward: bool = True


def fixed(attend: Callable[..., Any], **options: Any) -> Contestant:
    """Return a contestant without arrays to build beforehand."""
    return Contestant(lambda *tensors: (attend, ()), **options)


class Library:
    """A framework on one device.

    Subclasses add ``normal(shape, seed)``, random numbers; ``as_float64(piece)``, a head of a tensor in NumPy;
    ``contestants(shape)``, the implementations of causal attention by name, first this library, then the baseline;
    ``prepare(contestant, tensors, backward)``, a call that returns the result or the gradients of query, key and value;
    and ``decode(shape)``, tensors of one query over many keys, and four calls: this library with a layer's cache, the
    baseline, this library without a cache, the baseline with a bias.
    """

    name: str
    device: str
    distributions: tuple[str, ...]

    def machine(self) -> dict[str, Any]:
        """Describe the device."""
        return {}

    def tensors(self, shape: Shape) -> list[Any]:
        """Return query, key, value and the gradient of the result."""
        return [self.normal(shape, seed) for seed in range(4)]

    def heads_first(self, tensor: Any) -> Any:
        """Return the tensor with heads first, so that ``[entry, head]`` is one head."""
        return tensor

    def free_bytes(self) -> float:
        """Return the memory that a contestant may take: beyond about 60 % of the free memory, a machine may swap."""
        return 0.6 * harness.available_memory()

    def seconds(self, call: Call) -> float:
        """Return the seconds until a call's result is computed."""
        return harness.seconds_of(call)


# --- PyTorch ----------------------------------------------------------------------------------------------------------


class Torch(Library):
    """PyTorch on a CPU or an NVIDIA GPU."""

    name, distributions = "torch", ("torch", "triton")

    def __init__(self, device: str | None) -> None:
        import torch

        self.torch = torch
        self.device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        torch.empty(0, device=self.device)  # raises if there is no such device

    def machine(self) -> dict[str, Any]:
        if self.device == "cpu":  # PyTorch may be limited to narrower vector instructions
            vectors = self.torch.backends.cpu.get_cpu_capability().replace("AVX512", "AVX-512")
            return {"threads": self.torch.get_num_threads(), "vectors": vectors}
        properties = self.torch.cuda.get_device_properties(self.device)
        return {"gpu": properties.name, "gpu_memory": properties.total_memory, "cuda": self.torch.version.cuda}

    def normal(self, shape: Shape, seed: int) -> Any:
        generator = self.torch.Generator(self.device).manual_seed(seed)
        sizes = shape.batch, shape.num_heads, shape.length, shape.head_dim
        drawn = self.torch.randn(sizes, generator=generator, device=self.device)
        return drawn.to(getattr(self.torch, shape.dtype))

    def as_float64(self, piece: Any) -> np.ndarray:
        return piece.detach().double().cpu().numpy()

    def free_bytes(self) -> float:
        if self.device == "cpu":
            return super().free_bytes()
        unused = self.torch.cuda.memory_reserved() - self.torch.cuda.memory_allocated()
        return 0.9 * (self.torch.cuda.mem_get_info()[0] + unused)

    def seconds(self, call: Call, ahead: float = 0.0) -> float:
        """Return the seconds of a call; on a GPU, with ``ahead``, without the time of the host.

        The GPU is kept busy for ``ahead`` seconds while the host queues the call, as it is in a model.
        """
        if self.device == "cpu":
            return super().seconds(call)
        cuda = self.torch.cuda
        start, end = (cuda.Event(enable_timing=True) for _ in range(2))
        cuda.synchronize()
        if ahead:
            cuda._sleep(int(ahead * CYCLES))
        start.record()
        result = call()
        end.record()
        cuda.synchronize()
        del result
        return start.elapsed_time(end) / 1e3

    def peak(self, call: Call) -> int:
        """Return the peak growth of GPU memory during a call, in bytes, including its result."""
        cuda = self.torch.cuda
        cuda.synchronize()
        before = cuda.memory_allocated()
        cuda.reset_peak_memory_stats()
        call()
        cuda.synchronize()
        return cuda.max_memory_allocated() - before

    def contestants(self, shape: Shape) -> dict[str, Contestant]:
        import alibi_torch

        is_gpu = self.device == "cuda"
        kernels = {}
        if is_gpu:
            for kernel in ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION"):
                kernels[f"SDPA {kernel.removesuffix('_ATTENTION')}, no positions"] = fixed(
                    partial(self._plain, kernel=kernel)
                )
        bias_bytes = shape.scores // shape.batch * DTYPE_BYTES[shape.dtype] + 12 * shape.length**2
        triton = {}
        if is_gpu or os.environ.get("TRITON_INTERPRET") == "1":
            triton["alibi_torch, Triton"] = fixed(partial(alibi_torch.attention, implementation="triton"))
        return {
            "alibi_torch": fixed(alibi_torch.attention),
            **triton,
            "SDPA, no positions": fixed(self._plain),  # PyTorch chooses the kernel
            **kernels,
            "SDPA, dense bias": Contestant(self._dense, bias_bytes),
            "FlexAttention": Contestant(self._flex, has_backward=is_gpu),
        }

    def _plain(self, query: Any, key: Any, value: Any, kernel: str | None = None) -> Any:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        with nullcontext() if kernel is None else sdpa_kernel(SDPBackend.__members__[kernel]):
            return self.torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)

    def _dense(self, query: Any, key: Any, value: Any) -> Any:
        torch, (_, num_heads, length, _) = self.torch, query.shape
        position = torch.arange(length, device=self.device, dtype=torch.float32)
        distance = position[:, None] - position
        bias = torch.empty(1, num_heads, length, length, dtype=query.dtype, device=self.device)
        for head, slope in enumerate(slopes(num_heads).tolist()):  # in place: one bias in memory, not two
            bias[0, head] = (distance * -slope).masked_fill_(distance < 0, -math.inf)
        attend = torch.nn.functional.scaled_dot_product_attention
        return lambda query, key, value, bias: attend(query, key, value, bias), (bias,)

    def _flex(self, query: Any, key: Any, value: Any) -> Any:
        """Return FlexAttention with ALiBi's ``score_mod`` and the usual causal blocks."""
        from torch.nn.attention.flex_attention import BlockMask, flex_attention

        torch, length = self.torch, query.shape[2]
        torch._dynamo.config.recompile_limit = 64  # one variant per shape; the default limit is 8
        rate = torch.tensor(slopes(query.shape[1]), dtype=torch.float32, device=self.device)
        # Build the causal blocks from ranges: from a predicate it would take minutes on a CPU.
        rows = torch.arange(-(-length // FLEX_BLOCK), dtype=torch.int32, device=self.device)
        indices = rows.expand(1, 1, len(rows), len(rows)).contiguous()
        diagonal = torch.zeros_like(indices)
        diagonal[..., 0] = rows  # in each row of blocks, full blocks, then one partial block
        blocks = BlockMask.from_kv_blocks(
            torch.ones_like(rows)[None, None],
            diagonal,
            rows[None, None].contiguous(),
            indices,
            BLOCK_SIZE=FLEX_BLOCK,
            mask_mod=lambda batch, head, q_index, kv_index: q_index >= kv_index,
            seq_lengths=(length, length),
        )
        compiled = torch.compile(flex_attention, fullgraph=True, dynamic=False)

        def alibi(score: Any, batch: Any, head: Any, q_index: Any, kv_index: Any) -> Any:
            return score + rate[head] * (kv_index - q_index)

        return lambda *tensors: compiled(*tensors, score_mod=alibi, block_mask=blocks), ()

    def prepare(self, contestant: Contestant, tensors: Sequence[Any], backward: bool) -> Call:
        *leaves, grad = (x.detach() for x in tensors)
        leaves = [x.requires_grad_(backward) for x in leaves]
        attend, built = contestant.make(*leaves)
        if not backward:
            return self.torch.no_grad()(lambda: attend(*leaves, *built))
        return lambda: self.torch.autograd.grad(attend(*leaves, *built), leaves, grad)

    def decode(self, shape: Shape) -> tuple[list[Any], dict[str, Call]]:
        import alibi_torch

        torch, (query, key, value, _) = self.torch, self.tensors(shape)
        layer = alibi_torch.AlibiAttention(
            shape.num_heads * shape.head_dim, shape.num_heads, device=self.device, dtype=query.dtype
        )
        cache = layer.make_cache(shape.batch, shape.length + 8)
        cache.append(key, value)
        query = query[:, :, -1:].clone()
        row = torch.tensor(distance_row(shape.num_heads, shape.length)).to(self.device, query.dtype)
        # No key is after the last token, so nothing is masked.
        attend = partial(torch.nn.functional.scaled_dot_product_attention, query, key, value)
        calls = {
            "alibi_torch, the layer's cache": lambda: cache.attend(query),
            "SDPA, no positions": attend,
            "alibi_torch, attention": lambda: alibi_torch.attention(query, key, value),
            "SDPA, a row of biases": partial(attend, attn_mask=row),
        }
        if self.device == "cuda":
            calls["alibi_torch, the layer's cache, Triton"] = lambda: cache.attend(query, implementation="triton")
        return [query, key, value], {name: torch.no_grad()(call) for name, call in calls.items()}


# --- JAX --------------------------------------------------------------------------------------------------------------


class Jax(Library):
    """JAX on a CPU or an NVIDIA GPU; everything is compiled before it is timed."""

    name, distributions = "jax", ("jax", "jaxlib", "flax")

    def __init__(self, device: str | None) -> None:
        import jax

        self.jax = jax
        self.place = jax.devices({"cuda": "gpu"}.get(device, device))[0]
        self.device = {"gpu": "cuda"}.get(self.place.platform, self.place.platform)
        self.kernels = ("cudnn", "xla") if self.device == "cuda" else ("xla",)

    def normal(self, shape: Shape, seed: int) -> Any:
        jax, sizes = self.jax, (shape.batch, shape.length, shape.num_heads, shape.head_dim)
        return jax.device_put(jax.random.normal(jax.random.key(seed), sizes, dtype=shape.dtype), self.place)

    def heads_first(self, tensor: Any) -> Any:
        return np.swapaxes(np.asarray(tensor), 1, 2)  # a view

    def as_float64(self, piece: Any) -> np.ndarray:
        return np.asarray(piece).astype(np.float64)

    def contestants(self, shape: Shape) -> dict[str, Contestant]:
        import alibi_jax

        attend = self.jax.nn.dot_product_attention
        dense = {"xla": 13 * shape.scores}  # with gradients: three float32 arrays of scores, and a mask
        found = {"alibi_jax": fixed(alibi_jax.attention)}
        for kernel in self.kernels:
            plain = partial(attend, is_causal=True, implementation=kernel)
            found[f"JAX {kernel}, no positions"] = fixed(plain, bytes_needed=dense.get(kernel, 0))
        if "cudnn" in self.kernels:
            found["alibi_core.fold, JAX cudnn"] = fixed(self._folded)
        bias_bytes = shape.scores // shape.batch * DTYPE_BYTES[shape.dtype] + dense["xla"]
        found["JAX xla, dense bias"] = Contestant(self._dense, bias_bytes)
        return found

    def _dense(self, query: Any, key: Any, value: Any) -> Any:
        jnp, length = self.jax.numpy, query.shape[1]
        rate = jnp.asarray(slopes(query.shape[2]), jnp.float32)

        @self.jax.jit  # one fused loop over small operands
        def build() -> Any:
            position = jnp.arange(length)
            return (-rate[:, None, None] * (position[:, None] - position))[None].astype(query.dtype)

        attend = partial(self.jax.nn.dot_product_attention, is_causal=True, implementation="xla")
        return attend, (self.jax.device_put(build(), self.place),)

    def _folded(self, query: Any, key: Any, value: Any) -> Any:
        """Return attention by cuDNN, which takes no bias but features in its place."""
        import alibi_core

        jnp, size = self.jax.numpy, query.shape[-1]
        features = size + alibi_core.fold_size(key.shape[1], query.dtype)
        padded = -(-features // 8) * 8  # cuDNN takes multiples of eight
        pair = alibi_core.fold(*(jnp.swapaxes(x, 1, 2) for x in (query, key)), head_dim=padded)
        tensors = (*(jnp.swapaxes(x, 1, 2) for x in pair), jnp.pad(value, [(0, 0)] * 3 + [(0, padded - size)]))
        attend = partial(self.jax.nn.dot_product_attention, is_causal=True, implementation="cudnn", scale=size**-0.5)
        return attend(*tensors)[..., :size]

    def prepare(self, contestant: Contestant, tensors: Sequence[Any], backward: bool) -> Call:
        *leaves, grad = tensors
        attend, built = contestant.make(*leaves)

        def gradients(grad: Any, leaves: Any, built: Any) -> Any:
            result, pull = self.jax.vjp(lambda *tensors: attend(*tensors, *built), *leaves)
            return result, pull(grad)  # return the result too, or XLA would remove its computation

        if backward:
            call = self._compiled(gradients, grad, leaves, built)
            return lambda: call()[1]
        return self._compiled(lambda leaves, built: attend(*leaves, *built), leaves, built)

    def _compiled(self, function: Callable[..., Any], *arguments: Any) -> Call:
        compiled = self.jax.jit(function).lower(*arguments).compile()
        return lambda: self.jax.block_until_ready(compiled(*arguments))

    def decode(self, shape: Shape) -> tuple[list[Any], dict[str, Call]]:
        from flax import nnx

        import alibi_jax

        query, key, value, _ = self.tensors(shape)
        query = query[:, -1:]
        layer = alibi_jax.AlibiAttention(
            shape.num_heads * shape.head_dim, shape.num_heads, dtype=key.dtype, rngs=nnx.Rngs(0)
        )
        cache = layer.make_cache(shape.batch, shape.length + 8).append(key, value)
        row = self.jax.device_put(distance_row(shape.num_heads, shape.length).astype(query.dtype), self.place)
        rate = self.jax.numpy.asarray(slopes(shape.num_heads), "float32")
        attend, tensors, first = self.jax.nn.dot_product_attention, (query, key, value), self.kernels[0]
        return [query, key, value], {
            "alibi_jax, the layer's cache": self._compiled(lambda q, cache: cache.attend(q, rate), query, cache),
            f"JAX {first}, no positions": self._compiled(partial(attend, implementation=first), *tensors),
            "alibi_jax, attention": self._compiled(alibi_jax.attention, *tensors),
            "JAX xla, a row of biases": self._compiled(partial(attend, implementation="xla"), *tensors, row),
        }


# --- MLX --------------------------------------------------------------------------------------------------------------


class Mlx(Library):
    """MLX on a CPU or on Metal. It is lazy: each call ends with the evaluation of its result."""

    name, distributions = "mlx", ("mlx", "mlx-cpu", "mlx-metal")

    def __init__(self, device: str | None) -> None:
        import mlx.core as mx

        self.mx, self.device = mx, device or ("metal" if mx.metal.is_available() else "cpu")
        mx.set_default_device(mx.cpu if self.device == "cpu" else mx.gpu)
        mx.set_cache_limit(0)  # so that peaks do not include cached free memory

    def normal(self, shape: Shape, seed: int) -> Any:
        sizes = shape.batch, shape.num_heads, shape.length, shape.head_dim
        drawn = self.mx.random.normal(sizes, key=self.mx.random.key(seed))
        return self._evaluated(drawn.astype(getattr(self.mx, shape.dtype)))

    def as_float64(self, piece: Any) -> np.ndarray:
        return np.array(piece.astype(self.mx.float32)).astype(np.float64)  # NumPy has no bfloat16

    def contestants(self, shape: Shape) -> dict[str, Contestant]:
        import alibi_mlx

        return {
            "alibi_mlx": fixed(alibi_mlx.attention),
            "mx.fast, no positions": fixed(partial(self._fast, mask="causal"), bytes_needed=4 * shape.scores),
            "mx.fast, dense mask": Contestant(self._dense, 24 * shape.scores),
        }

    def _fast(self, query: Any, key: Any, value: Any, mask: Any = None) -> Any:
        scale = query.shape[-1] ** -0.5
        return self.mx.fast.scaled_dot_product_attention(query, key, value, scale=scale, mask=mask)

    def _dense(self, query: Any, key: Any, value: Any) -> Any:
        mx, (_, num_heads, length, _) = self.mx, query.shape
        distance = mx.arange(length)[:, None] - mx.arange(length)
        rate = mx.array(slopes(num_heads), dtype=mx.float32)[:, None, None]
        mask = mx.where(distance < 0, -mx.inf, -rate * distance)[None].astype(query.dtype)
        return lambda *tensors: self._fast(*tensors), (self._evaluated(mask),)

    def _evaluated(self, result: Any) -> Any:
        self.mx.eval(result)
        return result

    def prepare(self, contestant: Contestant, tensors: Sequence[Any], backward: bool) -> Call:
        *leaves, grad = tensors
        attend, built = contestant.make(*leaves)

        def gradients() -> Any:
            results, found = self.mx.vjp(lambda *tensors: attend(*tensors, *built), leaves, [grad])
            self.mx.eval(results, found)
            return found

        return gradients if backward else lambda: self._evaluated(attend(*leaves, *built))

    def decode(self, shape: Shape) -> tuple[list[Any], dict[str, Call]]:
        import alibi_mlx

        query, key, value, _ = self.tensors(shape)
        query = self.mx.contiguous(query[:, :, -1:])
        cache = alibi_mlx.KVCache()
        cache.update_and_fetch(key, value)
        row = self._evaluated(self.mx.array(distance_row(shape.num_heads, shape.length)).astype(query.dtype))
        tensors = query, key, value
        return [*tensors], {
            "alibi_mlx, the layer's cache": lambda: self._evaluated(cache.attend(query)),
            "mx.fast, no positions": lambda: self._evaluated(self._fast(*tensors)),
            "alibi_mlx, attention": lambda: self._evaluated(alibi_mlx.attention(*tensors)),
            "mx.fast, a row of biases": lambda: self._evaluated(self._fast(*tensors, row)),
        }


LIBRARIES = {"torch": Torch, "jax": Jax, "mlx": Mlx}


def load(name: str, device: str | None = None) -> Library:
    """Return a framework on a device; by default on the best that is available."""
    return LIBRARIES[name](device)


def alone(name: str, sizes: dict[str, Any], backward: bool, is_ours: bool) -> Call:
    """Prepare a pass on the CPU for a memory measurement, in a separate process."""
    library = load(name, "cpu")
    for length in (min(256, sizes["length"]), sizes["length"]):  # a small call first: one-time initialization
        shape = Shape(**sizes | {"length": length})
        ours, baseline, *_ = library.contestants(shape).values()
        call = library.prepare(ours if is_ours else baseline, library.tensors(shape), backward)
        if length != sizes["length"]:
            call()
    return call
