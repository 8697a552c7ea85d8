"""Processors and criteria that remember: they are asked what plain decoding asks them, in its order, and no more."""

import pytest
import torch
from oracles import (
    Automaton,
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
)
from torch.nn.functional import pad
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)
from transformers.generation import SynthIDTextWatermarkingConfig

import dflash_hf
from dflash_hf import drafting, memory, verification
from dflash_hf.decoding import Decoding
from dflash_hf.proposal import ProposalHead


VERIFIERS = ["block", "rejection", "match"]
GREEDY = {"do_sample": False, "max_new_tokens": 20}


def prompts(rows: int) -> dict:
    """Left-padded random prompts."""
    lengths = [6, 3, 9, 5][:rows]
    ids = torch.zeros(rows, max(lengths), dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, -length:] = prompt_of(length, seed=row)
    return {"input_ids": ids, "attention_mask": (ids > 0).long()}


@pytest.fixture
def scripted(rows):
    """Makes drafters that propose a text, with mistakes."""

    def make(target, inputs, full, wrong, block=5):
        drafter = drafter_for(target, block)
        script(drafter, target, full, wrong, offset=(1 - inputs["attention_mask"]).sum(1).tolist(), rows=rows)
        return drafter

    return make


def decode(target, drafter, inputs, verifier="block", **options):
    method = dflash_hf.custom_generate(drafter, verifier=verifier)
    return target.generate(**inputs, custom_generate=method, **options)


class Restorable(Automaton):
    def snapshot(self):
        return self.columns, None if self.states is None else list(self.states), len(self.asked)

    def restore(self, state):
        self.columns, states, asked = state
        self.states = None if states is None else list(states)
        del self.asked[asked:]


@pytest.mark.parametrize("wrong", [never, at_rate(0.3), lambda index, slot: True], ids=["never", "30 %", "always"])
@pytest.mark.parametrize("kind", [Automaton, Restorable])
@pytest.mark.parametrize("batch", [1, 4])
def test_automaton_never_runs_ahead_of_the_text(batch, kind, wrong, scripted):
    target, inputs = square_target(), prompts(batch)
    columns = inputs["input_ids"].shape[1]
    options = {"max_new_tokens": 25, "do_sample": False}
    there = kind(columns)
    full = plain(target, **inputs, logits_processor=LogitsProcessorList([there]), **options)
    here = kind(columns)
    drafter = scripted(target, inputs, full, wrong)
    found = decode(target, drafter, inputs, logits_processor=LogitsProcessorList([here]), **options)
    assert torch.equal(found, full)
    assert here.asked == there.asked and here.states == there.states
    if batch == 1 and kind is Automaton:
        assert drafter.last_statistics.target_forwards == predicted_forwards(columns, 25, 5, wrong)


@pytest.mark.parametrize("batch", [1, 4])
def test_automaton_is_left_alone_once_its_text_has_ended(batch, scripted):
    target, inputs = square_target(), prompts(batch)
    columns = inputs["input_ids"].shape[1]
    options = {"max_new_tokens": 25, "do_sample": False}
    full = plain(target, **inputs, logits_processor=LogitsProcessorList([Automaton(columns)]), **options)
    options["eos_token_id"] = [int(full[0, columns + 6]), int(full[-1, columns + 13])]
    there, here = Automaton(columns), Automaton(columns)
    expected = plain(target, **inputs, logits_processor=LogitsProcessorList([there]), **options)
    drafter = scripted(target, inputs, full, never)
    found = decode(target, drafter, inputs, logits_processor=LogitsProcessorList([here]), **options)
    assert torch.equal(found, expected) and here.asked == there.asked


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_drafts_pass_through_a_processor_that_can_go_back(verifier):
    target, inputs, forwards = square_target(), prompts(1), {}
    options = {"max_new_tokens": 40, "do_sample": verifier != "match"}
    for kind in (Automaton, Restorable):
        drafter = drafter_for(target, 5)
        torch.manual_seed(0)
        decode(target, drafter, inputs, verifier, logits_processor=[kind(6, width=2)], **options)
        forwards[kind] = drafter.last_statistics.target_forwards
    assert forwards[Restorable] < 0.75 * forwards[Automaton]


def test_sampled_text_with_an_automaton_stays_in_it():
    target, inputs = square_target(), prompts(4)
    for verifier in VERIFIERS:
        automaton = Automaton(9)
        found = decode(
            target, drafter_for(target, 5), inputs, verifier, max_new_tokens=20, do_sample=True,
            logits_processor=[automaton],
        )  # fmt: skip
        assert automaton.asked[-1] == found[:, :-1].tolist()


def test_state_comes_back_when_drafting_fails():
    class Failing(Restorable):
        """Fails when it is asked twice with more text than there is, which happens in a draft."""

        committed = 6

        def __call__(self, input_ids, scores):
            if input_ids.shape[1] > self.committed + 2:
                raise KeyboardInterrupt
            return super().__call__(input_ids, scores)

    target, inputs, processor = square_target(), prompts(1), Failing(6)
    with pytest.raises(KeyboardInterrupt):
        decode(
            target, drafter_for(target, 5), inputs, logits_processor=[processor], max_new_tokens=20, do_sample=False
        )
    assert processor.asked == [inputs["input_ids"].tolist()]  # the prompt's slot is all that was settled


class Trie:
    """A function for `prefix_allowed_tokens_fn` that knows only the beginnings of some texts that end with 63."""

    def __init__(self, texts):
        self.next = {}
        for text in texts:
            for i in range(len(text)):
                self.next.setdefault(tuple(text[:i]), []).append(text[i])

    def __call__(self, row, ids, *, prompt=9):
        text = ids[prompt:].tolist()
        while len(text) > 1 and text[-1] == 0:
            text.pop()
        if text[-1:] == [63]:  # in a batch, plain decoding goes on with padding
            return [0] if len(ids) > prompt + len(text) or tuple(text[:-1]) in self.next else self.next["?"]
        return self.next[tuple(text)]  # a KeyError for anything else


@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize("batch", [1, 4])
def test_function_that_knows_only_texts_that_plain_decoding_would_write(batch, verifier):
    texts = [[3, 4, 5, 6, 7, 63], [3, 4, 9, 63], [3, 8, 8, 8, 8, 8, 8, 63], [11, 63]]
    inputs = {
        name: torch.cat([tensor[:, :0], pad(tensor, (9 - tensor.shape[1], 0))], 1)
        for name, tensor in prompts(batch).items()
    }
    target, options = (
        square_target(),
        {"max_new_tokens": 8, "eos_token_id": 63, "prefix_allowed_tokens_fn": Trie(texts)},
    )
    expected = plain(target, **inputs, do_sample=False, **options)
    for fields in ({}, {"draft_vocab_size": 6}):
        drafter = drafter_for(target, 5, **fields)
        assert torch.equal(decode(target, drafter, inputs, verifier, do_sample=False, **options), expected)
        found = decode(target, drafter, inputs, verifier, do_sample=True, **options)
        for text in found[:, 9:].tolist():
            assert text[: text.index(63) + 1] in texts


def test_drafts_pass_through_the_processors_beside_one_that_cannot_go_back():
    """Drafted at another temperature than verified, few tokens would be accepted."""
    target, inputs = square_target(), prompts(1)
    with torch.no_grad():
        target.lm_head.weight.mul_(0.1)  # a law with many likely tokens

    class Nothing(LogitsProcessor):
        def __call__(self, input_ids, scores):
            return scores

    options = {"do_sample": True, "top_k": 0, "max_new_tokens": 60, "suppress_tokens": list(range(1, 60))}
    forwards = []
    for processors in ([], [Nothing()]):
        drafter = drafter_for(target, 5)
        torch.manual_seed(0)
        decode(target, drafter, inputs, "rejection", logits_processor=LogitsProcessorList(processors), **options)
        forwards.append(drafter.last_statistics.target_forwards)
    assert max(forwards) < 35  # of the five tokens that are left, the drafter proposes one of them


@pytest.mark.parametrize("kind", ["shortlist", "overflow"])
@pytest.mark.parametrize("verifier", VERIFIERS)
def test_slot_without_any_proposal_does_not_bias_the_slots_before_it(monkeypatch, kind, verifier):
    """In every other slot the drafter has nothing that is allowed, or numbers that are none."""
    target, drafter = square_target(num_hidden_layers=2), drafter_for(square_target(num_hidden_layers=2), 4)
    law, other = torch.tensor([0.5, 0.5]), torch.tensor([0.9, 0.1])

    class Alternate(LogitsProcessor):
        stateless = True

        def __call__(self, input_ids, scores):
            out = torch.full_like(scores, -float("inf"))
            if input_ids.shape[1] % 2:
                out[:, :2] = law.log() if scores[0, 0] != 7.0 else other.log()
            elif kind == "shortlist":
                out[:, 40] = 0.0 if scores[0, 0] != 7.0 else -float("inf")
            else:
                out[:, :2] = scores[:, :2] if scores.isnan().any() else law.log()
            return out

    class Head(ProposalHead):
        def logits(self, hidden):
            out = torch.full((*hidden.shape[:2], 64), 7.0)
            if kind == "overflow":
                out[:, 1::2] = float("nan")
            return out

    monkeypatch.setattr(drafting, "ProposalHead", Head)
    torch.manual_seed(0)
    inputs = {"input_ids": torch.ones(4, 1, dtype=torch.long), "attention_mask": torch.ones(4, 1, dtype=torch.long)}
    options = {"do_sample": True, "top_k": 0, "max_new_tokens": 500, "logits_processor": [Alternate()]}
    text = decode(target, drafter, inputs, verifier, **options)[:, 1::2]
    ones = int((text == 1).sum())
    assert abs(ones - text.numel() / 2) < 4 * (text.numel() / 4) ** 0.5


def test_processor_that_says_it_has_no_memory_is_taken_for_all_slots_at_once():
    target, drafter = echo_pair(8)
    unprocessed = predicted_forwards(3, 33, 8, lambda index, slot: index % 5 == 0)
    for stateless, forwards in ((True, 5), (False, unprocessed)):
        force = Force()
        force.stateless = stateless
        options = {"max_new_tokens": 33, "do_sample": False, "logits_processor": [force]}
        text = decode(target, drafter, {"input_ids": prompt_of(3)}, **options)
        assert text.tolist() == plain(target, prompt_of(3), **options).tolist()
        assert drafter.last_statistics.target_forwards == forwards


def test_what_may_remember_is_named_in_a_warning(caplog, monkeypatch):
    monkeypatch.setattr(memory.logger, "propagate", True)
    memory.logger.warning_once.cache_clear()
    target = square_target()
    options = {"max_new_tokens": 5, "do_sample": False}
    decode(target, drafter_for(target), prompts(1), logits_processor=[Restorable(6), Force()], **options)
    assert not caplog.records
    for _ in range(2):
        decode(target, drafter_for(target), prompts(1), logits_processor=[Automaton(6)], **options)
    assert [record.message.split()[0] for record in caplog.records] == ["oracles.Automaton"]
    assert "snapshot" in caplog.text and "stateless" in caplog.text


@pytest.mark.parametrize("name", ["transformers_cfg.processor", "transformers_modules.repo", "__main__"])
def test_classes_of_other_packages_may_remember(name):
    mine = type("Mine", (LogitsProcessor,), {"__module__": name})()
    assert memory.asked_as_plain([mine, TopKLogitsWarper(2)], "") == [mine]


@pytest.mark.parametrize("batch", [1, 3])
def test_subclass_of_a_warper_may_look_at_the_text(batch, scripted):
    class OddTokens(TemperatureLogitsWarper):
        """Every other token is odd."""

        stateless = True

        def __call__(self, input_ids, scores):
            allowed = torch.arange(scores.shape[1]) % 2 == input_ids.shape[1] % 2
            return scores.masked_fill(~allowed, -float("inf"))

    target, inputs = square_target(), prompts(batch)
    options = {"max_new_tokens": 20, "do_sample": False, "logits_processor": LogitsProcessorList([OddTokens(1.0)])}
    full = plain(target, **inputs, **options)
    assert torch.equal(decode(target, scripted(target, inputs, full, at_rate(0.3)), inputs, **options), full)


def test_each_slot_has_a_law_of_its_own_also_one_by_one(monkeypatch):
    """The drafter draws slot i from another law than slot j; the target's law is a row of a table."""
    laws = torch.tensor([[0.7, 0.1, 0.1, 0.1], [0.1, 0.7, 0.1, 0.1], [0.1, 0.1, 0.1, 0.7]])
    truth = torch.tensor([0.1, 0.2, 0.3, 0.4])

    class Table(LogitsProcessor):
        def __call__(self, input_ids, scores):
            return torch.full_like(scores, -float("inf")).index_copy(
                1, torch.arange(4), truth.log().expand(len(scores), 4)
            )

    def draft(self, width):
        q = torch.zeros(len(self.state.anchor), width, 64)
        q[..., :4] = laws[:width]
        self.state.absorbed() if self.state.context.shape[1] == 0 else self.absorb()
        return verification.draw(q), q

    monkeypatch.setattr(Decoding, "draft", draft)
    target, counts = square_target(num_hidden_layers=2), torch.zeros(4)
    torch.manual_seed(0)
    inputs = {"input_ids": torch.ones(1, 1, dtype=torch.long), "attention_mask": torch.ones(1, 1, dtype=torch.long)}
    for _ in range(3):
        options = {"do_sample": True, "top_k": 0, "max_new_tokens": 400, "logits_processor": [Table()]}
        texts = decode(target, drafter_for(target, 4), inputs, **options)
        counts += torch.bincount(texts[:, 1:].flatten(), minlength=4)
    statistic = ((counts - counts.sum() * truth) ** 2 / (counts.sum() * truth)).sum()
    assert counts.sum() == 1200 and statistic < 16.3  # p = 0.001 with three degrees of freedom


# ------------------------------------------------------------------------------------------------------------ criteria
class Countdown(StoppingCriteria):
    """Counts what it is asked; row b stops when it has seen `limits[b]` columns, whatever their length."""

    def __init__(self, *limits):
        self.limits, self.asked = torch.tensor(limits), []

    def __call__(self, input_ids, scores, **kwargs):
        self.asked.append(input_ids.tolist())
        return self.limits <= len(self.asked)


@pytest.mark.parametrize("wrong", [never, at_rate(0.3)])
@pytest.mark.parametrize("limits", [(7,), (7, 16, 4, 11)], ids=str)
@pytest.mark.parametrize("pad_id", [0, 5])
def test_criterion_that_counts_is_asked_once_for_each_column(limits, wrong, scripted, pad_id):
    target, inputs = square_target(), prompts(len(limits))
    options = {"max_new_tokens": 25, "do_sample": False, "eos_token_id": 63, "pad_token_id": pad_id}
    full = plain(target, **inputs, **options)
    asked = []
    for drafter in (None, scripted(target, inputs, full, wrong)):
        criterion = Countdown(*limits)
        options["stopping_criteria"] = StoppingCriteriaList([criterion])
        found = decode(target, drafter, inputs, **options) if drafter else plain(target, **inputs, **options)
        asked.append((criterion.asked, found.tolist()))
    assert asked[0] == asked[1]


# --------------------------------------------------------------------------------------- processors of other libraries
@pytest.mark.parametrize("batch", [1, 3])
def test_classifier_free_guidance_is_that_of_plain_generate(batch, scripted):
    target, inputs = square_target(), prompts(batch)
    options = {"guidance_scale": 1.6, "max_new_tokens": 16, "do_sample": False}
    full = plain(target, **inputs, **options)
    assert not torch.equal(full, plain(target, **inputs, max_new_tokens=16, do_sample=False))
    for wrong in (never, at_rate(0.3)):
        drafter = scripted(target, inputs, full, wrong)
        with counting(target) as calls:
            assert torch.equal(decode(target, drafter, inputs, **options), full)
        if wrong is never and batch == 1:
            assert len(calls) == predicted_forwards(6, 16, 5) + 16  # and one of its own for each token


@pytest.mark.parametrize("batch", [1, 3])
def test_synthid_watermark_is_that_of_plain_generate(batch, scripted):
    config = SynthIDTextWatermarkingConfig(keys=[5, 9, 13, 31], ngram_len=3, context_history_size=32)
    target, inputs = square_target(), prompts(batch)
    options = {"watermarking_config": config, "max_new_tokens": 16, "do_sample": True, "top_k": 2}
    processors = plain_processors(target, inputs, options)
    assert any(memory.asked_as_plain(processors, ""))
    greedy = {"max_new_tokens": 16, "do_sample": False}
    full = plain(target, **inputs, **greedy, logits_processor=LogitsProcessorList(processors))
    processors = plain_processors(target, inputs, options)
    drafter = scripted(target, inputs, full, at_rate(0.2))
    found = decode(target, drafter, inputs, **greedy, logits_processor=LogitsProcessorList(processors))
    assert torch.equal(found, full)


def plain_processors(target, inputs, options) -> list:
    """The processors that `generate` prepares for these options."""
    seen = []
    target.generate(**inputs, **options, custom_generate=lambda model, ids, logits_processor, *args, **kwargs: (
        seen.extend(logits_processor), ids
    )[1])  # fmt: skip
    return seen


@pytest.mark.parametrize("batch", [1, 2])
def test_json_grammar_of_xgrammar(batch, scripted):
    xgr = pytest.importorskip("xgrammar")
    from xgrammar.contrib.hf import LogitsProcessor as GrammarProcessor

    words = ["<eos>", "{", "}", "[", "]", ":", ",", '"', "a", "b", "c", "1", "2", "3", "true", "null", " "]
    words += [f"x{i}" for i in range(64 - len(words))]
    info = xgr.TokenizerInfo(words, vocab_size=64, stop_token_ids=[0])
    grammar = xgr.GrammarCompiler(info).compile_builtin_json_grammar()
    target, inputs = square_target(), prompts(batch)
    options = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": 0, "pad_token_id": 0}
    full = plain(target, **inputs, logits_processor=[GrammarProcessor(grammar)], **options)
    assert words[int(full[0, inputs["input_ids"].shape[1]])][0] in '{["123tn'
    for wrong in (never, at_rate(0.3)):
        processor = GrammarProcessor(grammar)
        assert memory.can_go_back(processor)
        found = decode(target, scripted(target, inputs, full, wrong), inputs, logits_processor=[processor], **options)
        assert torch.equal(found, full)
    processor = GrammarProcessor(grammar)
    drafter = drafter_for(target, 5)
    assert torch.equal(decode(target, drafter, inputs, logits_processor=[processor], **options), full)
