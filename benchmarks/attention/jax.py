"""The attention benchmark in JAX: data, clocks and memory. All is compiled before it is timed.

Tensors are ``[batch, length, num_heads, head_dim]`` here, as JAX's own attention takes them; ``HeadsFirst`` shows them
to the rest of the benchmark as it expects them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import alibi_core
import alibi_jax
from benchmarks import harness
from benchmarks.attention.backend import Call, Contestant, Decode
from benchmarks.attention.exact import Reference, sample
from benchmarks.attention.jax_peers import (
    IMPLEMENTATIONS,
    OURS,
    HeadsFirst,
    called,
    compiled_call,
    compiled_pass,
    peers,
    slopes_of,
    this_library,
    without_positions,
)
from benchmarks.attention.sizes import Decoding, Shape

DISTRIBUTIONS = ("jax", "jaxlib", "flax", "jax-cuda12-plugin", "jax-cuda13-plugin")
SHARE_OF_MEMORY = 0.6  # of what is free: a contestant that needs more is left out, lest the machine swap


class Jax:
    """JAX on one kind of device."""

    name, ours, distributions = "jax", OURS, DISTRIBUTIONS

    def __init__(self, device: str | None = None) -> None:
        if device == "cpu":
            jax.config.update("jax_platforms", "cpu")  # lest other devices are looked for, and their memory taken
        self.device = device or ("cuda" if jax.default_backend() == "gpu" else "cpu")
        self._place = jax.devices(self.device)[0]  # fails here where there is none
        self.peers = peers(self.device)

    def machine(self) -> dict[str, Any]:
        """Describe what is special about this device."""
        if self.device == "cpu":
            return {}  # XLA takes all cores there are
        return {"gpu": self._place.device_kind, "gpu_memory": self._place.memory_stats()["bytes_limit"]}

    # --- Data -------------------------------------------------------------------------------------------------------

    def tensors(self, shape: Shape, backward: bool = False) -> tuple[HeadsFirst | None, ...]:
        """Return normally distributed query, key, value and, with ``backward``, gradient of the result, else None."""
        batch, num_heads, length, head_dim = shape.dims
        made = []
        for seed in range(4 if backward else 3):
            array = jax.random.normal(jax.random.key(seed), (batch, length, num_heads, head_dim)).astype(shape.dtype)
            made.append(HeadsFirst(jax.device_put(array, self._place)))
        return (*made, *[None] * (4 - len(made)))

    def as_float64(self, piece: Any) -> np.ndarray:
        """Return a piece of a tensor as a NumPy array."""
        return np.asarray(piece).astype(np.float64)

    def free_bytes(self) -> float:
        """Return how much memory a contestant may take."""
        if self.device != "cpu":
            stats = self._place.memory_stats()
            return SHARE_OF_MEMORY * (stats["bytes_limit"] - stats["bytes_in_use"])
        return SHARE_OF_MEMORY * harness.available_memory()

    # --- Passes -----------------------------------------------------------------------------------------------------

    def seconds(self, call: Call) -> float:
        """Return how long a call takes; each waits for its result."""
        return harness.seconds_of(call)

    def prepare(self, contestant: Contestant, tensors: Sequence[HeadsFirst | None], backward: bool) -> Call:
        """Return the call to time, compiled, which returns the result, or with ``backward`` the gradients.

        Args:
            contestant: Whose.
            tensors: Query, key, value and the gradient of the result.
            backward: Whether to go on to the gradients.
        """
        compiled, arrays = compiled_pass(contestant, tensors, backward)

        def call() -> Any:
            results = [HeadsFirst(x) for x in jax.block_until_ready(compiled(*arrays))]
            return results[1:] if backward else results[0]

        return call

    def baseline(self, tensors: Sequence[HeadsFirst | None], backward: bool) -> Contestant:
        """Return causal attention with no positions: on a GPU the fastest of those that JAX has."""
        contestants = {name: without_positions(name) for name in IMPLEMENTATIONS[self.device]}
        calls = {name: partial(self.prepare, each, tensors, backward) for name, each in contestants.items()}
        return contestants[self._fastest(calls)]

    def _fastest(self, calls: dict[str, Callable[[], Call]]) -> str:
        """Return the name of the fastest call, of those that can be made and do run."""
        if len(calls) == 1:
            return next(iter(calls))
        times = {}
        for name, make in calls.items():
            with suppress(RuntimeError, ValueError):  # it does not take these, or needs too much memory
                call = make()
                times[name] = statistics.median([self.seconds(call) for _ in range(5)][2:])
        return min(times, key=times.__getitem__)

    def contestant(self) -> Contestant:
        """Return this library."""
        return this_library()

    # --- Decoding ---------------------------------------------------------------------------------------------------

    def decode(self, size: Decoding) -> Decode:
        """Fill a layer's cache and return who attends to it with one query."""
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
        fastest = self._fastest({name: partial(compiled_call, attend, *arrays) for name, attend in plain.items()})
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
        return _planned(this_library(), tensors, backward)

    def weights(self, shape: Shape, backward: bool) -> Iterator[tuple[str, int, int, str]]:
        """Yield how it was found, that memory, and the baseline's and its name: measured, on the CPU, and planned."""
        if self.device == "cpu":
            subject = "benchmarks.attention.jax:peak_subject"
            peaks = [harness.peak_growth(subject, asdict(shape), backward, is_ours) for is_ours in (True, False)]
            # What is made during the call, and is not extra: the result and, going backward, three gradients.
            made = shape.tensor_bytes * (4 if backward else 1)
            yield "measured", peaks[0] - made, peaks[1] - made, "no positions"
        tensors = self.tensors(shape, backward)
        ours, theirs = (
            _planned(each, tensors, backward) for each in (this_library(), self.baseline(tensors, backward))
        )
        yield "planned", ours, theirs, "no positions"

    def longest(self, shape: Shape, rows: int) -> dict[str, Any]:
        """Return what a very long forward pass costs, ``seconds`` and ``extra`` bytes, and its errors.

        Args:
            shape: Of the pass.
            rows: How many queries a head to recompute.
        """
        done = harness.run_alone("benchmarks.attention.jax:longest_subject", asdict(shape), rows)
        return {"seconds": done["seconds"], "extra": done["peak"] - shape.tensor_bytes} | done["found"]


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


# --- In processes of their own ----------------------------------------------------------------------------------------


def peak_subject(sizes: dict[str, Any], backward: bool, is_ours: bool) -> Call:
    """Prepare a pass on the CPU: all is compiled, and a small call starts whatever starts only once."""
    jax_cpu = Jax("cpu")
    shape = Shape(**sizes)
    small = Shape(shape.num_heads, shape.head_dim, min(256, shape.length), shape.dtype)
    for each in (small, shape):
        tensors = jax_cpu.tensors(each, backward)
        call = jax_cpu.prepare(this_library() if is_ours else jax_cpu.baseline(tensors, backward), tensors, backward)
        if each is small:
            call()
    return call


def longest_subject(sizes: dict[str, Any], rows: int) -> tuple[Call, Callable[[HeadsFirst], dict[str, float]]]:
    """Prepare a forward pass of ours on the CPU, and what tells the errors of some of its rows."""
    jax_cpu = Jax("cpu")
    tensors = jax_cpu.tensors(Shape(**sizes))
    chosen = sample(tensors[0].shape[2], rows)

    def examine(result: HeadsFirst) -> dict[str, float]:
        return asdict(Reference.of(tensors, chosen, jax_cpu.as_float64).error(result))

    return jax_cpu.prepare(jax_cpu.contestant(), tensors, False), examine
