"""Options of `generate`: with the drafter, each gives what plain generation gives."""

import functools
import threading

import pytest
import torch
from oracles import (
    ECHO,
    Force,
    at_rate,
    counting,
    drafter_for,
    echo_pair,
    never,
    plain,
    predicted_forwards,
    prompt_of,
    script,
    square_target,
    word_tokenizer,
)
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
    WatermarkingConfig,
)

import dflash_hf
from dflash_hf.decoding import Decoding


PROMPT = 5


@functools.cache
def greedy(new: int = 40):
    """A target, a prompt, and the text that the target writes."""
    target = square_target()
    ids = prompt_of(PROMPT)
    return target, ids, plain(target, ids, max_new_tokens=new, do_sample=False)


def scripted(full, block=8, wrong=never):
    target, _, _ = greedy()
    drafter = drafter_for(target, block)
    script(drafter, target, full, wrong)
    return drafter


def decode(target, drafter, ids, streamer=None, tokenizer=None, **options):
    method = dflash_hf.custom_generate(drafter, streamer=streamer, tokenizer=tokenizer)
    return target.generate(ids, custom_generate=method, **{"do_sample": False, **options})


# ------------------------------------------------------------------------------------------------ logits processors
class OnlyOne(LogitsProcessor):
    """Allows one token, which depends on the length of the text."""

    def __call__(self, input_ids, scores):
        return Force((input_ids.shape[1] * 7) % 64, 1)(input_ids, scores)


def allowed_tokens(batch, text):
    return [int(text[-1] * 3 + i) % 64 for i in range(1, 5)]


PROCESSED = {
    "repetition_penalty": {"repetition_penalty": 1.3},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "bad_words_ids": {"bad_words_ids": [[ECHO], [49, 9], [8, 9]]},
    "min_new_tokens": {"min_new_tokens": 9, "eos_token_id": [ECHO, 54, 42]},
    "forced_eos_token_id": {"forced_eos_token_id": 5},
    "forced_bos_token_id": {"forced_bos_token_id": 9},
    "suppress_tokens": {"suppress_tokens": [ECHO, 54, 42, 18]},
    "begin_suppress_tokens": {"begin_suppress_tokens": [ECHO, 54, 42, 18]},
    "sequence_bias": {"sequence_bias": [[[ECHO, 8], -9.0], [[20], 3.0]]},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (5, 1.5), "eos_token_id": 11},
    "prefix_allowed_tokens_fn": {"prefix_allowed_tokens_fn": allowed_tokens},
    "watermarking_config": {"watermarking_config": WatermarkingConfig(bias=5.0, context_width=2)},
    "a processor that looks at the length": {"logits_processor": LogitsProcessorList([OnlyOne()])},
    "a processor that forces": {"logits_processor": LogitsProcessorList([Force()])},
    "renormalize_logits": {"renormalize_logits": True, "remove_invalid_values": True},
}


@pytest.mark.parametrize("name", PROCESSED)
def test_processed_greedy_text_is_that_of_plain_generate(name):
    options = {"max_new_tokens": 22, **PROCESSED[name]}
    for target, drafter in (echo_pair(8), (greedy()[0], drafter_for(greedy()[0], 4))):
        expected = plain(target, prompt_of(PROMPT), do_sample=False, **options)
        assert decode(target, drafter, prompt_of(PROMPT), **options).tolist() == expected.tolist()
        if target is greedy()[0]:
            for wrong in (never, at_rate(0.3)):
                drafter = scripted(expected, 8, wrong)
                assert decode(target, drafter, prompt_of(PROMPT), **options).tolist() == expected.tolist()


def test_processor_sees_the_text_before_every_committed_token():
    target, ids, full = greedy()
    seen = []

    class Recorder(LogitsProcessor):
        def __call__(self, input_ids, scores):
            seen.append(input_ids[0].tolist())
            return scores

    decode(target, scripted(full), ids, max_new_tokens=40, logits_processor=LogitsProcessorList([Recorder()]))
    text = full[0].tolist()
    assert all(prefix == text[: len(prefix)] for prefix in seen)
    assert {len(prefix) for prefix in seen} == set(range(PROMPT, len(text)))


@pytest.mark.parametrize("verifier", ["block", "rejection", "match"])
def test_sampling_from_one_candidate_is_greedy(verifier):
    target, ids, full = greedy()
    for drafter in (drafter_for(target, 4), scripted(full, 8, at_rate(0.3))):
        method = dflash_hf.custom_generate(drafter, verifier=verifier)
        for candidate in ({"top_k": 1}, {"temperature": 1e-3, "top_k": 0}, {"top_p": 1e-3}, {"min_p": 1.0}):
            text = target.generate(ids, custom_generate=method, do_sample=True, max_new_tokens=20, **candidate)
            assert text.tolist() == full[:, : PROMPT + 20].tolist()


# ------------------------------------------------------------------------------------------------ scores and logits
@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": 19},
        {"max_new_tokens": 19, "repetition_penalty": 1.3},
        {"max_new_tokens": 19, "eos_token_id": "the tenth"},
    ],
    ids=["raw", "processed", "cut inside a block"],
)
@pytest.mark.parametrize("block", [4, 8])
def test_returned_scores_and_logits_are_those_of_plain_generate(block, options):
    target, ids, full = greedy()
    if "eos_token_id" in options:
        options = {**options, "eos_token_id": int(full[0, PROMPT + 9])}
    options = {**options, "output_scores": True, "output_logits": True, "return_dict_in_generate": True}
    expected = plain(target, ids, do_sample=False, **options)
    result = decode(target, scripted(expected.sequences, block, at_rate(0.2)), ids, **options)
    assert isinstance(result, dflash_hf.DFlashGenerateOutput)
    assert result.sequences.tolist() == expected.sequences.tolist()
    new = result.sequences.shape[1] - PROMPT
    for ours, theirs in ((result.scores, expected.scores), (result.logits, expected.logits)):
        assert len(ours) == len(theirs) == new
        for a, b in zip(ours, theirs, strict=True):
            assert a.shape == (1, 64) and a.dtype == b.dtype
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
    assert sum(result.acceptance_lengths[0]) == new - 1
    assert all(1 <= length <= block for length in result.acceptance_lengths[0])
    assert result.statistics.new_tokens == new


def test_scores_are_left_out_unless_asked_for():
    target, ids, full = greedy()
    result = decode(target, scripted(full), ids, max_new_tokens=9, return_dict_in_generate=True)
    assert result.scores is None and result.logits is None
    assert isinstance(decode(target, scripted(full), ids, max_new_tokens=9, output_scores=True), torch.Tensor)


def test_acceptance_lengths_are_the_committed_tokens_of_each_round():
    target, drafter = echo_pair(8)
    result = decode(target, drafter, prompt_of(3), max_new_tokens=20, return_dict_in_generate=True)
    assert result.acceptance_lengths == [[8, 8, 3]]
    assert drafter.last_statistics is result.statistics
    assert result.statistics.tau == pytest.approx(19 / 3)


# ---------------------------------------------------------------------------------------------------------- length
@pytest.mark.parametrize("pair", ["echo", "scripted"])
def test_exactly_as_many_tokens_as_asked_for(pair):
    target, ids, full = greedy()
    drafter = scripted(full)
    if pair == "echo":
        target, drafter = echo_pair(8)
        full = torch.cat([ids, torch.full((1, 40), ECHO)], dim=1)
    for new in range(1, 21):
        assert decode(target, drafter, ids, max_new_tokens=new).tolist() == full[:, : PROMPT + new].tolist()
        assert decode(target, drafter, ids, max_length=PROMPT + new).tolist() == full[:, : PROMPT + new].tolist()


@pytest.mark.parametrize("way", ["generate", "generation_config", "attach", "custom_generate"])
def test_number_of_proposals_can_be_capped(way):
    for cap, forwards in ((1, 9), (3, 5), (7, 3), (50, 3)):
        target, drafter = echo_pair(8)
        options = {"max_new_tokens": 17, "do_sample": False}
        if way == "custom_generate":
            options["custom_generate"] = dflash_hf.custom_generate(drafter, num_assistant_tokens=cap)
        else:
            dflash_hf.attach(target, drafter, num_assistant_tokens=cap if way == "attach" else None)
            options["assistant_model"] = drafter
        if way == "generate":
            options["num_assistant_tokens"] = cap
        if way == "generation_config":
            options = {
                "assistant_model": drafter,
                "generation_config": GenerationConfig(max_new_tokens=17, pad_token_id=0, num_assistant_tokens=cap),
            }
        with counting(target) as calls:
            text = target.generate(prompt_of(3), **options)
        assert len(calls) == forwards
        assert text[0, 3:].tolist() == [ECHO] * 17


def test_cap_of_twenty_that_is_asked_for_is_not_taken_for_the_default():
    target, drafter = echo_pair(32)
    method = dflash_hf.custom_generate(drafter, num_assistant_tokens=20)
    target.generate(prompt_of(3), custom_generate=method, max_new_tokens=60, do_sample=False)
    assert drafter.last_statistics.rounds[0].proposed == 20


def test_capped_proposals_are_those_of_the_trained_block():
    target, ids, full = greedy()
    drafter = drafter_for(target, 8)
    calls = script(drafter, target, full)
    method = dflash_hf.custom_generate(drafter, num_assistant_tokens=3)
    target.generate(ids, custom_generate=method, max_new_tokens=30, do_sample=False)
    assert drafter.last_statistics.target_forwards == predicted_forwards(PROMPT, 30, 8, cap=3)
    anchors = [int(positions[0, -8]) for positions in calls]
    assert anchors == list(range(PROMPT, PROMPT + 28, 4))


# ------------------------------------------------------------------------------------------------------- end tokens
@pytest.mark.parametrize("others", [[], [60]], ids=["one", "list"])
def test_end_token_at_every_offset_of_a_block(others):
    target, ids, full = greedy()
    drafter = scripted(full)
    for k in range(PROMPT, PROMPT + 24):
        eos = int(full[0, k])
        first = full[0].tolist().index(eos, PROMPT)
        options = {"max_new_tokens": 40, "eos_token_id": [*others, eos] if others else eos}
        text = decode(target, drafter, ids, **options)
        assert text.tolist() == full[:, : first + 1].tolist()
        assert drafter.last_statistics.new_tokens == text.shape[1] - PROMPT
    assert plain(target, ids, do_sample=False, **options).tolist() == text.tolist()


def test_end_token_that_comes_as_a_correction():
    target, drafter = echo_pair(8)
    options = {"max_new_tokens": 20, "eos_token_id": 3, "logits_processor": LogitsProcessorList([Force()])}
    for length in range(1, 10):
        expected = plain(target, prompt_of(length), do_sample=False, **options)
        assert decode(target, drafter, prompt_of(length), **options).tolist() == expected.tolist()
        assert expected[0, -1] == 3


# ---------------------------------------------------------------------------------------- stop strings and criteria
@pytest.fixture(scope="module")
def stops():
    """For every offset in a block, the stop string that the text completes there; some span two tokens."""
    full = greedy()[2][0].tolist()
    new = full[PROMPT:]
    firsts = [i for i in range(1, 24) if new[i] not in new[:i]]
    assert {(i - 1) % 8 for i in firsts} >= {0, 2, 5, 6}
    single = [(f"<{new[i]}>", PROMPT + i + 1) for i in firsts]
    pairs = list(zip(new, new[1:], strict=False))
    double = [(f"<{a}> <{b}>", PROMPT + i + 2) for i, (a, b) in enumerate(pairs[:24]) if (a, b) not in pairs[:i]]
    return single + double


def test_stop_string_at_every_offset_of_a_block(stops):
    target, ids, full = greedy()
    tokenizer = word_tokenizer()
    drafter = scripted(full)
    for stop, length in stops:
        streamer = Recording()
        text = decode(
            target, drafter, ids, streamer=streamer, tokenizer=tokenizer, stop_strings=[stop], max_new_tokens=40
        )
        assert text.tolist() == full[:, :length].tolist(), stop
        assert streamer.tokens == text[0].tolist()
        assert streamer.ended == 1
    expected = plain(target, ids, stop_strings=[stop], tokenizer=tokenizer, max_new_tokens=40, do_sample=False)
    assert text.tolist() == expected.tolist()


@pytest.mark.parametrize("way", ["argument", "generation_config", "the target's own configuration"])
def test_stop_strings_of_an_attached_target(stops, way):
    target, ids, full = square_target(), *greedy()[1:]
    drafter = dflash_hf.attach(target, scripted(full))
    stop, length = stops[len(stops) // 3]
    options = {"tokenizer": word_tokenizer()}
    if way == "argument":
        options |= {"stop_strings": stop, "max_new_tokens": 40}
    elif way == "generation_config":
        options["generation_config"] = GenerationConfig(stop_strings=[stop], max_new_tokens=40, pad_token_id=0)
    else:
        target.generation_config.stop_strings = [stop]
        options["max_new_tokens"] = 40
    text = target.generate(ids, assistant_model=drafter, **options)
    assert text.tolist() == full[:, :length].tolist()
    assert plain(target, ids, **options).tolist() == text.tolist()


def test_stop_strings_without_a_tokenizer_are_refused():
    target, ids, full = greedy()
    with counting(target) as calls, pytest.raises(ValueError, match="tokenizer"):
        decode(target, scripted(full), ids, stop_strings=["<3>"], max_new_tokens=5)
    assert len(calls) == 0


class StopAtLength(StoppingCriteria):
    def __init__(self, length):
        self.length, self.scores = length, []

    def __call__(self, input_ids, scores, **kwargs):
        self.scores.append(None if scores is None else len(scores))
        return torch.tensor([input_ids.shape[1] >= self.length])


def test_stopping_criterion_that_fires_at_every_offset():
    target, ids, full = greedy()
    drafter = scripted(full)
    for length in range(PROMPT + 1, PROMPT + 20):
        options = {"max_new_tokens": 40, "stopping_criteria": StoppingCriteriaList([StopAtLength(length)])}
        assert decode(target, drafter, ids, **options).tolist() == full[:, :length].tolist()


def test_stopping_criterion_is_asked_after_every_token_with_the_scores_so_far():
    target, ids, full = greedy()
    asked = []
    for call in (plain, lambda target, *args, **kwargs: decode(target, scripted(full), *args, **kwargs)):
        criterion = StopAtLength(PROMPT + 12)
        call(
            target,
            ids,
            do_sample=False,
            max_new_tokens=40,
            stopping_criteria=StoppingCriteriaList([criterion]),
            output_scores=True,
            return_dict_in_generate=True,
        )
        asked.append(criterion.scores)
    assert asked[0] == asked[1] == list(range(1, 13))


def test_max_time_stops_after_the_first_token():
    target, ids, full = greedy()
    assert decode(target, scripted(full), ids, max_time=0.0, max_new_tokens=9).shape[1] == PROMPT + 1


# -------------------------------------------------------------------------------------------------------- streaming
class Recording:
    """A streamer that remembers what it was given."""

    def __init__(self):
        self.puts, self.ended = [], 0

    def put(self, value):
        assert not self.ended
        self.puts.append(value.flatten().tolist())

    def end(self):
        self.ended += 1

    @property
    def tokens(self):
        return [token for put in self.puts for token in put]


@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize("rate", [0.0, 0.4])
def test_stream_is_the_prompt_and_then_each_token_once(attached, rate):
    target, ids, full = square_target(), *greedy()[1:]
    drafter = scripted(full, 8, at_rate(rate))
    streamer, eos = Recording(), int(full[0, PROMPT + 12])
    if attached:
        dflash_hf.attach(target, drafter)
        text = target.generate(ids, assistant_model=drafter, streamer=streamer, max_new_tokens=40, eos_token_id=eos)
    else:
        text = decode(target, drafter, ids, streamer=streamer, max_new_tokens=40, eos_token_id=eos)
    assert streamer.puts[0] == ids[0].tolist()
    assert streamer.tokens == text[0].tolist()
    assert len(streamer.puts) == 1 + drafter.last_statistics.target_forwards
    assert streamer.ended == 1


def test_text_streamer_in_a_thread():
    target, ids, full = greedy()
    tokenizer = word_tokenizer()
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=30)
    thread = threading.Thread(
        target=decode, args=(target, scripted(full), ids), kwargs={"streamer": streamer, "max_new_tokens": 20}
    )
    thread.start()
    text = "".join(streamer)
    thread.join()
    assert text.split() == tokenizer.decode(full[0, PROMPT : PROMPT + 20]).split()


# ----------------------------------------------------------------------------------------------------------- inputs
def note_proposals(monkeypatch):
    proposed, draft = [], Decoding.draft

    def noting(self, width):
        proposals, q = draft(self, width)
        proposed.append(proposals[0].tolist())
        return proposals, q

    monkeypatch.setattr(Decoding, "draft", noting)
    return proposed


@pytest.mark.parametrize("family", ["qwen3", "mistral"])
@pytest.mark.parametrize("sliding", [None, 6], ids=["full drafter", "sliding drafter"])
def test_left_padding_changes_neither_text_nor_proposals(monkeypatch, family, sliding):
    target = square_target(family)
    fields = {"layer_types": ["sliding_attention"], "sliding_window": sliding} if sliding else {}
    drafter = drafter_for(target, 4, **fields)
    ids, pad = prompt_of(9), 4
    padded = torch.cat([torch.zeros(1, pad, dtype=torch.long), ids], dim=1)
    mask = (torch.arange(pad + 9) >= pad).long().unsqueeze(0)
    full = plain(target, ids, max_new_tokens=25, do_sample=False)
    proposed = note_proposals(monkeypatch)
    assert decode(target, drafter, padded, attention_mask=mask, max_new_tokens=25)[:, pad:].tolist() == full.tolist()
    padded_proposals = list(proposed)
    proposed.clear()
    decode(target, drafter, ids, max_new_tokens=25)
    assert padded_proposals == proposed

    wrong = at_rate(0.3)
    script(drafter, target, torch.cat([padded[:, :pad], full], dim=1), wrong, offset=pad)
    assert decode(target, drafter, padded, attention_mask=mask, max_new_tokens=25)[:, pad:].tolist() == full.tolist()
    assert drafter.last_statistics.target_forwards == predicted_forwards(pad + 9, 25, 4, wrong)


@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_prompt_given_as_embeddings(family):
    target = square_target(family)
    ids = prompt_of(12)
    full = plain(target, ids, max_new_tokens=25, do_sample=False)
    embeds = target.get_input_embeddings()(ids).detach()
    options = {"inputs_embeds": embeds, "attention_mask": torch.ones_like(ids), "max_new_tokens": 25}
    drafter = drafter_for(target, 4)
    wrong = at_rate(0.3)
    script(drafter, target, full, wrong)
    for prompt in (None, ids):
        expected = plain(target, prompt, do_sample=False, **options)
        assert decode(target, drafter, prompt, **options).tolist() == expected.tolist()
        assert drafter.last_statistics.target_forwards == predicted_forwards(12, 25, 4, wrong)
    options["max_new_tokens"] = None
    expected = plain(target, None, do_sample=False, max_length=20, **options)
    assert decode(target, drafter, None, max_length=20, **options).tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("target_dtype", "drafter_dtype"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.bfloat16),
    ],
    ids=str,
)
def test_pair_of_different_dtypes(target_dtype, drafter_dtype):
    target, drafter = echo_pair(8)
    target.to(target_dtype)
    drafter.to(drafter_dtype)
    for options in ({}, {"do_sample": True, "temperature": 0.01}):
        text = decode(target, drafter, prompt_of(3), max_new_tokens=17, **options)
        assert text[0, 3:].tolist() == [ECHO] * 17
        assert drafter.last_statistics.target_forwards == 3
    assert {p.dtype for p in target.parameters()} == {target_dtype}
    assert {p.dtype for p in drafter.parameters()} == {drafter_dtype}


def test_drafter_that_yields_nan_costs_only_speed():
    target, ids, full = greedy()
    for options in ({}, {"do_sample": True, "top_k": 1}):
        drafter = drafter_for(target, 4)
        torch.nn.init.constant_(drafter.norm.weight, float("nan"))
        assert decode(target, drafter, ids, max_new_tokens=9, **options).tolist() == full[:, : PROMPT + 9].tolist()
