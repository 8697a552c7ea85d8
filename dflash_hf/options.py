"""What the loop does not honour, refused by name before any forward."""

from transformers import GenerationConfig

from . import cache as caches
from . import compat
from .configuration_dflash import DFlashConfig


# How sampled proposals are verified, and whether they are drawn from the drafter's law rather than its likeliest.
VERIFIERS = {"block": True, "rejection": True, "match": False}

# What `generate` prepares for a text and its images. Anything else of the caller's would be lost after the prompt.
_CARRIED = {
    "attention_mask",
    "position_ids",
    "inputs_embeds",
    "use_cache",
    "logits_to_keep",
    "output_attentions",
    "output_hidden_states",
    compat.CACHE,
    *compat.PROMPT_ONLY,
    *compat.TOKEN_TYPES,
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


def check_confidence(min_confidence: float | None, config: DFlashConfig) -> None:
    """Refuse a threshold that is none, or for a drafter that does not say how confident it is."""
    if min_confidence is None:
        return
    if not 0 <= min_confidence <= 1:
        raise ValueError(f"min_confidence={min_confidence!r}: a probability, between 0 and 1.")
    if config.confidence_head is None:
        raise ValueError(f"min_confidence={min_confidence!r}: this drafter has no confidence head; leave it out.")


def check_inputs(config: GenerationConfig, model_kwargs: dict, *model_types: str) -> None:
    """Refuse by name the inputs that this loop cannot carry from round to round."""
    given = {name for name, value in model_kwargs.items() if value is not None and not _is_empty(value)}
    others = sorted(given & compat.PROMPT_ONLY)
    if others and config.prefill_chunk_size is not None:
        raise ValueError(
            f"prefill_chunk_size={config.prefill_chunk_size}: a prompt with images or sound ({', '.join(others)}) is "
            "run at once; leave prefill_chunk_size out."
        )
    unknown = sorted(given - _CARRIED)
    if unknown:
        raise ValueError(
            f"{', '.join(unknown)}: DFlash passes text, and images with the prompt, on to the target, and does not "
            "know how this goes on from token to token; leave the drafter out."
        )
    caches.check_can_roll_back(model_kwargs.get(compat.CACHE), *model_types)


def _is_empty(value) -> bool:
    return isinstance(value, dict) and not value
