"""How much faster are models with code of their own than by the arithmetic of that code?

Random weights at the shapes of Jina-embeddings-v2-base, of its small sibling, of DNABERT-2 and of Baichuan-13B. Numbers
come first, beside the original's arithmetic in float32 and in float64. Then, in pairs whose order alternates, in
float32 and in bfloat16:

  attention   of one layer, its projections left out, for a text of that length, and its peak of memory;
  one layer   of Baichuan, whole;
  encode      two layers of an encoder and the pooling: one text, and a batch of eight from a sixth of that length to
              all of it;
  packed      that batch beside its texts one by one, which cost what their tokens cost.

The peers are dense: the original's arithmetic, which forms scores and bias of length times length, and PyTorch's fused
kernel with that bias (SDPA). Both pad a batch to its longest text. What they need too much memory for is not measured;
all of it needs 110 GiB. A peer that takes seconds runs once, beside several runs of the library, so that all takes 20
minutes. The peak of memory is taken in a process of its own for each. Results are written after each row, and say
whether they are complete. The exit status is 1 if a number is wrong or, at full size, if a bar is not met, be it for
want of time.
"""

from __future__ import annotations

import functools
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import alibi_core
import alibi_torch
from alibi_torch import AlibiConfig, AlibiEncoder
from benchmarks import harness
from benchmarks.harness import Measurement

SECTIONS = ("jina-base", "jina-small", "dnabert-2", "baichuan-13b")
DTYPES = ("float32", "bfloat16")
SHARES = (1, 2, 4, 8, 2, 3, 5, 6)  # of the longest text: a half, a quarter ...
OURS, DENSE, FUSED = "alibi_torch", "dense", "SDPA"
NO_TIME = "no time left"
HOLDS = 5  # matrices of length times length that a dense forward pass holds at once, bias and scores among them


@dataclass(frozen=True)
class Shape:
    """The shape of an encoder, or of a layer of a decoder, and the lengths at which it is measured."""

    embed_dim: int
    num_heads: int
    feed_forward_dim: int
    lengths: tuple[int, ...]
    is_causal: bool = False

    @property
    def head_dim(self) -> int:
        """Features of a head."""
        return self.embed_dim // self.num_heads

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
    "baichuan-13b": Shape(5120, 40, 13696, (4096,), is_causal=True),
}
SMALL = {name: replace(x, embed_dim=120, feed_forward_dim=64, lengths=(130,)) for name, x in SHAPES.items()}


@dataclass(frozen=True)
class Pace:
    """How long measuring may take.

    Attributes:
        pairs: At most, of a row.
        seconds: After which a row has no further pair. A baseline that takes as long runs once.
        until: When no further row begins, by ``time.monotonic``.
    """

    pairs: int = 15
    seconds: float = 5.0
    until: float = math.inf

    def refused(self, measured: Measurement, needed: float) -> Measurement | None:
        """Return what is said of a row for which there is too little memory, in bytes, or no time; None of others."""
        if needed > harness.available_memory():
            return replace(measured, bar=None, note=f"needs {needed / 2**30:.0f} GiB")
        return replace(measured, note=NO_TIME) if time.monotonic() > self.until else None

    def timed(
        self,
        measured: Measurement,
        candidate: Callable[[], Any],
        baseline: Callable[[], Any],
        needed: float = 0.0,
    ) -> Measurement:
        """Time a pair, unless the baseline needs more bytes of memory than there are, or no time is left."""
        refused = self.refused(measured, needed)
        if refused is not None:
            return refused
        ours, theirs = (harness.seconds_of(each) for each in (candidate, baseline))
        is_long = ours + theirs > self.seconds
        if is_long:
            measured = replace(measured, note=f"{measured.baseline} ran once")

        def seconds_of(function: Callable[[], Any]) -> float:
            return theirs if is_long and function is baseline else harness.seconds_of(function)

        pairs = int(self.seconds / (ours if is_long else ours + theirs))
        return measured.timed(candidate, baseline, max(1, min(self.pairs, pairs)), clock=seconds_of, warm_up=False)


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


def bias_of(shape: Shape, length: int, dtype: torch.dtype) -> Tensor:
    """Return the bias as the originals form it, ``[num_heads, length, length]``; -inf for keys that are hidden."""
    positions = torch.arange(length)
    distances = (positions[:, None] - positions).abs()
    slopes = torch.from_numpy(alibi_core.slopes(shape.num_heads)).to(torch.promote_types(dtype, torch.float32))
    bias = -slopes[:, None, None] * distances
    return (bias.masked_fill_(positions > positions[:, None], -math.inf) if shape.is_causal else bias).to(dtype)


def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, kind: str) -> Tensor:
    """Return attention by the original's arithmetic, or by PyTorch's fused kernel."""
    if kind == FUSED:
        return F.scaled_dot_product_attention(query, key, value, bias)
    scores = query @ key.mT / math.sqrt(query.shape[-1])
    return torch.softmax(scores + bias, dim=-1) @ value


class Layer:
    """A decoder's layer with random weights: norm, attention, norm and a gated feed-forward network."""

    def __init__(self, shape: Shape, dtype: torch.dtype) -> None:
        drawn = torch.Generator().manual_seed(0)
        width, middle = shape.embed_dim, shape.feed_forward_dim
        self.shape, sizes = shape, ((3 * width, width), (width, width), (2 * middle, width), (width, middle))
        self.weights = [torch.empty(x).normal_(std=x[1] ** -0.5, generator=drawn).to(dtype) for x in sizes]

    @torch.no_grad()
    def __call__(self, x: Tensor, kind: str) -> Tensor:
        """Return what follows from ``[1, length, embed_dim]``, by one of the three ways."""
        packed, out, up, down = self.weights
        width = (self.shape.embed_dim,)
        heads = F.linear(F.rms_norm(x, width), packed).unflatten(-1, (3, self.shape.num_heads, -1))
        attended = attention_of(self.shape, *heads.permute(2, 0, 3, 1, 4), kind=kind)
        x = x + F.linear(attended.transpose(1, 2).flatten(2), out)
        gate, middle = F.linear(F.rms_norm(x, width), up).chunk(2, dim=-1)
        return x + F.linear(F.silu(gate) * middle, down)


@torch.no_grad()
def attention_of(shape: Shape, query: Tensor, key: Tensor, value: Tensor, *, kind: str) -> Tensor:
    """Return the attention of one text by one of the three ways, its bias included."""
    if kind == OURS:
        return alibi_torch.attention(query, key, value, is_causal=shape.is_causal)
    return attend(query, key, value, bias_of(shape, query.shape[2], query.dtype), kind)


@torch.no_grad()
def encode(model: AlibiEncoder, tokens: Tensor, lengths: list[int], kind: str) -> Tensor:
    """Return embeddings by one of the three ways, ``[batch, embed_dim]``."""
    if kind == OURS:
        return model.encode(tokens, lengths=lengths)
    x = model.embed(tokens)
    text = torch.arange(tokens.shape[1]) < torch.tensor(lengths)[:, None]
    shape = Shape(model.config.embed_dim, model.config.num_heads, 0, ())
    bias = bias_of(shape, tokens.shape[1], x.dtype)[None]
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
    """Return the attention of one text by one of the three ways, for heads that are drawn."""
    drawn = torch.Generator().manual_seed(0)
    size = (3, 1, shape.num_heads, length, shape.head_dim)
    query, key, value = torch.randn(size, generator=drawn).to(getattr(torch, dtype)).unbind()
    return lambda: attention_of(shape, query, key, value, kind=kind)


def prepared_by_name(section: str, quick: bool, length: int, dtype: str, kind: str) -> Callable[[], Any]:
    """Return the same for a process of its own."""
    return prepared((SMALL if quick else SHAPES)[section], length, dtype, kind)


# --- Numbers --------------------------------------------------------------------------------------------------------


def check_numbers(shape: Shape) -> tuple[dict[str, Any], list[str]]:
    """Return what was compared, and what is wrong."""
    length = min(512, *shape.lengths)
    if shape.is_causal:
        narrow = replace(shape, embed_dim=4 * shape.head_dim, num_heads=4, feed_forward_dim=64)
        single, double = (Layer(narrow, x) for x in (torch.float32, torch.float64))
        x = torch.randn(1, length, narrow.embed_dim, generator=torch.Generator().manual_seed(0))
        ours, theirs, exact = single(x, OURS), single(x, DENSE), double(x.double(), DENSE)
    else:
        tokens, lengths = batch_of(length)
        model = model_of(shape)
        ours, theirs = (encode(model, tokens, lengths, kind) for kind in (OURS, DENSE))
        exact = encode(model.double(), tokens, lengths, DENSE)
    own, apart = ((x.double() - exact).abs().max().item() for x in (theirs, ours))
    wrong = [] if apart <= 4 * own else [f"results: {apart:.1e} from float64, the original's arithmetic {own:.1e}"]
    return {"the original's own error": own, "ours": apart}, wrong


# --- Sections -------------------------------------------------------------------------------------------------------


def of_attention(section: str, length: int, dtype: str, quick: bool, pace: Pace) -> Iterator[Measurement]:
    """Measure the attention of one layer, and its memory."""
    shape, group = (SMALL if quick else SHAPES)[section], f"{section}, {length:,} tokens, {dtype}"
    needed, is_long = _needed(shape, length, dtype), length == 8192
    bar = {512: 0.97, 8192: 3.0}.get(length)
    attention = Measurement(group, f"{OURS}, attention", DENSE, "seconds", faster=True)
    for kind in (DENSE, FUSED):
        calls = (prepared(shape, length, dtype, each) for each in (OURS, kind))
        yield pace.timed(replace(attention, baseline=kind, bar=bar if kind == DENSE else None), *calls, needed)
    peaks: dict[str, int] = {}
    for kind in (DENSE, FUSED):
        bar = 0.2 if is_long and kind == DENSE else None
        memory = Measurement(group, f"{OURS}, attention, peak memory", kind, "bytes", bar)
        refused = pace.refused(memory, needed)
        if refused is not None:
            yield refused
            continue
        for each in {OURS, kind} - set(peaks):
            peaks[each] = harness.peak_growth(
                "benchmarks.encoders:prepared_by_name", section, quick, length, dtype, each
            )
        yield memory.weighed(peaks[OURS], peaks[kind])


def of_layer(section: str, length: int, dtype: str, quick: bool, pace: Pace) -> Iterator[Measurement]:
    """Measure one layer of a decoder."""
    shape = (SMALL if quick else SHAPES)[section]
    layer, drawn = Layer(shape, getattr(torch, dtype)), torch.Generator().manual_seed(0)
    x = torch.randn(1, length, shape.embed_dim, generator=drawn).to(getattr(torch, dtype))
    for kind in (DENSE, FUSED):
        whole = Measurement(
            f"{section}, {length:,} tokens, {dtype}", f"{OURS}, one layer", kind, "seconds", faster=True
        )
        calls = (functools.partial(layer, x, each) for each in (OURS, kind))
        yield pace.timed(whole, *calls, _needed(shape, length, dtype))


def of_encoder(section: str, length: int, dtype: str, quick: bool, pace: Pace) -> Iterator[Measurement]:
    """Measure embeddings of one text and of eight."""
    shape, group = (SMALL if quick else SHAPES)[section], f"{section}, {length:,} tokens, {dtype}"
    model, (tokens, lengths) = model_of(shape, getattr(torch, dtype)), batch_of(length)
    for what, batch in (("one text", 1), ("eight texts", len(lengths))):
        texts = tokens[:batch], lengths[:batch]
        for kind in (DENSE, FUSED):
            bar = 0.97 if length == 512 and kind == DENSE else None
            whole = Measurement(group, f"{OURS}, {what}", kind, "seconds", bar, faster=True)
            calls = (functools.partial(encode, model, *texts, each) for each in (OURS, kind))
            yield pace.timed(whole, *calls, _needed(shape, length, dtype) * batch)
    one_by_one = [(tokens[i : i + 1, :n], [n]) for i, n in enumerate(lengths)]
    yield pace.timed(
        Measurement(group, f"{OURS}, eight texts, packed", f"{OURS}, one by one", "seconds", bar=1.15),
        lambda: encode(model, tokens, lengths, OURS),
        lambda: [encode(model, *x, OURS) for x in one_by_one],
    )


def _needed(shape: Shape, length: int, dtype: str) -> float:
    """Return how many bytes a dense pass of one text holds at once."""
    return HOLDS * shape.num_heads * length**2 * getattr(torch, dtype).itemsize


def measure(sections: Sequence[str], most: float, quick: bool, pace: Pace) -> Iterator[Measurement]:
    """Yield what the sections measure, at lengths of ``most`` tokens at most."""
    for section in sections:
        shape = (SMALL if quick else SHAPES)[section]
        for length in (x for x in shape.lengths if x <= most):
            for dtype in DTYPES:
                at = section, length, dtype, quick, pace
                yield from of_attention(*at)
                yield from (of_layer if shape.is_causal else of_encoder)(*at)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return its exit status."""
    parser = harness.parser("encoders", __doc__, SECTIONS)
    parser.add_argument("--most", type=int, default=math.inf, metavar="TOKENS", help="leave longer texts out")
    parser.add_argument("--pairs", type=int, default=Pace.pairs, help="at most, of a row (default %(default)s)")
    parser.add_argument("--minutes", type=float, default=math.inf, help="after which no further row begins")
    options = parser.parse_args(arguments)
    machine = harness.machine()
    shapes = SMALL if options.quick else SHAPES
    checked = {section: check_numbers(shapes[section]) for section in options.only}
    wrong = [f"{section}, {line}" for section, (_, lines) in checked.items() for line in lines]
    is_whole = options.only == list(SECTIONS) and options.most == math.inf
    path = harness.folder(options, is_whole) / "encoders.json"
    found: dict[str, Any] = {
        "benchmark": "encoders",
        "machine": machine | {"threads": torch.get_num_threads()},
        "versions": harness.versions("numpy", "torch"),
        "numerics": {section: numbers for section, (numbers, _) in checked.items()},
    }
    measurements: list[Measurement] = []
    pace = Pace(options.pairs, until=time.monotonic() + 60 * options.minutes)
    for each in [] if wrong else measure(options.only, options.most, options.quick, pace):
        measurements.append(each)
        harness.report(f"{each.name} {each.note}")
        harness.write_json(
            path, found | {"complete": False, "passed": False, "measurements": [asdict(x) for x in measurements]}
        )
    found["complete"] = not wrong and all(each.note != NO_TIME for each in measurements)
    return harness.conclude(path, measurements, not options.quick, wrong, **found)


if __name__ == "__main__":
    sys.exit(main())
