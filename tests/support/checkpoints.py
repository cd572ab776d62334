"""Checkpoints of small models: weights that follow from names, files as ``save_pretrained`` writes them, loading."""

from __future__ import annotations

import contextlib
import importlib
import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.frameworks import FRAMEWORK


def drawn(name: str, shape: tuple[int, ...], *seed: int) -> np.ndarray:
    """Return a weight, a bias or a norm's factor, each unlike any other."""
    noise = np.random.default_rng([*seed, zlib.crc32(name.encode())]).standard_normal(shape)
    if len(shape) == 2:
        return (noise * 1.5 * shape[1] ** -0.5).astype(np.float32)
    return (0.1 * noise if name.endswith("bias") else 1 + 0.3 * noise).astype(np.float32)


def write(directory: Path, config: dict[str, Any], tensors: dict[str, np.ndarray], shards: int = 1) -> Path:
    """Write a checkpoint, in several files where so many shards are asked for."""
    from safetensors.numpy import save_file

    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(tensors, directory / "model.safetensors")
        return directory
    places = {name: f"model-{index % shards}.safetensors" for index, name in enumerate(tensors)}
    for file in set(places.values()):
        save_file({name: x for name, x in tensors.items() if places[name] == file}, directory / file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return directory


def load(backend: str, directory: Any, **options: Any) -> Any:
    """Return the model of a checkpoint, if the backend is installed."""
    pytest.importorskip(f"alibi_{backend}")
    return importlib.import_module(f"alibi_{backend}").load_checkpoint(directory, **options)


def run(backend: str, model: Any, ids: np.ndarray, **arguments: np.ndarray) -> np.ndarray:
    """Return a model's result for tokens, as a NumPy array."""
    framework = FRAMEWORK[backend]
    with importlib.import_module("torch").no_grad() if backend == "torch" else contextlib.nullcontext():
        return framework.numpy(model(framework.array(ids), **framework.placed(arguments)))
