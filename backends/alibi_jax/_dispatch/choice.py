"""The choice of an implementation for a call, and the reasons why others cannot run it."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from alibi_core.backend import AttentionCall, checks
from alibi_jax._compatible import Target
from alibi_jax._tpu import TPU

IMPLEMENTATIONS = ("tpu", "tiled", "dense")  # the first that can run a call is the default
Implementation = str | TPU


def checked(implementation: Any) -> Implementation | None:
    """Validate the argument ``implementation`` and return it."""
    if implementation is None or isinstance(implementation, TPU):
        return implementation
    return checks.one_of("implementation", implementation, IMPLEMENTATIONS)


def name_of(implementation: Implementation) -> str:
    """Return the name of an implementation."""
    return "tpu" if isinstance(implementation, TPU) else implementation


def choose(implementation: Implementation | None, call: AttentionCall, target: Target | None = None) -> Implementation:
    """Return the implementation that runs: ``implementation``, or by default the first that can run the call.

    Raises:
        NotImplementedError: If ``implementation`` cannot run the call.
    """
    able = [name for name in IMPLEMENTATIONS if refusal(name, call, target) is None]
    chosen = able[0] if implementation is None else implementation
    reason = refusal(chosen, call, target)
    if reason is not None:
        others = " and ".join(map(repr, able))
        raise NotImplementedError(f"implementation {name_of(chosen)!r} {reason}; {others} can run this call")
    return TPU() if chosen == "tpu" else chosen


def refusal(implementation: Implementation, call: AttentionCall, target: Target | None) -> str | None:
    """Return why an implementation cannot run a call, as the predicate of a sentence about it; None if it can.

    ``target`` is None before a program is compiled; with a target, arrays of the call have one batch axis.
    """
    name = name_of(implementation)
    if name == "dense" or call.dense_only is not None:
        return None if name == "dense" else call.dense_only
    if name == "tiled":
        return None
    if call.log_gates is not None:
        return "takes no log_gates"
    if not call.is_linear:
        return "takes no positions and the linear law alone"
    if target is None:
        return None
    if target.platform != "tpu" and not (isinstance(implementation, TPU) and implementation.interpret):
        return f"runs on TPUs alone, got {target.platform} (TPU(interpret=True) runs its text anywhere, slowly)"
    if target.is_partitioned:
        return (
            "cannot be divided among devices by the compiler: give alibi_jax.TPU(sharding=...) as the implementation, "
            "or call it inside jax.shard_map"
        )
    if not isinstance(call.batch[0], int):
        return f"must be given a batch whose size is a number, got {call.batch[0]}"
    if call.dtype not in (jnp.float32, jnp.bfloat16):
        return f"must be given float32 or bfloat16, got {call.dtype}"
    if call.mask is not None and call.mask.shape[1:3] != (1, 1):
        return f"must be given a mask of keys alone, [batch, 1, 1, kv_len], got {tuple(call.mask.shape)}"
    return None
