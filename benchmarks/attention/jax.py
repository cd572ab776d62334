"""The attention benchmark in JAX: data, clocks and memory. All is compiled before it is timed.

Tensors are ``[batch, length, num_heads, head_dim]`` here, as JAX's own attention takes them; ``HeadsFirst`` shows them
to the rest of the benchmark as it expects them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import alibi_core
import alibi_jax
from benchmarks.attention.backend import SHARE_OF_MEMORY, Backend, Call, Contestant, Decode
from benchmarks.attention.sizes import Decoding, Shape

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


OURS = Contestant("alibi_jax", lambda query, key, value: Prepared(alibi_jax.attention))


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


def _planned(contestant: Contestant, tensors: Sequence[HeadsFirst | None], backward: bool) -> int:
    compiled, _ = compiled_pass(contestant, tensors, backward)
    return compiled.memory_analysis().temp_size_in_bytes


def _cached(query: jax.Array, key: jax.Array, value: jax.Array) -> Call:
    """Return the call that attends to a layer's cache, its length unknown to the compiler as it is when decoding.

    The one place that knows how a cache is filled and asked.
    """
    batch, length, num_heads, head_dim = key.shape
    layer = alibi_jax.AlibiAttention(num_heads * head_dim, num_heads, dtype=key.dtype, rngs=nnx.Rngs(0))
    cache = layer.make_cache(batch, length + 8).append(key, value)

    def attend_to(query: jax.Array, cache: alibi_jax.KVCache) -> jax.Array:
        return cache.attend(query, alibi_core.slopes(num_heads, xp=jnp))

    return compiled_call(attend_to, query, cache)


class Jax(Backend):
    """JAX on one kind of device."""

    name, ours = "jax", OURS
    distributions = ("jax", "jaxlib", "flax", "jax-cuda12-plugin", "jax-cuda13-plugin")

    def __init__(self, device: str | None = None) -> None:
        if device == "cpu":
            jax.config.update("jax_platforms", "cpu")  # lest other devices are looked for, and their memory taken
        self.device = device or ("cuda" if jax.default_backend() == "gpu" else "cpu")
        self._place = jax.devices(self.device)[0]  # fails here where there is none
        self.peers = peers(self.device)

    def machine(self) -> dict[str, Any]:
        if self.device == "cpu":
            return {}  # XLA takes all cores there are
        return {"gpu": self._place.device_kind, "gpu_memory": self._place.memory_stats()["bytes_limit"]}

    # --- Data -------------------------------------------------------------------------------------------------------

    def tensors(self, shape: Shape, backward: bool = False) -> tuple[HeadsFirst | None, ...]:
        batch, num_heads, length, head_dim = shape.dims
        made = []
        for seed in range(4 if backward else 3):
            array = jax.random.normal(jax.random.key(seed), (batch, length, num_heads, head_dim)).astype(shape.dtype)
            made.append(HeadsFirst(jax.device_put(array, self._place)))
        return (*made, *[None] * (4 - len(made)))

    def as_float64(self, piece: Any) -> np.ndarray:
        return np.asarray(piece).astype(np.float64)

    def free_bytes(self) -> float:
        if self.device != "cpu":
            stats = self._place.memory_stats()
            return SHARE_OF_MEMORY * (stats["bytes_limit"] - stats["bytes_in_use"])
        return super().free_bytes()

    # --- Passes -----------------------------------------------------------------------------------------------------

    def prepare(self, contestant: Contestant, tensors: Sequence[HeadsFirst | None], backward: bool) -> Call:
        compiled, arrays = compiled_pass(contestant, tensors, backward)

        def call() -> Any:
            results = [HeadsFirst(x) for x in jax.block_until_ready(compiled(*arrays))]
            return results[1:] if backward else results[0]

        return call

    def baseline(self, tensors: Sequence[HeadsFirst | None], backward: bool) -> Contestant:
        """Return causal attention with no positions: on a GPU the fastest of those that JAX has."""
        contestants = {name: without_positions(name) for name in IMPLEMENTATIONS[self.device]}
        calls = {name: partial(self.prepare, each, tensors, backward) for name, each in contestants.items()}
        return contestants[self.fastest(calls)]

    def everyone(self, is_causal: bool) -> tuple[Contestant, ...]:
        if not is_causal:
            raise NotImplementedError("JAX's contestants are causal")
        ours = (
            Contestant(
                f"alibi_jax, {name}",
                lambda *_, name=name: Prepared(partial(alibi_jax.attention, implementation=name)),
                _xla_bytes if name == "dense" else lambda shape: 0,
            )
            for name in ("tiled", "dense")
        )
        return *ours, *map(without_positions, IMPLEMENTATIONS[self.device]), *self.peers

    # --- Decoding ---------------------------------------------------------------------------------------------------

    def decode(self, size: Decoding) -> Decode:
        shape = size.shape
        query, key, value = (x.array for x in self.tensors(shape)[:3])
        query = query[:, -1:]
        distance = jnp.arange(shape.length - 1, -1, -1)
        row = (-slopes_of(shape.num_heads)[:, None] * distance)[None, :, None]  # [1, num_heads, 1, kv_len]
        row = jax.device_put(row.astype(query.dtype), self._place)
        arrays = query, key, value
        # All keys are in the past of the last token: nothing is to be masked.
        plain = {
            name: partial(jax.nn.dot_product_attention, implementation=name) for name in IMPLEMENTATIONS[self.device]
        }
        fastest = self.fastest({name: partial(compiled_call, attend, *arrays) for name, attend in plain.items()})
        with_row = partial(jax.nn.dot_product_attention, implementation="xla")
        return Decode(
            tuple(map(HeadsFirst, arrays)),
            cached=_cached(query, key, value),
            bare=compiled_call(alibi_jax.attention, *arrays),
            baseline=compiled_call(plain[fastest], *arrays),
            with_row=compiled_call(with_row, *arrays, row),
            baseline_name=f"{called(fastest)}, no positions",
            row_name=f"{called('xla')}, a row of biases",
        )

    # --- Memory -----------------------------------------------------------------------------------------------------

    def extra_bytes(self, shape: Shape, backward: bool) -> int:
        """Return the memory that XLA plans for a pass of ours beyond its arguments, its result and its gradients.

        On a GPU that is what is allocated, and the peak that the device tells of cannot be reset.
        """
        tensors = self.tensors(shape, backward)
        return _planned(self.ours, tensors, backward)

    def weights(self, shape: Shape, backward: bool) -> Iterator[tuple[str, int, int, str]]:
        if self.device == "cpu":
            yield "measured", *(self.peak_on_cpu(shape, backward, each) for each in (True, False)), "no positions"
        tensors = self.tensors(shape, backward)
        ours, theirs = (_planned(each, tensors, backward) for each in (self.ours, self.baseline(tensors, backward)))
        yield "planned", ours, theirs, "no positions"
