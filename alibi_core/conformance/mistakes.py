"""The catalogue of known mistakes: each has a name, a sentence, and changes to the values of reference steps.

The catalogue serves three purposes: diagnosis of an implementation, adapters with mistakes (:class:`Mistaken`), and
tests that the kit finds each mistake.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np

from alibi_core._slopes import slope_values
from alibi_core.conformance.oracle import rounded
from alibi_core.conformance.reference import LAWS, Change, Mistake, Values

LN2 = math.log(2)
BLOCKS = (8, 16, 32, 64, 128, 256)
CATALOGUE: dict[str, Mistake] = {}


def mistake(name: str, sentence: str, **changes: Change) -> None:
    """Add a mistake, with ``change(computation, value)`` for each changed step of reference.py.

    The change of ``slope_list`` gets the number of heads in place of the computation.
    """
    assert name not in CATALOGUE, name
    CATALOGUE[name] = Mistake(name, sentence, changes, is_noisy=name.endswith((" scores", " products")))


def each(numbers: Iterable[Any], name: str, sentence: str, **changes: Callable[[Any, Any, Any], Any]) -> None:
    """Add a mistake for each number or dtype, with ``change(computation, value, number)`` for each changed step."""
    for n in numbers:
        bound = {step: (lambda c, x, n=n, f=change: f(c, x, n)) for step, change in changes.items()}
        mistake(name.format(n), sentence.format(n), **bound)


def listed(name: str, sentence: str, rule: Callable[[int], Any]) -> None:
    """Add a wrong rule of slopes, ``rule(num_heads)``; it also replaces slopes that the caller gives."""
    mistake(name, sentence, slope_list=lambda n, x: rule(n), slopes=lambda c, x: rule(c.num_heads) + 0 * x)


def remade(name: str, sentence: str, change: Callable[[Values], Values]) -> None:
    """Add a change of slopes ``[..., num_heads]``: of the adapter's own slopes and of slopes that the caller gives."""
    steps = ("slope_list", "slopes", "future_slopes")
    mistake(name, sentence, **dict.fromkeys(steps, lambda c, x: change(x)))


def canonical(n: int, **options: Any) -> Values:
    """Return the right slopes of ``n`` heads."""
    return np.asarray(slope_values(n, **options))


def unseen(c: Any) -> Values:
    """Return the mask of fully masked queries, ``[..., q_len, 1]``."""
    return np.asarray(~np.broadcast_to(c.visible, c.scores.shape).any(axis=-1, keepdims=True))


def never_rescaled(c: Any, size: int) -> Values:
    """Return exp(score - running maximum), with the maximum over all blocks up to the key's own, never rescaled."""
    ends = np.minimum((np.arange(c.kv_len) // size + 1) * size, c.kv_len) - 1
    highest = np.maximum.accumulate(c.hidden, axis=-1)[..., ends]
    return np.asarray(np.exp(c.hidden - np.where(np.isfinite(highest), highest, 0.0)))


def padded(c: Any, x: Values, n: int) -> Values:
    """Return keys or values zero-padded to a multiple of ``n`` tokens; unchanged with a mask, segments or gates."""
    if c.mask is not None or c.segment_ids is not None or c.log_gates is not None:
        return x
    return np.pad(x, ((0, 0), (0, 0), (0, -x.shape[2] % n), (0, 0)))


def subtracted(c: Any, x: Values) -> Values:
    """Return sums of gates as differences of float32 sums from the start; those behind a closed gate stay -inf."""
    sums = rounded(np.cumsum(np.where(c.gates == -np.inf, 0.0, c.gates), axis=-1), "float32")[:, :, None]
    at = np.broadcast_to(np.clip(c.q_positions, 0, c.kv_len - 1), (*x.shape[:3], 1))
    return np.where(x == -np.inf, x, np.take_along_axis(np.broadcast_to(sums, x.shape), at, axis=-1) - sums)


def appended(c: Any) -> bool:
    """Return whether this step fills a page of eight tokens of the cache."""
    return bool(c.before) and c.before // 8 < c.key.shape[2] // 8


# Not formatted: one line for the sentence and one for the change is easier to read.
# fmt: off

# --- Slopes -----------------------------------------------------------------------------------------------------------

listed("geometric slopes", "Slopes follow the geometric scheme, 2**(-8 (h+1) / num_heads) for any number of heads, "
       "which is canonical for powers of two alone.", lambda n: canonical(n, scheme="geometric"))
mistake("canonical slopes", "The slopes given are ignored: it uses the canonical ones of as many heads as it sees. "
        "Under tensor parallelism that is the local count: pass slopes(num_heads)[shard] instead.",
        slopes=lambda c, x: canonical(c.num_heads) + 0 * x)
listed("canonical slopes from 1", "Slopes of the largest power of two of heads start at 1: the head index is off by "
       "one.", lambda n: np.concatenate([2.0 ** (-8 * np.arange(p := 1 << n.bit_length() - 1) / p), canonical(n)[p:]]))
listed("slopes of the next power of two", "Head counts that are no power of two have the first slopes of the next one.",
       lambda n: canonical(1 << (n - 1).bit_length())[:n])
mistake("negated slopes", "They are negative: distance would be rewarded, where -slope * distance is added.",
        slope_list=lambda n, x: -x)
remade("sorted slopes", "Slopes are sorted, steepest first: for head counts that are no power of two, heads get one "
       "another's.", lambda x: -np.sort(-x))
remade("reversed slopes", "Slopes are in the opposite order of heads.", lambda x: x[..., ::-1])
remade("next head's slope", "Each head has the slope of the next one: the head index is off by one.",
       lambda x: np.roll(x, -1, axis=-1))
for _dtype in ("bfloat16", "float16"):
    remade(f"{_dtype} slopes", f"Slopes are rounded to {_dtype}: keep them in float32.", partial(rounded, dtype=_dtype))
mistake("slopes by kv head", "Slopes are looked up by the key/value head: head h takes slopes[h // group] instead of "
        "slopes[h].", slopes=lambda c, x: x[:, np.arange(c.num_heads) // c.group])
mistake("first batch slopes", "All batch entries have the first one's slopes.",
        slopes=lambda c, x: x[:1] + 0 * x)
each((8, 16, 32, 64), "heads beyond: {}", "Results are wrong with more than {} heads: these have the slopes of those "
     "before.", slopes=lambda c, x, n: x[:, np.arange(c.num_heads) % n],
     slope_list=lambda heads, x, n: x if heads <= n else np.resize(canonical(n), heads))

# --- The bias ---------------------------------------------------------------------------------------------------------

mistake("bias lost", "There is no bias: all distances count the same.", bias=lambda c, x: 0 * x)
mistake("negated bias", "The sign of the bias is flipped: distance is rewarded. Subtract slope * distance.",
        bias=lambda c, x: -x)
mistake("bias scaled", "The bias is multiplied by scale (divided by sqrt(head_dim)): add it after scaling the scores.",
        bias=lambda c, x: x * c.scale)
mistake("bias doubled", "The bias is twice what it should be: it is added twice, or as a mask and as a bias.",
        bias=lambda c, x: 2 * x)
mistake("bias in base 2", "The bias is multiplied by ln 2: scores are in base 2, the bias is not. Multiply it by "
        "log2(e) too.", bias=lambda c, x: x * LN2)
mistake("signed", "Future keys are rewarded: the bias is signed, slope * (j - i), or key-only, slope * j, which is "
        "right under a causal mask alone. Use -slope * abs(i - j).", bias=lambda c, x: c.rate * c.ahead)
mistake("signed: key-only", "Future keys are rewarded: the bias is key-only, slope * j, which is right under a causal "
        "mask alone. Use -slope * abs(i - j).", bias=lambda c, x: c.rate * c.k_positions)
mistake("clamped", "Future distances count 0 though they should count like past ones: the bias is clamped.",
        future=lambda c, x: 0 * x)
mistake("future slopes ignored", "future_slopes are ignored: keys on both sides have the slopes of the past.",
        future=lambda c, x: c.slopes[..., None, None])
mistake("future slopes of 0 ignored", "future_slopes that are all 0 are ignored, as if not given: keys on both sides "
        "have the slopes of the past.", future=lambda c, x: x if np.any(x) else c.slopes[..., None, None])
each((*BLOCKS, 127, 512, 1024, 2047), "distance clipped: {}", "Distances are clipped at {}: keys farther away are "
     "penalised no more.", distance=lambda c, x, n: np.minimum(x, n))
each(("bfloat16", "float16"), "{} positions", "Positions are rounded to {}: form distances of integers, or in float32.",
     ahead=lambda c, x, n: rounded(c.k_positions, n) - rounded(c.q_positions, n))
each(("bfloat16", "float16"), "{} distances", "Distances are rounded to {}: keep them in float32.",
     distance=lambda c, x, n: rounded(x, n))
each(("bfloat16", "float16"), "{} bias", "The bias is rounded to {} (in distance form): add it in float32.",
     bias=lambda c, x, n: rounded(x, n))
for _how, _steps in (("added", ("bias", "scores")), ("fused", ("scores",))):  # products and sums rounded, or sums alone
    mistake(f"float32 bias far away: {_how}", "The bias is added in float32 at its full size and loses the digits of "
            "scores far away: count distances from the row's nearest key.",
            **dict.fromkeys(_steps, lambda c, x: rounded(x, "float32")))

# --- Positions of queries ---------------------------------------------------------------------------------------------

mistake("top-left", "Queries are aligned to the top left (the first query at the first key), whatever q_offset says; a "
        "KV cache needs kv_len - q_len.", q_offset=lambda c, x: 0 * x)
mistake("bottom-right", "Queries are aligned to the bottom right (the last query at the last key), whatever q_offset "
        "says.", q_offset=lambda c, x: 0 * x + c.kv_len - c.q_len)
mistake("bias top-left", "The bias counts queries from the first key, whatever q_offset says; the mask is right.",
        ahead=lambda c, x: x + c.q_offset)
mistake("offset one more", "Queries are one token too far on: q_offset is off by one.", q_offset=lambda c, x: x + 1)
mistake("offset one less", "Queries are one token too far back: q_offset is off by one.", q_offset=lambda c, x: x - 1)
mistake("first batch offset", "Queries are placed by the first batch entry's q_offset for all.",
        q_offset=lambda c, x: x[:1] + 0 * x)
mistake("offset 0 as none", "Queries are aligned to the bottom right where q_offset is 0: 0 counts as not given.",
        q_offset=lambda c, x: np.where(x == 0, c.kv_len - c.q_len, x))

# --- Visibility of keys -----------------------------------------------------------------------------------------------

mistake("causal hides own key", "The causal mask hides each query's own key: it must hide j > i, not j >= i.",
        causal=lambda c, x: c.k_positions < c.q_positions)
mistake("causal sees the next key", "The causal mask lets each query see one key too many, the next.",
        causal=lambda c, x: c.k_positions <= c.q_positions + 1)
mistake("causal ignored", "There is no causal mask: future keys are seen.", is_causal=lambda c, x: False)
mistake("always causal", "Attention is causal although is_causal=False.", is_causal=lambda c, x: True)
mistake("index in place of position", "Tokens stand at their index: positions are ignored.",
        positions=lambda c, x: tuple(np.zeros((*t.shape[:2], 1)) + np.arange(t.shape[1])[:, None] for t in x))
mistake("axes of points swapped", "Dimensions of the queries' positions are in the opposite order to the keys'.",
        positions=lambda c, x: (x[0][..., ::-1], x[1]))
mistake("squared Euclidean distance", "The Euclidean distance is squared: its root is missing.",
        distance=lambda c, x: x**2 if c.positions is not None and c.metric == "euclidean" else x)
mistake("law after the slope", "The law is taken of the slope times the distance: it is the distance's alone.",
        bias=lambda c, x: x if c.law == "linear" else -LAWS[c.law](c.rate * c.distance))
mistake("NaN of a token without a position", "A token whose position is NaN spreads it: its distance to others is 0.",
        nowhere=lambda c, x: np.zeros_like(x))
mistake("law ignored", "The law is ignored: the penalty is linear in the distance.", penalty=lambda c, x: c.distance)
mistake("window ignored", "window_size is ignored.", window_size=lambda c, x: None)
mistake("window one less", "The window is one key too short: distances up to window_size are to be seen, window_size "
        "included.", window_size=lambda c, x: x - 1)
mistake("window one more", "The window is one key too long.", window_size=lambda c, x: x + 1)
mistake("window halved", "The window is half as wide as it should be: window_size counts the keys of each side.",
        window_size=lambda c, x: x // 2)
mistake("window 0 as none", "A window_size of 0 is ignored, as if no window were given: it lets the query's own "
        "position be seen.", window_size=lambda c, x: x or None)
mistake("window on past side only", "The window limits past keys only: its future side is ignored.",
        window=lambda c, x: c.q_positions - c.k_positions <= c.window_size)
mistake("window or segments", "Window and segments are joined by or: a key must be in both.",
        window=lambda c, x: x if c.segment_ids is None else x | (c.q_ids == c.kv_ids),
        segments=lambda c, x: x if c.window_size is None else c.window)
mistake("segments ignored", "segment_ids are ignored: packed sequences see one another.",
        segment_ids=lambda c, x: None)
mistake("mask ignored", "mask is ignored.", mask=lambda c, x: None)
mistake("mask inverted", "mask is inverted: True must let a key be seen.", mask=lambda c, x: ~x)
mistake("mask of first head", "All heads have the first one's mask.", mask=lambda c, x: x[:, :1])
each((10, 100, 1000, 10_000), "mask finite: {}", "What the mask hides is not hidden: its score is lowered by {}, which "
     "large scores outweigh. Use minus infinity.", masked=lambda c, x, n: np.ones_like(x),
     scores=lambda c, x, n: x if c.mask is None else x - n * ~c.mask)
mistake("NaN where nowhere to look", "Queries that see no key get NaN: the softmax divides 0 by 0. Give zeros.",
        **dict.fromkeys(("weights", "output"), lambda c, x: np.where(unseen(c), np.nan, x)))
mistake("mean where nowhere to look", "Queries that see no key get the mean of all values: masked scores are finite "
        "and all the same. Give zeros.", weights=lambda c, x: np.where(unseen(c), 1 / max(c.kv_len, 1), x))

# --- Forget gates -----------------------------------------------------------------------------------------------------

mistake("key's own gate counted", "The key's own gate counts for it, too: sums of gates are off by one. They begin at "
        "the next token.", forgotten=lambda c, x: x + c.gates[:, :, None],
        d_log_gates=lambda c, x: x + c.is_token * (c.counted * c.d_scores).sum(axis=2))
mistake("query's gate left out", "The query's own gate is left out: sums of gates go up to it, and hold it.",
        counted=lambda c, x: c.k_positions < c.q_positions)
mistake("gates summed from the start", "Sums of gates are differences of float32 sums from the start, which lose the "
        "digits of what was forgotten last: sum from a near token, or in float64.", forgotten=subtracted)
mistake("next head's gates", "Each head has the gates of the next one: the head index is off by one.",
        log_gates=lambda c, x: np.roll(x, -1, axis=1), d_log_gates=lambda c, x: np.roll(x, 1, axis=1))
mistake("gates without logarithm", "A gate f is added in place of its logarithm: add log f, log_sigmoid of the logit.",
        log_gates=lambda c, x: np.exp(x), d_log_gates=lambda c, x: x * c.log_gates)

# --- Heads, the scale, the softmax ------------------------------------------------------------------------------------

mistake("grouped heads interleaved", "Query head h reads key/value head h % num_kv_heads; it must be "
        "h // (num_heads // num_kv_heads).", kv_head=lambda c, x: np.arange(c.num_heads) % c.num_kv_heads)
mistake("heads and tokens mixed", "The result is the right one in [batch, length, heads, head_dim], reshaped where it "
        "must be transposed.", output=lambda c, x: x.swapaxes(1, 2).reshape(x.shape))
mistake("scale missing", "Products of query and key are not scaled.", scale=lambda c, x: 1.0)
mistake("scaled twice", "Scores are scaled twice.", scale=lambda c, x: x * x)
mistake("scale ignored", "scale is ignored: it uses 1 / sqrt(head_dim).", scale=lambda c, x: c.head_dim**-0.5)
mistake("scale 0 as none", "A scale of 0 is ignored, as if none were given.", scale=lambda c, x: x or c.head_dim**-0.5)
each((32,), "scale ignored beyond: {}", "scale is ignored in rows of more than {} keys: it uses 1 / sqrt(head_dim).",
     scale=lambda c, x, n: x if c.kv_len <= n else c.head_dim**-0.5)
mistake("softmax in base 2", "The softmax is in base 2: multiply scores and bias by log2(e).",
        scores=lambda c, x: x * LN2)
mistake("extra 1 in softmax", "The softmax has an extra 1 in its denominator (a sink that takes weight): weights do "
        "not sum to 1.",
        total=lambda c, x: x + np.exp(-c.highest))
mistake("no maximum in softmax", "The softmax does not subtract the row's largest score: it overflows, or divides 0 by "
        "0.", exponentials=lambda c, x: np.exp(c.hidden.astype(np.float32)),
        weights=lambda c, x: c.exponentials / c.total)
each(BLOCKS, "values not rescaled: {}", "The online softmax does not rescale its sum of values when a later block of "
     "{} keys scores higher.", weights=lambda c, x, n: never_rescaled(c, n) / np.where(c.total > 0, c.total, 1))
each(BLOCKS, "denominator not rescaled: {}", "The online softmax does not rescale its denominator when a later block "
     "of {} keys scores higher.", total=lambda c, x, n: never_rescaled(c, n).sum(axis=-1, keepdims=True))

# --- The keys that take part, and sizes beyond which something is wrong -----------------------------------------------

mistake("last key missing", "The last key never takes part.", keys=lambda c, x: np.arange(c.kv_len) < c.kv_len - 1)
each(BLOCKS, "last partial block dropped: {}", "The last block of keys is dropped where it has fewer than {}: round "
     "the number of blocks up.", keys=lambda c, x, n: np.arange(c.kv_len) < c.kv_len // n * n)
each(BLOCKS, "diagonal block dropped: {}", "A query does not see keys of its own block of {}: the loop ends before the "
     "block on the diagonal.", keys=lambda c, x, n: c.k_positions // n < c.q_positions // n)
each(BLOCKS, "keys capped: {}", "Only the first {} keys take part.", keys=lambda c, x, n: np.arange(c.kv_len) < n)
each(BLOCKS, "last partial block dropped after others: {}", "The last block of keys is dropped where it has fewer than "
     "{} and others come before it: round the number of blocks up.",
     keys=lambda c, x, n: np.arange(c.kv_len) < max(c.kv_len // n, 1) * n)
each(BLOCKS, "horizon too short: {}", "Keys {} tokens away or farther weigh nothing.",
     keys=lambda c, x, n: np.abs(c.ahead) < n)
each((128, 256, 512, 1024, 2048), "key lost beyond: {}", "In rows of more than {} tokens a key is lost.",
     keys=lambda c, x, n: x & ((c.kv_len <= n) | (np.arange(c.kv_len) != (c.kv_len - 1) // 16 * 16)))
each(BLOCKS, "padding counted: {}", "Keys are padded with zeros to a multiple of {}, and these count.", key=padded,
     value=padded)
each((64, 128, 256), "features beyond: {}", "Results are wrong with more than {} features a head: the rest is left out "
     "of scores.", products=lambda c, x, n: c.query[..., :n] @ c.keys_by_head[..., :n].swapaxes(-1, -2))
mistake("features beyond a multiple of 8", "Features beyond a multiple of 8 are left out of scores.",
        products=lambda c, x: x if c.head_dim < 8 else
        c.query[..., : c.head_dim // 8 * 8] @ c.keys_by_head[..., : c.head_dim // 8 * 8].swapaxes(-1, -2))
each((8, 16, 64), "batch entries beyond: {}", "Results are wrong with more than {} batch entries: these read the keys "
     "of those before.", key=lambda c, x, n: x[np.arange(c.batch) % n])
for _dtype in ("bfloat16", "float16"):  # noisy: rounded sums depend on an unknown order of addition
    for _step, _what in (("scores", "Scores"), ("products", "Products of query and key")):
        mistake(f"{_dtype} {_step}", f"{_what} are rounded to {_dtype}: keep them in float32.",
                **{_step: lambda c, x, dtype=_dtype: rounded(x, dtype)})

# --- Gradients --------------------------------------------------------------------------------------------------------

mistake("slope gradient zero", "The gradient of slopes is zero: they are not trained.", d_slopes=lambda c, x: 0 * x)
mistake("slope gradient of the right bias", "The gradient of slopes is that of the right bias: mend the bias alone.",
        d_slopes=lambda c, x: -(c.d_scores * c.rate * c.penalty).sum(axis=(2, 3)))
mistake("slope gradient negated", "The gradient of slopes has the wrong sign: the bias is minus slope times distance.",
        d_slopes=lambda c, x: -x)
mistake("slope gradient scaled", "The gradient of slopes is multiplied by scale, which the bias is not.",
        d_slopes=lambda c, x: x * c.scale)
mistake("slope gradient of logarithms", "The gradient of slopes is multiplied by the slopes: it is that of their "
        "logarithms.", d_slopes=lambda c, x: x * c.rates)
mistake("slope gradient averaged", "The gradient of slopes is averaged over the batch instead of summed.",
        d_shared_slopes=lambda c, x: x / c.batch)
mistake("slope gradient of first batch entry", "The gradient of slopes is the first batch entry's alone: sum it over "
        "the batch.", d_shared_slopes=lambda c, x: c.d_slopes[0])
for _name in ("query", "key"):
    for _how, _what, _change in (
        ("unscaled", "not multiplied by scale", lambda c, x: x / c.scale),
        ("scaled twice", "multiplied by scale twice", lambda c, x: x * c.scale),
        ("times ln 2", "multiplied by ln 2: it is that of scores in base 2", lambda c, x: x * LN2),
        ("zero", "zero", lambda c, x: 0 * x),
    ):
        mistake(f"{_name} gradient {_how}", f"The gradient of {_name} is {_what}.", **{f"d_{_name}": _change})
mistake("delta missing", "The row mean (delta, sum of output times its gradient) is not subtracted from the gradient "
        "of weights.", delta=lambda c, x: 0 * x)
mistake("NaN gradient where nowhere to look", "The gradient of queries that see no key is NaN, and spreads.",
        d_scores=lambda c, x: np.where(unseen(c), np.nan, x))
for _name, _what, _change in (
    ("group's first gradient", "those of the group's first query head: sum them over the group",
     lambda c, x: x * (np.arange(c.num_heads) % c.group == 0)[:, None, None]),
    ("group's last gradient", "those of the group's last query head, which overwrites the others: sum them",
     lambda c, x: x * (np.arange(c.num_heads) % c.group == c.group - 1)[:, None, None]),
    ("group's mean gradient", "averaged over the group's query heads instead of summed", lambda c, x: x / c.group),
    ("group's gradients interleaved", "summed over the wrong query heads, as if groups were interleaved",
     lambda c, x: x[:, np.argsort(np.arange(c.num_heads) % c.num_kv_heads, kind="stable")]),
):
    mistake(_name, f"Gradients of key and value are {_what}.", d_key_by_head=_change, d_value_by_head=_change)

# --- Caches, and state between calls ----------------------------------------------------------------------------------

mistake("previous keys forgotten", "New tokens see one another alone: the cache is not used.",
        keys=lambda c, x: x if c.before is None else x & (np.arange(c.kv_len) >= c.before))
each((5, 64, 128), "cache holds the last: {}", "The cache holds the last {} tokens.",
     kept=lambda c, x, n: x[:, :, -n:])
mistake("token lost as the cache grows", "The cache grows by eight tokens at a time, and loses the last one that it "
        "held.", kept=lambda c, x: np.delete(x, c.before - 1, axis=2) if appended(c) else x)
mistake("batch mixed as the cache grows", "The cache grows by eight tokens at a time, and mixes up batch entries.",
        kept=lambda c, x: np.roll(x, 1, axis=0) if appended(c) else x)
mistake("stale cache", "Sequences see the keys of one another: there is one cache for all. Keep it in the cache that "
        "is returned.", held=lambda c, x: c.state["cache"] if c.before else x)
for _step in ("slopes", "is_causal", "scale", "window_size", "mask", "visible", "bias"):
    mistake(f"stale {_step}", f"A call gets the {_step} of an earlier one of the same sizes: the bias, or what it is "
            f"made from, is kept by sizes alone. Keep it by {_step} too, or not at all.",
            **{_step: lambda c, x, s=_step: c.state.setdefault((s, c.batch, c.num_heads, c.q_len, c.kv_len), x)})

# --- A contract that a bias may follow --------------------------------------------------------------------------------

mistake("bloom contract", "This is the bias of the bloom contract, slope * j, which a causal softmax cannot tell from "
        "the full one: they differ by a constant of each row. Declare contract = 'bloom' if that is meant.",
        list_bias=lambda c, x: np.where(c.visible, c.rate * c.k_positions, -np.inf))
# fmt: on

MISTAKES: Mapping[str, str] = {name: x.sentence for name, x in CATALOGUE.items()}
