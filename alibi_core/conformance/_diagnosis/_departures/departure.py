"""A departure: one way to depart from ALiBi, in words, and as changes to a reading."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

BLOCKS = (8, 16, 32, 64, 128, 256)


@dataclass(frozen=True)
class Departure:
    """One way to depart from ALiBi.

    Attributes:
        key: A short name that stays.
        sentence: What is done instead, and where it is not obvious, what to do about it.
        changes: The fields of a reading, and what they are then.
        is_noisy: Whether it rounds sums whose order it cannot know, so that its results are only nearly those.
    """

    key: str
    sentence: str
    changes: Mapping[str, Any]
    is_noisy: bool = False

    @property
    def is_latent(self) -> bool:
        """Whether it may show only beside another: it is about keys that a causal mask hides, or rows without any."""
        return self.changes.keys() & {"nowhere", "future"} != set() or (
            self.changes.keys() == {"distance"} and not self.changes["distance"][1]
        )

    def applied(self, reading: Any) -> Any:
        """Return the reading, changed."""
        return dataclasses.replace(reading, **self.changes)

    def under(self, condition: str) -> Departure:
        """Return the same, said of some calls only."""
        ending, beginning = CONDITIONS[condition]
        sentence = f"{beginning}, {self.sentence[0].lower()}{self.sentence[1:]}"
        return dataclasses.replace(self, key=f"{self.key} {ending}", sentence=sentence)


# What may be true of some calls only: how the key ends, and how the sentence begins.
CONDITIONS = {
    "square": ("with equal lengths", "With as many queries as keys"),
    "lengths": ("with unequal lengths", "With more or fewer queries than keys"),
    "offset": ("with q_offset", "Where q_offset is not kv_len - q_len"),
    "batch_offsets": ("with q_offset by batch entry", "With q_offset as an array"),
    "far": ("far away", "Far from all keys"),
    "symmetric": ("when symmetric", "With is_causal=False"),
    "asymmetric": ("with future slopes", "With future_slopes"),
    "grouped": ("with grouped heads", "With fewer key/value heads than query heads"),
    "window": ("with a window", "With window_size"),
    "segments": ("with segments", "With segment_ids"),
    "mask": ("with a mask", "With a mask"),
    "batch_slopes": ("with slopes by batch entry", "With slopes for each batch entry"),
    "scale": ("with scale", "Where scale is given"),
    "one query": ("with one query", "With a single query"),
    "long": ("in long rows", "In long rows"),
    "prefill": ("in the first step", "In the first step"),
    "decoding": ("in later steps", "In steps after the first"),
    "single steps": ("in steps of one token", "In steps of a single token"),
    "chunks": ("in steps of several tokens", "In later steps of several tokens"),
}


def make(key: str, sentence: str, **changes: Any) -> Departure:
    """Return a departure of these changes."""
    return Departure(key, sentence, changes)


def table(field: str, sentences: Mapping[str, str], noisy: Iterable[str] = ()) -> list[Departure]:
    """Return departures by their keys, to which they change a field of the reading."""
    return [Departure(key, sentence, {field: key}, key in noisy) for key, sentence in sentences.items()]


def numbered(field: str, sentences: Mapping[str, str], numbers: Iterable[int] = (0,)) -> list[Departure]:
    """Return departures by their keys, to which, with each number, they change a field of the reading."""
    return [
        Departure(key, sentence.format(n), {field: (key, n)}) for n in numbers for key, sentence in sentences.items()
    ]


def in_low_precision(field: str, sentences: Mapping[str, str], *, is_noisy: bool = False) -> list[Departure]:
    """Return departures that round to bfloat16 or float16 what the sentences are by."""
    return [
        Departure(f"{dtype} {what.removeprefix('all ')}", sentence.format(dtype), {field: (what, dtype)}, is_noisy)
        for dtype in ("bfloat16", "float16")
        for what, sentence in sentences.items()
    ]
