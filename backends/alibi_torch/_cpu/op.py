"""``"tiled"`` and ``"triton"`` as two operators, forward and backward, for autograd, torch.compile and torch.func."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import array_api_compat.torch as xp
import torch
import torch.nn.functional as F
from torch import Tensor

from alibi_core.backend import ARRAY_AXES, AttentionCall
from alibi_core.backend.horizon import Job, KeyNorms
from alibi_torch import _rows
from alibi_torch._cpu import kernel, step
from alibi_torch._cpu.bias import DistanceRow, GatedBias
from alibi_torch._cpu.plan import Part, jobs, limits_of, split
from alibi_torch._derivatives import RATES, dense_reference, pulled_back
from alibi_torch._dispatch import needs_gradients, no_autocast, rates_of
from alibi_torch._internals import in_transform, is_watched


def attention(
    call: AttentionCall,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    norms: KeyNorms | None = None,
    implementation: str = "tiled",
) -> Tensor:
    """Compute ``call`` on tensors ``[*batch, heads, length, head_dim]``, without its full bias or scores in memory.

    ``"tiled"`` takes them on the CPU, or anywhere if the call is not Toeplitz: then it is computed by blocks of queries
    (``_rows``). Keys are skipped if norms prove that their weights sum to less than the tolerance. All keys are read
    once to measure their norms, unless ``norms`` bounds them.
    """
    flat = call.with_one_batch_axis()
    if flat is not call:
        tensors = (x.reshape(*flat.batch, *x.shape[len(call.batch) :]) for x in (query, key, value))
        return attention(flat, *tensors, norms, implementation).reshape(query.shape)
    is_recorded = needs_gradients(query, key, value, *rates_of(call))
    if call.log_gates is not None:  # a slope is a gate, too, the same at each token: [batch, num_heads, kv_len]
        gates = (call.log_gates - call.slopes[..., None]).reshape(*call.batch, call.num_heads, call.kv_len)
        sinks = call.sinks
        if sinks is not None:  # Gates end at the last key: behind it, slopes raise the sink instead.
            sinks = sinks + call.slopes[..., None] * call.distance_to_keys(call.positions()[0])[..., None, :]
        call = replace(call, slopes=torch.zeros_like(call.slopes).detach(), log_gates=gates, sinks=sinks)
    # Without gradients or tracers, skip the operator: its dispatch takes longer than a short call.
    if not (is_recorded or is_watched(query, key, value)):
        return _without_gradients(call, query, key, value, norms, implementation)[0].to(call.dtype)
    is_traced = torch.compiler.is_compiling() or torch.jit.is_tracing()
    # Gradients and sinks need the result in the working dtype. A torch.jit trace may be replayed with gradients or not.
    is_exact = is_recorded or call.sinks is not None or (not is_traced and in_transform()) or torch.jit.is_tracing()
    arguments = query, key, value, *Packed.of(call, norms, implementation), is_exact
    result = _Attention.apply(*arguments, []) if is_exact and not is_traced else _attend(*arguments)
    return result[0].to(call.dtype)


class Packed(NamedTuple):
    """A call and its key norms as arguments of the operators: tensors first, then numbers."""

    slopes: Tensor
    future_slopes: Tensor | None
    log_gates: Tensor | None
    sinks: Tensor | None
    q_offset: Tensor | None
    q_segment_ids: Tensor | None
    kv_segment_ids: Tensor | None
    mask: Tensor | None
    added_key_bias: Tensor | None
    q_points: Tensor | None
    kv_points: Tensor | None
    key_norms: Tensor | None
    norms_block: int
    first_position: int  # q_offset if it is an int; ignored if it is a tensor
    is_causal: bool
    window_size: int | None
    scale: float
    tolerance: float
    shares_ids: bool
    shares_points: bool
    may_lack_points: bool
    distance: str
    law: str
    implementation: str

    @classmethod
    def of(cls, call: AttentionCall, norms: KeyNorms | None, implementation: str) -> Packed:
        """Pack a call with one batch axis."""
        arrays = dict.fromkeys(ARRAY_AXES) | call.arrays
        arrays["key_norms"], block = (None, 0) if norms is None else (norms.values, norms.block)
        offset = 0 if call.has_offset_array else call.q_offset
        return cls(*arrays.values(), block, offset, *(getattr(call, name) for name in RULES), implementation)

    def unpacked(self, query: Tensor, key: Tensor) -> tuple[AttentionCall, KeyNorms | None]:
        """Return the call and its key norms (or None); sizes and dtypes come from the tensors."""
        fields = {name: getattr(self, name) for name in (*ARRAY_AXES, *RULES)}
        fields["q_offset"] = self.first_position if self.q_offset is None else self.q_offset
        fields |= {"num_kv_heads": key.shape[1], "kv_len": key.shape[2], "dtype": query.dtype, "device": query.device}
        batch, num_heads, q_len, head_dim = query.shape
        sizes = {"batch": (batch,), "num_heads": num_heads, "q_len": q_len, "head_dim": head_dim}
        working_dtype = torch.promote_types(query.dtype, torch.float32)
        call = AttentionCall(xp=xp, working_dtype=working_dtype, **sizes, **fields)
        return call, None if self.key_norms is None else KeyNorms(self.key_norms, self.norms_block)


TENSORS = 1 + Packed._fields.index("key_norms")  # The first this many fields of Packed are tensors.
RULES = Packed._fields[TENSORS + 2 : -1]  # those of the call


# --- Computation -----------------------------------------------------------------------------------------------------


# The plan of a call: its parts, each with the rectangles of scores to compute and their biases, without added_key_bias.
Plan = list[tuple[Part, list[Job], DistanceRow | GatedBias]]


def plan_of(call: AttentionCall, query: Tensor, key: Tensor, norms: KeyNorms | None) -> Plan:
    """Return the plans of the parts of a call with one batch axis."""
    found: Plan = []
    if call.log_gates is not None and (call.log_gates > 0).any():  # negative slopes: no bound holds
        call = replace(call, tolerance=0.0)
    for part in split(call, norms):
        tensors = *part.of_queries(query), *part.of_keys(key)
        if step.is_step(part.call):
            rectangles, cutoff = step.jobs(part.call), None
        else:
            limits = limits_of(part.call, *tensors)
            cutoff = None if limits is None else limits.cutoff
            rectangles = jobs(part.call, *tensors, part.norms, limits)
        # The key bias becomes extra features (_with_key_bias), so the row has distances only.
        own = part.call if part.call.added_key_bias is None else replace(part.call, added_key_bias=None)
        is_gated = call.log_gates is not None
        found.append((part, rectangles, GatedBias.of(own) if is_gated else DistanceRow.of(own, rectangles, cutoff)))
    return found


def _has_own_distances(call: AttentionCall) -> bool:
    """Whether no row of distances serves all queries; on other devices than CPUs, where a law comes here, too."""
    return call.q_points is not None or call.device.type != "cpu"


def _without_gradients(
    call: AttentionCall, query: Tensor, key: Tensor, value: Tensor, norms: KeyNorms | None, implementation: str
) -> tuple[Tensor, Tensor]:
    """Return the result, in the call's or the working dtype, and the log-sum-exp, ``[batch, num_heads, q_len]``."""
    if implementation == "triton":
        return _in_triton(call, query, key, value, norms, is_exact=False)[:2]
    if _has_own_distances(call):
        found = _rows.forward(call, query, key, value)
    elif step.is_last_query(call):
        found = step.attend_last_query(call, *unit_strided(query, key, value), norms)
    else:
        found = _compute(call, query, key, value, plan_of(call, query, key, norms), call.dtype)
    return _beside_sinks(call, *found)


def _beside_sinks(call: AttentionCall, result: Tensor, logsumexp: Tensor) -> tuple[Tensor, Tensor]:
    """Return the result and the log-sum-exp over keys and sinks, from those over keys."""
    if call.sinks is None:
        return result, logsumexp
    return result * torch.sigmoid(logsumexp - call.sinks)[..., None], torch.logaddexp(logsumexp, call.sinks)


def _in_triton(
    call: AttentionCall, query: Tensor, key: Tensor, value: Tensor, norms: KeyNorms | None, is_exact: bool
) -> tuple[Tensor, Tensor, Any]:
    """Return result, statistics of rows and plan of the GPU's kernels, which are imported at their first call."""
    from alibi_torch import _triton

    return _triton.forward(call, query, key, value, norms, is_exact)


def _compute(
    call: AttentionCall, query: Tensor, key: Tensor, value: Tensor, planned: Plan, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the result, in ``dtype``, and the log-sum-exp, ``[batch, num_heads, q_len]``, from a plan."""
    query, key, value = unit_strided(query, key, value)
    found = []
    for part, rectangles, row in planned:
        tensors = *part.of_queries(query), *part.of_keys(key, value)
        if step.is_step(part.call):
            results = step.forward(part.call, *tensors, rectangles, row)
        else:
            results = kernel.forward(*_with_key_bias(part.call, *tensors), rectangles, row, dtype)
        # The only part covers the call: no copy.
        if not part.is_cut:
            return results[0][..., : call.head_dim].to(dtype), results[1]
        found.append((part, results))
    # Queries in no part see no key: their result is 0, their log-sum-exp inf.
    result = torch.zeros_like(query, dtype=dtype)
    logsumexp = query.new_full(query.shape[:-1], math.inf, dtype=call.working_dtype)
    for part, results in found:
        for total, own in zip(part.of_queries(result, logsumexp), results, strict=True):
            total.copy_(own[..., : total.shape[-1]])
    return result, logsumexp


def _with_key_bias(
    call: AttentionCall, query: Tensor, key: Tensor, value: Tensor
) -> tuple[AttentionCall, Tensor, Tensor, Tensor]:
    """Return the call and tensors with ``added_key_bias`` moved into extra features, so that the bias stays Toeplitz.

    The heads of a group share their keys, so the keys get one extra feature per head of the group; the queries of a
    head have 1 in the feature of that head, 0 in the others.
    """
    if call.added_key_bias is None:
        return call, query, key, value
    batch, group, dtype = call.batch[0], call.num_heads // call.num_kv_heads, call.working_dtype
    # added: [batch, num_kv_heads, kv_len, group], divided by the scale that the kernel applies; ones: [heads, 1, group]
    added = call.added_key_bias.expand(batch, -1, -1).unflatten(1, (call.num_kv_heads, group)).mT / call.scale
    ones = torch.eye(group, dtype=dtype, device=call.device).repeat(call.num_kv_heads, 1)[:, None]
    query = torch.cat([query.to(dtype), ones.expand(batch, -1, call.q_len, -1)], dim=-1)
    key = torch.cat([key.to(dtype), added.to(dtype)], dim=-1)
    return replace(call, added_key_bias=None), query, key, F.pad(value.to(dtype), (0, group))


def unit_strided(*tensors: Tensor) -> list[Tensor]:
    """Return tensors with a contiguous last axis, as the kernel requires; others are copied.

    Tensors with two axes of stride 1 (overlapping windows) are copied too: PyTorch may reorder such axes.
    """
    return [x if x.stride(-1) == 1 and x.stride().count(1) == 1 else x.contiguous() for x in tensors]


# --- The operators ---------------------------------------------------------------------------------------------------
# An operator's schema allows only tensors and numbers as arguments, so a call is flattened into `Packed`.

_PACKED = (
    "Tensor slopes, Tensor? future_slopes, Tensor? log_gates, Tensor? sinks, Tensor? q_offset, Tensor? q_segment_ids, "
    "Tensor? kv_segment_ids, Tensor? mask, Tensor? added_key_bias, Tensor? q_points, Tensor? kv_points, Tensor? "
    "key_norms, SymInt norms_block, SymInt first_position, bool is_causal, SymInt? window_size, float scale, float "
    "tolerance, bool shares_ids, bool shares_points, bool may_lack_points, str distance, str law, str implementation"
)
_SCHEMA = f"(Tensor query, Tensor key, Tensor value, {_PACKED}, bool is_exact) -> (Tensor, Tensor)"
_BACKWARD_SCHEMA = (
    f"(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor result, Tensor logsumexp, {_PACKED}, "
    "bool by_slopes) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
torch.library.define("alibi::attention", _SCHEMA, tags=torch.Tag.pt2_compliant_tag)
torch.library.define("alibi::attention_backward", _BACKWARD_SCHEMA, tags=torch.Tag.pt2_compliant_tag)
_attend = torch.ops.alibi.attention.default
_attend_backward = torch.ops.alibi.attention_backward.default


def _attend_here(
    query: Tensor, key: Tensor, value: Tensor, *rest: Any, plans: list[Plan] | None = None
) -> tuple[Tensor, Tensor]:
    """Return the result, ``[batch, num_heads, q_len, head_dim]``, and the log-sum-exp, ``[batch, num_heads, q_len]``.

    ``is_exact``, the last argument, asks for the result in the working dtype, because the backward pass subtracts
    ``sum(grad * result)`` from the gradient of each weight. In place of log-sum-exps, ``"triton"`` gives two numbers a
    row, ``[batch, num_heads, 2, q_len]``. The plan is appended to ``plans`` for the backward pass.
    """
    packed = Packed(*rest[:-1])
    call, norms = packed.unpacked(query, key)
    if packed.implementation == "triton":
        result, logsumexp, planned = _in_triton(call, query, key, value, norms, rest[-1])
        if plans is not None:
            plans.append(planned)
    elif not rest[-1]:
        result, logsumexp = _without_gradients(call, query, key, value, norms, packed.implementation)
        result = result.to(call.dtype)
    elif _has_own_distances(call):
        result, logsumexp = _beside_sinks(call, *_rows.forward(call, query, key, value))
    else:
        planned = plan_of(call, query, key, norms)
        if plans is not None:
            plans.append(planned)
        result, logsumexp = _beside_sinks(call, *_compute(call, query, key, value, planned, call.working_dtype))
    return _strided_as(query, result), logsumexp.contiguous()


def _strided_as(other: Tensor, tensor: Tensor) -> Tensor:
    """Return the tensor with the strides of another one, which register_fake promises to compilers."""
    strides = torch.empty_like(other, device="meta").stride()
    return tensor if tensor.stride() == strides else torch.empty_like(other, dtype=tensor.dtype).copy_(tensor)


torch.library.impl("alibi::attention", "default", _attend_here)


@torch.library.register_fake("alibi::attention")
def _(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    dtype, is_exact = torch.promote_types(query.dtype, torch.float32), rest[-1]
    result = torch.empty_like(query, dtype=dtype if is_exact else query.dtype)
    is_triton = Packed(*rest[:-1]).implementation == "triton"
    shape = (*query.shape[:2], 2, query.shape[2]) if is_triton else query.shape[:-1]
    return result, query.new_empty(shape, dtype=dtype)


def _backward_here(*arguments: Any, plans: Sequence[Plan] = ()) -> tuple[Tensor, ...]:
    """Return the gradients for query, key, value and RATES: zeros for all but sinks if ``by_slopes`` is False.

    Those that the call lacks have no elements. With gates, the gradient of slopes is 0.
    """
    (grad, query, key, value, result, logsumexp), packed = arguments[:6], Packed(*arguments[6:-1])
    call, norms = packed.unpacked(query, key)
    if packed.implementation == "triton":
        from alibi_torch import _triton

        *gradients, sums = _triton.backward(call, arguments[:6], norms, plans[0] if plans else None, arguments[-1])
        return *map(_strided_as, (query, key, value), gradients), *_by_rates(call, sums)
    by_sinks = None if call.sinks is None else -torch.exp(call.sinks - logsumexp) * (grad * result).sum(dim=-1)
    # The kernel sums distances for slopes, not laws of them.
    if _has_own_distances(call) or (arguments[-1] and call.law != "linear"):
        with no_autocast(query.device.type):
            *gradients, past, future = _rows.backward(call, *arguments[:6], arguments[-1])
        return *map(_strided_as, (query, key, value), gradients), *_by_rates(call, (past, future), None, by_sinks)
    # Reuse the forward pass's plan where autograd passed it on; operators cannot.
    planned = plans[0] if plans else plan_of(call, query, key, norms)
    by_query = (torch.zeros_like if planned[0][0].is_cut else torch.empty_like)(query)  # queries in no part get 0
    by_key, by_value = (torch.zeros_like(x, dtype=call.working_dtype) for x in (key, value))
    sums = gates = None
    if call.log_gates is not None:
        gates = torch.zeros_like(call.log_gates, dtype=torch.float64)
    elif arguments[-1]:
        sums = query.new_zeros((2, *call.batch, call.num_heads), dtype=torch.float64)
    grad, query, key, value, result = unit_strided(grad, query, key, value, result)
    with no_autocast("cpu"):  # the caller may run backward under autocast
        for part, rectangles, row in planned:
            own, *tensors = _with_key_bias(part.call, *part.of_queries(query), *part.of_keys(key, value))
            wider = tensors[0].shape[-1] - call.head_dim
            of_result = (F.pad(x, (0, wider)) if wider else x for x in part.of_queries(grad, result))
            saved = *tensors, *of_result, *part.of_queries(logsumexp)
            totals = *part.of_queries(by_query), *part.of_keys(by_key, by_value)
            by_slopes = None if sums is None else sums[:, part.batch]
            by_gates = (
                torch.zeros_like(own.log_gates, dtype=torch.float64) if arguments[-1] and gates is not None else None
            )
            kernel.backward(own, saved, rectangles, row, totals, by_slopes, by_gates)
            if by_gates is not None and gates is not None:
                # A gate is in the biases of all earlier keys, for its own query and later ones; a row's sum is 0.
                gates[part.batch, :, part.keys][..., 1:] += by_gates.cumsum(dim=-1)[..., :-1]
    return by_query, by_key.to(call.dtype), by_value.to(call.dtype), *_by_rates(call, sums, gates, by_sinks)


def _by_rates(
    call: AttentionCall, sums: Sequence[Tensor] | None, gates: Tensor | None = None, sinks: Tensor | None = None
) -> list[Tensor]:
    """Return the gradients for RATES in their shapes, None as zeros; ``sums`` are those of slopes per side."""
    past, future = (None, None) if sums is None else sums
    if past is not None and call.future_slopes is None and not call.is_causal:  # symmetric: one slope serves both sides
        past = past + future
    return [
        call.slopes.new_zeros(0 if rate is None else rate.shape)
        if rate is None or x is None
        else x.sum_to_size(rate.shape).to(rate.dtype, copy=True)
        for rate, x in zip(rates_of(call), (past, future, gates, sinks), strict=True)
    ]


torch.library.impl("alibi::attention_backward", "default", _backward_here)


@torch.library.register_fake("alibi::attention_backward")
def _(*arguments: Any) -> tuple[Tensor, ...]:
    rates = arguments[6 : 6 + len(RATES)]
    shapes = (0 if x is None else x.shape for x in rates)
    return *(torch.empty_like(x) for x in arguments[1:4]), *(rates[0].new_empty(shape) for shape in shapes)


# --- Autograd --------------------------------------------------------------------------------------------------------


class _Attention(torch.autograd.Function):
    """The operator with its gradients. torch.func rejects gradients from register_autograd, so it uses this class."""

    generate_vmap_rule = True  # derived from the vmap rules of the two operators

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, Tensor]:
        *arguments, plans = arguments
        if is_watched(*arguments[:3]):
            return _attend(*arguments)
        return _attend_here(*arguments, plans=plans)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        """Save the inputs for the backward pass; the last one, the list of plans, is no argument of the operator."""
        count = 3 + len(Packed._fields)
        tensors, ctx.numbers = inputs[: 3 + TENSORS], inputs[3 + TENSORS : count]
        ctx.plans = [*inputs[count + 1 :], []][0]
        ctx.save_for_backward(*tensors[:3], *output, *tensors[3:])
        ctx.by_slopes = any(ctx.needs_input_grad[3:6])
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad
        if grad is None:
            return (None,) * len(needed)
        is_recorded = torch.is_grad_enabled() and not torch.compiler.is_compiling()
        arguments = grad, *ctx.saved_tensors, *ctx.numbers, ctx.by_slopes  # saved tensors may be unpacked once alone
        if is_recorded:  # create_graph=True
            found = _Gradients.apply(*arguments)
        elif is_watched(*arguments[:4]):
            found = _attend_backward(*arguments)
        else:
            found = _backward_here(*arguments, plans=ctx.plans)
        wanted = [x if is_needed else None for x, is_needed in zip(found, needed, strict=False)]
        # Masks, norms and numbers have no gradients.
        return *wanted, *(None,) * (len(needed) - len(wanted))


class _Gradients(torch.autograd.Function):
    """The backward operator, itself differentiable through dense attention (memory for all scores)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        return _attend_backward(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*inputs[:4], *inputs[6 : 6 + TENSORS])
        ctx.numbers = inputs[6 + TENSORS : -1]

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        grad, query, key, value, *tensors = ctx.saved_tensors
        call, _ = Packed(*tensors, *ctx.numbers).unpacked(query, key)
        inputs = query, key, value, *tensors[: len(RATES)]

        def gradients(grad: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
            return pulled_back(lambda *x: dense_reference(call, *x), inputs, grad)

        with no_autocast("cpu"):
            given = [(x, by_x) for x, by_x in zip(inputs, cotangents, strict=True) if x is not None]
            by_grad, *found = pulled_back(gradients, (grad, *(x for x, _ in given)), tuple(x for _, x in given))
        rest = iter(found)
        by_inputs = [None if x is None else next(rest) for x in inputs]
        return by_grad, *by_inputs[:3], None, None, *by_inputs[3:], *(None,) * (len(ctx.needs_input_grad) - 10)


# PyTorch reads the signature at each call, which takes longer than to read it here.
_Attention.forward.__signature__ = inspect.signature(_Attention.forward)  # type: ignore[attr-defined]
torch.library.register_autograd("alibi::attention", _Attention.backward, setup_context=_Attention.setup_context)


# --- vmap: the mapped axis is merged into the batch axis -------------------------------------------------------------

# The number of axes after the batch axis, for each tensor argument of the operators, in order.
_RULE_AXES = (*ARRAY_AXES.values(), 2)  # the last argument is the key norms
_FORWARD_AXES = (3, 3, 3, *_RULE_AXES)  # query, key, value
_BACKWARD_AXES = (3, 3, 3, 3, 3, 2, *_RULE_AXES)  # gradient, query, key, value, result, log-sum-exp


@torch.library.register_vmap("alibi::attention")
def _(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> Any:
    merged = _merged(info.batch_size, in_dims, arguments, _FORWARD_AXES)
    return tuple(x.unflatten(0, (info.batch_size, -1)) for x in _attend(*merged)), (0, 0)


@torch.library.register_vmap("alibi::attention_backward")
def _(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> Any:
    size, first = info.batch_size, len(_BACKWARD_AXES) - len(_RULE_AXES)
    merged = _merged(size, in_dims, arguments, _BACKWARD_AXES)
    summed = []  # True if a rate has no batch axis, so that its gradient is summed over it
    for index, axes in enumerate(_RULE_AXES[: len(RATES)], first):
        rate, dim = arguments[index], in_dims[index]
        summed.append(rate is not None and rate.ndim - (dim is not None) == axes)
        if rate is not None:  # one gradient per mapped entry
            merged[index] = merged[index].expand(len(merged[0]), *merged[index].shape[-axes:])
    found = [x.unflatten(0, (size, -1)) for x in _attend_backward(*merged)]
    rates = [x.sum(dim=1) if is_summed else x for x, is_summed in zip(found[3:], summed, strict=True)]
    return (*found[:3], *rates), (0,) * len(found)


def _merged(size: int, in_dims: tuple[int | None, ...], arguments: tuple[Any, ...], axes: tuple[int, ...]) -> list[Any]:
    """Return the arguments, the mapped axis of each tensor merged with its batch axis."""
    query, dim = arguments[1], in_dims[1]  # the key in the forward operator; both have a batch axis
    batch = query.shape[0] if dim is None else query.movedim(dim, 0).shape[1]
    merged = list(arguments)
    for index, (x, dim, rest) in enumerate(zip(arguments, in_dims, axes, strict=False)):
        if not isinstance(x, Tensor) or (dim is None and (x.ndim <= rest or x.shape[0] == 1 < batch)):
            continue  # not mapped and without a batch axis: the same for all entries
        x = x[None] if dim is None else x.movedim(dim, 0)
        x = x.reshape(len(x), *(1,) * (rest + 2 - x.ndim), *x.shape[1:])  # [size or 1, batch or 1, ...]
        merged[index] = x.expand(size, batch, *x.shape[2:]).flatten(0, 1)
    return merged
