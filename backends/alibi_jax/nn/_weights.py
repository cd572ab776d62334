"""Weights on disk, in the safetensors layout that the layers and models of all backends share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import SafetensorError, safe_open
from safetensors.flax import load_file
from safetensors.numpy import save_file

from alibi_core.backend.models import check_weights, weights_metadata


def save_weights(module: nnx.Module, path: str | os.PathLike[str]) -> None:
    """Save a layer's or model's parameters as safetensors, for :func:`load_weights` of any backend.

    Weights are ``[out, in]`` in the file: the transpose of Flax's kernels. Its metadata say each attention layer's
    heads, direction, window and slopes.

    Args:
        module: The layer or model.
        path: Path of the file; an existing file is replaced.

    Raises:
        TypeError: If ``module`` is no Flax NNX module.
        ValueError: If its parameters are shapes without values, as ``nnx.eval_shape`` returns them.

    Example:
        >>> import tempfile
        >>> from alibi_jax import AlibiAttention
        >>> layer, other = (AlibiAttention(8, 2, rngs=nnx.Rngs(seed)) for seed in (0, 1))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_weights(layer, f"{folder}/layer.safetensors")
        ...     load_weights(other, f"{folder}/layer.safetensors")
        >>> bool((other.q_proj.kernel[...] == layer.q_proj.kernel[...]).all())
        True
    """
    parameters = named_parameters(module)
    if any(_is_shape_alone(parameter) for parameter, _ in parameters.values()):
        raise ValueError("module must have numbers to save, got shapes of nnx.eval_shape; load_weights sets them")
    arrays = {
        name: np.ascontiguousarray(_transposed(np.asarray(parameter[...]), transposed))
        for name, (parameter, transposed) in parameters.items()
    }
    save_file(arrays, path, weights_metadata(_named_modules(module)))


def load_weights(module: nnx.Module, path: str | os.PathLike[str]) -> None:
    """Set a module's parameters, in place, from a file written by :func:`save_weights` of any backend.

    Each parameter keeps its dtype; stored numbers are cast to it. All parameters are validated before any is set. A
    module from ``nnx.eval_shape``, whose parameters are shapes without values, gets arrays on the default device.

    Args:
        module: A layer or model with the sizes and options of the saved one.
        path: Path of the file.

    Raises:
        TypeError: If ``module`` is no Flax NNX module.
        FileNotFoundError: If the file does not exist.
        ValueError: If the file is damaged, parameters are missing, unknown, not floating, or have a wrong shape, or an
            attention layer differs from the saved one in heads, direction, window or slopes.

    Example:
        >>> import tempfile
        >>> from alibi_jax import AlibiAttention
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_weights(AlibiAttention(4, 2, rngs=nnx.Rngs(0)), f"{folder}/layer.safetensors")
        ...     load_weights(AlibiAttention(4, 2, rngs=nnx.Rngs(1)), f"{folder}/layer.safetensors")
    """
    parameters = named_parameters(module)
    try:
        arrays = load_file(path)
    except (SafetensorError, AttributeError) as error:  # AttributeError: a dtype that NumPy lacks
        raise ValueError(f"{os.fspath(path)} must be a safetensors file of floating numbers, got {error}") from None
    with safe_open(os.fspath(path), framework="numpy") as file:
        check_weights(file.metadata(), _named_modules(module))
    if arrays.keys() != parameters.keys():
        missing, unknown = sorted(parameters.keys() - arrays.keys()), sorted(arrays.keys() - parameters.keys())
        raise ValueError(
            f"{os.fspath(path)} must hold the module's parameters, got {missing or 'none'} missing and "
            f"{unknown or 'none'} unknown; give the module the bias, learnable_slopes, forget_gate and sinks it was "
            "saved with, and save quantized weights in floating point"
        )
    for name, (parameter, transposed) in parameters.items():
        expected = parameter.shape[::-1] if transposed else parameter.shape
        if arrays[name].shape != expected:
            raise ValueError(f"{name} in {os.fspath(path)} must have shape {expected}, got {arrays[name].shape}")
        if not jnp.issubdtype(arrays[name].dtype, jnp.floating):
            raise ValueError(f"{name} in {os.fspath(path)} must be of floating numbers, got {arrays[name].dtype}")
    for name, (parameter, transposed) in parameters.items():
        array = _transposed(arrays[name], transposed).astype(parameter.dtype)
        if _is_shape_alone(parameter):
            parameter.set_value(array)
        else:
            parameter[...] = array  # keeps the parameter's sharding


def named_parameters(module: nnx.Module) -> dict[str, tuple[nnx.Param, bool]]:
    """Return a module's parameters by their names in files, and whether each is ``[in, out]`` (transposed in files)."""
    if not isinstance(module, nnx.Module):
        raise TypeError(f"module must be a layer or model of Flax NNX, got {type(module).__name__}")
    named = {}
    for path, parameter in nnx.to_flat_state(nnx.state(module, nnx.Param)):
        *modules, leaf = map(str, path)
        name = "weight" if leaf in ("kernel", "scale", "embedding") else leaf
        named[".".join([*modules, name])] = parameter, leaf == "kernel"
    return named


def _named_modules(module: nnx.Module) -> Iterator[tuple[str, nnx.Module]]:
    return ((".".join(map(str, path)), inner) for path, inner in nnx.iter_modules(module))


def _is_shape_alone(parameter: nnx.Param) -> bool:
    return isinstance(jax.tree.leaves(parameter)[0], jax.ShapeDtypeStruct)


def _transposed(array: Any, transposed: bool) -> Any:
    """Transpose between ``[in, out]`` (Flax) and ``[out, in]`` (files), if ``transposed``."""
    return array.T if transposed else array
