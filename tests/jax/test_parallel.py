"""One sequence on several devices gives the answer of one device, and little is sent for it."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jax")
pytest.importorskip("flax")

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as Spec

from alibi_jax import attention, parallel

NAMES = (
    "four devices, asymmetric, window, segments",
    "one device",
    "two devices, long enough for tiles",
    "four devices, symmetric, uneven",
    "eight devices, symmetric, segments",
    "eight devices, bfloat16",
    "batch, tokens, one head a device",
    "the TPU's kernel",
)
OTHERS = ("few hops", "not finite")


def _lines(*arguments: str) -> Iterator[dict[str, Any]]:
    run = subprocess.run(
        [sys.executable, "-W", "error", "-m", *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    yield from map(json.loads, run.stdout.splitlines())


@functools.cache
def programs(*names: str) -> dict[str, dict[str, Any]]:
    return {line["name"]: line for line in _lines("tests.support.parallel_programs", *names)}


def assert_no_problem(name: str) -> dict[str, Any]:
    """Assert that a program has none, run in one process with the others that are tested when it is."""
    first = NAMES[0], OTHERS[0]
    found = programs(*(first if name in first else (*NAMES[1:], *OTHERS[1:])))[name]
    assert not found["problem"], found["problem"]
    return found


@functools.cache
def compiled_for_tpus() -> dict[str, dict[str, Any]]:
    return {line["name"]: line for line in _lines("tests.support.parallel_topologies")}


@pytest.mark.parametrize("name", [NAMES[0], *(pytest.param(name, marks=pytest.mark.slow) for name in NAMES[1:])])
def test_devices_give_the_exact_answer_and_gradients(name: str) -> None:
    assert assert_no_problem(name)["cases"] >= 3


@pytest.mark.parametrize("name", ["few hops", pytest.param("not finite", marks=pytest.mark.slow)])
def test_other_programs_on_several_devices(name: str) -> None:
    assert_no_problem(name)


# --- What TPUs would send ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
@pytest.mark.parametrize("topology", ["v5e:2x2", "v5e:4x4"])
def test_tpus_pass_keys_on_and_gather_nothing(topology: str) -> None:
    found = compiled_for_tpus()[topology]
    assert "error" not in found, found["error"]
    assert {x["kind"] for x in found["collectives"]} == {"collective-permute", "all-reduce"}
    # Only the largest norms, the mean of keys and the number of hops are reduced.
    assert all(
        x["elements"] <= found["heads"] * found["head_dim"] for x in found["collectives"] if x["kind"] == "all-reduce"
    )
    assert found["kernels"] > 0


# --- On one device --------------------------------------------------------------------------------------------------


def _mesh(*names: str) -> Mesh:
    return Mesh(np.asarray(jax.devices()[:1]).reshape((1,) * len(names)), names)


def _tensors(length: int = 6, heads: int = 4, kv_heads: int = 2, batch: int = 1) -> tuple[jax.Array, ...]:
    random = np.random.default_rng(0)
    return tuple(
        jnp.asarray(random.normal(size=(batch, length, n, 8)), jnp.float32) for n in (heads, kv_heads, kv_heads)
    )


def _inside(call: Callable[..., Any], mesh: Mesh, *arguments: Any, spec: Spec | None = None) -> Any:
    spec = Spec(None, "tokens") if spec is None else spec
    return jax.shard_map(call, mesh=mesh, in_specs=(spec,) * len(arguments), out_specs=spec)(*arguments)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"axis_name": "sequence"},
            ValueError,
            r"axis_name must name a mesh axis of .*, \('tokens',\), got 'sequence'",
        ),
        ({"head_axis": "heads"}, ValueError, r"head_axis must name a mesh axis of .*, \('tokens',\), got 'heads'"),
        ({"slopes": np.ones(2)}, ValueError, r"slopes must have shape \(4,\), those of all devices' heads"),
        ({"future_slopes": np.ones(2), "is_causal": False}, ValueError, r"future_slopes must have shape \(4,\)"),
        ({"length": 7}, ValueError, "length must be between 1 and the 6 tokens .*, got 7"),
        ({"axis_name": ("tokens",)}, TypeError, r"axis_name must be the name of one mesh axis, got \('tokens',\)"),
        ({"slopes": 4}, TypeError, "slopes must be an array of all devices' slopes"),
        ({"implementation": "dense"}, NotImplementedError, "'dense' cannot tell log-sum-exps; 'tpu' and 'tiled' can"),
    ],
)
def test_wrong_arguments_are_refused_by_name(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        _inside(
            functools.partial(parallel.attention, **{"axis_name": "tokens"} | changes), _mesh("tokens"), *_tensors()
        )


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ((jnp.ones((1, 6, 4, 8)), *[jnp.ones((1, 5, 2, 8))] * 2), "key must have the shard_len of query, 6, got 5"),
        ([jnp.ones((6, 4, 8))] * 3, r"query must have shape \(batch, shard_len, heads, head_dim\), got \(6, 4, 8\)"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(tensors: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _inside(functools.partial(parallel.attention, axis_name="tokens"), _mesh("tokens"), *tensors)


@pytest.mark.slow
def test_default_slopes_need_to_know_which_heads_a_device_has() -> None:
    tensors = _tensors()
    mesh, spec = _mesh("tokens", "other"), Spec(None, "tokens", "other")
    with pytest.raises(
        ValueError, match="slopes must be given, or head_axis, where query is divided along 'other' too"
    ):
        _inside(functools.partial(parallel.attention, axis_name="tokens"), mesh, *tensors, spec=spec)
    with pytest.raises(ValueError, match="where query is divided along 'other' too"):  # a device's heads are unknown
        jax.shard_map(
            functools.partial(parallel.attention, axis_name="tokens"),
            mesh=mesh,
            in_specs=(spec,) * 3,
            out_specs=spec,
            check_vma=False,
        )(*tensors)
    found = _inside(
        functools.partial(parallel.attention, axis_name="tokens", head_axis="other"), mesh, *tensors, spec=spec
    )
    np.testing.assert_allclose(found, attention(*tensors, implementation="dense"), atol=1e-6)


def test_nothing_gives_nothing() -> None:
    tensors = _tensors(batch=0)
    attend = functools.partial(parallel.attention, axis_name="tokens")
    assert _inside(attend, _mesh("tokens"), *tensors).shape == tensors[0].shape
