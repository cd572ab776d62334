"""Golden vectors: the same bytes everywhere, the oracle's numbers, and a check that neither trusts nor overlooks."""

from __future__ import annotations

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

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import alibi_core
from alibi_core._slopes import slope_values
from alibi_core.conformance._cases.case import Case, Sizes
from alibi_core.conformance._cases.oracle import UNIT_ROUNDOFF, Rules, penalties, rounded
from alibi_core.conformance._golden.check import check_golden
from alibi_core.conformance._golden.files import GoldenError, safetensors_bytes
from alibi_core.conformance._golden.report import CaseResult, GoldenReport
from alibi_core.conformance._golden.results import golden_results
from alibi_core.conformance._golden.write import write_golden

# Whoever means to change a number in the golden vectors changes their version, and this.
INDEX_SHA256 = "d6a79a9050a392d25ae05dac87aa201d85045b483c29102adff7e43b041b65b8"
DTYPES = tuple(UNIT_ROUNDOFF)
KINDS = ("slopes", "bias", "attention", "decode")


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_golden(tmp_path_factory.mktemp("golden") / "vectors")


@pytest.fixture(scope="module")
def index(golden: Path) -> dict[str, Any]:
    return json.loads((golden / "index.json").read_text())


@pytest.fixture(scope="module")
def tensors(golden: Path) -> dict[str, np.ndarray]:
    """All tensors of all files, as the library that is not ours reads them."""
    return {name: x for kind in KINDS for name, x in load_file(golden / f"{kind}.safetensors").items()}


def ids(entry: dict[str, Any]) -> str:
    return entry["id"]


def of_kind(index: dict[str, Any], *kinds: str) -> list[dict[str, Any]]:
    found = [case for case in index["cases"] if case["kind"] in kinds]
    assert found
    return found


def inputs_of(case: dict[str, Any], tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: tensors[entry["tensor"]] for name, entry in case["inputs"].items()}


def files_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


# --- An implementation that shares nothing with the library ---


def attend(case: dict[str, Any], inputs: dict[str, np.ndarray], dtype: str) -> dict[str, np.ndarray]:
    """Follow FORMAT.md: compute in float32 (float64 for float64), round inputs and results to ``dtype``."""
    working = np.float64 if dtype == "float64" else np.float32
    known = case["arguments"]
    batch, heads, kv_heads = known["batch"], known["num_heads"], known["num_kv_heads"]
    group, scale = heads // kv_heads, working(known["scale"])
    query, key, value = (rounded(inputs[name], dtype).astype(working) for name in ("query", "key", "value"))
    # Softmax ignores what is constant along a row, and float32 has no digits to spare for it, a million tokens away.
    bias, past, ahead = bias_of(case, inputs, np.float64)
    highest = bias.max(axis=-1, keepdims=True, initial=-np.inf)
    bias = (bias - np.where(highest > -np.inf, highest, 0)).astype(working)
    by_group = query.reshape(batch, kv_heads, group, *query.shape[2:])
    scores = np.einsum("bkgqd,bksd->bkgqs", by_group, key) * scale
    scores = scores + bias.reshape(scores.shape)
    highest = scores.max(axis=-1, keepdims=True, initial=-1e30)
    weights = np.exp(scores - highest) * (scores > -np.inf)
    total = weights.sum(axis=-1, keepdims=True)
    weights = weights / np.where(total > 0, total, working(1))
    results = {"output": np.einsum("bkgqs,bksd->bkgqd", weights, value).reshape(query.shape)}
    if "grad_output" in inputs:
        grad = rounded(inputs["grad_output"], dtype).astype(working).reshape(by_group.shape)
        d_weights = np.einsum("bkgqd,bksd->bkgqs", grad, value)
        d_scores = weights * (d_weights - (weights * d_weights).sum(axis=-1, keepdims=True))
        results["gradient/query"] = (np.einsum("bkgqs,bksd->bkgqd", d_scores, key) * scale).reshape(query.shape)
        results["gradient/key"] = np.einsum("bkgqs,bkgqd->bksd", d_scores, by_group) * scale
        results["gradient/value"] = np.einsum("bkgqs,bkgqd->bksd", weights, grad)
        d_bias = d_scores.reshape(bias.shape)
        sides = {"slopes": past, "future_slopes": ahead}
        for name, distances in sides.items() if "future_slopes" in inputs else [("slopes", past + ahead)]:
            gradient = -(d_bias * distances).sum(axis=(2, 3))
            results[f"gradient/{name}"] = gradient.sum(axis=0) if inputs[name].ndim == 1 else gradient
    return {name: x if "slopes" in name else rounded(x, dtype).astype(working) for name, x in results.items()}


def bias_of(case: dict[str, Any], inputs: dict[str, np.ndarray], working: Any) -> tuple[np.ndarray, ...]:
    """Return the bias and how far keys lie before and after queries, all [batch, num_heads, q_len, kv_len]."""
    known = case["arguments"]
    shape = tuple(known[name] for name in ("batch", "num_heads", "q_len", "kv_len"))
    bias, past, ahead = (np.zeros(shape, working) for _ in range(3))
    slopes = inputs["slopes"].astype(working)
    future = inputs.get("future_slopes", slopes).astype(working)
    for b, h, i, j in np.ndindex(shape):
        offset = int(inputs["q_offset"][b]) if known["q_offset"] is None else known["q_offset"]
        distance = j - (offset + i)
        sees = distance <= 0 or not known["is_causal"]
        sees &= known["window_size"] is None or abs(distance) <= known["window_size"]
        if "q_segment_ids" in inputs:
            sees &= bool(inputs["q_segment_ids"][b, i] == inputs["kv_segment_ids"][b, j])
        if "mask" in inputs:
            sees &= bool(np.broadcast_to(inputs["mask"], shape)[b, h, i, j])
        rates = future if distance > 0 else slopes
        bias[b, h, i, j] = -(rates[b, h] if rates.ndim == 2 else rates[h]) * working(abs(distance)) if sees else -np.inf
        (ahead if distance > 0 else past)[b, h, i, j] = abs(distance)
    return bias, past, ahead


def slopes_of(case: dict[str, Any], working: Any) -> np.ndarray:
    rows = []
    for n in range(1, case["arguments"]["most_heads"] + 1):
        p = 2 ** int(math.log2(n))
        exponents = {
            "canonical": [8 * (h + 1) / p if h < p else 4 * (2 * (h - p) + 1) / p for h in range(n)],
            "geometric": [8 * (h + 1) / n for h in range(n)],
        }
        scheme = case["arguments"]["scheme"]
        rows.append(np.linspace(0.05, 0.5, n) if scheme == "linear" else 2.0 ** -np.asarray(exponents[scheme]))
    return np.concatenate(rows).astype(working)


def computed(index: dict[str, Any], tensors: dict[str, np.ndarray], dtype: str) -> dict[str, np.ndarray]:
    """Return all results that the little implementation offers."""
    working = np.float64 if dtype == "float64" else np.float32
    found: dict[str, np.ndarray] = {}
    for case in index["cases"]:
        if case["arguments"].get("contract", "exact") != "exact":
            continue
        inputs = inputs_of(case, tensors)
        if case["kind"] == "slopes":
            results = {"slopes": slopes_of(case, working)}
        elif case["kind"] == "bias":
            results = {"bias": rounded(bias_of(case, inputs, working)[0], dtype)}
        else:
            results = attend(case, inputs, dtype)
        found |= {case["expected"][name]["tensor"]: x for name, x in results.items() if name in case["expected"]}
    return found


def write_results(directory: Path, found: dict[str, np.ndarray], stored: str, **changes: Any) -> Path:
    """Write results as FORMAT.md says, in tensors of that dtype."""
    directory.mkdir(parents=True, exist_ok=True)
    content = {
        "format": "alibi-golden-results",
        "version": 1,
        "golden_version": 1,
        "program": "little",
        "dtype": stored,
    }
    content |= {"files": ["results.safetensors"]} | changes
    (directory / "results.json").write_text(json.dumps(content))
    if stored == "bfloat16":
        (directory / "results.safetensors").write_bytes(bfloat16_file(found))
    else:
        save_file(
            {name: np.ascontiguousarray(x.astype(stored)) for name, x in found.items()}, directory / content["files"][0]
        )
    return directory


def bfloat16_file(found: dict[str, np.ndarray]) -> bytes:
    header: dict[str, Any] = {}
    data = b""
    for name, x in found.items():
        bits = np.ascontiguousarray(rounded(x, "bfloat16").astype("<f4")).view("<u4") >> 16
        offsets = [len(data), len(data) + 2 * x.size]
        header[name] = {"dtype": "BF16", "shape": list(x.shape), "data_offsets": offsets}
        data += bits.astype("<u2").tobytes()
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


@pytest.fixture(scope="module")
def little(index: dict[str, Any], tensors: dict[str, np.ndarray]) -> dict[str, dict[str, np.ndarray]]:
    return {dtype: computed(index, tensors, dtype) for dtype in DTYPES}


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
    program = "import sys; from alibi_core.conformance._golden.write import write_golden; write_golden(sys.argv[1])"
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


def test_inputs_are_exact_in_every_dtype(index: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
    for case in of_kind(index, "attention", "decode"):
        for name, x in inputs_of(case, tensors).items():
            if name in ("query", "key", "value", "grad_output"):
                assert all(np.array_equal(rounded(x, dtype), x) for dtype in DTYPES), case["id"]
                assert x.size < 50 or len(np.unique(x)) > 20  # and not all alike


def as_case(stored: dict[str, Any], inputs: dict[str, np.ndarray]) -> Case:
    known = stored["arguments"]
    heads, kv_heads, lengths = known["num_heads"], known["num_kv_heads"], (known["q_len"], known["kv_len"])
    sizes = Sizes(known["batch"], kv_heads, heads // kv_heads, lengths, known["head_dim"])
    arguments = {name: known[name] for name in ("is_causal", "q_offset", "window_size", "scale")}
    arguments |= {name: inputs[name] for name in ("q_offset", "future_slopes", "mask") if name in inputs}
    if "q_segment_ids" in inputs:
        arguments["segment_ids"] = inputs["q_segment_ids"], inputs["kv_segment_ids"]
    arrays = {name: inputs[name] for name in ("query", "key", "value", "slopes")}
    arrays["cotangent"] = inputs.get("grad_output", inputs["query"])
    per_batch = inputs["slopes"].ndim == 2
    case = Case(sizes, "causal", None, None, None, None, per_batch, 0, scaling=known["scale"])
    return case.with_arguments("causal", arguments).with_arrays(**{name: x.astype(float) for name, x in arrays.items()})


def test_results_and_budgets_are_the_oracles(index: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
    """Results but for the oracle's own rounding, which a float32 budget bounds at 2**-29 of its size, in float64."""
    for stored in of_kind(index, "attention", "decode"):
        case = as_case(stored, inputs_of(stored, tensors))
        assert stored["arguments"]["scale"] == pytest.approx(case.sizes.head_dim**-0.5) or "scale" in stored["features"]
        for dtype in DTYPES:
            problem = case.exact(dtype, counted_from_anywhere="far" not in stored["features"])
            answers = {"output": problem.output}
            if stored["kind"] == "attention":
                answers |= {f"gradient/{name}": x for name, x in case.gradients(dtype, problem=problem).items()}
            assert set(answers) == set(stored["expected"])
            for name, answer in answers.items():
                entry = stored["expected"][name]
                where = stored["id"], name, dtype
                budget = tensors[entry["budgets"][dtype]["tensor"]]
                assert budget.shape == answer.budget.shape == tuple(entry["shape"]), where
                assert (budget >= answer.budget).all(), where
                assert (budget <= 1.001 * answer.budget).all(), where
                allowed = 2.0**-29 * tensors[entry["budgets"]["float32"]["tensor"]]
                assert (np.abs(tensors[entry["tensor"]] - answer.value) <= allowed).all(), where


def test_biases_are_the_oracles_and_the_librarys(index: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
    contracts = set()
    for case in of_kind(index, "bias"):
        known, inputs = dict(case["arguments"]), inputs_of(case, tensors)
        expected, contract = tensors[case["expected"]["bias"]["tensor"]], known["contract"]
        sizes = known["num_heads"], known["q_len"], known["kv_len"]
        contracts.add(contract)
        if contract == "exact":
            options = {name: known[name] for name in ("is_causal", "q_offset", "window_size")}
            exact = penalties(Rules(**(options | inputs)), known["batch"], *sizes)
            assert np.array_equal(expected, exact), case["id"]
        else:
            assert np.array_equal(expected[0], alibi_core.bias(*sizes, contract=contract)), contract
    assert contracts == {"exact", "bloom", "falcon", "mpt"}


def test_slopes_are_the_librarys(index: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
    found = {case["id"]: case for case in of_kind(index, "slopes")}
    rules = {"canonical": {}, "geometric": {"contract": "geometric"}, "linear": {"scheme": "linear"}}
    rules |= {contract: {"contract": contract} for contract in ("bloom", "falcon", "mpt")}
    assert set(found) == {f"slopes/{name}" for name in rules}
    for name, arguments in rules.items():
        all_slopes = tensors[f"slopes/{name}/slopes"]
        assert all_slopes.shape == (128 * 129 // 2,)
        for n in (1, 2, 3, 12, 127, 128):
            own = all_slopes[n * (n - 1) // 2 : n * (n + 1) // 2]
            assert own.tolist() == slope_values(n, **arguments)


def test_cases_cover_what_attention_takes(index: dict[str, Any]) -> None:
    from alibi_core.conformance._adapter import FEATURES

    used = {feature for case in of_kind(index, "attention") for feature in case["features"]}
    assert used | {"slope_gradients", "some_gradients"} == set(FEATURES)  # gradients are results, not cases
    assert any(case["default_slopes"] for case in of_kind(index, "attention"))


# --- The check: right and wrong results ---


@pytest.mark.parametrize("dtype", DTYPES)
def test_right_results_pass(golden: Path, tmp_path: Path, little: dict[str, Any], index: Any, dtype: str) -> None:
    report = check_golden(golden, write_results(tmp_path, little[dtype], dtype))
    assert report.passed, str(report)
    offered = [case for case in index["cases"] if case["arguments"].get("contract", "exact") == "exact"]
    assert report.counts == {"passed": len(offered), "failed": 0, "not offered": len(index["cases"]) - len(offered)}
    assert not any(case.missing for case in report.cases if case.status == "passed")
    assert json.loads(json.dumps(report.to_dict(), allow_nan=False))["passed"] is True


def test_low_precision_results_fail_in_higher_precision(golden: Path, tmp_path: Path, little: dict[str, Any]) -> None:
    for claimed, actual in (("float64", "float32"), ("float32", "float16"), ("float16", "bfloat16")):
        report = check_golden(golden, write_results(tmp_path, little[actual], claimed))
        assert report.counts["failed"] > 20, claimed


def failed(report: GoldenReport) -> dict[str, CaseResult]:
    return {case.name: case for case in report.cases if case.status == "failed"}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("case", "result", "at"),
    [
        ("attention/everything", "output", (1, 2, 3, 1)),
        ("attention/long_grouped", "gradient/key", (0, 0, 123, 4)),
        ("attention/asymmetric", "gradient/future_slopes", (2,)),
        ("attention/more_queries", "output", (0, 1, 2, 0)),  # of a query that looks nowhere
        ("decode/grouped", "output", (1, 3, 6, 2)),
        ("bias/window", "bias", (0, 3, 6, 4)),
        ("slopes/canonical", "slopes", (8000,)),
    ],
)
@pytest.mark.parametrize("sign", [-1, 1])
def test_an_element_beyond_its_budget_fails_its_case(
    golden: Path, tmp_path: Path, index: Any, tensors: Any, dtype: str, case: str, result: str, at: Any, sign: int
) -> None:
    entry = next(x for x in index["cases"] if x["id"] == case)["expected"][result]
    exact, budget = tensors[entry["tensor"]], entry["budgets"][dtype]
    bound = tensors[budget["tensor"]][at] if "tensor" in budget else budget["absolute"]
    bound += budget.get("relative", 0) * abs(exact[at])
    # The budgets of slopes and biases in float64 are a few units in the last place, which nothing can be moved by less.
    is_coarse = dtype == "float64" and "relative" in budget
    for share, status in ((3, "failed"),) if is_coarse else ((0.9, "passed"), (1.1, "failed")):
        moved = exact.copy()
        moved[at] += sign * share * bound
        directory = write_results(tmp_path, {entry["tensor"]: moved}, "float64", dtype=dtype)
        found = next(x for x in check_golden(golden, directory).cases if x.name == case)
        assert found.status == status
        assert found.worst is not None
        assert found.worst.index == at
        assert found.worst.ratio == pytest.approx(abs(moved[at] - exact[at]) / bound)
        assert (found.worst.expected, found.worst.actual) == (exact[at], moved[at])
        assert set(found.missing) == set(next(x for x in index["cases"] if x["id"] == case)["expected"]) - {result}


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


def test_wrong_ideas_of_alibi_fail_where_they_show(golden: Path, tmp_path: Path, index: Any, tensors: Any) -> None:
    """The mistakes that others made, each in the cases that it touches and no other."""

    def changed(name: str, change: Callable[[dict[str, Any], dict[str, np.ndarray]], None]) -> set[str]:
        found = {}
        for case in of_kind(index, "attention"):
            altered, inputs = json.loads(json.dumps(case)), dict(inputs_of(case, tensors))
            change(altered["arguments"], inputs)
            found |= {f"{case['id']}/output": attend(altered, inputs, "float32")["output"]}
        return set(failed(check_golden(golden, write_results(tmp_path / name, found, "float32"))))

    def using(feature: str) -> set[str]:
        return {case["id"] for case in of_kind(index, "attention") if feature in case["features"]}

    def bias_scaled(known: dict[str, Any], inputs: dict[str, np.ndarray]) -> None:
        inputs["slopes"] = inputs["slopes"] * np.float32(known["scale"])

    def top_left(known: dict[str, Any], inputs: dict[str, np.ndarray]) -> None:
        known["q_offset"] = 0 if known["q_offset"] == known["kv_len"] - known["q_len"] else known["q_offset"]

    everything = {case["id"] for case in of_kind(index, "attention")}
    assert not changed("nothing", lambda known, inputs: None)
    assert changed("no window", lambda known, inputs: known.update(window_size=None)) <= using("window")
    assert "attention/window" in changed("wider", lambda known, inputs: known.update(window_size=3))
    no_mask = changed("no mask", lambda known, inputs: inputs.pop("mask", None))
    assert no_mask == using("mask") - {"attention/everything"} or no_mask == using("mask")
    assert "attention/segments" in changed("no segments", lambda known, inputs: inputs.pop("q_segment_ids", None))
    assert changed("causal only", lambda known, inputs: known.update(is_causal=True)) >= {"attention/symmetric"}
    assert {"attention/fewer_queries", "attention/grouped_lengths"} <= changed("top left", top_left)
    assert {"attention/causal", "attention/long"} <= changed("bias scaled", bias_scaled)
    assert changed("bias scaled again", bias_scaled) < everything


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


def with_header(path: Path, change: Callable[[dict[str, Any]], Any] = lambda header: None, text: str = "") -> None:
    """Change the header of a safetensors file, or what stands in its place."""
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    change(header)
    new = (text or json.dumps(header)).encode()
    path.write_bytes(len(new).to_bytes(8, "little") + new + content[end:])


SLOPES = "slopes/canonical/slopes"
BAD_FILES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "empty": (lambda p: p.write_bytes(b""), "cut off"),
    "seven bytes": (lambda p: p.write_bytes(b"1234567"), "cut off"),
    "truncated data": (lambda p: p.write_bytes(p.read_bytes()[:-1]), "must end within"),
    "truncated header": (lambda p: p.write_bytes(p.read_bytes()[:20]), "cut off"),
    "more data": (lambda p: p.write_bytes(p.read_bytes() + b"\0"), "without gap or overlap"),
    "huge header": (lambda p: p.write_bytes(b"\xff" * 8 + p.read_bytes()[8:]), "cut off"),
    "no JSON": (lambda p: with_header(p, text="{]"), "no valid JSON"),
    "no object": (lambda p: with_header(p, text="[1]"), "JSON object"),
    "deep JSON": (lambda p: with_header(p, text="[" * 100_000), "no valid JSON"),
    "no text": (lambda p: p.write_bytes((2).to_bytes(8, "little") + b"\xff\xff"), "no valid JSON"),
    "twice": (lambda p: with_header(p, text='{"a": 1, "a": 2}'), "stands twice"),
    "NaN": (lambda p: with_header(p, text='{"a": NaN}'), "no number of JSON"),
    "no dtype": (lambda p: with_header(p, lambda h: h[SLOPES].pop("dtype")), "must have dtype"),
    "entry": (lambda p: with_header(p, lambda h: h.update({SLOPES: 3})), "must have dtype"),
    "unknown dtype": (lambda p: with_header(p, lambda h: h[SLOPES].update(dtype="F8_E5M2")), "one of the dtypes"),
    "odd dtype": (lambda p: with_header(p, lambda h: h[SLOPES].update(dtype=["F64"])), "one of the dtypes"),
    "negative shape": (lambda p: with_header(p, lambda h: h[SLOPES].update(shape=[-8256])), "must have a shape"),
    "huge shape": (lambda p: with_header(p, lambda h: h[SLOPES].update(shape=[2**62, 2**62])), "must have a shape"),
    "huge empty": (lambda p: with_header(p, lambda h: h[SLOPES].update(shape=[0, 2**62])), "must have a shape"),
    "true shape": (lambda p: with_header(p, lambda h: h[SLOPES].update(shape=[True, 8256])), "must have a shape"),
    "other size": (lambda p: with_header(p, lambda h: h[SLOPES].update(shape=[8255])), "as many bytes"),
    "far data": (
        lambda p: with_header(p, lambda h: h[SLOPES].update(data_offsets=[2**60, 2**60 + 66048])),
        "must end within",
    ),
    "backward data": (lambda p: with_header(p, lambda h: h[SLOPES].update(data_offsets=[66048, 0])), "data_offsets"),
    "negative data": (lambda p: with_header(p, lambda h: h[SLOPES].update(data_offsets=[-66048, 0])), "data_offsets"),
    "overlap": (lambda p: with_header(p, lambda h: h.update({"x": dict(h[SLOPES])})), "gap or overlap"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_damaged_results_are_refused(golden: Path, tmp_path: Path, little: Any, name: str) -> None:
    spoil, reason = BAD_FILES[name]
    directory = write_results(tmp_path, {SLOPES: little["float64"][SLOPES]}, "float64")
    assert check_golden(golden, directory).passed
    spoil(directory / "results.safetensors")
    with pytest.raises(GoldenError, match=reason) as caught:
        check_golden(golden, directory)
    assert str(caught.value).startswith(str(directory / "results.safetensors"))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"format": "alibi-golden"}, "format must be 'alibi-golden-results'"),
        ({"version": 2}, "version must be"),
        ({"version": True}, "version must be"),
        ({"version": "1"}, "version must be"),
        ({"golden_version": 2}, "golden_version must be 1, got 2"),
        ({"golden_version": None}, "golden_version must be int"),
        ({"program": 7}, "program must be str"),
        ({"dtype": "float8"}, "dtype must be one of"),
        ({"dtype": 32}, "dtype must be str"),
        ({"files": {}}, "files must be list"),
        ({"files": []}, "must offer some result"),
        ({"files": ["results.safetensors"] * 2}, "stands twice"),
        ({"files": ["missing.safetensors"]}, "no such file"),
        ({"files": ["../results.safetensors"]}, "a file name must be"),
        ({"files": ["/etc/passwd"]}, "a file name must be"),
        ({"files": ["..\\results.safetensors"]}, "a file name must be"),
        ({"files": ["C:results.safetensors"]}, "a file name must be"),
        ({"files": ["sub/results.safetensors"]}, "a file name must be"),
        ({"files": ["results.safetensors\0"]}, "a file name must be"),
        ({"files": ["results.safetensors\n"]}, "a file name must be"),
        ({"files": [".."]}, "a file name must be"),
        ({"files": [""]}, "a file name must be"),
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


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"format": 1, "format": 1}', "[" * 100_000, "9" * 10_000])
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


def case_of(index: dict[str, Any], name: str) -> dict[str, Any]:
    return next(case for case in index["cases"] if case["id"] == name)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda i: i.update(format="?"), "format must be 'alibi-golden'"),
        (lambda i: i.update(version=2), "version must be"),
        (lambda i: i.pop("files"), "files must be list"),
        (lambda i: i["files"].append(3), "must be an object"),
        (lambda i: i["files"].append(i["files"][0]), "stands twice"),
        (lambda i: i["files"][-1].update(name="../slopes.safetensors"), "a file name must be"),
        (lambda i: i["files"][-1].update(name="/slopes.safetensors"), "a file name must be"),
        (lambda i: i["files"][-1].update(name="gone.safetensors"), "no such file"),
        (lambda i: i["files"][-1].update(bytes=10**30), "must have 10+ bytes"),
        (lambda i: i["files"][-1].update(bytes="many"), "bytes must be int"),
        (lambda i: i["files"][-1].update(sha256="0" * 64), "SHA-256"),
        (lambda i: i["files"].pop(), "file must be one of"),
        (lambda i: i.update(cases={}), "cases must be list"),
        (lambda i: i["cases"].append("x"), "must be an object"),
        (lambda i: i["cases"].append(i["cases"][0]), "no two cases"),
        (lambda i: i["cases"][0].pop("id"), "id must be str"),
        (lambda i: i["cases"][0].update(file="index.json"), "file must be one of"),
        (lambda i: i["cases"][0]["expected"]["slopes"].update(tensor="?"), "no tensor"),
        (lambda i: i["cases"][0]["expected"]["slopes"].update(shape=[1]), "must have shape"),
        (lambda i: i["cases"][0]["expected"]["slopes"]["budgets"].pop("float16"), "float16 must be dict"),
        (lambda i: i["cases"][0]["expected"]["slopes"]["budgets"]["float16"].update(relative="1"), "relative must be"),
        (lambda i: i["cases"][0]["expected"]["slopes"]["budgets"]["float16"].update(relative=-1.0), "not negative"),
        (lambda i: case_of(i, "bias/causal")["inputs"]["slopes"].pop("tensor"), "tensor must be str"),
    ],
)
def test_a_bad_index_is_refused(golden: Path, tmp_path: Path, change: Any, reason: str) -> None:
    directory = tmp_path / "vectors"
    shutil.copytree(golden, directory)
    edit(directory / "index.json", change)
    with pytest.raises(GoldenError, match=reason) as caught:
        check_golden(directory, tmp_path)
    assert str(directory) in str(caught.value)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
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
    with pytest.raises(GoldenError, match=reason):
        check_golden(directory, tmp_path)


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

    def slopes(self, num_heads: int) -> np.ndarray:
        return alibi_core.slopes(num_heads, dtype=np.float64)

    def bias(self, num_heads: int, q_len: int, kv_len: int, is_causal: bool) -> np.ndarray:
        return alibi_core.bias(num_heads, q_len, kv_len, is_causal=is_causal, dtype=np.float64)

    def attention(self, query, key, value, slopes, is_causal, q_offset, future_slopes=None, window_size=None,
                  segment_ids=None, mask=None, scale=None):  # fmt: skip
        options = {"future_slopes": future_slopes, "window_size": window_size, "segment_ids": segment_ids}
        options |= {"mask": mask, "scale": scale, "is_causal": is_causal, "q_offset": q_offset}
        return alibi_core.attention(query, key, value, slopes, **options)

    def decode_step(self, query, key, value, slopes, cache):
        if cache is not None:
            key, value = (np.concatenate([old, new], axis=2) for old, new in zip(cache, (key, value), strict=True))
        return alibi_core.attention(query, key, value, slopes), (key, value)


class Declared(Reference):
    dtype = "float32"
    features = ("lengths", "offset", "batch_offsets", "far", "symmetric", "asymmetric", "grouped", "window",
                "segments", "mask", "batch_slopes", "scale", "nowhere", "empty")  # fmt: skip

    def slopes(self, num_heads: int) -> np.ndarray:
        return alibi_core.slopes(num_heads)

    def bias(self, num_heads: int, q_len: int, kv_len: int, is_causal: bool) -> np.ndarray:
        return alibi_core.bias(num_heads, q_len, kv_len, is_causal=is_causal)


class Own:
    """One that has its slopes, is causal, and does no more."""

    def attention(self, query: np.ndarray, key: np.ndarray, value: np.ndarray) -> np.ndarray:
        if query.shape != key.shape:
            raise NotImplementedError("as many queries as keys, please")
        return alibi_core.attention(query, key, value)


def statuses(report: GoldenReport) -> dict[str, str]:
    return {case.name: case.status for case in report.cases}


def test_an_adapter_that_declares_all_passes_all(golden: Path, tmp_path: Path) -> None:
    report = check_golden(golden, golden_results(Declared(), golden, tmp_path / "results"))
    assert report.passed, str(report)
    assert (report.program, report.dtype) == ("Declared", "float32")
    attention = {name: status for name, status in statuses(report).items() if name.startswith(("attention", "decode"))}
    assert set(attention.values()) == {"passed"}
    missing = {name for case in report.cases if case.name.startswith("attention") for name in case.missing}
    assert missing == {f"gradient/{name}" for name in ("query", "key", "value", "slopes", "future_slopes")}


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
    class Wrong(Declared):
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


@pytest.mark.parametrize(
    "change",
    [
        lambda i: case_of(i, "slopes/canonical")["arguments"].update(most_heads=10**9),
        lambda i: case_of(i, "slopes/canonical")["arguments"].pop("most_heads"),
        lambda i: case_of(i, "bias/causal")["arguments"].update(num_heads="eight"),
        lambda i: case_of(i, "attention/causal")["arguments"].update(num_kv_heads=0),
        lambda i: case_of(i, "attention/causal")["inputs"].pop("key"),
        lambda i: case_of(i, "decode/long")["arguments"].update(steps=None),
    ],
)
def test_an_index_that_asks_for_nonsense_is_refused(golden: Path, tmp_path: Path, change: Any) -> None:
    shutil.copytree(golden, tmp_path / "vectors")
    edit(tmp_path / "vectors" / "index.json", change)
    with pytest.raises(GoldenError, match="is not as its kind must be"):
        golden_results(Declared(), tmp_path / "vectors", tmp_path / "results")


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
