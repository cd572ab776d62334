"""Training, the same for every method: the same batches in the same order, from the same weights."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import lr_scheduler

from benchmarks.extrapolation.settings import Settings


def train(model: nn.Module, text: Tensor, settings: Settings, seed: int, steps: Iterable[int]) -> list[float]:
    """Train ``model`` on random pieces of ``text`` and return the loss of each step, in nats a token.

    ``seed`` is that of the choice of pieces; ``steps`` counts them, and may show how far it is.
    """
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = lr_scheduler.LambdaLR(optimizer, lambda step: rate(step + 1, settings.steps))
    draws = torch.Generator().manual_seed(seed)
    piece = torch.arange(settings.train_length + 1)
    losses = []
    model.train()
    for _ in steps:
        starts = torch.randint(len(text) - settings.train_length, (settings.batch_size, 1), generator=draws)
        batch = text[starts + piece].to(device, torch.int64)  # [batch, train_length + 1]
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
    """Return the share of the peak learning rate at ``step``: up linearly, then down to a tenth along a cosine."""
    warmup = max(1, steps // 10)
    if step <= warmup:
        return step / warmup
    return 0.55 + 0.45 * math.cos(math.pi * (step - warmup) / (steps - warmup))
