"""How the language models are trained: settings, the text, and the loop."""

from __future__ import annotations

import hashlib
import math
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import lr_scheduler
from tqdm import trange

from alibi_torch.nn import AlibiConfig

MULTIPLES = (1, 2, 4, 8, 16)
# The encodings are tables, each much like the next: held out, they would be known from the others.
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings"}


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
    learning_rate: float = 3e-3  # at its peak, after a tenth of the steps
    corpus_bytes: int = 4_000_000  # of the standard library, at most
    scored: int = 8_192  # held-out tokens that are scored on non-overlapping segments
    windows: int = 32  # sliding windows, spread evenly over the same tokens

    @property
    def lengths(self) -> tuple[int, ...]:
        """The lengths at which models are evaluated."""
        return tuple(multiple * self.train_length for multiple in MULTIPLES)

    @property
    def stride(self) -> int:
        """How far a sliding window moves: every scored token has three quarters of the training length before it."""
        return max(1, self.train_length // 4)

    @property
    def model(self) -> AlibiConfig:
        """The shape of the models. Training is too short for dropout to help."""
        names = ("num_layers", "embed_dim", "num_heads", "expansion_factor")
        return AlibiConfig(max_len=self.train_length, dropout=0.0, **{name: getattr(self, name) for name in names})


QUICK = Settings()
FULL = Settings(256, 3, 128, 8, 4, 16, 600, 2e-3, 16_000_000, 65_536, 64)


def standard_library(max_bytes: int, held_out_bytes: int) -> tuple[Tensor, Tensor]:
    """Return the source of Python's standard library, split by file: training text and held-out text, uint8.

    Files come in the order of a hash of their paths, the same on every machine, so that no part of the alphabet is
    cut off. The first ones are held out.
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


def train(model: nn.Module, text: Tensor, settings: Settings, seed: int, name: str = "") -> list[float]:
    """Train on random pieces of the text, the same for every method; return the loss of each step, in nats a token."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = lr_scheduler.LambdaLR(optimizer, lambda step: rate(step + 1, settings.steps))
    draws = torch.Generator().manual_seed(seed)
    piece = torch.arange(settings.train_length + 1)
    losses = []
    model.train()
    for _ in trange(settings.steps, desc=f"{name:12}", mininterval=1 if sys.stderr.isatty() else 10):
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
    """Return the share of the peak learning rate: up linearly, then down to a tenth along a cosine."""
    warmup = max(1, steps // 10)
    if step <= warmup:
        return step / warmup
    return 0.55 + 0.45 * math.cos(math.pi * (step - warmup) / (steps - warmup))
