"""Mistakes of caches: decoding in steps, and tables kept from one call to the next."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from benchmarks.mutants._mutant import instead, mutant, sized, variants
from benchmarks.mutants.reference import Array, Call, Reference


@instead(
    Reference,
    "decode_step",
    "decoding",
    expected="no bias|bias.*(lost|missing|ignor|absent|left out|0)|without.*bias|later|after the first",
)
def bias_lost_after_the_first_step(
    self, query: Array, key: Array, value: Array, slopes: Array, cache: Any
) -> tuple[Array, Any]:
    """Decoding has no bias after the first step, the prefill."""
    return Reference.decode_step(self, query, key, value, slopes * (cache is None), cache)


@instead(Reference, "decode_step", "decoding")
def chunk_at_one_position(self, query: Array, key: Array, value: Array, slopes: Array, cache: Any) -> tuple[Array, Any]:
    """All tokens of one step have the position of the last."""
    _, (keys, values) = Reference.decode_step(self, query, key, value, slopes, cache)
    outputs = [
        self.attention(query[:, :, i : i + 1], keys, values, slopes, is_causal=True, q_offset=keys.shape[2] - 1)
        for i in range(query.shape[2])
    ]
    return np.concatenate(outputs, axis=2), (keys, values)


@mutant("decoding", expected="shared|sequence|each other|state|another|one cache")
class CacheSharedBetweenSequences(Reference):
    """There is one cache in the layer, which a new sequence empties, and two at a time spoil."""

    kept: Any = None

    def decode_step(self, query: Array, key: Array, value: Array, slopes: Array, cache: Any) -> tuple[Array, Any]:
        output, self.kept = super().decode_step(query, key, value, slopes, None if cache is None else self.kept)
        return output, True


# --- Caches that are right in short sequences -------------------------------------------------------------------------


class _Paged(Reference):
    """Positions in a cache are those in its pages of {size} tokens."""

    size = 16
    attention_is_step = False

    def decode_step(self, query: Array, key: Array, value: Array, slopes: Array, cache: Any) -> tuple[Array, Any]:
        self.attention_is_step = True
        try:
            return super().decode_step(query, key, value, slopes, cache)
        finally:
            self.attention_is_step = False

    def raw_bias(self, call: Call) -> Array:
        if not self.attention_is_step:
            return super().raw_bias(call)
        distances = self.q_positions(call) % self.size - self.kv_positions(call) % self.size
        return -self.steepness(call).astype(np.float64) * np.abs(distances)


PAGED = tuple(sized(_Paged, n, "long_decoding", expected=f"restart every {n}") for n in (16, 64, 128, 256))


class _Keeping(Reference):
    """Decodes rightly, and keeps keys and values as ``kept`` makes them, of which ``before`` were there already."""

    def decode_step(self, query: Array, key: Array, value: Array, slopes: Array, cache: Any) -> tuple[Array, Any]:
        output, held = super().decode_step(query, key, value, slopes, cache)
        before = 0 if cache is None else cache[0].shape[2]
        return output, tuple(self.kept(x, before, x.shape[2]) for x in held)

    def kept(self, held: Array, before: int, now: int) -> Array:
        return held


def _prefill_overwrites(self: Any, held: Array, before: int, now: int) -> Array:
    new = now - before
    if new < 32 or before == 0:
        return held
    return np.concatenate([held[:, :, before:], held[:, :, new:before], held[:, :, before:]], axis=2)


def _stale_entry(self: Any, held: Array, before: int, now: int) -> Array:
    is_first = (np.arange(now) % 64 == 0) & (np.arange(now) >= max(before, 1))
    return np.where(is_first[:, None], np.asarray(0, held.dtype), held)


def _without(held: Array, index: int, when: Any) -> Array:
    return np.delete(held, index, axis=2) if when else held


SHORT_CACHES = variants(
    _Keeping,
    "kept",
    "decoding",
    rows={
        "CacheOfFiveTokens": ("The cache holds the last five tokens", lambda self, held, before, now: held[:, :, -5:]),
        "CacheKeepsOneTokenOfAStep": (
            "Of the tokens of one step, only the last is kept in the cache",
            lambda self, held, before, now: np.delete(held, np.s_[before : now - 1], axis=2) if before else held,
        ),
        "NewTokensCachedTwice": (
            "After the first step the new tokens are in the cache already, and appended again",
            lambda self, held, before, now: np.concatenate([held, held[:, :, -1:]], axis=2),
        ),
    },
)
LONG_CACHES = variants(
    _Keeping,
    "kept",
    "long_decoding",
    rows={
        "CacheOf64Tokens": ("The cache holds the last 64 tokens", lambda self, held, before, now: held[:, :, -64:]),
        "CacheOf256Tokens": ("The cache holds the last 256 tokens", lambda self, held, before, now: held[:, :, -256:]),
        "TokenLostEveryEight": (
            "The cache grows by eight tokens at a time, and loses the last one of those that it held",
            lambda self, held, before, now: _without(held, before - 1, before and before // 8 < now // 8),
        ),
        "TokenLostAtDoubling": (
            "The cache doubles its capacity, from 16 tokens on, and copies one too few",
            lambda self, held, before, now: _without(
                held, before - 1, before and max(before, 15).bit_length() < now.bit_length()
            ),
        ),
        "LastTokenOfACapacityOverwritten": (
            "A token that comes when the cache of 512 is full but for one takes the place of the one before",
            lambda self, held, before, now: _without(held, before - 1, before < 512 <= now),
        ),
        "PrefillOverwrites": (
            "Whatever comes 32 tokens or more at a time is written to the beginning of the cache, as prompts are",
            _prefill_overwrites,
        ),
        "StaleEntry": (
            "The first token of a page of 64 is not written, and what was there before stays: nothing, or zeros",
            _stale_entry,
        ),
        "RingOf512Tokens": (
            "The cache is a ring of 512 tokens: the one after that takes the place of the first",
            lambda self, held, before, now: held * (np.arange(now) >= now - 512)[:, None].astype(held.dtype),
        ),
    },
)


@instead(Reference, "decode_offset", "long_decoding")
def long_chunk_one_too_far(self, query: Array, keys: Array) -> int:
    """The tokens of a step of more than 16 are one position too far."""
    return Reference.decode_offset(self, query, keys) + (16 < query.shape[2] < keys.shape[2])


@mutant("long_decoding")
class PositionWrongAfterLongChunks(Reference):
    """A step of more than 16 tokens counts as one of 16 for the positions of the tokens to come."""

    def decode_step(self, query: Array, key: Array, value: Array, slopes: Array, cache: Any) -> tuple[Array, Any]:
        held, missing = (None, 0) if cache is None else cache
        self.missing = missing
        output, held = super().decode_step(query, key, value, slopes, held)
        return output, (held, missing + max(query.shape[2] - 16, 0) * (cache is not None))

    def decode_offset(self, query: Array, keys: Array) -> int:
        return super().decode_offset(query, keys) - self.missing


@instead(_Paged, "raw_bias", "long_decoding")
def decoding_horizon_of_200_tokens(self, call: Call) -> Array:
    """Decoding leaves out keys 200 tokens away, whatever the slope and the scores."""
    bias = Reference.raw_bias(self, call)
    return np.where(self.attention_is_step & (np.abs(self.ahead(call)) > 200), -1e9, bias)


# --- Tables that are kept ---------------------------------------------------------------------------------------------


EARLIER = "earlier|previous|cache|stale|kept|state|before|remember|first call"


class _Kept(Reference):
    """Keeps what it computed from call to call."""

    def __init__(self) -> None:
        self.kept: dict[Any, Array] = {}


@instead(_Kept, "raw_bias", "independent", expected=EARLIER)
def table_by_lengths(self, call: Call) -> Array:
    """The bias is kept from call to call by its shape alone, whatever slopes, direction and offset."""
    key = (call.query.shape[:2], call.lengths)
    return self.kept.setdefault(key, _Kept.raw_bias(self, call))


@instead(_Kept, "visible_by_causality", "independent", expected=EARLIER)
def table_blind_to_direction(self, call: Call) -> Array | bool:
    """The bias is kept from call to call, whatever the direction: hidden keys stay hidden, and others in sight."""
    key = (call.query.shape[0], call.lengths, call.q_offset.tobytes())
    return self.kept.setdefault(key, np.asarray(_Kept.visible_by_causality(self, call)))


@instead(_Kept, "products", "independent")
def scale_of_the_first_call(self, call: Call) -> Array:
    """A kernel is compiled with the scale of the first call of these shapes."""
    key = (call.query.shape, call.key.shape)
    scale = float(self.kept.setdefault(key, np.asarray(call.scale)))
    return _Kept.products(self, dataclasses.replace(call, scale=scale))


@instead(_Kept, "visible_by_window", "independent")
def window_of_the_first_call(self, call: Call) -> Array | bool:
    """A block mask is kept from call to call by the lengths, whatever the window."""
    if call.window_size is None:
        return True
    key = (call.query.shape[0], call.lengths, call.q_offset.tobytes())
    return self.kept.setdefault(key, np.asarray(_Kept.visible_by_window(self, call)))
