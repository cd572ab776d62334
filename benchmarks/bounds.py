"""Which share of the blocks of scores must be computed according to several bounds, for the same queries and keys?

A block of 128 queries and 128 keys may be skipped if the weights of all skipped keys of a row sum to at most the
tolerance. Adaptive Computation Pruning (ACP, arXiv 2504.06949) decides from the largest norms of a call and the decay
alone; an oracle reads the weights. Causal, canonical slopes; queries and keys are normally distributed, or come from a
model that the benchmark trains on the source of Python's standard library.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

import alibi_core
from alibi_core.backend import AttentionCall
from alibi_core.backend.horizon import Tiling, host_ranges
from benchmarks import harness
from benchmarks.extrapolation import QUICK, build, standard_library, train

BLOCK, TOLERANCES = 128, {"2**-24": 2.0**-24, "e**-10": math.exp(-10)}
Values = np.ndarray[Any, Any]


def visible(length: int) -> Values:
    """Return the blocks with visible keys under a causal mask, ``[blocks, blocks]`` booleans."""
    return np.tril(np.ones((-(-length // BLOCK),) * 2, bool))


def acp(query: Values, key: Values, slopes: Values, tolerance: float) -> Values:
    """Return the blocks that ACP keeps: the largest decay must exceed ``ln(tolerance) - ln(length) - 2 U``."""
    length, head_dim = query.shape[1:]
    norms = [np.linalg.norm(x, axis=-1).max(axis=-1) for x in (query, key)]  # [heads]
    threshold = math.log(tolerance) - math.log(length) - 2 * head_dim**-0.5 * norms[0] * norms[1]
    starts = np.arange(0, length, BLOCK)
    nearest = np.maximum(starts[:, None] - (starts + BLOCK - 1)[None], 0)  # tokens
    return (-slopes[:, None, None] * nearest >= threshold[:, None, None]) & visible(length)


def largest_norms(query: Values, key: Values, slopes: Values, tolerance: float) -> Values:
    """Return the blocks within the horizon in closed form, from the largest norms of each head."""
    length, head_dim = query.shape[1:]
    norms = [np.linalg.norm(x, axis=-1).max(axis=-1) for x in (query, key)]
    horizons = alibi_core.horizon(slopes, 2 * head_dim**-0.5 * norms[0] * norms[1], tolerance=tolerance)
    starts = np.arange(0, length, BLOCK)
    nearest = np.maximum(starts[:, None] - (starts + BLOCK - 1)[None], 0)
    return (nearest < horizons[:, None, None]) & visible(length)


def ours(query: Values, key: Values, slopes: Values, tolerance: float) -> Values:
    """Return the blocks that this library's plan keeps."""
    call = AttentionCall.check(query[None], key[None], key[None], slopes, tolerance=tolerance)
    plan = host_ranges(call, query[None], key[None], Tiling(q_block=BLOCK, kv_block=BLOCK, step_queries=16))
    starts = np.arange(0, query.shape[1], BLOCK)
    first, stop = plan.first[..., None], plan.stop[..., None]
    within = starts[None] + BLOCK > starts[:, None] - plan.past[..., None] + 1
    return (starts + BLOCK > first) & (starts < stop) & within & visible(query.shape[1])


def oracle(query: Values, key: Values, slopes: Values, tolerance: float) -> Values:
    """Return the fewest (heaviest) blocks of each row of blocks such that skipped weights are within the tolerance."""
    length, head_dim = query.shape[1:]
    distances = np.arange(length)[:, None] - np.arange(length)
    kept = []
    for q, k, slope in zip(query.astype(np.float64), key.astype(np.float64), slopes, strict=True):
        scores = np.where(distances >= 0, q @ k.T * head_dim**-0.5 - slope * distances, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        blocks = weights.reshape(length // BLOCK, BLOCK, length // BLOCK, BLOCK).sum(axis=-1).max(axis=1)
        order = np.argsort(blocks, axis=-1)
        is_left_out = np.take_along_axis(blocks, order, -1).cumsum(axis=-1) <= tolerance
        keep = np.empty_like(is_left_out)
        np.put_along_axis(keep, order, ~is_left_out, -1)
        kept.append(keep & visible(length))
    return np.stack(kept)


def trained(length: int) -> list[tuple[Values, Values]]:
    """Return queries and keys, ``[heads, length, head_dim]``, of each layer of a small model, on held-out text."""
    text, held_out = standard_library(QUICK.corpus_bytes, length)
    model, found = build("alibi", QUICK.model, 0), []
    train(model, text, QUICK, 0, "alibi")
    for block in model.transformer.blocks:
        block.attention.register_forward_pre_hook(
            lambda layer, inputs: found.append([x[0].numpy() for x in list(layer._heads(inputs[0], inputs[0]))[:2]])
        )
    with torch.no_grad():
        model(held_out[None, :length].long())
    return [tuple(pair) for pair in found]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return its exit status: 1 if a bound keeps fewer blocks than the oracle."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bounds", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--length", type=int, default=4096, metavar="N", help="tokens (default %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("out"), metavar="DIR", help="default %(default)s")
    options = parser.parse_args(arguments)
    rng, slopes = np.random.default_rng(0), np.asarray(alibi_core.slopes(8), np.float32)
    normal = tuple(rng.standard_normal((8, options.length, 64)).astype(np.float32) for _ in range(2))
    table = harness.table(f"Share of visible blocks kept, {options.length:,} tokens", "queries and keys", *TOLERANCES)
    rows, is_right = [], True
    for data, pairs in {"normal": [normal], "trained": trained(options.length)}.items():
        for bound in (acp, largest_norms, ours, oracle):
            shares = {
                name: np.mean([bound(*x, slopes, t).sum(axis=(1, 2)) for x in pairs]) / visible(options.length).sum()
                for name, t in TOLERANCES.items()
            }
            rows.append({"data": data, "bound": bound.__name__, **shares})
            table.add_row(f"{data}: {bound.__name__}", *(f"{x:.1%}" for x in shares.values()))
        is_right = is_right and all(row[name] >= rows[-1][name] for row in rows[-4:] for name in TOLERANCES)
    Console().print(table)
    results = {"length": options.length, "machine": harness.machine(), "versions": harness.versions("torch")}
    harness.write_json(options.output / "bounds.json", results | {"measurements": rows})
    return int(not is_right)


if __name__ == "__main__":
    sys.exit(main())
