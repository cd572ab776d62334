"""Mistakes of caches: decoding in steps, and tables kept from one call to the next."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from benchmarks.mutants._mutant import mutant
from benchmarks.mutants.reference import Array, Call, Reference


@mutant("decoding", expected="no bias|bias.*(lost|missing|ignor|absent|left out|0)|without.*bias")
class BiasLostInDecoding(Reference):
    """Decoding has no bias (keras-hub)."""

    def decode_step(self, query: Array, key: Array, value: Array, slopes: Array, cache: Any) -> tuple[Array, Any]:
        return super().decode_step(query, key, value, slopes * 0, cache)


@mutant("decoding", expected="no bias|bias.*(lost|missing|ignor|absent|left out|0)|without.*bias|later|after the first")
class BiasLostAfterTheFirstStep(Reference):
    """Decoding has no bias after the first step, the prefill."""

    def decode_step(self, query: Array, key: Array, value: Array, slopes: Array, cache: Any) -> tuple[Array, Any]:
        return super().decode_step(query, key, value, slopes * (cache is None), cache)


@mutant("decoding", expected="off by one|one (token|position|key|too|step)|shift|by 1|\\+ ?1")
class DecodingOneTooFar(Reference):
    """The new tokens are one position too far, and see one too many of themselves."""

    def decode_offset(self, query: Array, keys: Array) -> int:
        return super().decode_offset(query, keys) + 1


@mutant("decoding", expected="off by one|one (token|position|key|too|step)|shift|by 1|- ?1", is_diagnosable=False)
class DecodingOneShort(Reference):
    """The new tokens are one position short, and do not see themselves."""

    def decode_offset(self, query: Array, keys: Array) -> int:
        return super().decode_offset(query, keys) - 1


@mutant("decoding", expected="restart|from 0|at 0|beginning|again|q_offset|first key|position")
class DecodingRestartsAtZero(Reference):
    """The positions of each step begin with 0 again."""

    def decode_offset(self, query: Array, keys: Array) -> int:
        return 0


@mutant("decoding", expected="chunk|causal|to come|ahead|future|step|one another|each other")
class ChunkNotCausal(Reference):
    """The tokens of one step all see one another."""

    def decode_step(self, query: Array, key: Array, value: Array, slopes: Array, cache: Any) -> tuple[Array, Any]:
        _, (keys, values) = super().decode_step(query, key, value, slopes, cache)
        mask = np.ones((1, 1, query.shape[2], keys.shape[2]), dtype=bool)
        offset = self.decode_offset(query, keys)
        return self.attention(query, keys, values, slopes, False, offset, mask=mask), (keys, values)


@mutant("decoding", expected="last|chunk|same position|one position|step", is_diagnosable=False)
class ChunkAtOnePosition(Reference):
    """All tokens of one step have the position of the last."""

    def decode_step(self, query: Array, key: Array, value: Array, slopes: Array, cache: Any) -> tuple[Array, Any]:
        _, (keys, values) = super().decode_step(query, key, value, slopes, cache)
        outputs = [
            self.attention(query[:, :, i : i + 1], keys, values, slopes, True, keys.shape[2] - 1)
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


@mutant(
    "decoding", expected="forget|window|at most|capacity|evict|oldest|first keys|limit|drop|lost", is_diagnosable=False
)
class CacheOfFiveTokens(Reference):
    """The cache holds the last five tokens."""

    def decode_step(self, query: Array, key: Array, value: Array, slopes: Array, cache: Any) -> tuple[Array, Any]:
        output, kept = super().decode_step(query, key, value, slopes, cache)
        return output, tuple(x[:, :, -5:] for x in kept)


@mutant("decoding", expected="last|overwrit|only|one token|first|dropp|lost|forg", is_diagnosable=False)
class CacheKeepsOneTokenOfAStep(Reference):
    """Of the tokens of one step, only the last is kept in the cache."""

    def decode_step(self, query: Array, key: Array, value: Array, slopes: Array, cache: Any) -> tuple[Array, Any]:
        output, (keys, values) = super().decode_step(query, key, value, slopes, cache)
        before = keys.shape[2] - key.shape[2]
        kept = [*range(before), keys.shape[2] - 1] if cache is not None else [*range(keys.shape[2])]
        return output, (keys[:, :, kept], values[:, :, kept])


@mutant("decoding", expected="twice|duplicat|again|double", is_diagnosable=False)
class NewTokensCachedTwice(Reference):
    """After the first step the new tokens are in the cache already, and appended again."""

    def decode_step(self, query: Array, key: Array, value: Array, slopes: Array, cache: Any) -> tuple[Array, Any]:
        output, kept = super().decode_step(query, key, value, slopes, cache)
        return output, tuple(np.concatenate([x, x[:, :, -1:]], axis=2) for x in kept)


# --- Caches that are right in short sequences -------------------------------------------------------------------------


class _Paged(Reference):
    """Attention itself is right; decoding takes positions modulo a page."""

    page = 16
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
        distances = self.q_positions(call) % self.page - self.kv_positions(call) % self.page
        return -self.steepness(call).astype(np.float64) * np.abs(distances)


@mutant("long_decoding", expected="restart every 16")
class PositionsModuloPageOf16(_Paged):
    """Positions in a cache are those in its pages of 16 tokens."""


@mutant("long_decoding", expected="restart every 64")
class PositionsModuloPageOf64(_Paged):
    """Positions in a cache are those in its pages of 64 tokens."""

    page = 64


@mutant("long_decoding", expected="restart every 128")
class PositionsModuloPageOf128(_Paged):
    """Positions in a cache are those in its pages of 128 tokens."""

    page = 128


@mutant("long_decoding", expected="restart every 256")
class PositionsModuloPageOf256(_Paged):
    """Positions in a cache are those in its pages of 256 tokens."""

    page = 256


class _Keeping(Reference):
    """A cache that keeps not all tokens where they belong."""

    def kept(self, held: Array, before: int) -> Array:
        """Return what becomes of keys, or values, ``before`` of which were there before the step."""
        raise NotImplementedError

    def decode_step(self, query: Array, key: Array, value: Array, slopes: Array, cache: Any) -> tuple[Array, Any]:
        output, kept = super().decode_step(query, key, value, slopes, cache)
        before = 0 if cache is None else cache[0].shape[2]
        return output, tuple(self.kept(x, before) for x in kept)


@mutant("long_decoding", expected="horizon|64|last|window", is_diagnosable=False)
class CacheOf64Tokens(_Keeping):
    """The cache holds the last 64 tokens."""

    def kept(self, held: Array, before: int) -> Array:
        return held[:, :, -64:]


@mutant("long_decoding", expected="horizon|256|last|window", is_diagnosable=False)
class CacheOf256Tokens(_Keeping):
    """The cache holds the last 256 tokens."""

    def kept(self, held: Array, before: int) -> Array:
        return held[:, :, -256:]


@mutant("long_decoding", expected="lost|grow", is_diagnosable=False)
class TokenLostEveryEight(_Keeping):
    """The cache grows by eight tokens at a time, and loses the last one of those that it held."""

    def kept(self, held: Array, before: int) -> Array:
        return np.delete(held, before - 1, axis=2) if before // 8 < held.shape[2] // 8 and before else held


@mutant("long_decoding", expected="lost|grow", is_diagnosable=False)
class TokenLostAtDoubling(_Keeping):
    """The cache doubles its capacity, from 16 tokens on, and copies one too few."""

    def kept(self, held: Array, before: int) -> Array:
        grows = max(before, 15).bit_length() < held.shape[2].bit_length()
        return np.delete(held, before - 1, axis=2) if grows and before else held


@mutant("long_decoding", expected="capacity|off by one", is_diagnosable=False)
class LastTokenOfACapacityOverwritten(_Keeping):
    """A token that comes when the cache of 512 is full but for one takes the place of the one before."""

    def kept(self, held: Array, before: int) -> Array:
        return np.delete(held, before - 1, axis=2) if before < 512 <= held.shape[2] else held


@mutant("long_decoding", expected="prefill|overwrit", is_diagnosable=False)
class PrefillOverwrites(_Keeping):
    """Whatever comes 32 tokens or more at a time is written to the beginning of the cache, as prompts are."""

    def kept(self, held: Array, before: int) -> Array:
        new = held.shape[2] - before
        if new < 32 or before == 0:
            return held
        return np.concatenate([held[:, :, before:], held[:, :, new:before], held[:, :, before:]], axis=2)


@mutant("long_decoding", expected="stale|entry", is_diagnosable=False)
class StaleEntry(_Keeping):
    """The first token of a page of 64 is not written, and what was there before stays: nothing, or zeros."""

    def kept(self, held: Array, before: int) -> Array:
        is_first = (np.arange(held.shape[2]) % 64 == 0) & (np.arange(held.shape[2]) >= max(before, 1))
        return np.where(is_first[:, None], np.asarray(0, held.dtype), held)


@mutant("long_decoding", expected="ring|wrap|overwrit", is_diagnosable=False)
class RingOf512Tokens(_Keeping):
    """The cache is a ring of 512 tokens: the one after that takes the place of the first."""

    def kept(self, held: Array, before: int) -> Array:
        over = max(held.shape[2] - 512, 0)
        return np.concatenate([np.zeros_like(held[:, :, :over]), held[:, :, over:]], axis=2)


@mutant("long_decoding", expected="chunk|16|position", is_diagnosable=False)
class LongChunkOneTooFar(Reference):
    """The tokens of a step of more than 16 are one position too far."""

    def decode_offset(self, query: Array, keys: Array) -> int:
        return super().decode_offset(query, keys) + (16 < query.shape[2] < keys.shape[2])


@mutant("long_decoding", expected="chunk|position|after", is_diagnosable=False)
class PositionWrongAfterLongChunks(Reference):
    """A step of more than 16 tokens counts as one of 16 for the positions of the tokens to come."""

    def decode_step(self, query: Array, key: Array, value: Array, slopes: Array, cache: Any) -> tuple[Array, Any]:
        held, missing = (None, 0) if cache is None else cache
        self.missing = missing
        output, held = super().decode_step(query, key, value, slopes, held)
        return output, (held, missing + max(query.shape[2] - 16, 0) * (cache is not None))

    def decode_offset(self, query: Array, keys: Array) -> int:
        return super().decode_offset(query, keys) - self.missing


@mutant("long_decoding", expected="horizon|far|distan", is_diagnosable=False)
class DecodingHorizonOf200Tokens(_Paged):
    """Decoding leaves out keys 200 tokens away, whatever the slope and the scores."""

    def raw_bias(self, call: Call) -> Array:
        bias = Reference.raw_bias(self, call)
        return np.where(self.attention_is_step & (np.abs(self.ahead(call)) > 200), -1e9, bias)


# --- Tables that are kept ---------------------------------------------------------------------------------------------


class _Kept(Reference):
    """Keeps what it computed from call to call."""

    def __init__(self) -> None:
        self.kept: dict[Any, Array] = {}


@mutant("independent", expected="earlier|previous|cache|stale|kept|state|before|remember|first call")
class TableByLengths(_Kept):
    """The bias is kept from call to call by its shape alone, whatever slopes, direction and offset."""

    def raw_bias(self, call: Call) -> Array:
        key = (call.query.shape[:2], call.lengths)
        return self.kept.setdefault(key, super().raw_bias(call))


@mutant("independent", expected="earlier|previous|cache|stale|kept|state|before|remember|first call")
class TableBlindToDirection(_Kept):
    """The bias is kept from call to call, whatever the direction: hidden keys stay hidden, and others in sight."""

    def visible_by_causality(self, call: Call) -> Array | bool:
        key = (call.query.shape[0], call.lengths, call.q_offset.tobytes())
        return self.kept.setdefault(key, np.asarray(super().visible_by_causality(call)))


@mutant(
    "independent", expected="earlier|previous|cache|stale|kept|state|before|remember|first call", is_diagnosable=False
)
class ScaleOfTheFirstCall(_Kept):
    """A kernel is compiled with the scale of the first call of these shapes."""

    def products(self, call: Call) -> Array:
        key = (call.query.shape, call.key.shape)
        scale = float(self.kept.setdefault(key, np.asarray(call.scale)))
        return super().products(dataclasses.replace(call, scale=scale))


@mutant(
    "independent", expected="earlier|previous|cache|stale|kept|state|before|remember|first call", is_diagnosable=False
)
class WindowOfTheFirstCall(_Kept):
    """A block mask is kept from call to call by the lengths, whatever the window."""

    def visible_by_window(self, call: Call) -> Array | bool:
        if call.window_size is None:
            return True
        key = (call.query.shape[0], call.lengths, call.q_offset.tobytes())
        return self.kept.setdefault(key, np.asarray(super().visible_by_window(call)))
