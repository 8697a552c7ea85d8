"""Several rows at once: each is what plain decoding writes, in the predicted number of forwards."""

import random

import pytest
import torch
from oracles import (
    StopAt,
    at_rate,
    counting,
    drafter_for,
    naive_features,
    never,
    plain,
    predicted_batch_forwards,
    prompt_of,
    script,
    square_target,
)
from transformers import DynamicCache, LogitsProcessor
from transformers.cache_utils import DynamicLayer
from transformers.generation import EosTokenCriteria

import dflash_hf
from dflash_hf import compat
from dflash_hf.cache import _move_right
from dflash_hf.decoding import Decoding
from dflash_hf.outputs import Texts


SLIDING_DRAFTER = {"num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 7}


def ragged(*lengths: int) -> dict[str, torch.Tensor]:
    """Left-padded random prompts of these lengths."""
    columns = max(lengths)
    ids = torch.zeros(len(lengths), columns, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        ids[row, columns - length :] = prompt_of(length, seed=row)
        mask[row, columns - length :] = 1
    return {"input_ids": ids, "attention_mask": mask}


def scripted(target, inputs, full, wrong, rows, block=4, **fields):
    drafter = drafter_for(target, block, **fields)
    offsets = (1 - inputs["attention_mask"]).sum(1).tolist()
    script(drafter, target, full, wrong, offset=offsets, rows=rows)
    return drafter


FAMILIES = ["qwen3", "mistral", "gemma3_text", "gpt_oss"]
WRONG = {"never": never, "30 %": at_rate(0.3), "always": lambda index, slot: True}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("lengths", [(5, 5, 5), (3, 9, 1, 21), (30, 2)], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_are_those_of_plain_decoding_in_the_predicted_forwards(family, lengths, wrong, rows):
    target = square_target(family, attention="eager" if family == "gpt_oss" else "sdpa")
    inputs = ragged(*lengths)
    options = {"max_new_tokens": 25, "do_sample": False}
    full = plain(target, **inputs, **options)
    drafter = scripted(target, inputs, full, WRONG[wrong], rows, **(SLIDING_DRAFTER if family == "mistral" else {}))
    with counting(target) as calls:
        found = target.generate(**inputs, **options, custom_generate=dflash_hf.custom_generate(drafter))
    assert torch.equal(found, full)
    columns = max(lengths)
    expected = predicted_batch_forwards(columns, [columns + 25] * len(lengths), 4, WRONG[wrong])
    numbers = drafter.last_statistics
    assert len(calls) == numbers.target_forwards == expected
    assert (numbers.new_tokens, numbers.texts, numbers.calls) == (25 * len(lengths), len(lengths), 1)
    committed = [sum(r.committed for r in numbers.rounds if r.row == row) for row in range(len(lengths))]
    assert committed == [24] * len(lengths)


@pytest.mark.parametrize("block", [2, 5, 16])
@pytest.mark.parametrize("wrong", [at_rate(0.4), never])
def test_rows_that_end_early_are_padded_and_cost_no_more_verification(block, wrong, rows):
    target, inputs = square_target("mistral"), ragged(4, 11, 7, 2)
    options = {"max_new_tokens": 30, "do_sample": False}
    full = plain(target, **inputs, **options)
    columns = inputs["input_ids"].shape[1]
    options["eos_token_id"] = [int(full[0, columns + 4]), int(full[2, columns + 12])]
    expected = plain(target, **inputs, **options)
    drafter = scripted(target, inputs, full, wrong, rows, block)
    with counting(target) as calls:
        found = target.generate(**inputs, **options, custom_generate=dflash_hf.custom_generate(drafter))
    assert torch.equal(found, expected)
    sizes = [call["input_ids"].shape[0] for call in calls]
    assert sizes[0] == 4 and sizes == sorted(sizes, reverse=True) and sizes[-1] < 4


@torch.no_grad()
def check_caches(decoding):
    """Each row of both caches ends with what a fresh pass over its committed tokens gives, and holds nothing else."""
    state, model, drafter = decoding.state, decoding.target.model, decoding.drafter
    for entry, row in enumerate(state.texts.rows):
        text = state.texts.ids[row, : state.texts.ends[row] - 1]
        text = text[int((text != 0).long().argmax()) :].unsqueeze(0)  # the prompts have no other zeros
        pending = state.context_ends[entry] if state.context.shape[1] else 0
        features = naive_features(model, text, drafter.config.target_layer_ids)
        torch.testing.assert_close(
            state.context[entry, :pending], features[0, text.shape[1] - pending :], atol=1e-4, rtol=1e-4
        )
        length = text.shape[1]
        assert state.anchor_position[entry].item() == length
        assert state.context_positions[entry, :pending].tolist() == list(range(length - pending, length))
        whole, covered = DynamicCache(), length - pending
        model(text, **{compat.CACHE: whole})
        check_row(state.target, whole, entry, length)
        whole = DynamicCache()
        if covered:
            drafter(features.new_zeros(1, 1, features.shape[-1] // 2), features[:, :covered], cache=whole)
            check_row(state.draft, whole, entry, covered)


def check_row(aligned, reference, entry: int, length: int):
    if aligned.mask is not None:
        assert aligned.mask[entry].tolist() == [0] * (aligned.length - length) + [1] * length
    for layer, whole in zip(aligned.cache.layers, reference.layers, strict=True):
        assert layer.get_seq_length() == aligned.length
        kept = min(length, layer.sliding_window - 1) if layer.is_sliding else length
        for name in ("keys", "values"):
            ours, theirs = getattr(layer, name)[entry], getattr(whole, name)[0]
            torch.testing.assert_close(ours[:, -kept:], theirs[:, length - kept : length], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["qwen3", "mistral", "gemma3_text"])
@pytest.mark.parametrize("block", [4, 12])
def test_caches_of_all_rows_after_every_round(family, block, rows, monkeypatch):
    target, inputs, round_, seen = square_target(family), ragged(3, 11, 1, 6), Decoding.round, []
    inputs["input_ids"][:, -1] = 5
    options = {"max_new_tokens": 25, "do_sample": False}
    full = plain(target, **inputs, **options)
    options["eos_token_id"] = int(full[1, 11 + 9])
    drafter = scripted(target, inputs, full, at_rate(0.3), rows, block, **SLIDING_DRAFTER)

    def checking(self, taps):
        round_(self, taps)
        seen.append(len(self.state.texts.rows))
        check_caches(self)

    monkeypatch.setattr(Decoding, "round", checking)
    found = target.generate(**inputs, **options, custom_generate=dflash_hf.custom_generate(drafter))
    monkeypatch.undo()
    assert torch.equal(found, plain(target, **inputs, **options)) and len(set(seen)) > 1


# ----------------------------------------------------------------------------------------------------------- options
class ForceByRow(LogitsProcessor):
    """In row b, token `10 + b` wherever the text has a length divisible by five."""

    stateless = True

    def __call__(self, input_ids, scores):
        if input_ids.shape[1] % 5 == 0:
            scores = torch.full_like(scores, -float("inf"))
            scores[torch.arange(len(scores)), 10 + torch.arange(len(scores))] = 0.0
        return scores


OPTIONS = {
    "repetition penalty": {"repetition_penalty": 1.4},
    "n-grams": {"no_repeat_ngram_size": 2},
    "bad words": {"bad_words_ids": [[7], [9, 3]]},
    "minimum": {"min_new_tokens": 9, "eos_token_id": list(range(20, 40))},
    "end tokens": {"eos_token_id": [3, 11, 40, 41, 17, 29]},
    "prefix function": {"prefix_allowed_tokens_fn": lambda row, ids: [row + 5, (7 * len(ids)) % 64, 3 + row % 2]},
    "row by row": {"logits_processor": [ForceByRow()]},
    "criterion": {"stopping_criteria": [StopAt([17, 14, 25, 12])]},
    "criterion and end tokens": {"stopping_criteria": [StopAt([17, 14, 25, 12])], "eos_token_id": [3, 11, 40]},
    "length": {"max_length": 19, "max_new_tokens": None},
    "one token": {"max_new_tokens": 1},
}


@pytest.mark.parametrize("wrong", [pytest.param("never", marks=pytest.mark.slow), "30 %"])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_options_give_what_they_give_without_the_drafter(family, name, wrong, rows):
    target, inputs = square_target(family), ragged(3, 11, 7, 2)
    options = {"max_new_tokens": 22, "do_sample": False, **OPTIONS[name]}
    expected = plain(target, **inputs, **options)
    drafter = scripted(target, inputs, expected, WRONG[wrong], rows, 5)
    found = target.generate(**inputs, **options, custom_generate=dflash_hf.custom_generate(drafter))
    assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_scores_logits_and_cache_are_those_of_plain_decoding(family, rows):
    target, inputs = square_target(family), ragged(3, 11, 7)
    options = {"max_new_tokens": 12, "do_sample": False, "repetition_penalty": 1.2, "return_dict_in_generate": True}
    options |= {"output_scores": True, "output_logits": True}
    expected = plain(target, **inputs, **options)
    drafter = scripted(target, inputs, expected.sequences, at_rate(0.3), rows)
    found = target.generate(**inputs, **options, custom_generate=dflash_hf.custom_generate(drafter))
    assert torch.equal(found.sequences, expected.sequences)
    for name in ("scores", "logits"):
        assert len(getattr(found, name)) == 12
        for ours, theirs in zip(getattr(found, name), getattr(expected, name), strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3)
    assert [sum(lengths) for lengths in found.acceptance_lengths] == [11, 11, 11]
    caches = found[compat.CACHE], expected[compat.CACHE]
    assert caches[0].get_seq_length() == caches[1].get_seq_length() == 22
    for ours, theirs in zip(caches[0].layers, caches[1].layers, strict=True):
        for row in range(3):
            start = max(0, int(8 * (row == 0) + 4 * (row == 2)) - (22 - ours.keys.shape[2]))  # padding holds anything
            for name in ("keys", "values"):
                a, b = getattr(ours, name)[row, :, start:], getattr(theirs, name)[row, :, start:]
                torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_computing_the_cache_anew_asks_for_no_more_logits_than_one(rows):
    target, inputs = square_target(), ragged(3, 9)
    drafter = drafter_for(target)
    options = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True}
    with counting(target) as calls:
        target.generate(**inputs, **options, custom_generate=dflash_hf.custom_generate(drafter))
    assert [call["logits_to_keep"] for call in calls[-2:]] == [1, 1]


def test_several_sequences_of_a_prompt_are_rows(rows):
    target, inputs = square_target(), ragged(4, 9)
    options = {"do_sample": True, "top_k": 1, "num_return_sequences": 3, "max_new_tokens": 15}
    full = plain(target, **inputs, **options)
    repeated = {name: tensor.repeat_interleave(3, dim=0) for name, tensor in inputs.items()}
    drafter = scripted(target, repeated, full, at_rate(0.3), rows)
    found = target.generate(**inputs, **options, custom_generate=dflash_hf.custom_generate(drafter))
    assert torch.equal(found, full)


def test_a_streamer_gets_each_column_once_when_all_rows_have_it(rows):
    target, inputs = square_target(), ragged(4, 9, 2)
    options = {"do_sample": False, "max_new_tokens": 15}
    full = plain(target, **inputs, **options)

    class Streamer:
        puts, ended = [], 0

        def put(self, value):
            self.puts.append(value)

        def end(self):
            self.ended += 1

    drafter, streamer = scripted(target, inputs, full, at_rate(0.3), rows), Streamer()
    method = dflash_hf.custom_generate(drafter, streamer=streamer)
    target.generate(**inputs, **options, custom_generate=method)
    prompt, *columns = streamer.puts
    assert torch.equal(prompt, inputs["input_ids"]) and streamer.ended == 1
    assert torch.equal(torch.stack(columns, dim=1), full[:, prompt.shape[1] :])


def test_no_row_asks_for_positions_beyond_the_last_that_is_needed(rows):
    """A target with as many positions as the text has tokens must do."""
    target, inputs = square_target(), ragged(3, 9, 6)
    full = plain(target, **inputs, max_length=25, do_sample=False)
    drafter = scripted(target, inputs, full, lambda index, slot: index < 1000, rows, 8)  # row 0 is slow
    with counting(target) as calls:
        found = target.generate(
            **inputs, max_length=25, do_sample=False, custom_generate=dflash_hf.custom_generate(drafter)
        )
    assert torch.equal(found, full)
    most = max(int(call["position_ids"][:, -1].max()) for call in calls)
    assert most == 25 - 2  # the last token of the unpadded row is never an input
    assert max(call["input_ids"].shape[1] for call in calls[1:]) == 8


def test_columns_that_are_padding_in_all_rows_are_dropped(rows, monkeypatch):
    target, inputs, lengths = square_target(), ragged(6, 6), []
    full = plain(target, **inputs, max_new_tokens=40, do_sample=False)
    # The rows take turns at being the fast one, so that each falls behind by more and more columns.
    drafter = scripted(target, inputs, full, lambda index, slot: (index % 1000 // 8) % 2 == index // 1000, rows)
    round_ = Decoding.round

    def noting(self, taps):
        round_(self, taps)
        state = self.state
        ends = [state.texts.ends[row] for row in state.texts.rows]
        if ends:
            lengths.append((state.target.length, max(ends) - 1))

    monkeypatch.setattr(Decoding, "round", noting)
    found = target.generate(
        **inputs, max_new_tokens=40, do_sample=False, custom_generate=dflash_hf.custom_generate(drafter)
    )
    assert torch.equal(found, full) and len({r.accepted for r in drafter.last_statistics.rounds}) > 1
    assert lengths and all(held == needed for held, needed in lengths)


@pytest.mark.parametrize("seed", range(20))
def test_texts_grow_by_what_each_row_keeps_of_a_block(seed):
    """Whatever the rows said in the columns beyond, padding follows the end of each."""
    draw = random.Random(seed)
    naive = {row: [draw.randint(1, 9) for _ in range(4)] for row in range(3)}
    texts, writing = Texts(torch.tensor(list(naive.values())), [4] * 3, [0, 1, 2]), [0, 1, 2]
    for _ in range(6):
        width = draw.randint(1, 5)
        block = torch.tensor([[draw.randint(1, 9) for _ in range(width)] for _ in writing])
        counts = [draw.randint(1, width) for _ in writing]
        texts = texts.extended(block, counts, 0)
        for row, tokens, count in zip(writing, block.tolist(), counts, strict=True):
            naive[row] += tokens[:count]
        longest = max(map(len, naive.values()))
        assert texts.ids.tolist() == [text + [0] * (longest - len(text)) for text in naive.values()]
        assert texts.ends == [len(text) for text in naive.values()]
        texts.rows = writing = sorted(draw.sample(writing, draw.randint(1, len(writing))))


AUTOREGRESSIVE = {"drafting": "autoregressive", "sample_from_anchor": True, "causal_layers": [True]}


@pytest.mark.parametrize("fields", [{}, AUTOREGRESSIVE], ids=["parallel", "autoregressive"])
def test_proposals_of_rows_together_are_those_of_each_alone(fields, monkeypatch):
    target, inputs = square_target(), ragged(7, 3, 10)
    full = plain(target, **inputs, max_new_tokens=16, do_sample=False)
    drafter, proposed, draft = drafter_for(target, 4, **fields), {}, Decoding.draft

    def noting(self, width):
        """Notes what is proposed; in row b of several, b proposals are then made right."""
        proposals, q = draft(self, width)
        for entry, row in enumerate(self.state.texts.rows):
            end = self.state.texts.ends[row]
            proposed[row, end - self.prompt_columns] = proposals[entry].tolist()
            right = full[row, end : end + min(row, width)]
            proposals[entry, : len(right)] = right
        return proposals, q

    monkeypatch.setattr(Decoding, "draft", noting)
    options = {"max_new_tokens": 16, "do_sample": False, "custom_generate": dflash_hf.custom_generate(drafter)}
    assert torch.equal(target.generate(**inputs, **options), full)
    together = dict(proposed)
    for row, length in enumerate([7, 3, 10]):
        proposed.clear()
        target.generate(prompt_of(length, seed=row), **options)
        both = [
            (tokens, proposed[0, end]) for (r, end), tokens in together.items() if r == row and (0, end) in proposed
        ]
        assert len(both) > 3
        for ours, alone in both:
            width = min(len(ours), len(alone))  # the slowest row decides the width
            assert ours[:width] == alone[:width]


def test_keys_and_values_of_different_widths_move_alike():
    layer = DynamicLayer()
    keys, values = torch.arange(2 * 3 * 5 * 4.0).view(2, 3, 5, 4), torch.arange(2 * 3 * 5 * 2.0).view(2, 3, 5, 2)
    layer.update(keys, values)
    _move_right(layer, torch.tensor([[0], [2]]))
    for moved, before in ((layer.keys, keys), (layer.values, values)):
        assert torch.equal(moved[0], before[0]) and torch.equal(moved[1, :, 2:], before[1, :, :3])


class OwnEnd(EosTokenCriteria):
    """A subclass is not known, but has an end token all the same."""

    stateless = True


def test_end_tokens_in_other_forms(rows):
    target, inputs = square_target(), ragged(6, 3)
    full = plain(target, **inputs, max_new_tokens=20, do_sample=False)
    eos = int(full[0, 6 + 7])
    forms = [{"eos_token_id": torch.tensor([eos, 63])}, {"stopping_criteria": [OwnEnd(eos_token_id=eos)]}]
    for form in forms:
        options = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 5, **form}
        expected = plain(target, **inputs, **options)
        drafter = scripted(target, inputs, full, at_rate(0.3), rows)
        found = target.generate(**inputs, **options, custom_generate=dflash_hf.custom_generate(drafter))
        assert torch.equal(found, expected)
