"""FlexAttention: its block masks, the functions it is given, and all of it on CUDA.

On a CPU, which has no gradients of FlexAttention, an emulation of the kernels stands in its place.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import assume, example, given, settings

torch = pytest.importorskip("torch")

import array_api_compat.torch as xp  # noqa: E402
from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402
from torch.nn.attention.flex_attention import AuxOutput, BlockMask  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402

import alibi_torch  # noqa: E402
from alibi_core.backend import AttentionCall  # noqa: E402
from tests.support.frameworks import CUDA, TORCH, Backend  # noqa: E402
from tests.support.problems import Problem  # noqa: E402
from tests.test_same_answer_everywhere import assert_exact, is_plain, problems  # noqa: E402

# PyTorch's compiler asks each tensor for that, and hides this warning where it is no error.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")

BLOCK, BATCH, HEADS, KV_HEADS, HEAD_DIM = 128, 2, 4, 2, 16
SLOPES = torch.tensor([1.0, 0.25, 0.0, 2.0**-8])
FUTURE = torch.tensor([0.5, 0.0, 0.125, 1.0])
FLEX = Backend(TORCH, "alibi_torch", "flex")
# Of one block and of several, with and without a rest.
LENGTHS = ((1, 1), (5, 300), (1, 700), (128, 128), (129, 129), (257, 257), (300, 140), (140, 400), (500, 500))
NAMED = {
    "1000": Problem((1000, 1000), head_dim=16),
    "1024": Problem((1024, 1024), head_dim=16),
    "one query before all keys": Problem((1, 1), q_offset=-3, is_causal=False, head_dim=16),
    "offset by batch": Problem((140, 300), q_offset="per entry", head_dim=16),
    "mask by key": Problem((200, 300), mask="b11k", is_causal=False, head_dim=16),
    "mask by head": Problem((200, 200), mask="hqk", is_causal=False, head_dim=16),
    "segments by batch": Problem((300, 300), segments="one", head_dim=16),
    "pair of segments": Problem((140, 300), segments="pair", is_causal=False, head_dim=16),
}


def taken(problem: Problem, dtype: str | None = "float32") -> Problem:
    """Return a problem as near to this one as FlexAttention takes."""
    changes: dict[str, Any] = {"dtype": dtype or problem.dtype.replace("float64", "float32")}
    changes |= dict.fromkeys(("gates", "sinks", "tiling"))
    changes |= dict.fromkeys(("adds_bias", "returns_weights"), False)
    if "far" in (problem.points or ""):  # the box around all keys, far and near, says how near a visible one is
        changes["points"] = None
    changes["wrt"] = tuple(x for x in problem.wrt if x not in ("log_gates", "sinks"))
    return dataclasses.replace(problem, **changes)


ALL = ("query", "key", "value", "slopes")
CORNERS = (
    Problem((500, 500), window_size=130, wrt=ALL),
    Problem((400, 500), window_size=200, is_causal=False, wrt=ALL),
    Problem((200, 300), q_offset=126, slopes="per entry", wrt=ALL),  # one token short of a whole block of keys
    Problem((300, 200), q_offset=-150, is_causal=False, future="shared", wrt=(*ALL, "future_slopes")),
    Problem((5, 300), q_offset=1000, is_causal=False),
    Problem((300, 300), mask="bhqk", wrt=("key",)),
    Problem((300, 300), segments="one", window_size=140, wrt=ALL),
    Problem((700, 700), (2,), (2, 2), data="opposed"),
)


def drawn(test: Any) -> Any:
    """Try problems of several blocks, and then draw others."""
    test = given(problem=problems(LENGTHS).map(taken))(test)
    return functools.reduce(lambda test, problem: example(problem=problem)(test), CORNERS, test)


def tensors(lengths: tuple[int, int]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(lengths))
    shapes = [
        (n, length, HEAD_DIM) for n, length in zip((HEADS, KV_HEADS, KV_HEADS), (*lengths, lengths[1]), strict=True)
    ]
    return [torch.randn((BATCH, *shape), generator=generator) for shape in shapes]


def attend(*inputs: torch.Tensor, **arguments: Any) -> torch.Tensor:
    names = ("query", "key", "value", "slopes", "future_slopes")
    given = {"slopes": SLOPES, "implementation": "flex"} | dict(zip(names, inputs, strict=False)) | arguments
    return alibi_torch.attention(**given)


def arguments_of(problem: Problem, device: str = "cpu") -> dict[str, Any]:
    """Return the arguments of attention in float32 or in their own dtype, tensors on a device."""

    def moved(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(moved, value))
        return value.to(device) if isinstance(value, torch.Tensor) else value

    arrays = {"slopes": None}
    arrays |= {name: TORCH.array(x) for name, x in problem.arrays.items() if name != "cotangent"}
    return {name: moved(x) for name, x in (arrays | TORCH.placed(problem.arguments)).items()}


def listed(counts: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Return which blocks the first ``counts`` entries of each list name: ``[..., rows, columns]``."""
    result = torch.zeros(indices.shape, dtype=torch.bool)
    for index in itertools.product(*map(range, indices.shape[:-1])):
        chosen = indices[index][: int(counts[index])].tolist()
        assert len(set(chosen)) == len(chosen), "a block is visited twice"
        result[index][chosen] = True
    return result


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
    kernel_options: dict[str, Any],
    return_aux: object = None,
) -> Any:
    """Return what FlexAttention does with its arguments, by operations that are differentiable on the CPU."""
    group = query.shape[1] // key.shape[1]
    assert enable_gqa == (group > 1)
    key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
    assert (query.shape[2], key.shape[2]) == block_mask.seq_lengths
    assert_ranges(block_mask, kernel_options)
    if query.requires_grad:
        assert block_mask.q_indices is not None  # FlexAttention demands it
    axes = torch.meshgrid(*map(torch.arange, (*query.shape[:3], key.shape[2])), indexing="ij")
    is_visible, _ = visible(block_mask, *query.shape[:2])
    scores = torch.where(is_visible, score_mod(query @ key.mT * scale, *axes), -torch.inf)
    attends = is_visible.any(dim=-1, keepdim=True)
    weights = torch.where(is_visible, torch.softmax(torch.where(attends, scores, 0.0), dim=-1), 0.0)
    # Where every visible key is weighed by a distance of 0, softmax knows no answer; the kernels give zeros.
    result = torch.where(torch.isfinite(weights), weights, 0.0) @ value
    return result if return_aux is None else (result, AuxOutput(lse=scores.detach().logsumexp(dim=-1)))


def assert_ranges(mask: BlockMask, kernel_options: dict[str, Any]) -> None:
    """Assert that each list of blocks is a range, if the kernel is told so."""
    lists = (mask.kv_num_blocks, mask.kv_indices), (mask.full_kv_num_blocks, mask.full_kv_indices)
    for counts, indices in lists if kernel_options["fwd_BLOCKS_ARE_CONTIGUOUS"] else ():
        if counts is not None and not counts.is_meta:
            is_next = indices[..., 1:] == indices[..., :-1] + 1
            assert (is_next | (torch.arange(1, indices.shape[-1]) >= counts[..., None])).all()


KERNEL = "torch.nn.attention.flex_attention.flex_attention"


@pytest.fixture
def on_any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let FlexAttention be called where it is refused, as the interpreter of a TPU's kernel is: on a CPU, on meta."""
    monkeypatch.setattr("alibi_torch._dispatch.refusal", lambda *_: None)


@pytest.fixture
def emulation(on_any_device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an emulation that has gradients stand in the place of FlexAttention, which has none on a CPU."""
    monkeypatch.setattr(KERNEL, emulated)


@pytest.fixture
def planned(on_any_device: None, monkeypatch: pytest.MonkeyPatch) -> Callable[..., BlockMask]:
    """Return a function from a call's arguments to the block mask that FlexAttention is given."""
    masks: list[BlockMask] = []

    def kernel(
        query: torch.Tensor, *_: Any, block_mask: BlockMask, kernel_options: dict[str, Any], **__: Any
    ) -> torch.Tensor:
        assert_ranges(block_mask, kernel_options)
        masks.append(block_mask)
        return query

    def mask_of(*inputs: torch.Tensor, **arguments: Any) -> BlockMask:
        attend(*inputs, **arguments)
        return masks.pop()

    monkeypatch.setattr(KERNEL, kernel)
    return mask_of


# --- The block mask ------------------------------------------------------------------------------------------------


@drawn
def test_the_mask_leaves_out_what_weighs_nothing_and_nothing_else(
    planned: Callable[..., BlockMask], problem: Problem
) -> None:
    problem = dataclasses.replace(problem, batch=(BATCH,), knows_norms=False)
    assume(is_plain(problem))
    given = arguments_of(problem)
    weighed, inside = visible(planned(**given), BATCH, problem.num_heads)
    call = AttentionCall.check(**given, xp=xp)
    bias, attends = call.bias()
    query, key = (given[name].double() for name in ("query", "key"))
    scores = call.scale * query @ key.repeat_interleave(problem.heads[1], dim=1).mT + bias
    allowed = torch.isfinite(bias) & (attends if attends is not None else torch.tensor(True))
    assert not (weighed & ~allowed).any()
    assert not (allowed & inside & ~weighed).any()
    left_out = torch.where(allowed & ~inside, torch.softmax(scores, dim=-1), 0.0).sum(dim=-1)
    assert left_out.max() <= (2.0**-24 if call.tolerance is None else call.tolerance)


def test_the_mask_skips_blocks_and_knows_whole_ones(planned: Callable[..., BlockMask]) -> None:
    query, key, value = tensors((1000, 1000))
    partial, full = visited(planned(query, key, value))
    assert partial.any(dim=-1).all()
    assert full.any()
    far = torch.ones(8, 8).tril(-3).bool()
    assert not (partial | full)[:, 0][:, far].any()  # slope 1
    assert (partial | full)[:, 2][:, far].all()  # slope 0
    # A tolerance of 0 turns the horizon off.
    partial, full = visited(planned(query, key, value, tolerance=0.0))
    assert torch.equal((partial | full).expand(BATCH, HEADS, 8, 8), torch.ones(BATCH, HEADS, 8, 8).tril().bool())
    assert torch.equal(partial[0, 0], torch.eye(8).bool())
    # A key far away that matters is visited.
    key[:, :, 5] = 300 * query[:, ::2, 900]
    partial, full = visited(planned(query, key, value))
    assert (partial | full)[:, ::2, 7, 0].all()


@drawn
def test_planning_reads_nothing_from_the_device(planned: Callable[..., BlockMask], problem: Problem) -> None:
    class NoTransfers(TorchFunctionMode):
        """Refuse what makes a GPU's host wait though the meta device lets it pass: a number sent over as a tensor."""

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            assert func not in (torch.tensor, torch.asarray, torch.as_tensor), f"{func.__name__}{args}"
            return func(*args, **(kwargs or {}))

    assume(problem.batch != (0,) and problem.slopes != "default")  # these are sent over once
    given = arguments_of(problem, "meta")
    with NoTransfers():
        assert planned(**given).kv_indices.device.type == "meta"


# --- What the kernels are given ------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@drawn
def test_flex_attention_itself_takes_the_mask_and_the_functions(problem: Problem) -> None:
    assert_exact(FLEX, dataclasses.replace(problem, wrt=()))


@pytest.mark.usefixtures("emulation")
@drawn
def test_gradients_of_what_the_kernels_are_given(problem: Problem) -> None:
    assert_exact(FLEX, problem)


class Once(torch.autograd.Function):
    """A result whose gradients refuse to be differentiated, as those of FlexAttention do."""

    @staticmethod
    def forward(ctx: Any, result: torch.Tensor) -> torch.Tensor:
        return result.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


@pytest.mark.usefixtures("emulation")
@pytest.mark.parametrize("wanted", [range(5), (0, 1, 2), (3,)], ids=["all", "tensors", "slopes"])
def test_second_derivatives_are_those_of_attention_spelled_out(
    wanted: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def once(*tensors: torch.Tensor, **options: Any) -> Any:
        result = emulated(*tensors, **options)
        return Once.apply(result) if isinstance(result, torch.Tensor) else (Once.apply(result[0]), result[1])

    monkeypatch.setattr(KERNEL, once)
    values = [*tensors((70, 70)), SLOPES, FUTURE]
    rules = {"is_causal": False, "mask": torch.arange(70) % 7 > 1, "q_offset": torch.tensor([3, -2])}

    def found(implementation: str, dtype: torch.dtype) -> list[torch.Tensor]:
        """Return gradients, and those of a function of gradients, also by what the first are taken along."""
        leaves = [x.to(dtype, copy=True).requires_grad_(i in wanted) for i, x in enumerate(values)]
        cotangent = torch.randn(values[0].shape, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
        moved = [leaves[i] for i in wanted]
        result = attend(*leaves, **rules, implementation=implementation)
        first = torch.autograd.grad(result, moved, cotangent, create_graph=True)
        penalty = sum(x.square().sum() for x in first)
        return [*first, *torch.autograd.grad(penalty, [*moved, cotangent])]

    for one, other in zip(found("flex", torch.float32), found("dense", torch.float64), strict=True):
        assert (one - other).abs().max() <= 5e-5 * max(1.0, other.abs().max().item())


def test_distances_are_exact_at_any_position(monkeypatch: pytest.MonkeyPatch) -> None:
    far, zero, found = 2**24 + 299, torch.tensor(0), []  # float32 holds no odd number beyond 2**24

    def kernel(query: torch.Tensor, *_: Any, score_mod: Callable[..., torch.Tensor], **__: Any) -> torch.Tensor:
        found.extend(score_mod(torch.tensor(0.0), zero, zero, zero, torch.tensor(far - x)) for x in range(4))
        return query

    monkeypatch.setattr(KERNEL, kernel)
    key = torch.zeros(1).expand(1, 1, far + 1, 16)
    attend(torch.zeros(1, 1, 1, 16), key, key, torch.ones(1), tolerance=0.0)
    assert found == [0, -1, -2, -3]


@pytest.mark.slow
@settings(max_examples=6)
@drawn
def test_plan_and_gradients_are_traced_into_what_the_caller_compiles(
    on_any_device: None, monkeypatch: pytest.MonkeyPatch, problem: Problem
) -> None:
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    assert_exact(FLEX, problem, is_compiled=True)


@pytest.mark.slow
def test_what_the_caller_compiles_serves_other_lengths(on_any_device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    torch.compiler.reset()
    function = functools.partial(attend, slopes=None)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for length in (140, 300):
        inputs = [x.requires_grad_() for x in tensors((length, length))]
        losses = [compiled(*inputs).square().sum(), function(*inputs, implementation="dense").square().sum()]
        for one, other in zip(*(torch.autograd.grad(x, inputs) for x in losses), strict=True):
            assert (one - other).abs().max() <= 5e-5 * other.abs().max()


# --- Compiled as on a GPU ------------------------------------------------------------------------------------------


def forget() -> None:
    """Forget compiled calls, or a compiler would count those of many problems as one that is compiled too often."""
    pkgutil.resolve_name("alibi_torch._flex.kernels:_compiled").cache_clear()
    torch.compiler.reset()


@pytest.fixture
def compiled_here(
    request: pytest.FixtureRequest, on_any_device: None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[CompileCounterWithBackend]:
    """Let calls on a CPU be compiled as on a GPU, by a compiler that leaves operators as they are; it counts graphs."""
    counter = CompileCounterWithBackend(getattr(request, "param", "aot_eager"))
    monkeypatch.setattr("alibi_torch._flex.kernels.COMPILED_ON", ("cpu",))
    monkeypatch.setattr("torch.compile", functools.partial(torch.compile, backend=counter))
    forget()
    yield counter
    forget()


@pytest.mark.parametrize("compiled_here", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)], indirect=True)
def test_a_call_is_compiled_once_for_all_lengths(
    compiled_here: CompileCounterWithBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    for graphs, all_lengths in ((1, ((300, 300), (301, 301))), (2, ((1, 300), (1, 301)))):
        for lengths in all_lengths:
            assert_exact(FLEX, Problem(lengths))
        assert compiled_here.frame_count == graphs
    monkeypatch.setattr("alibi_torch._internals._found", lambda name: None)  # a PyTorch without its private names
    assert_exact(FLEX, Problem((302, 302)))


@pytest.mark.slow
def test_a_compiled_call_keeps_no_number_of_an_earlier_one(compiled_here: CompileCounterWithBackend) -> None:
    for numbers in ({"scale": 0.5}, {"scale": 0.25}, {"q_offset": 3}, {"q_offset": 40}, {"window_size": 90}):
        for batch in (2, 3):
            assert_exact(FLEX, Problem((200, 300), (batch,), **numbers))
    for heads, head_dim in (((4, 1), 16), ((1, 4), 16), ((2, 2), 1), ((2, 2), 5)):
        assert_exact(FLEX, Problem((200, 200), heads=heads, head_dim=head_dim))


@pytest.mark.slow
@drawn
def test_compiled_calls_give_the_result(compiled_here: CompileCounterWithBackend, problem: Problem) -> None:
    forget()
    assert_exact(FLEX, dataclasses.replace(problem, wrt=()))


# --- What it refuses -----------------------------------------------------------------------------------------------


def test_calls_that_the_kernels_cannot_compute_are_refused() -> None:
    inputs = tensors((5, 5))
    for changed in (0, 3):
        arguments = [*inputs, SLOPES]
        arguments[changed] = arguments[changed].clone().requires_grad_()
        with pytest.raises(NotImplementedError, match="no gradients on a CPU; 'tiled' and 'sdpa' and 'dense' can run"):
            attend(*arguments)
    for dtype, device, message in ((torch.float64, "cpu", "got torch.float64"), (torch.float32, "meta", "got meta")):
        with pytest.raises(NotImplementedError, match=message + "; 'tiled' and 'sdpa' and 'dense' can run"):
            attend(*(x.to(device, dtype) for x in inputs), slopes=None)
    with pytest.raises(NotImplementedError, match=r"by torch\.func; 'tiled' and 'sdpa' and 'dense' can run this call"):
        torch.func.vmap(attend)(*inputs)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_kernel_options_are_those_of_flex_attention() -> None:
    inputs = tensors((5, 5))
    found = attend(*inputs, kernel_options={"PRESCALE_QK": False})
    assert torch.equal(found, attend(*inputs))
    with pytest.raises(ValueError, match="BACKEND value 'NONE'"):  # FlexAttention's own error
        attend(*inputs, kernel_options={"BACKEND": "NONE"})
    assert alibi_torch.explain(*inputs, implementation="flex", kernel_options={}).implementation == "flex"


# --- CUDA ----------------------------------------------------------------------------------------------------------

ON_CUDA = Backend(CUDA, "alibi_torch", "flex")
on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")


@pytest.mark.cuda
@on_cuda
@given(problem=problems(LENGTHS).map(functools.partial(taken, dtype=None)))
def test_cuda_gives_the_result_and_its_gradients(problem: Problem) -> None:
    # Without gradients by other kernels: without padding, and by one for few queries.
    for wrt in (problem.wrt, ()):
        assert_exact(ON_CUDA, dataclasses.replace(problem, wrt=wrt))


@pytest.mark.cuda
@on_cuda
@pytest.mark.parametrize(("heads", "head_dim"), [((4, 1), 64), ((2, 3), 5), ((1, 4), 80), ((2, 2), 128)])
@pytest.mark.parametrize("lengths", [(200, 200), (1, 500)])
def test_cuda_takes_any_heads(heads: tuple[int, int], head_dim: int, lengths: tuple[int, int]) -> None:
    for wrt in (("query", "key", "value", "slopes"), ()):
        assert_exact(ON_CUDA, Problem(lengths, heads=heads, head_dim=head_dim, wrt=wrt))


@pytest.mark.cuda
@on_cuda
@pytest.mark.parametrize("problem", [*NAMED.values()][::2], ids=[*NAMED][::2])
def test_cuda_is_never_waited_for(problem: Problem) -> None:
    given = arguments_of(problem, "cuda")
    inputs = {name: given.pop(name).bfloat16().requires_grad_() for name in ("query", "key", "value")}
    slopes = given.pop("slopes").requires_grad_()

    def step() -> None:
        attend(**inputs, **given, slopes=None)
        attend(**inputs, **given, slopes=slopes).sum().backward()

    step()  # which compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.cuda
@on_cuda
def test_cuda_trains_within_what_the_caller_compiles() -> None:
    assert_exact(ON_CUDA, Problem((200, 200), wrt=("query", "key", "value", "slopes")), is_compiled=True)
