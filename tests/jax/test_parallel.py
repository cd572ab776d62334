"""Several devices give the answer of one, and send little: a sequence on all, and programs divided by batch and heads.

    python -m tests.jax.test_parallel NAME...        a line of JSON for each check that fails, on eight virtual devices

Checks run in a process of their own: how many devices there are is told before JAX is imported. A program is compiled
once, and runs on many inputs. tests/jax/test_tpu_compile.py says what TPUs would send.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import re
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
import jax.export
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as Spec

import alibi_core
from alibi_jax import TPU, KVCache, attention, attention_fn, explain, parallel
from tests.support.divided import Case, assert_exact, attention_of_whole
from tests.support.tpu_cases import INTERPRETED, QUICKLY


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
    "the TPU's kernel": Program(Case(300, 2, slopes=(0.1, 0.02), kv_heads=1), implementation=INTERPRETED, examples=3),
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


def normal(batch: int, length: int, *heads: int) -> list[jax.Array]:
    """Return a tensor, length first, for each number of heads."""
    random = np.random.default_rng(0)
    return [jnp.asarray(random.normal(size=(batch, length, n, 4)), jnp.float32) for n in heads]


def mesh_of(devices: int, *names: str) -> Mesh:
    return Mesh(np.asarray(jax.devices()[:devices]).reshape((devices, *(1,) * (len(names) - 1))), names)


def few_hops() -> None:
    """Check that steep heads take one hop, which leaves what is on far devices unread."""
    mesh, (query, key, value) = mesh_of(8, "tokens"), normal(1, 1024, 2, 2, 2)
    attend = jax.jit(lambda *tensors: attention_of_whole(mesh, *tensors, jnp.ones(2)))
    with jax.set_mesh(mesh):
        spoilt = attend(query, key, value.at[:, :128].set(np.nan))
        assert np.array_equal(attend(query, key, value)[:, 256:], spoilt[:, 256:])


def not_finite() -> None:
    """Check that a NaN in a key reaches every query after it, on all devices."""
    # Long shards: XLA's maximum of so many numbers ignores a NaN.
    mesh, (query, key, value) = mesh_of(4, "tokens"), normal(1, 4 * 2048, 2, 2, 2)
    with jax.set_mesh(mesh):
        attend = jax.jit(lambda *tensors: attention_of_whole(mesh, *tensors, jnp.asarray([2.0, 0.5])))
        found = attend(query, key.at[0, 5, 0].set(np.nan), value)
    assert np.isnan(found[:, 5:, 0]).all()
    assert np.isfinite(found[:, :, 1]).all()


def unknown_heads() -> None:
    """Check that default slopes are refused where heads may be divided, and nowhere else."""
    tensors, mesh = normal(2, 6, 4, 4, 4), mesh_of(2, "heads", "tokens")
    by_head, exact = Spec(None, None, "heads"), attention(*tensors, implementation="dense")

    def cached(query: Any, key: Any, value: Any) -> Any:
        return KVCache(2, key.shape[2], 6, 4).append(key, value).attend(query)

    def of_core(*tensors: Any) -> Any:
        return alibi_core.attention(*(jnp.swapaxes(x, 1, 2) for x in tensors))

    def by_number(*tensors: Any) -> Any:
        return attention(*tensors, tensors[0].shape[2])

    def future(*tensors: Any) -> Any:
        return attention(*tensors, jnp.ones(2), future_slopes=2, is_causal=False)

    def sharded(attend: Any, specs: Any = by_head, **options: Any) -> Any:
        divided = jax.shard_map(attend, mesh=mesh, in_specs=(specs,) * 3, out_specs=specs, **options)
        return jax.eval_shape(divided, *tensors) if specs == by_head else divided(*tensors)

    for attend in (attention, cached, of_core, by_number, future, attention_fn()):
        for options in ({}, {"check_vma": False}):
            with pytest.raises(
                ValueError, match="slopes must be an array where query is divided along 'heads', as .*2"
            ):
                sharded(attend, **options)
    with pytest.raises(ValueError, match="slopes must be an array where query is divided along"):
        jax.pmap(attention)(*tensors)
    ring = functools.partial(parallel.attention, axis_name="tokens")
    for check_vma in (True, False):
        with pytest.raises(ValueError, match="slopes must be given, or head_axis, .* divided along 'heads' too"):
            sharded(ring, check_vma=check_vma)
    sharded(functools.partial(ring, head_axis="heads"))
    dense = functools.partial(attention, implementation="dense")
    for right in (sharded(dense, Spec()), sharded(dense, Spec(None, None, "tokens")), jax.vmap(dense)(*tensors)):
        np.testing.assert_allclose(right, exact, atol=1e-6)


def no_kernel() -> None:
    """Check that it is said where XLA's tiles replace the TPU's kernel."""
    sharding = NamedSharding(mesh_of(2, "data"), Spec("data"))
    tensors = [jax.device_put(x, sharding) for x in normal(2, 128, 2, 2, 2)]
    refused = r"cannot be divided among devices .*: give alibi_jax.TPU\(sharding=...\) as the implementation"
    with pytest.warns(UserWarning, match=f"attention runs as tiles of XLA, as the TPU kernel {refused}"):
        jax.export.export(jax.jit(attention, in_shardings=sharding), platforms=["tpu"])(*tensors)
    jax.export.export(jax.jit(functools.partial(attention, implementation="tiled")), platforms=["tpu"])(*tensors)
    with pytest.raises(NotImplementedError, match=refused):
        explain(*tensors, implementation=INTERPRETED)
    stated = replace(INTERPRETED, sharding=sharding)
    assert explain(*tensors, implementation=stated).implementation == "tpu"


def uneven_key_heads() -> None:
    """Check explicit sharding along heads where the heads of keys do not divide, or are not divided."""

    def with_weights(*arrays: Any) -> jax.Array:
        result, weights = attention(*arrays, return_weights=True)
        return result + jnp.swapaxes(weights, 1, 2)[..., :4]  # the weights of the first 4 keys

    def answers(attend: Callable[..., jax.Array], *arrays: jax.Array) -> list[jax.Array]:
        return [attend(*arrays[:3], arrays[4]), *gradients(attend, *arrays)]

    def gated(*arrays: Any) -> jax.Array:
        """Constant gates are ALiBi, with its gradients; the gates are not divided where the query is."""
        *tensors, slopes = arrays
        return attention(*tensors, log_gates=-jnp.broadcast_to(slopes, (2, 300, slopes.size)))

    dense = functools.partial(attention, implementation="dense")
    for heads, kv_heads, count in ((8, 2, 8), (6, 3, 2), (8, 2, 4), (8, 4, 4)):
        mesh = jax.make_mesh((count,), ("heads",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:count])
        arrays = [*normal(2, 300, heads, kv_heads, kv_heads, heads), 2.0 ** -jnp.arange(1.0, heads + 1)]
        for attend, right in ((attention, dense), (gated, dense), (dense, dense), (with_weights, with_weights)):
            expected = answers(right, *arrays)
            with jax.set_mesh(mesh):
                placed = [jax.device_put(arrays[0], NamedSharding(mesh, Spec(None, None, "heads"))), *arrays[1:]]
                found = jax.jit(functools.partial(answers, attend))(*placed)
            assert found[0].sharding.spec[2] == "heads"
            for one, exact in zip(found, expected, strict=True):
                assert np.abs(one - exact).max() < 300 * 2.0**-24 * np.abs(exact).max()


# --- Programs divided by batch and heads ----------------------------------------------------------------------------


@functools.cache
def undivided() -> tuple[list[jax.Array], jax.Array, list[jax.Array]]:
    """Return query, key, value, cotangent and slopes; segment ids; and the gradients that one device gives."""
    arrays = [*normal(2, 300, 8, 4, 4, 8), 2.0 ** -jnp.arange(1.0, 9.0)]
    ids = jnp.broadcast_to(jnp.arange(300) // 120, (2, 300))
    dense = functools.partial(attention, segment_ids=ids, implementation="dense")
    return arrays, ids, jax.jit(functools.partial(gradients, dense))(*arrays)


def gradients(attend: Callable[..., jax.Array], *arrays: jax.Array) -> list[jax.Array]:
    *tensors, weight, slopes = arrays
    gradient = jax.grad(lambda tensors, slopes: jnp.sum(attend(*tensors, slopes) * weight), argnums=(0, 1))
    by_tensors, by_slopes = gradient(tensors, slopes)
    return [*by_tensors, by_slopes]


def divided(way: str, implementation: TPU | None = None) -> None:
    """Check gradients that a program gives which XLA divides, or ``shard_map``, and that no tensor is sent."""
    arrays, ids, expected = undivided()
    kind = AxisType.Explicit if way in ("explicit", "no mesh set", "mapped") else AxisType.Auto
    mesh = jax.make_mesh((2, 4), ("data", "heads"), axis_types=(kind,) * 2)
    by_head, of_entry = Spec("data", None, "heads"), Spec(None, "heads")
    if way == "stated":
        implementation = replace(implementation, sharding=NamedSharding(mesh, by_head))

    def local(query: Any, key: Any, value: Any, slopes: Any, ids: Any) -> jax.Array:
        return attention(query, key, value, slopes, segment_ids=ids, implementation=implementation)

    def attend(query: Any, key: Any, value: Any, slopes: Any) -> jax.Array:
        if way == "by hand":
            in_specs = (*[by_head] * 3, Spec("heads"), Spec("data"))
            by_hand = jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=by_head)
            return by_hand(query, key, value, slopes, ids)
        if way == "mapped":
            mapped = jax.vmap(local, in_axes=(0, 0, 0, None, 0))
            return mapped(query, key, value, slopes, jax.sharding.reshard(ids, Spec("data")))
        if way == "mapped by hand":
            in_specs = (*[of_entry] * 3, Spec("heads"), Spec())
            by_hand = jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=of_entry)
            by_entry = jnp.broadcast_to(slopes, (2, 8))  # JAX cannot add up their gradients over "data" itself
            return jax.vmap(by_hand, spmd_axis_name="data")(query, key, value, by_entry, ids)
        return local(query, key, value, slopes, ids)

    with contextlib.nullcontext() if way == "no mesh set" else jax.set_mesh(mesh):
        specs = [by_head] * 4 + [Spec("heads") if way == "by hand" else Spec()]
        placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True)]
        options = None if implementation is None else QUICKLY
        program = jax.jit(functools.partial(gradients, attend), compiler_options=options).lower(*placed).compile()
        found = program(*placed)
    for one, exact in zip(found, expected, strict=True):
        # Float32, of gradients summed over 300 keys in another order.
        assert np.abs(one - exact).max() < 300 * 2.0**-24 * np.abs(exact).max()
        assert len(one.sharding.device_set) == 8
    assert [x.addressable_shards[0].data.shape for x in found[:3]] == [(1, 300, n, 4) for n in (2, 1, 1)]
    sent = re.findall(r"= \w+\[([\d,]*)\]\S* (?:all-gather|all-to-all|collective-permute)\(", program.as_text())
    # Gradients of slopes that all devices have. Under jax.vmap the compiler divides the mapped axis as it sees fit.
    assert way == "mapped" or all(math.prod(int(n) for n in shape.split(",") if n) <= 8 for shape in sent), sent


CHECKS: dict[str, Callable[[], None]] = {name: functools.partial(check, program) for name, program in PROGRAMS.items()}
CHECKS |= {
    "few hops": few_hops,
    "not finite": not_finite,
    "unknown heads": unknown_heads,
    "uneven heads": uneven_key_heads,
    "no kernel": no_kernel,
}
QUICK = ["four devices, asymmetric, window, segments", "few hops", "unknown heads", "no kernel"]
SLOW = [name for name in CHECKS if name not in QUICK]
WAYS = ["automatic", "explicit", "no mesh set", "mapped", "mapped by hand", "by hand"]
WAYS.remove("mapped") if jax.__version_info__ < (0, 9) else None  # which JAX refuses before
CHECKS |= {way: functools.partial(divided, way) for way in WAYS}
BY_KERNEL = ("explicit", "by hand", "stated")
BY_TPU = {f"{way}, the TPU's kernel": functools.partial(divided, way, INTERPRETED) for way in BY_KERNEL}
CHECKS |= BY_TPU


def main(*names: str) -> None:
    for name in names:
        try:
            CHECKS[name]()
        except Exception:
            print(json.dumps([name, traceback.format_exc()[-3000:]]), flush=True)


@pytest.mark.parametrize("names", [QUICK, *(pytest.param(x, marks=pytest.mark.slow) for x in (SLOW, [*WAYS, *BY_TPU]))])
def test_devices_give_the_exact_answer_and_gradients(names: list[str]) -> None:
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    command = [sys.executable, "-W", "error", "-m", "tests.jax.test_parallel", *names]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    assert dict(map(json.loads, run.stdout.splitlines())) == {}


# --- On one device --------------------------------------------------------------------------------------------------

TENSORS = normal(1, 6, 4, 2, 2)


def inside(tensors: Any, names: tuple[str, ...] = ("tokens",), check_vma: bool = True, **options: Any) -> jax.Array:
    """Return attention inside ``shard_map``, over mesh axes of one device: the first of tokens, the second of heads."""
    attend = functools.partial(parallel.attention, **{"axis_name": "tokens"} | options)
    specs = {"in_specs": (Spec(None, *names),) * 3, "out_specs": Spec(None, *names)}
    return jax.shard_map(attend, mesh=mesh_of(1, *names), **specs, check_vma=check_vma)(*tensors)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"axis_name": "sequence"}, ValueError, r"axis_name must name a mesh axis .*, \('tokens',\), got 'sequence'"),
        ({"head_axis": "heads"}, ValueError, r"head_axis must name a mesh axis of .*, \('tokens',\), got 'heads'"),
        ({"slopes": np.ones(2)}, ValueError, r"slopes must have shape \(4,\), those of all devices' heads"),
        ({"future_slopes": np.ones(2), "is_causal": False}, ValueError, r"future_slopes must have shape \(4,\)"),
        ({"length": 7}, ValueError, "length must be between 1 and the 6 tokens .*, got 7"),
        ({"axis_name": ("tokens",)}, TypeError, r"axis_name must be the name of one mesh axis, got \('tokens',\)"),
        ({"slopes": 4}, TypeError, "slopes must be an array of all devices' slopes"),
        (
            {"implementation": TPU(sharding=NamedSharding(mesh_of(1, "data"), Spec("data")))},
            ValueError,
            "implementation must have no sharding inside jax.shard_map",
        ),
        ({"implementation": "dense"}, NotImplementedError, "'dense' cannot tell log-sum-exps; 'tpu' and 'tiled' can"),
        ({"tensors": normal(1, 6, 4) + normal(1, 5, 2, 2)}, ValueError, "key must have the shard_len of query, 6, got"),
        (
            {"tensors": [jnp.ones((6, 4, 8))] * 3},
            ValueError,
            r"query must have shape \(batch, shard_len, .* \(6, 4, 8\)",
        ),
    ],
)
def test_wrong_arguments_are_refused_by_name(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        inside(**{"tensors": TENSORS} | changes)


def test_nothing_gives_nothing() -> None:
    assert inside(normal(0, 6, 4, 2, 2)).shape == (0, 6, 4, 4)


if __name__ == "__main__":
    main(*sys.argv[1:])
