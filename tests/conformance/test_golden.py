"""Golden vectors: the same bytes everywhere, the oracle's numbers, and a check that neither trusts nor overlooks."""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import alibi_core
from alibi_core._slopes import slope_values
from alibi_core.conformance import FEATURES, Mistaken
from alibi_core.conformance._cases.oracle import UNIT_ROUNDOFF, Rules, penalties, rounded
from alibi_core.conformance._golden.cases import GoldenCase
from alibi_core.conformance._golden.check import check_golden
from alibi_core.conformance._golden.files import GoldenError, safetensors_bytes
from alibi_core.conformance._golden.report import CaseResult, GoldenReport
from alibi_core.conformance._golden.results import golden_results, problem_of
from alibi_core.conformance._golden.set import read_golden, write_golden
from benchmarks.mutants import Reference as Right

# Whoever means to change a number in the golden vectors changes their version, and this.
INDEX_SHA256 = "a51165d36cfa72386dbb54d5fc28263ead60cc9d3e93e1ac9a5675e84d63cc19"
DTYPES = tuple(UNIT_ROUNDOFF)


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_golden(tmp_path_factory.mktemp("golden") / "vectors")


@pytest.fixture(scope="module")
def index(golden: Path) -> dict[str, Any]:
    return json.loads((golden / "index.json").read_text())


@pytest.fixture(scope="module")
def cases(golden: Path) -> dict[str, GoldenCase]:
    return {case.name: case for case in read_golden(golden)}


def of_kind(cases: dict[str, GoldenCase], *kinds: str) -> list[GoldenCase]:
    found = [case for case in cases.values() if case.kind in kinds]
    assert found
    return found


def files_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


# --- Results ---


def write_results(directory: Path, found: dict[str, np.ndarray], stored: str, **changes: Any) -> Path:
    """Write results as FORMAT.md says, in tensors of that dtype."""
    directory.mkdir(parents=True, exist_ok=True)
    content = {"format": "alibi-golden-results", "version": 1, "golden_version": 1, "program": "little"}
    content |= {"dtype": stored, "files": ["results.safetensors"]} | changes
    (directory / "results.json").write_text(json.dumps(content))
    dtype = {"bfloat16": ml_dtypes.bfloat16}.get(stored, stored)
    stored_as = {
        name: np.ascontiguousarray(x.astype(np.float32 if dtype is not stored else stored).astype(dtype))
        for name, x in found.items()
    }
    save_file(stored_as, directory / content["files"][0])
    return directory


@pytest.fixture(scope="module")
def little(golden: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, np.ndarray]]:
    """What a right implementation computes, by dtype."""
    right, found = Right(), {}
    for right.dtype in DTYPES:
        folder = golden_results(right, golden, tmp_path_factory.mktemp(right.dtype) / "results")
        found[right.dtype] = load_file(folder / "results.safetensors")
    return found


# --- The same bytes everywhere ---


def test_the_index_is_the_pinned_one(golden: Path) -> None:
    assert hashlib.sha256((golden / "index.json").read_bytes()).hexdigest() == INDEX_SHA256


def test_the_index_pins_every_other_file(golden: Path, index: dict[str, Any]) -> None:
    listed = {entry["name"]: (entry["bytes"], entry["sha256"]) for entry in index["files"]}
    found = files_of(golden)
    assert listed == {
        name: (len(content), hashlib.sha256(content).hexdigest())
        for name, content in found.items()
        if name != "index.json"
    }
    assert sum(map(len, found.values())) < 4_000_000
    assert found["FORMAT.md"].decode().splitlines() == index["about"]


@pytest.mark.full
def test_another_process_replaces_an_older_set_with_the_same_bytes(golden: Path, tmp_path: Path) -> None:
    """One that hashes otherwise, has another number of threads, and whose NumPy knows fewer instructions.

    Of the older set, no byte of which was the same, nothing is left.
    """
    directory = tmp_path / "vectors"
    shutil.copytree(golden, directory)
    for name in {*files_of(golden), "gone.safetensors"} - {"index.json"}:
        (directory / name).write_bytes(b"of an older version")
    edit(directory / "index.json", lambda index: index["files"].append({"name": "gone.safetensors"}))
    core = "numpy._core" if hasattr(np, "_core") else "numpy.core"
    internals = importlib.import_module(f"{core}._multiarray_umath")
    optional = [name for name in internals.__cpu_dispatch__ if internals.__cpu_features__[name]]
    environment = os.environ | {
        "PYTHONHASHSEED": "77",
        "OMP_NUM_THREADS": "1" if os.environ.get("OMP_NUM_THREADS") == "2" else "2",
        "NPY_DISABLE_CPU_FEATURES": " ".join(optional),
    }
    program = "import sys; from alibi_core.conformance._golden.set import write_golden; write_golden(sys.argv[1])"
    command = [sys.executable, "-W", "error", "-c", program, str(directory)]
    subprocess.run(command, check=True, env=environment, cwd=Path(__file__).parents[2])
    assert files_of(directory) == files_of(golden)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda d: (d / "notes.txt").write_text("mine"),
        lambda d: (d / "subfolder").mkdir(),
        lambda d: (d / "index.json").unlink(),
        lambda d: edit(d / "index.json", lambda index: index.update(version=2)),
        lambda d: edit(d / "index.json", lambda index: index.update(format="another")),
        lambda d: (d / "index.json").write_text("{"),
        lambda d: link(d / "slopes.safetensors", d.parent / "elsewhere"),
        lambda d: [(d / "slopes.safetensors").unlink(), (d / "slopes.safetensors").mkdir()],
    ],
    ids=["file", "folder", "no index", "newer", "other format", "broken index", "link", "folder for a file"],
)
def test_a_directory_with_anything_else_is_refused(golden: Path, tmp_path: Path, spoil: Callable[[Path], Any]) -> None:
    directory = tmp_path / "vectors"
    shutil.copytree(golden, directory)
    (tmp_path / "elsewhere").write_text("not ours")
    spoil(directory)
    before = {str(path): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(GoldenError, match=str(directory)):
        write_golden(directory)
    assert before == {str(path): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "vectors").write_text("mine")
    with pytest.raises(GoldenError, match="must be a directory"):
        write_golden(tmp_path / "vectors")


# --- The oracle's numbers ---


def test_the_files_are_safetensors_files(golden: Path, cases: dict[str, GoldenCase]) -> None:
    """As the library that is not ours reads them."""
    for case in cases.values():
        tensors = load_file(golden / f"{case.kind}.safetensors")
        for name, array in case.inputs.items():
            np.testing.assert_array_equal(tensors[f"{case.name}/input/{name}"], array)
        for name, result in case.expected.items():
            assert result.tensor == f"{case.name}/{name}"
            np.testing.assert_array_equal(tensors[result.tensor], result.value)


def test_inputs_are_exact_in_every_dtype(cases: dict[str, GoldenCase]) -> None:
    for case in of_kind(cases, "attention", "decode"):
        for x in (case.inputs[name] for name in ("query", "key", "value")):
            assert all(np.array_equal(rounded(x, dtype), x) for dtype in DTYPES), case.name
            assert x.size < 50 or len(np.unique(x)) > 20  # and not all alike


def test_results_and_budgets_are_the_oracles(cases: dict[str, GoldenCase]) -> None:
    """Results but for the oracle's own rounding, which a float32 budget bounds at 2**-29 of its size, in float64."""
    for stored in of_kind(cases, "attention", "decode"):
        case = problem_of(stored)
        assert stored.arguments["scale"] == pytest.approx(case.sizes.head_dim**-0.5) or "scale" in stored.features
        for dtype in DTYPES:
            problem = case.exact(dtype, counted_from_anywhere="far" not in stored.features)
            answers = {"output": problem.output}
            if stored.kind == "attention":
                answers |= {f"gradient/{name}": x for name, x in case.gradients(dtype, problem=problem).items()}
            assert set(answers) == set(stored.expected)
            for name, answer in answers.items():
                entry, where = stored.expected[name], (stored.name, name, dtype)
                budget = entry.budgets[dtype]
                assert budget.shape == answer.budget.shape == entry.value.shape, where
                assert (budget >= answer.budget).all(), where
                assert (budget <= 1.001 * answer.budget).all(), where
                assert (np.abs(entry.value - answer.value) <= 2.0**-29 * entry.budgets["float32"]).all(), where


def test_biases_are_the_oracles_and_the_librarys(cases: dict[str, GoldenCase]) -> None:
    contracts = set()
    for case in of_kind(cases, "bias"):
        known, expected, contract = case.arguments, case.expected["bias"].value, case.arguments["contract"]
        sizes = known["num_heads"], known["q_len"], known["kv_len"]
        contracts.add(contract)
        if contract == "exact":
            options = {name: known[name] for name in ("is_causal", "q_offset", "window_size")}
            exact = penalties(Rules(**(options | case.inputs)), known["batch"], *sizes)
            assert np.array_equal(expected, exact), case.name
        else:
            assert np.array_equal(expected[0], alibi_core.bias(*sizes, contract=contract)), contract
    assert contracts == {"exact", "bloom", "falcon", "mpt"}


def test_slopes_are_the_librarys(cases: dict[str, GoldenCase]) -> None:
    rules = {"canonical": {}, "geometric": {"contract": "geometric"}, "linear": {"scheme": "linear"}}
    rules |= {contract: {"contract": contract} for contract in ("bloom", "falcon", "mpt")}
    assert {case.name for case in of_kind(cases, "slopes")} == {f"slopes/{name}" for name in rules}
    for name, arguments in rules.items():
        all_slopes = cases[f"slopes/{name}"].expected["slopes"].value
        assert all_slopes.shape == (128 * 129 // 2,)
        for n in (1, 2, 3, 12, 127, 128):
            own = all_slopes[n * (n - 1) // 2 : n * (n + 1) // 2]
            assert own.tolist() == slope_values(n, **arguments)


def test_cases_cover_what_attention_takes(cases: dict[str, GoldenCase]) -> None:
    used = {feature for case in of_kind(cases, "attention") for feature in case.features}
    assert used | {"slope_gradients", "some_gradients"} == set(FEATURES)  # gradients are results, not cases
    assert any(case.default_slopes for case in of_kind(cases, "attention"))


# --- The check: right and wrong results ---


@pytest.mark.parametrize("dtype", DTYPES)
def test_right_results_pass(golden: Path, tmp_path: Path, little: dict[str, Any], dtype: str) -> None:
    report = check_golden(golden, write_results(tmp_path, little[dtype], dtype))
    assert report.passed, str(report)
    held = [case for case in report.cases if case.name.startswith(("attention", "decode"))]
    assert len(held) > 40
    assert {(case.status, case.missing) for case in held} == {("passed", ())}
    assert json.loads(json.dumps(report.to_dict(), allow_nan=False))["passed"] is True


def test_low_precision_results_fail_in_higher_precision(golden: Path, tmp_path: Path, little: dict[str, Any]) -> None:
    for claimed, actual in (("float64", "float32"), ("float32", "float16"), ("float16", "bfloat16")):
        report = check_golden(golden, write_results(tmp_path, little[actual], claimed))
        assert report.counts["failed"] > 20, claimed


def failed(report: GoldenReport) -> dict[str, CaseResult]:
    return {case.name: case for case in report.cases if case.status == "failed"}


ELEMENTS = {
    "attention/everything": ("output", (1, 2, 3, 1)),
    "attention/long_grouped": ("gradient/key", (0, 0, 123, 4)),
    "attention/asymmetric": ("gradient/future_slopes", (2,)),
    "attention/more_queries": ("output", (0, 1, 2, 0)),  # of a query that looks nowhere
    "decode/grouped": ("output", (1, 3, 6, 2)),
    "bias/window": ("bias", (0, 3, 6, 4)),
    "slopes/canonical": ("slopes", (8000,)),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("share", "status"), [(0.9, "passed"), (1.1, "failed"), (-1.1, "failed"), (3, "failed")])
def test_an_element_beyond_its_budget_fails_its_case(
    golden: Path, tmp_path: Path, cases: dict[str, GoldenCase], dtype: str, share: float, status: str
) -> None:
    # The budgets of slopes and biases in float64 are a few units in the last place, which nothing can be moved by less.
    chosen = [x for x in ELEMENTS if share == 3 or dtype != "float64" or not x.startswith(("slopes", "bias"))]
    found, bounds = {}, {}
    for name in chosen:
        result, at = ELEMENTS[name]
        expected = cases[name].expected[result]
        bounds[name], moved = expected.budgets[dtype][at], expected.value.copy()
        moved[at] += share * bounds[name]
        found[expected.tensor] = moved
    by_name = {x.name: x for x in check_golden(golden, write_results(tmp_path, found, "float64", dtype=dtype)).cases}
    for name in chosen:
        (result, at), case = ELEMENTS[name], by_name[name]
        expected = cases[name].expected[result]
        actual = found[expected.tensor][at]
        assert (case.status, case.worst.index) == (status, at)
        assert case.worst.ratio == pytest.approx(abs(actual - expected.value[at]) / bounds[name])
        assert (case.worst.expected, case.worst.actual) == (expected.value[at], actual)
        assert set(case.missing) == set(cases[name].expected) - {result}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_fails_its_case_alone(golden: Path, tmp_path: Path, little: Any, value: float) -> None:
    found = {name: x.copy() for name, x in little["float32"].items()}
    found["attention/long/output"][0, 1, 2, 3] = value
    report = check_golden(golden, write_results(tmp_path, found, "float32"))
    (case,) = failed(report).values()
    assert not report.passed
    assert case.name == "attention/long"
    assert case.worst is not None
    assert (case.worst.index, case.worst.ratio) == ((0, 1, 2, 3), math.inf)
    assert "attention/long: failed, attention/long/output at (0, 1, 2, 3)" in str(report)
    worst = json.loads(json.dumps(report.to_dict(), allow_nan=False))["cases"][report.cases.index(case)]["worst"]
    assert (worst["actual"], worst["ratio"]) == (str(value), "inf")


def test_a_mask_may_be_a_very_low_number_but_must_be_there(golden: Path, tmp_path: Path, little: Any) -> None:
    bias = little["float32"]["bias/causal/bias"]
    for masked, passes in ((-65504.0, True), (-30000.0, True), (-29999.0, False), (math.nan, False), (math.inf, False)):
        found = {"bias/causal/bias": np.where(np.isinf(bias), masked, bias)}
        assert check_golden(golden, write_results(tmp_path, found, "float32")).passed is passes
    found = {"bias/causal/bias": np.where(bias == -0.5, -np.inf, bias)}
    assert not check_golden(golden, write_results(tmp_path, found, "float32")).passed


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
    golden: Path, tmp_path: Path, mistake: str, in_all: set[str], in_none: set[str]
) -> None:
    found = set(failed(check_golden(golden, golden_results(Mistaken(mistake), golden, tmp_path / "results"))))
    assert found >= {f"attention/{name}" for name in in_all}
    assert not found & {f"attention/{name}" for name in in_none}


def test_failures_that_a_program_reports_count(golden: Path, tmp_path: Path) -> None:
    directory = write_results(tmp_path, {}, "float32", failures={"attention/window": "segmentation fault"})
    report = check_golden(golden, directory)
    assert not report.passed
    assert list(failed(report)) == ["attention/window"]
    assert "segmentation fault" in str(report)


# --- Bad input ---


def edit(path: Path, change: Callable[[Any], Any]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def link(path: Path, target: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(target)


SLOPES = "slopes/canonical/slopes"
BAD_FILES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "truncated data": lambda content: content[:-1],
    "truncated header": lambda content: content[:20],
    "more data": lambda content: content + b"\0",
    "huge header": lambda content: b"\xff" * 8 + content[8:],
    "no JSON": lambda content: content.replace(b"{", b"[", 1),
    "other shape": lambda content: content.replace(b"[8256]", b"[8255]"),
    "overlap": lambda content: content.replace(b"[0,", b"[8,"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_damaged_results_are_refused(golden: Path, tmp_path: Path, little: Any, name: str) -> None:
    directory = write_results(tmp_path, {SLOPES: little["float64"][SLOPES]}, "float64")
    assert check_golden(golden, directory).passed
    path = directory / "results.safetensors"
    path.write_bytes(BAD_FILES[name](path.read_bytes()))
    with pytest.raises(GoldenError, match="is no valid safetensors file") as caught:
        check_golden(golden, directory)
    assert str(caught.value).startswith(str(path))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"format": "alibi-golden"}, "format must be 'alibi-golden-results'"),
        ({"version": 2}, "version must be"),
        ({"golden_version": 2}, "golden_version must be 1, got 2"),
        ({"program": 7}, "program must be str"),
        ({"dtype": "float8"}, "dtype must be one of"),
        ({"files": {}}, "files must be list"),
        ({"files": []}, "must offer some result"),
        ({"files": ["results.safetensors"] * 2}, "stands twice"),
        ({"files": ["missing.safetensors"]}, "no such file"),
        ({"files": ["../results.safetensors"]}, "a file name must be"),
        ({"files": ["..\\results.safetensors"]}, "a file name must be"),
        ({"files": ["C:results.safetensors"]}, "a file name must be"),
        ({"files": [".."]}, "a file name must be"),
        ({"files": [7]}, "a file name must be"),
        ({"files": ["outside.safetensors"]}, "a link that leads outside"),
        ({"files": ["loop.safetensors"]}, "(cannot be read|no such file|leads outside)"),
        ({"files": ["folder"]}, "no such file"),
        ({"files": ["sparse.safetensors"]}, "must have at most"),
        ({"failures": ["attention/window"]}, "failures must be dict"),
        ({"failures": {"attention/windows": "no"}}, "failures must be of golden cases"),
    ],
)
def test_a_bad_list_of_results_is_refused(golden: Path, tmp_path: Path, little: Any, changes: Any, reason: str) -> None:
    directory = write_results(tmp_path / "results", {SLOPES: little["float64"][SLOPES]}, "float64")
    shutil.copy(directory / "results.safetensors", tmp_path / "elsewhere")
    link(directory / "outside.safetensors", tmp_path / "elsewhere")
    link(directory / "loop.safetensors", directory / "loop.safetensors")
    (directory / "folder").mkdir()
    with open(directory / "sparse.safetensors", "wb") as file:
        file.truncate(2**28 + 1)
    edit(directory / "results.json", lambda content: content.update(changes))
    with pytest.raises(GoldenError, match=reason) as caught:
        check_golden(golden, directory)
    assert str(directory) in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000])
def test_results_that_are_no_json_are_refused(golden: Path, tmp_path: Path, text: str) -> None:
    with pytest.raises(GoldenError, match="no such file"):
        check_golden(golden, tmp_path)
    (tmp_path / "results.json").write_text(text)
    with pytest.raises(GoldenError, match="results.json: (is no valid JSON|must hold a JSON object)"):
        check_golden(golden, tmp_path)


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        ({"slopes/canonical": np.zeros(8256)}, "'slopes/canonical' is no result"),
        ({"attention/causal/input/query": np.zeros((2, 3, 7, 5))}, "is no result"),
        ({SLOPES: np.zeros(8255)}, "must have shape"),
        ({SLOPES: np.zeros((1, 8256))}, "must have shape"),
        ({SLOPES: np.zeros(8256, np.int64)}, "must have one of the dtypes F64, F32, F16, BF16, got I64"),
        ({SLOPES: np.zeros(8256, bool)}, "must have one of the dtypes F64, F32, F16, BF16, got BOOL"),
    ],
)
def test_results_that_are_none_are_refused(golden: Path, tmp_path: Path, found: Any, reason: str) -> None:
    directory = write_results(tmp_path, {}, "float32")
    (directory / "results.safetensors").write_bytes(safetensors_bytes(found, {}))
    with pytest.raises(GoldenError, match=reason):
        check_golden(golden, directory)


def test_one_result_in_two_files_is_refused(golden: Path, tmp_path: Path, little: Any) -> None:
    directory = write_results(tmp_path, {SLOPES: little["float64"][SLOPES]}, "float64", files=["a", "b"])
    shutil.copy(directory / "a", directory / "b")
    with pytest.raises(GoldenError, match="is in another file, too"):
        check_golden(golden, directory)


def test_links_within_the_directory_are_followed(golden: Path, tmp_path: Path, little: Any) -> None:
    directory = write_results(tmp_path, {SLOPES: little["float64"][SLOPES]}, "float64", files=["real"])
    link(directory / "linked", directory / "real")
    edit(directory / "results.json", lambda content: content.update(files=["linked"]))
    assert check_golden(golden, directory).passed


def index_of(change: Callable[[Any], Any]) -> Callable[[Path], Any]:
    return lambda directory: edit(directory / "index.json", change)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (index_of(lambda i: i.update(format="?")), "format must be 'alibi-golden'"),
        (index_of(lambda i: i.update(version=2)), "version must be"),
        (index_of(lambda i: i["files"][-1].update(name="../slopes.safetensors")), "a file name must be"),
        (index_of(lambda i: i["files"][-1].update(name="gone.safetensors")), "no such file"),
        (index_of(lambda i: i["files"][-1].update(bytes=10**30)), "must have 10+ bytes"),
        (index_of(lambda i: i["files"][-1].update(sha256="0" * 64)), "SHA-256"),
        (index_of(lambda i: i.pop("files")), "is not as FORMAT.md says, KeyError: 'files'"),
        (index_of(lambda i: i["files"].append(3)), "is not as FORMAT.md says"),
        (index_of(lambda i: i["cases"].append("x")), "is not as FORMAT.md says"),
        (index_of(lambda i: i["cases"][0]["expected"]["slopes"].update(tensor="?")), "KeyError: '\\?'"),
        (index_of(lambda i: i["cases"][0]["expected"]["slopes"]["budgets"].pop("float16")), "KeyError: 'float16'"),
        (lambda d: (d / "index.json").unlink(), "index.json: there is no such file"),
        (lambda d: (d / "index.json").write_text('{"format": '), "index.json: is no valid JSON"),
        (lambda d: link(d / "index.json", d.parent / "elsewhere"), "index.json: .* leads outside"),
        (lambda d: link(d / "bias.safetensors", d.parent / "elsewhere"), "bias.safetensors: .* leads outside"),
        (lambda d: (d / "bias.safetensors").unlink(), "bias.safetensors: there is no such file"),
        (lambda d: truncate(d / "bias.safetensors"), "bias.safetensors: must have .* bytes"),
        (lambda d: flip(d / "bias.safetensors"), "bias.safetensors: must have the SHA-256"),
        (lambda d: shutil.rmtree(d), "there is no such file"),
    ],
)
def test_a_damaged_set_is_refused(golden: Path, tmp_path: Path, spoil: Callable[[Path], Any], reason: str) -> None:
    directory = tmp_path / "vectors"
    shutil.copytree(golden, directory)
    (tmp_path / "elsewhere").write_text("{}")
    spoil(directory)
    with pytest.raises(GoldenError, match=reason) as caught:
        check_golden(directory, tmp_path)
    assert str(directory) in str(caught.value)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-8])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


# --- Adapters ---


class Reference:
    """The library's own reference, as an adapter."""

    dtype = "float64"
    slopes = staticmethod(functools.partial(alibi_core.slopes, dtype=np.float64))
    attention = staticmethod(alibi_core.attention)

    def bias(self, num_heads: int, q_len: int, kv_len: int, is_causal: bool) -> np.ndarray:
        return alibi_core.bias(num_heads, q_len, kv_len, is_causal=is_causal, dtype=np.float64)

    def decode_step(self, query, key, value, slopes, cache):
        if cache is not None:
            key, value = (np.concatenate([old, new], axis=2) for old, new in zip(cache, (key, value), strict=True))
        return alibi_core.attention(query, key, value, slopes), (key, value)


class Own:
    """One that has its slopes, is causal, and does no more."""

    def attention(self, query: np.ndarray, key: np.ndarray, value: np.ndarray) -> np.ndarray:
        if query.shape != key.shape:
            raise NotImplementedError("as many queries as keys, please")
        return alibi_core.attention(query, key, value)


def statuses(report: GoldenReport) -> dict[str, str]:
    return {case.name: case.status for case in report.cases}


def test_an_adapter_is_held_to_what_it_offers(golden: Path, tmp_path: Path) -> None:
    found = statuses(check_golden(golden, golden_results(Reference(), golden, tmp_path / "results")))
    assert found["slopes/canonical"] == found["bias/long_symmetric"] == found["attention/window"] == "passed"
    assert found["decode/long"] == found["attention/long_segments"] == "passed"
    assert found["attention/slopes_per_batch"] == found["attention/offset_far"] == "not offered"  # to be declared
    assert "failed" not in found.values()


def test_slopes_of_ones_own_are_held_to_cases_that_have_them(golden: Path, tmp_path: Path) -> None:
    found = statuses(check_golden(golden, golden_results(Own(), golden, tmp_path / "results")))
    assert {name for name, status in found.items() if status == "passed"} == {
        "attention/causal", "attention/one_token", "attention/eight_heads", "attention/loud_keys",
    }  # fmt: skip
    assert "failed" not in found.values()


def test_a_wrong_adapter_fails(golden: Path, tmp_path: Path) -> None:
    class Wrong(Right):
        def decode_step(self, query, key, value, slopes, cache):
            output, cache = super().decode_step(query, key, value, slopes, cache)
            return (alibi_core.attention(query, key, value, slopes) if query.shape[2] == 1 else output), cache

        def attention(self, query, key, value, slopes, window_size=None, **others):
            if window_size == 0:
                raise ZeroDivisionError("no window")
            return super().attention(query, key, value, slopes, window_size=window_size, **others)

    report = check_golden(golden, golden_results(Wrong(), golden, tmp_path / "results"))
    found = failed(report)
    assert set(found) == {"attention/window_of_none"} | {
        f"decode/{x}" for x in ("eight_heads", "grouped", "from_nothing", "long")
    }
    assert "ZeroDivisionError: no window" in found["attention/window_of_none"].remark


def test_results_go_into_a_directory_of_their_own(golden: Path, tmp_path: Path) -> None:
    directory = golden_results(Own(), golden, tmp_path / "results")
    before = files_of(directory)
    assert files_of(golden_results(Own(), golden, directory)) == before
    (directory / "notes.txt").write_text("mine")
    with pytest.raises(GoldenError, match="notes.txt"):
        golden_results(Own(), golden, directory)
    with pytest.raises(GoldenError, match="must be empty"):
        golden_results(Own(), golden, golden)


def of_index(index: dict[str, Any], name: str) -> dict[str, Any]:
    return next(case for case in index["cases"] if case["id"] == name)


@pytest.mark.parametrize(
    "change",
    [
        lambda i: of_index(i, "slopes/canonical")["arguments"].update(most_heads=10**9),
        lambda i: of_index(i, "slopes/canonical")["arguments"].pop("most_heads"),
        lambda i: of_index(i, "bias/causal")["arguments"].update(num_heads="eight"),
        lambda i: of_index(i, "attention/causal")["arguments"].update(num_kv_heads=0),
        lambda i: of_index(i, "attention/causal")["inputs"].pop("key"),
        lambda i: of_index(i, "decode/long")["arguments"].update(steps=None),
    ],
)
def test_an_index_that_asks_for_nonsense_is_refused(golden: Path, tmp_path: Path, change: Any) -> None:
    shutil.copytree(golden, tmp_path / "vectors")
    edit(tmp_path / "vectors" / "index.json", change)
    with pytest.raises(GoldenError, match="is not as its kind must be"):
        golden_results(Right(), tmp_path / "vectors", tmp_path / "results")


def test_to_return_nonsense_is_not_to_refuse(golden: Path, tmp_path: Path) -> None:
    """Of an adapter that declares nothing, a call that raises is no offer; one that returns another shape is wrong."""

    class Undeclared:
        def attention(self, query, key, value, slopes, is_causal, window_size=None):
            if not is_causal:
                raise NotImplementedError("causal only")
            return query[:1, :1] if window_size == 2 else alibi_core.attention(query, key, value, slopes)

    found = check_golden(golden, golden_results(Undeclared(), golden, tmp_path / "results")).cases
    by_name = {case.name: case for case in found}
    assert by_name["attention/symmetric"].status == "not offered"
    assert by_name["attention/window"].status == "failed"
    assert "returned shape" in by_name["attention/window"].remark
