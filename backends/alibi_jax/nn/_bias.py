"""The bias as a module."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import alibi_core
from alibi_core.backend import LayerShape, explains_keywords, fixed_or_scheme_slopes
from alibi_jax._compatible import broadcasting
from alibi_jax.nn._layer import slope_values_of


class AlibiBias(nnx.Module):
    """Builds the ALiBi bias, for models that add a bias to scores of their own.

    :func:`alibi_jax.attention` needs none. Slopes are constants of the module, no part of its state. Nothing is kept
    between calls: under ``jax.jit``, the bias is a constant of the program.

    Args:
        num_heads: How many heads.
        is_causal: Mask keys after the query. Otherwise the bias is symmetric.
        slopes: ``[num_heads]`` slopes, from NumPy or JAX, not negative, known when the module is made; used as float32.
            Default: those of ``scheme``.
        scheme: As for :func:`alibi_core.slopes`; must be left alone when ``slopes`` are given.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If the slopes are misshapen, negative, not finite or traced, or given together with a scheme.

    Example:
        >>> AlibiBias(2, slopes=np.asarray([1.0, 0.5]))(2, 3).tolist()
        [[[-1.0, 0.0, -inf], [-2.0, -1.0, 0.0]], [[-0.5, 0.0, -inf], [-1.0, -0.5, 0.0]]]
    """

    @explains_keywords
    def __init__(
        self, num_heads: int, *, is_causal: bool = True, slopes: Any | None = None, scheme: str | None = None
    ) -> None:
        given = slope_values_of("slopes", slopes)
        slopes = fixed_or_scheme_slopes(num_heads, given, scheme)
        LayerShape.check(num_heads, num_heads, is_causal=is_causal, slopes=slopes)
        self.is_causal = is_causal
        self._slopes = tuple(np.asarray(slopes, np.float32).tolist())

    @property
    def slopes(self) -> jax.Array:
        """The slopes, ``[num_heads]`` float32."""
        return jnp.asarray(self._slopes, jnp.float32)

    @broadcasting
    def __call__(self, q_len: int, kv_len: int | None = None, *, dtype: Any = None) -> jax.Array:
        """Return the bias of ``q_len`` queries over ``kv_len`` keys (default ``q_len``), ends aligned.

        Args:
            q_len: Queries, in tokens.
            kv_len: Keys, in tokens.
            dtype: Default that of the slopes.

        Returns:
            ``[num_heads, q_len, kv_len]``.
        """
        return alibi_core.bias(self.slopes, q_len, kv_len, is_causal=self.is_causal, dtype=dtype)
