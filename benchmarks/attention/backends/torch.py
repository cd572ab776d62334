"""The attention benchmark in PyTorch: data, clocks, and who computes attention: this library, and others.

Others have a dense bias, FlexAttention, and the eager attention of BLOOM.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import alibi_torch
from benchmarks.attention.backends.backend import SHARE_OF_MEMORY, Backend, Call, Contestant, Decode, made_in
from benchmarks.attention.exact import canonical_slopes, row_of_biases
from benchmarks.attention.sizes import Shape

NO_POSITIONS = "SDPA, no positions"
FUSED = {name: SDPBackend.__members__[f"{name}_ATTENTION"] for name in ("FLASH", "CUDNN", "EFFICIENT")}
FLEX_BLOCK = 128
CYCLES = 2e9  # of a GPU's clock in a second, at most


class Prepared(NamedTuple):
    """A pass that is ready to run."""

    attend: Call  # returns the result, [batch, num_heads, length, head_dim]
    leaves: tuple[Tensor, ...]  # what gradients are due for


def _ours(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Prepared:
    return Prepared(lambda: alibi_torch.attention(query, key, value, **options), (query, key, value))


def _sdpa(query: Tensor, key: Tensor, value: Tensor, backend: SDPBackend | None = None, **options: Any) -> Prepared:
    call = partial(F.scaled_dot_product_attention, query, key, value, **options)
    return Prepared(call if backend is None else partial(_with_backend, backend, call), (query, key, value))


def _with_backend(backend: SDPBackend, call: Call) -> Tensor:
    with sdpa_kernel(backend):
        return call()


def _without_positions(query: Tensor, key: Tensor, value: Tensor) -> Prepared:
    return _sdpa(query, key, value, is_causal=True)


# --- Others. What a model builds once for all its layers is built before anything is timed ---------------------------


def _slopes(query: Tensor) -> Tensor:
    return torch.tensor(canonical_slopes(query.shape[1]), dtype=torch.float32, device=query.device)


def _dense_bias(query: Tensor, key: Tensor, value: Tensor, is_causal: bool = True) -> Prepared:
    _, num_heads, length, _ = query.shape
    position = torch.arange(length, device=query.device, dtype=torch.float32)
    distance = position[:, None] - position
    hidden = distance < 0 if is_causal else torch.zeros(1, dtype=torch.bool, device=query.device)
    distance = distance if is_causal else distance.abs()
    bias = torch.empty(1, num_heads, length, length, dtype=query.dtype, device=query.device)
    for head, slope in enumerate(canonical_slopes(num_heads).tolist()):  # in place, so that one is held, not two
        bias[0, head] = (distance * -slope).masked_fill_(hidden, -math.inf)
    return _sdpa(query, key, value, attn_mask=bias)


def _dense_bias_bytes(shape: Shape) -> int:
    return (shape.scores // shape.batch) * shape.element_bytes + 3 * 4 * shape.length**2


def _flex(query: Tensor, key: Tensor, value: Tensor, is_causal: bool = True, in_blocks: bool = False) -> Prepared:
    """Prepare FlexAttention, with the usual causal blocks or with ``score_mod`` alone."""
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.reset()  # one compilation a shape: after some it would fall back to what is not compiled
    slopes = _slopes(query)
    blocks = _causal_blocks(query.shape[2], query.device) if in_blocks else None
    compiled = torch.compile(flex_attention, fullgraph=True, dynamic=False)

    def alibi(score: Tensor, batch: Tensor, head: Tensor, q_index: Tensor, kv_index: Tensor) -> Tensor:
        if in_blocks:  # which hide the keys ahead
            return score + slopes[head] * (kv_index - q_index)
        biased = score - slopes[head] * (kv_index - q_index).abs()
        return torch.where(q_index >= kv_index, biased, -math.inf) if is_causal else biased

    return Prepared(lambda: compiled(query, key, value, score_mod=alibi, block_mask=blocks), (query, key, value))


def _flash_attention(query: Tensor, key: Tensor, value: Tensor, is_causal: bool = True) -> Prepared:
    from flash_attn import flash_attn_func

    slopes = _slopes(query)

    def attend() -> Tensor:
        tensors = (x.transpose(1, 2) for x in (query, key, value))  # [batch, length, num_heads, head_dim]
        return flash_attn_func(*tensors, causal=is_causal, alibi_slopes=slopes).transpose(1, 2)

    return Prepared(attend, (query, key, value))


def _causal_blocks(length: int, device: torch.device) -> Any:
    """Return the usual causal block mask, from the ranges of blocks: from a predicate it takes minutes on a CPU."""
    from torch.nn.attention.flex_attention import BlockMask

    rows = torch.arange(-(-length // FLEX_BLOCK), dtype=torch.int32, device=device)
    indices = rows.expand(1, 1, len(rows), len(rows)).contiguous()
    on_diagonal = torch.zeros_like(indices)
    on_diagonal[..., 0] = rows  # of each row of blocks, the one that is masked in part; all before it are full
    return BlockMask.from_kv_blocks(
        torch.ones_like(rows)[None, None],
        on_diagonal,
        rows[None, None].contiguous(),
        indices,
        BLOCK_SIZE=FLEX_BLOCK,
        mask_mod=lambda batch, head, q_index, kv_index: q_index >= kv_index,
        seq_lengths=(length, length),
    )


def _bloom(query: Tensor, key: Tensor, value: Tensor) -> Prepared:
    from transformers import BloomConfig
    from transformers.models.bloom.modeling_bloom import BloomAttention, build_alibi_tensor

    batch, num_heads, length, head_dim = query.shape
    config = BloomConfig(hidden_size=num_heads * head_dim, n_head=num_heads, hidden_dropout=0.0, attention_dropout=0.0)
    module = BloomAttention(config, layer_idx=0).eval()
    module.query_key_value = module.dense = nn.Identity()  # the projections are no part of what is compared
    # BLOOM keeps the three together: [batch, length, num_heads, 3, head_dim].
    fused = torch.stack([x.detach() for x in (query, key, value)], dim=-2).transpose(1, 2).flatten(2).contiguous()
    fused.requires_grad_(query.requires_grad)
    everything = torch.ones(batch, length, dtype=torch.int64, device=query.device)
    alibi = build_alibi_tensor(everything, num_heads, query.dtype)
    lowest = torch.finfo(query.dtype).min
    mask = torch.full((1, 1, length, length), lowest, dtype=query.dtype, device=query.device).triu_(1)
    residual = torch.zeros_like(query).reshape(batch, length, -1)

    def attend() -> Tensor:
        result, _ = module(fused, residual, alibi, mask)
        return result.unflatten(2, (num_heads, head_dim)).transpose(1, 2)

    return Prepared(attend, (fused,))


def _bloom_bytes(shape: Shape) -> int:
    # Scores, those with the mask, and weights in float32, then in the dtype; going backward, no more at once.
    element = shape.element_bytes
    return shape.scores * (2 * element + 4 + (element if element < 4 else 0)) + shape.length**2 * element


DENSE = Contestant(
    "SDPA, dense bias", _dense_bias, _dense_bias_bytes, note="the bias is built before, in the dtype of the query"
)
PEERS = (
    DENSE,
    Contestant(
        "FlexAttention",
        partial(_flex, in_blocks=True),
        backward_on=("cuda",),
        note="compiled, score_mod and causal blocks of 128; blocks from ranges, not from a predicate",
    ),
    Contestant(
        "BLOOM, eager",
        _bloom,
        _bloom_bytes,
        note="transformers' BloomAttention without its projections; bias row and mask are built before",
    ),
)


class Torch(Backend):
    """PyTorch on one kind of device."""

    name, distributions = "torch", ("torch", "triton", "transformers")
    ours, peers = Contestant("alibi_torch", _ours), PEERS

    def __init__(self, device: str | None = None) -> None:
        self.device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        torch.empty(0, device=self.device)  # fails here where there is none

    def machine(self) -> dict[str, Any]:
        if self.device == "cpu":
            # PyTorch may be held to less than the machine has: ATEN_CPU_CAPABILITY=avx2 MKL_CBWR=AVX2.
            vectors = torch.backends.cpu.get_cpu_capability()
            return {"threads": torch.get_num_threads(), "vectors": vectors.replace("AVX512", "AVX-512")}
        properties = torch.cuda.get_device_properties(self.device)
        return {"gpu": properties.name, "gpu_memory": properties.total_memory, "cuda": torch.version.cuda}

    def normal(self, shape: Shape, seed: int) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(seed)
        return torch.randn(shape.dims, generator=generator, device=self.device).to(getattr(torch, shape.dtype))

    def as_float64(self, tensor: Tensor) -> np.ndarray:
        return tensor.detach().double().cpu().numpy()

    def free_bytes(self) -> float:
        if self.device == "cpu":
            return super().free_bytes()
        held = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()  # by PyTorch, for nobody
        return SHARE_OF_MEMORY * (torch.cuda.mem_get_info()[0] + held)

    def seconds(self, call: Call, ahead: float = 0.0) -> float:
        """Return how long a call takes; on a GPU with all that it waits for the host, which may be so far ahead of it.

        ``ahead`` is in seconds: for so long the GPU is kept busy while the host asks for the call, as it does in a
        model. Without it, short calls are timed by how fast Python is.
        """
        if self.device == "cpu":
            return super().seconds(call)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        if ahead:
            torch.cuda._sleep(int(ahead * CYCLES))
        start.record()
        result = call()
        end.record()
        torch.cuda.synchronize()
        del result
        return start.elapsed_time(end) / 1e3

    # --- Passes -----------------------------------------------------------------------------------------------------

    def prepare(self, contestant: Contestant, tensors: tuple[Tensor, ...], backward: bool) -> Call:
        *tensors, grad = tensors
        attend, leaves = contestant.prepare(*(x.detach().requires_grad_(backward) for x in tensors))
        if backward:
            return lambda: torch.autograd.grad(attend(), leaves, grad)
        return torch.no_grad()(attend)

    def baseline(self, tensors: tuple[Tensor, ...], backward: bool) -> Contestant:
        """Return causal attention with no positions: on a GPU the fastest of those that PyTorch has."""
        if self.device == "cpu":
            return Contestant(NO_POSITIONS, _without_positions)
        contestants = [self._kernel(name, is_causal=True) for name in FUSED]
        return self.fastest({each: partial(self.prepare, each, tensors, backward) for each in contestants})

    @staticmethod
    def _kernel(name: str, is_causal: bool) -> Contestant:
        backend = FUSED.get(name, SDPBackend.MATH)
        needed = {} if name in FUSED else {"bytes_needed": _bloom_bytes}
        return Contestant(f"SDPA {name}, no positions", partial(_sdpa, backend=backend, is_causal=is_causal), **needed)

    def everyone(self, is_causal: bool) -> tuple[Contestant, ...]:
        """Return this library, each kernel of PyTorch's attention with no positions, and others with ALiBi.

        What has to be compiled for each length is the last.
        """
        form = {"is_causal": is_causal}
        return (
            Contestant("alibi_torch", partial(_ours, **form)),
            Contestant(NO_POSITIONS, partial(_sdpa, **form)),  # by PyTorch's choice, at the least cost for the host
            *(self._kernel(name, is_causal) for name in ("MATH", *FUSED)),
            Contestant(DENSE.name, partial(_dense_bias, **form), _dense_bias_bytes),
            Contestant("flash-attn 2, ALiBi", partial(_flash_attention, **form)),
            Contestant("FlexAttention, score_mod alone", partial(_flex, **form), backward_on=("cuda",)),
        )

    def implementations(self, is_causal: bool) -> tuple[Contestant, ...]:
        """Return each implementation of this library."""
        return tuple(
            Contestant(f"alibi_torch, {name}", partial(_ours, is_causal=is_causal, implementation=name))
            for name in ("tiled", "flex", "sdpa", "dense")
        )

    # --- Decoding ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def decode(self, shape: Shape) -> Decode:
        query, key, value, _ = self.tensors(shape)
        query, sizes = query[:, :, -1:].clone(), (shape.num_heads * shape.head_dim, shape.num_heads)
        layer = alibi_torch.AlibiAttention(*sizes, device=self.device, dtype=query.dtype)
        cache = layer.make_cache(shape.batch, shape.length + 8)
        cache.append(key, value)
        key, value = (x[:, :, : shape.length] for x in (cache.key, cache.value))
        row = torch.tensor(row_of_biases(shape.num_heads, shape.length)).to(self.device, query.dtype)
        plain = partial(F.scaled_dot_product_attention, query, key, value)  # all keys are in the past of the last token
        calls = [plain]
        if self.device != "cpu":
            calls = [torch.no_grad()(partial(_with_backend, backend, plain)) for backend in FUSED.values()]
        no_grad = torch.no_grad()
        return Decode(
            (query, key, value),
            cached=no_grad(lambda: cache.attend(query)),
            bare=no_grad(lambda: alibi_torch.attention(query, key, value)),
            baseline=no_grad(self.fastest({call: lambda call=call: call for call in calls})),
            with_row=no_grad(partial(plain, attn_mask=row)),
            baseline_name=NO_POSITIONS,
            row_name="SDPA, a row of biases",
        )

    # --- Memory -----------------------------------------------------------------------------------------------------

    def weights(self, shape: Shape, backward: bool) -> Iterator[tuple[str, int, int, str]]:
        if self.device == "cpu":
            extra = self.peak_on_cpu(shape, backward)
        else:
            call = self.prepare(self.ours, self.tensors(shape, backward), backward)
            call()
            extra = self.peak(call) - made_in(shape, backward)
        yield "measured", extra, shape.tensor_bytes, "the query"

    @staticmethod
    def peak(call: Call) -> int:
        """Return by how many bytes a call makes the GPU's memory grow, at its peak."""
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        result = call()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        del result
        return peak
