"""Training a drafter: data, features, initialisation, trainer. The objective is in `dflash_hf.objective`."""

from .arguments import DFlashTrainingArguments, DrafterArguments
from .data import ConversationDataset, collate
from .features import FeatureStore, manifest_for
from .initialisation import initialise_from_target
from .trainer import DFlashTrainer


__all__ = [
    "ConversationDataset",
    "DFlashTrainer",
    "DFlashTrainingArguments",
    "DrafterArguments",
    "FeatureStore",
    "collate",
    "initialise_from_target",
    "manifest_for",
]
