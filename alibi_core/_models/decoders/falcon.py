"""Falcon, as ``transformers`` has it."""

from __future__ import annotations

import math
from dataclasses import replace

from alibi_core._contracts import named
from alibi_core._models.config import AlibiConfig
from alibi_core._models.decoders.family import Family, Layout
from alibi_core._models.decoders.settings import Settings
from alibi_core._slopes import slope_values

LAYOUT = Layout(
    embedding="transformer.word_embeddings",
    blocks="transformer.h",
    block={  # and the norms, whose names depend on how many there are
        "self_attention.query_key_value": "q k v",
        "self_attention.dense": "out",
        "mlp.dense_h_to_4h": "up",
        "mlp.dense_4h_to_h": "down",
    },
    norm="transformer.ln_f",
    groups_qkv=True,
)


def falcon(settings: Settings, contract: str) -> Family:
    """Return what a ``config.json`` says of a Falcon."""
    if not settings.switch("alibi", default=False):
        raise settings.refuse("alibi", "true", "Falcon models with rotary positions are not loaded")
    width = settings.size("hidden_size", "n_embed")
    num_heads = settings.heads(width, "num_attention_heads", "n_head")
    grouped = settings.switch("new_decoder_architecture", default=False)
    num_kv_heads = 1 if settings.switch("multi_query", default=True) else num_heads
    if grouped:
        num_kv_heads = settings.get("num_kv_heads", default=num_heads)
    block, norms = _falcon_block(settings, grouped)
    activation = settings.activation("activation", default="gelu")
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
        activation=activation,
        feed_forward_bias=has_bias,
        slopes=tuple(slopes),
        **settings.common(width, settings.size("ffn_hidden_size", default=4 * width)),
    )
    layout = replace(LAYOUT, block=norms | LAYOUT.block)
    return Family("falcon", named("falcon"), config, settings.size("vocab_size"), (layout,), rounded)


def _falcon_block(settings: Settings, grouped: bool) -> tuple[str, dict[str, str]]:
    """Return the kind of block and the names of its norms."""
    norms = settings.get("num_ln_in_parallel_attn", default=2 if grouped else 1)
    parallel = settings.switch("parallel_attn", default=True)
    if grouped and not parallel:
        raise settings.refuse("parallel_attn", "true with new_decoder_architecture", "no other computes anything")
    if not parallel:
        return "sequential", {"input_layernorm": "attention_norm", "post_attention_layernorm": "feed_forward_norm"}
    if norms not in (1, 2) or (norms == 2 and not grouped):
        raise settings.refuse(
            "num_ln_in_parallel_attn", "1, or with new_decoder_architecture 2", "no other computes anything"
        )
    if norms == 2:
        return "parallel", {"ln_attn": "attention_norm", "ln_mlp": "feed_forward_norm"}
    return "shared_norm", {"input_layernorm": "attention_norm"}
