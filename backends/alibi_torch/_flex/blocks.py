"""What the kernels are told of their blocks: sizes, whether all are whole, and how many share the keys of one query.

Chosen by what compilers say and by how many keys a query needs; never run on a GPU.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from alibi_core.backend import AttentionCall
from alibi_torch._flex.mask import BLOCK, SHORT

# FlexAttention's names for queries and keys of a block, stages and warps. Going backward, blocks are summed up to
# gradients of keys (1) and of queries (2). Few queries are one block of a kernel of their own.
FORWARD = ("fwd_BLOCK_M", "fwd_BLOCK_N", "fwd_num_stages", "fwd_num_warps")
BACKWARD = ("bwd_BLOCK_M1", "bwd_BLOCK_N1", "bwd_BLOCK_M2", "bwd_BLOCK_N2", "bwd_num_stages", "bwd_num_warps")
FEW = ("BLOCK_N", "num_stages", "num_warps")
A100, H100 = (8, 0), (9, 0)
HEAD_DIMS = (64, 128, 256)  # a head is padded to the next of these, or is small enough for its blocks
# What spills no registers within a loop, where PyTorch's own choice does.
IN_16_BITS = {
    (BACKWARD, A100, 64): (32, 64, 64, 32, 2, 8),
    (BACKWARD, A100, 128): (32, 64, 64, 32, 2, 8),
    (BACKWARD, A100, 256): (32, 32, 32, 32, 1, 8),
    (FORWARD, H100, 64): (128, 128, 3, 8),
    (BACKWARD, H100, 128): (64, 64, 128, 64, 2, 8),
    (FEW, A100, 256): (64, 1, 4),
    (FEW, H100, 256): (64, 1, 4),
}
IN_FLOAT32 = {
    (FORWARD, 64): (64, 32, 2, 8),
    (FORWARD, 128): (64, 16, 2, 8),
    (FORWARD, 256): (32, 16, 2, 8),
    (BACKWARD, 64): (32, 32, 32, 32, 1, 8),
    (BACKWARD, 128): (16, 16, 16, 16, 1, 8),
    (FEW, 64): (32, 1, 4),
    (FEW, 128): (16, 1, 4),
    (FEW, 256): (16, 1, 4),
}
PARTS = 8  # of the keys of a few queries, on each multiprocessor: heads that need few keys leave theirs at once


class Gpu(NamedTuple):
    """How many multiprocessors there are, and the compute capability."""

    multiprocessors: int
    capability: tuple[int, int]


def kernel_options(call: AttentionCall, query: Tensor, lengths: tuple[int, int], width: int) -> dict[str, Any]:
    """Return what FlexAttention is to be told, by its names; nothing on a CPU.

    ``lengths`` of queries and keys include padding; the head size is padded by ``width``.
    """
    if query.device.type == "cpu":
        return {}
    return options_on(Gpu(*_gpu(query.device)), call, lengths, call.head_dim + width)


def options_on(gpu: Gpu, call: AttentionCall, lengths: tuple[int, int], head_dim: int) -> dict[str, Any]:
    """Return the same for a GPU that is described, and a head size with its padding."""
    options: dict[str, Any] = {}
    is_short = lengths[0] < SHORT
    if all(n % BLOCK == 0 for n in lengths):
        # Else, where lengths vary, each score is compared with them: 27 instructions where 17 would do.
        options["IS_DIVISIBLE"] = True
    if is_short or (call.mask is None and call.q_segment_ids is None and call.window_size is None):
        options["fwd_BLOCKS_ARE_CONTIGUOUS"] = True  # those that need the mask, and the others: none are looked up
    has_parts = is_short and call.num_heads == call.num_kv_heads
    if has_parts:
        options["SPLIT_KV"] = max(1, PARTS * gpu.multiprocessors // (math.prod(call.batch) * call.num_heads))
    head = next((size for size in HEAD_DIMS if head_dim <= size), None)
    for names in (FEW,) if has_parts else (FORWARD, BACKWARD):
        if call.dtype == torch.float32:
            sizes = IN_FLOAT32.get((names, head))
        else:
            sizes = IN_16_BITS.get((names, gpu.capability, head))
        if sizes is not None:
            options |= zip(names, sizes, strict=True)
    return options


@torch.compiler.assume_constant_result
def _gpu(device: torch.device) -> tuple[int, tuple[int, int]]:
    """Return the fields of a ``Gpu``; AMD's numbers are no NVIDIA capability."""
    properties = torch.cuda.get_device_properties(device)
    capability = (properties.major, properties.minor) if torch.version.hip is None else (0, 0)
    return properties.multi_processor_count, capability
