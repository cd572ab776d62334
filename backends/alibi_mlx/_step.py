"""Decoding: the steps of one query that follow a checked one, over all keys of a cache."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import array_api_compat.numpy as xp
import mlx.core as mx
import numpy as np

from alibi_core.backend import AttentionCall
from alibi_core.backend.caches import plain_rules
from alibi_mlx._kernels import float32
from alibi_mlx._plan import reads_all


@dataclass(frozen=True)
class NextStep:
    """Steps with the same arguments, other tokens and any number of keys: a slice of a row of biases, and one call.

    ``arguments`` decide whether a later step is one of them; slopes are among them by value.
    """

    arguments: tuple[Any, ...]
    call: AttentionCall
    bias: mx.array  # [batch or 1, num_heads, 1, kv_len]; the last are those of the query's own key

    @classmethod
    def of(cls, arguments: tuple[Any, ...], call: AttentionCall) -> NextStep:
        """Return the steps after a call, up to twice as many keys."""
        # NumPy makes the row, so that it belongs to no graph, whatever records this call.
        most, slopes = 2 * call.kv_len, np.asarray(call.slopes)
        one = replace(call, q_len=1, kv_len=most, q_offset=most - 1, window_size=None, log_gates=None)
        row = replace(one, xp=xp, working_dtype=np.dtype(np.float32), device=None, slopes=slopes).bias_by_distance
        return cls(arguments, call, mx.array(row.reshape(-1, call.num_heads, 1, most)))

    def takes(self, arguments: tuple[Any, ...] | None, kv_len: int) -> bool:
        """Whether a step of ``kv_len`` keys is one of these."""
        return self.arguments == arguments and kv_len <= self.bias.shape[-1] and reads_all(self.call, kv_len)

    def attend(self, query: mx.array, key: mx.array, value: mx.array) -> mx.array:
        """Return the result, shaped as ``query``, from all keys, ``[batch, num_kv_heads, kv_len, head_dim]``."""
        kv_len, window = key.shape[2], self.call.window_size
        if window is not None and window + 1 < kv_len:  # a query sees its own key and those of a window before it
            kv_len = window + 1
            key, value = key[:, :, -kv_len:], value[:, :, -kv_len:]
        wide = (float32(x) for x in (query, key, value))
        bias = self.bias[..., -kv_len:]
        return mx.fast.scaled_dot_product_attention(*wide, scale=self.call.scale, mask=bias).astype(query.dtype)


def arguments_of(query: Any, key: mx.array, value: mx.array, slopes: Any, *rules: Any) -> tuple[Any, ...] | None:
    """Return the arguments that decide about a step of one query; None if slopes may have gradients."""
    plain = plain_rules(*rules)
    if not isinstance(query, mx.array) or query.ndim != 4 or query.shape[2] != 1 or plain is None:
        return None
    if slopes is not None:
        if not isinstance(slopes, np.ndarray):
            return None
        slopes = slopes.dtype, slopes.shape, slopes.tobytes()
    sizes = ((*x.shape[:2], x.shape[3], x.dtype) for x in (key, value))
    return plain, slopes, query.shape, query.dtype, *sizes
