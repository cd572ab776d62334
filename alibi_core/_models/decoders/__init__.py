"""The catalogue of decoders whose checkpoints are read: one file a family.

In goes what a ``config.json`` holds. Out comes the shape of a language model, the bias that the family's own code
computes, and what the tensors of its checkpoints are called. A further family is a file and a line in ``catalogue``.
"""

from alibi_core._models.decoders.catalogue import FAMILIES, family_of
from alibi_core._models.decoders.family import Family, Layout
from alibi_core._models.decoders.settings import Settings

__all__ = ["FAMILIES", "Family", "Layout", "Settings", "family_of"]
