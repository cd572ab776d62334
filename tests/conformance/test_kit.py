"""The conformance kit as its users meet it: adapters of any kind, bad ones too, reports, the plugin."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import alibi_core
from alibi_core.conformance import FEATURES, LAWS, BackendAdapter, Library, Mistaken, check, installed_adapters

ROOT = Path(__file__).parents[2]
pytest_plugins = ["pytester"]


def attended(query: Any, key: Any, value: Any, bias: Any, hidden: Any) -> Any:
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat(group, axis=1), value.repeat(group, axis=1)
    scores = query @ key.swapaxes(-1, -2) / np.float32(query.shape[-1] ** 0.5) + bias.astype(np.float32)
    scores = np.where(hidden, np.float32(-1e30), scores)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True, initial=-1e30)) * ~hidden
    total = weights.sum(axis=-1, keepdims=True)
    return weights / np.where(total > 0, total, np.float32(1)) @ value


def signed(query: Any, key: Any, value: Any, slopes: Any, is_causal: bool, q_offset: int, size: Any = np.array) -> Any:
    back = np.arange(query.shape[2])[:, None] + q_offset - np.arange(key.shape[2])
    return attended(query, key, value, -slopes[:, None, None] * size(back), (back < 0) & is_causal)


class Right:
    """Attention in ten lines, as a reader of README writes it."""

    def attention(self, query: Any, key: Any, value: Any, slopes: Any, is_causal: bool, q_offset: int) -> Any:
        return signed(query, key, value, slopes, is_causal, q_offset, size=np.abs)


def only(**functions: Any) -> SimpleNamespace:
    return SimpleNamespace(**functions)


# --- What an adapter may be -------------------------------------------------------------------------------------------


def test_an_adapter_of_ten_lines_passes_and_its_features_are_found_out() -> None:
    report = check(Right())
    assert report.passed, report
    assert report.exit_status == 0
    found = {"lengths", "offset", "symmetric", "grouped", "nowhere", "empty", "slope_gradients", "wide_heads"}
    assert set(report.features) == found
    assert (report.name, report.dtype, report.contract) == ("Right", "float32", "exact")
    reasons = {law.name: law.reason for law in report.laws if law.status == "not offered"}
    assert reasons["window"] == "attention has no parameter for window_size"
    assert reasons["batch_slopes"] == "not declared: batch_slopes"
    assert reasons["decoding"] == "the adapter has no decode_step"


def test_what_raises_is_not_offered_unless_it_is_declared() -> None:
    class CausalOnly(Right):
        def __init__(self, error: Exception, **attributes: Any) -> None:
            self.error = error
            vars(self).update(attributes)

        def attention(self, query: Any, key: Any, value: Any, slopes: Any, is_causal: bool, q_offset: int) -> Any:
            if not is_causal:
                raise self.error
            return super().attention(query, key, value, slopes, is_causal, q_offset)

    refusal, laws = NotImplementedError("causal only"), ["causal", "symmetric", "offset"]
    report = check(CausalOnly(refusal), laws=laws)
    assert [law.status for law in report.laws] == ["passed", "not offered", "passed"]
    assert "causal only" in report.laws[1].reason
    report = check(CausalOnly(KeyError(False)), laws=laws)
    assert [law.status for law in report.laws] == ["passed", "failed", "passed"]
    assert report.diagnoses[0].sentence == "attention raised KeyError: False"
    report = check(CausalOnly(refusal, features={"symmetric", "lengths"}), laws=laws)
    assert [law.status for law in report.laws] == ["passed", "failed", "not offered"]
    assert [x.sentence for x in report.diagnoses] == ["attention raised NotImplementedError: causal only"]


def test_gradients_and_a_bias_need_not_take_all_that_attention_takes() -> None:
    reference = Mistaken()

    def attention(
        query: Any, key: Any, value: Any, slopes: Any, is_causal: bool, q_offset: int, window_size: Any = None
    ) -> Any:
        arguments = {"is_causal": is_causal, "q_offset": q_offset, "window_size": window_size}
        return reference.attention(query, key, value, slopes, **arguments)

    def attention_grad(query: Any, key: Any, value: Any, slopes: Any, grad_output: Any) -> Any:
        arguments = {"is_causal": True, "q_offset": key.shape[2] - query.shape[2]}
        return reference.attention_grad(query, key, value, slopes, grad_output=grad_output, **arguments)

    adapter = only(attention=attention, attention_grad=attention_grad)
    adapter.bias = lambda num_heads, q_len, kv_len: alibi_core.bias(num_heads, q_len, kv_len)
    laws = ["symmetric", "window", "gradients", "slope_gradients", "long_gradients", "causal_bias", "symmetric_bias"]
    report = check(adapter, laws=laws)
    found = {law.name: law for law in report.laws}
    assert found.pop("symmetric_bias").reason == "bias has no parameter for is_causal=False"
    assert {law.status for law in found.values()} == {"passed"}, report
    adapter.features = {"window"}
    report = check(adapter, laws=["gradients"])
    assert "unexpected keyword argument" in report.diagnoses[0].sentence


def test_a_kernel_may_take_masks_of_keys_and_narrow_heads_alone() -> None:
    class Narrow(Right):
        def attention(
            self, query: Any, key: Any, value: Any, slopes: Any, is_causal: bool, q_offset: int, mask: Any = True
        ) -> Any:
            if query.shape[3] > 256 or (np.ndim(mask) and mask.shape[2] > 1):
                raise NotImplementedError("narrow heads and masks of keys, please")
            back = np.arange(query.shape[2])[:, None] + q_offset - np.arange(key.shape[2])
            hidden = ((back < 0) & is_causal) | ~np.asarray(mask)
            return attended(query, key, value, -slopes[:, None, None] * np.abs(back), hidden)

    report = check(Narrow(), laws=["mask", "combined", "large"])
    assert report.passed, report
    assert {"mask", "pair_masks", "wide_heads"} & set(report.features) == {"mask"}


def test_a_kernel_of_gates_alone_is_alibi() -> None:
    def attention(
        query: Any, key: Any, value: Any, slopes: Any, is_causal: bool, q_offset: int, log_gates: Any = 0
    ) -> Any:
        if not is_causal or q_offset != key.shape[2] - query.shape[2]:
            raise NotImplementedError("plain causal attention")
        gates = log_gates - slopes[:, None] * np.ones((query.shape[0], 1, key.shape[2]), np.float32)
        bias = alibi_core.bias_from_gates(gates, query.shape[2])
        return attended(query, key, value, np.where(np.isinf(bias), 0, bias), np.isinf(bias))

    report = check(only(attention=attention))
    assert report.passed, report
    assert "log_gates" in report.features


def test_each_function_refuses_for_itself() -> None:
    class CausalGradients(Mistaken):
        def attention_grad(self, *tensors: Any, is_causal: bool, **arguments: Any) -> Any:
            if not is_causal:
                raise NotImplementedError("causal only")
            return super().attention_grad(*tensors, is_causal=is_causal, **arguments)

    adapter = CausalGradients()
    adapter.features = None  # type: ignore[assignment]
    report = check(adapter, laws=["symmetric", "gradients", "slope_gradients"])
    assert report.passed, report
    assert "symmetric" in report.features


def test_a_law_whose_cases_all_need_another_feature_is_not_offered() -> None:
    report = check(Mistaken(features={"nowhere"}), laws=["causal", "nowhere"])
    assert [law.status for law in report.laws] == ["passed", "not offered"]


def steps_of(query: Any, key: Any, value: Any, slopes: Any, cache: Any) -> Any:
    if cache is not None:
        key, value = (np.concatenate([seen, x], axis=2) for seen, x in zip(cache, (key, value), strict=True))
    if query.shape[1] != key.shape[1]:
        raise ValueError("as many key/value heads as query heads, please")
    return Right().attention(query, key, value, slopes, True, key.shape[2] - query.shape[2]), (key, value)


def test_what_decoding_offers_is_found_out_by_itself() -> None:
    assert check(only(decode_step=steps_of), laws=["decoding"]).passed
    assert check(only(decode_step=steps_of, attention=Right().attention), laws=["decoding"]).passed


def test_a_cache_that_is_written_in_place_cannot_go_on_twice() -> None:
    class InPlace(Mistaken):
        def decode_step(self, query: Any, key: Any, value: Any, slopes: Any, cache: Any) -> Any:
            start = 0 if cache is None else cache[2]
            room = cache or [np.zeros((*x.shape[:2], 64, x.shape[3]), x.dtype) for x in (key, value)]
            end = start + key.shape[2]
            for held, new in zip(room, (key, value), strict=False):
                held[:, :, start:end] = new
            keys, values = (x[:, :, :end] for x in room[:2])
            output = self.attention(query, keys, values, slopes, is_causal=True, q_offset=start)
            return output, (*room[:2], end)

    for adapter, expected in ((Mistaken(), "passed"), (InPlace(), "failed")):
        report = check(adapter, laws=["decoding", "continuations"])
        assert [law.status for law in report.laws] == ["passed", expected]


@pytest.mark.parametrize("features", [None, frozenset(FEATURES)])
def test_gradients_are_asked_for_as_an_adapter_takes_them(features: Any) -> None:
    asked = set()

    class Some(Mistaken):
        def attention_grad(self, *tensors: Any, wrt: Any = None, **arguments: Any) -> Any:
            asked.add(wrt)
            found = super().attention_grad(*tensors, wrt=wrt, **arguments)
            return found if wrt is None else tuple(found[name] for name in wrt)  # a tuple is in their order

    class All(Mistaken):
        def attention_grad(self, *tensors: Any, **arguments: Any) -> Any:
            assert "wrt" not in arguments
            return super().attention_grad(*tensors, **arguments)

    laws = ("gradients", "cotangents", "some_gradients")
    for adapter, status in ((Some(), "passed"), (All(), "not offered")):
        adapter.features = features  # type: ignore[assignment]
        report = check(adapter, laws=laws)
        assert [x.status for x in report.laws] == ["passed", "passed", status], report
    names = ("query", "key", "value", "slopes")
    single, pairs = ((name,) for name in names), itertools.combinations(names, 2)
    assert asked >= {None, *single, *pairs, names[:3]}


def test_a_constant_grad_output_is_a_number_to_a_library() -> None:
    weights = []

    def gradients(function: Any, arguments: Any, wrt: Any, weight: Any) -> Any:
        weights.append(weight)
        return [arguments[name] for name in wrt]

    library = Library(np, lambda values, dtype: np.asarray(values, dtype), np.asarray, gradients)
    tensor = np.ones((1, 2, 3, 4), np.float32)
    for grad_output in (2 * tensor, np.arange(24, dtype=np.float32).reshape(tensor.shape)):
        adapter = BackendAdapter("alibi_core", library, alibi_core.attention)
        adapter.attention_grad(tensor, tensor, tensor, np.ones(2), grad_output=grad_output, wrt=("key",))
    assert weights[0] == 2.0
    np.testing.assert_array_equal(weights[1], grad_output)


@pytest.mark.parametrize(
    ("change", "missing"),
    [
        (lambda found: {"query": found["query"]}, "key"),
        (lambda found: {}, "query"),
        (lambda found: {f"d{name[0]}": x for name, x in found.items()}, "query"),
    ],
)
def test_gradients_that_are_missing_are_named(change: Any, missing: str) -> None:
    def attention_grad(query: Any, key: Any, value: Any, slopes: Any, grad_output: Any, **arguments: Any) -> Any:
        found = Mistaken().attention_grad(query, key, value, slopes, grad_output=grad_output, **arguments)
        return change({name: x for name, x in found.items() if name != "future_slopes"})

    report = check(only(attention_grad=attention_grad), laws=["gradients", "slope_gradients"])
    assert f"attention_grad returned no gradient of {missing}" in [x.sentence for x in report.diagnoses]


def test_parameters_by_other_names_are_named() -> None:
    report = check(only(attention=lambda q, k, v, slopes, causal=True: v), laws=["symmetric"])
    assert report.laws[0].reason == "attention has no parameter for is_causal=False"
    assert (report.passed, report.exit_status) == (False, 2)
    assert "contract exact: nothing to check" in str(report)


def test_slopes_of_another_contract_are_told_whose_they_are() -> None:
    said = check(only(slopes=lambda n: alibi_core.slopes(n, contract="bloom"))).diagnoses
    assert [x.sentence.partition(":")[0] for x in said] == ["They are those of the bloom contract"]


def test_a_bias_alone_has_laws_of_its_own() -> None:
    report = check(only(bias=alibi_core.bias))
    assert {law.name for law in report.laws if law.status == "passed"} == {"causal_bias", "symmetric_bias", "conduct"}


@pytest.mark.parametrize(
    ("function", "given", "options", "error", "message"),
    [
        (check, [only()], {}, TypeError, "adapter must have one of the functions slopes, bias"),
        (check, [only(attention=3)], {}, TypeError, "adapter must have one of the functions"),
        (check, [only(slopes=len, dtype="float8")], {}, ValueError, "dtype must be one of"),
        (check, [only(slopes=len, contract="alibi")], {}, ValueError, "contract must be one of"),
        (check, [only(slopes=len, features="window")], {}, TypeError, "features must be a collection of names"),
        (check, [only(slopes=len, features=["windows"])], {}, ValueError, "features must be one of"),
        (check, [only(slopes=len, tolerance=1)], {}, ValueError, r"tolerance must be in \[0, 1\), got 1"),
        (check, [only(slopes=len, name=3)], {}, TypeError, "name of an adapter must be a string"),
        (check, [Right()], {"profile": "slow"}, ValueError, "profile must be one of"),
        (check, [Right()], {"seed": -1}, ValueError, "seed must not be negative"),
        (check, [Right()], {"laws": ["windows"]}, ValueError, "laws must be one of"),
        (check, [Right()], {"laws": "slopes"}, TypeError, "laws must be a collection of names, got the string"),
        (check, [Right], {}, TypeError, "adapter must be an instance where its functions take self, got the class"),
        (Mistaken, ["no such thing"], {}, ValueError, "mistakes must be names of MISTAKES, got no such thing"),
        (Mistaken, [], {"where": "nowhere"}, ValueError, "where must be one of"),
        (Mistaken, [], {"functions": ["foo"]}, ValueError, "functions must be one of 'slopes', .*, got 'foo'"),
        (Mistaken, [], {"dtype": "x"}, ValueError, "dtype must be one of 'float64', .*, got 'x'"),
        (installed_adapters, [], {"dtypes": ["float99"]}, ValueError, "dtypes must be one of .*, got 'float99'"),
        (installed_adapters, [], {"dtypes": "float32"}, TypeError, "dtypes must be a collection of names, got"),
    ],
)
def test_wrong_arguments_are_refused(
    function: Any, given: list[Any], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        function(*given, **options)


# --- How an adapter may misbehave -------------------------------------------------------------------------------------


class Misbehaving(Right):
    """The right attention, with something done to its result."""

    def __init__(self, change: Any) -> None:
        self.change = change

    def attention(self, query: Any, *rest: Any, **arguments: Any) -> Any:
        return self.change(super().attention(query, *rest, **arguments), query)


def raises(result: Any, query: Any) -> Any:
    if query.shape[2] == 7:
        raise ValueError("seven is too many\nfor me")
    return result


def exits(result: Any, query: Any) -> Any:
    sys.exit(3)


RNG = np.random.default_rng(0)
MISBEHAVIOUR = [
    (Misbehaving(raises), "causal", "attention raised ValueError: seven is too many"),
    (Misbehaving(exits), "causal", "attention raised SystemExit: 3"),
    (Misbehaving(lambda x, _: x[:, :1]), "causal", "attention returned shape (2, 1, 7, 5), expected (2, 3, 7, 5)"),
    (Misbehaving(lambda x, _: x.swapaxes(1, 2)), "causal", "attention returned [batch, length, heads, head_dim], exp"),
    (Misbehaving(lambda x, _: x.tolist()), "causal", "attention returned list, expected a NumPy array"),
    (Misbehaving(lambda x, _: x.astype(np.int32)), "causal", "attention returned int32, expected float32"),
    (Misbehaving(lambda x, _: x.astype(np.float64)), "conduct", "attention returned float64, expected float32"),
    (only(slopes=lambda n: np.full(n, np.inf, np.float32)), "slopes", "infinite where it should not be"),
    (only(slopes=lambda n: RNG.random(n, dtype=np.float32)), "slopes", "off by"),
]


@pytest.mark.parametrize(("adapter", "law", "message"), MISBEHAVIOUR)
def test_misbehaviour_is_reported_and_is_no_crash(adapter: Any, law: str, message: str) -> None:
    report = check(adapter, laws=[law])
    (found,) = report.laws
    assert found.status == "failed"
    assert message in found.counterexample.problem
    assert json.loads(report.to_json())["passed"] is False


def test_the_users_own_settings_of_numpy_change_nothing() -> None:
    with np.errstate(all="raise"):
        assert check(Right(), laws=["causal", "long", "mask"]).passed


# --- Reports ----------------------------------------------------------------------------------------------------------


def test_the_counterexample_is_small_the_same_for_a_seed_and_the_mistake_is_named() -> None:
    adapter = only(attention=signed, name="signed", features={"symmetric"})
    report, again = (check(adapter, seed=7, laws=["causal", "symmetric"]) for _ in range(2))
    causal, symmetric = report.laws
    assert (causal.status, symmetric.status) == ("passed", "failed")
    example = symmetric.counterexample
    assert "1 head of 1 feature, 2 queries, 2 keys, symmetric" in example.inputs
    assert abs(example.expected - example.actual) > example.budget
    assert [(x.counterexample, x.calls) for x in again.laws] == [(x.counterexample, x.calls) for x in report.laws]
    assert [x.key for x in report.diagnoses] == ["signed"]
    assert "uture keys are rewarded" in report.diagnoses[0].sentence


def test_a_report_says_first_what_matters_most() -> None:
    laws = ["slopes", "symmetric", "window", "decoding", "causal"]
    lines = str(check(only(attention=signed), laws=laws)).splitlines()
    starts = ["diagnosis: Future keys are rewarded", "failed", "passed", "not offered: slopes"]
    assert lines[-1] == (
        "  not offered: slopes (the adapter has no slopes); window (attention has no parameter for window_size); "
        "decoding (the adapter has no decode_step)"
    )
    order = [next(i for i, line in enumerate(lines) if line.strip().startswith(x)) for x in starts]
    assert order == sorted(order)


# --- The plugin -------------------------------------------------------------------------------------------------------


def test_the_plugin_makes_a_test_of_each_law(pytester: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    pytester.makepyfile("""
        import pytest
        from tests.conformance.test_kit import Right, signed

        @pytest.fixture(params=["right", "signed"])
        def alibi_adapter(request):
            class Signed:
                attention = staticmethod(signed)

            return Right() if request.param == "right" else Signed()

        def test_mine(alibi_law):
            alibi_law()

        @pytest.mark.parametrize(argnames="number", argvalues=[1])
        def test_another(number):
            pass

        @pytest.mark.parametrize(argnames="alibi_law", argvalues=["causal"], indirect=True)
        def test_chosen(alibi_law):
            pass
    """)
    collected = pytester.runpytest_subprocess("-p", "no:cacheprovider", "--collect-only")
    collected.stdout.fnmatch_lines([f"*{2 * len(LAWS) + 3} tests collected*"])
    some = "symmetric or lengths or another"
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-rf", "-v", "-k", some)
    result.assert_outcomes(passed=4, failed=1, skipped=4, deselected=2 * len(LAWS) - 6)
    result.stdout.fnmatch_lines(["*test_mine*signed-symmetric*FAILED*", "*Future keys are rewarded*"])
    result.stdout.no_fnmatch_line("*Traceback*")


def test_the_plugin_says_once_that_there_is_no_adapter(pytester: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    pytester.makepyfile("""
        import pytest

        def test_mine(alibi_law):
            alibi_law()

        @pytest.mark.parametrize("alibi_adapter", [object()])
        def test_of_a_parameter(alibi_law, alibi_adapter):
            pass

        def test_another():
            pass
    """)
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=len(LAWS) + 1, errors=1)
    result.stdout.fnmatch_lines(["*alibi_adapter must be a fixture of yours that returns an adapter, got none*"])


# --- The laws themselves ----------------------------------------------------------------------------------------------


def test_laws_are_named_once_and_say_what_they_need() -> None:
    assert len({law.name for law in LAWS}) == len(LAWS)
    for law in LAWS:
        assert law.statement
        assert not law.statement.endswith(".")
        assert law.needs <= set(FEATURES)
