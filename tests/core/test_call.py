"""A call, taken apart and cut to pieces."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from alibi_core._arrays import FLOATING
from alibi_core.backend import LENGTH_FIRST, AttentionCall, split_call
from alibi_core.backend.horizon import entry_of

IDS = np.asarray([[0, 0, 0, 1, 1, 2, 2], [5, 5, 5, 5, 5, 5, 4]])


def call_of(**rules: Any) -> AttentionCall:
    return AttentionCall.check(*np.zeros((3, 2, 3, 7, 5), np.float32), **rules)


def test_queries_with_the_ids_of_keys_see_their_own_key_in_every_form_of_the_call() -> None:
    call = call_of(segment_ids=IDS)
    whole = {"batch": slice(0, 2), "heads": slice(0, 3), "keys": slice(2, 7)}
    forms = [call, call.with_one_batch_axis(), entry_of(call, 1), split_call(call)[0].having(**split_call(call)[1])]
    for form in (*forms, call.map_arrays(lambda x, _: x.copy()), call.tile(queries=slice(2, 5), **whole)):
        assert form.sees_own_key
        assert form.every_query_attends
        assert form.bias()[1] is None
    apart = call.tile(queries=slice(1, 5), **whole)  # the first queries stand before the first key
    assert not apart.sees_own_key
    assert not apart.every_query_attends
    for q_offset in (2, -2):
        assert not call_of(q_offset=q_offset).sees_own_key


@pytest.mark.parametrize(
    "rules",
    [
        {"segment_ids": (IDS, IDS.copy())},
        {"segment_ids": IDS, "q_offset": 2},
        {"segment_ids": IDS, "q_offset": -2},
        {"segment_ids": IDS, "q_offset": np.asarray([0, 0])},
        {"segment_ids": IDS, "mask": np.ones((2, 1, 1, 7), bool)},
    ],
)
def test_nobody_claims_that_queries_see_their_own_key_who_does_not_know(rules: dict[str, Any]) -> None:
    call = call_of(**rules)
    assert not call.sees_own_key
    assert not call.every_query_attends
    tile = call.tile(batch=slice(0, 2), heads=slice(0, 3), queries=slice(2, 5), keys=slice(0, 7))
    assert not tile.sees_own_key


def test_a_shift_of_positions_hides_no_mistake_of_ids() -> None:
    """A tile's own keys are those of the whole call, whose ids they have."""
    call = call_of(segment_ids=IDS, is_causal=False)
    bias = np.broadcast_to(call.bias()[0], (2, 3, 7, 7))
    for queries, keys in ((slice(2, 5), slice(1, 7)), (slice(0, 3), slice(3, 7)), (slice(4, 7), slice(0, 5))):
        tile, attends = call.tile(batch=slice(0, 2), heads=slice(0, 3), queries=queries, keys=keys).bias()
        seen = np.isfinite(bias[:, :, queries, keys])
        if attends is not None:
            seen = seen | ~attends  # rows that see nothing of the tile
        assert np.array_equal(np.isfinite(np.broadcast_to(tile, seen.shape)), seen)


def test_a_call_without_its_arrays_is_hashable() -> None:
    (one, arrays), (other, _) = (split_call(call_of(segment_ids=IDS, added_bias=np.zeros(7))) for _ in range(2))
    assert sorted(arrays) == ["added_bias", "kv_segment_ids", "mask", "q_segment_ids", "slopes"]
    assert hash(one) == hash(other)
    assert one == other
    assert one.having(**arrays).slopes is arrays["slopes"]


@pytest.mark.parametrize("rules", [{}, {"positions": np.arange(7.0)}], ids=["indices", "positions"])
def test_a_tile_without_the_keys_of_its_queries_says_that_they_see_none(rules: dict[str, Any]) -> None:
    tile = call_of(**rules).tile(batch=slice(0, 2), heads=slice(0, 3), queries=slice(0, 3), keys=slice(4, 7))
    bias, attends = tile.bias()
    assert not tile.sees_own_key
    assert not np.any(attends)
    assert not np.any(bias)


GATES = np.full((2, 3, 5), -1.0, np.float32)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"log_gates": GATES[0]}, r"log_gates must have shape \(2, 3, 5\) \(batch, num_heads, kv_len\), got \(3, 5\)"),
        ({"log_gates": GATES + 2}, "log_gates must be numbers at most 0"),
        ({"log_gates": np.where(GATES < 0, np.nan, GATES)}, "log_gates must be numbers at most 0"),
        ({"log_gates": GATES, "is_causal": False}, "log_gates must be None with is_causal=False"),
        ({"log_gates": GATES, "positions": np.arange(5)}, "log_gates must be None with positions"),
        ({"log_gates": GATES, "law": "log"}, "log_gates must be None with law 'log'"),
        ({"sinks": GATES[..., 0]}, r"sinks must have shape \(3,\) \(num_heads\), got \(2, 3\)"),
        ({"sinks": np.asarray([0, np.inf, 0])}, "sinks must be numbers below inf"),
        ({"sinks": np.asarray([0, -np.inf, np.nan])}, "sinks must be numbers below inf"),
    ],
)
def test_gates_and_sinks_that_mean_nothing_are_refused(arguments: dict[str, Any], message: str) -> None:
    query, key = np.zeros((2, 3, 5, 4), np.float32), np.zeros((2, 1, 5, 4), np.float32)
    with pytest.raises(ValueError, match=message):
        AttentionCall.check(query, key, key, **arguments)


def test_gates_are_heads_first_whatever_the_layout() -> None:
    query, key = np.zeros((2, 5, 3, 4), np.float32), np.zeros((2, 5, 1, 4), np.float32)
    drawn = -np.random.default_rng(0).random((2, 5, 3)).astype(np.float16)
    call = AttentionCall.check(query, key, key, log_gates=drawn, layout=LENGTH_FIRST, mask=np.arange(5) != 1)
    expected = drawn.swapaxes(1, 2).astype(np.float32)
    expected[..., 1] = 0  # a token that is masked forgets nothing
    np.testing.assert_array_equal(call.log_gates, expected)
    assert call.log_gates.dtype == np.float32
    assert not call.slopes.any()


@pytest.mark.parametrize("name", FLOATING)
def test_limits_of_dtypes_are_those_of_numpy(name: str) -> None:
    info = ml_dtypes.finfo(name)
    assert FLOATING[name] == (info.nmant + 1, info.eps / 2, info.smallest_normal, info.max)
