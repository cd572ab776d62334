"""A differential fuzz of gradients, compiled as users compile them: ``python -m tests.fuzz --minutes 20``.

Each problem draws a framework, a call, a dtype, the arguments whose gradients are asked for and the shape of the loss,
and holds every gradient to the float64 oracle of the conformance kit within its budget. A compiler sees constants where
a user's program has constants: in a loss that is a sum or a mean, and in arrays that a function closes over.

A failure prints the problem's number: ``--seed NUMBER --count 1`` repeats it.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import gc
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from alibi_core.conformance.testing import COTANGENTS, DATA, FAR, FORMS, PER_BATCH, UNIT_ROUNDOFF, Answer, Case, Sizes
from tests.support.frameworks import FRAMEWORK, Backend

TENSORS = ("query", "key", "value")
# Lengths at which an implementation may change its way, and one more and one less of each.
THRESHOLDS = (2, 8, 16, 32, 64, 128, 256, 512, 1024, 1280, 2000)
SCORES = 6_000_000  # batch * heads * q_len * kv_len, at most: the oracle holds some twenty arrays of that size
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Problem:
    """One gradient that a user may ask for."""

    case: Case  # the call, the arguments whose gradients are asked for, and the loss
    dtype: str
    compiled: bool
    closed_over: bool  # whether arguments without gradients are constants of the program
    keeps_result: bool  # whether the result is returned beside the gradients

    def __str__(self) -> str:
        how = [self.dtype, "compiled" if self.compiled else "eager"]
        how += ["closed over"] * self.closed_over + ["with the result"] * self.keeps_result
        return f"{'; '.join(how)}; {self.case}"

    @classmethod
    def drawn(cls, seed: int, *, compiled: float) -> Problem:
        """Return problem number ``seed``; a share ``compiled`` of problems is compiled."""
        rng = np.random.default_rng(seed)
        case = _case(rng, seed)
        names = [*TENSORS, "slopes", *(["future_slopes"] if case.form == "asymmetric" else [])]
        wrt = tuple(name for name in names if rng.random() < 0.4) or (str(rng.choice(TENSORS)),)
        return cls(
            dataclasses.replace(case, wrt=wrt, cotangent=str(rng.choice(COTANGENTS))),
            dtype=str(rng.choice(DTYPES, p=(0.6, 0.25, 0.15))),
            compiled=bool(rng.random() < compiled),
            closed_over=bool(rng.random() < 0.3),
            keeps_result=bool(rng.random() < 0.3),
        )

    def loss(self, result: Any, weight: Any, layout: Any) -> Any:
        """Return a loss whose gradient by the result is the case's cotangent, ``weight``, in any framework."""
        if self.case.cotangent in ("ones", "zeros"):
            return result.sum() if self.case.cotangent == "ones" else (result * 0.0).sum()
        batch, heads, row, feature = (n // 2 for n in self.case.arrays["cotangent"].shape)
        if self.case.cotangent == "one row":
            at_row = (slice(None), row) if layout else (slice(None), slice(None), row)
            return (result[at_row] * weight[at_row]).sum()
        if self.case.cotangent == "one element":
            element = (batch, row, heads, feature) if layout else (batch, heads, row, feature)
            return result[element] * weight[element]
        return (result * weight).sum()

    def exact(self) -> dict[str, Answer]:
        """Return the exact gradients, and the exact result, each with its budget."""
        problem, share = self.case.exact(self.dtype), UNIT_ROUNDOFF[self.dtype]
        gradients = self.case.gradients(self.dtype, share, problem=problem)
        gradients["result"] = problem.output_without(share)
        return {name: gradients[name] for name in (*(self.case.wrt or ()), *["result"] * self.keeps_result)}


def _case(rng: np.random.Generator, seed: int) -> Case:
    while True:
        q_len = max(1, int(rng.choice(THRESHOLDS)) + int(rng.integers(-1, 2)))
        q_len = int(np.exp(rng.uniform(0, np.log(2000)))) if rng.random() < 0.3 else q_len
        kv_len = q_len if rng.random() < 0.8 else max(1, int(np.exp(rng.uniform(0, np.log(2000)))))
        batch, kv_heads, group = (int(rng.choice([1, 1, 2, 3])) for _ in range(3))
        if batch * kv_heads * group * q_len * kv_len <= SCORES:
            break

    def sometimes(share: float, values: tuple[Any, ...]) -> Any:
        return values[rng.integers(len(values))] if rng.random() < share else None

    return Case(
        Sizes(batch, kv_heads, group, (q_len, kv_len), int(rng.choice([1, 3, 16, 32, 64]))),
        form=str(rng.choice(["causal", *FORMS])),
        q_offset=sometimes(0.15, (-3, 0, 5, 40, FAR, PER_BATCH)),
        window_size=sometimes(0.15, (0, 1, 7, 100, 700)),
        packing=sometimes(0.15, ("same", "pair", "one row")),
        masking=sometimes(0.15, ("by query", "by key", "by head", "padding")),
        slopes_per_batch=bool(rng.random() < 0.3),
        seed=seed,
        data="normal" if rng.random() < 0.7 else str(rng.choice(sorted(DATA))),
        scaling=sometimes(0.1, (0.25, 1.0, 2.0**-5)),
    )


# --- Frameworks -------------------------------------------------------------------------------------------------------


def gradients_of(problem: Problem, backend: Backend) -> dict[str, np.ndarray]:
    """Return the gradients that a problem asks for, and the result where it is kept."""
    case, arguments, framework = problem.case, dict(problem.case.arguments), backend.framework
    slopes = {"slopes": case.arrays["slopes"]}
    if "future_slopes" in arguments:
        slopes["future_slopes"] = arguments.pop("future_slopes")
    tensors = {name: case.arrays[name] for name in TENSORS} | {"weight": case.arrays["cotangent"]}
    arrays = {name: framework.array(backend.layout(x), problem.dtype) for name, x in tensors.items()}
    arrays |= {name: framework.array(np.array(x), "float32") for name, x in slopes.items()}
    attention = backend.function(**framework.placed(arguments))
    asked = {name: arrays[name] for name in case.wrt or ()}
    fixed = {name: x for name, x in arrays.items() if name not in asked}

    def loss(asked: dict[str, Any], others: dict[str, Any]) -> tuple[Any, Any]:
        given = asked | (fixed if problem.closed_over else others)
        weight = given.pop("weight")
        result = attention(**given)
        return problem.loss(result, weight, backend.is_length_first), result

    gradients, result = DIFFERENTIATED[framework.name](problem, loss, asked, fixed)
    found = {**gradients, **({"result": result} if problem.keeps_result else {})}
    found = {name: framework.numpy(x) for name, x in found.items()}
    return {name: backend.layout(x) if x.ndim == 4 else x for name, x in found.items()}


def by_jax(problem: Problem, loss: Any, asked: dict[str, Any], fixed: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    import jax

    function = jax.grad(loss, has_aux=True) if problem.keeps_result else jax.grad(lambda *x: loss(*x)[0])
    found = (jax.jit(function) if problem.compiled else function)(asked, fixed)
    return found if problem.keeps_result else (found, None)


def by_torch(problem: Problem, loss: Any, asked: dict[str, Any], fixed: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    import torch

    asked = {name: x.requires_grad_() for name, x in asked.items()}
    if problem.compiled:
        torch._dynamo.reset()
    value, result = (torch.compile(loss) if problem.compiled else loss)(asked, fixed)
    return dict(zip(asked, torch.autograd.grad(value, list(asked.values())), strict=True)), result


def by_mlx(problem: Problem, loss: Any, asked: dict[str, Any], fixed: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    import mlx.core as mx

    mx.eval(*asked.values(), *fixed.values())  # mx.compile closes over no array that is yet to be computed
    function = mx.value_and_grad(loss)
    compiled = mx.compile(function) if problem.compiled else function
    (_, result), gradients = compiled(asked, {} if problem.closed_over else fixed)
    return gradients, result


DIFFERENTIATED = {"jax": by_jax, "torch": by_torch, "mlx": by_mlx}
# Programs take JAX seconds to compile, and PyTorch a minute.
COMPILED = {"jax": 0.8, "torch": 0.005, "mlx": 0.5}  # a share of problems


# --- The fuzz ---------------------------------------------------------------------------------------------------------


def departures(problem: Problem, backend: Backend) -> tuple[list[str], float]:
    """Return the errors of a backend's gradients, as sentences, and the largest error as a share of its budget."""
    exact, actual = problem.exact(), gradients_of(problem, backend)
    wrong, most = [], 0.0
    for name, answer in exact.items():
        distance = np.abs(actual[name] - answer.value)
        share = np.divide(distance, answer.budget, out=np.where(distance > 0, np.inf, 0.0), where=answer.budget > 0)
        used = np.inf if not np.isfinite(actual[name]).all() else float(share.max(initial=0))
        if not used <= 1:
            wrong.append(f"{name}: off by {distance.max():.3g}, {used:.3g} times its budget")
        most = max(most, used)
    return wrong, most


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--framework", choices=[*COMPILED, "all"], default="all")
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--count", type=int, help="how many problems, in place of minutes")
    parser.add_argument("--seed", type=int, default=0, help="of the first problem")
    options = parser.parse_args()
    names = list(COMPILED) if options.framework == "all" else [options.framework]
    counts, failures, most = collections.Counter[str](), 0, 0.0
    end, seed = time.monotonic() + 60 * options.minutes, options.seed
    while seed < options.seed + options.count if options.count else time.monotonic() < end:
        for name in names:
            problem = Problem.drawn(seed, compiled=COMPILED[name])
            try:
                wrong, used = departures(problem, Backend(FRAMEWORK[name], f"alibi_{name}", None))
            except Exception as error:  # an unexpected error is a finding; go on with the next problem
                wrong, used = [f"{type(error).__name__}: {str(error)[:300]}"], 0.0
            counts[name] += 1
            most = max(most, used)
            failures += bool(wrong)
            for sentence in wrong:
                print(f"WRONG {name} {seed}: {sentence}\n  {problem}", flush=True)
        seed += 1
        if seed % 50 == 0:
            print(f"{seed}: {dict(counts)}, {failures} wrong, at most {most:.2f} of a budget", flush=True)
            _forget_programs()
    print(f"seeds {options.seed} to {seed - 1}: {dict(counts)}, {failures} wrong, at most {most:.2f} of a budget")
    raise SystemExit(failures > 0)


def _forget_programs() -> None:
    """Let go of what was compiled: no problem comes twice."""
    import jax

    jax.clear_caches()
    gc.collect()


if __name__ == "__main__":
    main()
