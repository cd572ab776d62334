"""One sequence, or the heads of one layer, on several processes gives the answer of one, and little is sent for it.

    python -m tests.torch.test_parallel          a line of JSON for each check and process
    python -m tests.torch.test_parallel NAME...  of these checks alone

Four processes are started once, and go through the checks together, in groups of 1, 2 and 4; the first compares what
all of them computed. Cases are drawn from a seed, since all processes have to draw the same ones.
"""

from __future__ import annotations

import datetime
import functools
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("this PyTorch is built without torch.distributed", allow_module_level=True)

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import DTensor, Shard  # noqa: E402
from torch.distributed.tensor.parallel import parallelize_module  # noqa: E402

import alibi_core  # noqa: E402
from alibi_torch import AlibiAttention, attention, parallel  # noqa: E402
from tests.support.divided import TENSORS, Case, assert_exact  # noqa: E402

LIMIT = 200  # seconds, after which processes are hanging
WORLD = 4
TIMEOUT = datetime.timedelta(seconds=60)
SHORT_TIMEOUT = datetime.timedelta(seconds=2)
SLOPES = (4.0, 2.0, 1.0, 0.5, 0.2, 0.05, 0.0)


def drawn(seed: int, shards: int) -> Case:
    """Return a case that a seed decides."""
    random = np.random.default_rng(seed)

    def one_of(*values: Any) -> Any:
        return values[random.integers(len(values))]

    heads, kv_heads = one_of((4, 2), (3, 1), (2, 2), (1, 1), (6, 3))
    is_causal = bool(random.integers(2))
    slopes, future = (tuple(random.choice(SLOPES, heads).tolist()) for _ in range(2))
    return Case(
        length=int(one_of(1, 7, 64, 131, 200, 250)),
        shards=shards,
        batch=one_of(1, 2),
        kv_heads=kv_heads,
        slopes=slopes,
        future_slopes=None if is_causal or random.integers(2) else future,
        is_causal=is_causal,
        window_size=one_of(None, None, 0, 17, 90),
        dtype=one_of("float32", "float32", "bfloat16", "float64"),
        tolerance=one_of(None, None, None, 0.0, 0.01),
    ).varied(seed)


LONG = Case(2111, 2, slopes=(1.0, 0.05), head_dim=4, kv_heads=1)  # longer than what is attended to whole
CASES = {
    shards: [drawn(seed, shards) for seed in range(1000 * shards, 1000 * shards + count)]
    for shards, count in {2: 30, 4: 50}.items()
} | {
    "hostile": [
        # Keys so large that queries of all shards look for them, or only those of some.
        Case(197, 4, seed=1, large=(("key", 1, 1, 6), ("query", 4, 1, 3))),
        Case(197, 4, seed=2, large=(("key", 0, 0, 6),)),
        Case(250, 4, seed=3, large=(("key", 3, 1, 2), ("key", 2, 0, 4)), is_causal=False),
        Case(250, 2, seed=4, shift=1.0),
        # Queries look for the keys of far shards alone, beyond nearer keys.
        Case(80, 4, seed=5, slopes=(2.0, 1.0), kv_heads=1, drift=120.0),
    ],
    "long": [LONG, replace(LONG, is_causal=False, dtype="bfloat16")],
}


@cache
def group_of(size: int) -> Any:
    """Return the first processes as a group; all have to make the call."""
    return dist.new_group(list(range(size)), timeout=TIMEOUT)


def gathered(value: Any, group: Any) -> list[Any]:
    """Return the values of all processes of a group, on each of them."""
    found = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found


@contextmanager
def counted() -> Any:
    """Count the bytes that this process sends to single others."""
    sent, batch = [0], dist.batch_isend_irecv

    def count(operations: Any) -> Any:
        sent[0] += sum(x.tensor.nbytes for x in operations if x.op is dist.isend)
        return batch(operations)

    with mock.patch.object(dist, "batch_isend_irecv", count):
        yield sent


def run(case: Case, group: Any, **options: Any) -> dict[str, np.ndarray]:
    """Return results and gradients of all processes, put together, and what was ``sent``."""
    rank, dtype = dist.get_rank(group), getattr(torch, case.dtype)
    room = case.shards * case.shard_len
    mine = slice(rank * case.shard_len, (rank + 1) * case.shard_len)
    local = {}
    for name, array in case.arrays().items():
        axis = 1 if name == "ids" else 2
        # Places without a token must make no difference.
        filling = [(0, room - n if a == axis else 0) for a, n in enumerate(array.shape)]
        padded = np.pad(array, filling) if name == "ids" else np.pad(array, filling, constant_values=np.nan)
        part = padded[:, mine] if name == "ids" else padded[:, :, mine]
        local[name] = torch.from_numpy(part).to(torch.int64 if name == "ids" else dtype)
    tensors = [local[name].requires_grad_() for name in TENSORS]
    slopes, future = (
        None if x is None else torch.tensor(x).to(torch.promote_types(dtype, torch.float32)).requires_grad_()
        for x in (case.slopes, case.future_slopes)
    )
    with counted() as sent:
        result = parallel.attention(
            *tensors,
            slopes,
            group=group,
            length=case.length,
            is_causal=case.is_causal,
            future_slopes=future,
            segment_ids=local["ids"] if case.cuts else None,
            window_size=case.window_size,
            tolerance=case.tolerance,
            **options,
        )
        forward = sent[0]
        cotangent = torch.nan_to_num(local["cotangent"])
        inputs = [x for x in (*tensors, slopes, future) if x is not None]
        grads = torch.autograd.grad(result, inputs, cotangent)
    names = (*TENSORS, "slopes", "future_slopes")[: len(inputs)]
    found = {"result": result.detach(), **dict(zip(names, grads, strict=True))}
    found = {name: x.double().numpy() for name, x in found.items()}
    everywhere = gathered(found, group)
    whole = {}
    for name in found:
        parts = [x[name] for x in everywhere]
        if "slopes" in name:
            whole[name] = np.sum(parts, axis=0)
        else:
            ordered = np.concatenate(parts, axis=2)
            assert not ordered[:, :, case.length :].any(), f"{name} of padding"
            whole[name] = ordered[:, :, : case.length]
    whole["sent"] = np.asarray([sum(x) for x in zip(*gathered((forward, sent[0] - forward), group), strict=True)])
    return whole


def cases(name: Any) -> None:
    """Run cases on the processes that each is for, and compare what they find on the first."""
    problems = []
    for case in CASES[name]:
        group = group_of(case.shards)
        if dist.get_rank() >= case.shards:
            continue
        found = run(case, group)
        if dist.get_rank() == 0:
            try:
                assert_exact(case, found, has_segments=bool(case.cuts))
            except AssertionError as error:
                problems.append(f"{case}: {error}")
    assert not problems, "\n".join(problems)


def bytes_sent() -> None:
    """Check that processes send a small part of a full ring, and all of it where one key matters to everybody."""
    case = Case(4096, 4, slopes=(1.0, 0.5, 0.25, 0.125), kv_heads=4, head_dim=8)
    ring = 2 * 4 * 3 * 1024 * case.kv_heads * case.head_dim * 4  # keys and values, of each shard to each other
    forward, backward = run(case, group_of(4))["sent"]
    assert forward == backward  # gradients come back the same way
    assert 8 * forward < ring
    hostile = run(replace(case, large=(("key", 0, 0, 6),)), group_of(4))["sent"]
    assert hostile[0] == ring // 2  # half, as it is causal


def second_derivatives() -> None:
    """Check that gradients of gradients are those of one process."""
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(3, 1, 2, 28, 3, dtype=torch.float64, generator=generator).requires_grad_().unbind()
    slopes = torch.tensor([0.5, 0.1])

    def of_penalty(attend: Callable[..., torch.Tensor], tensors: list[torch.Tensor]) -> Any:
        result = attend(*tensors, slopes, is_causal=False)
        grads = torch.autograd.grad(result.square().sum(), tensors, create_graph=True)
        # By results, too, so that second derivatives that were left out would not be missed.
        return torch.autograd.grad(result.sum() + sum(x.square().sum() for x in grads), tensors)

    expected = of_penalty(partial(attention, implementation="dense"), whole)
    mine = slice(7 * dist.get_rank(), 7 * dist.get_rank() + 7)
    local = [x.detach()[:, :, mine].clone().requires_grad_() for x in whole]
    for implementation in ("dense", "tiled"):
        found = of_penalty(partial(parallel.attention, implementation=implementation), local)
        for one, exact in zip(found, expected, strict=True):
            _alike(one, exact[:, :, mine], exact.abs().max().item())


def heads_and_tokens() -> None:
    """Check a mesh that divides batch, heads and tokens: each process has slopes of the heads that it has."""
    mesh = DeviceMesh("cpu", torch.arange(4).reshape(2, 2), mesh_dim_names=("heads", "tokens"))
    case = Case(120, 2, seed=5)
    arrays = case.arrays()
    row, column = mesh.get_coordinate()
    q_heads, kv_heads, tokens = slice(2 * row, 2 * row + 2), slice(row, row + 1), slice(60 * column, 60 * column + 60)
    local = {
        name: torch.from_numpy(arrays[name][:, q_heads if name in ("query", "cotangent") else kv_heads, tokens]).float()
        for name in (*TENSORS, "cotangent")
    }
    tensors = [local[name].requires_grad_() for name in TENSORS]
    slopes = torch.tensor(case.slopes, requires_grad=True)
    where = {"group": mesh, "axis_name": "tokens", "head_axis": "heads"}
    result = parallel.attention(*tensors, slopes, **where)
    grads = torch.autograd.grad(result, (*tensors, slopes), local["cotangent"])
    parts = [x.detach().double().numpy() for x in (result, *grads)]
    everywhere = gathered(parts, dist.group.WORLD)
    found = {}
    for index, name in enumerate(("result", *TENSORS)):
        rows = [np.concatenate([everywhere[2 * r + c][index] for c in range(2)], axis=2) for r in range(2)]
        found[name] = np.concatenate(rows, axis=1)
    found["slopes"] = np.sum([x[4] for x in everywhere], axis=0)
    assert_exact(case, found, has_segments=False)
    # Where no slopes are given they are those of all heads.
    by_default = parallel.attention(*tensors, **where)
    canonical = parallel.attention(*tensors, torch.tensor([0.25, 0.0625, 0.015625, 0.00390625]), **where)
    assert torch.equal(by_default, canonical)


class Block(nn.Module):
    """A block of a model."""

    def __init__(self, *sizes: int, **options: Any) -> None:
        super().__init__()
        self.attention = AlibiAttention(*sizes, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.attention(x)


def tensor_parallel() -> None:
    """Check layers whose heads are divided, one a process, against the whole layer; and with FSDP around."""
    whole = dist.device_mesh.init_device_mesh("cpu", (4,), mesh_dim_names=("heads",))
    square = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "heads"))
    forms = [
        {"num_kv_heads": 4},
        {"num_kv_heads": 4, "learnable_slopes": True, "bias": True},
        {"num_kv_heads": 4, "is_causal": False, "future_slopes": torch.tensor([0.9, 0.1, 0.5, 0.3])},
    ]
    for mesh, options in ((mesh, options) for mesh in (whole, square) for options in forms):
        # FSDP wants parameters of one dtype, and slopes are float32.
        dtype = torch.float64 if mesh is whole else torch.float32
        torch.manual_seed(0)
        reference, layer = (Block(20, 4, head_dim=6, **options).to(dtype) for _ in range(2))
        layer.load_state_dict(reference.state_dict())
        entries = slice(None)
        if mesh is whole:
            parallelize_module(layer, mesh, parallel.tensor_parallel_plan(layer))
        else:
            parallelize_module(layer, mesh["heads"], parallel.tensor_parallel_plan(layer))
            fully_shard(layer, mesh=mesh["data"])
            first = 2 * mesh.get_local_rank("data")
            entries = slice(first, first + 2)
        x = torch.randn(4, 50, 20, dtype=dtype)
        expected = reference(x)
        expected.square().mean().backward()
        result = layer(x[entries])
        result.square().mean().backward()  # FSDP takes the mean over processes
        _alike(result, expected[entries])
        gradients = {name: x.grad for name, x in reference.named_parameters()}
        largest = max(x.abs().max().item() for x in gradients.values())
        for name, parameter in layer.named_parameters():
            assert isinstance(parameter, DTensor), name
            _alike(parameter.grad.full_tensor(), gradients[name], largest)
        assert set(layer.state_dict()) == set(reference.state_dict())
    # A cache holds this process's heads, and decoding is what the whole layer does.
    layer = parallelize_module(AlibiAttention(20, 4, learnable_slopes=True), whole, parallel.TensorParallelAttention())
    cache, x = layer.make_cache(1, 8), torch.ones(1, 8, 20)
    assert cache.keys.shape == (1, 1, 8, 5)
    with torch.no_grad():
        steps = torch.cat([layer(x[:, t : t + 1], cache=cache) for t in range(8)], dim=1)
        _alike(steps, layer(x))
    # A cast leaves the slopes, which are a DTensor here, and their gradient in float32.
    layer(x).sum().backward()
    exact = layer.log_slopes.full_tensor().clone()
    layer.bfloat16().float()
    assert torch.equal(layer.log_slopes.full_tensor(), exact)
    tensors = [DTensor.from_local(torch.ones(1, 1, 3, 5), whole, [Shard(1)])] * 3
    for attend in (attention, alibi_core.attention):
        with pytest.raises(TypeError, match="query must be a process's own tensor, got a DTensor; give to_local"):
            attend(*tensors)
    for heads, kv_heads, name in ((6, 6, "num_heads"), (8, 2, "num_kv_heads")):
        uneven = AlibiAttention(24, heads, num_kv_heads=kv_heads)
        with pytest.raises(ValueError, match=f"{name} must be divisible by the 4"):
            parallelize_module(uneven, whole, parallel.TensorParallelAttention())
    with pytest.raises(TypeError, match="of no derived class, got ShardedAttention"):
        parallelize_module(layer, whole, parallel.TensorParallelAttention())


def _alike(found: torch.Tensor, expected: torch.Tensor, largest: float = 1.0) -> None:
    """Assert that two computations agree that make some hundred additions, of numbers of this size at most."""
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=0, atol=500 * torch.finfo(found.dtype).eps * largest)


def differences() -> None:
    """Check that all processes refuse what they do not all ask for."""
    rank = dist.get_rank()
    tensors = torch.randn(3, 1, 2, 8, 4).unbind()
    trained = tensors[1].clone().requires_grad_(rank == 1)
    refused = {
        "query's shape must be the same on all processes": ([x[:, :, : 8 - rank] for x in tensors], {}),
        "window_size must be the same": (tensors, {"window_size": 3 + rank // 2}),
        "slopes must be the same": (tensors, {"slopes": torch.full((2,), 1.0 + rank)}),
        "whether key or value requires gradients": ([tensors[0], trained, tensors[2]], {}),
    }
    for message, (given, options) in refused.items():
        with pytest.raises(ValueError, match=message):
            parallel.attention(*given, **options)
    others = DeviceMesh("cpu", [0, 1])
    if rank > 1:
        with pytest.raises(ValueError, match="a mesh that this process is in"):
            parallel.attention(*tensors, group=others)


def absence() -> None:
    """Check that who stays away, dies or does another thing is an error in the group's timeout, and no hang."""
    rank = dist.get_rank()
    slow, dying, crossed = (dist.new_group(members, timeout=SHORT_TIMEOUT) for members in ([0, 1], [2, 3], [0, 1]))
    tensors = torch.randn(3, 1, 2, 8, 4).unbind()
    if rank < 2:  # each would take the other's message for that of another call
        inputs = [x.clone().requires_grad_() for x in tensors]
        losses = [parallel.attention(*inputs, group=crossed).sum() for _ in range(2)]
        with pytest.raises(RuntimeError):
            [x.backward() for x in losses[:: 1 - 2 * rank]]
    if rank == 3:
        os._exit(0)
    if rank in (0, 2):
        started = time.perf_counter()
        with pytest.raises(RuntimeError):
            parallel.attention(*tensors, group=slow if rank == 0 else dying)
        assert time.perf_counter() - started < 5 * SHORT_TIMEOUT.total_seconds()
    else:
        time.sleep(3 * SHORT_TIMEOUT.total_seconds())


CHECKS: dict[str, Callable[[], None]] = {
    "two processes": partial(cases, 2),
    "four processes": partial(cases, 4),
    "hostile": partial(cases, "hostile"),
    "long": partial(cases, "long"),
    "bytes sent": bytes_sent,
    "second derivatives": second_derivatives,
    "heads and tokens": heads_and_tokens,
    "tensor parallelism": tensor_parallel,
    "differences": differences,
    "absence": absence,  # the last: a process is missing then
}
SLOW = ("two processes", "four processes", "long")


def work(rank: int, store: str, names: list[str]) -> None:
    """Go through checks, as one of the processes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD, timeout=TIMEOUT)
    for name in names:
        problem = ""
        try:
            CHECKS[name]()
        except Exception:
            problem = traceback.format_exc()[-3000:]
        line = {"name": name, "rank": rank, "problem": problem}
        os.write(1, f"{json.dumps(line)}\n".encode())  # at once, as all processes write to one pipe
    os._exit(0)  # without a farewell to processes that are gone


def main(*names: str) -> int:
    """Start the processes by fork, so that none loads PyTorch again; each prints its lines."""
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        store, checks = f"{folder}/store", [*(names or CHECKS)]
        processes = [fork.Process(target=work, args=(rank, store, checks)) for rank in range(WORLD)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
    return max(abs(process.exitcode or 0) for process in processes)


@functools.cache
def found(*names: str) -> list[dict[str, Any]]:
    """Return the lines of all processes about these checks."""
    run = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.torch.test_parallel", *names],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=LIMIT,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return [json.loads(line) for line in run.stdout.splitlines()]


@pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.slow] if x in SLOW else []) for x in CHECKS])
def test_no_process_finds_a_problem(name: str) -> None:
    together = found(*(x for x in CHECKS if (x in SLOW) == (name in SLOW)))
    lines = [x for x in together if x["name"] == name]
    problems = [f"process {x['rank']}: {x['problem']}" for x in lines if x["problem"]]
    assert not problems, "\n".join(problems)
    assert len(lines) == (WORLD - 1 if name == "absence" else WORLD)


# --- On one process -------------------------------------------------------------------------------------------------


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A group of one process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _tensors() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, heads, 6, 8, generator=generator) for heads in (4, 2, 2)]


def _attend(**changes: Any) -> torch.Tensor:
    return parallel.attention(**dict(zip(TENSORS, _tensors(), strict=True)) | changes)


SHORT = torch.ones(1, 2, 5, 8)  # a tensor of fewer tokens


def _square() -> DeviceMesh:
    return DeviceMesh("cpu", [[0]], mesh_dim_names=("data", "tokens"))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"slopes": torch.ones(2)}, ValueError, r"slopes must have shape \(4,\), those of all .* \(4\), got \(2,\)"),
        ({"future_slopes": torch.ones(2), "is_causal": False}, ValueError, r"future_slopes must have shape \(4,\)"),
        ({"length": 7}, ValueError, "length must be between 1 and the 6 tokens"),
        ({"key": SHORT, "value": SHORT}, ValueError, "key must have the shard_len of query, 6"),
        ({"query": SHORT[0]}, ValueError, r"query must have shape \(batch, heads, shard_len, head_dim\), got"),
        ({"value": SHORT}, ValueError, "value must have the shape of key"),
        ({"axis_name": "tokens"}, ValueError, "axis_name must be None where group is no torch.distributed.DeviceMesh"),
        (
            {"key": torch.ones(1, 2, 6, 8, device="meta")},
            ValueError,
            "key must be on the device of query, cpu, got meta",
        ),
        ({"implementation": "splash"}, ValueError, "implementation must be one of"),
        ({"group": 3}, TypeError, "group must be a torch.distributed.ProcessGroup"),
        ({"slopes": 4}, TypeError, "slopes must be an array of all processes' slopes"),
    ],
)
def test_wrong_arguments_are_refused_by_name(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        _attend(**changes)


@pytest.mark.usefixtures("alone")
def test_mesh_dimensions_that_do_not_exist_are_refused() -> None:
    mesh, same = _square(), "axis_name and head_axis must differ, got 'tokens' for both"
    for options, message in (
        ({"axis_name": "x"}, r"axis_name must name a dimension of the mesh, \('data', 'tokens'\), got 'x'"),
        ({"axis_name": "tokens", "head_axis": "heads"}, "head_axis must name a dimension of the mesh"),
        ({"axis_name": "tokens", "head_axis": "tokens"}, same),
        ({"group": mesh["tokens"], "head_axis": "tokens"}, same),
        ({}, "axis_name must name a dimension of a mesh that has several"),
    ):
        with pytest.raises(ValueError, match=message):
            _attend(**{"group": mesh} | options)
    with pytest.raises(TypeError, match="axis_name must be the name of one mesh dimension, got 1"):
        _attend(group=mesh, axis_name=1)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("is_mesh", [False, True])
def test_a_device_that_the_group_has_no_backend_for_is_refused(is_mesh: bool) -> None:
    options = {"group": _square(), "axis_name": "tokens"} if is_mesh else {}
    with pytest.raises(ValueError, match="query must be on a device that the process group has a backend for"):
        parallel.attention(*(x.to("meta") for x in _tensors()), **options)


def test_a_process_group_is_required() -> None:
    with pytest.raises(RuntimeError, match="torch.distributed must be initialized"):
        _attend()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("batch", [0, 1])
def test_one_process_computes_plain_attention_of_any_batch(batch: int) -> None:
    tensors = [x[:batch] for x in _tensors()]
    torch.testing.assert_close(
        parallel.attention(*tensors), attention(*tensors, implementation="dense"), rtol=0, atol=2.0**-20
    )


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("transform", [torch.func.vmap, lambda call: torch.func.grad(lambda x: call(x).sum())])
def test_functional_transforms_are_refused_before_anything_is_sent(transform: Any) -> None:
    query, *others = _tensors()
    with pytest.raises(NotImplementedError, match="no torch.func transforms"):
        transform(lambda query: parallel.attention(query, *others))(query)


@pytest.mark.usefixtures("alone")
def test_compiled_functions_leave_the_call_as_it_is() -> None:
    tensors = _tensors()
    compiled = torch.compile(lambda *tensors: parallel.attention(*tensors) + 1, backend="eager")
    assert torch.equal(compiled(*tensors), parallel.attention(*tensors) + 1)


@pytest.mark.usefixtures("alone")
def test_only_attention_layers_are_divided_by_head() -> None:
    mesh = DeviceMesh("cpu", [0], mesh_dim_names=("heads",))
    for module in (nn.Linear(4, 4), type("Derived", (AlibiAttention,), {})(8, 2)):
        message = f"must be an alibi_torch.AlibiAttention itself, of no derived class, got {type(module).__name__}"
        with pytest.raises(TypeError, match=message):
            parallelize_module(module, mesh, parallel.TensorParallelAttention())
    for whole in ("forget_gate", "sinks"):
        with pytest.raises(ValueError, match="module must have neither a forget gate nor sinks"):
            parallelize_module(AlibiAttention(8, 2, **{whole: True}), mesh, parallel.TensorParallelAttention())
    with pytest.raises(ValueError, match="module must have an alibi_torch.AlibiAttention in it"):
        parallel.tensor_parallel_plan(nn.Linear(4, 4))
    with pytest.raises(ValueError, match="device_mesh must have one dimension"):
        parallel.TensorParallelAttention()._apply(AlibiAttention(8, 2), _square())


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
