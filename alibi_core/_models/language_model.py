"""The language model of all backends: its forward pass, and generation of tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from alibi_core._arrays import (
    along_axis,
    arange,
    asarray,
    astype,
    checks,
    device_of,
    explains_keywords,
    host_values,
    namespace_of,
    running_sum,
)
from alibi_core._models.attention_layer import cache_lengths, scaled, truncate
from alibi_core._models.encoder import TextRows
from alibi_core._models.transformer import BaseTextModel, as_tuple, check_in_table, check_tokens

_LEAST_TEMPERATURE = 2.0**-126  # smaller ones are raised to this, the smallest normal number of float32


@dataclass(frozen=True)
class Generation:
    """The validated rules for choosing tokens from logits and for ending rows. Hashable, for compilers.

    Attributes:
        temperature: Divisor of logits before tokens are drawn; 0 takes the likeliest token.
        top_k: Number of the likeliest tokens to draw from; None for all.
        top_p: Draw from the fewest likeliest tokens whose probabilities sum to at least this; None for all.
        eos_token_ids: The tokens that end a row.
        pad_token_id: The token after the end of a row; None if rows do not end.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None

    @classmethod
    def check(
        cls,
        tokens: Any,
        max_new_tokens: Any,
        vocab_size: int,
        *,
        temperature: Any = 0.0,
        top_k: Any = None,
        top_p: Any = None,
        eos_token_id: Any = None,
        pad_token_id: Any = None,
        is_padded: bool = False,
    ) -> Generation:
        """Check the arguments of ``generate``; ``is_padded`` says whether prompts differ in length."""
        checks.non_negative_int("max_new_tokens", max_new_tokens)
        temperature = checks.non_negative_number("temperature", temperature)
        for name, given in (("top_k", top_k), ("top_p", top_p)):
            if given is not None and temperature == 0:
                raise ValueError(
                    f"{name} must be None with temperature=0, which takes the likeliest token, got {given}"
                )
        if top_k is not None:
            top_k = min(checks.positive_int("top_k", top_k), vocab_size)
        if top_p is not None and not 0 < checks.real_number("top_p", top_p) <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {top_p}")
        if 0 in tokens.shape:
            raise ValueError(f"tokens must have shape (batch, length), neither of them 0, got {tuple(tokens.shape)}")
        if vocab_size - 1 > np.iinfo(str(tokens.dtype).rpartition(".")[2]).max:
            raise ValueError(
                f"tokens must have a dtype that holds all tokens, up to {vocab_size - 1}, got {tokens.dtype}; "
                "cast them to int32"
            )
        check_in_table("tokens", host_values(tokens), vocab_size)
        ends = () if eos_token_id is None else eos_token_id
        ends = tuple(ends) if isinstance(ends, Sequence) else (ends,)
        named = {"eos_token_id": ends, "pad_token_id": () if pad_token_id is None else (pad_token_id,)}
        for name, ids in named.items():
            for token in ids:
                if checks.non_negative_int(name, token) >= vocab_size:
                    raise ValueError(f"{name} must be below vocab_size, {vocab_size}, got {token}")
        if pad_token_id is not None and not ends and not is_padded:
            raise ValueError(
                f"pad_token_id must be None without an eos_token_id or lengths, which it follows, got {pad_token_id}"
            )
        pads = (*named["pad_token_id"], *ends)
        return cls(
            temperature=max(temperature, _LEAST_TEMPERATURE) if temperature > 0 else 0.0,
            top_k=None if top_k == vocab_size else top_k,
            top_p=None if top_p is None or top_p == 1 else float(top_p),
            eos_token_ids=tuple(map(int, ends)),
            pad_token_id=int(pads[0]) if pads else None,
        )

    def filter_logits(self, logits: Any) -> Any:
        """Return the logits divided by the temperature, ``[..., vocab_size]`` float32, -inf for excluded tokens.

        The largest logit is 0. ``top_k`` excludes all but the likeliest tokens; then ``top_p`` excludes the tokens
        after the likeliest ones have reached it. A token as likely as the last included token is included.
        """
        xp = namespace_of(logits)
        logits = astype(xp, logits, xp.float32)
        # Subtract the maximum before the division: a small temperature must not give +inf.
        logits = (logits - xp.max(logits, axis=-1, keepdims=True)) / self.temperature
        if self.top_k is None and self.top_p is None:
            return logits
        ordered = -xp.sort(-logits, axis=-1)
        if self.top_k is not None:
            # [..., 1]: the smallest logit of the top_k likeliest tokens
            least = ordered[..., self.top_k - 1 : self.top_k]
            logits, ordered = (xp.where(x < least, -math.inf, x) for x in (logits, ordered))
        if self.top_p is not None:
            weights = xp.exp(ordered)
            # Weight of all likelier tokens; a token is drawn if that is below top_p.
            before = running_sum(xp, weights) - weights
            is_drawn = before < self.top_p * xp.sum(weights, axis=-1, keepdims=True)
            least = xp.min(xp.where(is_drawn, ordered, math.inf), axis=-1, keepdims=True)
            logits = xp.where(logits < least, -math.inf, logits)
        return logits

    def next_tokens(self, chosen: Any, ended: Any | None) -> tuple[Any, Any | None]:
        """Return the next tokens, with the pad token in rows that had ended before, and a mask of ended rows.

        ``chosen`` holds the model's choice, one token a row; ``ended`` has the same shape, or is None if no row can
        have ended yet.
        """
        if not self.eos_token_ids:
            return chosen, None
        xp = namespace_of(chosen)
        if ended is not None:
            chosen = xp.where(ended, self.pad_token_id, chosen)
        for token in self.eos_token_ids:
            ended = chosen == token if ended is None else xp.logical_or(ended, chosen == token)
        return chosen, ended

    def text_lengths(self, new: list[Any]) -> np.ndarray[Any, Any]:
        """Return how many of the new tokens, ``[batch, 1]`` each, are text, the end included: ``[batch]``."""
        is_end = np.isin(np.asarray([x[:, 0].tolist() for x in new]), self.eos_token_ids)  # [new, batch]
        return np.where(is_end.any(axis=0), is_end.argmax(axis=0) + 1, len(new))


class BaseLanguageModel(BaseTextModel):
    """Base of the language models of all backends.

    The matrix of token embeddings, which also computes the logits if the head is tied, is initialised with variance
    ``1 / embed_dim``: logits have unit variance. Embeddings are multiplied by ``sqrt(embed_dim)`` and have unit
    variance, too. A backend defines the methods that are declared here.
    """

    _tied_head: Any  # (hidden) gives the logits by the matrix of embeddings
    _sources: Any  # (key, number) gives a source of random numbers for each step
    _choose: Any  # (logits, rules, source) gives one token a row, [batch]

    @explains_keywords
    def __call__(
        self,
        tokens: Any,
        *,
        mask: Any | None = None,
        segment_ids: Any | None = None,
        caches: Sequence[Any] | None = None,
        positions: Any | None = None,
    ) -> Any:
        """Return the logits of the token after each of ``tokens``.

        Args:
            tokens: ``[batch, length]`` integers below ``vocab_size``.
            mask, segment_ids, caches, positions: As in :class:`AlibiTransformer`: visible keys, packed sequences,
                key-value caches and explicit positions.

        Returns:
            ``[batch, length, vocab_size]``. In JAX, with caches, the pair of the logits and the updated caches.
        """
        rules = {"mask": mask, "segment_ids": segment_ids, "positions": positions}
        result = self.transformer(self.embed(tokens), caches=caches, **rules)
        hidden, *longer = as_tuple(result)
        return (self.read_out(hidden), *longer) if longer else self.read_out(hidden)

    def embed(self, tokens: Any) -> Any:
        """Return the transformer's input for ``tokens``, ``[batch, length]``: ``[batch, length, embed_dim]``."""
        return self._embed(check_tokens(tokens, self._xp))

    def read_out(self, hidden: Any) -> Any:
        """Return the logits, ``[..., vocab_size]``, of the transformer's output, ``[..., embed_dim]``."""
        logits = self._tied_head(hidden) if self.config.tied_head else self.head(hidden)
        return scaled(logits, self.config.logit_scale)

    @explains_keywords
    def generate(
        self,
        tokens: Any,
        max_new_tokens: int,
        *,
        lengths: Any | None = None,
        mask: Any | None = None,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        eos_token_id: int | Sequence[int] | None = None,
        pad_token_id: int | None = None,
        caches: Sequence[Any] | None = None,
        key: Any | None = None,
    ) -> Any:
        """Return ``tokens`` and ``max_new_tokens`` more, each predicted from all tokens before it. Dropout is off.

        Prompts may differ in length. The result of each prompt is the same as alone: new tokens follow directly, and
        padding comes last.

        Args:
            tokens: ``[batch, length]`` integers, the prompts, of at least one token.
            max_new_tokens: Number of tokens to add to each prompt; may be 0.
            lengths: ``[batch]`` integers, the number of tokens of each prompt; padding follows them.
            mask: ``[batch, length]`` booleans or integers, 0 for padding, on either side, in place of lengths.
            temperature: 0 takes the likeliest token. Otherwise tokens are drawn, with the logits divided by this: 1 is
                the model's own distribution, less is more cautious.
            top_k: Draw only from this many of the likeliest tokens.
            top_p: Draw only from the fewest likeliest tokens (after ``top_k``) whose probabilities sum to at least
                this.
            eos_token_id: A token, or several, that ends a row.
            pad_token_id: Token that fills rows that have ended or are shorter than others. Default: ``eos_token_id``,
                the first of several, or 0.
            caches: From ``transformer.make_caches``, to go on from a text: they hold the first tokens of each prompt,
                which is given from its start all the same, and are left with each row's text but its last token.
                Without new tokens they stay as they are.
            key: The framework's random key, which determines the draws. Default: MLX's global key; JAX has no default.

        Returns:
            ``[batch, length + max_new_tokens]``, in the dtype of ``tokens``. In JAX, with caches, the pair of this and
            the updated caches.

        Raises:
            TypeError: If an argument is of the wrong kind.
            ValueError: If a number is out of range, ``top_k`` or ``top_p`` come without a temperature, JAX's key is
                missing, ``caches`` have other rows, no room, or no token of a prompt to read, or ``tokens`` is not
                ``[batch, length]`` with a token in each row, or has a token without an embedding.
        """
        draws = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
        ends = {"eos_token_id": eos_token_id, "pad_token_id": pad_token_id}
        prompts = Prompts.check(check_tokens(tokens, self._xp), lengths, mask)
        is_padded = prompts.lengths is not None
        rules = Generation.check(prompts.tokens, max_new_tokens, self._vocab_size, **draws, **ends, is_padded=is_padded)
        has_caches, unread, before = caches is not None, prompts, []
        if caches is not None:
            self.transformer.check_caches(caches)
            before = cache_lengths(caches)
            unread = prompts.after(caches, max_new_tokens) if max_new_tokens else prompts
        try:
            new, caches = self._generate(unread, max_new_tokens, rules, key, caches)
            if has_caches and new and rules.eos_token_ids:  # rows may have ended early
                caches = cut(caches, prompts.counts + rules.text_lengths(new) - 1)
        except Exception:
            truncate(before)
            raise
        text = prompts.followed_by(new, rules.pad_token_id or 0)
        return (text, caches) if has_caches and self._xp is None else text

    def _generate(
        self, prompts: Prompts, number: int, rules: Generation, source: Any, caches: Any
    ) -> tuple[list[Any], Any]:
        """Return the ``number`` new tokens, ``[batch, 1]`` each, and the caches; JAX's override compiles the steps."""
        if number == 0:
            return [], caches
        batch_size, length = prompts.tokens.shape
        if caches is None:  # the last token is never fed back, so the caches need no room for it
            caches = self.transformer.make_caches(batch_size, length + number - 1)
        sources = self._sources(source, number)

        def step(unread: Any, ended: Any, index: int) -> tuple[Any, Any]:
            lengths = prompts.lengths if index == 0 else None
            # Only the first step reads whole prompts, of different lengths; later steps read one token.
            hidden = last_tokens(self.transformer(self.embed(unread), caches=caches, lengths=lengths), lengths)
            chosen = self._choose(self.read_out(hidden), rules, sources[index])  # [batch]
            return rules.next_tokens(astype(namespace_of(chosen), chosen, unread.dtype)[:, None], ended)

        with evaluating(self):  # restored afterwards: the caller may be training
            return following(prompts.tokens, number, step), caches


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Put a model of PyTorch or MLX into evaluation mode; afterwards each module has its own mode again."""
    before = [(module, module.training) for module in model.modules()]  # parents first
    model.eval()
    try:
        yield
    finally:
        for module, training in before:
            module.train(training)


@dataclass(frozen=True)
class Prompts:
    """Prompts in a batch, padded at the end."""

    tokens: Any  # [batch, length]
    lengths: Any | None  # [batch] int32: number of tokens in each row without padding; None without padding

    @classmethod
    def check(cls, tokens: Any, lengths: Any | None, mask: Any | None) -> Prompts:
        """Check the ``lengths`` or the ``mask`` of tokens, by reading their values, and move padding behind text."""
        if lengths is None and mask is None:
            return cls(tokens, None)
        rows, xp = TextRows.check(tuple(tokens.shape), lengths, mask), namespace_of(tokens)
        if 0 in rows.counts:
            raise ValueError(f"tokens must have a token of text in each row, got lengths {rows.counts}")
        # A stable sort keeps the order of text tokens: padding goes last.
        order, device = np.argsort(~rows.text, axis=1, kind="stable"), device_of(xp, tokens)
        tokens = along_axis(xp, tokens, asarray(xp, order.astype(np.int32), xp.int32, device), 1)
        lengths = asarray(xp, rows.counts, xp.int32, device)
        is_padding = arange(xp, tokens.shape[1], device)[None] >= lengths[:, None]
        return cls(xp.where(is_padding, xp.zeros_like(tokens), tokens), lengths)  # padding ids may lack an embedding

    @property
    def counts(self) -> np.ndarray[Any, Any]:
        """The number of tokens in each row without padding, ``[batch]``."""
        batch_size, length = self.tokens.shape
        return np.full(batch_size, length) if self.lengths is None else np.asarray(self.lengths.tolist())

    def after(self, caches: Sequence[Any], number: int) -> Prompts:
        """Return the tokens of each prompt that caches do not hold yet; check room for these and ``number`` others."""
        (batch_size, length), cache, xp = self.tokens.shape, caches[0], namespace_of(self.tokens)
        rows = batch_size if cache.keys is None else cache.keys.shape[0]
        if rows != batch_size:
            raise ValueError(f"caches must have the rows of tokens, {batch_size}, got {rows}; see select_batch")
        held = int(cache.length) if cache.lengths is None else np.asarray(cache.lengths.tolist())
        left = self.counts - held
        if left.min() < 1:
            raise ValueError(f"tokens must go on after those that caches hold in each row, {held}, got {self.counts}")
        most = int(self.counts.max()) + number - 1
        if cache.max_length is not None and most > cache.max_length:
            raise ValueError(f"caches must have room for {most} tokens, got max_length {cache.max_length}")
        if self.lengths is None and np.ndim(held) == 0:
            return Prompts(self.tokens[:, held:], None)
        # [batch, most tokens left in a row]: the index of each, or of any token in place of padding
        index = np.minimum((self.counts - left)[:, None] + np.arange(left.max()), length - 1).astype(np.int32)
        index, left = (asarray(xp, x.astype(np.int32), xp.int32, device_of(xp, self.tokens)) for x in (index, left))
        return Prompts(along_axis(xp, self.tokens, index, 1), left)

    def followed_by(self, new: list[Any], pad: int) -> Any:
        """Return each prompt with its new tokens, then padding: ``[batch, length + len(new)]``."""
        xp = namespace_of(self.tokens)
        joined = xp.concat([self.tokens, *new], axis=1)
        if self.lengths is None:
            return joined
        length, device = self.tokens.shape[1], device_of(xp, self.tokens)
        # [1, length + new] and [batch, 1]
        places, ends = arange(xp, length + len(new), device)[None], self.lengths[:, None]
        is_new, is_padding = places >= ends, places >= ends + len(new)
        # Index of each place's token in `joined`: in the prompt, or among the new tokens.
        source = xp.where(is_padding, 0, xp.where(is_new, places - ends + length, places + 0 * ends))
        found = along_axis(xp, joined, source, 1)
        return xp.where(is_padding, xp.full_like(found, pad), found)


def cut(caches: Sequence[Any], ends: np.ndarray[Any, Any]) -> list[Any]:
    """Return the caches without the tokens of each row from ``ends`` on, ``[batch]``."""
    xp, device = namespace_of(caches[0].keys), device_of(namespace_of(caches[0].keys), caches[0].keys)
    is_one = ends.min() == ends.max()
    length = int(ends[0]) if is_one else asarray(xp, ends.astype(np.int32), xp.int32, device)
    return [cache.truncate(length) or cache for cache in caches]  # those of PyTorch and MLX are changed in place


def last_tokens(hidden: Any, lengths: Any | None) -> Any:
    """Return the features of each row's last token, ``[batch, features]``, from ``[batch, length, features]``."""
    if lengths is None:
        return hidden[:, -1]
    # Gather along the length axis with an index [batch, 1, 1].
    return along_axis(namespace_of(hidden), hidden, lengths[:, None, None] - 1, 1)[:, 0]


def following(
    tokens: Any, number: int, step: Callable[[Any, Any, int], tuple[Any, Any]], *, may_stop: bool = True
) -> list[Any]:
    """Return the ``number`` tokens that follow ``tokens``, ``[batch, length]``, each ``[batch, 1]``.

    ``step`` takes the tokens that the model has not read, a mask of rows that have ended before, and the index of the
    step. It returns the next tokens, ``[batch, 1]``, and the mask of rows that have ended by then. With ``may_stop``,
    generation stops when all rows have ended.
    """
    found: list[Any] = []
    unread, ended = tokens, None
    for index in range(number):
        had_ended = ended
        unread, ended = step(unread, ended, index)
        found.append(unread)
        # Read the mask of the step before, which is computed already. If all rows had ended, this step and all further
        # ones give the pad token.
        if may_stop and had_ended is not None and bool(had_ended.all()):
            found += [unread] * (number - index - 1)
            break
    return found
