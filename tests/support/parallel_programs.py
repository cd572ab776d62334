"""Sequence-parallel attention on eight virtual devices, against the oracle: what ``tests/jax/test_parallel.py`` starts.

    python -m tests.support.parallel_programs        a line of JSON for each program

A process of its own: how many devices there are is told before JAX is imported. A program is compiled once, and runs on
many inputs.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from alibi_jax import TPU
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


def checked(program: Program) -> int:
    """Check outputs and gradients of a program on several data, and return how many those were."""
    run, case = compiled(program), program.case
    # Scores that are all far below 0; then what seeds decide.
    cases = [case, hostile(case), replace(case, seed=2, shift=3.0), *map(case.varied, range(3, 3 + program.examples))]
    for each in cases:
        assert_exact(each, run(each.arrays()), has_segments=program.has_segments)
    return len(cases)


def few_hops() -> int:
    """Check that steep heads take one hop, which leaves what is on far devices unread."""
    mesh = Mesh(np.asarray(jax.devices()), ("tokens",))
    tensors = [jnp.asarray(np.random.default_rng(n).normal(size=(1, 1024, 2, 4)), jnp.float32) for n in range(3)]
    attend = jax.jit(lambda *x: attention_of_whole(mesh, *x, jnp.ones(2)))
    with jax.set_mesh(mesh):
        spoilt = attend(*tensors[:2], tensors[2].at[:, :128].set(np.nan))
        assert np.array_equal(attend(*tensors)[:, 256:], spoilt[:, 256:])
    return 1


def not_finite() -> int:
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
    return 1


OTHERS = {"few hops": few_hops, "not finite": not_finite}


def main(*names: str) -> None:
    for name in names or (*PROGRAMS, *OTHERS):
        started, count, problem = time.perf_counter(), 0, ""
        try:
            count = OTHERS[name]() if name in OTHERS else checked(PROGRAMS[name])
        except Exception:
            problem = traceback.format_exc()[-3000:]
        seconds = time.perf_counter() - started
        print(json.dumps({"name": name, "cases": count, "seconds": seconds, "problem": problem}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
