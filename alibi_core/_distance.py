"""The distance between two tokens, on a line or in space, and the law by which a bias grows with it.

``bias = -slope * law(distance(q_position, kv_position))``. The functions here return *relative positions*, key minus
query: the absolute value is the distance, the sign the direction. Points in space have no order, and their relative
position is minus the distance: a key in space is never after the query.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from alibi_core._arrays import (
    DType,
    Namespace,
    astype,
    at_least,
    checks,
    has_float64,
    host_values,
    is_kind,
    lacks_64_bits,
)

DISTANCES = ("manhattan", "euclidean", "chebyshev")
LAWS = ("linear", "log", "sqrt")
FARTHEST_POINT = 2.0**62  # From here on, squares of distances overflow float32, and 0 * inf and inf - inf are NaN.


def penalty(xp: Namespace, distance: Any, law: str) -> Any:
    """Return ``law(distance)``: d, ``log(1 + d)`` or ``sqrt(d)``. The last two take floats only."""
    if law == "linear":
        return distance
    return xp.log1p(distance) if law == "log" else xp.sqrt(distance)


def penalty_beyond(xp: Namespace, beyond: Any, nearest: Any, law: str) -> Any:
    """Return ``law(nearest + beyond) - law(nearest)``, with the digits of ``beyond`` however large ``nearest`` is.

    A key nearer than ``nearest``, which must be masked, gets any finite number.
    """
    if law == "linear":
        return beyond
    if law == "log":
        return xp.log1p(at_least(xp, beyond / (1 + nearest), -0.5))
    roots = xp.sqrt(at_least(xp, nearest + beyond, 0.0)) + xp.sqrt(nearest)
    return beyond / xp.where(roots > 0, roots, 1.0)


def distance_of_tail(xp: Namespace, slopes: Any, weight: Any, law: str) -> Any:
    """Return the distance from which on ``exp(weight - slope * law(d))`` sums to at most 1 over whole d; inf if never.

    The terms are convex in d, so the sum from n on is at most their integral I from x = n - 1/2 on::

        "log"    I = exp(weight) * (1 + x) ** (1 - slope) / (slope - 1), for slopes above 1
        "sqrt"   I = exp(weight) * exp(-y) * 2 * (1 + y) / slope**2, where y = slope * sqrt(x)
    """
    cover = 1 + 2.0**-20  # covers rounding
    falls = slopes > (1 if law == "log" else 0)
    rates = xp.where(falls, slopes, 2.0)
    if law == "log":
        power = (weight - xp.log(rates - 1)) / (rates - 1) * cover
        falls = falls & (power < 64)  # beyond that, say inf: float32 ends at exp(88)
        x = xp.expm1(xp.where(falls, power, 0.0))
    else:
        # Solve y = constant + log(1 + y) from above, from 2 * constant + 2 on: log(1 + y) <= y / 2 + 1. Each step comes
        # nearer and stays above, because the right side is concave and increases.
        constant = weight + xp.log(2 / rates) - xp.log(rates)
        y = at_least(xp, 2 * constant + 2, 0.0)
        for _ in range(32):
            y = at_least(xp, constant + xp.log1p(y), 0.0)
        falls = falls & (y / rates < 2**30)
        x = xp.where(falls, y / rates * cover, 0.0) ** 2
    return xp.where(falls, at_least(xp, xp.ceil(x * cover + 0.5), 1.0), math.inf)


def check_positions(xp: Namespace, name: str, positions: Any) -> Any:
    """Check that positions are integers, or floats whose squared distances fit float32, if values can be read."""
    dtype = checks.array(name, positions).dtype
    if is_kind(xp, dtype, "integral"):
        return positions
    if not is_kind(xp, dtype, "real floating"):
        raise TypeError(f"{name} must have an integer or a real floating dtype, got {dtype}")
    values = host_values(positions)
    if values is not None and np.any(np.abs(values) > FARTHEST_POINT):
        largest = np.nanmax(np.abs(values))
        raise ValueError(
            f"{name} must be finite and at most 2**62 in size, or NaN for a token without a position, got {largest:.4g}"
        )
    return positions


def fixed_positions(positions: Any, fix: Callable[[Any], Any]) -> Any:
    """Return positions, one array or a pair, with ``fix`` applied to each array; a pair of one array stays one."""
    if not isinstance(positions, (tuple, list)):
        return fix(positions)
    fixed = {id(x): fix(x) for x in positions}
    return tuple(fixed[id(x)] for x in positions)


def no_gradient(remedy: str) -> NotImplementedError:
    """Return the error of a call that asks for derivatives by positions."""
    return NotImplementedError(
        f"positions must be constants, as attention has no derivatives by them, got some with a gradient; use {remedy}"
    )


def as_points(
    q_positions: Any, kv_positions: Any, distance: str | None, is_causal: bool, future_slopes: Any | None
) -> tuple[Any, Any]:
    """Return positions as points, ``[..., length, dims]``. Positions on a line have ``dims == 1``.

    Positions are on a line if ``distance`` is None, or if both arrays have one axis.
    """
    if distance is not None:
        checks.one_of("distance", distance, DISTANCES)
    if distance is None or q_positions.ndim == kv_positions.ndim == 1:
        return q_positions[..., None], kv_positions[..., None]
    for name, positions in (("q_positions", q_positions), ("kv_positions", kv_positions)):
        if positions.ndim < 2 or positions.shape[-1] < 1:
            raise ValueError(f"{name} must have axes [..., length, dims] with distance=, got {tuple(positions.shape)}")
    check_dims(q_positions, kv_positions, is_causal, future_slopes)
    return q_positions, kv_positions


def points_of_call(xp: Namespace, positions: Any, batch: tuple[int, ...], name: str, length: int) -> Any:
    """Return positions as ``[..., length, dims]``, given ``[..., length]`` or ``[..., length, dims]``.

    Leading axes broadcast to ``batch``; ``name`` is that of the length, ``"q_len"`` or ``"kv_len"``.
    """
    shape = tuple(check_positions(xp, "positions", positions).shape)
    axes = ", ".join([*(["batch"] if batch else []), name])
    # Shapes that fit both readings are refused: [batch, length] or [length, dims]. A single position reads alike.
    on_line = shape[-1:] == (length,) and checks.broadcasts(shape[:-1], batch)
    in_space = shape[-2:-1] == (length,) and shape[-1] > 0 and checks.broadcasts(shape[:-2], batch)
    if on_line and in_space and any(size > 1 for size in shape):
        raise ValueError(
            f"positions must have axes that cannot be mistaken, got {shape} for {length} tokens; use positions[..., "
            f"None] if they are [{axes}], or positions[None] if they are [{name}, dims]"
        )
    if not (on_line or in_space):
        raise ValueError(f"positions must have axes [{axes}] or [{axes}, dims], here {(*batch, length)}, got {shape}")
    return positions[..., None] if on_line else positions


def check_dims(q_points: Any, kv_points: Any, is_causal: bool, future_slopes: Any | None) -> None:
    """Check that points of queries and keys have as many dimensions, without causality and future slopes if several."""
    dims, of_keys = q_points.shape[-1], kv_points.shape[-1]
    if dims != of_keys:
        raise ValueError(
            f"positions of queries and keys must have as many dims, got {dims} (queries) and {of_keys} (keys)"
        )
    if dims == 1:
        return
    if is_causal:
        raise ValueError(f"is_causal must be False for positions with {dims} dims, which have no order, got True")
    if future_slopes is not None:
        raise ValueError(f"future_slopes must be None for positions with {dims} dims, which have no order")


def may_have_nan(xp: Namespace, points: Any) -> bool:
    """Whether points may contain NaN, a token without a position; True if values cannot be read."""
    if is_kind(xp, points.dtype, "integral"):
        return False
    values = host_values(points)
    return values is None or bool(np.any(np.isnan(values)))


def relative_points(
    xp: Namespace,
    q_points: Any,
    kv_points: Any,
    distance: str,
    dtype: DType,
    may_have_nan: bool = True,
    *,
    with_rest: bool = False,
) -> tuple[Any, Any | None]:
    """Return relative positions, ``[..., q_len, kv_len]``: integers for integers, except Euclidean ones in space.

    Points are ``[..., length, dims]``; on a line (``dims == 1``) all distances are the same. Floating ones are computed
    in ``dtype``, or in float64 if a point is float64. A token without a position, which has NaN in a dimension, has the
    relative position 0 to every token.

    With ``with_rest``, they are computed in float64 where the library has it, and the second result is the part of each
    distance that rounding took: the distance is ``|relative| + rest``. None stands for nothing, and for Euclidean
    distances in space, whose squares would need twice the digits.
    """
    dims, rest = q_points.shape[-1], None
    is_wide = with_rest and has_float64(xp)
    # Do not lose digits of float64 positions.
    if is_wide or any("float64" in str(x.dtype) for x in (q_points, kv_points)):
        dtype, is_wide = xp.float64, True
    is_wide = is_wide or (_are_whole(xp, q_points, kv_points) and not lacks_64_bits(xp))
    # One dimension at a time: no array [q_len, kv_len, dims] is allocated.
    pairs = [(xp, q_points[..., d], kv_points[..., d], dtype) for d in range(dims)]
    if with_rest and not is_wide and (dims == 1 or distance != "euclidean"):
        steps = [exact_sum(*_addends(*pair)) for pair in pairs]
        sizes = [(xp.abs(step), xp.where(step < 0, -lost, lost)) for step, lost in steps]
        size, rest = functools.reduce(functools.partial(_combined, xp, distance), sizes)
        relative = steps[0][0] if dims == 1 else 0 - size
    else:
        relative = relative_position(xp, [relative_on_line(*pair) for pair in pairs], distance, dtype)
    if not may_have_nan or is_kind(xp, relative.dtype, "integral"):
        return relative, rest
    relative, rest = (
        None if x is None else xp.where(xp.isnan(relative), xp.zeros_like(x), x) for x in (relative, rest)
    )
    return relative, rest


def exact_sum(one: Any, other: Any) -> tuple[Any, Any]:
    """Return the rounded sum of two floating arrays, and the rest (Knuth's TwoSum)."""
    total = one + other
    part = total - one
    return total, (one - (total - part)) + (other - part)


def _combined(xp: Namespace, distance: str, one: tuple[Any, Any], other: tuple[Any, Any]) -> tuple[Any, Any]:
    """Return the sum, or for ``"chebyshev"`` the maximum, of two numbers that are pairs of a rounded one and a rest."""
    if distance == "manhattan":
        total, rest = exact_sum(one[0], other[0])
        return total, rest + one[1] + other[1]
    is_first = xp.logical_or(one[0] > other[0], xp.logical_and(one[0] == other[0], one[1] > other[1]))
    return xp.maximum(one[0], other[0]), xp.where(is_first, one[1], other[1])


def relative_on_line(xp: Namespace, q_positions: Any, kv_positions: Any, dtype: DType) -> Any:
    """Return ``kv_positions[j] - q_positions[i]``, ``[..., q_len, kv_len]``.

    For 32-bit integers the result is int64, so that it cannot wrap. In JAX without 64-bit types it is float32, rounded
    once, so its sign is right. If either array is floating, the result has ``dtype``.
    """
    if _are_whole(xp, q_positions, kv_positions) and not lacks_64_bits(xp):
        return difference(astype(xp, q_positions, xp.int64), astype(xp, kv_positions, xp.int64))
    return operator.add(*_addends(xp, q_positions, kv_positions, dtype))


def _addends(xp: Namespace, q_positions: Any, kv_positions: Any, dtype: DType) -> tuple[Any, Any]:
    """Return two floating arrays whose sum, ``[..., q_len, kv_len]``, is the difference of positions.

    Integers of at most 32 bits are split into 16-bit halves, whose differences float32 holds exactly.
    """
    if not _are_whole(xp, q_positions, kv_positions):
        return astype(xp, kv_positions, dtype)[..., None, :], -astype(xp, q_positions, dtype)[..., :, None]
    high, low = (
        difference(astype(xp, q, xp.float32), astype(xp, kv, xp.float32))
        for q, kv in zip(_halves(xp, q_positions), _halves(xp, kv_positions), strict=True)
    )
    return high * 2.0**16, low


def _are_whole(xp: Namespace, *positions: Any) -> bool:
    return all(is_kind(xp, x.dtype, "integral") for x in positions)


def relative_position(xp: Namespace, steps: list[Any], distance: str, dtype: DType) -> Any:
    """Return the relative position, NaN if a difference is, from those along each dimension, key minus query."""
    if len(steps) == 1:
        return steps[0]
    # Squares of integers may overflow: compute in floating point.
    if distance == "euclidean":
        steps = [astype(xp, step, dtype) if is_kind(xp, step.dtype, "integral") else step for step in steps]
        return 0 - xp.sqrt(functools.reduce(operator.add, [step * step for step in steps]))
    combine = operator.add if distance == "manhattan" else xp.maximum
    return 0 - functools.reduce(combine, [xp.abs(step) for step in steps])


def difference(q_positions: Any, kv_positions: Any) -> Any:
    """Return ``kv_positions[j] - q_positions[i]``, ``[..., q_len, kv_len]``: negative for keys before the query."""
    return kv_positions[..., None, :] - q_positions[..., :, None]


def _halves(xp: Namespace, positions: Any) -> tuple[Any, Any]:
    """Return the upper and the lower 16 bits of integers with at most 32 bits."""
    wide = positions if positions.dtype == xp.uint32 else astype(xp, positions, xp.int32)
    return wide >> 16, wide & 0xFFFF
