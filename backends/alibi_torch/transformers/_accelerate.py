"""``accelerate``: replaces the attention of BLOOM, MPT and Falcon models of transformers, in place."""

from __future__ import annotations

import functools
from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers.models.bloom.modeling_bloom import BloomModel
from transformers.models.falcon.modeling_falcon import FalconModel
from transformers.models.mpt.modeling_mpt import MptModel

from alibi_core import slopes as canonical_slopes
from alibi_core.backend.checks import boolean, one_of
from alibi_torch.transformers import _proof
from alibi_torch.transformers._layers import FALCON_ADDITIONS, AcceleratedAttention
from alibi_torch.transformers._models import FAMILIES, MODELS, AcceleratedModel, padding_of_all_places, prepare_call
from alibi_torch.transformers._names import positional_names
from alibi_torch.transformers._state import State, not_accelerated

CONTRACTS = ("model", "exact")


def accelerate(model: nn.Module, *, contract: str = "model", strict: bool = False, prove: bool = True) -> nn.Module:
    """Compute the attention of a BLOOM, MPT or Falcon model of ``transformers`` by this library, in place.

    No bias or mask of queries times keys is formed any more, and keys beyond a head's horizon are skipped, which
    changes results by rounding only. Weights, their names, and everything but attention are unchanged. Sequences may be
    longer than MPT's ``max_seq_len``. Padding may be anywhere in a row. A row may hold several sequences if
    ``position_ids`` restart from 0.

    Before it returns, the function runs the original and the accelerated model on a short probe: a prompt, a batch with
    padding on the left, and cached steps, about twenty tokens in all. If the last hidden states differ by more than
    rounding explains, the model is restored and a ValueError raised.

    The model's own code still computes calls that the library does not support: with attention weights as output, with
    dropout of attention weights in training, with a mask of queries times keys, or with a cache that does not hold the
    keys of all tokens. The first such call warns, and :func:`paths` counts all of them.

    Args:
        model: The model, or a module that contains one, such as a wrapper for adapters.
        contract: ``"model"``: the bias is rounded as the model rounds it, and Falcon's is scaled as Falcon scales it.
            ``"exact"``: canonical slopes, distances and products in float32. Its results differ from the model's, so
            the probe is not run.
        strict: Raise a ValueError for a call that the library does not support.
        prove: Run the probe. A model that cannot be run yet is accelerated with a warning that nothing was proven.

    Returns:
        The same model. :func:`restore` undoes it.

    Raises:
        TypeError: If ``model`` is no PyTorch module.
        ValueError: If ``model`` contains no BLOOM, MPT or Falcon model with ALiBi, is accelerated already, has
            attention layers of a subclass or an unsupported setting, or if the probe's results differ. The model is
            then unchanged.

    Example:
        >>> import torch
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
    boolean("prove", prove)
    state = State(contract, boolean("strict", strict))
    bases = _bases_of(model)
    layers = {base: _checked_layers(base) for base in bases}
    proofs = {base: _proof.own_results(base, layers[base]) for base in bases} if prove and contract == "model" else {}
    for base in bases:
        kind, slopes = MODELS[type(base)], _slopes_of(base, contract)
        for layer in layers[base]:
            layer.alibi_slopes, layer.alibi_state = slopes, state
            _become(layer, kind.alibi_layer)
        base.alibi_layers, base.alibi_state = layers[base], state
        _become(base, kind)
        if isinstance(base, FalconModel):  # or it would add its own bias to the mask that carries the tokens
            base.use_alibi = False
    for outer in _models_around(model):
        if "alibi_hook" not in vars(outer):  # still there if only the base model was restored
            hook = functools.partial(prepare_call, names=positional_names(type(outer).forward))
            outer.alibi_hook = outer.register_forward_pre_hook(hook, with_kwargs=True)
            outer.create_masks_for_generate = padding_of_all_places
    try:
        for base, proof in proofs.items():
            if proof is not None:
                _proof.check(base, proof)
    except ValueError:
        restore(model)
        raise
    # The probe's passes do not count.
    state.calls.clear()
    return model


def restore(model: nn.Module) -> nn.Module:
    """Undo :func:`accelerate`, in place.

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
    bases = [x for x in model.modules() if isinstance(x, AcceleratedModel)]
    layers = [x for x in model.modules() if isinstance(x, AcceleratedAttention)]
    outers = [x for x in _models_around(model) if "alibi_hook" in vars(x)]
    if not bases and not layers and not outers:  # the models around a restored base model keep their hooks
        raise not_accelerated(model)
    for layer in layers:
        _become(layer, layer.alibi_own)
        del layer.alibi_slopes, layer.alibi_state
    for base in bases:
        _become(base, base.alibi_own)
        del base.alibi_layers, base.alibi_state
        if isinstance(base, FalconModel):
            base.use_alibi = True
    for outer in outers:
        outer.alibi_hook.remove()
        del outer.alibi_hook, outer.create_masks_for_generate
    return model


def _bases_of(model: Any) -> list[Any]:
    """Return the base models to accelerate; raise if there are none, or one is a subclass or accelerated already."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    found = [x for x in model.modules() if isinstance(x, tuple(MODELS))]
    if not found:
        raise ValueError(
            f"model must contain a BLOOM, MPT or Falcon model of transformers, got {type(model).__name__}; models "
            "without ALiBi get it by with_alibi, and alibi_torch.load_checkpoint reads models with code of their own"
        )
    for base in found:
        if isinstance(base, AcceleratedModel):
            raise ValueError("model must not be accelerated yet; undo with restore first")
        if type(base) not in MODELS:
            own = next(kind for kind in MODELS if isinstance(base, kind))
            raise ValueError(f"base model must be {own.__name__} itself, got {type(base).__name__}, a subclass of it")
    return found


def _models_around(model: nn.Module) -> list[Any]:
    """Return the models with a head around a base model, such as ``BloomForCausalLM``."""
    return [x for x in model.modules() if isinstance(x, FAMILIES) and not isinstance(x, tuple(MODELS))]


def _checked_layers(base: Any) -> tuple[Any, ...]:
    """Return the attention layers; raise a ValueError for a layer or a setting that is not supported."""
    config, own = base.config, MODELS[type(base)].alibi_layer.alibi_own
    if isinstance(base, FalconModel) and not base.use_alibi:
        raise ValueError("model must have ALiBi, got a Falcon model with alibi=False in its config (rotary positions)")
    if isinstance(base, FalconModel) and config._attn_implementation not in FALCON_ADDITIONS:
        raise ValueError(
            "attn_implementation must be 'sdpa' or 'eager' for a Falcon model with ALiBi, "
            f"got {config._attn_implementation!r}"
        )
    if isinstance(base, MptModel) and not config.attn_config.alibi:
        raise ValueError("attn_config.alibi must be True for a model to be accelerated, got False")
    layers = tuple(x for x in base.modules() if isinstance(x, own))
    for layer in layers:
        if type(layer) is not own or ("forward" in vars(layer) and "_old_forward" not in vars(layer)):
            raise ValueError(
                f"attention of the model must be {own.__name__}'s own, got {type(layer).__name__} with a forward of "
                "its own; accelerate first, or leave the model as it is"
            )
        if isinstance(base, BloomModel) and layer.beta != 1:
            raise ValueError(f"beta must be 1 for a model to be accelerated, got {layer.beta}")
    return layers


def _slopes_of(base: Any, contract: str) -> tuple[float, ...]:
    """Return the slope of each head of a base model's bias, per token."""
    if contract == "exact":
        # MPT's config has alibi_bias_max, but transformers' own builder ignores it and always uses 8.
        bias_max = base.config.attn_config.alibi_bias_max if isinstance(base, MptModel) else 8
        return tuple(canonical_slopes(base.num_heads, bias_max=bias_max, dtype="float64").tolist())
    # The slope is the difference of the biases of two neighbouring keys.
    device = next((x.device for x in base.parameters() if not x.is_meta), torch.device("cpu"))
    two = torch.ones(1, 2, dtype=torch.long, device=device)
    row = MODELS[type(base)].alibi_layer.build(two, base.num_heads, torch.float32).double()[0]
    return tuple((row[:, 1] - row[:, 0]).tolist())


def _become(module: Any, kind: type) -> None:
    """Change a module's class and keep its state."""
    module.__class__ = kind
    # Hugging Face's accelerate wraps `forward` of models on several devices and stores the original as `_old_forward`.
    if isinstance(vars(module).get("_old_forward"), MethodType):
        module._old_forward = MethodType(kind.forward, module)  # type: ignore[attr-defined]
