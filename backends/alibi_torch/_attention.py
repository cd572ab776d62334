"""ALiBi attention for PyTorch."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import array_api_compat.torch as xp
import torch
import torch.nn.functional as F
from torch import Tensor

from alibi_core import AttentionCall
from alibi_core.backend import dense_attention, explains_keywords, host_values, non_negative_number, one_of
from alibi_torch._dispatch import IMPLEMENTATIONS, choose, memory, needs_gradients, no_autocast, resident
from alibi_torch._tiled import KeyNorms, of_lengths, prepared, step, tiled_attention, with_masks


def _remembering(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return an attention function that checks a call of plain tensors once for its sizes, numbers and slopes."""
    own = {"implementation", "max_key_norm"}  # of the function, not of the call
    remembered = set(inspect.signature(function).parameters) - own

    def masked(
        query: Tensor, key: Tensor, value: Tensor, slopes: Any, options: dict[str, Any], masks: dict[str, Tensor]
    ) -> Any:
        known = memory.key_of(query, key, value, slopes, options, masks)
        call = memory.recalled(known)
        if call is None:
            if known is None or not memory.is_worthwhile(query, key) or not remembered.issuperset(options):
                return function(query, key, value, slopes, **options, **masks)
            call = AttentionCall.check(query, key, value, slopes, xp=xp, **options, **masks)
            # Not by with_masks, which would forget that queries and keys share their ids.
            call = memory.keep(known, memory.own(replace(call, mask=None, q_segment_ids=None, kv_segment_ids=None)))
        last, compute = call.worked_out.get(masked, (None, None))
        # Layers ask for the same masks. Somebody may have written to them: what is in them is compared.
        if last is None or not all(map(torch.equal, masks.values(), last.values())):
            is_small = sum(map(torch.numel, masks.values())) <= memory.NUMBERS_OF_MASKS
            last = memory.own_masks(masks) if is_small else masks
            one = with_masks(call, last.get("mask"), last.get("segment_ids"))
            if not is_small:
                return in_general_of(one)(query, key, value)
            compute = in_general_of(one)
            if not needs_gradients(query, key, value):  # which may need no whole bias
                compute = prepared(one, compute)
            call.worked_out[masked] = last, compute
        return compute(query, key, value)

    def in_general_of(call: AttentionCall) -> Callable[..., Tensor]:
        return functools.partial(run, call, implementation=None, norms=None, is_plain=True)

    @functools.wraps(function)
    def attend(query: Tensor, key: Tensor, value: Tensor, slopes: Any = None, *surplus: Any, **options: Any) -> Any:
        if surplus:
            return function(query, key, value, slopes, *surplus, **options)  # which refuses it
        if options:
            options = {name: x for name, x in options.items() if x is not None or name not in own}
            masks = memory.masks_of(options)
            if masks:
                return masked(query, key, value, slopes, options, masks)
        known = memory.key_of(query, key, value, slopes, options)
        compute = memory.recalled(known)
        if compute is None:
            if known is None or not memory.is_worthwhile(query, key) or not remembered.issuperset(options):
                return function(query, key, value, slopes, **options)
            kind, lengths = memory.of_any_length(known, options), (query.shape[-2], key.shape[-2])
            like = memory.recalled(kind)
            if like is None:
                call = memory.own(AttentionCall.check(query, key, value, slopes, xp=xp, **options))
                if kind is not None and not call.is_empty:
                    memory.keep(kind, call)
            else:
                most = step.most_keys(like, norms_are_known=False)
                if 0 < lengths[1] <= most and not needs_gradients(query, key, value):
                    return step.attend(like, query, key, value, None)  # texts grow: each step has another length
                call = of_lengths(like, *lengths)
            compute = memory.keep(known, prepared(call, in_general_of(call)))
        return compute(query, key, value)

    return attend


@_remembering
@explains_keywords
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
    max_key_norm: float | Tensor | None = None,
    added_bias: Tensor | None = None,
    dropout: float = 0.0,
    return_weights: bool = False,
    allow_negative_slopes: bool = False,
    implementation: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return ALiBi attention, ``softmax(scale * query @ key.mT - slopes * distance) @ value``, over visible keys.

    Differentiable in ``query``, ``key``, ``value``, ``slopes`` and ``future_slopes``; in forward mode by ``"dense"``
    alone. Bias and softmax are float32 (float64 for float64 inputs), also under autocast. A query that may look nowhere
    gives zeros.

    Keys that are proved, from the norms of queries and keys, to weigh no more than ``tolerance`` together are not
    computed: the further a sequence reaches beyond the heads' horizons, the larger their share.

    Args:
        query: ``[batch, num_heads, q_len, head_dim]``, floating. Any number of batch axes, none included.
        key: ``[batch, num_kv_heads, kv_len, head_dim]``; ``num_kv_heads`` divides ``num_heads``, and query head ``h``
            reads key/value head ``h // (num_heads // num_kv_heads)``.
        value: Of the shape of ``key``.
        slopes: ``[num_heads]`` or ``[batch, num_heads]``, not negative; NumPy's serve any library. Default: the
            canonical slopes, as many of which an int stands for.
        is_causal: Mask keys after the query.
        future_slopes: With ``is_causal=False``, the slopes for keys after the query. Default ``slopes`` (symmetric).
        q_offset: Position of the first query, in tokens; an int or a ``[batch]`` integer tensor. Default
            ``kv_len - q_len``.
        segment_ids: ``[batch, length]`` integers for packed sequences, or a pair (queries, keys) of them.
        window_size: Mask keys farther than this many tokens: with 4 a query sees 5 keys, its own among them.
        mask: Booleans, True where a query may look, that broadcast to ``[batch, num_heads, q_len, kv_len]``: of
            ``[batch, kv_len]``, ``mask[:, None, None, :]``.
        scale: Factor of the scores. Default ``head_dim ** -0.5``. The bias is not scaled.
        tolerance: The share of softmax weight that may be left out, which moves the result by at most ``2 * tolerance
            * max|value|``. Default: the rounding error of the dtype. 0 computes every score.
        max_key_norm: What no key's norm exceeds, as the caller vouches: a number, or a ``[batch, num_kv_heads]``
            tensor. It saves reading all keys to find out, which a few queries may not be worth.
        added_bias: Floating numbers to add to the scaled scores beside ALiBi's bias, of axes as ``mask`` has them; -inf
            hides a key. ``"dense"`` alone takes it, as the next two arguments, and is then the default.
        dropout: Probability of zeroing a weight, the others being divided by what is left of 1. It happens in each
            call: give 0 where a model is not training. PyTorch's global generator draws.
        return_weights: Return a pair, with the weights that were applied, ``[batch, num_heads, q_len, kv_len]``.
        allow_negative_slopes: Let slopes be negative, so that distance is rewarded.
        implementation: ``"tiled"`` (CPU), ``"flex"`` (FlexAttention, for CUDA), ``"sdpa"``
            (``scaled_dot_product_attention`` with the bias as its mask) or ``"dense"`` (whole scores, for comparison).
            The one named runs, or the call raises. Default: what :func:`explain` says.

    Returns:
        ``[batch, num_heads, q_len, head_dim]``, of the dtype and on the device of ``query``; with ``return_weights``,
        the pair of that and the weights.

    Raises:
        TypeError: If an argument is of the wrong kind, or dtypes or array libraries are mixed.
        ValueError: If a value, shape or device is wrong.
        NotImplementedError: If the implementation named cannot run the call; the message names those that can.

    Example:
        >>> query, key, value = torch.randn(3, 2, 8, 5, 16).unbind()
        >>> attention(query, key, value).shape
        torch.Size([2, 8, 5, 16])

    References:
        Press, Smith, Lewis, "Train Short, Test Long", section 3, arXiv 2108.12409.
    """
    if implementation is not None:
        one_of("implementation", implementation, IMPLEMENTATIONS)
    call = AttentionCall.check(
        query,
        key,
        value,
        resident(slopes, query),
        is_causal=is_causal,
        future_slopes=future_slopes,
        q_offset=q_offset,
        segment_ids=segment_ids,
        window_size=window_size,
        mask=mask,
        scale=scale,
        tolerance=tolerance,
        added_bias=added_bias,
        dropout=dropout,
        return_weights=return_weights,
        allow_negative_slopes=allow_negative_slopes,
        xp=xp,
    )
    norms = None if max_key_norm is None else norms_of(call, max_key_norm)
    return run(call, query, key, value, implementation, norms)


def run(
    call: AttentionCall,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    implementation: str | None,
    norms: KeyNorms | None,
    *,
    is_plain: bool = False,
) -> Tensor:
    """Compute a checked call by the implementation named, or by the one that suits it.

    ``is_plain`` says that nothing is to see operators, where that is known.
    """
    if call.is_empty:  # nothing to compute, but the gradient's graph is to be whole
        return dense_attention(call, query, key, value)
    if is_plain and implementation is None and call.dense_only is None:
        implementation = "tiled"
    else:
        implementation = choose(call, query, key, value, implementation)
    # Autocast would round the bias to its own low precision. Whatever it had to cast, it has cast before.
    with no_autocast(query.device.type):
        if implementation == "tiled":
            return tiled_attention(call, query, key, value, norms, is_plain=is_plain)
        if implementation == "flex":
            from alibi_torch._flex import flex_attention

            return flex_attention(call, query, key, value, norms)
        if implementation == "dense":
            return dense_attention(call, query, key, value, drop=lambda weights: F.dropout(weights, call.dropout))
        return _sdpa(call, query, key, value)


def norms_of(call: AttentionCall, max_key_norm: float | Tensor) -> KeyNorms:
    """Return what the caller vouches for, checked, in the form that a plan takes."""
    if isinstance(max_key_norm, Tensor):
        shape, known = tuple(max_key_norm.shape), (*call.batch, call.num_kv_heads)
        if shape != known or not max_key_norm.is_floating_point():
            raise ValueError(
                f"max_key_norm must be a number or a floating tensor of shape {known} (batch, num_kv_heads), "
                f"got {max_key_norm.dtype} of shape {shape}"
            )
        known_values = host_values(max_key_norm)
        if known_values is not None and (known_values < 0).any():
            raise ValueError(f"max_key_norm must not be negative, got {known_values.tolist()}")
        values = max_key_norm.detach().reshape(-1, call.num_kv_heads, 1)
    else:
        values = torch.full((1, 1, 1), non_negative_number("max_key_norm", max_key_norm), device=call.device)
    return KeyNorms(values, max(call.kv_len, 1))


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
