"""The drafter computes what transformers' own DFlash drafter computes, round by round, from a published folder."""

import pytest
import torch
from tiny import (
    draft_cache,
    draft_inputs,
    random_ids,
    sliding,
    tiny_drafter,
    tiny_target,
    write_folder,
    zlab_config,
    zlab_tensors,
)
from transformers import AutoModel, MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel
from transformers.cache_utils import DFlashCache

from dflash_hf import DFlashConfig, DFlashDraftModel, compat


ROUNDS = (7, 1, 4, 2)  # newly committed tokens before each draft
KINDS = {
    "full": {},
    "causal": {"causal_layers": [True, True]},
    "sliding causal": sliding(5, causal=True),
    "sliding bidirectional": sliding(5, causal=False),
    "mixed": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5},
}


@pytest.fixture(scope="module")
def target():
    return tiny_target()


# ------------------------------------------------------------------------------------- against transformers' drafter
def native_drafter(raw: dict, tensors: dict, implementation: str) -> MuseGlimmerAssistantModel:
    config = MuseGlimmerAssistantConfig(
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        num_hidden_layers=raw["num_hidden_layers"],
        num_attention_heads=raw["num_attention_heads"],
        num_key_value_heads=raw["num_key_value_heads"],
        head_dim=raw["head_dim"],
        rms_norm_eps=raw["rms_norm_eps"],
        rope_parameters={"rope_type": "default", "rope_theta": raw["rope_theta"]},
        max_position_embeddings=raw["max_position_embeddings"],
        layer_types=["full_attention"] * raw["num_hidden_layers"],
        block_size=raw["block_size"],
        mask_token_id=90,
        target_layer_ids=[1, 5],
        attn_implementation=implementation,
    )
    native = MuseGlimmerAssistantModel(config).eval()
    renamed = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    native.load_state_dict({renamed.get(name, name): tensor for name, tensor in tensors.items()})
    return native


@torch.no_grad()
def native_rounds(model, config, block_size: int) -> list[torch.Tensor]:
    """Draft as the native loop of transformers does: it announces the new tokens and crops the last block late."""
    cache, outputs, done = DFlashCache(config=model.config), [], 0
    for i, num_new in enumerate(ROUNDS):
        cache.set_previous_accepted_tokens(num_new)
        if i:
            cache.crop(-block_size)
        done += num_new
        outputs.append(
            model(
                **draft_inputs(config, num_new, seed=i),
                position_ids=torch.arange(done - num_new, done + block_size).unsqueeze(0),
                attention_mask=torch.ones(1, done + block_size, dtype=torch.long),
                **{compat.CACHE: cache},
            ).last_hidden_state
        )
    return outputs


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_draft_hidden_states_are_bit_equal_to_the_native_drafter(tmp_path, implementation):
    raw = zlab_config(rms_norm_eps=1e-5, rope_theta=500000)
    tensors = zlab_tensors(raw)
    folder = write_folder(tmp_path, raw, tensors)
    ours = DFlashDraftModel.from_pretrained(folder, attn_implementation=implementation, dtype=torch.float32).eval()
    native = native_drafter(raw, tensors, implementation)
    theirs = native_rounds(native, ours.config, raw["block_size"])
    for i, (a, b) in enumerate(zip(native_rounds(ours, ours.config, raw["block_size"]), theirs, strict=True)):
        assert torch.equal(a, b), f"round {i}: they differ by {(a - b).abs().max()}"


# --------------------------------------------------------------------------------------------- cache and positions
@pytest.mark.parametrize("kind", KINDS)
def test_drafting_with_a_cache_equals_drafting_from_the_whole_context(target, kind):
    drafter = tiny_drafter(target, **KINDS[kind])
    block_size, cache, context = drafter.config.block_size, draft_cache(drafter.config), []
    for i, num_new in enumerate(ROUNDS):
        inputs = draft_inputs(drafter.config, num_new, batch=2, seed=i)
        context.append(inputs["context_hidden_states"])
        with torch.no_grad():
            cached = drafter(**inputs, cache=cache).last_hidden_state
            whole = drafter(inputs["noise_embeds"], torch.cat(context, dim=1)).last_hidden_state
        cache.crop(-block_size)
        torch.testing.assert_close(cached, whole, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_default_positions_continue_after_the_cache(target, kind):
    drafter = tiny_drafter(target, **KINDS[kind])
    block_size, done = drafter.config.block_size, 0
    caches = [draft_cache(drafter.config) for _ in range(2)]
    for i, num_new in enumerate(ROUNDS):
        inputs = draft_inputs(drafter.config, num_new, seed=i)
        positions = torch.arange(done, done + num_new + block_size).unsqueeze(0)
        done += num_new
        with torch.no_grad():
            default = drafter(**inputs, cache=caches[0]).last_hidden_state
            stated = drafter(**inputs, cache=caches[1], position_ids=positions).last_hidden_state
        assert torch.equal(default, stated)
        for cache in caches:
            cache.crop(-block_size)


def test_the_distance_between_context_and_slots_matters(target):
    drafter = tiny_drafter(target)
    inputs = draft_inputs(drafter.config, 6)
    positions = torch.arange(10).unsqueeze(0)
    shifted = positions.clone()
    shifted[:, 6:] += 1
    with torch.no_grad():
        right = drafter(**inputs, position_ids=positions).last_hidden_state
        wrong = drafter(**inputs, position_ids=shifted).last_hidden_state
    assert (right - wrong).abs().max() > 1e-3


def test_the_cache_of_a_sliding_layer_is_bounded_by_the_window(target):
    window = 5
    drafter = tiny_drafter(
        target, layer_types=["sliding_attention", "full_attention"], sliding_window=window, num_hidden_layers=2
    )
    block_size, cache, done = drafter.config.block_size, draft_cache(drafter.config), 0
    for i in range(6):
        done += 3
        with torch.no_grad():
            drafter(**draft_inputs(drafter.config, 3, seed=i), cache=cache)
        assert cache.layers[0].keys.shape[-2] < window + 3 + block_size
        cache.crop(-block_size)
        assert cache.layers[0].keys.shape[-2] < window
        assert cache.layers[1].keys.shape[-2] == done == cache.get_seq_length()


def test_the_cache_is_taken_and_returned_under_both_of_its_names(target):
    drafter = tiny_drafter(target)
    inputs = draft_inputs(drafter.config, 5)
    cache, other = draft_cache(drafter.config), draft_cache(drafter.config)
    with torch.no_grad():
        output = drafter(**inputs, cache=cache)
        again = drafter(**inputs, past_key_values=other)
    assert output[compat.CACHE] is cache and again[compat.CACHE] is other
    assert cache.get_seq_length() == other.get_seq_length() == 5 + drafter.config.block_size


# --------------------------------------------------------------------------------------------------------- features
def test_every_committed_token_is_fused_once(target):
    drafter = tiny_drafter(target)
    rows = []
    drafter.fc.register_forward_hook(lambda module, args, output: rows.append(args[0].shape[1]))
    cache = draft_cache(drafter.config)
    for i, num_new in enumerate(ROUNDS):
        drafter(**draft_inputs(drafter.config, num_new, seed=i), cache=cache)
        cache.crop(-drafter.config.block_size)
    assert rows == list(ROUNDS)


def test_features_skip_the_input_norm_and_share_the_projections_of_the_block(target):
    drafter = tiny_drafter(target, num_hidden_layers=1)
    inputs = draft_inputs(drafter.config, 5)
    cache = draft_cache(drafter.config)
    drafter(**inputs, cache=cache, position_ids=torch.zeros(1, 9, dtype=torch.long))  # no rotation
    attention, norm = drafter.layers[0].self_attn, drafter.layers[0].input_layernorm
    source = torch.cat([drafter.fuse(inputs["context_hidden_states"]), norm(inputs["noise_embeds"])], dim=1)
    key = attention.k_norm(attention.k_proj(source).unflatten(-1, (-1, 8))).transpose(1, 2)
    value = attention.v_proj(source).unflatten(-1, (-1, 8)).transpose(1, 2)
    torch.testing.assert_close(cache.layers[0].keys, key, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(cache.layers[0].values, value, atol=1e-5, rtol=1e-5)


# -------------------------------------------------------------------------------------------------- who sees whom
def influence(drafter, num_context: int = 6) -> torch.Tensor:
    """`[changed, slot]`: whether perturbing a slot's embedding changes another slot's output; one layer at a time."""
    inputs = draft_inputs(drafter.config, num_context)
    block_size = drafter.config.block_size
    changed = torch.zeros(block_size, block_size, dtype=torch.bool)
    with torch.no_grad():
        before = drafter(**inputs).last_hidden_state[0]
        for j in range(block_size):
            noise = inputs["noise_embeds"].clone()
            noise[:, j] += torch.randn(noise.shape[-1], generator=torch.Generator().manual_seed(100 + j))
            after = drafter(noise, inputs["context_hidden_states"]).last_hidden_state[0]
            changed[j] = (after - before).abs().amax(-1) > 1e-6
    return changed


@pytest.mark.parametrize("kind", KINDS)
def test_a_slot_is_seen_by_the_slots_before_it_only_without_causality(target, kind):
    drafter = tiny_drafter(target, **KINDS[kind])
    everywhere = torch.ones(4, 4, dtype=torch.bool)
    expected = everywhere.triu() if all(drafter.config.causal_layers) else everywhere
    assert torch.equal(influence(drafter), expected)


def test_a_window_hides_slots_and_context_that_are_too_far(target):
    drafter = tiny_drafter(target, **sliding(2, causal=False, num_layers=1))
    near = (torch.arange(4).unsqueeze(0) - torch.arange(4).unsqueeze(1)).abs() < 2
    assert torch.equal(influence(drafter), near)
    inputs = draft_inputs(drafter.config, 6)
    other = inputs["context_hidden_states"].clone()
    other[:, :5] += 1.0
    with torch.no_grad():
        assert torch.equal(
            drafter(**inputs).last_hidden_state, drafter(inputs["noise_embeds"], other).last_hidden_state
        )
        other[:, 5] += 1.0
        changed = drafter(**inputs).last_hidden_state - drafter(inputs["noise_embeds"], other).last_hidden_state
    assert (changed[0].abs().amax(-1) > 1e-4).tolist() == [True, False, False, False]


def test_padded_context_is_invisible(target):
    drafter = tiny_drafter(target)
    inputs = draft_inputs(drafter.config, 5)
    pad = torch.full((1, 3, inputs["context_hidden_states"].shape[-1]), 3.0)
    mask = torch.tensor([[0] * 3 + [1] * (5 + 4)])
    positions = torch.tensor([[0] * 3 + list(range(9))])
    with torch.no_grad():
        padded = drafter(
            inputs["noise_embeds"],
            torch.cat([pad, inputs["context_hidden_states"]], dim=1),
            attention_mask=mask,
            position_ids=positions,
        )
        alone = drafter(**inputs)
    torch.testing.assert_close(padded.last_hidden_state, alone.last_hidden_state, atol=1e-5, rtol=1e-5)


# ---------------------------------------------------------------------------------------------------- what it holds
def test_a_drafter_without_head_norms_has_no_tensors_for_them(target):
    names = set(tiny_drafter(target, qk_norm=False).state_dict())
    assert not any("q_norm" in name or "k_norm" in name for name in names)
    assert len(names) == 9 * 2 + 3
    assert len(tiny_drafter(target).state_dict()) == 11 * 2 + 3


def test_a_drafter_owns_neither_embedding_nor_head(target):
    drafter = tiny_drafter(target)
    assert not any("embed" in name or "lm_head" in name for name in drafter.state_dict())


def test_generate_on_a_drafter_says_to_attach_it(target):
    with pytest.raises(ValueError, match=r"dflash_hf\.attach\(target, drafter\)"):
        tiny_drafter(target).generate(random_ids(1, 4))


# ------------------------------------------------------------------------------------------------ saving and loading
def test_saving_and_loading_keeps_every_tensor_and_nothing_else(target, tmp_path):
    drafter = tiny_drafter(target, **KINDS["mixed"])
    drafter.save_pretrained(tmp_path)
    loaded, info = DFlashDraftModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert loaded.state_dict().keys() == drafter.state_dict().keys()
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    inputs = draft_inputs(drafter.config, 6)
    with torch.no_grad():
        assert torch.equal(drafter(**inputs).last_hidden_state, loaded.eval()(**inputs).last_hidden_state)
    assert type(AutoModel.from_pretrained(tmp_path)) is DFlashDraftModel


def test_a_shortlist_survives_half_precision_as_integers(target, tmp_path):
    drafter = tiny_drafter(target, draft_vocab_size=5, vocab_size=200_000)
    shortlist = torch.tensor([3, 257, 40_961, 131_073, 199_999])  # bfloat16 holds none of the large ones
    drafter.draft_token_ids.copy_(shortlist)
    drafter.to(torch.bfloat16).save_pretrained(tmp_path)
    loaded = DFlashDraftModel.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert loaded.draft_token_ids.dtype == torch.int64
    assert torch.equal(loaded.draft_token_ids, shortlist)
    assert loaded.fc.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", ["bfloat16", torch.bfloat16])
def test_the_precision_is_that_which_was_asked_for(target, tmp_path, dtype):
    tiny_drafter(target).save_pretrained(tmp_path)
    loaded = DFlashDraftModel.from_pretrained(tmp_path, dtype=dtype)
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}


def test_the_default_precision_is_that_of_the_folder(target, tmp_path):
    tiny_drafter(target).to(torch.bfloat16).save_pretrained(tmp_path)
    assert DFlashDraftModel.from_pretrained(tmp_path, dtype="auto").dtype == torch.bfloat16


def test_an_unknown_precision_is_one_clear_line(target, tmp_path):
    tiny_drafter(target).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="dtype") as error:
        DFlashDraftModel.from_pretrained(tmp_path, dtype="float99")
    assert "\n" not in str(error.value).strip()


def test_a_configuration_may_be_given_to_from_pretrained(target, tmp_path):
    drafter = tiny_drafter(target)
    drafter.save_pretrained(tmp_path)
    config = DFlashConfig.from_pretrained(tmp_path)
    config.block_size = 2
    assert DFlashDraftModel.from_pretrained(tmp_path, config=config).config.block_size == 2
