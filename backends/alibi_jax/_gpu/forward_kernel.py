"""The GPU kernel's forward pass: one program a tile of queries, which walks over the tiles of keys it needs.

Scores are in powers of two: ``log2(e)`` is part of the scale and the slopes, because a GPU's exponential is ``2**x``.

The bias of query ``i`` and key ``j`` is formed from positions, in float32, in one of two ways. Where all of a tile's
keys lie before (or after) its queries, and all are to be seen, a row of numbers, ``slope * (j - base)``, is added to
the scores, with ``base`` the position of a key near the queries, and ``-slope * (i - base)``, constant along each row,
to each row's maximum instead. Both are small where weights are large, so no digits are lost. Where the diagonal, the
end of what is needed, a window or a mask passes through a tile, the distance is formed for each pair.

Right in interpretation, not yet run on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from alibi_jax._compatible import local
from alibi_jax._tpu import LOG2_E, product

if TYPE_CHECKING:
    from alibi_jax._gpu.passes import Inputs, KernelShape

MAX_WINDOW = 2**30  # tokens: as good as none, and sums with positions fit int32
LOWEST = -1e30  # what a row's maximum begins with: finite, so that a hidden key's -inf less this is no NaN


def forward(shape: KernelShape, inputs: Inputs, with_log_sum_exps: bool) -> tuple[jax.Array, jax.Array | None]:
    """Return the result ``[batch, q_len, num_heads, head_dim]`` and its rows' log-sum-exps.

    These are ``[batch, num_heads, q_len]`` float32, in powers of two, of logits as the kernels form them; +inf for a
    query that sees no key. None unless they are asked for: they take memory. With them, for a backward pass, the result
    is float32.
    """
    own = at_tile(shape)
    out_specs = [pl.BlockSpec((None, shape.q_block, None, shape.width), lambda i, h, b: (b, own(i), h, 0))]
    out_shape = [local(inputs.query.shape, jnp.float32 if with_log_sum_exps else inputs.query.dtype)]
    if with_log_sum_exps:
        out_specs.append(pl.BlockSpec((None, None, shape.q_block), lambda i, h, b: (b, h, own(i))))
        out_shape.append(local((shape.batch, shape.num_heads, shape.q_len), jnp.float32))
    result, *rest = pl.pallas_call(
        partial(_kernel, shape),
        grid=(shape.q_tiles, shape.num_heads, shape.batch),
        in_specs=specs_by_query(shape, inputs),
        out_specs=out_specs,
        out_shape=out_shape,
        compiler_params=compiler_params(shape, 2**13),
        interpret=shape.options.interpret,
        name="alibi_forward",
    )(*inputs)
    return result, rest[0] if rest else None


def _kernel(shape: KernelShape, *refs: Any) -> None:
    inputs, (result, *log_sum_exps) = refs[:8], refs[8:]  # [q_block, width], [q_block]
    tile = Tile.of_query(shape, inputs)
    query = load_rows(shape, inputs[2], slice(None), tile.is_there)

    def visit(block: Any, side: str, sums: tuple[Any, ...]) -> tuple[Any, ...]:
        largest, total, mean = sums  # [q_block], [q_block], [q_block, width]
        keys = tile.keys(block, side)
        key, value = tile.tensors(keys, inputs[3:5])
        scores = product(query, key, (1, 1))  # [q_block, kv_block]
        bias, of_queries = tile.bias(keys, side)
        logits = scores * (shape.scale * LOG2_E) + bias
        now = jnp.maximum(largest, jnp.max(logits, axis=1) + of_queries)
        weights = jnp.exp2(logits - (now - of_queries)[:, None])
        decay = jnp.exp2(largest - now)
        # Rounded before they are summed, too, or what all values have in common would not come back whole.
        rounded = weights.astype(value.dtype)
        mean = mean * decay[:, None] + product(rounded, value, (1, 0))
        return now, total * decay + jnp.sum(rounded.astype(jnp.float32), axis=1), mean

    zeros = jnp.zeros((shape.q_block,), jnp.float32)
    start = zeros + LOWEST, zeros, jnp.zeros((shape.q_block, shape.width), jnp.float32)
    largest, total, mean = walk(shape, *tile.spans(), visit, start)
    sees = total != 0  # NaN is not 0
    weight = jnp.where(sees, total, 1.0)
    store_rows(shape, result, mean / weight[:, None], tile.is_there)
    for ref in log_sum_exps:
        plgpu.store(ref, jnp.where(sees, largest + jnp.log2(weight), jnp.inf), mask=tile.is_there)


# --- What the passes share ------------------------------------------------------------------------------------------


class Keys(NamedTuple):
    """A tile of keys."""

    start: Any  # position of the first
    positions: Any  # [kv_block] int32
    needed: Any  # [kv_block] booleans; None where all are
    ids: Any = None  # [kv_block]; None without segments, and where no key is hidden
    shown: Any = None  # [kv_block] int8; None without a mask, likewise


class Tile(NamedTuple):
    """A tile of queries, and the keys it needs. Scores have queries along ``q_axis``, keys along the other."""

    shape: KernelShape
    first: Any  # position of the first key it needs
    stop: Any  # of the one after the last
    start: Any  # of the first query
    slopes: tuple[Any, Any]  # scalars, for keys behind and ahead, times log2(e)
    is_there: Any  # [q_block] booleans, False for rows after the last query; None where all are there
    q_ids: Any  # [q_block]; None without segments
    of_keys: tuple[Any, Any]  # references, [kv_len]: segments, and whether keys are shown; None where there is no such
    q_axis: int = 0

    @classmethod
    def of_query(cls, shape: KernelShape, refs: Sequence[Any]) -> Tile:
        """Return a program's own tile."""
        table, slopes, _, _, _, q_ids, kv_ids, shown = refs
        there = rows_there(shape, at_tile(shape)(pl.program_id(0)))
        ids = None if q_ids is None else plgpu.load(q_ids, mask=there, other=None if there is None else 0)
        return cls(shape, table[0], table[1], table[2], (slopes[0], slopes[1]), there, ids, (kv_ids, shown))

    def spans(self) -> tuple[Any, Any, list[tuple[str, Any, Any]]]:
        """Return the first tile of keys, the one after the last, and which of them need no masks.

        The latter lie behind all queries ("past") or ahead of them ("future"): sides, each from one tile to another.
        """
        size, last = self.shape.kv_block, self.start + self.shape.q_block - 1
        begin, end = div(self.first, size), div(self.stop + size - 1, size)
        earliest, latest = self.first, self.stop
        if self.shape.window_size is not None:
            window = min(self.shape.window_size, MAX_WINDOW)
            earliest, latest = jnp.maximum(earliest, last - window), jnp.minimum(latest, self.start + window + 1)
        spans: list[tuple[str, Any, Any]] = []
        sides = {"past": (earliest, jnp.minimum(self.start + 1, self.stop))}
        if not self.shape.is_causal:
            sides["future"] = jnp.maximum(self.first, last), latest
        at = begin
        for side, (since, until) in sides.items():
            low = jnp.clip(div(jnp.maximum(since, 0) + size - 1, size), at, jnp.maximum(end, at))
            at = jnp.clip(div(jnp.maximum(until, 0), size), low, jnp.maximum(end, low))
            spans.append((side, low, at))
        return begin, end, spans

    def keys(self, block: Any, side: str) -> Keys:
        """Return a tile of keys."""
        start = block * self.shape.kv_block
        positions = start + jnp.arange(self.shape.kv_block, dtype=jnp.int32)
        if side != "both":
            return Keys(start, positions, None)
        needed = (positions >= self.first) & (positions < self.stop)
        at = pl.ds(start, self.shape.kv_block)
        known = (None if ref is None else plgpu.load(ref.at[at], mask=needed, other=0) for ref in self.of_keys)
        return Keys(start, positions, needed, *known)

    def tensors(self, keys: Keys, refs: Sequence[Any]) -> list[Any]:
        """Return the keys and values of a tile, ``[kv_block, width]`` each."""
        return [load_rows(self.shape, ref, pl.ds(keys.start, self.shape.kv_block), keys.needed) for ref in refs]

    def bias(self, keys: Keys, side: str) -> tuple[Any, Any]:
        """Return what is added to scores: for each pair or each key, and for each query (0 or ``[q_block]``).

        -inf where a key is hidden.
        """
        behind, ahead = self.slopes
        if side == "past":
            return along(behind * self._relative(keys), 1 - self.q_axis), -behind * self.own
        if side == "future":
            return along(-ahead * self._relative(keys), 1 - self.q_axis), ahead * self.own
        distance = self.distance(keys)
        bias = -behind * distance
        if not self.shape.is_causal:
            bias = jnp.where(distance >= 0, bias, ahead * distance)
        return jnp.where(self._visible(keys), bias, -jnp.inf), jnp.zeros((self.shape.q_block,), jnp.float32)

    def distance(self, keys: Keys) -> Any:
        """Return how far keys are behind queries, float32 for each pair, negative where they are ahead."""
        return along(self.own, self.q_axis) - along(self._relative(keys), 1 - self.q_axis)

    @property
    def positions(self) -> Any:
        """``[q_block]`` int32."""
        return self.start + jnp.arange(self.shape.q_block, dtype=jnp.int32)

    @property
    def own(self) -> Any:
        """The queries' positions less the base, ``[q_block]`` float32.

        Of a query that stands beyond the keys it needs, the position of the nearest of them: the rest of the way is
        the same for all.
        """
        return (jnp.clip(self.positions, self.first, self._last) - self._base).astype(jnp.float32)

    @property
    def _last(self) -> Any:
        return jnp.maximum(self.stop - 1, self.first)

    @property
    def _base(self) -> Any:
        return jnp.clip(self.start, self.first, self._last)

    def _relative(self, keys: Keys) -> Any:
        return (keys.positions - self._base).astype(jnp.float32)

    def _visible(self, keys: Keys) -> Any:
        visible = along(keys.needed, 1 - self.q_axis)
        behind = along(self.positions, self.q_axis) - along(keys.positions, 1 - self.q_axis)
        if self.shape.is_causal:
            visible &= behind >= 0
        if self.shape.window_size is not None:
            window = min(self.shape.window_size, MAX_WINDOW)
            visible &= behind <= window
            if not self.shape.is_causal:
                visible &= behind >= -window
        if keys.ids is not None:
            visible &= along(self.q_ids, self.q_axis) == along(keys.ids, 1 - self.q_axis)
        return visible if keys.shown is None else visible & along(keys.shown != 0, 1 - self.q_axis)


def walk(
    shape: KernelShape,
    begin: Any,
    end: Any,
    spans: Sequence[tuple[str, Any, Any]],
    visit: Callable[[Any, str, Any], Any],
    sums: Any,
) -> Any:
    """Visit tiles ``begin`` to ``end``: those of spans without masks, the others in one more loop.

    Args:
        shape: Of the kernel.
        begin: The first tile.
        end: The one after the last.
        spans: Sides, "past" or "future", and the tiles that are there: in order, each from and to.
        visit: Takes a tile, its side ("both" with masks) and the sums so far; returns the sums.
        sums: What to begin with.
    """
    skipped = []
    if not shape.hides_keys:
        for side, low, high in spans:
            sums = jax.lax.fori_loop(low, high, lambda block, sums, side=side: visit(block, side, sums), sums)
            skipped.append((low, high - low))

    def at_edge(index: Any, sums: Any) -> Any:
        block = begin + index
        for low, length in skipped:
            block = jnp.where(block >= low, block + length, block)
        return visit(block, "both", sums)

    rest = jnp.maximum(end - begin, 0) - sum(length for _, length in skipped)
    return jax.lax.fori_loop(0, rest, at_edge, sums)


def specs_by_query(shape: KernelShape, inputs: Inputs) -> list[Any]:
    """Return how the programs of a grid of tiles of queries, heads and batch entries see ``inputs``."""
    own, keys = at_tile(shape), shape.kv_tiles * shape.kv_block
    if shape.kv_heads_first:
        of_head = pl.BlockSpec((None, None, keys, shape.width), lambda i, h, b: (b, div(h, shape.group), 0, 0))
    else:
        of_head = pl.BlockSpec((None, keys, None, shape.width), lambda i, h, b: (b, 0, div(h, shape.group), 0))
    return [
        pl.BlockSpec((None, None, None, 3), lambda i, h, b: (b, h, own(i), 0)),
        pl.BlockSpec((None, None, 2), lambda i, h, b: (b, h, 0)),
        pl.BlockSpec((None, shape.q_block, None, shape.width), lambda i, h, b: (b, own(i), h, 0)),
        of_head,
        of_head,
        spec_of_batch(inputs.q_ids, shape.q_block, lambda i, h, b: (b, own(i))),
        spec_of_batch(inputs.kv_ids, keys, lambda i, h, b: (b, 0)),
        spec_of_batch(inputs.shown, keys, lambda i, h, b: (b, 0)),
    ]


def spec_of_batch(array: jax.Array | None, size: int, index: Callable[..., tuple[Any, Any]]) -> Any:
    """Return how programs see ``[batch or 1, tokens]``; None for nothing."""
    if array is None:
        return None
    is_shared = array.shape[0] == 1
    return pl.BlockSpec((None, size), lambda i, h, b: index(i, h, 0 if is_shared else b))


def compiler_params(shape: KernelShape, most: int) -> Any:
    """Return what Triton is told; by default, four warps where a tile of queries has at most so many numbers."""
    num_warps = shape.options.num_warps or (4 if shape.q_block * shape.width <= most else 8)
    return plgpu.CompilerParams(num_warps=num_warps, num_stages=shape.options.num_stages)


def at_tile(shape: KernelShape) -> Callable[[Any], Any]:
    """Return which tile of queries a program computes: those with many keys first, or others would wait for them."""
    return lambda i: shape.q_tiles - 1 - i


def rows_there(shape: KernelShape, tile: Any) -> Any:
    """Return which rows of a tile of queries there are; None for all of them."""
    if shape.q_len % shape.q_block == 0:
        return None
    return tile * shape.q_block + jnp.arange(shape.q_block, dtype=jnp.int32) < shape.q_len


def load_rows(shape: KernelShape, ref: Any, at: Any, rows: Any) -> Any:
    """Return ``[rows, width]`` of a reference, zeros where there is nothing."""
    at = at if isinstance(at, tuple) else (at,)
    mask = _mask(shape, rows)
    return plgpu.load(ref.at[*at, slice(None)], mask=mask, other=None if mask is None else 0)


def store_rows(shape: KernelShape, ref: Any, values: Any, rows: Any) -> None:
    """Write ``[rows, width]``, but for what is not there."""
    plgpu.store(ref, values.astype(ref.dtype), mask=_mask(shape, rows))


def _mask(shape: KernelShape, rows: Any) -> Any:
    columns = None
    if shape.width != shape.head_dim:
        columns = (jnp.arange(shape.width, dtype=jnp.int32) < shape.head_dim)[None, :]
    if rows is None:
        return columns
    return rows[:, None] if columns is None else rows[:, None] & columns


def along(vector: Any, axis: int) -> Any:
    """Return a vector as a matrix of one column or row: along axis 0 or 1."""
    return vector[:, None] if axis == 0 else vector[None, :]


def div(number: Any, size: int) -> Any:
    """Return a quotient of what is not negative, rounded down."""
    return jax.lax.div(number, jnp.int32(size))
