"""Array libraries, and the ways to call functions with their arrays. docs/support.md shows this table."""

from __future__ import annotations

from typing import NamedTuple


class Library(NamedTuple):
    """An array library.

    Attributes:
        title: Name on pages.
        dtypes: Floating dtypes of its arrays that functions take.
        compiler: The compiler within which functions can be called; None without one.
        vmap: The function of the library that maps another over an axis; None without one.
    """

    title: str
    dtypes: tuple[str, ...]
    compiler: str | None = None
    vmap: str | None = None


# Libraries in which every function is tested, by namespace.
LIBRARIES = {
    "numpy": Library("NumPy", ("float64", "float32", "float16")),
    "array_api_strict": Library("array-api-strict", ("float64", "float32")),
    "dask.array": Library("Dask", ("float64", "float32")),
    "ndonnx": Library("ndonnx (writes ONNX)", ("float64", "float32", "float16")),
    "torch": Library(
        "PyTorch", ("float64", "float32", "bfloat16", "float16"), "torch.compile(fullgraph=True)", "torch.func.vmap"
    ),
    # float64 with jax_enable_x64 alone
    "jax.numpy": Library("JAX", ("float32", "bfloat16", "float16"), "jax.jit", "jax.vmap"),
    # float64 on the CPU alone
    "mlx.core": Library("MLX", ("float32", "bfloat16", "float16"), "mx.compile", "mx.vmap"),
}
