"""Symmetric calls in low precision whose products are oneDNN's, on any machine that has it."""

import pytest

torch = pytest.importorskip("torch")

import array_api_compat.torch as xp  # noqa: E402

import alibi_torch  # noqa: E402
from alibi_core import AttentionCall  # noqa: E402
from alibi_torch._tiled import onednn  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="PyTorch was built without oneDNN")


def drawn(dtype, heads, kv_heads, q_len, kv_len):
    """Return query, key and value, of two entries, as a projection leaves them: heads are no outer axis."""
    generator = torch.Generator().manual_seed(0)
    sizes = ((heads, q_len), (kv_heads, kv_len), (kv_heads, kv_len))
    return [torch.randn(2, n, some, 24, generator=generator).to(dtype).transpose(1, 2) for some, n in sizes]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("kv_heads", "q_len", "kv_len", "q_offset"), [(4, 70, 70, None), (2, 33, 81, 17)])
def test_results_are_off_by_their_own_rounding_alone(dtype, kv_heads, q_len, kv_len, q_offset):
    tensors = drawn(dtype, 4, kv_heads, q_len, kv_len)
    rules = {"is_causal": False, "q_offset": q_offset, "scale": 0.3}
    slopes = torch.tensor([[0.5, 0.1, 0.02, 0.0], [2.0, 0.3, 0.01, 0.1]])
    result, _ = onednn.forward(AttentionCall.check(*tensors, slopes, xp=xp, **rules), *tensors)
    right = alibi_torch.attention(*(x.double() for x in tensors), slopes, implementation="dense", **rules)
    half = torch.finfo(dtype).eps / 2
    assert result.dtype == dtype
    assert ((result.double() - right).abs() <= 1.01 * half * right.abs() + 1e-5 * tensors[2].abs().max()).all()


def test_who_is_served(monkeypatch):
    monkeypatch.setattr(onednn, "_multiplies_wider", lambda: True)

    def is_served(dtype=torch.bfloat16, result_dtype=None, length=onednn.FEWEST, is_causal=False, **rules):
        tensors = drawn(dtype, 4, 4, length, length)
        call = AttentionCall.check(*tensors, xp=xp, is_causal=is_causal, **rules)
        return onednn.suits(call, result_dtype or dtype)

    assert is_served()
    assert not is_served(torch.float32)
    assert not is_served(result_dtype=torch.float32)
    assert not is_served(length=onednn.FEWEST - 1)
    assert not is_served(is_causal=True)
    assert not is_served(window_size=40)
    assert not is_served(future_slopes=torch.ones(4))
    before = torch.backends.mkldnn.matmul.fp32_precision
    try:
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"
        assert not is_served()  # oneDNN would round
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = before
