"""A cache of an earlier turn, prompts in chunks or as embeddings, and the states of the target in the output."""

import copy
import pickle

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
    predicted_forwards,
    prompt_of,
    script,
    square_target,
)
from packaging.version import Version
from test_batches import ragged
from transformers import DynamicCache

import dflash_hf
from dflash_hf import compat
from dflash_hf.cache import take_draft
from dflash_hf.decoding import Decoding


FAMILIES = ["qwen3", "mistral", "gemma3_text"]
SLIDING = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
GREEDY = {"do_sample": False, "max_new_tokens": 15}


def decode(target, drafter, ids=None, **options):
    method = dflash_hf.custom_generate(drafter)
    return target.generate(ids, custom_generate=method, **{**GREEDY, **whole(ids), **options})


def whole(ids) -> dict:
    """A mask without padding, which transformers would suspect where the text has the padding token."""
    return {} if ids is None else {"attention_mask": torch.ones_like(ids)}


def first_turn(target, drafter, **options):
    """A turn of the drafter's, and the text of the next: what was said and five tokens of the user."""
    result = decode(target, drafter, prompt_of(9), return_dict_in_generate=True, **options)
    return result[compat.CACHE], torch.cat([result.sequences, prompt_of(5, seed=3)], dim=1)


def filled(target, ids) -> DynamicCache:
    """The cache of plain decoding after `ids`."""
    cache = DynamicCache(config=target.config)
    target(ids, **{compat.CACHE: cache}, use_cache=True)
    return cache


# --------------------------------------------------------------------------------------------------- the next turn
@pytest.mark.parametrize("given", ["all ids", "new ids"])
@pytest.mark.parametrize("way", ["drafter", "plain", "plain, then drafter"])
@pytest.mark.parametrize("family", FAMILIES)
def test_text_after_a_kept_cache_is_that_from_scratch(family, way, given):
    target = square_target(family)
    drafter = drafter_for(target, 4, **SLIDING)
    cache, ids = first_turn(target, drafter)
    expected = plain(target, ids, **GREEDY, **whole(ids))
    assert cache.get_seq_length() == ids.shape[1] - 6
    if way == "plain, then drafter":
        cache = filled(target, ids[:, :-5])
    past = cache.get_seq_length()
    options = {compat.CACHE: cache, **whole(ids)}
    text = ids if given == "all ids" else ids[:, past:]
    run = plain if way == "plain" else lambda target, *args, **kwargs: decode(target, drafter, *args, **kwargs)
    with counting(target) as calls:
        found = run(target, text, **{**GREEDY, **options})
    assert found[:, -15:].tolist() == expected[:, -15:].tolist()
    assert found.shape[1] == text.shape[1] + 15
    assert calls[0]["input_ids"].shape[1] == ids.shape[1] - past  # what is cached is not computed again
    assert cache.get_seq_length() == expected.shape[1] - 1


def test_drafter_goes_on_from_its_own_memory_of_the_earlier_turn():
    target = square_target()
    drafter = drafter_for(target, 4)
    seen = []
    drafter.fc.register_forward_pre_hook(lambda module, args: seen.append(args[0].clone()))
    cache, ids = first_turn(target, drafter)
    text = decode(target, drafter, ids, **{compat.CACHE: cache})
    together = torch.cat(seen, dim=1)  # each token once, of both turns
    expected = naive_features(target, text, drafter.config.target_layer_ids)[:, : together.shape[1]]
    torch.testing.assert_close(together, expected, atol=1e-4, rtol=1e-4)
    assert together.shape[1] == text.shape[1] - 1


@pytest.mark.parametrize("how", ["as it is", "copied", "pickled", "cropped", "cropped to less than the window"])
@pytest.mark.parametrize("fields", [{}, SLIDING], ids=["full", "sliding"])
def test_proposals_after_a_kept_cache_are_those_from_scratch(monkeypatch, fields, how):
    target = square_target()
    drafter = drafter_for(target, 4, **fields)
    cache, ids = first_turn(target, drafter)
    if how == "copied":
        decode(target, drafter, ids, **{compat.CACHE: copy.deepcopy(cache)})
    if how == "pickled":
        cache = pickle.loads(pickle.dumps(cache))
    if how.startswith("cropped"):
        cache.crop(-4 if how == "cropped" else -19)
        ids = torch.cat([ids[:, : cache.get_seq_length()], prompt_of(3, seed=5)], dim=1)
    proposed, draft = [], Decoding.draft

    def noting(self, width):
        proposals, q = draft(self, width)
        proposed.append(proposals[0].tolist())
        return proposals, q

    monkeypatch.setattr(Decoding, "draft", noting)
    again = decode(target, drafter, ids, **{compat.CACHE: cache})
    kept, proposed[:] = list(proposed), []
    assert decode(target, drafter, ids).tolist() == again.tolist()
    # A sliding layer cannot give back what it has forgotten, so after a crop that drafter begins anew.
    assert (kept == proposed) is not (how.startswith("cropped") and bool(fields))


@pytest.mark.parametrize("other", ["geometry", "rows", "tokens"])
def test_memory_of_something_else_is_not_taken(other):
    target = square_target()
    drafter = drafter_for(target, 4)
    cache, ids = first_turn(target, drafter)
    inputs = {"attention_mask": torch.ones_like(ids)}
    if other == "geometry":
        drafter = drafter_for(target, 6, num_hidden_layers=2)
    if other == "rows":
        cache.batch_repeat_interleave(2)
        ids, inputs = ids.repeat(2, 1), {"attention_mask": torch.ones_like(ids).repeat(2, 1)}
    if other == "tokens":  # the target went on without the drafter, which then begins anew
        ids = torch.cat([plain(target, ids, **{**GREEDY, compat.CACHE: cache}), prompt_of(2, seed=4)], dim=1)
        inputs = {"attention_mask": torch.ones_like(ids)}
    expected = plain(target, ids, **GREEDY, **inputs)
    draft = take_draft(copy.copy(cache), drafter.config, len(ids))
    assert draft.length == draft.cache.get_seq_length() == 0
    assert decode(target, drafter, ids, **inputs, **{compat.CACHE: cache}).tolist() == expected.tolist()


@pytest.mark.parametrize("typed", [True, False], ids=["layers of the target's kinds", "full layers"])
@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_cache_of_the_callers_is_filled_in_place(family, typed):
    target = square_target(family)
    drafter = drafter_for(target, 4)
    for batch in (1, 3):
        inputs = ragged(*[6, 4, 9][:batch])
        ours, theirs = (DynamicCache(config=target.config) if typed else DynamicCache() for _ in range(2))
        text = target.generate(
            **inputs, **GREEDY, **{compat.CACHE: ours}, custom_generate=dflash_hf.custom_generate(drafter)
        )
        assert text.tolist() == plain(target, **inputs, **GREEDY, **{compat.CACHE: theirs}).tolist()
        assert ours.get_seq_length() == theirs.get_seq_length() == text.shape[1] - 1
        first = int((inputs["attention_mask"] == 0).sum(1).max())
        for a, b in zip(ours.layers, theirs.layers, strict=True):
            assert type(a) is type(b) and a.keys.shape == b.keys.shape
            torch.testing.assert_close(a.keys[:, :, first:], b.keys[:, :, first:], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("batch", [1, 3])
def test_prompt_as_embeddings_after_a_kept_cache(batch):
    target, inputs = square_target(), ragged(*[9, 4, 6][:batch])
    embeds, mask = target.get_input_embeddings()(inputs["input_ids"]).detach(), inputs["attention_mask"]
    full = plain(target, **inputs, **GREEDY)
    for run in (plain, lambda target, *args, **options: decode(target, drafter_for(target, 4), *args, **options)):
        cache = DynamicCache(config=target.config)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, :5]
        with torch.no_grad():
            target(
                inputs["input_ids"][:, :5], attention_mask=mask[:, :5], position_ids=positions, **{compat.CACHE: cache}
            )
        text = run(target, inputs_embeds=embeds, attention_mask=mask, **GREEDY, **{compat.CACHE: cache})
        assert text.tolist() == full[:, 9:].tolist()
        assert cache.get_seq_length() == full.shape[1] - 1


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("given", ["all ids", "new ids"])
def test_batch_after_a_kept_cache(family, given, rows):
    target, inputs = square_target(family), ragged(3, 9, 5)
    script(
        drafter := drafter_for(target, 4),
        target,
        plain(target, **inputs, **GREEDY),
        at_rate(0.3),
        offset=(1 - inputs["attention_mask"]).sum(1).tolist(),
        rows=rows,
    )
    method = dflash_hf.custom_generate(drafter)
    turn = target.generate(**inputs, **GREEDY, custom_generate=method, return_dict_in_generate=True)
    more = torch.stack([prompt_of(4, seed=i)[0] for i in range(3)])
    ids = torch.cat([turn.sequences, more], dim=1)
    mask = torch.cat([inputs["attention_mask"], torch.ones(3, 19, dtype=torch.long)], dim=1)
    expected = plain(target, ids, attention_mask=mask, **GREEDY)
    cache = turn[compat.CACHE]
    text = ids if given == "all ids" else ids[:, cache.get_seq_length() :]
    plain_cache = copy.deepcopy(cache)
    plain(target, text, attention_mask=mask, **{compat.CACHE: plain_cache}, **GREEDY)
    drafter = drafter_for(target, 4)
    found = target.generate(
        text,
        attention_mask=mask,
        **{compat.CACHE: cache},
        **GREEDY,
        custom_generate=dflash_hf.custom_generate(drafter),
    )
    assert found[:, -15:].tolist() == expected[:, -15:].tolist()
    assert cache.get_seq_length() == expected.shape[1] - 1
    for a, b in zip(cache.layers, plain_cache.layers, strict=True):
        first = max(0, 6 - (cache.get_seq_length() - a.keys.shape[2]))
        torch.testing.assert_close(a.keys[:, :, first:], b.keys[:, :, first:], atol=1e-4, rtol=1e-4)


def test_positions_of_the_new_tokens_alone():
    target = square_target()
    cache, ids = first_turn(target, drafter_for(target, 4))
    past = cache.get_seq_length()
    options = {**whole(ids), "position_ids": torch.arange(past, ids.shape[1]).unsqueeze(0)}
    expected = plain(target, ids[:, past:], **GREEDY, **options, **{compat.CACHE: copy.deepcopy(cache)})
    found = decode(target, drafter_for(target, 4), ids[:, past:], **options, **{compat.CACHE: cache})
    assert found.tolist() == expected.tolist()


def test_cache_that_leaves_nothing_new_is_refused():
    target = square_target()
    ids = prompt_of(9)
    drafter = drafter_for(target)
    cache = filled(target, ids)
    with counting(target) as calls, pytest.raises(ValueError, match="holds 9 tokens, and the text has 9"):
        decode(target, drafter, ids, **{compat.CACHE: cache})
    assert not calls


# ------------------------------------------------------------------------------------------------------------- prompts
@pytest.mark.parametrize("chunk", [1, 4, 9, 30])
@pytest.mark.parametrize("family", FAMILIES)
def test_prompt_in_chunks(family, chunk, rows):
    target = square_target(family)
    for inputs in (ragged(23), ragged(23, 4, 11)):
        full = plain(target, **inputs, **GREEDY)
        drafter, seen = drafter_for(target, 4, **SLIDING), []
        offset = (1 - inputs["attention_mask"]).sum(1).tolist()
        script(drafter, target, full, at_rate(0.3), offset=offset, rows=rows)
        drafter.fc.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[1]))  # noqa: B023
        with counting(target) as calls:
            found = target.generate(
                **inputs, **GREEDY, prefill_chunk_size=chunk, custom_generate=dflash_hf.custom_generate(drafter)
            )
        assert torch.equal(found, full)
        sizes = [min(chunk, 23 - start) for start in range(0, 23, chunk)]
        assert [call["input_ids"].shape[1] for call in calls][: len(sizes)] == sizes == seen[: len(sizes)]
        assert drafter.last_statistics.target_forwards == len(calls)
        if len(full) == 1:
            assert len(calls) == len(sizes) - 1 + predicted_forwards(23, 15, 4, at_rate(0.3))


def test_no_layer_that_slides_holds_the_whole_prompt(monkeypatch):
    target = square_target("mistral")
    drafter = drafter_for(target, 4, **{**SLIDING, "layer_types": ["sliding_attention"] * 2})
    held, absorb = [], Decoding.absorb

    def noting(self):
        absorb(self)
        caches = (self.state.target.cache, self.state.draft.cache)
        held.append(max(layer.keys.shape[2] for cache in caches for layer in cache.layers))
        assert self.state.context.shape[1] == 0 and self.state.context.untyped_storage().nbytes() == 0

    monkeypatch.setattr(Decoding, "absorb", noting)
    decode(target, drafter, prompt_of(200))
    assert held == [7]


@pytest.mark.parametrize("family", ["qwen3", "mistral", "granite"])
@pytest.mark.parametrize("with_ids", [False, True])
def test_batch_given_as_embeddings(family, with_ids, rows):
    target, inputs = square_target(family), ragged(9, 4, 6)
    full = plain(target, **inputs, **GREEDY)
    options = {"attention_mask": inputs["attention_mask"], **GREEDY}
    options["inputs_embeds"] = target.get_input_embeddings()(inputs["input_ids"]).detach()
    options["return_dict_in_generate"] = True
    drafter = drafter_for(target, 4)
    offset = (1 - inputs["attention_mask"]).sum(1).tolist()
    script(drafter, target, full, at_rate(0.3), offset=offset, rows=rows)
    ids = inputs["input_ids"] if with_ids else None
    expected = plain(target, ids, **options)
    found = decode(target, drafter, ids, **options)
    assert torch.equal(found.sequences, expected.sequences)
    for a, b in zip(found[compat.CACHE].layers, expected[compat.CACHE].layers, strict=True):
        first = max(0, 5 - (23 - a.keys.shape[2]))
        torch.testing.assert_close(a.keys[:, :, first:], b.keys[:, :, first:], atol=1e-4, rtol=1e-4)


# ---------------------------------------------------------------------------------------- hidden states and attentions
@pytest.mark.parametrize("wrong", [never, at_rate(0.4)])
@pytest.mark.parametrize("lengths", [(9,), (9, 3, 6)], ids=str)
@pytest.mark.parametrize("family", ["qwen3", "mistral", "gemma3_text", "gpt_oss"])
def test_hidden_states_and_attentions_are_those_of_plain_decoding(family, lengths, wrong, rows):
    target, inputs = square_target(family, attention="eager"), ragged(*lengths)
    full = plain(target, **inputs, **GREEDY)
    options = {**GREEDY, "eos_token_id": int(full[0, 9 + 10]), "return_dict_in_generate": True}
    options |= {"output_hidden_states": True, "output_attentions": True}
    expected = plain(target, **inputs, **options)
    drafter = drafter_for(target, 4)
    offset = (1 - inputs["attention_mask"]).sum(1).tolist()
    script(drafter, target, full, wrong, offset=offset, rows=rows)
    found = target.generate(**inputs, **options, custom_generate=dflash_hf.custom_generate(drafter))
    assert torch.equal(found.sequences, expected.sequences)
    new = expected.sequences[:, 9:].tolist()
    ends = [10 + text.index(options["eos_token_id"]) if options["eos_token_id"] in text else 24 for text in new]
    for name in ("hidden_states", "attentions"):
        ours, theirs = getattr(found, name), getattr(expected, name)
        assert len(ours) == len(theirs) == max(ends) - 9
        for token, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            assert len(a) == len(b)
            for x, y in zip(a, b, strict=True):
                assert x.shape == y.shape
                for row, end in enumerate(ends):
                    if 9 + token >= end:  # in plain decoding a row goes on after its end, with padding
                        continue
                    queries = slice(offset[row], None) if token == 0 else slice(None)
                    at = (row, queries) if name == "hidden_states" else (row, slice(None), queries)
                    torch.testing.assert_close(x[at], y[at], atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("family", ["qwen3", "mistral"])
@pytest.mark.parametrize("given", ["new ids", "embeddings"])
def test_states_when_the_prompt_is_not_among_the_ids(family, given):
    target = square_target(family, attention="eager")
    ids, results = prompt_of(19), []
    options = {**GREEDY, "return_dict_in_generate": True, "output_hidden_states": True, "output_attentions": True}
    script(drafter := drafter_for(target, 4), target, plain(target, ids, **GREEDY), at_rate(0.3))
    for run in (plain, lambda target, *args, **options: decode(target, drafter, *args, **options)):
        if given == "new ids":
            kept = {compat.CACHE: filled(target, ids[:, :12]), "attention_mask": torch.ones_like(ids)}
            results.append(run(target, ids[:, 12:], **options, **kept))
        else:
            results.append(run(target, inputs_embeds=target.get_input_embeddings()(ids).detach(), **options))
    expected, found = results
    assert torch.equal(expected.sequences, found.sequences)
    for name in ("hidden_states", "attentions"):
        for a, b in zip(getattr(found, name), getattr(expected, name), strict=True):
            for x, y in zip(a, b, strict=True):
                torch.testing.assert_close(x, y, atol=1e-4, rtol=1e-3)


def test_what_is_returned_ends_where_the_text_does_without_an_end_token():
    """A criterion stops a single row inside a block."""
    target, ids = square_target(), prompt_of(5)
    full = plain(target, ids, **GREEDY)
    script(drafter := drafter_for(target, 8), target, full)
    options = {**GREEDY, "return_dict_in_generate": True, "stopping_criteria": [StopAt([5 + 11])]}
    found = decode(target, drafter, ids, **options)
    assert torch.equal(found.sequences, full[:, :16]) and found[compat.CACHE].get_seq_length() == 15
    assert found.acceptance_lengths == [[8, 2]] and found.statistics.new_tokens == 11


def test_statistics_of_rows_that_stop_without_an_end_token(rows):
    target, inputs = square_target(), ragged(5, 5)
    full = plain(target, **inputs, **GREEDY)
    script(drafter := drafter_for(target, 8), target, full, rows=rows)
    options = {**GREEDY, "return_dict_in_generate": True, "stopping_criteria": [StopAt([5 + 4, 5 + 11])]}
    method = dflash_hf.custom_generate(drafter)
    found = target.generate(**inputs, **options, custom_generate=method)
    assert torch.equal(found.sequences, full[:, :16])
    assert found.acceptance_lengths == [[8, 2], [8, 2]] and found.statistics.new_tokens == 22


def test_attentions_of_a_backend_that_has_none_are_empty():
    target, ids = square_target(attention="sdpa"), prompt_of(6)
    options = {**GREEDY, "return_dict_in_generate": True, "output_attentions": True}
    expected, found = plain(target, ids, **options), decode(target, drafter_for(target), ids, **options)
    assert expected.attentions == found.attentions == ((),) * 15


@pytest.mark.skipif(compat.VERSION < Version("5.23"), reason="a choice of hidden states came with 5.23")
@pytest.mark.parametrize("lengths", [(6,), (6, 3)], ids=str)
def test_choice_of_hidden_states(lengths):
    target, inputs = square_target(), ragged(*lengths)
    options = {**GREEDY, "return_dict_in_generate": True, "output_hidden_states": [1, 3]}
    expected = plain(target, **inputs, **options)
    method = dflash_hf.custom_generate(drafter_for(target))
    found = target.generate(**inputs, **options, custom_generate=method)
    for a, b in zip(found.hidden_states, expected.hidden_states, strict=True):
        assert [x is None for x in a] == [x is None for x in b] == [True, False, True, False]
        torch.testing.assert_close(a[1][:, -1], b[1][:, -1], atol=1e-4, rtol=1e-3)


def test_failure_in_a_batch_leaves_the_callers_cache_as_it_was(rows):
    target, inputs = square_target(), ragged(9, 4, 6)
    cache, first = DynamicCache(config=target.config), {name: tensor[:, :5] for name, tensor in inputs.items()}
    target(**first, position_ids=(first["attention_mask"].cumsum(-1) - 1).clamp(min=0), **{compat.CACHE: cache})
    before = copy_of(cache)
    full = plain(target, **inputs, **GREEDY)
    options = {**GREEDY, "eos_token_id": int(full[0, 12])}  # a row ends and is dropped before the failure
    drafter, calls = drafter_for(target, 4), []
    offset = (1 - inputs["attention_mask"]).sum(1).tolist()
    script(drafter, target, full, at_rate(0.3), offset=offset, rows=rows)

    def fail(*_):
        calls.append(1)
        if len(calls) == 6:
            raise KeyboardInterrupt

    hook = drafter.norm.register_forward_hook(fail)
    method = dflash_hf.custom_generate(drafter)
    with pytest.raises(KeyboardInterrupt):
        target.generate(**inputs, **options, **{compat.CACHE: cache}, custom_generate=method)
    assert all(torch.equal(a, b.keys) for a, b in zip(before, cache.layers, strict=True))
    hook.remove()
    found = target.generate(**inputs, **GREEDY, **{compat.CACHE: cache}, custom_generate=method)
    assert torch.equal(found, full)


def copy_of(cache) -> list[torch.Tensor]:
    return [layer.keys.clone() for layer in cache.layers]


def test_states_are_left_out_unless_asked_for():
    target = square_target()
    found = decode(target, drafter_for(target), prompt_of(5), return_dict_in_generate=True)
    assert found.hidden_states is None and found.attentions is None
    text = decode(target, drafter_for(target), prompt_of(5), output_hidden_states=True)
    assert torch.equal(text, plain(target, prompt_of(5), **GREEDY))
