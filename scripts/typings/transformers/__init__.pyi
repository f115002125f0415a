"""Names of transformers that the package uses, for pyright.

For a type checker, the library's `__init__` imports every model, and checking these imports took
pyright longer than checking the package itself. A name that is missing here has no type. The types
of submodules are read from the library.
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
