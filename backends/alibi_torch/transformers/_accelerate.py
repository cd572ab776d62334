"""``accelerate``: replaces the attention of BLOOM, MPT and Falcon models of transformers, in place."""

from __future__ import annotations

import importlib
from types import MethodType
from typing import Any

import torch
from torch import nn

from alibi_core import slopes as canonical_slopes
from alibi_core.backend.checks import boolean, one_of
from alibi_torch.transformers import _proof
from alibi_torch.transformers._state import State, not_accelerated

# Base models, by the module of their family in transformers, and in this folder, which is imported if it is needed.
FAMILIES = {"bloom": "BloomModel", "mpt": "MptModel", "falcon": "FalconModel"}
CONTRACTS = ("model", "exact")


def accelerate(model: nn.Module, *, contract: str = "model", strict: bool = False, prove: bool = True) -> nn.Module:
    """Compute the attention of a BLOOM, MPT or Falcon model of ``transformers`` by this library, in place.

    No bias or mask of queries times keys is formed any more, and keys beyond a head's horizon are skipped, which
    changes results by rounding only. Weights, their names, and everything but attention are unchanged. Sequences may be
    longer than MPT's ``max_seq_len``. Padding may be anywhere in a row. A row may hold several sequences if
    ``position_ids`` restart from 0.

    Before it returns, the function runs the original and the accelerated model on a short probe: a prompt, a batch with
    padding on the left, steps with a dynamic and a static cache, and ``generate``, about fifty tokens in all. If last
    hidden states or logits differ by more than rounding explains, the model is restored and a ValueError raised.

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
            attention layers of a subclass or an unsupported setting, if the probe's results differ, or if a version of
            transformers lacks a name that this library needs. The model is then unchanged.

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
    with _proof.explaining():
        kinds = {base: importlib.import_module(f"alibi_torch.transformers._{family}").MODEL for base, family in bases}
        layers = {base: _layers_of(base, kind) for base, kind in kinds.items()}
        reasons = [_refusal(base, kind, layers[base]) for base, kind in kinds.items()]
    _raise_first(reasons)
    with _proof.explaining():
        slopes = {base: _slopes_of(base, kind, contract) for base, kind in kinds.items()}
        outers = {x: base for base, kind in kinds.items() for x in _models_around(model, base, kind)}
        is_proven = prove and contract == "model"
        proofs = {x: _proof.own_results(x, layers[x], outers) for x in kinds} if is_proven else {}
        try:
            for base, kind in kinds.items():
                for layer in layers[base]:
                    _become(layer, kind.alibi_layer)
                    layer.alibi_slopes, layer.alibi_state = slopes[base], state
                _become(base, kind)
                base.alibi_layers, base.alibi_state = layers[base], state
                base.switch(base, is_own=False)
            for outer, base in outers.items():
                kinds[base].prepare(outer)
            reasons = [_proof.refusal(base, proof, outers) for base, proof in proofs.items() if proof is not None]
        except Exception:
            _undo(model)
            raise
    if any(reasons):
        _undo(model)
    _raise_first(reasons)
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
    if not _undo(model):
        raise not_accelerated(model)
    return model


def _undo(model: nn.Module) -> bool:
    """Restore all that is accelerated in a model; return whether anything is."""
    parts: list[Any] = [x for x in model.modules() if hasattr(type(x), "alibi_own")]
    outers: list[Any] = [x for x in model.modules() if "alibi_hook" in vars(x)]
    for part in parts:
        if hasattr(type(part), "switch"):  # a base model
            part.switch(part, is_own=True)
        _become(part, part.alibi_own)
        for name in ("alibi_slopes", "alibi_layers", "alibi_state"):
            vars(part).pop(name, None)
    for outer in outers:  # the models around a restored base model keep their hooks
        outer.alibi_hook.remove()
        del outer.alibi_hook, outer.create_masks_for_generate
    return bool(parts or outers)


def _bases_of(model: Any) -> list[tuple[Any, str]]:
    """Return the base models to accelerate, and their families; raise if there are none, or one is not an original."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    found = [(x, family) for x in model.modules() if (family := _family_of(type(x))) is not None]
    if not found:
        raise ValueError(
            f"model must contain a BLOOM, MPT or Falcon model of transformers, got {type(model).__name__}; models "
            "without ALiBi get it by with_alibi, and alibi_torch.load_checkpoint reads models with code of their own"
        )
    for base, family in found:
        if hasattr(type(base), "alibi_own"):
            raise ValueError("model must not be accelerated yet; undo with restore first")
        if type(base).__name__ != FAMILIES[family] or not _is_of_transformers(type(base)):
            name = type(base).__name__
            raise ValueError(f"base model must be {FAMILIES[family]} itself, got {name}, a subclass of it")
    return found


def _family_of(kind: type) -> str | None:
    """Return the family of a class of base models, by its own name or that of a class that it derives from, or None."""
    names = [x.__name__ for x in kind.__mro__ if _is_of_transformers(x)]
    return next((family for family, name in FAMILIES.items() if name in names), None)


def _is_of_transformers(kind: type) -> bool:
    return kind.__module__.startswith("transformers.")


def _models_around(model: nn.Module, base: Any, kind: Any) -> list[Any]:
    """Return the models with a head around a base model, such as ``BloomForCausalLM``."""
    around = [x for x in model.modules() if isinstance(x, kind.alibi_family) and x is not base]
    return [x for x in around if x.base_model is base]


def _layers_of(base: Any, kind: Any) -> tuple[Any, ...]:
    """Return the attention layers of a base model."""
    return tuple(x for x in base.modules() if isinstance(x, kind.alibi_layer.alibi_own))


def _refusal(base: Any, kind: Any, layers: tuple[Any, ...]) -> str | None:
    """Return why a base model cannot be accelerated: a layer or a setting that is not supported."""
    own = kind.alibi_layer.alibi_own
    for layer in layers:
        if type(layer) is not own or ("forward" in vars(layer) and "_old_forward" not in vars(layer)):
            return (
                f"attention of the model must be {own.__name__}'s own, got {type(layer).__name__} with a forward of "
                "its own; accelerate first, or leave the model as it is"
            )
    refusal: str | None = kind.refusal(base, layers)
    return refusal


def _raise_first(reasons: list[str | None]) -> None:
    for reason in reasons:
        if reason is not None:
            raise ValueError(reason)


def _slopes_of(base: Any, kind: Any, contract: str) -> tuple[float, ...]:
    """Return the slope of each head of a base model's bias, per token."""
    if contract == "exact":
        return tuple(canonical_slopes(base.num_heads, bias_max=kind.bias_max(base), dtype="float64").tolist())
    # The slope is the difference of the biases of two neighbouring keys.
    device = next((x.device for x in base.parameters() if not x.is_meta), torch.device("cpu"))
    two = torch.ones(1, 2, dtype=torch.long, device=device)
    row = kind.alibi_layer.build(two, base.num_heads, torch.float32).double()[0]
    return tuple((row[:, 1] - row[:, 0]).tolist())


def _become(module: Any, kind: type) -> None:
    """Change a module's class and keep its state."""
    module.__class__ = kind
    # Hugging Face's accelerate wraps `forward` of models on several devices and stores the original as `_old_forward`.
    if isinstance(vars(module).get("_old_forward"), MethodType):
        module._old_forward = MethodType(kind.forward, module)  # type: ignore[attr-defined]
