"""Every example is short and runs, on tiny models."""

import json
import sys
from pathlib import Path

import pytest
import torch
from oracles import word_tokenizer
from tiny import tiny_drafter, tiny_target

from dflash_hf import DFlashDraftModel, cache, reference
from dflash_hf.drafting import Drafting
from dflash_hf.recurrent import RecurrentLayers
from dflash_hf.training import recipe


EXAMPLES = Path(__file__).parent.parent / "examples"
TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}"


def run(name: str, monkeypatch, *arguments: str) -> None:
    source = (EXAMPLES / name).read_text()
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    exec(compile(source, name, "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_is_at_most_sixty_lines(example):
    assert len(example.read_text().splitlines()) <= 60


@pytest.mark.parametrize("name", ["quickstart.py", "pipeline.py"])
def test_the_examples_of_use_run_on_a_tiny_pair(name, tmp_path, monkeypatch, capsys):
    target, tokenizer = tiny_target("llama"), word_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tiny_drafter(target).save_pretrained(tmp_path)
    monkeypatch.setattr(reference, "load_target", lambda dtype: (target.to(dtype), tokenizer))
    monkeypatch.setattr(reference, "drafter_folder", lambda: tmp_path)
    run(name, monkeypatch)
    assert "tau" in capsys.readouterr().out


def test_the_gpu_example_answers_trains_measures_and_writes_shards_at_toy_size(tmp_path, monkeypatch):
    target, tokenizer = tiny_target("llama", vocab_size=72, num_hidden_layers=9), word_tokenizer()
    tokenizer.chat_template = TEMPLATE
    target.to(torch.bfloat16).save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"<{i}> <{i + 1}> <{i + 2}>"}) + "\n" for i in range(5, 17)))
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text(prompts.read_text().splitlines(keepends=True)[0])
    options = [
        "--target",
        tmp_path / "target",
        "--prompts",
        prompts,
        "--held-out",
        held_out,
        "--output",
        tmp_path / "out",
    ]
    run("train_reference_gpu.py", monkeypatch, *map(str, options), "--minutes", "0.06", "--block-size", "4")
    drafter = DFlashDraftModel.from_pretrained(tmp_path / "out" / "drafter-shards", dtype="auto")
    assert drafter.dtype == torch.bfloat16 and drafter.config.block_size == 4
    (report,) = json.loads((tmp_path / "out" / "report.json").read_text())
    assert (
        report["prompts"] == 1
        and report["tau"]["dflash"] >= 1
        and set(report["tokens_per_second"]) >= {"plain", "dflash"}
    )


@pytest.mark.slow
def test_the_ablations_train_every_arm_and_go_on_after_a_kill(tmp_path, monkeypatch, capsys):
    target, tokenizer = tiny_target("llama", num_hidden_layers=9), word_tokenizer()
    tokenizer.chat_template = TEMPLATE
    monkeypatch.setattr(reference, "load_target", lambda dtype: (target.to(getattr(torch, dtype)), tokenizer))
    data, prompts = tmp_path / "data.jsonl", tmp_path / "prompts.jsonl"
    row = {"prompt_ids": [3, 4], "response_ids": [*range(5, reference.MASK_TOKEN_ID), *range(17, 30)]}
    data.write_text("".join(json.dumps(row) + "\n" for _ in range(4)))
    prompts.write_text(json.dumps({"prompt": "<5> <6>"}) + "\n")
    options = ["--data", data, "--prompts", prompts, "--output", tmp_path / "out", "--steps", "4"]
    run("ablations.py", monkeypatch, *map(str, options))
    done = json.loads((tmp_path / "out" / "data-4-steps.json").read_text())
    table = capsys.readouterr().out
    assert len(done) == table.count("paper:") and (tmp_path / "out" / "decay.png").is_file()
    monkeypatch.setattr(recipe, "train", None)  # nothing is left to train
    run("ablations.py", monkeypatch, *map(str, options))
    assert capsys.readouterr().out == table


def test_the_long_context_example_tunes_with_a_window_and_measures_each_length_at_toy_size(
    tmp_path, monkeypatch, capsys
):
    target, tokenizer = tiny_target("llama", vocab_size=72), word_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tiny_drafter(target).save_pretrained(tmp_path / "drafter")
    monkeypatch.setattr(reference, "load_target", lambda dtype: (target.to(getattr(torch, dtype)), tokenizer))
    data, prompts = tmp_path / "data.jsonl", tmp_path / "prompts.jsonl"
    turns = [{"role": "user", "content": "<5> <6> <7>"}, {"role": "assistant", "content": "<8> <9> <10> <11> <12>"}]
    data.write_text("".join(json.dumps({"messages": turns}) + "\n" for _ in range(32)))
    prompts.write_text(json.dumps({"prompt": "<5> <6>"}) + "\n")
    options = ["--drafter", tmp_path / "drafter", "--data", data, "--prompts", prompts, "--output", tmp_path / "out"]
    options += ["--minutes", "0.02", "--window", "16", "--lengths", "0", "24", "48"]
    run("long_context.py", monkeypatch, *map(str, options))
    tuned = DFlashDraftModel.from_pretrained(tmp_path / "out" / "drafter")
    assert tuned.config.sliding_window == 16 and set(tuned.config.layer_types) == {"sliding_attention"}
    rows = [json.loads(line)["messages"] for line in (tmp_path / "out" / "long.jsonl").read_text().splitlines()]
    assert len(rows) == 4 and all(len(row) == 12 for row in rows)  # of 24 conversations, 6 for 48 tokens
    assert capsys.readouterr().out.count(": tau ") == 3 * 3
    assert (tmp_path / "out" / "tau.png").is_file()


def test_batches_are_timed_at_toy_size(tmp_path, monkeypatch, capsys):
    target, tokenizer = tiny_target("llama"), word_tokenizer(pad_token="abcdef")
    tokenizer.chat_template = TEMPLATE
    tiny_drafter(target).save_pretrained(tmp_path / "drafter")
    monkeypatch.setattr(reference, "load_target", lambda dtype: (target.to(getattr(torch, dtype)), tokenizer))
    monkeypatch.setattr(reference, "drafter_folder", lambda: tmp_path / "drafter")
    monkeypatch.setattr(cache, "_move_right", cache._move_right)  # put back afterwards
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": " ".join(["<5>", "<6>"] * n)}) + "\n" for n in (1, 2, 3, 4)))
    options = ["--prompts", prompts, "--batch-sizes", "1", "4", "--num-prompts", "4", "--max-new-tokens", "12"]
    run("batches.py", monkeypatch, *map(str, options))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["batch 1", "batch 4"]
    assert all("tau 1.0" in line and "% moving rows" in line for line in lines)


def test_the_cost_of_recurrent_layers_is_told_at_toy_size(monkeypatch, capsys):
    for owner, name in ((Drafting, "propose"), (RecurrentLayers, "replay"), (RecurrentLayers, "save")):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # put back afterwards
    sizes = ["--hidden-size", "64", "--layers", "4", "--vocab-size", "80", "--prompt-length", "9"]
    run("hybrids.py", monkeypatch, *sizes, "--max-new-tokens", "12")
    first, *shares = capsys.readouterr().out.splitlines()
    assert "forwards for 12 tokens" in first
    assert [line.split(":")[0] for line in shares] == ["replay", "save"] and all("%" in line for line in shares)
