"""The transformers and language models of all backends behind one face: NumPy in, NumPy out."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from tests.support.frameworks import FRAMEWORK
from tests.support.layers import load, make_module, save


@dataclass
class Model:
    """A model of one backend."""

    name: str
    inner: Any

    def __call__(self, x: Any, caches: Any = None, **arguments: Any) -> np.ndarray:
        """Return the model's result for vectors or tokens, and append them to the caches."""
        array = FRAMEWORK[self.name].array
        given = {name: array(value) for name, value in arguments.items()}
        result = self.inner(array(x), **given | ({} if caches is None else {"caches": caches}))
        if self.name == "jax" and caches is not None:
            result, caches[:] = result
        return FRAMEWORK[self.name].numpy(result)

    def generate(self, tokens: Any, number: int, seed: int | None = None, **options: Any) -> np.ndarray:
        """Return the text that the model continues, drawn from a seed where one is given."""
        if seed is not None:
            options |= random_numbers(self.name, seed)
        result = self.inner.generate(FRAMEWORK[self.name].array(tokens), number, **options)
        assert str(result.dtype).endswith("int32")
        return np.asarray(result)

    @property
    def weights(self) -> dict[str, np.ndarray]:
        """All parameters, by the names and in the layout of files."""
        with TemporaryDirectory() as folder:
            save(self.name, self.inner, Path(folder) / "weights.safetensors")
            return load_file(Path(folder) / "weights.safetensors")

    @weights.setter
    def weights(self, values: dict[str, np.ndarray]) -> None:
        values = {name: np.ascontiguousarray(x) for name, x in (self.weights | values).items()}
        with TemporaryDirectory() as folder:
            save_file(values, Path(folder) / "weights.safetensors")
            load(self.name, self.inner, Path(folder) / "weights.safetensors")

    def gradients(self, tokens: np.ndarray) -> dict[str, np.ndarray]:
        """Return the gradient of each parameter, of the mean log-probability of the tokens that come next."""
        numpy, given = FRAMEWORK[self.name].numpy, FRAMEWORK[self.name].array(tokens)
        if self.name == "torch":
            import torch

            self.inner(given)[:, :-1].log_softmax(-1).gather(-1, given[:, 1:, None].long()).mean().backward()
            parameters = self.inner.named_parameters()
            return {name: numpy(torch.zeros(()) if x.grad is None else x.grad) for name, x in parameters}
        if self.name == "mlx":
            from mlx import nn
            from mlx.utils import tree_flatten

            def loss(model: Any) -> Any:
                return nn.losses.cross_entropy(model(given[:, :-1]), given[:, 1:], reduction="mean")

            return {name: numpy(x) for name, x in tree_flatten(nn.value_and_grad(self.inner, loss)(self.inner)[1])}
        import jax
        from flax import nnx

        @nnx.jit
        @nnx.grad
        def gradient(model: Any) -> Any:
            return jax.numpy.take_along_axis(jax.nn.log_softmax(model(given)[:, :-1]), given[:, 1:, None], -1).mean()

        return {".".join(map(str, path)): numpy(x[...]) for path, x in nnx.to_flat_state(gradient(self.inner))}


def make_model(name: str, kind: str, *arguments: Any, **options: Any) -> Model:
    """Return an ``AlibiTransformer`` or ``AlibiLanguageModel`` of a backend."""
    return Model(name, make_module(name, kind, *arguments, **options))


def lively_model(name: str, *arguments: Any) -> Model:
    """Return a language model that does not just repeat its last token, as those do whose blocks say little."""
    model, rng = make_model(name, "AlibiLanguageModel", *arguments), np.random.default_rng(5)
    model.weights = {
        weight: 4 * (rng.uniform(-1, 1, x.shape) * x.shape[1] ** -0.5).astype(np.float32)
        for weight, x in model.weights.items()
        if x.ndim == 2 and "blocks" in weight
    }
    return model


def random_numbers(name: str, seed: int) -> dict[str, Any]:
    """Return the argument that says where random numbers come from."""
    if name == "torch":
        return {"generator": importlib.import_module("torch").Generator().manual_seed(seed)}
    module = importlib.import_module("jax" if name == "jax" else "mlx.core")
    return {"key": module.random.key(seed)}
