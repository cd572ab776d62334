"""How much faster are BLOOM, MPT and Falcon of transformers with their attention computed by this library?

Random weights at the shapes of real models. Numbers come first: logits beside the model's own in float32 and in
float64, and greedy tokens for many prompts. Then, in pairs whose order alternates:

  bloom    two layers of BLOOM-560m's shape, a forward pass over 8,192 tokens;
  mpt      one layer of MPT-7B's shape, 4,096 tokens; and that layer's attention without its projections, which are most
           of its work and stay the model's own;
  decode   64 tokens after 8,192, two layers of BLOOM-560m's shape, in the model's usual cache and in AlibiCache;
  text     prompts of 8 to 2,048 tokens, or eight of up to 256, and 24 more, one at a time: six layers of hidden size
           1,024 of each family, in both caches. Nothing is to be lost where there is little attention to save;
  steps    24 tokens alone, behind 256 to 8,192 of which the caches have keys, in float32 and bfloat16: in a prompt's
           company a slow step is hidden by what the prompt gains.

The peak of memory is taken in a process of its own. The exit status is 1 if a number is wrong or, at full size, if a
bar is not met. About 40 minutes on two cores, most of it for the models' own attention; 17 GiB of memory.
"""

from __future__ import annotations

import copy
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    BloomModel,
    DynamicCache,
    FalconConfig,
    FalconModel,
    MptConfig,
    MptModel,
)
from transformers.utils import logging

from alibi_torch.transformers import AlibiCache, accelerate, restore
from benchmarks import harness
from benchmarks.harness import Measurement

VERSIONS = ("numpy", "torch", "transformers")
OURS, THEIRS = "accelerated", "eager"


@dataclass(frozen=True)
class Sizes:
    """What is measured."""

    bloom: int = 8192  # tokens of BLOOM's forward pass, and before those decoded
    mpt: int = 4096  # tokens of MPT's
    decoded: int = 64  # tokens that are decoded
    pairs: int = 3  # of calls that are timed
    many: int = 15  # pairs of calls that take less than a second
    checked: int = 1500  # tokens whose logits are compared with float64
    prompts: int = 20  # that greedy tokens are compared for
    steps: int = 200  # greedy tokens of each
    narrow: int = 1  # by what the widths of the models are divided
    texts: tuple[tuple[int, int], ...] = (
        *((1, length) for length in (8, 64, 256, 1024, 2048)),
        *((8, length) for length in (8, 64, 256)),
    )  # batch size and prompt
    more: int = 24  # tokens after such a prompt
    held: tuple[tuple[str, int, int], ...] = (
        *(("float32", 1, length) for length in (256, 1024, 2048, 4096, 8192)),
        ("float32", 4, 2048),
        *(("bfloat16", 1, length) for length in (1024, 4096)),
    )  # dtype, batch size and tokens in a cache


FULL = Sizes()
SMALL = Sizes(
    bloom=300,
    mpt=200,
    decoded=3,
    pairs=1,
    many=1,
    checked=100,
    prompts=2,
    steps=5,
    narrow=8,
    texts=((2, 8),),
    more=2,
    held=(("float32", 1, 30),),
)


def bloom_config(narrow: int, **options: Any) -> BloomConfig:
    """Return the shape of BLOOM-560m, of two layers and few words: embeddings are not what is measured."""
    return BloomConfig(vocab_size=1000, hidden_size=1024 // narrow, n_head=16, n_layer=2, **options)


def mpt_config(narrow: int, length: int) -> MptConfig:
    """Return the shape of MPT-7B, of one layer and few words."""
    return MptConfig(vocab_size=1000, d_model=4096 // narrow, n_heads=32, n_layers=1, max_seq_len=length)


def model_of(kind: str, narrow: int, length: int) -> Any:
    """Return a model with random weights."""
    torch.manual_seed(0)
    return (BloomModel(bloom_config(narrow)) if kind == "bloom" else MptModel(mpt_config(narrow, length))).eval()


def tokens_of(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 1000, (batch, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def forward(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Return the last hidden state."""
    return model(tokens, use_cache=False).last_hidden_state


def prepared_forward(kind: str, narrow: int, length: int, accelerated: bool) -> Callable[[], Any]:
    """Return a forward pass, for a process of its own."""
    model, tokens = model_of(kind, narrow, length), tokens_of(1, length)
    if accelerated:
        accelerate(model)
    forward(model, tokens[:, :64])
    return lambda: forward(model, tokens)


# --- Numbers --------------------------------------------------------------------------------------------------------


def check_numbers(sizes: Sizes) -> tuple[dict[str, Any], list[str]]:
    """Return what was compared, and what is wrong."""
    found: dict[str, Any] = {}
    wrong = []
    for kind in ("bloom", "mpt"):
        model, tokens = (
            model_of(kind, max(sizes.narrow, 4 if kind == "mpt" else 1), sizes.checked),
            tokens_of(1, sizes.checked),
        )
        theirs, exact = forward(model, tokens), forward(copy.deepcopy(model).double(), tokens)
        ours = forward(accelerate(model), tokens)
        own, apart = ((x.double() - y.double()).abs().max().item() for x, y in ((theirs, exact), (ours, theirs)))
        found[kind] = {"eager's own error": own, "apart from eager": apart, "ratio": apart / own}
        if not apart <= 4 * own:
            wrong.append(f"{kind}: apart from eager by {apart:.1e}, whose own error is {own:.1e}")
    torch.manual_seed(1)
    model = BloomForCausalLM(bloom_config(sizes.narrow, initializer_range=0.1)).eval()
    options = {"max_new_tokens": sizes.steps, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    equal = 0
    for seed in range(sizes.prompts):
        prompt = tokens_of(1, 16, seed)
        theirs = model.generate(prompt, **options)
        ours = accelerate(model).generate(prompt, **options)
        restore(model)
        equal += torch.equal(ours, theirs)
    found["greedy"] = {"prompts": sizes.prompts, "tokens of each": sizes.steps, "prompts with equal tokens": equal}
    if equal < sizes.prompts:
        wrong.append(f"greedy tokens: equal for {equal} of {sizes.prompts} prompts")
    return found, wrong


# --- Sections -------------------------------------------------------------------------------------------------------


def of_forward(kind: str, length: int, sizes: Sizes, bars: tuple[float, float]) -> Iterator[Measurement]:
    """Measure a forward pass, and its memory."""
    what = {"bloom": "BLOOM-560m, 2 layers", "mpt": "MPT-7B, 1 layer"}[kind]
    group = f"{what}, forward, {length:,} tokens"
    theirs, tokens = model_of(kind, sizes.narrow, length), tokens_of(1, length)
    ours = accelerate(copy.deepcopy(theirs))
    measured = Measurement(group, OURS, THEIRS, "seconds", bar=bars[0], faster=True)
    yield measured.timed(lambda: forward(ours, tokens), lambda: forward(theirs, tokens), sizes.pairs)
    peaks = [
        harness.peak_growth("benchmarks.transformers:prepared_forward", kind, sizes.narrow, length, accelerated)
        for accelerated in (True, False)
    ]
    yield Measurement(group, f"{OURS}, peak memory", THEIRS, "bytes", bar=bars[1]).weighed(*peaks)


def of_attention(length: int, sizes: Sizes) -> Iterator[Measurement]:
    """Measure MPT's attention without its projections."""
    theirs, tokens = model_of("mpt", sizes.narrow, length), tokens_of(1, length)
    for name in ("Wqkv", "out_proj"):
        setattr(theirs.blocks[0].attn, name, _Repeated(3) if name == "Wqkv" else torch.nn.Identity())
    theirs.blocks[0].ffn = _Nothing()
    theirs.blocks[0].attn.Wqkv.weight = theirs.wte.weight.new_zeros(3 * theirs.hidden_size, 1)
    ours = accelerate(copy.deepcopy(theirs))
    group = f"MPT-7B, 1 layer, forward, {length:,} tokens"
    measured = Measurement(group, f"{OURS}, no projections", THEIRS, "seconds", faster=True)
    yield measured.timed(lambda: forward(ours, tokens), lambda: forward(theirs, tokens), sizes.pairs)


class _Repeated(torch.nn.Module):
    """Stands in for a projection to several tensors, at no cost."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x] * self.times, dim=-1)


class _Nothing(torch.nn.Module):
    """Stands in for the layer after attention."""

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return residual


def of_decoding(sizes: Sizes) -> Iterator[Measurement]:
    """Measure decoding after a long text."""
    theirs, tokens = model_of("bloom", sizes.narrow, sizes.bloom), tokens_of(1, sizes.bloom)
    ours = accelerate(copy.deepcopy(theirs))
    group = f"BLOOM-560m, 2 layers, decode {sizes.decoded} after {sizes.bloom:,} tokens"
    with torch.no_grad():
        filled = DynamicCache(config=theirs.config)
        ours(tokens, past_key_values=filled)

    def filled_like(cache: Any) -> Any:
        """Return a cache with the same keys and values, or, of a kind that forgets some, with what it would hold."""
        if isinstance(cache, DynamicCache):
            replica = DynamicCache(config=theirs.config)
            for index, layer in enumerate(filled.layers):
                replica.update(layer.keys.clone(), layer.values.clone(), index)
            return replica
        with torch.no_grad():
            for piece in tokens.split(1024, dim=1):
                ours(piece, past_key_values=cache)
        return cache

    caches = {
        f"{OURS}, DynamicCache": (lambda: DynamicCache(config=theirs.config), 2.0),
        f"{OURS}, AlibiCache": (lambda: AlibiCache(ours), None),
        f"{OURS}, AlibiCache that evicts": (lambda: AlibiCache(ours, evict=True), None),
    }
    for name, (make, bar) in caches.items():
        held = [filled_like(make()) for _ in range(sizes.pairs + 1)]
        plain = [filled_like(filled) for _ in range(sizes.pairs + 1)]
        measured = Measurement(group, name, f"{THEIRS}, DynamicCache", "seconds", bar=bar, faster=True)
        yield measured.timed(
            lambda held=held: decode(ours, tokens, held.pop(), sizes.decoded),
            lambda plain=plain: decode(theirs, tokens, plain.pop(), sizes.decoded),
            sizes.pairs,
        )


@torch.no_grad()
def decode(model: Any, tokens: torch.Tensor, cache: Any, steps: int) -> None:
    """Take further tokens one at a time."""
    for step in range(steps):
        model(tokens[:, step : step + 1], past_key_values=cache)


def text_model(kind: str, narrow: int, longest: int = 4096) -> Any:
    """Return six layers of hidden size 1,024 of a family, random; MPT's for texts of so many tokens."""
    torch.manual_seed(0)
    width, heads, layers = 1024 // narrow, 16, 6
    if kind == "BLOOM":
        return BloomModel(BloomConfig(vocab_size=1000, hidden_size=width, n_head=heads, n_layer=layers)).eval()
    if kind == "MPT":
        return MptModel(
            MptConfig(vocab_size=1000, d_model=width, n_heads=heads, n_layers=layers, max_seq_len=longest)
        ).eval()
    config = FalconConfig(
        vocab_size=1000, hidden_size=width, num_attention_heads=heads, num_hidden_layers=layers, alibi=True
    )
    config._attn_implementation = kind.removeprefix("Falcon, ")
    return FalconModel(config).eval()


@torch.no_grad()
def of_text(model: Any, tokens: torch.Tensor, more: int, cache: Any) -> None:
    """Take a prompt, and then further tokens one at a time."""
    model(tokens[:, :-more], past_key_values=cache, use_cache=True)
    decode(model, tokens[:, -more:], cache, more)


def of_texts(sizes: Sizes) -> Iterator[Measurement]:
    """Measure prompts and the tokens after them in the two caches."""
    for kind in ("BLOOM", "MPT", "Falcon, sdpa", "Falcon, eager"):
        theirs = text_model(kind, sizes.narrow)
        ours = accelerate(copy.deepcopy(theirs))
        for batch, length in sizes.texts:
            tokens = tokens_of(batch, length + sizes.more)
            group = f"{kind}, batch {batch}, {length:,} tokens and {sizes.more} more"

            def run(model: Any, cache: Any, tokens: torch.Tensor = tokens) -> None:
                of_text(model, tokens, sizes.more, cache)

            for name, make in (("DynamicCache", DynamicCache), ("AlibiCache", lambda ours=ours: AlibiCache(ours))):
                measured = Measurement(
                    group, f"{OURS}, {name}", f"{THEIRS}, DynamicCache", "seconds", bar=0.97, faster=True
                )
                yield measured.timed(
                    lambda make=make, ours=ours, run=run: run(ours, make()),
                    lambda theirs=theirs, run=run: run(theirs, DynamicCache()),
                    sizes.many if length < 1024 and batch == 1 else sizes.pairs,
                )


def of_steps(sizes: Sizes) -> Iterator[Measurement]:
    """Measure tokens, one at a time, behind others whose keys are drawn."""
    for kind, (dtype, batch, length) in itertools.product(("BLOOM", "MPT", "Falcon, sdpa"), sizes.held):
        theirs = text_model(kind, sizes.narrow, max(4096, 2 * length)).to(getattr(torch, dtype))
        ours, tokens = accelerate(copy.deepcopy(theirs)), tokens_of(batch, sizes.more)
        group = f"{kind}, {dtype}, batch {batch}, {sizes.more} tokens behind {length:,}"

        for name, make in (("DynamicCache", DynamicCache), ("AlibiCache", lambda ours=ours: AlibiCache(ours))):
            contenders = (
                steps_behind(length, model, tokens, cache)
                for model, cache in ((ours, make()), (theirs, DynamicCache()))
            )
            measured = Measurement(
                group, f"{OURS}, {name}", f"{THEIRS}, DynamicCache", "seconds", bar=0.97, faster=True
            )
            yield measured.timed(*contenders, 2 * sizes.pairs)


@torch.no_grad()
def steps_behind(length: int, model: Any, tokens: torch.Tensor, cache: Any) -> Callable[[], None]:
    """Return what takes tokens one at a time behind so many, and forgets them."""
    model(tokens[:, :1], past_key_values=cache, use_cache=True)  # for the shape of its keys
    for index, layer in enumerate(list(cache.layers)):
        batch, heads, _, head_dim = layer.keys.shape
        cache.update(*torch.randn(2, batch, heads, length - 1, head_dim, dtype=layer.keys.dtype).unbind(), index)

    def run() -> None:
        decode(model, tokens, cache, tokens.shape[1])
        cache.crop(-tokens.shape[1])

    return run


def of_mpt(sizes: Sizes) -> Iterator[Measurement]:
    """Measure MPT, whole and its attention alone."""
    yield from of_forward("mpt", sizes.mpt, sizes, (3.0, 0.5))
    yield from of_attention(sizes.mpt, sizes)


def told(measurements: Iterable[Measurement]) -> Iterator[Measurement]:
    """Yield measurements, and say what each found as soon as it is there."""
    for measured in measurements:
        harness.report(measured.name)
        yield measured


SECTIONS: dict[str, Callable[[Sizes], Iterator[Measurement]]] = {
    "bloom": lambda sizes: of_forward("bloom", sizes.bloom, sizes, (6.0, 0.25)),
    "mpt": of_mpt,
    "decode": of_decoding,
    "text": of_texts,
    "steps": of_steps,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return its exit status."""
    options = harness.parser("transformers", __doc__, SECTIONS).parse_args(arguments)
    logging.set_verbosity_error()
    machine = harness.machine()
    sizes = SMALL if options.quick else FULL
    numerics, wrong = check_numbers(sizes)
    return harness.conclude(
        harness.folder(options, options.only == list(SECTIONS)) / "transformers.json",
        [] if wrong else list(told(measured for name in options.only for measured in SECTIONS[name](sizes))),
        not options.quick,
        wrong,
        benchmark="transformers",
        machine=machine | {"threads": torch.get_num_threads()},
        versions=harness.versions(*VERSIONS),
        numerics=numerics,
    )


if __name__ == "__main__":
    sys.exit(main())
