"""The comparison of an accelerated model with its original code, on a short probe."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import GenerationConfig, StaticCache

from alibi_core.backend.models import evaluating
from alibi_torch.transformers._names import cache_of, positional_names, with_own_cache_name
from alibi_torch.transformers._state import LIBRARY

PROMPT, PADDING, STEPS = 13, 4, 3  # in tokens
# Each of the two computations of attention rounds about four times (scores, bias, weights, weighted sum); the perturbed
# run rounds once.
ROUNDINGS = 8
VERSIONS = f"PyTorch {torch.__version__} and transformers {transformers.__version__}"

ADVICE = "the model is as it was; leave it so, or take versions that the page on transformers names"

Proof = dict[str, tuple[Tensor, float]]  # by part of the probe: the original result, and the allowed difference


@contextlib.contextmanager
def explaining() -> Iterator[None]:
    """Raise errors of private code of transformers, which has changed, as a ValueError that names the versions."""
    try:
        yield
    except Exception as error:
        raise ValueError(
            f"model must run by the library as by its own code, got {type(error).__name__} ({error}) with {VERSIONS}; "
            f"{ADVICE}"
        ) from error


def own_results(base: Any, layers: Iterable[nn.Module], outers: Iterable[Any]) -> Proof | None:
    """Return the original model's results on the probe, and the difference that rounding may make.

    Rounding is measured on the model itself: the probe is run again with each attention layer's result perturbed by one
    unit of rounding. So the allowance grows with the depth and the conditioning of the model, as rounding does.
    If the model cannot be run, the function warns and returns None.
    """
    if any(x.is_meta for x in base.parameters()):
        return _warn_unproven("some of its weights are on the meta device")
    try:
        expected = _results(base, outers)
    except Exception as error:
        return _warn_unproven(f"its own code raised {type(error).__name__}: {error}")
    # For padding that sees no text, BLOOM's and MPT's code adds finfo.min twice, which overflows to -inf in float64.
    expected = {name: x for name, x in expected.items() if bool(x.isfinite().all())}
    if not expected:
        return _warn_unproven("its own code gives numbers that are not finite")
    with perturbed(layers):
        other = _results(base, outers, expected)
    return {name: (x, ROUNDINGS * difference(x, other[name])) for name, x in expected.items()}


def refusal(base: Any, proof: Proof, outers: Iterable[Any]) -> str | None:
    """Return that the results of an accelerated base model are not its original code's up to rounding, if so."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # original-code passes are reported below
        results = _results(base, outers, proof)
    for name, (expected, allowed) in proof.items():
        found = difference(results[name], expected)
        if not found <= allowed:  # also refuses NaN
            return (
                f"model must give by the library what its own code gives, got a difference of {found:.2g} "
                f"{name}, where rounding explains {allowed:.2g} and the largest number is "
                f"{float(expected.abs().max()):.2g}, with {VERSIONS}; {ADVICE}"
            )
    for reason in base.alibi_state.calls.keys() - {LIBRARY}:
        _warn_unproven(f"its own code computes the probe, as {reason}")
    return None


def _warn_unproven(reason: str) -> None:
    warnings.warn(
        f"nothing was proven of the accelerated model: {reason}. Compare its results with those of its own code",
        stacklevel=4,
    )


def difference(first: Tensor, second: Tensor) -> float:
    """Return the largest absolute difference."""
    return float((first - second).abs().max())


def _results(base: Any, outers: Iterable[Any], wanted: Iterable[str] | None = None) -> dict[str, Tensor]:
    """Return the last hidden states of a prompt, a batch with padding on the left, and steps with two kinds of caches.

    Also return the logits of ``generate`` with a static cache, if a model around the base model generates. Without
    ``wanted`` names, results with static caches are left out where the model's code raises.
    """
    length, device = PROMPT + STEPS, next(base.parameters()).device
    tokens = torch.arange(1, 2 * length + 1, device=device).reshape(2, length) % base.config.vocab_size
    names = positional_names(type(base).forward)
    mask = torch.ones_like(tokens)
    mask[1, :PADDING] = 0
    outer = next((x for x in outers if x.base_model is base and x.can_generate()), base)

    def steps(cache: Any, slots: int | None = None) -> Iterator[Tensor]:
        """Yield the results of the batch, without its padding, and of each step; a static cache has ``slots``."""
        for start, stop in itertools.pairwise((0, *range(PROMPT, length + 1))):
            seen = mask[:, :stop] if slots is None else F.pad(mask[:, :stop], (0, slots - stop))
            given = with_own_cache_name(names, {"attention_mask": seen, "cache": cache})
            output = base(input_ids=tokens[:, start:stop], use_cache=True, return_dict=True, **given)
            cache = cache_of(output)
            yield output[0][:, 0 if start else PADDING :]

    def static() -> Tensor:
        return torch.cat([*steps(StaticCache(config=base.config, max_cache_len=length + 1), length + 1)], dim=1)

    def generate() -> Tensor:
        # Rounding decides no token: the next one is given.
        forced = [lambda seen, logits: F.one_hot(tokens[:, min(seen.shape[1], length - 1)], logits.shape[-1]).float()]
        options = {"max_new_tokens": STEPS, "pad_token_id": 0, "use_cache": True, "output_logits": True}
        options |= {"cache_implementation": "static", "disable_compile": True, "return_dict_in_generate": True}
        rules = {"generation_config": GenerationConfig(do_sample=False, **options), "logits_processor": forced}
        before = vars(outer).copy()
        try:
            return torch.stack(outer.generate(tokens[:, :PROMPT], attention_mask=mask[:, :PROMPT], **rules).logits)
        finally:  # the model would keep the static cache
            vars(outer).clear()
            vars(outer).update(before)

    further = {"with a static cache": static} | ({} if outer is base else {"in generate": generate})
    with measuring(outer):
        results = {"in a prompt": base(input_ids=tokens[:1, :PROMPT], return_dict=True)[0]}
        padded, *cached = steps(None)
        results["in a batch with padding"] = padded
        results |= {f"in cached step {index}": x for index, x in enumerate(cached, 1)}
        for name, make in further.items():
            if wanted is None:
                with contextlib.suppress(Exception):
                    results[name] = make()
            elif name in wanted:
                results[name] = make()
    return {name: x.double() for name, x in results.items()}


@contextlib.contextmanager
def perturbed(layers: Iterable[nn.Module]) -> Iterator[None]:
    """Perturb the result of each attention layer by one unit of rounding."""

    def perturb(layer: nn.Module, args: Any, output: tuple[Any, ...]) -> tuple[Any, ...]:
        result = output[0]
        signs = 1 - 2 * (torch.arange(result.numel(), device=result.device) % 7 % 2).reshape(result.shape)
        # The models compute softmax in float32 even for float64 inputs.
        unit = max(torch.finfo(x).eps for x in (result.dtype, torch.float32)) * result.abs().amax(dim=-1, keepdim=True)
        return (result + signs * unit, *output[1:])

    with contextlib.ExitStack() as hooks:
        for layer in layers:
            hooks.enter_context(layer.register_forward_hook(perturb))
        yield


@contextlib.contextmanager
def measuring(model: nn.Module) -> Iterator[None]:
    """Run a model in at least float32, without gradients, dropout and autocast; restore it afterwards.

    In half precision, rounding would hide a mistake. Weights are cast one block at a time, so that no second copy of
    the model is in memory.
    """
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
    place = next(model.parameters()).device.type
    with contextlib.ExitStack() as hooks, evaluating(model), torch.no_grad(), torch.autocast(place, enabled=False):
        for module in owned:
            hooks.enter_context(module.register_forward_pre_hook(cast))
            hooks.enter_context(module.register_forward_hook(put_back))
        try:
            yield
        finally:
            for parameter, data in halves.items():
                parameter.data = data


def _units(module: nn.Module) -> Iterator[tuple[nn.Module, list[nn.Parameter]]]:
    """Yield blocks (items of a ModuleList) with all their parameters, and other modules with their direct ones."""
    if isinstance(module, nn.ModuleList):
        yield from ((block, list(block.parameters())) for block in module)
        return
    yield module, list(module.parameters(recurse=False))
    for child in module.children():
        yield from _units(child)
