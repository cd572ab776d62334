"""What attention costs: time and memory of any backend, section by section."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from benchmarks import harness
from benchmarks.attention.backends import Call, Contestant, Earlier, Timer
from benchmarks.attention.exact import Reference, sample
from benchmarks.attention.numerics import PEERS_LIMIT, ROWS, Run, accuracy, limit_of, reason, tile_limit
from benchmarks.attention.sizes import Decoding, Timed
from benchmarks.harness import Measurement

PASSES = {False: "forward", True: "forward and backward"}


@dataclass(frozen=True)
class Pass:
    """Forward passes, or forward with backward, of everyone over the same tensors."""

    run: Run
    size: Timed
    tensors: tuple[Any, ...]
    reference: Reference
    plain: Contestant  # attention with no positions
    plain_call: Call

    @property
    def backward(self) -> bool:
        return self.tensors[3] is not None

    @property
    def subject(self) -> str:
        """Everything but who computes it, in words."""
        return f"{PASSES[self.backward]}, {self.size.shape.heads}, {self.size.shape.length:,} tokens"

    def beside(self, baseline: str, candidate: Contestant) -> Measurement:
        """Return a measurement that is still to be done."""
        group = f"Times faster than {baseline}, {PASSES[self.backward]}: {self.size.shape.heads}"
        name = f"{candidate.name}, {self.size.shape.length:,}"
        return Measurement(group, name, self.plain.name, "seconds", note=candidate.note, faster=True)

    def timed(self, contestant: Contestant) -> Measurement:
        """Time a contestant, unless it cannot run, or is ours and its numbers are wrong."""
        run, shape, backend = self.run, self.size.shape, self.run.backend
        is_ours, subject = contestant is backend.ours, f"{contestant.name}, {self.subject}"
        empty = self.beside("attention with no positions", contestant)
        empty = replace(empty, bar=self.size.bars[self.backward] if is_ours else None)
        if self.backward and backend.device not in contestant.backward_on:
            return replace(empty, note=f"left out, it has no backward pass on {backend.device}")
        needed, free = contestant.bytes_needed(shape), backend.free_bytes()
        if needed > free:
            return replace(empty, note=f"left out, it needs {needed / 2**30:.0f} GiB, and may take {free / 2**30:.0f}")
        try:
            call = backend.prepare(contestant, self.tensors, self.backward)
            result = call()  # the first call, so it warms up too
            if is_ours:
                error = self.reference.error(result[0] if self.backward else result).relative
                if not run.is_right(subject, error, limit_of(shape)):
                    return replace(empty, note="not timed, its numbers are wrong")
            elif not self.backward:  # gradients of what is right are the framework's own
                run.numerics[subject] = error = self.reference.error(result).relative
                if error > max(PEERS_LIMIT, limit_of(shape)):
                    empty = replace(empty, note=f"{contestant.note}; off by {error:.0%}")
            del result
            pairs = self.size.pairs if is_ours else self.size.peer_pairs
            done = empty.timed(call, self.plain_call, pairs, clock=backend.seconds, warm_up=False)
        except Exception as failure:  # out of memory, or a peer's own trouble: it is told, and the run goes on
            if is_ours:
                run.wrong.append(f"{subject}: {reason(failure)}")
            return replace(empty, note=f"not measured, {reason(failure)}")
        run.plot(PASSES[self.backward], contestant.name, shape, done.ratio)
        return replace(done, note=self.of_limit(done.ratio)) if is_ours else done

    def of_limit(self, ratio: float) -> str:
        """Return how much of the tile limit was reached, in words."""
        run, shape = self.run, self.size.shape
        limit = next((each["tile_limit"] for each in run.limits if each["shape"] == asdict(shape)), None)
        limit = limit or tile_limit(self.tensors[:3], shape.dtype, run.backend.as_float64, self.plain.is_dense)
        run.plot(PASSES[self.backward], "tile limit", shape, limit)
        return run.note_limit(PASSES[self.backward], shape, limit, ratio)

    def beside_dense(self, ours: Measurement) -> Measurement:
        """Time ours beside the peer with a dense bias, unless ours was not timed beside the baseline."""
        backend, dense = self.run.backend, self.run.backend.peers[0]
        harness.report(f"{self.subject}: ours beside {dense.name}")
        empty = self.beside(dense.name, backend.ours)
        empty = replace(empty, baseline=dense.name, bar=self.size.dense_bars[self.backward])
        if ours.ratio is None:
            return replace(empty, note=ours.note)
        calls = (backend.prepare(each, self.tensors, self.backward) for each in (backend.ours, dense))
        return empty.timed(*calls, self.size.pairs, clock=backend.seconds)

    def beside_earlier(self, ours: Measurement, earlier: Earlier) -> Measurement:
        """Time ours beside an earlier state of it, unless ours was not timed beside the baseline."""
        backend, shape = self.run.backend, self.size.shape
        harness.report(f"{self.subject}: ours beside {earlier.name}")
        empty = self.beside("an earlier state", backend.ours)
        empty = replace(empty, baseline=earlier.name, bar=0.95)
        if ours.ratio is None:
            return replace(empty, note=ours.note)

        def clock(call: Any) -> float:
            return call.seconds() if isinstance(call, Timer) else backend.seconds(call)

        calls: Any = (
            backend.prepare(backend.ours, self.tensors, self.backward),
            earlier.prepare(shape.dims, shape.dtype, self.backward),
        )
        return empty.timed(*calls, self.size.pairs, clock=clock)


def passes(run: Run, backward: bool) -> Iterator[Measurement]:
    """Forward passes, or forward with backward: ours and others' against attention with no positions."""
    backend = run.backend
    for size in run.sizes.timed:
        if backward and not size.backward:
            continue
        tensors = backend.tensors(size.shape, backward)
        plain = backend.baseline(tensors, backward)
        plain_call = backend.prepare(plain, tensors, backward)
        rows = sample(size.shape.length, ROWS)
        reference = Reference.of(tensors, rows, backend.as_float64, grad=tensors[3])
        this = Pass(run, size, tensors, reference, plain, plain_call)
        harness.report(this.subject)
        if size.warm_up:
            plain_call()
        yield (ours := this.timed(backend.ours))
        if size.dense_bars[backward] is not None:
            yield this.beside_dense(ours)
        if run.earlier is not None:
            yield this.beside_earlier(ours, run.earlier)
        for peer in backend.peers if size.peer_pairs else ():
            harness.report(f"{this.subject}: {peer.name}")
            yield this.timed(peer)


def decode(run: Run) -> Iterator[Measurement]:
    """One query over few or many keys: with a cache that knows them, and without."""
    for size in run.sizes.decoding:
        yield from _decode(run, size)


def _decode(run: Run, size: Decoding) -> Iterator[Measurement]:
    backend, shape = run.backend, size.shape
    harness.report(f"one query over {shape.length:,} keys")
    found = backend.decode(shape)
    group = f"Times faster than {{}}, one query over {shape.length:,} keys: batch {shape.batch}, {shape.heads}"
    plain = group.format("attention with no positions")
    reference = Reference.of(found.tensors, np.arange(1), backend.as_float64)
    for name, call, bar in (
        (f"{backend.ours.name}, the layer's cache", found.cached, size.cached_bar),
        (f"{backend.ours.name}, attention", found.bare, size.bare_bar),
        (found.row_name, found.with_row, None),
    ):
        this = Measurement(plain, name, found.baseline_name, "seconds", bar, faster=True)
        subject, error = f"{name}, decoding, {shape.length:,} keys", reference.error(call()).relative
        if call is found.with_row:
            run.numerics[subject] = error
        elif not run.is_right(subject, error, limit_of(shape)):
            yield replace(this, note="not timed, its numbers are wrong")
            continue
        found.baseline()
        done = this.timed(call, found.baseline, size.pairs, clock=backend.seconds, warm_up=False)
        if call is found.cached:
            limit = tile_limit([x[:1] for x in found.tensors], shape.dtype, backend.as_float64)
            done = replace(done, note=run.note_limit("one query", shape, limit, done.ratio))
        yield done
        if call is found.cached and size.row_bar is not None:
            beside = replace(this, group=group.format("attention with a row of biases"), baseline=found.row_name)
            beside = replace(beside, bar=size.row_bar)
            yield beside.timed(call, found.with_row, size.pairs, clock=backend.seconds)


def memory(run: Run) -> Iterator[Measurement]:
    """The peak of memory beyond arguments, results and gradients."""
    for backward, kind in PASSES.items():
        harness.report(f"memory, {kind}")
        shape, bar = run.sizes.weighed[backward], run.sizes.weighed_bars[backward]
        group = f"Peak memory beyond arguments, result and gradients, {shape.heads}, {shape.length:,} tokens"
        for how, ours, theirs, name in run.backend.weights(shape, backward):
            empty = Measurement(group, f"{run.backend.ours.name}, {kind}, {how}", name, "bytes", bar)
            yield empty.weighed(ours, theirs)


def longest(run: Run) -> Iterator[Measurement]:
    """A forward pass over so many tokens that nothing quadratic could be computed."""
    backend, shape = run.backend, run.sizes.longest
    if shape is None:
        return
    harness.report(f"{shape.length:,} tokens")
    group = f"A causal forward pass over {shape.length:,} tokens, {shape.heads}"
    empty = Measurement(group, f"{backend.ours.name}, extra memory", "arguments and result", "bytes", 1.0)
    found = backend.longest(shape, ROWS)
    subject = f"{backend.ours.name}, {shape.length:,} tokens"
    run.numerics[subject] = found
    is_right = run.is_right(f"{subject}, sampled rows", found["relative"], limit_of(shape))
    rows = "the sampled rows are right" if is_right else "sampled rows are wrong"
    done = empty.weighed(found["extra"], 4 * shape.tensor_bytes)
    yield replace(done, note=f"{found['seconds']:.1f} s; {rows}, worst error {found['worst']:.1e}")


SECTIONS: dict[str, Callable[[Run], Iterator[Measurement]]] = {
    "accuracy": accuracy,
    "forward": lambda run: passes(run, False),
    "backward": lambda run: passes(run, True),
    "decode": decode,
    "memory": memory,
    "million": longest,
}
