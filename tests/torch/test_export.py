"""A trained model leaves Python: exported programs hold PyTorch's own operators and give the model's numbers.

Each model is exported once; the program runs in ``onnxruntime``, and in a process that never imports this library.
"""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
pytest.importorskip("onnxscript", reason="onnxscript is not installed")

import alibi_torch  # noqa: E402
from alibi_torch import AlibiAttention, AlibiConfig, AlibiEncoder, AlibiLanguageModel  # noqa: E402

SIZES: dict[str, Any] = {"num_layers": 2, "embed_dim": 32, "num_heads": 4, "dropout": 0.0}
ANY = torch.export.Dim.DYNAMIC


class Program(torch.nn.Module):
    """A module as a function of tensors."""

    def __init__(self, module: torch.nn.Module, function: Callable[..., Any]) -> None:
        super().__init__()
        self.module, self.function = module, function

    def forward(self, *tensors: torch.Tensor) -> Any:
        return self.function(self.module, *tensors)


def in_encoder_of_pytorch() -> torch.nn.Module:
    encoder = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2)
    for layer in encoder.layers:
        layer.self_attn = alibi_torch.AlibiMultiheadAttention(32, 4, batch_first=True)
    return encoder


def step(model: Any, tokens: torch.Tensor, past: torch.Tensor, gates: Any = (None, None)) -> Any:
    caches = model.transformer.make_caches(tokens.shape[0], past.shape[4] + tokens.shape[1])
    for cache, (key, value), log_gates in zip(caches, past, gates, strict=True):
        cache.append(key, value, log_gates=log_gates)
    return model(tokens, caches=caches), torch.stack([torch.stack([x.keys, x.values]) for x in caches])


def step_of_transformers(model: Any, tokens: torch.Tensor, past: torch.Tensor) -> Any:
    from transformers import DynamicCache

    from tests.support.dense_alibi import CACHE

    cache = DynamicCache()
    for index, (key, value) in enumerate(past):
        cache.update(key, value, index)
    logits = model(tokens, **{CACHE: cache}, use_cache=True).logits
    return logits, torch.stack([torch.stack([x.keys, x.values]) for x in cache.layers])


def encoder() -> AlibiEncoder:
    return AlibiEncoder(AlibiConfig(**SIZES, is_causal=False, learnable_slopes=True), 50)


def of_transformers(name: str) -> torch.nn.Module:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    from alibi_torch.transformers import accelerate, with_alibi

    sizes: dict[str, Any] = {"vocab_size": 50, "hidden_size": 32}
    if name == "bert":
        config = transformers.BertConfig(**sizes, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
        return with_alibi(transformers.BertModel(config).eval())
    if name == "gpt2":
        return with_alibi(
            transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=4)).eval()
        )
    if name == "bloom":
        return accelerate(transformers.BloomForCausalLM(transformers.BloomConfig(**sizes, n_layer=2, n_head=4)).eval())
    config = transformers.MptConfig(vocab_size=50, d_model=32, n_layers=2, n_heads=4)
    return accelerate(transformers.MptForCausalLM(config).eval())


def x(batch: int, length: int) -> tuple[torch.Tensor, ...]:
    return (torch.randn(batch, length, 32),)


def without_batch(batch: int, length: int) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(3, 4, length, 8))


def tokens(batch: int, length: int) -> tuple[torch.Tensor, ...]:
    return (torch.randint(0, 50, (batch, length)),)


def masked(batch: int, length: int) -> tuple[torch.Tensor, ...]:
    lengths = torch.randint(1, length + 1, (batch, 1))
    return *tokens(batch, length), (torch.arange(length) < lengths).to(torch.int64)


def with_past(batch: int, length: int) -> tuple[torch.Tensor, ...]:
    return *tokens(batch, 3), torch.randn(2, 2, batch, 4, length, 8)


def beside(batch: int, length: int) -> tuple[torch.Tensor, ...]:
    """Tokens, and others, which may be fewer or more."""
    return *x(batch, length), *x(batch, length + 2 if length % 2 == 0 else length // 2)


def with_past_and_gates(batch: int, length: int) -> tuple[torch.Tensor, ...]:
    return *with_past(batch, length), -torch.rand(2, batch, 4, length)


def encoded(pooling: str) -> Callable[..., Any]:
    return lambda model, tokens, mask: model.encode(tokens, mask=mask, pooling=pooling)


def hidden(model: Any, tokens: torch.Tensor, mask: torch.Tensor) -> Any:
    return model(tokens, attention_mask=mask, **({} if "Bert" in type(model).__name__ else {"use_cache": False}))[0]


def attended(model: Any, *given: torch.Tensor) -> Any:
    return model(*given)


BATCH_AND_LENGTH, PAST = {0: ANY, 1: ANY}, {2: ANY, 4: ANY}
OPTIONS: dict[str, Any] = {"learnable_slopes": True, "window_size": 4, "num_kv_heads": 2}
# The model, what it computes, its inputs for a batch and a length, and their axes that vary.
MODELS: dict[str, tuple[Callable[[], torch.nn.Module], Callable[..., Any], Callable[..., Any], Any]] = {
    "layer": (lambda: AlibiAttention(32, 4, **OPTIONS), attended, x, [BATCH_AND_LENGTH]),
    "symmetric": (lambda: AlibiAttention(32, 4, is_causal=False), attended, x, [BATCH_AND_LENGTH]),
    "in PyTorch's encoder": (in_encoder_of_pytorch, attended, x, [BATCH_AND_LENGTH]),
    "language model": (lambda: AlibiLanguageModel(AlibiConfig(**SIZES), 50), attended, tokens, [BATCH_AND_LENGTH]),
    "step": (lambda: AlibiLanguageModel(AlibiConfig(**SIZES), 50), step, with_past, [{0: ANY}, PAST]),
    "gated step": (
        lambda: AlibiLanguageModel(AlibiConfig(**SIZES, forget_gate=True), 50),
        step,
        with_past_and_gates,
        [{0: ANY}, PAST, {1: ANY, 3: ANY}],
    ),
    "gates": (
        lambda: AlibiLanguageModel(AlibiConfig(**SIZES, forget_gate=True), 50),
        lambda model, tokens, mask: model(tokens, mask=mask),
        masked,
        [BATCH_AND_LENGTH] * 2,
    ),
    "half": (
        lambda: AlibiAttention(32, 4).half(),
        attended,
        lambda *sizes: (x(*sizes)[0].half(),),
        [BATCH_AND_LENGTH],
    ),
    "function": (torch.nn.Identity, lambda _, *given: alibi_torch.attention(*given), without_batch, [{1: ANY}] * 3),
    "cross": (
        lambda: AlibiAttention(32, 4),
        lambda layer, x, context: layer(x, context=context),
        beside,
        [BATCH_AND_LENGTH] * 2,
    ),
    "encoder": (encoder, lambda model, tokens, mask: model(tokens, mask=mask), masked, [BATCH_AND_LENGTH] * 2),
    "mean": (encoder, encoded("mean"), masked, [BATCH_AND_LENGTH] * 2),
    "cls": (encoder, encoded("cls"), masked, [BATCH_AND_LENGTH] * 2),
    **{x: (functools.partial(of_transformers, x), hidden, masked, [BATCH_AND_LENGTH] * 2) for x in ("bert", "bloom")},
    "step of GPT-2": (lambda: of_transformers("gpt2"), step_of_transformers, with_past, [{0: ANY}, PAST]),
    "mpt": (lambda: of_transformers("mpt"), hidden, masked, [BATCH_AND_LENGTH] * 2),
}
QUICK = ("layer", "mean", "half")
EACH = pytest.mark.parametrize("name", [x if x in QUICK else pytest.param(x, marks=pytest.mark.slow) for x in MODELS])


def made(name: str) -> tuple[Program, list[tuple[torch.Tensor, ...]], Any]:
    """Return a program, its inputs, of which the first are to be recorded, and the axes that vary."""
    torch.manual_seed(0)
    model, function, inputs, axes = MODELS[name]
    program = Program(model(), function).eval()
    return program, [inputs(*sizes) for sizes in ((2, 10), (3, 17), (1, 130))], (tuple(axes),)


def leaves(results: Any) -> list[Any]:
    return [results] if isinstance(results, torch.Tensor) else list(results)


def within(found: Any, expected: Any) -> None:
    """The model and its program round the same sums in another order."""
    for one, other in zip(found, leaves(expected), strict=True):
        least = max(1e-5, 2 * torch.finfo(other.dtype).eps)
        torch.testing.assert_close(torch.as_tensor(one), other.detach(), rtol=least, atol=least)


@pytest.mark.parametrize("opset", [18, 23])
@EACH
def test_onnx_gives_the_numbers_of_the_model(name: str, opset: int, tmp_path: Path) -> None:
    program, inputs, shapes = made(name)
    written = torch.onnx.export(program, inputs[0], dynamic_shapes=shapes, opset_version=opset, verbose=False)
    written.save(tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    for given in inputs:
        names = [x.name for x in session.get_inputs()]
        found = session.run(None, {name: x.numpy() for name, x in zip(names, given, strict=True)})
        within(found, program(*given))


ELSEWHERE = """
import sys, torch
program, package, expected = torch.export.load("model.pt2").module(), sys.argv[1], torch.load("expected.pt")
for run in (program, *([torch._inductor.aoti_load_package(package)] if package else [])):
    for given, results in expected:
        found = run(*given)
        for one, other in zip([found] if isinstance(found, torch.Tensor) else found, results, strict=True):
            least = max(1e-5, 2 * torch.finfo(other.dtype).eps)
        torch.testing.assert_close(one.detach(), other, rtol=least, atol=least)
assert not [name for name in sys.modules if "alibi" in name]
"""


@EACH
def test_a_saved_program_runs_without_this_library(name: str, tmp_path: Path) -> None:
    program, inputs, shapes = made(name)
    exported = torch.export.export(program, inputs[0], dynamic_shapes=shapes)
    torch.export.save(exported, tmp_path / "model.pt2")
    torch.save([(x, [y.detach() for y in leaves(program(*x))]) for x in inputs], tmp_path / "expected.pt")
    package = "" if name in QUICK else torch._inductor.aoti_compile_and_package(exported)
    subprocess.run([sys.executable, "-c", ELSEWHERE, package], cwd=tmp_path, check=True)


@pytest.mark.parametrize("name", ["step", "gates", "cross"])
def test_a_program_takes_batches_and_lengths_that_were_not_recorded(name: str) -> None:
    program, inputs, shapes = made(name)
    recorded = torch.export.export(program, inputs[0], dynamic_shapes=shapes).module()
    for given in inputs:
        within(leaves(recorded(*given)), program(*given))


def test_lengths_of_rows_in_a_cache_are_refused_with_the_fix() -> None:
    def prefill(model: Any, tokens: torch.Tensor, lengths: torch.Tensor) -> Any:
        caches = model.transformer.make_caches(2, 10)
        return model.transformer(model.embed(tokens), caches=caches, lengths=lengths)

    program = Program(AlibiLanguageModel(AlibiConfig(**SIZES), 50), prefill)
    with pytest.raises(ValueError, match="lengths must be an array with values, got .*exported"):
        torch.export.export(program, (*tokens(2, 10), torch.tensor([10, 7])))


def test_who_names_an_implementation_gets_it() -> None:
    layer = AlibiAttention(32, 4, implementation="tiled")
    program = torch.export.export(layer, x(2, 10), dynamic_shapes=({0: ANY, 1: ANY},))
    assert "alibi.attention" in str(program.graph)


def test_a_boolean_mask_of_two_axes_is_refused_with_the_fix() -> None:
    program = Program(AlibiAttention(32, 4, is_causal=False), lambda layer, x, mask: layer(x, mask=mask))
    given = (*x(2, 10), torch.ones(2, 10, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"mask must broadcast to .*; while torch.export .*mask\[:, None, None, :\]"):
        torch.export.export(program, given, dynamic_shapes=(({0: ANY, 1: ANY}, {0: ANY, 1: ANY}),))
