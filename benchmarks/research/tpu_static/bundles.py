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
from collections import Counter, defaultdict
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


# --- Loops ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Loop:
    """A loop, of all its bundles from the first to the last, nested ones included."""

    bundles: int
    innermost: bool  # no other loop with matrix products is inside it
    path: int = 0  # bundles on the shortest way through an iteration that passes what a key block needs; 0 if none does
    # Instructions along it by kind: products, exponentials (in bfloat16 twice as many, as they work on twice as many
    # numbers), transfers that start, selects.
    counts: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class Kernel:
    """What was read of a kernel."""

    name: str  # as in ``pallas_call(name=...)``
    bundles: int  # in all, as the compiler counts them
    loops: tuple[Loop, ...]  # in the order of their first bundles

    @property
    def main(self) -> Loop | None:
        """Of the innermost loops with products, those with exponentials if there are such: the one that masks least.

        The longest of those with the fewest selections, because a mask that is known beforehand may make for a shorter
        loop than none.
        """
        loops = [loop for loop in self.loops if loop.innermost and loop.path]
        loops = [loop for loop in loops if loop.counts[EXPONENTIALS]] or loops
        return min(loops, key=lambda loop: (loop.counts[SELECTS], -loop.path), default=None)


def read(name: str, total: int, text: str) -> Kernel:
    """Read a kernel from the text of ``*-final_bundles.txt``.

    Raises:
        ValueError: The text is not what is expected, or has not ``total`` bundles. It comes from flags without
            documentation: better no figure than a wrong one.
    """
    parsed, regions = parse(text)
    if len(parsed) != total:
        raise ValueError(f"bundles must be {total} as in the schedule's analysis, got {len(parsed)} for {name}")
    spans: list[tuple[int, int]] = []  # of loops: their first bundle and their last
    ways: dict[int, list[int]] = {}  # where one may be after a bundle
    for address, bundle in enumerate(parsed):
        ways.setdefault(address, [address + 1])
        for depends, region in bundle.branches:
            if region not in regions:
                raise ValueError(f"a branch must go to a region that starts somewhere, got region {region} in {name}")
            last, target = address + DELAY, regions[region]
            if target <= address:
                spans.append((target, last))
            else:
                ways[last] = [*([last + 1] if depends else []), target]
    loops = []
    for first, last in sorted(spans, key=lambda span: (span[0], -span[1])):
        inside = [span for span in spans if first <= span[0] and span[1] <= last and span != (first, last)]
        innermost = not any(_has(parsed[start : end + 1], PRODUCTS) for start, end in inside)
        path = _path(parsed, ways, first, last)
        counts = sum((parsed[address].counts for address in path), Counter())
        loops.append(Loop(last - first + 1, innermost, len(path), counts))
    return Kernel(name, total, tuple(loops))


def _has(bundles: Sequence[Bundle], kind: str) -> bool:
    return any(bundle.counts[kind] for bundle in bundles)


def _path(bundles: Sequence[Bundle], ways: Mapping[int, Sequence[int]], first: int, last: int) -> tuple[int, ...]:
    """Return the addresses on the shortest way from the first to the last that passes what has to be passed."""
    kinds = frozenset(kind for kind in (PRODUCTS, EXPONENTIALS) if _has(bundles[first : last + 1], kind))
    if PRODUCTS not in kinds:
        return ()
    # All ways lead to later bundles, so that going through them in order settles each. To each bundle, by the kinds
    # that were passed before it: what getting there costs at least, where from, and with which kinds. A transfer left
    # out costs more than any number of bundles.
    start: frozenset[str] = frozenset()
    best: dict[int, dict[frozenset[str], tuple[tuple[int, int], int, frozenset[str]]]] = defaultdict(dict)
    best[first][start] = ((0, 0), first, start)
    for address in range(first, last + 1):
        for passed, ((missing, taken), *_) in best[address].items():
            cost = (missing - bundles[address].counts[TRANSFERS], taken + 1)
            now = passed | {kind for kind in kinds if bundles[address].counts[kind]}
            for after in ways[address] if address < last else [last + 1]:
                if after <= last + 1 and (now not in best[after] or cost < best[after][now][0]):
                    best[after][now] = (cost, address, passed)
    addresses, address, passed = [], last + 1, kinds
    while address > first and passed in best[address]:
        _, address, passed = best[address][passed]
        addresses.append(address)
    return tuple(addresses)
