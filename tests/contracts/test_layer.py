"""The attention layers: one function, three frameworks, one set of weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import alibi_core
from alibi_core.conformance.testing import Answer, Attention, penalties
from alibi_core.conformance.testing import assert_within_budget as assert_within
from tests.support.frameworks import FRAMEWORK, NAMES, NAMES_SLOW_IN_JAX, few_in_jax
from tests.support.layers import apply, decode, load, make_layer

SIZES = {"embed_dim": 30, "num_heads": 6}
CONFIGURATIONS = {
    "plain": {},
    "grouped": {"num_kv_heads": 2},
    "head_dim": {"num_kv_heads": 3, "head_dim": 7},
    "bias": {"bias": True},
    "encoder": {"is_causal": False},
    "window": {"window_size": 2},
    "learnable": {"learnable_slopes": True, "num_kv_heads": 1, "bias": True},
    "dense": {"implementation": "dense"},
    "forget gate": {"forget_gate": True, "num_kv_heads": 2},
    "sinks": {"sinks": True, "num_kv_heads": 2},
}


def weights(arguments: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return the weights of a layer, by their names in files."""
    rng = np.random.default_rng(0)
    embed_dim, heads = SIZES["embed_dim"], SIZES["num_heads"]
    head_dim = arguments.get("head_dim", embed_dim // heads)
    features, kv_features = heads * head_dim, arguments.get("num_kv_heads", heads) * head_dim
    shapes = {"q_proj": (features, embed_dim), "out_proj": (embed_dim, features)}
    shapes |= dict.fromkeys(("k_proj", "v_proj"), (kv_features, embed_dim))
    result = {f"{name}.weight": rng.standard_normal(shape) / np.sqrt(shape[1]) for name, shape in shapes.items()}
    if arguments.get("bias"):
        result |= {f"{name}.bias": rng.standard_normal(shape[0]) for name, shape in shapes.items()}
    if arguments.get("learnable_slopes"):
        result["log_slopes"] = np.log(rng.uniform(0.1, 1.0, heads))
    if arguments.get("forget_gate"):
        result |= {"forget_proj.weight": rng.normal(0, 0.1, (heads, embed_dim)), "forget_proj.bias": np.arange(heads)}
    if arguments.get("sinks"):
        result["sinks"] = np.arange(-1.0, 2.0, 0.5)
    return {name: value.astype(np.float32) for name, value in result.items()}


def exact(
    arguments: dict[str, Any], x: np.ndarray, context: np.ndarray | None = None, q_offset: int | None = None
) -> Answer:
    """Return a layer's output in float64, with the error that float32 may cause."""
    parameters = {name: value.astype(np.float64) for name, value in weights(arguments).items()}
    head_dim = arguments.get("head_dim", SIZES["embed_dim"] // SIZES["num_heads"])

    def project(name: str, features: np.ndarray) -> np.ndarray:
        return features @ parameters[f"{name}.weight"].T + parameters.get(f"{name}.bias", 0.0)

    context = x if context is None else context
    query, key, value = (
        project(name, y.astype(np.float64)).reshape(*y.shape[:2], -1, head_dim).swapaxes(1, 2)
        for name, y in (("q_proj", x), ("k_proj", context), ("v_proj", context))
    )
    slopes = np.asarray([2.0**e for e in (-2, -4, -6, -8, -1, -3)])  # canonical
    if "log_slopes" in parameters:
        slopes = np.exp(parameters["log_slopes"])
    rules = {name: arguments[name] for name in ("is_causal", "window_size") if name in arguments}
    bias = penalties((*query.shape[:3], key.shape[2]), slopes, q_offset=q_offset, **rules)
    if "forget_proj.bias" in parameters:  # in place of slopes, differences of running sums
        sums = np.cumsum(-np.logaddexp(0, -project("forget_proj", x.astype(np.float64))), axis=1).swapaxes(1, 2)
        bias = np.where(bias > -np.inf, sums[..., :, None] - sums[..., None, :], -np.inf)
    if "sinks" in parameters:  # a key of zeros without a value
        sinks = np.broadcast_to(parameters["sinks"][:, None, None], (*query.shape[:3], 1))
        bias = np.concatenate([np.broadcast_to(bias, (*query.shape[:3], key.shape[2])), sinks], axis=-1)
        key, value = (np.pad(y, ((0, 0), (0, 0), (0, 1), (0, 0))) for y in (key, value))
    attention = Attention(query, key, value, bias, head_dim**-0.5, "float32").output
    output = project("out_proj", attention.value.swapaxes(1, 2).reshape(*x.shape[:2], -1))
    # Each term of a projection is rounded by a relative 2**-24, and so are query, key and value; scores with them.
    size = np.abs(attention.value).max() + np.abs(value).max()
    scores = head_dim**-0.5 * np.abs(query).max() * np.abs(key).max() * head_dim
    relative = 2.0**-24 * (SIZES["embed_dim"] + 2) * (1 + 4 * scores) * 8
    budget = (relative * size + attention.budget.max()) * np.abs(parameters["out_proj.weight"]).sum(axis=1).max()
    return Answer(output, np.full_like(output, budget))


@pytest.fixture
def x() -> np.ndarray:
    return np.random.default_rng(1).standard_normal((2, 11, SIZES["embed_dim"])).astype(np.float32)


def layer_with_weights(name: str, arguments: dict[str, Any], tmp_path: Path) -> Any:
    save_file(weights(arguments), tmp_path / "weights.safetensors")
    layer = make_layer(name, **SIZES, **arguments)
    load(name, layer, tmp_path / "weights.safetensors")
    return layer


@pytest.mark.parametrize(
    ("name", "configuration"), few_in_jax(NAMES, CONFIGURATIONS, "grouped", "learnable", "forget gate", "sinks")
)
def test_layer_is_projections_around_attention(name: str, configuration: str, x: np.ndarray, tmp_path: Path) -> None:
    arguments = CONFIGURATIONS[configuration]
    assert_within(apply(name, layer_with_weights(name, arguments, tmp_path), x), exact(arguments, x))


@pytest.mark.parametrize("name", NAMES_SLOW_IN_JAX)
@pytest.mark.parametrize(
    ("configuration", "steps"),
    [("plain", [1] * 11), ("plain", [11]), *((x, [5, 1, 1, 4]) for x in ("grouped", *[*CONFIGURATIONS][5:]))],
)
def test_decoding_through_a_cache_equals_prefill(
    name: str, configuration: str, steps: list[int], x: np.ndarray, tmp_path: Path
) -> None:
    arguments = CONFIGURATIONS[configuration]
    layer = layer_with_weights(name, arguments, tmp_path)
    assert_within(decode(name, layer, x, layer.make_cache(2, 13), steps)[0], exact(arguments, x))


@pytest.mark.parametrize("name", [name for name in NAMES if name.id != "jax"])  # JAX's cache is not changed in place
def test_a_refused_call_leaves_the_cache_as_it_was(name: str, x: np.ndarray, tmp_path: Path) -> None:
    layer, framework = layer_with_weights(name, {}, tmp_path), FRAMEWORK[name]
    cache, answer = layer.make_cache(2, 20), exact({}, x)
    for part in (slice(0, 4), slice(4, 11)):
        with pytest.raises(ValueError, match="mask must"):
            layer(framework.array(9 * x[:, part]), mask=framework.array(np.ones((5, 5), dtype=bool)), cache=cache)
        found = framework.numpy(layer(framework.array(x[:, part]), cache=cache))
        assert_within(found, Answer(answer.value[:, part], answer.budget[:, part]))


@pytest.mark.parametrize("name", NAMES_SLOW_IN_JAX)
def test_sizes_may_be_numpy_integers_too_small_for_their_products(name: str) -> None:
    layer = make_layer(name, embed_dim=np.uint8(30), num_heads=np.uint8(20), head_dim=np.uint8(20))
    assert apply(name, layer, np.zeros((1, 2, 30), np.float32)).shape == (1, 2, 30)


@pytest.mark.parametrize("name", NAMES_SLOW_IN_JAX)
def test_a_shard_of_heads_takes_a_slice_of_the_global_slopes(name: str, x: np.ndarray, tmp_path: Path) -> None:
    whole, xp = weights({}), FRAMEWORK[name].xp
    total = np.zeros(x.shape)
    for shard in (slice(0, 2), slice(2, 6)):
        rows = slice(shard.start * 5, shard.stop * 5)
        part = {key: value[:, rows] if key == "out_proj.weight" else value[rows] for key, value in whole.items()}
        save_file({key: np.ascontiguousarray(value) for key, value in part.items()}, tmp_path / "part.safetensors")
        slopes = alibi_core.slopes(6, xp=xp)[shard]
        layer = make_layer(name, embed_dim=30, num_heads=shard.stop - shard.start, head_dim=5, slopes=slopes)
        load(name, layer, tmp_path / "part.safetensors")
        total += apply(name, layer, x)
    answer = exact({}, x)
    assert_within(total, Answer(answer.value, 2 * answer.budget))


OTHERS = [(True, None), (True, 2), (False, None), (False, -3)]


@pytest.mark.parametrize(("name", "form"), few_in_jax(NAMES, OTHERS, (True, 2)))
def test_a_layer_attends_to_another_sequence(
    name: str, form: tuple[bool, int | None], x: np.ndarray, tmp_path: Path
) -> None:
    is_causal, q_offset = form
    arguments = CONFIGURATIONS["grouped"] | {"is_causal": is_causal}
    layer = layer_with_weights(name, arguments, tmp_path)
    context = np.random.default_rng(2).standard_normal((2, 7, SIZES["embed_dim"])).astype(np.float32)
    found = apply(name, layer, x, context=context, **({} if q_offset is None else {"q_offset": np.int32(q_offset)}))
    assert_within(found, exact(arguments, x, context, q_offset))
    assert np.array_equal(apply(name, layer, x, context=x), apply(name, layer, x))


@pytest.mark.parametrize("name", NAMES_SLOW_IN_JAX)
def test_padding_is_masked_as_tokenizers_say_it(name: str, x: np.ndarray) -> None:
    layer, framework = make_layer(name, **SIZES, is_causal=False), FRAMEWORK[name]
    text = np.arange(11) >= np.asarray([[0], [4]])
    expected = apply(name, layer, x, mask=text[:, None, None, :])
    compiled = framework.compiled(lambda x, mask: layer(x, mask=mask))
    for mask in (text, text.astype(np.int32)):
        assert np.array_equal(apply(name, layer, x, mask=mask), expected)
        found = framework.numpy(compiled(framework.array(x), framework.array(mask)))
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
    cached = make_layer(name, **SIZES)
    steps = apply(name, cached, x, mask=text[:, None, None, :])
    for first in (text, text[:, :9]):  # a mask may go on over unused slots
        output, cache = decode(name, cached, x[:, :9], cached.make_cache(2, 11), [9], mask=framework.array(first))
        rest, _ = decode(name, cached, x[:, 9:], cache, [2], mask=framework.array(text.astype(np.int32)))
        np.testing.assert_allclose(np.concatenate([output, rest], axis=1), steps, rtol=0, atol=1e-5)


REFUSED = [
    ({"x": (2, 11)}, r"x must have shape \(batch, length, 30\)"),
    ({"x": (2, 11, 29)}, r"x must have shape \(batch, length, 30\)"),
    ({"x": (1, 2, 11, 30)}, r"x must have shape \(batch, length, 30\)"),
    ({"cache": (2, 10)}, "cache must have room for 11 more tokens, got max_length 10 with 0 in use"),
    ({"cache": (3, 20)}, r"key must have shape .*, got \(2, "),
    ({"cache": (2, 20), "is_causal": False}, "cache must be None when is_causal=False"),
    ({"q_offset": 2}, "q_offset must be None without a context"),
    ({"lengths": [3, 6]}, "lengths must be None without a cache"),
    ({"context": (2, 11, 30), "cache": (2, 20)}, "cache must be None with a context"),
    ({"context": (1, 11, 30)}, "context must have the batch of x, 2, got 1"),
    ({"context": (2, 11, 3)}, r"context must have shape \(batch, length, 30\), got"),
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("given", "message"), REFUSED, ids=str)
def test_a_layer_refuses(name: str, given: dict[str, Any], message: str) -> None:
    """``given`` has shapes of arrays, and the batch size and length of a cache."""
    options, array = dict(given), FRAMEWORK[name].array
    x = array(np.ones(options.pop("x", (2, 11, 30))))
    layer = make_layer(name, **SIZES, is_causal=options.pop("is_causal", True))
    if "context" in given:
        options["context"] = array(np.ones(given["context"]))
    if "cache" in given:
        options["cache"] = make_layer(name, **SIZES).make_cache(*given["cache"])
    with pytest.raises(ValueError, match=f"^{message}"):
        layer(x, **options)


@pytest.mark.parametrize("name", NAMES_SLOW_IN_JAX)
def test_a_printed_layer_shows_what_changes_its_result(name: str) -> None:
    shown = repr(make_layer(name, **SIZES, window_size=2, learnable_slopes=True))
    assert "window_size=2" in shown
    assert ("log_slopes" if name == "jax" else "learnable_slopes=True") in shown  # Flax prints all attributes
    assert "window_size" not in repr(make_layer(name, **SIZES)) or name == "jax"
