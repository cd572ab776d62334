"""Checkpoints of ``transformers``' ALiBi decoders: what is in them, under which names a language model has it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from alibi_core._arrays import checks
from alibi_core._models.config import AlibiConfig
from alibi_core._models.families import Family, family_of
from alibi_core._models.safetensors import StoredTensor, read_json, some, stored_tensors

PREFIX, HEAD = "transformer.", "lm_head.weight"
CONTRACTS = ("exact", "model")
QKV = ("q", "k", "v")


@dataclass(frozen=True)
class Source:
    """Where a parameter comes from.

    Attributes:
        tensor: Name of the checkpoint's tensor.
        shape: Its shape.
        part: Index of query, key or value in a tensor of all three; None for a tensor taken whole.
    """

    tensor: str
    shape: tuple[int, ...]
    part: int | None = None


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose names, shapes and lengths have been checked, and whose values have yet to be read.

    Attributes:
        family: Whose it is and what that says of its attention.
        config: Shape of the language model.
        vocab_size: Number of its tokens.
        sources: Where each parameter comes from, by its name in ``AlibiLanguageModel``.
        tensors: What the files hold.
        contract: Whose bias it is to be loaded with.
    """

    family: Family
    config: AlibiConfig
    vocab_size: int
    sources: dict[str, Source]
    tensors: dict[str, StoredTensor]
    contract: str = "exact"

    @classmethod
    def open(cls, directory: str | os.PathLike[str], *, contract: str = "exact") -> Checkpoint:
        """Check a checkpoint.

        Args:
            directory: Where ``config.json`` and ``model.safetensors``, or its shards and their index, are.
            contract: Whose bias: ``"exact"`` or ``"model"``.

        Raises:
            FileNotFoundError: If a file is missing.
            TypeError: If an argument or an entry of the config is of the wrong kind.
            ValueError: If it is no checkpoint of an ALiBi decoder that can be loaded, is damaged, or does not hold
                the tensors that its config describes.
        """
        if not isinstance(directory, (str, os.PathLike)):
            raise TypeError(f"directory must be a path, got {type(directory).__name__}")
        checks.one_of("contract", contract, CONTRACTS)
        path = Path(directory)
        if not path.is_dir():
            raise FileNotFoundError(f"directory must be one that holds a checkpoint, got {str(path)!r}")
        family = family_of(read_json(path / "config.json"), path / "config.json", contract)
        tensors = stored_tensors(path)
        if family.config.num_layers > len(tensors):
            raise ValueError(
                f"number of layers in {path / 'config.json'} must be that of the checkpoint, which holds "
                f"{len(tensors)} tensors, got {family.config.num_layers}"
            )
        # A model without its head is saved without the prefix, BLOOM's own files among them.
        prefix = "" if f"{family.names.embedding}.weight" in tensors else PREFIX
        sources = _sources(family, prefix)
        expected = {source.tensor: source.shape for source in sources.values()}
        _check_tensors(path, family, prefix, expected, tensors)
        return cls(family, family.config, family.vocab_size, sources, tensors, contract)

    @property
    def dtype_name(self) -> str:
        """Name of the dtype that its embeddings are stored in, as every framework calls it."""
        stored = self.tensors[self.sources["embedding.weight"].tensor].dtype
        return {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}[stored]

    def check_precision(self, bits: int) -> None:
        """Check that a model whose dtype has so many bits can have the bias asked for."""
        if self.contract == "model" and self.family.name == "bloom" and bits < 32:
            raise ValueError(
                "contract must be 'exact' for BLOOM in low precision, got 'model', whose bias is rounded to the "
                "model's dtype; or load it as float32, where the two agree to rounding"
            )

    def parameters(self) -> Iterator[tuple[str, Any]]:
        """Yield each parameter's name and values, one tensor being read at a time (bfloat16 as float32)."""
        last, array = "", None
        for name, source in self.sources.items():
            if source.tensor != last:
                last, array = source.tensor, self.tensors[source.tensor].read()
            yield name, array if source.part is None else self._part(array, source.part)

    def _part(self, fused: Any, part: int) -> Any:
        """Return the rows of query, key or value, ``[heads * head_dim, ...]``, of a projection to all three."""
        config, rest = self.config, fused.shape[1:]
        if self.family.names.stacks_qkv:  # [queries, keys, values]
            return np.split(fused, 3)[part]
        num_kv_heads = config.num_kv_heads or config.num_heads
        group = config.num_heads // num_kv_heads
        rows = fused.reshape(num_kv_heads, group + 2, config.head_dim, *rest)  # its queries, then key and value
        chosen = (slice(0, group), slice(group, group + 1), slice(group + 1, group + 2))[part]
        return np.ascontiguousarray(rows[:, chosen]).reshape(-1, *rest)


def _sources(family: Family, prefix: str) -> dict[str, Source]:
    config, names = family.config, family.names
    width, hidden = config.embed_dim, config.hidden_dim
    fused = (config.num_heads + 2 * (config.num_kv_heads or config.num_heads)) * config.head_dim
    sources: dict[str, Source] = {}

    def add(ours: str, theirs: str, shape: tuple[int, ...], has_bias: bool, part: int | None = None) -> None:
        sources[f"{ours}.weight"] = Source(f"{prefix}{theirs}.weight", shape, part)
        if has_bias:
            sources[f"{ours}.bias"] = Source(f"{prefix}{theirs}.bias", shape[:1], part)

    add("embedding", names.embedding, (family.vocab_size, width), has_bias=False)
    if names.embedding_norm is not None:
        add("embedding_norm", names.embedding_norm, (width,), config.norm_bias)
    for index in range(config.num_layers):
        ours, theirs = f"transformer.blocks.{index}", f"{names.blocks}.{index}"
        add(f"{ours}.attention_norm", f"{theirs}.{names.attention_norm}", (width,), config.norm_bias)
        for part, letter in enumerate(QKV):
            add(f"{ours}.attention.{letter}_proj", f"{theirs}.{names.qkv}", (fused, width), config.bias, part)
        add(f"{ours}.attention.out_proj", f"{theirs}.{names.out}", (width, width), config.bias)
        if names.feed_forward_norm is not None:
            add(f"{ours}.feed_forward_norm", f"{theirs}.{names.feed_forward_norm}", (width,), config.norm_bias)
        add(f"{ours}.feed_forward.0", f"{theirs}.{names.up}", (hidden, width), config.feed_forward_bias)
        add(f"{ours}.feed_forward.2", f"{theirs}.{names.down}", (width, hidden), config.feed_forward_bias)
    add("transformer.norm", names.norm, (width,), config.norm_bias)
    if not config.tied_head:
        sources["head.weight"] = Source(HEAD, (family.vocab_size, width))
    return sources


def _check_tensors(
    path: Path, family: Family, prefix: str, expected: dict[str, tuple[int, ...]], tensors: dict[str, StoredTensor]
) -> None:
    missing = sorted(expected.keys() - tensors.keys())
    unknown = sorted(tensors.keys() - expected.keys() - {HEAD})
    if missing or unknown:
        raise ValueError(
            f"{path} must hold the tensors of the {family.name} language model in its config.json, got "
            f"{some(missing) if missing else 'none'} missing and {some(unknown) if unknown else 'none'} unknown; "
            f"save the model with the config it was made with, and without adapters or other heads"
        )
    for name, shape in expected.items():
        if tensors[name].shape != shape:
            raise ValueError(f"{name} in {path} must have shape {shape} by its config.json, got {tensors[name].shape}")
    if HEAD in tensors and HEAD not in expected:
        embedding = f"{prefix}{family.names.embedding}.weight"
        if not np.array_equal(tensors[HEAD].read(), tensors[embedding].read()):
            raise ValueError(
                f"{HEAD} in {path} must equal {embedding} where config.json says tie_word_embeddings, got another; "
                "set tie_word_embeddings to false if the model has a head of its own"
            )
