"""The catalogue of gradients: what is wrong with them where attention itself is right, or wrong in another way."""

from __future__ import annotations

from alibi_core.conformance._diagnosis._departures.catalogue import ATTENTION
from alibi_core.conformance._diagnosis._departures.departure import make, table

FORWARD_RIGHT = "forward pass right"  # no departure in itself: where weights of the backward pass are wrong

_SLOPE_GRADIENT = {
    "slope gradient zero": "The gradient of slopes is zero: they are not trained.",
    "slope gradient negated": "The gradient of slopes has the wrong sign: the bias is minus slope times distance.",
    "slope gradient scaled": "The gradient of slopes is multiplied by scale, which the bias is not.",
    "slope gradient scaled up": "The gradient of slopes is divided by scale, which the bias is not.",
    "slope gradient of first batch entry": "The gradient of slopes is the first batch entry's alone: sum it over the "
    "batch.",
    "slope gradient of last batch entry": "The gradient of slopes is the last batch entry's alone: sum it over the "
    "batch.",
    "slope gradient averaged": "The gradient of slopes is averaged over the batch instead of summed.",
    "slope gradient summed over batch": "The gradient of slopes [batch, num_heads] is summed over the batch.",
    "slope gradient averaged over queries": "The gradient of slopes is averaged over queries instead of summed.",
    "slope gradient summed over heads": "The gradient of slopes is summed over heads.",
    "slope gradient by key position": "The gradient of slopes is taken along key positions instead of distances, which "
    "is right for causal attention alone.",
    "slope gradient times slopes": "The gradient of slopes is multiplied by the slopes, as if they were exponents.",
    "slope gradient times ln 2": "The gradient of slopes is multiplied by ln 2: it is that of scores in base 2.",
    "slope gradient times log2 e": "The gradient of slopes is multiplied by log2(e): it is that of scores in base 2.",
    "slope gradient of bfloat16 scores": "The gradient of slopes is summed from gradients of scores that are rounded "
    "to bfloat16: keep them in float32.",
    "slope gradient doubled": "The gradient of slopes is twice what it should be.",
    "slope gradient halved": "The gradient of slopes is half of what it should be.",
}
_SLOPES = table("slope_gradient", _SLOPE_GRADIENT, noisy=["slope gradient of bfloat16 scores"])

# Of query or key.
_FACTORS = {
    "unscaled": "{} {} not multiplied by scale.",
    "scaled twice": "{} {} multiplied by scale twice.",
    "scaled by default": "{} {} multiplied by 1 / sqrt(head_dim), whatever the scale.",
    "negated": "{} has the wrong sign.",
    "halved": "{} {} half of what it should be.",
    "doubled": "{} {} twice what it should be.",
    "times ln 2": "{} {} multiplied by ln 2: {} of scores in base 2.",
    "times log2 e": "{} {} multiplied by log2(e): {} of scores in base 2.",
    "zero": "{} {} zero.",
}

_MEAN = {
    "delta missing": "The row mean (delta, sum of output times its gradient) is not subtracted from the gradient of "
    "weights.",
    "delta unweighted": "From the gradient of weights its plain mean is subtracted instead of that by weights (delta).",
    FORWARD_RIGHT: "The mean of the forward pass is subtracted (delta), but weights are recomputed otherwise.",
}
_GROUPING = {
    "group's first gradient": "Gradients of key and value are those of the group's first query head: sum them over the "
    "group.",
    "group's last gradient": "Gradients of key and value are those of the group's last query head, which overwrites "
    "the others: sum them.",
    "group's gradients interleaved": "Gradients of key and value are summed over the wrong query heads, as if groups "
    "were interleaved: those of key/value head h are h * group to h * group + group - 1.",
    "group's mean gradient": "Gradients of key and value are averaged over the group's query heads instead of summed.",
}
_SIDES = [
    *(
        make(
            f"{name} gradient {what}",
            sentence.format(f"The gradient of {name}", "is", "it is that"),
            **{f"{name}_gradient": what},
        )
        for name in ("query", "key")
        for what, sentence in _FACTORS.items()
    ),
    *(
        make(
            f"query and key gradients {what}",
            sentence.format("The gradients of query and key", "are", "they are those"),
            query_gradient=what,
            key_gradient=what,
        )
        for what, sentence in _FACTORS.items()
        if "multiplied" in sentence
    ),
    make("value gradient scaled", "The gradient of value is multiplied by scale.", value_gradient="scaled"),
    make("value gradient zero", "The gradient of value is zero.", value_gradient="zero"),
    *table("mean", _MEAN),
    *table("grouping", _GROUPING),
]

# Of attention, what shows in whatever follows from it: of what is rounded on the way, scores alone.
FOLLOWING = (
    *(x for x in ATTENTION if not x.is_noisy),
    *(x for x in ATTENTION if x.changes.get("noise", ("",))[0] in ("scores", "all scores")),
)
GRADIENTS = (*_SLOPES, *_SIDES, *FOLLOWING)
