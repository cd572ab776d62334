"""The layers and models of all backends, without a framework: configurations, forward passes, checkpoints.

The base classes hold forward passes and take sub-modules that a backend makes from a configuration.
"""

from alibi_core._models.attention_layer import BaseAttention as BaseAttention
from alibi_core._models.attention_layer import LayerShape as LayerShape
from alibi_core._models.checkpoints import Checkpoint as Checkpoint
from alibi_core._models.config import AlibiConfig as AlibiConfig
from alibi_core._models.encoder import MOST_PACKED as MOST_PACKED
from alibi_core._models.encoder import POOLING as POOLING
from alibi_core._models.encoder import BaseEncoder as BaseEncoder
from alibi_core._models.encoder import TextRows as TextRows
from alibi_core._models.encoder import text_of as text_of
from alibi_core._models.language_model import BaseLanguageModel as BaseLanguageModel
from alibi_core._models.language_model import Generation as Generation
from alibi_core._models.language_model import Prompts as Prompts
from alibi_core._models.language_model import evaluating as evaluating
from alibi_core._models.language_model import following as following
from alibi_core._models.language_model import last_tokens as last_tokens
from alibi_core._models.transformer import BaseBlock as BaseBlock
from alibi_core._models.transformer import BaseParts as BaseParts
from alibi_core._models.transformer import BaseTransformer as BaseTransformer
from alibi_core._models.weights import KEY as KEY
from alibi_core._models.weights import check_weights as check_weights
from alibi_core._models.weights import layer_record as layer_record
from alibi_core._models.weights import mismatch as mismatch
from alibi_core._models.weights import weights_metadata as weights_metadata
