"""The state shared by the modules of one accelerated model, with a count of the passes that the library computed."""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch

LIBRARY = "alibi_torch"
_counting = threading.Lock()


@dataclass
class State:
    """The state shared by the base model and the attention layers of one accelerated model."""

    contract: str  # "model" for the model's own rounding of the bias, "exact" for none
    strict: bool  # a call that the library does not compute is an error
    calls: Counter[str] = field(default_factory=Counter)  # passes by the library (LIBRARY), by the original code (why)
    # The Tokens of the current pass, for layers whose mask has lost its attribute: in compiled code, and, by thread,
    # after a mask is copied to another device.
    compiled: Any = None
    by_thread: dict[int, Any] = field(default_factory=dict)

    @property
    def tokens(self) -> Any:
        """The tokens of the current pass; None outside of one."""
        is_compiling = torch.compiler.is_dynamo_compiling()
        return self.compiled if is_compiling else self.by_thread.get(threading.get_ident())

    @tokens.setter
    def tokens(self, tokens: Any) -> None:
        self.compiled = tokens
        if not torch.compiler.is_dynamo_compiling():
            self.by_thread[threading.get_ident()] = tokens

    def count(self, model: Any, reason: str | None) -> None:
        """Count a pass by the library, or by the original code for a reason: warn at the first, or raise if strict."""
        if reason is not None and self.strict:
            raise ValueError(f"{reason}; make the model with accelerate(model, strict=False), or undo with restore")
        if torch.compiler.is_compiling():
            return
        if reason is not None and not self.calls.keys() - {LIBRARY}:
            warnings.warn(
                f"{type(model).__name__} computes this call by its own attention, which forms a score for every query "
                f"and key: {reason}. Further calls like it do so without a warning; paths(model) counts them",
                stacklevel=2,
            )
        with _counting:
            self.calls[reason or LIBRARY] += 1


def paths(model: Any) -> dict[str, int]:
    """Return the number of forward passes of an accelerated model by the library, and by the model's original code.

    Keys are ``"alibi_torch"`` and each reason why the model's own attention was needed. Passes inside
    ``torch.compile`` are not counted.

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
    found = next((vars(x)["alibi_state"] for x in model.modules() if "alibi_state" in vars(x)), None)
    if found is None:
        raise not_accelerated(model)
    return dict(found.calls)


def not_accelerated(model: Any) -> ValueError:
    """Return the error for a model that is not accelerated but must be."""
    return ValueError(f"model must be accelerated, got {type(model).__name__}; see alibi_torch.transformers.accelerate")
