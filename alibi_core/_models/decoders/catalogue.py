"""All families, by the ``model_type`` of their configs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from alibi_core._models.decoders.baichuan import baichuan
from alibi_core._models.decoders.bloom import bloom
from alibi_core._models.decoders.falcon import falcon
from alibi_core._models.decoders.family import Family
from alibi_core._models.decoders.jais import jais
from alibi_core._models.decoders.mpt import mpt
from alibi_core._models.decoders.refact import refact
from alibi_core._models.decoders.settings import Settings

FAMILIES: dict[str, Callable[[Settings, str], Family]] = {
    "baichuan": baichuan,
    "bloom": bloom,
    "btlm": jais,
    "falcon": falcon,
    "gpt_refact": refact,
    "jais": jais,
    "mpt": mpt,
}


def family_of(values: dict[str, Any], path: Path, contract: str) -> Family:
    """Return what a ``config.json`` describes.

    Args:
        values: Its content.
        path: Where it is, for messages.
        contract: ``"exact"``: ALiBi with the family's slopes. ``"model"``: the bias that its own code computes.

    Raises:
        TypeError: If an entry is of the wrong kind.
        ValueError: If it describes no model with ALiBi, or one with parts that no language model here has.
    """
    settings = Settings(values, str(path))
    model_type = values.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        known = ", ".join(map(repr, FAMILIES))
        raise settings.refuse("model_type", f"one of {known}", "checkpoints of no other model are known")
    return FAMILIES[model_type](settings, contract)
