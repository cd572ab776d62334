"""Does two-dimensional ALiBi extrapolate to larger grids? A model predicts hidden patches of synthetic images.

An image is a grid of colours: overlapping discs and rectangles. Half of its patches are hidden; the model predicts
their colours. It is trained on small grids and tested on larger ones, with positions in the plane, with positions in
reading order (symmetric ALiBi on a line), and without positions.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor, nn

from alibi_torch import AlibiConfig, AlibiTransformer
from benchmarks import harness

COLOURS = 8
KINDS = ("plane", "line", "none")
TRAINED, TESTED = 10, (10, 16, 24, 32)  # patches along one side of the grid


def images(count: int, side: int, seed: int) -> Tensor:
    """Return images, ``[count, side, side]``, colours from 0, with about one shape per 16 patches."""
    rng = np.random.default_rng(seed)
    found = np.empty((count, side, side), np.int64)
    rows, columns = np.mgrid[:side, :side]
    for image in found:
        image[:] = rng.integers(COLOURS)
        for _ in range(side * side // 16):
            (row, column), (height, width) = rng.uniform(0, side, 2), rng.uniform(1, 4, 2)
            across, down = abs(columns - column) / width, abs(rows - row) / height
            is_disc = rng.random() < 0.5
            image[(across**2 + down**2 < 1) if is_disc else (np.maximum(across, down) < 1)] = rng.integers(COLOURS)
    return torch.from_numpy(found)


def points(side: int) -> Tensor:
    """Return the positions of patches in the plane, ``[side * side, 2]``, in reading order."""
    lines = torch.arange(side)
    return torch.stack(torch.meshgrid(lines, lines, indexing="ij"), dim=-1).reshape(-1, 2)


class Model(nn.Module):
    """Colour embeddings, a transformer whose only positional information is ALiBi, and a head."""

    def __init__(self, kind: str, width: int, layers: int) -> None:
        super().__init__()
        shape: dict[str, Any] = {"num_layers": layers, "embed_dim": width, "num_heads": 8}
        slopes = (0.0,) * 8 if kind == "none" else None
        config = AlibiConfig(**shape, is_causal=False, dropout=0.0, slopes=slopes, distance="euclidean")
        self.kind, self.transformer = kind, AlibiTransformer(config)
        self.embedding, self.head = nn.Embedding(COLOURS + 1, width), nn.Linear(width, COLOURS)

    def forward(self, patches: Tensor) -> Tensor:
        """Return logits ``[batch, patches, COLOURS]`` for ``[batch, side, side]``, where ``COLOURS`` means hidden."""
        side = patches.shape[-1]
        places = {"positions": points(side)} if self.kind == "plane" else {}
        return self.head(self.transformer(self.embedding(patches.flatten(1)), **places))


def hide(full: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Return images with half of their patches hidden, and the mask of hidden patches, ``[count, side, side]``."""
    hidden = torch.rand(full.shape, generator=torch.Generator().manual_seed(seed)) < 0.5
    return full.masked_fill(hidden, COLOURS), hidden


def train(kind: str, steps: int, width: int, layers: int) -> Model:
    """Return a trained model. All kinds have the same training images and initial weights."""
    torch.manual_seed(0)
    model = Model(kind, width, layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    for step in range(steps):
        full = images(32, TRAINED, seed=step)
        shown, hidden = hide(full, step)
        loss = nn.functional.cross_entropy(model(shown)[hidden.flatten(1)], full[hidden])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model


@torch.no_grad()
def accuracy(model: Model, side: int) -> float:
    """Return the share of hidden patches whose colour the model predicts correctly, on held-out images."""
    full = images(max(4, 16_384 // side**2), side, seed=10**6 + side)
    shown, hidden = hide(full, side)
    return (model(shown).argmax(dim=-1)[hidden.flatten(1)] == full[hidden]).double().mean().item()


def nearest(side: int) -> float:
    """Return the accuracy of a baseline without training: the colour of the nearest visible patch."""
    full = images(max(4, 16_384 // side**2), side, seed=10**6 + side)
    shown, hidden = hide(full, side)
    distance = torch.cdist(points(side).double(), points(side).double())
    found = [image.flatten()[(distance + 1e9 * (image.flatten() == COLOURS)).argmin(dim=1)] for image in shown]
    return (torch.stack(found).reshape(full.shape)[hidden] == full[hidden]).double().mean().item()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return its exit status: 1 if a number is not finite."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.patches", description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a few steps: it shows that the benchmark works")
    parser.add_argument("--output", type=Path, default=Path("out"), metavar="DIR", help="default %(default)s")
    options = parser.parse_args(arguments)
    start, (steps, width, layers) = time.perf_counter(), (3, 16, 1) if options.quick else (1500, 64, 3)
    tested = TESTED[:2] if options.quick else TESTED
    table = harness.table("Share of hidden patches named", "positions", *(f"{n} x {n}" for n in tested))
    rows: dict[str, list[float]] = {"nearest patch shown": [nearest(side) for side in tested]}
    for kind in KINDS:
        model = train(kind, steps, width, layers)
        rows[kind] = [accuracy(model, side) for side in tested]
    for name, shares in rows.items():
        table.add_row(name, *(f"{share:.3f}" for share in shares))
    Console().print(table)
    measurements = [
        {"positions": name, "side": side, "trained at": TRAINED, "accuracy": share}
        for name, shares in rows.items()
        for side, share in zip(tested, shares, strict=True)
    ]
    results = {"steps": steps, "machine": harness.machine(), "versions": harness.versions("torch")}
    results |= {"measurements": measurements, "seconds": time.perf_counter() - start}
    harness.write_json(options.output / "patches.json", results)
    return int(not all(np.isfinite(row["accuracy"]) for row in measurements))


if __name__ == "__main__":
    sys.exit(main())
