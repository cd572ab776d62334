"""The caches of all backends: their results equal attention over every key."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import re
from collections.abc import Callable
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
from tests.support.tiles import planned_from

BATCH, HEADS, KV_HEADS, HEAD_DIM = 2, 4, 2, 5
SMALL = BATCH, KV_HEADS, 8, HEAD_DIM
STEEP = (4.0, 2.5, 1.0, 0.7)
MIXED = (1.0, 0.125, 0.0, 3.0)  # slope 0 needs every key; the other head of its group shares its keys
SLOPES = STEEP, MIXED, (0.01,) * 4

# The arguments of `append_and_attend` for a step of one token, and others for some of them.
STEP: dict[str, Any] = {"new": 1, "giant": 1.0, "is_ragged": False, "hidden": None, "window_size": None}
STEP |= {"tolerance": None, "scale": None, "law": "linear"}
CHANGES: dict[str, Any] = {"new": [3], "is_ragged": [True], "hidden": ["mask", "segments"], "window_size": [2]}
CHANGES |= {"tolerance": [0.3], "scale": [0.2], "law": ["log"]}


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
        """Return heads-first float64 values as an array of the backend's layout; other values unchanged."""
        if not isinstance(values, np.ndarray) or values.dtype != np.float64:
            return values
        swapped = np.swapaxes(values, 1, 2) if self.is_functional and values.ndim == 4 else values
        return self.framework.array(swapped, self.dtype)

    def append(self, key: Any, value: Any, lengths: np.ndarray | None = None, gates: np.ndarray | None = None) -> None:
        own = {} if lengths is None else {"lengths": self.framework.array(lengths)}
        if gates is not None:
            own["log_gates"] = self.framework.array(np.swapaxes(gates, 1, 2) if self.is_functional else gates)
        result = self.inner.append(self.tensor(key), self.tensor(value), **own)
        self.inner = result if self.is_functional else self.inner

    def attend(self, query: Any, slopes: Any = None, **rules: Any) -> np.ndarray:
        """Return attention in float64."""
        slopes = self.framework.array(np.asarray(slopes)) if isinstance(slopes, tuple) else slopes
        result = self.framework.numpy(self.inner.attend(self.tensor(query), slopes, **self.framework.placed(rules)))
        return np.swapaxes(result, 1, 2) if self.is_functional else result

    def truncate(self, length: Any) -> None:
        result = self.inner.truncate(length)
        self.inner = result if self.is_functional else self.inner

    def select_batch(self, indices: list[int], dtype: Any = np.int32) -> None:
        result = self.inner.select_batch(self.framework.array(np.asarray(indices, dtype)))
        self.inner = result if self.is_functional else self.inner

    @property
    def length(self) -> int:
        return int(self.inner.length)

    @property
    def lengths(self) -> Any:
        """The number of tokens of each row, or one number for all rows."""
        return np.asarray(self.inner.length if self.inner.lengths is None else self.inner.lengths).tolist()

    @property
    def key_norms(self) -> np.ndarray:
        """The bounds of the blocks in use, ``[batch, num_kv_heads, blocks]``."""
        return self.framework.numpy(self.inner.key_norms)[:, :, : -(-self.length // 128)]


def keeping(name: str, sizes: tuple[int, int, int, int], dtype: str = "float32", has_gates: bool = False) -> Cache:
    """Return a ``KVCache`` of these sizes: batch_size, num_kv_heads, max_length, head_dim."""
    framework, cache_class = FRAMEWORK[name], importlib.import_module(f"alibi_{name}").KVCache
    options = {"gate_heads": HEADS} if has_gates and name == "jax" else {}
    return Cache(framework, cache_class(*sizes, dtype=getattr(framework.xp, dtype), **options), dtype)


@pytest.fixture(autouse=True)
def _float64(request: pytest.FixtureRequest) -> Any:
    """Use MLX's device with float64, and enable float64 in JAX for tests of it."""
    given, context = request.node.callspec.params, contextlib.nullcontext()
    if given.get("name") == "mlx":
        context = (xp := FRAMEWORK["mlx"].xp).stream(xp.cpu)
    if given.get("name") == "jax" and "float64" in given.get("drawn", ()):
        context = importlib.import_module("jax").enable_x64(True)
    with context:
        yield


def zeros(new: int, batch: int = BATCH, heads: int = KV_HEADS, head_dim: int = HEAD_DIM) -> tuple[Any, Any]:
    return np.zeros((batch, heads, new, head_dim)), np.zeros((batch, heads, new, head_dim))


def queries(new: int) -> Any:
    return np.zeros((BATCH, HEADS, new, HEAD_DIM))


def ints(*values: int) -> np.ndarray:
    return np.asarray(values, np.int32)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32).astype(np.float64)


class Machine(RuleBasedStateMachine):
    """A cache beside the tokens of its rows, which are appended, taken back, chosen and compared with attention."""

    name: str

    @initialize(
        dtype=st.sampled_from(["float32", "float16", "bfloat16"]),
        slopes=st.sampled_from(SLOPES),
        is_planned=st.booleans(),
        may_be_ragged=st.booleans(),
        has_gates=st.booleans(),
        has_sinks=st.booleans(),
        seed=st.integers(0, 2**16),
    )
    def begin(
        self, dtype: str, slopes: tuple[float, ...], is_planned: bool, may_be_ragged: bool, seed: int, **has: bool
    ) -> None:
        self.dtype, self.may_be_ragged, self.random = dtype, may_be_ragged, np.random.default_rng(seed)
        self.use_slopes(np.float32(slopes))
        self.short = 1 if is_planned else 1024  # from this many keys on, norms decide which keys matter
        self.has_gates = has_gates = has["has_gates"]
        sinks = self.random.choice(np.float32([-1, 0.5, 4]), HEADS)
        self.sinks = sinks if has["has_sinks"] else np.full_like(sinks, -np.inf)  # no sinks
        self.options = {"sinks": sinks} if has["has_sinks"] else {}
        self.cache = keeping(self.name, (BATCH, KV_HEADS, 400, HEAD_DIM), dtype, has_gates)
        self.rows = [np.zeros((2, KV_HEADS, 0, HEAD_DIM))] * BATCH  # keys and values
        self.gates = [np.zeros((HEADS, 0))] * BATCH  # zeros without gates

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
        scale=st.sampled_from([None, None, 0.2]),
        law=st.sampled_from(["linear", "linear", "log"]),
    )
    def append_and_attend(self, new: int, giant: float, is_ragged: bool, hidden: str | None, **options: Any) -> None:
        """Append tokens, some of them padding, and compare the results of their queries with each row alone."""
        batch, longest, is_ragged = len(self.rows), max(self.held), is_ragged and self.may_be_ragged
        if longest + new > 400:
            return
        sizes = self.random.choice([0.25, 1.0, giant], (batch, 1, new, 1))
        query, key, value = self.normal(HEADS, new), self.normal(KV_HEADS, new, sizes), self.normal(KV_HEADS, new)
        counts = self.random.integers(0, new + 1, batch) if is_ragged else np.full(batch, new)
        options["law"] = "linear" if self.has_gates else options["law"]
        rules: dict[str, Any] = options | self.options
        visible = np.ones((batch, new, longest + new), bool)
        if len(set(self.held)) == 1 and not is_ragged:
            columns = int(self.random.integers(longest + new, 401))  # both may go on over unused slots
            if hidden == "mask":
                visible = self.random.random((batch, new, columns)) < 0.7
                rules["mask"] = visible[:, None]
            if hidden == "segments":
                ids = np.sort(self.random.integers(0, 3, (batch, columns))).astype(np.int32)
                rules["segment_ids"] = ids[:, longest : longest + new], ids
                visible = ids[:, longest : longest + new, None] == ids[:, None]
        lengths = counts.astype(np.int32) if is_ragged else None
        gates = self.random.choice([0, -0.01, -0.2, -3, -np.inf], (batch, HEADS, new), p=[0.2, 0.4, 0.3, 0.09, 0.01])
        gates = np.float32(gates) if self.has_gates else np.zeros_like(gates)
        self.cache.append(key, value, lengths, gates if self.has_gates else None)
        rules |= {} if lengths is None else {"lengths": lengths}
        with planned_from(self.short):
            found = self.cache.attend(query, self.slopes_of_framework, **rules)
        for row, count in enumerate(counts):
            added = np.stack([key[row, :, :count], value[row, :, :count]])
            self.rows[row] = np.concatenate([self.rows[row], added], axis=2)
            self.gates[row] = np.concatenate([self.gates[row], gates[row, :, :count]], axis=1)
            if count:
                is_of_keys = "mask" in rules and new == 1
                exact = self.exact(row, query[row, :, :count], visible[row], is_of_keys, **options)
                assert_within(found[row, :, :count][None], exact)

    def exact(
        self,
        row: int,
        query: np.ndarray,
        visible: np.ndarray,
        is_of_keys: bool,
        window_size: Any,
        tolerance: Any,
        scale: Any,
        law: str,
    ) -> Answer:
        """Return the exact attention of a row's last queries; it may leave out a share of the weight."""
        (key, value), (count, length) = self.rows[row], (query.shape[1], self.held[row])
        slopes = self.slopes.astype(np.float64)
        distance = np.arange(length - count, length)[:, None] - np.arange(length)
        seen = (distance >= 0) & (distance <= (length if window_size is None else window_size))
        visible = visible[:count, :length]
        # The gates of tokens that a mask of keys hides do not count.
        gates = np.where(visible[0] if is_of_keys else True, self.gates[row], 0)
        sums, closed = (np.cumsum(x, axis=-1) for x in (np.where(gates > -np.inf, gates, 0), gates == -np.inf))
        forgotten = sums[:, length - count :, None] - sums[:, None]
        seen = seen & visible & (closed[:, length - count :, None] == closed[:, None])
        penalty = distance if law == "linear" else np.log1p(np.maximum(distance, 0))
        bias = np.where(seen, forgotten - slopes[:, None, None] * penalty, -np.inf)
        share = UNIT_ROUNDOFF[self.dtype] if tolerance is None else tolerance
        # A sink is a key of zeros without a value.
        sinks = np.broadcast_to(self.sinks[:, None, None], (HEADS, count, 1))
        key, value = (np.pad(x, ((0, 0), (0, 1), (0, 0))) for x in (key, value))
        bias = np.concatenate([bias, np.where(seen.any(-1, keepdims=True), sinks, -np.inf)], axis=-1)
        arrays = (x[None] for x in (query, key, value, bias))
        scale = HEAD_DIM**-0.5 if scale is None else scale
        return Attention(*arrays, scale=scale, dtype=self.dtype, share=share).output

    @rule(changes=st.lists(st.sampled_from([*CHANGES, "slopes", "back"]), min_size=2, max_size=5))
    def decode(self, changes: list[str]) -> None:
        """Take steps of one token by equal rules, between each two of them one by another rule, or another change."""
        for change in changes:
            self.append_and_attend(**STEP)
            if change == "slopes":
                self.change_slopes(SLOPES[self.random.integers(3)], bool(self.random.integers(2)))
            elif change == "back":
                self.take_back(int(self.random.integers(300)), by_row=False, not_finite=False)
            else:
                self.append_and_attend(**STEP | {change: CHANGES[change][self.random.integers(len(CHANGES[change]))]})
            self.append_and_attend(**STEP)

    def use_slopes(self, slopes: np.ndarray) -> None:
        """Attend with these slopes from now on; PyTorch shares their memory, and MLX is given NumPy's."""
        shared = slopes if self.name == "torch" else slopes.copy()
        self.slopes, self.slopes_of_framework = slopes, FRAMEWORK[self.name].array(shared)
        if self.name == "mlx":  # its cache keeps its next step for these alone
            self.slopes_of_framework = slopes

    @rule(slopes=st.sampled_from(SLOPES), is_in_place=st.booleans())
    def change_slopes(self, slopes: tuple[float, ...], is_in_place: bool) -> None:
        """Change slopes in place, unseen by PyTorch's counter of versions; or take a copy, and change the original."""
        before = self.slopes
        if is_in_place and self.name in ("torch", "mlx"):
            before[:] = slopes
        else:
            self.use_slopes(np.float32(slopes) if is_in_place else before.copy())
            before[:] = 0.3

    @rule(back=st.sampled_from([1, 5, 200]), by_row=st.booleans(), not_finite=st.booleans())
    def take_back(self, back: int, by_row: bool, not_finite: bool) -> None:
        if not_finite and max(self.held) + 3 <= 400:
            nothing = np.full((len(self.rows), KV_HEADS, 3, HEAD_DIM), np.nan)
            gates = np.full((len(self.rows), HEADS, 3), np.nan, np.float32) if self.has_gates else None
            self.cache.append(nothing, nothing, gates=gates)
            by_row |= len(set(self.held)) > 1  # one length for all would leave NaN in a shorter row
        if by_row:
            lengths = [max(n - int(self.random.integers(back + 1)), 0) for n in self.held]
            self.cache.truncate(self.cache.framework.array(np.asarray(lengths, np.int32)))
        else:
            lengths = [min(n, max(max(self.held) - back, 0)) for n in self.held]
            self.cache.truncate(max(max(self.held) - back, 0))
        self.rows = [row[:, :, :n] for row, n in zip(self.rows, lengths, strict=True)]
        self.gates = [row[:, :n] for row, n in zip(self.gates, lengths, strict=True)]

    @rule(indices=st.lists(st.integers(0, 2), min_size=2, max_size=3))
    def select(self, indices: list[int]) -> None:
        indices = [index % len(self.rows) for index in indices]
        self.cache.select_batch(indices)
        self.rows, self.gates = ([x[index] for index in indices] for x in (self.rows, self.gates))

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
def test_key_norms_bound_keys_of_any_size(name: str, drawn: tuple[str, str]) -> None:
    dtype, kind = drawn
    rng, framework, cache = np.random.default_rng(0), FRAMEWORK[name], keeping(name, (1, 2, 300, 64), dtype)
    keys = rng.uniform(-1, 1, (1, 2, 288, 64)) * {"huge": MAGNITUDES[dtype], "tiny": 2e-23}.get(kind, 1.0)
    if kind == "mixed":
        keys *= 2.0 ** rng.integers(-12, 12, (1, 2, 288, 1))
    if kind == "one and many small":  # the square of each small number vanishes beside the large one's
        keys[:] = 0.999 * UNIT_ROUNDOFF[dtype] ** 0.5
        keys[..., 7] = 1
    keys = framework.numpy(framework.array(keys, dtype))
    for part in np.split(keys, 3, axis=2):  # parts end within blocks of 128
        cache.append(part, part)
    norms = np.sqrt(np.square(keys.astype(np.longdouble)).sum(axis=-1))
    largest = np.stack([x.max(axis=-1) for x in np.split(norms, [128, 256], axis=-1)], axis=-1)
    rounding = 1 + (64 + 2) * 2.0**-23 if name == "jax" else 1  # JAX's bounds are rounded themselves
    assert (largest <= rounding * cache.key_norms).all()
    if kind == "normal":
        assert (cache.key_norms <= 1.001 * largest + 1e-15).all()


@pytest.mark.parametrize("name", NAMES)
def test_norms_of_what_is_not_a_number_bound_nothing(name: str) -> None:
    key = np.ones((1, 1, 200, 4))
    key[0, 0, 150, 2] = np.nan
    cache = keeping(name, (1, 1, 300, 4))
    cache.append(key, key)
    assert np.isfinite(cache.key_norms[0, 0]).tolist() == [True, False]


# --- Rows, sizes and refusals ----------------------------------------------------------------------------------------


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
def test_sequences_are_counted_from_either_end_by_any_integers(name: str) -> None:
    key, query, found = normal(BATCH, KV_HEADS, 3, HEAD_DIM), normal(3, HEADS, 1, HEAD_DIM), []
    for indices, dtype in (([1, 0, 0], np.int32), ([-1, -2, 0], np.int32), ([1, 0, 0], np.uint8)):
        cache = keeping(name, SMALL)
        cache.append(key, key)
        cache.select_batch(indices, dtype)
        found.append(cache.attend(query))
    np.testing.assert_array_equal(found[1:], found[:1] * 2)


@pytest.mark.parametrize("name", NAMES)
def test_each_row_has_room_up_to_max_length(name: str) -> None:
    cache = keeping(name, (2, KV_HEADS, 3, HEAD_DIM))
    cache.append(*zeros(2), ints(2, 0))
    with pytest.raises(ValueError, match="^cache must have room for 2 more tokens"):
        cache.append(*zeros(2))
    cache.append(*zeros(2), ints(1, 2))
    assert cache.lengths == [3, 2]


@pytest.mark.parametrize("name", NAMES)
def test_sizes_may_be_small_numpy_integers_and_must_be_sizes(name: str) -> None:
    cache = keeping(name, tuple(np.uint8(n) for n in (BATCH, KV_HEADS, 200, HEAD_DIM)))
    cache.append(*zeros(200))
    room = 256 if name == "jax" else 200  # JAX has whole blocks of 128
    assert cache.length == 200
    assert cache.inner.max_length == room
    assert cache.inner.keys.shape == cache.inner.values.shape == (BATCH, KV_HEADS, room, HEAD_DIM)
    for index, axis in enumerate(("batch_size", "num_kv_heads", "max_length", "head_dim")):
        for size, error, told in ((0, ValueError, "be at least 1, got 0"), (2.5, TypeError, "be an integer, got 2.5")):
            with pytest.raises(error, match=f"^{axis} must {told}"):
                keeping(name, (*SMALL[:index], size, *SMALL[index + 1 :]))


@pytest.mark.parametrize("name", NAMES)
def test_an_empty_cache_is_not_attended_to(name: str) -> None:
    cache, message = keeping(name, SMALL), "cache must hold the tokens that query is of, got an empty one; see append"
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            cache.attend(queries(1))
        cache.append(*zeros(1))
        cache.attend(queries(1))
        cache.truncate(0)


@pytest.mark.parametrize("name", NAMES)
def test_all_tokens_of_a_cache_have_gates_or_none_has(name: str) -> None:
    cache, gated = keeping(name, SMALL), keeping(name, SMALL, has_gates=True)
    of_heads = {heads: np.zeros((BATCH, heads, 2), np.float32) for heads in (KV_HEADS, HEADS - 1, HEADS)}
    with pytest.raises(ValueError, match=f"^log_gates must have shape .* a multiple of {KV_HEADS} heads"):
        cache.append(*zeros(2), gates=of_heads[HEADS - 1])
    cache.append(*zeros(2))
    gated.append(*zeros(2), gates=of_heads[HEADS])
    for one, gates in ((cache, of_heads[HEADS]), (gated, None)):
        with pytest.raises(ValueError, match="^log_gates must be given for all tokens of a cache or for none"):
            one.append(*zeros(2), gates=gates)
    for gates in (of_heads[KV_HEADS], of_heads[HEADS][:, :, :1]):
        with pytest.raises(ValueError, match="^log_gates must have shape .* to fit the cache, got"):
            gated.append(*zeros(2), gates=gates)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("lengths", [None, ints(2, 3)])
def test_gates_that_are_taken_back_count_for_nobody(name: str, lengths: Any) -> None:
    cache, tokens, query = keeping(name, SMALL, has_gates=True), normal(BATCH, KV_HEADS, 3, HEAD_DIM), queries(1)
    gates = np.full((BATCH, HEADS, 3), -0.5, np.float32)
    cache.append(tokens, tokens, lengths, gates)
    expected = cache.attend(query)
    cache.append(tokens, tokens, gates=gates * np.nan)
    cache.truncate(3 if lengths is None else cache.framework.array(lengths))
    assert np.array_equal(cache.attend(query), expected)


ROWS = np.zeros((BATCH, 2, 2, HEAD_DIM), np.float32)
# Calls of a cache of 4 tokens, with room for 4 more.
REFUSED: dict[type[Exception], list[tuple[Callable[[Cache], Any], str]]] = {
    TypeError: [
        (lambda cache: cache.append([0.0], [0.0]), "key must be an array of four axes, got list"),
        (lambda cache: cache.append(ROWS[0], ROWS[0]), "key must be an array of four axes, got"),
        (lambda cache: cache.append(ROWS, ROWS), "arrays must belong to one array namespace, got"),
        (
            lambda cache: cache.append(*[cache.framework.array(ROWS, "int32")] * 2),
            "key must have a real floating dtype",
        ),
        (lambda cache: cache.append(*zeros(3), np.ones(2)), "lengths must have an integer dtype"),
        (lambda cache: cache.attend(queries(3), sinks=1), ".*sinks"),
        *((lambda cache, x=x: cache.truncate(x), "length must be an integer, got") for x in (1.5, None, True)),
        (lambda cache: cache.truncate(cache.framework.array(np.ones(2))), "length must have an integer dtype"),
        (lambda cache: cache.select_batch([0.0], np.float32), "indices must have an integer dtype"),
        (lambda cache: cache.select_batch([True], bool), "indices must have an integer dtype"),
    ],
    ValueError: [
        (
            lambda cache: cache.append(*[cache.framework.array(ROWS, "float16")] * 2),
            "key must be .*float32 as the cache",
        ),
        (lambda cache: cache.append(zeros(2)[0], cache.framework.array(ROWS, "float16")), "value must be .*float32 as"),
        (lambda cache: cache.append(*zeros(2, batch=3)), r"key must have shape .*\(batch, .* the cache, got \(3, "),
        (lambda cache: cache.append(*zeros(2, heads=HEADS)), "key must have shape"),
        (lambda cache: cache.append(*zeros(2, head_dim=6)), "key must have shape"),
        (lambda cache: cache.append(zeros(2)[0], zeros(3)[0]), "value must have shape"),
        (
            lambda cache: cache.append(*zeros(5)),
            "cache must have room for 5 more tokens, got max_length 8 with 4 in use",
        ),
        (lambda cache: cache.append(*zeros(3), ints(1, 4)), r"lengths must be from 0 to .* tokens, 3, got \[1, 4\]"),
        (lambda cache: cache.append(*zeros(3), ints(1, -1)), "lengths must be from 0 to the number of tokens, 3"),
        (lambda cache: cache.append(*zeros(3), ints(1)), r"lengths must have shape \(2,\) \(batch_size\), got \(1,\)"),
        (
            lambda cache: cache.attend(queries(2), mask=cache.framework.array(np.ones((BATCH, 1, 2, 3), bool))),
            "mask .*must",
        ),
        (lambda cache: cache.attend(queries(5)), "query must be of the 4 last tokens, whose keys .*, got q_len 5"),
        (lambda cache: cache.attend(queries(3), implementation="fast"), "implementation must be one of .*, got 'fast'"),
        (
            lambda cache: cache.attend(queries(1), mask=cache.framework.array(np.ones((BATCH, 1), bool))),
            "mask must have all [48] keys in its last axis, those of earlier tokens too, got",
        ),
        *((lambda cache, x=x: cache.truncate(x), "length must not be negative, got") for x in (-1, -300)),
        (lambda cache: cache.truncate(cache.framework.array(ints(1, 1, 1))), r"length must have shape \(2,\)"),
    ],
    IndexError: [
        (lambda cache: cache.select_batch([0, BATCH]), f"indices must be those of sequences, .* {BATCH}, got"),
        (lambda cache: cache.select_batch([-BATCH - 1]), "indices must be those of sequences"),
    ],
}


@pytest.mark.parametrize("name", NAMES)
def test_a_refused_call_leaves_a_cache_as_it_was(name: str) -> None:
    cache, held, query = keeping(name, SMALL), normal(BATCH, KV_HEADS, 4, HEAD_DIM), normal(BATCH, HEADS, 1, HEAD_DIM)
    cache.append(held, held)
    expected, before = cache.attend(query), cache.inner.nbytes
    for error, calls in REFUSED.items():
        for call, message in calls:
            with pytest.raises(error, match=f"^{message}"):
                call(cache)
            assert (cache.length, cache.inner.nbytes) == (4, before), message
            assert np.array_equal(cache.attend(query), expected), message
