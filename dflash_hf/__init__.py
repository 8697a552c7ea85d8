"""DFlash speculative decoding for Hugging Face transformers."""

from transformers import AutoConfig, AutoModel

from .configuration_dflash import DFlashConfig
from .integration import attach, custom_generate, detach
from .metrics import GenerationStatistics, RoundRecord
from .modeling_dflash import DFlashDraftModel
from .outputs import DFlashGenerateOutput


__version__ = "0.1.0"

AutoConfig.register(DFlashConfig.model_type, DFlashConfig)
AutoModel.register(DFlashConfig, DFlashDraftModel)

__all__ = [
    "DFlashConfig",
    "DFlashDraftModel",
    "DFlashGenerateOutput",
    "GenerationStatistics",
    "RoundRecord",
    "attach",
    "custom_generate",
    "detach",
]
