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
from rich.console import Console
from tqdm import tqdm

import benchmarks.extrapolation
from benchmarks import harness
from benchmarks.extrapolation.corpus import Corpus, standard_library, text_file
from benchmarks.extrapolation.evaluation import Held, evaluate
from benchmarks.extrapolation.figure import draw
from benchmarks.extrapolation.models import METHODS, build
from benchmarks.extrapolation.report import all_finite, show
from benchmarks.extrapolation.settings import FULL, QUICK, VOCAB_SIZE, Settings
from benchmarks.extrapolation.training import train


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return its exit status: 0, or 1 if a loss is not finite."""
    parser = _parser()
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
        results = _conditions(settings, corpus, options)
    except (OSError, RuntimeError, AssertionError, ValueError) as error:  # AssertionError: PyTorch built without CUDA
        parser.error(str(error))

    started = time.perf_counter()
    results["methods"] = {method: _measure(method, corpus, settings, options) for method in METHODS}
    results["seconds"] = sum(found["seconds"] for found in results["methods"].values())
    harness.write_json(options.output / "results.json", results)
    console = Console()
    show(results, console)
    draw(results, options.output / "extrapolation.png")
    taken = f"{time.perf_counter() - started:.0f} s"
    console.print(f"{taken}; written to {options.output}/: results.json, extrapolation.png")
    if all_finite(results):
        return 0
    print("a loss is not finite; lower the learning rate, or report it if ALiBi's alone is not", file=sys.stderr)
    return 1


def _conditions(settings: Settings, corpus: Corpus, options: argparse.Namespace) -> dict[str, Any]:
    """Return the results' head: what is measured, and where."""
    held, device = Held.of(corpus.held_out, settings), options.device
    run = {"setting": "full" if options.full else "quick", "seed": options.seed, "vocab_size": VOCAB_SIZE}
    derived = {"dtype": "float32", "lengths": list(settings.lengths), "stride": settings.stride}
    name = torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else device
    return {
        "settings": asdict(settings) | run | derived,
        "corpus": {
            "name": corpus.name,
            "training_bytes": len(corpus.training),
            "held_out_bytes": len(corpus.held_out),
            "scored": held.scored,
            "windows": len(held.windows(settings.stride)),
            "every": held.every,
            "sha256": corpus.digest,
        },
        "versions": harness.versions("torch"),
        "machine": harness.machine() | {"threads": torch.get_num_threads(), "device": name},
    }


def _measure(method: str, corpus: Corpus, settings: Settings, options: argparse.Namespace) -> dict[str, Any]:
    """Train and evaluate one model."""
    model = build(method, settings.model, options.seed).to(options.device)
    started = time.perf_counter()
    in_terminal = sys.stderr.isatty()
    with tqdm(total=settings.steps + 2 * len(settings.lengths), desc=f"{method:10}", disable=None, leave=False) as bar:

        def on_step(step: int, loss: float) -> None:
            bar.set_postfix_str(f"training, {loss:.3f} nats", refresh=False)
            bar.update()
            if not in_terminal and (step % max(1, settings.steps // 5) == 0 or step == settings.steps):
                seconds = time.perf_counter() - started
                print(f"{method:10} step {step}/{settings.steps}  loss {loss:.3f}  {seconds:.0f} s", flush=True)

        def on_length(protocol: str, length: int) -> None:
            bar.set_postfix_str(f"{protocol} at {length}", refresh=False)
            bar.update()

        training_loss = train(model, corpus.training, settings, options.seed, on_step)
        trained = time.perf_counter()
        found = evaluate(model, Held.of(corpus.held_out, settings), settings, on_length)
    return found | {
        "training_loss": training_loss,
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "training_seconds": trained - started,
        "seconds": time.perf_counter() - started,
    }


def _parser() -> argparse.ArgumentParser:
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
    parser.add_argument("--output", type=Path, default=Path("out/extrapolation"), metavar="DIR",
                        help="where results.json and extrapolation.png go (default %(default)s)")  # fmt: skip
    return parser


if __name__ == "__main__":
    sys.exit(main())
