"""What a call would do, and why."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from alibi_core import AttentionCall, KeyRanges
from alibi_core.backend import FIELDS, LENGTH_FIRST, Explanation, Measuring, check_keywords
from alibi_jax._attention import attention
from alibi_jax._call import Operands, Rules, as_slopes, needed_keys, ranges_of, take_apart
from alibi_jax._compatible import broadcasting
from alibi_jax._dispatch import IMPLEMENTATIONS, Implementation, Target, checked, choose, in_full, name_of, refusal
from alibi_jax._tiled import Tiling, jobs_of, sizes_of
from alibi_jax._tpu import TPU, KernelShape


@broadcasting
def explain(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    slopes: int | jax.Array | None = None,
    *,
    implementation: Implementation | None = None,
    **arguments: Any,
) -> Explanation:
    """Say which implementation a call of :func:`alibi_jax.attention` would use, and what it would compute.

    It measures the arrays as the call would, where they are, but attends to nothing. It answers for one device;
    where a compiler divides a program among several by itself, ``"tiled"`` runs.

    Args:
        query: As for :func:`alibi_jax.attention`, like all arguments. Not traced: numbers are told.
        key: Likewise.
        value: Likewise.
        slopes: Likewise.
        implementation: Likewise.
        **arguments: Likewise.

    Returns:
        The explanation, its horizons in NumPy.

    Raises:
        TypeError, ValueError, NotImplementedError: As the call would.

    Example:
        >>> query, key, value = jnp.zeros((3, 1, 8, 2, 4))
        >>> print(explain(query, key, value, tolerance=0.0, implementation="tiled"))  # doctest: +ELLIPSIS
        implementation: tiled
        ...
        tolerance: 0, which moves the result by at most 0
        scores: 128 computed, 177.8% of the 72 visible
        horizons, in tokens, of the heads: all all
    """
    implementation = checked(implementation)
    check_keywords(attention, arguments)
    for name, array in {"query": query, "key": key, "value": value, "slopes": slopes, **arguments}.items():
        if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(array)):
            raise TypeError(f"{name} must have known values, got a traced array; explain calls outside of jax.jit")
    arguments.pop("dropout_key", None)
    if "future_slopes" in arguments:
        arguments["future_slopes"] = as_slopes(arguments["future_slopes"])
    call = AttentionCall.check(query, key, value, as_slopes(slopes), layout=LENGTH_FIRST, xp=jnp, **arguments)
    if call.dense_only is not None:
        implementation = in_full(call, implementation)
    if call.is_empty:
        return Explanation.of_nothing(call)
    rules, operands = take_apart(call, query, key, value)
    target = Target(_platform(query))
    chosen = choose(implementation, target, operands)
    others = (name for name in IMPLEMENTATIONS if name != name_of(chosen))
    reasons = {name: call.dense_only or refusal(name, target, operands) for name in others}
    if chosen == "dense":
        rules = replace(rules, tolerance=0.0)
    tile = max(getattr(chosen, "q_block", 1), 128)
    plan = jax.jit(lambda operands: [getattr(ranges_of(rules, operands, tile, 128), name) for name in FIELDS])
    q_block = Measuring(q_block=tile, kv_block=128).q_block_of(call)
    ranges = [KeyRanges(q_block, *limits) for limits in zip(*map(np.asarray, plan(operands)), strict=True)]
    flat = call.with_one_batch_axis()
    entries = [replace(flat, q_offset=int(x)) for x in np.broadcast_to(np.asarray(flat.q_offset), flat.batch)]
    computed = _scores_computed(chosen, rules, operands, together=target.platform != "cpu")
    largest = float(jnp.max(jnp.abs(value)))
    return Explanation.of(name_of(chosen), reasons, rules.tolerance, largest, computed, entries, ranges)


def _platform(array: jax.Array) -> str:
    return next(iter(array.devices())).platform if isinstance(array, jax.Array) else jax.default_backend()


def _scores_computed(chosen: Implementation, rules: Rules, operands: Operands, together: bool) -> int:
    if isinstance(chosen, TPU):
        shape = KernelShape.of(rules, operands, chosen)
        return visited_blocks(rules, operands, chosen) * shape.q_block * shape.kv_block
    batch, q_len, num_heads, _ = operands.query.shape
    if chosen == "dense":
        return batch * num_heads * q_len * operands.key.shape[1]
    sizes = sizes_of(rules, operands, Tiling(together=together))
    blocks = jax.jit(lambda operands: jobs_of(rules, operands, sizes).blocks)(operands)  # [steps, lanes]
    steps = int(np.max(np.asarray(blocks, np.int64), axis=1).sum())  # each with as many blocks as its widest job
    return steps * sizes.lanes * math.prod(sizes.part[x] for x in "bhgqk")


def visited_blocks(rules: Rules, operands: Operands, options: TPU) -> int:
    """Return how many blocks of scores a kernel's forward pass computes, over batch entries and heads."""
    shape = KernelShape.of(rules, operands, options)
    plan = jax.jit(partial(needed_keys, rules, q_tile=shape.q_block, kv_tile=shape.kv_block))
    first, stop = (np.asarray(x, np.int64) for x in plan(operands))
    return int(np.where(first < stop, -(-stop // shape.kv_block) - first // shape.kv_block, 0).sum())
