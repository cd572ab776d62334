"""Hints for argument names of other libraries: the error tells the name that is used here."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any

from alibi_core._arrays.libraries import Function

HEADS = ("num_heads", "slopes, which may be the number of heads")
# Each hint begins with the name of an argument. The error gives the first hint whose argument the function has.
HINTS: dict[str, str | tuple[str, ...]] = {
    "alibi_slopes": "slopes",
    "attention_mask": ("mask, which takes it as it is, 1 for text", "key_padding_mask: attention_mask == 0"),
    "attn_bias": "added_bias, floating numbers that are added beside ALiBi's own",
    "attn_mask": "mask, booleans, True where a query may look; leave out ALiBi's own bias, which attention adds",
    "cache": "caches, one a block, from transformer.make_caches",
    "causal": "is_causal",
    "cu_seqlens": "segment_ids, the number of each token's text",
    "d_model": "embed_dim",
    "encoder_hidden_states": "context, of which keys and values are made",
    "heads": HEADS,
    "input_ids": "tokens",
    "intermediate_size": "feed_forward_dim",
    "key_padding_mask": "mask: ~key_padding_mask, True where a query may look",
    "mask": "attn_mask, True where a query must not look",
    "n_heads": HEADS,
    "nhead": HEADS,
    "num_attention_heads": HEADS,
    "num_heads": HEADS,
    "output_attentions": "return_weights=True, which returns a pair",
    "past_key_value": "cache, from make_cache",
    "past_key_values": "caches, from make_caches",
    "position_ids": ("positions, or leave it out for texts without gaps", "q_offset, the position of the first query"),
    "query_length": "q_len",
    "sliding_window": "window_size, in tokens: keys that are farther are masked",
    "softmax_scale": "scale",
    "token_type_ids": "token_types",
}


def explains_keywords(function: Function) -> Function:
    """Return the function with better errors for names in :data:`HINTS` and for values without names.

    Its signature is unchanged.
    """
    parameters = inspect.signature(function).parameters
    known = frozenset(parameters)
    in_order = [x.name for x in parameters.values() if x.kind is x.POSITIONAL_OR_KEYWORD]

    @functools.wraps(function)
    def checked(*values: Any, **options: Any) -> Any:
        if not known.issuperset(options):
            _check(function, known, options, values)
        if len(values) > len(in_order):
            named = ", ".join(x for x in parameters if x not in in_order)
            taken = ", ".join(x for x in in_order if x != "self")
            raise TypeError(f"{_called(function, values)}() takes {taken} by position; name the others: {named}")
        return function(*values, **options)

    # PyTorch compiles at most eight programs of a code object, which all functions here would share.
    checked.__code__ = checked.__code__.replace(co_name=function.__name__)  # type: ignore[attr-defined]
    return checked  # type: ignore[return-value]


def check_keywords(function: Callable[..., Any], options: dict[str, Any]) -> None:
    """Check that ``function`` takes these arguments, for a wrapper that passes them on."""
    _check(function, frozenset(inspect.signature(function).parameters), options)


def _check(
    function: Callable[..., Any], known: frozenset[str], options: dict[str, Any], values: tuple[Any, ...] = ()
) -> None:
    for name in options:
        if name not in known:
            hints = HINTS.get(name, ())
            hints = (hints,) if isinstance(hints, str) else hints
            advice = next((f"; give {hint}" for hint in hints if re.split(r"\W", hint)[0] in known), "")
            raise TypeError(f"{_called(function, values)}() got an unexpected keyword argument {name!r}{advice}")


def _called(function: Callable[..., Any], values: tuple[Any, ...]) -> str:
    """Return the name of a function, or of a method with the class of its object, as the caller wrote it."""
    owner, _, method = function.__qualname__.rpartition(".")
    owner = type(values[0]).__name__ if owner and values else owner  # not the base class of all backends
    return f"{owner}.{method}".removesuffix(".__init__").removesuffix(".__call__").removeprefix(".")
