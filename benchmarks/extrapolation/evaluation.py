"""The paper's two protocols: what a model loses, in nats a token, on text cut up in segments of a given length."""

from __future__ import annotations

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

    def ends(self, stride: int) -> Tensor:
        """Return where windows that move by ``stride`` end."""
        return torch.arange(self.first + stride, self.first + self.scored + 1, stride)


def evaluate(model: nn.Module, held: Held, settings: Settings) -> dict[str, Any]:
    """Return mean losses by length under both protocols, and by position at the longest."""
    slid = {str(length): sliding(model, held, length, settings.stride) for length in settings.lengths}
    return {
        "non_overlapping": {str(length): non_overlapping(model, held, length) for length in settings.lengths},
        "sliding": {length: mean for length, (mean, _) in slid.items()},
        "by_position": slid[str(settings.longest)][1].tolist(),
    }


def non_overlapping(model: nn.Module, held: Held, length: int) -> float:
    """Return the mean loss over segments of ``length`` that touch but do not overlap.

    The first token of each segment is predicted from one token alone, so short segments suffer from short contexts.
    """
    return _losses(model, held.tokens, held.ends(length), length).mean().item()


def sliding(model: nn.Module, held: Held, length: int, stride: int) -> tuple[float, Tensor]:
    """Return the mean loss where a window moves by ``stride`` and only its last ``stride`` tokens count.

    So each token is predicted from at least ``length - stride + 1`` tokens. Also the mean over all windows of the loss
    at each position in the window, ``[length]``.
    """
    losses = _losses(model, held.tokens, held.ends(stride)[:: held.every], length)
    return losses[:, -stride:].mean().item(), losses.mean(dim=0)


@torch.inference_mode()
def _losses(model: nn.Module, tokens: Tensor, ends: Tensor, length: int) -> Tensor:
    """Return ``[windows, length]`` losses, float64, of the ``length`` tokens before each of ``ends``."""
    device = next(model.parameters()).device
    found = []
    for some in ends.split(max(1, TOKENS_AT_ONCE // length)):
        text = tokens[some[:, None] + torch.arange(-length - 1, 0)].to(device, torch.int64)  # [windows, length + 1]
        logits = model(text[:, :-1])
        found.append(F.cross_entropy(logits.transpose(1, 2), text[:, 1:], reduction="none").float().cpu())
    return torch.cat(found).double()
