"""
The layout of the published z-lab drafters, versions 1 and 2, which SpecForge and Model-Optimizer write too: a Qwen3
configuration with the DFlash fields in a nested `dflash_config`; older files keep `block_size` and
`num_target_layers` at the top level.
"""

from . import fields as common
from .fields import Fields, section


NAME = "z-lab (architectures DFlashDraftModel, DFlash2DraftModel)"

RENAMES: dict[str, str] = {}
_KNOWN = {
    "block_size",
    "mask_token_id",
    "mask_token",
    "target_layer_ids",
    "num_target_layers",
    "causal",
    "use_swa",
    "swa_window_size",
    "final_logit_softcapping",
    "output_multiplier",
    "input_embedding_scale",
    "projector_type",
    "attention_mode",
    "pure_draft_prefix_len",
    "shift_label",
    "attention_sink_bias",
    "attention_value_scale",
}
_KNOWN_2 = {"conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"}


def detect(raw: dict) -> bool:
    if (section(raw, "dflash_config") if isinstance(raw.get("dflash_config"), dict) else {}).get("projector_type"):
        return False  # another's head
    if (raw.get("architectures") or [None])[0] in ("DFlashDraftModel", "DFlash2DraftModel"):
        return True
    return "dflash_config" in raw and not raw.get("architectures")


def normalise(raw: dict, tensors: dict) -> dict:
    nested = section(raw, "dflash_config")
    second = (raw.get("architectures") or [""])[0] == "DFlash2DraftModel"
    unknown = sorted(set(nested) - (_KNOWN | _KNOWN_2 if second else _KNOWN))
    if unknown:
        raise ValueError(f"dflash_config has fields that this library does not know: {', '.join(unknown)}.")
    fields = Fields(nested, raw)
    fields.refuse(
        projector_type="another drafter's head",
        draft_vocab_size="a shortlist, without its ids",
        shift_label="slots that predict the next token",
    )
    if fields.get("attention_mode", "gqa") not in ("gqa", "mha"):
        raise ValueError(f"attention_mode={fields.get('attention_mode')!r}: only gqa and mha are implemented.")
    result = {**common.backbone(raw), **common.block(fields), **common.logits(fields)}
    # Version 2 is bidirectional also where its layers slide.
    result |= common.attention(raw, nested, sliding_is_causal=not second)
    # The reference implementation takes rows of the table, also of a target that scales or norms them.
    result["input_embeddings"] = "table"
    result["input_embedding_scale"] = fields.get("input_embedding_scale", 1.0)
    if second:
        result |= {
            "conv_kernel_size": fields.need("conv_kernel_size"),
            "conv_group_size": fields.need("conv_group_size"),
            "proposal_head": "selector",
            "proposal_rank": fields.need("selector_rank"),
            "selector_top_k": fields.need("selector_top_k"),
        }
    return result


def write(drafter, target) -> tuple[dict, dict, list[str], list[str]]:
    """
    A drafter in this layout.

    Args:
        drafter (`DFlashDraftModel`), target (`Target`, *optional*): the pair.

    Returns:
        `(raw, tensors, impossible, lost)`: `config.json`, the weights, what cannot be said, and what is left out.
    """
    config, state = drafter.config, drafter.state_dict()
    second = config.conv_kernel_size is not None
    rule = [kind == "sliding_attention" and not second for kind in config.layer_types]
    causal = config.causal_layers
    impossible = common.cannot_say(
        config,
        (config.sample_from_anchor, "sample_from_anchor=True"),
        (config.own_embeddings, "own_embeddings=True"),
        (config.own_head, "own_head=True"),
        (-1 in config.target_layer_ids, "the output of the embedding in target_layer_ids"),
        (config.proposal_head not in ("independent", "selector"), f"proposal_head={config.proposal_head!r}"),
        (
            second != (config.proposal_head == "selector"),
            "convolutions without a selector, or a selector without them",
        ),
        (causal != rule and len(set(causal)) > 1, f"causal_layers={causal}"),
        (second and config.own_vocab_size != config.vocab_size, f"own_vocab_size={config.own_vocab_size}"),
    )
    lost = ["draft_vocab_size (it will propose from the whole vocabulary)"] if config.draft_vocab_size else []
    lost += ["confidence_head"] if config.confidence_head else []
    lost += [what for holds, what in common.embeddings_lost(config, target) if holds]
    nested = {
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": config.target_layer_ids,
        "num_target_layers": config.num_target_layers,
        "output_multiplier": config.output_multiplier,
        "final_logit_softcapping": config.final_logit_softcapping,
        "input_embedding_scale": None if config.input_embedding_scale == 1 else config.input_embedding_scale,
    }
    if second:
        nested |= {
            "conv_kernel_size": config.conv_kernel_size,
            "conv_group_size": config.conv_group_size,
            "selector_rank": config.proposal_rank,
            "selector_top_k": config.selector_top_k,
        }
    raw = {
        "architectures": ["DFlash2DraftModel" if second else "DFlashDraftModel"],
        "model_type": "qwen3",
        **common.written(config),
        "block_size": config.block_size,
        "num_target_layers": config.num_target_layers,
        "is_causal": causal[0] if causal != rule else None,
        "dflash_config": {name: value for name, value in nested.items() if value is not None},
    }
    dropped = ("draft_token_ids", "confidence_head.")
    tensors = {name: tensor for name, tensor in state.items() if not name.startswith(dropped)}
    tensors = {name.replace("proposal_head.", "candidate_selector."): tensor for name, tensor in tensors.items()}
    return {name: value for name, value in raw.items() if value is not None}, tensors, impossible, lost
