"""The core by the array API standard of 2025.12 alone: strictest profile, a second device, read-only arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import alibi_core

strict = pytest.importorskip("array_api_strict", reason="array_api_strict is not installed")

RNG = np.random.default_rng(0)
QUERY, KEY, VALUE = (RNG.standard_normal((2, h, n, 5)).astype(np.float32) for h, n in ((4, 3), (2, 7), (2, 7)))
SLOPES, FUTURE = np.float32([0.5, 0.25, 0.1, 0.01]), np.float32([0.0, 0.3, 0.2, 1.0])
IDS = np.asarray([[0, 0, 1, 1, 1, 2, 2], [3, 3, 3, 3, 4, 4, 4]])
POSITIONS = np.asarray([0, 1, 0, 1, 2, 0, 1])
OFFSETS, MASK = np.asarray([2, -1]), RNG.random((2, 1, 3, 7)) < 0.5
SYMMETRIC: dict[str, Any] = {"is_causal": False, "future_slopes": FUTURE}

# Each is a function of the core, its arrays, and what else it takes.
CALLS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = {
    "bias": (alibi_core.bias, (SLOPES, 3, 7), {}),
    "bias both ways": (alibi_core.bias, (SLOPES, 3, 7), SYMMETRIC),
    "bias of falcon": (alibi_core.bias_from_positions, (4, POSITIONS, POSITIONS), {"contract": "falcon"}),
    "bias of positions": (
        alibi_core.bias_from_positions,
        (SLOPES, POSITIONS, POSITIONS),
        {"q_segment_ids": IDS, "kv_segment_ids": IDS},
    ),
    "key_bias": (alibi_core.key_bias, (SLOPES, 7), {}),
    "horizon": (alibi_core.horizon, (SLOPES, np.float32([1.0, 2.0, 3.0, 4.0])), {}),
    "fold": (alibi_core.fold, (QUERY, KEY, SLOPES), {}),
    "fold_error_bound": (alibi_core.fold_error_bound, (SLOPES, 7), {"head_dim": 5, "dtype": "float32"}),
    "attention": (alibi_core.attention, (QUERY, KEY, VALUE, SLOPES), {}),
    "attention both ways": (alibi_core.attention, (QUERY, KEY, VALUE, SLOPES), SYMMETRIC | {"window_size": 2}),
    "attention by mask": (alibi_core.attention, (QUERY, KEY, VALUE), {"mask": MASK, "return_weights": True}),
    "attention by segment": (alibi_core.attention, (KEY, KEY, VALUE), {"segment_ids": IDS}),
    "attention at offsets": (alibi_core.attention, (QUERY, KEY, VALUE), {"q_offset": OFFSETS}),
    "attention with a bias": (alibi_core.attention, (QUERY, KEY, VALUE), {"added_bias": QUERY[:, :, :, :1]}),
}
DEVICES = [strict.Device("CPU_DEVICE"), strict.Device("device1")]


@pytest.fixture
def strictest() -> Iterator[None]:
    """No indexing by booleans, no shape that depends on values."""
    with strict.ArrayAPIStrictFlags(api_version="2025.12", boolean_indexing=False, data_dependent_shapes=False):
        yield


def placed(value: Any, array: Callable[[np.ndarray], Any]) -> Any:
    """Return NumPy arrays, those in tuples and dictionaries too, as ``array`` makes them."""
    if isinstance(value, tuple):
        return tuple(placed(x, array) for x in value)
    if isinstance(value, dict):
        return {name: placed(x, array) for name, x in value.items()}
    return array(value) if isinstance(value, np.ndarray) else value


def results(name: str, array: Callable[[np.ndarray], Any]) -> tuple[Any, ...]:
    function, arrays, arguments = CALLS[name]
    result = function(*placed(arrays, array), **placed(arguments, array))
    return result if isinstance(result, tuple) else (result,)


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_the_standard_is_enough(name: str, device: Any, strictest: None) -> None:
    found = results(name, lambda values: strict.asarray(values, device=device))
    for one, other in zip(found, results(name, np.asarray), strict=True):
        assert one.device == device
        one = np.asarray(strict.asarray(one, device=DEVICES[0]))
        assert one.dtype == other.dtype
        np.testing.assert_allclose(one, other, rtol=2e-6, atol=2e-6 if "attention" in name else 0)


@pytest.mark.parametrize("name", CALLS)
def test_arrays_that_cannot_be_written_to_will_do(name: str) -> None:
    def read_only(values: np.ndarray) -> np.ndarray:
        values = values.copy()
        values.flags.writeable = False
        return values

    for one, other in zip(results(name, read_only), results(name, np.asarray), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_slopes_are_made_where_they_are_asked_for(device: Any, strictest: None) -> None:
    made = alibi_core.slopes(6, xp="array_api_strict", device=device), alibi_core.bias(6, 3, xp=strict, device=device)
    assert [x.device for x in made] == [device] * 2
