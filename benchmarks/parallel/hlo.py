"""What the devices of a compiled program send each other, read from its text."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

KINDS = ("all-gather", "all-to-all", "collective-permute", "all-reduce", "reduce-scatter", "collective-broadcast")
ITEM_BYTES = {"bf16": 2, "f16": 2, "f32": 4, "s32": 4, "u32": 4}
FALLBACK = "alibi_fallback"  # is part of the name of what runs only where data break the bound that was given
_SHAPE = re.compile(r"\b([a-z]+\d+)\[([\d,]*)\]")
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")


def collectives(text: str) -> Iterator[dict[str, Any]]:
    """Yield the collective operations of a program in HLO.

    Each with its kind, how many elements one device gives, the bytes that all devices send together (of a
    collective-permute; 0 of others), and whether it is part of what runs only where data break a bound.
    """
    for kind in KINDS:
        for match in re.finditer(rf"= ([^=\n]*?) {kind}(?:-start)?\((.*)", text):
            # The result of one that is asynchronous lists the operand too, which is as large as what is sent.
            dtype, sizes = _SHAPE.findall(match[1])[0]
            elements = math.prod(int(n) for n in sizes.split(",") if n)
            pairs = _PAIRS.search(match[2])
            senders = pairs[1].count("{") if pairs else 0
            yield {
                "kind": kind,
                "elements": elements,
                "bytes": elements * ITEM_BYTES[dtype] * senders,
                "is_fallback": FALLBACK in match[2],
            }
