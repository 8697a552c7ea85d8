"""What stands around the loop: logits processors per slot, stopping per token, streaming, and the returned object."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import count, islice, zip_longest

import torch
from torch.nn.functional import pad
from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    GenerationConfig,
    LogitNormalization,
    LogitsProcessorList,
    MaxLengthCriteria,
    MinPLogitsWarper,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)
from transformers.generation import EosTokenCriteria, GenerateDecoderOnlyOutput

from . import compat, memory
from .metrics import GenerationStatistics


# These look at the scores only, not at the text before them, so all slots can pass at once.
_POINTWISE = {
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    LogitNormalization,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
}


@dataclass
class DFlashGenerateOutput(GenerateDecoderOnlyOutput):
    """
    What `generate` returns with `return_dict_in_generate=True`: [`~generation.GenerateDecoderOnlyOutput`] and

    Args:
        acceptance_lengths (`list[list[int]]`): for each row, the tokens committed in each round.
        statistics (`GenerationStatistics`): counts and times of the call.
    """

    acceptance_lengths: list[list[int]] | None = None
    statistics: GenerationStatistics | None = None


@dataclass
class Texts:
    """
    What the rows of a batch say so far.

    Args:
        ids (`torch.LongTensor` of shape `(B, n)`): every row from column 0 on, its left padding included; columns
            after its end hold the padding token.
        ends (`list[int]`): columns of each row.
        rows (`list[int]`): the rows that are still being written; the tensors of a round have one entry for each.
    """

    ids: torch.Tensor
    ends: list[int]
    rows: list[int]

    def with_block(self, block: torch.Tensor, pad_id: int = 0) -> torch.Tensor:
        """`ids` with `block` `(rows, n)` after the end of each row that is being written: `(B, columns + n)`."""
        if len(self.rows) == 1 == self.ids.shape[0]:
            return torch.cat([self.ids[:, : self.ends[0]], block], dim=1)
        ids = pad(self.ids, (0, block.shape[1]), value=pad_id)
        columns = torch.arange(block.shape[1], device=ids.device) + self.column_of_ends()
        rows = torch.tensor(self.rows, device=ids.device).unsqueeze(1)
        return ids.index_put((rows, columns), block)

    def followed_by(self, block: torch.Tensor) -> "Texts":
        """These texts with `block` `(rows, n)` at the end of each."""
        if not block.shape[1]:
            return self
        ends = list(self.ends)
        for row in self.rows:
            ends[row] += block.shape[1]
        return Texts(self.with_block(block), ends, self.rows)

    def extended(self, block: torch.Tensor, counts: list[int], pad_id: int) -> "Texts":
        """These texts with the first `counts[i]` tokens of `block[i]` at the end of each row that is being written."""
        ends = list(self.ends)
        for row, number in zip(self.rows, counts, strict=True):
            ends[row] += number
        if min(ends) < max(ends):  # what comes after a shorter row would stay in the columns of a longer one
            kept = torch.tensor(counts, device=block.device).unsqueeze(1)
            block = torch.where(torch.arange(block.shape[1], device=block.device) < kept, block, pad_id)
        return Texts(self.with_block(block, pad_id)[:, : max(ends)], ends, self.rows)

    def column_of_ends(self) -> torch.Tensor:
        """The end of each row that is being written, `(rows, 1)`."""
        return torch.tensor([self.ends[row] for row in self.rows], device=self.ids.device).unsqueeze(1)

    def groups(self) -> Iterator[tuple[int, list[int]]]:
        """`(end, entries)`: which of the rows that are being written end where."""
        ends = [self.ends[row] for row in self.rows]
        for end in sorted(set(ends)):
            yield end, [i for i, other in enumerate(ends) if other == end]


class Processing:
    """
    The caller's logits processors, applied at every slot with the text that the slot really follows.

    A processor that looks at the text is shown the whole batch, as in plain decoding, once for each length that a row
    has; what it says of rows of another length is not used.

    Args:
        processors (`LogitsProcessorList`): as `generate` prepared them.
        end_ids (`set[int]`): tokens that end a text.
        pad_id (`int`): what follows them.

    Attributes:
        as_plain (`list`): those that must be asked what plain decoding asks them, slot by slot.
        for_drafts (`LogitsProcessorList`): those that may be asked ahead.
    """

    def __init__(self, processors: LogitsProcessorList, end_ids: set[int], pad_id: int):
        self.processors, self.end_ids, self.pad_id = processors, end_ids, pad_id
        self.as_plain = memory.asked_as_plain(
            processors,
            "drafts are made without it, unless it has `snapshot()` and `restore(snapshot)`, and the rows of a batch "
            "keep one pace",
        )
        stuck = [processor for processor in self.as_plain if not memory.can_go_back(processor)]
        self.for_drafts = LogitsProcessorList([processor for processor in processors if processor not in stuck])

    def trial(self) -> AbstractContextManager:
        """What processors are shown in this context, they forget afterwards."""
        return memory.on_trial([processor for processor in self.as_plain if processor in self.for_drafts])

    def __call__(self, texts: Texts, logits: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
        """
        Scores of n slots.

        Args:
            texts (`Texts`): what the rows say before the first slot.
            logits (`torch.Tensor` of shape `(rows, n, V)`, float32): raw.
            block (`torch.LongTensor` of shape `(rows, n - 1)`): tokens between the slots; slot i follows
                `block[:, :i]`.

        Returns:
            `torch.Tensor` of shape `(rows, n, V)`, float32. `logits` is left as it was.
        """
        if not self.processors:
            return logits
        if _pointwise(self.processors):
            return self.processors(texts.ids, logits.flatten(0, 1).clone()).view_as(logits)
        ids, slots = texts.with_block(block, self.pad_id), range(logits.shape[1])
        return torch.stack([_at(self.processors, texts, ids, i, logits[:, i]) for i in slots], dim=1)

    def walk(
        self,
        texts: Texts,
        logits: torch.Tensor | Callable[[int, torch.Tensor], torch.Tensor],
        num_slots: int,
        pick: Callable[[torch.Tensor], torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Scores of the slots of a draft, of which each follows what was picked in the one before.

        Where processors look at the text, the draft is cut before the first slot for which a row is left without any
        token (of a shortlist), and where all rows have ended.

        Args:
            logits (`torch.Tensor` of shape `(rows, n, V)`, float32, or `Callable`): of the drafter; or, of slots that
                know the proposals before them, a function from the number of a slot and those tokens to `(rows, V)`.
            num_slots (`int`): n.
            pick: from scores `(..., V)` to tokens `(...)`.

        Returns:
            `(tokens, scores)` of shapes `(rows, m)` and `(rows, m, V)`, m at most n.
        """
        careful = not _pointwise(self.for_drafts)
        if isinstance(logits, torch.Tensor) and not careful:
            if self.for_drafts:
                logits = self.for_drafts(texts.ids, logits.flatten(0, 1).clone()).view_as(logits)
            return pick(logits), logits
        tokens, slots = texts.ids.new_empty(len(texts.rows), 0), []
        ends = torch.tensor(sorted(self.end_ids), dtype=tokens.dtype, device=tokens.device)
        ended = torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
        for i in range(num_slots):
            scores = logits[:, i] if isinstance(logits, torch.Tensor) else logits(i, tokens)
            if careful:
                scores = _at(self.for_drafts, texts, texts.with_block(tokens, self.pad_id), i, scores)
                if not (scores.amax(-1) > -torch.inf).all():
                    break
            elif self.for_drafts:
                scores = self.for_drafts(texts.ids, scores.clone())
            slots.append(scores)
            tokens = torch.cat([tokens, torch.where(ended, self.pad_id, pick(scores)).unsqueeze(1)], dim=1)
            if careful:
                ended = ended | torch.isin(tokens[:, -1], ends)
                if ended.all():
                    break
        return tokens, torch.stack(slots, dim=1) if slots else scores.unsqueeze(1)[:, :0]


def _pointwise(processors: LogitsProcessorList) -> bool:
    return all(type(processor) in _POINTWISE for processor in processors)


def _at(
    processors: LogitsProcessorList, texts: Texts, ids: torch.Tensor, offset: int, scores: torch.Tensor
) -> torch.Tensor:
    """Scores `(rows, V)` of the slot `offset` tokens after the end of each row, in `ids` `(B, columns)`."""
    result = torch.empty_like(scores)
    for end, entries in texts.groups():
        if len(entries) == ids.shape[0]:  # all rows, a single one above all: nothing to take apart
            return processors(ids[:, : end + offset], scores.clone())
        whole = scores.new_zeros(ids.shape[0], scores.shape[-1])
        whole[texts.rows] = scores
        result[entries] = processors(ids[:, : end + offset], whole)[[texts.rows[i] for i in entries]]
    return result


class Stopping:
    """
    The caller's stopping criteria, asked after every single token, as plain decoding asks them.

    Length and end tokens are decided on the numbers at hand; only other criteria are called, with the whole batch.

    Args:
        criteria (`StoppingCriteriaList`): as `generate` prepared them.
        pad_id (`int`): what follows the end of a text.

    Attributes:
        end_ids (`set[int]`): tokens that end a text.
        pads (`bool`): whether a row that has ended is padded; if not, rows are written on until the last has stopped.
        others (`StoppingCriteriaList`): what has to be called.
    """

    def __init__(self, criteria: StoppingCriteriaList, pad_id: int):
        self.max_length, self.pad_id = criteria.max_length, pad_id
        self.pads = any(hasattr(criterion, "eos_token_id") for criterion in criteria)  # so decides transformers
        self.end_ids: set[int] = set()
        self.others = StoppingCriteriaList()
        for criterion in criteria:
            if type(criterion) is EosTokenCriteria:
                self.end_ids.update(criterion.eos_token_id.flatten().tolist())
            elif type(criterion) is not MaxLengthCriteria:
                self.others.append(criterion)
        # Those of transformers look at the text alone.
        self._scored = any(not type(other).__module__.startswith("transformers.") for other in self.others)

    def first_stops(
        self, texts: Texts, block: torch.Tensor, new: list[list[int]], seen: Callable[[int], tuple | None]
    ) -> list[int | None]:
        """
        How many of the tokens `new` of each row are used when the text stops among them, or `None` if it goes on.

        Args:
            texts (`Texts`): before the new tokens.
            block (`torch.LongTensor` of shape `(rows, n)`): the new tokens, those of `new` and what follows them.
            seen: from a number of columns to the scores of all tokens before, for criteria that look at them.
        """
        starts = [texts.ends[row] for row in texts.rows]
        stops = [self._by_number(start, tokens) for start, tokens in zip(starts, new, strict=True)]
        if self.others:
            ids = texts.with_block(block, self.pad_id)
            for end, entries in texts.groups():
                for i in count(1):
                    going = [entry for entry in entries if i <= (stops[entry] or len(new[entry]))]
                    if not going:
                        break
                    scores = seen(end + i) if self._scored else None
                    ended = self.others(ids[:, : end + i], scores).tolist()
                    for entry in going:
                        if ended[texts.rows[entry]]:
                            stops[entry] = i
        return stops

    def _by_number(self, start: int, new: list[int]) -> int | None:
        for i, token in enumerate(new, start=1):
            if token in self.end_ids or (self.max_length is not None and start + i >= self.max_length):
                return i
        return None


@dataclass
class Forward:
    """
    What a forward of the target gave.

    Args:
        logits (`torch.Tensor` of shape `(rows, n, V)`, float32): of n slots, the last that were run.
        hidden_states (`tuple` of tensors of shape `(rows, n or more, H)`, *optional*): of each layer, if they are
            wanted.
        attentions (`tuple` of tensors of shape `(rows, heads, n or more, keys)`, *optional*): likewise.
        windows (`list[int | None]`, *optional*): of each layer; `None` for the prompt's forward, all of whose states
            belong to its one slot.
    """

    logits: torch.Tensor
    hidden_states: tuple[torch.Tensor, ...] | None = None
    attentions: tuple[torch.Tensor, ...] | None = None
    windows: list[int | None] | None = None

    def states(self, name: str, entry: int, slot: int, num_columns: int) -> tuple[torch.Tensor | None, ...]:
        """
        `hidden_states` or `attentions` of one slot of one row, as a forward of plain decoding gives them: there, the
        slot is the last of `num_columns` columns.
        """
        tensors = getattr(self, name)
        if not tensors:  # as some attention backends have it
            return ()
        later = self.logits.shape[1] - slot  # slots from this one on
        if self.windows is None:
            parts = [tensor if tensor is None else tensor[entry] for tensor in tensors]
        elif name == "hidden_states":
            parts = [tensor if tensor is None else tensor[entry, -later:][:1] for tensor in tensors]
        else:
            stops = [tensor.shape[3] - later + 1 for tensor in tensors]  # without the keys of later slots
            keys = [num_columns if window is None else min(num_columns, window) for window in self.windows]
            parts = [
                tensor[entry, :, -later:, stop - n : stop][:, :1]
                for tensor, n, stop in zip(tensors, keys, stops, strict=True)
            ]
        return tuple(part if part is None else part.clone() for part in parts)


class Collector:
    """
    What the caller asked for beside the text: for each row, one entry for each new token.

    Args:
        config (`GenerationConfig`): says what is wanted.
        num_rows (`int`), prompt_columns (`int`): of the texts.
        num_hidden (`int`): columns before those of the texts: of a cache or of embeddings that came without ids.
    """

    def __init__(self, config: GenerationConfig, num_rows: int, prompt_columns: int, num_hidden: int):
        self.num_rows, self.prompt_columns, self.num_hidden = num_rows, prompt_columns, num_hidden
        wanted = [name for name in ("scores", "logits", "hidden_states", "attentions") if _wanted(config, name)]
        self._kept: dict[str, list[list]] = {name: [[] for _ in range(num_rows)] for name in wanted}
        # What the target has to be asked for; hidden states may be a choice of layers.
        states = [f"output_{name}" for name in wanted if name in ("hidden_states", "attentions")]
        self.asked = {option: getattr(config, option) for option in states}

    def add(self, texts: Texts, counts: list[int], scores: torch.Tensor, forward: Forward, slot: int) -> None:
        """
        Take the first `counts` of each row, from `slot` on; copies, so that nothing else is kept.

        Args:
            texts (`Texts`): before these tokens.
            scores (`torch.Tensor` of shape `(rows, n, V)`): from `slot` on.
        """
        for name, kept in self._kept.items():
            for i, (row, number) in enumerate(zip(texts.rows, counts, strict=True)):
                if name == "scores":
                    kept[row] += scores[i, :number].clone().unbind(0)
                elif name == "logits":
                    kept[row] += forward.logits[i, slot : slot + number].clone().unbind(0)
                else:
                    columns = self.num_hidden + texts.ends[row]
                    kept[row] += [forward.states(name, i, slot + n, columns + n) for n in range(number)]

    def cut(self, texts: Texts) -> None:
        """Forget what is beyond the end of the texts."""
        for kept in self._kept.values():
            for row in texts.rows:
                del kept[row][texts.ends[row] - self.prompt_columns :]

    def scores_before(self, column: int) -> tuple | None:
        """The scores of all new tokens before `column`; `None` if the caller does not collect them, as in plain
        decoding."""
        return self._by_token("scores", column - self.prompt_columns)

    def _by_token(self, name: str, stop: int | None = None) -> tuple | None:
        """For each new token (before `stop`) the entries of all rows as one; zeros for a row that has ended."""
        if name not in self._kept:
            return None
        tokens = zip_longest(*self._kept[name])
        return tuple(_stacked(entries) for entries in islice(tokens, stop))

    def result(self, sequences: torch.Tensor, cache, statistics: GenerationStatistics) -> DFlashGenerateOutput:
        """What `generate` returns with `return_dict_in_generate`."""
        lengths: list[list[int]] = [[] for _ in range(self.num_rows)]
        for record in statistics.rounds:
            lengths[record.row].append(record.committed)
        return DFlashGenerateOutput(
            sequences=sequences,
            **{name: self._by_token(name, sequences.shape[1] - self.prompt_columns) for name in self._kept},
            acceptance_lengths=lengths,
            statistics=statistics,
            **{compat.CACHE: cache},
        )


def _wanted(config: GenerationConfig, name: str) -> bool:
    return bool(config.return_dict_in_generate and getattr(config, f"output_{name}"))


def _stacked(entries: tuple) -> torch.Tensor | tuple[torch.Tensor | None, ...] | None:
    """One entry for each row to one with a dimension for the rows, zeros where a row has `None` and others do not."""
    some = next((entry for entry in entries if entry is not None), None)
    if some is None:
        return None
    if isinstance(some, tuple):
        rows = [[None] * len(some) if entry is None else entry for entry in entries]
        return tuple(map(_stacked, zip(*rows, strict=True)))
    if len(entries) == 1:
        return some.unsqueeze(0)  # not copied
    return torch.stack([torch.zeros_like(some) if entry is None else entry for entry in entries])
