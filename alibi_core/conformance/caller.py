"""Calls to an adapter: conversion of arrays, a time limit, and checks for side effects."""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from alibi_core.conformance.adapter import Offer
from alibi_core.conformance.case import Case
from alibi_core.conformance.oracle import Answer, rounded
from alibi_core.conformance.reference import TENSORS, Values

MASKED = -30_000.0  # a bias at or below this counts as -inf; the lowest float16 is -65504


class CallError(Exception):
    """A call without a usable result.

    ``kind`` is ``"refused"`` if it raised NotImplementedError, TypeError or ValueError, which mean that something is
    not offered; ``"crashed"`` if it raised anything else; ``"hung"`` if it did not return in time; ``"returned"`` if
    its result was unusable; ``"misshapen"`` if the wrong shape shows what was returned instead. ``inputs`` describes
    the arguments of the call.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind, self.inputs = kind, ""


@dataclass(eq=False)
class DepartureError(AssertionError):
    """A wrong result: the function, its inputs, the actual and the exact result."""

    function: str
    inputs: str  # in words
    actual: Values | None  # None if nothing was returned
    expected: Answer
    case: Case | None = None
    part: str = ""  # name of the gradient, or a range of tokens
    remark: str = ""  # text for the message in place of "outside its budget"

    def __str__(self) -> str:
        return self.remark or "outside its budget"


@dataclass
class Caller:
    """Calls an adapter's functions with NumPy arrays and returns float64.

    One thread makes all calls, so that a call that never returns can be abandoned. ``offences`` lists side effects and
    wrong types beside correct results, one sentence each.
    """

    offer: Offer
    time_limit: float
    offences: dict[str, str] = field(default_factory=dict)
    calls: int = 0
    hung: str = ""  # the call that never returned, if there is one
    _tasks: queue.SimpleQueue[Any] = field(default_factory=queue.SimpleQueue)
    _results: queue.SimpleQueue[Any] = field(default_factory=queue.SimpleQueue)
    _thread: threading.Thread | None = None
    _last: tuple[str, Values, list[Values]] | None = None  # the last result, and a copy of it
    _puts_tokens_first: bool = False

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
        shape, kv_len = case.arrays["query"].shape, case.sizes.lengths[1]
        result = self._call("attention", *self._tensors(case), **self._options(case))
        if isinstance(result, np.ndarray) and (slip := _slip_of_shape(result.shape, shape, kv_len)):
            raise CallError("misshapen", f"attention returned shape {result.shape}, expected {shape}: {slip}")
        return self._array("attention", result, shape)

    def gradients(self, case: Case) -> dict[str, Values]:
        """Return the gradients that the adapter returns for a case, by name."""
        options = self._options(case, "attention_grad")
        if case.wrt is not None:
            options["wrt"] = case.wrt
        options["grad_output"] = self.tensor(case.arrays["cotangent"])
        result = self._call("attention_grad", *self._tensors(case), **options)
        if not isinstance(result, Mapping):
            if not isinstance(result, (tuple, list)):
                what = type(result).__name__
                raise CallError("returned", f"attention_grad returned {what}, expected a dict or a tuple of arrays")
            # A tuple: in the order of wrt, or of the parameters.
            result = dict(zip(case.wrt or (*TENSORS, "slopes", "future_slopes"), result, strict=False))
        unknown = [str(name) for name in result if name not in (*TENSORS, "slopes", "future_slopes")]
        wanted = case.wrt or TENSORS
        if unknown and any(name not in result for name in wanted):
            names = f"{', '.join(unknown)}, expected {', '.join(wanted)}"
            raise CallError("returned", f"attention_grad returned gradients of {names}")
        shapes = {name: case.arrays[name].shape for name in (*TENSORS, "slopes")}
        shapes |= {name: np.shape(x) for name, x in case.arguments.items() if name == "future_slopes"}
        return {
            name: self._array(f"attention_grad's {name}", result[name], shape, slopes="slopes" in name)
            for name, shape in shapes.items()
            if result.get(name) is not None
        }

    def decode_step(self, tensors: Mapping[str, Values], slopes: Values, cache: Any) -> tuple[Values, Any]:
        """Return the adapter's output for the next tokens, and its updated cache."""
        arrays = [self.tensor(tensors[name]) for name in TENSORS]
        options = {"slopes": self.slopes_array(slopes)} if self.offer.takes("decode_step", "slopes") else {}
        result = self._call("decode_step", *arrays, **options, cache=cache)
        if not isinstance(result, (tuple, list)) or len(result) != 2:
            what = f"{type(result).__name__} of {len(result)}" if hasattr(result, "__len__") else type(result).__name__
            raise CallError("returned", f"decode_step returned {what}, expected a tuple (output, cache)")
        return self._array("decode_step", result[0], tensors["query"].shape), result[1]

    # --- Arrays in ---

    def tensor(self, values: Values) -> Values:
        """Return values as an array of the adapter's dtype."""
        own = {"float64": np.float64, "float16": np.float16}.get(self.offer.dtype, np.float32)
        made = rounded(values, self.offer.dtype).astype(own)
        return made.swapaxes(1, 2).copy().swapaxes(1, 2) if self._puts_tokens_first else made

    @contextlib.contextmanager
    def tokens_first(self) -> Iterator[None]:
        """Inside this context, tensors are views of ``[batch, length, heads, head_dim]`` with axes 1 and 2 swapped."""
        self._puts_tokens_first = True
        try:
            yield
        finally:
            self._puts_tokens_first = False

    def slopes_array(self, values: Values) -> Values:
        """Return slopes as float32, or float64 for a float64 adapter."""
        return np.asarray(values, np.float64 if self.offer.dtype == "float64" else np.float32)

    def _tensors(self, case: Case) -> list[Values]:
        return [self.tensor(case.arrays[name]) for name in TENSORS]

    def _options(self, case: Case, function: str = "attention") -> dict[str, Any]:
        q_len, kv_len = case.sizes.lengths
        # Always pass the base arguments; other arguments only in cases that need them.
        options = {"q_offset": kv_len - q_len, "is_causal": True} | case.arguments
        options["slopes"] = self.slopes_array(case.arrays["slopes"])
        if "future_slopes" in options:
            options["future_slopes"] = self.slopes_array(options["future_slopes"])
        if "segment_ids" in options:
            options["segment_ids"] = case.segment_ids
        if "mask" in options:
            options["mask"] = options["mask"].reshape((1,) * (4 - options["mask"].ndim) + options["mask"].shape)
        base = ("slopes", "is_causal", "q_offset")
        return {name: x for name, x in options.items() if name not in base or self.offer.takes(function, name)}

    # --- Results out ---

    def _array(self, name: str, result: Any, shape: tuple[int, ...], *, slopes: bool = False) -> Values:
        if not hasattr(result, "dtype") or not hasattr(result, "shape"):
            hint = {tuple: "; return the output alone", type(None): "; it lacks a return"}.get(type(result), "")
            raise CallError("returned", f"{name} returned {type(result).__name__}, expected a NumPy array{hint}")
        if not isinstance(result, np.ndarray):
            sentence = f"{name} returned {type(result).__name__}, expected a NumPy array; numpy.asarray makes one"
            self.offences.setdefault(f"{name} type", sentence)
        try:
            values, found = np.asarray(result), tuple(result.shape)
        except Exception as error:  # each library raises another error
            what = f"{type(result).__name__}, which NumPy cannot read"
            raise CallError("returned", f"{name} returned {what}: {_first_line(error)}") from None
        if found != shape:
            raise CallError("returned", f"{name} returned shape {found}, expected {shape}")
        dtype = values.dtype.name  # without the byte order
        is_rounded = name in ("attention", "decode_step") or "attention_grad" in name
        expected = self._dtypes(is_slopes=slopes or not is_rounded)
        if dtype not in ("float16", "bfloat16", "float32", "float64"):
            raise CallError("returned", f"{name} returned {dtype}, expected {' or '.join(expected)}")
        if dtype not in expected:
            sentence = f"{name} returned {dtype}, expected {' or '.join(expected)}"
            self.offences.setdefault(f"{name} dtype", sentence)
        return values.astype(np.float64)

    def _dtypes(self, *, is_slopes: bool) -> tuple[str, ...]:
        if is_slopes:  # float32 is right for biases and slopes, whatever the dtype of the tensors
            best = "float64" if self.offer.dtype == "float64" else "float32"
            return tuple(dict.fromkeys((best, self.offer.dtype)))
        own = {"float16": ("float16", "float32"), "bfloat16": ("float32", "bfloat16")}
        return own.get(self.offer.dtype, (self.offer.dtype,))

    # --- The call ---

    def _call(self, name: str, *arrays: Any, **options: Any) -> Any:
        # The thread is still busy with a call that never returned.
        if self.hung:
            raise CallError("hung", self.hung)
        self.calls += 1
        inputs = {**dict(zip(TENSORS, arrays, strict=False)), **options}
        inputs = {key: x for key, x in inputs.items() if key != "cache"}
        before = {key: _copies(x) for key, x in inputs.items()}
        # Some functions take arguments by position only.
        more, named = self.offer.arranged(name, options)
        result = self._within_limit(name, lambda: self.offer.functions[name](*arrays, *more, **named))
        if self._last is not None and not _are_equal(_copies(self._last[1]), self._last[2]):
            self.offences.setdefault(f"{name} buffer", f"the next call overwrote what {self._last[0]} returned")
        self._last = (name, result, _copies(result)) if isinstance(result, np.ndarray) else None
        # Inputs must be unchanged after the call.
        changed = [key for key, x in inputs.items() if not _are_equal(_copies(x), before[key])]
        if changed:
            self.offences.setdefault(f"{name} inputs", f"{name} changed its input {' and '.join(changed)}")
        return result

    def _within_limit(self, name: str, function: Callable[[], Any]) -> Any:
        if self._thread is None:
            arguments = (self._tasks, self._results)
            # A daemon: a hung call must not keep the program alive.
            self._thread = threading.Thread(target=_work, args=arguments, daemon=True, name="alibi adapter")
            self._thread.start()
        self._tasks.put(function)
        try:
            result, error = self._results.get(timeout=self.time_limit)
        except queue.Empty:
            self.hung = f"{name} did not return within {self.time_limit:g} s"
            raise CallError("hung", self.hung) from None
        if error is not None:
            # These three say that something is not supported.
            kind = "refused" if isinstance(error, NotImplementedError | TypeError | ValueError) else "crashed"
            raise CallError(kind, f"{name} raised {type(error).__name__}: {_first_line(error)}") from error
        return result

    def close(self) -> None:
        """Let the thread end."""
        if self._thread is not None:
            self._tasks.put(None)


def decoded(
    caller: Any, cases: Sequence[Case], steps: Sequence[Sequence[int]]
) -> Iterator[tuple[int, int, int, Values, Sequence[int]]]:
    """Decode several sequences in turn, each in steps of the given numbers of tokens.

    Yields, for each step, the index of the sequence, the first and the last + 1 of its new tokens, their output, and
    the lengths of its steps so far.
    """
    caches: list[Any] = [None] * len(cases)
    for turn, number in itertools.product(range(max(map(len, steps))), range(len(cases))):
        case, own = cases[number], steps[number][: turn + 1]
        if len(own) > turn:
            start, end = sum(own[:-1]), sum(own)
            tensors = {name: case.arrays[name][:, :, start:end] for name in TENSORS}
            output, caches[number] = caller.decode_step(tensors, case.arrays["slopes"], caches[number])
            yield number, start, end, output, own


def _work(tasks: queue.SimpleQueue[Any], results: queue.SimpleQueue[Any]) -> None:
    while (function := tasks.get()) is not None:
        try:
            with np.errstate(all="ignore"):  # only results count; OpenBLAS raises flags for unused vector lanes
                results.put((function(), None))
        except BaseException as error:  # report every error of the adapter, even SystemExit
            results.put((None, error))


def _first_line(error: BaseException) -> str:
    try:
        text = str(error).strip()
    except Exception:
        return "(its message cannot be had)"
    return text.splitlines()[0][:200] if text else "(no message)"


def _copies(value: Any) -> list[Values]:
    return [np.array(x) for x in (value if isinstance(value, tuple) else (value,))]


def _are_equal(one: list[Values], other: list[Values]) -> bool:
    return all(
        x.dtype == y.dtype and np.array_equal(x, y, equal_nan=x.dtype.kind == "f")
        for x, y in zip(one, other, strict=True)
    )


def _slip_of_shape(found: tuple[int, ...], expected: tuple[int, ...], kv_len: int) -> str:
    """Return an explanation of an output's wrong shape; empty if the shape is right or unexplained."""
    batch, heads, length, head_dim = expected
    slips = {
        (batch, heads, length, kv_len): "these are the weights; multiply them by value",
        (batch, length, heads * head_dim): "its heads are merged; make it [batch, heads, length, head_dim] again",
        (batch, length, heads, head_dim): "it is [batch, length, heads, head_dim]; swap axes 1 and 2",
        expected: "",
    }
    return slips.get(found, "")
