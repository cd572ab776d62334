"""The host's side of a launch: the arguments that all kernels of a call share, and the sizes of their tiles."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from alibi_core.backend import AttentionCall

LOG2E = 1.4426950408889634


class Rows(NamedTuple):
    """A tensor ``[batch or 1, heads or 1, length or 1, ...]`` with its strides in elements, 0 for an axis of 1."""

    base: Tensor
    b: int
    h: int
    n: int

    @classmethod
    def of(cls, tensor: Tensor | None) -> Rows | None:
        """Return the tensor with its strides, or None."""
        if tensor is None:
            return None
        sizes, strides = tensor.shape, tensor.stride()
        return cls(tensor, *(0 if n == 1 else stride for n, stride in zip(sizes[:3], strides, strict=False)))


class Rules(NamedTuple):
    """The arrays of a call."""

    slopes: Rows
    future: Rows | None
    offsets: Tensor | None  # [batch] int32: positions of first queries
    mask: Rows | None  # of keys
    q_ids: Rows | None
    kv_ids: Rows | None
    bias: Rows | None  # of keys


def dense(tensor: Tensor) -> Tensor:
    """Return the tensor as kernels read it: with a contiguous last axis, and blocks of less than 2**31 elements."""
    is_near = (tensor.stride(-1) == 1 or tensor.shape[-1] == 1) and tensor.stride(-2) < 2**23
    return tensor if is_near else tensor.contiguous()


def rules_of(call: AttentionCall) -> Rules:
    """Return the arrays of a call with one batch axis."""

    def placed(array: Tensor | None, *axes: int) -> Rows | None:
        """Return an array with new axes of 1 at these places, and a batch axis."""
        if array is None:
            return None
        for axis in axes:
            array = array.unsqueeze(axis)
        return Rows.of(array if array.ndim == 3 else array[None])

    mask = call.mask
    if mask is not None:  # the queries' axis is 1: [batch or 1, heads or 1, kv_len or 1]
        mask = mask.reshape((1,) * (4 - mask.ndim) + tuple(mask.shape))[:, :, 0].view(torch.uint8)
    offsets = call.q_offset.expand(call.batch[0]).contiguous() if call.has_offset_array else None
    rates = [placed(None if x is None else x.detach(), -1) for x in (call.slopes, call.future_slopes)]
    ids = [placed(x, -2) for x in (call.q_segment_ids, call.kv_segment_ids)]
    return Rules(*rates, offsets, placed(mask), *ids, placed(call.added_key_bias))


def arguments(call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> dict[str, Any]:
    """Return the arguments that kernels share, for a call with one batch axis."""
    side = call.tolerance if call.is_causal else call.tolerance / 2  # keys on both sides share it
    rules = rules_of(call)
    return {
        "q": Rows.of(query),
        "k": Rows.of(key),
        "v": Rows.of(value),
        "rules": rules,
        "q_len": call.q_len,
        "kv_len": call.kv_len,
        "offset": 0 if call.has_offset_array else call.q_offset,
        "window": call.window_size or 0,
        "scale": call.scale,
        "scale2": call.scale * LOG2E,
        "log_side": math.log(side) if side > 0 else -math.inf,
        "H": call.num_heads,
        "GROUP": call.num_heads // call.num_kv_heads,
        "D": call.head_dim,
        "DP": max(16, 1 << (call.head_dim - 1).bit_length()),  # a power of two, at least the 16 of tensor cores
        "CAUSAL": call.is_causal,
        "WINDOWED": call.window_size is not None,
        "HIDES": rules.mask is not None or rules.q_ids is not None,
    }


# --- Tiles ------------------------------------------------------------------------------------------------------------


class Tile(NamedTuple):
    """Queries and keys of a tile, and how a kernel runs."""

    rows: int
    keys: int
    warps: int
    stages: int


# The largest tiles that stay within registers and shared memory, found by compiling; none was measured on a GPU. By
# kernel and machine: up to 128 features, and 256.
TILES: dict[str, dict[str, tuple[Tile, Tile]]] = {
    "attend": {
        "hopper": (Tile(128, 128, 8, 2), Tile(128, 32, 8, 2)),
        "other": (Tile(64, 64, 4, 2), Tile(64, 32, 8, 1)),
        "amd": (Tile(128, 64, 4, 1), Tile(64, 32, 4, 1)),
    },
    "by_queries": {
        "hopper": (Tile(128, 64, 8, 2), Tile(64, 32, 8, 2)),
        "other": (Tile(64, 32, 4, 2), Tile(32, 32, 8, 1)),
        "amd": (Tile(64, 32, 4, 1), Tile(32, 32, 4, 1)),
    },
    "by_keys": {
        "hopper": (Tile(32, 128, 8, 2), Tile(32, 64, 8, 2)),
        "other": (Tile(32, 64, 4, 2), Tile(32, 32, 8, 1)),
        "amd": (Tile(32, 64, 4, 1), Tile(32, 32, 4, 1)),
    },
}
IN_FLOAT32 = Tile(32, 32, 8, 1)  # Products without tensor cores unroll to long programs.
OF_PLAN = Tile(128, 128, 8, 2)  # The plan's kernels read each row once: many warps hide the wait for memory.
FEW = 16  # Up to this many queries, a tile has as many rows, the fewest that tensor cores take.


@functools.cache
def machine(device: torch.device) -> str:
    """Return the kind of GPU, which decides the sizes of tiles; ``"hopper"`` includes its successors in servers."""
    if device.type != "cuda" or torch.version.hip is not None:
        return "amd"
    major, _ = torch.cuda.get_device_capability(device)
    return "hopper" if major in (9, 10, 11) else "other"


def tile_of(kernel: str, query: Tensor, given: dict[str, Any]) -> Tile:
    """Return the sizes of the tiles of a kernel."""
    tile = IN_FLOAT32 if query.dtype == torch.float32 else TILES[kernel][machine(query.device)][given["D"] > 128]
    if kernel != "attend":
        return tile
    if not given["CAUSAL"] or given["WINDOWED"]:  # more registers
        tile = tile._replace(keys=min(tile.keys, 64))
    return tile._replace(rows=FEW) if given["q_len"] <= FEW else tile


def launch(kernel: Any, programs: int, given: dict[str, Any], tile: Tile = OF_PLAN) -> None:
    """Start a kernel; ``given`` may hold arguments of others, too."""
    given = given | {"BLOCK_M": tile.rows, "BLOCK_N": tile.keys, "STAGES": tile.stages}
    # Fused multiply-adds are no longer Triton's default from 3.10 on.
    options = {"num_warps": tile.warps, "num_stages": tile.stages, "enable_fp_fusion": True}
    start(kernel, programs, [given[name] for name in kernel.arg_names], options)


def start(kernel: Any, programs: int, arguments: list[Any], options: dict[str, Any]) -> None:
    """Start a kernel; a function of its own, so that the host's time can be measured without it."""
    kernel[(programs,)](*arguments, **options)
