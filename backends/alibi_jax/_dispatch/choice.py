"""The choice of an implementation for a call, and the reasons why others cannot run it."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from alibi_core.backend import AttentionCall, checks
from alibi_jax._call import Operands
from alibi_jax._compatible import Target
from alibi_jax._tpu import TPU

IMPLEMENTATIONS = ("tpu", "tiled", "dense")  # the first that can run a call is the default
Implementation = str | TPU


def checked(implementation: Any) -> Implementation | None:
    """Validate the argument ``implementation`` and return it."""
    if implementation is None or isinstance(implementation, TPU):
        return implementation
    return checks.one_of("implementation", implementation, IMPLEMENTATIONS)


def require_dense(call: AttentionCall, implementation: Implementation | None) -> None:
    """Raise if an implementation other than ``"dense"`` is named for a call that only ``"dense"`` can run."""
    if implementation not in (None, "dense"):
        name = name_of(implementation)
        raise NotImplementedError(f"implementation {name!r} {call.dense_only}; 'dense' can run this call")


def is_by_rows(call: AttentionCall, implementation: Implementation | None) -> bool:
    """Whether a call is computed by blocks of queries: it has its own positions, or a law that is not linear.

    Raises:
        NotImplementedError: If the TPU kernel is named for such a call.
    """
    if call.is_toeplitz or implementation == "dense":
        return False
    if implementation not in (None, "tiled"):
        raise NotImplementedError(
            "implementation 'tpu' takes no positions and the linear law alone; 'tiled' and 'dense' can run this call"
        )
    return True


def name_of(implementation: Implementation) -> str:
    """Return the name of an implementation."""
    return "tpu" if isinstance(implementation, TPU) else implementation


def choose(implementation: Implementation | None, target: Target, operands: Operands) -> Implementation:
    """Return the implementation that runs: ``implementation``, or by default the first that can run the call.

    Raises:
        NotImplementedError: If ``implementation`` cannot run the call.
    """
    able = [name for name in IMPLEMENTATIONS if refusal(name, target, operands) is None]
    chosen = able[0] if implementation is None else implementation
    reason = refusal(chosen, target, operands)
    if reason is not None:
        others = " and ".join(map(repr, able))
        raise NotImplementedError(f"implementation {name_of(chosen)!r} {reason}; {others} can run this call")
    return TPU() if chosen == "tpu" else chosen


def refusal(implementation: Implementation, target: Target, operands: Operands) -> str | None:
    """Return why an implementation cannot run a call, as the predicate of a sentence about it; None if it can."""
    if name_of(implementation) != "tpu":
        return None
    query, mask = operands.query, operands.call.mask
    if target.platform != "tpu" and not (isinstance(implementation, TPU) and implementation.interpret):
        return f"runs on TPUs alone, got {target.platform} (TPU(interpret=True) runs its text anywhere, slowly)"
    if target.is_partitioned:
        return "cannot be divided among devices by the compiler: call it inside jax.shard_map"
    if query.dtype not in (jnp.float32, jnp.bfloat16):
        return f"must be given float32 or bfloat16, got {query.dtype}"
    if mask is not None and mask.shape[1:3] != (1, 1):
        return f"must be given a mask of keys alone, [batch, 1, 1, kv_len], got {tuple(mask.shape)}"
    return None
