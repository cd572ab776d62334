"""Tiled attention in PyTorch alone: compilation, autograd, strides, memory, padded and packed rows."""

from __future__ import annotations

import functools
import subprocess
import sys
import time
import timeit
from collections.abc import Callable, Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch")


from torch.utils.checkpoint import checkpoint  # noqa: E402

import alibi_torch  # noqa: E402
from benchmarks.harness import peak_growth  # noqa: E402
from tests.support.tiles import Tiling  # noqa: E402

NAMES = ("query", "key", "value", "slopes", "future_slopes", "log_gates", "sinks")


SLOPES = torch.tensor([1.0, 0.3, 0.0625, 0.0])
IDS = torch.tensor([0, 0, 0, 1, 1, 2, 2], dtype=torch.int32)
MASK = torch.rand(2, 1, 7, 11, generator=torch.Generator().manual_seed(7)) < 0.7
VARIANTS: dict[str, dict[str, Any]] = {
    "causal": {},
    "symmetric": {"is_causal": False, "window_size": 3},
    "asymmetric": {"is_causal": False, "future_slopes": torch.tensor([0.5, 0.0, 0.1, 1.0]), "mask": MASK},
    "by entry": {
        "slopes": torch.rand(2, 4),
        "future_slopes": torch.rand(2, 4),
        "is_causal": False,
        "q_offset": torch.tensor([3, -2], dtype=torch.int32),
    },
    "sinks": {"sinks": SLOPES * 3 - 1, "q_offset": 8},
    "gates and sinks": {"log_gates": -torch.rand(2, 4, 11), "sinks": SLOPES * 3 - 1, "q_offset": 8},
    "segments": {"segment_ids": (IDS, torch.cat([IDS, IDS[:4]])), "max_key_norm": 10.0},
}


def tensors(
    lengths: tuple[int, int],
    *,
    batch: int = 2,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 5,
    dtype: torch.dtype = torch.float32,
) -> list[torch.Tensor]:
    """Return query, key and value, ``[batch, heads, length, head_dim]``."""
    generator = torch.Generator().manual_seed(sum(lengths))
    q_len, kv_len = lengths
    shapes = [(batch, h, n, head_dim) for h, n in ((heads[0], q_len), (heads[1], kv_len), (heads[1], kv_len))]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def arguments_of(variant: str, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    arguments = dict(zip(NAMES, (*tensors((7, 11)), SLOPES), strict=False)) | VARIANTS[variant]
    return {name: x.to(dtype, copy=True) if name in NAMES else x for name, x in arguments.items()}


def leaves_of(arguments: dict[str, Any], names: Sequence[str] = NAMES) -> list[torch.Tensor]:
    """Return the arguments of these names, which require gradients from now on."""
    return [arguments[name].requires_grad_() for name in names if name in arguments]


def tiled(*tensors: torch.Tensor, **arguments: Any) -> torch.Tensor:
    return alibi_torch.attention(*tensors, implementation="tiled", **arguments)


# --- Numbers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("largest", [2.0**14, 2.0**24, 2.0**40])
@pytest.mark.parametrize("lengths", [(60, 60), (3, 1100), (80, 1100)])
@pytest.mark.parametrize(
    "rules", [{}, {"is_causal": False}, {"mask": torch.arange(60) > 20}], ids=["causal", "both", "mask"]
)
def test_gradients_where_scores_are_large(rules: dict[str, Any], lengths: tuple[int, int], largest: float) -> None:
    if "mask" in rules and lengths[1] != 60:
        rules = {"mask": torch.arange(lengths[1]) > lengths[1] - lengths[0] + 1}  # the first queries see nothing
    query, key, value = tensors(lengths)
    query, key = query * largest**0.5, key * largest**0.5

    def gradients(implementation: str, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        inputs = [x.to(dtype, copy=True).requires_grad_() for x in (query, key, value, SLOPES)]
        loss = alibi_torch.attention(*inputs, **rules, implementation=implementation).square().sum()
        # With the gradients of slopes, and without.
        return *torch.autograd.grad(loss, inputs[:3], retain_graph=True), *torch.autograd.grad(loss, inputs)

    # No more than what the rounding of such scores makes of it in any case, and that of their gradients, which are of
    # the size of values and cotangents and are multiplied by keys or queries.
    for right, actual, expected in zip(
        *(gradients(*x) for x in (("dense", torch.float64), ("tiled", torch.float32), ("dense", torch.float32))),
        strict=True,
    ):
        budget = 4 * (expected - right).abs().max() + 2.0**-13 * right.abs().max() + 2.0**-20 * largest**0.5
        assert ((actual - right).abs() <= budget).all()


def test_gradients_of_queries_that_cannot_see_a_large_key_keep_their_digits() -> None:
    # The mean of all keys is that of the last one. Without it, scores of the others would be hundreds, and lose digits.
    query, key, value, weight = torch.randn(4, 1, 2, 7, 32, generator=torch.Generator().manual_seed(0)).unbind()
    key[:, :, -1] *= 100

    def gradients(implementation: str, dtype: torch.dtype) -> list[torch.Tensor]:
        tensors = [x.to(dtype).requires_grad_() for x in (query, key, value)]
        result = alibi_torch.attention(*tensors, implementation=implementation)
        return [x[:, :, :-1] for x in torch.autograd.grad((result * weight)[:, :, :-1].sum(), tensors)]

    exact = gradients("dense", torch.float64)
    for found, other in zip(gradients("tiled", torch.float32), exact, strict=True):
        # Scores up to 10 or so are rounded by a dozen units of 2**-24 of that, and weights by as much of themselves.
        assert (found - other).norm() <= 16 * 10 * 2**-24 * other.norm()


# --- Compiled ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "length", "dtype"),
    [
        (NAMES[:1], 1025, torch.float32),
        pytest.param(NAMES, 64, torch.bfloat16, marks=pytest.mark.slow),
        pytest.param(NAMES, 1025, torch.bfloat16, marks=pytest.mark.slow),
    ],
)
def test_gradients_of_a_compiled_loss(names: tuple[str, ...], length: int, dtype: torch.dtype) -> None:
    torch.compiler.reset()
    arguments = dict(zip(NAMES, tensors((length, length), batch=1, heads=(2, 1), dtype=dtype), strict=False))
    arguments |= {"slopes": torch.tensor([0.5, 0.02]), "future_slopes": torch.tensor([0.1, 0.3]), "is_causal": False}
    leaves = leaves_of(arguments, names)

    def loss(arguments: dict[str, Any]) -> torch.Tensor:
        return alibi_torch.attention(**arguments).sum()

    grads = (torch.autograd.grad(f(arguments), leaves) for f in (torch.compile(loss, fullgraph=True), loss))
    torch.testing.assert_close(*grads, rtol=4 * torch.finfo(dtype).eps, atol=1e-6)


def test_one_compiled_function_serves_varying_lengths() -> None:
    torch.compiler.reset()
    compiled, slopes = torch.compile(tiled, fullgraph=True, dynamic=True, backend="aot_eager"), SLOPES.clone()
    for lengths in ((7, 11), (13, 13), (5, 64)):
        inputs = [x.requires_grad_() for x in (*tensors(lengths), slopes)]
        with Tiling().applied():
            results = [f(*inputs, is_causal=False) for f in (compiled, tiled)]
            torch.testing.assert_close(*results, rtol=0, atol=0)
            grads = [torch.autograd.grad(x.square().sum(), inputs) for x in results]
        torch.testing.assert_close(*grads, rtol=1e-5, atol=2e-6)


# --- Memory: strides, aliases, growth ------------------------------------------------------------------------------

STRIDES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "every other token": lambda x: torch.stack([x, x + 9], dim=3).flatten(2, 3)[:, :, ::2],
    "last axis not dense": lambda x: torch.stack([x, x + 9], dim=-1)[..., 0],
    "a slice": lambda x: torch.nn.functional.pad(x, (3, 2, 1, 4, 1, 1))[:, 1:-1, 1:-4, 3:-2],
    "by columns": lambda x: x.mT.contiguous().mT,
    "windows that overlap": lambda x: torch.nn.functional.pad(x[..., 0], (0, 4), value=0.5).unfold(-1, 5, 1),
    "one head": lambda x: x[:, :1].expand(-1, x.shape[1], -1, -1),
    "one entry": lambda x: x[:1].expand(2, -1, -1, -1),
    "one token": lambda x: x[:, :, :1].expand(-1, -1, x.shape[2], -1),
    "one number": lambda x: x[:1, :1, :1, :1].expand(x.shape),
}


@pytest.mark.parametrize("layout", STRIDES)
@pytest.mark.parametrize("tiling", [Tiling(call_scores=10**9), Tiling(short=1024)], ids=["tiles", "short"])
def test_strides_change_nothing(layout: str, tiling: Tiling) -> None:
    change = STRIDES[layout]
    changed = [change(x) for x in tensors((32, 40))]
    weight = change(torch.randn(2, 4, 32, 5))
    assert not all(x.is_contiguous() for x in changed)

    def gradients(inputs: list[torch.Tensor], weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        inputs = [x.detach().requires_grad_() for x in (*inputs, SLOPES)]
        result = tiled(*inputs)
        return result, *torch.autograd.grad(result, inputs, weight)

    with tiling.applied():
        actual = gradients(changed, weight)
        expected = gradients([x.contiguous() for x in changed], weight.contiguous())
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("variant", VARIANTS)
def test_nothing_returned_shares_memory(variant: str, dtype: torch.dtype) -> None:
    arguments = arguments_of(variant, dtype)
    leaves = leaves_of(arguments)
    for tiling in (Tiling(), Tiling(short=1024)):
        with tiling.applied():
            result = tiled(**arguments)
            grads = torch.autograd.grad(result.sum(), leaves)
        assert result.is_contiguous()
        storages = [x.untyped_storage().data_ptr() for x in (result, *grads, *leaves)]
        assert len(set(storages)) == len(storages)
        assert [(x.dtype, x.shape) for x in grads] == [(x.dtype, x.shape) for x in leaves]


def long_attention(length: int, is_causal: bool, masked: bool, is_recorded: bool) -> Callable[[], object]:
    query, key, value = (x.requires_grad_() for x in tensors((length, length), batch=1, head_dim=16))
    slopes = torch.tensor([1.0, 0.5, 0.125, 2.0**-6], requires_grad=True)
    mask = (torch.arange(length) > 9)[None, None, None] if masked else None
    warm = [x[:, :, :1100].detach().requires_grad_() for x in (query, key, value)]
    tiled(*warm, slopes).sum().backward()

    def gradients() -> object:
        loss = tiled(query, key, value, slopes, is_causal=is_causal, mask=mask).sum()
        return torch.autograd.grad(loss, (query, key, value, slopes), create_graph=is_recorded)

    return gradients


# Gradients that are recorded, to be differentiated, take no more until they are.
@pytest.mark.parametrize(
    ("is_causal", "masked", "is_recorded"),
    [(True, False, True), pytest.param(False, True, False, marks=pytest.mark.slow)],
)
def test_memory_grows_with_the_length_alone(is_causal: bool, masked: bool, is_recorded: bool) -> None:
    length = 16_384
    peak = peak_growth("tests.torch.test_tiled:long_attention", length, is_causal, masked, is_recorded)
    scores = 4 * 4 * length**2  # bytes
    assert peak < 150 * 2**20 < scores / 20


# --- Autograd ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [(31, 31), (300, 300)])
def test_two_runs_of_several_threads_give_the_same_bits(
    lengths: tuple[int, int], request: pytest.FixtureRequest
) -> None:
    request.addfinalizer(functools.partial(torch.set_num_threads, torch.get_num_threads()))
    torch.set_num_threads(3)
    runs = []
    for _ in range(2):
        inputs = [x.requires_grad_() for x in (*tensors(lengths), SLOPES.clone())]
        with Tiling(kernel_elements=1, blocks=512, call_scores=10**9).applied():  # runs of tiles in parts
            result = tiled(*inputs)
            runs.append([result, *torch.autograd.grad(result.square().sum(), inputs)])
    assert all(map(torch.equal, *runs))


def test_a_slope_written_to_before_the_gradients_is_noticed() -> None:
    slopes = SLOPES.clone().requires_grad_()
    result = tiled(*tensors((9, 9)), slopes)
    with torch.no_grad():
        slopes *= 2
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()


@pytest.mark.parametrize("wanted", [NAMES[:3], NAMES, ("key",)], ids=len)  # short calls differ if slopes are wanted
@pytest.mark.parametrize("short", [0, 1024])
@pytest.mark.parametrize("variant", VARIANTS)
def test_derivatives_of_derivatives_are_those_of_dense_attention(
    variant: str, short: int, wanted: tuple[str, ...]
) -> None:
    arguments = arguments_of(variant, torch.float64)
    by = leaves_of(arguments, wanted)

    def derivatives(implementation: str) -> list[torch.Tensor]:
        found = [alibi_torch.attention(**arguments, implementation=implementation)]
        for _ in range(3):
            loss = sum((x + 1).square().sum() for x in found[-len(by) :])
            found += torch.autograd.grad(loss, by, create_graph=True)
        return found

    with Tiling(short=short).applied():
        for one, other in zip(derivatives("tiled"), derivatives("dense"), strict=True):
            assert (one - other).abs().max() <= 2.0**-40 * other.abs().max()


def along(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x: torch.func.jvp(function, (x,), (torch.ones_like(x),))[1]


# Second derivatives of a function of one array to a number; x is two such arrays.
SECOND: dict[str, Callable[..., Any]] = {
    "jacrev of jacrev": lambda f, x: torch.func.jacrev(torch.func.jacrev(f))(x[0]),
    "jacfwd of jacrev": lambda f, x: torch.func.jacfwd(torch.func.jacrev(f))(x[0]),
    "a batch at once": lambda f, x: torch.autograd.functional.hessian(f, x[0], vectorize=True),
    "vmap of hessian": lambda f, x: torch.func.vmap(torch.func.hessian(f))(x),
    "hessian of vmap": lambda f, x: torch.func.hessian(lambda x: torch.func.vmap(f)(x).sum())(x),
    "jvp of vmap of grad": lambda f, x: along(torch.func.vmap(torch.func.grad(f)))(x),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # PyTorch's own, of what maps over its kernel twice
@pytest.mark.parametrize("by", ["query", "slopes", "sinks"])
@pytest.mark.parametrize("transform", SECOND.values(), ids=SECOND)
def test_second_derivatives_by_any_transform_are_those_of_dense_attention(transform: Any, by: str) -> None:
    inputs = dict(zip(NAMES, tensors((3, 5), batch=1, dtype=torch.float64), strict=False))
    inputs["slopes"] = inputs["sinks"] = SLOPES.double()
    x = inputs.pop(by)
    x = torch.stack([x, 0.7 * x])

    def derivative(implementation: str | None, power: int) -> torch.Tensor:
        def loss(x: torch.Tensor) -> torch.Tensor:
            return (alibi_torch.attention(**inputs, **{by: x}, implementation=implementation) ** power).sum()

        return transform(loss, x)

    for power in (1, 2):  # the gradient of a sum is one number in memory
        found, expected = (derivative(name, power) for name in (None, "dense"))
        torch.testing.assert_close(found, expected, rtol=2.0**-40, atol=2.0**-40)


def by_forward_ad(function: Callable[..., Any], point: torch.Tensor, tangent: torch.Tensor) -> torch.Tensor:
    with torch.autograd.forward_ad.dual_level():
        dual = function(torch.autograd.forward_ad.make_dual(point, tangent))
        return torch.autograd.forward_ad.unpack_dual(dual).tangent


FORWARD: dict[str, Callable[..., torch.Tensor]] = {
    "forward_ad": by_forward_ad,
    "jvp": lambda f, point, tangent: torch.func.jvp(f, (point,), (tangent,))[1],
    "jacfwd": lambda f, point, tangent: torch.func.jacfwd(lambda t: f(point + t * tangent))(torch.tensor(0.0)),
}


@pytest.mark.parametrize("by", ["query", "slopes"])
@pytest.mark.parametrize("way", FORWARD)
def test_forward_mode_is_dense_or_refused(way: str, by: str) -> None:
    arguments = arguments_of("causal")
    point = arguments.pop(by)
    tangent = torch.randn(point.shape, generator=torch.Generator().manual_seed(2))

    def function(x: torch.Tensor, implementation: str | None = None) -> torch.Tensor:
        rules = {by: x, "implementation": implementation, "allow_negative_slopes": True}
        return alibi_torch.attention(**arguments, **rules)

    step = 2.0**-10
    expected = (function(point + step * tangent) - function(point - step * tangent)) / (2 * step)
    torch.testing.assert_close(FORWARD[way](function, point, tangent), expected, rtol=0, atol=1e-2)
    for name in ("tiled", "sdpa", "flex"):
        with pytest.raises(NotImplementedError, match=f"'{name}' has no derivatives in forward mode; 'dense' can run"):
            FORWARD[way](functools.partial(function, implementation=name), point, tangent)


COMPILED: dict[str, Callable[..., Any]] = {
    "jvp": lambda f, x: along(f)(x),
    "forward_ad": lambda f, x: by_forward_ad(f, x, x),
    "vmap of grad": lambda f, x: torch.func.vmap(torch.func.grad(lambda x: f(x).square().sum()))(x[None]),
    "grad of vmap": lambda f, x: torch.func.grad(lambda x: torch.func.vmap(f)(x[None]).square().sum())(x),
    "hessian": lambda f, x: torch.func.hessian(lambda x: f(x).square().sum())(x),
}


@pytest.mark.parametrize("transform", COMPILED.values(), ids=COMPILED)
def test_transforms_inside_of_a_compiled_function(transform: Any) -> None:
    torch.compiler.reset()
    query, key, value = tensors((3, 5), batch=1, dtype=torch.float64)

    def derivative(implementation: str | None, query: torch.Tensor) -> torch.Tensor:
        rules = {"slopes": SLOPES, "implementation": implementation}
        return transform(lambda query: alibi_torch.attention(query, key, value, **rules), query)

    compiled = torch.compile(functools.partial(derivative, None), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(query), derivative("dense", query), rtol=2.0**-40, atol=2.0**-40)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoints(use_reentrant: bool) -> None:
    inputs = [x.requires_grad_() for x in (*tensors((7, 11)), SLOPES.clone())]
    with Tiling().applied():
        expected = torch.autograd.grad(tiled(*inputs).sum(), inputs)
        checkpoint(tiled, *inputs, use_reentrant=use_reentrant).sum().backward()
    torch.testing.assert_close([x.grad for x in inputs], expected, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("short", [0, 1024])
def test_a_gradient_penalty_in_contexts(short: int, dtype: torch.dtype) -> None:
    inputs = [x.requires_grad_() for x in tensors((7, 11), dtype=dtype)[:2]]

    def gradients(implementation: str) -> tuple[torch.Tensor, ...]:
        def attend(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            return alibi_torch.attention(query, key, key, implementation=implementation)

        result = checkpoint(attend, *inputs, use_reentrant=False)
        grads = torch.autograd.grad(result.float().square().sum(), inputs, create_graph=True)
        grads[0].mul_(2.0)
        return torch.autograd.grad(sum(x.float().square().sum() for x in grads), inputs)

    expected = gradients("dense")
    offloaded = torch.autograd.graph.save_on_cpu()
    autocast = torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16)
    with Tiling(short=short).applied(), autocast, offloaded:
        for one, other in zip(gradients("tiled"), expected, strict=True):
            # Results and gradients are rounded to the dtype before they are differentiated.
            assert (one - other).abs().max() <= 32 * torch.finfo(dtype).eps * other.abs().max()


def test_inference_mode_and_no_grad_change_no_result() -> None:
    inputs = leaves_of(arguments_of("causal"))
    with Tiling().applied():
        expected = tiled(*inputs)
        with torch.inference_mode():
            found = [tiled(*inputs), tiled(*(x.clone() for x in inputs))]
        with torch.no_grad():
            found.append(tiled(*inputs))
    assert [(x.is_inference(), x.requires_grad) for x in found] == [(True, False), (True, False), (False, False)]
    assert all(torch.equal(x, expected) for x in found)


def test_a_default_device_or_dtype_changes_nothing() -> None:
    inputs = leaves_of(arguments_of("causal"))

    def gradients() -> tuple[torch.Tensor, ...]:
        with Tiling().applied():
            return torch.autograd.grad(tiled(*inputs, tolerance=0.0).sum(), inputs)

    expected = gradients()
    with torch.device("meta"):
        torch.testing.assert_close(gradients(), expected, rtol=0, atol=0)
    torch.set_default_dtype(torch.float64)
    try:
        torch.testing.assert_close(gradients(), expected, rtol=0, atol=0)
    finally:
        torch.set_default_dtype(torch.float32)


def test_scores_without_a_horizon_cost_little_more_than_a_dense_bias() -> None:
    """The worst case: scores so large that no key may be left out, so that measuring and planning save nothing."""
    query, key, value = tensors((2048, 2048), batch=1, heads=(4, 4), head_dim=64)
    query, slopes = query * 100, torch.full((4,), 2.0**-9)

    def seconds(implementation: str) -> float:
        call = functools.partial(alibi_torch.attention, query, key, value, slopes, implementation=implementation)
        return min(timeit.repeat(call, timer=time.thread_time, number=1))

    assert alibi_torch.explain(query, key, value, slopes).horizons.min() == float("inf")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert seconds("tiled") <= 1.15 * seconds("sdpa")
    finally:
        torch.set_num_threads(threads)


WITHOUT_FUSED_KERNELS = """
import torch

del torch._scaled_dot_product_flash_attention_for_cpu
torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward = None
from tests.torch.test_tiled import VARIANTS, gradients_of

for variant in VARIANTS:
    torch.testing.assert_close(*(gradients_of(variant, name) for name in ("tiled", "dense")), rtol=1e-5, atol=1e-5)
"""


def gradients_of(variant: str, implementation: str) -> tuple[torch.Tensor, ...]:
    arguments = arguments_of(variant)
    leaves = leaves_of(arguments)
    result = alibi_torch.attention(**arguments, implementation=implementation)
    return result, *torch.autograd.grad(result.square().sum(), leaves)


def test_fused_kernels_of_pytorch_may_be_gone() -> None:
    """They are private to PyTorch: a version that lacks them is slower, never wrong."""
    run = subprocess.run([sys.executable, "-c", WITHOUT_FUSED_KERNELS], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]


# --- Packed and padded rows -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_causal", [True, False])
def test_packed_sequences_are_computed_one_by_one(is_causal: bool) -> None:
    """Result and gradients are bit for bit those of each alone."""
    lengths = [[60, 90, 33, 117], [150, 0, 75, 75]]
    ids = torch.stack([torch.repeat_interleave(torch.tensor([7, 0, 9, 3]), torch.tensor(n)) for n in lengths])
    inputs = [x.requires_grad_() for x in tensors((300, 300), batch=2, heads=(4, 2))]
    slopes = torch.rand(2, 4)

    def gradients(result: torch.Tensor) -> list[torch.Tensor]:
        return [result, *torch.autograd.grad((result * result.detach().cos()).sum(), inputs)]

    rows = []
    for entry, of_entry in enumerate(lengths):
        split = zip(*(x[entry : entry + 1].split([n for n in of_entry if n], dim=2) for x in inputs), strict=True)
        alone = [alibi_torch.attention(*x, slopes[entry : entry + 1], is_causal=is_causal) for x in split]
        rows.append(torch.cat(alone, dim=2))
    packed = alibi_torch.attention(*inputs, slopes, is_causal=is_causal, segment_ids=ids)
    torch.testing.assert_close(gradients(packed), gradients(torch.cat(rows)), rtol=0, atol=0)
