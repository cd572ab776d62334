"""Embeddings of long texts in sentence-transformers, from small checkpoints with random weights."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sentence_transformers")

from sentence_transformers import SentenceTransformer  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402
from transformers import PreTrainedTokenizerFast  # noqa: E402

import alibi_torch  # noqa: E402
from alibi_torch.sentence_transformers import AlibiEmbedding  # noqa: E402
from tests.support.checkpoints import drawn, write  # noqa: E402

ENCODERS = Path(__file__).parents[1] / "support" / "encoders"
TEXTS = ["w1 w2", "w3 w4 w5 w6 w7 w8 w9", "w2", "w9 w8 w7 w6"]


@pytest.fixture(params=["jina-geglu", "mosaic-bert", "dnabert-2"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return a folder with a checkpoint of a family, a tokenizer, and the files of sentence-transformers."""
    record = json.loads((ENCODERS / f"{request.param}.json").read_text())
    tensors = {name: drawn(name, tuple(shape)) for name, shape in record["shapes"].items()}
    folder = write(tmp_path / "model", record["config"], tensors)
    words = Tokenizer(models.WordLevel({"[PAD]": 0, "[UNK]": 1} | {f"w{i}": i + 2 for i in range(20)}, "[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(folder)
    return folder


def expected(folder: Path, text: str, pooling: str = "mean") -> np.ndarray:
    """Return the vector of a text by itself, from the encoder alone."""
    tokens = torch.tensor([[int(number) + 2 for number in re.findall(r"\d+", text)]])
    with torch.no_grad():
        return alibi_torch.load_checkpoint(folder, dtype=torch.float32).encode(tokens, pooling=pooling)[0].numpy()


def test_texts_of_several_lengths_are_embedded_as_each_alone(folder: Path) -> None:
    model = SentenceTransformer(modules=[AlibiEmbedding.of(folder)], device="cpu")
    for size in (1, 3):
        found = model.encode(TEXTS, batch_size=size)
        np.testing.assert_allclose(found, np.stack([expected(folder, text) for text in TEXTS]), atol=1e-5)
    np.testing.assert_allclose(model.encode("w4", prompt="w2 w3 "), expected(folder, "w2 w3 w4"), atol=1e-5)
    assert model.get_embedding_dimension() == found.shape[1]
    for vectors, text in zip(model.encode(TEXTS, output_value="token_embeddings"), TEXTS, strict=True):
        assert len(vectors) == len(text.split())
        np.testing.assert_allclose(vectors.mean(axis=0), expected(folder, text), atol=1e-5)


@pytest.mark.slow
def test_a_compiled_model_embeds_the_same(folder: Path) -> None:
    torch.compiler.reset()
    model = SentenceTransformer(modules=[AlibiEmbedding.of(folder)], device="cpu")
    model.compile(backend="eager")
    for texts in (TEXTS, TEXTS[:1], TEXTS[1:]):  # padded, without padding, and padded elsewhere
        np.testing.assert_allclose(model.encode(texts), np.stack([expected(folder, x) for x in texts]), atol=1e-5)


def test_pooling_norm_and_length_are_those_of_the_folder(folder: Path, tmp_path: Path) -> None:
    kinds = ("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": path} for kind, path in kinds]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 3}))
    (folder / "1_Pooling").mkdir()
    for config in ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, {"pooling_mode": "cls"}):
        (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 8} | config))
        model = SentenceTransformer(modules=[AlibiEmbedding.of(folder)], device="cpu")
        vector = expected(folder, "w3 w4 w5", "cls")
        np.testing.assert_allclose(model.encode(TEXTS[1]), vector / np.linalg.norm(vector), atol=1e-5)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_max_tokens": True}))
    with pytest.raises(ValueError, match="pooling mode must be one of 'mean', 'cls', got 'pooling_mode_max_tokens'"):
        AlibiEmbedding.of(folder)


def test_only_a_folder_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(*_: object) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr("socket.socket.connect", connect)
    with pytest.raises(FileNotFoundError, match="directory must be one that holds a checkpoint, got 'some/model'"):
        AlibiEmbedding.of("some/model")


def test_a_folder_without_its_tokenizer_is_refused(folder: Path) -> None:
    for file in folder.glob("*token*"):
        file.unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "bert"}))
    with pytest.raises(
        FileNotFoundError, match=r"folder must hold the files of a tokenizer that knows words, such as tokenizer\.json"
    ):
        AlibiEmbedding.of(folder)


def test_a_length_of_no_token_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="max_seq_length must be at least 1, got 0"):
        AlibiEmbedding.of(folder, max_seq_length=0)


def test_a_trained_model_is_saved_and_loaded(folder: Path, tmp_path: Path) -> None:
    module = AlibiEmbedding.of(folder, normalize=True, max_seq_length=5)
    model = SentenceTransformer(modules=[module], device="cpu")
    model.train()
    model(model.preprocess(TEXTS))["sentence_embedding"][0, 0].backward()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter -= 0.1 * (0 if parameter.grad is None else parameter.grad)
    model.eval()
    model.save(str(tmp_path / "saved"))
    said = json.loads((own := tmp_path / "saved" / "alibi_embedding.json").read_text())
    assert said["config"].pop("gradient_checkpointing") is False  # older folders do not say it
    own.write_text(json.dumps(said))
    modules = [AlibiEmbedding.of(tmp_path / "saved")]
    # sentence-transformers asks for trust in every class that is not its own.
    trusted = SentenceTransformer(str(tmp_path / "saved"), device="cpu", trust_remote_code=True)
    with pytest.raises(ValueError, match="backend must be one of 'torch', 'onnx', got 'openvino'"):
        SentenceTransformer(str(tmp_path / "saved"), device="cpu", trust_remote_code=True, backend="openvino")
    for again in (SentenceTransformer(modules=modules, device="cpu"), trusted):
        np.testing.assert_array_equal(again.encode(TEXTS), model.encode(TEXTS))
        assert (again.max_seq_length, again[0].normalize) == (5, True)
    assert np.abs(model.encode(TEXTS[0]) - expected(folder, TEXTS[0])).max() > 1e-3


@pytest.mark.slow
def test_onnxruntime_embeds_sentences(folder: Path, tmp_path: Path) -> None:
    for name in ("onnxscript", "onnxruntime"):
        pytest.importorskip(name)
    module = AlibiEmbedding.of(folder, normalize=True)
    SentenceTransformer(modules=[module], device="cpu").save(str(tmp_path / "saved"))
    torch_model, onnx_model = (
        SentenceTransformer(str(tmp_path / "saved"), device="cpu", trust_remote_code=True, backend=backend)
        for backend in ("torch", "onnx")
    )
    onnx_model[0].encoder.encode = None  # the program embeds alone
    for texts in (TEXTS, TEXTS[:1], [" ".join(TEXTS) * 3]):
        np.testing.assert_allclose(onnx_model.encode(texts), torch_model.encode(texts), atol=1e-5)


def test_gradient_checkpointing_is_honoured(folder: Path) -> None:
    model = SentenceTransformer(modules=[AlibiEmbedding.of(folder)], device="cpu").train()
    block, calls = model[0].encoder.transformer.blocks[0], []
    block.attention.out_proj.register_forward_hook(lambda *_: calls.append(1))
    for every, count in ((None, 1), (1, 2)):
        if every:  # as SentenceTransformerTrainer calls it
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=None, every_n_layers=every, offload=False)
        calls.clear()
        model(model.preprocess(TEXTS))["sentence_embedding"].sum().backward()
        assert len(calls) == count


def test_a_saved_model_keeps_its_dtype(folder: Path, tmp_path: Path) -> None:
    module = AlibiEmbedding.of(folder, dtype=torch.bfloat16)
    SentenceTransformer(modules=[module], device="cpu").save(str(tmp_path / "saved"))
    for dtype, right in ((None, torch.bfloat16), (torch.float32, torch.float32)):
        again = AlibiEmbedding.of(tmp_path / "saved", dtype=dtype)
        assert {x.dtype for x in again.parameters()} == {right}
        assert all(x.requires_grad for x in again.parameters())
        torch.testing.assert_close(again.state_dict(), module.state_dict(), rtol=0, atol=0, check_dtype=False)
    for options, right in (
        ({}, torch.bfloat16),
        ({"torch_dtype": "auto"}, torch.bfloat16),
        ({"torch_dtype": torch.float32}, torch.float32),
        ({"dtype": "float16"}, torch.float16),
    ):
        again = SentenceTransformer(str(tmp_path / "saved"), device="cpu", trust_remote_code=True, model_kwargs=options)
        assert {x.dtype for x in again.parameters()} == {right}
