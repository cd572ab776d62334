"""Weights on disk, in the safetensors layout that the layers and models of all backends share."""

from __future__ import annotations

from typing import Any, Self

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten

from alibi_core.backend.models import check_weights, weights_metadata


class SavesLayers(nn.Module):
    """A module whose safetensors files say what its attention layers compute."""

    def save_weights(self, file: str) -> None:
        """Save the weights, as any module of MLX; safetensors also say heads, direction, window and slopes."""
        if not file.endswith(".safetensors"):
            return super().save_weights(file)
        return mx.save_safetensors(file, dict(tree_flatten(self.parameters())), weights_metadata(self.named_modules()))

    def load_weights(self, file_or_weights: Any, strict: bool = True) -> Self:
        """Load weights, as any module of MLX; refuse those of attention layers that compute something else.

        Raises:
            ValueError: With ``strict``, also if an attention layer differs from the one that a safetensors file was
                saved from, in heads, direction, window or slopes.
        """
        if isinstance(file_or_weights, str) and file_or_weights.endswith(".safetensors"):
            weights, metadata = mx.load(file_or_weights, return_metadata=True)
            if strict:
                check_weights(metadata, self.named_modules())
            file_or_weights = list(weights.items())
        return super().load_weights(file_or_weights, strict)
