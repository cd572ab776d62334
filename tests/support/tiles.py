"""Shared by tests of attention in tiles: hostile data, long rows, and what may be off by how much."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from alibi_core.backend import horizon
from alibi_core.backend.checks import namespace_of
from alibi_core.conformance.testing import DATA, LONGER, STEEP, Case, cases
from alibi_core.conformance.testing import assert_within_budget as assert_within
from tests.support.frameworks import Backend

TOLERANCES = (0.3, 0.01, 1e-4, 2.0**-24)
LONGER_CASES = st.sampled_from(LONGER).flatmap(lambda sizes: cases(sizes=sizes))


def norm_bounds(vectors: Any) -> Any:
    """Return the core's bounds of norms, of low precision in float32."""
    xp = namespace_of(vectors)
    return horizon.norm_bounds(xp.astype(vectors, xp.float32) if "16" in str(vectors.dtype) else vectors)


@dataclass(frozen=True)
class Tiling:
    """The sizes that decide how a call is cut up, in place of those by default."""

    rows: tuple[int, int] = (2, 4)
    step_queries: int = 1
    blocks: int = 3
    bias_elements: int = 2**20
    plan_elements: int = 2**20
    kernel_elements: int = 2**21
    call_scores: int = 0
    short: int = 0

    @property
    def sizes(self) -> horizon.Tiling:
        given = vars(self).copy()
        given |= {"most_blocks": given.pop("blocks"), "part_elements": given.pop("plan_elements")}
        return horizon.Tiling(q_block=self.rows[1], kv_block=1, least_decay=0, norm_bounds=norm_bounds, **given)

    def applied(self) -> contextlib.AbstractContextManager[None]:
        return horizon.tiled_as(self.sizes)


def planned_from(keys: int) -> contextlib.AbstractContextManager[None]:
    """Have PyTorch measure, and leave out what norms prove not to matter, from so many keys on."""
    sizes = {"rows": (64, 256), "step_queries": 16, "bias_elements": 2**22, "call_scores": 15_000, "short": keys}
    return horizon.tiled_as(horizon.Tiling(256, 128, least_decay=20, norm_bounds=norm_bounds, **sizes))


TILINGS = st.builds(
    Tiling,
    rows=st.sampled_from([(1, 1), (1, 4), (2, 4), (4, 4), (2, 16)]),
    step_queries=st.sampled_from([1, 1, 3]),
    blocks=st.sampled_from([1, 3, 512]),
    bias_elements=st.sampled_from([1, 24, 100, 2**20]),
    plan_elements=st.sampled_from([1, 40, 2**20]),
    kernel_elements=st.sampled_from([1, 300, 2**21]),
    call_scores=st.sampled_from([0, 20, 10**9]),
    short=st.sampled_from([0, 0, 0, 1024]),
)


def plain(sizes: Any, form: str = "causal", seed: int = 0, **arguments: Any) -> Case:
    """Return a case of full, aligned rows, with these arguments besides, and with slopes that entries share."""
    case = Case(sizes, form, None, None, None, None, slopes_per_batch=False, seed=seed)
    return case.with_arguments(form, case.arguments | arguments)


def attend(backend: Backend, case: Case, dtype: str, **changes: Any) -> np.ndarray:
    arrays = {name: case.arrays[name] for name in ("query", "key", "value", "slopes")}
    return backend.attention(**arrays, dtype=dtype, **(case.arguments | changes))


def hostile(case: Case, data: str, sign: int) -> Case:
    """Return the case with such data, with steep slopes among its own, and maybe with a negative one."""
    tensors = {name: case.arrays[name].copy() for name in ("query", "key", "value")}
    DATA[data](**tensors)
    slopes = np.resize(np.roll(STEEP, case.seed), case.arrays["slopes"].shape).astype(np.float64)
    if sign < 0:
        slopes[..., -1] = -0.125
        case = case.with_arguments(case.form, case.arguments | {"allow_negative_slopes": True})
    return case.with_arrays(**tensors, slopes=slopes)


def assert_no_more_left_out(
    backend: Backend, case: Case, *tolerances: float, dtype: str = "float32", **arguments: Any
) -> None:
    """Assert that results are exact to rounding and to what a share of the weight can move."""
    for tolerance in tolerances:
        result = attend(backend, case, dtype, tolerance=tolerance, **arguments)
        assert_within(result, case.exact(dtype, tolerance).output)
