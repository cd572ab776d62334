"""Figures of merit out of what the TPU compiler says: temporaries, and bundles per key block."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from benchmarks.harness import Measurement
from benchmarks.research.tpu_static.bundles import EXPONENTIALS, PRODUCTS, Kernel
from benchmarks.research.tpu_static.compile import Program, compiled
from benchmarks.research.tpu_static.subjects import BLOCK

PASSES = {False: "forward", True: "forward and backward"}
BLOCK_REGISTERS = BLOCK * BLOCK // 1024  # vector registers, of 1024 numbers, that hold the scores of a block
RESCALING_REGISTERS = BLOCK // 8  # and those of a factor for each query, at most: one lane of 128 used, or all alike
LEAST_PRODUCTS = 0.6  # of splash's work for the matrix units; with less, a loop is missing


class NotMeasuredError(Exception):
    """There is no figure, and why."""


def weighed(empty: Measurement, *both: Program) -> Measurement:
    """Return this with the temporaries of both, in bytes, at least one: there is a ratio where all fits elsewhere."""
    found = [compiled(program) for program in both]
    if problem := next((each for each in found if isinstance(each, str)), ""):
        return replace(empty, note=problem)
    return empty.weighed(*(max(1, each.temporaries) for each in found))


def is_forward(name: str) -> bool:
    """Return whether that is a name for a kernel of the forward pass."""
    return "fwd" in name or "forward" in name


def kernels_of(program: Program) -> list[Kernel]:
    """Return a program's kernels: of one with gradients the backward ones, those not named forward."""
    found = compiled(program)
    if isinstance(found, str) or found.problem:
        raise NotMeasuredError(found if isinstance(found, str) else found.problem)
    kernels = [kernel for kernel in found.kernels if not (program.gradient and is_forward(kernel.name))]
    if program.gradient and len(kernels) == len(found.kernels):
        raise NotMeasuredError("the forward kernel must have forward or fwd in its name, got none that has")
    return kernels


def key_blocks(kernel: Kernel, gradient: bool) -> int:
    """Return how many key blocks an iteration of the main loop goes through, by the exponentials that it takes.

    A block of 512 x 512 scores takes 256 registers of them; a forward pass up to 64 more, to rescale what it has
    summed up.
    """
    count = kernel.main.path.counts[EXPONENTIALS] if kernel.main and kernel.main.path else 0
    blocks = round(count / BLOCK_REGISTERS) if gradient else -(-count // (BLOCK_REGISTERS + RESCALING_REGISTERS))
    if not 0.9 * BLOCK_REGISTERS * blocks <= count or not blocks:
        raise NotMeasuredError(f"blocks must be of {BLOCK} x {BLOCK}, got {count} exponentials in {kernel.name}")
    return blocks


def bundles(kernels: Iterable[Kernel], gradient: bool) -> tuple[float, float]:
    """Return the bundles for one key block, of all kernels of a pass with products, and the matrix units' slots."""
    total = slots = 0.0
    for kernel in kernels:
        if kernel.main and kernel.main.path:
            path, blocks = kernel.main.path, key_blocks(kernel, gradient)
            if not path.units:
                raise NotMeasuredError(f"the compiler must write down the use of units, got none for {kernel.name}")
            total += path.bundles / blocks
            slots += path.units["MATMUL"] / blocks
    if not total:
        raise NotMeasuredError("a kernel must hold a loop with matrix products, got none")
    return total, slots


def scheduled(empty: Measurement, ours: Program, theirs: Program, least: Program) -> Measurement:
    """Return this with the bundles for a key block of both.

    ``least`` is what needs the fewest matrix products; the candidate cannot do with much less.
    """
    try:
        (candidate, slots), (baseline, _), (_, fewest) = (
            bundles(kernels_of(each), each.gradient) for each in (ours, theirs, least)
        )
        if slots < LEAST_PRODUCTS * fewest:
            must = f"{LEAST_PRODUCTS * fewest:.0f} slots of the matrix units, got {slots:.0f}"
            raise NotMeasuredError(f"main loops must use {must}")
        return empty.weighed(candidate, baseline)
    except NotMeasuredError as error:
        return replace(empty, note=str(error))


def loops(program: Program) -> list[dict[str, Any]]:
    """Return what there is to say of each loop with matrix products, nothing if the program does not compile."""
    found = compiled(program)
    if isinstance(found, str):
        return []
    return [
        {
            "topology": program.topology,
            "program": program.name,
            "options": list(program.options),
            "head_dim": program.head_dim,
            "pass": PASSES[program.gradient],
            "kernel": kernel.name,
            "kernel_bundles": kernel.bundles,
            "main": loop is kernel.main,
            "depth": loop.depth,
            "loop_bundles": loop.bundles,
            "path": loop.path.bundles,
        }
        for kernel in found.kernels
        for loop in kernel.loops
        if loop.path and loop.path.counts[PRODUCTS]
    ]
