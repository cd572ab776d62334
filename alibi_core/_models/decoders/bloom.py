"""BLOOM, as ``transformers`` has it."""

from __future__ import annotations

from alibi_core._contracts import named
from alibi_core._models.config import AlibiConfig
from alibi_core._models.decoders.family import Family, Layout
from alibi_core._models.decoders.settings import Settings
from alibi_core._slopes import slope_values

LAYOUT = Layout(
    embedding="transformer.word_embeddings",
    embedding_norm="transformer.word_embeddings_layernorm",
    blocks="transformer.h",
    block={
        "input_layernorm": "attention_norm",
        "self_attention.query_key_value": "q k v",
        "self_attention.dense": "out",
        "post_attention_layernorm": "feed_forward_norm",
        "mlp.dense_h_to_4h": "up",
        "mlp.dense_4h_to_h": "down",
    },
    norm="transformer.ln_f",
    groups_qkv=True,
)


def bloom(settings: Settings, contract: str) -> Family:
    """Return what a ``config.json`` says of a BLOOM."""
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
        **settings.common(width),
    )
    return Family("bloom", named("bloom"), config, settings.size("vocab_size"), (LAYOUT,))
