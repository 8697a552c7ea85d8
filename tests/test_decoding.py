"""The loop: the target's own text in the predicted number of forwards, caches that hold what was committed, errors."""

import functools
import itertools
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from oracles import (
    FAMILIES,
    Force,
    at_positions,
    at_rate,
    at_slots,
    counting,
    drafter_for,
    echo_pair,
    hooks_of,
    naive_features,
    naive_greedy,
    naive_rounds,
    never,
    plain,
    predicted_forwards,
    prompt_of,
    script,
    square_target,
)
from transformers import (
    DynamicCache,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.cache_utils import DynamicLayer

import dflash_hf
from dflash_hf import cache as caches
from dflash_hf import compat
from dflash_hf.decoding import Decoding


def speculate(target, drafter, prompt, new, *, cap=None, streamer=None, verifier="block", **options):
    """A greedy call, unless `options` say otherwise."""
    method = dflash_hf.custom_generate(drafter, num_assistant_tokens=cap, streamer=streamer, verifier=verifier)
    return target.generate(prompt, custom_generate=method, **{"do_sample": False, "max_new_tokens": new, **options})


# --------------------------------------------------------------------------------------- greedy identity, forwards
FACTORS = {
    "block": [2, 4, 8, 16],
    "prompt": [1, 2, 5, 17, 200],
    "new": [1, 2, 7, 33],
    "drafter": ["random", "right", "wrong at slot 1", "wrong at slots 2 and 5"],
    "window": ["none, qwen3", "none, llama", "8", "longer than the text"],
    "attention": ["eager", "sdpa"],
}
TARGETS = {
    "none, qwen3": ("qwen3", {}),
    "none, llama": ("llama", {}),
    "8": ("mistral", {"sliding_window": 8}),
    "longer than the text": ("mistral", {"sliding_window": 400}),
}
MISTAKES = {"right": never, "wrong at slot 1": at_slots(1), "wrong at slots 2 and 5": at_slots(2, 5)}
GRID = list(itertools.product(*FACTORS.values()))


def all_pairs(grid: list[tuple], seed: int = 0) -> list[tuple]:
    """Cells of `grid` in which any two values of two factors meet at least once, picked greedily."""

    def pairs(cell):
        return set(itertools.combinations(enumerate(cell), 2))

    cells = random.Random(seed).sample(grid, len(grid))
    missing, chosen = set().union(*map(pairs, cells)), []
    while missing:
        chosen.append(max(cells, key=lambda cell: len(pairs(cell) & missing)))
        missing -= pairs(chosen[-1])
    return chosen


@functools.cache
def greedy_text(window: str, attention: str, prompt: int):
    """The target of a cell and the 33 tokens it writes after a prompt."""
    family, fields = TARGETS[window]
    target = square_target(family, attention=attention, **fields)
    ids = prompt_of(prompt)
    return target, ids, plain(target, ids, max_new_tokens=33, do_sample=False)


def check_cell(block, prompt, new, kind, window, attention):
    target, ids, full = greedy_text(window, attention, prompt)
    full = full[:, : prompt + new]
    drafter = drafter_for(target, block)
    if kind == "random":
        forwards = 1 + len(naive_rounds(target, drafter, full, prompt))
    else:
        script(drafter, target, full, MISTAKES[kind])
        forwards = predicted_forwards(prompt, new, block, MISTAKES[kind])
    with counting(target) as calls:
        text = speculate(target, drafter, ids, new)
    assert text.tolist() == full.tolist()
    assert len(calls) == forwards
    assert drafter.last_statistics.target_forwards == forwards
    assert drafter.last_statistics.new_tokens == new
    if prompt <= 5 and new <= 7:
        assert text.tolist() == naive_greedy(target, ids, new).tolist()


@pytest.mark.parametrize("cell", all_pairs(GRID), ids=str)
def test_greedy_text_and_number_of_forwards(cell):
    check_cell(*cell)


@pytest.mark.slow
@pytest.mark.parametrize("window", FACTORS["window"])
@pytest.mark.parametrize("block", FACTORS["block"])
def test_greedy_text_and_number_of_forwards_full_grid(block, window):
    for cell in GRID:
        if cell[0] == block and cell[4] == window:
            check_cell(*cell)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_of_every_family(family):
    # gpt_oss and gemma2 have no sdpa.
    target = square_target(family, attention="eager")
    ids = prompt_of(17)
    full = plain(target, ids, max_new_tokens=40, do_sample=False)
    assert len(set(full[0, 17:].tolist())) > 5
    for block in (4, 16):
        drafter = drafter_for(target, block)
        wrong = at_rate(0.2)
        script(drafter, target, full, wrong)
        with counting(target) as calls:
            assert speculate(target, drafter, ids, 40).tolist() == full.tolist()
        assert len(calls) == predicted_forwards(17, 40, block, wrong)


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.3, 0.6, 1.0])
def test_tau_follows_the_error_rate_of_the_drafter(rate):
    target, ids, full = greedy_text("none, qwen3", "sdpa", 17)
    drafter = drafter_for(target, 8)
    wrong = at_rate(rate)
    script(drafter, target, full, wrong)
    assert speculate(target, drafter, ids, 33).tolist() == full.tolist()
    statistics = drafter.last_statistics
    assert statistics.target_forwards == predicted_forwards(17, 33, 8, wrong)
    assert statistics.tau == pytest.approx(32 / (statistics.target_forwards - 1))


def test_echo_pair_needs_the_fewest_forwards():
    target, drafter = echo_pair(8)
    for new in (1, 2, 8, 9, 10, 17, 18):
        with counting(target) as calls:
            speculate(target, drafter, prompt_of(3), new)
        assert len(calls) == 1 + -(-(new - 1) // 8)


def test_processor_that_rejects_in_the_middle_of_blocks():
    target, drafter = echo_pair(8)
    options = {"max_new_tokens": 33, "do_sample": False, "logits_processor": LogitsProcessorList([Force()])}
    expected = plain(target, prompt_of(3), **options)
    assert {3, 7} == set(expected[0, 3:].tolist())
    assert speculate(target, drafter, prompt_of(3), 33, **options).tolist() == expected.tolist()
    # The drafter's proposals pass through the same processor, so they are all right.
    assert drafter.last_statistics.target_forwards == 5


@pytest.mark.parametrize("sliding", [None, 6], ids=["full drafter", "sliding drafter"])
@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_proposals_equal_those_of_a_drafter_without_caches(monkeypatch, family, sliding):
    target = square_target(family)
    fields = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": sliding} if sliding else {}
    drafter = drafter_for(target, 4, num_hidden_layers=2, **fields)
    proposed, draft = [], Decoding.draft

    def noting(self, width):
        proposals, q = draft(self, width)
        proposed.append(proposals[0].tolist())
        return proposals, q

    monkeypatch.setattr(Decoding, "draft", noting)
    full = speculate(target, drafter, prompt_of(11), 30)
    assert proposed == naive_rounds(target, drafter, full, 11)
    assert len({token for row in proposed for token in row}) > 5


def test_generated_text_may_hold_the_mask_token():
    target, ids, full = greedy_text("none, qwen3", "sdpa", 17)
    drafter = drafter_for(target, 4, mask_token_id=int(full[0, 20]))
    script(drafter, target, full)
    assert speculate(target, drafter, ids, 33).tolist() == full.tolist()


# --------------------------------------------------------------------------------------------- state after a round
@pytest.fixture
def spy(monkeypatch):
    """Calls `spy.after(decoding)` after every round and keeps the last `Decoding` in `spy.decoding`."""

    class Spy:
        decoding, rounds = None, 0

        def after(self, decoding):
            pass

    spy, round_, prefill = Spy(), Decoding.round, Decoding.prefill

    def note_prefill(self, *args):
        spy.decoding = self
        prefill(self, *args)

    def note_round(self, taps):
        round_(self, taps)
        spy.rounds += 1
        spy.after(self)

    monkeypatch.setattr(Decoding, "prefill", note_prefill)
    monkeypatch.setattr(Decoding, "round", note_round)
    return spy


def assert_holds(cache, reference, length, window=None):
    """Each layer of `cache` holds the first `length` entries of `reference`, or the last of them in a window."""
    assert len(cache.layers) == len(reference.layers)
    for layer, whole in zip(cache.layers, reference.layers, strict=True):
        assert layer.get_seq_length() == length
        kept = min(length, layer.sliding_window - 1) if layer.is_sliding else length
        assert layer.keys.shape[-2] == layer.values.shape[-2] == kept
        torch.testing.assert_close(layer.keys, whole.keys[..., length - kept : length, :], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(layer.values, whole.values[..., length - kept : length, :], atol=1e-4, rtol=1e-4)


@torch.no_grad()
def assert_caches_are_at_the_commit_point(decoding):
    """Both caches hold what a fresh pass over the committed tokens gives, and nothing of any block."""
    state, model, drafter = decoding.state, decoding.target.model, decoding.drafter
    length = state.target.length
    committed = state.texts.ids[:, :length]
    fresh = DynamicCache()
    model(committed, **{compat.CACHE: fresh})
    assert_holds(state.target.cache, fresh, length)

    features = naive_features(model, committed, drafter.config.target_layer_ids)
    pending = 0 if state.context is None else state.context.shape[1]
    covered = length - pending
    if pending:
        torch.testing.assert_close(state.context, features[:, covered:], atol=1e-4, rtol=1e-4)
        assert state.context_positions.tolist() == [list(range(covered, length))]
    if covered:
        fresh = DynamicCache()
        drafter(features.new_zeros(1, 1, drafter.config.hidden_size), features[:, :covered], cache=fresh)
        assert_holds(state.draft.cache, fresh, covered)
    else:
        assert state.draft.cache.get_seq_length() == 0
    assert state.anchor_position.item() == length


SLIDING_DRAFTER = {"num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 7}


@pytest.mark.parametrize("prompt", [1, 5, 21])
@pytest.mark.parametrize("block", [4, 16])
@pytest.mark.parametrize("family", ["qwen3", "mistral", "gemma3_text"])
def test_caches_after_every_round(spy, family, block, prompt):
    target = square_target(family)
    drafter = drafter_for(target, block, **(SLIDING_DRAFTER if family == "mistral" else {}))
    ids = prompt_of(prompt)
    full = plain(target, ids, max_new_tokens=25, do_sample=False)
    script(drafter, target, full, at_rate(0.3))

    def after(decoding):
        state = decoding.state
        assert state.target.length == state.texts.ids.shape[1] - 1
        assert state.anchor.item() == state.texts.ids[0, -1].item()
        assert_caches_are_at_the_commit_point(decoding)

    spy.after = after
    assert speculate(target, drafter, ids, 25).tolist() == full.tolist()
    assert spy.rounds == drafter.last_statistics.target_forwards - 1


def test_positions_given_to_both_models_have_no_gap_and_no_repeat():
    target, ids, full = greedy_text("none, qwen3", "sdpa", 17)
    drafter = drafter_for(target, 8)
    drafted, prompts = script(drafter, target, full, at_rate(0.3)), []
    drafter.register_forward_pre_hook(lambda m, args, kwargs: prompts.append(kwargs["position_ids"]), with_kwargs=True)
    with counting(target) as calls:
        speculate(target, drafter, ids, 33)
    assert prompts[0].tolist() == [list(range(17))]
    rounds = drafter.last_statistics.rounds
    anchors = list(itertools.accumulate((r.committed for r in rounds), initial=17))
    assert len({r.committed for r in rounds}) > 2
    assert calls[0]["input_ids"].shape == (1, 17)
    for call, anchor, record in zip(calls[1:], anchors, rounds, strict=False):
        assert call["position_ids"].tolist() == [list(range(anchor, anchor + record.proposed + 1))]
        assert call["input_ids"][0, 0] == full[0, anchor]
    shown = prompts[0][0].tolist()
    for positions, anchor in zip(drafted, anchors, strict=False):
        assert positions[0, -8:].tolist() == list(range(anchor, anchor + 8))
        shown += positions[0, :-8].tolist()
    assert shown == list(range(anchors[len(drafted) - 1]))


def test_drafter_gets_the_outputs_of_the_named_layers_of_the_whole_prompt():
    target = square_target()
    drafter = drafter_for(target, 4, target_layer_ids=[1, 0])
    seen = []
    drafter.fc.register_forward_pre_hook(lambda module, args: seen.append(args[0].clone()))
    ids = prompt_of(9)
    text = speculate(target, drafter, ids, 12)
    torch.testing.assert_close(seen[0], naive_features(target, ids, [1, 0]), atol=1e-5, rtol=1e-5)
    together = torch.cat(seen, dim=1)
    expected = naive_features(target, text, [1, 0])[:, : together.shape[1]]
    torch.testing.assert_close(together, expected, atol=1e-4, rtol=1e-4)
    assert together.shape[1] >= text.shape[1] - 3


def test_only_tapped_layers_are_kept():
    target = square_target(num_hidden_layers=5)
    drafter = drafter_for(target, 4, target_layer_ids=[0, 2])
    kept = []
    target.register_forward_hook(lambda *_: kept.append(sorted(dflash_hf.target._taps.get().states)))
    speculate(target, drafter, prompt_of(5), 8)
    assert kept and all(layers == [0, 2] for layers in kept)


def test_draft_window_bounds_the_draft_cache(spy):
    target = square_target()
    drafter = drafter_for(target, 4, layer_types=["sliding_attention"], sliding_window=16)
    sizes = []
    spy.after = lambda decoding: sizes.append(decoding.state.draft.cache.layers[0].keys.shape[-2])
    ids = prompt_of(200)
    assert speculate(target, drafter, ids, 20).tolist() == plain(target, ids, max_new_tokens=20).tolist()
    assert max(sizes) == 15


def test_returned_cache_serves_plain_generate():
    for family in ("qwen3", "mistral"):
        target = square_target(family)
        drafter = drafter_for(target, 8)
        ids = prompt_of(12)
        full = plain(target, ids, max_new_tokens=30, do_sample=False)
        script(drafter, target, full, at_rate(0.3))
        result = speculate(target, drafter, ids, 15, return_dict_in_generate=True)
        cache = result[compat.CACHE]
        assert cache.get_seq_length() == result.sequences.shape[1] - 1
        for layer in cache.layers:
            assert not layer.is_sliding or (layer.keys.shape[-2] == 7 and not layer.record_past)
        text = plain(target, result.sequences, **{compat.CACHE: cache}, max_new_tokens=15, do_sample=False)
        assert text.tolist() == full.tolist()


def test_a_round_waits_for_the_device_once(monkeypatch):
    target, ids, full = greedy_text("none, qwen3", "sdpa", 17)
    drafter = drafter_for(target, 8)
    script(drafter, target, full, at_rate(0.3))
    waits, prefill, package = [], Decoding.prefill, str(Path(dflash_hf.__file__).parent)
    # What is read of the options, once a call, comes before the first forward.
    monkeypatch.setattr(Decoding, "prefill", lambda self, taps: (waits.clear(), prefill(self, taps)))

    def waiting(name):
        wait = getattr(torch.Tensor, name)

        def noting(self, *args):
            if sys._getframe(1).f_code.co_filename.startswith(package):
                waits.append(name)
            return wait(self, *args)

        return noting

    for name in ("tolist", "item", "cpu", "__int__", "__bool__", "__float__", "__index__"):
        monkeypatch.setattr(torch.Tensor, name, waiting(name))
    assert speculate(target, drafter, ids, 33).tolist() == full.tolist()
    assert waits == ["tolist"] * drafter.last_statistics.target_forwards


# -------------------------------------------------------------------------------------------------------- failures
class Broken(Exception):
    """What the tests raise inside a call."""


class RaisingLayer:
    """Forward pre-hook that raises at its n-th call."""

    def __init__(self, n: int):
        self.left = n

    def __call__(self, *args):
        self.left -= 1
        if self.left == 0:
            raise Broken


class RaisingStreamer:
    def __init__(self, n: int):
        self.raise_ = RaisingLayer(n)

    def put(self, value):
        self.raise_()

    def end(self):
        pass


class RaisingCriterion(StoppingCriteria):
    def __init__(self, n: int):
        self.raise_ = RaisingLayer(n)

    def __call__(self, input_ids, scores, **kwargs):
        self.raise_()
        return torch.zeros(1, dtype=torch.bool)


@pytest.mark.parametrize("family", ["qwen3", "mistral"])
@pytest.mark.parametrize("place", ["target", "drafter", "streamer", "criterion", "processor"])
def test_failure_in_a_round_leaves_the_caches_at_the_commit_point(spy, family, place):
    target = square_target(family)
    drafter = drafter_for(target, 4, **SLIDING_DRAFTER)
    ids = prompt_of(12)
    full = plain(target, ids, max_new_tokens=30, do_sample=False)
    script(drafter, target, full, at_rate(0.3))
    options, hook = {}, None
    if place == "target":  # the caches of the first two layers are extended then
        hook = target.model.layers[2].register_forward_pre_hook(RaisingLayer(4))
    elif place == "drafter":
        hook = drafter.layers[1].register_forward_pre_hook(RaisingLayer(3))
    elif place == "streamer":
        options["streamer"] = RaisingStreamer(5)
    elif place == "criterion":
        options["stopping_criteria"] = StoppingCriteriaList([RaisingCriterion(8)])
    else:
        raising = RaisingLayer(14)
        options["logits_processor"] = LogitsProcessorList([lambda text, scores: raising() or scores])
    hooks = hooks_of(target)
    with pytest.raises(Broken):
        speculate(target, drafter, ids, 30, **options)
    assert hooks_of(target) == hooks
    assert spy.rounds >= 1
    if hook is not None:
        hook.remove()
    assert_caches_are_at_the_commit_point(spy.decoding)
    assert speculate(target, drafter, ids, 30).tolist() == full.tolist()


@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_failure_in_the_prompt_shows_the_error_itself(family, layer):
    target = square_target(family)
    drafter = drafter_for(target, 4)
    hook = target.model.layers[layer].register_forward_pre_hook(RaisingLayer(1))
    hooks = hooks_of(target)
    with pytest.raises(Broken):
        speculate(target, drafter, prompt_of(12), 9)
    hook.remove()
    assert hooks_of(target) == {key: n for key, n in hooks.items() if "pre_hooks" not in key}
    assert (
        speculate(target, drafter, prompt_of(12), 9).tolist()
        == plain(target, prompt_of(12), max_new_tokens=9).tolist()
    )


def test_failure_in_the_first_draft_shows_the_error_itself():
    target = square_target()
    drafter = drafter_for(target, 4, layer_types=["sliding_attention"], sliding_window=4)
    hook = drafter.register_forward_pre_hook(RaisingLayer(1))
    with pytest.raises(Broken):
        speculate(target, drafter, prompt_of(12), 9)
    hook.remove()
    assert (
        speculate(target, drafter, prompt_of(12), 9).tolist()
        == plain(target, prompt_of(12), max_new_tokens=9).tolist()
    )


# ------------------------------------------------------------------------------------------------ what a call leaves
@pytest.mark.parametrize("attached", [False, True])
def test_call_changes_nothing_that_outlives_it(attached):
    target = square_target()
    drafter = drafter_for(target, 4)
    options = {"max_new_tokens": 9, "do_sample": False}
    if attached:
        dflash_hf.attach(target, drafter)
        options["assistant_model"] = drafter
    else:
        options["custom_generate"] = dflash_hf.custom_generate(drafter)

    def everything():
        return {
            "target": target.config.to_dict(),
            "drafter": drafter.config.to_dict(),
            "generation": target.generation_config.to_dict(),
            "draft generation": drafter.generation_config.to_dict(),
            "hooks": hooks_of(target),
            "draft hooks": hooks_of(drafter),
            "training": [module.training for model in (target, drafter) for module in model.modules()],
            "attributes": (set(vars(target)), set(vars(drafter)), set(vars(target.model))),
            "random": torch.get_rng_state().tolist(),
            "gradients": torch.is_grad_enabled(),
        }

    before = everything()
    target.generate(prompt_of(5), **options)
    assert everything() == before
    assert drafter.last_statistics.new_tokens == 9


def test_call_keeps_no_gradient():
    target = square_target()
    result = speculate(target, drafter_for(target), prompt_of(5), 5, return_dict_in_generate=True, output_logits=True)
    assert not any(logits.requires_grad for logits in result.logits)


def test_import_leaves_plain_generate_untouched():
    code = """
import transformers
from transformers import GenerationMixin, PreTrainedModel, DynamicCache
from transformers.generation import utils
def look():
    classes = [dict(vars(c)) for c in (GenerationMixin, PreTrainedModel, DynamicCache)]
    return classes, dict(utils.GENERATION_MODES_MAPPING)
before = look()
import dflash_hf
assert look() == before
"""
    subprocess.run([sys.executable, "-c", code], check=True)


# -------------------------------------------------------------------------------------------------------- refusals
def filled_cache():
    cache = DynamicCache()
    cache.update(torch.zeros(1, 2, 5, 16), torch.zeros(1, 2, 5, 16), 0)
    return cache


class UnknownLayer(DynamicLayer):
    """A kind of cache layer that this library was not taught."""


def unknown_cache():
    cache = DynamicCache()
    cache.layers.append(UnknownLayer())
    return cache


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"num_beams": 2}, "num_beams"),
        ({"use_cache": False}, "use_cache"),
        ({"cache_implementation": "static"}, "cache_implementation"),
        ({compat.CACHE: unknown_cache}, "UnknownLayer"),
        ({compat.CACHE: filled_cache}, f"{compat.CACHE}: it holds 5 tokens, and the text has 5"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
@pytest.mark.parametrize("attached", [False, True])
def test_unsupported_option_is_refused_by_name_before_any_forward(attached, options, named):
    target = square_target(attention="eager")
    drafter = drafter_for(target)
    options = {key: value() if callable(value) else value for key, value in options.items()}
    if attached:
        dflash_hf.attach(target, drafter)
        way = {"assistant_model": drafter}
    else:
        way = {"custom_generate": dflash_hf.custom_generate(drafter)}
    with counting(target) as calls, pytest.raises(ValueError, match=named):
        target.generate(prompt_of(5), max_new_tokens=5, **way, **options)
    assert len(calls) == 0


@pytest.mark.parametrize("options", [{"verifier": "magic"}, {"cap": 0}], ids=["verifier", "num_assistant_tokens"])
def test_invalid_option_of_ours_is_refused_by_name(options):
    target = square_target()
    with counting(target) as calls, pytest.raises(ValueError, match=r"verifier='magic'|num_assistant_tokens=0"):
        speculate(target, drafter_for(target), prompt_of(5), 5, **options)
    assert len(calls) == 0


# ---------------------------------------------------------------------------------- the same as plain at the edges
def outcome(call):
    try:
        return call().tolist()
    except Exception as error:
        return type(error)


@pytest.mark.parametrize(
    ("ids", "options"),
    [
        (prompt_of(5), {"max_new_tokens": 0}),
        (prompt_of(5), {"max_length": 5}),
        (prompt_of(5), {"max_length": 3}),
        (prompt_of(5), {"max_length": 9, "max_new_tokens": None}),
        (prompt_of(5)[:, :0], {"max_new_tokens": 5}),
        (None, {"max_new_tokens": 5}),
        (prompt_of(20), {"max_new_tokens": 5}),
        (prompt_of(14), {"max_new_tokens": 10}),
    ],
    ids=[
        "no new token",
        "length of the prompt",
        "less than the prompt",
        "max_length",
        "empty",
        "none",
        "long",
        "beyond",
    ],
)
def test_edge_of_the_request_is_as_in_plain_generate(ids, options):
    target = square_target(max_position_embeddings=16)
    drafter = drafter_for(target)
    options = {"do_sample": False, **options}
    expected = outcome(lambda: plain(target, ids, **options))
    method = dflash_hf.custom_generate(drafter)
    assert outcome(lambda: target.generate(ids, custom_generate=method, **options)) == expected


def test_text_may_fill_the_positions_of_the_target():
    target, _ = echo_pair(8, max_position_embeddings=15)
    drafter = drafter_for(target, 8, target_layer_ids=[0])
    with counting(target) as calls:
        assert speculate(target, drafter, prompt_of(5), 10).shape == (1, 15)
    # The last token is never an input, right or proposed.
    assert max(int(call["position_ids"].max()) for call in calls[1:]) == 13


# ------------------------------------------------------------------------------------------------------ the cache room
def test_crop_works_layer_by_layer():
    cache = DynamicCache()
    for index, length in enumerate((6, 4)):
        states = torch.arange(length).float().view(1, 1, length, 1)
        cache.update(states, states, index)
    caches.crop_to(cache, 4)
    assert [layer.keys.flatten().tolist() for layer in cache.layers] == [[0, 1, 2, 3]] * 2


def test_mistakes_at_single_positions_cost_what_they_should():
    target, ids, full = greedy_text("8", "sdpa", 17)
    for positions in itertools.combinations((18, 19, 25, 30), 2):
        drafter = drafter_for(target, 8)
        wrong = at_positions(*positions)
        script(drafter, target, full, wrong)
        with counting(target) as calls:
            assert speculate(target, drafter, ids, 33).tolist() == full.tolist()
        assert len(calls) == predicted_forwards(17, 33, 8, wrong)


def test_a_block_larger_than_the_default_of_transformers_is_verified_whole():
    target = square_target()
    drafter = drafter_for(target, 32)
    speculate(target, drafter, prompt_of(5), 40)
    assert drafter.last_statistics.rounds[0].proposed == 31


def test_another_way_to_draft_is_refused_by_name():
    target = square_target()
    drafter = drafter_for(target, 4)
    with counting(target) as calls, pytest.raises(ValueError, match="prompt_lookup_num_tokens=3"):
        speculate(target, drafter, prompt_of(5), 5, prompt_lookup_num_tokens=3)
    assert not calls


def test_hidden_states_of_an_earlier_forward_are_never_taken_twice():
    target = square_target()
    adapter = dflash_hf.target.Target(target)
    with adapter.capture([1]) as taps:
        target(prompt_of(4))
        taps.concatenate([1])
        with pytest.raises(RuntimeError, match=r"layers \[1\]"):
            taps.concatenate([1])


def test_a_call_that_ends_first_leaves_the_hooks_of_another():
    target = square_target()
    adapter = dflash_hf.target.Target(target)
    outer = adapter.capture([1])
    with outer as taps:
        inner = adapter.capture([1])
        with inner:
            target(prompt_of(4))
        target(prompt_of(4))
        assert sorted(taps.states) == [1]
