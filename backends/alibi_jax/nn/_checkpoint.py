"""Loading of checkpoints with ALiBi into :class:`AlibiLanguageModel` or :class:`AlibiEncoder`."""

from __future__ import annotations

import os
from typing import Any

import jax.numpy as jnp
from flax import nnx

from alibi_core.backend.models import Checkpoint
from alibi_jax._call import floating_dtype
from alibi_jax.nn._encoder import AlibiEncoder
from alibi_jax.nn._language_model import AlibiLanguageModel
from alibi_jax.nn._weights import named_parameters


def load_checkpoint(directory: str | os.PathLike[str], *, dtype: Any = None) -> AlibiLanguageModel | AlibiEncoder:
    """Return a model with the weights of a checkpoint: a language model for decoders, an encoder for encoders.

    ``docs/checkpoints.md`` lists the supported families, and how exactly they are reproduced. The model is in
    evaluation mode and has no dropout. Nothing is downloaded, and nothing in the files is executed.

    Args:
        directory: The directory with ``config.json`` and ``model.safetensors`` (or its shards and
            ``model.safetensors.index.json``), as ``save_pretrained`` writes them.
        dtype: Dtype of the parameters. Default: the dtype of the stored embeddings.

    Raises:
        FileNotFoundError: If a file is missing.
        TypeError: If an argument, or an entry of ``config.json``, is of the wrong kind; or the given or stored dtype is
            float64 and ``jax_enable_x64`` is off.
        ValueError: If the checkpoint belongs to an unsupported model or one without ALiBi, is damaged, or lacks tensors
            that its config describes.

    Example:
        >>> model = load_checkpoint("models/bloom-560m")  # doctest: +SKIP
        >>> model.generate(jnp.asarray([[5, 7, 11]]), max_new_tokens=20)  # doctest: +SKIP
    """
    checkpoint = Checkpoint.open(directory)
    dtype = floating_dtype("dtype", checkpoint.dtype_name if dtype is None else dtype)

    def make() -> AlibiLanguageModel | AlibiEncoder:
        kind = AlibiLanguageModel if checkpoint.config.is_causal else AlibiEncoder
        return kind(checkpoint.config, checkpoint.vocab_size, param_dtype=dtype, rngs=nnx.Rngs(0))

    model = nnx.eval_shape(make)  # shapes only: no random initialization
    parameters = named_parameters(model)
    for name, array in checkpoint.parameters():
        parameter, is_transposed = parameters.pop(name)
        parameter.set_value(jnp.asarray(array.T if is_transposed else array, dtype))
    model.eval()
    return model
