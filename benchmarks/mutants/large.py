"""Mistakes that are made at, or beyond, some size only: of heads, features, batches and rows."""

from __future__ import annotations

import dataclasses

import numpy as np

from benchmarks.mutants._mutant import sized
from benchmarks.mutants.reference import Array, Call, Reference


class _Narrow(Reference):
    """Features beyond {size} are left out of scores."""

    size = 0

    def products(self, call: Call) -> Array:
        parts = {name: getattr(call, name)[..., : self.size] for name in ("query", "key")}
        return super().products(dataclasses.replace(call, **parts))


class _OneOfFewHeads(Reference):
    """Heads beyond {size} have the slopes of those before."""

    size = 0

    def raw_bias(self, call: Call) -> Array:
        bias = np.broadcast_to(super().raw_bias(call), (*call.query.shape[:3], call.lengths[1]))
        return bias[:, np.arange(bias.shape[1]) % self.size]


class _OneOfFewEntries(Reference):
    """Batch entries beyond {size} read the keys and values of those before."""

    size = 0

    def grouped(self, call: Call, x: Array) -> Array:
        heads = super().grouped(call, x)
        return heads[np.arange(len(heads)) % self.size]


class _LargeGroup(Reference):
    """Groups of more than {size} query heads read the wrong keys."""

    size = 0

    def grouped(self, call: Call, x: Array) -> Array:
        if call.group <= self.size:
            return super().grouped(call, x)
        return np.roll(super().grouped(call, x), 1, axis=0 if len(x) > 1 else 1)


class _Short(Reference):
    """In rows of more than {size} tokens the first key of the last block is left out."""

    size = 0

    def scores(self, call: Call) -> Array:
        scores, (_, kv_len) = super().scores(call), call.lengths
        missing = kv_len > self.size and (np.arange(kv_len) == (kv_len - 1) // 16 * 16)
        return np.where(missing, -np.inf, scores)


class _ShortForFewQueries(_Short):
    """Where few queries meet more than {size} keys, one key is left out."""

    def scores(self, call: Call) -> Array:
        return super().scores(call) if call.lengths[0] < 16 else Reference.scores(self, call)


class _Halved(Reference):
    """Halves the bias of some calls."""

    size = 0

    def is_wrong(self, call: Call) -> bool:
        raise NotImplementedError

    def raw_bias(self, call: Call) -> Array:
        return super().raw_bias(call) * (0.5 if self.is_wrong(call) else 1)


class _JustFeatures(_Halved):
    """The path for {size} features halves the bias."""

    def is_wrong(self, call: Call) -> bool:
        return call.query.shape[3] == self.size


class _JustHeads(_Halved):
    """The path for {size} heads halves the bias."""

    def is_wrong(self, call: Call) -> bool:
        return call.query.shape[1] == self.size


class _EvenBlocks(_Halved):
    """The path for lengths that are multiples of {size} halves the bias."""

    def is_wrong(self, call: Call) -> bool:
        return min(call.lengths) > 0 and all(n % self.size == 0 for n in call.lengths)


class _TextsOfOneLength(_Halved):
    """The path for padded texts of more than {size} tokens halves the bias where neighbours have the same length."""

    def is_wrong(self, call: Call) -> bool:
        if call.mask is None or call.lengths[1] <= self.size:
            return False
        texts = call.mask[:, 0, 0].sum(axis=-1)
        return bool((texts[1:] == texts[:-1]).any())


_BOTH = ("large", "large_gradients")
MUTANTS = (
    sized(_Narrow, 64, *_BOTH, expected="more than 64 features"),
    sized(_Narrow, 128, *_BOTH, expected="more than 128 features"),
    sized(_Narrow, 256, "large", expected="more than 256 features"),
    sized(_OneOfFewEntries, 8, *_BOTH, expected="more than 8 batch entries"),
    sized(_OneOfFewEntries, 16, "large", expected="more than 16 batch entries"),
    sized(_OneOfFewEntries, 64, "large", expected="more than 64 batch entries"),
    sized(_OneOfFewHeads, 8, *_BOTH, expected="more than 8 heads"),
    # 18 heads in groups of 6 are wrong, too, where no axis alone is large.
    sized(_OneOfFewHeads, 16, *_BOTH),
    sized(_OneOfFewHeads, 32, *_BOTH, expected="more than 32 heads"),
    sized(_OneOfFewHeads, 64, "large", expected="more than 64 heads"),
    sized(_LargeGroup, 8, "large", expected="more than 8 query heads"),
    sized(_LargeGroup, 16, "large", expected="more than 16 query heads"),
    sized(_Short, 128, "long", *_BOTH),
    sized(_Short, 256, *_BOTH),
    sized(_Short, 512, *_BOTH),
    sized(_Short, 1024, *_BOTH, expected="more than 1024 tokens"),
    sized(_Short, 2048, "large"),
    sized(_ShortForFewQueries, 1024, "large", expected="more than 1024 tokens"),
    *(sized(_JustFeatures, n, *_BOTH, expected=f"with {n} features a head") for n in (64, 80, 128)),
    *(sized(_JustHeads, n, *_BOTH, expected=f"with {n} heads") for n in (8, 12)),
    sized(_JustHeads, 32, "large"),
    *(sized(_EvenBlocks, n, *_BOTH) for n in (32, 64, 128)),
    sized(_TextsOfOneLength, 1024, "large"),
)
