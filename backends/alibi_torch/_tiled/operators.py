"""Attention on the CPU in tiles inside the horizon, as operators that autograd and torch.compile know."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import array_api_compat.torch as xp
import torch
from torch import Tensor

from alibi_core import AttentionCall
from alibi_core.backend import entry_of, tolerance_of, working_dtype
from alibi_torch._dispatch import needs_gradients
from alibi_torch._tiled import kernels as _tile_kernels
from alibi_torch._tiled import vmap as _tiled_vmap
from alibi_torch._tiled.plan import KeyNorms, jobs


def tiled_attention(
    call: AttentionCall, query: Tensor, key: Tensor, value: Tensor, norms: KeyNorms | None = None
) -> Tensor:
    """Compute ``call``, on tensors ``[*batch, heads, length, head_dim]`` of the CPU, without its bias or its scores.

    Keys that are proved, from the norms of queries and keys, to weigh less than the tolerance together are left out.

    Args:
        call: What to compute.
        query: As checked for ``call``.
        key: Likewise.
        value: Likewise.
        norms: Bounds of the norms of keys, where they are known; else all keys are read once to measure them.
    """
    flat = call.with_one_batch_axis()
    tensors = [x.reshape(*flat.batch, *x.shape[len(call.batch) :]) for x in (query, key, value)]
    mapped = not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None
    result, _ = (_Attention.apply if mapped else _attend)(
        *tensors,
        flat.slopes,
        flat.future_slopes,
        flat.q_offset if flat.has_offset_array else None,
        flat.q_segment_ids,
        # One tensor for both says that each query sees its own key.
        None if flat.kv_segment_ids is flat.q_segment_ids else flat.kv_segment_ids,
        flat.mask,
        flat.key_bias,
        None if norms is None else norms.values,
        0 if norms is None else norms.block,
        0 if flat.has_offset_array else flat.q_offset,
        flat.is_causal,
        flat.window_size,
        flat.scale,
        tolerance_of(call),
        # Without gradients there is no use for more digits than those of the dtype.
        mapped or needs_gradients(*tensors, flat.slopes, flat.future_slopes),
    )
    return result.reshape(query.shape).to(call.dtype)


# --- The operators -------------------------------------------------------------------------------------------------


@torch.library.custom_op("alibi::attention", mutates_args=())
def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    slopes: Tensor,
    future_slopes: Tensor | None,
    q_offsets: Tensor | None,
    q_segment_ids: Tensor | None,
    kv_segment_ids: Tensor | None,
    mask: Tensor | None,
    key_bias: Tensor | None,
    key_norms: Tensor | None,
    norms_block: int,
    q_offset: int,
    is_causal: bool,
    window_size: int | None,
    scale: float,
    tolerance: float,
    is_exact: bool,
) -> tuple[Tensor, Tensor]:
    """Return the result, ``[batch, num_heads, q_len, head_dim]``, and each softmax's log-sum-exp.

    Gradients of scores are differences from means that follow from the result: where it is to be differentiated,
    ``is_exact`` asks for it in the working dtype, as the log-sum-exp is.
    """
    rules = q_offsets, q_segment_ids, kv_segment_ids, mask, key_bias, q_offset, is_causal, window_size, scale
    call = _call(query, key, slopes, future_slopes, *rules)
    query, key, value = (_last_axis_dense(x) for x in (query, key, value))

    def attend(call: AttentionCall, batch: slice) -> tuple[Tensor, Tensor]:
        tensors = [x[batch] for x in (query, key, value)]
        known = None if key_norms is None else KeyNorms(key_norms, norms_block).of_entries(batch)
        planned = jobs(call, *tensors[:2], tolerance, known)
        return _tile_kernels.forward(call, *tensors, planned, call.working_dtype if is_exact else call.dtype)

    parts = [attend(*part) for part in _parts(call)]
    return parts[0] if len(parts) == 1 else tuple(map(torch.cat, zip(*parts, strict=True)))


@_attend.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    dtype, is_exact = working_dtype(xp, query.dtype), rest[-1]
    result = query.new_empty(query.shape, dtype=dtype if is_exact else query.dtype)
    return result, query.new_empty(query.shape[:-1], dtype=dtype)


@torch.library.custom_op("alibi::attention_backward", mutates_args=())
def _attend_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    result: Tensor,
    logsumexp: Tensor,
    slopes: Tensor,
    future_slopes: Tensor | None,
    q_offsets: Tensor | None,
    q_segment_ids: Tensor | None,
    kv_segment_ids: Tensor | None,
    mask: Tensor | None,
    key_bias: Tensor | None,
    key_norms: Tensor | None,
    norms_block: int,
    q_offset: int,
    is_causal: bool,
    window_size: int | None,
    scale: float,
    tolerance: float,
    by_slopes: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients by query, key, value, slopes and future slopes (zeros if ``by_slopes`` is False)."""
    rules = q_offsets, q_segment_ids, kv_segment_ids, mask, key_bias, q_offset, is_causal, window_size, scale
    call = _call(query, key, slopes, future_slopes, *rules)
    grad, query, key, value = (_last_axis_dense(x) for x in (grad, query, key, value))

    def differentiate(call: AttentionCall, batch: slice) -> tuple[Tensor, ...]:
        tensors = [x[batch] for x in (grad, query, key, value, result, logsumexp)]
        known = None if key_norms is None else KeyNorms(key_norms, norms_block).of_entries(batch)
        planned = jobs(call, *tensors[1:3], tolerance, known)
        return _tile_kernels.backward(call, *tensors, planned, by_slopes=by_slopes)

    with torch.autocast("cpu", enabled=False):  # gradients may be asked for where it is on
        parts = [differentiate(*part) for part in _parts(call)]
    joined = parts[0] if len(parts) == 1 else tuple(map(torch.cat, zip(*parts, strict=True)))
    *by_inputs, past, future = joined
    if future_slopes is None and not is_causal:
        past = past + future
    like = slopes if future_slopes is None else future_slopes
    by_past, by_future = (
        (x.sum(dim=0) if of.ndim == 1 else x).to(of.dtype) for x, of in ((past, slopes), (future, like))
    )
    return *by_inputs, by_past, by_future


@_attend_backward.register_fake
def _(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    result: Tensor,
    logsumexp: Tensor,
    slopes: Tensor,
    future_slopes: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, ...]:
    future = slopes if future_slopes is None else future_slopes
    return tuple(x.new_empty(x.shape) for x in (query, key, value, slopes, future))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, slopes, future_slopes, *rest = inputs
    tensors, numbers = rest[:6], rest[6:-1]
    ctx.save_for_backward(query, key, value, *output, slopes, future_slopes, *tensors)
    ctx.numbers = numbers
    ctx.by_slopes = ctx.needs_input_grad[3] or ctx.needs_input_grad[4]
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, grad: Tensor, _: Tensor, backward: Any = _attend_backward) -> tuple[Tensor | None, ...]:
    grads = backward(grad, *ctx.saved_tensors, *ctx.numbers, ctx.by_slopes)
    wanted = (x if needed else None for x, needed in zip(grads, ctx.needs_input_grad[:5], strict=True))
    return (*wanted, *(None for _ in range(13)))


def _refuse_to_differentiate(ctx: Any, *grads: Tensor) -> None:
    raise NotImplementedError(
        "implementation 'tiled' has no second derivatives; attention with implementation='dense' has them, and so has "
        "a model of transformers after alibi_torch.transformers.restore(model)"
    )


_attend.register_autograd(_differentiate, setup_context=_setup)
_attend_backward.register_autograd(_refuse_to_differentiate)
_tiled_vmap.register(_attend, _attend_backward)


class _Attention(torch.autograd.Function):
    """The operator with its gradients, for torch.func: it refuses those that are registered for an operator."""

    generate_vmap_rule = True  # from those of the operators

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, Tensor]:
        return _attend(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        _setup(ctx, inputs, output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _differentiate(ctx, *grads, _AttentionBackward.apply)


class _AttentionBackward(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        return _attend_backward(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        _refuse_to_differentiate(ctx, *grads)


def _call(
    query: Tensor,
    key: Tensor,
    slopes: Tensor,
    future_slopes: Tensor | None,
    q_offsets: Tensor | None,
    q_segment_ids: Tensor | None,
    kv_segment_ids: Tensor | None,
    mask: Tensor | None,
    key_bias: Tensor | None,
    q_offset: int,
    is_causal: bool,
    window_size: int | None,
    scale: float,
) -> AttentionCall:
    """Return the checked call that an operator's arguments were made of."""
    return AttentionCall(
        xp=xp,
        batch=(query.shape[0],),
        num_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        q_len=query.shape[2],
        kv_len=key.shape[2],
        head_dim=query.shape[3],
        dtype=query.dtype,
        working_dtype=working_dtype(xp, query.dtype),
        device=query.device,
        slopes=slopes,
        future_slopes=future_slopes,
        is_causal=is_causal,
        q_offset=q_offset if q_offsets is None else q_offsets,
        q_segment_ids=q_segment_ids,
        kv_segment_ids=q_segment_ids if kv_segment_ids is None else kv_segment_ids,
        window_size=window_size,
        mask=mask,
        scale=scale,
        tolerance=None,
        key_bias=key_bias,
    )


def _parts(call: AttentionCall) -> Iterator[tuple[AttentionCall, slice]]:
    """Yield a call, or one for each batch entry where each has its own offset, and the entries concerned."""
    if not call.has_offset_array:
        yield call, slice(None)
        return
    for index in range(call.batch[0]):
        yield entry_of(call, index), slice(index, index + 1)


def _last_axis_dense(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
