"""What layers and models of all backends share: configurations, checkpoints, rows of text, generation."""

from alibi_core._models import *  # noqa: F403
