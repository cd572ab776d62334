"""Loading of checkpoints with ALiBi into :class:`AlibiLanguageModel` or :class:`AlibiEncoder`."""

from __future__ import annotations

import os

import mlx.core as mx

from alibi_core.backend import checks
from alibi_core.backend.checks import namespace_of
from alibi_core.backend.models import Checkpoint
from alibi_mlx.nn._encoder import AlibiEncoder
from alibi_mlx.nn._language_model import AlibiLanguageModel


def load_checkpoint(
    directory: str | os.PathLike[str], *, dtype: mx.Dtype | None = None
) -> AlibiLanguageModel | AlibiEncoder:
    """Return a model with the weights of a checkpoint: a language model for decoders, an encoder for encoders.

    ``docs/checkpoints.md`` lists the supported families, and how exactly they are reproduced. The model is in
    evaluation mode and has no dropout. Nothing is downloaded, and nothing in the files is executed.

    Args:
        directory: The directory with ``config.json`` and ``model.safetensors`` (or its shards and
            ``model.safetensors.index.json``), as ``save_pretrained`` writes them.
        dtype: Dtype of the parameters. Default: the dtype of the stored embeddings.

    Raises:
        FileNotFoundError: If a file is missing.
        TypeError: If an argument, or an entry of ``config.json``, is of the wrong kind.
        ValueError: If the checkpoint belongs to an unsupported model or one without ALiBi, is damaged, or lacks tensors
            that its config describes.

    Example:
        >>> model = load_checkpoint("models/bloom-560m")  # doctest: +SKIP
        >>> model.generate(mx.array([[5, 7, 11]]), max_new_tokens=20)  # doctest: +SKIP
    """
    checkpoint = Checkpoint.open(directory)
    dtype = checks.floating_dtype(namespace_of(xp=mx), "dtype", checkpoint.dtype_name if dtype is None else dtype)
    kind = AlibiLanguageModel if checkpoint.config.is_causal else AlibiEncoder
    model = kind(checkpoint.config, checkpoint.vocab_size)
    model.load_weights([(name, mx.array(array, dtype)) for name, array in checkpoint.parameters()])
    model.eval()
    return model
