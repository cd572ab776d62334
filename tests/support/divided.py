"""Calls on sequences divided among processes or devices, and the comparison of joined results with the oracle."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from alibi_core.conformance import testing
from alibi_core.conformance.testing import UNIT_ROUNDOFF, Sizes, rounded

TENSORS = ("query", "key", "value")


@dataclass(frozen=True)
class Case:
    """A call on a divided sequence, and the data that it is given."""

    length: int
    shards: int
    batch: int = 1
    kv_heads: int = 2
    slopes: tuple[float, ...] = (2.0, 0.7, 0.3, 0.1)
    future_slopes: tuple[float, ...] | None = None
    head_dim: int = 5
    is_causal: bool = True
    window_size: int | None = None
    dtype: str = "float32"
    tolerance: float | None = None
    seed: int = 0
    cuts: tuple[float, ...] = ()  # starts of segments, as shares of the length
    large: tuple[tuple[str, int, int, int], ...] = ()  # factors: tensor, border of shards, side, power of 4
    shift: float = 0.0  # of all keys along one feature, in hundreds, away from queries
    drift: float = 0.0  # of the keys of the first half, along the feature that queries look for

    def varied(self, seed: int) -> Case:
        """Return the case with other data, which a seed decides."""
        random = np.random.default_rng(seed)

        def one_of(*values: Any) -> Any:
            return values[random.integers(len(values))]

        large = tuple(
            (one_of(*TENSORS), *(int(random.integers(*x)) for x in ((self.shards + 1,), (2,), (1, 7))))
            for _ in range(random.integers(4))
        )
        cuts = one_of((), (), (0.3, 0.31, 0.9), (0.5,))
        return replace(self, seed=seed, large=large, cuts=cuts, shift=one_of(0.0, 0.0, 1.0))

    @property
    def shard_len(self) -> int:
        return -(-self.length // self.shards)

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the inputs, in float64: tensors ``[batch, heads, length, head_dim]``, and the ``ids`` of segments."""
        random = np.random.default_rng(self.seed)
        heads = {"query": len(self.slopes), "key": self.kv_heads, "value": self.kv_heads, "cotangent": len(self.slopes)}
        arrays = {name: random.normal(size=(self.batch, n, self.length, self.head_dim)) for name, n in heads.items()}
        for name, border, side, power in self.large:
            token = border * self.shard_len - side
            arrays[name][:, :, min(max(token, 0), self.length - 1)] *= 4.0**power
        arrays["key"][..., 0] += 100 * self.shift
        arrays["query"][..., 0] -= 1.5 * bool(self.shift)
        if self.drift:
            arrays["key"][:, :, : self.length // 2, 0] += self.drift
            arrays["query"][..., 0] = abs(arrays["query"][..., 0])
        cuts = np.asarray([round(cut * self.length) for cut in self.cuts])
        arrays["ids"] = np.broadcast_to(
            (np.arange(self.length)[:, None] >= cuts).sum(axis=1), (self.batch, self.length)
        )
        return arrays


def attention_of_whole(mesh: Any, query: Any, key: Any, value: Any, slopes: Any = None, **options: Any) -> Any:
    """Return JAX's sequence-parallel attention of whole arrays, padded to shards along the mesh axis ``tokens``.

    Further options are those of ``alibi_jax.parallel.attention``, and ``batch_axis``, of a mesh axis.
    """
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    from alibi_jax import parallel

    batch_axis, head_axis = options.pop("batch_axis", None), options.get("head_axis")
    length, missing = query.shape[1], -query.shape[1] % mesh.shape["tokens"]
    of_tokens, of_slopes = PartitionSpec(batch_axis, "tokens"), PartitionSpec()
    spec = PartitionSpec(batch_axis, "tokens", head_axis)
    named = {"slopes": (slopes, of_slopes), "future_slopes": (options.pop("future_slopes", None), of_slopes)}
    named["segment_ids"] = options.pop("segment_ids", None), of_tokens
    named = {name: pair for name, pair in named.items() if pair[0] is not None}

    def local(tensors: Any, arrays: Any) -> Any:
        return parallel.attention(*tensors, **arrays, axis_name="tokens", length=length, **options)

    def padded(array: Any) -> Any:
        return jnp.pad(array, [(0, missing if axis == 1 else 0) for axis in range(array.ndim)])

    specs = [spec] * 3, {name: pair[1] for name, pair in named.items()}
    arrays = {name: x if name != "segment_ids" else padded(x) for name, (x, _) in named.items()}
    inputs = [padded(x) for x in (query, key, value)], arrays
    is_explicit = jax.sharding.AxisType.Explicit in mesh.axis_types
    if is_explicit:
        inputs = jax.tree.map(lambda x, to: jax.sharding.reshard(x, NamedSharding(mesh, to)), inputs, specs)
    result = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=spec)(*inputs)
    if is_explicit:
        result = jax.sharding.reshard(result, NamedSharding(mesh, PartitionSpec(batch_axis, None, head_axis)))
    return result[:, :length]


def assert_exact(call: Case, found: dict[str, np.ndarray], *, has_segments: bool) -> None:
    """Assert that the result and its gradients are exact, but for rounding and for a share of softmax weight.

    ``found`` has ``result``, and gradients by argument; gradients of slopes are summed over batch entries.
    """
    arrays, share = call.arrays(), UNIT_ROUNDOFF[call.dtype] if call.tolerance is None else call.tolerance
    rules: dict[str, Any] = {"is_causal": call.is_causal, "window_size": call.window_size}
    if call.future_slopes is not None:
        rules["future_slopes"] = np.float32(call.future_slopes)
    if has_segments:
        rules["segment_ids"] = arrays["ids"]
    heads = call.kv_heads, len(call.slopes) // call.kv_heads
    problem = testing.Case(Sizes(call.batch, *heads, (call.length, call.length), call.head_dim))
    tensors = {name: arrays[name] for name in (*TENSORS, "cotangent")}
    problem = problem.with_arguments("", rules).with_arrays(**tensors, slopes=rounded(call.slopes, "float32"))
    answers = {"result": problem.exact(call.dtype, share).output} | problem.gradients(call.dtype, share)
    assert found.keys() >= answers.keys()
    for name, answer in answers.items():
        try:
            testing.assert_within_budget(found[name], answer)
        except AssertionError as error:
            raise AssertionError(f"{name}, {error}") from None
