"""The calls that :mod:`alibi_mlx.check` makes: at each head size that Metal's fused kernels take, and a larger one."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

import alibi_core
from alibi_core import AttentionCall, fold_error_bound, fold_size
from alibi_core.backend import tolerance_of
from alibi_mlx._attention import attention
from alibi_mlx._compatible import has_newer_kernels
from alibi_mlx._metal import FEW, FOLDED_FEATURES, LOW, choose, kernel_sizes, refusal
from alibi_mlx.check._budget import deviation, factor_roundoff

HEADS, KV_HEADS = 8, 2
WIDE = 160  # features, for which there is no fused kernel


@dataclass(frozen=True)
class Sizes:
    """How long the calls are, in tokens.

    Attributes:
        decoding: Queries of calls that have few, one call each.
        decoding_keys: Their keys.
        queries: Of calls that have many, at most; as many as there are keys, if those are fewer.
        keys: Their keys: the first number that the implementation takes.
        repeats: How often calls are timed.
    """

    decoding: tuple[int, ...]
    decoding_keys: int
    queries: int
    keys: tuple[int, ...]
    repeats: int


SIZES = {  # by device, and by whether it is to be quick
    (mx.gpu, False): Sizes((1, FEW), 8192, 4096, (4096, 2048, 1024, 512, 256, 128), 7),
    (mx.gpu, True): Sizes((1,), 4096, 2048, (2048, 1024, 512, 256, 128), 3),
    (mx.cpu, False): Sizes((1, FEW), 1100, 40, (1100, 512, 256, 128), 3),
    (mx.cpu, True): Sizes((1,), 1100, 40, (1100, 512, 256, 128), 1),
}


@dataclass(frozen=True)
class Outcome:
    """What came of a call.

    Attributes:
        dtype: Of query, key and value.
        q_len: Queries.
        kv_len: Keys.
        head_dim: Features a head.
        implementation: What computed it.
        padded: Features a head that MLX's kernel was given.
        tried: How often MLX was asked for its fused kernel, whatever else it would have chosen: once for each of its
            attention calls. None where it cannot be asked.
        unfused: Why it has none, each reason once, and how often that was.
        error: The largest distance from the reference; None if nothing was computed.
        share: Of the error budget; more than 1 is wrong.
        seconds: That the call takes, the median.
        dense_seconds: That MLX's attention takes with the whole bias as its mask.
        refused: Why the implementation cannot run such a call with this MLX at all.
        raised: An error that there should not have been.
    """

    dtype: str
    q_len: int
    kv_len: int
    head_dim: int
    implementation: str
    padded: int
    tried: int | None = None
    unfused: dict[str, int] | None = None
    error: float | None = None
    share: float | None = None
    seconds: float | None = None
    dense_seconds: float | None = None
    refused: str | None = None
    raised: str | None = None

    @property
    def is_right(self) -> bool:
        """Whether it was computed to within the budget, or for a good reason not at all."""
        return self.refused is not None or (self.raised is None and self.share is not None and self.share <= 1)


def outcomes(device: mx.DeviceType, *, quick: bool) -> Iterator[Outcome]:
    """Yield what comes of the calls on the default device, which is a ``device``."""
    sizes = SIZES[device, quick]
    for few in (True, False):
        heads = kernel_sizes(FEW if few else FEW + 1)
        made = [("tiled", head_dim, (*LOW, mx.float32)) for head_dim in (*heads, WIDE)]
        if not few and has_newer_kernels():
            made = [("folded", head_dim - FOLDED_FEATURES, LOW) for head_dim in heads] + made
        for implementation, head_dim, dtypes in made:
            for dtype in dtypes[-1:] if quick else dtypes:
                for q_len in sizes.decoding if few else (sizes.queries,):
                    kv_lens = (sizes.decoding_keys,) if few else sizes.keys
                    yield outcome(implementation, head_dim, dtype, q_len, kv_lens, sizes.repeats, device)


def outcome(
    implementation: str,
    head_dim: int,
    dtype: mx.Dtype,
    q_len: int,
    kv_lens: tuple[int, ...],
    repeats: int,
    device: mx.DeviceType,
) -> Outcome:
    """Return what comes of one call: causal, with the canonical slopes, the last query at the last key.

    Args:
        implementation: What computes it.
        head_dim: Features a head.
        dtype: Of query, key and value.
        q_len: Queries, at most.
        kv_lens: Keys, the first of these that the implementation takes.
        repeats: How often it is timed.
        device: What the default device is. On ``mx.gpu`` MLX is asked for its fused kernels too.
    """
    for kv_len in kv_lens:
        tensors = _tensors(min(q_len, kv_len), kv_len, head_dim, dtype)
        call = AttentionCall.check(*tensors, HEADS)
        reason = refusal(implementation, call)
        if reason is None:
            break
    name = str(dtype).rpartition(".")[2]
    about = (name, call.q_len, kv_len, head_dim, implementation)
    if reason is not None:
        return Outcome(*about, head_dim, refused=reason)
    padded = choose(call, implementation).head_dim

    def compute() -> mx.array:
        return attention(*tensors, implementation=implementation)

    try:
        tried = asked_for_fused_kernels(compute) if device == mx.gpu and has_newer_kernels() else None
        result = compute()
        mx.eval(result)
        slopes = alibi_core.slopes(HEADS, dtype=np.float64)
        folded = None
        if implementation == "folded":
            bounds = fold_error_bound(slopes, kv_len, head_dim=head_dim, dtype=name, q_len=call.q_len)
            folded = fold_size(kv_len, name), bounds
        tolerance = tolerance_of(call) if folded is None else 0.0
        rounding = {"tolerance": tolerance, "factor_roundoff": factor_roundoff(call.q_len, padded)}
        off = deviation(tensors, result, slopes, folded=folded, **rounding)
        bias = call.bias()[0].astype(dtype)
        mx.eval(bias)

        def with_bias() -> mx.array:
            return mx.fast.scaled_dot_product_attention(*tensors, scale=call.scale, mask=bias)

        seconds = interleaved_medians([compute, with_bias], repeats)
    except Exception as error:  # whatever it is, the other rows are worth a look
        return Outcome(*about, padded, raised=f"{type(error).__name__}: {error}")
    count, unfused = (None, None) if tried is None else (len(tried), {x: tried.count(x) for x in tried if x})
    return Outcome(*about, padded, count, unfused, *off, *seconds)


def asked_for_fused_kernels(compute: Callable[[], mx.array]) -> list[str]:
    """Return why MLX has no fused kernel for what ``compute`` asks of its attention: a reason a call, or "" for one.

    MLX decides by what it is given, so what it is given has to be the very tensors of the implementation. It says so
    before anything is computed.
    """
    plain = mx.fast.scaled_dot_product_attention
    said: list[str] = []

    def forced(*arrays: mx.array, **options: Any) -> mx.array:
        try:
            result = plain(*arrays, **(options | {"force_fused": True}))
        except ValueError as error:
            said.append(str(error).rpartition("is available")[2].lstrip(": ") or str(error))
            return plain(*arrays, **options)
        said.append("")
        return result

    mx.fast.scaled_dot_product_attention = forced
    try:
        compute()
    finally:
        mx.fast.scaled_dot_product_attention = plain
    return said


def interleaved_medians(functions: list[Callable[[], mx.array]], repeats: int) -> list[float]:
    """Return the median seconds that each function takes, called in turn, once before it counts."""
    taken: list[list[float]] = [[] for _ in functions]
    for turn in range(repeats + 1):
        for function, times in zip(functions, taken, strict=True):
            start = time.perf_counter()
            mx.eval(function())
            if turn > 0:
                times.append(time.perf_counter() - start)
    return [statistics.median(times) for times in taken]


def _tensors(q_len: int, kv_len: int, head_dim: int, dtype: mx.Dtype) -> tuple[mx.array, mx.array, mx.array]:
    rng = np.random.default_rng(0)
    shapes = ((HEADS, q_len), (KV_HEADS, kv_len), (KV_HEADS, kv_len))
    arrays = (rng.standard_normal((1, *shape, head_dim), np.float32) for shape in shapes)
    query, key, value = (mx.array(x).astype(dtype) for x in arrays)
    return query, key, value
