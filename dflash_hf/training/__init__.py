"""Training a drafter: data, initialisation, trainer. The objective is in `dflash_hf.objective`."""

from .arguments import DFlashTrainingArguments, DrafterArguments
from .data import ConversationDataset, collate
from .initialisation import initialise_from_target
from .trainer import DFlashTrainer


__all__ = [
    "ConversationDataset",
    "DFlashTrainer",
    "DFlashTrainingArguments",
    "DrafterArguments",
    "collate",
    "initialise_from_target",
]
