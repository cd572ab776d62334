"""The command ``alibi-core``: tables that need the core alone, reports of the kit, errors that tell the fix."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import alibi_core
from alibi_core.backend.checks import install_hint
from tests.contracts.test_decoders import MODELS, tensors_of
from tests.support.checkpoints import write
from tests.support.cli import main

ROOT = Path(__file__).parents[2]

# --- Tables ----------------------------------------------------------------------------------------------------------

ALONE = """
import runpy
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name in ("hypothesis", "jax", "matplotlib", "mlx", "pytest", "rich", "safetensors", "torch", "tqdm"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
runpy.run_module("alibi_core", run_name="__main__")
"""


def alone(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command where NumPy and array-api-compat alone are installed."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "backends")))}
    command = [sys.executable, "-c", ALONE, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


@pytest.mark.parametrize(
    ("line", "printed"),
    [
        ("--help", "print slopes and horizons"),
        ("conformance --help", "PACKAGE.MODULE:NAME"),
        ("conformance alibi_core --law slopes", "yes"),
        ("golden write {folder}", "golden vectors in"),
        ("--version", alibi_core.__version__),
        ("slopes 12", "0.088388346"),
        ("explain 64", "at 64"),
    ],
)
def test_commands_need_the_core_alone(line: str, printed: str, tmp_path: Path) -> None:
    result = alone(*line.format(folder=tmp_path).split())
    assert (result.returncode, result.stderr.partition("checking ")[0]) == (0, "")
    assert printed in result.stdout


def table(capsys: Any) -> list[list[str]]:
    """Return the cells of what was printed, a line a head, without the header."""
    lines = capsys.readouterr().out.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("head")) + 1
    return [line.replace(",", "").split() for line in lines[first : lines.index("", first)]]


@pytest.mark.parametrize(
    ("line", "rule", "score_range"),
    [
        ("slopes 12", {}, 16.0),
        ("slopes 12 --scheme geometric --bias-max 4", {"scheme": "geometric", "bias_max": 4.0}, 16.0),
        ("slopes 12 --scheme linear --score-range 3.5", {"scheme": "linear"}, 3.5),
    ],
)
def test_slopes_are_the_cores(line: str, rule: dict[str, Any], score_range: float, capsys: Any) -> None:
    assert main(line.split()) == 0
    slopes = alibi_core.slopes(12, **rule)
    heads, printed, horizons = zip(*table(capsys), strict=True)
    assert heads == tuple(map(str, range(12)))
    assert np.array_equal(np.float32(printed), slopes)
    assert np.array_equal(np.float32(horizons), alibi_core.horizon(slopes, score_range))


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("window_size", [None, 0, 7, 10**12])
@pytest.mark.parametrize("length", [53, 1])
def test_explain_counts_scores(length: int, window_size: int | None, is_causal: bool, capsys: Any) -> None:
    line = f"explain {length} --num-heads 3 --tolerance 0.1 --bias-max 2 --score-range 1"
    line += "" if is_causal else " --no-causal"
    line += "" if window_size is None else f" --window-size {window_size}"
    assert main(line.split()) == 0
    *rows, everything = table(capsys)
    back = np.arange(length)[:, None] - np.arange(length)
    visible = np.ones_like(back, dtype=bool) if window_size is None else np.abs(back) <= window_size
    visible &= (back >= 0) | (not is_causal)
    horizons = alibi_core.horizon(alibi_core.slopes(3, bias_max=2.0), 1.0, tolerance=0.1, is_causal=is_causal)
    shares = [(visible & (np.abs(back) < max(horizon, 1))).sum() / visible.sum() for horizon in horizons]
    assert [row[3] for row in rows] == [f"{share:.1%}" for share in shares]
    assert everything == ["all", f"{np.mean(shares):.1%}"]


@pytest.mark.parametrize("option", ["--score-range=1e38", "--bias-max=1e308"])
def test_horizons_beyond_all_numbers_are_endless(option: str, capsys: Any) -> None:
    assert main(["slopes", "2", option]) == 0
    assert [row[2] for row in table(capsys)] == ["all", "all"]


def write_baichuan(directory: Path) -> Path:
    """Write a checkpoint with nothing in it but names and shapes."""
    config = {name: x for name, x in MODELS["baichuan"]["config"].items() if name != "model_max_length"}
    return write(directory, config, {name: np.zeros(x.shape, np.float16) for name, x in tensors_of("baichuan").items()})


def test_explain_says_what_the_heads_of_a_checkpoint_look_at(tmp_path: Path, capsys: Any) -> None:
    pytest.importorskip("torch")
    (tmp_path / "text").write_text("3 1 4\n1 5 9 2 6")
    assert main(["explain", str(write_baichuan(tmp_path)), "--tokens", str(tmp_path / "text")]) == 0
    said = capsys.readouterr().out
    assert "layer: median distance (share on the first token) of each head\n0: 1 (" in said
    assert "heads that see only the first token, as layer.head: none" in said
    assert main(["explain", str(tmp_path), "--tokens", "nowhere"]) == 2


@pytest.mark.parametrize("text", ["3 x", "3 -1", "3 1.0", "3 99999999999999999999", "3 \u0663", "3", ""])
def test_tokens_that_a_checkpoint_does_not_read_are_named(text: str, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "text").write_text(text, encoding="utf-8")
    assert main(["explain", str(write_baichuan(tmp_path)), "--tokens", str(tmp_path / "text")]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("alibi-core: --tokens must name a file of at least two token ids below ")
    assert printed.err.endswith(f" in {tmp_path / 'text'}\n")


def test_what_the_heads_look_at_needs_pytorch(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("3 1 4")
    result = alone("explain", str(write_baichuan(tmp_path)), "--tokens", str(tmp_path / "text"))
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == f"alibi-core: alibi_torch needs PyTorch; {install_hint('torch')}\n"


@pytest.mark.parametrize(
    "option", ["--num-heads 5", "--window-size 3", "--causal", "--no-causal", "--scheme linear", "--bias-max 4"]
)
def test_options_that_a_checkpoint_answers_are_refused_with_one(option: str, tmp_path: Path, capsys: Any) -> None:
    assert main(["explain", str(write_baichuan(tmp_path)), *option.split()]) == 2
    name = option.split()[0].replace("--no-", "--")
    assert capsys.readouterr().err == (
        f"alibi-core: {name} must come with LENGTH, since a checkpoint has its own, got {tmp_path}\n"
    )


def test_a_checkpoint_is_explained_by_the_core_alone(tmp_path: Path) -> None:
    result = alone("explain", str(write_baichuan(tmp_path)))
    assert (result.returncode, result.stderr) == (0, "")
    facts, rows = result.stdout.split("\n\n")[:2]
    assert "baichuan, 38,352 parameters in float16" in facts
    assert "6 of 8 features, causal" in facts
    assert "canonical, from 0.5 to 0.003906" in facts
    assert "slopes times positions, in the model's dtype" in facts
    found = [row.split() for row in rows.splitlines()[1:]]
    horizons = alibi_core.horizon(alibi_core.slopes(6), 2 * 8**0.5)
    assert [row[2] for row in found[:6]] == [f"{horizon:,.0f}" for horizon in horizons]
    needed = [np.minimum(np.arange(8192) + 1, horizon // 1).sum() / (8192 * 8193 / 2) for horizon in horizons]
    assert [row[4] for row in found[:6]] == [f"{share:.1%}" for share in needed]
    assert found[6][2] == f"{np.mean(needed):.1%}"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("explain ", "directory with a checkpoint, got ''"),
        ("explain nowhere", "directory with a checkpoint, got 'nowhere'"),
        ("explain 1.5", "LENGTH|DIR must be a whole number of tokens or a local directory with"),
        ("slopes 0", "num_heads must be at least 1, got 0"),
        ("slopes -3", "num_heads must be at least 1, got -3"),
        ("slopes 10000000", "num_heads must be at most 1048576, got 10000000"),
        ("slopes 4 --scheme x", "scheme must be one of 'canonical', 'geometric', 'linear', got 'x'"),
        ("slopes 4 --bias-max 0", "bias_max must be positive, got 0.0"),
        ("slopes 4 --score-range nan", "--score-range must be finite, got nan"),
        ("explain -8", "LENGTH must be at least 1, got -8"),
        ("explain 2147483647", "lengths must stay within 2147483647 tokens"),
        ("explain 8 --tokens text", "--tokens must come with DIR, a checkpoint that reads them, got LENGTH 8"),
        ("explain ²", "directory with a checkpoint, got '²'"),
        ("explain 8 --num-heads 0", "num_heads must be at least 1, got 0"),
        ("explain 8 --window-size -1", "window_size must not be negative, got -1"),
        ("explain 8 --tolerance -1", "--tolerance must be in [0, 1), got -1.0"),
        ("slopes 8 --tolerance 1", "--tolerance must be in [0, 1), got 1.0"),
    ],
)
def test_bad_arguments_are_refused_with_the_rule(line: str, message: str, capsys: Any) -> None:
    assert main(line.split(" ")) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("alibi-core: ")
    assert message in printed.err


@pytest.mark.parametrize("config", [{}, {"alibi_slopes": [0.5, 0.1] * 3, "alibi_future_slopes": [0.03] * 6}], ids=str)
def test_an_encoder_has_horizons_on_both_sides(config: dict[str, Any], tmp_path: Path, capsys: Any) -> None:
    pytest.importorskip("safetensors")
    record = json.loads((Path(__file__).parents[1] / "support" / "encoders" / "jina-plain.json").read_text())
    tensors = {name: np.zeros(shape, np.float32) for name, shape in record["shapes"].items()}
    assert main(["explain", str(write(tmp_path, record["config"] | config, tensors))]) == 0
    facts, rows = capsys.readouterr().out.split("\n\n")[:2]
    past = np.asarray(config.get("alibi_slopes", alibi_core.slopes(6)), np.float32)
    future = np.asarray(config.get("alibi_future_slopes", past), np.float32)
    assert ("asymmetric" in facts, "slopes  of its config, from 0.5 to 0.1" in facts) == (bool(config), bool(config))
    ahead = np.arange(2048) - np.arange(2048)[:, None]
    for row, slopes in zip(rows.splitlines()[1:7], zip(past, future, strict=True), strict=True):
        # Half of what may be left out is left out on either side.
        back, on = alibi_core.horizon(np.asarray(slopes), 2 * (24 / 6) ** 0.5, is_causal=False)
        share = ((-back < ahead) & (ahead < on)).mean()
        assert f"{back:,.0f}" in row.split()
        assert f"{on:,.0f}" in row.split()
        assert row.split()[-3] == f"{share:.1%}"


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "config.json").mkdir()
    assert main(["explain", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("alibi-core: [Errno 21] Is a directory: ")


@pytest.mark.parametrize("line", ["", "slopes", "slopes twelve", "slope 12", "explain 8 --num"])
def test_what_is_no_command_line_prints_the_usage(line: str, capsys: Any) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(line.split())
    assert "usage: alibi-core" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("unbuffered", "line"),
    [
        ("", "slopes 3"),  # written at the end
        ("", "slopes 9000"),  # written when a buffer is full
        ("1", "conformance --adapter tests.conformance.test_kit:Right --law causal_bias"),
    ],
)
def test_a_reader_that_leaves_is_no_error(unbuffered: str, line: str) -> None:
    read, write = os.pipe()
    os.close(read)
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    command = [sys.executable, "-m", "alibi_core", *line.split()]
    result = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment)
    os.close(write)
    printed = [line for line in result.stderr.splitlines() if not line.startswith("checking ")]
    assert (result.returncode, printed) == (141, [])


def test_closed_standard_output_is_no_error() -> None:
    command = f"exec '{sys.executable}' -m alibi_core slopes 3 >&-"
    result = subprocess.run(command, shell=True, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert (result.returncode, result.stderr) == (0, "")


# --- The conformance kit ---------------------------------------------------------------------------------------------

ADAPTERS = """
import os
import time
import numpy as np
from tests.conformance.test_kit import Right, signed


class Signed:
    attention = staticmethod(signed)


class Bad(Right):
    def __init__(self, name, act):
        self.name, self.act = name, act

    def attention(self, query, key, value, slopes, is_causal, q_offset):
        if query.shape[1] == 6:
            print(f"{self.name} next")
            self.act()
        return super().attention(query, key, value, slopes, is_causal, q_offset)


def several():
    dies, leaves = Bad("dies", os.abort), Bad("[/red] leaves", lambda: os._exit(0))
    return [dies, leaves, Bad("hangs", lambda: time.sleep(60)), Right()]


def leaves():
    raise SystemExit(0)


def named():
    return Bad("caf\u00e9", list)


not_one = 3
"""


@pytest.fixture
def adapters(tmp_path: Path, monkeypatch: Any) -> Path:
    (tmp_path / "my_adapters.py").write_text(ADAPTERS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    return tmp_path


def test_the_command_prints_a_table_and_writes_json(adapters: Path, capsys: Any) -> None:
    right = "--adapter tests.conformance.test_kit:Right"
    line = f"conformance --adapter my_adapters:Signed {right} --json report.json --law symmetric"
    assert main(line.split()) == 1
    order = ["is ALiBi", "diagnosis: Future keys are rewarded", "failed      symmetric"]
    assert re.search(".*".join(order), capsys.readouterr().out, re.DOTALL)
    content = json.loads((adapters / "report.json").read_text())
    assert [x["passed"] for x in content["reports"]] == [False, True]
    assert main(f"conformance {right} --law causal".split()) == 0
    assert "Causal attention is exact to rounding" in capsys.readouterr().out


def test_names_that_the_encoding_of_the_output_lacks_are_escaped(adapters: Path) -> None:
    line = "conformance --adapter my_adapters:named --law causal"
    command = [sys.executable, "-m", "alibi_core", *line.split()]
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert (result.returncode, "caf\\xe9, float32" in result.stdout) == (0, True), result.stderr


def test_a_process_that_dies_or_hangs_is_reported_and_the_next_adapter_checked(adapters: Path, capsys: Any) -> None:
    options = "--law grouped --json report.json --time-limit 2"
    assert main(f"conformance --adapter my_adapters:several {options}".split()) == 1
    printed = capsys.readouterr()
    assert "crashed: the process ended with signal" in printed.out
    assert "hangs next\n" in printed.err  # what an adapter prints is shown, and where it hung
    assert re.search(r'Timeout.*my_adapters.py", line \d+ in <lambda>', printed.err, re.DOTALL)
    dead, left, hung, right = json.loads((adapters / "report.json").read_text())["reports"]
    assert "signal 6" in dead["report"]["crash"]
    assert "exit status 0" in left["report"]["crash"]
    assert hung["report"]["crash"] == "a call did not return within 2 s in law grouped"
    assert [x["passed"] for x in (dead, left, hung, right)] == [False, False, False, True]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--adapter my_adapters:not_one", "adapter must have one of the functions"),
        ("--adapter my_adapters:missing", "has no attribute 'missing'"),
        ("--adapter no_such_module:x", "No module named 'no_such_module'"),
        ("--adapter my_adapters:leaves", "SystemExit: 0"),
        ("--time-limit inf", "--time-limit must be positive, below a million seconds, got inf"),
        ("--json nowhere/report.json", "nowhere/report.json"),
        ("--law windows", "--law must be one of 'slopes', 'causal_bias'"),
        ("numpy", "NAME, unlike --adapter, must be one of 'alibi_core', 'alibi_jax'"),
        ("--seed -1", "--seed must not be negative, got -1"),
        ("--adapter my_adapters:Signed --dtype float64", "there is no adapter to check of that dtype"),
    ],
)
def test_what_cannot_be_checked_is_told(adapters: Path, line: str, message: str, capsys: Any) -> None:
    assert main(["conformance", *line.split()]) == 2
    printed = capsys.readouterr()
    assert message in " ".join(printed.err.split())
    assert printed.out == ""


@pytest.mark.parametrize("line", ["--dtype float64", "--adapter my_adapters:missing --law causal"])
def test_json_says_that_nothing_passed_where_an_adapter_was_not_checked(adapters: Path, line: str) -> None:
    right = "--adapter tests.conformance.test_kit:Right"
    assert main(f"conformance {right} {line} --json report.json".split()) == 2
    assert json.loads((adapters / "report.json").read_text())["passed"] is False
