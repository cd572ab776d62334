"""One drawn problem, the same answer everywhere: the property that all backends and implementations share.

A problem is drawn over all arguments of attention. Each implementation that takes it computes result and gradients,
eager or compiled, and must be within the rounding budget of the exact answer, which is computed here in float64, from
the definition. An implementation that cannot take it must say so in words. The bias must have the same bits everywhere.

A failure prints the problem: keep it in ``FOUND`` or ``OF_SOME``. To draw more problems, of a library and a seed:

    EXAMPLES=1000 python -m pytest tests/test_same_answer_everywhere.py -k mlx --hypothesis-seed=7
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

import alibi_core
from alibi_core.conformance.testing import COTANGENTS, DATA, assert_within_budget
from tests.support.frameworks import FRAMEWORKS, JAX, MLX, NUMPY, STRICT, TORCH, Backend, Framework, param
from tests.support.problems import (
    AS_SLOPES,
    GATES,
    ON_LINE,
    POINTS,
    SEGMENTS,
    SINKS,
    TENSORS,
    Problem,
    canonical_slopes,
    exact,
    pair,
)
from tests.support.tiles import TILINGS, Tiling

LIBRARIES = {x.name: x for x in (NUMPY, TORCH, JAX, MLX)}

# --- What is drawn ----------------------------------------------------------------------------------------------------

MASKS = ("k", "qk", "hqk", "b11k", "b1qk", "bhqk", "11qk", "bh1k", "p1qk", "bk", "bqk", "b11k:pad", "11k:pad")
INTEGER_MASKS = ("bk:int", "b11k:int", "b1qk:int", "11qk:int", "bhqk:int")
# Few shapes, and unequal sizes of axes: none may be taken for another, and no mask or position be read in two ways.
LENGTHS = ((7, 7), (31, 31), (5, 11), (64, 64), (11, 5), (17, 31), (1, 13), (3, 40), (1, 1), (0, 5), (4, 0))
LONG = ((64, 65), (17, 300), (150, 150), (257, 257), (1, 1025), (17, 1100), (16, 2100), (70, 2100))
BATCHES: tuple[tuple[int, ...], ...] = ((2,), (), (3,), (2, 3), (0,))
HEADS = ((3, 1), (1, 1), (2, 2), (1, 3), (6, 1))
FAR = (10**6, 2**30 + 77, -(10**6), 2**31 - 10_000, "far per entry")  # offsets
COMPILED = {"jax": 90, "mlx": 5, "torch": 1}  # so many problems in a hundred: MLX and PyTorch compile for seconds


@st.composite
def problems(draw: st.DrawFn, lengths: tuple[tuple[int, int], ...] = LENGTHS) -> Problem:
    def one_of(values: Any) -> Any:
        return draw(st.sampled_from(values))

    share = one_of((1, 1, 2, 4))  # most problems have few options: what is rare must also come alone

    def maybe(values: Any, tenths: int = share) -> Any:
        return one_of(values) if draw(st.integers(0, 9)) >= 10 - tenths else None

    has_few_scores = maybe([False], 1) is None
    found: dict[str, Any] = {
        "lengths": one_of(lengths if has_few_scores else LONG),
        "batch": one_of(BATCHES) if has_few_scores else (2,),
        "heads": one_of(HEADS) if has_few_scores else (1, 2),
        "head_dim": one_of((5, 1, 8, 32, 64)),
        "dtype": one_of(("float32", "float32", "bfloat16", "float16", "float64")),
        "data": maybe(sorted(DATA)) or "normal",
        "slopes": maybe(["one negative"], 1) or one_of(("shared", "per entry", "default")),
        "scale": maybe((0.25, 1.0, 2.0**-5, 0.0, -2.0)),
        "tolerance": maybe((0.0, 1e-4, 0.01, 0.3)),
        "law": maybe(("log", "sqrt")) or "linear",
        "mask": maybe(MASKS + INTEGER_MASKS),
        "knows_norms": bool(maybe([True], 1)),
        "adds_bias": bool(maybe([True], 1)),
        "returns_weights": bool(maybe([True], 1)),
        "loss": one_of(COTANGENTS),
        "closes_over": draw(st.booleans()),
        "tiling": draw(TILINGS) if has_few_scores and maybe([True], 5) else None,
        "luck": 100 - draw(st.integers(0, 100)),
        "seed": draw(st.integers(0, 2**16)),
    }
    points = maybe(sorted(POINTS))
    found |= {"points": points, "is_causal": (points is None or points in ON_LINE) and draw(st.booleans())}
    if points is not None:
        found["distance"] = one_of(("manhattan", "euclidean", "chebyshev"))
    else:
        offsets = (-3, 0, 4, 13, "array", "per entry")
        found |= {"q_offset": maybe(offsets + FAR), "window_size": maybe((0, 1, 4, 2**31, 2**70))}
    is_gated = found["is_causal"] and points is None and found["law"] == "linear"
    found["gates"] = maybe(sorted(GATES)) if is_gated else None
    if found["gates"] and draw(st.booleans()):
        found["slopes"] = "default"  # no ALiBi
    # Beside a sink, biases count from the query: where that is far from all keys, their differences lose digits.
    is_far = found.get("q_offset") in FAR if points is None else "far" in points
    found["sinks"] = None if is_far else maybe(sorted(SINKS))
    has_order = not found["is_causal"] and (points is None or points in ON_LINE)
    found["future"] = maybe(("shared", "per entry", "zero")) if has_order else None
    is_square = found["lengths"][0] == found["lengths"][1]
    found["segments"] = maybe([x for x in SEGMENTS if is_square or not x.startswith("one")])
    names = [*TENSORS, *["slopes"] * (found["slopes"] != "default"), *["future_slopes"] * (found["future"] is not None)]
    names += ["log_gates"] * (found["gates"] is not None) + ["sinks"] * (found["sinks"] is not None)
    found["wrt"] = tuple(x for x in names if draw(st.booleans())) if one_of((True, True, False)) else ()
    assume(is_square or not (points or "").startswith("one"))
    problem = Problem(**found)
    assume(is_plain(problem))
    return problem


def is_plain(problem: Problem) -> bool:
    """Whether mask and positions can be read in one way only; other ones are refused, see test_bad_input.py."""

    def fits(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
        pairs = zip(reversed(shape), reversed(target), strict=False)
        return len(shape) <= len(target) and all(n in (1, m) for n, m in pairs)

    (q_len, kv_len), batch, count = problem.lengths, problem.batch, len(problem.batch)
    if isinstance(mask := problem.arguments.get("mask"), np.ndarray):
        if (missing := len(problem.scores) - mask.ndim) < 0:
            return False
        is_tokenizers = mask.dtype != bool and mask.ndim == count + 1
        if is_tokenizers and not problem.mask.startswith("bk"):  # type: ignore[union-attr]
            return False
        first = (*mask.shape[:count], *(1,) * missing, *mask.shape[count:])
        has_batch = not is_tokenizers and count and missing in (1, 2) and mask.shape[:count] == batch
        if has_batch and fits(mask.shape, problem.scores) and fits(first, problem.scores):
            return False
    for x, n in zip(pair(problem.arguments.get("positions")), (q_len, kv_len), strict=True):
        if x is not None:
            on_line = x.shape[-1:] == (n,) and fits(x.shape[:-1], batch)
            in_space = x.shape[-2:-1] == (n,) and fits(x.shape[:-2], batch)
            if (on_line and in_space) or on_line != (problem.points in ON_LINE):
                return False
    return True


# --- The answer of a backend ------------------------------------------------------------------------------------------


def backends(library: str) -> list[Backend]:
    """Return what computes attention with arrays of a library: the backend's implementations, and the core."""
    named = {"torch": ("tiled", "sdpa", "dense"), "mlx": ("tiled", "dense"), "jax": ("tiled", "dense")}
    core = {"numpy": (NUMPY, STRICT), "torch": (TORCH,), "mlx": (MLX,)}
    return [
        *(Backend(LIBRARIES[library], f"alibi_{library}", name) for name in named.get(library, ())),
        *(Backend(framework, "alibi_core", None) for framework in core.get(library, ())),
    ]


def is_refused(backend: Backend, p: Problem) -> bool:
    """Whether a problem is more than an implementation offers."""
    if backend.module == "alibi_core" or backend.implementation == "dense":
        return False
    return (
        p.adds_bias
        or p.returns_weights
        or (p.gates and backend.implementation == "sdpa")
        or (backend.framework is MLX and p.dtype == "float64")
    )


def computed(backend: Backend, siblings: list[Problem], is_compiled: bool) -> list[dict[str, Any]]:
    """Return result, weights and gradients of problems that differ in their values alone, all by one program."""
    framework, p = backend.framework, siblings[0]
    differentiated = DIFFERENTIATED.get(framework.name)
    wrt = p.wrt if differentiated else ()

    def laid(name: str, x: Any) -> Any:
        """Swap an array's axes between heads-first and the backend's layout."""
        if name == "log_gates":
            return np.swapaxes(x, -2, -1) if backend.is_length_first else x
        return x if "slopes" in name or name == "sinks" else backend.layout(x)

    def arrays_of(p: Problem) -> dict[str, Any]:
        of_slopes = "float64" if p.dtype == "float64" else "float32"
        found = {n: framework.array(laid(n, x), of_slopes) for n, x in p.arrays.items() if n in AS_SLOPES}
        tensors = {n: laid(n, x) for n, x in p.arrays.items() if n not in AS_SLOPES}
        found |= {n: framework.array(x, p.dtype) for n, x in tensors.items()}
        given = {n: framework.placed(x) for n, x in p.arguments.items() if isinstance(x, np.ndarray | tuple)}
        return found | {n: x for n, x in given.items() if n in taken}

    taken = inspect.signature(backend.function().func).parameters
    static = {n: x for n, x in p.arguments.items() if not isinstance(x, np.ndarray | tuple) and n in taken}
    attention, constants = backend.function(**static), arrays_of(p)

    def loss(asked: dict[str, Any], others: dict[str, Any]) -> tuple[Any, Any]:
        arrays = {"slopes": None} | (constants if p.closes_over else others) | asked
        weight = arrays.pop("cotangent")
        result = attention(**arrays)
        of_result = result[0] if p.returns_weights else result
        return lost(p, of_result, weight, backend.is_length_first) if wrt else 0.0, result

    answers, program = [], differentiated(loss, is_compiled) if wrt else compiled(framework, loss, is_compiled)
    for sibling in siblings:
        others = arrays_of(sibling)
        gradients, result = program({name: others.pop(name) for name in wrt}, others)
        result, weights = result if p.returns_weights else (result, None)
        assert str(result.dtype).endswith(p.dtype), result.dtype
        found = {"result": backend.layout(framework.numpy(result))}
        found |= {"weights": framework.numpy(weights)} if p.returns_weights else {}
        gradients = {name: framework.numpy(x) for name, x in gradients.items()}
        answers.append(found | {n: laid(n, x) for n, x in gradients.items()})
    return answers


def compiled(framework: Framework, loss: Any, is_compiled: bool) -> Any:
    """Return a program of the result alone."""

    def function(_: Any, others: Any) -> Any:
        return loss({}, others)[1]

    program = framework.compiled(function) if is_compiled else function
    return lambda asked, others: ({}, program(asked, others))


def lost(p: Problem, result: Any, weight: Any, is_length_first: bool) -> Any:
    """Return a loss whose gradient by the result is the cotangent, as users write it: compilers see constants there."""
    if p.loss in ("ones", "zeros") or not math.prod(result.shape):
        return result.sum() if p.loss == "ones" else (result * 0.0).sum()
    middle = [n // 2 for n in p.arrays["cotangent"].shape]
    *batch, head, row, feature = middle
    if p.loss == "one row":
        at_row = (..., row, slice(None), slice(None)) if is_length_first else (..., row, slice(None))
        return (result[at_row] * weight[at_row]).sum()
    if p.loss == "one element":
        element = (*batch, row, head, feature) if is_length_first else (*batch, head, row, feature)
        return result[element] * weight[element]
    return (result * weight).sum()


def by_torch(loss: Any, is_compiled: bool) -> Any:
    import torch

    function = TORCH.compiled(loss) if is_compiled else loss

    def program(asked: Any, others: Any) -> Any:
        value, result = function({name: x.requires_grad_() for name, x in asked.items()}, others)
        return dict(zip(asked, torch.autograd.grad(value, list(asked.values())), strict=True)), result

    return program


def by_jax(loss: Any, is_compiled: bool) -> Any:
    import jax

    function = jax.grad(loss, has_aux=True)
    return jax.jit(function) if is_compiled else function


def by_mlx(loss: Any, is_compiled: bool) -> Any:
    import mlx.core as mx

    function = mx.value_and_grad(loss)
    program = mx.compile(function) if is_compiled else function

    def evaluated(asked: Any, others: Any) -> Any:
        mx.eval(asked, others)  # mx.compile closes over no array that is yet to be computed
        (_, result), gradients = program(asked, others)
        return gradients, result

    return evaluated


DIFFERENTIATED = {"torch": by_torch, "jax": by_jax, "mlx": by_mlx}


# --- The properties ---------------------------------------------------------------------------------------------------

SIBLINGS = 8  # values for each compiled program
FOUND = (
    # A sum's gradients alone: with one number repeated as cotangent, XLA's compiler makes other programs.
    Problem(lengths=(128, 128), heads=(2, 1), head_dim=32, wrt=("query",), loss="ones", luck=2, seed=3),
    Problem(lengths=(128, 128), heads=(2, 1), head_dim=32, wrt=("key",), loss="ones", is_causal=False, luck=3, seed=3),
    # An implementation that cannot return weights refuses where there are none to return, too.
    Problem(lengths=(0, 5), returns_weights=True),
    # Axes of the batch: one that all entries of another share, a mask that begins with them, and none.
    Problem((5, 11), (2, 3), slopes="per entry", q_offset="per entry", segments="pair of one axis", mask="p1qk"),
    Problem((5, 11), (2,), mask="bk", adds_bias=True),
    Problem((5, 11), ()),
    # Queries beyond the window of all keys.
    Problem(q_offset=13, window_size=1, is_causal=False, wrt=("value",)),
    Problem((4, 0), points="times"),
    Problem((4, 0), (2, 0), wrt=("query", "key", "value", "slopes")),
    # One element of the result, compiled.
    Problem((17, 31), future="shared", is_causal=False, wrt=("query", "future_slopes"), loss="one element", luck=0),
    # Gates: rows whose near keys are hidden, queries beyond the keys, and closed gates beside a mask of keys.
    Problem((31, 31), gates="strong", mask="bhqk", wrt=("key", "log_gates"), tiling=Tiling((4, 4))),
    Problem((11, 5), gates="mild", slopes="default", q_offset="per entry", wrt=("log_gates",)),
    Problem((17, 300), (2,), (1, 2), gates="closed sometimes", mask="bk", window_size=40, wrt=("query", "log_gates")),
    # Several blocks of keys, the last of which begins with keys of the one before, and rows that some of them are past.
    Problem((300, 500), (2,), (1, 2), gates="mild", mask="bk", q_offset="array", wrt=("query", "log_gates"), luck=0),
    # A closed gate in a segment between a query and all keys of its own segment.
    Problem((31, 31), segments="pair", gates="closed sometimes", wrt=("value", "log_gates"), tiling=Tiling((1, 4))),
    # Gates that close within a tile's rows, or between a query and keys of its segment; sums that float32 would round.
    Problem((257, 257), (2,), (1, 2), head_dim=64, slopes="default", gates="closed sometimes", wrt=TENSORS, seed=14449),
    Problem(
        *((7, 7), (2, 3), (2, 2)),
        **{"gates": "closed sometimes", "segments": "pair", "wrt": ("query",), "tiling": Tiling((2, 4)), "seed": 28963},
    ),
    Problem((31, 31), (3,), gates="huge", mask="bhqk", wrt=("key", "log_gates"), seed=2),
    Problem((300, 500), (2,), (1, 2), gates="strong", q_offset=600, wrt=("key", "slopes", "log_gates"), luck=0),
    # Sinks: keys that are all alike or all far, a call that a kernel takes whole, rows without keys, queries beyond the
    # keys, and gates between a query and keys that a mask or segments hide.
    Problem((31, 31), data="equal_keys", sinks="usual", wrt=(*TENSORS, "slopes", "sinks"), tiling=Tiling((4, 4))),
    Problem((64, 64), sinks="wide", data="outlier", wrt=(*TENSORS, "slopes", "sinks"), seed=2),
    Problem((11, 5), sinks="usual", q_offset=4, wrt=("query", "slopes", "sinks")),
    Problem((11, 5), sinks="usual", gates="mild", q_offset="per entry", wrt=("slopes", "log_gates", "sinks")),
    Problem((31, 31), sinks="usual", gates="strong", mask="bhqk", wrt=("log_gates", "sinks"), tiling=Tiling((4, 4))),
    Problem((150, 150), sinks="usual", gates="mild", mask="b11k:pad", wrt=("key", "slopes", "log_gates", "sinks")),
    Problem((150, 150), sinks="usual", mask="b11k:pad", wrt=("key", "slopes", "sinks")),
    Problem((7, 11), sinks="usual", points="times", wrt=("slopes", "sinks"), mask="bhqk", law="log", tiling=Tiling()),
    Problem((1, 1100), sinks="usual", heads=(2, 2), dtype="bfloat16"),
    Problem((17, 31), sinks="usual", returns_weights=True),
    # Points without a position, and a law without points.
    Problem(points="space, some nowhere", distance="euclidean", law="log", is_causal=False, wrt=TENSORS, luck=0),
    Problem(law="sqrt", mask="hqk", wrt=("query", "slopes"), tiling=Tiling()),
    Problem((601, 601), points="space, some nowhere", distance="euclidean", is_causal=False, wrt=(*TENSORS, "slopes")),
    # One key that is near beside far ones, hidden by a mask.
    Problem((7, 11), points="far", mask="11qk", is_causal=False, future="shared", wrt=("query", "slopes")),
)
OF_SOME = {
    "numpy torch": (Problem((5, 7), (5,), mask="bk:int"),),  # a tokenizer's mask, for as many queries as texts
    "torch mlx": (
        # Runs of alike tiles, each computed as one kernel call, end where keys are hidden.
        Problem((31, 31), segments="one", window_size=5, wrt=TENSORS, tiling=Tiling((4, 4), blocks=512)),
        Problem((64, 64), segments="one, interrupted", window_size=20, wrt=TENSORS, tiling=Tiling((4, 4), blocks=512)),
        Problem((31, 31), data="sinks", wrt=TENSORS, tiling=Tiling((2, 4), call_scores=10**9)),
    ),
    "jax": (  # more jobs than are computed at a time
        Problem((1100, 400), (), heads=(1, 1), head_dim=2, is_causal=False, wrt=(*TENSORS, "slopes")),
    ),
    "torch": (
        # Padding that is cut off; slopes of both sides where a mask cuts tiles, compiled; offsets and norms of entries.
        Problem((150, 150), mask="b11k:pad", future="shared", is_causal=False, wrt=(*TENSORS, "future_slopes")),
        Problem((150, 150), mask="b11k:pad", q_offset=4, wrt=("query",)),
        Problem((7, 11), is_causal=False, future="shared", mask="b1qk", wrt=("slopes",), tiling=Tiling(), luck=0),
        Problem(
            (31, 31), data="cliff", q_offset="per entry", knows_norms=True, slopes="per entry", tiling=Tiling(), seed=17
        ),
        Problem((1, 13), heads=(2, 2), window_size=4),  # a step of decoding, of grouped heads
    ),
}


def kept(test: Any) -> Any:
    """Try what was found once in every run."""
    found = itertools.chain(FOUND, *OF_SOME.values())
    return functools.reduce(lambda test, problem: example(problem=problem)(test), found, test)


cached_exact = functools.lru_cache(maxsize=SIBLINGS)(exact)


def assert_exact(backend: Backend, problem: Problem, is_compiled: bool = False) -> None:
    """Assert that result, weights and gradients are exact to rounding; compiled, with values of several seeds."""
    count = SIBLINGS if is_compiled and not problem.closes_over else 1
    siblings = [dataclasses.replace(problem, seed=problem.seed + i) for i in range(count)]
    with problem.tiling.applied() if problem.tiling else contextlib.nullcontext():
        found = computed(backend, siblings, is_compiled)
    for sibling, each in zip(siblings, found, strict=True):
        for name, actual in each.items():
            try:
                assert_within_budget(actual, cached_exact(sibling)[name])
            except AssertionError as error:
                raise AssertionError(f"{backend.name}, {name}: {error}\n{sibling!r}") from None


@pytest.mark.parametrize("library", [param(x.name, x.name, x) for x in LIBRARIES.values()])
@kept
@given(problem=problems())
def test_attention_is_exact_with_its_gradients(problem: Problem, library: str) -> None:
    if any(problem in found and library not in names for names, found in OF_SOME.items()):
        return
    if problem.dtype not in LIBRARIES[library].dtypes:
        problem = dataclasses.replace(problem, dtype="float32")
    is_compiled = problem.luck < COMPILED.get(library, 0)
    for backend in backends(library):
        # JAX compiles for seconds: dense attention, the core's, is tried with half of the problems.
        is_spared = backend.module == "alibi_jax" and backend.implementation == "dense" and problem.seed % 2 == 0
        if is_spared or problem.dtype not in backend.framework.dtypes:
            continue
        if is_refused(backend, problem):
            with pytest.raises(
                NotImplementedError, match=r"^implementation '\w+' .*; ('tiled' and )?'dense' can run this call"
            ):
                computed(backend, [problem], is_compiled=False)
            backend = dataclasses.replace(backend, implementation=None)  # by default, one that can is chosen
        assert_exact(backend, problem, is_compiled)


@pytest.mark.parametrize("library", [param(x.name, x.name, x) for x in LIBRARIES.values()])
def test_constant_gates_are_alibi(library: str) -> None:
    """Gates of minus the slopes, in their place: the same result and gradients; the slopes' is minus the gates' sum."""
    alibi = Problem((31, 31), heads=(2, 2), wrt=(*TENSORS, "slopes"), seed=1)
    gated = dataclasses.replace(alibi, slopes="default", gates="mild", wrt=(*TENSORS, "log_gates"))
    slopes = alibi.arrays["slopes"]
    gates = np.broadcast_to(-slopes[:, None], (*alibi.batch, alibi.num_heads, 31))
    vars(gated)["arrays"] = {name: x for name, x in alibi.arrays.items() if name != "slopes"} | {"log_gates": gates}
    answer = exact(alibi)
    for backend in (x for x in backends(library) if not is_refused(x, gated)):
        (found,) = computed(backend, [gated], is_compiled=False)
        if "log_gates" in found:
            found["slopes"] = -found.pop("log_gates").sum(axis=(0, -1))
        for name, actual in found.items():
            assert_within_budget(actual, answer[name])


@pytest.mark.parametrize("framework", FRAMEWORKS)
@given(problem=problems())
def test_the_bias_has_the_same_bits(problem: Problem, framework: Framework) -> None:
    assume(problem.law == "linear" and problem.points is None and not isinstance(problem.q_offset, str))
    names = ("slopes", "future_slopes")
    given = {name: np.float32(x) for name, x in problem.arrays.items() if name in names}
    if "future_slopes" in given and given["future_slopes"].ndim > given.get("slopes", np.zeros(1)).ndim:
        given["slopes"] = given["future_slopes"] / 2
    given = {"slopes": problem.num_heads} | given
    rest = {name: x for name, x in problem.arguments.items() if name in ("is_causal", "allow_negative_slopes")}
    (q_len, kv_len), offset = problem.lengths, problem.q_offset
    rules = {"q_len": q_len, "kv_len": kv_len, "q_offset": offset}

    def bits(framework: Framework, through: Any = lambda f: f) -> Any:
        arrays = {name: framework.placed(x) for name, x in given.items()}
        numbers = {name: arrays.pop(name) for name in list(arrays) if isinstance(arrays[name], int)}
        xp = {"xp": framework.xp} if numbers else {}
        return framework.bits(
            through(lambda arrays: alibi_core.bias(**numbers, **arrays, **rules, **rest, **xp))(arrays)
        )

    # The product of a slope and a distance, each in float32, is rounded once.
    places = np.arange(q_len) + (kv_len - q_len if offset is None else offset)
    ahead = np.arange(kv_len) - places[:, None]
    past = np.float32(canonical_slopes(problem.num_heads)) if isinstance(given["slopes"], int) else given["slopes"]
    future = given.get("future_slopes", past)
    exact = np.where(ahead > 0, future[..., None, None], past[..., None, None]) * np.float32(-abs(ahead))
    expected = bits(NUMPY)
    is_hidden = (ahead > 0) & problem.is_causal
    np.testing.assert_array_equal(expected.view(np.float32), np.where(is_hidden, -np.inf, exact))
    np.testing.assert_array_equal(bits(framework), expected)
    if framework is not JAX:  # which compiles each operation; positions count by their differences alone
        pair = (framework.placed(np.int32(x + problem.seed % 999)) for x in (places, np.arange(kv_len)))
        slopes = {name: framework.placed(x) for name, x in given.items()}
        by_position = alibi_core.bias_from_positions(slopes.pop("slopes"), *pair, **slopes, **rest)
        np.testing.assert_array_equal(framework.bits(by_position), expected)
    if problem.luck < COMPILED.get(framework.name, 0) and "slopes" in problem.arrays:
        np.testing.assert_array_equal(bits(framework, framework.compiled), expected)
