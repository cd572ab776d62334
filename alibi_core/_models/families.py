"""The description of a family of models (bias, shape, names of tensors), and checked access to its configs."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from alibi_core._arrays import checks
from alibi_core._models.config import AlibiConfig

BY_DISTANCE = "slopes times distances from the query, in the model's dtype"

_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
}


@dataclass(frozen=True)
class Layout:
    """The names of modules in a checkpoint, and the modules of this library that each one holds."""

    embedding: str  # the matrix of embeddings
    blocks: str  # the list of blocks
    # For each module of a block, the parts of its weight, by rows from the top: attention_norm, q, k, v, out,
    # feed_forward_norm, gate, up or down; or the name of another norm of this library.
    block: dict[str, str]
    norm: str | None  # the norm after the last block
    embedding_norm: str | None = None
    token_type_embedding: str | None = None
    ignored: tuple[str, ...] = ()  # regular expressions of tensors that are not needed
    stored_slopes: str | None = None  # a tensor of the slopes, [num_heads, 1], that a checkpoint may have
    # Whether a fused module of queries, keys and values is interleaved: for each key/value head, its queries, its key,
    # its value. Otherwise all queries come first, then all keys, then all values.
    groups_qkv: bool = False
    is_transposed: bool = False  # whether the weights of blocks are [in, out], as GPT-2's are
    head_of_unit_rows: bool = False  # whether the rows of the head are divided by their norms

    def without_prefix(self) -> Layout:
        """Return the layout of a model that was saved without its head: names lack their first component."""
        # For example "transformer." or "bert.".
        prefix = self.embedding.partition(".")[0] + "."
        names = ("embedding", "blocks", "norm", "embedding_norm", "token_type_embedding", "stored_slopes")
        given = {name: getattr(self, name) for name in names}
        return replace(self, **{name: value and value.removeprefix(prefix) for name, value in given.items()})

    def as_in(self, tensors: Collection[str]) -> Layout:
        """Return the layout with or without its prefix, choosing the one with more names among ``tensors``."""
        return max((self, self.without_prefix()), key=lambda layout: layout.count_known(tensors))

    def count_known(self, tensors: Collection[str]) -> int:
        """Return the number of modules, of embeddings and the first block, that have a weight among ``tensors``."""
        modules = (self.embedding, *(f"{self.blocks}.0.{name}" for name in self.block))
        return sum(f"{module}.weight" in tensors for module in modules)


@dataclass(frozen=True)
class Family:
    """A model as its ``config.json`` describes it."""

    name: str  # the model_type, or the entry of an encoder in the catalogue
    bias: str  # how the family's own code forms its bias, in words
    config: AlibiConfig
    vocab_size: int
    layout: Layout


class Settings:
    """Entries of a ``config.json``, each with a check; an entry may have several names in different releases."""

    def __init__(self, values: dict[str, Any], place: str) -> None:
        self.values, self.place = values, place

    def get(self, *names: str, default: Any) -> Any:
        """Return the entry of the first name that exists and is not null, else ``default``."""
        found = self._first(names)
        return default if found is None else self.values[found]

    def called(self, *names: str) -> str:
        """Return the name, for messages, of the entry that :meth:`get` returns."""
        return f"{self._first(names) or names[0]} in {self.place}"

    def _first(self, names: tuple[str, ...]) -> str | None:
        return next((name for name in names if self.values.get(name) is not None), None)

    def size(self, *names: str, default: int | None = None) -> int:
        """Return a positive integer; the entry must exist unless ``default`` is given."""
        value = self.get(*names, default=default)
        if value is None:
            raise ValueError(f"{self.place} must say {names[0]}, got no such entry")
        return checks.positive_int(self.called(*names), value)

    def heads(self, width: int, *names: str) -> int:
        """Return the number of heads, which must divide the width.

        The shapes of tensors do not reveal a wrong number of heads, so all ``names`` that exist must agree.
        """
        num_heads = self.size(*names)
        for name in names[1:]:
            if self.get(name, default=num_heads) != num_heads:
                raise self.refuse(name, f"{names[0]}, {num_heads}, or absent", "one of the two is wrong")
        if width % num_heads:
            raise ValueError(f"{self.called(*names)} must divide the model's width, {width}, got {num_heads}")
        return num_heads

    def switch(self, *names: str, default: bool) -> bool:
        return checks.boolean(self.called(*names), self.get(*names, default=default))

    def number(self, *names: str, default: float | None) -> Any:
        """Return a positive number, or ``default`` if the entry is absent."""
        value = self.get(*names, default=None)
        return default if value is None else checks.positive_number(self.called(*names), value)

    def choice(self, name: str, known: Collection[str], *, default: str) -> str:
        """Return an entry that must be one of the words in ``known``."""
        value = self.get(name, default=default)
        if not isinstance(value, str) or value not in known:
            raise self.refuse(name, f"one of {', '.join(map(repr, known))}", "no model here has another")
        return value

    def activation(self, name: str, *, default: str) -> str:
        """Return an activation by its name in ``AlibiConfig``."""
        return _ACTIVATIONS[self.choice(name, _ACTIVATIONS, default=default)]

    def part(self, name: str) -> Settings:
        """Return the entries of a nested object; empty if it is absent."""
        values = self.get(name, default={})
        place = f"{name} in {self.place}"
        if not isinstance(values, dict):
            raise TypeError(f"{place} must be an object, got {type(values).__name__}")
        return Settings(values, place)

    def refuse(self, name: str, rule: str, advice: str) -> ValueError:
        return ValueError(f"{name} in {self.place} must be {rule}, got {self.values.get(name)!r}; {advice}")

    def refuse_switches(self, *names: str, advice: str) -> None:
        """Raise an error if any of the switches is on."""
        for name in names:
            if self.switch(name, default=False):
                raise self.refuse(name, "false", advice)

    def common(self, width: int, hidden: int | None = None) -> dict[str, Any]:
        """Return the fields of ``AlibiConfig`` whose entries have the same names in most families.

        ``width`` is the width of the model, ``hidden`` the width of the feed-forward layers (default ``4 * width``).
        """
        return {
            "embed_dim": width,
            "max_len": self.size("seq_length", "max_position_embeddings", default=2048),
            "dropout": 0.0,
            "feed_forward_dim": 4 * width if hidden is None else hidden,
            "norm_epsilon": self.number("layer_norm_epsilon", default=1e-5),
            "embedding_scale": 1.0,
            "tied_head": self.switch("tie_word_embeddings", default=True),
        }
