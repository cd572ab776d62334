"""Attention through FlexAttention: one fused kernel, the bias formed inside it, blocks beyond the horizon skipped."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import BlockMask

from alibi_core import AttentionCall
from alibi_torch._flex_mask import BLOCK, block_mask, nearest_keys, sees_own_key

DEVICES = ("cuda", "cpu")
LEAST_HEAD_DIM = 16  # of the kernels for GPUs, whose matrix units take no fewer
RECOMPILE_LIMIT = 64  # a kernel, of one kind of call: lengths of 1, tensors with and without gradients, strides, ...

Mod = Callable[..., Tensor]


def flex_attention(call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Compute a call by FlexAttention, compiled for each kind of call once.

    Args:
        call: Checked, and not empty.
        query: ``[*batch, num_heads, q_len, head_dim]``, float32, float16 or bfloat16.
        key: ``[*batch, num_kv_heads, kv_len, head_dim]``.
        value: Of the shape of ``key``.

    Returns:
        ``[*batch, num_heads, q_len, head_dim]``, of the dtype of ``query``.

    Raises:
        NotImplementedError: For what the kernels cannot do: other devices, float64, gradients on a CPU, ``vmap``.
    """
    learns = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (call.slopes, call.future_slopes))
    backward = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    _check_supported(query, needs_gradients=learns or backward)
    call = one_batch_axis(call)
    query, key, value = (x.reshape(*call.batch, *x.shape[-3:]) for x in (query, key, value))
    # The backward kernels (2.9 to 2.13) read what they do not mask: past the last query they take whatever a masked
    # load leaves for log-sum-exp and delta, and 0 * NaN is NaN. Padded to whole blocks, there is no such place. The
    # forward kernels are free of it, and in decoding a copy of all keys would cost more than the attention.
    padding = [-n % BLOCK if backward else 0 for n in (call.q_len, call.kv_len)]
    score_mods, mask_mod = mods(call, padding)
    mask = block_mask(
        call,
        query,
        key,
        mask_mod,
        seq_lengths=(call.q_len + padding[0], call.kv_len + padding[1]),
        backward=backward,
    )
    width = max(0, LEAST_HEAD_DIM - call.head_dim) if query.device.type != "cpu" else 0
    query, key, value = (
        F.pad(x, (0, width, 0, rows)) if width or rows else x
        for x, rows in ((query, padding[0]), (key, padding[1]), (value, padding[1]))
    )
    attend = functools.partial(_attend, call, mask=mask)
    result, lse = attend(query, key, value, score_mods["bias"], want_lse=learns)
    if learns:
        with torch.no_grad():
            tensors = [x.detach() for x in (query, key, value)]
            for name, slopes in (("slopes", call.slopes), ("future_slopes", call.future_slopes)):
                ...
    result = result[..., : call.q_len, : call.head_dim]
    return result.reshape(result.shape)
