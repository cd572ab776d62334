"""The transformer of all backends: its sub-modules, and its forward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from alibi_core._arrays import Namespace, checks, explains_keywords, namespace_of, signed
from alibi_core._models.attention_layer import cache_lengths, scaled, truncate
from alibi_core._models.config import AlibiConfig, check_config


class BaseParts:
    """Factory of a model's sub-modules. A backend defines the attributes that are declared here.

    Args:
        config: Shape of the model.
        attention: Function of ``config`` and the options that returns an attention layer. Default:
            ``attention_layer``.
        options: Further arguments of the framework's modules, such as JAX's ``rngs``.
    """

    linear: Any  # (features, to, bias)
    layer_norm: Any  # (features)
    rms_norm: Any  # (features)
    activation: Any  # ()
    dropout: Any  # (), may return None
    embedding: Any  # (count), with variance 1 / embed_dim
    block: Any  # ()
    transformer: Any  # ()
    listed: Any  # (modules), a list of modules
    attention_layer: Any  # the class

    def __init__(self, config: AlibiConfig, attention: Callable[..., Any] | None = None, **options: Any) -> None:
        self.config, self.factory, self.options = config, attention, options

    def attention(self) -> Any:
        """Return an attention layer. The backend's layer gets clipping, norms and query factor from ``config``."""
        config = self.config
        if self.factory is not None:
            return self.factory(config, **self.options)
        layer = self.attention_layer(**config.attention_options, **self.options)
        layer.clip_qkv, layer.query_factor = config.clip_qkv, config.query_factor
        if config.qk_norm:
            shape = layer.shape
            layer.q_norm, layer.k_norm = (self.norm(n * shape.head_dim) for n in (shape.num_heads, shape.num_kv_heads))
        return layer

    def norm(self, features: int | None = None) -> Any:
        """Return a norm of ``features`` (default ``embed_dim``)."""
        make = self.rms_norm if self.config.norm == "rms_norm" else self.layer_norm
        return make(features or self.config.embed_dim)

    def feed_forward(self) -> Any:
        """Return the modules of a feed-forward layer: two projections, an activation between them, and dropout."""
        config = self.config
        modules = [
            self.linear(config.embed_dim, config.up_dim, config.has_up_bias),
            self.activation(),
            self.linear(config.hidden_dim, config.embed_dim, config.feed_forward_bias),
            self.dropout(),
        ]
        return self.listed([module for module in modules if module is not None])


class BaseBlock:
    """A block: attention and a feed-forward layer with residual connections."""

    _checkpointed: Any  # of a backend: (run, x) gives run(block, x), computed again in the backward pass

    def _build(self, parts: BaseParts) -> None:
        self.kind, self.is_gated = parts.config.block, parts.config.gated
        self.is_checkpointed = parts.config.gradient_checkpointing
        self.attention_norm = parts.norm()
        self.attention = parts.attention()
        if self.kind != "shared_norm":
            self.feed_forward_norm = parts.norm()
        if self.kind == "double_post_norm":
            self.second_attention_norm = parts.norm()
        self.feed_forward = parts.feed_forward()

    def __call__(self, x: Any, *, cache: Any, **rules: Any) -> Any:
        """Return the block's output, ``[batch, length, embed_dim]``; in JAX, with a cache, the updated cache, too."""
        if self.is_checkpointed and cache is None:  # computed twice, a block would fill its cache twice
            return self._checkpointed(partial(type(self)._run, cache=None, **rules), x)
        return self._run(x, cache=cache, **rules)

    def _run(self, x: Any, *, cache: Any, **rules: Any) -> Any:
        # Post-norm attends to the input itself, pre-norm to its norm.
        is_post_norm = self.kind in ("post_norm", "double_post_norm")
        normed = x if is_post_norm else self.attention_norm(x)
        attended, *longer = as_tuple(self.attention(normed, cache=cache, **rules))
        y = self._post_norm(x, attended) if is_post_norm else self._pre_norm(x, normed, attended)
        return (y, *longer) if longer else y

    def _pre_norm(self, x: Any, normed: Any, attended: Any) -> Any:
        if self.kind == "shared_norm":
            return x + attended + self._fed_forward(normed)
        if self.kind == "parallel":
            return x + attended + self._fed_forward(self.feed_forward_norm(x))
        x = (normed if self.kind == "normed_residual" else x) + attended
        normed = self.feed_forward_norm(x)
        return (normed if self.kind == "normed_residual" else x) + self._fed_forward(normed)

    def _post_norm(self, x: Any, attended: Any) -> Any:
        attended = self.attention_norm(x + attended)
        if self.kind == "double_post_norm":
            attended = self.second_attention_norm(x + attended)
        return self.feed_forward_norm(attended + self._fed_forward(attended))

    def _fed_forward(self, x: Any) -> Any:
        up, activation, *rest = self.feed_forward
        hidden = up(x)  # [..., hidden_dim]; if gated, [..., 2 * hidden_dim], the gate first
        if self.is_gated:
            half = hidden.shape[-1] // 2
            hidden = activation(hidden[..., :half]) * hidden[..., half:]
        else:
            hidden = activation(hidden)
        for layer in rest:
            hidden = layer(hidden)
        return hidden


class BaseTransformer:
    """Base of the transformers of all backends: blocks, each on normed input, then a final norm.

    There are no position embeddings, so inputs may have any length, also above ``config.max_len``. Post-norm blocks
    norm their output instead, and no final norm follows.

    References:
        Press, Smith, Lewis: Train Short, Test Long (arXiv 2108.12409). Xiong et al.: On Layer Normalization in the
        Transformer Architecture (arXiv 2002.04745), for pre-norm.
    """

    def _build(self, parts: BaseParts) -> None:
        self.config = check_config(parts.config)
        self.blocks = parts.listed([parts.block() for _ in range(self.config.num_layers)])
        if not self.config.is_post_norm:
            self.norm = parts.norm()

    @explains_keywords
    def __call__(
        self,
        x: Any,
        *,
        mask: Any | None = None,
        segment_ids: Any | None = None,
        caches: Sequence[Any] | None = None,
        positions: Any | None = None,
        lengths: Any | None = None,
    ) -> Any:
        """Return the output of all blocks.

        Args:
            x: ``[batch, length, embed_dim]``.
            mask, segment_ids, positions, lengths: As in :class:`AlibiAttention`; ``positions`` exclude ``caches``,
                ``lengths`` require them.
            caches: One key-value cache a block, from :meth:`make_caches`. JAX's caches are immutable: pass the caches
                that the previous call returned.

        Returns:
            ``[batch, length, embed_dim]``, in the dtype of ``x``. In JAX, with caches, the pair of the output and the
            updated caches.

        Raises:
            TypeError: If ``x`` is no array, or ``caches`` are no sequence.
            ValueError: If ``x`` has another shape, or the number of caches is not the number of blocks.
        """
        self._check_input(x, caches)
        given = [None] * len(self.blocks) if caches is None else caches
        before = cache_lengths(given)
        longer: list[Any] = []
        rules = {"mask": mask, "segment_ids": segment_ids}
        # A custom attention layer may lack these arguments: pass them only if given.
        rules |= {name: x for name, x in (("positions", positions), ("lengths", lengths)) if x is not None}
        try:
            for block, cache in zip(self.blocks, given, strict=True):
                x, *rest = as_tuple(block(x, cache=cache, **rules))
                longer += rest
        except Exception:
            truncate(before)  # if one block raises, remove the new tokens from the caches of earlier blocks
            raise
        if not self.config.is_post_norm:
            x = self.norm(x)
        return (x, longer) if longer else x

    def make_caches(self, batch_size: int, max_length: int) -> list[Any]:
        """Return an empty key-value cache for each block, with room for ``max_length`` tokens a sequence."""
        return [block.attention.make_cache(batch_size, max_length) for block in self.blocks]

    def _check_input(self, x: Any, caches: Any) -> None:
        width = self.config.embed_dim
        if len(checks.array("x", x).shape) != 3 or x.shape[-1] != width:
            raise ValueError(f"x must have shape (batch, length, embed_dim {width}), got {tuple(x.shape)}")
        if caches is not None:
            self.check_caches(caches)

    def check_caches(self, caches: Any) -> None:
        """Check that there is one cache a block."""
        count = len(self.blocks)
        # A single JAX cache is a tuple, hence a Sequence: recognise it by its method.
        if hasattr(caches, "attend") or not isinstance(caches, Sequence):
            raise TypeError(f"caches must be a list of one a block ({count}), got {type(caches).__name__}")
        if len(caches) != count:
            raise ValueError(f"caches must be one a block ({count}), got {len(caches)}")


class BaseTextModel:
    """Base of language models and encoders: a transformer on the embeddings of tokens."""

    _xp: Any = None  # torch or mlx.core if tokens must be its arrays; None in JAX, which also takes NumPy's

    def _build(self, parts: BaseParts, vocab_size: int, *, is_causal: bool) -> None:
        config = self.config = check_config(parts.config, is_causal=is_causal)
        self.embedding = parts.embedding(checks.positive_int("vocab_size", vocab_size))
        if config.token_types and not is_causal:
            self.token_type_embedding = parts.embedding(config.token_types)
        if config.embedding_norm:
            self.embedding_norm = parts.norm()
        self.transformer = parts.transformer()
        if is_causal and not config.tied_head:
            self.head = parts.linear(config.embed_dim, vocab_size, False)

    @property
    def _vocab_size(self) -> int:
        """The size of the embedding, which users enlarge for tokens of their own; MLX's has no ``num_embeddings``."""
        table: Any = self.embedding
        if hasattr(table, "num_embeddings"):
            return int(table.num_embeddings)
        return int(getattr(table, "embedding", table).weight.shape[0])  # LoRA and DoRA of mlx-lm wrap the embedding

    def _embed(self, tokens: Any, token_types: Any | None = None) -> Any:
        xp = namespace_of(tokens)
        tokens = signed(xp, tokens)  # PyTorch's embeddings accept int32 and int64 only
        x = scaled(self.embedding(tokens), self.config.embedding_factor)
        if self.config.token_types and not self.config.is_causal:
            # Default: all tokens have type 0.
            x = x + self.token_type_embedding(tokens * 0 if token_types is None else signed(xp, token_types))
        return self.embedding_norm(x) if self.config.embedding_norm else x


def as_tuple(result: Any) -> tuple[Any, ...]:
    """Return a module's result as a tuple; with JAX's caches it is a pair already."""
    return result if isinstance(result, tuple) else (result,)


def check_tokens(value: Any, xp: Namespace | None = None) -> Any:
    """Check for token ids, ``[batch, length]`` integers, of the library ``xp`` if it is given."""
    checks.integer_array(namespace_of(checks.array("tokens", value), xp=xp, names=("tokens",)), "tokens", value)
    if len(value.shape) != 2:
        how = "; tokens[None] makes one text a batch" if len(value.shape) == 1 else ""
        raise ValueError(f"tokens must have shape (batch, length), got {tuple(value.shape)}{how}")
    return value


def check_in_table(name: str, values: np.ndarray[Any, Any] | None, size: int) -> None:
    """Check that all ``values`` are row indices of a table with ``size`` rows. ``values`` is None where unknown."""
    if values is not None and values.size and not 0 <= values.min() <= values.max() < size:
        wrong = values.min() if values.min() < 0 else values.max()
        raise ValueError(f"{name} must be from 0 to {size - 1}, for which there are embeddings, got {wrong:.0f}")
