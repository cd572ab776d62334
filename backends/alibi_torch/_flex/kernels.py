"""Attention through FlexAttention: one fused kernel that forms the bias itself and skips blocks beyond the horizon."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import flex_attention as flex

from alibi_core.backend import AttentionCall, penalty, penalty_beyond, relative_position
from alibi_core.backend.horizon import KeyNorms, nearest_keys
from alibi_torch._derivatives import twice_differentiable
from alibi_torch._dispatch import needs_gradients
from alibi_torch._flex.mask import BLOCK, block_mask
from alibi_torch._internals import mark_dynamic, without_recompile_limit

LEAST_HEAD_DIM = 16  # GPU kernels require at least this head_dim; smaller ones are padded.
COMPILED_ON = ("cuda",)  # device types; uncompiled, FlexAttention forms all scores
MOST_KINDS = 2**16  # of calls that are compiled; PyTorch's limits are lower, and exceeding one is an error.

Mod = Callable[..., Tensor]


def flex_attention(
    call: AttentionCall,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    norms: KeyNorms | None = None,
    kernel_options: dict[str, Any] | None = None,
) -> Tensor:
    """Compute a call by FlexAttention, compiled except on a CPU. The call is not empty, and ``refusal`` allows it.

    All keys are read once to measure their norms, unless ``norms`` bounds them.
    """
    is_compiling = torch.compiler.is_compiling()
    attend = _attend_compiled if query.device.type in COMPILED_ON and not is_compiling else _attend
    attend = functools.partial(attend, norms, kernel_options or {})
    if not is_compiling and needs_gradients(query, key, value, call.slopes, call.future_slopes):
        return twice_differentiable(attend, call, query, key, value)
    return attend(call, query, key, value)


def _attend(
    norms: KeyNorms | None, tuning: dict[str, Any], call: AttentionCall, query: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    learns = needs_gradients(call.slopes, call.future_slopes)
    if torch.compiler.is_compiling() and not (call.has_offset_array or call.sees_own_key):
        # PyTorch 2.11 cannot compile a minimum, as of distances of keys, of what depends on a number that varies.
        offset = torch.full(call.batch, call.q_offset, dtype=torch.int32, device=query.device)
        call = replace(call, q_offset=_opaque(offset))
    shape, call = query.shape, _one_batch_axis(call)
    query, key, value = (x.reshape(*call.batch, *x.shape[-3:]) for x in (query, key, value))
    # Work-around for the backward kernels of PyTorch 2.9 to 2.13: rows past the last query, and their log-sum-exp, hold
    # whatever a masked load leaves behind, and 0 * NaN is NaN. Padding to whole blocks removes such rows. The forward
    # kernels are not affected; padding there would copy all keys, which costs more than a decoding step.
    has_gradients = needs_gradients(query, key, value)
    block = BLOCK if has_gradients else 1
    q_padding, kv_padding = (-(-n // block) * block - n for n in (call.q_len, call.kv_len))
    # [batch, heads, length, padded head_dim]; padded features are 0 and change no score.
    width = 0 if query.device.type == "cpu" else max(0, LEAST_HEAD_DIM - call.head_dim)
    query, key, value = (F.pad(x, (0, width)) if width else x for x in (query, key, value))
    bias, weighted_bias, mask_mod = _mods(call, q_padding, kv_padding)
    lengths = call.q_len + q_padding, call.kv_len + kv_padding
    with torch.no_grad():
        mask = block_mask(call, query, key, mask_mod, norms, lengths, has_gradients)
    query = F.pad(query, (0, 0, 0, q_padding)) if q_padding else query
    key, value = (F.pad(x, (0, 0, 0, kv_padding)) if kv_padding else x for x in (key, value))
    # Each list of blocks is a range of keys, but for a window, which has partial blocks on both sides.
    tuning = {"fwd_BLOCKS_ARE_CONTIGUOUS": call.window_size is None} | tuning
    if call.q_len > 1 and "BACKEND" not in tuning:
        # The kernel for few queries must know their number when it is compiled: leave it to single queries.
        tuning.setdefault("FORCE_USE_FLEX_ATTENTION", True)
    options = {"scale": call.scale, "enable_gqa": call.num_heads != call.num_kv_heads, "block_mask": mask}
    options["kernel_options"] = tuning
    options |= {"return_aux": flex.AuxRequest(lse=True)} if learns else {}
    result = flex.flex_attention(query, key, value, score_mod=bias, **options)
    if learns:  # slopes get their gradient from a second attention, see _tangent
        result, auxiliary = result
        tensors = [x.detach() for x in (query, key, value)]
        # Slopes of keys on both sides (0), before the query (-1) and after it (1).
        sides = {0: call.slopes} if call.future_slopes is None else {-1: call.slopes, 1: call.future_slopes}
        for side, slopes in sides.items():
            if not slopes.requires_grad:
                continue
            with torch.no_grad():
                moved, moved_auxiliary = flex.flex_attention(*tensors, score_mod=weighted_bias(side), **options)
                tangent = _tangent(result, auxiliary.lse, moved, moved_auxiliary.lse)
            # Adds 0 to the result; its derivative with respect to the slope is the tangent.
            result = result + ((slopes - slopes.detach())[..., None, None] * tangent).to(result.dtype)
    return result[..., : call.q_len, : call.head_dim].reshape(shape)


def _attend_compiled(
    norms: KeyNorms | None, tuning: dict[str, Any], call: AttentionCall, query: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    """Compute a call by compiled code, which is compiled once per kind of call, for all lengths and batch sizes."""
    arrays = call.arrays
    if call.q_len % BLOCK == call.kv_len % BLOCK == 0:  # a third fewer instructions; the compiler sees no length
        tuning = {"IS_DIVISIBLE": True} | tuning
    if not call.has_offset_array and call.q_offset != call.kv_len - call.q_len:
        # A number would be compiled in as a constant.
        arrays["q_offset"] = torch.full(call.batch, call.q_offset, dtype=torch.int32, device=query.device)
    changed = {"q_offset": 0} | {name: mark_dynamic(x, range(x.ndim)) for name, x in arrays.items()}
    call = replace(call, **changed)
    norms = norms and replace(norms, values=mark_dynamic(norms.values, (0, 2)))
    tensors = (mark_dynamic(x, (*range(x.ndim - 3), x.ndim - 2)) for x in (query, key, value))
    return _compiled()(norms, tuning, call, *tensors)


@functools.cache
def _compiled() -> Callable[..., Tensor]:
    """Return the plan and FlexAttention, compiled as one graph.

    The plan is some 300 small operations, which a GPU takes longer to start than to compute.
    """
    # Not dynamic by default, or the numbers of heads and the scale would be, which the kernels do not follow.
    compiled = torch.compile(_attend_any_length, fullgraph=True, dynamic=False)
    return without_recompile_limit(compiled, MOST_KINDS)


def _attend_any_length(
    norms: KeyNorms | None, tuning: dict[str, Any], call: AttentionCall, query: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    """Return :func:`_attend` of a call whose lengths, batch and offset are read from the tensors."""
    q_len, kv_len = query.shape[-2], key.shape[-2]
    offset = call.q_offset if call.has_offset_array else kv_len - q_len
    call = replace(call, batch=tuple(query.shape[:-3]), q_len=q_len, kv_len=kv_len, q_offset=offset)
    return _attend(norms, tuning, call, query, key, value)


def _one_batch_axis(call: AttentionCall) -> AttentionCall:
    """Return the call with exactly one batch axis, its arrays expanded to it (a mask may keep a batch axis of 1)."""
    call = call.with_one_batch_axis()
    (size,) = call.batch

    def whole(array: Tensor, axes: int) -> Tensor:
        if axes == 3:  # the mask: [batch or 1, heads or 1, q_len or 1, kv_len]
            return array.reshape((1,) * (4 - array.ndim) + tuple(array.shape))
        return array.expand(size, *array.shape[array.ndim - axes :])

    return call.map_arrays(whole)


def _mods(call: AttentionCall, q_padding: int, kv_padding: int) -> tuple[Mod, Callable[[int], Mod], Mod]:
    """Return two score modifications and the mask function, as functions of indices for FlexAttention.

    The first modification adds the bias. The second also multiplies the weights of keys by their distances, on both
    sides of the query or on one. Values that change from call to call are read from tensors, because a Python number
    would be compiled in as a constant. Indices may point to ``q_padding`` queries past the last one, and to
    ``kv_padding`` keys past the last one, which no query sees.
    """
    # The kernels cannot compute what the compiler would move into them.
    kept = _opaque if torch.compiler.is_compiling() else lambda array: array
    slopes = kept(call.slopes.detach())
    future_slopes = None if call.future_slopes is None else kept(call.future_slopes.detach())
    offset = call.q_offset if call.has_offset_array else slopes.new_full(call.batch, call.q_offset, dtype=torch.int32)
    offset, nearest = kept(offset), _distance_origin(call, q_padding)
    nearest = None if nearest is None else kept(nearest).expand(*call.batch, call.num_heads, call.q_len + q_padding)
    within_float = nearest is None and _has_exact_positions(call)
    is_causal, window_size = call.is_causal, call.window_size
    kv_len = kept(slopes.new_full(call.batch, call.kv_len, dtype=torch.int32)) if kv_padding else None
    q_ids, kv_ids = call.q_segment_ids, call.kv_segment_ids
    if q_ids is not None and kv_ids is not None:
        q_ids, kv_ids = kept(F.pad(q_ids, (0, q_padding))), kept(F.pad(kv_ids, (0, kv_padding)))
    mask = call.mask
    if mask is not None:  # pad only axes that do not broadcast; padding is invisible
        filling = (0, kv_padding, 0, q_padding if mask.shape[-2] > 1 else 0)
        mask = kept(F.pad(mask, filling, value=False) if any(filling) else mask)
        mask = mask.expand(*call.batch, call.num_heads, call.q_len + q_padding, call.kv_len + kv_padding)
    key_bias = None if call.added_key_bias is None else kept(F.pad(call.added_key_bias, (0, kv_padding)))
    points = None
    if call.q_points is not None and call.kv_points is not None:
        # Per dimension, [batch, padded length] of queries and of keys.
        padded = F.pad(call.q_points, (0, 0, 0, q_padding)), F.pad(call.kv_points, (0, 0, 0, kv_padding))
        points = list(zip(*(kept(_wide(x)).unbind(-1) for x in padded), strict=True))

    def ahead(b: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """Return key position minus query position, in tokens; in space minus the distance, as everywhere.

        In float32, positions are converted once per row and column of a block, not once per score.
        """
        if points is not None:
            steps = [keys[b, kv_idx] - queries[b, q_idx] for queries, keys in points]
            relative = relative_position(call.xp, steps, call.distance, torch.float32)
            return torch.where(torch.isnan(relative), 0, relative)  # 0 for a token without a position
        position = q_idx + offset[b]
        return kv_idx.to(torch.float32) - position.to(torch.float32) if within_float else kv_idx - position

    def biased(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the score with its bias, the penalty from the origin of the row on, and the direction."""
        relative = ahead(b, q_idx, kv_idx)
        distance, rate = relative.abs(), slopes[b, h]
        if nearest is None:
            distance = penalty(call.xp, distance.to(torch.float32), call.law)
        else:
            origin = nearest[b, h, q_idx]
            distance = (distance - origin).to(torch.float32)
            distance = penalty_beyond(call.xp, distance, origin.to(torch.float32), call.law)
        if future_slopes is not None:
            rate = torch.where(relative > 0, future_slopes[b, h], rate)
        score = score - rate * distance
        return score if key_bias is None else score + key_bias[b, h, kv_idx], distance, relative

    def bias(*at: Tensor) -> Tensor:
        return biased(*at)[0]

    def weighted_bias(side: int) -> Mod:
        def mod(*at: Tensor) -> Tensor:
            score, distance, relative = biased(*at)
            distance = distance.clamp(min=0)
            return score + torch.log(distance * (side * relative > 0) if side else distance)

        return mod

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        relative = ahead(b, q_idx, kv_idx)
        visible = kv_idx >= 0 if kv_len is None else kv_idx < kv_len[b]
        if is_causal:
            visible = visible & (relative <= 0)
        if window_size is not None:
            visible = visible & (relative.abs() <= window_size)
        if q_ids is not None and kv_ids is not None:
            visible = visible & (q_ids[b, q_idx] == kv_ids[b, kv_idx])
        return visible if mask is None else visible & mask[b, h, q_idx, kv_idx]

    return bias, weighted_bias, mask_mod


def _distance_origin(call: AttentionCall, q_padding: int) -> Tensor | None:
    """Return the distance of each query's nearest key, or less, ``[batch or 1, num_heads or 1, queries]``; None for 0.

    Its penalty is subtracted from those of the row: a constant per row cancels in softmax, but if all keys are far
    away, large penalties would cost float32 digits. With ``future_slopes`` the subtraction is a constant only if all
    keys lie on one side of the query.
    """
    if call.sees_own_key:
        return None
    if call.q_points is not None and call.kv_points is not None:
        nearest = _distance_to_box(call, call.q_points, call.kv_points)[:, None]
    else:
        nearest = nearest_keys(call).clamp(min=0)
        if call.future_slopes is not None and (call.mask is not None or call.q_segment_ids is not None):
            positions = call.positions()[0]  # [q_len] or [batch, q_len]
            is_outside = (positions < 0) | (positions >= call.kv_len)
            is_outside = is_outside[..., None, :] if is_outside.ndim > 1 else is_outside
            nearest = torch.where(is_outside, nearest, 0)
    return F.pad(nearest, (0, q_padding))


def _distance_to_box(call: AttentionCall, q_points: Tensor, kv_points: Tensor) -> Tensor:
    """Return each query's distance from the box around all keys, ``[batch, q_len]``: no key is nearer."""
    queries, keys = _wide(q_points), _wide(kv_points)
    lowest, highest = keys.amin(dim=-2, keepdim=True), keys.amax(dim=-2, keepdim=True)
    beyond = torch.maximum(lowest - queries, queries - highest).clamp(min=0)  # [batch, q_len, dims]
    distance = relative_position(call.xp, list(beyond.unbind(-1)), call.distance, torch.float32).abs()
    return torch.where(torch.isnan(distance), 0, distance)  # a token without a position is near all others


def _wide(points: Tensor) -> Tensor:
    """Return points in a dtype in which a subtraction cannot wrap."""
    least = torch.float32 if points.is_floating_point() else torch.int64
    return points.to(torch.promote_types(points.dtype, least))


def _has_exact_positions(call: AttentionCall) -> bool:
    """Whether float32 represents each position exactly, padding included; False if offsets are on the device."""
    if call.has_offset_array:
        return False
    return max(abs(call.q_offset), abs(call.q_offset + call.q_len), call.kv_len) + BLOCK <= 2**24


def _tangent(result: Tensor, lse: Tensor, moved: Tensor, moved_lse: Tensor) -> Tensor:
    """Return the derivative of the result with respect to the slope, ``[batch, num_heads, q_len, head_dim]`` float32.

    It is ``mean(distance) * result - mean(distance * value)``, means taken with the attention's weights. ``moved`` is a
    second attention whose weights are multiplied by the distance; ``exp(moved_lse - lse)`` is the mean distance.
    FlexAttention can differentiate a captured tensor itself, but adds every score of a head to one number with atomics:
    slow, and not deterministic.
    """
    # A row is 0 if all of its distances are 0, or if it has no keys.
    share = torch.where(torch.isfinite(moved_lse) & torch.isfinite(lse), moved_lse - lse, -math.inf)
    return torch.exp(share)[..., None] * (result.float() - moved.float())


@torch.library.custom_op("alibi::opaque", mutates_args=())
def _opaque(tensor: Tensor) -> Tensor:
    """Copy a tensor by an operator that the compiler neither inlines nor recomputes in the backward pass."""
    return tensor.clone(memory_format=torch.contiguous_format)


@_opaque.register_fake
def _(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)
