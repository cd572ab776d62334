"""Train the five models, evaluate them at all lengths, and draw the losses."""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F

import benchmarks.extrapolation
from benchmarks import harness
from benchmarks.extrapolation.models import METHODS, VOCAB_SIZE, build
from benchmarks.extrapolation.training import FULL, MULTIPLES, QUICK, Settings, standard_library, train

PROTOCOLS = {"non_overlapping": "Non-overlapping segments\nall tokens count", "sliding": "Sliding windows\n"}
# Okabe and Ito's palette, which colour-blind readers can distinguish; markers distinguish the lines in print.
STYLES = {
    "alibi": {"label": "ALiBi", "color": "#0072B2", "marker": "o", "linewidth": 2.8, "zorder": 4},
    "gates": {"label": "forget gates", "color": "#CC79A7", "marker": "v", "zorder": 3},
    "sinusoidal": {"label": "sinusoidal", "color": "#D55E00", "marker": "s"},
    "rotary": {"label": "rotary", "color": "#009E73", "marker": "^"},
    "none": {"label": "no positions", "color": "#666666", "marker": "D"},
}


# --- Evaluation ------------------------------------------------------------------------------------------


@torch.inference_mode()
def losses_of(model: nn.Module, tokens: Tensor, ends: Tensor, length: int) -> Tensor:
    """Return ``[windows, length]`` losses of the ``length`` tokens before each of ``ends``, float64."""
    found = []
    for some in ends.split(max(1, 8192 // length)):  # limits the memory of logits
        text = tokens[some[:, None] + torch.arange(-length - 1, 0)].long()  # [windows, length + 1]
        logits = model(text[:, :-1])
        found.append(F.cross_entropy(logits.transpose(1, 2), text[:, 1:], reduction="none"))
    return torch.cat(found).double()


def evaluate(model: nn.Module, tokens: Tensor, settings: Settings) -> dict[str, Any]:
    """Return mean losses by length under both protocols, and by position at the longest length.

    The first ``lengths[-1]`` tokens are context only; the tokens after them are scored at every length.
    """
    first, stride = settings.lengths[-1], settings.stride
    moved = torch.arange(first + stride, len(tokens) + 1, stride)  # where sliding windows end
    moved = moved[:: max(1, len(moved) // settings.windows)]
    found: dict[str, Any] = {"non_overlapping": {}, "sliding": {}}
    for length in settings.lengths:
        segments = torch.arange(first + length, len(tokens) + 1, length)
        found["non_overlapping"][str(length)] = losses_of(model, tokens, segments, length).mean().item()
        slid = losses_of(model, tokens, moved, length)  # the last ``stride`` tokens of each window are scored
        found["sliding"][str(length)] = slid[:, -stride:].mean().item()
    return found | {"by_position": slid.mean(dim=0).tolist()}


# --- Report -----------------------------------------------------------------------------------------------------------


def show(results: dict[str, Any]) -> None:
    """Print one table per protocol: means over seeds, and at most half of how far these lie apart."""
    lengths = results["settings"]["lengths"]
    for protocol, title in PROTOCOLS.items():
        columns = (*map(str, lengths), "change", "±")
        table = harness.table(f"{title.splitlines()[0]}: loss in nats a byte", "method", *columns, no_wrap=True)
        for method, found in results["methods"].items():
            losses = np.array([found[protocol][str(length)] for length in lengths])  # [lengths, seeds]
            means, apart = losses.mean(axis=1), np.ptp(losses, axis=1).max() / 2
            table.add_row(
                method,
                *(f"{x:.3f}" for x in means),
                f"{means[-1] - means[0]:+.3f}",
                f"{apart:.3f}" if losses.shape[1] > 1 else "one seed",
            )
        Console().print(table)


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw the loss by length under both protocols, and by position in the longest window; bands span all seeds."""
    settings, title = results["settings"], results["corpus"]
    length, lengths = settings["train_length"], settings["lengths"]
    figure = Figure(figsize=(13, 4.8), layout="constrained")
    axes = figure.subplots(1, 3, sharey=True)
    for method, found in results["methods"].items():
        line = {"markersize": 5, "linewidth": 1.8} | STYLES[method]
        for ax, protocol in zip(axes, PROTOCOLS, strict=False):
            losses = np.array([found[protocol][str(n)] for n in lengths])  # [lengths, seeds]
            ax.plot(lengths, losses.mean(axis=1), **line)
            ax.fill_between(
                lengths, losses.min(axis=1), losses.max(axis=1), color=line["color"], alpha=0.2, linewidth=0
            )
        axes[2].plot(*by_half_octave(found["by_position"]), **line | {"markersize": 3.5})
    axes[0].set_title(PROTOCOLS["non_overlapping"], loc="left", fontsize=10.5)
    axes[1].set_title(
        f"{PROTOCOLS['sliding']}the last {settings['stride']} tokens of each count", loc="left", fontsize=10.5
    )
    axes[2].set_title(f"By position in windows of {lengths[-1]:,}\nmean over all windows", loc="left", fontsize=10.5)
    times = [f"{multiple}x\n{n:,}" for multiple, n in zip(MULTIPLES, lengths, strict=True)]
    positions = [1, *(2**power for power in range(2, lengths[-1].bit_length(), 2))]
    by_length = lengths, times, "length of the input: times the training length, and bytes"
    by_position = positions, [f"{n:,}" for n in positions], "position of the token in the window"
    for ax, (ticks, labels, xlabel) in zip(axes, (by_length, by_length, by_position), strict=True):
        ax.set_xscale("log", base=2)
        ax.set_xticks(ticks, labels)
        ax.set_xticks([], minor=True)
        ax.set_xlabel(xlabel)
        ax.axvline(length, color="#999999", linestyle=(0, (4, 3)), linewidth=1, zorder=1)
        ax.grid(axis="y", color="#dddddd")
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("loss, nats a byte (lower is better)")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
    title = f"Trained at {length:,} bytes, tested at up to {lengths[-1]:,}   |   {title}"
    figure.suptitle(title, x=0.01, ha="left", fontsize=12.5, fontweight="bold")
    figure.savefig(path, dpi=150)


def by_half_octave(losses: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """Return positions (from 1) and mean losses in bins of equal width on a log scale, which reduces noise."""
    edges = np.unique(np.ceil(2 ** np.arange(0, np.log2(len(losses)) + 1, 0.5)).astype(int))
    spans = list(pairwise(np.append(edges[edges < len(losses)], len(losses) + 1)))
    centres = np.array([np.sqrt(first * (last - 1)) for first, last in spans])
    return centres, np.array([np.mean(losses[first - 1 : last - 1]) for first, last in spans])


def run(settings: Settings, seeds: Sequence[int], output: Path) -> int:
    """Train and evaluate all methods, write and print the results; return 1 if a loss is not finite, else 0."""
    start, machine = time.perf_counter(), harness.machine() | {"threads": torch.get_num_threads()}
    training, held_out = standard_library(settings.corpus_bytes, settings.lengths[-1] + settings.scored)
    runs: dict[str, list[dict[str, Any]]] = {method: [] for method in METHODS}
    for seed in seeds:
        for method in METHODS:
            model = build(method, settings.model, seed)
            losses = train(model, training, settings, seed, f"{method} {seed}")
            runs[method].append(evaluate(model, held_out, settings) | {"training_loss": losses})
    derived = {"seeds": list(seeds), "vocab_size": VOCAB_SIZE, "lengths": settings.lengths, "stride": settings.stride}
    results = {
        "settings": asdict(settings) | derived,
        "corpus": f"Python {'.'.join(platform.python_version_tuple()[:2])} standard library",
        "versions": harness.versions("torch"),
        "machine": machine,
        "methods": {method: together(found) for method, found in runs.items()},
        "seconds": time.perf_counter() - start,
    }
    harness.write_json(output / "extrapolation.json", results)
    show(results)
    draw(results, output / "extrapolation.png")
    print(f"{results['seconds']:.0f} s; written to {output}/: extrapolation.json, extrapolation.png")
    losses = [x for found in results["methods"].values() for kind in PROTOCOLS for x in found[kind].values()]
    return int(not np.isfinite(losses).all())


def together(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return one method's losses by length, ``[seeds]`` each, and its means over seeds by position and by step."""
    found: dict[str, Any] = {
        protocol: {length: [run[protocol][length] for run in runs] for length in runs[0][protocol]}
        for protocol in PROTOCOLS
    }
    means = {name: np.mean([run[name] for run in runs], axis=0).tolist() for name in ("by_position", "training_loss")}
    return found | means


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return its exit status."""
    raw, doc = argparse.RawDescriptionHelpFormatter, benchmarks.extrapolation.__doc__
    parser = argparse.ArgumentParser(prog="python -m benchmarks.extrapolation", description=doc, formatter_class=raw)
    parser.add_argument("--quick", action="store_true", help="smaller models, shorter inputs: a minute or two")
    seeds = "of the weights and of the order of the text; several are averaged (default 0)"
    parser.add_argument("--seed", type=int, nargs="+", default=[0], help=seeds)
    parser.add_argument("--output", type=Path, default=Path("out"), metavar="DIR", help="default %(default)s")
    options = parser.parse_args(arguments)
    return run(QUICK if options.quick else FULL, options.seed, options.output)


if __name__ == "__main__":
    sys.exit(main())
