"""Contracts: how families of trained models count and round their bias, to reproduce a checkpoint's numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from alibi_core._arrays import Array, DType, Namespace, asarray, astype, checks, device_of


@dataclass(frozen=True)
class Contract:
    """How one family of models computes its bias.

    A key's bias is a multiple of its distance from the query, of its position (counted from the first key), or of its
    position minus the position of the last key. In exact arithmetic all three give the same attention; in floating
    point they differ.
    """

    name: str  # as users pass it
    scheme: str | None  # the rule of its slopes; None for the rule that the caller names
    counts_from: Literal["query", "first key", "last key"]
    multiplies_in_bfloat16: bool = False  # position and product are rounded to bfloat16; else the product is float32
    is_always_float32: bool = False  # the bias stays float32 in models of lower precision
    takes_bias_max: bool = True  # its slopes depend on ``bias_max``

    @property
    def is_key_only(self) -> bool:
        return self.counts_from != "query"

    @classmethod
    def check(
        cls,
        name: str,
        slopes: int | Array,
        future_slopes: Array | None,
        is_causal: bool,
        allow_negative_slopes: bool,
    ) -> Contract:
        """Return the contract called ``name``, having checked that it allows the other arguments of a bias."""
        contract = named(name)
        if contract.scheme is None:
            return contract
        if not checks.is_int(slopes):
            raise ValueError(
                f"slopes must be the number of heads with contract {name!r}, whose slopes they are, got "
                f"{type(slopes).__name__}"
            )
        if checks.boolean("allow_negative_slopes", allow_negative_slopes):
            raise ValueError(f"allow_negative_slopes must be False with contract {name!r}, got True")
        if contract.is_key_only and not checks.boolean("is_causal", is_causal):
            raise ValueError(f"is_causal must be True with contract {name!r}, whose models are causal, got False")
        if future_slopes is not None:
            raise ValueError(f"future_slopes must be None with contract {name!r}, got {type(future_slopes).__name__}")
        return contract

    def check_dtype(self, xp: Namespace, dtype: DType) -> None:
        """Check that models of this family add a bias of ``dtype``."""
        if self.is_always_float32 and dtype != xp.float32:
            raise ValueError(
                f"dtype must be float32 with contract {self.name!r}, whose models add a float32 bias whatever dtype "
                f"they have, got {dtype}"
            )

    def row(self, xp: Namespace, slopes: Any, counts: Any) -> Any:
        """Return the bias of keys, ``[..., num_heads, 1, kv_len]`` float32; ``counts`` are their positions."""
        rates = slopes[:, None, None]  # [num_heads, 1, 1]
        counts = astype(xp, counts, xp.float32)[..., None, None, :]  # [..., 1, 1, kv_len]
        return _product_in_bfloat16(xp, rates, counts) if self.multiplies_in_bfloat16 else rates * counts


CONTRACTS = {
    contract.name: contract
    for contract in (
        Contract("exact", None, "query"),
        Contract("geometric", "geometric", "query"),
        Contract("bloom", "bloom", "first key", takes_bias_max=False),
        Contract("falcon", "falcon", "first key", multiplies_in_bfloat16=True, takes_bias_max=False),
        Contract("mpt", "mpt", "last key", is_always_float32=True),
    )
}


def named(name: str) -> Contract:
    """Return the contract called ``name``, or raise an error that lists all."""
    return CONTRACTS[checks.one_of("contract", name, tuple(CONTRACTS))]


def _product_in_bfloat16(xp: Namespace, rates: Any, counts: Any) -> Any:
    """Return ``bfloat16(rates * bfloat16(counts))`` as float32, for integer ``counts`` and exact bfloat16 ``rates``.

    A cast to bfloat16 and back will not do: compilers remove it, and NumPy has no bfloat16. So numbers are scaled to
    integers of 8 bits and rounded by ``round``, which rounds half to even in every library.
    """
    power, inverse = power_below(xp, counts, range(32))
    counts = xp.round(counts * inverse * 2.0**7)  # bfloat16's 8 bits as an integer, at most 2**8 in size
    rate_power, rate_inverse = power_below(xp, rates, range(-32, 32))
    product = counts * (rates * rate_inverse)  # exact, of 16 bits; below 2**9 in size, so its last place is 1 or 2
    product = xp.where(xp.abs(product) < 2**8, xp.round(product), xp.round(product * 0.5) * 2.0)
    return product * (power * 2.0**-7 * rate_power)


def power_below(xp: Namespace, values: Any, exponents: range) -> tuple[Any, Any]:
    """Return the largest power of two that is at most ``abs(values)``, and its inverse.

    Only powers with ``exponents`` are considered; smaller values get the smallest of them.
    """
    # Tables instead of log2: exact in every library.
    powers, inverses = (
        asarray(xp, [2.0 ** (sign * e) for e in exponents], values.dtype, device_of(xp, values)) for sign in (1, -1)
    )
    # [..., number of powers]
    reached = xp.abs(values)[..., None] >= powers
    power = xp.max(xp.where(reached, powers, powers[:1]), axis=-1)
    return power, xp.min(xp.where(reached, inverses, inverses[:1]), axis=-1)
