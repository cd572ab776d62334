"""What is told of a family of models: its bias, its shape, and the names of its tensors."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from alibi_core._contracts import Contract
from alibi_core._models.config import AlibiConfig

HEAD = "lm_head.weight"


@dataclass(frozen=True)
class Layout:
    """What a checkpoint calls its modules, and which of this library's are in each.

    Attributes:
        embedding: Name of the matrix of embeddings.
        blocks: Name of the list of blocks.
        block: By the name of a module in a block, what its weight holds, one below the other: ``attention_norm``,
            ``q``, ``k``, ``v``, ``out``, ``feed_forward_norm``, ``gate``, ``up`` or ``down``; or the name of another
            norm here.
        norm: Name of the norm after the last block, if there is one.
        embedding_norm: Name of the embeddings' norm.
        token_type_embedding: Name of the matrix of token types' embeddings.
        ignored: Regular expressions of tensors that are not needed.
        stored_slopes: Name of a tensor that holds the slopes, ``[num_heads, 1]``, if the checkpoint has it.
        groups_qkv: Whether a module of queries, keys and values holds, for each key/value head, its queries, its key,
            its value. Otherwise all queries come first, then all keys, then all values.
        is_turned: Whether the weights of blocks are ``[in, out]``, as GPT-2's are.
        head_of_unit_rows: Whether the rows of the head are divided by their norms.
    """

    embedding: str
    blocks: str
    block: dict[str, str]
    norm: str | None
    embedding_norm: str | None = None
    token_type_embedding: str | None = None
    ignored: tuple[str, ...] = ()
    stored_slopes: str | None = None
    groups_qkv: bool = False
    is_turned: bool = False
    head_of_unit_rows: bool = False

    def without_prefix(self) -> Layout:
        """Return the names in the checkpoint of a model that was saved without its head."""
        prefix = self.embedding.partition(".")[0] + "."
        names = ("embedding", "blocks", "norm", "embedding_norm", "token_type_embedding", "stored_slopes")
        given = {name: getattr(self, name) for name in names}
        return replace(self, **{name: value and value.removeprefix(prefix) for name, value in given.items()})

    def as_in(self, tensors: Collection[str]) -> Layout:
        """Return the layout with or without its prefix, whichever fits the names of a checkpoint's tensors better."""
        return max((self, self.without_prefix()), key=lambda layout: layout.count_known(tensors))

    def count_known(self, tensors: Collection[str]) -> int:
        """Return how many modules, of the first block and embeddings, are among the names of a checkpoint's tensors."""
        modules = (self.embedding, *(f"{self.blocks}.0.{name}" for name in self.block))
        return sum(f"{module}.weight" in tensors for module in modules)


@dataclass(frozen=True)
class Family:
    """What is known of a checkpoint from its ``config.json``.

    Attributes:
        name: That of its ``model_type``, or of an encoder's entry in the catalogue.
        bias: How the family's own code forms its bias.
        config: Shape of the language model or encoder.
        vocab_size: Number of its tokens.
        layouts: What its tensors may be called; the first that a checkpoint fits counts.
        rounds_bias: Whether attention is to add Falcon's bias, rounded to bfloat16, in place of the exact one.
    """

    name: str
    bias: Contract
    config: AlibiConfig
    vocab_size: int
    layouts: tuple[Layout, ...]
    rounds_bias: bool = False
