"""A layer of a cache whose heads keep what their horizons reach alone."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from alibi_torch.caches import EvictingKVCache
from alibi_torch.transformers import _facts
from alibi_torch.transformers._cache_layers import AlibiLayer, is_frozen
from alibi_torch.transformers._rules import Rules

NO_LIMIT = 2**31 - 1  # tokens a head


class EvictingLayer(AlibiLayer):
    """The keys and values that queries to come may need.

    Args:
        rules: Of the attention module.
        max_query_norm: What no query of it can exceed.
    """

    def __init__(self, rules: Rules, max_query_norm: float) -> None:
        super().__init__()
        self.rules, self.max_query_norm = rules, max_query_norm
        self.store: EvictingKVCache | None = None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Any, rules: Rules) -> Tensor:
        """Append keys and values, and return the attention of their tokens over all."""
        if not _facts.decode(mask, query.shape[2], key.shape[2], 0, key.device).has_one_sequence:
            raise ValueError(
                "attention_mask and position_ids must tell of one sequence a row, without padding, with a cache that "
                "evicts; make it with evict=False"
            )
        if rules != self.rules:
            raise ValueError(
                "past_key_values must be a cache of the model as it is accelerated, got one that evicts by other "
                "rules; make it with AlibiCache(model, evict=True)"
            )
        if self.store is None:
            self.lazy_initialization(key)
        assert self.store is not None  # made just now
        for group in self.store._groups:
            if is_frozen(group.key):
                group.key, group.value = group.key.clone(), group.value.clone()
        self.store.append(key, value)
        return self.store.attend(query)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Refuse: the keys of all tokens are not held."""
        raise NotImplementedError("a cache that evicts serves accelerated models alone; make it with evict=False")

    def _empty(self, key: Tensor, length: int) -> EvictingKVCache:
        batch_size, num_kv_heads, _, head_dim = key.shape
        dtype = key.dtype
        working = torch.promote_types(dtype, torch.float32)
        adds_nothing = self.rules.added_to_keys(torch.zeros(1, dtype=torch.int64), dtype) is None
        return EvictingKVCache(
            batch_size,
            num_kv_heads,
            NO_LIMIT,
            head_dim,
            slopes=torch.tensor(self.rules.slopes, dtype=working, device=key.device),
            max_query_norm=self.max_query_norm,
            scale=self.rules.scale,
            key_bias=None if adds_nothing else functools.partial(self.rules.added_to_keys, dtype=dtype),
            device=key.device,
            dtype=dtype,
        )
