"""``nn.MultiheadAttention`` with ALiBi."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from alibi_core.backend.checks import explains_keywords, one_of
from alibi_core.backend.models import LayerShape
from alibi_torch._attention import IMPLEMENTATIONS, attention
from alibi_torch._internals import is_unreadable
from alibi_torch.nn._slopes import KeepsSlopes


class AlibiMultiheadAttention(KeepsSlopes, nn.MultiheadAttention):
    """``nn.MultiheadAttention`` with ALiBi: the same arguments, masks, parameters and state dict, plus slopes.

    It replaces ``self_attn`` in PyTorch's transformer layers, and disables their fused inference path, which has no
    bias. With ``need_weights=False`` (as those layers call it) and no mask, a boolean mask or a mask of 0 and -inf, it
    runs :func:`alibi_torch.attention` without a bias in memory. Weights as output, other additive masks and dropout of
    weights need the implementation ``"dense"``. So do masks of 0 and -inf whose values cannot be read, as under
    ``torch.compile``.

    A query that sees no key gives zeros. By default queries see keys on both sides; a causal ``attn_mask``, or
    ``is_causal=True`` in a call or here, makes attention causal.

    Args:
        embed_dim, num_heads, dropout, bias, kdim, vdim, batch_first, device, dtype: As in ``nn.MultiheadAttention``.
        add_bias_kv: Must be False: the added key is no token and has no position.
        add_zero_attn: Must be False, for the same reason.
        is_causal: Mask keys after the query in every call, whatever the masks are.
        slopes, future_slopes, learnable_slopes, window_size, implementation, distance, law: As in
            :class:`AlibiAttention`.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If sizes do not divide or a value is out of range.

    Example:
        >>> layer = nn.TransformerEncoderLayer(64, 8, batch_first=True)
        >>> layer.self_attn = AlibiMultiheadAttention(64, 8, dropout=0.1, batch_first=True)
        >>> layer(torch.randn(3, 10, 64)).shape
        torch.Size([3, 10, 64])
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        is_causal: bool = False,
        slopes: Any | None = None,
        future_slopes: Any | None = None,
        learnable_slopes: bool = False,
        window_size: int | None = None,
        implementation: str | None = None,
        distance: str = "manhattan",
        law: str = "linear",
    ) -> None:
        shape = LayerShape.check(
            embed_dim,
            num_heads,
            is_causal=is_causal,
            slopes=slopes,
            future_slopes=future_slopes,
            learnable_slopes=learnable_slopes,
            window_size=window_size,
            dropout=dropout,
            bias=bias,
            distance=distance,
            law=law,
        )
        for name, given in (("add_bias_kv", add_bias_kv), ("add_zero_attn", add_zero_attn)):
            if given:
                raise ValueError(
                    f"{name} must be False with ALiBi: a key that is no token has no position, got {given}"
                )
        if implementation is not None:
            one_of("implementation", implementation, IMPLEMENTATIONS)
        options: dict[str, Any] = {"kdim": kdim, "vdim": vdim, "batch_first": batch_first}
        super().__init__(embed_dim, num_heads, dropout, bias, **options, device=device, dtype=dtype)
        self.is_causal, self.window_size, self.implementation = is_causal, window_size, implementation
        self.distance, self.law = distance, law
        self.shape = shape
        self._register_slopes(device, learnable=learnable_slopes)
        self.register_forward_pre_hook(_no_fused_path)

    def _reset_parameters(self) -> None:
        self._qkv_same_embed_dim = self.in_proj_weight is not None
        super()._reset_parameters()
        # If this attribute is True and no hook is registered, PyTorch's transformer layers skip forward() and run their
        # fused path, which has no bias. The attribute is private, so the hook is a second lock.
        self._qkv_same_embed_dim = False

    @explains_keywords
    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        q_offset: int | Tensor | None = None,
        segment_ids: Tensor | tuple[Tensor, Tensor] | None = None,
        positions: Tensor | tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from ``query`` to ``key``.

        Arguments that are not listed are those of ``nn.MultiheadAttention``. In boolean masks, True means NOT to
        attend.

        - ``is_causal``: Apply the causal mask. ``attn_mask`` may then be None; if ``q_len`` equals ``kv_len``, it is
          ignored.
        - ``q_offset``, ``segment_ids``, ``positions``: As in :func:`alibi_torch.attention`.

        Returns:
            The output, with the shape of ``query``, and the weights: ``[batch, q_len, kv_len]`` if averaged, else
            ``[batch, num_heads, q_len, kv_len]``; None without ``need_weights``.

        Raises:
            TypeError: If an argument is of the wrong kind.
            ValueError: If a value or shape is wrong.
        """
        options: Any = need_weights, attn_mask, average_attn_weights, is_causal
        places: dict[str, Any] = {"q_offset": q_offset, "segment_ids": segment_ids, "positions": positions}
        is_self = query is key is value
        if query.is_nested and is_self and key_padding_mask is None:
            return self._nested(query, *options, **places)
        self._check_inputs(query=query, key=key, value=value)
        if query.ndim == 2:
            batch_axis = 0 if self.batch_first else 1
            tensors = (x.unsqueeze(batch_axis) for x in (query, key, value))
            padding = None if key_padding_mask is None else key_padding_mask[None]
            output, weights = self(*tensors, padding, *options, **places)
            return output.squeeze(batch_axis), None if weights is None else weights.squeeze(0)
        heads_first = (0, 2, 1, 3) if self.batch_first else (1, 2, 0, 3)
        q, k, v = (
            x.unflatten(-1, (self.num_heads, self.head_dim)).permute(heads_first)  # [batch, heads, length, head_dim]
            for x in self._projected(query, key, value, is_self)
        )
        # A square causal attn_mask repeats is_causal, so it need not be read.
        causal = self.is_causal or is_causal
        if is_causal and q.shape[2] == k.shape[2]:
            attn_mask = None
        mask, added_bias = self._masks(key_padding_mask, attn_mask, (*q.shape[:3], k.shape[2]))
        result = attention(
            q,
            k,
            v,
            self._current_slopes,
            is_causal=causal,
            future_slopes=None if causal else self.future_slopes,
            window_size=self.window_size,
            distance=self.distance,
            law=self.law,
            mask=mask,
            added_bias=added_bias,
            dropout=self.dropout if self.training else 0.0,
            return_weights=need_weights,
            implementation=self.implementation,
            **places,
        )
        attended, weights = result if need_weights else (result, None)
        output = self.out_proj(attended.permute((0, 2, 1, 3) if self.batch_first else (2, 0, 1, 3)).flatten(2))
        return output, weights.mean(dim=1) if weights is not None and average_attn_weights else weights

    def _nested(self, sequences: Tensor, *options: Any, **places: Any) -> tuple[Tensor, Tensor | None]:
        """Attend within each sequence of a nested tensor; nn.TransformerEncoder makes these from padded tensors."""
        padded = sequences.to_padded_tensor(0.0)  # [batch, longest, embed_dim], whatever batch_first is
        lengths = [len(x) for x in sequences.unbind()]
        ends = torch.tensor(lengths, device=padded.device)
        padding = torch.arange(padded.shape[1], device=padded.device) >= ends[:, None]
        padded = padded if self.batch_first else padded.transpose(0, 1)
        output, weights = self(padded, padded, padded, padding, *options, **places)
        output = output if self.batch_first else output.transpose(0, 1)
        parts = [x[:length] for x, length in zip(output, lengths, strict=True)]
        return torch.nested.as_nested_tensor(parts, layout=sequences.layout), weights

    def _check_inputs(self, **tensors: Tensor) -> None:
        query = tensors["query"]
        for (name, x), features in zip(tensors.items(), (self.embed_dim, self.kdim, self.vdim), strict=True):
            if x.is_nested:
                raise TypeError(
                    f"{name} must not be nested but in self-attention without a key_padding_mask, got a nested tensor; "
                    "pad it by to_padded_tensor"
                )
            if x.ndim not in (2, 3) or x.ndim != query.ndim or x.shape[-1] != features:
                axes = "length, batch" if not self.batch_first else "batch, length"
                raise ValueError(
                    f"{name} must have shape ({axes}, {features}), or (length, {features}) as query and all others, "
                    f"got {tuple(x.shape)}"
                )

    def _projected(self, query: Tensor, key: Tensor, value: Tensor, is_self: bool) -> tuple[Tensor, ...]:
        """Return the projections of all three, ``[..., embed_dim]`` each."""
        if self.in_proj_weight is not None and is_self:
            return F.linear(query, self.in_proj_weight, self.in_proj_bias).chunk(3, dim=-1)
        weights: Any = self.q_proj_weight, self.k_proj_weight, self.v_proj_weight
        if self.in_proj_weight is not None:
            weights = self.in_proj_weight.chunk(3)
        biases: Any = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        return tuple(F.linear(*x) for x in zip((query, key, value), weights, biases, strict=True))

    def _masks(
        self, key_padding_mask: Tensor | None, attn_mask: Tensor | None, sizes: tuple[int, int, int, int]
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return a boolean mask, True for visible keys, and a bias; both broadcast to the scores' shape ``sizes``."""
        batch, num_heads, q_len, kv_len = sizes
        by_key = [((batch, kv_len), (batch, 1, 1, kv_len))]
        by_score = [((q_len, kv_len), (1, 1, q_len, kv_len)), ((batch * num_heads, q_len, kv_len), sizes)]
        mask = added_bias = None
        for name, given, shapes in (("key_padding_mask", key_padding_mask, by_key), ("attn_mask", attn_mask, by_score)):
            if given is None:
                continue
            if given.dtype != torch.bool and not given.is_floating_point():
                raise TypeError(f"{name} must be boolean (True where NOT to attend) or floating, got {given.dtype}")
            shape = tuple(given.shape)  # torch.export has symbols: compare equal ranks only
            fitting = [view for accepted, view in shapes if len(accepted) == given.ndim and accepted == shape]
            if not fitting:
                raise ValueError(f"{name} must have shape {' or '.join(str(x) for x, _ in shapes)}, got {shape}")
            given = given.reshape(fitting[0])
            if given.dtype == torch.bool or _is_mask(given):
                visible = ~given if given.dtype == torch.bool else given == 0
                mask = visible if mask is None else mask & visible
            else:
                added_bias = given if added_bias is None else added_bias + given
        return mask, added_bias


def _no_fused_path(module: nn.Module, args: Any) -> None:
    """Do nothing: as a forward hook, this keeps PyTorch's transformer layers off their fused path."""


def _is_mask(added: Tensor) -> bool:
    """Whether an additive mask holds only 0 and -inf, so that booleans can replace it; False if it cannot be read."""
    if added.requires_grad or is_unreadable(added):
        return False
    return bool(((added == 0) | (added == -math.inf)).all())
