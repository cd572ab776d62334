"""The TPU kernel's text, run on the CPU: in rows of several blocks, with what makes kernels go wrong."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import re
from collections.abc import Callable
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
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as simulation  # noqa: E402
from jax.experimental.pallas import tpu as pltpu  # noqa: E402

import alibi_jax  # noqa: E402
from alibi_core.backend import LENGTH_FIRST, AttentionCall  # noqa: E402
from alibi_core.conformance.testing import DATA, FAR, FORMS, PER_BATCH, STEEP, Case, Sizes  # noqa: E402
from alibi_jax import TPU  # noqa: E402
from alibi_jax._call import operands_of  # noqa: E402
from alibi_jax._plan import needed_keys  # noqa: E402
from alibi_jax._tpu import walk  # noqa: E402
from alibi_jax._tpu.walk import head_of  # noqa: E402
from tests.support.tiles import plain  # noqa: E402
from tests.support.tpu_cases import INTERPRETED, assert_exact, computed  # noqa: E402

IS_THOROUGH = settings.default.max_examples > 100
OFFSETS = (-FAR, -301, -128, -1, 0, 13, 127, 128, 300, FAR)

# A kernel takes seconds to compile, and moments to run: a few structures, each with many values.
STRUCTURES = {
    "causal": Case(Sizes(2, 2, 2, (300, 300), 8)),
    "causal, one head, one key": Case(Sizes(1, 1, 1, (1, 1), 1)),
    "causal, more queries": Case(Sizes(1, 2, 2, (300, 129), 5)),
    "causal, offsets": Case(Sizes(3, 1, 3, (129, 300), 5), q_offset=PER_BATCH, slopes_per_batch=True),
    "causal, window": Case(Sizes(1, 1, 2, (300, 300), 80), window_size=130),
    "causal, far, key mask": Case(Sizes(2, 1, 2, (129, 300), 5), q_offset=FAR, masking="by key"),
    "causal, packed, key mask": Case(
        Sizes(2, 2, 1, (300, 300), 5), packing="same", masking="by key", slopes_per_batch=True
    ),
    "decoding": Case(Sizes(2, 2, 3, (1, 300), 64), slopes_per_batch=True),
    "decoding, window, key mask": Case(
        Sizes(2, 1, 2, (5, 260), 8), q_offset=PER_BATCH, window_size=3, masking="by key"
    ),
    "symmetric": Case(Sizes(1, 3, 1, (129, 129), 5), "symmetric"),
    "symmetric, packed": Case(Sizes(2, 1, 2, (300, 300), 5), "symmetric", packing="same", slopes_per_batch=True),
    "asymmetric, offsets, window": Case(
        Sizes(3, 1, 3, (257, 300), 5), "asymmetric", q_offset=PER_BATCH, window_size=40, slopes_per_batch=True
    ),
    "asymmetric, pairs": Case(
        Sizes(2, 2, 1, (127, 300), 5), "asymmetric", window_size=130, packing="pair", slopes_per_batch=True
    ),
    "clamped, one row of ids": Case(Sizes(2, 2, 1, (128, 300), 5), "clamped", q_offset=-20, packing="one row"),
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
    lengths = st.sampled_from([1, 5, 127, 128, 129, 255, 256, 257, 300, 390])
    batch, num_kv_heads, group = (st.integers(1, 3) for _ in range(3))
    sizes = st.builds(
        *(Sizes, batch, num_kv_heads, group, st.tuples(lengths, lengths), st.sampled_from([1, 5, 8, 64, 80, 130]))
    )
    structures = st.builds(
        Case,
        sizes,
        st.sampled_from(FORMS),
        q_offset=st.sampled_from([None, None, 7, -129, FAR, PER_BATCH]),
        window_size=st.sampled_from([None, None, 0, 3, 127, 128, 200]),
        packing=st.sampled_from([None, "same", "pair", "one row"]),
        masking=st.sampled_from([None, "by key"]),
        slopes_per_batch=st.booleans(),
    )
    structure = data.draw(structures)
    assert_exact(data.draw(filled(structure)), dtype, tolerance=data.draw(st.sampled_from([None, 0.0])))


# --- Long rows, and queries that see nothing ------------------------------------------------------------------------


def key_mask(kv_len: int, *hidden: slice) -> np.ndarray:
    """Return a mask ``[batch, 1, 1, kv_len]``, of a batch entry for each slice."""
    mask = np.ones((len(hidden), 1, 1, kv_len), dtype=bool)
    for entry, where in zip(mask, hidden, strict=True):
        entry[..., where] = False
    return mask


def ids_of(*ids: int) -> tuple[np.ndarray, np.ndarray]:
    """Return segment ids of 129 queries and 257 keys in two entries, each of one segment."""
    return tuple(np.full((2, n), x, np.int32) for n, x in zip((129, 257), ids, strict=True))


FUTURE = {"future_slopes": np.asarray([0.03, 4.0, 0.0], np.float32)}
SYMMETRIC, HIDES_ALL = {"is_causal": False}, {"mask": np.zeros((2, 1, 1, 257), dtype=bool)}
EXTREME = {ids: np.where(np.arange(300) % 200 < 140, *ids)[None] for ids in ((-(2**31), 2**31 - 1), (-2, -1), (0, -2))}
LONG = {
    **{
        f"longer than horizons, {form}": sloped(Sizes(1, 1, 3, (1000, 1000), 4), 0.0, 0.5, 2.0, seed=3, **rules)
        for form, rules in (("causal", {}), ("symmetric", SYMMETRIC), ("asymmetric", SYMMETRIC | FUTURE))
    },
    **{
        f"segments {ids}{', mask' if hidden else ''}": sloped(
            Sizes(1, 1, 1, (300, 300), 5), 0.0, segment_ids=segments.astype(np.int32), **hidden
        )
        for ids, segments in EXTREME.items()
        for hidden in ({}, {"mask": key_mask(300, slice(100, 180))})
    },
    **{
        f"nothing to see: {rule}": sloped(Sizes(2, 1, 2, (129, 257), 5), 0.25, 0.0, **rules)
        for rule, rules in {
            "mask": {"mask": np.zeros((2, 1, 1, 257), dtype=bool)},
            "segments": {"segment_ids": ids_of(0, 1)},
            "segments of a mask": {"segment_ids": ids_of(-1, -1)} | HIDES_ALL,
            "offsets": {"q_offset": np.asarray([-129, -FAR], np.int32)},
            "window": {"q_offset": np.asarray([257 + 40, FAR], np.int32), "window_size": 40},
        }.items()
    },
    # Queries before all keys, ids that no key has, and an entry without any visible key.
    "some rows see nothing": sloped(
        Sizes(3, 1, 2, (300, 257), 5),
        *(0.25, 0.0),
        q_offset=np.asarray([-43, 0, 0], np.int32),
        segment_ids=(
            np.repeat([[3, -5, 7]], 3, axis=0).repeat(100, axis=1).astype(np.int32),
            np.where(np.arange(257) < 130, 3, 7)[None].repeat(3, axis=0).astype(np.int32),
        ),
        mask=key_mask(257, slice(0, 3), slice(None), slice(120, 257)),
    ),
    # In the first entry a block of queries between others sees nothing, in the second the first block. A copy is begun
    # for the program that follows; between two programs that need keys there may be some that need none.
    "blocks that need no keys": sloped(
        Sizes(2, 1, 2, (900, 900), 4), 0.3, 0.0, window_size=60, mask=key_mask(900, slice(180, 470), slice(0, 200))
    ),
    # Queries that look from afar see keys that differ by a step of the bias, however far away all are.
    "padding hides the nearest thousands of keys": sloped(
        Sizes(2, 1, 2, (130, 3000), 5), 0.5, 2.0, mask=key_mask(3000, slice(1000, None), slice(150, None))
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", LONG.values(), ids=LONG)
def test_long_rows_and_queries_that_see_nothing_are_exact(case: Case) -> None:
    assert_exact(case)


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [(128, 256), (256, 128), (512, 512)], ids=str)
def test_blocks_of_any_size_give_the_same(blocks: tuple[int, int]) -> None:
    rules = {"is_causal": False, "q_offset": np.asarray(40, np.int32), "window_size": 110}
    case = STRUCTURES["causal, more queries"].with_arguments("symmetric", rules)
    assert_exact(case, tolerance=0.0, implementation=TPU(*blocks, interpret=True))


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [5, 128])  # keys lie along lanes, and along rows
def test_a_last_block_of_few_queries_may_begin_with_keys_of_the_block_before(head_dim: int) -> None:
    case = Case(Sizes(2, 1, 3, (5, 600), head_dim), "symmetric", packing="pair", masking="by key", window_size=300)
    assert_exact(case, tolerance=0.0, implementation=TPU(512, 512, interpret=True))


# --- Races and memory that was never written, in Pallas's simulation of a TPU -----------------------------------------


Races = Callable[[Callable[..., Any], Case], list[bool]]


@pytest.fixture
def races(monkeypatch: pytest.MonkeyPatch) -> Races:
    """Return a function that runs a case in the simulation and says of each kernel whether there was a race."""
    kept, detector = [], simulation.RaceDetectionState

    def kept_detector(*args: Any, **options: Any) -> Any:  # Pallas itself has the last kernel's alone
        kept.append(detector(*args, **options))
        return kept[-1]

    def races_of(run: Callable[..., Any], case: Case) -> list[bool]:
        interpret = pltpu.InterpretParams(detect_races=True, random_seed=3, num_cores_or_threads=2)
        jax.clear_caches()
        try:
            run(case, implementation=TPU(128, 128, interpret=interpret))
        finally:
            pltpu.reset_tpu_interpret_mode_state()
        return [state.races_found for state in kept]

    monkeypatch.setattr(simulation, "RaceDetectionState", kept_detector)
    return races_of


KINDS = ("causal", "decoding, window, key mask", "symmetric", "asymmetric, offsets, window", "causal, packed, key mask")
CALLS = {name: STRUCTURES[name] for name in KINDS}
CALLS["decoding, lanes full"] = Case(Sizes(2, 2, 3, (1, 300), 128))


@pytest.mark.slow
@pytest.mark.parametrize("case", CALLS.values(), ids=CALLS)
def test_no_core_races_or_reads_what_was_never_written(case: Case, races: Races) -> None:
    assert races(assert_exact, case) == [False] * 4  # memory begins as NaN; forward twice, and two backward kernels


@pytest.mark.slow
def test_the_simulation_notices_a_wait_that_comes_too_late(races: Races, monkeypatch: pytest.MonkeyPatch) -> None:
    wait, use = "for copy in copies(block, slot, False):\n            copy.wait()", "visit(block, slot)"
    lines = inspect.getsource(walk.walk)
    assert lines.count(wait) == lines.count(use) == 1
    broken: dict[str, Any] = dict(vars(walk))
    exec(lines.replace(wait, "pass").replace(use, f"{use}\n        {wait}"), broken)
    monkeypatch.setattr(walk, "walk", broken["walk"])
    assert races(computed, STRUCTURES["causal"]) == [True, True, True, False]  # all that walk over keys
    jax.clear_caches()


@pytest.mark.parametrize("length", [8192, pytest.param(32768, marks=pytest.mark.slow)])
@pytest.mark.parametrize("heads", [8, 32])
def test_two_cores_share_the_blocks_of_canonical_heads_evenly(heads: int, length: int) -> None:
    @jax.jit
    def blocks_by_head(query: jax.Array, key: jax.Array) -> jax.Array:
        call = AttentionCall.check(query, key, key, layout=LENGTH_FIRST, xp=jnp)
        operands = operands_of(call, *(jnp.swapaxes(x, 1, 2) for x in (query, key, key)))
        first, stop = needed_keys(operands, 512, 512)
        return jnp.sum(-(-stop // 512) - first // 512, axis=(0, 2))

    blocks = blocks_by_head(*jax.random.normal(jax.random.key(0), (2, 1, length, heads, 64)))
    order = head_of(jnp.arange(heads, dtype=jnp.int32), heads, 1)
    assert sorted(order.tolist()) == list(range(heads))
    now, before = (blocks.sum() / blocks[x].reshape(2, -1).sum(axis=1).max() for x in (order, jnp.arange(heads)))
    assert now >= 1.8
    assert before < 1.4  # as arrays have the heads


@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize("heads", [1, 2, 6, 71, 128])
def test_each_head_of_each_batch_entry_has_one_place(heads: int, batch: int) -> None:
    order = head_of(jnp.arange(batch * heads, dtype=jnp.int32), heads, batch).reshape(batch, heads)
    np.testing.assert_array_equal(jnp.sort(order), np.arange(batch * heads).reshape(batch, heads))


# --- Refusals -------------------------------------------------------------------------------------------------------


BY_TOKENS = jax.sharding.NamedSharding(jax.make_mesh((1,), ("x",)), jax.sharding.PartitionSpec(None, "x"))


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
        ({"sharding": "data"}, TypeError, "sharding must be a jax.sharding.NamedSharding, got 'data'"),
        ({"sharding": BY_TOKENS}, ValueError, "sharding must divide batch and heads alone, axes 0 and 2, got .*'x'"),
    ],
)
def test_bad_options_are_refused(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        TPU(**arguments)


def lower(dtype: str = "float32", length: int = 256, implementation: Any = INTERPRETED, **arguments: Any) -> Any:
    attend = jax.jit(functools.partial(alibi_jax.attention, implementation=implementation, **arguments))
    return attend.lower(*[jax.ShapeDtypeStruct((1, length, 2, 8), dtype)] * 3)


def test_blocks_that_do_not_fit_are_refused_with_their_size() -> None:
    large = TPU(4096, 4096, interpret=True)
    message = r"blocks must fit .* 64 MiB, got q_block 4096, kv_block 4096 and head_dim 8, which take about \d{3} MiB"
    with pytest.raises(ValueError, match=message):
        lower(length=4096, implementation=large)
    lower(implementation=large)  # blocks are no longer than what there is


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_other_dtypes_are_refused_by_name(dtype: str) -> None:
    with (
        jax.enable_x64(True),
        pytest.raises(NotImplementedError, match=f"'tpu' must be given float32 or bfloat16, got {dtype}; 'tiled' and"),
    ):
        lower(dtype)


def test_masks_of_queries_or_heads_are_refused_by_name() -> None:
    for shape in ((1, 2, 1, 256), (1, 1, 256, 256), (256, 256)):
        with pytest.raises(NotImplementedError, match=r"mask of keys alone, \[batch, 1, 1, kv_len\], got \(1, "):
            lower(mask=jnp.ones(shape, bool))
    lower(mask=jnp.ones(256, bool))


def test_sinks_are_a_factor_of_the_result_and_of_all_weights() -> None:
    query, key, value = np.random.default_rng(0).standard_normal((3, 2, 200, 2, 8)).astype(np.float32)
    arrays = tuple(map(jnp.asarray, (query, key, value, np.float32([0.1, 0.01]), np.float32([3.0, -np.inf]))))

    def loss(implementation: Any, query: Any, key: Any, value: Any, slopes: Any, sinks: Any) -> tuple[Any, Any]:
        result = alibi_jax.attention(query, key, value, slopes, sinks=sinks, implementation=implementation)
        return (result * query).sum(), result

    kernel, exact = (
        jax.jit(jax.grad(functools.partial(loss, x), range(5), has_aux=True))(*arrays)
        for x in (TPU(interpret=True), "dense")
    )
    jax.tree.map(lambda *x: np.testing.assert_allclose(*x, rtol=1e-4, atol=1e-4), kernel, exact)
    with pytest.raises(NotImplementedError, match="calls with sinks .* have first derivatives, in reverse mode, alone"):
        jax.hessian(lambda sinks: loss("tiled", *arrays[:4], sinks)[0])(arrays[4])


def test_no_float64_comes_in_where_it_is_enabled() -> None:
    with jax.enable_x64(True):
        lowered = lower(q_offset=jnp.asarray(3, jnp.int64))
    assert "xf64>" not in lowered.as_text()  # but for Python numbers, which are scalars there


def test_programs_for_tpus_are_exported_where_there_is_none() -> None:
    tensors = [jax.ShapeDtypeStruct((1, 256, 2, 64), jnp.bfloat16)] * 3

    def result_and_gradients(*tensors: jax.Array) -> Any:
        return jax.value_and_grad(lambda *x: alibi_jax.attention(*x).astype(jnp.float32).sum(), (0, 1, 2))(*tensors)

    program = export.export(jax.jit(result_and_gradients), platforms=["tpu"])(*tensors)
    assert program.platforms == ("tpu",)
    kernels = re.findall(r'kernel_name = "(\w+)"', program.mlir_module())
    assert set(kernels) == {"alibi_forward", "alibi_backward_of_keys", "alibi_backward_of_queries"}
    of_any_batch = [jax.ShapeDtypeStruct((*export.symbolic_shape("batch"), 256, 2, 64), jnp.bfloat16)] * 3
    program = export.export(jax.jit(result_and_gradients), platforms=["tpu"])(*of_any_batch)
    assert "kernel_name" not in program.mlir_module()  # Pallas wants numbers, so the tiles run
    attend = export.export(jax.jit(functools.partial(alibi_jax.attention, implementation="tpu")), platforms=["tpu"])
    with pytest.raises(NotImplementedError, match="'tpu' must be given a batch whose size is a number, got batch"):
        attend(*of_any_batch)


@pytest.mark.parametrize(("policy", "runs"), [(None, 2), ("alibi_residuals", 1)])
def test_rematerialisation_runs_the_forward_kernel_again_unless_residuals_are_saved(policy: Any, runs: int) -> None:
    policy = None if policy is None else jax.checkpoint_policies.save_only_these_names(policy)

    def layer(x: jax.Array, weight: jax.Array) -> jax.Array:
        x = x @ weight
        return alibi_jax.attention(x, x, x) @ weight

    def loss(x: jax.Array, weight: jax.Array) -> jax.Array:
        return jnp.sum(jax.checkpoint(layer, policy=policy)(x, weight).astype(jnp.float32) ** 2)

    shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((1, 256, 2, 64), (64, 64))]
    program = export.export(jax.jit(jax.grad(loss, (0, 1))), platforms=["tpu"])(*shapes)
    assert program.mlir_module().count('kernel_name = "alibi_forward"') == runs
