"""BLOOM, MPT and Falcon of transformers, accelerated, against themselves."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch.nn.attention import SDPBackend, sdpa_kernel

pytest.importorskip("transformers")

import transformers
from torch.distributed.fsdp import fully_shard
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    BloomForSequenceClassification,
    BloomModel,
    BloomPreTrainedModel,
    DynamicCache,
    FalconConfig,
    FalconForCausalLM,
    GPT2Config,
    GPT2Model,
    MptConfig,
    MptForCausalLM,
    StaticCache,
)
from transformers.models.bloom.modeling_bloom import BloomAttention

from alibi_core._horizon.tiling import tiled_as
from alibi_torch._cpu import tiling
from alibi_torch.transformers import AlibiCache, accelerate, paths, restore, with_alibi
from alibi_torch.transformers._cache_layers import GrowingLayer
from alibi_torch.transformers._modules import attention_modules
from alibi_torch.transformers._norms import most_of_queries
from alibi_torch.transformers._rules import FEW, NUMBERS, PROMPT, SHORT_PROMPT, _with_bias

transformers.logging.set_verbosity_error()

VOCABULARY = 97


def bloom(**options: Any) -> Any:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 60, "n_layer": 2, "n_head": 6}
    return BloomForCausalLM(BloomConfig(**sizes | options))


def mpt(**options: Any) -> Any:
    sizes = {"vocab_size": VOCABULARY, "d_model": 60, "n_heads": 6, "n_layers": 2, "max_seq_len": 2048}
    return MptForCausalLM(MptConfig(**sizes | options))


def falcon(implementation: str = "sdpa", **options: Any) -> Any:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = FalconConfig(**{"alibi": True} | sizes | options)
    config._attn_implementation = implementation
    return FalconForCausalLM(config)


MODELS: dict[str, Callable[[], Any]] = {
    "bloom": bloom,
    "bloom, post-norm residual": lambda: bloom(apply_residual_connection_post_layernorm=True, n_head=4),
    "bloom, sums in parts": lambda: bloom(slow_but_exact=True, pretraining_tp=8),
    "mpt": mpt,
    "mpt, clipped and scaled": lambda: mpt(attn_config={"clip_qkv": 0.7, "softmax_scale": 0.4}, n_heads=4),
    "falcon": falcon,
    "falcon, eager": lambda: falcon("eager"),
    "falcon, grouped": lambda: falcon(new_decoder_architecture=True, num_kv_heads=2),
    "falcon, grouped, eager": lambda: falcon("eager", new_decoder_architecture=True, num_kv_heads=2),
    "falcon, all heads": lambda: falcon(multi_query=False, parallel_attn=False),
}
FAMILIES = ("bloom", "mpt", "falcon")


def model_of(name: str, seed: int = 0) -> Any:
    """Return a model whose weights are so large that attention is no mere mean."""
    torch.manual_seed(seed)
    model = MODELS[name]().eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)
        else:
            parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def tokens_of(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def logits_of(model: Any, tokens: torch.Tensor, **arguments: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens, **arguments).logits


@functools.cache
def expected_of(name: str, length: int) -> tuple[torch.Tensor, float]:
    """Return logits of a model for one row of tokens, and how far they are from those it has in float64."""
    model, tokens = model_of(name), tokens_of(1, length)
    expected = logits_of(model, tokens)
    return expected, (expected - logits_of(model.double(), tokens)).abs().max().item()


def short_for_few() -> Any:
    """Plan for a few queries of some hundred keys as for those of many thousands."""
    return tiled_as(dataclasses.replace(tiling(), short=1))


def padding(*lengths: int, total: int, side: str) -> torch.Tensor:
    columns = torch.arange(total)
    held = torch.tensor(lengths)[:, None]
    return (columns >= total - held if side == "left" else columns < held).long()


# --- Numbers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "length"), [*((name, 150) for name in MODELS), *((name, 1100) for name in (*FAMILIES, "falcon, eager"))]
)
def test_logits_are_the_models_own(name: str, length: int) -> None:  # of 1,100 keys some are left out
    (expected, own), actual = expected_of(name, length), logits_of(accelerate(model_of(name)), tokens_of(1, length))
    assert (actual - expected).abs().max() <= 4 * own


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_as_near_to_the_models_numbers_as_the_model(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Its numbers: its weights and its bias, rounded as in this precision, the rest computed in float64.
    model, tokens, text = model_of(name).to(dtype), tokens_of(1, 300), torch.ones(1, 300, dtype=torch.long)
    own, actual = (logits_of(x, tokens, attention_mask=text) for x in (model, accelerate(copy.deepcopy(model))))
    module = sys.modules[type(model).__module__]
    if hasattr(module, "build_alibi_tensor"):
        build = module.build_alibi_tensor
        monkeypatch.setattr(module, "build_alibi_tensor", lambda *two, **_: build(*two[:2], dtype).double())
    expected = logits_of(model.double(), tokens, attention_mask=text)
    own, apart = ((x - expected).abs().max() for x in (own, actual))
    assert apart <= 1.5 * own, f"{apart:.2e}, its own error is {own:.2e}"


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_steps_in_low_precision_are_as_near_as_the_model_to_its_numbers(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokens = model_of(name).to(dtype), tokens_of(2, 330)

    def steps(model: Any) -> torch.Tensor:
        cache = DynamicCache(config=model.config)
        return torch.cat(
            [logits_of(model, x, past_key_values=cache) for x in tokens.split((320, 1, 8, 1), dim=1)], dim=1
        )

    exact = steps(copy.deepcopy(model).float())  # of a bias that is not rounded, by which both are apart
    own, actual = steps(model), steps(accelerate(model))
    own, apart = ((x[:, 320:].float() - exact[:, 320:]).square().mean().sqrt() for x in (own, actual))
    assert apart <= 1.2 * own, f"{apart:.2e}, its own error is {own:.2e}"


def test_the_exact_contract_is_the_papers() -> None:
    # Of slopes that are powers of two BLOOM's bias is exact too; of others it is not.
    tokens = tokens_of(1, 60)
    model = bloom(n_head=4, hidden_size=64).eval()
    expected = logits_of(model, tokens)
    assert torch.allclose(logits_of(accelerate(model, contract="exact"), tokens), expected, atol=1e-5)
    model = model_of("falcon")
    by_model, by_paper = (
        logits_of(accelerate(copy.deepcopy(model), contract=contract), tokens_of(1, 600))
        for contract in ("model", "exact")
    )
    assert (by_model - by_paper).abs().max() > 1e-3  # bfloat16 positions


def test_the_exact_contract_knows_what_mpt_was_trained_with() -> None:
    model = mpt(attn_config={"alibi_bias_max": 16}).eval()
    layers = accelerate(model, contract="exact").transformer.blocks
    assert layers[0].attn.alibi_rules.slopes[0] == pytest.approx(2.0**-4)
    restore(model)
    # transformers' own knows 8 alone
    assert accelerate(model).transformer.blocks[0].attn.alibi_rules.slopes[0] == pytest.approx(2.0**-2)


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
    accelerated = accelerate(copy.deepcopy(model))
    # Padding too has the model's numbers: queries that see nothing get the mean of all values.
    expected = logits_of(model, tokens, attention_mask=mask)
    actual = logits_of(accelerated, tokens, attention_mask=mask)
    assert (actual - expected).abs().max() <= 32 * torch.finfo(torch.float32).eps * expected.abs().max()
    for held in (None, 26):  # a static cache has empty places, which queries that see nothing average too
        parts = []
        for x in (model, accelerated):
            config = model.config
            cache = StaticCache(config=config, max_cache_len=held) if held else DynamicCache(config=config)
            steps = []
            for i, j in ((0, 7), (7, 8), (8, 15), (15, 16), (16, 20)):
                so_far = torch.nn.functional.pad(mask[:, :j], (0, held - j if held else 0))
                steps.append(logits_of(x, tokens[:, i:j], attention_mask=so_far, past_key_values=cache))
            parts.append(torch.cat(steps, dim=1))
        assert (parts[1] - parts[0]).abs().max() <= 32 * torch.finfo(torch.float32).eps * expected.abs().max()


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float32, torch.bfloat16])
def test_masks_of_other_numbers(name: str, dtype: torch.dtype) -> None:
    # BLOOM and Falcon count positions in the mask's dtype, and count 2 twice.
    model, tokens, mask = model_of(name), tokens_of(1, 300), torch.ones(1, 300, dtype=dtype)
    accelerated = accelerate(copy.deepcopy(model))
    for first in (0, 2):
        mask[0, :2] = first
        expected = logits_of(model, tokens, attention_mask=mask)
        actual = logits_of(accelerated, tokens, attention_mask=mask)
        assert (actual - expected).abs().max() <= 128 * torch.finfo(torch.float32).eps * expected.abs().max()


@pytest.mark.parametrize(
    ("name", "contract", "where"),
    [(name, "model", where) for name in FAMILIES for where in ("left", "holes")]
    + [(name, "exact", "holes") for name in ("bloom", "mpt")],
)
def test_padding_of_rows_so_long_that_keys_are_left_out(name: str, contract: str, where: str) -> None:
    # BLOOM counts text, so a row with holes is the row without them; MPT counts columns, and hides some.
    model, tokens = model_of(name), tokens_of(1, 1100)
    columns = torch.arange(1100)
    mask = ((columns % 100 < 60) | (columns == 1099) if where == "holes" else columns >= 200).long()[None]
    expected = logits_of(model, tokens, attention_mask=mask)
    actual = logits_of(accelerate(model, contract=contract), tokens, attention_mask=mask)
    assert (actual - expected)[mask.bool()].abs().max() <= 2.0**-13 * expected.abs().max()


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("margins", [None, (0, 0), (4, 3)])  # no mask, or one with so much padding around
def test_packed_sequences_are_what_they_are_alone(
    name: str, dtype: torch.dtype, margins: tuple[int, int] | None
) -> None:
    lengths, (before, after) = (20, 1, 30), margins or (0, 0)
    model, tokens = accelerate(model_of(name).to(dtype)), tokens_of(2, before + 51 + after)
    text = slice(before, before + 51)
    mask, position_ids = torch.zeros_like(tokens), torch.ones_like(tokens)
    mask[:, text], position_ids[:, text] = 1, torch.cat([torch.arange(n) for n in lengths])
    if margins is not None:
        mask[:, before + 5 : before + 7] = 0  # within the first
    arguments = {"position_ids": position_ids} | ({} if margins is None else {"attention_mask": mask})
    packed, shown = logits_of(model, tokens, **arguments)[:, text], mask[:, text]
    parts = zip(tokens[:, text].split(lengths, dim=1), shown.split(lengths, dim=1), strict=True)
    alone = torch.cat([logits_of(model, x, attention_mask=y) for x, y in parts], dim=1)
    # The same numbers; but a kernel call of other shapes adds in another order.
    apart = (packed - alone)[shown.bool()].abs().max()
    assert apart <= 64 * torch.finfo(dtype).eps * alone.abs().max()
    assert not torch.allclose(packed, logits_of(model, tokens)[:, text], atol=0.1)


def test_lengths_that_mpt_refuses() -> None:
    model, tokens = mpt(max_seq_len=32, n_heads=4, d_model=64).eval(), tokens_of(1, 80)
    longer = mpt(max_seq_len=80, n_heads=4, d_model=64).eval()
    longer.load_state_dict(model.state_dict())
    with pytest.raises(RuntimeError):
        model(tokens)
    assert torch.allclose(logits_of(accelerate(model), tokens), logits_of(longer, tokens), atol=1e-5)


# --- Decoding -------------------------------------------------------------------------------------------------------


def with_room(model: Any) -> AlibiCache:
    """Return a cache that appends in place from the start, not from where that takes less time than copying."""
    cache = AlibiCache(model)
    for layer in cache.layers:
        layer.copied = 0
    return cache


CACHES: dict[str, Callable[[Any], Any]] = {
    "dynamic": lambda model: DynamicCache(config=model.config),
    "static": lambda model: StaticCache(config=model.config, max_cache_len=1300),
    "alibi": with_room,
    "evicting": lambda model: AlibiCache(model, evict=True),
}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "temperature": 0.8, "top_k": 20},
    "beams": {"do_sample": False, "num_beams": 3},
}


def generated(model: Any, tokens: torch.Tensor, **options: Any) -> torch.Tensor:
    torch.manual_seed(5)
    return model.generate(tokens, use_cache=True, pad_token_id=0, eos_token_id=None, **options)


@pytest.mark.parametrize("name", ["bloom", "mpt", "falcon", "falcon, grouped, eager"])
@pytest.mark.parametrize("way", WAYS)
def test_generate(name: str, way: str) -> None:
    model, tokens = model_of(name), tokens_of(2, 20)
    masks = [padding(20, 13, total=20, side=side) for side in ("left", "right")]
    for some in ({}, *({"attention_mask": mask} for mask in masks)):
        options = WAYS[way] | some | {"max_new_tokens": 6}
        expected = generated(model, tokens, **options)
        accelerate(model)
        for kind, cache in CACHES.items():
            if kind == "evicting" and some:
                continue  # takes no padding
            held = {"cache_implementation": kind} if kind == "static" else {"past_key_values": cache(model)}
            assert torch.equal(generated(model, tokens, **options, **held), expected), kind
        restore(model)


@pytest.mark.parametrize("name", FAMILIES)
def test_masks_of_a_static_cache_keep_their_shape(name: str) -> None:  # or a compiled step would not serve the next
    model, mask, shapes = accelerate(model_of(name), strict=True), padding(20, 13, total=20, side="left"), set()
    hook = model.transformer.register_forward_pre_hook
    hook(lambda module, args, kwargs: shapes.add(kwargs["attention_mask"].shape), with_kwargs=True)
    generated(model, tokens_of(2, 20), attention_mask=mask, max_new_tokens=4, cache_implementation="static")
    assert len(shapes) == 1


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("is_planned", [False, True])
@pytest.mark.parametrize("name", ["bloom", "falcon"])
def test_decoding_a_long_text_in_pieces(name: str, is_planned: bool, kind: str) -> None:
    (expected, own), model = expected_of(name, 1100), accelerate(model_of(name))
    cache = CACHES[kind](model)
    pieces = tokens_of(1, 1100).split((1020, 1, 1, 40, 1, 37), dim=1)
    with short_for_few() if is_planned else contextlib.nullcontext():
        actual = torch.cat([logits_of(model, x, past_key_values=cache) for x in pieces], dim=1)
    assert int(cache.get_seq_length()) == 1100
    assert (actual - expected).abs().max() <= 4 * own


@pytest.mark.parametrize("padded", [0, 5])
@pytest.mark.parametrize("name", ["bloom", "mpt", "falcon, grouped"])
def test_lengths_around_those_where_another_way_begins(name: str, padded: int) -> None:
    model = model_of(name)
    keys = NUMBERS // {"bloom": 60, "mpt": 60, "falcon, grouped": 32}[name]  # of one short key, all of which are read
    pieces = [keys - 3, *[1] * 6, FEW - 1, FEW, FEW + 1]
    tokens = tokens_of(2, max(sum(pieces), PROMPT + 1))
    length = tokens.shape[1]
    text = padding(length, length - padded, total=length, side="left")
    expected = logits_of(model, tokens, attention_mask=text)
    accelerate(model)

    def check(begin: int, end: int, **options: Any) -> None:
        mask = text[:, :end] if padded else None
        actual = logits_of(model, tokens[:, begin:end], attention_mask=mask, **options)
        apart = (actual - expected[:, begin:end])[text[:, begin:end].bool()].abs().max()
        assert apart <= 2.0**-13 * expected.abs().max(), (begin, end)

    with short_for_few():
        for end in (SHORT_PROMPT - 1, SHORT_PROMPT, SHORT_PROMPT + 1):
            check(0, end)
    for end in (PROMPT - 1, PROMPT, PROMPT + 1):
        check(0, end)
    with short_for_few():
        cache = DynamicCache(config=model.config)
        for begin, end in itertools.pairwise(itertools.accumulate(pieces, initial=0)):
            check(begin, end, past_key_values=cache)


@pytest.mark.parametrize("name", FAMILIES)
def test_keys_are_evicted(name: str) -> None:
    torch.manual_seed(0)
    model, tokens = MODELS[name]().eval(), tokens_of(1, 900)
    expected = logits_of(model, tokens)
    cache = AlibiCache(accelerate(model), evict=True)
    parts = [logits_of(model, x, past_key_values=cache) for x in tokens.split(100, dim=1)]
    assert torch.allclose(torch.cat(parts, dim=1), expected, atol=1e-5)
    steepest = cache.layers[0].store.kept[0]
    assert steepest < (500 if name != "falcon" else 901)  # all queries of Falcon share one head, the flattest its too


@pytest.mark.parametrize("kind", ["dynamic", "alibi"])
def test_what_others_do_to_a_cache_is_noticed(kind: str) -> None:
    # Keys are dropped between tokens, and others come: what was measured of them no longer holds.
    model, tokens, others = accelerate(model_of("bloom")), tokens_of(1, 1101), tokens_of(1, 300, seed=2)
    cache = CACHES[kind](model)
    with short_for_few():
        for piece in tokens.split([1100, 1], dim=1):
            logits_of(model, piece, past_key_values=cache)
        cache.crop(-300)
        parts = [logits_of(model, x, past_key_values=cache) for x in others.split([99, 200, 1], dim=1)]
    whole = logits_of(model, torch.cat([tokens[:, :801], others], dim=1))
    assert torch.allclose(parts[-1], whole[:, -1:], atol=1e-3)


def test_a_layer_whose_keys_grew_huge_behind_its_back() -> None:
    model, tokens = model_of("bloom"), tokens_of(1, 1200)
    cache = DynamicCache(config=model.config)
    accelerate(model)
    with short_for_few():
        logits_of(model, tokens[:, :1198], past_key_values=cache)
        logits_of(model, tokens[:, 1198:1199], past_key_values=cache)
        cache.layers[0].keys[:, :, 3] *= 1000
        replica = copy.deepcopy(cache)
        actual = logits_of(model, tokens[:, 1199:], past_key_values=cache)
    expected = logits_of(restore(model), tokens[:, 1199:], past_key_values=replica)
    assert torch.allclose(actual, expected, atol=1e-3)


def test_caches_are_copied_and_pickled() -> None:
    model, tokens = accelerate(model_of("bloom")), tokens_of(1, 30)
    for kind in ("dynamic", "alibi", "evicting"):
        cache = CACHES[kind](model)
        logits_of(model, tokens[:, :29], past_key_values=cache)
        copies = [copy.deepcopy(cache), pickle.loads(pickle.dumps(cache)), cache]
        results = [logits_of(model, tokens[:, 29:], past_key_values=x) for x in copies]
        for result in results[:2]:  # whose keys may lie elsewhere in memory, and be summed in another order
            assert torch.allclose(result, results[2], atol=1e-4)


def test_copies_that_share_their_memory_do_not_write_over_each_other() -> None:
    model, tokens = accelerate(model_of("bloom")), tokens_of(2, 40)
    cache = with_room(model)
    logits_of(model, tokens[:1, :30], past_key_values=cache)
    logits_of(model, tokens[:1, 30:31], past_key_values=cache)
    other = copy.copy(cache)
    other.layers = [copy.copy(layer) for layer in cache.layers]
    texts = [torch.cat([tokens[:1, :31], tokens[row : row + 1, 31:]], dim=1) for row in range(2)]
    parts: list[list[torch.Tensor]] = [[], []]
    for place in range(31, 40):
        for text, held, part in zip(texts, (cache, other), parts, strict=True):
            part.append(logits_of(model, text[:, place : place + 1], past_key_values=held))
    for text, part in zip(texts, parts, strict=True):
        assert torch.allclose(torch.cat(part, dim=1), logits_of(model, text)[:, 31:], atol=1e-4)


def test_a_large_dynamic_cache_is_not_copied_at_each_token() -> None:
    model, tokens = accelerate(model_of("mpt")), tokens_of(1, 660)
    cache = DynamicCache(config=model.config)
    logits_of(model, tokens[:, :600], past_key_values=cache)
    assert cache.layers[1].keys.is_contiguous()  # as transformers' own, and as what saves it may require
    places = set()
    for place in range(600, 660):
        logits_of(model, tokens[:, place : place + 1], past_key_values=cache)
        places.add(cache.layers[1].keys.data_ptr())
    assert len(places) == 1
    assert cache.layers[1].alibi_room.tensors[0].shape[2] <= 800
    assert cache.get_seq_length() == cache.layers[1].keys.shape[2] == 660


def test_a_small_dynamic_cache_is_as_transformers_makes_it() -> None:
    model = accelerate(model_of("bloom"))
    cache = generated(model, tokens_of(2, 20), max_new_tokens=3, return_dict_in_generate=True).past_key_values
    for layer in cache.layers:
        assert layer.keys.is_contiguous()
        assert layer.keys.untyped_storage().nbytes() == layer.keys.nbytes


def test_a_cache_that_is_reset_is_empty() -> None:
    model, tokens = accelerate(model_of("mpt")), tokens_of(1, 30)
    for evict in (False, True):
        cache = AlibiCache(model, evict=evict)
        first = logits_of(model, tokens, past_key_values=cache)
        cache.reset()
        assert cache.get_seq_length() == 0
        assert torch.equal(logits_of(model, tokens, past_key_values=cache), first)


@pytest.mark.parametrize("kind", ["dynamic", "alibi", "evicting"])
def test_a_cache_of_inference_mode_serves_after_it(kind: str) -> None:
    model, tokens = accelerate(model_of("bloom")), tokens_of(1, 40)
    cache = CACHES[kind](model)
    with torch.inference_mode():
        model(tokens[:, :20], past_key_values=cache)
        model(tokens[:, 20:30], past_key_values=cache)
    last = logits_of(model, tokens[:, 30:], past_key_values=cache)
    assert torch.allclose(last, logits_of(model, tokens)[:, 30:], atol=1e-4)


@pytest.mark.parametrize("kind", ["dynamic", "alibi"])
def test_gradients_through_a_cache(kind: str) -> None:
    model, tokens = accelerate(model_of("mpt")), tokens_of(1, 30)
    results = []
    for pieces in ([30], [20, 1, 9]):
        cache = CACHES[kind](model)
        model.zero_grad()
        sum(model(x, past_key_values=cache).logits.logsumexp(-1).sum() for x in tokens.split(pieces, dim=1)).backward()
        results.append(model.transformer.blocks[0].attn.Wqkv.weight.grad.clone())
    assert torch.allclose(results[1], results[0], atol=1e-5 * results[0].abs().max().item())


@pytest.mark.parametrize("past", [12, 300])
@pytest.mark.parametrize("name", ["falcon", "falcon, all heads"])  # others refuse it
def test_no_tokens_behind_those_in_a_cache(name: str, past: int) -> None:
    model, tokens = model_of(name), tokens_of(2, past + 1)
    expected = logits_of(model, tokens)  # at once: not all versions of transformers take no tokens
    cache, accelerated = DynamicCache(config=model.config), accelerate(model)
    parts = [logits_of(accelerated, x, past_key_values=cache) for x in tokens.split([past, 0, 1], dim=1)]
    assert torch.allclose(torch.cat(parts, dim=1), expected, atol=1e-4)


def test_a_grown_layer_is_compiled_without_a_graph_break() -> None:
    layer, new = GrowingLayer(), torch.randn(2, 1, 3, 1, 4)
    for key, value in (new, new):
        layer.update(key, value)
    keys, _ = torch.compile(layer.update, backend="eager", fullgraph=True)(*new)
    assert torch.equal(keys, new[0].repeat(1, 1, 3, 1))


# --- Training -------------------------------------------------------------------------------------------------------


def gradients_of(model: Any, tokens: torch.Tensor, **arguments: Any) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(tokens, labels=tokens, use_cache=False, **arguments).loss.backward()
    return {name: x.grad.clone() for name, x in model.named_parameters()}


@pytest.mark.parametrize("length", [20, 270])
@pytest.mark.parametrize("name", FAMILIES)
def test_layers_of_inference_mode_below_those_that_learn(name: str, length: int) -> None:
    model, tokens = model_of(name), tokens_of(2, length)
    lowest = next(iter(getattr(model.transformer, "blocks", None) or model.transformer.h))

    class Frozen(type(lowest)):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            with torch.inference_mode():
                hidden, weights = super().forward(*args, **kwargs)
            return hidden.clone(), weights

    def learned(x: Any) -> torch.Tensor:
        logits = x(tokens, attention_mask=padding(length, 13, total=length, side="left"), use_cache=False).logits
        return torch.autograd.grad(logits.logsumexp(-1).sum(), x.lm_head.weight)[0]

    lowest.__class__ = Frozen
    expected = learned(model)
    assert (learned(accelerate(model)) - expected).abs().max() <= 1e-5 * expected.abs().max()


def enable_checkpointing(model: Any, **options: Any) -> None:
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False, **options})


# The last padding on the left predicts the first token, so what it sees matters.
@pytest.mark.parametrize(("checkpointing", "side"), [(False, "left"), (False, "right"), (True, "left")])
@pytest.mark.parametrize("name", ["bloom", "mpt", "falcon", "falcon, grouped, eager"])
def test_gradients_are_the_models_own(name: str, checkpointing: bool, side: str) -> None:
    model, tokens = model_of(name).train(), tokens_of(2, 50)
    arguments = {"attention_mask": padding(50, 33, total=50, side=side)}
    expected = gradients_of(model, tokens, **arguments)
    # In float64 BLOOM's sum of a score and the least number overflows.
    exact = expected if side == "left" else gradients_of(copy.deepcopy(model).double(), tokens, **arguments)
    accelerate(model)
    if checkpointing:
        enable_checkpointing(model)
    actual = gradients_of(model, tokens, **arguments)
    assert actual.keys() == expected.keys()
    for parameter, gradient in actual.items():
        scale = exact[parameter].abs().max()
        own = ((expected[parameter] - exact[parameter]).abs().max() / scale).clamp(min=2.0**-21)
        assert (gradient - exact[parameter]).abs().max() / scale <= 8 * own, parameter


@pytest.mark.parametrize("length", [20, 270])  # one call of plain operations, tiles
@pytest.mark.parametrize("name", ["mpt", "falcon", "falcon, grouped, eager"])
def test_gradients_of_gradients(name: str, length: int) -> None:
    model, tokens = model_of(name), tokens_of(2, length)
    mask = padding(length, 13, total=length, side="left")
    found = []
    for x in (model, accelerate(copy.deepcopy(model), strict=True)):
        weights = [weight for weight in x.transformer.parameters() if weight.ndim > 1][:3]
        loss = x(tokens, attention_mask=mask, labels=tokens, use_cache=False).loss
        penalty = sum(gradient.square().sum() for gradient in torch.autograd.grad(loss, weights, create_graph=True))
        found.append(torch.autograd.grad(penalty, weights))
    for expected, actual in zip(*found, strict=True):
        assert (actual - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize(
    "make", [lambda: bloom(hidden_size=42), lambda: mpt(d_model=42), lambda: falcon(hidden_size=56)]
)
def test_a_default_device_is_not_that_of_the_model(make: Callable[[], Any]) -> None:
    model, tokens = make().eval(), tokens_of(2, 10)  # of a size that no other test has, as what is kept is by that
    accelerated = accelerate(copy.deepcopy(model))
    cache = DynamicCache(config=model.config)
    expected = logits_of(model, tokens)
    with torch.device("meta"):  # a kernel of the CPU reads whatever the memory of a meta tensor's place holds
        parts = [logits_of(accelerated, tokens[:, i:j], past_key_values=cache) for i, j in ((0, 9), (9, 10))]
    assert torch.allclose(torch.cat(parts, dim=1), expected, atol=1e-5 * expected.abs().max().item())


@pytest.mark.parametrize("heads", [2, 3, 4, 5, 11, 13])
@pytest.mark.filterwarnings("ignore:MptModel computes this call")
def test_a_mask_of_each_head_is_not_taken_for_padding(heads: int) -> None:
    # MPT alone takes one; of one row for all queries it looks like what the library hands from layer to layer.
    model = mpt(n_heads=heads, d_model=12 * heads, attn_config={"softmax_scale": 1.0}).eval()
    tokens = tokens_of(2, 12)
    hidden = torch.arange(2 * heads * 12).reshape(2, heads, 1, 12) % 5 == 3
    accelerated = accelerate(copy.deepcopy(model))
    for mask in (hidden, hidden.to(torch.uint8)):
        expected = logits_of(model, tokens, attention_mask=mask)
        assert torch.allclose(logits_of(accelerated, tokens, attention_mask=mask), expected, atol=1e-5)


@pytest.mark.parametrize("transform", ["vmap", "grad", "jvp"])
@pytest.mark.parametrize("name", ["mpt", "falcon"])  # BLOOM's activation refuses them all
def test_transforms_of_torch_func_with_a_cache(name: str, transform: str) -> None:
    model, tokens = model_of(name), tokens_of(1, 10)

    def transformed(x: Any) -> torch.Tensor:
        weights = {name: weight.detach() for name, weight in x.named_parameters()}

        def logits(weights: Any) -> torch.Tensor:
            cache = DynamicCache(config=x.config)
            for part in (tokens[:, :9], tokens[:, 9:]):
                out = torch.func.functional_call(x, weights, (part,), {"past_key_values": cache}).logits
            return out

        if transform == "vmap":
            with torch.no_grad():
                return torch.vmap(logits)({name: torch.stack([x, 0.9 * x]) for name, x in weights.items()})
        if transform == "jvp":
            return torch.func.jvp(logits, (weights,), ({name: 0.01 * x for name, x in weights.items()},))[1]
        found = torch.func.grad(lambda weights: logits(weights).square().mean())(weights)
        return torch.cat([x.flatten() for x in found.values()])

    expected, actual = transformed(model), transformed(accelerate(model))
    assert (actual - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("name", ["mpt", "falcon"])
def test_gradients_of_each_text_by_itself(name: str) -> None:
    model, tokens, mask = model_of(name), tokens_of(3, 20), mask_of("holes")
    weights = {name: weight.detach() for name, weight in model.named_parameters()}

    def loss(weights: Any, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        given = {"attention_mask": mask[None], "position_ids": torch.arange(20)[None]}
        return torch.func.functional_call(model, weights, (tokens[None],), given).logits.square().mean()

    expected, actual = (
        torch.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(weights, tokens, mask)
        for _ in (model, accelerate(model, strict=True))
    )
    for parameter, gradient in actual.items():
        assert torch.allclose(gradient, expected[parameter], atol=1e-5 * expected[parameter].abs().max().item())


@pytest.mark.parametrize("name", FAMILIES)
def test_a_call_without_values(name: str) -> None:
    model = accelerate(model_of(name), strict=True).to("meta")
    inputs = {"attention_mask": mask_of("holes").to("meta"), "position_ids": torch.arange(20, device="meta")[None]}
    assert model(tokens_of(3, 20).to("meta"), **inputs).logits.shape == (3, 20, VOCABULARY)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("low_first", [True, False])
def test_autocast_that_begins_or_ends_within_a_text(name: str, low_first: bool) -> None:
    # A DynamicCache then holds the dtype that its old and its new keys have in common.
    model, tokens = model_of(name), tokens_of(2, 16)
    found = []
    for x in (model, accelerate(copy.deepcopy(model))):
        cache, parts = DynamicCache(config=model.config) if x is model else with_room(x), []
        for i, j in ((0, 9), (9, 10), (10, 11), (11, 14), (14, 16)):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=low_first == (j <= 10)):
                parts.append(logits_of(x, tokens[:, i:j], past_key_values=cache).float())
        found.append((torch.cat(parts, dim=1), cache.layers[0].keys.dtype))
    (expected, own), (actual, dtype) = found
    assert (actual - expected).abs().max() <= 2.0**-5 * expected.abs().max()
    assert dtype == own == torch.float32


@pytest.mark.parametrize("name", ["bloom", "mpt", "falcon", "falcon, eager", "falcon, all heads"])
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_autocast(name: str, weights: torch.dtype) -> None:
    # Where it rounds Falcon's mask to -inf, padding that sees no text gets zeros, not the mean of all values.
    model, tokens, mask = model_of(name).to(weights), tokens_of(3, 20), mask_of("left")
    expected = logits_of(copy.deepcopy(model).float(), tokens, attention_mask=mask)
    with torch.autocast("cpu", torch.bfloat16):
        own = logits_of(model, tokens, attention_mask=mask)
        actual = logits_of(accelerate(model), tokens, attention_mask=mask)
    text = mask.bool()
    assert (actual - expected)[text].abs().max() <= 1.5 * (own - expected)[text].abs().max()
    assert (actual - own)[~text].abs().max() <= 2.0**-5 * own.abs().max()


@pytest.mark.parametrize("learns", [False, True])
def test_autocast_rounds_no_bias_of_a_short_text(learns: bool) -> None:
    query, key, value = torch.randn(3, 1, 2, 300, 4, generator=torch.Generator().manual_seed(0)).requires_grad_(learns)
    bias = (0.3 * torch.arange(300.0)).expand(1, 2, 300, 300)  # which bfloat16 would round to halves of one
    expected = _with_bias(query, key, value, bias, 0.5)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(_with_bias(query, key, value, bias, 0.5), expected)


# --- What the library does not compute --------------------------------------------------------------------------------

WINDOWED = transformers.cache_utils.DynamicSlidingWindowLayer


def hidden_keys(length: int) -> torch.Tensor:
    """Return MPT's mask of queries times keys, True where it must not look."""
    visible = torch.ones(length, length, dtype=torch.bool).tril()
    visible[9:, 3:6] = False
    return ~visible[None, None].expand(2, 1, -1, -1)


OWN: dict[str, Callable[[], dict[str, Any]]] = {
    "output_attentions": lambda: {"output_attentions": True},
    "config.is_causal": lambda: {"attention_mask": padding(20, 13, total=20, side="right")},
    "dropout": dict,
    "past_key_values": lambda: {"past_key_values": transformers.Cache(layers=[WINDOWED(50) for _ in range(2)])},
    "attention_mask": lambda: {"attention_mask": hidden_keys(20)},
}


# BLOOM and Falcon build a bias of masks with two axes alone.
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        *itertools.product(["bloom", "mpt", "falcon", "falcon, grouped", "falcon, grouped, eager"], list(OWN)[:4]),
        ("mpt", "attention_mask"),
    ],
)
def test_the_models_own_code_computes_what_the_library_does_not(name: str, reason: str) -> None:
    model, tokens = model_of(name), tokens_of(2, 20)
    if reason == "dropout":
        for module in model.transformer.modules():
            if hasattr(module, "attn_dropout_p"):
                module.attn_dropout_p = 0.3
            elif hasattr(module, "attention_dropout"):
                module.attention_dropout.p = 0.3
        model.train()
    model.config.is_causal = reason != "config.is_causal"
    accelerated, strict = accelerate(copy.deepcopy(model)), accelerate(copy.deepcopy(model), strict=True)
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
            logits_of(model, tokens[:, i:j], attention_mask=mask[:, :j], past_key_values=cache, output_attentions=own)
            for i, j, own in steps
        ]
        return torch.cat(parts, dim=1)

    # Falcon's numbers with attention weights are others than without.
    expected = in_steps(DynamicCache(config=model.config))
    accelerate(model)
    actual = in_steps(CACHES[kind](model))
    assert (actual - expected).abs().max() <= 32 * torch.finfo(torch.float32).eps * expected.abs().max()
    assert paths(model)["alibi_torch"] == 2


@pytest.mark.parametrize("name", FAMILIES)
def test_a_forward_that_is_called_by_itself(name: str) -> None:
    # sentence-transformers does so, and who compiles model.forward.
    model, tokens = model_of(name), tokens_of(3, 20)
    packed = {"position_ids": torch.arange(10).repeat(2)[None].expand(3, -1), "use_cache": False}
    expected = [
        model(tokens, attention_mask=mask_of("holes")).logits,
        accelerate(model, strict=True)(tokens, **packed)[0],
    ]
    actual = [model.forward(tokens, attention_mask=mask_of("holes")).logits, model.forward(tokens, **packed)[0]]
    hidden = model.transformer.forward(tokens, attention_mask=mask_of("holes"))[0]
    for x, y in zip([*actual, model.lm_head(hidden)], [*expected, expected[0]], strict=True):
        assert (x - y).abs().max() <= 32 * torch.finfo(torch.float32).eps * y.abs().max()
    assert paths(model) == {"alibi_torch": 4}


def test_a_forward_that_somebody_put_into_a_model() -> None:
    model, tokens, packed = model_of("bloom"), tokens_of(1, 20), torch.arange(10).repeat(2)[None]
    expected = accelerate(copy.deepcopy(model))(tokens, position_ids=packed)[0]
    own = model.forward
    model.forward = lambda *args, **kwargs: own(*args, **kwargs)
    assert torch.equal(accelerate(model)(tokens, position_ids=packed)[0], expected)
    assert not restore(model)._forward_pre_hooks


def test_a_forward_that_somebody_kept_serves_after_restore() -> None:
    model, tokens = model_of("bloom"), tokens_of(1, 20)
    expected, kept = model(tokens)[0], accelerate(model).forward
    assert torch.equal(restore(model)(tokens)[0], expected)
    assert torch.equal(kept(tokens)[0], expected)


@pytest.mark.parametrize("config", [transformers.BertConfig, transformers.MegatronBertConfig])
def test_a_forward_of_bert_that_is_called_by_itself(config: Any) -> None:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = with_alibi(transformers.AutoModel.from_config(config(**sizes))).eval()
    inputs = tokens_of(3, 20), mask_of("holes")
    assert torch.equal(model.forward(*inputs)[0], model(*inputs)[0])
    for replica in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(replica.forward(*inputs)[0], model(*inputs)[0])


@pytest.mark.filterwarnings("ignore:.*computes this call by its own attention")
@pytest.mark.parametrize("place", ["attention", "block"])
@pytest.mark.parametrize("way", ["hook", "forward"])
@pytest.mark.parametrize("name", ["bloom", "mpt", "falcon", "falcon, grouped, eager"])
def test_a_mask_that_somebody_edits_in_the_layers(
    name: str, way: str, place: str
) -> None:  # to see what a token does for another
    model, tokens, mask = model_of(name), tokens_of(2, 20), padding(20, 13, total=20, side="left")

    def edited(kwargs: dict[str, Any]) -> dict[str, Any]:
        seen = kwargs["attention_mask"].clone()
        seen[:, :, -1, 12] = name == "mpt" or torch.finfo(torch.float32).min
        return kwargs | {"attention_mask": seen}

    def edit(layer: Any) -> None:
        if way == "hook":
            layer.register_forward_pre_hook(lambda module, args, kwargs: (args, edited(kwargs)), with_kwargs=True)
        else:
            layer.forward = functools.partial(lambda own, *args, **kwargs: own(*args, **edited(kwargs)), layer.forward)

    found = []
    for x in (model, accelerate(copy.deepcopy(model))):
        for block in getattr(x.transformer, "blocks", None) or x.transformer.h:
            attention = block.attn if name == "mpt" else block.self_attention
            edit(attention if place == "attention" else block)
        found.append(logits_of(x, tokens, attention_mask=mask))
    assert torch.equal(found[1], found[0])
    assert not torch.allclose(found[0], logits_of(model_of(name), tokens, attention_mask=mask), atol=1e-2)


@pytest.mark.parametrize("name", FAMILIES)
def test_attention_that_is_sharded(name: str) -> None:  # whose hooks leave masks alone
    model, tokens = model_of(name), tokens_of(2, 20)
    expected = gradients_of(model, tokens)
    accelerate(model, strict=True)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        for module in (*attention_modules(model), model):
            fully_shard(module, mesh=mesh)
        for parameter, gradient in gradients_of(model, tokens).items():
            close = 1e-4 * expected[parameter].abs().max().item()
            assert torch.allclose(gradient.full_tensor(), expected[parameter], atol=close)  # type: ignore[attr-defined]
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore:.*computes this call by its own attention")
@pytest.mark.parametrize("name", ["falcon", "falcon, grouped, eager"])
def test_an_implementation_that_is_set_later(name: str) -> None:  # by which Falcon adds its bias once or twice
    model, tokens, mask = model_of(name), tokens_of(2, 40), padding(40, 27, total=40, side="left")
    own, paper = copy.deepcopy(model), accelerate(copy.deepcopy(model), contract="exact")
    first = model.config._attn_implementation
    by_paper = logits_of(paper, tokens, attention_mask=mask)
    accelerate(model)
    for implementation in ("eager", "sdpa", first):
        for x in (own, model, paper):
            x.config._attn_implementation = implementation
        expected = logits_of(own, tokens, attention_mask=mask)
        actual = logits_of(model, tokens, attention_mask=mask)
        assert (actual - expected).abs().max() <= 32 * torch.finfo(torch.float32).eps * expected.abs().max()
        assert torch.equal(logits_of(paper, tokens, attention_mask=mask), by_paper)
    assert paths(model)["alibi_torch"] == 2
    assert list(paths(paper)) == ["alibi_torch"]


# --- The rest of the model ------------------------------------------------------------------------------------------


class Largest(torch.utils._python_dispatch.TorchDispatchMode):
    """Notes the number of elements in the largest tensor that any operator returns."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(x, torch.Tensor):
                self.numel = max(self.numel, x.numel())
        return result


@pytest.mark.parametrize("name", FAMILIES)
def test_nothing_is_as_large_as_queries_times_keys(name: str) -> None:
    model, tokens = accelerate(model_of(name)), tokens_of(1, 1100)
    with Largest() as largest:
        logits_of(model, tokens)
    assert largest.numel < 1100 * 1100 / 4
    with Largest() as largest:
        logits_of(restore(model), tokens)
    assert largest.numel >= 1100 * 1100  # or there would be nothing to see


@pytest.mark.parametrize("name", FAMILIES)
def test_weights_are_saved_as_ever(name: str, tmp_path: Path) -> None:
    model, tokens = model_of(name), tokens_of(1, 20)
    names = list(model.state_dict())
    model.save_pretrained(tmp_path / "before")
    accelerate(model)
    assert list(model.state_dict()) == names
    model.save_pretrained(tmp_path / "after")
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "before" / file).read_bytes() == (tmp_path / "after" / file).read_bytes()
    loaded = accelerate(type(restore(model)).from_pretrained(tmp_path / "after"))
    assert torch.equal(logits_of(loaded, tokens), logits_of(accelerate(model), tokens))


@pytest.mark.parametrize("name", FAMILIES)
def test_restore_leaves_no_trace(name: str) -> None:
    model, tokens = model_of(name), tokens_of(1, 20)
    before = [(type(x), sorted(vars(x))) for x in model.modules()]
    expected = logits_of(model, tokens)
    assert restore(accelerate(model)) is model
    assert [(type(x), sorted(vars(x))) for x in model.modules()] == before
    assert torch.equal(logits_of(model, tokens), expected)


@pytest.mark.parametrize("name", FAMILIES)
def test_copies_are_accelerated_and_apart(name: str) -> None:
    model, tokens = accelerate(model_of(name)), tokens_of(1, 20)
    expected = logits_of(model, tokens)
    for replica in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        restore(replica)
        with pytest.raises(ValueError, match="model must be accelerated"):
            restore(replica)
        assert torch.equal(logits_of(model, tokens), expected)


def test_models_without_a_head_and_with_another() -> None:
    config = BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=1, n_head=4, pad_token_id=0, num_labels=3)
    for kind in (BloomModel, BloomForSequenceClassification):
        model, tokens = kind(config).eval(), tokens_of(2, 20)
        with torch.no_grad():
            expected = model(tokens)[0]
            assert torch.allclose(accelerate(model)(tokens)[0], expected, atol=1e-5)


class Pooled(BloomPreTrainedModel):
    """A head that uses the mask itself."""

    def __init__(self, config: BloomConfig) -> None:
        super().__init__(config)
        self.transformer = BloomModel(config)
        self.post_init()

    def forward(self, input_ids: Any, attention_mask: Any) -> torch.Tensor:
        hidden = self.transformer(input_ids, attention_mask=attention_mask).last_hidden_state
        return (hidden * attention_mask[..., None]).sum(dim=1) / attention_mask.sum(dim=1, keepdim=True)


def test_a_model_around_the_base_keeps_its_mask() -> None:
    model = Pooled(BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=1, n_head=4)).eval()
    inputs = tokens_of(2, 20), padding(20, 13, total=20, side="right")
    with torch.no_grad():
        expected = model(*inputs)
        assert torch.allclose(accelerate(model)(*inputs), expected, atol=1e-5)


class HandsOn(BloomForCausalLM):
    """A model that takes whatever its parent does."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


def test_a_subclass_that_hands_its_arguments_on() -> None:
    model, tokens = model_of("bloom"), tokens_of(1, 20)
    position_ids = torch.arange(10).repeat(2)[None]
    expected = [logits_of(accelerate(copy.deepcopy(model)), tokens, **x) for x in ({}, {"position_ids": position_ids})]
    model.__class__ = HandsOn
    accelerate(model)
    assert torch.equal(logits_of(model, tokens), expected[0])
    assert torch.equal(logits_of(model, tokens, position_ids=position_ids), expected[1])


def test_hooks_of_others_see_what_they_saw() -> None:
    model, tokens, seen = model_of("falcon"), tokens_of(1, 20), []
    model.transformer.register_forward_hook(lambda module, args, output: seen.append([x is tokens for x in args]))
    for x in (model, accelerate(model)):
        logits_of(x, tokens)
    assert seen == [[True]] * 2


@pytest.mark.filterwarnings("ignore:.*computes this call by its own attention")
def test_a_dropout_that_somebody_watches_or_replaces() -> None:
    model, tokens = model_of("bloom").train(), tokens_of(2, 20)
    expected = logits_of(model, tokens)
    for block in accelerate(model).transformer.h:
        block.self_attention.attention_dropout = torch.nn.Identity()
    assert torch.allclose(logits_of(model, tokens), expected, atol=1e-4)
    seen: list[Any] = []
    block.self_attention.attention_dropout.register_forward_hook(lambda module, args, output: seen.append(output))
    attentions = model(tokens, output_attentions=True).attentions
    logits_of(model, tokens)
    assert torch.equal(seen[1], attentions[1])


@pytest.mark.filterwarnings("ignore:.*computes this call by its own attention")
@pytest.mark.parametrize("name", ["bloom", "mpt", "falcon", "falcon, eager"])
def test_weights_are_dropped_where_the_model_drops_them(name: str) -> None:  # as for Monte Carlo dropout
    for drops_by_module in (True, False):
        model, tokens, found = model_of(name), tokens_of(2, 20), []
        for x in (model, accelerate(copy.deepcopy(model))):
            x.train(not drops_by_module)
            for module in x.modules():
                if "attention_dropout" in vars(module)["_modules"]:
                    module.attention_dropout.p = 0.5
                    module.attention_dropout.train(drops_by_module)
                module.attn_dropout_p = 0.5  # MPT's
            torch.manual_seed(3)
            found.append(logits_of(x, tokens))
        assert torch.allclose(found[1], found[0], atol=1e-4)


@pytest.mark.filterwarnings("ignore:.*computes this call by its own attention")
def test_hooks_on_all_modules_see_the_weights() -> None:
    def halved(module: Any, args: Any, output: Any) -> Any:
        is_of_weights = isinstance(module, torch.nn.Dropout) and output.ndim == 4
        return output / 2 if is_of_weights else None

    model, tokens = model_of("bloom"), tokens_of(2, 20)
    hook = torch.nn.modules.module.register_module_forward_hook(halved)
    try:
        expected, actual = (logits_of(x, tokens) for x in (model, accelerate(copy.deepcopy(model))))
    finally:
        hook.remove()
    assert torch.equal(actual, expected)


@pytest.mark.filterwarnings("ignore:.*computes this call by its own attention")
@pytest.mark.parametrize("place", ["attention", "block"])
@pytest.mark.parametrize("name", FAMILIES)
def test_hooks_that_see_a_call_after_it_see_the_models_mask(name: str, place: str) -> None:
    model, tokens, seen = model_of(name), tokens_of(1, 5), []
    for x in (model, accelerate(copy.deepcopy(model))):
        block = (getattr(x.transformer, "blocks", None) or x.transformer.h)[0]
        watched = block if place == "block" else getattr(block, "attn", None) or block.self_attention
        watched.register_forward_hook(lambda _, args, given, __: seen.append(given["attention_mask"]), with_kwargs=True)
        logits_of(x, tokens)
    assert seen[0].shape[-2:] == (5, 5)
    assert torch.equal(seen[0], seen[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["bloom", "mpt", "falcon, eager"])  # which asks PyTorch for no kernel
def test_where_a_context_leaves_pytorch_no_kernel(name: str, dtype: torch.dtype) -> None:
    model = model_of(name).to(dtype)
    fast, tokens, mask = (
        accelerate(copy.deepcopy(model), strict=True),
        tokens_of(2, 9),
        padding(9, 6, total=9, side="left"),
    )
    expected = model(tokens, attention_mask=mask).logits
    options = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 3}
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION), torch.no_grad():
        actual = fast(tokens, attention_mask=mask).logits
        assert torch.equal(fast.generate(tokens, **options), model.generate(tokens, **options))
    assert torch.allclose(actual[mask.bool()], expected[mask.bool()], atol=64 * torch.finfo(dtype).eps)


@pytest.mark.filterwarnings("ignore:.*computes this call by its own attention")
def test_a_subclass_keeps_what_its_forward_sets() -> None:
    class Counting(transformers.FalconModel):
        calls = 0

        def forward(self, *args: Any, **arguments: Any) -> Any:
            self.calls += 1
            return super().forward(*args, **arguments)

    model = model_of("falcon")
    model.transformer.__class__ = Counting
    accelerate(model)(tokens_of(1, 5))
    model(tokens_of(1, 5), output_attentions=True)
    assert model.transformer.calls == 2


@pytest.mark.filterwarnings("ignore:.*computes this call by its own attention")
@pytest.mark.parametrize(
    ("name", "changed"),
    [("bloom", "beta"), ("bloom", "inv_norm_factor"), ("mpt", "softmax_scale"), ("falcon, eager", "inv_norm_factor")],
)
def test_scores_that_somebody_scales_later(name: str, changed: str) -> None:
    model, tokens = model_of(name), tokens_of(2, 20)
    before = logits_of(model, tokens)
    found = []
    for x in (model, accelerate(copy.deepcopy(model))):
        for layer in x.modules():
            if hasattr(layer, changed):
                setattr(layer, changed, 0.2)
        found.append(logits_of(x, tokens))
    assert torch.equal(*found)
    assert not torch.allclose(before, found[0], atol=1e-2)


@pytest.mark.parametrize("kept", ["mul", "add"])
@pytest.mark.parametrize("name", FAMILIES)
def test_checkpoints_that_keep_some_operations(name: str, kept: str) -> None:
    policies = torch.utils.checkpoint.CheckpointPolicy

    def policy(context: Any, operator: Any, *args: Any, **arguments: Any) -> Any:
        is_kept = operator is getattr(torch.ops.aten, kept).Tensor
        return policies.MUST_SAVE if is_kept else policies.PREFER_RECOMPUTE

    model, tokens = model_of(name).train(), tokens_of(2, 20)
    arguments = {"attention_mask": padding(20, 13, total=20, side="right")}
    expected = gradients_of(model, tokens, **arguments)
    contexts = functools.partial(torch.utils.checkpoint.create_selective_checkpoint_contexts, policy)
    enable_checkpointing(accelerate(model), context_fn=contexts)
    for parameter, gradient in gradients_of(model, tokens, **arguments).items():
        assert (gradient - expected[parameter]).abs().max() <= 1e-4 * expected[parameter].abs().max(), parameter


@pytest.mark.parametrize("name", ["falcon", "falcon, eager"])
def test_forward_derivatives_of_padding_that_no_text_precedes(name: str) -> None:
    model, tokens = model_of(name).double(), tokens_of(2, 12)
    mask, found = padding(12, 7, total=12, side="left"), []
    for x in (model, accelerate(copy.deepcopy(model))):
        weights = {name: weight.detach() for name, weight in x.named_parameters()}

        def logits(weights: Any, x: Any = x) -> torch.Tensor:
            return torch.func.functional_call(x, weights, (tokens,), {"attention_mask": mask}).logits

        found.append(torch.func.jvp(logits, (weights,), ({name: w.cos() for name, w in weights.items()},))[1])
    assert (found[1] - found[0]).abs().max() <= 1e-9 * found[0].abs().max()


@pytest.mark.parametrize("name", ["bloom", "falcon"])
def test_gradients_of_a_mask_of_ones(name: str) -> None:
    model, found = model_of(name), []
    for x in (model, accelerate(copy.deepcopy(model))):
        mask = torch.ones(2, 9, requires_grad=True)
        x(tokens_of(2, 9), attention_mask=mask * 1.0, use_cache=False).logits.square().mean().backward()
        found.append(mask.grad)
    assert (found[1] - found[0]).abs().max() <= 1e-4 * found[0].abs().max()


def test_models_that_share_layers() -> None:
    models = torch.nn.ModuleDict({"one": model_of("bloom"), "other": model_of("bloom")})
    one, other = models.values()
    other.transformer.h = one.transformer.h
    tokens = tokens_of(1, 20)
    expected = logits_of(one, tokens)
    accelerate(models)
    assert torch.allclose(logits_of(other, tokens), expected, atol=1e-4)
    restore(models)
    assert torch.equal(logits_of(one, tokens), expected)
    accelerate(one)
    restore(other)  # whose layers they are too
    assert torch.equal(logits_of(restore(one), tokens), expected)


class Wrapper(torch.nn.Module):
    """A module in a block's or its attention's place, which hands on whatever it gets, as those of GPTQ do."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


@pytest.mark.filterwarnings("ignore:.*computes this call by its own attention")
@pytest.mark.parametrize("change", ["block", "attention", "restored"])
@pytest.mark.parametrize("name", [*FAMILIES, "falcon, grouped, eager"])
def test_layers_of_which_some_are_no_longer_as_they_were(name: str, change: str) -> None:
    model, tokens, mask = model_of(name), tokens_of(2, 20), padding(20, 13, total=20, side="left")
    own = copy.deepcopy(model)
    for x in (own, accelerate(model)):
        blocks = getattr(x.transformer, "blocks", None) or x.transformer.h
        place = "attn" if name == "mpt" else "self_attention"
        if change == "block":
            blocks[1] = Wrapper(blocks[1])
        elif change == "attention":
            setattr(blocks[1], place, Wrapper(getattr(blocks[1], place)))
        elif x is model:
            restore(blocks[1])
    assert torch.equal(logits_of(model, tokens, attention_mask=mask), logits_of(own, tokens, attention_mask=mask))
    assert "blocks must be as they were accelerated" in list(paths(model))[-1]
    assert sum(paths(model).values()) == 1


@pytest.mark.parametrize("name", FAMILIES)
def test_embeddings_and_bases_in_a_wrapper(name: str) -> None:
    model, tokens, mask = model_of(name), tokens_of(2, 20), padding(20, 13, total=20, side="left")
    expected = logits_of(model, tokens, attention_mask=mask)
    accelerate(model, strict=True).set_input_embeddings(Wrapper(model.get_input_embeddings()))
    assert torch.allclose(logits_of(model, tokens, attention_mask=mask), expected, atol=1e-4)
    model.transformer = Wrapper(model.transformer)
    given = {"attention_mask": mask, "position_ids": torch.arange(20)[None]}  # by which generate calls Falcon
    assert torch.allclose(logits_of(model, tokens, **given), expected, atol=1e-4)


class UnderAnotherName(BloomPreTrainedModel):
    """A model that does not call its base what transformers does."""

    def __init__(self, config: BloomConfig) -> None:
        super().__init__(config)
        self.base = BloomModel(config)
        self.post_init()

    def forward(self, input_ids: Any, position_ids: Any = None) -> Any:
        return self.base(input_ids)


def test_a_base_under_another_name() -> None:
    config = BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=1, n_head=4)
    model, tokens = UnderAnotherName(config).eval(), tokens_of(1, 20)
    expected = model(tokens).last_hidden_state
    actual = accelerate(model)(tokens, position_ids=torch.arange(20)[None]).last_hidden_state
    assert torch.allclose(actual, expected, atol=1e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_base_that_was_restored_by_itself(name: str) -> None:
    model, tokens = model_of(name), tokens_of(2, 20)
    given = {"attention_mask": padding(20, 13, total=20, side="left"), "position_ids": torch.arange(20)[None]}
    expected = logits_of(model, tokens, **given)
    restore(accelerate(model).transformer)
    assert torch.equal(logits_of(model, tokens, **given), expected)
    ways = {"max_new_tokens": 2, "cache_implementation": "static", "disable_compile": True}
    if name != "falcon":  # which fails in a static cache
        model.generate(tokens, do_sample=False, pad_token_id=0, **ways)
    assert torch.allclose(logits_of(accelerate(model), tokens, **given), expected, atol=1e-4)
    assert torch.equal(logits_of(restore(model), tokens, **given), expected)


def test_restore_leaves_models_beside_it_alone() -> None:
    config = FalconConfig(vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=1, num_attention_heads=4)
    models = torch.nn.ModuleDict({"alibi": accelerate(falcon()), "rotary": FalconForCausalLM(config), "bloom": bloom()})
    restore(models)
    assert [models[x].transformer.use_alibi for x in ("alibi", "rotary")] == [True, False]


@pytest.mark.filterwarnings("ignore:.*computes this call by its own attention")
def test_a_cache_with_a_head_for_each_query_head() -> (
    None
):  # which the model's own code fills, and PEFT's prefix tuning
    model, tokens = model_of("falcon, grouped"), tokens_of(2, 20)
    own, ours = (DynamicCache(config=model.config) for _ in range(2))
    for cache in (own, ours):
        logits_of(model, tokens[:, :15], past_key_values=cache)
    steps = [(tokens[:, 15:16], False), (tokens[:, 16:19], True), (tokens[:, 19:], False)]
    expected = [logits_of(model, x, past_key_values=own, output_attentions=y) for x, y in steps]
    accelerate(model)
    for (x, is_own), y in zip(steps, expected, strict=True):
        actual = logits_of(model, x, past_key_values=ours, output_attentions=is_own)
        assert (actual - y).abs().max() <= 32 * torch.finfo(torch.float32).eps * y.abs().max()


class Adapter(torch.nn.Module):
    """A layer around a linear one that adds to it."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner, self.added = inner, torch.nn.Linear(inner.in_features, inner.out_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + self.added(x)


def test_adapters_around_projections() -> None:
    model, tokens = model_of("bloom"), tokens_of(1, 20)
    attention = model.transformer.h[1].self_attention
    attention.query_key_value = Adapter(attention.query_key_value)
    attention.dense = Adapter(attention.dense)
    expected = logits_of(model, tokens)
    assert torch.allclose(logits_of(accelerate(model), tokens), expected, atol=1e-4)
    with pytest.raises(ValueError, match="must be a plain linear layer.*got Adapter; merge adapters"):
        AlibiCache(model, evict=True)  # the weights no longer bound queries


def test_embeddings_in_place_of_tokens() -> None:
    model, tokens = model_of("falcon"), tokens_of(1, 20)
    embeddings = model.get_input_embeddings()(tokens).detach()
    expected = logits_of(accelerate(model), tokens)
    assert torch.equal(logits_of(model, None, inputs_embeds=embeddings), expected)


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
            accelerate(replica)
        assert torch.equal(logits_of(replica, tokens), expected)
        actual = generated(replica, tokens, do_sample=False, max_new_tokens=3)
        assert actual.shape == (1, 23)


BLOOMS_ACTIVATION = pytest.mark.filterwarnings("ignore:<class 'torch.autograd.function.Function'> should not be")


@pytest.mark.full
@BLOOMS_ACTIVATION
@pytest.mark.parametrize("name", FAMILIES)
def test_compiled(name: str) -> None:
    torch.compiler.reset()
    model, counter = model_of(name), torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(accelerate(copy.deepcopy(model)), backend=counter, fullgraph=True)

    def check(length: int, **arguments: Any) -> None:
        expected, actual = (logits_of(x, tokens_of(3, length), **arguments) for x in (model, compiled))
        assert (actual - expected).abs().max() <= 64 * torch.finfo(torch.float32).eps * expected.abs().max()

    for length in (20, 21, 23, 300):
        check(length, use_cache=False, attention_mask=padding(length, 9, 0, total=length, side="left"))
    check(20, use_cache=False, attention_mask=mask_of("holes"))
    assert counter.frame_count <= 3
    check(20, use_cache=False)
    check(20, use_cache=True, position_ids=torch.arange(20)[None])
    of_other_numbers = 1 + (torch.arange(20) % 7 == 3).long().expand(3, -1)  # which BLOOM and Falcon count twice
    check(20, use_cache=False, position_ids=torch.arange(20)[None], attention_mask=of_other_numbers)


@pytest.mark.full
def test_generate_by_a_compiled_forward() -> None:
    torch.compiler.reset()
    model, tokens, mask = model_of("falcon"), tokens_of(3, 20), mask_of("right")
    options = {"max_new_tokens": 4, "do_sample": False, "use_cache": True, "pad_token_id": 0, "eos_token_id": None}
    expected = [model.generate(tokens, attention_mask=x, **options) for x in (None, mask)]
    accelerate(model).forward = torch.compile(model.forward, backend="eager")
    for x, text in zip((None, mask), expected, strict=True):
        assert torch.equal(model.generate(tokens, attention_mask=x, **options), text)


@pytest.mark.filterwarnings("ignore")  # of the recorder
@pytest.mark.parametrize("recorder", ["torch.jit.trace", "make_fx"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_call_that_is_recorded_serves_other_masks(name: str, recorder: str) -> None:
    model, inputs = model_of(name).requires_grad_(False), (tokens_of(3, 20), mask_of("left"))
    expected = logits_of(model, *inputs[:1], attention_mask=inputs[1])
    whole = inputs[0], torch.ones(3, 20, dtype=torch.long)

    def record() -> Any:
        def call(tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return model(tokens, attention_mask=mask, use_cache=False).logits

        return torch.jit.trace(call, whole) if recorder == "torch.jit.trace" else make_fx(call)(*whole)

    try:
        record()
    except IndexError:  # of transformers 5.4, in the model's own code
        pytest.skip(f"transformers {transformers.__version__} cannot be recorded by {recorder}")
    accelerate(model)
    assert torch.allclose(record()(*inputs), expected, atol=1e-4)


@pytest.mark.full
@BLOOMS_ACTIVATION
def test_export_for_any_length() -> None:
    model, tokens = model_of("bloom"), tokens_of(3, 20)
    length = torch.export.Dim("length")
    arguments = {"input_ids": tokens, "attention_mask": mask_of("holes"), "use_cache": False}
    shapes = {"input_ids": {1: length}, "attention_mask": {1: length}, "use_cache": None}
    expected = logits_of(model, tokens[:, :11], attention_mask=mask_of("holes")[:, :11])
    with torch.no_grad():
        exported = torch.export.export(accelerate(model), (), arguments, dynamic_shapes=shapes, strict=False)
        shorter = {"input_ids": tokens[:, :11], "attention_mask": mask_of("holes")[:, :11], "use_cache": False}
        actual = exported.module()(**shorter).logits
    assert (actual - expected).abs().max() <= 64 * torch.finfo(torch.float32).eps * expected.abs().max()


@pytest.mark.full
@BLOOMS_ACTIVATION
def test_compiled_decoding_in_a_static_cache() -> None:
    torch.compiler.reset()
    model, tokens = accelerate(model_of("bloom")), tokens_of(2, 30)
    compiled = torch.compile(model, backend="aot_eager")
    caches = [StaticCache(config=model.config, max_cache_len=40) for _ in range(2)]
    for cache in caches:
        logits_of(model, tokens[:, :27], past_key_values=cache)
    for start in range(27, 30):
        step = tokens[:, start : start + 1]
        actual, expected = (
            logits_of(x, step, past_key_values=y) for x, y in zip((compiled, model), caches, strict=True)
        )
        assert torch.allclose(actual, expected, atol=1e-4)


# --- Bad input ------------------------------------------------------------------------------------------------------


class Doubled(BloomAttention):
    """Attention of a user's own."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output, weights = super().forward(*args, **kwargs)
        return 2 * output, weights


def bloom_with(**changed: Any) -> Any:
    """Return a model with other parts in its last attention module."""
    model = bloom()
    for name, x in changed.items():
        setattr(model.transformer.h[1].self_attention, name, x)
    return model


def falcon_with_another_scale() -> Any:
    model = falcon("eager")
    model.transformer.h[0].self_attention.inv_norm_factor = 0.1
    return model


def falcon_with_another_attention() -> Any:
    model = falcon()
    model.config._attn_implementation_internal = "flash_attention_2"
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GPT2Model(GPT2Config(n_layer=1, n_head=2, n_embd=8)), "model must contain a BLOOM, MPT or Falcon"),
        (lambda: torch.nn.Linear(2, 2), "model must contain a BLOOM, MPT or Falcon"),
        (lambda: falcon(alibi=False), "alibi=False"),
        (lambda: mpt(attn_config={"alibi": False}), "attn_config.alibi must be True"),
        (lambda: mpt(attn_config={"prefix_lm": True}), "attn_config.prefix_lm must be False"),
        (lambda: mpt(attn_config={"qk_ln": True}), "attn_config.qk_ln must be False"),
        (falcon_with_another_scale, "inv_norm_factor must be head_dim..-0.5 where attention is eager, got 0.1"),
        (lambda: bloom_with(beta=0.5), "beta must be 1 for a model to be accelerated, got 0.5"),
        (falcon_with_another_attention, "attn_implementation must be 'sdpa' or 'eager'"),
        (lambda: accelerate(bloom()), "model must not be accelerated yet; undo with restore"),
        (lambda: bloom_with(query_key_value=torch.nn.Linear(60, 90)), "must have 180 rows for its 6 heads, got 90"),
        (lambda: bloom_with(forward=lambda *args: args), "of BloomAttention, got .* with a forward of its own"),
        (lambda: bloom_with(__class__=Doubled), "of BloomAttention, got Doubled with a forward of its own"),
    ],
)
def test_models_that_are_refused(make: Callable[[], Any], message: str) -> None:
    model = make()
    before = [type(x) for x in model.modules()]
    with pytest.raises(ValueError, match=message):
        accelerate(model)
    assert [type(x) for x in model.modules()] == before


def test_arguments_that_are_refused() -> None:
    with pytest.raises(ValueError, match="contract must be one of 'model', 'exact'"):
        accelerate(bloom(), contract="bloom")
    with pytest.raises(TypeError, match="model must be a torch.nn.Module"):
        accelerate("bloom")
    with pytest.raises(ValueError, match="model must be accelerated"):
        AlibiCache(bloom())
    model = accelerate(mpt())
    with pytest.raises(ValueError, match="use_cache must be True with an AlibiCache, got False"):
        model.generate(tokens_of(1, 5), past_key_values=AlibiCache(model), use_cache=False, max_new_tokens=2)


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


def test_evicting_caches_refuse_what_they_cannot_prove() -> None:
    model, tokens = accelerate(model_of("bloom")), tokens_of(2, 8)
    mask = padding(8, 3, total=8, side="left")
    with pytest.raises(ValueError, match="one sequence a row, without padding"):
        model(tokens, attention_mask=mask, past_key_values=AlibiCache(model, evict=True))
    cache = AlibiCache(model, evict=True)
    other = accelerate(model_of("bloom"), contract="exact")
    with pytest.raises(ValueError, match="must be a cache of the model as it is accelerated"):
        other(tokens, past_key_values=cache)
    with pytest.raises(ValueError, match="model must hold the layers of one accelerated model"):
        AlibiCache(torch.nn.ModuleList([model, other]))
    with pytest.raises(NotImplementedError, match="serves accelerated models alone"):
        restore(copy.deepcopy(model))(tokens, past_key_values=cache)
    model.transformer.h[0].input_layernorm.weight.data *= 100  # after the bounds were proved
    with pytest.raises(ValueError, match="or one that does not evict"):
        model(tokens, past_key_values=cache)


@pytest.mark.parametrize("name", MODELS)
def test_queries_are_no_larger_than_the_weights_let_them(name: str) -> None:
    model, largest = accelerate(model_of(name)), {}
    for module in attention_modules(model):
        own = module.attend

        def attend(query: Any, *rest: Any, module: Any = module, own: Any = own) -> Any:
            largest[module] = query.norm(dim=-1).max().item()
            return own(query, *rest)

        module.attend = attend
    logits_of(model, tokens_of(4, 200))
    for module, norm in largest.items():
        bound = most_of_queries(model, module)
        assert norm <= bound < 10 * norm


@pytest.mark.parametrize("name", FAMILIES)
def test_dtypes_that_models_have(name: str) -> None:
    for dtype, length in itertools.product((torch.float64, torch.bfloat16), (1, 2)):
        model = accelerate(model_of(name).to(dtype))
        assert logits_of(model, tokens_of(1, length)).dtype == dtype
