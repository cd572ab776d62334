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
    assert any(row["name"] == "alibi_torch" and "seconds" in row for row in steps["attention"]["rows"])


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
