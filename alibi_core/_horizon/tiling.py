"""How a backend cuts calls up, by default and while somebody says otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from alibi_core._horizon.jobs import TileSizes
from alibi_core._horizon.measure import Measuring


@dataclass(frozen=True)
class Tiling:
    """How calls are cut up.

    Attributes:
        sizes: Of tiles.
        measuring: How finely queries and keys are measured.
        kernel_elements: Of what a kernel call allocates, about.
        short: Keys; calls of so few are planned for all batch entries and heads at once, most without measuring.
    """

    sizes: TileSizes
    measuring: Measuring
    kernel_elements: int
    short: int = 1024

    @classmethod
    def of_sizes(
        cls,
        sizes: TileSizes,
        *,
        kv_block: int,
        norm_bounds: Callable[[Any], Any],
        kernel_elements: int,
        part_elements: int = 2**20,
    ) -> Tiling:
        """Return the tiling whose blocks of queries are the largest tiles; the rest as in :class:`Measuring`."""
        blocks = {"q_block": sizes.rows[1], "kv_block": kv_block, "part_elements": part_elements, "few": sizes.few}
        return cls(sizes, Measuring(**blocks, worthwhile=20, norm_bounds=norm_bounds), kernel_elements)


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
