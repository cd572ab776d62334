"""Array libraries, and the ways to call each function with their arrays. docs/support.md shows this table."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Library:
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

    @property
    def modes(self) -> tuple[str, ...]:
        """The ways to call a function: ``"eager"`` is by itself."""
        offered = {"eager": True, "compiled": self.compiler, "mapped": self.vmap}
        return tuple(mode for mode, offers in offered.items() if offers)


# Libraries in which every function is tested, by namespace.
LIBRARIES = {
    "numpy": Library("NumPy", ("float64", "float32", "float16")),
    "array_api_strict": Library("array-api-strict", ("float64", "float32")),
    "dask.array": Library("Dask", ("float64", "float32")),
    "ndonnx": Library("ndonnx (writes ONNX)", ("float64", "float32", "float16")),
    "torch": Library(
        "PyTorch",
        ("float64", "float32", "bfloat16", "float16"),
        "torch.compile(fullgraph=True)",
        "torch.func.vmap",
    ),
    # float64 with jax_enable_x64 alone
    "jax.numpy": Library("JAX", ("float32", "bfloat16", "float16"), "jax.jit", "jax.vmap"),
    # float64 on the CPU alone
    "mlx.core": Library("MLX", ("float32", "bfloat16", "float16"), "mx.compile", "mx.vmap"),
}
CORE = (
    *("slopes", "bias", "bias_from_positions", "bias_from_gates", "key_bias", "attention", "horizon", "fold"),
    "fold_error_bound",
)
OF_BACKENDS = ("attention of a backend", "explain")
EAGER_ONLY = ("explain",)  # reads the values of its arrays on the host


def modes(function: str, library: str) -> tuple[str, ...]:
    """Return the ways in which a function can be called with arrays of a library, by its namespace; () for none.

    Example:
        >>> modes("bias", "jax.numpy"), modes("explain", "jax.numpy"), modes("explain", "numpy")
        (('eager', 'compiled', 'mapped'), ('eager',), ())
    """
    has_backend = LIBRARIES[library].compiler is not None
    offered = LIBRARIES[library].modes if function in CORE or has_backend else ()
    return tuple(mode for mode in offered if mode == "eager" or function not in EAGER_ONLY)
