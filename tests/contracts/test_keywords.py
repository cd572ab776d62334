"""Arguments by other libraries' names: errors say what they are called here, and signatures stay their own."""

from __future__ import annotations

import importlib
import inspect
import re

import numpy as np
import pytest

import alibi_core
from alibi_core.backend.models import AlibiConfig
from tests.support.frameworks import FRAMEWORK, NAMES
from tests.support.layers import make_layer


@pytest.mark.parametrize("name", NAMES)
def test_a_foreign_name_is_told_the_name_here(name: str) -> None:
    package, framework = importlib.import_module(f"alibi_{name}"), FRAMEWORK[name]
    tensor, x = framework.array(np.zeros((1, 2, 2, 4))), framework.array(np.zeros((1, 2, 8)))
    layer = make_layer(name, embed_dim=8, num_heads=2)
    for function, given, told in (
        (lambda **options: package.attention(tensor, tensor, tensor, **options), "softmax_scale", "give scale"),
        (lambda **options: package.explain(tensor, tensor, tensor, **options), "causal", "give is_causal"),
        (lambda **options: layer(x, **options), "attention_mask", "give mask, which takes it as it is, 1 for text"),
        (lambda **options: layer.make_cache(1, 4).attend(tensor, **options), "sliding_window", "give window_size"),
        (lambda **options: package.AlibiAttention(8, **options), "heads", "give num_heads"),
        (AlibiConfig, "d_model", "give embed_dim"),
        (AlibiConfig, "intermediate_size", "give feed_forward_dim"),
        (alibi_core.slopes, "n_heads", "give num_heads"),
        (lambda **options: alibi_core.bias(2, **options), "query_length", "give q_len"),
        (alibi_core.bias, "num_heads", "give slopes, which may be the number of heads"),
        (lambda **options: package.attention(tensor, tensor, tensor, **options), "heads", "give slopes, which may be"),
        (alibi_core.bias, "attn_mask", None),  # which is no argument of bias under any name
        (alibi_core.bias, "wings", None),
    ):
        end = "$" if told is None else re.escape(f"; {told}")
        with pytest.raises(TypeError, match=rf"got an unexpected keyword argument '{given}'{end}"):
            function(**{given: 1})
    with pytest.raises(TypeError, match=r"^AlibiAttention\(\) takes x by position; name the others: mask, segment_ids"):
        layer(x, x, x)
    kinds = {x.kind for x in inspect.signature(package.attention).parameters.values()}
    assert not kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
