"""``python -m alibi_mlx.check``: what it says, and that it notices what is wrong. Its part for Metal needs no Metal.

There a stand-in for MLX's attention refuses what Metal's kernels refuse, for MLX's own reasons, and computes the rest.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core", reason="mlx is not installed")

import alibi_core  # noqa: E402
from alibi_core import AttentionCall  # noqa: E402
from alibi_mlx import attention  # noqa: E402
from alibi_mlx._metal import Kernels  # noqa: E402
from alibi_mlx.check import __main__ as check  # noqa: E402
from alibi_mlx.check import _calls  # noqa: E402
from alibi_mlx.check._calls import TF32, Outcome, asked_for_fused_kernels, deviation, factor_roundoff  # noqa: E402
from tests.support.full import first_of  # noqa: E402

PLAIN = mx.fast.scaled_dot_product_attention
SHORT = ["--quick", "--longest", "70"]
ON_CPU, ON_METAL, ON_OLDER_METAL = (
    Kernels(mx.cpu, newer=True),
    Kernels(mx.gpu, newer=True),
    Kernels(mx.gpu, newer=False),
)


def metals_attention(query, key, value, *, scale, mask=None, force_fused=False):
    """Compute attention, unless a fused kernel is wanted and Metal has none."""
    if force_fused:
        name, sizes = ("full", (64, 72, 80, 96, 128, 192, 256)) if query.shape[2] > 8 else ("vector", (64, 96, 128))
        if query.shape[-1] not in sizes or query.shape[-1] != value.shape[-1]:
            reason = f"the {name} attention kernel supports head dims {sizes}; got query head dim {query.shape[-1]}."
            message = "[scaled_dot_product_attention] force_fused=True but no fused kernel is available: "
            raise ValueError(message + reason)
    mask = mask if mask is None or isinstance(mask, str) else mask.astype(mx.float32)
    arrays = (x.astype(mx.float32) for x in (query, key, value))
    return PLAIN(*arrays, scale=scale, mask=mask).astype(query.dtype)


@pytest.fixture
def metal(monkeypatch):
    """A Mac, as far as the command can tell."""
    monkeypatch.setattr(Kernels, "here", lambda: ON_METAL)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    monkeypatch.setattr(mx, "set_default_device", lambda device: None)
    told = {"device_name": "Apple M9", "architecture": "applegpu_x"}
    monkeypatch.setattr(mx, "device_info", lambda device: told, raising=False)
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", metals_attention)


@pytest.fixture
def checked(tmp_path, capsys):
    """Return a function that runs the command and returns its exit status, text, rows of cells, and report."""

    def run(kernels, arguments=SHORT):
        path = tmp_path / "check.json"
        status = check.main([*arguments, "--json", str(path)], kernels=kernels)
        text = capsys.readouterr().out
        lines = [line for line in text.splitlines() if line.startswith("|")]
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
        return status, text, rows, json.loads(path.read_text())

    return run


def tensors(q_len=40, kv_len=1100, dtype=mx.float32):
    rng = np.random.default_rng(0)
    shapes = ((1, 4, q_len, 16), (1, 2, kv_len, 16), (1, 2, kv_len, 16))
    return tuple(mx.array(rng.standard_normal(shape, np.float32)).astype(dtype) for shape in shapes)


def compare(arrays, result, implementation="tiled", factor_roundoff=0.0, **rules):
    """Return how far a result is off, and which part of the budget that is."""
    return deviation(arrays, result, AttentionCall.check(*arrays, **rules), implementation, factor_roundoff)


@pytest.mark.full
def test_from_the_command_line_it_is_quiet_but_for_its_table():
    command = [sys.executable, "-W", "error", "-m", "alibi_mlx.check", "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert (done.returncode, done.stderr) == (0, "")
    assert "calls are as they should be." in done.stdout


def test_without_metal_it_says_so_and_checks_the_cpu(checked):
    status, text, rows, report = checked(ON_CPU)
    assert status == 0
    assert f"alibi-core {alibi_core.__version__}, MLX {mx.__version__}, NumPy {np.__version__}, " in text
    assert "There is no Metal device here, so fused kernels were not tried" in text
    # Of 4 head sizes for few queries, and for more 5, folded, and 6.
    assert len(rows) == 4 + 5 + 6
    assert {(row[5], row[-1]) for row in rows} == {("-", "right")}
    assert f"All {len(rows)} calls are as they should be." in text
    assert (report["metal"], report["right"], len(report["calls"])) == (False, True, len(rows))
    assert report["environment"]["MLX"] == mx.__version__
    for call in report["calls"]:
        assert call["right"]
        assert call["tried"] is None
        assert 0 < call["share"] < 1
        assert call["seconds"] > 0 < call["dense_seconds"]


@pytest.mark.full
def test_in_full_there_is_a_call_for_each_dtype(checked):
    _, _, rows, _ = checked(ON_CPU, ["--longest", "70"])
    assert len(rows) == 3 * 8 + 2 * 5 + 3 * 6
    assert {row[-1] for row in rows} == {"right"}
    assert {row[0] for row in rows} == {"float16", "bfloat16", "float32"}
    assert {row[1] for row in rows} == {"1", "8", "40"}


def test_the_default_device_is_as_before_also_after_an_interrupt(monkeypatch):
    set_to = []

    def interrupted(*call):
        raise KeyboardInterrupt

    monkeypatch.setattr(check, "outcome", interrupted)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu, 0))  # of an MLX for CUDA, say
    monkeypatch.setattr(mx, "set_default_device", lambda device: set_to.append(device.type))
    with pytest.raises(KeyboardInterrupt):
        check.main([], kernels=ON_CPU)
    assert set_to == [mx.cpu, mx.gpu]


# What is wrong


def steeper(*tensors, **arguments):
    return attention(*tensors, mx.array(alibi_core.slopes(8)) * 1.02, **arguments)


def not_a_number(*tensors, **arguments):
    result = attention(*tensors, **arguments)
    result[0, 3, -1, 5] = mx.nan
    return result


def a_token_late(*tensors, **arguments):
    return attention(*tensors[:1], *(mx.roll(x, 1, axis=2) for x in tensors[1:]), **arguments)


def last_row_missing(*tensors, **arguments):
    result = attention(*tensors, **arguments)
    result[:, :, -1] = 0
    return result


@pytest.mark.parametrize("wrong", first_of([steeper, not_a_number, a_token_late, last_row_missing], keep=2))
def test_a_wrong_result_makes_the_exit_status_1(wrong, monkeypatch, checked):
    monkeypatch.setattr(_calls, "attention", wrong)
    status, text, rows, report = checked(ON_CPU)
    assert status == 1
    verdicts = [row[-1] for row in rows]
    # A slope that is 2% off is within what bfloat16 rounds, but not within what float32 does.
    assert all(x == "WRONG" for x, row in zip(verdicts, rows, strict=True) if row[0] == "float32")
    assert wrong is steeper or set(verdicts) == {"WRONG"}
    assert f"{verdicts.count('WRONG')} of {len(verdicts)} calls are WRONG." in text
    assert not report["right"]
    assert [call["right"] for call in report["calls"]] == [x == "right" for x in verdicts]
    if wrong is not_a_number:
        assert {(call["error"], call["share"]) for call in report["calls"]} == {(None, None)}
        assert "bfloat16, 40 queries, 70 keys, folded 61: gave NaN or infinities" in text


def test_a_call_that_raises_is_wrong_and_the_others_still_run(monkeypatch, checked):
    def failing(*tensors, implementation):
        if implementation == "folded":
            raise RuntimeError("out of memory")
        return attention(*tensors, implementation=implementation)

    monkeypatch.setattr(_calls, "attention", failing)
    status, text, rows, _ = checked(ON_CPU)
    assert status == 1
    verdicts = {(row[4].split()[0], row[-1]) for row in rows}
    assert verdicts == {("folded", "WRONG"), ("tiled", "right")}
    assert "bfloat16, 40 queries, 70 keys, folded 61: raised RuntimeError: out of memory" in text


def test_an_outcome_is_right_if_its_share_of_the_budget_is_at_most_1():
    outcome = Outcome("float32", 1, 1, 64, "tiled", 64, error=0.1, share=1.0)
    assert outcome.is_right
    assert not replace(outcome, share=1.001).is_right
    assert not replace(outcome, share=None).is_right
    assert not replace(outcome, raised="ValueError: no").is_right
    assert Outcome("float32", 1, 1, 64, "folded", 64, refused="cannot").is_right


# The budget


def test_every_row_is_compared():
    arrays = tensors(300, 300)
    for row in (0, 127, 128, 299):
        wrong = np.array(attention(*arrays, implementation="dense"))
        wrong[0, 2, row, 3] += 0.01
        error, share = compare(arrays, mx.array(wrong))
        assert share > 1
        assert error == pytest.approx(0.01, rel=1e-3)


def test_what_may_be_left_out_and_what_moves_scores_widen_the_budget():
    arrays = tensors()
    moved = attention(*arrays, implementation="dense") + 0.01
    _, alone = compare(arrays, moved)
    assert alone > 1
    _, left_out = compare(arrays, moved, tolerance=0.1)
    assert left_out < min(1, alone / 5)
    assert compare(arrays, moved, factor_roundoff=TF32)[1] < alone / 5
    assert compare(arrays, moved, "folded")[1] < alone


def test_a_device_whose_tensor_units_round_is_told_from_one_whose_do_not(monkeypatch):
    assert factor_roundoff(40, 64) == 0

    def in_tf32(*arrays, **options):
        return PLAIN(*(mx.round(x * 1024) / 1024 for x in arrays), **options)

    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", in_tf32)
    assert factor_roundoff(40, 64) == TF32


# With Metal


@pytest.mark.usefixtures("metal")
def test_with_metal_it_says_which_calls_have_fused_kernels_and_why_others_do_not(checked):
    status, text, rows, report = checked(ON_METAL)
    assert status == 0
    assert "device Apple M9, architecture applegpu_x" in text
    assert "no Metal device" not in text
    assert {row[-1] for row in rows} == {"right"}
    assert all((row[5] == "yes") == (row[4] != "tiled 160") for row in rows)
    assert [row[5] for row in rows if row[4] == "tiled 160" and row[1] == "70"] == ["0 of 2"]  # of 4 heads each
    assert "float32, 70 queries, 70 keys, tiled 160: no fused kernel for 2 of 2: the full attention kernel " in text
    assert report["metal"]
    found = [(call["head_dim"], call["implementation"], call["padded"], call["q_len"] <= 8) for call in report["calls"]]
    few = [(n, "tiled", n, True) for n in (64, 96, 128, 160)]
    folded = [(n - 6, "folded", n, False) for n in (64, 72, 80, 96, 128)]
    assert found == [*few, *folded, *((n, "tiled", n, False) for n in (64, 72, 80, 96, 128, 160))]
    assert {call["tried"] is None for call in report["calls"]} == {False}
    wide = [call for call in report["calls"] if call["padded"] == 160]
    assert all(sum(call["unfused"].values()) == call["tried"] for call in wide)
    assert all(call["unfused"] == {} for call in report["calls"] if call not in wide)


@pytest.mark.usefixtures("metal")
def test_an_mlx_that_cannot_be_asked_is_checked_all_the_same(checked):
    status, text, rows, _ = checked(ON_OLDER_METAL)
    assert status == 0
    assert "This MLX cannot be asked for its fused kernels: that needs 0.32.4 or later." in text
    assert {row[5] for row in rows} == {"-"}
    assert {(row[4].split()[0], row[-1]) for row in rows} == {("tiled", "right")}
    assert {"72", "96"}.isdisjoint(row[4].split()[1] for row in rows if int(row[1]) > 8)


def test_after_an_error_mlx_is_as_before():
    def failing():
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        asked_for_fused_kernels(failing)
    assert mx.fast.scaled_dot_product_attention is PLAIN
