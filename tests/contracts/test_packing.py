"""What compilers and operators take instead of a call knows as well which queries see their own keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from alibi_core._call import HEADS_FIRST, LENGTH_FIRST
from alibi_core.backend import AttentionCall
from tests.support.frameworks import JAX, MLX, TORCH, Framework

IDS = np.asarray([[0, 0, 0, 1, 1, 2, 2], [5, 5, 5, 5, 5, 5, 4]], np.int32)
RULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "one array of ids": {"segment_ids": IDS, "tolerance": 0.1},
    "two arrays of ids": {"segment_ids": (IDS, IDS[:, ::-1].copy()), "tolerance": 0.1},
    "ids elsewhere": {"segment_ids": IDS, "q_offset": 2, "tolerance": 0.1},
}


def by_operator(call: AttentionCall, query: Any, key: Any) -> AttentionCall:
    from alibi_torch._tiled.operators import Packed

    return Packed.of(call, None).call(query, key)


def by_compiler(call: AttentionCall, query: Any, key: Any) -> AttentionCall:
    from alibi_jax._call import put_together, take_apart

    return put_together(*take_apart(call, query, key, key))


def on_host(call: AttentionCall, query: Any, key: Any) -> AttentionCall:
    from alibi_mlx._tiled import on_host

    found = on_host(call, query=query, key=key)
    assert found is not None
    return found


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
@pytest.mark.parametrize(("framework", "pack"), [(TORCH, by_operator), (JAX, by_compiler), (MLX, on_host)])
def test_a_call_put_together_knows_which_queries_see_their_own_key(
    framework: Framework, pack: Callable[[AttentionCall, Any, Any], AttentionCall], rules: dict[str, Any]
) -> None:
    pytest.importorskip(framework.module, reason=f"{framework.name} is not installed")
    layout, shape = (LENGTH_FIRST, (2, 7, 2, 5)) if framework is JAX else (HEADS_FIRST, (2, 2, 7, 5))
    query = framework.array(np.zeros(shape, np.float32))
    call = AttentionCall.check(query, query, query, layout=layout, xp=framework.xp, **framework.placed(rules))
    again = pack(call, query, query)
    assert again.sees_own_key == call.sees_own_key
    assert again.every_query_attends == call.every_query_attends
