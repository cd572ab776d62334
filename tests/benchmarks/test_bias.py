import numpy as np
import pytest

pytest.importorskip("rich")

import alibi_core
from benchmarks.bias import __main__ as bias
from tests.support.programs import quick_run

pytestmark = pytest.mark.full


def test_quick_run_checks_and_times_everything_that_is_installed(tmp_path):
    results = quick_run("bias", tmp_path)
    assert results["numerics"]["bias in NumPy"] == {"different_elements": 0}
    assert results["numerics"]["key_bias in NumPy"] == {"different_elements": 0}

    by_group = {}
    for measured in results["measurements"]:
        by_group.setdefault(measured["group"], []).append(measured)
    judged = [sorted((m["candidate"], m["bar"]) for m in group if m["bar"] is not None) for group in by_group.values()]
    against_fill = [("NumPy", 2.0), ("PyTorch", 2.0)]
    assert judged[0] == judged[4] == against_fill
    assert [bar for _, bar in judged[1]] == [1.0] * len(bias.PEERS)
    assert judged[2] == []
    assert judged[3] == [("NumPy", 1.5)]
    measured = {m["candidate"] for m in by_group[next(iter(by_group))] if m["ratio"] is not None}
    assert measured >= {"NumPy"}


@pytest.mark.parametrize("function", ["bias", "key_bias"])
def test_one_wrong_bit_is_named_and_no_peer_is_asked(function, monkeypatch):
    right = getattr(alibi_core, function)

    def wrong(*arguments, **keywords):
        result = right(*arguments, **keywords)
        result[-1, -1, 5] = np.nextafter(result[-1, -1, 5], np.float32(0))
        return result

    monkeypatch.setattr(alibi_core, function, wrong)
    found, lines = bias.check(bias.QUICK, bias.OURS[:1], bias.OF_KEYS[:1])
    assert lines == [f"{function} in NumPy differs from float64 arithmetic in 1 elements"]
    assert list(found) == ["bias in NumPy", "key_bias in NumPy"]


def test_a_peer_that_is_called_wrongly_is_not_taken_for_alibi():
    exact = bias.exact_slopes(32)[:, None, None] * bias.causal_reach(61)
    rows = {name: bias.Builder(name, "numpy", None, lambda *_, x=x: lambda: x) for name, x in {
        "shifted": exact + np.arange(61.0)[:, None],  # constant along a row
        "scaled": exact * 1.001,
        "not causal": np.nan_to_num(exact, neginf=0.0),
    }.items()}  # fmt: skip
    assert bias.peer_error(rows["shifted"]) <= 1
    assert bias.peer_error(rows["scaled"]) > 1
    assert bias.peer_error(rows["not causal"]) > 1
