"""The paper's two protocols: what a model loses, in nats a token, on text cut up in segments of a given length."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.extrapolation.settings import Settings

PROTOCOLS = ("non_overlapping", "sliding")
TOKENS_AT_ONCE = 8192  # caps the memory that a long bias and the logits take


@dataclass(frozen=True)
class Held:
    """Held-out text and which of its tokens count.

    Tokens ``first`` to ``first + scored`` are predicted, each once, under both protocols and at every length. What
    comes before ``first`` is context for the first sliding windows.
    """

    tokens: Tensor  # [length], integers
    first: int
    scored: int
    every: int = 1  # the sliding protocol, which costs more, takes every so manieth window

    @classmethod
    def of(cls, tokens: Tensor, settings: Settings) -> Held:
        """Return what ``settings`` ask for, or as much as there is, in whole segments of the longest length."""
        segments = (min(len(tokens), settings.longest + settings.scored) - settings.longest) // settings.longest
        scored = segments * settings.longest
        return cls(tokens, settings.longest, scored, max(1, scored // settings.slid))

    def windows(self, stride: int) -> Tensor:
        """Return where the sliding windows end."""
        return torch.arange(self.first + stride, self.first + self.scored + 1, stride * self.every)


def evaluate(model: nn.Module, held: Held, settings: Settings, report: Callable[[str, int], None]) -> dict[str, Any]:
    """Return mean losses by length under both protocols, and by position at the longest; tell ``report`` of each."""
    segments, windows = {}, {}
    by_position = torch.empty(0)
    for length in settings.lengths:
        segments[str(length)] = non_overlapping(model, held, length)
        report("non-overlapping", length)
        windows[str(length)], by_position = sliding(model, held, length, settings.stride)
        report("sliding", length)
    return {"non_overlapping": segments, "sliding": windows, "by_position": by_position.tolist()}


def non_overlapping(model: nn.Module, held: Held, length: int) -> float:
    """Return the mean loss over segments of ``length`` that touch but do not overlap.

    The first token of each segment is predicted from one token alone, so short segments suffer from short contexts.
    """
    ends = torch.arange(held.first + length, held.first + held.scored + 1, length)
    return torch.cat(list(_losses(model, held.tokens, ends, length))).double().mean().item()


def sliding(model: nn.Module, held: Held, length: int, stride: int) -> tuple[float, Tensor]:
    """Return the mean loss where a window moves by ``stride`` and only its last ``stride`` tokens count.

    So each token is predicted from at least ``length - stride + 1`` tokens. Also the mean over all windows of the loss
    at each position in the window, ``[length]``.
    """
    losses = torch.cat(list(_losses(model, held.tokens, held.windows(stride), length))).double()  # [windows, length]
    return losses[:, -stride:].mean().item(), losses.mean(dim=0)


@torch.inference_mode()
def _losses(model: nn.Module, tokens: Tensor, ends: Tensor, length: int) -> Iterator[Tensor]:
    """Yield ``[windows, length]`` losses of the ``length`` tokens before each of ``ends``, some windows at a time."""
    device = next(model.parameters()).device
    window = torch.arange(-length - 1, 0)
    for some in ends.split(max(1, TOKENS_AT_ONCE // length)):
        text = tokens[some[:, None] + window].to(device, torch.int64)  # [windows, length + 1]
        logits = model(text[:, :-1])
        yield F.cross_entropy(logits.transpose(1, 2), text[:, 1:], reduction="none").float().cpu()
