"""Frameworks and backends behind one face: NumPy arrays in, NumPy arrays out.

A framework that is not installed shows up as a skipped test that names it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from alibi_core.capabilities import LIBRARIES as CAPABILITIES


@dataclass(frozen=True)
class Framework:
    """An array namespace and how values get in and out of it."""

    name: str
    module: str

    def __str__(self) -> str:
        return self.name

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The floating dtypes that it has by default."""
        return CAPABILITIES[self.module].dtypes

    @property
    def xp(self) -> Any:
        return importlib.import_module(self.module)

    def array(self, values: Any, dtype: str | None = None) -> Any:
        """Return ``values`` as an array of this framework, floating ones rounded to ``dtype``."""
        values = np.asarray(values)
        if values.dtype == np.float64 and dtype != "float64":
            values = values.astype(np.float32)
        array = (self.xp.from_array if self.name == "dask" else self.xp.asarray)(values)
        return array if dtype is None else self.cast(array, dtype)

    def placed(self, value: Any) -> Any:
        """Return NumPy arrays as this framework's; of a tuple or a dictionary, each; what else there is, as it is."""
        if isinstance(value, tuple):
            return tuple(map(self.placed, value))
        if isinstance(value, dict):
            return {name: self.placed(x) for name, x in value.items()}
        return self.array(value) if isinstance(value, np.ndarray) else value

    def cast(self, array: Any, dtype: str) -> Any:
        target = getattr(self.xp, dtype)
        if self.name == "torch":
            return array.to(target)
        return self.xp.astype(array, target) if self.name == "array_api_strict" else array.astype(target)

    def numpy(self, array: Any) -> np.ndarray:
        """Return an array's values as NumPy float64 (exact), or as they are if they are no floats."""
        if self.name == "torch":
            array = array.detach()
        if self.name == "ndonnx":
            array = array.unwrap_numpy()
        if "bfloat16" in str(array.dtype):
            array = self.cast(array, "float32")
        result = np.asarray(array)
        return result.astype(np.float64) if result.dtype.kind == "f" else result

    def numpy32(self, array: Any) -> np.ndarray:
        """Return an array's values as NumPy has them: float32, for bfloat16 too."""
        return self.numpy(array).astype(np.float64 if "float64" in str(array.dtype) else np.float32)

    def bits(self, array: Any) -> np.ndarray:
        """Return a float32 array's bits."""
        assert "float32" in str(array.dtype), array.dtype
        result = np.asarray(array.detach() if self.name == "torch" else array)
        return np.ascontiguousarray(result).view(np.int32)

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function`` through the framework's compiler (as it is, where there is none)."""
        if self.name == "torch":
            import torch

            torch._dynamo.reset()  # or it counts the many functions compiled here as one compiled too often
            # Not by Inductor, which takes a minute for each; a few tests in tests/torch compile as users do.
            return torch.compile(function, fullgraph=True, dynamic=False, backend="aot_eager")
        if self.name == "jax":
            import jax

            return jax.jit(function)
        return self.xp.compile(function) if self.name == "mlx" else function

    def mapped(self, function: Callable[..., Any], axes: Any = 0) -> Callable[..., Any]:
        """Return ``function`` through the framework's ``vmap``, over these axes of its arguments."""
        if self.name == "torch":
            return importlib.import_module("torch").func.vmap(function, axes)
        return (importlib.import_module("jax") if self.name == "jax" else self.xp).vmap(function, axes)


@dataclass(frozen=True)
class OnDevice(Framework):
    """PyTorch, with arrays on a device."""

    device: str

    def array(self, values: Any, dtype: str | None = None) -> Any:
        return super().array(values, dtype).to(self.device)

    def numpy(self, array: Any) -> np.ndarray:
        return super().numpy(array.cpu())


NUMPY = Framework("numpy", "numpy")
STRICT = Framework("array_api_strict", "array_api_strict")
TORCH = Framework("torch", "torch")
CUDA = OnDevice("torch", "torch", "cuda")
JAX = Framework("jax", "jax.numpy")
MLX = Framework("mlx", "mlx.core")
DASK = Framework("dask", "dask.array")
NDONNX = Framework("ndonnx", "ndonnx")


@dataclass(frozen=True)
class Backend:
    """One implementation of attention, in its framework. Tensors are heads-first here, whatever its layout is."""

    framework: Framework
    module: str
    implementation: str | None

    @property
    def name(self) -> str:
        return f"{self.module}[{self.implementation or self.framework.name}]"

    @property
    def is_length_first(self) -> bool:
        return self.module == "alibi_jax"

    def function(self, **arguments: Any) -> Callable[..., Any]:
        """Return the backend's ``attention`` as a function of query, key, value and slopes."""
        attention = importlib.import_module(self.module).attention
        if self.implementation is not None:
            arguments["implementation"] = self.implementation
        return functools.partial(attention, **arguments)

    def layout(self, tensor: Any) -> Any:
        """Swap between heads-first and the backend's layout."""
        return np.swapaxes(tensor, -3, -2) if self.is_length_first else tensor

    def attention(self, query: Any, key: Any, value: Any, slopes: Any = None, *, dtype: str, **arguments: Any) -> Any:
        """Return attention as float64 NumPy, having checked that dtype and type of the result are the query's."""
        *tensors, slopes = self.place(query, key, value, slopes, dtype=dtype)
        result = self.function(**self.framework.placed(arguments))(*tensors, slopes)
        assert result.dtype == tensors[0].dtype, f"{result.dtype} from {tensors[0].dtype}"
        assert type(result) is type(tensors[0]), f"{type(result)} from {type(tensors[0])}"
        return self.layout(self.framework.numpy(result))

    def explain(self, query: Any, key: Any, value: Any, slopes: Any = None, *, dtype: str, **arguments: Any) -> Any:
        """Return the backend's explanation of a call, and check that its horizons are NumPy's."""
        tensors = self.place(query, key, value, slopes, dtype=dtype)
        said = importlib.import_module(self.module).explain(*tensors, **self.framework.placed(arguments))
        assert type(said.horizons) is np.ndarray
        return said

    def place(self, query: Any, key: Any, value: Any, slopes: Any = None, *, dtype: str) -> list[Any]:
        """Return the tensors as the framework's arrays, in the backend's layout."""
        array = self.framework.array
        if slopes is not None and not isinstance(slopes, int):
            slopes = array(slopes, "float64" if dtype == "float64" else "float32")
        return [*(array(self.layout(x), dtype) for x in (query, key, value)), slopes]

    def gradients(
        self,
        tensors: dict[str, np.ndarray],
        cotangent: Any,
        *,
        dtype: str,
        wanted: Sequence[str] | None = None,
        **arguments: Any,
    ) -> dict[str, np.ndarray]:
        """Return the gradients of ``sum(attention * cotangent)`` by the tensors wanted, or all of them.

        They are named as the arguments they are, slopes among them.
        """
        names, array = tuple(tensors if wanted is None else wanted), self.framework.array
        of_slopes = "float64" if dtype == "float64" else "float32"
        placed = {
            name: array(x, of_slopes) if "slopes" in name else array(self.layout(x), dtype)
            for name, x in tensors.items()
        }
        weight = array(self.layout(cotangent), dtype)
        attention = self.function(**self.framework.placed(arguments))

        def function(*tensors: Any) -> Any:
            return attention(**placed | dict(zip(names, tensors, strict=True)))

        gradients = GRADIENTS[self.framework.name](function, [placed[name] for name in names], weight)
        values = dict(zip(names, map(self.framework.numpy, gradients), strict=True))
        return {name: x if "slopes" in name else self.layout(x) for name, x in values.items()}


def _torch_gradients(function: Callable[..., Any], tensors: list[Any], weight: Any) -> Any:
    import torch

    for tensor in tensors:
        tensor.requires_grad_()
    return torch.autograd.grad((function(*tensors) * weight).sum(), tensors)


def _jax_gradients(function: Callable[..., Any], tensors: list[Any], weight: Any) -> Any:
    import jax

    # Compiled once; operation by operation, JAX would compile each of some hundred.
    gradient = jax.grad(lambda *x: (function(*x) * weight).sum(), argnums=tuple(range(len(tensors))))
    return jax.jit(gradient)(*tensors)


def _mlx_gradients(function: Callable[..., Any], tensors: list[Any], weight: Any) -> Any:
    import mlx.core as mx

    found = mx.grad(lambda *x: (function(*x) * weight).sum(), argnums=list(range(len(tensors))))(*tensors)
    return found if len(tensors) > 1 else [found]  # MLX returns the only gradient by itself


GRADIENTS = {"torch": _torch_gradients, "jax": _jax_gradients, "mlx": _mlx_gradients}


def param(item: Any, name: str, framework: Framework, *marks: Any) -> Any:
    module = framework.module.partition(".")[0]
    skips = pytest.mark.skipif(importlib.util.find_spec(module) is None, reason=f"{module} is not installed")
    return pytest.param(item, id=name, marks=[skips, *marks])


def backend_param(framework: Framework, module: str, implementation: str | None, *marks: Any) -> Any:
    item = Backend(framework, module, implementation)
    return param(item, item.name, framework, *marks)


def slow_in_jax(items: list[Any]) -> list[Any]:
    """Return the items, for a test that is slow in JAX, which compiles for long."""
    marks = [[*x.marks, *([pytest.mark.slow] if "jax" in x.id else [])] for x in items]
    return [pytest.param(*x.values, id=x.id, marks=y) for x, y in zip(items, marks, strict=True)]


def few_in_jax(items: list[Any], values: Iterable[Any], *quick: Any) -> list[Any]:
    """Return each item with each value; in JAX, which compiles for each, all but the quick values are slow."""
    found = []
    for value in values:
        for item in items if value in quick else slow_in_jax(items):
            found.append(pytest.param(*item.values, value, id=f"{item.id}-{value}", marks=item.marks))
    return found


FRAMEWORKS = [param(f, f.name, f) for f in (NUMPY, STRICT, TORCH, JAX, MLX, DASK)]
OF_CAPABILITIES = [*FRAMEWORKS, param(NDONNX, NDONNX.name, NDONNX)]
COMPILERS = [param(f, f.name, f) for f in (TORCH, JAX, MLX)]
FRAMEWORK = {f.name: f for f in (TORCH, JAX, MLX)}
NAMES = [param(f.name, f.name, f) for f in FRAMEWORK.values()]
NAMES_SLOW_IN_JAX = slow_in_jax(NAMES)
BACKENDS = [
    *(backend_param(framework, "alibi_core", None) for framework in (NUMPY, STRICT, TORCH, MLX, DASK)),
    *(backend_param(TORCH, "alibi_torch", name) for name in ("tiled", "sdpa", "dense")),
    backend_param(JAX, "alibi_jax", "tiled"),
    *(backend_param(MLX, "alibi_mlx", name) for name in ("tiled", "dense")),
    # JAX compiles each call, and has little of its own in these.
    backend_param(JAX, "alibi_jax", "dense", pytest.mark.slow),
    backend_param(JAX, "alibi_core", None, pytest.mark.slow),
]
LAYER_BACKENDS = [x for x in BACKENDS if x.values[0].module != "alibi_core"]
LIBRARIES = [param(Backend(f, f"alibi_{f.name}", None), f.name, f) for f in (TORCH, JAX, MLX)]
DIFFERENTIABLE = [x for x in BACKENDS if x.values[0].framework.name in GRADIENTS]
