"""Hostile input: any value of any argument is refused in this library's words, or taken for what it is."""

from __future__ import annotations

import importlib
import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from tests.support.frameworks import FRAMEWORKS, NUMPY, STRICT, Framework

LONGDOUBLES = np.dtype(np.longdouble).itemsize > 8
VALUES = (
    *(None, "abc", b"x", {}, object(), float, len, [1.0, 2.0], [[1, 2], [3, 4]], (1, 2), (), iter([])),
    *(True, False, np.True_, np.str_("x"), 0, -1, 2, 2**40, -(2**40), 10**30, 0.5, 1j, 1e39),
    *(float("nan"), float("inf"), np.int8(2), np.uint64(2**63 + 1), np.float32(0.5), np.float16("nan")),
    *([np.longdouble("1e4000")] if LONGDOUBLES else []),
)
ITEMS = {f"{type(x)} {x}": x for x in VALUES} | {"10**5000": 10**5000}
DTYPES = ("bool", "int8", "uint16", "uint32", "int64", "uint64", "float16", "float32", "float64", "complex64")


LACKING = {"jax": ("int64", "uint64", "float64"), "mlx": ("float64",), "array_api_strict": ("float16",)}


def hostile_values(framework: Framework, like: Any) -> dict[str, Any]:
    """Return hostile values of an argument, by name; ``like`` is a good value."""
    shape = tuple(like.shape) if hasattr(like, "dtype") else (2,)
    values = dict(ITEMS)
    for dtype in set(DTYPES) - set(LACKING.get(framework.name, ())):
        for size in {(), (0,), (2,), shape}:
            array = framework.array(np.ones(size, dtype), "float64" if dtype == "float64" else None)
            values[f"{dtype} {size}"] = array
    stranger = NUMPY if framework is STRICT else STRICT
    values["of another library"] = stranger.array(np.ones(shape, np.float32))
    return values | own_values(framework, shape)


def own_values(framework: Framework, shape: tuple[int, ...]) -> dict[str, Any]:
    """Return hostile arrays that one library alone has."""
    if framework.name == "numpy":
        ones = {"masked": np.ma.masked_array(np.ones(shape, np.float32)), "other bytes": np.ones(shape, ">f4")}
        ones |= {"longdoubles": np.ones(shape, np.longdouble)} if LONGDOUBLES else {}
        return ones | {
            "objects": np.ones(shape, object),
            "strings": np.full(shape, "a"),
            "dates": np.zeros(shape, "M8[s]"),
        }
    xp = framework.xp
    if framework.name == "torch":
        ones, float8 = xp.ones(shape), xp.float8_e4m3fn
        return {"sparse": ones.to_sparse(), "elsewhere": ones.to("meta"), "dtype": float8, "float8": ones.to(float8)}
    if framework.name == "jax":
        arrays = {name: xp.ones(shape).astype(getattr(xp, name)) for name in ("float8_e4m3fn", "int4")}
        return arrays | {"random key": importlib.import_module("jax").random.key(0)}
    return {}


@dataclass(frozen=True)
class Subject:
    """A public function, its arguments here, and the names of others; each of all of these is replaced."""

    module: str
    function: str
    arguments: dict[str, Any]
    others: tuple[str, ...] = ()

    def id(self) -> str:
        return f"{self.module}.{self.function}"


SLOPES, POSITIONS = np.full(4, 0.5, np.float32), np.arange(3, dtype=np.int32)
SHAPES = {"query": (2, 4, 3, 4), "key": (2, 2, 5, 4), "value": (2, 2, 5, 4)}
TENSORS = {name: np.ones(shape, np.float32) for name, shape in SHAPES.items()} | {"slopes": SLOPES}
RULES = ("future_slopes", "segment_ids", "window_size", "mask", "scale", "allow_negative_slopes", "is_causal")
RULES += ("q_offset",)
BIAS = ("is_causal", "future_slopes", "allow_negative_slopes", "contract", "dtype")
PLACE = ("xp", "device")
BY_POSITION = ("q_positions", "kv_positions", "q_segment_ids", "kv_segment_ids")
FOLDED = {"query": np.ones((4, 3, 4), np.float32), "key": np.ones((2, 3, 4), np.float32), "slopes": SLOPES}
BOUND = {"slopes": SLOPES, "kv_len": 5, "head_dim": 4, "dtype": "float32"}
SUBJECTS = (
    Subject("alibi_core", "attention", TENSORS, RULES),
    *(
        Subject(f"alibi_{name}", "attention", TENSORS, (*RULES, "tolerance", "implementation"))
        for name in ("torch", "jax", "mlx")
    ),
    Subject("alibi_core", "slopes", {"num_heads": 4}, ("scheme", "bias_max", "contract", "dtype", *PLACE)),
    Subject("alibi_core", "bias", {"slopes": SLOPES, "q_len": 2}, ("kv_len", "q_offset", *BIAS, *PLACE)),
    Subject("alibi_core", "key_bias", {"slopes": SLOPES, "kv_len": 2}, ("contract", "dtype", *PLACE)),
    Subject("alibi_core", "bias_from_positions", {"slopes": SLOPES} | dict.fromkeys(BY_POSITION, POSITIONS), BIAS),
    Subject("alibi_core", "horizon", {"slopes": SLOPES, "score_range": SLOPES}, ("tolerance", "is_causal")),
    Subject("alibi_core", "fold", FOLDED, ("scale", "head_dim")),
    Subject("alibi_core", "fold_error_bound", BOUND, ("q_len",)),
    Subject("alibi_core", "fold_size", {"kv_len": 5, "dtype": "float32"}),
)


def plain(framework: Framework, value: Any) -> Any:
    """Return the plain form of a value that was accepted: Python's number, or an array of the most common dtype."""
    if isinstance(value, np.generic):
        return value.item()
    if not hasattr(value, "shape") or isinstance(value, np.dtype):
        return value
    is_floating = "float" in getattr(value.dtype, "name", str(value.dtype)) or "longdouble" in str(value.dtype)
    return framework.array(np.ones(tuple(value.shape), np.float32 if is_floating else np.int32))


def is_ours(name: str, message: str) -> bool:
    """Whether a message has the library's form, and names the argument, or the arguments that do not fit together."""
    named, rule, _ = message.partition(" must ")
    together = ("arrays", "query, key and value", "num_kv_heads", "num_heads", "head_dim", "key", "value", "kv_len")
    together += ("dtype", "leading axes", "score_range", "kv_positions", "q_segment_ids", "kv_segment_ids")
    return bool(rule) and (name in named or named.startswith(together) or ("lengths" in named and "len" in name))


def result(framework: Framework, subject: Subject, arguments: dict[str, Any]) -> list[np.ndarray]:
    results = getattr(importlib.import_module(subject.module), subject.function)(**arguments)
    results = results if isinstance(results, tuple) else (results,)
    is_ours = type(framework.array(np.ones(1)))
    on_host = [x for x in results if "meta" not in str(getattr(x, "device", ""))]
    return [framework.numpy(x) if isinstance(x, is_ours) else np.asarray(x) for x in on_host]


def cases() -> list[Any]:
    """Return each function with each library whose arrays it takes; slow in JAX, which compiles."""
    found = []
    for subject, framework in itertools.product(SUBJECTS, FRAMEWORKS):
        if framework.id != "dask" and subject.module in ("alibi_core", f"alibi_{framework.id}"):
            name = f"{subject.id()}-{framework.id}"
            marks = [*framework.marks, *([pytest.mark.slow] if framework.id == "jax" else [])]
            found.append(pytest.param(subject, *framework.values, id=name, marks=marks))
    return found


@pytest.mark.parametrize(("subject", "framework"), cases())
def test_any_value_of_any_argument_is_refused_in_our_words_or_means_what_it_says(
    framework: Framework, subject: Subject
) -> None:
    given = framework.placed(subject.arguments)
    if subject.module == "alibi_jax":
        given |= {name: framework.array(np.swapaxes(subject.arguments[name], 1, 2)) for name in SHAPES}
    if subject.function == "slopes":
        given["xp"] = framework.xp
    wrong = []
    for name in (*subject.arguments, *subject.others):
        like = given[name] if name in subject.arguments else None
        for kind, value in hostile_values(framework, like).items():
            try:
                got = result(framework, subject, given | {name: value})
            except (TypeError, ValueError, NotImplementedError) as error:
                wrong += [] if is_ours(name, str(error)) else [f"{name}, {kind}: {error}"]
                continue
            except Exception as error:
                wrong.append(f"{name}, {kind}: {type(error).__name__} {error}")
                continue
            meant = plain(framework, value)
            if meant is not value:
                expected = result(framework, subject, given | {name: meant})
                same = all(np.allclose(a, b, rtol=1e-6, atol=0) for a, b in zip(got, expected, strict=False))
                wrong += [] if same else [f"{name}, {kind}: taken for another number"]
    assert not wrong, "\n".join(wrong)
