"""Our own layout, which is also the flat contract of the native loop of transformers: `model_type: dflash`."""

from ..configuration_dflash import DFlashConfig


NAME = "dflash_hf (model_type dflash)"

RENAMES: dict[str, str] = {}


# Every field of the configuration, and what `save_pretrained` and Trainer write beside them.
_KNOWN = {*DFlashConfig().to_dict(), "transformers_version", "auto_map", "use_cache", "torch_dtype"}


def detect(raw: dict) -> bool:
    return raw.get("model_type") == DFlashConfig.model_type


def normalise(raw: dict, tensors: dict) -> dict:
    for field in ("block_size", "mask_token_id", "target_layer_ids"):
        if raw.get(field) is None:
            raise ValueError(f"{field} is missing; a drafter cannot be used without it.")
    unknown = sorted(set(raw) - _KNOWN)
    if unknown:
        raise ValueError(f"fields that this library does not know: {', '.join(unknown)}. A newer one may.")
    return {key: value for key, value in raw.items() if key not in ("model_type", "torch_dtype")}
