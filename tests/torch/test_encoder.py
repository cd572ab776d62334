"""Encoders of transformers with symmetric ALiBi, against the same models with the bias added to their masks."""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from torch import Tensor, nn  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402
from transformers import (  # noqa: E402
    BertConfig,
    BertForMaskedLM,
    BertForMultipleChoice,
    BertForSequenceClassification,
    BertModel,
    DistilBertConfig,
    DistilBertModel,
    MegatronBertConfig,
    MegatronBertForMaskedLM,
    MegatronBertModel,
)
from transformers.models.bert.modeling_bert import BertEmbeddings, BertSelfAttention  # noqa: E402

import alibi_core  # noqa: E402
from alibi_torch.transformers import with_alibi  # noqa: E402

FAMILIES = {
    "bert": (BertConfig, BertModel, BertForMaskedLM),
    "megatron": (MegatronBertConfig, MegatronBertModel, MegatronBertForMaskedLM),
}
HEADS, HIDDEN, LONGEST, VOCABULARY = 3, 33, 19, 53  # the longest that position embeddings would allow
FINER = 2 * 2 * 2.0 ** (24 - 53)  # twice the loss of float32, on each side of a comparison in float64


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(before)


def config_of(family: str, **settings: Any) -> Any:
    sizes = {"hidden_size": HIDDEN, "num_attention_heads": HEADS, "num_hidden_layers": 2, "intermediate_size": 41}
    sizes |= {"vocab_size": VOCABULARY, "max_position_embeddings": LONGEST, "hidden_dropout_prob": 0.0}
    return FAMILIES[family][0](**(sizes | settings))


def made(family: str, kind: int = 1, **settings: Any) -> Any:
    """A model whose scores, and so whose softmax, are far from even."""
    model = FAMILIES[family][kind](config_of(family, **settings))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3, generator=generator)
    return model.eval()


def tokens_of(batch: int, length: int) -> Tensor:
    return torch.randint(1, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(length))


def dense_of(model: Any, length: int) -> Any:
    """A copy of the model with its own eager attention, position embeddings of zeros, as many as there are tokens."""
    dense = copy.deepcopy(model)
    dense.embeddings.position_embeddings = nn.Embedding(length, HIDDEN, dtype=model.dtype)
    nn.init.zeros_(dense.embeddings.position_embeddings.weight)
    dense.get_extended_attention_mask = lambda mask, *_, **__: mask  # transformers 5.4 takes none of four axes
    dense.set_attn_implementation("eager")
    return dense


def run_dense(dense: Any, tokens: Tensor, bias: Tensor) -> Tensor:
    """What it computes, a bias added to its scores, ``[batch, heads, q_len, kv_len]``."""
    inputs = {"position_ids": torch.arange(tokens.shape[1])[None], "token_type_ids": torch.zeros_like(tokens)}
    return dense(tokens, attention_mask=bias.to(dense.dtype), **inputs).last_hidden_state


def expected(model: Any, tokens: Tensor, bias: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    with torch.no_grad():
        return run_dense(dense_of(model, tokens.shape[1]).to(dtype), tokens, bias)


def bias_of(batch: int, length: int, slopes: Tensor | None = None, future: Tensor | None = None) -> Tensor:
    slopes = alibi_core.slopes(HEADS, xp=torch, dtype=torch.float64) if slopes is None else slopes.double()
    distance = torch.arange(length)[:, None] - torch.arange(length)  # [q, kv], positive for keys before the query
    rates = [x[:, None, None] for x in (slopes, slopes if future is None else future.double())]
    return (-torch.where(distance < 0, rates[1], rates[0]) * distance.abs()).expand(batch, -1, -1, -1)


def error(got: Tensor, wanted: Tensor) -> float:
    return float((got - wanted).detach().abs().max())


@functools.cache
def allowed(family: str) -> dict[torch.dtype, float]:
    """Twice what the dense computation loses in float32, at worst among hundreds of tokens.

    Float64 loses as much less as its rounding is finer, on both sides of a comparison.
    """
    model, tokens, bias = made(family), tokens_of(2, 150), bias_of(2, 150)
    exact, rough = (expected(model, tokens, bias, dtype) for dtype in (torch.float64, torch.float32))
    loss = error(rough, exact)
    return {torch.float32: 2 * loss, torch.float64: FINER * loss}


@pytest.mark.parametrize("length", [1, 7, LONGEST, 150])
@pytest.mark.parametrize("which", ["canonical", "symmetric", "asymmetric"])
def test_is_the_dense_model_with_the_bias_added(family: str, which: str, length: int) -> None:
    model, tokens = made(family), tokens_of(2, length)
    slopes, future = torch.tensor([[0.6, 0.03, 0.2], [0.05, 0.4, 0.0]], dtype=torch.float64)
    names = {"canonical": (), "symmetric": ("slopes",), "asymmetric": ("slopes", "future_slopes")}[which]
    given = dict(zip(names, (slopes, future), strict=False))
    bias = bias_of(2, length, *given.values())
    wanted = expected(model, tokens, bias)
    for dtype in (torch.float32, torch.float64):
        got = with_alibi(copy.deepcopy(model).to(dtype), **given)(tokens).last_hidden_state
        assert got.dtype == dtype
        assert error(got, wanted) <= allowed(family)[dtype], dtype


PADDING = {"left": [[0] * 5 + [1] * 12, [1] * 17], "right": [[1] * 12 + [0] * 5, [1] * 17]}
PADDING["holes"] = [[1, 1, 0, 1, 0, 0, 1, 1, 1, 0, 1, 1, 1, 1, 1, 1, 0], [0] * 3 + [1] * 4 + [0] * 5 + [1] * 5]


@pytest.mark.parametrize("where", PADDING)
@pytest.mark.parametrize("dtype", [torch.long, torch.float32, torch.bool], ids=str)
def test_padding_is_not_seen_and_counts_as_distance(family: str, where: str, dtype: torch.dtype) -> None:
    model, tokens, mask = made(family), tokens_of(2, 17), torch.tensor(PADDING[where])
    bias = bias_of(2, 17) + torch.where(mask == 0, -torch.inf, 0.0)[:, None, None, :]
    wanted = expected(model, tokens, bias)
    got = with_alibi(model.double())(tokens, attention_mask=mask.to(dtype)).last_hidden_state
    assert error(got, wanted) <= allowed(family)[torch.float64]  # that of padding too


def test_a_row_of_padding_alone_harms_no_other(family: str) -> None:
    model, tokens, mask = with_alibi(made(family)), tokens_of(2, 17), torch.ones(2, 17, dtype=torch.long)
    mask[0] = 0
    got = model(tokens, attention_mask=mask).last_hidden_state
    assert bool(got.isfinite().all())
    assert error(got[1:], model(tokens[1:]).last_hidden_state) <= allowed(family)[torch.float32]


def test_position_ids_that_come_with_padding_are_those_of_the_row(family: str) -> None:
    model, tokens, mask = with_alibi(made(family)), tokens_of(2, 17), torch.tensor(PADDING["left"])
    wanted = model(tokens, attention_mask=mask).last_hidden_state
    counted = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)  # as a text-generation pipeline counts
    for position_ids in (counted, torch.arange(17)[None], torch.arange(17).expand(2, -1) + 2):
        assert torch.equal(model(tokens, attention_mask=mask, position_ids=position_ids).last_hidden_state, wanted)


def test_packed_rows_are_the_sequences_alone(family: str) -> None:
    model = with_alibi(made(family).double())
    lengths = (40, 1, 30)
    tokens, ends = tokens_of(2, 71), list(itertools.accumulate(lengths))
    position_ids = torch.cat([torch.arange(n) for n in lengths])[None]
    apart = [model(x).last_hidden_state for x in tokens.split(lengths, dim=1)]
    got = model(tokens, position_ids=position_ids).last_hidden_state
    same = functools.partial(torch.testing.assert_close, rtol=0, atol=allowed(family)[torch.float64])
    same(got, torch.cat(apart, dim=1))

    # Position ids of each row its own, the second row's first sequence begun earlier; and padding at the end.
    position_ids = torch.stack([position_ids[0], torch.arange(4, 75)])
    mask = torch.ones(2, 71, dtype=torch.long)
    mask[:, ends[1] + 20 :] = 0
    got = model(tokens, attention_mask=mask, position_ids=position_ids).last_hidden_state
    last = model(tokens[:1, ends[1] : ends[1] + 20]).last_hidden_state
    same(got[:1, ends[1] : ends[1] + 20], last)
    same(got[:1, : ends[0]], apart[0][:1])
    whole = model(tokens[1:, : ends[1] + 20]).last_hidden_state
    same(got[1:, : ends[1] + 20], whole)


@pytest.mark.parametrize(
    "position_ids",
    [[0, 1, 3, 4, 5], [0, 1, 2, 1, 2], [0, 2, 0, 1, 2], [0, 0, 1, 2, 4], [3, 4, 6, 7, 8], [0, 1, 1, 2, 3]],
)
def test_position_ids_that_say_other_distances_are_refused(position_ids: list[int]) -> None:
    model, mask = with_alibi(made("bert")), torch.tensor([[1, 1, 0, 1, 1]])
    with pytest.raises(ValueError, match="position_ids must count the tokens of a row one by one"):
        model(tokens_of(1, 5), position_ids=torch.tensor([position_ids]))
    if position_ids == [0, 1, 1, 2, 3]:  # a hole, closed up
        with pytest.raises(ValueError, match="padding among them too"):
            model(tokens_of(1, 5), attention_mask=mask, position_ids=torch.tensor([position_ids]))


def test_gradients_are_the_dense_models(family: str) -> None:
    model, tokens = made(family), tokens_of(2, 30)
    mask = torch.ones(2, 30, dtype=torch.long)
    mask[1, 25:] = 0
    bias = bias_of(2, 30) + torch.where(mask == 0, -torch.inf, 0.0)[:, None, None, :]
    cotangent = torch.randn(2, 30, HIDDEN, generator=torch.Generator().manual_seed(0))

    def gradients(model: Any, result: Tensor) -> dict[str, Tensor]:
        (result * cotangent).sum().backward()
        return {name: x.grad for name, x in model.named_parameters() if x.grad is not None}

    exact, rough = (dense_of(model, 30).to(dtype) for dtype in (torch.float64, torch.float32))
    exact, rough = (gradients(x, run_dense(x, tokens, bias)) for x in (exact, rough))
    ours = with_alibi(model.double()).train()
    got = gradients(ours, ours(tokens, attention_mask=mask).last_hidden_state)
    assert got.keys() == exact.keys() - {"embeddings.position_embeddings.weight"}
    loss = max(error(rough[name], exact[name]) for name in got)
    for name, gradient in got.items():
        assert error(gradient, exact[name]) <= FINER * loss, name


# --- What a model is after it --------------------------------------------------------------------------------------


def test_position_embeddings_are_neither_trained_nor_saved_and_limit_nothing(family: str) -> None:
    model = made(family, 2)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    assert with_alibi(model) is model
    gone = "bert.embeddings.position_embeddings.weight"
    assert dict(model.named_parameters()).keys() == dict(made(family, 2).named_parameters()).keys() - {gone}
    after = model.state_dict()
    assert after.keys() == before.keys() - {gone}
    assert all(torch.equal(x, before[name]) for name, x in after.items())
    types = torch.arange(1000)[None] % 2
    length = 1000
    one, other = (model(tokens_of(1, length), token_type_ids=x).logits for x in (types, 1 - types))
    assert one.shape == (1, length, VOCABULARY)
    assert not torch.allclose(one, other)  # token types stay
    embedded = model.get_input_embeddings()(tokens_of(1, length))
    assert torch.equal(model(inputs_embeds=embedded, token_type_ids=types).logits, one)


def test_a_config_that_models_share_is_left_alone(family: str) -> None:
    config = config_of(family)
    one, other = (FAMILIES[family][2](config).eval() for _ in range(2))
    before, tokens = copy.deepcopy(config).to_dict(), tokens_of(2, 11)
    wanted = other(tokens).logits
    with_alibi(one)
    assert config.to_dict() == other.config.to_dict() == before
    assert torch.equal(other(tokens).logits, wanted)
    own = {id(x.config) for x in one.modules() if hasattr(x, "config")}
    assert own == {id(one.config)}  # still one for all of its parts
    assert one.config is not config


def test_training_drops_no_weights(family: str) -> None:
    model = with_alibi(made(family))  # whose config has BERT's default, 0.1
    assert model.config.attention_probs_dropout_prob == 0
    tokens = tokens_of(2, 23)
    assert torch.equal(model.train()(tokens).last_hidden_state, model.eval()(tokens).last_hidden_state)
    model.encoder.layer[1].attention.self.dropout.p = 0.1
    model(tokens)  # nothing is dropped outside of training
    with pytest.raises(
        ValueError, match="dropout of attention weights must be 0 in training, got 0.1.*leave attention_p"
    ):
        model.train()(tokens)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoints_of_activations_change_no_gradient(family: str, use_reentrant: bool) -> None:
    model, tokens, mask = with_alibi(made(family)).train(), tokens_of(2, 17), torch.tensor(PADDING["holes"])
    position_ids = torch.arange(17)[None] % 9
    gradients = []
    for twin in (copy.deepcopy(model), model):
        if twin is model:
            enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
            enable({"use_reentrant": use_reentrant})
        results = [
            twin(tokens, attention_mask=mask),
            twin(tokens, position_ids=position_ids),
        ]  # both before any backward
        sum(x.last_hidden_state.sin().sum() for x in results).backward()
        gradients.append([x.grad for x in twin.parameters() if x.grad is not None])
    assert len(gradients[0]) > 20
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


def test_autocast_loses_no_more_than_it_does_of_the_dense_model(family: str) -> None:
    model, tokens = made(family), tokens_of(2, 100)
    bias = bias_of(2, 100)
    wanted = expected(model, tokens, bias)
    with torch.autocast("cpu", torch.bfloat16):
        rough = expected(model, tokens, bias, torch.float32)
        got = with_alibi(model)(tokens).last_hidden_state
    assert error(got, wanted) <= 2 * error(rough, wanted)


def test_no_cast_of_the_model_rounds_slopes(family: str) -> None:
    slopes = torch.tensor([0.301, 0.0101, 0.0707])
    rounded, tokens = made(family).bfloat16(), tokens_of(1, 60)
    cast_after = with_alibi(copy.deepcopy(rounded), slopes=slopes).float()
    cast_before = with_alibi(rounded.float(), slopes=slopes)
    assert torch.equal(cast_after(tokens).last_hidden_state, cast_before(tokens).last_hidden_state)
    # Over a thousand tokens, 0.0101 rounded to bfloat16 is another slope even to a model in bfloat16.
    low, tokens = made(family).bfloat16(), tokens_of(1, 1000)
    kept, other = (with_alibi(copy.deepcopy(low), slopes=x)(tokens) for x in (slopes, slopes.bfloat16().float()))
    assert not torch.equal(kept.last_hidden_state, other.last_hidden_state)


def test_copies_and_pickles_compute_the_same(family: str, tmp_path: Path) -> None:
    model, tokens, mask = with_alibi(made(family)), tokens_of(2, 17), torch.tensor(PADDING["left"])
    wanted = model(tokens, attention_mask=mask).last_hidden_state
    torch.save(model, tmp_path / "model.pt")
    for twin in (copy.deepcopy(model), torch.load(tmp_path / "model.pt", weights_only=False)):
        assert torch.equal(twin(tokens, attention_mask=mask).last_hidden_state, wanted)
        with pytest.raises(ValueError, match="must not have ALiBi yet"):
            with_alibi(twin)


@pytest.mark.full
def test_compiled_is_the_same_without_a_graph_break(family: str) -> None:
    model = with_alibi(made(family, num_hidden_layers=1))
    compiled = torch.compile(model, fullgraph=True, backend="eager", dynamic=True)
    for length in (17, 23):
        tokens, mask = tokens_of(2, length), torch.ones(2, length, dtype=torch.long)
        mask[0, 3:6] = 0
        position_ids = torch.arange(length)[None] % 9
        for inputs in ({"attention_mask": mask}, {"attention_mask": mask, "position_ids": position_ids}):
            with torch.no_grad():
                got, wanted = compiled(tokens, **inputs), model(tokens, **inputs)
            assert error(got.last_hidden_state, wanted.last_hidden_state) <= allowed(family)[torch.float32]


class _Recorded(nn.Module):
    """A model whose arguments are all of a call, as recorders want them."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, attention_mask: Tensor, position_ids: Tensor) -> Tensor:
        given = {"attention_mask": attention_mask, "position_ids": position_ids}
        return self.model(tokens, **given).last_hidden_state


@pytest.mark.filterwarnings("ignore")  # of the recorder
@pytest.mark.parametrize("recorder", ["torch.jit.trace", "make_fx"])
def test_what_is_recorded_serves_other_masks_and_positions(family: str, recorder: str) -> None:
    model, tokens = _Recorded(with_alibi(made(family)).requires_grad_(False)), tokens_of(2, 17)
    mask, position_ids = torch.ones_like(tokens), torch.arange(17).expand(2, -1)
    if recorder == "make_fx":
        recorded = make_fx(model)(tokens, mask, position_ids)
    else:
        recorded = torch.jit.trace(model, (tokens, mask, position_ids))
    padded = mask.clone()
    padded[0, :4], padded[1, 9:] = 0, 0
    for given in ((mask, position_ids), (padded, position_ids), (mask, position_ids % 9)):
        text = given[0] != 0
        assert error(recorded(tokens, *given)[text], model(tokens, *given)[text]) <= allowed(family)[torch.float32]


def test_masks_without_values_of_one_call(family: str) -> None:
    model, tokens = with_alibi(made(family)).requires_grad_(False), tokens_of(3, 17)
    mask = torch.arange(17) < torch.tensor([[17], [9], [4]])
    each = torch.func.vmap(lambda x, text: model(x[None], attention_mask=text[None]).last_hidden_state[0])
    expected = model(tokens, attention_mask=mask).last_hidden_state
    assert error(each(tokens, mask)[mask], expected[mask]) <= allowed(family)[torch.float32]
    found = model.to("meta")(tokens.to("meta"), attention_mask=mask.to("meta")).last_hidden_state
    assert found.shape == expected.shape


class _Largest(TorchDispatchMode):
    """Remembers the size of the largest tensor that an operator returned, in elements."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.elements = max([self.elements, *(x.numel() for x in tree_leaves(result) if isinstance(x, Tensor))])
        return result


@pytest.mark.parametrize("attn_implementation", ["eager", "sdpa"])
def test_nothing_of_length_times_length_is_formed(attn_implementation: str) -> None:
    length = 2048
    model = with_alibi(made("bert", num_hidden_layers=1, attn_implementation=attn_implementation)).train()
    mask = torch.ones(1, length, dtype=torch.long)
    mask[0, 700:720] = 0
    position_ids = torch.arange(length)[None] % 1024
    for inputs in ({}, {"attention_mask": mask}, {"position_ids": position_ids}):
        with _Largest() as largest:
            model(tokens_of(1, length), **inputs).last_hidden_state.sum().backward()
        assert length * HIDDEN <= largest.elements < length * 100  # that of the feed-forward layers, 41 features wide


# --- Saving and loading --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["canonical", "asymmetric"])
def test_what_was_saved_is_loaded_by_the_same_line(family: str, which: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    slopes = {"slopes": torch.tensor([0.301, 0.0101, 0.0707]), "future_slopes": torch.tensor([0.4, 0.03, 0.1])}
    model, tokens = with_alibi(made(family, 2), **(slopes if which == "asymmetric" else {})), tokens_of(2, 44)
    wanted = model(tokens).logits
    model.save_pretrained(tmp_path)
    assert not any("position" in name for name in load_file(tmp_path / "model.safetensors"))

    loaded = with_alibi(FAMILIES[family][2].from_pretrained(tmp_path))
    assert torch.equal(loaded.eval()(tokens).logits, wanted)
    fresh = with_alibi(FAMILIES[family][2](model.config))
    fresh.load_state_dict(model.state_dict())  # strict
    assert torch.equal(fresh.eval()(tokens).logits, wanted)
    base = with_alibi(FAMILIES[family][1].from_pretrained(tmp_path)).eval()
    assert torch.equal(base(tokens).last_hidden_state, model.bert(tokens).last_hidden_state)


def test_slopes_given_replace_those_saved(tmp_path: Path) -> None:
    slopes, future = torch.tensor([0.301, 0.0101, 0.0707]), torch.tensor([0.4, 0.03, 0.1])
    with_alibi(made("bert"), slopes=slopes, future_slopes=future).save_pretrained(tmp_path)
    for given in ({"slopes": 2 * slopes}, {"future_slopes": 2 * future}):
        loaded = with_alibi(BertModel.from_pretrained(tmp_path), **given)
        attention = loaded.encoder.layer[1].attention.self
        assert attention.alibi_slopes == tuple((slopes if "slopes" not in given else 2 * slopes).tolist())
        assert attention.alibi_future_slopes == (None if "slopes" in given else tuple((2 * future).tolist()))
    wrong = BertModel.from_pretrained(tmp_path)
    wrong.config.alibi_slopes = [0.5]
    with pytest.raises(ValueError, match=r"alibi_slopes in the config must be 3 \(num_attention_heads\), got \[0.5\]"):
        with_alibi(wrong)


# --- Models that contain one, and what is refused -----------------------------------------------------------------


def test_heads_of_all_kinds_and_wrappers_take_it() -> None:
    tokens, mask = tokens_of(4, 60), torch.ones(4, 60, dtype=torch.long)
    mask[1, 50:] = 0
    classifier = with_alibi(BertForSequenceClassification(config_of("bert"))).eval()
    chooser = with_alibi(BertForMultipleChoice(config_of("bert"))).eval()
    pooled = classifier.bert(tokens, attention_mask=mask).pooler_output
    assert torch.equal(classifier(tokens, attention_mask=mask).logits, classifier.classifier(pooled))
    pooled = chooser.bert(tokens, attention_mask=mask).pooler_output
    chosen = chooser(tokens.view(2, 2, 60), attention_mask=mask.view(2, 2, 60)).logits
    assert torch.equal(chosen, chooser.classifier(pooled).view(2, 2))

    base = made("bert")
    wrapped = with_alibi(nn.ModuleDict({"one": base, "other": made("megatron")}))
    assert wrapped["one"](tokens, mask).last_hidden_state.shape == (4, 60, HIDDEN)  # a positional mask, too
    assert len(wrapped["other"](tokens, output_hidden_states=True).hidden_states) == 3
    assert len(wrapped["one"](tokens, return_dict=False)) == 2


def test_layers_and_embeddings_may_be_shared() -> None:
    one, other = made("bert"), made("bert")
    one.encoder.layer[1] = one.encoder.layer[0]
    other.embeddings = one.embeddings
    tokens = tokens_of(2, 25)
    wanted = [expected(x, tokens, bias_of(2, 25)) for x in (one, other)]
    with_alibi(nn.ModuleList([one, other]))
    for model, result in zip((one, other), wanted, strict=True):
        assert error(model(tokens).last_hidden_state, result) <= allowed("bert")[torch.float32]


class _HandsOn(BertModel):
    """A model that takes whatever its parent does."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


def test_a_subclass_that_hands_its_arguments_on_and_its_hooks_get_them() -> None:
    model, tokens, seen = made("bert"), tokens_of(2, 25), []
    wanted = with_alibi(copy.deepcopy(model))(input_ids=tokens).last_hidden_state
    model.__class__ = _HandsOn
    with_alibi(model).register_forward_hook(lambda module, args, output: seen.append(args[0] is tokens))
    assert torch.equal(model(tokens).last_hidden_state, wanted)
    assert seen == [True]


class _OwnAttention(BertSelfAttention):
    pass


class _OwnEmbeddings(BertEmbeddings):
    pass


def _with_own(part: str) -> Any:
    model = made("bert")
    if part == "attention":
        model.encoder.layer[1].attention.self = _OwnAttention(model.config)
    else:
        model.embeddings = _OwnEmbeddings(model.config)
    return model


def _split() -> Any:
    model = made("bert")
    model.encoder.layer[1].attention.self.key = nn.Linear(HIDDEN, HIDDEN // HEADS)
    return model


def _decoder() -> Any:
    model = made("megatron")
    model.config.add_cross_attention = True
    return model


REFUSED = {
    "is_decoder must be False": lambda: (made("bert", is_decoder=True), {}),
    "add_cross_attention must be False": lambda: (_decoder(), {}),
    "output_attentions must be False": lambda: (made("bert", attn_implementation="eager", output_attentions=True), {}),
    "position_embedding_type must be 'absolute' in the config, to be replaced, got 'relative_key'": lambda: (
        made("bert", position_embedding_type="relative_key"),
        {},
    ),
    "must contain a BertModel or a MegatronBertModel of transformers, got DistilBertModel": lambda: (
        DistilBertModel(DistilBertConfig(vocab_size=9, dim=8, n_heads=2, hidden_dim=8, n_layers=1)),
        {},
    ),
    "model must not have ALiBi yet, got a BertModel": lambda: (with_alibi(made("bert", 2)), {}),
    "attention of the model must be one of BertEmbeddings.*, got _OwnAttention": lambda: (_with_own("attention"), {}),
    "embeddings and attention of the model must be one of BertEmbeddings.*, got _OwnEmb": lambda: (_with_own("x"), {}),
    "must have 33 rows for its 3 heads, got 11": lambda: (_split(), {}),
    r"slopes must have shape \(3,\) \(num_heads\), got \(4,\)": lambda: (made("bert"), {"slopes": torch.ones(4)}),
    "future_slopes must not be negative": lambda: (made("bert"), {"future_slopes": -torch.ones(3)}),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refuses_by_name_before_anything_is_changed(message: str) -> None:
    wrong, given = REFUSED[message]()
    model = wrong if "must contain" in message else nn.ModuleDict({"fine": made("bert"), "wrong": wrong})
    before = _described(model)
    with pytest.raises(ValueError, match=message):
        with_alibi(model, **given)
    assert _described(model) == before


def _described(model: nn.Module) -> Any:
    configs = [x.config.to_dict() for x in model.modules() if hasattr(x, "config")]
    rates = [x.p for x in model.modules() if isinstance(x, nn.Dropout)]
    hooks = [len(x._forward_pre_hooks) for x in model.modules()]
    return [*map(type, model.modules())], list(model.state_dict()), configs, rates, hooks


def test_refuses_arguments_of_another_kind() -> None:
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got str"):
        with_alibi("bert-base-uncased")
    with pytest.raises(TypeError, match="slopes must be an array"):
        with_alibi(made("bert"), slopes=0.5)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"output_attentions": True}, "output_attentions must be False"),
        ({"past_key_values": transformers.DynamicCache()}, "past_key_values must be None"),
        ({"encoder_hidden_states": torch.zeros(2, 5, HIDDEN)}, "encoder_hidden_states must be None"),
        ({"attention_mask": torch.ones(2, 4)}, r"attention_mask must be of shape \(2, 5\).*, got \(2, 4\)"),
        ({"attention_mask": torch.ones(2, 1, 5, 5)}, r"attention_mask must be of shape .*, got \(2, 1, 5, 5\)"),
        ({"position_ids": torch.arange(4)[None]}, r"position_ids must be of shape \(2, 5\).*, got \(1, 4\)"),
    ],
)
def test_refuses_calls_that_it_cannot_answer(family: str, inputs: dict[str, Any], message: str) -> None:
    model = with_alibi(made(family))
    with pytest.raises(ValueError, match=message):
        model(tokens_of(2, 5), **inputs)
    with pytest.raises(TypeError, match="attention_mask must be a tensor, got list"):
        model(tokens_of(2, 5), attention_mask=[[1] * 5] * 2)


def test_refuses_what_would_pass_its_preparation_by(family: str) -> None:
    model = with_alibi(made(family))
    with pytest.raises(ValueError, match="call the model, not a layer of it"):
        model.encoder(torch.zeros(2, 5, HIDDEN))
    model.config.is_decoder = True
    with pytest.raises(ValueError, match="is_decoder must be False"):
        model(tokens_of(2, 5))


# --- Training ------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_learns_what_distance_alone_tells(family: str) -> None:
    # Eight runs of four equal tokens, all runs different, an inner token of each masked: to be told by its neighbours.
    # Without positions all masks of a row get the same answer, so the loss is at least ln 8, whatever the weights.
    runs, width, mask_token = 8, 4, 16
    torch.manual_seed(0)
    sizes = {"vocab_size": 17, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}
    model = with_alibi(FAMILIES[family][2](config_of(family, **sizes))).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(200):
        labels = torch.rand(16, 16).argsort(dim=1)[:, :runs].repeat_interleave(width, dim=1)
        hidden = torch.arange(width).eq(torch.randint(1, width - 1, (16, runs, 1))).flatten(1)
        tokens, labels = labels.masked_fill(hidden, mask_token), labels.masked_fill(~hidden, -100)
        loss = model(tokens, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > math.log(runs)
    assert sum(losses[-20:]) / 20 < math.log(runs) / 4, losses[-1]
