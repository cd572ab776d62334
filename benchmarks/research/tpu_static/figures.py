"""Figures of merit out of what the TPU compiler says: temporaries, and bundles per key block."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.harness import Measurement
from benchmarks.research.tpu_static.bundles import EXPONENTIALS, PRODUCTS, Kernel
from benchmarks.research.tpu_static.compile import Compiled, Program
from benchmarks.research.tpu_static.subjects import BLOCK

PASSES = {False: "forward", True: "forward and backward"}
BLOCK_REGISTERS = BLOCK * BLOCK // 1024  # vector registers, of 1024 numbers, that hold the scores of a block
RESCALING_REGISTERS = BLOCK // 8  # and those of a factor for each query, at most: one lane of 128 used, or all alike
LEAST_PRODUCTS = 0.65  # of the instructions with which splash multiplies; with less, a loop is missing


class NotMeasuredError(Exception):
    """There is no figure, and why."""


def weighed(empty: Measurement, *both: Compiled) -> Measurement:
    """Return this with the temporaries of both, in bytes, at least one: there is a ratio where all fits elsewhere."""
    for each in both:
        if each.temporaries is None:
            return replace(empty, note=each.problem)
    return empty.weighed(*(max(1, each.temporaries or 0) for each in both))


def of_pass(found: Compiled, gradient: bool) -> list[Kernel]:
    """Return a program's kernels: of one with gradients the backward ones, those not named forward."""
    is_forward = ["fwd" in kernel.name or "forward" in kernel.name for kernel in found.kernels]
    return [kernel for kernel, skip in zip(found.kernels, is_forward, strict=True) if not (gradient and skip)]


def key_blocks(kernel: Kernel, gradient: bool) -> int:
    """Return how many key blocks an iteration of the main loop goes through, by the exponentials that it takes.

    A block of 512 x 512 scores takes 256 registers of them; a forward pass up to 64 more, to rescale what it has
    summed up.
    """
    count = kernel.main.counts[EXPONENTIALS] if kernel.main else 0
    blocks = round(count / BLOCK_REGISTERS) if gradient else -(-count // (BLOCK_REGISTERS + RESCALING_REGISTERS))
    if not 0.9 * BLOCK_REGISTERS * blocks <= count or not blocks:
        raise NotMeasuredError(f"blocks must be of {BLOCK} x {BLOCK}, got {count} exponentials in {kernel.name}")
    return blocks


def bundles(found: Compiled, gradient: bool) -> tuple[float, float]:
    """Return the bundles, and the products among their instructions, for one key block, of all kernels of a pass."""
    if found.problem:
        raise NotMeasuredError(found.problem)
    kernels = of_pass(found, gradient)
    if gradient and len(kernels) == len(found.kernels):
        raise NotMeasuredError("the forward kernel must have forward or fwd in its name, got none that has")
    shares = [(kernel.main, key_blocks(kernel, gradient)) for kernel in kernels if kernel.main]
    if not shares:
        raise NotMeasuredError("a kernel must hold a loop with matrix products, got none")
    return sum(loop.path / n for loop, n in shares), sum(loop.counts[PRODUCTS] / n for loop, n in shares)


def scheduled(empty: Measurement, gradient: bool, ours: Compiled, theirs: Compiled, least: Compiled) -> Measurement:
    """Return this with the bundles for a key block of both.

    ``least`` is what needs the fewest matrix products; the candidate cannot do with much less.
    """
    try:
        (candidate, products), (baseline, _), (_, fewest) = (bundles(x, gradient) for x in (ours, theirs, least))
        if products < LEAST_PRODUCTS * fewest:
            raise NotMeasuredError(f"main loops must hold {LEAST_PRODUCTS * fewest:.0f} products, got {products:.0f}")
        return empty.weighed(candidate, baseline)
    except NotMeasuredError as error:
        return replace(empty, note=str(error))


def loops(program: Program, found: Compiled) -> list[dict[str, Any]]:
    """Return what there is to say of each loop with matrix products; `benchmarks.research.scaling` reads it."""
    return [
        {
            "topology": program.topology,
            "program": program.name,
            "options": list(program.options),
            "head_dim": program.head_dim,
            "pass": PASSES[program.gradient],
            "kernel": kernel.name,
            "main": loop is kernel.main,
            "loop_bundles": loop.bundles,
            "path": loop.path,
        }
        for kernel in of_pass(found, program.gradient)
        for loop in kernel.loops
        if loop.counts[PRODUCTS]
    ]
