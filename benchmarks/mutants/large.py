"""Mistakes that are made beyond some size only: of heads, batches, rows and distances."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from benchmarks.mutants._mutant import mutant
from benchmarks.mutants.reference import Array, Call, Reference


def beyond(size: int, what: str) -> str:
    """Return what a diagnosis should say."""
    return f"more than {size} {what}"


# --- Wide heads -------------------------------------------------------------------------------------------------------


class _Narrow(Reference):
    """Products of queries and keys count the first features only."""

    width = 64

    def products(self, call: Call) -> Array:
        parts = {name: getattr(call, name)[..., : self.width] for name in ("query", "key")}
        return super().products(dataclasses.replace(call, **parts))


@mutant("large", "large_gradients", expected=beyond(64, "features"))
class FeaturesBeyond64(_Narrow):
    """Features beyond 64 are left out of scores."""


@mutant("large", "large_gradients", expected=beyond(128, "features"))
class FeaturesBeyond128(_Narrow):
    """Features beyond 128 are left out of scores."""

    width = 128


@mutant("large", expected=beyond(256, "features"))
class FeaturesBeyond256(_Narrow):
    """Features beyond 256 are left out of scores."""

    width = 256


# --- Many batch entries and heads -------------------------------------------------------------------------------------


class _OneOfFew(Reference):
    """Some numbers of batch entries, or of heads, are taken modulo a power of two."""

    axis = "batch"
    most = 8

    def raw_bias(self, call: Call) -> Array:
        bias = np.broadcast_to(super().raw_bias(call), (*call.query.shape[:3], call.lengths[1]))
        numbers = np.arange(bias.shape[self.axis == "head"]) % self.most
        return bias[:, numbers] if self.axis == "head" else bias

    def grouped(self, call: Call, x: Array) -> Array:
        heads = super().grouped(call, x)
        return heads[np.arange(len(heads)) % self.most] if self.axis == "batch" else heads


@mutant("large", "large_gradients", expected=beyond(8, "batch entries"))
class BatchModulo8(_OneOfFew):
    """Batch entries beyond 8 read the keys and values of those before."""


@mutant("large", expected=beyond(16, "batch entries"))
class BatchModulo16(_OneOfFew):
    """Batch entries beyond 16 read the keys and values of those before."""

    most = 16


@mutant("large", expected=beyond(64, "batch entries"))
class BatchModulo64(_OneOfFew):
    """Batch entries beyond 64 read the keys and values of those before."""

    most = 64


@mutant("large", "large_gradients", expected=beyond(8, "heads"))
class SlopesModulo8(_OneOfFew):
    """Heads beyond 8 have the slopes of those before."""

    axis = "head"


# 18 heads in groups of 6 are wrong, too, where no axis alone is large.
@mutant("large", "large_gradients", expected=beyond(16, "heads"), is_diagnosable=False)
class SlopesModulo16(_OneOfFew):
    """Heads beyond 16 have the slopes of those before."""

    axis, most = "head", 16


@mutant("large", "large_gradients", expected=beyond(32, "heads"))
class SlopesModulo32(_OneOfFew):
    """Heads beyond 32 have the slopes of those before."""

    axis, most = "head", 32


@mutant("large", expected=beyond(64, "heads"))
class SlopesModulo64(_OneOfFew):
    """Heads beyond 64 have the slopes of those before."""

    axis, most = "head", 64


class _LargeGroup(Reference):
    """Query heads of a group beyond some number read another key/value head."""

    most = 8

    def grouped(self, call: Call, x: Array) -> Array:
        if call.group <= self.most:
            return super().grouped(call, x)
        return np.roll(super().grouped(call, x), 1, axis=0 if len(x) > 1 else 1)


@mutant("large", expected=beyond(8, "query heads"))
class GroupBeyond8(_LargeGroup):
    """Groups of more than 8 query heads read the wrong keys."""


@mutant("large", expected=beyond(16, "query heads"))
class GroupBeyond16(_LargeGroup):
    """Groups of more than 16 query heads read the wrong keys."""

    most = 16


# --- Long rows --------------------------------------------------------------------------------------------------------


class _Short(Reference):
    """In rows of more keys than these, the first key of the last block is left out."""

    most = 128

    def scores(self, call: Call) -> Array:
        scores, (_, kv_len) = super().scores(call), call.lengths
        missing = kv_len > self.most and (np.arange(kv_len) == (kv_len - 1) // 16 * 16)
        return np.where(missing, -np.inf, scores)


@mutant("long", "large", "large_gradients", expected="more than .* tokens", is_diagnosable=False)
class RowBeyond128(_Short):
    """In rows of more than 128 tokens a key is left out."""


@mutant("large", "large_gradients", expected="more than .* tokens", is_diagnosable=False)
class RowBeyond256(_Short):
    """In rows of more than 256 tokens a key is left out."""

    most = 256


@mutant("large", "large_gradients", expected="more than .* tokens", is_diagnosable=False)
class RowBeyond512(_Short):
    """In rows of more than 512 tokens a key is left out."""

    most = 512


@mutant("large", "large_gradients", expected=beyond(1024, "tokens"))
class RowBeyond1024(_Short):
    """In rows of more than 1024 tokens a key is left out."""

    most = 1024


@mutant("large", expected=beyond(2048, "tokens"), is_diagnosable=False)
class RowBeyond2048(_Short):
    """In rows of more than 2048 tokens a key is left out."""

    most = 2048


@mutant("large", expected="more than 1024 tokens")
class FewQueriesBeyond1024(_Short):
    """Where few queries meet more than 1024 keys, one key is left out."""

    most = 1024

    def scores(self, call: Call) -> Array:
        return super().scores(call) if call.lengths[0] < 16 else Reference.scores(self, call)


# --- Clipped distances ------------------------------------------------------------------------------------------------


class _Clipped(Reference):
    """Distances end somewhere."""

    most = 256
    attention_grad: Any = None  # a kernel without a backward pass

    def raw_bias(self, call: Call) -> Array:
        return -self.steepness(call).astype(np.float64) * np.minimum(np.abs(self.ahead(call)), self.most)


@mutant("large", expected="clipped at 256")
class DistanceClippedAt256(_Clipped):
    """Keys farther than 256 tokens are penalised no more."""


@mutant("large", expected="clip|more than")
class DistanceClippedAt512(_Clipped):
    """Keys farther than 512 tokens are penalised no more."""

    most = 512


@mutant("large", expected="clip|more than")
class DistanceClippedAt1024(_Clipped):
    """Keys farther than 1024 tokens are penalised no more."""

    most = 1024
