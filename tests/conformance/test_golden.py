"""Golden vectors: the oracle's numbers, and a check that neither trusts nor overlooks."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import alibi_core
from alibi_core._safetensors import DTYPES, tensors_in
from alibi_core.conformance import FEATURES, GoldenError, Mistaken, check_golden, write_golden
from tests.support.cli import main

NUMPY = {"float64": np.float64, "float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Golden vectors, written in place of older ones."""
    directory = tmp_path_factory.mktemp("golden") / "vectors"
    directory.mkdir()
    (directory / "index.json").write_text('{"format": "alibi-golden", "version": 1}')
    (directory / "bias.safetensors").write_text("of an older version")
    return write_golden(directory)


@pytest.fixture(scope="module")
def index(golden: Path) -> dict[str, Any]:
    return json.loads((golden / "index.json").read_text())


@pytest.fixture(scope="module")
def tensors(golden: Path) -> dict[str, np.ndarray]:
    return {name: x for path in golden.glob("*.safetensors") for name, x in load_file(path).items()}


def computed(case: dict[str, Any], tensors: dict[str, np.ndarray], adapter: Any) -> dict[str, np.ndarray]:
    """Return an adapter's results for a case, as FORMAT.md asks of a program."""
    known = case["arguments"]
    if not set(case["features"]) <= adapter.features:
        return {}
    inputs = {name: tensors[x["tensor"]] for name, x in case["inputs"].items()}
    if case["kind"] == "slopes":
        own = case["id"] == "slopes/canonical"
        return {"slopes": np.concatenate([adapter.slopes(n) for n in range(1, 129)])} if own else {}
    if case["kind"] == "bias":
        plain = known["contract"] == "exact" and set(case["features"]) <= {"symmetric", "lengths"}
        sizes = [known[name] for name in ("num_heads", "q_len", "kv_len")]
        same = np.broadcast_to(adapter.bias(*sizes, known["is_causal"]), (known["batch"], *sizes))
        return {"bias": same} if plain and case["default_slopes"] else {}
    own = np.float32 if adapter.dtype == "bfloat16" else NUMPY[adapter.dtype]
    qkv = [inputs[name].astype(own) for name in ("query", "key", "value")]
    if case["kind"] == "decode":
        cache, outputs, end = None, [], 0
        for step in known["steps"]:
            start, end = end, end + step
            output, cache = adapter.decode_step(*(x[:, :, start:end] for x in qkv), inputs["slopes"], cache)
            outputs.append(output)
        return {"output": np.concatenate(outputs, axis=2)}
    names = ("is_causal", "q_offset", "window_size", "scale", *("distance", "law") * ("points" in case["features"]))
    arguments = {name: known[name] for name in names}
    arguments |= {name: inputs[name] for name in ("q_offset", "future_slopes", "mask") if name in inputs}
    for name in ("segment_ids", "positions"):
        if f"q_{name}" in inputs:
            arguments[name] = inputs[f"q_{name}"], inputs[f"kv_{name}"]
    grad_output = inputs["grad_output"].astype(own)
    found = adapter.attention_grad(*qkv, inputs["slopes"], grad_output=grad_output, **arguments)
    gradients = {f"gradient/{name}": x for name, x in found.items()}
    return {"output": adapter.attention(*qkv, inputs["slopes"], **arguments)} | gradients


@pytest.fixture(scope="module")
def right(index: dict[str, Any], tensors: dict[str, np.ndarray]) -> dict[str, dict[str, np.ndarray]]:
    """The results of a right implementation, by dtype."""
    return {dtype: results_of(index, tensors, Mistaken(dtype=dtype)) for dtype in NUMPY}


def results_of(index: dict[str, Any], tensors: dict[str, np.ndarray], adapter: Any) -> dict[str, np.ndarray]:
    return {f"{x['id']}/{name}": y for x in index["cases"] for name, y in computed(x, tensors, adapter).items()}


def write_results(directory: Path, found: dict[str, np.ndarray], stored: str, **changes: Any) -> Path:
    """Write results as FORMAT.md says, in tensors of that dtype."""
    directory.mkdir(parents=True, exist_ok=True)
    content = {"format": "alibi-golden-results", "version": 1, "golden_version": 4, "program": "little"}
    content |= {"dtype": stored, "files": ["results.safetensors"]} | changes
    (directory / "results.json").write_text(json.dumps(content))
    stored_as = {name: np.ascontiguousarray(x.astype(np.float64).astype(NUMPY[stored])) for name, x in found.items()}
    save_file(stored_as, directory / "results.safetensors")
    return directory


def failed(report: Any) -> dict[str, Any]:
    return {case.name: case for case in report.laws if case.status == "failed"}


# --- What is written ---


def test_a_bias_has_all_features_of_its_attention_but_fully_masked_queries(index: dict[str, Any]) -> None:
    features = {case["id"]: set(case["features"]) for case in index["cases"]}
    for name in (x for x in features if x.startswith("bias/")):
        attention = features.get(name.replace("bias/", "attention/"))
        assert attention is None or features[name] == attention - {"nowhere"}, name


def test_the_index_holds_the_hash_of_every_file(golden: Path, index: dict[str, Any]) -> None:
    files = {path.name: path.read_bytes() for path in golden.iterdir() if path.name != "index.json"}
    listed = {entry["name"]: (entry["bytes"], entry["sha256"]) for entry in index["files"]}
    assert listed == {name: (len(x), hashlib.sha256(x).hexdigest()) for name, x in files.items()}
    assert sum(map(len, files.values())) < 4_000_000
    stored = [x for path in golden.glob("*.safetensors") for x in tensors_in(path).values()]
    assert all(x.offset % np.dtype(DTYPES[x.dtype]).itemsize == 0 for x in stored)  # programs map files into memory
    assert files["FORMAT.md"].decode().splitlines() == index["about"]


def test_inputs_are_exact_in_every_dtype(tensors: dict[str, np.ndarray]) -> None:
    for x in (x for name, x in tensors.items() if name.endswith(("input/query", "input/key", "input/value"))):
        assert all(np.array_equal(x.astype(dtype).astype(np.float64), x) for dtype in NUMPY.values())


def test_biases_and_slopes_are_the_librarys(index: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
    cases = {case["id"]: case for case in index["cases"]}
    for contract in ("bloom", "falcon", "mpt"):
        known = cases[f"bias/{contract}"]["arguments"]
        own = alibi_core.bias(*(known[x] for x in ("num_heads", "q_len", "kv_len")), contract=contract)
        np.testing.assert_array_equal(tensors[f"bias/{contract}/bias"][0], own)
        slopes = tensors[f"slopes/{contract}/slopes"]
        np.testing.assert_array_equal(slopes[66:78].astype(np.float32), alibi_core.slopes(12, contract=contract))


def test_cases_cover_what_attention_takes(index: dict[str, Any]) -> None:
    used = {feature for case in index["cases"] if case["kind"] == "attention" for feature in case["features"]}
    assert used | {"slope_gradients", "some_gradients", "continuations"} == set(FEATURES)
    assert any(case["default_slopes"] for case in index["cases"] if case["kind"] == "attention")


def test_nothing_but_golden_vectors_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for path in (tmp_path, tmp_path / "notes.txt"):
        with pytest.raises(GoldenError, match="must be empty or hold golden vectors"):
            write_golden(path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


# --- The check: right and wrong results ---


@pytest.mark.parametrize("dtype", NUMPY)
def test_right_results_pass(golden: Path, tmp_path: Path, right: dict[str, Any], dtype: str) -> None:
    report = check_golden(golden, write_results(tmp_path, right[dtype], dtype))
    held = [case for case in report.laws if case.name.startswith(("attention", "decode"))]
    assert len(held) > 40
    assert {case.status for case in held} == {"passed", *(["not offered"] * (dtype == "float64"))}
    assert json.loads(json.dumps(report.to_dict(), allow_nan=False))["passed"] is True


def test_the_command_says_whether_results_pass(
    golden: Path, tmp_path: Path, right: dict[str, Any], capsys: Any
) -> None:
    written, found = tmp_path / "report.json", right["float32"]
    for factor, status in ((1.0, 0), (1.1, 1)):
        results = write_results(tmp_path / "results", {name: x * factor for name, x in found.items()}, "float32")
        assert main(["golden", "check", str(golden), str(results), "--json", str(written)]) == status
        assert json.loads(written.read_text())["passed"] is (status == 0)
        assert ("failed" in capsys.readouterr().out) is (status == 1)
    assert main(["golden", "check", str(golden), str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("alibi-core: ")


def test_low_precision_results_fail_in_higher_precision(golden: Path, tmp_path: Path, right: dict[str, Any]) -> None:
    for claimed, actual in (("float64", "float32"), ("float32", "float16"), ("float16", "bfloat16")):
        assert check_golden(golden, write_results(tmp_path, right[actual], claimed)).counts["failed"] > 20, claimed


@pytest.mark.parametrize(("share", "status"), [(0.9, "passed"), (1.1, "failed"), (-1.1, "failed")])
@pytest.mark.parametrize("name", ["attention/everything/output", "attention/long_grouped/gradient/key"])
def test_an_element_beyond_its_budget_fails_its_case(
    golden: Path, tmp_path: Path, tensors: dict[str, np.ndarray], name: str, share: float, status: str
) -> None:
    case, _, result = name.partition("/")[2].partition("/")
    moved, budget = tensors[name].copy(), tensors[f"attention/{case}/budget/float32/{result}"]
    at = tuple(n // 2 for n in moved.shape)
    moved[at] += share * budget[at]
    report = check_golden(golden, write_results(tmp_path, {name: moved}, "float64", dtype="float32"))
    (judged,) = (x for x in report.laws if x.name == f"attention/{case}")
    assert (judged.status, judged.counterexample.at) == (status, at)
    assert judged.share == pytest.approx(abs(share), rel=1e-3)


def test_what_is_not_finite_fails_its_case_alone(golden: Path, tmp_path: Path, right: Any) -> None:
    for value in (math.nan, math.inf):
        found = {name: x.copy() for name, x in right["float32"].items()}
        found["attention/long/output"][0, 1, 2, 3] = value
        report = check_golden(golden, write_results(tmp_path, found, "float32"))
        assert list(failed(report)) == ["attention/long"]
    assert "    off by inf times what rounding explains at [0, 1, 2, 3]: " in str(report)


def test_a_mask_may_be_a_very_low_number_but_must_be_there(golden: Path, tmp_path: Path, right: Any) -> None:
    bias = right["float32"]["bias/causal/bias"]
    for masked, passes in ((-65504.0, True), (-30000.0, True), (-29999.0, False), (math.nan, False), (math.inf, False)):
        found = {"bias/causal/bias": np.where(np.isinf(bias), masked, bias)}
        assert check_golden(golden, write_results(tmp_path, found, "float32")).passed is passes


@pytest.mark.parametrize(
    ("mistake", "in_all", "in_none"),
    [
        ("window ignored", {"window", "window_of_none"}, {"causal", "mask", "segments"}),
        ("always causal", {"symmetric"}, {"causal", "window", "long"}),
        ("top-left", {"fewer_queries", "grouped_lengths"}, {"causal", "symmetric"}),
        ("bias scaled", {"causal", "long"}, {"one_token"}),
    ],
)
def test_wrong_ideas_of_alibi_fail_where_they_show(
    golden: Path, index: Any, tensors: Any, tmp_path: Path, mistake: str, in_all: set[str], in_none: set[str]
) -> None:
    found = results_of(index, tensors, Mistaken(mistake))
    wrong = set(failed(check_golden(golden, write_results(tmp_path, found, "float32"))))
    assert wrong >= {f"attention/{name}" for name in in_all}
    assert not wrong & {f"attention/{name}" for name in in_none}


def test_failures_that_a_program_reports_count(golden: Path, tmp_path: Path) -> None:
    failures = {"attention/window": "segmentation fault"}
    report = check_golden(golden, write_results(tmp_path, {}, "float32", failures=failures))
    assert list(failed(report)) == ["attention/window"]
    assert "segmentation fault" in str(report)


# --- Bad input ---

SLOPES = "slopes/canonical/slopes"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"format": "alibi-golden"}, "format must be 'alibi-golden-results'"),
        ({"version": 2}, "version must be"),
        ({"golden_version": 1}, "golden_version must be 4, got 1"),
        ({"program": 7}, "program must be str"),
        ({"dtype": "float8"}, "dtype must be one of"),
        ({"files": {}}, "files must be list"),
        ({"files": []}, "must offer some result"),
        ({"files": ["results.safetensors"] * 2}, "is in another file, too"),
        ({"files": ["missing.safetensors"]}, "No such file"),
        ({"files": ["../results.safetensors"]}, "a file name must be"),
        ({"files": [7]}, "a file name must be"),
        ({"failures": ["attention/window"]}, "failures must be dict"),
        ({"failures": {"attention/windows": "no"}}, "failures must be of golden cases"),
    ],
)
def test_a_bad_list_of_results_is_refused(golden: Path, tmp_path: Path, right: Any, changes: Any, reason: str) -> None:
    write_results(tmp_path, {SLOPES: right["float64"][SLOPES]}, "float64", **changes)
    with pytest.raises(GoldenError, match=f"{tmp_path}.*{reason}"):
        check_golden(golden, tmp_path)


def test_results_that_are_no_json_are_refused(golden: Path, tmp_path: Path) -> None:
    with pytest.raises(GoldenError, match="No such file"):
        check_golden(golden, tmp_path)
    for text in ("", "{", "[]", "[" * 100_000):
        (tmp_path / "results.json").write_text(text)
        with pytest.raises(GoldenError, match="results.json: (is no valid JSON|format must be)"):
            check_golden(golden, tmp_path)


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        ({"slopes/canonical": np.zeros(8256)}, "'slopes/canonical' is no result"),
        ({"attention/causal/input/query": np.zeros((2, 3, 7, 5))}, "is no result"),
        ({SLOPES: np.zeros(8255)}, "must have shape"),
        ({SLOPES: np.zeros(8256, np.int64)}, "must have one of the dtypes F64, F32, F16, BF16, got I64"),
    ],
)
def test_results_that_are_none_are_refused(golden: Path, tmp_path: Path, found: Any, reason: str) -> None:
    save_file(found, write_results(tmp_path, {}, "float32") / "results.safetensors")
    with pytest.raises(GoldenError, match=reason):
        check_golden(golden, tmp_path)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda d: (d / "slopes.safetensors").write_bytes(b"damaged"), "SHA-256"),
        (lambda d: (d / "slopes.safetensors").unlink(), "No such file"),
        (lambda d: (d / "index.json").write_text("{"), "is no valid JSON"),
    ],
)
def test_damaged_vectors_are_refused(
    golden: Path, tmp_path: Path, right: Any, spoil: Callable[[Path], Any], reason: str
) -> None:
    directory = tmp_path / "vectors"
    shutil.copytree(golden, directory)
    results = write_results(tmp_path / "results", {SLOPES: right["float64"][SLOPES]}, "float64")
    assert check_golden(directory, results).passed
    spoil(directory)
    with pytest.raises(GoldenError, match=reason):
        check_golden(directory, results)
    (results / "results.safetensors").write_bytes(b"damaged")
    with pytest.raises(GoldenError, match="must be a whole safetensors file"):
        check_golden(golden, results)
