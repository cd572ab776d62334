"""ALiBi attention as a kernel for NVIDIA GPUs, in Pallas by way of Triton: both passes, from operands to results.

Right in interpretation, not yet run on a GPU. What Pallas makes of it was compiled by Triton 3.9 for compute
capabilities 8.0, 8.6, 9.0, 10.0 and 12.0; before 8.0, GPUs have no units for these products.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp

from alibi_core.backend import checks
from alibi_jax._call import Operands, Rules, kv_axis, needed_keys
from alibi_jax._tpu import both_slopes, by_slopes, first_positions, row_products

SMALLEST = 16  # rows and columns of a matrix that Triton multiplies, at least
WIDEST = 256  # head_dim, at most: wider rows leave no room for a tile
# Numbers of 16 bits in a tile of queries, and of keys, at most, and queries in it. With more, threads run out of
# registers (so Triton's compiler reports for compute capabilities 8.6 and 9.0), or the tiles that are on their way do
# not fit the 99 KiB that a group of threads shares on the smaller GPUs.
FORWARD, BACKWARD = (2**14, 2**13, 2**10), (2**13, 2**13, 64)
FLOAT32 = 4  # so many times fewer numbers of 32 bits: they are multiplied by other units


@dataclass(frozen=True)
class GPU:
    """The kernel for NVIDIA GPUs, as an ``implementation``.

    Right in interpretation, not yet run on a GPU: how fast it is there is not known. Meant for compute capability 8.0
    and later.

    Args:
        q_block: Queries in a tile: a power of two, at least 16. Default 128; short sequences and wide heads take less.
        kv_block: Keys in a tile: likewise. Default 64.
        num_warps: Groups of 32 threads that compute a tile together: a power of two, at most 32. Default 4 for
            small tiles, otherwise 8.
        num_stages: Tiles of keys that are on their way at a time. Default 2.
        interpret: Run the kernel's text on any device, as ordinary array operations, instead of compiling it for a GPU:
            slow, and meant for tests.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If a number is out of its range.

    Example:
        >>> GPU(q_block=64)
        GPU(q_block=64, kv_block=64, num_warps=None, num_stages=2, interpret=False)
    """

    q_block: int = 128
    kv_block: int = 64
    num_warps: int | None = None
    num_stages: int = 2
    interpret: bool = False

    def __post_init__(self) -> None:
        for name in ("q_block", "kv_block"):
            size = checks.positive_int(name, getattr(self, name))
            if size < SMALLEST or size != _power_of_two(size):
                raise ValueError(f"{name} must be a power of two, at least {SMALLEST}, got {size}")
        if self.num_warps is not None:
            warps = checks.positive_int("num_warps", self.num_warps)
            if warps > 32 or warps != _power_of_two(warps):
                raise ValueError(f"num_warps must be a power of two, at most 32, got {warps}")
        checks.positive_int("num_stages", self.num_stages)
        checks.boolean("interpret", self.interpret)


@dataclass(frozen=True)
class KernelShape:
    """All that the text of a kernel depends on. Lengths are in tokens."""

    batch: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    q_len: int
    kv_len: int
    q_block: int
    kv_block: int
    is_causal: bool
    window_size: int | None
    scale: float
    kv_heads_first: bool
    hides_keys: bool  # by segments, or a mask of keys
    is_float32: bool
    options: GPU

    @classmethod
    def of(cls, rules: Rules, operands: Operands, options: GPU) -> KernelShape:
        """Return what the kernels for a call are built for."""
        batch, q_len, num_heads, head_dim = operands.query.shape
        kv_len, num_kv_heads = operands.key.shape[kv_axis(rules)], operands.key.shape[3 - kv_axis(rules)]
        shape = cls(
            batch=batch,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            q_len=q_len,
            kv_len=kv_len,
            q_block=min(options.q_block, _power_of_two(max(q_len, SMALLEST))),
            kv_block=min(options.kv_block, _power_of_two(max(kv_len, SMALLEST))),
            is_causal=rules.is_causal,
            window_size=rules.window_size,
            scale=rules.scale,
            kv_heads_first=rules.kv_heads_first,
            hides_keys=operands.q_segment_ids is not None or operands.mask is not None,
            is_float32=operands.query.dtype == jnp.float32,
            options=options,
        )
        return shape._within(FORWARD)

    @property
    def of_backward(self) -> KernelShape:
        """What the backward pass's kernels are built for: they hold more of each tile."""
        return self._within(BACKWARD)

    def _within(self, most: tuple[int, int, int]) -> KernelShape:
        row = self.width * (FLOAT32 if self.is_float32 else 1)
        queries, keys = (max(SMALLEST, numbers // row) for numbers in most[:2])
        return replace(self, q_block=min(self.q_block, queries, most[2]), kv_block=min(self.kv_block, keys))

    @property
    def group(self) -> int:
        """How many query heads share a key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def width(self) -> int:
        """How many numbers a kernel holds of a row: a power of two."""
        return max(SMALLEST, _power_of_two(self.head_dim))

    @property
    def q_tiles(self) -> int:
        """How many tiles the queries make up."""
        return -(-self.q_len // self.q_block)

    @property
    def kv_tiles(self) -> int:
        """How many tiles the keys make up."""
        return -(-self.kv_len // self.kv_block)


class Inputs(NamedTuple):
    """What both passes read. What a call has not is None; a batch axis of length 1 stands for any."""

    table: jax.Array  # [batch, num_heads, q_tiles, 3] int32: first key, the one after the last, first query's position
    slopes: jax.Array  # [batch, num_heads, 2] float32, times log2(e): for keys behind, and ahead
    query: jax.Array  # as in Operands, as key and value
    key: jax.Array
    value: jax.Array
    q_ids: jax.Array | None  # [batch or 1, q_len] integers
    kv_ids: jax.Array | None  # [batch or 1, kv_len]
    shown: jax.Array | None  # [batch or 1, kv_len] int8, 0 where a key is hidden


def refusal(operands: Operands) -> str | None:
    """Return why no kernel can run a call, as the rest of a sentence that begins with its name; None if one can."""
    if importlib.util.find_spec("jax.experimental.pallas.triton") is None:
        return f"needs Pallas for Triton, which JAX {jax.__version__} has not"
    if operands.query.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        return f"must be given float32, bfloat16 or float16, got {operands.query.dtype}"
    if operands.query.shape[-1] > WIDEST:
        return f"must be given a head_dim of at most {WIDEST}, got {operands.query.shape[-1]}"
    if operands.mask is not None and operands.mask.shape[1:3] != (1, 1):
        return f"must be given a mask of keys alone, [batch, 1, 1, kv_len], got {tuple(operands.mask.shape)}"
    return None


def forward(
    rules: Rules, operands: Operands, options: GPU, *, with_log_sum_exps: bool
) -> tuple[jax.Array, jax.Array | None]:
    """Return the result, ``[batch, q_len, num_heads, head_dim]``, and log-sum-exps for the backward pass or None."""
    from alibi_jax._gpu import (
        forward_kernel as _gpu_forward,  # Pallas for Triton is deprecated since JAX 0.12: nobody else is to miss it
    )

    shape = KernelShape.of(rules, operands, options)
    return _gpu_forward.forward(shape, inputs_of(rules, operands, shape), with_log_sum_exps)


def backward(
    rules: Rules,
    operands: Operands,
    result: jax.Array,
    log_sum_exps: jax.Array,
    cotangent: jax.Array,
    options: GPU,
    *,
    slopes_too: bool,
) -> tuple[jax.Array | None, ...]:
    """Return the gradients of query, key, value, and ``[batch, num_heads]`` of slopes and future slopes, or None."""
    from alibi_jax._gpu import backward_kernel as _gpu_backward

    whole = KernelShape.of(rules, operands, options)
    shape = whole.of_backward
    inputs = inputs_of(rules, operands, whole)
    inputs = inputs._replace(table=_finer(inputs.table, whole, shape))
    cotangent = cotangent.astype(operands.query.dtype)
    rows = _gpu_backward.Rows(cotangent, log_sum_exps, row_products(cotangent, result))
    d_key, d_value = _gpu_backward.backward_of_keys(shape, inputs, rows)
    d_query, *parts = _gpu_backward.backward_of_queries(shape, inputs, rows, slopes_too)
    behind, ahead = jnp.moveaxis(parts[0].sum(axis=2), -1, 0) if parts else (None, None)
    return (
        d_query,
        d_key,
        d_value,
        *by_slopes(operands, behind, ahead),
    )


def inputs_of(rules: Rules, operands: Operands, shape: KernelShape) -> Inputs:
    """Return what the kernels read: no tensor is copied."""
    heads = shape.batch, shape.num_heads
    tokens = shape.q_tiles * shape.q_block + shape.kv_tiles * shape.kv_block
    offset = first_positions(rules, operands, tokens)
    starts = offset + jnp.arange(shape.q_tiles, dtype=jnp.int32) * shape.q_block
    needed = needed_keys(rules, operands, shape.q_block, shape.kv_block)
    columns = [jnp.broadcast_to(x.astype(jnp.int32), (*heads, shape.q_tiles)) for x in (*needed, starts)]
    q_ids, kv_ids, shown = operands.q_segment_ids, operands.kv_segment_ids, None
    if q_ids is not None:
        kv_ids = q_ids if kv_ids is None else kv_ids
        kind = jnp.promote_types(q_ids.dtype, kv_ids.dtype)
        q_ids, kv_ids = q_ids.astype(kind), kv_ids.astype(kind)
    if operands.mask is not None:
        shown = jnp.broadcast_to(operands.mask[:, 0, 0], (operands.mask.shape[0], shape.kv_len)).astype(jnp.int8)
    return Inputs(
        table=jnp.stack(columns, axis=-1),
        slopes=both_slopes(operands),
        query=operands.query,
        key=operands.key,
        value=operands.value,
        q_ids=q_ids,
        kv_ids=kv_ids,
        shown=shown,
    )


def _finer(table: jax.Array, whole: KernelShape, shape: KernelShape) -> jax.Array:
    """Return a table for the tiles that wider ones consist of: each needs what the wider one does."""
    parts = whole.q_block // shape.q_block
    later = jnp.arange(shape.q_tiles, dtype=jnp.int32) % parts * shape.q_block
    finer = jnp.repeat(table, parts, axis=2)[:, :, : shape.q_tiles]
    return finer.at[..., 2].add(later)


def _power_of_two(number: int) -> int:
    """Return the least power of two that is not less than a positive number."""
    return 1 << (number - 1).bit_length()
