"""explain_model: the keys that each head of a model looks at."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from alibi_torch import AlibiAttention, AlibiConfig, AlibiEncoder, AlibiLanguageModel, explain_model  # noqa: E402


@pytest.mark.parametrize("kind", [AlibiLanguageModel, AlibiEncoder])
def test_steep_heads_look_at_their_own_token_and_flat_ones_at_all(kind: type[torch.nn.Module]) -> None:
    torch.manual_seed(0)
    is_causal, slopes = kind is AlibiLanguageModel, (50.0, 0.5, 0.0, 0.0)
    config = AlibiConfig(num_layers=2, embed_dim=16, num_heads=4, is_causal=is_causal, slopes=slopes)
    model = kind(config, 30)
    for block in model.transformer.blocks:
        block.attention.q_proj.weight.data.zero_()  # so that ALiBi alone tells keys apart
    said = explain_model(model, torch.arange(30).repeat(2, 1) % 7)
    assert model.training
    assert said.blind == {"first": [], "own": [(0, 0), (1, 0)]}
    np.testing.assert_array_equal(said.look_back[:, 0], 0)
    assert np.all((said.look_back[:, 1] >= 1) & (said.look_back[:, 1] < said.look_back[:, 2]))
    queries = np.arange(1, 30)
    shares = 1 / (queries + 1) if is_causal else np.full(29, 1 / 30)
    np.testing.assert_allclose(said.on_first[:, 2], shares.mean(), rtol=1e-5)
    assert str(said).splitlines()[-1].endswith("0.0, 1.0")
    assert len(pytest.importorskip("matplotlib") and said.figure().axes) == 4
    model.transformer.blocks[1].attention = AlibiAttention(16, 2, is_causal=is_causal)
    fewer = explain_model(model, torch.arange(30)[None] % 7)
    assert (
        np.isnan(fewer.look_back).tolist() == np.isnan(fewer.on_own).tolist() == [[False] * 4, [False] * 2 + [True] * 2]
    )
    assert "nan" not in str(fewer)
    assert fewer.figure()
    with pytest.raises(ValueError, match="model must have AlibiAttention layers, got a Linear"):
        explain_model(torch.nn.Linear(2, 2), torch.zeros(1, 2))
