"""The session for a GPU, in small on the CPU, and what reads machine code."""

import json
from unittest import mock

import pytest

pytest.importorskip("rich")
pytest.importorskip("torch")

from benchmarks import cuda_session
from benchmarks.research.cuda_static.machine_code import loops

pytestmark = pytest.mark.full


def found(folder):
    return json.loads((folder / "cuda-session.json").read_text())["steps"]


def test_every_step_runs_on_a_cpu_or_says_why_not(tmp_path):
    for each in ("jax", "flax", "transformers"):
        pytest.importorskip(each)
    assert cuda_session.main(["--dry-run", "--output", str(tmp_path)]) == 0
    steps = found(tmp_path)
    assert list(steps) == list(cuda_session.STEPS)
    for name, step in steps.items():
        assert step["rows"], name
        assert not step.get("skipped"), step
        assert all(row.keys() & {"seconds", "error", "skipped", "tests"} for row in step["rows"]), name
    rows = steps["attention"]["rows"]
    assert any(row["name"] == "alibi_torch" and "seconds" in row and row["same_bits"] for row in rows)
    assert list(dict.fromkeys(row["pass"] for row in rows)) == ["forward", "decode", "forward and backward"]
    assert {row["tokens"] for row in steps["numerics"]["rows"]} == {64, 256}
    assert json.loads((tmp_path / "cuda-session.json").read_text())["bars"]


def test_gradients_are_checked_where_keys_are_left_out():
    from alibi_torch._flex.mask import BLOCK, FEW_BLOCKS

    assert 4 * (4 * cuda_session.Scope.checked // BLOCK) ** 2 > FEW_BLOCKS  # four heads


def test_what_a_process_does_at_its_end_costs_a_step_no_time(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text("import atexit, time\natexit.register(time.sleep, 300)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    path = tmp_path / "found.json"
    path.write_text('{"steps": {}}')
    assert "cut" not in cuda_session._step("kernels", path, 60.0, True)
    assert json.loads(path.read_text())["steps"]["kernels"]["rows"]


def test_processes_of_tests_have_a_thread_each(monkeypatch):
    started = {}

    def start(command, env, **_):
        started.update(env)
        return mock.Mock(stdout=["x PASSED"], wait=lambda: 0)

    monkeypatch.setattr(cuda_session.subprocess, "Popen", start)
    *_, last = cuda_session.tests(cuda_session.Scope("cuda", 0.0))
    assert last["tests"] == {"passed": 1}
    assert started["OMP_NUM_THREADS"] == started["TORCHINDUCTOR_COMPILE_THREADS"] == "1"


def test_a_gpu_is_timed_with_the_host_ahead_of_it(monkeypatch):
    import torch

    from benchmarks.attention.backends.torch import Torch

    said = []
    event = mock.Mock(record=lambda: said.append("event"), elapsed_time=lambda _: 5.0)
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: said.append("wait"))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: said.append(cycles))
    backend = Torch("cpu")
    backend.device = "cuda"
    assert backend.seconds(lambda: said.append("call"), 1e-3) == 5e-3
    assert said == ["wait", 2_000_000, "event", "call", "event", "wait"]
    del said[:]
    backend.seconds(lambda: said.append("call"))
    assert said == ["wait", "event", "call", "event", "wait"]


def of_a_pass(name, seconds, tokens=65_536, kind="forward", **figures):
    return {"name": name, "pass": kind, "tokens": tokens, "seconds": seconds, **figures}


def test_what_is_asked_is_beside_what_was_measured():
    ours, error = "alibi_torch", {"relative": 2e-3}
    rows = [
        of_a_pass(ours, 2.0, gpu_seconds=1.0, same_bits=True, error={"relative": 3e-3}, peak_bytes=500),
        of_a_pass("SDPA FLASH, no positions", 50.0, gpu_seconds=40.0),
        of_a_pass("SDPA, no positions", 28.0, gpu_seconds=41.0, error=error),
        of_a_pass("SDPA, dense bias", 1.0),
        of_a_pass(ours, 1.0, 16_384, same_bits=False, peak_bytes=100),
        {"name": "SDPA CUDNN, no positions", "pass": "forward", "tokens": 16_384, "skipped": "no such kernel"},
        of_a_pass("our cache", 1.0, kind="decode"),
        of_a_pass("SDPA, no positions", 21.0, kind="decode"),
    ]
    found = {row["what"]: row for row in cuda_session.bars({"attention": {"rows": rows}, "jax": {"rows": rows}})}
    forward = found["times as fast, forward, 65,536 tokens"]
    assert (forward["measured"], forward["gpu_alone"], forward["is_met"]) == (14.0, 40.0, False)
    assert forward["beside"] == "SDPA, no positions"
    assert found["times as fast, decode, 65,536 tokens"]["is_met"]
    assert found["times as fast, forward, 16,384 tokens"]["is_met"] is None
    assert not found["error, forward, 65,536 tokens"]["is_met"]  # 1.5 times
    assert found["memory of a token, forward, 65,536"]["measured"] == 1.25
    assert found["share of calls with the same bits twice"]["measured"] == 0.5
    bars = [row["bar"] for row in found.values() if row["what"].startswith("times")]
    assert bars == [1.0, 2.0, 5.0, 15.0, 0.9, 1.8, 4.5, 13.0, 20.0]
    lines = cuda_session._table(list(found.values())).splitlines()
    assert "14.00     40.00  MISSED" in next(line for line in lines if line.startswith(forward["what"]))
    assert cuda_session.bars({})[0]["measured"] is None


def test_a_session_is_over_in_time_and_says_what_was_cut(tmp_path):
    cuda_session.main(["--dry-run", "--seconds", "0.5", "--only", "numerics,jax", "--output", str(tmp_path)])
    assert all("the time was over" in step["cut"] for step in found(tmp_path).values())


def test_kernels_are_told_something_else_for_a_while():
    import torch

    from alibi_torch import attention
    from alibi_torch._flex import kernels

    inputs = torch.randn(3, 1, 2, 4, 16).unbind()
    seen = []

    def attend(*tensors, kernel_options=None, **_):
        seen.append(kernel_options)
        return tensors[0]

    with mock.patch.object(kernels, "_kernel", return_value=attend):
        for options in ({}, {"SPLIT_KV": 8}, {}):
            with cuda_session.told(options):
                attention(*inputs, implementation="flex")
    assert seen == [None, {"SPLIT_KV": 8}, None]


LISTING = """
        /*0000*/                   MUFU.EX2 R1, R2 ;             /* 0x0 */
        /*0010*/                   HMMA.16816.F32.BF16 R4, R8, R10, R4 ;  /* 0x0 */
        /*0020*/                   MUFU.EX2 R1, R2 ;             /* 0x0 */
        /*0030*/                   MUFU.EX2 R1, R2 ;             /* 0x0 */
        /*0040*/                   STL [R1], R3 ;                /* 0x0 */
        /*0050*/              @!P0 BRA 0x10 ;                    /* 0x0 */
        /*0060*/                   EXIT ;                        /* 0x0 */
        /*0070*/                   BRA 0x70;                     /* 0x0 */
"""


def test_loops_are_read_from_machine_code():
    (loop,) = loops(LISTING)
    assert (loop["instructions"], loop["scores"], loop["spills"]) == (5, 2, 1)
    assert (loop["product"], loop["products"]) == ("mma.sync", 1)


@pytest.mark.research
def test_kernels_are_compiled_without_a_gpu():
    pytest.importorskip("triton")
    from benchmarks.research.cuda_static import Subject, compiled

    (kernel,) = compiled(Subject(90, "forward", 8, 64))
    assert len(kernel["loops"]) == 2
    assert all(loop["product"] == "wgmma" and not loop["spills"] for loop in kernel["loops"])


@pytest.mark.research
def test_what_pretends_to_be_a_gpu_starts_no_pool_of_compilers():
    pytest.importorskip("triton")
    import torch._inductor.config as config

    from benchmarks.research.cuda_static.compile import _said_to_be_there

    with _said_to_be_there(90):
        assert config.compile_threads == 1
