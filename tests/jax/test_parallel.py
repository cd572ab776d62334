"""One sequence on several devices gives the answer of one device, and little is sent for it.

    python -m tests.jax.test_parallel NAME...        a line of JSON for each program, on eight virtual devices

Programs run in a process of their own: how many devices there are is told before JAX is imported. A program is compiled
once, and runs on many inputs. tests/jax/test_tpu_compile.py says what TPUs would send.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jax")
pytest.importorskip("flax")

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as Spec

from alibi_jax import TPU, attention, parallel
from tests.support.divided import Case, assert_exact, attention_of_whole


@dataclass(frozen=True)
class Program:
    """The program compiled for a case, whatever its data. The mesh has no axes of length 1."""

    case: Case
    batch_shards: int = 1
    head_shards: int = 1
    has_segments: bool = False
    implementation: Any = None
    examples: int = 8
    kind: AxisType = AxisType.Auto


PROGRAMS = {
    "one device": Program(Case(37, 1)),
    "two devices, long enough for tiles": Program(Case(1001, 2, slopes=(1.0, 0.25)), examples=4),
    "four devices, symmetric, uneven": Program(Case(197, 4, slopes=(4.0, 3.0, 1.0, 0.8), is_causal=False, batch=2)),
    "four devices, asymmetric, window, segments": Program(
        Case(255, 4, is_causal=False, slopes=(4.0, 2.0, 1.5, 1.0), future_slopes=(1.0, 0.9, 2.0, 4.0), window_size=30),
        has_segments=True,
    ),
    "eight devices, symmetric, segments": Program(
        Case(85, 8, slopes=(2.0, 0.0, 0.3, 0.1), is_causal=False, kv_heads=4), has_segments=True
    ),
    "eight devices, bfloat16": Program(Case(303, 8, slopes=(4.0, 2.0, 1.4, 0.8), dtype="bfloat16"), has_segments=True),
    "batch, tokens, one head a device": Program(Case(61, 2, batch=2, slopes=(3.0, 2.0)), 2, 2, kind=AxisType.Explicit),
    "the TPU's kernel": Program(
        Case(300, 2, slopes=(0.1, 0.02), kv_heads=1), implementation=TPU(128, 128, interpret=True), examples=3
    ),
}


def hostile(case: Case) -> Case:
    """Return the case with one key that queries of all shards need, and one key that is nearly as large."""
    last = case.shards
    return replace(case, seed=1, large=(("key", 0, 0, 6), ("query", last, 1, 3), ("key", last // 2, 1, 3)), cuts=(0.6,))


def compiled(program: Program) -> Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]:
    """Return a function from a case's arrays to results and gradients, which is compiled once."""
    case = program.case
    sizes = {"data": program.batch_shards, "heads": program.head_shards, "tokens": case.shards}
    devices = np.asarray(jax.devices()[: int(np.prod(list(sizes.values())))]).reshape(tuple(sizes.values()))
    mesh = Mesh(devices, tuple(sizes), axis_types=(program.kind,) * 3)

    def attend(query: Any, key: Any, value: Any, slopes: Any, future: Any, ids: Any) -> Any:
        return attention_of_whole(
            mesh,
            *(query, key, value, slopes),
            batch_axis="data" if program.batch_shards > 1 else None,
            head_axis="heads" if program.head_shards > 1 else None,
            is_causal=case.is_causal,
            window_size=case.window_size,
            future_slopes=future,
            segment_ids=ids if program.has_segments else None,
            implementation=program.implementation,
        )

    @jax.jit
    def with_gradients(tensors: list[Any], slopes: list[Any], ids: Any, cotangent: Any) -> Any:
        result, pull = jax.vjp(lambda x, y: attend(*x, *y, ids), tensors, slopes)
        return result, pull(cotangent)

    def run(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        tensors = {name: jnp.asarray(np.swapaxes(x, 1, 2), case.dtype) for name, x in arrays.items() if name != "ids"}
        cotangent, ids = tensors.pop("cotangent"), jnp.asarray(arrays["ids"], jnp.int32)
        slopes = [None if x is None else jnp.asarray(x, jnp.float32) for x in (case.slopes, case.future_slopes)]
        with jax.set_mesh(mesh):
            result, (found, by_slopes) = with_gradients(list(tensors.values()), slopes, ids, cotangent)
        answers = dict(zip(("result", *tensors), (result, *found), strict=True))
        answers = {name: np.swapaxes(np.asarray(x, np.float64), 1, 2) for name, x in answers.items()}
        pairs = zip(("slopes", "future_slopes"), by_slopes, strict=True)
        return answers | {name: np.asarray(x, np.float64) for name, x in pairs if x is not None}

    return run


def check(program: Program) -> None:
    """Check outputs and gradients of a program on several data."""
    run, case = compiled(program), program.case
    # Scores that are all far below 0; then what seeds decide.
    cases = [case, hostile(case), replace(case, seed=2, shift=3.0), *map(case.varied, range(3, 3 + program.examples))]
    for each in cases:
        assert_exact(each, run(each.arrays()), has_segments=program.has_segments)


def few_hops() -> None:
    """Check that steep heads take one hop, which leaves what is on far devices unread."""
    mesh = Mesh(np.asarray(jax.devices()), ("tokens",))
    tensors = [jnp.asarray(np.random.default_rng(n).normal(size=(1, 1024, 2, 4)), jnp.float32) for n in range(3)]
    attend = jax.jit(lambda *x: attention_of_whole(mesh, *x, jnp.ones(2)))
    with jax.set_mesh(mesh):
        spoilt = attend(*tensors[:2], tensors[2].at[:, :128].set(np.nan))
        assert np.array_equal(attend(*tensors)[:, 256:], spoilt[:, 256:])


def not_finite() -> None:
    """Check that a NaN in a key reaches every query after it, on all devices."""
    length, heads, head_dim = 4 * 2048, 2, 4  # long shards: XLA's maximum of so many numbers ignores a NaN
    mesh = Mesh(np.asarray(jax.devices()[:4]), ("tokens",))
    random = np.random.default_rng(0)
    query, key, value = (jnp.asarray(random.normal(size=(1, length, heads, head_dim)), jnp.float32) for _ in range(3))
    slopes = jnp.asarray([2.0, 0.5])

    @jax.jit
    def attend(query: Any, key: Any, value: Any) -> Any:
        return attention_of_whole(mesh, query, key, value, slopes)

    with jax.set_mesh(mesh):
        found = attend(query, key.at[0, 5, 0].set(np.nan), value)
        assert np.isnan(found[:, 5:, 0]).all()
        assert np.isfinite(found[:, :, 1]).all()


CHECKS: dict[str, Callable[[], None]] = {name: functools.partial(check, program) for name, program in PROGRAMS.items()}
CHECKS |= {"few hops": few_hops, "not finite": not_finite}
QUICK = ("four devices, asymmetric, window, segments", "few hops")


def main(*names: str) -> None:
    for name in names:
        problem = ""
        try:
            CHECKS[name]()
        except Exception:
            problem = traceback.format_exc()[-3000:]
        print(json.dumps([name, problem]), flush=True)


@functools.cache
def problems(*names: str) -> dict[str, str]:
    """Return what is wrong with programs, which run in one process."""
    run = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.jax.test_parallel", *names],
        capture_output=True,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"},
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return dict(map(json.loads, run.stdout.splitlines()))


@pytest.mark.parametrize("name", [pytest.param(x, marks=[] if x in QUICK else [pytest.mark.slow]) for x in CHECKS])
def test_devices_give_the_exact_answer_and_gradients(name: str) -> None:
    assert problems(*(x for x in CHECKS if (x in QUICK) == (name in QUICK)))[name] == ""


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


if __name__ == "__main__":
    main(*sys.argv[1:])
