"""Golden vectors: files with inputs, exact results and error budgets, for tests of programs in any language."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import alibi_core
from alibi_core._arrays import checks
from alibi_core._safetensors import FLOATING, NAMES, StoredTensor, content_of, tensors_in
from alibi_core._slopes import slope_values
from alibi_core.conformance.caller import MASKED
from alibi_core.conformance.case import FAR, PER_BATCH, Case, Sizes
from alibi_core.conformance.oracle import SMALLEST, U32, UNIT_ROUNDOFF, Answer, excess
from alibi_core.conformance.reference import TENSORS, Values
from alibi_core.conformance.report import Counterexample, LawReport, Report

FORMAT, VERSION = "alibi-golden", 5
INDEX, ABOUT = "index.json", "FORMAT.md"
DTYPES = tuple(UNIT_ROUNDOFF)
MOST_HEADS = 128

SQUARE, FEWER, GROUPED = Sizes(2, 3, 1, (7, 7), 5), Sizes(1, 3, 1, (5, 11), 3), Sizes(2, 2, 2, (7, 7), 3)
EIGHT = Sizes(1, 8, 1, (9, 9), 4)
# fmt: off
ATTENTION = {
    "causal": Case(SQUARE), "one_token": Case(Sizes(1, 1, 1, (1, 1), 1)),
    "eight_heads": Case(EIGHT), "twelve_heads": Case(Sizes(1, 12, 1, (6, 6), 2)),
    "grouped": Case(GROUPED), "multi_query": Case(Sizes(2, 1, 4, (7, 7), 3)),
    "grouped_lengths": Case(Sizes(1, 2, 3, (5, 11), 3)), "fewer_queries": Case(FEWER),
    "single_query": Case(Sizes(2, 2, 2, (1, 13), 4)), "more_queries": Case(Sizes(1, 2, 1, (11, 5), 3)),
    "offset": Case(FEWER, q_offset=4), "offset_before": Case(FEWER, q_offset=-3),
    "offset_after": Case(FEWER, q_offset=13), "offset_far": Case(FEWER, q_offset=FAR),
    "offset_per_batch": Case(Sizes(3, 2, 1, (5, 7), 3), q_offset=PER_BATCH),
    "symmetric": Case(SQUARE, "symmetric"), "symmetric_offset": Case(FEWER, "symmetric", q_offset=3),
    "asymmetric": Case(SQUARE, "asymmetric", seed=1), "clamped": Case(SQUARE, "clamped"),
    "window": Case(SQUARE, window_size=2), "window_of_none": Case(SQUARE, window_size=0),
    "window_symmetric": Case(SQUARE, "symmetric", window_size=3),
    "segments": Case(Sizes(2, 2, 1, (12, 12), 3), packing="same"),
    "segments_symmetric": Case(SQUARE, "symmetric", packing="same"), "segments_lengths": Case(FEWER, packing="pair"),
    "mask": Case(SQUARE, masking="by query"), "mask_by_head": Case(SQUARE, masking="by head"),
    "padding": Case(SQUARE, "symmetric", masking="padding"),
    "slopes_per_batch": Case(SQUARE, slopes_per_batch=True, seed=2), "scale": Case(SQUARE, scaling=0.375),
    "no_slopes": Case(SQUARE), "steep": Case(SQUARE),
    "no_keys": Case(Sizes(1, 2, 1, (3, 0), 3)), "no_queries": Case(Sizes(1, 2, 1, (0, 3), 3)),
    "long": Case(Sizes(1, 3, 1, (6, 257), 8)), "long_square": Case(Sizes(1, 2, 1, (100, 100), 4)),
    "long_grouped": Case(Sizes(1, 1, 3, (4, 300), 5)), "long_window": Case(Sizes(1, 2, 1, (4, 260), 4), window_size=64),
    "positions": Case(FEWER, points=("line", "manhattan", "linear")),
    "law": Case(FEWER, "asymmetric", points=("indices", "manhattan", "log"), seed=1),
    "times": Case(SQUARE, points=("times", "manhattan", "sqrt")),
    "times_asymmetric": Case(SQUARE, "asymmetric", points=("times", "manhattan", "log"), seed=1),
    "grid": Case(GROUPED, "symmetric", points=("grid", "manhattan", "linear")),
    "grid_euclidean": Case(SQUARE, "symmetric", masking="by query", points=("grid", "euclidean", "linear")),
    "space": Case(FEWER, "symmetric", points=("space", "chebyshev", "log")),
    "class_token": Case(SQUARE, "symmetric", points=("class token", "euclidean", "sqrt")),
    "class_token_segments": Case(FEWER, "symmetric", packing="pair", points=("class token", "manhattan", "linear")),
    "gates": Case(GROUPED, gates="strong"), "gates_large": Case(Sizes(1, 2, 1, (6, 130), 4), gates="large"),
    "gates_closed": Case(FEWER, packing="pair", masking="by key", gates="closed"),
    "everything": Case(Sizes(2, 2, 2, (7, 11), 3), "asymmetric", PER_BATCH, 6, "pair", "by head", True, 3, scaling=0.5),
}
# Slopes of cases that have neither the canonical ones nor their own for each batch entry.
SLOPES: dict[str, tuple[float, ...]] = {
    "no_slopes": (0.5, 0.0625, 0.0), "steep": (8.0, 64.0, 4.0), "long_square": (0.25, 2.0**-7),
    "long_grouped": (0.5, 0.0625, 0.0), "gates_closed": (0.0,), "gates_large": (0.0, 0.0625),
    "offset_far": (2.0**-5, 2.0**-8, 2.0**-6),  # their bias fits float16 at a million tokens
}
BIASES = (
    "causal", "eight_heads", "twelve_heads", "fewer_queries", "more_queries", "offset", "offset_before", "offset_far",
    "offset_per_batch", "symmetric", "symmetric_offset", "asymmetric", "clamped", "window", "window_symmetric",
    "segments", "slopes_per_batch", "long",
)
# The lengths of the steps: a prompt first, or none, then mostly single tokens.
DECODES = {
    "eight_heads": (Case(EIGHT), [5, 1, 1, 1, 1]), "grouped": (Case(GROUPED), [3, 1, 2, 1]),
    "from_nothing": (Case(Sizes(2, 3, 1, (6, 6), 3)), [1] * 6),
    "long": (Case(Sizes(1, 2, 2, (124, 124), 3)), [120, 1, 1, 1, 1]),
}
# fmt: on
# By case: scheme, contract, and the error budget of slopes in units of roundoff. The power may be off by about one unit
# in the last place, and its storage by another. Exponents that are not dyadic are rounded first, which costs their size
# times ln 2: at most 5.55. A linear slope is a sum of two rounded numbers, one of them a product of two.
RULES = {
    "canonical": ("canonical", "exact", 4),
    "geometric": ("geometric", "exact", 10),
    "linear": ("linear", "exact", 6),
    "bloom": ("canonical", "bloom", 4),
    "falcon": ("canonical", "falcon", 4),
    "mpt": ("canonical", "mpt", 4),
}
KEY_ONLY = {"bloom": (12, 40), "falcon": (8, 300), "mpt": (12, 40)}  # number of heads and keys, by contract


class GoldenError(ValueError):
    """Golden vectors or results are unusable; the message names the file and the reason.

    Example:
        >>> from alibi_core.conformance import check_golden
        >>> try:
        ...     check_golden("nowhere", "results.safetensors")
        ... except GoldenError as error:
        ...     print(error)
        nowhere/index.json: No such file or directory
    """


# --- Written ----------------------------------------------------------------------------------------------------------

# A case to write: its entry in the index, its inputs, and its results. Each result has budgets by dtype: an array, or a
# relative and an absolute budget.
Result = tuple[Values, dict[str, Any]]
Entry = tuple[dict[str, Any], dict[str, Values], dict[str, Result]]


def write_golden(directory: str | Path) -> Path:
    """Write golden vectors: slopes, biases, attention with gradients, decoding, and the error budgets of each.

    ``FORMAT.md`` among the files documents them.

    Args:
        directory: Path of the directory to write. An existing directory must be empty or hold golden vectors, which are
            replaced.

    Returns:
        The directory.

    Raises:
        GoldenError: If the directory holds anything else.

    Example:
        Writing takes seconds, and replaces only golden vectors:

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = Path(folder, "notes.txt").write_text("mine")
        ...     try:
        ...         write_golden(folder)
        ...     except GoldenError as error:
        ...         print(str(error).removeprefix(f"{folder}: "))
        must be empty or hold golden vectors, but has no index.json
    """
    directory = Path(directory)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        if not (directory / INDEX).is_file():
            raise GoldenError(f"{directory}: must be empty or hold golden vectors, but has no {INDEX}")
        _read_index(directory / INDEX, range(1, VERSION + 1))
    about = Path(__file__).with_name(ABOUT).read_text(encoding="utf-8")
    tensors: dict[str, dict[str, Values]] = {}
    lines = [_line(*entry, tensors.setdefault(entry[0]["file"], {})) for entry in _entries()]
    files = {ABOUT: about.encode()} | {name: content_of(found, {"format": FORMAT}) for name, found in tensors.items()}
    index = {
        "format": FORMAT,
        "version": VERSION,
        "about": about.splitlines(),
        "files": [
            {"name": name, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            for name, content in sorted(files.items())
        ],
        "cases": lines,
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / INDEX).unlink(missing_ok=True)  # written last: an incomplete set has no index
    for name, content in files.items():
        (directory / name).write_bytes(content)
    text = json.dumps(index, sort_keys=True, indent=1, allow_nan=False) + "\n"
    (directory / INDEX).write_text(text, encoding="utf-8")
    return directory


def _line(
    about: dict[str, Any], inputs: dict[str, Values], results: dict[str, Result], tensors: dict[str, Values]
) -> dict[str, Any]:
    """Return the entry of a case in the index, and add its tensors to ``tensors``, those of its file."""

    def stored(name: str, array: Values) -> dict[str, Any]:
        tensors[f"{about['id']}/{name}"] = array
        return {"tensor": f"{about['id']}/{name}", "shape": list(array.shape)}

    def budget(name: str, found: Any) -> dict[str, Any]:
        if isinstance(found, tuple):
            return {"relative": found[0], "absolute": found[1]}
        return {"tensor": stored(name, found)["tensor"]}

    expected = {
        name: stored(name, x) | {"budgets": {dtype: budget(f"budget/{dtype}/{name}", y) for dtype, y in by.items()}}
        for name, (x, by) in results.items()
    }
    given = {name: stored(f"input/{name}", x) | {"dtype": NAMES[x.dtype]} for name, x in inputs.items()}
    return about | {"inputs": given, "expected": expected}


def _entries() -> Iterator[Entry]:
    for name, (scheme, contract, units) in RULES.items():
        rows = [slope_values(n, scheme=scheme, contract=contract) for n in range(1, MOST_HEADS + 1)]
        about = {
            "id": f"slopes/{name}",
            "kind": "slopes",
            "file": "slopes.safetensors",
            "description": f"the slopes of 1, 2, ... {MOST_HEADS} heads, one after the other: those of n heads are "
            "elements n (n - 1) / 2 up to, not including, n (n + 1) / 2",
            "features": [],
            "default_slopes": name == "canonical",
            "arguments": {"scheme": scheme, "contract": contract, "most_heads": MOST_HEADS},
        }
        is_exact = contract in ("exact", "geometric")  # the other contracts are defined in float32
        yield about, {}, {"slopes": (np.concatenate(rows), _relative(units, is_exact=is_exact))}
    for contract, (num_heads, kv_len) in KEY_ONLY.items():
        slopes = slope_values(num_heads, contract=contract)
        case = _exact_in_all_dtypes(contract, Case(Sizes(1, num_heads, 1, (5, kv_len), 1)), slopes)
        about = _about("bias", contract, case, contract=contract) | {"default_slopes": True}
        # The core's own numbers: contracts are defined by their rounding.
        bias = alibi_core.bias(num_heads, 5, kv_len, contract=contract)[None].astype(np.float64)
        yield about, _options(case), {"bias": (bias, _relative(RULES[contract][2] + 1, is_exact=False))}
    cases: list[tuple[str, str, Case, dict[str, Any]]] = [
        *(("bias", name, ATTENTION[name], {"contract": "exact"}) for name in BIASES),
        *(("attention", name, case, {}) for name, case in ATTENTION.items()),
        *(("decode", name, case, {"steps": steps}) for name, (case, steps) in DECODES.items()),
    ]
    for kind, name, case, further in cases:
        case = _exact_in_all_dtypes(name, case, SLOPES.get(name, slope_values(case.num_heads)))
        about, options = _about(kind, name, case, **further), _options(case)
        if kind == "bias":
            yield about, options, {"bias": (case.exact("float64").bias + 0.0, _relative(1))}
            continue
        inputs, results = {x: case.arrays[x] for x in TENSORS} | options, _results(case, about)
        if kind == "attention":
            yield about, inputs | {"grad_output": case.arrays["cotangent"]}, results
        else:
            yield about, inputs, {"output": results["output"]}


def _relative(units: float, *, is_exact: bool = True) -> dict[str, Any]:
    """Return (relative, absolute) budgets by dtype: for computing in float32 (or float64), and for storage."""
    found = {}
    for dtype, unit in UNIT_ROUNDOFF.items():
        storage = unit if dtype in ("float16", "bfloat16") else 0.0
        found[dtype] = (units * (unit if dtype == "float64" and is_exact else U32) + storage, SMALLEST[dtype])
    return found


def _exact_in_all_dtypes(name: str, case: Case, slopes: Sequence[float]) -> Case:
    """Return a case with these slopes and with tensors exact in all dtypes: multiples of 1/8 of at most 7 bits."""
    drawn = Case(case.sizes, seed=zlib.crc32(name.encode()) + case.seed).arrays
    arrays = {x: np.clip(np.round(drawn[x] * 8), -127, 127) / 8 for x in (*TENSORS, "cotangent")}
    if not case.slopes_per_batch:
        arrays["slopes"] = np.resize(np.asarray(slopes, np.float32), case.num_heads).astype(np.float64)
    return case.with_arrays(**arrays)


def _options(case: Case) -> dict[str, Values]:
    """Return the arguments of a case that are arrays, slopes included."""
    options = {"slopes": case.arrays["slopes"].astype(np.float32)}
    options |= {
        name: x
        for name, x in case.arguments.items()
        if name in ("future_slopes", "mask", "q_offset", "log_gates") and isinstance(x, np.ndarray)
    }
    if "segment_ids" in case.arguments:
        options["q_segment_ids"], options["kv_segment_ids"] = case.segment_ids
    if "positions" in case.arguments:
        options["q_positions"], options["kv_positions"] = case.arguments["positions"]
    return options


def _about(kind: str, name: str, case: Case, **further: Any) -> dict[str, Any]:
    """Return the entry of a case in the index, without its tensors."""
    given, size, (q_len, kv_len) = case.arguments, case.sizes, case.sizes.lengths
    offset = given.get("q_offset", kv_len - q_len)
    is_array = isinstance(offset, np.ndarray)
    bias = case.exact("float64").bias
    features = set(case.features)
    # A bias needs no rule for fully masked queries: its row is -inf.
    if kind != "bias" and bias.size > 0 and not np.isfinite(bias).any(axis=-1).all():
        features |= {"nowhere"}
    arguments = {
        "is_causal": case.form == "causal",
        "q_offset": None if is_array or "positions" in given else offset,
        "window_size": given.get("window_size"),
        **{"distance": given.get("distance"), "law": given.get("law", "linear")},
        **{"batch": size.batch, "num_heads": case.num_heads, "q_len": q_len, "kv_len": kv_len},
    }
    if kind != "bias":
        arguments |= {"num_kv_heads": size.num_kv_heads, "head_dim": size.head_dim, "scale": case.scale}
    return {
        "id": f"{kind}/{name}",
        "kind": kind,
        "description": str(case).rpartition(", seed")[0],
        "features": sorted(features),
        "default_slopes": case.arrays["slopes"].tolist() == slope_values(case.num_heads),
        "arguments": arguments | further,
        "file": f"{kind}.safetensors",
    }


def _results(case: Case, about: dict[str, Any]) -> dict[str, Result]:
    """Return the output and the gradients of a case, with their budgets."""
    by_dtype: dict[str, dict[str, Answer]] = {}
    for dtype in DTYPES:
        problem = case.exact(dtype, counted_from_anywhere="far" not in about["features"])
        gradients = case.gradients(dtype, problem=problem)
        by_dtype[dtype] = {"output": problem.output} | {f"gradient/{name}": x for name, x in gradients.items()}
    exact = by_dtype["float64"]
    return {name: (x.value, {y: by_dtype[y][name].budget for y in DTYPES}) for name, x in exact.items()}


# --- Checked ----------------------------------------------------------------------------------------------------------


def check_golden(directory: str | Path, results: str | Path, *, dtype: str = "float32") -> Report:
    """Compare the results of a program with golden vectors.

    A missing result is reported as not offered and fails nothing. An infinite or NaN element where a finite one is
    expected fails its case.

    Args:
        directory: Directory of golden vectors, from :func:`write_golden`.
        results: A safetensors file of results, named as those in the golden vectors.
        dtype: Dtype of the computation, which decides the error budgets.

    Returns:
        A report on every case, in place of a law.

    Raises:
        GoldenError: If either is unusable: a file is missing, damaged, or of another format or version; a result has no
            golden counterpart, or another shape; there are no results.

    Example:
        >>> try:
        ...     check_golden("nowhere", "results.safetensors")
        ... except GoldenError as error:
        ...     print(error)
        nowhere/index.json: No such file or directory
    """
    directory, results = Path(directory), Path(results)
    checks.one_of("dtype", dtype, DTYPES)
    index = _read_index(directory / INDEX, (VERSION,))
    golden: dict[str, StoredTensor] = {}
    for entry in index["files"]:
        if entry["name"] != ABOUT:
            golden |= _stored(directory / entry["name"], entry["sha256"])
    known = {x["tensor"] for case in index["cases"] for x in case["expected"].values()}
    offered = _stored(results)
    for name, tensor in offered.items():
        if name not in known:
            raise GoldenError(f"{results}: {name!r} must be a result of the golden vectors, such as {min(known)!r}")
        if tensor.dtype not in FLOATING or tensor.shape != golden[name].shape:
            rule = f"must have shape {golden[name].shape} and one of the dtypes {', '.join(FLOATING)}"
            raise GoldenError(f"{results}: {name!r} {rule}, got {tensor.shape} and {tensor.dtype}")
    if not offered:
        raise GoldenError(f"{results}: must have some result, got none")
    judged = (_judged(case, golden, offered, dtype) for case in index["cases"])
    return Report(results.stem, dtype, "exact", (), f"golden vectors {VERSION}", 0, tuple(judged))


def _judged(
    case: dict[str, Any], golden: dict[str, StoredTensor], offered: dict[str, StoredTensor], dtype: str
) -> LawReport:
    """Return the report on a case, with the element that is farthest off."""
    found = [x for x in case["expected"].values() if x["tensor"] in offered]
    missing = ", ".join(name for name, x in case["expected"].items() if x["tensor"] not in offered)
    reason = f"there is no {missing}" if missing else ""
    report = LawReport(case["id"], case["description"], "passed" if found else "not offered", reason)
    for result in found:
        expected, actual = (x[result["tensor"]].read().astype(np.float64) for x in (golden, offered))
        limits = result["budgets"][dtype]
        if "tensor" in limits:
            budget = golden[limits["tensor"]].read()
        else:
            budget = np.abs(np.where(np.isfinite(expected), expected, 0)) * limits["relative"] + limits["absolute"]
        # Very low numbers count as -inf where -inf is expected.
        actual = np.where(np.isneginf(expected) & (actual <= MASKED), -np.inf, actual)
        share = float(excess(actual, Answer(expected, budget)).max(initial=0))
        if share > report.share:
            worst = Counterexample.worst(case["kind"], result["tensor"], actual, Answer(expected, budget))
            report = replace(report, status="failed" if share > 1 else "passed", share=share, counterexample=worst)
    return report


def _content(path: Path) -> bytes:
    """Return the content of a file."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise GoldenError(f"{path}: {error.strerror}") from None


def _read_index(path: Path, versions: Iterable[Any]) -> dict[str, Any]:
    """Return the index of golden vectors, having checked its format and version."""
    try:
        content = json.loads(_content(path))
    except (RecursionError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise GoldenError(f"{path}: is no valid JSON, {type(error).__name__}") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT or content.get("version") not in versions:
        raise GoldenError(f"{path}: must have the format {FORMAT!r}, and one of the versions {list(versions)}")
    return content


def _stored(path: Path, sha256: str | None = None) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file, by name, having checked its hash."""
    if sha256 not in (None, hashlib.sha256(_content(path)).hexdigest()):
        raise GoldenError(f"{path}: must have the SHA-256 {sha256}")
    try:
        return tensors_in(path)
    except ValueError as error:
        raise GoldenError(str(error)) from None
