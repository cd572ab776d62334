"""Loops of machine code, and how many instructions a score takes in them."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

_INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)(\S*)\s*([^;]*);", re.M)
PRODUCTS = {"HGMMA": "wgmma", "HMMA": "mma.sync", "QGMMA": "wgmma"}


@dataclass(frozen=True)
class Loop:
    """An innermost loop over blocks of scores.

    Attributes:
        instructions: Of one thread, one time around.
        scores: Of one thread, one time around, by its exponentials: the largest power of two that is no larger; a
            forward pass takes a few more to rescale rows.
        product: The tensor core's instruction.
        products: How many of them.
        spills: Instructions that store or load a spilled register.
        most: The commonest others.
    """

    instructions: int
    scores: int
    product: str
    products: int
    spills: int
    most: dict[str, int]


def loops(listing: str) -> list[dict[str, Any]]:
    """Return the loops with matrix products or exponentials, of the text that ``cuobjdump -sass`` prints, in order."""
    code = [(int(at, 16), name, suffix, rest) for at, name, suffix, rest in _INSTRUCTION.findall(listing)]
    targets = [(at, int(rest.split("0x")[-1], 16)) for at, name, _, rest in code if name == "BRA" and "0x" in rest]
    spans = [(target, at) for at, target in targets if target < at]
    inner = [a for a in spans if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in spans)]
    found = (_loop([each for each in code if first <= each[0] <= last]) for first, last in sorted(inner))
    return [asdict(loop) for loop in found if loop]


def _loop(code: list[tuple[int, str, str, str]]) -> Loop | None:
    names = Counter(name for _, name, _, _ in code)
    exponentials = sum(name == "MUFU" and suffix.startswith(".EX2") for _, name, suffix, _ in code)
    if not exponentials:
        return None
    product = next((name for name in PRODUCTS if names[name]), "")
    return Loop(
        instructions=len(code),
        scores=1 << (exponentials.bit_length() - 1),
        product=PRODUCTS.get(product, "none"),
        products=names[product],
        spills=names["STL"] + names["LDL"],
        most=dict(names.most_common(12)),
    )
