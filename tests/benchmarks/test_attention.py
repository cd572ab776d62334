import json
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("rich")
pytest.importorskip("torch")

import torch

import alibi_torch
from benchmarks import harness
from benchmarks.attention import __main__ as attention
from benchmarks.attention import sections
from benchmarks.attention.backends import earlier_in, load
from benchmarks.attention.backends import torch as of_torch
from benchmarks.attention.backends.torch import Torch
from benchmarks.attention.exact import Error, Reference, attend, errors_of_gradients, sample
from benchmarks.attention.numerics import Run, check, tile_limit
from benchmarks.attention.sizes import QUICK, Shape, Timed
from tests.support.programs import quick_run

pytestmark = pytest.mark.full


def as_float64(tensor):
    return tensor.detach().double().numpy()


def torch_with(**attributes):
    """PyTorch on the CPU with other contestants; by default without peers, whose warnings are theirs."""
    backend = Torch("cpu")
    vars(backend).update({"peers": ()} | attributes)
    return backend


# --- What others are compared with ------------------------------------------------------------------------------------


def test_exact_attention_and_gradients_are_those_of_autograd():
    generator = torch.Generator().manual_seed(0)
    tensors = torch.randn(4, 1, 4, 37, 8, generator=generator, dtype=torch.float64).unbind()
    query, key, value, grad = (x.clone().requires_grad_() for x in tensors)
    result = alibi_torch.attention(query, key, value, implementation="dense")
    gradients = torch.autograd.grad(result, (query, key, value), grad)
    rows = sample(37, 5)
    # Four heads have slopes that are powers of two, so float64 differs by its own rounding alone.
    assert Reference.of(tensors, rows, as_float64).error(result).worst < 1e-14
    assert Reference.of(tensors, rows, as_float64, grad=grad).error(gradients[0]).worst < 1e-14
    errors = errors_of_gradients(gradients, tensors[:3], grad, as_float64)
    assert max(error.worst for error in errors.values()) < 1e-13

    plain = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    assert Reference.of(tensors, np.arange(37), as_float64, has_bias=False).error(plain).worst < 1e-14
    last = Reference.of((query[:, :, -1:], key, value), np.arange(1), as_float64)
    assert last.error(result[:, :, -1:]).worst < 1e-14


def test_chunks_of_queries_add_up():
    *tensors, grad = np.random.default_rng(0).standard_normal((4, 23, 4))
    whole, parts = (attend(tensors, 0.5, np.arange(23), grad, at_once=at_once) for at_once in (2**24, 23 * 5))
    for one, other in zip(parts, whole, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-14)


def test_errors():
    exact = np.array([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]])
    found = exact + np.array([[0, 0], [0.03, 0.04], [0, 0]])
    error = Error.between([(found, exact)])
    assert (error.worst, error.relative) == pytest.approx((0.04, 0.05 / np.hypot(5, 0.5)))
    assert Error.between([(found, exact), (np.array([[1.0, np.nan]]), np.ones((1, 2)))]) == Error(np.inf, np.inf)


def test_tile_limit_counts_the_pairs_that_the_core_needs():
    generator = torch.Generator().manual_seed(0)
    tensors = torch.randn(3, 1, 2, 3000, 8, generator=generator).unbind()
    limit = tile_limit(tensors, "float32", as_float64)
    # Slopes 1/16 and 1/256. For the first, a reach of some hundred tokens leaves less than a third of the causal half.
    assert 1.5 < limit < 4
    assert tile_limit(tensors, "bfloat16", as_float64) > limit  # a larger tolerance
    query, key, value = tensors
    huge = key.clone()
    huge[:, :, 0] = 1e6  # every query may have to see that
    assert tile_limit((query, huge, value), "float32", as_float64) == 1
    assert tile_limit((query[:, :, -1:], key, value), "float32", as_float64) > 1
    assert tile_limit((query, huge, value), "float32", as_float64, is_dense=True) == pytest.approx(2, rel=1e-3)


# --- The contestants --------------------------------------------------------------------------------------------------


def test_blocks_of_flex_attention_are_those_of_the_predicate():
    from torch.nn.attention.flex_attention import create_block_mask

    ours = of_torch._causal_blocks(640, torch.device("cpu"))
    theirs = create_block_mask(lambda b, h, q, k: q >= k, None, None, 640, 640, device="cpu")
    np.testing.assert_array_equal(ours.to_dense(), theirs.to_dense())
    for name in ("kv_num_blocks", "full_kv_num_blocks"):
        np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))


def test_a_peer_that_does_not_fit_or_fails_is_told_and_the_run_goes_on():
    def fail(*_):
        raise ValueError("no such thing\nat all")

    dense = of_torch.PEERS[0]
    backend = torch_with(peers=(dense, replace(dense, name="failing", prepare=fail)), free_bytes=lambda: 2**40)
    run = Run(backend, replace(QUICK, timed=(Timed(Shape(2, 8, 32, "float32"), 1, 1),)))
    found = list(sections.passes(run, False))
    assert [each.ratio is None for each in found] == [False, False, True]
    assert found[2].note == "not measured, ValueError: no such thing"
    backend.free_bytes = lambda: 0
    found = list(sections.passes(run, True))
    assert found[1].ratio is None
    assert found[1].note.startswith("left out, it needs ")
    assert not run.wrong


@pytest.fixture(params=["torch", "jax", "mlx"])
def backend(request):
    pytest.importorskip(f"alibi_{request.param}")
    return load(request.param, "cpu")


# In PyTorch, what is compiled has no backward pass on a CPU, and BLOOM's bias loses digits: others judge these.
def test_contestants_compute_what_they_say(backend):
    shape = Shape(4, 8, 37, "float32", batch=2)
    tensors = backend.tensors(shape, backward=True)
    assert backend.tensors(shape)[3] is None
    assert tensors[0].shape == shape.dims
    peers = backend.peers[:1] if backend.name == "torch" else backend.peers
    for contestant in (backend.ours, *peers, plain := backend.baseline(tensors, False)):
        result = backend.prepare(contestant, tensors, False)()
        has_bias = contestant is not plain
        reference = Reference.of(tensors, np.arange(37), backend.as_float64, has_bias=has_bias)
        assert reference.error(result).relative < 2**-20
        if has_bias:
            gradients = backend.prepare(contestant, tensors, True)()
            errors = errors_of_gradients(gradients, tensors[:3], tensors[3], backend.as_float64)
            assert max(error.relative for error in errors.values()) < 2**-20


def test_who_answers_one_query(backend):
    found = backend.decode(Shape(4, 8, 37, "float32"))
    for call, has_bias in ((found.cached, True), (found.bare, True), (found.with_row, True), (found.baseline, False)):
        reference = Reference.of(found.tensors, np.arange(1), backend.as_float64, has_bias=has_bias)
        assert reference.error(call()).relative < 2**-20


# --- Memory -----------------------------------------------------------------------------------------------------------


def test_memory_that_is_the_result_or_a_gradient_is_not_extra(monkeypatch):
    pytest.importorskip("alibi_jax")
    jax_cpu, shape, grown = load("jax", "cpu"), Shape(2, 8, 256, "float32"), iter([100_000, 100_000, 300_000, 900_000])
    monkeypatch.setattr(harness, "run_alone", lambda *_: {"peak": next(grown)})
    tensor = shape.tensor_bytes
    extra = [next(Torch("cpu").weights(shape, backward)) for backward in (False, True)]
    assert extra == [("measured", 100_000 - times * tensor, tensor, "the query") for times in (1, 4)]
    measured, planned = jax_cpu.weights(shape, True)
    assert measured == ("measured", 300_000 - 4 * tensor, 900_000 - 4 * tensor, "no positions")
    assert planned[2] >= 4 * shape.scores  # which the baseline holds


def test_a_lazy_call_in_mlx_is_timed_with_its_evaluation_and_what_it_makes_is_not_extra():
    pytest.importorskip("alibi_mlx")
    import mlx.core as mx

    mlx_cpu, made = load("mlx", "cpu"), 12 * 2**20
    tensors = mlx_cpu.tensors(Shape(8, 64, 512, "float32"), backward=True)  # of 1 MiB

    def prepare(query, key, value):
        mask = mx.zeros(2**20)
        mx.eval(mask)

        def attend(query, key, value):
            held = mx.ones(made // 4)  # 12 MiB, given back before the result is there
            mx.eval(held)
            return query + key + value + mask[0]

        return attend

    for backward in (False, True):
        arrays = 3 if backward else 1  # the result, or three gradients
        for contestant in (mlx_cpu.ours, *mlx_cpu.peers, mlx_cpu.baseline(tensors, backward)):
            call = mlx_cpu.prepare(contestant, tensors, backward)
            before = mx.get_active_memory()
            result = call()
            assert mx.get_active_memory() - before >= arrays * 2**20  # what is not evaluated holds no memory
            del result
        shape = Shape(2, 64, 2048, "float32")
        extra = mlx_cpu.extra_of(replace(mlx_cpu.ours, prepare=prepare), shape, backward)
        assert extra == pytest.approx(made - (4 if backward else 1) * 2**20, abs=2**18)


# --- The program ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["torch", "jax", "mlx"])
def test_quick_run_checks_times_and_draws_everything(backend, tmp_path):
    pytest.importorskip(f"alibi_{backend}")
    results = quick_run("attention", tmp_path, "--backend", backend, "--device", "cpu")
    assert (results["backend"], results["device"]) == (backend, "cpu")
    assert results["sections"] == ["accuracy", "forward", "backward", "decode", "memory", "million"]
    assert backend in results["versions"]
    if backend == "jax":  # what is measured in a process of its own, of attention that holds all its scores
        weighed = [each for each in results["measurements"] if each["candidate"].endswith(", measured")]
        assert all(each["values"][1] > 4 * x.scores for each, x in zip(weighed, QUICK.weighed, strict=True))
    # Bars beside a dense bias, too: of both passes, and of one query.
    barred = [each for each in results["measurements"] if each["bar"] is not None and each["unit"] == "seconds"]
    assert [each["group"].startswith("Times faster than attention with no positions") for each in barred] == [
        *[True, False] * 2, True, False, True,
    ]  # fmt: skip
    assert {each["pass"] for each in results["limits"]} >= {"forward", "forward and backward"}
    assert all(each["tile_limit"] >= 1 for each in results["limits"])
    for curves in results["curves"].values():
        assert [length for length, _ in curves[f"alibi_{backend}"]] == [256, 512]
        assert [length for length, _ in curves["tile limit"]] == [256, 512]
    pytest.importorskip("matplotlib")
    assert (tmp_path / f"attention-{backend}-cpu.png").stat().st_size > 10_000


@pytest.mark.parametrize("what", ["result", "gradient"])
def test_what_is_wrong_fails_and_is_named_before_anything_is_timed(what, tmp_path, monkeypatch, capsys):
    right = alibi_torch.attention

    def wrong(query, key, value):
        if what == "result":
            return right(query, key, value) * 1.001
        result = right(query, key.detach(), value)  # so that keys get none
        return result + 0 * key.sum()

    monkeypatch.setattr(of_torch.alibi_torch, "attention", wrong)
    monkeypatch.setattr(Torch, "peers", ())
    assert attention.main(["--quick", "--device", "cpu", "--output", str(tmp_path)]) == 1
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("wrong: ")]
    name = "alibi_torch, 8 heads" if what == "result" else "alibi_torch, gradient of key, 8 heads"
    assert lines[0].startswith(f"wrong: {name}")
    results = json.loads((tmp_path / "attention-torch-cpu.json").read_text(encoding="utf-8"))
    assert results["passed"] is False
    assert results["measurements"] == []


def test_a_peer_that_is_not_alibi_is_named_and_a_wrong_number_at_a_shape_is_not_timed():
    plain = replace(of_torch.PEERS[0], name="no ALiBi", prepare=of_torch._without_positions)
    run = Run(torch_with(peers=(plain,)), QUICK)
    check(run)
    assert [line.split(",")[0] for line in run.wrong] == ["no ALiBi"]

    timed = (Timed(Shape(2, 8, 64, "float32"), 1, 0, (1.0, 1.0), (1.0, 1.0)),)  # beside a dense bias, too
    ours = replace(Torch.ours, prepare=of_torch._without_positions)
    run = Run(torch_with(ours=ours, peers=Torch.peers), replace(QUICK, timed=timed))
    found = [each for backward in (False, True) for each in sections.passes(run, backward)]
    assert [each.verdict(True) for each in found] == ["not measured"] * 4
    assert {each.note for each in found} == {"not timed, its numbers are wrong"}
    assert len(run.wrong) == 2


def test_sections_can_be_picked_and_one_that_runs_out_of_memory_fails_alone(tmp_path, monkeypatch, capsys):
    def fails(self, shape, backward):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(Torch, "weights", fails)
    monkeypatch.setattr(Torch, "peers", ())
    arguments = ["--quick", "--device", "cpu", "--output", str(tmp_path)]
    assert attention.main([*arguments, "--only", "memory,decode,accuracy"]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == "wrong: memory: RuntimeError: out of memory"
    results = json.loads((tmp_path / "attention-torch-cpu.json").read_text(encoding="utf-8"))
    assert results["sections"] == ["accuracy", "decode", "memory"]
    assert {each["unit"] for each in results["measurements"]} == {"error", "seconds"}
    assert not (tmp_path / "attention-torch-cpu.png").exists()
    with pytest.raises(SystemExit):
        attention.main([*arguments, "--only", "speed"])
    assert "must be of accuracy, forward, backward, decode, memory, million, got speed" in capsys.readouterr().err


def test_ours_is_timed_beside_another_checkout_in_a_process_of_its_own(tmp_path, capsys):
    package = tmp_path / "before" / "backends" / "alibi_torch"
    package.mkdir(parents=True)
    # It takes a tenth of a second, and fails unless it gets tensors of these sizes, which need gradients once.
    (package / "__init__.py").write_text(
        "import time\n\n\ndef attention(query, key, value):\n    assert query.shape == key.shape == (1, 2, 64, 8)\n"
        "    time.sleep(0.1)\n    return query + key + value\n",
        encoding="utf-8",
    )
    run = Run(torch_with(), replace(QUICK, timed=(Timed(Shape(2, 8, 64, "float32"), 1, 0),)))
    with earlier_in(tmp_path / "before") as run.earlier:
        found = [each for backward in (False, True) for each in sections.passes(run, backward)]
    beside = [each for each in found if each.baseline == "alibi_torch of before"]
    assert len(beside) == 2
    assert all(each.values[1] > 0.1 and each.ratio > 1 for each in beside)

    with pytest.raises(SystemExit):
        attention.main(["--quick", "--backend", "jax", "--device", "cpu", "--beside", str(tmp_path)])
    assert "--beside must go with PyTorch on the CPU, got jax on cpu" in capsys.readouterr().err
    with earlier_in(tmp_path) as nothing, pytest.raises(RuntimeError, match="must run, got exit status 1"):
        nothing.prepare((1, 2, 64, 8), "float32", False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there_is_named(capsys):
    with pytest.raises(SystemExit):
        attention.main(["--quick", "--device", "cuda"])
    assert "--device must be one that there is, got cuda" in capsys.readouterr().err
