"""Models that bring their own code, accelerated in place: the results, and what their own code still computes.

Small models of the same names and structure stand in for the originals. The numbers that the originals' code computed
(``tests/support/encoders``) hold them to it.
"""

from __future__ import annotations

import copy
import json
import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from torch import Tensor, nn  # noqa: E402

from alibi_torch.transformers import accelerate, paths, restore  # noqa: E402
from tests.contracts.test_encoder import RECORDS, drawn, texts  # noqa: E402
from tests.support import remote_encoders  # noqa: E402
from tests.support.remote_encoders import StandInConfig  # noqa: E402

UNPADDED = ("mosaic-bert", "dnabert-2")
LIBRARY = "alibi_torch"


def encoder(variant: str = "jina-geglu", **settings: Any) -> Any:
    """A model with the weights of a record."""
    config = RECORDS[variant]["config"] | {"is_for_code": "code" in variant, "keeps_bias": True} | settings
    kind = remote_encoders.BertModel if variant in UNPADDED else remote_encoders.JinaBertModel
    model = kind(StandInConfig(**config))
    model.load_state_dict({name: torch.from_numpy(drawn(name, x.shape)) for name, x in model.state_dict().items()})
    return model.eval()


def tokens_of(batch: int, length: int) -> Tensor:
    return torch.randint(1, 31, (batch, length), generator=torch.Generator().manual_seed(length))


def mask_of(padding: str, length: int) -> Tensor:
    """The mask of three texts, the first of them whole."""
    position, kept = torch.arange(length), torch.tensor([[length], [max(1, length // 3)], [max(1, length // 2)]])
    if padding == "left":
        return (position >= length - kept).long()
    if padding == "right":
        return (position < kept).long()
    return ((position < length // 4) | (position >= length // 2) | (kept == length)).long()


@pytest.mark.parametrize("is_accelerated", [False, True])
@pytest.mark.parametrize("variant", RECORDS)
def test_embeddings_are_those_of_the_original_code(variant: str, is_accelerated: bool) -> None:
    record, model = RECORDS[variant], encoder(variant)
    if is_accelerated:
        accelerate(model, strict=True)
    tokens, types = (torch.from_numpy(x).long() for x in texts(record))
    mask = (torch.arange(tokens.shape[1]) < torch.tensor(record["lengths"])[:, None]).long()
    for case, kinds in (("types zeros", torch.zeros_like(types)), ("types mixed", types)):
        with torch.no_grad():
            hidden = model(tokens, attention_mask=mask, token_type_ids=kinds).last_hidden_state.numpy()
        weights = mask[..., None].numpy()
        actual = {"mean": (hidden * weights).sum(1) / weights.sum(1), "cls": hidden[:, 0]}
        for pooling, found in actual.items():
            assert np.abs(found - record[case][pooling]).max() <= 4 * record[case]["float32_error"]


def results(model: Any, tokens: Tensor, mask: Tensor) -> list[Tensor]:
    """The vectors of text, and the gradients of all that follows from them."""
    hidden = model(tokens, attention_mask=mask).last_hidden_state[mask != 0]
    drawn_weights = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(1))
    model.zero_grad()
    (hidden * drawn_weights.to(hidden.dtype)).sum().backward()
    return [hidden.detach(), *(x.grad.clone() for x in model.parameters() if x.grad is not None)]


def close(actual: list[Tensor], own: list[Tensor], exact: list[Tensor]) -> None:
    """Check to four times the errors of the model's own code in float32."""
    assert len(actual) == len(own) == len(exact) > 1
    for x, y, z in zip(actual, own, exact, strict=True):
        unit = 64 * torch.finfo(torch.float32).eps * max(exact[0].abs().max().item(), z.abs().max().item())
        assert (x - z).abs().max() <= 4 * (y - z).abs().max() + unit


@pytest.mark.parametrize("padding", ["left", "right", "holes"])
@pytest.mark.parametrize("variant", ["jina-geglu", "jina-code-geglu", "mosaic-bert"])
def test_padding_may_lie_anywhere(variant: str, padding: str) -> None:
    model = encoder(variant)
    for length in (1, 130):
        if length == 1 and padding == "holes":
            continue
        tokens, mask = tokens_of(3, length), mask_of(padding, length)
        own, exact = results(model, tokens, mask), results(copy.deepcopy(model).double(), tokens, mask)
        close(results(accelerate(model.train(), strict=True), tokens, mask), own, exact)
        assert paths(model) == {LIBRARY: 1}
        restore(model)


@pytest.mark.parametrize(
    ("variant", "keeps_bias"), [("jina-geglu", True), ("jina-geglu", False), ("mosaic-bert", True)]
)
def test_no_bias_is_built_or_kept(variant: str, keeps_bias: bool) -> None:
    model = encoder(variant, keeps_bias=keeps_bias)
    kept, before = getattr(model.encoder, "alibi", None), set(model.state_dict())
    accelerate(model)
    built = model.encoder.built
    model(tokens_of(2, 600))  # longer than what is kept
    assert model.encoder.built == built
    assert not hasattr(model.encoder, "alibi") or model.encoder.alibi.numel() == 0
    assert set(model.state_dict()) == before
    restore(model)
    assert kept is None or torch.equal(model.encoder.alibi, kept)


OWN_CALLS: list[tuple[str, dict[str, Any]]] = [
    ("output_attentions", {"output_attentions": True}),
    ("head_mask", {"head_mask": torch.tensor([1.0, 0, 1, 1, 1, 1])[None, :, None, None]}),
    ("shape", {"attention_mask": torch.ones(2, 9, 9).tril()}),
    ("1 for text and 0", {"attention_mask": torch.full((2, 9), 0.5)}),
    ("some text", {"attention_mask": torch.tensor([[1] * 9, [0] * 9])}),
]


@pytest.mark.parametrize("keeps_bias", [True, False])
def test_calls_that_are_left_to_the_models_own_code(keeps_bias: bool) -> None:
    model, tokens = encoder(keeps_bias=keeps_bias, attention_probs_dropout_prob=0.1), tokens_of(2, 9)
    own = copy.deepcopy(model)
    accelerate(model)
    for index, (reason, arguments) in enumerate(OWN_CALLS):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            actual, expected = model(tokens, **arguments), own(tokens, **arguments)
        assert len(seen) == (index == 0)  # one warning a model
        assert torch.equal(actual.last_hidden_state, expected.last_hidden_state)
        assert any(reason in found for found in paths(model))
        assert len(actual.attentions or ()) == len(expected.attentions or ())
    torch.manual_seed(0)
    actual = model.train()(tokens).last_hidden_state
    torch.manual_seed(0)
    assert torch.equal(actual, own.train()(tokens).last_hidden_state)
    model.eval()(tokens)
    assert paths(model)[LIBRARY] == 1
    assert sum(paths(model).values()) == len(OWN_CALLS) + 2


def test_a_strict_model_and_a_layer_by_itself() -> None:
    model, tokens = accelerate(encoder(), strict=True), tokens_of(2, 9)
    with pytest.raises(ValueError, match="output_attentions must be False"):
        model(tokens, output_attentions=True)
    assert model(tokens).last_hidden_state.shape == (2, 9, 24)
    layer, hidden = model.encoder.layer[0].attention.self, torch.randn(2, 9, 24)
    with pytest.raises(ValueError, match="layers must be called by their model"):
        layer(hidden, torch.zeros(2, 1, 1, 9), bias=torch.zeros(1, 6, 9, 9))


@pytest.mark.parametrize("variant", ["jina-geglu", "mosaic-bert"])
def test_accelerated_models_are_copied_pickled_and_restored(variant: str) -> None:
    model, tokens = encoder(variant), tokens_of(2, 40)
    before, own = dict(vars(model)), type(model.encoder.layer[0].attention.self)
    accelerate(model)
    expected = model(tokens).last_hidden_state
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(copied(tokens).last_hidden_state, expected)
        assert type(restore(copied).encoder.layer[0].attention.self) is own
    with pytest.raises(ValueError, match="must not be accelerated yet"):
        accelerate(model)
    restore(model)
    assert set(vars(model)) == set(before)
    assert not model._forward_pre_hooks
    assert not model._forward_hooks
    with pytest.raises(ValueError, match="must be accelerated"):
        restore(model)


def _other_slopes(model: Any) -> None:
    own = type(model.encoder).rebuild_alibi_tensor
    model.encoder.rebuild_alibi_tensor = lambda size, device=None: own(model.encoder, size, device) * 1.05


def _other_scale(model: Any) -> None:
    model.encoder.layer[0].attention.self.attention_head_size = 5


def _another_part(model: Any) -> None:
    model.encoder.layer[1].attention.self.gate = nn.Linear(24, 24)


def _fewer_heads(model: Any) -> None:
    model.encoder.layer[1].attention.self.num_attention_heads = 3
    model.encoder.layer[1].attention.self.attention_head_size = 8


def _a_patch(model: Any) -> None:
    model.encoder.layer[1].attention.self.forward = lambda *_, **__: None


def _other_positions(model: Any) -> None:
    model.encoder.layer[1].attention.self.position_embedding_type = "absolute"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_other_slopes, "must agree with the library's to .* up to"),
        (_other_scale, "must have 30 rows"),
        (_another_part, "must have the modules"),
        (_fewer_heads, "must be alike in all layers"),
        (_a_patch, "a forward of its own"),
        (_other_positions, "position_embedding_type must be 'alibi'"),
    ],
)
def test_what_is_not_the_published_code_is_refused(change: Any, message: str) -> None:
    model = encoder(keeps_bias=False)
    change(model)
    before, kinds = dict(vars(model)), [type(x) for x in model.modules()]
    with pytest.raises(ValueError, match=message):
        accelerate(model)
    assert set(vars(model)) == set(before)
    assert [type(x) for x in model.modules()] == kinds


class Transformer(nn.Module):
    """The first part of a SentenceTransformer, as sentence-transformers has it."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        return features | {"token_embeddings": self.model(**features).last_hidden_state}


class Pooling(nn.Module):
    def forward(self, features: dict[str, Tensor]) -> Tensor:
        weights = features["attention_mask"][..., None]
        return (features["token_embeddings"] * weights).sum(1) / weights.sum(1)


def test_a_sentence_transformer_is_accelerated_inside() -> None:
    sentences = nn.Sequential(Transformer(encoder()), Pooling())
    features = {"input_ids": tokens_of(3, 50), "attention_mask": mask_of("right", 50)}
    expected = sentences(features)
    assert accelerate(sentences, strict=True) is sentences
    assert (sentences(features) - expected).abs().max() < 1e-5
    assert paths(sentences) == {LIBRARY: 1}
    assert torch.equal(restore(sentences)(features), expected)


@pytest.mark.parametrize(("variant", "name"), [("jina-geglu", "JinaBertModel"), ("mosaic-bert", "BertModel")])
def test_code_that_lies_in_the_checkpoints_folder(
    variant: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(tmp_path / "modules")
    model, folder = encoder(variant), tmp_path / "checkpoint"
    model.save_pretrained(folder)
    code = Path(remote_encoders.__file__)
    (folder / code.name).write_text(code.read_text())
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": f"{code.stem}.StandInConfig", "AutoModel": f"{code.stem}.{name}"}
    (folder / "config.json").write_text(json.dumps(config))
    loaded = transformers.AutoModel.from_pretrained(folder, trust_remote_code=True).eval()
    assert type(loaded).__module__.startswith("transformers_modules")
    tokens = tokens_of(2, 40)
    actual = accelerate(loaded, strict=True)(tokens).last_hidden_state
    assert (actual - model(tokens).last_hidden_state).abs().max() < 1e-5
