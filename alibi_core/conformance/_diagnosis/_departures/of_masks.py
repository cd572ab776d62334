"""The catalogue of places and masks: where queries stand, and what they see."""

from __future__ import annotations

from alibi_core.conformance._diagnosis._departures.departure import BLOCKS, Departure, make, numbered, table

_ALIGNED = ("bias_offset", "causal_offset", "window_offset")
# What may stand elsewhere: all of these, which needs no word, or a part of them.
_PARTS = {
    "": ("Queries are", _ALIGNED),
    ", bias only": ("The bias (not the masks) is", _ALIGNED[:1]),
    ", causal mask only": ("The causal mask (not the bias) is", _ALIGNED[1:2]),
    ", window only": ("The window (not bias and causal mask) is", _ALIGNED[2:]),
    ", masks only": ("Causal mask and window (not the bias) are", _ALIGNED[1:]),
    ", all but the window": ("Bias and causal mask (not the window) are", _ALIGNED[:2]),
}


def _aligned(sentences: dict[str, str], *parts: str) -> list[Departure]:
    """Return the departures by which these parts stand elsewhere."""
    return [
        Departure(key + part, sentence.format(_PARTS[part][0]), dict.fromkeys(_PARTS[part][1], key))
        for key, sentence in sentences.items()
        for part in parts
    ]


_BIAS_ONLY = {
    "offset one more": "The bias stands one token too far on: distance 0 is at the next key.",
    "offset one less": "The bias stands one token too far back: distance 0 is at the key before.",
    "first batch offset": "The bias is placed by the first batch entry's q_offset for all.",
    "negative offset cut": "The bias is placed at 0 where q_offset is negative.",
}
OFFSETS = [
    *_aligned(
        {
            "top-left": "{} aligned to the top left (the first query at the first key), whatever q_offset says; a KV "
            "cache needs kv_len - q_len.",
            "bottom-right": "{} aligned to the bottom right (the last query at the last key), whatever q_offset says.",
        },
        *_PARTS,
    ),
    *(make(f"{key}, bias only", sentence, bias_offset=key) for key, sentence in _BIAS_ONLY.items()),
    *_aligned(
        {
            "offset one more": "{} one token too far on: q_offset is off by one.",
            "offset one less": "{} one token too far back: q_offset is off by one.",
            "first batch offset": "{} placed by the first batch entry's q_offset for all.",
            "last batch offset": "{} placed by the last batch entry's q_offset for all.",
            "negative offset cut": "{} placed at 0 where q_offset is negative.",
            "offset negated": "{} placed by -q_offset: its sign is flipped.",
            "offset counted twice": "{} placed by q_offset plus kv_len - q_len, which it already contains.",
            "offset 0 as none": "{} aligned to the bottom right where q_offset is 0: 0 counts as not given.",
            "q_offset doubled": "{} placed by twice q_offset: it is added twice.",
            "offset kv_len": "{} placed as if it came after all keys: its own tokens count twice.",
        },
        "",
    ),
]

_CAUSAL = {
    "causal hides own key": "The causal mask hides each query's own key: it must hide j > i, not j >= i.",
    "causal sees the next key": "The causal mask lets each query see one key too many, the next.",
    "causal ignored": "There is no causal mask: future keys are seen.",
    "always causal": "Attention is causal although is_causal=False.",
    "causal reversed": "The causal mask is reversed: queries see what is ahead, not what is past.",
    "one query not causal": "The causal mask is left out for a single query, even where keys lie after it.",
}
_CAUSAL_BY_BLOCKS = {
    "causal by blocks": "The causal mask works by blocks of {}: within its own block, a query sees the future.",
}
_WINDOW = {
    "window ignored": "window_size is ignored.",
    "window one less": "The window is one key too short: distances up to window_size are to be seen, window_size "
    "included.",
    "window 0 as none": "A window_size of 0 is ignored, as if no window were given: it lets the query's own position "
    "be seen.",
    "window one more": "The window is one key too long.",
    "window halved": "window_size is divided by two: it is the reach of each side, not the sum.",
    "window doubled": "The window reaches twice as far as window_size.",
    "window on past side only": "The window limits past keys only: its future side is ignored.",
    "window on future side only": "The window limits future keys only: its past side is ignored.",
    "window hides the future": "With a window nothing ahead is seen: it is made for causal attention.",
}
_SEGMENTS = {
    "segments ignored": "segment_ids are ignored: packed sequences see one another.",
    "segments of first batch": "All batch entries have the first one's segment_ids.",
    "segments see earlier ones": "Segments see earlier ones too: ids must be equal.",
    "segments inverted": "Segments see all others and not themselves.",
    "segment 0 hidden": "Segment 0 is hidden, as if it were padding.",
    "segments of keys only": "Queries are given the ids of the first keys: their own are ignored.",
    "segments of last keys": "Queries have the segments of the last keys, not those of their own ids.",
    "segments of queries only": "Keys are given the ids of queries: their own are ignored.",
    "segment positions restart": "Positions restart with each segment, of queries and of keys, so that a segment's "
    "first query stands at its first key whatever q_offset says.",
    "segment key positions restart": "Positions of keys restart with each segment, those of queries do not.",
}
_MASK = {
    "mask ignored": "mask is ignored.",
    "mask after softmax": "The mask is applied after the softmax, in whose sum hidden keys count.",
}
_MASK_AS_TAKEN = {
    "mask inverted": "mask is inverted: True must let a key be seen.",
    "mask added": "mask is added to the scores as numbers 0 and 1: turn False into minus infinity.",
    "mask multiplied": "Scores are multiplied by mask, which makes hidden ones 0 instead of minus infinity.",
    "mask of first batch": "All batch entries have the first one's mask.",
    "mask of first head": "All heads have the first one's mask.",
    "mask of first query": "All queries have the first one's mask.",
}
MASKS = [
    *numbered("causal", _CAUSAL),
    *numbered("causal", _CAUSAL_BY_BLOCKS, BLOCKS),
    *table("window", _WINDOW),
    *table("segments", _SEGMENTS),
    *table("mask", _MASK),
    *(
        make(
            "mask finite",
            f"What the mask hides is not hidden: its score is lowered by {number}, which large scores outweigh. Use "
            "minus infinity.",
            mask=f"minus {number}",
        )
        for number in (10, 100, 1000, 10_000)
    ),
    *table("mask", _MASK_AS_TAKEN),
]
