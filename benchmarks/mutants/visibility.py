"""Mistakes in what a query may look at: causal masks, windows, segments, masks, and rows that see nothing."""

from __future__ import annotations

import numpy as np

from benchmarks.mutants._mutant import mutant
from benchmarks.mutants.reference import Array, Call, Reference

# --- The causal mask --------------------------------------------------------------------------------------------------


@mutant("causal", expected="strict|own|itself|diagonal|off by one")
class StrictlyCausal(Reference):
    """A query does not see its own key."""

    def visible_by_causality(self, call: Call) -> Array | bool:
        return self.ahead(call) < 0 if call.is_causal else True


@mutant("causal", expected="one.*(ahead|to come|future)|next|diagonal|off by one")
class CausalOneAhead(Reference):
    """A query sees the next key."""

    def visible_by_causality(self, call: Call) -> Array | bool:
        return self.ahead(call) <= 1 if call.is_causal else True


@mutant("causal", expected="caus")
class CausalIgnored(Reference):
    """There is no causal mask (Falcon's path through SDPA)."""

    def visible_by_causality(self, call: Call) -> Array | bool:
        return True


@mutant("symmetric", expected="caus")
class AlwaysCausal(Reference):
    """There is always a causal mask."""

    def visible_by_causality(self, call: Call) -> Array | bool:
        return self.ahead(call) <= 0


@mutant("offset", expected="single|one query|causal")
class NoCausalMaskForOneQuery(Reference):
    """A single query is taken for the last one, and sees all keys, wherever q_offset has it."""

    def visible_by_causality(self, call: Call) -> Array | bool:
        return True if call.lengths[0] == 1 else super().visible_by_causality(call)


# --- Windows ----------------------------------------------------------------------------------------------------------


class _Window(Reference):
    """A window that is another one."""

    def limits(self, call: Call, size: int) -> Array:
        raise NotImplementedError

    def visible_by_window(self, call: Call) -> Array | bool:
        return True if call.window_size is None else self.limits(call, call.window_size)


@mutant("window", expected="window.*(one|off by|strict|less|narrow|small|< )|one.*window")
class WindowOneShort(_Window):
    """The window holds window_size keys, the own one among them."""

    def limits(self, call: Call, size: int) -> Array:
        return np.abs(self.ahead(call)) < size


@mutant("window", expected="window.*(one|off by|wide|large|more|\\+ ?1)|one.*window")
class WindowOneTooWide(_Window):
    """The window is one key too wide."""

    def limits(self, call: Call, size: int) -> Array:
        return np.abs(self.ahead(call)) <= size + 1


@mutant("window", expected="window.*(one side|past|back|future|ahead|to come)|future.*window")
class WindowOfThePastOnly(_Window):
    """The window does not limit keys to come."""

    def limits(self, call: Call, size: int) -> Array:
        return self.ahead(call) >= -size


@mutant("window", expected="window.*(one side|past|back|future|ahead|to come|caus)|(future|caus).*window")
class WindowHidesTheFuture(_Window):
    """The window, meant for causal attention, hides keys to come."""

    def limits(self, call: Call, size: int) -> Array:
        return (self.ahead(call) <= 0) & (self.ahead(call) >= -size)


@mutant("window", expected="window.*(width|half|total|both|together|sum|two)")
class WindowOfTotalWidth(_Window):
    """The window size is taken for the width of both sides together."""

    def limits(self, call: Call, size: int) -> Array:
        return np.abs(self.ahead(call)) <= size // 2


@mutant("window", expected="window.*(ignor|not (use|apply|applied))|ignor.*window")
class WindowIgnored(_Window):
    """The window is ignored."""

    def limits(self, call: Call, size: int) -> Array:
        return np.ones_like(self.ahead(call), dtype=bool)


@mutant("window", expected="window.*(0|zero|ignor|no window)")
class WindowZeroIsNone(_Window):
    """A window of 0 counts as none: ``if window_size``."""

    def limits(self, call: Call, size: int) -> Array:
        return (np.abs(self.ahead(call)) <= size) | (size == 0)


@mutant("combined", expected="window.*(q_offset|index|indices|position|offset|align)|offset")
class WindowOfIndices(_Window):
    """The window compares indices, not positions: it ignores q_offset."""

    def limits(self, call: Call, size: int) -> Array:
        return np.abs(np.arange(call.lengths[1]) - np.arange(call.lengths[0])[:, None]) <= size


# --- Segments ---------------------------------------------------------------------------------------------------------


@mutant("segments", expected="segment.*(leak|ignor|not (use|apply))|ignor.*segment|leak")
class SegmentsIgnored(Reference):
    """Segments are ignored."""

    def visible_by_segments(self, call: Call) -> Array | bool:
        return True


@mutant("segments", expected="segment.*(before|earlier|previous|past|leak)|(before|earlier|previous).*segment")
class EarlierSegmentsSeen(Reference):
    """A query sees earlier segments too, as if the causal mask had seen to it that it does not."""

    def visible_by_segments(self, call: Call) -> Array | bool:
        if call.segment_ids is None:
            return True
        q_ids, kv_ids = call.segment_ids
        return (q_ids[:, :, None] >= kv_ids[:, None, :])[:, None]


@mutant("segments", expected="first (batch )?entry|batch|entry")
class FirstEntrysSegmentsForAll(Reference):
    """All batch entries have the segments of the first."""

    def visible_by_segments(self, call: Call) -> Array | bool:
        if call.segment_ids is None:
            return True
        q_ids, kv_ids = call.segment_ids
        return (q_ids[:1, :, None] == kv_ids[:1, None, :])[:, None]


@mutant("segments", expected="segment.*(quer|pair|same|keys)|quer.*segment")
class SegmentsOfKeysForQueries(Reference):
    """Queries have the segments of the last keys, whatever their own ids say."""

    def visible_by_segments(self, call: Call) -> Array | bool:
        if call.segment_ids is None or call.lengths[0] > call.lengths[1]:
            return super().visible_by_segments(call)
        kv_ids = call.segment_ids[1]
        return (kv_ids[:, -call.lengths[0] :, None] == kv_ids[:, None, :])[:, None]


# --- Masks ------------------------------------------------------------------------------------------------------------


@mutant("mask", expected="mask.*(invert|opposite|hides what|negat|complement|revers)|invert")
class MaskInverted(Reference):
    """True hides (PyTorch's key_padding_mask) where it should show."""

    def visible_by_mask(self, call: Call) -> Array | bool:
        return True if call.mask is None else ~call.mask


@mutant("mask", expected="mask.*(ignor|not (use|apply|applied))|ignor.*mask")
class MaskIgnored(Reference):
    """The mask is ignored (Falcon's path through SDPA)."""

    def visible_by_mask(self, call: Call) -> Array | bool:
        return True


@mutant("mask", expected="mask.*(add|0.*1|number)|add.*mask")
class MaskAdded(Reference):
    """The mask is added to the scores as 0 and 1, as if it were a bias."""

    def visible_by_mask(self, call: Call) -> Array | bool:
        return True

    def products(self, call: Call) -> Array:
        scores = super().products(call)
        return scores if call.mask is None else scores + call.mask.astype(scores.dtype)


@mutant("mask", expected="mask.*(after|renormal|denominator|sum)|renormal|after.*softmax")
class MaskedAfterSoftmax(Reference):
    """What the mask hides is left out after the softmax, in whose denominator it counts."""

    def visible_by_mask(self, call: Call) -> Array | bool:
        return True

    def weights(self, call: Call) -> Array:
        weights = super().weights(call)
        return weights if call.mask is None else weights * call.mask


@mutant("mask", expected="mask.*(first head|head 0|all heads)|(first head|all heads).*mask")
class FirstHeadsMaskForAll(Reference):
    """All heads have the mask of the first."""

    def visible_by_mask(self, call: Call) -> Array | bool:
        return True if call.mask is None else call.mask[..., :1, :, :]


@mutant("mask", expected="first (batch )?entry|batch|entry")
class FirstEntrysMaskForAll(Reference):
    """All batch entries have the mask of the first."""

    def visible_by_mask(self, call: Call) -> Array | bool:
        return call.mask[:1] if call.mask is not None and call.mask.ndim == 4 else super().visible_by_mask(call)


@mutant("mask", expected="mask.*(finite|weak|large|-?10|hidden)|not hidden|finite")
class MaskOfMinusTen(Reference):
    """What the mask hides has its score lowered by 10, which is little besides large scores."""

    def visible_by_mask(self, call: Call) -> Array | bool:
        return True

    def products(self, call: Call) -> Array:
        scores = super().products(call)
        return scores if call.mask is None else scores - scores.dtype.type(10) * ~call.mask


@mutant("mask", expected="mask.*(finite|weak|large|10.?000|1e4|hidden)|not hidden|finite|large", is_diagnosable=False)
class MaskOfMinusTenThousand(Reference):
    """What the mask hides has its score lowered by 10,000 (BERT), which is not enough besides huge scores."""

    def masked(self, call: Call, scores: Array) -> Array:
        hidden = ~np.asarray(self.visible_by_mask(call))
        seen = np.logical_and(self.visible_by_causality(call), self.visible_by_window(call))
        seen = np.logical_and(seen, self.visible_by_segments(call)) & self.visible(call).any(axis=-1, keepdims=True)
        return np.where(seen, scores - scores.dtype.type(10_000) * hidden, -np.inf)


# --- Rows that see nothing --------------------------------------------------------------------------------------------


@mutant("nowhere", expected="nan")
class NanWhereNothingIsSeen(Reference):
    """A row that sees nothing is minus infinity less minus infinity, and NaN."""

    def softmax(self, scores: Array) -> Array:
        with np.errstate(invalid="ignore"):
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True, initial=-np.inf))
            return weights / weights.sum(axis=-1, keepdims=True)


@mutant("nowhere", expected="mean|average|uniform|equally|alike")
class MeanWhereNothingIsSeen(Reference):
    """What is hidden has the lowest finite score, so that a row that sees nothing gives the mean of all values."""

    def masked(self, call: Call, scores: Array) -> Array:
        return np.where(self.visible(call), scores, np.finfo(self.working_dtype).min)
