"""Checkpoints of models with ALiBi as a language model or an encoder of this package."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from typing import Any

import array_api_compat.torch as xp
import torch
from torch import Tensor

from alibi_core import AttentionCall
from alibi_core.backend import Checkpoint, checks, key_bias
from alibi_torch._attention import run
from alibi_torch.caches import KVCache
from alibi_torch.nn._encoder import AlibiEncoder
from alibi_torch.nn._language_model import AlibiLanguageModel
from alibi_torch.nn._layer import AlibiAttention
from alibi_torch.nn._transformer import AlibiConfig


def load_checkpoint(
    directory: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    contract: str = "exact",
) -> AlibiLanguageModel | AlibiEncoder:
    """Return a model with the weights of a checkpoint: a language model for decoders, an encoder for encoders.

    Known decoders are BLOOM, Falcon and MPT of ``transformers``, MPT of llm-foundry (Replit-code, too), Baichuan-13B,
    Baichuan2-13B, BTLM, Jais and Refact. Known encoders are Jina-embeddings-v2, its kin for code, MosaicBERT and
    DNABERT-2.

    What a model returns is what the checkpoint's own does, to rounding, where that has ALiBi with the slopes that it
    was trained with. Some models compute another bias, which ``contract="model"`` gives instead:

    - Falcon rounds slopes, positions and their product to bfloat16. It is the bias of its ``sdpa`` attention; its
      ``eager`` one adds that twice. Positions count from the first token of a row, masked or not;
    - MPT, in ``transformers``, passes no ``alibi_bias_max`` on: its slopes are always those of 8. Nor does it scale
      logits;
    - Jais and BTLM multiply by slopes that are stored, rounded, in the checkpoint.

    The model is in evaluation mode and has no dropout. Nothing is downloaded, and nothing in the files is executed.

    Args:
        directory: Where ``config.json`` and ``model.safetensors`` are, or several such files and
            ``model.safetensors.index.json``, as ``save_pretrained`` writes them.
        dtype: Dtype of the parameters. Default: that of the stored embeddings.
        device: Where they are to live.
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
        >>> model.generate(torch.tensor([[5, 7, 11]]), max_new_tokens=20)  # doctest: +SKIP
        >>> load_checkpoint("models/jina-embeddings-v2-small-en").encode(tokens)  # doctest: +SKIP
        >>> load_checkpoint("no/such/place")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        FileNotFoundError: directory must be one that holds a checkpoint, got 'no/such/place'; nothing is ...
    """
    checkpoint = Checkpoint.open(directory, contract=contract)
    dtype = getattr(torch, checkpoint.dtype_name) if dtype is None else checks.floating_dtype(xp, "dtype", dtype)
    checkpoint.check_precision(torch.finfo(dtype).bits)

    with torch.device("meta"):
        attention = FalconAttention.made_for if checkpoint.family.rounds_bias else None
        kind = AlibiLanguageModel if checkpoint.config.is_causal else AlibiEncoder
        model = kind(checkpoint.config, checkpoint.vocab_size, attention=attention)
    state = {name: torch.from_numpy(array).to(device, dtype) for name, array in checkpoint.parameters()}
    model.load_state_dict(state, assign=True)
    return model.eval()


class FalconAttention(AlibiAttention):
    """Attention with the bias that Falcon's model computes, from keys' positions rounded to bfloat16."""

    @classmethod
    def made_for(cls, config: AlibiConfig) -> FalconAttention:
        """Return the layer that ``config`` describes."""
        return cls(**config.attention_options)

    def forward(
        self,
        x: Tensor,
        *,
        mask: Tensor | None = None,
        segment_ids: Any | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Return what :class:`AlibiAttention` does, with another bias."""
        self.shape.check_input(x, xp)
        query, key, value = self._heads_of(x, x)
        if cache is not None:
            key, value = cache.append(key, value)
        call = AttentionCall.check(query, key, value, self.slopes, mask=mask, segment_ids=segment_ids, xp=xp)
        form = {"contract": "falcon", "xp": xp, "dtype": query.dtype, "device": query.device}
        bias = key_bias(call.num_heads, call.kv_len, **form)[:, 0] / math.sqrt(call.head_dim)
        # A call's bias by keys comes on top of the linear one.
        linear = call.slopes.double()[:, None] * torch.arange(call.kv_len, device=query.device)
        call = replace(call, added_key_bias=(bias.double() - linear).to(call.working_dtype))
        attended = run(call, query, key, value, None, None)
        return self.dropout(self.out_proj(attended.transpose(1, 2).flatten(2)))
