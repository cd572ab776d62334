"""Find the loops in the schedule that the TPU compiler writes down, and what one pass through each costs.

A branch takes effect after four more bundles. One that goes back closes a loop; one that goes forward skips what its
condition rules out: first and last steps of a grid, a block that is masked out. So an iteration runs through only some
of a loop's bundles, and **the bundles of a key block are those on the shortest way through an iteration that passes a
matrix product and, where the loop has any, an exponential, among the ways with the most starts of data transfers**, as
a key block in the middle has the next one fetched. (Where the compiler keeps keys and values on the chip, a fetch is a
copy with loads and stores.) In splash attention the loop goes over the whole grid; what the shortest way leaves out is
the first and last step of a row of blocks. It includes what each step of a grid costs. There is no way without a mask:
each block is compared and selected from.

Left out, for every kernel alike: waiting for a transfer, whose bundles count, but not how long they take; and that a
nested loop is run through more than once.

A core issues one bundle of instructions a cycle, in order, so that bundles are cycles but for waiting for memory.
The compiler writes a kernel's bundles one after the other, with the branches among them:

    0xdf LB: >> { %s1 = ...  ;;  %s2 = ... } /* Start region 91 */     an address, the loops around it (>>), a bundle
    0x7d7  : >> { ...  ;;  %454 = sbr.rel (!%p451_p1) target = $region91 }    a branch, to where that region starts
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

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
DELAY = 4  # bundles after a branch that are executed all the same, on every TPU that was looked at (v5e, v5p, v6e)


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


# --- Loops ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Path:
    """The bundles on one way through an iteration of a loop."""

    bundles: int
    # Instructions by kind: products, exponentials (in bfloat16 twice as many, as they work on twice as many numbers),
    # transfers that start, selects.
    counts: Mapping[str, int]
    units: Mapping[str, int] = field(default_factory=dict)  # slots used by unit (MATMUL, VALU, ...), if said


@dataclass(frozen=True)
class Loop:
    """A loop, of all its bundles from the first to the last, nested ones included."""

    bundles: int
    depth: int  # how many loops it is inside, itself included
    innermost: bool  # no other loop with matrix products is inside it
    path: Path | None  # the shortest way through an iteration that passes what a key block needs


@dataclass(frozen=True)
class Kernel:
    """What was read of a kernel."""

    name: str  # as in ``pallas_call(name=...)``
    bundles: int  # in all, as the compiler counts them
    loops: tuple[Loop, ...]  # in the order of their first bundles

    @property
    def candidates(self) -> list[Loop]:
        """The innermost loops with matrix products, those with exponentials if there are such."""
        loops = [loop for loop in self.loops if loop.innermost and loop.path]
        return [loop for loop in loops if loop.path.counts[EXPONENTIALS]] or loops

    @property
    def main(self) -> Loop | None:
        """The candidate with the fewest selections, the longest of those: it masks least.

        Not the shortest, because a mask that is known beforehand may make for a shorter loop than none.
        """
        return min(self.candidates, key=lambda loop: (loop.path.counts[SELECTS], -loop.path.bundles), default=None)


def read(name: str, total: int, bundles: str = "", utilization: str | None = None) -> Kernel:
    """Read a kernel from the texts of ``*-final_bundles.txt`` and ``*-final_hlo-static-per-bundle-utilization.txt``.

    Raises:
        ValueError: The text is not what is expected, or has not ``total`` bundles. It comes from flags without
            documentation: better no figure than a wrong one.
    """
    parsed, regions = parse(bundles)
    if len(parsed) != total:
        raise ValueError(f"bundles must be {total} as in the schedule's analysis, got {len(parsed)} for {name}")
    used = units(utilization, total)
    loops: list[tuple[int, int]] = []
    ways: dict[int, list[int]] = {}  # where one may be after a bundle
    for address, bundle in enumerate(parsed):
        ways.setdefault(address, [address + 1])
        for depends, region in bundle.branches:
            if region not in regions:
                raise ValueError(f"a branch must go to a region that starts somewhere, got region {region} in {name}")
            last, target = address + DELAY, regions[region]
            if target <= address:
                loops.append((target, last))
            else:
                ways[last] = [*([last + 1] if depends else []), target]
    loops.sort(key=lambda loop: (loop[0], -loop[1]))
    found = []
    for first, last in loops:
        inside = [
            (start, end) for start, end in loops if first <= start and end <= last and (start, end) != (first, last)
        ]
        depth = sum(start <= first and last <= end for start, end in loops)
        innermost = not any(_has(parsed[start : end + 1], PRODUCTS) for start, end in inside)
        found.append(Loop(last - first + 1, depth, innermost, _path(parsed, ways, first, last, used)))
    return Kernel(name, total, tuple(found))


def _has(bundles: Sequence[Bundle], kind: str) -> bool:
    return any(bundle.counts[kind] for bundle in bundles)


def _path(
    bundles: Sequence[Bundle],
    ways: Mapping[int, Sequence[int]],
    first: int,
    last: int,
    used: Sequence[dict[str, int]],
) -> Path | None:
    """Return the shortest way from the first to the last that passes what has to be passed."""
    kinds = frozenset(kind for kind in (PRODUCTS, EXPONENTIALS) if _has(bundles[first : last + 1], kind))
    if PRODUCTS not in kinds:
        return None
    # All ways lead to later bundles, so that going through them in order settles each. For each bundle, by the kinds
    # that were passed before it: what it costs at least to get to it, and where from. A transfer left out costs more
    # than any number of bundles.
    best: list[dict[frozenset[str], tuple[tuple[int, int], int, frozenset[str]]]] = [
        {} for _ in range(last + 2 - first)
    ]
    best[0][frozenset()] = ((0, 0), first, frozenset())
    for address in range(first, last + 1):
        for passed, ((missing, taken), *_) in best[address - first].items():
            cost = (missing - bundles[address].counts[TRANSFERS], taken + 1)
            now = passed | {kind for kind in kinds if bundles[address].counts[kind]}
            for after in ways[address] if address < last else [last + 1]:
                if after <= last + 1 and (now not in best[after - first] or cost < best[after - first][now][0]):
                    best[after - first][now] = (cost, address, passed)
    if kinds not in best[-1]:
        return None
    addresses: list[int] = []
    address, passed = last + 1, kinds
    while address > first:
        _, address, passed = best[address - first][passed]
        addresses.append(address)
    return _along(bundles, addresses, used)


def _along(bundles: Sequence[Bundle], addresses: Sequence[int], used: Sequence[dict[str, int]]) -> Path:
    """Describe the way along those bundles."""
    slots = sum((Counter(used[address]) for address in addresses), Counter()) if used else {}
    return Path(
        bundles=len(addresses),
        counts={kind: sum(bundles[address].counts[kind] for address in addresses) for kind in KINDS},
        units=dict(slots),
    )
