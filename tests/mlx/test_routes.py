"""Which implementation runs which call on which device, and at which head size.

No GPU is needed: a call's shape, dtype and device decide, and its arrays are never computed.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

mx = pytest.importorskip("mlx.core", reason="mlx is not installed")

from alibi_core import AttentionCall, fold_size  # noqa: E402
from alibi_mlx import attention  # noqa: E402
from alibi_mlx._metal.routes import FOLD_LIMITS, IMPLEMENTATIONS, Kernels, Route, choose, refusal  # noqa: E402

CPU, NEWER, OLDER = Kernels(mx.cpu, newer=True), Kernels(mx.gpu, newer=True), Kernels(mx.gpu, newer=False)
LOW = (mx.float16, mx.bfloat16)
# What features are filled up to, at the edges of each size: from MLX's sources, by queries and version.
FOR_FEW = {1: 64, 64: 64, 65: 96, 96: 96, 97: 128, 128: 128, 129: 129, 300: 300}
FOR_MORE = {1: 64, 64: 64, 65: 72, 72: 72, 73: 80, 80: 80, 81: 96, 96: 96, 97: 128, 128: 128, 129: 129, 300: 300}
FOR_MORE_OLDER = {1: 64, 64: 64, 65: 80, 80: 80, 81: 128, 128: 128, 129: 129}
FOLDED = {1: 64, 58: 64, 59: 72, 66: 72, 67: 80, 74: 80, 75: 96, 90: 96, 91: 128, 122: 128}


def call_of(head_dim=64, q_len=40, kv_len=None, dtype=mx.float16, *, slopes=None, heads=(2, 1), **rules):
    """Return a checked call. Its slopes are so gentle that folding is exact enough at any length."""
    kv_len = q_len if kv_len is None else kv_len
    query, key, value = (
        mx.broadcast_to(mx.zeros((), dtype), (1, number, length, head_dim))
        for number, length in ((heads[0], q_len), (heads[1], kv_len), (heads[1], kv_len))
    )
    slopes = mx.full((heads[0],), 1e-6) if slopes is None else slopes
    return AttentionCall.check(query, key, value, slopes, xp=mx, **rules)


# By itself


@pytest.mark.parametrize(("kernels", "more"), [(NEWER, FOR_MORE), (OLDER, FOR_MORE_OLDER)])
def test_tiles_on_a_gpu_have_a_size_that_its_kernels_take(kernels, more):
    for sizes, q_lens in ((FOR_FEW, (1, 8)), (more, (9, 9000))):
        for head_dim, padded in sizes.items():
            for q_len in q_lens:
                for kv_len, training in ((q_len, False), (20_000, True)):
                    call = call_of(head_dim, q_len, kv_len, mx.float32)
                    found = [choose(call, None, training, kernels), choose(call, "tiled", kernels=kernels)]
                    assert found == 2 * [Route("tiled", padded)]


def test_a_gpu_folds_low_precision_where_there_is_room_for_six_features():
    for head_dim, padded in FOLDED.items():
        for dtype in LOW:
            for q_len, kv_len in ((9, 9), (9, 8192), (8192, 8192)):
                call = call_of(head_dim, q_len, kv_len, dtype)
                found = [choose(call, name, kernels=NEWER) for name in (None, "folded")]
                assert found == 2 * [Route("folded", padded, fused=True)]
                assert padded >= head_dim + fold_size(kv_len, dtype)


NOT_FOLDED = {
    "few queries": (8, 40, {}),
    "more keys": (40, 8193, {}),
    "training": (40, 40, {"training": True}),
    "float32": (40, 40, {"dtype": mx.float32}),
    "123 features": (40, 40, {"head_dim": 123}),
    "130 features": (40, 40, {"head_dim": 130}),
    "MLX 0.31": (40, 40, {"kernels": OLDER}),
}


@pytest.mark.parametrize(("q_len", "kv_len", "change"), NOT_FOLDED.values(), ids=NOT_FOLDED)
def test_a_gpu_does_not_fold_by_itself_but_by_name_to_a_size_that_its_kernels_take(q_len, kv_len, change):
    kernels, training = change.get("kernels", NEWER), change.get("training", False)
    call = call_of(change.get("head_dim", 32), q_len, kv_len, change.get("dtype", mx.float16))
    assert choose(call, None, training, kernels).implementation == "tiled"
    route = choose(call, "folded", training, kernels)
    sizes = (64, 96, 128, 192, 256) if q_len <= 8 else (64, 72, 80, 96, 128, 192, 256)
    assert route.fused == (route.head_dim in sizes) == kernels.newer
    assert route.head_dim >= call.head_dim + fold_size(kv_len, call.dtype)


@pytest.mark.parametrize(("head_dim", "kernels"), [(255, NEWER), (40, OLDER)])
def test_what_no_fused_kernel_takes_is_folded_in_float32(head_dim, kernels):
    # 3 features for so few keys
    assert choose(call_of(head_dim), "folded", kernels=kernels) == Route("folded", head_dim + 3, fused=False)


calls = st.builds(
    lambda head_dim, q_len, more, dtype: call_of(head_dim, q_len, q_len + more, dtype),
    st.integers(1, 300),
    st.integers(1, 20) | st.integers(1, 20_000),
    st.just(0) | st.integers(0, 20_000),
    st.sampled_from((*LOW, mx.float32)),
)


@given(
    call=calls,
    kernels=st.sampled_from((CPU, NEWER, OLDER)),
    training=st.booleans(),
    name=st.sampled_from((None, *IMPLEMENTATIONS)),
)
def test_the_one_named_runs_or_raises(call, kernels, training, name):
    if name is not None and refusal(name, call) is not None:
        with pytest.raises(NotImplementedError, match=f"implementation '{name}' .* can run this call"):
            choose(call, name, training, kernels)
        return
    route = choose(call, name, training, kernels)
    assert name in (None, route.implementation)
    assert refusal(route.implementation, call) is None
    added = fold_size(call.kv_len, call.dtype) if route.implementation == "folded" else 0
    assert route.head_dim >= call.head_dim + added
    if kernels == CPU or route.implementation == "dense":
        assert (route.head_dim, route.fused) == (call.head_dim + added, False)


# What cannot run


def test_float64_is_dense_on_the_cpu():
    with mx.stream(mx.cpu):
        call = call_of(dtype=mx.float64)
        assert choose(call, None, kernels=CPU) == Route("dense", 64)
        reason = "cannot compute in float64 (MLX's attention takes its scale and exponential in float32)"
        assert [refusal(name, call) for name in IMPLEMENTATIONS] == [reason, reason, None]
        with pytest.raises(NotImplementedError, match="implementation 'tiled' cannot .*; 'dense' can run this call"):
            choose(call, "tiled")


OF_FOLDED = [
    ({"is_causal": False}, r"must be causal \(distance on both sides is no product"),
    ({"window_size": 3}, "takes no mask, segment_ids or window_size"),
    ({"mask": mx.ones((1, 40), mx.bool_)}, "takes no mask, segment_ids or window_size"),
    ({"segment_ids": mx.zeros((1, 40), mx.int32)}, "takes no mask, segment_ids or window_size"),
    ({"q_offset": 1}, "must have the last query at the last key, and no query before the first"),
    ({"q_offset": mx.array([0])}, "must have the last query at the last key, and no query before the first"),
    ({"kv_len": 30}, "must have the last query at the last key, and no query before the first"),
    ({"scale": 0.0}, "must have a scale that is not 0"),
    (
        {"q_len": 9, "slopes": mx.array([4.5, 1.0]), "scale": 0.001},
        r"must have slopes of at most 4\.094, or features overflow in float16",
    ),
    (
        {"kv_len": 4000, "slopes": mx.array([0.1, 8.0])},
        "could move a score by 2.8e-01, more than 4.9e-04, at so many keys",
    ),
]


@pytest.mark.parametrize(("rules", "reason"), OF_FOLDED, ids=lambda x: str(list(x)) if isinstance(x, dict) else "")
def test_what_cannot_be_folded_is_tiled_and_says_why(rules, reason):
    call = call_of(**rules)
    assert [choose(call, None, kernels=kernels) for kernels in (CPU, NEWER)] == 2 * [Route("tiled", 64)]
    assert [refusal(name, call) for name in ("tiled", "dense")] == [None, None]
    message = f"^implementation 'folded' {reason}.*; 'tiled' and 'dense' can run"
    with pytest.raises(NotImplementedError, match=message):
        choose(call, "folded")


def test_slopes_that_cannot_be_read_are_not_folded():
    said = []

    def function(slopes):
        call = call_of(slopes=slopes)
        said.append((refusal("folded", call), choose(call, None, kernels=CPU)))
        return slopes

    mx.eval(mx.vmap(function)(mx.ones((3, 2))))
    assert said == [("must be able to read the slopes, to bound its error", Route("tiled", 64))]


@pytest.mark.parametrize("dtype", [*LOW, mx.float32], ids=str)
def test_what_folding_is_allowed_is_the_rounding_of_the_dtype(dtype):
    # Of slopes s, the bound is in proportion to s: the largest that is folded, and the least that is not.
    limit = FOLD_LIMITS[dtype]
    slope = 64.0
    while refusal("folded", call_of(slopes=mx.full((2,), slope), dtype=dtype)) is not None:
        slope /= 2
    reason = refusal("folded", call_of(slopes=mx.full((2,), 2 * slope), dtype=dtype)) or ""
    moved = float(reason.split()[5].rstrip(","))
    assert limit < moved <= 2.1 * limit


def test_a_call_tells_what_is_named_and_whether_gradients_are_wanted(monkeypatch):
    asked = []

    def watched(call, implementation, training=False):
        asked.append((call.head_dim, implementation, training))
        return choose(call, implementation, training)

    monkeypatch.setattr("alibi_mlx._attention.choose", watched)
    query = mx.zeros((1, 2, 3, 4))
    attention(query, query, query)
    attention(query, query, query, implementation="tiled", training=True)
    assert asked == [(4, None, False), (4, "tiled", True)]
