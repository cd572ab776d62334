"""Which implementation runs a call, and why another does not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from alibi_core.backend import AttentionCall, checks
from alibi_jax._call import Operands
from alibi_jax._tpu import TPU

IMPLEMENTATIONS = ("tpu", "tiled", "dense")  # the first that can run a call is the default
Implementation = str | TPU


@dataclass(frozen=True)
class Target:
    """What a program is compiled for.

    Attributes:
        platform: ``"tpu"``, ``"cpu"``, ``"cuda"`` or ``"rocm"``.
        is_partitioned: Whether the compiler is to divide the program among several devices by itself.
    """

    platform: str
    is_partitioned: bool = False


def checked(implementation: Any) -> Implementation | None:
    """Return the argument ``implementation``, having checked it."""
    if implementation is None or isinstance(implementation, TPU):
        return implementation
    return checks.one_of("implementation", implementation, IMPLEMENTATIONS)


def in_full(call: AttentionCall, implementation: Implementation | None) -> str:
    """Return ``"dense"``, where nothing else can run a call, unless another implementation is named.

    Raises:
        NotImplementedError: If one is.
    """
    if implementation not in (None, "dense"):
        name = name_of(implementation)
        raise NotImplementedError(f"implementation {name!r} {call.dense_only}; 'dense' can run this call")
    return "dense"


def name_of(implementation: Implementation) -> str:
    """Return the name of an implementation."""
    return "tpu" if isinstance(implementation, TPU) else implementation


def choose(implementation: Implementation | None, target: Target, operands: Operands) -> Implementation:
    """Return what is to run: the implementation named, else the first that can run the call.

    Raises:
        NotImplementedError: If the one named cannot.
    """
    if implementation is None:
        name = next(name for name in IMPLEMENTATIONS if refusal(name, target, operands) is None)
        return _with_options(name)
    options = _with_options(implementation)
    reason = refusal(options, target, operands)
    if reason is not None:
        able = [repr(name) for name in IMPLEMENTATIONS if refusal(name, target, operands) is None]
        raise NotImplementedError(
            f"implementation {name_of(options)!r} {reason}; {' and '.join(able)} can run this call"
        )
    return options


def _with_options(implementation: Implementation) -> Any:
    """Return the options that a name stands for; a name without options is returned as it is."""
    return TPU() if implementation == "tpu" else implementation


def refusal(implementation: Implementation, target: Target, operands: Operands) -> str | None:
    """Return why an implementation cannot run a call, as the rest of a sentence that begins with its name."""
    options = _with_options(implementation)
    if not isinstance(options, TPU):
        return None
    if target.platform != "tpu" and not options.interpret:
        return f"runs on TPUs alone, got {target.platform} (TPU(interpret=True) runs its text anywhere, slowly)"
    if target.is_partitioned:
        return "cannot be divided among devices by the compiler: call it inside jax.shard_map"
    if operands.query.dtype not in (jnp.float32, jnp.bfloat16):
        return f"must be given float32 or bfloat16, got {operands.query.dtype}"
    if operands.mask is not None and operands.mask.shape[1:3] != (1, 1):
        return f"must be given a mask of keys alone, [batch, 1, 1, kv_len], got {tuple(operands.mask.shape)}"
    return None
