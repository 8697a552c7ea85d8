"""The prompt of a call, as `generate` prepared it: what is run of it, in which parts, and what its columns are."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch.nn.functional import pad
from transformers import Cache

from . import cache as caches
from . import compat
from .target import Target


class Part(NamedTuple):
    """
    Some columns of the prompt.

    Fields:
        inputs (`dict`): for the forward of the target.
        positions (`torch.LongTensor` of shape `(B, n)`): what `position_ids` says of them.
        mask (`torch.LongTensor` of shape `(B, n)`, *optional*): 0 for padding.
    """

    inputs: dict
    positions: torch.Tensor
    mask: torch.Tensor | None


class Prompt:
    """
    The prompt of a call.

    Args:
        target (`Target`): what it is for.
        ids (`torch.LongTensor` of shape `(B, n)`): the whole text or what is new of it; empty if there are embeddings.
        model_kwargs (`dict`): the rest of what `generate` prepared; the mask is of the whole text, positions may be of
            what is new.
        mask_length (`int`, *optional*): of a mask that `generate` left out, because it has no padding.

    Attributes:
        cache (`Cache`): of the target.
        past (`int`): columns that it holds already.
        num_columns (`int`): of the whole text.
        num_hidden (`int`): how many of them are not in `ids`.
        mask (`torch.LongTensor` of shape `(B, num_columns)`, *optional*): 0 for padding.
        positions (`torch.LongTensor` of shape `(B, num_columns)`): what `position_ids` says of them.

    Raises:
        `ValueError`: when the cache leaves nothing new.
    """

    def __init__(self, target: Target, ids: torch.Tensor, model_kwargs: dict, mask_length: int | None = None):
        self.target, self.ids, self.kwargs = target, ids, model_kwargs
        self.cache: Cache = model_kwargs[compat.CACHE]
        self.embeds, self.mask = model_kwargs.get("inputs_embeds"), model_kwargs.get("attention_mask")
        self.past, positions = caches.length_of(self.cache), model_kwargs.get("position_ids")
        # In this order, because the others may be of the new columns alone.
        self.num_columns = mask_length or next(
            tensor.shape[1] for tensor in (self.mask, positions, self.embeds, ids) if tensor is not None
        )
        if self.past and self.past >= self.num_columns:
            raise ValueError(
                f"{compat.CACHE}: it holds {self.past} tokens, and the text has {self.num_columns} with them, so that "
                "nothing is new. Pass the whole text, or its new tokens and an attention_mask for all, and at least "
                "one new token."
            )
        self.num_hidden = self.num_columns - ids.shape[1]
        if positions is None:
            positions = torch.arange(self.num_columns, device=ids.device).unsqueeze(0)
        # Those of the new columns suffice; what stands for the others is not used.
        self.positions = pad(positions, (self.num_columns - positions.shape[1], 0)).expand(len(ids), -1)
        self._before = caches.aside(self.cache) if len(ids) > 1 else None  # the loop moves the rows of a batch about

    def parts(self, size: int | None) -> Iterator[Part]:
        """What the cache does not hold, in parts of `size` columns (all at once)."""
        model, source = self.target.model, self._new(self.ids if self.embeds is None else self.embeds)
        size = size or max(1, self.num_columns - self.past)
        for start in range(self.past, max(1, self.num_columns), size):
            end = min(start + size, self.num_columns)
            columns, part = slice(start, end), source[:, start - self.past : end - self.past]
            kwargs = {**self.kwargs, "attention_mask": None if self.mask is None else self.mask[:, :end]}
            if self.embeds is not None:
                kwargs["inputs_embeds"] = part
            if "position_ids" in kwargs:
                kwargs["position_ids"] = self.positions[:, columns]
            ids = part if self.embeds is None else self.ids
            inputs = model.prepare_inputs_for_generation(ids, is_first_iteration=True, **kwargs)
            yield Part(inputs, self.positions[:, columns], None if self.mask is None else self.mask[:, columns])

    def run_again(self, answer: torch.Tensor, size: int | None) -> None:
        """Leave in the cache what plain decoding of several rows leaves after `answer` `(B, n)`, `size` columns at a
        time."""
        self.put_back()
        more = answer.shape[1]
        inputs, name = {compat.CACHE: self.cache, "use_cache": True}, "input_ids"
        source = torch.cat([self._new(self.ids), answer], dim=1)
        if self.embeds is not None:
            name, source = "inputs_embeds", torch.cat([self._new(self.embeds), self.target.embed(answer)], dim=1)
        if "logits_to_keep" in self.kwargs:  # the target need not give all
            inputs["logits_to_keep"] = 1
        mask = None if self.mask is None else pad(self.mask, (0, more), value=1)
        later = self.positions[:, -1:] + torch.arange(1, more + 1, device=answer.device)
        positions = torch.cat([self.positions, later], dim=1)
        total = self.num_columns + more
        for start in range(self.past, total, size or total):
            end = min(start + (size or total), total)
            inputs[name] = source[:, start - self.past : end - self.past]
            if mask is not None:
                inputs["attention_mask"] = mask[:, :end]
            if self.target.takes_positions:
                inputs["position_ids"] = positions[:, start:end]
            self.target.model(**inputs)

    def put_back(self) -> None:
        """Give the cache of several rows back what it held before the call."""
        if self._before is not None:
            caches.replace(self.cache, caches.aside(self._before))

    def _new(self, source: torch.Tensor) -> torch.Tensor:
        """Of ids or embeddings of the whole text or the new columns, the new columns."""
        return source[:, self.past - self.num_columns :]
