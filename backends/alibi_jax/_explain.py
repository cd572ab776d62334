"""``explain``: the implementation that a call would use, and the keys that it needs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from alibi_core.backend import LENGTH_FIRST, AttentionCall, Explanation
from alibi_core.backend.checks import check_keywords
from alibi_jax import _cudnn
from alibi_jax._attention import attention
from alibi_jax._call import operands_of
from alibi_jax._compatible import Target, broadcasting
from alibi_jax._dispatch import IMPLEMENTATIONS, Implementation, checked, choose, name_of, refusal


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
    """Say which implementation a call of :func:`alibi_jax.attention` would use, and which keys its queries need.

    Arguments are those of :func:`alibi_jax.attention`, not traced. Arrays are measured on the host; no attention is
    computed. If the query is divided among devices along automatic mesh axes, the answer is for a program that XLA
    partitions; without such arrays it is for one device.

    Returns:
        The explanation, its arrays in NumPy.

    Raises:
        TypeError, ValueError, NotImplementedError: As the call would.
        ValueError: If arrays are traced.

    Example:
        >>> query, key, value = jnp.zeros((3, 1, 8, 2, 4))
        >>> print(explain(query, key, value, tolerance=0.0, implementation="tiled"))  # doctest: +ELLIPSIS
        implementation: tiled
        ...
        tolerance: 0, which moves the result by at most 0
        scores: 72 needed, 100.0% of the 72 visible
        horizons, in tokens, of the heads: all all
    """
    checked(implementation)
    check_keywords(attention, arguments)
    arguments.pop("dropout_key", None)
    call = AttentionCall.check(query, key, value, slopes, layout=LENGTH_FIRST, xp=jnp, **arguments)
    choose(implementation, call)  # raises, as the call does where it is empty
    if call.is_empty:
        return Explanation.of_nothing(call)
    tensors = tuple(jnp.swapaxes(x, -3, -2) for x in (query, key, value))
    flat, target = operands_of(call, *tensors).call, _target(query, implementation)
    chosen = name_of(choose(implementation, flat, target))
    reasons = {name: refusal(name, flat, target) for name in IMPLEMENTATIONS if name != chosen}
    if implementation is None and chosen == "cudnn" and not _cudnn.is_exact(flat):
        chosen, reasons["cudnn"] = "tiled", "would round scores too much, as slopes are too steep for so many keys"
    return Explanation.of(call, tensors, chosen, reasons, leaves_out=chosen != "dense")


def _target(query: jax.Array, implementation: Implementation | None) -> Target:
    if not isinstance(query, jax.Array) or isinstance(query, jax.core.Tracer):
        return Target(jax.default_backend())
    is_stated = getattr(implementation, "sharding", None) is not None
    is_explicit = AxisType.Explicit in getattr(jax.typeof(query).sharding.mesh, "axis_types", ())
    return Target(next(iter(query.devices())).platform, len(query.devices()) > 1 and not is_stated and not is_explicit)
