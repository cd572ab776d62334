import json
import math
from argparse import Namespace
from dataclasses import replace

import pytest

for module in ("torch", "matplotlib", "rich", "tqdm"):
    pytest.importorskip(module)

import torch  # noqa: E402
from torch import nn  # noqa: E402

from alibi_torch.nn._transformer import AlibiConfig  # noqa: E402
from benchmarks.extrapolation import corpus, models, training  # noqa: E402
from benchmarks.extrapolation.__main__ import main, run  # noqa: E402
from benchmarks.extrapolation.evaluation import Held, evaluate, non_overlapping, sliding  # noqa: E402
from benchmarks.extrapolation.settings import MULTIPLES, Settings  # noqa: E402

pytestmark = pytest.mark.full

TINY = AlibiConfig(num_layers=2, embed_dim=40, num_heads=5, dropout=0.0)


class Recorder(nn.Module):
    """A model with a memory: its loss at a token depends on that token and on how many came before it."""

    def __init__(self):
        super().__init__()
        self.anchor = nn.Parameter(torch.zeros(1))

    def forward(self, tokens):
        seen = torch.arange(1, tokens.shape[1] + 1)[None, :, None]
        return torch.sin(seen * (1 + torch.arange(256))) + 0.1 * tokens[..., None]


def loss_by_hand(text, target, context):
    logits = Recorder()(torch.tensor([text[target - context : target]]))[0, -1].double()
    return (logits.exp().sum().log() - logits[text[target]]).item()


@pytest.fixture
def held():
    tokens = torch.randint(256, (200,), generator=torch.Generator().manual_seed(3)).to(torch.uint8)
    return Held(tokens, first=50, scored=96)


@pytest.mark.parametrize("length", [3, 48])
def test_non_overlapping_scores_each_token_once(held, length):
    text = held.tokens.tolist()
    by_hand = [loss_by_hand(text, target, 1 + (target - 50) % length) for target in range(50, 146)]
    assert non_overlapping(Recorder(), held, length) == pytest.approx(sum(by_hand) / 96, rel=1e-6)


@pytest.mark.parametrize(("length", "stride", "every"), [(6, 1, 1), (12, 3, 4), (48, 6, 1)])
def test_sliding_scores_the_same_tokens_at_every_length(held, length, stride, every):
    held, text = replace(held, every=every), held.tokens.tolist()
    ends = range(50 + stride, 50 + 96 + 1, stride * every)
    losses = [[loss_by_hand(text, end - length + p, p + 1) for p in range(length)] for end in ends]
    counted = [loss for window in losses for loss in window[length - stride :]]
    if every == 1:
        assert len(counted) == 96  # each token once
    mean, by_position = sliding(Recorder(), held, length, stride)
    assert mean == pytest.approx(sum(counted) / len(counted), rel=1e-6)
    by_hand = [sum(position) / len(losses) for position in zip(*losses, strict=True)]
    assert by_position.tolist() == pytest.approx(by_hand, rel=1e-6)


def test_evaluate_covers_every_length_within_the_text():
    settings = Settings(train_length=8, scored=512, slid=100)
    tokens = torch.arange(128 + 512 - 1).to(torch.uint8)  # one short of the fourth segment
    held = Held.of(tokens, settings)
    assert (held.first, held.scored, held.every) == (128, 384, 3)
    assert held.ends(2)[-1] <= len(tokens)
    found = evaluate(Recorder(), held, settings)
    lengths = [str(8 * multiple) for multiple in MULTIPLES]
    assert list(found["non_overlapping"]) == list(found["sliding"]) == lengths
    assert len(found["by_position"]) == 128


def test_sinusoids_follow_the_formula():
    table = models.sinusoids(300, 10)
    for position in (0, 1, 7, 299):
        for i in range(5):
            angle = position / 10000 ** (2 * i / 10)
            assert table[position, 2 * i].item() == pytest.approx(math.sin(angle), abs=1e-6)
            assert table[position, 2 * i + 1].item() == pytest.approx(math.cos(angle), abs=1e-6)


def test_rotary_follows_the_formula():
    x = torch.randn(7, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    turned = models.rotate(x, 5)
    for position in range(7):
        for i in range(3):
            pair = complex(x[position, i], x[position, i + 3])
            pair *= complex(math.cos(angle := (5 + position) / 10000 ** (2 * i / 6)), math.sin(angle))
            assert complex(turned[position, i], turned[position, i + 3]) == pytest.approx(pair, rel=1e-12)


def test_methods_start_from_the_same_weights():
    states = [models.build(method, TINY, 7).state_dict() for method in models.METHODS]
    for state in states[1:]:
        assert list(state) == list(states[0])
        assert all(torch.equal(state[name], states[0][name]) for name in state)
    assert not torch.equal(models.build("none", TINY, 8).embedding.weight, states[0]["embedding.weight"])


def test_methods_are_causal_and_differ_in_positions_alone():
    tokens = torch.randint(256, (2, 17), generator=torch.Generator().manual_seed(1))
    changed = tokens.clone()
    changed[:, 9:] += 1
    built = {method: models.build(method, TINY, 7) for method in models.METHODS}
    plain = built["none"](tokens)
    for method, model in built.items():
        logits = model(tokens)
        torch.testing.assert_close(logits[:, :9], model(changed % 256)[:, :9])
        assert method == "none" or (logits - plain).abs().max() > 1e-2
    for block in built["alibi"].transformer.blocks:
        block.attention.slopes.zero_()
    torch.testing.assert_close(built["alibi"](tokens), plain)


def test_training_sees_the_same_batches_whatever_the_method():
    class Listener(Recorder):
        def forward(self, tokens):
            batches.append(tokens)
            return super().forward(tokens) + self.anchor

    text = torch.arange(2000).to(torch.uint8)
    settings = Settings(train_length=7, steps=3, batch_size=2)
    runs = []
    for seed in (1, 1, 2):
        batches = []
        training.train(Listener(), text, settings, seed, range(3))
        runs.append(torch.stack(batches))
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


def test_training_learns():
    text = torch.tensor(list(b"to and fro ") * 300, dtype=torch.uint8)
    settings = Settings(train_length=16, steps=60, batch_size=8)
    losses = training.train(models.build("alibi", TINY, 0), text, settings, 0, range(60))
    assert losses[0] > 5 > 1 > losses[-1]


def test_standard_library_is_split_by_file_and_the_same_each_time():
    first, again = (corpus.standard_library(300_000, 20_000) for _ in range(2))
    assert first.digest == again.digest
    assert len(first.held_out) == 20_000
    held_out, training_text = (bytes(text.tolist()) for text in (first.held_out, first.training))
    assert not any(held_out[at : at + 200] in training_text for at in range(0, 19_800, 100))


@pytest.mark.parametrize("size", [5 * 64, 1000, 100_000])
def test_text_file_is_split_at_one_place(tmp_path, size):
    path = tmp_path / "text"
    text = bytes(index * index % 251 for index in range(size))
    path.write_bytes(text)
    split = corpus.text_file(path, held_out_bytes=4096, least_held_out=64)
    assert bytes(split.training.tolist()) + bytes(split.held_out.tolist()) == text
    assert len(split.held_out) == {320: 64, 1000: 100, 100_000: 4096}[size]
    with pytest.raises(ValueError, match=f"text must have at least {5 * size:,} bytes, got {size:,} in text"):
        corpus.text_file(path, held_out_bytes=4096, least_held_out=size)


def test_the_rate_rises_for_a_tenth_of_the_steps_and_falls_to_a_tenth():
    rates = [training.rate(step, 60) for step in range(1, 61)]
    assert rates[:6] == pytest.approx([1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6, 1.0])
    assert rates[-1] == pytest.approx(0.1)
    assert rates[5:] == sorted(rates[5:], reverse=True)


@pytest.mark.parametrize("broken", [None, "rotary"])
def test_run_writes_table_json_and_picture_and_fails_where_a_loss_is_not_finite(broken, tmp_path, monkeypatch, capsys):
    def build(method, config, seed):
        model = models.build(method, config, seed)
        if method == broken:
            model.embedding.weight.data.fill_(float("nan"))
        return model

    monkeypatch.setattr("benchmarks.extrapolation.__main__.build", build)
    settings = Settings(
        train_length=8, num_layers=1, embed_dim=32, num_heads=4, batch_size=2, steps=3, scored=256, slid=32
    )
    (tmp_path / "text").write_bytes(bytes(range(256)) * 10)  # no valid UTF-8
    text = corpus.text_file(tmp_path / "text", 384, 256)
    assert run(settings, text, Namespace(seed=0, device="cpu", output=tmp_path)) == (broken is not None)
    shown = capsys.readouterr()
    assert ("not finite" in shown.err) == (broken is not None)
    for word in (*models.METHODS, "Non-overlapping", "Sliding", "last trained (8)", "perplexity", "change", "128"):
        assert word in shown.out
    found = json.loads((tmp_path / "results.json").read_text())
    assert list(found["methods"]) == list(models.METHODS)
    assert found["settings"]["lengths"] == [8, 16, 32, 64, 128]
    assert str(tmp_path) not in json.dumps(found)
    for name, method in found["methods"].items():
        losses = [*method["sliding"].values(), *method["non_overlapping"].values()]
        assert len(method["training_loss"]) == 3
        assert len(method["by_position"]) == 128
        assert losses == [None] * 10 if name == broken else all(4 < loss < 8 for loss in losses)
    assert (tmp_path / "extrapolation.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--quick", "--full"], "not allowed with argument"),
        (["--text", "no such file"], "no such file"),
        (["--device", "abacus"], "abacus"),
    ],
)
def test_bad_options_are_refused(options, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as exit_:
        main([*options, "--output", str(tmp_path)])
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err
