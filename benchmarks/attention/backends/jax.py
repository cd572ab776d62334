"""The attention benchmark in JAX: data, clocks and memory. All is compiled before it is timed.

Tensors are ``[batch, length, num_heads, head_dim]`` here, as JAX's own attention takes them; ``HeadsFirst`` shows them
to the rest of the benchmark as it expects them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import alibi_core
import alibi_jax
from benchmarks.attention.backends.backend import SHARE_OF_MEMORY, Backend, Call, Contestant, Decode
from benchmarks.attention.exact import canonical_slopes, row_of_biases
from benchmarks.attention.sizes import Shape

# JAX's own attention: what there is on each kind of device.
IMPLEMENTATIONS = {"cpu": ("xla",), "cuda": ("cudnn", "xla")}
fused = jax.nn.dot_product_attention


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


class Prepared(NamedTuple):
    """A pass that is ready to be compiled."""

    attend: Callable[..., jax.Array]  # takes query, key, value, [batch, length, num_heads, head_dim], and what is held
    held: tuple[jax.Array, ...] = ()  # arrays of all layers of a model. Arguments, lest they become constants


def without_positions(implementation: str) -> Contestant:
    """Return JAX's causal attention with no positions."""
    prepared = Prepared(partial(fused, is_causal=True, implementation=implementation))
    name = f"JAX {implementation}, no positions"
    is_dense = implementation == "xla"
    needed = {"bytes_needed": _bytes} if is_dense else {}
    return Contestant(name, lambda query, key, value: prepared, is_dense=is_dense, **needed)


def with_bias(implementation: str) -> Contestant:
    """Return JAX's causal attention with a dense bias."""
    note = "the bias is built before, in the dtype of the query"
    return Contestant(f"JAX {implementation}, dense bias", partial(_dense_bias, implementation), _bytes, note=note)


def _dense_bias(implementation: str, query: jax.Array, key: jax.Array, value: jax.Array) -> Prepared:
    bias = jax.device_put(_bias(query.shape[2], query.shape[1], query.dtype), query.sharding)
    return Prepared(partial(fused, is_causal=True, implementation=implementation), (bias,))


@partial(jax.jit, static_argnums=(0, 1, 2))  # one fused loop: nothing else of that size is made on the way
def _bias(num_heads: int, length: int, dtype: Any) -> jax.Array:
    position = jnp.arange(length)
    slopes = jnp.asarray(canonical_slopes(num_heads), jnp.float32)
    bias = -slopes[:, None, None] * (position[:, None] - position)
    return bias[None].astype(dtype)  # [1, num_heads, length, length]


def _bytes(shape: Shape) -> int:
    # The bias; and of "xla" going backward, three times the scores in float32 and a mask.
    return shape.scores // shape.batch * shape.element_bytes + 13 * shape.scores


# --- Compiled -------------------------------------------------------------------------------------------------------


def compiled_pass(
    contestant: Contestant, tensors: Sequence[HeadsFirst | None], backward: bool
) -> tuple[jax.stages.Compiled, tuple[jax.Array, ...]]:
    """Return the compiled pass, whose results are a tuple, and its arguments."""
    query, key, value, grad = (None if x is None else x.array for x in tensors)
    attend, held = contestant.prepare(query, key, value)

    def forward(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        return (attend(*arrays),)

    def gradients(grad: jax.Array, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        result, pull = jax.vjp(lambda *tensors: attend(*tensors, *arrays[3:]), *arrays[:3])
        # The result too, as a model has to have it: else XLA would leave out what only the result needs.
        return result, *pull(grad)

    arrays = (query, key, value, *held)
    arrays, function = ((grad, *arrays), gradients) if backward else (arrays, forward)
    return jax.jit(function).lower(*arrays).compile(), arrays


def compiled_call(function: Callable[..., jax.Array], *arguments: Any) -> Call:
    """Return a call that waits for its result."""
    compiled = jax.jit(function).lower(*arguments).compile()
    return lambda: HeadsFirst(jax.block_until_ready(compiled(*arguments)))


class Jax(Backend):
    """JAX on one kind of device."""

    name, ours = "jax", Contestant("alibi_jax", lambda query, key, value: Prepared(alibi_jax.attention))
    distributions = ("jax", "jaxlib", "flax", "jax-cuda12-plugin", "jax-cuda13-plugin")

    def __init__(self, device: str | None = None) -> None:
        if device == "cpu":
            jax.config.update("jax_platforms", "cpu")  # lest other devices are looked for, and their memory taken
        self.device = device or ("cuda" if jax.default_backend() == "gpu" else "cpu")
        self._place = jax.devices(self.device)[0]  # fails here where there is none
        self.peers = tuple(map(with_bias, IMPLEMENTATIONS[self.device]))

    def machine(self) -> dict[str, Any]:
        if self.device == "cpu":
            return {}  # XLA takes all cores there are
        return {"gpu": self._place.device_kind, "gpu_memory": self._place.memory_stats()["bytes_limit"]}

    def normal(self, shape: Shape, seed: int) -> HeadsFirst:
        batch, num_heads, length, head_dim = shape.dims
        array = jax.random.normal(jax.random.key(seed), (batch, length, num_heads, head_dim)).astype(shape.dtype)
        return HeadsFirst(jax.device_put(array, self._place))

    def as_float64(self, piece: Any) -> np.ndarray:
        return np.asarray(piece).astype(np.float64)

    def free_bytes(self) -> float:
        if self.device == "cpu":
            return super().free_bytes()
        stats = self._place.memory_stats()
        return SHARE_OF_MEMORY * (stats["bytes_limit"] - stats["bytes_in_use"])

    def prepare(self, contestant: Contestant, tensors: Sequence[HeadsFirst | None], backward: bool) -> Call:
        compiled, arrays = compiled_pass(contestant, tensors, backward)
        self.planned = getattr(compiled.memory_analysis(), "temp_size_in_bytes", None)  # of what was prepared last

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
        """Return this library, each kernel of JAX's attention with no positions, and others with ALiBi."""
        if not is_causal:
            raise NotImplementedError("JAX's contestants are causal")

        def ours(name: str, *needed: Callable[[Shape], int]) -> Contestant:
            prepared = Prepared(partial(alibi_jax.attention, implementation=name))
            return Contestant(f"alibi_jax, {name}", lambda query, key, value: prepared, *needed)

        plain = map(without_positions, IMPLEMENTATIONS[self.device])
        return ours("tiled"), ours("dense", _bytes), *plain, *self.peers

    def decode(self, shape: Shape) -> Decode:
        query, key, value = (x.array for x in self.tensors(shape)[:3])
        query = query[:, -1:]
        row = jnp.asarray(row_of_biases(shape.num_heads, shape.length), query.dtype, device=self._place)
        arrays = query, key, value
        sizes = (shape.num_heads * shape.head_dim, shape.num_heads)
        layer = alibi_jax.AlibiAttention(*sizes, dtype=key.dtype, rngs=nnx.Rngs(0))
        cache = layer.make_cache(shape.batch, shape.length + 8).append(key, value)

        def attend_to(query: jax.Array, cache: alibi_jax.KVCache) -> jax.Array:  # of a length unknown to the compiler
            return cache.attend(query, alibi_core.slopes(shape.num_heads, xp=jnp))

        # All keys are in the past of the last token: nothing is to be masked.
        plain = {name: partial(fused, implementation=name) for name in IMPLEMENTATIONS[self.device]}
        fastest = self.fastest({name: partial(compiled_call, attend, *arrays) for name, attend in plain.items()})
        return Decode(
            tuple(map(HeadsFirst, arrays)),
            cached=compiled_call(attend_to, query, cache),
            bare=compiled_call(alibi_jax.attention, *arrays),
            baseline=compiled_call(plain[fastest], *arrays),
            with_row=compiled_call(partial(fused, implementation="xla"), *arrays, row),
            baseline_name=f"JAX {fastest}, no positions",
            row_name="JAX xla, a row of biases",
        )

    # --- Memory -----------------------------------------------------------------------------------------------------

    def weights(self, shape: Shape, backward: bool) -> Iterator[tuple[str, int, int, str]]:
        """Yield what is measured, and what XLA plans: on a GPU that is allocated, and no peak there can be reset."""
        if self.device == "cpu":
            yield "measured", *(self.peak_on_cpu(shape, backward, each) for each in (True, False)), "no positions"
        tensors = self.tensors(shape, backward)
        both = (compiled_pass(each, tensors, backward)[0] for each in (self.ours, self.baseline(tensors, backward)))
        yield "planned", *(each.memory_analysis().temp_size_in_bytes for each in both), "no positions"
