"""Tiled attention in MLX alone: its gradients once compiled, what it evaluates, and what it costs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core", reason="mlx is not installed")

from alibi_mlx import _kernels, _plan, attention  # noqa: E402


def test_a_tolerance_of_zero_evaluates_nothing() -> None:
    tensors = [mx.random.normal((1, 2, 1100, 4)) for _ in range(3)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mx, "eval", lambda *arrays: pytest.fail("evaluated"))
        result = attention(*tensors, tolerance=0.0)
    np.testing.assert_allclose(result, attention(*tensors, implementation="dense"), atol=2e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_of_decoding_evaluates_nothing_on_a_gpu(dtype: str) -> None:
    rng = np.random.default_rng(0)
    tensors = [mx.array(rng.standard_normal((1, 8, n, 64)), getattr(mx, dtype)) for n in (1, 33_000, 33_000)]
    expected = attention(*tensors, implementation="dense")
    with pytest.MonkeyPatch.context() as patch:
        for module in (_plan, _kernels):
            patch.setattr(module, "on_gpu", lambda: True)
        patch.setattr(mx, "eval", lambda *arrays: pytest.fail("evaluated"))
        result = attention(*tensors)
    exact = 2e-6 if dtype == "float32" else 1e-2
    np.testing.assert_allclose(*(x.astype(mx.float32) for x in (result, expected)), atol=exact)


COMPILED_AT_SEVERAL_LENGTHS = """
import pathlib, sys, tempfile
import mlx.core as mx
import alibi_mlx

both = lambda n: {"mask": mx.ones((1, 1, 1, n), mx.bool_), "is_causal": False, "future_slopes": mx.ones(2)}
for form in (lambda n: {}, both):
    loss = lambda *tensors: alibi_mlx.attention(*tensors, **form(tensors[0].shape[2])).sum()
    compiled = mx.compile(mx.value_and_grad(loss, argnums=(0, 1, 2, 3)))
    for length in (140, 240, 300):
        mx.eval(compiled(*mx.zeros((3, 1, 2, length, 4)), mx.ones(2)))
        print(len(list(pathlib.Path(tempfile.gettempdir()).rglob("*.so"))))
"""


@pytest.mark.slow
def test_a_new_length_has_no_kernel_compiled(tmp_path: Path) -> None:
    command = [sys.executable, "-c", COMPILED_AT_SEVERAL_LENGTHS]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}  # where MLX keeps the kernels that it has compiled
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    kernels = [int(x) for x in done.stdout.split()]
    assert 0 < kernels[0] == kernels[1] == kernels[2]
    assert kernels[3] == kernels[4] == kernels[5]


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("form", [{}, "gates", pytest.param({"is_causal": False}, marks=pytest.mark.slow)])
def test_memory_grows_with_the_length_alone(form: Any, compiled: bool) -> None:
    wrap = mx.compile if compiled else lambda function: function
    rows = {}
    for length in (1024, 2048):
        tensors = [mx.random.normal((1, 2, length, 4)) for _ in range(3)]
        mx.eval(tensors)
        rules = {"log_gates": mx.zeros((1, 2, length))} if form == "gates" else form
        both = wrap(mx.value_and_grad(lambda *x, rules=rules: attention(*x, **rules).sum(), argnums=(0, 1, 2)))
        mx.eval(both(*tensors))  # what is made only once
        mx.clear_cache()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        mx.eval(both(*tensors))
        rows[length] = mx.get_peak_memory() - before
    scores = 4 * 2 * 2048**2
    assert rows[2048] < scores  # attention that holds all scores takes several times as much
    assert rows[2048] < 2.5 * rows[1024]
