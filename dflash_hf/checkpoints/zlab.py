"""
The layout of the published z-lab drafters, version 1: a Qwen3 configuration with the DFlash fields in a nested
`dflash_config`; older files keep `block_size` and `num_target_layers` at the top level.
"""

NAME = "z-lab v1 (architectures DFlashDraftModel)"

# Fields of the backbone that mean the same in `DFlashConfig`.
_BACKBONE = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "max_position_embeddings",
    "attention_bias",
    "attention_dropout",
    "initializer_range",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)
_REQUIRED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
_KNOWN = {
    "block_size",
    "mask_token_id",
    "target_layer_ids",
    "num_target_layers",
    "causal",
    "use_swa",
    "swa_window_size",
    "final_logit_softcapping",
    "output_multiplier",
    "input_embedding_scale",
    "projector_type",
}
# Fields that change the computation, and the one value that this library computes.
_NEUTRAL = {
    "final_logit_softcapping": None,
    "output_multiplier": 1.0,
    "input_embedding_scale": 1.0,
    "projector_type": None,
    "draft_vocab_size": None,
    "partial_rotary_factor": 1.0,
}


def detect(raw: dict) -> bool:
    return "dflash_config" in raw or "DFlashDraftModel" in (raw.get("architectures") or [])


def normalise(raw: dict) -> dict:
    architecture = (raw.get("architectures") or ["DFlashDraftModel"])[0]
    if architecture != "DFlashDraftModel":
        raise ValueError(f"architectures={architecture!r} is another drafter than DFlash v1 and is not supported.")
    nested = raw.get("dflash_config") or {}
    unknown = sorted(set(nested) - _KNOWN)
    if unknown:
        raise ValueError(f"dflash_config has fields that this library does not know: {', '.join(unknown)}.")
    for field, neutral in _NEUTRAL.items():
        value = _either(raw, nested, field)
        if value not in (None, neutral):
            raise ValueError(f"{field}={value!r} is not supported, only {neutral!r}.")

    fields = {name: raw[name] for name in _BACKBONE if raw.get(name) is not None}
    fields["rope_parameters"] = _rope(raw)
    missing = [name for name in _REQUIRED if name not in fields]
    if missing:
        raise ValueError(f"{', '.join(missing)} is missing; a drafter's geometry cannot be guessed.")
    for name in ("block_size", "mask_token_id", "target_layer_ids"):
        fields[name] = _either(raw, nested, name)
        if fields[name] is None:
            raise ValueError(f"{name} is missing, at the top level and in dflash_config alike.")
    fields["num_target_layers"] = _either(raw, nested, "num_target_layers")
    return {**fields, **_attention(raw, nested, fields["num_hidden_layers"])}


def _either(raw: dict, nested: dict, field: str):
    """The value of a field that may stand in `dflash_config`, at the top level, or equally in both."""
    inner, outer = nested.get(field), raw.get(field)
    if inner is not None and outer is not None and inner != outer:
        raise ValueError(f"{field} contradicts itself: {outer!r} at the top level, {inner!r} in dflash_config.")
    return outer if inner is None else inner


def _rope(raw: dict) -> dict:
    """Both spellings: `rope_parameters`, or the older `rope_theta` with `rope_scaling`."""
    rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    if "type" in rope:
        rope["rope_type"] = rope.pop("type")
    rope.setdefault("rope_type", "default")
    outer = raw.get("rope_theta")
    if None not in (outer, rope.get("rope_theta")) and outer != rope["rope_theta"]:
        raise ValueError(
            f"rope_theta contradicts itself: {outer!r} at the top level, {rope['rope_theta']!r} in rope_parameters."
        )
    if outer is not None:
        rope["rope_theta"] = outer
    if rope.get("rope_theta") is None:
        raise ValueError("rope_theta is missing, at the top level and in rope_parameters alike.")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"partial_rotary_factor={rope['partial_rotary_factor']!r} is not supported, only 1.0.")
    return rope


def _attention(raw: dict, nested: dict, num_layers: int) -> dict:
    """
    Window and causality of each layer.

    The published rule: `is_causal`, else `causal`, for all layers; else sliding layers are causal inside the block
    and full layers are not. With `use_swa` every layer slides, and none is causal.
    """
    layer_types = raw.get("layer_types") or ["full_attention"] * num_layers
    window = raw.get("sliding_window")
    causal_layers = [kind == "sliding_attention" for kind in layer_types]
    if nested.get("use_swa") and "sliding_attention" not in layer_types:
        layer_types = ["sliding_attention"] * num_layers
        window = nested.get("swa_window_size") or window
        causal_layers = [False] * num_layers
    for stated in (raw.get("is_causal"), nested.get("causal")):
        if stated is not None:
            causal_layers = [stated] * num_layers
            break
    sliding = "sliding_attention" in layer_types
    return {
        "layer_types": layer_types,
        "sliding_window": window if sliding else None,
        "causal_layers": causal_layers,
    }
