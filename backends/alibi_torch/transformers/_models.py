"""The base models of BLOOM, MPT and Falcon, which read the arguments of a pass once, for all of their layers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.bloom.modeling_bloom import BloomAttention, BloomModel, BloomPreTrainedModel
from transformers.models.falcon.modeling_falcon import FalconAttention, FalconModel, FalconPreTrainedModel
from transformers.models.mpt.modeling_mpt import MptAttention, MptModel, MptPreTrainedModel

from alibi_torch._internals import is_recorded
from alibi_torch.transformers._cache import AlibiCache, unknown_cache
from alibi_torch.transformers._layers import (
    AcceleratedAttention,
    AcceleratedBloomAttention,
    AcceleratedFalconAttention,
    AcceleratedMptAttention,
    Running,
)
from alibi_torch.transformers._names import by_name, cache_of, positional_names, with_argument, with_cache_name
from alibi_torch.transformers._paths import Paths
from alibi_torch.transformers._tokens import (
    Tokens,
    carried,
    carrier,
    is_carrier,
    is_unreadable,
    starts_of,
    without_full_mask,
)


class AcceleratedModel:
    """What the accelerated base models have in common.

    Attributes:
        alibi_running: Shared with the layers.
        alibi_paths: What computed the passes so far.
    """

    alibi_names: tuple[str, ...]
    alibi_running: Running
    alibi_paths: Paths
    config: Any

    def run_accelerated(self, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a pass: the model's ``own`` forward, with a mask that tells the layers where tokens stand."""
        kwargs = with_cache_name(self.alibi_names, kwargs)
        given = by_name(self.alibi_names, args, kwargs)
        mask = given.get("attention_mask")
        # A model around this one may have read them.
        found = carried(mask) or self.alibi_running.tokens if is_carrier(mask) else read_tokens(self, given)
        if found is None:
            return self.run_own(own, args, kwargs)
        if isinstance(found, str):
            self.alibi_paths.by_model(self, found)
            return self.run_own(own, args, kwargs)
        if found.starts is not None and not is_unreadable(found.starts):
            if given.get("use_cache"):
                raise ValueError("use_cache must be False where position_ids pack several sequences into a row")
            args, kwargs = with_argument(self.alibi_names, args, kwargs, "use_cache", False)
        device = embedded(given).device
        args, kwargs = with_argument(self.alibi_names, args, kwargs, "attention_mask", carrier(found, device))
        self.alibi_paths.by_library()
        self.alibi_running.tokens = found
        try:
            return own(self, *args, **kwargs)
        finally:
            self.alibi_running.tokens = None

    def run_own(self, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a pass that the model's own code computes."""
        return own(self, *args, **kwargs)


class AcceleratedBloomModel(AcceleratedModel, BloomModel):
    """BLOOM's base model."""

    alibi_names = positional_names(BloomModel.forward)

    def build_alibi_tensor(self, attention_mask: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the model's bias; nothing where the library computes attention."""
        if is_carrier(attention_mask):
            return attention_mask.new_zeros(0)
        return super().build_alibi_tensor(attention_mask, *args, **kwargs)

    @functools.wraps(BloomModel.forward)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the model's own code does."""
        return self.run_accelerated(BloomModel.forward, args, kwargs)


class AcceleratedMptModel(AcceleratedModel, MptModel):
    """MPT's base model."""

    alibi_names = positional_names(MptModel.forward)

    @functools.wraps(MptModel.forward)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the model's own code does."""
        return self.run_accelerated(MptModel.forward, args, kwargs)


class AcceleratedFalconModel(AcceleratedModel, FalconModel):
    """Falcon's base model. ``use_alibi`` is True in passes of its own code alone, as it adds a bias to any mask."""

    alibi_names = positional_names(FalconModel.forward)

    @functools.wraps(FalconModel.forward)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the model's own code does."""
        return self.run_accelerated(FalconModel.forward, args, kwargs)

    def run_own(self, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a pass that the model's own code computes."""
        self.use_alibi = True
        try:
            return own(self, *args, **kwargs)
        finally:
            self.use_alibi = False


# transformers writes the name of a model's class into its config.
for _kind, _own in (
    (AcceleratedBloomModel, BloomModel),
    (AcceleratedMptModel, MptModel),
    (AcceleratedFalconModel, FalconModel),
):
    _kind.__name__ = _own.__name__

# What the parts of a model become, and the models around them.
MODELS: dict[type, Any] = {
    BloomModel: AcceleratedBloomModel,
    MptModel: AcceleratedMptModel,
    FalconModel: AcceleratedFalconModel,
}
LAYERS: dict[type, Any] = {
    BloomAttention: AcceleratedBloomAttention,
    MptAttention: AcceleratedMptAttention,
    FalconAttention: AcceleratedFalconAttention,
}
FAMILIES = (BloomPreTrainedModel, MptPreTrainedModel, FalconPreTrainedModel)


# --- Reading the arguments of a pass --------------------------------------------------------------------------------


def embedded(given: dict[str, Any]) -> Any:
    """Return the tokens of a call, ``[batch, length, ...]``, from its arguments by name."""
    return given.get("inputs_embeds") if given.get("input_ids") is None else given["input_ids"]


def layers_of(base: Any) -> list[Any]:
    """Return the accelerated layers of a base model, without a search where its blocks go by their usual name."""
    blocks = getattr(base, "blocks", None) or getattr(base, "h", [])
    layers = [getattr(block, "attn", None) or getattr(block, "self_attention", None) for block in blocks]
    if layers and all(isinstance(layer, AcceleratedAttention) for layer in layers):
        return layers
    return [x for x in base.modules() if isinstance(x, AcceleratedAttention)]


def read_tokens(model: Any, given: dict[str, Any]) -> Tokens | str | None:
    """Return what a call's arguments say of its tokens.

    Returns:
        The tokens; or why the library does not compute the call, as a sentence that begins with an argument; or None
        for a call that the model refuses.
    """
    inputs, mask, cache = embedded(given), given.get("attention_mask"), cache_of(given)
    if not isinstance(inputs, Tensor) or inputs.ndim < 2:
        return None
    if given.get("use_cache") is False and isinstance(cache, AlibiCache):
        raise ValueError(
            "use_cache must be True with an AlibiCache, got False (MptConfig's default): generate would send it "
            "the whole text at each token"
        )
    reason = _reason_for_own_code(model, given, inputs, cache)
    if reason is not None:
        return reason
    (batch, q_len), past = inputs.shape[:2], _length_of(cache)
    mask, starts = without_full_mask(mask, past + q_len), None
    position_ids = given.get("position_ids")
    is_start = isinstance(past, int) and past == 0
    # Where nobody can look at positions, those behind tokens in a cache do not restart.
    if position_ids is not None and q_len > 1 and (is_start or not torch.compiler.is_compiling()):
        own = None if mask is None else mask[:, int(past) : int(past) + q_len]
        starts = starts_of(position_ids, batch, q_len, past, own)
    return Tokens(past, mask, starts)


def _length_of(cache: Any) -> Any:
    """Return how many tokens a cache holds: an int, or a tensor while a compiled call cannot read it."""
    past = 0 if cache is None else cache.get_seq_length()
    if not torch.compiler.is_compiling():
        return int(past)
    return past.clone().reshape(()) if isinstance(past, Tensor) else past  # the cache counts in place


def _reason_for_own_code(model: Any, given: dict[str, Any], inputs: Tensor, cache: Any) -> str | None:
    """Return why the library does not compute a call, as a sentence that begins with an argument; None if it does."""
    weights = given.get("output_attentions")
    if getattr(model.config, "output_attentions", False) if weights is None else weights:
        return "output_attentions must be False, as the library stores no attention weights, got True"
    dropped = max([0.0, *[layer.dropped() for layer in layers_of(model)]])
    if dropped > 0:
        return f"dropout of attention weights must be 0 or off, as no weights are stored, got {dropped}"
    if not getattr(model.config, "is_causal", True):
        return "config.is_causal must be True, got False"
    if is_recorded(inputs):
        return "recorder must be torch.compile or torch.export, as others keep what is chosen for one call's values"
    if cache is not None and (name := unknown_cache(cache)) is not None:
        return f"the cache must be a DynamicCache, a StaticCache or an AlibiCache, got {name}"
    return _reason_of_mask(given.get("attention_mask"), inputs, cache)


def _reason_of_mask(mask: Any, inputs: Tensor, cache: Any) -> str | None:
    """Return why a mask is none of padding, one number for each token so far; None if it is."""
    if mask is None:
        return None
    if not isinstance(mask, Tensor):
        return f"attention_mask must be a tensor, got {type(mask).__name__}"
    (batch, q_len), past = inputs.shape[:2], _length_of(cache)
    places = cache.get_mask_sizes(q_len, 0)[0] if cache is not None and cache.is_compileable else -1
    fits = mask.ndim == 2 and mask.shape[0] == batch
    # Lengths may be symbols, so each is compared by itself; a compiled call cannot read how full a static cache is.
    if not fits or (mask.shape[1] != places and (isinstance(past, Tensor) or mask.shape[1] != past + q_len)):
        expected = f"({batch}, {places if places >= 0 else past + q_len})"
        return f"attention_mask must be of shape {expected} (batch, tokens so far), got {tuple(mask.shape)}"
    return None


# --- Models around a base model -------------------------------------------------------------------------------------


def prepare_call(outer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Take the cache by either name, and put what ``position_ids`` say into the mask: a hook before ``forward``.

    BLOOM and MPT do not hand positions on to their base model.
    """
    base, names = outer.base_model, outer.alibi_names
    kwargs = with_cache_name(names, kwargs)
    given = by_name(names, args, kwargs)
    inputs = embedded(given)
    is_packed = given.get("position_ids") is not None and isinstance(inputs, Tensor) and inputs.shape[1] > 1
    if not is_packed or not isinstance(base, AcceleratedModel) or "attention_mask" not in names:
        return args, kwargs
    tokens = read_tokens(base, given)
    if not isinstance(tokens, Tokens) or tokens.starts is None:
        return args, kwargs
    base.alibi_running.tokens = tokens  # for compiled code
    return with_argument(names, args, kwargs, "attention_mask", carrier(tokens, inputs.device))


def padding_of_all_places(attention_mask: Tensor | None, **given: Any) -> Tensor | None:
    """Return the padding mask for all places of a static cache, in place of ``create_masks_for_generate``.

    It keeps one shape from step to step, as compiled steps ask for, and no mask of queries times places is formed.
    """
    if attention_mask is None or attention_mask.ndim != 2:
        return attention_mask
    places = cache_of(given).get_mask_sizes(1, 0)[0]
    return F.pad(attention_mask, (0, max(places - attention_mask.shape[1], 0)))
