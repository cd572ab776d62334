"""The cache that knows ALiBi, for whole models."""

from __future__ import annotations

from typing import Any

from transformers.cache_utils import Cache

from alibi_torch.transformers._cache_layers import EvictingLayer, GrowingLayer
from alibi_torch.transformers._modules import attention_modules
from alibi_torch.transformers._norms import most_of_queries


class AlibiCache(Cache):
    """A cache for an accelerated model that appends in place and keeps what the horizon needs to know of keys.

    Unlike a ``DynamicCache`` it does not copy all keys at each token, and unlike a ``StaticCache`` it need not know how
    many there will be. The model takes it as ``past_key_values``, and so does its ``generate``.

    Args:
        model: The accelerated model.
        evict: Let heads drop the keys that their horizons prove to be of no weight to any query to come, whatever the
            tokens are. Batches must be without padding. How long queries can be follows from the model's weights.

    Raises:
        ValueError: If the model is not accelerated.

    Example:
        >>> import torch
        >>> from transformers import BloomConfig, BloomForCausalLM
        >>> from alibi_torch.transformers import accelerate
        >>> model = BloomForCausalLM(BloomConfig(vocab_size=50, hidden_size=32, n_layer=1, n_head=4)).eval()
        >>> cache = AlibiCache(accelerate(model))
        >>> tokens = model.generate(torch.tensor([[7, 8, 9]]), past_key_values=cache, max_new_tokens=2)
        >>> cache.get_seq_length()
        4
    """

    def __init__(self, model: Any, *, evict: bool = False) -> None:
        modules = attention_modules(model)
        if [m.layer_idx for m in modules] != list(range(len(modules))):
            raise ValueError(
                f"model must hold the layers of one accelerated model, in order, got {len(modules)} that are numbered "
                f"{[m.layer_idx for m in modules]}; make a cache for each model in it"
            )
        if evict:
            super().__init__(layers=[EvictingLayer(m.alibi_rules, most_of_queries(model, m)) for m in modules])
        else:
            super().__init__(layers=[GrowingLayer() for _ in modules])
