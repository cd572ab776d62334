"""Triton's interpreter, mended: it runs the kernels on a CPU under TRITON_INTERPRET=1, for tests."""

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def mend() -> None:
    """Have the interpreter of Triton 3.6 to 3.9 compute bfloat16 as GPUs do, and work with NumPy 2.4."""
    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    cast, dot, patch = builder.cast_impl, builder.create_dot, interpreter._patch_lang_tensor

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        kinds = src.dtype.scalar, dst_type.scalar
        if kinds == (tl.bfloat16, tl.float32):
            return handle((src.data.astype(np.uint32) << np.uint32(16)).view(np.float32), tl.float32)
        if kinds != (tl.float32, tl.bfloat16):
            return cast(self, src, dst_type)
        # It truncates. Round half to even instead; infinities stay, and NaN stays NaN.
        bits = np.asarray(src.data).view(np.uint32)
        half = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
        bits = np.where(np.isfinite(src.data), bits + half, bits | np.isnan(src.data) * np.uint32(0x400000))
        return handle((bits >> np.uint32(16)).astype(np.uint16), tl.bfloat16)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        # It multiplies the bits of bfloat16 as integers.
        wide = (cast_impl(self, x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        return dot(self, *wide, *rest)

    def patch_tensor(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        # Triton 3.6 converts arrays of one element to int, which NumPy 2.4 refuses.
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.reshape(-1)[0]))

    builder.cast_impl, builder.create_dot, interpreter._patch_lang_tensor = cast_impl, create_dot, patch_tensor
