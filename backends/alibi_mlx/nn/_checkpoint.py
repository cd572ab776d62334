"""Checkpoints of models with ALiBi as a language model or an encoder of this package."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from typing import Any

import mlx.core as mx

from alibi_core import AttentionCall
from alibi_core.backend import Checkpoint, checks, dense_attention, key_bias, namespace_of
from alibi_mlx.nn._encoder import AlibiEncoder
from alibi_mlx.nn._language_model import AlibiLanguageModel
from alibi_mlx.nn._layer import AlibiAttention


def load_checkpoint(
    directory: str | os.PathLike[str], *, dtype: mx.Dtype | None = None, contract: str = "exact"
) -> AlibiLanguageModel | AlibiEncoder:
    """Return a model with the weights of a checkpoint: a language model for decoders, an encoder for encoders.

    Known decoders are BLOOM, Falcon and MPT of ``transformers``, MPT of llm-foundry (Replit-code, too), Baichuan-13B,
    Baichuan2-13B, BTLM, Jais and Refact. Known encoders are Jina-embeddings-v2, its kin for code, MosaicBERT and
    DNABERT-2.

    What a model returns is what the checkpoint's own does, to rounding, where that has ALiBi with the slopes that it
    was trained with. Some models compute another bias, which ``contract="model"`` gives instead:

    - Falcon rounds slopes, positions and their product to bfloat16. It is the bias of its ``sdpa`` attention; its
      ``eager`` one adds that twice. Whole score matrices are held for it, and positions count from the first token
      of a row, masked or not;
    - MPT, in ``transformers``, passes no ``alibi_bias_max`` on: its slopes are always those of 8. Nor does it scale
      logits;
    - Jais and BTLM multiply by slopes that are stored, rounded, in the checkpoint.

    The model is in evaluation mode and has no dropout. Nothing is downloaded, and nothing in the files is executed.

    Args:
        directory: Where ``config.json`` and ``model.safetensors`` are, or several such files and
            ``model.safetensors.index.json``, as ``save_pretrained`` writes them.
        dtype: Dtype of the parameters. Default: that of the stored embeddings.
        contract: ``"exact"`` or ``"model"``, as above.

    Returns:
        The model, its tokens those of the checkpoint.

    Raises:
        FileNotFoundError: If a file is missing.
        TypeError: If an argument, or an entry of ``config.json``, is of the wrong kind.
        ValueError: If the checkpoint is of another model or one without ALiBi, is damaged, or does not hold the
            tensors that its config describes; or a model is to have its own bias, which it rounds
            to its dtype, in low precision.

    Example:
        >>> model = load_checkpoint("models/bloom-560m")  # doctest: +SKIP
        >>> model.generate(mx.array([[5, 7, 11]]), max_new_tokens=20)  # doctest: +SKIP
        >>> load_checkpoint("models/jina-embeddings-v2-small-en").encode(tokens)  # doctest: +SKIP
        >>> load_checkpoint("no/such/place")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        FileNotFoundError: directory must be one that holds a checkpoint, got 'no/such/place'; nothing is ...
    """
    checkpoint = Checkpoint.open(directory, contract=contract)
    xp = namespace_of(xp=mx)
    dtype = getattr(mx, checkpoint.dtype_name) if dtype is None else checks.floating_dtype(xp, "dtype", dtype)
    checkpoint.check_precision(mx.finfo(dtype).bits)

    attention = None
    if checkpoint.family.rounds_bias:
        attention = lambda config: FalconAttention(**config.attention_options)  # noqa: E731
    kind = AlibiLanguageModel if checkpoint.config.is_causal else AlibiEncoder
    model = kind(checkpoint.config, checkpoint.vocab_size, attention=attention)
    model.load_weights([(name, mx.array(array, dtype)) for name, array in checkpoint.parameters()])
    model.eval()
    return model


class FalconAttention(AlibiAttention):
    """Attention with the bias that Falcon's model computes, from keys' positions rounded to bfloat16."""

    def __call__(
        self,
        x: mx.array,
        *,
        mask: mx.array | None = None,
        segment_ids: Any | None = None,
        cache: Any | None = None,
    ) -> mx.array:
        """Return what :class:`AlibiAttention` does, with another bias."""
        self.shape.check_input(x, mx)
        query, key, value = self._heads_of(x, x)
        if cache is not None:
            key, value = cache.update_and_fetch(key, value)
        call = AttentionCall.check(query, key, value, self.slopes, mask=mask, segment_ids=segment_ids, xp=mx)
        form = {"contract": "falcon", "xp": mx, "dtype": query.dtype}
        bias = key_bias(call.num_heads, call.kv_len, **form)[:, 0] / math.sqrt(call.head_dim)
        bias = bias.astype(call.working_dtype)
        # A call's bias by keys comes on top of the linear one.
        linear = call.slopes[:, None] * mx.arange(call.kv_len)
        attended = dense_attention(replace(call, added_key_bias=bias - linear), query, key, value)
        return self.dropout(self.out_proj(mx.flatten(attended.swapaxes(1, 2), -2)))
