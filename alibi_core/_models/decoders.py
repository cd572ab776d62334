"""The catalogue of supported decoders.

Takes the content of a ``config.json``. Returns the shape of a language model, the bias that the family's own code
computes, and the names of its checkpoint's tensors. To add a family, write a function and a line of ``FAMILIES``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from alibi_core._arrays import checks
from alibi_core._models.config import AlibiConfig
from alibi_core._models.families import BY_DISTANCE, Family, Layout, Settings
from alibi_core._slopes import slope_values

UNKNOWN = "no language model here has it"
BY_POSITION = "slopes times positions, in the model's dtype"

# --- Baichuan-13B and Baichuan2-13B, whose checkpoints include their own code. The 7B models have rotary positions.

BAICHUAN = Layout(
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


def baichuan(settings: Settings) -> Family:
    """Return the family of a Baichuan's ``config.json``.

    Baichuan2 divides the rows of its head by their norms, but no entry says so. It is recognised by its vocabulary
    size, or by an entry that only its code writes.
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
    # Baichuan2: only its code writes z_loss_weight.
    is_second = vocab_size == VOCABULARY_OF_2 or "z_loss_weight" in settings.values
    if is_second and config.tied_head:
        raise settings.refuse("tie_word_embeddings", "false", "the rows of Baichuan2's head have norms of 1")
    return Family("baichuan", BY_POSITION, config, vocab_size, replace(BAICHUAN, head_of_unit_rows=is_second))


# --- BLOOM, by the code of ``transformers``.

BLOOM = Layout(
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


def bloom(settings: Settings) -> Family:
    """Return the family of a BLOOM's ``config.json``."""
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
    return Family("bloom", BY_POSITION, config, settings.size("vocab_size"), BLOOM)


# --- Falcon, by the code of ``transformers``.

# BLOOM's names without the norms, whose number varies.
FALCON = replace(
    BLOOM,
    embedding_norm=None,
    block={name: held for name, held in BLOOM.block.items() if not held.endswith("norm")},
)


def falcon(settings: Settings) -> Family:
    """Return the family of a Falcon's ``config.json``."""
    if not settings.switch("alibi", default=False):
        raise settings.refuse("alibi", "true", "Falcon models with rotary positions are not loaded")
    width = settings.size("hidden_size", "n_embed")
    num_heads = settings.heads(width, "num_attention_heads", "n_head")
    grouped = settings.switch("new_decoder_architecture", default=False)
    # Default of transformers: one key/value head.
    num_kv_heads = 1 if settings.switch("multi_query", default=True) else num_heads
    if grouped:
        num_kv_heads = settings.size("num_kv_heads", default=num_heads)
    block, norms = _falcon_block(settings, grouped)
    activation = settings.activation("activation", default="gelu")
    has_bias = settings.switch("bias", default=False)
    # Falcon divides the sum of scores and bias by sqrt(head_dim).
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
    layout = replace(FALCON, block=norms | FALCON.block)
    return Family("falcon", "slopes times positions, in bfloat16", config, settings.size("vocab_size"), layout)


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


# --- Jais and BTLM, whose checkpoints include their own code: GPT-2 with ALiBi, SwiGLU, and the scales of muP.

JAIS_BLOCK = {
    "ln_1": "attention_norm",
    "attn.c_attn": "q k v",
    "attn.c_proj": "out",
    "ln_2": "feed_forward_norm",
    "mlp.c_fc": "up",
    "mlp.c_proj": "down",
}


def jais(settings: Settings) -> Family:
    """Return the family of a Jais or BTLM's ``config.json``."""
    if settings.get("position_embedding_type", default="learned") != "alibi":
        raise settings.refuse("position_embedding_type", "'alibi'", "models with learned positions are not loaded")
    settings.refuse_switches("scale_attn_by_inverse_layer_idx", "add_cross_attention", advice=UNKNOWN)
    width = settings.size("n_embd", "hidden_size")
    num_heads = settings.heads(width, "n_head", "num_attention_heads")
    is_gated = settings.values.get("activation_function") == "swiglu"
    activation = "silu" if is_gated else settings.activation("activation_function", default="gelu_new")
    # muP divides scores by head_dim, not by its square root.
    power = -1.0 if settings.switch("scale_qk_dot_by_d", "mup_scale_qk_dot_by_d", default=False) else -0.5
    scale = float((width // num_heads) ** power) if settings.switch("scale_attn_weights", default=True) else 1.0
    alpha = settings.number("mup_output_alpha", default=1.0)
    scaling = settings.part("alibi_scaling")
    if scaling.get("train_seq_len", default=None) is not None:
        raise scaling.refuse("train_seq_len", "null", "slopes that depend on the text's length are not supported")
    stretching = scaling.number("factor", default=1.0)  # above 1 in models stretched to longer texts than in training
    config = AlibiConfig(
        num_layers=settings.size("n_layer", "num_hidden_layers"),
        num_heads=num_heads,
        bias=True,
        activation=activation,
        gated=is_gated,
        slopes=tuple(slope / stretching for slope in slope_values(num_heads)),
        scale=scale,
        # One entry in the first Jais, the product of two entries in later ones.
        logit_scale=settings.number("width_scale", default=alpha * settings.number("mup_width_scale", default=1.0)),
        **settings.common(width, settings.size("n_inner", default=4 * width))
        | {
            "max_len": settings.size("n_positions", "max_position_embeddings"),
            "embedding_scale": settings.number("embeddings_scale", "mup_embeddings_scale", default=1.0),
        },
    )
    layout = Layout(
        embedding="transformer.wte",
        blocks="transformer.h",
        block=JAIS_BLOCK | {"mlp.c_fc2": "gate"} if is_gated else JAIS_BLOCK,
        norm="transformer.ln_f",
        ignored=(r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias",),  # the causal mask
        stored_slopes="transformer.relative_pe.slopes",
        is_transposed=True,
    )
    return Family(settings.values["model_type"], BY_DISTANCE, config, settings.size("vocab_size"), layout)


# --- MPT, by the configs of llm-foundry (Replit-code, too) and the code of ``transformers``.

MPT = Layout(
    embedding="transformer.wte",
    blocks="transformer.blocks",
    block={
        "norm_1": "attention_norm",
        "attn.Wqkv": "q k v",
        "attn.out_proj": "out",
        "norm_2": "feed_forward_norm",
        "ffn.up_proj": "up",
        "ffn.down_proj": "down",
    },
    norm="transformer.norm_f",
)
MPT_APART = {"attn.Wq": "q", "attn.Wk": "k", "attn.Wv": "v"}  # in place of attn.Wqkv
MPT_NORMS = {
    "layernorm": "layer_norm",
    "low_precision_layernorm": "layer_norm",
    "rmsnorm": "rms_norm",
    "low_precision_rmsnorm": "rms_norm",
}


def mpt(settings: Settings) -> Family:
    """Return the family of an MPT config; ``transformers`` ignores ``alibi_bias_max`` and ``logit_scale``."""
    attention = settings.part("attn_config")
    if not attention.switch("alibi", default=True):
        raise attention.refuse("alibi", "true", "models with other positions than ALiBi's are not loaded")
    attention.refuse_switches("prefix_lm", "qk_ln", "qk_gn", "rope", advice=UNKNOWN)
    settings.refuse_switches("fuse_norm_attn_norm", advice=UNKNOWN)
    absent = ("block_overrides", "head_dim", "final_logit_softcapping", "residual_modification")
    for place, name in ((attention, "attn_logit_softcapping"), *((settings, name) for name in absent)):
        if place.get(name, default=None) is not None:
            raise place.refuse(name, "null", UNKNOWN)
    tuning = attention.part("attn_temperature_tuning")
    if tuning.get("attn_scale", default=0) != 0:
        raise tuning.refuse("attn_scale", "0", UNKNOWN)
    width = settings.size("d_model", "hidden_size")
    num_heads = settings.heads(width, "n_heads", "num_attention_heads")
    bias_max = attention.number("alibi_bias_max", default=8)
    feed_forward, block = _mpt_feed_forward(settings, width)
    if not attention.switch("fused_qkv", default=True):
        # Separate matrices for queries, keys and values.
        block = MPT_APART | {name: ours for name, ours in block.items() if name != "attn.Wqkv"}
    has_bias = not settings.switch("no_bias", default=True)
    if settings.switch("attention_bias", default=has_bias) != has_bias:
        raise settings.refuse("attention_bias", f"{has_bias} with no_bias {not has_bias}", UNKNOWN)
    clips = attention.get("clip_qkv", default=0) != 0  # both null and 0 mean no clipping
    kinds = {"multihead_attention": num_heads, "multiquery_attention": 1, "grouped_query_attention": None}
    num_kv_heads = kinds[attention.choice("attn_type", kinds, default="multihead_attention")]
    if settings.get("logit_scale", default=None) == "inv_sqrt_d_model":
        logit_scale = float(width**-0.5)
    else:
        logit_scale = settings.number("logit_scale", default=1.0)
    window = attention.get("sliding_window_size", default=-1)
    if window != -1:
        checks.non_negative_int(attention.called("sliding_window_size"), window)
    fields = settings.common(width) | feed_forward | _mpt_norm(settings)
    config = AlibiConfig(
        num_layers=settings.size("n_layers", "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=attention.size("kv_n_heads") if num_kv_heads is None else num_kv_heads,
        bias=has_bias,
        feed_forward_bias=has_bias,
        norm_bias=has_bias,
        slopes=tuple(slope_values(num_heads, bias_max=bias_max, contract="mpt")),
        scale=attention.number("softmax_scale", default=None),
        clip_qkv=attention.number("clip_qkv", default=None) if clips else None,
        window_size=None if window == -1 else window,
        logit_scale=logit_scale,
        **fields | {"max_len": settings.size("max_seq_len")},
    )
    bias = "slopes times positions from the last key, in float32"
    return Family("mpt", bias, config, settings.size("vocab_size"), replace(MPT, block=block))


def _mpt_feed_forward(settings: Settings, width: int) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the fields of ``AlibiConfig`` for the feed-forward layers, and ``Layout.block``."""
    part = settings.part("ffn_config")
    kind = part.choice("ffn_type", ("mptmlp", "mptglu"), default="mptmlp")
    function = part.part("ffn_act_fn")
    activation = function.activation("name", default="gelu")
    if activation == "gelu" and function.get("approximate", default="none") == "tanh":
        activation = "gelu_tanh"
    hidden = part.size("ffn_hidden_size", default=int(width * settings.number("expansion_ratio", default=4)))
    is_gated = kind == "mptglu"
    block = MPT.block | {"ffn.gate_proj": "gate"} if is_gated else MPT.block
    return {"activation": activation, "gated": is_gated, "feed_forward_dim": hidden}, block


def _mpt_norm(settings: Settings) -> dict[str, Any]:
    name = settings.choice("norm_type", MPT_NORMS, default="layernorm")
    if MPT_NORMS[name] == "rms_norm" and "norm_eps" not in settings.values:
        advice = "versions of llm-foundry that do not write norm_eps compute other norms by that name"
        raise settings.refuse("norm_type", "a layer norm where norm_eps is absent", advice)
    epsilon = settings.number("norm_eps", "layer_norm_epsilon", default=1e-5)
    return {"norm": MPT_NORMS[name], "norm_epsilon": epsilon}


# --- All families, by the ``model_type`` of their configs.

FAMILIES: dict[str, Callable[[Settings], Family]] = {
    "baichuan": baichuan,
    "bloom": bloom,
    "btlm": jais,
    "falcon": falcon,
    "jais": jais,
    "mpt": mpt,
}


def family_of(settings: Settings) -> Family:
    """Return the family of a decoder's ``config.json``."""
    model_type = settings.values.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        known = ", ".join(map(repr, FAMILIES))
        raise settings.refuse("model_type", f"one of {known}", "checkpoints of no other model are known")
    return FAMILIES[model_type](settings)
