"""From conversations to token rows that say which tokens the target wrote."""

import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from pathlib import Path

import numpy as np
import torch
from jinja2 import TemplateError
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, Sampler
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from .sources import messages_of, read_jsonl


logger = logging.get_logger(__name__)

EMPTY = "empty assistant text"
TRUNCATED = "truncated away"

_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")


class Texts(Sequence):
    """Token ids of the documents: `texts[i]` is a list, made when it is asked for, since lists take much memory."""

    def __init__(self, ids: np.ndarray, starts: np.ndarray):
        self.ids, self.starts = ids, starts

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, index: int) -> list[int]:
        document = range(len(self))[index]
        return self.ids[self.starts[document] : self.starts[document + 1]].tolist()


class ConversationDataset(Dataset):
    """
    Conversations as rows of tokens, with which of them the target wrote.

    A row of the file has a conversation with at least one assistant turn, see [`messages_of`]. With `prompt_ids` and
    `response_ids` in addition, exactly those tokens are used (rendering a text again may give others). Otherwise the
    `{% generation %}` tags of the chat template say what the target wrote. Without tags it is what the conversation
    gains between "the assistant is to speak" and "the assistant has spoken"; where the template writes an earlier turn
    differently once the conversation goes on (thinking is dropped, say), the conversation becomes several documents,
    each with the text that the target saw before its turn.

    An item is `{"input_ids", "document", "supervised"}`, tensors of shape `(S,)`, int64, int64 and bool: the tokens,
    the index of the document of each, and whether the target wrote it.

    Args:
        path (`str` or `Path`): the JSONL file.
        tokenizer (`PreTrainedTokenizerBase`): the target's, with its chat template.
        max_length (`int`): longer documents are cut at the end.
        min_supervised (`int`, *optional*, defaults to 2): tokens of the target in a row that a document must have,
            the anchor and one to predict.
        pack (`bool`, *optional*, defaults to `False`): put several documents into a row of at most `max_length`.
        chat_template_kwargs (`dict`, *optional*): passed to every rendering, `{"enable_thinking": False}` for example.
        vocab_size (`int`, *optional*): of the target; greater token ids are refused.

    Attributes:
        texts (`Texts`): `texts[i]` is the list of token ids of document i.
        lengths (`list[int]`): tokens of each document.
        lines (`list[int]`): line of the file that each document is from.
        skipped (`Counter`): why documents were left out, and how often.
        num_tokens, num_supervised (`int`): all tokens, and those that can carry a loss.
        num_cut, num_split (`int`): documents cut at `max_length`; conversations that became several documents.

    Raises:
        `ValueError`: for a malformed line (file and line are named), when no document is left, or when no token or
            every token is marked as the target's.
    """

    def __init__(
        self,
        path: str | Path,
        tokenizer: PreTrainedTokenizerBase,
        max_length: int,
        *,
        min_supervised: int = 2,
        pack: bool = False,
        chat_template_kwargs: dict | None = None,
        vocab_size: int | None = None,
    ):
        if not 2 <= min_supervised <= max_length:
            raise ValueError(
                f"min_supervised={min_supervised}, max_length={max_length}: a row needs at least two tokens of the "
                "target, the anchor and one to predict, and must have room for them."
            )
        self.path, self.max_length, self.min_supervised = path, max_length, min_supervised
        self.pack, self.vocab_size = pack, vocab_size
        self.chat_template_kwargs = chat_template_kwargs or {}
        check_template_kwargs(tokenizer, self.chat_template_kwargs)
        self.skipped: Counter[str] = Counter()
        self.num_cut = self.num_split = 0
        self.lines: list[int] = []
        self._read(tokenizer)
        self.lengths: list[int] = np.diff(self._starts).tolist()
        self.num_tokens, self.num_supervised = len(self._ids), int(self._supervised.sum())
        self._check_mask()
        self._arrange(range(len(self.lines)))
        logger.info(self.report())

    def _read(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Fill the arrays of all documents, one after the other, and note their lines."""
        ids, supervised, starts = array("i"), bytearray(), [0]  # 5 bytes for a token
        written = False
        for number, row in read_jsonl(self.path):
            try:
                documents = self._tokenise(row, tokenizer)
            except (ValueError, TypeError, TemplateError) as error:
                raise ValueError(f"{self.path}, line {number}: {error}") from error
            self.num_split += len(documents) > 1
            written = written or any(True in mask for _, mask in documents)
            for tokens, mask in documents:
                reason = self._reason_to_skip(bytes(mask))
                if reason:
                    self.skipped[reason] += 1
                    continue
                self.num_cut += len(tokens) > self.max_length
                ids.extend(tokens[: self.max_length])
                supervised.extend(mask[: self.max_length])
                starts.append(len(ids))
                self.lines.append(number)
        if not self.lines:
            raise ValueError(f"{self.path}: {self._nothing_left(written)}")
        self._ids, self._starts = np.frombuffer(ids, np.intc), np.array(starts)
        self._supervised = np.frombuffer(supervised, bool)
        self.texts = Texts(self._ids, self._starts)

    def _tokenise(self, row: dict, tokenizer: PreTrainedTokenizerBase) -> list[tuple[list[int], list[bool]]]:
        """The documents of a row: tokens, and which of them the target wrote."""
        if row.get("prompt_ids") is not None or row.get("response_ids") is not None:
            documents = _exact(row)
        else:
            messages = messages_of(row)
            answers = [message for message in messages if message["role"] == "assistant"]
            if not answers:
                raise ValueError("no assistant turn; let the target answer first (dflash-hf data regenerate).")
            documents = []
            if any(map(_says_something, answers)):
                tagged = _GENERATION_TAG.search(tokenizer.get_chat_template())
                documents = (by_tags if tagged else by_prefixes)(messages, tokenizer, **self.chat_template_kwargs)
        if not documents:
            self.skipped[EMPTY] += 1
        for ids, _ in documents:
            _check_ids(ids, self.vocab_size)
        return documents

    def _reason_to_skip(self, mask: bytes) -> str | None:
        run = b"\x01" * self.min_supervised
        if run in mask[: self.max_length]:
            return None
        return TRUNCATED if run in mask else f"fewer than {self.min_supervised} tokens of the target"

    def _nothing_left(self, written: bool) -> str:
        """Why there is no document."""
        if written or not self.skipped or set(self.skipped) == {EMPTY}:
            return (
                f"no row to train on (skipped: {dict(self.skipped) or 'the file is empty'}). A row needs an assistant "
                f"turn of at least {self.min_supervised} tokens within max_length={self.max_length}: the anchor and "
                "one to predict for a block of any block_size."
            )
        return (
            "no token of any row is marked as the target's: the chat template writes nothing for an assistant turn. "
            "Mend the template, or give rows with `prompt_ids` and `response_ids`."
        )

    def _check_mask(self) -> None:
        if self.num_supervised == self.num_tokens:
            raise ValueError(
                f"{self.path}: every token of every row is marked as the target's, so the drafter would be trained on "
                "the prompts too. Put the `{% generation %}` tags of the chat template around assistant turns only, "
                "or give the prompt of each row in `prompt_ids`."
            )

    def _arrange(self, documents: Sequence[int]) -> None:
        """Put `documents` into rows."""
        if self.pack:
            packed = first_fit_decreasing([self.lengths[i] for i in documents], self.max_length)
            self._rows = [[documents[i] for i in row] for row in packed]
        else:
            self._rows = [[i] for i in documents]

    def select(self, documents: Sequence[int], *, pack: bool = True) -> "ConversationDataset":
        """Only `documents`, in rows of their own, each alone without `pack`; they keep their numbers."""
        part = copy(self)
        part.pack = self.pack and pack
        part._arrange(documents)
        return part

    def report(self) -> str:
        """Several lines for people: rows, tokens, how many the target wrote, and what was left out."""
        full = self.num_tokens / (len(self) * self.max_length)
        packed = f", packed to at most {self.max_length:,} tokens ({full:.1%} full)" if self.pack else ""
        skipped = ", ".join(f"{count:,} {reason}" for reason, count in self.skipped.most_common()) or "none"
        return "\n".join(
            [
                f"{self.path}",
                f"  documents:  {len(self.lines):,}",
                f"  rows:       {len(self):,}{packed}",
                f"  tokens:     {self.num_tokens:,}",
                f"  supervised: {self.num_supervised:,} ({self.num_supervised / self.num_tokens:.1%}), by the target",
                f"  cut:        {self.num_cut:,} documents at {self.max_length:,} tokens",
                f"  split:      {self.num_split:,} conversations whose earlier turns the chat template rewrites",
                f"  skipped:    {skipped}",
            ]
        )

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        documents = self._rows[index]
        spans = [slice(self._starts[i], self._starts[i + 1]) for i in documents]
        lengths = [self.lengths[i] for i in documents]
        return {
            "input_ids": torch.from_numpy(np.concatenate([self._ids[span] for span in spans]).astype(np.int64)),
            "document": torch.from_numpy(np.repeat(documents, lengths)),
            "supervised": torch.from_numpy(np.concatenate([self._supervised[span] for span in spans])),
        }

    def lines_with(self, token: int) -> list[int]:
        """The lines of the file whose text has `token`, in ascending order."""
        places = np.flatnonzero(self._ids == token)
        documents = np.unique(np.searchsorted(self._starts, places, side="right") - 1)
        return sorted({self.lines[i] for i in documents})

    def most_frequent(self, count: int, vocab_size: int) -> list[int]:
        """The `count` most frequent tokens that the target wrote, in ascending order; unseen ids fill it up."""
        seen = np.bincount(self._ids[self._supervised], minlength=vocab_size)
        return sorted(np.argsort(-seen, kind="stable")[:count].tolist())


# -------------------------------------------------------------------------------------------------------------- masks
def check_template_kwargs(tokenizer: PreTrainedTokenizerBase, kwargs: dict) -> None:
    """Raise `ValueError` for what the chat template does not read: it would be ignored without a word."""
    for name in kwargs:
        if not re.search(rf"\b{re.escape(name)}\b", tokenizer.get_chat_template()):
            raise ValueError(
                f"chat_template_kwargs: {name}={kwargs[name]!r}, but the chat template does not read {name!r}. "
                "Leave it out, or name one that it reads."
            )


def _check_ids(ids: list[int], vocab_size: int | None) -> None:
    size = vocab_size or 2**31  # ids are kept in 32 bits
    least, most = min(ids, default=0), max(ids, default=0)
    if least < 0 or most >= size:
        vocabulary = f", the vocabulary of {vocab_size} tokens" if vocab_size else ""
        raise ValueError(
            f"token id {least if least < 0 else most} is not among 0 to {size - 1}{vocabulary}. Another tokenizer "
            "wrote this row: let this target answer again."
        )


def _exact(row: dict) -> list[tuple[list[int], list[bool]]]:
    prompt, response = row.get("prompt_ids"), row.get("response_ids")
    if not all(isinstance(ids, list) and set(map(type, ids)) <= {int} for ids in (prompt, response)):
        raise ValueError("`prompt_ids` and `response_ids` must both be lists of token ids.")
    return [(prompt + response, [False] * len(prompt) + [True] * len(response))] if response else []


def _says_something(message: dict) -> bool:
    content = message["content"]
    return bool((content.strip() if isinstance(content, str) else content) or message.get("tool_calls"))


def by_tags(messages: list[dict], tokenizer: PreTrainedTokenizerBase, **kwargs) -> list[tuple[list[int], list[bool]]]:
    """
    The tokens of a conversation, and which of them the `{% generation %}` tags of the chat template enclose.

    Raises:
        `ValueError`: when they enclose none.
    """
    rendered = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True, **kwargs)
    supervised = [bool(said) for said in rendered["assistant_masks"]]
    if not any(supervised):
        raise ValueError(
            "the chat template has `{% generation %}` tags, but they enclose no token of this conversation; put them "
            "around what the assistant says, its end token included."
        )
    return [(list(rendered["input_ids"]), supervised)]


def by_prefixes(
    messages: list[dict], tokenizer: PreTrainedTokenizerBase, **kwargs
) -> list[tuple[list[int], list[bool]]]:
    """
    The tokens of a conversation, and which of them it gains by the assistant's turns.

    Returns:
        one `(tokens, supervised)`; or several, when the chat template rewrites earlier turns.

    Raises:
        `ValueError`: when the prompt of a turn is not the beginning of the conversation with this turn.
    """
    documents: list[tuple[list[int], list[bool]]] = []
    ids: list[int] = []
    supervised: list[bool] = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        if i == 0:
            raise ValueError("the conversation begins with the assistant; a message to answer was expected.")
        before = tokenizer.apply_chat_template(messages[:i], add_generation_prompt=True, return_dict=False, **kwargs)
        after = tokenizer.apply_chat_template(messages[: i + 1], return_dict=False, **kwargs)
        if after[: len(before)] != before:
            raise ValueError(
                "the chat template does not render the prompt of an assistant turn as a prefix of its continuation, "
                "so what the target wrote cannot be told. Give the row `prompt_ids` and `response_ids`, or the "
                "template `{% generation %}` tags."
            )
        if before[: len(ids)] != ids:
            documents.append((ids, supervised))
            ids, supervised = [], []
        turn = after[len(before) :]
        said = len(turn)
        if tokenizer.eos_token_id in turn:
            # What a template adds after the end token, a line break perhaps, the target never writes.
            said -= turn[::-1].index(tokenizer.eos_token_id)
        supervised = supervised + [False] * (len(before) - len(ids)) + [True] * said + [False] * (len(turn) - said)
        ids = after
    return [*documents, (ids, supervised)]


# ------------------------------------------------------------------------------------------------------ rows, batches
def first_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """
    Pack texts into rows: from the longest to the shortest (equal ones in order), each into the first row with room.

    Args:
        lengths (`Sequence[int]`): tokens of each text, none above `capacity`.

    Returns:
        the indices of the texts of each row, ascending; rows in the order of their first text.
    """
    lengths = np.asarray(lengths)
    order = np.argsort(-lengths, kind="stable")
    row_of = np.empty(len(lengths), np.int64)
    free = np.zeros(0, np.int64)
    # All texts of one length at a time: each row takes as many of them as it has room for, before the next row does.
    for texts in np.split(order, np.flatnonzero(np.diff(lengths[order])) + 1):
        length = lengths[texts[0]]
        fresh = -(-len(texts) // (capacity // length))
        room = np.cumsum(np.concatenate([free, np.full(fresh, capacity)]) // length)
        rows = np.searchsorted(room, np.arange(len(texts)), side="right")
        row_of[texts] = rows
        used = max(len(free), int(rows[-1]) + 1)
        free = np.concatenate([free, np.full(used - len(free), capacity)])
        free -= np.bincount(rows, minlength=used) * length
    order = np.argsort(row_of, kind="stable")
    packed = np.split(order, np.flatnonzero(np.diff(row_of[order])) + 1)
    return sorted(row.tolist() for row in packed)


class EpochSampler(Sampler):
    """
    A sampler with a generator that is seeded anew in each epoch.

    Args:
        sampler (`Sampler`): draws from its attribute `generator`.
        seed (`int`): the same on every process.
        epoch (`Callable[[], int]`): the current epoch.
    """

    def __init__(self, sampler: Sampler, seed: int, epoch: Callable[[], int]):
        self.sampler, self.seed, self.epoch = sampler, seed, epoch

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[int]:
        self.sampler.generator = torch.Generator().manual_seed(hash((self.seed, self.epoch())))
        return iter(self.sampler)


def positions(document: torch.Tensor) -> torch.Tensor:
    """
    Positions of tokens within their documents.

    Args:
        document (`torch.Tensor` of shape `(B, S)`, int64): the document of each token, -1 for padding.

    Returns:
        `torch.Tensor` of shape `(B, S)`, int64: counts from 0 at every change of document; padding is one of its own.
    """
    place = torch.arange(document.shape[1], device=document.device).expand_as(document)
    starts = torch.zeros_like(document)
    starts[:, 1:] = torch.where(document[:, 1:] != document[:, :-1], place[:, 1:], 0)
    return place - starts.cummax(dim=1).values


def collate(rows: list[dict]) -> dict[str, torch.Tensor]:
    """
    Pad rows on the right.

    Args:
        rows (`list[dict]`): items of [`ConversationDataset`]; lists are taken as well as tensors.

    Returns:
        `input_ids` int64 (padding 0), `document` int64 (padding -1) and `supervised` bool, each of shape `(B, S)`.
    """
    padding = {"input_ids": 0, "document": -1, "supervised": False}
    return {
        name: pad_sequence([torch.as_tensor(row[name]) for row in rows], batch_first=True, padding_value=value)
        for name, value in padding.items()
    }
