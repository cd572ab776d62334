"""``implementation="triton"`` without a GPU: where it runs, what it refuses; and ``triton_cases.py``, interpreted."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import alibi_torch  # noqa: E402
from tests.torch.test_tiled import tensors  # noqa: E402

HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = {"TRITON_INTERPRET": "1"}  # read when Triton is imported: in a process of its own


@pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
@pytest.mark.parametrize("marks", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_the_kernels_are_right_in_interpretation(marks: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", marks]
    run = subprocess.run(
        [*command, "tests/torch/triton_cases.py"],
        env=os.environ | INTERPRETED,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-6000:]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "places": ({"positions": torch.arange(9)}, "neither positions of the caller's own nor other laws than the linear"),
    "a law": ({"law": "log"}, "nor other laws than the linear one"),
    "a mask of pairs": ({"mask": torch.ones(9, 9, dtype=torch.bool)}, "takes masks of keys alone, equal for all"),
    "float64": ({"dtype": torch.float64}, "must be given float32, float16 or bfloat16, got torch.float64"),
    "wide heads": ({"head_dim": 257}, "takes a head_dim of at most 256, got 257"),
}


@pytest.mark.parametrize(("arguments", "words"), REFUSED.values(), ids=REFUSED)
def test_what_it_cannot_run_is_refused_in_words(
    arguments: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {name: arguments[name] for name in ("dtype", "head_dim") if name in arguments}
    rules = {name: x for name, x in arguments.items() if name not in sizes}
    inputs = tensors((9, 9), **sizes)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(NotImplementedError, match=r"'triton' runs on cuda \(ROCm included\), .* got cpu; 'tiled' and"):
        alibi_torch.attention(*inputs, implementation="triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr("alibi_torch._dispatch.HAS_TRITON", True)
    assert alibi_torch.explain(*inputs, **rules).implementation != "triton"  # never the default
    with pytest.raises(NotImplementedError, match=words):
        alibi_torch.attention(*inputs, **rules, implementation="triton")
    monkeypatch.setattr("alibi_torch._dispatch.HAS_TRITON", False)
    with pytest.raises(NotImplementedError, match="needs Triton, which PyTorch for CUDA and ROCm brings along"):
        alibi_torch.attention(*inputs, implementation="triton")
