"""ALiBi in models of transformers the plain way: a bias of queries times keys, added to scores in eager attention.

Importing this registers ``DENSE`` as an attention implementation. It reads the same entries of a config as
``attn_implementation="alibi"``, and shares no code with it.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, AutoModel, BloomModel
from transformers.masking_utils import eager_mask

import alibi_core

# Models' argument that is a cache, which transformers 5.24 renamed.
CACHE = "cache" if "cache" in inspect.signature(BloomModel.forward).parameters else "past_key_values"
DENSE = "dense-alibi"
VOCABULARY = 53
FINER = 2 * 2 * 2.0 ** (24 - 53)  # twice the loss of float32, on each side of a comparison in float64
PADDING = {"none": [[1] * 17] * 2, "left": [[0] * 5 + [1] * 12, [1] * 17], "right": [[1] * 12 + [0] * 5, [1] * 17]}
PADDING["holes"] = [[1, 1, 0, 1, 0, 0, 1, 1, 1, 0, 1, 1, 1, 1, 1, 1, 0], [0] * 3 + [1] * 4 + [0] * 5 + [1] * 5]


def made(config: Any, kind: Any = AutoModel) -> Any:
    """Return a model whose scores, and so whose softmax, are far from even."""
    model = kind.from_config(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in (x for name, x in model.named_parameters() if "position" not in name):
            parameter.normal_(0, 0.3, generator=generator)
    return model.eval()


def tokens_of(batch: int, length: int) -> Tensor:
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(length))


def hidden(model: Any, *args: Any, **kwargs: Any) -> Tensor:
    with torch.no_grad():
        return model(*args, **kwargs).last_hidden_state


def error(got: Tensor, wanted: Tensor) -> float:
    return float((got - wanted).detach().abs().max())


def bias_of(config: Any, num_heads: int, q_positions: Tensor, kv_len: int) -> Tensor:
    """Return the bias, ``[num_heads, q_len, kv_len]``."""
    past = getattr(config, "alibi_slopes", None)
    past = alibi_core.slopes(num_heads, xp=torch, dtype=torch.float64) if past is None else torch.tensor(past).double()
    future = getattr(config, "alibi_future_slopes", None)
    future = past if future is None else torch.tensor(future).double()
    distance = q_positions[:, None] - torch.arange(kv_len)  # positive for keys before the query
    return -torch.where(distance < 0, future[:, None, None], past[:, None, None]) * distance.abs()


def dense_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    is_cross = "Cross" in type(module).__name__ or (getattr(module, "is_decoder", False) and not module.is_causal)
    if not is_cross:
        q_len, kv_len = scores.shape[-2:]
        # The position of a query does not matter to a causal one, to which a static cache may show its room.
        first = kv_len - q_len
        scores = scores + bias_of(module.config, query.shape[1], torch.arange(first, kv_len), kv_len).to(scores)
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = scores.softmax(-1)
    return (weights @ value).transpose(1, 2).contiguous(), weights


AttentionInterface.register(DENSE, dense_attention)
AttentionMaskInterface.register(DENSE, eager_mask)
