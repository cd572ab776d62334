"""Weights on disk, in the safetensors layout that the layers and models of all backends share."""

from __future__ import annotations

import os

from torch import nn

from alibi_core.backend.models import check_weights, weights_metadata


def save_weights(module: nn.Module, path: str | os.PathLike[str]) -> None:
    """Save a layer's or model's state dict as safetensors, for any backend.

    The file also says each attention layer's heads, direction, window and slopes.

    Args:
        module: A layer, a model, or a module that has such layers.
        path: Path of the file; an existing file is replaced.

    Example:
        >>> import tempfile
        >>> from alibi_torch import AlibiAttention
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_weights(AlibiAttention(8, 2), f"{folder}/layer.safetensors")
        ...     load_weights(AlibiAttention(8, 2), f"{folder}/layer.safetensors")
    """
    from safetensors.torch import save_file

    save_file(module.state_dict(), path, weights_metadata(module.named_modules()))


def load_weights(module: nn.Module, path: str | os.PathLike[str]) -> None:
    """Set a module's weights, in place, from a safetensors file of any backend.

    Args:
        module: A layer or model with the sizes and options of the saved one.
        path: Path of the file.

    Raises:
        FileNotFoundError: If the file does not exist.
        ValueError: If the file is damaged, or an attention layer differs from the saved one in heads, direction, window
            or slopes.
        RuntimeError: If weights are missing, unknown, or have a wrong shape.

    Example:
        >>> import tempfile
        >>> from alibi_torch import AlibiAttention
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_weights(AlibiAttention(8, 2, is_causal=False), f"{folder}/layer.safetensors")
        ...     load_weights(AlibiAttention(8, 2), f"{folder}/layer.safetensors")
        Traceback (most recent call last):
        ValueError: layer must have is_causal=False, as where its weights were saved, got is_causal=True
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(os.fspath(path), framework="pt") as file:
            metadata = file.metadata()
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it is no dict
    except SafetensorError as error:
        raise ValueError(f"{os.fspath(path)} must be a safetensors file, got {error}") from None
    check_weights(metadata, module.named_modules())
    module.load_state_dict(weights)
