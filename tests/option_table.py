"""
Every option of `generate`: identical with the drafter, or refused by name.

    python tests/option_table.py

prints a line for each option, with the number of target forwards at batch 1 and 4 of a target with full attention and
one with sliding windows, for drafters that are right always, at 70 % and never. The same checks run as tests.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from oracles import (
    Automaton,
    Force,
    StopAt,
    at_rate,
    counting,
    drafter_for,
    never,
    plain,
    predicted_batch_forwards,
    prompt_of,
    script,
    square_target,
    word_tokenizer,
)
from transformers import DynamicCache, WatermarkingConfig
from transformers.generation import SynthIDTextWatermarkingConfig

import dflash_hf
from dflash_hf import compat
from dflash_hf.decoding import Decoding


COLUMNS, NEW, BLOCK, END = 9, 16, 4, 62
STOPS = [COLUMNS + new for new in (5, 11, 3, 8)]
RATES = {"right": never, "70 %": at_rate(0.3), "wrong": lambda index, slot: True}
FAMILIES = ["qwen3", "mistral"]


class Recording:
    """A streamer that notes what it is given."""

    def __init__(self):
        self.puts = []

    def put(self, value):
        self.puts.append(value.clone())

    def end(self):
        self.puts.append("end")

    def columns(self) -> list:
        """One entry for each column, then `end`."""
        parts = [put if isinstance(put, str) else put.view(len(self.puts[0]), -1).T.tolist() for put in self.puts]
        return [column for part in parts for column in ([part] if part == "end" else part)]


@dataclass
class Option:
    """
    Args:
        kwargs: of `generate`; made anew for each call, from the call's text without the drafter.
        one_pace (`bool`): rows of a batch keep one pace.
        exact (`bool`): the drafter's mistakes stay mistakes, since nothing changes its choices.
        changes (`bool`): some of four texts is another than without the option.
        more (`Callable`): forwards beside those of the rounds, from the batch and the length of the text.
        cap (`int`, *optional*): most proposals of a round.
    """

    kwargs: Callable[[torch.Tensor], dict] | dict = field(default_factory=dict)
    one_pace: bool = False
    exact: bool = True
    changes: bool = False
    more: Callable[[int, int], int] = lambda batch, new: 0
    cap: int | None = None

    def of(self, full: torch.Tensor) -> dict:
        return dict(self.kwargs(full) if callable(self.kwargs) else self.kwargs)


def _more_for_cache(batch: int, new: int) -> int:
    return 2 * (batch > 1)  # the cache of several rows is computed anew: prompt, and answer


def _at(full: torch.Tensor, row: int, new: int) -> int:
    return int(full[row % len(full), COLUMNS + new])


def _sampled(**kwargs) -> Option:
    """One candidate is left, so that the text can be compared; that each shapes the law is for `test_sampling.py`."""
    return Option({"do_sample": True, **kwargs, "top_k": 1})


_DICT = {"return_dict_in_generate": True}
OPTIONS = {
    "nothing else": Option(),
    "max_length": Option({"max_length": COLUMNS + 13, "max_new_tokens": None}, changes=True),
    "max_new_tokens=1": Option({"max_new_tokens": 1}, changes=True),
    "min_new_tokens": Option({"min_new_tokens": 9, "eos_token_id": list(range(1, 40))}, exact=False, changes=True),
    "eos_token_id, a list": Option(lambda full: {"eos_token_id": [_at(full, 0, 6), _at(full, 1, 11)]}, changes=True),
    "stop_strings": Option(lambda full: {"stop_strings": [f"<{_at(full, 0, 7)}>"], "eos_token_id": END}, changes=True),
    "stopping criterion": Option({"stopping_criteria": [StopAt(STOPS)], "eos_token_id": END}, changes=True),
    "stopping criterion that may remember": Option(
        {"stopping_criteria": [StopAt(STOPS, stateless=False)], "eos_token_id": END}, one_pace=True, changes=True),
    "max_time": Option({"max_time": 0.0}, changes=True),
    "repetition_penalty": Option({"repetition_penalty": 1.3}, changes=True),
    "encoder_repetition_penalty": Option({"encoder_repetition_penalty": 1.3}),
    "no_repeat_ngram_size": Option({"no_repeat_ngram_size": 2}, exact=False, changes=True),
    "bad_words_ids": Option(lambda full: {"bad_words_ids": [[_at(full, 0, 3)], [7, 9]]}, exact=False, changes=True),
    "sequence_bias": Option({"sequence_bias": [[[7, 8], -9.0], [[20], 3.0]]}, exact=False, changes=True),
    "forced_eos_token_id": Option({"forced_eos_token_id": 5}, exact=False, changes=True),
    "suppress_tokens": Option(lambda full: {"suppress_tokens": [_at(full, 0, 3)]}, exact=False, changes=True),
    "begin_suppress_tokens": Option(lambda full: {"begin_suppress_tokens": [_at(full, 0, 0)]}, changes=True),
    "exponential_decay_length_penalty": Option(
        {"exponential_decay_length_penalty": (5, 1.5), "eos_token_id": 11}, exact=False, changes=True),
    "prefix_allowed_tokens_fn": Option(
        {"prefix_allowed_tokens_fn": lambda row, ids: [row + 5, (7 * len(ids)) % 64, 3]},
        one_pace=True, exact=False, changes=True),
    "remove_invalid_values, renormalize_logits": Option({"remove_invalid_values": True, "renormalize_logits": True}),
    "watermarking_config": Option({"watermarking_config": WatermarkingConfig(bias=5.0)}, exact=False, changes=True),
    "watermarking_config (SynthID)": Option(
        {"watermarking_config": SynthIDTextWatermarkingConfig(keys=[5, 9, 13], ngram_len=3)},
        one_pace=True, changes=True),
    "guidance_scale": Option({"guidance_scale": 1.6}, one_pace=True, more=lambda batch, new: new, changes=True),
    "logits_processor": Option(lambda full: {"logits_processor": [Force(every=4)]}, exact=False, changes=True),
    "logits_processor that remembers": Option(
        lambda full: {"logits_processor": [Automaton(COLUMNS)]}, one_pace=True, changes=True),
    "temperature": _sampled(temperature=0.3),
    "top_k": _sampled(),
    "top_p": _sampled(top_p=0.4),
    "min_p": _sampled(min_p=0.3),
    "typical_p": _sampled(typical_p=0.4),
    "epsilon_cutoff": _sampled(epsilon_cutoff=0.1),
    "eta_cutoff": _sampled(eta_cutoff=0.1),
    "num_return_sequences": _sampled(num_return_sequences=2),
    "streamer": Option(lambda full: {"streamer": Recording()}),
    "output_scores": Option({**_DICT, "output_scores": True}, more=_more_for_cache),
    "output_logits": Option({**_DICT, "output_logits": True}, more=_more_for_cache),
    "output_hidden_states": Option({**_DICT, "output_hidden_states": True}, more=_more_for_cache),
    "output_attentions": Option({**_DICT, "output_attentions": True}, more=_more_for_cache),
    "the returned cache": Option(_DICT, more=_more_for_cache),
    "inputs_embeds": Option({"inputs_embeds": None}),
    "cache of an earlier turn, all ids": Option({compat.CACHE: None}, more=_more_for_cache),
    "cache of an earlier turn, new ids": Option({compat.CACHE: None, "suffix": True}, more=_more_for_cache),
    "prefill_chunk_size": Option({"prefill_chunk_size": 4}, more=lambda batch, new: 2),
    "num_assistant_tokens": Option({"num_assistant_tokens": 2}, cap=2),
}  # fmt: skip
REFUSED = {
    "num_beams": {"num_beams": 2},
    "cache_implementation": {"cache_implementation": "static"},
    "use_cache": {"use_cache": False},
    "prompt_lookup_num_tokens": {"prompt_lookup_num_tokens": 3},
}


@functools.cache
def target_of(family: str):
    return square_target(family, attention="eager")


def inputs_of(batch: int) -> dict[str, torch.Tensor]:
    """Left-padded prompts, the longest of `COLUMNS` tokens, also when there is one."""
    ids = torch.zeros(batch, COLUMNS, dtype=torch.long)
    for row, length in enumerate([6, 9, 2, 7][:batch]):
        ids[row, -length:] = prompt_of(length, seed=row)
    return {"input_ids": ids, "attention_mask": (ids > 0).long()}


def call(generate: Callable, target, inputs: dict, kwargs: dict):
    """A call of `generate`, with what an option stands for put in."""
    inputs = dict(inputs)
    if "inputs_embeds" in kwargs:
        kwargs["inputs_embeds"] = target.get_input_embeddings()(inputs.pop("input_ids")).detach()
    if compat.CACHE in kwargs:
        kwargs[compat.CACHE] = DynamicCache(config=target.config)
        past = {name: value[:, : COLUMNS - 3] for name, value in inputs.items()}
        positions = (past["attention_mask"].cumsum(-1) - 1).clamp(min=0)
        with torch.no_grad():
            target(**past, position_ids=positions, use_cache=True, **{compat.CACHE: kwargs[compat.CACHE]})
    if kwargs.pop("suffix", False):
        inputs["input_ids"] = inputs["input_ids"][:, COLUMNS - 3 :]
    if "stop_strings" in kwargs:
        kwargs["tokenizer"] = word_tokenizer()
    return generate(**inputs, **kwargs), kwargs


def check(name: str, family: str, batch: int, rate: str, current_rows: Callable[[], list[int]]) -> int:
    """
    Compare one call with plain decoding and return its target forwards.

    Raises `AssertionError` when anything differs: text, stream, what is returned, number of forwards.
    """
    option, target, inputs = OPTIONS[name], target_of(family), inputs_of(batch)
    base = {"max_new_tokens": NEW, "do_sample": False}
    full = plain(target, **inputs, **base)
    expected, theirs = call(functools.partial(plain, target), target, inputs, {**base, **option.of(full)})
    text = expected if isinstance(expected, torch.Tensor) else expected.sequences
    sequences = text
    new = text.shape[1] - (0 if "inputs_embeds" in theirs else 3 if "suffix" in option.of(full) else COLUMNS)
    if text.shape[1] < COLUMNS + new:  # ids of the prompt are not returned
        prompt = inputs["input_ids"][:, : COLUMNS + new - text.shape[1]]
        sequences = torch.cat([prompt, text], dim=1)
    offsets = (1 - inputs["attention_mask"]).sum(1)
    if len(sequences) > batch:
        offsets = offsets.repeat_interleave(len(sequences) // batch)
    drafter = drafter_for(target, BLOCK)
    wrong = RATES[rate]
    script(drafter, target, sequences, wrong, offset=offsets.tolist(), rows=current_rows)
    dflash_hf.attach(target, drafter)
    try:
        with counting(target) as calls:
            found, ours = call(
                functools.partial(target.generate, assistant_model=drafter),
                target,
                inputs,
                {**base, **option.of(full)},
            )
    finally:
        dflash_hf.detach(target)
    forwards = len(calls) - (1 if compat.CACHE in theirs else 0)  # of the earlier turn
    _same(found, expected, ends_of(sequences, option.of(full)))
    assert not option.changes or batch == 1 or not torch.equal(sequences, full), "the option does nothing"
    if "streamer" in ours:
        assert ours["streamer"].columns() == theirs["streamer"].columns()
    ends = ends_of(sequences, option.of(full))
    predicted = predicted_batch_forwards(
        COLUMNS, ends, BLOCK, wrong, longest=longest_of(option.of(full)), cap=option.cap, one_pace=option.one_pace
    ) + option.more(len(sequences), new)
    assert forwards == predicted if option.exact or rate == "right" else forwards <= predicted, (forwards, predicted)
    return forwards


def longest_of(kwargs: dict) -> int:
    return kwargs.get("max_length") or COLUMNS + kwargs.get("max_new_tokens", NEW)


def ends_of(sequences: torch.Tensor, kwargs: dict) -> list[int]:
    """The column behind each row's last token: after its end token, or where its criterion stops it."""
    eos = kwargs.get("eos_token_id", [])
    eos = [eos] if isinstance(eos, int) else eos
    ends = []
    for row, text in enumerate(sequences[:, COLUMNS:].tolist()):
        stops = [i + 1 for i, token in enumerate(text) if token in eos]
        stops += [i + 1 for i, token in enumerate(text) if f"<{token}>" in kwargs.get("stop_strings", [])]
        if "stopping_criteria" in kwargs:
            stops.append(STOPS[row] - COLUMNS)
        ends.append(COLUMNS + min([*stops, len(text)]))
    return ends


def _same(found, expected, ends: list[int]) -> None:
    if isinstance(expected, torch.Tensor):
        assert found.tolist() == expected.tolist()
        return
    assert found.sequences.tolist() == expected.sequences.tolist()
    assert found[compat.CACHE].get_seq_length() == expected[compat.CACHE].get_seq_length()
    for name in ("scores", "logits", "hidden_states", "attentions"):
        ours, theirs = getattr(found, name), getattr(expected, name)
        assert (ours is None) == (theirs is None)
        for a, b in zip(ours or (), theirs or (), strict=True):
            layers = zip([a], [b], strict=True) if isinstance(a, torch.Tensor) else zip(a, b, strict=True)
            for x, y in layers:
                assert x.shape == y.shape and x.dtype == y.dtype
                keep = slice(-1, None) if x.dim() > 2 else slice(None)  # queries of padding may hold anything
                torch.testing.assert_close(x[..., keep, :], y[..., keep, :], atol=1e-4, rtol=1e-3)


def refusal(name: str, batch: int) -> str:
    """The message with which an option is refused, before any forward."""
    target = target_of("qwen3")
    drafter = dflash_hf.attach(target, drafter_for(target, BLOCK))
    try:
        with counting(target) as calls:
            target.generate(**inputs_of(batch), **REFUSED[name], max_new_tokens=5, assistant_model=drafter)
    except ValueError as error:
        assert name in str(error) and not calls
        return str(error)
    finally:
        dflash_hf.detach(target)
    raise AssertionError(f"{name} is not refused")


def main() -> None:
    torch.set_num_threads(1)
    states, draft = [], Decoding.draft
    Decoding.draft = lambda self, width: (states.append(self.state), draft(self, width))[1]
    cases = [(family, batch) for family in FAMILIES for batch in (1, 4)]
    print(f"target forwards for {NEW} tokens, drafter {' / '.join(RATES)}; plain decoding has {NEW}")
    print(f"{'option':42}" + "".join(f"{family + ', batch ' + str(batch):>19}" for family, batch in cases))
    for name in OPTIONS:
        counts = []
        for case in cases:
            numbers = [check(name, *case, rate, lambda: states[-1].texts.rows) for rate in RATES]
            counts.append(" / ".join(map(str, numbers)))
        print(f"{name:42}" + "".join(f"{count:>19}" for count in counts) + "  identical")
    for name in REFUSED:
        messages = {refusal(name, batch) for batch in (1, 4)}
        print(f"{name:42}refused: {' | '.join(messages)}")


if __name__ == "__main__":
    main()
