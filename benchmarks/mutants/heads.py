"""Mistakes in heads, batch entries and axes, and in the scale."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from benchmarks.mutants._mutant import mutant
from benchmarks.mutants.reference import Array, Call, Reference

# --- Grouped heads ----------------------------------------------------------------------------------------------------


@mutant("grouped", expected="interleav|modulo|%|mod\\b|tiled?")
class GroupsInterleaved(Reference):
    """Query head h reads key/value head h % num_kv_heads."""

    def grouped(self, call: Call, x: Array) -> Array:
        return np.tile(x, (1, call.group, 1, 1))


@mutant("grouped", expected="head 0|first (key/value |kv )?head|always.*head|one (key/value )?head")
class AlwaysTheFirstKvHead(Reference):
    """All query heads read the first key/value head, as if there were only one."""

    def grouped(self, call: Call, x: Array) -> Array:
        return x[:, :1].repeat(call.query.shape[1], axis=1) if call.group > 1 else x


@mutant("combined", expected="mask.*(key/value|kv|group)|(key/value|kv|group).*mask", is_diagnosable=False)
class MaskByKvHead(Reference):
    """A mask by head is looked up by key/value head, in a kernel without a backward pass."""

    attention_grad: Any = None

    def visible_by_mask(self, call: Call) -> Array | bool:
        if call.mask is None or call.mask.shape[-3] == 1:
            return super().visible_by_mask(call)
        return call.mask[..., np.arange(call.query.shape[1]) // call.group, :, :]


# --- Axes -------------------------------------------------------------------------------------------------------------


@mutant("causal", expected="batch")
class BatchEntriesSwapped(Reference):
    """Batch entries come back in reverse."""

    def output(self, call: Call) -> Array:
        return super().output(call)[::-1]


@mutant("causal", expected="heads? .*(come|return|output|swap|exchang)|(output|result).*heads")
class HeadsReversed(Reference):
    """Heads come back in reverse."""

    def output(self, call: Call) -> Array:
        return super().output(call)[:, ::-1]


@mutant("causal", expected="transpos|reshap|axes|swap|layout|mixed", is_diagnosable=False)
class ReshapedInsteadOfTransposed(Reference):
    """Heads and length are exchanged by a reshape, which mixes them, instead of a transposition."""

    def output(self, call: Call) -> Array:
        result = super().output(call)
        batch, num_heads, q_len, head_dim = result.shape
        return result.reshape(batch, q_len, num_heads, head_dim).swapaxes(1, 2).reshape(result.shape)


@mutant("combined", expected="transpos|layout|axes|swap|heads.*(length|len)", is_diagnosable=False)
class LayoutGuessed(Reference):
    """The layout is guessed from the shape: as many heads as queries are taken for [batch, length, heads, head_dim]."""

    def output(self, call: Call) -> Array:
        if not call.query.shape[1] == call.query.shape[2] == call.key.shape[1] == call.key.shape[2] > 1:
            return super().output(call)
        tensors = {name: getattr(call, name).swapaxes(1, 2) for name in ("query", "key", "value")}
        return super().output(dataclasses.replace(call, **tensors)).swapaxes(1, 2)


@mutant("causal", expected="axis|quer(y|ies).*sum|over (the )?quer|column")
class SoftmaxOverQueries(Reference):
    """The softmax runs over queries instead of keys."""

    def softmax(self, scores: Array) -> Array:
        return super().softmax(scores.swapaxes(-1, -2)).swapaxes(-1, -2)


@mutant("causal", expected="softmax.*heads|over heads", is_diagnosable=False)
class SoftmaxOverHeads(Reference):
    """The softmax runs over heads instead of keys."""

    def softmax(self, scores: Array) -> Array:
        return super().softmax(scores.swapaxes(1, -1)).swapaxes(1, -1)


# --- The scale --------------------------------------------------------------------------------------------------------


class _Scaled(Reference):
    """Scores scaled by something else."""

    def scale(self, call: Call) -> float:
        raise NotImplementedError

    def products(self, call: Call) -> Array:
        return super().products(dataclasses.replace(call, scale=self.scale(call)))


@mutant("scale", expected="scale.*(ignor|not use|default)|ignor.*scale|default scale")
class ScaleIgnored(_Scaled):
    """A given scale is ignored."""

    def scale(self, call: Call) -> float:
        return float(call.query.shape[-1] ** -0.5)


@mutant("causal", expected="scale.*(twice|square)|twice|scaled? by 1 ?/ ?head_dim|1/head_dim")
class ScaledTwice(_Scaled):
    """Scores are scaled by the model, and once more by its kernel."""

    def scale(self, call: Call) -> float:
        return call.scale**2


@mutant("scale", expected="scale.*(twice|multipl|times|again|both|also)")
class ScaleOnTopOfTheDefault(_Scaled):
    """A given scale comes on top of the default."""

    def scale(self, call: Call) -> float:
        default = float(call.query.shape[-1] ** -0.5)
        return call.scale if call.scale == default else call.scale * default


@mutant("causal", expected="d_model|model|num_heads|all heads|embed")
class ScaledByTheWholeWidth(_Scaled):
    """The scale is that of d_model instead of head_dim (jaketae/alibi)."""

    def scale(self, call: Call) -> float:
        return float((call.query.shape[1] * call.query.shape[-1]) ** -0.5)


@mutant(
    "causal", expected="not scaled|no scale|unscaled|scale.*(missing|1\\b|left out|not applied|ignor)|without.*scale"
)
class NotScaled(_Scaled):
    """Scores are not scaled."""

    def scale(self, call: Call) -> float:
        return 1.0


@mutant("causal", expected="sqrt|head_dim|multipl|divid|inverse|revers")
class DividedByTheScale(_Scaled):
    """Scores are divided by the scale, which was meant to be a divisor."""

    def scale(self, call: Call) -> float:
        return 1 / call.scale
