"""The base models of accelerated models; they read the arguments of a pass once, for all layers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from alibi_torch._internals import is_recorded, is_unreadable
from alibi_torch.transformers._cache import AlibiCache, unknown_cache
from alibi_torch.transformers._layers import AcceleratedAttention
from alibi_torch.transformers._names import by_name, cache_of, positional_names, with_own_cache_name
from alibi_torch.transformers._state import State
from alibi_torch.transformers._tokens import Tokens, carried, carrier, is_carrier, starts_of


class AcceleratedModel:
    """A base model whose attention layers use this library.

    Each family is a module of the name that ``FAMILIES`` gives, with its base model as ``MODEL``.
    """

    alibi_own: type[Any]  # the original class of transformers
    alibi_family: type[Any]  # the class of transformers that the base model and the models around it derive from
    alibi_layer: type[AcceleratedAttention]  # the accelerated class of its attention layers
    alibi_layers: tuple[Any, ...]
    alibi_state: State  # shared with the layers

    def __init_subclass__(cls) -> None:
        cls.__name__ = cls.alibi_own.__name__  # transformers saves a model's class name in its config

    @staticmethod
    def refusal(base: Any, layers: tuple[Any, ...]) -> str | None:
        """Return why a setting of an original base model or of its layers is not supported; None if all are."""
        return None

    @staticmethod
    def bias_max(base: Any) -> float:
        """Return the ``bias_max`` of an original base model's slopes."""
        return 8.0

    @staticmethod
    def switch(base: Any, is_own: bool) -> None:
        """Change what a base model stores for its own code to compute its bias, or not."""

    @staticmethod
    def prepare(outer: Any) -> None:
        """Prepare a model around a base model, such as ``BloomForCausalLM``."""
        if "alibi_hook" not in vars(outer):  # still there if only the base model was restored
            hook = functools.partial(prepare_call, names=positional_names(type(outer).forward))
            outer.alibi_hook = outer.register_forward_pre_hook(hook, with_kwargs=True)
            outer.create_masks_for_generate = padding_of_all_places

    def _run_own(self, given: dict[str, Any]) -> Any:
        return self.alibi_own.forward(self, **given)


def model_forward(own: type[Any]) -> Callable[..., Any]:
    """Return the ``forward`` of an accelerated base model: the original, with a mask that carries the tokens."""
    names = positional_names(own.forward)

    @functools.wraps(own.forward)
    def forward(self: AcceleratedModel, *args: Any, **kwargs: Any) -> Any:
        state, given = self.alibi_state, with_own_cache_name(names, by_name(names, args, kwargs))
        mask = given.get("attention_mask")
        # prepare_call of an outer model may have read the tokens already.
        tokens = carried(mask, state.tokens) if is_carrier(mask) else read_tokens(self, given)
        if isinstance(tokens, str):
            state.count(self, tokens)
            return self._run_own(given)
        if tokens.sequences is not None and not is_unreadable(tokens.sequences):
            if given.get("use_cache"):
                raise ValueError("use_cache must be False where position_ids pack several sequences into a row")
            given["use_cache"] = False
        given["attention_mask"] = carrier(tokens, embedded(given).device)
        state.count(self, None)
        state.tokens = tokens
        try:
            return own.forward(self, **given)
        finally:
            state.tokens = None

    return forward


# --- Reading the arguments of a pass --------------------------------------------------------------------------------


def embedded(given: dict[str, Any]) -> Any:
    """Return the tokens of a call, ``[batch, length, ...]``, from its arguments by name."""
    return given.get("inputs_embeds") if given.get("input_ids") is None else given["input_ids"]


def read_tokens(base: Any, given: dict[str, Any]) -> Tokens | str:
    """Return the tokens of a call from its arguments; or the reason why the library does not compute the call.

    The reason is a sentence that begins with the name of an argument.
    """
    inputs, mask, cache = embedded(given), given.get("attention_mask"), cache_of(given)
    if given.get("use_cache") is False and isinstance(cache, AlibiCache):
        raise ValueError(
            "use_cache must be True with an AlibiCache, got False (MptConfig's default): generate would send it "
            "the whole text at each token"
        )
    reason = _reason_for_own_code(base, given, inputs, cache)
    if reason is not None:
        return reason
    batch, q_len = inputs.shape[:2]
    past = _length_of(cache)
    places = cache.get_mask_sizes(q_len, 0)[0] if cache is not None and cache.is_compileable else None
    # A compiled call cannot read the length of a static cache, so it attends to all slots.
    kv_len = places if isinstance(past, Tensor) else past + q_len
    if mask is not None:
        if not isinstance(mask, Tensor):
            return f"attention_mask must be a tensor, got {type(mask).__name__}"
        # Lengths may be symbols of torch.compile, so compare them one by one, not with `in`.
        if mask.ndim != 2 or mask.shape[0] != batch or (mask.shape[1] != places and mask.shape[1] != kv_len):
            expected = f"({batch}, {places or kv_len})"
            return f"attention_mask must be of shape {expected} (batch, tokens so far), got {tuple(mask.shape)}"
        mask = mask[:, :kv_len]
        if not (is_unreadable(mask) or mask.requires_grad) and bool((mask == 1).all()):
            mask = None
    starts, position_ids = None, given.get("position_ids")
    if position_ids is not None and q_len > 1:
        starts = starts_of(position_ids, batch, q_len, past, None if mask is None else mask[:, kv_len - q_len :])
    return Tokens.read(past, kv_len, mask, starts)


def _length_of(cache: Any) -> Any:
    """Return the number of cached tokens: an int, or under a compiler possibly a tensor."""
    past = 0 if cache is None else cache.get_seq_length()
    if not torch.compiler.is_compiling():
        return int(past)
    return past.clone().reshape(()) if isinstance(past, Tensor) else past  # the cache updates its counter in place


def _reason_for_own_code(base: Any, given: dict[str, Any], inputs: Any, cache: Any) -> str | None:
    """Return why the library does not compute a call, whatever its mask is; None if nothing is in the way."""
    if not isinstance(inputs, Tensor) or inputs.ndim < 2:
        return "input_ids or inputs_embeds must be a tensor of shape (batch, tokens, ...)"
    weights = given.get("output_attentions")
    if getattr(base.config, "output_attentions", False) if weights is None else weights:
        return "output_attentions must be False, as the library stores no attention weights, got True"
    dropped = max([0.0, *[layer.dropped() for layer in base.alibi_layers]])
    if dropped > 0:
        return f"dropout of attention weights must be 0 or off, as no weights are stored, got {dropped}"
    if not getattr(base.config, "is_causal", True):
        return "config.is_causal must be True, got False"
    if is_recorded(inputs):
        return "recorder must be torch.compile or torch.export, as others keep what is chosen for one call's values"
    if cache is not None and (name := unknown_cache(cache)) is not None:
        return f"the cache must be a DynamicCache, a StaticCache or an AlibiCache, got {name}"
    return None


# --- Models around a base model -------------------------------------------------------------------------------------


def prepare_call(outer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], names: tuple[str, ...]) -> Any:
    """Rename the cache argument, and read sequences from ``position_ids`` into the mask: a pre-hook of ``forward``.

    BLOOM and MPT do not pass ``position_ids`` to their base model.
    """
    base, kwargs = outer.base_model, with_own_cache_name(names, kwargs)
    given = by_name(names, args, kwargs)
    inputs = embedded(given)
    is_packed = given.get("position_ids") is not None and isinstance(inputs, Tensor) and inputs.shape[1] > 1
    if not is_packed or not isinstance(base, AcceleratedModel) or "attention_mask" not in names:
        return args, kwargs
    tokens = read_tokens(base, given)
    if not isinstance(tokens, Tokens) or tokens.sequences is None:
        return args, kwargs
    base.alibi_state.tokens = tokens
    return (), given | {"attention_mask": carrier(tokens, inputs.device)}


def padding_of_all_places(attention_mask: Tensor | None, **given: Any) -> Tensor | None:
    """Return the padding mask for all slots of a static cache; replaces ``create_masks_for_generate``.

    Its shape is the same in every step, as compiled decoding requires, and no mask of queries times slots is formed.
    """
    if attention_mask is None or attention_mask.ndim != 2:
        return attention_mask
    places = cache_of(given).get_mask_sizes(1, 0)[0]
    return F.pad(attention_mask, (0, max(places - attention_mask.shape[1], 0)))
