"""Read the text that the TPU compiler writes down about a kernel's schedule.

A TPU core issues one bundle of instructions a cycle, in order, so that bundles are cycles but for waiting for memory.
The compiler writes a kernel's bundles one after the other, with the branches among them:

    0xdf LB: >> { %s1 = ...  ;;  %s2 = ... } /* Start region 91 */     an address, the loops around it (>>), a bundle
    0x7d7  : >> { ...  ;;  %454 = sbr.rel (!%p451_p1) target = $region91 }    a branch, to where that region starts
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

PRODUCTS, EXPONENTIALS, TRANSFERS, SELECTS = "products", "exponentials", "transfers", "selects"
_START = re.compile(r"^ *(0x[0-9a-f]+|0) +(?:[A-Z]{2})? *:(?: (>*))? *\{", re.M)
_COMMENT = re.compile(r"/\*.*?\*/", re.S)
_REGION = re.compile(r"Start(?:/End empty)? region (\d+)")
_BRANCH = re.compile(r"sbr\.rel (\(.*?\) )?target = \$region(\d+)")
# The name of an instruction follows "=", or the brace or ";;" before it where it has no result.
_INSTRUCTION = re.compile(r"(?:= |\{ |;; +)(?:\(.*?\) )?([a-z][a-z0-9_.]*)")
KINDS = {
    PRODUCTS: re.compile(r"vmatmul"),
    EXPONENTIALS: re.compile(r"v(?:exp|pow)2?\b"),
    TRANSFERS: re.compile(r"dma\.(?!done)"),
    SELECTS: re.compile(r"vm?sel\b"),
}


@dataclass(frozen=True)
class Bundle:
    """One instruction word: how many operations of each unit it holds, and where it may jump."""

    counts: Counter[str]
    branches: tuple[tuple[bool, int], ...]  # whether it depends on something, and the region it goes to


def parse(text: str) -> tuple[list[Bundle], dict[int, int]]:
    """Return the bundles, and the address that each region starts at."""
    marks = list(_START.finditer(text))
    bundles, regions = [], {}
    ends = [*(mark.start() for mark in marks[1:]), len(text)]
    for address, (mark, end) in enumerate(zip(marks, ends, strict=False)):
        if int(mark[1], 16) != address:
            raise ValueError(f"bundles must be numbered one by one, got {mark[1]} after {address - 1:#x}")
        whole = text[mark.start() : end]
        for region in map(int, _REGION.findall(whole)):
            if region in regions:
                raise ValueError(f"a region must start once, got region {region} at {regions[region]:#x}, {address:#x}")
            regions[region] = address
        code = _COMMENT.sub("", whole)
        names = _INSTRUCTION.findall(code)
        counts = Counter(
            {kind: sum(_registers(name) for name in names if kinds.match(name)) for kind, kinds in KINDS.items()}
        )
        branches = tuple((bool(depends), int(region)) for depends, region in _BRANCH.findall(code))
        bundles.append(Bundle(counts, branches))
    # The bundle that a kernel ends with says no region's name, also where there is a branch to it.
    unnamed = {region for bundle in bundles for _, region in bundle.branches} - set(regions)
    if len(unnamed) == 1 and "exit bundle:" in text[marks[-1].start() :]:
        regions[unnamed.pop()] = len(bundles) - 1
    return bundles, regions


def _registers(instruction: str) -> int:
    """Return how many registers of 1024 numbers an instruction works on, where that matters: for exponentials."""
    return 2 if re.match(r"v(?:exp|pow)2?\.bf16", instruction) else 1


def units(text: str | None, total: int) -> list[dict[str, int]]:
    """Return how many slots of each unit each bundle uses; nothing if the text is not of so many bundles."""
    lines = (text or "").splitlines()
    rows = [[int(number) for number in line.split()] for line in lines if re.fullmatch(r"[\d ]+", line)]
    names = next(([name.strip() for name in line.split(",")] for line in lines if line.startswith("MATMUL")), [])
    if len(rows) != total + 1 or any(len(row) != len(names) for row in rows):
        return []
    return [dict(zip(names, row, strict=True)) for row in rows[1:]]  # the first says how many slots there are
