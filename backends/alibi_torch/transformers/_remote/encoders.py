"""Encoders whose code came with their checkpoint: Jina-embeddings-v2, MosaicBERT and DNABERT-2."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import torch
from torch import Tensor

from alibi_core.backend import slope_values
from alibi_torch._attention import attention
from alibi_torch._dispatch import needs_gradients
from alibi_torch.transformers._modules import tokens_of
from alibi_torch.transformers._remote.models import HOLES, PLAIN, Family, RemoteAttention, constant, marked
from alibi_torch.transformers._rules import is_short, shared

FEW_SCORES = 2**21  # of a batch, at most, for products with a bias that all layers share
Heads = tuple[Tensor, Tensor, Tensor]  # queries, keys and values, [batch, heads, length, head_dim]


class EncoderAttention(RemoteAttention):
    """What the attention modules below have in common. Their rules are their slopes."""

    @staticmethod
    def shape_of(module: Any) -> tuple[int, int]:
        return module.num_attention_heads, module.attention_head_size

    @classmethod
    def rules(cls, module: Any, base: Any) -> tuple[float, ...]:
        return tuple(slope_values(module.num_attention_heads))

    def attend(self, heads: Heads, bias: Tensor, text: Tensor | None, segment_ids: Tensor | None = None) -> Tensor:
        """Return the attention of ``[batch, heads, length, head_dim]``.

        Args:
            heads: Queries, keys and values.
            bias: What stands for it, one tensor for all layers of a call.
            text: ``[batch, 1, 1, length]`` booleans, False for padding; None where there is none.
            segment_ids: ``[batch, length]``, of texts packed into a row; None where each row is one.
        """
        query, key, value = heads
        length = query.shape[2]
        # Products of few scores are the fastest; those of half the width are so for twice as many keys.
        is_lean = segment_ids is None and is_short(query, key, length * query.element_size() // 4)
        if is_lean and query.shape[:2].numel() * length**2 <= FEW_SCORES and not needs_gradients(query, key, value):
            whole: Tensor = shared(bias, (self.alibi_rules, length, query.dtype), lambda: self._bias(query, text))
            scores = (query @ key.mT).to(whole.dtype).mul_(query.shape[-1] ** -0.5).add_(whole)
            return torch.softmax(scores, dim=-1).to(value.dtype) @ value
        # Numbers become a tensor here, so that no cast of the model rounds them.
        working = torch.promote_types(query.dtype, torch.float32)
        slopes = torch.tensor(self.alibi_rules, dtype=working, device=query.device)
        return attention(query, key, value, slopes, is_causal=False, mask=text, segment_ids=segment_ids)

    def _bias(self, query: Tensor, text: Tensor | None) -> Tensor:
        """Return the bias of all queries and keys, with padding hidden, ``[batch or 1, heads, length, length]``."""
        slopes = torch.tensor(self.alibi_rules, dtype=torch.promote_types(query.dtype, torch.float32))
        position = torch.arange(query.shape[2])
        bias = -slopes[None, :, None, None] * (position[:, None] - position).abs()
        return bias if text is None else bias.masked_fill(~text, -torch.inf)


class JinaAttention(EncoderAttention):
    """Jina's attention module; that of its model for code norms queries and keys."""

    bias_name = "bias"
    parts = frozenset({"query", "key", "value", "dropout"})
    dropout_name = "dropout"
    optional = frozenset({"layer_norm_q", "layer_norm_k"})

    @staticmethod
    def rows(module: Any) -> dict[str, int]:
        return dict.fromkeys(("query", "key", "value"), module.num_attention_heads * module.attention_head_size)

    @classmethod
    def check(cls, module: Any) -> None:
        super().check(module)
        if hasattr(module, "layer_norm_q") != hasattr(module, "layer_norm_k"):
            raise ValueError("attention of the model must norm queries and keys or neither, got one norm")
        kind = getattr(module, "position_embedding_type", "alibi")
        if kind != "alibi":
            raise ValueError(f"position_embedding_type must be 'alibi', got {kind!r}")

    def attended(self, given: dict[str, Any]) -> tuple[Tensor]:
        hidden, bias = given["hidden_states"], given["bias"]
        module: Any = self
        query, key, value = module.query(hidden), module.key(hidden), module.value(hidden)
        if hasattr(module, "layer_norm_q"):
            query, key = module.layer_norm_q(query), module.layer_norm_k(key)
        heads = query, key, value
        query, key, value = (x.unflatten(-1, self.shape_of(module)).transpose(1, 2) for x in heads)
        text = None if bias.shape[1] == PLAIN else given["attention_mask"] == 0
        result = self.attend((query, key, value), bias, text)
        return (result.transpose(1, 2).flatten(2),)


class UnpadAttention(EncoderAttention):
    """MosaicBERT's attention module, and DNABERT-2's: texts lie one behind the other, without padding."""

    bias_name = "bias"
    parts = frozenset({"Wqkv", "dropout"})
    dropout_name = "dropout"

    @staticmethod
    def rows(module: Any) -> dict[str, int]:
        return {"Wqkv": 3 * module.num_attention_heads * module.attention_head_size}

    def attended(self, given: dict[str, Any]) -> Tensor:
        module: Any = self
        mixed = module.Wqkv(given["hidden_states"])  # [tokens, features]
        mixed = mixed.unflatten(-1, (3, *self.shape_of(module)))  # [tokens, 3, heads, head_dim]
        starts, bias = given["cu_seqlens"], given["bias"]
        has_holes, batch = bias.shape[1] == HOLES, len(starts) - 1
        text = segment_ids = None
        if has_holes:  # distances count what lies between
            seen = given["attn_mask"] != 0
            rows = mixed.new_zeros(seen.numel(), *mixed.shape[1:]).index_copy(0, given["indices"], mixed)
            rows, text = rows.unflatten(0, seen.shape), seen[:, None, None, :]
        else:
            rows = mixed[None]
            if batch > 1:
                numbers = torch.arange(batch, device=starts.device)
                segment_ids = numbers.repeat_interleave(starts.diff(), output_size=len(mixed))[None]
        query, key, value = rows.permute(2, 0, 3, 1, 4).unbind()
        result = self.attend((query, key, value), bias, text, segment_ids).transpose(1, 2).flatten(0, 1)
        return (result[given["indices"]] if has_holes else result).flatten(1)


class EncoderFamily(Family):
    """BERT with ALiBi: an encoder that builds ``[1, heads, length, length]`` before its layers, or keeps them."""

    attention: ClassVar = {"JinaBertSelfAttention": JinaAttention, "BertUnpadSelfAttention": UnpadAttention}
    unsupported = ("head_mask", "encoder_hidden_states", "past_key_values")

    def attention_of(self, base: Any) -> list[Any]:
        return [layer.attention.self for layer in base.encoder.layer]

    def builders(self, base: Any) -> list[tuple[Any, str]]:
        return [(base.encoder, "rebuild_alibi_tensor")]

    def reason(self, base: Any, given: dict[str, Any]) -> str | None:
        if tokens_of(given).shape[1] == 0:  # of what tells of padding, the model would leave nothing
            return "texts must have tokens, got none"
        return super().reason(base, given)

    def check(self, base: Any) -> None:
        super().check(base)
        if getattr(base.config, "is_decoder", False):
            raise ValueError("is_decoder must be False in the config of an encoder, got True")

    def begin(self, base: Any, given: dict[str, Any], mask: Tensor | None) -> dict[str, Any]:
        encoder, tokens = base.encoder, tokens_of(given)
        mark = marked(mask, tokens.shape[1], tokens.device)
        encoder.rebuild_alibi_tensor = functools.partial(constant, mark)
        if hasattr(encoder, "alibi"):
            base.alibi_kept = encoder.alibi, encoder._current_alibi_size
            encoder.alibi, encoder._current_alibi_size = mark, tokens.shape[1]
        return {}

    def begin_own(self, base: Any, given: dict[str, Any]) -> None:
        encoder, length = base.encoder, max(1, tokens_of(given).shape[1])
        if hasattr(encoder, "alibi") and encoder._current_alibi_size < length:
            _rebuild(base, length)  # and keep it: where one call needs it, others may

    def end(self, base: Any) -> None:
        super().end(base)
        kept = vars(base).pop("alibi_kept", None)
        if kept is not None:
            base.encoder.alibi, base.encoder._current_alibi_size = kept

    def prepare_probe(self, base: Any, length: int) -> None:
        if hasattr(base.encoder, "alibi"):
            _rebuild(base, length)
        for module in self.attention_of(base):
            if hasattr(module, "p_dropout"):
                module.p_dropout = 1.0  # else its own kernel rounds to float16; weights are dropped by a layer

    def release(self, base: Any) -> None:
        encoder = base.encoder
        is_saved = "alibi" in encoder._buffers and "alibi" not in encoder._non_persistent_buffers_set
        if hasattr(encoder, "alibi") and not is_saved:
            base.alibi_size = encoder._current_alibi_size, encoder.alibi.dtype
            encoder.alibi, encoder._current_alibi_size = encoder.alibi.new_zeros(0), 0

    def retain(self, base: Any) -> None:
        size = vars(base).pop("alibi_size", None)
        if size is not None:
            _rebuild(base, size[0], size[1])


def _rebuild(base: Any, length: int, dtype: torch.dtype | None = None) -> None:
    """Let an encoder build its bias by its own code, and keep it."""
    encoder, like = base.encoder, next(base.parameters())
    built = encoder.rebuild_alibi_tensor(size=length, device=like.device)
    if built is None:  # it keeps what it builds
        built = encoder.alibi
    encoder.alibi = built.to(dtype or (encoder.alibi.dtype if encoder.alibi.numel() else like.dtype))
    encoder._current_alibi_size = length
