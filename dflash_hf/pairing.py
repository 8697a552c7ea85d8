"""Whether a drafter is for a target: what would fail is an error, before any forward; what was another, a warning."""

import hashlib
import json
from pathlib import PurePath

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.utils import logging

from .modeling_dflash import DFlashDraftModel
from .target import Target


logger = logging.get_logger(__name__)

# Fields of the drafter's configuration that say what it was trained for, in words.
ORIGIN = {
    "target_name": "the target",
    "target_revision": "the target's revision",
    "tokenizer_hash": "the tokenizer",
    "template_hash": "the chat template",
}


def check(target: Target, drafter: DFlashDraftModel) -> None:
    """
    Raise `ValueError` when `drafter` cannot work with `target`; the message names field, values and remedy.

    Different vocabulary sizes are no error: the drafter uses the target's embedding and head.
    """
    config = drafter.config
    num_taps, rows = len(config.target_layer_ids), target.vocab_size
    weight = getattr(target.embedding, "weight", None)
    plain = type(weight) is torch.nn.Parameter and weight.is_floating_point() and weight.device.type != "meta"
    rules = [
        (
            config.hidden_size == target.hidden_size,
            f"hidden_size: the drafter has {config.hidden_size}, the target {target.hidden_size}",
            "they must be equal, because the drafter works on the target's embeddings",
        ),
        (
            drafter.fc.in_features == num_taps * config.hidden_size,
            f"target_layer_ids: {num_taps} layers are tapped, and fc fuses "
            f"{drafter.fc.in_features / config.hidden_size:g}",
            "the configuration must be the one that the weights were trained with",
        ),
        (
            max(config.target_layer_ids) < target.num_layers,
            f"target_layer_ids: the drafter taps layer {max(config.target_layer_ids)}, "
            f"the target has layers 0 to {target.num_layers - 1}",
            "every tapped layer must exist",
        ),
        (
            config.num_target_layers in (None, target.num_layers),
            f"num_target_layers: the drafter expects {config.num_target_layers}, the target has {target.num_layers}",
            "the drafter was trained for a target of another depth",
        ),
        (
            config.mask_token_id < (config.own_vocab_size if config.own_embeddings else rows),
            f"mask_token_id: {config.mask_token_id}, but "
            + (
                f"the drafter's own embedding has {config.own_vocab_size} rows"
                if config.own_embeddings
                else f"the target's embedding has {rows} rows"
            ),
            "the mask must be a row of the embedding",
        ),
        (
            config.block_size >= 2,
            f"block_size: {config.block_size}",
            "a block holds the anchor and at least one mask",
        ),
        (
            drafter.draft_token_ids is None
            or (int(drafter.draft_token_ids.min()) >= 0 and int(drafter.draft_token_ids.max()) < rows),
            f"draft_token_ids: the drafter proposes ids below 0 or beyond the target's {rows} rows",
            "every proposed token must exist",
        ),
        (
            config.input_embeddings == "module" or plain or type(target.embedding) is torch.nn.Embedding,
            f"input_embeddings: {config.input_embeddings!r}, and the target's embedding is quantised or offloaded",
            "rows of its weight must be at hand",
        ),
    ]
    for holds, found, rule in rules:
        if not holds:
            raise ValueError(
                f"This drafter is not for this target. {found}: {rule}. "
                "Load the drafter that was trained for this target."
            )


def origin_of(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> dict[str, str | None]:
    """What a drafter's configuration says of the target that it is trained for; `None` for what is not known."""
    return {
        "target_name": model.config._name_or_path or None,
        # Transformers sets it on what it loads from the Hub, and only there.
        "target_revision": getattr(model.config, "_commit_hash", None),
        "tokenizer_hash": None if tokenizer is None else tokenizer_hash(tokenizer),
        "template_hash": None if tokenizer is None else json_hash(tokenizer.chat_template),
    }


def compare_origin(
    target: Target, drafter: DFlashDraftModel, tokenizer: PreTrainedTokenizerBase | None, *, strict: bool
) -> None:
    """
    Compare what the drafter's configuration says of its target with this one, as far as both say it.

    Args:
        strict (`bool`): raise instead of warning, also where this target does not say it.

    Raises:
        `ValueError`: with `strict`, for a difference.
    """
    found, differences = origin_of(target.model, tokenizer), []
    for field, name in ORIGIN.items():
        trained, here = getattr(drafter.config, field), found[field]
        if trained is None or (here is None and not strict):
            continue
        if here is None:
            remedy = " (pass tokenizer=...)" if field in ("tokenizer_hash", "template_hash") else ""
            differences.append(f"{field}: {trained!r}, and {name} is not known here{remedy}")
        elif _plain(field, trained) != _plain(field, here):
            differences.append(f"{field}: {trained!r}, and {name} here is {here!r}")
    if not differences:
        return
    message = f"The drafter was trained for {'; '.join(differences)}."
    if strict:
        raise ValueError(f"{message} Load what it was trained for, or leave strict=True out.")
    logger.warning("%s The text stays the target's own; fewer proposals may be accepted.", message)


def _plain(field: str, value: str) -> str:
    """Of a name, its last part in lower case: a repository, its copy in a folder and the cache of the Hub are one."""
    if field != "target_name":
        return value
    parts = PurePath(value).parts
    of_cache = [part for part in parts if part.startswith("models--")]
    return (of_cache[-1].split("--")[-1] if of_cache else parts[-1] if parts else value).lower()


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash of the whole tokenizer, or of the vocabulary of one that is written in Python."""
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return json_hash(tokenizer.get_vocab())
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    # What the latest call asked for, not what the tokenizer is.
    return json_hash({key: value for key, value in state.items() if key not in ("padding", "truncation")})


def json_hash(value) -> str:
    """The first 16 hexadecimal digits of the SHA-256 of what JSON makes of a value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
