"""MLX's caches alone: the protocol of mlx-lm, growth, reading late. tests/contracts has the rest."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core", reason="mlx is not installed")

from alibi_mlx import AlibiAttention, KVCache  # noqa: E402
from tests.support.frameworks import MLX  # noqa: E402
from tests.support.mlx import assert_close, normal  # noqa: E402

BATCH, HEADS, KV_HEADS, HEAD_DIM = 2, 4, 2, 5


def zeros(new: int, batch: int = BATCH, heads: int = KV_HEADS) -> tuple[Any, Any]:
    return mx.zeros((batch, heads, new, HEAD_DIM)), mx.zeros((batch, heads, new, HEAD_DIM))


# --- Storage --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
def test_caches_can_be_copied(copied: Any) -> None:
    key = mx.random.normal((1, 2, 5, 8))
    cache = KVCache()
    cache.append(key, key)
    assert mx.array_equal(copied(cache).attend(key), cache.attend(key))


@pytest.mark.parametrize("lengths", [None, [2, 3]])
def test_gates_belong_to_the_state_and_are_never_dropped(lengths: Any) -> None:
    key, gates, query = normal(BATCH, KV_HEADS, 3, HEAD_DIM), -mx.ones((BATCH, HEADS, 3)), mx.ones((2, 4, 1, HEAD_DIM))
    cache, restored, counts = KVCache(), KVCache(), None if lengths is None else mx.array(lengths)
    cache.append(key, key, log_gates=gates, lengths=counts)
    restored.state = cache.state
    assert mx.array_equal(restored.attend(query), cache.attend(query))
    assert not mx.allclose(cache.attend(query), cache.attend(query, mx.ones(HEADS)))
    with pytest.raises(ValueError, match="^caches must have no log_gates"):
        KVCache.merge([cache])


def test_nothing_is_read_while_tokens_are_stored() -> None:
    @mx.compile  # tracing forbids reading
    def tokens_held(keys: Any) -> Any:
        cache = KVCache()
        cache.update_and_fetch(keys, keys)
        return cache.update_and_fetch(keys, keys)[0], cache.key_norms

    keys = normal(1, 2, 3, HEAD_DIM)
    held, norms = tokens_held(keys)
    assert held.shape == (1, 2, 6, HEAD_DIM)
    assert (MLX.numpy(norms)[..., 0] >= np.linalg.norm(MLX.numpy(keys), axis=-1).max(axis=-1)).all()


@pytest.mark.parametrize("tolerance", [None, 0.0])
def test_keys_and_values_are_written_in_place(tolerance: float | None) -> None:
    """A token costs no copy of those before it, whether or not attention makes use of norms."""
    cache, length = KVCache(), 40_000
    cache.update_and_fetch(mx.zeros((1, 1, length, 64)), mx.zeros((1, 1, length, 64)))
    one = mx.ones((1, 1, 1, 64))
    for _ in range(3):
        cache.update_and_fetch(one, one)
        mx.eval(cache.attend(one, mx.ones(1), tolerance=tolerance))
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    cache.update_and_fetch(one, one)
    mx.eval(cache.keys, cache.values)
    assert mx.get_peak_memory() - before < length * 64 * 4 / 10


# --- What mlx-lm asks of a cache


class ForeignCache:
    """The least that has the protocol; ``size`` makes it drop old tokens, as a rotating cache does."""

    def __init__(self, size: int | None = None) -> None:
        self.keys: Any = None
        self.values: Any = None
        self.offset, self.size = 0, size

    def update_and_fetch(self, keys: Any, values: Any) -> tuple[Any, Any]:
        if self.keys is not None:
            keys, values = mx.concatenate([self.keys, keys], axis=2), mx.concatenate([self.values, values], axis=2)
        self.offset = keys.shape[2]
        if self.size is not None:
            keys, values = keys[:, :, -self.size :], values[:, :, -self.size :]
        self.keys, self.values = keys, values
        return keys, values


def test_a_cache_is_trimmed_measured_and_emptied() -> None:
    cache = KVCache()
    assert (cache.nbytes, cache.size(), cache.empty(), cache.is_trimmable()) == (0, 0, True, True)
    cache.update_and_fetch(*zeros(7))
    assert (cache.size(), cache.empty()) == (7, False)
    assert cache.nbytes == cache.keys.nbytes + cache.values.nbytes
    assert [cache.trim(3), cache.offset, cache.trim(9), cache.offset] == [3, 4, 4, 0]
    assert cache.empty()
    with pytest.raises(ValueError, match="n must not be negative, got -1"):
        cache.trim(-1)
    keys = normal(3, 1, 2, 7)  # an empty cache takes anything
    assert np.array_equal(MLX.numpy(cache.update_and_fetch(keys, keys)[0]), MLX.numpy(keys))


@pytest.mark.parametrize("window_size", [None, 3])
@pytest.mark.parametrize("length", [1, 4])
def test_masks_are_those_of_the_caches_of_mlx_lm(length: int, window_size: int | None) -> None:
    theirs, ours = pytest.importorskip("mlx_lm.models.cache").KVCache(), KVCache()
    for cache in (theirs, ours):
        cache.update_and_fetch(*zeros(5))
    for return_array in (False, True):
        masks = (x.make_mask(length, return_array=return_array, window_size=window_size) for x in (ours, theirs))
        np.testing.assert_array_equal(*map(np.asarray, masks))


def test_a_cache_travels_through_a_file_and_goes_on(tmp_path: Any) -> None:
    query, key, value = (normal(BATCH, heads, 390, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    cache, path = KVCache(), str(tmp_path / "cache.safetensors")
    assert cache.state == (None, None, 0)
    cache.update_and_fetch(key, value)
    keys, values, offset = cache.state
    assert (keys.shape, offset) == (key.shape, 390)
    mx.save_safetensors(path, {"keys": keys, "values": values})
    arrays = mx.load(path)
    # The last is as mlx-lm has it, with room behind the tokens.
    for state in ((*arrays.values(), offset), tuple(arrays.values()), (cache.keys, cache.values, offset)):
        other = KVCache()
        other.state = state
        assert other.offset == 390
        assert np.array_equal(MLX.numpy(other.key_norms), MLX.numpy(cache.key_norms))
        assert np.array_equal(MLX.numpy(other.attend(query)), MLX.numpy(cache.attend(query)))
        assert np.array_equal(MLX.numpy(other.append(key, value)[0]), MLX.numpy(mx.concatenate([key, key], axis=2)))
    cache.state = ()
    assert cache.empty()


def test_a_batch_may_be_empty_and_become_so() -> None:
    none, cache = mx.zeros((0,), mx.int32), KVCache()
    for options in ({}, {"lengths": none}):
        assert cache.append(*zeros(3, batch=0), **options)[0].shape[:2] == (0, KV_HEADS)
        assert cache.attend(mx.zeros((0, HEADS, 3, HEAD_DIM)), **options).shape == (0, HEADS, 3, HEAD_DIM)
    cache = KVCache()
    cache.append(*zeros(3), lengths=mx.array([1, 3]))
    with pytest.raises(IndexError):
        cache.select_batch(mx.array([5]))
    assert cache.keys.shape[0] == 2  # as it was
    cache.select_batch(none)
    assert (cache.keys.shape[0], cache.length) == (0, 0)


def test_values_may_have_features_of_their_own() -> None:
    cache, keys, values = KVCache(), normal(1, 1, 3, 4), normal(1, 1, 3, 6)
    cache.update_and_fetch(keys, values)
    assert [x.shape for x in cache.update_and_fetch(keys, values)] == [(1, 1, 6, 4), (1, 1, 6, 6)]


def test_cache_grows_in_steps_up_to_its_maximum() -> None:
    cache, capacities, tokens = KVCache(max_length=600), [], normal(BATCH, KV_HEADS, 600, HEAD_DIM)
    for new in (3, 252, 1, 1, 342, 1):
        keys, values = cache.update_and_fetch(*[tokens[:, :, cache.offset : cache.offset + new]] * 2)
        capacities.append(cache.keys.shape[2])
    assert capacities == [256, 256, 256, 512, 600, 600]
    assert mx.array_equal(keys, tokens)
    assert mx.array_equal(values, tokens)


def test_an_offset_that_passes_the_capacity_is_refused() -> None:
    cache = KVCache()
    cache.update_and_fetch(*zeros(4))
    query = mx.zeros((BATCH, HEADS, 1, HEAD_DIM))
    for offset in (257, -1):
        cache.offset = offset
        for call in (lambda: cache.update_and_fetch(*zeros(1)), lambda: cache.attend(query)):
            with pytest.raises(ValueError, match=f"offset must be at most .* capacity, 256 tokens, got {offset}"):
                call()


TAKEN_BACK = {
    "trim": lambda cache, number: cache.trim(number),
    "state": lambda cache, number: setattr(cache, "state", (*cache.state[:2], cache.offset - number)),
    "offset": lambda cache, number: setattr(cache, "offset", cache.offset - number),
}


@pytest.mark.parametrize("way", TAKEN_BACK)
def test_key_norms_bound_the_keys_held_whatever_way_tokens_were_taken_back(way: str) -> None:
    cache = KVCache()
    for step, factor in ((129, 1000.0), (60, 1.0), (130, 3.0)):
        keys = factor * normal(1, 2, step, HEAD_DIM)
        cache.update_and_fetch(1000 * keys, keys)  # tokens that are removed below
        mx.eval(cache.key_norms)
        TAKEN_BACK[way](cache, step)
        cache.update_and_fetch(keys, keys)
    norms = np.linalg.norm(MLX.numpy(cache.state[0]), axis=-1)  # of 319 keys
    largest, bounds = np.pad(norms, [(0, 0), (0, 0), (0, 65)]).reshape(1, 2, 3, 128).max(-1), MLX.numpy(cache.key_norms)
    assert (largest <= bounds).all()
    assert (bounds <= 1.001 * largest).all()


# --- The layer


EMBED_DIM = 13


def layer_of(**arguments: Any) -> AlibiAttention:
    mx.random.seed(0)
    return AlibiAttention(EMBED_DIM, HEADS, **{"num_kv_heads": KV_HEADS, "head_dim": HEAD_DIM, **arguments})


def test_decoding_in_steps_with_a_foreign_cache_equals_one_call() -> None:
    layer, x, cache = layer_of(window_size=7, bias=True), normal(BATCH, 11, EMBED_DIM), ForeignCache()
    outputs = [layer(x[:, start:stop], cache=cache) for start, stop in ((0, 5), (5, 6), (6, 7), (7, 11))]
    assert_close(mx.concatenate(outputs, axis=1), layer(x), terms=HEADS * HEAD_DIM)


def test_masks_and_segments_cover_the_cached_tokens() -> None:
    layer, x = layer_of(), normal(BATCH, 7, EMBED_DIM)
    ids = mx.array([[0, 0, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1, 1]])
    mask = mx.array([[False, False, True, True, True, True, True], [True] * 7])[:, None, None, :]
    for arguments, later in (({"segment_ids": ids}, {"segment_ids": (ids[:, 5:], ids)}), ({"mask": mask},) * 2):
        for cache in (layer.make_cache(), ForeignCache()):
            layer(x[:, :5], cache=cache)
            decoded = layer(x[:, 5:], cache=cache, **later)
            # Keys and values do not depend on the mask of earlier queries.
            assert_close(decoded, layer(x, **arguments)[:, 5:], terms=HEADS * HEAD_DIM)


def test_a_refused_call_sets_a_foreign_cache_back() -> None:
    layer, x, cache = layer_of(), normal(BATCH, 7, EMBED_DIM), ForeignCache()
    layer(x[:, :5], cache=cache)
    with pytest.raises(ValueError, match="mask must broadcast"):
        layer(x[:, 5:], cache=cache, mask=mx.ones((3, 3), mx.bool_))
    assert cache.offset == 5
    # This cache has the refused tokens all the same. They must not be attended to.
    with pytest.raises(ValueError, match="cache must return every key in order, and no trimmed ones"):
        layer(x[:, 5:], cache=cache)


def test_layer_refuses_caches_it_cannot_use() -> None:
    x = normal(BATCH, 5, EMBED_DIM)
    with pytest.raises(ValueError, match="cache must return every key in order"):
        layer_of()(x, cache=ForeignCache(size=3))
    with pytest.raises(TypeError, match="cache must have offset and update_and_fetch, as KVCache has, got list"):
        layer_of()(x, cache=[KVCache()])


# --- Forget gates in layers and models --------------------------------------------------------------------------------


def test_gates_stay_precise_and_are_not_dropped_by_other_caches() -> None:
    layer, x = AlibiAttention(16, HEADS, forget_gate=True), normal(2, 5, 16)
    without, weight = AlibiAttention(16, HEADS, slopes=mx.zeros(HEADS)), layer.forget_proj.weight
    without.update({name: x for name, x in layer.parameters().items() if name != "forget_proj"})
    assert not mx.allclose(layer(x), without(x), atol=1e-3)
    layer.sinks = mx.zeros(HEADS)
    layer.set_dtype(mx.bfloat16)
    assert layer.forget_proj.weight.dtype == layer.sinks.dtype == mx.float32
    assert mx.array_equal(layer.forget_proj.weight, weight)
    with pytest.raises(ValueError, match="^cache must be one of make_cache, to hold forget gates, got a KVCache"):
        layer(x, cache=pytest.importorskip("mlx_lm.models.cache").KVCache())
