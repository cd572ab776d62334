"""How the attention of a family of models forms its scores, and that attention by this library."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import array_api_compat.torch as xp
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from alibi_core import AttentionCall
from alibi_core import slopes as slopes_of
from alibi_core.backend import named
from alibi_torch._attention import run
from alibi_torch._cpu import KeyNorms, tiling
from alibi_torch._derivatives import pulled_back
from alibi_torch._dispatch import needs_gradients
from alibi_torch.transformers import _facts

CONTRACTS = ("model", "exact")
# Up to here a bias that all layers share, and a kernel that reads all keys, take less time than a plan for each layer.
SHORT_PROMPT = 256  # keys of any number of queries
PROMPT = 512  # likewise, where a bias is small and no scores are kept for gradients
FEW = 64  # queries of more keys, as in decoding
NUMBERS = 2**13  # in the keys of one batch entry, for each key of a short call
SCORES = 2**12  # of one batch entry, and a quarter of those of a batch, likewise
KEPT = 2**18  # numbers in a row of bias, at most, that is kept for later steps


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

        Slopes are correctly rounded where the model's are not given, as it computes them where it runs. The exact form
        takes MPT's ``bias_max``, of which transformers knows 8 alone, and adds the bias once.
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

    def counted(self, mask: Tensor) -> Tensor:
        """Return a padding mask in the numbers that the model's positions are sums of; booleans where it has none."""
        return mask if named(self.contract).counts_from == "first key" else mask != 0

    def rounds(self, dtype: torch.dtype) -> bool:
        """Whether positions that are summed up in the dtype of a mask give another bias than integers do."""
        rule = named(self.contract)
        if rule.counts_from != "first key" or not dtype.is_floating_point:
            return False
        return rule.multiplies_in_bfloat16 or torch.finfo(dtype).bits < 32

    def hides_with_infinity(self, device: str, dtype: torch.dtype) -> bool:
        """Whether autocast rounds the least number of ``dtype``, which Falcon hides keys with, to minus infinity."""
        if self.contract != "falcon" or self.additions > 1 or device == "meta" or not torch.is_autocast_enabled(device):
            return False
        return torch.finfo(dtype).min < torch.finfo(torch.get_autocast_dtype(device)).min

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Any, past: Any, norms: KeyNorms | None) -> Tensor:
        """Return the causal attention of the last queries, ``[batch, num_heads, q_len, head_dim]``.

        Args:
            query: Of that shape.
            key: ``[batch, num_kv_heads, kv_len, head_dim]``, those of all tokens, or all places of a static cache.
            value: Likewise.
            mask: Encoded, see ``_facts``.
            past: Tokens before the first query, an int or a tensor of one element.
            norms: Bounds of the keys' norms, where they are known.
        """
        if key.dtype != query.dtype and torch.is_autocast_enabled(query.device.type):  # which casts what a cache holds
            key, value, norms = key.to(query.dtype), value.to(query.dtype), None
        places = key, value
        if not torch.compiler.is_compiling() and key.shape[2] > past + query.shape[2]:
            key, value = (x[:, :, : past + query.shape[2]] for x in places)
        is_exact = query.dtype.itemsize >= 4  # scores of lower precision overflow where the kernel's do not
        is_lean = is_short(query, key, key.shape[2]) and (is_exact or not needs_gradients(query, key, value))
        if is_lean and query.shape[2] == 1 and _facts.says_nothing(mask):
            sizes = self, key.shape[2], query.dtype
            row: Tensor = shared(mask, sizes, lambda: self._row(key.shape[2], key.shape[1], query.dtype))
            return _with_bias(query, key, value, row, self.scale)
        sizes = self, query.shape, key.shape, query.dtype, query.device
        plan: _Plan = shared(mask, (*sizes, past), lambda: self._plan(query, key, value, mask, past))
        loses_scores = self.counts_text and needs_gradients(query, key, value)
        if is_lean and loses_scores and plan.blind is not None and key.shape == places[0].shape:
            return _with_bias(query, key, value, plan.bias_that_loses_scores, self.scale)
        result = plan.attend(query, key, value) if is_lean else run(plan.call, query, key, value, None, norms)
        if plan.blind is None:
            return result
        unseeing = self._of_blind(query, *places, query.shape[1] // key.shape[1], is_lean=is_lean)
        return torch.where(plan.blind[:, None, :, None], unseeing, result)

    def _row(self, kv_len: int, num_kv_heads: int, dtype: torch.dtype) -> Tensor:
        """Return the bias of the last query alone, ``[1, num_kv_heads, heads a group, kv_len]``."""
        length = 1 << (kv_len - 1).bit_length()
        is_kept = len(self.slopes) * length <= KEPT
        by_distance, by_column = _kept_rows(self, dtype, length) if is_kept else _rows(self, dtype, kv_len)
        row = by_distance[:, by_distance.shape[1] - kv_len :]
        if by_column is not None:
            row = row + by_column[:, :kv_len]
        return row.reshape(1, num_kv_heads, -1, kv_len)

    def _plan(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, past: Any) -> _Plan:
        facts = _facts.decode(mask, query.shape[2], key.shape[2], past, query.device)
        working = torch.promote_types(query.dtype, torch.float32)
        call = AttentionCall.check(
            query,
            key,
            value,
            torch.tensor(self.slopes, dtype=working, device=query.device),
            q_offset=past,
            segment_ids=facts.sequences,
            mask=None if facts.text is None else facts.text[:, None, None, :],
            scale=self.scale,
            xp=xp,
        )
        added = self.added_to_keys(facts.columns, query.dtype, facts.positions)
        return _Plan(replace(call, added_key_bias=added), facts.blind)

    def _of_blind(self, query: Tensor, key: Tensor, value: Tensor, group: int, *, is_lean: bool) -> Tensor:
        """Return what queries get that see nothing: the mean of all values, ``[..., num_heads, q_len or 1, head_dim]``.

        A static cache's values are those of its empty places, too.

        BLOOM and Falcon hide a key by adding a huge negative number to its score. The score is lost, but its derivative
        is not: it is that of a softmax with weights of ``1 / kv_len``.
        """
        is_compiling = torch.compiler.is_compiling()
        # Whether a derivative is asked for is not to be seen there.
        is_derived = not is_compiling and (
            torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0
        )
        if not self.counts_text or not (is_derived or needs_gradients(query, key, value)):
            return _mean(value, group)
        if is_compiling:
            return _mean_of_lost_scores(query, key, value, group, self.scale)
        if is_lean or is_derived:
            return _softmax_of_lost_scores(query, key, value, group, self.scale)
        return _OfLostScores.apply(query, key, value, group, self.scale)

    def added_to_keys(self, columns: Tensor, dtype: torch.dtype, positions: Tensor | None = None) -> Tensor | None:
        """Return what the model's bias has beside ``slopes * columns``, of every key, in scores of ``dtype``.

        Args:
            columns: ``[..., kv_len]`` integers, of keys in their sequence, those of all keys so far.
            dtype: Of the model.
            positions: Likewise: the tokens of text before them, or, for a mask of other numbers than 0 and 1, what the
                model counts by it. Default ``columns``: all are text.

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
        if counts.is_floating_point():  # of a mask of such numbers, whose dtype the model's product has then, too
            product = (rates.bfloat16() if rule.multiplies_in_bfloat16 else rates)[:, None] * counts[..., None, :]
        else:
            product = rule.row(xp, rates, counts)[..., 0, :]
        rounded = product.to(working if rule.is_always_float32 else dtype)
        bias = rounded / self.bias_divisor
        if self.additions > 1:  # the others are formed before the scores are rounded to the dtype
            bias = bias + (self.additions - 1) * rounded.to(working) / self.bias_divisor
        return (bias.double() - slopes * columns[..., None, :]).to(working)


@dataclass(frozen=True)
class _Plan:
    """What the layers of one forward pass share.

    Attributes:
        call: What each of them computes.
        blind: ``[batch, q_len]``, True for queries that get the mean of all values; None where there are none.
    """

    call: AttentionCall
    blind: Tensor | None

    @functools.cached_property
    def bias(self) -> tuple[Tensor, Tensor | None]:
        """The bias of all queries and keys, as :func:`attend` needs it, and where queries see something."""
        call = self.call
        bias, attends = call.bias()
        rows = call.num_heads // call.num_kv_heads * call.q_len
        return bias.reshape(bias.shape[:-3].numel(), call.num_kv_heads, rows, call.kv_len), attends

    @functools.cached_property
    def bias_that_loses_scores(self) -> Tensor:
        """That bias with the least number for queries that see nothing: beside it a score is lost, as in the models."""
        bias, blind = self.bias[0], self.blind
        assert blind is not None  # or nobody asks
        group = bias.shape[2] // blind.shape[1]
        return torch.where(blind.repeat(1, group)[:, None, :, None], torch.finfo(bias.dtype).min, bias)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return attention by one call of PyTorch's kernel."""
        bias, attends = self.bias
        result = _with_bias(query, key, value, bias, self.call.scale)
        return result if attends is None else torch.where(attends, result, 0.0)


def shared(mask: Tensor, sizes: tuple[Any, ...], make: Callable[[], Any]) -> Any:
    """Return what ``make`` makes, once for all layers of a forward pass: they get one mask, which keeps it."""
    if torch.compiler.is_compiling() or any(isinstance(x, Tensor) for x in sizes):  # which nobody can compare
        return make()
    if torch._C._len_torch_dispatch_stack() > 0:  # a checkpoint may count operations, the same when it recomputes
        return make()
    sizes = *sizes, torch.is_inference_mode_enabled()  # whose tensors no gradient may need
    known = getattr(mask, "alibi_shared", None)
    if known is None or known[0] != sizes:
        known = mask.alibi_shared = sizes, make()  # type: ignore[attr-defined]
    return known[1]


def _rows(rules: Rules, dtype: torch.dtype, length: int) -> tuple[Tensor, Tensor | None]:
    """Return the bias of one query by the distance of so many keys, and what is added to that by their column.

    Both are ``[num_heads, length]``, the first for the keys up to the query's own, the second from the first key on.
    """
    working = torch.promote_types(dtype, torch.float32)
    slopes = torch.tensor(rules.slopes, dtype=working, device="cpu")[:, None]
    columns = torch.arange(length, device="cpu")
    by_distance = slopes * (columns - (length - 1))
    added = rules.added_to_keys(columns, dtype)
    if added is None or rules.counts_text:
        return by_distance, added
    return by_distance + added, None  # counted from the last key


# They lie on the CPU, whatever device is the default when they are asked for first.
_kept_rows = functools.lru_cache(maxsize=32)(_rows)


def _with_bias(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float) -> Tensor:
    """Return attention with ``bias [batch or 1, num_kv_heads, rows, kv_len]``, by one call of PyTorch's kernel.

    The queries that share keys become rows of one head, so that no key is copied. Where gradients are needed, plain
    operations take its place: they take less time, and have derivatives of any order.
    """
    rows = query.reshape(query.shape[0], *bias.shape[1:3], query.shape[3])
    is_rounded = torch.is_autocast_enabled("cpu")  # the bias would be
    with torch.autocast("cpu", enabled=False) if is_rounded else nullcontext():
        if needs_gradients(query, key, value) or not torch.backends.cuda.math_sdp_enabled():  # that of the CPU as well
            rows, key, value = (x.to(bias.dtype) for x in (rows, key, value))
            result = torch.add(bias, rows @ key.mT, alpha=scale).softmax(dim=-1) @ value
        elif query.dtype.itemsize < 4 and query.shape[2] <= FEW:
            result = _of_cast_keys(rows, key, value, bias, scale)
        else:
            result = F.scaled_dot_product_attention(rows, key, value, bias, scale=scale)
    return result.to(query.dtype).reshape(query.shape)


def _of_cast_keys(rows: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float) -> Tensor:
    """Return the same for a few rows, whose keys are read faster when they are cast, some heads at a time."""
    parts = []
    count = max(1, 2**18 // (key.shape[0] * key.shape[2] * key.shape[3]))  # small enough for the CPU's cache
    for heads in (slice(first, first + count) for first in range(0, key.shape[1], count)):
        tensors = (x[:, heads].to(bias.dtype) for x in (rows, key, value))
        part = F.scaled_dot_product_attention(*tensors, bias[:, heads], scale=scale)
        parts.append(part.to(rows.dtype))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _mean(value: Tensor, group: int) -> Tensor:
    return value.mean(dim=2, keepdim=True).repeat_interleave(group, dim=1)


def _softmax_of_lost_scores(query: Tensor, key: Tensor, value: Tensor, group: int, scale: float) -> Tensor:
    """Return the mean of all values with derivatives of any order, in memory for all scores."""
    scores = query @ key.repeat_interleave(group, dim=1).mT * scale
    return (scores - scores.detach()).softmax(dim=-1) @ value.repeat_interleave(group, dim=1)


def _mean_of_lost_scores(query: Tensor, key: Tensor, value: Tensor, group: int, scale: float) -> Tensor:
    """Return the same with first derivatives alone, ``scale * q_i @ mean_j(k_j (v_j - mean v))``, without scores."""
    centred = value - value.mean(dim=2, keepdim=True)
    moment = key.mT @ centred.detach() / key.shape[2]  # [batch, num_kv_heads, head_dim, head_dim]
    lost = query @ moment.repeat_interleave(group, dim=1) * scale
    return _mean(value, group) + (lost - lost.detach())


class _OfLostScores(torch.autograd.Function):
    """The mean of all values, whose gradients take scores where autograd records them, to be differentiated."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, group: int, scale: float) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.rules = group, scale
        return _mean(value, group).expand(query.shape).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        function = _softmax_of_lost_scores if torch.is_grad_enabled() else _mean_of_lost_scores
        return *pulled_back(lambda *inputs: function(*inputs, *ctx.rules), ctx.saved_tensors, grad), None, None


def is_short(query: Tensor, key: Tensor, kv_len: int) -> bool:
    """Whether a bias of queries and ``kv_len`` keys, formed once for all layers, costs less than doing without."""
    if torch.compiler.is_compiling() or type(query) is not Tensor:  # where a length may be a symbol, a number be none
        return False
    # The fused kernel can neither be mapped nor differentiated forward.
    if torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0:
        return False
    if query.device.type != "cpu":
        return False
    batch, num_heads, q_len, head_dim = query.shape
    if q_len > FEW:
        if kv_len <= SHORT_PROMPT:
            return True
        if kv_len > PROMPT or needs_gradients(query, key):
            return False
    scores, numbers = num_heads * q_len * kv_len * max(1, batch // 4), key.shape[1] * kv_len * head_dim
    return scores <= SCORES * tiling().short // 2 and numbers <= NUMBERS * tiling().short // 2
