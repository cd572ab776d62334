"""Models of transformers with ALiBi, made to attend by this library, in place."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.masking_utils import create_masks_for_generate
from transformers.models.bloom.modeling_bloom import (
    BloomAttention,
    BloomModel,
    BloomPreTrainedModel,
    build_alibi_tensor,
)
from transformers.models.falcon.modeling_falcon import FalconAttention, FalconModel, FalconPreTrainedModel
from transformers.models.mpt.modeling_mpt import MptAttention, MptModel, MptPreTrainedModel

from alibi_core.backend import boolean, one_of
from alibi_torch.transformers import _facts
from alibi_torch.transformers._alibi_cache import AlibiCache
from alibi_torch.transformers._cache_layers import unknown_cache
from alibi_torch.transformers._joined import Prepared, become, join, part
from alibi_torch.transformers._modules import (
    Accelerated,
    AcceleratedBloomAttention,
    AcceleratedFalconAttention,
    AcceleratedMptAttention,
    attention_modules,
    check_own,
    layers_of,
    reason_for_own_code,
    reason_of_hooks,
    tokens_of,
    with_arguments,
)
from alibi_torch.transformers._paths import Paths
from alibi_torch.transformers._remote import accelerate_remote, remote_bases, restore_remote
from alibi_torch.transformers._rules import CONTRACTS, Rules

ATTENTION: dict[type, Any] = {
    BloomAttention: AcceleratedBloomAttention,
    FalconAttention: AcceleratedFalconAttention,
    MptAttention: AcceleratedMptAttention,
}
BASES = (BloomModel, FalconModel, MptModel)
FAMILIES = (BloomPreTrainedModel, FalconPreTrainedModel, MptPreTrainedModel)


def accelerate(model: nn.Module, *, contract: str = "model", strict: bool = False) -> nn.Module:
    """Let the attention of a model of ``transformers`` with ALiBi be computed by this library, in place.

    That is BLOOM, MPT, Falcon, and models whose own code came with their checkpoint (``trust_remote_code=True``):
    Jina-embeddings-v2, MosaicBERT, DNABERT-2, Baichuan-13B, BTLM, Jais, Refact, Replit-code and llm-foundry's MPT. That
    code is known by the names and parts of its classes, and a few tokens through the first layer's attention must give
    the same by it and by the library.

    No bias and no mask of queries times keys is formed any more, and keys beyond a head's horizon are left out, which
    changes no result by more than rounding. Weights, their names, and everything but attention stay as they are.
    Sequences may be longer than MPT's ``max_seq_len``. Padding may lie anywhere in a row. Rows may hold several
    sequences if ``position_ids`` restart from 0; outside ``torch.compile``, ``use_cache`` is then off.

    The model's own code computes what the library does not: calls with attention weights as output, with dropout of
    attention weights in training, with a mask of queries times keys, with a cache that holds something else than the
    keys of all tokens, and calls of a layer by itself. A model warns of the first, and :func:`paths` counts them.

    Args:
        model: The model, or anything that contains one, such as a wrapper for adapters or a ``SentenceTransformer``.
        contract: ``"model"``: the bias is rounded as the model rounds it, Falcon's scaled as Falcon scales it; that of
            models with code of their own is exact in any case.
            ``"exact"``: distances and products in float32, the canonical slopes (of MPT's ``alibi_bias_max``), Falcon's
            divided by ``sqrt(head_dim)``.
        strict: Raise a ValueError at a call that the library does not compute.

    Returns:
        The same model. :func:`restore` undoes it.

    Raises:
        TypeError: If it is no PyTorch module.
        ValueError: If there is no model of these families with ALiBi in it, if it is accelerated already, if its
            attention is a subclass's or a patch's own, if a setting is not supported, or if code of its own computes
            something else; the model is then as it was.

    Example:
        >>> from transformers import BloomConfig, BloomForCausalLM
        >>> model = BloomForCausalLM(BloomConfig(vocab_size=50, hidden_size=32, n_layer=1, n_head=4)).eval()
        >>> tokens = torch.tensor([[7, 8, 9]])
        >>> before = model(tokens).logits
        >>> torch.allclose(accelerate(model)(tokens).logits, before, atol=1e-5)
        True

    References:
        ``transformers``, ``models/bloom``, ``models/mpt`` and ``models/falcon``.
    """
    one_of("contract", contract, CONTRACTS)
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if attention_modules(model, missing_is_error=False):
        raise ValueError("model must not be accelerated yet; undo with restore first")
    bases = [x for x in model.modules() if isinstance(x, BASES)]
    remote = remote_bases(model)
    if not bases and not remote:
        raise ValueError(
            "model must contain a BLOOM, MPT or Falcon model of transformers, or one with code of its own that is "
            f"known here, got {type(model).__name__}; encoders without ALiBi get it, and "
            "this library's attention, with with_alibi"
        )
    planned: dict[Any, Any] = {}
    alike: dict[Any, Any] = {}  # layers that compute the same share one object, which is compared fast
    for base in bases:
        if isinstance(base, FalconModel) and not base.use_alibi:
            raise ValueError(
                "model must have ALiBi, got a Falcon model with alibi=False in its config (rotary positions)"
            )
        for module in base.modules():
            kind = next((kind for kind in ATTENTION if isinstance(module, kind)), None)
            if kind is not None and module not in planned:  # which bases may share
                rules = ATTENTION[kind].rules(module, base.config, contract)
                planned[module] = ATTENTION[kind], alike.setdefault(rules, rules)
                check_own(module, kind)
    accelerate_remote(remote, strict=boolean("strict", strict))
    noted = Paths(strict)
    for module, (kind, rules) in planned.items():
        module.alibi_class, module.alibi_rules, module.alibi_paths = type(module), rules, noted
        become(module, kind)
    for base in bases:
        _replace_builders(base)
    for outer in (x for x in model.modules() if isinstance(x, FAMILIES)):
        if not isinstance(outer, AcceleratedModel):  # of a base that was restored by itself
            join(outer, AcceleratedModel)
    return model


def restore(model: nn.Module) -> nn.Module:
    """Undo :func:`accelerate`, in place.

    Args:
        model: An accelerated model.

    Returns:
        The same model.

    Raises:
        ValueError: If it is not accelerated.

    Example:
        >>> from transformers import BloomConfig, BloomModel
        >>> model = BloomModel(BloomConfig(vocab_size=50, hidden_size=32, n_layer=1, n_head=4)).eval()
        >>> type(restore(accelerate(model)).h[0].self_attention).__name__
        'BloomAttention'
    """
    outers: list[Any] = [x for x in model.modules() if isinstance(x, AcceleratedModel)]
    is_remote = restore_remote(remote_bases(model))
    # Another model that shares these modules may have put them back.
    for module in attention_modules(model, missing_is_error=not outers and not is_remote):
        become(module, module.alibi_class)
        del module.alibi_class, module.alibi_rules, module.alibi_paths
    for outer in outers:
        part(outer)
        if isinstance(outer, BASES):
            _put_builders_back(outer)
    return model


class AcceleratedModel(Prepared):
    """A model that puts into a call's mask what its masks and positions say.

    A model around the base may use the mask itself. So that one is given another in its place only where positions say
    more than it, as the models do not hand positions on.
    """

    base_model: Any
    config: Any

    def create_masks_for_generate(self, **given: Any) -> Any:
        """Let ``generate`` hand the padding mask on, for all places of a static cache: its shape stays the same."""
        mask = given["attention_mask"]
        if not _are_accelerated(layers_of(self.base_model)):
            return getattr(super(), "create_masks_for_generate", create_masks_for_generate)(**given)
        if mask is None or mask.ndim != 2:
            return mask
        places = given["past_key_values"].get_mask_sizes(1, 0)[0]
        return F.pad(mask, (0, max(places - mask.shape[1], 0)))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the model's own code does."""
        args, kwargs = self.prepared(args, kwargs)
        mask, changed = self.given(args, kwargs).get("attention_mask"), {}
        if not torch.compiler.is_compiling() and not _facts.is_encoded(mask):
            if isinstance(self, FalconModel):
                changed = {"use_alibi": True}
            elif isinstance(self, MptModel) and not _are_accelerated(layers_of(self)):
                changed = {"build_mpt_alibi_tensor": super().build_mpt_alibi_tensor}  # for layers that build none
        if not changed:
            return self.alibi_class.forward(self, *args, **kwargs)
        model = object.__new__(type(self))  # the same, but for the bias in its mask, or beside it
        vars(model).update(vars(self), **changed)
        before = dict(vars(model))
        try:
            return self.alibi_class.forward(model, *args, **kwargs)
        finally:  # a subclass may count its calls
            vars(self).update({name: x for name, x in vars(model).items() if x is not before.get(name, before)})

    def prepared(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        given, is_base = self.given(args, kwargs), isinstance(self, BASES)
        mask = given.get("attention_mask")
        if _facts.is_encoded(mask) and (mask.dtype == torch.uint8 or _facts.is_packed(mask)):  # by an outer model
            layers_of(self)[0].alibi_paths.by_library()
            return args, kwargs
        tokens = tokens_of(given)
        if not isinstance(tokens, Tensor):
            return args, kwargs  # which the model refuses
        if not is_base and (given.get("position_ids") is None or tokens.shape[1] == 1):
            return args, kwargs  # which the base is left to see to
        layers = layers_of(self.base_model)
        if not _are_accelerated(layers):
            others = attention_modules(self, missing_is_error=False)
            if is_base and others:
                others[0].alibi_paths.by_hook(
                    self, "blocks must be as they were accelerated, got some that are wrapped, replaced or restored"
                )
            return args, kwargs
        if given.get("use_cache") is False and isinstance(given.get("past_key_values"), AlibiCache):
            raise ValueError(
                "use_cache must be True with an AlibiCache, got False (MptConfig's default): generate would send it "
                "the whole text at each token"
            )
        reason = _reason_for_own_code(self, layers, given, tokens)
        if is_base and reason is not None:
            layers[0].alibi_paths.by_hook(self, reason)
        if reason is not None:
            return args, kwargs
        encoded = _encoded(self, given, tokens, layers[0].alibi_rules)
        changed: dict[str, Any] = {"attention_mask": encoded}
        if _facts.is_packed(encoded) and not _facts.is_unreadable(encoded):
            if given.get("use_cache"):
                raise ValueError("use_cache must be False where position_ids pack several sequences into a row")
            changed["use_cache"] = False
        if is_base:
            layers[0].alibi_paths.by_library()
        elif not _facts.is_packed(encoded):
            return args, kwargs
        return with_arguments(self.alibi_names, args, kwargs, changed)


def _are_accelerated(layers: list[Any]) -> bool:
    """Whether all layers are: some may be restored, as by another model that shares them, or in somebody's wrapper."""
    return bool(layers) and all(isinstance(layer, Accelerated) for layer in layers)


def _reason_for_own_code(model: Any, layers: list[Any], given: dict[str, Any], tokens: Tensor) -> str | None:
    """Return why the library does not compute a call, as a sentence that begins with an argument; None if it does."""
    reason = reason_for_own_code(model.config, given, [layer.dropped for layer in layers])
    if reason is not None:
        return reason
    if not getattr(model.config, "is_causal", True):
        return "config.is_causal must be True, got False"
    change = next((layer.change for layer in layers if layer.change is not None), None)
    if change is not None:
        return str(change)
    hooked = reason_of_hooks(model.base_model, layers)
    if hooked is not None:
        return hooked
    cache, mask = given.get("past_key_values"), given.get("attention_mask")
    if cache is not None:
        other = unknown_cache(cache)
        if other is not None:
            return f"past_key_values must be a DynamicCache, a StaticCache or an AlibiCache, got {other}"
    if mask is None:
        return None
    if not isinstance(mask, Tensor):
        return f"attention_mask must be a tensor, got {type(mask).__name__}"
    (batch, q_len), past = tokens.shape[:2], _length_of(cache)
    longest = cache.get_mask_sizes(q_len, 0)[0] if cache is not None and cache.is_compileable else -1
    fits = mask.ndim == 2 and mask.shape[0] == batch
    # Lengths may be symbols, so each is compared by itself; a compiled call cannot read how full a static cache is.
    if not fits or (mask.shape[1] != longest and (isinstance(past, Tensor) or mask.shape[1] != past + q_len)):
        expected = f"({batch}, {longest if longest >= 0 else past + q_len})"
        return f"attention_mask must be of shape {expected} (batch, tokens so far), got {tuple(mask.shape)}"
    return None


def _length_of(cache: Any) -> Any:
    """Return how many tokens a cache holds: an int, or a tensor while a compiled call cannot read it."""
    past = 0 if cache is None else cache.get_seq_length()
    return past if torch.compiler.is_compiling() else int(past)


def _encoded(model: Any, given: dict[str, Any], tokens: Tensor, rules: Rules) -> Tensor:
    """Return what a call's mask and positions say of its tokens."""
    mask, position_ids = given.get("attention_mask"), given.get("position_ids")
    (batch, q_len), past = tokens.shape[:2], _length_of(given.get("past_key_values"))
    is_start = isinstance(past, int) and past == 0
    # Where nobody can look at positions, those behind tokens in a cache do not restart.
    if position_ids is not None and q_len > 1 and (is_start or not _facts.is_unreadable(tokens)):
        if not isinstance(position_ids, Tensor):
            raise TypeError(f"position_ids must be a tensor, got {type(position_ids).__name__}")
        numbers = None if mask is None else rules.counted(mask)[:, int(past) : int(past) + q_len]
        packed = _facts.of_positions(position_ids, batch, q_len, past, numbers)
        if packed is not None:
            return packed
    if mask is None:
        return _facts.nothing(tokens.device)
    # Not of the embeddings themselves, which somebody may have wrapped; they hold the first of the parameters.
    dtype = tokens.dtype if tokens.is_floating_point() else model.dtype
    is_unseeing = rules.hides_with_infinity(tokens.device.type, dtype)
    return _facts.of_padding(
        rules.counted(mask), q_len, past, is_rounded=rules.rounds(mask.dtype), is_unseeing=is_unseeing
    )


# --- What the models build for their own attention ------------------------------------------------------------------


def _bloom_bias(attention_mask: Tensor, num_heads: int, dtype: torch.dtype) -> Tensor:
    """Return nothing where the library computes attention, else what the model's own builder does."""
    if not _facts.is_encoded(attention_mask):
        return build_alibi_tensor(attention_mask, num_heads, dtype)
    return torch.zeros(0, dtype=dtype, device=attention_mask.device)


def _no_mpt_bias(num_heads: int, sequence_length: int, alibi_bias_max: int = 8, device: Any = None) -> Tensor:
    """Return nothing: a layer that needs the bias builds it."""
    return torch.zeros(0, device=device)


REPLACED: dict[type, tuple[str, Any]] = {
    BloomModel: ("build_alibi_tensor", _bloom_bias),
    MptModel: ("build_mpt_alibi_tensor", _no_mpt_bias),
    FalconModel: ("use_alibi", False),
}


def _replace_builders(base: Any) -> None:
    for name, ours in (x for kind, x in REPLACED.items() if isinstance(base, kind)):
        setattr(base, name, ours)


def _put_builders_back(base: Any) -> None:
    if isinstance(base, FalconModel):
        base.use_alibi = True
    else:
        for name in (x for kind, (x, _) in REPLACED.items() if isinstance(base, kind)):
            delattr(base, name)
