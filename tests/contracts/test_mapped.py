"""Attention under ``vmap``: with any arguments mapped along any axes, results and gradients equal those of a loop."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import itertools
from collections.abc import Collection
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from alibi_core.conformance.testing import Answer, assert_within_budget, summed_over_batch
from tests.support.frameworks import MLX, TORCH, Backend, param
from tests.support.problems import AS_SLOPES, Problem, exact
from tests.support.tiles import Tiling
from tests.test_same_answer_everywhere import is_plain, problems

BACKENDS = [
    param(Backend(f, f"alibi_{f.name}", name), f"{f.name}-{name}", f, *marks)
    for f in (TORCH, MLX)
    for name, marks in (("tiled", []), ("dense", [pytest.mark.slow]))
]
SDPA = param(Backend(TORCH, "alibi_torch", "sdpa"), "torch-sdpa", TORCH)
MAPPED = 3  # the size of mapped axes


def grad(backend: Backend, function: Any, argnums: list[int]) -> Any:
    """Return a function that returns a tuple of gradients."""
    if backend.framework is TORCH:
        return importlib.import_module("torch").func.grad(function, tuple(argnums))
    gradient = backend.framework.xp.grad(function, argnums=argnums)
    return gradient if len(argnums) > 1 else lambda *x: (gradient(*x),)  # MLX returns the only gradient by itself


def flat(problem: Problem) -> dict[str, np.ndarray]:
    """Return the arrays of a call by name, each of a pair by itself, integers as int32."""
    found = {}
    for name, x in (problem.arrays | problem.arguments).items():
        pair = x if isinstance(x, tuple) else (x,) if isinstance(x, np.ndarray) else ()
        found |= {f"{name} {i}" if len(pair) > 1 else name: array for i, array in enumerate(pair)}
    return {name: np.int32(x) if x.dtype.kind in "iu" else x for name, x in found.items() if name != "cotangent"}


def called(backend: Backend, problem: Problem, names: Collection[str], operands: Any) -> Any:
    """Return attention of arrays that have these names, as :func:`flat` gives them."""
    arguments: dict[str, Any] = {
        name: x for name, x in problem.arguments.items() if not isinstance(x, np.ndarray | tuple)
    }
    for name, operand in zip(names, operands, strict=True):
        name, _, index = name.partition(" ")
        arguments[name] = (*arguments.get(name, ()), operand) if index else operand
    return backend.function()(**{"slopes": None} | arguments)


def shared(problem: Problem, first: Problem, mapped: Collection[str]) -> Problem:
    """Return a problem whose arrays are those of the first, but for the mapped ones."""
    for kind in ("arrays", "arguments"):
        own = {name: x for name, x in getattr(problem, kind).items() if name in (*mapped, "cotangent")}
        vars(problem)[kind] = getattr(first, kind) | own
    return problem


@st.composite
def mappings(draw: st.DrawFn) -> tuple[Problem, list[str]]:
    batch = draw(st.sampled_from([(1,), (1,), (2,)]))
    changes: dict[str, Any] = {"batch": batch, "dtype": "float32", "loss": "random"}
    changes |= dict.fromkeys(("knows_norms", "adds_bias", "returns_weights"), False)
    problem = draw(problems())
    problem = dataclasses.replace(problem, **changes, mask=problem.mask and problem.mask.partition(":")[0])
    assume(is_plain(problem) and 0 not in problem.scores)
    wrt = problem.wrt or ("query",)
    names = sorted({name.partition(" ")[0] for name in flat(problem)})
    mapped = draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
    return dataclasses.replace(problem, wrt=wrt), mapped


WHOLE, ALL = Tiling(short=1024), ("query", "key", "value", "slopes", "future_slopes")
PLAIN = Problem((5, 7), (1,), (2, 2), tiling=WHOLE, wrt=("slopes",))
BOTH = dataclasses.replace(PLAIN, is_causal=False, future="per entry", wrt=ALL)
LONG = Problem((20, 33), (1,), (2, 2), wrt=("query",), tiling=Tiling())
FOUND = (
    # Slopes of a single batch entry are shared by all entries that mapping makes of it.
    (dataclasses.replace(PLAIN, slopes="per entry"), ["query"]),
    (BOTH, ["key", "slopes"]),
    # Only slopes of later keys are mapped.
    (dataclasses.replace(BOTH, lengths=(20, 33), window_size=6, tiling=Tiling((2, 16), 3, 512)), ["future_slopes"]),
    # Query and key are concrete, so there is a plan with runs of tiles; the values in them are mapped.
    (LONG, ["value"]),
    # Masks get the axes that they lack, and two rules hide keys.
    (dataclasses.replace(PLAIN, is_causal=False, mask="qk", wrt=("key",)), ["mask"]),
    (dataclasses.replace(PLAIN, mask="k", wrt=("query", "value")), ["mask"]),
    (dataclasses.replace(PLAIN, q_offset="array", mask="11qk", wrt=("value",)), ["q_offset"]),
    (dataclasses.replace(PLAIN, segments="pair of one row", wrt=("key",)), ["segment_ids"]),
)


def found(test: Any) -> Any:
    return functools.reduce(lambda test, mapping: example(mapping=mapping)(test), FOUND, test)


@pytest.mark.parametrize("backend", BACKENDS)
@found
@given(mapping=mappings())
def test_mapped_arguments_give_the_results_of_a_loop(backend: Backend, mapping: tuple[Problem, list[str]]) -> None:
    problem, mapped = mapping
    siblings = [dataclasses.replace(problem, seed=problem.seed + i) for i in range(MAPPED)]
    siblings = [shared(x, siblings[0], mapped) for x in siblings]
    answers, rng, array = [exact(x) for x in siblings], np.random.default_rng(problem.seed), backend.framework.array
    arrays, axes = flat(siblings[0]), {}
    for name, x in arrays.items():
        if name.partition(" ")[0] in mapped:
            axes[name] = int(rng.integers(x.ndim + 1))
            arrays[name] = np.stack([flat(sibling)[name] for sibling in siblings], axis=axes[name])
    names, in_axes = [*arrays], tuple(axes.get(name) for name in arrays)
    placed = [array(x, "float32" if name in (*ALL, *AS_SLOPES) else None) for name, x in arrays.items()]
    argnums = [names.index(name) for name in problem.wrt]
    weights = array(np.stack([x.arrays["cotangent"] for x in siblings]), "float32")

    def function(*operands: Any) -> Any:
        return called(backend, problem, names, operands)

    def assert_near(actual: Any, name: str, index: int) -> None:
        assert_within_budget(backend.framework.numpy(actual), answers[index][name])

    whole = backend.framework.mapped(function, in_axes)
    with problem.tiling.applied() if problem.tiling else contextlib.nullcontext():
        for index, result in enumerate(whole(*placed)):
            assert_near(result, "result", index)
        total = grad(backend, lambda *x: (whole(*x) * weights).sum(), argnums)(*placed)
        gradient = grad(backend, lambda weight, *x: (function(*x) * weight).sum(), [n + 1 for n in argnums])
        each = backend.framework.mapped(gradient, (0, *in_axes))(weights, *placed)
    for name, of_all, of_each in zip(problem.wrt, total, each, strict=True):
        of_all = backend.framework.numpy(of_all)
        if name in axes:
            for index, x in enumerate(np.moveaxis(of_all, axes[name], 0)):
                assert_within_budget(x, answers[index][name])
        else:
            parts = (np.stack([getattr(x[name], part) for x in answers]) for part in ("value", "budget"))
            assert_within_budget(of_all, summed_over_batch(Answer(*parts)))
        for index, x in enumerate(of_each):
            assert_near(x, name, index)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # PyTorch warns of nested maps over its kernel
@pytest.mark.parametrize("backend", [*BACKENDS, SDPA])
def test_mapping_may_be_nested(backend: Backend) -> None:
    first, array = Problem((5, 7), (), (2, 2), mask="qk"), backend.framework.array
    grid = [[dataclasses.replace(first, seed=1 + 2 * i + j) for j in range(2)] for i in range(3)]
    query, slopes = ([[x.arrays[name] for x in row] for row in grid] for name in ("query", "slopes"))
    masks = np.stack([row[0].arguments["mask"] for row in grid], axis=1)
    key, value = (array(first.arrays[name], "float32") for name in ("key", "value"))

    def function(query: Any, slopes: Any, mask: Any) -> Any:
        return backend.function(mask=mask)(query, key, value, slopes)

    inner = backend.framework.mapped(function, (0, 0, None))
    given = array(np.asarray(query), "float32"), array(np.asarray(slopes), "float32"), array(masks)
    actual = backend.framework.mapped(inner, (0, 0, 1))(*given)
    for i, j in itertools.product(range(3), range(2)):
        entry = shared(grid[i][j], first, ["query", "slopes"])
        entry.arguments["mask"] = masks[:, i]
        assert_within_budget(backend.framework.numpy(actual[i, j]), exact(entry)["result"])
