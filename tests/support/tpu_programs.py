"""Compile attention for TPUs that are not there, and print as JSON what the compiler made of it.

    python -m tests.support.tpu_programs v5e:2x2 single        a line for each program, on one chip
    python -m tests.support.tpu_programs v5e:2x2 divided       likewise, on four

A process of its own: what libtpu is told through the environment it is told before JAX is imported.
"""

from __future__ import annotations

import json
import math
import re
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from benchmarks.tpu import devices_of, pretend

# The topologies, and what libtpu calls a machine that has them.
TOPOLOGIES = {"v5e:2x2": "v5litepod-4", "v5p:2x2x1": "v5p-8", "v6e:2x2": "v6e-4"}
FIRST = "v5e:2x2"  # where all is compiled, forward passes alone, too
TYPE_BYTES = {"bfloat16": 2, "float32": 4}
COLLECTIVES = ("all-gather", "all-to-all", "collective-permute", "all-reduce", "reduce-scatter")
_ARRAY = re.compile(r"\b(?:pred|[a-z]+\d+)\[([\d,]+)\]")

# Each is sizes, dtype and arguments. Sizes: batch, query heads, key/value heads, q_len, kv_len, head_dim. Arguments
# that are lists are shapes of arrays that are traced.
Sizes = tuple[int, int, int, int, int, int]
SINGLE: dict[str, tuple[Sizes, str, dict[str, Any]]] = {
    "causal, long": ((1, 4, 4, 32768, 32768, 64), "bfloat16", {}),
    "causal, twice as long": ((1, 4, 4, 65536, 65536, 64), "bfloat16", {}),
    "symmetric, float32, odd": ((1, 2, 2, 1000, 1000, 80), "float32", {"is_causal": False}),
    "asymmetric, window": (
        (2, 2, 2, 2048, 2048, 128),
        "bfloat16",
        {"is_causal": False, "future_slopes": [2], "window_size": 700},
    ),
    "grouped, packed, slopes of the batch": (
        (2, 6, 2, 2048, 2048, 96),
        "bfloat16",
        {"segment_ids": [2, 2048], "slopes": [2, 6]},
    ),
    "key mask, offsets, float32": (
        (2, 2, 1, 1000, 1500, 256),
        "float32",
        {"mask": [2, 1, 1, 1500], "q_offset": [2]},
    ),
    "decoding": ((2, 8, 2, 1, 4096, 128), "bfloat16", {"q_offset": []}),
}
DIVIDED: dict[str, tuple[Sizes, str, dict[str, Any]]] = {
    "causal": ((4, 8, 4, 2048, 2048, 64), "bfloat16", {}),
    "asymmetric, packed": (
        (4, 4, 4, 2048, 2048, 64),
        "bfloat16",
        {"is_causal": False, "future_slopes": [4], "segment_ids": [4, 2048]},
    ),
}
ARRAYS = {"future_slopes": "float32", "slopes": "float32", "segment_ids": "int32", "mask": "bool", "q_offset": "int32"}
# Of a shape [batch, ...], [num_heads] or [batch, num_heads]: which axes are divided, batch as "data", heads as "heads".
DIVISIONS = {"future_slopes": ("heads",), "slopes": ("heads",), "segment_ids": ("data",)}


def main(topology: str, kind: str) -> None:
    pretend(TOPOLOGIES[topology])
    devices = devices_of(topology)
    programs = single(devices, topology) if kind == "single" else divided(devices)
    for name, lowered in programs:
        started = time.perf_counter()
        try:
            stage = "compile"
            compiled = lowered().compile()
            stage = "describe"
            found = described(compiled)
        except Exception as error:  # the test that asks says which program it was
            found = {"error": f"{stage}: {type(error).__name__}: {error}"[-2000:]}
        print(json.dumps({"name": name, "seconds": time.perf_counter() - started, **found}), flush=True)


def names_of(topology: str) -> list[str]:
    """Return which of the programs for one chip are compiled: again, only what asks most of a chip, or is decoding."""
    return [name for name in SINGLE if topology == FIRST or name not in ("causal, long", "symmetric, float32, odd")]


def single(devices: Any, topology: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    from jax.sharding import SingleDeviceSharding

    one = SingleDeviceSharding(devices[0])
    for name in names_of(topology):
        sizes, dtype, arguments = SINGLE[name]
        # With gradients there is a forward kernel, too, and long rows are there for their memory, of which gradients
        # take the most.
        for gradient in (False, True) if topology == FIRST and "long" not in name else (True,):
            lowered = partial(_lowered, sizes, dtype, arguments, gradient, lambda *_: one)
            yield f"{name}{', gradient' * gradient}", lowered


def divided(devices: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    import jax
    import numpy as np
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as Spec

    mesh = jax.sharding.Mesh(np.asarray(devices[:4]).reshape(2, 2), ("data", "heads"))

    def spec_of(name: str, shape: list[int]) -> Any:
        if name == "tensor":
            return Spec("data", None, "heads")
        return Spec("data", "heads") if name == "slopes" and len(shape) == 2 else Spec(*DIVISIONS[name])

    def sharding(name: str, shape: list[int]) -> Any:
        return NamedSharding(mesh, spec_of(name, shape))

    def by_shard_map(function: Any, shapes: dict[str, Any]) -> Any:
        specs = {name: spec_of("tensor" if name in TENSORS else name, x) for name, x in shapes.items()}
        return jax.shard_map(function, mesh=mesh, in_specs=(specs,), out_specs=Spec("data", None, "heads"))

    for name, (sizes, dtype, arguments) in DIVIDED.items():
        for gradient in (False, True):
            for way, around in (("by hand", by_shard_map), ("by the compiler", None)):
                lowered = partial(_lowered, sizes, dtype, arguments, gradient, sharding, around)
                yield f"{name}, {way}{', gradient' * gradient}", lowered


TENSORS = ("query", "key", "value")


def _lowered(
    sizes: Sizes, dtype: str, arguments: dict[str, Any], gradient: bool, sharding: Any, around: Any = None
) -> Any:
    import jax
    import jax.numpy as jnp

    import alibi_jax

    batch, num_heads, num_kv_heads, q_len, kv_len, head_dim = sizes
    lengths = ((q_len, num_heads), (kv_len, num_kv_heads), (kv_len, num_kv_heads))
    shapes: dict[str, Any] = {name: [batch, *length, head_dim] for name, length in zip(TENSORS, lengths, strict=True)}
    shapes |= {"slopes": [num_heads]} | {name: x for name, x in arguments.items() if isinstance(x, list)}
    rest = {name: x for name, x in arguments.items() if not isinstance(x, list)}
    inputs = {
        name: jax.ShapeDtypeStruct(
            shape,
            dtype if name in TENSORS else ARRAYS[name],
            sharding=sharding("tensor" if name in TENSORS else name, shape),
        )
        for name, shape in shapes.items()
    }

    def attend(inputs: dict[str, Any]) -> jax.Array:
        return alibi_jax.attention(**inputs, **rest)

    function = around(attend, shapes) if around else attend
    if not gradient:
        return jax.jit(function).lower(inputs)
    wanted = [name for name in inputs if inputs[name].dtype in (jnp.float32, jnp.bfloat16)]

    def with_gradients(inputs: dict[str, Any]) -> Any:
        def loss(some: dict[str, Any]) -> jax.Array:
            return jnp.sum(function(inputs | some).astype(jnp.float32) ** 2)

        return jax.grad(loss)({name: inputs[name] for name in wanted})

    return jax.jit(with_gradients).lower(inputs)


def described(compiled: Any) -> dict[str, Any]:
    """Return what tests want to know of a program."""
    memory = compiled.memory_analysis()
    sizes = {"temporaries": memory.temp_size_in_bytes, "arguments": memory.argument_size_in_bytes}
    try:
        text = compiled.as_text()
    except RuntimeError as error:  # some programs the compiler cannot print itself
        return sizes | {"unreadable": str(error)}
    collectives = [
        {"kind": kind, "elements": sum(map(_product, _ARRAY.findall(match[1])))}
        for kind in COLLECTIVES
        for match in re.finditer(rf"= ([^=\n]*?) {kind}(?:-start)?\(", text)
    ]
    return sizes | {
        "kernels": len(re.findall(r'custom_call_target="tpu_custom_call"', text)),
        "names": sorted(set(re.findall(r"alibi_(?:forward|backward_of_keys|backward_of_queries)", text))),
        "collectives": collectives,
        "largest": max((_product(shape), shape) for shape in _ARRAY.findall(text) if "," in shape),
    }


def _product(shape: str) -> int:
    return math.prod(map(int, shape.split(",")))


if __name__ == "__main__":
    main(*sys.argv[1:])
