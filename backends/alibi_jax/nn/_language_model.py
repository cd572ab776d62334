"""A language model on the ALiBi transformer: tokens in, logits out, and generation from a prompt."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from alibi_core.backend import models
from alibi_core.backend.checks import known
from alibi_core.backend.models import AlibiConfig, Generation
from alibi_jax.nn._transformer import AttentionFactory, Parts, is_traced


class AlibiLanguageModel(nnx.Module, models.BaseLanguageModel):
    """Predict each next token from the tokens before it, at any length.

    The embedding matrix also computes the logits, unless ``config`` asks for a separate head. ``generate`` compiles two
    programs, one for the prompt and one for the steps after it. It pads prompts and caches to a few lengths, so that
    texts of about the same length share them.

    Args:
        config: Shape of the model; must be causal.
        vocab_size: Number of different tokens.
        attention, dtype, param_dtype, rngs: As in :class:`AlibiTransformer`.

    Raises:
        TypeError: If ``vocab_size`` is no integer.
        ValueError: If ``vocab_size`` is below 1, or ``config`` describes an encoder.

    Example:
        >>> model = AlibiLanguageModel(AlibiConfig(num_layers=1), vocab_size=256, rngs=nnx.Rngs(0))
        >>> prompt = jnp.asarray([list(b"train short")])
        >>> model(prompt).shape
        (1, 11, 256)
        >>> model.generate(prompt, max_new_tokens=5).shape
        (1, 16)
    """

    def __init__(
        self,
        config: AlibiConfig,
        vocab_size: int,
        *,
        attention: AttentionFactory | None = None,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        parts = Parts(config, attention, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self._build(parts, vocab_size, is_causal=True)

    def _tied_head(self, hidden: jax.Array) -> jax.Array:
        return self.embedding.attend(hidden)

    @functools.wraps(models.BaseLanguageModel.generate)
    def generate(self, tokens: Any, max_new_tokens: int, *, key: jax.Array | None = None, **options: Any) -> Any:
        """See the base class; tokens whose values can be read are padded and joined on the host, for no compilation."""
        if options.get("caches") is not None and is_traced(nnx.state(self), tokens, key, options["caches"]):
            raise ValueError("caches must be None in a traced call, which cannot read how many tokens they hold")
        if (
            not isinstance(tokens, jax.Array)
            or is_traced(nnx.state(self), tokens, key)
            or not tokens.is_fully_addressable
        ):
            return super().generate(tokens, max_new_tokens, key=(key, None), **options)
        place = tokens.sharding if tokens.committed else None
        found = super().generate(np.asarray(tokens), max_new_tokens, key=(key, place), **options)
        text, *caches = found if isinstance(found, tuple) else (found,)
        return (jax.device_put(text, place), *caches) if caches else jax.device_put(text, place)

    def _generate(
        self, prompts: models.Prompts, number: int, rules: Generation, source: tuple[jax.Array | None, Any], caches: Any
    ) -> tuple[list[Any], Any]:
        key, place = source
        if rules.temperature > 0 and key is None:
            raise ValueError("key must be given with a temperature above 0, got None; jax.random.key makes one")
        if number == 0:
            return [], caches
        # Copy the modules to turn off dropout without changing this model.
        model = nnx.merge(*nnx.split(self))
        model.eval()
        graph, state = nnx.split(model)
        batch_size, length = prompts.tokens.shape
        on_host, is_given = isinstance(prompts.tokens, np.ndarray), caches is not None
        room = int(caches[0].max_length - caches[0].length) if is_given else math.inf
        widths = (0, 0), (0, min(_few_sizes(length), max(room, length)) - length)
        tokens = jax.device_put(np.pad(prompts.tokens, widths), place) if on_host else jnp.pad(prompts.tokens, widths)
        if not is_given:
            caches = self.transformer.make_caches(batch_size, _few_sizes(max(tokens.shape[1], length + number), 128))
        keys = None if key is None else jax.random.split(key, _few_sizes(number))
        lengths = np.int32(length) if prompts.lengths is None else prompts.lengths
        extend = _extend if is_traced(state, tokens, key) else _extend_in_place

        def step(unread: jax.Array, ended: jax.Array | None, index: int) -> tuple[jax.Array, jax.Array | None]:
            nonlocal caches
            # With prompts of different lengths, the empty caches have a scalar length and the returned ones a length
            # per row, so the buffers cannot be donated; nor can the caller's.
            is_first = index == 0 and (is_given or prompts.lengths is not None)
            unread, ended, caches = (_extend if is_first else extend)(
                graph, state, unread, caches, rules, keys, np.int32(index), ended, lengths if index == 0 else None
            )
            return unread, ended

        found = models.following(tokens, number, step, may_stop=extend is _extend_in_place)
        return (jax.device_get(found) if on_host else found), caches


def _few_sizes(number: int, least: int = 16) -> int:
    """Return the number rounded up, to one of eight sizes from each power of two to the next, and by ``least``."""
    step = max(least, 2 ** (known("the length of tokens", number).bit_length() - 4))
    return -(-number // step) * step


def _extended(
    graph: Any,
    state: Any,
    tokens: jax.Array,
    caches: list[Any],
    rules: Generation,
    keys: jax.Array | None,
    index: jax.Array,
    ended: jax.Array | None,
    lengths: jax.Array | None,
) -> tuple[jax.Array, jax.Array | None, list[Any]]:
    """Return the next tokens, ``[batch, 1]``, which rows have ended, and the caches with ``tokens`` appended.

    ``lengths`` says how many of the tokens are text: a number, ``[batch]`` numbers, or None for all.
    """
    model = nnx.merge(graph, state)
    by_row = lengths if lengths is not None and jnp.ndim(lengths) else None
    hidden, caches = model.transformer(model.embed(tokens), caches=caches, lengths=by_row)
    if lengths is not None and by_row is None:  # no token of text sees the padding, which comes after it
        caches = [cache.truncate(cache.length - tokens.shape[1] + lengths) for cache in caches]
        lengths = jnp.full(tokens.shape[0], lengths)
    logits = model.read_out(models.last_tokens(hidden, lengths))  # [batch, vocab_size]
    if rules.temperature == 0:
        chosen = logits.argmax(axis=-1)
    else:
        chosen = jax.random.categorical(keys[index], rules.filter_logits(logits))
    return *rules.next_tokens(chosen[:, None].astype(tokens.dtype), ended), caches


_extend = jax.jit(_extended, static_argnums=(0, 4))
# Donates the caches. Not for jax.vmap: there the first caches have no mapped axis, so donation fails with a warning.
_extend_in_place = jax.jit(_extended, static_argnums=(0, 4), donate_argnums=3)
