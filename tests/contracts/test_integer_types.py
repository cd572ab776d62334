"""Offsets, segment ids and tokens of every integer type, and offsets beyond 32 bits."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest

from alibi_core.backend.models import AlibiConfig
from tests.support.frameworks import BACKENDS, COMPILERS, FRAMEWORK, NAMES_SLOW_IN_JAX, Backend, Framework
from tests.support.layers import make_module

SLOPES = np.asarray([0.5, 0.02])
FAR = 10**6  # tokens; beyond all keys, any distance gives the same result
BEYOND = {
    "int32": (2**31 - 1, -(2**31)),
    "uint32": (2**32 - 1, 2**31),
    "int64": (2**32, -(2**40)),
    "uint64": (2**64 - 1, 2**63),
}


def tensors(q_len: int, kv_len: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal((2, 2, n, 8)) for n in (q_len, kv_len, kv_len)]


def has(framework: Framework, dtype: str) -> bool:
    return not (framework.name == "jax" and dtype.endswith("64"))  # without jax_enable_x64


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("is_causal", [True, False])
def test_an_offset_beyond_32_bits_does_not_wrap(backend: Backend, is_causal: bool) -> None:
    rules: dict[str, Any] = {} if is_causal else {"is_causal": False, "future_slopes": SLOPES / 3}
    given = tensors(20, 33)
    for dtype, values in BEYOND.items():
        if has(backend.framework, dtype):
            offsets = np.asarray([FAR if n > 0 else -FAR for n in values], np.int32), np.asarray(values, dtype)
            near, far = (backend.attention(*given, SLOPES, dtype="float32", q_offset=x, **rules) for x in offsets)
            # No distance is rounded: they are counted from the nearest key.
            np.testing.assert_allclose(far, near, rtol=0, atol=1e-6, err_msg=dtype)


@pytest.mark.parametrize("framework", COMPILERS)
def test_a_traced_offset_beyond_32_bits_does_not_wrap(framework: Framework) -> None:
    backend = Backend(framework, f"alibi_{framework.name}", None)
    given = [*(framework.array(backend.layout(x)) for x in tensors(5, 7)), framework.array(SLOPES)]
    attention = importlib.import_module(backend.module).attention
    function = framework.compiled(lambda offset: attention(*given, q_offset=offset))
    dtype = "uint32" if framework.name == "jax" else "int64"
    far = framework.numpy(function(framework.array(np.asarray(BEYOND[dtype], dtype))))
    signs = np.sign(np.asarray(BEYOND[dtype], np.float64)).astype(np.int32)
    near = framework.numpy(attention(*given, q_offset=framework.array(FAR * signs)))
    np.testing.assert_allclose(far, near, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", NAMES_SLOW_IN_JAX)
def test_tokens_and_their_types_may_be_of_any_integer_type(name: str) -> None:
    framework, sizes = FRAMEWORK[name], {"num_layers": 1, "embed_dim": 16, "num_heads": 4, "dropout": 0.0}
    model = make_module(name, "AlibiLanguageModel", AlibiConfig(**sizes), 9)
    encoder = make_module(name, "AlibiEncoder", AlibiConfig(**sizes, is_causal=False, token_types=2), 9)
    text, types, gaps = np.asarray([[1, 8, 3], [4, 0, 6]]), np.asarray([[0, 1, 1], [1, 0, 0]]), [[1, 0, 1], [0, 1, 1]]

    def results(dtype: str) -> list[np.ndarray]:
        tokens, kinds = (framework.array(x.astype(dtype)) for x in (text, types))
        encoded = [encoder.encode(tokens, token_types=kinds, **x) for x in ({"lengths": [3, 1]}, {"mask": gaps})]
        said = model.generate(tokens, 3, eos_token_id=[2, 5], pad_token_id=7)
        assert said.dtype == tokens.dtype
        return [framework.numpy(x) for x in (model(tokens), encoder(tokens, token_types=kinds), said, *encoded)]

    expected = results("int32")
    every = ("int8", "uint32", "uint8", "int16", "uint16", "int64", "uint64")
    for dtype in every[:2] if name == "jax" else every:  # JAX compiles every call for each dtype
        if has(framework, dtype):
            for got, wanted in zip(results(dtype), expected, strict=True):
                np.testing.assert_array_equal(got, wanted, err_msg=dtype)
