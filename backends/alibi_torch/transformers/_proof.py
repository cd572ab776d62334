"""Proof that an accelerated model gives what its own code gives, on a short probe."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from alibi_torch.transformers._models import LAYERS
from alibi_torch.transformers._names import CACHE_NAMES, cache_of, positional_names
from alibi_torch.transformers._paths import LIBRARY

PROMPT, PADDING, STEPS = 13, 4, 3  # tokens
# Two ways to compute attention round about four times each (products of scores, the bias, weights, their sum) where
# the perturbed run rounds once.
ROUNDINGS = 8


class NotProvenError(Exception):
    """The model cannot be run on the probe."""


Parts = dict[str, Tensor]


def own_results(base: Any) -> tuple[Parts, dict[str, float]]:
    """Return what a base model's own code gives on the probe, by part, and by how much rounding may change each.

    Rounding is measured on the model itself: the probe is run once more, each attention layer's result perturbed by one
    unit of rounding. So the allowance grows with the depth and the conditioning of the model, as rounding does.

    Raises:
        NotProvenError: If the model cannot be run.
    """
    if any(x.is_meta for x in base.parameters()):
        raise NotProvenError("some of its weights are on the meta device")
    try:
        expected = _results(base)
    except Exception as error:
        raise NotProvenError(f"its own code raised {type(error).__name__}: {error}") from error
    # BLOOM's and MPT's own code adds two lowest numbers where padding sees no text, which float64 alone cannot hold.
    expected = {name: x for name, x in expected.items() if bool(x.isfinite().all())}
    if not expected:
        raise NotProvenError("its own code gives numbers that are not finite")
    with _perturbed(base):
        perturbed = _results(base)
    return expected, {name: ROUNDINGS * _difference(x, perturbed[name]) for name, x in expected.items()}


def check(base: Any, expected: Parts, allowed: dict[str, float]) -> None:
    """Check that an accelerated base model gives the same.

    Raises:
        ValueError: If it does not.
    """
    versions = f"torch {torch.__version__} and transformers {transformers.__version__}"
    advice = "the model is as it was; leave it so, or take versions that the page on transformers names"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of passes that its own code computes, see below
            results = _results(base)
    except Exception as error:
        raise ValueError(
            f"model must run by the library as by its own code, got {type(error).__name__} ({error}) with {versions}; "
            f"{advice}"
        ) from error
    for name, wanted in expected.items():
        difference = _difference(results[name], wanted)
        if not difference <= allowed[name]:  # or is NaN
            raise ValueError(
                f"model must give by the library what its own code gives, got a difference of {difference:.2g} "
                f"{name}, where rounding explains {allowed[name]:.2g} and the largest number is "
                f"{float(wanted.abs().max()):.2g}, with {versions}; {advice}"
            )
    for reason in base.alibi_paths.calls.keys() - {LIBRARY}:
        warn_unproven(f"its own code computes the probe, as {reason}")


def warn_unproven(reason: object) -> None:
    """Warn that nothing was proven."""
    warnings.warn(
        f"nothing was proven of the accelerated model: {reason}. Compare its results with those of its own code",
        stacklevel=3,
    )


def _difference(first: Tensor, second: Tensor) -> float:
    return float((first - second).abs().max())


@contextlib.contextmanager
def measuring(model: nn.Module) -> Iterator[None]:
    """Let a model compute in float32 at least, without gradients, dropout and autocast; leave it as it was.

    In half precision rounding would hide a mistake. One block at a time has its weights cast, so that no second copy of
    the model is in memory.
    """
    training = {module: module.training for module in model.modules()}
    halves: dict[Tensor, Tensor] = {}

    def cast(module: nn.Module, args: Any) -> None:
        for parameter in owned[module]:
            if parameter.dtype in (torch.float16, torch.bfloat16):
                halves[parameter] = parameter.data
                parameter.data = parameter.data.float()

    def put_back(module: nn.Module, args: Any, output: Any) -> None:
        for parameter in owned[module]:
            if parameter in halves:
                parameter.data = halves.pop(parameter)

    owned = {module: parameters for module, parameters in _units(model) if parameters}
    handles = [x.register_forward_pre_hook(cast) for x in owned]
    handles += [x.register_forward_hook(put_back) for x in owned]
    model.eval()
    try:
        with torch.no_grad(), torch.autocast(next(model.parameters()).device.type, enabled=False):
            yield
    finally:
        for handle in handles:
            handle.remove()
        for parameter, data in halves.items():
            parameter.data = data
        for module, before in training.items():
            module.training = before


def _units(module: nn.Module) -> Iterator[tuple[nn.Module, list[nn.Parameter]]]:
    """Yield blocks with all of their parameters, and modules outside of blocks with their own."""
    if isinstance(module, nn.ModuleList):
        yield from ((block, list(block.parameters())) for block in module)
        return
    yield module, list(module.parameters(recurse=False))
    for child in module.children():
        yield from _units(child)


def _results(base: Any) -> Parts:
    """Return the last hidden states of a prompt, of a batch with padding on the left, and of cached steps."""
    length, device = PROMPT + STEPS, next(base.parameters()).device
    tokens = torch.arange(1, 2 * length + 1, device=device).reshape(2, length) % base.config.vocab_size
    cache_name = next((x for x in CACHE_NAMES if x in positional_names(type(base).forward)), CACHE_NAMES[0])
    mask = torch.ones_like(tokens)
    mask[1, :PADDING] = 0
    with measuring(base):
        results = {"in a prompt": base(input_ids=tokens[:1, :PROMPT], return_dict=True)[0]}
        output = base(input_ids=tokens[:, :PROMPT], attention_mask=mask[:, :PROMPT], use_cache=True, return_dict=True)
        results["in a batch with padding"] = output[0][:, PADDING:]
        for step in range(PROMPT, length):
            seen = {"attention_mask": mask[:, : step + 1], cache_name: cache_of(output)}
            output = base(input_ids=tokens[:, step : step + 1], use_cache=True, return_dict=True, **seen)
            results[f"in cached step {step - PROMPT + 1}"] = output[0]
    return {name: x.double() for name, x in results.items()}


@contextlib.contextmanager
def _perturbed(base: nn.Module) -> Iterator[None]:
    """Let the result of each attention layer be off by one unit of rounding."""

    def perturb(layer: nn.Module, args: Any, output: tuple[Any, ...]) -> tuple[Any, ...]:
        result = output[0]
        signs = 1 - 2 * (torch.arange(result.numel(), device=result.device) % 7 % 2).reshape(result.shape)
        # The models' softmax is float32 in float64, too.
        unit = max(torch.finfo(x).eps for x in (result.dtype, torch.float32)) * result.abs().amax(dim=-1, keepdim=True)
        return (result + signs * unit, *output[1:])

    handles = [x.register_forward_hook(perturb) for x in base.modules() if type(x) in LAYERS]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
