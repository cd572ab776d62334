"""The calls that :mod:`alibi_mlx.check` makes: at each head size that Metal's fused kernels take, and a larger one."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from alibi_core import AttentionCall, fold_error_bound, fold_size
from alibi_core.backend import install_hint, tolerance_of
from alibi_mlx._attention import attention
from alibi_mlx._metal import FEW, FOLDED_FEATURES, LOW, Kernels, choose, refusal

try:
    from alibi_core.conformance import Attention
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"alibi_mlx.check needs {error.name}; {install_hint('conformance')}") from error

HEADS, KV_HEADS = 8, 2
WIDE = 160  # features, for which there is no fused kernel
ROWS = 128  # queries compared at a time, which bounds the memory
U = 2.0**-24  # unit roundoff of float32, in which scores and sums are
TF32 = 2.0**-11  # and of what tensor units may round factors to

Values = np.ndarray[Any, Any]
Tensors = tuple[mx.array, mx.array, mx.array]


@dataclass(frozen=True)
class Call:
    """A causal call with the canonical slopes, the last query at the last key."""

    implementation: str
    head_dim: int
    dtype: mx.Dtype
    q_len: int  # as many as there are keys, if those are fewer
    kv_lens: tuple[int, ...]  # the first of these that the implementation takes


def calls(kernels: Kernels, *, quick: bool, longest: int) -> Iterator[Call]:
    """Yield the calls to make: of few queries, which decode, and of many."""
    on_gpu = kernels.device == mx.gpu
    halves = (4096, 2048, 1024, 512, 256, 128) if on_gpu else (1100, 512, 256, 128)
    kv_lens = tuple(n for n in halves[quick and on_gpu :] if n <= longest) or (longest,)
    many = (kv_lens[0] if on_gpu else 40,), kv_lens
    decoding_keys = min(longest, (4096 if quick else 8192) if on_gpu else 1100)
    few = (1,) if quick else (1, FEW), (decoding_keys,)
    for (q_lens, keys), queries in ((few, FEW), (many, FEW + 1)):
        heads = kernels.head_dims(queries)
        made = [("tiled", head_dim, (*LOW, mx.float32)) for head_dim in (*heads, WIDE)]
        if queries > FEW and kernels.newer:
            made = [("folded", head_dim - FOLDED_FEATURES, LOW) for head_dim in heads] + made
        for implementation, head_dim, dtypes in made:
            for dtype in dtypes[-1:] if quick else dtypes:
                for q_len in q_lens:
                    yield Call(implementation, head_dim, dtype, q_len, keys)


@dataclass(frozen=True)
class Outcome:
    """What came of a call."""

    dtype: str
    q_len: int
    kv_len: int
    head_dim: int
    implementation: str
    padded: int  # features a head that MLX's kernel was given
    tried: int | None = None  # how many attention calls MLX was asked for a fused kernel for, where it can be asked
    unfused: dict[str, int] | None = None  # why it has none, and how often
    error: float | None = None  # the largest distance from the reference, if all is finite
    share: float | None = None  # of the error budget; more than 1 is wrong
    seconds: float | None = None  # the median
    dense_seconds: float | None = None  # that MLX's attention takes with the whole bias as its mask
    refused: str | None = None  # why the implementation cannot run such a call with this MLX at all
    raised: str | None = None  # an error that there should not have been

    @property
    def is_right(self) -> bool:
        """Whether it was computed to within the budget, or for a good reason not at all."""
        return self.refused is not None or (self.raised is None and self.share is not None and self.share <= 1)


def outcome(made: Call, kernels: Kernels, repeats: int) -> Outcome:
    """Return what comes of a call, timed so often. On ``mx.gpu`` MLX is asked for its fused kernels too."""
    for kv_len in made.kv_lens:
        tensors = _tensors(min(made.q_len, kv_len), kv_len, made.head_dim, made.dtype)
        call = AttentionCall.check(*tensors, HEADS)
        reason = refusal(made.implementation, call)
        if reason is None:
            break
    about = (str(made.dtype).rpartition(".")[2], call.q_len, kv_len, made.head_dim, made.implementation)
    if reason is not None:
        return Outcome(*about, made.head_dim, refused=reason)
    padded = choose(call, made.implementation, kernels=kernels).head_dim

    def compute() -> mx.array:
        return attention(*tensors, implementation=made.implementation)

    try:
        tried = asked_for_fused_kernels(compute) if kernels.device == mx.gpu and kernels.newer else None
        result = compute()
        error, share = deviation(tensors, result, call, made.implementation, factor_roundoff(call.q_len, padded))
        bias = call.bias()[0].astype(made.dtype)
        mx.eval(bias)

        def with_bias() -> mx.array:
            return mx.fast.scaled_dot_product_attention(*tensors, scale=call.scale, mask=bias)

        seconds = interleaved_medians([compute, with_bias], repeats)
    except Exception as error:  # whatever it is, the other rows are worth a look
        return Outcome(*about, padded, raised=f"{type(error).__name__}: {error}")
    count, unfused = (None, None) if tried is None else (len(tried), {x: tried.count(x) for x in tried if x})
    return Outcome(*about, padded, count, unfused, error, share, *seconds)


def deviation(
    tensors: Tensors, result: mx.array, call: AttentionCall, implementation: str, factor_roundoff: float
) -> tuple[float | None, float | None]:
    """Compare a causal result, whose last query is at the last key, with the exact one, within the kit's budget.

    What the kit does not know of, folding and tensor units, may move a score by ``e`` besides. That multiplies each
    weight by a factor between ``exp(-2 e)`` and ``exp(2 e)``. The factors of weights and values are rounded, too.

    Returns:
        The largest distance of an element from the exact result, and the largest part of its budget that an element
        takes up: more than 1 is wrong. None if an element is not finite.
    """
    dtype = str(call.dtype).rpartition(".")[2]
    query, key, value, actual = (np.asarray(x.astype(mx.float32)).astype(np.float64) for x in (*tensors, result))
    if not np.isfinite(actual).all():
        return None, None
    slopes = np.asarray(call.slopes).astype(np.float64)
    features, bounds, tolerance = 0, np.zeros(call.num_heads), tolerance_of(call)
    if implementation == "folded":
        bounds = fold_error_bound(slopes, call.kv_len, head_dim=call.head_dim, dtype=dtype, q_len=call.q_len)
        features, tolerance = fold_size(call.kv_len, dtype), 0.0
    longest = np.linalg.norm(key, axis=-1).max()
    error, share = 0.0, 0.0
    for start in range(0, call.q_len, ROWS):
        queries, found = (x[:, :, start : start + ROWS] for x in (query, actual))
        back = call.q_offset + start + np.arange(queries.shape[2])[:, None] - np.arange(call.kv_len)
        bias = np.where(back >= 0, -slopes[:, None, None] * back, -np.inf)[None]
        exact = Attention(queries, key, value, bias, call.scale, dtype).output_without(tolerance)
        products = call.scale * np.linalg.norm(queries, axis=-1, keepdims=True) * longest
        moved = bounds[:, None, None] + (features * U + 2 * factor_roundoff) * products
        budget = exact.budget + 2 * (np.expm1(2 * moved) + factor_roundoff) * np.abs(value).max()
        distance = np.abs(found - exact.value)
        error, share = max(error, float(distance.max())), max(share, float((distance / budget).max()))
    return error, share


def factor_roundoff(q_len: int, head_dim: int) -> float:
    """Return by how much, relatively, MLX rounds float32 factors in attention of such a shape on the default device.

    Tensor units may round them to TF32, which ``MLX_ENABLE_TF32=0`` forbids. A mean of values ``1 + 2**-12``, which
    TF32 takes for 1, tells.
    """
    query, key = mx.zeros((1, 1, q_len, head_dim)), mx.zeros((1, 1, 64, head_dim))
    out = mx.fast.scaled_dot_product_attention(query, key, key + (1 + 2.0**-12), scale=1.0)
    return 0.0 if mx.min(out).item() > 1 + 2.0**-13 else TF32


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


def _tensors(q_len: int, kv_len: int, head_dim: int, dtype: mx.Dtype) -> Tensors:
    rng = np.random.default_rng(0)
    shapes = ((HEADS, q_len), (KV_HEADS, kv_len), (KV_HEADS, kv_len))
    query, key, value = (mx.array(rng.standard_normal((1, *x, head_dim), np.float32)).astype(dtype) for x in shapes)
    return query, key, value
