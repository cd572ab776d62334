"""The table of capabilities: each function with each library, by itself, compiled and mapped, gives NumPy's numbers.

array-api-strict stands for the standard of 2025.12 alone: its strictest profile, on a second device as well.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import alibi_core
from alibi_core.capabilities import LIBRARIES, Library
from tests.support.frameworks import JAX, NUMPY, OF_CAPABILITIES, STRICT, Backend, Framework
from tests.support.frameworks import LIBRARIES as BACKENDS

RNG = np.random.default_rng(0)
QUERY, KEY, VALUE = (RNG.standard_normal((2, h, n, 5)).astype(np.float32) for h, n in ((4, 3), (2, 7), (2, 7)))
SLOPES, FUTURE = np.float32([0.5, 0.25, 0.1, 0.01]), np.float32([0.0, 0.3, 0.70710678, 1.0])
POINTS = RNG.integers(-5, 5, (7, 2)).astype(np.float32)
IDS = np.asarray([[0, 0, 1, 1, 1, 2, 2], [3, 3, 3, 3, 4, 4, 4]])
POSITIONS = np.asarray([0, 1, 0, 1, 2, 0, 1])
GATES = np.where(RNG.random((4, 7)) < 0.2, -np.inf, -RNG.random((4, 7))).astype(np.float32)
OFFSETS, MASK = np.asarray([2, -1]), RNG.random((2, 1, 3, 7)) < 0.5
FAR: dict[str, Any] = {"is_causal": False, "q_offset": 1_000_000}

# Each is a function of the core, arrays that it takes first, and what else it takes.
CALLS: dict[str, tuple[Callable[..., Any], tuple[np.ndarray, ...], dict[str, Any]]] = {
    "slopes": (lambda x, xp: alibi_core.slopes(4, xp=xp) * x, (np.float32([1.0, 2.0, 4.0, 0.5]),), {"xp": "numpy"}),
    "bias": (alibi_core.bias, (SLOPES, 3, 7), {}),
    "bias both ways": (alibi_core.bias, (SLOPES, 33, 33), {"is_causal": False, "future_slopes": FUTURE}),
    "bias far from its keys": (alibi_core.bias, (SLOPES, 3, 7), FAR | {"future_slopes": FUTURE}),
    "bias by a law": (alibi_core.bias, (SLOPES, 3, 7), {"law": "log"}),
    "bias_from_positions of falcon": (
        alibi_core.bias_from_positions,
        (4, POSITIONS, POSITIONS),
        {"contract": "falcon"},
    ),
    "bias_from_positions by segment": (
        lambda slopes, x, ids: alibi_core.bias_from_positions(slopes, x, x, q_segment_ids=ids, kv_segment_ids=ids),
        (SLOPES, POSITIONS, IDS),
        {},
    ),
    "bias_from_positions of points": (
        alibi_core.bias_from_positions,
        (SLOPES, POINTS, POINTS),
        {"distance": "manhattan", "is_causal": False},
    ),
    "bias_from_gates": (alibi_core.bias_from_gates, (GATES,), {}),
    "key_bias": (alibi_core.key_bias, (SLOPES, 7), {}),
    "horizon": (alibi_core.horizon, (SLOPES, np.float32([1.0, 2.0, 3.0, 4.0])), {}),
    "fold": (alibi_core.fold, (QUERY, KEY, SLOPES), {}),
    "fold_error_bound": (alibi_core.fold_error_bound, (SLOPES, 7), {"head_dim": 5, "dtype": "float32"}),
    "attention": (alibi_core.attention, (QUERY, KEY, VALUE, SLOPES), {}),
    "attention both ways": (
        alibi_core.attention,
        (QUERY, KEY, VALUE, SLOPES),
        {"is_causal": False, "future_slopes": FUTURE, "window_size": 2},
    ),
    "attention by mask": (alibi_core.attention, (QUERY, KEY, VALUE), {"mask": MASK, "return_weights": True}),
    "attention with gates and sinks": (
        lambda *tensors: alibi_core.attention(*tensors[:3], log_gates=tensors[3], sinks=tensors[4]),
        (QUERY, KEY, VALUE, np.stack([GATES, GATES[:, ::-1]]), SLOPES),
        {},
    ),
    "attention by segment": (alibi_core.attention, (KEY, KEY, VALUE), {"segment_ids": IDS}),
    "attention at offsets": (alibi_core.attention, (QUERY, KEY, VALUE), {"q_offset": OFFSETS}),
    "attention with a bias": (alibi_core.attention, (QUERY, KEY, VALUE), {"added_bias": QUERY[..., :1].repeat(7, -1)}),
}

SAME_BITS = ("slopes", "bias", "bias_from_positions", "key_bias", "fold")
ROUNDED = ("bias by a law", "bias_from_positions of points")  # within one unit
QUICK = ("bias both ways", "bias far from its keys", "bias_from_positions by segment", "attention at offsets")


def ways(library: Library) -> dict[str, str]:
    """Return the ways to call a function, and each as the support page writes it."""
    offered = {"eager": "eager", "compiled": library.compiler and f"`{library.compiler}`"}
    offered["mapped"] = library.vmap and f"`{library.vmap}`"
    return {mode: words for mode, words in offered.items() if words}


def cells() -> Iterator[Any]:
    """Yield each function with each library and way to call it. Where each compiles, all but QUICK are slow."""
    for item in OF_CAPABILITIES:
        framework = item.values[0]
        for mode, name in itertools.product(ways(LIBRARIES[framework.module]), CALLS):
            is_quick = name in QUICK or (mode != "compiled" and framework is not JAX)
            marks = [*item.marks, *([] if is_quick else [pytest.mark.slow])]
            yield pytest.param(name, framework, mode, id=f"{name}-{framework}-{mode}", marks=marks)


def run(name: str, framework: Framework, mode: str = "eager", arrays: tuple[Any, ...] | None = None) -> list[Any]:
    """Return the results of a call in one mode, with its own arrays or others."""
    function, own, arguments = CALLS[name]
    arguments = framework.placed(arguments) | ({"xp": framework.module} if "xp" in arguments else {})
    arrays = framework.placed(own if arrays is None else arrays)
    is_array = [isinstance(x, np.ndarray) for x in own]

    def call(*given: Any) -> Any:
        rest = iter(given)
        return function(*(next(rest) if array else x for array, x in zip(is_array, own, strict=True)), **arguments)

    through = {"eager": lambda x: x, "compiled": framework.compiled, "mapped": framework.mapped}[mode]
    found = through(call)(*(x for array, x in zip(is_array, arrays, strict=True) if array))
    return list(found) if isinstance(found, (tuple, list)) else [found]


def assert_same(name: str, found: np.ndarray, expected: np.ndarray) -> None:
    assert found.dtype == expected.dtype
    if name.partition(" ")[0] in SAME_BITS and name not in ROUNDED:
        np.testing.assert_array_equal(found, expected)
    else:
        np.testing.assert_allclose(found, expected, rtol=2e-6, atol=2e-6 if "attention" in name else 0)


@pytest.mark.parametrize(("name", "framework", "mode"), [*cells()])
def test_a_function_gives_the_numbers_of_numpy(name: str, framework: Framework, mode: str) -> None:
    sets = [CALLS[name][1]]
    if mode == "mapped":
        sets.append(tuple(np.roll(x, 1, -1) if isinstance(x, np.ndarray) else x for x in sets[0]))
        stacked = (np.stack(x) if isinstance(x[0], np.ndarray) else x[0] for x in zip(*sets, strict=True))
        found = [framework.numpy32(x) for x in run(name, framework, mode, tuple(stacked))]
    else:
        found = [framework.numpy32(x)[None] for x in run(name, framework, mode)]
    for one, *each in zip(found, *(run(name, NUMPY, arrays=x) for x in sets), strict=True):
        assert_same(name, one, np.stack(each))


@pytest.fixture
def strictest() -> Iterator[None]:
    """No indexing by booleans, no shape that depends on values."""
    strict = pytest.importorskip("array_api_strict", reason="array_api_strict is not installed")
    with strict.ArrayAPIStrictFlags(api_version="2025.12", boolean_indexing=False, data_dependent_shapes=False):
        yield


class Elsewhere(Framework):
    """array-api-strict, with arrays on its second device."""

    def array(self, values: Any, dtype: str | None = None) -> Any:
        return self.xp.asarray(values, device=self.xp.Device("device1"))

    def numpy32(self, array: Any) -> np.ndarray:
        assert array.device == self.xp.Device("device1")
        return np.asarray(self.xp.asarray(array, device=self.xp.Device("CPU_DEVICE")))


@pytest.mark.parametrize("name", [x for x in CALLS if x != "slopes"])
@pytest.mark.parametrize("kind", [Framework, Elsewhere])
def test_the_standard_is_enough(name: str, kind: type[Framework], strictest: None) -> None:
    framework = kind("array_api_strict", "array_api_strict")
    for one, other in zip(run(name, framework), run(name, NUMPY), strict=True):
        assert_same(name, framework.numpy32(one), other)


def test_slopes_are_made_where_they_are_asked_for(strictest: None) -> None:
    device = STRICT.xp.Device("device1")
    made = (
        alibi_core.slopes(6, xp="array_api_strict", device=device),
        alibi_core.bias(6, 3, xp=STRICT.xp, device=device),
    )
    assert [x.device for x in made] == [device] * 2


class ReadOnly(Framework):
    """NumPy, with arrays that cannot be written to."""

    def array(self, values: Any, dtype: str | None = None) -> Any:
        values = np.array(values)
        values.flags.writeable = False
        return values


@pytest.mark.parametrize("name", CALLS)
def test_arrays_that_cannot_be_written_to_will_do(name: str) -> None:
    for one, other in zip(run(name, ReadOnly("numpy", "numpy")), run(name, NUMPY), strict=True):
        np.testing.assert_array_equal(one, other)


# --- Backends -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mode", ["eager", "compiled", "mapped"])
def test_explain_reads_arrays_by_itself_alone(backend: Backend, mode: str) -> None:
    """PyTorch's compiler reads values where it breaks its graph: there it is the compiler that refuses."""
    framework = backend.framework
    explain, x = importlib.import_module(backend.module).explain, framework.array(QUERY[None])
    call = {"eager": lambda f: f, "compiled": framework.compiled, "mapped": framework.mapped}[mode]
    explained = call(lambda x: framework.array(explain(x, x, x).horizons))
    if mode == "eager":
        assert framework.numpy(explained(x[0])).shape[0] == 2
        return
    with pytest.raises(Exception, match="call explain outside of what is compiled or mapped|graph break"):
        explained(x if mode == "mapped" else x[0])


def table() -> str:
    """Return the support page's table of functions and libraries."""
    core = dict.fromkeys(name.partition(" ")[0] for name in CALLS)
    titles = "", "dtypes by default", ", ".join(f"`{x}`" for x in core), "attention of a backend", "`explain`"
    rows = [titles, ("---",) * len(titles)]
    for library in LIBRARIES.values():
        offered = list(ways(library).values())
        of_backend = offered if library.compiler else []
        cells = [", ".join(x) or "no" for x in (library.dtypes, offered, of_backend, of_backend[:1])]
        rows.append((library.title, *cells))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def test_the_page_shows_the_table() -> None:
    page = Path(__file__).parents[2] / "docs" / "support.md"
    assert table() in page.read_text(encoding="utf-8"), f"docs/support.md must have this table:\n{table()}"
