"""Readings of the gradients: what an implementation takes for them, given how it reads attention."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from alibi_core.conformance._cases import Answer, Values, rounded
from alibi_core.conformance._diagnosis._readings.inputs import Inputs
from alibi_core.conformance._diagnosis._readings.reading import Reading
from alibi_core.conformance._diagnosis._readings.slopes import SLOPES

# What slopes may be, and the gradient still be that of what is given: each head's comes from one place.
_TRACED = (
    "given",
    "reversed slopes",
    "next head's slope",
    "previous head's slope",
    "slopes by kv head",
    "slopes by kv head, tiled",
)

_NOISY = "slope gradient of bfloat16 scores"


@dataclass(frozen=True)
class GradientReading(Reading):
    """A way to compute the gradients of attention. What is not said otherwise is as in the paper.

    Attributes:
        query_gradient, key_gradient, value_gradient: ``"given"``, or how their scale is taken.
        grouping: How the gradients of key and value come from those of a group's query heads.
        mean: Whether the mean is subtracted from the gradient of weights.
        slope_gradient: How the gradient of slopes is taken.
    """

    query_gradient: str = "given"
    key_gradient: str = "given"
    value_gradient: str = "given"
    grouping: str = "sum"
    mean: str = "given"
    slope_gradient: str = "given"

    @property
    def is_noisy(self) -> bool:
        """Whether it rounds sums, whose order it cannot know."""
        return super().is_noisy or self.slope_gradient == _NOISY

    @property
    def without_noise(self) -> GradientReading:
        """The same without rounding."""
        slopes = "given" if self.slope_gradient == _NOISY else self.slope_gradient
        return dataclasses.replace(self, noise=("nothing", "float64"), slope_gradient=slopes)

    def gradients(self, inputs: Inputs, cotangent: Values, *, shares_slopes: bool) -> dict[str, Answer]:
        """Return gradients by name, and how far rounding may move them."""
        inputs = self.prepared(inputs)
        bias, visible = self.kept_bias(inputs), self.kept_visible(inputs)
        weights, error = self._weights(inputs, bias, visible), self.weight_error(inputs, bias, visible)
        keys, values = (self._by_query_head(x, inputs) for x in (inputs.key, inputs.value))
        scale = self._scale(inputs)
        d_weights, sizes = cotangent @ values.swapaxes(-1, -2), np.abs(cotangent) @ np.abs(values).swapaxes(-1, -2)
        mean = (weights * d_weights).sum(axis=-1, keepdims=True)
        if self.mean == "forward pass right":
            mean = (Reading().weights(inputs) * d_weights).sum(axis=-1, keepdims=True)
        kinds = {"delta missing": 0.0, "delta unweighted": d_weights.mean(axis=-1, keepdims=True)}
        d_scores = weights * (d_weights - kinds.get(self.mean, mean))
        relative = 3 * error + 2.0**-22 * (inputs.head_dim + inputs.kv_len + inputs.q_len * inputs.group)
        size = relative * weights * (sizes + (weights * sizes).sum(axis=-1, keepdims=True)) + 1e-36
        scales = {"given": scale, "unscaled": 1.0, "scaled twice": scale**2, "scaled by default": inputs.head_dim**-0.5}
        signs = {"negated": -1.0, "halved": 0.5, "doubled": 2.0, "times ln 2": np.log(2), "times log2 e": 1 / np.log(2)}
        to_query = scales.get(self.query_gradient, scale * signs.get(self.query_gradient, 0.0))
        to_key = scales.get(self.key_gradient, scale * signs.get(self.key_gradient, 0.0))
        to_value = {"given": 1.0, "scaled": scale, "zero": 0.0}[self.value_gradient]
        result = {
            "query": Answer(to_query * (d_scores @ keys), abs(to_query) * (size @ np.abs(keys))),
            "key": self._to_keys(to_key, d_scores, size, inputs.query, inputs),
            "value": self._to_keys(to_value, weights, relative * weights + 1e-36, cotangent, inputs),
        }
        result |= self._to_slopes(inputs, d_scores, size, shares_slopes=shares_slopes)
        return {name: Answer(x.value, x.budget + 1e-36) for name, x in result.items()}

    def _to_keys(self, scale: float, rows: Values, sizes: Values, tensor: Values, inputs: Inputs) -> Answer:
        value, size = rows.swapaxes(-1, -2) @ tensor, sizes.swapaxes(-1, -2) @ np.abs(tensor)
        answer = [self._grouped(x, inputs) for x in (value, size)]
        return Answer(scale * answer[0], abs(scale) * answer[1])

    def _grouped(self, x: Values, inputs: Inputs) -> Values:
        if self.heads == "grouped heads interleaved" or self.grouping == "group's gradients interleaved":
            groups = x.reshape(x.shape[0], inputs.group, inputs.num_kv_heads, *x.shape[2:]).swapaxes(1, 2)
        else:
            groups = x.reshape(x.shape[0], inputs.num_kv_heads, inputs.group, *x.shape[2:])
        kinds = {
            "group's first gradient": groups[:, :, 0],
            "group's last gradient": groups[:, :, -1],
            "group's mean gradient": groups.mean(axis=2),
        }
        return np.asarray(kinds[self.grouping] if self.grouping in kinds else groups.sum(axis=2))

    def _to_slopes(self, inputs: Inputs, d_scores: Values, size: Values, *, shares_slopes: bool) -> dict[str, Answer]:
        sides = {"slopes": (1.0, 1.0 if inputs.future_slopes is None else 0.0)}
        if inputs.future_slopes is not None:
            sides["future_slopes"] = (0.0, 1.0)
        if self.slope_gradient == _NOISY:
            d_scores = rounded(d_scores, "bfloat16")
        result = {}
        for name, (past, future) in sides.items():
            one = np.ones_like(inputs.slopes)
            future_ones = None if inputs.future_slopes is None else one * future
            unit = dataclasses.replace(inputs, slopes=one * past, future_slopes=future_ones, _kept={})
            plain = dataclasses.replace(self, slopes="given", slope_dtype="float64", rounding=("nothing", "float64"))
            along = plain.bias(unit)
            if self.slope_gradient == "slope gradient by key position":
                along = np.broadcast_to(np.arange(inputs.kv_len) * 1.0, along.shape)
            value, budget = (d_scores * along).sum(axis=(2, 3)), (size * np.abs(along)).sum(axis=(2, 3))
            value, budget = self._traced(value, inputs), self._traced(budget, inputs)
            result[name] = self._over_batch(value, budget, inputs, shares_slopes=shares_slopes)
        return result

    def _traced(self, x: Values, inputs: Inputs) -> Values:
        """Bring each head's gradient to the slope that it took."""
        if self.slopes == "given":
            return x
        if self.slopes not in _TRACED:
            return x * 0
        heads = np.arange(inputs.num_heads)[None]
        taken = np.broadcast_to(SLOPES[self.slopes](heads, inputs), heads.shape)[0]
        result = np.zeros_like(x)
        for head, source in enumerate(taken):
            result[:, source] += x[:, head]
        return result

    def _over_batch(self, value: Values, budget: Values, inputs: Inputs, *, shares_slopes: bool) -> Answer:
        factors = {
            "slope gradient zero": 0.0,
            "slope gradient negated": -1.0,
            "slope gradient scaled": inputs.scale,
            "slope gradient scaled up": 1 / (inputs.scale or 1.0),
            "slope gradient averaged over queries": 1 / inputs.q_len,
            "slope gradient times ln 2": np.log(2),
            "slope gradient times log2 e": 1 / np.log(2),
            "slope gradient doubled": 2.0,
            "slope gradient halved": 0.5,
        }
        factor = factors.get(self.slope_gradient, 1.0)
        if self.slope_gradient == "slope gradient times slopes":
            value, budget = value * inputs.slopes, budget * inputs.slopes
        value, budget = factor * value, abs(factor) * budget
        if self.slope_gradient == "slope gradient summed over heads":
            value, budget = (np.broadcast_to(x.sum(axis=1, keepdims=True), x.shape) for x in (value, budget))
        if not shares_slopes:
            if self.slope_gradient == "slope gradient summed over batch":
                value, budget = (np.broadcast_to(x.sum(axis=0), x.shape) for x in (value, budget))
            return Answer(value, budget)
        kinds = {
            "slope gradient of first batch entry": (value[0], budget[0]),
            "slope gradient of last batch entry": (value[-1], budget[-1]),
            "slope gradient averaged": (value.mean(axis=0), budget.mean(axis=0)),
        }
        return Answer(*kinds.get(self.slope_gradient, (value.sum(axis=0), budget.sum(axis=0))))
