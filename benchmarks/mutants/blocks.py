"""Mistakes of kernels: blocks of keys, the online softmax, and horizons beyond which keys are dropped."""

from __future__ import annotations

import dataclasses

import numpy as np

from benchmarks.mutants._mutant import instead, mutant
from benchmarks.mutants.reference import Array, Blockwise, Call, Reference

HORIZON = "horizon|(far|distant).*(drop|left out|ignor)|(drop|left out|cut).*(far|distant|keys)"
BLOCK = "block|tail|last keys|tile|partial|multiple"


def first_keys(call: Call, count: int) -> Call:
    """Return a call without the keys after the first ``count``."""
    ids, mask = call.segment_ids, call.mask
    return dataclasses.replace(
        call,
        key=call.key[:, :, :count],
        value=call.value[:, :, :count],
        segment_ids=None if ids is None else (ids[0], ids[1][:, :count]),
        mask=None if mask is None else mask[..., :count],
    )


@instead(Blockwise, "output", "long", expected=BLOCK + "|drop|first 64")
def key_blocks_of_top_left_queries(self, call: Call) -> Array:
    """Blocks of keys are read up to the query's own index, not position: keys after that are missing."""
    if not call.is_causal:
        return Blockwise.output(self, call)
    blocks = -(-call.lengths[0] // self.block_size)
    return Blockwise.output(self, first_keys(call, blocks * self.block_size))


@mutant("long", expected="nan|infin")
class NanAfterAHiddenBlock(Blockwise):
    """A row whose first block is all hidden has minus infinity for a maximum, and is NaN for good."""

    def output(self, call: Call) -> Array:
        sees = self.visible(call).any(axis=-1, keepdims=True)
        return np.where(sees, super().output(call), 0)

    def updated(self, highest: Array, total: Array, result: Array, scores: Array, values: Array) -> tuple[Array, ...]:
        new = np.maximum(highest, scores.max(axis=-1, keepdims=True))
        with np.errstate(invalid="ignore"):
            correction, weights = np.exp(highest - new), np.exp(scores - new)
        correction = np.where(np.isneginf(highest) & np.isfinite(new), 0, correction)
        return new, total * correction + weights.sum(axis=-1, keepdims=True), result * correction + weights @ values


@instead(Blockwise, "beginning", "long")
def maximum_begins_with_zero(self, call: Call) -> tuple[Array, Array, Array]:
    """The running maximum begins with 0: rows whose scores are all far below it come to nothing."""
    highest, total, result = Blockwise.beginning(self, call)
    return np.zeros_like(highest), total, result


# --- Masks that end with the first block ------------------------------------------------------------------------------


def beyond_the_first_block(call: Call) -> Array:
    """Return which keys are beyond the first 64, and seen if nothing else hides them."""
    return np.arange(call.lengths[1]) >= 64


@instead(Reference, "visible_by_mask", "long")
def mask_of_the_first_block(self, call: Call) -> Array:
    """The mask hides keys of the first block alone."""
    return Reference.visible_by_mask(self, call) | beyond_the_first_block(call)


@instead(Reference, "visible_by_window", "long")
def window_of_the_first_block(self, call: Call) -> Array:
    """The window hides keys of the first block alone."""
    return Reference.visible_by_window(self, call) | beyond_the_first_block(call)


@instead(Reference, "visible_by_window", "long", expected="window is one key too long")
def long_window_one_longer(self, call: Call) -> Array | bool:
    """A window of 64 tokens or more, which spans blocks, is one key too long."""
    if call.window_size is None or call.window_size < 64:
        return Reference.visible_by_window(self, call)
    return Reference.visible_by_window(self, dataclasses.replace(call, window_size=call.window_size + 1))


# --- Horizons ---------------------------------------------------------------------------------------------------------


class _Horizon(Blockwise):
    """Keys farther away than the horizon are dropped: this is right, the mutants are not."""

    tolerance = 2.0**-24

    def horizon(self, call: Call, gap: Array, slopes: Array) -> Array:
        """Return for each row from which distance keys weigh ``tolerance`` together, ``[batch, heads, q_len, 1]``.

        Args:
            call: The call.
            gap: How much higher than the row's own key another may score, at most.
            slopes: ``[batch, heads, 1, 1]``.
        """
        with np.errstate(divide="ignore"):
            return (gap + np.log(1 / (self.tolerance * -np.expm1(-slopes)))) / slopes

    def masked(self, call: Call, scores: Array) -> Array:
        scores = super().masked(call, scores)
        q_len, kv_len = call.lengths
        if not call.is_causal or q_len != kv_len or call.q_offset.any() or self.has_more(call):
            return scores
        query, key = call.query.astype(np.float64), self.grouped(call, call.key).astype(np.float64)
        reach = np.linalg.norm(query, axis=-1) * np.linalg.norm(key, axis=-1).max(axis=-1, initial=0, keepdims=True)
        gap = abs(call.scale) * reach - call.scale * (query * key).sum(axis=-1)
        horizon = self.horizon(call, gap[..., None], self.by_head(call, call.slopes).astype(np.float64))
        return np.where(-self.ahead(call) < horizon, scores, -np.inf)

    def has_more(self, call: Call) -> bool:
        return any(x is not None for x in (call.window_size, call.segment_ids, call.mask))


@instead(_Horizon, "horizon", "long")
def horizon_too_short(self, call: Call, gap: Array, slopes: Array) -> Array:
    """The horizon is a tenth too short."""
    return 0.9 * _Horizon.horizon(self, call, gap, slopes)


@instead(_Horizon, "horizon", "long")
def horizon_of_the_mean_slope(self, call: Call, gap: Array, slopes: Array) -> Array:
    """All heads have the horizon of the mean slope."""
    return _Horizon.horizon(self, call, gap, np.broadcast_to(slopes.mean(axis=1, keepdims=True), slopes.shape))


@instead(_Horizon, "horizon", "long")
def horizon_of_the_first_head(self, call: Call, gap: Array, slopes: Array) -> Array:
    """All heads have the horizon of the first."""
    return _Horizon.horizon(self, call, gap, slopes[:, :1])


@instead(_Horizon, "horizon", "long")
def horizon_blind_to_scores(self, call: Call, gap: Array, slopes: Array) -> Array:
    """The horizon follows from the slope alone, as if all scores were alike."""
    return _Horizon.horizon(self, call, np.zeros_like(gap), slopes)


@instead(_Horizon, "horizon", "causal")
def horizon_of_no_slope_is_nan(self, call: Call, gap: Array, slopes: Array) -> Array:
    """The horizon of a slope of 0 is 0 / 0, and nothing is less than that."""
    return np.where(slopes == 0, np.nan, _Horizon.horizon(self, call, gap, slopes))
