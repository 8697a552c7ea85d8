"""What the loop does not honour, refused by name before any forward."""

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


def check_inputs(model_kwargs: dict) -> None:
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
    caches.check_can_roll_back(model_kwargs.get(compat.CACHE))
