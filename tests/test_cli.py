"""The shell: what it prints, what it refuses in one line, and that every example runs."""

import json
import subprocess
import sys

import pytest
import torch
from oracles import word_tokenizer
from tiny import tiny_drafter, tiny_target
from typer.testing import CliRunner

from dflash_hf import DFlashDraftModel, cli, evaluation, reference


TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}"


@pytest.fixture
def pair(tmp_path, monkeypatch):
    """A tiny pair in the place of the embedded one."""
    target, tokenizer = tiny_target("llama"), word_tokenizer()
    target.config._name_or_path = f"/some/folder/{reference.NAME}"
    tokenizer.chat_template = TEMPLATE
    drafter = tmp_path / "drafter"
    tiny_drafter(target).save_pretrained(drafter)
    monkeypatch.setattr(
        reference, "load_target", lambda dtype=torch.float32: (target.to(getattr(torch, str(dtype), dtype)), tokenizer)
    )
    monkeypatch.setattr(reference, "drafter_folder", lambda: drafter)
    monkeypatch.setattr(reference, "is_ready", lambda: True)
    monkeypatch.setattr(cli.decode, "DEMO_PROMPTS", ("<5> <9> <11>", "<7> <3>"))
    return target, tokenizer


def invoke(*arguments: str):
    return CliRunner().invoke(cli.app, list(arguments), catch_exceptions=False)


def test_demo_shows_identity_forwards_and_speed(pair):
    result = invoke("demo", "--max-new-tokens", "8")
    assert result.exit_code == 0
    assert result.output.count("identical to plain generate; target forwards 8 without the drafter") == 2
    for word in ("float32", "bfloat16", "tokens/s", "prompt lookup", "Break-even", "overhead", "2 of 2 prompts"):
        assert word in result.output


def test_demo_fails_when_a_text_differs_by_more_than_a_tie(pair, monkeypatch):
    monkeypatch.setattr("dflash_hf.evaluation.first_difference", lambda *_: (3, 0.5))
    with pytest.raises(ValueError, match="2 answers differ from plain generate"):
        invoke("demo", "--max-new-tokens", "8")


def test_generate_prints_the_text_of_the_target(pair):
    target, tokenizer = pair
    result = invoke("generate", "<5> <9> <11>", "--dtype", "float32", "--max-new-tokens", "8")
    ids = tokenizer("<5> <9> <11>", return_tensors="pt").input_ids
    plain = type(target).generate(target, ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :]
    assert result.stdout.startswith(tokenizer.decode(plain, skip_special_tokens=True))
    assert "8 tokens in" in result.output
    assert "\x1b" not in result.stdout  # no colours where the output is no terminal


def test_generate_refuses_an_empty_prompt(pair):
    with pytest.raises(ValueError, match="prompt is empty"):
        invoke("generate", "  ")


def test_tokens_of_the_drafter_are_coloured_in_a_terminal(pair, monkeypatch):
    from rich.console import Console

    console = Console(force_terminal=True, color_system="standard", highlight=False, width=200)
    monkeypatch.setattr(cli.decode, "console", console)
    streamer = cli.decode.BlockStreamer(pair[1])
    with console.capture() as capture:
        streamer.put(torch.tensor([[1, 2]]))
        streamer.put(torch.tensor([5]))
        streamer.put(torch.tensor([6, 7]))
        streamer.end()
    text = capture.get()
    assert "<5>" in text.split("\x1b[32m")[0]
    assert "<6>" in text.split("\x1b[32m")[1].split("\x1b[0m")[0]
    assert "<7>" in text.rsplit("\x1b[0m", 1)[1]
    assert "<1>" not in text and "<2>" not in text


def test_evaluate_writes_its_figures_whole(pair, tmp_path):
    prompts = tmp_path / "set.jsonl"
    prompts.write_text("".join(json.dumps({"turns": [f"<{i}> <9>"]}) + "\n" for i in range(5, 9)))
    report = tmp_path / "report.json"
    result = invoke("evaluate", str(prompts), "--last", "2", "--max-new-tokens", "6", "--output", str(report))
    assert result.exit_code == 0
    figures = json.loads(report.read_text())
    assert figures["dtype"] == "bfloat16"
    assert figures["sets"][0]["prompts"] == 2
    assert figures["sets"][0]["new_tokens"] == dict.fromkeys(("plain", "dflash", "prompt lookup"), 12)
    assert list(tmp_path.glob(".*")) == []


def test_train_prints_where_the_drafter_is(pair, tmp_path):
    data = tmp_path / "data.jsonl"
    row = {"prompt_ids": [5, 6], "response_ids": list(range(7, 27)), "messages": []}
    data.write_text(json.dumps(row) + "\n")
    result = invoke(
        *("train", "--data", str(data), "--output_dir", str(tmp_path / "run"), "--block_size", "4"),
        *("--drafter_layers", "1", "--num_taps", "1", "--max_steps", "2", "--use_cpu", "--mask_token_id", "63"),
        *("--save_strategy", "no", "--disable_tqdm", "true", "--dataloader_pin_memory", "false"),
    )
    assert result.exit_code == 0
    folder = tmp_path / "run" / "drafter"
    assert "drafter" in result.output.replace("\n", "")
    assert DFlashDraftModel.from_pretrained(folder).config.target_name == reference.NAME


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        pytest.param(["generate", "hello", "--target", "nowhere/at-all"], ["nowhere/at-all"], marks=pytest.mark.slow),
        (["evaluate", "missing.jsonl"], ["missing.jsonl"]),
        pytest.param(
            ["train", "--data", "missing.jsonl", "--output_dir", "out", "--target", "nowhere"],
            ["nowhere"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_errors_are_one_line_and_a_status(arguments, words, tmp_path):
    command = [sys.executable, "-c", "from dflash_hf.cli import main; main()", *arguments]
    environment = {"HF_HUB_OFFLINE": "1", "PATH": "", "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert result.returncode == 1
    *others, last = result.stderr.strip().splitlines()
    assert last.startswith("dflash-hf: error: ")
    for word in words:
        assert word in last
    # Some libraries, if they are installed, complain while they are imported.
    assert not any(line.startswith(("Traceback", "dflash-hf", "  File")) for line in others)


def test_differences_are_told_with_their_gaps(pair, monkeypatch):
    gaps = iter([(3, 0.125), (7, 0.25)])
    monkeypatch.setattr(sys.modules[evaluation.compare.__module__], "first_difference", lambda *_: next(gaps))
    result = invoke("demo", "--max-new-tokens", "8")
    text = " ".join(result.output.split())
    assert "First difference: prompt 0 at new token 3, logit gap 1.25e-01; largest gap of the 2: 2.50e-01." in text
    assert "Text identical to plain: 0 of 2." in text


def test_an_accelerator_without_a_driver_is_not_used(monkeypatch):
    asked = []
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available: asked.append(check_available)
    )
    assert cli.shared.device() == torch.device("cpu")
    assert asked == [True]
