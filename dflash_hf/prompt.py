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
        positions (`torch.LongTensor` of shape `(B, num_columns)`): of each in the text.
        position_offsets (`torch.LongTensor` of shape `(B, d, 1)`, *optional*): of a target with `d` positions a token
            (of images, time, height and width), what they are more than that in text after the prompt.
        token_types (`dict[str, int]`): inputs that say of each token what it is, and what they say of those that are
            decoded: text, or as of the last of the prompt.

    Raises:
        `ValueError`: when the cache leaves nothing new, or rows end with tokens of different types.
    """

    def __init__(self, target: Target, ids: torch.Tensor, model_kwargs: dict, mask_length: int | None = None):
        self.target, self.ids, self.kwargs = target, ids, model_kwargs
        self.cache: Cache = model_kwargs[compat.CACHE]
        self.embeds, self.mask = model_kwargs.get("inputs_embeds"), model_kwargs.get("attention_mask")
        self.past, positions = caches.length_of(self.cache), model_kwargs.get("position_ids")
        # In this order, because the others may be of the new columns alone.
        given = (self.mask, positions if positions is None else positions.flatten(0, -2), self.embeds, ids)
        self.num_columns = mask_length or next(tensor.shape[1] for tensor in given if tensor is not None)
        if self.past and self.past >= self.num_columns:
            raise ValueError(
                f"{compat.CACHE}: it holds {self.past} tokens, and the text has {self.num_columns} with them, so that "
                "nothing is new. Pass the whole text, or its new tokens and an attention_mask for all, and at least "
                "one new token."
            )
        self.num_hidden = self.num_columns - ids.shape[1]
        # What the target is given of the new columns suffices; what stands for the others is not used.
        self._given = None if positions is None else pad(positions, (self.num_columns - positions.shape[-1], 0))
        self.position_offsets = None
        if positions is None or positions.dim() == 2:
            counted = torch.arange(self.num_columns, device=ids.device).unsqueeze(0)
            self.positions = (counted if positions is None else self._given).expand(len(ids), -1)
        else:
            self.positions = self._in_text().expand(len(ids), -1)
            self.position_offsets = (self._given[..., -1:] - self.positions[:, -1:]).expand(-1, len(ids), -1)
            self.position_offsets = self.position_offsets.transpose(0, 1)
        given_types = {name: model_kwargs[name] for name in compat.TOKEN_TYPES if model_kwargs.get(name) is not None}
        self.token_types = {name: 0 if "mm" in name else _same(name, types) for name, types in given_types.items()}
        self._before: Cache | None = caches.aside(self.cache)

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
            if self._given is not None:
                kwargs["position_ids"] = self._given[..., columns]
            kwargs |= {name: kwargs[name][..., :end] for name in self.token_types}
            ids = part if self.embeds is None else self.ids
            inputs = model.prepare_inputs_for_generation(ids, is_first_iteration=True, **kwargs)
            yield Part(inputs, self.positions[:, columns], None if self.mask is None else self.mask[:, columns])

    def run_again(self, answer: torch.Tensor, size: int | None) -> None:
        """Leave in the cache what plain decoding of several rows leaves after `answer` `(B, n)`, `size` columns at a
        time."""
        self.put_back()
        for part in self.parts(size):
            self.target.model(**part.inputs)
        number = answer.shape[1]
        for start in range(0, number, size or max(1, number)):
            steps = torch.arange(start, min(start + (size or number), number), device=answer.device)
            mask = None if self.mask is None else pad(self.mask, (0, int(steps[-1]) + 1), value=1)
            positions = self.positions[:, -1:] + 1 + steps
            inputs = self.later_inputs(answer[:, steps], positions, self.position_offsets, mask, num_logits=1)
            self.target.model(**inputs)

    def later_inputs(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        offsets: torch.Tensor | None,
        mask: torch.Tensor | None,
        num_logits: int | None = None,
    ) -> dict:
        """
        For a forward of the target on tokens after the prompt.

        Args:
            ids, positions (`torch.LongTensor` of shape `(rows, n)`): of the tokens.
            offsets (`torch.LongTensor` of shape `(rows, d, 1)`, *optional*): of these rows, see `position_offsets`.
            mask (`torch.LongTensor` of shape `(rows, columns)`, *optional*): of all columns with them.
            num_logits (`int`, *optional*): of how many of the last tokens logits are needed, if not of all.
        """
        inputs = {"input_ids": ids, compat.CACHE: self.cache, "use_cache": True, "return_dict": True}
        if self.target.takes_positions:
            more = positions if offsets is None else (positions.unsqueeze(1) + offsets).transpose(0, 1)
            inputs["position_ids"] = more
        if mask is not None:
            inputs["attention_mask"] = mask
        if num_logits is not None and "logits_to_keep" in self.kwargs:
            inputs["logits_to_keep"] = num_logits
        return inputs | {name: torch.full_like(ids, value) for name, value in self.token_types.items()}

    def is_run(self) -> None:
        """
        The prompt has been run. From here on the cache of a single row is at every commit what plain decoding has;
        the rows of a batch are moved about.
        """
        if len(self.ids) == 1:
            self._before = None

    def put_back(self) -> None:
        """Give the cache back what it held before the call, unless it is what plain decoding has."""
        if self._before is not None:
            caches.replace(self.cache, caches.aside(self._before))

    def _new(self, source: torch.Tensor) -> torch.Tensor:
        """Of ids or embeddings of the whole text or the new columns, the new columns."""
        return source[:, self.past - self.num_columns :]

    def _in_text(self) -> torch.Tensor:
        """Positions in the text, of a target that is given several for each token: `(B or 1, num_columns)`."""
        if len(self._given) == 4:  # the first says so
            return self._given[0]
        if self.mask is None:
            return torch.arange(self.num_columns, device=self.ids.device).unsqueeze(0)
        return (self.mask.cumsum(1) - 1).clamp(min=0)


def _same(name: str, types: torch.Tensor) -> int:
    """The type of the last token, which must be that of all rows."""
    last = set(types[:, -1].tolist())
    if len(last) > 1:
        raise ValueError(
            f"{name}: the rows end with tokens of types {sorted(last)}; decode them in calls of their own."
        )
    return last.pop()
