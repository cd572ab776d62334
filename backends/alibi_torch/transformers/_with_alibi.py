"""``with_alibi``: replaces a model's position embeddings by ALiBi, and tests the result on a probe."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel

import alibi_core
from alibi_core.backend.checks import host_values
from alibi_core.backend.models import LayerShape
from alibi_torch.transformers._interface import NAME, is_cross_attention
from alibi_torch.transformers._proof import ROUNDINGS, VERSIONS, difference, measuring, perturbed

POSITIONS = ("position_embeddings", "position_embedding", "embed_positions", "wpe")  # names of embeddings
CONFIG_DROPOUTS = ("attention_probs_dropout_prob", "attention_dropout", "attn_pdrop")  # of attention weights
LAYER_DROPOUTS = ("dropout", "attention_dropout", "attn_dropout", "dropout_prob")
PROBE_LEN, PROBE_PADDING = 13, 5  # in tokens


def with_alibi(
    model: nn.Module | PreTrainedConfig,
    *,
    slopes: Any | None = None,
    future_slopes: Any | None = None,
    prove: bool = True,
) -> nn.Module:
    """Give a model of ``transformers`` ALiBi in place of its position embeddings, in place.

    Every layer then computes ``softmax(scale * query @ key.mT - slopes * |i - j|) @ value``: in both directions in
    encoders (BERT, RoBERTa, XLM-RoBERTa, CamemBERT, ELECTRA, DistilBERT, ALBERT and others that use the registry of
    attention functions), as in Jina-embeddings-v2 and MosaicBERT; causally in decoders (GPT-2, OPT, BERT with
    ``is_decoder``). Learned position embeddings are removed, so rows may have any length; token types stay. A rotary
    model is accepted if its config turns off rotations in all layers, as SmolLM3's ``no_rope_layers`` can.

    Distances are counted along the row; padding may be anywhere in it, and is counted. A row of an encoder holds
    several sequences if ``position_ids`` restart; each sequence attends only to itself.

    Attention weights are not stored, so their dropout is set to 0 (BERT's default is 0.1). The config is copied first,
    because other models may share it. It stores ``alibi_slopes`` and ``alibi_future_slopes``. Load a model saved by
    ``save_pretrained`` by ``with_alibi(BertModel.from_pretrained(directory))``. ``from_pretrained`` alone gives a
    different model: without ALiBi, and with new random position embeddings, which it reports as missing.

    Call it before you make an optimizer. A model that was trained with position embeddings needs further training.

    Args:
        model: A model, or a module that contains models: everything that will be saved. Or a config, from which
            ``AutoModel`` makes a model.
        slopes: ``[num_heads]``, not negative, a PyTorch or NumPy array. Default: the slopes in the config, else the
            canonical slopes.
        future_slopes: ``[num_heads]``, for keys after the query, for an asymmetric encoder. Default: ``slopes``.
        prove: Run the model on a few rows of 13 to 26 tokens, to show that padding changes nothing and that ALiBi is
            the only positional information. A model on the meta device is not run; it gives a warning.

    Returns:
        The same model; a new model if a config was given.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If a model does not use the registry, has positions that cannot be removed, ALiBi already or several
            kinds of attention, or slopes are wrong. The model is then unchanged.
        RuntimeError: If the proof fails. The model is then unchanged.

    Example:
        >>> import torch
        >>> from transformers import BertConfig, BertModel
        >>> config = BertConfig(vocab_size=50, hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
        >>> model = with_alibi(BertModel(config))
        >>> model(torch.ones(1, 1000, dtype=torch.long)).last_hidden_state.shape
        torch.Size([1, 1000, 32])

    References:
        Günther et al., "Jina Embeddings 2", section 3, arXiv 2310.19923; Portes et al., "MosaicBERT", section 2, arXiv
        2312.17482.
    """
    if isinstance(model, PreTrainedConfig):
        model = AutoModel.from_config(model)
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module or a config of transformers, got {type(model).__name__}")
    roots = _roots_of(model)
    if not roots:
        raise ValueError(f"model must contain a model of transformers, got {type(model).__name__}")
    plans = [(root, *_check(root, slopes, future_slopes)) for root in roots]
    # If anything below raises, the stack undoes all changes; pop_all() keeps them.
    with contextlib.ExitStack() as undo:
        _copy_configs(model, undo)
        for root, past, future in plans:
            _convert(root, past, future, undo)
            if prove:
                _prove(root)
        undo.pop_all()
    return model


def _roots_of(model: nn.Module) -> list[Any]:
    """Return the models of transformers that are not inside another one."""
    return [model] if isinstance(model, PreTrainedModel) else [x for y in model.children() for x in _roots_of(y)]


def _layers_of(root: nn.Module) -> list[Any]:
    """Return the attention layers."""
    return [x for x in root.modules() if hasattr(x, "is_causal") and hasattr(x, "config")]


def _check(root: Any, slopes: Any, future_slopes: Any) -> tuple[list[float], list[float] | None]:
    """Check a model before anything is changed, and return its slopes and future slopes."""
    layers, name = _layers_of(root), type(root).__name__
    if any(getattr(x, "has_alibi_alone", False) for x in layers):
        raise ValueError(f"model must not have ALiBi yet, got a {name} that has it")
    for setting in ("is_encoder_decoder", "add_cross_attention", "output_attentions"):
        if getattr(root.config, setting, False):
            raise ValueError(f"{setting} must be False in the config of a model with ALiBi, got True")
    models = [x for x in root.modules() if isinstance(x, PreTrainedModel)]
    # If a version lacks this private name, the proof tells models whose attention does not change.
    can_ask = all(getattr(x, "_can_set_attn_implementation", lambda: True)() for x in models)
    if not layers or not can_ask or root.main_input_name != "input_ids":
        raise ValueError(
            f"model must read tokens and ask transformers' registry for its attention, got a {name}, which does not; "
            "models trained with ALiBi are sped up by accelerate"
        )
    if len({(x.is_causal, is_cross_attention(x, x.is_causal), id(x.config)) for x in layers}) > 1:
        raise ValueError(f"model must have one kind of attention, got a {name} with several")
    config, is_causal = layers[0].config, layers[0].is_causal
    kind = getattr(config, "position_embedding_type", None) or "absolute"
    if kind not in ("absolute", "nope", NAME):
        raise ValueError(f"position_embedding_type must be 'absolute' in the config, to be replaced, got {kind!r}")
    has_rotations = any(getattr(config, "no_rope_layers", None) or [1])  # 0 where a layer has none
    fixed = {type(x).__name__ for x in root.modules() if has_rotations and "Rotary" in type(x).__name__}
    fixed |= {type(x).__name__ for x in root.modules() if hasattr(x, "relative_attention_bias")}
    if fixed:
        raise ValueError(f"model must have positions that can be removed, got a {name} with {', '.join(sorted(fixed))}")
    given = [slopes, future_slopes]
    if slopes is None:
        saved = [getattr(config, name, None) for name in ("alibi_slopes", "alibi_future_slopes")]
        given = [torch.tensor(y) if x is None and y is not None else x for x, y in zip(given, saved, strict=True)]
    heads = config.num_attention_heads
    LayerShape.check(heads, heads, is_causal=is_causal, slopes=given[0], future_slopes=given[1])
    past, future = (None if x is None else host_values(x).tolist() for x in given)
    return past or alibi_core.slopes(heads, dtype="float64").tolist(), future


def _copy_configs(model: nn.Module, undo: contextlib.ExitStack) -> None:
    """Replace each config in the model by one copy, because other models may share it."""
    copies: dict[int, Any] = {}
    for module in model.modules():
        config = vars(module).get("config")
        if isinstance(config, PreTrainedConfig):
            _set(module, "config", copy.deepcopy(config, copies), undo)


def _convert(root: Any, slopes: list[float], future_slopes: list[float] | None, undo: contextlib.ExitStack) -> None:
    layers = _layers_of(root)
    config = layers[0].config
    root.set_attn_implementation(NAME)
    config.position_embedding_type = NAME  # as in the configs of Jina-embeddings-v2
    config.alibi_slopes, config.alibi_future_slopes = slopes, future_slopes
    for module in list(root.modules()):
        for name in POSITIONS:
            if isinstance(getattr(module, name, None), nn.Embedding):
                _set(module, name, NoPositions(), undo)
                if hasattr(module, "token_type_embeddings"):
                    undo.callback(module.register_forward_pre_hook(_add_defaults, with_kwargs=True).remove)
    for owner, names in [(config, CONFIG_DROPOUTS), *((layer, LAYER_DROPOUTS) for layer in layers)]:
        for name in names:
            dropout = getattr(owner, name, None)
            if isinstance(dropout, nn.Dropout):
                _set(dropout, "p", 0.0, undo)
            elif isinstance(dropout, float):
                _set(owner, name, 0.0, undo)
    for layer in layers:
        _set(layer, "has_alibi_alone", True, undo)


def _set(owner: Any, name: str, value: Any, undo: contextlib.ExitStack) -> None:
    undo.callback(*((setattr, owner, name, getattr(owner, name)) if hasattr(owner, name) else (delattr, owner, name)))
    setattr(owner, name, value)


class NoPositions(nn.Module):
    """Replaces position embeddings, and returns 0."""

    # Whether the model passes `position_ids` to its attention layers, which need them to separate packed sequences.
    reaches_attention = True

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        positions = kwargs.get("position_ids", args[0] if args else None)
        is_checked = not (self.reaches_attention or positions is None or torch.compiler.is_compiling())
        if is_checked and bool((positions.diff(dim=-1) <= 0).any()):
            raise ValueError(
                "position_ids must go up along a row, as this model does not give them to its attention, which could "
                "not tell sequences apart; give each sequence a row"
            )
        return torch.zeros(())


def _add_defaults(_: nn.Module, args: Any, kwargs: Any) -> Any:
    """Pass default token types and positions: the model would slice its own from buffers of limited length."""
    tokens = next(x for x in (*args, kwargs.get("input_ids"), kwargs.get("inputs_embeds")) if x is not None)
    counted = torch.arange(tokens.shape[1], device=tokens.device)[None]
    defaults = {"token_type_ids": torch.zeros_like(counted).expand(tokens.shape[:2]), "position_ids": counted}
    missing = {name: x for name, x in defaults.items() if len(args) < 2 and kwargs.get(name) is None}
    return args, kwargs | missing


def _prove(root: Any) -> None:
    """Run the model on a few rows; raise if padding, say, changes results by more than rounding explains."""
    name = type(root).__name__
    if any(x.is_meta for x in root.parameters()):
        warnings.warn(f"nothing was proved of a {name} on the meta device, which cannot run", stacklevel=3)
        return
    try:
        with measuring(root):
            for what, found, rounding in _differences(root):
                if not found <= rounding:  # also raises for NaN
                    raise RuntimeError(
                        f"{what} must change nothing in a model whose positions are ALiBi's alone, got a difference of "
                        f"{found:.3g} in the last hidden states of a {name}, where rounding explains {rounding:.3g} "
                        f"({VERSIONS}); the model is as it was: use another version of transformers, or prove=False if "
                        "this is meant"
                    )
    except (AttributeError, NotImplementedError, TypeError, ValueError) as error:
        raise ValueError(f"model must run without its own positions, got a {name}: {error}") from error


def _differences(root: Any) -> Iterator[tuple[str, float, float]]:
    """Yield the name of a change that must have no effect, its difference, and the difference allowed for rounding."""
    layers = _layers_of(root)
    config, generator = layers[0].config, torch.Generator().manual_seed(0)
    tokens = torch.randint(1, config.vocab_size, (1, PROBE_LEN), generator=generator)
    tokens = tokens.to(root.get_input_embeddings().weight.device)
    text, positions = torch.ones_like(tokens), torch.arange(PROBE_LEN, device=tokens.device)[None]

    def run(tokens: Tensor, **kwargs: Any) -> Tensor:
        return root.base_model(tokens, **kwargs).last_hidden_state

    alone = run(tokens)
    with perturbed(layers):
        rounding = ROUNDINGS * difference(run(tokens), alone)
    for side, pads in (("left", (PROBE_PADDING, 0)), ("right", (0, PROBE_PADDING))):
        padded = nn.functional.pad(tokens, pads, value=config.pad_token_id or 0)
        mask = torch.cat([nn.functional.pad(text, pads), torch.ones_like(padded)])
        got = run(torch.cat([padded, padded.flip(1)]), attention_mask=mask)[:1, pads[0] : pads[0] + PROBE_LEN]
        yield f"padding on the {side}", difference(got, alone), rounding
    # With slopes of 0 the model must not depend on the order of tokens.
    slopes = config.alibi_slopes, config.alibi_future_slopes
    config.alibi_slopes, config.alibi_future_slopes = [0.0] * len(slopes[0]), None
    plain, flipped = run(tokens), run(tokens.flip(1)).flip(1)
    config.alibi_slopes, config.alibi_future_slopes = slopes
    if any(slopes[0]) and torch.equal(plain, alone):
        raise RuntimeError(
            f"slopes must change the last hidden states, got the same with and without them in a {type(root).__name__} "
            f"({VERSIONS}); use another version of the latter"
        )
    if layers[0].is_causal:  # without the mask, transformers would read gaps as new sequences
        got = run(tokens, attention_mask=text, position_ids=2 * positions)
        yield "position_ids that count by two", difference(got, alone), rounding
        return
    yield "the order of tokens, where slopes are 0,", difference(flipped, plain), rounding
    # Two copies in one row: equal results show that position_ids separate packed sequences.
    twice = run(tokens.repeat(1, 2), position_ids=positions.repeat(1, 2))
    for module in root.modules():
        if isinstance(module, NoPositions):
            module.reaches_attention = difference(twice, alone.repeat(1, 2, 1)) <= rounding
