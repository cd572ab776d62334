"""Encoders of transformers with ALiBi in place of their positions, against the same models with a dense bias."""

from __future__ import annotations

import copy
import functools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from torch import Tensor, nn  # noqa: E402
from transformers import AttentionInterface, AttentionMaskInterface, AutoModel, AutoModelForMaskedLM  # noqa: E402
from transformers.models.bert.modeling_bert import BertEmbeddings  # noqa: E402

from alibi_torch.transformers import with_alibi  # noqa: E402
from tests.support.dense_alibi import DENSE, FINER, PADDING, VOCABULARY, error, hidden, made, tokens_of  # noqa: E402
from tests.support.memory import largest_allocation  # noqa: E402

HEADS, HIDDEN, LONGEST = 3, 33, 19  # the longest that position embeddings would allow
SIZES = {"hidden_size": HIDDEN, "num_attention_heads": HEADS, "num_hidden_layers": 2, "intermediate_size": 41}
SIZES |= {"hidden_dropout_prob": 0.0}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertConfig", SIZES),
    "roberta": ("RobertaConfig", SIZES),
    "electra": ("ElectraConfig", SIZES | {"embedding_size": 21}),
    "distilbert": (
        "DistilBertConfig",
        {"dim": HIDDEN, "n_heads": HEADS, "n_layers": 2, "hidden_dim": 41, "dropout": 0.0},
    ),
}


@pytest.fixture(params=CONFIGS)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


def config_of(family: str, **settings: Any) -> Any:
    name, sizes = CONFIGS[family]
    sizes = sizes | {"vocab_size": VOCABULARY, "max_position_embeddings": LONGEST} | settings
    return getattr(transformers, name)(**sizes)


def model_of(family: str, kind: Any = AutoModel, **settings: Any) -> Any:
    return made(config_of(family, **settings), kind)


def dense_of(family: str, longest: int = 200, **slopes: Any) -> Any:
    """The model with positions of zeros, for rows of up to ``longest`` tokens, and a bias of queries times keys."""
    model = model_of(family, max_position_embeddings=longest)
    nn.init.zeros_(model.embeddings.position_embeddings.weight)
    model.set_attn_implementation(DENSE)
    for name, x in slopes.items():
        setattr(model.config, f"alibi_{name}", x.tolist())
    return model


@functools.cache
def allowed(family: str) -> dict[torch.dtype, float]:
    """Twice what the dense computation loses in float32, at worst among hundreds of tokens.

    Float64 loses as much less as its rounding is finer, on both sides of a comparison.
    """
    model, tokens = dense_of(family), tokens_of(2, 150)
    loss = error(hidden(model, tokens), hidden(copy.deepcopy(model).double(), tokens))
    return {torch.float32: 2 * loss, torch.float64: FINER * loss}


SLOPES = {"slopes": torch.tensor([0.6, 0.03, 0.2]), "future_slopes": torch.tensor([0.05, 0.4, 0.0])}
WHICH = {"canonical": (), "symmetric": ("slopes",), "asymmetric": ("slopes", "future_slopes")}


@pytest.mark.parametrize("length", [1, 7, LONGEST, 150])
@pytest.mark.parametrize("which", WHICH)
def test_is_the_dense_model_with_the_bias_added(family: str, which: str, length: int) -> None:
    given, tokens = {name: SLOPES[name] for name in WHICH[which]}, tokens_of(2, length)
    wanted = hidden(dense_of(family, **given).double(), tokens)
    for dtype in (torch.float32, torch.float64):
        got = hidden(with_alibi(model_of(family).to(dtype), **given), tokens)
        assert got.dtype == dtype
        assert error(got, wanted) <= allowed(family)[dtype], dtype


@pytest.mark.parametrize("where", PADDING)
def test_padding_is_not_seen_and_counts_as_distance(family: str, where: str) -> None:
    tokens, mask = tokens_of(2, 17), torch.tensor(PADDING[where])
    wanted = hidden(dense_of(family).double(), tokens, attention_mask=mask)
    model = with_alibi(model_of(family).double())
    for dtype in (torch.long, torch.float32, torch.bool):
        got = hidden(model, tokens, attention_mask=mask.to(dtype))
        assert error(got, wanted) <= allowed(family)[torch.float64]  # that of padding too
    if family != "distilbert":  # positions of the row, as they come with padding, change nothing
        counted = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)  # as a text-generation pipeline counts
        for position_ids in (counted, torch.arange(17)[None], torch.arange(17).expand(2, -1) + 2):
            assert torch.equal(hidden(model, tokens, attention_mask=mask, position_ids=position_ids), got)


def test_a_row_of_padding_alone_harms_no_other(family: str) -> None:
    model, tokens, mask = with_alibi(model_of(family)), tokens_of(2, 17), torch.ones(2, 17, dtype=torch.long)
    mask[0] = 0
    got = hidden(model, tokens, attention_mask=mask)
    assert bool(got.isfinite().all())
    assert error(got[1:], hidden(model, tokens[1:])) <= allowed(family)[torch.float32]


def test_packed_rows_are_the_sequences_alone(family: str) -> None:
    model, tokens, lengths = with_alibi(model_of(family).double()), tokens_of(2, 71), (40, 1, 30)
    position_ids = torch.cat([torch.arange(n) for n in lengths])[None]
    if family == "distilbert":  # which hands no positions to its attention
        with pytest.raises(ValueError, match="position_ids must go up along a row.*give each sequence a row"):
            model(tokens, position_ids=position_ids)
        return
    apart = torch.cat([hidden(model, x) for x in tokens.split(lengths, dim=1)], dim=1)
    same = allowed(family)[torch.float64]
    assert error(hidden(model, tokens, position_ids=position_ids), apart) <= same
    mask = torch.ones(2, 71, dtype=torch.long)
    mask[:, 61:] = 0  # position ids of each row, and padding at the end
    rows = torch.stack([position_ids[0], torch.arange(4, 75)])
    got = hidden(model, tokens, attention_mask=mask, position_ids=rows)
    assert error(got[:1, 41:61], hidden(model, tokens[:1, 41:61])) <= same
    assert error(got[1:, :61], hidden(model, tokens[1:, :61])) <= same


def test_gradients_are_the_dense_models(family: str) -> None:
    tokens, mask = tokens_of(2, 30), torch.ones(2, 30, dtype=torch.long)
    mask[1, 25:] = 0
    cotangent = torch.randn(2, 30, HIDDEN, generator=torch.Generator().manual_seed(0))

    def gradients(model: Any) -> dict[str, Tensor]:
        (model(tokens, attention_mask=mask).last_hidden_state * cotangent).sum().backward()
        return {name: x.grad for name, x in model.named_parameters() if x.grad is not None}

    exact, rough = (gradients(dense_of(family).to(dtype)) for dtype in (torch.float64, torch.float32))
    model = with_alibi(model_of(family).double()).train()
    got = gradients(model)
    assert got.keys() == exact.keys() - {"embeddings.position_embeddings.weight"}
    loss = max(error(rough[name], exact[name]) for name in got)
    for name, gradient in got.items():
        assert error(gradient, exact[name]) <= FINER * loss, name
    model.zero_grad()
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    again = gradients(model)
    assert all(torch.equal(again[name], got[name]) for name in got)


def test_attention_maps_are_the_dense_models_and_change_no_result(family: str) -> None:
    tokens, mask = tokens_of(2, 17), torch.tensor(PADDING["left"])
    model, dense = with_alibi(model_of(family).double(), **SLOPES), dense_of(family, **SLOPES).double()
    with torch.no_grad():
        got, wanted = (x(tokens, attention_mask=mask, output_attentions=True) for x in (model, dense))
    assert len(got.attentions) == 2
    for one, other in zip(got.attentions, wanted.attentions, strict=True):
        assert one.shape == (2, HEADS, 17, 17)
        assert error(one, other) <= allowed(family)[torch.float64]
    for result in (got.last_hidden_state, hidden(model, tokens, attention_mask=mask)):
        assert error(result, wanted.last_hidden_state) <= allowed(family)[torch.float64]


# --- What a model is after it --------------------------------------------------------------------------------------


def test_position_embeddings_are_neither_trained_nor_saved_and_token_types_stay() -> None:
    model = model_of("bert", AutoModelForMaskedLM)
    before, shared = {name: x.clone() for name, x in model.state_dict().items()}, model.config
    described = copy.deepcopy(shared).to_dict()
    assert with_alibi(model) is model
    after = model.state_dict()
    assert after.keys() == before.keys() - {"bert.embeddings.position_embeddings.weight"}
    assert all(torch.equal(x, before[name]) for name, x in after.items())
    types, tokens = torch.arange(1000)[None] % 2, tokens_of(1, 1000)
    one, other = (model(tokens, token_type_ids=x).logits for x in (types, 1 - types))
    assert not torch.allclose(one, other)
    embedded = model.get_input_embeddings()(tokens)
    assert torch.equal(model(inputs_embeds=embedded, token_type_ids=types).logits, one)
    assert shared.to_dict() == described  # the config that it had, which other models may share
    assert {id(x.config) for x in model.modules() if hasattr(x, "config")} == {id(model.config)}


def test_a_config_gives_a_new_model() -> None:
    model = with_alibi(config_of("roberta"), slopes=SLOPES["slopes"])
    assert hidden(model.eval(), tokens_of(1, 100)).shape == (1, 100, HIDDEN)
    assert model.config.alibi_slopes == SLOPES["slopes"].tolist()


def test_training_drops_no_weights(family: str) -> None:
    model, tokens = with_alibi(model_of(family)), tokens_of(2, 23)  # whose config has a dropout of 0.1 by default
    assert torch.equal(hidden(model.train(), tokens), hidden(model.eval(), tokens))


def test_low_precision_loses_no_more_than_it_does_of_the_dense_model(family: str) -> None:
    model, dense, tokens = with_alibi(model_of(family)), dense_of(family), tokens_of(2, 100)
    wanted = hidden(copy.deepcopy(dense).double(), tokens)
    with torch.autocast("cpu", torch.bfloat16):
        assert error(hidden(model, tokens), wanted) <= 2 * error(hidden(dense, tokens), wanted)
    model, dense = model.bfloat16(), dense.bfloat16()
    assert error(hidden(model, tokens), wanted) <= 2 * error(hidden(dense, tokens), wanted)


def test_no_cast_of_the_model_rounds_slopes() -> None:
    slopes, tokens = torch.tensor([0.301, 0.0101, 0.0707]), tokens_of(1, 60)
    rounded = model_of("bert").bfloat16()
    cast_after = with_alibi(copy.deepcopy(rounded), slopes=slopes).float()
    assert torch.equal(hidden(cast_after, tokens), hidden(with_alibi(rounded.float(), slopes=slopes), tokens))


@pytest.mark.parametrize("packed", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", ["bert", *(pytest.param(x, marks=pytest.mark.slow) for x in CONFIGS if x != "bert")])
def test_one_graph_for_masks_and_packed_rows(family: str, packed: bool) -> None:
    model, tokens = with_alibi(model_of(family)), tokens_of(2, 17)
    torch.compiler.reset()  # models of transformers share code, and so a limit of graphs
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    given: Any = {"attention_mask": torch.tensor(PADDING["left"])}
    if packed and family != "distilbert":
        given = {"position_ids": torch.arange(17)[None] % 9}
    assert error(hidden(compiled, tokens, **given), hidden(model, tokens, **given)) <= allowed(family)[torch.float32]


def test_an_exported_program_takes_other_lengths_and_masks() -> None:
    model, tokens, mask = with_alibi(model_of("bert")), tokens_of(2, 17), torch.tensor(PADDING["left"])
    batch, length = torch.export.Dim("batch", min=2, max=64), torch.export.Dim("length", min=2, max=4096)
    shapes = ({0: batch, 1: length}, {0: batch, 1: length})
    with torch.no_grad():
        program = torch.export.export(model, (tokens, mask), dynamic_shapes=shapes).module()
        longer = tokens_of(3, 77), torch.ones(3, 77, dtype=torch.long).index_fill(1, torch.arange(50, 60), 0)
        assert error(program(*longer).last_hidden_state, hidden(model, *longer)) <= allowed("bert")[torch.float32]


def test_copies_and_threads_compute_the_same(family: str) -> None:
    model, tokens = with_alibi(model_of(family)), tokens_of(2, 40)
    wanted = hidden(model, tokens)
    assert torch.equal(hidden(copy.deepcopy(model), tokens), wanted)
    with ThreadPoolExecutor(4) as threads:
        assert all(torch.equal(x, wanted) for x in threads.map(lambda _: hidden(model, tokens), range(8)))


def test_nothing_of_length_times_length_is_formed() -> None:
    length = 2048
    model = with_alibi(model_of("bert", num_hidden_layers=1)).train()
    mask = torch.ones(1, length, dtype=torch.long)
    mask[0, 700:720] = 0
    for inputs in ({}, {"attention_mask": mask}, {"position_ids": torch.arange(length)[None] % 1024}):
        largest = largest_allocation(lambda: model(tokens_of(1, length), **inputs).last_hidden_state.sum().backward())  # noqa: B023
        assert 4 * length * HIDDEN <= largest < 2 * length * length  # bytes: half of the scores of one head


@pytest.mark.parametrize("which", WHICH)
def test_a_saved_model_is_loaded_by_the_same_line(family: str, which: str, tmp_path: Path) -> None:
    given, tokens = {name: SLOPES[name] for name in WHICH[which]}, tokens_of(2, 44)
    model = with_alibi(model_of(family, AutoModelForMaskedLM), **given)
    wanted = model(tokens).logits
    model.save_pretrained(tmp_path)
    loaded = with_alibi(AutoModelForMaskedLM.from_pretrained(tmp_path)).eval()
    assert torch.equal(loaded(tokens).logits, wanted)
    base = with_alibi(AutoModel.from_pretrained(tmp_path, attn_implementation="alibi")).eval()
    assert torch.equal(hidden(base, tokens), hidden(model.base_model, tokens))
    halved = with_alibi(AutoModel.from_pretrained(tmp_path), slopes=SLOPES["slopes"] / 2)
    assert halved.config.alibi_slopes == (SLOPES["slopes"] / 2).tolist()  # in place of those saved
    assert halved.config.alibi_future_slopes is None
    new = AutoModel.from_pretrained(tmp_path, attn_implementation="alibi")  # which has new, random positions
    with pytest.raises(ValueError, match=r"model must be given to with_alibi after it is loaded.*call with_alibi"):
        new(tokens[:, :9])


# --- What is refused, and what is proved ---------------------------------------------------------------------------


def of_sizes(name: str, **settings: Any) -> Any:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    return AutoModel.from_config(getattr(transformers, name)(**sizes, intermediate_size=40, pad_token_id=0, **settings))


REFUSED: dict[str, Any] = {
    "add_cross_attention must be False": lambda: model_of("bert", is_decoder=True, add_cross_attention=True),
    "output_attentions must be False": lambda: model_of("bert", attn_implementation="eager", output_attentions=True),
    "position_embedding_type must be 'absolute'.*, got 'relative_key'": lambda: model_of(
        "bert", position_embedding_type="relative_key"
    ),
    "model must contain a model of transformers, got Linear": lambda: nn.Linear(2, 2),
    "model must not have ALiBi yet, got a BertModel": lambda: with_alibi(model_of("bert")),
    "got a MegatronBertModel, which does not": lambda: of_sizes("MegatronBertConfig"),
    "got a MPNetModel, which does not": lambda: of_sizes("MPNetConfig"),
    "positions that can be removed, got a LlamaModel with LlamaRotaryEmbedding": lambda: of_sizes("LlamaConfig"),
    "is_encoder_decoder must be False": lambda: AutoModel.from_config(
        transformers.BartConfig(vocab_size=VOCABULARY, d_model=16, encoder_layers=1, decoder_layers=1)
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refuses_by_name_before_anything_is_changed(message: str) -> None:
    model = nn.ModuleDict({"fine": model_of("bert"), "wrong": REFUSED[message]()})
    before = _described(model)
    with pytest.raises(ValueError, match=message):
        with_alibi(model["wrong"] if "contain" in message else model)
    assert _described(model) == before


def test_refuses_wrong_arguments() -> None:
    with pytest.raises(ValueError, match=r"slopes must have shape \(3,\) \(num_heads\), got \(4,\)"):
        with_alibi(model_of("bert"), slopes=torch.ones(4))
    with pytest.raises(ValueError, match="future_slopes must not be negative"):
        with_alibi(model_of("bert"), future_slopes=-torch.ones(3))
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module or a config of transformers, got str"):
        with_alibi("bert-base-uncased")


def _described(model: nn.Module) -> Any:
    configs = [(x.config.to_dict(), x.config._attn_implementation) for x in model.modules() if hasattr(x, "config")]
    rates = [(x.p, x.training) for x in model.modules() if isinstance(x, nn.Dropout)]
    hooks = [len(x._forward_pre_hooks) + len(x._forward_hooks) for x in model.modules()]
    return [*map(type, model.modules())], list(model.state_dict()), configs, rates, hooks


class _CountingEmbeddings(BertEmbeddings):
    """Embeddings that tell positions, without an entry of the config that says so."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        embedded = super().forward(*args, **kwargs)
        return embedded + torch.linspace(0, 1, embedded.shape[1])[:, None].to(embedded)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("broken", ["mask", "attention", "positions"])
def test_a_broken_seam_is_refused_and_the_model_restored(broken: str, dtype: torch.dtype) -> None:
    model, tokens = model_of("bert", AutoModelForMaskedLM).to(dtype).train(), tokens_of(2, 17)
    registry, broken_function = {
        "mask": (AttentionMaskInterface, lambda *_, **__: None),  # padding is seen
        "attention": (AttentionInterface, AttentionInterface()["sdpa"]),  # there is no bias
        "positions": (AttentionInterface, AttentionInterface()["alibi"]),
    }[broken]
    if broken == "positions":
        model.bert.embeddings.__class__ = _CountingEmbeddings
    before, wanted = _described(model), hidden(copy.deepcopy(model).eval().bert, tokens)
    what = "slopes must change" if broken == "attention" else r"padding on the left must change nothing.*of \d"
    registered = registry()["alibi"]
    registry.register("alibi", broken_function)
    try:
        with pytest.raises(RuntimeError, match=rf"{what}.*PyTorch \d.*transformers \d"):
            with_alibi(model)
        assert with_alibi(copy.deepcopy(model), prove=False).config.alibi_slopes
    finally:
        registry.register("alibi", registered)
    assert _described(model) == before
    assert torch.equal(hidden(model.eval().bert, tokens), wanted)


def test_a_model_without_weights_is_converted_with_a_warning() -> None:
    with torch.device("meta"):
        model = AutoModel.from_config(config_of("bert"))
    with pytest.warns(UserWarning, match="nothing was proved of a BertModel on the meta device"):
        with_alibi(model)
