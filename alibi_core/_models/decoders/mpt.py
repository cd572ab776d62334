"""MPT, as llm-foundry writes it (Replit-code, too) and as ``transformers`` reads it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from alibi_core._contracts import named
from alibi_core._models.config import AlibiConfig
from alibi_core._models.decoders.family import Family, Layout
from alibi_core._models.decoders.settings import Settings
from alibi_core._slopes import slope_values

LAYOUT = Layout(
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
APART = {"attn.Wq": "q", "attn.Wk": "k", "attn.Wv": "v"}  # in place of attn.Wqkv
NORMS = {
    "layernorm": "layer_norm",
    "low_precision_layernorm": "layer_norm",
    "rmsnorm": "rms_norm",
    "low_precision_rmsnorm": "rms_norm",
}
UNKNOWN = "no language model here has it"


def mpt(settings: Settings, contract: str) -> Family:
    """Return what a ``config.json`` says of an MPT.

    ``transformers`` leaves unread ``alibi_bias_max`` and ``logit_scale``, and so does ``contract="model"``.
    """
    attention = settings.part("attn_config")
    if not attention.switch("alibi", default=True):
        raise attention.refuse("alibi", "true", "models with other positions than ALiBi's are not loaded")
    attention.refuse_switches("prefix_lm", "qk_ln", "qk_gn", "rope", advice=UNKNOWN)
    settings.refuse_switches("fuse_norm_attn_norm", advice=UNKNOWN)
    for place, name in ((attention, "attn_logit_softcapping"), (settings, "block_overrides"), (settings, "head_dim")):
        if place.get(name, default=None) is not None:
            raise place.refuse(name, "null", UNKNOWN)
    width = settings.size("d_model", "hidden_size")
    num_heads = settings.heads(width, "n_heads", "num_attention_heads")
    is_trained = contract == "exact"
    bias_max = attention.number("alibi_bias_max", default=8) if is_trained else 8.0
    feed_forward, block = _feed_forward(settings, width)
    if not attention.switch("fused_qkv", default=True):
        block = APART | {name: ours for name, ours in block.items() if name != "attn.Wqkv"}
    has_bias = not settings.switch("no_bias", default=True)
    if settings.switch("attention_bias", default=has_bias) != has_bias:
        raise settings.refuse("attention_bias", f"{has_bias} with no_bias {not has_bias}", UNKNOWN)
    window = attention.get("sliding_window_size", default=-1)
    fields = settings.common(width) | feed_forward | _norm(settings)
    config = AlibiConfig(
        num_layers=settings.size("n_layers", "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=_kv_heads(attention, num_heads),
        bias=has_bias,
        feed_forward_bias=has_bias,
        norm_bias=has_bias,
        slopes=tuple(slope_values(num_heads, bias_max=bias_max, contract="mpt")),
        scale=attention.get("softmax_scale", default=None),
        clip_qkv=attention.get("clip_qkv", default=None) or None,  # 0, too, is none
        window_size=None if window == -1 else window,
        logit_scale=_logit_scale(settings, width) if is_trained else 1.0,
        **fields | {"max_len": settings.size("max_seq_len")},
    )
    return Family("mpt", named("mpt"), config, settings.size("vocab_size"), (replace(LAYOUT, block=block),))


def _feed_forward(settings: Settings, width: int) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the fields of ``AlibiConfig`` for the feed-forward layers, and the names in a block."""
    part = settings.part("ffn_config")
    kind = part.choice("ffn_type", ("mptmlp", "mptglu"), default="mptmlp")
    function = part.part("ffn_act_fn")
    activation = function.activation("name", default="gelu")
    if activation == "gelu" and function.get("approximate", default="none") == "tanh":
        activation = "gelu_tanh"
    hidden = part.size("ffn_hidden_size", default=int(width * settings.number("expansion_ratio", default=4)))
    is_gated = kind == "mptglu"
    block = LAYOUT.block | {"ffn.gate_proj": "gate"} if is_gated else LAYOUT.block
    return {"activation": activation, "gated": is_gated, "feed_forward_dim": hidden}, block


def _norm(settings: Settings) -> dict[str, Any]:
    name = settings.choice("norm_type", NORMS, default="layernorm")
    if NORMS[name] == "rms_norm" and "norm_eps" not in settings.values:
        advice = "versions of llm-foundry that do not write norm_eps compute other norms by that name"
        raise settings.refuse("norm_type", "a layer norm where norm_eps is absent", advice)
    epsilon = settings.number("norm_eps", "layer_norm_epsilon", default=1e-5)
    return {"norm": NORMS[name], "norm_epsilon": epsilon}


def _kv_heads(attention: Settings, num_heads: int) -> int:
    kinds = ("multihead_attention", "multiquery_attention", "grouped_query_attention")
    kind = attention.choice("attn_type", kinds, default=kinds[0])
    if kind == "grouped_query_attention":
        return attention.size("kv_n_heads")
    return 1 if kind == "multiquery_attention" else num_heads


def _logit_scale(settings: Settings, width: int) -> float:
    if settings.get("logit_scale", default=None) == "inv_sqrt_d_model":
        return float(width**-0.5)
    return settings.number("logit_scale", default=1.0)
