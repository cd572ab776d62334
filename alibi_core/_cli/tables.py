"""Slopes, horizons and shares of scores as tables: ``alibi-core slopes`` and ``alibi-core explain``."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

import alibi_core
from alibi_core._arrays import checks
from alibi_core._cli.terminal import UnusableError, waiting

HEAD_DIM = 64
# 2 * scale * |query| * |key| where HEAD_DIM features of both are normally distributed: 2 * 8 * 8 / 8
TYPICAL_RANGE = 16.0
REFUSED = (TypeError, ValueError, FileNotFoundError)  # the library's errors of arguments


def add_commands(commands: Any) -> None:
    """Add the commands of this file to those of a parser."""
    slopes = commands.add_parser("slopes", help="print slopes and horizons, a line a head")
    slopes.add_argument("num_heads", type=int, metavar="NUM_HEADS")
    slopes.set_defaults(run=_slopes, refused=REFUSED)
    explain = commands.add_parser(
        "explain",
        help="print which share of the scores a call has to compute, a line a head",
        description="Print how far back the keys of each head matter, and which share of the visible scores that is.",
    )
    explain.add_argument("kv_len", type=int, metavar="LENGTH", help="of the keys, in tokens")
    explain.add_argument("--q-len", type=int, metavar="N", help="queries, the last of LENGTH tokens (default all)")
    explain.add_argument("--num-heads", type=int, default=8, metavar="N", help="default 8")
    explain.add_argument("--query-norm", type=float, metavar="X", help="the largest norm of a query, and")
    explain.add_argument("--key-norm", type=float, metavar="X", help="of a key, in place of --score-range")
    explain.add_argument(
        "--head-dim", type=int, metavar="N", help=f"features of a head, beside norms (default {HEAD_DIM})"
    )
    explain.add_argument("--window-size", type=int, metavar="N", help="tokens back that a query sees, beside itself")
    explain.add_argument(
        "--causal",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="whether a query sees no key after it (default yes)",
    )
    explain.set_defaults(run=_explain, refused=REFUSED)
    for parser in (slopes, explain):
        parser.add_argument("--scheme", default="canonical", metavar="NAME", help="canonical, geometric or linear")
        parser.add_argument("--bias-max", type=float, default=8.0, metavar="X", help="of the scheme (default 8)")
        add_horizon_options(
            parser, f"{TYPICAL_RANGE:g}, about that of normally distributed queries and keys of {HEAD_DIM} features"
        )


def add_horizon_options(parser: argparse.ArgumentParser, default_range: str) -> None:
    """Add the options that decide how far horizons are."""
    parser.add_argument(
        "--score-range",
        type=float,
        metavar="X",
        help=f"by how much a scaled score may exceed that of the query's own key (default {default_range})",
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        metavar="X",
        help="the share of softmax weight that may be left out (default 2**-24, float32's rounding error)",
    )


def _slopes(options: argparse.Namespace) -> None:
    score_range = _of_queries_own_key(options)
    slopes, horizons = _heads(options, score_range, is_causal=True)
    rows = [(str(head), *shown(*pair)) for head, pair in enumerate(zip(slopes, horizons, strict=True))]
    print_table(("head", "slope", "horizon"), rows)
    print(f"\n{what_a_horizon_is(score_range, options.tolerance)}")


def _explain(options: argparse.Namespace) -> None:
    kv_len = checks.size("LENGTH", options.kv_len)
    q_len = kv_len if options.q_len is None else checks.size("--q-len", options.q_len)
    checks.positions_fit(kv_len - q_len, q_len, kv_len)
    window = None if options.window_size is None else checks.window(options.window_size)
    score_range = _score_range(options)
    slopes, horizons = _heads(options, score_range, is_causal=options.causal)
    visible = pairs(q_len, kv_len, window, options.causal)
    rows, total = [], 0
    for head, (slope, horizon) in enumerate(zip(slopes, horizons, strict=True)):
        needed = pairs(q_len, kv_len, farthest(horizon, window), options.causal)
        total += needed
        rows.append((str(head), *shown(slope, horizon), f"{needed:,}", f"{needed / visible:.1%}"))
    rows.append(("all", "", "", f"{total:,}", f"{total / (visible * len(slopes)):.1%}"))
    seen = "" if window is None else f", {window:,} tokens back" + ("" if options.causal else " and ahead")
    direction = "causal" if options.causal else "to both sides"
    print(f"queries: {q_len:,}, keys: {kv_len:,}, {direction}{seen}\n")
    print_table(("head", "slope", "horizon", "scores needed", "of visible"), rows)
    print(f"\n{what_a_horizon_is(score_range, options.tolerance)}")
    print("Backends compute whole tiles of scores, so a few more.")


def _score_range(options: argparse.Namespace) -> float:
    """Return the range of scores that is given, or that norms allow."""
    norms = {"--query-norm": options.query_norm, "--key-norm": options.key_norm}
    given = {name: checks.non_negative_number(name, x) for name, x in norms.items() if x is not None}
    if not given:
        if options.head_dim is not None:
            raise UnusableError("--head-dim must stand beside --query-norm and --key-norm, got it alone")
        return _of_queries_own_key(options)
    if len(given) == 1 or options.score_range is not None:
        got = [*given, *([] if options.score_range is None else ["--score-range"])]
        raise UnusableError(
            f"--query-norm and --key-norm must be given together, and without --score-range, got {' and '.join(got)}"
        )
    head_dim = HEAD_DIM if options.head_dim is None else checks.positive_int("--head-dim", options.head_dim)
    return 2 * math.prod(given.values()) / math.sqrt(head_dim)


def _of_queries_own_key(options: argparse.Namespace) -> float:
    """Return the range of scores that is given, or a typical one."""
    given = options.score_range
    return TYPICAL_RANGE if given is None else checks.non_negative_number("--score-range", given)


def _heads(options: argparse.Namespace, score_range: float, *, is_causal: bool) -> tuple[list[Any], list[float]]:
    """Return slope and horizon of each head."""
    rule = {name: getattr(options, name) for name in ("scheme", "bias_max")}
    with waiting(f"{options.num_heads:,} slopes"):
        slopes = alibi_core.slopes(options.num_heads, **rule)
    return list(slopes), horizons_of(slopes, score_range, options.tolerance, is_causal=is_causal)


def horizons_of(slopes: Any, score_range: float, tolerance: float | None, *, is_causal: bool = True) -> list[float]:
    """Return the horizon of each head."""
    with np.errstate(over="ignore"):  # what is too far for float32 is infinitely far
        horizons = alibi_core.horizon(slopes, score_range, tolerance=tolerance, is_causal=is_causal)
    found: list[float] = horizons.tolist()
    return found


def farthest(horizon: float, window: int | None) -> int | None:
    """Return how far the farthest key is that a head needs, in tokens; None for any number."""
    if math.isinf(horizon):
        return window
    back = max(int(horizon) - 1, 0)  # the nearest key is always needed
    return back if window is None else min(window, back)


def pairs(q_len: int, kv_len: int, back: int | None, is_causal: bool) -> int:
    """Return how many pairs of a query and a key are at most ``back`` tokens apart; None: any number.

    The queries are the last of the tokens. Integers of Python, so that no length is too large.
    """

    def below(position: int) -> int:
        """Return the sum of ``min(p, kv_len)`` for p from 0 until a position."""
        rising = min(position, kv_len)
        return rising * (rising - 1) // 2 + (position - rising) * kv_len if position > 0 else 0

    def keys_before(shift: int) -> int:
        """Return how many keys come before each query's position plus the shift, all queries together."""
        first = kv_len - q_len + shift
        return below(first + q_len) - below(first)

    most = q_len + kv_len if back is None else back
    return keys_before(1 if is_causal else most + 1) - keys_before(-most)


def shown(slope: Any, horizon: float) -> tuple[str, str]:
    """Return slope and horizon as they are printed."""
    return str(np.float32(slope)), f"{horizon:,.0f}" if math.isfinite(horizon) else "all"


def what_a_horizon_is(score_range: float, tolerance: float | None) -> str:
    """Return the sentence below a table of horizons."""
    tolerance = 2.0**-24 if tolerance is None else tolerance
    return (
        f"Horizon, in tokens: keys at that distance from a query and beyond hold at most {tolerance:.3g} of its\n"
        "softmax weight, all together, if no scaled score exceeds that of the query's own key by more than "
        f"{score_range:g}."
    )


def print_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print columns that are aligned to the right."""
    rows = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print("\n".join("  ".join(x.rjust(width) for x, width in zip(row, widths, strict=True)) for row in rows))
