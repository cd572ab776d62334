"""Tiled attention on the CPU: tiles so small that little cases have many, and rows longer than horizons."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

import array_api_compat.torch as xp  # noqa: E402

import alibi_torch  # noqa: E402
from alibi_core import AttentionCall  # noqa: E402
from alibi_core._horizon.jobs import Job, TileSizes, entry_of  # noqa: E402
from alibi_core._horizon.nearest import nearest_keys  # noqa: E402
from alibi_core.conformance._cases.case import (  # noqa: E402
    LONGER,
    SIZES,
    Case,
    Sizes,
    cases,
)
from alibi_core.conformance._cases.data import DATA, STEEP  # noqa: E402
from alibi_core.conformance._cases.oracle import assert_within, penalties  # noqa: E402
from alibi_torch._tiled import kernels as _tile_kernels  # noqa: E402
from alibi_torch._tiled import operators as _tiled  # noqa: E402
from alibi_torch._tiled import plan as _tile_plan  # noqa: E402
from alibi_torch._tiled.plan import KeyNorms, jobs  # noqa: E402
from benchmarks.harness import timing as _timing  # noqa: E402
from tests.support import tiles  # noqa: E402
from tests.support.frameworks import TORCH, Backend  # noqa: E402
from tests.support.tiles import (  # noqa: E402
    LONGER_CASES,
    SPANS,
    TOLERANCES,
    hostile,
    within_tolerance,
)

TILED = Backend(TORCH, "alibi_torch", "tiled")
DTYPES = ("float32", "float64", "float16", "bfloat16")

FAST = settings(max_examples=max(10, settings.default.max_examples // 2))


@dataclass(frozen=True)
class Tiling:
    """The sizes that decide how a call is cut up, in place of those of the modules."""

    rows: tuple[int, int] = (2, 4)
    few: int = 1
    blocks: int = 3
    bias_elements: int = 2**22
    plan_elements: int = 2**20
    kernel_elements: int = 2**22
    call_scores: int = 0
    short: int = 0

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        sizes = TileSizes(self.rows, self.bias_elements, self.call_scores, self.few)
        constants = {"SIZES": sizes, "SHORT": self.short, "KV_BLOCK": 1, "BLOCKS": self.blocks, "WORTHWHILE": 0}
        with pytest.MonkeyPatch.context() as patch:
            for name, value in constants.items():
                patch.setattr(_tile_plan, name, value)
            patch.setattr(_tile_plan, "PART_ELEMENTS", self.plan_elements)
            patch.setattr(_tile_kernels, "PART_ELEMENTS", self.kernel_elements)
            yield


TILINGS = st.builds(
    Tiling,
    rows=st.sampled_from([(1, 1), (1, 4), (2, 4), (4, 4), (2, 16)]),
    few=st.sampled_from([1, 1, 3]),
    blocks=st.sampled_from([1, 3, 512]),
    bias_elements=st.sampled_from([1, 24, 100, 2**22]),
    plan_elements=st.sampled_from([1, 40, 2**20]),
    kernel_elements=st.sampled_from([1, 300, 2**22]),
    call_scores=st.sampled_from([0, 20, 10**9]),
    short=st.sampled_from([0, 0, 0, 1024]),
)
attend = functools.partial(tiles.attend, TILED)
assert_exact = functools.partial(tiles.assert_exact, TILED)
MANY_RUNS = Tiling(call_scores=10**9)


# --- The same laws as for all implementations, in many tiles -------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@given(case=cases(), tiling=TILINGS, tolerance=st.sampled_from([None, 0.0]))
def test_many_tiles_are_exact_with_their_gradients(
    dtype: str, case: Case, tiling: Tiling, tolerance: float | None
) -> None:
    with tiling.applied():
        assert_exact(case, dtype, tolerance)


@FAST
@given(case=LONGER_CASES, tiling=TILINGS, tolerance=st.sampled_from([None, 0.0]))
def test_several_blocks_of_keys_are_exact_with_their_gradients(
    case: Case, tiling: Tiling, tolerance: float | None
) -> None:
    with tiling.applied():
        assert_exact(case, tolerance=tolerance)


NAMES = ("query", "key", "value", "slopes", "future_slopes")


def learnable(length: int, is_causal: bool) -> dict[str, torch.Tensor]:
    query, key, value = tensors((length, length), batch=1, heads=(2, 1))
    slopes = {"slopes": torch.tensor([0.5, 0.02]), "future_slopes": torch.tensor([0.1, 0.3])}
    inputs = {"query": query, "key": key, "value": value} | slopes
    return {name: inputs[name] for name in (NAMES[:4] if is_causal else NAMES)}


def cotangents(shape: torch.Size) -> dict[str, torch.Tensor]:
    """Return cotangents of all kinds; the first is what others are measured by."""
    ones, row, element = torch.ones(shape), torch.zeros(shape), torch.zeros(shape)
    row[:, :, shape[2] // 2] = 1
    element[0, -1, -1, 0] = 1
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    mean = (ones / ones.numel()).mean().expand(shape)
    return {"noise": noise, "ones": ones, "mean": mean, "zeros": 0 * ones, "row": row, "element": element}


def gradients_of(
    inputs: dict[str, torch.Tensor], wanted: tuple[str, ...], weights: dict[str, torch.Tensor], **arguments: Any
) -> dict[str, list[torch.Tensor]]:
    """Return the gradients by those that are wanted, for each weight."""
    inputs = {name: x.detach().clone().requires_grad_(name in wanted) for name, x in inputs.items()}
    result = alibi_torch.attention(**inputs, **arguments)
    by = [inputs[name] for name in wanted]
    grads = [torch.autograd.grad(result, by, x.to(result.dtype), retain_graph=True) for x in weights.values()]
    return dict(zip(wanted, map(list, zip(*grads, strict=True)), strict=True))


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("length", [1, 2, 16, 17, 64, 127, 1024, 1025])
def test_each_subset_of_gradients_by_cotangents_of_all_kinds(length: int, is_causal: bool) -> None:
    inputs = learnable(length, is_causal)
    weights = cotangents(inputs["query"].shape)
    doubles = {name: x.double() for name, x in inputs.items()}
    names = tuple(inputs)
    right = gradients_of(doubles, names, weights, is_causal=is_causal, implementation="dense")
    dense = gradients_of(inputs, names, weights, is_causal=is_causal, implementation="dense")
    subsets = [x for n in range(1, len(names) + 1) for x in itertools.combinations(names, n)]
    for wanted in subsets if length < 1024 else [*((name,) for name in names), names]:
        found = gradients_of(inputs, wanted, weights, is_causal=is_causal, implementation="tiled")
        for name in wanted:
            for actual, naive, expected, kind in zip(found[name], dense[name], right[name], weights, strict=True):
                # A constant cotangent's gradients are sums that cancel; their terms are of the size of the cotangent.
                size = max(1.0, right[name][0].abs().max().item()) * weights[kind].abs().max()
                budget = 4 * (naive - expected).abs().max() + 2.0**-20 * size + 2.0**-18 * expected.abs().max()
                assert ((actual - expected).abs() <= budget).all(), (wanted, name, kind)


@pytest.mark.parametrize(
    ("wanted", "reduce", "dtype"),
    [(("query",), "sum", torch.float32), (("key",), "mean", torch.float32), (NAMES, "sum", torch.bfloat16)],
    ids=str,
)
def test_gradients_of_a_compiled_loss(wanted: tuple[str, ...], reduce: str, dtype: torch.dtype) -> None:
    torch._dynamo.reset()

    def loss(*x: torch.Tensor) -> torch.Tensor:
        result = alibi_torch.attention(*x[:4], future_slopes=x[4], is_causal=False)
        return getattr(result, reduce)()

    compiled = torch.compile(loss, fullgraph=True)
    for length in (64, 1025):
        inputs = learnable(length, is_causal=False)
        inputs = {name: x if "slopes" in name else x.to(dtype) for name, x in inputs.items()}
        inputs = {name: x.requires_grad_(name in wanted) for name, x in inputs.items()}
        by = [inputs[name] for name in wanted]
        grads = (torch.autograd.grad(f(*inputs.values()), by) for f in (compiled, loss))
        for actual, expected in zip(*grads, strict=True):
            torch.testing.assert_close(actual, expected, rtol=4 * torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("means", [(30, 0), (0, 30), (30, 30), (100, 100), "drifting"], ids=str)
@pytest.mark.parametrize("length", [512, 1100])
def test_means_that_keys_or_values_have_in_common_cost_no_digits(
    length: int, means: tuple[float, float] | str, dtype: torch.dtype
) -> None:
    # As those of trained models have: a row's gradients of scores are then differences of what is nearly the same, and
    # their sum is multiplied by the mean of the keys.
    generator = torch.Generator().manual_seed(length)
    query, key, value, cotangent = torch.randn(4, 1, 2, length, 32, generator=generator).unbind()
    if means == "drifting":
        ramp = torch.linspace(20, 100, length)[:, None]
        key, value = key + ramp, value - ramp
    else:
        key, value = key + means[0], value + means[1]
    rounded = [x.to(dtype) for x in (query, key, value, cotangent)]

    def gradients(implementation: str, dtype: torch.dtype) -> list[torch.Tensor]:
        inputs = [x.to(dtype).requires_grad_() for x in rounded[:3]]
        result = alibi_torch.attention(*inputs, implementation=implementation)
        return [x.double() for x in torch.autograd.grad(result, inputs, rounded[3].to(dtype))]

    for right, tiled_one, dense_one in zip(
        gradients("dense", torch.float64), gradients("tiled", dtype), gradients("dense", dtype), strict=True
    ):
        dense_error = (dense_one - right).norm()
        if dtype == torch.float32:  # where dense's own errors happen to cancel, there are still those of the scores
            dense_error = dense_error.clamp(min=100 * 2.0**-24 * right.norm())
        assert (tiled_one - right).norm() <= 2 * dense_error


@pytest.mark.parametrize("largest", [2.0**14, 2.0**24, 2.0**40])
@pytest.mark.parametrize("lengths", [(60, 60), (3, 1100), (300, 1100)])
@pytest.mark.parametrize(
    "rules", [{}, {"is_causal": False}, {"mask": torch.arange(60) > 20}], ids=["causal", "both", "mask"]
)
def test_gradients_where_scores_are_large(rules: dict[str, Any], lengths: tuple[int, int], largest: float) -> None:
    if "mask" in rules and lengths[1] != 60:
        rules = {"mask": torch.arange(lengths[1]) > lengths[1] - lengths[0] + 1}  # the first queries see nothing
    query, key, value = tensors(lengths)
    query, key = query * largest**0.5, key * largest**0.5
    slopes = torch.tensor([1.0, 0.3, 0.0625, 0.0])

    def gradients(implementation: str, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        inputs = [x.to(dtype).requires_grad_() for x in (query, key, value, slopes)]
        loss = alibi_torch.attention(*inputs, **rules, implementation=implementation).square().sum()
        # With the gradients of slopes, and without.
        return *torch.autograd.grad(loss, inputs[:3], retain_graph=True), *torch.autograd.grad(loss, inputs)

    # No more than what the rounding of such scores makes of it in any case, and that of their gradients, which are of
    # the size of values and cotangents and are multiplied by keys or queries.
    for right, actual, expected in zip(
        *(gradients(*x) for x in (("dense", torch.float64), ("tiled", torch.float32), ("dense", torch.float32))),
        strict=True,
    ):
        budget = 4 * (expected - right).abs().max() + 2.0**-13 * right.abs().max() + 2.0**-20 * largest**0.5
        assert ((actual - right).abs() <= budget).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_gradients_of_slopes_know_no_rounded_result(dtype: torch.dtype) -> None:
    # Values around 8: the gradients of a row's scores are differences of what is nearly the same.
    rng = np.random.default_rng(0)
    query, key, value, cotangent = (torch.from_numpy(x) for x in rng.standard_normal((4, 1, 2, 256, 16)))
    query, key, value, cotangent = (x.to(dtype) for x in (query, key, value + 8, cotangent))

    def gradient(implementation: str) -> np.ndarray:
        slopes = torch.tensor([0.5, 0.004], requires_grad=True)
        result = alibi_torch.attention(query, key, value, slopes, implementation=implementation)
        return torch.autograd.grad(result, slopes, cotangent)[0].numpy()

    # Both in float32 until the end, whatever the dtype: off by its roundoff times the sum of what cancels, 256 rows of
    # values of 8 by a mean distance of 100, which is some thousand times the gradient.
    np.testing.assert_allclose(gradient("tiled"), gradient("dense"), rtol=2e-3)


@given(case=cases(forms=("asymmetric",)), tiling=TILINGS)
def test_gradients_of_both_kinds_of_slopes_add_up(case: Case, tiling: Tiling) -> None:
    slopes = case.arrays["slopes"].astype(np.float32)
    arguments = {name: value for name, value in case.arguments.items() if name != "future_slopes"}
    tensors, cotangent = {name: case.arrays[name] for name in ("query", "key", "value")}, case.arrays["cotangent"]
    both = {"slopes": slopes, "future_slopes": slopes}
    with tiling.applied():
        together = TILED.gradients(tensors | {"slopes": slopes}, cotangent, dtype="float32", **arguments)["slopes"]
        found = TILED.gradients(tensors | both, cotangent, dtype="float32", **arguments)
    budget = case.with_arguments("symmetric", arguments).gradients("float32")["slopes"].budget
    assert np.all(np.abs(found["slopes"] + found["future_slopes"] - together) <= 3 * budget)


@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize("form", ["causal", "asymmetric"])
@pytest.mark.parametrize("lengths", [(3, 402), (3, 400), (40, 260)])
def test_threads_change_nothing_but_rounding(threads: int, form: str, lengths: tuple[int, int]) -> None:
    # A single head of a single tile: threads share its keys, of which there are a few more than a multiple.
    case = Case(Sizes(1, 1, 1, lengths, 4), form, lengths[1] // 2, None, None, None, False, seed=4)
    case = case.with_arrays(slopes=np.asarray([2.0**-5]))
    with Tiling(rows=(64, 256)).applied(), num_threads(threads):
        assert_exact(case, tolerance=0.0)


# --- The guarantee -------------------------------------------------------------------------------------------------


@given(
    case=st.sampled_from(LONGER + SIZES).flatmap(lambda sizes: cases(sizes=sizes)),
    data=st.sampled_from(sorted(DATA)),
    tiling=TILINGS,
    tolerance=st.sampled_from(TOLERANCES),
    sign=st.sampled_from([1, 1, -1]),
    dtype=st.sampled_from(["float32", "float64", "bfloat16"]),
)
def test_no_more_is_left_out_than_the_tolerance(
    case: Case, data: str, tiling: Tiling, tolerance: float, sign: int, dtype: str
) -> None:
    case = hostile(case, data, sign)
    with tiling.applied():
        result = attend(case, dtype, tolerance=tolerance)
    assert_within(result, within_tolerance(case.exact(dtype).output, case, tolerance))


@pytest.mark.parametrize("data", sorted(DATA))
def test_no_more_is_left_out_of_long_rows(data: str) -> None:
    index = sorted(DATA).index(data)
    lengths = ((1100, 1100), (257, 1400), (1300, 1100), (1024, 1025))[index % 4]
    form = ("causal", "causal", "symmetric", "asymmetric", "clamped")[index % 5]
    packing = "one row" if index == 6 else None
    sizes = Sizes(1, 2, 2, lengths, 6)
    case = hostile(
        Case(sizes, form, None, None, packing, None, index % 2 == 0, seed=index), data, -1 if index == 5 else 1
    )
    answer = case.exact("float32").output
    for tolerance in TOLERANCES:
        assert_within(attend(case, "float32", tolerance=tolerance), within_tolerance(answer, case, tolerance))


@pytest.mark.parametrize("factor", [-8.0, 16.0])
@pytest.mark.parametrize("data", ["opposed", "stripes"])
def test_no_more_is_left_out_of_large_scores(factor: float, data: str) -> None:
    case = hostile(Case(LONGER[0], "causal", None, None, None, None, True, seed=8), data, 1)
    small = {name: case.arrays[name] * 0.25 for name in ("query", "key")}
    case = case.with_arrays(**small)
    scaled = case.with_arrays(query=case.arrays["query"] * factor)
    for tolerance in TOLERANCES:
        with Tiling(blocks=512).applied():
            result = attend(case, "float32", scale=case.scale * factor, tolerance=tolerance)
        assert_within(result, within_tolerance(scaled.exact("float32").output, case, tolerance))


@pytest.mark.parametrize("form", ["causal", "asymmetric"])
def test_long_rows_are_exact_with_their_gradients(form: str) -> None:
    case = Case(Sizes(1, 1, 4, (1090, 1090), 6), form, None, None, None, None, False, seed=1)
    steep = STEEP[[1, 2, 4, 6]].astype(np.float64)
    assert_exact(case.with_arrays(slopes=steep))


def test_a_window_and_padding_in_long_rows() -> None:
    case = Case(Sizes(2, 2, 1, (1100, 1100), 4), "symmetric", None, None, None, None, False, seed=2)
    mask = np.ones((2, 1, 1, 1100), dtype=bool)
    mask[1, ..., :600] = mask[0, ..., 1000:] = mask[0, ..., 30:40] = False
    assert_exact(case.with_arguments("symmetric", {"is_causal": False, "mask": mask, "window_size": 70}))


@pytest.mark.parametrize("call_scores", [0, 10**9])
@pytest.mark.parametrize("ids", [(0, 1, 2, 3), (0, 1, 0, 1), (3, 2, 1, 0)], ids=str)
@pytest.mark.parametrize("spans", SPANS)
def test_runs_of_tiles_end_at_segments(spans: str, ids: tuple[int, ...], call_scores: int) -> None:
    # A window makes neighbouring tiles alike, but for segments; horizons that differ, nearly so.
    case = Case(Sizes(1, 2, 1, (64, 64), 4), "causal", None, None, None, None, False, seed=5)
    segment_ids = tuple(np.asarray(ids)[(np.arange(64)[:, None] >= np.asarray(x)).sum(axis=1)] for x in SPANS[spans])
    arguments = {"segment_ids": segment_ids, "window_size": 5}
    packed = case.with_arguments("causal", arguments).with_arrays(slopes=np.asarray([0.0, 0.25]))
    steep = case.with_arguments("causal", {"segment_ids": segment_ids})
    steep = steep.with_arrays(slopes=np.asarray([4.0, 4.0]), query=case.arrays["query"] * 2)
    for blocks in (3, 512):
        with Tiling(rows=(4, 4), blocks=blocks, call_scores=call_scores).applied():
            assert_exact(packed, tolerance=0.0)
            assert_exact(packed)
            assert_exact(steep)


@pytest.mark.parametrize("call_scores", [0, 10**9])
@pytest.mark.parametrize("holes", [[0, 1, 2], [19, 20], [33], [63], [10, 23, 47, 48, 49, 50, 51, 52, 53]], ids=str)
@pytest.mark.parametrize("form", ["causal", "symmetric"])
def test_runs_of_tiles_end_at_masked_keys(holes: list[int], form: str, call_scores: int) -> None:
    case = Case(Sizes(1, 2, 1, (64, 64), 4), form, None, None, None, None, False, seed=6)
    mask = ~np.isin(np.arange(64), holes)[None, None, None]
    arrays = {"slopes": np.asarray([4.0, 3.0]), "query": case.arrays["query"] * 2}
    for arguments in ({"mask": mask}, {"mask": mask, "window_size": 5}):
        masked = case.with_arguments(form, case.arguments | arguments)
        masked.__dict__["arrays"] = case.arrays
        with Tiling(rows=(4, 4), blocks=512, call_scores=call_scores).applied():
            assert_exact(masked.with_arrays(**arrays))


@pytest.mark.parametrize("rule", ["mask", "segment_ids"])
def test_a_run_of_tiles_is_not_widened_to_what_is_hidden(rule: str) -> None:
    # From 56 on, queries care for key 37 alone, for as long as it is within the horizon; those before for no key. Were
    # all alike to one call, the hidden key 33 at the same place before query 52 would hide key 37 from query 56.
    query, key, value = np.zeros((1, 1, 64, 1)), np.full((1, 1, 64, 1), -1.0), np.full((1, 1, 64, 1), -1.0)
    query[:, :, 56:] = 10
    key[:, :, 37] = value[:, :, 37] = 1
    places = np.arange(64)
    hidden = {"mask": (places != 33)[None, None, None], "segment_ids": (places >= 34).astype(np.int32)[None]}
    case = Case(Sizes(1, 1, 1, (64, 64), 1), "causal", None, None, None, None, False, seed=0)
    case = case.with_arguments("causal", {rule: hidden[rule]})
    case = case.with_arrays(query=query, key=key, value=value, slopes=np.asarray([1.0]))
    answer = within_tolerance(case.exact("float32").output, case, 0.3)
    for call_scores in (0, 10**9):
        with Tiling(rows=(4, 4), blocks=512, call_scores=call_scores).applied():
            ranges = {job.q_start: job.kv_start for job in jobs(*planning(case), 0.3, None)}
            assert 34 <= ranges[56] <= 37  # or this says nothing
            assert_within(attend(case, "float32", tolerance=0.3), answer)


@pytest.mark.parametrize("q_offset", [2**29 - 50, 2**29 + 50, 2**30, 2**30 + 77, 2**31 - 10_000])
@pytest.mark.parametrize("is_causal", [True, False])
def test_masked_keys_far_from_all_queries_count(q_offset: int, is_causal: bool) -> None:
    case = Case(Sizes(1, 2, 1, (7, 7), 4), "causal", None, None, None, None, False, seed=3)
    mask = np.ones((1, 1, 1, 7), dtype=bool)
    mask[..., [0, 2, 6]] = False
    for sign in (1,) if is_causal else (1, -1):
        far = case.with_arguments("", {"is_causal": is_causal, "mask": mask, "q_offset": sign * q_offset})
        far = far.with_arrays(slopes=np.asarray([0.0, 0.5]))
        with Tiling().applied():
            assert_within(attend(far, "float32"), far.exact("float32").output)


@given(case=LONGER_CASES, data=st.sampled_from(sorted(DATA)), tiling=TILINGS, sign=st.sampled_from([1, 1, -1]))
@example(
    case=Case(LONGER[0], "causal", None, None, None, None, slopes_per_batch=False, seed=4),
    data="stripes",
    tiling=Tiling(),
    sign=1,
)
@example(
    case=Case(LONGER[0], "causal", None, 6, None, None, slopes_per_batch=False, seed=4),
    data="stripes",
    tiling=Tiling(),
    sign=1,
)
@example(
    case=Case(LONGER[1], "clamped", 13, None, None, "by query", slopes_per_batch=False, seed=3),
    data="stripes",
    tiling=Tiling(),
    sign=1,
)
@example(
    case=Case(LONGER[0], "causal", None, None, "same", None, slopes_per_batch=False, seed=4),
    data="stripes",
    tiling=Tiling(),
    sign=1,
)
def test_lower_bounds_of_denominators_are_lower(case: Case, data: str, tiling: Tiling, sign: int) -> None:
    assert_lower_bounds(without_offsets_by_entry(hostile(case, data, sign)), tiling)


@pytest.mark.parametrize("shown", [0, 1])
def test_lower_bounds_count_no_hidden_keys(shown: int) -> None:
    case = hostile(Case(LONGER[0], "causal", None, None, None, None, slopes_per_batch=False, seed=4), "stripes", 1)
    visible = np.arange(150) // 32 % 2 == shown
    for rule, hidden in (("mask", visible[None, None, None]), ("segment_ids", visible[None].astype(np.int32))):
        masked = case.with_arguments("causal", {rule: hidden})
        masked.__dict__["arrays"] = case.arrays
        assert_lower_bounds(masked, Tiling())


def assert_lower_bounds(case: Case, tiling: Tiling) -> None:
    problem, (call, query, key) = case.exact("float32"), planning(case)
    middle = key.mean(dim=2, keepdim=True)
    scores = np.einsum("bhid,bhjd->bhij", problem.query, problem.keys - TORCH.numpy(middle).repeat(problem.group, 1))
    scores = scores * problem.scale + problem.bias
    actual = np.logaddexp.reduce(scores, axis=-1)  # of rows that see nothing, -inf
    with tiling.applied():
        for index in range(case.sizes.batch):
            one = slice(index, index + 1)
            bounds = _tile_plan._lower_bounds(entry_of(call, index), query[one], key[one], middle[one])
            if bounds is not None:
                rounding = 2.0**-20 * (1 + np.abs(np.where(np.isfinite(scores), scores, 0)).max())
                assert np.all(TORCH.numpy(bounds)[0] <= actual[index] + rounding)


def test_lower_bounds_shorten_horizons() -> None:
    # The query's own key says little of a row of 150 that score the same.
    query, key = torch.ones(1, 1, 150, 4), torch.ones(1, 1, 150, 4)
    call = AttentionCall.check(query, key, key, torch.tensor([0.03]), xp=xp)
    with Tiling().applied():
        bounds = _tile_plan._lower_bounds(call, query, key, key.mean(dim=2, keepdim=True))
    assert (bounds[..., 32:] > np.log(32) - 0.03 * 64).all()
    assert (bounds[..., :16] == -torch.inf).all()


@given(case=LONGER_CASES | cases(), tiling=TILINGS)
@example(case=Case(LONGER[2], "symmetric", -100, None, None, "by key", slopes_per_batch=False, seed=1), tiling=Tiling())
def test_nearest_keys_are_the_calls_own(case: Case, tiling: Tiling) -> None:
    call = planning(without_offsets_by_entry(case))[0]
    with tiling.applied():
        for index in range(case.sizes.batch):
            entry = entry_of(call, index)
            found, expected = nearest_keys(entry, _tile_plan.PART_ELEMENTS), entry.nearest_keys()
            assert torch.equal(*torch.broadcast_tensors(found, expected))


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("lengths", [(64, 64), (300, 4200), (2, 4200)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_key_that_is_not_finite_is_seen_by_whoever_may(
    dtype: torch.dtype, lengths: tuple[int, int], number: float
) -> None:
    query, key, value = tensors(lengths, batch=1, heads=(2, 1), dtype=dtype)
    slopes = torch.full((2,), 8.0)
    place = lengths[1] - lengths[0] // 2
    for where in (3, place):
        spoiled = key.clone()
        spoiled[:, :, where] = number
        with Tiling(short=16).applied() if lengths[1] == 64 else contextlib.nullcontext():
            result = tiled(query, spoiled, value, slopes)
        dense = alibi_torch.attention(query, spoiled, value, slopes, implementation="dense")
        sees = torch.arange(lengths[1] - lengths[0], lengths[1]) >= where
        assert torch.equal(torch.isfinite(result[:, :, sees]), torch.isfinite(dense[:, :, sees]))
        assert not torch.isfinite(dense[:, :, sees]).all()
        # Nobody else need be spoiled; and what is finite is right.
        clean = alibi_torch.attention(query, key, value, slopes, implementation="dense")
        clean = torch.where(sees[:, None], dense, clean)
        finite = torch.isfinite(result)
        torch.testing.assert_close(result[finite], clean[finite], rtol=0, atol=8 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("number", [np.nan, np.inf])
@pytest.mark.parametrize("q_len", [2, 300])
def test_a_value_that_is_not_finite_spoils_where_its_key_counts(q_len: int, number: float) -> None:
    query, key, value = tensors((q_len, 4200), batch=1, heads=(2, 2))
    slopes, where = torch.tensor([0.5, 0.004]), 4200 - q_len // 2
    clean = alibi_torch.attention(query, key, value, slopes, implementation="dense")
    only = torch.zeros(4200, dtype=torch.bool)
    only[where] = True
    one_hot = torch.where(only[:, None], 1.0, torch.zeros_like(value))
    weight = alibi_torch.attention(query, key, one_hot, slopes, implementation="dense")[..., 0]
    value[:, :, where] = number
    result = tiled(query, key, value, slopes)
    assert not torch.isfinite(result[weight > 2.0**-23]).any()
    finite = torch.isfinite(result)
    torch.testing.assert_close(result[finite], clean[finite], rtol=0, atol=8e-6)


@pytest.mark.parametrize("q_len", [1, 17, 300])
@pytest.mark.parametrize("case", ["tiny keys", "tiny queries", "huge keys", "huge keys of a known norm", "half"])
def test_what_cannot_be_measured_is_computed_whole(case: str, q_len: int) -> None:
    query, key, value = (x.abs() for x in tensors((q_len, 2100), batch=1, heads=(2, 2), head_dim=16))
    arguments: dict[str, Any] = {}
    if case.startswith("tiny"):  # whose squares vanish
        query, key = torch.zeros_like(query), torch.zeros_like(key)
        query[..., 0], key[:, :, :200, 0] = (1e6, 1e-23) if case == "tiny keys" else (1e-23, 1e6)
        arguments["scale"] = 6e18
    elif case == "half":  # whose squares, and whose sums, its dtype does not hold
        query, key, value = (query * 1e-4).half(), (key * 2e4).clamp(max=6e4).half(), value.half()
    else:  # whose squares, and whose sums, float32 does not hold
        query, key = query * 1e-37, key * 1e37 * (1 + torch.arange(2100)[:, None] % 3)
        arguments = {"max_key_norm": 3e38} if "norm" in case else {}
    slopes = torch.tensor([0.5, 0.02])
    result = tiled(query, key, value, slopes, **arguments)
    arguments.pop("max_key_norm", None)
    right = alibi_torch.attention(
        *(x.double() for x in (query, key, value)), slopes, **arguments, implementation="dense"
    )
    dense = alibi_torch.attention(query, key, value, slopes, **arguments, implementation="dense")
    assert (result - right).abs().max() <= 2 * (dense - right).abs().max() + 2 * torch.finfo(value.dtype).eps


# --- What is computed ----------------------------------------------------------------------------------------------


@given(case=cases(), tiling=TILINGS, tolerance=st.sampled_from([0.0, 2.0**-24]))
def test_each_query_is_in_one_job_that_has_all_it_may_see(case: Case, tiling: Tiling, tolerance: float) -> None:
    batch, heads, (q_len, kv_len) = case.sizes.batch, case.num_heads, case.sizes.lengths
    case = without_offsets_by_entry(case)
    with tiling.applied():
        planned = list(jobs(*planning(case), tolerance, None))
    computed = np.zeros((batch, heads, q_len, kv_len), dtype=int)
    times = np.zeros((batch, heads, q_len), dtype=int)
    for job, tile in ((x, tile) for x in planned for tile in range(x.tiles)):
        start, kv_start = job.q_start + tile * job.rows, job.kv_start + tile * job.rows
        assert 0 <= start < start + job.rows <= q_len
        assert 0 <= kv_start < kv_start + job.kv_len <= kv_len
        assert job.tiles == 1 or job.batch.stop - job.batch.start == 1
        times[job.batch, job.heads, start : start + job.rows] += 1
        computed[job.batch, job.heads, start : start + job.rows, kv_start : kv_start + job.kv_len] = 1
    assert np.all(times == 1)
    if tolerance == 0:
        visible = np.isfinite(penalties(case.rules(case.arrays["slopes"]), batch, heads, q_len, kv_len))
        assert np.all(computed[visible] == 1)


def test_no_job_is_larger_than_it_may_be() -> None:
    query, key, value = tensors((64, 64))
    call = AttentionCall.check(query, key, value, torch.zeros(4), xp=xp)
    for limit in (300, 2000, 10**6):
        with Tiling(rows=(4, 16), bias_elements=limit).applied():
            sizes = [(x.heads.stop - x.heads.start, x.rows * x.kv_len) for x in jobs(call, query, key, 2.0**-24, None)]
        assert all(heads == 1 or heads * bias <= limit for heads, bias in sizes)
    assert max(heads for heads, _ in sizes) == 2  # those of a group
    query, key, value = tensors((64, 64), batch=11)
    call = AttentionCall.check(query, key, value, torch.zeros(11, 4), xp=xp)
    for limit in (300, 2000, 4 * 64 * 64, 10**6):
        with Tiling(rows=(4, 16), bias_elements=limit, short=1024).applied():
            planned = list(jobs(call, query, key, 2.0**-24, None))
        biases = [(x.heads.stop - x.heads.start) * (x.batch.stop - x.batch.start) for x in planned]
        assert all(n == 1 or n * x.rows * x.kv_len <= limit for n, x in zip(biases, planned, strict=True))


def test_horizons_save_work() -> None:
    length, rows = 4096, _tile_plan.SIZES.rows[0]
    query, key, value = tensors((length, length), batch=1)
    slopes = torch.tensor([1.0, 0.25, 2.0**-6, 0.0])
    call = AttentionCall.check(query, key, value, slopes, xp=xp)
    planned = {tolerance: list(jobs(call, query, key, tolerance, None)) for tolerance in (0.3, 2.0**-24, 0.0)}
    by_tolerance = {tolerance: pairs_by_head(some) for tolerance, some in planned.items()}
    triangle = length * (length + 1) // 2
    for default, loose, whole in zip(*(by_tolerance[x] for x in (2.0**-24, 0.3, 0.0)), strict=True):
        assert loose <= default <= whole
        assert whole >= triangle
    steepest, steep, _, flat = by_tolerance[2.0**-24]
    # A score exceeds another by 2 * scale * |query| * |key|, 12 or so, and the logarithm of 2**-24 is -17.
    assert steepest <= length * (60 + 2 * rows)
    assert steep <= length * (4 * 60 + 3 * rows)
    assert flat >= triangle
    # Runs of tiles in one call each: not a call for every tile.
    assert len([job for job in planned[2.0**-24] if job.heads.start == 0]) < 10


def test_heads_alike_share_calls() -> None:
    query, key, value = tensors((128, 128), batch=1, heads=(4, 4))
    query, key = query[:, :1].expand(-1, 4, -1, -1), key[:, :1].expand(-1, 4, -1, -1)

    def planned(*slopes: float) -> list[Job]:
        call = AttentionCall.check(query, key, value, torch.tensor(slopes), xp=xp)
        with Tiling(rows=(8, 8)).applied():
            return list(jobs(call, query, key, 0.01, None))

    assert all(job.heads == slice(0, 4) for job in planned(0.5, 0.5, 0.5, 0.5))
    apart = planned(4.0, 0.0, 4.0, 4.0)
    assert any(job.heads == slice(2, 4) for job in apart)
    for head in range(4):
        assert sum(job.tiles * job.rows for job in apart if job.heads.start <= head < job.heads.stop) == 128


def test_a_last_tile_of_fewer_rows_is_a_call_of_its_own() -> None:
    query, key, value = tensors((7, 20), batch=1)
    call = AttentionCall.check(query, key, value, torch.ones(4), q_offset=6, window_size=2, xp=xp)
    with MANY_RUNS.applied():
        planned = list(jobs(call, query, key, 0.0, None))
    assert {(job.q_start, job.rows, job.tiles) for job in planned} == {(0, 2, 3), (6, 1, 1)}


def test_a_tolerance_of_zero_leaves_nothing_out() -> None:
    length = 1400
    query, key, value = torch.zeros(1, 1, length, 4), torch.zeros(1, 1, length, 4), torch.zeros(1, 1, length, 4)
    value[:, :, 0] = 2.0**100  # far away, it weighs exp(-35)
    last = {x: tiled(query, key, value, torch.tensor([0.025]), tolerance=x)[0, 0, -1, 0].item() for x in (0.0, 2e-8)}
    assert last[2e-8] == 0
    weight = np.exp(-0.025 * np.arange(length)[::-1].astype(np.float64))
    assert last[0.0] == pytest.approx(weight[0] / weight.sum() * 2.0**100, rel=1e-4)


# --- Few queries, and norms that are known -------------------------------------------------------------------------


@pytest.mark.parametrize("q_len", [1, 2, 15, 16, 17])
@pytest.mark.parametrize("data", ["outlier", "sinks", "opposed", "fading"])
def test_a_few_queries_over_many_keys(q_len: int, data: str) -> None:
    form = "causal" if q_len % 2 else "asymmetric"
    case = Case(Sizes(2, 2, 2, (q_len, 2500), 4), form, None if q_len > 2 else 2300, None, None, None, True, seed=q_len)
    case = hostile(case, data, 1)
    norms = np.linalg.norm(np.float32(case.arrays["key"]), axis=-1).max(axis=-1) * (1 + 2.0**-20)
    answer = case.exact("float32").output
    for tolerance in (None, 0.01):
        expected = within_tolerance(answer, case, 2.0**-24 if tolerance is None else tolerance)
        for known in (None, norms.astype(np.float32), float(norms.max())):
            assert_within(attend(case, "float32", tolerance=tolerance, max_key_norm=known), expected)


@pytest.mark.parametrize("by_mapping", [False, True])
def test_each_batch_entry_has_its_own_norms(by_mapping: bool) -> None:
    query, key, value = tensors((64, 64))
    key[1, :, 3] = 90.0
    norms = key.norm(dim=-1).amax(dim=-1) * (1 + 2**-20)
    slopes = torch.tensor([1.0, 0.5, 0.25, 0.1])

    def one(*x: torch.Tensor) -> torch.Tensor:
        return tiled(*x[:3], slopes, max_key_norm=x[3])

    expected = alibi_torch.attention(query, key, value, slopes, implementation="dense")
    with Tiling().applied():
        result = (torch.func.vmap(one) if by_mapping else one)(query, key, value, norms)
        offsets = torch.zeros(2, dtype=torch.int32)
        by_offset = tiled(query, key, value, slopes, max_key_norm=norms, q_offset=offsets)
    torch.testing.assert_close(result, expected, rtol=0, atol=4e-6)
    torch.testing.assert_close(by_offset, expected, rtol=0, atol=4e-6)


@given(
    case=st.sampled_from(LONGER + SIZES).flatmap(lambda sizes: cases(sizes=sizes)),
    data=st.sampled_from(sorted(DATA)),
    tiling=TILINGS,
    block=st.sampled_from([1, 3, 64]),
    tolerance=st.sampled_from(TOLERANCES),
)
def test_norms_by_block_leave_out_no_more(case: Case, data: str, tiling: Tiling, block: int, tolerance: float) -> None:
    case = hostile(case, data, 1)
    call, query, key = planning(case)
    value = TORCH.array(case.arrays["value"], "float32")
    kv_len = case.sizes.lengths[1]
    norms = torch.nn.functional.pad(key.norm(dim=-1) * (1 + 2**-20), (0, -kv_len % block))
    known = KeyNorms(norms.unflatten(-1, (-1, block)).amax(dim=-1), block)
    with tiling.applied():
        result = _tiled.tiled_attention(replace(call, tolerance=tolerance), query, key, value, known)
    assert_within(TORCH.numpy(result), within_tolerance(case.exact("float32").output, case, tolerance))


@pytest.mark.parametrize("number", [0.0, 1e30])
def test_any_norm_that_is_no_less_will_do(number: float) -> None:
    query, key, value = tensors((64, 64))
    key = key * 0 if number == 0 else key
    with Tiling().applied():
        result = tiled(query, key, value, max_key_norm=number)
    torch.testing.assert_close(
        result, alibi_torch.attention(query, key, value, implementation="dense"), rtol=0, atol=2e-6
    )


@pytest.mark.parametrize(
    ("norm", "error", "message"),
    [
        (-1.0, ValueError, "max_key_norm must .* got -1.0"),
        (float("nan"), ValueError, "max_key_norm must"),
        (float("inf"), ValueError, "max_key_norm must be finite"),
        ("1", TypeError, "max_key_norm must"),
        (torch.ones(2), ValueError, r"max_key_norm must be .* of shape \(2, 2\) \(batch, num_kv_heads\), got .*\(2,\)"),
        (torch.ones(2, 4), ValueError, r"max_key_norm must be .* of shape \(2, 2\)"),
        (torch.ones(2, 2, dtype=torch.int32), ValueError, "max_key_norm must be .* floating .* got torch.int32"),
        (torch.tensor([[1.0, 1.0], [1.0, -1.0]]), ValueError, "max_key_norm must not be negative, got .*-1.0"),
    ],
)
def test_bad_norms_are_refused(norm: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        tiled(*tensors((5, 7)), max_key_norm=norm)


@pytest.mark.parametrize("tolerance", [-1e-9, float("nan"), float("-inf")])
def test_bad_tolerances_are_refused(tolerance: float) -> None:
    with pytest.raises(ValueError, match="tolerance must"):
        tiled(*tensors((5, 7)), tolerance=tolerance)


def test_who_can_run_a_call_is_named() -> None:
    with pytest.raises(NotImplementedError, match="'flex' .* 'tiled' and 'sdpa' and 'dense' can run this call"):
        alibi_torch.attention(*tensors((5, 7), dtype=torch.float64), implementation="flex")
    with pytest.raises(ValueError, match="implementation must be .* got 'tile'"):
        alibi_torch.attention(*tensors((5, 7)), implementation="tile")


# --- As operators of PyTorch ---------------------------------------------------------------------------------------

OFFSETS = torch.tensor([3, -2], dtype=torch.int32)
IDS = torch.tensor([0, 0, 0, 1, 1, 2, 2], dtype=torch.int32)
MASK = torch.rand(2, 1, 7, 11, generator=torch.Generator().manual_seed(7)) < 0.7
VARIANTS: dict[str, dict[str, Any]] = {
    "causal": {},
    "symmetric": {"is_causal": False, "window_size": 3},
    "asymmetric": {"is_causal": False, "future_slopes": torch.tensor([0.5, 0.0, 0.1, 1.0]), "mask": MASK},
    "by entry": {
        "slopes": torch.rand(2, 4),
        "future_slopes": torch.rand(2, 4),
        "is_causal": False,
        "q_offset": OFFSETS,
    },
    "segments": {"segment_ids": (IDS, torch.cat([IDS, IDS[:4]])), "max_key_norm": 10.0},
}


def arguments_of(variant: str, dtype: torch.dtype = torch.float32) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Return query, key, value and slopes, and the other arguments."""
    arguments = dict(VARIANTS[variant])
    slopes = arguments.pop("slopes", torch.tensor([1.0, 0.3, 0.0625, 0.0]))
    if "future_slopes" in arguments:
        arguments["future_slopes"] = arguments["future_slopes"].to(dtype).clone()
    return [*tensors((7, 11), dtype=dtype), slopes.to(dtype).clone()], arguments


@contextlib.contextmanager
def recorded() -> Iterator[list[tuple[Any, tuple[Any, ...]]]]:
    """Collect the operators of this backend that are called, and their arguments."""
    from torch.utils._python_dispatch import TorchDispatchMode

    calls = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function.namespace == "alibi":
                calls.append((function, args))
            return function(*args, **(kwargs or {}))

    with Recorder():
        yield calls


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_operators_are_what_they_say(variant: str, dtype: torch.dtype) -> None:
    inputs, arguments = arguments_of(variant, dtype)
    inputs = [x.requires_grad_() for x in inputs]
    arguments = arguments | {x: arguments[x].requires_grad_() for x in ("future_slopes",) if x in arguments}
    with Tiling().applied():
        with recorded() as calls:
            tiled(*inputs, **arguments).sum().backward()
        names = [str(function) for function, _ in calls]
        assert names == ["alibi.attention.default", "alibi.attention_backward.default"]
        checks = ["test_schema", "test_faketensor"] if dtype == torch.float64 else None
        for function, args in calls:
            args = [
                x.detach().clone().requires_grad_(x.is_floating_point() and function is calls[0][0])
                if isinstance(x, torch.Tensor)
                else x
                for x in args
            ]
            torch.library.opcheck(function, tuple(args), **({"test_utils": checks} if checks else {}))


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradcheck_through_many_tiles(variant: str) -> None:
    inputs, arguments = arguments_of(variant, torch.float64)
    future = arguments.pop("future_slopes", None)
    inputs = [x.clone().requires_grad_() for x in (*inputs, *([] if future is None else [future]))]

    def function(*x: torch.Tensor) -> torch.Tensor:
        return tiled(*x[:4], **({"future_slopes": x[4]} if len(x) > 4 else {}), allow_negative_slopes=True, **arguments)

    with Tiling(call_scores=30).applied():
        assert torch.autograd.gradcheck(function, inputs, fast_mode=True)


@pytest.mark.parametrize("variant", VARIANTS)
def test_compiles_whole_with_its_gradients(variant: str) -> None:
    torch._dynamo.reset()
    inputs, arguments = arguments_of(variant)
    inputs = [x.clone().requires_grad_() for x in inputs]
    weight = torch.randn(2, 4, 7, 5)

    def function(*x: torch.Tensor) -> torch.Tensor:
        return (tiled(*x, **arguments) * weight).sum()

    with Tiling().applied():
        eager = torch.autograd.grad(function(*inputs), inputs)
        compiled = torch.autograd.grad(torch.compile(function, fullgraph=True)(*inputs), inputs)
    for actual, expected in zip(compiled, eager, strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=2e-6)


def test_one_compiled_function_serves_varying_lengths() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(tiled, fullgraph=True, dynamic=True)
    for lengths in ((7, 11), (13, 13), (5, 64)):
        inputs = [x.requires_grad_() for x in tensors(lengths)]
        slopes = torch.tensor([1.0, 0.3, 0.0625, 0.0], requires_grad=True)
        with Tiling().applied():
            found, expected = (f(*inputs, slopes, is_causal=False) for f in (compiled, tiled))
            torch.testing.assert_close(found, expected, rtol=0, atol=0)
            grads = [torch.autograd.grad(x.square().sum(), (*inputs, slopes)) for x in (found, expected)]
        for one, other in zip(*grads, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=2e-6)


class Attend(torch.nn.Module):
    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return tiled(query, key, value)


@pytest.mark.parametrize("strict", [True, False])
def test_exports_with_dynamic_lengths(strict: bool) -> None:
    torch._dynamo.reset()
    shapes = tuple({2: torch.export.Dim(name, min=2, max=4096)} for name in ("q_len", "kv_len", "kv_len"))
    exported = torch.export.export(Attend(), tuple(tensors((7, 11))), dynamic_shapes=shapes, strict=strict)
    for lengths in ((5, 13), (40, 1100)):
        inputs = tensors(lengths)
        torch.testing.assert_close(exported.module()(*inputs), tiled(*inputs), rtol=0, atol=0)


# --- torch.func ----------------------------------------------------------------------------------------------------

# Shorter and longer than what is attended to whole, few queries and more; the shortest in several tiles as well.
MAPPED_LENGTHS = [(7, 11), (7, 7), (1, 1040), (16, 1040), (17, 1040), (40, 1024), (300, 1025)]
MAPPED_SIZE = 3


@dataclass(frozen=True)
class Mapped:
    """Arguments of ``attention``, each with or without a batch axis, and each mapped along some axis or shared.

    Attributes:
        arrays: The arguments that are arrays, the mapped axis included.
        dims: The axis that is mapped; None for a shared argument.
        others: The other arguments.
        tiling: Sizes of tiles; None for those of the module.
    """

    arrays: dict[str, torch.Tensor]
    dims: dict[str, int | None]
    others: dict[str, Any]
    tiling: Tiling | None

    @property
    def differentiable(self) -> tuple[int, ...]:
        floating = (x.is_floating_point() and name != "max_key_norm" for name, x in self.arrays.items())
        return tuple(i for i, is_one in enumerate(floating) if is_one)

    def entries(self) -> list[tuple[torch.Tensor, ...]]:
        """Return the arrays of each mapped entry."""
        return [
            tuple(x if self.dims[name] is None else x.select(self.dims[name], i) for name, x in self.arrays.items())
            for i in range(MAPPED_SIZE)
        ]

    def attention(self, implementation: str) -> Callable[..., torch.Tensor]:
        """Return attention as a function of the arrays."""

        def function(*x: torch.Tensor) -> torch.Tensor:
            arguments = dict(zip(self.arrays, x, strict=True)) | self.others
            if "kv_segment_ids" in arguments:
                arguments["segment_ids"] = arguments["segment_ids"], arguments.pop("kv_segment_ids")
            return alibi_torch.attention(**arguments, implementation=implementation)

        return function


@st.composite
def mapped_calls(draw: st.DrawFn) -> Mapped:
    q_len, kv_len = draw(st.sampled_from(MAPPED_LENGTHS))
    is_causal = draw(st.booleans())
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    either = [(4,), (2, 4)]
    shapes: dict[str, list[Any]] = {
        "query": [(2, 4, q_len, 5)],
        "key": [(2, 2, kv_len, 5)],
        "value": [(2, 2, kv_len, 5)],
        "slopes": either,
        "future_slopes": [] if is_causal else [None, *either],
        "max_key_norm": [None, (2, 2)],
    }
    if draw(st.booleans()):  # or distance alone matters
        shapes |= {
            "q_offset": [None, (), (2,)],
            "segment_ids": [None, (q_len,), (1, q_len), (2, q_len)],
            "kv_segment_ids": [(kv_len,), (1, kv_len), (2, kv_len), *([None] if q_len == kv_len else [])],
            "mask": [
                None,
                (kv_len,),
                (q_len, 1),
                (1, 1, kv_len),
                (2, 1, 1, kv_len),
                (1, 4, 1, 1),
                (2, 4, q_len, kv_len),
            ],
        }
    chosen = {name: draw(st.sampled_from(options), label=name) for name, options in shapes.items() if options}
    if chosen.get("segment_ids") is None:
        chosen["kv_segment_ids"] = None
    chosen = {name: shape for name, shape in chosen.items() if shape is not None}
    dims = {name: draw(st.sampled_from([None, *range(len(shape) + 1)])) for name, shape in chosen.items()}
    if all(dim is None for dim in dims.values()):
        dims[draw(st.sampled_from(sorted(dims)))] = 0
    arrays = {}
    for name, shape in chosen.items():
        size = (*shape[: dims[name]], MAPPED_SIZE, *shape[dims[name] :]) if dims[name] is not None else shape
        if name in ("query", "key", "value"):
            arrays[name] = torch.randn(size, generator=generator, dtype=torch.float64)
        elif "slopes" in name:
            arrays[name] = 10 ** (-3 * torch.rand(size, generator=generator, dtype=torch.float64))
        elif name == "q_offset":
            arrays[name] = kv_len - q_len + torch.randint(-3, 4, size, generator=generator)
        elif name == "mask":
            arrays[name] = torch.rand(size, generator=generator) < 0.7
        elif name == "max_key_norm":
            arrays[name] = arrays["key"].abs().max() * 5 + torch.zeros(size)
        else:
            arrays[name] = torch.randint(0, 2, size, generator=generator)
    others = {"is_causal": is_causal, "window_size": draw(st.sampled_from([None, 5, 300]))}
    tiling = draw(st.sampled_from([None, Tiling()])) if kv_len < 20 else None
    return Mapped(arrays, dims, others, tiling)


@given(case=mapped_calls())
def test_maps_over_any_arguments_along_any_axes(case: Mapped) -> None:
    entries, argnums, in_dims = case.entries(), case.differentiable, tuple(case.dims.values())
    tiled, dense = case.attention("tiled"), case.attention("dense")
    weight = torch.randn(entries[0][0].shape, dtype=torch.float64)

    def loss(*x: torch.Tensor) -> torch.Tensor:
        return (tiled(*x) * weight).sum()

    with contextlib.nullcontext() if case.tiling is None else case.tiling.applied():
        result = torch.func.vmap(tiled, in_dims)(*case.arrays.values())
        of_entries = torch.func.vmap(torch.func.grad(loss, argnums), in_dims)(*case.arrays.values())
        of_all = torch.func.grad(lambda *x: torch.func.vmap(loss, in_dims)(*x).sum(), argnums)(*case.arrays.values())
    expected, expected_grads = [], []
    for entry in entries:
        inputs = [entry[i].clone().requires_grad_() for i in argnums]
        whole = list(entry)
        for i, x in zip(argnums, inputs, strict=True):
            whole[i] = x
        expected.append(dense(*whole))
        expected_grads.append(torch.autograd.grad((expected[-1] * weight).sum(), inputs))
    # Float64 throughout: what is not the same call is off by far more. Slopes' gradients add up a thousand distances.
    close = functools.partial(torch.testing.assert_close, rtol=1e-9, atol=1e-9)
    close(result, torch.stack(expected).detach())
    for i, one, all_, right in zip(argnums, of_entries, of_all, zip(*expected_grads, strict=True), strict=True):
        close(one, torch.stack(right))
        close(all_, sum(right) if in_dims[i] is None else torch.stack(right, dim=in_dims[i]))


@pytest.mark.parametrize("kv_len", [700, 1060])
@pytest.mark.parametrize("of_entry", ["slopes", "future_slopes"])
def test_slopes_of_one_kind_may_be_shared(of_entry: str, kv_len: int) -> None:
    query, key, value = (x.double().requires_grad_() for x in tensors((20, kv_len), heads=(2, 2)))
    shared, apart = torch.tensor([0.1, 0.05]).double(), torch.tensor([[0.1, 0.05], [0.02, 0.2]]).double()
    slopes = [x.requires_grad_() for x in ((apart, shared) if of_entry == "slopes" else (shared, apart))]

    def attend(implementation: str) -> tuple[torch.Tensor, ...]:
        result = alibi_torch.attention(
            *(query, key, value, slopes[0]),
            future_slopes=slopes[1],
            is_causal=False,
            q_offset=kv_len // 2,
            window_size=256,
            implementation=implementation,
        )
        return result, *torch.autograd.grad(result.square().sum(), [query, key, value, *slopes])

    for actual, expected in zip(attend("tiled"), attend("dense"), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def test_maps_twice() -> None:
    query, key, value = (torch.randn(2, 3, h, n, 5) for h, n in ((4, 7), (2, 11), (2, 11)))
    slopes = torch.rand(3, 4)
    with Tiling().applied():
        result = torch.func.vmap(torch.func.vmap(tiled), (0, 0, 0, None))(query, key, value, slopes)
    expected = torch.stack(
        [alibi_torch.attention(*x, slopes, implementation="dense") for x in zip(query, key, value, strict=True)]
    )
    torch.testing.assert_close(result, expected, rtol=0, atol=2e-6)


# --- Memory: strides, aliases, growth ------------------------------------------------------------------------------

STRIDES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "every other token": lambda x: torch.stack([x, x + 9], dim=3).flatten(2, 3)[:, :, ::2],
    "last axis not dense": lambda x: torch.stack([x, x + 9], dim=-1)[..., 0],
    "a slice": lambda x: torch.nn.functional.pad(x, (3, 2, 1, 4, 1, 1))[:, 1:-1, 1:-4, 3:-2],
    "by columns": lambda x: x.mT.contiguous().mT,
}
EXPANDED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "one head": lambda x: x[:, :1].expand(-1, x.shape[1], -1, -1),
    "one entry": lambda x: x[:1].expand(2, -1, -1, -1),
    "one token": lambda x: x[:, :, :1].expand(-1, -1, x.shape[2], -1),
    "one number": lambda x: x[:1, :1, :1, :1].expand(x.shape),
}


@pytest.mark.parametrize("layout", [*STRIDES, *EXPANDED])
@pytest.mark.parametrize("tiling", [MANY_RUNS, Tiling(short=1024)], ids=["tiles", "short"])
def test_strides_change_nothing(layout: str, tiling: Tiling) -> None:
    change = (STRIDES | EXPANDED)[layout]
    changed = [change(x) for x in tensors((32, 40))]
    weight = change(torch.randn(2, 4, 32, 5))
    assert not all(x.is_contiguous() for x in changed)
    slopes = torch.tensor([1.0, 0.3, 0.0625, 0.0])

    def gradients(inputs: list[torch.Tensor], weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        inputs = [x.detach().requires_grad_() for x in (*inputs, slopes)]
        result = tiled(*inputs)
        return result, *torch.autograd.grad(result, inputs, weight)

    with tiling.applied():
        actual = gradients(changed, weight)
        expected = gradients([x.contiguous() for x in changed], weight.contiguous())
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4)


def test_masks_and_slopes_of_any_strides() -> None:
    query, key, value = tensors((7, 11))
    mask = (torch.rand(11, 7, 1, 2) < 0.7).permute(3, 2, 1, 0).expand(2, 4, 7, 11)
    slopes = torch.rand(4, 2).T
    with Tiling().applied():
        result = tiled(query, key, value, slopes, mask=mask)
        assert torch.equal(result, tiled(query, key, value, slopes.contiguous(), mask=mask.contiguous()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("variant", VARIANTS)
def test_nothing_returned_shares_memory(variant: str, dtype: torch.dtype) -> None:
    inputs, arguments = arguments_of(variant, dtype)
    inputs = [x.clone().requires_grad_() for x in inputs]
    if "future_slopes" in arguments:
        arguments["future_slopes"] = arguments["future_slopes"].clone().requires_grad_()
        inputs.append(arguments["future_slopes"])
    for tiling in (Tiling(), Tiling(short=1024)):
        with tiling.applied():
            result = tiled(*inputs[:4], **arguments)
            grads = torch.autograd.grad(result.sum(), inputs)
        assert result.is_contiguous()
        storages = [x.untyped_storage().data_ptr() for x in (result, *grads, *inputs)]
        assert len(set(storages)) == len(storages)
        for one, of in zip(grads, inputs, strict=True):
            assert one.dtype == of.dtype
            assert one.shape == of.shape


def long_attention(length: int, is_causal: bool, masked: bool) -> Callable[[], object]:
    query, key, value = (x.requires_grad_() for x in tensors((length, length), batch=1, head_dim=16))
    slopes = torch.tensor([1.0, 0.5, 0.125, 2.0**-6], requires_grad=True)
    mask = (torch.arange(length) > 9)[None, None, None] if masked else None
    warm = [x[:, :, :1100].detach().requires_grad_() for x in (query, key, value)]
    tiled(*warm, slopes).sum().backward()
    return lambda: tiled(query, key, value, slopes, is_causal=is_causal, mask=mask).sum().backward()


@pytest.mark.parametrize(("is_causal", "masked"), [(True, False), (False, True)])
def test_memory_grows_with_the_length_alone(is_causal: bool, masked: bool) -> None:
    length = 16_384
    peak = _timing.peak_growth("tests.torch.test_tiled:long_attention", length, is_causal, masked)
    scores = 4 * 4 * length**2  # bytes
    assert peak < 150 * 2**20 < scores / 20


# --- Autograd ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wanted", [x for n in (1, 2) for x in itertools.combinations(range(5), n)])
def test_gradients_of_some_inputs_only(wanted: tuple[int, ...]) -> None:
    inputs, arguments = arguments_of("asymmetric")
    inputs = [*inputs, arguments.pop("future_slopes")]

    def gradients(wanted: tuple[int, ...]) -> list[torch.Tensor | None]:
        some = [x.clone().requires_grad_(i in wanted) for i, x in enumerate(inputs)]
        tiled(*some[:4], future_slopes=some[4], **arguments).square().sum().backward()
        return [x.grad for x in some]

    with Tiling().applied():
        found, every = gradients(wanted), gradients(tuple(range(5)))
    for index, (one, other) in enumerate(zip(found, every, strict=True)):
        if index in wanted:  # those by queries, keys and values are computed another way where slopes are wanted too
            torch.testing.assert_close(one, other, rtol=1e-5, atol=4e-6)
        else:
            assert one is None


@pytest.mark.parametrize("lengths", [(7, 11), (1100, 1100)])
def test_two_runs_are_the_same_to_the_bit(lengths: tuple[int, int]) -> None:
    def run() -> tuple[torch.Tensor, ...]:
        inputs = [x.requires_grad_() for x in (*tensors(lengths), torch.tensor([1.0, 0.3, 0.0625, 0.0]))]
        result = tiled(*inputs)
        return result, *torch.autograd.grad(result.square().sum(), inputs)

    for threads in (1, 3):
        with num_threads(threads):
            for one, other in zip(run(), run(), strict=True):
                assert torch.equal(one, other)


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev])
def test_second_derivatives_are_refused_in_torch_func(transform: Callable[..., Any]) -> None:
    query, key, value = tensors((7, 11))

    def loss(query: torch.Tensor) -> torch.Tensor:
        return tiled(query, key, value).square().sum()

    with pytest.raises(NotImplementedError, match="'tiled' has no second derivatives; .*'dense'"):
        transform(lambda x: torch.func.grad(loss)(x).sum())(query)


@pytest.mark.parametrize("by", ["query", "slopes"])
def test_second_derivatives_are_refused(by: str) -> None:
    inputs = dict(zip(("query", "key", "value", "slopes"), arguments_of("causal")[0], strict=True))
    inputs[by] = inputs[by].requires_grad_()
    grad = torch.autograd.grad(tiled(**inputs).square().sum(), inputs[by], create_graph=True)[0]
    with pytest.raises(NotImplementedError, match="'tiled' has no second derivatives; .*'dense'"):
        grad.sum().backward()


@pytest.mark.parametrize("by", ["query", "slopes"])
@pytest.mark.parametrize("way", ["forward_ad", "jvp", "jacfwd"])
def test_forward_mode_is_dense_or_refused(way: str, by: str) -> None:
    query, key, value = tensors((7, 11))
    arguments = {"query": query, "key": key, "value": value, "slopes": torch.tensor([1.0, 0.3, 0.1, 0.0])}
    point = arguments.pop(by)
    tangent = torch.randn(point.shape, generator=torch.Generator().manual_seed(2))

    def derivative(implementation: str | None) -> torch.Tensor:
        def function(x: torch.Tensor) -> torch.Tensor:
            return alibi_torch.attention(**arguments, **{by: x}, implementation=implementation)

        if way == "forward_ad":
            with torch.autograd.forward_ad.dual_level():
                dual = torch.autograd.forward_ad.make_dual(point, tangent)
                return torch.autograd.forward_ad.unpack_dual(function(dual)).tangent
        if way == "jvp":
            return torch.func.jvp(function, (point,), (tangent,))[1]
        return torch.func.jacfwd(lambda t: function(point + t * tangent))(torch.tensor(0.0))

    step = 2.0**-10
    ends = [
        alibi_torch.attention(**arguments, **{by: point + x * tangent}, allow_negative_slopes=True)
        for x in (step, -step)
    ]
    torch.testing.assert_close(derivative(None), (ends[0] - ends[1]) / (2 * step), rtol=0, atol=1e-2)
    for name in ("tiled", "sdpa", "flex"):
        with pytest.raises(NotImplementedError, match=f"'{name}' has no derivatives in forward mode; 'dense' can run"):
            derivative(name)


def test_what_refuses_second_derivatives_is_right_about_who_has_them() -> None:
    query, key, value = tensors((7, 11))
    query.requires_grad_()
    result = alibi_torch.attention(query, key, value, implementation="dense")
    grad = torch.autograd.grad(result.square().sum(), query, create_graph=True)[0]
    assert torch.isfinite(torch.autograd.grad(grad.sum(), query)[0]).all()


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoints(use_reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    inputs = [x.requires_grad_() for x in arguments_of("causal")[0]]
    with Tiling().applied():
        again = checkpoint(tiled, *inputs, use_reentrant=use_reentrant)
        for one, other in zip(
            torch.autograd.grad(tiled(*inputs).sum(), inputs),
            gradients_by_backward(again.sum(), inputs),
            strict=True,
        ):
            assert torch.equal(one, other)


def test_inference_mode_and_no_grad() -> None:
    inputs = [x.requires_grad_() for x in arguments_of("causal")[0]]
    with Tiling().applied():
        expected = tiled(*inputs)
        with torch.inference_mode():
            result = tiled(*inputs)
            own = tiled(*(x.clone() for x in inputs))
        with torch.no_grad():
            plain = tiled(*inputs)
    assert result.is_inference()
    assert not plain.requires_grad
    assert torch.equal(result, expected)
    assert torch.equal(own, expected)
    assert torch.equal(plain, expected)


def test_autocast_leaves_tiles_alone() -> None:
    inputs = [x.requires_grad_() for x in arguments_of("causal")[0]]
    with Tiling().applied():
        expected = tiled(*inputs)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            result = tiled(*inputs)
            grads = torch.autograd.grad(result.sum(), inputs)
        for one, other in zip(grads, torch.autograd.grad(expected.sum(), inputs), strict=True):
            assert torch.equal(one, other)
    assert result.dtype == torch.float32
    assert torch.equal(result, expected)


def test_a_default_device_or_dtype_changes_nothing() -> None:
    inputs = [x.requires_grad_() for x in arguments_of("causal")[0]]
    with Tiling().applied():
        expected = torch.autograd.grad(tiled(*inputs, tolerance=0.0).sum(), inputs)
        with torch.device("meta"):
            on_meta = torch.autograd.grad(tiled(*inputs, tolerance=0.0).sum(), inputs)
        torch.set_default_dtype(torch.float64)
        try:
            in_float64 = torch.autograd.grad(tiled(*inputs, tolerance=0.0).sum(), inputs)
        finally:
            torch.set_default_dtype(torch.float32)
    for right, *others in zip(expected, on_meta, in_float64, strict=True):
        for other in others:
            assert other.device.type == "cpu"
            assert torch.equal(other, right)


def test_gradients_on_meta_have_shapes() -> None:
    inputs = [x.to("meta").requires_grad_() for x in arguments_of("causal")[0]]
    for one, of in zip(torch.autograd.grad(tiled(*inputs).sum(), inputs), inputs, strict=True):
        assert one.shape == of.shape
        assert one.device.type == "meta"


# --- Helpers -------------------------------------------------------------------------------------------------------


def tiled(*tensors: torch.Tensor, **arguments: Any) -> torch.Tensor:
    return alibi_torch.attention(*tensors, implementation="tiled", **arguments)


def tensors(
    lengths: tuple[int, int],
    *,
    batch: int = 2,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 5,
    dtype: torch.dtype = torch.float32,
) -> list[torch.Tensor]:
    """Return query, key and value, ``[batch, heads, length, head_dim]``."""
    generator = torch.Generator().manual_seed(sum(lengths))
    q_len, kv_len = lengths
    shapes = [(batch, h, n, head_dim) for h, n in ((heads[0], q_len), (heads[1], kv_len), (heads[1], kv_len))]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


@contextlib.contextmanager
def num_threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def gradients_by_backward(loss: torch.Tensor, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    loss.backward()
    return [x.grad for x in inputs]


def without_offsets_by_entry(case: Case) -> Case:
    if not isinstance(case.arguments.get("q_offset"), np.ndarray):
        return case
    changed = case.with_arguments(case.form, case.arguments | {"q_offset": 1})
    changed.__dict__["arrays"] = case.arrays
    return changed


def planning(case: Case) -> tuple[AttentionCall, torch.Tensor, torch.Tensor]:
    """Return what jobs are made of."""
    query, key, value = (TORCH.array(case.arrays[name], "float32") for name in ("query", "key", "value"))
    arguments = {name: TILED._place(value) for name, value in case.arguments.items()}
    call = AttentionCall.check(query, key, value, TORCH.array(case.arrays["slopes"], "float32"), **arguments, xp=xp)
    return call, query, key


def pairs_by_head(planned: list[Job]) -> list[int]:
    """Return how many scores are computed of each head, and entry."""
    heads = max(job.heads.stop for job in planned)
    return [
        sum(job.tiles * job.rows * job.kv_len for job in planned if job.heads.start <= head < job.heads.stop)
        for head in range(heads)
    ]


def test_gradients_of_who_cannot_see_a_large_key_keep_their_digits() -> None:
    # The mean of all keys is that of the last one. Without it, scores of the others would be hundreds, and lose digits.
    query, key, value, weight = torch.randn(4, 1, 2, 7, 32, generator=torch.Generator().manual_seed(0)).unbind()
    key[:, :, -1] *= 100

    def gradients(implementation: str, dtype: torch.dtype) -> list[torch.Tensor]:
        tensors = [x.to(dtype).requires_grad_() for x in (query, key, value)]
        result = alibi_torch.attention(*tensors, implementation=implementation)
        return [x[:, :, :-1] for x in torch.autograd.grad((result * weight)[:, :, :-1].sum(), tensors)]

    exact = gradients("dense", torch.float64)
    for found, other in zip(gradients("tiled", torch.float32), exact, strict=True):
        # Scores up to 10 or so are rounded by a dozen units of 2**-24 of that, and weights by as much of themselves.
        assert (found - other).norm() <= 16 * 10 * 2**-24 * other.norm()
