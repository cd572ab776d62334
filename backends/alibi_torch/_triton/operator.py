"""Results and gradients of a call by the kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from alibi_core.backend import AttentionCall
from alibi_core.backend.horizon import KeyNorms
from alibi_torch._triton.backward import by_keys, by_queries
from alibi_torch._triton.forward import attend
from alibi_torch._triton.launch import Rows, arguments, dense, launch, tile_of
from alibi_torch._triton.plan import PLAN, Plan, mean_of_keys, plan_of
from alibi_torch._triton.step import attend_step, is_step


def forward(
    call: AttentionCall, query: Tensor, key: Tensor, value: Tensor, norms: KeyNorms | None, is_recorded: bool
) -> tuple[Tensor, Tensor, Plan]:
    """Return the result of a call with one batch axis, statistics of rows for the backward pass, and the plan.

    If ``is_recorded``, the result is float32, and statistics are written: ``[batch, heads, 2, q_len]`` float32.
    """
    if query.is_cuda and query.device.index != torch.cuda.current_device():  # where Triton launches
        with torch.cuda.device(query.device):
            return forward(call, query, key, value, norms, is_recorded)
    query, key, value = dense(query), dense(key), dense(value)
    given = arguments(call, query, key, value)
    # The backward pass subtracts sum(grad * result), for which low precision is too coarse.
    result = torch.empty_like(query, dtype=torch.float32 if is_recorded else query.dtype)
    stats = torch.empty((*query.shape[:2], 2, call.q_len), dtype=torch.float32, device=query.device)
    if not is_recorded and is_step(call):
        attend_step(call, given, result, norms)
        return result, stats, Plan()
    plan, tile = plan_of(call, given, norms), tile_of("attend", query, given)
    q_blocks = -(-call.q_len // tile.rows)
    given |= {"out": Rows.of(result), "STATS": stats if is_recorded else None, "plan": plan, "PLAN": PLAN}
    launch(attend, q_blocks * call.batch[0] * call.num_heads, given | {"q_blocks": q_blocks}, tile)
    return result, stats, plan


def backward(
    call: AttentionCall, saved: Sequence[Tensor], norms: KeyNorms | None, plan: Plan | None, by_slopes: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of query, key and value, and for slopes those of each side, ``[2, batch, heads]`` float64.

    ``saved`` are the gradient of the result, query, key, value, the result and the statistics of rows. Without a plan
    it is made again.
    """
    if saved[1].is_cuda and saved[1].device.index != torch.cuda.current_device():
        with torch.cuda.device(saved[1].device):
            return backward(call, saved, norms, plan, by_slopes)
    query, key, value, result = (dense(x) for x in saved[1:5])
    grad = dense(saved[0].to(query.dtype))
    given = arguments(call, query, key, value)
    plan = plan_of(call, given, norms) if plan is None else plan
    found = [torch.empty_like(x) for x in (query, key, value)]
    of_queries, of_keys = (tile_of(name, query, given) for name in ("by_queries", "by_keys"))
    q_blocks, kv_blocks = -(-call.q_len // of_queries.rows), -(-call.kv_len // of_keys.keys)
    sums = None
    if by_slopes:
        sums = query.new_empty((2, call.batch[0], call.num_heads, q_blocks), dtype=torch.float32)
    names = "grad", "out", "dq", "dk", "dv"
    given |= {name: Rows.of(x) for name, x in zip(names, (grad, result, *found), strict=True)}
    given |= {"STATS": saved[5], "DELTA": torch.empty(query.shape[:-1], dtype=torch.float32, device=query.device)}
    given |= {"CENTRE": mean_of_keys(call, given), "D_SLOPES": sums, "LEARNS": by_slopes, "plan": plan, "PLAN": PLAN}
    given |= {"q_blocks": q_blocks, "kv_blocks": kv_blocks}
    launch(by_queries, q_blocks * call.batch[0] * call.num_heads, given, of_queries)
    launch(by_keys, kv_blocks * call.batch[0] * call.num_kv_heads, given, of_keys)
    return *found, None if sums is None else sums.sum(dim=-1, dtype=torch.float64)
