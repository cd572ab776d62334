"""The catalogue of scores: heads, scale, softmax, and the keys that take part."""

from __future__ import annotations

from alibi_core.conformance._diagnosis._departures.departure import BLOCKS, make, numbered, table

_NOT_RESCALED = {
    "values not rescaled": "The online softmax does not rescale its sum of values when a later block of {} keys scores "
    "higher.",
    "denominator not rescaled": "The online softmax does not rescale its denominator when a later block of {} keys "
    "scores higher.",
}
_HEADS = {
    "grouped heads interleaved": "Query head h reads key/value head h % num_kv_heads; it must be h // (num_heads // "
    "num_kv_heads).",
    "first kv head for all": "All query heads read the first key/value head.",
    "kv heads reversed": "Query heads read key/value heads in reversed order.",
}
_SCALE = {
    "scale ignored": "scale is ignored: it uses 1 / sqrt(head_dim).",
    "scale missing": "Products of query and key are not scaled.",
    "scaled by d_model": "Scores are scaled by 1 / sqrt(num_heads * head_dim), that is d_model, instead of 1 / "
    "sqrt(head_dim).",
    "scaled by kv d_model": "Scores are scaled by 1 / sqrt(num_kv_heads * head_dim) instead of 1 / sqrt(head_dim).",
    "scaled twice": "Scores are scaled twice.",
    "scaled by the default too": "Scores are scaled by scale and again by 1 / sqrt(head_dim).",
    "root of scale": "Scores are scaled by the square root of scale: only one of query and key is scaled.",
    "scaled by head_dim": "Scores are divided by head_dim instead of its square root.",
    "scale inverted": "Scores are divided by scale instead of multiplied.",
    "scaled by kv_len": "Scores are divided by sqrt(kv_len) instead of sqrt(head_dim): the wrong axis.",
    "scores in base 2": "Products of query and key are multiplied by ln 2: exp2 is used where log2(e) is missing.",
    "scores times log2 e": "Products of query and key are multiplied by log2(e), which a softmax in base e must not "
    "have.",
    "scores negated": "Products of query and key have the wrong sign.",
}
_SOFTMAX = {
    "extra 1 in softmax": "The softmax has an extra 1 in its denominator (a sink that takes weight): weights do not "
    "sum to 1.",
    "softmax over queries": "The softmax runs over queries instead of keys.",
    "softmax in base 2": "The softmax is in base 2: multiply scores and bias by log2(e).",
    "not normalised": "Weights are not divided by their sum.",
    "bias as a factor": "Scores are multiplied by exp(bias) instead of adding the bias.",
    "hidden keys counted": "Hidden keys count in the softmax's sum: they are hidden after it. Weights do not sum to 1.",
    "hidden scores 0": "Hidden keys have score 0 instead of minus infinity.",
}
_ORDER = {
    "heads come back reversed": "Heads come back in reversed order: each head's output is at another's place.",
    "batch comes back reversed": "Batch entries come back in reversed order: each one's output is at another's place.",
}
_KEYS = {
    "last partial block dropped": "The last block of keys is dropped where it has fewer than {}: round the number of "
    "blocks up.",
    "first block dropped": "The first {} keys are dropped: the loop starts one block late.",
    "last block dropped": "The last {} keys are dropped: the loop ends one block early.",
    "diagonal block dropped": "A query does not see keys of its own block of {}: the loop ends before the block on the "
    "diagonal.",
    "padding counted": "Keys are padded with zeros to a multiple of {}, and these count.",
    "keys capped": "Only the first {} keys take part.",
    "horizon too short": "Keys {} tokens away or farther weigh nothing.",
}
_NOWHERE = {
    "mean where nowhere to look": "Queries that may look nowhere get the mean of all values: give zeros.",
    "NaN where nowhere to look": "Queries that may look nowhere get NaN: the softmax divides 0 by 0. Give zeros.",
    "masks dropped where nowhere to look": "Queries that may look nowhere look everywhere: the mask is a finite "
    "number, the same for all keys. Give zeros.",
    "mean of past where nowhere to look": "Queries that may look nowhere get the mean of the values that are not "
    "ahead: give zeros.",
    "first value where nowhere to look": "Queries that may look nowhere get the first value: give zeros.",
    "last value where nowhere to look": "Queries that may look nowhere get the last value: give zeros.",
}
_OVERFLOW = {
    "no maximum in softmax": "The softmax does not subtract the row's largest score: it overflows, or divides 0 by 0.",
}
SCORES = [
    *table("heads", _HEADS),
    *table("scale", _SCALE),
    *table("softmax", _SOFTMAX),
    *(make(key, sentence.format(n), softmax=f"{key} {n}") for n in BLOCKS for key, sentence in _NOT_RESCALED.items()),
    *table("order", _ORDER),
    make("last key missing", "The last key never takes part.", keys=("last block dropped", 1)),
    make("first key missing", "The first key never takes part.", keys=("first block dropped", 1)),
    *numbered("keys", _KEYS, BLOCKS),
    *table("nowhere", _NOWHERE),
    *table("softmax", _OVERFLOW),
]
