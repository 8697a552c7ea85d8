"""
The layout of speculators: geometry in `transformer_layer_config`, ids of tapped layers counted from the embedding, a
shortlist as the difference between the target's ids and the drafter's, and sometimes an embedding and a head.
"""

import torch
from transformers import AutoConfig

from ..configuration_dflash import MARKOV_HEADS
from . import fields as common
from .fields import Fields, section


NAME = "speculators (speculators_model_type dflash, dspark, dflash2)"

RENAMES = {
    r"^markov_head\.": "proposal_head.",
    r"^candidate_selector\.": "proposal_head.",
    r"^d2t$": "draft_token_ids",
}
# Of training alone: the target's head and norm, and whether a token of the target is in the shortlist.
DROPPED = (r"^t2d$", r"^verifier_(lm_head|norm)\.")
_SLIDING = ("layer_types", "sliding_window", "use_sliding_window", "max_window_layers")
_KINDS = ("dflash", "dspark", "dflash2")


def detect(raw: dict) -> bool:
    return "speculators_model_type" in raw


def normalise(raw: dict, tensors: dict) -> dict:
    kind = raw["speculators_model_type"]
    if kind not in _KINDS:
        raise ValueError(f"speculators_model_type={kind!r} is not supported, only {', '.join(_KINDS)}.")
    inner = section(raw, "transformer_layer_config")
    geometry = {**_defaults(inner), **inner, **{name: raw[name] for name in _SLIDING if raw.get(name) is not None}}
    fields = Fields(raw)
    fields.refuse()
    Fields(geometry).refuse()
    backbone = common.backbone(geometry)
    if raw.get("target_hidden_size") not in (None, backbone["hidden_size"]):
        raise ValueError(
            f"target_hidden_size={raw['target_hidden_size']!r}, but hidden_size={backbone['hidden_size']}: a drafter "
            "that is not as wide as its target is not implemented."
        )
    ids = fields.need("aux_hidden_state_layer_ids")
    if not isinstance(ids, list) or not all(type(i) is int and i >= 0 for i in ids):
        raise ValueError(f"aux_hidden_state_layer_ids={ids!r}: a list of indices, at least 0.")
    shifted = _shifted(fields, kind, raw)
    non_causal = fields.flag("sliding_window_non_causal", kind == "dflash2")
    words, own_head = fields.integer("draft_vocab_size"), "lm_head.weight" in tensors
    result = {
        **backbone,
        "block_size": fields.need("block_size"),
        "mask_token_id": fields.need("mask_token_id"),
        "target_layer_ids": [i - 1 for i in ids],  # 0 is the output of the embedding, which is -1 here
        **common.attention(geometry, {}, sliding_is_causal=not non_causal),
        "sample_from_anchor": shifted,
        "own_embeddings": "embed_tokens.weight" in tensors,
        "own_head": own_head,
        "input_embeddings": "table",  # never scaled
        "target_name": section(section(raw, "speculators_config"), "verifier").get("name_or_path"),
    }
    if "draft_token_ids" in tensors:
        result["draft_vocab_size"] = words
    elif words not in (None, backbone["vocab_size"]):
        raise ValueError(f"draft_vocab_size={words}, but there is no tensor d2t that says which tokens these are.")
    if kind == "dspark":
        defaults = {"markov_rank": 256, "enable_confidence_head": True}
        present = {name: value for name, value in raw.items() if value is not None}
        result |= common.markov(Fields({**defaults, **present}), "enable_confidence_head")
    if kind == "dflash2":
        result |= {
            "conv_kernel_size": fields.integer("conv_kernel_size", 2),
            "conv_group_size": fields.integer("conv_group_size", 16),
            "proposal_head": "selector",
            "proposal_rank": fields.integer("selector_rank", 256),
            "selector_top_k": fields.integer("selector_top_k", 16),
        }
    return result


def _defaults(inner: dict) -> dict:
    """What the file leaves out because it is the default of the class that wrote it."""
    model_type = inner.get("model_type", "qwen3")
    if model_type not in ("qwen3", "llama"):
        raise ValueError(
            f"transformer_layer_config: model_type={model_type!r} is not supported, only qwen3 and llama."
        )
    known = AutoConfig.for_model(model_type).to_dict()
    defaults = {name: known[name] for name in common.BACKBONE if known.get(name) is not None}
    has_rope = any(inner.get(name) for name in ("rope_parameters", "rope_scaling", "rope_theta"))
    return defaults if has_rope else {**defaults, "rope_parameters": known["rope_parameters"]}


def _shifted(fields: Fields, kind: str, raw: dict) -> bool:
    """Whether the anchor's slot predicts; the number of proposals must agree."""
    block_size = fields.integer("block_size")
    methods = section(raw, "speculators_config").get("proposal_methods") or [{}]
    if not isinstance(methods, list) or not isinstance(methods[0], dict):
        raise ValueError(f"proposal_methods={methods!r} is not a list of objects with fields.")
    number = Fields(methods[0]).integer("speculative_tokens")
    shifted = fields.flag("sample_from_anchor")
    if shifted is None:
        shifted = kind == "dspark" and number in (None, block_size)
    if number is not None and block_size is not None and number > block_size - (not shifted):
        raise ValueError(
            f"speculative_tokens={number!r}, but with block_size={block_size} and sample_from_anchor={shifted} a "
            f"block proposes {block_size - (not shifted)}."
        )
    return shifted


def check_loaded(state: dict[str, torch.Tensor], dropped: dict[str, torch.Tensor]) -> None:
    """Raise `ValueError` where the two tensors about the shortlist disagree."""
    ids, covered = state.get("draft_token_ids"), dropped.get("t2d")
    if ids is None:
        return
    if int(ids.min()) < 0 or len(ids.unique()) < len(ids):
        raise ValueError("d2t: it leads to ids below 0, or twice to one; a difference of ids was expected.")
    if covered is not None:
        beyond = int(ids.max()) >= len(covered)
        if beyond or not bool(covered.bool()[ids].all()) or int(covered.bool().sum()) != len(ids):
            raise ValueError("d2t and t2d name different tokens.")


def convert(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """`d2t` is how much larger the target's id is than the drafter's."""
    return tensor + torch.arange(len(tensor)) if name == "draft_token_ids" else tensor


def write(drafter, target) -> tuple[dict, dict, list[str], list[str]]:
    """A drafter in this layout, which keeps the head's rows of a shortlist; otherwise as `zlab.write`."""
    config, state = drafter.config, drafter.state_dict()
    second, markov = config.conv_kernel_size is not None, config.proposal_head in MARKOV_HEADS
    sliding = [causal for causal, kind in zip(config.causal_layers, config.layer_types, strict=True) if kind[0] == "s"]
    full = [causal for causal, kind in zip(config.causal_layers, config.layer_types, strict=True) if kind[0] == "f"]
    words = config.draft_vocab_size
    impossible = common.cannot_say(
        config,
        (any(full) or len(set(sliding)) > 1, f"causal_layers={config.causal_layers}"),
        (config.proposal_head == "domino", "proposal_head='domino'"),
        (
            second != (config.proposal_head == "selector"),
            "convolutions without a selector, or a selector without them",
        ),
        (
            bool(words) and not config.own_head and target is None,
            "draft_vocab_size without the head's rows, which this layout keeps with the drafter: pass the target",
        ),
        (config.own_head and not words, "own_head=True for the whole vocabulary"),
        (second and config.confidence_head is not None, "a confidence head beside a selector"),
    )
    head = None if target is None else target.head.weight.detach()
    lost = [
        *common.embeddings_lost(config, target),
        (common.shapes_logits(config), "scale and cap of the logits"),
        (config.input_embedding_scale != 1, "input_embedding_scale"),
    ]
    kind = "dflash2" if second else "dspark" if markov or config.confidence_head else "dflash"
    architecture = {"dflash": "DFlashSpeculator", "dspark": "DSparkSpeculator", "dflash2": "DFlash2DraftModel"}[kind]
    inner = {"model_type": "qwen3", **common.written(config)}
    for name in ("rope_theta", "rope_scaling"):  # `rope_parameters` says both
        del inner[name]
    method = {"proposal_type": "greedy", "speculative_tokens": config.num_proposals, "verifier_accept_k": 1}
    raw = {
        "architectures": [architecture],
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "block_size": config.block_size,
        "draft_vocab_size": words or config.vocab_size,
        "aux_hidden_state_layer_ids": [i + 1 for i in config.target_layer_ids],
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": config.sample_from_anchor,
        "sliding_window_non_causal": not any(sliding) if sliding else kind == "dflash2",
        "transformer_layer_config": {name: value for name, value in inner.items() if value is not None},
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{**method, "accept_tolerance": 0.0}],
            "verifier": {"name_or_path": config.target_name, "architectures": []},
        },
    }
    if kind == "dspark":
        raw |= {
            "markov_rank": config.proposal_rank or 0,
            "markov_head_type": {v: k for k, v in common.MARKOV.items()}.get(config.proposal_head, "vanilla"),
            "enable_confidence_head": config.confidence_head is not None,
            "confidence_head_with_markov": config.confidence_head == "markov",
        }
    if second:
        raw |= {
            "conv_kernel_size": config.conv_kernel_size,
            "conv_group_size": config.conv_group_size,
            "selector_rank": config.proposal_rank,
            "selector_top_k": config.selector_top_k,
        }
    ids = state.pop("draft_token_ids", None)
    prefix = "candidate_selector." if second else "markov_head."
    tensors = {name.replace("proposal_head.", prefix): tensor for name, tensor in state.items()}
    if ids is not None:
        covered = torch.zeros(config.vocab_size, dtype=torch.bool)
        covered[ids] = True
        tensors |= {"d2t": ids - torch.arange(len(ids)), "t2d": covered}
        if not config.own_head and head is not None:
            tensors["lm_head.weight"] = head[ids].to(state["fc.weight"].dtype)
    return raw, tensors, impossible, [what for holds, what in lost if holds]
