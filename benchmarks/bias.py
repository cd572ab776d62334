"""How long does it take to build a bias, compared with filling an array of its size, and with other libraries?

Every bias is compared bit for bit with float64 arithmetic before it is timed: a causal bias of 32 heads, 4,096 x 4,096
(2.1 GB), and the bias by key of 112 heads over 1,000,000 keys. BLOOM and MPT build one row per head and broadcast it
later; their row is copied to the full shape. The other libraries' biases are not masked. Five minutes on two cores, 7
GB.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

import alibi_core
from benchmarks import harness
from benchmarks.attention import Call, slopes
from benchmarks.harness import Results

LIBRARIES = {"NumPy": "numpy", "PyTorch": "torch", "JAX": "jax.numpy", "MLX": "mlx.core"}


def finishing(name: str, build: Callable[..., Any], *arguments: Any) -> Call:
    """Return a call that builds an array and waits until it is computed."""
    if name == "JAX":
        import jax

        return lambda: jax.block_until_ready(build(*arguments))
    if name == "MLX":
        import mlx.core as mx

        def call() -> Any:
            result = build(*arguments)
            mx.eval(result)
            return result

        return call
    return partial(build, *arguments)


def ours(name: str, xp: Any, num_heads: int, length: int) -> dict[str, Call]:
    """Return calls that build the causal bias, eagerly and compiled."""
    calls = {name: finishing(name, partial(alibi_core.bias, num_heads, length, xp=xp))}
    if name in ("JAX", "MLX"):
        compiler = xp.compile if name == "MLX" else importlib.import_module("jax").jit
        # Pass slopes as an argument: a compiler could evaluate a bias of constants at compile time.
        function = compiler(lambda rates: alibi_core.bias(rates, length))
        calls[f"{name}, compiled"] = finishing(name, function, alibi_core.slopes(num_heads, xp=xp))
    return calls


def peers(name: str, num_heads: int, length: int) -> dict[str, Call]:
    """Return calls that build the biases of other libraries in a framework, ``[num_heads, length, length]``."""
    if name == "MLX":
        from mlx.nn import ALiBi

        return {"mlx.nn.ALiBi": finishing(name, ALiBi.create_alibi_matrix, length, length, num_heads)}
    if name != "PyTorch" or not importlib.util.find_spec("transformers"):
        return {}
    import torch
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

    def dense(row: Call) -> Call:
        return lambda: row().expand(num_heads, length, length).contiguous()

    padding = torch.ones(1, length, dtype=torch.int64)
    found = {
        "BLOOM, transformers": dense(lambda: build_alibi_tensor(padding, num_heads, torch.float32)),
        "MPT, transformers": dense(lambda: build_mpt_alibi_tensor(num_heads, length)),
    }
    if importlib.util.find_spec("x_transformers"):
        from x_transformers.x_transformers import AlibiPositionalBias

        # Make a new module for each call, because the module caches its bias.
        found["x-transformers"] = lambda: AlibiPositionalBias(num_heads)(length, length)
    return found


def wrong_bits(bias: Any, ahead: np.ndarray) -> int:
    """Count elements that differ from slope times ``ahead`` (key minus query position), rounded once to float32."""
    array = np.asarray(bias)
    heads = zip(array, slopes(len(array)), strict=True)  # head by head: a float64 copy of all would take 4 GB
    return sum(np.count_nonzero(x.view(np.uint32) != (y * ahead).astype(np.float32).view(np.uint32)) for x, y in heads)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return its exit status."""
    options = harness.parser("bias", __doc__).parse_args(arguments)
    sizes = (8, 256, 12, 10_000, 2) if options.quick else (32, 4096, 112, 1_000_000, 7)
    num_heads, length, key_heads, kv_len, pairs = sizes
    distributions = "torch", "jax", "jaxlib", "mlx", "array-api-compat", "transformers", "x-transformers"
    results = Results("bias", options, *distributions)
    ahead = (np.arange(length) - np.arange(length)[:, None]).astype(np.float64)
    ahead[ahead > 0] = -np.inf
    keys = np.arange(1.0 - kv_len, 1.0)[None]
    of_keys = f"key_bias, {key_heads} heads, {kv_len:,} keys"
    of_pairs = f"Causal bias, {num_heads} heads, {length:,} x {length:,}"
    for name, module in LIBRARIES.items():
        if not importlib.util.find_spec(module.partition(".")[0]):
            continue
        xp = importlib.import_module(module)
        if name == "MLX":
            xp.set_cache_limit(0)  # otherwise a fill would reuse the last bias's pages
        biases = ours(name, xp, num_heads, length)
        row = finishing(name, partial(alibi_core.key_bias, key_heads, kv_len, xp=xp))
        subjects = [(of_pairs, each, call, (num_heads, length, length), ahead) for each, call in biases.items()]
        subjects.append((of_keys, name, row, (key_heads, 1, kv_len), keys))
        for group, each, call, shape, exact in subjects:
            if results.check(f"{group}: elements that differ in {each}", wrong_bits(call(), exact), 0):
                fill = finishing(name, partial(xp.full, shape, -1.0, dtype=xp.float32))
                results.add(group, each, f"a fill, {name}", **harness.paired(call, fill, pairs))
        *_, fastest = biases
        for peer, call in peers(name, num_heads, length).items():
            results.add(f"{of_pairs}, beside others", fastest, peer, **harness.paired(biases[fastest], call, pairs))
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
