"""The attention modules of transformers, their attention computed by this library. Projections stay theirs."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.bloom.modeling_bloom import BloomAttention
from transformers.models.bloom.modeling_bloom import build_alibi_tensor as build_bloom_tensor
from transformers.models.falcon.modeling_falcon import FalconAttention
from transformers.models.falcon.modeling_falcon import build_alibi_tensor as build_falcon_tensor
from transformers.models.mpt.modeling_mpt import MptAttention, build_mpt_alibi_tensor

from alibi_torch.transformers._cache_layers import as_held, extended
from alibi_torch.transformers._facts import is_encoded, is_recorded
from alibi_torch.transformers._paths import Paths
from alibi_torch.transformers._rules import Rules


class Accelerated:
    """What the attention modules below have in common.

    Attributes:
        alibi_class: The module's own class, whose code computes what the library does not.
        alibi_rules: What the module computes.
        alibi_paths: What has computed the calls of its model.
    """

    alibi_class: Any
    alibi_rules: Rules
    alibi_paths: Paths
    attention_dropout: Any
    layer_idx: int | None
    change: str | None  # why the module's code computes something else than it did when it was accelerated

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Any, cache: Any) -> Tensor:
        """Return the attention of ``[batch, heads, length, head_dim]``, heads merged: ``[batch, q_len, features]``."""
        if cache is None:
            result = self.alibi_rules.attend(query, key, value, mask, 0, None)
        else:
            result = extended(cache, self.layer_idx, query, key, value, mask, self.alibi_rules)
        batch, heads, length, head_dim = result.shape
        return result.transpose(1, 2).reshape(batch, length, heads * head_dim)

    @property
    def dropped(self) -> float:
        """The share of attention weights that a call drops."""
        return dropped_by(self.attention_dropout)

    @property
    def shows_weights(self) -> bool:
        """Whether the attention weights are shown to code of somebody else."""
        return shows_weights(self.attention_dropout)

    def is_of_library(self, mask: Any) -> bool:
        """Whether the library computes a call, by its mask; else the module's own code does, as is noted."""
        if is_encoded(mask):
            return True
        if not self.alibi_paths.is_noted:
            self.alibi_paths.by_model(self, "layers must be called by their model, got a call without the model's mask")
        return False


class AcceleratedBloomAttention(Accelerated, BloomAttention):
    """BLOOM's attention module."""

    @property
    def change(self) -> str | None:
        """Why the module's own code computes something else than it did when it was accelerated; None if not."""
        return changed_scale("inv_norm_factor", self) or (
            None if self.beta == 1 else f"beta must be 1, got {self.beta}"
        )

    @staticmethod
    def rules(module: BloomAttention, config: Any, contract: str) -> Rules:
        """Return what a module computes."""
        if module.beta != 1:
            raise ValueError(f"beta must be 1 for a model to be accelerated, got {module.beta}")
        check_sizes(module.query_key_value, module.num_heads * 3 * module.head_dim, module.num_heads)
        place = next((x.device for x in module.parameters() if not x.is_meta), torch.device("cpu"))
        text = torch.ones(1, 2, dtype=torch.long, device=place)
        # A power of two numbers may be a unit in the last place off, and which one depends on the processor.
        own = build_bloom_tensor(text, module.num_heads, torch.float32)[:, 0, 1]
        return Rules.of("bloom", contract, module.num_heads, module.inv_norm_factor, model_slopes=own)

    def forward(
        self,
        hidden_states: Tensor,
        residual: Tensor,
        alibi: Any,
        attention_mask: Any,
        layer_past: Any = None,
        **others: Any,
    ) -> tuple[Tensor, Any]:
        """Return what the model's own does; no weights where the library computes it."""
        if not self.is_of_library(attention_mask):
            return self.alibi_class.forward(
                self, hidden_states, residual, alibi, attention_mask, layer_past=layer_past, **others
            )
        query, key, value = self._reshape(self.query_key_value(hidden_states))
        attended = self.attend(query, key, value, attention_mask, layer_past)
        if self.pretraining_tp > 1 and self.slow_but_exact:  # without a bias
            parts = zip(
                attended.tensor_split(self.pretraining_tp, dim=-1),
                self.dense.weight.tensor_split(self.pretraining_tp, dim=1),
                strict=True,
            )
            output = torch.stack([F.linear(x, weight) for x, weight in parts]).sum(dim=0)
        else:
            output = self.dense(attended)
        return residual + F.dropout(output, p=self.hidden_dropout, training=self.training), None


class AcceleratedMptAttention(Accelerated, MptAttention):
    """MPT's attention module."""

    shows_weights = False  # it has no module for their dropout

    @staticmethod
    def rules(module: MptAttention, config: Any, contract: str) -> Rules:
        """Return what a module computes."""
        own = config.attn_config
        for name, wanted in (("alibi", True), ("prefix_lm", False), ("qk_ln", False), ("attn_uses_sequence_id", False)):
            if getattr(own, name) != wanted:
                raise ValueError(f"attn_config.{name} must be {wanted} for a model to be accelerated, got {not wanted}")
        check_sizes(module.Wqkv, 3 * module.n_heads * module.head_dim, module.n_heads)
        return Rules.of("mpt", contract, module.n_heads, module.softmax_scale, bias_max=own.alibi_bias_max)

    @property
    def dropped(self) -> float:
        """The share of attention weights that a call drops."""
        return float(self.attn_dropout_p) if self.training else 0.0

    @property
    def change(self) -> str | None:
        """Why the module's own code computes something else than it did when it was accelerated; None if not."""
        return changed_scale("softmax_scale", self)

    def forward(
        self,
        hidden_states: Tensor,
        position_bias: Any,
        past_key_values: Any = None,
        attention_mask: Any = None,
        **others: Any,
    ) -> tuple[Tensor, Any]:
        """Return what the model's own does; no weights where the library computes it."""
        if not self.is_of_library(attention_mask):
            if position_bias is not None and position_bias.numel() == 0:
                past = 0 if past_key_values is None else int(past_key_values.get_seq_length(self.layer_idx))
                held = past + hidden_states.shape[1] if attention_mask is None else attention_mask.shape[-1]
                position_bias = build_mpt_alibi_tensor(
                    self.n_heads, max(self.max_seq_length, held), device=hidden_states.device
                )
            return self.alibi_class.forward(
                self,
                hidden_states,
                position_bias,
                past_key_values=past_key_values,
                attention_mask=attention_mask,
                **others,
            )
        mixed = self.Wqkv(hidden_states)
        if self.clip_qkv:
            mixed = mixed.clamp(min=-self.clip_qkv, max=self.clip_qkv)
        mixed = mixed.view(*mixed.shape[:2], 3, self.n_heads, self.head_dim).transpose(1, 3)
        query, key, value = mixed.unbind(dim=2)
        return self.out_proj(self.attend(query, key, value, attention_mask, past_key_values)), None


# How often Falcon adds its bias, by the implementation: eager, to the scores and to the mask both.
ADDITIONS = {"sdpa": 1, "eager": 2}


class AcceleratedFalconAttention(Accelerated, FalconAttention):
    """Falcon's attention module. Key/value heads that queries share are cached once, not once for each query head."""

    @property
    def dropped(self) -> float:
        """The share of attention weights that a call drops."""
        share = float(getattr(self.attention_dropout, "p", 0))
        if share and self.config._attn_implementation != "eager":
            return share if self.training else 0.0
        return dropped_by(self.attention_dropout)

    @property
    def change(self) -> str | None:
        """Why the module's own code computes something else than it did when it was accelerated; None if not."""
        now, rules = self.config._attn_implementation, self.alibi_rules
        if rules.contract == "exact" or ADDITIONS.get(now) == rules.additions:
            return changed_scale("inv_norm_factor", self)
        return f"attn_implementation must be that which the model was accelerated with, got {now!r}"

    @staticmethod
    def rules(module: FalconAttention, config: Any, contract: str) -> Rules:
        """Return what a module computes."""
        additions = ADDITIONS.get(config._attn_implementation)
        if additions is None:
            raise ValueError(
                "attn_implementation must be 'sdpa' or 'eager' for a Falcon model with ALiBi, got "
                f"{config._attn_implementation!r}"
            )
        shared = 2 * module.num_kv_heads
        check_sizes(module.query_key_value, (module.num_heads + shared) * module.head_dim, module.num_heads)
        divisor = math.sqrt(module.head_dim)
        scale = module.inv_norm_factor
        if additions > 1 and not math.isclose(scale * divisor, 1.0):  # one of its biases is scaled by it
            raise ValueError(f"inv_norm_factor must be head_dim**-0.5 where attention is eager, got {scale}")
        return Rules.of("falcon", contract, module.num_heads, scale, bias_divisor=divisor, additions=additions)

    def forward(
        self, hidden_states: Tensor, alibi: Any, attention_mask: Any, layer_past: Any = None, **others: Any
    ) -> tuple[Tensor, Any]:
        """Return what the model's own does; no weights where the library computes it."""
        if not self.is_of_library(attention_mask):
            if alibi is None:
                alibi, attention_mask = self._with_bias(attention_mask, hidden_states.dtype)
            if layer_past is not None and self.new_decoder_architecture:
                layer_past = _CacheOfGroups(layer_past, self.num_heads // self.num_kv_heads)
            return self.alibi_class.forward(self, hidden_states, alibi, attention_mask, layer_past=layer_past, **others)
        fused = self.query_key_value(hidden_states)
        # Of each group the queries, then a key and a value.
        fused = fused.unflatten(-1, (self.num_kv_heads, -1, self.head_dim))
        query, key, value = fused[..., :-2, :].flatten(2, 3), fused[..., -2, :], fused[..., -1, :]
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        return self.dense(self.attend(query, key, value, attention_mask, layer_past)), None

    def _with_bias(self, mask: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the bias that the model forms of a causal mask ``[batch, 1, q_len, kv_len]``, and the two as one."""
        visible = mask if mask.dtype == torch.bool else mask > -1
        text = visible[:, 0, -1].long()  # which the last query sees all of
        alibi = build_falcon_tensor(text, self.num_heads, dtype).unflatten(0, (len(text), -1))
        whole = (alibi / math.sqrt(self.head_dim)).masked_fill(~visible, torch.finfo(dtype).min)
        return alibi, whole


class _CacheOfGroups:
    """A cache whose key/value heads are held once, for Falcon's own code, which repeats them for each query head."""

    def __init__(self, cache: Any, group: int) -> None:
        self.cache, self.group = cache, group

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        """Append keys and values, and return those of all tokens, repeated."""
        layer = self.cache.layers[layer_idx] if layer_idx < len(self.cache.layers) else None
        once = as_held(layer, key[:, :: self.group], value[:, :: self.group])
        held = self.cache.update(*once, layer_idx, *args, **kwargs)
        return tuple(x.repeat_interleave(key.shape[1] // x.shape[1], dim=1) for x in held)


def attention_modules(model: Any, *, missing_is_error: bool = True) -> list[Any]:
    """Return the attention modules of an accelerated model, in order.

    Raises:
        ValueError: If there is none, unless that is no error.
    """
    found = [x for x in model.modules() if isinstance(x, Accelerated)]
    if not found and missing_is_error:
        raise ValueError(
            f"model must be accelerated, got {type(model).__name__}; see alibi_torch.transformers.accelerate"
        )
    return found


def layers_of(base: Any) -> list[Any]:
    """Return the attention modules of an accelerated base model, without a search where it goes by its usual name.

    None stands for that of a block in a wrapper, unless the wrapper shows what it holds, as PyTorch's do.
    """
    # Not by its class, as it may be in a wrapper that compiles it.
    if hasattr(base, "blocks"):
        return [getattr(block, "attn", None) for block in base.blocks]
    if hasattr(base, "h"):
        return [getattr(block, "self_attention", None) for block in base.h]
    return attention_modules(base, missing_is_error=False)


def blocks_of(base: Any) -> list[Any]:
    """Return the blocks of a base model that hand its mask to their attention, where they go by a usual name."""
    return next((list(getattr(base, name)) for name in ("blocks", "h", "layers") if hasattr(base, name)), [])


def check_sizes(projection: Any, features: int, num_heads: int) -> None:
    """Check that a module holds all of its heads, not some that a tensor-parallel plan left it."""
    weight = getattr(projection, "weight", None)
    # What quantization leaves of a weight has a shape of its own, and what wraps a layer need not have one.
    has_rows = isinstance(weight, Tensor) and weight.is_floating_point()
    held = weight.shape[0] if has_rows else getattr(projection, "out_features", features)
    if held != features:
        raise ValueError(
            f"projection of queries, keys and values must have {features} rows for its {num_heads} heads, got {held}; "
            "slopes are those of all heads: change the model before it is split"
        )


def check_own(module: Any, kind: type) -> None:
    """Check that a module computes what its kind does, and not what a subclass or a patch makes of it."""
    names = [name for name, x in vars(kind).items() if callable(x) and name != "__init__"]
    changed = [name for name in names if getattr(type(module), name) is not getattr(kind, name)]
    if "forward" in vars(module) and "_old_forward" not in vars(module):  # which hooks for several devices keep
        changed.append("forward")
    if changed:
        raise ValueError(
            f"attention of the model must be that of {kind.__name__}, got {type(module).__name__} with a "
            f"{changed[0]} of its own; accelerate first, or leave the model as it is"
        )


# Of a module, and with a prefix of all modules.
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def changed_scale(name: str, module: Any) -> str | None:
    """Return why a module's own code computes other scores than when it was accelerated; None if it does not."""
    now, then = getattr(module, name), module.alibi_rules.scale
    return None if now == then else f"{name} must be that which the model was accelerated with, {then}, got {now}"


def dropped_by(dropout: Any) -> float:
    """Return the share of attention weights that a module for it drops now."""
    share = float(getattr(dropout, "p", 0))
    return share if share and dropout.training else 0.0


def shows_weights(dropout: Any) -> bool:
    """Whether a module that drops attention weights, or a hook on it, is somebody else's."""
    own, of_all = vars(dropout), vars(nn.modules.module)
    if type(dropout) not in (nn.Dropout, nn.Identity) or any(map(own.get, HOOKS)):
        return True
    return any(any(map(_is_of_others, hooks.values())) for name in HOOKS if (hooks := of_all[f"_global{name}"]))


def _is_of_others(hook: Any) -> bool:
    """Whether a hook may change what it sees, as PyTorch's own does not."""
    function = getattr(hook, "func", hook)  # of a partial
    return getattr(function, "__module__", "").partition(".")[0] not in ("torch", "alibi_torch")


def reason_of_hooks(base: Any, layers: list[Any]) -> str | None:
    """Return why the library does not compute calls of a base model with hooks in it; None if it does."""
    if any(layer.shows_weights for layer in layers):
        return "dropout of attention weights must be a Dropout without hooks, as the library has no weights to show it"
    for name, modules in (("attention", layers), ("block", blocks_of(base))):
        if any(_shows_mask(module) for module in modules):
            return f"{name} must have no hook that sees its mask, as the library has none of queries times keys to show"
    return None


def _shows_mask(module: Any) -> bool:
    """Whether a module's mask is shown to code of somebody else."""
    own = vars(module)
    for kind in ("_forward_pre_hooks", "_forward_hooks"):
        shown = own[f"{kind}_with_kwargs"]
        if shown and any(_is_of_others(hook) for key, hook in own[kind].items() if key in shown):
            return True
    return "forward" in own and "_old_forward" not in own


def tokens_of(given: dict[str, Any]) -> Any:
    """Return the tokens of a call, ``[batch, length, ...]``, from its arguments by name."""
    return given.get("inputs_embeds") if given.get("input_ids") is None else given["input_ids"]


def reason_for_own_code(config: Any, given: dict[str, Any], dropped: list[float]) -> str | None:
    """Return why the library does not compute a call of any family, as a sentence that begins with an argument.

    It stores no attention weights, and chooses its way by the values of a call, which a recorded one does not have.
    ``dropped`` are the shares of weights that layers drop.
    """
    weights = given.get("output_attentions")
    if getattr(config, "output_attentions", False) if weights is None else weights:
        return "output_attentions must be False, as the library stores no attention weights, got True"
    if dropped and max(dropped) > 0:
        return f"dropout of attention weights must be 0 or off, as no weights are stored, got {max(dropped)}"
    if not torch.compiler.is_compiling() and is_recorded([tokens_of(given)]):
        return "recorder must be torch.compile or torch.export, as others keep what is chosen for one call's values"
    return None


def with_arguments(names: tuple[str, ...], args: Any, kwargs: Any, changed: dict[str, Any]) -> tuple[Any, Any]:
    """Return a call's arguments, some of them replaced, in their places, as other hooks may count on those."""
    changed = dict(changed)
    args = tuple(changed.pop(name, x) for name, x in zip(names, args, strict=False)) + args[len(names) :]
    return args, kwargs | changed
