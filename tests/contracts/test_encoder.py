"""Encoders with ALiBi: embeddings of the families' original code, in every framework.

``tests/support/encoders`` holds a file for each variant: its config, the names and shapes of its state dict, and the
embeddings of padded texts that the original code computed in float64, with its error in float32. Weights and tokens are
drawn from the same seeds.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from alibi_core.backend.models import POOLING, AlibiConfig, Checkpoint
from tests.support.checkpoints import drawn, load, write
from tests.support.frameworks import LIBRARIES, Backend, few_in_jax, slow_in_jax
from tests.support.layers import make_module

pytest.importorskip("safetensors")
from safetensors.numpy import save_file

RECORDS = {
    path.stem: json.loads(path.read_text()) for path in sorted(Path(__file__).parents[1].glob("support/encoders/*"))
}
SMALLEST = "jina-geglu"


def texts(record: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens and token types, ``[3, length]``."""
    rng, shape = np.random.default_rng(11), (len(record["lengths"]), max(record["lengths"]))
    return rng.integers(1, 31, shape).astype(np.int32), rng.integers(0, 2, shape).astype(np.int32)


def save(variant: str, directory: Path, *, prefix: str = "", shards: int = 1, **tensors: Any) -> Path:
    """Write a variant's checkpoint as ``save_pretrained`` does, with other tensors; None removes one."""
    record = RECORDS[variant]
    held = {name: drawn(name, tuple(shape)) for name, shape in record["shapes"].items()} | tensors
    held = {f"{prefix}{name}": tensor for name, tensor in held.items() if tensor is not None}
    return write(directory, record["config"], held, shards)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Backend, str], Any]:
    """Return a function from a backend and a variant to its encoder."""

    @functools.cache
    def get(backend: Backend, variant: str) -> Any:
        return load(backend.framework.name, save(variant, tmp_path_factory.mktemp("encoder")))

    return get


def encode(backend: Backend, model: Any, tokens: np.ndarray, **options: Any) -> np.ndarray:
    framework = backend.framework
    return framework.numpy(model.encode(framework.array(tokens), **framework.placed(options)))


def close(record: dict[str, Any], case: str, pooling: str, actual: np.ndarray) -> None:
    """Check embeddings to four times the error that the original makes in float32."""
    expected = record[case]
    assert np.abs(actual - expected[pooling]).max() <= 4 * expected["float32_error"]


@pytest.mark.parametrize(("backend", "variant"), few_in_jax(LIBRARIES, RECORDS, SMALLEST, "mosaic-bert"))
def test_embeddings_are_those_of_the_original(variant: str, backend: Backend, loaded: Any) -> None:
    record, model = RECORDS[variant], loaded(backend, variant)
    tokens, types = texts(record)
    options = {"lengths": np.asarray(record["lengths"]), "token_types": types}
    close(record, "types mixed", "mean", encode(backend, model, tokens, **options))


# --- Padding -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", LIBRARIES)
def test_padding_may_be_anywhere(backend: Backend, loaded: Any) -> None:
    record, model = RECORDS[SMALLEST], loaded(backend, SMALLEST)
    tokens, lengths = texts(record)[0], record["lengths"]
    shifted, mask = np.zeros_like(tokens), np.zeros(tokens.shape, bool)
    for row, (length, start) in enumerate(zip(lengths, (0, 40, 11), strict=True)):
        shifted[row, start : start + length] = tokens[row, :length]
        mask[row, start : start + length] = True
    close(record, "types zeros", "mean", encode(backend, model, shifted, mask=mask))
    cls = encode(backend, model, shifted, mask=mask.astype(np.int32), pooling="cls")
    close(record, "types zeros", "cls", cls)
    gap = np.arange(tokens.shape[1]) < np.asarray(lengths)[:, None]
    gap[:, 5:15] = False  # padding within a text counts in its distances
    close(record, "gap from 5 to 15", "mean", encode(backend, model, tokens, mask=gap))


@pytest.mark.parametrize("backend", slow_in_jax(LIBRARIES))
def test_what_stands_in_padding_changes_nothing_and_rows_without_text_are_zeros(backend: Backend, loaded: Any) -> None:
    record, model = RECORDS[SMALLEST], loaded(backend, SMALLEST)
    tokens, types = texts(record)
    text = np.arange(tokens.shape[1]) < np.asarray([*record["lengths"][:2], 0])[:, None]
    for mask in (text, text[:, ::-1].copy(), text & (np.arange(tokens.shape[1]) % 7 > 1)):
        first = encode(backend, model, tokens, mask=mask, token_types=types)
        assert (first[2] == 0).all()
        assert np.isfinite(first).all()
        for number in (3, -100, 10**6):
            other, others = (np.where(mask, x, number).astype(np.int32) for x in (tokens, types))
            assert np.array_equal(encode(backend, model, other, mask=mask, token_types=others), first)
    assert (encode(backend, model, tokens, lengths=[0, 0, 0], pooling="cls") == 0).all()


@pytest.mark.parametrize("backend", LIBRARIES)
@pytest.mark.parametrize("pooling", POOLING)
def test_no_texts_have_no_vectors_and_empty_texts_have_zeros(backend: Backend, pooling: str, loaded: Any) -> None:
    model, width = loaded(backend, SMALLEST), RECORDS[SMALLEST]["config"]["hidden_size"]
    for batch, length in ((0, 5), (3, 0)):
        for options in ({}, {"lengths": [0] * batch}, {"mask": np.ones((batch, length), bool)}):
            found = encode(backend, model, np.zeros((batch, length), np.int32), pooling=pooling, **options)
            np.testing.assert_array_equal(found, np.zeros((batch, width)))


@pytest.mark.parametrize("backend", LIBRARIES)
def test_arguments_that_do_not_fit_are_refused(backend: Backend, loaded: Any) -> None:
    model, tokens = loaded(backend, SMALLEST), texts(RECORDS[SMALLEST])[0]
    for error, message, options in (
        (ValueError, "^pooling must be one of 'mean', 'cls', got 'max'", {"pooling": "max"}),
        (ValueError, "^lengths must be None where a mask is given", {"lengths": [1] * 3, "mask": tokens != 0}),
        (ValueError, r"^lengths must have shape \(batch 3,\), got \(2,\)", {"lengths": [1, 2]}),
        (ValueError, r"^lengths must be from 0 to .* 70, got \[1, 2, 71\]", {"lengths": [1, 2, 71]}),
        (TypeError, "^lengths must be integers, got float64", {"lengths": [1.0, 2.0, 3.0]}),
        (TypeError, "^mask must be booleans, or integers, got float32", {"mask": np.ones((3, 70), np.float32)}),
        (ValueError, r"^mask must have the shape of tokens, \(3, 70\), got \(3, 69\)", {"mask": tokens[:, 1:] != 0}),
        (ValueError, r"^token_types must have the shape of tokens, \(3, 70\), got \(1,", {"token_types": tokens[:1]}),
        (TypeError, "^token_types must have an integer dtype, got .*float32", {"token_types": tokens * np.float32(1)}),
    ):
        with pytest.raises(error, match=message):
            encode(backend, model, tokens, **options)
    for number in (-1, 10**6):  # JAX would return NaN, and MLX would read other memory
        other = np.where(np.arange(70) == 1, number, tokens).astype(np.int32)
        for options in ({}, {"lengths": [2, 3, 4]}, {"mask": np.arange(210).reshape(3, 70) % 7 > 0}):
            with pytest.raises(ValueError, match=f"^tokens must be from 0 to 30, for .* embeddings, got {number}$"):
                encode(backend, model, other, **options)
            with pytest.raises(ValueError, match=f"^token_types must be from 0 to 1, for .* embeddings, got {number}$"):
                encode(backend, model, tokens, token_types=(other == number) * number, **options)
    with pytest.raises(ValueError, match=r"^tokens must have shape \(batch, length\), got \(70,\)"):
        encode(backend, model, tokens[0])
    with pytest.raises(TypeError, match=r"^tokens must be an array, got \[\[1, 2\]\]"):
        model.encode([[1, 2]])
    if backend.framework.name != "jax":  # JAX takes NumPy's arrays
        with pytest.raises(TypeError, match="got .*numpy.*; make these arrays of .*: token_types"):
            model.encode(backend.framework.array(tokens, "int32"), token_types=np.ones_like(tokens))
    plain = make_module(backend.framework.name, "AlibiEncoder", AlibiConfig(num_layers=1, is_causal=False), 31)
    with pytest.raises(ValueError, match="^token_types must be None for a model whose config has none"):
        encode(backend, plain, tokens, token_types=tokens)


# --- Files ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", LIBRARIES)
def test_shards_of_a_model_with_heads_are_read(backend: Backend, tmp_path: Path) -> None:
    record, head = RECORDS["mosaic-bert"], np.zeros((31, 24), np.float32)
    save("mosaic-bert", tmp_path, prefix="bert.", shards=3)
    heads = dict.fromkeys(("cls.predictions.decoder.weight", "classifier.weight", "qa_outputs.weight"), head)
    copied = {"bert.embeddings.word_embeddings.weight": head}  # the index names another file for it
    save_file(heads | copied, tmp_path / "model-3.safetensors")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    index["weight_map"] |= dict.fromkeys(heads, "model-3.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    model = load(backend.framework.name, tmp_path)
    close(record, "types zeros", "mean", encode(backend, model, texts(record)[0], lengths=record["lengths"]))
    low = load(backend.framework.name, tmp_path, dtype=backend.framework.xp.bfloat16)
    embeddings = low.encode(backend.framework.array(texts(record)[0]), lengths=record["lengths"])
    assert "float32" in str(embeddings.dtype)
    # A block rounds a dozen times, by at most 2**-9 each, numbers of unit variance.
    assert np.abs(backend.framework.numpy(embeddings) - record["types zeros"]["mean"]).max() <= 24 * 2**-9 * 3


GATE = "encoder.layer.1.mlp.gated_layers.weight"


@pytest.mark.parametrize(
    ("config", "tensors", "error", "message"),
    [
        ({}, {GATE: None}, ValueError, rf"got \['{GATE}'\] missing and none unknown"),
        ({}, {"encoder.x": np.ones(2)}, ValueError, r"got none missing and \['encoder.x'\] unknown"),
        ({}, {GATE: np.ones((39, 24))}, ValueError, rf"^{GATE} in .* must have shape \(40, 24\) .*, got \(39, 24\)"),
        ({"intermediate_size": 21}, {}, ValueError, r"gated_layers.weight in .* must have shape \(42, 24\)"),
        ({"num_hidden_layers": 3}, {}, ValueError, r"got \['encoder.layer.2.attention.*missing"),
        ({"position_embedding_type": "absolute"}, {}, ValueError, "^position_embedding_type in .* 'alibi', got 'abso"),
        ({"feed_forward_type": "swiglu"}, {}, ValueError, "^feed_forward_type in .* 'geglu', 'reglu', got 'swiglu'"),
        ({"is_decoder": True}, {}, ValueError, "^is_decoder in .* must be false, got True"),
        ({"num_attention_heads": 7}, {}, ValueError, "^num_attention_heads in .* must divide .* 24, got 7"),
        ({"alibi_slopes": 1}, {}, TypeError, "^alibi_slopes in .* must be a list of numbers, got int"),
        ({"alibi_slopes": [1.0]}, {}, ValueError, r"^slopes must have shape"),
        ({"alibi_slopes": [-1.0]}, {}, ValueError, "^alibi_slopes in .* must not be negative, got -1.0"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_by_name(
    tmp_path: Path, config: dict[str, Any], tensors: dict[str, Any], error: type[Exception], message: str
) -> None:
    save(SMALLEST, tmp_path, **tensors)
    (tmp_path / "config.json").write_text(json.dumps(RECORDS[SMALLEST]["config"] | config))
    with pytest.raises(error, match=message):
        Checkpoint.open(tmp_path)


def test_bert_that_was_given_alibi_is_read_with_its_slopes(tmp_path: Path) -> None:
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    from alibi_torch.transformers import with_alibi

    config = {k: v for k, v in RECORDS["jina-plain"]["config"].items() if k not in ("model_type", "feed_forward_type")}
    config["position_embedding_type"] = "absolute"
    torch.manual_seed(3)
    slopes = {"slopes": np.linspace(0.1, 0.9, 6), "future_slopes": np.linspace(0.5, 1.5, 6)}
    model = with_alibi(transformers.BertModel(transformers.BertConfig(**config)).eval(), **slopes)
    model.save_pretrained(tmp_path)
    tokens = torch.from_numpy(texts(RECORDS["jina-plain"])[0]).long()
    with torch.no_grad():
        expected, actual = model(tokens).last_hidden_state, load("torch", tmp_path)(tokens)
    assert torch.allclose(actual, expected, rtol=0, atol=1e-5)


# --- What one framework has ----------------------------------------------------------------------------------------


def test_jax_traces_an_encoder_with_its_padding_masked(tmp_path: Path) -> None:
    jax = pytest.importorskip("jax")
    record, model = RECORDS[SMALLEST], load("jax", save(SMALLEST, tmp_path))
    encode = jax.jit(lambda tokens, lengths: [model.encode(tokens, lengths=lengths, pooling=x) for x in POOLING])
    tokens, lengths = texts(record)[0], np.asarray(record["lengths"])
    tokens = np.where(np.arange(tokens.shape[1]) < lengths[:, None], tokens, -100)
    for pooling, embeddings in zip(POOLING, encode(tokens, lengths), strict=True):
        close(record, "types zeros", pooling, np.asarray(embeddings))
    with pytest.raises(ValueError, match=r"^lengths must have shape \(batch 3,\), got \(1,\)"):
        encode(tokens, lengths[:1])
    with pytest.raises(ValueError, match=r"^mask must have the shape of tokens, \(3, 70\), got \(1, 70\)"):
        jax.jit(lambda mask: model.encode(tokens, mask=mask))(tokens[:1] > 0)
    with pytest.raises(TypeError, match="^mask must be booleans, or integers, got float32"):
        jax.jit(lambda mask: model.encode(tokens, mask=mask))(np.zeros(tokens.shape, np.float32))
    with pytest.raises(ValueError, match=r"^lengths must be from 0 to .* 70, got \[1, 2, 71\]"):
        jax.jit(lambda tokens: model.encode(tokens, lengths=[1, 2, 71]))(tokens)


def test_gradients_of_packed_texts_are_those_of_each_alone(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    record, model = RECORDS[SMALLEST], load("torch", save(SMALLEST, tmp_path), dtype=torch.float64)
    tokens, lengths = torch.from_numpy(texts(record)[0]), record["lengths"]

    def gradients(embeddings: Any) -> Any:
        return torch.autograd.grad(embeddings.sin().sum(), list(model.parameters()))

    alone = torch.cat([model.encode(tokens[i : i + 1, :length]) for i, length in enumerate(lengths)])
    for one, other in zip(gradients(model.encode(tokens, lengths=lengths)), gradients(alone), strict=True):
        assert torch.allclose(one, other, rtol=1e-9, atol=1e-12)
