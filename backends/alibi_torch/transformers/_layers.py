"""The attention layers of accelerated models.

Projections and residuals are the model's. So is the bias: the library computes ``-slopes * distance`` and adds the
difference to the numbers of the model's own builder as a bias per key.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from alibi_torch.transformers._attend import Rules, attend
from alibi_torch.transformers._cache import append
from alibi_torch.transformers._names import by_name, cache_of, positional_names
from alibi_torch.transformers._state import State
from alibi_torch.transformers._tokens import carried, is_carrier


class AcceleratedAttention(nn.Module):
    """An attention layer of an accelerated model.

    Each family implements ``build``, the model's bias of each key, ``[batch or 1, num_heads, kv_len]``; ``_project``,
    from hidden states to queries, keys and values, ``[batch, heads, q_len, head_dim]``; and ``_output``, from the
    attention, ``[batch, q_len, features]``, and the call's arguments to the layer's result.
    """

    alibi_own: type[nn.Module]  # the original class of transformers
    alibi_slopes: tuple[float, ...]  # of each head of the bias, per token, before scaling and repeated addition
    alibi_state: State  # shared with the base model

    def _rules(self) -> Rules:
        build = None if self.alibi_state.contract == "exact" else self.build
        return Rules(self.alibi_slopes, self.inv_norm_factor, build)

    def dropped(self) -> float:
        """Return the current dropout probability of attention weights."""
        dropout = self.attention_dropout
        return float(dropout.p) if dropout.training else 0.0


def layer_forward(own: type[nn.Module]) -> Callable[..., Any]:
    """Return the ``forward`` of an accelerated layer."""
    names = positional_names(own.forward)

    @functools.wraps(own.forward)
    def forward(self: AcceleratedAttention, *args: Any, **kwargs: Any) -> Any:
        given = by_name(names, args, kwargs)
        mask, cache = given.get("attention_mask"), cache_of(given)
        if not is_carrier(mask):
            return own.forward(self, *args, **kwargs)
        query, key, value = self._project(given["hidden_states"])
        if cache is not None:
            key, value = append(cache, self.layer_idx, key, value)
        attended = attend(self._rules(), query, key, value, carried(mask, self.alibi_state.tokens))
        return self._output(attended.transpose(1, 2).flatten(2), given), None  # no weights

    return forward
