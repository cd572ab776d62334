"""The choice of an implementation for a call, and the reasons why others cannot run it."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from alibi_core.backend import AttentionCall, checks
from alibi_jax import _cudnn
from alibi_jax._compatible import Target
from alibi_jax._tpu import TPU

IMPLEMENTATIONS = ("tpu", "cudnn", "tiled", "dense")  # the first that can run a call is the default
Implementation = str | TPU
PLATFORMS_OF_CUDNN = ("cuda",)  # tests add "cpu"
ANY_BATCH = "must be given a batch whose size is a number, got {}"


def checked(implementation: Any) -> Implementation | None:
    """Validate the argument ``implementation`` and return it."""
    if implementation is None or isinstance(implementation, TPU):
        return implementation
    return checks.one_of("implementation", implementation, IMPLEMENTATIONS)


def name_of(implementation: Implementation) -> str:
    """Return the name of an implementation."""
    return "tpu" if isinstance(implementation, TPU) else implementation


def choose(
    implementation: Implementation | None, call: AttentionCall, target: Target | None = None, *, is_plain: bool = True
) -> Implementation:
    """Return the implementation that runs: ``implementation``, or by default the first that can run the call.

    Raises:
        NotImplementedError: If ``implementation`` cannot run the call.
    """
    able = [name for name in IMPLEMENTATIONS if refusal(name, call, target, is_plain) is None]
    chosen = able[0] if implementation is None else implementation
    reason = refusal(chosen, call, target, is_plain)
    if reason is not None:
        others = " and ".join(map(repr, able))
        raise NotImplementedError(f"implementation {name_of(chosen)!r} {reason}; {others} can run this call")
    return TPU() if chosen == "tpu" else chosen


def refusal(
    implementation: Implementation, call: AttentionCall, target: Target | None, is_plain: bool = True
) -> str | None:
    """Return why an implementation cannot run a call, as the predicate of a sentence about it; None if it can.

    ``target`` is None before a program is compiled; with a target, arrays of the call have one batch axis. A call is
    plain without gradients of slopes, and if the operands have all keys.
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
    if name == "cudnn" and call.sinks is not None:
        return "takes no sinks"
    if name == "cudnn":
        return _refusal_of_cudnn(call, target, is_plain)
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
        return ANY_BATCH.format(call.batch[0])
    if call.dtype not in (jnp.float32, jnp.bfloat16):
        return f"must be given float32 or bfloat16, got {call.dtype}"
    if call.mask is not None and call.mask.shape[1:3] != (1, 1):
        return f"must be given a mask of keys alone, [batch, 1, 1, kv_len], got {tuple(call.mask.shape)}"
    return None


def _refusal_of_cudnn(call: AttentionCall, target: Target | None, is_plain: bool) -> str | None:
    if call.dtype not in _cudnn.DTYPES:
        return f"must be given bfloat16 or float16, got {call.dtype}"
    if not call.is_causal or call.window_size is not None or call.mask is not None or call.q_segment_ids is not None:
        return "takes causal calls alone, without window, mask and segments"
    if call.q_len != call.kv_len or call.has_offset_array or call.q_offset != 0 or call.scale == 0:
        return "takes as many queries as keys, without an offset, and a scale other than 0"
    if not is_plain:
        return "has neither gradients of slopes nor sums over a part of the keys"
    if target is None:
        return None
    if target.platform not in PLATFORMS_OF_CUDNN:
        return f"runs on NVIDIA GPUs alone, got {target.platform}"
    if target.is_partitioned:
        return "cannot be divided among devices by the compiler: call it inside jax.shard_map"
    if target.is_exported:
        return "cannot be exported, as jax.export takes no calls of cuDNN"
    return _cudnn.refusal(call) if isinstance(call.batch[0], int) else ANY_BATCH.format(call.batch[0])
