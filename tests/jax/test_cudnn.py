"""``implementation="cudnn"`` without a GPU: XLA computes in place of cuDNN, and programs are lowered for CUDA."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # or JAX waits for the TPU of an installed libtpu
jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
from jax import export  # noqa: E402
from jax._src.cudnn import fused_attention_stablehlo as cudnn  # noqa: E402

import alibi_jax  # noqa: E402
from alibi_core.backend import AttentionCall  # noqa: E402
from alibi_core.conformance import check  # noqa: E402
from alibi_core.conformance.testing import DATA, Sizes  # noqa: E402
from alibi_jax import _cudnn  # noqa: E402
from alibi_jax._call import Operands, operands_of  # noqa: E402
from alibi_jax._compatible import Target  # noqa: E402
from alibi_jax._dispatch import choice  # noqa: E402
from alibi_jax.conformance import adapters  # noqa: E402
from tests.support.tiles import hostile, plain  # noqa: E402

WINDOWS = (64, 160)


@pytest.fixture
def on_cpu() -> Iterator[None]:
    """Let XLA compute what cuDNN would, with windows for short rows; in float32, as XLA on CPUs lacks some products."""
    xla = functools.partial(jax.nn.dot_product_attention, implementation="xla")

    def attend(*tensors: jax.Array, implementation: str, **arguments: Any) -> jax.Array:
        assert implementation == "cudnn"
        return xla(*(x.astype(jnp.float32) for x in tensors), **arguments).astype(tensors[0].dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.nn, "dot_product_attention", attend)
        patch.setattr(_cudnn, "WINDOWS", WINDOWS)
        patch.setattr(_cudnn, "LEAST_MEASURED", 140)
        patch.setattr(choice, "PLATFORMS_OF_CUDNN", ("cuda", "cpu"))
        patch.setattr(jax, "default_backend", lambda: "gpu")
        jax.clear_caches()
        yield
    jax.clear_caches()


SHORT = ["causal", "grouped", "batch_slopes", "gradients", "conduct"]
REST = ["combined", "long", "large", "precision", "independent"]
REST += ["long_gradients", "large_gradients", "cotangents", "some_gradients"]


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(
    ("dtype", "laws"),
    [
        ("bfloat16", SHORT[:3]),
        *(pytest.param(dtype, laws, marks=pytest.mark.slow) for dtype, laws in
          (("bfloat16", [*SHORT[3:], *REST]), ("float16", SHORT + REST))),
    ],
)  # fmt: skip
def test_the_laws_hold(dtype: str, laws: list[str]) -> None:
    adapter = next(x for x in adapters() if x.name == "alibi_jax[cudnn]" and x.dtype == dtype)
    report = check(adapter, laws=laws)
    assert {law.status for law in report.laws} == {"passed"}, str(report)


def test_gradients_of_shared_keys_are_exact(on_cpu: None) -> None:
    # Several groups of heads share keys, in windows of several lengths.
    tensors = [
        jax.random.normal(jax.random.key(n), (1, 150, heads, 8), jnp.bfloat16) for n, heads in enumerate((8, 1, 1))
    ]
    found = {}
    for name in ("cudnn", "dense"):
        loss = jax.jit(
            lambda *x, name=name: (alibi_jax.attention(*x, implementation=name).astype(jnp.float32) ** 2).sum()
        )
        found[name] = jax.grad(loss, (0, 1, 2))(*tensors)
    for mine, right in zip(*found.values(), strict=True):
        mine, right = (np.asarray(x, np.float32) for x in (mine, right))
        assert np.abs(mine - right).max() <= 2.0**-6 * np.abs(right).max()


def call_of(query: Any, key: Any, value: Any, slopes: Any) -> Operands:
    call = AttentionCall.check(query, key, value, slopes, allow_negative_slopes=True, xp=jnp)
    return operands_of(call, query, key, value)


def windows_of(operands: Operands) -> list[int | None]:
    """Return the windows that the groups of heads of a call compute."""
    found: list[int | None] = []
    with pytest.MonkeyPatch.context() as patch, jax.disable_jit():
        patch.setattr(_cudnn, "WINDOWS", WINDOWS)
        patch.setattr(_cudnn, "LEAST_MEASURED", 140)
        _cudnn._by_group(operands, lambda attend, *_: found.append(attend.args[1]))
    return found


@settings(max_examples=3)
@given(data=st.sampled_from(sorted(DATA)), sign=st.sampled_from([1, 1, -1]), seed=st.integers(0, 99))
def test_windows_leave_out_no_more_than_the_tolerance(data: str, sign: int, seed: int) -> None:
    case = hostile(plain(Sizes(1, 8, 1, (340, 340), 4), seed=seed), data, sign)
    tensors = [jnp.asarray(case.arrays[name], jnp.bfloat16) for name in ("query", "key", "value")]
    operands = call_of(*tensors, jnp.asarray(case.arrays["slopes"], jnp.float32))
    weights = case.exact("bfloat16").weights[0]  # [heads, queries, keys]
    back = np.arange(340)[:, None] - np.arange(340)
    windows = windows_of(operands)
    assert len(windows) == 2
    for heads, window in zip((weights[:4], weights[4:]), windows, strict=True):
        assert (heads * (back >= (window or 340))).sum(axis=-1).max() <= operands.call.tolerance


@settings(max_examples=20)
@given(back=st.integers(1, 339), last=st.integers(0, 339), giants=st.tuples(st.booleans(), st.booleans()))
def test_windows_reach_back_to_the_one_key_that_counts(back: int, last: int, giants: tuple[bool, bool]) -> None:
    last = max(back, last)
    query, key = np.zeros((2, 1, 8, 340, 4))
    key[0, :, last - back], query[0, :, last] = [8, 0, 0, 0], [(back + 30) / 4, 0, 0, 0]  # scale is 1/2
    query *= np.repeat(giants, 4)[:, None, None]
    tensors = [jnp.asarray(x, jnp.bfloat16) for x in (query, key, key)]
    for window, has_giant in zip(windows_of(call_of(*tensors, jnp.ones(8))), giants, strict=True):
        assert window is None or window > back or not has_giant
        assert window is not None or has_giant


def test_windows_are_short_where_slopes_are_steep() -> None:
    inputs = jax.random.normal(jax.random.key(0), (3, 1, 340, 8, 4), jnp.bfloat16).swapaxes(2, 3)
    assert windows_of(call_of(*inputs, jnp.asarray([9.0, 8.0, 7.0, 6.0, 0.1, 0.01, 0.01, 0.01]))) == [160, None]


# --- The choice -------------------------------------------------------------------------------------------------------


def normal(dtype: Any = jnp.bfloat16, length: int = 40, head_dim: int = 16) -> list[jax.Array]:
    return list(jax.random.normal(jax.random.key(0), (3, 1, length, 4, head_dim), dtype))


def test_slopes_too_steep_for_the_length_take_the_tiles(on_cpu: None) -> None:
    inputs, steep = normal(length=600), jnp.asarray([1000.0, 1.0, 0.5, 0.1])
    results = {name: alibi_jax.attention(*inputs, steep, implementation=name) for name in (None, "tiled", "cudnn")}
    np.testing.assert_array_equal(results[None], results["tiled"])
    assert (results[None] != results["cudnn"]).any()
    explained = alibi_jax.explain(*inputs, steep)
    assert explained.implementation == "tiled"
    assert "slopes are too steep for so many keys" in explained.refusals["cudnn"]
    assert alibi_jax.explain(*inputs).implementation == "cudnn"


def gradients(*tensors: jax.Array, **arguments: Any) -> Any:
    return jax.grad(lambda *x: alibi_jax.attention(*x, **arguments).astype(jnp.float32).sum(), (0, 1, 2))(*tensors)


def lowered(function: Any, *tensors: Any, **jit: Any) -> str:
    return jax.jit(function, **jit).trace(*tensors).lower(lowering_platforms=("cuda",)).as_text()


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have JAX believe that there is a GPU with cuDNN."""
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91_500)
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda _: True)
    yield
    jax.clear_caches()  # what was traced is not checked again


OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "float32": ({"dtype": jnp.float32}, {}, "must be given bfloat16 or float16, got float32"),
    "wide heads": ({"head_dim": 256}, {}, "head dim must be <= 256 and a multiple of 8, but got 264"),
    "symmetric": ({}, {"is_causal": False}, "takes causal calls alone, without window, mask and segments"),
    "window": ({}, {"window_size": 9}, "takes causal calls alone, without window, mask and segments"),
    "mask": ({}, {"mask": jnp.ones(40, bool)}, "takes causal calls alone, without window, mask and segments"),
    "segments": ({}, {"segment_ids": jnp.ones(40, int)}, "takes causal calls alone, without window, mask and segments"),
    "offset": ({}, {"q_offset": 3}, "takes as many queries as keys, without an offset"),
    "law": ({}, {"law": "log"}, "takes no positions and the linear law alone"),
}


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(("sizes", "arguments", "words"), OTHERS.values(), ids=OTHERS)
def test_what_cudnn_does_not_take_keeps_the_tiles_or_is_refused(sizes: Any, arguments: Any, words: str) -> None:
    tensors = normal(**sizes)
    assert "cudnn" not in lowered(functools.partial(alibi_jax.attention, **arguments), *tensors)
    with pytest.raises(NotImplementedError, match=f"implementation 'cudnn' .*{words}.*'tiled' and 'dense' can run"):
        lowered(functools.partial(alibi_jax.attention, **arguments, implementation="cudnn"), *tensors)


@pytest.mark.usefixtures("hopper")
def test_causal_calls_in_low_precision_run_cudnn_on_gpus_by_default() -> None:
    tensors = normal()
    assert lowered(alibi_jax.attention, *tensors).count("cudnn$fmhaSoftmax") == 1
    assert lowered(gradients, *tensors).count("cudnn$fmhaSoftmaxBackward") == 1
    slopes = jnp.ones(4)
    learned = jax.grad(lambda x: alibi_jax.attention(*tensors, x).astype(jnp.float32).sum())
    assert "cudnn" not in lowered(learned, slopes)
    assert "cudnn" not in lowered(functools.partial(alibi_jax.attention), *normal(jnp.float32))
    exported = export.export(jax.jit(alibi_jax.attention), platforms=["cuda"])(*tensors)
    assert "fmhaSoftmax" not in exported.mlir_module()


@pytest.mark.usefixtures("hopper")
def test_programs_that_the_compiler_divides_have_tiles() -> None:
    call = call_of(*(jnp.swapaxes(x, 1, 2) for x in normal()), None).call
    assert choice.choose(None, call, Target("cuda")) == "cudnn"
    assert choice.choose(None, call, Target("cuda", is_partitioned=True)) == "tiled"
    assert choice.choose(None, call, Target("rocm")) == "tiled"


def test_without_a_gpu_at_hand_programs_for_gpus_have_tiles() -> None:
    assert "cudnn" not in lowered(alibi_jax.attention, *normal())
    with pytest.raises(NotImplementedError, match="implementation 'cudnn' cannot run here: cuDNN is not detected"):
        lowered(functools.partial(alibi_jax.attention, implementation="cudnn"), *normal())
