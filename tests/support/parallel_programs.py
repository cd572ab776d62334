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
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

from alibi_core.conformance.testing import assert_within_budget as assert_within
from alibi_jax import TPU, KVCache, parallel
from alibi_jax.parallel import _forward as _parallel_forward
from tests.support.divided import DECODED_SLOPES, DECODED_WINDOW, Case, assert_exact, decoded


@dataclass(frozen=True)
class Program:
    """What is compiled for a case, whose data may be others. Axes of the mesh that have length 1 are left out."""

    case: Case
    batch_shards: int = 1
    head_shards: int = 1
    has_segments: bool = False
    implementation: Any = None
    examples: int = 8
    kind: AxisType = AxisType.Auto


PROGRAMS = {
    "one device": Program(Case(37, 1, score_bound=10.0)),
    "two devices, long enough for tiles": Program(Case(1001, 2, slopes=(1.0, 0.25), score_bound=12.0), examples=4),
    "two devices, zigzag, devices decide": Program(Case(53, 2, "zigzag")),
    "four devices, symmetric, uneven": Program(
        Case(197, 4, slopes=(4.0, 3.0, 1.0, 0.8), is_causal=False, score_bound=4.0, batch=2)
    ),
    "four devices, asymmetric, window, segments, zigzag": Program(
        Case(
            255,
            4,
            "zigzag",
            is_causal=False,
            slopes=(4.0, 2.0, 1.5, 1.0),
            future_slopes=(1.0, 0.9, 2.0, 4.0),
            window_size=30,
            score_bound=3.0,
        ),
        has_segments=True,
    ),
    "eight devices, symmetric, segments, devices decide": Program(
        Case(85, 8, slopes=(2.0, 0.0, 0.3, 0.1), is_causal=False, kv_heads=4), has_segments=True
    ),
    "eight devices, bfloat16": Program(
        Case(303, 8, slopes=(4.0, 2.0, 1.4, 0.8), score_bound=12.0, dtype="bfloat16"), has_segments=True
    ),
    "batch, tokens, one head a device": Program(
        Case(61, 2, batch=2, slopes=(3.0, 2.0), score_bound=6.0), 2, 2, kind=AxisType.Explicit
    ),
    # So flat that all is sent, and there is nothing to decide.
    "the TPU's kernel": Program(
        Case(300, 2, slopes=(0.1, 0.02), kv_heads=1, score_bound=5.0),
        implementation=TPU(128, 128, interpret=True),
        examples=3,
    ),
}


def hostile(case: Case) -> Case:
    """Return the case with a key so large that queries of all shards look for it, and one that only comes near."""
    last = case.divided().num_chunks
    return replace(case, seed=1, large=(("key", 0, 0, 6), ("query", last, 1, 3), ("key", last // 2, 1, 3)), cuts=(0.6,))


@dataclass
class Compiled:
    """A program, and the function that runs it."""

    program: Program
    run: Any = field(init=False)
    plan: Any = field(init=False, default=None)
    ways: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        program, case = self.program, self.program.case
        shards = case.divided()
        sizes = {"data": program.batch_shards, "heads": program.head_shards, "tokens": case.shards}
        devices = np.asarray(jax.devices()[: int(np.prod(list(sizes.values())))]).reshape(tuple(sizes.values()))
        mesh = Mesh(devices, tuple(sizes), axis_types=(program.kind,) * 3)
        rules = {"is_causal": case.is_causal, "window_size": case.window_size}
        plan = None
        if case.score_bound is not None:
            plan = parallel.shard_plan(
                np.asarray(case.slopes),
                shards,
                score_bound=case.score_bound,
                tolerance=case.share,
                future_slopes=None if case.future_slopes is None else np.asarray(case.future_slopes),
                num_kv_heads=case.kv_heads,
                head_shards=program.head_shards,
                **rules,
            )
        is_placed = case.placement == "zigzag"
        order = shards.order() if is_placed else np.arange(case.length)
        back = np.argsort(order)[: case.length]

        def placed(array: Any) -> Any:
            array = jnp.pad(array, [(0, len(order) - n if axis == 1 else 0) for axis, n in enumerate(array.shape)])
            return array[:, order]

        def attend(query: Any, key: Any, value: Any, slopes: Any, future: Any, ids: Any) -> Any:
            result = parallel.sharded_attention(
                mesh,
                *(placed(x) for x in (query, key, value)),
                slopes,
                axis_name="tokens",
                batch_axis="data" if program.batch_shards > 1 else None,
                head_axis="heads" if program.head_shards > 1 else None,
                placement=case.placement,
                length=case.length,
                plan=plan,
                future_slopes=future,
                segment_ids=placed(ids) if program.has_segments else None,
                implementation=program.implementation,
                **rules,
            )
            return result[:, back] if is_placed else result

        def with_gradients(tensors: list[Any], slopes: list[Any], ids: Any, cotangent: Any) -> Any:
            result, pull = jax.vjp(lambda x, y: attend(*x, *y, ids), tensors, slopes)
            return result, pull(cotangent)

        compiled = jax.jit(with_gradients)

        def told(way: str) -> Any:
            """Return a way of the forward pass that tells when it is gone."""
            original = getattr(_parallel_forward, way)

            def tell(*arguments: Any) -> Any:
                jax.debug.callback(lambda: self.ways.add(way))
                return original(*arguments)

            return mock.patch.object(_parallel_forward, way, tell)

        def run(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
            tensors = {
                name: jnp.asarray(np.swapaxes(x, 1, 2), case.dtype) for name, x in arrays.items() if name != "ids"
            }
            cotangent = tensors.pop("cotangent")
            slopes = [None if x is None else jnp.asarray(x, jnp.float32) for x in (case.slopes, case.future_slopes)]
            with jax.set_mesh(mesh), told("_by_plan"), told("_by_loop"):
                result, (found, by_slopes) = compiled(
                    list(tensors.values()), slopes, jnp.asarray(arrays["ids"], jnp.int32), cotangent
                )
            answers = dict(zip(("result", *tensors), (result, *found), strict=True))
            answers = {name: np.swapaxes(np.asarray(x, np.float64), 1, 2) for name, x in answers.items()}
            pairs = zip(("slopes", "future_slopes"), by_slopes, strict=True)
            return answers | {name: np.asarray(x, np.float64) for name, x in pairs if x is not None}

        self.run, self.plan = run, plan

    def check(self, case: Case) -> None:
        """Assert that outputs and gradients are the exact ones, but for rounding and the tolerance."""
        assert_exact(case, self.run(case.arrays()), has_segments=self.program.has_segments)


def checked(program: Program) -> int:
    """Check a program on several data, and return how many those were."""
    compiled, case = Compiled(program), program.case
    # Scores that are all far below 0; then what seeds decide.
    cases = [case, hostile(case), replace(case, seed=2, shift=3.0), *map(case.varied, range(3, 3 + program.examples))]
    for each in cases:
        compiled.check(each)
    if compiled.plan is not None and case.shards > 1:
        otherwise = "_by_plan" if compiled.plan.is_complete else "_by_loop"
        for each, way in ((case, "_by_plan"), (hostile(case), otherwise)):
            compiled.ways.clear()
            compiled.run(each.arrays())
            jax.effects_barrier()
            assert compiled.ways == {way}, f"{each} goes {compiled.ways}"
    return len(cases)


def decoding() -> int:
    """Check decoding against attention to all there is, and that devices beyond every horizon do nothing."""
    mesh = Mesh(np.asarray(jax.devices()).reshape(2, 4), ("heads", "tokens"))
    (exact, expected), slopes = decoded(700, "float32"), jnp.asarray(DECODED_SLOPES)
    (batch, kv_heads, _, head_dim), capacity, prompt = exact[1].shape, 1024, 700
    by_slot, by_head = PartitionSpec(None, "heads", "tokens"), PartitionSpec(None, None, "heads")
    specs = KVCache(by_slot, by_slot, by_slot, PartitionSpec())

    def step(cache: Any, query: Any, key: Any, value: Any) -> Any:
        cache = parallel.append(cache, key, value, axis_name="tokens")
        return cache, parallel.decode(
            query, cache, slopes, axis_name="tokens", head_axis="heads", window_size=DECODED_WINDOW
        )

    in_specs, out_specs = (specs, by_head, by_head, by_head), (specs, by_head)
    step = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=in_specs, out_specs=out_specs))
    tensors = [jnp.asarray(np.swapaxes(x, 1, 2), jnp.float32) for x in exact]
    cache = KVCache.make(batch, kv_heads, capacity, head_dim)
    found = []
    for part in (slice(0, prompt), *(slice(t, t + 1) for t in range(prompt, prompt + 5))):
        cache, result = step(cache, *(x[:, part] for x in tensors))
        found.append(np.swapaxes(np.asarray(result, np.float64), 1, 2))
    assert int(cache.length) == prompt + 5
    assert not np.any(cache.key[:, :, prompt + 5 :])
    assert_within(np.concatenate(found, axis=2), expected)

    # A device whose keys are beyond every horizon does not look at them, not even at a NaN.
    calm = [x.at[:, :, :].set(jnp.clip(x, -1, 1)) for x in tensors]
    cache = step(KVCache.make(batch, kv_heads, capacity, head_dim), *(x[:, :prompt] for x in calm))[0]
    spoilt = cache._replace(value=cache.value.at[:, :, :256].set(jnp.nan))
    last = [x[:, prompt : prompt + 1] for x in calm]
    assert np.array_equal(step(cache, *last)[1], step(spoilt, *last)[1])
    # Of no use after more tokens than there is room for.
    assert np.all(np.isnan(step(cache, *(x[:, :prompt] for x in calm))[1]))
    return 8


def not_finite() -> int:
    """Check that a NaN in a key reaches every query after it, on all devices."""
    length, heads, head_dim = 4 * 2048, 2, 4  # so many that XLA's maximum of a shard passes over a NaN
    mesh = Mesh(np.asarray(jax.devices()[:4]), ("tokens",))
    random = np.random.default_rng(0)
    query, key, value = (jnp.asarray(random.normal(size=(1, length, heads, head_dim)), jnp.float32) for _ in range(3))
    slopes = jnp.asarray([2.0, 0.5])

    @jax.jit
    def attend(query: Any, key: Any, value: Any) -> Any:
        return parallel.sharded_attention(mesh, query, key, value, slopes, axis_name="tokens")

    with jax.set_mesh(mesh):
        found = attend(query, key.at[0, 5, 0].set(np.nan), value)
        assert np.isnan(found[:, 5:, 0]).all()
        assert np.isfinite(found[:, :, 1]).all()
    return 1


OTHERS = {"decoding": decoding, "not finite": not_finite}


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
