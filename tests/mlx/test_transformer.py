"""MLX's models alone: training, the compiler, low precision."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core", reason="mlx is not installed")

from mlx import nn, optimizers  # noqa: E402

from alibi_mlx import AlibiConfig, AlibiLanguageModel  # noqa: E402
from tests.support.frameworks import MLX  # noqa: E402
from tests.support.mlx import assert_close  # noqa: E402

SMALL = AlibiConfig(num_layers=3, embed_dim=28, num_heads=4, num_kv_heads=2, dropout=0.0, expansion_factor=2, bias=True)
VOCAB_SIZE = 31
TERMS = SMALL.embed_dim * SMALL.num_layers // 2


def tokens(*shape: int, seed: int = 0) -> Any:
    return mx.array(np.random.default_rng(seed).integers(0, VOCAB_SIZE, shape).astype(np.int32))


def lively_model(**changes: Any) -> AlibiLanguageModel:
    """A language model that does not just repeat its last token, as one does whose blocks have yet to say much."""
    mx.random.seed(5)
    model = AlibiLanguageModel(dataclasses.replace(SMALL, **changes), VOCAB_SIZE)
    for block in model.transformer.blocks:
        block.apply(lambda weight: 2 * weight if weight.ndim == 2 else weight)
    return model


@pytest.mark.slow
def test_training_in_a_compiled_step_lowers_the_loss():
    mx.random.seed(0)
    model, batch = AlibiLanguageModel(dataclasses.replace(SMALL, num_layers=1), VOCAB_SIZE), tokens(4, 14)
    optimizer = optimizers.Adam(learning_rate=3e-3)

    def loss(batch):
        return nn.losses.cross_entropy(model(batch[:, :-1]), batch[:, 1:], reduction="mean")

    def step(batch):
        found, gradients = nn.value_and_grad(model, loss)(batch)
        optimizer.update(model, gradients)
        return found

    state, losses = [model.state, optimizer.state], []
    step = mx.compile(step, inputs=state, outputs=state)
    for _ in range(15):
        losses.append(step(batch).item())
        mx.eval(state)
    assert losses[-1] < 0.6 * losses[0]


def test_compiled_model_equals_eager():
    model, batch = lively_model(num_layers=1), tokens(2, 13)
    assert_close(mx.compile(model)(batch), model(batch), terms=TERMS)


def test_a_model_of_low_precision_computes_in_it_but_for_its_slopes():
    model, batch = lively_model(), tokens(2, 13)
    expected = MLX.numpy(model(batch))
    model.set_dtype(mx.bfloat16)
    actual = model(batch)
    assert actual.dtype == mx.bfloat16
    assert all(block.attention.slopes.dtype == mx.float32 for block in model.transformer.blocks)
    # Rounding errors of weights and activations, through some twenty matrix products.
    assert np.abs(MLX.numpy(actual) - expected).max() < 20 * 2.0**-8 * np.abs(expected).max()
    assert model.generate(batch, 3).shape == (2, 16)


@pytest.mark.parametrize("changes", [{}, {"clip_qkv": 0.3, "scale": 0.9, "qk_norm": True}], ids=str)
def test_a_quantized_model_computes_with_the_quantized_weights(changes):
    config = AlibiConfig(num_layers=2, embed_dim=64, num_heads=4, num_kv_heads=2, dropout=0.0, bias=True, **changes)
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
    assert_close(model(batch), exact(batch), terms=2 * 64)
    steps = [model(batch[:, i : i + 1], caches=caches) for i in range(13)]
    assert_close(mx.concatenate(steps, axis=1), exact(batch), terms=2 * 64)


def test_gradient_checkpointing_refuses_a_block_that_would_draw_other_random_numbers() -> None:
    class Noise(nn.Module):
        def __call__(self, x: Any, **rules: Any) -> Any:
            return x * mx.random.uniform(shape=x.shape)

    config = dataclasses.replace(SMALL, num_layers=1, gradient_checkpointing=True)
    model = AlibiLanguageModel(config, VOCAB_SIZE, attention=lambda config: Noise())
    assert model(tokens(1, 5)).shape == (1, 5, VOCAB_SIZE)
    with pytest.raises(NotImplementedError, match="^gradient_checkpointing must be False where a block draws random"):
        nn.value_and_grad(model, lambda model: model(tokens(1, 5)).sum())(model)
