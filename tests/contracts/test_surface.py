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

from tests.support.cli import main
from tests.support.frameworks import FRAMEWORK, NAMES
from tests.support.layers import load, make_module, save
from tests.support.models import Model

ROOT = Path(__file__).parents[2]
API = Path(__file__).with_name("public_api.txt")
BACKENDS = ("torch", "jax", "mlx")
ROOMS = {
    "alibi_core": ("plot", "conformance"),
    "alibi_torch": ("nn", "caches", "parallel", "transformers", "conformance"),
    "alibi_jax": ("nn", "caches", "parallel", "conformance"),
    "alibi_mlx": ("nn", "caches", "conformance"),
}


def public(package: str) -> Iterator[tuple[str, Any]]:
    """Yield the public names of a package and its rooms, those of the package not repeated for its rooms."""
    seen = set()
    for room in ("", *ROOMS[package]):
        module = importlib.import_module(f"{package}.{room}".rstrip("."))
        for name in module.__all__:
            if name not in seen or room in ("parallel", "conformance"):
                yield (
                    f"{room}.{name}" if room in ("parallel", "conformance", "transformers") else name,
                    getattr(module, name),
                )
            seen.add(name)


def callables(name: str, item: Any) -> Iterator[tuple[str, Any]]:
    """Yield a function, or a class's way of being made and its public methods, by names that backends share."""
    if not inspect.isclass(item):
        yield name, item
        return
    makes = inspect.getattr_static(item, "make", None)
    yield name, makes.__func__ if isinstance(makes, classmethod) else item.__init__
    for attribute in dir(item):
        method = inspect.getattr_static(item, attribute)
        method = method.__func__ if isinstance(method, (classmethod, staticmethod)) else method
        own = inspect.isfunction(method) and method.__module__.startswith("alibi_")
        if own and attribute in ("forward", "__call__"):
            yield f"{name}.forward", method
        elif own and not attribute.startswith("_"):
            yield f"{name}.{attribute}", method


def surface() -> Iterator[str]:
    """Yield a line for each public callable and signature, with the backends that have it."""
    found: dict[str, dict[str, list[str]]] = {}
    for backend in BACKENDS:
        for public_name, item in public(f"alibi_{backend}"):
            if public_name.startswith("transformers.") or public_name == "AlibiConfig":
                continue  # of PyTorch alone; the same class for all
            for name, function in callables(public_name, item) if callable(item) else ():
                parameters = inspect.signature(function).parameters.values()
                taken = [x.replace(annotation=x.empty) for x in parameters if x.name not in ("self", "cls")]
                text = re.sub(r"<class '[\w.]*?(\w+)'>", r"\1", str(inspect.Signature(taken)))
                found.setdefault(name, {}).setdefault(text, []).append(backend)
    for name in sorted(found):
        for text, backends in found[name].items():
            yield f"{name}{text}  [{', '.join(backends)}]"


def test_the_public_api_is_the_one_reviewed() -> None:
    """A change of a signature shows as a change of ``public_api.txt``: ``python -m tests.contracts.test_surface``."""
    for module in ("torch", "transformers", "jax", "flax", "mlx.core"):
        pytest.importorskip(module)
    assert list(surface()) == API.read_text(encoding="utf-8").splitlines()


# --- The page that lists it all -------------------------------------------------------------------------------------

PAGE = ROOT / "docs" / "public_names.md"


@pytest.mark.parametrize("package", ROOMS)
def test_the_page_lists_every_public_name(package: str) -> None:
    framework = {"alibi_core": "numpy", "alibi_torch": "transformers"}.get(package, package.removeprefix("alibi_"))
    pytest.importorskip(framework)
    sections = re.split(r"^## `?", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    listed = {x.partition("`")[0]: re.findall(r"^\| `([^`]+)` \| (.+) \|$", x, flags=re.MULTILINE) for x in sections}
    for room in ("", *ROOMS[package]):
        name = f"{package}.{room}".rstrip(".")
        module = importlib.import_module(name)
        names = [entry for entry, _ in listed[name]]
        assert names == list(module.__all__), f"docs/public_names.md, section {name}"
        assert room or names == sorted(names, key=lambda name: (not name.isupper(), name))
        assert all(re.fullmatch(r"[A-Z`].*\.", text) for _, text in listed[name]), f"one sentence a name: {name}"


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


# --- What all backends have, and one text shows ---------------------------------------------------------------------


PAIRS = [("torch", "jax"), ("jax", "mlx"), ("mlx", "torch")]
CONFIG = {"num_layers": 1, "embed_dim": 16, "num_heads": 4, "dropout": 0.0}
SLOPES = (1.0, 0.5, 0.25, 0.125)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "fields",
    [
        {"window_size": 2},
        {"learnable_slopes": True, "slopes": SLOPES},
        {"is_causal": False, "future_slopes": SLOPES},
        {"implementation": "dense"},
    ],
    ids=lambda fields: ", ".join(fields),
)
def test_a_config_reaches_the_attention_of_models(name: str, fields: dict[str, Any]) -> None:
    package, framework = importlib.import_module(f"alibi_{name}"), FRAMEWORK[name]
    config = package.AlibiConfig(**CONFIG, **fields)
    model = make_module(name, "AlibiTransformer", config)
    options = {x: np.asarray(y, np.float32) if "_slopes" in x or x == "slopes" else y for x, y in fields.items()}
    options["learnable_slopes"] = fields.get("learnable_slopes", False)
    alone, inside = make_module(name, "AlibiAttention", 16, 4, **options), model.blocks[0].attention
    Model(name, alone).weights = Model(name, inside).weights
    x = framework.array(np.random.default_rng(0).standard_normal((1, 9, 16)).astype(np.float32))
    assert np.array_equal(framework.numpy(inside(x)), framework.numpy(alone(x)))
    plain = make_module(name, "AlibiAttention", 16, 4)
    if not fields.keys() & {"implementation", "learnable_slopes"}:
        Model(name, plain).weights = Model(name, inside).weights
        assert np.abs(framework.numpy(inside(x)) - framework.numpy(plain(x))).max() > 1e-3
    assert (inside.log_slopes is not None if name != "mlx" else "log_slopes" in inside) == options["learnable_slopes"]
    with pytest.raises(ValueError, match="^implementation must be one of"):
        make_module(name, "AlibiTransformer", package.AlibiConfig(**CONFIG, implementation="fast"))


def test_a_config_is_frozen_and_positional() -> None:
    import dataclasses

    from alibi_core.backend.models import AlibiConfig

    config = AlibiConfig(3, 64)
    assert config == AlibiConfig(num_layers=3, embed_dim=64)
    with pytest.raises(TypeError, match="'d_model'; give embed_dim"):
        AlibiConfig(d_model=64)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.embed_dim = 2


@pytest.mark.parametrize("pair", PAIRS, ids="-to-".join)
def test_weights_of_whole_models_travel(pair: tuple[str, str], tmp_path: Path) -> None:
    for module in ("torch", "jax", "flax", "mlx.core"):
        pytest.importorskip(module)
    tokens, path = np.asarray([[3, 1, 4, 1, 5]], np.int32), tmp_path / "model.safetensors"
    fields = CONFIG | {"bias": True, "learnable_slopes": True, "tied_head": False, "embedding_norm": True}
    fields["num_kv_heads"] = 2
    models = []
    for name in pair:
        config = importlib.import_module(f"alibi_{name}").AlibiConfig(**fields)
        models.append(make_module(name, "AlibiLanguageModel", config, 11))
    save(pair[0], models[0], path)
    load(pair[1], models[1], path)
    one, other = (
        FRAMEWORK[name].numpy(model(FRAMEWORK[name].array(tokens))) for name, model in zip(pair, models, strict=True)
    )
    np.testing.assert_allclose(one, other, rtol=0, atol=2e-5 * np.abs(one).max())
    if pair[1] == "jax":
        import alibi_jax

        small = make_module("jax", "AlibiLanguageModel", alibi_jax.AlibiConfig(**fields), 12)
        with pytest.raises(ValueError, match=r"embedding.weight in .* must have shape \(12, 16\), got \(11, 16\)"):
            alibi_jax.load_weights(small, path)
        with pytest.raises(TypeError, match="module must be a layer or model of Flax NNX, got int"):
            alibi_jax.save_weights(3, path)


if __name__ == "__main__":
    API.write_text("\n".join(surface()) + "\n", encoding="utf-8")
