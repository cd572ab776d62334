"""Results of an adapter, written for the check against golden vectors."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from alibi_core._slopes import slope_values
from alibi_core.conformance._adapter import Offer
from alibi_core.conformance._cases import Case, Sizes, Values
from alibi_core.conformance._golden.cases import GoldenCase
from alibi_core.conformance._golden.check import RESULTS_FORMAT, RESULTS_INDEX, RESULTS_VERSION
from alibi_core.conformance._golden.files import GoldenError, json_bytes, safetensors_bytes
from alibi_core.conformance._golden.set import GOLDEN_VERSION, read_golden
from alibi_core.conformance._trial import TENSORS, Caller, CallError

_FILE = "results.safetensors"


def golden_results(adapter: Any, directory: str | Path, results: str | Path, *, time_limit: float = 60.0) -> Path:
    """Compute the golden vectors' cases with an adapter and write what comes of it, for :func:`check_golden`.

    Cases that use features which the adapter does not offer are left out. If it declares none, those are left out too
    that use any and for which a call raises. Any other call that comes to nothing is written down as a failure.

    Args:
        adapter: An object as :class:`Adapter` describes it.
        directory: Golden vectors.
        results: Where to write. It is made; if it is there, it must be empty or hold results and nothing else.
        time_limit: Seconds that one call may take.

    Returns:
        ``results``.

    Raises:
        GoldenError: If the golden vectors cannot be used, or ``results`` holds anything else.
        TypeError, ValueError: If the adapter is none.

    Example:
        :func:`check_golden` shows the whole way. What offers no function at all is refused at once:

        >>> try:
        ...     golden_results(object, "golden", "results")
        ... except TypeError as error:
        ...     print(str(error).partition(", got")[0])
        adapter must have one of the functions slopes, bias, attention, attention_grad, decode_step
    """
    offer, results = Offer.of(adapter), Path(results)
    cases = read_golden(directory)
    if results.exists() and not results.is_dir():
        raise GoldenError(f"{results}: must be a directory")
    others = {path.name for path in results.iterdir()} - {_FILE, RESULTS_INDEX} if results.exists() else set()
    others |= {name for name in (_FILE, RESULTS_INDEX) if (results / name).is_symlink()}
    if others:
        raise GoldenError(f"{results}: must be empty or hold results and nothing else, but has {min(others)!r}")
    run = _Run(offer, Caller(offer, time_limit))
    try:
        for case in cases:
            run.compute(case)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # What the adapter raises is a CallError by now. No digest guards the index, where these numbers are from.
        raise GoldenError(f"{directory}: {case.name!r} is not as its kind must be, {type(error).__name__}") from error
    finally:
        run.caller.close()
    metadata = {"format": RESULTS_FORMAT, "version": str(RESULTS_VERSION)}
    index = {
        "format": RESULTS_FORMAT,
        "version": RESULTS_VERSION,
        "golden_version": GOLDEN_VERSION,
        "program": offer.name,
        "dtype": offer.dtype,
        "files": [_FILE],
        "failures": run.failures,
    }
    results.mkdir(parents=True, exist_ok=True)
    (results / _FILE).write_bytes(safetensors_bytes(run.tensors, metadata))
    (results / RESULTS_INDEX).write_bytes(json_bytes(index))
    return results


@dataclass
class _Run:
    """One adapter's way through all cases."""

    offer: Offer
    caller: Caller
    tensors: dict[str, Values] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def compute(self, case: GoldenCase) -> None:
        """Compute what the adapter offers of a case."""
        parts = {
            "slopes": [self._slopes],
            "bias": [self._bias],
            "attention": [self._attention, self._gradients],
            "decode": [self._decode],
        }
        if not self.offer.possible.issuperset(case.features):
            return
        for part in parts.get(case.kind, []):
            try:
                found = part(case)
            except CallError as error:
                if self.offer.declared is not None or not case.features or error.kind != "raised":
                    self.failures.setdefault(case.name, str(error))
                continue
            known = {name: array for name, array in found.items() if name in case.expected}
            self.tensors |= {case.expected[name].tensor: array for name, array in known.items()}

    def _slopes(self, case: GoldenCase) -> dict[str, Values]:
        own = "canonical" if self.offer.contract == "exact" else self.offer.contract
        if "slopes" not in self.offer.functions or case.name != f"slopes/{own}":
            return {}
        most_heads = case.arguments["most_heads"]
        if most_heads * (most_heads + 1) // 2 != case.expected["slopes"].value.size:
            raise ValueError(f"most_heads must be that of the slopes, got {most_heads}")
        return {"slopes": np.concatenate([self.caller.slopes(n) for n in range(1, most_heads + 1)])}

    def _bias(self, case: GoldenCase) -> dict[str, Values]:
        known = case.arguments
        contracts = {known["contract"], self.offer.contract}
        is_own = (len(contracts) == 1 or contracts == {"exact", "geometric"}) and self._has_own_slopes(case)
        is_plain = known["q_offset"] == known["kv_len"] - known["q_len"] and set(case.features) <= {
            "lengths",
            "symmetric",
        }
        if "bias" not in self.offer.functions or not (is_own and is_plain):
            return {}
        return {"bias": self.caller.bias(*(known[x] for x in ("num_heads", "q_len", "kv_len", "is_causal")))[None]}

    def _attention(self, case: GoldenCase) -> dict[str, Values]:
        return {"output": self.caller.attention(problem_of(case))} if self._offers("attention", case) else {}

    def _gradients(self, case: GoldenCase) -> dict[str, Values]:
        if not self._offers("attention_grad", case):
            return {}
        gradients = self.caller.gradients(problem_of(case))
        if not self.offer.takes("attention_grad", "slopes") or "slope_gradients" not in self.offer.possible:
            gradients = {name: x for name, x in gradients.items() if name in TENSORS}
        return {f"gradient/{name}": x for name, x in gradients.items()}

    def _decode(self, case: GoldenCase) -> dict[str, Values]:
        if not self._offers("decode_step", case):
            return {}
        steps = self.caller.decoded([problem_of(case)], [case.arguments["steps"]])
        return {"output": np.concatenate([x.output for x in steps], axis=2)}

    def _offers(self, function: str, case: GoldenCase) -> bool:
        """Return whether the adapter has a function, and takes the slopes or has them."""
        if function not in self.offer.functions:
            return False
        if self.offer.takes(function, "slopes"):
            return True
        return self.offer.contract != "falcon" and self._has_own_slopes(case)  # Falcon's models scale the bias, too

    def _has_own_slopes(self, case: GoldenCase) -> bool:
        """Return whether the slopes are those that the adapter has, to the last bit."""
        own = slope_values(case.arguments["num_heads"], contract=self.offer.contract)
        return bool(case.inputs["slopes"].tolist() == own)


def problem_of(case: GoldenCase) -> Case:
    """Return the case as the kit's caller takes it."""
    known, inputs = case.arguments, case.inputs
    lengths = known["q_len"], known["kv_len"]
    heads, kv_heads = known["num_heads"], known["num_kv_heads"]
    arguments: dict[str, Any] = {} if known["is_causal"] else {"is_causal": False}
    if known["q_offset"] != lengths[1] - lengths[0]:
        arguments["q_offset"] = inputs.get("q_offset", known["q_offset"])
    if known["window_size"] is not None:
        arguments["window_size"] = known["window_size"]
    if "scale" in case.features:
        arguments["scale"] = known["scale"]
    if "q_segment_ids" in inputs:
        arguments["segment_ids"] = inputs["q_segment_ids"], inputs["kv_segment_ids"]
    arguments |= {name: inputs[name] for name in ("future_slopes", "mask") if name in inputs}
    arrays = {name: inputs[name] for name in (*TENSORS, "slopes")}
    arrays["cotangent"] = inputs.get("grad_output", inputs["query"])  # of decoding, nobody asks for gradients
    form = "causal" if known["is_causal"] else "symmetric"
    sizes = Sizes(known["batch"], kv_heads, heads // kv_heads, lengths, known["head_dim"])
    described = Case(sizes, slopes_per_batch=inputs["slopes"].ndim == 2, scaling=arguments.get("scale"))
    return described.with_arguments(form, arguments).with_arrays(**arrays)
