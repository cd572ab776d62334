"""Baichuan-13B and Baichuan2-13B, which come with code of their own. The 7B models have rotary positions."""

from __future__ import annotations

from dataclasses import replace

from alibi_core._contracts import Contract
from alibi_core._models.config import AlibiConfig
from alibi_core._models.decoders.family import Family, Layout
from alibi_core._models.decoders.settings import Settings
from alibi_core._slopes import slope_values

BIAS = Contract("baichuan", "canonical", "first key", takes_bias_max=False)
LAYOUT = Layout(
    embedding="model.embed_tokens",
    blocks="model.layers",
    block={
        "input_layernorm": "attention_norm",
        "self_attn.W_pack": "q k v",
        "self_attn.o_proj": "out",
        "post_attention_layernorm": "feed_forward_norm",
        "mlp.gate_proj": "gate",
        "mlp.up_proj": "up",
        "mlp.down_proj": "down",
    },
    norm="model.norm",
)
VOCABULARY_OF_2 = 125_696


def baichuan(settings: Settings, contract: str) -> Family:
    """Return what a ``config.json`` says of a Baichuan.

    Baichuan2 divides the rows of its head by their norms, and no entry says so: it is told by its vocabulary, or by an
    entry that only its code writes.
    """
    if "max_position_embeddings" in settings.values:
        advice = "the models that have it have rotary positions"
        raise settings.refuse("max_position_embeddings", "absent, as in the 13B models", advice)
    width = settings.size("hidden_size")
    num_heads = settings.heads(width, "num_attention_heads")
    config = AlibiConfig(
        num_layers=settings.size("num_hidden_layers"),
        num_heads=num_heads,
        activation=settings.activation("hidden_act", default="silu"),
        gated=True,
        feed_forward_bias=False,
        norm="rms_norm",
        slopes=tuple(slope_values(num_heads)),
        **settings.common(width, settings.size("intermediate_size"))
        | {
            "max_len": settings.size("model_max_length", default=4096),
            "norm_epsilon": settings.number("rms_norm_eps", default=1e-6),
            "tied_head": settings.switch("tie_word_embeddings", default=False),
        },
    )
    vocab_size = settings.size("vocab_size")
    is_second = vocab_size == VOCABULARY_OF_2 or "z_loss_weight" in settings.values
    return Family("baichuan", BIAS, config, vocab_size, (replace(LAYOUT, head_of_unit_rows=is_second),))
