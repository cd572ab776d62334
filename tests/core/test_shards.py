"""Which tokens shards of a sequence need of each other, against a count of all pairs of queries and keys."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alibi_core import Shards, horizon, shard_plan, slopes

SHARDS = st.builds(
    Shards.of_length,
    length=st.integers(1, 150),
    num_shards=st.integers(1, 6),
    placement=st.sampled_from(["contiguous", "zigzag"]),
)
SLOPES = st.lists(st.sampled_from([0.0, 0.03, 0.2, 1.0, 5.0]), min_size=4, max_size=4)


@st.composite
def arguments(draw: st.DrawFn) -> dict[str, object]:
    is_causal = draw(st.booleans())
    kv_heads = draw(st.sampled_from([1, 2, 4]))
    return {
        "slopes": np.asarray(draw(SLOPES)),
        "score_bound": draw(st.sampled_from([0.0, 3.0])),
        "tolerance": draw(st.sampled_from([0.0, 1e-2, 0.3])),
        "is_causal": is_causal,
        "future_slopes": None if is_causal or draw(st.booleans()) else np.asarray(draw(SLOPES)),
        "window_size": draw(st.sampled_from([None, 0, 7, 40])),
        "num_kv_heads": kv_heads,
        "head_shards": draw(st.sampled_from([n for n in (1, 2) if kv_heads % n == 0])),
    }


@given(SHARDS)
def test_every_token_has_one_place(shards: Shards) -> None:
    assert sorted(shards.order().tolist()) == list(range(shards.padded_length))
    for shard in range(shards.num_shards):
        for slot, chunk in enumerate(shards.chunks(shard)):
            assert shards.place(chunk) == (shard, slot)
            start = shard * shards.shard_len + slot * shards.chunk_len
            assert shards.order()[start] == chunk * shards.chunk_len


@given(SHARDS, st.integers(-3, 3).filter(bool), st.booleans())
def test_pairs_connect_chunks_that_far_apart(shards: Shards, distance: int, cyclic: bool) -> None:
    slots = range(shards.slots)
    for target_slot in slots:
        pairs = {t: (s, a) for a in slots for s, t in shards.pairs(distance, a, target_slot, cyclic=cyclic)}
        for target in range(shards.num_shards):
            chunk = shards.chunks(target)[target_slot]
            source = chunk - distance
            if cyclic:
                source %= shards.num_chunks
            exists = 0 <= source < shards.num_chunks
            needed = exists and max(source, chunk) * shards.chunk_len < shards.length
            assert (target in pairs) == (cyclic or needed)
            if target in pairs:
                assert pairs[target] == shards.place(source)


@given(SHARDS, arguments())
def test_a_plan_sends_all_keys_within_the_horizons(shards: Shards, given: dict) -> None:
    plan = shard_plan(shards=shards, **given)
    position = np.arange(shards.length)
    past = horizon(given["slopes"], given["score_bound"], tolerance=given["tolerance"], is_causal=given["is_causal"])
    future = given["slopes"] if given["future_slopes"] is None else given["future_slopes"]
    future = horizon(future, given["score_bound"], tolerance=given["tolerance"], is_causal=given["is_causal"])
    behind = position[:, None] - position
    heads = len(past) // given["num_kv_heads"]
    local_heads = given["num_kv_heads"] // given["head_shards"]
    home = np.empty(shards.padded_length, int)
    home[shards.order()] = np.arange(shards.padded_length) // shards.shard_len
    work = np.zeros(shards.num_shards, int)
    for head in range(len(past)):
        visible = np.where(behind >= 0, behind < past[head], -behind < future[head])
        if given["is_causal"]:
            visible &= behind >= 0
        if given["window_size"] is not None:
            visible &= np.abs(behind) <= given["window_size"]
        for shard in range(shards.num_shards):
            own = home[: shards.length] == shard
            held = own.copy()
            for source, kv_head, first, stop in plan.needs(shard):
                if kv_head == head // heads % local_heads:
                    assert set(home[first:stop]) == {source}
                    assert source != shard
                    held[first:stop] = True
            assert not np.any(visible[own] & ~held)
            work[shard] += visible[own].sum()
    assert plan.work().tolist() == work.tolist()


@given(SHARDS, arguments())
def test_bytes_are_those_of_the_tokens_needed(shards: Shards, given: dict) -> None:
    plan = shard_plan(shards=shards, **given)
    needs = [need for shard in range(shards.num_shards) for need in plan.needs(shard)]
    tokens = sum(stop - first for _, _, first, stop in needs) * given["head_shards"]
    if given["is_causal"] or shards.length == shards.padded_length:
        assert plan.bytes_exchanged(3, 2) == 2 * 3 * 2 * tokens
    else:  # what is sent of the last chunk may be padding
        assert plan.bytes_exchanged(3, 2) >= 2 * 3 * 2 * tokens
    assert plan.bytes_required(3, 2) <= plan.bytes_exchanged(3, 2)
    # Two chunks of one device may get the same.
    assert plan.bytes_exchanged(3, 2) <= shards.slots * plan.bytes_of_ring(3, 2)


@given(SHARDS, arguments())
def test_complete_plans_are_those_that_reach_everything(shards: Shards, given: dict) -> None:
    plan = shard_plan(shards=shards, **given)
    most = shards.padded_length - shards.chunk_len
    most = most if given["window_size"] is None else min(most, given["window_size"])
    reaches = min(plan.past) >= most and (given["is_causal"] or min(plan.future) >= most)
    assert plan.is_complete == reaches


def test_a_long_sequence_sends_a_thirtieth_of_a_ring() -> None:
    plan = shard_plan(8, Shards(8, 8192), score_bound=14.0)
    assert plan.bytes_exchanged(64, 2) * 25 < plan.bytes_of_ring(64, 2)
    assert plan.bytes_exchanged(64, 2) < 1.1 * plan.bytes_required(64, 2)
    work = plan.work()
    assert work.max() / work.mean() < 1.1


def test_devices_with_other_heads_send_as_much_as_any_of_them_needs() -> None:
    shards = Shards(4, 64)
    plan = shard_plan(slopes(8), shards, score_bound=1.0, head_shards=4)
    flattest = shard_plan(slopes(8)[-2:], shards, score_bound=1.0)
    assert plan.past == flattest.past
    assert plan.bytes_exchanged(4, 4) == 4 * flattest.bytes_exchanged(4, 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"slopes": np.ones((2, 4))}, "slopes must have shape [num_heads], got (2, 4)"),
        ({"future_slopes": np.ones(3), "is_causal": False}, "future_slopes must have shape (4,), got (3,)"),
        ({"future_slopes": np.ones(4)}, "future_slopes must be None"),
        ({"num_kv_heads": 3}, "num_kv_heads must divide num_heads, got 3 and 4"),
        ({"head_shards": 3}, "head_shards must divide num_kv_heads, got 3 and 4"),
        ({"score_bound": -1.0}, "score_bound must not be negative"),
        ({"tolerance": float("nan")}, "tolerance must be finite"),
        ({"window_size": -1}, "window_size must not be negative"),
    ],
)
def test_plans_refuse_by_name(changes: dict, message: str) -> None:
    call = {"slopes": np.ones(4), "shards": Shards(2, 8), "score_bound": 1.0} | changes
    with pytest.raises(ValueError, match=re.escape(message)):
        shard_plan(**call)


def test_shards_refuse_by_name() -> None:
    with pytest.raises(ValueError, match="length must be between 1 and the 16 tokens"):
        Shards(2, 8, length=17)
    with pytest.raises(ValueError, match="shard_len must be even where placement is 'zigzag', got 7"):
        Shards.of_shard_len(7, 2, "zigzag")
    with pytest.raises(ValueError, match="placement must be one of 'contiguous', 'zigzag', got 'striped'"):
        Shards(2, 8, "striped")
    with pytest.raises(TypeError, match="shards must be alibi_core.Shards, got int"):
        shard_plan(4, 8, score_bound=1.0)  # type: ignore[arg-type]
