"""Symmetric calls of few keys in low precision, head after head, in oneDNN's float32 products.

MKL, by which the fused kernel multiplies, has no AVX-512 for AMD's processors. oneDNN has: its float32 takes less time
than the kernel's bfloat16, and no weight is rounded.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from alibi_core import AttentionCall

FEWEST = 256  # queries, and keys: fewer are not worth calls of their own for each head


def suits(call: AttentionCall, result_dtype: torch.dtype) -> bool:
    """Whether :func:`forward` computes a short call, in less time than the fused kernel."""
    if call.dtype == call.working_dtype or result_dtype != call.dtype or min(call.q_len, call.kv_len) < FEWEST:
        return False
    if call.is_causal or call.window_size is not None or call.future_slopes is not None:
        return False
    return _multiplies_wider() and torch.backends.mkldnn.matmul.fp32_precision in ("none", "ieee")


@functools.cache
def _multiplies_wider() -> bool:
    """Whether oneDNN has wider vectors than MKL; False where PyTorch cannot tell."""
    found = getattr(torch.cpu, "get_capabilities", dict)()
    if not str(found.get("cpu_name", "")).startswith("AMD") or not found.get("avx512_f"):
        return False
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def forward(call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return the result, and NaN for each softmax's log-sum-exp, which gradients alone need."""
    result = query.new_empty(call.batch[0], call.q_len, call.num_heads, call.head_dim).transpose(1, 2)
    slopes = call.slopes.expand(call.batch[0], call.num_heads).tolist()
    for entry in zip(query, key, value, slopes, result, strict=True):
        _attend(call, *entry)
    return result, query.new_full(query.shape[:-1], math.nan, dtype=call.working_dtype)


def _attend(
    call: AttentionCall, query: Tensor, key: Tensor, value: Tensor, slopes: list[float], result: Tensor
) -> None:
    """Compute a batch entry, ``[heads, length, head_dim]``, into ``result``."""
    distances = _distances(call.q_len, call.kv_len, call.q_offset)
    # Matrices that are not dense take oneDNN a thousand times as long.
    whole = {"dtype": call.working_dtype, "memory_format": torch.contiguous_format}
    query, key, value = (x.to(**whole) for x in (query, key, value))
    queries, keys, values = query.mul_(call.scale).unbind(), key.unbind(), value.mT.unbind()
    group = call.num_heads // call.num_kv_heads
    for head, (slope, out) in enumerate(zip(slopes, result.unbind(), strict=True)):
        scores = _product(queries[head], keys[head // group]).add_(distances, alpha=-slope)
        weights = torch.softmax(scores, dim=-1, out=scores)
        out.copy_(_product(weights, values[head // group]))
        del scores, weights  # so that the next head's take their place in the cache


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Return ``left @ right.mT``."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise.default(left, right, None, "none", [], "")
    return product


@functools.lru_cache(maxsize=2)
def _distances(q_len: int, kv_len: int, q_offset: int) -> Tensor:
    """Return the distance of each key from each query, ``[q_len, kv_len]``."""
    keys = torch.arange(kv_len, dtype=torch.float32, device="cpu")
    return (keys[q_offset : q_offset + q_len, None] - keys).abs_()
