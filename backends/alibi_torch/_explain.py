"""``explain``: the implementation that a call would use, and the keys that it needs."""

from __future__ import annotations

from typing import Any

import array_api_compat.torch as xp
import torch
from torch import Tensor

from alibi_core.backend import AttentionCall, Explanation
from alibi_core.backend.checks import check_keywords, one_of
from alibi_torch._attention import attention, norms_of
from alibi_torch._dispatch import IMPLEMENTATIONS, autocasted, choose, refusal


def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    slopes: int | Tensor | None = None,
    *,
    implementation: str | None = None,
    **arguments: Any,
) -> Explanation:
    """Say which implementation a call of :func:`alibi_torch.attention` would use, and which keys its queries need.

    Norms of queries and keys are measured on the host, even where the call would skip that. No attention is computed.

    The arguments are those of :func:`alibi_torch.attention`.

    Returns:
        The explanation, its arrays in NumPy.

    Raises:
        TypeError, ValueError, NotImplementedError: As the call would.
        ValueError: If the tensors hold no values to measure, on the ``meta`` device.

    Example:
        >>> query, key, value = torch.zeros(3, 1, 2, 8, 4).unbind()
        >>> print(explain(query, key, value, tolerance=0.0))
        implementation: tiled
        tolerance: 0, which moves the result by at most 0
        scores: 72 needed, 100.0% of the 72 visible
        horizons, in tokens, of the heads: all all
    """
    if implementation is not None:
        one_of("implementation", implementation, IMPLEMENTATIONS)
    check_keywords(attention, arguments)
    max_key_norm, _ = arguments.pop("max_key_norm", None), arguments.pop("kernel_options", None)
    query, key, value = autocasted(query, key, value)
    call = AttentionCall.check(query, key, value, slopes, xp=xp, **arguments)
    if max_key_norm is not None:
        norms_of(call, max_key_norm)  # validates it; the explanation measures all norms anyway
    chosen = choose(call, query, key, value, implementation)
    if call.is_empty:
        return Explanation.of_nothing(call)
    # No call takes "triton" by default: why it would not run is of no interest.
    considered = [name for name in IMPLEMENTATIONS if name != "triton"]
    refusals = {name: refusal(name, call, query, key, value) for name in considered}
    with torch.no_grad():
        return Explanation.of(
            call, (query, key, value), chosen, refusals, leaves_out=chosen in ("tiled", "flex", "triton")
        )
