"""The TPU kernel's text, run on the CPU: in rows of several blocks, with what makes kernels go wrong."""

from __future__ import annotations

import dataclasses
import os
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # or JAX waits for the TPU of an installed libtpu
jax = pytest.importorskip("jax")
pytest.importorskip("flax")
import jax.numpy as jnp  # noqa: E402
from jax import export  # noqa: E402

import alibi_jax  # noqa: E402
from alibi_core.conformance.testing import DATA, FAR, FORMS, PER_BATCH, STEEP, Case, Sizes  # noqa: E402
from alibi_core.conformance.testing import assert_within_budget as assert_within  # noqa: E402
from alibi_jax import TPU  # noqa: E402
from tests.support.tiles import plain  # noqa: E402
from tests.support.tpu_cases import INTERPRETED, answers, assert_exact, computed  # noqa: E402

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
LOW_PRECISION = ("causal", "decoding", "asymmetric, offsets, window", "causal, packed, key mask")


@st.composite
def filled(draw: st.DrawFn, structure: Case, data: tuple[str | None, ...] = (None, *DATA)) -> Case:
    """Draw values for a structure: tensors, slopes, offsets of the batch entries."""
    case = dataclasses.replace(structure, seed=draw(st.integers(0, 2**16)))
    arrays = {name: case.arrays[name].copy() for name in ("query", "key", "value")}
    if (kind := draw(st.sampled_from(data))) is not None:
        DATA[kind](**arrays)
    arguments = dict(case.arguments)
    if case.q_offset == PER_BATCH:
        offsets = draw(st.lists(st.sampled_from(OFFSETS), min_size=case.sizes.batch, max_size=case.sizes.batch))
        arguments["q_offset"] = np.asarray(offsets, np.int32)
    if draw(st.booleans()):
        steep = np.roll(STEEP, draw(st.integers(0, len(STEEP))))
        arrays["slopes"] = np.resize(steep, case.arrays["slopes"].shape).astype(np.float64)
    return case.with_arguments(case.form, arguments).with_arrays(**arrays)


def sloped(sizes: Sizes, *slopes: float, form: str = "causal", seed: int = 0, **arguments: Any) -> Case:
    return plain(sizes, form, seed, **arguments).with_arrays(slopes=np.asarray(slopes))


MANY = settings(max_examples=max(6, settings.default.max_examples // 3))


@pytest.mark.parametrize(
    "structure",
    [pytest.param(x, marks=[] if x == "asymmetric, offsets, window" else pytest.mark.slow) for x in STRUCTURES],
)
@MANY
@given(data=st.data())
def test_result_and_gradients_are_exact_to_rounding(structure: str, data: st.DataObject) -> None:
    assert_exact(data.draw(filled(STRUCTURES[structure])))


@pytest.mark.slow
@pytest.mark.parametrize("structure", LOW_PRECISION)
@MANY
@given(data=st.data())
def test_bfloat16_is_exact_to_its_rounding(structure: str, data: st.DataObject) -> None:
    tolerance = None if structure == "causal" else 0.0
    hostile = filled(STRUCTURES[structure], (None, "outlier", "equal_keys", "shifted"))
    assert_exact(data.draw(hostile), "bfloat16", tolerance=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [41915, 42648])
def test_products_that_are_subnormal_may_become_zero(seed: int) -> None:
    # Weights of 1e-37 or so, times cotangents below 1/16: the sum of a group's is a normal number, no product is.
    assert_exact(dataclasses.replace(STRUCTURES["decoding"], seed=seed), "bfloat16", tolerance=0.0)


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("rule", NOTHING)
def test_a_query_that_may_look_nowhere_gives_zeros_and_gets_none(rule: str) -> None:
    found = computed(sloped(Sizes(2, 1, 2, (129, 257), 5), 0.25, 0.0, **NOTHING[rule]))
    for name, array in found.items():
        np.testing.assert_array_equal(array, np.zeros_like(array), err_msg=name)


@pytest.mark.slow
def test_some_rows_that_see_nothing_leave_the_others_alone() -> None:
    # Queries before all keys, ids that no key has, and an entry without any visible key.
    ids = np.repeat([[3, -5, 7]], 3, axis=0).repeat(100, axis=1).astype(np.int32)
    kv_ids = np.where(np.arange(257) < 130, 3, 7)[None].repeat(3, axis=0).astype(np.int32)
    mask = key_mask(257, slice(0, 3), slice(None), slice(120, 257))
    arguments = {"q_offset": np.asarray([-43, 0, 0], np.int32), "segment_ids": (ids, kv_ids), "mask": mask}
    found = assert_exact(sloped(Sizes(3, 1, 2, (300, 257), 5), 0.25, 0.0, **arguments))
    assert np.all(found["result"][1] == 0)
    assert np.all(found["result"][:, :, 100:200] == 0)
    assert np.all(found["result"][0, :, :46] == 0)
    assert np.all(found["result"][0, :, 50:90] != 0)


@pytest.mark.slow
@pytest.mark.parametrize("ids", [(-(2**31), 2**31 - 1), (-2, -1), (0, -2)], ids=str)
def test_segments_of_any_number_and_masked_keys_are_told_apart(ids: tuple[int, int]) -> None:
    segments = np.where(np.arange(300) % 200 < 140, *ids).astype(np.int32)[None]
    for arguments in ({"segment_ids": segments}, {"segment_ids": segments, "mask": key_mask(300, slice(100, 180))}):
        assert_exact(sloped(Sizes(1, 1, 1, (300, 300), 5), 0.0, **arguments))


@pytest.mark.slow
def test_padding_that_hides_the_nearest_thousands_of_keys() -> None:
    # Who looks from afar sees keys that differ by a step of the bias, however far away all are.
    mask = key_mask(3000, slice(1000, None), slice(150, None))
    assert_exact(sloped(Sizes(2, 1, 2, (130, 3000), 5), 0.5, 2.0, mask=mask))


# --- Long rows ------------------------------------------------------------------------------------------------------

LONG = {
    "causal": {},
    "symmetric": {"is_causal": False},
    "asymmetric": {"is_causal": False, "future_slopes": np.asarray([0.03, 4.0, 0.0], np.float32)},
}


@pytest.mark.slow
@pytest.mark.parametrize("tolerance", [None, 0.0])
@pytest.mark.parametrize("form", LONG)
def test_rows_longer_than_horizons_are_exact(form: str, tolerance: float | None) -> None:
    assert_exact(sloped(Sizes(1, 1, 3, (1000, 1000), 4), 0.0, 0.5, 2.0, seed=3, **LONG[form]), tolerance=tolerance)


# In the first entry a block of queries between others sees nothing, in the second the first block.
GAPS = {"window_size": 60, "mask": key_mask(900, slice(180, 470), slice(0, 200))}


@pytest.mark.slow
def test_blocks_that_need_no_keys_are_skipped() -> None:
    # A copy is begun for the program that follows; between two that need keys there may be some that need none.
    assert np.all(assert_exact(sloped(Sizes(2, 1, 2, (900, 900), 4), 0.3, 0.0, **GAPS))["result"][0, :, 256:384] == 0)


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [(128, 256), (256, 128), (512, 512)], ids=str)
def test_blocks_of_any_size_give_the_same(blocks: tuple[int, int]) -> None:
    rules = {"is_causal": False, "q_offset": np.asarray(40, np.int32), "window_size": 110}
    case = STRUCTURES["causal, more queries"].with_arguments("symmetric", rules)
    found = computed(case, tolerance=0.0, implementation=TPU(*blocks, interpret=True))
    for name, answer in answers(case, "float32", 0.0).items():
        assert_within(found[name], answer)


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
    lower(INTERPRETED, mask=jnp.ones(256, bool))


def test_float64_is_refused_by_name() -> None:
    with jax.enable_x64(True):
        with pytest.raises(NotImplementedError, match="'tpu' must be given float32 or bfloat16, got float64"):
            lower(INTERPRETED, *(described(jnp.float64),) * 3)
        # Where float64 is enabled, float32 is still taken, and no float64 comes in by the way.
        lowered = lower(INTERPRETED, q_offset=jnp.asarray(3, jnp.int64))
        assert "xf64>" not in lowered.as_text()  # but for Python numbers, which are scalars there


def test_programs_for_tpus_are_exported_where_there_is_none() -> None:
    described = [jax.ShapeDtypeStruct((1, 256, 2, 64), jnp.bfloat16)] * 3

    def loss(*tensors: jax.Array) -> jax.Array:
        return alibi_jax.attention(*tensors).astype(jnp.float32).sum()

    backward = {"alibi_backward_of_keys", "alibi_backward_of_queries"}
    for function, kernels in ((loss, set()), (jax.grad(loss, argnums=(0, 1, 2)), backward)):
        program = export.export(jax.jit(function), platforms=["tpu"])(*described)
        assert program.platforms == ("tpu",)
        found = re.findall(r'kernel_name = "(\w+)"', program.mlir_module())
        assert set(found) == {"alibi_forward"} | kernels
