"""ALiBi attention for PyTorch."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import array_api_compat.torch as xp
import torch
import torch.nn.functional as F
from torch import Tensor

from alibi_core import AttentionCall
from alibi_core._attention import dense_attention
from alibi_core._checks import one_of

IMPLEMENTATIONS = ("sdpa", "dense")


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    slopes: int | Tensor | None = None,
    *,
    is_causal: bool = True,
    future_slopes: Tensor | None = None,
    q_offset: int | Tensor | None = None,
    segment_ids: Tensor | tuple[Tensor, Tensor] | None = None,
    window_size: int | None = None,
    mask: Tensor | None = None,
    scale: float | None = None,
    tolerance: float | None = None,
    allow_negative_slopes: bool = False,
    implementation: str | None = None,
) -> Tensor:
    """Return ALiBi attention, ``softmax(scale * query @ key.mT - slopes * distance) @ value``, over visible keys.

    Differentiable in ``query``, ``key``, ``value``, ``slopes`` and ``future_slopes``. Bias and softmax are float32
    (float64 for float64 inputs), also under autocast. A query that may look nowhere gives zeros.

    Args:
        query: ``[batch, num_heads, q_len, head_dim]``, floating. Any number of batch axes, none included.
        key: ``[batch, num_kv_heads, kv_len, head_dim]``; ``num_kv_heads`` divides ``num_heads``, and query head ``h``
            reads key/value head ``h // (num_heads // num_kv_heads)``.
        value: Of the shape of ``key``.
        slopes: ``[num_heads]`` or ``[batch, num_heads]``, not negative. Default: the canonical slopes.
        is_causal: Mask keys after the query.
        future_slopes: With ``is_causal=False``, the slopes for keys after the query. Default ``slopes`` (symmetric).
        q_offset: Position of the first query, in tokens; an int or a ``[batch]`` integer tensor. Default
            ``kv_len - q_len``.
        segment_ids: ``[batch, length]`` integers for packed sequences, or a pair (queries, keys) of them.
        window_size: Mask keys farther than this many tokens.
        mask: Booleans, True where a query may look, that broadcast to ``[batch, num_heads, q_len, kv_len]``.
        scale: Factor of the scores. Default ``head_dim ** -0.5``. The bias is not scaled.
        tolerance: The share of softmax weight that an implementation may leave out. Both implementations here leave
            out nothing, so they meet any.
        allow_negative_slopes: Let slopes be negative, so that distance is rewarded.
        implementation: ``"sdpa"`` (the default) hands the bias to ``scaled_dot_product_attention``; ``"dense"`` spells
            out the scores, for comparison. The one named runs, or the call raises.

    Returns:
        ``[batch, num_heads, q_len, head_dim]``, of the dtype and on the device of ``query``.

    Raises:
        TypeError: If an argument is of the wrong kind, or dtypes or array libraries are mixed.
        ValueError: If a value, shape or device is wrong.

    Example:
        >>> query, key, value = torch.randn(3, 2, 8, 5, 16).unbind()
        >>> attention(query, key, value).shape
        torch.Size([2, 8, 5, 16])

    References:
        Press, Smith, Lewis, "Train Short, Test Long", section 3, arXiv 2108.12409.
    """
    chosen = "sdpa" if implementation is None else one_of("implementation", implementation, IMPLEMENTATIONS)
    call = AttentionCall.check(
        query,
        key,
        value,
        slopes,
        is_causal=is_causal,
        future_slopes=future_slopes,
        q_offset=q_offset,
        segment_ids=segment_ids,
        window_size=window_size,
        mask=mask,
        scale=scale,
        tolerance=tolerance,
        allow_negative_slopes=allow_negative_slopes,
        xp=xp,
    )
    # Autocast would round the bias to its own low precision. Whatever it had to cast, it has cast before.
    with _no_autocast(query.device.type):
        if chosen == "dense" or call.is_empty:  # nothing to compute, but the gradient's graph is to be whole
            return dense_attention(call, query, key, value)
        return _sdpa(call, query, key, value)


def _no_autocast(device_type: str) -> AbstractContextManager[Any]:
    if not torch.amp.is_autocast_available(device_type):  # on the meta device, for one
        return nullcontext()
    return torch.autocast(device_type, enabled=False)


def _sdpa(call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    bias, attends = call.bias()
    if query.device.type != "cpu":
        # Only the CPU kernels take a float32 bias beside low-precision tensors; elsewhere it would be rounded to them.
        query, key, value = (x.to(call.working_dtype) for x in (query, key, value))
    # The fused CPU kernel takes a mask of as many axes as the tensors have, and no fewer.
    bias = bias.reshape((1,) * (query.ndim - bias.ndim) + bias.shape)
    grouped = {"enable_gqa": True} if call.num_kv_heads != call.num_heads else {}
    result = F.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=call.scale, **grouped)
    if attends is not None:
        result = torch.where(attends, result, 0.0)
    return result.to(call.dtype)
