"""The catalogue of slopes: what heads have in place of their own."""

from __future__ import annotations

from alibi_core.conformance._diagnosis._departures.departure import make

SLOPES = [
    make(
        "canonical slopes",
        "The slopes given are ignored: it uses the canonical ones of as many heads as it sees. Under tensor "
        "parallelism that is the local count: pass slopes(num_heads)[shard] instead.",
        slopes="canonical",
    ),
    make(
        "geometric slopes",
        "Slopes follow the geometric scheme 2**(-8 (h+1) / num_heads), which is canonical for powers of two "
        "alone: use slopes(num_heads).",
        slopes="geometric",
    ),
    make("linear slopes", "Slopes are evenly spaced from 0.05 to 0.5; those given are ignored.", slopes="linear"),
    make("bias_max 4", "Slopes are the canonical ones of bias_max 4, whatever is given.", slopes="bias_max 4"),
    make("bias_max 16", "Slopes are the canonical ones of bias_max 16, whatever is given.", slopes="bias_max 16"),
    make("eight-head slopes", "Slopes are 2**-(h+1), right for 8 heads alone.", slopes="powers of two"),
    make(
        "eight-head slopes from 1",
        "Slopes are 2**-h: they start at 1, and are spaced as for 8 heads.",
        slopes="powers of two from 1",
    ),
    make(
        "slopes from 1",
        "Slopes start at 1, 2**(-8 h / num_heads): the head index is off by one.",
        slopes="starting at 1",
    ),
    make(
        "next power of two",
        "Slopes are the first of those for more heads than there are: for the next power of two, or a number "
        "padded to a multiple.",
        slopes="of the next power of two",
    ),
    make(
        "slopes of kv heads",
        "Slopes are the canonical ones of as many heads as keys have; each group shares one. Slopes belong to "
        "query heads.",
        slopes="canonical of kv heads",
    ),
    make(
        "slopes of kv heads, tiled",
        "Slopes are the canonical ones of as many heads as keys have, repeated. Slopes belong to query heads.",
        slopes="canonical of kv heads, tiled",
    ),
    make("sorted slopes", "Slopes are sorted, steepest first: heads get one another's.", slopes="descending"),
    make("sorted slopes, ascending", "Slopes are sorted, flattest first: heads get one another's.", slopes="ascending"),
    make("reversed slopes", "Heads get the slopes in reversed order.", slopes="reversed"),
    make(
        "next head's slope",
        "Each head has the slope of the next one: the head index is off by one.",
        slopes="of the next head",
    ),
    make(
        "next head's slope, cut",
        "Each head has the slope of the next one, the last its own: the head index is off by one.",
        slopes="of the next head but the last",
    ),
    make(
        "first half's slopes",
        "Heads of the second half repeat the slopes of the first: each shard of heads takes the first slopes. Pass "
        "slopes(num_heads)[shard].",
        slopes="of the first half",
    ),
    make(
        "previous head's slope",
        "Each head has the slope of the one before: the head index is off by one.",
        slopes="of the previous head",
    ),
    make(
        "slopes by kv head",
        "Slopes are looked up by the key/value head: head h takes slopes[h // group] instead of slopes[h].",
        slopes="by kv head",
    ),
    make(
        "slopes by kv head, tiled",
        "Head h takes slopes[h % num_kv_heads] instead of slopes[h].",
        slopes="by kv head, tiled",
    ),
    make(
        "slopes by place in the group",
        "Head h takes slopes[h % group] instead of slopes[h].",
        slopes="by place in the group",
    ),
    make("group's first slope", "All query heads of a group take the slope of its first.", slopes="first of the group"),
    make(
        "slopes transposed",
        "Slopes are laid out [group, num_kv_heads] instead of [num_kv_heads, group].",
        slopes="transposed groups",
    ),
    make(
        "slopes transposed back",
        "Slopes are laid out [num_kv_heads, group] where heads are [group, num_kv_heads].",
        slopes="transposed groups back",
    ),
    make("first head's slope", "All heads have the first head's slope.", slopes="first head"),
    make("mean slope", "All heads have the mean of the slopes.", slopes="mean of heads"),
    make("first batch slopes", "All batch entries have the first one's slopes.", slopes="first batch"),
    make("last batch slopes", "All batch entries have the last one's slopes.", slopes="last batch"),
    make("next batch slopes", "Each batch entry has the slopes of another.", slopes="next batch"),
    make("slopes by batch entry", "Slopes are looked up by batch entry instead of by head.", slopes="by batch entry"),
    make(
        "slopes of batch and head swapped",
        "Slopes [batch, num_heads] are read as [num_heads, batch].",
        slopes="batch and heads swapped",
    ),
    make(
        "slopes by flat index",
        "The index of batch entry and head is divided by batch where the rest of a division by num_heads gives "
        "the head.",
        slopes="batch and heads divided",
    ),
    make("squared slopes", "Slopes are squared: they are applied twice.", slopes="squared"),
    make("root of slopes", "Slopes are replaced by their square roots.", slopes="square root"),
    make("exponentiated slopes", "Slopes are replaced by exp(-slope).", slopes="exponentiated"),
    make(
        "powers of slopes",
        "Slopes are replaced by 2**-slope: it takes exponents, not slopes.",
        slopes="powers with slopes as exponents",
    ),
    make("bfloat16 slopes", "Slopes are rounded to bfloat16: keep them in float32.", slope_dtype="bfloat16"),
    make("float16 slopes", "Slopes are rounded to float16: keep them in float32.", slope_dtype="float16"),
]
