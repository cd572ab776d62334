"""The caches of all backends: what they answer equals attention over every key, what they forget weighs nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import itertools
import math
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import alibi_core
from alibi_core.conformance.testing import UNIT_ROUNDOFF, Answer, Attention
from alibi_core.conformance.testing import assert_within_budget as assert_within
from tests.support.caches import Cache, evicting, keeping
from tests.support.frameworks import FRAMEWORK, NAMES
from tests.support.full import once_in_jax, without_jax
from tests.support.layers import cast, decode, make_layer

EAGER = [name for name in NAMES if name.id != "jax"]  # where a new shape costs no compilation
BATCH, HEADS, KV_HEADS, HEAD_DIM = 2, 4, 2, 5
SIZES = BATCH, KV_HEADS, 512, HEAD_DIM
SCALE = HEAD_DIM**-0.5
STEEP = (4.0, 2.5, 1.0, 0.7)
TOGETHER = (1.9, 1.9, 1.0, 1.0)  # heads that share their storage, and need not hold as much
MIXED = (1.0, 0.125, 0.0, 3.0)  # a head that keeps everything, and one that must for the other of its group
HALVES = (2.0, 2.0, 0.3, 0.3)


@pytest.fixture(autouse=True)
def _float64(request: pytest.FixtureRequest) -> Any:
    """MLX's device that has float64, and float64 in JAX where a test asks for it."""
    given, context = request.node.callspec.params, contextlib.nullcontext()
    if given.get("name") == "mlx":
        context = (xp := FRAMEWORK["mlx"].xp).stream(xp.cpu)
    if (given.get("name"), given.get("dtype")) == ("jax", "float64"):
        context = importlib.import_module("jax").enable_x64(True)
    with context:
        yield


def zeros(new: int, batch: int = BATCH, heads: int = KV_HEADS, head_dim: int = HEAD_DIM) -> tuple[Any, Any]:
    return np.zeros((batch, heads, new, head_dim)), np.zeros((batch, heads, new, head_dim))


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32).astype(np.float64)


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
    hidden: str | None = None

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
    def exact_slopes(self) -> np.ndarray:
        return np.asarray(self.slopes, np.float32).astype(np.float64)

    def tensors(self, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Query, key and value, rounded to the dtype as the framework has it.

        Queries have exactly the norm ``q_norm``, which one coordinate makes representable.
        """
        rng, index = np.random.default_rng(self.seed), np.arange(self.length)
        place = index / self.length
        sizes = {
            "zero": 0 * place,
            "equal": 0 * place + 2,
            "early giant": np.where(index == self.length // 7, 8.0, 0.25),
            "late giant": np.where(index == self.length - self.length // 7, 8.0, 0.25),
            "growing": 2.0 ** np.floor(8 * place - 5),
            "shrinking": 2.0 ** np.floor(3 - 8 * place),
            "any": rng.choice([0.0, 0.25, 2.0, 8.0], self.length),
        }[self.shape]
        signs = {
            "along": 0 * place + 1,
            "against": 0 * place - 1,
            "old along": np.where(place < 0.5, 1.0, -1.0),
            "by turns": np.where(index // 9 % 2, 1.0, -1.0),
            "any": rng.choice([-1.0, 1.0], self.length),
        }[self.sides]
        direction = np.eye(HEAD_DIM)[self.seed % HEAD_DIM]
        query = np.broadcast_to(direction * self.q_norm, (BATCH, HEADS, self.length, HEAD_DIM)).copy()
        query[1] *= rng.choice([-1.0, 1.0, 0.5, 0.0], (HEADS, self.length, 1))
        key = np.broadcast_to(direction * (sizes * signs)[:, None], (BATCH, KV_HEADS, self.length, HEAD_DIM))
        # Keys that do not all lie along a line, in the second entry.
        turned = rng.standard_normal((KV_HEADS, self.length, HEAD_DIM))
        turned *= (sizes / np.linalg.norm(turned, axis=-1))[..., None]
        key = np.stack([key[0], turned])
        key[:, 1] *= rng.choice([1.0, 0.25, 4.0])
        value = rng.standard_normal((BATCH, KV_HEADS, self.length, HEAD_DIM))
        framework = FRAMEWORK[name]
        query, key, value = (framework.numpy(framework.array(x, self.dtype)) for x in (query, key, value))
        return query, key, value

    @cached_property
    def ids(self) -> np.ndarray:
        return np.sort(np.random.default_rng(self.seed).integers(0, 3, (BATCH, self.length))).astype(np.int32)

    @cached_property
    def visible(self) -> np.ndarray:
        """What ``hidden`` leaves, ``[batch or 1, 1, length, length]``."""
        if self.hidden == "mask":
            return np.random.default_rng(self.seed).random((1, 1, self.length, self.length)) < 0.7
        if self.hidden == "segments":
            return self.ids[:, None, :, None] == self.ids[:, None, None, :]
        return np.ones((1, 1, 1, self.length), bool)

    def exact(self, name: str) -> Attention:
        """Return the attention of the whole sequence in float64."""
        distance = np.arange(self.length)[:, None] - np.arange(self.length)
        seen = (distance >= 0) & (distance <= (self.length if self.window_size is None else self.window_size))
        bias = np.where(seen & self.visible, -self.exact_slopes[:, None, None] * np.abs(distance), -np.inf)
        bias = np.broadcast_to(bias, (BATCH, HEADS, self.length, self.length))
        return Attention(*self.tensors(name), bias=bias, scale=SCALE, dtype=self.dtype)

    def evicting(self, name: str, max_length: int = SIZES[2], **options: Any) -> Cache:
        rules = {"window_size": self.window_size, "tolerance": self.tolerance}
        arguments = {"slopes": self.slopes, "max_query_norm": self.q_norm} | rules | options
        return evicting(name, (BATCH, KV_HEADS, max_length, HEAD_DIM), self.dtype, **arguments)


def leaving_out(exact: Attention, share: float) -> Answer:
    """Return the exact result with room for leaving out such a share of the weight."""
    largest = np.abs(exact.values).max(axis=(2, 3), keepdims=True)
    return Answer(exact.output.value, exact.output.budget + 2 * share * largest)


LONG = Stream((129, 1, 1, 129, 129))  # of few lengths, for some backends compile each
STREAMS = st.builds(
    Stream,
    steps=st.lists(st.sampled_from([1, 1, 2, 3, 9, 17, 40]), min_size=2, max_size=12).map(tuple),
    shape=st.sampled_from(["zero", "equal", "early giant", "late giant", "growing", "shrinking", "any"]),
    sides=st.sampled_from(["along", "against", "old along", "by turns", "any"]),
    slopes=st.sampled_from([STEEP, TOGETHER, MIXED, (0.01,) * 4, HALVES]),
    dtype=st.sampled_from(["float64", "float32", "float16", "bfloat16"]),
    window_size=st.sampled_from([None, None, None, 0, 5, 40]),
    tolerance=st.sampled_from([None, None, 0.0, 1e-3, 0.3, 1.0]),
    q_norm=st.sampled_from([0.25, 4.0]),
    seed=st.integers(0, 2**16),
    hidden=st.sampled_from([None, "mask", "segments"]),
)


# --- The cache that keeps everything -------------------------------------------------------------------------------


def check_attends(name: str, stream: Stream) -> None:
    query, key, value = stream.tensors(name)
    cache, outputs = keeping(name, (BATCH, KV_HEADS, max(512, stream.length + 5), HEAD_DIM), stream.dtype), []
    for part in stream.parts:
        cache.append(key[:, :, part], value[:, :, part])
        rules: dict[str, Any] = {"window_size": stream.window_size, "tolerance": stream.tolerance}
        if stream.hidden == "mask":
            rules["mask"] = stream.visible[:, :, part, : part.stop]
        if stream.hidden == "segments":
            rules["segment_ids"] = stream.ids[:, part], stream.ids[:, : part.stop]
        outputs.append(cache.attend(query[:, :, part], stream.slopes, **rules))
    assert cache.length == stream.length
    assert_within(np.concatenate(outputs, axis=2), leaving_out(stream.exact(name), stream.share))


ATTENDED = {
    "steps": LONG,
    "mask": Stream((1,) * 40, "early giant", hidden="mask", window_size=9),
    "blocks": Stream((129, 1, 129, 1, 129), "early giant", "along"),
    "segments": Stream((129, 1, 129, 1), slopes=MIXED, dtype="bfloat16", hidden="segments"),
    # No longer short: keys are planned for.
    "long": Stream((1100, 1, 40, 1), "early giant", "along", dtype="float16"),
}


@pytest.mark.parametrize(("name", "stream"), once_in_jax(NAMES, ATTENDED, keep=2))
def test_attend_is_attention_over_all_keys(name: str, stream: Stream) -> None:
    check_attends(name, stream)


@pytest.mark.parametrize("name", EAGER)
def test_attend_is_attention_over_all_keys_whatever_they_are(name: str) -> None:
    @given(STREAMS)
    def check(stream: Stream) -> None:
        check_attends(name, stream)

    check()


@pytest.mark.parametrize("name", without_jax(NAMES))
@pytest.mark.parametrize("q_len", [1, 40])
def test_attention_over_a_long_cache_finds_the_giant_among_its_keys(name: str, q_len: int) -> None:
    """A thousand tokens back, in the second sequence, is the one key that counts."""
    key, value = np.zeros((2, BATCH, 1, 3000, HEAD_DIM))
    key[1, 0, 1900, 0], value[1, 0, 1900] = 200.0, 1.0
    query = np.broadcast_to([50.0, 0, 0, 0, 0], (BATCH, 2, q_len, HEAD_DIM))
    cache, expected = keeping(name, (BATCH, 1, 3000, HEAD_DIM)), np.broadcast_to([[[[0.0]]], [[[1.0]]]], query.shape)
    for start in range(0, 3000, 1000):
        cache.append(key[:, :, start : start + 1000], value[:, :, start : start + 1000])
    assert np.array_equal(cache.attend(query, (1.0, 1.0)), expected)
    cache.truncate(2500)
    assert np.array_equal(cache.attend(query, (1.0, 1.0)), expected)


@pytest.mark.parametrize("name", without_jax(NAMES))
def test_attend_passes_on_what_it_is_given(name: str) -> None:
    query, key, value = LONG.tensors(name)
    framework, cache = FRAMEWORK[name], keeping(name, (BATCH, KV_HEADS, LONG.length, HEAD_DIM))
    cache.append(key, value)
    attention = importlib.import_module(f"alibi_{name}").attention
    rules: dict[str, Any] = {"scale": 0.3, "window_size": 20, "tolerance": 0.0, "implementation": "dense"}
    actual = cache.attend(query, **rules)
    expected = framework.numpy(attention(*map(cache.tensor, (query, key, value)), **rules))
    expected = np.swapaxes(expected, 1, 2) if cache.is_functional else expected
    np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-6)
    assert np.abs(actual - cache.attend(query, LONG.slopes, **rules)).max() > 1e-2


MAGNITUDES = {"float32": 1e30, "float16": 6e4, "bfloat16": 1e30, "float64": 1e200}


@pytest.mark.parametrize(("name", "dtype"), once_in_jax(NAMES, list(MAGNITUDES)))
@pytest.mark.parametrize("kind", ["normal", "huge", "tiny", "mixed", "one and many small"])
def test_key_norms_bound_the_keys_held_whatever_was_taken_back(name: str, dtype: str, kind: str) -> None:
    rng = np.random.default_rng(len(kind))
    head_dim, framework, held = 64, FRAMEWORK[name], np.zeros((1, 2, 0, 64))
    cache = keeping(name, (1, 2, 600, head_dim), dtype)
    size = {"huge": MAGNITUDES[dtype], "tiny": 2e-23}.get(kind, 1.0)
    for count, back in ((127, 0), (1, 0), (1, 1), (129, 60), (1, 0), (130, 0)):
        keys = rng.uniform(-1, 1, (1, 2, count, head_dim)) * size
        if kind == "mixed":
            keys *= 2.0 ** rng.integers(-12, 12, (1, 2, count, 1))
        if kind == "one and many small":  # whose squares, one by one, vanish beside the large one's
            keys = np.full(keys.shape, 0.999 * UNIT_ROUNDOFF[dtype] ** 0.5)
            keys[..., rng.integers(head_dim)] = 1
        keys = framework.numpy(framework.array(keys, dtype))
        cache.append(keys, keys)
        held = np.concatenate([held, keys], axis=2)
        exact = np.sqrt(np.square(held.astype(np.longdouble)).sum(axis=-1))
        rounding = 1 + (head_dim + 2) * 2.0**-23 if name == "jax" else 1  # whose bounds are rounded themselves
        for block, bound in enumerate(np.moveaxis(cache.key_norms, -1, 0)):
            largest = exact[:, :, 128 * block : 128 * (block + 1)].max(axis=-1)
            assert (largest <= rounding * bound).all()
            if kind == "normal" and held.shape[2] < 129:  # before anything was taken back
                assert (bound <= 1.001 * largest + 1e-15).all()  # and no looser than it must be
        held = held[:, :, : held.shape[2] - back]
        cache.truncate(held.shape[2])


@pytest.mark.parametrize("name", NAMES)
def test_norms_of_what_is_not_a_number_bound_nothing(name: str) -> None:
    key = np.ones((1, 1, 200, 4))
    key[0, 0, 150, 2] = np.nan
    cache = keeping(name, (1, 1, 300, 4))
    cache.append(key, key)
    assert np.isfinite(cache.key_norms[0, 0]).tolist() == [True, False]


@pytest.mark.parametrize(("name", "back"), once_in_jax(NAMES, [50, 0, 1, 389, 1000], keep=0))
def test_a_truncated_cache_goes_on_as_a_new_one_would(name: str, back: int) -> None:
    query, key, value = LONG.tensors(name)
    other = [x[:, :, ::-1] for x in (query, key, value)]
    used, new = (keeping(name, (BATCH, KV_HEADS, 800, HEAD_DIM)) for _ in range(2))
    used.append(key, 1e3 * value)
    held = max(LONG.length - back, 0)
    used.truncate(held)
    assert used.length == held
    used.truncate(LONG.length + 100)  # no more than there are
    assert used.length == held
    new.append(key[:, :, :held], 1e3 * value[:, :, :held])
    results = []
    for cache in (used, new):
        cache.append(*other[1:])
        results.append(cache.attend(other[0], LONG.slopes))
    np.testing.assert_allclose(*results, rtol=0, atol=2**-20 * 1e3 * np.abs(value).max())


# --- What both caches have ------------------------------------------------------------------------------------------

KINDS = pytest.mark.parametrize("evict", [False, True], ids=["keeping", "evicting"])


def either(name: str, evict: bool, max_length: int = 8, **options: Any) -> Cache:
    sizes = BATCH, KV_HEADS, max_length, HEAD_DIM
    rules = {"slopes": (0.0,) * 4, "max_query_norm": 4.0} | options
    return evicting(name, sizes, **rules) if evict else keeping(name, sizes)


@pytest.mark.parametrize(("name", "evict"), once_in_jax(NAMES, {"evicting": True, "keeping": False}))
def test_sequences_are_chosen_repeated_and_reordered(name: str, evict: bool) -> None:
    """As beam search does; another number of them may be asked for."""
    stream = Stream((20, 9, 1), slopes=TOGETHER, shape="equal")
    query, key, value = stream.tensors(name)
    indices = [1, 1, 0]
    cache = either(name, evict, 60, slopes=TOGETHER)
    for part in stream.parts[:2]:
        cache.append(key[:, :, part], value[:, :, part])
    cache.select_batch(indices)
    last = stream.parts[2]
    cache.append(*(x[indices][:, :, last] for x in (key, value)))
    assert cache.length == 30
    expected = leaving_out(stream.exact(name), stream.share)
    expected = Answer(expected.value[indices][:, :, last], expected.budget[indices][:, :, last])
    assert_within(cache.attend(query[indices][:, :, last], None if evict else TOGETHER), expected)
    assert "batch_size=3, " in repr(cache.inner)


@dataclass
class Rows:
    """A cache whose rows hold different numbers of tokens, and what each holds."""

    cache: Cache
    keys: list[np.ndarray]
    values: list[np.ndarray]
    seed: int = 0

    @classmethod
    def of(cls, name: str, batch: int, max_length: int) -> Rows:
        nothing = [np.zeros((KV_HEADS, 0, HEAD_DIM))] * batch
        return cls(keeping(name, (batch, KV_HEADS, max_length, HEAD_DIM)), list(nothing), list(nothing))

    def step(self, new: int, counts: list[int] | None = None, **rules: Any) -> None:
        """Append tokens, of which ``counts`` count, and compare what their queries find with each row alone."""
        batch, self.seed = len(self.keys), self.seed + 3
        query, key, value = (
            normal(batch, heads, new, HEAD_DIM, seed=self.seed + i)
            for i, heads in enumerate((HEADS, KV_HEADS, KV_HEADS))
        )
        lengths = None if counts is None else np.asarray(counts, np.int32)
        self.cache.append(key, value, lengths)
        found = self.cache.attend(query, STEEP, **({} if lengths is None else {"lengths": lengths}), **rules)
        for row, count in enumerate([new] * batch if counts is None else counts):
            self.keys[row] = np.concatenate([self.keys[row], key[row, :, :count]], axis=1)
            self.values[row] = np.concatenate([self.values[row], value[row, :, :count]], axis=1)
            if count:
                tensors = query[row : row + 1, :, :count], self.keys[row][None], self.values[row][None]
                bias = alibi_core.bias(np.asarray(STEEP), count, tensors[1].shape[2])
                bias = np.where(
                    bias < -rules.get("window_size", 2**20) * np.asarray(STEEP)[:, None, None], -np.inf, bias
                )
                exact = Attention(*tensors, bias=bias[None], scale=SCALE, dtype="float32")
                assert_within(found[row : row + 1, :, :count], leaving_out(exact, UNIT_ROUNDOFF["float32"]))
        for bounds, held_keys in zip(self.cache.key_norms, self.keys, strict=True):
            by_token = np.repeat(bounds, 128, axis=-1)[:, : held_keys.shape[1]]
            assert not np.any(by_token < np.linalg.norm(held_keys, axis=-1))  # NaN bounds nothing
        held = [x.shape[1] for x in self.keys]
        assert np.broadcast_to(self.cache.lengths, batch).tolist() == held
        assert self.cache.length == max(held)


@pytest.mark.parametrize("name", without_jax(NAMES))
def test_rows_may_have_lengths_of_their_own(name: str) -> None:
    rows = Rows.of(name, 3, 150)
    rows.step(130, [130, 0, 7])  # one beyond a block of norms
    rows.step(1)
    rows.step(3, [1, 3, 0], window_size=4)
    rows.cache.truncate(5)
    rows.keys, rows.values = ([x[:, :5] for x in y] for y in (rows.keys, rows.values))
    rows.cache.select_batch([2, 1, 2])
    rows.keys, rows.values = ([y[2], y[1], y[2]] for y in (rows.keys, rows.values))
    rows.step(1)
    rows.cache.truncate(rows.cache.framework.array(np.asarray([0, 4, 9], np.int32)))
    rows.keys, rows.values = ([x[:, :n] for x, n in zip(y, (0, 4, 9), strict=True)] for y in (rows.keys, rows.values))
    rows.step(3)
    later = Rows.of(name, 3, 150)
    later.step(1)  # of one length at first
    later.step(3, [0, 2, 1])  # which no row fills
    later.step(1)


@pytest.mark.parametrize("name", without_jax(NAMES))
@pytest.mark.parametrize("back", ["all rows", "each row"])
def test_nothing_is_left_of_forgotten_tokens_that_were_not_finite(name: str, back: str) -> None:
    rows, nan = Rows.of(name, 2, 20), np.full((2, KV_HEADS, 3, HEAD_DIM), np.nan)
    if back == "all rows":
        rows.step(4)
        rows.cache.append(nan, nan)
        rows.cache.truncate(4)
    else:
        rows.step(9, [4, 9])
        rows.cache.append(nan, nan, np.asarray([3, 0], np.int32))
        rows.cache.truncate(rows.cache.framework.array(np.asarray([4, 9], np.int32)))
    rows.step(3, [1, 3])


@pytest.mark.parametrize("name", without_jax(NAMES))
@pytest.mark.parametrize("of", ["keys", "values"])
def test_nothing_is_left_in_an_evicting_cache_either(name: str, of: str) -> None:
    cache, key, query = either(name, True), normal(BATCH, KV_HEADS, 4, HEAD_DIM), normal(BATCH, HEADS, 1, HEAD_DIM)
    cache.append(key[:, :, :3], key[:, :, :3])
    right = cache.attend(query)
    bad = np.full((BATCH, KV_HEADS, 2, HEAD_DIM), np.inf)
    cache.append(*((bad, key[:, :, :2]) if of == "keys" else (key[:, :, :2], bad)))
    cache.truncate(3)
    np.testing.assert_array_equal(cache.attend(query), right)


@pytest.mark.parametrize("name", NAMES)
def test_lengths_of_rows_are_refused(name: str) -> None:
    cache = keeping(name, (2, KV_HEADS, 4, HEAD_DIM))
    for lengths, error, message in (
        (np.asarray([1, 4], np.int32), ValueError, r"lengths must be from 0 to the number of tokens, 3, got \[1, 4\]"),
        (np.asarray([1, -1], np.int32), ValueError, "lengths must be from 0 to the number of tokens, 3"),
        (np.asarray([1], np.int32), ValueError, r"lengths must have shape \(2,\) \(batch_size\), got \(1,\)"),
        (np.asarray([1.0, 2.0]), TypeError, "lengths must have an integer dtype"),
    ):
        with pytest.raises(error, match=f"^{message}"):
            cache.append(*zeros(3), lengths)
    cache.append(*zeros(3), np.asarray([3, 1], np.int32))
    with pytest.raises(ValueError, match=r"^length must have shape \(2,\)"):
        cache.truncate(cache.framework.array(np.ones(3, np.int32)))
    with pytest.raises(TypeError, match="^length must have an integer dtype"):
        cache.truncate(cache.framework.array(np.ones(2)))
    with pytest.raises(ValueError, match="^cache must have room for 2 more tokens"):
        cache.append(*zeros(2))
    cache.append(*zeros(2), np.asarray([1, 2], np.int32))
    assert cache.lengths == [4, 3]
    with pytest.raises(TypeError, match="KVCache takes it: give lengths"):
        evicting(name, (2, KV_HEADS, 4, HEAD_DIM), slopes=STEEP, max_query_norm=1.0).append(
            *zeros(3), np.asarray([1, 2], np.int32)
        )


@pytest.mark.parametrize("name", NAMES)
@KINDS
def test_a_cache_says_what_it_is(name: str, evict: bool) -> None:
    cache = either(name, evict)
    cache.append(*zeros(3))
    shown = repr(cache.inner)
    kind = "EvictingKVCache" if evict else "KVCache"
    sizes = f"batch_size={BATCH}, num_kv_heads={KV_HEADS}, head_dim={HEAD_DIM}, length=3, max_length=8"
    assert re.fullmatch(rf"{kind}\({sizes}, nbytes={cache.inner.nbytes}\)", shown), shown
    assert cache.inner.nbytes == 2 * BATCH * KV_HEADS * 8 * HEAD_DIM * 4


@pytest.mark.parametrize("name", NAMES)
@KINDS
def test_an_unknown_implementation_or_rule_is_refused(name: str, evict: bool) -> None:
    cache = either(name, evict)
    cache.append(*zeros(3))
    with pytest.raises(ValueError, match="implementation must be one of .*, got 'fast'"):
        cache.attend(zeros(3, heads=HEADS)[0], implementation="fast")
    with pytest.raises(TypeError, match="sinks"):
        cache.attend(zeros(3, heads=HEADS)[0], sinks=1)


@pytest.mark.parametrize("name", NAMES)
@KINDS
@pytest.mark.parametrize("indices", [[0.0], [True], [0, BATCH], [-BATCH - 1]], ids=str)
def test_sequences_that_there_are_not_cannot_be_selected(name: str, evict: bool, indices: list[Any]) -> None:
    cache = either(name, evict)
    cache.append(*zeros(3))
    given = FRAMEWORK[name].array(np.asarray(indices, np.asarray(indices).dtype.name.replace("64", "32")))
    rule = "have an integer dtype" if type(indices[0]) is not int else f"be those of sequences, .* {BATCH}, got"
    with pytest.raises((TypeError, IndexError), match=f"^indices must {rule}"):
        cache.inner.select_batch(given)
    cache.select_batch([1, 0, 0])
    assert cache.attend(normal(3, HEADS, 1, HEAD_DIM)).shape[0] == 3


@pytest.mark.parametrize("name", NAMES)
@KINDS
@pytest.mark.parametrize("dtype", [np.int32, np.uint8])
def test_sequences_are_counted_from_either_end_by_any_integers(name: str, evict: bool, dtype: Any) -> None:
    cache, key, query = either(name, evict), normal(BATCH, KV_HEADS, 3, HEAD_DIM), normal(2, HEADS, 1, HEAD_DIM)
    cache.append(key, key)
    cache.select_batch([BATCH - 1 if dtype is np.uint8 else -1, 0], dtype)
    expected = either(name, evict)
    expected.append(key, key)
    expected.select_batch([BATCH - 1, 0])
    np.testing.assert_array_equal(cache.attend(query), expected.attend(query))


@pytest.mark.parametrize("name", NAMES)
@KINDS
def test_more_queries_than_tokens_are_refused(name: str, evict: bool) -> None:
    cache = either(name, evict)
    with pytest.raises(ValueError, match="cache must hold the tokens that query is of, got an empty one; see append"):
        cache.attend(zeros(1, heads=HEADS)[0])
    cache.append(*zeros(2))
    with pytest.raises(ValueError, match="query must be of the 2 last tokens, whose keys are all held, got q_len 3"):
        cache.attend(zeros(3, heads=HEADS)[0])


@pytest.mark.parametrize("name", NAMES)
@KINDS
@pytest.mark.parametrize("length", [-1, -300, 1.5, None, True])
def test_a_length_that_is_none_is_refused(name: str, evict: bool, length: Any) -> None:
    cache = either(name, evict)
    cache.append(*zeros(3))
    with pytest.raises((TypeError, ValueError), match=r"^length must (not be negative|be an integer), got"):
        cache.truncate(length)
    assert cache.length == 3


@pytest.mark.parametrize("name", NAMES)
@KINDS
def test_sizes_may_be_small_numpy_integers_and_must_be_sizes(name: str, evict: bool) -> None:
    make = keeping if not evict else lambda *x: evicting(*x, slopes=STEEP, max_query_norm=4.0)
    cache = make(name, tuple(np.uint8(n) for n in (BATCH, KV_HEADS, 200, HEAD_DIM)))
    cache.append(*zeros(200))
    assert cache.length == cache.inner.max_length == 200
    for index, axis in enumerate(("batch_size", "num_kv_heads", "max_length", "head_dim")):
        if name == "mlx" and axis in ("num_kv_heads", "head_dim"):
            continue  # it takes them from the first keys
        for size, error, rule in ((0, ValueError, "be at least 1, got 0"), (2.5, TypeError, "be an integer, got 2.5")):
            with pytest.raises(error, match=f"^{axis} must {rule}"):
                make(name, (*SIZES[:index], size, *SIZES[index + 1 :]))


@pytest.mark.parametrize("name", NAMES)
@KINDS
@pytest.mark.parametrize(
    ("key", "error", "message"),
    [
        ([0.0], TypeError, "key must be an array of four axes, got list"),
        (zeros(2)[0][0], TypeError, "key must be an array of four axes, got"),
        ("numpy", TypeError, "arrays must belong to one array namespace, got"),
        ("integers", TypeError, "key must have a real floating dtype"),
        ("float16", ValueError, "key must be .*float32 as the cache is, got .*float16"),
        (zeros(2, batch=3)[0], ValueError, r"key must have shape .*\(batch, .* to fit the cache, got \(3, "),
        (zeros(2, heads=HEADS)[0], ValueError, "key must have shape"),
        (zeros(2, head_dim=6)[0], ValueError, "key must have shape"),
        (zeros(5)[0], ValueError, "cache must have room for 5 more tokens, got max_length 8 with 4 in use; make it"),
    ],
    ids=["list", "axes", "numpy", "integers", "float16", "batch", "heads", "head_dim", "room"],
)
def test_a_refused_token_is_not_half_written(name: str, evict: bool, key: Any, error: type, message: str) -> None:
    framework, cache = FRAMEWORK[name], either(name, evict)
    held, query = normal(BATCH, KV_HEADS, 4, HEAD_DIM), normal(BATCH, HEADS, 1, HEAD_DIM) / 4
    cache.append(held, held)
    expected, before = cache.attend(query, (0.0,) * 4), cache.inner.nbytes
    if isinstance(key, str):
        rows = np.zeros((BATCH, 2, 2, HEAD_DIM), np.float32)
        others = {"numpy": rows, "integers": framework.array(rows.astype(np.int32))}
        key = others[key] if key in others else framework.array(rows, key)
    with pytest.raises(error, match=message):
        cache.append(key, key)
    if error is ValueError and "room" not in message:
        with pytest.raises(ValueError, match="value must "):
            cache.append(zeros(2)[0], key)
    assert (cache.length, cache.inner.nbytes) == (4, before)
    assert np.array_equal(cache.attend(query, (0.0,) * 4), expected)


# --- The cache that forgets ----------------------------------------------------------------------------------------


def dropped_share(cache: Cache, exact: Attention, part: slice) -> np.ndarray:
    """Return the weight of what the heads do not hold, ``[batch, num_heads, q_len]``."""
    first = [part.stop - cache.kept[head // (HEADS // KV_HEADS)] for head in range(HEADS)]
    weights = exact.weights[:, :, part]
    return np.stack([weights[:, head, :, : first[head]].sum(axis=-1) for head in range(HEADS)], axis=1)


def check_drops(name: str, stream: Stream, room: int, max_length: int = SIZES[2]) -> None:
    query, key, value = stream.tensors(name)
    cache, exact, outputs = stream.evicting(name, max_length, room=room), stream.exact(name), []
    for part in stream.parts:
        cache.append(key[:, :, part], value[:, :, part])
        assert all(part.stop - part.start <= kept <= part.stop for kept in cache.kept)
        assert (dropped_share(cache, exact, part) <= stream.share / 2 * (1 + 1e-9)).all()
        outputs.append(cache.attend(query[:, :, part]))
    assert cache.length == stream.length
    assert_within(np.concatenate(outputs, axis=2), leaving_out(exact, stream.share))


# With as few slots as do, so that there are keys to drop where slots are fixed.
DROPPING = {
    "growing": (Stream((1,) * 90, "growing", "old along", q_norm=1.0), 60),
    "window": (Stream((9,) * 12, window_size=0), 20),
    "giant": (Stream((2,) * 55, "early giant", "along", q_norm=1.0), 80),
    "prompt": (Stream((50,) + (1,) * 40, "equal", "old along", tolerance=0.3), 51),
    "parts": (Stream((50, 40, 30), "equal", "old along", tolerance=1.0), 92),
    "endless": (Stream((1,) * 90, "zero", tolerance=1.0, slopes=MIXED), 90),
    "together": (Stream((60, 1, 30, 1), slopes=TOGETHER, shape="equal", sides="old along"), 78),
    "turned": (Stream((40, 40, 1), slopes=TOGETHER, shape="equal", sides="old along", seed=2), 90),
}


@pytest.mark.parametrize(("name", "stream", "max_length"), once_in_jax(NAMES, DROPPING))
def test_what_is_dropped_weighs_no_more_than_the_tolerance(name: str, stream: Stream, max_length: int) -> None:
    check_drops(name, stream, 1, max_length)


@pytest.mark.parametrize("name", EAGER)
def test_what_is_dropped_weighs_no_more_than_the_tolerance_whatever_it_is(name: str) -> None:
    @given(STREAMS, st.sampled_from([1, 7, 64]))
    def check(stream: Stream, room: int) -> None:
        check_drops(name, dataclasses.replace(stream, hidden=None), room)

    check()


WORST = itertools.product([2.0, 4.0], [2.0**-6, 0.5, 2.0**-24], [-1e-3, 0.1])


@pytest.mark.parametrize(("name", "slope", "tolerance", "missed"), once_in_jax(NAMES, WORST))
def test_the_bound_is_met_by_the_worst_keys_there_are(name: str, slope: float, tolerance: float, missed: float) -> None:
    """Old keys along the query, the last ones against it, and the query's own further still: nothing can be worse."""
    allowed = tolerance / 2
    needed, last = 48 / slope + missed, int(48 / slope)  # tokens: what the bound says, and how many are against
    score_range = slope * needed + math.log(allowed * -math.expm1(-slope))
    q_norm, old = 8.0, 50
    size = score_range / (2 * SCALE * q_norm)
    sizes = np.asarray([size] * old + [-size] * last + [-1e3 * size])
    keys = (sizes[:, None] * np.eye(HEAD_DIM)[0])[None, None]
    options = {"tolerance": tolerance, "max_query_norm": q_norm, "slopes": (slope,)}
    dtype = "float32" if name == "jax" else "float64"
    cache = evicting(name, (1, 1, old + last, HEAD_DIM), dtype, **options)
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
    query = np.asarray([[[[q_norm, 0, 0, 0, 0]]]])
    rounding = 2.0**-20 * 1e3 * size if name == "jax" else 0
    assert abs(cache.attend(query)[0, 0, 0, 0] - weights @ sizes) <= 2 * tolerance * 1e3 * size + rounding


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("entry", "head"), [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_the_largest_key_counts_whichever_sequence_and_head_it_is_in(name: str, entry: int, head: int) -> None:
    options = {"slopes": (1.0, 1.0), "max_query_norm": 4.0, "tolerance": 2.0**-23}
    cache = evicting(name, (2, 2, 59, HEAD_DIM), room=1, **options)
    keys = np.zeros((2, 2, 60, HEAD_DIM))
    keys[entry, head, 5, 2] = 5.0
    for i in range(60):
        cache.append(keys[:, :, i : i + 1], keys[:, :, i : i + 1])
    need = 2 * SCALE * 4.0 * 5.0 - math.log(2.0**-24 * -math.expm1(-1.0))
    assert cache.kept[head] >= math.ceil(need) + 1
    assert max(cache.kept) < 60


@pytest.mark.parametrize("name", NAMES)
def test_keys_too_small_to_be_squared_are_not_taken_for_zeros(name: str) -> None:
    sizes = np.asarray([2e-23] * 40 + [-2e-23] * 30)
    keys = (sizes[:, None] * np.eye(HEAD_DIM)[0])[None, None]
    cache = evicting(name, (1, 1, 69, HEAD_DIM), slopes=(1.0,), max_query_norm=1e25, room=1)
    for i in range(69):
        cache.append(keys[:, :, i : i + 1], keys[:, :, i : i + 1])
    # Scores lie between -100 and 100: the first keys outweigh the last, 70 tokens of slope 1 or not.
    with pytest.raises(ValueError, match="room for 1 more tokens, got max_length 69 with 69 in use"):
        cache.append(keys[:, :, 69:], keys[:, :, 69:])
    assert cache.kept == [69]


@pytest.mark.parametrize("name", EAGER)
def test_after_an_infinite_key_nothing_is_dropped(name: str) -> None:
    cache, key = evicting(name, (1, 1, 300, 4), slopes=(1.0,), max_query_norm=1.0, room=1), np.zeros((1, 1, 50, 4))
    key[0, 0, 3, 1] = math.inf
    for _ in range(4):
        cache.append(key, key)
    assert cache.kept == [200]


@pytest.mark.parametrize("name", without_jax(NAMES))
def test_heads_drop_what_they_do_not_need_over_hundreds_of_steps(name: str) -> None:
    slopes, steps = (2.0, 2.0, 0.5, 0.5, 0.125, 0.125, 0.0, 1.0), 600
    options = {"slopes": slopes, "max_query_norm": 2.0, "max_key_norm": 1.0}
    cache = evicting(name, (1, 4, steps, 8), **options)
    key, value, query = (normal(1, heads, steps, 8, seed=seed) for seed, heads in enumerate((4, 4, 8)))
    key = 0.9999 * key / np.linalg.norm(key, axis=-1, keepdims=True)
    query = 1.999 * query / np.linalg.norm(query, axis=-1, keepdims=True)
    score_range = 2 * 8**-0.5 * 2.0 * (1 + 1e-4)
    whole = keeping(name, (1, 4, steps, 8))
    largest, memory = [0] * 4, []
    for step in range(steps):
        one = slice(step, step + 1)
        cache.append(key[:, :, one], value[:, :, one])
        largest = [max(pair) for pair in zip(largest, cache.kept, strict=True)]
        if step % 200 == 199:
            memory.append(cache.inner.nbytes)
            whole.append(key[:, :, step - 199 : step + 1], value[:, :, step - 199 : step + 1])
            expected = whole.attend(query[:, :, one], slopes, tolerance=0.0)
            np.testing.assert_allclose(cache.attend(query[:, :, one], slopes), expected, rtol=0, atol=1e-5)
    for slope, kept in zip((2.0, 0.5, 0.125), largest, strict=False):
        need = math.ceil((score_range - math.log(2.0**-25 * -math.expm1(-slope))) / slope) + 1
        assert need <= kept <= need + 2 + max(64, need // 4 + 1)
    assert largest[3] == cache.kept[3] == steps  # a slope of 0 never lets go
    endless = 2 * 8 * 4  # bytes a token of the head that does
    assert all(used <= 1.25 * steps * endless + 3 * endless * 450 for used in memory)
    assert cache.length == steps


@pytest.mark.parametrize("name", EAGER)  # JAX's slots are as many as they were made
def test_memory_shrinks_after_a_long_prompt(name: str) -> None:
    cache = evicting(name, (1, 1, 9000, 8), slopes=(1.0,), max_query_norm=1.0)
    cache.append(*zeros(5000, 1, 1, 8))
    before = cache.inner.nbytes
    assert cache.kept == [5000]
    cache.append(*zeros(1, 1, 1, 8))
    assert cache.kept[0] < 30
    assert cache.inner.nbytes < before / 20


@pytest.mark.parametrize("name", NAMES)
def test_no_head_ever_holds_more_than_max_length(name: str) -> None:
    cache = evicting(name, (BATCH, 2, 20, HEAD_DIM), slopes=(8.0, 1.0), max_query_norm=1.0)
    for _ in range(100):
        cache.append(*zeros(1))
        assert max(cache.kept) <= cache.inner.max_length == 20
        assert cache.inner.nbytes <= 2 * BATCH * 2 * 20 * HEAD_DIM * 4


@pytest.mark.parametrize("name", NAMES)
def test_a_full_cache_refuses_and_stays_as_it_was(name: str) -> None:
    cache = evicting(name, (BATCH, 2, 20, HEAD_DIM), slopes=(8.0, 0.0), max_query_norm=1.0)
    with pytest.raises(ValueError, match="cache must have room for 21 more tokens, got max_length 20 with 0 in use"):
        cache.append(*zeros(21))
    cache.append(*zeros(18))
    kept = cache.kept
    with pytest.raises(ValueError, match="cache must have room for 3 more tokens, got max_length 20 with 18 in use"):
        cache.append(*zeros(3))
    assert (cache.length, cache.kept) == (18, kept)
    cache.append(*zeros(2))
    assert cache.length == 20


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_query_norm": 0.0}, ValueError, "max_query_norm must be positive"),
        ({"max_query_norm": -1.0}, ValueError, "max_query_norm must be positive"),
        ({"max_query_norm": math.nan}, ValueError, "max_query_norm must be finite"),
        ({"max_query_norm": math.inf}, ValueError, "max_query_norm must be finite"),
        ({"max_query_norm": "8"}, TypeError, "max_query_norm must be a real number"),
        ({"tolerance": -1e-3}, ValueError, "tolerance must not be negative"),
        ({"tolerance": math.nan}, ValueError, "tolerance must be finite"),
        ({"scale": math.nan}, ValueError, "scale must be finite"),
        ({"window_size": -1}, ValueError, "window_size must not be negative"),
        ({"window_size": 1.0}, TypeError, "window_size must be an integer"),
        ({"slopes": ((1.0,) * 4,) * 2}, TypeError, "slopes must be .* of one axis"),
        ({"slopes": 4}, TypeError, "slopes must be .* of one axis, got 4"),
        ({"slopes": (-1.0,) * 4}, ValueError, "slopes must not be negative"),
        ({"slopes": (math.nan,) * 4}, ValueError, "slopes must be finite"),
        ({"slopes": (1, 1, 1, 1)}, TypeError, "slopes must have a real floating dtype"),
        ({"slopes": (1.0,) * 3}, ValueError, "num_kv_heads must divide num_heads"),
    ],
    ids=str,
)
def test_an_evicting_cache_is_not_made_of(name: str, options: dict[str, Any], error: type, message: str) -> None:
    def made() -> None:
        cache = evicting(name, SIZES, **{"slopes": (1.0,) * 4, "max_query_norm": 8.0} | options)
        cache.append(*zeros(1))  # where MLX comes to know how many heads there are

    with pytest.raises(error, match=f"^{message}"):
        made()


def held(name: str) -> Cache:
    """Return a cache that has dropped tokens, with 3 more since."""
    cache = LONG.evicting(name, max_length=200)
    cache.append(*zeros(200))
    cache.append(*zeros(3))
    assert cache.length == 203
    assert max(cache.kept) < 100
    return cache


def a_query(**changes: Any) -> np.ndarray:
    return np.zeros(tuple(({"batch": BATCH, "heads": HEADS, "q_len": 3, "head_dim": HEAD_DIM} | changes).values()))


TOO_LONG = r"query must have norms of at most max_query_norm, 4, for which keys are kept, got .*; make the cache with"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("query", "arguments", "error", "message"),
    [
        (a_query(batch=3), {}, ValueError, "key must have the batch axes of query"),
        (a_query(heads=8), {}, ValueError, r"(query must have 4 heads, as many as|slopes must have shape)"),
        (a_query(head_dim=6), {}, ValueError, "key must have the head_dim of query"),
        (a_query(q_len=4), {}, ValueError, "query must be of the 3 last tokens, whose keys are all held, got q_len 4"),
        (a_query().astype(np.float16), {}, TypeError, "(arrays must belong to one|query, key and value must)"),
        ([0.0], {}, TypeError, "query must be an array"),
        (a_query(), {"mask": np.ones((3, 203), bool)}, ValueError, "mask must be None"),
        (a_query(), {"segment_ids": (np.zeros(3), np.zeros(203))}, ValueError, "segment_ids must be None"),
        (a_query(), {"slopes": (1.0,) * 4}, ValueError, "slopes must be those that the cache was made for"),
        (a_query(), {"slopes": (1.0,) * 3}, ValueError, "slopes must have shape"),
        (a_query(), {"slopes": 4}, ValueError, "slopes must be those that the cache was made for"),
        (a_query(), {"window_size": 3}, ValueError, "window_size must be what the cache was made for, None, got 3"),
        (a_query(), {"scale": 0.3}, ValueError, "scale must be what the cache was made for, 0.447.*, got 0.3"),
        (a_query(), {"tolerance": 0.3}, ValueError, "tolerance must be what the cache was made for, .*, got 0.3"),
        (a_query() + 1.8, {}, ValueError, TOO_LONG),
        (a_query() + 1e30, {}, ValueError, TOO_LONG),
        (a_query() + math.nan, {}, ValueError, TOO_LONG),
    ],
)
def test_an_evicting_cache_does_not_attend_to(
    name: str, query: Any, arguments: dict[str, Any], error: type, message: str
) -> None:
    cache = held(name)
    with pytest.raises(error, match=f"^{message}"):
        cache.attend(query, **arguments)
    allowed = a_query() + np.asarray([4.0, 0, 0, 0, 0])  # of norm 4 exactly
    assert not cache.attend(allowed, LONG.slopes, scale=SCALE, tolerance=2.0**-24).any()  # all values are zeros


@pytest.mark.parametrize("name", without_jax(NAMES))
def test_truncation_stops_where_keys_were_dropped(name: str) -> None:
    query, key, value = LONG.tensors(name)
    cache = LONG.evicting(name, max_length=300)
    for part in (slice(0, 300), slice(300, 320)):
        cache.append(key[:, :, part], value[:, :, part])
    cache.truncate(500)
    assert cache.length == 320
    cache.truncate(305)
    assert cache.length == 305
    with pytest.raises(ValueError, match="length must be at least 300, before which keys were dropped, got 299"):
        cache.truncate(299)
    assert cache.length == 305
    cache.append(key[:, :, 305:], value[:, :, 305:])
    answer = leaving_out(LONG.exact(name), LONG.share)
    assert_within(cache.attend(query[:, :, 305:]), Answer(answer.value[:, :, 305:], answer.budget[:, :, 305:]))


@pytest.mark.parametrize("name", without_jax(NAMES))
@pytest.mark.parametrize("seed", range(6))
def test_truncation_and_repetition_leave_the_proof_standing(name: str, seed: int) -> None:
    """Whatever is appended, taken back and appended again, weights are those of the sequence as it is in the end."""
    rng = np.random.default_rng(seed)
    stream = LONG if seed % 2 else dataclasses.replace(LONG, sides="old along", shape="equal")
    _, key, value = stream.tensors(name)
    cache = stream.evicting(name, max_length=160, room=1)
    while cache.length < 120:
        before, count, junk = cache.length, int(rng.choice([1, 3, 30])), rng.choice([0.0, 1.0, 30.0])
        if junk:
            keys = junk * normal(BATCH, KV_HEADS, count, HEAD_DIM)
            cache.append(keys, keys)
            cache.truncate(before)
            assert cache.length == before
        part = slice(before, before + count)
        cache.append(key[:, :, part], value[:, :, part])
    assert (dropped_share(cache, stream.exact(name), part) <= stream.share / 2 * (1 + 1e-9)).all()


# --- Layers ---------------------------------------------------------------------------------------------------------

STEEP_LAYER = {"embed_dim": 32, "num_heads": 4, "slopes": np.asarray([2.0, 1.0, 0.5, 0.7], np.float32)}


EVICTING_LAYERS = {
    "mixed": {"slopes": [1.0, 3.0, 2.5, 1.2]},  # in two groups, neither order its own inverse
    "grouped": {"num_kv_heads": 2, "window_size": 30},
    "learnable": {"learnable_slopes": True},
}


@pytest.mark.parametrize(("name", "configuration"), once_in_jax(NAMES, EVICTING_LAYERS, keep=0))
def test_a_layer_that_evicts_decodes_what_it_prefills(name: str, configuration: dict[str, Any]) -> None:
    options = STEEP_LAYER | configuration
    layer = make_layer(name, **options | {"slopes": np.asarray(options["slopes"], np.float32)})
    x, steps = normal(2, 180, 32).astype(np.float32), [100, *[1] * 80]
    cache = layer.make_cache(2, 150, evict=True, max_query_norm=8.0)
    found, cache = decode(name, layer, x, cache, steps)
    framework = FRAMEWORK[name]
    expected = framework.numpy(layer(framework.array(x)))
    np.testing.assert_allclose(found, expected, rtol=0, atol=4e-6 * max(1, np.abs(expected).max()))
    assert cache.length == 180
    assert max(cache.kept) < 150


@pytest.mark.parametrize("name", EAGER)
@pytest.mark.parametrize("bad", [math.nan, 1e4])
def test_a_token_that_a_layer_refuses_leaves_the_cache_as_it_was(name: str, bad: float) -> None:
    framework, layer = FRAMEWORK[name], make_layer(name, **STEEP_LAYER)
    tried, spared = (layer.make_cache(2, 500, evict=True, max_query_norm=8.0) for _ in range(2))
    for i, token in enumerate(np.split(normal(2, 500, 32), 100, axis=1)):
        if i == 50:
            tried._looks_next = spared._looks_next = True  # MLX reads norms where it makes room
            with pytest.raises(ValueError, match="query must have norms of at most max_query_norm, 8, "):
                layer(framework.array(token * bad), cache=tried)
            assert tried.length == 250
        results = [framework.numpy(layer(framework.array(token), cache=cache)) for cache in (tried, spared)]
        assert np.array_equal(*results)
    # Keys of a size that never came to be held do not widen the horizons for good, either.
    assert tried.kept == spared.kept
    assert max(tried.kept) < 200


@pytest.mark.parametrize("name", EAGER)
@pytest.mark.parametrize("change", ["of the array given", "in place", "learnt"])
def test_slopes_that_changed_since_are_refused(name: str, change: str) -> None:
    given, x = (FRAMEWORK[name].array(values) for values in (STEEP_LAYER["slopes"], normal(1, 3, 32)))
    layer = make_layer(name, **STEEP_LAYER | {"slopes": given, "learnable_slopes": change == "learnt"})
    cache = layer.make_cache(1, 50, evict=True, max_query_norm=100.0)
    layer(x, cache=cache)
    if change == "of the array given":
        given[1] = 3.0
        assert layer(x, cache=cache).shape == x.shape
        return
    slopes = layer.log_slopes if change == "learnt" else layer.slopes
    (slopes.detach() if name == "torch" else slopes)[1] = 0.25
    with pytest.raises(ValueError, match="slopes must be those that the cache was made for; make a new one"):
        layer(x, cache=cache)
    assert cache.length == 3


@pytest.mark.parametrize("name", EAGER)
def test_a_cast_layer_needs_a_new_cache(name: str) -> None:
    layer, array = make_layer(name, **STEEP_LAYER), FRAMEWORK[name].array
    cache, x = layer.make_cache(1, 50, evict=True, max_query_norm=100.0), array(normal(1, 3, 32), "bfloat16")
    layer(array(normal(1, 3, 32)), cache=cache)
    cast(name, layer, "bfloat16")
    with pytest.raises(ValueError, match=r"^key must be \S*float32 as the cache is, got \S*bfloat16"):
        layer(x, cache=cache)
    assert layer(x, cache=layer.make_cache(1, 50, evict=True, max_query_norm=100.0)).dtype == x.dtype


@pytest.mark.parametrize("name", without_jax(NAMES))
def test_a_layer_decodes_what_it_prefills_beyond_what_is_short(name: str) -> None:
    layer = make_layer(name, embed_dim=32, num_heads=4, num_kv_heads=2)
    x = normal(2, 1164, 32).astype(np.float32)
    found, _ = decode(name, layer, x, layer.make_cache(2, 1164), [1023, 1, 1, 1, 138])
    framework = FRAMEWORK[name]
    np.testing.assert_allclose(found, framework.numpy(layer(framework.array(x))), rtol=0, atol=4e-6)


@pytest.mark.parametrize("name", NAMES)
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
    ids=str,
)
def test_a_layer_makes_no_cache_of(name: str, options: dict[str, Any], error: type, message: str) -> None:
    layer = make_layer(name, embed_dim=16, num_heads=4)
    arguments = {"max_length": 50} | options
    with pytest.raises(error, match=f"^{message}"):
        layer.make_cache(1, **arguments)
    package = importlib.import_module(f"alibi_{name}")
    config = package.AlibiConfig(num_layers=1, d_model=16, num_heads=4)
    rngs = {"rngs": importlib.import_module("flax.nnx").Rngs(0)} if name == "jax" else {}
    with pytest.raises(error, match=f"^{message}"):
        package.AlibiTransformer(config, **rngs).make_caches(1, **arguments)
