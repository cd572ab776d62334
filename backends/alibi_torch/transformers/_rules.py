"""How the attention of a family of models forms its scores, and that attention by this library."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import array_api_compat.torch as xp
import torch
from torch import Tensor

from alibi_core import AttentionCall
from alibi_core import slopes as slopes_of
from alibi_core.backend import named
from alibi_torch._attention import run
from alibi_torch._tiled import KeyNorms
from alibi_torch.transformers import _facts

CONTRACTS = ("model", "exact")


@dataclass(frozen=True)
class Rules:
    """What one attention module computes.

    Attributes:
        contract: The core's contract of the bias; ``"exact"`` for the distance form in float32.
        slopes: Of every head: what the bias falls by with each token, after that division.
        model_slopes: As the model has them, before it.
        bias_divisor: What the model divides its bias by after it is formed.
        additions: How often the model adds it.
        scale: Factor of the scores.
    """

    contract: str
    slopes: tuple[float, ...]
    model_slopes: tuple[float, ...]
    bias_divisor: float
    additions: int
    scale: float

    @classmethod
    def of(
        cls,
        family: str,
        contract: str,
        num_heads: int,
        scale: float,
        *,
        model_slopes: Tensor | None = None,
        bias_max: float = 8.0,
        bias_divisor: float = 1.0,
        additions: int = 1,
    ) -> Rules:
        """Return the rules of a family, in its own numbers (``contract="model"``) or the exact form of its bias.

        Args:
            family: ``"bloom"``, ``"falcon"`` or ``"mpt"``.
            contract: One of ``CONTRACTS``.
            num_heads: Of the model.
            scale: Of its scores.
            model_slopes: ``[num_heads]``, as the model computes them where it runs; default, correctly rounded.
            bias_max: That it was trained with; transformers' own MPT knows 8 alone.
            bias_divisor: As the attribute.
            additions: As the attribute; in the exact form once.
        """
        own = contract == "model"
        rates = slopes_of(num_heads, contract=family) if own else slopes_of(num_heads, bias_max=bias_max)
        if own and model_slopes is not None:
            rates = model_slopes.float().cpu().numpy()
        times = (additions if own else 1) / bias_divisor
        return cls(
            contract=family if own else "exact",
            slopes=tuple((rates.astype("float64") * times).tolist()),
            model_slopes=tuple(rates.tolist()),
            bias_divisor=bias_divisor,
            additions=additions,
            scale=scale,
        )

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Any, past: Any, norms: KeyNorms | None) -> Tensor:
        """Return the causal attention of the last queries, ``[batch, num_heads, q_len, head_dim]``.

        Args:
            query: Of that shape.
            key: ``[batch, num_kv_heads, kv_len, head_dim]``; more than there are tokens, perhaps, which nothing sees.
            value: Likewise.
            mask: Encoded, see ``_facts``.
            past: Tokens before the first query, an int or a tensor of one element.
            norms: Bounds of the keys' norms, where they are known.
        """
        kv_len = key.shape[2]
        facts = _facts.decode(mask, kv_len, query.device)
        working = torch.promote_types(query.dtype, torch.float32)
        rates = torch.tensor(self.slopes, dtype=working, device=query.device)
        call = AttentionCall.check(
            query,
            key,
            value,
            rates,
            q_offset=past,
            segment_ids=facts.sequences,
            mask=None if facts.text is None else facts.text[:, None, None, :],
            scale=self.scale,
            xp=xp,
        )
        call = replace(call, key_bias=self.added_to_keys(facts.positions, query.dtype))
        return run(call, query, key, value, None, norms)

    def added_to_keys(self, positions: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Return what the model's rounding adds to the bias of every key, in scores of ``dtype``; None for nothing.

        Args:
            positions: ``[..., kv_len]`` integers, of keys in their sequence, those of all keys so far.
            dtype: Of the model.

        Returns:
            ``[..., num_heads, kv_len]``, float32, or float64 for float64.
        """
        rule = named(self.contract)
        if not rule.is_key_only:
            return None
        if rule.counts_from == "last key":  # far from early queries' own keys, so that these are rounded too
            positions = positions - positions[..., -1:]
        device, working = positions.device, torch.promote_types(dtype, torch.float32)
        rates = torch.tensor(self.model_slopes, dtype=torch.float32, device=device)
        rounded = rule.row(xp, rates, positions)[..., 0, :].to(working if rule.is_always_float32 else dtype)
        bias = rounded / self.bias_divisor
        if self.additions > 1:  # the others are formed before the scores are rounded to the dtype
            bias = bias + (self.additions - 1) * rounded.to(working) / self.bias_divisor
        slopes = torch.tensor(self.slopes, dtype=torch.float64, device=device)[:, None]
        return (bias.double() - slopes * positions[..., None, :]).to(working)
