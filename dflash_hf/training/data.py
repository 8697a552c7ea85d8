"""From a JSONL file of conversations to token rows that say which tokens the target wrote."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
from jinja2 import TemplateError
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging


logger = logging.get_logger(__name__)


def read_jsonl(path: str | Path) -> Iterator[tuple[int, dict]]:
    """
    Yield `(line number, object)` of a JSONL file, blank lines left out.

    Raises:
        `ValueError`: for a line that is no JSON object; the message names file and line.
        `OSError`: when the file cannot be read.
    """
    with open(path, encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number}: not JSON ({error.msg} at column {error.colno}).") from None
            if not isinstance(row, dict):
                raise ValueError(f"{path}, line {number}: a JSON object was expected, not {type(row).__name__}.")
            yield number, row


def read_prompts(path: str | Path) -> list[list[dict]]:
    """
    The conversations to be continued in a JSONL file of prompts.

    A row has `turns` (user messages), `prompt` (one user message) or `messages`; the first user turn is used.

    Raises:
        `ValueError`: for a row with none of these, naming file and line.
    """
    prompts = []
    for number, row in read_jsonl(path):
        messages = row["messages"] if isinstance(row.get("messages"), list) else []
        first = next((i for i, message in enumerate(messages) if message.get("role") == "user"), None)
        if first is not None:
            prompts.append(messages[: first + 1])
        elif row.get("turns") or row.get("prompt"):
            prompts.append([{"role": "user", "content": row["turns"][0] if row.get("turns") else row["prompt"]}])
        else:
            raise ValueError(
                f"{path}, line {number}: a prompt row needs `messages` with a user turn, `turns` or `prompt`."
            )
    return prompts


class ConversationDataset(Dataset):
    """
    Conversations as `{"input_ids", "supervised"}`, the tokens and which of them the target wrote.

    A row of the JSONL file has `messages` with at least one assistant turn. With `prompt_ids` and `response_ids` in
    addition, exactly those tokens are used (rendering a text again may give others).

    Args:
        path (`str` or `Path`): the JSONL file.
        tokenizer (`PreTrainedTokenizerBase`): the target's, with its chat template.
        max_length (`int`): longer rows are cut at the end.

    Attributes:
        skipped (`Counter`): why rows were left out, and how often.
        num_supervised (`int`): tokens that can carry a loss.

    Raises:
        `ValueError`: for a malformed row (file and line are named), or when no row is left.
    """

    def __init__(self, path: str | Path, tokenizer: PreTrainedTokenizerBase, max_length: int):
        self.rows: list[dict[str, list]] = []
        self.skipped: Counter[str] = Counter()
        for number, row in read_jsonl(path):
            try:
                ids, supervised = _tokenise(row, tokenizer)
            except (ValueError, TemplateError) as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
            ids, supervised = ids[:max_length], supervised[:max_length]
            if not any(a and b for a, b in zip(supervised[:-1], supervised[1:], strict=True)):
                self.skipped["fewer than two tokens of the target"] += 1
                continue
            self.rows.append({"input_ids": ids, "supervised": supervised})
        self.num_supervised = sum(sum(row["supervised"]) for row in self.rows)
        if not self.rows:
            raise ValueError(
                f"{path}: no row to train on (skipped: {dict(self.skipped) or 'the file is empty'}). A row needs an "
                "assistant turn of at least two tokens: the anchor and one to predict for a block of any block_size."
            )
        logger.info(
            "%s: %d rows, %d supervised tokens, skipped %s", path, len(self), self.num_supervised, self.skipped
        )

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, list]:
        return self.rows[index]

    def most_frequent(self, count: int, vocab_size: int) -> list[int]:
        """The `count` most frequent tokens that the target wrote, in ascending order; unseen ids fill it up."""
        seen = Counter(
            token for row in self.rows for token, said in zip(row["input_ids"], row["supervised"], strict=True) if said
        )
        ranked = [token for token, _ in seen.most_common(count)]
        unseen = (token for token in range(vocab_size) if token not in seen)
        return sorted(ranked + [next(unseen) for _ in range(count - len(ranked))])


def _tokenise(row: dict, tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[bool]]:
    """Tokens of a conversation, and which of them the target wrote."""
    if row.get("prompt_ids") and row.get("response_ids"):
        prompt, response = row["prompt_ids"], row["response_ids"]
        if not all(isinstance(ids, list) and all(type(i) is int for i in ids) for ids in (prompt, response)):
            raise ValueError("`prompt_ids` and `response_ids` must be lists of token ids.")
        return prompt + response, [False] * len(prompt) + [True] * len(response)
    messages = row.get("messages")
    if not isinstance(messages, list) or not all(
        isinstance(m, dict) and {"role", "content"} <= set(m) for m in messages
    ):
        raise ValueError("no conversation; `messages`, a list of objects with `role` and `content`, was expected.")
    ids: list[int] = []
    supervised: list[bool] = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        # The turn is what the conversation gains between "the assistant is to speak" and "the assistant has spoken".
        before = tokenizer.apply_chat_template(messages[:i], add_generation_prompt=True, return_dict=False)
        after = tokenizer.apply_chat_template(messages[: i + 1], return_dict=False)
        if after[: len(before)] != before or before[: len(ids)] != ids:
            raise ValueError("the chat template does not render the conversation as a prefix of its continuation.")
        turn = after[len(before) :]
        said = len(turn)
        if tokenizer.eos_token_id in turn:
            # What a template adds after the end token, a line break perhaps, the target never writes.
            said -= turn[::-1].index(tokenizer.eos_token_id)
        supervised += [False] * (len(before) - len(ids)) + [True] * said + [False] * (len(turn) - said)
        ids = after
    if not ids:
        raise ValueError("no assistant turn.")
    return ids, supervised


def collate(rows: list[dict[str, list]]) -> dict[str, torch.Tensor]:
    """
    Pad rows on the right.

    Returns:
        `input_ids` int64, `attention_mask` int64 and `supervised` bool, each of shape `(B, S)`.
    """
    longest = max(len(row["input_ids"]) for row in rows)

    def pad(name: str, dtype: torch.dtype) -> torch.Tensor:
        return torch.stack(
            [
                torch.nn.functional.pad(torch.tensor(row[name], dtype=dtype), (0, longest - len(row[name])))
                for row in rows
            ]
        )

    lengths = torch.tensor([len(row["input_ids"]) for row in rows])
    return {
        "input_ids": pad("input_ids", torch.long),
        "attention_mask": (torch.arange(longest) < lengths.unsqueeze(1)).long(),
        "supervised": pad("supervised", torch.bool),
    }
