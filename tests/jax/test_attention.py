"""JAX alone: transformations, traced arguments, float64 on demand, layers of NNX, Flax's own attention modules."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from alibi_core.conformance.testing import Answer, Attention, penalties
from alibi_core.conformance.testing import assert_within_budget as assert_within

jax = pytest.importorskip("jax")
nnx = pytest.importorskip("flax.nnx")
nn = pytest.importorskip("flax.linen")
import jax.numpy as jnp  # noqa: E402
from jax import export  # noqa: E402
from safetensors.numpy import save_file  # noqa: E402

import alibi_core  # noqa: E402
import alibi_jax  # noqa: E402
from tests.support.frameworks import JAX  # noqa: E402

BATCH, HEADS, KV_HEADS, HEAD_DIM = 2, 6, 3, 5
IMPLEMENTATIONS = pytest.mark.parametrize("implementation", ["tiled", pytest.param("dense", marks=pytest.mark.slow)])
SLOPES = np.asarray([0.5, 0.25, 0.3, 0.0, 1.0, 2.0**-8], np.float32)
FUTURE = np.asarray([0.1, 0.7, 0.0, 0.3, 0.5, 2.0], np.float32)


def tensors(q_len: int = 7, kv_len: int = 11, dtype: str = "float32") -> list[jax.Array]:
    """Return query, key and value, length first."""
    rng, sizes = np.random.default_rng(0), ((q_len, HEADS), (kv_len, KV_HEADS), (kv_len, KV_HEADS))
    return [jnp.asarray(rng.standard_normal((BATCH, *size, HEAD_DIM)), dtype) for size in sizes]


def exact(
    *qkv: Any, slopes: Any = SLOPES, scale: float = HEAD_DIM**-0.5, dtype: str = "float32", **arguments: Any
) -> Answer:
    """Return the exact output, ``[batch, q_len, num_heads, head_dim]``."""
    query, key, value = (np.swapaxes(np.asarray(x, np.float64), 1, 2) for x in qkv)
    bias = penalties((*query.shape[:3], key.shape[2]), slopes, **arguments)
    answer = Attention(query, key, value, bias=bias, scale=scale, dtype=dtype).output
    return Answer(np.swapaxes(answer.value, 1, 2), np.swapaxes(answer.budget, 1, 2))


# --- Transformations ------------------------------------------------------------------------------------------------


@IMPLEMENTATIONS
def test_transformations_keep_attention_exact(implementation: str) -> None:
    qkv = tensors()
    answer = exact(*qkv, is_causal=False, future_slopes=FUTURE, scale=0.7)
    options = {"implementation": implementation, "scale": 0.7, "is_causal": False, "future_slopes": jnp.asarray(FUTURE)}
    function = functools.partial(alibi_jax.attention, **options)
    mapped = jax.vmap(function, in_axes=(0, 0, 0, None))
    for transformed in (mapped, jax.jit(mapped), jax.checkpoint(function)):
        assert_within(np.asarray(transformed(*qkv, jnp.asarray(SLOPES)), np.float64), answer)

    def gated(query: jax.Array, key: jax.Array, value: jax.Array, slopes: jax.Array) -> jax.Array:
        """Constant gates are causal ALiBi."""
        gates = -jnp.broadcast_to(slopes, (*key.shape[:-2], HEADS))
        return alibi_jax.attention(query, key, value, log_gates=gates, scale=0.7, implementation=implementation)

    answer = exact(*qkv, scale=0.7)
    for transformed in (jax.jit(jax.vmap(gated, in_axes=(0, 0, 0, None))), jax.checkpoint(gated)):
        assert_within(np.asarray(transformed(*qkv, jnp.asarray(SLOPES)), np.float64), answer)


@IMPLEMENTATIONS
@pytest.mark.parametrize("per_entry", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_traced_offset_serves_all_positions_with_one_compilation(implementation: str, per_entry: bool) -> None:
    qkv, traces = tensors(q_len=2), []

    @jax.jit
    def attend(q_offset: jax.Array) -> jax.Array:
        traces.append(q_offset)
        rules = {"window_size": 4, "q_offset": q_offset, "implementation": implementation}
        return alibi_jax.attention(*qkv, jnp.asarray(SLOPES), **rules)

    for offset in (-1, 0, 9):  # at -1 the first query sees no key
        offsets = np.asarray([offset, 3] if per_entry else offset, np.int32)
        answer = exact(*qkv, q_offset=offsets, window_size=4)
        assert_within(np.asarray(attend(jnp.asarray(offsets)), np.float64), answer)
    assert len(traces) == 1


@pytest.mark.slow
@IMPLEMENTATIONS
def test_a_query_that_sees_no_key_makes_no_nan_on_the_way(implementation: str) -> None:
    mask = jnp.ones((7, 11), bool).at[3].set(False)

    def loss(*inputs: jax.Array) -> jax.Array:
        return alibi_jax.attention(*inputs, mask=mask, implementation=implementation).sum()

    with jax.debug_nans(True):
        gradients = jax.jit(jax.grad(loss, argnums=range(4)))(*tensors(), jnp.asarray(SLOPES))
    np.testing.assert_array_equal(gradients[0][:, 3], 0)
    assert all(np.abs(gradient).max() > 0 for gradient in gradients)


def test_uncompiled_dense_attention_makes_no_nan_on_the_way() -> None:
    with jax.debug_nans(True):
        alibi_jax.attention(*tensors(), implementation="dense")


@pytest.mark.parametrize("transformation", [jax.grad, pytest.param(jax.jit, marks=pytest.mark.slow)])
def test_jax_debug_nans_names_attention_where_a_nan_appears(transformation: Callable[..., Any]) -> None:
    x = jnp.full((1, 4, 2, 4), 1e30)  # products overflow
    attend = transformation(lambda query: jnp.sum(alibi_jax.attention(query, x, x, implementation="tiled")))
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match=r"\(nan\) encountered in alibi_attention"):
        attend(x)


DERIVATIVES: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (x,)),
    "linearize": lambda f: lambda x: jax.linearize(f, x)[1](x),
    "grad of grad": lambda f: jax.grad(lambda x: jnp.sum(jax.grad(f)(x) ** 2)),
    "vmap of hessian": lambda f: jax.vmap(jax.hessian(f)),
}


@pytest.mark.parametrize(
    "kind", [pytest.param(x, marks=[] if x == "grad of grad" else pytest.mark.slow) for x in DERIVATIVES]
)
@pytest.mark.parametrize("by", ["slopes", pytest.param("query", marks=pytest.mark.slow)])
def test_second_derivatives_are_those_of_dense_attention_which_alone_has_forward_mode(kind: str, by: str) -> None:
    arrays = dict(zip(("query", "key", "value"), jax.random.normal(jax.random.key(0), (3, 1, 3, 2, 2)), strict=True))
    arrays["slopes"] = jnp.asarray([0.5, 0.25])
    x = arrays.pop(by)
    x = jnp.stack([x, 2 * x]) if "vmap" in kind else x

    def loss(implementation: str, x: jax.Array) -> jax.Array:
        return jnp.sum(alibi_jax.attention(**arrays, **{by: x}, implementation=implementation) ** 2)

    tiled, dense = (DERIVATIVES[kind](functools.partial(loss, name)) for name in ("tiled", "dense"))
    expected = dense(x)
    if kind in ("jvp", "linearize"):
        with pytest.raises(TypeError, match="forward-mode"):
            tiled(x)
    else:
        np.testing.assert_allclose(jax.jit(tiled)(x), expected, atol=1e-5)


@pytest.mark.slow
def test_reverse_mode_goes_through_every_other_transformation() -> None:
    x = jax.random.normal(jax.random.key(0), (2, 1, 8, 2, 4))

    def loss(implementation: str, query: jax.Array) -> jax.Array:
        def attend(query: jax.Array, _: Any) -> tuple[jax.Array, None]:
            return alibi_jax.attention(query, x[0], x[1], implementation=implementation), None

        return jnp.sum(jax.lax.scan(jax.checkpoint(attend), query, None, length=2)[0] ** 2)

    for outer in (
        lambda f: jax.jit(jax.vmap(jax.grad(f))),
        lambda f: jax.grad(lambda query: jnp.sum(jax.vmap(f)(query))),
    ):
        found, expected = (outer(functools.partial(loss, name))(x) for name in ("tiled", "dense"))
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_a_mapped_axis_may_be_empty() -> None:
    x = jnp.zeros((0, 2, 5, 4, 3))
    both = jax.value_and_grad(lambda x: jnp.sum(alibi_jax.attention(x, x, x, implementation="tiled")))
    value, gradient = jax.vmap(both)(x)
    assert (value.shape, gradient.shape) == ((0,), x.shape)


@pytest.mark.slow
def test_attention_runs_without_being_compiled() -> None:
    qkv = tensors()
    with jax.disable_jit():
        found = alibi_jax.attention(*qkv, implementation="tiled")
    np.testing.assert_allclose(found, alibi_jax.attention(*qkv, implementation="dense"), atol=2e-6)


def test_programs_of_gates_do_not_grow_with_the_length() -> None:
    short, long = (
        str(jax.make_jaxpr(lambda gates: alibi_core.bias_from_gates(gates, 3))(jnp.zeros((2, length))))
        for length in (64, 65_536)
    )
    assert short.count(" = ") == long.count(" = ")


# --- Programs of users, in which XLA sees repeated numbers, sums and squares ------------------------------------------


def test_gradients_of_other_arguments_before_change_nothing() -> None:
    x, slopes = jax.random.normal(jax.random.key(0), (1, 3, 2, 4)), jnp.ones(2)

    def loss(query: jax.Array, slopes: jax.Array) -> jax.Array:
        return jnp.sum(alibi_jax.attention(query, x, x, slopes) ** 2)

    expected = [jax.grad(loss, argnums=n)(x, slopes) for n in (0, 1)]
    # Rematerialisation differentiates the traced function anew, after the gradients of each argument.
    for n, gradient in enumerate(expected):
        np.testing.assert_allclose(jax.grad(jax.checkpoint(loss), argnums=n)(x, slopes), gradient, atol=1e-5)


# A user's program may add a sum or a maximum of the result to a fusion.
@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["tiled", "dense"])
@pytest.mark.parametrize(("constant", "form"), [("value", "causal"), ("key", "symmetric")])
def test_repeated_numbers_for_keys_or_values_are_right_beside_a_sum(
    implementation: str, constant: str, form: str
) -> None:
    tensors = dict(
        zip(("query", "key", "value"), jax.random.normal(jax.random.key(0), (3, 1, 128, 4, 32)), strict=True)
    )

    def total(implementation: str, tensors: Any) -> Any:
        tensors = tensors | {constant: jnp.ones_like(tensors[constant])}
        return alibi_jax.attention(**tensors, is_causal=form == "causal", implementation=implementation).sum(axis=1)

    with jax.disable_jit():
        expected = total("dense", tensors)
    found = jax.jit(total, static_argnums=0)(implementation, tensors)
    np.testing.assert_allclose(found, expected, atol=128 * 128 * 2.0**-24 * 4)  # sums of 128 rows of 128 values up to 4


@pytest.mark.slow
def test_sums_of_gradients_are_right() -> None:
    query, *rest = jax.random.normal(jax.random.key(0), (3, 1, 128, 4, 32))

    def norms(implementation: str, *tensors: Any) -> Any:
        gradient = jax.grad(lambda *x: alibi_jax.attention(*x, implementation=implementation).sum(), argnums=2)
        return (gradient(*tensors) ** 2).sum()

    with jax.disable_jit():
        expected = norms("dense", query, *rest)
    np.testing.assert_allclose(jax.jit(norms, static_argnums=0)("tiled", query, *rest), expected, rtol=128 * 2.0**-24)


# --- Settings of JAX ------------------------------------------------------------------------------------------------


@IMPLEMENTATIONS
def test_float64_is_exact_to_its_own_rounding(implementation: str) -> None:
    slopes = SLOPES.astype(np.float64) / 3
    with jax.enable_x64(True):
        qkv = tensors(dtype="float64")
        result = jax.jit(functools.partial(alibi_jax.attention, implementation=implementation))(*qkv, slopes)
    assert result.dtype == jnp.float64
    assert_within(np.asarray(result), exact(*qkv, slopes=slopes, dtype="float64"))


@IMPLEMENTATIONS
def test_float32_stays_float32_where_float64_is_enabled(implementation: str) -> None:
    qkv = tensors()
    with jax.enable_x64(True):
        offset = jnp.asarray(4, jnp.int64)
        attend = functools.partial(alibi_jax.attention, implementation=implementation, q_offset=offset)
        jaxpr = jax.make_jaxpr(attend)(*qkv, jnp.asarray(SLOPES))
        result = attend(*qkv, jnp.asarray(SLOPES))
    assert not re.search(r"f64\[[1-9]", str(jaxpr))  # but for Python numbers, which are scalars
    assert_within(np.asarray(result, np.float64), exact(*qkv))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int64", "uint64"])
def test_offsets_of_64_bits(kind: str) -> None:
    qkv, limits = tensors(3, 700), np.iinfo(kind)
    with jax.enable_x64(True):
        for offset in (limits.min, limits.min // 2, 100, limits.max // 2 + 3, limits.max):
            found = alibi_jax.attention(*qkv, q_offset=jnp.asarray([offset] * 2, kind), implementation="tiled")
            near = int(np.clip(offset, -(2**20), 2**20))  # from far away all distances grow by the same number
            expected = alibi_jax.attention(*qkv, q_offset=near, implementation="dense")
            np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["tiled", "dense"])
def test_users_may_refuse_promotion_of_ranks(implementation: str) -> None:
    x, mask = jnp.ones((2, 5, 2, 4)), jnp.ones((2, 1, 5, 5), bool)

    def loss(x: jax.Array, slopes: jax.Array) -> jax.Array:
        result = alibi_jax.attention(x, x, x, slopes, mask=mask, is_causal=False, implementation=implementation)
        return jnp.sum(result**2)

    with jax.numpy_rank_promotion("raise"):
        for function in (jax.grad(loss, argnums=(0, 1)), jax.hessian(loss, argnums=1)):
            jax.jit(function).lower(x, jnp.ones(2))
        alibi_jax.attention(x, x, x, mask=mask, added_bias=jnp.zeros((5, 5)))
        alibi_jax.explain(x, x, x)
        cache = alibi_jax.KVCache(2, 2, 16, 4).append(x, x, lengths=jnp.asarray([1, 3]))
        cache.append(x, x).truncate(2).attend(x[:, :1])


def test_users_may_refuse_promotion_of_dtypes() -> None:
    low = jnp.ones((1, 1, 2, 4), jnp.bfloat16)
    cache = alibi_jax.KVCache(1, 2, 8, 4, dtype=jnp.bfloat16)
    with jax.numpy_dtype_promotion("strict"):  # tracing is enough to see one
        assert jax.eval_shape(lambda: cache.append(low, low).attend(low, jnp.ones(2))).dtype == jnp.bfloat16


def test_users_of_encoders_may_refuse_promotion_of_dtypes_and_ranks() -> None:
    config = alibi_jax.AlibiConfig(num_layers=1, embed_dim=8, num_heads=2, is_causal=False)
    encoder, state = nnx.split(nnx.eval_shape(lambda: alibi_jax.AlibiEncoder(config, 11, rngs=nnx.Rngs(0))))
    tokens, lengths = jnp.ones((2, 7), int), jnp.asarray([3, 7])
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        for pooling in ("mean", "cls"):
            for rules in ({"lengths": lengths}, {"mask": jnp.arange(7)[None] < lengths[:, None]}):

                def encode(state: Any, rules: dict[str, jax.Array], pooling: str = pooling) -> jax.Array:
                    return nnx.merge(encoder, state).encode(tokens, pooling=pooling, **rules)

                assert jax.eval_shape(encode, state, rules).shape == (2, 8)


# --- Arguments that are refused -------------------------------------------------------------------------------------


def make_layer(**options: Any) -> alibi_jax.AlibiAttention:
    options = {"num_kv_heads": KV_HEADS, "slopes": SLOPES, "rngs": nnx.Rngs(0)} | options
    return alibi_jax.AlibiAttention(EMBED_DIM, HEADS, **options)


EMBED_DIM = HEADS * HEAD_DIM
X = jnp.ones((BATCH, 1, EMBED_DIM))
QKV = tensors()
NEGATIVE = jnp.asarray(-SLOPES)
REFUSED: list[tuple[type[Exception], str, Callable[[jax.Array], Any]]] = [  # each call is given a traced number
    (TypeError, "is_causal must be True or False, got", lambda x: alibi_jax.attention(*QKV, is_causal=x)),
    (TypeError, "window_size must be an integer, got", lambda x: alibi_jax.attention(*QKV, window_size=x)),
    (TypeError, "scale must be a real number, got", lambda x: alibi_jax.attention(*QKV, scale=x)),
    (TypeError, "tolerance must be a real number, got", lambda x: alibi_jax.attention(*QKV, tolerance=x)),
    (ValueError, "slopes must not be negative", lambda x: alibi_jax.attention(x * QKV[0], *QKV[1:], NEGATIVE)),
    (
        TypeError,
        "dropout_key must be a key, got 3; jax.random.key makes one",
        lambda x: alibi_jax.attention(*QKV, dropout=0.1, dropout_key=3),
    ),
    (
        TypeError,
        "^dtype must be a real floating dtype of jax.numpy, got 'float31'",
        lambda x: alibi_jax.KVCache(2, 2, 8, 4, dtype="float31"),
    ),
    (TypeError, "param_dtype must be a real floating .*, got 'float31'", lambda x: make_layer(param_dtype="float31")),
    (TypeError, "param_dtype must be .* JAX has enabled, got float64", lambda x: make_layer(param_dtype=jnp.float64)),
    (TypeError, r"rngs must be flax.nnx.Rngs, got 0; nnx.Rngs\(0\) makes one", lambda x: make_layer(rngs=0)),
    (ValueError, "slopes must be known when .*, got a traced array", lambda x: make_layer(slopes=x * SLOPES)),
    (
        TypeError,
        "cache must be an alibi_jax.KVCache, as make_cache returns it, got tuple",
        lambda x: make_layer()(X, cache=()),
    ),
    (
        ValueError,
        "cache must have the dtype of the layer's keys, float32, got bfloat16",
        lambda x: make_layer()(X, cache=make_layer(param_dtype=jnp.bfloat16).make_cache(BATCH, 9)),
    ),
]


@pytest.mark.parametrize(("error", "message", "call"), REFUSED, ids=lambda x: x if isinstance(x, str) else "")
def test_bad_arguments_are_refused_while_a_function_is_traced(
    error: type[Exception], message: str, call: Callable[[jax.Array], Any]
) -> None:
    with pytest.raises(error, match=message):
        jax.eval_shape(call, jnp.asarray(1.0))


RULES = {
    "q_offset": np.asarray([2, 0]),
    "mask": np.arange(5) != 1,
    "segment_ids": (np.asarray([[1, 1, 2], [1, 1, 1]]), np.asarray([[1, 1, 2, 2, 1], [1, 1, 1, 3, 1]])),
    "positions": (np.asarray([4.0, 1.5, 2.0]), np.arange(5.0)),
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_constants_of_numpy_are_those_of_jax(rule: str, compiled: bool) -> None:
    rng, given = np.random.default_rng(0), RULES[rule]
    tensors = [jnp.asarray(rng.standard_normal((2, n, 2, 4)), jnp.float32) for n in (3, 5, 5)]

    def attend(*tensors: jax.Array) -> list[jax.Array]:
        return [alibi_jax.attention(*tensors, **{rule: x}) for x in (given, jax.tree.map(jnp.asarray, given))]

    np.testing.assert_array_equal(*(jax.jit(attend) if compiled else attend)(*tensors))
    largest = {"q_offset": 2**31, "segment_ids": 2**40}.get(rule, 1 / 3)
    if rule != "mask":
        odd = jax.tree.map(lambda x: x + largest, given)
        refused = functools.partial(alibi_jax.attention, *tensors, **{rule: odd})
        with pytest.raises(ValueError, match=rf"^{rule}.* must have values of (int|float)32, got others in \w+64"):
            (jax.jit(refused) if compiled else refused)()


def test_lengths_that_are_symbols_are_refused_in_words() -> None:
    (length,) = export.symbolic_shape("length")
    symbolic, known = (jax.ShapeDtypeStruct((1, n, 2, 4), jnp.float32) for n in (length, 1))
    program = export.export(jax.jit(alibi_jax.attention))
    with pytest.raises(
        ValueError, match="query must have .*length.* only axes of the batch may be symbols.*'dense'.*pad"
    ):
        program(symbolic, symbolic, symbolic)
    with pytest.raises(ValueError, match="key must have"):
        program(known, symbolic, symbolic)
    gated = export.export(jax.jit(functools.partial(alibi_jax.attention, implementation="dense")))
    with pytest.raises(ValueError, match="query must have .*length.*'dense' and no log_gates"):
        gated(symbolic, symbolic, symbolic, log_gates=jax.ShapeDtypeStruct((1, length, 2), jnp.float32))
    with pytest.raises(ValueError, match="kv_len must be a number, got the symbol length"):
        export.export(jax.jit(alibi_core.bias_from_gates))(jax.ShapeDtypeStruct((2, length), jnp.float32))
    config = alibi_jax.AlibiConfig(num_layers=1, embed_dim=8, num_heads=2)
    model, texts = (
        alibi_jax.AlibiLanguageModel(config, 9, rngs=nnx.Rngs(0)),
        jax.ShapeDtypeStruct((1, length), jnp.int32),
    )
    for make in (
        lambda tokens: model.generate(tokens, 1),
        lambda tokens: model.transformer.make_caches(1, tokens.shape[1])[0].keys,
    ):
        with pytest.raises(ValueError, match="length.* must be a number, got the symbol length"):
            export.export(jax.jit(make))(texts)


@pytest.mark.parametrize("rules", [{}, {"is_causal": False}, {"window_size": 3}, {"q_len": 1}, {"q_len": 5}], ids=str)
def test_dense_attention_and_bias_are_exported_for_any_length(rules: dict[str, Any]) -> None:
    rules = dict(rules)
    q_len = rules.pop("q_len", None)

    def attend(query: jax.Array, key: jax.Array, **others: jax.Array) -> Any:
        bias = alibi_core.bias(4, query.shape[1], key.shape[1], is_causal=rules.get("is_causal", True), xp="jax")
        return alibi_jax.attention(query, key, key, implementation="dense", **others, **rules), bias

    def inputs(batch: int, length: int) -> dict[str, jax.Array]:
        random = np.random.default_rng(0)
        query, key = (random.normal(size=(batch, n, 4, 8)) for n in (q_len or length, length))
        found = {"query": query, "key": key, "mask": random.random((batch, 1, 1, length)) < 0.7}
        if q_len is None:
            found["segment_ids"] = np.sort(random.integers(0, 3, (batch, length)), axis=1)
        return {name: JAX.array(x) for name, x in found.items()}

    batch, length, queries = export.symbolic_shape("batch, length, queries")
    shapes = {
        name: tuple({2: batch, 5: queries, 7: length}.get(n, n) for n in x.shape) for name, x in inputs(2, 7).items()
    }
    described = {name: jax.ShapeDtypeStruct(shapes[name], x.dtype) for name, x in inputs(2, 7).items()}
    program = export.export(jax.jit(attend))(**described)
    for given in (inputs(2, 7), inputs(1, 1)):
        for found, expected in zip(program.call(**given), attend(**given), strict=True):
            np.testing.assert_allclose(found, expected, atol=1e-6)


# --- Layers and models of NNX ---------------------------------------------------------------------------------------


def inputs(length: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((BATCH, length, EMBED_DIM)).astype(np.float32)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"dtype": jnp.bfloat16}, {"param_dtype": jnp.bfloat16}], ids=str)
def test_dtypes_of_a_model_are_those_asked_for(options: dict[str, type]) -> None:
    config = alibi_jax.AlibiConfig(num_layers=1, embed_dim=28, num_heads=4, num_kv_heads=2, bias=True)
    model, tokens = alibi_jax.AlibiLanguageModel(config, 31, **options, rngs=nnx.Rngs(0)), jnp.asarray([[3, 1, 4, 1]])
    parameters = jax.tree.leaves(nnx.state(model, nnx.Param))
    assert {x.dtype for x in parameters} == {jnp.dtype(options.get("param_dtype", jnp.float32))}
    assert model(tokens).dtype == jnp.bfloat16
    assert model.generate(tokens, 2).shape == (1, 6)


@pytest.mark.parametrize(
    "options",
    [{}, pytest.param({"lengths": [3, 7], "eos_token_id": 5, "temperature": 1.0}, marks=pytest.mark.slow)],
    ids=["alike", "lengths, ends, draws"],
)
def test_texts_of_nearly_the_same_length_share_compiled_programs(
    options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    config = alibi_jax.AlibiConfig(num_layers=1, embed_dim=28, num_heads=4, num_kv_heads=2)
    model = alibi_jax.AlibiLanguageModel(config, 31, rngs=nnx.Rngs(0))
    options = options | ({"key": jax.random.key(0)} if "temperature" in options else {})
    compiled = []
    for length, new in ((7, 4), (9, 3), (16, 12)):
        tokens = jnp.asarray(np.arange(2 * length, dtype=np.int32).reshape(2, -1) % 31)
        caplog.clear()
        with jax.log_compiles():
            found = model.generate(tokens, new, **options)
        assert isinstance(found, jax.Array)
        assert found.shape == (2, length + new)
        compiled.append([x.message for x in caplog.records if x.message.startswith("Finished XLA compilation")])
    assert compiled[0]
    assert compiled[1:] == [[], []]


WEIGHTS = {
    f"{name}_proj.weight": np.random.default_rng(size).standard_normal((size, EMBED_DIM)).astype(np.float32)
    for name, size in (("q", 30), ("k", 15), ("v", 15), ("out", 30))
}


def test_weights_are_loaded_in_the_dtype_of_a_layer_that_may_be_shapes_alone(tmp_path: Any) -> None:
    path = tmp_path / "layer.safetensors"
    low, layer = (
        nnx.eval_shape(lambda dtype=dtype: make_layer(param_dtype=dtype)) for dtype in ("bfloat16", "float32")
    )
    with pytest.raises(ValueError, match="module must have numbers to save, got shapes of nnx.eval_shape"):
        alibi_jax.save_weights(low, path)
    with pytest.raises(TypeError, match="module must be a layer or model of Flax NNX, got int"):
        alibi_jax.save_weights(3, path)
    save_file(WEIGHTS, path)
    alibi_jax.load_weights(low, path)
    np.testing.assert_array_equal(low.v_proj.kernel[...], WEIGHTS["v_proj.weight"].T.astype(jnp.bfloat16))
    alibi_jax.save_weights(low, path)
    alibi_jax.load_weights(layer, path)
    assert (low.v_proj.kernel.dtype, layer.v_proj.kernel.dtype) == (jnp.bfloat16, jnp.float32)
    np.testing.assert_array_equal(layer.v_proj.kernel[...], low.v_proj.kernel.astype(jnp.float32))


def test_a_file_that_does_not_fit_is_refused_and_changes_nothing(tmp_path: Any) -> None:
    layer, path = nnx.eval_shape(make_layer), tmp_path / "layer.safetensors"
    save_file(WEIGHTS, path)
    alibi_jax.load_weights(layer, path)
    zeros = {name: np.zeros_like(x) for name, x in WEIGHTS.items()}
    bad = {
        r"got \['v_proj.weight'\] missing and none unknown": {k: v for k, v in zeros.items() if k != "v_proj.weight"},
        r"got none missing and \['log_slopes'\] unknown": zeros | {"log_slopes": np.zeros(6, np.float32)},
        r"k_proj.weight in .* must have shape \(15, 30\), got \(30, 15\)": zeros
        | {"k_proj.weight": np.zeros((30, 15), np.float32)},
        "must be of floating numbers, got int32": {name: x.astype(np.int32) for name, x in zeros.items()},
        "must be a safetensors file of floating numbers, got ": b"cut off",
    }
    for message, content in bad.items():
        path.write_bytes(content) if isinstance(content, bytes) else save_file(content, path)
        with pytest.raises(ValueError, match=message):
            alibi_jax.load_weights(layer, path)
        np.testing.assert_array_equal(layer.q_proj.kernel[...].T, WEIGHTS["q_proj.weight"])
    save_file(zeros, path)
    alibi_jax.load_weights(layer, path)
    np.testing.assert_array_equal(layer.q_proj.kernel[...], 0)


# --- Flax's own attention modules -----------------------------------------------------------------------------------

PROMPT, TOTAL = 5, 13


def exact_module(x: np.ndarray, **rules: Any) -> Answer:
    """Return the exact result of a module whose query, key, value and output are its input."""
    heads = x.reshape(*x.shape[:2], HEADS, HEAD_DIM)
    answer = exact(heads, heads, heads, **rules)  # Linen's scale is the default, too
    return Answer(answer.value.reshape(x.shape), answer.budget.reshape(x.shape))


def linen_module(length: int, decode: bool = False, **options: Any) -> tuple[Any, Any]:
    """Return a Linen module, and its variables, by which query, key, value and output are its input."""
    function = alibi_jax.attention_fn(jnp.asarray(SLOPES), **options)
    module = nn.MultiHeadDotProductAttention(num_heads=HEADS, use_bias=False, decode=decode, attention_fn=function)
    variables = module.init(jax.random.key(0), jnp.zeros((BATCH, length, EMBED_DIM)))
    return module, variables | {"params": jax.tree.map(identity, variables["params"])}


def identity(kernel: jax.Array) -> jax.Array:
    return jnp.eye(EMBED_DIM).reshape(kernel.shape)


def test_linen_masks_are_respected() -> None:
    x, mask = inputs(7), np.random.default_rng(5).random((BATCH, 1, 7, 7)) < 0.6
    module, variables = linen_module(7, is_causal=False, window_size=4)
    result = module.apply(variables, x, mask=jnp.asarray(mask, np.float32))
    assert_within(np.asarray(result, np.float64), exact_module(x, is_causal=False, mask=mask, window_size=4))


# Distances from the end of a long cache would outweigh the scores. Padding on the right may not see itself.
@pytest.mark.parametrize(
    ("padding", "max_length"),
    [("left", TOTAL), *(pytest.param(*x, marks=pytest.mark.slow) for x in (("right", 4096), ("none", 4096)))],
)
def test_linen_decoding_equals_prefill(padding: str, max_length: int) -> None:
    x, places = inputs(TOTAL), np.arange(max_length)
    module, variables = linen_module(max_length, decode=True)
    is_real = np.stack([places >= 0, {"left": places >= 3, "right": places < PROMPT, "none": places >= 0}[padding]])

    @jax.jit
    def step(cache: Any, x: Any) -> Any:
        mask = None if padding == "none" else jnp.asarray(is_real)[:, None, None, :]
        output, changed = module.apply(variables | {"cache": cache}, x, mask=mask, mutable=["cache"])
        return changed["cache"], output

    cache, outputs = variables["cache"], []
    for i in range(TOTAL):
        cache, output = step(cache, x[:, i : i + 1])
        outputs.append(output)
    answer = exact_module(x, mask=is_real[:, None, None, :TOTAL])
    assert_within(np.concatenate(outputs, axis=1).astype(np.float64), answer)


@pytest.mark.parametrize("options", [{"is_causal": False}, {"window_size": 3}])
def test_linen_decoding_is_refused_where_positions_are_unknown(options: dict[str, Any]) -> None:
    query, *rest = tensors(1, TOTAL)
    with pytest.raises(NotImplementedError, match=r"q_len and kv_len must be equal .* got 1 and 13.*with a cache"):
        alibi_jax.attention_fn(**options)(query, *rest)


@pytest.mark.slow
def test_linen_drops_weights_out_while_training() -> None:
    x = jnp.asarray(inputs(3))
    module = nn.MultiHeadDotProductAttention(num_heads=HEADS, dropout_rate=0.5, attention_fn=alibi_jax.attention_fn())
    variables = module.init(jax.random.key(0), x, deterministic=True)
    kept = module.apply(variables, x, deterministic=True)
    keys = [{"dropout": jax.random.key(i)} for i in (1, 1, 2)]
    dropped = [module.apply(variables, x, deterministic=False, rngs=rngs) for rngs in keys]
    assert np.array_equal(dropped[0], dropped[1])
    assert not any(np.array_equal(dropped[0], other) for other in (dropped[2], kept))


EINSUMS = ("qk_attn_weights_einsum_cls", "attn_weights_value_einsum_cls")


@pytest.mark.parametrize(
    ("options", "call", "name"),
    [
        ({"precision": "highest"}, {}, "precision"),
        ({}, {"sow_weights": True}, "module"),
        (dict.fromkeys(EINSUMS, lambda: jnp.einsum), {}, "qk_attn_weights_einsum"),
    ],
)
def test_linen_requests_that_cannot_be_met_are_refused(
    options: dict[str, Any], call: dict[str, Any], name: str
) -> None:
    module = nn.MultiHeadDotProductAttention(num_heads=HEADS, attention_fn=alibi_jax.attention_fn(), **options)
    with pytest.raises(NotImplementedError, match=f"{name} must be None with ALiBi attention"):
        module.init(jax.random.key(0), jnp.asarray(inputs(3)), **call)


def test_every_argument_that_linen_passes_is_looked_at() -> None:
    # Linen leaves out, without a word, what a function does not name.
    ours, linens = (inspect.signature(f).parameters for f in (alibi_jax.attention_fn(), nn.dot_product_attention))
    assert set(linens) <= set(ours)


@pytest.mark.slow
def test_a_further_bias_is_added() -> None:
    qkv, bias = tensors(), jnp.asarray(np.random.default_rng(0).standard_normal((HEADS, 7, 11)))
    expected = alibi_jax.attention(*qkv, added_bias=bias)
    for slopes in (None, HEADS):
        assert np.array_equal(alibi_jax.attention_fn(slopes)(*qkv, bias=bias), expected)
    assert not np.array_equal(alibi_jax.attention(*qkv), expected)


def test_the_dtype_of_the_module_decides_what_is_computed() -> None:
    query, key, value = tensors()
    low = alibi_jax.attention_fn()(query, key, value, dtype=jnp.bfloat16)
    assert low.dtype == jnp.bfloat16
    np.testing.assert_array_equal(low, alibi_jax.attention(*(x.astype(low.dtype) for x in (query, key, value))))
    mixed = jax.eval_shape(alibi_jax.attention_fn(), query.astype(low.dtype), key, value)
    assert mixed.dtype == jnp.float32


def test_alibi_works_in_the_attention_module_of_nnx() -> None:
    x, function = inputs(TOTAL), alibi_jax.attention_fn(SLOPES)
    options = {"use_bias": False, "decode": False, "attention_fn": function, "rngs": nnx.Rngs(0)}
    module = nnx.MultiHeadAttention(HEADS, EMBED_DIM, **options)
    for linear in (module.query, module.key, module.value, module.out):
        linear.kernel[...] = identity(linear.kernel)
    answer = exact_module(x)
    assert_within(np.asarray(module(jnp.asarray(x)), np.float64), answer)
    module.init_cache((BATCH, 17, EMBED_DIM))
    steps = [module(jnp.asarray(x[:, i : i + 1]), decode=True) for i in range(TOTAL)]
    assert_within(np.concatenate(steps, axis=1).astype(np.float64), answer)
