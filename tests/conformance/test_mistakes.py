"""Every mistake that the kit knows breaks a law and is named, alone, with others, or under a condition."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import alibi_core
from alibi_core.conformance import LAWS, MISTAKES, Mistaken, check
from alibi_core.conformance.oracle import rounded

# Mistakes that are the same thing in what a function returns: (made, told).
SAME = {
    "negated bias": "negated slopes",
    "signed: key-only": "bloom contract",
    "diagonal block dropped: 256": "last partial block dropped",  # the same in texts of less than a block
}
BESIDE_OTHERS = "slope gradient of the right bias"  # alone it is no mistake
MEASURED = ("scores", "products")  # the order of rounded sums is unknown: the report says by how much results are off


def dtype_of(name: str) -> str:
    return name.split()[0] if name.startswith(("float16", "bfloat16")) else "float32"


# Those with large cases last; they pass for every backend in test_conformance.
LARGE = ("large", "large_gradients", "long_decoding")
SMALL = tuple(law.name for law in LAWS if law.name not in LARGE)


# These show in large cases alone, each after all small ones: two to seven seconds.
IN_LARGE_CASES = ("cache holds the last: 64", "cache holds the last: 128", "batch mixed as the cache grows")
IN_LARGE_CASES += ("token lost as the cache grows", "key lost beyond: 1024", "key lost beyond: 2048")
IN_LARGE_CASES += tuple(f"batch entries beyond: {n}" for n in (8, 16, 64))


@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=[pytest.mark.slow] * (x in IN_LARGE_CASES)) for x in MISTAKES if x != BESIDE_OTHERS],
)
def test_a_mistake_breaks_a_law_and_is_named(name: str) -> None:
    adapter = Mistaken(name, dtype=dtype_of(name))
    reports = (check(adapter, laws=[law]) for law in (*SMALL, *LARGE))
    report = next(x for x in reports if x.failed)
    keys = {x.key.partition(":")[0] for x in report.diagnoses}  # a nearby number may explain the same answers
    assert keys
    assert name.endswith(MEASURED) or keys <= {name.partition(":")[0], SAME.get(name)}


IN_ALL_DTYPES = [pytest.param(dtype, None, marks=pytest.mark.slow) for dtype in ("float16", "bfloat16", "float64")]


@pytest.mark.parametrize(("dtype", "laws"), [("float32", SMALL), *IN_ALL_DTYPES])
def test_without_mistakes_all_laws_pass(dtype: str, laws: tuple[str, ...] | None) -> None:
    start = time.process_time()
    report = check(Mistaken(dtype=dtype), seed=1, laws=laws)
    assert {law.status for law in report.laws} == {"passed"}, str(report)
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
    "gates": "key's own gate counted, query's gate left out, next head's gates, gates without logarithm",
    "large_gates": "gates summed from the start",
    "nowhere": "NaN where nowhere to look, mean where nowhere to look",
    "empty": "NaN where nowhere to look",
    "precision": "bfloat16 positions, float16 distances",
    "independent": "stale slopes",
    "large": "features beyond a multiple of 8",
    "combined": "window or segments",
}


@pytest.mark.parametrize(("law", "name"), [(law, name) for law, names in PEOPLES.items() for name in names.split(", ")])
def test_mistakes_of_people_are_named_in_attention(law: str, name: str) -> None:
    report = check(Mistaken(name, functions=("attention",), dtype=dtype_of(name)), laws=[law])
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
    ("bias doubled", BESIDE_OTHERS),
    ("negated bias", BESIDE_OTHERS),
)


@pytest.mark.parametrize("names", SEVERAL, ids=" and ".join)
def test_several_mistakes_at_once_are_all_named(names: tuple[str, ...]) -> None:
    function = "attention_grad" if BESIDE_OTHERS in names else "attention"
    report = check(Mistaken(*names, functions=(function,)), laws=["combined", "symmetric", "mask", "slope_gradients"])
    assert sorted(x.key for x in report.diagnoses) == sorted(names)


IN_ATTENTION, IN_DECODING = ("combined", "lengths", "window", "mask"), ("decoding",)


@pytest.mark.parametrize(
    ("laws", "name", "where", "ending"),
    [
        (IN_ATTENTION, "bias lost", "mask", " where keys are masked"),
        (IN_ATTENTION, "last key missing", "one query", " with a single query"),
        (IN_ATTENTION, "bias doubled", "symmetric", " with is_causal=False"),
        (IN_ATTENTION, "top-left", "window", " with window_size"),
        (IN_DECODING, "bias lost", "later steps", " in steps after the first"),
        (IN_DECODING, "bias lost", "single steps", " in later steps of a single token"),
        (IN_DECODING, "causal ignored", "chunks", " in later steps of several tokens"),
        (IN_DECODING, "previous keys forgotten", None, ""),
        (IN_DECODING, "stale slopes", None, ""),
        (IN_DECODING, "stale cache", None, ""),
    ],
)
def test_a_mistake_is_named_with_its_condition(
    laws: tuple[str, ...], name: str, where: str | None, ending: str
) -> None:
    function = "attention" if laws == IN_ATTENTION else "decode_step"
    report = check(Mistaken(name, where=where, functions=(function,)), laws=laws)
    assert [x.key for x in report.diagnoses] == [f"{name}{ending}"]


def test_what_has_no_name_is_told_by_the_law_and_by_how_much() -> None:
    adapter = SimpleNamespace(slopes=lambda num_heads: alibi_core.slopes(num_heads) * np.float32(1.01))
    (diagnosis,) = check(adapter).diagnoses
    start = "Not so: slopes are those of the contract, for 1 to 128 heads. Results are off by up to 0.01 "
    assert diagnosis.sentence.startswith(start)
    assert "(num_heads=1)" in diagnosis.sentence


def test_no_mistake_is_named_that_agrees_by_chance() -> None:
    def attention(*tensors: Any, **arguments: Any) -> Any:
        return Mistaken().attention(*tensors, law="log", **arguments)

    features = ("lengths", "offset", "symmetric", "window", "segments", "mask", "scale")
    report = check(SimpleNamespace(attention=attention, features=features), laws=["causal"])
    assert [x.key for x in report.diagnoses] == ["unexplained"], str(report)


QUERY, KEY, VALUE, COTANGENT = np.random.default_rng(0).standard_normal((4, 1, 2, 7, 5))
SYMMETRIC = {"is_causal": False, "q_offset": 0}


GATED = {"log_gates": -np.abs(QUERY[..., 0]), "mask": (np.arange(7) != 3)[None, None, None]}
DIFFERENTIABLE = {
    "slopes": ("signed", "signed: key-only", "clamped", "bias doubled", "next head's slope"),
    "log_gates": ("key's own gate counted", "query's gate left out", "next head's gates", "gates without logarithm"),
}


@pytest.mark.parametrize(("by", "name"), [(by, name) for by, names in DIFFERENTIABLE.items() for name in names])
def test_gradients_with_a_mistake_are_derivatives_of_the_result(by: str, name: str) -> None:
    wrong, given = Mistaken(name, dtype="float64"), {"slopes": np.asarray([0.3, 0.7])}
    given |= SYMMETRIC if by == "slopes" else GATED
    made = wrong.attention_grad(QUERY, KEY, VALUE, grad_output=COTANGENT, **given)[by]
    for index in np.ndindex(made.shape):
        side = np.zeros(made.shape)
        side[index] = 1e-5
        up, down = (wrong.attention(QUERY, KEY, VALUE, **given | {by: given[by] + x}) for x in (side, -side))
        np.testing.assert_allclose(made[index], ((up - down) * COTANGENT).sum() / 2e-5, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rounded_slopes_get_the_gradients_of_the_slopes_in_use(dtype: str) -> None:
    slopes, held = np.asarray([0.3, 0.7]), {"bfloat16": [0.30078125, 0.69921875], "float16": np.float16([0.3, 0.7])}
    made, expected = (
        adapter.attention_grad(QUERY, KEY, VALUE, np.float64(x), grad_output=COTANGENT, **SYMMETRIC)["slopes"]
        for adapter, x in (
            (Mistaken(f"{dtype} slopes", dtype="float64"), slopes),
            (Mistaken(dtype="float64"), held[dtype]),
        )
    )
    np.testing.assert_allclose(made, expected, rtol=1e-12)


def kernel(biased: Callable[..., Any], *features: str, dtype: Any = np.float32) -> Any:
    """Return an adapter of a kernel in NumPy, whose scores are ``biased(products, slopes, distances)``."""

    def attention(
        query: Any,
        key: Any,
        value: Any,
        slopes: Any,
        is_causal: bool,
        q_offset: int,
        window_size: int | None = None,
        segment_ids: Any = None,
    ) -> Any:
        ahead = np.arange(key.shape[2]) - (q_offset + np.arange(query.shape[2])[:, None])
        products = query @ key.swapaxes(-1, -2) / np.float32(query.shape[3] ** 0.5)
        scores = biased(*(x.astype(dtype) for x in (products, slopes[:, None, None], abs(ahead)))).astype(np.float32)
        hidden = is_causal & (ahead > 0) | (False if window_size is None else abs(ahead) > window_size)
        if segment_ids is not None:
            hidden = hidden | (segment_ids[0][:, None, :, None] != segment_ids[1][:, None, None])
        scores = np.where(hidden, -np.inf, scores)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True).clip(-1e30))
        return weights / weights.sum(axis=-1, keepdims=True).clip(1e-30) @ value

    return SimpleNamespace(attention=attention, features=features)


@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=["added", "fused"])
def test_a_kernel_that_adds_far_biases_at_full_size_is_told_so(dtype: Any) -> None:
    far = kernel(lambda products, slopes, d: products - slopes * d, "lengths", "offset", "far", dtype=dtype)
    report = check(far, laws=["offset"])
    assert [x.key.partition(":")[0] for x in report.diagnoses] == ["float32 bias far away"], str(report)


def test_no_mistake_is_named_that_does_not_explain_an_earlier_call() -> None:
    # In segments and a window of 1, distances are 0 and 1, and the bias is as if doubled. In longer segments it is not.
    one_more = kernel(lambda products, slopes, d: products - slopes * (d + (d > 0)), "window", "segments")
    report = check(one_more, laws=["segments"])
    assert [x.key for x in report.diagnoses] == ["unexplained"], str(report)


def test_sums_of_blocks_in_low_precision_break_a_law() -> None:
    right = Mistaken(dtype="bfloat16")

    def attention(query: Any, key: Any, value: Any, slopes: Any, is_causal: bool, q_offset: int) -> Any:
        total, blocks = 0 * query, np.arange(key.shape[2])[:, None] // 64
        for number in range(blocks.max(initial=0) + 1):
            own = value * (blocks == number).astype(value.dtype)
            part = right.attention(query, key, own, slopes, is_causal=is_causal, q_offset=q_offset)
            total = rounded(total + part, "bfloat16").astype(np.float32)
        return total

    adapter = SimpleNamespace(attention=attention, dtype="bfloat16", features=("lengths", "offset"))
    assert not check(adapter, laws=["precision"]).passed


@pytest.mark.slow
def test_decoding_that_no_mistake_explains_is_not_named() -> None:
    def decode_step(query: Any, key: Any, value: Any, slopes: Any, cache: Any) -> Any:
        steps, *held = cache or (0, key[:, :, :0], value[:, :, :0])
        keys, values = (np.concatenate(pair, axis=2) for pair in zip(held, (key, value), strict=True))
        # After the first step it counts steps, not tokens.
        output = Mistaken().attention(query, keys, values, slopes, is_causal=True, q_offset=steps)
        return output, ((steps + 1) if cache else query.shape[2], keys, values)

    report = check(SimpleNamespace(decode_step=decode_step, features=()), laws=["decoding"])
    assert [x.key for x in report.diagnoses] == ["unexplained"], str(report)


@pytest.mark.parametrize("cached_by", [slice(1, 2), slice(2)], ids=["heads", "batch and heads"])
def test_slopes_that_are_cached_by_few_sizes_are_told_to_be_stale(cached_by: slice) -> None:
    right, held = kernel(lambda products, slopes, d: products - slopes * d), dict[Any, Any]()

    def attention(query: Any, key: Any, value: Any, slopes: Any, is_causal: bool, q_offset: int) -> Any:
        slopes = held.setdefault(query.shape[cached_by], slopes)
        return right.attention(query, key, value, slopes, is_causal, q_offset)

    report = check(SimpleNamespace(attention=attention, features=()), laws=["causal"])
    assert [x.key for x in report.diagnoses] == ["stale slopes"], str(report)


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

    names = [law.name for law in LAWS if law.function == function and not law.needs][:2]
    for answer in (raises, not_a_number):
        start = time.process_time()
        report = check(SimpleNamespace(features=(), **{function: answer}), laws=names)
        assert {law.status for law in report.laws} == {"failed"}
        assert report.diagnoses
        assert time.process_time() - start < 5


ARGUMENTS = ("future_slopes", "window_size", "segment_ids", "mask", "scale")  # begin a sentence as they are written


def test_sentences_are_sentences() -> None:
    for sentence in MISTAKES.values():
        first = sentence.split()[0]
        assert first[0].isupper() or first in ARGUMENTS, sentence
        assert sentence.endswith("."), sentence
        assert "{" not in sentence
