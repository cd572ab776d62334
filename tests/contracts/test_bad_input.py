"""Bad input: every function names the argument and the rule, and the remedy if it is known, before it computes."""

from __future__ import annotations

import importlib
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
    LIBRARIES,
    MLX,
    NAMES,
    NUMPY,
    TORCH,
    Backend,
    Framework,
)
from tests.support.layers import make_layer

NAN = float("nan")


@dataclass(frozen=True)
class Bad:
    """Arguments that must be refused. Arrays are NumPy's here; the test moves them into the framework."""

    arguments: dict[str, Any]
    error: type[Exception]
    message: str
    is_about_values: bool = False  # Dask's values are lazy, so no check reads them

    def id(self) -> str:
        return "-".join(self.arguments) + "-" + "".join(c for c in self.message[:40] if c.isalnum() or c == " ")


def value(message: str, **arguments: Any) -> Bad:
    return Bad(arguments, ValueError, message)


def kind(message: str, **arguments: Any) -> Bad:
    return Bad(arguments, TypeError, message)


def number(message: str, **arguments: Any) -> Bad:
    return Bad(arguments, ValueError, message, is_about_values=True)


def floats(*shape: int) -> np.ndarray:
    return np.ones(shape, dtype=np.float32)


def slopes_of(*values: float) -> np.ndarray:
    return np.asarray(values, dtype=np.float32)


def ints(*shape: int) -> np.ndarray:
    return np.zeros(shape, dtype=np.int32)


def bools(*shape: int) -> np.ndarray:
    return np.ones(shape, dtype=bool)


GRID = ints(5, 2), ints(7, 2)
COLUMNS = bools(2, 1), ints(2, 1), bools(2, 1, 5, 1), ints(6, 5, 1)  # one value for all keys
# Query [2, 6, 5, 8], key and value [2, 3, 7, 8] unless replaced; heads first, whatever the backend's layout.
ATTENTION = [
    value(r"query must have axes \[.*heads.*\], got shape \(5, 8\)", query=floats(5, 8)),
    value(r"key must have the batch axes of query, \(3,\), got \(2,\)", query=floats(3, 6, 5, 8)),
    value("key must have the head_dim of query, 4, got 8", query=floats(2, 6, 5, 4)),
    value(r"num_kv_heads must divide num_heads, got 3 .* and 4 .* axes are \[", query=floats(2, 4, 5, 8)),
    value(r"num_heads must be at least 1, got query of shape .* \[.*heads", query=floats(2, 0, 5, 8)),
    value(r"num_kv_heads must be at least 1, got key of shape .* \[", key=floats(2, 0, 7, 8), value=floats(2, 0, 7, 8)),
    value("scale must be finite in float32", scale=1e39),
    value("value must have the shape of key", key=floats(2, 3, 4, 8)),
    value("value must have the shape of key", value=floats(2, 3, 7, 4)),
    kind("slopes must be an array, got .*numpy.asarray, or that of your framework", slopes=[0.5] * 6),
    kind(r"slopes must be an array, .*; alibi_core.slopes\(num_heads, scheme=...\)", slopes="linear"),
    value(r"slopes must count the heads of query, 6, got 5; its axes are \[.*heads.*\]", slopes=5),
    value(r"slopes must have shape \(6,\) .*, got \(3,\); query's axes are \[", slopes=floats(3)),
    value(r"slopes must have shape \(6,\).* or \(2, 6\).*, got \(3, 6\)", slopes=floats(3, 6)),
    number("slopes must not be negative .* allow_negative_slopes", slopes=slopes_of(1, 1, -1, 1, 1, 1)),
    number("slopes must be finite", slopes=slopes_of(1, 1, NAN, 1, 1, 1)),
    number("slopes must be finite", slopes=slopes_of(1, 1, np.inf, 1, 1, 1)),
    number("slopes must be at most 1.585e.29 in size", slopes=np.full(6, 2e29)),
    value("future_slopes must be None when is_causal=True .* is_causal=False", future_slopes=floats(6)),
    value("future_slopes must be an array.* zeros gives the clamped", is_causal=False, future_slopes=0),
    value(r"future_slopes must have shape \(6,\)", is_causal=False, future_slopes=floats(5)),
    number("future_slopes must not be negative", is_causal=False, future_slopes=-floats(6)),
    value("q_offset and lengths must stay within 2147483647 tokens", q_offset=2**31),
    value(r"q_offset must have shape \(\) or \(2,\)", q_offset=ints(3)),
    value("segment_ids must be a pair .* when q_len, 5, and kv_len, 7, differ", segment_ids=ints(2, 7)),
    value("segment_ids must be one array or a pair .*, got 3", segment_ids=(ints(2, 5),) * 3),
    value(r"segment_ids must broadcast to \(2, 7\)", segment_ids=(ints(2, 5), ints(2, 6))),
    value("segment_ids must end in the axis kv_len, 7", segment_ids=(ints(2, 5), ints(2, 1))),
    kind("segment_ids must have an integer dtype", segment_ids=(floats(2, 5), floats(2, 7))),
    value("window_size must not be negative, got -1; None is for no window", window_size=-1),
    value(r"mask must broadcast to \(2, 6, 5, 7\) \(batch, num_heads, q_len, kv_len\)", mask=bools(4, 7)),
    value("mask must broadcast to", mask=bools(1, 2, 6, 5, 7)),
    value(r"mask must have at least the axis kv_len, got shape \(\)", mask=bools()),
    *(value(r"mask must have all 7 keys .*, those of earlier tokens too, got \(.*, 1\); ", mask=x) for x in COLUMNS),
    value(r"mask of integers must broadcast to \(2, 7\) \(batch, kv_len\), got \(5, 7\)", mask=ints(5, 7)),
    number("mask must be .* got other integers; .* segment_ids", mask=ints(2, 7) + 2),
    value("positions must be a pair .* when q_len, 5, and kv_len, 7, differ", positions=ints(2, 7)),
    value(r"positions must have axes \[batch, kv_len\] or .*dims", positions=(ints(2, 5), ints(2, 6))),
    value("as many dims, got 2 .* and 3", positions=(ints(2, 5, 2), ints(2, 7, 3)), is_causal=False),
    value("is_causal must be False for positions with 2 dims", positions=GRID),
    value(
        "future_slopes must be None for positions with 2 dims", positions=GRID, is_causal=False, future_slopes=floats(6)
    ),
    value("q_offset must be None with positions", positions=(ints(5), ints(7)), q_offset=2),
    value("window_size must be None with positions", positions=(ints(5), ints(7)), window_size=2),
    number(r"must be finite and at most 2\*\*62 .* got inf", positions=(floats(5) * np.inf, ints(7))),
    number(r"must be finite and at most 2\*\*62 .* got 1e\+19", positions=(floats(5) + 1e19, ints(7))),
    kind("positions must have an integer or a real floating dtype", positions=(bools(5), ints(7))),
    kind("added_bias must be floating, got .*bool; booleans are a mask", added_bias=bools(5, 7)),
    value("added_bias must broadcast to", added_bias=floats(3, 1, 7)),
    value(r"added_bias must have all 7 keys in its last axis.*, got \(5, 1\)", added_bias=floats(5, 1)),
    value("distance must be one of 'manhattan', .*, got 'cosine'", distance="cosine"),
    value("law must be one of 'linear', 'log', 'sqrt', got 'square'", law="square"),
]
OF_BACKENDS = [
    *ATTENTION,
    value("tolerance must not be negative", tolerance=-1e-3),
    value("implementation must be one of .*'dense'.*, got 'fastest'", implementation="fastest"),
]


OF_TORCH = [
    *(value("max_key_norm must not be negative, got .*-1.0", max_key_norm=x) for x in (-1.0, -floats(2, 3))),
    *(value("max_key_norm must be finite", max_key_norm=x) for x in (NAN, float("inf"))),
    kind("max_key_norm must", max_key_norm="1"),
    value(r"max_key_norm must .* of shape \(2, 3\) \(batch, num_kv_heads\), got .*\(2,\)", max_key_norm=floats(2)),
    value("max_key_norm must be .* floating .* got torch.int32", max_key_norm=ints(2, 3)),
    value("kernel_options must be None without implementation='flex', got", kernel_options={"BACKEND": "FLASH"}),
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


# One check for all implementations of a library, before one is chosen.
OF_EACH = refusals(BACKENDS[:1], ATTENTION) + refusals(LIBRARIES, OF_BACKENDS) + refusals(LIBRARIES[:1], OF_TORCH)


@pytest.mark.parametrize(("backend", "bad"), OF_EACH)
def test_attention_refuses(backend: Backend, bad: Bad) -> None:
    refuse(bad, lambda: call_attention(backend, bad.arguments))


@pytest.mark.parametrize("backend", [b for b in BACKENDS if b.values[0].implementation in (None, "dense")])
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


def test_positions_that_may_be_mistaken_are_refused_but_not_a_single_one() -> None:
    def attention(length: int, positions: np.ndarray) -> np.ndarray:
        tensors = np.random.default_rng(1).standard_normal((3, length, 2, length, 4))  # as many texts as tokens
        return alibi_core.attention(*tensors, positions=positions, is_causal=False)

    places = np.arange(9.0).reshape(3, 3)
    with pytest.raises(ValueError, match=r"positions must .* mistaken, got \(3, 3\) .*use positions\[\.\.\., None\]"):
        attention(3, places)
    for spelled in (places[..., None], places[None]):
        attention(3, spelled)
    np.testing.assert_array_equal(attention(1, places[:1, :1]), attention(1, places[:1, :1, None]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_attention_refuses_arrays_of_another_library(backend: Backend) -> None:
    stranger = TORCH if backend.framework is NUMPY else NUMPY
    function, array = importlib.import_module(backend.module).attention, backend.framework.array
    arguments = {"query": floats(1, 3, 3, 4), "key": floats(1, 3, 3, 4), "value": floats(1, 3, 3, 4)}
    arguments |= {"slopes": floats(3), "mask": bools(3, 3)}
    for name, values in arguments.items():
        mixed = {other: array(x) for other, x in arguments.items()} | {name: stranger.array(values)}
        # Calls of every library take slopes of NumPy, and those of JAX any constants.
        if stranger is NUMPY and (name == "slopes" or (name == "mask" and backend.framework is JAX)):
            as_numpy = values.astype(np.float64) if name == "slopes" else values
            one, other = (function(**mixed | {name: x}) for x in (as_numpy, array(values)))
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


SLOPES = [
    value("num_heads must be at least 1, got 0", num_heads=0),
    value("num_heads must be at least 1, got -3", num_heads=-3),
    value("num_heads must be at most 1048576, got 2097152", num_heads=2**21),
    value("scheme must be one of 'canonical', 'geometric', 'linear', got 'paper'", scheme="paper"),
    value("bias_max must be positive, got 0", bias_max=0),
    value("bias_max must be positive", bias_max=-8.0),
    value("bias_max must be left at 8 with scheme 'linear'", bias_max=16, scheme="linear"),
]


COMMON_BIAS = [
    value("num_heads must be at least 1, got 0", slopes=0),
    value(r"slopes must have shape \(\.\.\., num_heads\)", slopes=floats()),
    value(r"slopes must have shape \(\.\.\., num_heads\)", slopes=floats(0)),
    number("slopes must not be negative", slopes=slopes_of(0.5, -0.5)),
    number("slopes must be finite", slopes=slopes_of(0.5, NAN)),
]
BIAS = [
    *COMMON_BIAS,
    value("future_slopes must be None when is_causal=True", future_slopes=floats(2)),
    value(r"future_slopes must have the shape of slopes", is_causal=False, future_slopes=floats(3)),
    value(r"future_slopes must be an array, or 2 \(num_heads\) .*, got 3", is_causal=False, future_slopes=3),
    number("future_slopes must not be negative", is_causal=False, future_slopes=-floats(2)),
]
KV_LEN = value("kv_len must not be negative", kv_len=-1)
POSITIONS = [
    *BIAS,
    value("kv_positions must have at least one axis", kv_positions=ints()),
    value(r"leading axes must broadcast, got .*\(2,\)", q_positions=ints(2, 3), kv_positions=ints(4, 3)),
    value("leading axes must broadcast", slopes=floats(4, 2), q_positions=ints(3, 3)),
    value("q_segment_ids and kv_segment_ids must be given together", q_segment_ids=ints(3)),
    value("kv_segment_ids must broadcast to", q_segment_ids=ints(3), kv_segment_ids=ints(4)),
    value("q_segment_ids must end in the axis q_len, 3", q_segment_ids=ints(1), kv_segment_ids=ints(3)),
    kind("q_segment_ids must have an integer dtype", q_segment_ids=floats(3), kv_segment_ids=ints(3)),
]
HORIZON = [
    value("slopes must be at least 1, got 0|num_heads must be at least 1, got 0", slopes=0),
    value(r"slopes must have shape \(..., num_heads\).*, got \(\)", slopes=np.asarray(0.5, np.float32)),
    number("slopes must be finite", slopes=floats(3) * NAN),
    value("score_range must be finite, got nan", score_range=NAN),
    value("tolerance must not be negative, got -0.001", tolerance=-1e-3),
    value("tolerance must be finite, got nan", tolerance=NAN),
    kind("is_causal must be True or False, got 1", is_causal=1),
]
# Functions of the core, arguments that they take, and changes that they refuse.
CORE = {
    "slopes": ({"num_heads": 8}, SLOPES),
    "bias": ({"slopes": floats(2), "q_len": 3}, [*BIAS, KV_LEN, value("q_len must not be .*, got -1", q_len=-1)]),
    "key_bias": ({"slopes": floats(2), "kv_len": 3}, [*COMMON_BIAS, KV_LEN]),
    "bias_from_positions": ({"slopes": floats(2), "q_positions": ints(3), "kv_positions": ints(3)}, POSITIONS),
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
    with pytest.raises(TypeError, match="one array .*, got numpy and torch; make .* arrays of numpy, by numpy.asarray"):
        alibi_core.bias(torch.ones(2), 3, xp=np)
    with pytest.raises(TypeError, match="arrays must belong to one array namespace, got numpy and torch"):
        alibi_core.bias_from_positions(2, np.arange(3), torch.arange(3))


def test_arrays_on_two_devices_are_refused() -> None:
    torch = pytest.importorskip("torch")
    near, far = torch.ones(3), torch.ones(3, device="meta")
    tensors = {name: torch.ones(1, 3, 2, 4) for name in ("query", "key", "value")}
    tensors |= {"slopes": near, "mask": torch.ones(2, 2, dtype=torch.bool)}
    for name in ("key", "slopes", "mask"):
        with pytest.raises(ValueError, match=f"{name} must be on the device of query, cpu, got meta"):
            alibi_core.attention(**tensors | {name: tensors[name].to("meta")})
    with pytest.raises(ValueError, match="slopes must be on the device of the result, meta, got cpu"):
        alibi_core.bias(near, 3, device="meta")
    with pytest.raises(ValueError, match="future_slopes must be on the device of the result, cpu, got meta"):
        alibi_core.bias(near, 3, is_causal=False, future_slopes=far)
    with pytest.raises(ValueError, match="slopes must be on the device of the result, meta, got cpu"):
        alibi_core.bias_from_positions(near, far.int(), far.int())
    with pytest.raises(ValueError, match="kv_positions must be on the device of q_positions, cpu, got meta"):
        alibi_core.bias_from_positions(near, near.int(), far.int())


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
    if framework in (TORCH, JAX, MLX):
        attention, square = importlib.import_module(f"alibi_{framework.name}").attention, tensor[:, :3]  # any layout
        calls += (lambda x: attention(square, square, square, x, is_causal=False, future_slopes=x),)
    for call in calls:
        expected = call(framework.array(np.float32(numbers)))
        for slopes in (numbers, numbers.astype(np.float32), numbers.astype(">f4")):
            found = call(slopes)
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


def test_mlx_is_told_of_traced_integers_and_of_devices() -> None:
    mx = pytest.importorskip("mlx.core")
    with pytest.raises(TypeError, match=r"q_offset must be an integer, got an array of no value yet \(array\)"):
        mx.compile(lambda offset: alibi_core.bias(2, 1, 3, q_offset=offset, xp=mx))(mx.array(2))
    with pytest.raises(ValueError, match="device must be None with MLX"):
        alibi_core.bias(2, 3, xp=mx, device="gpu")


LAYER = [
    value("embed_dim must be at least 1", embed_dim=0),
    kind("embed_dim must be an integer", embed_dim=24.0),
    kind("num_heads must be an integer", num_heads=True),
    value("num_heads must divide embed_dim, 24, got 5", num_heads=5),
    value("num_kv_heads must divide num_heads, 6, got 4", num_kv_heads=4),
    value("head_dim must be at least 1", head_dim=0),
    value(r"slopes must have shape \(6,\)", slopes=floats(5)),
    number("slopes must not be negative", slopes=-floats(6)),
    kind("slopes must have a real floating dtype, got .*int", slopes=ints(6)),
    kind("future_slopes must have a real floating dtype", is_causal=False, future_slopes=ints(6)),
    value("slopes must be positive to be learned", slopes=floats(6) * 0, learnable_slopes=True),
    value("future_slopes must be None when is_causal=True", future_slopes=floats(6)),
    value("window_size must not be negative", window_size=-2),
    value(r"dropout must be in \[0, 1\), got 1.0", dropout=1.0),
    value("dropout must be finite", dropout=NAN),
    value("implementation must be one of", implementation="fastest"),
    kind("is_causal must be True or False", is_causal=0),
    kind("bias must be True or False", bias="no"),
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", LAYER, ids=Bad.id)
def test_a_layer_refuses(name: str, bad: Bad) -> None:
    arguments = {"embed_dim": 24, "num_heads": 6} | bad.arguments
    refuse(bad, lambda: make_layer(name, **FRAMEWORK[name].placed(arguments)))


@pytest.mark.parametrize(
    "backend", [x for x in LIBRARIES if x.id != "torch"]
)  # PyTorch's compiler reads no NumPy values
def test_slopes_of_numpy_are_checked_in_a_compiled_function_too(backend: Backend) -> None:
    framework, slopes = backend.framework, np.asarray([0.5, -0.5, 0.25], np.float32)
    x = framework.array(np.ones((1, 3, 3, 4), np.float32))
    for call in (backend.function(), alibi_core.attention):
        with pytest.raises(ValueError, match="slopes must not be negative"):
            framework.compiled(lambda x, call=call: call(x, x, x, slopes))(x)
