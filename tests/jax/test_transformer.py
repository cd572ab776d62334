"""What JAX's models alone have: dtypes of computation and parameters, and keys instead of a state of random numbers."""

from __future__ import annotations

import pytest

jax = pytest.importorskip("jax", reason="jax is not installed")
nnx = pytest.importorskip("flax.nnx", reason="flax is not installed")

import jax.numpy as jnp  # noqa: E402

from alibi_jax import AlibiConfig, AlibiLanguageModel  # noqa: E402
from alibi_jax.nn._weights import named_parameters  # noqa: E402
from tests.support.full import first_of  # noqa: E402

SMALL = AlibiConfig(num_layers=1, embed_dim=28, num_heads=4, num_kv_heads=2, bias=True)
TOKENS = jnp.asarray([[3, 1, 4, 1]])


@pytest.mark.parametrize(
    ("options", "parameters", "logits"),
    first_of(
        [({"dtype": jnp.bfloat16}, "float32", "bfloat16"), ({"param_dtype": jnp.bfloat16}, "bfloat16", "bfloat16")]
    ),
    ids=["dtype", "param_dtype"],
)
def test_dtypes_are_those_asked_for(options: dict[str, type], parameters: str, logits: str) -> None:
    model = AlibiLanguageModel(SMALL, 31, **options, rngs=nnx.Rngs(0))
    assert {parameter[...].dtype for parameter, _ in named_parameters(model).values()} == {jnp.dtype(parameters)}
    assert model(TOKENS).dtype == logits
    assert model.generate(TOKENS, 2).shape == (1, 6)
