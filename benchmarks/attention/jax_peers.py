"""Who computes attention in JAX (this library, others with and without positions), and how a pass is compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import alibi_jax
from benchmarks.attention.backend import Call, Contestant
from benchmarks.attention.sizes import Shape

OURS = "alibi_jax"
# JAX's own attention: what there is on each kind of device.
IMPLEMENTATIONS = {"cpu": ("xla",), "cuda": ("cudnn", "xla")}


@dataclass(frozen=True)
class HeadsFirst:
    """A JAX array ``[batch, length, num_heads, head_dim]`` that is looked at with the heads before the length."""

    array: jax.Array

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """``(batch, num_heads, length, head_dim)``."""
        batch, length, num_heads, head_dim = self.array.shape
        return batch, num_heads, length, head_dim

    def __getitem__(self, place: Any) -> np.ndarray:
        """Return a piece: on the CPU a view."""
        return np.swapaxes(np.asarray(self.array), 1, 2)[place]


@dataclass(frozen=True)
class Prepared:
    """A pass that is ready to be compiled.

    Attributes:
        attend: Takes query, key, value, ``[batch, length, num_heads, head_dim]``, and what is held.
        held: Arrays that a model builds once for all its layers. Arguments, lest they become constants of the program.
    """

    attend: Callable[..., jax.Array]
    held: tuple[jax.Array, ...] = ()


def this_library() -> Contestant:
    """Return this library, as it is by default."""
    return Contestant(OURS, lambda query, key, value: Prepared(alibi_jax.attention))


def without_positions(implementation: str) -> Contestant:
    """Return JAX's causal attention with no positions."""
    attend = partial(jax.nn.dot_product_attention, is_causal=True, implementation=implementation)
    return Contestant(
        f"{called(implementation)}, no positions",
        lambda query, key, value: Prepared(attend),
        is_dense=implementation == "xla",
    )


def peers(device: str) -> tuple[Contestant, ...]:
    """Return others who compute ALiBi attention."""
    return tuple(
        Contestant(
            f"{called(implementation)}, dense bias",
            partial(_dense_bias, implementation),
            _DENSE_BYTES[implementation],
            note="the bias is built before, in the dtype of the query",
        )
        for implementation in IMPLEMENTATIONS[device]
    )


def called(implementation: str) -> str:
    """Return what JAX's attention is called in the results."""
    return f"JAX {implementation}"


def slopes_of(num_heads: int) -> jax.Array:
    """Return the slopes of a power of two of heads, ``[num_heads]``."""
    return jnp.exp2(-8 / num_heads * jnp.arange(1, num_heads + 1))


def _dense_bias(implementation: str, query: jax.Array, key: jax.Array, value: jax.Array) -> Prepared:
    bias = jax.device_put(_bias(query.shape[2], query.shape[1], query.dtype), query.sharding)

    def attend(query: jax.Array, key: jax.Array, value: jax.Array, bias: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(query, key, value, bias, is_causal=True, implementation=implementation)

    return Prepared(attend, (bias,))


@partial(jax.jit, static_argnums=(0, 1, 2))  # one fused loop: nothing else of that size is made on the way
def _bias(num_heads: int, length: int, dtype: Any) -> jax.Array:
    position = jnp.arange(length)
    distance = position[:, None] - position
    return (-slopes_of(num_heads)[:, None, None] * distance)[None].astype(dtype)  # [1, num_heads, length, length]


def _bias_bytes(shape: Shape) -> int:
    return shape.scores // shape.batch * shape.element_bytes


def _xla_bytes(shape: Shape) -> int:
    return _bias_bytes(shape) + 13 * shape.scores  # going backward, three times the scores in float32 and a mask


_DENSE_BYTES = {"xla": _xla_bytes, "cudnn": _bias_bytes}


# --- Compiled -------------------------------------------------------------------------------------------------------


def compiled_pass(
    contestant: Contestant, tensors: Sequence[HeadsFirst | None], backward: bool
) -> tuple[jax.stages.Compiled, tuple[jax.Array, ...]]:
    """Return the compiled pass, whose results are a tuple, and its arguments."""
    query, key, value, grad = (None if x is None else x.array for x in tensors)
    prepared = contestant.prepare(query, key, value)

    def forward(query: jax.Array, key: jax.Array, value: jax.Array, *held: jax.Array) -> tuple[jax.Array, ...]:
        return (prepared.attend(query, key, value, *held),)

    def gradients(
        grad: jax.Array, query: jax.Array, key: jax.Array, value: jax.Array, *held: jax.Array
    ) -> tuple[jax.Array, ...]:
        result, pull = jax.vjp(lambda *tensors: prepared.attend(*tensors, *held), query, key, value)
        # The result too, as a model has to have it: else XLA would leave out what only the result needs.
        return result, *pull(grad)

    arrays = (query, key, value, *prepared.held)
    arrays, function = ((grad, *arrays), gradients) if backward else (arrays, forward)
    return jax.jit(function).lower(*arrays).compile(), arrays


def compiled_call(function: Callable[..., jax.Array], *arguments: Any) -> Call:
    """Return a call that waits for its result."""
    compiled = jax.jit(function).lower(*arguments).compile()
    return lambda: HeadsFirst(jax.block_until_ready(compiled(*arguments)))
