"""``attn_implementation="alibi"``: attention with ALiBi for every model of ``transformers`` that uses its registry.

The mask function is called once per forward pass; the model passes its result to every layer:

- None: each row is one sequence without padding;
- booleans ``[batch, 1, 1, kv_len]``, False at padding;
- integers ``[batch, 1, 1, kv_len]``, the number of each token's sequence in packed rows, 0 at padding;
- booleans ``[batch, 1, q_len, kv_len]``, for a pattern that has no shorter form.

Keys beyond the end of a mask are unused slots of a static cache.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, masking_utils
from transformers.masking_utils import causal_mask_function, sdpa_mask

from alibi_torch._attention import attention
from alibi_torch._internals import is_unreadable

try:
    from transformers.utils.output_capturing import _active_collector
except ImportError:
    _active_collector = None

NAME = "alibi"
OTHER_SCORES = ("position_bias", "softcap", "s_aux", "cache")  # arguments that change scores, or hold paged keys


def alibi_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Return ``softmax(scaling * query @ key.mT - slopes * |i - j|) @ value``, and the weights if requested.

    Slopes are ``alibi_slopes`` and ``alibi_future_slopes`` of the layer's config, or the canonical slopes.
    Cross-attention has no distances and gets no bias. Output or dropout of weights needs dense attention. The mask has
    one of the forms above, or holds floating numbers to add to the scores. In an encoder, ``position_ids`` that restart
    begin a new sequence.

    Returns:
        ``[batch, q_len, num_heads, head_dim]``, and weights ``[batch, num_heads, q_len, kv_len]`` or None.

    Raises:
        NotImplementedError: If the layer modifies its scores in an unsupported way.
        ValueError: If a model converted by ``with_alibi`` was reloaded without it, or a shape is wrong.
    """
    for name in OTHER_SCORES:
        if kwargs.get(name) is not None:
            raise NotImplementedError(
                f"{name} must be None with attn_implementation='alibi', got a {type(module).__name__} that has it; use "
                "'eager' or 'sdpa'"
            )
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    position_ids, options = kwargs.get("position_ids"), {"scale": scaling, "dropout": dropout}
    if is_cross_attention(module, is_causal):
        # Cross-attention has no positions: slopes of 0.
        slopes: Any = torch.zeros(query.shape[1], device=query.device)
        is_causal, position_ids = False, None
    else:
        slopes, options["future_slopes"] = _slopes_of(module, query, is_causal)
        if not is_causal and query.shape[2] != key.shape[2]:
            raise ValueError(
                f"key must be as long as query, {query.shape[2]}, in attention in both directions, got {key.shape[2]} "
                f"in a {type(module).__name__}; attention to another sequence has no distances"
            )
    # Unused slots of a static cache; a mask without the queries' own keys is no such mask, and is refused below.
    kv_len = 1 if attention_mask is None else attention_mask.shape[-1]
    if kv_len != 1 and query.shape[2] <= kv_len < key.shape[2]:
        key, value = (x[:, :, :kv_len] for x in (key, value))
    options |= _mask_options(attention_mask, is_causal, query, key, position_ids)
    options["return_weights"] = _wants_weights(module, kwargs.get("output_attentions"))
    result: Any = attention(query, key, value, slopes, **options)
    result, weights = result if options["return_weights"] else (result, None)
    return result.transpose(1, 2).contiguous(), weights


def alibi_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    device: Any = "cpu",
    use_vmap: bool = False,
    **kwargs: Any,
) -> Tensor | None:
    """Return the mask of a forward pass, in the shortest form listed above.

    Arguments are those of ``transformers.masking_utils.sdpa_mask``, which makes the full form for all other patterns:
    sliding windows, chunks, bidirectional image tokens.
    """
    pattern, sequences = (None, None) if use_vmap else _pattern_of(mask_function)
    has_room, both_directions = False, pattern == "bidirectional" or "allow_is_bidirectional_skip" in kwargs
    if isinstance(q_offset, Tensor) and is_unreadable(q_offset):
        pattern = None  # under a compiler, the filled length is not known yet
    elif not both_directions:
        start = int(q_offset) if isinstance(q_offset, Tensor) else q_offset  # int() would fix a symbolic length
        filled = start + q_length - kv_offset
        if filled == 1 < kv_length:  # a mask of one key could be a caller's mistake, which broadcasts
            pattern = None
        else:
            has_room, kv_length = filled < kv_length, min(filled, kv_length)
    if pattern is None:
        kwargs |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        positions = (batch_size, q_length, kv_length, q_offset, kv_offset)
        return sdpa_mask(*positions, mask_function, attention_mask, device=device, use_vmap=use_vmap, **kwargs)
    if sequences is not None:
        return (1 + sequences)[:, None, None, :]
    if attention_mask is not None:
        text = attention_mask[:, kv_offset : kv_offset + kv_length]  # [batch, kv_length]
        if text.shape[1] < kv_length:
            raise ValueError(
                f"attention_mask must have all {kv_offset + kv_length} tokens so far, got {tuple(attention_mask.shape)}"
            )
        if has_room or is_unreadable(text) or not bool(text.all()):
            return text[:, None, None, :]
    return torch.ones(batch_size, 1, 1, kv_length, dtype=torch.bool, device=device) if has_room else None


def is_cross_attention(module: nn.Module, is_causal: bool) -> bool:
    """Whether a layer is cross-attention, which models of ``transformers`` mark in one of three ways."""
    is_cross = "Cross" in type(module).__name__ or getattr(module, "is_cross_attention", False)
    return is_cross or (not is_causal and getattr(module, "is_decoder", False))


def _slopes_of(module: Any, query: Tensor, is_causal: bool) -> tuple[Tensor | None, Tensor | None]:
    """Return a layer's slopes and future slopes, ``[num_heads]``; None for the canonical slopes."""
    config, num_heads = module.config, getattr(module.config, "num_attention_heads", None)
    if getattr(config, "position_embedding_type", None) == NAME and not getattr(module, "has_alibi_alone", False):
        raise ValueError(
            f"model must be given to with_alibi after it is loaded, got a {type(config).__name__} whose positions "
            "with_alibi took out, and a model that has new ones; call with_alibi(model)"
        )
    if isinstance(num_heads, int) and num_heads != query.shape[1] and not config.is_encoder_decoder:
        raise ValueError(f"query must have {num_heads} heads (config.num_attention_heads), got {query.shape[1]}")
    working = torch.promote_types(query.dtype, torch.float32)
    values = [getattr(config, name, None) for name in ("alibi_slopes", "alibi_future_slopes")]
    slopes = [None if x is None else torch.tensor(x, dtype=working, device=query.device) for x in values]
    return slopes[0], None if is_causal else slopes[1]


def _wants_weights(module: Any, asked: bool | None) -> bool:
    """Return whether the caller requested weights: from the layer's argument, else from the output collector.

    Without the collector they are always computed: slower, and not wrong.
    """
    if asked is not None or _active_collector is None:
        return asked is None or asked
    wanted = _active_collector.get()
    if wanted is None:
        return bool(getattr(module.config, "output_attentions", False))
    return "attentions" in wanted or "cross_attentions" in wanted


def _mask_options(mask: Any, is_causal: bool, query: Tensor, key: Tensor, position_ids: Any) -> dict[str, Any]:
    """Return the arguments of attention that are equivalent to a mask and position ids."""
    if mask is not None and (mask.is_floating_point() or mask.shape[1:3] != (1, 1)):
        # A full mask includes causality.
        return {"is_causal": False, "added_bias" if mask.is_floating_point() else "mask": mask}
    options: dict[str, Any] = {"is_causal": is_causal}
    sequences = None if is_causal else _sequences_of(position_ids, mask, query)
    if sequences is not None:
        return options | {"segment_ids": sequences}
    if mask is None:
        return options
    if mask.dtype != torch.bool:
        return options | {"segment_ids": mask[:, 0, 0]}
    # Compiled decoding with a static cache: the query's position is the last True key.
    if is_causal and query.shape[2] == 1 and is_unreadable(mask):
        options["q_offset"] = key.shape[2] - 1 - mask[:, 0, 0].flip(-1).to(torch.uint8).argmax(-1)
    return options | {"mask": mask}


def _sequences_of(position_ids: Any, mask: Tensor | None, query: Tensor) -> Tensor | None:
    """Return the number of each token's sequence, ``[batch, length]``, 0 at padding; None if no row has several.

    A text token begins a sequence if its position is not greater than that of the text token before it.
    """
    batch, length = query.shape[0], query.shape[2]
    if not isinstance(position_ids, Tensor) or position_ids.ndim != 2:
        return None
    if position_ids.shape[0] not in (1, batch) or position_ids.shape[1] != length:
        shape = tuple(position_ids.shape)
        raise ValueError(f"position_ids must be of shape ({batch}, {length}) (batch or 1, length), got {shape}")
    positions = position_ids.expand(batch, length)
    columns = torch.arange(length, device=positions.device).expand(batch, length)
    text = columns >= 0 if mask is None else (mask[:, 0, 0] != 0).expand(batch, length)
    latest = torch.where(text, columns, -1).cummax(dim=-1).values  # the last text token up to each token
    before = nn.functional.pad(latest[:, :-1], (1, 0), value=-1)
    begins = text & (before >= 0) & (positions <= positions.gather(-1, before.clamp(min=0)))
    if not is_unreadable(begins) and not bool(begins.any()):
        return None
    return torch.where(text, 1 + begins.cumsum(dim=-1), 0)


def _pattern_of(mask_function: Callable[..., Any]) -> tuple[str | None, Tensor | None]:
    """Return "causal" or "bidirectional", and the number of each token's sequence in packed rows; None if unknown."""
    if mask_function is causal_mask_function:
        return "causal", None
    if mask_function is getattr(masking_utils, "bidirectional_mask_function", None):
        return "bidirectional", None
    if torch.compiler.is_compiling():  # closures cannot be inspected
        return None, None
    parts, sequences = [mask_function], None
    while parts:  # the function is their intersection
        part = parts.pop()
        variables = inspect.getclosurevars(part).nonlocals
        if part.__qualname__.startswith("and_masks."):
            parts += variables["mask_functions"]
        elif "packed_sequence_mask" in variables:
            sequences = variables["packed_sequence_mask"]
        elif causal_mask_function not in (part, variables.get("mask_function")):
            return None, None
    return "causal", sequences


def _with_implementation(to_dict: Callable[[PreTrainedConfig], dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Let ``PreTrainedConfig.to_dict``, and so saved configs, name this implementation, which loading then uses."""

    @functools.wraps(to_dict)
    def wrapped(self: PreTrainedConfig) -> dict[str, Any]:
        named = {"attn_implementation": NAME} if getattr(self, "_attn_implementation", None) == NAME else {}
        return to_dict(self) | named

    return wrapped


AttentionInterface.register(NAME, alibi_attention)
AttentionMaskInterface.register(NAME, alibi_mask)
PreTrainedConfig.to_dict = _with_implementation(PreTrainedConfig.to_dict)  # type: ignore[method-assign]
_loaded = PreTrainedConfig.from_dict(PreTrainedConfig(attn_implementation=NAME).to_dict())
if _loaded.to_dict().get("attn_implementation") != NAME:
    warnings.warn(
        f"transformers {transformers.__version__} does not keep attn_implementation='alibi' in saved models: give it "
        "to from_pretrained, or the model computes something else",
        stacklevel=2,
    )
