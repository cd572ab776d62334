"""Cases for the TPU kernel: long enough for several blocks of 128, and what JAX and the oracle make of them."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import alibi_jax
from alibi_core import AttentionCall
from alibi_core._call import LENGTH_FIRST
from alibi_core.conformance._cases import Case, Sizes
from alibi_core.conformance._oracle import UNIT_ROUNDOFF, Answer, Attention, assert_within
from alibi_jax._operands import Operands, Rules, take_apart
from alibi_jax._plan import Needed, needed_keys
from alibi_jax._tpu_shape import TPU, KernelShape
from alibi_jax._tpu_tables import Inputs, inputs_of, queries_of_keys
from tests import oracle
from tests.frameworks import JAX

INTERPRETED = TPU(128, 128, interpret=True)
TENSORS = ("query", "key", "value")
STEEP = (4.0, 1.0, 0.3, 0.0625, 0.03, 2.0**-16, 0.0)


def replaced(case: Case, *, arguments: dict[str, Any] | None = None, **arrays: np.ndarray) -> Case:
    """Return the case with other arrays or arguments, the rest as they are."""
    changed = case.with_tensors(**arrays)
    changed.__dict__["arguments"] = case.arguments if arguments is None else arguments
    return changed


def plain(sizes: Sizes, *, seed: int = 0, slopes: Any = None, arrays: dict[str, np.ndarray] | None = None) -> Case:
    """Return a causal case of which tests replace what they are about."""
    case = Case(sizes, "causal", None, None, None, None, slopes_per_batch=False, seed=seed)
    arrays = {} if arrays is None else arrays
    return replaced(case, **arrays, **({} if slopes is None else {"slopes": np.asarray(slopes, np.float64)}))


# --- What the oracle says -------------------------------------------------------------------------------------------


def bias_of(rules: oracle.Rules, batch: int, heads: int, q_len: int, kv_len: int) -> np.ndarray:
    """Return ``oracle.penalties``, of long rows in less time."""
    offsets = np.broadcast_to(rules.q_offset, (batch,)).astype(np.int64)
    distance = offsets[:, None, None] + np.arange(q_len)[:, None] - np.arange(kv_len)  # [batch, q_len, kv_len]
    shown = (distance >= 0) | (not rules.is_causal)
    if rules.window_size is not None:
        shown = shown & (np.abs(distance) <= rules.window_size)
    if rules.q_segment_ids is not None:
        q_ids, kv_ids = (np.atleast_2d(x) for x in (rules.q_segment_ids, rules.kv_segment_ids))
        shown = shown & (q_ids[..., :, None] == kv_ids[..., None, :])
    shown = np.broadcast_to(shown[:, None], (batch, heads, q_len, kv_len))
    if rules.mask is not None:
        shown = shown & rules.mask
    sides = (rules.slopes, rules.slopes if rules.future_slopes is None else rules.future_slopes)
    past, future = (np.broadcast_to(x, (batch, heads)).astype(np.float64)[:, :, None, None] for x in sides)
    distance = distance[:, None]
    return np.where(shown, np.where(distance < 0, future * distance, -past * distance), -np.inf)


def exact(case: Case, dtype: str = "float32") -> Attention:
    """Return the problem in float64, on inputs as they are once rounded."""
    tensors = {name: rounded(case.arrays[name], dtype) for name in TENSORS}
    rules = case_rules(case, case.arrays["slopes"].astype(np.float32))
    bias = bias_of(rules, case.sizes.batch, case.num_heads, *case.sizes.lengths)
    return Attention(**tensors, bias=bias, scale=case.scale, dtype=dtype)


def case_rules(case: Case, slopes: np.ndarray) -> oracle.Rules:
    known = {name: value for name, value in case.arguments.items() if name not in ("scale", "allow_negative_slopes")}
    return replaced(case, arguments=known).rules(slopes)


def rounded(array: np.ndarray, dtype: str) -> np.ndarray:
    return JAX.numpy(JAX.array(array, dtype))


def answers(case: Case, dtype: str, tolerance: float) -> dict[str, Answer]:
    """Return the exact result and gradients, which may be off by rounding, and by what a share of weight can move."""
    problem, cotangent = exact(case, dtype), rounded(case.arrays["cotangent"], dtype)
    behind, ahead = _distances(case)
    parts = (behind, ahead) if "future_slopes" in case.arguments else (behind + ahead,)
    largest_value = np.abs(problem.values).max(axis=(2, 3), keepdims=True)
    output = problem.output
    found = {"result": Answer(output.value, output.budget + 2 * tolerance * largest_value)}
    for name, distances in zip(("slopes", "future_slopes"), parts, strict=False):
        left_out = _moved(tolerance, problem, cotangent, distances)
        gradients = problem.gradients(cotangent, distances)
        for key, answer in gradients.items():
            found[name if key == "slopes" else key] = Answer(answer.value, answer.budget + left_out[key])
    if case.arrays["slopes"].ndim == 1:
        for name in {"slopes", "future_slopes"} & set(found):
            by_entry = found[name]
            rounding = 1 + case.sizes.batch * 2.0**-20
            found[name] = Answer(by_entry.value.sum(axis=0), by_entry.budget.sum(axis=0) * rounding)
    return found


def _distances(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Return how far visible keys are behind queries, and how far ahead: ``[batch, heads, q_len, kv_len]``."""
    zeros, ones = np.zeros(case.num_heads), np.ones(case.num_heads)
    shape = case.sizes.batch, case.num_heads, *case.sizes.lengths
    pairs = ((ones, zeros), (zeros, ones))
    biases = [
        bias_of(dataclasses.replace(case_rules(case, past), future_slopes=future), *shape) for past, future in pairs
    ]
    return tuple(np.where(np.isfinite(x), -x, 0) for x in biases)


def _moved(share: float, problem: Attention, cotangent: np.ndarray, distances: np.ndarray) -> dict[str, Any]:
    """Return by how much gradients may move where this share of each row's weight is left out, at most.

    The weights of a row then move by ``2 * share`` together. With ``D`` the largest gradient of a weight, a product
    ``w * d`` moves by ``2 * share * D`` along the row, their mean by as much, and the mean times ``w`` by twice that.
    """
    sizes = np.abs(np.einsum("bhid,bhjd->bhij", cotangent, problem.values))
    sizes = np.where(np.isfinite(problem.bias), sizes, 0).max(axis=-1)  # [batch, heads, q_len]
    scores = 6.1 * share * sizes[..., None]

    def of_group(x: np.ndarray) -> np.ndarray:
        return x.reshape(x.shape[0], -1, problem.group, *x.shape[2:]).sum(axis=2)

    return {
        "query": problem.scale * scores * np.abs(problem.keys).max(axis=2, keepdims=True),
        "key": problem.scale * of_group((scores * np.abs(problem.query)).sum(axis=2, keepdims=True)),
        "value": of_group(2.1 * share * np.abs(cotangent).sum(axis=2, keepdims=True)),
        "slopes": (scores[..., 0] * distances.max(axis=-1)).sum(axis=-1),
    }


# --- What JAX says --------------------------------------------------------------------------------------------------


def placed(value: Any) -> Any:
    """Return NumPy arrays as JAX's; of a tuple, each."""
    return jax.tree.map(lambda x: JAX.array(x) if isinstance(x, np.ndarray) else x, value)


def _split(arguments: dict[str, Any]) -> tuple[dict[str, Any], tuple[tuple[str, Any], ...]]:
    """Return arguments that may be traced, and the others."""
    arrays = {name: placed(x) for name, x in arguments.items() if isinstance(x, (np.ndarray, tuple))}
    return arrays, tuple((name, x) for name, x in arguments.items() if name not in arrays)


def tensors_of(case: Case, dtype: str) -> dict[str, jax.Array]:
    """Return the inputs that have gradients, length first."""
    tensors = {name: JAX.array(np.swapaxes(case.arrays[name], 1, 2), dtype) for name in TENSORS}
    tensors["slopes"] = JAX.array(case.arrays["slopes"])
    if "future_slopes" in case.arguments:
        tensors["future_slopes"] = JAX.array(case.arguments["future_slopes"])
    return tensors


@functools.partial(jax.jit, static_argnames=("rest",))
def _result_and_gradients(tensors: Any, arrays: Any, cotangent: Any, rest: Any) -> Any:
    def attend(tensors: Any) -> jax.Array:
        return alibi_jax.attention(**tensors, **arrays, **dict(rest))

    result, pull = jax.vjp(attend, tensors)
    return result, pull(cotangent)[0]


def computed(
    case: Case, dtype: str = "float32", *, tolerance: float | None = None, implementation: Any = INTERPRETED
) -> dict[str, np.ndarray]:
    """Return the result and all gradients as the oracle lays them out, float64."""
    arguments = {name: x for name, x in case.arguments.items() if name != "future_slopes"}
    arrays, rest = _split(arguments)
    rest += (("tolerance", tolerance), ("implementation", implementation), ("scale", case.scale))
    cotangent = JAX.array(np.swapaxes(case.arrays["cotangent"], 1, 2), dtype)
    result, gradients = _result_and_gradients(tensors_of(case, dtype), arrays, cotangent, rest)
    assert result.dtype == dtype
    found = {"result": result} | gradients
    return {name: JAX.numpy(x) if "slopes" in name else np.swapaxes(JAX.numpy(x), 1, 2) for name, x in found.items()}


def assert_exact(case: Case, dtype: str = "float32", *, tolerance: float | None = None) -> dict[str, np.ndarray]:
    """Assert that result and gradients are exact to rounding, and to the tolerance."""
    found = computed(case, dtype, tolerance=tolerance)
    share = UNIT_ROUNDOFF[dtype] if tolerance is None else tolerance
    for name, answer in answers(case, dtype, share).items():
        try:
            assert_within(found[name], answer)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None
    return found


# --- What the kernels are called with -------------------------------------------------------------------------------


class Plan(NamedTuple):
    """What the kernels of a case are built for and called with."""

    shape: KernelShape
    inputs: Inputs
    needed: Needed
    turned: jax.Array  # the table, from the keys' side


def planned(case: Case, dtype: str = "float32", *, tolerance: float | None = None, options: TPU = INTERPRETED) -> Plan:
    tensors = tensors_of(case, dtype)
    arguments = {name: placed(x) for name, x in case.arguments.items()} | {"scale": case.scale}
    query, key, value, slopes = (tensors[name] for name in (*TENSORS, "slopes"))
    call = AttentionCall.check(query, key, value, slopes, **arguments, tolerance=tolerance, layout=LENGTH_FIRST, xp=jnp)
    rules, operands = take_apart(call, query, key, value)
    return Plan(KernelShape.of(rules, operands, options), *_inputs(rules, operands, options))


@functools.partial(jax.jit, static_argnums=(0, 2))
def _inputs(rules: Rules, operands: Operands, options: TPU) -> Any:
    shape = KernelShape.of(rules, operands, options)
    inputs = inputs_of(rules, operands, shape)
    return inputs, needed_keys(rules, operands, shape.q_block, shape.kv_block), queries_of_keys(inputs.table, shape)


def ranges_of(inputs: Inputs, shape: KernelShape) -> np.ndarray:
    """Return the blocks of keys that blocks of queries visit: ``[batch * num_heads, q_blocks, 2]``."""
    table = np.asarray(inputs.table)[:, 0, : 3 * shape.q_blocks]
    return table.reshape(-1, shape.q_blocks, 3)[..., :2]
