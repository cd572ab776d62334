"""What all benchmarks share."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("rich")

from benchmarks import harness
from benchmarks.harness import Measurement

BAR = Measurement("group", "ours", "theirs", "seconds", bar=2.0)
FASTER = replace(BAR, faster=True)


@pytest.mark.parametrize(("empty", "ratio", "lowest", "highest"), [(BAR, 3.0, 2.5, 4.0), (FASTER, 1 / 3, 0.25, 0.4)])
def test_times_are_medians_of_pairs_after_a_warm_up(empty, ratio, lowest, highest):
    taken = {"ours": iter([100.0, 3.0, 8.0, 5.0]), "theirs": iter([100.0, 1.0, 2.0, 2.0])}
    calls = []

    def clock(call):
        calls.append(call())
        return next(taken[calls[-1]])

    done = empty.timed(lambda: "ours", lambda: "theirs", 3, clock=clock)
    assert done.values == (5.0, 2.0)
    assert (done.ratio, done.lowest, done.highest) == pytest.approx((ratio, lowest, highest))
    # Alternating, so that what comes second is not always the same.
    assert calls == ["ours", "theirs"] * 2 + ["theirs", "ours"] + ["ours", "theirs"]
    assert harness.seconds_of(lambda: sum(range(10_000))) > 0


@pytest.mark.parametrize(
    ("empty", "ratio", "judged", "verdict"),
    [
        (BAR, 1.99, True, "met"),
        (BAR, 2.0, True, "missed"),
        (BAR, math.nan, True, "missed"),
        (BAR, 5.0, False, "not judged"),
        (BAR, None, True, "not measured"),
        (replace(BAR, bar=None), 5.0, True, ""),
        (FASTER, 1.99, True, "missed"),
        (FASTER, 2.0, True, "met"),
        (FASTER, math.nan, True, "missed"),
    ],
)
def test_verdict(empty, ratio, judged, verdict):
    assert replace(empty, ratio=ratio).verdict(judged) == verdict


def two_arrays_and_one_after_the_other(size):
    np.ones(4 * size, dtype=np.uint8)  # prepares, with a peak that must not count

    def call():
        both = [np.ones(size, dtype=np.uint8) for _ in range(2)]
        del both
        return np.ones(size, dtype=np.uint8)

    return call, lambda result: len(result)


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is exact on Linux only")
def test_peak_memory_counts_what_is_freed_again():
    size = 32 * 2**20
    done = harness.run_alone("tests.benchmarks.test_harness:two_arrays_and_one_after_the_other", size)
    # A page table's worth, 2 MiB, either way for each array: the kernel hands out and counts pages in batches.
    assert abs(done["peak"] - 2 * size) <= 2 * 2**21
    assert done["found"] == size
    assert done["seconds"] > 0


@pytest.mark.full
def test_a_failure_in_the_other_process_is_told():
    with pytest.raises(RuntimeError, match="has no attribute 'nothing'"):
        harness.peak_growth("tests.benchmarks.test_harness:nothing")


def test_json_is_plain_and_says_nothing_of_whose_machine_it_is(tmp_path):
    machine = harness.machine()
    harness.write_json(tmp_path / "new" / "x.json", {"machine": machine, "x": (1 / 3, math.inf), "n": 10**9})
    written = json.loads((tmp_path / "new" / "x.json").read_text(encoding="utf-8"))
    assert written == {"machine": machine, "x": [0.33333, None], "n": 10**9}
    assert set(machine) == {"system", "architecture", "cpu", "vectors", "limits", "cores", "load"}
    assert machine["cpu"]
    assert 2**20 < harness.available_memory() < 2**50


def test_a_bar_that_is_missed_or_was_not_measured_fails_and_is_named(tmp_path, capsys):
    found = [replace(FASTER, ratio=r, lowest=r, highest=r, values=(r, 1.0)) for r in (2.5, 1.5)] + [FASTER]
    path, machine = tmp_path / "x.json", {"load": 0.0}
    assert harness.conclude(path, found, True, ["a number"], machine=machine) == 1
    assert capsys.readouterr().err.splitlines() == [
        "wrong: a number",
        "missed: group: ours against theirs, ratio 1.50",
        "not measured: group: ours against theirs",
    ]
    assert [each["verdict"] for each in json.loads(path.read_text())["measurements"]] == [
        "met",
        "missed",
        "not measured",
    ]
    assert harness.conclude(path, found, True, machine=machine) == 1
    assert harness.conclude(path, found[:1], True, ["a number"], machine=machine) == 1
    assert harness.conclude(path, found, False, machine=machine) == 0  # small shapes judge nothing
    assert harness.conclude(path, found[:1], True, machine=machine) == 0
    assert json.loads(path.read_text())["passed"] is True
