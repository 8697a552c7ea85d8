"""Targets with recurrent layers: their states are at the commit after every round, whichever way they get there."""

import contextlib
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from oracles import (
    HYBRIDS,
    at_rate,
    counting,
    drafter_for,
    never,
    plain,
    predicted_batch_forwards,
    predicted_forwards,
    prompt_of,
    square_target,
)
from test_batches import ragged, scripted
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache

import dflash_hf
from dflash_hf import compat, decoding
from dflash_hf import target as targets
from dflash_hf.decoding import Decoding
from dflash_hf.recurrent import RecurrentLayers


WRONG = {"never": never, "30 %": at_rate(0.3), "always": lambda index, slot: True}
GREEDY = {"max_new_tokens": 25, "do_sample": False}


@pytest.fixture(params=["mixers known", "mixers unknown"])
def mixers(request, monkeypatch) -> str:
    if request.param == "mixers unknown":
        monkeypatch.setattr(targets, "MIXERS", ())
    return request.param


def states_of(cache, row: int = 0) -> list[torch.Tensor]:
    """What the recurrent layers hold for one row."""
    layers = [layer for layer in cache.layers if hasattr(layer, "conv_states")]
    states = [
        state for layer in layers for kind in (layer.conv_states, layer.recurrent_states) for state in kind.values()
    ]
    return [state[row] for state in states if state is not None]


@torch.no_grad()
def fresh_cache(target, text: torch.Tensor) -> DynamicCache:
    cache = DynamicCache(config=target.config)
    target(text, use_cache=True, **{compat.CACHE: cache})
    return cache


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("lengths", [(7,), (3, 9, 1, 9)], ids=str)
@pytest.mark.parametrize("family", HYBRIDS)
def test_states_after_every_round_are_those_of_a_fresh_forward(family, lengths, wrong, mixers, rows, monkeypatch):
    target, inputs, checked = square_target(family), ragged(*lengths), []
    full = plain(target, **inputs, **GREEDY)
    drafter = scripted(target, inputs, full, WRONG[wrong], rows, 5)
    round_, columns = Decoding.round, max(lengths)

    def checking(self, taps):
        round_(self, taps)
        state = self.state
        for entry, row in enumerate(state.texts.rows):
            end = state.texts.ends[row] - 1 - state.lag
            text = full[row : row + 1, columns - lengths[row] : end]
            expected = states_of(fresh_cache(target, text))
            found = states_of(state.target.cache, entry)
            assert len(found) == len(expected) > 0
            for ours, theirs in zip(found, expected, strict=True):
                torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=2e-4)
            checked.append(state.lag)

    monkeypatch.setattr(Decoding, "round", checking)
    found = target.generate(**inputs, **GREEDY, custom_generate=dflash_hf.custom_generate(drafter))
    assert found.tolist() == full.tolist() and len(checked) > 3
    assert any(checked) == (mixers == "mixers unknown" and wrong != "never")
    one_pace = mixers == "mixers unknown"
    ends = [columns + 25] * len(lengths)
    predicted = predicted_batch_forwards(columns, ends, 5, WRONG[wrong], one_pace=one_pace)
    assert drafter.last_statistics.target_forwards == predicted


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_cache_that_lags_far_behind_is_brought_up_to_date(family, rows, monkeypatch):
    monkeypatch.setattr(targets, "MIXERS", ())
    monkeypatch.setattr(decoding, "MAX_LAG", 6)
    target, inputs = square_target(family), ragged(7)
    full, wrong = plain(target, **inputs, **GREEDY), WRONG["always"]
    drafter = scripted(target, inputs, full, wrong, rows, 5)
    with counting(target) as calls:
        found = target.generate(**inputs, **GREEDY, custom_generate=dflash_hf.custom_generate(drafter))
    assert torch.equal(found, full)
    fed = [call["input_ids"].shape[1] for call in calls[1:]]
    assert max(fed) == 6 + 5 and fed.count(7) >= 2
    assert len(calls) == drafter.last_statistics.target_forwards == predicted_forwards(7, 25, 5, wrong) + 24 // 8


@pytest.mark.parametrize("lengths", [(7,), (3, 9)], ids=str)
@pytest.mark.parametrize("family", HYBRIDS)
def test_what_comes_with_the_text_is_that_of_plain_decoding(family, lengths, mixers, rows):
    options = {**GREEDY, "return_dict_in_generate": True, "output_hidden_states": True, "output_logits": True}
    options |= {"output_attentions": True, "output_scores": True}
    target, inputs = square_target(family, attention="eager"), ragged(*lengths)
    expected = plain(target, **inputs, **options)
    drafter = scripted(target, inputs, expected.sequences, WRONG["30 %"], rows, 5)
    found = target.generate(**inputs, **options, custom_generate=dflash_hf.custom_generate(drafter))
    assert torch.equal(found.sequences, expected.sequences)
    for name in ("logits", "scores", "hidden_states", "attentions"):
        for ours, theirs in zip(getattr(found, name), getattr(expected, name), strict=True):
            pairs = [(ours, theirs)] if isinstance(ours, torch.Tensor) else zip(ours, theirs, strict=True)
            for x, y in pairs:
                assert x.shape == y.shape
                torch.testing.assert_close(x[..., -1, :], y[..., -1, :], atol=1e-3, rtol=1e-3)
    cache = found[compat.CACHE]
    assert cache.get_seq_length() == expected[compat.CACHE].get_seq_length()
    for row in range(len(lengths)):
        for ours, theirs in zip(states_of(cache, row), states_of(expected[compat.CACHE], row), strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("lengths", [(7,), (3, 9)], ids=str)
@pytest.mark.parametrize("family", HYBRIDS)
def test_second_turn_goes_on_with_the_cache(family, lengths, mixers, rows):
    target, inputs = square_target(family), ragged(*lengths)
    options = {**GREEDY, "return_dict_in_generate": True}
    full = plain(target, **inputs, **GREEDY)
    drafter = scripted(target, inputs, full, WRONG["30 %"], rows, 5)
    first = target.generate(**inputs, **options, custom_generate=dflash_hf.custom_generate(drafter))
    more = torch.cat([prompt_of(4, seed=9 + i) for i in range(len(lengths))])
    mask = torch.cat([inputs["attention_mask"], torch.ones(len(lengths), 25 + 4, dtype=torch.long)], dim=1)
    again = {"input_ids": torch.cat([first.sequences, more], dim=1), "attention_mask": mask}
    expected = plain(target, **again, **GREEDY)
    drafter = scripted(target, again, expected, WRONG["30 %"], rows, 5)
    found = target.generate(
        **again, **GREEDY, custom_generate=dflash_hf.custom_generate(drafter), **{compat.CACHE: first[compat.CACHE]}
    )
    assert torch.equal(found, expected)


@pytest.mark.parametrize("chunk", [1, 4])
@pytest.mark.parametrize("family", HYBRIDS)
def test_padded_prompts_in_chunks(family, chunk, mixers, rows):
    target, inputs = square_target(family), ragged(3, 11)
    options = {**GREEDY, "prefill_chunk_size": chunk}
    full = plain(target, **inputs, **options)
    drafter = scripted(target, inputs, full, WRONG["30 %"], rows, 5)
    assert torch.equal(target.generate(**inputs, **options, custom_generate=dflash_hf.custom_generate(drafter)), full)


@pytest.mark.parametrize("family", HYBRIDS)
def test_failure_in_a_round_leaves_a_kept_cache_at_the_commit(family, mixers, rows, monkeypatch):
    target, inputs = square_target(family), ragged(7)
    full = plain(target, **inputs, **GREEDY)
    drafter = scripted(target, inputs, full, WRONG["30 %"], rows, 5)
    verify, failed = Decoding.verify, []

    def failing(self, proposals):
        forward = verify(self, proposals)
        if self.state.texts.ends[0] > 15:
            failed.append((self.state.texts.ends[0] - 1 - self.state.lag, self.state.target.cache))
            raise KeyboardInterrupt
        return forward

    monkeypatch.setattr(Decoding, "verify", failing)
    with pytest.raises(KeyboardInterrupt):
        target.generate(**inputs, **GREEDY, custom_generate=dflash_hf.custom_generate(drafter))
    ((end, cache),) = failed
    assert cache.get_seq_length() == end
    for ours, theirs in zip(states_of(cache), states_of(fresh_cache(target, full[:, :end])), strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("family", [pytest.param("qwen3_next", marks=pytest.mark.slow), "lfm2"])
def test_compiled_target_is_rolled_back_whole(family, rows):
    """Nothing tells how a mixer was called in a compiled graph."""
    target, inputs = square_target(family), ragged(4, 7)
    full = plain(target, **inputs, **GREEDY)
    drafter = scripted(target, inputs, full, WRONG["30 %"], rows, 5)
    dflash_hf.attach(target, drafter)
    target.forward = torch.compile(target.forward, backend="eager", dynamic=True)
    found = target.generate(**inputs, **GREEDY, assistant_model=drafter)
    assert torch.equal(found, full)
    ends = [7 + 25] * 2
    predicted = predicted_batch_forwards(7, ends, 5, WRONG["30 %"], one_pace=True)
    assert drafter.last_statistics.target_forwards == predicted


@pytest.mark.parametrize("family", HYBRIDS)
def test_mixers_alone_run_again_and_only_where_something_was_rejected(family, rows):
    target, inputs = square_target(family), ragged(7)
    full = plain(target, **inputs, **GREEDY)
    mixers = targets.Target(target).mixers
    assert mixers
    for wrong in WRONG.values():
        drafter = scripted(target, inputs, full, wrong, rows, 5)
        with counting(target) as calls, contextlib.ExitStack() as stack:
            runs = [stack.enter_context(counting(mixer)) for mixer in mixers.values()]
            target.generate(**inputs, **GREEDY, custom_generate=dflash_hf.custom_generate(drafter))
        rejected = sum(record.committed <= record.proposed for record in drafter.last_statistics.rounds)
        assert all(len(each) == len(calls) + rejected for each in runs)


@pytest.mark.parametrize("family", HYBRIDS)
def test_no_weight_matrix_is_read_again(family, rows, monkeypatch):
    """What the linear layers of a mixer said of the block is taken for the accepted part of it."""
    target, inputs, products = square_target(family), ragged(3, 7), []
    full = plain(target, **inputs, **GREEDY)
    drafter = scripted(target, inputs, full, WRONG["30 %"], rows, 5)
    run = RecurrentLayers._run

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
                products.append(func)
            return func(*args, **(kwargs or {}))

    def counted(*args):
        with Counting():
            return run(*args)

    monkeypatch.setattr(RecurrentLayers, "_run", counted)
    method = dflash_hf.custom_generate(drafter)
    assert torch.equal(target.generate(**inputs, **GREEDY, custom_generate=method), full) and not products
    # It is not, if nothing was noted; the text is the same.
    monkeypatch.setattr(targets.LinearHook, "__call__", lambda *_: None)
    assert torch.equal(target.generate(**inputs, **GREEDY, custom_generate=method), full) and products


@pytest.mark.parametrize("kind", ["hook", "hook in place", "subclass"])
@pytest.mark.parametrize("family", HYBRIDS)
def test_what_the_caller_does_to_a_linear_layer_is_done_once(family, kind, rows):
    target, inputs = square_target(family), ragged(3, 7)

    class Scaled(nn.Linear):
        def forward(self, x):
            return 1.7 * super().forward(x)

    for mixer in targets.Target(target).mixers.values():
        for name, part in list(mixer.named_children()):
            if type(part) is nn.Linear and name.startswith("in_proj"):
                if kind == "hook":
                    part.register_forward_hook(lambda module, args, output: 1.7 * output)
                elif kind == "hook in place":
                    part.register_forward_hook(lambda module, args, output: output.mul_(1.7))
                else:
                    part.__class__ = Scaled
    full = plain(target, **inputs, **GREEDY)
    drafter = scripted(target, inputs, full, WRONG["30 %"], rows, 5)
    dflash_hf.attach(target, drafter)
    assert torch.equal(target.generate(**inputs, **GREEDY, assistant_model=drafter), full)
    assert drafter.last_statistics.target_forwards == predicted_batch_forwards(7, [32, 32], 5, WRONG["30 %"])


@pytest.mark.parametrize("family", HYBRIDS)
def test_no_activations_of_the_prompt_are_held(family, rows, monkeypatch):
    target, inputs, noted = square_target(family), ragged(40), []
    init = targets.MixerCall.__init__
    monkeypatch.setattr(targets.MixerCall, "__init__", lambda self, *a: (noted.append(a[2]), init(self, *a))[1])
    full = plain(target, **inputs, **GREEDY)
    drafter = scripted(target, inputs, full, WRONG["30 %"], rows, 5)
    dflash_hf.attach(target, drafter)
    target.generate(**inputs, **GREEDY, assistant_model=drafter)
    sizes = {v.shape[1] for kwargs in noted for v in kwargs.values() if isinstance(v, torch.Tensor) and v.dim() == 3}
    assert noted and max(sizes, default=0) <= 5


def test_keys_and_values_are_not_copied_with_the_states(rows, monkeypatch):
    target, inputs, saved = square_target("falcon_h1"), ragged(9), []
    save = RecurrentLayers.save
    monkeypatch.setattr(RecurrentLayers, "save", lambda self: (save(self), saved.append(self))[0])
    full = plain(target, **inputs, **GREEDY)
    drafter = scripted(target, inputs, full, WRONG["30 %"], rows, 5)
    target.generate(**inputs, **GREEDY, custom_generate=dflash_hf.custom_generate(drafter))
    kept = [layer for each in saved for layer in each._saved.values()]
    assert kept and all(layer.keys is None and layer.values is None for layer in kept)


@pytest.mark.parametrize("family", HYBRIDS)
def test_prompt_that_fails_half_way_leaves_a_kept_cache_as_it_was(family, rows):
    target, inputs = square_target(family), ragged(7)
    cache = fresh_cache(target, inputs["input_ids"])
    before = [state.clone() for state in states_of(cache)]
    more = {"input_ids": torch.cat([inputs["input_ids"], prompt_of(4, seed=5)], dim=1), compat.CACHE: cache}
    method = dflash_hf.custom_generate(scripted(target, inputs, inputs["input_ids"], never, rows))
    handle = target.model.layers[2].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        target.generate(**more, **GREEDY, custom_generate=method)
    handle.remove()
    assert cache.get_seq_length() == 7
    assert all(torch.equal(a, b) for a, b in zip(states_of(cache), before, strict=True))
    full = plain(target, more["input_ids"], **GREEDY)
    assert torch.equal(target.generate(**more, **GREEDY, custom_generate=method), full)


def test_calls_in_several_threads_do_not_lose_each_others_hooks():
    target, expected = square_target("lfm2"), {}
    drafter = dflash_hf.attach(target, drafter_for(target, 5))
    for seed in range(4):
        expected[seed] = plain(target, prompt_of(6, seed=seed), **GREEDY).tolist()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(4) as pool:
            run = lambda seed: target.generate(prompt_of(6, seed=seed), **GREEDY, assistant_model=drafter)  # noqa: E731
            for seed, found in zip(list(range(4)) * 6, pool.map(run, list(range(4)) * 6), strict=True):
                assert found.tolist() == expected[seed]
    finally:
        sys.setswitchinterval(interval)
    hooks = [h for m in target.modules() for h in (*m._forward_hooks.values(), *m._forward_pre_hooks.values())]
    assert hooks
    dflash_hf.detach(target)
    hooks = [h for m in target.modules() for h in (*m._forward_hooks.values(), *m._forward_pre_hooks.values())]
    assert not hooks
