"""Weights on disk, in the safetensors layout that the layers of all backends share."""

from __future__ import annotations

import os

import numpy as np
from flax import nnx
from safetensors.flax import load_file
from safetensors.numpy import save_file

from alibi_jax.nn._layer import AlibiAttention


def save_weights(layer: AlibiAttention, path: str | os.PathLike[str]) -> None:
    """Save a layer's parameters as safetensors, for :func:`load_weights` of any backend.

    Weights are ``[out, in]`` in the file: the transpose of Flax's kernels. Fixed slopes are not saved.

    Args:
        layer: The layer.
        path: Where to write; a file that is there is replaced.

    Example:
        >>> import tempfile
        >>> layer, other = (AlibiAttention(8, 2, rngs=nnx.Rngs(seed)) for seed in (0, 1))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_weights(layer, f"{folder}/layer.safetensors")
        ...     load_weights(other, f"{folder}/layer.safetensors")
        >>> bool((other.q_proj.kernel[...] == layer.q_proj.kernel[...]).all())
        True
    """
    arrays = {name: np.asarray(parameter[...]) for name, parameter in _parameters(layer).items()}
    save_file({name: np.ascontiguousarray(_turned(name, array)) for name, array in arrays.items()}, path)


def load_weights(layer: AlibiAttention, path: str | os.PathLike[str]) -> None:
    """Set a layer's parameters, in place, from a file of :func:`save_weights` of any backend.

    Each parameter keeps its dtype: numbers of another one are rounded to it. Nothing is set unless all fits.

    Args:
        layer: The layer, of the sizes and options that the file was written for.
        path: The file.

    Raises:
        FileNotFoundError: If there is no file.
        ValueError: If parameters are missing, unknown, or of another shape.
    """
    parameters, arrays = _parameters(layer), load_file(path)
    if arrays.keys() != parameters.keys():
        missing, unknown = sorted(parameters.keys() - arrays.keys()), sorted(arrays.keys() - parameters.keys())
        raise ValueError(
            f"{os.fspath(path)} must hold the layer's parameters, got {missing or 'none'} missing and "
            f"{unknown or 'none'} unknown; give the layer the bias and learnable_slopes it was saved with"
        )
    arrays = {name: _turned(name, array) for name, array in arrays.items()}
    for name, parameter in parameters.items():
        if arrays[name].shape != parameter[...].shape:
            expected, got = (_turned(name, array).shape for array in (parameter[...], arrays[name]))
            raise ValueError(f"{name} in {os.fspath(path)} must have shape {expected}, got {got}")
    for name, parameter in parameters.items():
        parameter[...] = arrays[name].astype(parameter[...].dtype)


def _parameters(layer: AlibiAttention) -> dict[str, nnx.Param]:
    """Return the layer's parameters by their names in a file."""
    named = {}
    for projection in ("q_proj", "k_proj", "v_proj", "out_proj"):
        linear = getattr(layer, projection)
        named[f"{projection}.weight"] = linear.kernel
        if linear.bias is not None:
            named[f"{projection}.bias"] = linear.bias
    if layer.log_slopes is not None:
        named["log_slopes"] = layer.log_slopes
    return named


def _turned(name: str, array: np.ndarray) -> np.ndarray:
    """Exchange ``[in, out]``, as Flax has it, and ``[out, in]``, as files have it."""
    return array.T if name.endswith(".weight") else array
