"""Attention on the CPU in tiles inside the horizon, as operators that autograd and torch.compile know."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import array_api_compat.torch as xp
import torch
from torch import Tensor

from alibi_core import AttentionCall
from alibi_core.backend import (
    ARRAY_AXES,
    CallRules,
    Job,
    KeyNorms,
    dense_attention,
    entry_of,
    tolerance_of,
    working_dtype,
)
from alibi_torch._dispatch import is_watched, needs_gradients, no_autocast
from alibi_torch._tiled import kernels as _tile_kernels
from alibi_torch._tiled import second, short, step
from alibi_torch._tiled import vmap as _tiled_vmap
from alibi_torch._tiled.blocks import lowest_bias
from alibi_torch._tiled.plan import kernel_jobs, parts_of, pieces_of, sees_nothing, sequences, texts
from alibi_torch._tiled.short import is_short


def tiled_attention(
    call: AttentionCall,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    norms: KeyNorms | None = None,
    *,
    is_plain: bool = False,
) -> Tensor:
    """Compute ``call``, on tensors ``[*batch, heads, length, head_dim]`` of the CPU, without its bias or its scores.

    ``is_plain`` says that nothing is to see operators, where that is known.

    Keys that are proved, from the norms of queries and keys, to weigh less than the tolerance together are left out.
    All keys are read once to measure them, where ``norms`` does not bound theirs.
    """
    flat = call.with_one_batch_axis()
    tensors = [query, key, value]
    if flat is not call:
        tensors = [x.reshape(*flat.batch, *x.shape[len(call.batch) :]) for x in tensors]
        return tiled_attention(flat, *tensors, norms, is_plain=is_plain).reshape(query.shape)
    is_plain = is_plain or not is_watched(*tensors)
    differentiates = needs_gradients(*tensors, call.slopes, call.future_slopes)
    if is_plain and not differentiates and step.is_step(call) and not (norms is None and step.is_measured(call)):
        if call.q_offset + 1 < call.kv_len:
            tensors[1:] = (x[:, :, : call.q_offset + 1] for x in tensors[1:])
        return step.attend(call, *tensors, norms)
    packed = sequences(call) if is_plain and norms is None else None
    if packed is not None:
        entries = [[tiled_attention(*part) for part in entry] for entry in parts_of(call, packed, *tensors)]
        return torch.cat([torch.cat(entry, dim=2) for entry in entries])
    padded = texts(call) if is_plain and norms is None else None
    if padded is not None:
        by_text = [[_of_piece(*piece) for piece in pieces_of(call, *text, *tensors)] for text in padded]
        return torch.cat([torch.cat(pieces, dim=2) for pieces in by_text])
    if is_plain and norms is None and not needs_gradients(call.slopes, call.future_slopes):
        result = short.masked(call, *tensors, differentiates=differentiates)
        if result is not None:
            return result
    if is_plain and differentiates:
        if is_short(call, norms_are_known=norms is not None) and not needs_gradients(call.slopes, call.future_slopes):
            result = short.differentiable(call, *tensors)
            if result is not None:
                return result
        return _EagerAttention.apply(*tensors, call.slopes, call.future_slopes, call, norms).to(call.dtype)
    if is_plain:
        return _forward(call, *tensors, norms, is_exact=False)[0]
    mapped = not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None
    # Without gradients there is no use for more digits than those of the dtype; a trace is to serve either.
    is_exact = mapped or differentiates or torch.jit.is_tracing()
    result, _ = (_Attention.apply if mapped else _attend)(*tensors, *Packed.of(call, norms), is_exact)
    return result.to(call.dtype)


def _of_piece(call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    if sees_nothing(call):
        return query.new_zeros(query.shape)
    return tiled_attention(call, query, key, value)


def tiled_attention_with_sums(call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return attention without gradients, and each softmax's log-sum-exp, both in the working dtype.

    The call has one batch axis.
    """
    return _attend(query, key, value, *Packed.of(call, None), True)


class Packed(NamedTuple):
    """A call and what is known of its keys, in the order in which the operators take it."""

    slopes: Tensor
    future_slopes: Tensor | None
    q_offset: Tensor | None
    q_segment_ids: Tensor | None
    kv_segment_ids: Tensor | None
    mask: Tensor | None
    added_key_bias: Tensor | None
    key_norms: Tensor | None
    norms_block: int
    first_position: int  # the offset where it is no tensor
    is_causal: bool
    window_size: int | None
    scale: float
    tolerance: float
    shares_ids: bool

    @classmethod
    def of(cls, call: AttentionCall, norms: KeyNorms | None) -> Packed:
        """Pack a call with one batch axis."""
        arrays = dict.fromkeys(ARRAY_AXES) | call.arrays
        return cls(
            **arrays,
            key_norms=None if norms is None else norms.values,
            norms_block=0 if norms is None else norms.block,
            first_position=0 if call.has_offset_array else call.q_offset,
            is_causal=call.is_causal,
            window_size=call.window_size,
            scale=call.scale,
            tolerance=tolerance_of(call),
            shares_ids=call.shares_ids,
        )

    def call(self, query: Tensor, key: Tensor) -> AttentionCall:
        """Return the call of these tensors."""
        offset = self.first_position if self.q_offset is None else None
        rules = CallRules(self.is_causal, offset, self.window_size, self.scale, self.tolerance, self.shares_ids)
        arrays = {name: getattr(self, name) for name in ARRAY_AXES}
        return AttentionCall.of_parts(xp, (query.shape, key.shape), query.dtype, rules, arrays, query.device)

    @property
    def norms(self) -> KeyNorms | None:
        """What is known of the keys."""
        return None if self.key_norms is None else KeyNorms(self.key_norms, self.norms_block)


TENSORS = 1 + Packed._fields.index("key_norms")  # of its fields, the first


# --- What they compute ---------------------------------------------------------------------------------------------


def _forward(
    call: AttentionCall,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    norms: KeyNorms | None,
    *,
    is_exact: bool,
    plans: list[list[Job]] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return result and log-sum-exp; the result is in the working dtype if ``is_exact``.

    The jobs of each part of the call are added to ``plans``, where there is such a list.
    """
    query, key, value = _tile_kernels.last_axis_dense(query, key, value)
    result_dtype = call.working_dtype if is_exact else call.dtype
    if is_short(call, norms_are_known=norms is not None):
        return short.forward(call, query, key, value, result_dtype)
    tolerance = tolerance_of(call)

    def attend(call: AttentionCall, batch: slice) -> tuple[Tensor, Tensor]:
        tensors = [x[batch] for x in (query, key, value)]
        known = None if norms is None else norms.of_entries(batch)
        planned = list(kernel_jobs(call, *tensors[:2], tolerance, known))
        if plans is not None:
            plans.append(planned)
        lowest = lowest_bias(call, *tensors[:2], differentiates=False)
        return _tile_kernels.forward(call, *tensors, planned, result_dtype, lowest=lowest)

    parts = [attend(*part) for part in _parts(call)]
    return parts[0] if len(parts) == 1 else tuple(map(torch.cat, zip(*parts, strict=True)))


def _backward(
    call: AttentionCall,
    saved: _tile_kernels.Saved,
    norms: KeyNorms | None,
    *,
    by_slopes: bool,
    plans: Sequence[list[Job]] = (),
) -> tuple[Tensor | None, ...]:
    """Return the gradients by query, key, value, slopes and future slopes; anything by slopes unless asked for.

    ``plans`` are those that the forward pass made, where they are known.
    """
    dense = _tile_kernels.Saved(*_tile_kernels.last_axis_dense(*saved[:4]), *saved[4:])
    slopes, future_slopes = call.slopes, call.future_slopes
    like = slopes if future_slopes is None else future_slopes
    tolerance = tolerance_of(call)

    def differentiate(call: AttentionCall, batch: slice, planned: Iterable[Job] | None) -> tuple[Tensor, ...]:
        some = _tile_kernels.Saved(*(x[batch] for x in dense))
        if planned is None:
            known = None if norms is None else norms.of_entries(batch)
            planned = kernel_jobs(call, some.query, some.key, tolerance, known)
        lowest = lowest_bias(call, some.query, some.key, differentiates=True)
        return _tile_kernels.backward(call, some, planned, by_slopes=by_slopes, lowest=lowest)

    is_short_call = is_short(call, norms_are_known=norms is not None)
    with no_autocast("cpu"):  # gradients may be asked for where it is on
        found = short.backward(call, dense) if is_short_call and not by_slopes else None
        if found is not None:
            return *found, None, None
        parts = [differentiate(*part, plan) for part, plan in itertools.zip_longest(_parts(call), plans)]
        joined = parts[0] if len(parts) == 1 else tuple(map(torch.cat, zip(*parts, strict=True)))
    *by_inputs, past, future = joined
    if future_slopes is None and not call.is_causal:
        past = past + future
    by_past, by_future = (
        (x.sum(dim=0) if of.ndim == 1 else x).to(of.dtype) for x, of in ((past, slopes), (future, like))
    )
    return *by_inputs, by_past, by_future


def _unpacked(arguments: tuple[Any, ...]) -> tuple[_tile_kernels.Saved, Packed, bool]:
    """Return the arguments of the operator for gradients."""
    count = len(_tile_kernels.Saved._fields)
    return _tile_kernels.Saved(*arguments[:count]), Packed(*arguments[count:-1]), arguments[-1]


# --- The operators -------------------------------------------------------------------------------------------------
# Schemas know tensors and numbers alone, each by its own name.

_PACKED = (
    "Tensor slopes, Tensor? future_slopes, Tensor? q_offset, Tensor? q_segment_ids, Tensor? kv_segment_ids, "
    "Tensor? mask, Tensor? added_key_bias, Tensor? key_norms, SymInt norms_block, SymInt first_position, "
    "bool is_causal, SymInt? window_size, float scale, float tolerance, bool shares_ids"
)
_SCHEMA = f"(Tensor query, Tensor key, Tensor value, {_PACKED}, bool is_exact) -> (Tensor, Tensor)"
_BACKWARD_SCHEMA = (
    f"(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor result, Tensor logsumexp, {_PACKED}, "
    "bool by_slopes) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)


@torch.library.custom_op("alibi::attention", mutates_args=(), schema=_SCHEMA)
def _attend(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """Return the result, ``[batch, num_heads, q_len, head_dim]``, and each softmax's log-sum-exp.

    Gradients of scores are differences from means that follow from the result: where it is to be differentiated,
    ``is_exact`` asks for it in the working dtype, as the log-sum-exp is.
    """
    packed, is_exact = Packed(*rest[:-1]), rest[-1]
    found = _forward(packed.call(query, key), query, key, value, packed.norms, is_exact=is_exact)
    return tuple(x.contiguous() for x in found)  # as compilers have been told


@_attend.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    dtype, is_exact = working_dtype(xp, query.dtype), rest[-1]
    result = query.new_empty(query.shape, dtype=dtype if is_exact else query.dtype)
    return result, query.new_empty(query.shape[:-1], dtype=dtype)


@torch.library.custom_op("alibi::attention_backward", mutates_args=(), schema=_BACKWARD_SCHEMA)
def _attend_backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients by query, key, value, slopes and future slopes (zeros if ``by_slopes`` is False)."""
    saved, packed, by_slopes = _unpacked(arguments)
    *by_inputs, past, future = _backward(packed.call(saved.query, saved.key), saved, packed.norms, by_slopes=by_slopes)
    if not by_slopes:
        past = torch.zeros_like(packed.slopes)
        future = torch.zeros_like(packed.slopes if packed.future_slopes is None else packed.future_slopes)
    return tuple(x.contiguous() for x in (*by_inputs, past, future))


@_attend_backward.register_fake
def _(*arguments: Any) -> tuple[Tensor, ...]:
    saved, packed, _ = _unpacked(arguments)
    future = packed.slopes if packed.future_slopes is None else packed.future_slopes
    return tuple(x.new_empty(x.shape) for x in (saved.query, saved.key, saved.value, packed.slopes, future))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, *packed, _ = inputs
    ctx.save_for_backward(query, key, value, *output, *packed[:TENSORS])
    ctx.numbers = packed[TENSORS:]
    ctx.by_slopes = ctx.needs_input_grad[3] or ctx.needs_input_grad[4]
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    packed = Packed(*saved[5:], *ctx.numbers)
    return _wanted(ctx, _recorded(_tile_kernels.Saved(grad, *saved[:5]), packed, ctx.by_slopes))


def _wanted(ctx: Any, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """Return gradients by query, key, value, slopes and future slopes, and None for what needs none."""
    needed = ctx.needs_input_grad
    wanted = [x if is_needed else None for x, is_needed in zip(grads, needed, strict=False)]
    return *wanted, *(None,) * (len(needed) - len(wanted))


def _recorded(saved: _tile_kernels.Saved, packed: Packed, by_slopes: bool) -> tuple[Tensor | None, ...]:
    """Return the operator's gradients, which autograd can differentiate where it records."""
    with torch.no_grad():
        grads = _attend_backward(*saved, *packed, by_slopes)
    if not torch.is_grad_enabled():
        return grads
    rates = packed[:2]
    by_rates = (x if by_slopes and rate is not None else None for x, rate in zip(grads[3:], rates, strict=True))
    formula = partial(_spelled_out, packed[TENSORS:])
    return second.differentiable((*grads[:3], *by_rates), formula, saved.grad, (*saved[1:4], *rates), packed[2:TENSORS])


def _spelled_out(numbers: tuple[Any, ...], inputs: Sequence[Tensor], others: Sequence[Tensor | None]) -> Tensor:
    """Return attention in the working dtype, of query, key, value, slopes and future slopes."""
    query, key, value, *slopes = inputs
    call = Packed(*slopes, *others, *numbers).call(query, key)
    call = replace(call, dtype=call.working_dtype)
    return dense_attention(call, query, key, value, softmax=partial(torch.softmax, dim=-1))


_attend.register_autograd(_differentiate, setup_context=_setup)
_tiled_vmap.register(_attend, _attend_backward)


class _EagerAttention(torch.autograd.Function):
    """What the operators compute, without the time that an operator takes to dispatch."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        slopes: Tensor,
        future_slopes: Tensor | None,
        call: AttentionCall,
        norms: KeyNorms | None,
    ) -> Tensor:
        ctx.plans = []
        result, logsumexp = _forward(call, query, key, value, norms, is_exact=True, plans=ctx.plans)
        # The arrays of the call are saved for PyTorch to notice if somebody writes to them in between.
        ctx.save_for_backward(query, key, value, result, logsumexp, *call.arrays.values())
        ctx.call, ctx.norms = call, norms
        ctx.set_materialize_grads(False)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 7
        saved = _tile_kernels.Saved(grad, *ctx.saved_tensors[:5])
        by_slopes = ctx.needs_input_grad[3] or ctx.needs_input_grad[4]
        if not torch.is_grad_enabled() and not _is_mapped(grad):
            grads = _backward(ctx.call, saved, ctx.norms, by_slopes=by_slopes, plans=ctx.plans)
            return _wanted(ctx, grads) if by_slopes else (*grads[:3], *(None,) * 4)  # autograd drops what is not needed
        return _wanted(ctx, _recorded(saved, Packed.of(ctx.call, ctx.norms), by_slopes))


def _is_mapped(grad: Tensor) -> bool:
    """Whether it is a batch of gradients by one result; those of ``torch.autograd`` are not of torch.func."""
    functorch = torch._C._functorch
    return functorch.peek_interpreter_stack() is not None or functorch.is_legacy_batchedtensor(grad)


class _Attention(torch.autograd.Function):
    """The operator with its gradients, for torch.func: it refuses those that are registered for an operator."""

    generate_vmap_rule = True  # from those of the operators

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, Tensor]:
        return _attend(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        _setup(ctx, inputs, output)
        # What is saved for either mode has to be alike. A result that its own node held would never be freed.
        ctx.save_for_forward(*inputs[:3], *(x.detach() for x in output), *inputs[3:][:TENSORS])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _differentiate(ctx, *grads)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Tensor, None]:
        saved = ctx.saved_tensors
        inputs, others = (*saved[:3], *saved[5:7]), saved[7:]
        return second.tangent_of(lambda x: _spelled_out(ctx.numbers, x, others), inputs, tangents[:5]), None


def _parts(call: AttentionCall) -> Iterator[tuple[AttentionCall, slice]]:
    """Yield a call, or one for each batch entry where each has its own offset, and the entries concerned."""
    if not call.has_offset_array:
        yield call, slice(None)
        return
    for index in range(call.batch[0]):
        yield entry_of(call, index), slice(index, index + 1)
