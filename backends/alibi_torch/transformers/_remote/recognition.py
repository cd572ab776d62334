"""Which models' own code is known here, and the probe that must find it to be what it is known as."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from alibi_torch.transformers._joined import join, part
from alibi_torch.transformers._modules import check_own
from alibi_torch.transformers._paths import Paths
from alibi_torch.transformers._remote.decoders import BaichuanFamily, JaisFamily, MptFamily, RefactFamily
from alibi_torch.transformers._remote.encoders import EncoderFamily
from alibi_torch.transformers._remote.models import Family, RemoteAttention, RemoteBase

FAMILIES: dict[str, Family] = {  # by the names of base models
    "BTLMModel": JaisFamily(),
    "BaichuanModel": BaichuanFamily(),
    "BertModel": EncoderFamily(),
    "GPTRefactModel": RefactFamily(),
    "JAISModel": JaisFamily(),
    "JinaBertModel": EncoderFamily(),
    "MPTModel": MptFamily(),
}
PROBE = 24  # tokens a text
Found = tuple[Any, Family]
_Call = tuple[tuple[Any, ...], dict[str, Any]]


def remote_bases(model: nn.Module) -> list[Found]:
    """Return the base models in a model that have known classes, and attention of known classes, by their names."""
    found = []
    for base in model.modules():
        family = FAMILIES.get(type(base).__name__)
        if family is None or type(base).__module__.startswith("transformers.models."):
            continue
        try:
            names = {type(x).__name__ for x in family.attention_of(base)}
        except AttributeError:  # it is built otherwise
            continue
        if names and names <= set(family.attention):
            found.append((base, family))
    return found


def accelerate_remote(found: list[Found], *, strict: bool) -> None:
    """Let this library compute the attention of base models.

    Raises:
        ValueError: If one is not what its class is known as, or a probe finds another result; all are then as before.
    """
    for base, family in found:
        if isinstance(base, RemoteBase):
            raise ValueError("model must not be accelerated yet; undo with restore first")
        _check(base, family)
    noted, changed = Paths(strict), []
    try:
        for base, family in found:
            own = _of_own_code(base, family)
            changed.append((base, family))
            _change(base, family, noted)
            own.compare(_of_library(base, family, own.dtype))
    except BaseException:
        for base, family in changed:
            _undo(base, family)
        raise
    noted.calls.clear()
    for base, family in found:
        family.release(base)


def restore_remote(found: list[Found]) -> bool:
    """Undo :func:`accelerate_remote`; return whether there was something to undo."""
    changed = [(base, family) for base, family in found if isinstance(base, RemoteBase)]
    for base, family in changed:
        _undo(base, family)
        family.retain(base)
    return bool(changed)


def _check(base: Any, family: Family) -> None:
    """Check a base model and its layers, which must be alike, as the first one is probed."""
    check_own(base, type(base))
    family.check(base)
    modules = family.attention_of(base)
    for module in modules:
        kind = family.attention[type(module).__name__]
        kind.check(module)
        check_own(module, type(module))
        if type(module) is not type(modules[0]) or kind.shape_of(module) != kind.shape_of(modules[0]):
            raise ValueError(
                f"attention of the model must be alike in all layers, got {type(module).__name__} with heads and "
                f"features {kind.shape_of(module)} and {kind.shape_of(modules[0])}"
            )
    if any(x.is_meta for x in (*modules[0].parameters(), *_embedding(base).parameters())):
        raise ValueError(
            "weights of the model must be in memory to be probed, got some on the meta device; load them first"
        )


def _change(base: Any, family: Family, noted: Paths) -> None:
    alike: dict[Any, Any] = {}  # layers that compute the same share one object, which is compared fast
    for module in family.attention_of(base):
        kind = family.attention[type(module).__name__]
        rules = kind.rules(module, base)
        module.alibi_rules, module.alibi_paths = alike.setdefault(rules, rules), noted
        join(module, kind)
    base.alibi_family = family
    join(base, RemoteBase)


def _undo(base: Any, family: Family) -> None:
    for module in family.attention_of(base):
        if isinstance(module, RemoteAttention):
            part(module)
            del module.alibi_rules, module.alibi_paths
    if isinstance(base, RemoteBase):
        part(base)
        del base.alibi_family


# --- The probe --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _OwnResult:
    """What a model's own attention makes of a few tokens.

    Attributes:
        name: Of its class.
        dtype: That it was computed in; float32 where the code does not run in the model's.
        given: The result.
        exact: The same in float64.
    """

    name: str
    dtype: torch.dtype
    given: Tensor
    exact: Tensor

    def compare(self, ours: Tensor) -> None:
        """Check that the library finds the same to rounding, of which the model's own code tells the size.

        Four times its own error is allowed, and a unit in the last place for each key; of float32 at least, which
        slopes are formed in.
        """
        unit = max(torch.finfo(x).eps for x in (self.dtype, torch.float32))
        error = (self.given.double() - self.exact).abs().max().item()
        budget = 4 * error + PROBE * unit * self.exact.abs().max().item()
        off = (ours.double() - self.exact).abs().max().item() if ours.shape == self.exact.shape else float("inf")
        if not self.exact.isfinite().all():
            raise ValueError(
                f"weights of the model must be finite, got a {self.name} that gives inf or nan; load them first"
            )
        if off > budget:
            raise ValueError(
                f"attention of the model must agree with the library's to {budget:.2g}, got {self.name} whose results "
                f"are up to {off:.2g} away from it: its code is not that which is published under this name. Leave the "
                "model as it is"
            )


class _ReachedError(Exception):
    """Raised where a probe has come to the attention of the first layer."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.call = args, kwargs


def _of_own_code(base: Any, family: Family) -> _OwnResult:
    module = family.attention_of(base)[0]
    with _unchanged(base):
        call = _arguments(base, module, family)
        dtype = next(x.dtype for x in module.parameters() if x.is_floating_point())
        try:
            given = _computed(module, call, dtype)
        except RuntimeError:  # without its own kernel, it may not run in low precision
            dtype = torch.float32
            given = _computed(module, call, dtype)
        return _OwnResult(type(module).__name__, dtype, given, _computed(module, call, torch.float64))


def _of_library(base: Any, family: Family, dtype: torch.dtype) -> Tensor:
    module = family.attention_of(base)[0]
    with _unchanged(base):
        return _computed(module, _arguments(base, module, family), dtype)


def _computed(module: Any, call: _Call, dtype: torch.dtype) -> Tensor:
    """Return an attention module's result for tokens of text, ``[tokens, features]``, computed in a dtype."""
    own = {x.dtype for x in module.parameters()}

    def cast(x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        return x.to(dtype) if x.dtype in own or dtype == torch.float64 else x  # a float32 bias may go with bfloat16

    args, kwargs = call
    weights = {name: cast(x) for name, x in (*module.named_parameters(), *module.named_buffers())}
    given = {name: cast(x) for name, x in kwargs.items()}
    output = torch.func.functional_call(module, weights, tuple(cast(x) for x in args), given)
    result: Tensor = output[0] if isinstance(output, tuple) else output
    return result[_text().to(result.device)] if result.ndim == 3 else result


def _arguments(base: Any, module: Any, family: Family) -> _Call:
    """Return what a base model hands to an attention module, given two texts, one of them padded."""
    family.prepare_probe(base, PROBE)
    device = _embedding(base).weight.device
    drawn = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, base.config.vocab_size, (2, PROBE), generator=drawn).to(device)
    mask = {"attention_mask": _text().long().to(device)} if family.takes_padding else {}

    def stop(_: Any, args: Any, kwargs: Any) -> None:
        raise _ReachedError(args, kwargs)

    hook = module.register_forward_pre_hook(stop, with_kwargs=True)
    try:
        base(input_ids=tokens, **mask)
    except _ReachedError as reached:
        return reached.call
    finally:
        hook.remove()
    raise ValueError(f"layers of the model must call their attention, got a {type(base).__name__} whose first does not")


def _embedding(base: Any) -> Any:
    """Return the embeddings of a base model's tokens, which some models' own code has no method for."""
    return next(x for x in base.modules() if isinstance(x, nn.Embedding))


def _text() -> Tensor:
    return torch.arange(PROBE) < torch.tensor([[PROBE], [PROBE * 2 // 3]])


@contextmanager
def _unchanged(base: Any) -> Iterator[None]:
    """Evaluate without gradients, and put back whatever the model's own code remembers of it."""
    attributes = [(x, vars(x).copy(), x._buffers.copy(), x._non_persistent_buffers_set.copy()) for x in base.modules()]
    base.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, values, buffers, unsaved in attributes:
            vars(module).clear()
            vars(module).update(values)
            module._buffers.clear()
            module._buffers.update(buffers)
            module._non_persistent_buffers_set.clear()
            module._non_persistent_buffers_set.update(unsaved)
