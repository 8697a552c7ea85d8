"""
The layout of Model-Optimizer's DSpark drafters: that of z-lab with `projector_type: dspark`, and the head's tensors at
the top level. (Its DFlash drafters are in z-lab's layout.)
"""

from . import fields as common
from .fields import Fields, section


NAME = "Model-Optimizer (architectures Qwen3DSparkModel with dflash_config)"

RENAMES = {
    r"^(markov_head\.)?(markov_w[12]|gate_proj|joint_proj)\.": r"proposal_head.\2.",
    r"^confidence_proj\.": "confidence_head.proj.",
}


def detect(raw: dict) -> bool:
    return (raw.get("architectures") or [""])[0] == "Qwen3DSparkModel" and isinstance(raw.get("dflash_config"), dict)


def normalise(raw: dict, tensors: dict) -> dict:
    nested = section(raw, "dflash_config")
    fields = Fields(nested, raw, section(raw, "dspark_config"))
    fields.refuse()
    result = {**common.backbone(raw), **common.block(fields), **common.attention(raw, nested), **common.logits(fields)}
    # DSpark is trained on labels one further than the slot.
    confidence = "use_confidence_head" if fields.get("use_confidence_head") is not None else "enable_confidence_head"
    shifted = fields.flag("sample_from_anchor", fields.flag("shift_label", True))
    return {**result, **common.markov(fields, confidence), "input_embeddings": "table", "sample_from_anchor": shifted}
