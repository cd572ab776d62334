"""mlx-lm runs a decoder that this library loaded, with its caches."""

from __future__ import annotations

import json
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.contracts.test_decoders import MODELS, TOKENS, tensors_of, write

mx = pytest.importorskip("mlx.core")
mlx_lm = pytest.importorskip("mlx_lm")

from mlx_lm.tokenizer_utils import TokenizerWrapper  # noqa: E402

import alibi_mlx  # noqa: E402

PROMPT, NEW_TOKENS = TOKENS[0, :11].tolist(), 6


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    name = "baichuan2"
    return write(tmp_path_factory.mktemp("decoder"), MODELS[name]["config"], tensors_of(name))


@pytest.fixture(scope="module")
def model(directory: Path) -> Any:
    return alibi_mlx.load_checkpoint(directory)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """Return a tokenizer of words ``w0``, ``w1`` and so on, without a token that ends a text."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{index}": index for index in range(37)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, clean_up_tokenization_spaces=False)


@pytest.fixture(scope="module")
def expected(model: Any) -> list[int]:
    """Return the tokens that follow the prompt."""
    return model.generate(mx.array([PROMPT]), NEW_TOKENS)[0, len(PROMPT) :].tolist()


def streamed(model: Any, tokenizer: Any, prompt: list[int], **options: Any) -> list[int]:
    responses = mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens=NEW_TOKENS, **options)
    return [response.token for response in responses]


def words(tokens: list[int]) -> str:
    return " ".join(f"w{token}" for token in tokens)


def test_text_is_that_of_the_model(model: Any, tokenizer: Any, expected: list[int]) -> None:
    assert mlx_lm.generate(model, tokenizer, words(PROMPT), max_tokens=NEW_TOKENS) == words(expected)
    assert streamed(model, tokenizer, PROMPT) == expected
    assert streamed(model, tokenizer, PROMPT, prefill_step_size=4) == expected
    assert streamed(model, tokenizer, PROMPT, draft_model=model) == expected


def test_prompt_caches_are_kept_trimmed_saved_and_loaded(
    model: Any, tokenizer: Any, expected: list[int], tmp_path: Path
) -> None:
    from mlx_lm.models import cache as caching

    caches = caching.make_prompt_cache(model)
    assert {type(cache) for cache in caches} == {alibi_mlx.KVCache}
    model(mx.array([PROMPT[:8]]), cache=caches)
    caching.save_prompt_cache(str(tmp_path / "prompt.safetensors"), [alibi_mlx.KVCache(), *caches])
    assert streamed(model, tokenizer, PROMPT[8:], prompt_cache=caches) == expected
    caching.trim_prompt_cache(caches, caches[0].offset - 8)
    assert streamed(model, tokenizer, PROMPT[8:], prompt_cache=caches) == expected
    empty, *loaded = caching.load_prompt_cache(str(tmp_path / "prompt.safetensors"))
    assert empty.empty()
    assert streamed(model, tokenizer, PROMPT[8:], prompt_cache=loaded) == expected


def test_texts_of_a_batch_are_those_of_each_alone(model: Any, tokenizer: Any) -> None:
    texts, counts = [TOKENS[0, :n].tolist() for n in (11, 3, 1, 7)], [6, 2, 6, 1]

    def follow(texts: list[list[int]], counts: list[int]) -> list[list[int]]:
        pairs = zip(texts, counts, strict=True)
        return [model.generate(mx.array([text]), count)[0, len(text) :].tolist() for text, count in pairs]

    expected = follow(texts, counts)
    wrapped = TokenizerWrapper(tokenizer)
    found = mlx_lm.batch_generate(model, wrapped, texts, max_tokens=counts, return_prompt_caches=True)
    assert found.texts == [words(x) for x in expected]
    whole, more = [text + new for text, new in zip(texts, expected, strict=True)], [[5, 6], [7], [1], [3, 4, 2]]
    found = mlx_lm.batch_generate(model, wrapped, more, max_tokens=[4] * 4, prompt_caches=found.caches)
    assert found.texts == [words(x) for x in follow([x + y for x, y in zip(whole, more, strict=True)], [4] * 4)]


def test_a_mask_beside_the_cache_of_a_batch_hides_what_either_hides(model: Any) -> None:
    from mlx_lm.models.cache import BatchKVCache

    layer = model.transformer.blocks[0].attention
    x = mx.random.normal((2, 5, layer.shape.embed_dim), key=mx.random.key(0))
    mask = mx.arange(5) != 3
    cache = BatchKVCache([0, 2])
    found = layer(x, cache=cache, mask=mask)
    same = layer(x, cache=BatchKVCache([0, 2]), mask=mx.broadcast_to(mask, (2, 5)))
    assert mx.array_equal(same, found)
    np.testing.assert_allclose(found[:1], layer(x[:1], mask=mask), rtol=0, atol=1e-6)
    np.testing.assert_allclose(found[1:, 2:], layer(x[1:, 2:], mask=mask[2:]), rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match="mask must broadcast"):
        layer(x, cache=cache, mask=mx.ones((7,)) > 0)
    assert cache.size() == 5


@pytest.mark.parametrize("use_dora", [False, True])
def test_a_model_generates_with_adapters_on_its_embedding_too(
    directory: Path, expected: list[int], use_dora: bool
) -> None:
    from mlx_lm.tuner.utils import linear_to_lora_layers

    model = alibi_mlx.load_checkpoint(directory)
    adapters = {"rank": 2, "scale": 1.0, "dropout": 0.0, "keys": ["embedding", "attention.q_proj"]}
    linear_to_lora_layers(model, 1, adapters, use_dora=use_dora)  # new adapters change nothing
    assert model.generate(mx.array([PROMPT]), NEW_TOKENS)[0, len(PROMPT) :].tolist() == expected


def test_its_server_serves_the_model_and_keeps_prompts(
    model: Any, tokenizer: Any, expected: list[int], directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlx_lm import server

    providers: list[Any] = []
    monkeypatch.setattr(server, "load", lambda path, **_: (model, TokenizerWrapper(tokenizer), {}))
    monkeypatch.setattr(server, "run", lambda host, port, provider: providers.append(provider))
    monkeypatch.setattr("sys.argv", ["mlx_lm.server", "--model", str(directory), "--log-level", "ERROR"])
    server.main()
    generator = server.ResponseGenerator(providers[0], server.LRUPromptCache(10))
    service = ThreadingHTTPServer(("127.0.0.1", 0), lambda *args: server.APIHandler(generator, *args))
    thread = threading.Thread(target=service.serve_forever)
    thread.start()

    def answer(prompt: list[int]) -> Any:
        asked = json.dumps({"prompt": words(prompt), "max_tokens": NEW_TOKENS, "temperature": 0}).encode()
        url = f"http://127.0.0.1:{service.server_port}/v1/completions"
        with urllib.request.urlopen(urllib.request.Request(url, asked), timeout=60) as response:
            return json.load(response)

    try:
        for cached in (0, len(PROMPT) - 1):
            answered = answer(PROMPT)
            assert answered["choices"][0]["text"] == words(expected)
            assert answered["usage"]["prompt_tokens_details"]["cached_tokens"] == cached
        prompts = [TOKENS[1, :n].tolist() for n in (4, 9, 2)]
        with ThreadPoolExecutor(len(prompts)) as clients:  # requests that come together may be one batch
            found = [x["choices"][0]["text"] for x in clients.map(answer, prompts)]
        assert found == [words(model.generate(mx.array([x]), NEW_TOKENS)[0, len(x) :].tolist()) for x in prompts]
    finally:
        service.shutdown()
        thread.join()
        service.server_close()
        generator.stop_and_join()


def test_one_cache_a_block_by_either_name_but_not_both(model: Any) -> None:
    tokens = mx.array([PROMPT])
    logits = [model(tokens, **{name: model.make_cache()}) for name in ("cache", "caches")]
    assert np.array_equal(*map(np.asarray, logits))
    with pytest.raises(ValueError, match="^cache must be None where caches are given"):
        model(tokens, caches=model.make_cache(), cache=model.make_cache())
    with pytest.raises(TypeError, match=r"^caches must be a list of one a block \(2\), got KVCache"):
        model(tokens, cache=alibi_mlx.KVCache())
