"""A language model on the ALiBi transformer: tokens in, logits out, and generation from a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from alibi_core.backend import models
from alibi_core.backend.checks import explains_keywords
from alibi_core.backend.models import AlibiConfig, Generation
from alibi_mlx.nn._transformer import AttentionFactory, Parts
from alibi_mlx.nn._weights import SavesLayers


class AlibiLanguageModel(SavesLayers, models.BaseLanguageModel):
    """Predict each next token from the tokens before it, at any length.

    The embedding matrix also computes the logits, unless ``config`` asks for a separate head. mlx-lm can run the model:
    ``mlx_lm.generate(model, tokenizer, prompt)``, after ``model.eval()`` if it has dropout. The options
    ``max_kv_size`` and ``kv_bits`` of mlx-lm apply to its own caches and have no effect here.

    Args:
        config: Shape of the model; must be causal.
        vocab_size: Number of different tokens.
        attention: As in :class:`AlibiTransformer`: a factory of attention layers.

    Raises:
        TypeError: If ``vocab_size`` is no integer.
        ValueError: If ``vocab_size`` is below 1, or ``config`` describes an encoder.

    Example:
        >>> model = AlibiLanguageModel(AlibiConfig(num_layers=1), vocab_size=256)
        >>> prompt = mx.array([list(b"train short")])
        >>> model(prompt).shape
        (1, 11, 256)
        >>> model.generate(prompt, max_new_tokens=5).shape
        (1, 16)
    """

    _xp = mx

    def __init__(self, config: AlibiConfig, vocab_size: int, *, attention: AttentionFactory | None = None) -> None:
        super().__init__()
        self._build(Parts(config, attention), vocab_size, is_causal=True)

    @explains_keywords
    def __call__(
        self,
        tokens: mx.array,
        *,
        mask: mx.array | None = None,
        segment_ids: mx.array | tuple[mx.array, mx.array] | None = None,
        caches: Sequence[Any] | None = None,
        cache: Sequence[Any] | None = None,
        positions: mx.array | None = None,
    ) -> mx.array:
        """Return the logits of the token after each of ``tokens``.

        Args:
            tokens: ``[batch, length]`` integers below ``vocab_size``.
            mask, segment_ids, caches, positions: As in :class:`AlibiTransformer`.
            cache: mlx-lm's name for ``caches``.

        Returns:
            ``[batch, length, vocab_size]``.

        Raises:
            ValueError: If both ``caches`` and ``cache`` are given.
        """
        if cache is not None and caches is not None:
            raise ValueError("cache must be None where caches are given: both mean one cache a block")
        caches = caches if cache is None else cache
        return super().__call__(tokens, mask=mask, segment_ids=segment_ids, caches=caches, positions=positions)

    @property
    def layers(self) -> list[Any]:
        """The blocks, under the name that mlx-lm uses."""
        return self.transformer.blocks

    def make_cache(self) -> list[Any]:
        """Return an empty cache for each block, for any number of sequences and tokens; mlx-lm calls this."""
        return self.transformer.make_caches()

    def _tied_head(self, hidden: mx.array) -> mx.array:
        return self.embedding.as_linear(hidden)

    def _sources(self, key: mx.array | None, number: int) -> Sequence[mx.array | None]:
        return [None] * number if key is None else list(mx.random.split(key, number))

    def _choose(self, logits: mx.array, rules: Generation, key: mx.array | None) -> mx.array:
        if rules.temperature == 0:
            chosen = logits.argmax(axis=-1)
        else:
            chosen = mx.random.categorical(rules.filter_logits(logits), axis=-1, key=key)
        mx.async_eval(chosen)  # compute it while Python builds the next step
        return chosen
