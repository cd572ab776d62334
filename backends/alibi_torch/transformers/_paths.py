"""Which code computed an accelerated model's attention, call by call."""

from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch

LIBRARY = "alibi_torch"


@dataclass
class Paths:
    """The forward passes of one accelerated model so far.

    Attributes:
        strict: Whether a call that the library does not compute is an error.
        calls: How many passes ``"alibi_torch"`` computed, and how many the model's own code, by the reason why.
    """

    strict: bool
    calls: Counter[str] = field(default_factory=Counter)

    def by_library(self) -> None:
        """Count a pass that the library computes."""
        if not torch.compiler.is_compiling():
            self.calls[LIBRARY] += 1

    def by_model(self, model: Any, reason: str) -> None:
        """Count a pass that the model's own code computes, and warn of the first.

        Args:
            model: The model whose code computes it.
            reason: Why, as a sentence that begins with the argument's name.

        Raises:
            ValueError: If ``strict``.
        """
        if self.strict:
            raise ValueError(f"{reason}; make the model with accelerate(model, strict=False), or undo with restore")
        if torch.compiler.is_compiling():
            return
        if not self.calls.keys() - {LIBRARY}:
            warnings.warn(
                f"{type(model).__name__} computes this call by its own attention, which forms a score for every query "
                f"and key: {reason}. Further calls like it do so without a warning; paths(model) counts them",
                stacklevel=2,
            )
        self.calls[reason] += 1


def paths(model: Any) -> dict[str, int]:
    """Return how many forward passes of an accelerated model the library computed, and how many the model's own code.

    Passes inside ``torch.compile`` are not counted.

    Args:
        model: The model that ``accelerate`` returned.

    Returns:
        The number of passes for ``"alibi_torch"`` and for each reason why the model's own attention was needed.

    Raises:
        ValueError: If the model is not accelerated.

    Example:
        >>> from transformers import BloomConfig, BloomForCausalLM
        >>> from alibi_torch.transformers import accelerate
        >>> model = accelerate(BloomForCausalLM(BloomConfig(vocab_size=50, hidden_size=32, n_layer=1, n_head=4)).eval())
        >>> _ = model(torch.tensor([[7, 8, 9]]))
        >>> paths(model)
        {'alibi_torch': 1}
    """
    found = next((vars(x)["alibi_paths"] for x in model.modules() if "alibi_paths" in vars(x)), None)
    if found is None:
        raise ValueError(
            f"model must be accelerated, got {type(model).__name__}; see alibi_torch.transformers.accelerate"
        )
    return dict(found.calls)
