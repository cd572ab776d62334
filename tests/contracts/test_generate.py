"""Language models continue a text: the same tokens in three frameworks, by one rule."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from alibi_core.backend.models import AlibiConfig, Generation
from tests.support.frameworks import FRAMEWORK, FRAMEWORKS, NAMES, NAMES_SLOW_IN_JAX, Framework, few_in_jax
from tests.support.models import Model, lively_model, make_module

VOCAB_SIZE = 13
CONFIG = AlibiConfig(num_layers=1, embed_dim=16, num_heads=4, num_kv_heads=2, dropout=0.0, expansion_factor=1)


@functools.cache
def model_of(name: str) -> Model:
    """Return a model of the weights that all frameworks share."""
    model = lively_model(name, CONFIG, VOCAB_SIZE)
    if name != "torch":
        model.weights = model_of("torch").weights
    return model


def prompts(batch: int, length: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, VOCAB_SIZE, (batch, length)).astype(np.int32)


def generated(name: str, prompt: np.ndarray, new: int, *, seed: int | None = None, **options: Any) -> np.ndarray:
    """Return the tokens that a model adds to a prompt."""
    found = model_of(name).generate(prompt, new, seed, **options)
    assert np.array_equal(found[:, : prompt.shape[1]], prompt)
    return found[:, prompt.shape[1] :]


@pytest.mark.parametrize("name", NAMES)
def test_the_likeliest_tokens_follow(name: str) -> None:
    prompt = prompts(3, 5)
    found = generated(name, prompt, 9)
    # Later tokens do not change the logits of a prefix, so one pass over the text checks every choice.
    text = np.concatenate([prompt, found], axis=1)
    assert np.array_equal(found, model_of(name)(text)[:, 4:-1].argmax(axis=-1))
    assert len(np.unique(found)) > 3
    assert np.array_equal(found, generated("torch", prompt, 9))
    assert np.array_equal(found[:, :1], generated(name, prompt, 1, seed=0, temperature=1e-300))
    assert generated(name, prompt, 0).shape == (3, 0)


@pytest.mark.parametrize("name", NAMES_SLOW_IN_JAX)
def test_rows_end_and_are_filled(name: str) -> None:
    prompt = prompts(3, 5)
    plain = generated("torch", prompt, 9)
    ends = [int(plain[0, 2]), int(plain[1, 4]), int(plain[2, 1])]  # each row ends early
    for eos, pad, options in ((ends[0], ends[0], {}), (ends, 7, {"pad_token_id": 7})):
        expected = plain.copy()
        for row in expected:
            at = np.flatnonzero(np.isin(row, eos))
            row[at[0] + 1 if len(at) else 9 :] = pad
        assert np.array_equal(generated(name, prompt, 9, eos_token_id=eos, **options), expected)


def drawn_from(logits: np.ndarray, temperature: float, top_k: int | None, top_p: float | None) -> np.ndarray:
    """Return the probabilities of tokens: the ``top_k`` likeliest, and of these as many as ``top_p`` needs."""
    chances = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    likely = np.argsort(-chances)[:top_k]
    before = np.cumsum(chances[likely]) - chances[likely]
    kept = likely if top_p is None else likely[before < top_p * chances[likely].sum()]
    result = np.zeros(len(chances))
    result[kept] = chances[kept] / chances[kept].sum()
    return result


DRAWN = [(2.0, 8, 0.7), (0.5, None, None), (2.0, 4, None)]


@pytest.mark.parametrize(("name", "draws"), few_in_jax(NAMES, DRAWN, DRAWN[0]))
def test_tokens_are_drawn_from_the_models_distribution(
    name: str, draws: tuple[float, int | None, float | None]
) -> None:
    prompt, count = np.tile(prompts(1, 5), (4000, 1)), 4000
    rules = dict(zip(("temperature", "top_k", "top_p"), draws, strict=True))
    found = generated(name, prompt, 1, seed=3, **rules)
    assert np.array_equal(found, generated(name, prompt, 1, seed=3, **rules))
    assert not np.array_equal(found, generated(name, prompt, 1, seed=4, **rules))
    chances = drawn_from(model_of(name)(prompt[:1])[0, -1], **rules)
    frequency = np.bincount(found[:, 0], minlength=VOCAB_SIZE) / count
    # Five standard deviations of a binomial frequency.
    assert np.all(np.abs(frequency - chances) <= 5 * (chances * (1 - chances) / count) ** 0.5)


@pytest.mark.parametrize("framework", [f for f in FRAMEWORKS if f.id != "dask"])
@pytest.mark.parametrize(("top_k", "top_p"), [(None, 1.0), (1, None), (4, None), (None, 0.5), (4, 0.9), (99, 1e-9)])
def test_the_rule_is_one_in_all_libraries(framework: Framework, top_k: int | None, top_p: float | None) -> None:
    logits = np.random.default_rng(0).standard_normal((3, VOCAB_SIZE)).astype(np.float32) * 3
    logits[1, 2] = -np.inf
    rules = Generation.check(np.zeros((1, 1), np.int32), 1, VOCAB_SIZE, temperature=1.5, top_k=top_k, top_p=top_p)
    placed = framework.array(logits)
    found = np.exp(framework.numpy(rules.filter_logits(placed)))
    for row, chances in zip(logits, found / found.sum(axis=-1, keepdims=True), strict=True):
        np.testing.assert_allclose(chances, drawn_from(row, 1.5, top_k, top_p), rtol=1e-5, atol=0)
    tied = rules.filter_logits(framework.array(np.zeros((1, VOCAB_SIZE), np.float32)))
    assert np.array_equal(framework.numpy(tied), np.zeros((1, VOCAB_SIZE)))


REFUSED = [
    ({"prompt": (2, 0)}, ValueError, r"tokens must have shape \(batch, length\), neither of them 0, got \(2, 0\)"),
    ({"prompt": (5,)}, ValueError, r"tokens must have shape \(batch, length\), got \(5,\)"),
    ({"number": -1}, ValueError, "max_new_tokens must not be negative, got -1"),
    ({"number": 1.5}, TypeError, "max_new_tokens must be an integer, got 1.5"),
    ({"temperature": -1.0}, ValueError, "temperature must not be negative, got -1.0"),
    ({"top_k": 3}, ValueError, "top_k must be None with temperature=0, .* got 3"),
    ({"top_p": 0.9}, ValueError, "top_p must be None with temperature=0, .* got 0.9"),
    ({"temperature": 1.0, "top_k": 0}, ValueError, "top_k must be at least 1, got 0"),
    ({"temperature": 1.0, "top_p": 0.0}, ValueError, "top_p must be above 0 and at most 1, got 0.0"),
    ({"temperature": 1.0, "top_p": 1.5}, ValueError, "top_p must be above 0 and at most 1, got 1.5"),
    ({"eos_token_id": 13}, ValueError, "eos_token_id must be below vocab_size, 13, got 13"),
    ({"eos_token_id": [1, "2"]}, TypeError, "eos_token_id must be an integer, got '2'"),
    ({"pad_token_id": 0}, ValueError, "pad_token_id must be None without an eos_token_id"),
]


@pytest.mark.parametrize("name", NAMES)
def test_generate_refuses(name: str) -> None:
    for changes, error, message in REFUSED:
        options = {"prompt": (2, 5), "number": 3} | changes
        with pytest.raises(error, match=f"^{message}"):
            model_of(name).generate(np.zeros(options.pop("prompt"), np.int32), **options)
    if name == "jax":
        with pytest.raises(ValueError, match="^key must be given with a temperature above 0, got None"):
            generated("jax", prompts(1, 1), 1, temperature=1.0)


@pytest.mark.parametrize("name", NAMES)
def test_tokens_must_have_a_dtype_that_holds_the_vocabulary(name: str) -> None:
    model, array = make_module(name, "AlibiLanguageModel", CONFIG, 200), FRAMEWORK[name].array
    with pytest.raises(ValueError, match="^tokens must have a dtype that holds all .*, up to 199, got .*int8; cast"):
        model.generate(array(np.zeros((1, 2), np.int8)), 1)
    if name != "torch":  # its embeddings take int32 and int64 alone
        assert "uint8" in str(model.generate(array(np.zeros((1, 2), np.uint8)), 1).dtype)


@pytest.mark.parametrize("name", NAMES)
def test_tokens_that_have_no_embedding_are_refused(name: str) -> None:
    for token in (-1, VOCAB_SIZE, 10**6):
        with pytest.raises(ValueError, match=f"^tokens must be from 0 to {VOCAB_SIZE - 1}, for .*, got {token}$"):
            model_of(name).generate(np.asarray([[1, token, 2]], np.int32), 3)


@pytest.mark.parametrize("name", NAMES_SLOW_IN_JAX)
def test_prompts_of_several_lengths_go_on_as_each_would_alone(name: str) -> None:
    prompt, lengths, new = prompts(4, 7), [3, 7, 1, 5], 6
    alone = [model_of(name).generate(prompt[i : i + 1, :n], new)[0] for i, n in enumerate(lengths)]
    expected = np.full((4, 7 + new), 0)
    for row, text in zip(expected, alone, strict=True):
        row[: len(text)] = text
    padded = prompt.copy()
    padded[np.arange(7) >= np.asarray(lengths)[:, None]] = -100
    assert np.array_equal(model_of(name).generate(padded, new, lengths=lengths), expected)
    to_the_right = np.stack([np.roll(row, 7 - n) for row, n in zip(padded, lengths, strict=True)])
    for text, mask in ((padded, padded >= 0), (to_the_right, (to_the_right >= 0).astype(np.int32))):
        assert np.array_equal(model_of(name).generate(text, new, mask=FRAMEWORK[name].array(mask)), expected)
    ends = {"eos_token_id": int(alone[0][4]), "pad_token_id": 7}
    with_end = model_of(name).generate(padded, new, lengths=lengths, **ends)
    for row, (i, n) in zip(with_end, enumerate(lengths), strict=True):
        one = model_of(name).generate(prompt[i : i + 1, :n], new, **ends)[0]
        assert np.array_equal(row, np.append(one, [7] * (7 - n)))
    assert np.array_equal(model_of(name).generate(padded, 0, lengths=lengths), expected[:, :7] * (padded >= 0))
    with pytest.raises(ValueError, match="tokens must have a token of text in each row"):
        model_of(name).generate(prompt, new, lengths=[3, 0, 1, 1])
    with pytest.raises(ValueError, match="lengths must be None where a mask is given"):
        model_of(name).generate(prompt, new, lengths=lengths, mask=FRAMEWORK[name].array(padded >= 0))
    mapped = FRAMEWORK[name].mapped(lambda given: model_of(name).generate(prompt, new, lengths=given))
    with pytest.raises(ValueError, match="^lengths must be an array with values, got"):
        mapped(FRAMEWORK[name].array(np.asarray([lengths])))


def go_on(name: str, caches: list[Any], text: Any, new: int, **options: Any) -> np.ndarray:
    """Return what a model makes of a text whose first tokens are in the caches, which are longer afterwards."""
    found = model_of(name).inner.generate(FRAMEWORK[name].array(text), new, caches=caches, **options)
    if name == "jax":
        found, caches[:] = found
    return np.asarray(found)


@pytest.mark.parametrize("name", NAMES_SLOW_IN_JAX)
@pytest.mark.parametrize("is_ragged", [False, True])
def test_generation_goes_on_from_caches_as_from_the_whole_text(name: str, is_ragged: bool) -> None:
    model, end = model_of(name), int(generated("torch", prompts(3, 5), 9)[0, 2])  # ends the first row early
    caches, rows = model.inner.transformer.make_caches(3, 45), [list(row) for row in prompts(3, 5)]
    for new, added in ((9, 2), (4, 7), (1, 1), (3, 0)):
        lengths = [len(row) for row in rows]
        text = np.asarray([row + [0] * (max(lengths) - len(row)) for row in rows], np.int32)
        options: dict[str, Any] = {"eos_token_id": end} if is_ragged else {}
        options |= {"lengths": lengths} if min(lengths) < max(lengths) else {}
        found = go_on(name, caches, text, new, **options)
        assert np.array_equal(found, model.generate(text, new, **options))
        for row, given, whole in zip(rows, lengths, found.tolist(), strict=True):
            made = whole[given : given + new]
            row += made[: made.index(end) + 1] if is_ragged and end in made else made
        held = np.broadcast_to(caches[0].length if caches[0].lengths is None else np.asarray(caches[0].lengths), 3)
        assert held.tolist() == [len(row) - 1 for row in rows]
        rows = [row + prompts(1, added)[0].tolist() for row in rows]
    assert is_ragged == (len(set(map(len, rows))) > 1)
    before = np.asarray(held).tolist()
    text = np.zeros((3, 40), np.int32)
    for given, number, message in (
        (text[:2], 1, "caches must have the rows of tokens, 2, got 3"),
        (text[:, : min(before)], 1, "tokens must go on after those that caches hold"),
        (text, 99, "caches must have room for 138 tokens, got max_length"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            go_on(name, caches, given, number)
    assert np.array_equal(np.broadcast_to(before, 3), held)
    with pytest.raises(TypeError, match="^caches must be a list of one a block"):
        go_on(name, caches[0], text, 1)
    assert go_on(name, caches, text[:, :3], 0).shape == (3, 3)
