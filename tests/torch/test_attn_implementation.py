"""Models of transformers that ask its registry for ``attn_implementation="alibi"``, against a dense bias."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import alibi_torch.transformers  # noqa: E402
from tests.support.dense_alibi import CACHE, DENSE, FINER, PADDING, VOCABULARY, error, hidden, made, tokens_of  # noqa: E402  # noqa: E402

SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"intermediate_size": 40, "max_position_embeddings": 64, "pad_token_id": 0}


def llama(**settings: Any) -> Any:
    return transformers.LlamaConfig(**(SIZES | {"num_key_value_heads": 2} | settings))


def both(model: Any) -> tuple[Any, Any]:
    """The model in float64 with ALiBi by the registry's function, and densely."""
    ours, dense = copy.deepcopy(model).double(), copy.deepcopy(model).double()
    ours.set_attn_implementation("alibi")
    dense.set_attn_implementation(DENSE)
    return ours, dense


@functools.cache
def allowed() -> float:
    """The error of float64: float32's, times the ratio of their roundings."""
    model, tokens = made(llama()), tokens_of(2, 40)
    model.set_attn_implementation(DENSE)
    with torch.no_grad():
        rough = model(tokens).last_hidden_state
        return FINER * error(rough, model.double()(tokens).last_hidden_state)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("where", PADDING)
def test_a_rotary_model_gets_alibi_beside_its_rotations(where: str, is_causal: bool) -> None:
    ours, dense = both(made(llama(is_causal=is_causal)))
    tokens, mask = tokens_of(2, 17), torch.tensor(PADDING[where])
    text = mask.bool()
    got, expected = (hidden(x, tokens, attention_mask=mask) for x in (ours, dense))
    assert error(got[text], expected[text]) <= allowed()
    ours.set_attn_implementation("sdpa")
    assert error(got[1], hidden(ours, tokens[1:], attention_mask=mask[1:])[0]) > 1e-3


def test_importing_changes_no_model_and_the_name_may_be_given_anywhere(tmp_path: Path) -> None:
    model, tokens = made(llama()), tokens_of(2, 17)
    assert model.config._attn_implementation == "sdpa"
    model.config.alibi_slopes = [0.301, 0.0101, 0.0707, 0.5]
    model.save_pretrained(tmp_path)
    model.set_attn_implementation("alibi")
    expected = hidden(model, tokens)
    loaded = transformers.AutoModel.from_pretrained(tmp_path, attn_implementation="alibi").eval()
    assert torch.equal(hidden(loaded, tokens), expected)
    fresh = transformers.AutoModel.from_config(model.config, attn_implementation="alibi").eval()
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(hidden(fresh, tokens), expected)
    model.config.alibi_slopes = None  # the canonical ones
    assert error(hidden(model, tokens), expected) > 1e-3


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt"])
def test_a_saved_model_is_loaded_with_it(name: str, tmp_path: Path) -> None:
    config, kind, tokens = llama() if name == "llama" else DECODERS[name](), transformers.AutoModel, tokens_of(2, 17)
    model = kind.from_config(config, attn_implementation="alibi").eval()
    for place in (tmp_path / "1", tmp_path / "2"):  # a loaded model may be saved again before it runs
        model.save_pretrained(place)
        model = kind.from_pretrained(place).eval()
    assert torch.equal(hidden(model, tokens), hidden(kind.from_pretrained(place, attn_implementation="alibi"), tokens))
    assert error(hidden(model, tokens), hidden(kind.from_pretrained(place, attn_implementation="sdpa"), tokens)) > 1e-3
    model.set_attn_implementation("sdpa")
    assert "attn_implementation" not in model.config.to_dict()


@pytest.mark.parametrize("kind", ["none", "dynamic", "static"])
@pytest.mark.parametrize("where", ["none", "left"])
def test_generates_the_tokens_of_the_dense_model(kind: str, where: str) -> None:
    ours, dense = both(made(llama(), transformers.AutoModelForCausalLM))
    tokens, mask = tokens_of(2, 17), torch.tensor(PADDING[where])
    how = {"max_new_tokens": 12, "do_sample": False, "use_cache": kind != "none", "eos_token_id": None}
    how |= {"output_logits": True, "return_dict_in_generate": True, "pad_token_id": 0}
    if kind != "none":
        how["cache_implementation"] = kind
    got, expected = (x.generate(tokens, attention_mask=mask, **how) for x in (ours, dense))
    assert torch.equal(got.sequences, expected.sequences)
    assert error(torch.stack(got.logits), torch.stack(expected.logits)) <= allowed()


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_a_text_in_several_calls_is_the_text_in_one(kind: str) -> None:
    model, tokens = both(made(llama()))[0], tokens_of(2, 30)
    whole = hidden(model, tokens)
    is_static, config = kind == "static", model.config
    cache = (
        transformers.StaticCache(config, max_cache_len=50) if is_static else transformers.DynamicCache(config=config)
    )
    parts = [hidden(model, x, use_cache=True, **{CACHE: cache}) for x in tokens.split([1, 10, 1, 7, 1, 9, 1], dim=1)]
    assert error(torch.cat(parts, dim=1), whole) <= allowed()
    mask = torch.ones(2, 1, 1, 1, dtype=torch.bool)
    with pytest.raises(ValueError, match="mask must have all (31|50) keys in its last axis"):
        hidden(model, tokens[:, :1], attention_mask=mask, use_cache=True, **{CACHE: cache})


def test_masks_of_any_pattern() -> None:
    ours, dense = both(made(llama()))
    tokens = tokens_of(2, 17)
    visible = torch.rand(2, 1, 17, 17, generator=torch.Generator().manual_seed(0)) < 0.6
    visible |= torch.eye(17, dtype=torch.bool)
    added = torch.where(visible, 0.0, -1e30)
    expected = hidden(dense, tokens, attention_mask=added.double())
    assert error(hidden(ours, tokens, attention_mask=visible), expected) <= allowed()
    assert error(hidden(ours, tokens, attention_mask=added.double()), expected) <= allowed()
    for shape in ((2, 1), (2, 1, 17, 1)):
        with pytest.raises(ValueError, match="mask must have all 17 (tokens so far|keys in its last axis)"):
            hidden(ours, tokens, attention_mask=torch.ones(shape, dtype=torch.bool))


@pytest.mark.parametrize("length", [4, 17])
def test_sliding_windows(length: int) -> None:
    config = transformers.MistralConfig(**(SIZES | {"num_key_value_heads": 2, "sliding_window": 5}))
    ours, dense = both(made(config, transformers.AutoModelForCausalLM))
    tokens = tokens_of(2, length)
    with torch.no_grad():
        assert error(ours(tokens).logits, dense(tokens).logits) <= allowed()
    how = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    assert torch.equal(*(x.generate(tokens, attention_mask=torch.ones_like(tokens), **how) for x in (ours, dense)))


def test_attention_to_another_sequence_has_no_alibi() -> None:
    sizes = {"vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "pad_token_id": 0}
    sizes |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 40, "decoder_ffn_dim": 40}
    ours, dense = both(made(transformers.BartConfig(**sizes)))
    tokens, mask = tokens_of(2, 17), torch.tensor(PADDING["left"])
    for decoded in (tokens_of(2, 5), tokens_of(2, 17)):
        given = {"attention_mask": mask, "decoder_input_ids": decoded}
        assert error(hidden(ours, tokens, **given), hidden(dense, tokens, **given)) <= allowed()


def test_a_compiled_decoder() -> None:
    model, tokens = both(made(llama(num_hidden_layers=1)))[0], tokens_of(2, 17)
    torch.compiler.reset()  # models of transformers share code, and so a limit of graphs
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    for mask in (torch.tensor(PADDING["left"]), None):
        text = slice(None) if mask is None else mask.bool()
        got, expected = (hidden(x, tokens, attention_mask=mask, use_cache=False) for x in (compiled, model))
        assert error(got[text], expected[text]) <= allowed()
    cache = {CACHE: transformers.StaticCache(config=model.config, max_cache_len=40)}
    hidden(model, tokens[:, :15], **cache)
    steps = [hidden(compiled, x, use_cache=True, **cache) for x in tokens[:, 15:].split(1, dim=1)]
    assert error(torch.cat(steps, dim=1), expected[:, 15:]) <= allowed()


REFUSED = {
    "softcap must be None": lambda: transformers.Gemma2Config(**SIZES, num_key_value_heads=2, head_dim=8),
    "s_aux must be None": lambda: transformers.GptOssConfig(
        **SIZES, num_key_value_heads=2, head_dim=8, num_local_experts=2, num_experts_per_tok=1
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_other_scores_are_refused_by_name(message: str) -> None:
    model = transformers.AutoModel.from_config(REFUSED[message](), attn_implementation="alibi")
    with pytest.raises(NotImplementedError, match=message + ".*attn_implementation='alibi'"):
        model(tokens_of(1, 5))


def test_slopes_of_another_head_count_are_refused() -> None:
    model = made(llama())
    model.set_attn_implementation("alibi")
    model.config.alibi_slopes = [0.5] * 3
    with pytest.raises(ValueError, match=r"slopes must have shape \(4,\)"):
        model(tokens_of(1, 5))


DECODERS = {
    "gpt2": lambda: transformers.GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=19),
    "opt": lambda: transformers.OPTConfig(
        **SIZES | {"max_position_embeddings": 19}, ffn_dim=40, word_embed_proj_dim=32
    ),
    "bert": lambda: transformers.BertConfig(**SIZES | {"max_position_embeddings": 19}, is_decoder=True),
    "smollm3": lambda: transformers.SmolLM3Config(
        **SIZES, num_key_value_heads=2, no_rope_layers=[0, 0], bos_token_id=1, eos_token_id=2
    ),
}


@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_without_other_positions_generates_from_padded_prompts_as_from_each_alone(name: str) -> None:
    config = DECODERS[name]()
    model = alibi_torch.transformers.with_alibi(made(config, transformers.AutoModelForCausalLM).double())
    tokens, mask = tokens_of(2, 17), torch.tensor(PADDING["left"])
    how = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    got = model.generate(tokens, attention_mask=mask, **how)[:, 17:]
    for row, prompt in enumerate((tokens[:1, 5:], tokens[1:])):
        alone = model.generate(prompt, attention_mask=torch.ones_like(prompt), **how)[0, prompt.shape[1] :]
        assert torch.equal(got[row], alone)
    dense = copy.deepcopy(model)
    dense.set_attn_implementation(DENSE)
    long = tokens_of(2, 60)
    with torch.no_grad():
        assert error(model(long).logits, dense(long).logits) <= allowed()


@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_is_trained_and_loaded(name: str, tmp_path: Path) -> None:
    kind = transformers.AutoModelForCausalLM
    model = alibi_torch.transformers.with_alibi(made(DECODERS[name](), kind)).train()
    tokens = tokens_of(2, 40)
    model(tokens, labels=tokens).loss.backward()
    assert all(x.grad is not None for x in model.parameters())
    model.save_pretrained(tmp_path)
    loaded = alibi_torch.transformers.with_alibi(kind.from_pretrained(tmp_path)).eval()
    assert torch.equal(loaded(tokens).logits, model.eval()(tokens).logits)
