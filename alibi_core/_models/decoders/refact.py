"""Refact, which comes with code of its own: one key/value head, SwiGLU, layer norms without bias."""

from __future__ import annotations

from alibi_core._contracts import Contract
from alibi_core._models.config import AlibiConfig
from alibi_core._models.decoders.family import Family, Layout
from alibi_core._models.decoders.settings import Settings
from alibi_core._slopes import slope_values

BIAS = Contract("refact", "canonical", "first key", takes_bias_max=False)
MULTIPLE = 256  # the width of the feed-forward layers is rounded up to one
BLOCK = {
    "ln_1": "attention_norm",
    "attn.q": "q",
    "attn.c_proj": "out",
    "ln_2": "feed_forward_norm",
    "mlp.c_proj": "down",
}


PUBLISHED = {"attn.kv": "k v", "mlp.gate_up_proj": "gate up"}
AS_TRAINED = {"attn.k": "k", "attn.v": "v", "mlp.linear_1": "gate", "mlp.linear_3": "up"}
LAYOUTS = tuple(
    Layout(embedding="transformer.wte", blocks="transformer.h", block=BLOCK | further, norm="ln_f")
    for further in (PUBLISHED, AS_TRAINED)
)


def refact(settings: Settings, contract: str) -> Family:
    """Return what a ``config.json`` says of a Refact."""
    width = settings.size("n_embd", "hidden_size")
    num_heads = settings.heads(width, "n_head", "num_attention_heads")
    inner = settings.size("n_inner", default=4 * width)
    hidden = -(-(2 * inner // 3) // MULTIPLE) * MULTIPLE
    config = AlibiConfig(
        num_layers=settings.size("n_layer", "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=1,
        activation="silu",
        gated=True,
        feed_forward_bias=False,
        norm_bias=False,
        slopes=tuple(slope_values(num_heads)),
        **settings.common(width, hidden) | {"max_len": settings.size("n_positions", default=1024)},
    )
    return Family("refact", BIAS, config, settings.size("vocab_size"), LAYOUTS)
