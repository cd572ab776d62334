"""How much faster are models with this library's attention than with their own code?

Random weights at real shapes, about two layers of each model. BLOOM, MPT and Falcon of ``transformers`` are accelerated
in place, BERT gets ALiBi in place of its positions, and an encoder of Jina-embeddings-v2's shape is compared with its
original dense code and with PyTorch's fused kernel with a dense bias. ``generate`` is compared with that of
``transformers`` and with a loop over the same model. Results are compared with float64 first. 30 minutes and 17 GB on
two cores.
"""

from __future__ import annotations

import copy
import math
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

import alibi_core
import alibi_torch
from alibi_torch.transformers import accelerate, with_alibi
from benchmarks import harness
from benchmarks.harness import Call, Results

VOCABULARY = 1000  # Small, because embeddings are not measured.
SHARES = (1, 2, 4, 8, 2, 3, 5, 6)  # The lengths of eight texts are the longest length divided by these.
MOST_APART = 4  # The largest accepted error, in units of the original model's own float32 error.


@dataclass(frozen=True)
class Subject:
    """A model, its inputs, and the implementations to compare.

    Attributes:
        name: Name in the table.
        build: Takes a divisor of the width and a number of tokens; returns the model and its inputs.
        tokens: Number of tokens of the text, or of cached tokens before decoding.
        run: Takes a model and its inputs; returns the tensor to compare.
        ours: Converts a model to this library's attention, in place or not.
        theirs: Other ways to run the model, by name.
        is_same: Whether all implementations compute the same function.
    """

    name: str
    build: Callable[[int, int], tuple[Any, Any]]
    tokens: int
    run: Callable[[Any, Any], Tensor]
    ours: Callable[[Any], Any] = accelerate
    theirs: tuple[tuple[str, Callable[[Any, Any], Tensor]], ...] = ()
    is_same: bool = True

    def calls(self, divisor: int, tokens: int, dtype: torch.dtype = torch.float32) -> dict[str, Call]:
        """Return the calls to time, ours first."""
        torch.manual_seed(0)
        model, inputs = self.build(divisor, tokens)
        model = model.eval().to(dtype)
        ours = self.ours(copy.deepcopy(model))
        others = self.theirs or (("its own arithmetic", self.run),)
        calls = {"alibi_torch": partial(self.run, ours, inputs)}
        calls |= {name: partial(run, model, inputs) for name, run in others}
        return {name: torch.no_grad()(call) for name, call in calls.items()}


def text(batch: int, length: int) -> Tensor:
    """Return token ids."""
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(0))


# --- Models of transformers -------------------------------------------------------------------------------------------


def bloom(divisor: int, tokens: int) -> tuple[Any, Tensor]:
    """Return two layers of BLOOM-560m's shape, and a text."""
    sizes = {"hidden_size": 1024 // divisor, "n_head": 16, "n_layer": 2}
    return transformers.BloomModel(transformers.BloomConfig(vocab_size=VOCABULARY, **sizes)), text(1, tokens)


def mpt(divisor: int, tokens: int) -> tuple[Any, Tensor]:
    """Return a layer of MPT-7B's shape, and a text."""
    sizes = {"d_model": 4096 // divisor, "n_heads": 32, "n_layers": 1, "max_seq_len": tokens}
    return transformers.MptModel(transformers.MptConfig(vocab_size=VOCABULARY, **sizes)), text(1, tokens)


def falcon(divisor: int, tokens: int) -> tuple[Any, Tensor]:
    """Return six narrow layers of Falcon with ALiBi, and a text."""
    sizes = {"hidden_size": 1024 // divisor, "num_attention_heads": 16, "num_hidden_layers": 6}
    config = transformers.FalconConfig(vocab_size=VOCABULARY, alibi=True, **sizes)
    return transformers.FalconModel(config), text(1, tokens)


def bert(divisor: int, tokens: int) -> tuple[Any, Tensor]:
    """Return two layers of BERT's shape, and a text."""
    sizes = {"hidden_size": 768 // divisor, "intermediate_size": 3072 // divisor, "num_attention_heads": 12}
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, num_hidden_layers=2, max_position_embeddings=tokens, **sizes
    )
    return transformers.BertModel(config), text(1, tokens)


def read(model: Any, tokens: Tensor) -> Tensor:
    """Return the last hidden state of a forward pass."""
    return model(tokens, **({} if model.config.model_type == "bert" else {"use_cache": False})).last_hidden_state


def decode(model: Any, tokens: Tensor, steps: int = 16) -> Tensor:
    """Return the last hidden states of tokens that are decoded one at a time after random cached keys."""
    cache = transformers.DynamicCache(config=model.config)
    heads = model.config.num_attention_heads
    drawn = torch.Generator().manual_seed(0)
    sizes = 2, 1, heads, tokens.shape[1] - steps, model.config.hidden_size // heads
    for layer in range(model.config.num_hidden_layers):
        cache.update(*torch.randn(sizes, generator=drawn, dtype=torch.float32).to(model.dtype).unbind(), layer)
    tail = tokens[:, -steps:].split(1, dim=1)
    return torch.cat([model(token, past_key_values=cache).last_hidden_state for token in tail], dim=1)


# --- Text, written ----------------------------------------------------------------------------------------------------

NEW = 32  # tokens


def writer(divisor: int, tokens: int) -> tuple[Any, Tensor]:
    """Return a language model of two layers of BLOOM-560m's shape, and a prompt."""
    sizes = {"hidden_size": 1024 // divisor, "n_head": 16, "n_layer": 2}
    return transformers.BloomForCausalLM(transformers.BloomConfig(vocab_size=VOCABULARY, **sizes)), text(1, tokens)


def loaded(model: Any) -> Any:
    """Return the model as an ``AlibiLanguageModel``, by a checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return alibi_torch.load_checkpoint(folder).eval().to(model.dtype)


def own_writer(divisor: int, tokens: int) -> tuple[Any, Tensor]:
    """Return the same as an ``AlibiLanguageModel``."""
    model, prompt = writer(divisor, tokens)
    return loaded(model), prompt


def write(model: Any, tokens: Tensor) -> Tensor:
    """Return the prompt and the likeliest tokens after it."""
    return model.generate(tokens, max_new_tokens=NEW)


def write_by_loop(model: Any, tokens: Tensor) -> Tensor:
    """Return the same by a loop over the model and its caches."""
    caches = model.transformer.make_caches(1, tokens.shape[1] + NEW)
    written = [tokens]
    for _ in range(NEW):
        written.append(model(written[-1], caches=caches)[:, -1:].argmax(dim=-1))
    return torch.cat(written, dim=1)


# --- An encoder -------------------------------------------------------------------------------------------------------


def jina(divisor: int, tokens: int, batch: int = 1) -> tuple[Any, tuple[Tensor, list[int]]]:
    """Return two layers of the shape of Jina-embeddings-v2-base, and one text or eight."""
    config = alibi_torch.AlibiConfig(
        num_layers=2,
        embed_dim=768 // divisor,
        num_heads=12,
        feed_forward_dim=3072 // divisor,
        dropout=0.0,
        is_causal=False,
        bias=True,
        block="post_norm",
        gated=True,
        up_bias=False,
        norm_epsilon=1e-12,
        embedding_norm=True,
        embedding_scale=1.0,
        token_types=2,
    )
    model = alibi_torch.AlibiEncoder(config, VOCABULARY)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("weight") and parameter.ndim == 2:  # so that queries and keys have unit variance
                parameter.normal_(std=parameter.shape[1] ** -0.5)
    return model, (text(batch, tokens), [max(1, tokens // share) for share in SHARES[:batch]])


def encode(model: Any, texts: tuple[Tensor, list[int]]) -> Tensor:
    """Return embeddings."""
    return model.encode(texts[0], lengths=texts[1])


def encode_densely(model: Any, texts: tuple[Tensor, list[int]], is_fused: bool) -> Tensor:
    """Return embeddings as the original code computes them, or by PyTorch's fused kernel with the same bias."""
    (tokens, lengths), num_heads = texts, model.config.num_heads
    x = model.embed(tokens)
    visible = torch.arange(tokens.shape[1]) < torch.tensor(lengths)[:, None]
    position = torch.arange(tokens.shape[1])
    rate = torch.from_numpy(alibi_core.slopes(num_heads))[:, None, None]
    bias = (-rate * (position[:, None] - position).abs()).to(x.dtype)[None]  # [1, heads, length, length]
    if not visible.all():
        bias = bias + (~visible)[:, None, None].to(x.dtype) * torch.finfo(x.dtype).min
    for block in model.transformer.blocks:
        layer = block.attention
        query, key, value = (
            f(x).unflatten(-1, (num_heads, -1)).transpose(1, 2) for f in (layer.q_proj, layer.k_proj, layer.v_proj)
        )
        if is_fused:
            attended = F.scaled_dot_product_attention(query, key, value, bias)
        else:
            attended = torch.softmax(query @ key.mT / math.sqrt(query.shape[-1]) + bias, dim=-1) @ value
        x = block.attention_norm(x + layer.out_proj(attended.transpose(1, 2).flatten(2)))
        up, activation, down, _ = block.feed_forward  # the last is dropout
        gate, hidden = up(x).chunk(2, dim=-1)
        x = block.feed_forward_norm(x + down(activation(gate) * hidden))
    weights = visible[..., None].to(x.dtype)
    return (x * weights).sum(dim=1) / weights.sum(dim=1)


# --- The table --------------------------------------------------------------------------------------------------------

DENSE = (("dense", partial(encode_densely, is_fused=False)), ("SDPA", partial(encode_densely, is_fused=True)))
ENCODER = Subject("Jina-v2-base's shape, 2 layers, one text", jina, 512, encode, ours=lambda x: x, theirs=DENSE)
WRITER = Subject("BLOOM-560m's shape, 2 layers, 32 tokens written", writer, 32, write, ours=loaded)
LOOP = replace(WRITER, name="AlibiLanguageModel, the same", build=own_writer, ours=lambda x: x)
LOOP = replace(LOOP, theirs=(("a loop over it", write_by_loop),))
EIGHT = replace(ENCODER, name="the same, eight texts", build=partial(jina, batch=8))
SUBJECTS = (
    Subject("BLOOM-560m's shape, 2 layers", bloom, 8192, read),
    Subject("BLOOM-560m's shape, 2 layers, 16 tokens decoded", bloom, 8192, decode),
    *(replace(subject, tokens=tokens) for subject in (WRITER, LOOP) for tokens in (32, 512)),
    Subject("MPT-7B's shape, 1 layer", mpt, 4096, read),
    Subject("Falcon, 6 layers of 1,024", falcon, 2048, read),
    Subject("BERT's shape with ALiBi, beside its positions", bert, 4096, read, ours=with_alibi, is_same=False),
    *(replace(ENCODER, tokens=tokens) for tokens in (512, 2048, 8192)),
    *(replace(EIGHT, tokens=tokens) for tokens in (512, 2048)),
)


def alone(index: int, divisor: int, tokens: int, name: str) -> Call:
    """Return one call of a subject, for a separate process."""
    subject = SUBJECTS[index]
    subject.calls(divisor, min(tokens, 64))[name]()
    return subject.calls(divisor, tokens)[name]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return its exit status."""
    options = harness.parser("models", __doc__).parse_args(arguments)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    threads = {"threads": torch.get_num_threads()}
    results = Results("models", options, "torch", "transformers", machine=threads)
    divisor = 16 if options.quick else 1
    for index, subject in enumerate(SUBJECTS):
        if options.quick and subject.name in [x.name for x in SUBJECTS[:index]]:
            continue  # the same model at another length
        tokens = 64 if options.quick else subject.tokens
        if subject.is_same:
            single, double = (subject.calls(divisor, min(tokens, 512), x) for x in (torch.float32, torch.float64))
            ours, theirs, *_ = single
            exact = double[theirs]()
            errors = [(single[name]().double() - exact).abs().max().item() for name in (ours, theirs)]
            if not results.check(f"{subject.name}, {tokens:,} tokens", errors[0] / (errors[1] or 1.0), MOST_APART):
                continue
        calls = subject.calls(divisor, tokens)
        ours, *others = calls
        weighed = calls if index == 0 or not options.quick else ()
        peaks = {x: harness.peak_growth("benchmarks.models:alone", index, divisor, tokens, x) for x in weighed}
        for theirs in others:
            row = f"{subject.name}, {tokens:,} tokens", ours, theirs
            results.add(*row, **harness.paired(calls[ours], calls[theirs], 1 if options.quick else 5))
            if peaks:
                results.add(*row, unit="bytes", note="peak memory", **harness.compared(peaks[ours], peaks[theirs]))
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
