"""The problems of golden files."""

from __future__ import annotations

from alibi_core.conformance._cases import FAR, Sizes
from alibi_core.conformance._golden.problems import Problem

_SQUARE = Sizes(2, 3, 1, (7, 7), 5)
_FEWER = Sizes(1, 3, 1, (5, 11), 3)  # queries than keys
_GROUPED = Sizes(2, 2, 2, (7, 7), 3)
_SOME = (0.5, 0.0625, 0.0)
_FUTURE = (0.125, 1.5, 0.03125)
_NO_FUTURE = (0.0,)
_GENTLE = (2.0**-5, 2.0**-8, 2.0**-6)  # whose bias float16 holds at a million tokens

ATTENTION = (
    Problem("causal", "causal rows, as many queries as keys", _SQUARE),
    Problem("one_token", "one query, one key, one feature", Sizes(1, 1, 1, (1, 1), 1)),
    Problem("eight_heads", "eight heads, whose slopes are powers of two", Sizes(1, 8, 1, (9, 9), 4)),
    Problem("twelve_heads", "twelve heads, no power of two", Sizes(1, 12, 1, (6, 6), 2)),
    Problem("default_lengths", "eight heads, fewer queries than keys", Sizes(1, 8, 1, (3, 8), 4)),
    Problem("grouped", "two query heads share each key/value head", _GROUPED),
    Problem("multi_query", "all query heads share one key/value head", Sizes(2, 1, 4, (7, 7), 3)),
    Problem("grouped_lengths", "three query heads share each key/value head; 5 queries", Sizes(1, 2, 3, (5, 11), 3)),
    Problem("fewer_queries", "fewer queries than keys: the last query is at the last key", _FEWER),
    Problem("single_query", "one query, as in decoding", Sizes(2, 2, 2, (1, 13), 4)),
    Problem("more_queries", "more queries than keys: the first ones look nowhere", Sizes(1, 2, 1, (11, 5), 3)),
    Problem("offset", "the first query is at position 2 of 9", Sizes(1, 3, 1, (5, 9), 3), q_offset=2),
    Problem("offset_before", "queries begin before all keys: some look nowhere", _FEWER, q_offset=-3),
    Problem("offset_after", "all queries lie after all keys", _FEWER, q_offset=13),
    Problem("offset_far", "queries a million tokens after the keys", _FEWER, q_offset=FAR),
    Problem("offset_per_batch", "an offset for each batch entry", Sizes(3, 2, 1, (5, 7), 3), q_offset=(2, 0, 9)),
    Problem("symmetric", "keys after the query count like those before it", _SQUARE, is_causal=False),
    Problem("symmetric_grouped", "the same, with grouped heads", _GROUPED, is_causal=False),
    Problem("symmetric_offset", "the same, queries between keys", _FEWER, is_causal=False, q_offset=3),
    Problem("symmetric_far", "the same, a million tokens before the keys", _FEWER, is_causal=False, q_offset=-FAR),
    Problem(
        "asymmetric", "slopes of their own for keys after the query", _SQUARE, is_causal=False, future_slopes=_FUTURE
    ),
    Problem(
        "asymmetric_lengths",
        "the same, with 11 queries for 5 keys",
        Sizes(2, 1, 2, (11, 5), 3),
        is_causal=False,
        future_slopes=_FUTURE,
    ),
    Problem("clamped", "keys after the query are at distance 0", _SQUARE, is_causal=False, future_slopes=_NO_FUTURE),
    Problem("window", "no key farther than 2 tokens", _SQUARE, window_size=2),
    Problem("window_of_none", "no key but the query's own", _SQUARE, window_size=0),
    Problem("window_symmetric", "no key farther than 3 tokens, on both sides", _SQUARE, is_causal=False, window_size=3),
    Problem("window_past_keys", "a window that some queries' keys lie outside of", _FEWER, q_offset=8, window_size=3),
    Problem("segments", "packed sequences", Sizes(2, 2, 1, (12, 12), 3), segments=True),
    Problem("segments_symmetric", "packed sequences", Sizes(2, 2, 1, (9, 9), 3), is_causal=False, segments=True),
    Problem("segments_lengths", "packed sequences, only the last tokens' queries", _FEWER, segments=True),
    Problem("mask", "a mask for each query and key", _SQUARE, masking="by query"),
    Problem("mask_by_head", "a mask for each head, query and key", _SQUARE, masking="by head"),
    Problem("padding", "a symmetric encoder's padding, at the end", _SQUARE, is_causal=False, masking="padding"),
    Problem("left_padding", "padding at the beginning: its queries look nowhere", _SQUARE, masking="left padding"),
    Problem("slopes_per_batch", "slopes for each batch entry", _SQUARE, slopes_per_batch=True),
    Problem(
        "asymmetric_per_batch",
        "both kinds of slopes for each batch entry",
        _SQUARE,
        is_causal=False,
        future_slopes=_FUTURE,
        slopes_per_batch=True,
    ),
    Problem("scale", "a scale that is not the default", _SQUARE, scale=0.375),
    Problem("no_slopes", "slopes of 0 among others", _SQUARE, slopes=_SOME),
    Problem("steep", "slopes so steep that the nearest key takes all", _SQUARE, slopes=(8.0, 64.0, 4.0)),
    Problem("loud_keys", "scores far apart", _SQUARE, loud=32),
    Problem("no_keys", "no keys: every query looks nowhere", Sizes(1, 2, 1, (3, 0), 3)),
    Problem("no_queries", "no queries", Sizes(1, 2, 1, (0, 3), 3)),
    Problem("long", "a row of 257 keys", Sizes(1, 3, 1, (6, 257), 8)),
    Problem("long_square", "100 queries", Sizes(1, 2, 1, (100, 100), 4), slopes=(0.25, 0.0078125)),
    Problem("long_grouped", "a row of 300 keys, grouped heads", Sizes(1, 1, 3, (4, 300), 5), slopes=_SOME),
    Problem("long_symmetric", "a row of 200 keys", Sizes(1, 2, 1, (8, 200), 4), is_causal=False, q_offset=96),
    Problem("long_window", "a row of 260 keys, of which 64", Sizes(1, 2, 1, (4, 260), 4), window_size=64),
    Problem("long_segments", "packed sequences, 220 keys", Sizes(1, 2, 1, (12, 220), 4), segments=True),
    Problem(
        "everything",
        "most of the above at once",
        Sizes(2, 2, 2, (7, 11), 3),
        is_causal=False,
        q_offset=(3, 5),
        window_size=6,
        scale=0.75,
        future_slopes=_FUTURE,
        slopes_per_batch=True,
        segments=True,
        masking="by head",
    ),
)

_SHORT, _LONG = Sizes(1, 8, 1, (9, 9), 1), Sizes(1, 4, 1, (3, 300), 1)
BIASES = (
    Problem("causal", "eight heads, whose slopes are powers of two", _SHORT),
    Problem("fewer_queries", "3 queries for 5 keys", Sizes(1, 4, 1, (3, 5), 1)),
    Problem("more_queries", "5 queries for 3 keys: the first two see none", Sizes(1, 4, 1, (5, 3), 1)),
    Problem("long", "a row of 300 keys", _LONG),
    Problem("twelve_heads", "twelve heads, no power of two", Sizes(1, 12, 1, (5, 5), 1)),
    Problem("symmetric", "the same on both sides", _SHORT, is_causal=False),
    Problem("long_symmetric", "the same, 300 keys", _LONG, is_causal=False),
    Problem("symmetric_offset", "the same, queries between keys", _FEWER, is_causal=False, q_offset=3),
    Problem("asymmetric", "slopes of their own ahead", _FEWER, is_causal=False, q_offset=3, future_slopes=_FUTURE),
    Problem("clamped", "no penalty ahead", _FEWER, is_causal=False, q_offset=3, future_slopes=_NO_FUTURE),
    Problem("offset", "the first query is at position 2", _FEWER, q_offset=2),
    Problem("offset_before", "queries begin before all keys", _FEWER, q_offset=-3),
    Problem("offset_far", "queries a million tokens after the keys", _FEWER, q_offset=FAR, slopes=_GENTLE),
    Problem("offset_per_batch", "an offset for each batch entry", Sizes(3, 2, 1, (5, 7), 1), q_offset=(2, 0, 9)),
    Problem("window", "no key farther than 3 tokens", _SHORT, window_size=3),
    Problem("window_symmetric", "the same on both sides", _SHORT, is_causal=False, window_size=3),
    Problem("segments", "packed sequences", Sizes(2, 3, 1, (12, 12), 1), segments=True),
    Problem("slopes_per_batch", "slopes for each batch entry", Sizes(2, 3, 1, (5, 7), 1), slopes_per_batch=True),
)

# Each with the lengths of its steps: a prompt first, then mostly single tokens.
DECODES = (
    (Problem("eight_heads", "a prompt of 5 tokens, then one at a time", Sizes(1, 8, 1, (9, 9), 4)), (5, 1, 1, 1, 1)),
    (Problem("grouped", "the same with grouped heads, some tokens at once", _GROUPED), (3, 1, 2, 1)),
    (Problem("from_nothing", "no prompt: one token at a time", Sizes(2, 3, 1, (6, 6), 3)), (1, 1, 1, 1, 1, 1)),
    (Problem("long", "a prompt of 120 tokens", Sizes(1, 2, 2, (124, 124), 3)), (120, 1, 1, 1, 1)),
)
