"""BLOOM, MPT and Falcon: what their ``config.json`` says, and what their checkpoints call things."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alibi_core._arrays import checks
from alibi_core._models.config import AlibiConfig
from alibi_core._slopes import slope_values

_ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}


@dataclass(frozen=True)
class Names:
    """What a family's checkpoints call their modules; those of a block without the block's own name.

    Attributes:
        stacks_qkv: Whether rows of the fused projection are all queries, all keys, all values. Otherwise each
            key/value head has its queries, its key and its value there.
    """

    embedding: str
    blocks: str
    attention_norm: str
    qkv: str
    out: str
    feed_forward_norm: str | None
    up: str
    down: str
    norm: str
    embedding_norm: str | None = None
    stacks_qkv: bool = False


@dataclass(frozen=True)
class Family:
    """What is known of a checkpoint from its ``config.json``.

    Attributes:
        name: ``"bloom"``, ``"falcon"`` or ``"mpt"``.
        config: Shape of the language model.
        vocab_size: Number of its tokens.
        names: What its tensors are called.
        rounds_bias: Whether attention is to add Falcon's bias, rounded to bfloat16, in place of the exact one.
    """

    name: str
    config: AlibiConfig
    vocab_size: int
    names: Names
    rounds_bias: bool = False


class Settings:
    """Entries of a ``config.json``, by any of the names they have had."""

    def __init__(self, values: dict[str, Any], place: str) -> None:
        self.values, self.place = values, place

    def get(self, *names: str, default: Any) -> Any:
        """Return the entry of the first name that is there and not null, else ``default``."""
        return next((self.values[name] for name in names if self.values.get(name) is not None), default)

    def size(self, *names: str) -> int:
        """Return an entry that must be there, a positive integer."""
        value = self.get(*names, default=None)
        if value is None:
            raise ValueError(f"{self.place} must say {names[0]}, got no such entry")
        return checks.positive_int(f"{names[0]} in {self.place}", value)

    def heads(self, width: int, *names: str) -> int:
        """Return the number of heads, which must divide the width, before anything is computed of every head."""
        num_heads = self.size(*names)
        if width % num_heads:
            raise ValueError(f"{names[0]} in {self.place} must divide the model's width, {width}, got {num_heads}")
        return num_heads

    def switch(self, name: str, *, default: bool) -> bool:
        return checks.boolean(f"{name} in {self.place}", self.get(name, default=default))

    def number(self, name: str, *, default: float) -> float:
        return checks.positive_number(f"{name} in {self.place}", self.get(name, default=default))

    def refuse(self, name: str, rule: str, advice: str) -> ValueError:
        return ValueError(f"{name} in {self.place} must be {rule}, got {self.values.get(name)!r}; {advice}")


def family_of(values: dict[str, Any], path: Path, contract: str) -> Family:
    """Return what a ``config.json`` describes.

    Args:
        values: Its content.
        path: Where it is, for messages.
        contract: ``"exact"``: ALiBi with the family's slopes. ``"model"``: the bias that ``transformers`` computes.

    Raises:
        TypeError: If an entry is of the wrong kind.
        ValueError: If it describes no model with ALiBi, or one with parts that no language model here has.
    """
    settings = Settings(values, str(path))
    families: dict[str, Callable[[Settings, str], Family]] = {"bloom": _bloom, "falcon": _falcon, "mpt": _mpt}
    model_type = values.get("model_type")
    if not isinstance(model_type, str) or model_type not in families:
        raise settings.refuse("model_type", "'bloom', 'falcon' or 'mpt'", "checkpoints of no other model are known")
    return families[model_type](settings, contract)


def _bloom(settings: Settings, contract: str) -> Family:
    width = settings.size("hidden_size", "n_embed")
    num_heads = settings.heads(width, "n_head", "num_attention_heads")
    if settings.switch("slow_but_exact", default=False) and settings.get("pretraining_tp", default=1) != 1:
        raise settings.refuse("slow_but_exact", "false", "with it transformers leaves out the biases of projections")
    normed = settings.switch("apply_residual_connection_post_layernorm", default=False)
    config = AlibiConfig(
        num_layers=settings.size("n_layer", "num_hidden_layers"),
        num_heads=num_heads,
        bias=True,
        block="normed_residual" if normed else "sequential",
        activation="gelu_tanh",
        slopes=tuple(slope_values(num_heads, contract="bloom")),
        embedding_norm=True,
        **_common(settings, width),
    )
    names = Names(
        embedding="word_embeddings",
        embedding_norm="word_embeddings_layernorm",
        blocks="h",
        attention_norm="input_layernorm",
        qkv="self_attention.query_key_value",
        out="self_attention.dense",
        feed_forward_norm="post_attention_layernorm",
        up="mlp.dense_h_to_4h",
        down="mlp.dense_4h_to_h",
        norm="ln_f",
    )
    return Family("bloom", config, settings.size("vocab_size"), names)


def _mpt(settings: Settings, contract: str) -> Family:
    attention = Settings(settings.get("attn_config", default={}), f"attn_config in {settings.place}")
    if not isinstance(attention.values, dict):
        raise TypeError(f"{attention.place} must be an object, got {type(attention.values).__name__}")
    if not attention.switch("alibi", default=True):
        raise attention.refuse("alibi", "true", "models with other positions than ALiBi's are not loaded")
    for name in ("prefix_lm", "qk_ln"):
        if attention.switch(name, default=False):
            raise attention.refuse(name, "false", "transformers has no such model either: it leaves the entry unread")
    if attention.get("attn_type", default="multihead_attention") != "multihead_attention":
        raise attention.refuse("attn_type", "'multihead_attention'", "transformers has no such model either")
    if settings.get("norm_type", default="layernorm") not in ("layernorm", "low_precision_layernorm"):
        raise settings.refuse("norm_type", "'layernorm' or 'low_precision_layernorm'", "transformers has no other")
    if settings.get("logit_scale", default=None) is not None:
        raise settings.refuse("logit_scale", "null", "transformers leaves it unread; remove it for logits without")
    width = settings.size("d_model", "hidden_size")
    num_heads = settings.heads(width, "n_heads", "num_attention_heads")
    bias_max = attention.number("alibi_bias_max", default=8) if contract == "exact" else 8.0
    scale, clip = attention.get("softmax_scale", default=None), attention.get("clip_qkv", default=None)
    config = AlibiConfig(
        num_layers=settings.size("n_layers", "num_hidden_layers"),
        num_heads=num_heads,
        feed_forward_bias=False,
        norm_bias=False,
        slopes=tuple(slope_values(num_heads, bias_max=bias_max, contract="mpt")),
        scale=scale,
        clip_qkv=clip or None,  # 0, too, is none in transformers
        **_common(settings, width) | {"max_len": settings.size("max_seq_len")},
    )
    names = Names(
        embedding="wte",
        blocks="blocks",
        attention_norm="norm_1",
        qkv="attn.Wqkv",
        out="attn.out_proj",
        feed_forward_norm="norm_2",
        up="ffn.up_proj",
        down="ffn.down_proj",
        norm="norm_f",
        stacks_qkv=True,
    )
    return Family("mpt", config, settings.size("vocab_size"), names)


def _falcon(settings: Settings, contract: str) -> Family:
    if not settings.switch("alibi", default=False):
        raise settings.refuse("alibi", "true", "Falcon models with rotary positions are not loaded")
    width = settings.size("hidden_size", "n_embed")
    num_heads = settings.heads(width, "num_attention_heads", "n_head")
    grouped = settings.switch("new_decoder_architecture", default=False)
    num_kv_heads = 1 if settings.switch("multi_query", default=True) else num_heads
    if grouped:
        num_kv_heads = settings.get("num_kv_heads", default=num_heads)
    block, norms = _falcon_block(settings, grouped)
    activation = settings.get("activation", default="gelu")
    if activation not in _ACTIVATIONS:
        raise settings.refuse("activation", f"one of {', '.join(map(repr, _ACTIVATIONS))}", "no other is known")
    has_bias = settings.switch("bias", default=False)
    rounded = contract == "model"
    # Scores and bias together are divided by sqrt(head_dim). Rounded, the bias is divided where it is computed.
    slopes = [slope / math.sqrt(width / num_heads) for slope in slope_values(num_heads)]
    config = AlibiConfig(
        num_layers=settings.size("num_hidden_layers", "n_layer"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        bias=has_bias,
        block=block,
        activation=_ACTIVATIONS[activation],
        feed_forward_bias=has_bias,
        slopes=tuple(slopes),
        **_common(settings, width, settings.get("ffn_hidden_size", default=4 * width)),
    )
    names = Names(
        embedding="word_embeddings",
        blocks="h",
        attention_norm=norms[0],
        qkv="self_attention.query_key_value",
        out="self_attention.dense",
        feed_forward_norm=norms[1],
        up="mlp.dense_h_to_4h",
        down="mlp.dense_4h_to_h",
        norm="ln_f",
    )
    return Family("falcon", config, settings.size("vocab_size"), names, rounded)


def _falcon_block(settings: Settings, grouped: bool) -> tuple[str, tuple[str, str | None]]:
    """Return the kind of block and the names of its norms."""
    norms = settings.get("num_ln_in_parallel_attn", default=2 if grouped else 1)
    parallel = settings.switch("parallel_attn", default=True)
    if grouped and not parallel:
        raise settings.refuse("parallel_attn", "true with new_decoder_architecture", "no other computes anything")
    if not parallel:
        return "sequential", ("input_layernorm", "post_attention_layernorm")
    if norms not in (1, 2) or (norms == 2 and not grouped):
        raise settings.refuse(
            "num_ln_in_parallel_attn", "1, or with new_decoder_architecture 2", "no other computes anything"
        )
    return ("parallel", ("ln_attn", "ln_mlp")) if norms == 2 else ("shared_norm", ("input_layernorm", None))


def _common(settings: Settings, width: int, hidden: int | None = None) -> dict[str, Any]:
    return {
        "embed_dim": width,
        "max_len": settings.get("seq_length", "max_position_embeddings", default=2048),
        "dropout": 0.0,
        "feed_forward_dim": 4 * width if hidden is None else hidden,
        "norm_epsilon": settings.number("layer_norm_epsilon", default=1e-5),
        "embedding_scale": 1.0,
        "tied_head": settings.switch("tie_word_embeddings", default=True),
    }
