"""Whether attention is right: a run of the benchmark, what it has found, and the errors it measures first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

import alibi_core
from alibi_core._horizon import UNIT_ROUNDOFF
from benchmarks import harness
from benchmarks.attention.backends import Backend, Earlier
from benchmarks.attention.exact import AsFloat64, Reference, errors_of_gradients, sample
from benchmarks.attention.sizes import Shape, Sizes
from benchmarks.harness import Measurement

# Relative errors. Gross ones: a wrong slope, mask or offset is off by far more. The accuracy section judges the digits.
OURS_LIMIT = 16  # units of roundoff of the dtype
PEERS_LIMIT = 2.0**-9  # in float32: BLOOM counts its bias from the first key, which costs digits
WORST_BAR, RELATIVE_BAR = 4e-6, 1.1  # the worst error allowed in float32; in low precision, beside no positions
ROWS = 16  # queries a head that are recomputed in float64 at each shape that is timed


@dataclass
class Run:
    """A run in progress: what it measures, and what it has found besides times and memory."""

    backend: Backend
    sizes: Sizes
    earlier: Earlier | None = None  # beside which it is timed, too
    wrong: list[str] = field(default_factory=list)  # a line for each number that is wrong
    numerics: dict[str, Any] = field(default_factory=dict)  # errors, by what was compared with float64
    limits: list[dict[str, Any]] = field(default_factory=list)  # tile limits, and how much of them was reached
    # [pass][name]: pairs of a length and how many times faster than the baseline, for the picture.
    curves: dict[str, dict[str, list[tuple[int, float]]]] = field(default_factory=dict)

    def is_right(self, subject: str, relative: float, limit: float) -> bool:
        """Keep an error, and return whether it is small enough."""
        self.numerics[subject] = relative
        if relative > limit or np.isnan(relative):
            self.wrong.append(f"{subject}: relative error {relative:.1e}, must be at most {limit:.1e}")
            return False
        return True

    def note_limit(self, kind: str, shape: Shape, limit: float, ratio: float) -> str:
        """Keep a tile limit beside what was reached of it, and return that in words."""
        found = {"tile_limit": limit, "times_faster": ratio, "reached": ratio / limit}
        self.limits.append({"pass": kind, "shape": asdict(shape)} | found)
        return f"{ratio / limit:.0%} of the tile limit, {limit:.2f} times"

    def plot(self, kind: str, name: str, shape: Shape, ratio: float) -> None:
        """Add a point to a curve of the picture."""
        if shape.heads == self.sizes.timed[0].shape.heads:
            self.curves.setdefault(kind, {}).setdefault(name, []).append((shape.length, ratio))


def limit_of(shape: Shape) -> float:
    """Return the largest relative error of ours that is no gross one."""
    return OURS_LIMIT * UNIT_ROUNDOFF[shape.dtype]


def reason(error: Exception) -> str:
    """Return the first line of what went wrong."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def check(run: Run) -> None:
    """Compare everyone's results, and our gradients, with float64 arithmetic on a small shape."""
    backend, shape = run.backend, run.sizes.checked
    tensors = backend.tensors(shape, backward=True)
    reference = Reference.of(tensors, np.arange(shape.length), backend.as_float64)
    where = f"{shape.heads}, {shape.length:,} tokens"
    for contestant in (backend.ours, *backend.peers):
        harness.report(f"checking {contestant.name}")
        is_ours, subject = contestant is backend.ours, f"{contestant.name}, {where}"
        try:
            error = reference.error(backend.prepare(contestant, tensors, False)()).relative
        except Exception as failure:  # whatever a peer lacks is told where its time is due
            if is_ours:
                raise
            run.numerics[subject] = reason(failure)
        else:
            run.is_right(subject, error, limit_of(shape) if is_ours else PEERS_LIMIT)
    harness.report("checking gradients")
    gradients = backend.prepare(backend.ours, tensors, True)()
    for name, error in errors_of_gradients(gradients, tensors[:3], tensors[3], backend.as_float64).items():
        run.is_right(f"{backend.ours.name}, gradient of {name}, {where}", error.relative, limit_of(shape))


def accuracy(run: Run) -> Iterator[Measurement]:
    """The worst error in float32; in low precision the relative error, beside that without positions.

    Or beside that of the exact result, rounded, where that is larger: without positions all of the first row is exact.
    """
    backend, ours = run.backend, run.backend.ours
    length = run.sizes.exact.length
    group = f"Error against float64, {run.sizes.exact.num_heads} heads of {run.sizes.exact.head_dim}, {length:,} tokens"
    for dtype in ("float32", *run.sizes.low_precision):
        harness.report(f"error of {dtype}")
        shape = replace(run.sizes.exact, dtype=dtype)
        tensors, is_low = backend.tensors(shape), dtype != "float32"
        rows = sample(length, 32 * ROWS) if is_low else np.arange(length)
        reference = Reference.of(tensors, rows, backend.as_float64)
        error = reference.error(backend.prepare(ours, tensors, False)())
        if not is_low:
            empty = Measurement(group, f"{ours.name}, float32, worst", f"{WORST_BAR:g}", "error", 1.0)
            yield empty.weighed(error.worst, WORST_BAR)
            continue
        plain = backend.baseline(tensors, False)
        exact = Reference.of(tensors, rows, backend.as_float64, has_bias=False)
        beside = {plain.name: exact.error(backend.prepare(plain, tensors, False)())}
        beside["the exact result, rounded"] = reference.rounding(dtype)
        found = {ours.name: error} | beside
        run.numerics |= {f"{group}: {name}, {dtype}": asdict(each) for name, each in found.items()}
        name = max(beside, key=lambda name: beside[name].relative)
        empty = Measurement(group, f"{ours.name}, {dtype}", name, "error", RELATIVE_BAR)
        yield empty.weighed(error.relative, beside[name].relative)


# --- The tile limit ---------------------------------------------------------------------------------------------------

FINEST_BLOCK, MOST_BLOCKS = 64, 1024  # tokens; blocks of one head, since planning takes their square


def tile_limit(tensors: Sequence[Any], dtype: str, as_float64: AsFloat64, is_dense: bool = False) -> float:
    """Return the tile limit of the default tolerance: how much faster attention could be at best.

    It is the number of pairs of a query and a key that attention without positions computes (the causal half, or all
    where it is dense), over the number within the key ranges that the core proves to be needed, block by block of
    queries, for the same data. A kernel that computed just those pairs, as fast each, and planned for free, would
    reach it. Queries are the last tokens.
    """
    shapes = [tuple(x.shape) for x in tensors]
    # A call reads the shapes of tensors alone, and these take no memory.
    call = alibi_core.AttentionCall.check(*(np.broadcast_to(np.float32(0), shape) for shape in shapes))
    batch, num_heads, q_len, _ = shapes[0]
    block = max(FINEST_BLOCK, 2 ** (call.kv_len // MOST_BLOCKS - 1).bit_length())
    positions = np.arange(q_len) + call.q_offset
    needed = 0
    for entry, head in np.ndindex(batch, num_heads):  # one by one: the plan of all heads at once takes much memory
        query, key = (as_float64(x[entry, head]) for x in tensors[:2])
        part = replace(call, batch=(1,), num_heads=1, num_kv_heads=1, slopes=call.slopes[head : head + 1])
        own = np.sum(query * key[-q_len:], axis=-1)
        sizes = (call.scale * np.linalg.norm(query, axis=-1), call.scale * own, np.linalg.norm(key, axis=-1))
        sizes = tuple(x.astype(np.float32)[None, None] for x in sizes)
        bounds = alibi_core.ScoreBounds.of_tokens(part, *sizes, part.nearest_keys(), q_block=block, kv_block=block)
        ranges = alibi_core.key_ranges(part, bounds, UNIT_ROUNDOFF[dtype])
        of_blocks = (np.asarray(x, np.int64).ravel() for x in (ranges.first, ranges.stop, ranges.past))
        first, stop, past = (np.repeat(x, block)[:q_len] for x in of_blocks)
        pairs = np.minimum(stop, positions + 1) - np.maximum(first, positions - past + 1)
        needed += int(pairs.clip(0).sum())
    causal = int((positions + 1).sum())
    return batch * num_heads * (q_len * call.kv_len if is_dense else causal) / needed
