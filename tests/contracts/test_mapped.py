"""Attention under ``vmap``: with any arguments mapped along any axes, results and gradients equal those of a loop."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import itertools
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from alibi_core.conformance.testing import UNIT_ROUNDOFF, Answer, Case, Sizes, summed_over_batch
from alibi_core.conformance.testing import assert_within_budget as assert_within
from tests.support.frameworks import MLX, TORCH, Backend, param
from tests.support.tiles import Tiling

BACKENDS = [
    param(Backend(f, f"alibi_{f.name}", name), f"{f.name}-{name}", f, *marks)
    for f in (TORCH, MLX)
    for name, marks in (("tiled", []), ("dense", [pytest.mark.slow]))
]
EACH = pytest.mark.parametrize("backend", BACKENDS)
SDPA = param(Backend(TORCH, "alibi_torch", "sdpa"), "torch-sdpa", TORCH)
MAPPED, KV_HEADS, HEADS, HEAD_DIM = 3, 2, 4, 5  # sizes of axes
DIFFERENTIABLE = ("query", "key", "value", "slopes", "future_slopes")


def grad(backend: Backend, function: Any, argnums: list[int]) -> Any:
    """Return a function that returns a tuple of gradients."""
    if backend.framework is TORCH:
        return importlib.import_module("torch").func.grad(function, tuple(argnums))
    gradient = backend.framework.xp.grad(function, argnums=argnums)
    return gradient if len(argnums) > 1 else lambda *x: (gradient(*x),)  # MLX returns the only gradient by itself


def exact(
    arrays: dict[str, np.ndarray], rules: dict[str, Any], cotangent: np.ndarray
) -> tuple[Answer, dict[str, Answer]]:
    """Return attention of NumPy arrays, by argument, and its gradients in the shapes of the arrays."""
    (batch, heads, q_len, _), kv_len = arrays["query"].shape, arrays["key"].shape[2]
    slopes = {name: np.broadcast_to(arrays[name], (batch, heads)) for name in DIFFERENTIABLE[3:] if name in arrays}
    arguments = rules | {name: arrays[name] for name in ("q_offset", "mask") if name in arrays}
    if "q_segment_ids" in arrays:
        arguments["segment_ids"] = arrays["q_segment_ids"], arrays["kv_segment_ids"]
    if "future_slopes" in slopes:
        arguments["future_slopes"] = slopes["future_slopes"]
    tensors = {name: arrays[name].astype(np.float64) for name in ("query", "key", "value")}
    case = Case(Sizes(batch, KV_HEADS, HEADS // KV_HEADS, (q_len, kv_len), HEAD_DIM), slopes_per_batch=True)
    case = case.with_arguments("", arguments)
    case = case.with_arrays(**tensors, slopes=slopes["slopes"].astype(np.float64), cotangent=cotangent)
    share = UNIT_ROUNDOFF["float32"]
    answers = case.gradients("float32", share)
    for name in slopes:  # slopes may be shared by batch entries
        if arrays[name].shape != answers[name].value.shape:
            answers[name] = summed_over_batch(answers[name])
    return case.exact("float32", share).output, answers


@dataclass(frozen=True)
class Mapping:
    """The shape of each array, without the mapped axis; the mapped axes; other arguments."""

    shapes: dict[str, tuple[int, ...]]
    axes: dict[str, int]
    rules: dict[str, Any] = dataclasses.field(default_factory=dict)
    seed: int = 0

    @functools.cached_property
    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays; mapped axes are first."""
        rng = np.random.default_rng(self.seed)
        kv_len, q_len = (self.shapes[name][-2] for name in ("key", "query"))
        arrays: dict[str, Any] = {}
        for name, shape in self.shapes.items():
            whole = (MAPPED, *shape) if name in self.axes else shape
            if name == "mask":
                arrays[name] = rng.random(whole) < 0.7
            elif name == "q_offset":
                arrays[name] = kv_len - q_len + rng.integers(-3, 20, whole, np.int32)
            elif "segment_ids" in name:
                arrays[name] = np.sort(rng.integers(0, 3, whole, np.int32), axis=-1)
            elif "slopes" in name:
                arrays[name] = rng.choice(np.asarray([0.0, 0.02, 0.3, 1.5], np.float32), whole)
            elif name == "max_key_norm":
                arrays[name] = np.full(whole, 5 * np.abs(arrays["key"]).max(), np.float32)
            else:
                arrays[name] = rng.standard_normal(whole).astype(np.float32)
        return {name: np.asarray(x) for name, x in arrays.items()}

    def entry(self, index: int) -> dict[str, np.ndarray]:
        return {name: x[index] if name in self.axes else x for name, x in self.arrays.items()}

    def over_all(self, name: str, answers: list[Answer]) -> Answer:
        """Return the gradient by an argument, with its mapped axis in place, from the gradients by its entries."""
        stacked = Answer(*(np.stack([getattr(x, part) for x in answers]) for part in ("value", "budget")))
        if name not in self.axes:
            return summed_over_batch(stacked)
        return Answer(*(np.moveaxis(x, 0, self.axes[name]) for x in (stacked.value, stacked.budget)))


@st.composite
def mappings(draw: st.DrawFn) -> Mapping:
    batch, is_causal = draw(st.sampled_from([1, 1, 2])), draw(st.booleans())
    # Up to and beyond 1,024 keys, from which on there is a plan; few queries and many.
    lengths = [(1, 1), (1, 7), (5, 7), (7, 7), (11, 5), (20, 33), (1, 1040), (17, 1040), (40, 1024)]
    q_len, kv_len = draw(st.sampled_from(lengths))
    by_head = st.sampled_from([(HEADS,), (batch, HEADS)])
    tensor = (batch, KV_HEADS, kv_len, HEAD_DIM)
    shapes = {"query": (batch, HEADS, q_len, HEAD_DIM), "key": tensor, "value": tensor, "slopes": draw(by_head)}
    if not is_causal and draw(st.booleans()):
        shapes["future_slopes"] = draw(by_head)
    if draw(st.booleans()):
        shapes["q_offset"] = draw(st.sampled_from([(), (batch,)]))
    if draw(st.booleans()):
        for name, length in (("q_segment_ids", q_len), ("kv_segment_ids", kv_len)):
            shapes[name] = draw(st.sampled_from([(length,), (1, length), (batch, length)]))
    if draw(st.booleans()):
        whole = [draw(st.sampled_from([1, n])) for n in (batch, HEADS, q_len)]
        shapes["mask"] = (*whole[draw(st.integers(0, 3)) :], kv_len)
    if draw(st.booleans()):
        shapes["max_key_norm"] = (batch, KV_HEADS)
    always = draw(st.sampled_from(sorted({*shapes} - {"max_key_norm"})))
    mapped = [name for name in shapes if name == always or draw(st.booleans())]
    axes = {name: draw(st.integers(0, len(shapes[name]))) for name in mapped}
    rules: dict[str, Any] = {"is_causal": is_causal, "window_size": draw(st.sampled_from([None, None, 0, 6]))}
    return Mapping(shapes, axes, rules, seed=draw(st.integers(0, 2**16)))


def shapes_of(q_len: int, kv_len: int, **others: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    keys = (1, KV_HEADS, kv_len, HEAD_DIM)
    return {"query": (1, HEADS, q_len, HEAD_DIM), "key": keys, "value": keys, "slopes": (HEADS,), **others}


WHOLE = Tiling(short=1024)
TILINGS = (Tiling(), WHOLE, Tiling(rows=(2, 16), step_queries=3, blocks=512))
BOTH_WAYS, WINDOW = {"is_causal": False}, {"is_causal": False, "window_size": 6}


@EACH
@given(mapping=mappings(), tiling=st.sampled_from(TILINGS), wanted=st.sets(st.sampled_from(DIFFERENTIABLE), min_size=1))
# Slopes of a single batch entry are shared by all entries that mapping makes of it.
@example(Mapping(shapes_of(5, 7, slopes=(1, HEADS)), {"query": 0}), WHOLE, {"slopes"})
@example(Mapping(shapes_of(5, 7, future_slopes=(1, HEADS)), {"key": 3, "slopes": 1}, BOTH_WAYS), WHOLE, DIFFERENTIABLE)
# Only slopes of later keys are mapped.
@example(Mapping(shapes_of(20, 33, future_slopes=(HEADS,)), {"future_slopes": 1}, WINDOW), TILINGS[2], DIFFERENTIABLE)
# Query and key are concrete, so there is a plan with runs of tiles; the values in them are mapped.
@example(Mapping(shapes_of(20, 33), {"value": 1}), TILINGS[0], {"query"})
# Masks get the axes that they lack, and two rules hide keys.
@example(Mapping(shapes_of(5, 7, mask=(5, 7)), {"mask": 1}, BOTH_WAYS), WHOLE, {"key"})
@example(Mapping(shapes_of(5, 7, mask=(7,)), {"mask": 1}), WHOLE, {"query", "value"})
@example(Mapping(shapes_of(5, 7, q_offset=(), mask=(1, 1, 5, 7)), {"q_offset": 0}), WHOLE, {"value"})
@example(Mapping(shapes_of(5, 7, q_segment_ids=(5,), kv_segment_ids=(1, 7)), {"kv_segment_ids": 2}), WHOLE, {"key"})
def test_mapped_arguments_give_the_results_of_a_loop(
    backend: Backend, mapping: Mapping, tiling: Tiling, wanted: Collection[str]
) -> None:
    array, numpy = backend.framework.array, backend.framework.numpy
    names = [name for name in mapping.shapes if name != "max_key_norm" or backend.framework is TORCH]
    in_axes = tuple(mapping.axes.get(name) for name in names)
    arrays = {n: np.moveaxis(x, 0, mapping.axes[n]) if n in mapping.axes else x for n, x in mapping.arrays.items()}
    placed = [array(arrays[name]) for name in names]
    argnums = [i for i, name in enumerate(names) if name in wanted] or [0]
    cotangent = np.random.default_rng(1).standard_normal((MAPPED, *mapping.shapes["query"])).astype(np.float32)
    outputs, by_entry = zip(
        *(exact(mapping.entry(i), mapping.rules, cotangent[i].astype(np.float64)) for i in range(MAPPED)), strict=True
    )

    def function(*operands: Any) -> Any:
        arguments = dict(zip(names, operands, strict=True)) | mapping.rules
        if "q_segment_ids" in arguments:
            arguments["segment_ids"] = (arguments.pop("q_segment_ids"), arguments.pop("kv_segment_ids"))
        return backend.function(**arguments)()

    def loss(weight: Any, *operands: Any) -> Any:
        return (function(*operands) * weight).sum()

    mapped = backend.framework.mapped(function, in_axes)
    with tiling.applied() if mapping.shapes["key"][-2] < 1000 else contextlib.nullcontext():
        for output, answer in zip(mapped(*placed), outputs, strict=True):
            assert_within(numpy(output), answer)
        total = grad(backend, lambda *x: (mapped(*x) * array(cotangent)).sum(), argnums)(*placed)
        gradient = grad(backend, loss, [i + 1 for i in argnums])
        each = backend.framework.mapped(gradient, (0, *in_axes))(array(cotangent), *placed)
    for index, of_all, of_each in zip(argnums, total, each, strict=True):
        answers = [one[names[index]] for one in by_entry]
        assert_within(numpy(of_all), mapping.over_all(names[index], answers))
        for gradient, answer in zip(of_each, answers, strict=True):
            assert_within(numpy(gradient), answer)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # PyTorch warns of nested maps over its kernel
@pytest.mark.parametrize("backend", [*BACKENDS, SDPA])
def test_mapping_may_be_nested(backend: Backend) -> None:
    array, rng = backend.framework.array, np.random.default_rng(0)
    arrays = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes_of(5, 7).items()}
    query, slopes = (rng.random((3, 2, *arrays[name].shape)).astype(np.float32) for name in ("query", "slopes"))
    mask = rng.random((5, 3, 7)) < 0.7

    def function(query: Any, slopes: Any, mask: Any) -> Any:
        return backend.function(mask=mask)(query, array(arrays["key"]), array(arrays["value"]), slopes)

    inner = backend.framework.mapped(function, (0, 0, None))
    actual = backend.framework.mapped(inner, (0, 0, 1))(array(query), array(slopes), array(mask))
    for i, j in itertools.product(range(3), range(2)):
        entry = arrays | {"query": query[i, j], "slopes": slopes[i, j], "mask": mask[:, i]}
        assert_within(backend.framework.numpy(actual[i, j]), exact(entry, {}, query[i, j])[0])
