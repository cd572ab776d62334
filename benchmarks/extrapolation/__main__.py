"""Train the four models, evaluate them at all lengths, and draw the losses."""

from __future__ import annotations

import argparse
import hashlib
import math
import platform
import sys
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import lr_scheduler
from tqdm import trange

import benchmarks.extrapolation
from alibi_torch.nn import AlibiConfig
from benchmarks import harness
from benchmarks.extrapolation.models import METHODS, VOCAB_SIZE, build

MULTIPLES = (1, 2, 4, 8, 16)
PROTOCOLS = {"non_overlapping": "Non-overlapping segments\nall tokens count", "sliding": "Sliding windows\n"}
# Exclude the encodings: they are similar tables, so a held-out one could be predicted from the others.
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings"}
# Okabe and Ito's palette, which colour-blind readers can distinguish; markers distinguish the lines in print.
STYLES = {
    "alibi": {"label": "ALiBi", "color": "#0072B2", "marker": "o", "linewidth": 2.8, "zorder": 4},
    "sinusoidal": {"label": "sinusoidal", "color": "#D55E00", "marker": "s"},
    "rotary": {"label": "rotary", "color": "#009E73", "marker": "^"},
    "none": {"label": "no positions", "color": "#666666", "marker": "D"},
}


@dataclass(frozen=True)
class Settings:
    """The settings that all methods share. Lengths are in tokens, which are bytes."""

    train_length: int = 128
    num_layers: int = 3
    embed_dim: int = 128
    num_heads: int = 8
    expansion_factor: int = 2
    batch_size: int = 16
    steps: int = 200
    learning_rate: float = 3e-3  # the peak, reached after a tenth of the steps
    corpus_bytes: int = 4_000_000  # at most this much of the standard library's source
    scored: int = 8_192  # number of held-out tokens scored on non-overlapping segments
    windows: int = 32  # number of sliding windows, spread evenly over the same tokens

    @property
    def lengths(self) -> tuple[int, ...]:
        """The evaluation lengths."""
        return tuple(multiple * self.train_length for multiple in MULTIPLES)

    @property
    def stride(self) -> int:
        """The step of sliding windows: every scored token has at least 3/4 of the training length before it."""
        return max(1, self.train_length // 4)

    @property
    def model(self) -> AlibiConfig:
        """The shape of the models. Training is too short for dropout to help."""
        names = ("num_layers", "embed_dim", "num_heads", "expansion_factor")
        return AlibiConfig(max_len=self.train_length, dropout=0.0, **{name: getattr(self, name) for name in names})


QUICK = Settings()
FULL = Settings(256, 4, 192, 8, 4, 16, 600, 2e-3, 16_000_000, 65_536, 64)


def standard_library(max_bytes: int, held_out_bytes: int) -> tuple[Tensor, Tensor]:
    """Return the source of Python's standard library, split by file: training text and held-out text, uint8.

    Files are ordered by a hash of their paths, which is the same on every machine, so that the size limit does not cut
    off the end of the alphabet. The first files are held out.
    """
    root = Path(sysconfig.get_path("stdlib"))
    paths = [path.relative_to(root) for path in root.rglob("*.py")]
    paths = [path for path in paths if not LEFT_OUT.intersection(path.parts)]
    held_out, training = bytearray(), bytearray()
    for path in sorted(paths, key=lambda path: hashlib.sha256(path.as_posix().encode()).digest()):
        (held_out if len(held_out) < held_out_bytes else training).extend((root / path).read_bytes())
        if len(held_out) + len(training) >= max_bytes:
            break
    return tuple(torch.frombuffer(x, dtype=torch.uint8) for x in (training, held_out[:held_out_bytes]))


# --- Training and evaluation ------------------------------------------------------------------------------------------


def train(model: nn.Module, text: Tensor, settings: Settings, seed: int, name: str = "") -> list[float]:
    """Train on random pieces of text, the same for every method; return the loss per step, in nats per token."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = lr_scheduler.LambdaLR(optimizer, lambda step: rate(step + 1, settings.steps))
    draws = torch.Generator().manual_seed(seed)
    piece = torch.arange(settings.train_length + 1)
    losses = []
    model.train()
    for _ in trange(settings.steps, desc=f"{name:10}", mininterval=1 if sys.stderr.isatty() else 10):
        starts = torch.randint(len(text) - settings.train_length, (settings.batch_size, 1), generator=draws)
        batch = text[starts + piece].long()  # [batch, train_length + 1]
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    model.eval()
    return losses


def rate(step: int, steps: int) -> float:
    """Return the learning rate as a share of its peak: linear warm-up, then cosine decay to a tenth."""
    warmup = max(1, steps // 10)
    if step <= warmup:
        return step / warmup
    return 0.55 + 0.45 * math.cos(math.pi * (step - warmup) / (steps - warmup))


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
    """Print one table per protocol."""
    lengths = results["settings"]["lengths"]
    for protocol, title in PROTOCOLS.items():
        columns = (*map(str, lengths), "change")
        table = harness.table(f"{title.splitlines()[0]}: loss in nats a byte", "method", *columns, no_wrap=True)
        for method, found in results["methods"].items():
            losses = [found[protocol][str(length)] for length in lengths]
            table.add_row(method, *(f"{loss:.3f}" for loss in losses), f"{losses[-1] - losses[0]:+.3f}")
        Console().print(table)


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw the loss by length under both protocols, and by position in the longest window."""
    settings, title = results["settings"], results["corpus"]
    length, lengths = settings["train_length"], settings["lengths"]
    figure = Figure(figsize=(13, 4.8), layout="constrained")
    axes = figure.subplots(1, 3, sharey=True)
    for method, found in results["methods"].items():
        line = {"markersize": 5, "linewidth": 1.8} | STYLES[method]
        for ax, protocol in zip(axes, PROTOCOLS, strict=False):
            ax.plot(lengths, [found[protocol][str(n)] for n in lengths], **line)
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
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper right", ncols=4, frameon=False)
    title = f"Trained at {length:,} bytes, tested at up to {lengths[-1]:,}   |   {title}"
    figure.suptitle(title, x=0.01, ha="left", fontsize=12.5, fontweight="bold")
    figure.savefig(path, dpi=150)


def by_half_octave(losses: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """Return positions (from 1) and mean losses in bins of equal width on a log scale, which reduces noise."""
    edges = np.unique(np.ceil(2 ** np.arange(0, np.log2(len(losses)) + 1, 0.5)).astype(int))
    spans = list(pairwise(np.append(edges[edges < len(losses)], len(losses) + 1)))
    centres = np.array([np.sqrt(first * (last - 1)) for first, last in spans])
    return centres, np.array([np.mean(losses[first - 1 : last - 1]) for first, last in spans])


def run(settings: Settings, seed: int, output: Path) -> int:
    """Train and evaluate all methods, write and print the results; return 1 if a loss is not finite, else 0."""
    start, machine = time.perf_counter(), harness.machine() | {"threads": torch.get_num_threads()}
    training, held_out = standard_library(settings.corpus_bytes, settings.lengths[-1] + settings.scored)
    methods = {}
    for method in METHODS:
        model = build(method, settings.model, seed)
        losses = train(model, training, settings, seed, method)
        methods[method] = evaluate(model, held_out, settings) | {"training_loss": losses}
    derived = {"seed": seed, "vocab_size": VOCAB_SIZE, "lengths": settings.lengths, "stride": settings.stride}
    results = {
        "settings": asdict(settings) | derived,
        "corpus": f"Python {'.'.join(platform.python_version_tuple()[:2])} standard library",
        "versions": harness.versions("torch"),
        "machine": machine,
        "methods": methods,
        "seconds": time.perf_counter() - start,
    }
    harness.write_json(output / "extrapolation.json", results)
    show(results)
    draw(results, output / "extrapolation.png")
    print(f"{results['seconds']:.0f} s; written to {output}/: extrapolation.json, extrapolation.png")
    is_finite = all(np.isfinite([*found[x].values()]).all() for found in methods.values() for x in PROTOCOLS)
    return int(not is_finite)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return its exit status."""
    raw, doc = argparse.RawDescriptionHelpFormatter, benchmarks.extrapolation.__doc__
    parser = argparse.ArgumentParser(prog="python -m benchmarks.extrapolation", description=doc, formatter_class=raw)
    parser.add_argument("--quick", action="store_true", help="smaller models, shorter inputs: a minute or two")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the order of the text (default 0)")
    parser.add_argument("--output", type=Path, default=Path("out"), metavar="DIR", help="default %(default)s")
    options = parser.parse_args(arguments)
    return run(QUICK if options.quick else FULL, options.seed, options.output)


if __name__ == "__main__":
    sys.exit(main())
