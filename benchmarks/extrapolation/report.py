"""The results: gathered, and shown as tables."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks import harness
from benchmarks.extrapolation.corpus import Corpus
from benchmarks.extrapolation.evaluation import Held
from benchmarks.extrapolation.settings import MULTIPLES, Settings

PROTOCOLS = ("non_overlapping", "sliding")


@dataclass
class Results:
    """What was measured, and under which conditions. Losses are in nats a token; a token is a byte."""

    settings: dict[str, Any]
    corpus: dict[str, Any]
    versions: dict[str, str]
    machine: dict[str, Any]
    methods: dict[str, dict[str, Any]] = field(default_factory=dict)
    seconds: float = 0.0

    @classmethod
    def start(cls, settings: Settings, corpus: Corpus, seed: int, device: str, full: bool) -> Results:
        """Return results with everything in them but measurements."""
        held = Held.of(corpus.held_out, settings)
        return cls(
            settings=asdict(settings)
            | {"setting": "full" if full else "quick", "seed": seed, "vocab_size": 256, "dtype": "float32"}
            | {"lengths": list(settings.lengths), "stride": settings.stride},
            corpus={"name": corpus.name, "training_bytes": len(corpus.training)}
            | {"held_out_bytes": len(corpus.held_out), "scored": held.scored}
            | {"windows": len(held.windows(settings.stride)), "every": held.every}
            | {"sha256": corpus.digest},
            versions=harness.versions("torch"),
            machine=harness.machine() | {"threads": torch.get_num_threads(), "device": _device_name(device)},
        )

    @property
    def all_finite(self) -> bool:
        """Whether no loss overflowed."""
        return all(
            math.isfinite(loss)
            for found in self.methods.values()
            for loss in [*found["training_loss"], *found["by_position"]]
            + [loss for protocol in PROTOCOLS for loss in found[protocol].values()]
        )

    def show(self, console: Console) -> None:
        """Print one table a protocol, and one of the losses by position."""
        length, lengths = self.settings["train_length"], self.settings["lengths"]
        windows, stride = self.corpus["windows"], self.settings["stride"]
        console.print(
            f"\nTrained at {length:,} bytes on {self.corpus['name']}; loss in nats a byte.\n"
            f"change: loss at {MULTIPLES[-1]} times the training length minus loss at the training length\n"
        )
        titles = {
            "non_overlapping": f"Non-overlapping segments, {self.corpus['scored']:,} bytes scored",
            "sliding": f"Sliding windows, stride {stride}, {windows * stride:,} bytes scored",
        }
        for protocol, title in titles.items():
            table = _table(title, *map(str, lengths), "change")
            for method, found in self.methods.items():
                losses = [found[protocol][str(n)] for n in lengths]
                table.add_row(method, *(f"{loss:.3f}" for loss in losses), f"{losses[-1] - losses[0]:+.3f}")
                table.add_row("  perplexity", *map(_perplexity, losses), style="dim")
            console.print(table)
        table = _table(
            f"Loss by position, mean over {windows:,} windows of {lengths[-1]:,}",
            "first",
            f"last trained ({length})",
            f"last ({lengths[-1]})",
        )
        for method, found in self.methods.items():
            losses = found["by_position"]
            table.add_row(method, *(f"{losses[at]:.3f}" for at in (0, length - 1, -1)))
        console.print(table)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("method", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _perplexity(loss: float) -> str:
    return f"{math.exp(loss):.2f}" if loss < 100 else "inf"


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else device
