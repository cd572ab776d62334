"""JAX's transformer and language model: PyTorch's weights, PyTorch's answers, and Flax's own ways."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="jax is not installed")
nnx = pytest.importorskip("flax.nnx", reason="flax is not installed")

import jax.numpy as jnp  # noqa: E402

from alibi_jax import AlibiAttention, AlibiConfig, AlibiLanguageModel, AlibiTransformer  # noqa: E402
from alibi_jax.nn._weights import named_parameters  # noqa: E402

SMALL = AlibiConfig(num_layers=2, embed_dim=28, num_heads=4, num_kv_heads=2, dropout=0.0, expansion_factor=2, bias=True)
VOCAB_SIZE = 31
EPS = 2.0**-23


def normal(*shape: int, seed: int = 0) -> Any:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


def tokens(*shape: int, seed: int = 0) -> Any:
    return jnp.asarray(np.random.default_rng(seed).integers(0, VOCAB_SIZE, shape).astype(np.int32))


def assert_close(actual: Any, expected: Any, *, terms: int = SMALL.embed_dim * SMALL.num_layers) -> None:
    """Assert that two ways of summing this many float32 terms of unit size give the same."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.shape == expected.shape
    np.testing.assert_allclose(actual, expected, rtol=0, atol=terms * EPS * max(1, np.abs(expected).max()))


def lively_model(factor: float = 4, **changes: Any) -> AlibiLanguageModel:
    """A language model that does not just repeat its last token, as one does whose blocks have yet to say much."""
    model = AlibiLanguageModel(dataclasses.replace(SMALL, **changes), VOCAB_SIZE, rngs=nnx.Rngs(5))
    for parameter, is_matrix in named_parameters(model.transformer).values():
        parameter[...] = parameter[...] * (factor if is_matrix else 1)
    return model


# PyTorch's weights


@pytest.mark.parametrize("causal", [True, False], ids=["decoder", "encoder"])
def test_pytorchs_weights_give_pytorchs_answers(causal: bool) -> None:
    torch, alibi_torch = pytest.importorskip("torch"), pytest.importorskip("alibi_torch")
    torch.manual_seed(0)
    config = dataclasses.replace(SMALL, is_causal=causal)
    source, model = alibi_torch.AlibiTransformer(config).eval(), AlibiTransformer(config, rngs=nnx.Rngs(0))
    parameters, state = named_parameters(model), source.state_dict()
    assert parameters.keys() == state.keys()
    for name, (parameter, is_turned) in parameters.items():
        array = state[name].numpy() * (2 if is_turned else 1)
        state[name].data.copy_(torch.from_numpy(array))
        parameter[...] = jnp.asarray(array.T if is_turned else array)
    x, mask = normal(2, 13, SMALL.embed_dim), np.arange(13) < 9
    given = torch.from_numpy(np.array(x))
    assert_close(model(x), source(given).detach().numpy())
    assert_close(model(x, mask=jnp.asarray(mask)), source(given, mask=torch.from_numpy(mask)).detach().numpy())


def test_names_are_those_of_pytorch() -> None:
    pytest.importorskip("torch")
    alibi_torch = pytest.importorskip("alibi_torch")
    for changes in ({}, {"embedding_norm": True, "tied_head": False, "norm_bias": False, "clip_qkv": 1.0}):
        config = dataclasses.replace(SMALL, **changes)
        found = named_parameters(AlibiLanguageModel(config, VOCAB_SIZE, rngs=nnx.Rngs(0)))
        assert found.keys() == alibi_torch.AlibiLanguageModel(config, VOCAB_SIZE).state_dict().keys()


# The transformer


@pytest.mark.parametrize("shape", [(2, 5, 27), (5, 28), (2, 3, 5, 28)])
def test_transformer_names_the_width_it_wants(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"^x must have shape \(batch, length, embed_dim 28\), got"):
        AlibiTransformer(SMALL, rngs=nnx.Rngs(0))(jnp.zeros(shape))


def test_segments_reach_every_block() -> None:
    model, x = AlibiTransformer(SMALL, rngs=nnx.Rngs(0)), normal(2, 13, SMALL.embed_dim)
    ids = jnp.broadcast_to((jnp.arange(13) >= 5).astype(jnp.int32), (2, 13))
    assert_close(model(x, segment_ids=ids), jnp.concatenate([model(x[:, :5]), model(x[:, 5:])], axis=1))


def test_caches_continue_a_sequence() -> None:
    model, x = AlibiTransformer(SMALL, rngs=nnx.Rngs(0)), normal(3, 13, SMALL.embed_dim)
    first, caches = model(x[:, :6], caches=model.make_caches(3, 16))
    second, caches = model(x[:, 6:], caches=caches)
    assert [int(cache.length) for cache in caches] == [13] * SMALL.num_layers
    assert_close(jnp.concatenate([first, second], axis=1), model(x))
    with pytest.raises(ValueError, match=r"^caches must be one a block \(2\), got 1"):
        model(x, caches=caches[:1])


def test_attention_factory_replaces_attention_alone() -> None:
    seen = []

    def windowed(config: AlibiConfig, **options: Any) -> AlibiAttention:
        seen.append(config)
        return AlibiAttention(config.embed_dim, config.num_heads, window_size=0, **options)

    model, x = AlibiTransformer(SMALL, attention=windowed, rngs=nnx.Rngs(0)), normal(2, 5, SMALL.embed_dim)
    assert seen == [SMALL] * SMALL.num_layers
    order = jnp.asarray([3, 1, 4, 0, 2])
    assert_close(model(x)[:, order], model(x[:, order]))  # no token hears of another


def test_dtypes_are_those_asked_for() -> None:
    model = AlibiLanguageModel(SMALL, VOCAB_SIZE, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    assert {parameter[...].dtype for parameter, _ in named_parameters(model).values()} == {jnp.dtype("float32")}
    assert model(tokens(1, 4)).dtype == jnp.bfloat16
    model = AlibiLanguageModel(SMALL, VOCAB_SIZE, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    assert {parameter[...].dtype for parameter, _ in named_parameters(model).values()} == {jnp.dtype("bfloat16")}
    assert model.generate(tokens(1, 4), 2).shape == (1, 6)


# The language model


def test_gradients_reach_every_weight() -> None:
    config = dataclasses.replace(SMALL, block="parallel", embedding_norm=True, tied_head=False)
    model, ids = AlibiLanguageModel(config, VOCAB_SIZE, rngs=nnx.Rngs(0)), tokens(2, 13)

    @nnx.jit
    @nnx.grad
    def gradients(model: AlibiLanguageModel) -> Any:
        return -jnp.take_along_axis(jax.nn.log_softmax(model(ids)[:, :-1]), ids[:, 1:, None], axis=-1).mean()

    found = nnx.to_flat_state(gradients(model))
    # A key's bias adds the same to every score of a row, so its gradient is 0 but for rounding.
    silent = [path for path, leaf in found if not leaf[...].any() and path[-2:] != ("k_proj", "bias")]
    assert silent == []


def test_untrained_model_knows_nothing() -> None:
    logits = AlibiLanguageModel(SMALL, VOCAB_SIZE, rngs=nnx.Rngs(0))(tokens(17, 13))
    assert logits.shape == (17, 13, VOCAB_SIZE)
    assert 0.5 < logits.std() < 2


def test_language_model_refuses_an_encoder() -> None:
    with pytest.raises(ValueError, match=r"^is_causal must be True for a language model, got False"):
        AlibiLanguageModel(dataclasses.replace(SMALL, is_causal=False), VOCAB_SIZE, rngs=nnx.Rngs(0))


def test_generate_turns_dropout_off_for_itself() -> None:
    model, prompt = lively_model(dropout=0.5), tokens(2, 5)
    text = model.generate(prompt, 9)
    assert (model(prompt) != model(prompt)).any()  # it is still training
    model.eval()
    assert (model.generate(prompt, 9) == text).all()
