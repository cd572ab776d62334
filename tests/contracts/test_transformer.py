"""Transformers and language models of all backends: one configuration, one format of weights, the same results."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from alibi_core.backend.models import AlibiConfig
from tests.support.frameworks import FRAMEWORK, NAMES, NAMES_SLOW_IN_JAX, few_in_jax
from tests.support.layers import load, save, seed
from tests.support.models import Model, lively_model, make_model, make_module

EACH = pytest.mark.parametrize("name", NAMES)
SMALL = AlibiConfig(num_layers=2, embed_dim=28, num_heads=4, num_kv_heads=2, dropout=0.0, expansion_factor=2, bias=True)
VOCAB_SIZE = 31
# fmt: off
BLOCKS = {
    "parallel": {
        "block": "parallel", "activation": "gelu_tanh", "embedding_norm": True, "tied_head": False, "forget_gate": True,
    },
    "sequential": {},
    "shared_norm": {
        "block": "shared_norm", "norm": "rms_norm", "feed_forward_bias": False, "scale": 0.3, "clip_qkv": 0.5,
        "qk_norm": True, "learnable_slopes": True,
    },
    "normed_residual": {
        "block": "normed_residual", "norm_bias": False, "gated": True, "slopes": (0.1,) * 4, "embedding_scale": 1.0,
        "logit_scale": 0.5,
    },
}
# fmt: on


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def tokens(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, VOCAB_SIZE, shape).astype(np.int32)


def transformer(name: str, **changes: Any) -> Model:
    return make_model(name, "AlibiTransformer", dataclasses.replace(SMALL, **changes))


def language_model(name: str, **changes: Any) -> Model:
    return make_model(name, "AlibiLanguageModel", dataclasses.replace(SMALL, **changes), VOCAB_SIZE)


def lively(name: str, **changes: Any) -> Model:
    return lively_model(name, dataclasses.replace(SMALL, **changes), VOCAB_SIZE)


def assert_close(actual: np.ndarray, expected: np.ndarray) -> None:
    """Assert that two sums of the float32 terms of all blocks, each of unit size, are equal to rounding."""
    terms = SMALL.embed_dim * SMALL.num_layers
    assert actual.shape == expected.shape
    np.testing.assert_allclose(actual, expected, rtol=0, atol=terms * 2.0**-23 * max(1, np.abs(expected).max()))


# --- The configuration ----------------------------------------------------------------------------------------------


def test_config_is_frozen_and_positional_and_has_the_customary_defaults() -> None:
    config = AlibiConfig()
    fields = {"num_layers": 6, "embed_dim": 256, "num_heads": 8, "max_len": 256, "dropout": 0.1, "is_causal": True}
    assert {name: getattr(config, name) for name in fields} == fields
    assert config.expansion_factor == 4
    assert (config.hidden_dim, dataclasses.replace(config, feed_forward_dim=300).hidden_dim) == (1024, 300)
    assert AlibiConfig(3, 64) == AlibiConfig(num_layers=3, embed_dim=64)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.embed_dim = 2


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("num_layers", 0, ValueError, "num_layers must be at least 1, got 0"),
        ("num_layers", 2.0, TypeError, "num_layers must be an integer, got 2.0"),
        ("num_layers", None, TypeError, "num_layers must be an integer, got None"),
        ("embed_dim", -8, ValueError, "embed_dim must be at least 1, got -8"),
        ("embed_dim", 100, ValueError, r"embed_dim must be a multiple of num_heads \(8\), got 100"),
        ("num_heads", True, TypeError, "num_heads must be an integer, got True"),
        ("num_heads", 7, ValueError, r"embed_dim must be a multiple of num_heads \(7\), got 256"),
        ("max_len", 0, ValueError, "max_len must be at least 1, got 0"),
        ("dropout", 1.0, ValueError, r"dropout must be in \[0, 1\), got 1.0"),
        ("is_causal", 1, TypeError, "is_causal must be True or False, got 1"),
        ("expansion_factor", 0, ValueError, "expansion_factor must be at least 1, got 0"),
        ("num_kv_heads", 3, ValueError, r"num_kv_heads must divide num_heads, 8, got 3"),
        ("bias", None, TypeError, "bias must be True or False, got None"),
        ("block", "pre_norm", ValueError, "block must be one of 'sequential', .*, got 'pre_norm'"),
        ("activation", "tanh", ValueError, "activation must be one of 'gelu', .*, got 'tanh'"),
        ("feed_forward_dim", 0, ValueError, "feed_forward_dim must be at least 1, got 0"),
        ("norm_epsilon", 0.0, ValueError, "norm_epsilon must be positive, got 0.0"),
        ("scale", -1.0, ValueError, "scale must be positive, got -1.0"),
        ("clip_qkv", 0, ValueError, "clip_qkv must be positive, got 0"),
        ("gradient_checkpointing", 1, TypeError, "gradient_checkpointing must be True or False, got 1"),
        ("slopes", [0.5] * 8, TypeError, "slopes must be a tuple of numbers, got list"),
        ("slopes", (-0.5,) * 8, ValueError, "slopes must not be negative, got -0.5"),
        ("future_slopes", 0.5, TypeError, "future_slopes must be a tuple of numbers, got float"),
    ],
)
def test_config_refuses(name: str, value: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{message}"):
        AlibiConfig(**{name: value})


# --- The transformer ------------------------------------------------------------------------------------------------


@EACH
def test_transformer_names_the_width_it_wants(name: str) -> None:
    model = transformer(name, num_layers=1)
    for shape in ((2, 5, 27), (5, 28), (2, 3, 5, 28)):
        with pytest.raises(ValueError, match=r"^x must have shape \(batch, length, embed_dim 28\), got"):
            model(normal(*shape))
    with pytest.raises(TypeError, match="^x must be an array, got .*; numpy.asarray, or that of your framework"):
        model.inner([[0.0] * 28])


@pytest.mark.parametrize("name", NAMES_SLOW_IN_JAX)
def test_max_len_is_no_limit_and_changes_nothing(name: str) -> None:
    x, model, recorded = normal(2, 9, 28), transformer(name, max_len=11), transformer(name, max_len=2)
    recorded.weights = model.weights
    assert np.array_equal(model(x), recorded(x))


@pytest.mark.parametrize("name", NAMES_SLOW_IN_JAX)
def test_mask_and_segments_reach_every_block(name: str) -> None:
    model, x = transformer(name), normal(2, 13, 28)
    ids = np.repeat((np.arange(13) >= 5)[None].astype(np.int32), 2, axis=0)
    apart = np.concatenate([model(x[:, :5]), model(x[:, 5:])], axis=1)
    assert_close(model(x, segment_ids=ids), apart)
    assert_close(model(x, mask=ids[:, None, :, None] == ids[:, None, None, :]), apart)


@pytest.mark.parametrize(("name", "block"), few_in_jax(NAMES, BLOCKS))
def test_caches_continue_a_sequence(name: str, block: str) -> None:
    model, x = transformer(name, **BLOCKS[block]), normal(3, 13, 28)
    caches = model.inner.make_caches(3, 13)
    parts = [model(part, caches=caches) for part in np.split(x, [5, 6], axis=1)]
    assert_close(np.concatenate(parts, axis=1), model(x))
    assert [int(cache.length) for cache in caches] == [13] * SMALL.num_layers
    with pytest.raises(ValueError, match=r"^caches must be one a block \(2\), got 1"):
        model(x, caches=caches[:1])
    with pytest.raises(TypeError, match=r"^caches must be a list of one a block \(2\), got .*KVCache"):
        model(x, caches=caches[0])


@pytest.mark.parametrize("name", [name for name in NAMES if name.id != "jax"])  # JAX's caches are not changed in place
def test_a_model_whose_last_block_refuses_leaves_all_caches_as_they_were(name: str) -> None:
    model, x = transformer(name), normal(1, 8, SMALL.embed_dim)
    caches, expected = model.inner.make_caches(1, 20), model(x)
    caches[-1] = model.inner.blocks[-1].attention.make_cache(1, 6)
    model(x[:, :5], caches)
    with pytest.raises(ValueError, match="max_length 6"):
        model(x[:, 5:], caches)
    assert [cache.length for cache in caches] == [5] * SMALL.num_layers
    assert_close(model(x[:, 5:6], caches), expected[:, 5:6])


@EACH
def test_attention_factory_replaces_attention_alone(name: str) -> None:
    seen = []

    def alone(config: AlibiConfig, **options: Any) -> Any:
        """Return a layer in which each token sees itself."""
        seen.append(config)
        package = importlib.import_module(f"alibi_{name}")
        return package.AlibiAttention(config.embed_dim, config.num_heads, window_size=0, **options)

    model, x = make_model(name, "AlibiTransformer", SMALL, attention=alone), normal(2, 13, 28)
    assert seen == [SMALL] * SMALL.num_layers
    order = np.random.default_rng(0).permutation(13)
    assert_close(model(x)[:, order], model(x[:, order]))  # no token sees another


# --- The language model ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "block"), few_in_jax(NAMES, BLOCKS, "shared_norm"))
def test_gradients_reach_every_weight(name: str, block: str) -> None:
    model = language_model(name, **BLOCKS[block])
    gradients = model.gradients(tokens(2, 13))
    assert len(gradients) == len(model.weights)  # so slopes that are not learnable have none
    # A key's bias adds the same to every score of a row, so its gradient is 0 but for rounding.
    assert [x for x, gradient in gradients.items() if not gradient.any() and not x.endswith("k_proj.bias")] == []


def kept(model: Model, tokens: np.ndarray) -> int:
    """Return the bytes that a forward pass keeps for the backward pass; in MLX, the most that both allocate."""
    inner, bytes_of = model.inner, lambda x: int(np.prod(x.shape)) * x.dtype.itemsize
    if model.name == "torch":
        torch, sizes = importlib.import_module("torch"), list[int]()
        with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(bytes_of(x)) or x, lambda x: x):
            inner(torch.asarray(tokens))
        return sum(sizes)
    if model.name == "mlx":
        mlx = importlib.import_module("mlx.core")
        mlx.reset_peak_memory()
        model.gradients(tokens)
        return mlx.get_peak_memory()
    jax, nnx = map(importlib.import_module, ("jax", "flax.nnx"))
    inner.eval()
    graph, weights, others = nnx.split(inner, nnx.Param, ...)
    saved = jax.eval_shape(lambda x: jax.vjp(lambda x: nnx.merge(graph, x, others)(tokens), x)[1], weights)
    return sum(map(bytes_of, jax.tree.leaves(saved)))


@pytest.mark.parametrize(("name", "is_causal"), few_in_jax(NAMES, (True, False)))
def test_gradient_checkpointing_changes_no_gradient_and_keeps_less(name: str, is_causal: bool) -> None:
    changes = {"num_layers": 4, "dropout": 0.3, "is_causal": is_causal, "learnable_slopes": True, "token_types": 2}
    config, text = dataclasses.replace(SMALL, **changes), tokens(2, 99) % SMALL.embed_dim
    kind = "AlibiLanguageModel" if is_causal else "AlibiEncoder"
    plain, model = (
        make_model(name, kind, dataclasses.replace(config, gradient_checkpointing=x), VOCAB_SIZE) for x in (False, True)
    )
    for step in range(2):  # the second step draws other features to drop
        seed(name, step)
        expected = plain.gradients(text)
        seed(name, step)
        found = model.gradients(text)
        assert len(found) == len(expected) == len(plain.weights)
        # XLA may sum in another order where it compiles another program.
        error = 2.0**-18 * max(np.abs(x).max() for x in expected.values()) if name == "jax" else 0
        for weight, gradient in expected.items():
            np.testing.assert_allclose(found[weight], gradient, rtol=0, atol=error, err_msg=weight)
    assert kept(model, text) < 0.7 * kept(plain, text)
    if is_causal:
        caches = model.inner.transformer.make_caches(2, 9)
        model(tokens(2, 9), caches=caches)
        assert {int(cache.length) for cache in caches} == {9}


PAIRS = [pytest.param(pair, id="-to-".join(pair)) for pair in (("torch", "jax"), ("mlx", "torch"))]
TRAVELS = few_in_jax(PAIRS, BLOCKS, "parallel", "shared_norm")
TRAVELS += [pytest.param(("jax", "mlx"), "parallel", id="jax-to-mlx-parallel")]


@pytest.mark.parametrize(("pair", "block"), TRAVELS)
def test_a_model_with_the_weights_of_another_framework_gives_its_answers(
    pair: tuple[str, str], block: str, tmp_path: Path
) -> None:
    for name in pair:
        pytest.importorskip(f"alibi_{name}")
    path, mask = tmp_path / "weights.safetensors", np.arange(13) < 9
    source, model = (make(name, **BLOCKS[block]) for name, make in zip(pair, (lively, language_model), strict=True))
    save(pair[0], source.inner, path)
    load(pair[1], model.inner, path)
    assert_close(model(tokens(2, 13), mask=mask), source(tokens(2, 13), mask=mask))


@EACH
def test_projections_are_plain_layers_that_quantizers_and_adapters_may_replace(name: str) -> None:
    config = dataclasses.replace(SMALL, **BLOCKS["shared_norm"])
    layer = make_module(name, "AlibiTransformer", config).blocks[0].attention
    plain = type(make_module(name, "AlibiAttention", 28, 4).q_proj)
    assert {type(getattr(layer, f"{x}_proj")) for x in ("q", "k", "v", "out")} == {plain}


@EACH
def test_untrained_model_knows_nothing(name: str) -> None:
    model = language_model(name)
    logits = model(tokens(2, 13))
    assert logits.shape == (2, 13, VOCAB_SIZE)
    assert 0.5 < logits.std() < 2
    assert [x for x, weight in model.weights.items() if VOCAB_SIZE in weight.shape] == ["embedding.weight"]


@EACH
def test_a_model_is_made_of_a_config_for_its_direction(name: str) -> None:
    for kind in ("AlibiTransformer", "AlibiLanguageModel", "AlibiEncoder"):
        with pytest.raises(TypeError, match=r"^config must be an AlibiConfig, got 13 \(int\)$"):
            make_module(name, kind, 13, *([AlibiConfig()] if kind != "AlibiTransformer" else []))
    with pytest.raises(ValueError, match=r"^is_causal must be True for a language model, got False"):
        language_model(name, is_causal=False)
    with pytest.raises(ValueError, match="^is_causal must be False for an encoder, got True"):
        make_module(name, "AlibiEncoder", SMALL, VOCAB_SIZE)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["AlibiLanguageModel", "AlibiEncoder"])
def test_a_model_of_text_takes_a_batch_of_integers(name: str, kind: str) -> None:
    config = dataclasses.replace(SMALL, is_causal=kind == "AlibiLanguageModel")
    model, array = make_module(name, kind, config, VOCAB_SIZE), FRAMEWORK[name].array
    for given, error, message in (
        ([1, 2], TypeError, r"be an array, got \[1, 2\] \(list\); numpy"),
        (["a text"], TypeError, r"be an array, got \['a text'\] \(list\); a tokenizer makes tokens of texts"),
        (array(np.zeros((2, 3))), TypeError, "have an integer dtype, got .*float32"),
        (array(np.zeros(3, np.int32)), ValueError, r"have shape \(batch, length\), got \(3,\); tokens\[None\] makes"),
        (array(np.zeros((2, 3, 8), np.int32)), ValueError, r"have shape \(batch, length\), got \(2, 3, 8\)$"),
    ):
        with pytest.raises(error, match=f"^tokens must {message}"):
            model(given)
    if name != "jax":  # it takes NumPy's arrays
        with pytest.raises(TypeError, match=r"^arrays must belong to one array namespace, .* by \S+: tokens$"):
            model(np.zeros((1, 2), np.int32))


@pytest.mark.parametrize("name", NAMES_SLOW_IN_JAX)
def test_each_token_is_drawn_by_itself(name: str) -> None:
    drawn = language_model(name).generate(tokens(1, 1), 60, 0, temperature=1e6)[0, 1:]
    assert len(set(drawn.tolist())) > 15  # of 31 equally likely ones


@pytest.mark.parametrize("name", NAMES_SLOW_IN_JAX)
def test_generate_turns_dropout_off_for_itself(name: str) -> None:
    model, prompt = lively(name, dropout=0.5), tokens(2, 5)
    assert np.array_equal(model.generate(prompt, 9), model.generate(prompt, 9))
    assert (model(prompt) != model(prompt)).any()  # it is still training
    if name != "jax":  # modules of Flax have no ``training``
        model.inner.transformer.blocks[0].eval()
        before = [module.training for module in model.inner.modules()]
        model.generate(prompt, 1)
        assert [module.training for module in model.inner.modules()] == before
        assert len(set(before)) == 2
