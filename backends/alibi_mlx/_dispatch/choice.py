"""Which implementation runs a call, and why another cannot."""

from __future__ import annotations

import mlx.core as mx

from alibi_core.backend import AttentionCall

IMPLEMENTATIONS = ("tiled", "dense")


def choose(call: AttentionCall, implementation: str | None) -> str:
    """Return the implementation that runs a call: the one named, or else the first that can.

    Raises:
        NotImplementedError: If the one named cannot run the call.
    """
    if implementation is None:
        return next(name for name in IMPLEMENTATIONS if refusal(name, call) is None)
    if (reason := refusal(implementation, call)) is not None:
        able = [repr(name) for name in IMPLEMENTATIONS if refusal(name, call) is None]
        raise NotImplementedError(f"implementation {implementation!r} {reason}; {' and '.join(able)} can run this call")
    return implementation


def refusal(name: str, call: AttentionCall) -> str | None:
    """Return why an implementation cannot run a call, as the rest of a sentence that begins with its name."""
    if name == "dense":
        return None
    if call.dense_only is not None:
        return call.dense_only
    if call.dtype == mx.float64:
        return "cannot compute in float64 (MLX's attention takes its scale and exponential in float32)"
    return None
