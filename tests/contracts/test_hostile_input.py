"""Hostile input: whatever is passed for any argument is refused in this library's words, or means what it says."""

from __future__ import annotations

import importlib
import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from tests.support.frameworks import FRAMEWORKS, NUMPY, STRICT, Framework

LONGDOUBLES = np.dtype(np.longdouble).itemsize > 8
ITEMS: dict[str, Any] = {
    **{"none": None, "string": "abc", "bytes": b"x", "dict": {}, "object": object(), "type": float, "function": len},
    **{"list": [1.0, 2.0], "nested": [[1, 2], [3, 4]], "tuple": (1, 2), "no tuple": (), "iterator": iter([])},
    **{"true": True, "false": False, "numpy true": np.True_, "numpy string": np.str_("x")},
    **{
        "zero": 0,
        "minus one": -1,
        "two": 2,
        "2**40": 2**40,
        "-2**40": -(2**40),
        "10**30": 10**30,
        "10**5000": 10**5000,
    },
    **{"half": 0.5, "nan": float("nan"), "inf": float("inf"), "complex": 1j, "1e39": 1e39},
    **{
        "int8": np.int8(2),
        "uint64": np.uint64(2**63 + 1),
        "float32": np.float32(0.5),
        "float16 nan": np.float16("nan"),
    },
    **({"longdouble": np.longdouble("1e4000")} if LONGDOUBLES else {}),
}
DTYPES = ("bool", "int8", "uint16", "uint32", "int64", "uint64", "float16", "float32", "float64", "complex64")


def hostile_values(framework: Framework, like: Any) -> dict[str, Any]:
    """Return hostile values of an argument, by name; ``like`` is a good value."""
    shape = tuple(like.shape) if hasattr(like, "dtype") else (2,)
    values = dict(ITEMS)
    for dtype in DTYPES:
        lacking = {"jax": ("int64", "uint64", "float64"), "mlx": ("float64",), "array_api_strict": ("float16",)}
        if dtype not in lacking.get(framework.name, ()):
            for size in {(), (0,), (2,), shape}:
                array = framework.array(np.ones(size, dtype), "float64" if dtype == "float64" else None)
                values[f"{dtype} {size}"] = array
    stranger = NUMPY if framework is STRICT else STRICT
    values["of another library"] = stranger.array(np.ones(shape, np.float32))
    return values | _OWN.get(framework.name, lambda shape: {})(shape)


def _numpy_values(shape: tuple[int, ...]) -> dict[str, Any]:
    values = {"objects": np.ones(shape, object), "strings": np.full(shape, "a"), "dates": np.zeros(shape, "M8[s]")}
    values |= {"masked": np.ma.masked_array(np.ones(shape, np.float32)), "other bytes": np.ones(shape, ">f4")}
    return values | ({"longdoubles": np.ones(shape, np.longdouble)} if LONGDOUBLES else {})


def _torch_values(shape: tuple[int, ...]) -> dict[str, Any]:
    import torch

    ones = torch.ones(shape)
    values = {"sparse": ones.to_sparse(), "elsewhere": ones.to("meta"), "dtype": torch.float8_e4m3fn}
    return values | {"float8": ones.to(torch.float8_e4m3fn)}


def _jax_values(shape: tuple[int, ...]) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp

    names = ("float8_e4m3fn", "int4")
    return {name: jnp.ones(shape).astype(getattr(jnp, name)) for name in names} | {"random key": jax.random.key(0)}


_OWN = {"numpy": _numpy_values, "torch": _torch_values, "jax": _jax_values}


@dataclass(frozen=True)
class Subject:
    """A public function, arguments it takes, and which of them (or what in their place) is replaced."""

    module: str
    function: str
    arguments: dict[str, Any]
    others: tuple[str, ...] = ()

    def id(self) -> str:
        return f"{self.module}.{self.function}"


def _tensors(*axes: int) -> dict[str, Any]:
    query, key = ((*axes[:1], heads, length, 4) for heads, length in ((4, 3), (2, 5)))
    return {name: np.ones(shape, np.float32) for name, shape in (("query", query), ("key", key), ("value", key))}


SLOPES, POSITIONS = np.full(4, 0.5, np.float32), np.arange(3, dtype=np.int32)
RULES = (
    "future_slopes",
    "segment_ids",
    "window_size",
    "mask",
    "scale",
    "allow_negative_slopes",
    "is_causal",
    "q_offset",
)
BIAS = ("is_causal", "future_slopes", "allow_negative_slopes", "contract", "dtype")
PLACE = ("xp", "device")
SUBJECTS = (
    Subject("alibi_core", "attention", _tensors(2) | {"slopes": SLOPES}, RULES),
    *(
        Subject(f"alibi_{name}", "attention", _tensors(2) | {"slopes": SLOPES}, (*RULES, "tolerance", "implementation"))
        for name in ("torch", "jax", "mlx")
    ),
    Subject("alibi_core", "slopes", {"num_heads": 4}, ("scheme", "bias_max", "contract", "dtype", *PLACE)),
    Subject("alibi_core", "bias", {"slopes": SLOPES, "q_len": 2}, ("kv_len", "q_offset", *BIAS, *PLACE)),
    Subject("alibi_core", "key_bias", {"slopes": SLOPES, "kv_len": 2}, ("contract", "dtype", *PLACE)),
    Subject(
        "alibi_core",
        "bias_from_positions",
        {"slopes": SLOPES}
        | dict.fromkeys(("q_positions", "kv_positions", "q_segment_ids", "kv_segment_ids"), POSITIONS),
        BIAS,
    ),
    Subject("alibi_core", "horizon", {"slopes": SLOPES, "score_range": SLOPES}, ("tolerance", "is_causal")),
    Subject(
        "alibi_core",
        "fold",
        {"query": np.ones((4, 3, 4), np.float32), "key": np.ones((2, 3, 4), np.float32), "slopes": SLOPES},
        ("scale", "head_dim"),
    ),
    Subject(
        "alibi_core",
        "fold_error_bound",
        {"slopes": SLOPES, "kv_len": 5, "head_dim": 4, "dtype": "float32"},
        ("q_len",),
    ),
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
    """Whether a message is of the library's form, and says which argument is meant, or which do not go together."""
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
        given |= {
            name: framework.array(np.swapaxes(subject.arguments[name], 1, 2)) for name in ("query", "key", "value")
        }
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
