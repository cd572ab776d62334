"""A layer of a cache whose heads keep what their horizons reach alone."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from alibi_torch.caches import EvictingKVCache
from alibi_torch.transformers import _facts
from alibi_torch.transformers._cache_layers.layers import AttendingLayer, is_frozen
from alibi_torch.transformers._rules import Rules

NO_LIMIT = 2**31 - 1  # tokens a head


class EvictingLayer(AttendingLayer):
    """The keys and values that queries to come may need.

    Args:
        rules: Of the attention module.
        max_query_norm: What no query of it can exceed.
    """

    is_compileable = False
    is_sliding = False
    is_croppable = True

    def __init__(self, rules: Rules, max_query_norm: float) -> None:
        super().__init__()
        self.rules, self.max_query_norm = rules, max_query_norm
        self.store: EvictingKVCache | None = None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Any, rules: Rules) -> Tensor:
        """Append keys and values, and return the attention of their tokens over all."""
        if not _facts.says_nothing(mask):
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
        for group in self.store.groups:
            if is_frozen(group.key):
                group.key, group.value = group.key.clone(), group.value.clone()
        self.store.append(key, value)
        return self.store.attend(query)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Refuse: the keys of all tokens are not held."""
        raise NotImplementedError("a cache that evicts serves accelerated models alone; make it with evict=False")

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        """Make room for the first tokens."""
        self.store = self._empty(key_states)
        self.is_initialized = True

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many tokens there will be with further ones, and the position of the first."""
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        """Return how many tokens there are."""
        return 0 if self.store is None else self.store.length

    def get_max_length(self) -> int:
        """Return -1: there is room for any number."""
        return -1

    get_max_cache_shape = get_max_length  # as transformers before 5.14 calls it

    def reset(self) -> None:
        """Forget all tokens."""
        self.store, self.is_initialized = None, False

    def crop(self, max_length: int) -> None:
        """Forget the last ``-max_length`` tokens, or all but the first ``max_length``."""
        if self.store is not None:
            self.store.truncate(
                max(self.store.length + max_length, 0) if max_length < 0 else max_length or self.store.length
            )

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these entries of the batch."""
        if self.store is not None:
            self.store.select_batch(indices)

    reorder_cache = batch_select_indices

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each entry of the batch."""
        if self.store is not None:
            batch = torch.arange(self.store.key.shape[0], device=self.store.key.device)
            self.store.select_batch(batch.repeat_interleave(repeats))

    def _empty(self, key: Tensor) -> EvictingKVCache:
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
