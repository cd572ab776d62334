"""Gradients as users ask for them: some of them alone, of sums and means, under the compiler's own flags.

With a cotangent that is one number repeated, and where nothing but one gradient is asked for, the compiler makes other
programs than of random cotangents and all gradients at once (see `alibi_jax._tiled.materialised`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402

import alibi_jax  # noqa: E402
from alibi_core.conformance._cases.case import Case, Sizes  # noqa: E402
from alibi_core.conformance._cases.oracle import Answer, assert_within  # noqa: E402
from tests.support.frameworks import JAX, Backend  # noqa: E402
from tests.support.full import first_of  # noqa: E402

BACKEND = Backend(JAX, "alibi_jax", None)
QUERY, KEY, VALUE, SLOPES, FUTURE = names = ("query", "key", "value", "slopes", "future_slopes")
TENSORS = names[:3]

# What a loss does with the result; its cotangent follows from NumPy's of the same name.
LOSSES: dict[str, Callable[[Any, Any], Any]] = {
    "sum": lambda x, _: x.sum(),
    "mean": lambda x, _: x.mean(),
    "zero": lambda x, _: (0 * x).sum(),
    "one row": lambda x, _: x[:, x.shape[1] // 2].sum(),
    "one element": lambda x, _: x[0, -1, 0, 0],
    "by head": lambda x, _: (x * jnp.arange(1.0, 1 + x.shape[2])[:, None]).sum(),
    "random": lambda x, weight: (x * weight).sum(),
}


@dataclass(frozen=True)
class Call:
    """A call and which of its gradients are asked for."""

    wanted: tuple[str, ...]
    loss: str
    length: int = 128
    form: str = "causal"
    dtype: str = "float32"
    heads: tuple[int, int] = (2, 1)  # of keys, and queries' to each
    implementation: str | None = None

    def __str__(self) -> str:
        return "-".join(str(x) for x in (*self.wanted, self.loss, self.length, self.form, self.dtype, *self.heads,
                                         self.implementation or "default"))  # fmt: skip

    @property
    def case(self) -> Case:
        """The problem, for the oracle."""
        sizes = Sizes(1, *self.heads, (self.length, self.length), 32)
        case = Case(sizes, self.form, None, None, None, None, slopes_per_batch=False, seed=3)
        weight = BACKEND.layout(case.arrays["cotangent"])
        cotangent = jax.grad(lambda x: LOSSES[self.loss](x, weight))(jnp.zeros(weight.shape))
        return case.with_arrays(cotangent=BACKEND.layout(np.asarray(cotangent, np.float64)))


def assert_right(call: Call, compiled: Callable[[Any], Any]) -> None:
    case = call.case
    arrays = {name: JAX.array(BACKEND.layout(case.arrays[name]), call.dtype) for name in TENSORS}
    arrays["slopes"] = JAX.array(case.arrays["slopes"])
    if "future_slopes" in case.arguments:
        arrays["future_slopes"] = JAX.array(case.arguments["future_slopes"])
    weight = JAX.array(BACKEND.layout(case.arrays["cotangent"]))
    rest = {name: x for name, x in arrays.items() if name not in call.wanted}

    def loss(wanted: Any, rest: Any, weight: Any) -> Any:
        result = alibi_jax.attention(
            **wanted,
            **rest,
            is_causal=call.form == "causal",
            scale=case.scale,
            allow_negative_slopes=True,
            implementation=call.implementation,
        )
        return LOSSES[call.loss](result.astype(jnp.float32), weight)

    found = compiled(jax.grad(loss))({name: arrays[name] for name in call.wanted}, rest, weight)
    answers = case.gradients(call.dtype, 2.0**-24 if call.dtype == "float32" else 0.0)
    for name in call.wanted:
        actual = JAX.numpy(found[name])
        answer = answers[name]
        assert_within(BACKEND.layout(actual) if name in TENSORS else actual, Answer(answer.value, answer.budget))


SUBSETS = ((QUERY,), (KEY,), (VALUE,), (SLOPES,), (QUERY, KEY), (KEY, VALUE), (QUERY, SLOPES), names[:4])
CALLS = (
    Call((QUERY,), "sum"),
    Call((KEY,), "mean", form="symmetric"),
    Call(names, "mean", form="asymmetric"),
    *(Call(wanted, "sum") for wanted in SUBSETS[1:]),
    *(Call((QUERY,), loss) for loss in LOSSES if loss != "sum"),
    *(Call((KEY,), loss, form="symmetric") for loss in ("sum", "by head")),
    *(Call(wanted, "mean", form="asymmetric") for wanted in ((QUERY,), (FUTURE,))),
    # About the sizes of tiles, and where one block of keys becomes several.
    *(Call((QUERY,), "sum", length) for length in (1, 16, 17, 64, 256, 257, 385)),
    *(Call((KEY,), "sum", length) for length in (1, 256, 385)),
    *(Call(((QUERY,), (KEY,))[dtype == "float16"], "sum", dtype=dtype) for dtype in ("bfloat16", "float16")),
    Call((QUERY,), "sum", heads=(1, 1)),
    *(Call(wanted, "sum", implementation="dense") for wanted in ((QUERY,), (KEY,), (VALUE,))),
)


@pytest.mark.parametrize("call", first_of(CALLS, keep=3), ids=str)
def test_gradients_asked_for_alone_are_right_once_compiled(call: Call) -> None:
    assert_right(call, jax.jit)


@pytest.mark.full
@pytest.mark.parametrize("call", [Call((QUERY,), "sum"), Call((KEY,), "zero"), Call((VALUE,), "one row")], ids=str)
def test_gradients_asked_for_alone_are_right_step_by_step(call: Call) -> None:
    assert_right(call, lambda function: function)


# What a user's own program adds to a fusion: a sum or a maximum of what comes out.
@pytest.mark.full
@pytest.mark.parametrize("implementation", ["tiled", "dense"])
@pytest.mark.parametrize(("constant", "form"), [("value", "causal"), ("key", "symmetric")])
def test_repeated_numbers_for_keys_or_values_are_right_beside_a_sum(
    implementation: str, constant: str, form: str
) -> None:
    tensors = dict(zip(TENSORS, jax.random.normal(jax.random.key(0), (3, 1, 128, 4, 32)), strict=True))

    def total(implementation: str, tensors: Any) -> Any:
        tensors = tensors | {constant: jnp.ones_like(tensors[constant])}
        return alibi_jax.attention(**tensors, is_causal=form == "causal", implementation=implementation).sum(axis=1)

    with jax.disable_jit():
        expected = total("dense", tensors)
    found = jax.jit(total, static_argnums=0)(implementation, tensors)
    np.testing.assert_allclose(found, expected, atol=128 * 128 * 2.0**-24 * 4)  # sums of 128 rows of 128 values up to 4


@pytest.mark.full
def test_sums_of_gradients_are_right() -> None:
    query, *rest = jax.random.normal(jax.random.key(0), (3, 1, 128, 4, 32))

    def norms(implementation: str, *tensors: Any) -> Any:
        gradient = jax.grad(lambda *x: alibi_jax.attention(*x, implementation=implementation).sum(), argnums=2)
        return (gradient(*tensors) ** 2).sum()

    with jax.disable_jit():
        expected = norms("dense", query, *rest)
    np.testing.assert_allclose(jax.jit(norms, static_argnums=0)("tiled", query, *rest), expected, rtol=128 * 2.0**-24)
