"""Encoders with ALiBi in ``sentence-transformers``: ``SentenceTransformer(modules=[AlibiEmbedding.of(folder)])``."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from alibi_core.backend.checks import install_hint, one_of, positive_int
from alibi_core.backend.models import POOLING
from alibi_torch.nn import AlibiConfig, AlibiEncoder, load_checkpoint

try:
    from safetensors.torch import load_file, save_file
    from sentence_transformers.base.modules import InputModule
    from transformers import AutoTokenizer
except ModuleNotFoundError as error:
    hint = install_hint("sentence-transformers")
    raise ModuleNotFoundError(
        f"alibi_torch.sentence_transformers needs {error.name}; {hint}", name=error.name
    ) from error

__all__ = ["AlibiEmbedding"]

OWN_CONFIG, WEIGHTS = "alibi_embedding.json", "model.safetensors"


class AlibiEmbedding(InputModule):
    """Embed texts of any length by an :class:`AlibiEncoder`, padding-free: tokenizer, encoder, pooling, normalisation.

    It is the only module that a ``SentenceTransformer`` needs. No time is spent on padding in batches of different
    lengths, unless vectors of single tokens are asked for (``output_value="token_embeddings"``). Load a saved model by
    :meth:`of`, or by ``SentenceTransformer(folder, trust_remote_code=True)``; ``sentence-transformers`` requires this
    flag for every class outside of its package, but no code in the folder is executed.

    Args:
        encoder: The encoder.
        tokenizer: A tokenizer of ``transformers``.
        pooling: ``"mean"`` or ``"cls"``, as in :meth:`AlibiEncoder.encode`.
        normalize: Whether vectors are divided by their norm.
        max_seq_length: Texts are truncated to this many tokens. Default: no limit.

    Raises:
        ValueError: If ``pooling`` is unknown, or ``max_seq_length`` is below 1.

    Example:
        >>> from sentence_transformers import SentenceTransformer  # doctest: +SKIP
        >>> from alibi_torch.sentence_transformers import AlibiEmbedding
        >>> module = AlibiEmbedding.of("models/jina-embeddings-v2-small-en")  # doctest: +SKIP
        >>> model = SentenceTransformer(modules=[module])  # doctest: +SKIP
        >>> model.encode(["How far is it to Jena?", "Jena lies in Thuringia."]).shape  # doctest: +SKIP
        (2, 512)
    """

    save_in_root = True
    session: Any = None  # of onnxruntime, in place of the encoder

    def __init__(
        self,
        encoder: AlibiEncoder,
        tokenizer: Any,
        *,
        pooling: str = "mean",
        normalize: bool = False,
        max_seq_length: int | None = None,
    ) -> None:
        super().__init__()
        self.encoder, self.tokenizer = encoder, tokenizer
        self.pooling, self.normalize = one_of("pooling", pooling, POOLING), normalize
        self.max_seq_length = None if max_seq_length is None else positive_int("max_seq_length", max_seq_length)

    @classmethod
    def of(cls, folder: str | Path, *, dtype: torch.dtype | None = torch.float32, **options: Any) -> AlibiEmbedding:
        """Return the module of a local checkpoint of Jina-embeddings-v2, MosaicBERT or DNABERT-2, or of a saved module.

        Pooling, normalisation and maximum length are read from the folder's ``modules.json``,
        ``1_Pooling/config.json`` and ``sentence_bert_config.json``, if present. Nothing in the files is executed.

        Args:
            folder: The folder with ``config.json``, safetensors and the tokenizer's files.
            dtype: Dtype of the parameters; None for the dtype of the file.
            **options: ``pooling``, ``normalize`` and ``max_seq_length``, which override the folder's.

        Raises:
            FileNotFoundError: If a file is missing.
            ValueError: If the checkpoint belongs to a decoder or an unsupported family.
        """
        folder = Path(folder)
        if (folder / OWN_CONFIG).exists():
            own = _read(folder / OWN_CONFIG)
            fields = {name: tuple(x) if isinstance(x, list) else x for name, x in own.pop("config").items()}
            encoder = AlibiEncoder(AlibiConfig(**fields), own.pop("vocab_size"))
            encoder.load_state_dict(load_file(folder / WEIGHTS), assign=True)  # keeps the dtypes of the file
            encoder = encoder if dtype is None else encoder.to(dtype)
        else:
            encoder, own = load_checkpoint(folder, dtype=dtype), _options_of(folder)
        if not isinstance(encoder, AlibiEncoder):
            raise ValueError(f"folder must hold the checkpoint of an encoder, got that of a decoder, {str(folder)!r}")
        # The folder exists. Without local_files_only, files that it lacks would be looked for on the network.
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        # Where files are missing, transformers 5 makes a tokenizer that knows special tokens alone.
        if len(tokenizer) <= len(tokenizer.all_special_ids):
            raise FileNotFoundError(
                f"folder must hold the files of a tokenizer that knows words, such as tokenizer.json, got {folder}"
            )
        return cls(encoder, tokenizer, **own | options).eval()

    @classmethod
    def load(cls, model_name_or_path: str, subfolder: str = "", **options: Any) -> AlibiEmbedding:
        """Return the module that ``SentenceTransformer.save`` wrote; ``sentence-transformers`` calls this.

        ``dtype`` or ``torch_dtype`` in ``model_kwargs`` is the dtype of the parameters. Default: that of the file. With
        ``backend="onnx"``, onnxruntime embeds sentences, on the ``provider`` in ``model_kwargs``. The program is made
        here, and no file is written.
        """
        names = ("token", "cache_folder", "revision", "local_files_only")
        where = {name: options[name] for name in names if name in options}
        folder = cls.load_dir_path(model_name_or_path, subfolder=subfolder, **where)
        backend = one_of("backend", options.get("backend", "torch"), ("torch", "onnx"))
        model_kwargs = options.get("model_kwargs") or {}
        dtype = model_kwargs.get("dtype") or model_kwargs.get("torch_dtype")
        if isinstance(dtype, str):
            dtype = None if dtype == "auto" else getattr(torch, dtype)
        module = cls.of(folder, dtype=dtype)
        module.session = _session_of(module, model_kwargs.get("provider")) if backend == "onnx" else None
        return module

    def preprocess(self, inputs: Sequence[str], prompt: str | None = None, **_: Any) -> dict[str, Tensor]:
        """Return the tokens of prompt + text for each text, ``[batch, length]``, and the attention mask."""
        texts = [(prompt or "") + text for text in inputs]
        cut: dict[str, Any] = {"truncation": True, "max_length": self.max_seq_length} if self.max_seq_length else {}
        return dict(self.tokenizer(texts, padding=True, return_tensors="pt", **cut))

    def forward(self, features: dict[str, Any], **_: Any) -> dict[str, Any]:
        """Add ``sentence_embedding``, ``[batch, embed_dim]``, to ``features``."""
        types = features.get("token_type_ids") if self.encoder.config.token_types else None
        if self.session is None:
            features["sentence_embedding"] = self._embed(features["input_ids"], features["attention_mask"], types)
        else:
            inputs = {"token_type_ids": torch.zeros_like(features["input_ids"])} | features
            given = {x.name: inputs[x.name].cpu().numpy() for x in self.session.get_inputs()}
            features["sentence_embedding"] = torch.from_numpy(self.session.run(None, given)[0])
        mask = features["attention_mask"][:, None, None, :] != 0
        return _Features(features, lambda: self.encoder(features["input_ids"], mask=mask, token_types=types))

    def _embed(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None) -> Tensor:
        rules = {"mask": attention_mask, "token_types": token_type_ids, "pooling": self.pooling}
        vectors = self.encoder.encode(input_ids, **rules)
        return torch.nn.functional.normalize(vectors, dim=-1) if self.normalize else vectors

    def get_embedding_dimension(self) -> int:
        """Return the number of features of a vector."""
        return self.encoder.config.embed_dim

    def save(self, output_path: str, *_: Any, **__: Any) -> None:
        """Write the encoder's shape and weights, and the tokenizer, to a folder."""
        folder = Path(output_path)
        shape = {"config": asdict(self.encoder.config), "vocab_size": self.encoder.embedding.num_embeddings}
        options = {name: getattr(self, name) for name in ("pooling", "normalize", "max_seq_length")}
        (folder / OWN_CONFIG).write_text(json.dumps(shape | options, indent=2), encoding="utf-8")
        weights = {name: x.contiguous() for name, x in self.encoder.state_dict().items()}
        save_file(weights, folder / WEIGHTS, {"format": "pt"})
        self.save_tokenizer(output_path)


class _Program(torch.nn.Module):
    """What a program of ONNX computes: the vectors of sentences."""

    def __init__(self, module: AlibiEmbedding) -> None:
        super().__init__()
        self.module = module

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        return self.module._embed(input_ids, attention_mask, token_type_ids)


def _session_of(module: AlibiEmbedding, provider: str | None) -> Any:
    """Return a session of onnxruntime with the program of a module, for any number of texts of any length."""
    import onnxruntime

    # Different tensors: torch.export takes one that is given twice for one input.
    given = tuple(torch.ones((2, 8), dtype=torch.long) for _ in range(3 if module.encoder.config.token_types else 2))
    shapes = ({0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC},) * len(given)
    program = torch.onnx.export(_Program(module).eval(), given, dynamic_shapes=shapes, verbose=False)
    providers = onnxruntime.get_available_providers() if provider is None else [provider]
    return onnxruntime.InferenceSession(program.model_proto.SerializeToString(), providers=providers)


class _Features(dict[str, Any]):
    """Features whose ``token_embeddings``, ``[batch, length, embed_dim]``, are computed when they are read."""

    def __init__(self, features: dict[str, Any], of_tokens: Callable[[], Tensor]) -> None:
        super().__init__(features)
        self._of_tokens = of_tokens

    def __missing__(self, name: str) -> Tensor:
        if name != "token_embeddings":
            raise KeyError(name)
        self[name] = self._of_tokens()
        return self[name]


def _options_of(folder: Path) -> dict[str, Any]:
    """Return the options for pooling, normalisation and length from the config files of ``sentence-transformers``."""
    options: dict[str, Any] = {}
    modules = _read(folder / "modules.json") or []
    for module in modules:
        kind, place = module["type"].rpartition(".")[2], folder / module["path"]
        if kind == "Pooling":
            options["pooling"] = _pooling(_read(place / "config.json") or {})
        elif kind == "Normalize":
            options["normalize"] = True
    length = (_read(folder / "sentence_bert_config.json") or {}).get("max_seq_length")
    return options | ({} if length is None else {"max_seq_length": length})


def _pooling(config: dict[str, Any]) -> str:
    """Return the pooling of a module's config, in the old (one flag per mode) or the new form (``pooling_mode``)."""
    names = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}
    chosen = [name for name, value in config.items() if name.startswith("pooling_mode_") and value is True]
    mode = config.get("pooling_mode") or "+".join(names.get(name, name) for name in chosen) or "mean"
    return one_of("pooling mode", mode, POOLING)


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
