"""MLX's transformer and language model: PyTorch's weights, PyTorch's answers, and MLX's own ways."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core", reason="mlx is not installed")

from mlx import nn, optimizers  # noqa: E402
from mlx.utils import tree_flatten  # noqa: E402

from alibi_mlx import AlibiAttention, AlibiConfig, AlibiLanguageModel, AlibiTransformer  # noqa: E402

SMALL = AlibiConfig(num_layers=3, embed_dim=28, num_heads=4, num_kv_heads=2, dropout=0.0, expansion_factor=2, bias=True)
VOCAB_SIZE = 31
EPS = 2.0**-23


def numpy(array: Any) -> np.ndarray:
    return np.array(array.astype(mx.float32))


def normal(*shape: int, seed: int = 0) -> Any:
    return mx.array(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


def tokens(*shape: int, seed: int = 0) -> Any:
    return mx.array(np.random.default_rng(seed).integers(0, VOCAB_SIZE, shape).astype(np.int32))


def assert_close(actual: Any, expected: Any, *, terms: int = SMALL.embed_dim * SMALL.num_layers) -> None:
    """Assert that two ways of summing this many float32 terms of unit size give the same."""
    actual, expected = numpy(actual), numpy(expected)
    assert actual.shape == expected.shape
    np.testing.assert_allclose(actual, expected, rtol=0, atol=terms * EPS * max(1, np.abs(expected).max()))


def lively_model(factor: float = 4, **changes: Any) -> AlibiLanguageModel:
    """A language model that does not just repeat its last token, as one does whose blocks have yet to say much."""
    mx.random.seed(5)
    model = AlibiLanguageModel(dataclasses.replace(SMALL, **changes), VOCAB_SIZE)
    for block in model.transformer.blocks:
        block.apply(lambda weight: factor * weight if weight.ndim == 2 else weight)
    return model


# PyTorch's weights


@pytest.mark.parametrize("changes", [{}, {"bias": False, "num_kv_heads": None}], ids=["grouped", "plain"])
def test_a_file_that_pytorch_wrote_gives_pytorchs_logits_and_back(changes, tmp_path):
    torch, alibi_torch = pytest.importorskip("torch"), pytest.importorskip("alibi_torch")
    from safetensors.torch import load_file, save_file

    torch.manual_seed(0)
    config = dataclasses.replace(SMALL, **changes)
    source, path = alibi_torch.AlibiLanguageModel(config, VOCAB_SIZE).eval(), str(tmp_path / "model.safetensors")
    for weight in source.transformer.blocks.parameters():
        weight.data *= 2 if weight.ndim == 2 else 1
    save_file(source.state_dict(), path)
    model, prompt = AlibiLanguageModel(config, VOCAB_SIZE), tokens(2, 40)
    assert np.abs(numpy(model(prompt)) - source(torch.tensor(prompt.tolist())).detach().numpy()).max() > 0.1
    model.load_weights(path)
    expected = source(torch.tensor(prompt.tolist())).detach().numpy()
    assert_close(model(prompt), mx.array(expected))
    assert model.generate(prompt, 30).tolist() == source.generate(torch.tensor(prompt.tolist()), 30).tolist()

    model.update({"transformer": {"norm": {"bias": normal(SMALL.embed_dim)}}})
    model.save_weights(path)
    source.load_state_dict(load_file(path))
    assert_close(model(prompt), mx.array(source(torch.tensor(prompt.tolist())).detach().numpy()))


def test_an_encoder_of_pytorchs_gives_the_same(tmp_path):
    torch, alibi_torch = pytest.importorskip("torch"), pytest.importorskip("alibi_torch")
    from safetensors.torch import save_file

    torch.manual_seed(0)
    config = dataclasses.replace(SMALL, is_causal=False)
    source, path = alibi_torch.AlibiTransformer(config).eval(), str(tmp_path / "model.safetensors")
    save_file(source.state_dict(), path)
    model, x = AlibiTransformer(config), normal(2, 13, SMALL.embed_dim)
    model.load_weights(path)
    mask = mx.arange(13) < 9
    for arguments in ({}, {"mask": mask}):
        given = {name: torch.tensor(array.tolist()) for name, array in arguments.items()}
        assert_close(model(x, **arguments), mx.array(source(torch.from_numpy(numpy(x)), **given).detach().numpy()))


# The transformer


@pytest.mark.parametrize("shape", [(2, 5, 27), (5, 28), (2, 3, 5, 28)])
def test_transformer_names_the_width_it_wants(shape):
    with pytest.raises(ValueError, match=r"^x must have shape \(batch, length, embed_dim 28\), got"):
        AlibiTransformer(SMALL)(mx.zeros(shape))


def test_decoder_does_not_look_ahead():
    model, x = AlibiTransformer(SMALL), normal(2, 13, SMALL.embed_dim)
    changed = mx.concatenate([x[:, :7], normal(2, 6, SMALL.embed_dim, seed=1)], axis=1)
    difference = np.abs(numpy(model(x)) - numpy(model(changed))).max(axis=(0, 2))
    assert difference[:7].max() <= SMALL.embed_dim * EPS
    assert difference[7:].min() > 1e-2


def test_encoder_reads_both_ways_alike():
    model, x = AlibiTransformer(dataclasses.replace(SMALL, is_causal=False)), normal(2, 13, SMALL.embed_dim)
    forwards, backwards = model(x), model(x[:, ::-1])[:, ::-1]
    assert_close(forwards, backwards)
    shuffled = mx.roll(model(mx.roll(x, 3, axis=1)), -3, axis=1)
    assert np.abs(numpy(forwards - shuffled)).max() > 1e-2  # it does sense positions


def test_mask_and_segments_reach_every_block():
    model, x = AlibiTransformer(SMALL), normal(2, 13, SMALL.embed_dim)
    ids = mx.broadcast_to((mx.arange(13) >= 5).astype(mx.int32), (2, 13))
    apart = mx.concatenate([model(x[:, :5]), model(x[:, 5:])], axis=1)
    assert_close(model(x, segment_ids=ids), apart)
    assert_close(model(x, mask=ids[:, None, :, None] == ids[:, None, None, :]), apart)


@pytest.mark.parametrize("options", [{}, {"evict": True, "max_query_norm": 50.0}], ids=["all", "evicting"])
def test_caches_continue_a_sequence(options):
    model, x = AlibiTransformer(SMALL), normal(3, 13, SMALL.embed_dim)
    caches = model.make_caches(3, 13, **options)
    parts = [model(x[:, a:b], caches=caches) for a, b in ((0, 5), (5, 6), (6, 13))]
    assert_close(mx.concatenate(parts, axis=1), model(x))
    with pytest.raises(ValueError, match=r"^caches must be one a block \(3\), got 2"):
        model(x, caches=caches[:2])


@pytest.mark.parametrize("evict", [False, True])
def test_a_model_whose_last_block_refuses_leaves_all_caches_as_they_were(evict):
    model, x = AlibiTransformer(SMALL), normal(1, 8, SMALL.embed_dim)
    options = {"evict": True, "max_query_norm": 50.0} if evict else {}
    caches = model.make_caches(**options)
    caches[2] = model.blocks[2].attention.make_cache(max_length=6, **options)
    expected = model(x)
    model(x[:, :5], caches=caches)
    with pytest.raises(ValueError, match="max_length 6"):
        model(x[:, 5:], caches=caches)
    assert [cache.offset for cache in caches] == [5, 5, 5]
    assert_close(model(x[:, 5:6], caches=caches), expected[:, 5:6])


def test_attention_factory_replaces_attention_alone():
    class Still(nn.Module):
        def __call__(self, x, *, mask, segment_ids, cache):
            return mx.zeros_like(x)

    seen = []
    model = AlibiTransformer(SMALL, attention=lambda config: seen.append(config) or Still())
    assert seen == [SMALL] * SMALL.num_layers
    x, order = normal(2, 5, SMALL.embed_dim), mx.array([3, 1, 4, 0, 2])
    assert_close(model(x)[:, order], model(x[:, order]))  # no token hears of another


# The language model


def test_untrained_model_knows_nothing():
    logits = AlibiLanguageModel(SMALL, VOCAB_SIZE)(tokens(17, 13))
    assert logits.shape == (17, 13, VOCAB_SIZE)
    assert 0.5 < numpy(logits).std() < 2


def test_language_model_refuses_an_encoder():
    with pytest.raises(ValueError, match=r"^is_causal must be True for a language model, got False"):
        AlibiLanguageModel(dataclasses.replace(SMALL, is_causal=False), VOCAB_SIZE)


def test_each_token_is_drawn_with_a_key_of_its_own():
    model = AlibiLanguageModel(SMALL, VOCAB_SIZE)
    drawn = model.generate(tokens(1, 1), 60, temperature=1e6, key=mx.random.key(0))[0, 1:].tolist()
    assert len(set(drawn)) > 15  # of 31 equally likely ones


def test_generate_turns_dropout_off_and_back_on():
    model, prompt = lively_model(dropout=0.5), tokens(2, 5)
    model.transformer.blocks[0].eval()
    before = [module.training for module in model.modules()]
    assert len(set(before)) == 2
    assert model.generate(prompt, 20).tolist() == model.generate(prompt, 20).tolist()
    assert [module.training for module in model.modules()] == before


# What MLX does with modules


def loss_of(model, batch):
    return nn.losses.cross_entropy(model(batch[:, :-1]), batch[:, 1:], reduction="mean")


def test_gradients_reach_every_weight():
    model = AlibiLanguageModel(SMALL, VOCAB_SIZE)
    _, gradients = nn.value_and_grad(model, loss_of)(model, tokens(2, 13))
    # A key's bias adds the same to every score of a row, so its gradient is 0 but for rounding.
    silent = [name for name, x in tree_flatten(gradients) if not numpy(x).any() and not name.endswith("k_proj.bias")]
    assert silent == []
    assert len(tree_flatten(gradients)) == len(tree_flatten(model.parameters()))


@pytest.mark.parametrize("compiled", [False, True])
def test_training_lowers_the_loss(compiled):
    mx.random.seed(0)
    model, batch = AlibiLanguageModel(dataclasses.replace(SMALL, num_layers=1), VOCAB_SIZE), tokens(4, 14)
    optimizer, gradient = optimizers.Adam(learning_rate=3e-3), nn.value_and_grad(model, loss_of)

    def step(batch):
        loss, gradients = gradient(model, batch)
        optimizer.update(model, gradients)
        return loss

    state = [model.state, optimizer.state]
    step = mx.compile(step, inputs=state, outputs=state) if compiled else step
    losses = []
    for _ in range(15):
        losses.append(step(batch).item())
        mx.eval(state)
    assert losses[-1] < 0.6 * losses[0]


def test_compiled_model_equals_eager():
    model, batch = lively_model(2, num_layers=1), tokens(2, 13)
    assert_close(mx.compile(model)(batch), model(batch))


@pytest.mark.skipif(mx.__version__.startswith("0.29"), reason="MLX 0.29 adds no bias of bfloat16 on the CPU")
def test_a_model_of_low_precision_computes_in_it_but_for_its_slopes():
    model, batch = lively_model(2), tokens(2, 13)
    expected = numpy(model(batch))
    model.set_dtype(mx.bfloat16)
    actual = model(batch)
    assert actual.dtype == mx.bfloat16
    assert all(block.attention.slopes.dtype == mx.float32 for block in model.transformer.blocks)
    # Rounding errors of weights and activations, through some twenty matrix products.
    assert np.abs(numpy(actual) - expected).max() < 20 * 2.0**-8 * np.abs(expected).max()
    assert model.generate(batch, 3).shape == (2, 16)


def test_a_quantized_model_computes_with_the_quantized_weights():
    config = AlibiConfig(num_layers=2, embed_dim=64, num_heads=4, num_kv_heads=2, dropout=0.0, bias=True)
    mx.random.seed(0)
    model, exact = (AlibiLanguageModel(config, VOCAB_SIZE) for _ in range(2))
    exact.update(model.parameters())
    nn.quantize(model, group_size=32, bits=8)
    counts = [type(module).__name__ for _, module in model.named_modules()]
    assert (counts.count("QuantizedLinear"), counts.count("QuantizedEmbedding")) == (2 * 6, 1)
    for name, module in exact.named_modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            quantized = dict(model.named_modules())[name]
            arrays = (quantized.weight, quantized.scales, quantized.biases)
            module.weight = mx.dequantize(*arrays, group_size=32, bits=8)
    batch, caches = tokens(2, 13), model.transformer.make_caches()
    assert_close(model(batch), exact(batch), terms=4 * 64)
    steps = [model(batch[:, i : i + 1], caches=caches) for i in range(13)]
    assert_close(mx.concatenate(steps, axis=1), exact(batch), terms=4 * 64)


def test_weights_travel_through_a_file(tmp_path):
    path = str(tmp_path / "model.safetensors")
    model = AlibiLanguageModel(SMALL, VOCAB_SIZE, attention=lambda c: AlibiAttention(28, 4, learnable_slopes=True))
    other = AlibiLanguageModel(SMALL, VOCAB_SIZE, attention=lambda c: AlibiAttention(28, 4, learnable_slopes=True))
    model.transformer.blocks[1].attention.log_slopes = mx.array([-1.0, -0.5, -2.0, -3.0])
    model.save_weights(path)
    other.load_weights(path)
    batch = tokens(2, 13)
    assert np.array_equal(numpy(other(batch)), numpy(model(batch)))
