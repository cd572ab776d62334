"""The attention layers of all backends behind one face."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.frameworks import FRAMEWORK


def make_module(name: str, kind: str, *arguments: Any, **options: Any) -> Any:
    """Return a module of a backend, made from the random numbers that seed 0 gives."""
    package = importlib.import_module(f"alibi_{name}")
    if name == "jax":
        options["rngs"] = importlib.import_module("flax.nnx").Rngs(0)
    seed(name, 0)
    return getattr(package, kind)(*arguments, **options)


def seed(name: str, number: int) -> None:
    """Seed a framework's global random numbers; JAX has none."""
    if name == "torch":
        importlib.import_module("torch").manual_seed(number)
    elif name == "mlx":
        importlib.import_module("mlx.core").random.seed(number)


def make_layer(name: str, **arguments: Any) -> Any:
    """Return an ``AlibiAttention`` of the framework called ``name``, with weights of its own making."""
    return make_module(name, "AlibiAttention", **arguments)


def save(name: str, layer: Any, path: Path) -> None:
    """Save a layer's weights as its users would."""
    if name == "mlx":
        layer.save_weights(str(path))
    else:
        importlib.import_module(f"alibi_{name}").save_weights(layer, path)


def load(name: str, layer: Any, path: Path) -> None:
    """Load a layer's weights as its users would."""
    if name == "mlx":
        layer.load_weights(str(path))
    else:
        importlib.import_module(f"alibi_{name}").load_weights(layer, path)


def cast(name: str, layer: Any, dtype: str) -> None:
    """Cast the weights of a layer within a model as its framework does."""
    if name == "torch":
        import torch

        torch.nn.Sequential(layer).to(getattr(torch, dtype))
    elif name == "jax":
        import jax
        from flax import nnx

        nnx.update(layer, jax.tree.map(lambda x: x.astype(dtype), nnx.state(layer)))
    else:
        import mlx.core as mx
        from mlx import nn

        nn.Sequential(layer).set_dtype(getattr(mx, dtype))


def apply(name: str, layer: Any, x: np.ndarray, **arguments: np.ndarray) -> np.ndarray:
    """Return a layer's output as float64 NumPy."""
    framework = FRAMEWORK[name]
    placed = {key: framework.array(value) for key, value in arguments.items()}
    return framework.numpy(layer(framework.array(x), **placed))


def decode(
    name: str, layer: Any, x: np.ndarray, cache: Any, steps: list[int], **arguments: Any
) -> tuple[np.ndarray, Any]:
    """Return a layer's output for ``x``, so many tokens at a time, and the cache in the end."""
    framework, outputs = FRAMEWORK[name], []
    for part in np.split(x, np.cumsum(steps)[:-1], axis=1):
        output = layer(framework.array(part), cache=cache, **arguments)
        output, cache = output if name == "jax" else (output, cache)
        outputs.append(framework.numpy(output))
    return np.concatenate(outputs, axis=1), cache
