"""MLX's caches: what they answer equals attention over every key, and what they forget weighs nothing."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

mx = pytest.importorskip("mlx.core", reason="mlx is not installed")

from alibi_core.conformance._cases.oracle import UNIT_ROUNDOFF, Answer, Attention, assert_within  # noqa: E402
from alibi_mlx import AlibiAttention, EvictingKVCache, KVCache, attention  # noqa: E402
from alibi_mlx._tiled import plan as _plan  # noqa: E402
from alibi_mlx.caches import _evicting as _evicting_cache  # noqa: E402
from alibi_mlx.caches import _kv_cache as _cache  # noqa: E402

BATCH, HEADS, KV_HEADS, HEAD_DIM = 2, 4, 2, 5
SCALE = HEAD_DIM**-0.5
U32 = 2.0**-24
STEEP = (4.0, 2.5, 1.0, 0.7)
TOGETHER = (1.9, 1.9, 1.0, 1.0)  # heads that share their storage, and need not hold as much
MIXED = (1.0, 0.125, 0.0, 3.0)  # a head that keeps everything, and one that must for the other of its group


def normal(*shape: int, seed: int = 0) -> Any:
    return mx.array(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


def zeros(new: int, batch: int = BATCH, heads: int = KV_HEADS) -> tuple[Any, Any]:
    return mx.zeros((batch, heads, new, HEAD_DIM)), mx.zeros((batch, heads, new, HEAD_DIM))


def numpy(array: Any) -> np.ndarray:
    return np.array(array if array.dtype == mx.float64 else array.astype(mx.float32)).astype(np.float64)


def assert_close(actual: Any, expected: Any, *, terms: int) -> None:
    actual, expected = numpy(actual), numpy(expected)
    assert actual.shape == expected.shape
    np.testing.assert_allclose(actual, expected, rtol=0, atol=4 * terms * U32 * max(1, np.abs(expected).max(initial=0)))


@pytest.fixture(autouse=True)
def _on_cpu():
    """The device that has float64."""
    with mx.stream(mx.cpu):
        yield


@dataclass(frozen=True)
class Stream:
    """A sequence that comes in steps, its keys along or against the direction that all queries have.

    Attributes:
        steps: Tokens appended at a time.
        shape: How norms of keys go along the sequence.
        sides: How the signs of keys do.
    """

    steps: tuple[int, ...]
    shape: str = "any"
    sides: str = "any"
    slopes: tuple[float, ...] = STEEP
    dtype: str = "float32"
    window_size: int | None = None
    tolerance: float | None = None
    q_norm: float = 4.0
    seed: int = 0

    @property
    def length(self) -> int:
        return sum(self.steps)

    @property
    def share(self) -> float:
        """The tolerance, its default filled in."""
        return UNIT_ROUNDOFF[self.dtype] if self.tolerance is None else min(self.tolerance, 0.5)

    @property
    def parts(self) -> list[slice]:
        ends = np.cumsum(self.steps).tolist()
        return [slice(end - step, end) for end, step in zip(ends, self.steps, strict=True)]

    @cached_property
    def slopes_array(self) -> Any:
        return mx.array(self.slopes, dtype=mx.float32)

    @cached_property
    def tensors(self) -> tuple[Any, Any, Any]:
        """Query, key and value. Queries have exactly the norm ``q_norm``, which one coordinate makes representable."""
        rng, index = np.random.default_rng(self.seed), np.arange(self.length)
        place = index / self.length
        sizes = {
            "zero": 0 * place,
            "equal": 0 * place + 2,
            "early giant": np.where(index == self.length // 7, 8.0, 0.25),
            "late giant": np.where(index == self.length - self.length // 7, 8.0, 0.25),
            "growing": 2.0 ** np.floor(8 * place - 5),
            "any": rng.choice([0.0, 0.25, 2.0, 8.0], self.length),
        }[self.shape]
        signs = {
            "along": 0 * place + 1,
            "old along": np.where(place < 0.5, 1.0, -1.0),
            "any": rng.choice([-1.0, 1.0], self.length),
        }[self.sides]
        direction = np.eye(HEAD_DIM)[self.seed % HEAD_DIM]
        query = np.broadcast_to(direction * self.q_norm, (BATCH, HEADS, self.length, HEAD_DIM)).copy()
        query[1] *= rng.choice([-1.0, 1.0, 0.5, 0.0], (HEADS, self.length, 1))
        key = np.broadcast_to(direction * (sizes * signs)[:, None], (BATCH, KV_HEADS, self.length, HEAD_DIM)).copy()
        key[:, 1] *= rng.choice([1.0, 0.25, 4.0])
        value = rng.standard_normal((BATCH, KV_HEADS, self.length, HEAD_DIM))
        return tuple(mx.array(x, dtype=mx.float64).astype(getattr(mx, self.dtype)) for x in (query, key, value))

    def exact(self, visible: np.ndarray | None = None) -> Attention:
        """Return the attention of the whole sequence in float64."""
        distance = np.arange(self.length)[:, None] - np.arange(self.length)
        seen = (distance >= 0) & (distance <= (self.length if self.window_size is None else self.window_size))
        seen = seen if visible is None else seen & visible
        bias = np.where(seen, -np.asarray(self.slopes_array.tolist())[:, None, None] * np.abs(distance), -np.inf)
        bias = np.broadcast_to(bias, (BATCH, HEADS, self.length, self.length))
        return Attention(*map(numpy, self.tensors), bias=bias, scale=SCALE, dtype=self.dtype)

    def evicting(self, **options: Any) -> EvictingKVCache:
        arguments: dict[str, Any] = {"slopes": self.slopes_array, "max_query_norm": self.q_norm}
        arguments |= {"window_size": self.window_size, "tolerance": self.tolerance} | options
        return EvictingKVCache(**arguments)


def leaving_out(exact: Attention, share: float) -> Answer:
    """Return the exact result with room for leaving out such a share of the weight."""
    largest = np.abs(exact.values).max(axis=(2, 3), keepdims=True)
    return Answer(exact.output.value, exact.output.budget + 2 * share * largest)


STREAMS = st.builds(
    Stream,
    steps=st.lists(st.sampled_from([1, 1, 2, 3, 9, 17, 40]), min_size=2, max_size=12).map(tuple),
    shape=st.sampled_from(["zero", "equal", "early giant", "late giant", "growing", "any"]),
    sides=st.sampled_from(["along", "old along", "any"]),
    slopes=st.sampled_from([STEEP, TOGETHER, MIXED, (0.01,) * 4]),
    dtype=st.sampled_from(["float64", "float32", "float16", "bfloat16"]),
    window_size=st.sampled_from([None, None, None, 0, 5, 40]),
    tolerance=st.sampled_from([None, None, 0.0, 1e-3, 0.3, 1.0]),
    q_norm=st.sampled_from([0.25, 4.0]),
    seed=st.integers(0, 2**16),
)
LONG = Stream((127, 1, 1, 128, 129, 3))


# --- The cache that keeps everything -------------------------------------------------------------------------------


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
def test_caches_can_be_copied(copied: Any) -> None:
    key = mx.random.normal((1, 2, 5, 8))
    full, evicting = KVCache(), EvictingKVCache(slopes=mx.array([1.0, 0.5]), max_query_norm=10.0)
    full.update_and_fetch(key, key)
    evicting.append(key, key)
    for cache in (full, evicting):
        assert mx.array_equal(copied(cache).attend(key), cache.attend(key))


@given(STREAMS, st.booleans(), st.sampled_from([None, "mask", "segments"]))
@example(LONG, True, None)
@example(dataclasses.replace(LONG, steps=(128, 1, 127, 1, 129), shape="early giant", sides="along"), True, None)
@example(dataclasses.replace(LONG, steps=(300, 1, 1, 17), slopes=MIXED, dtype="bfloat16"), True, "segments")
def test_attend_is_attention_over_all_keys(stream: Stream, plans: bool, hidden: str | None) -> None:
    query, key, value = stream.tensors
    rng = np.random.default_rng(stream.seed)
    visible, ids = np.ones((stream.length,) * 2, bool), np.sort(rng.integers(0, 3, stream.length)).astype(np.int32)
    if hidden == "mask":
        visible = rng.random(visible.shape) < 0.7
    if hidden == "segments":
        visible = ids[:, None] == ids
    cache, outputs = KVCache(), []
    with mock.patch.object(_plan, "SHORT", 0 if plans else _plan.SHORT):
        for part in stream.parts:
            cache.update_and_fetch(key[:, :, part], value[:, :, part])
            rules: dict[str, Any] = {"window_size": stream.window_size, "tolerance": stream.tolerance}
            if hidden == "mask":
                rules["mask"] = mx.array(visible[None, None, part, : part.stop])
            if hidden == "segments":
                rules["segment_ids"] = tuple(mx.array(np.stack([x] * BATCH)) for x in (ids[part], ids[: part.stop]))
            outputs.append(cache.attend(query[:, :, part], stream.slopes_array, **rules))
    assert_within(numpy(mx.concatenate(outputs, axis=2)), leaving_out(stream.exact(visible), stream.share))


@pytest.mark.parametrize("q_len", [1, 40])
def test_attention_over_a_long_cache_finds_the_giant_among_its_keys(q_len: int) -> None:
    """A thousand tokens back, in the second sequence, is the one key that counts."""
    length = 3000
    key, value = np.zeros((2, BATCH, 1, length, HEAD_DIM), np.float32)
    key[1, 0, 1900, 0], value[1, 0, 1900] = 200.0, 1.0
    query = mx.broadcast_to(mx.array([50.0, 0, 0, 0, 0]), (BATCH, 2, q_len, HEAD_DIM))
    cache, expected = KVCache(), np.broadcast_to([[[[0.0]]], [[[1.0]]]], query.shape)
    for start in range(0, length, 1000):
        keys, values = (mx.array(x[:, :, start : start + 1000]) for x in (key, value))
        cache.update_and_fetch(keys, values)
        mx.eval(cache.key_norms)
    assert np.array_equal(numpy(cache.attend(query, mx.ones(2))), expected)
    cache.trim(500)
    assert np.array_equal(numpy(cache.attend(query, mx.ones(2))), expected)


@pytest.mark.parametrize("held", [1500, 40])
def test_a_decoding_step_measures_one_block_at_most(monkeypatch: pytest.MonkeyPatch, held: int) -> None:
    layer, x, measured = layer_of(), normal(BATCH, held + 2, EMBED_DIM), []
    cache = layer.make_cache()
    mx.eval(layer(x[:, :held], cache=cache), layer(x[:, held : held + 1], cache=cache))
    for module in (_cache, _plan):
        measure = module.norm_bounds
        monkeypatch.setattr(module, "norm_bounds", lambda x, f=measure: measured.append(x.shape[-2]) or f(x))
    decoded = layer(x[:, held + 1 :], cache=cache)
    assert bool(measured) == (held > _plan.SHORT)
    assert max(measured, default=0) <= 128
    assert_close(decoded, layer(x)[:, -1:], terms=HEADS * HEAD_DIM)


def test_attend_passes_on_what_it_is_given() -> None:
    query, key, value = LONG.tensors
    cache = KVCache()
    cache.update_and_fetch(key, value)
    for implementation in (None, "dense"):
        rules: dict[str, Any] = {"scale": 0.3, "window_size": 20, "tolerance": 0.0, "implementation": implementation}
        actual = cache.attend(query, **rules)
        assert np.array_equal(numpy(actual), numpy(attention(query, key, value, **rules)))
        assert np.abs(numpy(actual - cache.attend(query, LONG.slopes_array, **rules))).max() > 1e-2


MAGNITUDES = {"float64": 1e200, "float32": 1e30, "float16": 6e4, "bfloat16": 1e30}


@given(
    steps=st.lists(st.sampled_from([1, 2, 60, 127, 128, 129]), min_size=1, max_size=6),
    dtype=st.sampled_from(["float64", "float32", "float16", "bfloat16"]),
    kind=st.sampled_from(["normal", "huge", "tiny", "mixed"]),
    head_dim=st.sampled_from([1, 5, 64, 1000]),
    back=st.integers(0, 200),
    way=st.sampled_from(["trim", "state", "offset"]),
    seed=st.integers(0, 99),
)
@example(steps=[129, 60, 1], dtype="float32", kind="mixed", head_dim=5, back=130, way="offset", seed=0)
def test_key_norms_bound_the_keys_held_whatever_was_taken_back(
    steps: list[int], dtype: str, kind: str, head_dim: int, back: int, way: str, seed: int
) -> None:
    rng, cache = np.random.default_rng(seed), KVCache()
    size = {"normal": 1.0, "huge": MAGNITUDES[dtype], "tiny": 1 / MAGNITUDES[dtype], "mixed": 1.0}[kind]
    for step in steps:
        keys = rng.uniform(-1, 1, (1, 2, step, head_dim)) * size
        if kind == "mixed":
            keys *= 2.0 ** rng.integers(-12, 12, (1, 2, step, 1))
        keys = mx.array(keys, dtype=mx.float64).astype(getattr(mx, dtype))
        cache.update_and_fetch(1000 * keys, keys)  # what is to be forgotten
        if rng.random() < 0.5:
            mx.eval(cache.key_norms)
        taken = min(cache.offset, step + back) if rng.random() < 0.5 else step
        if way == "trim":
            assert cache.trim(taken) == taken
        elif way == "offset":
            cache.offset -= taken
        else:
            cache.state = (*cache.state[:2], cache.offset - taken)
        cache.update_and_fetch(keys, keys)
    held = np.sqrt(np.square(numpy(cache.state[0]).astype(np.longdouble)).sum(axis=-1))
    bounds = numpy(cache.key_norms)
    assert cache.key_norms.dtype == mx.float32
    assert bounds.shape == (1, 2, -(-cache.offset // 128))
    for block in range(bounds.shape[2]):
        largest = held[:, :, 128 * block : 128 * (block + 1)].max(axis=-1)
        assert (bounds[:, :, block] >= largest).all()
        # And no larger than need be, unless float32 cannot square it.
        loose = (largest * 1.001 + 1e-17) * (1 if largest.max() < 1e18 else np.inf)
        assert (bounds[:, :, block] <= loose).all()


def test_norms_of_what_is_not_a_number_bound_nothing() -> None:
    keys = normal(1, 1, 300, HEAD_DIM)
    keys[0, 0, 200, 1] = math.nan
    cache = KVCache()
    cache.update_and_fetch(keys, keys)
    assert np.isinf(numpy(cache.key_norms)).tolist() == [[[False, True, False]]]


def test_a_further_token_has_one_block_measured_and_who_does_not_ask_none(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []
    monkeypatch.setattr(_cache, "norm_bounds", lambda keys: measured.append(keys.shape[2]) or mx.zeros(keys.shape[:3]))
    cache = KVCache()
    cache.update_and_fetch(*zeros(1000))
    cache.update_and_fetch(*zeros(1))
    assert measured == []
    assert cache.key_norms.shape == (BATCH, KV_HEADS, 8)
    cache.update_and_fetch(*zeros(30))
    assert cache.key_norms.shape == (BATCH, KV_HEADS, 9)
    assert cache.key_norms.shape == (BATCH, KV_HEADS, 9)
    assert measured == [1001, 1031 - 7 * 128]


def test_nothing_is_read_while_tokens_are_stored() -> None:
    def tokens_held(keys: Any) -> Any:
        cache = KVCache()
        cache.update_and_fetch(keys, keys)
        return cache.update_and_fetch(keys, keys)[0], cache.key_norms

    keys = normal(1, 2, 3, HEAD_DIM)
    held, norms = mx.compile(tokens_held)(keys)  # tracing forbids reading
    assert held.shape == (1, 2, 6, HEAD_DIM)
    assert (numpy(norms)[..., 0] >= np.linalg.norm(numpy(keys), axis=-1).max(axis=-1)).all()


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
    assert np.array_equal(numpy(cache.update_and_fetch(keys, keys)[0]), numpy(keys))


@pytest.mark.parametrize("window_size", [None, 1, 3, 50])
@pytest.mark.parametrize("length", [1, 4])
@pytest.mark.parametrize("held", [0, 5])
def test_masks_for_the_models_of_mlx_lm(held: int, length: int, window_size: int | None) -> None:
    cache = KVCache()
    cache.update_and_fetch(*zeros(held))
    distance = np.arange(held, held + length)[:, None] - np.arange(held + length)
    seen = (distance >= 0) & (distance < (window_size or 100))
    for return_array in (False, True):
        mask = cache.make_mask(length, return_array=return_array, window_size=window_size)
        if window_size is None and (length == 1 or not return_array):
            assert mask == (None if length == 1 else "causal")
        else:
            assert mask.dtype == mx.bool_
            assert np.array_equal(np.array(mask), seen)


def test_a_cache_travels_through_a_file(tmp_path: Any) -> None:
    query, key, value = LONG.tensors
    cache, path = KVCache(), str(tmp_path / "cache.safetensors")
    cache.update_and_fetch(key, value)
    keys, values, offset = cache.state
    mx.save_safetensors(path, {"keys": keys, "values": values})
    arrays = mx.load(path)
    for state in ((arrays["keys"], arrays["values"], offset), (arrays["keys"], arrays["values"])):
        other = KVCache.from_state(state)
        assert other.offset == LONG.length
        assert np.array_equal(numpy(other.key_norms), numpy(cache.key_norms))
        assert np.array_equal(numpy(other.attend(query)), numpy(cache.attend(query)))


def test_values_may_have_features_of_their_own() -> None:
    cache, keys, values = KVCache(), normal(1, 1, 3, 4), normal(1, 1, 3, 6)
    cache.update_and_fetch(keys, values)
    assert [x.shape for x in cache.update_and_fetch(keys, values)] == [(1, 1, 6, 4), (1, 1, 6, 6)]


def test_cache_grows_in_steps_up_to_its_maximum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_cache, "STEP", 5)
    cache, capacities = KVCache(max_length=12), []
    for new in (3, 1, 1, 2, 4, 1):
        cache.update_and_fetch(*zeros(new))
        capacities.append(cache.keys.shape[2])
    assert capacities == [5, 5, 5, 10, 12, 12]


def test_cache_state_can_be_taken_and_put_back() -> None:
    layer, x = layer_of(), normal(BATCH, 7, EMBED_DIM)
    cache, other = layer.make_cache(), layer.make_cache()
    assert cache.state == ()
    layer(x[:, :5], cache=cache)
    mx.eval(cache.state)
    assert [array.shape for array in cache.state[:2]] == [(BATCH, KV_HEADS, 5, HEAD_DIM)] * 2
    assert cache.state[2] == 5
    other.state = cache.state
    expected = numpy(layer(x[:, 5:], cache=cache))
    assert np.array_equal(numpy(layer(x[:, 5:], cache=other)), expected)
    cache.state = (cache.keys, cache.values, 5)  # as mlx-lm has it; take the last tokens back
    assert np.array_equal(numpy(layer(x[:, 5:], cache=cache)), expected)
    cache.state = ()
    assert cache.empty()


# --- What is refused


@pytest.mark.parametrize(
    ("keys", "error", "message"),
    [
        (np.zeros((BATCH, KV_HEADS, 2, HEAD_DIM), np.float32), TypeError, r"mlx\.core and numpy"),
        ([0.0], TypeError, "keys must be an array of four axes, got list"),
        (mx.zeros((KV_HEADS, 2, HEAD_DIM)), TypeError, r"keys must be an array of four axes, got \(2, 2, 5\)"),
        (mx.zeros((BATCH, KV_HEADS, 2, HEAD_DIM), mx.int32), TypeError, "keys must have a real floating dtype"),
        (mx.zeros((BATCH, KV_HEADS, 2, HEAD_DIM), mx.float16), ValueError, "keys must be .*float32 .*got .*float16"),
        (mx.zeros((BATCH, KV_HEADS, 2, HEAD_DIM), mx.float64), ValueError, "keys must be .*float32 .*got .*float64"),
        (mx.zeros((3, KV_HEADS, 2, HEAD_DIM)), ValueError, r"shape \(2, 2, 2, 5\) \(batch, .*got .* \(3, 2, 2, 5\)"),
        (mx.zeros((BATCH, HEADS, 2, HEAD_DIM)), ValueError, "keys must be"),
        (mx.zeros((BATCH, KV_HEADS, 2, 6)), ValueError, "keys must be"),
        (mx.zeros((BATCH, KV_HEADS, 5, HEAD_DIM)), ValueError, "room for 5 more tokens, got max_length 8 with 4 in"),
    ],
    ids=["numpy", "list", "axes", "integers", "float16", "float64", "batch", "heads", "head_dim", "room"],
)
@pytest.mark.parametrize("evict", [False, True])
def test_a_refused_token_is_not_half_written(keys: Any, error: type, message: str, evict: bool) -> None:
    cache = EvictingKVCache(slopes=mx.zeros(4), max_query_norm=4.0, max_length=8) if evict else KVCache(max_length=8)
    add = cache.append if evict else cache.update_and_fetch
    held, query = normal(BATCH, KV_HEADS, 4, HEAD_DIM), normal(BATCH, HEADS, 1, HEAD_DIM) / 4
    add(held, held)
    expected, before = numpy(cache.attend(query, mx.zeros(4))), cache.nbytes
    with pytest.raises(error, match=message):
        add(keys, keys)
    if error is ValueError and "room" not in message:
        with pytest.raises(ValueError, match="values must be"):
            add(held, keys if keys.shape[2] == 4 else keys[:, :, :1])
    assert (cache.offset, cache.nbytes) == (4, before)
    assert np.array_equal(numpy(cache.attend(query, mx.zeros(4))), expected)
    if not evict:
        assert np.array_equal(numpy(cache.state[0]), numpy(held))


def test_an_offset_that_passes_the_capacity_is_refused() -> None:
    cache = KVCache()
    cache.update_and_fetch(*zeros(4))
    for offset in (257, -1):
        cache.offset = offset
        with pytest.raises(ValueError, match=f"offset must be at most the cache's capacity, 256 tokens, got {offset}"):
            cache.update_and_fetch(*zeros(1))
        with pytest.raises(ValueError, match=f"offset must be at most the cache's capacity, 256 tokens, got {offset}"):
            cache.attend(mx.zeros((BATCH, HEADS, 1, HEAD_DIM)))


@pytest.mark.parametrize("evict", [False, True])
def test_an_empty_cache_or_an_unknown_implementation_attends_to_nothing(evict: bool) -> None:
    cache = EvictingKVCache(slopes=mx.ones(4), max_query_norm=4.0) if evict else KVCache()
    query = mx.zeros((BATCH, HEADS, 1, HEAD_DIM))
    with pytest.raises(ValueError, match="cache must hold the tokens that query is of, got an empty one"):
        cache.attend(query)
    (cache.append if evict else cache.update_and_fetch)(*zeros(1))
    with pytest.raises(ValueError, match="implementation must be one of .*, got 'flash'"):
        cache.attend(query, implementation="flash")


@pytest.mark.parametrize("name", ["batch_size", "max_length"])
def test_sizes_that_are_none_are_refused(name: str) -> None:
    for make in (KVCache, lambda **sizes: EvictingKVCache(slopes=mx.ones(4), max_query_norm=4.0, **sizes)):
        with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
            make(**{name: 0})
        with pytest.raises(TypeError, match=f"{name} must be an integer, got 2.5"):
            make(**{name: 2.5})
        cache = make(batch_size=np.uint8(5))
        with pytest.raises(ValueError, match=r"keys must be .* of shape \(5, 2, 1, 5\)"):
            (cache.append if isinstance(cache, EvictingKVCache) else cache.update_and_fetch)(*zeros(1))


# --- The cache that forgets ----------------------------------------------------------------------------------------


def dropped_share(stream: Stream, cache: EvictingKVCache, exact: Attention, part: slice) -> np.ndarray:
    """Return the weight of what the heads do not hold, ``[batch, num_heads, q_len]``."""
    first = [part.stop - cache.kept[head // (HEADS // KV_HEADS)] for head in range(HEADS)]
    weights = exact.weights[:, :, part]
    return np.stack([weights[:, head, :, : first[head]].sum(axis=-1) for head in range(HEADS)], axis=1)


@given(STREAMS, st.sampled_from([1, 7, 64]))
@example(dataclasses.replace(LONG, steps=(1,) * 90, shape="early giant", sides="along"), 1)
@example(dataclasses.replace(LONG, steps=(1,) * 90, shape="growing", sides="old along"), 1)
@example(dataclasses.replace(LONG, steps=(50,) + (1,) * 40, shape="equal", sides="old along", tolerance=0.3), 1)
@example(dataclasses.replace(LONG, steps=(50, 40, 30), shape="equal", sides="old along", tolerance=1.0), 1)
@example(dataclasses.replace(LONG, steps=(1,) * 90, shape="zero", tolerance=1.0, slopes=MIXED), 1)
@example(dataclasses.replace(LONG, steps=(9,) * 12, window_size=0), 1)
@example(dataclasses.replace(LONG, steps=(60, 1, 30, 1), slopes=TOGETHER, shape="equal", sides="old along"), 1)
@example(dataclasses.replace(LONG, steps=(40, 40, 1), slopes=TOGETHER, shape="equal", sides="old along", seed=2), 1)
def test_what_is_dropped_weighs_no_more_than_the_tolerance(stream: Stream, room: int) -> None:
    query, key, value = stream.tensors
    cache, exact, outputs = stream.evicting(), stream.exact(), []
    with mock.patch.object(_evicting_cache, "ROOM", room):
        for part in stream.parts:
            cache.append(key[:, :, part], value[:, :, part])
            assert all(part.stop - part.start <= kept <= part.stop for kept in cache.kept)
            share = dropped_share(stream, cache, exact, part)
            assert (share <= stream.share / 2 * (1 + 1e-9)).all()
            outputs.append(cache.attend(query[:, :, part]))
    assert cache.length == cache.offset == stream.length
    assert_within(numpy(mx.concatenate(outputs, axis=2)), leaving_out(exact, stream.share))


@pytest.mark.parametrize("slope", [2.0, 4.0])
@pytest.mark.parametrize("tolerance", [0.5, 2.0**-6, 2.0**-24])
@pytest.mark.parametrize("missed", [-1e-3, 0.1], ids=["just enough", "too little"])
def test_the_bound_is_met_by_the_worst_keys_there_are(slope: float, tolerance: float, missed: float) -> None:
    """Old keys along the query, the last ones against it, and the query's own further still: nothing can be worse."""
    allowed = tolerance / 2
    needed, last = 48 / slope + missed, int(48 / slope)  # tokens: what the bound says, and how many are against
    score_range = slope * needed + math.log(allowed * -math.expm1(-slope))
    q_norm, old = 8.0, 50
    size = score_range / (2 * SCALE * q_norm)
    sizes = np.asarray([size] * old + [-size] * last + [-1e3 * size])
    keys = mx.array((sizes[:, None] * np.eye(HEAD_DIM)[0])[None, None], dtype=mx.float64)
    options = {"tolerance": tolerance, "max_query_norm": q_norm, "max_length": old + last}
    cache = EvictingKVCache(slopes=mx.array([slope], dtype=mx.float64), **options)
    for first, stop in ((0, old), (old, old + last), (old + last, old + last + 1)):
        cache.append(keys[:, :, first:stop], keys[:, :, first:stop])
    assert cache.kept == [math.ceil(needed) + 1]
    logarithms = SCALE * q_norm * sizes - slope * np.arange(old + last, -1, -1)
    weights = np.exp(logarithms - logarithms.max())
    weights /= weights.sum()
    share = weights[: cache.length - cache.kept[0]].sum()
    assert share <= allowed
    assert share >= 0.6 * allowed or missed > 0
    along = weights[:old].sum()
    assert missed < 0 or along / (1 - along) > allowed  # a token less would not have been enough
    query = mx.array([[[[q_norm, 0, 0, 0, 0]]]], dtype=mx.float64)
    assert abs(cache.attend(query)[0, 0, 0, 0].item() - weights @ sizes) <= 2 * tolerance * 1e3 * size


@pytest.mark.parametrize("entry", [0, 1])
@pytest.mark.parametrize("head", [0, 1])
def test_the_largest_key_counts_whichever_sequence_and_head_it_is_in(entry: int, head: int) -> None:
    cache = EvictingKVCache(slopes=mx.ones(2), max_query_norm=4.0, tolerance=2.0**-23)
    keys = np.zeros((2, 2, 60, HEAD_DIM), np.float32)
    keys[entry, head, 5, 2] = 5.0
    with mock.patch.object(_evicting_cache, "ROOM", 1):
        for i in range(60):
            part = mx.array(keys[:, :, i : i + 1])
            cache.append(part, part)
    need = 2 * SCALE * 4.0 * 5.0 - math.log(2.0**-24 * -math.expm1(-1.0))
    assert cache.kept[head] >= math.ceil(need) + 1
    assert max(cache.kept) < 60


def test_keys_too_small_to_be_squared_are_not_taken_for_zeros() -> None:
    sizes = np.asarray([2e-23] * 40 + [-2e-23] * 30)
    keys = mx.array((sizes[:, None] * np.eye(HEAD_DIM)[0])[None, None].astype(np.float32))
    cache = EvictingKVCache(slopes=mx.ones(1), max_query_norm=1e25)
    with mock.patch.object(_evicting_cache, "ROOM", 1):
        for i in range(70):
            cache.append(keys[:, :, i : i + 1], keys[:, :, i : i + 1])
    # Scores lie between -100 and 100: the first keys outweigh the last, 70 tokens of slope 1 or not.
    assert cache.kept == [70]


def test_heads_drop_what_they_do_not_need_over_thousands_of_steps() -> None:
    slopes, steps = mx.array([2.0, 2.0, 0.5, 0.5, 0.125, 0.125, 0.0, 1.0]), 2000
    cache = EvictingKVCache(slopes=slopes, max_query_norm=2.0)
    key, value, query = (normal(1, heads, steps, 8, seed=seed) for seed, heads in enumerate((4, 4, 8)))
    key = key / mx.linalg.norm(key, axis=-1, keepdims=True)
    query = 1.999 * query / mx.linalg.norm(query, axis=-1, keepdims=True)
    mx.eval(key, value, query)
    score_range = 2 * 8**-0.5 * 2.0 * (1 + 1e-4)
    largest, memory = [0] * 4, []
    for step in range(steps):
        cache.append(key[:, :, step : step + 1], value[:, :, step : step + 1])
        mx.eval(cache.state)
        largest = [max(pair) for pair in zip(largest, cache.kept, strict=True)]
        if step % 250 == 249:
            memory.append(cache.nbytes)
            result = cache.attend(query[:, :, step : step + 1], slopes)
            held = key[:, :, : step + 1], value[:, :, : step + 1]
            expected = attention(query[:, :, step : step + 1], *held, slopes, tolerance=0.0)
            np.testing.assert_allclose(numpy(result), numpy(expected), rtol=0, atol=1e-5)
    for slope, kept in zip((2.0, 0.5, 0.125), largest, strict=False):
        need = math.ceil((score_range - math.log(2.0**-25 * -math.expm1(-slope))) / slope) + 1
        assert need <= kept <= need + 1 + max(64, need // 4 + 1)
    assert largest[3] == cache.kept[3] == steps  # a slope of 0 never lets go
    endless = 2 * 8 * 4  # bytes a token of the head that does
    most = 1.25 * steps * endless
    assert all(used - most <= 3 * endless * 450 for used in memory)
    assert steps * endless <= cache.nbytes
    assert cache.length == steps


def test_memory_shrinks_after_a_long_prompt() -> None:
    cache = EvictingKVCache(slopes=mx.ones(1), max_query_norm=1.0)
    cache.append(*zeros(5000, heads=1))
    before = cache.nbytes
    assert cache.kept == [5000]
    cache.append(*zeros(1, heads=1))
    assert cache.kept[0] < 30
    assert cache.nbytes < before / 20


def test_no_head_ever_holds_more_than_max_length() -> None:
    cache = EvictingKVCache(slopes=mx.array([8.0, 1.0]), max_query_norm=1.0, max_length=20)
    for _ in range(100):
        cache.append(*zeros(1))
        assert max(cache.kept) <= cache.max_length == 20
        assert cache.nbytes <= 2 * BATCH * 2 * 20 * HEAD_DIM * 4


def test_a_full_cache_refuses_and_stays_as_it_was() -> None:
    cache = EvictingKVCache(slopes=mx.array([8.0, 0.0]), max_query_norm=1.0, max_length=20)
    with pytest.raises(ValueError, match="cache must have room for 21 more tokens, got max_length 20 with 0 in use"):
        cache.append(*zeros(21))
    cache.append(*zeros(18))
    kept = cache.kept
    with pytest.raises(ValueError, match="cache must have room for 3 more tokens, got max_length 20 with 18 in use"):
        cache.append(*zeros(3))
    assert (cache.length, cache.kept) == (18, kept)
    cache.append(*zeros(2))
    assert cache.length == 20


@pytest.mark.parametrize("slopes", [STEEP, MIXED])
def test_values_are_read_only_where_room_is_made(slopes: tuple[float, ...]) -> None:
    cache, steps = EvictingKVCache(slopes=mx.array(slopes), max_query_norm=4.0), 0

    def step(keys: Any, query: Any) -> Any:
        cache.append(keys, keys)
        return cache.attend(query)

    with mock.patch.object(cache, "_make_room", wraps=cache._make_room) as made:
        for _ in range(300):
            mx.eval(step(normal(BATCH, KV_HEADS, 1, HEAD_DIM), mx.ones((BATCH, HEADS, 1, HEAD_DIM))))
            steps += 1
        assert 1 <= made.call_count <= 6
        while cache._looks_next or cache._looked or max(cache.kept) % 3:  # to a step that has room
            step(normal(BATCH, KV_HEADS, 1, HEAD_DIM), mx.ones((BATCH, HEADS, 1, HEAD_DIM)))
        mx.compile(step)(*zeros(1)[:1], mx.zeros((BATCH, HEADS, 1, HEAD_DIM)))  # tracing forbids reading


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_query_norm": 0.0}, ValueError, "max_query_norm must be positive"),
        ({"max_query_norm": math.nan}, ValueError, "max_query_norm must be finite"),
        ({"max_query_norm": "8"}, TypeError, "max_query_norm must be a real number"),
        ({"tolerance": -1e-3}, ValueError, "tolerance must not be negative"),
        ({"scale": math.nan}, ValueError, "scale must be finite"),
        ({"window_size": -1}, ValueError, "window_size must not be negative"),
        ({"window_size": 1.0}, TypeError, "window_size must be an integer"),
        ({"slopes": mx.ones((2, 4))}, TypeError, "slopes must be an MLX array of one axis"),
        ({"slopes": np.ones(4)}, TypeError, "slopes must be an MLX array of one axis"),
        ({"slopes": 4}, TypeError, "slopes must be an MLX array of one axis, got 4"),
        ({"slopes": -mx.ones(4)}, ValueError, "slopes must not be negative"),
        ({"slopes": mx.full((4,), math.nan)}, ValueError, "slopes must be finite"),
        ({"slopes": mx.ones(4, mx.int32)}, TypeError, "slopes must have a real floating dtype"),
    ],
)
def test_an_evicting_cache_is_not_made_of(options: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=f"^{message}"):
        EvictingKVCache(**{"slopes": mx.ones(4), "max_query_norm": 8.0} | options)


def test_slopes_of_heads_that_do_not_divide_are_refused() -> None:
    cache = EvictingKVCache(slopes=mx.ones(3), max_query_norm=8.0)
    with pytest.raises(ValueError, match="num_kv_heads must divide num_heads, 3 .*, got 2"):
        cache.append(*zeros(1))


def held() -> EvictingKVCache:
    """Return a cache that has dropped tokens, with 3 more since."""
    cache = LONG.evicting(max_length=200)
    cache.append(*zeros(200))
    cache.append(*zeros(3))
    assert cache.length == 203
    assert max(cache.kept) < 100
    return cache


def a_query(**changes: Any) -> Any:
    return mx.zeros(tuple(({"batch": BATCH, "heads": HEADS, "q_len": 3, "head_dim": HEAD_DIM} | changes).values()))


TOO_LONG = r"query must have norms of at most max_query_norm, 4, "


@pytest.mark.parametrize(
    ("query", "arguments", "error", "message"),
    [
        (a_query(batch=3), {}, ValueError, "key must have the batch axes of query"),
        (a_query(heads=8), {}, ValueError, "query must have 4 heads, as many as the cache, got 8"),
        (a_query(head_dim=6), {}, ValueError, "key must have the head_dim of query"),
        (a_query(q_len=4), {}, ValueError, "query must be of the 3 last tokens, whose keys are all held, got q_len 4"),
        (a_query().astype(mx.float16), {}, TypeError, "query, key and value must have one dtype"),
        (np.zeros((BATCH, HEADS, 3, HEAD_DIM), np.float32), {}, TypeError, "arrays must belong to one"),
        ([0.0], {}, TypeError, "query must be an array"),
        (a_query(), {"mask": mx.ones((3, 203), mx.bool_)}, ValueError, "mask must be None"),
        (a_query(), {"segment_ids": (mx.zeros(3), mx.zeros(203))}, ValueError, "segment_ids must be None"),
        (a_query(), {"slopes": mx.ones(HEADS)}, ValueError, "slopes must be those that the cache was made for"),
        (a_query(), {"slopes": mx.ones(3)}, ValueError, "slopes must have shape"),
        (a_query(), {"slopes": 4}, ValueError, "slopes must be those that the cache was made for"),
        (a_query(), {"window_size": 3}, ValueError, "window_size must be what the cache was made for, None, got 3"),
        (a_query() + 1.8, {}, ValueError, TOO_LONG),
        (a_query() + 1e30, {}, ValueError, TOO_LONG),
        (a_query() + math.nan, {}, ValueError, TOO_LONG),
    ],
)
def test_an_evicting_cache_does_not_attend_to(query: Any, arguments: Any, error: type, message: str) -> None:
    cache = held()
    with pytest.raises(error, match=f"^{message}"):
        cache.attend(query, **arguments)
    allowed = a_query() + mx.array([4.0, 0, 0, 0, 0])  # of norm 4 exactly
    assert not numpy(cache.attend(allowed)).any()  # all values are zeros


@pytest.mark.parametrize("bad", [4.001, 1e30, math.inf, math.nan])
def test_a_query_too_long_is_never_answered(bad: float) -> None:
    cache, query = held(), a_query(q_len=1)
    cache.append(*zeros(1))  # for which there is room, so nothing is read
    assert np.isnan(numpy(cache.attend(query + mx.array([bad, 0, 0, 0, 0])))).all()

    def go_on() -> None:
        for _ in range(100):
            cache.append(*zeros(1))
            assert np.isnan(numpy(cache.attend(query))).all()

    with pytest.raises(ValueError, match=TOO_LONG + ".*the results since then are NaN"):
        go_on()
    cache.append(*zeros(1))  # having been told, one may try again
    assert not numpy(cache.attend(query)).any()


def test_a_query_that_float32_cannot_measure_is_not_answered() -> None:
    cache, one = EvictingKVCache(slopes=mx.ones(1), max_query_norm=1e39), mx.ones((1, 1, 1, 4), mx.float64)
    cache.append(one, one)
    with pytest.raises(ValueError, match="query must have norms of at most max_query_norm"):
        cache.attend(1e200 * one)
    assert numpy(cache.attend(1e15 * one)).min() == 1
    for _ in range(2):  # there is room for the second, so nothing is read
        cache.append(one, one)
    assert np.isnan(numpy(cache.attend(1e200 * one))).all()


def test_a_refused_token_leaves_the_cache_as_it_was() -> None:
    layer, x = layer_of(slopes=mx.array(STEEP)), normal(BATCH, 600, EMBED_DIM)
    tried, spared = (layer.make_cache(evict=True, max_query_norm=8.0) for _ in range(2))
    for i in range(0, 600, 5):
        token = x[:, i : i + 5]
        if i == 300:
            tried._looks_next = spared._looks_next = True
            for bad in (1e4, math.nan):
                with pytest.raises(ValueError, match="query must have norms of at most max_query_norm, 8, "):
                    layer(token * bad, cache=tried)
                assert tried.length == 300
        assert np.array_equal(numpy(layer(token, cache=tried)), numpy(layer(token, cache=spared)))
    # Keys of a size that never came to be held do not widen the horizons for good, either.
    assert tried.kept == spared.kept
    assert max(tried.kept) < 200


def test_truncation_stops_where_keys_were_dropped() -> None:
    query, key, value = LONG.tensors
    cache = LONG.evicting(max_length=300)
    for part in (slice(0, 300), slice(300, 320)):
        cache.append(key[:, :, part], value[:, :, part])
    cache.truncate(500)
    assert cache.length == 320
    assert cache.trim(15) == 15
    assert cache.length == 305
    for forget in (lambda: cache.truncate(299), lambda: cache.trim(6)):
        with pytest.raises(ValueError, match="length must be at least 300, before which keys were dropped, got 299"):
            forget()
    assert cache.length == 305
    cache.append(key[:, :, 305:], value[:, :, 305:])
    answer = leaving_out(LONG.exact(), LONG.share)
    assert_within(numpy(cache.attend(query[:, :, 305:])), Answer(answer.value[:, :, 305:], answer.budget[:, :, 305:]))


def test_keys_that_took_the_place_of_others_count() -> None:
    cache = EvictingKVCache(slopes=mx.ones(1), max_query_norm=4.0)
    cache.append(*zeros(10, heads=1))
    cache.append(*zeros(1, heads=1))
    cache._looks_next = True
    cache.append(*zeros(1, heads=1))  # which read the norms of 11, and dropped none
    cache.truncate(5)
    giants = 5 * mx.ones((BATCH, 1, 5, HEAD_DIM)) * SCALE  # of norm 5, in places that were read
    cache.append(giants, giants)
    with mock.patch.object(_evicting_cache, "ROOM", 1):
        for _ in range(60):
            cache._looks_next = True
            cache.append(*zeros(1, heads=1))
    assert cache.kept[0] >= 2 * SCALE * 4.0 * 5.0 - math.log(2.0**-25 * -math.expm1(-1.0))
    assert cache.kept[0] < 60


@given(st.data())
def test_truncation_and_repetition_leave_the_proof_standing(data: st.DataObject) -> None:
    """Whatever is appended, taken back and appended again, weights are those of the sequence as it is in the end."""
    stream = data.draw(st.sampled_from([LONG, dataclasses.replace(LONG, sides="old along", shape="equal")]))
    _, key, value = stream.tensors
    cache = stream.evicting()
    with mock.patch.object(_evicting_cache, "ROOM", 1):
        while cache.length < 120:
            before = cache.length
            count = data.draw(st.sampled_from([1, 3, 30]))
            junk = data.draw(st.sampled_from([0.0, 1.0, 30.0]))
            if junk:
                keys = junk * normal(BATCH, KV_HEADS, count, HEAD_DIM)
                cache.append(keys, keys)
                cache.truncate(before)
                assert cache.length == before
            part = slice(before, before + count)
            cache.append(key[:, :, part], value[:, :, part])
    share = dropped_share(stream, cache, stream.exact(), part)
    assert (share <= stream.share / 2 * (1 + 1e-9)).all()
    assert max(cache.kept) < stream.length


@pytest.mark.parametrize("change", ["nothing", "learnt", "in place", "of the cache's"])
def test_slopes_that_changed_since_are_refused(change: str) -> None:
    slopes = mx.array(STEEP)
    layer, x = layer_of(slopes=slopes, learnable_slopes=change == "learnt"), normal(1, 3, EMBED_DIM)
    cache = layer.make_cache(evict=True, max_query_norm=100.0)
    layer(x, cache=cache)
    if change == "nothing":
        slopes[0] = 3.0  # the array that the layer was made of
        assert layer(x, cache=cache).shape == x.shape
        return
    if change == "learnt":
        layer.log_slopes = layer.log_slopes - 1
    else:
        layer.slopes[1] = 0.25
    with pytest.raises(ValueError, match="slopes must be those that the cache was made for; make a new one"):
        layer(x, cache=cache)
    assert cache.length == 3


@pytest.mark.parametrize(
    "configuration",
    [
        {},
        {"num_kv_heads": 4},
        {"window_size": 3},
        {"learnable_slopes": True},
        {"num_kv_heads": 4, "slopes": mx.array([1.0, 3.0, 2.5, 1.2])},  # in two groups, neither order its own inverse
    ],
    ids=["grouped", "apart", "window", "learnable", "mixed"],
)
def test_a_layer_that_evicts_decodes_what_it_prefills(configuration: dict[str, Any]) -> None:
    layer, x = layer_of(**{"slopes": mx.array(STEEP)} | configuration), normal(BATCH, 260, EMBED_DIM)
    cache, outputs, start = layer.make_cache(evict=True, max_query_norm=8.0), [], 0
    with mock.patch.object(_evicting_cache, "ROOM", 1):
        for length in (100, 1, 17, *[1] * 142):
            outputs.append(layer(x[:, start : start + length], cache=cache))
            start += length
    assert_close(mx.concatenate(outputs, axis=1), layer(x), terms=HEADS * HEAD_DIM)
    assert cache.length == 260
    assert max(cache.kept) < 150


def test_a_cast_layer_needs_a_new_cache() -> None:
    layer, x = layer_of(slopes=mx.array(STEEP)), normal(1, 3, EMBED_DIM)
    cache = layer.make_cache(evict=True, max_query_norm=100.0)
    layer(x, cache=cache)
    layer.set_dtype(mx.bfloat16)
    with pytest.raises(ValueError, match=r"^keys must be mlx.core.float32 .* got mlx.core.bfloat16"):
        layer(x.astype(mx.bfloat16), cache=cache)
    assert layer(x.astype(mx.bfloat16), cache=layer.make_cache(evict=True, max_query_norm=9.0)).dtype == mx.bfloat16


# --- The layer


EMBED_DIM = 13


def layer_of(**arguments: Any) -> AlibiAttention:
    mx.random.seed(0)
    return AlibiAttention(EMBED_DIM, HEADS, **{"num_kv_heads": KV_HEADS, "head_dim": HEAD_DIM, **arguments})


@pytest.mark.parametrize(
    "make_cache",
    [
        lambda layer: layer.make_cache(BATCH, 11),
        lambda layer: ForeignCache(),
        lambda layer: layer.make_cache(BATCH, 11, evict=True, max_query_norm=8.0),
    ],
    ids=["own", "foreign", "evicting"],
)
@pytest.mark.parametrize("configuration", [{"window_size": 7}, {"learnable_slopes": True, "bias": True}], ids=str)
def test_decoding_in_steps_equals_one_call(
    monkeypatch: pytest.MonkeyPatch, make_cache: Any, configuration: dict[str, Any]
) -> None:
    monkeypatch.setattr(_cache, "STEP", 3)  # small, so that it grows, within a call and between calls
    layer, x = layer_of(**configuration), normal(BATCH, 11, EMBED_DIM)
    cache, outputs, start = make_cache(layer), [], 0
    for length in (5, 1, 1, 4):
        outputs.append(layer(x[:, start : start + length], cache=cache))
        start += length
        assert cache.offset == start
    assert_close(mx.concatenate(outputs, axis=1), layer(x), terms=HEADS * HEAD_DIM)


def test_masks_and_segments_cover_the_cached_tokens() -> None:
    layer, x = layer_of(), normal(BATCH, 7, EMBED_DIM)
    ids = mx.array([[0, 0, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1, 1]])
    mask = mx.array([[False, False, True, True, True, True, True], [True] * 7])[:, None, None, :]
    for arguments, later in (
        ({"segment_ids": ids}, {"segment_ids": (ids[:, 5:], ids)}),
        ({"mask": mask}, {"mask": mask}),
    ):
        for cache in (layer.make_cache(), ForeignCache()):
            layer(x[:, :5], cache=cache)
            decoded = layer(x[:, 5:], cache=cache, **later)
            # What the earlier queries were shown does not change keys and values.
            assert_close(decoded, layer(x, **arguments)[:, 5:], terms=HEADS * HEAD_DIM)


def test_full_cache_raises_and_keeps_what_it_holds() -> None:
    layer, x = layer_of(), normal(BATCH, 7, EMBED_DIM)
    cache = layer.make_cache(max_length=6)
    layer(x[:, :5], cache=cache)
    with pytest.raises(ValueError, match="room for 2 more tokens, got max_length 6 with 5 in use"):
        layer(x[:, 5:], cache=cache)
    assert cache.offset == 5
    assert_close(layer(x[:, 5:6], cache=cache), layer(x)[:, 5:6], terms=HEADS * HEAD_DIM)


@pytest.mark.parametrize("options", [{}, {"evict": True, "max_query_norm": 8.0}], ids=["all", "evicting"])
def test_a_refused_call_leaves_no_tokens_behind(options: dict[str, Any]) -> None:
    layer, x = layer_of(), normal(BATCH, 7, EMBED_DIM)
    cache, wrong = layer.make_cache(**options), mx.ones((3, 3), mx.bool_)
    for first in (slice(0, 5), slice(5, 7)):
        refused = x[:1, :2] if cache.offset == 0 else 9 * x[:, :2]  # of another batch size, while that is not decided
        with pytest.raises(ValueError, match="mask must"):
            layer(refused, cache=cache, mask=wrong)
        assert cache.offset == first.start
        decoded = layer(x[:, first], cache=cache)
        assert_close(decoded, layer(x)[:, first], terms=HEADS * HEAD_DIM)


def test_a_refused_call_sets_a_foreign_cache_back() -> None:
    layer, x, cache = layer_of(), normal(BATCH, 7, EMBED_DIM), ForeignCache()
    layer(x[:, :5], cache=cache)
    with pytest.raises(ValueError, match="mask must broadcast"):
        layer(x[:, 5:], cache=cache, mask=mx.ones((3, 3), mx.bool_))
    assert cache.offset == 5


def test_layer_refuses_caches_it_cannot_use() -> None:
    x = normal(BATCH, 5, EMBED_DIM)
    with pytest.raises(ValueError, match="cache must be None when is_causal=False"):
        layer_of(is_causal=False)(x, cache=KVCache())
    with pytest.raises(ValueError, match="cache must return every key in order"):
        layer_of()(x, cache=ForeignCache(size=3))
    with pytest.raises(TypeError, match="cache must have offset and update_and_fetch, as KVCache has, got list"):
        layer_of()(x, cache=[KVCache()])


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"evict": True}, ValueError, "max_query_norm must be given with evict=True"),
        ({"max_query_norm": 3.0}, ValueError, "max_query_norm must be None without evict=True, got 3.0"),
        ({"evict": 1, "max_query_norm": 3.0}, TypeError, "evict must be True or False"),
        ({"evict": True, "max_query_norm": -3.0}, ValueError, "max_query_norm must be positive"),
        ({"evict": True, "max_query_norm": math.nan}, ValueError, "max_query_norm must be finite"),
        ({"max_length": 0}, ValueError, "max_length must be at least 1, got 0"),
    ],
)
def test_a_layer_makes_no_cache_of(options: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=f"^{message}"):
        layer_of().make_cache(1, options.pop("max_length", 50), **options)
