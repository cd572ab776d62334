"""JAX alone: transformations, traced arguments, float64 on demand, Flax's modules, a cache under ``jit``."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from alibi_core.conformance.testing import Answer, Attention, Rules, penalties
from alibi_core.conformance.testing import assert_within_budget as assert_within

jax = pytest.importorskip("jax")
nnx = pytest.importorskip("flax.nnx")
nn = pytest.importorskip("flax.linen")
import jax.numpy as jnp  # noqa: E402
from jax import export  # noqa: E402
from safetensors.numpy import save_file  # noqa: E402

import alibi_jax  # noqa: E402

BATCH, HEADS, KV_HEADS, HEAD_DIM = 2, 6, 3, 5
IMPLEMENTATIONS = pytest.mark.parametrize("implementation", ["tiled", pytest.param("dense", marks=pytest.mark.slow)])
SLOPES = np.asarray([0.5, 0.25, 0.3, 0.0, 1.0, 2.0**-8], np.float32)
FUTURE = np.asarray([0.1, 0.7, 0.0, 0.3, 0.5, 2.0], np.float32)


def tensors(q_len: int = 7, kv_len: int = 11, *, seed: int = 0, batch: int = BATCH) -> tuple[np.ndarray, ...]:
    """Return query, key and value, float32 and length first."""
    rng = np.random.default_rng(seed)
    sizes = (q_len, HEADS), (kv_len, KV_HEADS), (kv_len, KV_HEADS)
    return tuple(rng.standard_normal((batch, *size, HEAD_DIM)).astype(np.float32) for size in sizes)


def problem(
    query: np.ndarray, key: np.ndarray, value: np.ndarray, rules: Rules, *, scale: float | None = None, dtype="float32"
) -> Attention:
    """Return the exact computation for length-first tensors."""
    batch, q_len, num_heads, head_dim = query.shape
    heads_first = (np.swapaxes(x.astype(np.float64), 1, 2) for x in (query, key, value))
    bias = penalties(rules, batch, num_heads, q_len, key.shape[1])
    return Attention(*heads_first, bias=bias, scale=scale or head_dim**-0.5, dtype=dtype)


def length_first(answer: Answer) -> Answer:
    return Answer(np.swapaxes(answer.value, 1, 2), np.swapaxes(answer.budget, 1, 2))


def rows(answer: Answer, start: int, stop: int) -> Answer:
    return Answer(answer.value[:, start:stop], answer.budget[:, start:stop])


def exact(*qkv: np.ndarray, rules: Rules, **options: Any) -> Answer:
    """Return the exact output, ``[batch, q_len, num_heads, head_dim]``."""
    return length_first(problem(*qkv, rules, **options).output)


def counted(function: Callable[..., Any]) -> tuple[Callable[..., Any], list[int]]:
    """Return ``function`` and a list that grows each time it is traced."""
    traces: list[int] = []

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        traces.append(1)
        return function(*args, **kwargs)

    return wrapper, traces


# --- transformations


@IMPLEMENTATIONS
@pytest.mark.parametrize("form", ["asymmetric", pytest.param("causal", marks=pytest.mark.slow)])
def test_transformations_keep_attention_exact(implementation: str, form: str) -> None:
    qkv = tensors()
    arguments = {} if form == "causal" else {"is_causal": False, "future_slopes": FUTURE}
    placed = {name: jnp.asarray(x) if name == "future_slopes" else x for name, x in arguments.items()}
    function = functools.partial(alibi_jax.attention, implementation=implementation, scale=0.7, **placed)
    mapped = jax.vmap(function, in_axes=(0, 0, 0, None))
    answer = exact(*qkv, rules=Rules(SLOPES, q_offset=4, **arguments), scale=0.7)
    for transformed in (mapped, jax.jit(mapped), jax.checkpoint(function)):
        assert_within(np.asarray(transformed(*map(jnp.asarray, qkv), jnp.asarray(SLOPES)), np.float64), answer)


@IMPLEMENTATIONS
@pytest.mark.parametrize("per_entry", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_traced_offset_serves_all_positions_with_one_compilation(implementation: str, per_entry: bool) -> None:
    qkv = tensors(q_len=2)
    attend, traces = counted(functools.partial(alibi_jax.attention, implementation=implementation, window_size=4))
    attend = jax.jit(attend)
    for offset in (-1, 0, 9):  # the first query of the first has nothing to look at
        offsets = np.asarray([offset, 3] if per_entry else offset, np.int32)
        result = np.asarray(attend(*map(jnp.asarray, qkv), jnp.asarray(SLOPES), q_offset=jnp.asarray(offsets)))
        for entry, position in enumerate(np.broadcast_to(offsets, (BATCH,))):
            one = [x[entry : entry + 1] for x in qkv]
            answer = exact(*one, rules=Rules(SLOPES, q_offset=int(position), window_size=4))
            assert_within(result[entry : entry + 1].astype(np.float64), answer)
    assert len(traces) == 1


@pytest.mark.slow
@IMPLEMENTATIONS
def test_a_query_with_nothing_to_look_at_makes_no_nan_on_the_way(implementation: str) -> None:
    query, key, value = map(jnp.asarray, tensors())
    mask = jnp.ones((7, 11), bool).at[3].set(False)

    def loss(query: Any, key: Any, value: Any, slopes: Any) -> Any:
        return alibi_jax.attention(query, key, value, slopes, mask=mask, implementation=implementation).sum()

    with jax.debug_nans(True):
        gradients = jax.jit(jax.grad(loss, argnums=range(4)))(query, key, value, jnp.asarray(SLOPES))
    np.testing.assert_array_equal(gradients[0][:, 3], 0)
    assert all(np.abs(gradient).max() > 0 for gradient in gradients)


@pytest.mark.parametrize(
    "transformation", [jax.grad, pytest.param(jax.jit, marks=pytest.mark.slow)], ids=lambda x: x.__name__
)
def test_jax_debug_nans_names_attention_where_a_nan_appears(transformation: Callable[..., Any]) -> None:
    x = jnp.full((1, 4, 2, 4), 1e30)  # whose products overflow
    attend = transformation(lambda query: jnp.sum(alibi_jax.attention(query, x, x, implementation="tiled")))
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match=r"\(nan\) encountered in alibi_attention"):
        attend(x)


# --- arguments


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("is_causal", True, "is_causal must be True or False, got"),
        ("window_size", 3, "window_size must be an integer, got"),
        ("scale", 0.5, "scale must be a real number, got"),
        ("tolerance", 0.5, "tolerance must be a real number, got"),
    ],
)
def test_traced_values_of_static_arguments_are_refused_by_name(name: str, value: Any, message: str) -> None:
    def attend(option: Any) -> Any:
        return alibi_jax.attention(*map(jnp.asarray, tensors()), **{name: option})

    with pytest.raises(TypeError, match=message):
        jax.jit(attend)(value)


def test_shapes_and_concrete_slopes_are_checked_inside_a_traced_function() -> None:
    negative = jnp.asarray(-SLOPES)
    with pytest.raises(ValueError, match="slopes must not be negative"):
        jax.jit(lambda *qkv: alibi_jax.attention(*qkv, negative))(*map(jnp.asarray, tensors()))
    with pytest.raises(ValueError, match=r"mask must broadcast to \(2, 6, 7, 11\)"):
        jax.eval_shape(lambda *x: alibi_jax.attention(*x, mask=jnp.ones((2, 7, 6, 11), bool)), *tensors())


# --- float64


@pytest.fixture
def x64() -> Any:
    with jax.enable_x64(True):
        yield


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("implementation", ["tiled", pytest.param("dense", marks=pytest.mark.slow)])
def test_float64_is_exact_to_its_own_rounding(implementation: str) -> None:
    qkv = [x.astype(np.float64) for x in tensors()]
    slopes = SLOPES.astype(np.float64) / 3
    attend = jax.jit(functools.partial(alibi_jax.attention, implementation=implementation))
    result = attend(*map(jnp.asarray, qkv), jnp.asarray(slopes))
    assert result.dtype == jnp.float64
    assert_within(np.asarray(result), exact(*qkv, rules=Rules(slopes, q_offset=4), dtype="float64"))


@pytest.mark.usefixtures("x64")
@IMPLEMENTATIONS
def test_float32_stays_float32_where_float64_is_enabled(implementation: str) -> None:
    qkv = tensors()
    attend = functools.partial(alibi_jax.attention, implementation=implementation, q_offset=jnp.asarray(4, jnp.int64))
    jaxpr = jax.make_jaxpr(attend)(*map(jnp.asarray, qkv), jnp.asarray(SLOPES))
    assert not re.search(r"f64\[[1-9]", str(jaxpr))  # but for Python numbers, which are scalars
    assert_within(
        np.asarray(attend(*map(jnp.asarray, qkv), jnp.asarray(SLOPES)), np.float64),
        exact(*qkv, rules=Rules(SLOPES, q_offset=4)),
    )


# --- the NNX layer
EMBED_DIM = HEADS * HEAD_DIM


def make_layer(**options: Any) -> alibi_jax.AlibiAttention:
    options = {"num_kv_heads": KV_HEADS, "slopes": SLOPES, "rngs": nnx.Rngs(0)} | options
    return alibi_jax.AlibiAttention(EMBED_DIM, HEADS, **options)


def inputs(length: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((BATCH, length, EMBED_DIM)).astype(np.float32)


def test_a_layer_refuses_a_dtype_that_jax_would_quietly_replace() -> None:
    with pytest.raises(TypeError, match="param_dtype must be a dtype that JAX has enabled, got float64"):
        make_layer(param_dtype=jnp.float64)


def test_traced_slopes_are_refused() -> None:
    with pytest.raises(ValueError, match="slopes must be known when the layer is made, got a traced array"):
        jax.eval_shape(lambda slopes: make_layer(slopes=slopes) and slopes, jnp.asarray(SLOPES))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"dtype": jnp.bfloat16}, {"param_dtype": jnp.bfloat16}], ids=str)
def test_dtypes_of_a_model_are_those_asked_for(options: dict[str, type]) -> None:
    config = alibi_jax.AlibiConfig(num_layers=1, embed_dim=28, num_heads=4, num_kv_heads=2, bias=True)
    model, tokens = alibi_jax.AlibiLanguageModel(config, 31, **options, rngs=nnx.Rngs(0)), jnp.asarray([[3, 1, 4, 1]])
    parameters = jax.tree.leaves(nnx.state(model, nnx.Param))
    assert {x.dtype for x in parameters} == {jnp.dtype(options.get("param_dtype", jnp.float32))}
    assert model(tokens).dtype == jnp.bfloat16
    assert model.generate(tokens, 2).shape == (1, 6)


# --- the cache

PROMPT, TOTAL, MAX_LENGTH = 5, 13, 17


def test_what_is_no_cache_is_refused() -> None:
    layer = make_layer()
    with pytest.raises(TypeError, match=r"cache must be an alibi_jax.KVCache, as make_cache returns it, got tuple"):
        layer(jnp.asarray(inputs(1)), cache=tuple(layer.make_cache(BATCH, 9)))
    with pytest.raises(ValueError, match="cache must have the dtype of the layer's keys, float32, got bfloat16"):
        layer(jnp.asarray(inputs(1)), cache=make_layer(param_dtype=jnp.bfloat16).make_cache(BATCH, 9))


# --- weights


@pytest.mark.parametrize("saved", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def test_a_layer_keeps_its_dtype_when_it_loads(tmp_path: Any, saved: str) -> None:
    layer = make_layer(param_dtype=jnp.dtype(saved))
    other = make_layer(param_dtype=jnp.bfloat16, rngs=nnx.Rngs(1))
    alibi_jax.save_weights(layer, tmp_path / "layer.safetensors")
    alibi_jax.load_weights(other, tmp_path / "layer.safetensors")
    assert other.v_proj.kernel.dtype == jnp.bfloat16
    np.testing.assert_array_equal(layer.v_proj.kernel.astype(jnp.bfloat16), other.v_proj.kernel[...])


def test_a_layer_of_shapes_alone_is_loaded_and_not_saved(tmp_path: Any) -> None:
    layer, path = make_layer(bias=True, rngs=nnx.Rngs(1)), tmp_path / "layer.safetensors"
    alibi_jax.save_weights(layer, path)
    other = nnx.eval_shape(lambda: make_layer(bias=True))
    with pytest.raises(ValueError, match="module must have numbers to save, got shapes of nnx.eval_shape"):
        alibi_jax.save_weights(other, path)
    alibi_jax.load_weights(other, path)
    x = jnp.asarray(inputs(3))
    np.testing.assert_array_equal(other(x), layer(x))


def test_a_file_that_does_not_fit_is_refused_and_changes_nothing(tmp_path: Any) -> None:
    layer, path = make_layer(), tmp_path / "layer.safetensors"
    before = np.asarray(layer.q_proj.kernel[...])
    good = {name: np.zeros(shape, np.float32) for name, shape in WEIGHT_SHAPES.items()}
    bad = {
        r"got \['v_proj.weight'\] missing and none unknown": {k: v for k, v in good.items() if k != "v_proj.weight"},
        r"got none missing and \['log_slopes'\] unknown": good | {"log_slopes": np.zeros(6, np.float32)},
        r"k_proj.weight in .* must have shape \(15, 30\), got \(30, 15\)": good | {"k_proj.weight": np.zeros((30, 15))},
    }
    for message, arrays in bad.items():
        save_file({name: array.astype(np.float32) for name, array in arrays.items()}, path)
        with pytest.raises(ValueError, match=message):
            alibi_jax.load_weights(layer, path)
        np.testing.assert_array_equal(layer.q_proj.kernel[...], before)
    save_file({name: array.astype(np.int32) for name, array in good.items()}, path)
    with pytest.raises(ValueError, match="must be of floating numbers, got int32"):
        alibi_jax.load_weights(layer, path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="must be a safetensors file of floating numbers, got "):
        alibi_jax.load_weights(layer, path)
    save_file(good, path)
    alibi_jax.load_weights(layer, path)
    np.testing.assert_array_equal(layer.q_proj.kernel[...], 0)


WEIGHT_SHAPES = {
    "q_proj.weight": (30, 30),
    "k_proj.weight": (15, 30),
    "v_proj.weight": (15, 30),
    "out_proj.weight": (30, 30),
}


# --- Flax's own attention modules


def identity_module(module: Any, x: Any) -> Any:
    """Return variables for a Linen module whose query, key, value and output are its input."""
    variables = module.init(jax.random.key(0), x)
    params = jax.tree.map(lambda p: jnp.eye(EMBED_DIM).reshape(p.shape) if p.ndim > 1 else p, variables["params"])
    return variables | {"params": params}


def exact_module(x: np.ndarray, rules: Rules) -> Answer:
    heads = x.reshape(*x.shape[:2], HEADS, HEAD_DIM)
    # Linen calls with the same scale, by default.
    answer = exact(heads, heads, heads, rules=rules)
    return Answer(answer.value.reshape(x.shape), answer.budget.reshape(x.shape))


def linen_module(decode: bool = False, **options: Any) -> Any:
    slopes = jnp.asarray(SLOPES)
    return nn.MultiHeadDotProductAttention(
        num_heads=HEADS, use_bias=False, decode=decode, attention_fn=alibi_jax.attention_fn(slopes, **options)
    )


def test_linen_masks_are_respected() -> None:
    x = inputs(7)
    mask = np.random.default_rng(5).random((BATCH, 1, 7, 7)) < 0.6
    module = linen_module(is_causal=False, window_size=4)
    result = module.apply(identity_module(module, x), x, mask=jnp.asarray(mask, np.float32))
    rules = Rules(SLOPES, q_offset=0, is_causal=False, mask=mask, window_size=4)
    assert_within(np.asarray(result, np.float64), exact_module(x, rules))


@pytest.mark.parametrize("max_length", [TOTAL, pytest.param(4096, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "padding", ["left", pytest.param("right", marks=pytest.mark.slow), pytest.param("none", marks=pytest.mark.slow)]
)
def test_linen_decoding_equals_prefill(max_length: int, padding: str) -> None:
    # The long cache is there for precision: counted from its end, distances would outweigh the scores. Padding
    # on the right may not see itself, while the other sequence goes on.
    x, module, places = inputs(TOTAL), linen_module(decode=True), np.arange(max_length)
    is_real = np.stack([places >= 0, {"left": places >= 3, "right": places < PROMPT, "none": places >= 0}[padding]])
    variables = identity_module(module, jnp.zeros((BATCH, max_length, EMBED_DIM)))
    params, cache = variables["params"], variables["cache"]

    @jax.jit
    def step(cache: Any, x: Any) -> Any:
        mask = None if padding == "none" else jnp.asarray(is_real)[:, None, None, :]
        output, changed = module.apply({"params": params, "cache": cache}, x, mask=mask, mutable=["cache"])
        return changed["cache"], output

    outputs = []
    for i in range(TOTAL):
        cache, output = step(cache, jnp.asarray(x[:, i : i + 1]))
        outputs.append(output)
    outputs = np.concatenate(outputs, axis=1).astype(np.float64)
    answer = exact_module(x, Rules(SLOPES, q_offset=0, mask=is_real[:, None, None, :TOTAL]))
    assert_within(outputs, answer)


@pytest.mark.parametrize("options", [{"is_causal": False}, {"window_size": 3}])
def test_linen_decoding_is_refused_where_positions_are_unknown(options: dict[str, Any]) -> None:
    module = linen_module(decode=True, **options)
    variables = module.init(jax.random.key(0), jnp.zeros((BATCH, TOTAL, EMBED_DIM)))
    with pytest.raises(NotImplementedError, match=r"q_len and kv_len must be equal .* got 1 and 13.*with a cache"):
        module.apply(variables, jnp.asarray(inputs(1)), mutable=["cache"])


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


@pytest.mark.parametrize(
    ("options", "call", "name"),
    [
        ({"precision": "highest"}, {}, "precision"),
        ({}, {"sow_weights": True}, "module"),
        (
            {name: lambda: jnp.einsum for name in ("qk_attn_weights_einsum_cls", "attn_weights_value_einsum_cls")},
            {},
            "qk_attn_weights_einsum",
        ),
    ],
)
def test_linen_requests_that_cannot_be_met_are_refused(
    options: dict[str, Any], call: dict[str, Any], name: str
) -> None:
    module = nn.MultiHeadDotProductAttention(num_heads=HEADS, attention_fn=alibi_jax.attention_fn(), **options)
    with pytest.raises(NotImplementedError, match=f"{name} must be None with ALiBi attention"):
        module.init(jax.random.key(0), jnp.asarray(inputs(3)), **call)


@pytest.mark.slow
def test_a_further_bias_is_added() -> None:
    qkv, bias = (
        [jnp.asarray(x) for x in tensors()],
        jnp.asarray(np.random.default_rng(0).standard_normal((HEADS, 7, 11))),
    )
    expected = alibi_jax.attention(*qkv, added_bias=bias)
    assert np.array_equal(alibi_jax.attention_fn()(*qkv, bias=bias), expected)
    assert np.array_equal(alibi_jax.attention_fn(qkv[0].shape[-2])(*qkv, bias=bias), expected)
    assert not np.array_equal(alibi_jax.attention(*qkv), expected)


def test_every_argument_that_linen_passes_is_looked_at() -> None:
    # Linen leaves out, without a word, what a function does not name.
    ours, linens = (inspect.signature(f).parameters for f in (alibi_jax.attention_fn(), nn.dot_product_attention))
    assert set(linens) <= set(ours)


def test_the_dtype_of_the_module_decides_what_is_computed() -> None:
    query, key, value = map(jnp.asarray, tensors())
    low = alibi_jax.attention_fn()(query, key, value, dtype=jnp.bfloat16)
    assert low.dtype == jnp.bfloat16
    np.testing.assert_array_equal(low, alibi_jax.attention(*(x.astype(low.dtype) for x in (query, key, value))))
    assert alibi_jax.attention_fn()(query.astype(low.dtype), key, value).dtype == jnp.float32


def test_alibi_works_in_the_attention_module_of_nnx() -> None:
    x = inputs(TOTAL)
    module = nnx.MultiHeadAttention(
        HEADS,
        EMBED_DIM,
        use_bias=False,
        decode=False,
        attention_fn=alibi_jax.attention_fn(SLOPES),
        rngs=nnx.Rngs(0),
    )
    for linear in (module.query, module.key, module.value, module.out):
        linear.kernel[...] = jnp.eye(EMBED_DIM).reshape(linear.kernel.shape)
    answer = exact_module(x, Rules(SLOPES, q_offset=0))
    assert_within(np.asarray(module(jnp.asarray(x)), np.float64), answer)
    module.init_cache((BATCH, MAX_LENGTH, EMBED_DIM))
    for i in range(TOTAL):
        output = module(jnp.asarray(x[:, i : i + 1]), decode=True)
        assert_within(np.asarray(output, np.float64), rows(answer, i, i + 1))


# --- Sizes that are too large, and missing implementations ----------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int64", "uint64"])
def test_offsets_of_64_bits(kind: str) -> None:
    query, key, value = (jax.random.normal(jax.random.key(i), (1, n, 2, 4)) for i, n in enumerate((3, 700, 700)))
    limits = np.iinfo(kind)
    with jax.enable_x64(True):
        for offset in (limits.min, limits.min // 2, 100, limits.max // 2 + 3, limits.max):
            found = alibi_jax.attention(query, key, value, q_offset=jnp.asarray([offset], kind), implementation="tiled")
            near = int(np.clip(offset, -(2**20), 2**20))  # from far away all distances differ by as much
            expected = alibi_jax.attention(query, key, value, q_offset=near, implementation="dense")
            np.testing.assert_allclose(found, expected, atol=1e-6)


X = jnp.ones((2, 3, 2, 4))
BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "a seed for a key": (
        lambda: alibi_jax.attention(X, X, X, dropout=0.1, dropout_key=3),
        "dropout_key must be a key, got 3; jax.random.key makes one",
    ),
    "a dtype that there is not": (
        lambda: alibi_jax.KVCache.make(2, 2, 8, 4, dtype="float31"),
        "dtype must be a real floating dtype of jax.numpy, got 'float31'",
    ),
    "a dtype of a layer": (
        lambda: alibi_jax.AlibiAttention(8, 2, param_dtype="float31", rngs=nnx.Rngs(0)),
        "param_dtype must be a real floating dtype of jax.numpy, got 'float31'",
    ),
    "a seed for streams": (
        lambda: alibi_jax.AlibiAttention(8, 2, rngs=0),
        r"rngs must be flax.nnx.Rngs, got 0; nnx.Rngs\(0\) makes one",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_errors_name_the_argument_and_the_fix(name: str) -> None:
    call, message = BAD[name]
    with pytest.raises(TypeError, match=message):
        call()


DERIVATIVES: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "hessian": jax.hessian,
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (x,)),
    "jacfwd": jax.jacfwd,
    "linearize": lambda f: lambda x: jax.linearize(f, x)[1](x),
    "grad of grad": lambda f: jax.grad(lambda x: jnp.sum(jax.grad(f)(x) ** 2)),
    "vmap of jvp of grad": lambda f: jax.vmap(lambda x: jax.jvp(jax.grad(f), (x,), (x,))[1]),
    "jacrev of jacrev": lambda f: jax.jacrev(jax.jacrev(f)),
    "vmap of hessian": lambda f: jax.vmap(jax.hessian(f)),
}


FORWARD_MODE = ("jvp", "jacfwd", "linearize")


@pytest.mark.slow
@pytest.mark.parametrize("kind", DERIVATIVES)
@pytest.mark.parametrize("by", ["slopes", "query"])
def test_derivatives_of_any_order_and_mode(kind: str, by: str) -> None:
    arrays = dict(zip(("query", "key", "value"), jax.random.normal(jax.random.key(0), (3, 1, 3, 2, 2)), strict=True))
    arrays["slopes"] = jnp.asarray([0.5, 0.25])
    x = arrays.pop(by)
    mapped = jnp.stack([x, 2 * x]) if "vmap" in kind else x

    def loss(implementation: str, x: jax.Array) -> jax.Array:
        return jnp.sum(alibi_jax.attention(**arrays, **{by: x}, implementation=implementation) ** 2)

    tiled, dense = (DERIVATIVES[kind](functools.partial(loss, name)) for name in ("tiled", "dense"))
    expected = dense(mapped)
    if kind in FORWARD_MODE:
        with pytest.raises(TypeError, match="forward-mode"):
            tiled(mapped)
    else:
        jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5), jax.jit(tiled)(mapped), expected)


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
    assert value.shape == (0,)
    assert gradient.shape == x.shape


@pytest.mark.slow
def test_attention_runs_without_being_compiled() -> None:
    query, key, value = map(jnp.asarray, tensors())
    with jax.disable_jit():
        found = alibi_jax.attention(query, key, value, implementation="tiled")
    np.testing.assert_allclose(found, alibi_jax.attention(query, key, value, implementation="dense"), atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["tiled", "dense"])
def test_ranks_differ_inside_also_where_users_have_that_refused(implementation: str) -> None:
    x, mask = jnp.ones((2, 5, 2, 4)), jnp.ones((2, 1, 5, 5), bool)

    def loss(x: jax.Array, slopes: jax.Array) -> jax.Array:
        result = alibi_jax.attention(x, x, x, slopes, mask=mask, is_causal=False, implementation=implementation)
        return jnp.sum(result**2)

    with jax.numpy_rank_promotion("raise"):
        for function in (jax.grad(loss, argnums=(0, 1)), jax.hessian(loss, argnums=1)):
            jax.jit(function).lower(x, jnp.ones(2))
        alibi_jax.attention(x, x, x, mask=mask, added_bias=jnp.zeros((5, 5)))
        alibi_jax.explain(x, x, x)
        cache = alibi_jax.KVCache.make(2, 2, 16, 4).append(x, x, lengths=jnp.asarray([1, 3]))
        cache.append(x, x).truncate(2).attend(x[:, :1])


def test_lengths_that_are_symbols_are_refused_in_words() -> None:
    (length,) = export.symbolic_shape("length")
    symbolic, known = (jax.ShapeDtypeStruct((1, n, 2, 4), jnp.float32) for n in (length, 1))
    program = export.export(jax.jit(alibi_jax.attention))
    with pytest.raises(ValueError, match="query must have .*length.* only axes of the batch may be symbols.*pad"):
        program(symbolic, symbolic, symbolic)
    with pytest.raises(ValueError, match="key must have"):
        program(known, symbolic, symbolic)


def test_nothing_asks_for_a_promotion() -> None:
    config = alibi_jax.AlibiConfig(num_layers=1, embed_dim=8, num_heads=2, is_causal=False)
    encoder = alibi_jax.AlibiEncoder(config, vocab_size=11, rngs=nnx.Rngs(0))
    encoder.eval()
    tokens, low, lengths = jnp.ones((2, 7), int), jnp.ones((1, 1, 2, 4), jnp.bfloat16), jnp.asarray([3, 7])
    cache = alibi_jax.KVCache.make(1, 2, 8, 4, dtype=jnp.bfloat16)
    with jax.numpy_dtype_promotion("strict"):  # tracing is enough to see one
        assert jax.eval_shape(lambda: cache.append(low, low).attend(low, jnp.ones(2))).dtype == jnp.bfloat16
        for pooling in ("mean", "cls"):
            for rules in ({"lengths": lengths}, {"mask": jnp.arange(7) < lengths[:, None]}):
                encode = functools.partial(encoder.encode, pooling=pooling)
                assert jax.eval_shape(lambda tokens, rules: encode(tokens, **rules), tokens, rules).shape == (2, 8)  # noqa: B023
