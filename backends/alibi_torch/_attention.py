"""ALiBi attention for PyTorch."""

from __future__ import annotations

import functools
from typing import Any

import array_api_compat.torch as xp
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from alibi_core import slopes as canonical
from alibi_core.backend import AttentionCall, checks, dense_attention, fixed_positions
from alibi_core.backend.caches import PLAIN
from alibi_core.backend.checks import explains_keywords, host_values, non_negative_number, one_of
from alibi_core.backend.horizon import KeyNorms
from alibi_torch import _cpu
from alibi_torch._derivatives import without_gradient
from alibi_torch._dispatch import IMPLEMENTATIONS, autocasted, choose, no_autocast
from alibi_torch._internals import is_watched
from alibi_torch._rows import sdpa


@explains_keywords
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    slopes: int | Tensor | None = None,
    *,
    is_causal: bool = True,
    future_slopes: Tensor | None = None,
    log_gates: Tensor | None = None,
    sinks: Tensor | None = None,
    q_offset: int | Tensor | None = None,
    segment_ids: Tensor | tuple[Tensor, Tensor] | None = None,
    window_size: int | None = None,
    mask: Tensor | None = None,
    positions: Tensor | tuple[Tensor, Tensor] | None = None,
    distance: str = "manhattan",
    law: str = "linear",
    scale: float | None = None,
    tolerance: float | None = None,
    max_key_norm: float | Tensor | None = None,
    added_bias: Tensor | None = None,
    dropout: float = 0.0,
    return_weights: bool = False,
    allow_negative_slopes: bool = False,
    implementation: str | None = None,
    kernel_options: dict[str, Any] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return ALiBi attention, ``softmax(scale * query @ key.mT - slopes * distance) @ value``, over visible keys.

    Differentiable in ``query``, ``key``, ``value``, ``slopes``, ``future_slopes``, ``log_gates`` and ``sinks``; forward
    mode needs ``"dense"``. Bias and softmax are float32 (float64 for float64 inputs), also under autocast, which casts
    query, key and value as those of ``scaled_dot_product_attention``. On CPUs, PyTorch's fused kernel (``"sdpa"``, and
    ``"tiled"`` for many queries) rounds weights to the dtype of the values before their product. A query that sees no
    key gives zeros.

    Keys are skipped if the norms of queries and keys prove that their weights sum to at most ``tolerance``. The longer
    a sequence is, compared with the heads' horizons, the larger the share of skipped keys.

    Arguments that are not listed are those of :func:`alibi_core.attention`. ``positions`` have no gradients.

    - ``query``, ``key``, ``value``: ``[batch, heads, length, head_dim]``, with any number of batch axes, none included;
      ``slopes`` and ``q_offset`` may have them too.
    - ``slopes``: ``[num_heads]`` or ``[batch, num_heads]``; an int stands for that many canonical slopes.
    - ``log_gates``: ``[batch, num_heads, kv_len]``. ``"tiled"`` and ``"dense"`` take them; these and ``"sdpa"`` take
      ``sinks``.
    - ``tolerance``: The share of softmax weight that may be skipped; it moves the result by at most ``2 * tolerance *
      max|value|``. Default: the rounding error of the dtype. 0 computes every score.
    - ``max_key_norm``: An upper bound of the norms of all keys, which is trusted: a number, or a ``[batch,
      num_kv_heads]`` tensor. With it the call need not read all keys to measure them, which can take longer than it
      saves when there are few queries.
    - ``dropout``: Probability of zeroing a weight; the other weights are divided by ``1 - dropout``. It applies in
      every call, so pass 0 outside of training. Random numbers come from PyTorch's global generator. Only ``"dense"``
      supports dropout, ``added_bias`` and ``return_weights``; it is then the default.
    - ``implementation``: ``"tiled"`` (CPU), ``"flex"`` (FlexAttention, for CUDA), ``"sdpa"``
      (``scaled_dot_product_attention`` with the bias as its mask), ``"dense"`` (all scores in memory, for comparison)
      or ``"triton"`` (own kernels for CUDA and ROCm, never run on a GPU). A named implementation runs, or the call
      raises. Default: see :func:`explain`.
    - ``kernel_options``: With ``implementation="flex"``, FlexAttention's argument of that name, such as ``{"BACKEND":
      "FLASH"}`` for FlashAttention 4 (never run).

    Returns:
        ``[batch, num_heads, q_len, head_dim]``, with the dtype and device of ``query``; with ``return_weights``, the
        pair of this tensor and the weights.

    Raises:
        TypeError: If an argument is of the wrong kind, or dtypes or array libraries are mixed.
        ValueError: If a value, shape or device is wrong.
        NotImplementedError: If ``implementation`` cannot run the call; the message names implementations that can.

    Example:
        >>> query, key, value = torch.randn(3, 2, 8, 5, 16).unbind()
        >>> attention(query, key, value).shape
        torch.Size([2, 8, 5, 16])

    References:
        Press, Smith, Lewis, "Train Short, Test Long", section 3, arXiv 2108.12409.
    """
    if implementation is not None:
        one_of("implementation", implementation, IMPLEMENTATIONS)
    if kernel_options is not None and implementation != "flex":
        raise ValueError(f"kernel_options must be None without implementation='flex', got {kernel_options}")
    query, key, value = autocasted(query, key, value)
    call = checked(
        query,
        key,
        value,
        slopes,
        is_causal=is_causal,
        future_slopes=future_slopes,
        log_gates=log_gates,
        sinks=sinks,
        q_offset=q_offset,
        segment_ids=segment_ids,
        window_size=window_size,
        mask=mask,
        positions=fixed_positions(positions, without_gradient),
        distance=distance,
        law=law,
        scale=scale,
        tolerance=tolerance,
        added_bias=added_bias,
        dropout=dropout,
        return_weights=return_weights,
        allow_negative_slopes=allow_negative_slopes,
    )
    norms = None if max_key_norm is None else norms_of(call, max_key_norm)
    return run(call, query, key, value, implementation, norms, kernel_options)


def checked(
    query: Tensor, key: Tensor, value: Tensor, slopes: int | Tensor | None, *, used: int | None = None, **arguments: Any
) -> AttentionCall:
    """Return ``AttentionCall.check`` of these arguments; checks of shapes and plain numbers are cached.

    If ``used`` is given, only the first ``used`` keys count; the last of them is at the last query's position.
    """
    tensors = query, key, value
    arrays = tensors if slopes is None else (*tensors, slopes)
    is_plain = all(type(x) in PLAIN for x in arguments.values()) and not is_watched(*arrays)
    is_plain = is_plain and not any(is_special(x, query.device) for x in arrays)
    if slopes is not None:
        is_plain = is_plain and slopes.is_floating_point() and query.ndim > 2 and slopes.shape == query.shape[-3:-2]
    # The cached path below needs plain tensors and Python numbers; everything else is validated in full.
    if not is_plain:
        key, value = (x if used is None else x[:, :, :used] for x in (key, value))
        return AttentionCall.check(query, key, value, slopes, **arguments, xp=xp)
    names = tuple(arguments)
    sizes = query.shape, query.dtype, key.shape, key.dtype, value.shape, value.dtype
    call = _of_sizes(query.device, names, *sizes, *arguments.values())
    changed: dict[str, Any] = {} if used is None else {"kv_len": used, "q_offset": used - call.q_len}
    if slopes is not None:
        # Cheap test for the common case of slopes in [0, 1]; otherwise the full check, which raises.
        if slopes.requires_grad or not slopes.is_cpu or not all(0 <= x <= 1 for x in slopes.flatten().tolist()):
            may_be_negative = arguments.get("allow_negative_slopes", False)
            checks.slopes_values("slopes", slopes, working=call.working_dtype, allow_negative=may_be_negative)
        changed["slopes"] = slopes.to(call.working_dtype)
    return call.having(**changed) if changed else call


def is_special(tensor: Any, device: torch.device) -> bool:
    """Whether an argument is no plain, dense tensor on this device."""
    is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided and not tensor.is_nested
    return not is_plain or tensor.device != device


@functools.lru_cache(maxsize=256, typed=True)
def _of_sizes(device: torch.device, names: tuple[str, ...], *sizes: Any) -> AttentionCall:
    """Return the checked call for shapes and dtypes, ``sizes[:6]``, and values of the arguments ``names``, the rest."""
    rules = dict(zip(names, sizes[6:], strict=True))
    with torch.inference_mode(False), torch.no_grad():  # calls with gradients share these slopes
        tensors = [torch.empty(sizes[i], dtype=sizes[i + 1], device="meta") for i in (0, 2, 4)]
        call = AttentionCall.check(*tensors, **rules, xp=xp)
        slopes = canonical(call.num_heads, xp=xp, dtype=call.working_dtype, device=device)
        return call.having(device=device, slopes=slopes)


def run(
    call: AttentionCall,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    implementation: str | None,
    norms: KeyNorms | None,
    kernel_options: dict[str, Any] | None = None,
) -> Tensor:
    """Compute a checked call by ``implementation``, or by default the first that can run it."""
    implementation = choose(call, query, key, value, implementation)
    if call.is_empty:  # no elements, but the result stays connected to the autograd graph
        return dense_attention(call, query, key, value)
    # Autocast would round the bias to low precision. The inputs have been cast already.
    with no_autocast(query.device.type):
        if implementation in ("tiled", "triton"):
            return _cpu.attention(call, query, key, value, norms, implementation)
        if implementation == "flex":
            from alibi_torch._flex import flex_attention

            return flex_attention(call, query, key, value, norms, kernel_options)
        if implementation == "dense":
            return dense_attention(call, query, key, value, drop=lambda weights: F.dropout(weights, call.dropout))
        return sdpa(call, query, key, value)


def norms_of(call: AttentionCall, max_key_norm: float | Tensor) -> KeyNorms:
    """Validate ``max_key_norm`` and return it as :class:`KeyNorms`: one block of keys."""
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
