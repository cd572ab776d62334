"""FlexAttention: its block masks, the functions it is given, and all of it on CUDA.

On a CPU, which has no gradients of FlexAttention, an emulation of the kernels stands in its place.
"""

from __future__ import annotations

import functools
import itertools
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import array_api_compat.torch as xp  # noqa: E402
from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402
from torch.nn.attention.flex_attention import AuxOutput, BlockMask  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402

import alibi_torch  # noqa: E402
from alibi_core.backend import AttentionCall  # noqa: E402

# PyTorch's compiler asks each tensor for that, and hides this warning where it is no error.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")

BLOCK, BATCH, HEADS, KV_HEADS, HEAD_DIM = 128, 2, 4, 2, 16
NAMES = ("query", "key", "value", "slopes", "future_slopes")
SLOPES = torch.tensor([1.0, 0.25, 0.0, 2.0**-8])
FUTURE = torch.tensor([0.5, 0.0, 0.125, 1.0])
PLACES = torch.randn(320, 2, generator=torch.Generator().manual_seed(0)) * 9
PLACES[3] = torch.nan  # a token without a position
PLACES[9, 1] = torch.nan  # and one that lacks a coordinate
PAIR = torch.arange(140) // 100, torch.arange(300) // 90  # segments of queries and keys
AHEAD = torch.arange(300) - torch.arange(300)[:, None]  # how far a key is ahead of a query

# Names, lengths (queries, keys) and arguments; tensors are made where they are used.
CASES: dict[str, tuple[tuple[int, int], dict[str, Any]]] = {
    "one token": ((1, 1), {}),
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
    "a few queries far away": ((5, 300), {"q_offset": 1000}),
    "one query before all keys": ((1, 1), {"q_offset": -3, "is_causal": False}),
    "far offset": ((140, 300), {"q_offset": 1_000_000}),
    "offset before the keys": ((300, 200), {"q_offset": -150, "is_causal": False, "future_slopes": FUTURE}),
    "offset by batch": ((140, 300), {"q_offset": torch.tensor([-20, 333])}),
    "symmetric offset by batch": ((140, 300), {"q_offset": torch.tensor([77, 400]), "is_causal": False}),
    "window": ((500, 500), {"window_size": 130}),
    "symmetric window": ((500, 600), {"window_size": 200, "is_causal": False}),
    "window of one": ((140, 140), {"window_size": 0}),
    "segments": ((400, 400), {"segment_ids": torch.arange(400) // 150}),
    "segments by batch": ((300, 300), {"segment_ids": (torch.arange(300) + torch.tensor([[0], [40]])) // 120}),
    "pair of segments": ((140, 300), {"segment_ids": PAIR, "is_causal": False}),
    "mask by key": ((200, 300), {"mask": (torch.arange(300) % 7 > 3)[None, None, None, :], "is_causal": False}),
    "mask by head": (
        (200, 200),
        {"mask": torch.arange(200) % torch.arange(3, 3 + HEADS)[:, None, None] > 0, "is_causal": False},
    ),
    "masked rows": ((140, 140), {"mask": torch.arange(140)[:, None] % 2 > torch.zeros(140)}),
    "hidden neighbours": (
        (300, 300),
        {"mask": (AHEAD <= -90) | (AHEAD >= 120), "is_causal": False, "future_slopes": FUTURE},
    ),
    "scale": ((140, 140), {"scale": -0.7}),
    "no horizon": ((300, 300), {"tolerance": 0.0}),
    "negative slopes": ((300, 300), {"slopes": SLOPES - 0.01, "allow_negative_slopes": True}),
    "slopes by batch": ((257, 257), {"slopes": SLOPES * torch.tensor([[1.0], [0.3]])}),
    "times": ((300, 300), {"positions": PLACES[:300, 0]}),
    "times after all keys": ((140, 300), {"positions": (torch.arange(140) + 10**7, torch.arange(300))}),
    "points beside all keys": (
        (140, 300),
        {"positions": (PLACES[10:150] // 1 + 2**20, PLACES[10:310] // 1), "distance": "manhattan", "is_causal": False},
    ),
    "law": ((257, 257), {"law": "log"}),
    "law far away": ((140, 300), {"law": "sqrt", "q_offset": 1000, "is_causal": False}),
    "asymmetric law": ((140, 300), {"law": "log", "is_causal": False, "future_slopes": FUTURE, "window_size": 100}),
    "points": ((257, 257), {"positions": PLACES[:257], "distance": "euclidean", "is_causal": False}),
    "points on squares": ((100, 100), {"positions": PLACES[:100], "distance": "chebyshev", "is_causal": False}),
    "points by batch": (
        (140, 300),
        {
            "positions": ((PLACES[10:290] * 5).int().reshape(2, 140, 2), (PLACES[20:] * 5).int()),
            "distance": "chebyshev",
            "law": "sqrt",
            "is_causal": False,
            "segment_ids": PAIR,
        },
    ),
    "1000": ((1000, 1000), {}),
    "1024": ((1024, 1024), {}),
}
TABLE = [pytest.param(*case, id=name) for name, case in CASES.items()]


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


def attend(*inputs: torch.Tensor, **arguments: Any) -> torch.Tensor:
    given = {"slopes": SLOPES, "implementation": "flex"} | dict(zip(NAMES, inputs, strict=False)) | arguments
    return alibi_torch.attention(**given)


def moved(arguments: dict[str, Any], device: str) -> dict[str, Any]:
    def move(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(move(x) for x in value)
        return value.to(device) if isinstance(value, torch.Tensor) else value

    return {name: move(value) for name, value in arguments.items()}


def differentiated(
    implementation: str,
    inputs: Sequence[torch.Tensor],
    arguments: dict[str, Any],
    *,
    dtype: torch.dtype | None = None,
    compiler: Callable[..., Any] = lambda function: function,
) -> dict[str, torch.Tensor]:
    """Return the result, and the gradients of its product with random numbers, by all floating inputs."""
    leaves = dict(zip(NAMES, inputs, strict=False)) | {"slopes": SLOPES.to(inputs[0].device)}
    leaves |= {name: x for name, x in arguments.items() if name in NAMES}
    leaves = {name: x.detach().to(dtype or x.dtype, copy=True).requires_grad_() for name, x in leaves.items()}
    result = compiler(lambda leaves: attend(**arguments | leaves | {"implementation": implementation}))(leaves)
    generator = torch.Generator().manual_seed(1)
    cotangent = torch.randn(result.shape, generator=generator).to(inputs[0].dtype).to(result)
    gradients = torch.autograd.grad((result * cotangent).sum(), list(leaves.values()))
    return {"result": result.detach(), **dict(zip(leaves, gradients, strict=True))}


def assert_near(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], roundoff: float) -> None:
    for name, x in expected.items():
        assert actual[name].shape == x.shape
        difference = (actual[name].cpu().double() - x.cpu()).abs().max().item()
        assert difference <= roundoff * max(1.0, x.abs().max().item()), f"{name} is off by {difference}"


def assert_exact(inputs: Sequence[torch.Tensor], arguments: dict[str, Any], roundoff: float = 5e-5, **how: Any) -> None:
    """Assert that result and gradients are those of dense attention in float64."""
    expected = differentiated("dense", inputs, arguments, dtype=torch.float64)
    assert_near(differentiated("flex", inputs, arguments, **how), expected, roundoff)


def assert_result(inputs: Sequence[torch.Tensor], arguments: dict[str, Any], roundoff: float = 1e-5) -> None:
    """Assert that the result, without gradients, is that of dense attention in float64."""
    right = attend(*(x.double() for x in inputs), **arguments, implementation="dense")
    assert_near({"result": attend(*inputs, **arguments)}, {"result": right}, roundoff)


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


@pytest.mark.parametrize(("lengths", "arguments"), TABLE)
def test_the_mask_leaves_out_what_weighs_nothing_and_nothing_else(
    planned: Callable[..., BlockMask], lengths: tuple[int, int], arguments: dict[str, Any]
) -> None:
    query, key, value = tensors(lengths)
    weighed, inside = visible(planned(query, key, value, **arguments), BATCH, HEADS)
    given = {"slopes": SLOPES} | arguments
    call = AttentionCall.check(query, key, value, **given, xp=xp)
    bias, attends = call.bias()
    scores = (call.scale * query @ key.repeat_interleave(HEADS // KV_HEADS, dim=1).mT + bias).double()
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


@pytest.mark.parametrize(("lengths", "arguments"), TABLE)
def test_planning_reads_nothing_from_the_device(
    planned: Callable[..., BlockMask], lengths: tuple[int, int], arguments: dict[str, Any]
) -> None:
    class NoTransfers(TorchFunctionMode):
        """Refuse what makes a GPU's host wait though the meta device lets it pass: a number sent over as a tensor."""

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            assert func not in (torch.tensor, torch.asarray, torch.as_tensor), f"{func.__name__}{args}"
            return func(*args, **(kwargs or {}))

    given = moved({"slopes": SLOPES} | arguments, "meta")
    with NoTransfers():
        assert planned(*(x.to("meta") for x in tensors(lengths)), **given).kv_indices.device.type == "meta"


# --- What the kernels are given ------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    "name",
    [
        *("one token", "asymmetric", "offset by batch", "masked rows", "times", "times after all keys"),
        *("law far away", "points beside all keys", "points by batch"),
    ],
)
def test_flex_attention_itself_takes_the_mask_and_the_functions(name: str) -> None:
    lengths, arguments = CASES[name]
    assert_result(tensors(lengths), arguments, roundoff=4e-6)


@pytest.mark.usefixtures("emulation")
@pytest.mark.parametrize(("lengths", "arguments"), TABLE[:10])
def test_gradients_of_what_the_kernels_are_given(lengths: tuple[int, int], arguments: dict[str, Any]) -> None:
    assert_exact(tensors(lengths), arguments)


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


@pytest.mark.usefixtures("emulation")
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
    assert_exact(inputs, arguments)


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
@pytest.mark.parametrize("name", ["scale", "offset by batch", "segments by batch", "asymmetric", "points", None])
def test_plan_and_gradients_are_traced_into_what_the_caller_compiles(
    name: str | None, on_any_device: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    torch.compiler.reset()
    compiler = functools.partial(torch.compile, fullgraph=True, backend="aot_eager")
    if name is not None:
        lengths, arguments = CASES[name]
        assert_exact(tensors(lengths), arguments, compiler=compiler)
        return
    for length in (140, 300):  # of default slopes
        inputs = [x.requires_grad_() for x in tensors((length, length))]
        function = functools.partial(attend, slopes=None)
        losses = [compiler(function)(*inputs).square().sum(), function(*inputs, implementation="dense").square().sum()]
        for one, other in zip(*(torch.autograd.grad(x, inputs) for x in losses), strict=True):
            assert (one - other).abs().max() <= 5e-5 * other.abs().max()


# --- Compiled as on a GPU ------------------------------------------------------------------------------------------


@pytest.fixture
def compiled_here(
    request: pytest.FixtureRequest, on_any_device: None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[CompileCounterWithBackend]:
    """Let calls on a CPU be compiled as on a GPU, by a compiler that leaves operators as they are; it counts graphs."""
    counter = CompileCounterWithBackend(getattr(request, "param", "aot_eager"))
    monkeypatch.setattr("alibi_torch._flex.kernels.COMPILED_ON", ("cpu",))
    monkeypatch.setattr("torch.compile", functools.partial(torch.compile, backend=counter))
    forget = pkgutil.resolve_name("alibi_torch._flex.kernels:_compiled").cache_clear
    forget()
    torch.compiler.reset()
    yield counter
    forget()


@pytest.mark.parametrize("compiled_here", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)], indirect=True)
def test_a_call_is_compiled_once_for_all_lengths(
    compiled_here: CompileCounterWithBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    for graphs, all_lengths in ((1, ((300, 300), (301, 301))), (2, ((1, 300), (1, 301)))):
        for lengths in all_lengths:
            assert_result(tensors(lengths), {})
        assert compiled_here.frame_count == graphs
    monkeypatch.setattr("alibi_torch._internals._found", lambda name: None)  # a PyTorch without its private names
    assert_result(tensors((302, 302)), {})


@pytest.mark.slow
def test_a_compiled_call_keeps_no_number_of_an_earlier_one(compiled_here: CompileCounterWithBackend) -> None:
    for numbers in ({"scale": 0.5}, {"scale": 0.25}, {"q_offset": 3}, {"q_offset": 40}, {"window_size": 90}):
        for batch in (2, 3):
            assert_result(tensors((200, 300), batch=(batch,)), numbers)
    for heads, head_dim in (((4, 4), 16), ((4, 1), 16), ((4, 2), 1), ((4, 2), 5)):
        assert_result(tensors((200, 200), heads=heads, head_dim=head_dim), {})


@pytest.mark.slow
@pytest.mark.parametrize(("lengths", "arguments"), TABLE)
def test_compiled_calls_give_the_result(
    compiled_here: CompileCounterWithBackend, lengths: tuple[int, int], arguments: dict[str, Any]
) -> None:
    assert_result(tensors(lengths), arguments)


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

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")


def assert_cuda_agrees(lengths: tuple[int, int], roundoff: float, arguments: dict[str, Any], **sizes: Any) -> None:
    inputs, arguments = [x.cuda() for x in tensors(lengths, **sizes)], moved({"slopes": SLOPES} | arguments, "cuda")
    assert_exact(inputs, arguments, roundoff)
    # By other kernels: without padding, and by that for few queries.
    assert_result(inputs, arguments, roundoff)


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
        attend(*inputs, **arguments, slopes=None)
        attend(*inputs, slopes, **arguments).sum().backward()

    step()  # which compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.cuda
@CUDA
def test_cuda_trains_within_what_the_caller_compiles() -> None:
    torch.compiler.reset()
    inputs = [x.cuda() for x in tensors((200, 200))]
    assert_exact(inputs, {}, 2e-5, compiler=functools.partial(torch.compile, fullgraph=True))
