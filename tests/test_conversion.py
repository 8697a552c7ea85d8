"""Drafters in other layouts: what is written is read back, what is lost is said, and the report on a drafter."""

import json
from pathlib import Path

import pytest
import torch
from layouts import LOADED, write, zlab
from oracles import plain, prompt_of
from tiny import draft_inputs, sliding, tiny_drafter, tiny_target, write_folder
from typer.testing import CliRunner

import dflash_hf
from dflash_hf import DFlashDraftModel
from dflash_hf.checkpoints import zlab as zlab_layout
from dflash_hf.cli import app
from dflash_hf.conversion import convert, inspect


def load(folder) -> DFlashDraftModel:
    return DFlashDraftModel.from_pretrained(folder, dtype=torch.float32).eval()


def output(drafter: DFlashDraftModel) -> torch.Tensor:
    with torch.no_grad():
        return drafter(**draft_inputs(drafter.config, 9)).last_hidden_state


def raw_of(folder) -> dict:
    return json.loads((Path(folder) / "config.json").read_text())


PLAIN = ["zlab", "speculators", "muse", "dflash"]


@pytest.mark.parametrize("layout", PLAIN)
def test_a_drafter_in_another_layout_proposes_the_same(layout, tmp_path):
    source = write("z-lab, older", tmp_path / "source")
    assert convert(source, tmp_path / "out", layout, dtype=torch.float32) == []
    assert torch.equal(output(load(tmp_path / "out")), output(load(source)))


ROUND_TRIPS = {
    "zlab": ["z-lab, older", "z-lab, newer", "z-lab, biases", "z-lab DFlash 2", "Model-Optimizer"],
    "speculators": [
        "speculators",
        "speculators, shortlist",
        "speculators DSpark",
        "speculators DSpark, gated",
        "speculators DSpark, rnn",
        "speculators DFlash 2",
    ],
    "muse": ["transformers"],
}


@pytest.mark.parametrize(("layout", "name"), [(key, name) for key, names in ROUND_TRIPS.items() for name in names])
def test_convert_load_convert_is_the_identity(layout, name, tmp_path):
    source = write(name, tmp_path / "source")
    convert(source, tmp_path / "once", layout, dtype=torch.float32)
    convert(tmp_path / "once", tmp_path / "twice", layout, dtype=torch.float32)
    assert raw_of(tmp_path / "once") == raw_of(tmp_path / "twice")
    first, second = load(source), load(tmp_path / "twice")
    ours, theirs = ({**each.config.to_dict(), "_name_or_path": None} for each in (first, second))
    assert ours == theirs
    assert first.state_dict().keys() == second.state_dict().keys()
    assert all(torch.equal(tensor, second.state_dict()[key]) for key, tensor in first.state_dict().items())


def test_fields_that_servers_read(tmp_path):
    source = write("z-lab, newer", tmp_path / "source")
    convert(source, tmp_path / "zlab", "zlab")
    raw = raw_of(tmp_path / "zlab")
    assert raw["architectures"] == ["DFlashDraftModel"] and raw["model_type"] == "qwen3"
    assert raw["rope_theta"] == raw["rope_parameters"]["rope_theta"] == 1000000
    assert raw["block_size"] == raw["dflash_config"]["block_size"] == 4 and raw["use_sliding_window"]
    convert(source, tmp_path / "speculators", "speculators")
    raw = raw_of(tmp_path / "speculators")
    assert raw["aux_hidden_state_layer_ids"] == [2, 6] and "model_type" not in raw
    assert raw["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
    assert raw["transformer_layer_config"]["layer_types"] == ["sliding_attention", "full_attention"]


def test_a_shortlist_goes_with_the_rows_of_the_head(tmp_path):
    target = tiny_target()
    drafter = tiny_drafter(target, draft_vocab_size=16)
    drafter.draft_token_ids.copy_(torch.randperm(63, generator=torch.Generator().manual_seed(0))[:16].sort().values)
    drafter.save_pretrained(tmp_path / "source")
    with pytest.raises(ValueError, match="draft_vocab_size without the head's rows.*pass the target"):
        convert(tmp_path / "source", tmp_path / "out", "speculators")
    convert(tmp_path / "source", tmp_path / "out", "speculators", target=target)
    found = load(tmp_path / "out")
    assert torch.equal(found.draft_token_ids, drafter.draft_token_ids) and found.config.own_head
    head = target.get_output_embeddings().weight
    assert torch.equal(found.lm_head.weight, head[drafter.draft_token_ids])
    ids = prompt_of(6)
    expected = plain(target, ids, max_new_tokens=12, do_sample=False)
    counts = []
    for each in (drafter, found):
        method = dflash_hf.custom_generate(each)
        assert torch.equal(target.generate(ids, max_new_tokens=12, do_sample=False, custom_generate=method), expected)
        counts.append([record.accepted for record in each.last_statistics.rounds])
    assert counts[0] == counts[1]
    with pytest.raises(ValueError, match=r"zlab cannot say draft_vocab_size .*lossy=True"):
        convert(tmp_path / "source", tmp_path / "zlab", "zlab")
    assert not (tmp_path / "zlab").exists()
    assert convert(tmp_path / "source", tmp_path / "zlab", "zlab", lossy=True)[0].startswith("draft_vocab_size")
    assert load(tmp_path / "zlab").draft_token_ids is None


@pytest.mark.parametrize(
    ("fields", "layouts", "words"),
    [
        ({"qk_norm": False}, ["zlab", "speculators", "muse"], "qk_norm=False"),
        ({"sample_from_anchor": True}, ["zlab", "muse"], "sample_from_anchor=True"),
        ({"conditioning": "input"}, ["zlab", "speculators", "muse"], "conditioning='input'"),
        (
            {"drafting": "autoregressive", "sample_from_anchor": True, "causal_layers": [True] * 2},
            ["zlab", "speculators", "muse"],
            "drafting='autoregressive'",
        ),
        ({"target_layer_ids": [-1, 1]}, ["zlab", "muse"], "output of the embedding"),
        ({"causal_layers": [True, False]}, ["zlab", "speculators", "muse"], "causal_layers"),
        (sliding(5, causal=True), ["muse"], "causal_layers"),
        ({"proposal_head": "markov", "proposal_rank": 2}, ["zlab", "muse"], "proposal_head='markov'"),
        (
            {"proposal_head": "domino", "proposal_rank": 2, "domino_state_size": 2},
            ["zlab", "speculators", "muse"],
            "proposal_head='domino'",
        ),
        ({"own_embeddings": True}, ["zlab", "muse"], "own_embeddings=True"),
        ({"own_head": True}, ["zlab", "speculators", "muse"], "own_head=True"),
    ],
)
def test_what_a_layout_cannot_say_at_all_is_refused_by_name(fields, layouts, words, tmp_path):
    target = tiny_target()
    tiny_drafter(target, **fields).save_pretrained(tmp_path / "source")
    for layout in ("zlab", "speculators", "muse"):
        if layout in layouts:
            with pytest.raises(ValueError, match=f"{layout} cannot say") as error:
                convert(tmp_path / "source", tmp_path / layout, layout, lossy=True)
            assert words in str(error.value)
            assert not (tmp_path / layout).exists()
        else:
            convert(tmp_path / "source", tmp_path / layout, layout, target=target)
            found, source = load(tmp_path / layout), load(tmp_path / "source")
            assert torch.equal(output(found), output(source))
            assert all(torch.equal(found.state_dict()[name], tensor) for name, tensor in source.state_dict().items())
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_causality_that_is_not_the_rule_is_written(tmp_path):
    target = tiny_target()
    for causal in (True, False):
        tiny_drafter(target, **sliding(5, causal=causal)).save_pretrained(tmp_path / str(causal))
        for layout in ("zlab", "speculators"):
            folder = tmp_path / f"{causal} {layout}"
            convert(tmp_path / str(causal), folder, layout, target=target)
            assert load(folder).config.causal_layers == [causal] * 2
    tiny_drafter(target, causal_layers=[True] * 2).save_pretrained(tmp_path / "full")
    convert(tmp_path / "full", tmp_path / "full z-lab", "zlab", target=target)
    assert load(tmp_path / "full z-lab").config.causal_layers == [True] * 2


@pytest.mark.parametrize("layout", ["zlab", "speculators", "muse"])
def test_embeddings_that_may_be_scaled_are_lost_unless_the_target_is_known(layout, tmp_path):
    tiny_drafter(tiny_target()).save_pretrained(tmp_path / "source")
    with pytest.raises(ValueError, match="input_embeddings='module'"):
        convert(tmp_path / "source", tmp_path / "out", layout)
    assert convert(tmp_path / "source", tmp_path / "out", layout, target=tiny_target()) == []


def test_an_existing_folder_is_left_alone(tmp_path):
    source = write("z-lab, older", tmp_path / "source")
    (tmp_path / "out").mkdir()
    with pytest.raises(FileExistsError, match="exists"):
        convert(source, tmp_path / "out", "zlab")
    with pytest.raises(ValueError, match="layout='gguf': choose one of dflash, zlab"):
        convert(source, tmp_path / "new", "gguf")


def test_our_layout_is_driven_by_the_native_loop(tmp_path):
    target = tiny_target(num_hidden_layers=8, vocab_size=96)
    for name in ("z-lab, older", "speculators", "transformers"):
        convert(write(name, tmp_path / name), tmp_path / f"{name} ours", "dflash", dtype=torch.float32)
        drafter, ids = load(tmp_path / f"{name} ours"), prompt_of(6)
        options = {"max_new_tokens": 16, "do_sample": False}
        found = plain(target, ids, assistant_model=drafter, speculation_type="dflash", **options)
        assert torch.equal(found, plain(target, ids, **options))


# ------------------------------------------------------------------------------------------------------------- report
@pytest.mark.parametrize("name", LOADED)
def test_report_of_every_layout(name, tmp_path):
    report = inspect(write(name, tmp_path))
    json.dumps(report)
    _, tensors, proposals = LOADED[name]
    assert report["tensors"]["number"] + len(report["tensors"]["dropped"]) == tensors
    assert report["semantics"]["num_proposals"] == proposals
    assert report["geometry"]["hidden_size"] == 32
    if name.startswith("speculators"):
        assert report["normalised"]["target_layer_ids"] == [1, 5] and report["target"]["target_name"] == "some/target"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"dflash_config": {"mask_token_id": 90, "target_layer_ids": [1, 7]}}, "layer 7 is the target's last"),
        ({"num_target_layers": None}, "num_target_layers is not stated"),
        ({"layer_types": ["sliding_attention"] * 2, "sliding_window": 8}, "causality is not stated"),
        ({}, "the target is not named"),
    ],
)
def test_what_is_doubtful_is_said(fields, words, tmp_path):
    assert any(words in doubt for doubt in inspect(write_folder(tmp_path, *zlab(**fields)))["doubtful"])


@pytest.mark.parametrize("name", LOADED)
def test_report_of_a_pair_of_every_layout(name, tmp_path):
    target = tiny_target(num_hidden_layers=8, vocab_size=96)
    problems = inspect(write(name, tmp_path), target=target)["pairing"]
    assert not [problem for problem in problems if "target_name" not in problem]


def test_what_could_not_be_read_back_is_not_left_behind(tmp_path, monkeypatch):
    source = write("z-lab, older", tmp_path / "source")
    written = zlab_layout.write
    monkeypatch.setattr(zlab_layout, "write", lambda *a: (written(*a)[0], {"fc.weight": torch.zeros(2)}, [], []))
    with pytest.raises(ValueError, match="missing:"):
        convert(source, tmp_path / "out", "zlab")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_report_of_a_pair_says_what_would_fail(tmp_path):
    folder = write("z-lab, older", tmp_path)
    assert inspect(folder, target=tiny_target(num_hidden_layers=8, vocab_size=96))["pairing"] == []
    (problem,) = inspect(folder, target=tiny_target(num_hidden_layers=4, vocab_size=96))["pairing"]
    assert "taps layer 5, the target has layers 0 to 3" in problem


def test_report_and_conversion_in_the_shell(tmp_path):
    folder = write("speculators, shortlist", tmp_path / "source")
    run = CliRunner().invoke
    shown = run(app, ["inspect", str(folder)])
    assert shown.exit_code == 0 and "speculators" in shown.output and "draft_vocab_size" in shown.output
    found = run(app, ["inspect", str(folder), "--json"])
    assert json.loads(found.output) == json.loads(json.dumps(inspect(folder)))
    done = run(app, ["convert", str(folder), str(tmp_path / "out"), "--layout", "speculators"])
    assert done.exit_code == 0 and load(tmp_path / "out").config.draft_vocab_size == 40
    failed = run(app, ["convert", str(folder), str(tmp_path / "zlab"), "--layout", "zlab"])
    assert isinstance(failed.exception, ValueError) and "own_head=True" in str(failed.exception)
    lossy = tiny_drafter(tiny_target(), draft_vocab_size=16)
    lossy.save_pretrained(tmp_path / "short")
    done = run(app, ["convert", str(tmp_path / "short"), str(tmp_path / "z"), "--layout", "zlab", "--lossy"])
    assert done.exit_code == 0 and "draft_vocab_size" in done.output


def test_special_tokens_that_are_none_stay_none_in_the_class_of_transformers(tmp_path):
    convert(write("z-lab, older", tmp_path / "source"), tmp_path / "out", "muse")
    assert "pad_token_id" in raw_of(tmp_path / "out") and load(tmp_path / "out").config.pad_token_id is None
    report = inspect(tmp_path / "out")
    assert report["tensors"]["dtypes"] == ["F32"] and report["geometry"]["rope_parameters"]["rope_theta"] == 1000000
