"""Bad input: every function says what is wrong, and how to mend it, before it computes anything."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import alibi_core
from tests.support.frameworks import (
    BACKENDS,
    FRAMEWORK,
    FRAMEWORKS,
    JAX,
    LAYER_BACKENDS,
    MLX,
    NAMES,
    NUMPY,
    TORCH,
    Backend,
    Framework,
)
from tests.support.layers import make_module

NAN = float("nan")


@dataclass(frozen=True)
class Bad:
    """Arguments that must be refused. Arrays are NumPy's here; the test moves them into the framework."""

    arguments: dict[str, Any]
    error: type[Exception]
    message: str
    is_about_values: bool = False  # Dask's are not known before they are computed, so no check can look at them

    def id(self) -> str:
        return "-".join(self.arguments) + "-" + "".join(c for c in self.message[:40] if c.isalnum() or c == " ")


def floats(*shape: int) -> np.ndarray:
    return np.ones(shape, dtype=np.float32)


def slopes_of(*values: float) -> np.ndarray:
    return np.asarray(values, dtype=np.float32)


def ints(*shape: int) -> np.ndarray:
    return np.zeros(shape, dtype=np.int32)


def bools(*shape: int) -> np.ndarray:
    return np.ones(shape, dtype=bool)


# Query [2, 6, 5, 8], key and value [2, 3, 7, 8] unless replaced; heads first, whatever the backend's layout.
ATTENTION = [
    Bad({"query": floats(5, 8)}, ValueError, r"query must have axes \[.*heads.*\], got shape \(5, 8\)"),
    Bad({"query": floats(3, 6, 5, 8)}, ValueError, r"key must have the batch axes of query, \(3,\), got \(2,\)"),
    Bad({"query": floats(2, 6, 5, 4)}, ValueError, "key must have the head_dim of query, 4, got 8"),
    Bad(
        {"query": floats(2, 4, 5, 8)}, ValueError, r"num_kv_heads must divide num_heads, got 3 .* and 4 .* axes are \["
    ),
    Bad({"query": floats(2, 0, 5, 8)}, ValueError, r"num_heads must be at least 1, got query of shape .* \[.*heads"),
    Bad(
        {"key": floats(2, 0, 7, 8), "value": floats(2, 0, 7, 8)},
        ValueError,
        r"num_kv_heads must be at least 1, got key of shape .* \[.*heads",
    ),
    Bad({"scale": 1e39}, ValueError, "scale must be finite in float32"),
    Bad({"key": floats(2, 3, 4, 8)}, ValueError, "value must have the shape of key"),
    Bad({"value": floats(2, 3, 7, 4)}, ValueError, "value must have the shape of key"),
    Bad({"slopes": [0.5] * 6}, TypeError, "slopes must be an array, got .*numpy.asarray, or that of your framework"),
    Bad({"slopes": "linear"}, TypeError, r"slopes must be an array, .*; alibi_core.slopes\(num_heads, scheme=...\)"),
    Bad({"slopes": 5}, ValueError, r"slopes must count the heads of query, 6, got 5; its axes are \[.*heads.*\]"),
    Bad({"slopes": floats(3)}, ValueError, r"slopes must have shape \(6,\) .*, got \(3,\); query's axes are \["),
    Bad({"slopes": floats(3, 6)}, ValueError, r"slopes must have shape \(6,\).* or \(2, 6\).*, got \(3, 6\)"),
    Bad(
        {"slopes": slopes_of(1, 1, -1, 1, 1, 1)},
        ValueError,
        "slopes must not be negative .* allow_negative_slopes",
        is_about_values=True,
    ),
    Bad({"slopes": slopes_of(1, 1, NAN, 1, 1, 1)}, ValueError, "slopes must be finite", is_about_values=True),
    Bad({"slopes": slopes_of(1, 1, np.inf, 1, 1, 1)}, ValueError, "slopes must be finite", is_about_values=True),
    Bad({"slopes": np.full(6, 2e29)}, ValueError, "slopes must be at most 1.585e.29 in size", is_about_values=True),
    Bad({"future_slopes": floats(6)}, ValueError, "future_slopes must be None when is_causal=True .* is_causal=False"),
    Bad(
        {"is_causal": False, "future_slopes": 0},
        ValueError,
        "future_slopes must be an array.* zeros gives the clamped",
    ),
    Bad({"is_causal": False, "future_slopes": floats(5)}, ValueError, r"future_slopes must have shape \(6,\)"),
    Bad(
        {"is_causal": False, "future_slopes": -floats(6)},
        ValueError,
        "future_slopes must not be negative",
        is_about_values=True,
    ),
    Bad({"q_offset": 2**31}, ValueError, "q_offset and lengths must stay within 2147483647 tokens"),
    Bad({"q_offset": ints(3)}, ValueError, r"q_offset must have shape \(\) or \(2,\)"),
    Bad({"segment_ids": ints(2, 7)}, ValueError, "segment_ids must be a pair .* when q_len, 5, and kv_len, 7, differ"),
    Bad({"segment_ids": (ints(2, 5),) * 3}, ValueError, "segment_ids must be one array or a pair .*, got 3"),
    Bad({"segment_ids": (ints(2, 5), ints(2, 6))}, ValueError, r"segment_ids must broadcast to \(2, 7\)"),
    Bad({"segment_ids": (ints(2, 5), ints(2, 1))}, ValueError, "segment_ids must end in the axis kv_len, 7"),
    Bad({"segment_ids": (floats(2, 5), floats(2, 7))}, TypeError, "segment_ids must have an integer dtype"),
    Bad({"window_size": -1}, ValueError, "window_size must not be negative, got -1; None is for no window"),
    Bad(
        {"mask": bools(4, 7)}, ValueError, r"mask must broadcast to \(2, 6, 5, 7\) \(batch, num_heads, q_len, kv_len\)"
    ),
    Bad({"mask": bools(1, 2, 6, 5, 7)}, ValueError, "mask must broadcast to"),
    Bad({"mask": bools()}, ValueError, r"mask must have at least the axis kv_len, got shape \(\)"),
    Bad(
        {"mask": ints(5, 7)}, ValueError, r"mask of integers must broadcast to \(2, 7\) \(batch, kv_len\), got \(5, 7\)"
    ),
    Bad(
        {"mask": ints(2, 7) + 2}, ValueError, "mask must be .* got other integers; .* segment_ids", is_about_values=True
    ),
    Bad({"positions": ints(2, 7)}, ValueError, "positions must be a pair .* when q_len, 5, and kv_len, 7, differ"),
    Bad({"positions": (ints(2, 5), ints(2, 6))}, ValueError, r"positions must have axes \[batch, kv_len\] or .*dims"),
    Bad({"positions": (ints(2, 5, 2), ints(2, 7, 3)), "is_causal": False}, ValueError, "as many dims, got 2 .* and 3"),
    Bad({"positions": (ints(5, 2), ints(7, 2))}, ValueError, "is_causal must be False for positions with 2 dims"),
    Bad(
        {"positions": (ints(5, 2), ints(7, 2)), "is_causal": False, "future_slopes": floats(6)},
        ValueError,
        "future_slopes must be None for positions with 2 dims",
    ),
    Bad({"positions": (ints(5), ints(7)), "q_offset": 2}, ValueError, "q_offset must be None with positions"),
    Bad({"positions": (ints(5), ints(7)), "window_size": 2}, ValueError, "window_size must be None with positions"),
    Bad(
        {"positions": (floats(5) * np.inf, ints(7))},
        ValueError,
        r"must be up to 2\*\*62 .* got inf",
        is_about_values=True,
    ),
    Bad(
        {"positions": (floats(5) + 1e19, ints(7))},
        ValueError,
        r"must be up to 2\*\*62 .* got 1e\+19",
        is_about_values=True,
    ),
    Bad({"positions": (bools(5), ints(7))}, TypeError, "positions must have an integer or a real floating dtype"),
    Bad({"distance": "cosine"}, ValueError, "distance must be one of 'manhattan', .*, got 'cosine'"),
    Bad({"law": "square"}, ValueError, "law must be one of 'linear', 'log', 'sqrt', got 'square'"),
]
BACKEND_ONLY = [
    Bad({"tolerance": -1e-3}, ValueError, "tolerance must not be negative"),
    Bad({"implementation": "fastest"}, ValueError, "implementation must be one of .*'dense', got 'fastest'"),
]


def refuse(bad: Bad, call: Callable[[], Any]) -> None:
    with pytest.raises(bad.error, match=bad.message):
        call()


def refusals(items: list[Any], table: list[Bad]) -> list[Any]:
    """Return the pairs of backends or frameworks and the rows of a table that apply to them."""
    return [
        pytest.param(*item.values, bad, id=f"{item.id}-{bad.id()}", marks=item.marks)
        for item in items
        for bad in table
        if not (bad.is_about_values and "dask" in item.id)
    ]


def call_attention(backend: Backend, changes: dict[str, Any]) -> Any:
    tensors = {"query": floats(2, 6, 5, 8), "key": floats(2, 3, 7, 8), "value": floats(2, 3, 7, 8)}
    arguments = tensors | changes
    for name in tensors:
        if isinstance(arguments[name], np.ndarray) and arguments[name].ndim == 4:
            arguments[name] = backend.layout(arguments[name])
    return importlib.import_module(backend.module).attention(**backend.framework.placed(arguments))


@pytest.mark.parametrize(("backend", "bad"), refusals(BACKENDS, ATTENTION))
def test_attention_refuses(backend: Backend, bad: Bad) -> None:
    chosen = {"implementation": backend.implementation} if backend.implementation else {}
    refuse(bad, lambda: call_attention(backend, chosen | bad.arguments))


REFERENCES = [b for b in BACKENDS if b.values[0].implementation in (None, "dense")]


@pytest.mark.parametrize("backend", REFERENCES)
@pytest.mark.parametrize("is_additive", [False, True])
def test_the_remedy_for_a_mask_makes_the_one_that_was_meant(backend: Backend, is_additive: bool) -> None:
    visible = np.asarray([True, True, False, True, True, False, True])
    values = np.where(visible, 0, -np.inf) if is_additive else visible.astype(np.float32)
    with pytest.raises(TypeError, match="mask must be booleans, or integers 0 and 1") as refused:
        call_attention(backend, {"mask": values})
    ways = str(refused.value).split("; if it is ")[1:]
    told = next(way.partition(", use ")[2] for way in ways if way.startswith("0" if is_additive else "1"))
    framework = backend.framework
    mask = eval(told, {"mask": framework.placed(values)})
    results = (call_attention(backend, {"mask": x}) for x in (mask, visible))
    np.testing.assert_array_equal(*map(framework.numpy, results))


MASK_AXES = [  # sizes of the scores, the mask's shape, and how each of its two readings is spelled
    ((5, 3, 5, 7), (5, 7), "mask[:, None, None, :]", "mask[None, None]"),
    ((5, 3, 5, 5), (5, 5), "mask[:, None, None, :]", "mask[None, None]"),
    ((3, 3, 5, 7), (3, 5, 7), "mask[:, None]", "mask[None]"),
    ((3, 3, 5, 7), (3, 1, 7), "mask[:, None]", "mask[None]"),
    ((4, 4, 4, 5, 7), (4, 4, 5, 7), "mask[:, :, None]", "mask[None]"),
]
BATCH_FIRST_MASK_AXES = [  # sizes of the scores, the mask's shape, and its shape with all axes
    ((2, 3, 5, 7), (2, 7), (2, 1, 1, 7)),
    ((2, 3, 1, 7), (2, 7), (2, 1, 1, 7)),
    ((2, 3, 5, 7), (2, 5, 7), (2, 1, 5, 7)),
    ((2, 3, 5, 7), (2, 1, 7), (2, 1, 1, 7)),
    ((2, 4, 3, 5, 7), (2, 4, 7), (2, 4, 1, 1, 7)),
    ((2, 3, 4, 5, 7), (2, 3, 5, 7), (2, 3, 1, 5, 7)),
]
PLAIN_MASK_AXES = [
    *(((5, 3, 5, 7), shape) for shape in ((7,), (1, 7), (3, 5, 7), (1, 1, 5, 7), (5, 1, 1, 7))),
    *(((1, 3, 5, 7), shape) for shape in ((5, 7), (1, 7), (1, 5, 7), (3, 1, 7))),
    *(((5, 5, 7), (5, 7)), ((1, 3, 1, 7), (1, 7)), ((1, 1, 5, 7), (1, 5, 7)), ((3, 4, 4, 5, 7), (4, 4, 5, 7))),
]


def attention_with_mask(sizes: tuple[int, ...], mask: np.ndarray) -> np.ndarray:
    *leading, q_len, kv_len = sizes
    query, key, value = (np.random.default_rng(1).standard_normal((*leading, n, 4)) for n in (q_len, kv_len, kv_len))
    return alibi_core.attention(query, key, value, mask=mask)


@pytest.mark.parametrize(("sizes", "shape", "meant", "aligned"), MASK_AXES)
def test_a_mask_that_may_be_mistaken_is_refused_with_what_it_may_be(
    sizes: tuple[int, ...], shape: tuple[int, ...], meant: str, aligned: str
) -> None:
    mask = np.ones(shape, dtype=bool)
    with pytest.raises(ValueError, match=r"mask must .*, got \(.*use mask\[") as refused:
        attention_with_mask(sizes, mask)
    assert f"use {meant} if" in str(refused.value)
    assert f"or {aligned} if" in str(refused.value)
    for spelled in (meant, aligned):
        attention_with_mask(sizes, eval(spelled, {"mask": mask}))


@pytest.mark.parametrize(("sizes", "shape", "full"), BATCH_FIRST_MASK_AXES)
def test_a_mask_with_batch_axes_first_gets_the_axes_that_it_lacks(
    sizes: tuple[int, ...], shape: tuple[int, ...], full: tuple[int, ...]
) -> None:
    mask = np.random.default_rng(2).random(shape) < 0.7
    expected = attention_with_mask(sizes, mask.reshape(full))
    np.testing.assert_array_equal(attention_with_mask(sizes, mask), expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_integers_are_the_mask_of_a_tokenizer(backend: Backend) -> None:
    text = np.arange(7) < np.asarray([7, 4, 2, 5, 6])[:, None]
    rng, lengths = np.random.default_rng(1), {"query": 5, "key": 7, "value": 7}
    tensors = {name: rng.standard_normal((5, 6, n, 8)) for name, n in lengths.items()}
    numpy = backend.framework.numpy
    expected = numpy(call_attention(backend, {**tensors, "mask": text[:, None, None, :]}))
    for dtype in ("int8", "uint8", "uint16", "int32", "uint32"):  # batch equals q_len, which booleans may not
        found = call_attention(backend, {**tensors, "mask": text.astype(dtype)})
        np.testing.assert_array_equal(numpy(found), expected, err_msg=dtype)


@pytest.mark.parametrize(("sizes", "shape"), PLAIN_MASK_AXES)
def test_a_mask_that_cannot_be_mistaken_broadcasts(sizes: tuple[int, ...], shape: tuple[int, ...]) -> None:
    mask = np.random.default_rng(2).random(shape) < 0.7
    expected = attention_with_mask(sizes, np.broadcast_to(mask, sizes))
    np.testing.assert_array_equal(attention_with_mask(sizes, mask), expected)


@pytest.mark.parametrize("backend", LAYER_BACKENDS)
@pytest.mark.parametrize("bad", BACKEND_ONLY, ids=Bad.id)
def test_backends_refuse(backend: Backend, bad: Bad) -> None:
    refuse(bad, lambda: call_attention(backend, bad.arguments))


@pytest.mark.parametrize("backend", BACKENDS)
def test_attention_takes_what_the_table_is_a_change_of(backend: Backend) -> None:
    call_attention(backend, {"slopes": slopes_of(1, 1, -1, 1, 1, 1), "allow_negative_slopes": True})


@pytest.mark.parametrize("backend", BACKENDS)
def test_attention_refuses_arrays_of_another_library(backend: Backend) -> None:
    stranger = TORCH if backend.framework is NUMPY else NUMPY
    function, array = importlib.import_module(backend.module).attention, backend.framework.array
    arguments = {"query": floats(1, 3, 3, 4), "key": floats(1, 3, 3, 4), "value": floats(1, 3, 3, 4)}
    arguments |= {"slopes": floats(3), "mask": bools(3, 3)}
    for name, values in arguments.items():
        mixed = {other: array(x) for other, x in arguments.items()} | {name: stranger.array(values)}
        if name == "slopes" and stranger is NUMPY:  # which any library's call takes
            one, other = (function(**mixed | {name: x}) for x in (values.astype(np.float64), array(values)))
            np.testing.assert_array_equal(*map(backend.framework.numpy, (one, other)))
            continue
        told = "" if backend.module == "alibi_core" else rf"; make these arrays of \S+, by \S+: {name}$"
        with pytest.raises(TypeError, match=rf"arrays must belong to one array namespace, got \S+ and \S+{told}"):
            function(**mixed)


@pytest.mark.parametrize("backend", BACKENDS)
def test_attention_refuses_tensors_of_two_dtypes(backend: Backend) -> None:
    one, other = ("float16", "bfloat16") if backend.framework in (TORCH, JAX, MLX) else ("float32", "float64")
    for odd in ("key", "value"):
        tensors = {name: backend.framework.array(floats(1, 3, 3, 4), one) for name in ("query", "key", "value")}
        tensors[odd] = backend.framework.array(np.ones((1, 3, 3, 4)), other)
        with pytest.raises(TypeError, match=f"query, key and value must have one dtype, .*{one}.*, {odd} .*{other}"):
            importlib.import_module(backend.module).attention(**tensors)


def test_attention_refuses_tensors_on_another_device() -> None:
    torch = pytest.importorskip("torch")
    for name in ("key", "slopes", "mask"):
        tensors = {"query": torch.ones(1, 3, 2, 4), "key": torch.ones(1, 3, 2, 4), "value": torch.ones(1, 3, 2, 4)}
        tensors |= {"slopes": torch.ones(3), "mask": torch.ones(2, 2, dtype=torch.bool)}
        tensors[name] = tensors[name].to("meta")
        with pytest.raises(ValueError, match=f"{name} must be on the device of query, cpu, got meta"):
            alibi_core.attention(**tensors)


SLOPES = [
    Bad({"num_heads": 0}, ValueError, "num_heads must be at least 1, got 0"),
    Bad({"num_heads": -3}, ValueError, "num_heads must be at least 1, got -3"),
    Bad({"num_heads": 2**21}, ValueError, "num_heads must be at most 1048576, got 2097152"),
    Bad({"scheme": "paper"}, ValueError, "scheme must be one of 'canonical', 'geometric', 'linear', got 'paper'"),
    Bad({"bias_max": 0}, ValueError, "bias_max must be positive, got 0"),
    Bad({"bias_max": -8.0}, ValueError, "bias_max must be positive"),
    Bad({"bias_max": 16, "scheme": "linear"}, ValueError, "bias_max must be left at 8 with scheme 'linear'"),
]


COMMON_BIAS = [
    Bad({"slopes": 0}, ValueError, "num_heads must be at least 1, got 0"),
    Bad({"slopes": floats()}, ValueError, r"slopes must have shape \(\.\.\., num_heads\)"),
    Bad({"slopes": floats(0)}, ValueError, r"slopes must have shape \(\.\.\., num_heads\)"),
    Bad({"slopes": slopes_of(0.5, -0.5)}, ValueError, "slopes must not be negative", is_about_values=True),
    Bad({"slopes": slopes_of(0.5, NAN)}, ValueError, "slopes must be finite", is_about_values=True),
]
FUTURE = [
    Bad({"future_slopes": floats(2)}, ValueError, "future_slopes must be None when is_causal=True"),
    Bad({"is_causal": False, "future_slopes": floats(3)}, ValueError, r"future_slopes must have the shape of slopes"),
    Bad(
        {"is_causal": False, "future_slopes": -floats(2)},
        ValueError,
        "future_slopes must not be negative",
        is_about_values=True,
    ),
]
KV_LEN = Bad({"kv_len": -1}, ValueError, "kv_len must not be negative")
LENGTHS = [
    KV_LEN,
    Bad({"q_len": -1}, ValueError, "q_len must not be negative, got -1"),
]
POSITIONS = [
    Bad({"kv_positions": ints()}, ValueError, "kv_positions must have at least one axis"),
    Bad(
        {"q_positions": ints(2, 3), "kv_positions": ints(4, 3)},
        ValueError,
        r"leading axes must broadcast, got .*\(2,\)",
    ),
    Bad({"slopes": floats(4, 2), "q_positions": ints(3, 3)}, ValueError, "leading axes must broadcast"),
    Bad({"q_segment_ids": ints(3)}, ValueError, "q_segment_ids and kv_segment_ids must be given together"),
    Bad({"q_segment_ids": ints(3), "kv_segment_ids": ints(4)}, ValueError, "kv_segment_ids must broadcast to"),
    Bad({"q_segment_ids": floats(3), "kv_segment_ids": ints(3)}, TypeError, "q_segment_ids must have an integer dtype"),
]


HORIZON = [  # of what test_hostile_input.py does not try
    Bad({"slopes": 0}, ValueError, "slopes must be at least 1, got 0|num_heads must be at least 1, got 0"),
    Bad({"slopes": np.asarray(0.5, np.float32)}, ValueError, r"slopes must have shape \(..., num_heads\).*, got \(\)"),
    Bad({"slopes": floats(3) * NAN}, ValueError, "slopes must be finite", is_about_values=True),
    Bad({"score_range": NAN}, ValueError, "score_range must be finite, got nan"),
    Bad({"tolerance": -1e-3}, ValueError, "tolerance must not be negative, got -0.001"),
    Bad({"tolerance": NAN}, ValueError, "tolerance must be finite, got nan"),
    Bad({"is_causal": 1}, TypeError, "is_causal must be True or False, got 1"),
]
# Functions of the core, arguments that they take, and what they refuse in place of some.
PLACES = dict.fromkeys(("q_positions", "kv_positions"), ints(3))
CORE = {
    "slopes": ({"num_heads": 8}, SLOPES),
    "bias": ({"slopes": floats(2), "q_len": 3}, [*COMMON_BIAS, *FUTURE, *LENGTHS]),
    "key_bias": ({"slopes": floats(2), "kv_len": 3}, [*COMMON_BIAS, KV_LEN]),
    "bias_from_positions": ({"slopes": floats(2)} | PLACES, [*COMMON_BIAS, *FUTURE, *POSITIONS]),
    "horizon": ({"slopes": floats(3), "score_range": 14.0}, HORIZON),
}


OF_CORE = [
    pytest.param(function, *x.values, id=f"{function}-{x.id}", marks=x.marks)
    for function, (_, table) in CORE.items()
    for x in refusals(FRAMEWORKS, table)
]


@pytest.mark.parametrize(("function", "framework", "bad"), OF_CORE)
def test_functions_of_the_core_refuse(function: str, framework: Framework, bad: Bad) -> None:
    arguments = CORE[function][0] | ({"xp": framework.xp} if function == "slopes" else {}) | bad.arguments
    refuse(bad, lambda: getattr(alibi_core, function)(**framework.placed(arguments)))


def test_a_bias_in_two_libraries_is_refused() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(
        TypeError, match=r"one array namespace, got numpy and torch; make .* arrays of numpy, by numpy.asarray"
    ):
        alibi_core.bias(torch.ones(2), 3, xp=np)
    with pytest.raises(TypeError, match="arrays must belong to one array namespace, got numpy and torch"):
        alibi_core.bias_from_positions(2, np.arange(3), torch.arange(3))


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_slopes_of_numpy_serve_every_library(framework: Framework) -> None:
    """Slopes without gradients may be arrays of NumPy, of any precision and layout."""
    numbers = np.asarray([0.5, 0.2, 0.1], np.float64)[::-1]
    numbers.setflags(write=False)
    positions, tensor = framework.array(np.arange(4)), framework.array(np.ones((3, 4, 2), np.float32))
    calls = (
        lambda x: alibi_core.attention(tensor, tensor, tensor, x, is_causal=False, future_slopes=x),
        lambda x: alibi_core.bias_from_positions(x, positions, positions, dtype="float32"),
        lambda x: alibi_core.bias(x, 3, xp=framework.xp, dtype="float32"),
    )
    for slopes, call in itertools.product((numbers, numbers.astype(np.float32), numbers.astype(">f4")), calls):
        found, expected = call(slopes), call(framework.array(np.float32(slopes)))
        assert type(found) is type(expected)
        assert np.allclose(framework.numpy(found), framework.numpy(expected), rtol=1e-6)
    with pytest.raises(TypeError, match="slopes must have a real floating dtype"):
        alibi_core.bias(np.arange(3), 3, xp=framework.xp)


@pytest.mark.parametrize("framework", [x for x in FRAMEWORKS if x.values[0] in (NUMPY, JAX, MLX)])
@pytest.mark.parametrize("name", ["q_offset", "q_len", "kv_len"])
def test_arrays_for_integers_of_a_bias_are_refused_with_the_way_out(framework: Framework, name: str) -> None:
    sizes = {"q_len": 1, "kv_len": 3}
    call = framework.compiled(lambda x: alibi_core.bias(2, **sizes | {name: x}, xp=framework.xp))
    told = r"; int\(\) of an array is one, and a compiled function must take it as a static argument"
    told += ", or give bias_from_positions the positions, which may be traced" if name == "q_offset" else ""
    with pytest.raises(TypeError, match=f"{name} must be an integer, got .*{told}"):
        call(framework.array(np.asarray(2, np.int32)))


def test_an_array_that_mlx_traces_is_not_called_an_integer_of_many_digits() -> None:
    mx = pytest.importorskip("mlx.core")
    with pytest.raises(TypeError, match=r"q_offset must be an integer, got an array of no value yet \(array\)"):
        mx.compile(lambda offset: alibi_core.bias(2, 1, 3, q_offset=offset, xp=mx))(mx.array(2))
    with pytest.raises(ValueError, match="q_offset an integer of thousands of digits, q_len 1"):
        alibi_core.bias(2, 1, 3, q_offset=10**5000)


def test_mlx_is_refused_a_device() -> None:
    mx = pytest.importorskip("mlx.core")
    with pytest.raises(ValueError, match="device must be None with MLX"):
        alibi_core.bias(2, 3, xp=mx, device="gpu")


LAYER = [
    Bad({"embed_dim": 0}, ValueError, "embed_dim must be at least 1"),
    Bad({"embed_dim": 24.0}, TypeError, "embed_dim must be an integer"),
    Bad({"num_heads": True}, TypeError, "num_heads must be an integer"),
    Bad({"num_heads": 5}, ValueError, "num_heads must divide embed_dim, 24, got 5"),
    Bad({"num_kv_heads": 4}, ValueError, "num_kv_heads must divide num_heads, 6, got 4"),
    Bad({"head_dim": 0}, ValueError, "head_dim must be at least 1"),
    Bad({"slopes": floats(5)}, ValueError, r"slopes must have shape \(6,\)"),
    Bad({"slopes": -floats(6)}, ValueError, "slopes must not be negative", is_about_values=True),
    Bad({"slopes": ints(6)}, TypeError, "slopes must have a real floating dtype, got .*int"),
    Bad({"is_causal": False, "future_slopes": ints(6)}, TypeError, "future_slopes must have a real floating dtype"),
    Bad({"slopes": floats(6) * 0, "learnable_slopes": True}, ValueError, "slopes must be positive to be learned"),
    Bad({"future_slopes": floats(6)}, ValueError, "future_slopes must be None when is_causal=True"),
    Bad({"window_size": -2}, ValueError, "window_size must not be negative"),
    Bad({"dropout": 1.0}, ValueError, r"dropout must be in \[0, 1\), got 1.0"),
    Bad({"dropout": NAN}, ValueError, "dropout must be finite"),
    Bad({"implementation": "fastest"}, ValueError, "implementation must be one of"),
    Bad({"is_causal": 0}, TypeError, "is_causal must be True or False"),
    Bad({"bias": "no"}, TypeError, "bias must be True or False"),
]


def test_a_bias_on_two_devices_is_refused() -> None:
    torch = pytest.importorskip("torch")
    slopes, positions = torch.ones(2), torch.arange(3)
    far = {name: x.to("meta") for name, x in (("slopes", slopes), ("positions", positions))}
    with pytest.raises(ValueError, match="slopes must be on the device of the result, meta, got cpu"):
        alibi_core.bias(slopes, 3, device="meta")
    with pytest.raises(ValueError, match="future_slopes must be on the device of the result, cpu, got meta"):
        alibi_core.bias(slopes, 3, is_causal=False, future_slopes=far["slopes"])
    with pytest.raises(ValueError, match="slopes must be on the device of the result, meta, got cpu"):
        alibi_core.bias_from_positions(slopes, far["positions"], far["positions"])
    with pytest.raises(ValueError, match="kv_positions must be on the device of q_positions, cpu, got meta"):
        alibi_core.bias_from_positions(slopes, positions, far["positions"])


MODULES = [("AlibiAttention", {"embed_dim": 24, "num_heads": 6}, x) for x in LAYER]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("kind", "arguments", "bad"), MODULES, ids=lambda x: x.id() if isinstance(x, Bad) else "")
def test_modules_refuse(name: str, kind: str, arguments: dict[str, Any], bad: Bad) -> None:
    refuse(bad, lambda: make_module(name, kind, **FRAMEWORK[name].placed(arguments | bad.arguments)))
