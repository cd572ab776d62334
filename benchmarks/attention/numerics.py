"""Whether attention is right: a run of the benchmark, what it has found, and the errors it measures first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

import alibi_core
from alibi_core._horizon import UNIT_ROUNDOFF
from benchmarks import harness
from benchmarks.attention.backend import Backend, Contestant
from benchmarks.attention.exact import Error, Reference, errors_of_gradients, sample
from benchmarks.attention.sizes import Shape, Sizes
from benchmarks.harness import Measurement

# Relative errors. Gross ones: a wrong slope, mask or offset is off by far more. The accuracy section judges the digits.
OURS_LIMIT = 16  # units of roundoff of the dtype
PEERS_LIMIT = 2.0**-9  # in float32: BLOOM counts its bias from the first key, which costs digits


@dataclass
class Run:
    """A run in progress: what it measures, and what it has found besides times and memory."""

    backend: Backend
    sizes: Sizes
    wrong: list[str] = field(default_factory=list)  # a line for each number that is wrong
    numerics: dict[str, Any] = field(default_factory=dict)  # errors, by what was compared with float64
    limits: list[dict[str, Any]] = field(default_factory=list)  # tile limits, and how much of them was reached
    # [pass][name]: pairs of a length and how many times faster than the baseline, for the picture.
    curves: dict[str, dict[str, list[tuple[int, float]]]] = field(default_factory=dict)

    def is_right(self, subject: str, relative: float, dtype: str) -> bool:
        """Keep an error of ours, and return whether it is no gross one."""
        return self.note_error(subject, relative, OURS_LIMIT * UNIT_ROUNDOFF[dtype])

    def note_error(self, subject: str, relative: float, limit: float) -> bool:
        """Keep an error, and return whether it is small enough."""
        self.numerics[subject] = relative
        if relative <= limit:
            return True
        self.wrong.append(f"{subject}: relative error {relative:.1e}, must be at most {limit:.1e}")
        return False

    def note_limit(self, kind: str, shape: Shape, limit: float, ratio: float) -> str:
        """Keep a tile limit beside what was reached of it, and return that in words."""
        found = {"tile_limit": limit, "times_faster": ratio, "reached": ratio / limit}
        self.limits.append({"pass": kind, "shape": asdict(shape)} | found)
        return f"{ratio / limit:.0%} of the tile limit, {limit:.2f} times"

    def plot(self, kind: str, name: str, shape: Shape, ratio: float) -> None:
        """Add a point to a curve of the picture."""
        if shape.heads == self.sizes.timed[0].shape.heads:
            self.curves.setdefault(kind, {}).setdefault(name, []).append((shape.length, ratio))


# --- What is right --------------------------------------------------------------------------------------------------


def check(run: Run) -> None:
    """Compare everyone's results, and our gradients, with float64 arithmetic on a small shape."""
    backend, shape = run.backend, run.sizes.checked
    tensors = backend.tensors(shape, backward=True)
    reference = Reference.of(tensors, np.arange(shape.length), backend.as_float64)
    where = f"{shape.heads}, {shape.length:,} tokens"
    for contestant in (backend.ours, *backend.peers):
        harness.report(f"checking {contestant.name}")
        is_ours = contestant.name == backend.ours.name
        limit = OURS_LIMIT * UNIT_ROUNDOFF[shape.dtype] if is_ours else PEERS_LIMIT
        try:
            error = reference.error(backend.prepare(contestant, tensors, False)()).relative
            run.note_error(f"{contestant.name}, {where}", error, limit)
        except Exception as failure:  # whatever a peer lacks is told where its time is due
            if is_ours:
                raise
            run.numerics[f"{contestant.name}, {where}"] = reason(failure)
    harness.report("checking gradients")
    gradients = backend.prepare(backend.ours, tensors, True)()
    for name, error in errors_of_gradients(gradients, tensors[:3], tensors[3], backend.as_float64).items():
        run.is_right(f"{backend.ours.name}, gradient of {name}, {where}", error.relative, shape.dtype)


def accuracy(run: Run) -> Iterator[Measurement]:
    """The worst error in float32; in low precision the relative error, beside that without positions.

    Or beside that of the exact result, rounded, where that is larger: without positions all of the first row is exact.
    Both of everything and of each row: without positions the first rows, averages of few values, are so much larger
    than the others that they decide the former.
    """
    backend, sizes, shape = run.backend, run.sizes, run.sizes.exact
    group = f"Error against float64, {shape.num_heads} heads of {shape.head_dim}, {shape.length:,} tokens"
    harness.report("error of float32")
    error = _error(backend, backend.ours, backend.tensors(shape), np.arange(shape.length))
    empty = Measurement(group, f"{backend.ours.name}, float32, worst", f"{sizes.worst_bar:g}", "error", 1.0)
    yield empty.weighed(error.worst, sizes.worst_bar)
    for dtype in sizes.low_precision:
        harness.report(f"error of {dtype}")
        shape = replace(sizes.exact, dtype=dtype)
        tensors = backend.tensors(shape)
        rows = sample(shape.length, 32 * sizes.rows)
        plain = backend.baseline(tensors, False)
        ours = _error(backend, backend.ours, tensors, rows)
        theirs = _error(backend, plain, tensors, rows, has_bias=False)
        least = Reference.of(tensors, rows, backend.as_float64).rounding(dtype)
        name = f"{backend.ours.name}, {dtype}"
        found = {name: ours, f"{plain.name}, {dtype}": theirs, f"{dtype}, the exact result, rounded": least}
        run.numerics |= {f"{group}: {each}": asdict(error) for each, error in found.items()}
        for what, kind in (("", "relative"), (", by row", "by_row")):
            beside = max((getattr(theirs, kind), plain.name), (getattr(least, kind), "the exact result, rounded"))
            empty = Measurement(group, name + what, beside[1], "error", sizes.relative_bar)
            yield empty.weighed(getattr(ours, kind), beside[0])


def _error(
    backend: Backend, contestant: Contestant, tensors: Sequence[Any], rows: np.ndarray, has_bias: bool = True
) -> Error:
    result = backend.prepare(contestant, tensors, False)()
    return Reference.of(tensors, rows, backend.as_float64, has_bias=has_bias).error(result)


def reason(error: Exception) -> str:
    """Return the first line of what went wrong."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


# --- The tile limit ---------------------------------------------------------------------------------------------------

FINEST_BLOCK, MOST_BLOCKS = 64, 1024  # tokens; blocks of one head, since planning takes their square


def tile_limit(
    tensors: Sequence[Any], dtype: str, as_float64: Callable[[Any], np.ndarray], is_dense: bool = False
) -> float:
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
    needed = 0
    for entry, head in np.ndindex(batch, num_heads):  # one by one: the plan of all heads at once takes much memory
        query, key = (as_float64(x[entry, head]) for x in tensors[:2])
        own = np.sum(query * key[-q_len:], axis=-1)
        part = replace(call, batch=(1,), num_heads=1, num_kv_heads=1, slopes=call.slopes[head : head + 1])
        needed += _pairs(part, query, own, key, block, UNIT_ROUNDOFF[dtype])
    causal = int(np.sum(np.arange(call.kv_len - q_len + 1, call.kv_len + 1)))
    return batch * num_heads * (q_len * call.kv_len if is_dense else causal) / needed


def _pairs(
    call: alibi_core.AttentionCall, query: np.ndarray, own: np.ndarray, key: np.ndarray, block: int, tolerance: float
) -> int:
    """Count the pairs of one head that the key ranges hold."""
    sizes = (call.scale * np.linalg.norm(query, axis=-1), call.scale * own, np.linalg.norm(key, axis=-1))
    sizes = tuple(x.astype(np.float32)[None, None] for x in sizes)
    bounds = alibi_core.ScoreBounds.of_tokens(call, *sizes, call.nearest_keys(), q_block=block, kv_block=block)
    ranges = alibi_core.key_ranges(call, bounds, tolerance)
    first, stop, past = (
        np.repeat(np.asarray(x, np.int64).ravel(), block)[: call.q_len]
        for x in (ranges.first, ranges.stop, ranges.past)
    )
    positions = np.arange(call.q_len) + call.q_offset
    return int(np.sum(np.maximum(np.minimum(stop, positions + 1) - np.maximum(first, positions - past + 1), 0)))
