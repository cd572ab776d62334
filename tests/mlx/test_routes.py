"""Which implementation runs which call on which device, and at which head size: the routing table, row by row.

What the table should say is derived here anew, from the head sizes that MLX's Metal kernels take. No GPU is needed: a
call's shape, dtype and device decide, and its arrays are never computed.
"""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

mx = pytest.importorskip("mlx.core", reason="mlx is not installed")

from alibi_core import AttentionCall, fold_size  # noqa: E402
from alibi_mlx import _compatible, attention  # noqa: E402
from alibi_mlx._metal import routes as _routes  # noqa: E402
from alibi_mlx._metal.routes import IMPLEMENTATIONS, ROUTES, Route, Row, choose, refusal  # noqa: E402

NEWER, MIDDLE, OLDER = (0, 32, 4), (0, 31, 0), (0, 29, 0)  # versions of MLX
LOW = (mx.float16, mx.bfloat16)
FOLDED_KEYS = 8192
# Head sizes of fused kernels, of MLX's sources: of those for up to 8 queries, and of those for more.
FOR_FEW = (64, 96, 128)
FOR_MORE = {NEWER: (64, 72, 80, 96, 128), MIDDLE: (64, 80, 128), OLDER: (64, 80, 128)}


@pytest.fixture(autouse=True)
def _newest_mlx_on_a_cpu(monkeypatch):
    use(monkeypatch, mx.cpu, NEWER)


def use(monkeypatch, device, version):
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(device))
    monkeypatch.setattr(_compatible, "version", lambda: version)


def call_of(head_dim=64, q_len=40, kv_len=None, dtype=mx.float16, *, slopes=None, heads=(2, 1), **rules):
    """Return a checked call. Its slopes are so gentle that folding is exact enough at any length."""
    kv_len = q_len if kv_len is None else kv_len
    query, key, value = (
        mx.broadcast_to(mx.zeros((), dtype), (1, number, length, head_dim))
        for number, length in ((heads[0], q_len), (heads[1], kv_len), (heads[1], kv_len))
    )
    slopes = mx.full((heads[0],), 1e-6) if slopes is None else slopes
    return AttentionCall.check(query, key, value, slopes, xp=mx, **rules)


def sizes_of(call, version):
    return FOR_FEW if call.q_len <= 8 else FOR_MORE[version]


def expected(device, version, call, training):
    """Return how a call should run that any implementation can run."""
    if device == mx.cpu:
        return Route("tiled", call.head_dim)
    sizes = sizes_of(call, version)
    folds = call.dtype in LOW and call.q_len > 8 and call.kv_len <= FOLDED_KEYS and not training and version == NEWER
    if folds and call.head_dim + 6 <= max(sizes):
        return Route("folded", min(n for n in sizes if n >= call.head_dim + 6), fused=True)
    return Route("tiled", min((n for n in sizes if n >= call.head_dim), default=call.head_dim))


def edges(row: Row) -> list[tuple[AttentionCall, bool]]:
    """Return calls at the edges of a row, and whether gradients are wanted of each."""
    least, most = row.queries[0], min(row.queries[1], 9000)
    widest = min(row.head_dims[1], 300)
    result = []
    for head_dim, q_len, dtype in itertools.product((row.head_dims[0], widest), (least, most), row.dtypes):
        q_len = min(q_len, row.most_keys)
        for kv_len in {q_len, min(row.most_keys, max(q_len, 20_000))}:
            for training in (False, True) if row.training is None else (row.training,):
                result.append((call_of(head_dim, q_len, kv_len, dtype), training))
    return result


def row_of(call: AttentionCall, training: bool) -> Row | None:
    """Return the first row that fits and whose implementation can run the call."""
    return next((x for x in ROUTES if x.fits(call, training) and refusal(x.implementation, call) is None), None)


def name_of(row: Row) -> str:
    device = "gpu" if row.device == mx.gpu else "cpu"
    return f"{device} {row.queries[0]}+ queries {row.head_dims[0]}+ features {row.implementation} {row.padded}"


# The rows


@pytest.mark.parametrize("row", ROUTES, ids=name_of)
@pytest.mark.parametrize("version", [NEWER, MIDDLE, OLDER], ids=str)
def test_calls_at_the_edges_of_a_row_run_as_they_should(row, version, monkeypatch):
    use(monkeypatch, row.device, version)
    for call, training in edges(row):
        assert choose(call, None, training) == expected(row.device, version, call, training), (call, training)
        if row_of(call, training) is row:
            folded_on_gpu = row.implementation == "folded" and row.device == mx.gpu
            assert choose(call, None, training) == Route(
                row.implementation, row.padded or call.head_dim, fused=folded_on_gpu
            )
            assert version == NEWER or not row.newer


@pytest.mark.parametrize("row", ROUTES, ids=name_of)
def test_no_row_is_dead(row, monkeypatch):
    versions = [NEWER] if row.newer else [NEWER, MIDDLE]
    for version in versions:
        use(monkeypatch, row.device, version)
        for call, training in edges(row):
            if row_of(call, training) is row:
                return
    pytest.fail("other rows take all of its calls")


@pytest.mark.parametrize("row", ROUTES, ids=name_of)
def test_a_padded_size_is_one_that_metals_kernels_take_and_has_room(row):
    if row.padded is None:
        assert row.device == mx.cpu or row.head_dims[0] > 128
        return
    version = NEWER if row.newer else OLDER
    assert row.padded in (FOR_FEW if row.queries[1] <= 8 else FOR_MORE[version])
    room = row.padded - row.head_dims[1]
    if row.implementation == "folded":
        assert room >= max(fold_size(n, dtype) for n in range(1, row.most_keys + 1, 255) for dtype in row.dtypes)
        assert room >= max(fold_size(row.most_keys, dtype) for dtype in row.dtypes)
    assert room >= 0
    # Kernels for few queries differ from those for more: no row is for both.
    assert row.queries[1] <= 8 or row.queries[0] > 8


calls = st.builds(
    lambda head_dim, q_len, more, dtype: call_of(head_dim, q_len, q_len + more, dtype),
    st.integers(1, 300),
    st.integers(1, 20) | st.integers(1, 20_000),
    st.just(0) | st.integers(0, 20_000),
    st.sampled_from((*LOW, mx.float32)),
)
devices = st.sampled_from((mx.cpu, mx.gpu))
versions = st.sampled_from((NEWER, MIDDLE, OLDER))


@given(call=calls, device=devices, version=versions, training=st.booleans())
def test_every_call_has_a_row(call, device, version, training):
    with pytest.MonkeyPatch.context() as patch:
        use(patch, device, version)
        assert row_of(call, training) is not None
        route = choose(call, None, training)
        assert route == expected(device, version, call, training)
        if route.implementation == "folded":
            assert route.head_dim >= call.head_dim + fold_size(call.kv_len, call.dtype)


@pytest.mark.parametrize("version", [NEWER, MIDDLE, OLDER], ids=str)
def test_no_gap_is_around_a_size(version, monkeypatch):
    use(monkeypatch, mx.gpu, version)
    head_dims = [size + more for size in (64, 72, 80, 96, 128) for more in (-7, -6, -5, -1, 0, 1)]
    for head_dim, q_len, dtype in itertools.product(head_dims, (8, 9), (*LOW, mx.float32)):
        call = call_of(head_dim, q_len, 40, dtype)
        for training in (False, True):
            assert row_of(call, training) is not None
            assert choose(call, None, training) == expected(mx.gpu, version, call, training)


# An implementation that is named


@given(call=calls, device=devices, version=versions, training=st.booleans(), name=st.sampled_from(IMPLEMENTATIONS))
def test_the_one_named_runs_or_raises(call, device, version, training, name):
    with pytest.MonkeyPatch.context() as patch:
        use(patch, device, version)
        if refusal(name, call) is not None:
            with pytest.raises(NotImplementedError, match=f"implementation '{name}' .* can run this call"):
                choose(call, name, training)
            return
        route = choose(call, name, training)
        assert route.implementation == name
        if name == "dense":
            assert route.head_dim == call.head_dim
        elif name == "tiled":
            sizes = sizes_of(call, version) if device == mx.gpu else ()
            assert route.head_dim == min((n for n in sizes if n >= call.head_dim), default=call.head_dim)
        else:
            assert route.head_dim >= call.head_dim + fold_size(call.kv_len, call.dtype)


ROUTED_ELSEWHERE = {  # calls, and whether gradients are wanted: no row tells the head size to fold them to
    "few queries": (call_of(32, 4, 40), False),
    "many keys": (call_of(32, 40, 9000), False),
    "training": (call_of(32, 40), True),
    "float32": (call_of(32, 40, dtype=mx.float32), False),
    "123 features": (call_of(123, 40), False),
}


@pytest.mark.parametrize(("call", "training"), ROUTED_ELSEWHERE.values(), ids=ROUTED_ELSEWHERE)
def test_folded_by_name_has_a_size_that_metals_kernels_take(call, training, monkeypatch):
    use(monkeypatch, mx.gpu, NEWER)
    route = choose(call, "folded", training)
    assert route.fused
    assert route.head_dim in ((64, 96, 128, 192, 256) if call.q_len <= 8 else (*FOR_MORE[NEWER], 192, 256))


@pytest.mark.parametrize("version", [NEWER, MIDDLE, OLDER], ids=str)
def test_what_no_fused_kernel_takes_is_folded_in_float32(version, monkeypatch):
    use(monkeypatch, mx.gpu, version)
    call = call_of(255 if version == NEWER else 40)
    assert choose(call, "folded") == Route("folded", call.head_dim + 3, fused=False)  # 3 features for so few keys


# What cannot run


def test_float64_is_dense_on_the_cpu():
    with mx.stream(mx.cpu):
        call = call_of(dtype=mx.float64)
        assert choose(call, None) == Route("dense", 64)
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
@pytest.mark.parametrize("device", [mx.cpu, mx.gpu], ids=["cpu", "gpu"])
def test_what_cannot_be_folded_is_tiled_and_says_why(rules, reason, device, monkeypatch):
    use(monkeypatch, device, NEWER)
    call = call_of(**rules)
    assert choose(call, None) == Route("tiled", 64)
    assert [refusal(name, call) for name in ("tiled", "dense")] == [None, None]
    with pytest.raises(NotImplementedError, match=f"^implementation 'folded' {reason}.*; 'tiled' and 'dense' can run"):
        choose(call, "folded")


@pytest.mark.parametrize("version", [OLDER, (0, 30, 6), MIDDLE], ids=str)
def test_an_mlx_that_cannot_be_made_to_fuse_does_not_fold_by_itself(version, monkeypatch):
    use(monkeypatch, mx.gpu, version)
    assert choose(call_of(), None) == Route("tiled", 64)


def test_slopes_that_cannot_be_read_are_not_folded():
    said = []

    def function(slopes):
        call = call_of(slopes=slopes)
        said.append((refusal("folded", call), choose(call, None)))
        return slopes

    mx.eval(mx.vmap(function)(mx.ones((3, 2))))
    assert said == [("must be able to read the slopes, to bound its error", Route("tiled", 64))]


@pytest.mark.parametrize("dtype", [*LOW, mx.float32], ids=str)
def test_what_folding_is_allowed_is_the_rounding_of_the_dtype(dtype):
    # Of slopes s, the bound is in proportion to s: the largest that is folded, and the least that is not.
    limit = _routes.FOLD_LIMITS[dtype]
    slope = 64.0
    while refusal("folded", call_of(slopes=mx.full((2,), slope), dtype=dtype)) is not None:
        slope /= 2
    reason = refusal("folded", call_of(slopes=mx.full((2,), 2 * slope), dtype=dtype)) or ""
    moved = float(reason.split()[5].rstrip(","))
    assert limit < moved <= 2.1 * limit


def test_the_layers_and_the_function_ask_the_same_table(monkeypatch):
    asked = []

    def watched(call, implementation, training=False):
        asked.append((call.head_dim, implementation, training))
        return choose(call, implementation, training)

    monkeypatch.setattr("alibi_mlx._attention.choose", watched)
    query = mx.zeros((1, 2, 3, 4))
    attention(query, query, query)
    attention(query, query, query, implementation="tiled", training=True)
    assert asked == [(4, None, False), (4, "tiled", True)]
