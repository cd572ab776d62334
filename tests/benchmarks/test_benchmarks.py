"""Each benchmark runs in small as from a command line, and its numbers are what it says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

for module in ("torch", "matplotlib", "rich", "tqdm"):
    pytest.importorskip(module)

import torch  # noqa: E402

from benchmarks import harness  # noqa: E402
from benchmarks.attention import Reference, attend, relative_error, slopes  # noqa: E402
from benchmarks.extrapolation import __main__ as extrapolation  # noqa: E402
from benchmarks.extrapolation.models import METHODS, rotate, sinusoids  # noqa: E402

ROOT = Path(__file__).parents[2]
QUICK = {
    "agreement": (),
    "attention": ("--quick", "--beside", str(ROOT), "--backend", "torch", "--device", "cpu"),
    "attention jax": ("--quick", "--backend", "jax", "--device", "cpu"),
    "attention mlx": ("--quick", "--backend", "mlx", "--device", "cpu"),
    "bias": ("--quick",),
    "bounds": ("--length", "256"),
    "patches": ("--quick",),
    "gpu": ("--dry-run",),
    "models": ("--quick",),
    "parallel": ("--quick",),
}
NEEDED = {"attention jax": ("jax", "flax"), "attention mlx": ("mlx",), "models": ("transformers",)}
NEEDED |= {"gpu": ("transformers", "jax", "flax")}


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_each_runs_in_small_and_writes_results(name: str, tmp_path: Path) -> None:
    for module in NEEDED.get(name, ()):
        pytest.importorskip(module)
    command = [sys.executable, "-m", f"benchmarks.{name.partition(' ')[0]}", *QUICK[name]]
    command += ["--output", str(tmp_path)] if QUICK[name] else []
    # One thread: several of them, on a machine that is busy with other tests, wait for each other.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, ["", *sys.path])), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    for path in tmp_path.glob("*.json"):
        found = json.loads(path.read_text(encoding="utf-8"))
        assert "alibi-core" in found["versions"]
        rows = found.get("measurements") or [row for x in found["sections"].values() for row in x["rows"]]
        assert rows
        assert not any("failed" in row for row in rows)
        assert all(row["ratio"] > 0 for row in rows if row.get("unit") == "s")


@pytest.mark.slow
def test_extrapolation_trains_evaluates_and_draws_every_method(tmp_path: Path) -> None:
    settings = extrapolation.Settings(8, 1, 32, 4, 2, 2, 3, 3e-3, 200_000, 256, 4)
    assert extrapolation.run(settings, (0, 1), tmp_path) == 0
    found = json.loads((tmp_path / "extrapolation.json").read_text(encoding="utf-8"))["methods"]
    assert list(found) == list(METHODS)
    # Untrained models of 256 bytes lose log(256) nats or so.
    assert all(
        4 < loss < 8
        for x in found.values()
        for kind in extrapolation.PROTOCOLS
        for loss in np.ravel([*x[kind].values()])
    )
    assert (tmp_path / "extrapolation.png").read_bytes().startswith(b"\x89PNG")


class Counting(torch.nn.Module):
    """A model whose loss at a token depends on how many tokens it was given before it, and on no weights."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        seen = torch.arange(1.0, tokens.shape[1] + 1)[None, :, None]
        return torch.sin(seen * torch.arange(1, 257)).expand(*tokens.shape, 256)


def test_both_protocols_score_the_same_tokens_in_the_contexts_that_they_promise() -> None:
    settings = extrapolation.Settings(train_length=8, scored=256, windows=1000)
    text = torch.randint(256, (128 + 256,), generator=torch.Generator().manual_seed(3)).to(torch.uint8)

    def loss(target: int, context: int) -> float:
        logits = Counting()(torch.zeros(1, context, dtype=torch.int64))[0, -1].double()
        return (logits.logsumexp(0) - logits[text[target].long()]).item()

    found = extrapolation.evaluate(Counting(), text, settings)
    for length in settings.lengths:
        segments = [loss(128 + i, 1 + i % length) for i in range(256)]
        windows = [loss(128 + i, length - settings.stride + 1 + i % settings.stride) for i in range(256)]
        assert found["non_overlapping"][str(length)] == pytest.approx(np.mean(segments), rel=1e-5)
        assert found["sliding"][str(length)] == pytest.approx(np.mean(windows), rel=1e-5)


def test_sinusoidal_and_rotary_positions_follow_their_formulas() -> None:
    position, pair = 7, 2
    angle = position / 10_000 ** (2 * pair / 10)
    assert sinusoids(9, 10)[position, 4:6].tolist() == pytest.approx([np.sin(angle), np.cos(angle)], abs=1e-6)
    x = torch.randn(9, 10, dtype=torch.float64)
    left, right = x[position, pair].item(), x[position, pair + 5].item()
    turned = complex(left, right) * complex(np.cos(angle), np.sin(angle))
    assert rotate(x)[position, [pair, pair + 5]].tolist() == pytest.approx([turned.real, turned.imag])


def test_times_are_medians_of_pairs_whose_order_alternates() -> None:
    taken = {"ours": iter([100.0, 3.0, 8.0, 5.0]), "theirs": iter([100.0, 1.0, 2.0, 2.0])}
    calls: list[str] = []

    def clock(name: str) -> float:
        calls.append(name)
        return next(taken[name])

    found = harness.paired("ours", "theirs", 3, clock=clock)
    assert found == {"values": [5.0, 2.0], "ratio": 1 / 3, "lowest": 0.25, "highest": 0.4}
    assert calls == ["ours", "theirs"] * 2 + ["theirs", "ours"] + ["ours", "theirs"]


def two_arrays_at_once(size: int) -> Any:
    np.ones(4 * size, dtype=np.uint8)  # a peak before the call, which does not count
    return lambda: [np.ones(size, dtype=np.uint8) for _ in range(2)]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is exact on Linux only")
def test_peak_memory_is_that_of_the_call_alone() -> None:
    size = 32 * 2**20
    grown = harness.peak_growth("tests.benchmarks.test_benchmarks:two_arrays_at_once", size)
    assert abs(grown - 2 * size) <= 4 * 2**21  # the kernel counts pages in batches, for each array 2 MiB either way


def test_the_reference_tells_a_wrong_slope_and_a_wrong_gradient() -> None:
    drawn = np.random.default_rng(0)
    query, key, value, grad = drawn.standard_normal((4, 1, 3, 8, 4))
    exact = Reference((query, key, value, grad), lambda x: x, gradients=True)
    right = [
        attend(*(x[0, h] for x in (query, key, value)), rate, np.arange(8), grad[0, h])
        for h, rate in enumerate(slopes(3))
    ]
    result, *gradients = (np.stack(x)[None] for x in zip(*right, strict=True))
    assert exact.error(result) == 0
    assert set(exact.gradient_errors(gradients).values()) == {0.0}
    assert exact.error(result[:, ::-1]) > 0.1
    assert exact.gradient_errors([gradients[0], gradients[2], gradients[1]])["key"] > 0.1
    assert relative_error([np.array([np.nan])], [np.array([1.0])]) == np.inf
