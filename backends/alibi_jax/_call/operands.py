"""An attention call taken apart: what is known when it is traced, and the arrays, each with one batch axis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp

from alibi_core import AttentionCall
from alibi_core.backend import tolerance_of


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
class Rules:
    """What of a call is known when it is traced. Hashable, as a compiler's cache asks for."""

    is_causal: bool
    q_offset: int | None  # None where it is an array
    window_size: int | None
    scale: float
    tolerance: float
    kv_heads_first: bool = False  # whether key and value are [batch, num_kv_heads, kv_len, head_dim], as a cache is
    is_part: bool = False  # whether queries have other keys besides: then distances are counted from the queries alone


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
        if array is None:
            return None
        array = array.reshape((1,) * (axes + 1 - array.ndim) + array.shape)
        return array if array.shape[0] in (1, batch) else jnp.broadcast_to(array, (batch, *array.shape[1:]))

    offset = flat.q_offset
    same_ids = flat.kv_segment_ids is flat.q_segment_ids
    operands = Operands(
        *(x.reshape(batch, *x.shape[-3:]) for x in (query, key, value)),
        slopes=with_batch_axis(flat.slopes, 1),
        future_slopes=with_batch_axis(flat.future_slopes, 1),
        q_offset=with_batch_axis(jnp.asarray(offset, jnp.int32), 0) if flat.has_offset_array else None,
        q_segment_ids=with_batch_axis(flat.q_segment_ids, 1),
        kv_segment_ids=None if same_ids else with_batch_axis(flat.kv_segment_ids, 1),
        mask=with_batch_axis(flat.mask, 3),
    )
    rules = Rules(
        is_causal=flat.is_causal,
        q_offset=None if flat.has_offset_array else offset,
        window_size=flat.window_size,
        scale=flat.scale,
        tolerance=tolerance_of(flat),
    )
    return rules, operands


def put_together(rules: Rules, operands: Operands) -> AttentionCall:
    """Return the call again, with one batch axis, for the core to plan with."""
    batch, q_len, num_heads, head_dim = operands.query.shape
    kv_len, num_kv_heads = operands.key.shape[kv_axis(rules)], operands.key.shape[3 - kv_axis(rules)]
    q_ids = operands.q_segment_ids
    return AttentionCall(
        xp=jnp,
        batch=(batch,),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        q_len=q_len,
        kv_len=kv_len,
        head_dim=head_dim,
        dtype=operands.query.dtype,
        working_dtype=operands.slopes.dtype,
        device=None,
        slopes=operands.slopes,
        future_slopes=operands.future_slopes,
        is_causal=rules.is_causal,
        q_offset=operands.q_offset if rules.q_offset is None else rules.q_offset,
        q_segment_ids=q_ids,
        # One array for both tells that each query's own key is visible.
        kv_segment_ids=q_ids if operands.kv_segment_ids is None else operands.kv_segment_ids,
        window_size=rules.window_size,
        mask=operands.mask,
        scale=rules.scale,
        tolerance=rules.tolerance,
    )
