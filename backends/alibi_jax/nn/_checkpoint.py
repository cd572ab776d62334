"""Checkpoints of models with ALiBi as a language model or an encoder of this package."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from alibi_core import AttentionCall
from alibi_core.backend import LENGTH_FIRST, AlibiConfig, Checkpoint, key_bias
from alibi_jax._attention import run
from alibi_jax._call import floating_dtype
from alibi_jax.nn._encoder import AlibiEncoder
from alibi_jax.nn._language_model import AlibiLanguageModel
from alibi_jax.nn._layer import AlibiAttention
from alibi_jax.nn._weights import named_parameters


def load_checkpoint(
    directory: str | os.PathLike[str], *, dtype: Any = None, contract: str = "exact"
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
        TypeError: If an argument, or an entry of ``config.json``, is of the wrong kind; or a dtype is float64, given
            or stored, while JAX has none.
        ValueError: If the checkpoint is of another model or one without ALiBi, is damaged, or does not hold the
            tensors that its config describes; or a model is to have its own bias, which it rounds
            to its dtype, in low precision.

    Example:
        >>> model = load_checkpoint("models/bloom-560m")  # doctest: +SKIP
        >>> model.generate(jnp.asarray([[5, 7, 11]]), max_new_tokens=20)  # doctest: +SKIP
        >>> load_checkpoint("models/jina-embeddings-v2-small-en").encode(tokens)  # doctest: +SKIP
        >>> load_checkpoint("no/such/place")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        FileNotFoundError: directory must be one that holds a checkpoint, got 'no/such/place'; nothing is ...
    """
    checkpoint = Checkpoint.open(directory, contract=contract)
    dtype = floating_dtype("dtype", checkpoint.dtype_name if dtype is None else dtype)
    checkpoint.check_precision(jnp.finfo(dtype).bits)
    attention = FalconAttention.made_for if checkpoint.family.rounds_bias else None

    def make() -> AlibiLanguageModel | AlibiEncoder:
        options = {"attention": attention, "param_dtype": dtype, "rngs": nnx.Rngs(0)}
        kind = AlibiLanguageModel if checkpoint.config.is_causal else AlibiEncoder
        return kind(checkpoint.config, checkpoint.vocab_size, **options)

    model = nnx.eval_shape(make)  # no numbers are drawn, to be thrown away
    parameters = named_parameters(model)
    for name, array in checkpoint.parameters():
        parameter, is_turned = parameters.pop(name)
        parameter.set_value(jnp.asarray(array.T if is_turned else array, dtype))
    model.eval()
    return model


class FalconAttention(AlibiAttention):
    """Attention with the bias that Falcon's model computes, from keys' positions rounded to bfloat16."""

    @classmethod
    def made_for(cls, config: AlibiConfig, **options: Any) -> FalconAttention:
        """Return the layer that ``config`` describes."""
        return cls(**config.attention_options, **options)

    def _attended(
        self, query: jax.Array, key: jax.Array, value: jax.Array, cache: Any, *, q_offset: Any, **rules: Any
    ) -> jax.Array:
        if "lengths" in rules:
            raise ValueError("lengths must be None with contract 'model', whose rows have one length, got some")
        check = partial(AttentionCall.check, slopes=self.slopes, xp=jnp, **rules)
        if cache is None:
            call, norms = check(query, key, value, q_offset=q_offset, layout=LENGTH_FIRST), None
        else:
            key, value, norms, length = cache
            call = check(jnp.swapaxes(query, 1, 2), key, value, q_offset=length - query.shape[1])
        # A call's bias by keys comes on top of the linear one.
        linear = call.slopes[:, None] * jnp.arange(call.kv_len)
        call = replace(call, added_key_bias=self._bias(call.kv_len, query.dtype) - linear)
        attended = run(call, query, key, value, "dense", norms)
        return attended if cache is None else jnp.where(cache.length <= cache.max_length, attended, jnp.nan)

    def _bias(self, kv_len: int, dtype: Any) -> jax.Array:
        """Return what is added to the scores, ``[num_heads, kv_len]``."""
        # By NumPy: XLA would leave out the roundings to a low precision.
        bias = key_bias(self.shape.num_heads, kv_len, contract="falcon")[:, 0].astype(dtype)
        working = np.promote_types(dtype, np.float32)
        bias = (bias.astype(working) / math.sqrt(self.shape.head_dim)).astype(dtype)
        return jnp.asarray(bias.astype(working))
