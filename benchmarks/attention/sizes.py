"""What the attention benchmark measures, at which sizes, and what is expected of each."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

MIB = 2**20


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


def _shape(length: int) -> Shape:
    return Shape(8, 64, length, "float32")


EXACT, CHECKED = _shape(8192), _shape(2048)


@dataclass(frozen=True)
class Timed:
    """A shape to time: how many pairs, of ours and of a peer, and how much faster ours has to be."""

    shape: Shape
    pairs: int
    peer_pairs: int  # 0 to leave the peers out
    bars: tuple[float | None, float | None] = (None, None)  # of forward, and of forward with backward
    dense_bars: tuple[float | None, float | None] = (None, None)  # beside a dense bias; not timed beside it where None
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


@dataclass(frozen=True)
class Sizes:
    """All of one run."""

    timed: tuple[Timed, ...]  # the first one's heads are those of the picture
    decoding: tuple[Decoding, ...]
    weighed: Shape  # whose extra memory is measured
    exact: Shape = EXACT  # whose error is measured
    checked: Shape = CHECKED  # a small one, of which all gradients and everyone's results are compared with float64
    longest: Shape | None = None  # one that nothing quadratic could be computed of; None to leave it out
    weighed_bars: tuple[float, float] | None = None  # MiB allowed, of a forward and of a backward pass
    weighed_shares: tuple[float, float] | None = None  # in place of those, the shares allowed of what others take
    weighed_backward: Shape | None = None  # going backward, where that is another
    low_precision: tuple[str, ...] = ("bfloat16", "float16")  # where errors are measured besides float32
    worst_bar: float = 4e-6  # the worst error allowed in float32
    relative_bar: float = 1.1  # in low precision, of the relative error of rows, over that without positions
    rows: int = 16  # queries a head that are recomputed in float64 at each shape that is timed


# --- PyTorch --------------------------------------------------------------------------------------------------------


# A call costs some 0.05 ms before any arithmetic, with gradients 0.2 ms: of short ones it is the larger part.
CPU = Sizes(
    timed=(
        Timed(_shape(1), 301, 0, dense_bars=(0.0, None), backward=False),  # whose gradients are 0
        *(Timed(_shape(length), 301, 0, dense_bars=(0.0, 0.0)) for length in (32, 128)),
        Timed(_shape(512), 101, 0, (0.9, 0.9), (0.95, 0.95)),
        Timed(_shape(1024), 51, 5, (0.9, 0.9), (0.95, 0.95)),
        Timed(_shape(2048), 25, 5, (1.0, 1.0), (0.95, 0.95)),
        Timed(_shape(4096), 15, 3, (1.2, 1.2)),
        Timed(_shape(8192), 9, 3, (2.0, 2.0)),
        Timed(_shape(16_384), 5, 3, (3.5, 3.0)),
        Timed(_shape(65_536), 3, 1, (10.0, 8.0), warm_up=False),
        Timed(Shape(32, 128, 8192, "float32"), 5, 1, (2.2, None), backward=False),
    ),
    decoding=(
        *(Decoding(_shape(length), 101) for length in (256, 1024, 4096, 16_384, 65_536)),
        *(Decoding(Shape(8, 64, length, "bfloat16"), 31) for length in (1024, 4096, 16_384, 65_536)),
        Decoding(Shape(32, 128, 65_536, "bfloat16"), 15, cached_bar=20.0, bare_bar=1.0),
    ),
    weighed=_shape(65_536),
    longest=Shape(4, 64, 2**20, "float32"),
    weighed_bars=(64.0, 192.0),
)
CUDA = Sizes(
    timed=tuple(
        Timed(Shape(32, 128, length, "bfloat16"), pairs, 5, (bar, bar))
        for length, pairs, bar in ((4096, 25, 1.0), (16_384, 15, 3.0), (65_536, 7, 8.0))
    ),
    decoding=(Decoding(Shape(32, 128, 131_072, "bfloat16", batch=8), 25, cached_bar=10.0),),
    weighed=Shape(32, 128, 65_536, "bfloat16"),
)
QUICK = Sizes(
    timed=(
        Timed(Shape(8, 16, 256, "float32"), 3, 0, (1.0, 1.0)),
        Timed(Shape(8, 16, 512, "float32"), 3, 1, (1.0, 1.0)),
        Timed(Shape(4, 32, 256, "float32"), 3, 0, (1.0, None), backward=False),
    ),
    decoding=(Decoding(Shape(8, 32, 1024, "bfloat16"), 3, cached_bar=1.0, bare_bar=1.0),),
    weighed=Shape(8, 16, 512, "float32"),
    exact=Shape(8, 16, 512, "float32"),
    checked=Shape(8, 16, 512, "float32"),
    longest=Shape(4, 16, 4096, "float32"),
    weighed_bars=(64.0, 192.0),
)

# --- JAX ------------------------------------------------------------------------------------------------------------

# Attention without positions is dense on the CPU: with gradients it takes 13 GB at 8,192 tokens, four times that at
# 16,384. So there is nothing to compare with beyond, and memory is judged against what it takes.
LOW_ON_CPU = ("bfloat16",)  # XLA on a CPU refuses float16's products, with positions or without
JAX_CPU = Sizes(
    timed=(
        Timed(_shape(1024), 25, 5),
        Timed(_shape(2048), 15, 5),
        Timed(_shape(4096), 9, 3),
        Timed(_shape(8192), 5, 1, (5.0, 5.0)),
        Timed(Shape(32, 128, 2048, "float32"), 5, 1, backward=False),
    ),
    decoding=(Decoding(Shape(32, 128, 65_536, "bfloat16"), 9),),
    weighed=_shape(8192),
    weighed_shares=(0.1, 0.1),
    low_precision=LOW_ON_CPU,
)
JAX_CUDA = replace(
    CUDA,
    timed=(
        Timed(Shape(32, 128, 4096, "bfloat16"), 25, 5, (1.0, None)),
        Timed(Shape(32, 128, 16_384, "bfloat16"), 15, 5, (2.0, None)),
    ),
    decoding=(replace(CUDA.decoding[0], cached_bar=None),),
)
JAX_QUICK = replace(
    QUICK, longest=Shape(4, 16, 1024, "float32"), weighed_bars=None, weighed_shares=(0.1, 0.1), low_precision=LOW_ON_CPU
)

# --- MLX ------------------------------------------------------------------------------------------------------------

# On the CPU MLX computes on one core, and whole scores but for ours: 8,192 tokens take 30 seconds without positions.
MLX_CPU = Sizes(
    timed=(
        Timed(_shape(1024), 9, 3),
        Timed(_shape(2048), 5, 2, (None, 2.5), (None, 2.5)),
        Timed(_shape(4096), 3, 1, (4.0, None), (4.0, None), backward=False),
        Timed(_shape(8192), 1, 0, backward=False, warm_up=False),
    ),
    decoding=(Decoding(Shape(32, 128, 32_768, "float32"), 9, cached_bar=8.0, row_bar=8.0),),
    weighed=_shape(4096),
    weighed_backward=_shape(2048),
    exact=_shape(4096),
    checked=_shape(1024),
    weighed_shares=(0.1, 0.25),
)
MLX_METAL = Sizes(  # not run yet, so there are no bars
    timed=tuple(
        Timed(Shape(32, 128, length, "bfloat16"), pairs, 5) for length, pairs in ((2048, 25), (4096, 15), (16_384, 9))
    ),
    decoding=(Decoding(Shape(32, 128, 32_768, "bfloat16"), 25),),
    weighed=Shape(32, 128, 16_384, "bfloat16"),
    exact=_shape(4096),
)
MLX_QUICK = replace(
    QUICK,
    longest=None,
    timed=(QUICK.timed[0], replace(QUICK.timed[1], dense_bars=(1.0, 1.0)), QUICK.timed[2]),
    decoding=(replace(QUICK.decoding[0], row_bar=1.0),),
    weighed_bars=None,
    weighed_shares=(0.1, 0.25),
    weighed_backward=Shape(8, 16, 256, "float32"),
)

# By backend, and at full size by device.
FULL = {
    "torch": {"cpu": CPU, "cuda": CUDA},
    "jax": {"cpu": JAX_CPU, "cuda": JAX_CUDA},
    "mlx": {"cpu": MLX_CPU, "metal": MLX_METAL},
}
SMALL = {"torch": QUICK, "jax": JAX_QUICK, "mlx": MLX_QUICK}
