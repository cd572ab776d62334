"""What a ``config.json`` says, checked entry by entry."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from alibi_core._arrays import checks

_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
}


class Settings:
    """Entries of a ``config.json``, by any of the names they have had."""

    def __init__(self, values: dict[str, Any], place: str) -> None:
        self.values, self.place = values, place

    def get(self, *names: str, default: Any) -> Any:
        """Return the entry of the first name that is there and not null, else ``default``."""
        return next((self.values[name] for name in names if self.values.get(name) is not None), default)

    def size(self, *names: str, default: int | None = None) -> int:
        """Return a positive integer, which must be there unless there is a default."""
        value = self.get(*names, default=default)
        if value is None:
            raise ValueError(f"{self.place} must say {names[0]}, got no such entry")
        return checks.positive_int(f"{names[0]} in {self.place}", value)

    def heads(self, width: int, *names: str) -> int:
        """Return the number of heads, which must divide the width, before anything is computed of every head."""
        num_heads = self.size(*names)
        if width % num_heads:
            raise ValueError(f"{names[0]} in {self.place} must divide the model's width, {width}, got {num_heads}")
        return num_heads

    def switch(self, *names: str, default: bool) -> bool:
        return checks.boolean(f"{names[0]} in {self.place}", self.get(*names, default=default))

    def number(self, *names: str, default: float) -> float:
        return checks.positive_number(f"{names[0]} in {self.place}", self.get(*names, default=default))

    def choice(self, name: str, known: Collection[str], *, default: str) -> str:
        """Return an entry that must be one of a few words."""
        value = self.get(name, default=default)
        if not isinstance(value, str) or value not in known:
            raise self.refuse(name, f"one of {', '.join(map(repr, known))}", "no model here has another")
        return value

    def activation(self, name: str, *, default: str) -> str:
        """Return an activation as ``AlibiConfig`` calls it."""
        return _ACTIVATIONS[self.choice(name, _ACTIVATIONS, default=default)]

    def part(self, name: str) -> Settings:
        """Return the entries of an object among the entries, none where it is absent."""
        values = self.get(name, default={})
        place = f"{name} in {self.place}"
        if not isinstance(values, dict):
            raise TypeError(f"{place} must be an object, got {type(values).__name__}")
        return Settings(values, place)

    def refuse(self, name: str, rule: str, advice: str) -> ValueError:
        return ValueError(f"{name} in {self.place} must be {rule}, got {self.values.get(name)!r}; {advice}")

    def refuse_switches(self, *names: str, advice: str) -> None:
        """Refuse a model that has any of the switches on."""
        for name in names:
            if self.switch(name, default=False):
                raise self.refuse(name, "false", advice)

    def common(self, width: int, hidden: int | None = None) -> dict[str, Any]:
        """Return the fields of ``AlibiConfig`` that the configs of most families say in the same words.

        Args:
            width: Features a token.
            hidden: Width of the feed-forward layers. Default ``4 * width``.
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
