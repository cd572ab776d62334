"""Runs the benchmark from the command line; see the package's docstring."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tqdm import trange

import benchmarks.extrapolation
from benchmarks import harness
from benchmarks.extrapolation.corpus import Corpus, standard_library, text_file
from benchmarks.extrapolation.evaluation import Held, evaluate
from benchmarks.extrapolation.models import METHODS, build
from benchmarks.extrapolation.report import all_finite, draw, show
from benchmarks.extrapolation.settings import FULL, QUICK, VOCAB_SIZE, Settings
from benchmarks.extrapolation.training import train


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return its exit status: 0, or 1 if a loss is not finite."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.extrapolation",
        description=benchmarks.extrapolation.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="small models: about two minutes on two cores (default)")
    size.add_argument("--full", action="store_true", help="larger models, longer inputs: about half an hour")
    parser.add_argument("--text", type=Path, metavar="FILE", help="any text; default Python's standard library")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the order of the text (default 0)")
    parser.add_argument("--device", default="cpu", help="cpu (default), cuda, mps, ...")
    where = "where results.json and extrapolation.png go (default %(default)s)"
    parser.add_argument("--output", type=Path, default=Path("out/extrapolation"), metavar="DIR", help=where)
    options = parser.parse_args(arguments)
    settings = FULL if options.full else QUICK
    try:
        torch.empty(0, device=options.device)
        most, least = settings.longest + settings.scored, 2 * settings.longest
        if options.text is None:
            corpus = standard_library(settings.corpus_bytes, most)
        else:
            corpus = text_file(options.text, most, least)
        options.output.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError, AssertionError, ValueError) as error:  # AssertionError: PyTorch built without CUDA
        parser.error(str(error))
    return run(settings, corpus, options)


def run(settings: Settings, corpus: Corpus, options: argparse.Namespace) -> int:
    """Train and evaluate all methods, write and show what was found, and return the exit status."""
    machine = harness.machine() | {"threads": torch.get_num_threads(), "device": options.device}
    held = Held.of(corpus.held_out, settings)
    methods = {method: _measure(method, corpus, settings, options) for method in METHODS}
    derived = {"seed": options.seed, "vocab_size": VOCAB_SIZE, "lengths": settings.lengths, "stride": settings.stride}
    results = {
        "settings": asdict(settings) | derived | {"setting": "full" if settings == FULL else "quick"},
        "corpus": {
            "name": corpus.name,
            "training_bytes": len(corpus.training),
            "held_out_bytes": len(corpus.held_out),
            "scored": held.scored,
            "windows": len(held.ends(settings.stride)[:: held.every]),
            "every": held.every,
            "sha256": corpus.digest,
        },
        "versions": harness.versions("torch"),
        "machine": machine,
        "methods": methods,
        "seconds": sum(found["seconds"] for found in methods.values()),
    }
    harness.write_json(options.output / "results.json", results)
    show(results)
    draw(results, options.output / "extrapolation.png")
    print(f"{results['seconds']:.0f} s; written to {options.output}/: results.json, extrapolation.png")
    if all_finite(results):
        return 0
    print("a loss is not finite; lower the learning rate, or report it if ALiBi's alone is not", file=sys.stderr)
    return 1


def _measure(method: str, corpus: Corpus, settings: Settings, options: argparse.Namespace) -> dict[str, Any]:
    """Train and evaluate one model."""
    model = build(method, settings.model, options.seed).to(options.device)
    start = time.perf_counter()
    steps = trange(settings.steps, desc=f"{method:10}", mininterval=1 if sys.stderr.isatty() else 10)
    training_loss = train(model, corpus.training, settings, options.seed, steps)
    trained = time.perf_counter()
    return evaluate(model, Held.of(corpus.held_out, settings), settings) | {
        "training_loss": training_loss,
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "training_seconds": trained - start,
        "seconds": time.perf_counter() - start,
    }


if __name__ == "__main__":
    sys.exit(main())
