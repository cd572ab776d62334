"""Models whose own code came with their checkpoint (``trust_remote_code=True``), made to attend by this library."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from alibi_torch.transformers._facts import has_no_values
from alibi_torch.transformers._joined import Joined, Prepared
from alibi_torch.transformers._modules import (
    check_sizes,
    dropped_by,
    reason_for_own_code,
    reason_of_hooks,
    shows_weights,
    tokens_of,
    with_arguments,
)
from alibi_torch.transformers._paths import Paths


class RemoteAttention(Joined):
    """What the attention modules of all families have in common.

    Attributes:
        alibi_rules: What its family computes attention by.
        alibi_paths: What has computed the calls of its model.
    """

    alibi_rules: Any
    alibi_paths: Paths
    bias_name: str  # the argument that is the model's bias, and tells whether the library computes a call
    parts: frozenset[str]  # names of its modules
    optional: frozenset[str] = frozenset()
    dropout_name: str | None = None  # of the module that drops attention weights, where there is one

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the module's own code does; no weights where the library computes it."""
        _turn.reach()
        given = self.given(args, kwargs)
        if is_marked(given.get(self.bias_name)):
            return self.attended(given)
        if not self.alibi_paths.is_noted:
            self.alibi_paths.by_model(self, "layers must be called by their model, got a call without the model's mask")
        return self.alibi_class.forward(self, *args, **kwargs)

    def attended(self, given: dict[str, Any]) -> Any:
        """Return what the module's own code does, for a call that the library computes."""
        raise NotImplementedError

    @classmethod
    def rules(cls, module: Any, base: Any) -> Any:
        """Return what the family computes a module's attention by, something that can be hashed."""
        raise NotImplementedError

    @staticmethod
    def shape_of(module: Any) -> tuple[int, int]:
        """Return the number of heads of a module, and their features."""
        raise NotImplementedError

    @staticmethod
    def rows(module: Any) -> dict[str, int]:
        """Return how many rows the weights of a module's projections must have."""
        raise NotImplementedError

    @property
    def dropped(self) -> float:
        """The share of attention weights that a call drops."""
        return 0.0 if self.dropout_name is None else dropped_by(getattr(self, self.dropout_name))

    @property
    def shows_weights(self) -> bool:
        """Whether the attention weights are shown to code of somebody else."""
        return self.dropout_name is not None and shows_weights(getattr(self, self.dropout_name))

    @classmethod
    def check(cls, module: Any) -> None:
        """Check that a module is built as the library takes it to be.

        Raises:
            ValueError: If it is not.
        """
        found = {name for name, _ in module.named_children()}
        if not cls.parts <= found <= cls.parts | cls.optional:
            raise ValueError(
                f"attention of the model must have the modules {sorted(cls.parts)}, got {type(module).__name__} with "
                f"{sorted(found)}; leave the model as it is"
            )
        for name, rows in cls.rows(module).items():
            check_sizes(getattr(module, name), rows, cls.shape_of(module)[0])
        hidden = sorted(name for name in dir(type(module)) if hasattr(cls, name) and not hasattr(nn.Module, name))
        if hidden:
            raise ValueError(
                f"{hidden[0]} must not be a name of the model's attention, got a {type(module).__name__} with it, for "
                "while accelerated its code would find the library's; leave the model as it is"
            )


class Family:
    """What the library has to know of the code of one family of models."""

    attention: ClassVar[dict[str, type[RemoteAttention]]]  # by the names of their classes
    takes_padding: ClassVar[bool] = True
    unsupported: ClassVar[tuple[str, ...]]  # arguments

    def attention_of(self, base: Any) -> list[Any]:
        """Return the attention modules of a base model, in order."""
        raise NotImplementedError

    def check(self, base: Any) -> None:
        """Raise a ValueError if a base model's config or parts say that it computes something else."""
        for owner, name in self.builders(base):
            if name in vars(owner) or not hasattr(owner, name):
                raise ValueError(
                    f"{name} of the model must be that of its class, got a {type(owner).__name__} with another; "
                    "accelerate first, or leave the model as it is"
                )

    def reason(self, base: Any, given: dict[str, Any]) -> str | None:
        """Return why the library does not compute a call, as a sentence that begins with an argument."""
        for name in self.unsupported:
            if given.get(name) is not None:
                return f"{name} must be None, as it is not computed here, got {type(given[name]).__name__}"
        return None

    def builders(self, base: Any) -> list[tuple[Any, str]]:
        """Return what calls of a base model replace: objects, and the names of their methods."""
        raise NotImplementedError

    def call(self, base: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what a base model's own code does."""
        return base.alibi_class.forward(base, *args, **kwargs)

    def past(self, base: Any, given: dict[str, Any]) -> int:
        """Return how many tokens the cache of a call holds."""
        return 0

    def begin(self, base: Any, given: dict[str, Any], mask: Tensor | None) -> dict[str, Any]:
        """Keep a base model from building its bias in the call to come; return the arguments that change.

        Args:
            base: The model.
            given: Its arguments, by name.
            mask: ``[batch, tokens]`` booleans, False for padding; None where there is none.
        """
        raise NotImplementedError

    def begin_own(self, base: Any, given: dict[str, Any]) -> None:
        """Make a base model ready for a call that its own code computes."""

    def end(self, base: Any) -> None:
        """Undo either, once a call has come to its first layer."""
        for owner, name in self.builders(base):
            vars(owner).pop(name, None)

    def prepare_probe(self, base: Any, length: int) -> None:
        """Make a base model ready for a probe of a few tokens; all its attributes are put back after it."""

    def release(self, base: Any) -> None:
        """Free what memory a base model keeps for its bias alone."""

    def retain(self, base: Any) -> None:
        """Undo that."""


class RemoteBase(Prepared):
    """A base model. Before a call it decides who computes the attention.

    Attributes:
        alibi_family: Its family.
    """

    alibi_family: Family

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the model's own code does."""
        outer = _turn.begin(self)
        try:
            return self.alibi_family.call(self, *self.prepared(args, kwargs))
        finally:
            _turn.end(self, outer)

    def prepared(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Return the arguments of a call, and keep the model from building its bias if the library computes it."""
        given, family = self.given(args, kwargs), self.alibi_family
        tokens, mask = tokens_of(given), given.get("attention_mask")
        if not isinstance(tokens, Tensor):
            return args, kwargs  # which the model refuses
        layers = family.attention_of(self)
        reason = reason_for_own_code(self.config, given, [layer.dropped for layer in layers])
        reason = reason or reason_of_hooks(self, layers)
        reason = reason or family.reason(self, given)
        if torch.compiler.is_exporting():  # without the values that tell padding
            reason = reason or "recorder must be torch.compile, got torch.export"
        reason = reason or self._of_mask(mask, tokens, family.past(self, given))
        if reason is not None:
            layers[0].alibi_paths.by_hook(self, reason)
            family.begin_own(self, given)
            return args, kwargs
        layers[0].alibi_paths.by_library()
        text = None if mask is None else mask != 0
        if _turn.call is not None and not torch.compiler.is_compiling():
            _turn.call.change = functools.partial(family.begin, self, given, text)
        changed = family.begin(self, given, text)
        return with_arguments(self.alibi_names, args, kwargs, changed)

    @staticmethod
    def _of_mask(mask: Any, tokens: Tensor, past: int) -> str | None:
        if mask is None:
            return None
        if not isinstance(mask, Tensor):
            return f"attention_mask must be a tensor, got {type(mask).__name__}"
        expected = tokens.shape[0], tokens.shape[1] + past
        if mask.shape != expected:
            return f"attention_mask must be of shape {expected} (batch, tokens so far), got {tuple(mask.shape)}"
        if not torch.compiler.is_compiling() and has_no_values(mask):
            return "attention_mask must have values of this call alone, got one on the meta device or mapped by vmap"
        if mask.dtype != torch.bool and not bool(((mask == 0) | (mask == 1)).all()):
            return "attention_mask must be 1 for text and 0 for padding, got other numbers"
        if not bool((mask != 0).any(dim=1).all()):
            return "attention_mask must leave some text in every row, got a row of padding"
        return None


@dataclass
class _Call:
    """A call of a base model.

    Attributes:
        base: The model.
        change: Changes what builds the model's bias, again where a call within this one undid it.
        is_pending: Whether the call has not yet come to its first layer.
    """

    base: Any
    change: Callable[[], Any] = dict
    is_pending: bool = True


class _Turn(threading.local):
    """The call of this thread that may change what builds a model's bias: until it has come to its first layer.

    Calls of other threads wait, or they would get its bias. A call within it, by a hook on the embeddings, goes first.
    """

    lock: ClassVar = threading.RLock()
    call: _Call | None = None

    def begin(self, base: Any) -> _Call | None:
        """Begin a call of a base model; return the call that it is within."""
        if torch.compiler.is_compiling():  # which loses what is a thread's own, where it breaks a graph
            return None
        self.lock.acquire()
        outer, self.call = self.call, _Call(base)
        if outer is not None and outer.is_pending:
            outer.base.alibi_family.end(outer.base)
        return outer

    def reach(self) -> None:
        """Note that the call has come to a layer."""
        call = None if torch.compiler.is_compiling() else self.call
        if call is not None and call.is_pending:
            call.is_pending = False
            call.base.alibi_family.end(call.base)
            self.lock.release()

    def end(self, base: Any, outer: _Call | None) -> None:
        """End a call of a base model, and go on with the call that it was within."""
        if torch.compiler.is_compiling():
            base.alibi_family.end(base)
            return
        self.reach()
        self.call = outer
        if outer is not None and outer.is_pending:
            outer.change()


_turn = _Turn()


def constant(value: Any, *_: Any, **__: Any) -> Any:
    """Return the value, whatever else is given: in place of a function that would build a bias."""
    return value


# --- Marks, which the models' own code carries to their attention ----------------------------------------------------

# The length of a mark's second axis, which in a bias is 1 or the number of heads: no model has so many. A mark repeats
# one number, or a row.
PLAIN = 211  # every row is text
PADDED = 223  # text lies in one piece in every row
HOLES = 227  # padding lies anywhere


def marked(mask: Tensor | None, length: int, device: torch.device) -> Tensor:
    """Return what stands for the bias of a call that the library computes, ``[1, mark, 1, length]`` zeros."""
    mark = PLAIN
    if mask is not None and not bool(mask.all()):
        begins = mask[:, 0].long() + (mask[:, 1:] & ~mask[:, :-1]).sum(dim=1)
        mark = HOLES if bool((begins > 1).any()) else PADDED
    return torch.zeros(1, device=device).expand(1, mark, 1, length)


def is_marked(bias: Any) -> bool:
    """Whether the library computes the call with such a bias."""
    if not isinstance(bias, Tensor) or bias.ndim != 4 or bias.shape[2] != 1:
        return False
    return any(bias.shape[1] == mark for mark in (PLAIN, PADDED, HOLES))
