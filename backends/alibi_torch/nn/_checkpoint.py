"""Loading of checkpoints with ALiBi into :class:`AlibiLanguageModel` or :class:`AlibiEncoder`."""

from __future__ import annotations

import os

import array_api_compat.torch as xp
import torch

from alibi_core.backend import checks
from alibi_core.backend.models import Checkpoint
from alibi_torch.nn._encoder import AlibiEncoder
from alibi_torch.nn._language_model import AlibiLanguageModel


def load_checkpoint(
    directory: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> AlibiLanguageModel | AlibiEncoder:
    """Return a model with the weights of a checkpoint: a language model for decoders, an encoder for encoders.

    ``docs/checkpoints.md`` lists the supported families, and how exactly they are reproduced. The model is in
    evaluation mode and has no dropout. Nothing is downloaded, and nothing in the files is executed.

    Args:
        directory: The directory with ``config.json`` and ``model.safetensors`` (or its shards and
            ``model.safetensors.index.json``), as ``save_pretrained`` writes them.
        dtype: Dtype of the parameters. Default: the dtype of the stored embeddings.
        device: Device of the parameters.

    Returns:
        The model, with the checkpoint's vocabulary.

    Raises:
        FileNotFoundError: If a file is missing.
        TypeError: If an argument, or an entry of ``config.json``, is of the wrong kind.
        ValueError: If the checkpoint belongs to an unsupported model or one without ALiBi, is damaged, or lacks tensors
            that its config describes.

    Example:
        >>> model = load_checkpoint("models/bloom-560m")  # doctest: +SKIP
        >>> model.generate(torch.tensor([[5, 7, 11]]), max_new_tokens=20)  # doctest: +SKIP
        >>> load_checkpoint("no/such/place")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        FileNotFoundError: directory must be one that holds a checkpoint, got 'no/such/place'; nothing is ...
    """
    checkpoint = Checkpoint.open(directory)
    dtype = getattr(torch, checkpoint.dtype_name) if dtype is None else checks.floating_dtype(xp, "dtype", dtype)

    with torch.device("meta"):
        kind = AlibiLanguageModel if checkpoint.config.is_causal else AlibiEncoder
        model = kind(checkpoint.config, checkpoint.vocab_size)
    state = {name: torch.from_numpy(array).to(device, dtype) for name, array in checkpoint.parameters()}
    model.load_state_dict(state, assign=True)
    return model.eval()
