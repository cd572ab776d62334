"""Pictures show the numbers they are of."""

from __future__ import annotations

import builtins
import io
import sys
from typing import Any

import numpy as np
import pytest

import alibi_core
from alibi_core.backend import Explanation, KeySpans

pytest.importorskip("matplotlib")
from alibi_core import plot


def explained(**changes: Any) -> Explanation:
    """Return an explanation of two batch entries with 3 heads, 40 queries and 50 keys, in blocks of 16."""
    edges = np.asarray([0, 16, 32, 40])
    visible = np.stack([np.tile([0, 2, 5], (2, 1)), np.tile(edges[1:] + 10, (2, 1))], axis=-1)
    needed = np.stack([visible] * 3, axis=1)
    needed[1, 0, :, 0] = [5, 12, 40]
    horizons = np.asarray([[np.inf, 20.0, 0.0], [7.0, np.inf, np.inf]])
    spans = KeySpans(edges, 50, visible, needed)
    return Explanation("tiled", {}, 1e-3, 0.0, horizons, 900, 300, **({"spans": spans} | changes))


def test_a_picture_of_biases_shows_them_and_the_weights_of_a_query() -> None:
    figure = plot.bias(8, 12, 16, heads=[5, 0], query=3)
    images = [ax.images[0].get_array() for ax in figure.axes[:2]]
    for head, image in zip([5, 0], images, strict=True):
        expected = alibi_core.bias(8, 12, 16)[head]
        assert np.array_equal(image.mask, np.isinf(expected))
        assert np.array_equal(image.filled(-np.inf), expected)
    seen = figure.axes[2].patches[0].get_data().values
    weights = np.exp(alibi_core.bias(8, 12, 16, dtype=np.float64)[5, 3])
    assert np.allclose(seen, weights / weights.sum(), rtol=1e-6)
    assert figure.axes[2].get_ylabel() == "weight for\nquery 3"


def test_biases_of_all_kinds_can_be_drawn() -> None:
    for arguments in ({"is_causal": False}, {"contract": "bloom"}, {"q_offset": -9}):
        figure = plot.bias(12, 5, **arguments)
        assert [ax.get_title() for ax in figure.axes[:8]] == [f"head {h}" for h in (0, 2, 3, 5, 6, 8, 9, 11)]
        plot.bias(12, 5, heads=[0], **arguments).savefig(io.BytesIO())
    plot.bias(np.zeros(2), 1).savefig(io.BytesIO())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"q_len": 0}, r"none of them 0, got \(4, 0, 0\)"),
        ({"slopes": np.ones((2, 4))}, r"got \(2, 4, 3, 3\)"),
        ({"heads": [4]}, r"heads must be some of 4, from 0, got \[4\]"),
        ({"heads": 0}, r"heads must be a sequence of integers, got 0; \[0\] is one head"),
        ({"heads": []}, r"heads must be some of 4, from 0, got \[\]"),
        ({"query": 3}, "query must be one of 3, got 3"),
    ],
)
def test_what_cannot_be_drawn_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        plot.bias(**{"slopes": 4, "q_len": 3} | arguments)


def test_a_picture_of_an_explanation_shows_what_is_needed_of_what_is_visible() -> None:
    figure = explained().figure(entry=1, heads=[0, 2])
    panels = figure.axes
    visible, needed = panels[0].patches
    assert needed.get_data().values.tolist() == visible.get_data().values.tolist() == [26, 42, 50]
    assert needed.get_data().baseline.tolist() == [5, 12, 40]
    assert panels[0].get_ylim() == (40, 0)
    # 16 * (21 + 30) + 8 * 10 keys of 16 * (26 + 40) + 8 * 45
    assert [ax.get_title() for ax in panels] == ["head 0: 63%\nhorizon 7", "head 2: 100%\nno horizon"]
    assert figure._repr_png_().startswith(b"\x89PNG")


def test_an_explanation_of_nothing_cannot_be_drawn() -> None:
    with pytest.raises(ValueError, match="got one of an empty call"):
        explained(spans=None).figure()
    with pytest.raises(ValueError, match="entry must be one of 2, got 2"):
        explained().figure(entry=2)


def test_without_matplotlib_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "alibi_core.plot")
    monkeypatch.delattr(alibi_core, "plot")
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ModuleNotFoundError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ModuleNotFoundError, match=r"pip install '.\[plot\]'"):
        explained().figure()
