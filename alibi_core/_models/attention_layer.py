"""The attention layer of all backends: its validated sizes, the names of its weights, and its forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from alibi_core._arrays import Namespace, astype, checks, explains_keywords, namespace_of
from alibi_core._distance import DISTANCES, LAWS
from alibi_core._slopes import slope_values


@dataclass(frozen=True)
class LayerShape:
    """The validated sizes and slopes of a multi-head self-attention layer.

    The projections map ``embed_dim`` to ``num_heads * head_dim`` (queries) and ``num_kv_heads * head_dim`` (keys,
    values) features, and back. In a safetensors file they are ``q_proj.weight``, ``k_proj.weight``, ``v_proj.weight``
    and ``out_proj.weight``, each ``[out, in]``, with a ``.bias`` if ``bias=True``, and ``log_slopes`` ``[num_heads]``
    if the slopes are learnable. A forget gate has ``forget_proj.weight`` and ``.bias``, sinks are ``sinks``,
    ``[num_heads]``; both are always float32. Slopes here are Python floats rounded to float32, so casting a module does
    not change them.
    """

    embed_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    slopes: tuple[float, ...]
    future_slopes: tuple[float, ...] | None = None

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
        distance: str = "manhattan",
        law: str = "linear",
        forget_gate: bool = False,
        sinks: bool = False,
    ) -> LayerShape:
        """Check a layer's arguments and fill in its sizes and slopes."""
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
        checks.boolean("sinks", sinks)
        if learnable_slopes and future_slopes is not None:
            raise ValueError("future_slopes must be None when learnable_slopes=True, whose slopes serve both sides")
        # Slopes become Python floats, so they must have values now.
        past = _float32_values("slopes", slopes, num_heads)
        future = _float32_values("future_slopes", future_slopes, num_heads)
        if learnable_slopes and past is not None and 0 in past:
            raise ValueError(f"slopes must be positive to be learned (as logarithms), got {list(past)}")
        if window_size is not None:
            checks.window(window_size)
        checks.probability("dropout", dropout)
        checks.one_of("distance", distance, DISTANCES)
        checks.one_of("law", law, LAWS)
        excluded = {"is_causal=False": not is_causal, f"law={law!r}": law != "linear"}
        excluded["learnable_slopes=True"] = learnable_slopes and past is None
        if checks.boolean("forget_gate", forget_gate):
            for rule in (rule for rule, is_given in excluded.items() if is_given):
                how = "; give the slopes to begin with" if "slopes" in rule else ""
                raise ValueError(f"forget_gate must be False with {rule}, got True{how}")
            past = (0.0,) * num_heads if past is None else past
        if past is None:
            past = tuple(np.asarray(slope_values(num_heads), np.float32).tolist())
        return cls(embed_dim, num_heads, num_kv_heads, head_dim, past, future)

    def source_of_keys(self, x: Any, xp: Namespace, *, context: Any, q_offset: Any, cache: Any, lengths: Any) -> Any:
        """Return the tokens to project to keys and values, ``[batch, length, embed_dim]``: the context, or else ``x``.

        Checks both, and that the arguments of the call do not exclude each other.
        """
        self._check_input("x", x, xp)
        if lengths is not None and cache is None:
            raise ValueError("lengths must be None without a cache: padding behind a row changes nothing before it")
        if context is None:
            if q_offset is not None:
                raise ValueError("q_offset must be None without a context: x and its keys have the same positions")
            return x
        if cache is not None:
            raise ValueError("cache must be None with a context, whose tokens are all given in each call")
        self._check_input("context", context, xp)
        if context.shape[0] != x.shape[0]:
            raise ValueError(f"context must have the batch of x, {x.shape[0]}, got {context.shape[0]}")
        return context

    def _check_input(self, name: str, x: Any, xp: Namespace) -> None:
        checks.floating_array(namespace_of(checks.array(name, x), xp=xp, names=(name,)), name, x)
        shape = tuple(x.shape)
        if len(shape) != 3 or shape[-1] != self.embed_dim:
            raise ValueError(f"{name} must have shape (batch, length, {self.embed_dim}), got {shape}")


def _float32_values(name: str, slopes: Any | None, num_heads: int) -> tuple[float, ...] | None:
    """Return the values of slopes, an array of any library, rounded to float32; None for None."""
    if slopes is None:
        return None
    xp = namespace_of(checks.array(name, slopes))
    checks.slopes_shape(name, checks.floating_array(xp, name, slopes), num_heads)
    checks.slopes_values(name, slopes, allow_negative=False, working="float32")
    try:
        values = slopes.tolist()
    except Exception:  # each library raises another error
        raise ValueError(
            f"{name} must be known when the layer is made, got a traced array or one without values; give a NumPy array"
        ) from None
    return tuple(np.asarray(values, np.float32).tolist())


class BaseAttention:
    """Base of the attention layers of all backends.

    A backend's layer derives from its framework's module and from this class, and sets what is declared here. Models
    may set ``clip_qkv``, ``q_norm``, ``k_norm`` and ``query_factor`` to clip, norm and scale projected queries, keys
    and values. The layer applies them after the projections, so quantizers and adapters may replace the projections.
    """

    _xp: Any  # the library
    _attention: Any  # the backend's attention function
    slopes: Any
    future_slopes: Any
    sinks: Any  # absent without them
    dropout: Any
    forget_proj: Any  # absent without a forget gate
    clip_qkv: float | None
    q_norm: Any
    k_norm: Any
    query_factor: float
    _is_length_first = False  # whether attention takes [batch, length, heads, head_dim], not heads before length

    def _build(
        self, linear: Callable[[int, int], Any], implementation: Any, *sizes: Any, is_causal: bool, **options: Any
    ) -> None:
        """Check the layer's arguments, and make its projections by ``linear(in_features, out_features)``."""
        self.shape = shape = LayerShape.check(*sizes, is_causal=is_causal, **options)
        self.is_causal, self.window_size, self.implementation = is_causal, options["window_size"], implementation
        self.distance, self.law = options["distance"], options["law"]
        width, kv_width = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.q_proj = linear(shape.embed_dim, width)
        self.k_proj = linear(shape.embed_dim, kv_width)
        self.v_proj = linear(shape.embed_dim, kv_width)
        self.out_proj = linear(width, shape.embed_dim)

    @explains_keywords
    def __call__(
        self,
        x: Any,
        *,
        mask: Any | None = None,
        segment_ids: Any | None = None,
        cache: Any | None = None,
        context: Any | None = None,
        q_offset: Any | None = None,
        lengths: Any | None = None,
        positions: Any | None = None,
    ) -> Any:
        """Attend within ``x``, from ``x`` to the tokens in ``cache`` and ``x``, or from ``x`` to those of ``context``.

        Args:
            x: ``[batch, length, embed_dim]``.
            mask: Booleans or integers 0 and 1, True where a query may look: ``[batch, kv_len]`` for padding, or with
                axes that broadcast to ``[batch, num_heads, length, kv_len]``. ``kv_len`` counts the cached tokens, too,
                and may go on over unused slots of the cache.
            segment_ids: ``[batch, length]`` integers, for packed sequences; with a cache, a pair (of ``x``, of all
                ``kv_len`` tokens).
            cache: From :meth:`make_cache`; the tokens of ``x`` are appended to it. Causal layers only.
            context: ``[batch, kv_len, embed_dim]``, another sequence for keys and values (cross-attention). Distances
                are those of ``alibi_core.bias(slopes, length, kv_len)``: by default the last tokens of both sequences
                have the same position. Excludes ``cache``.
            q_offset: With a ``context``, the position of the first token of ``x``, as in ``attention``.
            lengths: With a ``cache``, ``[batch]`` integers: the number of tokens in each row of ``x`` without padding,
                for prompts of different lengths padded at the end.
            positions: ``[batch, length]`` or ``[batch, length, dims]``, explicit positions, as in ``attention``; with a
                ``context``, a pair (of ``x``, of the context). Excludes ``cache``.

        Returns:
            ``[batch, length, embed_dim]``, in the dtype of the projections' output. (In JAX, whose caches are
            immutable, with a cache the pair of the output and the updated cache.)

        Raises:
            TypeError: If an argument is of the wrong kind.
            ValueError: If a shape is wrong, the cache is full or does not fit, or the layer is not causal and gets a
                cache.
        """
        xp, sizes = self._xp, self.shape
        source = sizes.source_of_keys(x, xp, context=context, q_offset=q_offset, cache=cache, lengths=lengths)
        if positions is not None and cache is not None:
            raise ValueError("cache must be None with positions: a cache counts tokens")
        # [batch, heads, length, head_dim], or length first
        query, key, value = self._heads(x, source)
        rules = {"mask": mask, "segment_ids": segment_ids, "window_size": self.window_size}
        rules |= {"implementation": self.implementation, "law": self.law}
        rules |= {"sinks": self.sinks[...]} if getattr(self, "sinks", None) is not None else {}
        gates = {} if getattr(self, "forget_proj", None) is None else {"log_gates": self._log_gates(source)}
        longer = None
        if cache is None:
            slopes = self._current_slopes
            direction = {"is_causal": self.is_causal, "future_slopes": self.future_slopes, "q_offset": q_offset}
            direction |= {"positions": positions, "distance": self.distance}
            attended = self._attention(query, key, value, slopes, **direction, **rules, **gates)
        elif not self.is_causal:
            raise ValueError("cache must be None when is_causal=False (earlier tokens would have to look again)")
        else:
            counts = {} if lengths is None else {"lengths": lengths}
            attended, longer = self._attend_to(cache, query, key, value, rules, counts, gates)
        if not self._is_length_first:
            attended = attended.swapaxes(1, 2)  # [batch, length, num_heads, head_dim]
        output = self.out_proj(attended.reshape(*x.shape[:2], sizes.num_heads * sizes.head_dim))
        if self.dropout is not None:
            output = self.dropout(output)
        return output if longer is None else (output, longer)

    @property
    def _current_slopes(self) -> Any:
        """The slopes in use, ``[num_heads]``, fixed or learned."""
        return self.slopes

    def _log_gates(self, tokens: Any) -> Any:
        """Return the gates of tokens, in float32, as attention takes them; the layer sets ``forget_proj``."""
        xp = namespace_of(tokens)
        logits = self.forget_proj(astype(xp, tokens, xp.float32))  # [batch, length, num_heads]
        # log_sigmoid, whose gradient at 0 is 1/2 too
        gates = 0 - xp.logaddexp(xp.zeros_like(logits), 0 - logits)
        return gates if self._is_length_first else gates.swapaxes(1, 2)

    def _sizes_and_options(self) -> str:
        """Return the sizes, and the options that change the result, for ``print(layer)``."""
        names = ("embed_dim", "num_heads", "num_kv_heads")
        options: dict[str, Any] = {name: getattr(self.shape, name) for name in names} | {"is_causal": self.is_causal}
        if self.window_size is not None:
            options["window_size"] = self.window_size
        own = {"learnable_slopes": "log_slopes", "forget_gate": "forget_proj", "sinks": "sinks"}
        options |= {option: True for option, name in own.items() if getattr(self, name, None) is not None}
        return ", ".join(f"{name}={value}" for name, value in options.items())

    def _heads(self, x: Any, source: Any) -> Iterator[Any]:
        """Yield query, key and value, ``[batch, heads, length, head_dim]`` or ``[batch, length, heads, head_dim]``."""
        parts = (
            (x, self.q_proj, self.q_norm, self.query_factor),
            (source, self.k_proj, self.k_norm, 1.0),
            (source, self.v_proj, None, 1.0),
        )
        for tokens, proj, norm, factor in parts:
            y = proj(tokens)
            if self.clip_qkv is not None:
                y = self._xp.clip(y, -self.clip_qkv, self.clip_qkv)
            if norm is not None:  # CUDA's autocast computes norms in float32, and not the values
                y = astype(namespace_of(y), norm(y), y.dtype)
            y = scaled(y, factor)
            # [batch, length, heads, head_dim]
            y = y.reshape(*y.shape[:2], y.shape[-1] // self.shape.head_dim, self.shape.head_dim)
            yield y if self._is_length_first else y.swapaxes(1, 2)

    def _attend_to(
        self,
        cache: Any,
        query: Any,
        key: Any,
        value: Any,
        rules: dict[str, Any],
        counts: dict[str, Any],
        gates: dict[str, Any],
    ) -> tuple[Any, Any]:
        """Append tokens to a cache, and return attention to all its tokens, and None (in JAX, the updated cache).

        ``counts`` holds the ``lengths`` of rows if they differ, ``gates`` the ``log_gates`` of a layer that has them,
        else nothing.
        """
        before = cache_lengths([cache])
        try:
            cache.append(key, value, **counts, **gates)
            return cache.attend(query, self._current_slopes, **rules, **counts), None
        except Exception:
            truncate(before)  # a call that raises leaves the cache unchanged
            raise


def scaled(x: Any, factor: float) -> Any:
    """Return ``x * factor``, without an operation if the factor is 1."""
    return x if factor == 1 else x * factor


def cache_lengths(caches: Iterable[Any]) -> list[tuple[Any, Any]]:
    """Return the caches that are changed in place, with their lengths, for :func:`truncate`.

    Skipped are caches of other libraries, which lack ``truncate`` or ``lengths``. (JAX's are immutable: to truncate
    them changes nothing.)
    """
    own = [x for x in caches if hasattr(x, "truncate") and hasattr(x, "lengths")]
    return [(cache, cache.length if cache.lengths is None else cache.lengths) for cache in own]


def truncate(lengths: list[tuple[Any, Any]]) -> None:
    """Restore the lengths of caches after a call that raised."""
    for cache, length in lengths:
        cache.truncate(length)
