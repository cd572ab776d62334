"""Data that attention finds hard: keys that no query can leave out, scores far apart, values where none is expected."""

from __future__ import annotations

import numpy as np

from alibi_core.conformance.reference import Values

STEEP = np.asarray([4.0, 1.0, 0.3, 0.0625, 0.03, 2.0**-16, 0.0], np.float32)


def outlier(query: Values, key: Values, value: Values) -> None:
    """Make some heads' first key of huge norm: who sees it attends to nothing else, or not to it at all."""
    key[:, :1, 0] = 1000.0
    key[:, 1:, -1] = -300.0


def sinks(query: Values, key: Values, value: Values) -> None:
    """Make queries alike, and the first keys point their way."""
    query[...] = 3 + query / 10
    key[:, :, :4] = 2.0


def equal_keys(query: Values, key: Values, value: Values) -> None:
    """Let all keys be the same."""
    key[...] = key[:, :, :1]


def no_queries(query: Values, key: Values, value: Values) -> None:
    """Let queries be zeros."""
    query[...] = 0


def no_keys(query: Values, key: Values, value: Values) -> None:
    """Let keys be zeros."""
    key[...] = 0


def shifted(query: Values, key: Values, value: Values) -> None:
    """Add a vector to all keys that every query points along: softmax does not notice."""
    query[...] = 1 + query / 10
    key += 20.0


def opposed(query: Values, key: Values, value: Values) -> None:
    """Let every key but those around the middle score low, the query's own too."""
    query[...] = 2 + query / 10
    key[...] = -2
    middle = key.shape[2] // 2
    key[:, :, middle : middle + 3] = 1


def fading(query: Values, key: Values, value: Values) -> None:
    """Let keys and queries grow towards the beginning, and values be nothing but at the far end."""
    key *= np.linspace(3, 0, key.shape[2])[:, None]
    query *= np.linspace(3, 0, query.shape[2])[:, None]
    value[:, :, key.shape[2] // 3 :] = 0


def stripes(query: Values, key: Values, value: Values) -> None:
    """Let scores be high and low by turns of 32 keys, and rise in the end."""
    query[...] = 2 + query / 10
    turns = np.arange(key.shape[2]) // 32
    key[...] = key / 100 + np.where(turns % 2, -1.0, 1.0)[:, None] + turns[:, None] / 8


def cliff(query: Values, key: Values, value: Values) -> None:
    """Let three far keys score as high as norms allow, all others as low, and nothing but theirs have values."""
    query[...] = 2
    key[...] = -6
    middle = key.shape[2] // 3
    key[:, :, middle : middle + 3] = 6
    value[:, :, :middle] = 0
    value[:, :, middle + 3 :] = 0


DATA = {
    f.__name__: f for f in (outlier, sinks, equal_keys, no_queries, no_keys, shifted, opposed, fading, stripes, cliff)
}
