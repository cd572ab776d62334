import json

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("rich")

from benchmarks import encoders  # noqa: E402

pytestmark = pytest.mark.full


def test_a_quick_run_checks_numbers_and_judges_no_speed(tmp_path, monkeypatch):
    def peak_growth(function, *arguments):
        assert function == "benchmarks.encoders:prepared_by_name"
        return encoders.prepared_by_name(*arguments)().numel()

    monkeypatch.setattr(encoders.harness, "peak_growth", peak_growth)
    monkeypatch.setattr(encoders, "PAIRS", 1)
    assert encoders.main(["--quick", "--only", "dnabert-2", "--output", str(tmp_path)]) == 0
    results = json.loads((tmp_path / "encoders.json").read_text())
    assert results["passed"]
    numbers = results["numerics"]["dnabert-2"]
    assert 0 < numbers["ours"] <= 4 * numbers["the original's own error"]
    assert len(results["measurements"]) == 16
    assert all(each["ratio"] is not None for each in results["measurements"])


def test_what_needs_too_much_memory_is_not_measured_and_wrong_numbers_are_told(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(encoders.harness, "available_memory", lambda: 0)
    monkeypatch.setattr(encoders, "PAIRS", 1)
    found = list(encoders.of_shape("jina-small", 130, "float32", quick=True))
    assert [each.note for each in found] == ["needs 0 GiB"] * 6 + [""]
    assert all(each.ratio is None for each in found[:6])
    monkeypatch.setattr(encoders, "attend", lambda query, key, value, bias, kind: value)
    assert encoders.main(["--quick", "--only", "jina-base", "--output", str(tmp_path)]) == 1
    assert "wrong: jina-base, embeddings:" in capsys.readouterr().err


@pytest.mark.parametrize("kind", [encoders.DENSE, encoders.FUSED])
def test_peers_compute_what_is_measured(kind):
    shape = encoders.SMALL["jina-base"]
    calls = (encoders.prepared(shape, 40, "float32", each) for each in (encoders.OURS, kind))
    ours, theirs = (call() for call in calls)
    assert torch.allclose(ours, theirs, atol=1e-5)
    model, (tokens, lengths) = encoders.model_of(shape), encoders.batch_of(40)
    ours, theirs = (encoders.encode(model, tokens, lengths, each) for each in (encoders.OURS, kind))
    assert torch.allclose(ours, theirs, atol=1e-4)
