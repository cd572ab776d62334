"""PyTorch's caches alone: storage in place, devices, autocast. tests/contracts has the rest."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from torch._dynamo.testing import CompileCounter  # noqa: E402

from alibi_torch import AlibiAttention, AlibiConfig, AlibiEncoder, AlibiLanguageModel, KVCache, attention  # noqa: E402
from tests.support.tiles import planned_from  # noqa: E402

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 4

Tensor = torch.Tensor


# --- The cache that keeps everything -------------------------------------------------------------------------------


def test_a_step_kept_for_the_next_serves_other_strides_training_and_transforms_and_checks_arguments() -> None:
    torch.manual_seed(0)
    cache, slopes = KVCache(2, KV_HEADS, 700, HEAD_DIM), torch.tensor([1.0, 0.5, 0.0, 0.1])
    held = torch.randn(2, 2, KV_HEADS, 400, HEAD_DIM)

    def step(inference: bool = False) -> None:
        nonlocal held
        query, new = torch.randn(2, HEADS, 1, HEAD_DIM), torch.randn(2, 2, KV_HEADS, 1, HEAD_DIM)
        held = torch.cat([held, new], dim=3)
        cache.append(*new)
        right = attention(query, *held, slopes, implementation="dense")
        # The kernel needs rows whose numbers lie side by side; the second query's do not.
        for given in (query, query.repeat_interleave(2, dim=-1)[..., ::2]):
            with torch.inference_mode(inference):
                found = cache.attend(given, slopes)
            assert (found - right).abs().max() < 64 * 2.0**-24 * held[1].abs().max()

    with planned_from(1):
        cache.append(*held)
        for inference in (True, False, True):
            step(inference)
        query = torch.randn(2, HEADS, 1, HEAD_DIM, requires_grad=True)  # training, after inference
        found, right = cache.attend(query, slopes), attention(query, *held, slopes, implementation="dense")
        gradients = [torch.autograd.grad(x.square().sum(), query)[0] for x in (found, right)]
        assert (gradients[0] - gradients[1]).abs().max() < 1e-5
        step()  # kept for the next one, but not for these
        many = torch.randn(3, 2, HEADS, 1, HEAD_DIM)
        for transform in (torch.vmap, lambda f: torch.func.vmap(torch.func.grad(lambda x: f(x).square().sum()))):
            found = transform(lambda query: cache.attend(query, slopes))(many)
            right = transform(lambda query: attention(query, *held, slopes, implementation="dense"))(many)
            assert (found - right).abs().max() < 1e-4
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(many[0], many[1])
            assert torch.autograd.forward_ad.unpack_dual(cache.attend(dual, slopes)).tangent is not None
        for window_size, message in ((True, "must be an integer, got True"), (1.0, "must be an integer, got 1.0")):
            cache.attend(many[0], slopes, window_size=1)
            with pytest.raises(TypeError, match=f"^window_size {message}"):
                cache.attend(many[0], slopes, window_size=window_size)
        cache.attend(many[0], torch.ones(HEADS))
        with pytest.raises(TypeError, match="^slopes must have a real floating dtype"):
            cache.attend(many[0], torch.ones(HEADS, dtype=torch.int64))


@pytest.mark.parametrize("short", [1, 2048])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_rounds_no_bias_of_a_step(dtype: torch.dtype, short: int) -> None:
    cache = KVCache(2, KV_HEADS, 400, HEAD_DIM, dtype=dtype)
    cache.append(*torch.randn(2, 2, KV_HEADS, 400, HEAD_DIM, dtype=dtype).unbind())
    query, slopes = torch.randn(2, HEADS, 1, HEAD_DIM, dtype=dtype), torch.full((HEADS,), 0.003)
    with planned_from(short):
        expected = cache.attend(query, slopes)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(cache.attend(query, slopes), expected)


def test_steps_under_autocast_and_of_learnt_slopes() -> None:
    torch.manual_seed(0)
    layer, x = AlibiAttention(32, 4, num_kv_heads=2, learnable_slopes=True), torch.randn(2, 300, 32)
    with torch.no_grad(), planned_from(1):
        for _ in range(2):
            for dtype in (None, torch.bfloat16):
                with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
                    cache = layer.make_cache(2, 300)
                    steps = [layer(part, cache=cache) for part in x.split([290, *[1] * 10], dim=1)]
                    torch.testing.assert_close(
                        torch.cat(steps, dim=1), layer(x), rtol=0, atol=2**-18 if dtype is None else 2**-5
                    )
            layer.log_slopes.sub_(1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_key_that_overflowed_spoils_its_own_row_alone(dtype: torch.dtype) -> None:
    slopes = torch.tensor([1.0, 0.5, 0.0, 0.0])
    query, key = torch.ones(2, HEADS, 1, HEAD_DIM, dtype=dtype), torch.randn(2, KV_HEADS, 600, HEAD_DIM).to(dtype)
    cache = KVCache(2, KV_HEADS, 600, HEAD_DIM, dtype=dtype)
    with planned_from(1):
        cache.append(key[:, :, :-1], key[:, :, :-1])
        cache.attend(query, slopes)
        key[0, 1, -1] = torch.inf
        cache.append(key[:, :, -1:], key[:, :, -1:])
        found = cache.attend(query, slopes)
    right = attention(query, key, key, slopes, implementation="dense")
    torch.testing.assert_close(found, right, equal_nan=True)
    assert found[1].isfinite().all()


def test_a_step_is_where_its_tensors_are_and_may_be_of_no_text() -> None:
    cache = KVCache(2, KV_HEADS, 600, HEAD_DIM)
    slopes = torch.tensor([1.0, 0.5, 0.001, 0.0])  # whose heads need keys of very different numbers
    with planned_from(1), torch.device("meta"):
        cache.append(*torch.randn(2, 2, KV_HEADS, 600, HEAD_DIM, device="cpu").unbind())
        assert cache.attend(torch.randn(2, HEADS, 1, HEAD_DIM, device="cpu"), slopes.cpu()).device.type == "cpu"
    cache.select_batch(torch.tensor([], dtype=torch.long))
    assert cache.attend(torch.randn(0, HEADS, 1, HEAD_DIM)).shape == (0, HEADS, 1, HEAD_DIM)


def test_appends_happen_in_place_and_touch_nothing_else() -> None:
    key, value = torch.randn(2, 2, KV_HEADS, 390, HEAD_DIM).unbind()
    cache = KVCache(2, KV_HEADS, 393, HEAD_DIM)
    pointers = [x.data_ptr() for x in (cache.keys, cache.values, cache.key_norms)]
    for part in (slice(0, 129), slice(129, 130), slice(130, 390)):
        keys, values = cache.append(key[:, :, part], value[:, :, part])
        assert keys.shape == values.shape == (2, KV_HEADS, part.stop, HEAD_DIM)
        assert torch.equal(keys, key[:, :, : part.stop])
        assert torch.equal(values, value[:, :, : part.stop])
        assert not cache.keys[:, :, part.stop :].any()
    assert [x.data_ptr() for x in (cache.keys, cache.values, cache.key_norms)] == pointers
    assert [keys.data_ptr(), values.data_ptr()] == pointers[:2]


def test_tensors_of_another_device_or_dtype_are_refused() -> None:
    with pytest.raises(TypeError, match="^dtype must be a real floating dtype"):
        KVCache(1, 1, 50, HEAD_DIM, dtype=torch.int32)
    cache, far = KVCache(1, 1, 50, HEAD_DIM), torch.zeros(1, 1, 2, HEAD_DIM, device="meta")
    with pytest.raises(ValueError, match="^key must be on cpu as the cache is, got meta"):
        cache.append(far, far)
    cache.append(*torch.zeros(2, 1, 1, 3, HEAD_DIM).unbind())
    with pytest.raises(ValueError, match="^key must be on the device of query"):
        cache.attend(far)
    assert cache.length == 3


class Quantized(torch.nn.Module):
    """A library's replacement of a projection; its weight is integers, or what is no tensor."""

    def __init__(self, linear: torch.nn.Linear, weight: object) -> None:
        super().__init__()
        self.linear, self.weight = [linear], weight

    def forward(self, x: Tensor) -> Tensor:
        return self.linear[0](x)


@pytest.mark.parametrize("weight", [torch.ones(24, 24, dtype=torch.int8), torch.ones], ids=["integers", "packed"])
def test_a_quantized_layer_makes_a_cache_of_what_its_projections_give(weight: object) -> None:
    layer, x = AlibiAttention(24, 6).eval(), torch.randn(1, 5, 24)
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
        setattr(layer, name, Quantized(getattr(layer, name), weight))
    with torch.no_grad():
        cache = layer.make_cache(1, 8)
        decoded = torch.cat([layer(x[:, :3], cache=cache), layer(x[:, 3:], cache=cache)], dim=1)
        torch.testing.assert_close(decoded, layer(x), rtol=0, atol=1e-6)


# --- What it says of gradients and autocast -------------------------------------------------------------------------


def test_a_backward_pass_through_a_cache_says_when_it_comes_too_late() -> None:
    layer, x = AlibiAttention(16, 4), torch.randn(1, 6, 16)
    cache = layer.make_cache(1, 8)
    with torch.no_grad():
        layer(x[:, :3], cache=cache)
    layer(x[:, 3:4], cache=cache).sum().backward()  # in time
    cache = layer.make_cache(1, 8)
    outputs = [layer(part, cache=cache) for part in x.split(3, dim=1)]
    with pytest.raises(RuntimeError, match=r"must come before further tokens are appended .* under torch.no_grad\(\)"):
        sum(output.sum() for output in outputs).backward()
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="made under the autocast .*, got"):
        layer(x[:, :1], cache=cache)


def test_a_cache_may_be_pickled_and_copied() -> None:
    cache, query = KVCache(1, 4, 64, 8), torch.randn(1, 4, 1, 8)
    cache.append(torch.randn(1, 4, 60, 8), torch.randn(1, 4, 60, 8))
    expected = cache.attend(query)
    for other in (pickle.loads(pickle.dumps(cache)), copy.deepcopy(cache)):
        other.append(*torch.randn(2, 1, 4, 1, 8).unbind())
        other.truncate(60)
        assert torch.equal(other.attend(query), expected)
    assert torch.equal(cache.attend(query), expected)


@pytest.mark.slow
def test_attention_to_a_cache_compiles_in_one_graph() -> None:
    query, key, value = torch.randn(3, 1, 4, 6, 8).unbind()
    cache = KVCache(1, 4, 10, 8)
    attend = torch.compile(cache.attend, fullgraph=True, backend="eager")
    for token in range(3):
        cache.append(key[:, :, token, None], value[:, :, token, None])
        step = query[:, :, token, None]
        expected = cache.attend(step)  # before, so that a compiler meets what the cache keeps for its next step
        torch.testing.assert_close(attend(step), expected)


@pytest.mark.slow
def test_a_compiled_prefill_measures_all_its_keys() -> None:
    torch.compiler.reset()

    def prefill(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cache = KVCache(1, 1, 300, 8)
        cache.append(key, value)
        return cache.attend(query), cache.key_norms

    compiled = torch.compile(prefill, fullgraph=True, dynamic=True)
    for length in (200, 290, 5):
        tensors = torch.randn(3, 1, 1, length, 8).unbind()
        torch.testing.assert_close(compiled(*tensors), prefill(*tensors))


@pytest.mark.slow
def test_rows_of_several_lengths_decode_compiled_under_inference_mode() -> None:
    torch.compiler.reset()
    layer, lengths = AlibiAttention(16, 4), torch.tensor([5, 3])
    prompts, x = torch.randn(2, 5, 16), torch.randn(2, 1, 16)

    def decode(layer: Callable[..., torch.Tensor], cache: KVCache) -> list[torch.Tensor]:
        layer(prompts, cache=cache, lengths=lengths)
        steps = [layer(x, cache=cache)]
        cache.truncate(torch.tensor([4, 3]))
        steps.append(layer(x, cache=cache))
        cache.select_batch(torch.tensor([1, 0]))
        cache.truncate(4)
        return [*steps, layer(x, cache=cache)]

    with torch.inference_mode():
        compiled = torch.compile(decode, backend="eager")
        results = [f(layer, layer.make_cache(2, 9)) for f in (compiled, decode)]
    torch.testing.assert_close(*results)


@pytest.mark.slow
@pytest.mark.parametrize("inference", [True, False])
def test_programs_are_as_many_for_many_tokens_and_texts(inference: bool) -> None:
    torch.compiler.reset()
    counter, tokens = CompileCounter(), torch.randint(9, (7, 5))
    config = AlibiConfig(num_layers=1, embed_dim=16, num_heads=4, dropout=0.0)
    model, encoder = AlibiLanguageModel(config, 9), AlibiEncoder(replace(config, is_causal=False), 9)
    generate, encode = (torch.compile(f, backend=counter) for f in (model.generate, encoder.encode))
    with torch.inference_mode(inference):
        for lengths in ([5, 3], [2, 4], [5]):
            given = tokens[: len(lengths)], 3
            assert torch.equal(generate(*given, lengths=lengths), model.generate(*given, lengths=lengths))
        assert counter.frame_count == 0
        programs = []
        for batch in range(3, 7):
            lengths = torch.full((batch,), 4)
            found = encode(tokens[:batch], lengths=lengths)
            torch.testing.assert_close(found, encoder.encode(tokens[:batch], lengths=lengths))
            programs.append(counter.frame_count)
        assert 0 < programs[0] < programs[1] == programs[-1]  # for one number of tokens, then for any


def test_each_function_has_its_own_limit_of_compiled_programs() -> None:
    functions = attention, KVCache.attend, AlibiAttention.forward, AlibiLanguageModel.forward
    assert len({id(f.__code__) for f in functions}) == len(functions)


# --- Forget gates ---------------------------------------------------------------------------------------------------


def test_gates_and_sinks_of_a_layer_are_float32_whatever_it_is_cast_to() -> None:
    layer = AlibiAttention(32, HEADS, forget_gate=True, sinks=True)
    logits: list[Tensor] = []
    with torch.autocast("cpu", torch.bfloat16), layer.forget_proj.register_forward_hook(lambda *x: logits.append(x[2])):
        layer(torch.randn(2, 13, 32))
    layer.bfloat16()
    assert layer.forget_proj.weight.dtype == layer.sinks.dtype == logits[0].dtype == torch.float32


@pytest.mark.parametrize(
    ("options", "words"),
    [({"is_causal": False}, "is_causal=False"), ({"law": "log"}, "law='log'"), ({"learnable_slopes": True}, "learn")],
)
def test_a_forget_gate_excludes(options: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=f"forget_gate must be False with {words}"):
        AlibiAttention(32, HEADS, forget_gate=True, **options)
