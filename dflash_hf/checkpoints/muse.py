"""The layout of transformers' own drafter class, `muse_glimmer_assistant`: flat fields, two tensors renamed."""

from . import fields as common
from .fields import Fields


NAME = "transformers (model_type muse_glimmer_assistant)"

RENAMES = {r"^encoder\.fc\.": "fc.", r"^encoder\.output_norm_enc\.": "hidden_norm."}
# What the class fills in where the file is silent.
_DEFAULTS = {
    "vocab_size": 202048,
    "hidden_size": 6656,
    "intermediate_size": 19968,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "sliding_window": 2048,
    "block_size": 16,
    "mask_token_id": 201818,
    "target_layer_ids": [1, 13, 25, 37, 49],
    "bos_token_id": 200000,
    "eos_token_id": 200001,
    "pad_token_id": 200018,
}


def detect(raw: dict) -> bool:
    return raw.get("model_type") == "muse_glimmer_assistant"


def normalise(raw: dict, tensors: dict) -> dict:
    # A token that is null is none; any other field that is null is the default.
    raw = {**_DEFAULTS, **{name: v for name, v in raw.items() if v is not None or name.endswith("_token_id")}}
    raw.setdefault("layer_types", ["sliding_attention"] * raw["num_hidden_layers"])
    if not raw.get("rope_parameters"):
        raw.setdefault("rope_theta", 500_000.0)
    fields = Fields(raw)
    fields.refuse()
    return {
        **common.backbone(raw),
        **common.block(fields),
        **common.attention(raw, {}, sliding_is_causal=False),
        "input_embeddings": "table",  # without the norm of the target's embedding module
    }


def write(drafter, target) -> tuple[dict, dict, list[str], list[str]]:
    """A drafter in this layout; arguments and result as of `zlab.write`."""
    config = drafter.config
    impossible = common.cannot_say(
        config,
        (config.sample_from_anchor, "sample_from_anchor=True"),
        (config.own_embeddings, "own_embeddings=True"),
        (config.own_head, "own_head=True"),
        (config.attention_bias, "attention_bias=True"),
        (-1 in config.target_layer_ids, "the output of the embedding in target_layer_ids"),
        (config.is_sequential, f"proposal_head={config.proposal_head!r}"),
        (config.conv_kernel_size is not None, "convolutions"),
        (any(config.causal_layers), f"causal_layers={config.causal_layers}"),
    )
    lost = [
        *common.embeddings_lost(config, target),
        (config.draft_vocab_size, "draft_vocab_size (it will propose from the whole vocabulary)"),
        (config.confidence_head, "confidence_head"),
        (common.shapes_logits(config), "scale and cap of the logits"),
        (config.input_embedding_scale != 1, "input_embedding_scale"),
    ]
    written = common.written(config)
    for name in (
        "attention_bias",
        "use_sliding_window",
        "max_window_layers",
        "rope_theta",
        "rope_scaling",
    ):
        del written[name]
    raw = {
        "architectures": ["MuseGlimmerAssistantModel"],
        "model_type": "muse_glimmer_assistant",
        **written,
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": config.target_layer_ids,
    }
    renames = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    tensors = {
        renames.get(name, name): tensor
        for name, tensor in drafter.state_dict().items()
        if not name.startswith(("draft_token_ids", "confidence_head."))
    }
    return (
        {name: value for name, value in raw.items() if value is not None or name.endswith("_token_id")},
        tensors,
        impossible,
        [what for holds, what in lost if holds],
    )
