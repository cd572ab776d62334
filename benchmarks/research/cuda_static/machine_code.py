"""Loops of machine code, and how many instructions a score takes in them."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

_INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)(\S*)\s*([^;]*);", re.M)
PRODUCTS = {"HGMMA": "wgmma", "HMMA": "mma.sync", "QGMMA": "wgmma"}


def loops(listing: str) -> list[dict[str, Any]]:
    """Return the innermost loops over blocks of scores, of the text that ``cuobjdump -sass`` prints, in order."""
    code = [(int(at, 16), name, suffix, rest) for at, name, suffix, rest in _INSTRUCTION.findall(listing)]
    targets = [(at, int(rest.split("0x")[-1], 16)) for at, name, _, rest in code if name == "BRA" and "0x" in rest]
    spans = [(target, at) for at, target in targets if target < at]
    inner = [a for a in spans if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in spans)]
    found = (_loop([each for each in code if first <= each[0] <= last]) for first, last in sorted(inner))
    return [loop for loop in found if loop]


def _loop(code: list[tuple[int, str, str, str]]) -> dict[str, Any] | None:
    """Return what a thread does once around; None without exponentials, which tell how many scores that is."""
    names = Counter(name for _, name, _, _ in code)
    exponentials = sum(name == "MUFU" and suffix.startswith(".EX2") for _, name, suffix, _ in code)
    if not exponentials:
        return None
    product = next((name for name in PRODUCTS if names[name]), "")
    return {
        "instructions": len(code),
        # The largest power of two that is no larger: a forward pass takes a few more to rescale rows.
        "scores": 1 << (exponentials.bit_length() - 1),
        "product": PRODUCTS.get(product, "none"),  # the tensor core's instruction
        "products": names[product],
        "spills": names["STL"] + names["LDL"],  # that store or load a spilled register
        "most": dict(names.most_common(12)),  # the commonest
    }
