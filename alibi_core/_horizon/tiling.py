"""The sizes of blocks and tiles that a backend uses, and a context manager that overrides them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from alibi_core._arrays import FLOATING, floating_name, namespace_of


def norm_bounds(vectors: Any) -> Any:
    """Return upper bounds of the norms of ``[..., head_dim]`` vectors, float32 or float64, for any rounding of sums.

    The bound is inf, not NaN, for a vector with a NaN or with squares that overflow: max() ignores NaN under XLA on
    CPUs.
    """
    xp, head_dim = namespace_of(vectors), vectors.shape[-1]
    limits = FLOATING[str(floating_name(vectors.dtype))]
    # Each addition may round down, and so may the root (on GPUs by several units). Squares may underflow to 0.
    rounding, vanishing = (head_dim + 8) * 2 * limits.roundoff, (head_dim * limits.least) ** 0.5
    sizes = xp.sqrt(xp.sum(vectors * vectors, axis=-1)) * (1 + rounding) + vanishing
    return xp.where(sizes < float("inf"), sizes, float("inf"))


@dataclass(frozen=True)
class Tiling:
    """How finely a backend measures queries and keys, and the sizes of tiles that suit its kernel.

    Attributes:
        q_block: Queries that share a score bound; in long sequences a multiple of this many do.
        kv_block: Keys that share a norm bound; in long sequences a multiple of this many do.
        most_blocks: The largest number of blocks of queries, and of keys. None for no limit.
        part_elements: Elements of queries or keys processed at a time, to avoid a full float32 copy. None for all.
        least_decay: The mean-of-keys bound is used only where slope * kv_len is at least this. None: never, as it
            reads the slopes on the host.
        norm_bounds: Function that bounds norms, as :func:`norm_bounds` does. Keys that are not centred are passed in
            their own dtype.
        step_queries: Up to this many queries, a call is a decoding step: jobs are planned for few kernel calls, and
            keys are not centred.
        rows: The smallest and the largest number of queries in a tile. A tile lies within one ``q_block``, whose bound
            it uses, so tiles have fewer rows where the number does not divide ``q_block``.
        bias_elements: The largest number of elements in the bias of one call. A single head may exceed it.
        call_scores: The number of scores whose computation takes as long as the overhead of a call.
        kernel_elements: Approximate number of elements that a kernel call may allocate.
        short: Up to this many keys, calls are planned for all batch entries and heads at once, most without measuring.
    """

    q_block: int
    kv_block: int
    most_blocks: int | None = 512
    part_elements: int | None = None
    least_decay: float | None = None
    norm_bounds: Callable[[Any], Any] = norm_bounds
    step_queries: int = 0
    rows: tuple[int, int] = (16, 64)
    bias_elements: int = 2**20
    call_scores: int = 0
    kernel_elements: int = 2**20
    short: int = 1024

    def q_block_of(self, q_len: int) -> int:
        """Return the number of queries of a call that share a score bound."""
        return _multiple(self.q_block, self.most_blocks, q_len)

    def kv_block_of(self, kv_len: int) -> int:
        """Return the number of keys of a call that share a norm bound, if their norms are measured."""
        return _multiple(self.kv_block, self.most_blocks, kv_len)


def _multiple(block: int, most_blocks: int | None, length: int) -> int:
    """Return the smallest multiple of ``block`` that gives at most ``most_blocks`` blocks."""
    return block if most_blocks is None else block * max(1, -(-length // (block * most_blocks)))


# A context variable, because the operators and custom functions of frameworks cannot take a Tiling as an argument, and
# gradients are computed outside of the caller's code.
_current: ContextVar[Tiling | None] = ContextVar("tiling", default=None)


def current_tiling(default: Tiling) -> Tiling:
    """Return the tiling of the enclosing :func:`tiled_as`, else ``default``."""
    return _current.get() or default


@contextmanager
def tiled_as(tiling: Tiling) -> Iterator[None]:
    """Use another tiling inside this context, for example in tests with small tensors."""
    token = _current.set(tiling)
    try:
        yield
    finally:
        _current.reset(token)
