"""What does a bias cost, beside the time it takes to fill an array of its size, and beside other libraries?

Numerics come first: every bias is compared with float64 arithmetic, bit for bit, and every other library's builder with
ALiBi's definition. Then, on one shape:

  speed    building a causal bias against a fill of that size in the same library, which no builder can beat;
  peers    against what other libraries build, as a dense tensor of the same shape. BLOOM and MPT build one row a head
           and leave the rest to broadcasting, x-transformers and MLX build a symmetric bias; none masks. Each is
           timed as it is, and, for information, with the causal mask that their models add;
  memory   how far memory grows while the bias is built, against the size of the bias;
  keys     the key-only bias at a length that nobody would build a dense bias for.

The exit status is 1 if a number is wrong or, at full size, if a bar is not met. About five minutes; at full size a bias
has 2.1 GB, and some builders hold two at once.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from benchmarks import harness
from benchmarks.bias.builders import JUDGED, OF_KEYS, OURS, PEERS, Builder, Call, library
from benchmarks.exact import exact_slopes
from benchmarks.harness import Measurement

SPEED_BAR, MEMORY_BAR, PEER_BAR = 2.0, 1.5, 1.0
VERSIONS = ("numpy", "torch", "jax", "jaxlib", "mlx", "array-api-compat", "transformers", "x-transformers")


@dataclass(frozen=True)
class Sizes:
    """Heads and tokens of the dense bias and of the key-only one, how many pairs to time, and what to weigh."""

    num_heads: int = 32
    length: int = 4096
    key_num_heads: int = 112
    kv_len: int = 1_000_000
    pairs: int = 7
    weigh_frameworks: bool = True

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of the dense bias."""
        return self.num_heads, self.length, self.length


FULL = Sizes()
QUICK = Sizes(num_heads=8, length=256, key_num_heads=12, kv_len=10_000, pairs=3, weigh_frameworks=False)


def peak_subject(name: str, num_heads: int, length: int) -> Call:
    """Prepare the builder of that name, in a process where it is alone, and warm it up on something small."""
    builder = next(each for each in (*OURS, *PEERS) if each.name == name)
    builder.prepare(num_heads, 16)()
    return builder.prepare(num_heads, length)


# --- What is right --------------------------------------------------------------------------------------------------


def different_bits(bias: Any, reach: np.ndarray) -> int:
    """Count elements that are not the float32 slope times ``reach``, exact in float64, rounded once to float32."""
    array = np.asarray(bias)
    slopes = exact_slopes(len(array)).astype(np.float32).astype(np.float64)
    if (array.dtype, array.shape[1:]) != (np.float32, reach.shape):
        return array.size
    pairs = zip(array, slopes, strict=True)  # head by head: a float64 copy of it all would be 4 GB
    expected = ((head, (slope * reach).astype(np.float32)) for head, slope in pairs)
    return sum(int(np.count_nonzero(head.view(np.uint32) != right.view(np.uint32))) for head, right in expected)


def causal_reach(length: int) -> np.ndarray:
    """Return minus the distance, -inf for keys after the query, ``[length, length]`` in float64."""
    relative = np.arange(length)[None, :] - np.arange(length)[:, None]
    return np.where(relative > 0, -np.inf, relative.astype(np.float64))


def peer_error(peer: Builder, num_heads: int = 32, length: int = 61) -> float:
    """Return how far a peer is from ALiBi where keys are visible, as a part of what rounding explains."""
    built = np.asarray(peer.masked(num_heads, length)()).reshape(num_heads, length, length).astype(np.float64)
    visible = np.tri(length, dtype=bool)
    if np.any(np.isfinite(built) != visible):
        return float("inf")
    built = np.where(visible, built, 0)
    # Softmax ignores what is constant along a row. Subtracting the diagonal removes it.
    built -= np.diagonal(built, axis1=1, axis2=2)[..., None]
    slopes = exact_slopes(num_heads)[:, None, None]
    exact = slopes * (np.arange(length)[None, :] - np.arange(length)[:, None])
    # BLOOM raises a base rounded to float32 to powers up to the number of heads, with an error of that many roundings.
    # Four more for the power and the products.
    budget = (num_heads + 4) * 2.0**-24 * length * slopes
    return float(np.max(np.abs(built - exact) / budget, where=visible, initial=0))


def check(
    sizes: Sizes,
    ours: Sequence[Builder] = OURS,
    of_keys: Sequence[Builder] = OF_KEYS,
    peers: Sequence[Builder] = PEERS,
) -> tuple[dict[str, Any], list[str]]:
    """Return what was found about the numbers, and a line for each that is wrong."""
    found: dict[str, Any] = {}
    wrong = []
    keys = np.arange(1.0 - sizes.kv_len, 1.0)[None, :]
    for what, builders, reach, shape in (
        ("bias", ours, causal_reach(sizes.length), sizes.shape[:2]),
        ("key_bias", of_keys, keys, (sizes.key_num_heads, sizes.kv_len)),
    ):
        for builder in builders:
            name = f"{what} in {builder.name}"
            harness.report(f"checking {name}")
            with suppress(ImportError):  # named as not measured where its time is due
                count = different_bits(builder.prepare(*shape)(), reach)
                found[name] = {"different_elements": count}
                if count:
                    wrong.append(f"{name} differs from float64 arithmetic in {count:,} elements")
    for peer in () if wrong else peers:
        with suppress(ImportError):
            error = peer_error(peer)
            found[peer.name] = {"error_over_budget": error}
            if not error <= 1:
                wrong.append(f"{peer.name} is not ALiBi, as it is called here")
    return found, wrong


# --- What it costs --------------------------------------------------------------------------------------------------


def measure(sizes: Sizes) -> Iterator[Measurement]:
    """Time and weigh everything, in the order of the tables."""
    dense, of_keys = sizes.shape[:2], (sizes.key_num_heads, sizes.kv_len)

    def bar_of(builder: Builder, bar: float) -> float | None:
        return bar if builder.name in JUDGED else None

    def timed(empty: Measurement, candidate: Callable[[], Call], baseline: Callable[[], Call]) -> Measurement:
        harness.report(f"{empty.candidate} against {empty.baseline}")
        try:
            return empty.timed(candidate(), baseline(), sizes.pairs)
        except ImportError as error:
            return replace(empty, note=str(error))

    def beside_a_fill(group: str, builder: Builder, arguments: tuple[int, int], shape: tuple[int, ...]) -> Measurement:
        empty = Measurement(f"{group}, against a fill", builder.name, "fill", "seconds", bar_of(builder, SPEED_BAR))
        return timed(empty, partial(builder.prepare, *arguments), lambda: partial(library(builder.library).fill, shape))

    group = "Building a causal bias, {} heads, {:,} x {:,}".format(*sizes.shape)
    done = [(builder, beside_a_fill(group, builder, dense, sizes.shape)) for builder in OURS]
    yield from (each for _, each in done)
    for kind, bar in (("prepare", PEER_BAR), ("masked", None)):
        group = "Building a causal bias against other builders" + (" and a mask" if kind == "masked" else "")
        for peer in PEERS:
            own = [(each.ratio or math.inf, builder) for builder, each in done if builder.library == peer.library]
            _, ours = min(own, key=lambda pair: pair[0])  # the fastest of ours
            empty = Measurement(group, ours.name, peer.name, "seconds", bar, note=peer.note if bar else "")
            yield timed(empty, partial(ours.prepare, *dense), partial(getattr(peer, kind), *dense))
    for builder in (*OURS, *PEERS) if sizes.weigh_frameworks else OURS[:1]:
        bar = bar_of(builder, MEMORY_BAR)
        empty = Measurement("Peak memory of building it", builder.name, "the bias", "bytes", bar)
        harness.report(f"memory of {builder.name}")
        try:
            builder.prepare(1, 1)
        except ImportError as error:
            yield replace(empty, note=str(error))
            continue
        peak = harness.peak_growth("benchmarks.bias.__main__:peak_subject", builder.name, *dense)
        yield empty.weighed(peak, 4 * math.prod(sizes.shape))
    group = f"key_bias, {sizes.key_num_heads} heads, {sizes.kv_len:,} keys"
    yield from (beside_a_fill(group, each, of_keys, (of_keys[0], 1, of_keys[1])) for each in OF_KEYS)


# --- The program ----------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return its exit status."""
    options = harness.parser("bias", __doc__).parse_args(arguments)
    sizes = QUICK if options.quick else FULL
    machine = harness.machine()  # first of all, while the load on it is that of others

    numerics, wrong = check(sizes)
    return harness.conclude(
        harness.folder(options, True) / "bias.json",
        [] if wrong else list(measure(sizes)),
        not options.quick,
        wrong,
        benchmark="bias",
        sizes=asdict(sizes),
        machine=machine,
        versions=harness.versions(*VERSIONS),
        numerics=numerics,
    )


if __name__ == "__main__":
    sys.exit(main())
