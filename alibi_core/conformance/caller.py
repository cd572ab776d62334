"""Calls to an adapter: conversion of arrays, and checks for side effects."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from alibi_core.conformance.adapter import Offer
from alibi_core.conformance.case import Case
from alibi_core.conformance.oracle import Answer, rounded
from alibi_core.conformance.reference import TENSORS, Values

MASKED = -30_000.0  # a bias at or below this counts as -inf; the lowest float16 is -65504
GRADIENTS = (*TENSORS, "slopes", "future_slopes", "log_gates")


class CallError(Exception):
    """A call without a usable result.

    ``kind`` is ``"refused"`` if it raised NotImplementedError, TypeError or ValueError, which mean that something is
    not offered; ``"crashed"`` if it raised anything else; ``"returned"`` if its result was unusable. ``inputs``
    describes the arguments of the call.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind, self.inputs = kind, ""


@dataclass(eq=False)
class DepartureError(AssertionError):
    """A wrong result: the function, its inputs, the actual and the exact result."""

    function: str
    inputs: str  # in words
    actual: Values
    expected: Answer
    case: Case | None = None
    part: str = ""  # name of the gradient, or a range of tokens
    remark: str = ""  # text for the message in place of "outside its budget"

    def __str__(self) -> str:
        return self.remark or "outside its budget"


@dataclass
class Caller:
    """Calls an adapter's functions with NumPy arrays and returns float64.

    ``offences`` lists side effects and wrong types beside correct results, one sentence each. With ``tokens_first``
    tensors are views of ``[batch, length, heads, head_dim]`` with axes 1 and 2 swapped.
    """

    offer: Offer
    tokens_first: bool = False
    offences: dict[str, str] = field(default_factory=dict)
    calls: int = 0
    _last: tuple[str, Values, Values] | None = None  # the last result, and a copy of it

    # --- The five functions ---

    def slopes(self, num_heads: int) -> Values:
        """Return the adapter's slopes, ``[num_heads]``."""
        return self._array("slopes", self._call("slopes", num_heads), (num_heads,))

    def bias(self, num_heads: int, q_len: int, kv_len: int, is_causal: bool) -> Values:
        """Return the adapter's bias, ``[num_heads, q_len, kv_len]``, -inf where it masks."""
        known = {"is_causal": is_causal} if self.offer.takes("bias", "is_causal") else {}
        shape = (num_heads, q_len, kv_len)
        result = self._array("bias", self._call("bias", *shape, **known), shape)
        return np.where(result <= MASKED, -np.inf, result)

    def attention(self, case: Case) -> Values:
        """Return the adapter's output for a case, ``[batch, num_heads, q_len, head_dim]``."""
        tensors = self._tensors(case.arrays)
        result = self._call("attention", *tensors, **self._arguments("attention", case))
        return self._array("attention", result, tensors[0].shape)

    def gradients(self, case: Case) -> dict[str, Values]:
        """Return the gradients that the adapter returns for a case, by name."""
        options = self._arguments("attention_grad", case) | {"grad_output": self.tensor(case.arrays["cotangent"])}
        options |= {} if case.wrt is None else {"wrt": case.wrt}
        result = self._call("attention_grad", *self._tensors(case.arrays), **options)
        if isinstance(result, tuple | list):  # in the order of wrt, or of the parameters
            taken = [name for name in GRADIENTS if self.offer.takes("attention_grad", name)]
            result = dict(zip(case.wrt or taken, result, strict=False))
        if not isinstance(result, Mapping):
            what = type(result).__name__
            raise CallError("returned", f"attention_grad returned {what}, expected a dict or a tuple of arrays")
        inputs = case.arrays | case.arguments
        return {
            name: self._array(f"attention_grad's {name}", result[name], np.shape(inputs[name]))
            for name in GRADIENTS
            if name in inputs and result.get(name) is not None
        }

    def decode_step(self, tensors: Mapping[str, Values], slopes: Values, cache: Any) -> tuple[Values, Any]:
        """Return the adapter's output for the next tokens, and its updated cache."""
        options = {"slopes": self._wide(slopes)} if self.offer.takes("decode_step", "slopes") else {}
        result = self._call("decode_step", *self._tensors(tensors), **options, cache=cache)
        if not isinstance(result, tuple | list) or len(result) != 2:
            what = type(result).__name__
            raise CallError("returned", f"decode_step returned {what}, expected a tuple (output, cache)")
        return self._array("decode_step", result[0], tensors["query"].shape), result[1]

    # --- Arrays in ---

    def tensor(self, values: Values) -> Values:
        """Return values as an array of the adapter's dtype."""
        own = {"float64": np.float64, "float16": np.float16}.get(self.offer.dtype, np.float32)
        made = rounded(values, self.offer.dtype).astype(own)
        return made.swapaxes(1, 2).copy().swapaxes(1, 2) if self.tokens_first else made

    def _tensors(self, arrays: Mapping[str, Values]) -> list[Values]:
        return [self.tensor(arrays[name]) for name in TENSORS]

    def _wide(self, values: Values) -> Values:
        """Return slopes or gates as float32, or float64 for a float64 adapter."""
        return np.asarray(values, np.float64 if self.offer.dtype == "float64" else np.float32)

    def _arguments(self, function: str, case: Case) -> dict[str, Any]:
        """Return the arguments of a case; base arguments only if the function takes them."""
        q_len, kv_len = case.sizes.lengths
        base: dict[str, Any] = {"q_offset": kv_len - q_len, "is_causal": True, "slopes": case.arrays["slopes"]}
        options = base | case.arguments
        options |= {name: self._wide(x) for name, x in options.items() if name in GRADIENTS}
        if "segment_ids" in options:
            options["segment_ids"] = case.segment_ids
        if "mask" in options:
            options["mask"] = options["mask"].reshape((1,) * (4 - options["mask"].ndim) + options["mask"].shape)
        return {name: x for name, x in options.items() if name not in base or self.offer.takes(function, name)}

    # --- Results out ---

    def _array(self, name: str, result: Any, shape: tuple[int, ...]) -> Values:
        if not isinstance(result, np.ndarray):
            raise CallError("returned", f"{name} returned {type(result).__name__}, expected a NumPy array")
        if result.shape != shape:
            if len(shape) == 4 and result.shape == (shape[0], shape[2], shape[1], shape[3]):
                axes = "[batch, length, heads, head_dim], expected [batch, heads, length, head_dim]"
                raise CallError("returned", f"{name} returned {axes}")  # without sizes: the same words for all cases
            raise CallError("returned", f"{name} returned shape {result.shape}, expected {shape}")
        own, found = self.offer.dtype, result.dtype.name  # the name has no byte order
        expected = (own,) if own in ("float32", "float64") else (own, "float32")
        sentence = f"{name} returned {found}, expected {' or '.join(expected)}"
        if found not in ("float16", "bfloat16", "float32", "float64"):
            raise CallError("returned", sentence)
        if found not in expected:
            self.offences.setdefault(f"{name} dtype", sentence)
        return result.astype(np.float64)

    # --- The call ---

    def _call(self, name: str, *arrays: Any, **options: Any) -> Any:
        self.calls += 1
        inputs = {**dict(zip(TENSORS, arrays, strict=False)), **options}
        before = {key: _copies(x) for key, x in inputs.items() if key != "cache"}
        try:
            with np.errstate(all="ignore"):  # only results count; OpenBLAS raises flags for unused vector lanes
                result = self.offer.functions[name](*arrays, **options)
        except (Exception, SystemExit) as error:
            kind = "refused" if isinstance(error, NotImplementedError | TypeError | ValueError) else "crashed"
            words = (str(error).strip().splitlines() or ["(no message)"])[0][:200]
            raise CallError(kind, f"{name} raised {type(error).__name__}: {words}") from error
        if self._last is not None and not _are_equal(self._last[1], self._last[2]):
            self.offences.setdefault(f"{name} buffer", f"the next call overwrote what {self._last[0]} returned")
        self._last = (name, result, result.copy()) if isinstance(result, np.ndarray) else None
        if changed := [key for key, x in before.items() if not all(map(_are_equal, _copies(inputs[key]), x))]:
            self.offences.setdefault(f"{name} inputs", f"{name} changed its input {' and '.join(changed)}")
        return result


def decoded(
    caller: Any, cases: Sequence[Case], steps: Sequence[Sequence[int]], *, shares_first: bool = False
) -> Iterator[tuple[int, int, int, Values, Sequence[int]]]:
    """Decode several sequences in turn, each in steps of the given numbers of tokens.

    Yields, for each step, the index of the sequence, the first and the last + 1 of its new tokens, their output, and
    the lengths of its steps so far. With ``shares_first`` all sequences continue from the first one's first step.
    """
    caches: list[Any] = [None] * len(cases)
    for turn, number in itertools.product(range(max(map(len, steps))), range(len(cases))):
        case, own = cases[number], steps[number][: turn + 1]
        if len(own) <= turn:
            continue
        if shares_first and turn == 0 and number > 0:
            caches[number] = caches[0]
            continue
        start, end = sum(own[:-1]), sum(own)
        tensors = {name: case.arrays[name][:, :, start:end] for name in TENSORS}
        output, caches[number] = caller.decode_step(tensors, case.arrays["slopes"], caches[number])
        yield number, start, end, output, own


def _copies(value: Any) -> list[Values]:
    return [np.array(x) for x in (value if isinstance(value, tuple) else (value,))]


def _are_equal(one: Values, other: Values) -> bool:
    return one.dtype == other.dtype and np.array_equal(one, other, equal_nan=one.dtype.kind == "f")
