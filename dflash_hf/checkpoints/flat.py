"""Our own layout, which is also the flat contract of the native loop of transformers: `model_type: dflash`."""

from ..configuration_dflash import DFlashConfig


NAME = "dflash_hf (model_type dflash)"


def detect(raw: dict) -> bool:
    return raw.get("model_type") == DFlashConfig.model_type


def normalise(raw: dict) -> dict:
    for field in ("block_size", "mask_token_id", "target_layer_ids"):
        if raw.get(field) is None:
            raise ValueError(f"{field} is missing; a drafter cannot be used without it.")
    return {key: value for key, value in raw.items() if key != "model_type"}
