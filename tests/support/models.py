"""The transformers and language models of all backends behind one face: NumPy in, NumPy out."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.support.frameworks import FRAMEWORK


@dataclass
class Model:
    """A model of one backend."""

    name: str
    inner: Any

    def __call__(self, x: Any, caches: Any = None, **arguments: Any) -> np.ndarray:
        """Return what the model makes of vectors or tokens; the caches given are longer then."""
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
        """All parameters, by PyTorch's names and in its layout."""
        numpy = FRAMEWORK[self.name].numpy32
        if self.name == "torch":
            return {name: numpy(x) for name, x in self.inner.state_dict(keep_vars=True).items() if x.requires_grad}
        if self.name == "mlx":
            from mlx.utils import tree_flatten

            return {name: numpy(x) for name, x in tree_flatten(self.inner.trainable_parameters())}
        return {name: numpy(x[...]).T if turned else numpy(x[...]) for name, (x, turned) in self._of_flax().items()}

    @weights.setter
    def weights(self, values: dict[str, np.ndarray]) -> None:
        array = FRAMEWORK[self.name].array
        if self.name == "torch":
            self.inner.load_state_dict({name: array(x) for name, x in values.items()}, strict=False)
        elif self.name == "mlx":
            self.inner.load_weights([(name, array(x)) for name, x in values.items()], strict=False)
        else:
            parameters = self._of_flax()
            for name, x in values.items():
                parameter, is_turned = parameters[name]
                parameter[...] = array(x.T if is_turned else x)

    def _of_flax(self) -> Any:
        return importlib.import_module("alibi_jax.nn._weights").named_parameters(self.inner)

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


def make_module(name: str, kind: str, *arguments: Any, **options: Any) -> Any:
    """Return a module of a backend, made from the random numbers that seed 0 gives."""
    package = importlib.import_module(f"alibi_{name}")
    if name == "jax":
        options["rngs"] = importlib.import_module("flax.nnx").Rngs(0)
    elif name == "torch":
        importlib.import_module("torch").manual_seed(0)
    elif name == "mlx":
        importlib.import_module("mlx.core").random.seed(0)
    return getattr(package, kind)(*arguments, **options)


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
