"""One attention call: its arguments validated and its defaults filled in, for any backend and any layout."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
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
    constant,
    device_of,
    divided_along,
    floating_name,
    is_constant,
    is_kind,
    is_never_negative,
    is_numpy,
    namespace_of,
    signed,
)
from alibi_core._bias import linear_bias, place_slopes, reach_of, with_head_axis, working_dtype
from alibi_core._distance import DISTANCES, LAWS, check_order, difference, may_have_nan, points_of_call, relative_points
from alibi_core._gates import checked_gates, gate_sums, sees_through, within
from alibi_core._mask import boolean_mask, with_score_axes

HEADS_FIRST = ("heads", "length", "head_dim")
LENGTH_FIRST = ("length", "heads", "head_dim")
TENSORS = ("query", "key", "value")
SLOPES = ("slopes", "future_slopes")
FARTHEST = 2**30  # tokens; offsets in arrays are clipped to this size, so that positions fit int32

# By dtype of queries and keys, the default tolerance, the unit roundoff: smaller changes are lost in rounding.
UNIT_ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
LARGEST_TOLERANCE = 0.5  # above 0.5 the key that a bound refers to could itself be dropped


class BiasTerms(NamedTuple):
    """The parts of a bias that do not depend on slopes; they broadcast to ``[*batch, num_heads, q_len, kv_len]``."""

    relative: Any  # key minus query position
    visible: Any | None  # None: every query sees every key
    attends: Any | None  # whether a query sees a key; None if all do
    reach: Any  # the bias of slopes of 1
    # with gates, the key from which each query counts them: [q_len] or [..., num_heads or 1, q_len]
    origins: Any | None = None


@dataclass(frozen=True)
class AttentionCall:
    """The validated arguments of one attention call, defaults filled in.

    A backend makes one with :meth:`check` and decides how to compute it. All lengths, positions and windows are in
    tokens; arrays belong to the namespace ``xp``; axes are heads-first whatever the layout of the tensors was.

    Example:
        >>> import numpy as np
        >>> query, key = np.zeros((2, 1, 8), np.float32), np.zeros((2, 5, 8), np.float32)
        >>> call = AttentionCall.check(query, key, key)
        >>> call.q_offset, call.slopes.tolist()
        (4, [0.0625, 0.00390625])
    """

    xp: Namespace
    batch: tuple[int, ...]
    num_heads: int
    num_kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    dtype: DType  # of query, key, value and the result
    working_dtype: DType  # of products, softmax statistics and the bias: float32, or float64 for float64
    device: Device | None
    slopes: Any = field(metadata={"axes": ("heads",)})  # [num_heads] or [*batch, num_heads], working_dtype
    future_slopes: Any | None = field(metadata={"axes": ("heads",)})  # shaped as slopes; None means slopes
    # [*batch, num_heads, kv_len], working_dtype; 0 for masked tokens, -inf for closed gates
    log_gates: Any | None = field(metadata={"axes": ("heads", "keys")})
    is_causal: bool
    q_offset: Any = field(metadata={"axes": ()})  # int, or an int32 array [] or [*batch]
    q_segment_ids: Any | None = field(metadata={"axes": ("queries",)})  # [..., q_len]
    kv_segment_ids: Any | None = field(metadata={"axes": ("keys",)})  # [..., kv_len]
    window_size: int | None
    # booleans that broadcast to [*batch, num_heads, q_len, kv_len]
    mask: Any | None = field(metadata={"axes": ("heads", "queries", "keys")})
    scale: float
    tolerance: float  # the share of softmax weight that may be left out
    shares_ids: bool = False  # whether a query always has the segment id of the key at its own position
    # [num_heads, kv_len] or [*batch, num_heads, kv_len], added to the linear bias
    added_key_bias: Any | None = field(default=None, metadata={"axes": ("heads", "keys")})
    # Explicit positions, in place of an offset: [..., q_len, dims] and [..., kv_len, dims].
    q_points: Any | None = field(default=None, metadata={"axes": ("queries", "dims")})
    kv_points: Any | None = field(default=None, metadata={"axes": ("keys", "dims")})
    shares_points: bool = False  # whether queries and keys are the same tokens
    may_lack_points: bool = False  # whether points may hold NaN, a token without a position
    distance: str = "manhattan"
    law: str = "linear"
    # Only the implementation "dense" supports the fields below. added_bias is finite and broadcasts to
    # [*batch, num_heads, q_len, kv_len].
    added_bias: Any | None = field(default=None, metadata={"axes": ("heads", "queries", "keys")})
    dropout: float = 0.0  # probability of zeroing a weight
    return_weights: bool = False

    @classmethod
    def check(
        cls,
        query: Array,
        key: Array,
        value: Array,
        slopes: int | Array | None = None,
        *,
        is_causal: bool = True,
        future_slopes: Array | None = None,
        log_gates: Array | None = None,
        q_offset: int | Array | None = None,
        segment_ids: Array | tuple[Array, Array] | None = None,
        window_size: int | None = None,
        mask: Array | None = None,
        positions: Array | tuple[Array, Array] | None = None,
        distance: str = "manhattan",
        law: str = "linear",
        scale: float | None = None,
        tolerance: float | None = None,
        added_bias: Array | None = None,
        dropout: float = 0.0,
        return_weights: bool = False,
        allow_negative_slopes: bool = False,
        layout: tuple[str, str, str] = HEADS_FIRST,
        xp: Namespace | None = None,
    ) -> AttentionCall:
        """Check the arguments of an attention function and fill in its defaults.

        Args:
            query: ``[*batch, *layout]``.
            key: As ``query``, with ``num_kv_heads`` heads and length ``kv_len``.
            value: The same shape as ``key``.
            slopes: This and all further arguments but ``layout`` and ``xp``: see :func:`alibi_core.attention` and the
                ``attention`` of the backends.
            layout: Order of the last three axes, ``HEADS_FIRST`` or ``LENGTH_FIRST``.
            xp: The namespace that the arrays must belong to. Default: the namespace of ``query``.

        Raises:
            TypeError: If an argument is of the wrong kind, dtypes or namespaces differ.
            ValueError: If a value or a shape is wrong.
        """
        q_ids, kv_ids = _pair("segment_ids", segment_ids)
        q_positions, kv_positions = _pair("positions", positions)
        # All arrays must share one namespace and one device; errors name the argument.
        arrays = _arrays(
            {"query": query, "key": key, "value": value, "slopes": slopes, "future_slopes": future_slopes}
            | {"q_offset": q_offset, "segment_ids": q_ids, "segment_ids of keys": kv_ids, "mask": mask}
            | {"added_bias": added_bias, "positions": q_positions, "positions of keys": kv_positions}
            | {"log_gates": log_gates}
        )
        xp = namespace_of(*arrays.values(), xp=xp, names=tuple(arrays))
        sizes = _tensor_sizes(xp, query, key, value, layout)
        dtype = query.dtype
        device = _common_device(xp, arrays)
        slopes, future_slopes = (adopted(xp, x, device) for x in (slopes, future_slopes))
        rules = {"q_offset": q_offset, "mask": mask, "added_bias": added_bias, "segment_ids": q_ids}
        rules |= {"segment_ids of keys": kv_ids, "positions": q_positions, "positions of keys": kv_positions}
        rules |= {"log_gates": log_gates}
        made = {id(x): constant(xp, name, x, device) for name, x in rules.items() if is_constant(x, query)}
        if made:  # by id: one array stays one
            found = (made.get(id(x), x) for x in rules.values())
            q_offset, mask, added_bias, q_ids, kv_ids, q_positions, kv_positions, log_gates = found
        working = working_dtype(xp, dtype)
        if tolerance is None:
            tolerance = UNIT_ROUNDOFF[str(floating_name(dtype))]
        tolerance = min(checks.non_negative_number("tolerance", tolerance), LARGEST_TOLERANCE)
        if positions is not None or law != "linear":
            tolerance = 0.0  # horizons know neither
        checks.direction(is_causal, future_slopes)
        checks.boolean("allow_negative_slopes", allow_negative_slopes)
        if slopes is None:
            slopes = int(sizes["num_heads"])
            if log_gates is not None:  # gates are in place of ALiBi, unless slopes are given too
                slopes = asarray(xp, [0.0] * slopes, working, device)
        pair = {"slopes": slopes, "future_slopes": future_slopes}
        for name, given in pair.items():  # int(): sizes are tensors in torch.jit.trace
            if checks.is_int(given):
                checks.slopes_of_all_heads(name, given, sizes["num_heads"], divided_along(xp, query))
        placed = [
            None if given is None else _slopes(xp, name, given, sizes, layout, allow_negative_slopes, working, device)
            for name, given in pair.items()
        ]
        for name, given in (("segment_ids", segment_ids), ("positions", positions)):
            if given is not None and not isinstance(given, (tuple, list)) and sizes["q_len"] != sizes["kv_len"]:
                raise ValueError(
                    f"{name} must be a pair (queries, keys) when q_len, {sizes['q_len']}, and kv_len, "
                    f"{sizes['kv_len']}, differ; got one array"
                )
        q_segment_ids = kv_segment_ids = q_points = kv_points = None
        if segment_ids is not None:
            q_segment_ids, kv_segment_ids = _segment_ids(xp, (q_ids, kv_ids), sizes)
        if positions is not None:
            for name, x in (("q_offset", q_offset), ("window_size", window_size)):
                if x is not None:
                    raise ValueError(f"{name} must be None with positions, which say where each token is, got {x}")
            q_points, kv_points = _points(xp, (q_positions, kv_positions), sizes)
            check_order(q_points.shape[-1], is_causal, future_slopes)
        offset = _q_offset(xp, q_offset, sizes)
        if window_size is not None:
            window_size = min(checks.window(window_size), checks.MAX_POSITION)
        if mask is not None:
            mask = boolean_mask(xp, mask, *_score_axes(sizes))
        if log_gates is not None:
            excluded = {
                "is_causal=False": not is_causal,
                "positions": positions is not None,
                f"law {law!r}": law != "linear",
            }
            for rule in (rule for rule, is_given in excluded.items() if is_given):
                raise ValueError(f"log_gates must be None with {rule}: gates count from token to token of the past")
            log_gates = _log_gates(xp, log_gates, sizes, layout, working, mask)
        if added_bias is not None:
            if is_kind(xp, added_bias.dtype, "bool"):
                raise TypeError(f"added_bias must be floating, got {added_bias.dtype}; booleans are a mask")
            checks.floating_array(xp, "added_bias", added_bias)
            added_bias = with_score_axes(xp, "added_bias", added_bias, *_score_axes(sizes))
            # Backends expect a finite added_bias: its -inf become part of the mask.
            added_bias = astype(xp, added_bias, working)
            shown: Any = added_bias != -math.inf
            mask = shown if mask is None else xp.logical_and(mask, shown)
            added_bias = xp.where(shown, added_bias, 0.0)
        return cls(
            xp=xp,
            **sizes,
            dtype=dtype,
            working_dtype=working,
            device=device,
            slopes=placed[0],
            future_slopes=placed[1],
            log_gates=log_gates,
            is_causal=bool(is_causal),
            q_offset=offset,
            q_segment_ids=q_segment_ids,
            kv_segment_ids=kv_segment_ids,
            window_size=window_size,
            mask=mask,
            # float() keeps float64 where torch.jit.trace makes a tensor of the size.
            scale=float(sizes["head_dim"]) ** -0.5 if scale is None else checks.number_in(working, "scale", scale),
            tolerance=tolerance,
            q_points=q_points,
            kv_points=kv_points,
            shares_points=q_positions is not None and q_positions is kv_positions,
            may_lack_points=any(may_have_nan(xp, x) for x in (q_points, kv_points) if x is not None),
            distance=checks.one_of("distance", distance, DISTANCES),
            law=checks.one_of("law", law, LAWS),
            shares_ids=q_ids is not None and q_ids is kv_ids and checks.is_int(offset) and offset == 0,
            added_bias=added_bias,
            dropout=checks.probability("dropout", dropout),
            return_weights=checks.boolean("return_weights", return_weights),
        )

    @property
    def arrays(self) -> dict[str, Any]:
        """The fields that are arrays, by name; fields that are None or int are left out."""
        found = {name: getattr(self, name) for name in _AXES}
        return {name: x for name, x in found.items() if x is not None and not checks.is_int(x)}

    def map_arrays(self, change: Callable[[Any, int], Any]) -> AttentionCall:
        """Return the call with each array replaced by ``change(array, axes)``; ``axes`` counts its non-batch axes."""
        return replace(self, **{name: change(array, len(_AXES[name])) for name, array in self.arrays.items()})

    @property
    def dense_only(self) -> str | None:
        """Why only ``"dense"`` can run the call, as the end of a sentence ("it ..."); None if others can."""
        if self.added_bias is not None:
            return "takes no added_bias"
        if self.dropout > 0:
            return "has no dropout of weights"
        return "returns no weights" if self.return_weights else None

    @property
    def is_linear(self) -> bool:
        """Whether the bias is linear in ``|i - j|``: neither positions of the caller's own, other laws nor gates."""
        return self.q_points is None and self.law == "linear" and self.log_gates is None

    @property
    def is_empty(self) -> bool:
        """Whether there are no scores: a length or a batch axis is 0. The result is zeros."""
        return 0 in (*self.batch, self.q_len, self.kv_len)

    @property
    def has_offset_array(self) -> bool:
        """Whether the offset is an array. Its values are never read: the host would have to wait."""
        return not checks.is_int(self.q_offset)

    @property
    def every_query_attends(self) -> bool:
        """Whether the shapes of arguments alone prove that no query is fully masked."""
        if self.is_empty or self.sees_own_key:
            return not self.is_empty
        if self.mask is not None or self.q_segment_ids is not None or self.window_size is not None:
            return False
        if self.q_points is not None:
            return not self.is_causal or self.shares_points
        return not self.has_offset_array and (not self.is_causal or is_never_negative(self.q_offset))

    @property
    def sees_own_key(self) -> bool:
        """Whether the shapes of arguments alone prove that each query sees a key at its own position."""
        if self.mask is not None or self.has_offset_array or not (self.q_segment_ids is None or self.shares_ids):
            return False
        if self.q_points is not None:
            return self.shares_points
        return all(map(is_never_negative, (self.q_offset, self.kv_len - self.q_offset - self.q_len)))

    def positions(self) -> tuple[Any, Any]:
        """Return the positions of queries, ``[q_len]`` or ``[*batch, q_len]``, and keys, ``[kv_len]``; int32."""
        queries, keys = (arange(self.xp, n, self.device) for n in (self.q_len, self.kv_len))
        offset = self.q_offset[..., None] if self.has_offset_array else self.q_offset
        return offset + queries, keys

    def tile(
        self,
        *,
        batch: slice | None = None,
        heads: slice | None = None,
        queries: slice | None = None,
        keys: slice | None = None,
    ) -> AttentionCall:
        """Return the call, of one batch axis, restricted to these batch entries, heads, queries and keys; None for all.

        Slices need ``start`` and ``stop``; heads must be whole groups, or heads of one group. Slopes, masks and
        positions are sliced, so :meth:`bias` of the tile is a tile of this call's bias, except for a constant along
        each row where distances are counted from the nearest key of the tile. Gates count up to the tile's last key: a
        closed gate behind it is not seen.
        """
        given, sizes = (batch, heads, queries, keys), (self.batch[0], self.num_heads, self.q_len, self.kv_len)
        batch, heads, queries, keys = (slice(0, n) if x is None else x for x, n in zip(given, sizes, strict=True))
        parts = {"heads": heads, "queries": queries, "keys": keys, "dims": slice(None)}

        def cut(name: str, array: Any) -> Any:
            # Arrays have the batch axis first; broadcast axes of length 1 are not sliced.
            slices = (batch, *(parts[axis] for axis in _AXES[name]))
            if array.ndim < len(slices):  # not indexing with None: mx.vmap puts several new axes in the wrong places
                array = self.xp.reshape(array, (*[1] * (len(slices) - array.ndim), *array.shape))
            return array[tuple(slice(None) if n == 1 else x for x, n in zip(slices, array.shape, strict=True))]

        arrays = {name: cut(name, array) for name, array in self.arrays.items()}
        # Positions count from the tile's first key.
        arrays["q_offset"] = arrays.get("q_offset", self.q_offset) + queries.start - keys.start
        num_heads = heads.stop - heads.start
        group = self.num_heads // self.num_kv_heads
        return replace(
            self,
            batch=(batch.stop - batch.start,),
            num_heads=num_heads,
            num_kv_heads=max(1, num_heads // group),
            q_len=queries.stop - queries.start,
            kv_len=keys.stop - keys.start,
            shares_points=self.shares_points and keys.stop - keys.start == self.kv_len,
            **arrays,
        )

    def with_one_batch_axis(self) -> AttentionCall:
        """Return this call with its batch axes merged into one. Arrays without a batch axis, or of length 1, stay so.

        The caller must reshape query, key and value to ``[call.batch[0], ...]``.
        """
        xp, batch = self.xp, self.batch
        if len(batch) == 1:
            return self

        def merged(array: Any, axes: int) -> Any:
            """Merge the axes before the last ``axes`` ones."""
            if array.ndim <= axes:
                return array
            own = array.shape[array.ndim - axes :]
            # Equal for all batch entries: keep one broadcast batch axis.
            if all(n == 1 for n in array.shape[: array.ndim - axes]):
                return xp.reshape(array, (1, *own))
            # [*batch, *own] -> [prod(batch), *own]
            return xp.reshape(xp.broadcast_to(array, (*batch, *own)), (math.prod(batch), *own))

        return replace(self.map_arrays(merged), batch=(math.prod(batch),))

    def visible(self, relative: Any) -> Any | None:
        """Return which keys are visible, from relative positions; None if every query sees every key.

        The result broadcasts to ``[*batch, num_heads, q_len, kv_len]``. ``relative`` are key minus query positions,
        ``[..., 1, q_len, kv_len]`` or ``[q_len, kv_len]``.
        """
        rules = self._distance_rules(relative)
        if self.q_segment_ids is not None and self.kv_segment_ids is not None:
            # [..., q_len, 1] == [..., 1, kv_len]
            rules.append(with_head_axis(self.q_segment_ids[..., :, None] == self.kv_segment_ids[..., None, :]))
        if self.mask is not None:
            rules.append(self.mask)
        if self.log_gates is not None and not self.is_empty:
            rules.append(sees_through(self.xp, self.log_gates, self._key_near(0)))
        # Not `&`: under mx.vmap its result has the shape of the first operand, not the broadcast shape.
        return functools.reduce(self.xp.logical_and, rules) if rules else None

    def _key_near(self, distance: Any) -> Any:
        """Return the key at a distance before each query: ``[q_len]`` or ``[..., num_heads or 1, q_len]``."""
        queries = self.positions()[0]
        return within(self.xp, (queries if queries.ndim == 1 else queries[..., None, :]) - distance, self.kv_len)

    def _distance_rules(self, relative: Any) -> list[Any]:
        """Return the masks by direction and by window, as a list of up to two."""
        rules = [relative <= 0] if self.is_causal else []
        return rules if self.window_size is None else [*rules, self.xp.abs(relative) <= self.window_size]

    def bias(self, terms: BiasTerms | None = None, out: Any | None = None) -> tuple[Any, Any | None]:
        """Return the dense bias, masks included, with no row of only -inf (softmax would give NaN).

        Args:
            terms: From :meth:`bias_terms`, of a call that differs in its heads alone. Default: computed here.
            out: An array of the bias's shape, which it may take the place of.

        Returns:
            bias: ``[..., num_heads, q_len, kv_len]`` in ``working_dtype``: ``-slopes * distance``, plus
                sums of gates, ``added_key_bias`` and ``added_bias``, plus a constant a row that keeps numbers small.
                -inf where masked, but 0 along a fully masked row.
            attends: ``[..., q_len, 1]`` booleans that broadcast against the result, False for fully masked rows, whose
                result must be replaced by zeros; None if there are none, or no scores.
        """
        terms = self.bias_terms() if terms is None else terms
        bias = self._linear_bias(terms.relative, terms.visible, reach=terms.reach, out=out)
        if self.log_gates is not None:
            # Without origins there are no elements, but the bias stays connected to the gates.
            is_empty, gates = terms.origins is None, self.log_gates
            bias = bias + (gates[..., None, :] if is_empty else gate_sums(self.xp, gates, terms.origins))
        if terms.attends is None or all(x is None for x in (self.log_gates, self.added_key_bias, self.added_bias)):
            return bias, terms.attends
        return self.xp.where(terms.attends, bias, 0.0), terms.attends

    def bias_terms(self, relative: Any | None = None) -> BiasTerms:
        """Return what :meth:`bias` computes before slopes; heads share it, unless their masks differ.

        ``relative``, ``[..., q_len, kv_len]``: relative positions of points. Default: computed here.
        """
        xp = self.xp
        relative, rest, nearest = self._relative(relative)
        visible, attends = self.visible(relative), None
        # Without scores there is nothing to reduce, which MLX 0.32 might do for ever.
        if visible is not None and not self.every_query_attends and not self.is_empty:
            # [..., q_len, 1]: False for fully masked rows
            attends = xp.any(visible, axis=-1, keepdims=True)
            if self.mask is not None or self.q_segment_ids is not None or self.q_points is not None:
                nearest = self._origin(relative, visible)
            visible = xp.logical_or(visible, xp.logical_not(attends))
            nearest = None if nearest is None else xp.where(attends, nearest, 0)
        origins = None
        if self.log_gates is not None and nearest is not None and not self.is_empty:
            # The nearest visible key, as for distances: [..., q_len, 1] becomes [..., q_len].
            origins = self._key_near(nearest[..., 0])
        is_in_space = self.q_points is not None and self.q_points.shape[-1] > 1  # relative positions are never positive
        rules: dict[str, Any] = {"is_causal": self.is_causal or is_in_space, "law": self.law, "rest": rest}
        reach = reach_of(xp, relative, nearest, self.slopes.dtype, **rules)
        # In a fully masked row all keys become visible, at distance 0: the bias is 0.
        reach = reach if attends is None else xp.where(attends, reach, 0.0)
        return BiasTerms(relative, visible, attends, reach, origins)

    @functools.cached_property
    def bias_by_distance(self) -> Any:
        """The bias by relative position, for a Toeplitz bias and an int offset: the diagonals of the matrix.

        ``[..., num_heads, q_len + kv_len - 1]`` in ``working_dtype``, from the farthest key before a query to the
        farthest key after a query; -inf where direction or window mask. Unlike :meth:`bias`, it is of full size, which
        costs the digits of scores where all keys are far.
        """
        # Start arange at the offset instead of subtracting it: mx.compile would write the number into a kernel's source
        # and compile a new kernel for each length.
        relative = arange(self.xp, self.kv_len - self.q_offset, self.device, 1 - self.q_offset - self.q_len)[None]
        # If all relative positions are <= 0, a causal mask hides no key.
        is_past = self.is_causal and self.window_size is None and self.q_offset >= self.kv_len - 1
        rules = [] if is_past else self._distance_rules(relative)
        visible = functools.reduce(self.xp.logical_and, rules) if rules else None
        return self._linear_bias(relative, visible)[..., 0, :]

    def _relative(self, relative: Any | None) -> tuple[Any, Any | None, Any | None]:
        """Return relative positions, rests, as of :func:`relative_points`, and a lower bound of each query's distances.

        The bound is ``[..., q_len, 1]``; None for 0.
        """
        xp, rest = self.xp, None
        if self.q_points is None:
            q_positions, kv_positions = self.positions()
            relative = difference(q_positions, kv_positions)
            return with_head_axis(relative), None, with_head_axis(self.distance_to_keys(q_positions)[..., :, None])
        has_nearest = not (self.is_empty or self.sees_own_key)  # the own key is at distance 0
        if relative is None:
            points: Any = self.q_points, self.kv_points, self.distance, self.working_dtype, self.may_lack_points
            relative, rest = relative_points(xp, *points, with_rest=has_nearest)
        nearest = with_head_axis(self._origin(relative, None)) if has_nearest else None
        return with_head_axis(relative), None if rest is None else with_head_axis(rest), nearest

    def distance_to_keys(self, positions: Any) -> Any:
        """Return the distance of each position from the range of keys, ``0`` to ``kv_len - 1``; 0 inside it."""
        # An array, not a number: mx.compile would write it into a kernel's source, and compile one for each length.
        last_key = arange(self.xp, self.kv_len, self.device, self.kv_len - 1)  # [1]
        beyond = positions - last_key
        return self.xp.where(positions < 0, -positions, self.xp.where(beyond > 0, beyond, 0))

    def _linear_bias(self, relative: Any, visible: Any | None, **arrays: Any) -> Any:
        rules: dict[str, Any] = {"is_causal": self.is_causal, "law": self.law, **arrays}
        bias = linear_bias(self.xp, self.slopes, self.future_slopes, relative, visible, **rules)
        if self.added_key_bias is not None:
            bias = bias + self.added_key_bias[..., None, :]
        return bias if self.added_bias is None else bias + self.added_bias

    def _origin(self, relative: Any, visible: Any | None) -> Any:
        """Return the distance that counts as 0 in each query's row, ``[..., q_len, 1]``: that of its nearest key.

        Softmax ignores a constant along a row, but if all keys are far away, float32 would lose its digits to that
        constant. With two slopes in a row (keys on both sides of the query) a distance is not one constant penalty:
        distances count from 0.
        """
        xp, nearest = self.xp, self.nearest_visible(relative, visible)
        if self.future_slopes is None:
            return nearest

        def some(keys: Any) -> Any:
            return xp.any(keys if visible is None else xp.logical_and(visible, keys), axis=-1, keepdims=True)

        return xp.where(xp.logical_and(some(relative < 0), some(relative > 0)), 0, nearest)

    def nearest_visible(self, relative: Any, visible: Any | None) -> Any:
        """Return the distance of each query's nearest visible key, ``[..., q_len, 1]``; None shows all keys.

        It is at least MAX_POSITION for a fully masked query.
        """
        if self.q_points is None:
            far: float = checks.MAX_POSITION
        else:
            far = 2**62 if is_kind(self.xp, relative.dtype, "integral") else math.inf
        distances = self.xp.abs(relative)
        distances = distances if visible is None else self.xp.where(visible, distances, far)
        return self.xp.min(distances, axis=-1, keepdims=True)


# The non-batch axes of each array. Batch axes come first and may be missing.
_AXES: dict[str, tuple[str, ...]] = {x.name: x.metadata["axes"] for x in fields(AttentionCall) if "axes" in x.metadata}
# The number of non-batch axes of each array that kernels take.
ARRAY_AXES = {name: len(axes) for name, axes in _AXES.items() if name != "added_bias"}


def axis_of(name: str, what: str, array: Any) -> int | None:
    """Return the index of an array's axis of ``"heads"``, ``"queries"`` or ``"keys"``; None if it has no such axis.

    A broadcast axis of length 1 gives None, too.
    """
    axes = _AXES[name]
    if what not in axes:
        return None
    axis = array.ndim - len(axes) + axes.index(what)
    return axis if axis >= 0 and array.shape[axis] != 1 else None


def split_call(call: AttentionCall) -> tuple[AttentionCall, dict[str, Any]]:
    """Return the call without its arrays (hashable), and its arrays by field name."""
    absent: dict[str, Any] = dict.fromkeys(call.arrays)
    return replace(call, **absent), call.arrays


def join_call(static: AttentionCall, arrays: Mapping[str, Any]) -> AttentionCall:
    """Return the call with these arrays: the inverse of :func:`split_call`."""
    return replace(static, **arrays)


def _score_axes(sizes: dict[str, Any]) -> tuple[dict[str, int], dict[str, int]]:
    """Return the sizes of the scores' axes, by name: the batch axes, and the last three axes."""
    batch = sizes["batch"]
    names = ("num_heads", "q_len", "kv_len")
    return dict(zip(_batch_axes(batch), batch, strict=True)), {name: sizes[name] for name in names}


def _batch_axes(batch: tuple[int, ...]) -> list[str]:
    return ["batch"] if len(batch) == 1 else [f"batch{axis}" for axis in range(len(batch))]


def _pair(name: str, value: Any) -> tuple[Any, Any]:
    """Return an argument as a pair (queries, keys); one array serves both."""
    if not isinstance(value, (tuple, list)):
        return value, value
    if len(value) != 2:
        raise ValueError(f"{name} must be one array or a pair (queries, keys), got {len(value)} arrays")
    return value[0], value[1]


def _arrays(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that are arrays, by name, having checked their kinds.

    NumPy's slopes are left out: they are accepted with any library; with JAX, so is any array but the tensors.
    """
    may_be_int = (*SLOPES, "q_offset")
    q_offset = arguments["q_offset"]
    if isinstance(q_offset, (bool, float)):
        raise TypeError(f"q_offset must be an integer or an integer array, got {q_offset}")
    arrays = {
        name: checks.array(name, value)
        for name, value in arguments.items()
        if not (name in may_be_int and checks.is_int(value)) and not (value is None and name not in TENSORS)
    }
    tensor = arguments["query"]
    kinds = {name: name in SLOPES or (name not in TENSORS and is_constant(x, tensor)) for name, x in arrays.items()}
    return {name: array for name, array in arrays.items() if not (kinds[name] and is_numpy(array))}


def _common_device(xp: Namespace, arrays: dict[str, Any]) -> Device | None:
    devices = {name: device_of(xp, array) for name, array in arrays.items()}
    for name, device in devices.items():
        if device != devices["query"]:
            raise ValueError(f"{name} must be on the device of query, {devices['query']}, got {device}")
    return devices["query"]


def _tensor_sizes(xp: Namespace, query: Any, key: Any, value: Any, layout: tuple[str, str, str]) -> dict[str, Any]:
    tensors = {"query": query, "key": key, "value": value}
    shapes = {name: tuple(checks.tensor(xp, name, tensor).shape) for name, tensor in tensors.items()}
    axes = _axes(layout)
    for name, shape in shapes.items():
        if len(shape) < 3:
            raise ValueError(f"{name} must have axes {axes}, got shape {shape}")
    if len({str(tensor.dtype) for tensor in tensors.values()}) > 1:
        listed = ", ".join(f"{name} {tensor.dtype}" for name, tensor in tensors.items())
        raise TypeError(f"query, key and value must have one dtype, got {listed}")
    if shapes["key"] != shapes["value"]:
        raise ValueError(f"value must have the shape of key, {shapes['key']} {axes}, got {shapes['value']}")
    q, kv = (dict(zip(layout, shapes[name][-3:], strict=True)) for name in ("query", "key"))
    batch = shapes["query"][:-3]
    if shapes["key"][:-3] != batch:
        raise ValueError(f"key must have the batch axes of query, {batch}, got {shapes['key'][:-3]}")
    # Sizes are compared by axis name, whatever the layout.
    if kv["head_dim"] != q["head_dim"]:
        raise ValueError(f"key must have the head_dim of query, {q['head_dim']}, got {kv['head_dim']}")
    if q["head_dim"] < 1:
        raise ValueError(f"head_dim must be at least 1, got query of shape {shapes['query']} {axes}")
    for count, name, sizes in (("num_heads", "query", q), ("num_kv_heads", "key", kv)):
        if sizes["heads"] < 1:
            raise ValueError(f"{count} must be at least 1, got {name} of shape {shapes[name]} {axes}")
    if q["heads"] % kv["heads"]:
        heads = f"{kv['heads']} (key) and {q['heads']} (query)"
        raise ValueError(f"num_kv_heads must divide num_heads, got {heads}; their axes are {axes}")
    return {
        "batch": batch,
        "num_heads": q["heads"],
        "num_kv_heads": kv["heads"],
        "q_len": q["length"],
        "kv_len": kv["length"],
        "head_dim": q["head_dim"],
    }


def _slopes(
    xp: Namespace,
    name: str,
    slopes: Any,
    sizes: dict[str, Any],
    layout: tuple[str, str, str],
    allow_negative: bool,
    dtype: DType,
    device: Device | None,
) -> Any:
    if checks.is_int(slopes):
        checks.slopes_count(name, slopes, sizes["num_heads"], _axes(layout))
    else:
        checks.floating_array(xp, name, slopes)
        checks.slopes_shape(name, slopes, sizes["num_heads"], sizes["batch"], _axes(layout))
        checks.slopes_values(name, slopes, allow_negative=allow_negative, working=dtype)
    return place_slopes(xp, slopes, dtype, device)


def _log_gates(
    xp: Namespace, gates: Any, sizes: dict[str, Any], layout: tuple[str, str, str], dtype: DType, mask: Any | None
) -> Any:
    """Check gates, ``[*batch, num_heads, kv_len]`` or ``[*batch, kv_len, num_heads]``; return them heads-first."""
    axes = {"heads": sizes["num_heads"], "length": sizes["kv_len"]}
    shape = (*sizes["batch"], *(axes[axis] for axis in layout if axis in axes))
    if tuple(checks.floating_array(xp, "log_gates", gates).shape) != shape:
        names = {"heads": "num_heads", "length": "kv_len"}
        listed = ", ".join([*_batch_axes(sizes["batch"]), *(names[axis] for axis in layout if axis in names)])
        raise ValueError(f"log_gates must have shape {shape} ({listed}), got {tuple(gates.shape)}")
    gates = checked_gates(xp, astype(xp, gates, dtype))
    gates = gates if layout == HEADS_FIRST else xp.matrix_transpose(gates)
    if mask is None or (mask.ndim > 1 and mask.shape[-2] != 1):
        return gates
    # The gates of tokens that a mask of keys hides count for nobody.
    return xp.where(mask if mask.ndim == 1 else mask[..., 0, :], gates, 0.0)


def _segment_ids(xp: Namespace, pair: tuple[Any, Any], sizes: dict[str, Any]) -> tuple[Any, Any]:
    """Check the ids of queries and keys, ``[..., length]``, which broadcast to ``[*batch, length]``; return them."""
    for name, ids, length in zip(("q_len", "kv_len"), pair, (sizes["q_len"], sizes["kv_len"]), strict=True):
        shape = tuple(checks.integer_array(xp, "segment_ids", ids).shape)
        axes = ", ".join([*_batch_axes(sizes["batch"]), name])
        checks.by_token("segment_ids", shape, (*sizes["batch"], length), axes)
    if not any("uint" in str(ids.dtype) for ids in pair):
        return pair
    return signed(xp, pair[0]), signed(xp, pair[1])  # PyTorch neither compares nor casts most unsigned integers


def _points(xp: Namespace, pair: tuple[Any, Any], sizes: dict[str, Any]) -> tuple[Any, Any]:
    """Return the points of queries and keys, ``[..., length, dims]``."""
    q_points, kv_points = (
        points_of_call(xp, x, sizes["batch"], name, sizes[name])
        for x, name in zip(pair, ("q_len", "kv_len"), strict=True)
    )
    if q_points.shape[-1] != kv_points.shape[-1]:
        dims = f"{q_points.shape[-1]} (queries) and {kv_points.shape[-1]} (keys)"
        raise ValueError(f"positions of queries and keys must have as many dims, got {dims}")
    return q_points, kv_points


def _q_offset(xp: Namespace, q_offset: Any, sizes: dict[str, Any]) -> Any:
    if q_offset is None:
        q_offset = sizes["kv_len"] - sizes["q_len"]
    if checks.is_int(q_offset):
        q_offset = checks.integer("q_offset", q_offset)
        checks.positions_fit(q_offset, sizes["q_len"], sizes["kv_len"])
        return q_offset
    shape = tuple(checks.integer_array(xp, "q_offset", q_offset).shape)
    if shape not in ((), sizes["batch"]):
        batch = f" or {sizes['batch']} (batch)" if sizes["batch"] else ""
        raise ValueError(f"q_offset must have shape (){batch}, got {shape}")
    checks.positions_fit(FARTHEST, sizes["q_len"], sizes["kv_len"])
    # Clip offsets instead of raising: an error would have to wait for the values. Clipping moves all keys of a row by
    # the same distance, which softmax ignores. Only a window of more than 2**30 tokens would see other keys.
    offset = signed(xp, q_offset)
    if "uint" in str(q_offset.dtype):
        # A negative number here is an unsigned offset that wrapped around.
        offset = xp.where(offset < 0, FARTHEST, offset)
    return astype(xp, xp.clip(offset, -FARTHEST, FARTHEST), xp.int32)


def _axes(layout: tuple[str, str, str]) -> str:
    return f"[..., {', '.join(layout)}]"
