"""Shared code of all backends' layers and models: configurations, checkpoints, rows of text, generation."""

from alibi_core._models import *  # noqa: F403
