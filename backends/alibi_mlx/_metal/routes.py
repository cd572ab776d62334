"""Which implementation runs a call, at which head size, and why another does not. The table is data."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from alibi_core import AttentionCall, fold_error_bound, fold_size
from alibi_core.backend import host_values, largest_slope
from alibi_mlx._compatible import can_force_fused, has_kernels_for_72_and_96

IMPLEMENTATIONS = ("tiled", "folded", "dense")

LOW = (mx.float16, mx.bfloat16)
ANY = (*LOW, mx.float32)
ENDLESS = 2**31
FEW = 8  # queries; for so few MLX has other kernels, with other head sizes
# The most that folding may move a score by, if it is chosen or named: in low precision what the rounding of the
# weights does, in float32 some of it.
FOLD_LIMITS = {mx.bfloat16: 2.0**-8, mx.float16: 2.0**-11, mx.float32: 2.0**-20}


@dataclass(frozen=True)
class Row:
    """A row of the routing table: the calls it is for, and how they run.

    Attributes:
        device: Where the call runs.
        dtypes: Of query, key and value.
        queries: At least and at most.
        most_keys: At most.
        head_dims: Features a head, at least and at most.
        training: Whether gradients are going to be asked for; None for either.
        implementation: What computes them.
        padded: Features a head that MLX's kernel is given, zeros or limbs included; None for as many as there are.
        newer: Whether it needs the kernels that older versions of MLX lack.
    """

    device: mx.DeviceType
    dtypes: tuple[mx.Dtype, ...]
    queries: tuple[int, int]
    most_keys: int
    head_dims: tuple[int, int]
    training: bool | None
    implementation: str
    padded: int | None
    newer: bool = False

    def fits(self, call: AttentionCall, training: bool) -> bool:
        """Whether it is for such calls as this one, on the default device."""
        return (
            mx.default_device().type == self.device
            and call.dtype in self.dtypes
            and self.queries[0] <= call.q_len <= self.queries[1]
            and call.kv_len <= self.most_keys
            and self.head_dims[0] <= call.head_dim <= self.head_dims[1]
            and self.training in (None, training)
            and (has_kernels_for_72_and_96() or not self.newer)
        )


# The first row that fits holds. On Metal, fused kernels exist for some head sizes, which others are filled up to; MLX
# itself takes the others' unfused path, also from 192 on. Folding needs 6 features of low precision up to these many
# keys, and computes all scores there are; beyond, leaving out what is past the horizons saves more. It needs the newer
# versions, which can be made to take the fused kernel while gradients are traced: the unfused path rounds scores. The
# table has not been run on Metal; it follows MLX's sources.
_DECODE, _BLOCKS = (1, FEW), (FEW + 1, ENDLESS)
FUSED_FOR_FEW, FUSED_FOR_BLOCKS = (64, 96, 128, 192, 256), (64, 72, 80, 96, 128, 192, 256)  # head sizes, if forced
_FOLDED_KEYS = 8192
ROUTES = (
    Row(mx.cpu, ANY, (1, ENDLESS), ENDLESS, (1, ENDLESS), None, "tiled", None),
    Row(mx.gpu, ANY, _DECODE, ENDLESS, (1, 64), None, "tiled", 64),
    Row(mx.gpu, ANY, _DECODE, ENDLESS, (65, 96), None, "tiled", 96),
    Row(mx.gpu, ANY, _DECODE, ENDLESS, (97, 128), None, "tiled", 128),
    Row(mx.gpu, ANY, _DECODE, ENDLESS, (129, ENDLESS), None, "tiled", None),
    Row(mx.gpu, LOW, _BLOCKS, _FOLDED_KEYS, (1, 58), False, "folded", 64, newer=True),
    Row(mx.gpu, LOW, _BLOCKS, _FOLDED_KEYS, (59, 66), False, "folded", 72, newer=True),
    Row(mx.gpu, LOW, _BLOCKS, _FOLDED_KEYS, (67, 74), False, "folded", 80, newer=True),
    Row(mx.gpu, LOW, _BLOCKS, _FOLDED_KEYS, (75, 90), False, "folded", 96, newer=True),
    Row(mx.gpu, LOW, _BLOCKS, _FOLDED_KEYS, (91, 122), False, "folded", 128, newer=True),
    Row(mx.gpu, ANY, _BLOCKS, ENDLESS, (1, 64), None, "tiled", 64),
    Row(mx.gpu, ANY, _BLOCKS, ENDLESS, (65, 72), None, "tiled", 72, newer=True),
    Row(mx.gpu, ANY, _BLOCKS, ENDLESS, (65, 80), None, "tiled", 80),
    Row(mx.gpu, ANY, _BLOCKS, ENDLESS, (81, 96), None, "tiled", 96, newer=True),
    Row(mx.gpu, ANY, _BLOCKS, ENDLESS, (81, 128), None, "tiled", 128),
    Row(mx.gpu, ANY, _BLOCKS, ENDLESS, (129, ENDLESS), None, "tiled", None),
)


@dataclass(frozen=True)
class Route:
    """How a call runs.

    Attributes:
        implementation: What computes it.
        head_dim: The head size that MLX's kernel is given.
        fused: Whether it must be a fused kernel, for what it is given in low precision is exact in no other.
    """

    implementation: str
    head_dim: int
    fused: bool = False


def choose(call: AttentionCall, implementation: str | None, training: bool = False) -> Route:
    """Return how a call is to run: by the implementation named, else as the table's first row that fits has it.

    Raises:
        NotImplementedError: If the one named cannot run the call.
    """
    if implementation is not None:
        reason = refusal(implementation, call)
        if reason is not None:
            able = [repr(name) for name in IMPLEMENTATIONS if refusal(name, call) is None]
            raise NotImplementedError(
                f"implementation {implementation!r} {reason}; {' and '.join(able)} can run this call"
            )
    for row in ROUTES:
        asked_for = implementation in (None, row.implementation)
        if asked_for and row.fits(call, training) and refusal(row.implementation, call) is None:
            folded_on_gpu = row.implementation == "folded" and row.device == mx.gpu
            return Route(row.implementation, row.padded or call.head_dim, folded_on_gpu)
    if implementation == "folded":
        return _folded_by_name(call)
    return Route(implementation or "dense", call.head_dim)


def _folded_by_name(call: AttentionCall) -> Route:
    """Return how to fold what the table would not: by a fused kernel if there is one, else in float32."""
    needed = call.head_dim + fold_size(call.kv_len, call.dtype)
    sizes = FUSED_FOR_FEW if call.q_len <= FEW else FUSED_FOR_BLOCKS
    fused = next((size for size in sizes if size >= needed), None)
    if mx.default_device().type == mx.gpu and can_force_fused() and fused is not None:
        return Route("folded", fused, fused=True)
    return Route("folded", needed)


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
