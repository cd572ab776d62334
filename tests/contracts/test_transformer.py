import dataclasses

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from alibi_torch.nn._language_model import AlibiLanguageModel  # noqa: E402
from alibi_torch.nn._transformer import AlibiConfig, AlibiTransformer  # noqa: E402

SMALL = AlibiConfig(num_layers=3, embed_dim=28, num_heads=7, max_len=11, dropout=0.0, expansion_factor=2)
VOCAB_SIZE = 31


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(5)


def rounding(num_terms):
    """How far two ways of summing this many float32 terms of unit size may part."""
    return num_terms * torch.finfo(torch.float32).eps


def lively_model(**changes):
    """A language model that does not just repeat its last token, as one does whose blocks have yet to say much."""
    model = AlibiLanguageModel(dataclasses.replace(SMALL, num_heads=4, num_kv_heads=2, **changes), VOCAB_SIZE)
    for weight in model.transformer.blocks.parameters():
        weight.data *= 4 if weight.ndim == 2 else 1
    return model


def test_config_has_the_customary_defaults():
    config = AlibiConfig()
    fields = {"num_layers": 6, "d_model": 256, "num_heads": 8, "max_len": 256, "dropout": 0.1, "causal": True}
    assert {name: getattr(config, name) for name in fields} == fields
    assert config.expansion_factor == 1
    assert (config.hidden_dim, dataclasses.replace(config, feed_forward_dim=300).hidden_dim) == (256, 300)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.num_layers = 2


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("num_layers", 0, ValueError, "num_layers must be at least 1, got 0"),
        ("num_layers", 2.0, TypeError, "num_layers must be an integer, got 2.0"),
        ("d_model", -8, ValueError, "embed_dim must be at least 1, got -8"),
        ("d_model", 100, ValueError, r"embed_dim must be a multiple of num_heads \(8\), got 100"),
        ("num_heads", True, TypeError, "num_heads must be an integer, got True"),
        ("num_heads", 7, ValueError, r"embed_dim must be a multiple of num_heads \(7\), got 256"),
        ("max_len", 0, ValueError, "max_len must be at least 1, got 0"),
        ("dropout", 1.0, ValueError, r"dropout must be in \[0, 1\), got 1.0"),
        ("dropout", -0.1, ValueError, r"dropout must be in \[0, 1\), got -0.1"),
        ("dropout", float("nan"), ValueError, "dropout must be finite, got nan"),
        ("dropout", "0.1", TypeError, "dropout must be a real number, got '0.1'"),
        ("causal", 1, TypeError, "is_causal must be True or False, got 1"),
        ("expansion_factor", 0, ValueError, "expansion_factor must be at least 1, got 0"),
        ("num_kv_heads", 3, ValueError, r"num_kv_heads must divide num_heads, 8, got 3"),
        ("num_kv_heads", 0, ValueError, "num_kv_heads must be at least 1, got 0"),
        ("bias", None, TypeError, "bias must be True or False, got None"),
        ("norm_bias", 1, TypeError, "norm_bias must be True or False, got 1"),
        ("block", "sandwich_norm", ValueError, "block must be one of 'sequential', .*, got 'sandwich_norm'"),
        ("activation", "tanh", ValueError, "activation must be one of 'gelu', .*'relu', got 'tanh'"),
        ("up_bias", 1, TypeError, "up_bias must be True or False, got 1"),
        ("qk_norm", None, TypeError, "qk_norm must be True or False, got None"),
        ("token_types", -1, ValueError, "token_types must not be negative, got -1"),
        ("feed_forward_dim", 0, ValueError, "feed_forward_dim must be at least 1, got 0"),
        ("norm_epsilon", 0.0, ValueError, "norm_epsilon must be positive, got 0.0"),
        ("norm", "batch_norm", ValueError, "norm must be one of 'layer_norm', 'rms_norm', got 'batch_norm'"),
        ("gated", 1, TypeError, "gated must be True or False, got 1"),
        ("logit_scale", 0.0, ValueError, "logit_scale must be positive, got 0.0"),
        ("embedding_scale", "2", TypeError, "embedding_scale must be a real number, got '2'"),
        ("scale", -1.0, ValueError, "scale must be positive, got -1.0"),
        ("clip_qkv", 0, ValueError, "clip_qkv must be positive, got 0"),
        ("slopes", [0.5] * 8, TypeError, "slopes must be a tuple of numbers, got list"),
        ("slopes", (0.5,), ValueError, r"slopes must have shape \(8,\) \(num_heads\), got \(1,\)"),
        ("slopes", (-0.5,) * 8, ValueError, "slopes must not be negative, got -0.5"),
        ("future_slopes", (0.5,) * 8, ValueError, "future_slopes must be None when is_causal=True"),
        ("future_slopes", 0.5, TypeError, "future_slopes must be a tuple of numbers, got float"),
        ("learnable_slopes", 1, TypeError, "learnable_slopes must be True or False, got 1"),
        ("window_size", -1, ValueError, "window_size must not be negative, got -1"),
    ],
)
def test_config_refuses(name, value, error, message):
    with pytest.raises(error, match=f"^{message}"):
        AlibiConfig(**{name: value})


def test_quick_start_shapes():
    model = AlibiTransformer(AlibiConfig())
    assert model(torch.randn(8, 100, 256)).shape == (8, 100, 256)


@pytest.mark.parametrize("shape", [(2, 5, 27), (5, 28), (2, 3, 5, 28)])
def test_transformer_names_the_width_it_wants(shape):
    with pytest.raises(ValueError, match=r"^x must have shape \(batch, length, embed_dim 28\), got"):
        AlibiTransformer(SMALL)(torch.randn(shape))


def test_max_len_is_no_limit_and_changes_nothing():
    x = torch.randn(2, 4 * SMALL.max_len + 1, SMALL.embed_dim)
    model = AlibiTransformer(SMALL)
    recorded = AlibiTransformer(dataclasses.replace(SMALL, max_len=2))
    recorded.load_state_dict(model.state_dict())
    torch.testing.assert_close(model(x), recorded(x), rtol=0, atol=0)


def test_decoder_does_not_look_ahead():
    model, x = AlibiTransformer(SMALL), torch.randn(2, 13, SMALL.embed_dim)
    changed = x.clone()
    changed[:, 7:] = torch.randn(2, 6, SMALL.embed_dim)
    difference = (model(x) - model(changed)).detach().abs().amax(dim=(0, 2))
    assert difference[:7].max() <= rounding(SMALL.embed_dim)
    assert difference[7:].min() > 1e-2


def test_encoder_reads_both_ways_alike():
    model = AlibiTransformer(dataclasses.replace(SMALL, is_causal=False))
    x = torch.randn(2, 13, SMALL.embed_dim)
    forwards, backwards = model(x), model(x.flip(1)).flip(1)
    torch.testing.assert_close(forwards, backwards, rtol=0, atol=rounding(SMALL.embed_dim * SMALL.num_layers))
    shuffled = model(x.roll(3, dims=1)).roll(-3, dims=1)
    assert (forwards - shuffled).abs().max() > 1e-2  # it does sense positions


def test_mask_and_segments_reach_every_block():
    model, x = AlibiTransformer(SMALL), torch.randn(2, 13, SMALL.embed_dim)
    ids = (torch.arange(13) >= 5).int().expand(2, -1)
    apart = torch.cat([model(x[:, :5]), model(x[:, 5:])], dim=1)
    budget = rounding(SMALL.embed_dim * SMALL.num_layers)
    torch.testing.assert_close(model(x, segment_ids=ids), apart, rtol=0, atol=budget)
    mask = (ids[:, None, :, None] == ids[:, None, None, :]).expand(-1, SMALL.num_heads, -1, -1)
    torch.testing.assert_close(model(x, mask=mask), apart, rtol=0, atol=budget)


def test_caches_continue_a_sequence():
    model, x = AlibiTransformer(dataclasses.replace(SMALL, num_heads=4, num_kv_heads=2)), torch.randn(3, 13, 28)
    caches = model.make_caches(3, 13)
    with torch.no_grad():
        parts = [model(part, caches=caches) for part in x.split([5, 1, 7], dim=1)]
        torch.testing.assert_close(torch.cat(parts, dim=1), model(x), rtol=0, atol=rounding(28 * SMALL.num_layers))
    with pytest.raises(ValueError, match=r"^caches must be one a block \(3\), got 2"):
        model(x, caches=caches[:2])


def test_attention_factory_replaces_attention_alone():
    class Still(nn.Module):
        def forward(self, x, *, mask, segment_ids, cache):
            return torch.zeros_like(x)

    seen = []
    model = AlibiTransformer(SMALL, attention=lambda config: seen.append(config) or Still())
    assert seen == [SMALL] * SMALL.num_layers
    x = torch.randn(2, 5, SMALL.embed_dim)
    order = torch.tensor([3, 1, 4, 0, 2])
    torch.testing.assert_close(model(x)[:, order], model(x[:, order]))  # no token hears of another


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"block": "parallel", "activation": "gelu_tanh", "embedding_norm": True, "tied_head": False},
        {"block": "shared_norm", "norm": "rms_norm", "feed_forward_bias": False, "scale": 0.3, "clip_qkv": 0.5},
        {"block": "normed_residual", "gated": True, "slopes": (0.1,) * 7, "embedding_scale": 1.0, "logit_scale": 0.5},
    ],
    ids=lambda changes: changes.get("block", "sequential"),
)
def test_gradients_reach_every_weight(changes):
    model = AlibiLanguageModel(dataclasses.replace(SMALL, bias=True, **changes), VOCAB_SIZE)
    tokens = torch.randint(VOCAB_SIZE, (2, 13))
    nn.functional.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    # A key's bias adds the same to every score of a row, so its gradient is 0 but for rounding.
    silent = [
        name
        for name, weight in model.named_parameters()
        if (weight.grad is None or not weight.grad.any()) and not name.endswith("k_proj.bias")
    ]
    assert silent == []


def test_untrained_model_knows_nothing():
    logits = AlibiLanguageModel(SMALL, VOCAB_SIZE)(torch.randint(VOCAB_SIZE, (17, 13)))
    assert logits.shape == (17, 13, VOCAB_SIZE)
    assert 0.5 < logits.std() < 2


def test_one_matrix_embeds_and_reads_out():
    model = AlibiLanguageModel(SMALL, VOCAB_SIZE)
    assert [name for name, weight in model.named_parameters() if VOCAB_SIZE in weight.shape] == ["embedding.weight"]


def test_language_model_refuses_an_encoder():
    with pytest.raises(ValueError, match=r"^is_causal must be True for a language model, got False"):
        AlibiLanguageModel(dataclasses.replace(SMALL, is_causal=False), VOCAB_SIZE)


def test_generate_turns_dropout_off_and_back_on():
    model = lively_model(dropout=0.5)
    model.transformer.blocks[0].eval()
    before = [module.training for module in model.modules()]
    prompt = torch.randint(VOCAB_SIZE, (2, 5))
    assert torch.equal(model.generate(prompt, 20), model.generate(prompt, 20))
    assert [module.training for module in model.modules()] == before
