"""The catalogue of the bias: what it is multiplied by, how it grows with distance, and how it is rounded."""

from __future__ import annotations

from alibi_core.conformance._diagnosis._departures.departure import (
    BLOCKS,
    Departure,
    in_low_precision,
    make,
    numbered,
    table,
)

FAR_AWAY = "float32 scores far away"

_FACTOR = {
    "bias lost": "There is no bias: all distances count the same.",
    "negated bias": "The sign of the bias is flipped: distance is rewarded. Subtract slope * distance.",
    "bias scaled": "The bias is multiplied by scale (divided by sqrt(head_dim)): add it after scaling the scores.",
    "bias scaled twice": "The bias is multiplied by scale twice (divided by head_dim): it must not be scaled.",
    "bias scaled by default": "The bias is divided by sqrt(head_dim), whatever the scale: it must not be scaled.",
    "bias scaled up": "The bias is divided by scale (multiplied by sqrt(head_dim)): it must not be scaled.",
    "bias scaled by d_model": "The bias is divided by sqrt(num_heads * head_dim): it must not be scaled.",
    "bias over head_dim": "The bias is divided by head_dim.",
    "bias in base 2": "The bias is multiplied by ln 2: scores are in base 2, the bias is not. Multiply it by log2(e) "
    "too.",
    "bias times log2 e": "The bias is multiplied by log2(e), which a softmax in base e must not have.",
    "bias halved": "The bias is half of what it should be.",
    "bias doubled": "The bias is twice what it should be: it is added twice, or as a mask and as a bias.",
    "bias over kv_len": "The bias is divided by the number of keys: distances are normalised.",
    "bias over num_heads": "The bias is divided by the number of heads.",
    "bias summed over the group": "The bias is added once for every query head of a group.",
}
FACTORS = table("factor", _FACTOR)

_SIGNED = {
    "signed": ": the bias is signed, slope * (j - i), or key-only, slope * j, which is right under a causal mask "
    "alone. Use -slope * abs(i - j).",
    "key only": ": the bias is key-only, slope * j, which is right under a causal mask alone. Use -slope * abs(i - j).",
    "centred key only": ": the bias is key-only, slope * (j - (kv_len - 1)), which is right under a causal mask alone. "
    "Use -slope * abs(i - j).",
    "signed, of its own slope": " by their own slope: the bias is signed. Use abs(i - j).",
}
_CLIPPED = {"distance clipped": "Distances are clipped at {}: keys farther away are penalised no more."}

# Of any size; then those that come by a number.
_DISTANCE = {
    "clamped": "Future distances count 0 though they should count like past ones: the bias is clamped.",
    "past clamped": "Past distances count 0: the difference has the wrong sign before it is clamped.",
    "future slopes ignored": "future_slopes are ignored: keys on both sides have the slopes of the past.",
    "future slopes of 0 ignored": "future_slopes that are all 0 are ignored, as if not given: keys on both sides have "
    "the slopes of the past.",
    "future slopes swapped": "Slopes and future_slopes are swapped: past keys have the future's.",
    "future slopes for all": "future_slopes are used for past keys too.",
    "squared distance": "The bias grows with the square of the distance.",
    "root of distance": "The bias grows with the square root of the distance.",
    "log distance": "The bias grows with log(1 + distance).",
    "log2 distance": "The bias grows with log2(1 + distance).",
    "int8 positions": "Positions wrap around at 128: they are held in int8.",
    "distances one more": "All distances but that of the own key count one token too many.",
    "future one farther": "Future keys count one token farther than they are.",
    "future one nearer": "Future keys count one token nearer than they are.",
}
DISTANCES = [
    *(make("signed", f"Future keys are rewarded{how}", distance=(kind, 0)) for kind, how in _SIGNED.items()),
    *numbered("distance", _DISTANCE),
]
NUMBERED_DISTANCES = [
    *numbered(
        "distance",
        {
            "distance in blocks": "Distances are counted in blocks of {} tokens.",
            "key positions restart": "Positions of keys restart every {} keys: the start of the block is missing.",
            "query positions restart": "Positions of queries restart every {} queries: the start of the block is "
            "missing.",
            "positions restart": "Positions of keys and queries restart every {}: the start of the block is missing.",
            "distance in steps": "Distances are rounded down to multiples of {}.",
        }
        | _CLIPPED,
        (2, 4, *BLOCKS),
    ),
    *numbered("distance", _CLIPPED, (127, 255, 511, 512, 1023, 1024, 2047, 2048, 4095)),
]

_ROUNDING = {
    "positions": "Positions are rounded to {}: form distances of integers, or in float32.",
    "distances": "Distances are rounded to {}: keep them in float32.",
    "bias": "The bias is rounded to {} (in distance form): add it in float32.",
    "key-only bias": "The bias is in key-only form, slope * j, rounded to {}, which loses what is small next to it: "
    "use distances, or count from the last key, in float32.",
    "centred key-only bias": "The bias is in key-only form, slope * (j - (kv_len - 1)), rounded to {}: add it in "
    "float32.",
    "bias arithmetic": "Slopes, positions, distances and bias are all rounded to {}: form the bias in float32.",
}
_NOISE = {
    "scores": "Scores are rounded to {} before the softmax: keep them in float32.",
    "all scores": "Scores are rounded to {} before the softmax: keep them in float32.",
    "products": "Scores are rounded to {} before the softmax, and before the bias is added: keep them in float32.",
    "products, unscaled": "Scores are rounded to {} before the softmax, and before they are scaled: keep them in "
    "float32.",
    "weights": "Weights are rounded to {} before they meet the values.",
    "inputs": "Queries, keys and values are rounded to {}.",
    "output": "The output is rounded to {}.",
}
ROUNDINGS = [
    *in_low_precision("rounding", _ROUNDING),
    make(
        "float32 bias far away",
        "The bias is formed in float32 at its full size and loses its digits far away: count distances from the "
        "row's nearest key.",
        rounding=("bias", "float32"),
    ),
    *in_low_precision("noise", _NOISE, is_noisy=True),
    Departure(
        "tf32 inputs",
        "Queries, keys and values are rounded to TensorFloat-32: ask for products in full precision.",
        {"noise": ("inputs", "tf32")},
        is_noisy=True,
    ),
    Departure(
        FAR_AWAY,
        "The bias is added to the scores in float32 at its full size, and they lose their digits far away: "
        "count distances from the row's nearest key.",
        {"noise": ("scores", "float32")},
        is_noisy=True,
    ),
]
