"""What the loop does not honour, refused by name before any forward."""

import torch
from transformers import GenerationConfig

from . import cache as caches
from . import compat


# How sampled proposals are verified, and whether they are drawn from the drafter's law rather than its likeliest.
VERIFIERS = {"block": True, "rejection": True, "match": False}

# What `generate` prepares for a text. Anything else of the caller's would be lost after the prompt.
_CARRIED = {
    "attention_mask",
    "position_ids",
    "inputs_embeds",
    "use_cache",
    "logits_to_keep",
    "output_attentions",
    "output_hidden_states",
    compat.CACHE,
}


def check(config: GenerationConfig, verifier: str, num_assistant_tokens: int | None) -> None:
    """Refuse by name the options that this loop does not honour."""
    if verifier not in VERIFIERS:
        raise ValueError(f"verifier={verifier!r}: choose one of {', '.join(VERIFIERS)}.")
    for cap in (num_assistant_tokens, config.num_assistant_tokens):
        if cap is not None and cap < 1:
            raise ValueError(f"num_assistant_tokens={cap}: at least 1; for none, leave the drafter out.")
    if config.num_beams > 1:
        raise ValueError(f"num_beams={config.num_beams}: DFlash decodes without beams; leave the drafter out.")
    if config.prompt_lookup_num_tokens:
        raise ValueError(
            f"prompt_lookup_num_tokens={config.prompt_lookup_num_tokens}: that is another way to draft than a DFlash "
            "drafter; leave one of them out."
        )


def check_inputs(input_ids: torch.Tensor, model_kwargs: dict) -> None:
    """Refuse by name the inputs that this loop cannot carry from round to round."""
    unknown = [name for name, value in model_kwargs.items() if value is not None and name not in _CARRIED]
    if unknown:
        raise ValueError(
            f"{', '.join(unknown)}: so far DFlash passes only text on to the target; leave the drafter out."
        )
    positions = model_kwargs.get("position_ids")
    if positions is not None and positions.dim() != 2:
        raise ValueError(
            f"position_ids of shape {tuple(positions.shape)}: so far DFlash knows targets with one position a token."
        )
    cache = model_kwargs.get(compat.CACHE)
    caches.check_can_roll_back(cache)
    past, total = caches.length_of(cache), prompt_columns(input_ids, model_kwargs)
    if past and past >= total:
        raise ValueError(
            f"{compat.CACHE}: it holds {past} tokens, and the text has {total} with them, so that nothing is new. "
            "Pass the whole text, or its new tokens and an attention_mask for all, and at least one new token."
        )


def prompt_columns(input_ids: torch.Tensor, model_kwargs: dict) -> int:
    """
    Columns of the prompt, those included that a given cache holds already.

    `generate` takes the whole text or what is new of it; mask and positions are of the whole text in both cases.
    """
    for name in ("attention_mask", "position_ids"):
        if model_kwargs.get(name) is not None:
            return model_kwargs[name].shape[1]
    embeds = model_kwargs.get("inputs_embeds")
    return (input_ids if embeds is None else embeds).shape[1]
