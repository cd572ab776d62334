"""The layers and models of all backends, without a framework: configurations, forward passes, checkpoints.

The base classes hold forward passes and take sub-modules that a backend makes from a configuration.
"""

from alibi_core._models.attention_layer import *  # noqa: F403
from alibi_core._models.checkpoints import *  # noqa: F403
from alibi_core._models.config import *  # noqa: F403
from alibi_core._models.encoder import *  # noqa: F403
from alibi_core._models.language_model import *  # noqa: F403
from alibi_core._models.transformer import *  # noqa: F403
from alibi_core._models.weights import *  # noqa: F403
