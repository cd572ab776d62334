"""Who is looked at: the package, in which precisions, and what it means to be."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
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


SUBJECTS = (
    Subject(
        "BLOOM",
        "transformers",
        "_transformers:Bloom",
        contract="bloom",
        note="Counts from the first key, casts the bias to the model's dtype and adds it to scores of that dtype.",
    ),
    Subject(
        "Falcon, sdpa",
        "transformers",
        "_transformers:Falcon",
        contract="falcon",
        note="Rounds slopes, positions and product to bfloat16 in every dtype, and divides the bias by sqrt(head_dim).",
    ),
    Subject(
        "Falcon, eager",
        "transformers",
        "_transformers:FalconEager",
        contract="falcon",
        note="Adds its bias twice: with the mask, and with the scores. Its default, sdpa, adds it once.",
    ),
    Subject(
        "MPT",
        "transformers",
        "_transformers:Mpt",
        contract="mpt",
        note="Counts from the last key, in float32 whatever the model's dtype.",
    ),
    Subject(
        "MPT, bias_max 16",
        "transformers",
        "_transformers:MptBiasMax16",
        contract="mpt",
        bias_max=16,
        note="Configured with alibi_bias_max=16 it has the slopes of 8: the model does not pass the option on.",
    ),
    Subject(
        "x-transformers",
        "x-transformers",
        "_torch:XTransformers",
        note="Query head h reads key/value head h % num_kv_heads, where others have h // (num_heads // num_kv_heads). "
        "Slopes, distances and bias are rounded to the model's dtype.",
    ),
    Subject(
        "x-transformers, flash",
        "x-transformers",
        "_torch:XTransformersFlash",
        note="The same bias as the mask of PyTorch's scaled_dot_product_attention.",
    ),
    Subject(
        "keras-hub",
        "keras-hub",
        "_keras:KerasHub",
        note="AlibiBias in its BloomAttention. Counts from the last key; slopes, positions and bias are rounded to the "
        "compute dtype.",
    ),
    Subject(
        "mlx.nn.ALiBi",
        "mlx",
        "_mlx:MlxNn",
        dtypes=("float32", "float16", "bfloat16"),
        note="Slopes, distances and bias are rounded to the dtype of the scores.",
    ),
    Subject(
        "attention-gym",
        "attn-gym",
        "_torch:AttentionGym",
        contract="geometric",
        note="generate_alibi_bias in eager FlexAttention, which computes scores in float32. The bias is signed: "
        "without a causal mask, keys ahead gain.",
    ),
    Subject(
        "FlexAttention's example",
        "torch",
        "_torch:Example",
        note="The score_mod of the text that introduced FlexAttention, with slopes of the caller's. Signed likewise.",
    ),
    Subject(
        "FlexAttention's first example",
        "torch",
        "_torch:ExampleAsFirstPublished",
        note="The same text had slope * (query - key) at first, which rewards distance; copies of it are still about.",
    ),
    Subject(
        "curated-transformers",
        "curated-transformers",
        "_torch:Curated",
        note="Counts from the last key if causal, by distance if not; slopes, distances and bias are rounded to the "
        "model's dtype.",
    ),
    Subject(
        "labml-nn",
        "labml-nn",
        "_torch:Labml",
        dtypes=("float32",),
        note="Counts from 1 at the first key, in float32.",
    ),
)
