"""Encoders with ALiBi: a catalogue of families, and the family of a ``config.json``.

Each entry of ``ENCODERS`` describes the original code of a family. All families have in common:

- embeddings: the embeddings of the token and of its type are added, then a layer norm follows; none of positions;
- scores ``query @ key.mT / sqrt(head_dim) - slope * |i - j|``: the bias is symmetric, counted from the query's own
  position, and not scaled; keys that are padding get a large negative number;
- the canonical slopes; heads beyond a power of 2 have every other slope of twice as many heads;
- post-norm: the output of a layer is added to its input, and the sum is normed; no norm follows the last block;
- biases of the projections and of the feed-forward layer's output.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from alibi_core._arrays import checks
from alibi_core._models.config import AlibiConfig
from alibi_core._models.families import BY_DISTANCE, Family, Layout, Settings
from alibi_core._slopes import slope_values

MODEL_TYPE = "bert"  # the model_type in the config.json of all families


@dataclass(frozen=True)
class EncoderFacts:
    """The original code of a family, and the names in its checkpoints."""

    original: str  # the class that defines it, and models of that class
    bias: str  # how the original forms its bias, in words; the exact one used here equals it up to float32 rounding
    block: str  # AlibiConfig.block
    modules: dict[str, str]  # Layout.block
    activation: str | None  # entry of config.json that names the activation; None if it is always "gelu"
    up_bias: bool = False  # whether the first projection of the feed-forward layer has a bias
    # Whether config.json must say "position_embedding_type": "alibi", because other models of the class have position
    # embeddings. If False, the class supports ALiBi only and the entry is ignored.
    says_alibi: bool = True

    @property
    def layout(self) -> Layout:
        """Names of the tensors of a model with a head; without a head, names lack the prefix ``bert.``."""
        return Layout(
            embedding="bert.embeddings.word_embeddings",
            token_type_embedding="bert.embeddings.token_type_embeddings",
            embedding_norm="bert.embeddings.LayerNorm",
            blocks="bert.encoder.layer",
            block=self.modules,
            norm=None,
            # Task heads, and an ALiBi bias that was saved as a buffer.
            ignored=(r"(bert\.)?pooler\..*", r"(cls|classifier|qa_outputs)\..*", r"(bert\.)?encoder\.alibi"),
        )


_PROJECTIONS = {"attention.self.query": "q", "attention.self.key": "k", "attention.self.value": "v"}
_OUTPUT = {"attention.output.dense": "out", "attention.output.LayerNorm": "attention_norm"}
_GATED = {"mlp.gated_layers": "gate up", "mlp.wo": "down", "mlp.layernorm": "feed_forward_norm"}
_NORMED_PROJECTIONS = _PROJECTIONS | {
    "attention.self.layer_norm_q": "attention.q_norm",
    "attention.self.layer_norm_k": "attention.k_norm",
}
_TWO_NORMS = {"layer_norm_1": "second_attention_norm", "layer_norm_2": "feed_forward_norm"}
_JINA, _JINA_CODE = "jinaai/jina-bert-implementation: JinaBertModel", "jinaai/jina-bert-v2-qk-post-norm: JinaBertModel"

ENCODERS = {
    "jina": EncoderFacts(
        original=f"{_JINA} with feed_forward_type geglu or reglu (jina-embeddings-v2-small-en, -base-en, -de, ...)",
        bias=BY_DISTANCE,
        block="post_norm",
        modules=_PROJECTIONS | _OUTPUT | _GATED,
        activation="feed_forward_type",
    ),
    "jina-plain": EncoderFacts(
        original=f"{_JINA} with another feed_forward_type; BERT that alibi_torch.transformers.with_alibi gave ALiBi",
        bias=BY_DISTANCE,
        block="post_norm",
        modules=_PROJECTIONS
        | _OUTPUT
        | {"intermediate.dense": "up", "output.dense": "down", "output.LayerNorm": "feed_forward_norm"},
        activation="hidden_act",
        up_bias=True,
    ),
    "jina-code": EncoderFacts(
        original=f"{_JINA_CODE} with feed_forward_type geglu or reglu (jina-embeddings-v2-base-code)",
        bias=BY_DISTANCE,
        block="double_post_norm",
        modules=_NORMED_PROJECTIONS
        | _OUTPUT
        | _TWO_NORMS
        | {"mlp.up_gated_layer": "up gate", "mlp.down_layer": "down"},  # the gate comes second there
        activation="feed_forward_type",
    ),
    "jina-code-plain": EncoderFacts(
        original=f"{_JINA_CODE} with another feed_forward_type",
        bias=BY_DISTANCE,
        block="double_post_norm",
        modules=_NORMED_PROJECTIONS | _OUTPUT | _TWO_NORMS | {"mlp.up_layer": "up", "mlp.down_layer": "down"},
        activation="hidden_act",
    ),
    "mosaic-bert": EncoderFacts(
        original="mosaicml/examples, bert_layers.py: BertModel (MosaicBERT; DNABERT-2 and DNABERT-S have a copy of it)",
        bias="slopes times distances from the query, in float32",
        block="post_norm",
        modules={"attention.self.Wqkv": "q k v"} | _OUTPUT | _GATED,
        activation=None,
        says_alibi=False,
    ),
}


def encoder_of(settings: Settings, tensors: Collection[str]) -> Family:
    """Return the family of an encoder, from its ``config.json`` and the names of its checkpoint's tensors.

    The configs of different families can be identical. So the module names of the first block decide, and the config
    must agree.
    """
    # The family with the most module names in the checkpoint.
    name, facts = max(ENCODERS.items(), key=lambda entry: entry[1].layout.as_in(tensors).count_known(tensors))
    if facts.says_alibi and settings.values.get("position_embedding_type") != "alibi":
        raise settings.refuse("position_embedding_type", "'alibi'", "a BERT with embeddings of positions is not loaded")
    advice = "an encoder is loaded, whose tokens see those after them"
    settings.refuse_switches("is_decoder", "add_cross_attention", advice=advice)
    width = settings.size("hidden_size")
    num_heads = settings.heads(width, "num_attention_heads")
    slopes = _saved_slopes(settings, "alibi_slopes")
    config = AlibiConfig(
        num_layers=settings.size("num_hidden_layers"),
        embed_dim=width,
        num_heads=num_heads,
        max_len=settings.size("max_position_embeddings", default=512),
        dropout=0.0,
        is_causal=False,
        bias=True,
        block=facts.block,
        activation=_activation(settings, facts),
        gated=facts.activation != "hidden_act",
        feed_forward_dim=settings.size("intermediate_size"),
        up_bias=facts.up_bias,
        qk_norm="attention.self.layer_norm_q" in facts.modules,
        norm_epsilon=settings.number("layer_norm_eps", default=1e-12),
        slopes=tuple(slope_values(num_heads)) if slopes is None else slopes,
        embedding_norm=True,
        embedding_scale=1.0,
        token_types=settings.size("type_vocab_size"),
        future_slopes=_saved_slopes(settings, "alibi_future_slopes"),
    )
    return Family(name, facts.bias, config, settings.size("vocab_size"), facts.layout)


def _activation(settings: Settings, facts: EncoderFacts) -> str:
    if facts.activation is None:
        return "gelu"
    if facts.activation == "hidden_act":
        return settings.activation("hidden_act", default="gelu")
    known = {"geglu": "gelu", "reglu": "relu"}
    return known[settings.choice(facts.activation, known, default="")]


def _saved_slopes(settings: Settings, entry: str) -> tuple[float, ...] | None:
    """Return the slopes that ``with_alibi`` saved in a config; None if the entry is absent."""
    values = settings.get(entry, default=None)
    if values is not None and not isinstance(values, list):
        raise TypeError(f"{entry} in {settings.place} must be a list of numbers, got {type(values).__name__}")
    return None if values is None else tuple(checks.non_negative_number(settings.called(entry), x) for x in values)
