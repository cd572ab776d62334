"""The bias: ``-slopes * distance``, and -inf where masked."""

from __future__ import annotations

from typing import Any, NamedTuple

from alibi_core._arrays import (
    Array,
    Device,
    DType,
    Namespace,
    adopted,
    arange,
    asarray,
    astype,
    checks,
    device_of,
    explains_keywords,
    has_float64,
    is_kind,
    is_numpy,
    known_device,
    lacks_64_bits,
    namespace_of,
    narrowed,
    signed,
)
from alibi_core._contracts import Contract
from alibi_core._distance import LAWS, as_points, check_positions, difference, penalty, penalty_beyond, relative_points
from alibi_core._slopes import slope_values


@explains_keywords
def bias(
    slopes: int | Array,
    q_len: int,
    kv_len: int | None = None,
    *,
    q_offset: int | None = None,
    is_causal: bool = True,
    future_slopes: Array | None = None,
    allow_negative_slopes: bool = False,
    law: str = "linear",
    contract: str = "exact",
    xp: Namespace | None = None,
    dtype: DType | None = None,
    device: Device | None = None,
) -> Any:
    """Return the ALiBi bias of every query and key: ``-slopes[h] * |q_offset + i - j|``, -inf where masked.

    Three queries over five keys, slope 1, causal (the default offset aligns the last query with the last key)::

        -2   -1    0  -inf -inf
        -3   -2   -1    0  -inf
        -4   -3   -2   -1    0

    and five queries over three keys, where the first two queries are fully masked::

        -inf -inf -inf
        -inf -inf -inf
          0  -inf -inf
         -1    0  -inf
         -2   -1    0

    Distances are integers; the product is computed in float32 (float64 for a float64 result) and rounded once to
    ``dtype``. The same arguments give the same bits in every array library, eager or compiled.

    ``contract`` selects the bias that a family of models was trained with: every finite element is the number that
    ``transformers`` adds to the model's scores, bit for bit where its ``pow`` rounds correctly. PyTorch's vectorised
    ``pow`` does not on every CPU; it moves some float32 slopes of BLOOM and MPT by a unit in the last place, and so
    their bias by up to two.

    - ``"bloom"``: ``slopes[h] * j`` in float32, rounded to ``dtype``, the model's;
    - ``"falcon"``: the same, with slopes, ``j`` and product rounded to bfloat16, then cast to ``dtype``. Divide it, or
      ``slopes``, by ``sqrt(head_dim)`` for scores that are scaled already, as the model divides both;
    - ``"mpt"``: ``slopes[h] * (j - (kv_len - 1))`` in float32, added to scores of any dtype. Padding counts as text;
    - ``"geometric"``: as ``"exact"``, with slopes by the rule of the paper's text.

    BLOOM and Falcon count from the first key that is not padding: use :func:`bias_from_positions` for padded texts.

    Args:
        slopes: ``[num_heads]`` or ``[batch, num_heads]``, or an int for that many canonical slopes. A NumPy array is
            accepted with any library.
        q_len: Number of queries, in tokens.
        kv_len: Number of keys, in tokens. Default ``q_len``.
        q_offset: Position of the first query, in tokens; the first key has position 0. Default ``kv_len - q_len``.
        is_causal: Mask keys after the query.
        future_slopes: With ``is_causal=False``, the slopes for keys after the query, in the shape of ``slopes``.
            Default ``slopes``, which is symmetric; zeros give the form that clamps future distances to 0.
        allow_negative_slopes: Accept negative slopes, which reward distance. A compiled program accepts them always:
            their values are unknown there.
        law: How the penalty grows with the distance d: ``"linear"``, d; ``"log"``, ``log(1 + d)``; ``"sqrt"``,
            ``sqrt(d)``. Results have the same bits in every array library with ``"linear"``; with the others they
            agree within two units in the last place.
        contract: Rounding and counting of the bias: ``"exact"`` (as above), or ``"bloom"``, ``"falcon"``, ``"mpt"`` or
            ``"geometric"``, which require ``slopes`` to be the number of heads; the first three of these are causal.
        xp: Array namespace of the result, or its name: ``torch``, ``"torch"``. Default: the namespace of ``slopes``,
            else NumPy.
        dtype: Floating dtype of the result, or its name. Default: the dtype of ``slopes``, else float32; float32 alone
            with ``"mpt"``.
        device: Device of the result. Default: the device of ``slopes``.

    Returns:
        ``[num_heads, q_len, kv_len]`` (or ``[batch, num_heads, q_len, kv_len]``) array. In float16 a bias beyond 65504
        in size rounds to an infinity.

    Raises:
        TypeError: If an argument is of the wrong kind, or arrays belong to different libraries.
        ValueError: If a length is negative, slopes are negative, not finite or of a wrong shape, or ``future_slopes``
            is given for causal attention, or if the contract is unknown or excludes another argument.

    Example:
        >>> import numpy as np
        >>> bias(np.array([0.5]), 2, 3).tolist()
        [[[-0.5, 0.0, -inf], [-1.0, -0.5, 0.0]]]
        >>> bias(8, 2, 3, contract="bloom")[0].tolist()
        [[0.0, 0.5, -inf], [0.0, 0.5, 1.0]]

    References:
        Press, Smith, Lewis, "Train Short, Test Long", section 3, arXiv 2108.12409. Contracts: ``transformers`` 5.23,
        ``build_alibi_tensor`` and the attention of BLOOM, Falcon and MPT.
    """
    q_len = checks.non_negative_int("q_len", q_len)
    kv_len = q_len if kv_len is None else checks.non_negative_int("kv_len", kv_len)
    traced = ", or give bias_from_positions the positions, which may be traced"
    q_offset = kv_len - q_len if q_offset is None else checks.integer("q_offset", q_offset, traced)
    checks.positions_fit(q_offset, q_len, kv_len)
    args = _Arguments.check(contract, slopes, future_slopes, is_causal, allow_negative_slopes, xp, dtype, device, law)
    # [q_len] and [kv_len], int32
    queries, keys = (arange(args.xp, length, args.device) for length in (q_len, kv_len))
    return args.between(difference(queries + q_offset, keys), keys)


@explains_keywords
def bias_from_positions(
    slopes: int | Array,
    q_positions: Array,
    kv_positions: Array,
    *,
    q_segment_ids: Array | None = None,
    kv_segment_ids: Array | None = None,
    is_causal: bool = True,
    future_slopes: Array | None = None,
    allow_negative_slopes: bool = False,
    distance: str | None = None,
    law: str = "linear",
    contract: str = "exact",
    dtype: DType | None = None,
) -> Any:
    """Return the ALiBi bias between explicit positions, ``-slopes[h] * law(distance(q_position, kv_position))``.

    Use it for packed sequences and padded batches, whose positions restart, for times, and for points in the plane or
    in space. A key is masked (-inf) when it lies after the query (if causal) or when its segment id differs from the
    query's. A token without a position has NaN: its distance to every token is 0, and no token is after it or before
    it.

    Args:
        slopes: ``[num_heads]`` or ``[..., num_heads]``, or an int for that many canonical slopes.
        q_positions: ``[..., q_len]``, positions on a line, integer or floating; with ``distance``, points:
            ``[..., q_len, dims]``, or ``[q_len]`` for a line.
        kv_positions: ``[..., kv_len]`` or ``[..., kv_len, dims]``. Leading axes broadcast. Distances of 32-bit integers
            are exact, however far apart; distances of 64-bit integers must be below ``2**63``.
        q_segment_ids: ``[..., q_len]`` integers. Give both ids or neither.
        kv_segment_ids: ``[..., kv_len]`` integers.
        is_causal: Mask keys at later positions than the query, on a line only; must be False in space.
        future_slopes: As in :func:`bias`: slopes for keys after the query. On a line only.
        allow_negative_slopes: Accept negative slopes, which reward distance.
        distance: Distance between points: ``"manhattan"``, the sum of the differences along each dimension;
            ``"euclidean"``, the root of the sum of their squares; ``"chebyshev"``, the largest of them.
        law: As in :func:`bias`: how the penalty grows with the distance. Results have the same bits in every array
            library for integers (32-bit ones less than 2**24 apart) with ``"linear"``, on a line or with
            ``"manhattan"`` or ``"chebyshev"``. Otherwise they are within two units in the last place of the exact
            number in libraries that compute in float64, within ``dims + 4`` in others.
        contract: As in :func:`bias`: rounding and counting of the bias. BLOOM and Falcon count positions by the padding
            mask (1 for text, 0 for padding), ``(cumsum(mask) - 1) * mask``, and the mask serves as segment ids.
            ``"mpt"`` is refused, because it counts columns: use :func:`bias` with any padding.
        dtype: Floating dtype of the result, or its name. Default: the dtype of ``slopes``, else float32.

    Returns:
        ``[..., num_heads, q_len, kv_len]`` array, on the device of ``q_positions``.

    Raises:
        TypeError: If an argument is of the wrong kind, or arrays belong to different libraries.
        ValueError: If shapes do not fit, or for the reasons listed in :func:`bias`.

    Example:
        Two sequences of two tokens, packed:

        >>> import numpy as np
        >>> positions, ids = np.array([0, 1, 0, 1]), np.array([0, 0, 1, 1])
        >>> slopes = np.array([0.5])
        >>> bias_from_positions(slopes, positions, positions, q_segment_ids=ids, kv_segment_ids=ids)[0].tolist()
        [[0.0, -inf, -inf, -inf], [-0.5, 0.0, -inf, -inf], [-inf, -inf, 0.0, -inf], [-inf, -inf, -0.5, 0.0]]

        Three patches in the plane:

        >>> patches = np.array([[0, 0], [0, 1], [3, 4]])
        >>> bias_from_positions(slopes, patches, patches, distance="euclidean", is_causal=False)[0, 0].tolist()
        [0.0, -0.5, -2.5]
    """
    if (q_segment_ids is None) != (kv_segment_ids is None):
        raise ValueError("q_segment_ids and kv_segment_ids must be given together, got one of them")
    positions: dict[str, Any] = {"q_positions": q_positions, "kv_positions": kv_positions}
    ids: dict[str, Any] = {"q_segment_ids": q_segment_ids, "kv_segment_ids": kv_segment_ids}
    named = positions | ids if q_segment_ids is not None else positions
    for name, array in named.items():
        checks.array(name, array)
    xp = namespace_of(*named.values())
    for name, array in named.items():
        check = check_positions if name.endswith("positions") else checks.integer_array
        if check(xp, name, array).ndim < 1:
            raise ValueError(f"{name} must have at least one axis (length), got shape {tuple(array.shape)}")
    q_points, kv_points = as_points(q_positions, kv_positions, distance, is_causal, future_slopes)
    if all(is_kind(xp, x.dtype, "integral") for x in positions.values()):
        checks.positions_apart(q_positions, kv_positions)
    device = device_of(xp, q_positions)
    if device_of(xp, kv_positions) != device:
        raise ValueError(
            f"kv_positions must be on the device of q_positions, {device}, got {device_of(xp, kv_positions)}"
        )
    args = _Arguments.check(contract, slopes, future_slopes, is_causal, allow_negative_slopes, xp, dtype, device, law)
    if args.rule.is_key_only and not (q_points.shape[-1] == 1 and is_kind(xp, kv_points.dtype, "integral")):
        raise ValueError(f"positions must be integers on a line with contract {contract!r}, which counts tokens")
    if args.rule.counts_from == "last key":
        raise ValueError(
            f"contract must be one that knows positions, got {contract!r}, which counts columns; bias takes it, with "
            "any padding"
        )
    # Leading axes of positions, segment ids and slopes broadcast against each other.
    leading = {name: tuple(array.shape[:-1]) for name, array in named.items()}
    leading |= {"q_positions": q_points.shape[:-2], "kv_positions": kv_points.shape[:-2]}
    batch = _leading_shape(leading | {"slopes": args.slopes.shape[:-1]})
    precise = xp.float64 if has_float64(xp) else xp.float32
    # [..., 1, q_len, kv_len]
    relative = with_head_axis(relative_points(xp, q_points, kv_points, distance or "manhattan", precise)[0])
    same = None
    if q_segment_ids is not None:
        for name, points in (("q", q_points), ("kv", kv_points)):
            shape = *batch, points.shape[-2]
            checks.by_token(f"{name}_segment_ids", ids[f"{name}_segment_ids"].shape, shape, f"..., {name}_len")
        # PyTorch does not compare most unsigned integers.
        q_ids, kv_ids = (signed(xp, x) for x in ids.values())
        same = with_head_axis(q_ids[..., :, None] == kv_ids[..., None, :])  # [..., 1, q_len, kv_len]
    return args.between(relative, kv_positions, same)


@explains_keywords
def key_bias(
    slopes: int | Array,
    kv_len: int,
    *,
    allow_negative_slopes: bool = False,
    contract: str = "exact",
    xp: Namespace | None = None,
    dtype: DType | None = None,
    device: Device | None = None,
) -> Any:
    """Return the key-only form of the causal bias: ``slopes[h] * (j - (kv_len - 1))``.

    Softmax ignores a constant along a row, so under a causal mask this one row a head gives the same attention as the
    full bias. It is 0 at the last key, so it is most precise near the last queries. It contains no mask, and it is
    wrong for symmetric attention.

    Args:
        slopes: ``[num_heads]`` or ``[batch, num_heads]``, or an int for that many canonical slopes.
        kv_len: Number of keys, in tokens.
        allow_negative_slopes: Accept negative slopes, which reward distance.
        contract: As in :func:`bias`. ``"bloom"`` and ``"falcon"`` are 0 at the first key instead.
        xp, dtype, device: As in :func:`bias`.

    Returns:
        ``[num_heads, 1, kv_len]`` (or ``[batch, num_heads, 1, kv_len]``) array.

    Raises:
        TypeError: If an argument is of the wrong kind, or arrays belong to different libraries.
        ValueError: If the length is negative, or for the reasons listed in :func:`bias`.

    Example:
        >>> key_bias(1, 4).tolist()
        [[[-0.01171875, -0.0078125, -0.00390625, 0.0]]]
    """
    kv_len = checks.non_negative_int("kv_len", kv_len)
    checks.positions_fit(0, 0, kv_len)
    args = _Arguments.check(contract, slopes, None, True, allow_negative_slopes, xp, dtype, device)
    keys = arange(args.xp, kv_len, args.device)
    if args.rule.is_key_only:
        return args.of_keys(keys)
    relative = (keys - (kv_len - 1))[None, :]  # [1, kv_len]
    row = linear_bias(args.xp, args.slopes, None, relative, None, is_causal=True)
    return narrowed(args.xp, row, args.dtype)


def linear_bias(
    xp: Namespace,
    slopes: Any,
    future_slopes: Any | None,
    relative: Any,
    visible: Any | None,
    *,
    unit_bias: Any | None = None,
    out: Any | None = None,
    is_causal: bool,
    is_positive: bool = False,
    law: str = "linear",
) -> Any:
    """Return ``-slopes * (law(|relative|) - law(nearest))``, -inf where ``visible`` is False, in ``slopes``' dtype.

    Args:
        xp: The arrays' namespace.
        slopes: ``[..., num_heads]``, in the dtype of the product.
        future_slopes: The slopes where ``relative > 0``, in the shape of ``slopes``; None to use ``slopes`` there too.
        relative: Key minus query positions, which broadcast against ``[..., num_heads, q_len, kv_len]``.
        visible: Booleans that broadcast against the same shape, False where masked; None if nothing is masked.
        unit_bias: From :func:`unit_bias_of`. Default: computed here, with a bias of 0 at distance 0.
        out: An array of the result's shape to write it to if nothing is masked, in a library that can.
        is_causal: Whether ``visible`` is False wherever ``relative > 0``.
        is_positive: Whether the slopes are known to be positive constants.
        law: How the penalty grows with the distance.
    """
    rates = slopes[..., None, None]  # [..., num_heads, 1, 1]
    if future_slopes is not None:
        rates = xp.where(relative > 0, future_slopes[..., None, None], rates)
    if unit_bias is None:
        unit_bias = unit_bias_of(xp, relative, None, slopes.dtype, is_causal=is_causal, law=law)
    # No mask, so no -inf: one product.
    if visible is None:
        return rates * unit_bias if out is None else xp.multiply(rates, unit_bias, out=out)
    if is_positive:
        # One pass over the large array instead of two. Not for slopes of 0 (0 * inf is NaN), nor if slopes need a
        # gradient, which would multiply by this infinity.
        return rates * xp.where(visible, unit_bias, float("-inf"))
    return rates * xp.where(visible, unit_bias, 0.0) + xp.where(visible, xp.zeros_like(unit_bias), float("-inf"))


def unit_bias_of(
    xp: Namespace,
    relative: Any,
    nearest: Any | None,
    dtype: DType,
    *,
    is_causal: bool,
    law: str = "linear",
    rest: Any | None = None,
) -> Any:
    """Return ``law(nearest) - law(distance)`` in ``dtype``: the bias of slopes of 1, whatever is masked.

    ``nearest`` are distances, broadcasting against ``relative``, at which the bias is 0; None for 0. The distance is
    ``|relative|``, plus ``rest`` if given. It keeps the digits that tell keys apart, however far they all are.
    """
    if law != "linear" and nearest is None:
        return astype(xp, 0 - _penalty_of(xp, xp.abs(relative), law, dtype), dtype)
    # If causal, future keys are masked later, so abs() is not needed. `0 - abs(x)` avoids the -0.0 of `-abs(x)`.
    unit_bias = relative if is_causal else 0 - xp.abs(relative)
    unit_bias = unit_bias if nearest is None else unit_bias + nearest
    unit_bias = astype(xp, unit_bias if rest is None else unit_bias - rest, dtype)
    return unit_bias if law == "linear" else 0 - penalty_beyond(xp, 0 - unit_bias, astype(xp, nearest, dtype), law)


def _penalty_of(xp: Namespace, distance: Any, law: str, dtype: DType) -> Any:
    """Return ``law(distance)``: in float64 for float64 and, where available, integer distances; else in ``dtype``."""
    is_wide = "float64" in str(distance.dtype) or (is_kind(xp, distance.dtype, "integral") and has_float64(xp))
    return penalty(xp, astype(xp, distance, xp.float64 if is_wide else dtype), law)


class _Arguments(NamedTuple):
    """The checked arguments of a bias besides positions, with its namespace, dtype and device."""

    xp: Namespace
    rule: Contract
    slopes: Any  # like future_slopes, in the dtype of products
    future_slopes: Any | None
    is_causal: bool
    is_positive: bool  # whether the slopes are known to be positive constants
    dtype: DType
    device: Device | None
    law: str

    @classmethod
    def check(
        cls,
        contract: str,
        slopes: Any,
        future_slopes: Any | None,
        is_causal: bool,
        allow_negative: bool,
        xp: Namespace | None,
        dtype: DType | None,
        device: Device | None,
        law: str = "linear",
    ) -> _Arguments:
        checks.one_of("law", law, LAWS)
        rule = Contract.check(contract, slopes, future_slopes, is_causal, allow_negative)
        if rule.is_key_only and law != "linear":
            raise ValueError(f"law must be 'linear' with contract {contract!r}, got {law!r}")
        checks.direction(is_causal, future_slopes)
        checks.boolean("allow_negative_slopes", allow_negative)
        given = {"slopes": slopes} | ({} if future_slopes is None else {"future_slopes": future_slopes})
        arrays = {name: checks.array(name, value) for name, value in given.items() if not checks.is_int(value)}
        xp = namespace_of(*(x for x in arrays.values() if not is_numpy(x)), xp=xp)
        known_device(xp, device)
        arrays = {name: adopted(xp, value, device) for name, value in arrays.items()}
        slopes, future_slopes = arrays.get("slopes", slopes), arrays.get("future_slopes", future_slopes)
        for name, value in arrays.items():
            if checks.floating_array(xp, name, value).ndim < 1 or value.shape[-1] < 1:
                raise ValueError(
                    f"{name} must have shape (..., num_heads) with at least one head, got {tuple(value.shape)}"
                )
        named = "dtype" if dtype is not None else "dtype, by default that of slopes,"
        own = next((value.dtype for value in arrays.values()), xp.float32)
        dtype = checks.floating_dtype(xp, named, own if dtype is None else dtype)
        rule.check_dtype(xp, dtype)
        # Key-only contracts compute in float32, whatever the dtype of the result.
        working = xp.float32 if rule.is_key_only else working_dtype(xp, dtype)
        for name, value in arrays.items():
            checks.slopes_values(name, value, allow_negative=allow_negative, working=working)
            place = device_of(xp, value)
            device = place if device is None else device
            if place is not None and str(place) != str(device):
                raise ValueError(f"{name} must be on the device of the result, {device}, got {place}")
        # An int means canonical slopes, or the slopes of the contract.
        past, future = place_slopes(xp, slopes, working, device, contract=rule.name), None
        if future_slopes is not None:
            if checks.is_int(future_slopes):
                checks.slopes_count("future_slopes", future_slopes, past.shape[-1], "")
            future = place_slopes(xp, future_slopes, working, device)
            if tuple(future.shape) not in (tuple(past.shape), tuple(past.shape[-1:])):
                raise ValueError(
                    f"future_slopes must have the shape of slopes, {tuple(past.shape)}, got {tuple(future.shape)}"
                )
        return cls(xp, rule, past, future, is_causal, checks.is_int(slopes) and future is None, dtype, device, law)

    def between(self, relative: Any, kv_positions: Any, same: Any | None = None) -> Any:
        """Return the bias of every query and key; ``same`` is True where segments match, None for everywhere."""
        xp = self.xp
        visible = relative <= 0 if self.is_causal else None
        if same is not None:
            visible = same if visible is None else xp.logical_and(visible, same)  # as in AttentionCall.visible
        # One row a head for all queries: [..., num_heads, 1, kv_len], masked by position and segment.
        if self.rule.is_key_only:
            row = self.of_keys(kv_positions)
            return xp.where(visible, row, float("-inf"))
        rules: dict[str, Any] = {"is_causal": self.is_causal, "is_positive": self.is_positive, "law": self.law}
        return narrowed(xp, linear_bias(xp, self.slopes, self.future_slopes, relative, visible, **rules), self.dtype)

    def of_keys(self, kv_positions: Any) -> Any:
        """Return a key-only contract's bias, ``[..., num_heads, 1, kv_len]``, in ``dtype``."""
        # JAX without 64 bits would wrap uint32; PyTorch cannot cast most unsigned integers to floating ones.
        counts = kv_positions if lacks_64_bits(self.xp) else signed(self.xp, kv_positions)
        if self.rule.counts_from == "last key":
            counts = counts - (counts.shape[-1] - 1)
        return narrowed(self.xp, self.rule.row(self.xp, self.slopes, counts), self.dtype)


def slopes_of_any_sign(slopes: int | Array, *others: Any) -> tuple[Namespace, Any]:
    """Return the namespace of slopes and other arrays, and the slopes in the dtype of products; any sign is allowed."""
    xp = namespace_of(*others) if others else None
    device = device_of(xp, others[0]) if others and (checks.is_int(slopes) or is_numpy(slopes)) else None
    args = _Arguments.check("exact", slopes, None, True, True, xp, None, device)
    return args.xp, args.slopes


def working_dtype(xp: Namespace, dtype: DType) -> DType:
    """Return the dtype of products and softmax statistics for a result of ``dtype``: float64 or float32."""
    return xp.float64 if dtype == xp.float64 else xp.float32


def place_slopes(xp: Namespace, slopes: Any, dtype: DType, device: Device | None, *, contract: str = "exact") -> Any:
    """Return slopes as an array of ``dtype``; an int gives that many slopes of the contract."""
    if not checks.is_int(slopes):
        return astype(xp, slopes, dtype)
    return asarray(xp, slope_values(slopes, contract=contract), dtype, device)


def with_head_axis(array: Any) -> Any:
    """Return ``[..., q_len, kv_len]`` as ``[..., 1, q_len, kv_len]``; unchanged without batch axes."""
    return array if array.ndim == 2 else array[..., None, :, :]


def _leading_shape(shapes: dict[str, tuple[int, ...]]) -> tuple[int, ...]:
    """Return the broadcast of leading axes; the error names every array."""
    result: list[int] = [1] * max(len(shape) for shape in shapes.values())
    for shape in shapes.values():
        for axis, n in enumerate(reversed(shape), start=1):
            if n != 1 and result[-axis] not in (1, n):
                listed = ", ".join(f"{name} {tuple(s)}" for name, s in shapes.items())
                raise ValueError(f"leading axes must broadcast, got {listed}")
            result[-axis] = n if result[-axis] == 1 else result[-axis]
    return tuple(result)
