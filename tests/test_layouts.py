"""Every published layout: what it says of itself, that the weights mean the same in each, and what is refused."""

import copy
import itertools
import json
import random

import pytest
import torch
from layouts import HIDDEN, LOADED, NESTED, REFUSED, WORDS, write, zlab
from oracles import plain, prompt_of
from tiny import draft_inputs, tiny_target, write_folder, zlab_config

import dflash_hf
from dflash_hf import DFlashDraftModel


@pytest.fixture(scope="module")
def target():
    return tiny_target(num_hidden_layers=8, vocab_size=WORDS)


def load(folder) -> DFlashDraftModel:
    return DFlashDraftModel.from_pretrained(folder, dtype=torch.float32).eval()


def output(drafter: DFlashDraftModel) -> torch.Tensor:
    with torch.no_grad():
        return drafter(**draft_inputs(drafter.config, 9)).last_hidden_state


@pytest.mark.parametrize("name", LOADED)
def test_every_layout_loads_and_leaves_the_text_as_it_is(name, target, tmp_path):
    folder, (_, num_tensors, proposals) = write(name, tmp_path), LOADED[name]
    assert len(LOADED[name][0]()[1]) == num_tensors
    drafter = load(folder)
    assert drafter.config.num_proposals == proposals
    assert drafter.config.target_layer_ids == [1, 5] and drafter.config.mask_token_id == 90
    dflash_hf.attach(target, drafter)
    try:
        for options in ({"do_sample": False}, {"do_sample": True, "top_k": 1}):
            ids = prompt_of(6)
            expected = plain(target, ids, max_new_tokens=20, **options)
            assert torch.equal(target.generate(ids, assistant_model=drafter, max_new_tokens=20, **options), expected)
            assert drafter.last_statistics.rounds[0].proposed == proposals
        batch = {"input_ids": torch.cat([prompt_of(6), prompt_of(6, seed=3)])}
        expected = plain(target, **batch, max_new_tokens=9, do_sample=False)
        assert torch.equal(
            target.generate(**batch, assistant_model=drafter, max_new_tokens=9, do_sample=False), expected
        )
    finally:
        dflash_hf.detach(target)


@pytest.mark.parametrize("name", LOADED)
def test_every_layout_saves_in_ours_and_loads_again(name, tmp_path):
    drafter = load(write(name, tmp_path / "published"))
    drafter.save_pretrained(tmp_path / "ours")
    again = load(tmp_path / "ours")
    ours, theirs = again.config.to_dict(), drafter.config.to_dict()
    assert {**ours, "_name_or_path": None} == {**theirs, "_name_or_path": None}
    assert again.state_dict().keys() == drafter.state_dict().keys()
    assert all(torch.equal(value, drafter.state_dict()[key]) for key, value in again.state_dict().items())


SAME = ["z-lab, older", "speculators", "transformers"]


@pytest.mark.parametrize("name", SAME)
def test_the_same_weights_in_another_layout_propose_the_same(name, tmp_path):
    drafter, reference = load(write(name, tmp_path / "a")), load(write(SAME[0], tmp_path / "b"))
    assert torch.equal(output(drafter), output(reference))
    fields = ("block_size", "target_layer_ids", "mask_token_id", "sample_from_anchor", "layer_types", "causal_layers")
    for field in (*fields, "rope_parameters", "rms_norm_eps"):
        assert getattr(drafter.config, field) == getattr(reference.config, field), field


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_implemented_or_does_not_fit_is_refused_by_name(name, tmp_path):
    folder = write(name, tmp_path)
    with pytest.raises((ValueError, OSError)) as error:
        load(folder)
    message = str(error.value)
    assert str(tmp_path) in message and "\n" not in message
    for word in REFUSED[name][1]:
        assert word in message


def test_the_three_errors_of_a_bad_folder_are_distinct(target, tmp_path):
    messages = []
    for name in ("three taps for two layers", "gates"):
        with pytest.raises(ValueError) as error:
            load(write(name, tmp_path / name.replace(" ", "-")))
        messages.append(str(error.value))
    raw, tensors = zlab(dflash_config={**NESTED, "mask_token_id": WORDS})
    with pytest.raises(ValueError, match="mask_token_id: 96") as error:
        dflash_hf.attach(target, load(write_folder(tmp_path / "mask", raw, tensors)))
    assert len({*messages, str(error.value)}) == 3


# ------------------------------------------------------------------------------------------------------------- details
def test_ids_of_tapped_layers_of_speculators_count_from_the_embedding(tmp_path):
    from layouts import speculators

    raw, tensors = speculators(aux_hidden_state_layer_ids=[0, 8])
    assert load(write_folder(tmp_path, raw, tensors)).config.target_layer_ids == [-1, 7]


def test_a_shortlist_is_read_from_the_differences_of_the_ids(target, tmp_path):
    drafter = load(write("speculators, shortlist", tmp_path))
    ids = torch.arange(40) * 2 + 3
    assert torch.equal(drafter.draft_token_ids, ids)
    assert drafter.config.own_head and drafter.config.own_embeddings and drafter.lm_head.weight.shape == (40, HIDDEN)
    proposed, head = [], dflash_hf.proposal.ProposalHead(drafter, dflash_hf.target.Target(target))
    hidden = torch.randn(1, 3, HIDDEN, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = head.logits(hidden)
        assert torch.equal(logits, drafter.lm_head(hidden))
        proposed = head.greedy(logits)
    assert torch.equal(proposed, ids[logits.argmax(-1)])
    full = head.over_vocabulary(logits, WORDS)
    assert torch.equal(full[..., ids], logits) and full.isneginf().sum() == 3 * (WORDS - 40)


@pytest.mark.parametrize("name", ["speculators, shortlist", "DeepSpec DFlash"])
def test_own_embeddings_are_what_the_slots_are_given(name, target, tmp_path):
    drafter, given = load(write(name, tmp_path)), []
    drafter.register_forward_pre_hook(lambda m, a, kwargs: given.append(kwargs["noise_embeds"]), with_kwargs=True)
    target.generate(
        prompt_of(6), max_new_tokens=4, do_sample=False, custom_generate=dflash_hf.custom_generate(drafter)
    )
    first = next(each for each in given if each.shape[1])
    assert torch.equal(first[0, 1:], drafter.embed_tokens.weight[90].expand(3, -1))


@pytest.mark.parametrize(
    ("fields", "shifted"),
    [
        ({}, True),
        ({"shift_label": False}, False),
        ({"shift_label": True}, True),
        ({"sample_from_anchor": False}, False),
    ],
)
def test_slots_of_specforges_dspark_predict_the_next_token_unless_the_file_says_otherwise(fields, shifted, tmp_path):
    from layouts import specforge_dspark

    assert load(write_folder(tmp_path, *specforge_dspark(**fields))).config.sample_from_anchor == shifted


def test_what_speculators_leaves_out_is_the_default_of_its_class(tmp_path):
    from layouts import speculators

    raw, _ = speculators()
    inner = raw["transformer_layer_config"]
    for name in ("hidden_act", "rms_norm_eps", "attention_bias", "rope_parameters", "num_hidden_layers"):
        inner.pop(name)
    config = dflash_hf.checkpoints.config_from_dict(raw, "here")
    assert (config.hidden_act, config.rms_norm_eps, config.num_hidden_layers) == ("silu", 1e-6, 32)
    assert config.rope_parameters["rope_theta"] == 10000.0


def test_one_rope_for_each_kind_of_layer_is_that_of_the_drafters_layers(tmp_path):
    both = {
        "full_attention": {"rope_type": "default", "rope_theta": 5000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 7000.0},
    }
    raw = zlab_config(rope_theta=None, rope_parameters=both)
    assert dflash_hf.checkpoints.config_from_dict(raw, "here").rope_parameters["rope_theta"] == 5000.0
    mixed = {**raw, "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 4}
    with pytest.raises(ValueError, match="one RoPE for all layers"):
        dflash_hf.checkpoints.config_from_dict(mixed, "here")


def test_weights_in_shards_load_and_a_missing_shard_is_named(tmp_path):
    raw, tensors = zlab()
    folder = write_folder(tmp_path / "whole", raw, tensors)
    load(folder).save_pretrained(tmp_path / "shards", max_shard_size="10KB")
    assert torch.equal(output(load(tmp_path / "shards")), output(load(folder)))
    shard = sorted((tmp_path / "shards").glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(OSError, match=f"names {shard.name}, which is missing"):
        load(tmp_path / "shards")


def test_weights_are_never_read_from_a_pickle(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(zlab_config()))
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(OSError, match=r"pytorch_model\.bin, and weights are never read from pickles"):
        load(tmp_path)


def test_names_that_would_be_one_are_refused(tmp_path):
    raw, tensors = zlab()
    with pytest.raises(ValueError, match="are both fc.weight"):
        load(write_folder(tmp_path, raw, {**tensors, "model.fc.weight": tensors["fc.weight"].clone()}))


def test_every_layout_is_found_by_one_alone():
    from dflash_hf.checkpoints import LAYOUTS, flat, muse, refused, speculators

    ordered = (flat, muse, speculators, refused)  # what these recognise is not asked of the others
    for name, (make, *_) in itertools.chain(LOADED.items()):
        raw, _ = make()
        found = [layout for layout in LAYOUTS if layout.detect(raw)]
        assert len(found) == 1 or found[0] in ordered, name


# ------------------------------------------------------------------------------------------------------------ damage
_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
_NESTED = ("dflash_config", "transformer_layer_config")


def places_of(raw: dict) -> list[dict]:
    return [raw, *(raw[name] for name in _NESTED if isinstance(raw.get(name), dict))]


def spoil_field(draw: random.Random, raw: dict) -> str:
    """Give a field a value that no drafter can have; what was done."""
    wrong = {
        **{name: [-1, 0, "32", 10**9, [32], 3.5] for name in (*_SIZES, "head_dim", "vocab_size")},
        "block_size": [-4, 0, 1, "4", 10**9, 2.5, [4]],
        "mask_token_id": [-1, "90", [90], 1.5],
        "target_layer_ids": [[], [1, 1], [-2, 5], "1,5", [1, "5"], 5, {"1": 5}],
        "aux_hidden_state_layer_ids": [[], [2, 2], [-1, 6], "2,6", 6, [2.5, 6]],
        "rms_norm_eps": [-1e-6, "small", [1e-6]],
        "rope_theta": [0, -1.0, "1e6", [1e6]],
        "rope_parameters": ["default", [1], {"rope_type": "spiral", "rope_theta": 1e6}, {"rope_theta": -1}],
        "layer_types": [["full_attention"], ["full_attention"] * 3, ["other"] * 2, "full_attention", [1, 2]],
        "hidden_act": ["sillu", 5, ["silu"]],
        "sliding_window": [-3, 0, "4", 2.5],
        "num_target_layers": ["8", -1, 2, 3.5],
        "markov_rank": [-1, "4", 10**6, 2.5],
        "selector_rank": [-1, 0, "8", 9],
        "selector_top_k": [-1, 0, "4", 2.5],
        "conv_kernel_size": [0, -2, "2", 3],
        "conv_group_size": [0, 5, "16", 8],
        "emb_dim": [0, -6, "6", 7],
        "gru_hidden_dim": [0, -5, "5", 6],
        "draft_vocab_size": [-1, 0, "40", 41, 97],
        "architectures": ["DFlashDraftModel", ["Qwen3ForCausalLM"], [5], {"a": 1}],
        "dflash_config": ["none", [1], 5],
        "transformer_layer_config": ["none", [1], 5],
        "speculators_model_type": ["eagle3", 5, ["dflash"]],
        "sample_from_anchor": ["yes", 2, [True]],
    }
    optional = {"sliding_window": any("sliding_attention" in (p.get("layer_types") or ()) for p in places_of(raw))}
    if "num_anchors" in raw:  # DeepSpec's windows are the target's, and are not read
        optional = {"layer_types": False, "sliding_window": False}
    known = [(p, n) for p in places_of(raw) for n in p if n in wrong and optional.get(n, True) and p[n] is not None]
    place, name = draw.choice(sorted(known, key=lambda each: (each[1], len(each[0]))))
    value = draw.choice(wrong[name])
    place[name] = value
    return f"{name}={value!r}"


def remove_field(draw: random.Random, raw: dict) -> str:
    needed = ("block_size", "mask_token_id", "target_layer_ids", "aux_hidden_state_layer_ids", "emb_dim")
    geometry = () if "speculators_model_type" in raw or "muse" in raw.get("model_type", "") else _SIZES
    needed = ("encoder",) if "muse" in raw.get("model_type", "") else needed
    known = [(p, n) for p in places_of(raw) for n in p if n in (*needed, *geometry)]
    if not known:
        return spoil_field(draw, raw)
    place, name = draw.choice(sorted(known, key=lambda each: (each[1], len(each[0]))))
    del place[name]
    return f"without {name}"


def contradict(draw: random.Random, raw: dict) -> str:
    """Say something else at the top than in the nested part."""
    nested = raw.get("dflash_config")
    if not nested:
        return spoil_field(draw, raw)
    name = draw.choice(["block_size", "mask_token_id", "target_layer_ids"])
    value = {"block_size": 5, "mask_token_id": 91, "target_layer_ids": [2, 5]}[name]
    nested.setdefault(name, raw.get(name))
    raw[name] = value
    return f"{name} contradicts itself"


def spoil_tensor(draw: random.Random, tensors: dict) -> str:
    name = draw.choice(sorted(set(tensors) - {"t2d", "verifier_norm.weight"}))
    kind = draw.choice(["missing", "renamed", "longer", "one more axis", "integers", "another beside it"])
    tensor = tensors[name]
    if kind in ("missing", "renamed"):
        del tensors[name]
    if kind == "renamed":
        tensors[f"{name}_scale"] = tensor
    if kind == "longer":
        tensors[name] = torch.cat([tensor, tensor[:1]])
    if kind == "one more axis":
        tensors[name] = tensor.unsqueeze(0)
    if kind == "integers":
        tensors[name] = tensor.to(torch.int8) if tensor.is_floating_point() else tensor.float()
    if kind == "another beside it":
        tensors[f"layers.{draw.choice([2, 17])}.self_attn.q_proj.weight"] = torch.zeros(64, 32)
    return f"{name} {kind}"


def spoil_file(draw: random.Random, folder) -> str:
    kind = draw.choice(["cut", "header", "empty", "json", "gone"])
    file = folder / "model.safetensors"
    data = file.read_bytes()
    if kind == "cut":
        file.write_bytes(data[: draw.randint(1, len(data) - 1)])
    elif kind == "header":
        file.write_bytes(draw.randbytes(64) + data[64:])
    elif kind == "empty":
        file.write_bytes(b"")
    elif kind == "gone":
        file.unlink()
    else:
        config = folder / "config.json"
        config.write_text(config.read_text()[: draw.randint(0, 40)])
    return f"file: {kind}"


@pytest.mark.parametrize("seed", [pytest.param(i, marks=pytest.mark.slow if i >= 100 else ()) for i in range(500)])
def test_damaged_drafters_are_refused_in_one_line_and_nothing_is_loaded(seed, tmp_path, monkeypatch):
    draw = random.Random(seed)
    raw, tensors = copy.deepcopy(LOADED[draw.choice(sorted(LOADED))][0]())
    spoil = draw.choice([spoil_field, spoil_field, remove_field, contradict, spoil_tensor, spoil_tensor, spoil_file])
    done = spoil(draw, tensors if spoil is spoil_tensor else raw) if spoil is not spoil_file else None
    folder = write_folder(tmp_path, raw, {key: tensor.contiguous() for key, tensor in tensors.items()})
    done = done or spoil_file(draw, folder)
    monkeypatch.setattr(dflash_hf.checkpoints.Checkpoint, "load", lambda self: pytest.fail(f"{done}: it was loaded"))
    with pytest.raises((ValueError, OSError)) as error:
        load(folder)
    message = str(error.value)
    assert str(tmp_path) in message and "\n" not in message and len(message) < 900, done


# ---------------------------------------------------------------------------------------------- what went unseen once
@pytest.mark.parametrize("name", LOADED)
def test_slots_are_given_bare_rows_of_a_target_that_scales_its_embeddings(name, tmp_path):
    from oracles import square_target

    drafter = load(write(name, tmp_path))
    target = square_target("gemma3_text", hidden_size=32, vocab_size=WORDS, attention="eager")
    rows = target.get_input_embeddings().weight if drafter.embed_tokens is None else drafter.embed_tokens.weight
    found = dflash_hf.proposal.embed(drafter, dflash_hf.target.Target(target), torch.tensor([[7, 90]]))
    if name.startswith("DeepSpec") or drafter.embed_tokens is None:
        assert torch.equal(found, rows[torch.tensor([[7, 90]])])


def test_older_rope_beside_the_newer_must_agree():
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    raw = zlab_config(rope_parameters={"rope_type": "default", "rope_theta": 1000000}, rope_scaling=yarn)
    with pytest.raises(ValueError, match="rope_scaling=.*contradicts rope_parameters"):
        dflash_hf.checkpoints.config_from_dict(raw, "here")
    raw["rope_parameters"] = {**yarn, "rope_type": "yarn", "rope_theta": 1000000}
    del raw["rope_parameters"]["type"]
    assert dflash_hf.checkpoints.config_from_dict(raw, "here").rope_parameters["rope_type"] == "yarn"


def test_shortlist_that_contradicts_itself_is_refused(tmp_path):
    from layouts import speculators_reduced

    for change in ("negative", "other"):
        raw, tensors = speculators_reduced()
        if change == "negative":
            tensors["d2t"][0] = -5
        else:
            tensors["t2d"] = tensors["t2d"].roll(1)
        with pytest.raises(ValueError, match="d2t"):
            load(write_folder(tmp_path / change, raw, {k: v.contiguous() for k, v in tensors.items()}))


def test_domino_of_sglang_and_dspark_without_a_nested_part(tmp_path):
    from layouts import specforge_domino, specforge_dspark

    raw, tensors = specforge_domino()
    raw["architectures"] = ["DFlashDraftModel"]
    assert load(write_folder(tmp_path / "domino", raw, tensors)).config.proposal_head == "domino"
    raw, tensors = specforge_dspark()
    raw |= raw.pop("dflash_config")
    config = load(write_folder(tmp_path / "dspark", raw, tensors)).config
    assert (config.proposal_head, config.sample_from_anchor) == ("markov", True)


def test_slots_of_model_optimizers_dspark_predict_the_next_token(tmp_path):
    from layouts import modelopt_dspark

    raw, tensors = modelopt_dspark()
    del raw["dflash_config"]["shift_label"]
    assert load(write_folder(tmp_path, raw, tensors)).config.sample_from_anchor


def test_deepspec_has_only_full_layers_whatever_the_targets_configuration_says(tmp_path):
    from layouts import deepspec

    raw, tensors = deepspec("vanilla")
    raw |= {"layer_types": ["sliding_attention"] * 2, "sliding_window": 4, "is_causal": None}
    assert load(write_folder(tmp_path, raw, tensors)).config.layer_types == ["full_attention"] * 2


def test_layers_that_slide_by_number_alone_are_refused():
    raw = {**zlab_config(use_sliding_window=True, max_window_layers=1, sliding_window=4)}
    del raw["layer_types"]
    with pytest.raises(ValueError, match="max_window_layers=1 without layer_types"):
        dflash_hf.checkpoints.config_from_dict(raw, "here")


def test_dflash_2_is_bidirectional_unless_the_file_says_otherwise(tmp_path):
    from layouts import zlab_2

    raw, tensors = zlab_2()
    for stated, causal in ((None, False), (True, True), (False, False)):
        raw["is_causal"] = stated
        config = load(write_folder(tmp_path / str(stated), raw, tensors)).config
        assert config.causal_layers == [causal] * 2


def test_which_field_counts_where_two_could():
    from layouts import modelopt_dspark, speculators_dspark

    raw, _ = modelopt_dspark()
    raw["dflash_config"]["sample_from_anchor"] = False
    assert not dflash_hf.checkpoints.config_from_dict(raw, "here").sample_from_anchor
    raw, _ = speculators_dspark()
    del raw["sample_from_anchor"]
    assert dflash_hf.checkpoints.config_from_dict(raw, "here").sample_from_anchor
    raw["speculators_config"]["proposal_methods"][0]["speculative_tokens"] = 3
    assert not dflash_hf.checkpoints.config_from_dict(raw, "here").sample_from_anchor
    raw = zlab_config(dflash_config={**NESTED, "use_swa": True, "swa_window_size": 4}, sliding_window=9)
    assert dflash_hf.checkpoints.config_from_dict(raw, "here").sliding_window == 4


@pytest.mark.parametrize("methods", [{"a": 1}, [None], ["greedy"], [{"speculative_tokens": "2"}]])
def test_proposal_methods_of_another_kind_are_refused_by_name(methods):
    from layouts import speculators

    raw, _ = speculators(speculators_config={"proposal_methods": methods, "verifier": {}})
    with pytest.raises(ValueError, match="here/config.json: .*(proposal_methods|speculative_tokens)"):
        dflash_hf.checkpoints.config_from_dict(raw, "here")


def test_index_that_names_other_places_is_refused(tmp_path):
    load(write("z-lab, older", tmp_path / "whole")).save_pretrained(tmp_path / "shards", max_shard_size="10KB")
    index = tmp_path / "shards" / "model.safetensors.index.json"
    for value in ("../whole/model.safetensors", 5):
        content = json.loads(index.read_text())
        content["weight_map"]["fc.weight"] = value
        index.write_text(json.dumps(content))
        with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json: it cannot be read"):
            load(tmp_path / "shards")


def test_folder_that_is_not_there_is_said_to_be_missing(tmp_path):
    with pytest.raises(OSError, match="there is no such folder"):
        load(tmp_path / "nothing")
