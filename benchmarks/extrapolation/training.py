"""Training, the same for every method: the same batches in the same order, from the same weights."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.extrapolation.settings import Settings


def train(
    model: nn.Module, text: Tensor, settings: Settings, seed: int, report: Callable[[int, float], None]
) -> list[float]:
    """Train ``model`` on random pieces of ``text`` and return the loss of each step, in nats a token.

    ``seed`` is that of the choice of pieces; ``report`` is told the number of each step, from 1, and its loss.
    """
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    draws = torch.Generator().manual_seed(seed)
    piece = torch.arange(settings.train_length + 1)
    losses = []
    model.train()
    for step in range(1, settings.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * rate(step, settings)
        starts = torch.randint(len(text) - settings.train_length, (settings.batch_size, 1), generator=draws)
        batch = text[starts + piece].to(device, torch.int64)  # [batch, train_length + 1]
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        report(step, losses[-1])
    model.eval()
    return losses


def rate(step: int, settings: Settings) -> float:
    """Return the share of the peak learning rate at ``step``: up linearly, then down to a tenth along a cosine."""
    warmup = min(settings.warmup, max(1, settings.steps // 10))
    if step <= warmup:
        return step / warmup
    progress = (step - warmup) / (settings.steps - warmup)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))
