"""Where conversations come from: files and datasets of the Hub, in the forms that are about."""

import json
import re
from collections.abc import Iterator
from pathlib import Path


_SPEAKERS = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
_ANSWERABLE = {"system", "developer", "user", "assistant"}
_HUB_NAME = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?::([\w.-]+))?")


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
                reason = error.msg.removesuffix(" at")
                raise ValueError(f"{path}, line {number}: not JSON ({reason} at column {error.colno}).") from None
            if not isinstance(row, dict):
                raise ValueError(f"{path}, line {number}: a JSON object was expected, not {type(row).__name__}.")
            yield number, row


def read_rows(source: str | Path) -> Iterator[tuple[int, dict]]:
    """
    Yield `(line number, row)` of a JSONL file, or of a dataset of the Hub when `source` is no file.

    Args:
        source (`str` or `Path`): a file, or `owner/name` or `owner/name:split` (split `train` unless named).

    Raises:
        `ValueError`: for a malformed line.
        `OSError`: when there is neither such a file nor such a dataset, or the Hub cannot be reached.
        `ImportError`: for a dataset of the Hub without the package `datasets`.
    """
    named = _HUB_NAME.fullmatch(str(source))
    if named is None or Path(source).exists() or str(source).endswith((".json", ".jsonl")):
        yield from read_jsonl(source)
    else:
        yield from enumerate(_load_from_hub(*named.groups(default="train")), start=1)


def _load_from_hub(name: str, split: str):
    try:
        import datasets
    except ImportError:
        raise ImportError(
            f"{name} is no file here, and to load it from the Hub the package `datasets` is needed: "
            "pip install 'dflash_hf[train]'"
        ) from None
    try:
        return datasets.load_dataset(name, split=split)
    except OSError as error:  # not found, not reachable, offline
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise OSError(f"{name} is no file here, and as a dataset of the Hub it was not loaded: {reason}") from error


def messages_of(row: dict) -> list[dict]:
    """
    The conversation of a row, as messages with `role` and `content` (other fields of a message stay).

    A row has `messages`, `conversations` (ShareGPT: `{"from": "human", "value": …}`), `turns` (user messages one after
    the other) or `prompt` (one user message).

    Raises:
        `ValueError`: for a row with none of these, or with a message that is not understood.
    """
    said = row.get("messages") or row.get("conversations")
    turns = row.get("turns") or [row.get("prompt")]
    if not isinstance(turns, list):
        raise ValueError(f"`turns` is {type(turns).__name__}; a list of texts was expected.")
    if not said and any(turns):
        said = [{"from": "user", "value": turn} for turn in turns]
    if not said or not isinstance(said, list):
        raise ValueError("no conversation; `messages`, `conversations`, `turns` or `prompt` was expected.")
    return [_message(message) for message in said]


def _message(message: dict) -> dict:
    if isinstance(message, dict) and {"role", "content"} <= set(message):
        return message
    if isinstance(message, dict) and {"from", "value"} <= set(message):
        if message["from"] not in _SPEAKERS:
            raise ValueError(f"a message is from {message['from']!r}; one of {', '.join(_SPEAKERS)} was expected.")
        if not isinstance(message["value"], str):
            raise ValueError(f"a message is {type(message['value']).__name__}; a text was expected.")
        return {"role": _SPEAKERS[message["from"]], "content": message["value"]}
    raise ValueError("a message needs `role` and `content`, or `from` and `value`.")


def read_conversations(source: str | Path) -> list[list[dict]]:
    """
    What is to be answered: the conversations of a file or a dataset of the Hub, all user turns, without any answers.

    Args:
        source (`str` or `Path`): see [`read_rows`]; its rows: see [`messages_of`].

    Raises:
        `ValueError`: for a row without a user turn or with roles that cannot be answered again, naming its line.
    """
    conversations = []
    for number, row in read_rows(source):
        try:
            conversations.append(questions_of(row))
        except ValueError as error:
            raise ValueError(f"{source}, line {number}: {error}") from None
    return conversations


def questions_of(row: dict) -> list[dict]:
    """The messages of a row but the assistant's, which somebody else may have written; see [`read_conversations`]."""
    messages = messages_of(row)
    roles = {message["role"] for message in messages}
    if not roles <= _ANSWERABLE:
        raise ValueError(
            f"role {min(roles - _ANSWERABLE)!r}: a conversation with tools cannot be answered again; leave it out."
        )
    if "user" not in roles:
        raise ValueError("no user turn.")
    for message in messages:
        if message["role"] != "assistant" and not isinstance(message["content"], str):
            raise ValueError(
                f"the content of a {message['role']} message is {type(message['content']).__name__}; a text was "
                "expected."
            )
    return [message for message in messages if message["role"] != "assistant"]


def first_turn(messages: list[dict]) -> list[dict]:
    """The messages up to the first user turn, that one included."""
    first = next(i for i, message in enumerate(messages) if message["role"] == "user")
    return messages[: first + 1]


def read_prompts(source: str | Path) -> list[list[dict]]:
    """The conversations of [`read_conversations`] up to their first user turn: what is answered in an evaluation."""
    return [first_turn(messages) for messages in read_conversations(source)]
