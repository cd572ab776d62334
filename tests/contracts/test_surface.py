"""The public surface: names, arguments and pages."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import inspect
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import alibi_core
from alibi_core.backend.models import AlibiConfig
from docs.public_names import PAGE, ROOMS, page
from tests.support.cli import main
from tests.support.frameworks import FRAMEWORK, NAMES, NAMES_SLOW_IN_JAX
from tests.support.layers import load, make_layer, make_module, save
from tests.support.models import Model

ROOT = Path(__file__).parents[2]


def test_the_page_of_public_names_is_that_of_the_docstrings() -> None:
    """``python -m docs.public_names`` writes it anew; a review sees what changed."""
    for module in ("torch", "transformers", "sentence_transformers", "jax", "flax", "mlx.core", "matplotlib"):
        pytest.importorskip(module)
    assert PAGE.read_text(encoding="utf-8") == page()


NOT_RUN = {"load_checkpoint": "it reads hundreds of megabytes that are not here"}


@pytest.mark.parametrize("package", ROOMS)
def test_every_public_name_has_an_example_that_is_run(package: str) -> None:
    """In its docstring; a constant, which has none, in its module's."""
    framework = {"alibi_core": "matplotlib", "alibi_torch": "transformers"}.get(package, package.removeprefix("alibi_"))
    pytest.importorskip(framework)
    without = set()
    for room in ("", *ROOMS[package]):
        module = importlib.import_module(f"{package}.{room}".rstrip("."))
        for name in module.__all__:
            item = getattr(module, name)
            examples = doctest.DocTestParser().get_examples((item if callable(item) else module).__doc__)
            run = [x.source for x in examples if doctest.SKIP not in x.options]
            if not (run if callable(item) else any(name in source for source in run)):
                without.add(name)
    assert without <= NOT_RUN.keys()


def test_the_page_lists_every_command() -> None:
    table = PAGE.read_text(encoding="utf-8").partition("## Commands")[2]
    listed = re.findall(r"^\| `([^`]+)` \| [A-Z].*\. \|$", table, flags=re.MULTILINE)
    modules = {f"python -m {path.parent.relative_to(root)}".replace("/", ".") for root, path in mains()}
    assert {x for x in listed if x.startswith("python")} == modules
    for command in listed:
        if command.startswith("alibi-core "):
            with pytest.raises(SystemExit) as stopped:
                main([*command.split()[1:], "--help"])
            assert stopped.value.code == 0, command
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    assert {x.partition(" ")[0] for x in listed if not x.startswith("python")} == scripts.keys()


def mains() -> Iterator[tuple[Path, Path]]:
    """Yield where the packages lie, and each of their modules that runs as a command."""
    for package in ROOMS:
        root = ROOT if package == "alibi_core" else ROOT / "backends"
        yield from ((root, path) for path in (root / package).rglob("__main__.py"))


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
        (alibi_core.bias, "attn_mask", None),  # bias takes no mask
        (alibi_core.bias, "wings", None),
    ):
        end = "$" if told is None else re.escape(f"; {told}")
        with pytest.raises(TypeError, match=rf"got an unexpected keyword argument '{given}'{end}"):
            function(**{given: 1})
    with pytest.raises(TypeError, match=r"^AlibiAttention\(\) takes x by position; name the others: mask, segment_ids"):
        layer(x, x, x)
    kinds = {x.kind for x in inspect.signature(package.attention).parameters.values()}
    assert not kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}


# --- What all backends have, and one text shows ---------------------------------------------------------------------


PAIRS = [("torch", "jax"), ("jax", "mlx"), ("mlx", "torch")]
CONFIG = {"num_layers": 1, "embed_dim": 16, "num_heads": 4, "dropout": 0.0}
SLOPES = (1.0, 0.5, 0.25, 0.125)


FIELDS = (
    {"window_size": 2},
    {"learnable_slopes": True, "slopes": SLOPES},
    {"is_causal": False, "future_slopes": SLOPES},
    {"implementation": "dense"},
)


@pytest.mark.parametrize("name", NAMES_SLOW_IN_JAX)
@pytest.mark.parametrize("fields", FIELDS, ids=", ".join)
def test_a_config_reaches_the_attention_of_models(name: str, fields: dict[str, Any]) -> None:
    config = importlib.import_module(f"alibi_{name}").AlibiConfig
    inside = Model(name, make_module(name, "AlibiTransformer", config(**CONFIG, **fields)).blocks[0].attention)
    options = {x: np.asarray(y, np.float32) if isinstance(y, tuple) else y for x, y in fields.items()}
    alone, plain = (Model(name, make_module(name, "AlibiAttention", 16, 4, **x)) for x in (options, {}))
    for layer in (alone, plain):
        layer.weights = {x: weight for x, weight in inside.weights.items() if x in layer.weights}
    assert alone.weights.keys() == inside.weights.keys()
    x = np.random.default_rng(0).standard_normal((1, 9, 16)).astype(np.float32)
    assert np.array_equal(inside(x), alone(x))
    if "implementation" not in fields:
        assert np.abs(inside(x) - plain(x)).max() > 1e-3
    with pytest.raises(ValueError, match="^implementation must be one of"):
        make_module(name, "AlibiTransformer", config(**CONFIG, implementation="fast"))


def test_a_damaged_file_of_weights_is_named(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "layer.safetensors").write_bytes(b"cut off")
    with pytest.raises(ValueError, match=r"layer.safetensors must be a safetensors file"):
        load("torch", make_layer("torch", embed_dim=16, num_heads=4), tmp_path / "layer.safetensors")


OTHERS = ({"num_heads": 2}, {"is_causal": False}, {"window_size": 3}, {"slopes": SLOPES}, {"law": "log"})


@pytest.mark.parametrize("pair", PAIRS, ids="-to-".join)
def test_weights_do_not_load_into_a_layer_that_computes_something_else(pair: tuple[str, str], tmp_path: Path) -> None:
    for module in ("torch", "jax", "flax", "mlx.core"):
        pytest.importorskip(module)
    path = tmp_path / "model.safetensors"
    save(pair[0], make_module(pair[0], "AlibiTransformer", AlibiConfig(**CONFIG)), path)
    for changes in OTHERS:
        (field,) = changes
        other = make_module(pair[1], "AlibiTransformer", AlibiConfig(**CONFIG | changes))
        with pytest.raises(ValueError, match=rf"^blocks.0.attention must have .*{field}=.*, got .*{field}="):
            load(pair[1], other, path)
    save_file(load_file(path), path)  # without the metadata, which describes the layers
    load(pair[1], other, path)


def test_a_state_dict_of_pytorch_says_what_its_layers_compute(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    layer, other = make_module("torch", "AlibiAttention", 16, 4), make_module("torch", "AlibiAttention", 16, 2)
    torch.save({"model": torch.nn.Sequential(layer).state_dict()}, tmp_path / "model.pt")
    state = torch.load(tmp_path / "model.pt", weights_only=True)["model"]
    with pytest.raises(RuntimeError, match="0 must have num_heads=4, .*, got num_heads=2, .*; a plain dict"):
        torch.nn.Sequential(other).load_state_dict(state)
    torch.nn.Sequential(other).load_state_dict(dict(state))
    assert torch.equal(other.q_proj.weight, layer.q_proj.weight)
