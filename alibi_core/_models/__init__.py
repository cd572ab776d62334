"""What models are made of, for every framework: configurations, layer shapes, checkpoints, how text goes on.

In goes a configuration or a folder with a checkpoint. Out come checked sizes, and weights by the names of this
library's layers. No framework is imported.
"""

from alibi_core._models.checkpoints import Checkpoint as Checkpoint
from alibi_core._models.config import AlibiConfig as AlibiConfig
from alibi_core._models.config import check_config as check_config
from alibi_core._models.config import check_input as check_input
from alibi_core._models.generation import Generation as Generation
from alibi_core._models.layer_shape import LayerShape as LayerShape
from alibi_core._models.layer_shape import fixed_or_scheme_slopes as fixed_or_scheme_slopes
from alibi_core._models.text_rows import MOST_PACKED as MOST_PACKED
from alibi_core._models.text_rows import POOLING as POOLING
from alibi_core._models.text_rows import TextRows as TextRows
