"""What ALiBi is in a local checkpoint, and what its horizons save: ``alibi-core inspect``."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from alibi_core._arrays import checks
from alibi_core._bias import slope_values
from alibi_core._cli import tables
from alibi_core._cli.terminal import UnusableError
from alibi_core._models import Checkpoint

LENGTHS = (2_048, 8_192, 32_768)


def add_commands(commands: Any) -> None:
    """Add the commands of this file to those of a parser."""
    parser = commands.add_parser(
        "inspect",
        help="print what ALiBi is in a local checkpoint",
        description="Print the family, slopes and bias of a local checkpoint, how far back the keys of each head "
        "matter, and which share of the visible scores that is for longer and longer texts.",
    )
    parser.add_argument("directory", metavar="DIR", help="of config.json and model.safetensors, or its shards")
    typical = "that of normally distributed queries and keys, 2 * scale * features of a head"
    tables.add_horizon_options(parser, typical)
    parser.set_defaults(run=_inspect, refused=tables.REFUSED)


def _inspect(options: argparse.Namespace) -> None:
    try:
        checkpoint = Checkpoint.open(options.directory)
    except OSError as error:  # which is of the files, and not of what is printed
        raise UnusableError(str(error)) from None
    config, slopes = checkpoint.config, np.asarray(checkpoint.config.slopes, np.float32)
    score_range = options.score_range
    if score_range is None:
        score_range = 2 * config.head_dim * (config.head_dim**-0.5 if config.scale is None else config.scale)
    checks.non_negative_number("--score-range", score_range)
    rules = {"score_range": score_range, "tolerance": options.tolerance, "is_causal": config.is_causal}
    sides = [slopes] if config.is_causal else [slopes, slopes]  # of keys before the query, and after it
    if config.future_slopes is not None:
        sides[1] = np.asarray(config.future_slopes, np.float32)
    horizons = [tables.horizons_of(side, **rules) for side in sides]
    for name, words in _facts(checkpoint, slopes).items():
        print(f"{name:8}{words}")
    print()
    heads = list(zip(*horizons, strict=True))
    needed = {length: [_needed(length, head, config.window_size) for head in heads] for length in LENGTHS}
    told = 1 if config.future_slopes is None else 2  # sides, where the second is another
    rows = []
    for head in range(config.num_heads):
        shown = [
            x for side, far in zip(sides[:told], horizons, strict=False) for x in tables.shown(side[head], far[head])
        ]
        rows.append((str(head), *shown, *(f"{needed[length][head]:.1%}" for length in LENGTHS)))
    means = {length: sum(shares) / len(shares) for length, shares in needed.items()}
    blank = [""] * 2 * told
    rows.append(("all", *blank, *(f"{mean:.1%}" for mean in means.values())))
    rows.append(("fewer", *blank, *(f"{1 / mean:.1f} x" for mean in means.values())))
    columns = ("slope", "horizon", "slope ahead", "horizon")[: 2 * told]
    tables.print_table(("head", *columns, *(f"at {length:,}" for length in LENGTHS)), rows)
    print(f"\n{tables.what_a_horizon_is(score_range, options.tolerance)}")
    print("The columns after it: which share of the visible scores a text of so many tokens needs, and in the last row")
    print("how many times fewer scores that is. Backends compute whole tiles of scores, so a few more.")


def _facts(checkpoint: Checkpoint, slopes: Any) -> dict[str, str]:
    """Return what is said of a checkpoint above the table of its heads."""
    config, family, bias = checkpoint.config, checkpoint.family, checkpoint.family.bias
    sources = {source.tensor: source.shape for parts in checkpoint.sources.values() for source in parts}
    size = sum(math.prod(shape) for shape in sources.values())
    keys = "" if config.num_kv_heads in (None, config.num_heads) else f" ({config.num_kv_heads} for keys and values)"
    counted = {"query": "distances from the query", "first key": "positions", "last key": "positions from the last key"}
    if bias.multiplies_in_bfloat16:
        rounding = "in bfloat16"
    else:
        rounding = "in float32" if bias.is_always_float32 else "in the model's dtype"
    kind = "causal" if config.is_causal else "symmetric" if config.future_slopes is None else "asymmetric"
    is_stated = bias.scheme != "canonical" or np.array_equal(slopes, np.asarray(slope_values(config.num_heads), "f4"))
    scheme = bias.scheme if is_stated else "of its config"  # as where a Jais is stretched
    return {
        "family": f"{family.name}, {size:,} parameters in {checkpoint.dtype_name}",
        "layers": str(config.num_layers),
        "heads": f"{config.num_heads} of {config.head_dim} features{keys}, {kind}",
        "slopes": f"{scheme}, from {slopes.max():.4g} to {slopes.min():.4g}",
        "bias": f"slopes times {counted[bias.counts_from]}, {rounding}; load_checkpoint takes the exact one instead",
        "texts": f"of {config.max_len:,} tokens in training, by its config",
    }


def _needed(length: int, horizons: Sequence[float], window: int | None) -> float:
    """Return the share of the visible scores of so many tokens that a head needs, with one horizon a side."""

    def pairs(farthest: Sequence[int | None]) -> int:
        own = length * (len(farthest) - 1)  # each query's own key, which both sides count
        return sum(tables.pairs(length, length, far, True) for far in farthest) - own

    return pairs([tables.farthest(horizon, window) for horizon in horizons]) / pairs([window] * len(horizons))
