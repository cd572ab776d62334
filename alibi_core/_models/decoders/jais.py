"""Jais and BTLM, which come with code of their own: GPT-2 with ALiBi, SwiGLU, and the scales of muP."""

from __future__ import annotations

from alibi_core._contracts import Contract
from alibi_core._models.config import AlibiConfig
from alibi_core._models.decoders.family import Family, Layout
from alibi_core._models.decoders.settings import Settings
from alibi_core._slopes import slope_values

BIAS = Contract("jais", "canonical", "query", takes_bias_max=False)
BLOCK = {
    "ln_1": "attention_norm",
    "attn.c_attn": "q k v",
    "attn.c_proj": "out",
    "ln_2": "feed_forward_norm",
    "mlp.c_fc": "up",
    "mlp.c_proj": "down",
}


def jais(settings: Settings, contract: str) -> Family:
    """Return what a ``config.json`` says of a Jais or BTLM."""
    if settings.get("position_embedding_type", default="learned") != "alibi":
        raise settings.refuse("position_embedding_type", "'alibi'", "models with learned positions are not loaded")
    settings.refuse_switches(
        "scale_attn_by_inverse_layer_idx", "add_cross_attention", advice="no language model here has it"
    )
    width = settings.size("n_embd", "hidden_size")
    num_heads = settings.heads(width, "n_head", "num_attention_heads")
    is_gated = settings.values.get("activation_function") == "swiglu"
    activation = "silu" if is_gated else settings.activation("activation_function", default="gelu_new")
    config = AlibiConfig(
        num_layers=settings.size("n_layer", "num_hidden_layers"),
        num_heads=num_heads,
        bias=True,
        activation=activation,
        gated=is_gated,
        slopes=tuple(slope / _stretching(settings) for slope in slope_values(num_heads)),
        scale=_scale(settings, width // num_heads),
        logit_scale=_logit_scale(settings),
        **settings.common(width, settings.size("n_inner", default=4 * width))
        | {
            "max_len": settings.size("n_positions", "max_position_embeddings"),
            "embedding_scale": settings.number("embeddings_scale", "mup_embeddings_scale", default=1.0),
        },
    )
    layout = Layout(
        embedding="transformer.wte",
        blocks="transformer.h",
        block=BLOCK | {"mlp.c_fc2": "gate"} if is_gated else BLOCK,
        norm="transformer.ln_f",
        ignored=(r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias",),  # the causal mask
        stored_slopes="transformer.relative_pe.slopes",
        is_turned=True,
    )
    return Family(settings.values["model_type"], BIAS, config, settings.size("vocab_size"), (layout,))


def _scale(settings: Settings, head_dim: int) -> float:
    """Return the factor of the scores."""
    if not settings.switch("scale_attn_weights", default=True):
        return 1.0
    power = -1.0 if settings.switch("scale_qk_dot_by_d", "mup_scale_qk_dot_by_d", default=False) else -0.5
    return float(head_dim**power)


def _logit_scale(settings: Settings) -> float:
    """Return the factor of the logits: one number in the first Jais, two since."""
    if settings.get("width_scale", default=None) is not None:
        return settings.number("width_scale", default=1.0)
    return settings.number("mup_output_alpha", default=1.0) * settings.number("mup_width_scale", default=1.0)


def _stretching(settings: Settings) -> float:
    """Return what distances are divided by, in models stretched to longer texts than they were trained with."""
    scaling = settings.part("alibi_scaling")
    if scaling.get("train_seq_len", default=None) is not None:
        raise scaling.refuse("train_seq_len", "null", "slopes that depend on the text's length are not supported")
    return scaling.number("factor", default=1.0)
