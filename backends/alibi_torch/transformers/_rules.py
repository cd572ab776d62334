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
from alibi_torch._dispatch import needs_gradients
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
        counts_text: Whether distance is counted in tokens of text, and padding between them is none; else in columns.
    """

    contract: str
    slopes: tuple[float, ...]
    model_slopes: tuple[float, ...]
    bias_divisor: float
    additions: int
    scale: float
    counts_text: bool

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
            counts_text=named(family).counts_from == "first key",
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
        facts = _facts.decode(mask, query.shape[2], key.shape[2], past, query.device)
        working = torch.promote_types(query.dtype, torch.float32)
        rates, added = facts.once(
            (self, query.dtype),
            lambda: (
                torch.tensor(self.slopes, dtype=working, device=query.device),
                self.added_to_keys(facts.columns, query.dtype, facts.positions),
            ),
        )
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
        result = run(replace(call, key_bias=added), query, key, value, None, norms)
        if facts.blind is None:
            return result
        unseeing = self._of_blind(query, key, value, call.num_heads // call.num_kv_heads)
        return torch.where(facts.blind[:, None, :, None], unseeing, result)

    def _of_blind(self, query: Tensor, key: Tensor, value: Tensor, group: int) -> Tensor:
        """Return what queries get that see nothing: the mean of all values, ``[..., num_heads, q_len or 1, head_dim]``.

        BLOOM and Falcon hide a key by adding a huge negative number to its score. The score is lost, but its derivative
        is not: it is that of a softmax with weights of ``1 / kv_len``, ``scale * q_i @ mean_j(k_j (v_j - mean v))``.
        """
        mean = value.mean(dim=2, keepdim=True)
        if self.counts_text and needs_gradients(query, key, value):
            moment = key.mT @ (value - mean).detach() / key.shape[2]  # [batch, num_kv_heads, head_dim, head_dim]
            lost = query @ moment.repeat_interleave(group, dim=1) * self.scale
            return mean.repeat_interleave(group, dim=1) + (lost - lost.detach())
        return mean.repeat_interleave(group, dim=1)

    def added_to_keys(self, columns: Tensor, dtype: torch.dtype, positions: Tensor | None = None) -> Tensor | None:
        """Return what the model's bias has beside ``slopes * columns``, of every key, in scores of ``dtype``.

        Args:
            columns: ``[..., kv_len]`` integers, of keys in their sequence, those of all keys so far.
            dtype: Of the model.
            positions: Likewise: the tokens of text before them. Default ``columns``: all are text.

        Returns:
            ``[..., num_heads, kv_len]``, float32, or float64 for float64; None for nothing.
        """
        rule = named(self.contract)
        counts = columns if positions is None or not self.counts_text else positions
        if not rule.is_key_only and counts is columns:
            return None
        device, working = columns.device, torch.promote_types(dtype, torch.float32)
        slopes = torch.tensor(self.slopes, dtype=torch.float64, device=device)[:, None]
        if not rule.is_key_only:
            return (slopes * (counts - columns)[..., None, :]).to(working)
        if rule.counts_from == "last key":  # far from early queries' own keys, so that these are rounded too
            columns = counts = columns - columns[..., -1:]
        rates = torch.tensor(self.model_slopes, dtype=torch.float32, device=device)
        rounded = rule.row(xp, rates, counts)[..., 0, :].to(working if rule.is_always_float32 else dtype)
        bias = rounded / self.bias_divisor
        if self.additions > 1:  # the others are formed before the scores are rounded to the dtype
            bias = bias + (self.additions - 1) * rounded.to(working) / self.bias_divisor
        return (bias.double() - slopes * columns[..., None, :]).to(working)
