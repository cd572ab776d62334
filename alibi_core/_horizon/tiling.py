"""How a backend measures calls and cuts them up, by default and while somebody says otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from alibi_core._arrays import floating_name, namespace_of

LIMITS = {"float32": (2.0**-23, 2.0**-126), "float64": (2.0**-52, 2.0**-1022)}  # spacing at 1, least normal number


def norm_bounds(vectors: Any) -> Any:
    """Return what no norm of ``[..., head_dim]`` exceeds, however sums of squares are rounded: float32 or float64.

    It is infinite for a vector that holds a NaN, or whose squares overflow. A NaN would not do: max() ignores NaN under
    some compilers.
    """
    xp, head_dim = namespace_of(vectors), vectors.shape[-1]
    eps, tiny = LIMITS[str(floating_name(vectors.dtype))]
    # Each addition may round down, so may the root (of a GPU, by some units); the square of what is tiny may vanish.
    rounding, vanishing = (head_dim + 8) * eps, (head_dim * tiny) ** 0.5
    sizes = xp.sqrt(xp.sum(vectors * vectors, axis=-1)) * (1 + rounding) + vanishing
    return xp.where(sizes < float("inf"), sizes, float("inf"))


@dataclass(frozen=True)
class Tiling:
    """How finely a backend measures queries and keys, and the sizes of tiles that suit its kernel.

    Attributes:
        q_block: Queries that share a score bound, or a divisor of that number.
        kv_block: The same for keys.
        most_blocks: The most blocks of queries, and of keys. None for any number.
        part_elements: Elements of queries or keys processed at a time, to avoid a full float32 copy. None for all.
        worthwhile: The mean-of-keys bound is used only where slope * kv_len is at least this. None for nowhere: it
            reads the slopes on the host.
        norm_bounds: As :func:`norm_bounds`. Keys that are not centred it gets in a dtype of their own.
        few: Queries, up to which a call is a decoding step: calls cost more than scores, and keys are not centred.
        rows: The least and the largest number of queries in a tile.
        bias_elements: The most elements in the bias of one call. A single head may have more.
        call_scores: The number of scores whose computation takes as long as a call's overhead.
        kernel_elements: About how many elements a kernel call may allocate.
        short: Keys, up to which calls are planned for all batch entries and heads at once, most without measuring.
    """

    q_block: int
    kv_block: int
    most_blocks: int | None = 512
    part_elements: int | None = None
    worthwhile: float | None = None
    norm_bounds: Callable[[Any], Any] = norm_bounds
    few: int = 0
    rows: tuple[int, int] = (16, 64)
    bias_elements: int = 2**20
    call_scores: int = 0
    kernel_elements: int = 2**20
    short: int = 1024

    def q_block_of(self, q_len: int) -> int:
        """Return how many queries of a call have one bound."""
        return _multiple(self.q_block, self.most_blocks, q_len)

    def kv_block_of(self, kv_len: int) -> int:
        """Return how many keys of a call have one bound, where their norms are unknown."""
        return _multiple(self.kv_block, self.most_blocks, kv_len)


def _multiple(block: int, most_blocks: int | None, length: int) -> int:
    return block if most_blocks is None else block * max(1, -(-length // (block * most_blocks)))


# Operators and custom functions of frameworks take no such argument, and gradients are computed where nobody can hand
# it over.
_current: ContextVar[Tiling | None] = ContextVar("tiling", default=None)


def current_tiling(default: Tiling) -> Tiling:
    """Return how calls are cut up here and now."""
    return _current.get() or default


@contextmanager
def tiled_as(tiling: Tiling) -> Iterator[None]:
    """Cut calls up in another way, as tests do whose tensors are small."""
    token = _current.set(tiling)
    try:
        yield
    finally:
        _current.reset(token)
