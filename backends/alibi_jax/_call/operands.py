"""An attention call taken apart: what is known when it is traced, and the arrays, each with one batch axis."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from alibi_core.backend import ARRAY_AXES, AttentionCall, CallRules, checks, namespace_of, tolerance_of


class Operands(NamedTuple):
    """The arrays of a call, in JAX's layout. A batch axis of length 1 stands for any; what is absent is None."""

    query: Any  # [batch, q_len, num_heads, head_dim]
    key: Any  # [batch, kv_len, num_kv_heads, head_dim], or as Rules.kv_heads_first says
    value: Any  # likewise
    slopes: Any  # [batch or 1, num_heads], float32, or float64 for float64 tensors
    future_slopes: Any = None  # likewise
    q_offset: Any = None  # [batch or 1], int32; None where Rules has it
    q_segment_ids: Any = None  # [batch or 1, q_len], integers
    kv_segment_ids: Any = None  # [batch or 1, kv_len]; None where they are those of the queries
    mask: Any = None  # [batch or 1, num_heads or 1, q_len or 1, kv_len or 1], booleans
    key_norms: Any = None  # [batch or 1, num_kv_heads, blocks of keys], bounds of norms that somebody knows
    lower: Any = None  # [batch or 1, num_heads, q_len]: log-sum-exps are at least this, as other keys are known to give


@dataclass(frozen=True)
class Rules(CallRules):
    """What of a call is known when it is traced. Hashable, as a compiler's cache asks for."""

    kv_heads_first: bool = False  # whether key and value are [batch, num_kv_heads, kv_len, head_dim], as a cache is
    is_part: bool = False  # whether queries have other keys besides: then distances are counted from the queries alone


def floating_dtype(name: str, dtype: Any) -> Any:
    """Return a floating dtype that an argument names, as NumPy has it."""
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        raise TypeError(f"{name} must be a floating dtype such as jnp.float32, got {dtype!r}") from None
    return checks.floating_dtype(namespace_of(xp=jnp), name, found)


def as_slopes(slopes: Any) -> Any:
    """Return slopes as they are, NumPy's as JAX's: a few numbers, which may well be constants of a program."""
    if type(slopes) is not np.ndarray or not np.issubdtype(slopes.dtype, np.number):
        return slopes
    with np.errstate(over="ignore"):  # what becomes infinite is refused
        return jnp.asarray(slopes)


def kv_axis(rules: Rules) -> int:
    """Return which axis of keys and values tokens are along; their heads are along the other of 1 and 2."""
    return 2 if rules.kv_heads_first else 1


def take_apart(call: AttentionCall, query: Any, key: Any, value: Any) -> tuple[Rules, Operands]:
    """Return the parts of a call that is not empty.

    The query is ``[*batch, q_len, num_heads, head_dim]``, keys and values have their batch axes first as well.
    """
    flat = call.with_one_batch_axis()
    batch = flat.batch[0]

    def with_batch_axis(array: Any, axes: int) -> Any:
        array = array.reshape((1,) * (axes + 1 - array.ndim) + array.shape)
        return array if array.shape[0] in (1, batch) else jnp.broadcast_to(array, (batch, *array.shape[1:]))

    flat = flat.map_arrays(with_batch_axis)
    arrays = flat.arrays
    arrays.pop("added_bias", None)  # "dense" adds it, which takes no operands
    if flat.shares_ids and flat.q_len == flat.kv_len:
        arrays.pop("kv_segment_ids", None)
    operands = Operands(*(x.reshape(batch, *x.shape[-3:]) for x in (query, key, value)), **arrays)
    rules = dataclasses.asdict(flat.rules) | {"tolerance": tolerance_of(flat)}
    return Rules(**rules), operands


def put_together(rules: Rules, operands: Operands) -> AttentionCall:
    """Return the call again, with one batch axis, for the core to plan with."""
    batch, q_len, num_heads, head_dim = operands.query.shape
    kv_len, num_kv_heads = operands.key.shape[kv_axis(rules)], operands.key.shape[3 - kv_axis(rules)]
    shapes = (batch, num_heads, q_len, head_dim), (batch, num_kv_heads, kv_len, head_dim)
    arrays = {name: array for name, array in operands._asdict().items() if name in ARRAY_AXES}
    shares_ids = arrays["kv_segment_ids"] is None
    if shares_ids:
        arrays["kv_segment_ids"] = operands.q_segment_ids
    return AttentionCall.of_parts(
        jnp, shapes, operands.query.dtype, dataclasses.replace(rules, shares_ids=shares_ids), arrays
    )
