import json

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("rich")

from benchmarks import encoders  # noqa: E402
from benchmarks.encoders import Pace  # noqa: E402

pytestmark = pytest.mark.full


@pytest.mark.parametrize(("section", "rows"), [("dnabert-2", 18), ("baichuan-13b", 12)])
def test_a_quick_run_checks_numbers_and_judges_no_speed(section, rows, tmp_path, monkeypatch):
    def peak_growth(function, *arguments):
        assert function == "benchmarks.encoders:prepared_by_name"
        return encoders.prepared_by_name(*arguments)().numel()

    monkeypatch.setattr(encoders.harness, "peak_growth", peak_growth)
    assert encoders.main(["--quick", "--only", section, "--pairs", "1", "--output", str(tmp_path)]) == 0
    results = json.loads((tmp_path / "encoders.json").read_text())
    assert results["passed"]
    assert results["complete"]
    numbers = results["numerics"][section]
    assert 0 < numbers["ours"] <= 4 * numbers["the original's own error"]
    assert len(results["measurements"]) == rows
    assert all(each["ratio"] is not None for each in results["measurements"])


def test_what_needs_too_much_memory_or_time_is_not_measured_and_wrong_numbers_are_told(tmp_path, monkeypatch, capsys):
    late = list(encoders.measure(["jina-small"], 130, True, Pace(until=0.0)))
    assert {each.note for each in late} == {"no time left"}
    assert [each.candidate for each in late].count("alibi_torch, attention, peak memory") == 4
    assert late[-1].verdict(judged=True) == "not measured"
    options = ["--quick", "--only", "jina-small", "--minutes", "0", "--output", str(tmp_path)]
    assert encoders.main(options) == 0
    assert not json.loads((tmp_path / "encoders.json").read_text())["complete"]
    assert not list(encoders.measure(["jina-small"], 100, True, Pace()))
    monkeypatch.setattr(encoders.harness, "available_memory", lambda: 0)
    for kind in (encoders.of_attention, encoders.of_encoder):
        found = list(kind("jina-small", 130, "float32", True, Pace(pairs=1)))
        assert [each.note for each in found if each.baseline != "alibi_torch, one by one"] == ["needs 0 GiB"] * 4
    monkeypatch.setattr(encoders, "attend", lambda query, key, value, bias, kind: value)
    assert encoders.main(["--quick", "--only", "jina-base", "--output", str(tmp_path)]) == 1
    assert "wrong: jina-base, results:" in capsys.readouterr().err


def test_a_peer_that_takes_long_runs_once():
    calls = {"ours": 0, "theirs": 0}

    def count(name):
        calls[name] += 1

    measured = encoders.Measurement("one", "ours", "theirs", "seconds", faster=True)
    found = Pace(pairs=3, seconds=1e-9).timed(measured, lambda: count("ours"), lambda: count("theirs"))
    assert calls == {"ours": 2, "theirs": 1}
    assert found.note == "theirs ran once"
    assert found.ratio > 0


def test_what_was_measured_is_written_before_the_rest_is(tmp_path, monkeypatch):
    def failing(*_):
        yield encoders.Measurement("one", "ours", "theirs", "seconds")
        raise KeyboardInterrupt

    monkeypatch.setattr(encoders, "measure", failing)
    with pytest.raises(KeyboardInterrupt):
        encoders.main(["--quick", "--only", "jina-small", "--output", str(tmp_path)])
    results = json.loads((tmp_path / "encoders.json").read_text())
    assert [each["group"] for each in results["measurements"]] == ["one"]
    assert not results["passed"]


@pytest.mark.parametrize("kind", [encoders.DENSE, encoders.FUSED])
@pytest.mark.parametrize("section", ["jina-base", "baichuan-13b"])
def test_peers_compute_what_is_measured(section, kind):
    shape = encoders.SMALL[section]
    ours, theirs = (encoders.prepared(shape, 40, "float32", each)() for each in (encoders.OURS, kind))
    assert torch.allclose(ours, theirs, atol=1e-5)
    if shape.is_causal:
        layer, x = encoders.Layer(shape, torch.float32), torch.randn(1, 40, shape.embed_dim)
        ours, theirs = (layer(x, each) for each in (encoders.OURS, kind))
    else:
        model, batch = encoders.model_of(shape), encoders.batch_of(40)
        ours, theirs = (encoders.encode(model, *batch, each) for each in (encoders.OURS, kind))
    assert torch.allclose(ours, theirs, atol=1e-4)
