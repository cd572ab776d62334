"""MLX's transformations of attention: mapped arguments, and gradients of every subset of them, whatever the loss."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

mx = pytest.importorskip("mlx.core", reason="mlx is not installed")

import alibi_core  # noqa: E402
from alibi_core.conformance._cases.oracle import (  # noqa: E402
    UNIT_ROUNDOFF,
    Answer,
    Attention,
    Rules,
    assert_within,
    penalties,
    summed_over_batch,
)
from alibi_mlx import attention  # noqa: E402
from tests.support.frameworks import MLX, Backend  # noqa: E402
from tests.support.tiles import Tiling  # noqa: E402

IMPLEMENTATIONS = ("tiled", "dense")
MAPPED, KV_HEADS, HEADS, HEAD_DIM = 3, 2, 4, 5  # sizes of axes
DIFFERENTIABLE = ("query", "key", "value", "slopes", "future_slopes")

Arrays = dict[str, Any]


def exact(arrays: Arrays, rules: dict[str, Any], cotangent: np.ndarray) -> tuple[Answer, dict[str, Answer]]:
    """Return attention of NumPy arrays, named as its arguments are, and its gradients, which have their shapes."""
    dtype = "float64" if arrays["query"].dtype == np.float64 else "float32"
    query, key, value = (arrays[name].astype(np.float64) for name in ("query", "key", "value"))
    (batch, heads, q_len, _), kv_len = query.shape, key.shape[2]
    slopes = {name: np.broadcast_to(arrays[name], (batch, heads)) for name in DIFFERENTIABLE[3:] if name in arrays}
    given = {name: arrays[name] for name in ("q_segment_ids", "kv_segment_ids", "mask") if name in arrays}
    offset = np.broadcast_to(arrays.get("q_offset", kv_len - q_len), (batch,))
    bias = penalties(Rules(**slopes, **given, **rules, q_offset=offset), batch, heads, q_len, kv_len)
    problem = Attention(query, key, value, bias=bias, scale=HEAD_DIM**-0.5, dtype=dtype)
    ahead = np.arange(kv_len) - (offset[:, None] + np.arange(q_len))[..., None]
    sides = {"slopes": np.abs(ahead)}
    if "future_slopes" in slopes:
        sides = {"slopes": np.maximum(-ahead, 0), "future_slopes": np.maximum(ahead, 0)}
    answers: dict[str, Answer] = {}
    for name, distances in sides.items():
        seen = np.where(np.isfinite(bias), distances[:, None], 0)
        found = problem.gradients_without(UNIT_ROUNDOFF[dtype], cotangent, seen)
        by_slopes = found.pop("slopes")
        shared = arrays[name].shape != by_slopes.value.shape
        answers |= found | {name: summed_over_batch(by_slopes) if shared else by_slopes}
    return problem.output_without(UNIT_ROUNDOFF[dtype]), answers


def attend(arrays: Arrays, rules: dict[str, Any], implementation: str | None) -> Any:
    """Return attention of MLX arrays, named as its arguments are."""
    others = dict(arrays)
    if "q_segment_ids" in others:
        others["segment_ids"] = (others.pop("q_segment_ids"), others.pop("kv_segment_ids"))
    return attention(**others, **rules, implementation=implementation)


def assert_gradients(actual: Any, expected: list[Answer]) -> None:
    actual = [actual] if isinstance(actual, mx.array) else actual  # as mx.grad returns a single one
    for gradient, answer in zip(actual, expected, strict=True):
        assert_within(np.array(gradient).astype(np.float64), answer)


# --- Mapped arguments ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mapping:
    """A call of which some arguments are mapped.

    Attributes:
        shapes: Each array's, under the name of its argument, without the axis that is mapped.
        axes: Where that axis is in those that are mapped.
        rules: The arguments that are no arrays.
        seed: Of the values.
    """

    shapes: dict[str, tuple[int, ...]]
    axes: dict[str, int]
    rules: dict[str, Any] = dataclasses.field(default_factory=dict)
    seed: int = 0

    @functools.cached_property
    def arrays(self) -> dict[str, np.ndarray]:
        """Those mapped have the mapped axis first."""
        rng = np.random.default_rng(self.seed)
        arrays = {}
        for name, shape in self.shapes.items():
            whole = (MAPPED, *shape) if name in self.axes else shape
            if name == "mask":
                arrays[name] = rng.random(whole) < 0.7
            elif name == "q_offset":
                arrays[name] = rng.integers(-3, 20, whole, np.int32)
            elif "segment_ids" in name:
                arrays[name] = np.sort(rng.integers(0, 3, whole, np.int32), axis=-1)
            elif "slopes" in name:
                arrays[name] = rng.choice(np.asarray([0.0, 0.02, 0.3, 1.5], np.float32), whole)
            else:
                arrays[name] = rng.standard_normal(whole).astype(np.float32)
        return {name: np.asarray(x) for name, x in arrays.items()}

    def entry(self, index: int) -> dict[str, np.ndarray]:
        return {name: x[index] if name in self.axes else x for name, x in self.arrays.items()}

    def over_all(self, name: str, answers: list[Answer]) -> Answer:
        """Return the gradient by an argument, its mapped axis in place, from what it is by each entry's."""
        stacked = Answer(*(np.stack([getattr(x, part) for x in answers]) for part in ("value", "budget")))
        if name not in self.axes:
            return summed_over_batch(stacked)
        return Answer(*(np.moveaxis(x, 0, self.axes[name]) for x in (stacked.value, stacked.budget)))


@st.composite
def mappings(draw: st.DrawFn) -> Mapping:
    batch, is_causal = draw(st.sampled_from([1, 1, 2])), draw(st.booleans())
    q_len, kv_len = draw(st.sampled_from([(1, 1), (1, 7), (5, 7), (11, 5), (20, 33)]))
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
        whole = [draw(st.sampled_from([1, n])) for n in (batch, HEADS, q_len, kv_len)]
        shapes["mask"] = tuple(whole[draw(st.integers(0, 3)) :])
    first = draw(st.sampled_from(sorted(shapes)))  # one at least is
    axes = {
        name: draw(st.integers(0, len(shape))) for name, shape in shapes.items() if name == first or draw(st.booleans())
    }
    rules: dict[str, Any] = {"is_causal": is_causal, "window_size": draw(st.sampled_from([None, None, 0, 6]))}
    return Mapping(shapes, axes, rules, seed=draw(st.integers(0, 2**16)))


def shapes_of(q_len: int, kv_len: int, *, batch: int = 1, **others: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    keys = (batch, KV_HEADS, kv_len, HEAD_DIM)
    return {"query": (batch, HEADS, q_len, HEAD_DIM), "key": keys, "value": keys, "slopes": (HEADS,), **others}


TILINGS = (Tiling(), Tiling(short=1024), Tiling(rows=(2, 16), few=3, blocks=512))
BOTH_WAYS = {"is_causal": False}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@given(mapping=mappings(), tiling=st.sampled_from(TILINGS), wanted=st.sets(st.sampled_from(DIFFERENTIABLE), min_size=1))
# Slopes that an only batch entry has of its own are shared by those that mapping makes of it.
@example(Mapping(shapes_of(5, 7, slopes=(1, HEADS)), {"query": 0}), TILINGS[1], {"slopes"})
@example(
    Mapping(shapes_of(5, 7, future_slopes=(1, HEADS)), {"key": 3, "slopes": 1}, BOTH_WAYS),
    TILINGS[1],
    {"future_slopes"},
)
# Only slopes for keys to come differ.
@example(
    Mapping(shapes_of(20, 33, future_slopes=(HEADS,)), {"future_slopes": 1}, BOTH_WAYS | {"window_size": 6}),
    TILINGS[2],
    set(DIFFERENTIABLE),
)
# Query and key can be read, and a plan be made; but its overlapping tiles are of what is mapped.
@example(Mapping(shapes_of(20, 33), {"value": 1}), TILINGS[0], {"query"})
# Masks get the axes that they lack, and two rules about who is visible meet.
@example(Mapping(shapes_of(5, 7, mask=(5, 7)), {"mask": 1}, BOTH_WAYS), TILINGS[1], {"key"})
@example(Mapping(shapes_of(5, 7, mask=(7,)), {"mask": 1}), TILINGS[1], {"query", "value"})
@example(Mapping(shapes_of(5, 7, q_offset=(), mask=(1, 1, 5, 7)), {"q_offset": 0}), TILINGS[1], {"value"})
@example(
    Mapping(shapes_of(5, 7, q_segment_ids=(5,), kv_segment_ids=(1, 7)), {"kv_segment_ids": 2}), TILINGS[1], {"key"}
)
def test_whatever_is_mapped_it_equals_a_loop(
    implementation: str, mapping: Mapping, tiling: Tiling, wanted: set[str]
) -> None:
    arrays, names = mapping.arrays, list(mapping.shapes)
    in_axes = tuple(mapping.axes.get(name) for name in names)
    placed = [mx.array(np.moveaxis(arrays[n], 0, mapping.axes[n]) if n in mapping.axes else arrays[n]) for n in names]
    argnums = [i for i, name in enumerate(names) if name in wanted] or [0]
    cotangent = np.random.default_rng(1).standard_normal((MAPPED, *mapping.shapes["query"])).astype(np.float32)
    outputs, by_entry = zip(
        *(exact(mapping.entry(i), mapping.rules, cotangent[i].astype(np.float64)) for i in range(MAPPED)), strict=True
    )

    def function(*operands: Any) -> Any:
        return attend(dict(zip(names, operands, strict=True)), mapping.rules, implementation)

    def loss(weight: Any, *operands: Any) -> Any:
        return (function(*operands) * weight).sum()

    with tiling.applied(Backend(MLX, "alibi_mlx", None)):
        for output, answer in zip(mx.vmap(function, in_axes=in_axes)(*placed), outputs, strict=True):
            assert_within(np.array(output).astype(np.float64), answer)
        total = mx.grad(
            lambda *x: (mx.vmap(function, in_axes=in_axes)(*x) * mx.array(cotangent)).sum(), argnums=argnums
        )
        expected = [mapping.over_all(names[i], [answers[names[i]] for answers in by_entry]) for i in argnums]
        assert_gradients(total(*placed), expected)
        each = mx.vmap(mx.grad(loss, argnums=[i + 1 for i in argnums]), in_axes=(0, *in_axes))
        found = each(mx.array(cotangent), *placed)
    found = [found] if isinstance(found, mx.array) else found
    for entry, answers in enumerate(by_entry):
        assert_gradients([x[entry] for x in found], [answers[names[i]] for i in argnums])


def test_mapping_may_be_nested() -> None:
    shapes = shapes_of(5, 7, mask=(5, 7))
    rng = np.random.default_rng(0)
    arrays = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    query, slopes = (rng.random((3, 2, *shapes[name])).astype(np.float32) for name in ("query", "slopes"))
    mask = rng.random((5, 3, 7)) < 0.7

    def function(query: Any, slopes: Any, mask: Any) -> Any:
        return attention(query, *(mx.array(arrays[x]) for x in ("key", "value")), slopes, mask=mask)

    inner = mx.vmap(function, in_axes=(0, 0, None))
    actual = mx.vmap(inner, in_axes=(0, 0, 1))(mx.array(query), mx.array(slopes), mx.array(mask))
    for i, j in itertools.product(range(3), range(2)):
        entry = arrays | {"query": query[i, j], "slopes": slopes[i, j], "mask": mask[:, i]}
        assert_within(np.array(actual[i, j]).astype(np.float64), exact(entry, {}, query[i, j])[0])


def test_the_bias_of_mapped_segments_equals_a_loop() -> None:
    positions, ids = np.arange(5, dtype=np.int32), np.asarray([[0, 0, 1, 1, 1], [0, 1, 1, 2, 2]], np.int32)

    def bias(ids: Any, positions: Any) -> Any:
        return alibi_core.bias_from_positions(2, positions, positions, q_segment_ids=ids, kv_segment_ids=ids)

    actual = mx.vmap(bias, in_axes=(1, None))(mx.array(ids.T), mx.array(positions))
    assert np.array_equal(np.array(actual), np.stack([bias(x, positions) for x in ids]))


@pytest.mark.parametrize("lengths", [(17, 16), (17, 1025)])
def test_compiled_gradients_are_those_that_are_not(lengths: tuple[int, int]) -> None:
    rng = np.random.default_rng(0)
    arrays = {n: rng.random(shape, np.float32) for n, shape in shapes_of(*lengths, future_slopes=(HEADS,)).items()}
    arrays = {name: mx.array(x) for name, x in arrays.items()}
    for wanted in itertools.chain(itertools.combinations(DIFFERENTIABLE, 2), [(x,) for x in DIFFERENTIABLE]):
        for loss in (lambda out: out.sum(), lambda out: out[0, 0, 0, 0], lambda out: (out * out).mean()):

            def total(*some: Any, wanted: Any = wanted, loss: Any = loss) -> Any:
                return loss(attend(arrays | dict(zip(wanted, some, strict=True)), {"is_causal": False}, "tiled"))

            gradient = mx.grad(total, argnums=list(range(len(wanted))))
            found, expected = (f(*(arrays[n] for n in wanted)) for f in (mx.compile(gradient), gradient))
            for one, other in zip(found, expected, strict=True) if len(wanted) > 1 else [(found, expected)]:
                np.testing.assert_allclose(np.array(one), np.array(other), rtol=2e-5, atol=2e-5)
