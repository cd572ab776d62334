"""What a TPU kernel is built for: blocks, sizes and rules, all known when it is traced."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp

from alibi_core.backend import AttentionCall, checks, split_call
from alibi_jax._call import Operands

LANES = 128  # of a vector register; blocks are multiples of it, because each is along the lanes of some matrix
VMEM_LIMIT = 64 * 2**20  # bytes: what the smallest of the TPUs since v5 has in a core
SCOPED = 14 * 2**20  # bytes: what the compiler grants a kernel that asks for nothing, less something for itself
TILES = 7  # score-sized float32 arrays that a kernel holds at a time, at most


@dataclass(frozen=True)
class TPU:
    """The TPU kernel, as an ``implementation``.

    ``implementation="tpu"`` is the same as ``TPU()``.

    Args:
        q_block: Queries in a block: a multiple of 128. Default 512; short sequences take less.
        kv_block: Keys in a block: likewise.
        interpret: Run the kernel's text on any device, as ordinary array operations, instead of compiling it for a TPU:
            slow, and meant for tests.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If a block size is not a positive multiple of 128.

    Example:
        >>> TPU(q_block=256)
        TPU(q_block=256, kv_block=512, interpret=False)
    """

    q_block: int = 512
    kv_block: int = 512
    interpret: bool = False

    def __post_init__(self) -> None:
        for name in ("q_block", "kv_block"):
            if checks.positive_int(name, getattr(self, name)) % LANES:
                raise ValueError(f"{name} must be a multiple of {LANES}, got {getattr(self, name)}")
        checks.boolean("interpret", self.interpret)


@dataclass(frozen=True)
class KernelShape:
    """All that the text of a kernel depends on. Hashable. Arrays are padded to whole blocks of tokens.

    Raises:
        ValueError: If the blocks do not fit a TPU core's memory.
    """

    call: AttentionCall  # without arrays
    q_block: int
    kv_block: int
    has_segments: bool  # or masked keys, which count as a segment of their own
    has_other_keys: bool  # as Operands.other_keys says
    interpret: bool

    @classmethod
    def of(cls, operands: Operands, options: TPU) -> KernelShape:
        """Return what the kernels for a call are built for."""
        call = operands.call
        blocks = _block(call.q_len, options.q_block), _block(call.kv_len, options.kv_block)
        has_segments = call.q_segment_ids is not None or call.mask is not None
        return cls(split_call(call)[0], *blocks, has_segments, operands.other_keys is not None, options.interpret)

    def __post_init__(self) -> None:
        if self.vmem_bytes > VMEM_LIMIT:
            raise ValueError(
                f"blocks must fit a TPU core's memory, {VMEM_LIMIT >> 20} MiB, got q_block {self.q_block}, kv_block "
                f"{self.kv_block} and head_dim {self.call.head_dim}, which take about {self.vmem_bytes >> 20} MiB; "
                f"use smaller blocks, such as TPU(q_block=512, kv_block=512)"
            )

    @property
    def group(self) -> int:
        """How many query heads share a key/value head."""
        return self.call.num_heads // self.call.num_kv_heads

    @property
    def q_blocks(self) -> int:
        """How many blocks the queries make up."""
        return -(-self.call.q_len // self.q_block)

    @property
    def kv_blocks(self) -> int:
        """How many blocks the keys make up."""
        return -(-self.call.kv_len // self.kv_block)

    @property
    def vmem_bytes(self) -> int:
        """About how much of a core's memory the hungriest of the kernels takes, in bytes."""
        row, itemsize = _round_up(self.call.head_dim, LANES), jnp.dtype(self.call.dtype).itemsize
        blocks = 6 * (self.q_block + self.kv_block) * row * itemsize  # each held twice, for what comes next
        sums = 2 * max(self.q_block, self.kv_block) * (row + 5 * LANES) * 4
        return blocks + sums + TILES * self.q_block * self.kv_block * 4

    @property
    def vmem_limit(self) -> int | None:
        """What to ask the compiler for, in bytes; None where what it grants anyway is enough."""
        return None if self.vmem_bytes <= SCOPED else min(self.vmem_bytes + 8 * 2**20, VMEM_LIMIT + 8 * 2**20)


def _block(length: int, most: int) -> int:
    """Return how many tokens to take at a time: so many that nothing is to be padded, if it is not too few."""
    whole = _round_up(length, LANES)
    fitting = max(n for n in range(LANES, min(most, whole) + 1, LANES) if whole % n == 0)
    return fitting if 2 * fitting >= min(most, whole) else most


def _round_up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple
