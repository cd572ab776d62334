"""What the kernels are told of their blocks: sizes, whether all are whole, and how many share the keys of one query.

Chosen by what compilers say (benchmarks/research/cuda_static) and by how many keys a query needs; never run on a GPU.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from alibi_core import AttentionCall
from alibi_torch._flex.mask import BLOCK, SHORT

# In 16 bits, by compute capability and head size: where PyTorch's own choice spills registers within a loop, what does
# not. Backward: queries and keys of a block where gradients of keys are summed up, then of queries; stages; warps.
BACKWARD: dict[tuple[tuple[int, int], int], tuple[int, ...]] = {
    ((8, 0), 64): (32, 64, 64, 32, 2, 8),
    ((8, 0), 128): (32, 64, 64, 32, 2, 8),
    ((9, 0), 128): (64, 64, 128, 64, 2, 8),
}
FORWARD_WARPS = {((9, 0), 64): 8}
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
    if all(n % BLOCK == 0 for n in lengths):
        # Else, where lengths vary, each score is compared with them: 27 instructions where 17 would do.
        options["IS_DIVISIBLE"] = True
    kind = gpu.capability, head_dim
    is_short, is_low = lengths[0] < SHORT, call.dtype != torch.float32
    if is_low and not is_short and (warps := FORWARD_WARPS.get(kind)):
        options["fwd_num_warps"] = warps
    if is_low and not is_short and (sizes := BACKWARD.get(kind)):
        names = ("BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2", "num_stages", "num_warps")
        options |= {f"bwd_{name}": size for name, size in zip(names, sizes, strict=True)}
    if is_short and call.num_heads == call.num_kv_heads:
        options["SPLIT_KV"] = max(1, PARTS * gpu.multiprocessors // (call.batch[0] * call.num_heads))
    return options


@torch.compiler.assume_constant_result
def _gpu(device: torch.device) -> tuple[int, tuple[int, int]]:
    """Return the fields of a ``Gpu``; AMD's numbers are no NVIDIA capability."""
    properties = torch.cuda.get_device_properties(device)
    capability = (properties.major, properties.minor) if torch.version.hip is None else (0, 0)
    return properties.multi_processor_count, capability
