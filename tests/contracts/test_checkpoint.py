"""Checkpoints of BLOOM, MPT and Falcon: the logits of ``transformers``' own models, in every framework."""

from __future__ import annotations

import functools
import importlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import alibi_core
from alibi_core.backend.models import Checkpoint
from tests.support.checkpoints import drawn, load, run
from tests.support.frameworks import FRAMEWORK, NAMES, NAMES_SLOW_IN_JAX, few_in_jax

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
safetensors_torch = pytest.importorskip("safetensors.torch")

VOCAB_SIZE, LENGTH = 37, 23

BLOOM = {"hidden_size": 48, "n_head": 6, "n_layer": 2}
MPT = {"d_model": 48, "n_heads": 6, "n_layers": 2, "max_seq_len": 64}
FALCON = {"hidden_size": 48, "num_attention_heads": 6, "num_hidden_layers": 2, "alibi": True}
GROUPED = FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2}

# Each option that changes the result, at least once.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "bloom": ("bloom", BLOOM),
    "bloom, residual after norm": ("bloom", BLOOM | {"apply_residual_connection_post_layernorm": True}),
    "bloom, own head": ("bloom", BLOOM | {"tie_word_embeddings": False, "layer_norm_epsilon": 0.1}),
    "mpt": ("mpt", MPT),
    "mpt, clipped and scaled": ("mpt", MPT | {"n_heads": 4, "attn_config": {"clip_qkv": 1.5, "softmax_scale": 0.5}}),
    "falcon, sequential": ("falcon", FALCON | {"multi_query": False, "parallel_attn": False, "bias": True}),
    "falcon, one key/value head": ("falcon", FALCON | {"ffn_hidden_size": 56, "activation": "gelu_pytorch_tanh"}),
    "falcon, groups": ("falcon", GROUPED),
    "falcon, groups, one norm": ("falcon", GROUPED | {"num_ln_in_parallel_attn": 1, "num_attention_heads": 4}),
}
FAMILIES = ["bloom", "mpt", "falcon, sequential"]


def make(family: str, options: dict[str, Any]) -> Any:
    """Return a model all of whose parameters are random, norms and biases too."""
    name = family.capitalize()
    entries = {"vocab_size": VOCAB_SIZE, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    entries["attn_implementation"] = "sdpa" if family == "falcon" else "eager"
    config = getattr(transformers, f"{name}Config")(**entries, **options)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    for name, parameter in model.named_parameters():
        parameter.data = torch.from_numpy(drawn(name, tuple(parameter.shape)))
    return model


def edited(directory: Path, target: Path, tensors: dict[str, Any] | None = None, **config: Any) -> Path:
    """Return a copy of a checkpoint with other tensors or entries of the config; None removes an entry."""
    target.mkdir(exist_ok=True)
    entries = json.loads((directory / "config.json").read_text())
    for name, value in config.items():
        entries[name] = entries[name] | value if isinstance(value, dict) else value
    entries = {name: value for name, value in entries.items() if name not in config or config[name] is not None}
    (target / "config.json").write_text(json.dumps(entries))
    held = safetensors_torch.load_file(directory / "model.safetensors") | (tensors or {})
    held = {name: tensor for name, tensor in held.items() if tensor is not None}
    safetensors_torch.save_file(held, target / "model.safetensors", {"format": "pt"})
    return target


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function from the name of a variant to its checkpoint's directory and its model."""

    @functools.cache
    def get(variant: str) -> tuple[Path, Any]:
        directory, model = tmp_path_factory.mktemp("checkpoint"), make(*VARIANTS[variant])
        model.save_pretrained(directory)
        return directory, model

    return get


TOKENS = np.random.default_rng(3).integers(0, VOCAB_SIZE, (2, LENGTH)).astype(np.int32)


def exact_bias(mask: Any, num_heads: int, dtype: Any) -> Any:
    """Return the bias of Falcon's own function, but not rounded."""
    positions = ((mask.cumsum(-1) - 1) * mask)[:, None, :].double()
    bias = torch.from_numpy(alibi_core.slopes(num_heads, dtype=np.float64))[:, None] * positions
    return bias.reshape(-1, 1, mask.shape[1]).to(dtype)


@pytest.fixture
def exact_falcon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have Falcon's model in transformers add the exact bias."""
    module = importlib.import_module("transformers.models.falcon.modeling_falcon")
    monkeypatch.setattr(module, "build_alibi_tensor", exact_bias)


def expected(model: Any, ids: np.ndarray) -> tuple[np.ndarray, float]:
    """Return the model's logits in float64, and four times the error of its logits in float32."""
    given, logits = torch.from_numpy(ids).long(), {}
    with torch.no_grad():
        for dtype in (torch.float64, torch.float32):
            logits[dtype] = model.to(dtype)(given).logits.double().numpy()
    exact, rounded = logits.values()
    assert np.ptp(exact, axis=-1).min() > 1
    return exact, 4 * np.abs(exact - rounded).max()


# --- The same logits -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("backend", "variant"), few_in_jax(NAMES, VARIANTS, *FAMILIES))
@pytest.mark.usefixtures("exact_falcon")
def test_logits_are_those_of_transformers(saved: Any, variant: str, backend: str) -> None:
    directory, model = saved(variant)
    logits, budget = expected(model, TOKENS)
    for options in ({}, {"dtype": torch.float64}) if backend == "torch" else ({},):
        loaded = load(backend, directory, **options)
        assert not options or {x.dtype for x in loaded.parameters()} == {torch.float64}
        assert np.abs(run(backend, loaded, TOKENS) - logits).max() <= budget


@pytest.mark.parametrize("variant", FAMILIES)
@pytest.mark.usefixtures("exact_falcon")
def test_text_after_padding_that_is_masked_is_read_as_text_alone(saved: Any, variant: str) -> None:
    directory, model = saved(variant)
    logits, budget = expected(model, TOKENS[:, 9:])
    actual = run("torch", load("torch", directory), TOKENS, mask=np.arange(LENGTH) >= 9)
    assert np.abs(actual[:, 9:] - logits).max() <= budget


def test_mpts_bias_max_is_the_configs(saved: Any, tmp_path: Path) -> None:
    directory = edited(saved("mpt")[0], tmp_path, attn_config={"alibi_bias_max": 16})
    slopes = load("torch", directory).transformer.blocks[0].attention.slopes
    assert torch.equal(slopes, alibi_core.slopes(6, bias_max=16, contract="mpt", xp=torch))


# --- Files ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", NAMES_SLOW_IN_JAX)
def test_shards_of_bfloat16_are_read(saved: Any, tmp_path: Path, backend: str) -> None:
    rounded = transformers.BloomForCausalLM.from_pretrained(saved("bloom")[0], dtype=torch.bfloat16).eval()
    rounded.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    logits, budget = expected(rounded, TOKENS)
    dtype = FRAMEWORK[backend].xp.float32
    assert np.abs(run(backend, load(backend, tmp_path, dtype=dtype), TOKENS) - logits).max() <= budget
    with torch.no_grad():
        own = rounded.to(torch.bfloat16)(torch.from_numpy(TOKENS).long()).logits.double().numpy()
    result = load(backend, tmp_path)(FRAMEWORK[backend].array(TOKENS))  # in the dtype of the file
    assert "bfloat16" in str(result.dtype)
    assert np.abs(FRAMEWORK[backend].numpy(result) - logits).max() <= 2 * np.abs(own - logits).max()


def test_a_checkpoint_without_a_head_or_with_a_copy_of_it_is_the_same(saved: Any, tmp_path: Path) -> None:
    directory, model = saved("bloom")
    model.transformer.save_pretrained(tmp_path / "bare")
    head = {"lm_head.weight": model.float().transformer.word_embeddings.weight.detach().clone()}
    copied = edited(directory, tmp_path / "copied", tensors=head)
    models = [load("torch", path).state_dict() for path in (directory, tmp_path / "bare", copied)]
    for name, tensor in models[0].items():
        assert all(torch.equal(tensor, other[name]) for other in models[1:])


@pytest.mark.parametrize(
    ("variant", "absent", "old"),
    [
        ("bloom", ["hidden_size", "n_head"], {"n_embed": 48, "num_attention_heads": 6}),
        ("bloom", ["n_layer", "layer_norm_epsilon", "tie_word_embeddings"], {"num_hidden_layers": 2}),
        ("falcon, groups", ["ffn_hidden_size", "num_ln_in_parallel_attn", "bias", "activation"], {}),
        ("falcon, sequential", ["num_attention_heads", "num_hidden_layers"], {"n_head": 6, "n_layer": 2}),
        ("mpt", ["attn_config", "layer_norm_epsilon", "logit_scale"], {}),
    ],
)
def test_configs_of_other_versions_say_the_same(
    saved: Any, tmp_path: Path, variant: str, absent: list[str], old: dict[str, Any]
) -> None:
    directory = saved(variant)[0]
    again = Checkpoint.open(edited(directory, tmp_path, **old, **dict.fromkeys(absent)))
    assert again.config == Checkpoint.open(directory).config


# --- What is refused -----------------------------------------------------------------------------------------------

WQKV, NORM = "transformer.blocks.1.attn.Wqkv.weight", "transformer.norm_f.weight"


@pytest.mark.parametrize(
    ("variant", "config", "error", "message"),
    [
        ("bloom", {"model_type": "llama"}, ValueError, "^model_type in .* 'jais', 'mpt', got 'llama'"),
        ("bloom", {"hidden_size": None}, ValueError, "config.json must say hidden_size, got no such entry"),
        ("bloom", {"n_layer": "2"}, TypeError, "n_layer in .* must be an integer, got '2'"),
        ("bloom", {"n_head": 5}, ValueError, r"n_head in .* must divide the model's width, 48, got 5"),
        ("bloom", {"num_attention_heads": 4}, ValueError, "^num_attention_heads in .* must be n_head, 6, .*, got 4"),
        ("falcon, groups", {"num_attention_heads": 10**30}, ValueError, "^num_attention_heads .* divide .* width, 48"),
        ("mpt", {"n_layers": 10**30}, ValueError, r"^number of layers in .* must be that of .*, got 10{30}$"),
        ("bloom", {"slow_but_exact": True, "pretraining_tp": 2}, ValueError, "^slow_but_exact in .* false, got"),
        ("bloom", {"tie_word_embeddings": 1}, TypeError, "tie_word_embeddings in .* must be True or False, got 1"),
        ("falcon, groups", {"alibi": False}, ValueError, "^alibi in .* must be true, got False; .*rotary"),
        ("falcon, groups", {"parallel_attn": False}, ValueError, "^parallel_attn in .* must be true with new_dec"),
        ("falcon, one key/value head", {"num_ln_in_parallel_attn": 2}, ValueError, "^num_ln_in_parallel_attn in .* 2"),
        ("falcon, groups", {"num_kv_heads": 4}, ValueError, r"^num_kv_heads must divide num_heads, 6, got 4"),
        ("mpt", {"attn_config": [1]}, TypeError, "^attn_config in .* must be an object, got list"),
        ("mpt", {"attn_config": {"alibi": False}}, ValueError, "^alibi in attn_config in .* must be true, got False"),
        ("mpt", {"attn_config": {"qk_ln": True}}, ValueError, "^qk_ln in attn_config in .* must be false, got True"),
        ("mpt", {"attn_config": {"attn_type": "linear_attention"}}, ValueError, "^attn_type in attn_config in"),
        ("mpt", {"attn_config": {"clip_qkv": -1}}, ValueError, "^clip_qkv in attn_config in .* positive, got -1"),
        ("mpt", {"attn_config": {"sliding_window_size": -2}}, ValueError, "^sliding_window_size in attn_config .* -2"),
        ("mpt", {"norm_type": "rmsnorm"}, ValueError, "^norm_type in .* must be a layer norm where norm_eps is absent"),
        ("mpt", {"n_layers": 3}, ValueError, r"got \['transformer.blocks.2.attn..*missing and none"),
        ("mpt", {"n_layers": 1}, ValueError, r"got none missing and \['transformer.blocks.1.* and 2 more unknown"),
        ("mpt", {"vocab_size": 38}, ValueError, r"^transformer.wte.weight in .* \(38, 48\) .*got \(37, 48\)"),
        ("falcon, groups", {"bias": True}, ValueError, "query_key_value.bias'.* missing"),
        ("bloom", {"tie_word_embeddings": False}, ValueError, r"got \['lm_head.weight'\] missing"),
    ],
)  # fmt: skip
def test_a_config_that_no_model_goes_with_is_refused(
    saved: Any, tmp_path: Path, variant: str, config: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        load("torch", edited(saved(variant)[0], tmp_path, **config))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({NORM: None}, r"got \['transformer.norm_f.weight'\] missing and none unknown; save the model"),
        ({NORM: None, f"_orig_mod.{NORM}": torch.ones(48)}, "names begin with '_orig_mod.', as those of a wrapped"),
        ({"transformer.norm_f.bias": torch.zeros(48)}, r"got none missing and \['transformer.norm_f.bias'\] unknown"),
        ({NORM: torch.ones(47)}, rf"^{NORM} in .* must have shape \(48,\) by its config.json, got \(47,\)"),
        ({WQKV: torch.ones(48, 144)}, rf"^{WQKV} in .* must have shape \(144, 48\) .*, got \(48, 144\)"),
        ({NORM: torch.ones(48, dtype=torch.int8)}, rf"^{NORM} in .* must be of dtype F64, F32, F16, BF16, got I8"),
        ({"lm_head.weight": torch.ones(37, 48)}, "^lm_head.weight in .* must equal transformer.wte.weight where"),
    ],
)
def test_tensors_of_another_model_are_refused(
    saved: Any, tmp_path: Path, tensors: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        load("torch", edited(saved("mpt")[0], tmp_path, tensors))


DAMAGED: dict[str, Callable[[bytes], bytes]] = {
    "objects in objects": lambda data: (60_000).to_bytes(8, "little") + b'{"a":' * 12_000,
    "a header longer than any file": lambda data: b"\xff" * 8 + data[8:],
}
DAMAGED |= {f"cut to {size}": lambda data, size=size: data[:size] for size in (0, 5, 8, 300, -1, -1000)}
DAMAGED |= {
    f"{new!r}": lambda data, old=old, new=new: data.replace(old, new, 1)
    for old, new in ((b'"dtype"', b'"dtypo"'), (b'"F32"', b'"F16"'), (b"[48]", b"[4x]"), (b"[48]", b"[96]"))
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_file_is_refused(saved: Any, tmp_path: Path, damage: str) -> None:
    path = edited(saved("mpt")[0], tmp_path) / "model.safetensors"
    path.write_bytes(DAMAGED[damage](path.read_bytes()))
    told = r"got \d+ bytes, too few for its header" if "header" in damage else "got .*download it again"
    with pytest.raises(ValueError, match=f"model.safetensors must be a whole safetensors file, {told}"):
        load("torch", tmp_path)


@pytest.mark.parametrize("moved", ["by a byte", "to those of another"])
def test_tensors_that_share_bytes_are_refused(saved: Any, tmp_path: Path, moved: str) -> None:
    path = edited(saved("mpt")[0], tmp_path) / "model.safetensors"
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    places = [entry for name, entry in sorted(header.items()) if name != "__metadata__" and entry["shape"] == [48]]
    first, last = sorted(places, key=lambda entry: entry["data_offsets"])[:: len(places) - 1]
    first["data_offsets"] = [x + 1 for x in first["data_offsets"]] if "byte" in moved else last["data_offsets"]
    written = json.dumps(header).encode()
    path.write_bytes(len(written).to_bytes(8, "little") + written + data[start:])
    with pytest.raises(ValueError, match="must be a whole safetensors file, got .* from byte .* is the next"):
        load("torch", tmp_path)


def test_files_that_are_missing_are_named(saved: Any, tmp_path: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match="^directory must be .* checkpoint, got .*/none'; nothing is downloaded: "
    ):
        load("torch", tmp_path / "none")
    with pytest.raises(FileNotFoundError, match="must hold config.json, as save_pretrained writes it"):
        load("torch", tmp_path)
    shutil.copy(saved("mpt")[0] / "config.json", tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(FileNotFoundError, match="must hold model.safetensors or .*index.json; weights of another"):
        load("torch", tmp_path)
    with pytest.raises(TypeError, match="^directory must be a path, got int"):
        load("torch", 5)
    for content in ("{", '{"a":' * 100_000):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(ValueError, match="config.json must be JSON, got"):
            load("torch", tmp_path)


@pytest.mark.parametrize(
    ("places", "error", "message"),
    [
        ({"x": "model-2.safetensors"}, FileNotFoundError, "must hold model-2.safetensors, which its index names"),
        ({"x": "../model.safetensors"}, ValueError, "must name files of its own directory, got '../model.safetensors'"),
        ({"x": ""}, ValueError, "must name files of its own directory, got ''"),
        ({"x": "part.safetensors"}, ValueError, r"must hold the tensors where its index says, got \['x'\] missing"),
        (None, ValueError, "must map tensors to files under 'weight_map', got NoneType"),
    ],
)
def test_an_index_of_what_is_not_there_is_refused(
    saved: Any, tmp_path: Path, places: Any, error: type[Exception], message: str
) -> None:
    edited(saved("mpt")[0], tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "part.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    with pytest.raises(error, match=message):
        load("torch", tmp_path)


@pytest.mark.parametrize("backend", NAMES)
def test_arguments_of_the_wrong_kind_are_refused(saved: Any, backend: str) -> None:
    directory, xp = saved("bloom")[0], FRAMEWORK[backend].xp
    with pytest.raises(TypeError, match="^dtype must be a real floating dtype"):
        load(backend, directory, dtype=xp.int32)
