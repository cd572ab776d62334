"""Folding: causal ALiBi as additional features of query and key, for attention kernels that take no bias.

Softmax ignores a constant along a row, so under a causal mask ``slope * (j - c)`` may replace ``-slope * (i - j)``: a
number of the head times a number of the key. Both have more digits than a feature holds in low precision, so each is a
sum of *limbs* that fit. One feature holds one pair of limbs.
"""

from __future__ import annotations

from typing import Any

from alibi_core._arrays import FLOATING, Array, DType, arange, astype, brief, checks, floating_name, host_values
from alibi_core._bias import slopes_of_any_sign
from alibi_core._call import AttentionCall
from alibi_core._contracts import power_below

LARGEST_EXPONENT = 63  # of slope / scale, as a power of two


def fold(
    query: Array,
    key: Array,
    slopes: int | Array | None = None,
    *,
    scale: float | None = None,
    head_dim: int | None = None,
) -> tuple[Any, Any]:
    """Return query and key with features appended, so that a causal kernel that takes no bias computes ALiBi.

    Scores of the returned pair are ``scale * query @ key.T + slopes * (j - c)`` for key ``j``; softmax under a causal
    mask ignores ``c``. Give the kernel the ``scale`` used here, not the default for the new size, and an unchanged
    value. Features are exact in their dtype, with the same bits in every library. Symmetric attention cannot be folded.

    Args:
        query: ``[..., num_heads, q_len, d]`` of float16, bfloat16, float32 or float64.
        key: ``[..., num_kv_heads, kv_len, d]`` of the same dtype. ``num_kv_heads`` divides ``num_heads``.
        slopes: ``[..., num_heads]``, of any sign, or as in :func:`attention`. In float16 at most 255 times the scale;
            below ``2**-16`` times the scale, their last digits are lost.
        scale: Factor of the scores, not 0. Default ``d ** -0.5``.
        head_dim: Features to pad to with zeros. Default ``d + fold_size(kv_len, dtype)``, no padding.

    Returns:
        Both, with ``head_dim`` features. Gradients by query, key and slopes equal those of attention with a bias.

    Raises:
        TypeError, ValueError: As :func:`attention`; or if ``head_dim`` or, in float16, ``kv_len`` does not fit.

    Example:
        >>> import numpy as np
        >>> query, key = fold(np.ones((1, 3, 1)), np.ones((1, 3, 1)), np.asarray([2.0]))
        >>> (query @ np.swapaxes(key, 1, 2))[0].tolist()
        [[-1.0, 1.0, 3.0], [-1.0, 1.0, 3.0], [-1.0, 1.0, 3.0]]

    References:
        Wu et al., "FlashBias", arXiv 2505.12044, for biases of low rank as features.
    """
    call = AttentionCall.check(query, key, key, slopes, scale=scale, allow_negative_slopes=True)
    if call.scale == 0:
        raise ValueError("scale must not be 0 (slopes are divided by it), got 0")
    bits, rate_limbs, position_limbs = _limbs(call.kv_len, call.dtype)
    size = call.head_dim + rate_limbs * position_limbs
    head_dim = size if head_dim is None else checks.size("head_dim", head_dim)
    if head_dim < size:
        raise ValueError(f"head_dim must be at least {size}, those of query and of positions, got {head_dim}")
    # A pair of limbs needs the factor 2**((bits + 1) * (j - i)), split between key and query. The key takes 2**-14 to
    # 2**4 of it, within float16's normal numbers; the query takes the rest, at best 2**4, for rates from 2**-16 to 255.
    pairs = [(i, j, (bits + 1) * (j - i)) for i in range(rate_limbs) for j in range(position_limbs)]
    of_key = [min(max(power - 4, -14), 4) for *_, power in pairs]
    of_query = [power - own for (*_, power), own in zip(pairs, of_key, strict=True)]
    limit = (
        FLOATING["float16"].largest / 2 ** max(of_query) if bits == FLOATING["float16"].bits else 2.0**LARGEST_EXPONENT
    )
    limit, values = limit * abs(call.scale), host_values(call.slopes)
    if values is not None and values.size and abs(values).max() > limit:
        raise ValueError(f"slopes must be at most {limit:.4g} in size to be folded in {call.dtype}, got {values}")
    # The kernel multiplies by the scale, so slopes are divided by it.
    rates = _split_rates(call, call.slopes * (1 / call.scale), bits, rate_limbs)
    digits = _split_positions(call, bits, position_limbs)
    # A feature for each pair of limbs: [..., num_heads, 1] for queries, [kv_len] for keys
    for_query = [rates[i][..., None] * 2.0**x for (i, *_), x in zip(pairs, of_query, strict=True)]
    for_key = [digits[j] * 2.0**x for (_, j, _), x in zip(pairs, of_key, strict=True)]
    return _append(call, query, for_query, head_dim - size), _append(call, key, for_key, head_dim - size)


def fold_size(kv_len: int, dtype: DType) -> int:
    """Return the number of features that :func:`fold` appends.

    Example:
        >>> fold_size(4096, "bfloat16"), fold_size(2048, "float16"), fold_size(4096, "float32")
        (6, 3, 1)
    """
    _, rate_limbs, position_limbs = _limbs(kv_len, dtype)
    return rate_limbs * position_limbs


def fold_error_bound(slopes: int | Array, kv_len: int, *, head_dim: int, dtype: DType, q_len: int | None = None) -> Any:
    """Return an upper bound of the error that folding adds to a scaled score, one a head.

    It holds for any data, and for a kernel that adds products in float32 in any order; docs/bias.md derives it. The
    rounding error of ``query @ key`` itself comes on top, and in float16 that of slopes other than 0 below ``2**-16``
    times the scale. The result has the shape, library and device of ``slopes``.

    Args:
        slopes: ``[..., num_heads]``, or an int for that many canonical slopes.
        kv_len: Number of keys, in tokens.
        head_dim: Features of query and key before folding.
        dtype: Floating dtype of query and key, of any library, or its name.
        q_len: Number of queries. Default: any. With as many queries as keys the bound is half as large.

    Example:
        >>> bound = fold_error_bound(8, 4096, head_dim=64, dtype="bfloat16", q_len=4096)  # slopes 2**-1 ... 2**-8
        >>> [f"{x:.1e}" for x in bound.tolist()]
        ['5.7e-03', '2.8e-03', '1.4e-03', '7.1e-04', '3.6e-04', '1.8e-04', '8.9e-05', '4.4e-05']
    """
    head_dim, (bits, rates, limbs) = checks.size("head_dim", head_dim), _limbs(kv_len, dtype)
    kv_len = int(kv_len)  # of NumPy's integers, small ones would wrap
    xp, placed = slopes_of_any_sign(slopes)
    centre = _centre(1 if q_len is None else checks.non_negative_int("q_len", q_len), kv_len)
    farthest = max(centre, kv_len - 1 - centre)  # the largest |j - c|
    lower_limbs = sum(2 ** (bits + (bits + 1) * j) for j in range(limbs - 1))
    sizes = (1 + 2.0 ** (2 - bits)) * (farthest + 2 * lower_limbs)
    additions, multiplications = head_dim + rates * limbs - 1, 2 + (bits >= 24)
    bound = ((additions + multiplications) * sizes + 3 * farthest) * (2.0**-53 if bits == 53 else 2.0**-24)
    return xp.abs(placed) * (bound * (1 + 2.0**-16))  # covers terms of second order and this line's rounding


def _limbs(kv_len: int, dtype: DType) -> tuple[int, int, int]:
    """Return the bits of a limb, the number of limbs of a rate, and of any position of size below ``kv_len``."""
    name, kv_len = floating_name(dtype), checks.non_negative_int("kv_len", kv_len)
    if name is None:
        raise TypeError(f"dtype must be one of {', '.join(FLOATING)}, got {brief(dtype)}")
    checks.positions_fit(0, 0, kv_len)
    bits, limbs, largest = FLOATING[name].bits, 1, kv_len - 1
    # One limb holds integers up to 2**bits; each further limb adds bits + 1 bits.
    while largest > 2**bits:
        limbs, largest = limbs + 1, (largest + 2**bits) >> (bits + 1)
    if name == "float16" and limbs > 2:  # the first of three limbs would overflow
        raise ValueError(f"kv_len must be at most 8390656 to be folded in float16, got {kv_len}; bfloat16 has no limit")
    # A float32 slope of 24 bits takes three limbs: 8 + 9 + 9 bits suffice in bfloat16, 11 + 12 do not in float16.
    return bits, 1 if bits >= 24 else 3, limbs


def _centre(q_len: int, kv_len: int) -> int:
    """Return the position ``c`` to count from, in the middle of the queries: sums are small where the weight is."""
    return max(kv_len - 1 - min(q_len, kv_len) // 2, 0)


def _split_rates(call: AttentionCall, rates: Any, bits: int, count: int) -> list[Any]:
    """Return limbs of ``rates``, limb ``i`` scaled by ``2**((bits + 1) * i)``; their sum has the gradient of ``rates``.

    Limbs are made by ``round``, because compilers may remove a cast to the dtype and back. The gradient of ``round`` is
    zero in all libraries, so the remainder, which is 0, carries the gradient and is added to the first limb.
    """
    if count == 1:
        return [rates]
    xp = call.xp
    power, inverse = power_below(xp, rates, range(-LARGEST_EXPONENT, LARGEST_EXPONENT + 1))
    unit = power * 2.0 ** (1 - bits)  # value of the last bit of the first limb
    limbs, rest = [], rates * inverse * 2.0 ** (bits - 1)  # 2**(bits - 1) <= rest < 2**bits
    for _ in range(count):
        digit = xp.round(rest)
        limbs.append(digit * unit)
        rest = (rest - digit) * 2.0 ** (bits + 1)  # -2**bits <= rest <= 2**bits
    limbs[0] = limbs[0] + rest * unit * 2.0 ** (-(bits + 1) * count)
    return limbs


def _split_positions(call: AttentionCall, bits: int, count: int) -> list[Any]:
    """Return limbs of ``j - c``, integers from ``-2**bits`` to ``2**bits``, ``[kv_len]`` each, lowest first."""
    limbs, rest = [], arange(call.xp, call.kv_len, call.device) - _centre(call.q_len, call.kv_len)
    for _ in range(count - 1):
        higher = (rest + 2**bits) >> (bits + 1)
        limbs.append(rest - (higher << (bits + 1)))
        rest = higher
    return [astype(call.xp, x, call.working_dtype) for x in (*limbs, rest)]


def _append(call: AttentionCall, tensor: Any, features: list[Any], padding: int) -> Any:
    """Return ``tensor`` with ``features``, and ``padding`` zeros, appended along the last axis."""
    xp, stacked = call.xp, call.xp.stack(features + [call.xp.zeros_like(features[0])] * padding, axis=-1)
    # Broadcast before the cast: the gradient of a broadcast is a sum over all tokens, which needs float32.
    stacked = xp.broadcast_to(stacked, (*tensor.shape[:-1], stacked.shape[-1]))
    return xp.concat([tensor, astype(xp, stacked, call.dtype)], axis=-1)
