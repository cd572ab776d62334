"""Two more in PyTorch: curated-transformers, and labml-nn's annotated implementation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.ecosystem._torch import TorchAdapter, Values, hidden, to_numpy


class Curated(TorchAdapter):
    """``AttentionLinearBiases`` in ``ScaledDotProductAttention``: a row for all queries if causal, distances if not."""

    features = frozenset({"symmetric"})

    def slopes(self, num_heads: int) -> Values:
        return to_numpy(self.biases(num_heads, is_causal=True).slopes[0, :, 0, 0])

    def key_bias(self, num_heads: int, kv_len: int) -> Values:
        """Return the row that it adds if causal, ``[num_heads, kv_len]``."""
        row = self.biases(num_heads, is_causal=True).calculate_biases(kv_len)[0, :, 0]
        return to_numpy(row.to(self.torch_dtype))

    def attention(self, query: Values, key: Values, value: Values, is_causal: bool) -> Values:
        return self.forward(query, key, value, is_causal=is_causal)

    def attention_grad(self, query: Values, key: Values, value: Values, grad_output: Values, is_causal: bool) -> Any:
        return self.backward(query, key, value, grad_output, is_causal=is_causal)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        from curated_transformers.layers.attention import AttentionMask, ScaledDotProductAttention

        is_causal, kv_len = options["is_causal"], key.shape[2]
        biases = self.biases(query.shape[1], is_causal=is_causal)
        everything = AttentionMask(torch.ones(query.shape[0], kv_len, dtype=torch.bool))
        module = ScaledDotProductAttention(dropout_prob=0.0, linear_biases=biases).eval()
        return module(query=query, key=key, value=value, attention_mask=everything, use_causal_mask=is_causal)

    def biases(self, num_heads: int, *, is_causal: bool) -> nn.Module:
        """Return its module, in the adapter's dtype, as in a model of that dtype."""
        from curated_transformers.layers.attention import AttentionLinearBiases

        module = AttentionLinearBiases(n_attention_heads=num_heads, is_causal=is_causal, is_inverted=False)
        return module.to(self.torch_dtype)


class Labml(TorchAdapter):
    """``AlibiMultiHeadAttention``, causal; its layout is ``[length, batch, features]``."""

    features: frozenset[str] = frozenset()

    def slopes(self, num_heads: int) -> Values:
        from labml_nn.transformers.alibi import get_slopes

        return to_numpy(get_slopes(num_heads))

    def key_bias(self, num_heads: int, kv_len: int) -> Values:
        """Return the row of the last query, ``[num_heads, kv_len]``."""
        from labml_nn.transformers.alibi import get_alibi_biases

        return to_numpy(get_alibi_biases(num_heads, torch.ones(1, kv_len, dtype=torch.bool))[0].T)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        from labml_nn.transformers.alibi import AlibiMultiHeadAttention

        num_heads, length, head_dim = query.shape[1:]
        if key.shape[2] != length:
            raise NotImplementedError("as many queries as keys")
        module = AlibiMultiHeadAttention(num_heads, num_heads * head_dim, dropout_prob=0.0).eval()
        for projection in (module.query, module.key, module.value):
            projection.linear = nn.Identity()
        module.output = nn.Identity()
        features = [x.permute(2, 0, 1, 3).flatten(2) for x in (query, key, value)]
        visible = ~hidden(length, length)[:, :, None]
        result = module(query=features[0], key=features[1], value=features[2], mask=visible)
        return result.unflatten(2, (num_heads, head_dim)).permute(1, 2, 0, 3)
