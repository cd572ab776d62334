"""How much faster are encoders with ALiBi than by the arithmetic of their own code?

Random weights at the shapes of Jina-embeddings-v2-base, of its small sibling and of DNABERT-2. Numbers come first:
embeddings of texts of several lengths beside the original's arithmetic in float32 and in float64. Then, in pairs whose
order alternates, in float32 and in bfloat16:

  attention   of one layer, its projections left out, for a text of that length;
  encode      two layers and the pooling: one text, and a batch of eight from a sixth of that length to all of it;
  packed      that batch beside its texts one by one, which cost what their tokens cost.

The peers are dense: the original's arithmetic, which forms scores and bias of length times length, and PyTorch's fused
kernel with that bias (SDPA). Both pad a batch to its longest text. What they need too much memory for is not measured;
all of it needs 110 GiB. The peak of memory is taken in a process of its own. The exit status is 1 if a number is wrong
or, at full size, if a bar is not met.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import alibi_torch
from alibi_torch import AlibiConfig, AlibiEncoder
from benchmarks import harness
from benchmarks.harness import Measurement

SECTIONS = ("jina-base", "jina-small", "dnabert-2")
SHARES = (1, 2, 4, 8, 2, 3, 5, 6)  # of the longest text: a half, a quarter ...
OURS, DENSE, FUSED = "alibi_torch", "dense", "SDPA"
HOLDS = 5  # matrices of length times length that a dense forward pass holds at once, bias and scores among them


@dataclass(frozen=True)
class Shape:
    """The shape of an encoder, and the lengths at which it is measured."""

    embed_dim: int
    num_heads: int
    feed_forward_dim: int
    lengths: tuple[int, ...]

    def config(self) -> AlibiConfig:
        """Return two layers of it."""
        return AlibiConfig(
            num_layers=2,
            embed_dim=self.embed_dim,
            num_heads=self.num_heads,
            feed_forward_dim=self.feed_forward_dim,
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


SHAPES = {
    "jina-base": Shape(768, 12, 3072, (512, 2048, 8192)),
    "jina-small": Shape(512, 8, 2048, (512, 2048, 8192)),
    "dnabert-2": Shape(768, 12, 3072, (512, 4096)),
}
SMALL = {name: replace(x, embed_dim=96, feed_forward_dim=64, lengths=(130,)) for name, x in SHAPES.items()}
PAIRS = 5


@torch.no_grad()
def model_of(shape: Shape, dtype: torch.dtype = torch.float32) -> AlibiEncoder:
    """Return an encoder with random weights: queries and keys of unit variance, and so scores."""
    torch.manual_seed(0)
    model = AlibiEncoder(shape.config(), 1000).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("weight") and parameter.ndim == 2:
            parameter.normal_(std=parameter.shape[1] ** -0.5)
    return model.to(dtype)


def batch_of(length: int) -> tuple[Tensor, list[int]]:
    """Return the tokens and lengths of eight texts."""
    lengths = [max(1, length // share) for share in SHARES]
    return torch.randint(1000, (len(lengths), length), generator=torch.Generator().manual_seed(0)), lengths


def bias_of(model: AlibiEncoder, length: int, dtype: torch.dtype) -> Tensor:
    """Return the bias as the originals form it, ``[num_heads, length, length]``."""
    positions = torch.arange(length)
    distances = (positions[:, None] - positions).abs()
    return (-model.transformer.blocks[0].attention.slopes[:, None, None] * distances).to(dtype)


def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, kind: str) -> Tensor:
    """Return attention by the original's arithmetic, or by PyTorch's fused kernel."""
    if kind == FUSED:
        return F.scaled_dot_product_attention(query, key, value, bias)
    scores = query @ key.mT / math.sqrt(query.shape[-1])
    return torch.softmax(scores + bias, dim=-1) @ value


@torch.no_grad()
def encode(model: AlibiEncoder, tokens: Tensor, lengths: list[int], kind: str) -> Tensor:
    """Return embeddings by one of the three ways, ``[batch, embed_dim]``."""
    if kind == OURS:
        return model.encode(tokens, lengths=lengths)
    x = model.embed(tokens)
    text = torch.arange(tokens.shape[1]) < torch.tensor(lengths)[:, None]
    bias = bias_of(model, tokens.shape[1], x.dtype)[None]
    if not text.all():
        bias = bias + (~text).to(x.dtype)[:, None, None] * torch.finfo(x.dtype).min
    for block in model.transformer.blocks:
        own = block.attention
        query, key, value = (
            projection(x).unflatten(-1, (-1, model.config.head_dim)).transpose(1, 2)
            for projection in (own.q_proj, own.k_proj, own.v_proj)
        )
        attended = attend(query, key, value, bias, kind).transpose(1, 2).flatten(2)
        x = block.attention_norm(x + own.out_proj(attended))
        x = block.feed_forward_norm(x + block.feed_forward(x))
    weights = text[..., None].to(torch.promote_types(x.dtype, torch.float32))
    return (x.to(weights.dtype) * weights).sum(dim=1) / weights.sum(dim=1)


def prepared(shape: Shape, length: int, dtype: str, kind: str) -> Callable[[], Any]:
    """Return the attention of one text by one of the three ways, its bias included."""
    model = model_of(shape, getattr(torch, dtype))
    drawn = torch.Generator().manual_seed(0)
    size = (3, 1, shape.num_heads, length, model.config.head_dim)
    query, key, value = torch.randn(size, generator=drawn).to(getattr(torch, dtype)).unbind()

    @torch.no_grad()
    def call() -> Tensor:
        if kind == OURS:
            return alibi_torch.attention(query, key, value, is_causal=False)
        return attend(query, key, value, bias_of(model, length, query.dtype), kind)

    return call


def prepared_by_name(section: str, quick: bool, length: int, dtype: str, kind: str) -> Callable[[], Any]:
    """Return the same for a process of its own."""
    return prepared((SMALL if quick else SHAPES)[section], length, dtype, kind)


# --- Numbers --------------------------------------------------------------------------------------------------------


def check_numbers(shape: Shape) -> tuple[dict[str, Any], list[str]]:
    """Return what was compared, and what is wrong."""
    tokens, lengths = batch_of(min(shape.lengths))
    model = model_of(shape)
    ours, theirs = (encode(model, tokens, lengths, kind) for kind in (OURS, DENSE))
    exact = encode(model.double(), tokens, lengths, DENSE)
    own, apart = ((x.double() - exact).abs().max().item() for x in (theirs, ours))
    wrong = [] if apart <= 4 * own else [f"embeddings: {apart:.1e} from float64, the original's arithmetic {own:.1e}"]
    return {"the original's own error": own, "ours": apart}, wrong


# --- Sections -------------------------------------------------------------------------------------------------------


def compared(
    measured: Measurement, kind: str, needed: float, candidate: Callable[[], Any], baseline: Callable[[], Any]
) -> Measurement:
    """Time a pair, unless the baseline needs more memory than there is."""
    measured = replace(measured, baseline=kind)
    if needed > harness.available_memory():
        return replace(measured, bar=None, note=f"needs {needed / 2**30:.0f} GiB")
    return measured.timed(candidate, baseline, PAIRS)


def of_shape(section: str, length: int, dtype: str, quick: bool) -> Iterator[Measurement]:
    """Measure one shape at one length."""
    shape = (SMALL if quick else SHAPES)[section]
    group = f"{section}, {length:,} tokens, {dtype}"
    model, (tokens, lengths) = model_of(shape, getattr(torch, dtype)), batch_of(length)
    square = shape.num_heads * length**2 * (4 if dtype == "float32" else 2)
    bar = {512: 0.97, 8192: 3.0}.get(length)

    attention = Measurement(group, f"{OURS}, attention", DENSE, "seconds", faster=True)
    for kind in (DENSE, FUSED):
        calls = (prepared(shape, length, dtype, each) for each in (OURS, kind))
        yield compared(replace(attention, bar=bar if kind == DENSE else None), kind, HOLDS * square, *calls)
    if HOLDS * square < harness.available_memory():
        at = quick, length, dtype
        peaks = [harness.peak_growth("benchmarks.encoders:prepared_by_name", section, *at, x) for x in (OURS, DENSE)]
        memory = Measurement(group, f"{OURS}, attention, peak memory", DENSE, "bytes")
        yield replace(memory, bar=0.2 if length == 8192 else None).weighed(*peaks)
    for what, batch in (("one text", 1), ("eight texts", len(lengths))):
        some, of_each = tokens[:batch], lengths[:batch]
        for kind in (DENSE, FUSED):
            whole = Measurement(group, f"{OURS}, {what}", kind, "seconds", faster=True)
            yield compared(
                replace(whole, bar=0.97 if length == 512 and kind == DENSE else None),
                kind,
                HOLDS * square * batch,
                lambda some=some, of_each=of_each: encode(model, some, of_each, OURS),
                lambda some=some, of_each=of_each, kind=kind: encode(model, some, of_each, kind),
            )
    one_by_one = [(tokens[i : i + 1, :n], [n]) for i, n in enumerate(lengths)]
    packed = Measurement(group, f"{OURS}, eight texts, packed", f"{OURS}, one by one", "seconds", bar=1.15)
    yield packed.timed(
        lambda: encode(model, tokens, lengths, OURS), lambda: [encode(model, *x, OURS) for x in one_by_one], PAIRS
    )


def measure(sections: Sequence[str], quick: bool) -> Iterator[Measurement]:
    """Yield what the sections measure."""
    for section in sections:
        for length in (SMALL if quick else SHAPES)[section].lengths:
            for dtype in ("float32", "bfloat16"):
                yield from of_shape(section, length, dtype, quick)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return its exit status."""
    options = harness.parser("encoders", __doc__, SECTIONS).parse_args(arguments)
    machine = harness.machine()
    shapes = SMALL if options.quick else SHAPES
    checked = {section: check_numbers(shapes[section]) for section in options.only}
    wrong = [f"{section}, {line}" for section, (_, lines) in checked.items() for line in lines]
    return harness.conclude(
        harness.folder(options, options.only == list(SECTIONS)) / "encoders.json",
        [] if wrong else list(measure(options.only, options.quick)),
        not options.quick,
        wrong,
        benchmark="encoders",
        machine=machine | {"threads": torch.get_num_threads()},
        versions=harness.versions("numpy", "torch"),
        numerics={section: found for section, (found, _) in checked.items()},
    )


if __name__ == "__main__":
    sys.exit(main())
