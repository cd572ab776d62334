"""Slopes, horizons and shares of scores as tables: ``alibi-core slopes`` and ``alibi-core explain``."""

from __future__ import annotations

import argparse
import importlib
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import alibi_core
from alibi_core._arrays import checks
from alibi_core._models import Checkpoint
from alibi_core._slopes import slope_values

TYPICAL_RANGE = 16.0  # 2 * scale * |query| * |key| of normally distributed queries and keys of 64 features
LENGTHS = (2_048, 8_192, 32_768)  # tokens; the columns for a checkpoint
OF_LENGTH = ("num_heads", "window_size", "causal", "scheme", "bias_max")  # options that a checkpoint answers itself


def add_commands(commands: Any) -> None:
    """Add the commands of this file to a parser."""
    slopes = commands.add_parser("slopes", help="print slopes and horizons, a line a head")
    slopes.add_argument("num_heads", type=int, metavar="NUM_HEADS")
    slopes.set_defaults(run=_slopes)
    explain = commands.add_parser(
        "explain",
        help="print which share of the scores is needed, a line a head",
        description="Print how far back the keys of each head matter, and which share of the visible scores that is: "
        "for a text of some length, or for a local checkpoint, with its family, slopes and bias.",
    )
    explain.add_argument(
        "target",
        metavar="LENGTH|DIR",
        help="length of a text in tokens, or a directory with config.json and safetensors",
    )
    of_length = explain.add_argument_group("options for LENGTH, which a checkpoint answers itself")
    of_length.add_argument("--num-heads", type=int, metavar="N", help="default 8")
    of_length.add_argument("--window-size", type=int, metavar="N", help="tokens back that a query sees, beside itself")
    of_length.add_argument(
        "--causal",
        action=argparse.BooleanOptionalAction,
        help="whether a query sees no key after it (default yes)",
    )
    explain.add_argument(
        "--tokens",
        metavar="FILE",
        help="token ids, separated by white space: also print what each head of DIR looks at in this text (needs "
        "PyTorch)",
    )
    explain.set_defaults(run=_explain)
    for parser, rules in ((slopes, slopes), (explain, of_length)):
        rules.add_argument("--scheme", metavar="NAME", help="canonical (default), geometric or linear")
        rules.add_argument("--bias-max", type=float, metavar="X", help="of the scheme (default 8)")
        parser.add_argument(
            "--score-range",
            type=float,
            metavar="X",
            help="by how much a scaled score may exceed that of the query's own key (default that of normally "
            f"distributed queries and keys, {TYPICAL_RANGE:g} for 64 features)",
        )
        parser.add_argument(
            "--tolerance",
            type=float,
            default=2.0**-24,
            metavar="X",
            help="the share of softmax weight that may be left out (default 2**-24, float32's rounding error)",
        )


def _slopes(options: argparse.Namespace) -> None:
    score_range = _score_range(options, TYPICAL_RANGE)
    slopes = _slopes_of(options, options.num_heads)
    horizons = _horizons(slopes, score_range, options.tolerance, is_causal=True)
    pairs = zip(slopes, horizons, strict=True)
    print_table(("head", "slope", "horizon"), [(str(head), *_shown(*pair)) for head, pair in enumerate(pairs)])
    print(f"\n{_what_a_horizon_is(score_range, options.tolerance)}")


def _explain(options: argparse.Namespace) -> None:
    lengths: tuple[int, ...] = LENGTHS
    if options.target.lstrip("-").isdecimal():
        if options.tokens is not None:
            raise ValueError(f"--tokens must come with DIR, a checkpoint that reads them, got LENGTH {options.target}")
        length = checks.size("LENGTH", int(options.target))
        checks.positions_fit(0, length, length)
        slopes = _slopes_of(options, 8 if options.num_heads is None else options.num_heads)
        window = None if options.window_size is None else checks.window(options.window_size)
        lengths, is_causal = (length,), options.causal is not False
        sides = [slopes] * (1 if is_causal else 2)
        score_range = _score_range(options, TYPICAL_RANGE)
    elif not os.path.isdir(options.target):
        rule = "LENGTH|DIR must be a whole number of tokens or a local directory with a checkpoint"
        raise ValueError(f"{rule}, got {options.target!r}")
    else:
        checkpoint = Checkpoint.open(options.target)
        given = [f"--{name.replace('_', '-')}" for name in OF_LENGTH if getattr(options, name) is not None]
        if given:
            raise ValueError(f"{given[0]} must come with LENGTH, since a checkpoint has its own, got {options.target}")
        config = checkpoint.config
        is_causal, window, sides = config.is_causal, config.window_size, _sides(checkpoint)
        scale = config.head_dim**-0.5 if config.scale is None else config.scale
        score_range = _score_range(options, 2 * config.head_dim * scale)
        looked_at = None if options.tokens is None else _looked_at(checkpoint, options.target, options.tokens)
        print("\n".join(f"{name:8}{words}" for name, words in _facts(checkpoint, sides).items()), end="\n\n")
        if looked_at is not None:
            print(looked_at, end="\n\n")
    horizons = [_horizons(side, score_range, options.tolerance, is_causal=is_causal) for side in sides]
    # Equal slopes on both sides need one pair of columns.
    is_even = len(sides) == 1 or np.array_equal(*sides)
    columns = ["slope", "horizon"] if is_even else ["slope", "horizon", "slope ahead", "horizon"]
    rows, totals = [], [0.0] * len(lengths)
    for head, far in enumerate(zip(*horizons, strict=True)):
        pairs = zip(sides[: len(columns) // 2], far, strict=False)
        told = [x for side, horizon in pairs for x in _shown(side[head], horizon)]
        shares = [_needed(length, far, window) for length in lengths]
        totals = [total + share for total, share in zip(totals, shares, strict=True)]
        rows.append((str(head), *told, *(f"{share:.1%}" for share in shares)))
    rows.append(("all", *[""] * len(columns), *(f"{total / len(rows):.1%}" for total in totals)))
    print_table(("head", *columns, *(f"at {length:,}" for length in lengths)), rows)
    print(f"\n{_what_a_horizon_is(score_range, options.tolerance)}")
    print("The columns after it: the share of the visible scores that a text of so many tokens needs. Backends compute")
    print("whole tiles of scores, so a few more.")


def _slopes_of(options: argparse.Namespace, num_heads: int) -> Any:
    """Return the slopes of the given scheme; the defaults are those of ``slopes``."""
    rule = {name: getattr(options, name) for name in ("scheme", "bias_max")}
    return alibi_core.slopes(num_heads, **{name: value for name, value in rule.items() if value is not None})


def _looked_at(checkpoint: Checkpoint, directory: str, file: str) -> str:
    """Return the text of PyTorch's ``explain_model`` for a checkpoint and a file of token ids."""
    rule = f"--tokens must name a file of at least two token ids below {checkpoint.vocab_size}"
    words = Path(file).read_bytes().split()
    wrong = [word for word in words if not (word.isdigit() and int(word) < checkpoint.vocab_size)]
    if wrong:
        raise ValueError(f"{rule}, got {wrong[0][:40].decode(errors='backslashreplace')!r} in {file}")
    if len(words) < 2:
        raise ValueError(f"{rule}, got {len(words)} in {file}")
    alibi_torch, torch = map(importlib.import_module, ("alibi_torch", "torch"))  # alibi_torch says what to install
    tokens = torch.tensor([[int(word) for word in words]])
    return str(alibi_torch.explain_model(alibi_torch.load_checkpoint(directory), tokens))


def _sides(checkpoint: Checkpoint) -> list[Any]:
    """Return the slopes for keys before the query and, unless the model is causal, for keys after it."""
    config = checkpoint.config
    past = np.asarray(config.slopes, np.float32)
    if config.is_causal:
        return [past]
    return [past, past if config.future_slopes is None else np.asarray(config.future_slopes, np.float32)]


def _facts(checkpoint: Checkpoint, sides: list[Any]) -> dict[str, str]:
    """Return the lines above the table of a checkpoint, by title."""
    config, family = checkpoint.config, checkpoint.family
    # Count each tensor once: fused tensors have several sources.
    sources = {source.tensor: source.shape for parts in checkpoint.sources.values() for source in parts}
    size = sum(math.prod(shape) for shape in sources.values())
    keys = "" if config.num_kv_heads in (None, config.num_heads) else f" ({config.num_kv_heads} for keys and values)"
    kind = "causal" if config.is_causal else "symmetric" if config.future_slopes is None else "asymmetric"
    slopes, canonical = sides[0], np.asarray(slope_values(config.num_heads), np.float32)
    # BLOOM, Falcon and MPT have rules of their own; others may be stretched to longer texts, by their config.
    other = family.name if family.name in ("bloom", "falcon", "mpt") else "of its config"
    scheme = "canonical" if np.array_equal(slopes, canonical) else other
    return {
        "family": f"{family.name}, {size:,} parameters in {checkpoint.dtype_name}",
        "layers": str(config.num_layers),
        "heads": f"{config.num_heads} of {config.head_dim} features{keys}, {kind}",
        "slopes": f"{scheme}, from {slopes.max():.4g} to {slopes.min():.4g}",
        "bias": f"{family.bias}; load_checkpoint takes the exact one instead",
        "texts": f"of {config.max_len:,} tokens in training, by its config",
    }


def _score_range(options: argparse.Namespace, default: float) -> float:
    """Return the score range; it and the tolerance, the rules of a horizon, are checked."""
    checks.probability("--tolerance", options.tolerance)
    given = default if options.score_range is None else options.score_range
    return checks.non_negative_number("--score-range", given)


def _horizons(slopes: Any, score_range: float, tolerance: float, *, is_causal: bool) -> list[float]:
    """Return the horizon of each head."""
    with np.errstate(over="ignore"):  # a horizon that overflows float32 becomes infinite
        found: list[float] = alibi_core.horizon(slopes, score_range, tolerance=tolerance, is_causal=is_causal).tolist()
    return found


def _needed(length: int, horizons: Sequence[float], window: int | None) -> float:
    """Return the share of the visible scores that a head needs; ``horizons`` are for keys before, then after."""

    def pairs(farthest: Sequence[int]) -> int:
        """Return the number of query-key pairs within these distances, one distance a side."""
        # Each query itself, and up to x keys a side, fewer at the end of the text.
        inside = [min(x, length - 1) for x in farthest]
        return length + sum(x * length - x * (x + 1) // 2 for x in inside)

    visible = [length if window is None else window] * len(horizons)
    # Keys at distances below the horizon are needed: the last is at horizon - 1.
    needed = [y if math.isinf(x) else min(y, max(int(x) - 1, 0)) for x, y in zip(horizons, visible, strict=True)]
    return pairs(needed) / pairs(visible)


def _shown(slope: Any, horizon: float) -> tuple[str, str]:
    """Return slope and horizon as text."""
    return str(np.float32(slope)), f"{horizon:,.0f}" if math.isfinite(horizon) else "all"


def _what_a_horizon_is(score_range: float, tolerance: float) -> str:
    """Return the explanation of the column ``horizon``."""
    return (
        f"Horizon, in tokens: keys at that distance from a query and beyond hold at most {tolerance:.3g} of its\n"
        "softmax weight, all together, if no scaled score exceeds that of the query's own key by more than "
        f"{score_range:g}."
    )


def print_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print rows in right-aligned columns."""
    rows = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print("\n".join("  ".join(x.rjust(width) for x, width in zip(row, widths, strict=True)) for row in rows))
