"""Models of transformers with ALiBi, made to attend by this library, in place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.bloom.modeling_bloom import BloomAttention, BloomModel, BloomPreTrainedModel
from transformers.models.falcon.modeling_falcon import FalconAttention, FalconModel, FalconPreTrainedModel
from transformers.models.mpt.modeling_mpt import MptAttention, MptModel, MptPreTrainedModel

from alibi_core.backend import one_of
from alibi_torch.transformers import _facts
from alibi_torch.transformers._cache_layers import check_cache
from alibi_torch.transformers._modules import (
    AcceleratedBloomAttention,
    AcceleratedFalconAttention,
    AcceleratedMptAttention,
    attention_modules,
    become,
    check_own,
    positional_names,
    with_arguments,
)
from alibi_torch.transformers._rules import CONTRACTS

ATTENTION: dict[type, Any] = {
    BloomAttention: AcceleratedBloomAttention,
    FalconAttention: AcceleratedFalconAttention,
    MptAttention: AcceleratedMptAttention,
}
BASES = (BloomModel, FalconModel, MptModel)
FAMILIES = (BloomPreTrainedModel, FalconPreTrainedModel, MptPreTrainedModel)


def accelerate(model: nn.Module, *, contract: str = "model") -> nn.Module:
    """Let the attention of a BLOOM, MPT or Falcon model of ``transformers`` be computed by this library, in place.

    No bias and no mask of queries times keys is formed any more, and keys beyond a head's horizon are left out, which
    changes no result by more than rounding. Weights, their names, and everything but attention stay as they are.
    Sequences may be longer than MPT's ``max_seq_len``. Rows may hold several sequences if ``position_ids`` restart.

    Args:
        model: The model, or anything that contains one, such as a wrapper for adapters.
        contract: ``"model"``: the bias is rounded as the model rounds it, Falcon's scaled as Falcon scales it.
            ``"exact"``: distances and products in float32, the canonical slopes (of MPT's ``alibi_bias_max``), Falcon's
            divided by ``sqrt(head_dim)``.

    Returns:
        The same model. :func:`restore` undoes it.

    Raises:
        TypeError: If it is no PyTorch module.
        ValueError: If there is no model of these families with ALiBi in it, if it is accelerated already, if its
            attention is a subclass's or a patch's own, or if a setting is not supported; the model is then as it was.

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
    if not bases:
        raise ValueError(
            f"model must contain a BLOOM, MPT or Falcon model of transformers, got {type(model).__name__}; encoders "
            "get ALiBi with with_alibi"
        )
    planned = {}
    for base in bases:
        if isinstance(base, FalconModel) and not base.use_alibi:
            raise ValueError(
                "model must have ALiBi, got a Falcon model with alibi=False in its config (rotary positions)"
            )
        for module in base.modules():
            kind = next((kind for kind in ATTENTION if isinstance(module, kind)), None)
            if kind is not None and module not in planned:  # which bases may share
                planned[module] = ATTENTION[kind], ATTENTION[kind].rules(module, base.config, contract)
                check_own(module, kind)
    for module, (kind, rules) in planned.items():
        module.alibi_class, module.alibi_rules = type(module), rules
        become(module, kind)
    for base in bases:
        _replace_builders(base)
    for outer in (x for x in model.modules() if isinstance(x, FAMILIES)):
        outer.alibi_hook = outer.register_forward_pre_hook(_Prepare(outer), with_kwargs=True)
        outer.create_masks_for_generate = _same_mask
    return model


def restore(model: nn.Module) -> nn.Module:
    """Undo :func:`accelerate`, in place.

    Args:
        model: An accelerated model.

    Returns:
        The same model.

    Raises:
        ValueError: If it is not accelerated.
    """
    hooked: list[Any] = [x for x in model.modules() if "alibi_hook" in vars(x)]
    # Another model that shares these modules may have put them back.
    for module in attention_modules(model, missing_is_error=not hooked):
        become(module, module.alibi_class)
        del module.alibi_class, module.alibi_rules
    for outer in hooked:
        outer.alibi_hook.remove()
        del outer.alibi_hook, outer.create_masks_for_generate
        if isinstance(outer, BASES):
            _put_builders_back(outer)
    return model


class _Prepare:
    """Puts into a call's mask what its masks and positions say, before the model sees it.

    A model around the base may use the mask itself. So that one is given another in its place only where positions say
    more than it, as the models do not hand positions on.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.names = positional_names(type(model))
        self.is_base = isinstance(model, BASES)

    def __call__(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        given = dict(zip(self.names, args, strict=False)) | kwargs
        mask = given.get("attention_mask")
        if _facts.is_encoded(mask) and mask.dtype == torch.uint8:  # by an outer model
            return args, kwargs
        if given.get("output_attentions", None) or (
            given.get("output_attentions") is None and model.config.output_attentions
        ):
            raise ValueError(
                "output_attentions must be False, as no attention weights are stored; undo with "
                "alibi_torch.transformers.restore(model) to get them"
            )
        tokens = given.get("inputs_embeds") if given.get("input_ids") is None else given["input_ids"]
        if not isinstance(tokens, Tensor):
            return args, kwargs  # which the model refuses
        cache, positions = given.get("past_key_values"), given.get("position_ids")
        if cache is not None:
            check_cache(cache)
        if mask is not None and (cache is not None or given.get("use_cache")) and torch.compiler.is_compiling():
            positions = None  # nobody can look at them, and the mask tells of padding
        changed: dict[str, Any] = {"attention_mask": _encoded(mask, positions, cache, tokens)}
        if _facts.is_packed(changed["attention_mask"]):
            if given.get("use_cache"):
                raise ValueError("use_cache must be False where position_ids pack several sequences into a row")
            changed["use_cache"] = False
        elif not self.is_base:
            return args, kwargs
        return with_arguments(self.names, args, kwargs, changed)


def _encoded(mask: Any, position_ids: Any, cache: Any, tokens: Tensor) -> Tensor:
    batch, q_len = tokens.shape[:2]
    past = 0 if cache is None else cache.get_seq_length()
    for name, given in (("attention_mask", mask), ("position_ids", position_ids)):
        if given is not None and not isinstance(given, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(given).__name__}")
    of_mask = _facts.nothing(tokens.device)
    if mask is not None:
        longest = -1
        if cache is not None and cache.is_compileable:
            longest = max(cache.get_mask_sizes(q_len, 0)[0], -1)
        of_mask = _facts.of_padding(mask, batch, q_len, past, longest)
    if position_ids is None or q_len < 2:
        return of_mask
    text = None if mask is None else mask[:, int(past) : int(past) + q_len] != 0
    return _facts.of_positions(position_ids, batch, q_len, past, text, of_mask)


def _same_mask(*args: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
    """Let ``generate`` hand the padding mask on as it is."""
    return attention_mask


# --- What the models build for their own attention ------------------------------------------------------------------


def _no_bloom_bias(attention_mask: Tensor, num_heads: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(0, dtype=dtype, device=attention_mask.device)


def _no_mpt_bias(num_heads: int, sequence_length: int, alibi_bias_max: int = 8, device: Any = None) -> Tensor:
    return torch.zeros(0, device=device)


def _replace_builders(base: Any) -> None:
    if isinstance(base, BloomModel):
        base.build_alibi_tensor = _no_bloom_bias
    elif isinstance(base, MptModel):
        base.build_mpt_alibi_tensor = _no_mpt_bias
    else:
        base.use_alibi = False


def _put_builders_back(base: Any) -> None:
    if isinstance(base, BloomModel):
        del base.build_alibi_tensor
    elif isinstance(base, MptModel):
        del base.build_mpt_alibi_tensor
    else:
        base.use_alibi = True
