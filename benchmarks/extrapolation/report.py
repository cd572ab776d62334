"""The results: gathered, kept in a JSON file, and shown as tables."""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

import alibi_core
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
            versions={"python": platform.python_version(), "torch": torch.__version__}
            | {"alibi_core": alibi_core.__version__},
            machine={"system": platform.system(), "architecture": platform.machine(), "cores": os.cpu_count()}
            | {"threads": torch.get_num_threads(), "device": _device_name(device)},
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

    def save(self, path: Path) -> None:
        """Write all of it as JSON, which knows no NaN and no infinity: those become null."""
        path.write_text(json.dumps(_for_json(asdict(self)), indent=1, allow_nan=False) + "\n", encoding="utf-8")

    def take_over(self, path: Path) -> None:
        """Take the methods that an earlier run under the same conditions has finished.

        Raises:
            OSError: If there is no such file.
            ValueError: If it is of another run: other settings or another text.
        """
        earlier = json.loads(path.read_text(encoding="utf-8"))
        for part in ("settings", "corpus"):
            if earlier[part] != json.loads(json.dumps(getattr(self, part))):
                raise ValueError(f"--resume must continue a run with the same {part}, got another in {path.name}")
        # A null was not finite: that method is due again.
        self.methods = {name: found for name, found in earlier["methods"].items() if "null" not in json.dumps(found)}
        self.seconds = sum(found["seconds"] for found in self.methods.values())

    def show(self, console: Console, methods: Sequence[str]) -> None:
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
            for method in methods:
                losses = [self.methods[method][protocol][str(n)] for n in lengths]
                table.add_row(method, *(f"{loss:.3f}" for loss in losses), f"{losses[-1] - losses[0]:+.3f}")
                table.add_row("  perplexity", *map(_perplexity, losses), style="dim")
            console.print(table)
        table = _table(
            f"Loss by position, mean over {windows:,} windows of {lengths[-1]:,}",
            "first",
            f"last trained ({length})",
            f"last ({lengths[-1]})",
        )
        for method in methods:
            losses = self.methods[method]["by_position"]
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


def _for_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _for_json(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_for_json(item) for item in value]
    if isinstance(value, float):
        return round(value, 5) if math.isfinite(value) else None
    return value
