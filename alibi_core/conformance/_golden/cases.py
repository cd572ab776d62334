"""What golden files hold: slopes, biases, attention and decoding, in one list of cases."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

import alibi_core
from alibi_core._slopes import slope_values
from alibi_core.conformance._cases import SMALLEST, U32, UNIT_ROUNDOFF, Sizes, Values, penalties
from alibi_core.conformance._golden.exact import DTYPES, Expected, attention_results
from alibi_core.conformance._golden.problems import Problem
from alibi_core.conformance._golden.tables import ATTENTION, BIASES, DECODES

MOST_HEADS = 128

# By case: the rule, as scheme and contract, and how far slopes may be off, in units of roundoff. A power is off by a
# unit in the last place or so, and storing it by another. Exponents that are not dyadic are rounded before, by their
# size times ln 2: at most 5.55. A linear slope is a sum of two rounded numbers, one of them a product of two.
_RULES = {
    "canonical": ("canonical", "exact", 4),
    "geometric": ("geometric", "exact", 10),
    "linear": ("linear", "exact", 6),
    "bloom": ("canonical", "bloom", 4),
    "falcon": ("canonical", "falcon", 4),
    "mpt": ("canonical", "mpt", 4),
}
_KEY_ONLY = {"bloom": (12, 40), "falcon": (8, 300), "mpt": (12, 40)}  # heads and keys of these contracts' biases


@dataclass(frozen=True)
class GoldenCase:
    """One case: what to compute, from what, and what it should be.

    Attributes:
        name: ``KIND/NAME``, with which the names of its tensors begin.
        description: What it is, in words.
        features: What an implementation must offer to be held to it.
        default_slopes: Whether its slopes are those that its heads have by default.
        arguments: Those that are no arrays.
        inputs: Those that are, by name.
        expected: By name.
    """

    name: str
    description: str
    features: list[str]
    default_slopes: bool
    arguments: dict[str, Any]
    inputs: dict[str, Values]
    expected: dict[str, Expected]

    @property
    def kind(self) -> str:
        """slopes, bias, attention or decode."""
        return self.name.split("/")[0]


def golden_cases() -> Iterator[GoldenCase]:
    """Yield every case."""
    yield from _slopes()
    yield from (_bias(problem) for problem in BIASES)
    yield from _contract_biases()
    yield from (_attention(problem) for problem in ATTENTION)
    yield from (_decode(problem, steps) for problem, steps in DECODES)


def _slopes() -> Iterator[GoldenCase]:
    for name, (scheme, contract, units) in _RULES.items():
        rows = [slope_values(n, scheme=scheme, contract=contract) for n in range(1, MOST_HEADS + 1)]
        is_exact = contract in ("exact", "geometric")  # the others are float32's by definition
        budgets = {x: (units * _roundoff(x, is_exact) + _storage(x), SMALLEST[x]) for x in DTYPES}
        yield GoldenCase(
            name=f"slopes/{name}",
            description=f"the slopes of 1, 2, ... {MOST_HEADS} heads, one after the other: those of n heads are "
            "elements n (n - 1) / 2 up to, not including, n (n + 1) / 2",
            features=[],
            default_slopes=name == "canonical",
            arguments={"scheme": scheme, "contract": contract, "most_heads": MOST_HEADS},
            inputs={},
            expected={"slopes": Expected(np.concatenate(rows), dict(budgets))},
        )


def _bias(problem: Problem) -> GoldenCase:
    bias = penalties(problem.rules, problem.sizes.batch, problem.num_heads, *problem.sizes.lengths)
    budgets = {x: (_roundoff(x) + _storage(x), SMALLEST[x]) for x in DTYPES}
    return _case("bias", problem, {"bias": Expected(bias + 0.0, dict(budgets))}, contract="exact")


def _contract_biases() -> Iterator[GoldenCase]:
    for contract, (num_heads, kv_len) in _KEY_ONLY.items():
        bias = alibi_core.bias(num_heads, 5, kv_len, contract=contract)[None].astype(np.float64)
        problem = Problem(
            contract,
            f"the bias of {contract}'s checkpoints, as alibi_core.bias documents it",
            Sizes(1, num_heads, 1, (5, kv_len), 1),
            slopes=tuple(slope_values(num_heads, contract=contract)),
        )
        budgets = {x: ((_RULES[contract][2] + 1) * _roundoff(x, False) + _storage(x), SMALLEST[x]) for x in DTYPES}
        case = _case("bias", problem, {"bias": Expected(bias, dict(budgets))}, contract=contract)
        yield GoldenCase(**{**vars(case), "default_slopes": True})


def _attention(problem: Problem) -> GoldenCase:
    tensors = {"cotangent" if name == "grad_output" else name: x for name, x in problem.tensors.items()}
    expected = attention_results(tensors, problem.rules, problem.resolved_scale, reach=_reach(problem))
    return _case("attention", problem, expected, problem.tensors)


def _decode(problem: Problem, steps: tuple[int, ...]) -> GoldenCase:
    tensors = {name: x for name, x in problem.tensors.items() if name != "grad_output"}
    expected = attention_results(tensors, problem.rules, problem.resolved_scale, reach=_reach(problem))
    return _case("decode", problem, expected, tensors, steps=list(steps))


def _reach(problem: Problem) -> Values | None:
    """Return how large a bias may be: where positions are not far, it may be counted from any token of the row."""
    far = "far" in problem.features
    return None if far else problem.rules.reach(problem.sizes.batch, problem.num_heads, *problem.sizes.lengths)


def _case(
    kind: str, problem: Problem, expected: dict[str, Expected], tensors: dict[str, Values] | None = None, **further: Any
) -> GoldenCase:
    size, (q_len, kv_len) = problem.sizes, problem.sizes.lengths
    arguments: dict[str, Any] = {
        "is_causal": problem.is_causal,
        "q_offset": kv_len - q_len if problem.q_offset is None else problem.q_offset,
        "window_size": problem.window_size,
        "batch": size.batch,
        "num_heads": problem.num_heads,
        "q_len": q_len,
        "kv_len": kv_len,
    }
    if isinstance(problem.q_offset, tuple):
        arguments["q_offset"] = None  # an input
    if tensors is not None:
        arguments |= {"num_kv_heads": size.num_kv_heads, "head_dim": size.head_dim, "scale": problem.resolved_scale}
    return GoldenCase(
        name=f"{kind}/{problem.name}",
        description=problem.description,
        # A bias says nothing of a query that may look nowhere but that it may not.
        features=[x for x in problem.features if x != "nowhere" or kind != "bias"],
        default_slopes=problem.has_default_slopes,
        arguments=arguments | further,
        inputs=(tensors or {}) | problem.options,
        expected=expected,
    )


def _roundoff(dtype: str, is_exact: bool = True) -> float:
    """Return the unit roundoff of what is computed before it is stored: float64's only where that is meant."""
    return UNIT_ROUNDOFF["float64"] if dtype == "float64" and is_exact else U32


def _storage(dtype: str) -> float:
    """Return the unit roundoff of storing what was computed in float32."""
    return UNIT_ROUNDOFF[dtype] if dtype in ("float16", "bfloat16") else 0.0
