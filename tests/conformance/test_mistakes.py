"""Every mistake that the kit knows breaks a law and is named, alone, with others, or under a condition."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import alibi_core
from alibi_core.conformance import FEATURES, LAWS, MISTAKES, Mistaken, Report, check

# Mistakes that are the same thing in what a function returns: (made, told).
SAME = {
    "negated bias": "negated slopes",
    "signed: key-only": "bloom contract",
    "diagonal block dropped: 256": "last partial block dropped",  # the same in texts of less than a block
}
# The order of rounded sums is unknown, and few probes have such sizes: the report says where results are off.
MEASURED = ("scores", "products", "beyond: 64")


def first_failure(adapter: Any, laws: tuple[str, ...]) -> Report | None:
    """Return the report on the first of these laws that fails, in their order."""
    for law in laws:
        report = check(adapter, laws=[law])
        if report.failed:
            return report
    return None


def dtype_of(name: str) -> str:
    return name.split()[0] if name.startswith(("float16", "bfloat16")) else "float32"


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[pytest.mark.slow] if i % 25 else []) for i, x in enumerate(MISTAKES)]
)
def test_a_mistake_breaks_a_law_and_is_named(name: str) -> None:
    report = first_failure(Mistaken(name, dtype=dtype_of(name)), tuple(law.name for law in LAWS))
    assert report is not None
    keys = [x.key for x in report.diagnoses]
    assert keys
    if not name.endswith(MEASURED):
        # The same mistake with a nearby number may explain the same answers.
        assert {x.partition(":")[0] for x in keys} <= {name.partition(":")[0], SAME.get(name)}


@pytest.mark.parametrize(
    "dtype",
    [
        "float32",
        pytest.param("bfloat16", marks=pytest.mark.slow),
        pytest.param("float16", marks=pytest.mark.slow),
        pytest.param("float64", marks=pytest.mark.slow),
    ],
)
def test_without_mistakes_all_laws_pass(dtype: str) -> None:
    start = time.process_time()
    report = check(Mistaken(dtype=dtype), seed=1)
    assert report.passed, str(report)
    assert {law.status for law in report.laws} == {"passed"}
    assert time.process_time() - start < 30


# The mistakes that people make, and a law of attention that each of them breaks.
PEOPLES = {
    "causal": "geometric slopes, canonical slopes, next head's slope, sorted slopes, negated bias, bias lost, "
    "bias scaled, bias doubled, bias in base 2, offset one more, offset one less, causal hides own key, "
    "causal sees the next key, causal ignored, scale missing, scaled twice",
    "symmetric": "signed, clamped, always causal",
    "lengths": "top-left",
    "window": "window one less, window one more",
    "mask": "mask inverted, mask ignored, mask finite: 10000",
    "segments": "segments ignored",
    "grouped": "grouped heads interleaved",
    "scale": "scale ignored, scale 0 as none",
    "long": "last partial block dropped: 64, horizon too short: 128, scale ignored beyond: 32",
    "nowhere": "NaN where nowhere to look",
    "independent": "stale slopes",
    "large": "features beyond a multiple of 8",
    "combined": "window or segments",
}


@pytest.mark.parametrize(("law", "name"), [(law, name) for law, names in PEOPLES.items() for name in names.split(", ")])
def test_mistakes_of_people_are_named_in_attention(law: str, name: str) -> None:
    report = check(Mistaken(name, functions=("attention",)), laws=[law])
    assert [x.key for x in report.diagnoses] == [name]


@pytest.mark.parametrize(("name", "dtype"), [("bfloat16 positions", "bfloat16"), ("float16 distances", "float16")])
def test_positions_in_few_digits_are_named(name: str, dtype: str) -> None:
    report = check(Mistaken(name, functions=("attention",), dtype=dtype), laws=["precision"])
    assert [x.key for x in report.diagnoses] == [name]


SEVERAL = (
    ("geometric slopes", "bias scaled", "mask ignored"),
    ("geometric slopes", "signed"),
    ("canonical slopes", "causal hides own key", "scale missing"),
    ("causal hides own key", "window one less"),
    ("causal ignored", "window one more", "mask ignored"),
    ("grouped heads interleaved", "slopes by kv head"),
    ("top-left", "window on past side only"),
    ("bias doubled", "segments ignored"),
)


@pytest.mark.parametrize("names", SEVERAL, ids=" and ".join)
def test_several_mistakes_at_once_are_all_named(names: tuple[str, ...]) -> None:
    report = check(Mistaken(*names, functions=("attention",)), laws=["combined", "symmetric", "mask"])
    assert sorted(x.key for x in report.diagnoses) == sorted(names)


@pytest.mark.parametrize(
    ("name", "where", "ending"),
    [
        ("bias lost", "mask", "where keys are masked"),
        ("last key missing", "one query", "with a single query"),
        ("bias doubled", "symmetric", "with is_causal=False"),
        ("top-left", "window", "with window_size"),
    ],
)
def test_a_mistake_under_a_condition_is_named_with_it(name: str, where: str, ending: str) -> None:
    report = check(
        Mistaken(name, where=where, functions=("attention",)), laws=["combined", "lengths", "window", "mask"]
    )
    assert [x.key for x in report.diagnoses] == [f"{name} {ending}"]


@pytest.mark.parametrize(
    ("name", "where", "key"),
    [
        ("bias lost", "later steps", "bias lost in steps after the first"),
        ("bias lost", "single steps", "bias lost in later steps of a single token"),
        ("causal ignored", "chunks", "causal ignored in later steps of several tokens"),
        ("previous keys forgotten", None, "previous keys forgotten"),
        ("stale slopes", None, "stale slopes"),
        ("stale cache", None, "stale cache"),
    ],
)
def test_mistakes_in_decoding_are_named(name: str, where: str | None, key: str) -> None:
    report = check(Mistaken(name, where=where, functions=("decode_step",)), laws=["decoding"])
    assert [x.key for x in report.diagnoses] == [key]


def wrong(change: Callable[..., Any]) -> Any:
    """Return an adapter whose attention is the right one with this done to its arguments or its result."""

    class Wrong(Mistaken):
        def attention(self, *tensors: Any, **arguments: Any) -> Any:
            return change(super().attention, *tensors, **arguments)

    return Wrong()


def test_what_has_no_name_is_told_by_the_law_and_by_how_much() -> None:
    def odd(attention: Any, query: Any, key: Any, value: Any, slopes: Any, **arguments: Any) -> Any:
        return attention(query, key, value * np.float32(1.01), slopes, **arguments)

    (diagnosis,) = check(wrong(odd), laws=["causal"]).diagnoses
    assert diagnosis.sentence.startswith(
        "Not so: causal attention is exact to rounding. Results are off by up to 0.01 "
    )
    assert "1 query, 1 key" in diagnosis.sentence


@pytest.mark.parametrize(
    ("is_wrong", "words"),
    [
        (lambda q, k: k.shape[2] % 64 == 1 < k.shape[2], "Where the number of tokens is 1 beyond a multiple of 64, "),
        *(
            pytest.param(is_wrong, words, marks=pytest.mark.slow)
            for is_wrong, words in (
                (lambda q, k: q.shape[3] > 64, "With more than 64 features a head, "),
                (lambda q, k: q.shape[0] > 8, "With more than 8 batch entries, "),
                (lambda q, k: q.shape[3] == 80, "With 80 features a head, but not with one more or fewer, "),
            )
        ),
    ],
    ids=["a multiple", "features", "batch", "just"],
)
def test_what_has_no_name_is_told_by_the_size_from_which_on_it_is_wrong(is_wrong: Any, words: str) -> None:
    def odd(attention: Any, query: Any, key: Any, value: Any, slopes: Any, **arguments: Any) -> Any:
        factor = np.float32(1.1 if is_wrong(query, key) else 1)
        return attention(query, key, value * factor, slopes, **arguments)

    adapter = wrong(odd)
    report = first_failure(adapter, ("long", "large"))
    assert report is not None
    assert words in report.diagnoses[0].sentence


def bias_adapter(compute: Callable[..., Any]) -> Any:
    def bias(num_heads: int, q_len: int, kv_len: int, is_causal: bool) -> Any:
        slopes = alibi_core.slopes(num_heads)[:, None, None].astype(np.float64)
        i, j = np.arange(q_len)[:, None] + kv_len - q_len, np.arange(kv_len)
        return np.where(is_causal & (j > i), -np.inf, compute(slopes, i, j) + 0 * i).astype(np.float32)

    return SimpleNamespace(bias=bias, features=("symmetric", "lengths"))


@pytest.mark.parametrize(
    ("compute", "expected"),
    [
        (lambda m, i, j: m * (j - i), ["signed"]),
        (lambda m, i, j: m * abs(i - j), ["negated slopes"]),
        (lambda m, i, j: m * j, ["bloom contract"]),
        (
            lambda m, i, j: 2.0 ** (-8 * np.arange(1, len(m) + 1) / len(m))[:, None, None] * (j - i),
            ["geometric slopes", "signed"],
        ),
    ],
)
def test_a_wrong_bias_is_named(compute: Callable[..., Any], expected: list[str]) -> None:
    report = check(bias_adapter(compute), laws=["causal_bias", "symmetric_bias"])
    assert sorted(x.key for x in report.diagnoses) == expected


@pytest.mark.parametrize("function", ["attention", "attention_grad", "bias", "slopes", "decode_step"])
def test_whatever_an_adapter_does_there_is_a_report(function: str) -> None:
    def raises(*arrays: Any, **options: Any) -> Any:
        raise RuntimeError("no")

    def not_a_number(*arrays: Any, **options: Any) -> Any:
        if function == "slopes":
            return np.full(arrays[0], np.nan, np.float32)
        if function == "bias":
            return np.full(arrays[:3], np.nan, np.float32)
        output = arrays[0] * np.float32(np.nan)
        if function == "attention_grad":
            return {"query": output}
        return (output, None) if function == "decode_step" else output

    names = [law.name for law in LAWS if law.function == function][:2]
    for answer in (raises, not_a_number):
        report = check(SimpleNamespace(features=tuple(FEATURES), **{function: answer}), laws=names)
        assert {law.status for law in report.laws} == {"failed"}
        assert report.diagnoses


def test_a_mistake_that_is_not_in_the_table_is_refused() -> None:
    with pytest.raises(ValueError, match="mistakes must be names of MISTAKES, got no such thing"):
        Mistaken("bias lost", "no such thing")
    with pytest.raises(ValueError, match="where must be one of"):
        Mistaken("bias lost", where="nowhere")


ARGUMENTS = ("future_slopes", "window_size", "segment_ids", "mask", "scale")  # begin a sentence as they are written


@pytest.mark.parametrize("name", MISTAKES)
def test_sentences_are_sentences(name: str) -> None:
    first = MISTAKES[name].split()[0]
    assert first[0].isupper() or first in ARGUMENTS
    assert MISTAKES[name].endswith(".")
    assert "{" not in MISTAKES[name]
