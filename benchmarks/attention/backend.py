"""What the attention benchmark needs of a library: data, clocks, contestants and a cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from benchmarks.attention.sizes import Decoding, Shape

Call = Callable[[], Any]


@dataclass(frozen=True)
class Contestant:
    """Something that computes attention.

    Attributes:
        prepare: Takes query, key and value and returns what the backend's ``prepare`` makes a call of.
        bytes_needed: Takes a shape: how much memory a pass takes beyond its arguments.
        backward_on: Devices on which it has a backward pass.
        note: How it is called.
        is_dense: Whether it computes the scores of keys after the query, too, only to mask them.
    """

    name: str
    prepare: Callable[..., Any]
    bytes_needed: Callable[[Shape], int] = lambda shape: 0
    backward_on: tuple[str, ...] = ("cpu", "cuda", "metal")
    note: str = ""
    is_dense: bool = False


@dataclass(frozen=True)
class Decode:
    """One query over the keys of a layer's cache: what there is, and who answers it.

    Attributes:
        tensors: Query, key and value; the query is the last token.
        cached: The layer's cache, which knows the norms of its keys; None where it cannot attend.
        bare: The attention function, which has to measure them.
        baseline: Attention without positions.
        with_row: The same with ALiBi's one row of biases a head.
        baseline_name: What the baseline is called.
        row_name: And what ``with_row`` is.
    """

    tensors: tuple[Any, Any, Any]
    cached: Call | None
    bare: Call
    baseline: Call
    with_row: Call
    baseline_name: str = "SDPA, no positions"
    row_name: str = "SDPA, a row of biases"


class Backend(Protocol):
    """A library on one kind of device. Tensors are ``[batch, num_heads, length, head_dim]``, or look as if they were.

    Attributes:
        name: As on the command line.
        device: ``"cpu"``, ``"cuda"`` or ``"metal"``.
        ours: The name of what is measured.
        peers: Others who compute ALiBi attention; the first, with a dense bias.
        distributions: Whose versions belong to the results.
    """

    name: str
    device: str
    ours: str
    peers: tuple[Contestant, ...]
    distributions: tuple[str, ...]

    def machine(self) -> dict[str, Any]:
        """Describe what is special about the device."""

    def tensors(self, shape: Shape, backward: bool = False) -> tuple[Any, ...]:
        """Return normally distributed query, key, value and, with ``backward``, gradient of the result, else None."""

    def as_float64(self, tensor: Any) -> np.ndarray:
        """Return a piece of a tensor as a NumPy array."""

    def free_bytes(self) -> float:
        """Return how much memory a contestant may take."""

    def seconds(self, call: Call) -> float:
        """Return how long a call takes, until its result is there."""

    def contestant(self) -> Contestant:
        """Return this library."""

    def baseline(self, tensors: Sequence[Any], backward: bool) -> Contestant:
        """Return the fastest causal attention with no positions."""

    def prepare(self, contestant: Contestant, tensors: Sequence[Any], backward: bool) -> Call:
        """Return the call to time, which returns the result, or with ``backward`` the gradients."""

    def decode(self, size: Decoding) -> Decode:
        """Fill a layer's cache and return who attends to it with one query."""

    def extra_bytes(self, shape: Shape, backward: bool) -> int:
        """Return the peak memory of a pass of ours beyond its arguments, its result and its gradients.

        Asked where the sizes have no ``weighed_shares``.
        """

    def weights(self, shape: Shape, backward: bool) -> Iterator[tuple[str, int, int, str]]:
        """Yield how it was found, that peak, the peak of another, and what that other is called.

        Asked where the sizes have ``weighed_shares``.
        """

    def longest(self, shape: Shape, rows: int) -> dict[str, float]:
        """Return what a very long forward pass costs, and the errors of so many of its rows a head.

        Asked where the sizes have such a shape.

        Returns:
            ``seconds``, ``extra`` bytes, and the errors of ``_attention_exact.Error``.
        """
