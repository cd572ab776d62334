"""BLOOM, MPT and Falcon of transformers, accelerated, against themselves."""

from __future__ import annotations

import copy
import functools
import itertools
import operator
import pickle
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

pytest.importorskip("transformers")

import transformers
from transformers import BloomConfig, BloomForCausalLM, BloomModel, DynamicCache, StaticCache
from transformers.models.bloom.modeling_bloom import BloomAttention

from alibi_torch.transformers import AlibiCache, accelerate, paths, restore
from alibi_torch.transformers._cache import append
from tests.support.dense_alibi import CACHE
from tests.support.memory import largest_allocation
from tests.support.threads import check_threads

transformers.logging.set_verbosity_error()

VOCABULARY = 97


def bloom(**options: Any) -> Any:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 60, "n_layer": 2, "n_head": 6}
    return BloomForCausalLM(BloomConfig(**sizes | options))


def mpt(**options: Any) -> Any:
    sizes = {"vocab_size": VOCABULARY, "d_model": 60, "n_heads": 6, "n_layers": 2, "max_seq_len": 2048}
    return transformers.MptForCausalLM(transformers.MptConfig(**sizes | options))


def falcon(implementation: str = "sdpa", **options: Any) -> Any:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.FalconConfig(**{"alibi": True} | sizes | options)
    config._attn_implementation = implementation
    return transformers.FalconForCausalLM(config)


MODELS: dict[str, Callable[[], Any]] = {
    "bloom": bloom,
    "bloom, post-norm residual": lambda: bloom(apply_residual_connection_post_layernorm=True, n_head=4),
    "bloom, sums in parts": lambda: bloom(slow_but_exact=True, pretraining_tp=5),
    "mpt": mpt,
    "mpt, clipped and scaled": lambda: mpt(attn_config={"clip_qkv": 0.7, "softmax_scale": 0.4}, n_heads=4),
    "falcon": falcon,
    "falcon, eager": lambda: falcon("eager"),
    "falcon, grouped": lambda: falcon(new_decoder_architecture=True, num_kv_heads=2),
    "falcon, all heads": lambda: falcon(multi_query=False, parallel_attn=False),
}
FAMILIES = ("bloom", "mpt", "falcon")


def model_of(name: str) -> Any:
    """Return a model whose weights are so large that attention is no mere mean."""
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)
        else:
            parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def tokens_of(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def logits_of(model: Any, tokens: Any, **arguments: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens, **arguments).logits


def layers_of(model: Any) -> list[Any]:
    blocks = getattr(model.transformer, "blocks", None) or model.transformer.h
    return [getattr(block, "attn", None) or block.self_attention for block in blocks]


def described_of(model: Any) -> Any:
    return [(type(x), sorted(vars(x))) for x in model.modules()]


@functools.cache
def expected_of(name: str, length: int) -> tuple[torch.Tensor, float]:
    """Return a model's own logits for one row of tokens, and how far they are from those it has in float64."""
    model, tokens = model_of(name), tokens_of(1, length)
    expected = logits_of(model, tokens)
    return expected, (expected - logits_of(model.double(), tokens)).abs().max().item()


def padding(*lengths: int, total: int, side: str) -> torch.Tensor:
    columns, held = torch.arange(total), torch.tensor(lengths)[:, None]
    return (columns >= total - held if side == "left" else columns < held).long()


def assert_near(actual: torch.Tensor, expected: torch.Tensor, units: float = 64) -> None:
    """Check that numbers differ by at most so many units of rounding of the largest."""
    allowed = units * torch.finfo(expected.dtype).eps * expected.abs().max()
    assert (actual - expected).abs().max() <= allowed


# --- Numbers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "length"),
    [*itertools.product(MODELS, (1, 150)), *itertools.product((*FAMILIES, "falcon, eager"), (255, 257, 1100))],
)
def test_logits_are_the_models_own(name: str, length: int) -> None:  # of 1,100 keys some are left out
    (expected, own), actual = expected_of(name, length), logits_of(accelerate(model_of(name)), tokens_of(1, length))
    assert (actual - expected).abs().max() <= 4 * max(own, torch.finfo(torch.float32).eps * expected.abs().max())


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_as_near_to_the_models_numbers_as_the_model(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The model's numbers: its weights and bias, rounded as in this precision, the rest computed in float64.
    model, tokens, text = model_of(name).to(dtype), tokens_of(1, 300), torch.ones(1, 300, dtype=torch.long)
    own, actual = (logits_of(x, tokens, attention_mask=text) for x in (model, accelerate(copy.deepcopy(model))))
    module = sys.modules[type(model).__module__]
    if hasattr(module, "build_alibi_tensor"):
        build = module.build_alibi_tensor
        monkeypatch.setattr(module, "build_alibi_tensor", lambda *two, **_: build(*two[:2], dtype).double())
    exact = logits_of(model.double(), tokens, attention_mask=text)
    own_error, error = ((x - exact).abs().max() for x in (own, actual))
    assert error <= 1.5 * own_error, f"{error:.2e}, its own error is {own_error:.2e}"


def test_the_exact_contract_is_the_papers() -> None:
    # BLOOM's bias is exact where slopes are powers of two; Falcon's has positions in bfloat16.
    model, tokens = bloom(n_head=4, hidden_size=64).eval(), tokens_of(1, 60)
    expected = logits_of(model, tokens)
    assert_near(logits_of(accelerate(model, contract="exact"), tokens), expected)
    model, tokens = model_of("falcon"), tokens_of(1, 600)
    found = [logits_of(accelerate(copy.deepcopy(model), contract=x), tokens) for x in ("model", "exact")]
    assert (found[0] - found[1]).abs().max() > 1e-3


MASKS = {
    "left": [20 * "1", 9 * "0" + 11 * "1", 19 * "0" + "1"],
    "right": [20 * "1", 9 * "1" + 11 * "0", "1" + 19 * "0"],
    "holes": ["11111000111111111111", "00111100111000111111", "01010101010101010101"],
    "a row of padding": [20 * "1", 20 * "0", 8 * "1" + 12 * "0"],
}


def mask_of(name: str) -> torch.Tensor:
    return torch.tensor([[int(x) for x in row] for row in MASKS[name]])


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("where", MASKS)
def test_padding(name: str, where: str) -> None:
    model, tokens, mask = model_of(name), tokens_of(3, 20), mask_of(where)
    accelerated = accelerate(copy.deepcopy(model), strict=True)
    # Padding has the model's numbers, too: queries that see no key get the mean of all values.
    expected = logits_of(model, tokens, attention_mask=mask)
    assert_near(logits_of(accelerated, tokens, attention_mask=mask), expected)
    for places in (None, 26):  # a static cache has unused places, which queries that see no key average as well
        parts: list[list[torch.Tensor]] = [[], []]
        for x, steps in zip((model, accelerated), parts, strict=True):
            cache = StaticCache(config=x.config, max_cache_len=places) if places else DynamicCache(config=x.config)
            for i, j in ((0, 7), (7, 8), (8, 15), (15, 16), (16, 20)):
                so_far = torch.nn.functional.pad(mask[:, :j], (0, places - j if places else 0))
                steps.append(logits_of(x, tokens[:, i:j], attention_mask=so_far, **{CACHE: cache}))
        assert_near(torch.cat(parts[1], dim=1), torch.cat(parts[0], dim=1))


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.bfloat16])
def test_masks_of_other_numbers(name: str, dtype: torch.dtype) -> None:
    # BLOOM and Falcon count positions in the mask's dtype, and count a 2 twice.
    model, tokens, mask = model_of(name), tokens_of(1, 300), torch.ones(1, 300, dtype=dtype)
    accelerated = accelerate(copy.deepcopy(model))
    for first in (0, 2):
        mask[0, :2] = first
        expected = logits_of(model, tokens, attention_mask=mask)
        assert_near(logits_of(accelerated, tokens, attention_mask=mask), expected, 128)


@pytest.mark.parametrize("contract", ["model", "exact"])
@pytest.mark.parametrize("where", ["left", "holes"])
@pytest.mark.parametrize("name", ["bloom", "mpt"])
def test_padding_of_rows_so_long_that_keys_are_left_out(name: str, contract: str, where: str) -> None:
    # BLOOM counts text, so a row with holes is the row without them; MPT counts columns, and hides some.
    model, tokens, columns = model_of(name), tokens_of(1, 1100), torch.arange(1100)
    mask = ((columns % 100 < 60) | (columns == 1099) if where == "holes" else columns >= 200).long()[None]
    expected = logits_of(model, tokens, attention_mask=mask)
    actual = logits_of(accelerate(model, contract=contract), tokens, attention_mask=mask)
    assert (actual - expected)[mask.bool()].abs().max() <= 2.0**-13 * expected.abs().max()


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("margins", [None, (0, 0), (4, 3)])  # without a mask, or with so much padding around
def test_packed_sequences_are_what_they_are_alone(
    name: str, dtype: torch.dtype, margins: tuple[int, int] | None
) -> None:
    lengths, (before, after) = (20, 1, 30), margins or (0, 0)
    model, tokens = accelerate(model_of(name).to(dtype), strict=True), tokens_of(2, before + 51 + after)
    text = slice(before, before + 51)
    mask, position_ids = torch.zeros_like(tokens), torch.ones_like(tokens)
    mask[:, text], position_ids[:, text] = 1, torch.cat([torch.arange(n) for n in lengths])
    if margins is not None:
        mask[:, before + 5 : before + 7] = 0  # within the first
    arguments = {"position_ids": position_ids} | ({} if margins is None else {"attention_mask": mask})
    packed, shown = logits_of(model, tokens, **arguments)[:, text], mask[:, text]
    parts = zip(tokens[:, text].split(lengths, dim=1), shown.split(lengths, dim=1), strict=True)
    alone = torch.cat([logits_of(model, x, attention_mask=y) for x, y in parts], dim=1)
    assert_near(packed[shown.bool()], alone[shown.bool()])
    assert not torch.allclose(packed, logits_of(model, tokens)[:, text], atol=0.1)


def test_the_bias_of_packed_rows_is_counted_from_where_each_sequence_begins() -> None:
    # MPT counts from the end of a row: what begins after 10,000 tokens has biases of -2,500, where scores lose digits.
    torch.manual_seed(0)
    model = mpt(d_model=32, n_heads=4, n_layers=1, max_seq_len=16_384).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model, tokens = accelerate(model, contract="model"), tokens_of(1, 10_030)
    positions = torch.cat([torch.arange(10_000), torch.arange(30)])[None]
    with torch.no_grad():
        packed = model(tokens, position_ids=positions).logits[:, 10_000:]
        alone = model(tokens[:, 10_000:]).logits
    assert (packed - alone).abs().max() <= 2.0**-18 * alone.abs().max()


def test_mpt_reads_texts_longer_than_its_max_seq_len() -> None:
    model, tokens = mpt(max_seq_len=32, n_heads=4, d_model=64).eval(), tokens_of(1, 80)
    longer = mpt(max_seq_len=80, n_heads=4, d_model=64).eval()
    longer.load_state_dict(model.state_dict())
    with pytest.raises(RuntimeError):
        model(tokens)
    assert_near(logits_of(accelerate(model), tokens), logits_of(longer, tokens))


# --- Decoding -------------------------------------------------------------------------------------------------------

CACHES: dict[str, Callable[[Any], Any]] = {
    "dynamic": lambda model: DynamicCache(config=model.config),
    "static": lambda model: StaticCache(config=model.config, max_cache_len=1300),
    "alibi": AlibiCache,
}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "temperature": 0.8, "top_k": 20},
    "beams": {"do_sample": False, "num_beams": 3},
}


def generated(model: Any, tokens: torch.Tensor, **options: Any) -> torch.Tensor:
    torch.manual_seed(5)
    return model.generate(tokens, use_cache=True, pad_token_id=0, eos_token_id=None, **options)


@pytest.mark.parametrize(
    ("name", "way"), [*itertools.product([*FAMILIES, "falcon, grouped"], ["greedy", "beams"]), ("bloom", "sampling")]
)
def test_generate(name: str, way: str) -> None:
    model, tokens = model_of(name), tokens_of(2, 20)
    masks = [padding(20, 13, total=20, side=side) for side in ("left", "right")]
    for some in ({}, *({"attention_mask": mask} for mask in masks)):
        options = WAYS[way] | some | {"max_new_tokens": 6}
        expected = generated(model, tokens, **options)
        accelerate(model, strict=True)
        for kind, cache in CACHES.items():
            held = {"cache_implementation": kind} if kind == "static" else {CACHE: cache(model)}
            assert torch.equal(generated(model, tokens, **options, **held), expected), kind
        restore(model)


@pytest.mark.parametrize("name", FAMILIES)
def test_masks_of_a_static_cache_keep_their_shape(name: str) -> None:  # or a compiled step would not serve the next
    model, mask, shapes = accelerate(model_of(name), strict=True), padding(20, 13, total=20, side="left"), set()
    model.transformer.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.add(kwargs["attention_mask"].shape), with_kwargs=True
    )
    generated(model, tokens_of(2, 20), attention_mask=mask, max_new_tokens=4, cache_implementation="static")
    assert len(shapes) == 1


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("name", FAMILIES)
def test_decoding_a_long_text_in_pieces(name: str, kind: str) -> None:
    (expected, own), model = expected_of(name, 1100), accelerate(model_of(name))
    cache = CACHES[kind](model)
    pieces = tokens_of(1, 1100).split((1020, 1, 1, 1, 40, 1, 36), dim=1)
    actual = torch.cat([logits_of(model, x, **{CACHE: cache}) for x in pieces], dim=1)
    assert int(cache.get_seq_length()) == 1100
    assert (actual - expected).abs().max() <= 4 * own


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_cache_goes_by_either_name(family: str, name: str) -> None:  # in any version of transformers
    model, tokens = accelerate(model_of(family), strict=True), tokens_of(2, 20)
    expected = logits_of(model, tokens)
    cache = AlibiCache(model)
    parts = [logits_of(model, x, use_cache=True, **{name: cache}) for x in tokens.split([12, 7, 1], dim=1)]
    assert cache.get_seq_length() == 20
    assert_near(torch.cat(parts, dim=1), expected)


@pytest.mark.parametrize("kind", ["dynamic", "alibi"])
def test_caches_may_be_cropped_copied_pickled_and_reset(kind: str) -> None:
    model, tokens, others = accelerate(model_of("bloom")), tokens_of(1, 330), tokens_of(1, 30, seed=2)
    cache = CACHES[kind](model)
    logits_of(model, tokens, **{CACHE: cache})
    cache.crop(-30)
    parts = [logits_of(model, x, **{CACHE: cache}) for x in others.split([9, 20, 1], dim=1)]
    whole = logits_of(model, torch.cat([tokens[:, :300], others], dim=1))
    assert torch.allclose(torch.cat(parts, dim=1), whole[:, 300:], atol=1e-3)
    further = [
        logits_of(model, others[:, :1], **{CACHE: x})
        for x in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache)), cache)
    ]
    for result in further[:2]:
        assert torch.allclose(result, further[2], atol=1e-4)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert_near(logits_of(model, others, **{CACHE: cache}), logits_of(model, others))


def test_a_large_dynamic_cache_is_not_copied_at_each_token() -> None:
    model, tokens = accelerate(model_of("mpt")), tokens_of(1, 660)
    cache = DynamicCache(config=model.config)
    logits_of(model, tokens[:, :600], **{CACHE: cache})
    assert cache.layers[1].keys.is_contiguous()  # as safetensors may require
    places = set()
    for place in range(600, 660):
        logits_of(model, tokens[:, place : place + 1], **{CACHE: cache})
        places.add(cache.layers[1].keys.data_ptr())
    assert len(places) == 1
    assert cache.get_seq_length() == cache.layers[1].keys.shape[2] == 660


@pytest.mark.parametrize("kind", ["dynamic", "alibi"])
def test_a_cache_of_inference_mode_serves_after_it(kind: str) -> None:
    model, tokens = accelerate(model_of("bloom")), tokens_of(1, 640)
    cache = CACHES[kind](model)
    with torch.inference_mode():
        model(tokens[:, :620], **{CACHE: cache})
        model(tokens[:, 620:630], **{CACHE: cache})
    last = logits_of(model, tokens[:, 630:], **{CACHE: cache})
    assert torch.allclose(last, logits_of(model, tokens)[:, 630:], atol=1e-3)


# --- Gradients and recorders ----------------------------------------------------------------------------------------


def gradients_of(model: Any, tokens: torch.Tensor, **arguments: Any) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(tokens, labels=tokens, use_cache=False, **arguments).loss.backward()
    return {name: x.grad.clone() for name, x in model.named_parameters()}


@pytest.mark.parametrize("checkpoints", [None, {"use_reentrant": False}, {"use_reentrant": True}], ids=str)
@pytest.mark.parametrize("name", [*FAMILIES, "falcon, eager"])
def test_gradients_are_the_models_own(name: str, checkpoints: dict[str, bool] | None) -> None:
    model, tokens = model_of(name).train(), tokens_of(2, 50)
    # The first token is predicted by padding that sees no text, so that its label is left out.
    arguments = {"attention_mask": padding(50, 33, total=50, side="right")}
    expected = gradients_of(model, tokens, **arguments)
    exact = gradients_of(copy.deepcopy(model).double(), tokens, **arguments)
    accelerate(model)
    if checkpoints is not None:
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable(checkpoints)
    actual = gradients_of(model, tokens, **arguments)
    assert actual.keys() == expected.keys()
    for parameter, gradient in actual.items():
        scale = exact[parameter].abs().max()
        own = ((expected[parameter] - exact[parameter]).abs().max() / scale).clamp(min=2.0**-21)
        assert (gradient - exact[parameter]).abs().max() / scale <= 8 * own, parameter


@pytest.mark.parametrize("name", [*FAMILIES, "falcon, eager"])
def test_gradients_of_queries_that_see_no_key(name: str) -> None:  # padding on the left predicts a text's first token
    model, tokens = model_of(name), tokens_of(2, 20)
    mask = padding(20, 13, total=20, side="left")
    expected, actual = (
        gradients_of(x, tokens, attention_mask=mask) for x in (model, accelerate(copy.deepcopy(model), strict=True))
    )
    for parameter, gradient in actual.items():
        assert (gradient - expected[parameter]).abs().max() <= 1e-4 * expected[parameter].abs().max(), parameter


@pytest.mark.parametrize("name", ["mpt", "falcon, eager"])  # BLOOM's activation has no second derivative
def test_gradients_of_gradients(name: str) -> None:
    model, tokens, found = model_of(name), tokens_of(2, 20), []
    mask = padding(20, 13, total=20, side="right")
    for x in (model, accelerate(copy.deepcopy(model), strict=True)):
        weights = [weight for weight in x.transformer.parameters() if weight.ndim > 1][:3]
        loss = x(tokens, attention_mask=mask, labels=tokens, use_cache=False).loss
        penalty = sum(gradient.square().sum() for gradient in torch.autograd.grad(loss, weights, create_graph=True))
        found.append(torch.autograd.grad(penalty, weights))
    for expected, actual in zip(*found, strict=True):
        assert (actual - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("name", ["mpt", "falcon"])
def test_gradients_of_each_text_by_itself(name: str) -> None:
    model, tokens, mask = model_of(name), tokens_of(3, 20), mask_of("holes")
    weights = {name: weight.detach() for name, weight in model.named_parameters()}

    def loss(weights: Any, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        given = {"attention_mask": mask[None], "position_ids": torch.arange(20)[None]}
        logits = torch.func.functional_call(model, weights, (tokens[None],), given).logits
        return (logits.square() * mask[:, None]).mean()

    expected, actual = (
        torch.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(weights, tokens, mask)
        for _ in (model, accelerate(model, strict=True))
    )
    for parameter, gradient in actual.items():
        assert (gradient - expected[parameter]).abs().max() <= 1e-5 * expected[parameter].abs().max(), parameter


@pytest.mark.parametrize("name", FAMILIES)
def test_autocast(name: str) -> None:
    model, tokens, mask = model_of(name), tokens_of(3, 20), mask_of("right")
    expected = logits_of(copy.deepcopy(model), tokens, attention_mask=mask)
    with torch.autocast("cpu", torch.bfloat16):
        own = logits_of(model, tokens, attention_mask=mask)
        actual = logits_of(accelerate(model), tokens, attention_mask=mask)
    own_error, error = ((x - expected)[mask.bool()].square().mean().sqrt() for x in (own, actual))
    assert error <= 1.2 * own_error


@pytest.mark.parametrize("name", FAMILIES)
def test_a_call_without_values(name: str) -> None:
    model = accelerate(model_of(name), strict=True).to("meta")
    inputs = {"attention_mask": mask_of("holes").to("meta"), "position_ids": torch.arange(20, device="meta")[None]}
    assert model(tokens_of(3, 20).to("meta"), **inputs).logits.shape == (3, 20, VOCABULARY)


# BLOOM's activation is an autograd.Function without a forward of its own kind.
BLOOMS_ACTIVATION = pytest.mark.filterwarnings("ignore:<class 'torch.autograd.function.Function'> should not be")


@BLOOMS_ACTIVATION
@pytest.mark.parametrize("name", ["mpt", *(pytest.param(x, marks=pytest.mark.slow) for x in ("bloom", "falcon"))])
def test_compiled_in_one_graph(name: str) -> None:
    torch.compiler.reset()
    model, counter = model_of(name), torch._dynamo.testing.CompileCounter()
    del (getattr(model.transformer, "blocks", None) or model.transformer.h)[1:]
    compiled = torch.compile(accelerate(copy.deepcopy(model)), backend=counter, fullgraph=True)

    def check(length: int, **arguments: Any) -> None:
        expected, actual = (logits_of(x, tokens_of(3, length), **arguments) for x in (model, compiled))
        assert_near(actual, expected)

    for length in (20, 23, 300):
        check(length, use_cache=False, attention_mask=padding(length, 9, 0, total=length, side="left"))
    assert counter.frame_count <= 2
    check(20, use_cache=True, position_ids=torch.arange(20)[None])


@pytest.mark.slow
@BLOOMS_ACTIVATION
def test_export_for_any_length() -> None:
    model, tokens, length = model_of("bloom"), tokens_of(3, 20), torch.export.Dim("length")
    arguments = {"input_ids": tokens, "attention_mask": mask_of("holes"), "use_cache": False}
    shapes = {"input_ids": {1: length}, "attention_mask": {1: length}, "use_cache": None}
    shorter = {"input_ids": tokens[:, :11], "attention_mask": mask_of("holes")[:, :11], "use_cache": False}
    with torch.no_grad():
        expected = model(**shorter).logits
        exported = torch.export.export(accelerate(model), (), arguments, dynamic_shapes=shapes, strict=False)
        assert_near(exported.module()(**shorter).logits, expected)


@pytest.mark.slow
@BLOOMS_ACTIVATION
def test_compiled_decoding_in_a_static_cache() -> None:
    torch.compiler.reset()
    model, tokens = accelerate(model_of("bloom")), tokens_of(2, 30)
    compiled = torch.compile(model, backend="aot_eager")
    caches = [StaticCache(config=model.config, max_cache_len=40) for _ in range(2)]
    for cache in caches:
        logits_of(model, tokens[:, :27], **{CACHE: cache})
    for step in tokens[:, 27:].split(1, dim=1):
        actual, expected = (logits_of(x, step, **{CACHE: y}) for x, y in zip((compiled, model), caches, strict=True))
        assert_near(actual, expected)


# --- What the library does not compute --------------------------------------------------------------------------------

WINDOWED = transformers.cache_utils.DynamicSlidingWindowLayer


HIDDEN = torch.ones(20, 20, dtype=torch.bool).triu(1)  # as MPT takes it: True where not to look
HIDDEN[9:, 3:6] = True
OWN: dict[str, Callable[[], dict[str, Any]]] = {
    "output_attentions": lambda: {"output_attentions": True},
    "config.is_causal": lambda: {"attention_mask": padding(20, 13, total=20, side="right")},
    "dropout": dict,
    "the cache": lambda: {CACHE: transformers.Cache(layers=[WINDOWED(50) for _ in range(2)])},
    "attention_mask": lambda: {"attention_mask": HIDDEN.expand(2, 1, -1, -1)},
}


# BLOOM and Falcon build a bias of masks with two axes alone.
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        *itertools.product(["bloom", "mpt", "falcon", "falcon, grouped", "falcon, eager"], list(OWN)[:4]),
        ("mpt", "attention_mask"),
    ],
)
def test_the_models_own_code_computes_what_the_library_does_not(name: str, reason: str) -> None:
    model, tokens = model_of(name), tokens_of(2, 20)
    if reason == "dropout":
        for layer in layers_of(model):
            if hasattr(layer, "attn_dropout_p"):
                layer.attn_dropout_p = 0.3
            else:
                layer.attention_dropout.p = 0.3
        model.train()
    model.config.is_causal = reason != "config.is_causal"
    proves = reason != "config.is_causal"  # where the model's own code would compute the probe
    accelerated, strict = (accelerate(copy.deepcopy(model), strict=x, prove=proves) for x in (False, True))
    torch.manual_seed(3)
    expected = model(tokens, **OWN[reason]())
    torch.manual_seed(3)
    with pytest.warns(UserWarning, match=f"computes this call by its own attention.*: {reason}"):
        actual = accelerated(tokens, **OWN[reason]())
    assert torch.equal(actual.logits, expected.logits)
    for one, other in zip(actual.attentions or (), expected.attentions or (), strict=True):
        assert torch.equal(one, other)
    accelerated(tokens, **OWN[reason]())  # without a second warning, which would be an error
    counts = paths(accelerated)
    assert list(counts.values()) == [2]
    assert next(iter(counts)).startswith(reason)
    with pytest.raises(ValueError, match=f"{reason}.*strict=False"):
        strict(tokens, **OWN[reason]())


@pytest.mark.filterwarnings("ignore:.*computes this call by its own attention")
@pytest.mark.parametrize("kind", ["dynamic", "alibi"])
@pytest.mark.parametrize("name", ["bloom", "mpt", "falcon", "falcon, grouped"])
def test_the_two_ways_share_a_cache(name: str, kind: str) -> None:
    model, tokens, mask = model_of(name), tokens_of(3, 20), mask_of("holes")
    steps = [(0, 7, False), (7, 8, True), (8, 15, False), (15, 16, True), (16, 20, True)]

    def in_steps(cache: Any) -> torch.Tensor:
        parts = [
            logits_of(model, tokens[:, i:j], attention_mask=mask[:, :j], output_attentions=own, **{CACHE: cache})
            for i, j, own in steps
        ]
        return torch.cat(parts, dim=1)

    # Falcon's numbers with attention weights are others than without.
    expected = in_steps(DynamicCache(config=model.config))
    accelerate(model)
    assert_near(in_steps(CACHES[kind](model)), expected)
    assert paths(model)["alibi_torch"] == 2


@pytest.mark.parametrize("name", ["falcon", "falcon, eager"])
def test_an_implementation_that_is_set_later(name: str) -> None:  # by which Falcon adds its bias once or twice
    model, tokens, mask = model_of(name), tokens_of(2, 40), padding(40, 27, total=40, side="left")
    own, fast = copy.deepcopy(model), accelerate(model, strict=True)
    for implementation in ("eager", "sdpa"):
        for x in (own, fast):
            x.config._attn_implementation = implementation
        expected = logits_of(own, tokens, attention_mask=mask)
        assert_near(logits_of(fast, tokens, attention_mask=mask), expected)


RECORDERS: dict[str, Callable[..., Any]] = {
    "torch.jit.trace": torch.jit.trace,
    "make_fx": lambda call, inputs: make_fx(call)(*inputs),
}


@pytest.mark.filterwarnings("ignore")  # of the recorder, and of a call that the model's own code computes
@pytest.mark.parametrize(
    ("name", "recorder"), [*((name, "torch.jit.trace") for name in FAMILIES), ("bloom", "make_fx")]
)
def test_a_call_that_is_recorded_serves_other_masks(name: str, recorder: str) -> None:
    model, tokens, mask = model_of(name).requires_grad_(False), tokens_of(3, 20), mask_of("left")
    expected, record = logits_of(model, tokens, attention_mask=mask), RECORDERS[recorder]

    def call(tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return model(tokens, attention_mask=mask, use_cache=False).logits

    try:
        record(call, (tokens, mask))
    except IndexError:  # of transformers 5.4, in the model's own code
        pytest.skip(f"transformers {transformers.__version__} cannot be traced")
    accelerate(model)
    assert torch.allclose(record(call, (tokens, torch.ones_like(mask)))(tokens, mask), expected, atol=1e-4)
    before = paths(model).get("alibi_torch", 0)
    logits_of(model, tokens, attention_mask=mask)
    assert paths(model)["alibi_torch"] == before + 1


# --- Proof ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", [-1, 1])  # the bias is off by one key, or that of other heads
@pytest.mark.parametrize("name", ["bloom", "mpt"])  # whose own code does without PyTorch's kernel
def test_a_broken_kernel_is_refused(name: str, axis: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens, kernel = model_of(name), tokens_of(1, 20), torch.nn.functional.scaled_dot_product_attention
    expected, before = logits_of(model, tokens), described_of(model)

    def attention(query: Any, key: Any, value: Any, attn_mask: Any = None, **options: Any) -> torch.Tensor:
        return kernel(query, key, value, attn_mask.roll(1, axis), **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attention)
    versions = f"PyTorch {torch.__version__} and transformers {transformers.__version__}".replace("+", r"\+")
    with pytest.raises(ValueError, match=rf"a difference of .* in a prompt, where rounding explains .*{versions}"):
        accelerate(model)
    assert described_of(model) == before
    assert torch.equal(logits_of(model, tokens), expected)
    assert accelerate(model, prove=False) is model


@pytest.mark.parametrize("where", ["with a static cache", "in generate"])
def test_wrong_static_caches_and_calls_of_generate_are_refused(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def appended(cache: Any, *arguments: Any) -> Any:
        keys, values = append(cache, *arguments)
        return (keys.roll(1, 2), values) if isinstance(cache, StaticCache) else (keys, values)

    if where == "in generate":
        replaced = "_models.prepare_call", lambda outer, args, kwargs, names: (args, kwargs | {"attention_mask": None})
    else:
        replaced = "_layers.append", appended
    monkeypatch.setattr(f"alibi_torch.transformers.{replaced[0]}", replaced[1])
    model = model_of("bloom")
    before = described_of(model)
    with pytest.raises(ValueError, match=f"a difference of .* {where}"):
        accelerate(model)
    assert described_of(model) == before


def test_an_argument_of_a_layer_that_was_renamed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # The next release calls the cache by an unknown name.
    model, kind = model_of("mpt"), type(layers_of(model_of("mpt"))[0])
    own = kind.forward

    def forward(self: Any, *args: Any, keys_so_far: Any = None, **kwargs: Any) -> Any:
        return own(self, *args, **{CACHE: keys_so_far}, **kwargs)

    def renamed(layer: Any, args: Any, kwargs: Any) -> Any:
        return args, {"keys_so_far" if name == CACHE else name: x for name, x in kwargs.items()}

    monkeypatch.setattr(kind, "forward", forward)
    for layer in layers_of(model):
        layer.register_forward_pre_hook(renamed, with_kwargs=True)
    with pytest.raises(ValueError, match="a difference of .* in cached step 1"):
        accelerate(model)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_proof_allows_for_rounding(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    for model in (model_of(name), MODELS[name]()):  # large weights, and initial weights
        accelerate(model.to(dtype).train(), strict=True)
        assert model.training


def test_a_model_that_cannot_be_run_yet_is_accelerated_with_a_warning() -> None:
    with torch.device("meta"):
        model = bloom()
    with pytest.warns(UserWarning, match="nothing was proven of the accelerated model: some of its weights are on the"):
        accelerate(model)
    restored = restore(model).to_empty(device="cpu")
    for parameter in restored.parameters():
        torch.nn.init.constant_(parameter, float("nan"))
    with pytest.warns(UserWarning, match="nothing was proven .* not finite"):
        accelerate(restored)


# --- The rest of the model ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_nothing_is_as_large_as_queries_times_keys(name: str) -> None:
    model, tokens = accelerate(model_of(name)), tokens_of(1, 1100)
    assert largest_allocation(lambda: logits_of(model, tokens)) < 1100 * 1100
    restore(model)
    assert largest_allocation(lambda: logits_of(model, tokens)) >= 4 * 1100 * 1100  # or there would be nothing to see


@pytest.mark.parametrize("name", FAMILIES)
def test_weights_are_saved_as_ever_and_restore_leaves_no_trace(name: str, tmp_path: Path) -> None:
    model, tokens = model_of(name), tokens_of(1, 20)
    names, expected, described = list(model.state_dict()), logits_of(model, tokens), described_of(model)
    for part, folder in ((model, "whole"), (model.transformer, "base")):
        part.save_pretrained(tmp_path / "before" / folder)
        accelerate(model)
        assert list(model.state_dict()) == names
        part.save_pretrained(tmp_path / "after" / folder)
        for file in ("config.json", "model.safetensors"):
            before, after = (tmp_path / x / folder / file for x in ("before", "after"))
            assert before.read_bytes() == after.read_bytes()
        assert restore(model) is model
        assert described_of(model) == described
        assert torch.equal(logits_of(model, tokens), expected)
    loaded = accelerate(type(model).from_pretrained(tmp_path / "after" / "whole"))
    assert torch.equal(logits_of(loaded, tokens), logits_of(accelerate(model), tokens))


@pytest.mark.parametrize("name", FAMILIES)
def test_copies_are_accelerated_and_apart(name: str) -> None:
    model, tokens = accelerate(model_of(name)), tokens_of(1, 20)
    expected = logits_of(model, tokens)
    for replica in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits_of(replica, tokens), expected)
        assert paths(replica)["alibi_torch"] > paths(model)["alibi_torch"] - 1
        restore(replica)
        with pytest.raises(ValueError, match="model must be accelerated"):
            restore(replica)
        assert torch.equal(logits_of(model, tokens), expected)


class Pooled(transformers.BloomPreTrainedModel):
    """A head that uses the mask itself, around a base under a name of its own."""

    def __init__(self, config: BloomConfig) -> None:
        super().__init__(config)
        self.inner = BloomModel(config)
        self.post_init()

    def forward(self, input_ids: Any, attention_mask: Any, position_ids: Any = None) -> Any:
        hidden = self.inner(input_ids, attention_mask=attention_mask).last_hidden_state
        return [(hidden * attention_mask[..., None]).sum(dim=1) / attention_mask.sum(dim=1, keepdim=True)]


@pytest.mark.parametrize("kind", [BloomModel, transformers.BloomForSequenceClassification, Pooled])
def test_models_without_a_head_and_with_another(kind: Any) -> None:
    config = BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=1, n_head=4, pad_token_id=0, num_labels=3)
    model, tokens = kind(config).eval(), tokens_of(2, 20)
    mask, position_ids = padding(20, 13, total=20, side="right"), torch.arange(20)[None]
    with torch.no_grad():
        expected = model(tokens, attention_mask=mask, position_ids=position_ids)[0]
        assert_near(accelerate(model)(tokens, attention_mask=mask, position_ids=position_ids)[0], expected)


@pytest.mark.parametrize("name", FAMILIES)
def test_threads_share_a_model(name: str) -> None:
    model, tokens = accelerate(model_of(name)), tokens_of(3, 20)
    calls: list[Any] = [{"attention_mask": mask_of("left")}, {"attention_mask": mask_of("holes")}]
    calls += [{"attention_mask": mask_of("left"), "output_attentions": True}]  # by the model's own code
    for layer in model.base_model.alibi_layers:  # a copied mask has lost the tokens that it carried
        layer.register_forward_pre_hook(copying_masks, with_kwargs=True)
    with warnings.catch_warnings(action="ignore"):
        check_threads([functools.partial(logits_of, model, tokens, **call) for call in calls])


def copying_masks(layer: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    args, values = ([x.clone() if isinstance(x, Tensor) else x for x in some] for some in (args, kwargs.values()))
    return tuple(args), dict(zip(kwargs, values, strict=True))


def test_embeddings_in_place_of_tokens() -> None:
    model, tokens = model_of("falcon"), tokens_of(1, 20)
    embeddings = model.get_input_embeddings()(tokens).detach()
    expected = logits_of(accelerate(model), tokens)
    assert torch.equal(logits_of(model, None, inputs_embeds=embeddings), expected)
    generated_ids = model.generate(inputs_embeds=embeddings, max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert torch.equal(generated_ids, generated(model, tokens, max_new_tokens=3, do_sample=False)[:, 20:])


def test_layers_on_several_devices(tmp_path: Path) -> None:
    accelerator = pytest.importorskip("accelerate")
    model, tokens = model_of("bloom"), tokens_of(1, 20)
    expected = logits_of(accelerate(copy.deepcopy(model)), tokens)
    places = {"transformer.word_embeddings": "cpu", "lm_head": "cpu", "transformer.word_embeddings_layernorm": "cpu"}
    places |= {"transformer.h.0": "cpu", "transformer.h.1": "disk", "transformer.ln_f": "cpu"}
    options = {"main_device": "cpu", "offload_dir": tmp_path, "force_hooks": True}
    for before in (True, False):
        replica = copy.deepcopy(model)
        if before:
            accelerate(replica)
        accelerator.dispatch_model(replica, places, **options)
        if not before:
            accelerate(replica, prove=False)
        assert torch.equal(logits_of(replica, tokens), expected)
        assert generated(replica, tokens, do_sample=False, max_new_tokens=3).shape == (1, 23)


# --- Bad input ------------------------------------------------------------------------------------------------------


class Doubled(BloomAttention):
    """Attention of a user's own."""


class Counting(BloomModel):
    """A base model of a user's own."""


def changed(model: Any, part: str, **attributes: Any) -> Any:
    for name, x in attributes.items():
        setattr(operator.attrgetter(part)(model), name, x)
    return model


LAST = "transformer.h.1.self_attention"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: transformers.GPT2Model(transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8)),
            "model must contain a BLOOM, MPT or Falcon",
        ),
        (lambda: torch.nn.Linear(2, 2), "model must contain a BLOOM, MPT or Falcon"),
        (lambda: falcon(alibi=False), "alibi=False"),
        (lambda: mpt(attn_config={"alibi": False}), "attn_config.alibi must be True"),
        (lambda: changed(bloom(), LAST, beta=0.5), "beta must be 1 for a model to be accelerated, got 0.5"),
        (
            lambda: changed(falcon(), "config", _attn_implementation_internal="flash_attention_2"),
            "attn_implementation must be 'sdpa' or 'eager'",
        ),
        (lambda: accelerate(bloom()), "model must not be accelerated yet; undo with restore"),
        (lambda: changed(bloom(), LAST, forward=print), "must be BloomAttention's own, got .* with a forward of its"),
        (lambda: changed(bloom(), LAST, __class__=Doubled), "must be BloomAttention's own, got Doubled with a forward"),
        (lambda: changed(bloom(), "transformer", __class__=Counting), "must be BloomModel itself, got Counting"),
    ],
)
def test_models_that_are_refused(make: Callable[[], Any], message: str) -> None:
    model = make()
    before = described_of(model)
    with pytest.raises(ValueError, match=message):
        accelerate(model)
    assert described_of(model) == before


def test_arguments_that_are_refused() -> None:
    with pytest.raises(ValueError, match="contract must be one of 'model', 'exact'"):
        accelerate(bloom(), contract="bloom")
    with pytest.raises(TypeError, match="model must be a torch.nn.Module"):
        accelerate("bloom")
    with pytest.raises(ValueError, match="model must be accelerated"):
        AlibiCache(bloom())
    model = accelerate(mpt())
    for x in (model, model.transformer):
        with pytest.raises(TypeError, match="arguments must be given once each, got 1 of .* and input_ids"):
            x(tokens_of(1, 5), input_ids=tokens_of(1, 5), position_ids=torch.arange(5)[None])
    with pytest.raises(ValueError, match="use_cache must be True with an AlibiCache, got False"):
        model.generate(tokens_of(1, 5), use_cache=False, max_new_tokens=2, **{CACHE: AlibiCache(model)})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"position_ids": torch.arange(4)[None]}, r"position_ids must be of shape \(2, 5\)"),
        ({"position_ids": torch.tensor([[0, 1, 0, 1, 2]]), "use_cache": True}, "use_cache must be False"),
    ],
)
@pytest.mark.parametrize("name", FAMILIES)
def test_calls_that_are_refused(name: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        accelerate(model_of(name))(tokens_of(2, 5), **arguments)
