"""The model of benchmarks/scaling: counts by brute force, costs by hand."""

import itertools
import json

import numpy as np
import pytest

pytest.importorskip("rich")

from alibi_core import Shards, shard_plan
from benchmarks.research.scaling import __main__ as scaling
from benchmarks.research.scaling import validation
from benchmarks.research.scaling.inputs import (
    FORWARD,
    KERNELS,
    LATENCY,
    OF_KEYS,
    OF_QUERIES,
    Chip,
    Layer,
    Schedule,
    chips,
)
from benchmarks.research.scaling.model import held, parts, ring, step

pytestmark = pytest.mark.research
BLOCK = 16
LAYER = Layer(length=32_768, heads=4, head_dim=128, score_bound=1.0)
SLOW = Chip(  # 1,000 cycles a second, one byte a second and link, memory that never waits
    "slow", 2 * 128**2 * 1000.0, 1, 1, 128, float("inf"), 1e9, 2.0, 1,
    {FORWARD: Schedule(100, 7), OF_QUERIES: Schedule(10, 1), OF_KEYS: Schedule(1)}, (50, 150),
)  # fmt: skip


def visible(plan, chunk):
    """Yield each query block and key block, with the head, that a chunk's queries need; aligned as kernels see them."""
    size = plan.shards.chunk_len
    for head, (past, _) in enumerate(plan.horizons):
        seen = set()
        for query in range(chunk * size, (chunk + 1) * size):
            for key in range(max(0, query - past), query + 1):
                distance = chunk - key // size
                longest = next((max(hop.tokens) for hop in plan.hops if hop.distance == distance), size)
                start = (key // size + 1) * size - longest if distance else key // size * size  # of what arrives
                if key >= start:
                    seen.add((distance, (query - chunk * size) // BLOCK, (key - start) // BLOCK))
        yield from ((head, *each) for each in seen)


def test_blocks_are_those_that_queries_need():
    shards = Shards.of_length(1024, 8)
    plan = shard_plan(np.asarray([0.5, 0.1, 0.05, 0.02]), shards, score_bound=0.0, tolerance=2.0**-3)
    assert len(plan.hops) == 3  # so that some heads need several chunks, some not all of one
    counts = dict.fromkeys(range(4), 0)
    for _, distance, _, _ in visible(plan, chunk=6):
        counts[distance] += 1
    assert [part.blocks for part in parts(plan, BLOCK)] == list(counts.values())
    assert [part.heads for part in parts(plan, BLOCK)] == [4, *(sum(map(bool, hop.tokens)) for hop in plan.hops)]


def test_a_step_is_the_sum_of_its_kernels_and_of_what_arrives():
    plan = LAYER.plan(8)
    assert [hop.distance for hop in plan.hops] == [1, 2]
    found = list(parts(plan))
    rows, blocks, masked = (sum(getattr(part, name) for part in found) for name in ("rows", "blocks", "masked"))
    ahead, back = (step(SLOW, LAYER, plan, gradient=gradient) for gradient in (False, True))
    assert ahead.compute == pytest.approx((7 * rows + 100 * (blocks + 0.7 * masked)) / 1000)
    assert ahead.passes == 0  # of memory that never waits
    token = 128 * 2 * 2  # bytes of a key and a value
    assert ahead.sent == sum(sum(hop.tokens) for hop in plan.hops) * token
    # What goes two chips far takes each link twice.
    links = sum(hop.distance * (sum(hop.tokens) * token + LATENCY) for hop in plan.hops)
    assert ahead.exchange == pytest.approx(links)
    assert back.compute == pytest.approx((rows + 11 * (blocks + 0.7 * masked)) / 1000)
    assert (back.sent, back.exchange) == (3 * ahead.sent, pytest.approx(3 * links))
    assert (ahead + back).seconds == pytest.approx(ahead.seconds + back.seconds)


def test_a_kernel_takes_as_long_as_its_traffic_if_that_is_longer():
    one = Layer(length=512, heads=1, head_dim=128)
    starved = Chip(**{**vars(SLOW), "memory": 512 * 128 * 2.0})  # a tile of queries in a second
    # Queries in, results out, keys and values in; and eight passes over a tensor.
    alone = step(starved, one, one.plan(1), gradient=False)
    assert (alone.compute, alone.passes) == pytest.approx((4.0, 8.0))


def test_a_ring_sends_all_to_all_while_it_computes():
    plan, sends = LAYER.plan(8), ring(SLOW, LAYER, 8, gradient=False)
    assert sends.sent * 8 == plan.bytes_of_ring(128, 2)
    blocks = sum(1 for query, key in itertools.product(range(64), repeat=2) if key <= query)
    assert sends.compute == pytest.approx(4 * blocks / 8 * 50 / 1000)
    assert sends.seconds_overlapped == max(sends.compute, sends.exchange) == sends.exchange
    assert ring(SLOW, LAYER, 8, gradient=True).sent == 3 * sends.sent


def test_chips_are_told_by_what_is_published_and_compiled():
    for chip in chips(128):
        assert 1.4e9 < chip.clock < 1.8e9
        assert all(chip.kernels[name].block > chip.kernels[name].row > 0 for name in KERNELS)
        # A block cannot be faster than its products: 2 of 512 x 512 x 128 forward, 7 backward in all.
        least = 512 * 512 * 128 / (chip.units * chip.side**2)
        assert chip.kernels[FORWARD].block > 2 * least
        assert chip.kernels[OF_QUERIES].block + chip.kernels[OF_KEYS].block > 7 * least
        assert chip.ring[1] > 5 * least
    with pytest.raises(ValueError, match="head_dim must be one whose schedules were read, got 96"):
        chips(96)


def test_more_chips_take_less_and_gain_on_the_ring():
    rows = scaling.modelled(chips(128)[0], Layer())
    times = [row["seconds"] for row in rows]
    assert all(1.2 < before / after <= 2.0 for before, after in itertools.pairwise(times))
    assert all(row["ring_seconds"] > 50 * row["seconds"] for row in rows)
    assert held(Layer(), 16, gradient=True) == held(Layer(), 8, gradient=True) / 2


def test_it_writes_tables_and_a_picture_and_says_what_is_off(tmp_path, capsys):
    assert scaling.main(["--only", "blocks", "--quick", "--output", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "scaling.json").read_text())
    assert [row["chips"] for row in found["modelled"]] == [8, 16, 32, 64, 128, 256] * 2
    (visited,) = found["measurements"]  # the kernel's plan visits about as many blocks
    assert visited["ratio"] < visited["bar"]
    assert (tmp_path / "scaling.png").stat().st_size > 20_000
    assert "interconnect" in capsys.readouterr().out


@pytest.mark.parametrize(("predicted", "measured"), [(3.0, 2.0), (2.0, 3.0)])
def test_too_much_is_as_wrong_as_too_little(predicted, measured):
    found = validation.off("group", "name", "seconds", predicted, measured)
    assert (found.ratio, found.values) == (1.5, (predicted, measured))
    assert found.verdict(judged=True) == "missed"
