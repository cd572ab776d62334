"""BERT with symmetric ALiBi in place of its position embeddings.

In goes a BERT or MegatronBERT of transformers, or a model that contains one. It attends with ALiBi afterwards, and its
config keeps the slopes.
"""

from alibi_torch.transformers._bert.conversion import with_alibi

__all__ = ["with_alibi"]
