"""Whether what several processes or devices find of one sequence, put together, is exact."""

from __future__ import annotations

from typing import Any

import numpy as np

from alibi_core.conformance._cases.oracle import Attention, Rules, assert_within, penalties, rounded, summed_over_batch


def assert_exact(
    call: Any, arrays: dict[str, np.ndarray], found: dict[str, np.ndarray], share: float, *, has_segments: bool
) -> None:
    """Assert that the result and its gradients are exact, but for rounding and for a share of softmax weight.

    ``call`` has the slopes and the rules; arrays are ``[batch, heads, length, head_dim]``, and the ``ids`` of segments;
    what is found is ``result``, and gradients under the names of arguments, those of slopes summed over batch entries.
    """
    exact = {name: x if name == "ids" else rounded(x, call.dtype) for name, x in arrays.items()}
    batch, heads, length, _ = exact["query"].shape
    ids = exact["ids"] if has_segments else None

    def bias(slopes: Any, future: Any) -> np.ndarray:
        future = None if future is None else rounded(future, "float32")
        rules = Rules(rounded(slopes, "float32"), 0, call.is_causal, future, ids, ids, call.window_size)
        return penalties(rules, batch, heads, length, length)

    tensors = [exact[name] for name in ("query", "key", "value")]
    of_call = bias(call.slopes, call.future_slopes)
    problem = Attention(*tensors, bias=of_call, scale=call.head_dim**-0.5, dtype=call.dtype)
    assert_within(found["result"], problem.output_without(share))
    ones = np.ones(heads)
    zeros = None if call.future_slopes is None else 0 * ones
    for name, (slopes, future) in {"slopes": (ones, zeros), "future_slopes": (0 * ones, ones)}.items():
        if name not in found:
            continue
        distances = -bias(slopes, future)
        distances = np.where(np.isfinite(distances), distances, 0)
        answers = problem.gradients_without(share, exact["cotangent"], distances)
        answers[name] = summed_over_batch(answers.pop("slopes"))
        for which, answer in answers.items():
            try:
                assert_within(found[which], answer)
            except AssertionError as error:
                raise AssertionError(f"gradient of {which}, {error}") from None
