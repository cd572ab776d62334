"""Arguments by the names that other libraries have for them: the error tells their name, and form, in this one."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Hint:
    """What a foreign argument is called here."""

    ours: str
    how: str  # what to give
    home: str = "attention"  # what takes it, for the sake of functions that do not


_HEADS_FIRST = "[:, None, None, :]"
_PADDING = f"mask=~key_padding_mask{_HEADS_FIRST}, True where a query may look"
_ENDS = f"mask=(positions < lengths[:, None]){_HEADS_FIRST}; padding behind a text needs none under a causal mask"
_WEIGHTS = "return_weights=True, which returns a pair and takes memory for all weights"
_WEIGHTS_BY_HEAD = f"{_WEIGHTS}; they come by head, and their mean over axis 1 is the average"
_ADDED = Hint("added_bias", "added_bias, floating, which is added to the scores beside ALiBi's own")
_CACHE = Hint("cache", "cache, from make_cache; models take one a block as caches", "AlibiAttention")
_CONTEXT = Hint("context", "context, of which keys and values are made", "AlibiAttention")
_POSITIONS = Hint("q_offset", "q_offset, the position of the first query; keys have positions 0, 1, ...")
_PYTORCHS = "alibi_torch.AlibiMultiheadAttention"

# By who takes it and its name here, for those that mean the same under another name.
_RENAMED: dict[str, dict[str, tuple[str, ...]]] = {
    "attention": {
        "is_causal": ("causal",),
        "dropout_key": ("dropout_rng",),
        "slopes": ("alibi_slopes",),
    },
    "AlibiAttention": {
        "embed_dim": ("hidden_size", "d_model", "dims", "dim", "n_embd", "model_dim"),
        "num_heads": ("num_attention_heads", "n_heads", "n_head", "nhead", "heads"),
        "num_kv_heads": ("num_key_value_heads", "n_kv_heads", "kv_heads", "attn_kv_heads"),
        "learnable_slopes": ("learned_slopes", "trainable_slopes"),
    },
    "AlibiConfig": {
        "num_layers": ("n_layers", "n_layer", "num_hidden_layers", "depth", "layers"),
        "feed_forward_dim": ("intermediate_size", "d_ff", "ffn_dim", "dim_feedforward", "n_inner", "mlp_dim"),
        "expansion_factor": ("mlp_ratio", "ff_mult"),
        "activation": ("hidden_act", "activation_function"),
        "norm_epsilon": ("layer_norm_eps", "norm_eps", "rms_norm_eps", "layer_norm_epsilon"),
        "tied_head": ("tie_word_embeddings",),
    },
    "AlibiLanguageModel": {"tokens": ("input_ids",)},
}
_TABLE = {
    ("key_padding_mask", "src_key_padding_mask"): Hint("mask", _PADDING),
    ("padding_mask", "key_mask"): Hint("mask", f"mask=padding_mask{_HEADS_FIRST}, True where a query may look"),
    ("attn_mask", "src_mask"): Hint(
        "mask",
        "mask, booleans, True where a query may look (nn.MultiheadAttention has them the other way round); an ALiBi "
        "bias is left out, as attention adds it, and other numbers to add to scores are added_bias of attention",
    ),
    ("attention_mask",): Hint("mask", f"mask=(attention_mask == 1){_HEADS_FIRST}, of a tokenizer's ones and zeros"),
    ("need_weights", "output_attentions", "return_attn_probs"): Hint("return_weights", _WEIGHTS),
    ("average_attn_weights",): Hint("return_weights", _WEIGHTS_BY_HEAD),
    ("attn_bias", "attention_bias", "position_bias", "bias"): _ADDED,
    ("dropout_p", "dropout_rate", "attn_dropout", "attention_dropout", "hidden_dropout", "resid_pdrop"): Hint(
        "dropout", "dropout, a probability"
    ),
    ("deterministic",): Hint("dropout", "dropout=0.0; a layer's is off after eval()"),
    ("softmax_scale", "sm_scale", "scaling"): Hint("scale", "scale, a number"),
    ("scheme", "bias_max", "alibi_bias_max"): Hint(
        "slopes", "slopes, made by alibi_core.slopes(num_heads, scheme=..., bias_max=...)"
    ),
    ("symmetric", "bidirectional", "non_causal"): Hint("is_causal", "is_causal=False to see keys on both sides"),
    ("block_mask",): Hint(
        "mask", "is_causal, window_size and segment_ids, or mask, booleans, for what these do not say"
    ),
    ("kv_lengths", "key_value_seq_lengths", "seq_lens", "seqlens", "context_lens", "cache_seqlens"): Hint(
        "mask", _ENDS
    ),
    ("enable_gqa",): Hint("key", "nothing: key and value may have fewer heads as they are"),
    ("window", "sliding_window", "local_window_size"): Hint(
        "window_size", "window_size, in tokens: what is farther is masked"
    ),
    ("cu_seqlens", "cu_seqlens_q", "cu_seqlens_k"): Hint("segment_ids", "segment_ids, the number of each token's text"),
    ("position_ids", "cache_position", "offset", "positions"): _POSITIONS,
    ("past_key_value", "past_key_values", "layer_past", "kv_cache", "use_cache", "cache"): _CACHE,
    ("encoder_hidden_states", "key_value_states", "key", "value"): _CONTEXT,
    ("max_seq_len", "max_position_embeddings", "n_positions", "block_size", "seq_len", "context_length"): Hint(
        "max_len", "max_len, a record of the length in training, or nothing: no length is too long", "AlibiConfig"
    ),
    ("use_bias", "qkv_bias"): Hint("bias", "bias, for the four projections", "AlibiAttention"),
    ("batch_first", "kdim", "vdim"): Hint("batch_first", "arguments of nn.MultiheadAttention", _PYTORCHS),
    ("lengths",): Hint("lengths", "lengths, how many of the new tokens of each row count", "KVCache"),
    ("vocab_size", "num_tokens"): Hint("vocab_size", "vocab_size, beside the config", "AlibiLanguageModel"),
    ("labels", "targets"): Hint(
        "tokens", "tokens, and the labels to a loss of the logits that come back, such as cross_entropy", "a model"
    ),
    ("max_length", "max_tokens"): Hint("max_new_tokens", "max_new_tokens, beside the prompt's", "generate"),
    ("do_sample",): Hint("temperature", "temperature: 0 takes the likeliest token, 1 draws", "generate"),
}
_TABLE |= {names: Hint(ours, ours, home) for home, known in _RENAMED.items() for ours, names in known.items()}
HINTS = {name: hint for names, hint in _TABLE.items() for name in names}
_COUNT = "give slopes, which may be the number of heads"
_NO_PADDING = "the prompts of a call have one length, without padding; those of another length need a call of their own"
_OF_FUNCTION = {  # what is to be said in one function alone
    ("encode", "attention_mask"): "give mask=attention_mask",
    **{(of, "num_heads"): _COUNT for of in ("attention", "bias", "key_bias", "bias_from_positions")},
    ("attention", "lengths"): f"give {_ENDS}",
    **{("attend", name): "give key and value to append, before" for name in ("key", "value")},
    ("attend", "is_causal"): "attention to a cache is causal",
    ("attend", "q_offset"): "queries are of the last tokens that the cache holds",
    **{
        (call, name): "give it to the layer, or to the model's AlibiConfig, when that is made"
        for call in ("forward", "__call__")
        for name in ("is_causal", "slopes", "scale", "window_size")
    },
    **{("bias", name): "give q_len, and kv_len for another number of keys" for name in ("length", "seq_len")},
    ("bias", "segment_ids"): "bias_from_positions takes positions, with q_segment_ids and kv_segment_ids",
    ("bias_from_positions", "segment_ids"): "give q_segment_ids and kv_segment_ids",
    **{("generate", name): _NO_PADDING for name in ("attention_mask", "mask", "lengths")},
}


def explains_keywords(function: Function) -> Function:
    """Return a function whose errors tell an argument's name here, of another library's, and what is to have a name.

    Its signature is that of ``function``.
    """
    parameters = inspect.signature(function).parameters
    known = frozenset(parameters)
    most = sum(x.kind is x.POSITIONAL_OR_KEYWORD for x in parameters.values())

    @functools.wraps(function)
    def checked(*values: Any, **options: Any) -> Any:
        if most < len(values) and most < len(known):
            _refuse_surplus(function, list(parameters), most, len(values))
        if not known.issuperset(options):
            _check(function, known, options)
        return function(*values, **options)

    return checked  # type: ignore[return-value]


def check_keywords(function: Callable[..., Any], options: dict[str, Any]) -> None:
    """Check that a function takes these arguments, for one that hands them on."""
    _check(function, frozenset(inspect.signature(function).parameters), options)


def _check(function: Callable[..., Any], known: frozenset[str], options: dict[str, Any]) -> None:
    for name in options:
        if name not in known:
            message, hint = f"{_called(function)}() got an unexpected keyword argument {name!r}", HINTS.get(name)
            if (function.__name__, name) in _OF_FUNCTION:
                message += f"; {_OF_FUNCTION[function.__name__, name]}"
            elif hint is not None:
                message += f"; {'' if hint.ours in known else f'{hint.home} takes it: '}give {hint.how}"
            elif near := difflib.get_close_matches(name, known - {"self"}, n=1, cutoff=0.8):
                message += f"; give {near[0]}, if that is meant"
            raise TypeError(message)


def _refuse_surplus(function: Callable[..., Any], names: list[str], most: int, got: int) -> None:
    own = names[0] == "self"
    message = (
        f"{_called(function)}() must get arguments after {names[most - 1]} by name, got {got - own} without; these are "
        f"{', '.join(names[most:])}"
    )
    if "context" in names:
        message += "; keys and values are made of x, or of context"
    elif function.__name__ == "attend":
        message += "; give key and value to append, before"
    raise TypeError(message)


def _called(function: Callable[..., Any]) -> str:
    return function.__qualname__.removesuffix(".__init__").removesuffix(".__call__")
