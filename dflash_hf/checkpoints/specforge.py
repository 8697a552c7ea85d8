"""
The layout of SpecForge's DSpark and Domino drafters: that of z-lab with the fields of a head, in `dflash_config` or at
the top level. (Its DFlash drafters are in z-lab's layout.)
"""

from . import fields as common
from .fields import Fields, section


NAME = "SpecForge (architectures DSparkDraftModel, DominoDraftModel)"

RENAMES = {
    r"^logit_head\.": "",
    r"^prefix_gru\.": "proposal_head.prefix_gru.",
    r"^embed_proj\.": "proposal_head.embed_proj.",
    r"^markov_head\.": "proposal_head.",
}


def detect(raw: dict) -> bool:
    return _kind(raw) is not None


def _kind(raw: dict) -> str | None:
    """Which head: by the architecture, or in files for SGLang, which name DFlash there, by the projector."""
    architecture = (raw.get("architectures") or [""])[0]
    known = {"DominoDraftModel": "domino", "DSparkDraftModel": "dspark"}
    nested = raw.get("dflash_config")
    if (
        architecture == "DFlashDraftModel"
        and isinstance(nested, dict)
        and nested.get("projector_type") in known.values()
    ):
        return nested["projector_type"]
    return None if "speculators_model_type" in raw else known.get(architecture)


def normalise(raw: dict, tensors: dict) -> dict:
    nested = section(raw, "dflash_config")
    fields = Fields(nested, raw, section(raw, "dspark_config"))
    fields.refuse()
    if fields.get("attention_mode", "gqa") not in ("gqa", "mha"):
        raise ValueError(f"attention_mode={fields.get('attention_mode')!r}: only gqa and mha are implemented.")
    result = {**common.backbone(raw), **common.block(fields), **common.attention(raw, nested), **common.logits(fields)}
    result["input_embeddings"] = "table"
    expected = _kind(raw)
    domino = expected == "domino"
    if fields.get("projector_type", expected) != expected:
        raise ValueError(f"projector_type={fields.get('projector_type')!r}, but architectures names {expected!r}.")
    if domino:
        head = {
            "proposal_head": "domino",
            "proposal_rank": fields.need("emb_dim"),
            "domino_state_size": fields.need("gru_hidden_dim"),
            "domino_prefix": fields.integer("pure_draft_prefix_len", 0),
        }
    else:
        head = common.markov(fields, "enable_confidence_head")
    # DSpark is trained on labels one further than the slot. (Its own script reads the slots as if it were not.)
    shifted = fields.flag("sample_from_anchor", fields.flag("shift_label", not domino))
    return {**result, **head, "sample_from_anchor": shifted}
