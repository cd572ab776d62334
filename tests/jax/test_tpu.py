"""The TPU kernel's text, run on the CPU: in rows of several blocks, with what makes kernels go wrong."""

from __future__ import annotations

import dataclasses
import functools
import os
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # or JAX waits for the TPU of an installed libtpu
jax = pytest.importorskip("jax")
pytest.importorskip("flax")
import jax.numpy as jnp  # noqa: E402
from jax.experimental.pallas import tpu as pltpu  # noqa: E402

import alibi_jax  # noqa: E402
from alibi_core.conformance.testing import DATA, FAR, FORMS, PER_BATCH, Case, Sizes  # noqa: E402
from alibi_core.conformance.testing import assert_within_budget as assert_within  # noqa: E402
from alibi_jax import TPU  # noqa: E402
from alibi_jax._tpu.backward_kernel import backward_of_keys, backward_of_queries  # noqa: E402
from alibi_jax._tpu.forward_kernel import forward  # noqa: E402
from alibi_jax._tpu.shape import KernelShape  # noqa: E402
from alibi_jax._tpu.tables import Inputs, by_head, queries_of_keys  # noqa: E402
from tests.support.full import first_of, in_full  # noqa: E402
from tests.support.tpu_cases import (  # noqa: E402
    INTERPRETED,
    QUICKLY,
    STEEP,
    answers,
    assert_exact,
    computed,
    plain,
    planned,
    ranges_of,
    replaced,
    tensors_of,
)

IS_THOROUGH = settings.default.max_examples > 100
OFFSETS = (-FAR, -301, -128, -1, 0, 13, 127, 128, 300, FAR)

# A kernel takes seconds to compile, and moments to run: a few structures, each with many values.
STRUCTURES = {
    "causal": Case(Sizes(2, 2, 2, (300, 300), 8), "causal", None, None, None, None, False, 0),
    "causal, one head, one key": Case(Sizes(1, 1, 1, (1, 1), 1), "causal", None, None, None, None, False, 0),
    "causal, more queries": Case(Sizes(1, 2, 2, (300, 129), 5), "causal", None, None, None, None, False, 0),
    "causal, offsets": Case(Sizes(3, 1, 3, (129, 300), 5), "causal", PER_BATCH, None, None, None, True, 0),
    "causal, window": Case(Sizes(1, 1, 2, (300, 300), 80), "causal", None, 130, None, None, False, 0),
    "causal, far, key mask": Case(Sizes(2, 1, 2, (129, 300), 5), "causal", FAR, None, None, "by key", False, 0),
    "causal, packed, key mask": Case(Sizes(2, 2, 1, (300, 300), 5), "causal", None, None, "same", "by key", True, 0),
    "decoding": Case(Sizes(2, 2, 3, (1, 300), 64), "causal", None, None, None, None, True, 0),
    "decoding, window, key mask": Case(Sizes(2, 1, 2, (5, 260), 8), "causal", PER_BATCH, 3, None, "by key", False, 0),
    "symmetric": Case(Sizes(1, 3, 1, (129, 129), 5), "symmetric", None, None, None, None, False, 0),
    "symmetric, packed": Case(Sizes(2, 1, 2, (300, 300), 5), "symmetric", None, None, "same", None, True, 0),
    "asymmetric, offsets, window": Case(
        Sizes(3, 1, 3, (257, 300), 5), "asymmetric", PER_BATCH, 40, None, None, True, 0
    ),
    "asymmetric, pairs": Case(Sizes(2, 2, 1, (127, 300), 5), "asymmetric", None, 130, "pair", None, True, 0),
    "clamped, one row of ids": Case(Sizes(2, 2, 1, (128, 300), 5), "clamped", -20, None, "one row", None, False, 0),
}
FAST = ("asymmetric, offsets, window",)
LOW_PRECISION = ("causal", "decoding", "asymmetric, offsets, window", "causal, packed, key mask")


@st.composite
def filled(draw: st.DrawFn, structure: Case, data: tuple[str | None, ...] = (None, *DATA)) -> Case:
    """Draw values for a structure: tensors, slopes, offsets of the batch entries."""
    case = dataclasses.replace(structure, seed=draw(st.integers(0, 2**16)))
    tensors = {name: case.arrays[name].copy() for name in ("query", "key", "value")}
    if (kind := draw(st.sampled_from(data))) is not None:
        DATA[kind](**tensors)
    arguments = dict(case.arguments)
    if case.q_offset == PER_BATCH:
        offsets = draw(st.lists(st.sampled_from(OFFSETS), min_size=case.sizes.batch, max_size=case.sizes.batch))
        arguments["q_offset"] = np.asarray(offsets, np.int32)
    slopes = case.arrays["slopes"]
    if draw(st.booleans()):
        slopes = np.resize(np.roll(STEEP, draw(st.integers(0, len(STEEP)))), slopes.shape).astype(np.float32) * 1.0
        slopes = slopes.astype(np.float64)
    return replaced(case, arguments=arguments, slopes=slopes, **tensors)


MANY = settings(max_examples=max(6, settings.default.max_examples // 3))


@pytest.mark.parametrize("structure", [*FAST, *map(in_full, (x for x in STRUCTURES if x not in FAST))])
@MANY
@given(data=st.data())
def test_result_and_gradients_are_exact_to_rounding(structure: str, data: st.DataObject) -> None:
    assert_exact(data.draw(filled(STRUCTURES[structure])))


@pytest.mark.full
@pytest.mark.parametrize("structure", LOW_PRECISION)
@MANY
@given(data=st.data())
def test_bfloat16_is_exact_to_its_rounding(structure: str, data: st.DataObject) -> None:
    tolerance = None if structure == "causal" else 0.0
    hostile = filled(STRUCTURES[structure], (None, "outlier", "equal_keys", "shifted"))
    assert_exact(data.draw(hostile), "bfloat16", tolerance=tolerance)


@pytest.mark.full
@pytest.mark.parametrize("seed", [41915, 42648])
def test_products_that_are_subnormal_may_become_zero(seed: int) -> None:
    # Weights of 1e-37 or so, times cotangents below 1/16: the sum of a group's is a normal number, no product is.
    assert_exact(dataclasses.replace(STRUCTURES["decoding"], seed=seed), "bfloat16", tolerance=0.0)


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@settings(max_examples=60 if IS_THOROUGH else 2)  # each compiles
@given(data=st.data())
def test_whatever_is_combined_is_exact(dtype: str, data: st.DataObject) -> None:
    sizes = data.draw(
        st.builds(
            Sizes,
            batch=st.integers(1, 3),
            num_kv_heads=st.integers(1, 3),
            group=st.integers(1, 3),
            lengths=st.tuples(*[st.sampled_from([1, 5, 127, 128, 129, 255, 256, 257, 300, 390])] * 2),
            head_dim=st.sampled_from([1, 5, 8, 64, 80, 130]),
        )
    )
    structure = Case(
        sizes,
        data.draw(st.sampled_from(FORMS)),
        data.draw(st.sampled_from([None, None, 7, -129, FAR, PER_BATCH])),
        data.draw(st.sampled_from([None, None, 0, 3, 127, 128, 200])),
        data.draw(st.sampled_from([None, "same", "pair", "one row"])),
        data.draw(st.sampled_from([None, "by key"])),
        slopes_per_batch=data.draw(st.booleans()),
        seed=0,
    )
    assert_exact(data.draw(filled(structure)), dtype, tolerance=data.draw(st.sampled_from([None, 0.0])))


# --- Nothing to see -------------------------------------------------------------------------------------------------


def key_mask(kv_len: int, *hidden: slice) -> np.ndarray:
    """Return a mask ``[batch, 1, 1, kv_len]``, of a batch entry for each slice."""
    mask = np.ones((len(hidden), 1, 1, kv_len), dtype=bool)
    for entry, where in zip(mask, hidden, strict=True):
        entry[..., where] = False
    return mask


NOTHING = {
    "mask": {"mask": np.zeros((2, 1, 1, 1), dtype=bool)},
    "segments": {"segment_ids": (np.zeros((2, 129), np.int32), np.ones((2, 257), np.int32))},
    "segments of a mask": {
        "segment_ids": (np.full((2, 129), -1, np.int32), np.full((2, 257), -1, np.int32)),
        "mask": np.zeros((2, 1, 1, 257), dtype=bool),
    },
    "offsets": {"q_offset": np.asarray([-129, -FAR], np.int32)},
    "window": {"q_offset": np.asarray([257 + 40, FAR], np.int32), "window_size": 40},
}


@pytest.mark.full
@pytest.mark.parametrize("rule", NOTHING)
def test_a_query_that_may_look_nowhere_gives_zeros_and_gets_none(rule: str) -> None:
    case = plain(Sizes(2, 1, 2, (129, 257), 5), slopes=[0.25, 0.0])
    found = computed(replaced(case, arguments=NOTHING[rule]))
    for name, array in found.items():
        np.testing.assert_array_equal(array, np.zeros_like(array), err_msg=name)


@pytest.mark.full
def test_some_rows_that_see_nothing_leave_the_others_alone() -> None:
    # Queries before all keys, ids that no key has, and an entry without any visible key.
    case = plain(Sizes(3, 1, 2, (300, 257), 5), slopes=[0.25, 0.0])
    ids = np.repeat([[3, -5, 7]], 3, axis=0).repeat(100, axis=1).astype(np.int32)
    kv_ids = np.where(np.arange(257) < 130, 3, 7)[None].repeat(3, axis=0).astype(np.int32)
    mask = key_mask(257, slice(0, 3), slice(None), slice(120, 257))
    arguments = {"q_offset": np.asarray([-43, 0, 0], np.int32), "segment_ids": (ids, kv_ids), "mask": mask}
    found = assert_exact(replaced(case, arguments=arguments))
    assert np.all(found["result"][1] == 0)
    assert np.all(found["result"][:, :, 100:200] == 0)
    assert np.all(found["result"][0, :, :46] == 0)
    assert np.all(found["result"][0, :, 50:90] != 0)


@pytest.mark.full
@pytest.mark.parametrize("ids", [(-(2**31), 2**31 - 1), (-2, -1), (0, -2)], ids=str)
def test_segments_of_any_number_and_masked_keys_are_told_apart(ids: tuple[int, int]) -> None:
    case = plain(Sizes(1, 1, 1, (300, 300), 5), slopes=[0.0])
    segments = np.where(np.arange(300) % 200 < 140, *ids).astype(np.int32)[None]
    for arguments in ({"segment_ids": segments}, {"segment_ids": segments, "mask": key_mask(300, slice(100, 180))}):
        assert_exact(replaced(case, arguments=arguments))


@pytest.mark.full
def test_padding_that_hides_the_nearest_thousands_of_keys() -> None:
    # Who looks from afar sees keys that differ by a step of the bias, however far away all are.
    case = plain(Sizes(2, 1, 2, (130, 3000), 5), slopes=[0.5, 2.0])
    arguments = {"mask": key_mask(3000, slice(1000, None), slice(150, None))}
    assert_exact(replaced(case, arguments=arguments))


@pytest.mark.full
@pytest.mark.parametrize("q_offset", [3_000, FAR, 2**31 - 2_000])
def test_queries_far_from_all_keys_tell_them_apart(q_offset: int) -> None:
    # With no scores, weights are those of a geometric series that begins at the last key, wherever the query is.
    case = plain(Sizes(1, 1, 2, (129, 300), 5), slopes=[0.5, 2.0])
    case = replaced(case, query=case.arrays["query"] * 0, arguments={"q_offset": np.asarray(q_offset, np.int32)})
    found = computed(case)["result"]
    powers = np.exp(-np.asarray([0.5, 2.0])[:, None] * np.arange(300)[::-1])
    weights = powers / powers.sum(axis=-1, keepdims=True)
    expected = np.broadcast_to((weights @ case.arrays["value"][0, 0])[:, None], found[0].shape)
    # The step from key to key is exact, but for its rounding in float32, times the distance from the nearest key.
    np.testing.assert_allclose(found[0], expected, rtol=0, atol=2e-6 * np.abs(case.arrays["value"]).max())


# --- Horizons -------------------------------------------------------------------------------------------------------

LONG = {
    "causal": {},
    "symmetric": {"is_causal": False},
    "asymmetric": {"is_causal": False, "future_slopes": np.asarray([0.03, 4.0, 0.0], np.float32)},
}


def long_case(form: str, length: int) -> Case:
    case = plain(Sizes(1, 1, 3, (length, length), 4), seed=3, slopes=[0.0, 0.5, 2.0])
    return replaced(case, arguments=LONG[form])


@pytest.mark.full
@pytest.mark.parametrize("form", LONG)
def test_long_rows_are_exact_and_leave_out_what_is_far(form: str) -> None:
    case = long_case(form, 1000)
    shape, inputs, *_ = planned(case)
    visits = np.diff(ranges_of(inputs, shape), axis=-1)[..., 0].sum(axis=-1)
    most = 8 * 9 // 2 if form == "causal" else 8 * 8
    if form != "asymmetric":
        assert visits[0] == most
        # A row of blocks looks into its own, and into that on either side.
        assert visits[2] <= (2 if form == "causal" else 3) * 8
    assert_exact(case)


@pytest.mark.full
def test_a_tolerance_of_zero_leaves_nothing_out() -> None:
    case = long_case("causal", 1000)
    shape, inputs, *_ = planned(case, tolerance=0.0)
    visits = np.diff(ranges_of(inputs, shape), axis=-1)[..., 0]
    np.testing.assert_array_equal(visits, np.broadcast_to(np.arange(8) + 1, visits.shape))
    assert_exact(case, tolerance=0.0)


@pytest.mark.full
@pytest.mark.parametrize("tolerance", [0.3, 1e-3])
def test_no_more_is_left_out_than_the_tolerance(tolerance: float) -> None:
    case = long_case("causal", 1000)
    tensors = {name: case.arrays[name].copy() for name in ("query", "key", "value")}
    DATA["outlier"](**tensors)
    for each in (case, replaced(case, **tensors)):
        result = computed(each, tolerance=tolerance)["result"]
        assert_within(result, answers(each, "float32", tolerance)["result"])


TABLES: dict[str, Case] = {name: STRUCTURES[name] for name in STRUCTURES if IS_THOROUGH or "offsets" in name}
TABLES |= {name: STRUCTURES[name] for name in ("causal, more queries", "symmetric, packed", "decoding")}
TABLES["long"] = long_case("symmetric", 3000)


@pytest.mark.parametrize("structure", first_of(TABLES))
@MANY
@given(data=st.data())
def test_tables_hold_the_blocks_that_are_needed_and_no_other(structure: str, data: st.DataObject) -> None:
    case = TABLES[structure] if structure == "long" else data.draw(filled(TABLES[structure]))
    shape, inputs, needed, turned = planned(case)
    first, stop = (np.asarray(x).reshape(-1, shape.q_blocks) for x in needed)
    some = first < stop
    ranges = ranges_of(inputs, shape) * shape.kv_block
    np.testing.assert_array_equal(ranges[..., 0] < ranges[..., 1], some)
    assert np.all((ranges[..., 0] <= first) & (first < ranges[..., 0] + shape.kv_block) | ~some)
    assert np.all((ranges[..., 1] >= stop) & (stop > ranges[..., 1] - shape.kv_block) | ~some)
    assert ranges.min() >= 0
    assert ranges.max() <= shape.kv_blocks * shape.kv_block
    assert np.all(np.asarray(inputs.table)[:, 0, 3 * shape.q_blocks :][:, :2] == 0)  # nothing follows the last block
    turned = np.asarray(turned).reshape(len(ranges) // shape.group, -1, 2)
    assert np.all(turned[:, -1] == 0)
    turned = turned[:, :-1].reshape(-1, shape.kv_blocks, shape.group, 2).swapaxes(1, 2).reshape(-1, shape.kv_blocks, 2)
    for head, block in np.ndindex(turned.shape[:2]):
        at = block * shape.kv_block
        (needing,) = np.nonzero((ranges[head, :, 0] <= at) & (at < ranges[head, :, 1]))
        expected = (needing[0], needing[-1] + 1) if len(needing) else (0, 0)
        assert tuple(turned[head, block]) == expected, (head, block)


# --- What is not needed is not read ---------------------------------------------------------------------------------

POISONED = {
    "causal": (Sizes(1, 1, 2, (900, 900), 4), [1.0, 0.0], {}),
    "symmetric": (Sizes(1, 2, 1, (700, 700), 4), [2.0, 0.5], {"is_causal": False}),
    "window": (Sizes(1, 1, 2, (700, 700), 4), [0.0, 0.3], {"is_causal": False, "window_size": 60}),
    "segments": (
        Sizes(2, 1, 1, (700, 700), 4),
        [0.0],
        {"segment_ids": np.stack([np.arange(700) // 200, np.arange(700) // 350]).astype(np.int32)},
    ),
}


def poisoned_case(name: str) -> tuple[KernelShape, Inputs]:
    sizes, slopes, arguments = POISONED[name]
    shape, inputs, *_ = planned(replaced(plain(sizes, slopes=slopes, seed=1), arguments=arguments))
    return shape, inputs


def only(inputs: Inputs, shape: KernelShape, head: int, block: int) -> Inputs:
    """Return inputs by which one block of queries needs what it does, and the others nothing."""
    table = np.asarray(inputs.table).copy()
    first, stop = table[head, 0, 3 * block : 3 * block + 2]
    columns = np.arange(3 * (shape.q_blocks + 1))
    table[:, 0, columns[columns % 3 < 2]] = 0
    table[head, 0, 3 * block : 3 * block + 2] = first, stop
    return inputs._replace(table=jnp.asarray(table))


def outside(array: Any, row: int, start: int, stop: int, poison: float = np.nan) -> jax.Array:
    """Return an array ``[rows, tokens, ...]`` with poison everywhere but in some tokens of a row."""
    changed = np.full(array.shape, poison, np.asarray(array).dtype)
    changed[row, start:stop] = np.asarray(array)[row, start:stop]
    return jnp.asarray(changed)


@functools.partial(jax.jit, static_argnames="shape", compiler_options=QUICKLY)
def run_forward(shape: KernelShape, inputs: Inputs) -> Any:
    return forward(shape, inputs, True)


@functools.partial(jax.jit, static_argnames="shape", compiler_options=QUICKLY)
def run_backward_of_queries(shape: KernelShape, inputs: Inputs, statistics: Any, cotangent: Any) -> Any:
    return backward_of_queries(shape, inputs, statistics, cotangent, True)


run_backward_of_keys = jax.jit(backward_of_keys, static_argnames="shape", compiler_options=QUICKLY)


def needing(shape: KernelShape, inputs: Inputs) -> list[tuple[int, int, int, int]]:
    """Return head, block of queries and range of blocks for all that need some but not all keys."""
    found = [
        (*index, *map(int, ranges_of(inputs, shape)[index])) for index in np.ndindex(len(inputs.table), shape.q_blocks)
    ]
    assert len({stop - first for _, _, first, stop in found}) > 1 or found[0][3] - found[0][2] < shape.kv_blocks
    return found


def poisoned_keys(inputs: Inputs, shape: KernelShape, head: int, first: int, stop: int) -> Inputs:
    tokens = first * shape.kv_block, stop * shape.kv_block
    key, value = (outside(x, head // shape.group, *tokens) for x in (inputs.key, inputs.value))
    ids = inputs.segment_ids
    if ids:  # an id that all queries of the entry would match, if only it were read
        kv_ids = np.asarray(ids[1]).copy()
        entry = head // shape.num_heads
        hidden = np.ones(kv_ids.shape, dtype=bool)
        hidden[entry, :, slice(*tokens)] = False
        ids = (ids[0], jnp.asarray(np.where(hidden, np.asarray(ids[0])[entry, 0, 0], kv_ids)))
    return inputs._replace(key=key, value=value, segment_ids=ids)


@pytest.mark.parametrize("name", first_of(POISONED))
def test_the_forward_pass_reads_no_key_that_is_not_needed(name: str) -> None:
    shape, inputs = poisoned_case(name)
    expected, log_sum_exps = map(np.asarray, run_forward(shape, inputs))
    for head, block, first, stop in needing(shape, inputs):
        alone = poisoned_keys(only(inputs, shape, head, block), shape, head, first, stop)
        result, sums = map(np.array, run_forward(shape, alone))
        rows = slice(block * shape.q_block, (block + 1) * shape.q_block)
        np.testing.assert_array_equal(result[head, rows], expected[head, rows])
        np.testing.assert_array_equal(sums[head, 0, rows], log_sum_exps[head, 0, rows])
        result[head, rows] = 0
        assert np.all(result == 0)  # the others need nothing


def statistics_of(shape: KernelShape, inputs: Inputs, cotangent: jax.Array) -> jax.Array:
    result, log_sum_exps = run_forward(shape, inputs)
    delta = jnp.sum(result * cotangent, axis=-1)
    return jnp.stack([log_sum_exps[:, 0], delta], axis=1)


def cotangent_of(shape: KernelShape, inputs: Inputs) -> jax.Array:
    values = np.random.default_rng(2).standard_normal((1, shape.q_len, inputs.query.shape[0], shape.head_dim))
    return by_head(jnp.asarray(values, jnp.float32), shape.q_blocks * shape.q_block)


@pytest.mark.full
@pytest.mark.parametrize("name", POISONED)
def test_the_gradient_of_queries_reads_no_key_that_is_not_needed(name: str) -> None:
    shape, inputs = poisoned_case(name)
    cotangent = cotangent_of(shape, inputs)
    statistics = statistics_of(shape, inputs, cotangent)
    d_query, *d_slopes = map(np.asarray, run_backward_of_queries(shape, inputs, statistics, cotangent))
    for head, block, first, stop in needing(shape, inputs):
        alone = poisoned_keys(only(inputs, shape, head, block), shape, head, first, stop)
        found, *parts = map(np.asarray, run_backward_of_queries(shape, alone, statistics, cotangent))
        rows, lanes = (slice(block * size, (block + 1) * size) for size in (shape.q_block, 128))
        np.testing.assert_array_equal(found[head, rows], d_query[head, rows])
        for part, expected in zip(parts, d_slopes, strict=True):
            np.testing.assert_array_equal(part[head, 0, lanes], expected[head, 0, lanes])
        assert np.isfinite(found).all()


@pytest.mark.full
@pytest.mark.parametrize("of_all_keys", [True, False])
def test_the_gradient_of_queries_of_a_part_where_keys_have_a_mean(of_all_keys: bool) -> None:
    # With other keys besides, gradients of scores have any sum, which the mean of these keys multiplies.
    case = plain(Sizes(1, 1, 1, (256, 256), 32), slopes=[0.02])
    case = replaced(case, key=case.arrays["key"] + 100)
    shape, inputs, *_ = planned(case, "bfloat16", tolerance=0.0)
    shape = dataclasses.replace(shape, rules=dataclasses.replace(shape.rules, is_part=True))
    query, key, value = (np.asarray(x[0], np.float64) for x in inputs[2:5])
    cotangent = np.random.default_rng(2).standard_normal((256, 32)).astype(inputs.query.dtype).astype(np.float64)
    distance = np.arange(256)[:, None] - np.arange(256)
    scores = np.where(distance >= 0, query @ key.T * case.scale - 0.02 * distance, -np.inf)
    log_sum_exps = np.log(np.exp(scores).sum(axis=1))
    weights = np.exp(scores - log_sum_exps[:, None])
    by_weight = cotangent @ value.T
    delta = (weights * by_weight).sum(axis=1) * of_all_keys
    exact = (weights * (by_weight - delta[:, None])) @ key * case.scale
    statistics = jnp.asarray(np.stack([log_sum_exps / np.log(2), delta])[None], jnp.float32)
    arguments = statistics, jnp.asarray(cotangent[None], inputs.query.dtype)
    found = np.asarray(run_backward_of_queries(shape, inputs, *arguments)[0][0], np.float64)
    assert np.linalg.norm(found - exact) <= 2 * 2.0**-9 * np.linalg.norm(exact)


@pytest.mark.parametrize("name", first_of(POISONED))
def test_the_gradient_of_keys_reads_no_query_that_is_not_needed(name: str) -> None:
    shape, inputs = poisoned_case(name)
    cotangent = cotangent_of(shape, inputs)
    statistics = statistics_of(shape, inputs, cotangent)
    turned = queries_of_keys(inputs.table, shape)
    by_item = np.asarray(turned)[:, 0].reshape(len(turned), -1, 2)
    for kv_head, item in np.ndindex(len(turned), shape.kv_blocks * shape.group):
        first, stop = map(int, by_item[kv_head, item])
        block, member = divmod(item, shape.group)
        head = kv_head * shape.group + member
        tokens = first * shape.q_block, stop * shape.q_block
        of_item = np.zeros_like(by_item)
        of_item[kv_head, item] = first, stop
        kept = inputs._replace(query=outside(inputs.query, head, *tokens, poison=0.0))
        read = inputs._replace(query=outside(inputs.query, head, *tokens))
        rows = jnp.swapaxes(outside(jnp.swapaxes(statistics, 1, 2), head, *tokens), 1, 2)
        of_item = jnp.asarray(of_item.reshape(turned.shape))
        # Alike but for poison where it should not be read.
        expected = run_backward_of_keys(shape, kept, of_item, statistics, cotangent)
        found = run_backward_of_keys(shape, read, of_item, rows, outside(cotangent, head, *tokens))
        for one, other in zip(map(np.asarray, found), map(np.asarray, expected), strict=True):
            np.testing.assert_array_equal(one, other)
            assert np.any(one[kv_head, block * shape.kv_block :][: shape.kv_block] != 0)
    # All items together are what the parts sum up to.
    whole = run_backward_of_keys(shape, inputs, turned, statistics, cotangent)
    assert all(np.isfinite(x).all() for x in whole)


@pytest.mark.full
def test_gaps_among_the_programs_are_bridged() -> None:
    # A copy is begun for the program that follows; between two that need keys there may be some that need none.
    shape, inputs = poisoned_case("causal")
    expected = np.asarray(run_forward(shape, inputs)[0])
    for kept in ([0, 2], [1, 5], [3], [0, 1, 6, 7], [7], [2, 4, 6]):
        table = np.asarray(inputs.table).copy()
        for block in set(range(shape.q_blocks)) - set(kept):
            table[:, 0, 3 * block : 3 * block + 2] = 0
        result = np.asarray(run_forward(shape, inputs._replace(table=jnp.asarray(table)))[0])
        blocks = result.reshape(len(result), shape.q_blocks, -1)
        np.testing.assert_array_equal(blocks[:, kept], expected.reshape(blocks.shape)[:, kept])
        assert np.all(np.delete(blocks, kept, axis=1) == 0)


@pytest.mark.full
def test_copies_are_waited_for() -> None:
    # Here a copy is made when it is waited for, not when it is begun, as it may be on a TPU, too.
    shape, inputs = poisoned_case("window")
    late = dataclasses.replace(shape, interpret=pltpu.InterpretParams(dma_execution_mode="on_wait"))
    cotangent = cotangent_of(shape, inputs)
    statistics, turned = statistics_of(shape, inputs, cotangent), queries_of_keys(inputs.table, shape)
    calls = (
        (run_forward, ()),
        (run_backward_of_queries, (statistics, cotangent)),
        (run_backward_of_keys, (turned, statistics, cotangent)),
    )
    for function, arguments in calls:
        for one, other in zip(function(late, inputs, *arguments), function(shape, inputs, *arguments), strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.full
@pytest.mark.parametrize("blocks", [(128, 256), (256, 128), (512, 512)], ids=str)
def test_blocks_of_any_size_give_the_same(blocks: tuple[int, int]) -> None:
    case = STRUCTURES["causal, more queries"]
    case = replaced(case, arguments={"is_causal": False, "q_offset": np.asarray(40, np.int32), "window_size": 110})
    found = computed(case, tolerance=0.0, implementation=TPU(*blocks, interpret=True))
    for name, answer in answers(case, "float32", 0.0).items():
        assert_within(found[name], answer)


# --- Transformations ------------------------------------------------------------------------------------------------

SMALL = Case(Sizes(2, 2, 2, (130, 140), 5), "causal", None, None, None, None, False, seed=9)


def attend(*tensors: Any, **arguments: Any) -> jax.Array:
    return alibi_jax.attention(*tensors, implementation=INTERPRETED, scale=SMALL.scale, **arguments)


def result_and_gradients(*args: Any) -> Any:
    """Return the result, and the gradients of the sum of its sines."""
    result, pull = jax.vjp(attend, *args)
    return result, pull(jnp.cos(result))


compiled_result_and_gradients = jax.jit(result_and_gradients, compiler_options=QUICKLY)


@pytest.mark.full
@pytest.mark.parametrize("axes", [(0, None, None, None), (None, 1, None, 0), (3, None, 2, 1), (None, None, None, 0)])
def test_any_operand_may_be_mapped(axes: tuple[int | None, ...]) -> None:
    tensors = list(tensors_of(SMALL, "float32").values())
    mapped = [
        x if axis is None else jnp.stack([x, x * 0.5, x * 2], axis) for x, axis in zip(tensors, axes, strict=True)
    ]

    vmapped = jax.vmap(result_and_gradients, in_axes=axes)
    results, gradients = jax.jit(vmapped, compiler_options=QUICKLY)(*mapped)
    for index, factor in enumerate([1.0, 0.5, 2.0]):
        one = [x if axis is None else x * factor for x, axis in zip(tensors, axes, strict=True)]
        result, expected = compiled_result_and_gradients(*one)
        np.testing.assert_allclose(results[index], result, rtol=1e-5, atol=1e-6 * float(jnp.abs(result).max()))
        for found, answer in zip(gradients, expected, strict=True):
            np.testing.assert_allclose(found[index], answer, rtol=1e-4, atol=1e-5 * float(jnp.abs(answer).max()))


@pytest.mark.full
def test_ids_offsets_and_masks_may_be_mapped_too() -> None:
    query, key, value, slopes = tensors_of(SMALL, "float32").values()
    ids = jnp.stack([jnp.arange(140) // 70, jnp.arange(140) // 50])  # [mapped, kv_len], one for the whole batch
    masks = jnp.stack([jnp.arange(140) < 100, jnp.arange(140) > 20])[:, None, None, None]
    offsets = jnp.asarray([3, 10])

    def one(ids: Any, mask: Any, offset: Any) -> jax.Array:
        return attend(query, key, value, slopes, segment_ids=(ids[:130], ids), mask=mask, q_offset=offset)

    found = jax.vmap(one)(ids, masks, offsets)
    for index in range(2):
        np.testing.assert_array_equal(found[index], one(ids[index], masks[index], offsets[index]))


@pytest.mark.full
def test_one_compiled_program_serves_all_offsets() -> None:
    query, key, value, slopes = tensors_of(SMALL, "float32").values()

    def step(q_offset: Any) -> jax.Array:
        return attend(query, key, value, slopes, q_offset=q_offset)

    compiled = jax.jit(step).lower(jax.ShapeDtypeStruct((), jnp.int32)).compile()
    for q_offset in (-5, 0, 10, 77, FAR):
        answer = answers(replaced(SMALL, arguments={"q_offset": q_offset}), "float32", 2.0**-24)["result"]
        result = np.asarray(compiled(jnp.asarray(q_offset, jnp.int32)), np.float64)
        assert_within(np.swapaxes(result, 1, 2), answer)


# --- Refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"q_block": 100}, ValueError, "q_block must be a multiple of 128, got 100"),
        ({"kv_block": 64}, ValueError, "kv_block must be a multiple of 128, got 64"),
        ({"q_block": 0}, ValueError, "q_block must be .*, got 0"),
        ({"kv_block": -128}, ValueError, "kv_block must be .*, got -128"),
        ({"q_block": 128.0}, TypeError, "q_block must be .*128.0|q_block must be .*float"),
        ({"kv_block": True}, TypeError, "kv_block must be .*(True|bool)"),
        ({"interpret": 1}, TypeError, "interpret must be .*(1|int)"),
    ],
)
def test_bad_options_are_refused(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        TPU(**arguments)


def described(dtype: Any = jnp.float32, length: int = 256) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((1, length, 2, 8), dtype)


def lower(implementation: Any, *tensors: Any, **arguments: Any) -> Any:
    tensors = tensors or (described(),) * 3
    return jax.jit(lambda *x: alibi_jax.attention(*x, implementation=implementation, **arguments)).lower(*tensors)


def test_blocks_that_do_not_fit_are_refused_with_their_size() -> None:
    message = r"blocks must fit .* 64 MiB, got q_block 4096, kv_block 4096 and head_dim 8, which take about \d{3} MiB"
    with pytest.raises(ValueError, match=message):
        lower(TPU(4096, 4096, interpret=True), *(described(length=4096),) * 3)
    lower(TPU(4096, 4096, interpret=True))  # blocks are no longer than what there is


def test_float16_and_wide_masks_are_refused_by_name() -> None:
    with pytest.raises(NotImplementedError, match="'tpu' must be given float32 or bfloat16, got float16; 'tiled' and"):
        lower(INTERPRETED, *(described(jnp.float16),) * 3)
    for shape in ((1, 2, 1, 256), (1, 1, 256, 256), (256, 1)):
        with pytest.raises(NotImplementedError, match=r"mask of keys alone, \[batch, 1, 1, kv_len\], got \(1, "):
            lower(INTERPRETED, mask=jnp.ones(shape, bool))
    for shape in ((1, 1, 1, 256), (1, 1, 1, 1), (256,)):
        lower(INTERPRETED, mask=jnp.ones(shape, bool))


def test_float64_is_refused_by_name() -> None:
    with jax.enable_x64(True):
        with pytest.raises(NotImplementedError, match="'tpu' must be given float32 or bfloat16, got float64"):
            lower(INTERPRETED, *(described(jnp.float64),) * 3)
        # Where float64 is enabled, float32 is still taken, and no float64 comes in by the way.
        lowered = lower(INTERPRETED, q_offset=jnp.asarray(3, jnp.int64))
        assert "f64" not in lowered.as_text()
