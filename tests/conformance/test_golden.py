"""Golden vectors: the oracle's numbers, and a check that neither trusts nor overlooks."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
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
    arguments |= {name: inputs[name] for name in ("q_offset", "future_slopes", "mask", "log_gates") if name in inputs}
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


def write_results(path: Path, found: dict[str, np.ndarray], stored: str = "float32") -> Path:
    """Write results as FORMAT.md says, in tensors of that dtype."""
    stored_as = {name: np.ascontiguousarray(x.astype(np.float64).astype(NUMPY[stored])) for name, x in found.items()}
    save_file(stored_as, path)
    return path


def failed(report: Any) -> dict[str, Any]:
    return {case.name: case for case in report.laws if case.status == "failed"}


# --- What is written ---


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
    assert used | {"slope_gradients", "some_gradients", "continuations", "wide_heads"} == set(FEATURES)
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
    report = check_golden(golden, write_results(tmp_path / "mine.safetensors", right[dtype], dtype), dtype=dtype)
    assert report.name == "mine"
    held = [case for case in report.laws if case.name.startswith(("attention", "decode"))]
    assert len(held) > 40
    assert {case.status for case in held} == {"passed", *(["not offered"] * (dtype == "float64"))}
    assert json.loads(json.dumps(report.to_dict(), allow_nan=False))["passed"] is True


def test_the_command_says_whether_results_pass(
    golden: Path, tmp_path: Path, right: dict[str, Any], capsys: Any
) -> None:
    written, results, found = tmp_path / "report.json", tmp_path / "results", right["float32"]
    line = ["golden", "check", str(golden), str(results), "--json", str(written)]
    assert main(line) == 2
    assert capsys.readouterr().err == f"alibi-core: {results}: No such file or directory\n"
    for factor, dtype, status in ((1.0, "float32", 0), (1.1, "float32", 1), (1.0, "float64", 1)):
        write_results(results, {name: x * factor for name, x in found.items()})
        assert main([*line, "--dtype", dtype]) == status
        assert json.loads(written.read_text())["passed"] is (status == 0)
        assert ("failed" in capsys.readouterr().out) is (status == 1)


def test_low_precision_results_fail_in_higher_precision(golden: Path, tmp_path: Path, right: dict[str, Any]) -> None:
    for claimed, actual in (("float64", "float32"), ("float32", "float16"), ("float16", "bfloat16")):
        results = write_results(tmp_path / "results", right[actual], claimed)
        assert check_golden(golden, results, dtype=claimed).counts["failed"] > 20, claimed


@pytest.mark.parametrize("share", [0.9, 1.1, -1.1, math.inf, math.nan])
@pytest.mark.parametrize("name", ["attention/everything/output", "attention/long_grouped/gradient/key"])
def test_an_element_beyond_its_budget_fails_its_case(
    golden: Path, tmp_path: Path, tensors: dict[str, np.ndarray], name: str, share: float
) -> None:
    case, _, result = name.partition("/")[2].partition("/")
    moved, budget = tensors[name].copy(), tensors[f"attention/{case}/budget/float32/{result}"]
    at = tuple(n // 2 for n in moved.shape)
    moved[at] += share * budget[at]
    report = check_golden(golden, write_results(tmp_path / "results", {name: moved}, "float64"))
    (judged,) = (x for x in report.laws if x.name == f"attention/{case}")
    assert (judged.status, judged.counterexample.at) == ("passed" if share == 0.9 else "failed", at)
    assert judged.share == pytest.approx(abs(share) if math.isfinite(share) else math.inf, rel=1e-3)
    assert f"    off by {judged.share:.3g} times what rounding explains at {list(at)}: " in str(report)


def test_a_mask_may_be_a_very_low_number_but_must_be_there(golden: Path, tmp_path: Path, right: Any) -> None:
    bias = right["float32"]["bias/causal/bias"]
    for masked, passes in ((-65504.0, True), (-30000.0, True), (-29999.0, False), (math.nan, False), (math.inf, False)):
        found = {"bias/causal/bias": np.where(np.isinf(bias), masked, bias)}
        assert check_golden(golden, write_results(tmp_path / "results", found)).passed is passes


@pytest.mark.parametrize(
    ("mistake", "in_all", "in_none"),
    [
        ("window ignored", {"window", "window_of_none"}, {"causal", "mask", "segments"}),
        ("top-left", {"fewer_queries", "grouped_lengths"}, {"causal", "symmetric"}),
        ("bias scaled", {"causal", "long"}, {"one_token"}),
    ],
)
def test_wrong_ideas_of_alibi_fail_where_they_show(
    golden: Path, index: Any, tensors: Any, tmp_path: Path, mistake: str, in_all: set[str], in_none: set[str]
) -> None:
    found = results_of(index, tensors, Mistaken(mistake))
    wrong = set(failed(check_golden(golden, write_results(tmp_path / "results", found))))
    assert wrong >= {f"attention/{name}" for name in in_all}
    assert not wrong & {f"attention/{name}" for name in in_none}


# --- Bad input ---

SLOPES = "slopes/canonical/slopes"


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        ({}, "must have some result, got none"),
        ({"slopes/canonical": np.zeros(8256)}, "'slopes/canonical' must be a result of the golden vectors"),
        ({"attention/causal/input/query": np.zeros((2, 3, 7, 5))}, "must be a result"),
        ({SLOPES: np.zeros(8255)}, r"must have shape \(8256,\) .*, got \(8255,\) and F64"),
        ({SLOPES: np.zeros(8256, np.int64)}, "one of the dtypes F64, F32, F16, BF16, got .* and I64"),
        (b"damaged", "must be a whole safetensors file"),
        (None, "No such file"),
    ],
)
def test_results_that_are_none_are_refused(golden: Path, tmp_path: Path, found: Any, reason: str) -> None:
    results = tmp_path / "results.safetensors"
    if isinstance(found, bytes):
        results.write_bytes(found)
    elif found is not None:
        save_file(found, results)
    with pytest.raises(GoldenError, match=f"{results}.*{reason}"):
        check_golden(golden, results)


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        ("slopes.safetensors", "damaged", "SHA-256"),
        ("slopes.safetensors", None, "No such file"),
        *(("index.json", text, "is no valid JSON") for text in ("", "{", "[" * 100_000)),
        *(("index.json", text, "must have the format") for text in ("[]", '{"format": "alibi-golden", "version": 1}')),
    ],
)
def test_damaged_vectors_are_refused(
    golden: Path, tmp_path: Path, right: Any, file: str, content: str | None, reason: str
) -> None:
    directory = tmp_path / "vectors"
    shutil.copytree(golden, directory)
    results = write_results(tmp_path / "results", {SLOPES: right["float64"][SLOPES]}, "float64")
    assert check_golden(directory, results).passed
    (directory / file).unlink() if content is None else (directory / file).write_text(content)
    with pytest.raises(GoldenError, match=f"{directory / file}.*{reason}"):
        check_golden(directory, results)
