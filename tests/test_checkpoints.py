"""Published folders load with the settings their config.json states, or are refused in one line that says why."""

import json

import pytest
import torch
from safetensors.torch import load_file
from tiny import (
    draft_inputs,
    sliding,
    tiny_drafter,
    tiny_target,
    write_folder,
    zlab_config,
    zlab_tensors,
)

from dflash_hf import DFlashDraftModel, pairing
from dflash_hf.checkpoints import config_from_dict
from dflash_hf.target import Target


NESTED = {"mask_token_id": 90, "target_layer_ids": [1, 5]}
YARN = {"factor": 4.0, "original_max_position_embeddings": 128, "rope_type": "yarn", "beta_fast": 32.0}


def load(folder, **kwargs) -> DFlashDraftModel:
    return DFlashDraftModel.from_pretrained(folder, dtype=torch.float32, **kwargs).eval()


def output(model: DFlashDraftModel) -> torch.Tensor:
    with torch.no_grad():
        return model(**draft_inputs(model.config, 9)).last_hidden_state


def refusal(folder, **kwargs) -> str:
    """The message with which a folder is refused: an error that users may catch, in one line."""
    with pytest.raises((ValueError, OSError)) as error:
        load(folder, **kwargs)
    message = str(error.value)
    assert message and "\n" not in message
    return message


# -------------------------------------------------------------------------------------------------- what is loaded
def test_an_older_folder_loads_with_its_settings(tmp_path):
    tensors = zlab_tensors(zlab_config())
    assert len(tensors) == 25 and tensors["fc.weight"].shape == (32, 64)
    model = load(write_folder(tmp_path, zlab_config(), tensors))
    config = model.config
    assert (config.block_size, config.num_proposals, config.mask_token_id) == (4, 3, 90)
    assert (config.target_layer_ids, config.num_target_layers) == ([1, 5], 8)
    assert config.layer_types == ["full_attention"] * 2 and config.causal_layers == [False, False]
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 1000000}
    assert config.qk_norm and not config.attention_bias
    state = model.state_dict()
    assert state.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(state[name], tensor), name


def test_a_newer_folder_loads_with_its_settings(tmp_path):
    raw = zlab_config(
        block_size=None,
        num_target_layers=None,
        rope_theta=None,
        dflash_config={**NESTED, "block_size": 4, "num_target_layers": 8},
        rope_parameters={"rope_type": "default", "rope_theta": 1000000},
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=4,
        use_sliding_window=True,
    )
    config = load(write_folder(tmp_path, raw)).config
    assert (config.block_size, config.num_target_layers) == (4, 8)
    assert (config.layer_types, config.sliding_window) == (["sliding_attention", "full_attention"], 4)
    assert config.causal_layers == [True, False]
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 1000000}


def test_a_folder_with_biases_and_yarn_loads_with_its_settings(tmp_path):
    raw = zlab_config(model_type="gpt_oss", attention_bias=True, rope_scaling=YARN, rope_theta=150000)
    tensors = zlab_tensors(raw)
    assert len(tensors) == 33
    model = load(write_folder(tmp_path, raw, tensors))
    assert model.config.rope_parameters == {**YARN, "rope_theta": 150000}
    assert model.state_dict().keys() == tensors.keys()
    plain = load(write_folder(tmp_path / "plain", {**raw, "rope_scaling": None}, tensors))
    assert not torch.allclose(output(model), output(plain), atol=1e-4)


def test_a_folder_whose_layers_all_slide_by_the_nested_switch_is_bidirectional(tmp_path):
    raw = zlab_config(dflash_config={**NESTED, "use_swa": True, "swa_window_size": 4})
    model = load(write_folder(tmp_path, raw))
    assert model.config.layer_types == ["sliding_attention"] * 2
    assert (model.config.sliding_window, model.config.causal_layers) == (4, [False, False])
    assert not torch.allclose(output(model), output(load(write_folder(tmp_path / "full", zlab_config()))), atol=1e-4)


@pytest.mark.parametrize(
    ("stated", "causal"),
    [
        ({"is_causal": False}, [False, False]),
        ({"is_causal": True}, [True, True]),
        ({"dflash_config": {**NESTED, "causal": False}}, [False, False]),
        ({"dflash_config": {**NESTED, "causal": True}}, [True, True]),
        ({"is_causal": False, "dflash_config": {**NESTED, "causal": True}}, [False, False]),
        ({}, [True, False]),
    ],
)
def test_stated_causality_wins_over_that_of_the_layer_types(stated, causal):
    raw = zlab_config(layer_types=["sliding_attention", "full_attention"], sliding_window=4, **stated)
    assert config_from_dict(raw, "here").causal_layers == causal


SPELLINGS = {
    "block size on top": zlab_config(block_size=8),
    "block size nested": zlab_config(block_size=None, dflash_config={**NESTED, "block_size": 8}),
    "block size in both places": zlab_config(block_size=8, dflash_config={**NESTED, "block_size": 8}),
    "rope parameters": zlab_config(
        block_size=8, rope_theta=None, rope_parameters={"rope_type": "default", "rope_theta": 1000000}
    ),
    "rope theta in both places": zlab_config(block_size=8, rope_parameters={"rope_theta": 1000000}),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_of_the_same_settings_is_the_same_drafter(tmp_path, spelling):
    tensors = zlab_tensors(SPELLINGS["block size on top"])
    reference = load(write_folder(tmp_path / "reference", SPELLINGS["block size on top"], tensors))
    model = load(write_folder(tmp_path / "model", SPELLINGS[spelling], tensors))
    assert model.config.block_size == 8
    theirs, ours = model.config.to_dict(), reference.config.to_dict()
    assert {**theirs, "_name_or_path": None} == {**ours, "_name_or_path": None}
    assert torch.equal(output(model), output(reference))


def test_both_spellings_of_a_scaled_rope_are_the_same(tmp_path):
    old = zlab_config(rope_scaling={**{k: v for k, v in YARN.items() if k != "rope_type"}, "type": "yarn"})
    new = zlab_config(rope_theta=None, rope_parameters={**YARN, "rope_theta": 1000000})
    models = [load(write_folder(tmp_path / str(i), raw)) for i, raw in enumerate((old, new))]
    assert models[0].config.rope_parameters == models[1].config.rope_parameters
    assert torch.equal(output(models[0]), output(models[1]))


def test_a_prefix_of_the_tensor_names_is_dropped(tmp_path):
    tensors = zlab_tensors(zlab_config())
    plain = load(write_folder(tmp_path / "plain", zlab_config(), tensors))
    prefixed = load(write_folder(tmp_path / "model", zlab_config(), {f"model.{k}": v for k, v in tensors.items()}))
    assert torch.equal(output(plain), output(prefixed))


def test_a_published_folder_saves_in_our_layout_and_loads_again(tmp_path):
    raw = zlab_config(layer_types=["sliding_attention", "full_attention"], sliding_window=4, is_causal=False)
    model = load(write_folder(tmp_path / "published", raw))
    model.save_pretrained(tmp_path / "ours")
    saved = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert saved["model_type"] == "dflash" and saved["architectures"] == ["DFlashDraftModel"]
    assert load_file(tmp_path / "ours" / "model.safetensors").keys() == model.state_dict().keys()
    again = load(tmp_path / "ours")
    assert again.config.causal_layers == [False, False]
    assert torch.equal(output(model), output(again))


# ------------------------------------------------------------------------------------------------- what is refused
FLAT = {"model_type": "dflash", "block_size": 4, "mask_token_id": 1, "target_layer_ids": [1]}


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (zlab_config(dflash_config={"mask_token_id": 90}), ["target_layer_ids is missing"]),
        (zlab_config(dflash_config={"target_layer_ids": [1, 5]}), ["mask_token_id is missing"]),
        (zlab_config(block_size=None), ["block_size is missing"]),
        (zlab_config(num_hidden_layers=None), ["num_hidden_layers is missing"]),
        (zlab_config(rope_theta=None), ["rope_theta is missing"]),
        (zlab_config(block_size=16, dflash_config={**NESTED, "block_size": 8}), ["block_size", "16", "8"]),
        (zlab_config(target_layer_ids=[2, 5]), ["target_layer_ids", "[2, 5]", "[1, 5]"]),
        (zlab_config(rope_parameters={"rope_theta": 10000.0}), ["rope_theta", "1000000", "10000.0"]),
        (zlab_config(block_size="8"), ["block_size", "'8'"]),
        (zlab_config(hidden_act="sillu"), ["hidden_act", "'sillu'"]),
        (zlab_config(dflash_config={**NESTED, "target_layer_ids": [1, 8]}), ["target_layer_ids=[1, 8]", "8 layers"]),
        (zlab_config(architectures=["DFlash2DraftModel"]), ["conv_kernel_size is missing"]),
        (zlab_config(dflash_config={**NESTED, "conv_kernel_size": 2}), ["conv_kernel_size"]),
        (zlab_config(dflash_config={**NESTED, "projector_type": "domino"}), ["emb_dim is missing"]),
        (zlab_config(final_logit_softcapping=-30.0), ["final_logit_softcapping=-30.0", "more than 0"]),
        (zlab_config(draft_vocab_size=16), ["draft_vocab_size=16"]),
        (zlab_config(rope_scaling={"rope_type": "default", "partial_rotary_factor": 0.5}), ["partial_rotary_factor"]),
        (zlab_config(layer_types=["full_attention", "linear_attention"]), ["layer_types", "linear_attention"]),
        (zlab_config(architectures=["Qwen3ForCausalLM"], dflash_config=None), ["Qwen3ForCausalLM", "qwen3"]),
        ({"model_type": "dflash", "block_size": 4, "mask_token_id": 1}, ["target_layer_ids is missing"]),
        ({**FLAT, "causal_layer": [True]}, ["causal_layer", "does not know"]),
        (zlab_config(hidden_size=None, num_key_value_heads=None), ["hidden_size, num_key_value_heads is missing"]),
    ],
)
def test_settings_that_cannot_be_honoured_are_refused_by_name(tmp_path, raw, words):
    message = refusal(write_folder(tmp_path, raw, zlab_tensors(zlab_config())))
    assert str(tmp_path) in message
    for word in words:
        assert word in message


def test_neutral_values_of_unsupported_settings_are_accepted(tmp_path):
    neutral = {"projector_type": None, "output_multiplier": 1.0, "input_embedding_scale": 1.0}
    raw = zlab_config(dflash_config={**NESTED, **neutral})
    assert load(write_folder(tmp_path, raw)).config.block_size == 4


def test_features_of_another_width_are_refused_with_both_shapes(tmp_path):
    message = refusal(write_folder(tmp_path, zlab_config(), zlab_tensors(zlab_config(), num_taps=3)))
    assert "fc.weight [32, 96] instead of [32, 64]" in message
    assert "fuses 3 tapped layers, but target_layer_ids names 2" in message


def test_a_mask_beyond_the_embedding_is_refused_with_both_numbers(tmp_path):
    drafter = load(write_folder(tmp_path, zlab_config(dflash_config={**NESTED, "mask_token_id": 96})))
    target = Target(tiny_target(vocab_size=96, num_hidden_layers=8))
    with pytest.raises(ValueError, match="mask_token_id: 96, but the target's embedding has 96 rows"):
        pairing.check(target, drafter)


def test_an_unknown_tensor_is_refused_by_name(tmp_path):
    tensors = zlab_tensors(zlab_config()) | {"layers.0.self_attn.g_proj.weight": torch.zeros(4, 32)}
    assert "unexpected: layers.0.self_attn.g_proj.weight" in refusal(write_folder(tmp_path, zlab_config(), tensors))


@pytest.mark.parametrize("missing", ["hidden_norm.weight", "layers.1.self_attn.k_norm.weight"])
def test_a_missing_tensor_is_refused_by_name(tmp_path, missing):
    tensors = zlab_tensors(zlab_config())
    del tensors[missing]
    assert f"missing: {missing}" in refusal(write_folder(tmp_path, zlab_config(), tensors))


def test_a_missing_shortlist_is_refused(tmp_path):
    tiny_drafter(tiny_target(), draft_vocab_size=5).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["draft_token_ids"]
    raw = json.loads((tmp_path / "config.json").read_text())
    assert "missing: draft_token_ids" in refusal(write_folder(tmp_path, raw, tensors))


# ------------------------------------------------------------------------------------------------- damaged folders
@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path / "drafter", zlab_config())


@pytest.mark.parametrize("kept", [0, 5, 100, -1])
def test_truncated_weights_are_named_with_the_remedy(folder, kept):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    message = refusal(folder)
    assert str(folder) in message and "Copy or download" in message


def test_a_folder_without_weights_is_refused(folder):
    (folder / "model.safetensors").unlink()
    message = refusal(folder)
    assert "model.safetensors" in message and str(folder) in message


def test_pickled_weights_are_never_loaded(folder):
    (folder / "model.safetensors").unlink()
    torch.save(zlab_tensors(zlab_config()), folder / "pytorch_model.bin")
    assert "model.safetensors" in refusal(folder)
    assert "safetensors only" in refusal(folder, use_safetensors=False)


@pytest.mark.parametrize("content", [None, "{}", "{", "[1]", ""])
def test_a_folder_without_a_usable_configuration_is_refused(folder, content):
    path = folder / "config.json"
    path.unlink() if content is None else path.write_text(content)
    message = refusal(folder)
    assert str(folder) in message and ("config.json" in message or "configuration" in message)


def test_code_from_the_repository_never_runs(folder):
    (folder / "dflash.py").write_text("raise SystemExit('the code of the repository ran')\n")
    assert load(folder).config.block_size == 4
    assert "trust_remote_code" in refusal(folder, trust_remote_code=True)


# --------------------------------------------------------------------------------------------------------- pairing
@pytest.mark.parametrize(
    ("target", "drafter", "words"),
    [
        ({"hidden_size": 48}, {}, ["hidden_size", "32", "48"]),
        ({"num_hidden_layers": 2}, {"num_target_layers": None}, ["target_layer_ids", "layer 2", "0 to 1"]),
        ({"num_hidden_layers": 5}, {}, ["num_target_layers", "4", "5"]),
        ({"vocab_size": 63}, {}, ["mask_token_id", "63"]),
        ({"vocab_size": 60}, {"mask_token_id": 59, "draft_vocab_size": 61}, ["draft_token_ids", "60"]),
    ],
)
def test_a_drafter_of_another_target_is_refused_with_both_values(target, drafter, words):
    model = tiny_drafter(tiny_target(), **drafter)
    with pytest.raises(ValueError, match="not for this target") as error:
        pairing.check(Target(tiny_target(**target)), model)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("config", [{}, {"vocab_size": 72}, {"vocab_size": 60, "mask_token_id": 59}])
def test_another_padding_of_the_vocabulary_is_no_obstacle(config):
    target = tiny_target()
    pairing.check(Target(target), tiny_drafter(target, **config))


def test_layers_that_slide_load_from_our_own_layout(tmp_path):
    drafter = tiny_drafter(tiny_target(), **sliding(5, causal=False))
    drafter.save_pretrained(tmp_path)
    assert load(tmp_path).config.causal_layers == [False, False]
    assert torch.equal(output(load(tmp_path)), output(drafter))
