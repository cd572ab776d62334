"""FlexAttention: its block masks, the functions it is given, the compiled kernel on the CPU, and all of it on CUDA."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import array_api_compat.torch as xp  # noqa: E402
from torch._subclasses import FakeTensorMode  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402
from torch.nn.attention.flex_attention import AuxOutput, BlockMask  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

import alibi_torch  # noqa: E402
from alibi_core._attention import dense_attention  # noqa: E402
from alibi_core.backend import AttentionCall  # noqa: E402
from alibi_torch._flex import kernels as _flex  # noqa: E402
from alibi_torch._flex.blocks import Gpu, options_on  # noqa: E402
from alibi_torch._flex.kernels import flex_attention  # noqa: E402
from alibi_torch._flex.mask import BLOCK, are_few, block_mask  # noqa: E402
from tests.support.full import first_of  # noqa: E402

# PyTorch's compiler asks each tensor for that, and hides this warning where it is no error.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")

BATCH, HEADS, KV_HEADS, HEAD_DIM = 2, 4, 2, 16
VIEWS = (torch.ops.aten.view.default, torch.ops.aten.detach.default, torch.ops.aten.alias.default)
LEARNED = ("slopes", "future_slopes")
SLOPES = torch.tensor([1.0, 0.25, 0.0, 2.0**-8])
FUTURE = torch.tensor([0.5, 0.0, 0.125, 1.0])

# Names, lengths (queries, keys) and arguments; tensors are made where they are used.
CASES: dict[str, tuple[tuple[int, int], dict[str, Any]]] = {
    "one token": ((1, 1), {}),
    "127": ((127, 127), {}),
    "128": ((128, 128), {}),
    "129": ((129, 129), {}),
    "symmetric": ((300, 300), {"is_causal": False}),
    "asymmetric": ((257, 257), {"is_causal": False, "future_slopes": FUTURE}),
    "clamped": ((200, 200), {"is_causal": False, "future_slopes": FUTURE * 0}),
    "decoding": ((1, 700), {}),
    "a few queries": ((5, 300), {}),
    "more queries than keys": ((300, 140), {}),
    "fewer queries than keys": ((140, 400), {}),
    "offset": ((200, 300), {"q_offset": 50}),
    "far offset": ((140, 300), {"q_offset": 1_000_000}),
    "offset before the keys": ((300, 200), {"q_offset": -150, "is_causal": False, "future_slopes": FUTURE}),
    "offset by batch": ((140, 300), {"q_offset": torch.tensor([-20, 333])}),
    "symmetric offset by batch": ((140, 300), {"q_offset": torch.tensor([77, 400]), "is_causal": False}),
    "window": ((500, 500), {"window_size": 130}),
    "symmetric window": ((500, 600), {"window_size": 200, "is_causal": False}),
    "window of one": ((140, 140), {"window_size": 0}),
    "segments": ((400, 400), {"segment_ids": torch.arange(400) // 150}),
    "segments by batch": ((300, 300), {"segment_ids": (torch.arange(300) + torch.tensor([[0], [40]])) // 120}),
    "pair of segments": (
        (140, 300),
        {"segment_ids": (torch.arange(140) // 100, torch.arange(300) // 90), "is_causal": False},
    ),
    "mask by key": ((200, 300), {"mask": (torch.arange(300) % 7 > 3)[None, None, None, :], "is_causal": False}),
    "mask by head": (
        (200, 200),
        {"mask": (torch.arange(200)[:, None] % (3 + torch.arange(HEADS)[:, None, None]) > 0), "is_causal": False},
    ),
    "masked rows": ((140, 140), {"mask": torch.arange(140)[:, None] % 2 > torch.zeros(140)}),
    "hidden neighbours": (
        (300, 300),
        {
            "mask": torch.ones(300, 300, dtype=torch.bool).tril(-90) | torch.ones(300, 300, dtype=torch.bool).triu(120),
            "is_causal": False,
            "future_slopes": FUTURE,
        },
    ),
    "scale": ((140, 140), {"scale": -0.7}),
    "no horizon": ((300, 300), {"tolerance": 0.0}),
    "negative slopes": ((300, 300), {"slopes": SLOPES - 0.01, "allow_negative_slopes": True}),
    "slopes by batch": ((257, 257), {"slopes": SLOPES * torch.tensor([[1.0], [0.3]])}),
    "1000": ((1000, 1000), {}),
    "symmetric 1000": ((1000, 1000), {"is_causal": False}),
}
TABLE = [pytest.param(*case, id=name) for name, case in CASES.items()]
# Each takes seconds to compile.
COMPILED = ("asymmetric", "symmetric window", "pair of segments", "mask by head")


def tensors(
    lengths: tuple[int, int],
    *,
    dtype: torch.dtype = torch.float32,
    batch: tuple[int, ...] = (BATCH,),
    heads: tuple[int, int] = (HEADS, KV_HEADS),
    head_dim: int = HEAD_DIM,
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(lengths))
    (num_heads, num_kv_heads), (q_len, kv_len) = heads, lengths
    shapes = [(num_heads, q_len), (num_kv_heads, kv_len), (num_kv_heads, kv_len)]
    return [torch.randn((*batch, *shape, head_dim), generator=generator).to(dtype) for shape in shapes]


def check(query: Any, key: Any, value: Any, slopes: Any = SLOPES, **arguments: Any) -> AttentionCall:
    return AttentionCall.check(query, key, value, slopes, xp=xp, **arguments)


def reference(inputs: list[Any], cotangent: Any = None, **arguments: Any) -> dict[str, torch.Tensor]:
    """Return the exact result, and the gradients of its product with ``cotangent``, in float64 on the CPU."""
    tensors = dict(zip(("query", "key", "value"), inputs, strict=True))
    tensors |= {"slopes": SLOPES} | {name: arguments.pop(name) for name in list(arguments) if name in LEARNED}
    tensors = {name: x.detach().cpu().double().requires_grad_() for name, x in tensors.items()}
    result = dense_attention(check(**tensors, **arguments), *list(tensors.values())[:3])
    if cotangent is None:
        return {"result": result.detach()}
    gradients = torch.autograd.grad((result * cotangent.cpu().double()).sum(), list(tensors.values()))
    return {"result": result.detach(), **dict(zip(tensors, gradients, strict=True))}


def differentiated(
    inputs: list[Any], cotangent: Any, compiler: Callable[..., Any] = lambda function: function, **arguments: Any
) -> dict[str, torch.Tensor]:
    """Return the same by FlexAttention, where the inputs are."""
    tensors = dict(zip(("query", "key", "value"), inputs, strict=True))
    slopes = {"slopes": SLOPES} | {name: arguments.pop(name) for name in list(arguments) if name in LEARNED}
    tensors |= {name: x.to(cotangent.device) for name, x in slopes.items()}
    tensors = {name: x.detach().clone().requires_grad_() for name, x in tensors.items()}

    def attend(tensors: dict[str, Any]) -> torch.Tensor:
        return flex_attention(check(**tensors, **arguments), *list(tensors.values())[:3])

    result = compiler(attend)(tensors)
    gradients = torch.autograd.grad((result * cotangent).sum(), list(tensors.values()))
    return {"result": result.detach(), **dict(zip(tensors, gradients, strict=True))}


def assert_near(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], roundoff: float) -> None:
    for name, x in expected.items():
        assert actual[name].shape == x.shape
        difference = (actual[name].cpu().double() - x).abs().max().item()
        assert difference <= roundoff * max(1.0, x.abs().max().item()), f"{name} is off by {difference}"


def plan(call: AttentionCall, query: Any, key: Any) -> BlockMask:
    call = _flex.one_batch_axis(call)
    mask_mod = _flex.mods(call, 0, 0)[1]
    return block_mask(call, query, key, mask_mod, seq_lengths=(call.q_len, call.kv_len), backward=True)


def listed(counts: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Return which blocks are named by lists, of which the first ``counts`` entries count: ``[..., rows, columns]``."""
    result = torch.zeros(indices.shape, dtype=torch.bool)
    for index in itertools.product(*map(range, indices.shape[:-1])):
        chosen = indices[index][: int(counts[index])].tolist()
        assert len(set(chosen)) == len(chosen), "a block is visited twice"
        result[index][chosen] = True
    return result


def assert_contiguous(counts: torch.Tensor, indices: torch.Tensor) -> None:
    """Assert that each list of blocks is one run, in order."""
    counted = torch.arange(1, indices.shape[-1]) < counts[..., None]
    assert (indices.diff(dim=-1) == 1)[counted].all()


def visited(mask: BlockMask) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which blocks are visited and masked, and which are visited whole: ``[..., q_blocks, kv_blocks]``."""
    partial = listed(mask.kv_num_blocks, mask.kv_indices)
    full = None if mask.full_kv_num_blocks is None else listed(mask.full_kv_num_blocks, mask.full_kv_indices)
    if mask.q_num_blocks is not None:
        assert torch.equal(listed(mask.q_num_blocks, mask.q_indices).mT, partial)
        if full is not None:
            assert torch.equal(listed(mask.full_q_num_blocks, mask.full_q_indices).mT, full)
    full = torch.zeros_like(partial) if full is None else full
    assert not (partial & full).any()
    return partial, full


def visible(mask: BlockMask, batch: int, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys that the kernel gives weight, and those in the blocks that it visits."""
    q_len, kv_len = mask.seq_lengths
    axes = torch.meshgrid(*map(torch.arange, (batch, heads, q_len, kv_len)), indexing="ij")
    partial, full = (
        x.repeat_interleave(BLOCK, -2).repeat_interleave(BLOCK, -1)[..., :q_len, :kv_len] for x in visited(mask)
    )
    return (partial & mask.mask_mod(*axes)) | full, (partial | full).expand(batch, heads, q_len, kv_len)


def emulated(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    score_mod: Callable[..., torch.Tensor],
    block_mask: BlockMask,
    scale: float,
    enable_gqa: bool,
    return_aux: object = None,
) -> Any:
    """Return what FlexAttention does with its arguments, by operations that are differentiable on the CPU."""
    group = query.shape[1] // key.shape[1]
    assert enable_gqa == (group > 1)
    key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
    assert (query.shape[2], key.shape[2]) == block_mask.seq_lengths
    axes = torch.meshgrid(*map(torch.arange, (*query.shape[:3], key.shape[2])), indexing="ij")
    is_visible, _ = visible(block_mask, *query.shape[:2])
    scores = torch.where(is_visible, score_mod(query @ key.mT * scale, *axes), -torch.inf)
    attends = is_visible.any(dim=-1, keepdim=True)
    weights = torch.where(is_visible, torch.softmax(torch.where(attends, scores, 0.0), dim=-1), 0.0)
    # Where every visible key is weighed by a distance of 0, softmax knows no answer; the kernels give zeros.
    result = torch.where(torch.isfinite(weights), weights, 0.0) @ value
    return result if return_aux is None else (result, AuxOutput(lse=scores.detach().logsumexp(dim=-1)))


@pytest.fixture
def kernel_with_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let calls run on the CPU by an emulation of the kernels that has gradients, and as on a GPU."""
    monkeypatch.setattr(_flex, "_kernel", lambda *_: emulated)
    monkeypatch.setattr(_flex, "counts_in_float", _flex.has_exact_positions)


# --- The block mask ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("lengths", "arguments"), TABLE)
def test_the_mask_leaves_out_what_weighs_nothing_and_nothing_else(
    lengths: tuple[int, int], arguments: dict[str, Any]
) -> None:
    query, key, value = tensors(lengths)
    call = check(query, key, value, **arguments)
    mask = plan(call, query, key)
    weighed, inside = visible(mask, BATCH, HEADS)
    if "fwd_BLOCKS_ARE_CONTIGUOUS" in options_on(Gpu(132, (9, 0)), _flex.one_batch_axis(call), lengths, HEAD_DIM):
        assert_contiguous(mask.kv_num_blocks, mask.kv_indices)
        if mask.full_kv_num_blocks is not None:
            assert_contiguous(mask.full_kv_num_blocks, mask.full_kv_indices)
    bias, attends = call.bias()
    scores = (call.scale * query @ key.repeat_interleave(HEADS // KV_HEADS, dim=1).mT + bias).double()
    allowed = torch.isfinite(bias) & (attends if attends is not None else torch.tensor(True))
    assert not (weighed & ~allowed).any()
    assert not (allowed & inside & ~weighed).any()
    left_out = torch.where(allowed & ~inside, torch.softmax(scores, dim=-1), 0.0).sum(dim=-1)
    assert left_out.max() <= (2.0**-24 if call.tolerance is None else call.tolerance)


def test_the_mask_skips_blocks_and_knows_whole_ones() -> None:
    query, key, value = tensors((1000, 1000))
    partial, full = visited(plan(check(query, key, value), query, key))
    assert partial.any(dim=-1).all()
    assert full.any()
    far = torch.ones(8, 8).tril(-3).bool()
    assert not (partial | full)[:, 0][:, far].any()  # slope 1
    assert (partial | full)[:, 2][:, far].all()  # slope 0
    # A tolerance of 0 turns the horizon off.
    partial, full = visited(plan(check(query, key, value, tolerance=0.0), query, key))
    assert torch.equal((partial | full).expand(BATCH, HEADS, 8, 8), torch.ones(BATCH, HEADS, 8, 8).tril().bool())
    assert torch.equal(partial[0, 0], torch.eye(8).bool())


def test_an_outlier_far_away_is_visited() -> None:
    query, key, value = tensors((1000, 1000))
    outlier = key.clone()
    outlier[:, :, 5] = 300 * query[:, ::2, 900]
    expected = reference([query, outlier, value])
    assert expected["result"][0, 0, 900].sub(value[0, 0, 5]).abs().max() < 0.1  # it matters
    partial, full = visited(plan(check(query, outlier, value), query, outlier))
    assert (partial | full)[:, ::2, 7, 0].all()


@pytest.mark.parametrize(("lengths", "arguments"), TABLE)
def test_planning_reads_nothing_from_the_device(lengths: tuple[int, int], arguments: dict[str, Any]) -> None:
    class NoTransfers(TorchFunctionMode):
        """Refuse what makes a GPU's host wait though the meta device lets it pass: a number sent over as a tensor."""

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            assert func not in (torch.tensor, torch.asarray, torch.as_tensor), f"{func.__name__}{args}"
            return func(*args, **(kwargs or {}))

    query, key, value = (x.to("meta") for x in tensors(lengths))
    arguments = {"slopes": SLOPES} | arguments
    call = check(query, key, value, **moved(arguments, "meta"))
    with NoTransfers():
        assert plan(call, query, key).kv_indices.device.type == "meta"


@pytest.mark.parametrize("is_causal", [True, False])
def test_what_the_plan_works_out_is_used_seldom(is_causal: bool) -> None:
    # PyTorch's compiler for GPUs works out the arguments of small operations anew for each use: once it took a minute.
    query, key, value = tensors((1000, 1000))
    call = check(query, key, value, is_causal=is_causal, tolerance=0.0)

    def lists(query: torch.Tensor, key: torch.Tensor) -> list[torch.Tensor]:
        mask = plan(call, query, key)
        return [mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices]

    works: dict[Any, int] = {}
    for node in make_fx(lists)(query, key).graph.nodes:
        used: list[Any] = []
        torch.fx.map_arg((node.args, node.kwargs), used.append)
        works[node] = 1 + sum(works[each] for each in used)
    assert max(works.values()) < 20_000


def moved(arguments: dict[str, Any], device: str) -> dict[str, Any]:
    def move(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(move(x) for x in value)
        return value.to(device) if isinstance(value, torch.Tensor) else value

    return {name: move(value) for name, value in arguments.items()}


# --- What the kernels are given, by an emulation of them -----------------------------------------------------------


@pytest.mark.usefixtures("kernel_with_gradients")
@pytest.mark.parametrize(("lengths", "arguments"), first_of(TABLE, keep=10))
def test_gradients_of_what_the_kernels_are_given(lengths: tuple[int, int], arguments: dict[str, Any]) -> None:
    inputs = tensors(lengths)
    cotangent = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(1))
    assert_near(
        differentiated(inputs, cotangent, **arguments), reference(inputs, cotangent, **arguments), roundoff=5e-5
    )


@pytest.mark.usefixtures("kernel_with_gradients")
def test_only_slopes_may_learn() -> None:
    inputs, slopes = tensors((140, 140)), SLOPES.clone().requires_grad_()
    result = flex_attention(check(*inputs, slopes), *inputs)
    (gradient,) = torch.autograd.grad(result.square().sum(), slopes)
    expected = reference(inputs, 2 * result.detach())
    assert_near({"result": result.detach(), "slopes": gradient}, {k: expected[k] for k in ("result", "slopes")}, 2e-5)


class Once(torch.autograd.Function):
    """A result whose gradients refuse to be differentiated, as those of FlexAttention do."""

    @staticmethod
    def forward(ctx: Any, result: torch.Tensor) -> torch.Tensor:
        return result.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


@pytest.mark.parametrize("wanted", [range(5), (0, 1, 2), (3,)], ids=["all", "tensors", "slopes"])
def test_second_derivatives_are_those_of_attention_spelled_out(
    wanted: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def once(*tensors: torch.Tensor, **options: Any) -> Any:
        result = emulated(*tensors, **options)
        return Once.apply(result) if isinstance(result, torch.Tensor) else (Once.apply(result[0]), result[1])

    monkeypatch.setattr(_flex, "_kernel", lambda *_: once)
    values = [*tensors((70, 70)), SLOPES, FUTURE]
    rules = {"is_causal": False, "mask": torch.arange(70) % 7 > 1, "q_offset": torch.tensor([3, -2])}

    def found(attend: Callable[..., torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
        """Return gradients, and those of a function of gradients, also by what the first are taken along."""
        leaves = [x.to(dtype, copy=True).requires_grad_(i in wanted) for i, x in enumerate(values)]
        cotangent = torch.randn(values[0].shape, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
        moved = [leaves[i] for i in wanted]
        call = check(*leaves[:4], future_slopes=leaves[4], **rules)
        first = torch.autograd.grad(attend(call, *leaves[:3]), moved, cotangent, create_graph=True)
        penalty = sum(x.square().sum() for x in first)
        return [*first, *torch.autograd.grad(penalty, [*moved, cotangent])]

    exact = found(dense_attention, torch.float64)
    for one, other in zip(found(flex_attention, torch.float32), exact, strict=True):
        assert (one - other).abs().max() <= 5e-5 * max(1.0, other.abs().max().item())


@pytest.mark.usefixtures("kernel_with_gradients")
@pytest.mark.parametrize("batch", [(), (2, 3)])
def test_any_number_of_batch_axes(batch: tuple[int, ...]) -> None:
    inputs = tensors((140, 140), batch=batch)
    arguments: dict[str, Any] = {"q_offset": 0, "slopes": SLOPES.expand(*batch, HEADS)}
    if batch:
        arguments |= {
            "q_offset": torch.arange(6).reshape(2, 3),
            "segment_ids": torch.arange(140).reshape(1, 1, 140) // torch.tensor([[[50]], [[70]]]),
            "mask": torch.arange(140) % torch.tensor([3, 4, 5])[:, None, None, None] > 0,
        }
    result = flex_attention(check(*inputs, **arguments), *inputs)
    assert_near({"result": result}, reference(inputs, **arguments), roundoff=4e-6)


@pytest.mark.usefixtures("kernel_with_gradients")
def test_distances_are_exact_at_any_position() -> None:
    far = 2**24 + 299  # float32 holds no odd number beyond 2**24
    query, key = torch.zeros(1, 1, 1, 16), torch.zeros(1).expand(1, 1, far + 1, 16)
    call = _flex.one_batch_axis(check(query, key, key, torch.ones(1)))
    bias = _flex.mods(call, 0, 0)[0]["bias"]
    zero = torch.tensor(0)
    for distance in range(4):
        assert bias(torch.tensor(0.0), zero, zero, zero, torch.tensor(far - distance)) == -distance


@pytest.mark.parametrize(("lengths", "whole"), [((256, 512), True), ((256, 500), False), ((1, 512), False)])
def test_only_whole_blocks_are_read_unchecked(lengths: tuple[int, int], whole: bool) -> None:
    call = _flex.one_batch_axis(check(*tensors(lengths)))
    assert options_on(Gpu(132, (9, 0)), call, lengths, HEAD_DIM).get("IS_DIVISIBLE", False) == whole


@pytest.mark.parametrize(("batch", "heads", "parts"), [(1, 32, 33), (2, 4, 132), (64, 32, 1)])
def test_the_keys_of_few_queries_are_divided_evenly(batch: int, heads: int, parts: int) -> None:
    query, key = torch.zeros(1).expand(batch, heads, 1, 16), torch.zeros(1).expand(batch, heads, 500, 16)
    call = check(query, key, key, heads)
    assert options_on(Gpu(132, (9, 0)), call, (1, 500), 16)["SPLIT_KV"] == parts
    # The kernel divides the needed keys where no blocks are known to be whole, else all keys.
    assert plan(call, query[:1], key[:1]).full_kv_num_blocks is None


def test_the_host_leaves_a_gpu_to_compiled_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside what is compiled, plan included, a call is no operation that a GPU would have to be asked for."""
    compiled = []

    class Operations(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace != "prim" and func not in VIEWS:
                operations.append(func)
            return func(*args, **(kwargs or {}))

    def attend(call: AttentionCall, query: torch.Tensor, *_: Any) -> torch.Tensor:
        compiled.append(call)
        return query.view_as(query)

    monkeypatch.setattr(_flex, "_whole", lambda *_: attend)
    monkeypatch.setattr("alibi_torch._flex.blocks._gpu", lambda _: Gpu(132, (9, 0)))
    operations: list[Any] = []
    with FakeTensorMode():
        inputs = [torch.empty(1, 4, 4096, 64, device="cuda") for _ in range(3)]
        slopes = torch.empty(4, device="cuda")
        with Operations():
            result = alibi_torch.attention(*inputs, slopes)
    assert result.device.type == "cuda"
    assert len(compiled) == 1
    assert not operations


@pytest.mark.usefixtures("kernel_with_gradients")
def test_where_the_compiler_fails_on_the_plan_the_kernel_is_compiled_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> None:
        raise torch._dynamo.exc.BackendCompilerFailed(failing, RuntimeError("PassManager::run failed"), None)

    monkeypatch.setattr(_flex, "compiles_plans", lambda _: True)
    monkeypatch.setattr(_flex, "_compiled", lambda *_: failing)
    _flex._whole.cache_clear()
    inputs = tensors((140, 140))
    call = check(*inputs)
    with pytest.warns(RuntimeWarning, match=r"failed on the plan .*PassManager"):
        first = flex_attention(call, *inputs)
    assert torch.equal(flex_attention(call, *inputs), first)  # without another attempt, and its warning
    _flex._whole.cache_clear()
    assert_near({"result": first}, reference(inputs), roundoff=4e-6)


def test_a_few_blocks_on_a_gpu_are_all_visited() -> None:
    with FakeTensorMode():
        calls = [check(*torch.empty(3, 1, 4, n, 16, device="cuda").unbind(), 4) for n in (2048, 4096)]
    assert [are_few(call) for call in calls] == [True, False]
    assert not are_few(check(*tensors((5, 5))))


# --- The compiled kernel -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", first_of(COMPILED))
def test_the_compiled_kernel_is_exact_to_rounding(name: str) -> None:
    lengths, arguments = CASES[name]
    inputs = tensors(lengths)
    result = flex_attention(check(*inputs, **arguments), *inputs)
    assert_near({"result": result}, reference(inputs, **arguments), roundoff=4e-6)
    attends = check(*inputs, **arguments).bias()[1]
    if attends is not None:
        assert (torch.where(attends, 0.0, result) == 0).all()


@pytest.mark.parametrize("head_dim", first_of([16, 8]))
def test_nothing_is_read_past_the_keys(head_dim: int) -> None:
    """The CPU's kernel for narrow heads takes sixteen keys at once, also of those that follow the last one."""
    query, key, value = tensors((40, 40), head_dim=head_dim)
    store = torch.full((2 * key.numel(),), float("nan"))
    store[: key.numel()] = key.flatten()
    result = flex_attention(check(query, key, value), query, store[: key.numel()].view(key.shape), value)
    assert_near({"result": result}, reference([query, key, value]), roundoff=4e-6)


@pytest.mark.full
def test_a_tolerance_is_kept_to() -> None:
    inputs = [0.5 * x for x in tensors((1000, 1000))]
    slopes = torch.full([HEADS], 0.05)
    calls = [check(*inputs, slopes, tolerance=t) for t in (2.0**-24, 0.01)]
    every, some = (sum(map(torch.Tensor.sum, visited(plan(call, *inputs[:2])))) for call in calls)
    assert some < every
    near = flex_attention(calls[1], *inputs)
    exact = reference(inputs, slopes=slopes)["result"]
    assert (near - exact).abs().max() <= 2 * 0.01 * inputs[2].abs().max() + 4e-6


@pytest.mark.full
def test_varying_lengths_share_a_kernel() -> None:
    torch._dynamo.reset()
    _flex._compiled.cache_clear()
    lengths = [(n, n) for n in (130, 300, 411, 512)]
    compilations = []
    for sizes in lengths:
        inputs = tensors(sizes, heads=(2, 2), head_dim=32)  # keys of narrow heads are padded, on a CPU, or are not
        torch._dynamo.utils.counters.clear()
        result = flex_attention(check(*inputs, SLOPES[:2]), *inputs)
        compilations.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        assert_near({"result": result}, reference(inputs, slopes=SLOPES[:2]), roundoff=4e-6)
    assert sum(compilations) <= 2


@pytest.mark.full
def test_it_is_traced_into_what_the_caller_compiles_for_all_lengths_at_once() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    # Inductor takes most of a minute over the C++ of the plan.
    function = torch.compile(lambda *x: 2 * flex_attention(check(*x), *x), fullgraph=True, backend="aot_eager")
    for length in (140, 300, 411):
        inputs = tensors((length, length))
        assert_near({"result": function(*inputs) / 2}, reference(inputs), roundoff=4e-6)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


@pytest.mark.full
@pytest.mark.parametrize("is_whole", [False, True], ids=["by the caller", "by the library"])
@pytest.mark.parametrize("name", ["scale", "offset by batch", "segments by batch", "asymmetric"])
def test_plan_and_gradients_are_compiled_with_the_kernel(
    name: str, is_whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)  # refuses them on a CPU
    monkeypatch.setattr(_flex, "_stored", lambda tensor: tensor)  # of the template for CPUs
    torch._dynamo.reset()
    lengths, arguments = CASES[name]
    inputs = tensors(lengths)
    cotangent = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(1))
    compiler = functools.partial(torch.compile, fullgraph=True, backend="aot_eager")
    if is_whole:  # as on a GPU
        monkeypatch.setattr(_flex, "compiles_plans", lambda _: True)
        monkeypatch.setattr(torch, "compile", lambda function, fullgraph: compiler(function))
        for cache in (_flex._compiled, _flex._whole):
            cache.cache_clear()
        actual = differentiated(inputs, cotangent, **arguments)
        for cache in (_flex._compiled, _flex._whole):
            cache.cache_clear()
    else:
        actual = differentiated(inputs, cotangent, compiler, **arguments)
    assert_near(actual, reference(inputs, cotangent, **arguments), roundoff=5e-5)


# --- What it refuses -----------------------------------------------------------------------------------------------


def test_what_the_kernels_cannot_do_is_refused() -> None:
    inputs = tensors((5, 5))
    for changed in (0, 3):
        arguments = [*inputs, SLOPES]
        arguments[changed] = arguments[changed].clone().requires_grad_()
        with pytest.raises(NotImplementedError, match="no gradients on a CPU; 'tiled' and 'sdpa' and 'dense' can run"):
            alibi_torch.attention(*arguments, implementation="flex")
    for dtype, device, message in ((torch.float64, "cpu", "got torch.float64"), (torch.float32, "meta", "got meta")):
        arguments = [x.to(device, dtype) for x in inputs]
        with pytest.raises(NotImplementedError, match=message + "; 'tiled' and 'sdpa' and 'dense' can run"):
            alibi_torch.attention(*arguments, implementation="flex")


def test_mapping_is_refused() -> None:
    with pytest.raises(NotImplementedError, match=r"by torch\.func; 'tiled' and 'sdpa' and 'dense' can run this call"):
        torch.func.vmap(lambda *x: alibi_torch.attention(*x, implementation="flex"))(*tensors((5, 5)))


# --- CUDA ----------------------------------------------------------------------------------------------------------

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")


def assert_cuda_agrees(lengths: tuple[int, int], roundoff: float, arguments: dict[str, Any], **sizes: Any) -> None:
    inputs = [x.cuda() for x in tensors(lengths, **sizes)]
    cotangent = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(1)).to(inputs[0])
    expected = reference(inputs, cotangent, **arguments)
    arguments = moved({"slopes": SLOPES} | arguments, "cuda")
    assert_near(differentiated(inputs, cotangent, **arguments), expected, roundoff)
    # By other kernels: without padding, and by that for few queries.
    result = flex_attention(check(*inputs, **arguments), *inputs)
    assert_near({"result": result}, {"result": expected["result"]}, roundoff)


@pytest.mark.cuda
@CUDA
@pytest.mark.parametrize(("lengths", "arguments"), TABLE)
def test_cuda_gives_the_result_and_its_gradients(lengths: tuple[int, int], arguments: dict[str, Any]) -> None:
    assert_cuda_agrees(lengths, 5e-5, arguments)


@pytest.mark.cuda
@CUDA
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["1000", "decoding", "asymmetric", "far offset", "mask by head"])
def test_cuda_does_so_in_low_precision(name: str, dtype: torch.dtype) -> None:
    lengths, arguments = CASES[name]
    assert_cuda_agrees(lengths, 16 * torch.finfo(dtype).eps, arguments, dtype=dtype)


@pytest.mark.cuda
@CUDA
@pytest.mark.parametrize(("heads", "head_dim"), [((4, 4), 64), ((6, 2), 5), ((4, 1), 80), ((4, 2), 128)])
@pytest.mark.parametrize("lengths", [(200, 200), (1, 500)])
def test_cuda_takes_any_heads(heads: tuple[int, int], head_dim: int, lengths: tuple[int, int]) -> None:
    slopes = torch.rand(heads[0], generator=torch.Generator().manual_seed(0))
    assert_cuda_agrees(lengths, 5e-5, {"slopes": slopes}, heads=heads, head_dim=head_dim)


@pytest.mark.cuda
@CUDA
@pytest.mark.parametrize("name", ["1000", "offset by batch", "segments", "pair of segments", "mask by head"])
def test_cuda_is_never_waited_for(name: str) -> None:
    lengths, arguments = CASES[name]
    inputs = [x.cuda().requires_grad_() for x in tensors(lengths, dtype=torch.bfloat16)]
    slopes = SLOPES.cuda().requires_grad_()
    arguments = moved(arguments, "cuda")

    def step() -> None:
        flex_attention(check(*inputs, slopes, **arguments), *inputs).sum().backward()

    step()  # which compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.cuda
@CUDA
def test_cuda_is_not_waited_for_to_take_slopes() -> None:
    inputs = [x.cuda() for x in tensors((300, 300), dtype=torch.bfloat16)]
    expected = alibi_torch.attention(*inputs)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = alibi_torch.attention(*inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(result, expected)


@pytest.mark.cuda
@CUDA
def test_cuda_trains_within_what_the_caller_compiles() -> None:
    torch._dynamo.reset()
    inputs = [x.cuda().requires_grad_() for x in tensors((200, 200))]
    slopes = SLOPES.cuda().requires_grad_()

    def function(slopes: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        return flex_attention(check(*inputs, slopes), *inputs)

    result = torch.compile(function, fullgraph=True)(slopes, *inputs)
    names = ("query", "key", "value", "slopes")
    gradients = torch.autograd.grad(result.sum(), [*inputs, slopes])
    actual = {"result": result.detach(), **dict(zip(names, gradients, strict=True))}
    assert_near(actual, reference(inputs, torch.ones_like(result)), roundoff=2e-5)
