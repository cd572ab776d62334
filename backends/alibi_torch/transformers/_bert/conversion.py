"""BERT with symmetric ALiBi in place of its position embeddings."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn
from transformers import BertModel, MegatronBertModel
from transformers.models.bert.modeling_bert import BertEmbeddings, BertSelfAttention
from transformers.models.megatron_bert.modeling_megatron_bert import MegatronBertEmbeddings, MegatronBertSelfAttention

from alibi_core.backend import LayerShape, host_values, slope_values
from alibi_torch.transformers import _rows
from alibi_torch.transformers._bert.modules import (
    AlibiBertEmbeddings,
    AlibiBertSelfAttention,
    AlibiMegatronBertEmbeddings,
    AlibiMegatronBertSelfAttention,
    EncoderAttention,
)
from alibi_torch.transformers._joined import Prepared, become, join
from alibi_torch.transformers._modules import check_sizes, tokens_of, with_arguments

BASES = (BertModel, MegatronBertModel)
WITH_ALIBI: dict[type, type] = {
    BertEmbeddings: AlibiBertEmbeddings,
    BertSelfAttention: AlibiBertSelfAttention,
    MegatronBertEmbeddings: AlibiMegatronBertEmbeddings,
    MegatronBertSelfAttention: AlibiMegatronBertSelfAttention,
}
Slopes = tuple[float, ...]


def with_alibi(model: nn.Module, *, slopes: Any | None = None, future_slopes: Any | None = None) -> nn.Module:
    """Give a BERT of ``transformers`` symmetric ALiBi in place of its position embeddings, in place.

    Every layer computes ``softmax(scale * query @ key.mT - slopes * |i - j|) @ value``, as Jina-embeddings-v2 and
    MosaicBERT do; the rest stays BERT's, so checkpoints of those two, with feed-forward layers of their own, do not
    fit. Position embeddings are removed, so that rows may be of any length; token types stay. Neither a bias nor a mask
    of length times length is formed, and keys beyond a head's horizon are left out. ``BertModel`` is post-norm,
    ``MegatronBertModel`` pre-norm.

    Distances are counted along the row: padding may be anywhere in it, and counts. A row holds several sequences where
    ``position_ids`` begin again from 0; each then attends within itself.

    No attention weights are stored, so none can be dropped: ``attention_probs_dropout_prob`` becomes 0 (BERT's default
    is 0.1). The config is copied first, for other models may share it, and keeps the slopes. So what
    ``save_pretrained`` wrote is loaded by the very line that gives a model ALiBi, which removes once more the position
    embeddings that ``from_pretrained`` reports as missing: ``with_alibi(BertModel.from_pretrained(directory))``.

    Call it before an optimizer is made. A model that was trained with position embeddings is to be trained on.

    Args:
        model: A ``BertModel`` or ``MegatronBertModel``, or what contains one, such as ``BertForMaskedLM``: all of what
            will be saved, or its config is not the one that keeps the slopes.
        slopes: ``[num_heads]``, not negative, a PyTorch or NumPy array. Default: those in the config, if it was saved
            with some, else the canonical ones.
        future_slopes: ``[num_heads]``, for keys after the query, for an asymmetric encoder. Default: ``slopes``.

    Returns:
        The same model.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If there is no such model in it, it is a decoder, has ALiBi already, positions of another type, or
            attention of its own, or slopes are wrong; the model is then as it was.

    Example:
        >>> import torch
        >>> from transformers import BertConfig, BertModel
        >>> config = BertConfig(vocab_size=50, hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
        >>> model = with_alibi(BertModel(config))
        >>> model(torch.ones(1, 1000, dtype=torch.long)).last_hidden_state.shape
        torch.Size([1, 1000, 32])

    References:
        Günther et al., "Jina Embeddings 2", section 3, arXiv 2310.19923; Portes et al., "MosaicBERT", section 2, arXiv
        2312.17482.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    bases = [x for x in model.modules() if isinstance(x, BASES)]
    if not bases:
        raise ValueError(
            f"model must contain a BertModel or a MegatronBertModel of transformers, got {type(model).__name__}; those "
            "trained with ALiBi are sped up by accelerate"
        )
    planned = [(base, *_checked(base, slopes, future_slopes)) for base in bases]
    _own_configs(model, bases)
    for base, past, future in planned:
        _convert(base, past, future)
    return model


def _checked(base: Any, slopes: Any, future_slopes: Any) -> tuple[Slopes, Slopes | None]:
    """Check all of a model before any of it is changed, and return its slopes, past and future."""
    config, name = base.config, type(base).__name__
    if any(isinstance(x, EncoderAttention) for x in base.modules()):
        raise ValueError(f"model must not have ALiBi yet, got a {name} that has it")
    for setting in ("is_decoder", "add_cross_attention", "output_attentions"):
        if getattr(config, setting, False):
            raise ValueError(f"{setting} must be False in the config of an encoder with ALiBi, got True")
    kind = getattr(config, "position_embedding_type", "absolute")
    if kind not in ("absolute", "alibi"):
        raise ValueError(f"position_embedding_type must be 'absolute' in the config, to be replaced, got {kind!r}")
    for module in (base.embeddings, *_attention_of(base)):
        if type(module) not in WITH_ALIBI:
            wanted = ", ".join(x.__name__ for x in WITH_ALIBI)
            raise ValueError(
                f"embeddings and attention of the model must be one of {wanted}, got {type(module).__name__}"
            )
    for module in _attention_of(base):
        for projection in (module.query, module.key, module.value):
            check_sizes(projection, module.all_head_size, config.num_attention_heads)
    LayerShape.check(
        config.hidden_size, config.num_attention_heads, is_causal=False, slopes=slopes, future_slopes=future_slopes
    )
    past, future = (None if x is None else tuple(host_values(x).tolist()) for x in (slopes, future_slopes))
    if past is None:
        past = _saved(config, "alibi_slopes")
        future = future or _saved(config, "alibi_future_slopes")
    return past or tuple(slope_values(config.num_attention_heads)), future


def _saved(config: Any, name: str) -> Slopes | None:
    values = getattr(config, name, None)
    if values is not None and len(values) != config.num_attention_heads:
        raise ValueError(
            f"{name} in the config must be {config.num_attention_heads} (num_attention_heads), got {values}"
        )
    return None if values is None else tuple(values)


def _own_configs(model: nn.Module, bases: list[Any]) -> None:
    """Give the model configs of its own, one for each that it had, as other models may share those."""
    copies = {id(base.config): copy.deepcopy(base.config) for base in bases}
    for module in model.modules():
        own = copies.get(id(vars(module).get("config")))
        if own is not None:
            module.config = own


def _convert(base: Any, slopes: Slopes, future_slopes: Slopes | None) -> None:
    config = base.config
    config.attention_probs_dropout_prob = 0.0
    config.position_embedding_type = "alibi"  # as Jina's say
    config.alibi_slopes = list(slopes)
    config.alibi_future_slopes = None if future_slopes is None else list(future_slopes)
    if type(base.embeddings) in WITH_ALIBI:  # they may be shared with a base before, as layers with each other
        del base.embeddings.position_embeddings
        become(base.embeddings, WITH_ALIBI[type(base.embeddings)])
    for module in _attention_of(base):
        module.alibi_slopes, module.alibi_future_slopes = slopes, future_slopes
        module.dropout.p = 0.0
        become(module, WITH_ALIBI.get(type(module), type(module)))
    join(base, AlibiBertModel)
    # transformers 5.4 has Megatron's model put its mask through this, which takes none of four axes.
    base.get_extended_attention_mask = _same_mask


def _attention_of(base: Any) -> list[Any]:
    return [layer.attention.self for layer in base.encoder.layer]


def _same_mask(attention_mask: Tensor, *_: Any, **__: Any) -> Tensor:
    return attention_mask


class AlibiBertModel(Prepared):
    """A base model that puts into a call's mask what its mask and positions say."""

    config: Any

    def prepared(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        given = self.given(args, kwargs)
        for name in ("past_key_values", "encoder_hidden_states"):
            if given.get(name) is not None:
                raise ValueError(
                    f"{name} must be None, as an encoder with ALiBi has none, got {type(given[name]).__name__}"
                )
        if self.config.is_decoder:
            raise ValueError("is_decoder must be False in the config of an encoder with ALiBi, got True")
        if given.get("output_attentions") or (given.get("output_attentions") is None and self.config.output_attentions):
            raise ValueError("output_attentions must be False with ALiBi, as no attention weights are stored, got True")
        tokens = tokens_of(given)
        if not isinstance(tokens, Tensor):
            return args, kwargs  # which the model refuses
        rows = _rows.encoded(given.get("attention_mask"), given.get("position_ids"), tokens)
        return with_arguments(self.alibi_names, args, kwargs, {"attention_mask": rows})
