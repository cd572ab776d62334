"""The caches of all backends: what they answer equals attention over every key."""

from __future__ import annotations

import contextlib
import importlib
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
from tests.support.caches import Cache, keeping
from tests.support.frameworks import FRAMEWORK, NAMES
from tests.support.full import once_in_jax, without_jax
from tests.support.layers import decode, make_layer

EAGER = [name for name in NAMES if name.id != "jax"]  # where a new shape costs no compilation
BATCH, HEADS, KV_HEADS, HEAD_DIM = 2, 4, 2, 5
SIZES = BATCH, KV_HEADS, 512, HEAD_DIM
SMALL = BATCH, KV_HEADS, 8, HEAD_DIM
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


# --- Rows, and what is refused ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_sequences_are_chosen_repeated_and_reordered(name: str) -> None:
    """As beam search does; another number of them may be asked for."""
    stream = Stream((20, 9, 1), slopes=TOGETHER, shape="equal")
    query, key, value = stream.tensors(name)
    indices = [1, 1, 0]
    cache = keeping(name, (BATCH, KV_HEADS, 60, HEAD_DIM))
    for part in stream.parts[:2]:
        cache.append(key[:, :, part], value[:, :, part])
    cache.select_batch(indices)
    last = stream.parts[2]
    cache.append(*(x[indices][:, :, last] for x in (key, value)))
    assert cache.length == 30
    expected = leaving_out(stream.exact(name), stream.share)
    expected = Answer(expected.value[indices][:, :, last], expected.budget[indices][:, :, last])
    assert_within(cache.attend(query[indices][:, :, last], TOGETHER), expected)
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


@pytest.mark.parametrize("name", NAMES)
def test_a_cache_says_what_it_is(name: str) -> None:
    cache = keeping(name, SMALL)
    cache.append(*zeros(3))
    shown = repr(cache.inner)
    sizes = f"batch_size={BATCH}, num_kv_heads={KV_HEADS}, head_dim={HEAD_DIM}, length=3, max_length=8"
    assert re.fullmatch(rf"KVCache\({sizes}, nbytes={cache.inner.nbytes}\)", shown), shown
    assert cache.inner.nbytes == 2 * BATCH * KV_HEADS * 8 * HEAD_DIM * 4


@pytest.mark.parametrize("name", NAMES)
def test_an_unknown_implementation_or_rule_is_refused(name: str) -> None:
    cache = keeping(name, SMALL)
    cache.append(*zeros(3))
    with pytest.raises(ValueError, match="implementation must be one of .*, got 'fast'"):
        cache.attend(zeros(3, heads=HEADS)[0], implementation="fast")
    with pytest.raises(TypeError, match="sinks"):
        cache.attend(zeros(3, heads=HEADS)[0], sinks=1)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("indices", [[0.0], [True], [0, BATCH], [-BATCH - 1]], ids=str)
def test_sequences_that_there_are_not_cannot_be_selected(name: str, indices: list[Any]) -> None:
    cache = keeping(name, SMALL)
    cache.append(*zeros(3))
    given = FRAMEWORK[name].array(np.asarray(indices, np.asarray(indices).dtype.name.replace("64", "32")))
    rule = "have an integer dtype" if type(indices[0]) is not int else f"be those of sequences, .* {BATCH}, got"
    with pytest.raises((TypeError, IndexError), match=f"^indices must {rule}"):
        cache.inner.select_batch(given)
    cache.select_batch([1, 0, 0])
    assert cache.attend(normal(3, HEADS, 1, HEAD_DIM)).shape[0] == 3


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [np.int32, np.uint8])
def test_sequences_are_counted_from_either_end_by_any_integers(name: str, dtype: Any) -> None:
    cache, key, query = keeping(name, SMALL), normal(BATCH, KV_HEADS, 3, HEAD_DIM), normal(2, HEADS, 1, HEAD_DIM)
    cache.append(key, key)
    cache.select_batch([BATCH - 1 if dtype is np.uint8 else -1, 0], dtype)
    expected = keeping(name, SMALL)
    expected.append(key, key)
    expected.select_batch([BATCH - 1, 0])
    np.testing.assert_array_equal(cache.attend(query), expected.attend(query))


@pytest.mark.parametrize("name", NAMES)
def test_more_queries_than_tokens_are_refused(name: str) -> None:
    cache = keeping(name, SMALL)
    with pytest.raises(ValueError, match="cache must hold the tokens that query is of, got an empty one; see append"):
        cache.attend(zeros(1, heads=HEADS)[0])
    cache.append(*zeros(2))
    with pytest.raises(ValueError, match="query must be of the 2 last tokens, whose keys are all held, got q_len 3"):
        cache.attend(zeros(3, heads=HEADS)[0])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("length", [-1, -300, 1.5, None, True])
def test_a_length_that_is_none_is_refused(name: str, length: Any) -> None:
    cache = keeping(name, SMALL)
    cache.append(*zeros(3))
    with pytest.raises((TypeError, ValueError), match=r"^length must (not be negative|be an integer), got"):
        cache.truncate(length)
    assert cache.length == 3


@pytest.mark.parametrize("name", NAMES)
def test_sizes_may_be_small_numpy_integers_and_must_be_sizes(name: str) -> None:
    cache = keeping(name, tuple(np.uint8(n) for n in (BATCH, KV_HEADS, 200, HEAD_DIM)))
    cache.append(*zeros(200))
    assert cache.length == cache.inner.max_length == 200
    for index, axis in enumerate(("batch_size", "num_kv_heads", "max_length", "head_dim")):
        if name == "mlx" and axis in ("num_kv_heads", "head_dim"):
            continue  # it takes them from the first keys
        for size, error, rule in ((0, ValueError, "be at least 1, got 0"), (2.5, TypeError, "be an integer, got 2.5")):
            with pytest.raises(error, match=f"^{axis} must {rule}"):
                keeping(name, (*SIZES[:index], size, *SIZES[index + 1 :]))


@pytest.mark.parametrize("name", NAMES)
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
def test_a_refused_token_is_not_half_written(name: str, key: Any, error: type, message: str) -> None:
    framework, cache = FRAMEWORK[name], keeping(name, SMALL)
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


# --- Layers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", without_jax(NAMES))
def test_a_layer_decodes_what_it_prefills_beyond_what_is_short(name: str) -> None:
    layer = make_layer(name, embed_dim=32, num_heads=4, num_kv_heads=2)
    x = normal(2, 1164, 32).astype(np.float32)
    found, _ = decode(name, layer, x, layer.make_cache(2, 1164), [1023, 1, 1, 1, 138])
    framework = FRAMEWORK[name]
    np.testing.assert_allclose(found, framework.numpy(layer(framework.array(x))), rtol=0, atol=4e-6)
