"""The catalogue of slopes: what heads have in place of their own."""

from __future__ import annotations

from alibi_core.conformance._diagnosis._departures.departure import make, table

_SLOPES = {
    "canonical slopes": "The slopes given are ignored: it uses the canonical ones of as many heads as it sees. Under "
    "tensor parallelism that is the local count: pass slopes(num_heads)[shard] instead.",
    "geometric slopes": "Slopes follow the geometric scheme 2**(-8 (h+1) / num_heads), which is canonical for powers "
    "of two alone: use slopes(num_heads).",
    "linear slopes": "Slopes are evenly spaced from 0.05 to 0.5; those given are ignored.",
    "bias_max 4": "Slopes are the canonical ones of bias_max 4, whatever is given.",
    "bias_max 16": "Slopes are the canonical ones of bias_max 16, whatever is given.",
    "eight-head slopes": "Slopes are 2**-(h+1), right for 8 heads alone.",
    "eight-head slopes from 1": "Slopes are 2**-h: they start at 1, and are spaced as for 8 heads.",
    "slopes from 1": "Slopes start at 1, 2**(-8 h / num_heads): the head index is off by one.",
    "next power of two": "Slopes are the first of those for more heads than there are: for the next power of two, or a "
    "number padded to a multiple.",
    "slopes of kv heads": "Slopes are the canonical ones of as many heads as keys have; each group shares one. Slopes "
    "belong to query heads.",
    "slopes of kv heads, tiled": "Slopes are the canonical ones of as many heads as keys have, repeated. Slopes belong "
    "to query heads.",
    "sorted slopes": "Slopes are sorted, steepest first: heads get one another's.",
    "sorted slopes, ascending": "Slopes are sorted, flattest first: heads get one another's.",
    "reversed slopes": "Heads get the slopes in reversed order.",
    "next head's slope": "Each head has the slope of the next one: the head index is off by one.",
    "next head's slope, cut": "Each head has the slope of the next one, the last its own: the head index is off by "
    "one.",
    "first half's slopes": "Heads of the second half repeat the slopes of the first: each shard of heads takes the "
    "first slopes. Pass slopes(num_heads)[shard].",
    "previous head's slope": "Each head has the slope of the one before: the head index is off by one.",
    "slopes by kv head": "Slopes are looked up by the key/value head: head h takes slopes[h // group] instead of "
    "slopes[h].",
    "slopes by kv head, tiled": "Head h takes slopes[h % num_kv_heads] instead of slopes[h].",
    "slopes by place in the group": "Head h takes slopes[h % group] instead of slopes[h].",
    "group's first slope": "All query heads of a group take the slope of its first.",
    "slopes transposed": "Slopes are laid out [group, num_kv_heads] instead of [num_kv_heads, group].",
    "slopes transposed back": "Slopes are laid out [num_kv_heads, group] where heads are [group, num_kv_heads].",
    "first head's slope": "All heads have the first head's slope.",
    "mean slope": "All heads have the mean of the slopes.",
    "first batch slopes": "All batch entries have the first one's slopes.",
    "last batch slopes": "All batch entries have the last one's slopes.",
    "next batch slopes": "Each batch entry has the slopes of another.",
    "slopes by batch entry": "Slopes are looked up by batch entry instead of by head.",
    "slopes of batch and head swapped": "Slopes [batch, num_heads] are read as [num_heads, batch].",
    "slopes by flat index": "The index of batch entry and head is divided by batch where the rest of a division by "
    "num_heads gives the head.",
    "squared slopes": "Slopes are squared: they are applied twice.",
    "root of slopes": "Slopes are replaced by their square roots.",
    "exponentiated slopes": "Slopes are replaced by exp(-slope).",
    "powers of slopes": "Slopes are replaced by 2**-slope: it takes exponents, not slopes.",
}
SLOPES = [
    *table("slopes", _SLOPES),
    make("bfloat16 slopes", "Slopes are rounded to bfloat16: keep them in float32.", slope_dtype="bfloat16"),
    make("float16 slopes", "Slopes are rounded to float16: keep them in float32.", slope_dtype="float16"),
]
