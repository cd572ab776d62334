"""Other people's ALiBi as it is installed: where it is the paper's, and how it departs, as docs/ecosystem.md says.

Each peer computes the attention of given queries, keys and values, which is compared with float64.
"""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import numpy as np
import pytest

import alibi_core

pytestmark = pytest.mark.slow

LENGTH, HEAD_DIM, NUM_HEADS = 300, 4, 6  # six heads are no power of two
U32 = 2.0**-24
BACK = np.arange(LENGTH)[:, None] - np.arange(LENGTH)  # tokens that a key lies behind a query
Values = np.ndarray[Any, Any]


def tensors(num_kv_heads: int = NUM_HEADS) -> tuple[Values, ...]:
    """Return query, key and value, ``[2, heads, length, head_dim]`` float32."""
    drawn = np.random.default_rng(0)
    heads = NUM_HEADS, num_kv_heads, num_kv_heads
    return tuple(drawn.standard_normal((2, n, LENGTH, HEAD_DIM)).astype(np.float32) for n in heads)


def assert_adds(bias: Values, found: Values, arrays: tuple[Values, ...], *, is_causal: bool = True) -> None:
    """Assert that a result is the attention with ``bias``, ``[heads, length, length]``, within float32's rounding.

    To first order, a score of rounded products is off by ``(head_dim + 2) u`` times the sum of their sizes, and by
    ``2 u`` times the bias that is added; a weight by twice that and ``length u``, all relative to the largest value.
    """
    query, key, value = (x.astype(np.float64) for x in arrays)
    scale = HEAD_DIM**-0.5
    scores = scale * (query @ key.swapaxes(-1, -2)) + np.where(is_causal & (BACK < 0), -np.inf, bias)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    exact = weights / weights.sum(axis=-1, keepdims=True) @ value
    sizes = (HEAD_DIM + 2) * scale * np.max(np.abs(query) @ np.abs(key).swapaxes(-1, -2)) + 2 * np.max(np.abs(bias))
    budget = U32 * (2 * sizes + LENGTH) * np.abs(value).max()
    assert np.abs(found - exact).max() <= budget


def paper() -> Values:
    """Return the paper's slopes, ``[heads, 1, 1]``."""
    return alibi_core.slopes(NUM_HEADS).astype(np.float64)[:, None, None]


def row_of(contract: str) -> Values:
    """Return the bias of a model family as it is added to scaled scores, for all queries alike."""
    row = np.asarray(alibi_core.key_bias(NUM_HEADS, LENGTH, contract=contract)).astype(np.float64)
    return row.repeat(LENGTH, axis=1)


# --- transformers -----------------------------------------------------------------------------------------------------


def of_transformers(kind: str, arrays: tuple[Values, ...], **options: Any) -> Values:
    """Return the attention of a whole model of one layer, whose own code makes the bias and the mask.

    The layer's projections are identities: it is given query, key and value in the place of hidden states.
    """
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    width = NUM_HEADS * HEAD_DIM
    names = {"Bloom": ("hidden_size", "n_head", "n_layer"), "Mpt": ("d_model", "n_heads", "n_layers")}
    names["Falcon"] = ("hidden_size", "num_attention_heads", "num_hidden_layers")
    options |= {"vocab_size": 11, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    options |= dict(zip(names[kind], (width, NUM_HEADS, 1), strict=True))
    model = getattr(transformers, f"{kind}Model")(getattr(transformers, f"{kind}Config")(**options)).eval()
    blocks = model.blocks if kind == "Mpt" else model.h
    attention = blocks[0].attn if kind == "Mpt" else blocks[0].self_attention
    for name in ("query_key_value", "Wqkv", "dense", "out_proj"):
        if hasattr(attention, name):
            setattr(attention, name, torch.nn.Identity())
    query, key, value = (torch.from_numpy(x) for x in arrays)
    if kind == "Mpt":
        fused = torch.cat([x.transpose(1, 2).flatten(2) for x in (query, key, value)], dim=2)
    elif query.shape[1] == key.shape[1]:
        fused = torch.stack([query, key, value], dim=-2).transpose(1, 2).flatten(2)
    else:  # grouped: of each key head its queries, itself, its value
        groups = torch.cat([query.unflatten(1, (key.shape[1], -1)), key[:, :, None], value[:, :, None]], dim=2)
        fused = groups.permute(0, 3, 1, 2, 4).flatten(2)
    found = []

    class Probe(torch.nn.Module):
        def forward(self, hidden_states: Any, **given: Any) -> tuple[Any]:
            if kind == "Bloom":
                given["residual"] = hidden_states.new_zeros(())  # which BLOOM adds to the result
            if kind == "Mpt":
                names = inspect.signature(attention.forward).parameters  # transformers 5.24 renamed the cache
                given["cache" if "cache" in names else "past_key_values"] = given.pop("layer_past")
            found.append(attention(fused, **given)[0])
            return (hidden_states,)

    blocks[0] = Probe()
    with torch.no_grad():
        model(inputs_embeds=torch.zeros(2, LENGTH, width), use_cache=False)
    return found[0].unflatten(2, (NUM_HEADS, HEAD_DIM)).transpose(1, 2).numpy()


def test_bloom_counts_from_the_first_key() -> None:
    arrays = tensors()
    assert_adds(row_of("bloom"), of_transformers("Bloom", arrays), arrays)


def test_mpt_is_the_papers_alibi_and_takes_no_notice_of_its_bias_max() -> None:
    arrays = tensors()
    for options in ({}, {"attn_config": {"alibi_bias_max": 16}}):
        assert_adds(-paper() * BACK, of_transformers("Mpt", arrays, **options), arrays)


@pytest.mark.parametrize(
    ("num_kv_heads", "implementation", "times"), [(NUM_HEADS, "sdpa", 1), (2, "sdpa", 1), (NUM_HEADS, "eager", 2)]
)
def test_falcon_rounds_its_bias_to_bfloat16_and_scales_it_like_scores_and_adds_it_twice_if_eager(
    num_kv_heads: int, implementation: str, times: int
) -> None:
    arrays, options = tensors(num_kv_heads), {"alibi": True, "multi_query": False, "parallel_attn": False}
    if num_kv_heads < NUM_HEADS:
        options |= {"new_decoder_architecture": True, "num_kv_heads": num_kv_heads}
    found = of_transformers("Falcon", arrays, attn_implementation=implementation, **options)
    repeated = arrays[0], *(x.repeat(NUM_HEADS // num_kv_heads, axis=1) for x in arrays[1:])
    assert_adds(times * row_of("falcon") * HEAD_DIM**-0.5, found, repeated)


# --- x-transformers, mlx.nn, FlexAttention ----------------------------------------------------------------------------


def of_x_transformers(arrays: tuple[Values, ...], *, is_causal: bool, flash: bool) -> Values:
    torch = pytest.importorskip("torch")
    from_package = pytest.importorskip("x_transformers.x_transformers")

    class Half(torch.nn.Module):
        def __init__(self, index: int) -> None:
            super().__init__()
            self.index = index

        def forward(self, features: Any) -> Any:
            return features.chunk(2, dim=-1)[self.index]

    query, key, value = (torch.from_numpy(x).transpose(1, 2).flatten(2) for x in arrays)
    sizes = {"dim_head": HEAD_DIM, "heads": NUM_HEADS, "kv_heads": arrays[1].shape[1]}
    module = from_package.Attention(NUM_HEADS * HEAD_DIM, causal=is_causal, flash=flash, **sizes).eval()
    module.to_q, module.to_k, module.to_v, module.to_out = torch.nn.Identity(), Half(0), Half(1), torch.nn.Identity()
    with torch.no_grad():
        context = torch.cat([key, value], dim=-1)
        found = module(query, context=context, rel_pos=from_package.AlibiPositionalBias(NUM_HEADS))
    return found.unflatten(2, (NUM_HEADS, HEAD_DIM)).transpose(1, 2).numpy()


@pytest.mark.parametrize("flash", [False, True])
@pytest.mark.parametrize("is_causal", [True, False])
def test_x_transformers_is_the_papers_alibi(is_causal: bool, flash: bool) -> None:
    arrays = tensors()
    found = of_x_transformers(arrays, is_causal=is_causal, flash=flash)
    assert_adds(-paper() * np.abs(BACK), found, arrays, is_causal=is_causal)


def test_x_transformers_interleaves_grouped_heads() -> None:
    query, key, value = tensors(2)
    found = of_x_transformers((query, key, value), is_causal=True, flash=False)
    order = np.arange(NUM_HEADS) % 2  # where others have head h read key head h // 3
    assert_adds(-paper() * BACK, found, (query, key[:, order], value[:, order]))


@pytest.mark.parametrize("is_causal", [True, False])
def test_mlx_nn_is_the_papers_alibi(is_causal: bool) -> None:
    mx, nn = pytest.importorskip("mlx.core"), pytest.importorskip("mlx.nn")
    arrays = tensors()
    with mx.stream(mx.cpu):
        query, key, value = map(mx.array, arrays)
        mask = mx.where(mx.array(is_causal & (BACK < 0)), -mx.inf, 0.0)
        scores = nn.ALiBi()((query * HEAD_DIM**-0.5) @ key.swapaxes(-1, -2), mask=mask)
        found = np.array(mx.softmax(scores, axis=-1, precise=True) @ value)
    assert_adds(-paper() * np.abs(BACK), found, arrays, is_causal=is_causal)


@pytest.mark.parametrize("is_causal", [True, False])
def test_flex_attentions_example_rewards_keys_ahead(is_causal: bool) -> None:
    """Causal, it is the paper's; without the mask, keys ahead gain. It is from pytorch.org/blog/flexattention."""
    torch = pytest.importorskip("torch")
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    arrays, rate = tensors(), torch.from_numpy(alibi_core.slopes(NUM_HEADS))

    def alibi(score: Any, batch: Any, head: Any, q_index: Any, kv_index: Any) -> Any:
        return score + rate[head] * (kv_index - q_index)

    sizes = None, None, LENGTH, LENGTH, "cpu"
    blocks = create_block_mask(lambda b, h, q_index, kv_index: q_index >= kv_index, *sizes) if is_causal else None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        found = flex_attention(*map(torch.from_numpy, arrays), alibi, block_mask=blocks).numpy()
    assert_adds(-paper() * BACK, found, arrays, is_causal=is_causal)
