"""Who is looked at: the package, in which precisions, and what it means to be."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any


@dataclass(frozen=True)
class Subject:
    """An implementation in a package that may be installed."""

    name: str  # in the table
    package: str  # the distribution that it comes in
    adapter: str  # which module of this room has its adapter, and the class
    contract: str = "exact"  # what it means to be, besides exact
    dtypes: tuple[str, ...] = ("float32", "bfloat16")  # that it is run in
    bias_max: int = 8  # what it is configured with
    note: str = ""  # what a reader should know who reads no code

    @property
    def version(self) -> str | None:
        """The version that is installed; None if none is."""
        try:
            return metadata.version(self.package)
        except metadata.PackageNotFoundError:
            return None

    def make(self, dtype: str, contract: str) -> Any:
        """Return an adapter.

        Raises:
            ImportError: If the package, or what it needs, is not installed.
        """
        module, kind = self.adapter.split(":")
        adapter = getattr(importlib.import_module(f"benchmarks.ecosystem.{module}"), kind)(dtype, contract)
        adapter.name = self.name
        return adapter


# What a reader should know who reads no code.
_NOTES = {
    "BLOOM": "Counts from the first key, casts the bias to the model's dtype and adds it to scores of that dtype.",
    "Falcon, sdpa": "Rounds slopes, positions and product to bfloat16 in every dtype, and divides the bias by "
    "sqrt(head_dim).",
    "Falcon, eager": "Adds its bias twice: with the mask, and with the scores. Its default, sdpa, adds it once.",
    "MPT": "Counts from the last key, in float32 whatever the model's dtype.",
    "MPT, bias_max 16": "Configured with alibi_bias_max=16 it has the slopes of 8: the model does not pass the option "
    "on.",
    "x-transformers": "Query head h reads key/value head h % num_kv_heads, where others have h // (num_heads // "
    "num_kv_heads). Slopes, distances and bias are rounded to the model's dtype.",
    "x-transformers, flash": "The same bias as the mask of PyTorch's scaled_dot_product_attention.",
    "keras-hub": "AlibiBias in its BloomAttention. Counts from the last key; slopes, positions and bias are rounded to "
    "the compute dtype.",
    "mlx.nn.ALiBi": "Slopes, distances and bias are rounded to the dtype of the scores.",
    "attention-gym": "generate_alibi_bias in eager FlexAttention, which computes scores in float32. The bias is "
    "signed: without a causal mask, keys ahead gain.",
    "FlexAttention's example": "The score_mod of the text that introduced FlexAttention, with slopes of the caller's. "
    "Signed likewise.",
    "FlexAttention's first example": "The same text had slope * (query - key) at first, which rewards distance; copies "
    "of it are still about.",
    "curated-transformers": "Counts from the last key if causal, by distance if not; slopes, distances and bias are "
    "rounded to the model's dtype.",
    "labml-nn": "Counts from 1 at the first key, in float32.",
}

_SUBJECTS = (
    Subject("BLOOM", "transformers", "_transformers:Bloom", contract="bloom"),
    Subject("Falcon, sdpa", "transformers", "_transformers:Falcon", contract="falcon"),
    Subject("Falcon, eager", "transformers", "_transformers:FalconEager", contract="falcon"),
    Subject("MPT", "transformers", "_transformers:Mpt", contract="mpt"),
    Subject("MPT, bias_max 16", "transformers", "_transformers:MptBiasMax16", contract="mpt", bias_max=16),
    Subject("x-transformers", "x-transformers", "_torch:XTransformers"),
    Subject("x-transformers, flash", "x-transformers", "_torch:XTransformersFlash"),
    Subject("keras-hub", "keras-hub", "_keras:KerasHub"),
    Subject("mlx.nn.ALiBi", "mlx", "_mlx:MlxNn", dtypes=("float32", "float16", "bfloat16")),
    Subject("attention-gym", "attn-gym", "_torch:AttentionGym", contract="geometric"),
    Subject("FlexAttention's example", "torch", "_torch:Example"),
    Subject("FlexAttention's first example", "torch", "_torch:ExampleAsFirstPublished"),
    Subject("curated-transformers", "curated-transformers", "_torch:Curated"),
    Subject("labml-nn", "labml-nn", "_torch:Labml", dtypes=("float32",)),
)
SUBJECTS = tuple(replace(subject, note=_NOTES[subject.name]) for subject in _SUBJECTS)
