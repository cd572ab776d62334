"""Arguments by other libraries' names: every function says what they are called, and its signature stays its own."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import alibi_core
from alibi_core._arrays import HINTS
from tests.support.frameworks import FRAMEWORK, NAMES
from tests.support.layers import make_layer
from tests.support.models import make_module

ASKED = (
    "key_padding_mask",
    "attn_mask",
    "attention_mask",
    "need_weights",
    "causal",
    "dropout_p",
    "softmax_scale",
    "bias",
)


def functions_of(name: str) -> dict[str, Callable[..., Any]]:
    """Return what people hand such arguments to, each complete but for them."""
    package, framework = importlib.import_module(f"alibi_{name}"), FRAMEWORK[name]
    tensor, layer = framework.array(np.zeros((1, 2, 2, 4))), make_layer(name, embed_dim=8, num_heads=2)
    config = package.AlibiConfig(num_layers=1, embed_dim=8, num_heads=2)
    model, tokens = make_module(name, "AlibiLanguageModel", config, 5), framework.array(np.zeros((1, 2), np.int32))
    return {
        "attention": lambda **options: package.attention(tensor, tensor, tensor, **options),
        "explain": lambda **options: package.explain(tensor, tensor, tensor, **options),
        "layer": lambda **options: layer(framework.array(np.zeros((1, 2, 8))), **options),
        "transformer": lambda **options: model.transformer(framework.array(np.zeros((1, 2, 8))), **options),
        "model": lambda **options: model(tokens, **options),
        "generate": lambda **options: model.generate(tokens, 1, **options),
        "cache": lambda **options: layer.make_cache(1, 4).attend(tensor, **options),
        "new layer": lambda **options: make_module(name, "AlibiAttention", 8, 2, **options),
        "bias": lambda **options: alibi_core.bias(2, 3, **options),
        "core": lambda **options: alibi_core.attention(tensor, tensor, tensor, **options),
    }


@pytest.mark.parametrize("name", NAMES)
def test_an_argument_by_another_name_is_told_its_own(name: str) -> None:
    for place, function in functions_of(name).items():
        for keyword in ASKED:
            if (place, keyword) == ("new layer", "bias"):
                continue
            hint = HINTS[keyword].how
            if (place, keyword) == ("generate", "attention_mask"):
                hint = "those of another length need a call of their own"
            with pytest.raises(TypeError, match=rf"\(\) got an unexpected keyword argument '{keyword}'; ") as refused:
                function(**{keyword: None})
            assert str(refused.value).endswith(hint), place
        with pytest.raises(TypeError, match="got an unexpected keyword argument 'wings'$"):
            function(wings=2)
    for given, ours in (("n_layer", "num_layers"), ("n_embd", "embed_dim"), ("num_attention_heads", "num_heads")):
        with pytest.raises(
            TypeError, match=rf"^AlibiConfig\(\) got an unexpected keyword argument '{given}'; give {ours}$"
        ):
            importlib.import_module(f"alibi_{name}").AlibiConfig(**{given: 4})
    for function, given, hint in (
        (alibi_core.bias, "num_heads", "give slopes, which may be the number of heads"),
        (alibi_core.bias, "seq_len", "give q_len, and kv_len"),
        (alibi_core.slopes, "n_heads", "give num_heads"),
        (importlib.import_module(f"alibi_{name}").AlibiBias, "n_heads", "give num_heads"),
    ):
        with pytest.raises(TypeError, match=rf"'{given}'; {hint}"):
            function(**{given: 8})
    with pytest.raises(TypeError, match=r"'labels'; give tokens, and the labels to a loss of the logits"):
        functions_of(name)["model"](labels=None)
    with pytest.raises(TypeError, match=r"'attn_mask'; attention takes it: give mask, booleans, True where"):
        functions_of(name)["bias"](attn_mask=None)


@pytest.mark.parametrize("name", NAMES)
def test_a_misspelt_argument_is_told_the_nearest(name: str) -> None:
    functions = functions_of(name)
    for place, given, nearest in (
        ("attention", "is_casual", "is_causal"),
        ("explain", "slope", "slopes"),
        ("layer", "segment_id", "segment_ids"),
        ("cache", "masks", "mask"),
        ("generate", "top_ks", "top_k"),
        ("new layer", "num_head", "num_heads"),
    ):
        with pytest.raises(
            TypeError, match=rf"unexpected keyword argument '{given}'; give {nearest}, if that is meant$"
        ):
            functions[place](**{given: None})


@pytest.mark.parametrize("name", NAMES)
def test_an_argument_of_another_place_is_told_its_own(name: str) -> None:
    functions = functions_of(name)
    for place, given, told in (
        ("layer", "is_causal", "give it to the layer, or to the model's AlibiConfig, when that is made"),
        ("layer", "key", "give context, of which keys and values are made"),
        ("cache", "key", "give key and value to append, before"),
        ("cache", "is_causal", "attention to a cache is causal"),
        ("attention", "cache", "AlibiAttention takes it: give cache, from make_cache"),
        ("attention", "lengths", "give mask=(positions < lengths[:, None])[:, None, None, :]"),
        ("attention", "num_heads", "give slopes, which may be the number of heads"),
        ("attention", "bidirectional", "give is_causal=False to see keys on both sides"),
    ):
        with pytest.raises(TypeError, match=re.escape(f"unexpected keyword argument '{given}'; {told}")):
            functions[place](**{given: None})


@pytest.mark.parametrize("name", NAMES)
def test_arguments_without_their_names_are_told_how_to_be_given(name: str) -> None:
    """As other libraries' attention takes a mask, and their layers query, key and value."""
    package, framework = importlib.import_module(f"alibi_{name}"), FRAMEWORK[name]
    tensor, layer = framework.array(np.zeros((1, 2, 2, 4))), make_layer(name, embed_dim=8, num_heads=2)
    x = framework.array(np.zeros((1, 2, 8)))
    for call, told in (
        (lambda: package.attention(tensor, tensor, tensor, 2, None), r"after slopes by name, got 5 without; .* mask,"),
        (lambda: layer(x, x, x), "after x by name, got 3 without; .* keys and values are made of x, or of context$"),
        (lambda: layer.make_cache(1, 4).attend(tensor, tensor, tensor), ".* give key and value to append, before$"),
        (lambda: alibi_core.slopes(8, "linear"), "after num_heads by name, got 2 without; these are scheme, bias_max,"),
    ):
        with pytest.raises(TypeError, match=rf"\(\) must get arguments {told}"):
            call()
    mask = framework.array(np.ones((2, 2), bool))
    with pytest.raises(
        TypeError, match=r"^slopes must have a real floating dtype, got .*bool.*; a mask is given as mask="
    ):
        package.attention(tensor, tensor, tensor, mask)


@pytest.mark.parametrize("name", NAMES)
def test_signatures_are_honest_and_hints_name_what_there_is(name: str) -> None:
    package = importlib.import_module(f"alibi_{name}")
    model, layer = package.AlibiLanguageModel, package.AlibiAttention
    functions = [
        package.attention,
        model.generate,
        layer.__init__,
        layer.forward if name == "torch" else layer.__call__,
    ]
    known = set()
    for function in functions:
        parameters = inspect.signature(function).parameters
        assert all(x.kind not in (x.VAR_KEYWORD, x.VAR_POSITIONAL) for x in parameters.values())
        known |= set(parameters)
    known |= set(inspect.signature(package.AlibiConfig).parameters) | set(inspect.signature(model.__init__).parameters)
    ours = {hint.ours for hint in HINTS.values()} - {"batch_first"}
    assert ours - known == ({"dropout_key"} if name == "torch" else set())
