"""Forget gates: a bias that data decides, the sum of the gates between key and query.

``bias[i, j]`` is the sum of ``log_gates[j + 1]`` to ``log_gates[i]``. A difference of running sums would lose the
digits of near keys, so every sum here has only terms of one sign: no sum is subtracted from another.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

from alibi_core._arrays import (
    Array,
    DType,
    Namespace,
    along_axis,
    arange,
    asarray,
    astype,
    at_least,
    at_most,
    checks,
    device_of,
    explains_keywords,
    has_float64,
    host_values,
    in_doubling_steps,
    is_exporting,
    joined,
    namespace_of,
    narrowed,
    running_sum,
    stop_gradient,
)
from alibi_core._bias import working_dtype
from alibi_core._distance import difference, exact_sum

LOWEST = -(2.0**96)  # Lower gates count as this one: sums of 2**31 of them are finite in float32.


@explains_keywords
def bias_from_gates(log_gates: Array, q_len: int | None = None, *, dtype: DType | None = None) -> Any:
    """Return the bias of forget gates: the sum of ``log_gates[h, j + 1]`` to ``log_gates[h, i]``, -inf where masked.

    The gate of a token says how much the token forgets of all tokens before it. The last query is at the last key. The
    gates -1, -2 and -4, of two queries over three keys::

        -2    0  -inf
        -6   -4     0

    A constant gate ``-slope`` gives ALiBi. A gate of -inf is closed: its token and all after it see no token before it.

    Args:
        log_gates: ``[..., num_heads, kv_len]``, logarithms of gates, at most 0: ``log_sigmoid`` of logits. Values of
            traced arrays, and of arrays on an accelerator, are not checked.
        q_len: Number of queries, in tokens. Default ``kv_len``.
        dtype: Floating dtype of the result, or its name. Default: the dtype of ``log_gates``.

    Returns:
        ``[..., num_heads, q_len, kv_len]`` array. Each number is within two units in the last place of the exact sum
        (of gates down to -7e28), in every array library and for any number of gates.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If a length is negative, or a gate is NaN or above 0.

    Example:
        >>> import numpy as np
        >>> bias_from_gates(np.array([[-1.0, -2.0, -4.0]]), 2).tolist()
        [[[-2.0, 0.0, -inf], [-6.0, -4.0, 0.0]]]

    References:
        Lin, Nikishin, He, Courville, "Forgetting Transformer", section 3, arXiv 2503.02130.
    """
    xp = namespace_of(checks.array("log_gates", log_gates))
    if checks.floating_array(xp, "log_gates", log_gates).ndim < 2:
        raise ValueError(f"log_gates must have axes [..., num_heads, kv_len], got shape {tuple(log_gates.shape)}")
    kv_len = log_gates.shape[-1]
    q_len = kv_len if q_len is None else checks.non_negative_int("q_len", q_len)
    dtype = checks.floating_dtype(xp, "dtype", log_gates.dtype if dtype is None else dtype)
    working = working_dtype(xp, dtype if working_dtype(xp, log_gates.dtype) == xp.float32 else log_gates.dtype)
    gates = checked_gates(xp, astype(xp, log_gates, working))
    device = device_of(xp, gates)
    queries, keys = arange(xp, q_len, device) + (kv_len - q_len), arange(xp, kv_len, device)
    if kv_len == 0:
        return astype(xp, gates[..., None, :] + astype(xp, queries[:, None], working), dtype)
    origins = within(xp, queries, kv_len)
    visible = xp.logical_and(difference(queries, keys) <= 0, sees_through(xp, gates, origins))
    return narrowed(xp, xp.where(visible, gate_sums(xp, gates, origins), -math.inf), dtype)


def checked_gates(xp: Namespace, log_gates: Any) -> Any:
    """Return gates, having checked that they are at most 0 where reading that does not make the host wait."""
    is_right = host_values(xp.all(log_gates <= 0))
    if is_right is not None and not is_right:
        raise ValueError(
            "log_gates must be numbers at most 0, the logarithms of gates, got NaN or numbers above 0; log_sigmoid of "
            "logits gives such numbers"
        )
    return log_gates


def within(xp: Namespace, positions: Any, kv_len: int) -> Any:
    """Return positions, moved to the nearest key where there is none."""
    return at_least(xp, at_most(xp, positions, kv_len - 1), 0)


def sees_through(xp: Namespace, log_gates: Any, origins: Any) -> Any:
    """Return whether no closed gate lies after a key, up to its row's origin: ``[..., num_heads, rows, kv_len]``.

    ``origins``, ``[rows]`` or ``[..., num_heads or 1, rows]``, are indices of keys. Keys after an origin get any value.
    """
    # Closed gates are counted, because differences of infinite sums would be NaN.
    count = running_sum(xp, astype(xp, log_gates == -math.inf, xp.int32))
    return along_axis(xp, count, origins, -1)[..., :, None] == count[..., None, :]


class GateTotals(NamedTuple):
    """The gates after each key, ``[..., num_heads, kv_len]``: their sum, a number and its rest, and closed ones before.

    A difference of two sums is precise as a term of a score, but not to its last digit.
    """

    sums: Any
    rests: Any
    closed: Any

    @classmethod
    def of(cls, xp: Namespace, log_gates: Any) -> GateTotals:
        sums, rests = (_beyond(xp, x) for x in suffix_sums(xp, finite_gates(xp, log_gates)))
        return cls(sums, rests, running_sum(xp, astype(xp, log_gates == -math.inf, xp.int32)))

    def bounds(self, xp: Namespace, origins: Any, keys: Any) -> Any:
        """Return upper bounds of the sums from these keys, ``[n]``, to origins: ``[..., num_heads, rows, n]``.

        Keys behind a closed gate have -inf, keys after an origin a number above 0.
        """
        of_keys, of_origins = ([along_axis(xp, x, at, -1) for x in self] for at in (keys, origins))
        sums, rests, closed = (x[..., None, :] - y[..., :, None] for x, y in zip(of_keys, of_origins, strict=True))
        # Each of the additions may round by 2**-53, or by less than 2**-46 in all where sums are float32.
        margin = xp.max(xp.abs(self.sums), axis=-1)[..., None, None] * ((self.sums.shape[-1] + 16) * 2.0**-50)
        return xp.where(closed >= 0, (sums + rests) * (1 - 2.0**-20) + margin, -math.inf)


def gate_sums(xp: Namespace, log_gates: Any, origins: Any) -> Any:
    """Return the sums of the gates after each key up to a row's origin, ``[..., num_heads, rows, kv_len]``.

    They are 0 from the origin on. ``log_gates`` are ``[..., num_heads, kv_len]``; closed gates count as 0. ``origins``,
    ``[rows]`` or ``[..., num_heads or 1, rows]``, are indices of keys.

    Keys are summed in blocks. A sum has three terms: the gates up to the end of the key's block, whole blocks, and the
    gates of the origin's block. Each is a number and a rest until the last addition, so only three roundings are left.
    """
    lead, kv_len, device, rows = log_gates.shape[:-1], log_gates.shape[-1], device_of(xp, log_gates), origins.shape[-1]
    gates = finite_gates(xp, log_gates)
    # About as many blocks as keys in a block; one block where sizes are symbols, which no loop can count.
    block = kv_len if is_exporting() else 2 ** (((checks.known("kv_len", kv_len) - 1).bit_length() + 1) // 2)
    count = 1 if is_exporting() else -(-kv_len // block)
    if not is_exporting() and count * block > kv_len:
        zeros = xp.broadcast_to(asarray(xp, 0.0, gates.dtype, device), (*lead, count * block - kv_len))
        gates = joined(xp, gates, zeros)
    blocks = xp.reshape(gates, (*lead, count, block))
    of_origin, place = origins // block, origins % block  # the origin's block, and its place there
    # The gates of the origin's block, up to the origin: [..., num_heads, rows, block]
    is_before = arange(xp, block, device) <= place[..., None]
    own = suffix_sums(
        xp,
        xp.where(
            is_before, along_axis(xp, blocks, of_origin if of_origin.ndim == 1 else of_origin[..., None], -2), 0.0
        ),
    )
    inside = _beyond(xp, own[0])
    if is_exporting() or count == 1:
        return inside
    of_blocks = suffix_sums(xp, blocks)  # [..., num_heads, count, block]
    # [rows, count] or [..., num_heads or 1, rows, count]
    index = arange(xp, count, device)
    is_own, is_earlier = index == of_origin[..., None], index < of_origin[..., None]
    # Whole blocks before the origin's, then the gates of the origin's block: [..., num_heads, rows, count]
    parts = [
        xp.where(is_own, mine[..., :1], xp.where(is_earlier, each[..., None, :, 0], 0.0))
        for mine, each in zip(own, of_blocks, strict=True)
    ]
    after = _beyond(xp, suffix_sums(xp, *parts)[0])
    # [..., num_heads, rows, count, block]
    sums = after[..., None] + _beyond(xp, of_blocks[0])[..., None, :, :]
    sums = xp.where(is_earlier[..., None], sums, xp.where(is_own[..., None], inside[..., None, :], 0.0))
    return xp.reshape(sums, (*lead, rows, count * block))[..., :kv_len]


def finite_gates(xp: Namespace, log_gates: Any) -> Any:
    """Return finite gates: 0 for closed ones, which are counted apart."""
    return xp.where(log_gates == -math.inf, 0.0, at_least(xp, log_gates, LOWEST))


def suffix_sums(xp: Namespace, numbers: Any, rests: Any | None = None) -> tuple[Any, Any]:
    """Return the sums from each element to the last one, along the last axis: rounded sums, and their rests.

    ``numbers``, of one sign, are finite, with ``rests`` that rounding took of them.
    """
    if is_exporting() or (has_float64(xp) and numbers.dtype == xp.float32):
        wide = [astype(xp, x, xp.float64) for x in (numbers, rests) if x is not None]
        sums = xp.flip(running_sum(xp, xp.flip(wide[0] if rests is None else wide[0] + wide[1], axis=-1)), axis=-1)
        rounded = astype(xp, sums, numbers.dtype)
        return rounded, astype(xp, sums - rounded, numbers.dtype)
    pair = numbers, xp.zeros_like(numbers) if rests is None else rests
    # After each step, an element has the sum of twice as many.
    found: tuple[Any, Any] = in_doubling_steps(xp, functools.partial(_pair_sum, xp), pair, numbers.shape[-1])
    return found


def _pair_sum(xp: Namespace, one: tuple[Any, Any], other: tuple[Any, Any]) -> tuple[Any, Any]:
    """Return the sum of two numbers, each a rounded one and a rest; rests are constants where gradients are taken."""
    total, rest = exact_sum(one[0], other[0])
    # The derivative of a rest is 0, but as a difference of larger numbers it would be their rounding.
    rest = stop_gradient(xp, rest + (one[1] + other[1]))
    rounded = total + rest
    return rounded, stop_gradient(xp, rest - (rounded - total))


def _beyond(xp: Namespace, sums: Any) -> Any:
    """Return sums from the next element on, from sums from each element on."""
    return joined(xp, sums[..., 1:], xp.zeros_like(sums[..., :1]))
