"""What files of weights say of attention layers: heads, direction, window and slopes, which no weight's shape shows.

The metadata of a safetensors file holds it under ``KEY``, as JSON, by the names of layers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from alibi_core._models.attention_layer import LayerShape
from alibi_core._safetensors import some

KEY = "alibi_core"


def layer_record(layer: Any) -> dict[str, Any]:
    """Return what a layer computes apart from its weights, in JSON's types; learnable slopes are weights: None."""
    shape, window_size = layer.shape, getattr(layer, "window_size", None)
    is_learned = getattr(layer, "log_slopes", None) is not None
    return {
        "num_heads": shape.num_heads,
        "is_causal": bool(layer.is_causal),
        "window_size": None if window_size is None else int(window_size),
        "distance": getattr(layer, "distance", "manhattan"),
        "law": getattr(layer, "law", "linear"),
        "slopes": None if is_learned else list(shape.slopes),
        "future_slopes": None if shape.future_slopes is None else list(shape.future_slopes),
    }


def weights_metadata(modules: Iterable[tuple[str, Any]]) -> dict[str, str]:
    """Return the metadata of a safetensors file for the attention layers among named modules.

    ``format`` is that of PyTorch, which other libraries ask for: all backends write its layout.
    """
    return {"format": "pt", KEY: json.dumps({name: layer_record(layer) for name, layer in _layers(modules)})}


def check_weights(metadata: Mapping[str, str] | None, modules: Iterable[tuple[str, Any]]) -> None:
    """Check that attention layers compute what a file's metadata says of them; files may say nothing."""
    saved = json.loads((metadata or {}).get(KEY, "{}"))
    for name, layer in _layers(modules):
        message = mismatch(name, saved.get(name, {}), layer)
        if message is not None:
            raise ValueError(message)


def mismatch(name: str, saved: Mapping[str, Any], layer: Any) -> str | None:
    """Return an error's message if a layer differs from the record of the layer whose weights it gets, else None."""
    own = layer_record(layer)
    differ = [field for field in own if saved.get(field, own[field]) != own[field]]
    if not differ:
        return None
    expected, got = (", ".join(f"{field}={_shown(x[field])}" for field in differ) for x in (saved, own))
    return f"{name or 'layer'} must have {expected}, as where its weights were saved, got {got}"


def _layers(modules: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
    return [(name, module) for name, module in modules if isinstance(getattr(module, "shape", None), LayerShape)]


def _shown(value: Any) -> str:
    return some(value) if isinstance(value, list) else repr(value)
