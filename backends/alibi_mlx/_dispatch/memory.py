"""Calls that were checked before: of short ones, checking takes longer than the rest of what is not attention."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from typing import Any

import mlx.core as mx

from alibi_core import AttentionCall
from alibi_core.backend import checks
from alibi_mlx._tiled import Kept

ROOM = 16  # calls, each with the biases by distance of its heads
PLAIN = frozenset((bool, int, float, type(None)))
SLOPES = ("slopes", "future_slopes")
_calls: OrderedDict[Any, AttentionCall] = OrderedDict()


def checked(query: mx.array, key: mx.array, value: mx.array, slopes: Any = None, **options: Any) -> AttentionCall:
    """Return ``AttentionCall.check`` of the arguments, which is asked once for all calls that differ in lengths alone.

    No array that is given is kept. Slopes count by their values: they may be assigned to in place.
    """
    given = {"slopes": slopes, **options}
    known = _key(query, key, value, given)
    like = None if known is None else _calls.get(known)
    if like is None:
        call = AttentionCall.check(query, key, value, slopes, **options, xp=mx)
        if known is None:
            return call
        like = call.map_arrays(lambda array, _: call.xp.asarray(array.tolist(), dtype=array.dtype))
        like.worked_out[Kept] = Kept(like)
        _calls[known] = like
        while len(_calls) > ROOM:
            _calls.popitem(last=False)
    q_len, kv_len = query.shape[-2], key.shape[-2]
    # The slopes given, not those kept: gradients are of them.
    arrays = {name: given[name].astype(like.working_dtype) for name in SLOPES if type(given.get(name)) is mx.array}
    if not arrays and (q_len, kv_len) == (like.q_len, like.kv_len):
        return like
    offset = kv_len - q_len if given.get("q_offset") is None else like.q_offset
    checks.positions_fit(offset, q_len, kv_len)
    call = replace(like, q_len=q_len, kv_len=kv_len, q_offset=offset, **arrays)
    call.worked_out[Kept] = like.worked_out[Kept]
    if not arrays:
        _calls[known] = call
    return call


def _key(query: mx.array, key: mx.array, value: mx.array, given: dict[str, Any]) -> Any:
    """Return what a checked call follows from but for lengths; None if that is more than sizes, numbers and slopes."""
    if not (type(query) is type(key) is type(value) is mx.array) or key.shape != value.shape:
        return None
    heads, rules = query.shape[-3:-2], []
    for name, x in given.items():
        if type(x) in PLAIN:
            rules += name, type(x), x  # 1, 1.0 and True are equal, but not as arguments
        elif type(x) is mx.array and name in SLOPES and x.ndim == 1 and x.shape == heads:
            try:
                rules += name, x.dtype, *x.tolist()
            except (ValueError, RuntimeError):  # traced, or to be computed by another thread
                return None
        else:
            return None
    sizes = (x.shape[:-2] + x.shape[-1:] for x in (query, key))
    return *sizes, query.dtype, key.dtype, value.dtype, *rules
