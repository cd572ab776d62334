"""Diagnosis: what an implementation does in place of ALiBi is named, one mistake or several, or measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import alibi_core
from alibi_core.conformance import MISTAKES, Mistaken, check
from alibi_core.conformance._adapter import FEATURES, FUNCTIONS, Offer
from alibi_core.conformance._cases.case import FORMS, LONGER, PER_BATCH, SIZES, Case
from alibi_core.conformance._cases.oracle import Answer, rounded
from alibi_core.conformance._diagnosis._departures.catalogue import ATTENTION, FUTURE_RIGHT
from alibi_core.conformance._diagnosis._departures.departure import BLOCKS, CONDITIONS, Departure
from alibi_core.conformance._diagnosis._departures.of_gradients import FORWARD_RIGHT, GRADIENTS
from alibi_core.conformance._diagnosis._readings.gradients import GradientReading
from alibi_core.conformance._diagnosis._readings.inputs import Inputs
from alibi_core.conformance._diagnosis._readings.reading import Reading
from alibi_core.conformance._diagnosis._readings.slopes import CHANGES, RULES
from alibi_core.conformance._diagnosis.diagnosis import diagnose
from alibi_core.conformance._trial.caller import Caller, DepartureError
from benchmarks.mutants import Reference
from tests.support.full import first_of, in_full

ALL = frozenset(FEATURES)
Array = np.ndarray[Any, Any]


def named(
    adapter: Any, function: str, features: frozenset[str] = ALL, failures: Sequence[DepartureError] = ()
) -> list[str]:
    caller = Caller(Offer.of(adapter), 60.0)
    try:
        return [x.key for x in diagnose(caller, function, features, failures)]
    finally:
        caller.close()


# --- Readings are the oracle's, by default ---------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("q_offset", [None, 3, -2, PER_BATCH])
def test_the_default_reading_is_the_paper(form: str, q_offset: int | None) -> None:
    masks = ((None, None, None), (2, "pair", "by head"), (None, None, "by key"))
    for seed, sizes in enumerate(SIZES + LONGER):
        window, packing, masking = masks[(seed + FORMS.index(form)) % 3]
        case = Case(sizes, form, q_offset, window, packing, masking, seed % 2 == 0, seed)
        exact = case.exact("float32").output
        error = np.abs(Reading().attention(case, "float32") - exact.value)
        assert np.all(error <= 1e-3 * exact.budget + 1e-14)
        cotangent = rounded(case.arrays["cotangent"], "float32")
        inputs = Inputs.of(case, "float32")
        found = GradientReading().gradients(inputs, cotangent, shares_slopes=not case.slopes_per_batch)
        for name, answer in case.gradients("float32").items():
            assert np.all(np.abs(found[name].value - answer.value) <= 1e-3 * answer.budget + 1e-13), name


# --- The catalogue, run as adapters -----------------------------------------------------------------------------------

NOT_TOLD_APART = ("", "canonical slopes", "mpt slopes", "squared slopes", "root of slopes")
LISTS = [x for x in (*RULES, *CHANGES) if x not in NOT_TOLD_APART]
# Two names for what cannot be told apart, or not in what an attention takes: (made, told).
ALIASES = {"tf32 inputs": "float16 inputs", "next power of two": "eight-head slopes"}
# Of what may be rounded to either, most is tried in bfloat16 alone.
IN_FLOAT16 = ("float16 slopes", "float16 distances", "float16 bias", "float16 scores", "float16 inputs")


def one_of_each_key(departures: Sequence[Departure]) -> list[str]:
    """Return a name of each key; of those that come by block sizes, one that is neither smallest nor largest."""
    found: dict[str, str] = {}
    for name in MISTAKES:
        key, _, number = name.partition(": ")
        if not number.isdigit() or number == str(BLOCKS[3]):
            found.setdefault(key, name)
    keys = dict.fromkeys(x.key for x in departures if x.key not in (FUTURE_RIGHT.key, FORWARD_RIGHT))
    return [found.get(key, f"{key}: 10") for key in keys]


NAMED = [x for x in one_of_each_key(ATTENTION) if not x.startswith("float16") or x.partition(":")[0] in IN_FLOAT16]


# Each by itself in full; one of eight where all else is tried, too.
@pytest.mark.parametrize("name", [in_full(x) if i % 8 else x for i, x in enumerate(NAMED)])
def test_every_mistake_of_attention_is_named(name: str) -> None:
    key = name.partition(":")[0]
    assert named(Mistaken(name), "attention") == [ALIASES.get(key, key)]


IN_LOW_PRECISION = [
    "signed: signed", "geometric slopes", "bias lost", "bias scaled", "negated bias", "top-left",
    "causal hides own key", "window one less", "grouped heads interleaved", "extra 1 in softmax", "bfloat16 positions",
    "squared distance", "mean where nowhere to look", "scale missing", "mask ignored", "segments ignored", "clamped",
    "horizon too short: 64",
]  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, ("bfloat16", "float16", "float64")[i % 3]) for i, name in enumerate(IN_LOW_PRECISION)]
    + [(name, "bfloat16") for i, name in enumerate(IN_LOW_PRECISION) if i % 3],
)
def test_mistakes_are_named_in_other_dtypes(name: str, dtype: str) -> None:
    assert named(Mistaken(name, dtype=dtype), "attention") == [name.partition(":")[0]]


@pytest.mark.parametrize("dtype", first_of(["float32", "bfloat16", "float16", "float64"]))
@pytest.mark.parametrize(
    "features", [ALL, frozenset(), frozenset({"symmetric", "lengths"})], ids=["all", "none", "two"]
)
def test_of_a_right_implementation_nothing_is_said(dtype: str, features: frozenset[str]) -> None:
    for function in FUNCTIONS if features else ("attention", "attention_grad"):
        assert named(Mistaken(dtype=dtype), function, features) == []


ONLY_IN_GRADIENTS = one_of_each_key([x for x in GRADIENTS if x.key not in {y.key for y in ATTENTION}])


@pytest.mark.parametrize(
    "name",
    [
        *first_of(ONLY_IN_GRADIENTS, keep=4),
        *("bias lost", "signed: signed", "geometric slopes", "bias scaled", "causal hides own key", "top-left"),
        "NaN where nowhere to look",
    ],
)
def test_every_mistake_of_gradients_is_named(name: str) -> None:
    assert named(Mistaken(name), "attention_grad") == [name.partition(":")[0]]


@pytest.mark.parametrize("name", LISTS)
def test_every_list_of_slopes_is_named(name: str) -> None:
    assert named(Mistaken(name), "slopes") == [name]


def test_where_slopes_are_wrong_is_told() -> None:
    def slopes(num_heads: int) -> Array:
        return alibi_core.slopes(num_heads) * np.linspace(1, 1 + 0.3 * (num_heads & (num_heads - 1) > 0), num_heads)

    (found,) = check(SimpleNamespace(slopes=slopes), laws=["slopes"]).diagnoses
    assert found.sentence.startswith("Slopes are wrong for head counts that are no power of two: with 3 heads, ")


def test_a_mistake_that_is_not_in_the_catalogue_is_refused() -> None:
    with pytest.raises(ValueError, match="mistakes must be names of MISTAKES, got no such thing"):
        Mistaken("bias lost", "no such thing")


# --- Implementations written independently ---------------------------------------------------------------------------


def geometric(num_heads: int) -> Array:
    return 2.0 ** (-8 * np.arange(1, num_heads + 1) / num_heads)


def low(x: Any) -> Array:
    return rounded(x, "bfloat16")


def law(bias: Callable[[Any, Array, Array], Array]) -> dict[str, Any]:
    """Return the method of an implementation whose bias is this, of slopes and of positions of queries and keys."""
    return {"raw_bias": lambda self, call: bias(self.steepness(call), self.q_positions(call), self.kv_positions(call))}


def slopes(changed: Callable[[Array, Any], Array]) -> dict[str, Any]:
    """Return the method of an implementation that takes other slopes than it is given."""
    return {"by_head": lambda self, call, given: Reference.by_head(self, call, changed(given, call))}


def scaled(scale: Callable[[Any], float]) -> dict[str, Any]:
    return {"products": lambda self, call: Reference.products(self, dataclasses.replace(call, scale=scale(call)))}


SIGNED = law(lambda m, i, j: m * (j - i))
GEOMETRIC = slopes(lambda m, call: geometric(call.query.shape[1]))
NO_OWN_KEY = {"visible_by_causality": lambda self, call: self.ahead(call) < 0 if call.is_causal else True}
WRONG: dict[str, tuple[dict[str, Any], list[str]]] = {
    "attention-gym": (SIGNED | GEOMETRIC, ["geometric slopes", "signed"]),
    "jaketae": (
        SIGNED | GEOMETRIC | scaled(lambda call: (call.query.shape[1] * call.query.shape[3]) ** -0.5),
        ["geometric slopes", "scaled by d_model", "signed"],
    ),
    "falcon": (
        {"raw_bias": lambda self, call: low(low(self.steepness(call)) * low(self.kv_positions(call))) * call.scale},
        ["falcon contract"],
    ),
    "two of a mask": (
        NO_OWN_KEY
        | {
            "visible_by_window": lambda self, call: (
                True if call.window_size is None else np.abs(self.ahead(call)) < call.window_size
            )
        },
        ["causal hides own key", "window one less"],
    ),
    "three of a kind": (
        NO_OWN_KEY
        | scaled(lambda call: 1.0)
        | slopes(lambda m, call: np.broadcast_to(alibi_core.slopes(call.query.shape[1]), m.shape)),
        ["canonical slopes", "causal hides own key", "scale missing"],
    ),
    "heads": (
        {"grouped": lambda self, call, x: np.tile(x, (1, call.group, 1, 1))}
        | slopes(lambda m, call: m[..., np.arange(m.shape[-1]) // call.group]),
        ["grouped heads interleaved", "slopes by kv head"],
    ),
    "places": (
        {
            "q_positions": lambda self, call: np.arange(call.lengths[0])[:, None],
            "visible_by_window": lambda self, call: (
                True if call.window_size is None else -self.ahead(call) <= call.window_size
            ),
        },
        ["top-left", "window on past side only"],
    ),
    "a factor": (law(lambda m, i, j: -1.7 * m * abs(i - j)), ["bias multiplied"]),
    "a temperature": (
        {"scores": lambda self, call: Reference.scores(self, call) / np.float32(0.9)},
        ["bias multiplied", "scores multiplied"],
    ),
    "a power": (law(lambda m, i, j: -m * abs(i - j) ** 0.7), ["power of distance"]),
    "a clip": (law(lambda m, i, j: -m * np.minimum(abs(i - j), 37)), ["distance clipped"]),
    "a clipped penalty": (law(lambda m, i, j: np.maximum(-m * abs(i - j), -8)), ["penalty clipped"]),
    "a horizon": (law(lambda m, i, j: np.where(abs(i - j) < 37, -m * abs(i - j), -np.inf)), ["horizon too short"]),
    "a restart": (law(lambda m, i, j: -m * abs(i % 100 - j % 100)), ["positions restart"]),
    "slopes of its own": (slopes(lambda m, call: m * (1 + np.arange(m.shape[-1]) / 3)), ["other slopes"]),
    "key-only in bfloat16": (law(lambda m, i, j: low(m * j) + 0 * i), ["bfloat16 key-only bias"]),
    "scores in bfloat16": (
        {"scores": lambda self, call: self.masked(call, low(self.products(call) + self.raw_bias(call)))},
        ["bfloat16 scores"],
    ),
}


def wrong(methods: dict[str, Any]) -> Any:
    return type("Wrong", (Reference,), methods)()


@pytest.mark.parametrize("who", WRONG)
def test_mistakes_are_all_named(who: str) -> None:
    methods, expected = WRONG[who]
    assert sorted(named(wrong(methods), "attention")) == expected


def test_a_mistake_under_a_condition_is_told_with_it() -> None:
    class Lost(Reference):
        def attention(self, *tensors: Array, mask: Array | None = None, **options: Any) -> Array:  # type: ignore[override]
            slopes = options.pop("slopes") * (mask is None)
            return super().attention(*tensors, slopes=slopes, mask=mask, **options)

    assert named(Lost(), "attention") == ["bias lost with a mask"]


@pytest.mark.parametrize("kept", ["slopes", "is_causal"])
def test_what_is_kept_between_calls_is_named(kept: str) -> None:
    class Keeps(Reference):
        def __init__(self) -> None:
            self.kept: dict[Any, Any] = {}

        def attention(self, query: Array, key: Array, value: Array, **options: Any) -> Array:  # type: ignore[override]
            options[kept] = self.kept.setdefault((query.shape, key.shape), options[kept])
            if options["is_causal"]:
                options.pop("future_slopes", None)
            return super().attention(query, key, value, **options)

    assert named(Keeps(), "attention") == [f"stale {kept}"]


def test_what_nothing_explains_is_measured() -> None:
    odd = law(lambda m, i, j: -m * abs(i - j) * (1 + 0.3 * (j % 3)))
    caller = Caller(Offer.of(wrong(odd)), 60.0)
    (found,) = diagnose(caller, "attention", ALL, [])
    caller.close()
    assert found.key == "unexplained"
    assert "effective bias" in found.sentence


def test_what_only_the_laws_see_is_measured() -> None:
    case = Case(SIZES[1], "causal", None, None, None, None, False, 0)
    exact = case.exact("float32").output
    actual = exact.value + 1.5 * exact.budget
    failures = [DepartureError("slopes", "", actual, Answer(exact.value, exact.budget), case)]
    assert named(SimpleNamespace(slopes=alibi_core.slopes), "slopes", ALL, failures) == ["unexplained"]


@pytest.mark.parametrize("function", ["attention", "attention_grad", "bias", "slopes", "decode_step"])
def test_whatever_an_adapter_does_there_is_no_error(function: str) -> None:
    def raises(*arrays: Any, **options: Any) -> Any:
        raise RuntimeError("no")

    def not_a_number(*arrays: Any, **options: Any) -> Any:
        if function == "slopes":
            return np.full(options["num_heads"], np.nan, np.float32)
        if function == "bias":
            return np.full((options["num_heads"], options["q_len"], options["kv_len"]), np.nan, np.float32)
        output = arrays[0] * np.float32(np.nan)
        if function == "attention_grad":
            return {"query": output}
        return (output, None) if function == "decode_step" else output

    for wrong in (raises, not_a_number):
        named(SimpleNamespace(features=tuple(FEATURES), **{function: wrong}), function)


# --- Bias, decoding --------------------------------------------------------------------------------------------------


def bias_adapter(compute: Callable[..., Array]) -> Any:
    def bias(num_heads: int, q_len: int, kv_len: int, is_causal: bool) -> Array:
        slopes = alibi_core.slopes(num_heads)[:, None, None].astype(np.float64)
        i, j = np.arange(q_len)[:, None] + kv_len - q_len, np.arange(kv_len)
        return np.where(is_causal & (j > i), -np.inf, compute(slopes, i, j) + 0 * i).astype(np.float32)

    return SimpleNamespace(bias=bias, features=("symmetric", "lengths"))


@pytest.mark.parametrize(
    ("compute", "expected"),
    [
        (lambda m, i, j: -m * abs(i - j), []),
        (lambda m, i, j: m * (j - i), ["signed"]),
        (lambda m, i, j: m * abs(i - j), ["positive bias"]),
        (lambda m, i, j: geometric(len(m))[:, None, None] * (j - i), ["geometric slopes", "signed"]),
        (lambda m, i, j: low(-m * abs(i - j)), ["bfloat16 bias"]),
        (lambda m, i, j: m * j, ["bloom contract"]),
    ],
)
def test_a_wrong_bias_is_named(compute: Callable[..., Array], expected: list[str]) -> None:
    assert named(bias_adapter(compute), "bias", frozenset({"symmetric", "lengths"})) == expected


def test_a_bias_without_its_mask_is_named() -> None:
    def bias(num_heads: int, q_len: int, kv_len: int, is_causal: bool) -> Array:
        return alibi_core.bias(num_heads, q_len, kv_len, is_causal=False)

    def finite(num_heads: int, q_len: int, kv_len: int, is_causal: bool) -> Array:
        return np.maximum(alibi_core.bias(num_heads, q_len, kv_len, is_causal=is_causal), np.float32(-1e4))

    def transposed(num_heads: int, q_len: int, kv_len: int, is_causal: bool) -> Array:
        return alibi_core.bias(num_heads, kv_len, q_len, is_causal=is_causal).swapaxes(1, 2)

    features = frozenset({"symmetric", "lengths"})
    assert named(SimpleNamespace(bias=bias), "bias", features) == ["causal ignored"]
    assert named(SimpleNamespace(bias=finite), "bias", features) == ["finite where hidden"]
    assert named(SimpleNamespace(bias=transposed), "bias", features) == ["transposed bias"]


class Decoder(Reference):
    """Decoding whose steps are attention with changed arguments: ``change(query, key, value, slopes, start)``."""

    def __init__(self, change: Callable[..., dict[str, Any]]) -> None:
        self.change = change

    def attention(self, *tensors: Array, q_offset: Any, **options: Any) -> Array:
        names = ("query", "key", "value", "slopes")
        options |= dict(zip(names, tensors, strict=True)) | {"q_offset": q_offset}
        return super().attention(**options | self.change(*tensors, q_offset))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda q, k, v, m, start: {}, []),
        (lambda q, k, v, m, start: {"slopes": m * (start == 0)}, ["bias lost in later steps"]),
        (lambda q, k, v, m, start: {"slopes": m * (q.shape[2] > 1)}, ["bias lost in steps of one token"]),
        (lambda q, k, v, m, start: {"q_offset": 0}, ["top-left"]),
        (lambda q, k, v, m, start: {"q_offset": start - (start > 0)}, ["causal hides own key in later steps"]),
        (lambda q, k, v, m, start: {"q_offset": start + 1}, ["offset one more"]),
        (lambda q, k, v, m, start: {"is_causal": start == 0}, ["causal ignored in steps of several tokens"]),
        (
            lambda q, k, v, m, start: {"key": k[:, :, start:], "value": v[:, :, start:], "q_offset": 0},
            ["previous keys forgotten"],
        ),
    ],
)
def test_mistakes_in_decoding_are_named(change: Callable[..., dict[str, Any]], expected: list[str]) -> None:
    assert named(Decoder(change), "decode_step") == expected


def test_sequences_that_get_into_each_other_are_named() -> None:
    class Shared(Reference):
        cache: Any = None

        def decode_step(self, query: Array, key: Array, value: Array, slopes: Array, cache: Any) -> Any:
            output, self.cache = super().decode_step(query, key, value, slopes, None if cache is None else self.cache)
            return output, 1

    class Stale(Reference):
        def __init__(self) -> None:
            self.kept: dict[int, Any] = {}

        def decode_step(self, query: Array, key: Array, value: Array, slopes: Array, cache: Any) -> Any:
            start = 0 if cache is None else cache[0].shape[2]
            return super().decode_step(query, key, value, self.kept.setdefault(start, slopes), cache)

    assert named(Shared(), "decode_step") == ["sequences mixed"]
    assert named(Stale(), "decode_step") == ["stale slopes"]


# --- The catalogue ---------------------------------------------------------------------------------------------------


ARGUMENTS = ("future_slopes", "window_size", "segment_ids", "mask", "scale")  # begin a sentence as they are written


def test_sentences_are_sentences() -> None:
    for departure in (*ATTENTION, *GRADIENTS):
        first = departure.sentence.split()[0]
        assert first[0].isupper() or first in ARGUMENTS, departure
        assert departure.sentence.endswith("."), departure
        assert "{" not in departure.sentence, departure
        fields = {x.name for x in dataclasses.fields(GradientReading)}
        assert departure.changes.keys() <= fields, departure
        for condition in CONDITIONS:
            told = departure.under(condition)
            assert told.key.startswith(departure.key)
            assert told.sentence.startswith(CONDITIONS[condition][1])
