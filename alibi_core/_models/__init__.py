"""What models are made of, for every framework: configurations, layer shapes, checkpoints, how text goes on.

In goes a configuration or a folder with a checkpoint. Out come checked sizes, and weights by the names of this
library's layers. No framework is imported.
"""

from alibi_core._models.checkpoints import Checkpoint
from alibi_core._models.config import AlibiConfig, check_config
from alibi_core._models.generation import Generation
from alibi_core._models.layer_shape import LayerShape, fixed_or_scheme_slopes
from alibi_core._models.text_rows import MOST_PACKED, POOLING, TextRows

__all__ = [
    "MOST_PACKED",
    "POOLING",
    "AlibiConfig",
    "Checkpoint",
    "Generation",
    "LayerShape",
    "TextRows",
    "check_config",
    "fixed_or_scheme_slopes",
]
