"""Attention through FlexAttention: one fused kernel, the bias formed inside it, blocks beyond the horizon skipped."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from types import FunctionType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest
from torch.nn.attention.flex_attention import flex_attention as attend

from alibi_core.backend import AttentionCall
from alibi_core.backend.horizon import nearest_keys
from alibi_torch._cpu import KeyNorms
from alibi_torch._dispatch import needs_gradients
from alibi_torch._flex.blocks import kernel_options
from alibi_torch._flex.derivatives import twice_differentiable
from alibi_torch._flex.mask import BLOCK, SHORT, are_few, block_mask

LEAST_HEAD_DIM = 16  # of the kernels for GPUs, whose matrix units take no fewer
CPU_KEYS, CPU_WIDE = 16, 24  # keys that a CPU's kernel takes at once, and the head size from which it stops at the last
RECOMPILE_LIMIT = 64  # of one kernel: sizes of 1, lengths that vary, tensors with and without gradients, strides, ...

Mod = Callable[..., Tensor]


def flex_attention(
    call: AttentionCall, query: Tensor, key: Tensor, value: Tensor, norms: KeyNorms | None = None
) -> Tensor:
    """Compute a call that is not empty and not refused by FlexAttention, compiled once for each kind of call.

    All keys are read once to measure them, where ``norms`` does not bound theirs. On a GPU the plan is compiled with
    the kernel: its two hundred operations, one by one, would take longer than attention to thousands of tokens.
    """
    if torch.compiler.is_compiling():
        return _attend(call, query, key, value, norms, _tuning(call, query, key, value))
    if needs_gradients(query, key, value, call.slopes, call.future_slopes):
        return twice_differentiable(functools.partial(_run, norms), call, query, key, value)
    return _run(norms, call, query, key, value)


def _run(norms: KeyNorms | None, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Compute a call where nobody else compiles it."""
    tuning = _tuning(call, query, key, value)
    if not compiles_plans(call):
        return _attend(call, query, key, value, norms, tuning)
    kind = query.device.type, query.dtype, replace(call.rules, q_offset=None), call.num_heads, call.num_kv_heads
    kind += call.head_dim, call.q_len < SHORT, call.mask is None, call.q_segment_ids is None, call.future_slopes is None
    return _whole(*kind, *tuning)(call, query, key, value, norms, tuning)


def compiles_plans(call: AttentionCall) -> bool:
    """Whether the plan is compiled with the kernel; not on a CPU, where a compiler of C++ would take a minute."""
    return call.device.type != "cpu"


class _Padding(NamedTuple):
    """What tensors get so that the kernels take them."""

    queries: int
    keys: int
    width: int

    @classmethod
    def of(cls, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> _Padding:
        # In the backward kernels (2.9 to 2.13) the rows past the last query hold whatever a masked load leaves behind,
        # as their log-sum-exp too, and 0 * NaN is NaN. Padded to whole blocks there are no such rows. The forward
        # kernels are free of this, and while decoding a copy of all keys would cost more than the attention.
        block = BLOCK if needs_gradients(query, key, value) else 1
        if query.device.type != "cpu":
            return cls(-call.q_len % block, -call.kv_len % block, max(0, LEAST_HEAD_DIM - call.head_dim))
        # The kernel for narrow heads on CPUs (AVX2, 2.13) reads keys by sixteen, past the last one too, and writes what
        # it makes of those over the greatest scores of the first queries.
        keys = CPU_KEYS if call.head_dim < CPU_WIDE else 1
        return cls(-call.q_len % block, -call.kv_len % max(block, keys), 0)


def _tuning(call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> tuple[tuple[str, Any], ...]:
    """Return what the kernels are told, as pairs."""
    padding = _Padding.of(call, query, key, value)
    lengths = call.q_len + padding.queries, call.kv_len + padding.keys
    return tuple(kernel_options(call, query, lengths, padding.width).items())


def _attend(
    call: AttentionCall,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    norms: KeyNorms | None,
    tuning: tuple[tuple[str, Any], ...],
) -> Tensor:
    """Compute a call; all of it is what the compiler is given on a GPU."""
    learns = needs_gradients(call.slopes, call.future_slopes)
    backward = needs_gradients(query, key, value)
    if are_few(call):
        call = replace(call, tolerance=0.0)
    shape, call = query.shape, one_batch_axis(call)
    query, key, value = (x.reshape(*call.batch, *x.shape[-3:]) for x in (query, key, value))
    q_padding, kv_padding, width = _Padding.of(call, query, key, value)
    score_mods, mask_mod = mods(call, q_padding, kv_padding)
    lengths = call.q_len + q_padding, call.kv_len + kv_padding
    with torch.no_grad():
        mask = block_mask(call, query, key, mask_mod, norms, seq_lengths=lengths, backward=backward)
    query = F.pad(query, (0, width, 0, q_padding)) if width or q_padding else query
    key, value = (F.pad(x, (0, width, 0, kv_padding)) if width or kv_padding else x for x in (key, value))

    def run(kind: str, *tensors: Tensor) -> Any:
        options = {"scale": call.scale, "enable_gqa": call.num_heads != call.num_kv_heads, "block_mask": mask}
        options |= {"return_aux": AuxRequest(lse=True)} if learns else {}
        options |= {"kernel_options": dict(tuning)} if tuning else {}
        kernel = _kernel(call, query, kind, (bool(kv_padding), *tuning))
        return kernel(*tensors, score_mod=score_mods[kind], **options)

    result = run("bias", query, key, value)
    if learns:
        result, auxiliary = result
        tensors = [x.detach() for x in (query, key, value)]
        for kind, slopes in slopes_by_kind(call).items():
            if not slopes.requires_grad:
                continue
            with torch.no_grad():
                moved, moved_auxiliary = run(kind, *tensors)
                tangent = _tangent(result, auxiliary.lse, moved, moved_auxiliary.lse)
            result = result + ((slopes - slopes.detach())[..., None, None] * tangent).to(result.dtype)
    result = _stored(result)
    return result[..., : call.q_len, : call.head_dim].reshape(shape)


def one_batch_axis(call: AttentionCall) -> AttentionCall:
    """Return a call with exactly one batch axis, along which its arrays lie whole (but for a mask that is shared)."""
    call = call.with_one_batch_axis()
    (size,) = call.batch

    def whole(array: Tensor, axes: int) -> Tensor:
        if axes == 3:  # the mask
            return array.reshape((1,) * (4 - array.ndim) + tuple(array.shape))
        return array.expand(size, *array.shape[array.ndim - axes :])

    return call.map_arrays(whole)


def slopes_by_kind(call: AttentionCall) -> dict[str, Tensor]:
    """Return the slopes that count past, future or all distances, by those names."""
    if call.future_slopes is None:
        return {"all": call.slopes}
    return {"past": call.slopes, "future": call.future_slopes}


def mods(call: AttentionCall, q_padding: int, kv_padding: int) -> tuple[dict[str, Mod], Mod]:
    """Return what FlexAttention does to single scores, and whether a query may see a key, as functions of indices.

    The score modifications are ``"bias"``, and for each of :func:`slopes_by_kind` one that also weighs a key by its
    distance. What changes from call to call they read from tensors: a number would be compiled in. Indices may point to
    so many queries past the last one, and to so many keys, which none sees.
    """
    slopes = call.slopes.detach()
    future_slopes = None if call.future_slopes is None else call.future_slopes.detach()
    offset = call.q_offset if call.has_offset_array else slopes.new_full(call.batch, call.q_offset, dtype=torch.int32)
    nearest = _distance_origin(call, q_padding)
    within_float = nearest is None and counts_in_float(call)  # sorts last: see ``surplus``
    is_causal, window_size = call.is_causal, call.window_size
    kv_len = slopes.new_full(call.batch, call.kv_len, dtype=torch.int32) if kv_padding else None
    q_ids, kv_ids = call.q_segment_ids, call.kv_segment_ids
    if q_ids is not None and kv_ids is not None:
        q_ids, kv_ids = F.pad(q_ids, (0, q_padding)), F.pad(kv_ids, (0, kv_padding))
    mask = call.mask
    if mask is not None:
        filling = (0, kv_padding if mask.shape[-1] > 1 else 0, 0, q_padding if mask.shape[-2] > 1 else 0)
        mask = F.pad(mask, filling, value=False) if any(filling) else mask
        mask = mask.expand(*call.batch, call.num_heads, call.q_len + q_padding, call.kv_len + kv_padding)

    # The compiler names sizes after the order of what a function captures, which is that of names, and its template for
    # CPUs (2.13) confuses some of its names: one that sorts last changes none of the others.
    surplus = None if call.added_key_bias is None else F.pad(call.added_key_bias, (0, kv_padding))
    slopes, future_slopes, offset, nearest, kv_len, q_ids, kv_ids, mask, surplus = (
        _stored(x) for x in (slopes, future_slopes, offset, nearest, kv_len, q_ids, kv_ids, mask, surplus)
    )

    def biased(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the score with its bias, the distance in tokens from the origin of the row, and the direction."""
        relative = _ahead(kv_idx, q_idx + offset[b], within_float)
        distance = relative.abs()
        if nearest is not None:
            distance = distance - nearest[b, h, q_idx]
        distance = distance.to(torch.float32)
        rate = slopes[b, h]
        if future_slopes is not None:
            rate = torch.where(relative > 0, future_slopes[b, h], rate)
        score = score - rate * distance
        if surplus is not None:
            score = score + surplus[b, h, kv_idx]
        return score, distance, relative

    def bias(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return biased(score, b, h, q_idx, kv_idx)[0]

    def all_distances(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        score, distance, _ = biased(score, b, h, q_idx, kv_idx)
        return score + torch.log(distance.clamp(min=0))

    def past_distances(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        score, distance, relative = biased(score, b, h, q_idx, kv_idx)
        return score + torch.log(distance.clamp(min=0) * (relative < 0))

    def future_distances(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        score, distance, relative = biased(score, b, h, q_idx, kv_idx)
        return score + torch.log(distance.clamp(min=0) * (relative > 0))

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        relative = _ahead(kv_idx, q_idx + offset[b], within_float)
        visible = kv_idx >= 0 if kv_len is None else kv_idx < kv_len[b]
        if is_causal:
            visible = visible & (relative <= 0)
        if window_size is not None:
            visible = visible & (relative.abs() <= window_size)
        if q_ids is not None and kv_ids is not None:
            visible = visible & (q_ids[b, q_idx] == kv_ids[b, kv_idx])
        if mask is not None:
            visible = visible & mask[b, h, q_idx, kv_idx]
        return visible

    named = {"bias": bias, "all": all_distances, "past": past_distances, "future": future_distances}
    return named, mask_mod


def _distance_origin(call: AttentionCall, q_padding: int) -> Tensor | None:
    """Return the distance that each query's are counted from, ``[batch, num_heads, queries]`` int32; None for 0.

    That of the nearest key: softmax ignores what is constant along a row, but where all keys are far, float32 would
    spend its digits on it. With slopes of two kinds it is a constant only where all keys lie on one side.
    """
    if call.sees_own_key:
        return None
    nearest = nearest_keys(call).clamp(min=0)
    if call.future_slopes is not None and (call.mask is not None or call.q_segment_ids is not None):
        positions = call.positions()[0]  # [q_len] or [batch, q_len]
        is_outside = (positions < 0) | (positions >= call.kv_len)
        is_outside = is_outside[..., None, :] if is_outside.ndim > 1 else is_outside
        nearest = torch.where(is_outside, nearest, 0)
    return F.pad(nearest, (0, q_padding)).expand(*call.batch, call.num_heads, call.q_len + q_padding)


def _ahead(key: Tensor, query: Tensor, is_exact: bool) -> Tensor:
    """Return how many tokens the position of a key is ahead of a query's, in float32 where that is exact.

    There the conversion is one for each row and each column of a block, in place of one for each of its scores.
    """
    return key.to(torch.float32) - query.to(torch.float32) if is_exact else key - query


def counts_in_float(call: AttentionCall) -> bool:
    """Whether distances are differences of float32 positions; not on a CPU, whose template (2.13) converts none."""
    return call.device.type != "cpu" and has_exact_positions(call)


def has_exact_positions(call: AttentionCall) -> bool:
    """Whether float32 holds the position of each query and key, padding included, as far as the host knows."""
    if call.has_offset_array:
        return False
    return max(abs(call.q_offset), abs(call.q_offset + call.q_len), call.kv_len) + BLOCK <= 2**24


def _stored(tensor: Any) -> Any:
    """Return a tensor that lies in memory, as the compiler's template for CPUs (2.13) wants it.

    It takes no captured tensor that is still to be computed, and nothing that is to be computed from its result.
    """
    if tensor is None or tensor.device.type != "cpu" or not torch.compiler.is_compiling():
        return tensor
    return _copied(tensor)


@torch.library.custom_op("alibi::copied", mutates_args=())
def _copied(tensor: Tensor) -> Tensor:
    """Copy, as an operator that the compiler does not look into."""
    return tensor.clone(memory_format=torch.contiguous_format)


@_copied.register_fake
def _(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def _tangent(result: Tensor, lse: Tensor, moved: Tensor, moved_lse: Tensor) -> Tensor:
    """Return the derivative of the result by the slope, ``[batch, num_heads, q_len, head_dim]`` float32.

    It is ``mean distance * result - mean (distance * value)``, both under the attention's weights. A second attention,
    whose weights are these times the distance, gives the latter; its log-sum-exp tells the mean distance. FlexAttention
    would differentiate by a captured tensor too, but one score after another would be added to a head's one number:
    atomically, so in turn and in any order.
    """
    # Where no key has a distance, and where there are no keys at all.
    share = torch.where(torch.isfinite(moved_lse) & torch.isfinite(lse), moved_lse - lse, -math.inf)
    return torch.exp(share)[..., None] * (result.float() - moved.float())


def _kernel(call: AttentionCall, query: Tensor, kind: str, how: tuple[Any, ...]) -> Callable[..., Any]:
    """Return FlexAttention, compiled; as it is where the caller is being compiled, to become a part of that."""
    if torch.compiler.is_compiling():
        return attend
    rules = (call.is_causal, call.window_size, call.mask is None, call.q_segment_ids is None, *how)
    rules += (call.added_key_bias is None,)
    sizes = (call.num_heads, call.num_kv_heads, query.shape[-1], call.scale, call.q_len < SHORT)
    return _compiled(_flex, query.device.type, query.dtype, kind, call.future_slopes is None, rules, sizes)


@functools.cache
def _compiled(function: Callable[..., Any], *kind: Any) -> Callable[..., Any]:
    """Return a function compiled for one kind of call, whatever the lengths."""
    # The compiler keeps what it knows by code object, and searches all of it at each call. One for each kind keeps that
    # short, and a length that varies in one kind makes no other kind's kernel dynamic.
    own = FunctionType(function.__code__.replace(co_name="flex_attention"), function.__globals__)
    compiled = torch.compile(own, fullgraph=True)
    config = torch._dynamo.config

    def run(*arguments: Any, **options: Any) -> Any:
        before = config.recompile_limit
        config.recompile_limit = RECOMPILE_LIMIT  # by hand: config.patch takes longer than to launch a kernel
        try:
            return compiled(*arguments, **options)
        finally:
            config.recompile_limit = before

    return run


@functools.cache
def _whole(*kind: Any) -> Callable[..., Tensor]:
    """Return what computes one kind of call: compiled as a whole, or the kernel alone where the compiler fails."""
    way = _compiled(_attend, *kind)

    def run(*arguments: Any) -> Tensor:
        nonlocal way
        if way is _attend:
            return _attend(*arguments)
        try:
            return way(*arguments)
        except torch._dynamo.exc.TorchDynamoException as error:
            reason = " ".join(str(error).split())[:200]
            warnings.warn(
                f"PyTorch's compiler failed on the plan of such calls, which take a millisecond more now: {reason}",
                RuntimeWarning,
                stacklevel=2,
            )
            way = _attend
            return _attend(*arguments)

    return run


def _flex(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
    return attend(query, key, value, **options)
