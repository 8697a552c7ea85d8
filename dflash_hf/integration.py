"""The way in: `attach` gives a target a `generate` that knows DFlash drafters."""

import functools
import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass

from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from . import options, pairing
from .decoding import decode
from .modeling_dflash import DFlashDraftModel
from .target import Target


logger = logging.get_logger(__name__)


@dataclass(frozen=True)
class Attachment:
    """The options given to [`attach`], which hold for every later call."""

    verifier: str
    num_assistant_tokens: int | None
    min_confidence: float | None


def attach(
    target: PreTrainedModel,
    drafter: DFlashDraftModel | str | os.PathLike,
    *,
    verifier: str = "block",
    num_assistant_tokens: int | None = None,
    min_confidence: float | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    strict: bool = False,
) -> DFlashDraftModel:
    """
    Let `target.generate(..., assistant_model=drafter)` decode with a DFlash drafter.

    Without `assistant_model`, with an ordinary assistant or with an explicit `speculation_type`, `target.generate`
    stays transformers' own. The target gets an instance attribute `generate` and a hook on each tapped layer, and so
    refers to itself: [`detach`] undoes both. Vocabulary size and special tokens in the drafter's configuration become
    the target's, because pipelines compare them.

    Args:
        target (`PreTrainedModel` or `peft.PeftModel`):
            A causal language model, or what wraps one: its adapters act on text and drafts alike.
        drafter (`DFlashDraftModel`, `str` or `os.PathLike`):
            A drafter, or the folder or Hub repository to load it from, in the target's dtype. It is moved to the
            device of the target's head unless it is dispatched already.
        verifier (`str`, *optional*, defaults to `"block"`):
            How sampled proposals are verified; all have exactly the target's law. `"block"` and `"rejection"` draw
            proposals from the drafter and accept by the ratio of probabilities, `"block"` of all proposals jointly
            (never fewer on average) and `"rejection"` one by one; `"match"` proposes the likeliest tokens and accepts
            what the target draws too. Greedy decoding needs none of them.
        num_assistant_tokens (`int`, *optional*):
            Verify at most so many proposals a round.
        min_confidence (`float`, *optional*):
            Of a drafter with a confidence head (DSpark): verify no further than to the first proposal that it gives
            less.
        tokenizer (`PreTrainedTokenizerBase`, *optional*):
            The target's, to be compared with the one that the drafter was trained with, its chat template included.
        strict (`bool`, *optional*, defaults to `False`):
            Whether it is an error that the drafter's configuration names another target, revision, tokenizer or chat
            template than these; by default a warning says so.

    Returns:
        [`DFlashDraftModel`]: the drafter.

    Raises:
        `ValueError`: when the drafter does not fit the target; the message names field, values and remedy.

    Example:

    ```python
    >>> drafter = dflash_hf.attach(target, "z-lab/Qwen3-8B-DFlash-b16")
    >>> target.generate(**inputs, assistant_model=drafter, max_new_tokens=512)
    ```
    """
    if verifier not in options.VERIFIERS:
        raise ValueError(f"verifier={verifier!r}: choose one of {', '.join(options.VERIFIERS)}.")
    if not isinstance(drafter, DFlashDraftModel):
        drafter = DFlashDraftModel.from_pretrained(drafter, dtype=target.dtype)
    options.check_confidence(min_confidence, drafter.config)
    adapter = Target(target)
    target = adapter.model
    pairing.check(adapter, drafter)
    pairing.compare_origin(adapter, drafter, tokenizer, strict=strict)
    dispatched = getattr(drafter, "hf_device_map", None) is not None or drafter.device.type == "meta"
    if not dispatched and drafter.device != adapter.device:
        logger.warning("The drafter moves from %s to %s, where the target's head is.", drafter.device, adapter.device)
        drafter.to(adapter.device)
    drafter.eval()
    text = target.config.get_text_config(decoder=True)
    for name in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(drafter.config, name, getattr(text, name))
    adapter.install_hooks(drafter.config.target_layer_ids)
    attachment = Attachment(verifier, num_assistant_tokens, min_confidence)
    target.generate = functools.partial(_generate, target, attachment)
    return drafter


def detach(target: PreTrainedModel) -> None:
    """Undo [`attach`]: `target.generate` is the class's again and the hooks are gone. Without attachment, nothing."""
    adapter = Target(target)
    vars(adapter.model).pop("generate", None)
    adapter.remove_hooks()


def custom_generate(
    drafter: DFlashDraftModel,
    *,
    verifier: str = "block",
    num_assistant_tokens: int | None = None,
    min_confidence: float | None = None,
    streamer=None,
    tokenizer=None,
) -> Callable:
    """
    A decoding method for `target.generate(..., custom_generate=...)`: nothing is attached.

    Args:
        drafter (`DFlashDraftModel`):
            The drafter.
        verifier, num_assistant_tokens, min_confidence:
            As for [`attach`].
        streamer (`BaseStreamer`, *optional*):
            Gets the prompt and then the tokens of each round. `generate` does not hand its own `streamer` on.
        tokenizer (`PreTrainedTokenizerBase`, *optional*):
            Needed for `stop_strings`; `generate` does not hand its own on either.

    Example:

    ```python
    >>> target.generate(**inputs, custom_generate=dflash_hf.custom_generate(drafter), max_new_tokens=512)
    ```
    """
    return functools.partial(
        decode,
        drafter=drafter,
        verifier=verifier,
        num_assistant_tokens=num_assistant_tokens,
        min_confidence=min_confidence,
        streamer=streamer,
        tokenizer=tokenizer,
    )


def _generate(target: PreTrainedModel, attachment: Attachment, *args, **kwargs):
    """`generate` of an attached target."""
    generate = type(target).generate
    arguments = inspect.signature(generate).bind(target, *args, **kwargs).arguments
    options = arguments.pop("kwargs", {})
    drafter = arguments.get("assistant_model")
    other_method = options.get("speculation_type") or arguments.get("custom_generate")
    if not isinstance(drafter, DFlashDraftModel) or other_method is not None:
        return generate(target, *args, **kwargs)
    del arguments["self"], arguments["assistant_model"]
    decoding = custom_generate(
        drafter,
        verifier=attachment.verifier,
        num_assistant_tokens=attachment.num_assistant_tokens,
        min_confidence=attachment.min_confidence,
        streamer=arguments.pop("streamer", None),
        tokenizer=options.pop("tokenizer", None),
    )
    stop_strings = _take_stop_strings(target, arguments.get("generation_config"), options)

    def method(*args, **kwargs):  # has no parameter `stop_strings`, so that a None among the options takes effect
        return decoding(*args, stop_strings=stop_strings, **kwargs)

    return generate(target, **arguments, **options, custom_generate=method)


def _take_stop_strings(target: PreTrainedModel, config: GenerationConfig | None, options: dict):
    """
    The stop strings of a call, from its options, its configuration or the target's, in this order.

    `generate` insists on a tokenizer for them but does not hand it on to a decoding method, so they are kept from it:
    taken out of `options`, and replaced by None there where a configuration has some.
    """
    configured = [c.stop_strings for c in (config, target.generation_config) if c is not None and c.stop_strings]
    stop_strings = options.pop("stop_strings", configured[0] if configured else None)
    if configured:
        options["stop_strings"] = None
    return stop_strings
