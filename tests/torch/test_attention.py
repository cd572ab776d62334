"""The PyTorch backend alone: compilation, autocast, module idioms, and the bias module."""

from __future__ import annotations

import copy
import functools
import importlib.util
import io
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")


from torch.nn.utils import parametrize, prune  # noqa: E402

import alibi_core  # noqa: E402
import alibi_torch  # noqa: E402
from alibi_torch import AlibiAttention, AlibiBias, AlibiConfig, AlibiEncoder, load_weights, save_weights  # noqa: E402
from tests.support.threads import check_threads  # noqa: E402

IMPLEMENTATIONS = ["tiled", "sdpa", "dense"]


def tensors(*lengths: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[torch.Tensor]:
    """Return query, key and value, ``[2, 6 or 3, length, 8]``."""
    generator = torch.Generator().manual_seed(seed)
    q_len, kv_len = lengths if len(lengths) == 2 else lengths * 2
    shapes = [(2, 6, q_len, 8), (2, 3, kv_len, 8), (2, 3, kv_len, 8)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def test_models_compile_whole_with_their_gradients_and_export_for_any_length() -> None:
    torch.compiler.reset()
    torch.manual_seed(0)
    sizes = {"num_layers": 1, "embed_dim": 16, "num_heads": 4, "dropout": 0.0, "learnable_slopes": True}
    model = alibi_torch.AlibiLanguageModel(alibi_torch.AlibiConfig(**sizes, gated=True, qk_norm=True, clip_qkv=1.0), 31)
    config = alibi_torch.AlibiConfig(**sizes, is_causal=False, token_types=2, block="double_post_norm")
    encoder, tokens = alibi_torch.AlibiEncoder(config, 31), torch.randint(0, 31, (2, 9))
    for module in (model, encoder):
        results = [f(tokens) for f in (torch.compile(module, fullgraph=True, backend="aot_eager"), module)]
        torch.testing.assert_close(*results, rtol=0, atol=2e-6)
        grads = (torch.autograd.grad(x.square().sum(), list(module.parameters())) for x in results)
        torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)
    shapes = {"tokens": {1: torch.export.Dim("length")}}
    exported, longer = torch.export.export(encoder, (tokens,), dynamic_shapes=shapes).module(), tokens.repeat(1, 3)
    torch.testing.assert_close(exported(longer), encoder(longer), rtol=0, atol=2e-6)


def test_core_functions_compile_with_dynamic_lengths() -> None:
    torch.compiler.reset()
    if importlib.util.find_spec("jax") is not None:
        importlib.import_module("jax.export")  # where it is loaded, the core asks it which lengths are symbols

    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        bias = alibi_core.bias(12, x.shape[0], x.shape[1], xp=torch)
        return bias, alibi_core.slopes(x.shape[0], xp=torch)

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    for shape in ((3, 7), (5, 11), (5, 13)):
        torch.testing.assert_close(compiled(torch.zeros(shape)), function(torch.zeros(shape)), rtol=0, atol=0)


@pytest.mark.parametrize("strict", [True, False])
def test_layer_exports_for_any_length(strict: bool) -> None:
    torch.compiler.reset()
    layer = AlibiAttention(24, 6)
    length = torch.export.Dim("length")
    shapes = {"x": {1: length}, "mask": {0: length, 1: length}}  # without a promise that length and batch differ
    given = (torch.randn(2, 7, 24),), {"mask": torch.ones(7, 7, dtype=torch.bool)}
    exported = torch.export.export(layer, *given, dynamic_shapes=shapes, strict=strict)
    x = torch.randn(2, 11, 24)
    mask = torch.rand(x.shape[1], x.shape[1]) < 0.7
    torch.testing.assert_close(exported.module()(x, mask=mask), layer(x, mask=mask), rtol=0, atol=2e-6)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:`torch.jit.trace` is deprecated")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_recorded_function_serves_other_lengths(dtype: torch.dtype) -> None:
    inputs = torch.randn(3, 1, 4, 10, 8, dtype=dtype).unbind()
    recorded = torch.jit.trace(lambda *tensors: alibi_torch.attention(*tensors), inputs)
    for length in (5, 40):
        tensors = torch.randn(3, 2, 4, length, 8, dtype=dtype).unbind()
        bound = 100 * torch.finfo(dtype).eps
        torch.testing.assert_close(recorded(*tensors), alibi_torch.attention(*tensors), rtol=0, atol=bound)


def test_attention_and_layer_run_on_meta() -> None:
    query, key, value = torch.ones(3, 1, 2, 3, 4, device="meta").unbind()
    assert alibi_torch.attention(query, key, value).device.type == "meta"
    layer, x = AlibiAttention(24, 6, device="meta"), torch.ones(2, 5, 24, device="meta")
    assert layer(x).shape == layer(x, cache=layer.make_cache(2, 9)).shape == (2, 5, 24)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_autocast_leaves_the_bias_alone(implementation: str) -> None:
    # 3000 tokens away, bfloat16 could not tell neighbouring keys apart at this slope.
    query = torch.zeros(1, 1, 1, 4)
    value = torch.tensor([0.0, 1.0]).repeat(32)[None, None, :, None].expand(1, 1, 64, 4)
    arguments = {"q_offset": 3000, "implementation": implementation}
    slopes = torch.tensor([0.3])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = alibi_torch.attention(query, value * 0, value, slopes, **arguments)
    rounded = (x.bfloat16() for x in (query, value * 0, value))
    torch.testing.assert_close(actual, alibi_torch.attention(*rounded, slopes, **arguments), rtol=0, atol=0)


class Float32Norm(torch.nn.LayerNorm):
    """The norm as CUDA's autocast computes it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.to(self.weight.dtype)).float()


FLOATS = (torch.float32, torch.bfloat16, torch.float64)


@pytest.mark.parametrize("dtypes", [*itertools.product(FLOATS, repeat=3)], ids=str)
def test_autocast_casts_as_for_scaled_dot_product_attention(dtypes: tuple[torch.dtype, ...]) -> None:
    inputs = [x.to(dtype).requires_grad_() for x, dtype in zip(tensors(9), dtypes, strict=True)]
    with torch.autocast("cpu", torch.bfloat16):
        try:
            theirs = torch.nn.functional.scaled_dot_product_attention(*inputs, enable_gqa=True)
        except RuntimeError:
            with pytest.raises(TypeError, match="query, key and value must have one dtype"):
                alibi_torch.attention(*inputs)
            return
        found = alibi_torch.attention(*inputs)
        assert found.dtype == theirs.dtype
        explained = alibi_torch.explain(*inputs)
        grads = torch.autograd.grad(found.sum(), inputs)
        assert [x.dtype for x in grads] == list(dtypes)
    cast = [x.detach().to(found.dtype) for x in inputs]
    assert torch.equal(found, alibi_torch.attention(*cast))
    assert explained.tolerance == alibi_torch.explain(*cast).tolerance


@pytest.mark.parametrize("is_causal", [True, False])
def test_norms_of_queries_and_keys_that_return_float32(is_causal: bool) -> None:
    sizes = {"num_layers": 1, "embed_dim": 16, "num_heads": 4, "dropout": 0.0}
    kind = alibi_torch.AlibiLanguageModel if is_causal else alibi_torch.AlibiEncoder
    model = kind(alibi_torch.AlibiConfig(**sizes, qk_norm=True, is_causal=is_causal), 31).eval()
    tokens = torch.randint(0, 31, (2, 9))
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(tokens)
        layer = model.transformer.blocks[0].attention
        layer.q_norm.__class__ = layer.k_norm.__class__ = Float32Norm
        found = [model(tokens), torch.compile(model, backend="aot_eager", fullgraph=True)(tokens)]
        if is_causal:
            found.append(model(tokens, caches=model.transformer.make_caches(2, 9)))
        # A norm of the user's own, around attention and a cache.
        query, key, value = tensors(9)
        cache = alibi_torch.KVCache(2, 3, 9, 8, dtype=torch.bfloat16)
        cache.append(key, value.bfloat16())
        assert torch.equal(cache.attend(query), alibi_torch.attention(query, key, value.bfloat16()))
    found.append(model.bfloat16()(tokens))  # without autocast
    for result in found:
        torch.testing.assert_close(result.float(), expected.float(), rtol=0, atol=2**-4)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")
@pytest.mark.parametrize("implementation", ["sdpa", "dense"])  # FlexAttention has tests of its own
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_a_gpu_agrees_with_the_cpu(implementation: str, dtype: torch.dtype) -> None:
    inputs = tensors(5, 7, dtype=dtype)
    # Far from all keys, as in decoding past a mask: a bias rounded to low precision would forget their order.
    arguments = {"q_offset": 3000, "implementation": implementation}
    expected = alibi_torch.attention(*inputs, **arguments)
    actual = alibi_torch.attention(*(x.cuda() for x in inputs), **arguments)
    assert actual.device.type == "cuda"
    torch.testing.assert_close(actual.cpu(), expected, rtol=0, atol=8 * torch.finfo(dtype).eps)


# --- The layer as a module -----------------------------------------------------------------------------------------


def test_layer_survives_copying_pickling_and_other_devices() -> None:
    layer, x, file = AlibiAttention(24, 6, slopes=torch.rand(6)), torch.randn(2, 5, 24), io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    for other in (copy.deepcopy(layer), torch.load(file, weights_only=False)):
        assert torch.equal(other(x), layer(x))
    assert layer.to("meta").slopes.device.type == "meta"


def test_a_layer_made_on_meta_comes_to_life_with_its_slopes() -> None:
    source, x = AlibiAttention(24, 12), torch.randn(2, 5, 24)
    with torch.device("meta"):
        layer = AlibiAttention(24, 12)
    layer = layer.to_empty(device="cpu")
    layer.load_state_dict(source.state_dict())
    assert torch.equal(layer(x), source(x))
    source = AlibiAttention(24, 12, slopes=torch.rand(12))
    layer = torch.nn.Sequential(AlibiAttention(24, 12, slopes=source.slopes, device="meta"))
    layer.load_state_dict(torch.nn.Sequential(source).state_dict(), assign=True)
    assert torch.equal(layer(x), source(x))


@pytest.mark.parametrize(
    "way", ["dispatched", "dispatched, buffers on meta", "to two devices", "one by one", "emptied"]
)
def test_accelerate_loads_a_saved_model(way: str, tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    config = AlibiConfig(num_layers=2, embed_dim=8, num_heads=2, is_causal=False, future_slopes=(0.3, 0.2), dropout=0.0)
    source, tokens, file = AlibiEncoder(config, 11).eval(), torch.arange(10)[None], f"{tmp_path}/model.safetensors"
    save_weights(source, file)
    meta = torch.device("meta") if way == "one by one" else accelerate.init_empty_weights("buffers" in way)
    with meta:
        model = AlibiEncoder(config, 11).eval()
    if way == "one by one":
        for name, value in source.state_dict().items():
            accelerate.utils.set_module_tensor_to_device(model, name, "cpu", value=value)
    elif way == "emptied":
        load_weights(model.to_empty(device="cpu"), file)
    else:
        places = {"embedding": "disk", "transformer": "cpu"} if "two" in way else {"": "cpu"}
        rules = {"device_map": places, "offload_folder": tmp_path}
        model = accelerate.load_checkpoint_and_dispatch(model, file, **rules)
    with torch.no_grad():
        assert torch.equal(model(tokens), source(tokens))


@pytest.mark.parametrize("make", [torch.ones, lambda n: np.ones(n, np.float32)])
def test_a_layer_shares_no_memory_with_the_slopes_it_was_given(make: object) -> None:
    slopes = make(6)
    layer, bias = AlibiAttention(24, 6, slopes=slopes), AlibiBias(6, slopes=slopes)
    slopes *= 9
    assert layer.slopes.tolist() == bias.slopes.tolist() == [1.0] * 6


def test_training_goes_on_after_a_cast() -> None:
    torch.manual_seed(0)
    layer = AlibiAttention(24, 6, learnable_slopes=True)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.randn(2, 5, 24)).square().sum().backward()
    layer.to(torch.bfloat16)
    assert layer.log_slopes.grad.dtype == torch.float32
    layer(torch.randn(2, 5, 24, dtype=torch.bfloat16)).square().sum().backward()
    optimizer.step()


RENAMED: dict[str, Callable[[AlibiAttention], object]] = {
    "parametrized": lambda layer: parametrize.register_parametrization(layer, "log_slopes", torch.nn.Hardtanh(-9, 9)),
    "pruned": lambda layer: prune.identity(layer, "log_slopes"),
}


@pytest.mark.parametrize("store", RENAMED.values(), ids=RENAMED)
def test_slopes_that_are_stored_under_another_name_keep_their_precision(store: Callable[..., object]) -> None:
    layer = AlibiAttention(24, 6, learnable_slopes=True)
    exact = layer.log_slopes.detach().clone()
    store(layer)
    layer(torch.randn(2, 5, 24)).sum().backward()
    layer.to(torch.bfloat16)
    result = layer(torch.randn(2, 5, 24, dtype=torch.bfloat16))
    torch.testing.assert_close(layer.log_slopes.detach(), exact, rtol=0, atol=0)
    result.sum().backward()


def test_layer_takes_numpy_slopes_of_any_strides_and_rights_and_other_dtypes() -> None:
    slopes = alibi_core.slopes(12)[:7:-1]
    slopes.flags.writeable = False
    layer = AlibiAttention(24, 4, slopes=slopes, dtype=torch.bfloat16)
    np.testing.assert_array_equal(layer.slopes.numpy(), slopes)
    assert layer(torch.randn(2, 5, 24, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_a_layer_refuses_other_kinds_of_cache_and_input() -> None:
    with pytest.raises(TypeError, match="cache must be an alibi_torch.KVCache, got tuple"):
        AlibiAttention(24, 6)(torch.randn(2, 3, 24), cache=(1, 2))
    with pytest.raises(TypeError, match="arrays must belong to one array namespace, got numpy and torch"):
        AlibiAttention(24, 6)(np.zeros((2, 3, 24), np.float32))
    with pytest.raises(TypeError, match="x must have a real floating dtype"):
        AlibiAttention(24, 6)(torch.zeros(2, 3, 24, dtype=torch.int32))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_a_nested_tensor_is_refused_by_name(layout: torch.layout) -> None:
    nested = torch.nested.nested_tensor([torch.randn(3, 2, 8), torch.randn(5, 2, 8)], layout=layout)
    with pytest.raises(TypeError, match=r"^query must be dense, got a nested tensor; give to_padded_tensor"):
        alibi_torch.attention(nested, nested, nested)


# --- The bias module -----------------------------------------------------------------------------------------------


def test_bias_module_keeps_the_bias() -> None:
    module = AlibiBias(6, is_causal=False)
    assert module(5, 7) is module(5, 7)
    assert module(7, 7).shape == (6, 7, 7)


def test_bias_module_notices_every_change() -> None:
    module = AlibiBias(6)
    assert module(5, dtype=torch.bfloat16).dtype == torch.bfloat16
    assert module(5, dtype=torch.float64).dtype == torch.float64
    with torch.inference_mode():
        assert module(5).is_inference()
    assert not module(5).is_inference()
    assert module.half()(5).dtype == torch.float32  # the slopes stay float32
    assert module.to("meta")(5).device.type == "meta"
    module = AlibiBias(2)
    module(3)
    module.slopes = torch.ones(2)
    assert module(3)[0, 2, 0] == -2


def test_threads_get_what_each_gets_alone() -> None:
    sizes = {"num_layers": 1, "embed_dim": 16, "num_heads": 4, "dropout": 0.0}
    module, model = AlibiBias(4), alibi_torch.AlibiLanguageModel(alibi_torch.AlibiConfig(**sizes), 31).eval()
    encoder = alibi_torch.AlibiEncoder(alibi_torch.AlibiConfig(**sizes, is_causal=False), 31)
    x, tokens = torch.randn(2, 4, 9, 8), torch.randint(0, 31, (2, 9))
    calls: list[Any] = [functools.partial(module, 5), functools.partial(module, 7)]
    calls += [functools.partial(alibi_torch.attention, x, x, x, torch.rand(4)) for _ in range(2)]
    calls += [lambda: model.generate(tokens, 1, lengths=[9, 5]), lambda: encoder.encode(tokens, lengths=[4, 9])]
    check_threads(calls)


def test_bias_module_compiles() -> None:
    torch.compiler.reset()
    module = AlibiBias(4)
    assert torch.equal(torch.compile(module, fullgraph=True, backend="aot_eager")(5), module(5))


@pytest.mark.parametrize("length", [True, 3.0])
def test_bias_module_takes_no_lengths_that_equal_integers(length: object) -> None:
    module = AlibiBias(2)
    module(1), module(3)
    with pytest.raises(TypeError, match="q_len must be an integer"):
        module(length)


# --- Checks, which are cached --------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [{"window_size": 1.0}, {"window_size": True}, {"is_causal": 1}], ids=str)
def test_equal_numbers_of_another_kind_are_refused_after_a_call_that_was_checked(arguments: dict[str, object]) -> None:
    inputs = tensors(5)
    alibi_torch.attention(*inputs, window_size=1, is_causal=True)
    with pytest.raises(TypeError, match=f"{next(iter(arguments))} must be"):
        alibi_torch.attention(*inputs, **({"window_size": 1} | arguments))


@pytest.mark.parametrize("place", range(3))
def test_a_call_that_was_checked_lets_no_wrong_tensor_pass(place: int) -> None:
    inputs = tensors(5)
    alibi_torch.attention(*inputs)
    for change in (torch.Tensor.double, torch.Tensor.to_sparse, lambda x: x.to("meta")):
        with pytest.raises((TypeError, ValueError)):
            alibi_torch.attention(*(change(x) if i == place else x for i, x in enumerate(inputs)))


class Adapted(torch.nn.Module):
    """An adapter, as PEFT's for embeddings: it adds to the rows of the table, and has no weight."""

    def __init__(self, table: torch.nn.Embedding, delta: torch.Tensor) -> None:
        super().__init__()
        self.base_layer, self.delta = table, delta
        self.num_embeddings = table.num_embeddings

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.base_layer(tokens) + self.delta[tokens]


def test_the_tied_head_follows_its_embedding() -> None:
    config = alibi_torch.AlibiConfig(num_layers=1, embed_dim=8, num_heads=2, dropout=0.0)
    model, tokens = alibi_torch.AlibiLanguageModel(config, vocab_size=5), torch.tensor([[4, 2]])
    with pytest.raises(ValueError, match="tokens must be from 0 to 4, for which there are embeddings, got 6"):
        model.generate(torch.tensor([[6]]), 1)
    assert [name for name in model.state_dict() if "head" in name or "embedding" in name] == ["embedding.weight"]
    adapted, delta = copy.deepcopy(model), torch.randn(5, 8)
    adapted.embedding = Adapted(adapted.embedding, delta)
    merged = copy.deepcopy(model)
    merged.embedding.weight.data += delta
    torch.testing.assert_close(adapted(tokens), merged(tokens))
    enlarged = copy.deepcopy(model)
    enlarged.embedding = torch.nn.Embedding(7, 8)
    enlarged.embedding.weight.data[:5] = model.embedding.weight.data
    torch.testing.assert_close(enlarged(tokens)[..., :5], model(tokens))
    assert enlarged.generate(torch.tensor([[6]]), 1).shape == (1, 2)


@pytest.mark.parametrize("autocast", [False, True])
def test_trainers_switch_gradient_checkpointing(autocast: bool) -> None:
    sizes = {"num_layers": 3, "embed_dim": 16, "num_heads": 4, "dropout": 0.3, "is_causal": False}
    model = alibi_torch.AlibiEncoder(alibi_torch.AlibiConfig(**sizes, gradient_checkpointing=True), 31)
    tokens = torch.randint(0, 31, (2, 40))

    def step() -> tuple[list[torch.Tensor | None], int]:
        torch.manual_seed(0)
        kept: list[int] = []
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.nbytes) or x, lambda x: x)
        with hooks, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model.encode(tokens, lengths=[40, 7]).float().square().mean()
        return list(torch.autograd.grad(loss, list(model.parameters()))), sum(kept)

    least = step()[1]
    model.gradient_checkpointing_disable()
    expected, everything = step()
    for every, share in ((2, 0.7), (1, 0.3)):
        model.activation_checkpointing_enable(None, every_n_layers=every, offload=False)
        found, kept = step()
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
        assert kept < everything * share
    assert kept == least
    with pytest.raises(NotImplementedError, match="offload must be False in gradient checkpointing, got True"):
        model.gradient_checkpointing_enable(offload=True)


@pytest.mark.parametrize("way", ["cpu_offload", "disk_offload"])
@pytest.mark.parametrize("is_causal", [True, False])
def test_models_whose_weights_lie_elsewhere_between_calls(is_causal: bool, way: str, tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    sizes = {"num_layers": 2, "embed_dim": 16, "num_heads": 4, "dropout": 0.0, "qk_norm": True}
    config = alibi_torch.AlibiConfig(**sizes, is_causal=is_causal, learnable_slopes=True, token_types=2)
    model = (alibi_torch.AlibiLanguageModel if is_causal else alibi_torch.AlibiEncoder)(config, 31).eval()
    tokens, elsewhere = torch.randint(0, 31, (2, 9)), copy.deepcopy(model)
    folder = [tmp_path] if way == "disk_offload" else []
    getattr(accelerate, way)(elsewhere, *folder, execution_device="cpu", offload_buffers=True)
    assert all(x.is_meta for x in elsewhere.parameters())
    with torch.no_grad():
        assert torch.equal(elsewhere(tokens), model(tokens))
        results = [x.generate(tokens, 3) if is_causal else x.encode(tokens, lengths=[9, 4]) for x in (elsewhere, model)]
    assert torch.equal(*results)
