"""Checkpoints of models with ALiBi: their tensors, mapped to the parameter names of this library's models."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from alibi_core._models.config import AlibiConfig
from alibi_core._models.decoders import family_of
from alibi_core._models.encoders import MODEL_TYPE, encoder_of
from alibi_core._models.families import Family, Layout, Settings
from alibi_core._safetensors import StoredTensor, read_json, some, stored_tensors
from alibi_core._slopes import slope_values

HEAD = "lm_head.weight"
QKV = ("q", "k", "v")

# The module of a block for each part that a Layout names.
MODULES = {letter: f"attention.{letter}_proj" for letter in QKV} | {
    "out": "attention.out_proj",
    "gate": "feed_forward.0",  # its first rows
    "up": "feed_forward.0",
    "down": "feed_forward.2",
    "attention_norm": "attention_norm",
    "feed_forward_norm": "feed_forward_norm",
}


@dataclass(frozen=True)
class Source:
    """The source of a parameter, or of a block of its rows."""

    tensor: str  # its name in the checkpoint
    shape: tuple[int, ...]
    take: Callable[[Any], Any] | None = None  # takes the tensor's values, returns the rows; None for all rows


Sources = dict[str, tuple[Source, ...]]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint with validated names, shapes and lengths; its values are not read yet."""

    family: Family
    sources: Sources  # by parameter name in this library: the sources of its rows, from the top
    tensors: dict[str, StoredTensor]

    @classmethod
    def open(cls, directory: str | os.PathLike[str]) -> Checkpoint:
        """Validate and return the checkpoint in a directory; ``load_checkpoint`` of the backends documents it."""
        if not isinstance(directory, (str, os.PathLike)):
            raise TypeError(f"directory must be a path, got {type(directory).__name__}")
        path = Path(directory)
        if not os.fspath(directory) or not path.is_dir():  # Path("") is the current directory
            raise FileNotFoundError(
                f"directory must be one that holds a checkpoint, got {os.fspath(directory)!r}; nothing is downloaded: "
                "huggingface_hub.snapshot_download gives such a directory for the name of a model"
            )
        settings, tensors = Settings(read_json(path / "config.json"), str(path / "config.json")), stored_tensors(path)
        is_encoder = settings.values.get("model_type") == MODEL_TYPE
        family = encoder_of(settings, tensors) if is_encoder else family_of(settings)
        # A wrong number of layers would otherwise build a huge table of names.
        if family.config.num_layers > len(tensors):
            raise ValueError(
                f"number of layers in {settings.place} must be that of the checkpoint, which holds "
                f"{len(tensors)} tensors, got {family.config.num_layers}"
            )
        layout = family.layout.as_in(tensors)
        sources = _sources(family, layout)
        _check_tensors(path, family, layout, sources, tensors)
        _check_stored_slopes(path, family.config, layout, tensors)
        return cls(family, sources, tensors)

    @property
    def config(self) -> AlibiConfig:
        """Shape of the language model or encoder."""
        return self.family.config

    @property
    def vocab_size(self) -> int:
        """Number of tokens in the vocabulary."""
        return self.family.vocab_size

    @property
    def dtype_name(self) -> str:
        """Name of the stored dtype of the embeddings, in the spelling of all frameworks, such as ``"float32"``."""
        stored = self.tensors[self.sources["embedding.weight"][0].tensor].dtype
        return {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}[stored]

    def parameters(self) -> Iterator[tuple[str, Any]]:
        """Yield each parameter's name and values, reading one tensor at a time (bfloat16 as float32)."""
        last, array = "", np.empty(0)
        for name, sources in self.sources.items():
            parts = []
            for source in sources:
                if source.tensor != last:
                    last, array = source.tensor, self.tensors[source.tensor].read()
                parts.append(array if source.take is None else source.take(array))
            yield name, parts[0] if len(parts) == 1 else np.concatenate(parts)


def _sources(family: Family, layout: Layout) -> Sources:
    config = family.config
    matrix = (family.vocab_size, config.embed_dim)
    sources: Sources = {"embedding.weight": (Source(f"{layout.embedding}.weight", matrix),)}
    if layout.token_type_embedding is not None:
        shape = (config.token_types, config.embed_dim)
        sources["token_type_embedding.weight"] = (Source(f"{layout.token_type_embedding}.weight", shape),)
    if layout.embedding_norm is not None:
        _add_norm(sources, "embedding_norm", layout.embedding_norm, config)
    for index in range(config.num_layers):
        ours, theirs = f"transformer.blocks.{index}", f"{layout.blocks}.{index}"
        found: dict[str, dict[str, Source]] = {}  # by parameter, then by the layout's name of its rows
        for module, held in layout.block.items():
            if held.endswith("norm"):
                _add_norm(sources, f"{ours}.{held}", f"{theirs}.{module}", config)
                continue
            for ending, name, source in _projections(config, layout, f"{theirs}.{module}", held.split()):
                found.setdefault(f"{ours}.{MODULES[name]}.{ending}", {})[name] = source
        # Rows in the order of MODULES, whatever their order in the checkpoint: the gate before "up".
        sources |= {name: tuple(rows[x] for x in MODULES if x in rows) for name, rows in found.items()}
    if layout.norm is not None:
        _add_norm(sources, "transformer.norm", layout.norm, config)
    if not config.tied_head:
        take = _rows_of_unit_norm if layout.head_of_unit_rows else None
        sources["head.weight"] = (Source(HEAD, matrix, take),)
    return sources


def _add_norm(sources: Sources, ours: str, theirs: str, config: AlibiConfig) -> None:
    for ending in ("weight", "bias") if config.norm_bias and config.norm == "layer_norm" else ("weight",):
        sources[f"{ours}.{ending}"] = (Source(f"{theirs}.{ending}", (config.embed_dim,)),)


def _projections(
    config: AlibiConfig, layout: Layout, module: str, parts: list[str]
) -> Iterator[tuple[str, str, Source]]:
    """Yield (ending, part, source) for weight and bias of a module, and each projection that it holds."""
    # Rows of each part of a fused module.
    width, hidden, keys = config.embed_dim, config.hidden_dim, (config.num_kv_heads or config.num_heads)
    sizes = {"q": width, "k": keys * config.head_dim, "v": keys * config.head_dim, "out": width, "down": width}
    rows = [sizes.get(part, hidden) for part in parts]
    shape = sum(rows), hidden if parts == ["down"] else width
    of_module = {"feed_forward.0": config.has_up_bias, "feed_forward.2": config.feed_forward_bias}
    has_bias = of_module.get(MODULES[parts[0]], config.bias)
    for ending in ("weight", "bias") if has_bias else ("weight",):
        is_transposed = layout.is_transposed and ending == "weight"
        stored = shape[:1] if ending == "bias" else shape[::-1] if is_transposed else shape
        for index, part in enumerate(parts):
            take: Any = partial(
                _rows_of, start=sum(rows[:index]), stop=sum(rows[: index + 1]), is_transposed=is_transposed
            )
            if layout.groups_qkv and parts == list(QKV):
                take = partial(_part_of_groups, index=index, num_heads=config.num_heads, num_kv_heads=keys)
            elif len(parts) == 1 and not is_transposed:
                take = None
            yield ending, part, Source(f"{module}.{ending}", stored, take)


def _check_tensors(
    path: Path, family: Family, layout: Layout, sources: Sources, tensors: dict[str, StoredTensor]
) -> None:
    expected = {source.tensor: source.shape for parts in sources.values() for source in parts}
    ignored = re.compile("|".join((re.escape(HEAD), *layout.ignored)))
    missing = sorted(expected.keys() - tensors.keys())
    unknown = sorted(
        name for name in tensors.keys() - expected.keys() - {layout.stored_slopes} if not ignored.fullmatch(name)
    )
    if missing or unknown:
        kind = "language model" if family.config.is_causal else "encoder"
        # A common prefix of unknown names suggests a wrapped model.
        ends = [name.partition(missing[0])[0] for name in unknown if missing and name.endswith(f".{missing[0]}")]
        how = f"names begin with {ends[0]!r}, as those of a wrapped model: save the model inside; " if ends else ""
        raise ValueError(
            f"{path} must hold the tensors of the {family.name} {kind} in its config.json, got "
            f"{some(missing) if missing else 'none'} missing and {some(unknown) if unknown else 'none'} unknown; "
            f"{how}save the model with the config it was made with, and without adapters or other heads"
        )
    for name in expected.keys() | tensors.keys() & {HEAD}:
        tensors[name].check_dtype(name)
    for name, shape in expected.items():
        if tensors[name].shape != shape:
            raise ValueError(f"{name} in {path} must have shape {shape} by its config.json, got {tensors[name].shape}")
    if HEAD in tensors and HEAD not in expected:
        embedding = f"{layout.embedding}.weight"
        if not np.array_equal(tensors[HEAD].read(), tensors[embedding].read()):
            raise ValueError(
                f"{HEAD} in {path} must equal {embedding} where config.json says tie_word_embeddings, got another; "
                "set tie_word_embeddings to false if the model has a head of its own"
            )


def _check_stored_slopes(path: Path, config: AlibiConfig, layout: Layout, tensors: dict[str, StoredTensor]) -> None:
    """Check that slopes stored in the checkpoint, if any, equal the canonical slopes up to rounding of their dtype."""
    name = layout.stored_slopes
    if name is None or name not in tensors:
        return
    tensors[name].check_dtype(name)
    rule = np.asarray(slope_values(config.num_heads))
    stored = np.asarray(tensors[name].read(), np.float64).reshape(-1)
    # At least the unit roundoff of the stored dtype.
    rounding = {"BF16": 2.0**-8, "F16": 2.0**-10}.get(tensors[name].dtype, 2.0**-22)
    if stored.shape != rule.shape or not (np.abs(stored - rule) <= rounding * rule).all():
        raise ValueError(
            f"{name} in {path} must hold the canonical slopes of {config.num_heads} heads, got {some(stored.tolist())}"
        )


def _rows_of(tensor: Any, *, start: int, stop: int, is_transposed: bool = False) -> Any:
    """Return rows ``start`` to ``stop - 1`` of a tensor, or of its transpose if ``is_transposed``."""
    rows = tensor.T if is_transposed else tensor
    return rows[start:stop].copy()  # a view would keep the other rows in memory


def _part_of_groups(fused: Any, *, index: int, num_heads: int, num_kv_heads: int) -> Any:
    """Return queries (index 0), keys (1) or values (2) of an interleaved weight.

    ``fused`` is ``[(num_heads + 2 * num_kv_heads) * head_dim, ...]``: for each key/value head, its queries, its key,
    its value.
    """
    group, rest = num_heads // num_kv_heads, fused.shape[1:]
    rows = fused.reshape(num_kv_heads, group + 2, -1, *rest)  # [num_kv_heads, group + 2, head_dim, ...]
    chosen = (slice(0, group), slice(group, group + 1), slice(group + 1, group + 2))[index]
    return np.ascontiguousarray(rows[:, chosen]).reshape(-1, *rest)


def _rows_of_unit_norm(tensor: Any) -> Any:
    """Return a matrix in float64 with rows of Euclidean norm 1; rows of zeros stay zeros."""
    exact = tensor.astype(np.float64)  # a float16 tensor may be loaded in a wider dtype
    return exact / np.maximum(np.linalg.norm(exact, axis=1, keepdims=True), 1e-12)
