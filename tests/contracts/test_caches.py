"""The caches of all backends: what they answer equals attention over every key."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from alibi_core.conformance.testing import UNIT_ROUNDOFF, Answer, Attention
from alibi_core.conformance.testing import assert_within_budget as assert_within
from tests.support.frameworks import FRAMEWORK, NAMES, NAMES_SLOW_IN_JAX, Framework, few_in_jax
from tests.support.layers import decode, make_layer
from tests.support.tiles import planned_from

BATCH, HEADS, KV_HEADS, HEAD_DIM = 2, 4, 2, 5
SIZES = BATCH, KV_HEADS, 512, HEAD_DIM
SMALL = BATCH, KV_HEADS, 8, HEAD_DIM
SCALE = HEAD_DIM**-0.5
STEEP = (4.0, 2.5, 1.0, 0.7)
MIXED = (1.0, 0.125, 0.0, 3.0)  # slope 0 needs every key; the other head of its group shares its keys


@dataclass
class Cache:
    """A cache of any backend: NumPy in, NumPy out, heads first, changed in place."""

    framework: Framework
    inner: Any
    dtype: str

    @property
    def is_functional(self) -> bool:
        return self.framework.name == "jax"

    def tensor(self, values: Any) -> Any:
        """Return values, heads first, as the backend takes them; what is no floating NumPy array as it is."""
        if not isinstance(values, np.ndarray) or values.dtype != np.float64:
            return values
        swapped = np.swapaxes(values, 1, 2) if self.is_functional and values.ndim == 4 else values
        return self.framework.array(swapped, self.dtype)

    def append(self, key: Any, value: Any, lengths: np.ndarray | None = None) -> None:
        own = {} if lengths is None else {"lengths": self.framework.array(lengths)}
        result = self.inner.append(self.tensor(key), self.tensor(value), **own)
        self.inner = result if self.is_functional else self.inner

    def attend(self, query: Any, slopes: Any = None, **rules: Any) -> np.ndarray:
        """Return attention in float64; a mask or segments of the tokens held are padded to all slots where need be."""
        slopes = self.framework.array(np.asarray(slopes)) if isinstance(slopes, tuple) else slopes
        if self.is_functional and isinstance(rules.get("mask"), np.ndarray):
            rules["mask"] = self._to_all_slots(rules["mask"])
        if self.is_functional and isinstance(rules.get("segment_ids"), tuple):
            rules["segment_ids"] = rules["segment_ids"][0], self._to_all_slots(rules["segment_ids"][1])
        result = self.framework.numpy(self.inner.attend(self.tensor(query), slopes, **self.framework.placed(rules)))
        return np.swapaxes(result, 1, 2) if self.is_functional else result

    def _to_all_slots(self, values: np.ndarray) -> np.ndarray:
        return np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, max(self.inner.max_length - values.shape[-1], 0))])

    def truncate(self, length: Any) -> None:
        result = self.inner.truncate(length)
        self.inner = result if self.is_functional else self.inner

    def select_batch(self, indices: list[int], dtype: Any = np.int32) -> None:
        result = self.inner.select_batch(self.framework.array(np.asarray(indices, dtype)))
        self.inner = result if self.is_functional else self.inner

    @property
    def length(self) -> int:
        return int(np.max(np.asarray(self.inner.length)))

    @property
    def lengths(self) -> Any:
        """How many tokens each row holds, or all of them do."""
        is_one = self.is_functional or self.inner.lengths is None
        return np.asarray(self.inner.length if is_one else self.inner.lengths).tolist()

    @property
    def key_norms(self) -> np.ndarray:
        """The bounds of the blocks in use, ``[batch, num_kv_heads, blocks]``."""
        return self.framework.numpy(self.inner.key_norms)[:, :, : -(-self.length // 128)]


def keeping(name: str, sizes: tuple[int, int, int, int], dtype: str = "float32") -> Cache:
    """Return a ``KVCache`` of so many sequences, key/value heads, tokens, and features a head."""
    framework, cache_class = FRAMEWORK[name], importlib.import_module(f"alibi_{name}").KVCache
    batch_size, num_kv_heads, max_length, head_dim = sizes
    if name == "mlx":  # which takes the rest from the first keys
        return Cache(framework, cache_class(batch_size=batch_size, max_length=max_length), dtype)
    make = cache_class if name == "torch" else cache_class.make
    inner = make(batch_size, num_kv_heads, max_length, head_dim, dtype=getattr(framework.xp, dtype))
    return Cache(framework, inner, dtype)


@pytest.fixture(autouse=True)
def _float64(request: pytest.FixtureRequest) -> Any:
    """MLX's device that has float64, and float64 in JAX where a test asks for it."""
    given, context = request.node.callspec.params, contextlib.nullcontext()
    if given.get("name") == "mlx":
        context = (xp := FRAMEWORK["mlx"].xp).stream(xp.cpu)
    if given.get("name") == "jax" and "float64" in given.get("drawn", ()):
        context = importlib.import_module("jax").enable_x64(True)
    with context:
        yield


def zeros(new: int, batch: int = BATCH, heads: int = KV_HEADS, head_dim: int = HEAD_DIM) -> tuple[Any, Any]:
    return np.zeros((batch, heads, new, head_dim)), np.zeros((batch, heads, new, head_dim))


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32).astype(np.float64)


def leaving_out(exact: Attention, share: float) -> Answer:
    """Return the exact result with room for leaving out such a share of the weight."""
    largest = np.abs(exact.values).max(axis=(2, 3), keepdims=True)
    return Answer(exact.output.value, exact.output.budget + 2 * share * largest)


class Machine(RuleBasedStateMachine):
    """A cache beside the tokens that each of its rows holds, whatever is appended, taken back, chosen and forgotten."""

    name: str

    @initialize(
        dtype=st.sampled_from(["float32", "float16", "bfloat16"]),
        slopes=st.sampled_from([STEEP, MIXED, (0.01,) * 4]),
        is_planned=st.booleans(),
        seed=st.integers(0, 2**16),
    )
    def begin(self, dtype: str, slopes: tuple[float, ...], is_planned: bool, seed: int) -> None:
        self.dtype, self.slopes, self.random = dtype, slopes, np.random.default_rng(seed)
        self.short = 50 if is_planned else 1024  # from so many keys on, norms decide which of them matter
        self.cache = keeping(self.name, (BATCH, KV_HEADS, 400, HEAD_DIM), dtype)
        self.rows = [np.zeros((2, KV_HEADS, 0, HEAD_DIM))] * BATCH  # keys and values

    @property
    def held(self) -> list[int]:
        return [row.shape[2] for row in self.rows]

    def normal(self, heads: int, new: int, size: Any = 1.0) -> np.ndarray:
        """Return tokens for all rows, rounded to the dtype."""
        framework = FRAMEWORK[self.name]
        values = size * self.random.standard_normal((len(self.rows), heads, new, HEAD_DIM))
        return framework.numpy(framework.array(values, self.dtype))

    @rule(
        new=st.sampled_from([1, 1, 3, 130]),
        giant=st.sampled_from([1.0, 8.0]),
        is_ragged=st.booleans(),
        hidden=st.sampled_from([None, None, "mask", "segments"]),
        window_size=st.sampled_from([None, None, 0, 40]),
        tolerance=st.sampled_from([None, None, 0.0, 0.3]),
    )
    def append_and_attend(
        self, new: int, giant: float, is_ragged: bool, hidden: str | None, window_size: Any, tolerance: Any
    ) -> None:
        """Append tokens, some of them padding, and compare the results of their queries with each row alone."""
        batch, longest = len(self.rows), max(self.held)
        if longest + new > 400:
            return
        sizes = self.random.choice([0.25, 1.0, giant], (batch, 1, new, 1))
        query, key, value = self.normal(HEADS, new), self.normal(KV_HEADS, new, sizes), self.normal(KV_HEADS, new)
        counts = self.random.integers(0, new + 1, batch) if is_ragged else np.full(batch, new)
        rules: dict[str, Any] = {"window_size": window_size, "tolerance": tolerance}
        visible = np.ones((batch, new, longest + new), bool)
        if len(set(self.held)) == 1 and not is_ragged:
            if hidden == "mask":
                visible = self.random.random(visible.shape) < 0.7
                rules["mask"] = visible[:, None]
            if hidden == "segments":
                ids = np.sort(self.random.integers(0, 3, (batch, longest + new))).astype(np.int32)
                rules["segment_ids"] = ids[:, longest:], ids
                visible = ids[:, longest:, None] == ids[:, None]
        lengths = counts.astype(np.int32) if is_ragged else None
        self.cache.append(key, value, lengths)
        rules |= {} if lengths is None else {"lengths": lengths}
        with planned_from(self.short):
            found = self.cache.attend(query, self.slopes, **rules)
        for row, count in enumerate(counts):
            added = np.stack([key[row, :, :count], value[row, :, :count]])
            self.rows[row] = np.concatenate([self.rows[row], added], axis=2)
            if count:
                self.compare(row, query[row, :, :count], found[row, :, :count], visible[row], window_size, tolerance)

    def compare(
        self, row: int, query: np.ndarray, found: np.ndarray, visible: np.ndarray, window_size: Any, tolerance: Any
    ) -> None:
        (key, value), (count, length) = self.rows[row], (query.shape[1], self.held[row])
        distance = np.arange(length - count, length)[:, None] - np.arange(length)
        seen = (distance >= 0) & (distance <= (length if window_size is None else window_size))
        seen &= visible[:count, :length]
        bias = np.where(
            seen, -np.asarray(self.slopes, np.float32)[:, None, None].astype(np.float64) * distance, -np.inf
        )
        exact = Attention(query[None], key[None], value[None], bias=bias[None], scale=SCALE, dtype=self.dtype)
        share = UNIT_ROUNDOFF[self.dtype] if tolerance is None else tolerance
        assert_within(found[None], leaving_out(exact, share))

    @rule(back=st.sampled_from([1, 5, 200]), by_row=st.booleans(), not_finite=st.booleans())
    def take_back(self, back: int, by_row: bool, not_finite: bool) -> None:
        if not_finite and max(self.held) + 3 <= 400:
            nothing = np.full((len(self.rows), KV_HEADS, 3, HEAD_DIM), np.nan)
            self.cache.append(nothing, nothing)
            by_row |= len(set(self.held)) > 1  # one length for all would leave some of them in a shorter row
        if by_row:
            lengths = [max(n - int(self.random.integers(back + 1)), 0) for n in self.held]
            self.cache.truncate(self.cache.framework.array(np.asarray(lengths, np.int32)))
        else:
            lengths = [min(n, max(max(self.held) - back, 0)) for n in self.held]
            self.cache.truncate(max(max(self.held) - back, 0))
        self.rows = [row[:, :, :n] for row, n in zip(self.rows, lengths, strict=True)]

    @rule(indices=st.lists(st.integers(0, 2), min_size=2, max_size=3))
    def select(self, indices: list[int]) -> None:
        indices = [index % len(self.rows) for index in indices]
        self.cache.select_batch(indices)
        self.rows = [self.rows[index] for index in indices]

    @invariant()
    def norms_bound_keys(self) -> None:
        assert np.broadcast_to(self.cache.lengths, len(self.rows)).tolist() == self.held
        assert self.cache.length == max(self.held)
        if not max(self.held):
            return
        for bounds, row in zip(self.cache.key_norms, self.rows, strict=True):
            by_token = np.repeat(bounds, 128, axis=-1)[:, : row.shape[2]]
            norms = np.linalg.norm(row[0], axis=-1)
            assert not np.any(by_token < norms * (1 - 2.0**-20))  # NaN bounds nothing


@pytest.mark.parametrize("name", NAMES_SLOW_IN_JAX)
def test_a_cache_attends_to_the_tokens_of_each_row(name: str) -> None:
    machine = type("Machine", (Machine,), {"name": name})
    run_state_machine_as_test(machine, settings=settings(stateful_step_count=12))


# --- The cache that keeps everything -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES_SLOW_IN_JAX)
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


@pytest.mark.parametrize("name", NAMES_SLOW_IN_JAX)
def test_attend_passes_on_what_it_is_given(name: str) -> None:
    query, key, value = (normal(BATCH, heads, 300, HEAD_DIM, seed=heads) for heads in (HEADS, KV_HEADS, KV_HEADS))
    framework, cache = FRAMEWORK[name], keeping(name, (BATCH, KV_HEADS, 300, HEAD_DIM))
    cache.append(key, value)
    attention = importlib.import_module(f"alibi_{name}").attention
    rules: dict[str, Any] = {"scale": 0.3, "window_size": 20, "tolerance": 0.0, "implementation": "dense"}
    actual = cache.attend(query, **rules)
    expected = framework.numpy(attention(*map(cache.tensor, (query, key, value)), **rules))
    expected = np.swapaxes(expected, 1, 2) if cache.is_functional else expected
    np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-6)
    assert np.abs(actual - cache.attend(query, STEEP, **rules)).max() > 1e-2


MAGNITUDES = {"float32": 1e30, "float16": 6e4, "bfloat16": 1e30, "float64": 1e200}


KINDS = ("normal", "huge", "tiny", "mixed", "one and many small")


@pytest.mark.parametrize(
    ("name", "drawn"), few_in_jax(NAMES, itertools.product(MAGNITUDES, KINDS), ("float32", "mixed"))
)
def test_key_norms_bound_the_keys_held_whatever_was_taken_back(name: str, drawn: tuple[str, str]) -> None:
    dtype, kind = drawn
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


# --- Rows, and what is refused ----------------------------------------------------------------------------------------


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
    cache.select_batch([1, 0])
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
        for size, error, told in ((0, ValueError, "be at least 1, got 0"), (2.5, TypeError, "be an integer, got 2.5")):
            with pytest.raises(error, match=f"^{axis} must {told}"):
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


@pytest.mark.parametrize("name", NAMES_SLOW_IN_JAX)
def test_a_layer_decodes_what_it_prefills_beyond_what_is_short(name: str) -> None:
    layer = make_layer(name, embed_dim=32, num_heads=4, num_kv_heads=2)
    x = normal(2, 1164, 32).astype(np.float32)
    found, _ = decode(name, layer, x, layer.make_cache(2, 1164), [1023, 1, 1, 1, 138])
    framework = FRAMEWORK[name]
    np.testing.assert_allclose(found, framework.numpy(layer(framework.array(x))), rtol=0, atol=4e-6)
