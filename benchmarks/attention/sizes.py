"""What the attention benchmark measures, at which sizes, and what is expected of each."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

Bars = tuple[float | None, float | None]  # of forward, and of forward with backward


@dataclass(frozen=True)
class Shape:
    """The sizes of one attention call."""

    num_heads: int
    head_dim: int
    length: int
    dtype: str
    batch: int = 1

    @property
    def dims(self) -> tuple[int, int, int, int]:
        return self.batch, self.num_heads, self.length, self.head_dim

    @property
    def heads(self) -> str:
        """All but the length, in words."""
        return f"{self.num_heads} heads of {self.head_dim}, {self.dtype}"

    @property
    def tensor_bytes(self) -> int:
        """Of the query, the key, the value or the result."""
        return math.prod(self.dims) * self.element_bytes

    @property
    def element_bytes(self) -> int:
        return {"float32": 4, "bfloat16": 2, "float16": 2}[self.dtype]

    @property
    def scores(self) -> int:
        """How many a dense attention computes."""
        return self.batch * self.num_heads * self.length**2


@dataclass(frozen=True)
class Timed:
    """A shape to time: how many pairs, of ours and of a peer, and how much faster ours has to be."""

    shape: Shape
    pairs: int
    peer_pairs: int  # 0 to leave the peers out
    bars: Bars = (None, None)
    dense_bars: Bars = (None, None)  # beside a dense bias; not timed beside it where None
    backward: bool = True
    warm_up: bool = True  # False where the baseline takes so long that what only its first call does is no part of it


@dataclass(frozen=True)
class Decoding:
    """One query over many keys: the shape of the keys, pairs, and the bars with a cache and without."""

    shape: Shape
    pairs: int
    cached_bar: float | None = None
    bare_bar: float | None = None
    row_bar: float | None = None  # of the cache beside attention with a row of biases; not timed beside it where None


def _shape(length: int) -> Shape:
    return Shape(8, 64, length, "float32")


def _wide(length: int, dtype: str = "bfloat16") -> Shape:
    return Shape(32, 128, length, dtype)


EXACT, CHECKED = _shape(8192), _shape(2048)


@dataclass(frozen=True)
class Sizes:
    """All of one run."""

    timed: tuple[Timed, ...]  # the first one's heads are those of the picture
    decoding: tuple[Decoding, ...]
    weighed: tuple[Shape, Shape]  # whose extra memory is measured, forward and with gradients
    weighed_bars: Bars = (None, None)  # of it, beside what the backend weighs it against
    exact: Shape = EXACT  # whose error is measured
    checked: Shape = CHECKED  # of which all gradients and everyone's results are compared with float64
    longest: Shape | None = None  # one that nothing quadratic could be computed of; None to leave it out
    low_precision: tuple[str, ...] = ("bfloat16", "float16")  # where errors are measured besides float32

    def up_to(self, tokens: int) -> Sizes:
        """Return these with no longer sequences to time."""
        parts = {"timed": self.timed, "decoding": self.decoding}
        return replace(self, **{k: tuple(x for x in part if x.shape.length <= tokens) for k, part in parts.items()})


# A call costs some 0.05 ms before any arithmetic, with gradients 0.2 ms: of short ones it is the larger part.
TORCH = Sizes(
    timed=(
        Timed(_shape(1), 301, 0, dense_bars=(0.0, None), backward=False),  # whose gradients are 0
        *(Timed(_shape(length), 301, 0, dense_bars=(0.0, 0.0)) for length in (32, 128, 256)),
        Timed(_shape(512), 101, 0, (0.9, 0.9), (0.95, 0.95)),
        Timed(_shape(1024), 51, 5, (0.9, 0.9), (0.95, 0.95)),
        Timed(_shape(1500), 31, 0, (0.9, 0.9), (0.95, 0.95)),
        Timed(_shape(2048), 25, 5, (1.0, 1.0), (0.95, 0.95)),
        Timed(_shape(4096), 15, 3, (1.2, 1.2)),
        Timed(_shape(8192), 9, 3, (2.0, 2.0)),
        Timed(_shape(16_384), 5, 3, (3.5, 3.0)),
        Timed(_shape(65_536), 3, 1, (10.0, 8.0), warm_up=False),
        Timed(_wide(8192, "float32"), 5, 1, (2.2, None), backward=False),
    ),
    decoding=(
        *(Decoding(_shape(length), 101) for length in (256, 1024, 4096, 16_384, 65_536)),
        *(Decoding(Shape(8, 64, length, "bfloat16"), 31) for length in (1024, 4096, 16_384, 65_536)),
        Decoding(_wide(65_536), 15, cached_bar=20.0, bare_bar=1.0),
    ),
    weighed=(_shape(65_536),) * 2,
    weighed_bars=(0.5, 1.5),
    longest=Shape(4, 64, 2**20, "float32"),
)
# Attention without positions is dense on the CPU: with gradients it takes 13 GB at 8,192 tokens, four times that at
# 16,384. So there is nothing to compare with beyond, and memory is judged against what it takes.
JAX = Sizes(
    timed=(
        Timed(_shape(1024), 25, 5),
        Timed(_shape(2048), 15, 5),
        Timed(_shape(4096), 9, 3),
        Timed(_shape(8192), 5, 1, (5.0, 5.0)),
        Timed(_wide(2048, "float32"), 5, 1, backward=False),
    ),
    decoding=(Decoding(_wide(65_536), 9),),
    weighed=(_shape(8192),) * 2,
    weighed_bars=(0.1, 0.1),
    low_precision=("bfloat16",),  # XLA on a CPU refuses float16's products, with positions or without
)
# On the CPU MLX computes on one core, and whole scores but for ours: 8,192 tokens take 30 seconds without positions.
MLX = Sizes(
    timed=(
        Timed(_shape(1024), 9, 3),
        Timed(_shape(2048), 5, 2, (None, 2.5), (None, 2.5)),
        Timed(_shape(4096), 3, 1, (4.0, None), (4.0, None), backward=False),
        Timed(_shape(8192), 1, 0, backward=False, warm_up=False),
    ),
    decoding=(Decoding(_wide(32_768, "float32"), 9, cached_bar=8.0, row_bar=8.0),),
    weighed=(_shape(4096), _shape(2048)),
    weighed_bars=(0.1, 0.25),
    exact=_shape(4096),
    checked=_shape(1024),
)
CPU = {"torch": TORCH, "jax": JAX, "mlx": MLX}

# None of them has been run on a GPU, so there are no bars.
GPU = Sizes(
    timed=tuple(Timed(_wide(length), pairs, 5) for length, pairs in ((4096, 25), (16_384, 15))),
    decoding=(Decoding(_wide(32_768), 25),),
    weighed=(_wide(16_384),) * 2,
    exact=_shape(4096),
)

_SMALL = Shape(8, 16, 512, "float32")
QUICK = Sizes(
    timed=(
        Timed(replace(_SMALL, length=256), 3, 0),
        Timed(_SMALL, 3, 1, (1.0, 1.0), (1.0, 1.0)),
        Timed(Shape(4, 32, 256, "float32"), 3, 0, backward=False),
    ),
    decoding=(Decoding(Shape(8, 32, 1024, "bfloat16"), 3, cached_bar=1.0, bare_bar=1.0, row_bar=1.0),),
    weighed=(_SMALL, replace(_SMALL, length=256)),
    weighed_bars=(1.0, 1.0),
    exact=_SMALL,
    checked=_SMALL,
)


def sizes_of(backend: str, device: str, quick: bool) -> Sizes:
    """Return what is measured of a backend on a device."""
    if not quick:
        return CPU[backend] if device == "cpu" else GPU
    on_cpu = CPU[backend]
    longest = Shape(4, 16, 4096, "float32") if on_cpu.longest and device == "cpu" else None
    return replace(QUICK, longest=longest, low_precision=on_cpu.low_precision)
