"""How far a key can matter: measured norms, ranges of keys, and the rectangles of scores in which to compute."""

from alibi_core._horizon import *  # noqa: F403
