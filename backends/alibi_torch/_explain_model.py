"""``explain_model``: the distances and tokens that each head of a model attends to."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from alibi_core.backend.models import evaluating
from alibi_torch._attention import attention
from alibi_torch.nn import AlibiAttention

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ALMOST_ALL = 0.99  # Above this share of weight on one token, a head counts as blind to all others.


@dataclass(frozen=True)
class ModelExplanation:
    """Statistics of each head's attention weights over the queries of a text. ``print`` shows one line per layer.

    All attributes are NumPy arrays, ``[layers, heads]``, NaN where a layer has fewer heads than another. They exclude
    the first query: in a causal model it sees only one token.

    Attributes:
        look_back: The median distance, in tokens: half of the weight is on keys at most this far away.
        on_first: Share of the weight on the first token of the text.
        on_own: Share of the weight on the query's own token.

    Example:
        >>> said = ModelExplanation(np.ones((1, 2)), np.asarray([[1.0, 0.25]]), np.zeros((1, 2)))
        >>> said.blind
        {'first': [(0, 0)], 'own': []}
    """

    look_back: Any
    on_first: Any
    on_own: Any

    @property
    def blind(self) -> dict[str, list[tuple[int, int]]]:
        """The heads, as (layer, head), that see only the first token of the text, or only the query's own token."""
        shares = {"first": self.on_first, "own": self.on_own}
        return {
            name: [(int(layer), int(head)) for layer, head in np.argwhere(share > ALMOST_ALL)]
            for name, share in shares.items()
        }

    def __str__(self) -> str:
        lines = ["layer: median distance (share on the first token) of each head"]
        for layer, (distances, shares) in enumerate(zip(self.look_back, self.on_first, strict=True)):
            heads = " ".join(f"{d:.0f} ({x:.0%})" for d, x in zip(distances, shares, strict=True) if not np.isnan(d))
            lines.append(f"{layer}: {heads}")
        for name, heads in self.blind.items():
            listed = ", ".join(f"{layer}.{head}" for layer, head in heads) or "none"
            lines.append(f"heads that see only the {name} token, as layer.head: {listed}")
        return "\n".join(lines)

    def figure(self) -> Figure:
        """Draw the distances and the shares on the first token, a row for each layer, a column for each head."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8.5, 1.2 + 0.35 * len(self.look_back)), layout="constrained")
        panels = zip(
            figure.subplots(1, 2, sharey=True),
            (np.log2(1 + self.look_back), self.on_first),
            ("log2(1 + median distance)", "share on the first token"),
            strict=True,
        )
        for axes, values, title in panels:
            image = axes.imshow(values, cmap="Blues", vmin=0, aspect="auto")
            axes.set(title=title, xlabel="head", ylabel="layer")
            figure.colorbar(image, ax=axes)
        return figure


@torch.no_grad()
def explain_model(model: nn.Module, tokens: Tensor) -> ModelExplanation:
    """Return statistics of each head's attention weights over the tokens of a text.

    Weights are computed densely, one layer at a time: a text of N tokens takes 4 * heads * N**2 bytes.

    Args:
        model: A model with :class:`AlibiAttention` layers, for example from :func:`load_checkpoint`.
        tokens: ``[batch, length]`` integers, at least two tokens each, without padding.

    Raises:
        ValueError: If the model has no :class:`AlibiAttention` layer, or there are fewer than two tokens.

    Example:
        >>> from alibi_torch import AlibiConfig, AlibiLanguageModel
        >>> model = AlibiLanguageModel(AlibiConfig(num_layers=2), vocab_size=50)
        >>> explain_model(model, torch.arange(20)[None]).look_back.shape
        (2, 8)
    """
    if tokens.ndim != 2 or tokens.shape[1] < 2:
        raise ValueError(f"tokens must have shape (batch, length), at least two tokens each, got {tuple(tokens.shape)}")
    layers = [module for module in model.modules() if isinstance(module, AlibiAttention)]
    if not layers:
        raise ValueError(f"model must have AlibiAttention layers, got a {type(model).__name__} without any")
    found: list[tuple[np.ndarray, ...]] = []  # by layer, three arrays [heads]

    def look(layer: AlibiAttention, inputs: tuple[Tensor], options: dict[str, Any]) -> None:
        rules = {name: options.get(name) for name in ("mask", "segment_ids")}
        rules |= {"is_causal": layer.is_causal, "future_slopes": layer.future_slopes, "law": layer.law}
        query, key, value = layer._heads(inputs[0], inputs[0])
        slopes = layer._current_slopes
        _, weights = attention(query, key, value, slopes, return_weights=True, window_size=layer.window_size, **rules)
        found.append(_summary(weights))

    with evaluating(model), ExitStack() as hooks:
        for layer in layers:
            hooks.enter_context(layer.register_forward_pre_hook(look, with_kwargs=True))
        model(tokens)
    most = max(len(distances) for distances, *_ in found)
    padded = np.asarray([[np.pad(x, (0, most - len(x)), constant_values=np.nan) for x in layer] for layer in found])
    return ModelExplanation(*padded.swapaxes(0, 1))


def _summary(weights: Tensor) -> tuple[np.ndarray, ...]:
    """Return median distance, and shares on first and own token, ``[heads]``, of weights ``[batch, heads, n, n]``."""
    weights = weights[:, :, 1:].double().mean(dim=0)  # [heads, queries, keys]
    length = weights.shape[-1]
    places = torch.arange(length, device=weights.device)
    distances = (places - places[1:, None]).abs()  # [queries, keys]
    # Sum weights of equal distance: [heads, length]; the median is where the cumulative share passes one half.
    by_distance = weights.new_zeros(len(weights), length)
    by_distance.index_add_(1, distances.flatten(), weights.flatten(1))
    shares = by_distance.cumsum(dim=1) / by_distance.sum(dim=1, keepdim=True)
    median = (shares < 0.5).sum(dim=1).double()
    own = weights.diagonal(offset=1, dim1=1, dim2=2).mean(dim=1)
    return median.cpu().numpy(), weights[:, :, 0].mean(dim=1).cpu().numpy(), own.cpu().numpy()
