"""``explain``: the implementation that a call would use, and the keys that it needs."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from alibi_core.backend import AttentionCall, Explanation
from alibi_core.backend.checks import check_keywords, one_of
from alibi_mlx._attention import attention
from alibi_mlx._dispatch import IMPLEMENTATIONS, choose, refusal


def explain(
    query: mx.array,
    key: mx.array,
    value: mx.array,
    slopes: int | mx.array | None = None,
    *,
    implementation: str | None = None,
    **arguments: Any,
) -> Explanation:
    """Say which implementation a call of :func:`alibi_mlx.attention` would use, and which keys its queries need.

    The arrays are evaluated and measured on the host, even if the call would not measure them. No attention is
    computed. The arguments are those of :func:`alibi_mlx.attention`; the arrays of the explanation are NumPy arrays.

    Raises:
        TypeError, ValueError, NotImplementedError: As the call would.
        ValueError: Under ``mx.compile`` and ``mx.vmap``, where there are no values to measure.

    Example:
        >>> query, key, value = mx.zeros((3, 1, 2, 8, 4))
        >>> print(explain(query, key, value, tolerance=0.0))
        implementation: tiled
        tolerance: 0, which moves the result by at most 0
        scores: 72 needed, 100.0% of the 72 visible
        horizons, in tokens, of the heads: all all
    """
    if implementation is not None:
        one_of("implementation", implementation, IMPLEMENTATIONS)
    check_keywords(attention, arguments)
    arguments.pop("dropout_key", None)
    call = AttentionCall.check(query, key, value, slopes, xp=mx, **arguments)
    chosen = choose(call, implementation)
    if call.is_empty:
        return Explanation.of_nothing(call)
    refusals = {name: refusal(name, call) for name in IMPLEMENTATIONS}
    return Explanation.of(call, (query, key, value), chosen, refusals, leaves_out=chosen == "tiled")
