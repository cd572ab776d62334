"""The distance from which on keys do not matter: measured norms, ranges of keys, rectangles of scores to compute."""

from alibi_core._horizon import *  # noqa: F403
