"""`DFlashConfig` refuses what no drafter can be, starts from a target, and survives saving."""

import json

import pytest
from huggingface_hub.errors import StrictDataclassError
from tiny import tiny_target
from transformers import AutoConfig, AutoModel, LlamaConfig, Qwen2Config

from dflash_hf import DFlashConfig, DFlashDraftModel
from dflash_hf.configuration_dflash import default_target_layer_ids


SLIDING = ["sliding_attention"] * 5


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("block_size", "x"),
        ("block_size", None),
        ("mask_token_id", 1.5),
        ("target_layer_ids", [1, "2"]),
        ("causal_layers", "yes"),
        ("qk_norm", "yes"),
        ("layer_types", "full_attention"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_by_field(field, value):
    with pytest.raises(StrictDataclassError, match=field):
        DFlashConfig(**{field: value})


@pytest.mark.parametrize(
    ("field", "value", "others"),
    [
        ("block_size", 1, {}),
        ("mask_token_id", -1, {}),
        ("num_hidden_layers", 0, {}),
        ("hidden_act", "sillu", {}),
        ("target_layer_ids", [], {}),
        ("target_layer_ids", [-2, 2], {}),
        ("target_layer_ids", [], {"num_target_layers": 8}),
        ("target_layer_ids", [1, 2, 1], {}),
        ("target_layer_ids", [1, 8], {"num_target_layers": 8}),
        ("layer_types", ["full_attention"] * 4, {}),
        ("layer_types", ["full_attention"] * 4 + ["linear_attention"], {}),
        ("causal_layers", [True] * 4, {}),
        ("sliding_window", None, {"layer_types": SLIDING}),
        ("sliding_window", 0, {"layer_types": SLIDING}),
        ("num_key_value_heads", 3, {}),
        ("num_key_value_heads", 0, {}),
        ("draft_vocab_size", 0, {}),
        ("draft_vocab_size", 101, {"vocab_size": 100}),
    ],
)
def test_a_broken_rule_is_reported_with_field_and_value(field, value, others):
    with pytest.raises(ValueError) as error:
        DFlashConfig(**{field: value}, **others)
    assert f"{field}={value!r}" in str(error.value)
    assert "\n" not in str(error.value)


def test_values_at_the_border_of_the_rules_are_accepted():
    config = DFlashConfig(
        block_size=2,
        mask_token_id=0,
        num_hidden_layers=1,
        target_layer_ids=[7],
        num_target_layers=8,
        layer_types=["sliding_attention"],
        sliding_window=1,
        num_key_value_heads=32,
        draft_vocab_size=100,
        vocab_size=100,
    )
    assert config.num_proposals == 1


def test_sliding_layers_are_causal_and_full_layers_are_not_unless_told():
    kinds = ["sliding_attention", "full_attention"]
    config = DFlashConfig(num_hidden_layers=2, layer_types=kinds, sliding_window=4)
    assert config.causal_layers == [True, False]
    config = DFlashConfig(num_hidden_layers=2, layer_types=kinds, sliding_window=4, causal_layers=[False, True])
    assert config.causal_layers == [False, True]


def test_all_layers_are_full_and_bidirectional_by_default():
    config = DFlashConfig(num_hidden_layers=3)
    assert config.layer_types == ["full_attention"] * 3
    assert config.causal_layers == [False] * 3


@pytest.mark.parametrize(
    ("num_layers", "ids"),
    [
        (24, [1, 6, 11, 16, 21]),
        (28, [1, 7, 13, 19, 25]),
        (32, [1, 8, 15, 22, 29]),
        (36, [1, 9, 17, 25, 33]),
        (40, [1, 10, 19, 28, 37]),
        (48, [1, 12, 23, 34, 45]),
        (62, [1, 16, 30, 44, 59]),
        (64, [1, 16, 31, 46, 61]),
    ],
)
def test_default_taps_are_those_of_the_published_drafters(num_layers, ids):
    assert default_target_layer_ids(num_layers, 5) == ids
    config = DFlashConfig.from_target(LlamaConfig(num_hidden_layers=num_layers), mask_token_id=0)
    assert config.target_layer_ids == ids
    assert config.num_target_layers == num_layers


@pytest.mark.parametrize(("num_taps", "ids"), [(1, [18]), (3, [1, 17, 33]), (8, [1, 6, 10, 15, 19, 24, 28, 33])])
def test_default_taps_of_other_numbers(num_taps, ids):
    assert default_target_layer_ids(36, num_taps) == ids


@pytest.mark.parametrize("num_layers", [2, 4, 7])
def test_more_taps_than_layers_is_refused_with_the_number(num_layers):
    with pytest.raises(ValueError, match=f"num_taps=5: a target of {num_layers} layers"):
        DFlashConfig.from_target(LlamaConfig(num_hidden_layers=num_layers), mask_token_id=0)


def test_a_fresh_drafter_has_the_geometry_of_its_target():
    target = tiny_target("llama", rms_norm_eps=1e-5).config
    config = DFlashConfig.from_target(
        target, mask_token_id=63, num_hidden_layers=2, block_size=4, target_layer_ids=[2, 0], target_name="me/target"
    )
    for field in (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "rms_norm_eps",
        "max_position_embeddings",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
    ):
        assert getattr(config, field) == getattr(target, field), field
    assert (config.num_hidden_layers, config.num_target_layers) == (2, 4)
    assert (config.block_size, config.mask_token_id, config.target_layer_ids) == (4, 63, [2, 0])
    assert config.target_name == "me/target"


def test_geometry_that_the_target_leaves_unsaid_is_derived():
    target = Qwen2Config(hidden_size=32, num_attention_heads=4, num_key_value_heads=None, num_hidden_layers=4)
    config = DFlashConfig.from_target(target, mask_token_id=0, target_layer_ids=[1])
    assert (config.head_dim, config.num_key_value_heads) == (8, 4)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"rope_type": "default", "rope_theta": 5e5}, {"rope_type": "default", "rope_theta": 5e5}),
        (
            {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 1, 1]},
            {"rope_type": "default", "rope_theta": 1e6},
        ),
        (
            {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
            {"rope_type": "default", "rope_theta": 1e7},
        ),
        (
            {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
            {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
        ),
    ],
)
def test_the_drafter_rotates_at_the_base_of_its_target_but_never_in_three_dimensions_or_in_part(theirs, ours):
    config = DFlashConfig.from_target(LlamaConfig(rope_parameters=theirs), mask_token_id=0, target_layer_ids=[1])
    assert config.rope_parameters == ours


def test_a_field_given_to_from_target_wins_over_the_target():
    config = DFlashConfig.from_target(
        LlamaConfig(), mask_token_id=0, target_layer_ids=[1], intermediate_size=77, qk_norm=False
    )
    assert (config.intermediate_size, config.qk_norm) == (77, False)


def test_saving_and_loading_is_stable(tmp_path):
    config = DFlashConfig.from_target(
        tiny_target().config,
        mask_token_id=63,
        num_hidden_layers=2,
        block_size=4,
        target_layer_ids=[2, 1],
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=6,
        causal_layers=[False, True],
        draft_vocab_size=10,
        qk_norm=False,
    )
    config.save_pretrained(tmp_path / "1")
    loaded = DFlashConfig.from_pretrained(tmp_path / "1")
    assert loaded.to_dict() == config.to_dict()
    loaded.save_pretrained(tmp_path / "2")
    first, second = (json.loads((tmp_path / n / "config.json").read_text()) for n in "12")
    assert first == second
    assert first["model_type"] == "dflash"
    assert first["target_layer_ids"] == [2, 1]


def test_the_auto_classes_know_the_drafter(tmp_path):
    config = DFlashConfig.from_target(
        tiny_target().config, mask_token_id=63, num_hidden_layers=1, target_layer_ids=[1]
    )
    config.save_pretrained(tmp_path)
    assert type(AutoConfig.from_pretrained(tmp_path)) is DFlashConfig
    assert type(AutoModel.from_config(config)) is DFlashDraftModel


def test_a_nested_configuration_is_not_taken_for_a_flat_one():
    with pytest.raises(ValueError, match="dflash_config"):
        DFlashConfig(dflash_config={"mask_token_id": 3})


def test_activation_and_rope_of_full_layers_come_from_the_target():
    text = AutoConfig.for_model("gemma3_text", num_hidden_layers=8, hidden_size=32)
    config = DFlashConfig.from_target(text, mask_token_id=3, num_taps=2)
    assert config.hidden_act == text.hidden_activation == "gelu_pytorch_tanh"
    assert config.rope_parameters["rope_theta"] == text.rope_parameters["full_attention"]["rope_theta"] == 1_000_000


@pytest.mark.parametrize(("layers", "taps"), [(36, 0), (2, 2), (3, 2), (6, 5)])
def test_taps_that_a_target_cannot_have_are_refused(layers, taps):
    with pytest.raises(ValueError, match=f"num_taps={taps}.*{layers} layers"):
        default_target_layer_ids(layers, taps)
