"""Which implementation runs a call, at which head size, and why another does not."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from alibi_core import AttentionCall, fold_error_bound, fold_size
from alibi_core.backend import host_values, largest_slope
from alibi_mlx._compatible import has_newer_kernels

IMPLEMENTATIONS = ("tiled", "folded", "dense")

LOW = (mx.float16, mx.bfloat16)
FEW = 8  # queries; for so few MLX has other kernels, with other head sizes
FOLDED_KEYS = 8192  # at most, unless folding is asked for by name: beyond, leaving out far keys saves more
FOLDED_FEATURES = 6  # what folding adds in low precision, up to so many keys
# The most that folding may move a score by, if it is chosen or named: in low precision what the rounding of the
# weights does, in float32 some of it.
FOLD_LIMITS = {mx.bfloat16: 2.0**-8, mx.float16: 2.0**-11, mx.float32: 2.0**-20}


@dataclass(frozen=True)
class Route:
    """How a call runs."""

    implementation: str
    head_dim: int  # that MLX's kernel is given
    fused: bool = False  # whether it must be a fused kernel, for what it is given in low precision is exact in no other


@dataclass(frozen=True)
class Kernels:
    """What decides which fused kernels MLX has: the device, and whether its version has the newer ones."""

    device: mx.DeviceType
    newer: bool

    @classmethod
    def here(cls) -> Kernels:
        """Return those of MLX's default device."""
        return cls(mx.default_device().type, has_newer_kernels())

    def head_dims(self, q_len: int) -> tuple[int, ...]:
        """Return Metal's head sizes, up to 128, for so many queries; MLX takes no others by itself.

        They follow MLX's sources, and have not been run on Metal.
        """
        if q_len <= FEW:
            return 64, 96, 128
        return (64, 72, 80, 96, 128) if self.newer else (64, 80, 128)


def choose(
    call: AttentionCall, implementation: str | None, training: bool = False, kernels: Kernels | None = None
) -> Route:
    """Return how a call is to run: by the implementation named, else by the one that suits it.

    Heads are filled up to the size of a fused kernel; a larger one runs as it is, in MLX's unfused path, which is the
    only one on the CPU. Folding computes all scores there are. By itself it is chosen only with a version of MLX that
    can be made to take the fused kernel while gradients are traced: the unfused path rounds scores.

    Raises:
        NotImplementedError: If the one named cannot run the call.
    """
    if implementation is not None and (reason := refusal(implementation, call)) is not None:
        able = [repr(name) for name in IMPLEMENTATIONS if refusal(name, call) is None]
        raise NotImplementedError(f"implementation {implementation!r} {reason}; {' and '.join(able)} can run this call")
    kernels = kernels or Kernels.here()
    on_gpu = kernels.device == mx.gpu
    sizes = kernels.head_dims(call.q_len) if on_gpu else ()
    if (
        on_gpu
        and implementation in (None, "folded")
        and call.dtype in LOW
        and call.q_len > FEW
        and call.kv_len <= FOLDED_KEYS
        and not training
        and kernels.newer
        and (size := _least(sizes, call.head_dim + FOLDED_FEATURES)) is not None
        and refusal("folded", call) is None
    ):
        return Route("folded", size, fused=True)
    if implementation == "folded":
        needed = call.head_dim + fold_size(call.kv_len, call.dtype)
        size = _least((*sizes, 192, 256), needed) if on_gpu and kernels.newer else None
        return Route("folded", needed) if size is None else Route("folded", size, fused=True)
    if implementation == "dense" or refusal("tiled", call) is not None:
        return Route("dense", call.head_dim)
    return Route("tiled", _least(sizes, call.head_dim) or call.head_dim)


def _least(sizes: tuple[int, ...], needed: int) -> int | None:
    """Return the least of some rising sizes that is enough, None if none is."""
    return next((size for size in sizes if size >= needed), None)


def refusal(name: str, call: AttentionCall) -> str | None:
    """Return why an implementation cannot run a call, as the rest of a sentence that begins with its name."""
    if name != "dense" and call.dense_only is not None:
        return call.dense_only
    if name != "dense" and call.dtype == mx.float64:
        return "cannot compute in float64 (MLX's attention takes its scale and exponential in float32)"
    return _refusal_of_folded(call) if name == "folded" else None


def _refusal_of_folded(call: AttentionCall) -> str | None:
    if not call.is_causal:
        return "must be causal (distance on both sides is no product of a query's and a key's features)"
    if call.mask is not None or call.q_segment_ids is not None or call.window_size is not None:
        return "takes no mask, segment_ids or window_size"
    if call.added_key_bias is not None:
        return "takes no added_key_bias"
    if call.has_offset_array or call.q_offset != call.kv_len - call.q_len or call.q_offset < 0:
        return "must have the last query at the last key, and no query before the first"
    slopes = host_values(call.slopes)
    if slopes is None:
        return "must be able to read the slopes, to bound its error"
    if call.scale == 0:
        return "must have a scale that is not 0, by which slopes are divided"
    dtype = str(call.dtype).rpartition(".")[2]
    error = fold_error_bound(slopes, call.kv_len, head_dim=call.head_dim, dtype=dtype, q_len=call.q_len).max()
    if not error <= FOLD_LIMITS[call.dtype]:
        return f"could move a score by {error:.1e}, more than {FOLD_LIMITS[call.dtype]:.1e}, at so many keys"
    if abs(slopes).max() > largest_slope(call):
        return f"must have slopes of at most {largest_slope(call):.4g}, or features overflow in {dtype}"
    return None
