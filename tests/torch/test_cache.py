"""The PyTorch caches: what they answer equals attention over every key, and what they forget weighs nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

import alibi_torch  # noqa: E402
from alibi_core.conformance._cases.oracle import UNIT_ROUNDOFF, Answer, Attention, assert_within  # noqa: E402
from alibi_torch import AlibiAttention, AlibiConfig, AlibiTransformer, EvictingKVCache, KVCache  # noqa: E402
from alibi_torch._tiled import plan as _tile_plan  # noqa: E402
from alibi_torch.caches import _evicting as _evicting_cache  # noqa: E402
from alibi_torch.nn._language_model import AlibiLanguageModel  # noqa: E402

DTYPES = ("float64", "float32", "float16", "bfloat16")
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 4
SCALE = HEAD_DIM**-0.5

Tensor = torch.Tensor


def numpy(tensor: Tensor) -> np.ndarray:
    return tensor.detach().double().numpy()


def norms(tensor: Tensor) -> np.ndarray:
    """Return the norms of the last axis, with range and precision to spare."""
    return np.sqrt(np.square(tensor.double().numpy().astype(np.longdouble)).sum(axis=-1))


@contextlib.contextmanager
def changed(module: Any, **constants: int) -> Iterator[None]:
    """Set constants of a module, such as those that keep short sequences from the code for long ones."""
    with contextlib.ExitStack() as stack:
        for name, value in constants.items():
            stack.enter_context(mock.patch.object(module, name, value))
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
    shape: str
    sides: str
    slopes: tuple[float, ...]
    dtype: str
    window_size: int | None
    tolerance: float | None
    q_norm: float
    seed: int

    batch = 2

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
    def slopes_tensor(self) -> Tensor:
        return torch.tensor(self.slopes, dtype=torch.float32)

    @cached_property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value. Queries have exactly the norm ``q_norm``, which one coordinate makes representable."""
        rng = np.random.default_rng(self.seed)
        place = np.arange(self.length) / self.length
        sizes = {
            "zero": 0 * place,
            "equal": 0 * place + 2,
            "early giant": np.where(np.arange(self.length) == self.length // 7, 8.0, 0.25),
            "late giant": np.where(np.arange(self.length) == self.length - self.length // 7, 8.0, 0.25),
            "growing": 2.0 ** np.floor(8 * place - 5),
            "shrinking": 2.0 ** np.floor(3 - 8 * place),
            "any": rng.choice([0.0, 0.25, 2.0, 8.0], self.length),
        }[self.shape]
        signs = {
            "along": 0 * place + 1,
            "against": 0 * place - 1,
            "old along": np.where(place < 0.5, 1.0, -1.0),
            "by turns": np.where(np.arange(self.length) // 9 % 2, 1.0, -1.0),
            "any": rng.choice([-1.0, 1.0], self.length),
        }[self.sides]
        direction = np.zeros(HEAD_DIM)
        direction[self.seed % HEAD_DIM] = 1
        query = np.broadcast_to(direction * self.q_norm, (self.batch, HEADS, self.length, HEAD_DIM)).copy()
        query[1] *= rng.choice([-1.0, 1.0, 0.5, 0.0], (HEADS, self.length, 1))
        key = np.broadcast_to(direction * (sizes * signs)[:, None], (self.batch, KV_HEADS, self.length, HEAD_DIM))
        # Keys that do not all lie along a line, in the second entry.
        turned = rng.standard_normal((KV_HEADS, self.length, HEAD_DIM))
        turned *= (sizes / np.linalg.norm(turned, axis=-1))[..., None]
        key = np.stack([key[0], turned])
        key[:, 1] *= rng.choice([1.0, 0.25, 4.0])
        value = rng.standard_normal((self.batch, KV_HEADS, self.length, HEAD_DIM))
        return tuple(torch.from_numpy(x).to(getattr(torch, self.dtype)) for x in (query, key, value))

    def exact(self, visible: np.ndarray | None = None) -> Attention:
        """Return the attention of the whole sequence in float64."""
        position = np.arange(self.length)
        distance = position[:, None] - position
        seen = (distance >= 0) & (distance <= (self.length if self.window_size is None else self.window_size))
        seen = seen if visible is None else seen & visible
        bias = np.where(seen, -np.float64(self.slopes_tensor.numpy())[:, None, None] * np.abs(distance), -np.inf)
        bias = np.broadcast_to(bias, (self.batch, HEADS, self.length, self.length))
        return Attention(*map(numpy, self.tensors), bias=bias, scale=SCALE, dtype=self.dtype)

    def evicting(self, **options: Any) -> EvictingKVCache:
        arguments: dict[str, Any] = {"slopes": self.slopes_tensor, "max_query_norm": self.q_norm}
        arguments |= {"window_size": self.window_size, "tolerance": self.tolerance, "dtype": self.tensors[0].dtype}
        arguments |= {"max_length": self.length} | options
        return EvictingKVCache(self.batch, KV_HEADS, head_dim=HEAD_DIM, **arguments)


def leaving_out(exact: Attention, share: float) -> Answer:
    """Return the exact result with room for leaving out such a share of the weight."""
    largest = np.abs(exact.values).max(axis=(2, 3), keepdims=True)
    return Answer(exact.output.value, exact.output.budget + 2 * share * largest)


SHAPES = ("zero", "equal", "early giant", "late giant", "growing", "shrinking", "any")
SIDES = ("along", "against", "old along", "by turns", "any")
STEEP = (4.0, 2.5, 1.0, 0.7)
TOGETHER = (1.9, 1.9, 1.0, 1.0)  # heads that share their storage, and need not hold as much
MIXED = (1.0, 0.125, 0.0, 3.0)  # a head that keeps everything, and one that must for the other of its group
STREAMS = st.builds(
    Stream,
    steps=st.lists(st.sampled_from([1, 1, 2, 3, 9, 17, 40]), min_size=2, max_size=12).map(tuple),
    shape=st.sampled_from(SHAPES),
    sides=st.sampled_from(SIDES),
    slopes=st.sampled_from([STEEP, TOGETHER, MIXED, (0.01,) * 4, (2.0, 2.0, 0.3, 0.3)]),
    dtype=st.sampled_from(DTYPES),
    window_size=st.sampled_from([None, None, None, 0, 5, 40]),
    tolerance=st.sampled_from([None, None, 0.0, 1e-3, 0.3, 1.0]),
    q_norm=st.sampled_from([0.25, 4.0]),
    seed=st.integers(0, 2**16),
)
LONG = Stream((127, 1, 1, 128, 129, 3), "any", "any", STEEP, "float32", None, None, 4.0, 0)


# --- The cache that keeps everything -------------------------------------------------------------------------------


@given(STREAMS, st.booleans(), st.sampled_from([None, "mask", "segments"]))
@example(LONG, True, None)
@example(dataclasses.replace(LONG, steps=(128, 1, 127, 1, 129), shape="early giant", sides="along"), True, None)
@example(dataclasses.replace(LONG, steps=(300, 1, 1, 17), slopes=MIXED, dtype="bfloat16"), True, "segments")
@example(dataclasses.replace(LONG, steps=(1,) * 140, shape="early giant", dtype="float64"), True, "mask")
def test_attend_is_attention_over_all_keys(stream: Stream, plans: bool, hidden: str | None) -> None:
    query, key, value = stream.tensors
    rng = np.random.default_rng(stream.seed)
    visible, ids = np.ones((stream.length,) * 2, bool), np.sort(rng.integers(0, 3, stream.length)).astype(np.int32)
    if hidden == "mask":
        visible = rng.random(visible.shape) < 0.7
    if hidden == "segments":
        visible = ids[:, None] == ids
    cache = KVCache(stream.batch, KV_HEADS, stream.length + 5, HEAD_DIM, dtype=query.dtype)
    outputs = []
    with changed(_tile_plan, **({"SHORT": 0} if plans else {})):
        for part in stream.parts:
            cache.append(key[:, :, part], value[:, :, part])
            rules: dict[str, Any] = {}
            if hidden == "mask":
                rules["mask"] = torch.from_numpy(visible[None, None, part, : part.stop])
            if hidden == "segments":
                rules["segment_ids"] = torch.from_numpy(ids[part]), torch.from_numpy(ids[: part.stop])
            rules |= {"window_size": stream.window_size, "tolerance": stream.tolerance}
            outputs.append(cache.attend(query[:, :, part], stream.slopes_tensor, **rules))
    assert_within(numpy(torch.cat(outputs, dim=2)), leaving_out(stream.exact(visible), stream.share))


@pytest.mark.parametrize("q_len", [1, 40])
def test_each_batch_entry_is_planned_by_its_own_keys(q_len: int) -> None:
    length = _tile_plan.SHORT + 200
    query, key, value = torch.zeros(3, 2, 1, length, HEAD_DIM).unbind()
    query[..., 0], key[1, 0, 100, 0], value[1, 0, 100] = (
        50.0,
        200.0,
        1.0,
    )  # a thousand tokens back
    cache = KVCache(2, 1, length, HEAD_DIM)
    cache.append(key, value)
    result = cache.attend(query[:, :, -q_len:], torch.ones(1))
    assert torch.equal(result, torch.tensor([0.0, 1.0])[:, None, None, None].expand_as(result))


@pytest.mark.parametrize("implementation", ["tiled", "sdpa", "dense"])
def test_attend_passes_on_what_it_is_given(implementation: str) -> None:
    query, key, value = LONG.tensors
    cache = KVCache(2, KV_HEADS, LONG.length, HEAD_DIM)
    cache.append(key, value)
    rules: dict[str, Any] = {"scale": 0.3, "window_size": 20, "implementation": implementation, "tolerance": 0.0}
    actual = cache.attend(query, **rules)
    torch.testing.assert_close(actual, alibi_torch.attention(query, key, value, **rules), rtol=0, atol=0)
    assert (actual - cache.attend(query, LONG.slopes_tensor, **rules)).abs().max() > 1e-2


def test_decoding_reads_no_key_to_find_out_how_large_it_is() -> None:
    query, key, value = LONG.tensors
    cache = KVCache(2, KV_HEADS, LONG.length, HEAD_DIM)
    cache.append(key, value)
    watched = mock.patch.object(_tile_plan, "norm_bounds", side_effect=_tile_plan.norm_bounds)
    with changed(_tile_plan, SHORT=0), watched as measure:
        cache.attend(query[:, :, -1:], LONG.slopes_tensor)
    assert {call.args[0].shape[2] for call in measure.call_args_list} == {1}  # the query alone


def test_an_unknown_implementation_is_refused() -> None:
    for cache in (KVCache(2, KV_HEADS, 5, HEAD_DIM), LONG.evicting()):
        cache.append(*torch.zeros(2, 2, KV_HEADS, 3, HEAD_DIM).unbind())
        with pytest.raises(ValueError, match="implementation must be one of 'tiled'.*got 'fast'"):
            cache.attend(torch.zeros(2, HEADS, 3, HEAD_DIM), LONG.slopes_tensor, implementation="fast")


MAGNITUDES = {"float64": 1e200, "float32": 1e30, "float16": 6e4, "bfloat16": 1e30}


@given(
    steps=st.lists(st.sampled_from([1, 2, 60, 127, 128, 129]), min_size=1, max_size=6),
    dtype=st.sampled_from(DTYPES),
    kind=st.sampled_from(["normal", "huge", "tiny", "mixed", "one and many small"]),
    head_dim=st.sampled_from([1, 5, 64, 1000]),
    back=st.integers(0, 200),
    seed=st.integers(0, 99),
)
@example(steps=[1], dtype="float32", kind="one and many small", head_dim=1000, back=0, seed=0)
@example(steps=[1], dtype="float32", kind="tiny", head_dim=64, back=0, seed=0)
def test_key_norms_are_never_exceeded(
    steps: list[int], dtype: str, kind: str, head_dim: int, back: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    kinds = {"normal": 1.0, "huge": MAGNITUDES[dtype], "tiny": 2e-23, "mixed": 10.0 ** rng.uniform(-9, 4)}
    cache = KVCache(1, 2, sum(steps) + 300, head_dim, dtype=getattr(torch, dtype))

    def append(count: int) -> None:
        if kind == "one and many small":  # whose squares, one by one, vanish beside the large one's
            keys = np.full((1, 2, count, head_dim), 0.999 * UNIT_ROUNDOFF[dtype] ** 0.5)
            keys[..., rng.integers(head_dim)] = 1
        else:
            keys = rng.standard_normal((1, 2, count, head_dim)).clip(-1, 1) * kinds[kind]
        key = torch.from_numpy(keys).to(cache.key.dtype)
        cache.append(key, key)
        exact = norms(cache.key[:, :, : cache.length])
        for block, bound in enumerate(cache.key_norms[:, :, : -(-cache.length // 128)].unbind(-1)):
            largest = exact[:, :, 128 * block : 128 * (block + 1)].max(axis=-1)
            assert (largest <= bound.numpy().astype(np.longdouble)).all()

    for count in steps:
        append(count)
    if kind == "normal":
        largest = norms(cache.key)[:, :, :128].max(axis=-1)
        assert (cache.key_norms[:, :, 0].numpy() <= 1.001 * largest).all()  # and no looser than it must be
    cache.truncate(max(cache.length - back, 0))
    for count in (1, 130):
        append(count)


@pytest.mark.parametrize("steps", [[260], [1] * 260, [127, 1, 1, 127, 1, 1, 2], [128, 128, 4]], ids=len)
def test_a_key_counts_in_its_own_block(steps: list[int]) -> None:
    cache, key = KVCache(1, 1, 260, 4), torch.zeros(1, 1, 260, 4)
    key[0, 0, [0, 127, 128, 255, 256, 259], 1] = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    for part in key.split(steps, dim=2):
        cache.append(part, part)
    assert cache.key_norms[0, 0].tolist() == pytest.approx([2.0, 4.0, 6.0])


def test_key_norms_of_what_is_not_a_number_bound_nothing() -> None:
    cache, key = KVCache(1, 1, 300, 4), torch.ones(1, 1, 200, 4)
    key[0, 0, 150, 2] = torch.nan
    cache.append(key, key)
    assert cache.key_norms[0, 0].isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("back", [0, 1, 50, 259, 1000])
def test_a_truncated_cache_goes_on_as_a_new_one_would(back: int) -> None:
    query, key, value = LONG.tensors
    other = [x.flip(2) for x in (query, key, value)]
    used, new = (KVCache(2, KV_HEADS, 800, HEAD_DIM) for _ in range(2))
    used.append(key, 1e3 * value)
    used.truncate(max(LONG.length - back, 0))
    held = min(max(LONG.length - back, 0), LONG.length)
    assert used.length == held
    used.truncate(LONG.length + 100)  # no more than there are
    assert used.length == held
    new.append(key[:, :, :held], 1e3 * value[:, :, :held])
    with changed(_tile_plan, SHORT=0):
        results = [cache.append(*other[1:]) and cache.attend(other[0], LONG.slopes_tensor) for cache in (used, new)]
    largest = 1e3 * value.abs().max()
    torch.testing.assert_close(*results, rtol=0, atol=float(2**-20 * largest))


def test_appends_happen_in_place_and_touch_nothing_else() -> None:
    _, key, value = LONG.tensors
    cache = KVCache(2, KV_HEADS, LONG.length + 3, HEAD_DIM)
    pointers = [x.data_ptr() for x in (cache.key, cache.value, cache.key_norms)]
    for part in LONG.parts:
        keys, values = cache.append(key[:, :, part], value[:, :, part])
        assert keys.shape == values.shape == (2, KV_HEADS, part.stop, HEAD_DIM)
        assert torch.equal(keys, key[:, :, : part.stop])
        assert torch.equal(values, value[:, :, : part.stop])
        assert not cache.key[:, :, part.stop :].any()
    assert [x.data_ptr() for x in (cache.key, cache.value, cache.key_norms)] == pointers
    assert [keys.data_ptr(), values.data_ptr()] == pointers[:2]


@pytest.mark.parametrize("length", [-1, -300, 1.5, None, True])
def test_a_length_that_is_none_is_refused(length: Any) -> None:
    for cache in (KVCache(2, KV_HEADS, 5, HEAD_DIM), LONG.evicting()):
        cache.append(*torch.zeros(2, 2, KV_HEADS, 3, HEAD_DIM).unbind())
        with pytest.raises((TypeError, ValueError), match=r"^length must (not be negative|be an integer), got"):
            cache.truncate(length)
        assert cache.length == 3


def test_sizes_may_be_small_numpy_integers() -> None:
    sizes = [np.uint8(n) for n in (2, KV_HEADS, 200, HEAD_DIM)]
    key, value = (x[:, :, :200] for x in LONG.tensors[1:])
    evicting = EvictingKVCache(*sizes, slopes=LONG.slopes_tensor, max_query_norm=4.0)
    for cache in (KVCache(*sizes), evicting):
        cache.append(key, value)
        assert cache.length == cache.max_length == 200


@pytest.mark.parametrize("configuration", [{}, {"num_kv_heads": 2}, {"window_size": 30}, {"learnable_slopes": True}])
def test_a_layer_decodes_what_it_prefills_beyond_what_is_short(configuration: dict[str, Any]) -> None:
    torch.manual_seed(0)
    layer, x = AlibiAttention(32, 4, **configuration), torch.randn(2, _tile_plan.SHORT + 140, 32)
    cache = layer.make_cache(2, x.shape[1])
    with torch.no_grad():
        parts = x.split([_tile_plan.SHORT - 1, 1, 1, 127, 1, 10, 1], dim=1)
        decoded = torch.cat([layer(part, cache=cache) for part in parts], dim=1)
        torch.testing.assert_close(decoded, layer(x), rtol=0, atol=2e-6)


# --- The cache that evicts -----------------------------------------------------------------------------------------


def dropped_share(stream: Stream, cache: EvictingKVCache, exact: Attention, part: slice) -> np.ndarray:
    """Return the weight of what the heads do not hold, ``[batch, num_heads, q_len]``."""
    group = HEADS // KV_HEADS
    first = [part.stop - cache.kept[head // group] for head in range(HEADS)]
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
    with changed(_evicting_cache, ROOM=room), changed(_tile_plan, SHORT=0):
        for part in stream.parts:
            cache.append(key[:, :, part], value[:, :, part])
            assert all(part.stop - part.start <= kept <= part.stop for kept in cache.kept)
            share = dropped_share(stream, cache, exact, part)
            assert (share <= stream.share / 2 * (1 + 1e-9)).all()
            outputs.append(cache.attend(query[:, :, part]))
    assert cache.length == stream.length
    assert_within(numpy(torch.cat(outputs, dim=2)), leaving_out(exact, stream.share))


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
    direction = torch.eye(HEAD_DIM, dtype=torch.float64)[0]
    sizes = torch.tensor([size] * old + [-size] * last + [-1e3 * size], dtype=torch.float64)
    keys = (sizes[:, None] * direction).expand(1, 1, -1, -1)
    slopes = torch.tensor([slope], dtype=torch.float64)
    options: dict[str, Any] = {"tolerance": tolerance, "dtype": torch.float64, "max_query_norm": q_norm}
    cache = EvictingKVCache(1, 1, old + last, HEAD_DIM, slopes=slopes, **options)
    for part in keys.split([old, last, 1], dim=2):
        cache.append(part, part)
    assert cache.kept == [math.ceil(needed) + 1]
    distance = torch.arange(old + last, -1, -1)
    weights = (SCALE * q_norm * sizes - slope * distance).softmax(0)
    share = weights[: cache.length - cache.kept[0]].sum().item()
    assert share <= allowed
    assert share >= 0.6 * allowed or missed > 0
    along = weights[:old].sum().item()
    assert missed < 0 or along / (1 - along) > allowed  # a token less would not have been enough
    exact = (weights @ keys[0, 0]) @ direction
    result = cache.attend((q_norm * direction).expand(1, 1, 1, -1))[0, 0, 0] @ direction
    assert 0 < (result - exact).abs() <= 2 * tolerance * 1e3 * size


@pytest.mark.parametrize("entry", [0, 1])
@pytest.mark.parametrize("head", [0, 1])
def test_the_largest_key_counts_whichever_sequence_and_head_it_is_in(entry: int, head: int) -> None:
    cache = EvictingKVCache(2, 2, 100, HEAD_DIM, slopes=torch.ones(2), max_query_norm=4.0, tolerance=2.0**-23)
    keys = torch.zeros(2, 2, 60, HEAD_DIM)
    keys[entry, head, 5, 2] = 5.0
    with changed(_evicting_cache, ROOM=1):
        for part in keys.split(1, dim=2):
            cache.append(part, part)
    need = 2 * SCALE * 4.0 * 5.0 - math.log(2.0**-24 * -math.expm1(-1.0))
    assert cache.kept[head] >= math.ceil(need) + 1
    assert max(cache.kept) < 60


def test_keys_too_small_to_be_squared_are_not_taken_for_zeros() -> None:
    direction = torch.eye(HEAD_DIM)[0]
    sizes = torch.tensor([2e-23] * 40 + [-2e-23] * 30)
    keys = (sizes[:, None] * direction).expand(1, 1, -1, -1)
    cache = EvictingKVCache(1, 1, 100, HEAD_DIM, slopes=torch.ones(1), max_query_norm=1e25)
    with changed(_evicting_cache, ROOM=1):
        for part in keys.split(1, dim=2):
            cache.append(part, part)
    # Scores lie between -100 and 100: the first keys outweigh the last, 70 tokens of slope 1 or not.
    assert cache.kept == [70]


def test_heads_drop_what_they_do_not_need_over_thousands_of_steps() -> None:
    torch.manual_seed(0)
    slopes, steps, most = torch.tensor([2.0, 2.0, 0.5, 0.5, 0.125, 0.125, 0.0, 1.0]), 3000, 3000
    cache = EvictingKVCache(1, 4, most, 8, slopes=slopes, max_query_norm=2.0)
    key, value = torch.randn(2, 1, 4, steps, 8).unbind()
    key /= key.norm(dim=-1, keepdim=True)
    query = 1.999 * torch.nn.functional.normalize(torch.randn(1, 8, steps, 8), dim=-1)
    score_range = 2 * 8**-0.5 * 2.0 * (1 + 1e-4)
    largest, memory = [0] * 4, []
    for step in range(steps):
        cache.append(key[:, :, step : step + 1], value[:, :, step : step + 1])
        largest = [max(pair) for pair in zip(largest, cache.kept, strict=True)]
        if step % 250 == 249:
            memory.append(cache.nbytes)
            result = cache.attend(query[:, :, step : step + 1], slopes)
            held = key[:, :, : step + 1], value[:, :, : step + 1]
            expected = alibi_torch.attention(query[:, :, step : step + 1], *held, slopes, tolerance=0.0)
            torch.testing.assert_close(result, expected, rtol=0, atol=1e-5)
    for slope, kept in zip((2.0, 0.5, 0.125), largest, strict=False):
        need = math.ceil((score_range - math.log(2.0**-25 * -math.expm1(-slope))) / slope) + 1
        assert need <= kept <= need + 1 + max(64, need // 4 + 1)
    assert largest[3] == cache.kept[3] == steps  # a slope of 0 never lets go
    endless = 2 * steps * 8 * 4
    assert all(used - min(2 * most, 1.25 * steps) * 8 * 8 <= 2 * 4 * 8 * 1000 for used in memory)
    assert endless <= cache.nbytes <= 1.3 * endless
    assert cache.length == steps


def test_memory_shrinks_after_a_long_prompt() -> None:
    cache = EvictingKVCache(1, 1, 9000, 8, slopes=torch.ones(1), max_query_norm=1.0)
    cache.append(*torch.zeros(2, 1, 1, 5000, 8).unbind())
    before = cache.nbytes
    assert cache.kept == [5000]
    cache.append(*torch.zeros(2, 1, 1, 1, 8).unbind())
    assert cache.kept[0] < 30
    assert cache.nbytes < before / 20


def test_no_head_ever_holds_more_than_max_length() -> None:
    cache = EvictingKVCache(1, 2, 20, 8, slopes=torch.tensor([8.0, 1.0]), max_query_norm=1.0)
    for _ in range(100):
        cache.append(*torch.zeros(2, 1, 2, 1, 8).unbind())
        assert max(cache.kept) <= cache.max_length == 20
        assert cache.nbytes <= 2 * 2 * 20 * 8 * 4


def test_a_full_cache_refuses_and_stays_as_it_was() -> None:
    cache = EvictingKVCache(1, 2, 20, 8, slopes=torch.tensor([8.0, 0.0]), max_query_norm=1.0)
    cache.append(*torch.zeros(2, 1, 2, 18, 8).unbind())
    kept = cache.kept
    with pytest.raises(ValueError, match="cache must have room for 3 more tokens, got max_length 20 with 18 in use"):
        cache.append(*torch.ones(2, 1, 2, 3, 8).unbind())
    assert (cache.length, cache.kept) == (18, kept)
    cache.append(*torch.zeros(2, 1, 2, 2, 8).unbind())
    assert cache.length == 20


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
        ({"max_length": 0}, ValueError, "max_length must be at least 1"),
        ({"max_length": 2.5}, TypeError, "max_length must be an integer"),
        ({"slopes": torch.ones(2, 4)}, TypeError, "slopes must be a tensor of one axis"),
        ({"slopes": 4}, TypeError, "slopes must be a tensor of one axis, got 4"),
        ({"slopes": torch.ones(3)}, ValueError, "num_kv_heads must divide num_heads"),
        ({"slopes": -torch.ones(4)}, ValueError, "slopes must not be negative"),
        ({"slopes": torch.full((4,), torch.nan)}, ValueError, "slopes must be finite"),
        ({"slopes": torch.ones(4, dtype=torch.int32)}, TypeError, "slopes must have a real floating dtype"),
        ({"slopes": torch.ones(4, device="meta")}, ValueError, "slopes must be on the device of query"),
        ({"dtype": torch.int32}, TypeError, "dtype must be a real floating dtype"),
    ],
)
def test_an_evicting_cache_is_not_made_of(options: dict[str, Any], error: type, message: str) -> None:
    arguments = {"slopes": torch.ones(4), "max_query_norm": 8.0} | options
    with pytest.raises(error, match=f"^{message}"):
        EvictingKVCache(2, KV_HEADS, arguments.pop("max_length", 20), HEAD_DIM, **arguments)


def held() -> EvictingKVCache:
    """Return a cache that has dropped tokens, with 3 more since."""
    cache = LONG.evicting(max_length=200)
    cache.append(*torch.zeros(2, 2, KV_HEADS, 200, HEAD_DIM).unbind())
    cache.append(*torch.zeros(2, 2, KV_HEADS, 3, HEAD_DIM).unbind())
    assert cache.length == 203
    assert max(cache.kept) < 100
    return cache


def a_query(**changes: Any) -> Tensor:
    return torch.zeros(*({"batch": 2, "heads": HEADS, "q_len": 3, "head_dim": HEAD_DIM} | changes).values())


def one_too_long() -> Tensor:
    query = a_query()
    query[1, 2, 1, 3] = 4.0 + 2.0**-20
    return query


@pytest.mark.parametrize(
    ("query", "arguments", "error", "message"),
    [
        (a_query(batch=3), {}, ValueError, "key must have the batch axes of query"),
        (a_query(heads=8), {}, ValueError, "slopes must have shape"),
        (a_query(heads=2), {}, ValueError, "slopes must have shape"),
        (a_query(head_dim=5), {}, ValueError, "key must have the head_dim of query"),
        (a_query(q_len=4), {}, ValueError, "query must be of the 3 last tokens, whose keys are all held, got q_len 4"),
        (a_query()[0], {}, ValueError, "key must have the batch axes of query"),
        (a_query().half(), {}, TypeError, "query, key and value must have one dtype"),
        (a_query().to("meta"), {}, ValueError, "key must be on the device of query"),
        ([0.0], {}, TypeError, "query must be an array"),
        (a_query(), {"mask": torch.ones(3, 203, dtype=torch.bool)}, ValueError, "mask must be None"),
        (a_query(), {"segment_ids": (torch.zeros(3), torch.zeros(203))}, ValueError, "segment_ids must be None"),
        (a_query(), {"slopes": torch.ones(HEADS)}, ValueError, "slopes must be those that the cache was made for"),
        (a_query(), {"slopes": torch.ones(3)}, ValueError, "slopes must have shape"),
        (a_query(), {"slopes": 4}, ValueError, "slopes must be those that the cache was made for"),
        (a_query(), {"window_size": 3}, ValueError, "window_size must be what the cache was made for, None, got 3"),
        (a_query() + 2.001, {}, ValueError, r"query must have norms of at most max_query_norm, 4, .* got 4\.00"),
        (one_too_long(), {}, ValueError, r"query must have norms of at most max_query_norm, 4, .* got 4;"),
        (a_query() + 1e30, {}, ValueError, r"query must have norms of at most max_query_norm"),
        (a_query() + math.nan, {}, ValueError, r"query must have norms of at most max_query_norm, 4, .* got nan"),
    ],
)
def test_an_evicting_cache_does_not_attend_to(query: Any, arguments: Any, error: type, message: str) -> None:
    cache = held()
    with pytest.raises(error, match=f"^{message}"):
        cache.attend(query, **arguments)
    assert not cache.attend(a_query() + 2.0).any()  # of norm 4 exactly; all values are zeros


@pytest.mark.parametrize(
    ("key", "error"),
    [
        (torch.zeros(3, KV_HEADS, 2, HEAD_DIM), ValueError),
        (torch.zeros(2, HEADS, 2, HEAD_DIM), ValueError),
        (torch.zeros(2, KV_HEADS, 2, HEAD_DIM).double(), ValueError),
        (torch.zeros(2, KV_HEADS, 2, HEAD_DIM, device="meta"), ValueError),
        (torch.zeros(2, KV_HEADS, HEAD_DIM), TypeError),
    ],
    ids=["batch", "heads", "dtype", "device", "axes"],
)
def test_an_evicting_cache_does_not_append(key: Tensor, error: type) -> None:
    cache = held()
    with pytest.raises(error, match="^key must"):
        cache.append(key, key)
    assert cache.length == 203


def test_truncation_stops_where_keys_were_dropped() -> None:
    query, key, value = LONG.tensors
    cache = LONG.evicting(max_length=300)
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
    result = cache.attend(query[:, :, 305:])
    answer = leaving_out(LONG.exact(), LONG.share)
    assert_within(numpy(result), Answer(answer.value[:, :, 305:], answer.budget[:, :, 305:]))


@given(st.data())
def test_truncation_and_repetition_leave_the_proof_standing(data: st.DataObject) -> None:
    """Whatever is appended, taken back and appended again, weights are those of the sequence as it is in the end."""
    stream = data.draw(st.sampled_from([LONG, dataclasses.replace(LONG, sides="old along", shape="equal")]))
    _, key, value = stream.tensors
    cache = stream.evicting(max_length=2 * stream.length)
    with changed(_evicting_cache, ROOM=1):
        while cache.length < 120:
            before = cache.length
            count = data.draw(st.sampled_from([1, 3, 30]))
            junk = data.draw(st.sampled_from([0.0, 1.0, 30.0]))
            if junk:
                cache.append(*(junk * torch.randn(2, 2, KV_HEADS, count, HEAD_DIM)).unbind())
                cache.truncate(before)
                assert cache.length == before
            part = slice(before, before + count)
            cache.append(key[:, :, part], value[:, :, part])
    share = dropped_share(stream, cache, stream.exact(), part)
    assert (share <= stream.share / 2 * (1 + 1e-9)).all()
    assert max(cache.kept) < stream.length


@pytest.mark.parametrize("change", ["append", "learn", "in place"])
def test_slopes_that_changed_since_are_refused(change: str) -> None:
    layer = AlibiAttention(16, 4, learnable_slopes=change == "learn")
    x = torch.randn(1, 3, 16)
    with torch.no_grad():
        cache = layer.make_cache(1, 50, evict=True, max_query_norm=100.0)
        layer(x, cache=cache)
        if change == "append":
            assert layer(x, cache=cache).shape == x.shape  # nothing has changed
            return
        (layer.log_slopes if change == "learn" else layer.slopes).mul_(0.5)
        with pytest.raises(ValueError, match="slopes must be those that the cache was made for; make a new one"):
            layer(x, cache=cache)
    assert cache.length == 3


def test_a_cast_layer_needs_a_new_cache() -> None:
    layer = AlibiAttention(16, 4)
    cache = layer.make_cache(1, 50, evict=True, max_query_norm=100.0)
    with torch.no_grad(), pytest.raises(ValueError, match=r"^key must be torch.float32 .* got torch.float64"):
        layer.double()(torch.randn(1, 3, 16, dtype=torch.float64), cache=cache)
    for dtype in (torch.float64, torch.bfloat16):
        layer.to(dtype)
        cache = layer.make_cache(1, 50, evict=True, max_query_norm=100.0)
        with torch.no_grad():
            assert layer(torch.randn(1, 3, 16, dtype=dtype), cache=cache).dtype == dtype


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"evict": True}, ValueError, "max_query_norm must be given with evict=True"),
        ({"max_query_norm": 3.0}, ValueError, "max_query_norm must be None without evict=True, got 3.0"),
        ({"evict": 1, "max_query_norm": 3.0}, TypeError, "evict must be True or False"),
        ({"evict": True, "max_query_norm": -3.0}, ValueError, "max_query_norm must be positive"),
        ({"evict": True, "max_query_norm": math.nan}, ValueError, "max_query_norm must be finite"),
    ],
)
def test_a_layer_makes_no_cache_of(options: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=f"^{message}"):
        AlibiAttention(16, 4).make_cache(1, 50, **options)
    with pytest.raises(error, match=f"^{message}"):
        AlibiTransformer(AlibiConfig(num_layers=1, d_model=16, num_heads=4)).make_caches(1, 50, **options)


STEEP_LAYER = {"slopes": torch.tensor([2.0, 1.0, 0.5, 0.7])}


@pytest.mark.parametrize(
    "configuration",
    [{}, {"num_kv_heads": 2}, {"window_size": 3}, {"learnable_slopes": True}, {"dtype": torch.float64}],
    ids=str,
)
def test_a_layer_that_evicts_decodes_what_it_prefills(configuration: dict[str, Any]) -> None:
    torch.manual_seed(0)
    layer = AlibiAttention(32, 4, **STEEP_LAYER, **configuration)
    x = torch.randn(2, 300, 32, dtype=configuration.get("dtype"))
    cache = layer.make_cache(2, 300, evict=True, max_query_norm=8.0)
    with torch.no_grad(), changed(_evicting_cache, ROOM=1):
        decoded = torch.cat([layer(part, cache=cache) for part in x.split([100, 1, 17, *[1] * 182], dim=1)], dim=1)
        torch.testing.assert_close(decoded, layer(x), rtol=0, atol=2e-6)
    assert cache.length == 300
    assert max(cache.kept) < 150


@pytest.mark.parametrize("bad", [math.nan, 1e4])
def test_a_refused_token_leaves_the_cache_as_it_was(bad: float) -> None:
    torch.manual_seed(0)
    layer, x = AlibiAttention(32, 4, **STEEP_LAYER), torch.randn(2, 1000, 32)
    tried, spared = (layer.make_cache(2, 1000, evict=True, max_query_norm=8.0) for _ in range(2))
    with torch.no_grad():
        for i in range(0, 1000, 5):
            token = x[:, i : i + 5]
            if i == 500:
                with pytest.raises(ValueError, match="query must have norms of at most max_query_norm, 8, "):
                    layer(token * bad, cache=tried)
                assert tried.length == 500
            assert torch.equal(layer(token, cache=tried), layer(token, cache=spared))
    # Keys of a size that never came to be held do not widen the horizons for good, either.
    assert tried.kept == spared.kept
    assert max(tried.kept) < 200


def test_an_evicting_cache_follows_autocast() -> None:
    torch.manual_seed(0)
    layer, x = AlibiAttention(32, 4, **STEEP_LAYER), torch.randn(1, 200, 32)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        cache = layer.make_cache(1, 200, evict=True, max_query_norm=8.0)
        decoded = torch.cat([layer(part, cache=cache) for part in x.split(8, dim=1)], dim=1)
        assert decoded.dtype == torch.bfloat16
        torch.testing.assert_close(decoded, layer(x), rtol=0, atol=2**-5)
    assert max(cache.kept) < 150


def a_model() -> AlibiLanguageModel:
    torch.manual_seed(0)
    config = AlibiConfig(num_layers=2, d_model=32, num_heads=4, num_kv_heads=2, dropout=0.0)
    return AlibiLanguageModel(config, 31, attention=lambda c: AlibiAttention(32, 4, num_kv_heads=2, **STEEP_LAYER))


def test_a_language_model_generates_with_caches_that_evict() -> None:
    model = a_model().eval()
    for weight in model.transformer.blocks.parameters():
        weight.data *= 2 if weight.ndim == 2 else 1
    prompt = torch.randint(31, (2, 40))
    expected = model.generate(prompt, 200)
    caches = model.transformer.make_caches(2, 300, evict=True, max_query_norm=50.0)
    found, unread = prompt, prompt
    with torch.no_grad():
        for _ in range(200):
            unread = model(unread, caches=caches)[:, -1:].argmax(dim=-1)
            found = torch.cat([found, unread], dim=1)
    assert torch.equal(found, expected)
    assert len(found.unique()) > 5
    assert all(cache.length == 239 and cache.kept[0] < 239 for cache in caches)


def test_a_model_whose_last_block_refuses_leaves_all_caches_as_they_were() -> None:
    model = a_model().transformer
    model.blocks[1].attention.q_proj.weight.data *= 1e3
    caches = model.make_caches(1, 50, evict=True, max_query_norm=8.0)
    with torch.no_grad(), pytest.raises(ValueError, match="max_query_norm"):
        model(torch.randn(1, 3, 32), caches=caches)
    assert [cache.length for cache in caches] == [0, 0]
