"""The static parameters of a TPU kernel: block sizes, shapes and rules, all known when it is traced."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import NamedSharding

from alibi_core.backend import AttentionCall, checks, split_call
from alibi_jax._call import Operands

LANES = 128  # Lanes of a vector register; block sizes are multiples, because each is the last axis of some matrix.
ROWS = 16  # Rows of a tile in VMEM, for bfloat16.
VMEM_LIMIT = 64 * 2**20  # Bytes of VMEM per core, on the smallest TPU since v5.
SCOPED = 14 * 2**20  # Up to this many bytes, the compiler's default limit suffices (with a margin for its own use).
TILES = 7  # A kernel has at most this many float32 arrays of q_block x kv_block at a time.


@dataclass(frozen=True)
class TPU:
    """The TPU kernel, as an ``implementation``.

    ``implementation="tpu"`` is the same as ``TPU()``.

    Args:
        q_block: Queries per block, a multiple of 128. Default 512; short sequences use smaller blocks.
        kv_block: Keys per block, a multiple of 128. Default 512; short sequences use smaller blocks.
        sharding: The sharding of query, ``[batch, length, heads, head_dim]``, by batch and heads alone, such as
            ``NamedSharding(mesh, PartitionSpec("data", None, "model"))``. It lets each device run the kernel on its
            part where XLA partitions the program (automatic mesh axes): XLA cannot partition a kernel. Arrays that are
            sharded otherwise are moved.
        interpret: Run the kernel on any device, as ordinary array operations, instead of compiling it for a TPU: slow,
            and meant for tests. ``jax.experimental.pallas.tpu.InterpretParams`` simulates a TPU's memories and copies,
            slower still: it finds races and reads of memory that was never written.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If a block size is not a positive multiple of 128.

    Example:
        >>> TPU(q_block=256)
        TPU(q_block=256, kv_block=512, interpret=False, sharding=None)
    """

    q_block: int = 512
    kv_block: int = 512
    interpret: bool | pltpu.InterpretParams = False
    sharding: NamedSharding | None = None

    def __post_init__(self) -> None:
        for name in ("q_block", "kv_block"):
            if checks.positive_int(name, getattr(self, name)) % LANES:
                raise ValueError(f"{name} must be a multiple of {LANES}, got {getattr(self, name)}")
        if not isinstance(self.interpret, pltpu.InterpretParams):
            checks.boolean("interpret", self.interpret)
        if self.sharding is None:
            return
        if not isinstance(self.sharding, NamedSharding):
            raise TypeError(f"sharding must be a jax.sharding.NamedSharding, got {self.sharding!r}")
        if any(axes is not None for axes in (*self.sharding.spec[1:2], *self.sharding.spec[3:])):
            raise ValueError(f"sharding must divide batch and heads alone, axes 0 and 2, got {self.sharding.spec}")


@dataclass(frozen=True)
class KernelShape:
    """All static parameters of a kernel. Hashable. Arrays are padded to whole blocks of tokens.

    Raises:
        ValueError: If the blocks do not fit a TPU core's memory.
    """

    call: AttentionCall  # without arrays
    q_block: int
    kv_block: int
    is_folded: bool  # whether a block has the few queries of all heads that share a key/value head, head by head
    has_segments: bool  # also True for masked keys, which are a separate segment
    has_other_keys: bool  # whether Operands.other_keys is given
    interpret: bool | pltpu.InterpretParams

    @classmethod
    def of(cls, operands: Operands, options: TPU, *, may_fold: bool) -> KernelShape:
        """Return the static parameters of the kernels for a call; only the forward kernel can fold heads."""
        call = operands.call
        rows = call.q_len * (call.num_heads // call.num_kv_heads)
        is_folded = may_fold and call.q_len < LANES and rows <= options.q_block
        q_block = _round_up(rows, ROWS) if is_folded else _block(call.q_len, options.q_block)
        rules = call.q_segment_ids is not None or call.mask is not None, operands.other_keys is not None
        kv_block = _block(call.kv_len, options.kv_block)
        return cls(split_call(call)[0], q_block, kv_block, is_folded, *rules, options.interpret)

    def __post_init__(self) -> None:
        if self.vmem_bytes > VMEM_LIMIT:
            raise ValueError(
                f"blocks must fit a TPU core's memory, {VMEM_LIMIT >> 20} MiB, got q_block {self.q_block}, kv_block "
                f"{self.kv_block} and head_dim {self.call.head_dim}, which take about {self.vmem_bytes >> 20} MiB; "
                f"use smaller blocks, such as TPU(q_block=512, kv_block=512)"
            )

    @property
    def heads(self) -> int:
        """The number of heads of queries as the kernel sees them: folded heads are one."""
        return self.call.num_kv_heads if self.is_folded else self.call.num_heads

    @property
    def group(self) -> int:
        """The number of these heads that share a key/value head."""
        return self.heads // self.call.num_kv_heads

    @property
    def rows(self) -> int:
        """The number of queries of each of these heads."""
        return self.call.q_len * (self.call.num_heads // self.heads)

    @property
    def q_blocks(self) -> int:
        """The number of blocks of queries."""
        return -(-self.rows // self.q_block)

    @property
    def scores(self) -> int:
        """The number of visible scores, with the last query at the last key; horizons and masks leave out some."""
        call = self.call
        most = call.kv_len if call.window_size is None else (1 if call.is_causal else 2) * call.window_size + 1
        later = min(call.q_len, call.kv_len) ** 2 // 2 if call.is_causal else 0
        return call.batch[0] * call.num_heads * min(call.q_len * call.kv_len - later, call.q_len * most)

    @property
    def kv_blocks(self) -> int:
        """The number of blocks of keys."""
        return -(-self.call.kv_len // self.kv_block)

    @property
    def is_transposed(self) -> bool:
        """Whether keys lie along lanes. XLA stores a cache so if its heads do not fill all lanes."""
        return self.is_folded and self.call.head_dim % LANES != 0

    @property
    def kv_multiple(self) -> int:
        """Keys are padded to a multiple of this: to whole blocks, unless queries are few, so that a copy is dear."""
        return LANES if self.is_folded else self.kv_block

    @property
    def last_start(self) -> int:
        """The first key of the last block, which may begin with keys of the block before."""
        return _round_up(self.call.kv_len, self.kv_multiple) - self.kv_block

    def of_keys(self, keys: Any) -> tuple[Any, Any]:
        """Return the shape, or slice, of a matrix of so many keys, or of these."""
        sizes = keys, self.call.head_dim if isinstance(keys, int) else slice(None)
        return sizes[::-1] if self.is_transposed else sizes

    @property
    def vmem_bytes(self) -> int:
        """An estimate of the VMEM that the largest of the kernels takes, in bytes."""
        row, itemsize = _round_up(self.call.head_dim, LANES), jnp.dtype(self.call.dtype).itemsize
        blocks = 6 * (self.q_block + self.kv_block) * row * itemsize  # double-buffered
        sums = 2 * max(self.q_block, self.kv_block) * (row + 5 * LANES) * 4
        return blocks + sums + TILES * self.q_block * self.kv_block * 4

    @property
    def vmem_limit(self) -> int | None:
        """The VMEM limit to request from the compiler, in bytes; None if its default suffices."""
        return None if self.vmem_bytes <= SCOPED else min(self.vmem_bytes + 8 * 2**20, VMEM_LIMIT + 8 * 2**20)


def _block(length: int, most: int) -> int:
    """Return a block size of at most ``most``: the largest without padding, unless it is below half of the limit."""
    whole = _round_up(length, LANES)
    fitting = max(n for n in range(LANES, min(most, whole) + 1, LANES) if whole % n == 0)
    return fitting if 2 * fitting >= min(most, whole) else most


def _round_up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple
