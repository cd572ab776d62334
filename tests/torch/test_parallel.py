"""One sequence, or the heads of one layer, on several processes gives the answer of one, and little is sent for it."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("this PyTorch is built without torch.distributed", allow_module_level=True)

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh  # noqa: E402
from torch.distributed.tensor.parallel import parallelize_module  # noqa: E402

from alibi_torch import AlibiAttention, attention, parallel  # noqa: E402
from tests.support.parallel_processes import CHECKS  # noqa: E402

LIMIT = 200  # seconds, after which processes are hanging


SLOW = ("two processes", "four processes", "long")


@functools.cache
def found(*names: str) -> dict[str, list[dict[str, Any]]]:
    """Return the results of all processes, by check."""
    run = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.support.parallel_processes", *names],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=LIMIT,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    lines: dict[str, list[dict[str, Any]]] = {}
    for line in map(json.loads, run.stdout.splitlines()):
        lines.setdefault(line["name"], []).append(line)
    return lines


def passed(name: str) -> int:
    """Assert that no process found a problem, and return how many cases there were."""
    lines = found(*(x for x in CHECKS if (x in SLOW) == (name in SLOW)))[name]
    problems = [f"process {x['rank']}: {x['problem']}" for x in lines if x["problem"]]
    assert not problems, "\n".join(problems)
    assert len(lines) == (3 if name == "absence" else 4)
    return int(lines[0]["cases"])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "cases"), [("two processes", 30), ("four processes", 50)])
def test_processes_give_the_exact_answer_and_gradients(name: str, cases: int) -> None:
    assert passed(name) == cases


@pytest.mark.parametrize("name", ["hostile", pytest.param("long", marks=pytest.mark.slow)])
def test_hostile_and_long_sequences_are_exact_too(name: str) -> None:
    assert passed(name)


def test_processes_send_a_small_part_of_a_ring() -> None:
    assert passed("bytes sent")


def test_second_derivatives_are_right() -> None:
    assert passed("second derivatives") == 2


def test_heads_may_be_divided_besides_tokens() -> None:
    assert passed("heads and tokens")


def test_a_layer_whose_heads_are_divided_is_the_whole_layer() -> None:
    assert passed("tensor parallelism") == 6


def test_processes_that_ask_for_different_things_all_refuse() -> None:
    assert passed("differences") == 5


def test_a_process_that_stays_away_or_dies_is_an_error_and_no_hang() -> None:
    assert passed("absence")


# --- On one process -------------------------------------------------------------------------------------------------


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A group of one process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _tensors(length: int = 6, heads: int = 4, kv_heads: int = 2) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(1, n, length, 8, generator=generator) for n in (heads, kv_heads, kv_heads))


def _attend(**changes: Any) -> torch.Tensor:
    arguments = dict(zip(("query", "key", "value"), _tensors(), strict=True)) | changes
    return parallel.attention(**arguments)


def _square() -> DeviceMesh:
    return DeviceMesh("cpu", [[0]], mesh_dim_names=("data", "tokens"))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"slopes": torch.ones(2)}, r"slopes must have shape \(4,\), those of all processes' heads \(4\), got \(2,\)"),
        ({"future_slopes": torch.ones(2), "is_causal": False}, r"future_slopes must have shape \(4,\)"),
        ({"length": 7}, "length must be between 1 and the 6 tokens"),
        ({"key": torch.ones(1, 2, 5, 8), "value": torch.ones(1, 2, 5, 8)}, "key must have the shard_len of query, 6"),
        ({"query": torch.ones(4, 6, 8)}, r"query must have shape \(batch, heads, shard_len, head_dim\), got"),
        ({"value": torch.ones(1, 2, 5, 8)}, "value must have the shape of key"),
        ({"axis_name": "tokens"}, "axis_name must be None where group is no torch.distributed.DeviceMesh"),
        ({"key": torch.ones(1, 2, 6, 8, device="meta")}, "key must be on the device of query, cpu, got meta"),
        ({"implementation": "splash"}, "implementation must be one of"),
    ],
)
def test_wrong_values_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _attend(**changes)


@pytest.mark.usefixtures("alone")
def test_meshes_without_such_a_dimension_are_refused_by_name() -> None:
    mesh = _square()
    for options, message in (
        (
            {"axis_name": "sequence"},
            r"axis_name must name a dimension of the mesh, \('data', 'tokens'\), got 'sequence'",
        ),
        ({"axis_name": "tokens", "head_axis": "heads"}, r"head_axis must name a dimension of the mesh"),
        ({"axis_name": "tokens", "head_axis": "tokens"}, "axis_name and head_axis must differ, got 'tokens' for both"),
        ({}, "axis_name must name a dimension of a mesh that has several"),
        (
            {"group": mesh["tokens"], "head_axis": "tokens"},
            "axis_name and head_axis must differ, got 'tokens' for both",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            _attend(**{"group": mesh} | options)
    tensors = [x.to("meta") for x in _tensors()]
    for options in ({"group": mesh, "axis_name": "tokens"}, {}):
        with pytest.raises(ValueError, match="query must be on a device that the process group has a backend for"):
            parallel.attention(*tensors, **options)


@pytest.mark.usefixtures("alone")
def test_wrong_kinds_are_refused_by_name() -> None:
    with pytest.raises(TypeError, match="group must be a torch.distributed.ProcessGroup"):
        _attend(group=3)
    with pytest.raises(TypeError, match="axis_name must be the name of one mesh dimension, got 1"):
        _attend(group=_square(), axis_name=1)
    with pytest.raises(TypeError, match="slopes must be an array of all processes' slopes"):
        _attend(slopes=4)


def test_without_processes_there_is_nothing_to_divide_among() -> None:
    with pytest.raises(RuntimeError, match="torch.distributed must be initialized"):
        _attend()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("batch", [0, 1])
def test_one_process_alone_and_nothing_at_all(batch: int) -> None:
    tensors = [x[:batch] for x in _tensors()]
    torch.testing.assert_close(
        parallel.attention(*tensors), attention(*tensors, implementation="dense"), rtol=0, atol=2.0**-20
    )


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("transform", [torch.func.vmap, lambda call: torch.func.grad(lambda x: call(x).sum())])
def test_functional_transforms_are_refused_before_anything_is_sent(transform: Any) -> None:
    query, key, value = _tensors()
    with pytest.raises(NotImplementedError, match="no torch.func transforms"):
        transform(lambda query: parallel.attention(query, key, value))(query)


@pytest.mark.usefixtures("alone")
def test_compiled_functions_leave_the_call_as_it_is() -> None:
    tensors = _tensors()
    compiled = torch.compile(lambda *tensors: parallel.attention(*tensors) + 1, backend="eager")
    assert torch.equal(compiled(*tensors), parallel.attention(*tensors) + 1)


@pytest.mark.usefixtures("alone")
def test_only_attention_layers_are_divided_by_head() -> None:
    mesh = DeviceMesh("cpu", [0], mesh_dim_names=("heads",))
    with pytest.raises(
        TypeError, match="module must be an alibi_torch.AlibiAttention itself, of no derived class, got Linear"
    ):
        parallelize_module(nn.Linear(4, 4), mesh, parallel.TensorParallelAttention())
    with pytest.raises(TypeError, match="itself, of no derived class, got Derived"):
        parallelize_module(type("Derived", (AlibiAttention,), {})(8, 2), mesh, parallel.TensorParallelAttention())
    with pytest.raises(ValueError, match="module must have an alibi_torch.AlibiAttention in it"):
        parallel.tensor_parallel_plan(nn.Linear(4, 4))
    with pytest.raises(ValueError, match="device_mesh must have one dimension"):
        parallel.TensorParallelAttention()._apply(AlibiAttention(8, 2), _square())
