"""The inside of caches: what can be rolled back, and how. (What recurrent layers hold is for `recurrent.py`.)"""

import copy
from collections.abc import Mapping, Sequence

import torch
from transformers import Cache, DynamicCache
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

from . import compat
from .configuration_dflash import DFlashConfig
from .recurrent import MixerCall, RecurrentLayers, copy_of, is_recurrent


# The kinds of layers that can be brought back to a commit: what is a list of tokens is cropped, a state is put back.
KINDS = {
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    *compat.DUMMY_LAYERS,
}


# Families of which a verified block does not say what plain decoding writes, or that cannot be tapped.
_NOT_ONE_BY_ONE = "in transformers, its forward of several tokens after a cache is not that of one after the other"
UNSOUND = {
    "jamba": _NOT_ONE_BY_ONE,
    "zamba": _NOT_ONE_BY_ONE,
    "zamba2": _NOT_ONE_BY_ONE,
    "paligemma": _NOT_ONE_BY_ONE,
    "recurrent_gemma": "it keeps its states in its layers and not in a cache",
    "gemma3n": "its layers have several hidden states for each token",
    "gemma3n_text": "its layers have several hidden states for each token",
}


def check_can_roll_back(cache: Cache | None, *model_types: str) -> None:
    """
    Raise `ValueError` unless every layer of the target's cache can forget rejected tokens.

    Known are the full, the sliding-window and the recurrent layers of a dynamic cache; any other kind is refused by
    its name.
    """
    for model_type in model_types:
        if model_type in UNSOUND:
            raise ValueError(f"model_type={model_type!r}: {UNSOUND[model_type]}; leave the drafter out.")
    if cache is None:
        raise ValueError(
            f"no cache was prepared (use_cache=False, or model_type={model_types[0]!r} has one of its own kind): "
            "DFlash keeps a cache of committed tokens; leave use_cache at True, or the drafter out."
        )
    if cache.offloading:
        raise ValueError(
            "cache_implementation='offloaded': DFlash rolls back and moves what a cache holds, and knows only how to "
            "where that stays on the device; leave it out."
        )
    for layer in cache.layers:
        if type(layer) not in KINDS:
            raise ValueError(
                f"cache layer {type(layer).__name__}: DFlash does not know how to roll it back. Supported are targets "
                "with full or sliding-window attention and recurrent layers, and the default cache "
                "(cache_implementation=None or 'dynamic')."
            )
    if cache.layers and not any(isinstance(layer, DynamicLayer) for layer in cache.layers):
        raise ValueError(
            f"cache layer {type(cache.layers[0]).__name__} in every layer: a target without any attention does not "
            "say how many tokens its cache stands for; leave the drafter out."
        )


def start_recording(cache: Cache) -> None:
    """
    Let sliding layers hold on to tokens beyond their window until the next [`crop_to`].

    This starts after the prompt, which is never rolled back and would be stored whole.
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
            DynamicSlidingWindowLayer.crop(layer, 0)
            layer.record_past = False


def crop_to(cache: Cache, length: int) -> None:
    """
    Forget everything after the first `length` tokens.

    Layer by layer, because a forward that failed half-way has added to some layers only; a layer that never saw a
    token has nothing to forget, and one that slides without recording has forgotten already.
    """
    for layer in _with_tokens(cache):
        sliding = isinstance(layer, DynamicSlidingWindowLayer)
        if (sliding and layer.record_past) or layer.get_seq_length() > length:
            # Not `layer.crop`, which in a layer with a state besides would crop that too.
            kind = DynamicSlidingWindowLayer if sliding else DynamicLayer
            kind.crop(layer, min(0, length - layer.get_seq_length()))


def aside(cache: Cache) -> Cache:
    """
    What the cache holds now, whatever is done to it later.

    Of keys and values only references are copied: they are replaced, never changed in place.
    """
    kept = copy.copy(cache)
    kept.layers = [copy_of(layer) if is_recurrent(layer) else copy.copy(layer) for layer in cache.layers]
    return kept


def replace(cache: Cache, other: Cache) -> None:
    """Let `cache` hold what `other` holds."""
    cache.layers = other.layers


class AlignedCache:
    """
    A cache of committed tokens in which every row ends at the last column, as with ordinary left padding.

    A forward appends columns; of these [`keep`] keeps the first few of each row. The rest is cropped, and rows that
    keep fewer than others move to the right, so that distances within a row stay what they are: sliding windows and
    positions need not know that the rows were accepted at different speeds. Columns that are padding in every row are
    dropped. The states of recurrent layers go the same way, as [`RecurrentLayers`] does it.

    Args:
        cache (`Cache`): of the model.
        num_rows (`int`): B.
        mask (`torch.LongTensor` of shape `(B, length)`, *optional*): 0 for padding; `None` while there is none.
    """

    def __init__(self, cache: Cache, num_rows: int, mask: torch.Tensor | None = None):
        self.cache, self.mask = cache, mask
        self.length = length_of(cache)
        self.row_lengths = [self.length] * num_rows  # padding that a row had from the start counts as its own
        self.recurrent = RecurrentLayers(cache)

    def mask_with(self, batch: int, *parts: int | torch.Tensor) -> torch.Tensor | None:
        """
        The mask of the committed columns and of `parts` after them; `None` when nothing is padding.

        Args:
            parts: a number of columns without padding, or their mask `(B, n)`.
        """
        if self.mask is None and all(isinstance(part, int) for part in parts):
            return None
        masks = [self.length if self.mask is None else self.mask, *parts]
        like = next(mask for mask in masks if isinstance(mask, torch.Tensor))
        return torch.cat([like.new_ones(batch, m) if isinstance(m, int) else m for m in masks], dim=1)

    def keep(
        self,
        kept: Sequence[int],
        new: torch.Tensor | None = None,
        calls: Mapping[int, MixerCall] | None = None,
    ) -> None:
        """
        Of the columns that were appended since the last time, keep the first `kept[b]` of row b.

        Args:
            new (`torch.LongTensor` of shape `(B, n)`, *optional*): their mask, if some of those kept are padding.
            calls (`Mapping[int, MixerCall]`, *optional*): of the recurrent layers, if there are any and not all
                columns are kept.
        """
        most = max(kept)
        self.recurrent.replay(kept, length_of(self.cache) - self.length, calls)
        mask = self.mask_with(len(kept), most if new is None else new[:, :most])
        shifts = [most - count for count in kept]
        if any(shifts):
            if mask is None:
                mask = torch.ones(len(kept), self.length + most, dtype=torch.long, device=self._device())
            shift = torch.tensor(shifts, device=mask.device).unsqueeze(1)
            columns = torch.arange(mask.shape[1], device=mask.device) - shift  # [B, columns]: where each comes from
            mask = torch.where(columns >= 0, mask.gather(1, columns.clamp(min=0)), 0)
            for layer in self._layers():
                _move_right(layer, shift)
        self.mask, self.length = mask, self.length + most
        self.row_lengths = [length + count for length, count in zip(self.row_lengths, kept, strict=True)]
        self.recurrent.save()
        crop_to(self.cache, self.length)
        self._drop_padding()

    def roll_back(self) -> None:
        """Forget the columns that were appended since the last [`keep`]."""
        crop_to(self.cache, self.length)
        self.recurrent.restore()

    def select(self, rows: list[int]) -> None:
        """Forget all rows but these."""
        for layer in self._layers():
            DynamicLayer.batch_select_indices(layer, torch.tensor(rows, device=layer.device))
        self.recurrent.select(rows)
        if self.mask is not None:
            self.mask = self.mask[rows]
        self.row_lengths = [self.row_lengths[row] for row in rows]
        self._drop_padding()

    def _drop_padding(self) -> None:
        """Forget the first columns, as far as no row has anything there."""
        surplus = self.length - max(self.row_lengths)
        if surplus:
            self.mask, self.length = self.mask[:, surplus:], self.length - surplus
            for layer in self._layers():
                _drop_first(layer, surplus)

    def _layers(self) -> list[DynamicLayer]:
        return _with_tokens(self.cache)

    def _device(self) -> torch.device:
        return self._layers()[0].device


def leave_draft(cache: Cache, config: DFlashConfig, draft: AlignedCache) -> None:
    """
    Leave the drafter's cache with the target's, for a call that goes on from there.

    It is an attribute of the target's cache, and so is copied, pickled and forgotten with it.
    """
    stop_recording(draft.cache)
    cache.dflash_draft = config, draft


def take_draft(cache: Cache, config: DFlashConfig, num_rows: int) -> AlignedCache:
    """
    The drafter's cache that was left with the target's, if it stands for the same tokens; else an empty one.

    From an empty one the drafter sees only what is new, which costs acceptance and nothing else. Taken is what is of
    the same geometry and rows, as long as the target's cache or, after the caller cropped that, longer.
    """
    known, draft = vars(cache).pop("dflash_draft", (None, None))
    length = length_of(cache)
    if known is not None and known.to_dict() == config.to_dict() and len(draft.row_lengths) == num_rows:
        forgetful = [layer for layer in draft.cache.layers if layer.is_sliding]
        if draft.length > length and all(draft.length < layer.sliding_window for layer in forgetful):
            crop_to(draft.cache, length)
            draft = AlignedCache(draft.cache, num_rows, None if draft.mask is None else draft.mask[:, :length])
        if draft.length == length:
            return draft
    return AlignedCache(DynamicCache(config=config), num_rows)


def _move_right(layer: DynamicLayer, shift: torch.Tensor) -> None:
    """Move row b of keys and values by `shift[b]` `(B, 1)` columns; what falls off on the right is lost."""
    batch, heads, length, _ = layer.keys.shape
    columns = (torch.arange(length, device=layer.keys.device) - shift.to(layer.keys.device)).clamp(min=0)
    first = length * torch.arange(batch * heads, device=columns.device).view(batch, heads, 1)
    # Whole vectors are copied, which is much faster than a gather of single numbers.
    index = (first + columns.unsqueeze(1)).flatten()
    layer.keys = layer.keys.flatten(0, 2).index_select(0, index).view_as(layer.keys)
    layer.values = layer.values.flatten(0, 2).index_select(0, index).view_as(layer.values)


def _drop_first(layer: DynamicLayer, number: int) -> None:
    """Forget the first `number` columns."""
    length = layer.get_seq_length() - number
    if layer.is_sliding:
        layer.cumulative_length = length
    first = max(0, layer.keys.shape[2] - length)  # a sliding layer may have forgotten them already
    layer.keys, layer.values = layer.keys[:, :, first:], layer.values[:, :, first:]


def num_keys(cache: Cache | None, layer_idx: int, added: int) -> int:
    """Keys that layer `layer_idx` gives back when it gets `added` new ones: a sliding layer, those near enough."""
    if cache is None or layer_idx >= len(cache.layers):  # some caches make their layers at the first update
        return added
    return cache.layers[layer_idx].get_mask_sizes(added)[0]


def windows_of(cache: Cache) -> list[int | None]:
    """The sliding window of each layer with attention, `None` of one that keeps all."""
    return [layer.sliding_window if layer.is_sliding else None for layer in _with_tokens(cache)]


def _with_tokens(cache: Cache) -> list[DynamicLayer]:
    """The layers that hold keys and values by now."""
    return [layer for layer in cache.layers if isinstance(layer, DynamicLayer) and layer.is_initialized]


def length_of(cache: Cache) -> int:
    """Tokens that the cache stands for, as an `int` (some layers count in a tensor)."""
    length = cache.get_seq_length()
    return int(length) if isinstance(length, torch.Tensor) else length
