"""Models that bring their own code, accelerated in place: the results, and what their own code still computes.

Small models of the same names and structure stand in for the originals. The numbers that the originals' code computed
(``tests/support/encoders``) hold them to it.
"""

from __future__ import annotations

import copy
import inspect
import json
import pickle
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from torch import Tensor, nn  # noqa: E402
from torch._dynamo.utils import counters  # noqa: E402

from alibi_torch.transformers import accelerate, paths, restore  # noqa: E402
from tests.contracts.test_decoders import MODELS, POSITIONS, TOKENS, tensors_of  # noqa: E402
from tests.contracts.test_encoder import RECORDS, drawn, texts  # noqa: E402
from tests.support import remote_decoders, remote_encoders  # noqa: E402
from tests.support.remote_encoders import StandInConfig  # noqa: E402

DECODERS = {
    "baichuan": "BaichuanModel",
    "baichuan2": "BaichuanModel",
    "gpt_refact": "GPTRefactModel",
    "jais": "JAISModel",
    "jais, scaled": "JAISModel",
    "mpt, groups and gates": "MPTModel",
    "replit": "MPTModel",
    "replit, one key/value head": "MPTModel",
}
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


@pytest.mark.filterwarnings("ignore:.*computes this call by its own attention")
def test_texts_without_tokens() -> None:
    model, tokens = encoder(), torch.zeros(3, 0, dtype=torch.long)
    expected = model(tokens).last_hidden_state
    assert accelerate(model)(tokens).last_hidden_state.shape == expected.shape == (3, 0, 24)


@pytest.mark.filterwarnings("ignore:.*computes this call by its own attention")
@pytest.mark.parametrize("name", ["jina-geglu", "jais", "replit"])
def test_masks_that_vmap_maps(name: str) -> None:  # as for gradients of each text by itself
    model, tokens, mask = (decoder if name in DECODERS else encoder)(name), tokens_of(3, 20), mask_of("right", 20)
    weights = {key: x.detach() for key, x in model.named_parameters() if x.requires_grad}

    def loss(weights: dict[str, Tensor], tokens: Tensor, mask: Tensor) -> Tensor:
        given = {"attention_mask": mask[None]}
        output = torch.func.functional_call(model, weights, (tokens[None],), given)
        return (output.logits if name in DECODERS else output.last_hidden_state).square().mean()

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))
    expected = each(weights, tokens, mask)
    accelerate(model)
    for key, gradient in each(weights, tokens, mask).items():
        assert torch.equal(gradient, expected[key])


@pytest.mark.filterwarnings("ignore:.*computes this call by its own attention")
def test_masks_without_values() -> None:
    model = accelerate(encoder()).to("meta")
    tokens, mask = (x.to("meta") for x in (tokens_of(3, 20), mask_of("left", 20)))
    assert model(tokens, attention_mask=mask).last_hidden_state.shape == (3, 20, 24)


@pytest.mark.filterwarnings("ignore:.*computes this call by its own attention")
def test_weights_that_are_dropped_by_a_module_alone() -> None:  # as for Monte Carlo dropout
    model, found = encoder(attention_probs_dropout_prob=0.5), []
    for x in (model, accelerate(copy.deepcopy(model))):
        for layer in x.encoder.layer:
            layer.attention.self.dropout.train()
        torch.manual_seed(0)
        found.append(x(tokens_of(2, 9)).last_hidden_state)
    assert torch.equal(*found)


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


class OtherSlopes(remote_encoders.JinaBertEncoder):
    def rebuild_alibi_tensor(self, size: int, device: Any = None) -> Tensor:
        return super().rebuild_alibi_tensor(size, device) * 1.05


def _other_slopes(model: Any) -> None:
    model.encoder.__class__ = OtherSlopes


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
    """The first part of a SentenceTransformer, as sentence-transformers has it, which calls no hooks."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        return features | {"token_embeddings": self.model.forward(**features).last_hidden_state}


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


def decoder(name: str, **settings: Any) -> Any:
    """A model with the weights of a record, and what its logits are multiplied by."""
    config = SimpleNamespace(**(MODELS[name]["config"] | {"is_joined": False} | settings))
    prefix = "model" if "baichuan" in name else "transformer"
    model = remote_decoders.LanguageModel(prefix, getattr(remote_decoders, DECODERS[name])(config), config)
    found = tensors_of(name)
    if config.is_joined and name == "gpt_refact":  # as published
        for block in ("transformer.h.0.attn", "transformer.h.1.attn"):
            found[f"{block}.kv.weight"] = np.concatenate([found.pop(f"{block}.{x}.weight") for x in "kv"])
    tensors = {key: torch.from_numpy(np.asarray(x)) for key, x in found.items()}
    tensors |= {key: x for key, x in model.state_dict().items() if key.endswith(".attn.bias")}
    head = tensors.setdefault(
        "lm_head.weight", tensors[f"{prefix}.{'embed_tokens' if prefix == 'model' else 'wte'}.weight"]
    )
    tensors["lm_head.weight"] = nn.functional.normalize(head) if name == "baichuan2" else head
    model.load_state_dict({key: x for key, x in tensors.items() if not key.endswith("masked_bias")})
    return model.eval()


@pytest.mark.parametrize("is_accelerated", [False, True])
@pytest.mark.parametrize("name", DECODERS)
def test_logits_are_those_of_the_original_code(name: str, is_accelerated: bool) -> None:
    model = decoder(name)
    if is_accelerated:
        accelerate(model, strict=True)
    with torch.no_grad():
        actual = model(torch.from_numpy(TOKENS).long()).logits[:, POSITIONS]
    assert np.abs(actual.numpy() - MODELS[name]["logits"]).max() <= 4 * MODELS[name]["error"]


PADDED = [(name, x) for name in DECODERS for x in ("left", "right", "holes") if name != "gpt_refact"]


@pytest.mark.parametrize(("name", "padding"), [*((name, "none") for name in DECODERS), *PADDED])
def test_texts_and_gradients_of_decoders(name: str, padding: str) -> None:
    model, tokens, given = decoder(name), tokens_of(3, 41), {}
    mask = torch.ones_like(tokens) if padding == "none" else mask_of(padding, 41)
    if padding != "none":
        given["attention_mask"] = mask
    own, exact = decoded(model, tokens, mask, given), decoded(copy.deepcopy(model).double(), tokens, mask, given)
    close(decoded(accelerate(model.train(), strict=True), tokens, mask, given), own, exact)
    assert paths(model) == {LIBRARY: 1}


def decoded(model: Any, tokens: Tensor, mask: Tensor, given: dict[str, Tensor]) -> list[Tensor]:
    """The logits of text, and the gradients of all that follows from them."""
    logits = model(tokens, **given).logits[mask != 0]
    drawn_weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
    model.zero_grad()
    (logits * drawn_weights.to(logits.dtype)).sum().backward()
    return [logits.detach(), *(x.grad.clone() for x in model.parameters() if x.grad is not None)]


@torch.no_grad()
def greedy(model: Any, tokens: Tensor, mask: Tensor | None) -> tuple[list[Tensor], Any]:
    """Logits of a text and of what follows it, token by token, and the cache."""
    cache, found, step = None, [], tokens
    for _ in range(5):
        given = {} if mask is None else {"attention_mask": mask}
        output = model(step, past_key_values=cache, use_cache=True, **given)
        cache, step = output.past_key_values, output.logits[:, -1:].argmax(-1)
        mask = None if mask is None else torch.cat([mask, torch.ones_like(step)], dim=1)
        found.append(output.logits[:, -1])
    return found, cache


@pytest.mark.parametrize("name", DECODERS)
def test_caches_of_the_models_own_kind(name: str) -> None:
    model, tokens = decoder(name), tokens_of(2, 20)
    mask = None if name == "gpt_refact" else mask_of("left", 20)[:2]
    own, own_cache = greedy(model, tokens, mask)
    ours, cache = greedy(accelerate(model, strict=True), tokens, mask)
    for x, y in zip(ours, own, strict=True):
        assert (x - y).abs().max() <= 1e-4 * y.abs().max()
    for mine, theirs in zip(cache, own_cache, strict=True):
        assert [x.shape for x in mine] == [x.shape for x in theirs]
        assert torch.equal(mine[0].argmax(-1)[..., -1], theirs[0].argmax(-1)[..., -1])
    assert paths(model) == {LIBRARY: 5}
    with torch.no_grad():  # the cache of one is the other's
        step = tokens[:, :1]
        expected = restore(model)(step, past_key_values=own_cache).logits
        assert (accelerate(model)(step, past_key_values=own_cache).logits - expected).abs().max() <= 1e-4 * 10


@pytest.mark.parametrize("name", DECODERS)
def test_calls_of_decoders_that_are_left_to_their_own_code(name: str) -> None:
    model, tokens = decoder(name, is_joined=True), tokens_of(2, 9)
    expected = model(tokens, output_attentions=True)
    accelerate(model)
    with pytest.warns(UserWarning, match="output_attentions must be False"):
        actual = model(tokens, output_attentions=True)
    assert torch.equal(actual.logits, expected.logits)
    assert torch.equal(actual.attentions[0], expected.attentions[0])
    assert (model(tokens).logits - expected.logits).abs().max() < 1e-4
    assert paths(model)[LIBRARY] == 1
    copied = pickle.loads(pickle.dumps(model))
    assert torch.equal(copied(tokens).logits, model(tokens).logits)
    assert torch.equal(restore(model)(tokens).logits, expected.logits)


@pytest.mark.parametrize("name", ["jina-geglu", "mosaic-bert", "baichuan", "jais", "replit"])
def test_threads_do_not_get_each_others_bias(name: str) -> None:
    model, tokens = (decoder if name in DECODERS else encoder)(name), tokens_of(2, 20)
    embedding = next(x for x in model.modules() if isinstance(x, nn.Embedding))
    mask = mask_of("holes", 20)[1:]
    given = [{"attention_mask": x} for x in (mask, torch.ones_like(mask), mask)]

    def call(arguments: dict[str, Any]) -> Tensor:
        with torch.no_grad():
            output = model(tokens, **arguments)
        return (output.logits if name in DECODERS else output.last_hidden_state)[:, 0]

    accelerate(model, strict=True)
    expected = [call(x) for x in given]
    embedding.register_forward_hook(
        lambda *_: time.sleep(0.02)
    )  # all are between their beginning and their first layer
    with ThreadPoolExecutor(3) as pool:
        for x, y in zip(pool.map(call, given), expected, strict=True):
            assert (x - y).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("name", "kind", "bias"),
    [
        ("baichuan", remote_decoders.BaichuanAttention, "attention_mask"),
        ("gpt_refact", remote_decoders.Attention, "alibi"),
        ("jais", remote_decoders.JAISAttention, "position_bias"),
        ("replit", remote_decoders.MultiheadAttention, "attn_bias"),
        ("jina-geglu", remote_encoders.JinaBertSelfAttention, "bias"),
    ],
)
def test_a_bias_that_somebody_edits_in_the_layers(name: str, kind: Any, bias: str) -> None:
    model, tokens, mask = (decoder if name in DECODERS else encoder)(name), tokens_of(3, 20), mask_of("left", 20)
    given = {} if name == "gpt_refact" else {"attention_mask": mask}

    def edit(module: Any, args: Any, kwargs: Any) -> Any:
        arguments = inspect.signature(kind.forward).bind(module, *args, **kwargs).arguments
        edited = arguments[bias].clone()
        edited[..., 12] -= 5
        return args[:1], dict(list(arguments.items())[2:]) | {bias: edited}

    found = []
    for x in (model, accelerate(copy.deepcopy(model))):
        for module in x.modules():
            if isinstance(module, kind):
                module.register_forward_pre_hook(edit, with_kwargs=True)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*must have no hook that sees its mask")
            output = x(tokens, **given)
        found.append(output.logits if name in DECODERS else output.last_hidden_state)
    assert torch.equal(found[1], found[0])


@pytest.mark.parametrize("name", [*DECODERS, "jina-geglu", "mosaic-bert"])
@pytest.mark.parametrize("is_own", [False, True])  # the call within the call
def test_a_call_within_a_call(name: str, is_own: bool) -> None:
    model, tokens, mask = (decoder if name in DECODERS else encoder)(name), tokens_of(3, 20), mask_of("left", 20)
    given, within = {} if name == "gpt_refact" else {"attention_mask": mask}, []
    weights = {"output_attentions": True} if is_own and name != "mosaic-bert" else {}
    text = mask != 0 if given else torch.ones_like(mask, dtype=torch.bool)

    def call(tokens: Tensor, **given: Any) -> Tensor:
        with torch.no_grad():
            output = model(tokens, **given)
        return output.logits if name in DECODERS else output.last_hidden_state

    def again(module: Any, args: Any, output: Tensor) -> Tensor:
        if len(output) == 2:
            return output
        within.append(call(tokens[:2, :7], **weights))
        return output + within[-1].mean()

    embedding = next(x for x in model.modules() if isinstance(x, nn.Embedding))
    hook = embedding.register_forward_hook(again)
    expected = [call(tokens, **given)[text], within.pop()]
    hook.remove()  # or the probe would call it
    accelerate(model)
    embedding.register_forward_hook(again)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*: output_attentions must be False")
        actual = [call(tokens, **given)[text], within.pop()]
    for x, y in zip(actual, expected, strict=True):
        assert (x - y).abs().max() <= 1e-4 * y.abs().max()
    assert paths(model)[LIBRARY] == 2 - bool(weights)
    assert len(paths(model)) == 1 + bool(weights)


USUAL = "jina-geglu", "jais"  # the others are much alike to a compiler


@pytest.mark.parametrize(
    ("name", "has_mask"),
    [(name, True) for name in USUAL]
    + [pytest.param(name, False, marks=pytest.mark.full) for name in USUAL]
    + [pytest.param(name, True, marks=pytest.mark.full) for name in ("mosaic-bert", *DECODERS) if name not in USUAL],
)
def test_a_compiled_call_leaves_the_model_as_it_was(name: str, has_mask: bool) -> None:
    model, tokens, mask = (decoder if name in DECODERS else encoder)(name), tokens_of(3, 20), mask_of("left", 20)
    given = {"attention_mask": mask} if has_mask and name != "gpt_refact" else {}
    text = mask != 0 if given else torch.ones_like(mask, dtype=torch.bool)
    weights = {} if name == "mosaic-bert" else {"output_attentions": True}  # by the model's own code, which it lacks

    def call(function: Any, **more: bool) -> Tensor:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*: output_attentions must be False")
            output = function(tokens, **given, **more)
        return (output.logits if name in DECODERS else output.last_hidden_state)[text]

    expected = call(model, **weights)
    tolerance = 1e-5 * expected.abs().max()
    accelerate(model)
    call(model)
    attributes = [set(vars(x)) for x in list(model.modules())[1:]]
    torch._dynamo.reset()
    assert (call(torch.compile(model, backend="eager")) - expected).abs().max() < tolerance
    assert [set(vars(x)) for x in list(model.modules())[1:]] == attributes
    if weights:
        assert torch.equal(call(model, **weights), expected)
    assert torch.equal(call(restore(model), **weights), expected)


@pytest.mark.full
def test_a_compiled_refact_reads_texts_of_any_length() -> None:  # whose own code gets other globals
    model, texts_of = decoder("gpt_refact"), [tokens_of(2, length) for length in (21, 30, 44)]
    with torch.no_grad():
        expected = [model(tokens).logits for tokens in texts_of]
        torch._dynamo.reset()
        compiled = torch.compile(accelerate(model, strict=True), backend="eager")
        for tokens in texts_of:  # before any call that is not compiled
            compiled(tokens)
        frames = counters["frames"]["total"]
        for tokens, logits in zip(texts_of, expected, strict=True):
            assert (compiled(tokens).logits - logits).abs().max() < 1e-5 * logits.abs().max()
            copied = copy.copy(model.transformer)  # as DataParallel does
            assert torch.equal(copied(tokens).last_hidden_state, model.transformer(tokens).last_hidden_state)
    assert counters["frames"]["total"] == frames > 0  # what came before is not compiled again


@pytest.mark.full
def test_an_encoder_is_exported() -> None:
    model, tokens, mask = encoder(), tokens_of(3, 20), {"attention_mask": mask_of("right", 20)}
    with torch.no_grad():
        expected = model(tokens, **mask).last_hidden_state
        exported = torch.export.export(accelerate(model), (tokens,), mask, strict=False)
        assert torch.allclose(exported.module()(tokens, **mask).last_hidden_state, expected, atol=1e-5)


def test_btlm_has_the_code_of_jais() -> None:
    model = decoder("jais")
    model.transformer.__class__ = remote_decoders.BTLMModel
    for block in model.transformer.h:
        block.attn.__class__ = remote_decoders.BTLMAttention
    expected = model(tokens_of(2, 9)).logits
    assert (accelerate(model, strict=True)(tokens_of(2, 9)).logits - expected).abs().max() < 1e-5


def test_masks_that_a_decoder_takes_otherwise() -> None:
    model, tokens = accelerate(decoder("gpt_refact"), strict=True), tokens_of(2, 9)
    with pytest.raises(ValueError, match="attention_mask must be None"):
        model(tokens, attention_mask=torch.ones_like(tokens))
    model = accelerate(decoder("baichuan"), strict=True)
    with pytest.raises(ValueError, match="1 for text and 0 for padding"):
        model(tokens, attention_mask=torch.arange(9).expand(2, 9) // 5 + 1)  # packed texts, by its own code
    with pytest.raises(ValueError, match="past_key_values must be a tuple"):
        model(tokens, past_key_values=transformers.DynamicCache())


def _rotary(model: Any) -> None:
    model.model.layers[0].self_attn.rotary_emb = nn.Identity()


def _by_length(model: Any) -> None:
    model.transformer.relative_pe.alibi_scaling = {"type": "dynamic", "factor": None, "train_seq_len": 8}


def _no_alibi(model: Any) -> None:
    model.transformer.relative_pe = None


class MultiheadAttention(remote_decoders.MultiheadAttention):
    def kept(self) -> None: ...


def _another_name(model: Any) -> None:
    for block in model.transformer.blocks:
        block.attn.__class__ = MultiheadAttention


def _set(name: str, value: Any) -> Any:
    return lambda model: [setattr(block.attn, name, value) for block in model.transformer.blocks]


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("baichuan", _rotary, "must have the modules"),
        ("jais", _by_length, "must be a constant factor"),
        ("jais", _no_alibi, "position_embedding_type must be 'alibi'"),
        ("replit", _set("attn_impl", "flash"), "attn_impl must be 'torch'"),
        ("mpt, groups and gates", _set("sliding_window_size", 9), "sliding_window_size must be -1"),
        ("mpt, groups and gates", _set("kv_n_heads", 3), "must have 96 rows"),
        ("mpt, groups and gates", _set("attn_temperature_tuning", {"attn_scale": 0.1}), "must have an attn_scale of 0"),
        ("replit", lambda model: setattr(model.transformer, "prefix_lm", True), "prefix_lm must be False"),
        ("replit", lambda model: setattr(model.transformer, "_attn_bias", None), "must be that of its class"),
        ("replit", lambda model: model.transformer.wte.weight.data.fill_(torch.nan), "must be finite"),
        ("gpt_refact", lambda model: setattr(model.transformer, "_make_mask", None), "must be that of its class"),
        ("jais", lambda model: setattr(model.transformer, "forward", None), "a forward of its own"),
        ("replit", _another_name, "kept must not be a name of the model's attention"),
    ],
)
def test_decoders_that_are_refused(name: str, change: Any, message: str) -> None:
    model = decoder(name)
    change(model)
    with pytest.raises(ValueError, match=message):
        accelerate(model)
