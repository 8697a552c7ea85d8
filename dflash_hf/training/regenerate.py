"""From prompts to the target's own answers: the data that a drafter is trained on."""

import hashlib
import json
import math
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from .. import compat
from .data import check_template_kwargs
from .sources import questions_of, read_jsonl, read_rows


logger = logging.get_logger(__name__)

_CONVERSATION = ("messages", "conversations", "turns", "prompt")  # fields of a prompt row that its answers replace
_LEG = 32  # tokens decoded before the rows that are done drop out of their batch
_MAY_CHANGE = {"target", "batch_size", "torch", "transformers"}  # between the runs that fill one file


@dataclass(frozen=True)
class Regeneration:
    """
    How the target answers.

    Args:
        max_new_tokens (`int`): longest answer; longer ones are cut and say `"finish": "length"`.
        do_sample (`bool`): draw answers, else greedy. A drafter for sampled use is best trained on sampled answers.
        temperature, top_p, top_k: of the sampling.
        seed (`int`): of the sampling; each batch draws from a seed of its own, so a resumed run draws the same as long
            as `batch_size` stays.
        batch_size (`int`): conversations answered at once.
        enable_thinking (`bool`, *optional*): passed to the chat template, which must read it.
        shard (`tuple[int, int]`): `(i, n)`: of all conversations only every n-th, from the i-th on.
    """

    max_new_tokens: int = 2048
    do_sample: bool = False
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    batch_size: int = 32
    enable_thinking: bool | None = None
    shard: tuple[int, int] = (0, 1)

    def __post_init__(self):
        part, parts = self.shard
        rules = [
            ("max_new_tokens", self.max_new_tokens >= 2, "at least 2, the anchor and a token to predict"),
            ("batch_size", self.batch_size >= 1, "at least 1"),
            ("temperature", self.temperature > 0, "above 0; greedy decoding is do_sample=False"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("top_k", self.top_k >= 0, "at least 0; 0 means all words"),
            ("shard", 0 <= part < parts, "(i, n) with 0 <= i < n"),
        ]
        for name, holds, rule in rules:
            if not holds:
                raise ValueError(f"{name}={getattr(self, name)!r}: {rule}.")

    @property
    def chat_template_kwargs(self) -> dict:
        """What every rendering is given."""
        return {} if self.enable_thinking is None else {"enable_thinking": self.enable_thinking}


@dataclass(frozen=True)
class Question:
    """
    One turn to be answered.

    Args:
        index (`int`): of the conversation, counted from 0.
        turn (`int`): how many answers of the conversation come before this one.
        messages (`list[dict]`): everything said so far; the user spoke last.
        prompt_ids (`list[int]`): the same, rendered.
        rest (`dict`): the other fields of the prompt row, which its answers keep.
    """

    index: int
    turn: int
    messages: list[dict]
    prompt_ids: list[int]
    rest: dict


class Answers:
    """
    The output file: one JSON object for each answered turn, appended batch by batch.

    What a killed run wrote last may be half a line: it is cut off before anything is appended. The settings stand
    beside the file, and a run with others is refused.

    Args:
        path (`Path`): the JSONL file. settings (`dict`): everything that the answers depend on.

    Raises:
        `ValueError`: when `path` holds answers of other settings; the message names the first field.
    """

    def __init__(self, path: Path, settings: dict):
        self.path = path
        beside = path.with_name(path.name + ".settings.json")
        if path.exists():
            _check_settings(path, beside, settings)
            _cut_half_line(path)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = beside.with_name(f".{beside.name}.writing")
            temporary.write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
            os.replace(temporary, beside)
            path.touch()
        self.texts = {(row["index"], row["turn"]): row["messages"][-1]["content"] for _, row in read_jsonl(path)}

    def append(self, rows: list[dict]) -> None:
        """Write answers for good; those that are there already are left out."""
        new = [row for row in rows if (row["index"], row["turn"]) not in self.texts]
        with open(self.path, "a", encoding="utf-8") as file:
            file.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in new))
            file.flush()
            os.fsync(file.fileno())
        self.texts |= {(row["index"], row["turn"]): row["messages"][-1]["content"] for row in new}


def regenerate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: str | Path,
    output: str | Path,
    settings: Regeneration,
    *,
    max_minutes: float | None = None,
    on_batch: Callable[[int, int, int], None] = lambda *_: None,
) -> Counter:
    """
    Let the target answer every user turn of a file of prompts, in order, given its own earlier answers.

    Each answered turn is one row of `output`: the fields of its prompt row, `index`, `turn`, `messages` with the
    answer last, the exact `prompt_ids` and `response_ids`, and `finish` (`"stop"` or `"length"`). Conversations of
    like length are answered together. A run that was interrupted goes on where it stopped, without losing or doubling
    a row.

    Args:
        prompts (`str` or `Path`): a JSONL file or a dataset of the Hub, see [`read_rows`] and [`messages_of`].
        max_minutes (`float`, *optional*): no batch is begun after so many minutes.
        on_batch: called with the turns that are done, all turns, and the tokens of this batch.

    Returns:
        `Counter`: turns `answered` now, `there already`, and left out for each reason.

    Raises:
        `ValueError`: for a malformed row (named by file and line), a thinking flag that the chat template does not
            read, or when `output` holds answers of other settings.
    """
    output, counts = Path(output), Counter()
    check_template_kwargs(tokenizer, settings.chat_template_kwargs)
    conversations = _conversations(prompts, settings, counts)
    answers = Answers(output, _everything_that_matters(model, tokenizer, prompts, settings))
    turns = [sum(m["role"] == "user" for m in messages) for _, messages, _ in conversations]
    done = counts["there already"] = len(answers.texts)
    on_batch(done, sum(turns), 0)
    deadline = math.inf if max_minutes is None else time.monotonic() + 60 * max_minutes
    for turn in range(max(turns)):
        questions = _questions(tokenizer, conversations, turn, answers.texts, settings)
        room = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        fitting = [q for q in questions if room is None or len(q.prompt_ids) + settings.max_new_tokens <= room]
        counts["too long for the target's context"] += len(questions) - len(fitting)
        for batch in _batches(fitting, settings.batch_size, seed=turn):
            if all((q.index, q.turn) in answers.texts for q in batch):
                continue
            if time.monotonic() > deadline:
                return counts
            torch.manual_seed(hash((settings.seed, turn, batch[0].index)))
            before = len(answers.texts)
            rows = answer(model, tokenizer, batch, settings)
            answers.append(rows)
            new = len(answers.texts) - before
            counts["answered"] += new
            done += new
            on_batch(done, sum(turns), sum(len(row["response_ids"]) for row in rows))
    return counts


def _questions(
    tokenizer: PreTrainedTokenizerBase, conversations: list[tuple], turn: int, texts: dict, settings: Regeneration
) -> list[Question]:
    """What is to be answered at `turn`, after the answers so far, `texts`."""
    questions = []
    for index, messages, rest in conversations:
        said = _so_far(messages, turn, index, texts)
        if said is not None:
            options = {"add_generation_prompt": True, "return_dict": False, **settings.chat_template_kwargs}
            questions.append(Question(index, turn, said, tokenizer.apply_chat_template(said, **options), rest))
    return questions


def _batches(questions: list[Question], size: int, seed: int) -> list[list[Question]]:
    """Batches of questions of like length, the same ones each time, in random order: whatever part of them has been
    answered is no longer or shorter than the rest."""
    questions = sorted(questions, key=lambda q: (len(q.prompt_ids), q.index))
    batches = [questions[start : start + size] for start in range(0, len(questions), size)]
    random.Random(seed).shuffle(batches)
    return batches


@torch.no_grad()
def answer(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, batch: list[Question], settings: Regeneration
) -> list[dict]:
    """Answer some questions in one batch; see [`regenerate`] for the rows."""
    rows = []
    for question, response in zip(batch, _responses(model, tokenizer, batch, settings), strict=True):
        text = tokenizer.decode(response, skip_special_tokens=True)
        rows.append(
            question.rest
            | {
                "index": question.index,
                "turn": question.turn,
                "messages": [*question.messages, {"role": "assistant", "content": text}],
                "prompt_ids": question.prompt_ids,
                "response_ids": response,
                "finish": "stop" if response[-1] in _end_ids(model) else "length",
            }
        )
    return rows


def _responses(model, tokenizer, batch: list[Question], settings: Regeneration) -> list[list[int]]:
    """The new tokens of each question, its end token included."""
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    longest = max(len(q.prompt_ids) for q in batch)
    ids = torch.tensor([[pad] * (longest - len(q.prompt_ids)) + q.prompt_ids for q in batch], device=model.device)
    mask = torch.tensor([[0] * (longest - len(q.prompt_ids)) + [1] * len(q.prompt_ids) for q in batch]).to(ids)
    options = {"do_sample": settings.do_sample, "pad_token_id": pad, "return_dict_in_generate": True}
    if settings.do_sample:
        options |= {"temperature": settings.temperature, "top_p": settings.top_p, "top_k": settings.top_k}
    # Answers differ much in length, so the batch is decoded in legs, and who is done drops out after each. A recurrent
    # target decodes in one go: the rows of its cache cannot be taken apart.
    leg = settings.max_new_tokens if model._is_stateful else _LEG
    ends = torch.tensor(sorted(_end_ids(model)), device=ids.device)
    responses: list[list[int]] = [[]] * len(batch)
    rows, cache = torch.arange(len(batch), device=ids.device), None
    while len(rows):
        new = min(leg, settings.max_new_tokens - (ids.shape[1] - longest))
        output = model.generate(ids, attention_mask=mask, max_new_tokens=new, **{compat.CACHE: cache}, **options)
        ids, cache = output.sequences, output[compat.CACHE]
        mask = torch.cat([mask, mask.new_ones(len(rows), ids.shape[1] - mask.shape[1])], dim=1)
        said = ids[:, longest:]
        ended = torch.isin(said, ends)
        over = ended.any(1) | (said.shape[1] >= settings.max_new_tokens)
        lengths = torch.where(ended.any(1), ended.long().argmax(1) + 1, said.shape[1]).tolist()
        for row in over.nonzero().squeeze(1).tolist():
            responses[rows[row]] = said[row, : lengths[row]].tolist()
        ids, mask, rows = ids[~over], mask[~over], rows[~over]
        if len(rows) and over.any():
            cache.batch_select_indices((~over).nonzero().squeeze(1))
    return responses


def _end_ids(model: PreTrainedModel) -> set[int]:
    ends = model.generation_config.eos_token_id
    return set(ends if isinstance(ends, list) else [] if ends is None else [ends])


def _conversations(prompts: str | Path, settings: Regeneration, counts: Counter) -> list[tuple[int, list, dict]]:
    """`(index, messages without answers, other fields)` of the conversations of this shard."""
    part, parts = settings.shard
    found = []
    for index, (number, row) in enumerate(read_rows(prompts)):
        if index % parts != part:
            continue
        if not set(row) & set(_CONVERSATION):
            raise ValueError(f"{prompts}, line {number}: it has none of {', '.join(_CONVERSATION)}.")
        if not any(row.get(name) for name in _CONVERSATION):
            counts["empty prompt"] += 1
            continue
        try:
            messages = questions_of(row)
        except ValueError as error:
            raise ValueError(f"{prompts}, line {number}: {error}") from None
        if all(not m["content"].strip() for m in messages if m["role"] == "user"):
            counts["empty prompt"] += 1
            continue
        found.append((index, messages, {k: v for k, v in row.items() if k not in _CONVERSATION}))
    if not found:
        raise ValueError(f"{prompts}: no prompt to answer (left out: {dict(counts) or 'the file is empty'}).")
    return found


def _so_far(messages: list[dict], turn: int, index: int, texts: dict) -> list[dict] | None:
    """What was said before answer number `turn`, or `None` when the conversation has no such turn."""
    said, turns = [], 0
    for message in messages:
        if message["role"] == "user":
            if turns > turn:
                break
            if turns:
                earlier = texts.get((index, turns - 1))
                if earlier is None:
                    return None  # it was too long for the context
                said.append({"role": "assistant", "content": earlier})
            turns += 1
        said.append(message)
    return said if turns > turn else None


def _everything_that_matters(model, tokenizer, prompts, settings: Regeneration) -> dict:
    """What the answers depend on, for the file beside them."""
    return {
        "target": model.config._name_or_path,
        "revision": getattr(model.config, "_commit_hash", None),
        "dtype": str(model.dtype).removeprefix("torch."),
        "template_sha256": _sha256((tokenizer.chat_template or "").encode()),
        "prompts": _sha256(Path(prompts).read_bytes()) if Path(prompts).is_file() else str(prompts),
        **asdict(settings),
        "shard": list(settings.shard),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _check_settings(path: Path, beside: Path, settings: dict) -> None:
    if not beside.is_file():
        raise ValueError(
            f"{path} exists, but {beside.name}, which says how it was made, does not. Name another output."
        )
    found = json.loads(beside.read_text(encoding="utf-8"))
    for name in settings:
        if name not in _MAY_CHANGE and found.get(name) != settings[name]:
            raise ValueError(
                f"{path} was written with {name}={found.get(name)!r}, this run has {settings[name]!r}. Go on with the "
                "settings of the first run, or name another output."
            )


def _cut_half_line(path: Path) -> None:
    """Cut off what follows the last line break."""
    data = path.read_bytes()
    end = data.rfind(b"\n") + 1
    if end < len(data):
        logger.warning("%s: its last line was cut short by an interrupted run; it is written again.", path)
        with open(path, "r+b") as file:
            file.truncate(end)
