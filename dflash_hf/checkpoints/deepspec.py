"""
The layout of DeepSpec: a copy of the target's configuration with flat DFlash fields. Every slot predicts the token
after it, also in the files that are named DFlash; embedding and head are the drafter's own.
"""

from . import fields as common
from .fields import Fields


NAME = "DeepSpec (architectures Qwen3DSparkModel)"

RENAMES = {r"^markov_head\.": "proposal_head."}


def detect(raw: dict) -> bool:
    return (raw.get("architectures") or [""])[0] == "Qwen3DSparkModel" and "dflash_config" not in raw


def normalise(raw: dict, tensors: dict) -> dict:
    fields = Fields(raw)
    fields.refuse(draft_vocab_size="a shortlist, without its ids")
    # The configuration is the target's, so that its windows are stale: all layers are full.
    own = {"own_embeddings": "embed_tokens.weight" in tensors, "own_head": "lm_head.weight" in tensors}
    backbone = common.backbone(raw)
    return {
        **backbone,
        **common.block(fields),
        **common.attention({"num_hidden_layers": backbone["num_hidden_layers"]}, {}),
        **common.logits(fields),
        **common.markov(fields, "enable_confidence_head"),
        **own,
        "sample_from_anchor": True,
    }
