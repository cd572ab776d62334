"""What the attention layers of all backends check and share, so that they fail alike and exchange weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from alibi_core._arrays import Device, Namespace, asarray, astype, checks, host_values, namespace_of
from alibi_core._slopes import slope_values, slopes


@dataclass(frozen=True)
class LayerShape:
    """The sizes of a multi-head self-attention layer, checked.

    The projections map ``embed_dim`` to ``num_heads * head_dim`` (queries) and ``num_kv_heads * head_dim`` (keys,
    values) features, and back. In a safetensors file they are ``q_proj.weight``, ``k_proj.weight``, ``v_proj.weight``
    and ``out_proj.weight``, each ``[out, in]``, their ``.bias`` where there is one, and ``log_slopes`` ``[num_heads]``
    if the slopes are learnable.
    """

    embed_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @classmethod
    def check(
        cls,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        is_causal: bool = True,
        slopes: Any | None = None,
        future_slopes: Any | None = None,
        learnable_slopes: bool = False,
        window_size: int | None = None,
        dropout: float = 0.0,
        bias: bool = False,
    ) -> LayerShape:
        """Check a layer's arguments and fill in its sizes.

        Raises:
            TypeError: If an argument is of the wrong kind.
            ValueError: If sizes do not divide, a probability or length is out of range, slopes are misshapen,
                negative or not finite, or slopes of 0 are to be learned.
        """
        embed_dim = checks.positive_int("embed_dim", embed_dim)
        num_heads = checks.positive_int("num_heads", num_heads)
        num_kv_heads = num_heads if num_kv_heads is None else checks.positive_int("num_kv_heads", num_kv_heads)
        if num_heads % num_kv_heads:
            raise ValueError(f"num_kv_heads must divide num_heads, {num_heads}, got {num_kv_heads}")
        if head_dim is None:
            if embed_dim % num_heads:
                raise ValueError(f"num_heads must divide embed_dim, {embed_dim}, got {num_heads}; or give head_dim")
            head_dim = embed_dim // num_heads
        head_dim = checks.positive_int("head_dim", head_dim)
        checks.direction(is_causal, future_slopes)
        checks.boolean("learnable_slopes", learnable_slopes)
        checks.boolean("bias", bias)
        if learnable_slopes and future_slopes is not None:
            raise ValueError("future_slopes must be None when learnable_slopes=True, whose slopes serve both sides")
        for name, given in (("slopes", slopes), ("future_slopes", future_slopes)):
            if given is not None:
                checks.array(name, given)
                checks.slopes_shape(name, checks.floating_array(namespace_of(given), name, given), num_heads)
                checks.slopes_values(name, given, allow_negative=False, working="float32")
        values = None if slopes is None else host_values(slopes)
        if learnable_slopes and values is not None and (values.astype("float32") == 0).any():
            raise ValueError(f"slopes must be positive to be learned (as logarithms), got {values.tolist()}")
        if window_size is not None:
            checks.window(window_size)
        checks.probability("dropout", dropout)
        return cls(embed_dim, num_heads, num_kv_heads, head_dim)

    def check_input(self, x: Any, xp: Namespace, name: str = "x") -> None:
        """Check that a layer's input is ``[batch, length, embed_dim]``, floating, of the layer's array library.

        Raises:
            TypeError: If it is not such an array.
            ValueError: If it has another shape.
        """
        checks.floating_array(namespace_of(checks.array(name, x), xp=xp, names=(name,)), name, x)
        shape = tuple(x.shape)
        if len(shape) != 3 or shape[-1] != self.embed_dim:
            raise ValueError(f"{name} must have shape (batch, length, {self.embed_dim}), got {shape}")

    def source_of_keys(self, x: Any, xp: Namespace, *, context: Any, q_offset: Any, cache: Any, lengths: Any) -> Any:
        """Return what a layer makes keys and values of: its input or its context, both ``[batch, length, embed_dim]``.

        Both are checked, and that the layer's arguments do not exclude each other.
        """
        self.check_input(x, xp)
        if lengths is not None and cache is None:
            raise ValueError("lengths must be None without a cache: padding behind a row changes nothing before it")
        if context is None:
            if q_offset is not None:
                raise ValueError("q_offset must be None without a context: x and its keys have the same positions")
            return x
        if cache is not None:
            raise ValueError("cache must be None with a context, whose tokens are all given in each call")
        self.check_input(context, xp, "context")
        if context.shape[0] != x.shape[0]:
            raise ValueError(f"context must have the batch of x, {x.shape[0]}, got {context.shape[0]}")
        return context

    def fixed_slopes(self, xp: Namespace, slopes: Any | None, device: Device | None = None) -> Any:
        """Return the given slopes, or the canonical ones, as ``[num_heads]`` float32."""
        if slopes is not None:
            return astype(xp, slopes, xp.float32)
        return asarray(xp, slope_values(self.num_heads), xp.float32, device)


def fixed_or_scheme_slopes(num_heads: int, given: Any | None, scheme: str | None) -> Any:
    """Return the slopes that a module of the bias is given, or those of a scheme, as a NumPy array."""
    if given is None:
        return slopes(num_heads, scheme="canonical" if scheme is None else scheme)
    if scheme is not None:
        raise ValueError(f"scheme must be None when slopes are given, got {scheme!r}")
    return given
