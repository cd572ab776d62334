"""One attention call: its arguments validated and its defaults filled in, for any backend and any layout."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

from alibi_core._arrays import (
    FLOATING,
    Array,
    Device,
    DType,
    Namespace,
    arange,
    asarray,
    checks,
    constant,
    floating_name,
    is_constant,
    is_kind,
    is_never_negative,
    namespace_of,
)
from alibi_core._bias import linear_bias, unit_bias_of, with_head_axis
from alibi_core._distance import DISTANCES, LAWS, difference, may_have_nan, relative_points
from alibi_core._frame import HEADS_FIRST, Frame, arrays_of, common_device, pair_of
from alibi_core._gates import gate_sums, sees_through, within
from alibi_core._mask import boolean_mask

LARGEST_TOLERANCE = 0.5  # above 0.5 the key that a bound refers to could itself be dropped


class BiasTerms(NamedTuple):
    """The parts of a bias that do not depend on slopes; they broadcast to ``[*batch, num_heads, q_len, kv_len]``."""

    relative: Any  # key minus query position
    visible: Any | None  # None: every query sees every key
    attends: Any | None  # whether a query sees a key; None if all do
    unit_bias: Any  # the bias of slopes of 1
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
    # logits that take weight and give nothing, [num_heads, 1], working_dtype; biases then count from the query itself
    sinks: Any | None = field(metadata={"axes": ("heads", "queries")})
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
        sinks: Array | None = None,
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
        q_ids, kv_ids = pair_of("segment_ids", segment_ids)
        q_positions, kv_positions = pair_of("positions", positions)
        others = {"log_gates": log_gates, "sinks": sinks, "q_offset": q_offset, "mask": mask, "added_bias": added_bias}
        others |= {"segment_ids": q_ids, "segment_ids of keys": kv_ids}
        others |= {"positions": q_positions, "positions of keys": kv_positions}
        given = {"query": query, "key": key, "value": value, "slopes": slopes, "future_slopes": future_slopes}
        # All arrays must share one namespace and one device; errors name the argument.
        arrays = arrays_of(given | others)
        xp = namespace_of(*arrays.values(), xp=xp, names=tuple(arrays))
        device = common_device(xp, arrays)
        frame = Frame.of(xp, device, query, key, value, layout)
        made = {id(x): constant(xp, name, x, device) for name, x in others.items() if is_constant(x, query)}
        if made:  # by id: one array stays one
            found = (made.get(id(x), x) for x in others.values())
            log_gates, sinks, q_offset, mask, added_bias, q_ids, kv_ids, q_positions, kv_positions = found
        if tolerance is None:
            tolerance = FLOATING[str(floating_name(frame.dtype))].roundoff
        tolerance = min(checks.non_negative_number("tolerance", tolerance), LARGEST_TOLERANCE)
        if positions is not None or law != "linear":
            tolerance = 0.0  # horizons know neither
        checks.direction(is_causal, future_slopes)
        checks.boolean("allow_negative_slopes", allow_negative_slopes)
        if slopes is None:
            slopes = int(frame.num_heads)  # sizes are tensors in torch.jit.trace
            if log_gates is not None:  # gates are in place of ALiBi, unless slopes are given too
                slopes = asarray(xp, [0.0] * slopes, frame.working_dtype, device)
        past, future = (
            frame.placed_slopes(name, x, query, layout, allow_negative=allow_negative_slopes)
            for name, x in (("slopes", slopes), ("future_slopes", future_slopes))
        )
        for name, one in (("segment_ids", segment_ids), ("positions", positions)):
            if one is not None and not isinstance(one, (tuple, list)) and frame.q_len != frame.kv_len:
                raise ValueError(
                    f"{name} must be a pair (queries, keys) when q_len, {frame.q_len}, and kv_len, {frame.kv_len}, "
                    "differ; got one array"
                )
        q_segment_ids = kv_segment_ids = q_points = kv_points = None
        if segment_ids is not None:
            q_segment_ids, kv_segment_ids = frame.segment_ids((q_ids, kv_ids))
        if positions is not None:
            for name, x in (("q_offset", q_offset), ("window_size", window_size)):
                if x is not None:
                    raise ValueError(f"{name} must be None with positions, which say where each token is, got {x}")
            q_points, kv_points = frame.points((q_positions, kv_positions), is_causal, future_slopes)
        offset = frame.offset(q_offset)
        if window_size is not None:
            window_size = min(checks.window(window_size), checks.MAX_POSITION)
        if mask is not None:
            mask = boolean_mask(xp, mask, *frame.scores())
        if log_gates is not None:
            excluded = {"is_causal=False": not is_causal, "positions": positions is not None}
            excluded[f"law {law!r}"] = law != "linear"
            for rule in (rule for rule, is_given in excluded.items() if is_given):
                raise ValueError(f"log_gates must be None with {rule}: gates count from token to token of the past")
            log_gates = frame.gates(log_gates, layout, mask)
        if added_bias is not None:
            added_bias, mask = frame.addition(added_bias, mask)
        if scale is not None:
            scale = checks.number_in(frame.working_dtype, "scale", scale)
        return cls(
            **frame._asdict(),
            slopes=past,
            future_slopes=future,
            log_gates=log_gates,
            sinks=None if sinks is None else frame.placed_sinks(sinks),
            is_causal=bool(is_causal),
            q_offset=offset,
            q_segment_ids=q_segment_ids,
            kv_segment_ids=kv_segment_ids,
            window_size=window_size,
            mask=mask,
            # float() keeps float64 where torch.jit.trace makes a tensor of the size.
            scale=float(frame.head_dim) ** -0.5 if scale is None else scale,
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

    def having(self, **fields: Any) -> AttentionCall:
        """Return the call with other fields, unchecked: ten times as fast as ``dataclasses.replace``, untraceable."""
        other = object.__new__(AttentionCall)
        vars(other).update(vars(self), **fields)
        return other

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
        bias = self._linear_bias(terms.relative, terms.visible, unit_bias=terms.unit_bias, out=out)
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
            has_rules = self.mask is not None or self.q_segment_ids is not None or self.q_points is not None
            if has_rules and self.sinks is None:
                nearest = self._origin(relative, visible)
            visible = xp.logical_or(visible, xp.logical_not(attends))
            nearest = None if nearest is None else xp.where(attends, nearest, 0)
        origins = None
        if self.log_gates is not None and not self.is_empty:
            # The nearest visible key, as for distances: [..., q_len, 1] becomes [..., q_len].
            origins = self._key_near(0 if nearest is None else nearest[..., 0])
        is_in_space = self.q_points is not None and self.q_points.shape[-1] > 1  # relative positions are never positive
        rules: dict[str, Any] = {"is_causal": self.is_causal or is_in_space, "law": self.law, "rest": rest}
        unit_bias = unit_bias_of(xp, relative, nearest, self.slopes.dtype, **rules)
        # In a fully masked row all keys become visible, at distance 0: the bias is 0.
        unit_bias = unit_bias if attends is None else xp.where(attends, unit_bias, 0.0)
        return BiasTerms(relative, visible, attends, unit_bias, origins)

    @property
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

        The bound is ``[..., q_len, 1]``; None for 0, which a sink asks for: a constant a row would change its weight.
        """
        xp, rest = self.xp, None
        if self.q_points is None:
            q_positions, kv_positions = self.positions()
            relative = difference(q_positions, kv_positions)
            if self.sinks is not None:
                return with_head_axis(relative), None, None
            return with_head_axis(relative), None, with_head_axis(self.distance_to_keys(q_positions)[..., :, None])
        # the own key is at distance 0
        has_nearest = self.sinks is None and not (self.is_empty or self.sees_own_key)
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
    """Return the call without its arrays (hashable), and its arrays by field name, which ``having`` puts back."""
    return call.having(**dict.fromkeys(call.arrays)), call.arrays
