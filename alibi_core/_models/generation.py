"""How language models choose the tokens that they go on with, in any framework."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from alibi_core._arrays import Namespace, asarray, astype, checks, device_of, host_values, running_sum

_LEAST_TEMPERATURE = 2.0**-126  # the least normal number of float32, which logits are divided in


@dataclass(frozen=True)
class Generation:
    """How tokens are chosen from logits, and when a row has ended; checked. Hashable, as compilers ask for.

    Attributes:
        temperature: What logits are divided by before tokens are drawn; 0 takes the likeliest token.
        top_k: How many of the likeliest tokens may be drawn; None for all.
        top_p: The share of probability that the likeliest tokens, those that may be drawn, have to reach; None for all.
        eos_token_ids: The tokens that end a row.
        pad_token_id: What follows them; None if there are none.
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
    ) -> Generation:
        """Check the arguments that ``generate`` has in all backends.

        Raises:
            TypeError: If an argument is of the wrong kind.
            ValueError: If a value is out of range, or ``tokens`` is not ``[batch, length]`` with a token in each row,
                of integers too short for the vocabulary, or of tokens that it does not have.
        """
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
        if 0 in checks.tokens(tokens).shape:
            raise ValueError(f"tokens must have shape (batch, length), neither of them 0, got {tuple(tokens.shape)}")
        if vocab_size - 1 > _most(tokens.dtype):
            raise ValueError(
                f"tokens must have a dtype that holds all tokens, up to {vocab_size - 1}, got {tokens.dtype}; "
                "cast them to int32"
            )
        checks.in_table("tokens", host_values(tokens), vocab_size)
        ends = () if eos_token_id is None else eos_token_id
        ends = tuple(ends) if isinstance(ends, Sequence) else (ends,)
        named = {"eos_token_id": ends, "pad_token_id": () if pad_token_id is None else (pad_token_id,)}
        for name, ids in named.items():
            for token in ids:
                if checks.non_negative_int(name, token) >= vocab_size:
                    raise ValueError(f"{name} must be below vocab_size, {vocab_size}, got {token}")
        if pad_token_id is not None and not ends:
            raise ValueError(
                f"pad_token_id must be None without an eos_token_id, after which it comes, got {pad_token_id}"
            )
        pads = (*named["pad_token_id"], *ends)
        return cls(
            temperature=max(temperature, _LEAST_TEMPERATURE) if temperature > 0 else 0.0,
            top_k=None if top_k == vocab_size else top_k,
            top_p=None if top_p is None or top_p == 1 else float(top_p),
            eos_token_ids=tuple(map(int, ends)),
            pad_token_id=int(pads[0]) if pads else None,
        )

    def to_draw_from(self, xp: Namespace, logits: Any) -> Any:
        """Return the logits, float32, of the distribution that tokens are drawn from; the largest is 0.

        Tokens that are not drawn have -inf. First come those that are not among the ``top_k`` likeliest, then of the
        rest, those that come after the likeliest ones have reached ``top_p``. Tokens as likely as the last of these are
        drawn as well.

        Args:
            xp: Namespace of the logits.
            logits: ``[..., vocab_size]``, floating.
        """
        logits = astype(xp, logits, xp.float32)
        # From the maximum down, so that a small temperature gives large negative numbers and no infinite ones.
        logits = (logits - xp.max(logits, axis=-1, keepdims=True)) / self.temperature
        if self.top_k is None and self.top_p is None:
            return logits
        none = asarray(xp, -math.inf, xp.float32, device_of(xp, logits))
        ordered = -xp.sort(-logits, axis=-1)
        if self.top_k is not None:
            least = ordered[..., self.top_k - 1 : self.top_k]
            logits, ordered = (xp.where(x < least, none, x) for x in (logits, ordered))
        if self.top_p is not None:
            weights = xp.exp(ordered)
            before = running_sum(xp, weights) - weights
            is_drawn = before < self.top_p * xp.sum(weights, axis=-1, keepdims=True)
            logits = xp.where(logits < xp.min(xp.where(is_drawn, ordered, -none), axis=-1, keepdims=True), none, logits)
        return logits

    def followed(self, xp: Namespace, chosen: Any, ended: Any | None) -> tuple[Any, Any | None]:
        """Return the tokens that follow, and which rows have ended with them.

        Args:
            xp: Namespace of the arrays.
            chosen: Integers of any shape: what the model chose, a token a row.
            ended: Booleans of that shape: the rows that have ended before; None if none has.

        Returns:
            Tokens, which are the pad token in rows that have ended before, and booleans; None where nothing ends rows.
        """
        if not self.eos_token_ids:
            return chosen, None
        if ended is not None:
            chosen = xp.where(ended, asarray(xp, self.pad_token_id, chosen.dtype, device_of(xp, chosen)), chosen)
        for token in self.eos_token_ids:
            ended = chosen == token if ended is None else xp.logical_or(ended, chosen == token)
        return chosen, ended


def _most(dtype: Any) -> int:
    """Return the largest number of any library's integer dtype."""
    unsigned, bits = re.findall(r"(u?)int(\d+)$", str(dtype))[0]
    return int(2 ** (int(bits) - (not unsigned))) - 1
