"""Families of targets: text, forwards, the law of the proposals, and images."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from family_table import RATES, TARGETS, check, inputs_of
from oracles import (
    IMAGE,
    VISION_END,
    VISION_START,
    WRAPPED,
    at_rate,
    counting,
    drafter_for,
    plain,
    prompt_of,
    script,
    square_target,
)
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import DynamicIndexedLayer

import dflash_hf
from dflash_hf import compat
from dflash_hf.prompt import Prompt
from dflash_hf.proposal import ProposalHead
from dflash_hf.target import Target


GREEDY = {"max_new_tokens": 20, "do_sample": False}
SLOW = [pytest.param(rate, marks=() if rate == "0.7" else pytest.mark.slow) for rate in RATES]


@pytest.mark.parametrize("rate", SLOW)
@pytest.mark.parametrize("batch", [pytest.param(1, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize("length", [pytest.param("short", marks=pytest.mark.slow), "long"])
@pytest.mark.parametrize("family", TARGETS)
def test_text_is_that_of_plain_decoding_in_the_predicted_forwards(family, length, batch, rate, rows):
    check(family, "eager", length, batch, rate, rows)


@pytest.mark.parametrize("family", TARGETS)
def test_proposals_have_the_scale_and_the_cap_of_the_targets_logits(family):
    target = square_target(family, attention="eager")
    adapter = Target(target)
    head = ProposalHead(drafter_for(target), adapter)
    inputs = {"input_ids": prompt_of(6).clamp(max=50)}
    with torch.no_grad():
        hidden = target.base_model(**inputs).last_hidden_state
        torch.testing.assert_close(head.logits(hidden), target(**inputs).logits)


def test_families_with_a_scale_or_a_cap_are_among_those_tested():
    shaped = set()
    for family in TARGETS:
        adapter = Target(square_target(family, attention="eager"))
        some = torch.linspace(-5, 5, 64)
        if not torch.equal(adapter.shape_logits(some), some):
            shaped.add(family)
    assert shaped >= {"gemma2", "gemma3_text", "gemma4_text", "granite", "cohere2", "falcon_h1"}


# --------------------------------------------------------------------------------------------------------- embeddings
@pytest.mark.parametrize("family", ["gemma2", "gemma3_text"])
def test_slots_are_given_what_the_embedding_module_returns(family):
    target, ids = square_target(family, attention="eager"), prompt_of(5)
    drafter, given = drafter_for(target), []
    drafter.register_forward_pre_hook(lambda m, a, kwargs: given.append(kwargs["noise_embeds"]), with_kwargs=True)
    target.generate(ids, **GREEDY, custom_generate=dflash_hf.custom_generate(drafter))
    block = torch.full((1, 4), drafter.config.mask_token_id)
    block[0, 0] = plain(target, ids, **GREEDY)[0, 5]
    with torch.no_grad():
        states = target(block, output_hidden_states=True).hidden_states[0]
    first = next(each for each in given if each.shape[1])  # the calls before it take the context in
    assert torch.equal(first, states)
    assert not torch.allclose(states, target.get_input_embeddings().weight[block])  # it is scaled


def test_embeddings_can_be_rows_of_the_table_with_a_scale():
    target = square_target("gemma2", attention="eager")
    config = drafter_for(target, input_embeddings="table", input_embedding_scale=0.5).config
    ids, rows = prompt_of(5), target.get_input_embeddings().weight
    assert torch.equal(Target(target).embed(ids, config), rows[ids] * 0.5)
    assert torch.equal(Target(target).embed(ids), target.get_input_embeddings()(ids))


# ------------------------------------------------------------------------------------------------------------- images
def image_prompt(family: str, target, seed: int = 0) -> dict:
    """Two rows with one image each, the second shorter and padded."""
    generator = torch.Generator().manual_seed(seed)
    if family == "llava":
        around, images = ([], []), {"pixel_values": torch.randn(2, 3, 8, 8, generator=generator)}
    else:
        around = [VISION_START], [VISION_END]
        images = {
            "pixel_values": torch.randn(2 * 16, 3 * 2 * 4 * 4, generator=generator),
            "image_grid_thw": torch.tensor([[1, 4, 4], [1, 4, 4]]),
        }
    texts = [
        [*prompt_of(3, seed=1).clamp(max=50)[0].tolist(), *around[0], *[IMAGE] * 4, *around[1], 5, 9, 13],
        [7, *around[0], *[IMAGE] * 4, *around[1], 11, 3],
    ]
    columns = max(map(len, texts))
    ids = torch.tensor([[0] * (columns - len(text)) + text for text in texts])
    inputs = {"input_ids": ids, "attention_mask": (ids > 0).long(), **images}
    return inputs if family == "llava" else {**inputs, "mm_token_type_ids": (ids == IMAGE).long()}


def first_row(family: str, inputs: dict) -> dict:
    sizes = {"pixel_values": 1 if family == "llava" else 16}
    return {name: value[: sizes.get(name, 1)] for name, value in inputs.items()}


@pytest.mark.parametrize("as_dict", [False, True])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("family", WRAPPED)
def test_text_about_an_image_is_that_of_plain_decoding(family, batch, as_dict, rows):
    target = square_target(family, attention="eager")
    texts = []
    for seed in (0, 1):
        inputs = image_prompt(family, target, seed)
        inputs = inputs if batch == 2 else first_row(family, inputs)
        full = plain(target, **inputs, **GREEDY)
        drafter = drafter_for(target)
        offset = (1 - inputs["attention_mask"]).sum(1).tolist()
        script(drafter, target, full, at_rate(0.3), offset=offset, rows=rows)
        method = dflash_hf.custom_generate(drafter)
        with counting(target) as calls:
            found = target.generate(**inputs, **GREEDY, return_dict_in_generate=as_dict, custom_generate=method)
        # What is decoded is text, and the model is told so where it was told of the image.
        types = [call.get("mm_token_type_ids") for call in calls if call.get("pixel_values") is None]
        types = [each for each in types if each is not None and each.shape[1] < 6]
        assert bool(types) == ("mm_token_type_ids" in inputs) and not any(each.any() for each in types)
        assert torch.equal(found.sequences if as_dict else found, full)
        assert 3 < drafter.last_statistics.target_forwards < 20
        texts.append(full.tolist())
    assert texts[0] != texts[1]  # the image matters


@pytest.mark.parametrize("family", WRAPPED)
def test_a_prompt_with_an_image_in_parts_is_refused_by_name(family):
    target = square_target(family, attention="eager")
    method = dflash_hf.custom_generate(drafter_for(target))
    with pytest.raises(ValueError, match="prefill_chunk_size=4: a prompt with images or sound"):
        target.generate(**image_prompt(family, target), **GREEDY, prefill_chunk_size=4, custom_generate=method)


# -------------------------------------------------------------------------------------------------------- what is not
def test_a_layer_that_nobody_taught_us_is_refused_by_name_before_any_forward():
    target = square_target()
    kept = DynamicCache(config=target.config)
    kept.layers[1] = DynamicIndexedLayer()
    method = dflash_hf.custom_generate(drafter_for(target))
    with counting(target) as calls, pytest.raises(ValueError, match="DynamicIndexedLayer"):
        target.generate(prompt_of(5), **GREEDY, custom_generate=method, **{compat.CACHE: kept})
    assert not calls


def refused(target) -> str:
    """The message with which a target is refused, before any forward."""
    hidden = target.config.get_text_config().hidden_size
    method = dflash_hf.custom_generate(drafter_for(square_target(hidden_size=hidden), num_target_layers=None))
    with counting(target) as calls, pytest.raises(ValueError) as error:
        target.generate(prompt_of(5), **GREEDY, custom_generate=method)
    assert not calls
    return str(error.value)


def tiny(family: str, **fields):
    return AutoModelForCausalLM.from_config(
        AutoConfig.for_model(family, vocab_size=64, hidden_size=32, **fields)
    ).eval()


def test_targets_without_any_attention_are_refused_by_name():
    target = tiny("mamba2", num_hidden_layers=2, num_heads=4, head_dim=16, state_size=8, n_groups=1)
    assert "without any attention" in refused(target) or "cache_params" in refused(target)  # before 5.24


def test_families_that_do_not_go_on_from_a_cache_as_plain_decoding_does_are_refused_by_name():
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48, "num_hidden_layers": 3}
    jamba = tiny("jamba", **sizes, num_experts=1, mamba_d_state=4, attn_layer_period=2, attn_layer_offset=1)
    assert "model_type='jamba'" in refused(jamba)
    griffin = tiny("recurrent_gemma", **sizes, head_dim=8, lru_width=32, attention_window_size=8)
    assert "model_type='recurrent_gemma'" in refused(griffin)


def test_tokens_are_of_the_type_of_the_last_of_the_prompt():
    target = Target(square_target())
    kwargs = {compat.CACHE: DynamicCache(), "mm_token_type_ids": torch.ones(2, 3, dtype=torch.long)}
    prompt = Prompt(
        target, torch.ones(2, 3, dtype=torch.long), {**kwargs, "token_type_ids": torch.tensor([[0, 0, 1]] * 2)}
    )
    inputs = prompt.later_inputs(torch.ones(2, 1, dtype=torch.long), torch.ones(2, 1, dtype=torch.long), None, None)
    assert inputs["mm_token_type_ids"].tolist() == [[0]] * 2 and inputs["token_type_ids"].tolist() == [[1]] * 2
    with pytest.raises(ValueError, match="token_type_ids: the rows end with tokens of types"):
        Prompt(target, torch.ones(2, 3), {**kwargs, "token_type_ids": torch.tensor([[0, 0, 1], [0, 0, 0]])})


@pytest.mark.parametrize("family", WRAPPED)
def test_text_alone_may_be_run_in_parts_by_a_target_of_images(family, rows):
    target, inputs = square_target(family), inputs_of("long", 4)
    options = {**GREEDY, "prefill_chunk_size": 4}
    full = plain(target, **inputs, **options)
    drafter = drafter_for(target)
    script(drafter, target, full, at_rate(0.3), offset=(1 - inputs["attention_mask"]).sum(1).tolist(), rows=rows)
    found = target.generate(**inputs, **options, custom_generate=dflash_hf.custom_generate(drafter))
    assert torch.equal(found, full)


def test_the_page_of_targets_has_every_family_that_is_tested():
    page = (Path(dflash_hf.__file__).parents[1] / "docs" / "targets.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `") and line.count("|") == 7]
    named = {name.strip(" `") for row in rows for name in row.split(",")}
    assert named == set(TARGETS)
    assert inputs_of("long", 1)["input_ids"].shape[1] > 8 > inputs_of("short", 1)["input_ids"].shape[1]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"logits_scaling": 4.0}, lambda x: x / 4),
        ({"logits_scaling": 4.0, "model_type": "hyperclovax"}, lambda x: x * 4),
        ({"output_multiplier": 0.5, "final_logit_softcapping": 2.0}, lambda x: 2 * torch.tanh(0.5 * x / 2)),
    ],
)
def test_scales_of_other_families(fields, expected):
    adapter, some = Target(square_target()), torch.linspace(-5, 5, 9)
    adapter.text_config = SimpleNamespace(**{"model_type": "any", **fields})
    torch.testing.assert_close(adapter.shape_logits(some), expected(some))
