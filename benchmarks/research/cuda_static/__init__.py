"""What the compilers of Triton and PTX say of the kernels that FlexAttention makes of a call: no GPU is needed.

In go an architecture, sizes, and whether ALiBi is in it. Out come registers, spills, shared memory and loops.
"""

from benchmarks.research.cuda_static.compile import Subject, compiled

__all__ = ["Subject", "compiled"]
