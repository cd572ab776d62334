"""Decoders whose code came with their checkpoint: Baichuan-13B, MPT of llm-foundry, Jais, BTLM and Refact."""

from __future__ import annotations

import functools
import types
import weakref
from typing import Any, ClassVar

import torch
from torch import Tensor

from alibi_core.backend import slope_values
from alibi_torch.transformers import _facts
from alibi_torch.transformers._modules import tokens_of
from alibi_torch.transformers._remote.models import Family, RemoteAttention, constant
from alibi_torch.transformers._rules import Rules

Heads = tuple[Tensor, Tensor, Tensor]  # queries, keys and values, [batch, heads, length, head_dim]


class DecoderAttention(RemoteAttention):
    """What the decoders' attention modules have in common: keys and values of earlier tokens come as a tuple."""

    alibi_rules: Rules
    past_name: str
    fused: str  # the projection of queries, keys and values, one behind the other

    @staticmethod
    def shape_of(module: Any) -> tuple[int, int]:
        return module.num_heads, module.head_dim

    @staticmethod
    def scale(module: Any) -> float:
        """Return the factor of a module's scores."""
        return float(module.head_dim**-0.5)

    def split(self, hidden: Tensor) -> Heads:
        """Return queries, keys and values."""
        mixed = getattr(self, self.fused)(hidden).unflatten(-1, (3, *self.shape_of(self)))
        query, key, value = mixed.permute(2, 0, 3, 1, 4).unbind()  # of [batch, length, 3, heads, head_dim]
        return query, key, value

    def finished(self, result: Tensor, present: Any, given: dict[str, Any]) -> Any:
        """Return the module's output, from ``[batch, length, features]`` and the keys and values of all tokens."""
        raise NotImplementedError

    def held(self, cache: Any) -> tuple[Tensor, Tensor]:
        """Return keys and values that a cache holds, ``[batch, heads, length, head_dim]``."""
        key, value = cache
        return key, value

    def kept(self, key: Tensor, value: Tensor) -> Any:
        """Return keys and values as a cache holds them."""
        return key, value

    @classmethod
    def rules(cls, module: Any, base: Any) -> Rules:
        heads, _ = cls.shape_of(module)
        slopes = cls.slopes(heads, base)
        return Rules("exact", slopes, slopes, 1.0, 1, cls.scale(module), counts_text=False)

    @staticmethod
    def slopes(heads: int, base: Any) -> tuple[float, ...]:
        """Return the slopes of a base model."""
        return tuple(slope_values(heads))

    def attended(self, given: dict[str, Any]) -> Any:
        query, key, value = self.split(given[self.alibi_names[0]])
        past, cache = 0, given.get(self.past_name)
        if cache is not None and len(cache):
            earlier = self.held(cache)
            past = earlier[0].shape[2]
            key, value = (torch.cat(pair, dim=2) for pair in zip(earlier, (key, value), strict=True))
        result = self.alibi_rules.attend(query, key, value, given[self.bias_name], past, None)
        return self.finished(result.transpose(1, 2).flatten(2), self.kept(key, value), given)


class DecoderFamily(Family):
    """A decoder that is kept from building its bias, and whose mask of padding goes to its layers in place of that."""

    unsupported = ("head_mask", "encoder_hidden_states", "prefix_mask", "sequence_id")

    def reason(self, base: Any, given: dict[str, Any]) -> str | None:
        cache = given.get("past_key_values")
        if cache is not None and not isinstance(cache, (tuple, list)):
            return f"past_key_values must be a tuple of keys and values of each layer, got {type(cache).__name__}"
        return super().reason(base, given)

    def past(self, base: Any, given: dict[str, Any]) -> int:
        cache = given.get("past_key_values")
        if not cache or cache[0] is None or len(cache[0]) == 0:
            return 0
        return int(self.attention_of(base)[0].held(cache[0])[0].shape[2])

    def encoded(self, base: Any, given: dict[str, Any], mask: Tensor | None) -> Tensor:
        """Return what the layers get in place of a bias."""
        tokens = tokens_of(given)
        if mask is None:
            return _facts.nothing(tokens.device)
        return _facts.of_padding(mask, tokens.shape[1], self.past(base, given))


# --- Baichuan ---------------------------------------------------------------------------------------------------------


class BaichuanAttention(DecoderAttention):
    """Baichuan's attention module; that of the 7B models, with rotary positions, has another part."""

    bias_name, past_name, fused = "attention_mask", "past_key_value", "W_pack"
    parts = frozenset({"W_pack", "o_proj"})

    @staticmethod
    def rows(module: Any) -> dict[str, int]:
        return {"W_pack": 3 * module.hidden_size}

    def finished(self, result: Tensor, present: Any, given: dict[str, Any]) -> Any:
        module: Any = self
        return module.o_proj(result), None, present if given.get("use_cache") else None


class BaichuanFamily(DecoderFamily):
    """Baichuan keeps ``[heads, length, length]`` in evaluation, and forms a mask of that size for each text."""

    attention: ClassVar = {"BaichuanAttention": BaichuanAttention}

    def attention_of(self, base: Any) -> list[Any]:
        return [layer.self_attn for layer in base.layers]

    def builders(self, base: Any) -> list[tuple[Any, str]]:
        return [(base, "get_alibi_mask")]

    def begin(self, base: Any, given: dict[str, Any], mask: Tensor | None) -> dict[str, Any]:
        base.get_alibi_mask = functools.partial(constant, self.encoded(base, given, mask))
        base.alibi_mask = None
        return {"attention_mask": None}

    def end(self, base: Any) -> None:
        if "get_alibi_mask" in vars(base):
            base.alibi_mask = None  # which it keeps in training
        super().end(base)

    def prepare_probe(self, base: Any, length: int) -> None:
        base.first_run, base.max_cache_pos = True, length

    def release(self, base: Any) -> None:
        if not base.first_run:
            base.first_run = True  # so that its own code builds it again
            base._buffers.pop("future_mask", None)


# --- MPT, as llm-foundry has it ---------------------------------------------------------------------------------------


class MptAttention(DecoderAttention):
    """MPT's attention module: that of llm-foundry, and its early form that Replit-code has."""

    bias_name, past_name = "attn_bias", "past_key_value"
    parts = frozenset({"out_proj"})
    optional = frozenset({"Wqkv", "Wq", "Wk", "Wv", "q_ln", "k_ln"})

    @staticmethod
    def shape_of(module: Any) -> tuple[int, int]:
        return module.n_heads, module.d_model // module.n_heads

    @staticmethod
    def kv_heads(module: Any) -> int:
        """Return how many heads keys and values have."""
        early = 1 if hasattr(module, "head_dim") else module.n_heads  # which one of the two early modules has
        return int(getattr(module, "kv_n_heads", early))

    @staticmethod
    def rows(module: Any) -> dict[str, int]:
        heads, head_dim = MptAttention.shape_of(module)
        shared = MptAttention.kv_heads(module) * head_dim
        if hasattr(module, "Wqkv"):
            return {"Wqkv": heads * head_dim + 2 * shared}
        return {"Wq": heads * head_dim, "Wk": shared, "Wv": shared}

    @classmethod
    def check(cls, module: Any) -> None:
        super().check(module)
        unknown = {"attn_logit_softcapping": None, "sliding_window_size": -1, "reuse_kv_layer_idx": None}
        unknown |= {"reuse_kv_x_layer_idx": None, "qk_gn": False, "nope": False}
        for name, wanted in unknown.items():
            if getattr(module, name, wanted) != wanted:
                raise ValueError(f"{name} must be {wanted} for a model to be accelerated, got {getattr(module, name)}")
        tuning = getattr(module, "attn_temperature_tuning", None) or {}
        if tuning.get("attn_scale", 0) != 0:
            raise ValueError(f"attn_temperature_tuning must have an attn_scale of 0, got {tuning}")
        if module.attn_impl != "torch":
            raise ValueError(f"attn_impl must be 'torch', got {module.attn_impl!r}; set it in the config's attn_config")

    @staticmethod
    def scale(module: Any) -> float:
        return float(module.softmax_scale)

    @staticmethod
    def slopes(heads: int, base: Any) -> tuple[float, ...]:
        return tuple(slope_values(heads, bias_max=base.alibi_bias_max, contract="mpt"))

    @property
    def dropped(self) -> float:
        module: Any = self
        return float(module.attn_dropout_p) if module.training else 0.0

    def split(self, hidden: Tensor) -> Heads:
        module: Any = self
        if hasattr(module, "get_qkv"):
            found = module.get_qkv(x=hidden)
        else:
            mixed, (heads, head_dim), shared = module.Wqkv(hidden), self.shape_of(module), self.kv_heads(module)
            if module.clip_qkv:
                mixed = mixed.clamp(min=-module.clip_qkv, max=module.clip_qkv)
            found = mixed.split([heads * head_dim, shared * head_dim, shared * head_dim], dim=-1)
            if module.qk_ln:
                norms = module.q_ln, module.k_ln
                found = (*(norm(x).to(x.dtype) for norm, x in zip(norms, found[:2], strict=True)), found[2])
        query, key, value = (x.unflatten(-1, (-1, self.shape_of(module)[1])).transpose(1, 2) for x in found)
        return query, key, value

    def held(self, cache: Any) -> tuple[Tensor, Tensor]:
        key, value = cache
        if key.ndim == 4:  # [batch, heads, head_dim, length]
            return key.mT, value
        key, value = (x.unflatten(-1, (-1, self.shape_of(self)[1])).transpose(1, 2) for x in (key, value))
        return key, value

    def kept(self, key: Tensor, value: Tensor) -> Any:
        if hasattr(self, "get_qkv"):
            return key.mT, value
        return key.transpose(1, 2).flatten(2), value.transpose(1, 2).flatten(2)

    def finished(self, result: Tensor, present: Any, given: dict[str, Any]) -> Any:
        module: Any = self
        return module.out_proj(result), None, present if given.get("past_key_value") is not None else None


class MptFamily(DecoderFamily):
    """MPT adds a bias ``[1, heads, 1, length]`` to scores of length times length."""

    attention: ClassVar = dict.fromkeys(
        ("MultiheadAttention", "MultiQueryAttention", "GroupedQueryAttention"), MptAttention
    )

    def attention_of(self, base: Any) -> list[Any]:
        return [block.attn for block in base.blocks]

    def builders(self, base: Any) -> list[tuple[Any, str]]:
        return [(base, "_attn_bias")]

    def check(self, base: Any) -> None:
        super().check(base)
        for name, wanted in (("alibi", True), ("prefix_lm", False), ("attn_uses_sequence_id", False)):
            if getattr(base, name, wanted) != wanted:
                raise ValueError(f"{name} must be {wanted} for a model to be accelerated, got {getattr(base, name)}")

    def begin(self, base: Any, given: dict[str, Any], mask: Tensor | None) -> dict[str, Any]:
        base._attn_bias = functools.partial(_bias_and_mask, self.encoded(base, given, mask))
        return {}


def _bias_and_mask(bias: Tensor, *_: Any, attention_mask: Any = None, **__: Any) -> tuple[Tensor, Any]:
    return bias, attention_mask


# --- Jais and BTLM ----------------------------------------------------------------------------------------------------


class JaisAttention(DecoderAttention):
    """The attention module of Jais and BTLM, a GPT-2's with a bias."""

    bias_name, past_name, fused = "position_bias", "layer_past", "c_attn"
    parts = frozenset({"c_attn", "c_proj", "attn_dropout", "resid_dropout"})
    dropout_name = "attn_dropout"

    @staticmethod
    def rows(module: Any) -> dict[str, int]:
        return {}  # its weights are transposed

    @staticmethod
    def scale(module: Any) -> float:
        scale = module.head_dim**-module.attn_scale_power if module.scale_attn_weights else 1.0
        return float(scale / (module.layer_idx + 1 if module.scale_attn_by_inverse_layer_idx else 1))

    @staticmethod
    def slopes(heads: int, base: Any) -> tuple[float, ...]:
        factor = (getattr(base.relative_pe, "alibi_scaling", None) or {}).get("factor") or 1.0
        return tuple((base.relative_pe.slopes.detach().double().flatten() / factor).tolist())

    def finished(self, result: Tensor, present: Any, given: dict[str, Any]) -> Any:
        module: Any = self
        return module.resid_dropout(module.c_proj(result)), present if given.get("use_cache") else None


class JaisFamily(DecoderFamily):
    """Jais and BTLM form ``[heads, length, length]`` before the layers."""

    attention: ClassVar = {"JAISAttention": JaisAttention, "BTLMAttention": JaisAttention}

    def attention_of(self, base: Any) -> list[Any]:
        return [block.attn for block in base.h]

    def builders(self, base: Any) -> list[tuple[Any, str]]:
        return [(base.relative_pe, "forward")]

    def check(self, base: Any) -> None:
        if getattr(base, "relative_pe", None) is None:
            raise ValueError("position_embedding_type must be 'alibi' in the config, got a model with other positions")
        super().check(base)
        scaling = getattr(base.relative_pe, "alibi_scaling", None)
        if scaling is not None and scaling.get("factor") is None:
            raise ValueError(f"alibi_scaling must be a constant factor, got {scaling}, which depends on the length")

    def begin(self, base: Any, given: dict[str, Any], mask: Tensor | None) -> dict[str, Any]:
        base.relative_pe.forward = functools.partial(constant, self.encoded(base, given, mask))
        return {}


# --- Refact -----------------------------------------------------------------------------------------------------------


class RefactAttention(DecoderAttention):
    """Refact's attention module: one head of keys and values, in one projection or in two."""

    bias_name, past_name = "alibi", "layer_past"
    parts = frozenset({"q", "c_proj"})
    optional = frozenset({"k", "v", "kv"})

    @staticmethod
    def rows(module: Any) -> dict[str, int]:
        size = module.head_dim
        return {"q": size * module.num_heads} | ({"kv": 2 * size} if hasattr(module, "kv") else {"k": size, "v": size})

    def split(self, hidden: Tensor) -> Heads:
        module: Any = self
        key, value = (
            module.kv(hidden).chunk(2, dim=-1) if hasattr(module, "kv") else (module.k(hidden), module.v(hidden))
        )
        query = module.q(hidden).unflatten(-1, self.shape_of(module)).transpose(1, 2)
        return query, key[:, None], value[:, None]

    def finished(self, result: Tensor, present: Any, given: dict[str, Any]) -> Any:
        module: Any = self
        return module.c_proj(result), present if given.get("use_cache") else None


class _Rewired:
    """The forward of a base model, in which a name of its module means a function that returns the model's mark.

    It is kept: what a compiler makes of the code goes by its globals, and is lost with them.

    Attributes:
        base: The model, unless it is gone.
        function: That forward.
    """

    def __init__(self, base: Any, name: str) -> None:
        own, self.base = base.alibi_class.forward, weakref.ref(base)
        known: Any = self.base  # so that nothing keeps the model but its user
        names = own.__globals__ | {name: lambda *_, **__: known().alibi_mark}
        del names["__name__"]  # or a compiler would look for the others in the module of that name
        code = own.__code__.replace()  # a compiler keeps its results by the code, other models' among them
        self.function = types.FunctionType(code, names, own.__name__, own.__defaults__, own.__closure__)
        self.function.__kwdefaults__ = own.__kwdefaults__

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a copied model makes its own


class RefactFamily(DecoderFamily):
    """Refact forms ``[batch, heads, length, length]`` by a function of its module, and a mask of queries times keys."""

    attention: ClassVar = {"Attention": RefactAttention}
    takes_padding: ClassVar = False
    builder: ClassVar = "get_alibi_biases"

    def attention_of(self, base: Any) -> list[Any]:
        return [block.attn for block in base.h]

    def builders(self, base: Any) -> list[tuple[Any, str]]:
        return [(base, "_make_mask")]

    def check(self, base: Any) -> None:
        super().check(base)
        if self.builder not in type(base).forward.__code__.co_names:
            raise ValueError(
                f"model must have a forward that calls {self.builder}, got a {type(base).__name__} without; leave it "
                "as it is"
            )

    def reason(self, base: Any, given: dict[str, Any]) -> str | None:
        if given.get("attention_mask") is not None:
            return "attention_mask must be None, as the model takes it for one of queries times keys"
        return super().reason(base, given)

    def begin(self, base: Any, given: dict[str, Any], mask: Tensor | None) -> dict[str, Any]:
        base.alibi_mark = self.encoded(base, given, mask)
        base._make_mask = functools.partial(constant, torch.zeros(0, dtype=torch.bool))
        return {}

    def end(self, base: Any) -> None:
        super().end(base)
        vars(base).pop("alibi_mark", None)

    def retain(self, base: Any) -> None:
        vars(base).pop("alibi_forward", None)

    def call(self, base: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if "alibi_mark" not in vars(base):
            return super().call(base, args, kwargs)
        kept = getattr(base, "alibi_forward", None)  # not of vars(base), where compilers would find None for good
        if kept is None or kept.base() is not base:  # of the model that this is a shallow copy of
            kept = base.alibi_forward = _Rewired(base, self.builder)
        return kept.function(base, *args, **kwargs)
