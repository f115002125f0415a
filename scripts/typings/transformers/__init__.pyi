"""The names of transformers that the package uses, for pyright.

The library's own `__init__` imports every model for a type checker, which took pyright longer than
the whole package. A name that is missing here has no type; submodules are read as they are.
"""

from typing import Any

from transformers.cache_utils import DynamicCache as DynamicCache
from transformers.configuration_utils import PreTrainedConfig as PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel as PreTrainedModel
from transformers.models.auto.configuration_auto import AutoConfig as AutoConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM as AutoModelForCausalLM
from transformers.models.auto.tokenization_auto import AutoTokenizer as AutoTokenizer
from transformers.optimization import get_scheduler as get_scheduler
from transformers.tokenization_utils_base import PreTrainedTokenizerBase as PreTrainedTokenizerBase
from transformers.trainer_callback import TrainerCallback as TrainerCallback

PretrainedConfig = PreTrainedConfig

def __getattr__(name: str) -> Any: ...
