"""Readings of ALiBi: how an implementation computes it, the paper's way or another, in float64 NumPy."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from alibi_core.conformance._cases import SMALLEST, U32, UNIT_ROUNDOFF, Answer, Case, Values, rounded
from alibi_core.conformance._diagnosis._readings.inputs import FACTORS, SCALES, Inputs
from alibi_core.conformance._diagnosis._readings.parts import (
    LAWS,
    is_in_order,
    is_in_segment,
    is_in_window,
    low,
    segment_starts,
    side_slopes,
    softmax,
    taken_mask,
)
from alibi_core.conformance._diagnosis._readings.slopes import SLOPES

VISIBLE_MASKS = ("mask ignored", "mask added", "mask multiplied", "mask after softmax")  # that hide no score


@dataclass(frozen=True)
class Reading:
    """A way to compute ALiBi attention. What is not said otherwise is as in the paper.

    Attributes:
        slopes: How a head comes by its slope, one of ``SLOPES``.
        head_factors: What each head's slope is multiplied by on top; empty for nothing.
        slope_dtype: What slopes are rounded to.
        factor: What the bias is multiplied by, a number or one of ``FACTORS``.
        distance: The law of distance, and its number if it has one.
        rounding: What of the bias is rounded, and to which dtype.
        noise: Which sums, whose order cannot be known, are rounded, and to which dtype.
        bias_offset, causal_offset, window_offset: Where the first query stands for each of these, of ``OFFSETS``.
        causal: How the causal mask is taken, and its number if it has one.
        window, segments, mask: How these arguments are taken.
        heads: Which key/value head a query head reads.
        scale: One of ``SCALES``, or a number to multiply the given one by.
        softmax: How weights come from scores.
        keys: Which keys take part, and a number.
        nowhere: What a query gets that may look nowhere.
        order: In which order heads, or batch entries, come back.
        future: Whether future slopes are treated like slopes, or are right where those are not.
    """

    slopes: str = "given"
    head_factors: tuple[float, ...] = ()
    slope_dtype: str = "float64"
    factor: float | str = 1.0
    distance: tuple[str, float] = ("absolute", 0)
    rounding: tuple[str, str] = ("nothing", "float64")
    noise: tuple[str, str] = ("nothing", "float64")
    bias_offset: str = "given"
    causal_offset: str = "given"
    window_offset: str = "given"
    causal: tuple[str, int] = ("given", 0)
    window: str = "given"
    segments: str = "given"
    mask: str = "given"
    heads: str = "given"
    scale: str | float = "given"
    softmax: str = "given"
    keys: tuple[str, float] = ("all", 0)
    nowhere: str = "zeros"
    order: str = "given"
    future: str = "like slopes"

    def attention(self, case: Case, dtype: str) -> Values:
        """Return the output for a case, ``[batch, num_heads, q_len, head_dim]``."""
        return self.answer(Inputs.of(case, dtype)).value

    def answer(self, inputs: Inputs) -> Answer:
        """Return the output, and how far rounding in the adapter's dtype may move it."""
        inputs = self.prepared(inputs)
        bias, visible = self.kept_bias(inputs), self.kept_visible(inputs)
        weights, value = self._weights(inputs, bias, visible), self._by_query_head(inputs.value, inputs)
        output, sizes = self._output(weights, value), weights @ np.abs(value)
        tiny = SMALLEST[inputs.dtype] * (1 + np.abs(value).sum(axis=2, keepdims=True))
        return Answer(output, self.weight_error(inputs, bias, visible) * sizes + tiny)

    def output(self, inputs: Inputs) -> Values:
        """Return the output alone."""
        inputs = self.prepared(inputs)
        weights = self._weights(inputs, self.kept_bias(inputs), self.kept_visible(inputs))
        return self._output(weights, self._by_query_head(inputs.value, inputs))

    def _output(self, weights: Values, value: Values) -> Values:
        if self.noise[0] == "weights":
            weights = rounded(weights, self.noise[1])
        output = weights @ value
        if self.order != "given":
            output = output[:, ::-1] if self.order == "heads come back reversed" else output[::-1]
        return rounded(output, self.noise[1]) if self.noise[0] == "output" else np.asarray(output)

    def kept_bias(self, inputs: Inputs) -> Values:
        """Return the bias, computed once for all readings that agree on it."""
        fields = (self.slopes, self.head_factors, self.slope_dtype, self.factor, self.distance, self.rounding)
        return inputs.kept((*fields, self.bias_offset, self.segments, self.future), lambda: self.bias(inputs))

    def kept_visible(self, inputs: Inputs) -> Values:
        """Return which keys are visible, computed once for all readings that agree on it."""
        if self.keys[0] == "threshold":
            return self.visible(inputs)
        fields = (self.causal, self.causal_offset, self.window_offset, self.window, self.segments, self.mask, self.keys)
        return inputs.kept(fields, lambda: self.visible(inputs))

    def weight_error(self, inputs: Inputs, bias: Values, visible: Values) -> Values:
        """Return how far a weight may be off, relative to itself: twice what rounding can do, ``[..., q_len, 1]``."""
        u = UNIT_ROUNDOFF["float64"] if inputs.dtype == "float64" else U32
        highest = np.where(visible, bias, -np.inf).max(axis=-1, keepdims=True, initial=-np.inf)
        lowest = np.where(visible, bias, np.inf).min(axis=-1, keepdims=True, initial=np.inf)
        spread = np.where(np.isfinite(highest), highest - lowest, 0.0)
        if self.distance[0] in LAWS:  # which, other than distances, cannot be counted from the nearest key
            spread = np.maximum(spread, np.where(np.isfinite(lowest), -lowest, 0.0))
        scores = (inputs.head_dim + 3) * abs(self._scale(inputs)) * inputs.product_size + 3 * spread
        return np.asarray(4 * u * scores + (4 * inputs.kv_len + 16) * u + 4 * UNIT_ROUNDOFF[inputs.dtype])

    @property
    def is_noisy(self) -> bool:
        """Whether it rounds sums, whose order it cannot know."""
        return self.noise[0] != "nothing"

    @property
    def without_noise(self) -> Reading:
        """The same without rounding."""
        return dataclasses.replace(self, noise=("nothing", "float64"))

    def prepared(self, inputs: Inputs) -> Inputs:
        """Return the inputs as this reading takes them: padded, or rounded."""
        if self.keys[0] == "padding counted":
            inputs = inputs.padded(int(self.keys[1]))
        if self.noise[0] == "inputs":
            query, key, value = (low(x, self.noise[1]) for x in (inputs.query, inputs.key, inputs.value))
            inputs = dataclasses.replace(inputs, query=query, key=key, value=value, _kept={})
        return inputs

    def bias(self, inputs: Inputs) -> Values:
        """Return what is added to scores where nothing is hidden, ``[batch, num_heads, q_len, kv_len]``."""
        if self.factor == "bias lost":
            return np.zeros((inputs.batch, inputs.num_heads, inputs.q_len, inputs.kv_len))
        past = self.taken_slopes(inputs, inputs.slopes)[..., None, None]
        future = past
        if inputs.future_slopes is not None:
            is_right = self.future == "as given"
            future = inputs.future_slopes if is_right else self.taken_slopes(inputs, inputs.future_slopes)
            future = future[..., None, None]
        factor = FACTORS[self.factor](inputs) if isinstance(self.factor, str) else self.factor
        return np.asarray(factor * self._unscaled_bias(inputs, past, future))

    def taken_slopes(self, inputs: Inputs, slopes: Values) -> Values:
        """Return the slopes as they are used, ``[batch, num_heads]``."""
        slopes = np.broadcast_to(SLOPES[self.slopes](slopes, inputs), slopes.shape)
        if self.head_factors:
            slopes = slopes * np.resize(self.head_factors, inputs.num_heads)
        return rounded(slopes, self.slope_dtype)

    def _unscaled_bias(self, inputs: Inputs, past: Values, future: Values) -> Values:
        kind, number = self.distance
        what, dtype = self.rounding
        q_positions, kv_positions = self._positions(inputs)
        if kind in ("key only", "centred key only") or what in ("key-only bias", "centred key-only bias", "falcon"):
            rates = past if inputs.future_slopes is None else np.where(kv_positions > q_positions, future, past)
            return self._key_only_bias(inputs, rates, kv_positions) * np.ones((inputs.q_len, 1))
        if what in ("positions", "bias arithmetic"):
            q_positions, kv_positions = rounded(q_positions, dtype), rounded(kv_positions, dtype)
        ahead = kv_positions - q_positions
        if what in ("distances", "bias arithmetic"):
            ahead = rounded(ahead, dtype)
        if what == "bias arithmetic":
            past, future = rounded(past, dtype), rounded(future, dtype)
        past, future = side_slopes(kind, past, future)
        size = np.abs(ahead)
        if kind in LAWS:
            size = LAWS[kind](size, number)
        elif kind == "one more":
            size = size + 1
        elif kind == "distances one more":
            size = size + (size > 0)
        elif kind == "future one farther":
            size = size + (ahead > 0)
        elif kind == "future one nearer":
            size = size - (ahead > 0)
        result = -np.where(ahead > 0, future, past) * size
        if kind == "penalty clipped":
            result = np.maximum(result, -number)
        return rounded(result, dtype) if what in ("bias", "bias arithmetic") else result

    def _key_only_bias(self, inputs: Inputs, rates: Values, kv_positions: Values) -> Values:
        kind, (what, dtype) = self.distance[0], self.rounding
        if kind == "centred key only" or what == "centred key-only bias":
            kv_positions = kv_positions - (inputs.kv_len - 1)
        if what == "falcon":
            kv_positions = rounded(kv_positions, dtype)
        return rounded(rates * kv_positions, dtype)

    def _positions(self, inputs: Inputs) -> tuple[Values, Values]:
        """Return positions of queries ``[batch, 1, q_len, 1]`` and keys ``[batch or 1, 1, 1, kv_len]``."""
        q_positions = inputs.q_positions(self.bias_offset)
        kv_positions = np.arange(inputs.kv_len, dtype=np.float64)[None, None, None]
        kind, number = self.distance
        if kind in ("key positions restart", "positions restart"):
            kv_positions = kv_positions % number
        if kind in ("query positions restart", "positions restart"):
            q_positions = q_positions % number
        if inputs.ids is not None and self.segments in ("segment positions restart", "segment key positions restart"):
            starts = [np.maximum.accumulate(segment_starts(ids), axis=-1) for ids in inputs.ids]
            kv_positions = kv_positions - starts[1][:, None, None]
            if self.segments == "segment positions restart":
                q_positions = np.arange(inputs.q_len)[:, None] - starts[0][:, None, :, None]
        return q_positions, kv_positions

    def visible(self, inputs: Inputs) -> Values:
        """Return which keys a query sees, in a shape that broadcasts to ``[batch, num_heads, q_len, kv_len]``."""
        columns = np.arange(inputs.kv_len)
        ahead = columns - inputs.q_positions(self.causal_offset)
        result: Values = np.ones((1, 1, 1, inputs.kv_len), dtype=bool)
        causal, number = self.causal
        if (inputs.is_causal and causal != "causal ignored") or causal == "always causal":
            result = result & is_in_order(causal, number, ahead, columns, inputs.total)
        if inputs.window_size is not None and self.window != "window ignored":
            if self.window_offset != self.causal_offset:
                ahead = columns - inputs.q_positions(self.window_offset)
            result = result & is_in_window(self.window, ahead, inputs.window_size)
        if inputs.ids is not None and self.segments != "segments ignored":
            result = result & is_in_segment(self.segments, *inputs.ids)
        if inputs.mask is not None and self.mask not in VISIBLE_MASKS and not self.mask.startswith("minus"):
            result = result & taken_mask(self.mask, inputs.mask)
        if self.keys[0] not in ("all", "padding counted"):
            result = result & self._takes_part(inputs, ahead, columns)
        return result

    def _takes_part(self, inputs: Inputs, ahead: Values, columns: Values) -> Values:
        kind, number = self.keys
        if kind == "threshold":  # of the penalty
            return np.asarray(self.bias(inputs) >= -number)
        kv_len = inputs.kv_len
        kinds: dict[str, Callable[[], Values]] = {
            "horizon too short": lambda: np.abs(ahead) < number,
            "last partial block dropped": lambda: columns < kv_len // number * number,
            "first block dropped": lambda: columns >= number,
            "keys capped": lambda: columns < number,
            "last block dropped": lambda: columns < kv_len - number,
            "own step": lambda: columns >= kv_len - inputs.total,
            "diagonal block dropped": lambda: columns // number < (columns - ahead) // number,
        }
        return kinds[kind]()

    def _scale(self, inputs: Inputs) -> float:
        return SCALES[self.scale](inputs) if isinstance(self.scale, str) else inputs.scale * self.scale

    def _by_query_head(self, tensor: Values, inputs: Inputs) -> Values:
        """Return keys or values of each query head."""
        heads = np.arange(inputs.num_heads)
        kinds = {
            "given": heads // inputs.group,
            "grouped heads interleaved": heads % inputs.num_kv_heads,
            "first kv head for all": heads * 0,
            "kv heads reversed": inputs.num_kv_heads - 1 - heads // inputs.group,
        }
        return np.asarray(tensor[:, kinds[self.heads]])

    def _scores(self, inputs: Inputs, bias: Values) -> Values:
        """Return scores before anything is hidden, bias included, ``[batch, num_heads, q_len, kv_len]``."""
        if self.heads == "given":
            products = inputs.products
        else:
            products = inputs.query @ self._by_query_head(inputs.key, inputs).swapaxes(-1, -2)
        noise, dtype = self.noise
        if noise in ("products, unscaled", "all scores"):
            products = rounded(products, dtype)
        result: Values = self._scale(inputs) * products
        if noise in ("products", "all scores"):
            result = rounded(result, dtype)
        result = result * np.exp(bias) if self.softmax == "bias as a factor" else result + bias
        if inputs.mask is not None and self.mask.startswith("minus"):
            result = result - float(self.mask.split()[1]) * ~inputs.mask
        if inputs.mask is not None and self.mask in ("mask added", "mask multiplied"):
            result = result + inputs.mask if self.mask == "mask added" else result * inputs.mask
        if noise in ("scores", "all scores"):
            result = rounded(result, dtype)
        return result * np.log(2) if self.softmax == "softmax in base 2" else result

    def weights(self, inputs: Inputs) -> Values:
        """Return what each key weighs, ``[batch, num_heads, q_len, kv_len]``."""
        return self._weights(inputs, self.bias(inputs), self.visible(inputs))

    def _weights(self, inputs: Inputs, bias: Values, visible: Values) -> Values:
        scores = self._scores(inputs, bias)
        visible = np.broadcast_to(visible, scores.shape)
        if self.softmax == "hidden scores 0":
            scores, visible = np.where(visible, scores, 0), np.ones_like(visible)
        counted = np.where(visible | (self.softmax == "hidden keys counted"), scores, -np.inf)
        weights = softmax(counted, self.softmax)
        if self.softmax == "hidden keys counted":
            weights = weights * visible
        if self.mask == "mask after softmax" and inputs.mask is not None:
            weights = weights * inputs.mask
        if self.nowhere != "zeros":
            nowhere = ~visible.any(axis=-1, keepdims=True)
            if nowhere.any():
                weights = np.where(nowhere, self._weights_nowhere(inputs, scores), weights)
        return weights

    def _weights_nowhere(self, inputs: Inputs, scores: Values) -> Values:
        if self.nowhere == "NaN where nowhere to look":
            return np.full(scores.shape, np.nan)
        places = {"first value where nowhere to look": 0, "last value where nowhere to look": inputs.kv_len - 1}
        if self.nowhere in places:
            place = places[self.nowhere]
            return np.broadcast_to(np.arange(inputs.kv_len) == place, scores.shape) * 1.0
        if self.nowhere == "mean where nowhere to look":
            return np.full(scores.shape, 1 / max(inputs.kv_len, 1))
        is_past = np.arange(inputs.kv_len) <= inputs.q_positions("given")
        if self.nowhere == "mean of past where nowhere to look":
            return softmax(np.where(is_past, scores * 0, -np.inf), "given")
        return softmax(scores, "given")  # as if nothing were hidden
