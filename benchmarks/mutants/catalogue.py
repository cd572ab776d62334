"""Mistakes of the kit's own catalogue: each is run as an adapter, has to die, and has to be called by its name."""

from __future__ import annotations

from benchmarks.mutants._mutant import BF16, CALLS, FP16, LISTS, NOT_FAR, Mutant, catalogued

_SLOPES = (
    "geometric slopes",
    "canonical slopes from 1",
    "canonical slopes one head on",
    "sorted slopes",
    "reversed slopes",
    "closest power above",
    "slopes of heads padded to 8",
    "linear slopes",
    "natural exponent, canonical",
    "bias_max 16",
    "negated slopes",
    "repeated beyond the power of two",
    "bfloat16 slopes",
    "float16 slopes",
)

# Names, and the laws that have to find them: of attention and all that goes with it.
_ATTENTION = {
    # Which head takes which slope.
    "canonical slopes": "causal combined",
    "first half's slopes": "causal combined",
    "slopes by kv head": "grouped combined",
    "first batch slopes": "batch_slopes",
    "slopes by flat index": "causal combined",
    "next head's slope, cut": "causal combined",
    "first head's slope": "causal combined",
    # The bias.
    "negated bias": "causal causal_bias",
    "bias lost": "causal",
    "signed: signed": "symmetric symmetric_bias",
    "signed: key only": "symmetric",
    "clamped": "symmetric symmetric_bias",
    "future slopes ignored": "asymmetric",
    "future slopes swapped": "asymmetric",
    "future slopes of 0 ignored": "asymmetric",
    "bias scaled": "causal scale",
    "bias doubled": "causal",
    "root of distance": "causal causal_bias",
    "squared distance": "causal causal_bias",
    "distances one more": "causal causal_bias",
    "bias in base 2": "causal",
    "softmax in base 2": "causal",
    # Where queries stand.
    "top-left": "lengths offset",
    "top-left, bias only": "lengths offset",
    "top-left, causal mask only": "lengths offset",
    "top-left, window only": "combined",
    "bottom-right": "offset",
    "offset one more": "causal offset",
    "offset one less": "causal offset",
    "first batch offset": "offset",
    "negative offset cut": "offset lengths",
    "offset 0 as none": "offset",
    "q_offset doubled": "offset",
    "segment key positions restart": "combined",
    "segment positions restart": "segments",
    "int8 positions": "precision long causal_bias",
    "distance clipped: 2047": "precision offset",
    "distance clipped: 127": "long",
    # What a query sees.
    "causal hides own key": "causal",
    "causal sees the next key": "causal",
    "causal ignored": "causal",
    "always causal": "symmetric",
    "one query not causal": "offset",
    "window one less": "window",
    "window one more": "window",
    "window on past side only": "window",
    "window hides the future": "window",
    "window halved": "window",
    "window ignored": "window",
    "window 0 as none": "window",
    "segments ignored": "segments",
    "segments see earlier ones": "segments",
    "segments of first batch": "segments",
    "segments of last keys": "segments",
    "mask inverted": "mask",
    "mask ignored": "mask",
    "mask added": "mask",
    "mask after softmax": "mask",
    "mask of first head": "mask",
    "mask of first batch": "mask",
    "mask finite: 10": "mask",
    "mask finite: 10000": "mask",
    "NaN where nowhere to look": "nowhere",
    "mean where nowhere to look": "nowhere",
    # Heads, axes, the scale.
    "grouped heads interleaved": "grouped",
    "first kv head for all": "grouped",
    "batch comes back reversed": "causal",
    "heads come back reversed": "causal",
    "softmax over queries": "causal",
    "scale ignored": "scale",
    "scaled twice": "causal",
    "scaled by the default too": "scale",
    "scaled by d_model": "causal",
    "scale missing": "causal",
    "scale inverted": "causal",
    # Kernels.
    "last partial block dropped: 64": "long",
    "padding counted: 64": "symmetric combined",
    "diagonal block dropped: 64": "long",
    "values not rescaled: 64": "long",
    "denominator not rescaled: 64": "long",
    "extra 1 in softmax": "causal",
    "not normalised": "causal",
    "horizon too short: 128": "long",
    "no maximum in softmax": "long",
    "float32 bias far away": "offset",
    "bfloat16 slopes": "causal long",
}
_LARGE = {"distance clipped: 256": "large", "distance clipped: 512": "large", "distance clipped: 1024": "large"}
_BIAS = {
    "top-left": "causal_bias symmetric_bias",
    "signed: signed": "symmetric_bias",
}
_GRADIENTS = {
    "slope gradient zero": "slope_gradients",
    "slope gradient negated": "slope_gradients",
    "slope gradient averaged": "slope_gradients",
    "slope gradient of first batch entry": "slope_gradients",
    "slope gradient scaled": "slope_gradients",
    "slope gradient of bfloat16 scores": "slope_gradients",
    "slope gradient summed over batch": "slope_gradients",
    "query gradient unscaled": "gradients",
    "key gradient unscaled": "gradients",
    "key gradient zero": "gradients",
    "group's last gradient": "gradients",
    "group's mean gradient": "gradients",
    "group's gradients interleaved": "gradients",
    "delta missing": "gradients",
}
_DECODING = {
    "bias lost": "decoding",
    "offset one more": "decoding",
    "top-left": "decoding",
    "causal ignored": "decoding",
}

MUTANTS: tuple[Mutant, ...] = (
    *(catalogued(name, "slopes causal_bias", functions=LISTS) for name in _SLOPES),
    *(catalogued(name, laws, functions=CALLS if "bias" not in laws else ()) for name, laws in _ATTENTION.items()),
    *(catalogued(name, laws, functions=("attention",)) for name, laws in _LARGE.items()),
    *(catalogued(name, laws, functions=("bias",)) for name, laws in _BIAS.items()),
    *(catalogued(name, laws, functions=("attention_grad",)) for name, laws in _GRADIENTS.items()),
    *(catalogued(name, laws, functions=("decode_step",)) for name, laws in _DECODING.items()),
    catalogued("key-only", "causal_bias", functions=("bias",), told="bloom contract"),
    catalogued("offset one less", "decoding", functions=("decode_step",), told="causal hides own key"),
    # The backward pass computes its weights again, and otherwise.
    *(
        catalogued(x, "gradients", "forward pass right", functions=("attention_grad",), told=None)
        for x in ("bias lost", "causal ignored")
    ),
    # What is rounded to the dtype of the model, and in float32 to another.
    catalogued("bfloat16 positions", "precision", dtype=BF16),
    catalogued("float16 positions", "precision", dtype=FP16, features=NOT_FAR),
    catalogued("float16 distances", "precision", dtype=FP16, features=NOT_FAR),
    catalogued("bfloat16 bias", "precision causal_bias", features=NOT_FAR),
    catalogued("bfloat16 bias", "precision", functions=CALLS, dtype=BF16, features=NOT_FAR),
    catalogued("float16 bias", "precision", functions=CALLS, dtype=FP16, features=NOT_FAR),
    catalogued("bfloat16 key-only bias", "precision", functions=CALLS, dtype=BF16, features=NOT_FAR),
    catalogued("bfloat16 slopes", "precision", functions=CALLS, dtype=BF16),
    catalogued("float16 slopes", "precision", functions=CALLS, dtype=FP16),
    catalogued("float16 scores: scores", "long", functions=CALLS, dtype=FP16),
    catalogued("float16 products, unscaled", "long", functions=CALLS, dtype=FP16),
    catalogued("tf32 inputs", "long", functions=CALLS, told="float16 inputs"),  # which has as many digits
)
