"""Hard data for attention: keys that no query can skip, scores far apart, values only at far keys."""

from __future__ import annotations

import numpy as np

from alibi_core.conformance.reference import Values

STEEP = np.asarray([4.0, 1.0, 0.3, 0.0625, 0.03, 2.0**-16, 0.0], np.float32)


def outlier(query: Values, key: Values, value: Values) -> None:
    """Give the first or last key of each head a huge norm: a query attends to it alone, or not at all."""
    key[:, :1, 0] = 1000.0
    key[:, 1:, -1] = -300.0


def sinks(query: Values, key: Values, value: Values) -> None:
    """Make queries similar, and the first four keys parallel to them."""
    query[...] = 3 + query / 10
    key[:, :, :4] = 2.0


def equal_keys(query: Values, key: Values, value: Values) -> None:
    """Make all keys equal."""
    key[...] = key[:, :, :1]


def no_queries(query: Values, key: Values, value: Values) -> None:
    """Set queries to zero."""
    query[...] = 0


def no_keys(query: Values, key: Values, value: Values) -> None:
    """Set keys to zero."""
    key[...] = 0


def shifted(query: Values, key: Values, value: Values) -> None:
    """Add one vector, nearly parallel to all queries, to all keys: softmax is invariant to it."""
    query[...] = 1 + query / 10
    key += 20.0


def opposed(query: Values, key: Values, value: Values) -> None:
    """Give low scores to all keys, the query's own too, except three keys in the middle."""
    query[...] = 2 + query / 10
    key[...] = -2
    middle = key.shape[2] // 2
    key[:, :, middle : middle + 3] = 1


def fading(query: Values, key: Values, value: Values) -> None:
    """Make keys and queries larger towards the beginning, and values zero except in the first third."""
    key *= np.linspace(3, 0, key.shape[2])[:, None]
    query *= np.linspace(3, 0, query.shape[2])[:, None]
    value[:, :, key.shape[2] // 3 :] = 0


def stripes(query: Values, key: Values, value: Values) -> None:
    """Alternate high and low scores every 32 keys, rising towards the end."""
    query[...] = 2 + query / 10
    turns = np.arange(key.shape[2]) // 32
    key[...] = key / 100 + np.where(turns % 2, -1.0, 1.0)[:, None] + turns[:, None] / 8


def cliff(query: Values, key: Values, value: Values) -> None:
    """Give three far keys the highest scores that norms allow and all others the lowest; other values are zero."""
    query[...] = 2
    key[...] = -6
    middle = key.shape[2] // 3
    key[:, :, middle : middle + 3] = 6
    value[:, :, :middle] = 0
    value[:, :, middle + 3 :] = 0


DATA = {
    f.__name__: f for f in (outlier, sinks, equal_keys, no_queries, no_keys, shifted, opposed, fading, stripes, cliff)
}
