"""Decoders with code of their own: its logits of small models, in every framework.

``decoders.json`` holds, for each model, which code ran, its config, the names and shapes of its tensors, the float64
logits of some tokens, and the error of that code's float32 logits. Weights are drawn from a seed and their names.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import alibi_core
from alibi_core.backend.models import Checkpoint
from tests.support.checkpoints import drawn, load, run, write
from tests.support.cli import main
from tests.support.frameworks import NAMES, few_in_jax

pytest.importorskip("safetensors")

RECORD = json.loads(Path(__file__).with_name("decoders.json").read_text())
MODELS, TOKENS, POSITIONS = RECORD["models"], np.asarray(RECORD["tokens"], np.int32), RECORD["positions"]


def tensors_of(model: str) -> dict[str, np.ndarray]:
    tensors: dict[str, np.ndarray] = {}
    for name, stored in MODELS[model]["tensors"].items():
        if isinstance(stored, list):
            tensors[name] = drawn(name, tuple(stored), RECORD["seed"])
        elif "values" in stored:
            tensors[name] = np.asarray(stored["values"], np.float32)
        elif "dtype" in stored:
            tensors[name] = np.ones(stored["shape"], stored["dtype"])
    return tensors


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function from the name of a model to its checkpoint; that of Baichuan2 has two files."""

    @functools.cache
    def get(model: str) -> Path:
        directory = tmp_path_factory.mktemp("decoder")
        return write(directory, MODELS[model]["config"], tensors_of(model), 1 + (model == "baichuan2"))

    return get


@pytest.mark.parametrize(("backend", "name"), few_in_jax(NAMES, MODELS, "baichuan2", "jais", "mpt, groups and gates"))
def test_logits_are_the_originals(saved: Any, name: str, backend: str) -> None:
    found = run(backend, load(backend, saved(name)), TOKENS)[:, POSITIONS]
    assert np.abs(found - np.asarray(MODELS[name]["logits"])).max() <= 4 * MODELS[name]["error"]


# --- What the core alone decides -------------------------------------------------------------------------------------


def opened(directory: Path, model: str, tensors: dict[str, Any] | None = None, **config: Any) -> Checkpoint:
    """Return a model's checkpoint with other entries of its config or other tensors; None removes one."""
    entries = MODELS[model]["config"] | config
    held = tensors_of(model) | (tensors or {})
    held = {name: tensor for name, tensor in held.items() if tensor is not None}
    write(directory, {name: entry for name, entry in entries.items() if entry is not None}, held)
    return Checkpoint.open(directory)


def test_the_page_lists_every_family() -> None:
    page = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text()
    assert all(f"`{entry['config']['model_type']}`" in page for entry in MODELS.values())


@pytest.mark.parametrize(("factor", "words"), [(1.0, "canonical, from 0.5"), (4.0, "of its config, from 0.125")])
def test_a_stretched_jais_is_explained(
    factor: float, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    opened(tmp_path, "jais", alibi_scaling={"type": "linear", "factor": factor})
    assert main(["explain", str(tmp_path)]) == 0
    assert f"slopes  {words}" in capsys.readouterr().out


def test_a_btlm_is_a_jais_and_the_first_jais_says_its_scales_in_other_words(tmp_path: Path) -> None:
    jais = opened(tmp_path, "jais")
    btlm = opened(tmp_path, "jais", model_type="btlm")
    assert (btlm.config, btlm.family.name) == (jais.config, "btlm")
    other = {"width_scale": 0.25 * 2.2, "embeddings_scale": 3.0, "scale_qk_dot_by_d": True}
    first = opened(tmp_path, "jais", **other, **{name: None for name in MODELS["jais"]["config"] if "mup" in name})
    assert first.config == jais.config
    np.testing.assert_equal(dict(first.parameters()), dict(jais.parameters()))


def test_stored_slopes_must_be_those_of_the_rule(tmp_path: Path) -> None:
    name, rule = "transformer.relative_pe.slopes", alibi_core.slopes(6, dtype=np.float64)
    rounded = {name: (rule * (1 + 2.0**-10)).astype(np.float16)[:, None]}
    np.testing.assert_allclose(opened(tmp_path, "jais", rounded).config.slopes, rule, rtol=2.0**-50)
    with pytest.raises(ValueError, match=rf"^{name} in .* must hold the canonical slopes of 6 heads"):
        opened(tmp_path, "jais", {name: (rule * 1.01).astype(np.float32)[:, None]})


def test_a_head_of_unit_rows_is_baichuan2s(tmp_path: Path) -> None:
    halves = {"lm_head.weight": tensors_of("baichuan")["lm_head.weight"].astype(np.float16)}
    heads = {
        second: dict(opened(tmp_path, "baichuan", halves, **entry).parameters())["head.weight"]
        for second, entry in ((False, {}), (True, {"z_loss_weight": 0}))
    }
    assert heads[False].dtype == np.float16
    stored = heads[False].astype(np.float64)
    np.testing.assert_allclose(heads[True], stored / np.linalg.norm(stored, axis=1, keepdims=True), rtol=1e-12)


ROTARY = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4)}


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        ("baichuan", {"tensors": ROTARY}, r"baichuan language model .* none missing and \[.*inv_freq'\] unknown"),
        ("baichuan", {"max_position_embeddings": 4096}, "^max_position_embeddings in .* must be absent, .*rotary"),
        ("baichuan", {"hidden_act": "swiglu"}, "^hidden_act in .* must be one of 'gelu', .*, got 'swiglu'"),
        ("baichuan", {"tie_word_embeddings": True}, "^lm_head.weight in .* must equal model.embed_tokens.weight"),
        ("baichuan2", {"tie_word_embeddings": True}, "^tie_word_embeddings in .* must be false, got True; .*Baichuan2"),
        ("jais", {"position_embedding_type": "learned"}, "^position_embedding_type in .* must be 'alibi'"),
        ("jais", {"scale_attn_by_inverse_layer_idx": True}, "^scale_attn_by_inverse_layer_idx in .* must be false"),
        ("jais", {"alibi_scaling": {"train_seq_len": 64}}, "^train_seq_len in alibi_scaling in .* must be null"),
        ("jais", {"activation_function": "gelu"}, r"got none missing and \['transformer.h.0.mlp.c_fc2.bias'"),
        ("mpt, groups and gates", {"ffn_config": {"ffn_type": "mb_moe"}}, "^ffn_type in ffn_config in .* 'mptglu'"),
        ("mpt, groups and gates", {"attention_bias": True}, "^attention_bias in .* must be False with no_bias True"),
        ("mpt, groups and gates", {"head_dim": 16}, "^head_dim in .* must be null, got 16"),
        ("mpt, groups and gates", {"attn_config": {"attn_temperature_tuning": {"attn_scale": 1}}}, "^attn_scale in .*"),
        ("mpt, window and biases", {"no_bias": True, "attention_bias": None}, r"missing and \[.*bias'.* unknown"),
    ],
)  # fmt: skip
def test_what_no_language_model_here_has_is_refused(
    tmp_path: Path, model: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        opened(tmp_path, model, **changes)
