"""The public surface: the backends agree in names and arguments, but for what is listed here."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import inspect
import itertools
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from alibi_core._cli import main
from tests.support.frameworks import FRAMEWORK, NAMES
from tests.support.full import in_full
from tests.support.layers import load, save
from tests.support.models import Model, make_module

ROOT = Path(__file__).parents[2]
BACKENDS = ("torch", "jax", "mlx")
ROOMS = {
    "alibi_core": ("plot", "conformance"),
    "alibi_torch": ("nn", "caches", "parallel", "transformers", "conformance"),
    "alibi_jax": ("nn", "caches", "parallel", "conformance"),
    "alibi_mlx": ("nn", "caches", "conformance"),
}

MODELS = ("AlibiTransformer", "AlibiEncoder", "AlibiLanguageModel")
CACHES = ("KVCache",)
PLACED = "PyTorch places a tensor where it is made; arrays of JAX and MLX are placed by the framework"
FLAX = (
    "Flax draws initial numbers from streams that are handed to it, and tells the dtype of a parameter from the rest's"
)
GROWS = "MLX's cache follows mlx-lm's, which grows, and takes its sizes from the first keys"
PROCESSES = "PyTorch names a group of processes, JAX an axis of a mesh"

# What differs on purpose: where each backend stands, and why.
DIFFERENCES = {
    "AlibiAttention(device)": ("torch *=None", PLACED),
    "AlibiAttention(dtype)": ("torch *=None, jax *=None", "MLX casts a module by set_dtype"),
    "AlibiAttention(param_dtype)": ("jax *=float32", FLAX),
    "AlibiAttention(rngs)": ("jax *", FLAX),
    "AlibiAttention.make_cache(batch_size)": ("torch, jax, mlx =None", GROWS),
    "AlibiAttention.make_cache(max_length)": ("torch, jax, mlx =None", GROWS),
    **{f"{model}(dtype)": ("jax *=None", FLAX) for model in MODELS},
    **{f"{model}(param_dtype)": ("jax *=float32", FLAX) for model in MODELS},
    **{f"{model}(rngs)": ("jax *", FLAX) for model in MODELS},
    "AlibiTransformer.make_caches(batch_size)": ("torch, jax, mlx =None", GROWS),
    "AlibiTransformer.make_caches(max_length)": ("torch, jax, mlx =None", GROWS),
    "AlibiLanguageModel.forward(cache)": ("mlx *=None", "mlx-lm's word for caches"),
    "AlibiLanguageModel.generate(generator)": ("torch *=None", "PyTorch's source of random numbers"),
    "AlibiLanguageModel.generate(key)": ("jax *=None, mlx *=None", "the source of random numbers of JAX and MLX"),
    **{f"{cache}(num_kv_heads)": ("torch, jax", GROWS) for cache in CACHES},
    **{f"{cache}(head_dim)": ("torch, jax", GROWS) for cache in CACHES},
    **{f"{cache}(batch_size)": ("torch, jax, mlx *=None", GROWS) for cache in CACHES},
    **{f"{cache}(max_length)": ("torch, jax, mlx *=None", GROWS) for cache in CACHES},
    **{f"{cache}(device)": ("torch *=None", PLACED) for cache in CACHES},
    **{f"{cache}(dtype)": ("torch *=None, jax *=float32", f"{GROWS}; PyTorch has a default dtype") for cache in CACHES},
    "attention(dropout_key)": ("jax *=None, mlx *=None", "PyTorch's own dropout draws from its global generator, too"),
    "attention(max_key_norm)": ("torch *=None", "JAX measures keys in the program; MLX's cache knows their norms"),
    "load_checkpoint(device)": ("torch *=None", PLACED),
    "conformance.adapters(device)": ("torch =cpu", PLACED),
    "parallel.attention(group)": ("torch *=None", PROCESSES),
    "parallel.attention(axis_name)": ("torch *=None, jax *", PROCESSES),
}

# What one backend has and others have not.
MISSING = {
    "TPU": ("jax", "options of a kernel that no other framework has"),
    "AlibiMultiheadAttention": (
        "torch",
        "a drop-in for PyTorch's module and its state dict; Flax's own takes attention_fn, MLX's has other arguments",
    ),
    "attention_fn": ("jax", "Flax's own attention modules take a function; those of PyTorch and MLX do not"),
    "load_weights": ("jax", "a module of PyTorch and MLX loads its own weights"),
    "save_weights": ("jax", "a module of PyTorch and MLX saves its own weights"),
    "KVCache.make": ("jax", "a pytree is made of its leaves; elsewhere the class itself makes a cache"),
    **{
        f"KVCache.{name}": ("mlx", "the models of mlx-lm ask it of a cache")
        for name in ("empty", "from_state", "is_trimmable", "make_mask", "merge", "size", "trim", "update_and_fetch")
    },
    "AlibiLanguageModel.make_cache": ("mlx", "mlx-lm's word for the transformer's make_caches"),
    "AlibiAttention.extra_repr": ("torch", "PyTorch's hook for printing a module"),
    "AlibiAttention.register_slopes": ("torch", "slopes are a buffer there, which tensor parallelism sets anew"),
    "AlibiBias": ("torch", "a module whose buffer moves with a model; elsewhere alibi_core.bias is as short"),
    "parallel.sharded_attention": ("jax", "JAX places whole arrays; PyTorch's processes hold parts"),
    "parallel.TensorParallelAttention": ("torch", "JAX divides any layer by the sharding of its arrays"),
    "parallel.tensor_parallel_plan": ("torch", "JAX divides any layer by the sharding of its arrays"),
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


def shown(parameter: inspect.Parameter) -> str:
    """Return kind and default of a parameter: ``*`` is for keyword-only."""
    mark = {"KEYWORD_ONLY": "*", "VAR_KEYWORD": "**", "VAR_POSITIONAL": "*..."}.get(parameter.kind.name, "")
    default = (
        "" if parameter.default is parameter.empty else f"={getattr(parameter.default, '__name__', parameter.default)}"
    )
    return f"{mark}{default}"


def surface() -> dict[str, dict[str, dict[str, str]]]:
    """Return what each public callable takes, by name and backend: parameters, in order, as they are shown."""
    found: dict[str, dict[str, dict[str, str]]] = {}
    for backend in BACKENDS:
        for public_name, item in public(f"alibi_{backend}"):
            if public_name.startswith("transformers.") or public_name == "AlibiConfig":
                continue  # of PyTorch alone; the same class for all
            for name, function in callables(public_name, item) if callable(item) else ():
                parameters = inspect.signature(function).parameters.values()
                taken = {p.name: shown(p) for p in parameters if p.name not in ("self", "cls")}
                found.setdefault(name, {})[backend] = taken
    return found


@pytest.fixture(scope="module")
def signatures() -> dict[str, dict[str, dict[str, str]]]:
    for module in ("torch", "transformers", "jax", "flax", "mlx.core"):
        pytest.importorskip(module)
    return surface()


def test_arguments_differ_where_that_is_meant_and_nowhere_else(signatures: dict[str, Any]) -> None:
    found = {}
    for name, by_backend in signatures.items():
        if len(by_backend) < 2:
            continue
        for parameter in {x: None for taken in by_backend.values() for x in taken}:
            where = {backend: taken[parameter] for backend, taken in by_backend.items() if parameter in taken}
            if len(where) < len(by_backend) or len(set(where.values())) > 1:
                found[f"{name}({parameter})"] = ", ".join(f"{x} {how}".rstrip() for x, how in where.items())
    assert found == {name: where for name, (where, _) in DIFFERENCES.items()}
    assert all(reason for _, reason in DIFFERENCES.values())


def test_arguments_come_in_one_order(signatures: dict[str, Any]) -> None:
    for name, by_backend in signatures.items():
        common = set.intersection(*(set(taken) for taken in by_backend.values()))
        orders = {tuple(x for x in taken if x in common) for taken in by_backend.values()}
        positional = {
            tuple(x for x, how in taken.items() if x in common and "*" not in how) for taken in by_backend.values()
        }
        assert len(orders) == 1 or "KVCache" in name, f"{name}: {orders}"  # a cache of MLX is made by keywords alone
        assert len({x for x in positional if x}) <= 1, f"{name}: {positional}"


def test_what_one_backend_has_others_have_or_a_reason(signatures: dict[str, Any]) -> None:
    found = {}
    for name, by_backend in signatures.items():
        backends = {"torch", "jax"} if name.startswith("parallel.") else set(BACKENDS)  # MLX has no such room
        if by_backend.keys() != backends and name.rpartition(".")[0] not in MISSING:
            found[name] = ", ".join(by_backend)
    assert found == {name: where for name, (where, _) in MISSING.items()}


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


PAIRS = [
    x if x in (("torch", "jax"), ("jax", "mlx"), ("mlx", "torch")) else in_full((x,))
    for x in itertools.permutations(BACKENDS, 2)
]
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

    from alibi_core.backend import AlibiConfig

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
