"""What attention costs: time and memory of any backend, section by section."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from alibi_core._horizon import UNIT_ROUNDOFF
from benchmarks import harness
from benchmarks.attention.exact import Reference, sample
from benchmarks.attention.numerics import OURS_LIMIT, PEERS_LIMIT, Run, accuracy, reason, tile_limit
from benchmarks.attention.sizes import MIB, Decoding, Timed
from benchmarks.harness import Measurement

PASSES = {False: "forward", True: "forward and backward"}


def passes(run: Run, backward: bool) -> Iterator[Measurement]:
    """Forward passes, or forward with backward: ours and others' against attention with no positions."""
    backend, kind = run.backend, PASSES[backward]
    for size in run.sizes.timed:
        if backward and not size.backward:
            continue
        shape = size.shape
        harness.report(f"{kind}, {shape.heads}, {shape.length:,} tokens")
        tensors = backend.tensors(shape, backward)
        plain = backend.baseline(tensors, backward)
        plain_call = backend.prepare(plain, tensors, backward)
        rows = sample(shape.length, run.sizes.rows)
        reference = Reference.of(tensors, rows, backend.as_float64, grad=tensors[3])
        group = f"Times faster than attention with no positions, {kind}: {shape.heads}"
        empty = Measurement(group, "", plain.name, "seconds", faster=True)
        if size.warm_up:
            plain_call()
        ours = replace(empty, candidate=f"{backend.ours.name}, {shape.length:,}", bar=size.bars[backward])
        yield (done := _ours(run, size, tensors, reference, plain_call, ours, plain.is_dense))
        if size.dense_bars[backward] is not None:
            yield _beside_dense(run, size, tensors, replace(done, bar=size.dense_bars[backward]))
        for peer in backend.peers if size.peer_pairs else ():
            harness.report(f"{kind}, {shape.heads}, {shape.length:,} tokens: {peer.name}")
            yield _peer(run, size, peer, tensors, reference, plain_call, empty)


def _ours(
    run: Run, size: Timed, tensors: Any, reference: Reference, plain: Any, empty: Measurement, is_dense: bool
) -> Measurement:
    backend, shape, backward = run.backend, size.shape, tensors[3] is not None
    kind = PASSES[backward]
    subject = f"{backend.ours.name}, {kind}, {shape.heads}, {shape.length:,} tokens"
    try:
        call = backend.prepare(backend.ours, tensors, backward)
        result = call()  # the first call, so it warms up too
        error = reference.error(result[0] if backward else result)
        del result
        if not run.is_right(subject, error.relative, shape.dtype):
            return replace(empty, note="not timed, its numbers are wrong")
        done = empty.timed(call, plain, size.pairs, clock=backend.seconds, warm_up=False)
    except RuntimeError as failure:  # out of memory: the run goes on, and fails
        run.wrong.append(f"{subject}: {reason(failure)}")
        return replace(empty, note=reason(failure))
    limit = next((each["tile_limit"] for each in run.limits if each["shape"] == asdict(shape)), None)
    limit = limit or tile_limit(tensors[:3], shape.dtype, backend.as_float64, is_dense)
    run.plot(kind, backend.ours.name, shape, done.ratio)
    run.plot(kind, "tile limit", shape, limit)
    return replace(done, note=run.note_limit(kind, shape, limit, done.ratio))


def _beside_dense(run: Run, size: Timed, tensors: Any, ours: Measurement) -> Measurement:
    """Time ours beside the peer with a dense bias, unless ours was not timed beside the baseline."""
    backend, shape, backward = run.backend, size.shape, tensors[3] is not None
    dense = backend.peers[0]
    harness.report(f"{PASSES[backward]}, {shape.heads}, {shape.length:,} tokens: ours beside {dense.name}")
    group = f"Times faster than {dense.name}, {PASSES[backward]}: {shape.heads}"
    beside = replace(ours, group=group, baseline=dense.name)
    if ours.ratio is None:
        return beside
    calls = (backend.prepare(each, tensors, backward) for each in (backend.ours, dense))
    return replace(beside.timed(*calls, size.pairs, clock=backend.seconds), note="")


def _peer(
    run: Run, size: Timed, peer: Any, tensors: Any, reference: Reference, plain: Any, empty: Measurement
) -> Measurement:
    backend, shape, backward = run.backend, size.shape, tensors[3] is not None
    kind = PASSES[backward]
    empty = replace(empty, candidate=f"{peer.name}, {shape.length:,}", note=peer.note)
    if backward and backend.device not in peer.backward_on:
        return replace(empty, note=f"left out, it has no backward pass on {backend.device}")
    needed, free = peer.bytes_needed(shape), backend.free_bytes()
    if needed > free:
        return replace(empty, note=f"left out, it needs {needed / 2**30:.0f} GiB, and may take {free / 2**30:.0f}")
    try:
        call = backend.prepare(peer, tensors, backward)
        result = call()
        if not backward:  # gradients of what is right are the framework's own
            error = reference.error(result).relative
            run.numerics[f"{peer.name}, {kind}, {shape.heads}, {shape.length:,} tokens"] = error
            if error > max(PEERS_LIMIT, OURS_LIMIT * UNIT_ROUNDOFF[shape.dtype]):
                empty = replace(empty, note=f"{peer.note}; off by {error:.0%}")
        del result
        done = empty.timed(call, plain, size.peer_pairs, clock=backend.seconds, warm_up=False)
    except Exception as failure:  # whatever it is, it is theirs; it is told, and the run goes on
        return replace(empty, note=f"not measured, {reason(failure)}")
    run.plot(kind, peer.name, shape, done.ratio)
    return done


def decode(run: Run) -> Iterator[Measurement]:
    """One query over few or many keys: with a cache that knows them, and without."""
    for size in run.sizes.decoding:
        yield from _decode(run, size)


def _decode(run: Run, size: Decoding) -> Iterator[Measurement]:
    backend, shape = run.backend, size.shape
    harness.report(f"one query over {shape.length:,} keys")
    found = backend.decode(shape)
    keys = f"one query over {shape.length:,} keys: batch {shape.batch}, {shape.heads}"
    group = f"Times faster than attention with no positions, {keys}"
    empty = Measurement(group, "", found.baseline_name, "seconds", faster=True)
    reference = Reference.of(found.tensors, np.arange(1), backend.as_float64)
    for name, call, bar in (
        (f"{backend.ours.name}, the layer's cache", found.cached, size.cached_bar),
        (f"{backend.ours.name}, attention", found.bare, size.bare_bar),
        (found.row_name, found.with_row, None),
    ):
        this = replace(empty, candidate=name, bar=bar)
        error = reference.error(call()).relative
        if call is found.with_row:
            run.numerics[f"{name}, decoding, {shape.length:,} keys"] = error
        elif not run.is_right(f"{name}, decoding, {shape.length:,} keys", error, shape.dtype):
            yield replace(this, note="not timed, its numbers are wrong")
            continue
        found.baseline()
        done = this.timed(call, found.baseline, size.pairs, clock=backend.seconds, warm_up=False)
        if call is found.cached:
            limit = tile_limit([x[:1] for x in found.tensors], shape.dtype, backend.as_float64)
            done = replace(done, note=run.note_limit("one query", shape, limit, done.ratio))
        yield done
        if call is found.cached and size.row_bar is not None:
            group = empty.group.replace("no positions", "a row of biases")
            beside = replace(this, group=group, baseline=found.row_name, bar=size.row_bar)
            yield beside.timed(call, found.with_row, size.pairs, clock=backend.seconds)


def memory(run: Run) -> Iterator[Measurement]:
    """The peak of memory beyond arguments, results and gradients."""
    backend, sizes = run.backend, run.sizes
    for backward, kind in PASSES.items():
        harness.report(f"memory, {kind}")
        shape = sizes.weighed_backward if backward and sizes.weighed_backward else sizes.weighed
        group = f"Peak memory beyond arguments, result and gradients, {shape.heads}, {shape.length:,} tokens"
        if sizes.weighed_shares is not None:
            bar = sizes.weighed_shares[backward]
            for how, ours, theirs, name in backend.weights(shape, backward):
                empty = Measurement(group, f"{backend.ours.name}, {kind}, {how}", name, "bytes", bar)
                yield empty.weighed(ours, theirs)
            continue
        extra = backend.extra_bytes(shape, backward)
        allowed = sizes.weighed_bars[backward] * MIB if sizes.weighed_bars else shape.tensor_bytes
        baseline = "what is allowed" if sizes.weighed_bars else "the query"
        empty = Measurement(group, f"{backend.ours.name}, {kind}", baseline, "bytes", sizes.weighed_bars and 1.0)
        yield empty.weighed(extra, allowed)


def longest(run: Run) -> Iterator[Measurement]:
    """A forward pass over so many tokens that nothing quadratic could be computed."""
    backend, shape = run.backend, run.sizes.longest
    if shape is None:
        return
    harness.report(f"{shape.length:,} tokens")
    group = f"A causal forward pass over {shape.length:,} tokens, {shape.heads}"
    empty = Measurement(group, f"{backend.ours.name}, extra memory", "arguments and result", "bytes", 1.0)
    found = backend.longest(shape, run.sizes.rows)
    subject = f"{backend.ours.name}, {shape.length:,} tokens"
    run.numerics[subject] = found
    is_right = run.is_right(f"{subject}, sampled rows", found["relative"], shape.dtype)
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
