"""The bias as a module that keeps the last one it built."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx import nn

import alibi_core
from alibi_core.backend import LayerShape, explains_keywords, fixed_or_scheme_slopes, non_negative_int


class AlibiBias(nn.Module):
    """Builds the ALiBi bias, and builds it anew only when lengths, dtype or slopes change.

    For models that add a bias to scores of their own. :func:`alibi_mlx.attention` needs none.

    Args:
        num_heads: How many heads.
        is_causal: Mask keys after the query. Otherwise the bias is symmetric.
        slopes: ``[num_heads]`` slopes, an MLX or NumPy array, not negative; used as float32. Default: those of
            ``scheme``.
        scheme: As for :func:`alibi_core.slopes`; must be left alone when ``slopes`` are given.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If the slopes are misshapen, negative or not finite, or given together with a scheme.

    Example:
        >>> AlibiBias(2, slopes=mx.array([1.0, 0.5]))(2, 3).tolist()
        [[[-1.0, 0.0, -inf], [-2.0, -1.0, 0.0]], [[-0.5, 0.0, -inf], [-1.0, -0.5, 0.0]]]
    """

    @explains_keywords
    def __init__(
        self, num_heads: int, *, is_causal: bool = True, slopes: Any | None = None, scheme: str | None = None
    ) -> None:
        super().__init__()
        slopes = fixed_or_scheme_slopes(num_heads, slopes, scheme)
        LayerShape.check(num_heads, num_heads, is_causal=is_causal, slopes=slopes)
        self.is_causal = is_causal
        # MLX takes arrays under names with an underscore for no parameters.
        self._slopes = mx.array(slopes).astype(mx.float32)
        self._built: tuple[tuple[object, ...], mx.array] | None = None  # key, bias

    @property
    def slopes(self) -> mx.array:
        """The slopes, ``[num_heads]`` float32."""
        return self._slopes

    def __call__(self, q_len: int, kv_len: int | None = None, *, dtype: mx.Dtype | None = None) -> mx.array:
        """Return the bias of ``q_len`` queries over ``kv_len`` keys (default ``q_len``), ends aligned.

        Args:
            q_len: Queries, in tokens.
            kv_len: Keys, in tokens.
            dtype: Default that of the slopes.

        Returns:
            ``[num_heads, q_len, kv_len]``; do not change it in place.
        """
        non_negative_int("q_len", q_len)  # True and 1.0 would pass for 1 in the key
        if kv_len is not None:
            non_negative_int("kv_len", kv_len)
        key = (q_len, kv_len, str(dtype), tuple(self._slopes.tolist()))
        if self._built is None or self._built[0] != key:
            self._built = key, alibi_core.bias(self._slopes, q_len, kv_len, is_causal=self.is_causal, dtype=dtype)
        return self._built[1]
