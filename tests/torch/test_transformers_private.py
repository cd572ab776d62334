"""Releases of transformers to come: each private name that this library uses is removed or changed in turn."""

from __future__ import annotations

import copy
import importlib
import re
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import alibi_torch.transformers  # noqa: E402
from tests.torch.test_transformers import FAMILIES, logits_of, model_of, tokens_of  # noqa: E402

# A name, and the families and functions that a transformers without it may refuse.
NAMES: dict[str, set[str]] = {
    "utils.output_capturing": set(),
    "utils.output_capturing:_active_collector": set(),
    "utils.import_utils:is_tracing": set(),
    "masking_utils:bidirectional_mask_function": set(),
    "masking_utils:causal_mask_function": {"with_alibi"},
    "masking_utils:sdpa_mask": {"with_alibi"},
    "cache_utils:DynamicLayer": {*FAMILIES},
    "cache_utils:StaticLayer": {*FAMILIES},
    "models.falcon.modeling_falcon": {"falcon"},
    "models.bloom.modeling_bloom": {"bloom"},
    "models.mpt.modeling_mpt": {"mpt"},
    "models.bloom.modeling_bloom:build_alibi_tensor": {"bloom"},
    "models.mpt.modeling_mpt:build_mpt_alibi_tensor": {"mpt"},
    "models.falcon.modeling_falcon:build_alibi_tensor": {"falcon"},
    "models.bloom.modeling_bloom:BloomPreTrainedModel": {"bloom"},
    "models.mpt.modeling_mpt:MptAttention": {"mpt"},
}
PREFIX = "alibi_torch.transformers"


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Undo what an import registers."""
    interface = importlib.import_module(f"{PREFIX}._interface")
    before = {name: module for name, module in sys.modules.items() if name.startswith(PREFIX)}
    monkeypatch.setattr(alibi_torch, "transformers", importlib.import_module(PREFIX))
    monkeypatch.setattr(transformers.PreTrainedConfig, "to_dict", transformers.PreTrainedConfig.to_dict)
    yield
    forget()
    sys.modules.update(before)
    transformers.AttentionInterface.register("alibi", interface.alibi_attention)
    transformers.AttentionMaskInterface.register("alibi", interface.alibi_mask)


@pytest.fixture
def models() -> dict[str, Any]:
    config = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    bert = transformers.BertModel(transformers.BertConfig(**config, intermediate_size=32)).eval()
    return {name: model_of(name) for name in FAMILIES} | {"with_alibi": bert}


def hide(monkeypatch: pytest.MonkeyPatch, place: str, name: str) -> None:
    """Hide a module, or a name in it, from those who import it from now on; transformers itself still has it."""
    module, (parent, _, last) = sys.modules[place], place.rpartition(".")
    without = types.ModuleType(place)
    vars(without).update({key: x for key, x in vars(module).items() if key != name})
    monkeypatch.setitem(sys.modules, place, without if name else None)
    if name:
        monkeypatch.setattr(importlib.import_module(parent), last, without)
    else:
        monkeypatch.delattr(importlib.import_module(parent), last, raising=False)


def forget() -> None:
    """Let the next import of the package be its first."""
    for name in [x for x in sys.modules if x.startswith(PREFIX)]:
        del sys.modules[name]


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_name_is_refused_in_words_where_it_is_needed(
    name: str, models: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, place, refused = tokens_of(2, 20), "transformers." + name.partition(":")[0], NAMES[name]
    importlib.import_module(place)
    expected = {family: logits_of(models[family], tokens) for family in FAMILIES}
    version, bert = re.escape(transformers.__version__), models["with_alibi"]
    right = alibi_torch.transformers.with_alibi(copy.deepcopy(bert))(tokens % 50, output_attentions=True)
    with monkeypatch.context() as patch:
        hide(patch, place, name.partition(":")[2])
        forget()
        ours = importlib.import_module(PREFIX)
        for family in {*FAMILIES} - refused:
            assert (logits_of(ours.accelerate(models[family]), tokens) - expected[family]).abs().max() < 1e-4
            assert ours.paths(models[family]) == {"alibi_torch": 1}
        if "with_alibi" not in refused:
            found = ours.with_alibi(bert)(tokens % 50, output_attentions=True)
            torch.testing.assert_close((found[0], found.attentions), (right[0], right.attentions))
        for family in refused:
            with pytest.raises(
                ValueError, match=f"with PyTorch .* transformers {version}|must have what .*, got {version}"
            ):
                (ours.with_alibi if family == "with_alibi" else ours.accelerate)(models[family])
            assert not [x for x in models[family].modules() for key in vars(x) if key.startswith("alibi")]


def test_a_layer_without_its_factor_is_refused_in_words() -> None:
    model = model_of("bloom")
    del model.transformer.h[0].self_attention.beta
    with pytest.raises(ValueError, match=f"AttributeError .*beta.* transformers {re.escape(transformers.__version__)}"):
        alibi_torch.transformers.accelerate(model, prove=False)
