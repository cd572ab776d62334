"""A language model on the ALiBi transformer: tokens in, logits out, and generation from a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from alibi_core.backend import models
from alibi_core.backend.checks import explains_keywords
from alibi_core.backend.models import Generation
from alibi_torch._internals import skipped_by_compilers
from alibi_torch.nn._transformer import AlibiConfig, AttentionFactory, Checkpointing, Parts, TokenEmbedding


class AlibiLanguageModel(Checkpointing, models.BaseLanguageModel):
    """Predict each next token from the tokens before it, at any length.

    The embedding matrix also computes the logits, unless ``config`` asks for a separate head.

    Args:
        config: Shape of the model; must be causal.
        vocab_size: Number of different tokens.
        attention: As in :class:`AlibiTransformer`: a factory of attention layers.

    Raises:
        TypeError: If ``vocab_size`` is no integer.
        ValueError: If ``vocab_size`` is below 1, or ``config`` describes an encoder.

    Example:
        >>> model = AlibiLanguageModel(AlibiConfig(num_layers=1), vocab_size=256)
        >>> prompt = torch.tensor([list(b"train short")])
        >>> model(prompt).shape
        torch.Size([1, 11, 256])
        >>> model.generate(prompt, max_new_tokens=5).shape
        torch.Size([1, 16])
    """

    _xp = torch

    def __init__(self, config: AlibiConfig, vocab_size: int, *, attention: AttentionFactory | None = None) -> None:
        super().__init__()
        self._build(Parts(config, attention), vocab_size, is_causal=True)

    forward = models.BaseLanguageModel.__call__

    @explains_keywords
    @skipped_by_compilers  # they would unroll the loop over tokens
    @torch.no_grad()
    def generate(
        self,
        tokens: Tensor,
        max_new_tokens: int,
        *,
        lengths: Tensor | Sequence[int] | None = None,
        mask: Tensor | None = None,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        eos_token_id: int | Sequence[int] | None = None,
        pad_token_id: int | None = None,
        caches: Sequence[Any] | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Return ``tokens`` and ``max_new_tokens`` more, each predicted from all before it. Dropout is off meanwhile.

        Prompts may differ in length. Each row gets the tokens that its prompt would get alone: the new tokens follow
        the prompt directly, and padding comes last. Compilers skip the loop over tokens: compile its steps, by
        ``model.transformer.compile()``.

        Args:
            tokens: ``[batch, length]`` integers, the prompts, at least one token each.
            max_new_tokens: Number of tokens to add to each prompt; may be 0.
            lengths: ``[batch]`` integers, the number of tokens in each prompt; padding follows them.
            mask: ``[batch, length]`` booleans or integers, 0 for padding, on either side, in place of lengths.
            temperature: 0 takes the likeliest token. Otherwise tokens are sampled, with the logits divided by this.
            top_k: Sample only from this many of the likeliest tokens.
            top_p: Sample only from the fewest likeliest tokens whose probabilities sum to this share; applied after
                ``top_k``.
            eos_token_id: A token, or several, that ends a row.
            pad_token_id: The token that fills a row after its end. Default: ``eos_token_id`` (the first of several), or
                0.
            caches: From ``transformer.make_caches``, to go on from a text: they hold the first tokens of each prompt,
                which is given from its start all the same, and are left with each row's text but its last token.
                Without new tokens they stay as they are.
            generator: The random generator for sampling, on the device of ``tokens``. Default: PyTorch's global one.

        Returns:
            ``[batch, length + max_new_tokens]``, with the dtype of ``tokens``.

        Raises:
            TypeError: If an argument is of the wrong kind.
            ValueError: If a number is out of range, ``top_k`` or ``top_p`` come without a temperature, ``caches`` have
                other rows, no room, or no token of a prompt to read, ``tokens`` is not ``[batch, length]`` with a token
                in each row, or a token is outside of the vocabulary.
        """
        rules = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
        ends = {"eos_token_id": eos_token_id, "pad_token_id": pad_token_id}
        others = {"lengths": lengths, "mask": mask, "caches": caches, "key": generator}
        return super().generate(tokens, max_new_tokens, **rules, **ends, **others)

    def _tied_head(self, hidden: Tensor) -> Tensor:
        table = self.embedding
        if isinstance(table, TokenEmbedding):
            return table(hidden)
        # The user has replaced the table, say by an adapter or a quantized one: look up the rows of all tokens.
        return F.linear(hidden, table(torch.arange(self._vocab_size, device=hidden.device)))

    def _sources(self, generator: torch.Generator | None, number: int) -> Sequence[torch.Generator | None]:
        return [generator] * number

    def _choose(self, logits: Tensor, rules: Generation, generator: torch.Generator | None) -> Tensor:
        if rules.temperature == 0:
            return logits.argmax(dim=-1)
        shares = rules.filter_logits(logits).softmax(dim=-1)
        return torch.multinomial(shares, num_samples=1, generator=generator)[:, 0]
