"""What one run of the benchmark does: sizes of the model, of its training, and of what is scored."""

from __future__ import annotations

from dataclasses import dataclass

from alibi_torch.nn import AlibiConfig

MULTIPLES = (1, 2, 4, 8, 16)
VOCAB_SIZE = 256  # bytes


@dataclass(frozen=True)
class Settings:
    """Everything that the methods share. Lengths are in tokens, which are bytes."""

    train_length: int = 128
    num_layers: int = 3
    embed_dim: int = 128
    num_heads: int = 8
    expansion_factor: int = 2
    batch_size: int = 16
    steps: int = 300
    learning_rate: float = 3e-3  # at its peak, after a tenth of the steps
    corpus_bytes: int = 4_000_000  # read at most so much of the standard library
    scored: int = 16_384  # held-out tokens scored on non-overlapping segments
    slid: int = 2_048  # so many of them, spread evenly, are scored on sliding windows too

    @property
    def lengths(self) -> tuple[int, ...]:
        """The lengths to evaluate at."""
        return tuple(multiple * self.train_length for multiple in MULTIPLES)

    @property
    def longest(self) -> int:
        return self.lengths[-1]

    @property
    def stride(self) -> int:
        """How far a sliding window moves, so that every token it scores has three quarters of it as context."""
        return max(1, self.train_length // 4)

    @property
    def model(self) -> AlibiConfig:
        """The shape of the models. Training is too short for dropout to help."""
        names = ("num_layers", "embed_dim", "num_heads", "expansion_factor")
        return AlibiConfig(max_len=self.train_length, dropout=0.0, **{name: getattr(self, name) for name in names})


QUICK = Settings()
FULL = Settings(
    train_length=256,
    num_layers=4,
    embed_dim=192,
    expansion_factor=4,
    steps=600,
    learning_rate=2e-3,
    corpus_bytes=16_000_000,
    scored=65_536,
    slid=4_096,
)
