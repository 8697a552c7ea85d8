"""The only room that touches the inside of caches: what can be rolled back, and how."""

import torch
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from .configuration_dflash import DFlashConfig


def check_can_roll_back(cache: Cache | None) -> None:
    """
    Raise `ValueError` unless every layer of the target's cache can forget rejected tokens.

    Known are the full and the sliding-window layers of a dynamic cache; any other kind is refused by its name.
    """
    if cache is None:
        raise ValueError("use_cache=False: DFlash keeps a cache of committed tokens; leave use_cache at True.")
    for layer in cache.layers:
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise ValueError(
                f"cache layer {type(layer).__name__}: DFlash cannot roll it back yet. Supported are targets with full "
                "or sliding-window attention and the default cache (cache_implementation=None or 'dynamic')."
            )


def new_draft_cache(config: DFlashConfig) -> DynamicCache:
    """An empty cache for the drafter's context; sliding layers keep `window - 1` tokens after each crop."""
    cache = DynamicCache(config=config)
    start_recording(cache)
    return cache


def start_recording(cache: Cache) -> None:
    """
    Let sliding layers hold on to tokens beyond their window until the next [`crop_to`].

    For the target this starts after the prompt, since the prompt is never rolled back and would be stored whole.
    """
    for layer in cache.layers:
        if isinstance(layer, DynamicSlidingWindowLayer):
            layer.record_past = True


def stop_recording(cache: Cache) -> None:
    """
    Give the cache back as transformers keeps it: sliding layers hold no more than their window.

    Recording has not started when the prompt's forward failed.
    """
    for layer in cache.layers:
        if isinstance(layer, DynamicSlidingWindowLayer) and layer.record_past:
            layer.crop(0)
            layer.record_past = False


def crop_to(cache: Cache, length: int) -> None:
    """
    Forget everything after the first `length` tokens.

    Layer by layer, because a forward that failed half-way has added to some layers only; a layer that never saw a
    token has nothing to forget.
    """
    for layer in cache.layers:
        if layer.is_initialized:
            layer.crop(min(0, length - layer.get_seq_length()))


def num_keys(cache: Cache | None, layer_idx: int, added: int) -> int:
    """Keys that layer `layer_idx` gives back when it gets `added` new ones: a sliding layer, those near enough."""
    if cache is None or layer_idx >= len(cache.layers):  # some caches make their layers at the first update
        return added
    return cache.layers[layer_idx].get_mask_sizes(added)[0]


def length_of(cache: Cache) -> int:
    """Tokens that the cache stands for, as an `int` (some layers count in a tensor)."""
    length = cache.get_seq_length()
    return int(length) if isinstance(length, torch.Tensor) else length
