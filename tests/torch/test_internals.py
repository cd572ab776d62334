"""Private names of other libraries: all are known, each has a second lock, and PyTorch's may be missing."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import distributed, nn  # noqa: E402

import alibi_core  # noqa: E402
import alibi_torch  # noqa: E402
from alibi_torch import _internals, parallel  # noqa: E402
from alibi_torch._internals import is_as_known  # noqa: E402

# What happens if a name is missing, or means something else.
LOCKS = {
    "_internals": r"^(_C\.|_dynamo\.|ops\.|_scaled_dot_product|_disable_dynamo|_current_level|_version|_get_backend)",
    "a forward hook keeps PyTorch off its fused path": "_qkv_same_embed_dim|_reset_parameters",
    "the import tries it out": "_apply",
    "an AttributeError": "_parameters|_buffers|_reshape|_split_heads",
    "a ValueError before a model is changed": "_attn_implementation|_can_set_attn_implementation",
    "a ValueError, as forward is then another's": "_old_forward",
    "a warning at import": "_active_collector",
    "slower compilation": "_dynamo_marked_constant",
    "Python's own": "_replace|_asdict|_fields",
}


def test_private_names_are_known() -> None:
    used, own = set(), {"_proj", "_len"}  # parts of names of weights and lengths
    folders = Path(alibi_torch.__path__[0]).parent, Path(alibi_core.__path__[0])
    for file in (x for folder in folders for x in folder.rglob("*.py") if x.name != "_pytest_plugin.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                own.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                own.add(node.id)
            elif isinstance(node, ast.Attribute):
                (own if isinstance(node.ctx, ast.Store) else used).add(node.attr)
            elif isinstance(node, ast.Constant) and re.fullmatch(r"(\w+\.)*_[a-zA-Z]\w*(\.\w+)*", str(node.value)):
                used.add(node.value)
    private = {name for name in used - own if re.match(r"(ops\.\w+\.)?_[a-zA-Z]", name)}
    unknown = {x for x in private if not any(re.match(rf"({names})", x) for names in LOCKS.values())}
    assert not unknown, "say what happens if these private names are renamed"


def far(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def forward_and_gradients(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    tensors = [x.to(dtype).requires_grad_() for x in far(3, 2, 4, 70, 8)]
    slopes = torch.rand(4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    result = alibi_torch.attention(*tensors, slopes)
    first = torch.autograd.grad(result.float().square().sum(), (*tensors, slopes), create_graph=True)
    return [result, *first, *torch.autograd.grad(sum(x.float().square().sum() for x in first), tensors)]


def transforms() -> list[torch.Tensor]:
    tensors = far(3, 2, 4, 9, 8)
    results = [torch.func.vmap(alibi_torch.attention)(*tensors)]
    results += [torch.func.grad(lambda q: alibi_torch.attention(q, *tensors[1:]).square().sum())(tensors[0])]
    return [*results, *torch.func.jvp(lambda q: alibi_torch.attention(q, *tensors[1:]), (tensors[0],), (tensors[1],))]


def compiled() -> list[torch.Tensor]:
    torch.compiler.reset()
    return [torch.compile(alibi_torch.attention, fullgraph=True, backend="aot_eager")(*far(3, 2, 4, 9, 8))]


def models() -> list[torch.Tensor]:
    torch.manual_seed(0)
    sizes = {"num_layers": 1, "embed_dim": 16, "num_heads": 4, "dropout": 0.0}
    model, tokens = alibi_torch.AlibiLanguageModel(alibi_torch.AlibiConfig(**sizes), 31), torch.arange(18).view(2, 9)
    layer = nn.TransformerEncoderLayer(16, 4, 16, dropout=0.0, batch_first=True)
    layer.self_attn = alibi_torch.AlibiMultiheadAttention(16, 4, batch_first=True)
    cache = alibi_torch.KVCache(1, 2, 9, 8)
    x = far(1, 2, 3, 8)
    cache.append(x, x)
    attended = cache.attend(x.clone().requires_grad_())
    cache.append(x, x)
    with pytest.raises(RuntimeError, match="before further tokens|modified by an inplace operation"):
        attended.sum().backward()
    return [model(tokens), model.generate(tokens, 3, lengths=[9, 4]), layer.eval()(far(2, 9, 16))]


def bloom() -> list[torch.Tensor]:
    transformers = pytest.importorskip("transformers")
    from alibi_torch.transformers import accelerate

    torch.manual_seed(0)
    config = transformers.BloomConfig(vocab_size=50, hidden_size=16, n_layer=1, n_head=4)
    model, tokens = accelerate(transformers.BloomForCausalLM(config).eval()), torch.arange(18).view(2, 9)
    return [model(tokens).logits, model.generate(tokens, max_new_tokens=3, do_sample=False, pad_token_id=0)]


def processes() -> list[torch.Tensor]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        return [parallel.attention(*far(3, 2, 4, 9, 8))]
    finally:
        distributed.destroy_process_group()


PROGRAMS: list[Any] = [forward_and_gradients, transforms, models, bloom, processes]
PROGRAMS += [pytest.param(compiled, marks=pytest.mark.slow)]
MISSING = ["FLASH", "FLASH_BACKWARD", "_TRANSFORMS", "_INTERPRETERS", "_DISPATCH_MODES", "_MODE_OF", "_FAKE"]
MISSING += ["_PROXY_MODE", "_IS_BATCH_OF_GRADIENTS", "_found"]  # the last: whatever is looked up in a call


def remove(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    for name in names:
        monkeypatch.setattr(_internals, name, None if name != "_found" else lambda _: None)


@pytest.mark.filterwarnings("ignore:BloomModel computes this call", "ignore:nothing was proven")
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_without_private_names_results_are_the_same(
    program: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = program()
    for names in (*([x] for x in MISSING), MISSING):
        with monkeypatch.context() as patch:
            remove(patch, *names)
            for found, right in zip(program(), expected, strict=True):
                assert (found - right).abs().max() <= 1e-5 * (1 + right.abs().max()), names


def test_a_changed_kernel_is_not_used() -> None:
    forward, backward = _internals.fused_forward, _internals.fused_backward
    assert is_as_known(forward, backward)
    assert not is_as_known(lambda *x: (forward(*x)[0], forward(*x)[1] / math.log(2)), backward)
    assert not is_as_known(forward, lambda *x: backward(*x)[::-1])
    assert not is_as_known(forward, lambda grad, *x: backward(*x))
