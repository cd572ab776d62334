"""What adapters of PyTorch code have in common: NumPy arrays in and out, and gradients through autograd."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

Values = np.ndarray[Any, Any]


def to_numpy(tensor: Tensor) -> Values:
    """Return a tensor as an array, what is bfloat16 in float32."""
    tensor = tensor.detach()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy().copy()


def hidden(q_len: int, kv_len: int) -> Tensor:
    """Return which keys lie ahead of a query, ``[q_len, kv_len]``; the last query is at the last key."""
    return torch.ones(q_len, kv_len, dtype=torch.bool).triu(kv_len - q_len + 1)


class TorchAdapter:
    """An implementation in PyTorch that has slopes of its own.

    Subclasses define ``attend``, and name the options that it takes in signatures of their own.
    """

    def __init__(self, dtype: str, contract: str) -> None:
        self.name, self.dtype, self.contract = type(self).__name__, dtype, contract
        self.torch_dtype: torch.dtype = getattr(torch, dtype)

    def tensor(self, array: Values) -> Tensor:
        """Return an array as a tensor of the adapter's dtype, with memory of its own."""
        return torch.tensor(array).to(self.torch_dtype)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        """Return the attention, ``[batch, num_heads, q_len, head_dim]``."""
        raise NotImplementedError

    def forward(self, query: Values, key: Values, value: Values, **options: Any) -> Values:
        """Return the attention of arrays."""
        with torch.no_grad():
            return to_numpy(self.attend(*map(self.tensor, (query, key, value)), **options))

    def backward(self, query: Values, key: Values, value: Values, grad_output: Values, **options: Any) -> Any:
        """Return the gradients of query, key and value."""
        leaves = [self.tensor(x).requires_grad_() for x in (query, key, value)]
        result = self.attend(*leaves, **options)
        return tuple(map(to_numpy, torch.autograd.grad(result, leaves, self.tensor(grad_output))))

    def attention(self, query: Values, key: Values, value: Values) -> Values:
        return self.forward(query, key, value)

    def attention_grad(self, query: Values, key: Values, value: Values, grad_output: Values) -> Any:
        return self.backward(query, key, value, grad_output)
