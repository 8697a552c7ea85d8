"""From a file of answers to a drafter folder: what is refused, what is saved, and runs that are interrupted."""

import dataclasses
import errno
import json
import shlex
import shutil
import sys

import pytest
import torch
from oracles import plain, word_tokenizer
from tiny import random_ids, tiny_drafter, tiny_target, training_arguments
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint
from typer.testing import CliRunner

import dflash_hf
from dflash_hf import DFlashDraftModel, cli, masking
from dflash_hf.cli.training import _training_options
from dflash_hf.training import DFlashTrainer, DrafterArguments, recipe, show_mask
from dflash_hf.training import optimisation as optimisation_module
from dflash_hf.training import trainer as trainer_module
from dflash_hf.training.saving import save_drafter


WORDS, ROWS = 64, 72  # words of the tokenizer, and rows of the target's embedding
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}<3> {% else %}<4> {% endif %}{{ m.content }} <2> {% endfor %}"
    "{% if add_generation_prompt %}<4> {% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    """Uses 64 of the 72 rows of the target; pad is its end token, and it has no mask token."""
    return word_tokenizer(eos_token="<2>", pad_token="<2>", chat_template=TEMPLATE)


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch):
    """The curves of each evaluation take longer than everything else here."""
    monkeypatch.setattr(trainer_module, "plot_curves", lambda *_: None)


def words(ids) -> str:
    return " ".join(f"<{i}>" for i in ids)


def write_jsonl(path, rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def say(*turns):
    """A conversation: user and assistant in turn."""
    return {"messages": [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)]}


def texts(count: int = 7) -> list[dict]:
    """Conversations of different lengths."""
    return [
        say(words(random_ids(2, seed=i).tolist()), words(random_ids(5 + i, seed=i).tolist())) for i in range(count)
    ]


def recipe_arguments(tmp_path, rows=None, **fields) -> DrafterArguments:
    data = write_jsonl(tmp_path / "data.jsonl", texts() if rows is None else rows)
    defaults = {"drafter_layers": 1, "block_size": 4, "num_taps": 1, "target": "me/target"}
    return DrafterArguments(data=str(data), **{**defaults, **fields})


def run(tmp_path, tokenizer, arguments=None, target=None, **fields):
    if "resume_from_checkpoint" not in fields:
        shutil.rmtree(tmp_path / "out" / "drafter", ignore_errors=True)  # of another run of the test
    target = tiny_target(vocab_size=ROWS) if target is None else target
    arguments = arguments or recipe_arguments(tmp_path)
    return recipe.train(
        target, tokenizer, arguments, training_arguments(tmp_path / "out", **{"max_steps": 2, "seed": 5, **fields})
    )


# ------------------------------------------------------------------------------------------------------- what is saved
def test_a_drafter_that_loads_is_saved_with_how_it_came_to_be(tmp_path, tokenizer):
    fields = {"save_strategy": "steps", "save_steps": 1, "loss_decay": 3.0, "lr_scheduler_kwargs": {"num_cycles": 0.4}}
    arguments = recipe_arguments(tmp_path, num_eval_rows=1, conditioning="kv")
    folder, trainer = run(tmp_path, tokenizer, arguments, eval_strategy="epoch", hub_token="secret", **fields)
    assert "secret" not in (folder / "training.json").read_text()
    assert folder == tmp_path / "out" / "drafter"
    drafter = DFlashDraftModel.from_pretrained(folder)
    for name, tensor in trainer.model.state_dict().items():
        assert torch.equal(drafter.state_dict()[name], tensor), name
    config = drafter.config
    assert (config.block_size, config.mask_token_id, config.target_layer_ids) == (4, WORDS, [2])
    assert (config.target_name, config.qk_norm) == ("me/target", True)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["best", "checkpoint-1", "checkpoint-2", "drafter"]
    history = json.loads((folder / "training.json").read_text())
    command = shlex.split(history["command"])
    assert command[:2] == ["dflash-hf", "train"]
    again, training = _training_options(command[2:], "dflash-hf train")
    assert again == arguments
    for field in dataclasses.fields(training):
        if field.init and field.name != "hub_token":
            assert getattr(training, field.name) == getattr(trainer.args, field.name), field.name
    settings = history["settings"]
    assert (settings["block_size"], settings["loss_decay"], settings["target"]) == (4, 3.0, "me/target")
    assert "loss_base" not in settings, "what is at its default is left out"
    assert any("documents:  7" in line for line in history["data"])
    assert set(history["versions"]) == {"torch", "transformers"}
    assert [entry["step"] for entry in history["log"] if "loss" in entry] == [1, 2]
    assert {"accuracy_1", "accuracy_3", "ms_target"} < history["log"][0].keys()


def test_the_drafter_is_saved_in_the_dtype_of_its_target_and_trained_in_float32(tmp_path, tokenizer):
    folder, trainer = run(tmp_path, tokenizer, target=tiny_target(vocab_size=ROWS).to(torch.bfloat16))
    assert DFlashDraftModel.from_pretrained(folder, dtype="auto").dtype == torch.bfloat16
    assert trainer.model.dtype == torch.float32


def test_the_averaged_weights_are_what_is_saved(tmp_path, tokenizer):
    folder, trainer = run(tmp_path, tokenizer, ema_decay=0.5, learning_rate=1e-2)
    saved = dict(DFlashDraftModel.from_pretrained(folder).named_parameters())
    assert all(torch.equal(saved[name], average) for name, average in trainer.average.averages.items())
    own = dict(trainer.model.named_parameters())
    assert (saved["fc.weight"] - own["fc.weight"]).abs().max() > 1e-4


def test_the_curves_lie_beside_the_drafter(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(trainer_module, "is_matplotlib_available", lambda: True)
    monkeypatch.setattr(trainer_module, "plot_curves", lambda log, path: path.write_text("curves"))
    folder, _ = run(tmp_path, tokenizer, recipe_arguments(tmp_path, num_eval_rows=1), max_steps=1)
    assert (folder / "curves.png").read_text() == "curves"


def test_a_shortlist_of_the_data_is_saved_with_the_drafter(tmp_path, tokenizer):
    rows = [say("<9>", "<5> <6> <5>"), say("<9>", "<6> <5> <7>"), say("<9>", "<60> <6> <5>")]
    folder, _ = run(tmp_path, tokenizer, recipe_arguments(tmp_path, rows, draft_vocab_size=3), max_steps=1)
    assert DFlashDraftModel.from_pretrained(folder).draft_token_ids.tolist() == [2, 5, 6]


def test_a_llama_like_target_gives_a_drafter_without_head_norms(tmp_path, tokenizer):
    folder, _ = run(tmp_path, tokenizer, target=tiny_target("llama", vocab_size=ROWS), max_steps=1)
    assert not DFlashDraftModel.from_pretrained(folder).config.qk_norm


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {"causal_layers": [False], "conditioning": "kv", "drafting": "parallel", "sample_from_anchor": False}),
        ({"init_from": "random"}, {"qk_norm": True}),
        ({"sample_from_anchor": True}, {"sample_from_anchor": True, "drafting": "parallel"}),
        (
            {"sliding_window": 6},
            {"layer_types": ["sliding_attention"], "sliding_window": 6, "causal_layers": [False]},
        ),
        ({"drafting": "autoregressive"}, {"sample_from_anchor": True, "causal_layers": [True]}),
        (
            {"drafting": "autoregressive", "sliding_window": 6},
            {"causal_layers": [True], "layer_types": ["sliding_attention"]},
        ),
        ({"conditioning": "input"}, {"conditioning": "input", "target_layer_ids": [2]}),
        ({"conditioning": "none"}, {"conditioning": "input", "target_layer_ids": [-1]}),
        ({"pack": True}, {"block_size": 4}),
    ],
    ids=lambda value: " ".join(map(str, value.values())) if value else "default",
)
def test_each_kind_of_drafter_is_trained_measured_and_saved(tmp_path, tokenizer, fields, expected):
    arguments = recipe_arguments(tmp_path, num_eval_rows=1, **fields)
    folder, trainer = run(tmp_path, tokenizer, arguments, max_steps=1, eval_max_new_tokens=6, max_length=40)
    config = DFlashDraftModel.from_pretrained(folder).config
    for name, value in expected.items():
        assert getattr(config, name) == value, name
    measured = trainer.state.log_history[-1]
    assert measured["eval_tau"] >= 1 and measured["eval_loss"] > 0
    assert f"eval_accuracy_{config.num_proposals}" in measured


def test_packing_is_refused_for_a_target_that_carries_a_state_from_text_to_text(tmp_path, tokenizer):
    target = tiny_target(vocab_size=ROWS)
    target.config.layer_types = ["full_attention", "linear_attention"] * 2
    with pytest.raises(ValueError, match="pack=True: the target has layers of type 'linear_attention'"):
        run(tmp_path, tokenizer, recipe_arguments(tmp_path, pack=True), target=target)


def test_theta_and_yarn_of_the_target_survive_training_and_loading(tmp_path, tokenizer):
    yarn = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 128}
    target = tiny_target(vocab_size=ROWS, rope_parameters=yarn)
    folder, trainer = run(tmp_path, tokenizer, target=target, max_steps=1)
    drafter = DFlashDraftModel.from_pretrained(folder)
    assert yarn.items() <= drafter.config.rope_parameters.items()
    for rotary in (trainer.model.rotary_emb, drafter.rotary_emb):
        assert torch.equal(rotary.inv_freq, target.model.rotary_emb.inv_freq)
        assert rotary.attention_scaling == target.model.rotary_emb.attention_scaling != 1.0


# ------------------------------------------------------------------------------------------------------------ refusals
@pytest.mark.parametrize("mask", [2, -1, ROWS])
def test_a_mask_that_text_uses_or_that_is_no_row_is_refused(tmp_path, tokenizer, mask):
    with pytest.raises(ValueError, match=f"mask_token_id={mask}:"):
        run(tmp_path, tokenizer, recipe_arguments(tmp_path, mask_token_id=mask))


def test_without_a_free_row_the_mask_must_be_named(tmp_path, tokenizer):
    with pytest.raises(ValueError, match="no row is free.*--mask_token_id"):
        run(tmp_path, tokenizer, target=tiny_target(vocab_size=WORDS))


def test_checkpoints_of_another_training_are_never_overwritten(tmp_path, tokenizer):
    run(tmp_path, tokenizer, save_strategy="steps", save_steps=2)
    with pytest.raises(ValueError, match="already holds checkpoint-2.*resume_from_checkpoint last"):
        run(tmp_path, tokenizer)


def test_a_drafter_of_another_training_is_never_overwritten(tmp_path, tokenizer):
    folder, _ = run(tmp_path, tokenizer)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(ValueError, match="already holds a drafter"):
        recipe.train(
            tiny_target(vocab_size=ROWS), tokenizer, recipe_arguments(tmp_path), training_arguments(tmp_path / "out")
        )
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_run_that_is_resumed_elsewhere_keeps_its_own_best_drafter(tmp_path, tokenizer):
    fields = {"eval_strategy": "steps", "eval_steps": 1, "eval_max_new_tokens": 4, "save_strategy": "steps"}
    arguments = recipe_arguments(tmp_path, num_eval_rows=2)
    _, first = run(tmp_path, tokenizer, arguments, save_steps=1, **fields)
    first.state.log_history.append({"eval_tau": 99.0, "step": 2})
    checkpoint = tmp_path / "out" / "checkpoint-1"
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    state["log_history"].append({"eval_tau": 99.0, "step": 1})  # a τ that is never reached again
    (checkpoint / "trainer_state.json").write_text(json.dumps(state))
    (tmp_path / "other").mkdir()
    _, other = recipe.train(
        tiny_target(vocab_size=ROWS),
        tokenizer,
        arguments,
        training_arguments(tmp_path / "other", resume_from_checkpoint=str(checkpoint), max_steps=2, seed=5, **fields),
    )
    assert other.best_folder == tmp_path / "other" / "best" and other.best_folder.exists()


def test_a_mask_token_that_stands_in_the_data_is_refused_with_its_lines(tmp_path, tokenizer):
    rows = [*texts(2), {"prompt_ids": [5, 6], "response_ids": [7, 70, 8]}, *texts(1)]
    with pytest.raises(ValueError, match=r"mask_token_id=70: .*data\.jsonl, line 3 has this token \(1 lines"):
        run(tmp_path, tokenizer, recipe_arguments(tmp_path, rows, mask_token_id=70))


def test_rows_beyond_what_the_target_reads_are_refused(tmp_path, tokenizer):
    target = tiny_target(vocab_size=ROWS, max_position_embeddings=16)
    rows = [*texts(2), {"prompt_ids": [5] * 4, "response_ids": [6] * 13}]
    with pytest.raises(ValueError, match="max_length=3072: a row has 17 tokens, and the target reads 16"):
        run(tmp_path, tokenizer, recipe_arguments(tmp_path, rows), target=target, max_length=3072)
    run(tmp_path, tokenizer, recipe_arguments(tmp_path, rows), target=target, max_steps=1, max_length=16)


def test_packing_is_refused_where_the_target_s_attention_would_mix_the_texts(tmp_path, tokenizer):
    target = tiny_target(vocab_size=ROWS)
    target.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(ValueError, match="pack=True: .*'flash_attention_2' of the target"):
        run(tmp_path, tokenizer, recipe_arguments(tmp_path, pack=True), target=target)


def test_resuming_without_a_checkpoint_is_refused(tmp_path, tokenizer):
    with pytest.raises(ValueError, match="'last'.*holds no checkpoint"):
        run(tmp_path, tokenizer, resume_from_checkpoint="last")
    with pytest.raises(ValueError, match=r"no checkpoint: it has no trainer_state\.json"):
        run(tmp_path, tokenizer, resume_from_checkpoint=str(tmp_path))


def test_resuming_with_another_drafter_is_refused(tmp_path, tokenizer):
    run(tmp_path, tokenizer, save_strategy="steps", save_steps=2)
    other = recipe_arguments(tmp_path, block_size=5)
    with pytest.raises(ValueError, match="block_size is 4, the arguments say 5"):
        run(tmp_path, tokenizer, other, resume_from_checkpoint="last")


@pytest.mark.parametrize("count", [-1, 7, 8])
def test_eval_rows_leave_a_row_to_train_on(tmp_path, tokenizer, count):
    with pytest.raises(ValueError, match=f"num_eval_rows={count}: the data has 7 rows"):
        run(tmp_path, tokenizer, recipe_arguments(tmp_path, num_eval_rows=count))


# ----------------------------------------------------------------------------------------------------------- measuring
def test_eval_rows_are_measured_and_never_trained_on(tmp_path, tokenizer, monkeypatch):
    trained, measured = set(), set()
    losses = DFlashTrainer.losses

    def noting(self, model, batch):
        (trained if torch.is_grad_enabled() else measured).update(batch["document"].unique().tolist())
        return losses(self, model, batch)

    monkeypatch.setattr(DFlashTrainer, "losses", noting)
    arguments = recipe_arguments(tmp_path, num_eval_rows=2, num_eval_prompts=1)
    _, trainer = run(
        tmp_path, tokenizer, arguments, max_steps=6, eval_strategy="steps", eval_steps=3, eval_max_new_tokens=4
    )
    trained, measured = trained - {-1}, measured - {-1}
    assert trained | measured == set(range(7)) and len(trained) == 5 and len(measured) == 2
    log = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    assert [entry["step"] for entry in log] == [3, 6], "the last one serves as that at the end"
    again = trainer.evaluate()
    assert log[1] == {**log[1], **again}, "at the same anchors each time"
    assert log[0]["eval_loss"] != log[1]["eval_loss"]


@pytest.mark.parametrize("pack", [False, True])
def test_a_conversation_of_several_documents_is_all_trained_on_or_all_measured(tmp_path, pack):
    # A template that drops earlier answers makes a document of each turn.
    template = (
        "{% for m in messages %}{% if m['role'] == 'user' or loop.last %}{{ m['content'] }} {% endif %}{% endfor %}"
    )
    tokenizer = word_tokenizer(eos_token="<2>", pad_token="<2>", chat_template=template)
    rows = [say(*["<5> <6>", "<7> <8> <9>"] * 3)] * 6
    arguments = recipe_arguments(tmp_path, rows, num_eval_rows=2, pack=pack)
    _, trainer = run(tmp_path, tokenizer, arguments, max_steps=1, max_length=24, eval_max_new_tokens=2)
    sides = [{int(i) for row in rows for i in row["document"]} for rows in (trainer.train_dataset, trainer.eval_rows)]
    lines = [{trainer.train_dataset.lines[i] for i in side} for side in sides]
    assert sides[0] | sides[1] == set(range(18)) and not lines[0] & lines[1] and len(lines[1]) == 2
    assert len(trainer.eval_rows) == len(trainer.eval_prompts) == 6, "each document is measured"
    assert len(trainer.train_dataset) == (4 if pack else 12)


def test_a_row_without_a_prompt_is_measured_but_not_continued(tmp_path, tokenizer):
    rows = [{"prompt_ids": [], "response_ids": [5, 6, 7]}, {"prompt_ids": [3], "response_ids": [5, 6, 7]}]
    arguments = recipe_arguments(tmp_path, rows * 3, num_eval_rows=5)
    _, trainer = run(tmp_path, tokenizer, arguments, max_steps=1, eval_max_new_tokens=2)
    assert len(trainer.eval_rows) == 5 and trainer.state.log_history[-1]["eval_tau"] >= 1
    assert 2 <= len(trainer.eval_prompts) <= 3 and all(prompt.tolist() == [[3]] for prompt in trainer.eval_prompts)


def test_prompts_to_measure_on_are_those_of_the_eval_rows_or_of_a_file(tmp_path, tokenizer):
    arguments = recipe_arguments(tmp_path, num_eval_rows=3, num_eval_prompts=2)
    _, trainer = run(tmp_path, tokenizer, arguments, max_steps=1, eval_max_new_tokens=4)
    rendered = [
        tokenizer.apply_chat_template(row["messages"][:1], add_generation_prompt=True, return_dict=False)
        for row in texts()
    ]
    measured = [int(row["document"][0]) for row in trainer.eval_rows]
    assert [prompt.tolist() for prompt in trainer.eval_prompts] == [[rendered[i]] for i in measured[-2:]]
    prompts = write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": f"<{i}>"} for i in (11, 12, 13)])
    arguments = recipe_arguments(tmp_path, eval_prompts=str(prompts), num_eval_prompts=2)
    _, trainer = run(tmp_path, tokenizer, arguments, max_steps=1, eval_max_new_tokens=4)
    assert [prompt.tolist() for prompt in trainer.eval_prompts] == [[[3, 12, 2, 4]], [[3, 13, 2, 4]]]
    with pytest.raises(ValueError, match="num_eval_prompts=0: at least 1"):
        run(tmp_path, tokenizer, recipe_arguments(tmp_path, num_eval_prompts=0))


# ---------------------------------------------------------------------------------------------------- interrupted runs
class Crash(RuntimeError):
    pass


class CrashAt(TrainerCallback):
    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise Crash


STEPS = {"save_strategy": "steps", "save_steps": 6, "max_steps": 10, "learning_rate": 1e-2}


@pytest.mark.parametrize(
    ("fields", "keep_features"),
    [
        ({}, False),
        ({"ema_decay": 0.9, "muon": True}, False),
        ({"gradient_accumulation_steps": 2, "loss": "kl", "loss_weights": "d-pace"}, True),
    ],
    ids=["plain", "muon and average", "accumulated, kept features"],
)
def test_a_run_resumed_inside_an_epoch_ends_where_the_unbroken_one_ends(
    tmp_path, tokenizer, monkeypatch, fields, keep_features
):
    """Seven rows in batches of two: step 6 is in the second epoch, or with accumulation in the third."""

    def train(name, **more):
        (tmp_path / name).mkdir(exist_ok=True)
        kept = {"features": str(tmp_path / name / "features")} if keep_features else {}
        arguments = recipe_arguments(tmp_path / name, init_from="random", **kept)
        return run(tmp_path / name, tokenizer, arguments, **STEPS, **fields, **more)

    folder, straight = train("whole")
    original = Trainer.train
    monkeypatch.setattr(Trainer, "train", lambda self, **kw: (self.add_callback(CrashAt(7)), original(self, **kw))[1])
    with pytest.raises(Crash):
        train("broken")
    monkeypatch.undo()
    again, trainer = train("broken", resume_from_checkpoint="last")
    whole, resumed = (DFlashDraftModel.from_pretrained(path).state_dict() for path in (folder, again))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    if "ema_decay" in fields:
        assert trainer.average.updates == straight.average.updates == 10
        assert all(
            torch.equal(p, q) for p, q in zip(straight.model.parameters(), trainer.model.parameters(), strict=True)
        )
        assert not torch.equal(whole["fc.weight"], trainer.model.fc.weight)
    losses = [[entry["loss"] for entry in t.state.log_history if "loss" in entry] for t in (straight, trainer)]
    assert losses[0] == losses[1] and len(losses[0]) == 10


def test_the_attention_implementation_of_the_arguments_holds_after_a_resume(tmp_path, tokenizer):
    arguments = recipe_arguments(tmp_path, attn_implementation="eager")
    _, trainer = run(tmp_path, tokenizer, arguments, save_strategy="steps", save_steps=1)
    assert trainer.model.config._attn_implementation == "eager"
    _, trainer = run(tmp_path, tokenizer, arguments, max_steps=3, resume_from_checkpoint="last")
    assert trainer.model.config._attn_implementation == "eager" and trainer.state.global_step == 3


def fail_in(monkeypatch, owner, name: str, error: Exception, *, before: bool) -> None:
    """The second call of `owner.name` fails, before or after it has done its work."""
    original, calls = getattr(owner, name), []

    def failing(*args, **kwargs):
        calls.append(name)
        if len(calls) == 2 and before:
            raise error
        result = original(*args, **kwargs)
        if len(calls) == 2:
            raise error
        return result

    monkeypatch.setattr(owner, name, failing)


FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("owner", "name", "error", "before"),
    [
        (Trainer, "_save_checkpoint", Crash(), False),
        (Trainer, "_save_optimizer_and_scheduler", FULL, True),
        (Trainer, "_save_rng_state", FULL, True),
        (optimisation_module, "save_file", FULL, False),
    ],
    ids=["killed", "disk full at the optimizer", "disk full at the end", "disk full at the average"],
)
def test_a_failure_while_saving_leaves_the_checkpoint_before_it(
    tmp_path, tokenizer, monkeypatch, owner, name, error, before
):
    fields = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "ema_decay": 0.9}
    with monkeypatch.context() as patch:
        fail_in(patch, owner, name, error, before=before)
        with pytest.raises(type(error)):
            run(tmp_path, tokenizer, **fields)
    output = tmp_path / "out"
    assert get_last_checkpoint(str(output)) == str(output / "checkpoint-2")
    assert not [path.name for path in output.iterdir() if path.name.startswith("checkpoint") and path.name[-1] != "2"]
    assert not (output / "drafter").exists()
    _, trainer = run(tmp_path, tokenizer, **fields, resume_from_checkpoint="last")
    assert trainer.state.global_step == 4
    assert sorted(path.name for path in output.iterdir()) == ["checkpoint-2", "checkpoint-4", "drafter"]


def test_only_the_newest_checkpoints_are_kept(tmp_path, tokenizer):
    run(tmp_path, tokenizer, max_steps=12, save_strategy="steps", save_steps=3, save_total_limit=2)
    kept = sorted(p.name for p in (tmp_path / "out").glob("checkpoint-*"))
    assert kept == ["checkpoint-12", "checkpoint-9"]


def test_a_failure_while_the_drafter_is_saved_leaves_no_half_of_it(tmp_path, tokenizer, monkeypatch):
    folder, trainer = run(tmp_path, tokenizer, max_steps=1)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    monkeypatch.setattr(DFlashDraftModel, "save_pretrained", lambda self, path: (path.mkdir(), 1 / 0))
    with pytest.raises(ZeroDivisionError):
        save_drafter(trainer.model, folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


# ----------------------------------------------------------------------------------------------------- a given drafter
def saved_drafter(folder, **fields) -> DFlashDraftModel:
    drafter = tiny_drafter(tiny_target(vocab_size=ROWS), **{"mask_token_id": 70, **fields})
    drafter.save_pretrained(folder)
    return drafter


@pytest.mark.parametrize(("window", "shortlist"), [(None, None), (7, 5)])
@pytest.mark.parametrize("kind", [{}, {"draft_vocab_size": 9, "causal_layers": [True, True]}])
def test_a_given_drafter_goes_on_with_its_weights_and_the_shortlist_and_window_asked_for(
    tmp_path, tokenizer, window, shortlist, kind
):
    given = saved_drafter(tmp_path / "given", **kind)
    arguments = DrafterArguments(
        data=str(write_jsonl(tmp_path / "data.jsonl", texts())),
        init_from=str(tmp_path / "given"),
        sliding_window=window,
        draft_vocab_size=shortlist,
    )
    folder, _ = run(tmp_path, tokenizer, arguments, learning_rate=0.0, max_steps=1)
    drafter = DFlashDraftModel.from_pretrained(folder)
    weights = dict(drafter.named_parameters())
    assert all(torch.equal(weights[name], p) for name, p in given.named_parameters())
    size = shortlist or kind.get("draft_vocab_size")
    assert (0 if drafter.draft_token_ids is None else len(drafter.draft_token_ids)) == (size or 0)
    if shortlist is None and size:
        assert torch.equal(drafter.draft_token_ids, given.draft_token_ids)
    elif shortlist:
        assert drafter.draft_token_ids.tolist() != list(range(5)), "the most frequent of the data"
    assert drafter.config.sliding_window == window
    assert drafter.config.layer_types == ["sliding_attention" if window else "full_attention"] * 2
    assert drafter.config.causal_layers == given.config.causal_layers
    assert (drafter.config.mask_token_id, drafter.config.target_layer_ids) == (70, [1, 2])


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"block_size": 5}, "block_size=5: the drafter of init_from='.*' has 4"),
        ({"mask_token_id": 69}, "mask_token_id=69: .* has 70"),
        ({"conditioning": "none"}, "conditioning='none': .* has 'kv'"),
        ({"drafting": "autoregressive"}, "drafting='autoregressive': .* has 'parallel'"),
        ({"block_size": 8, "drafter_layers": 2}, "block_size=8: .* has 4"),  # a default, but asked for
        ({"drafter_layers": 3}, "drafter_layers=3: .* has 2"),
    ],
)
def test_a_given_drafter_of_another_geometry_is_refused_by_name(tmp_path, tokenizer, fields, words):
    saved_drafter(tmp_path / "given")
    data = str(write_jsonl(tmp_path / "data.jsonl", texts()))
    with pytest.raises(ValueError, match=words):
        run(tmp_path, tokenizer, DrafterArguments(data=data, init_from=str(tmp_path / "given"), **fields))
    same = DrafterArguments(data=data, init_from=str(tmp_path / "given"), block_size=4, mask_token_id=70)
    run(tmp_path, tokenizer, same, max_steps=1)


# ----------------------------------------------------------------------------------------------------------- the shell
@pytest.fixture
def folder(tmp_path, tokenizer):
    """A folder of a target."""
    return save_target(tmp_path / "target", tokenizer)


def save_target(path, tokenizer, **overrides):
    tiny_target(vocab_size=ROWS, **overrides).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def options(tmp_path, folder, **fields) -> list[str]:
    """Flags of a quick training, without those that are None."""
    defaults = {
        "data": tmp_path / "data.jsonl",
        "output_dir": tmp_path / "out",
        "target": folder,
        "target_dtype": "float32",
        "drafter_layers": 1,
        "block_size": 4,
        "num_taps": 1,
        "max_steps": 1,
        "num_anchors": 4,
        "per_device_train_batch_size": 2,
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    fields = {**defaults, **fields}
    return [word for name, value in fields.items() if value is not None for word in (f"--{name}", str(value))]


def invoke(*arguments):
    result = CliRunner().invoke(cli.app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result


def refused(monkeypatch, capsys, *arguments) -> str:
    """The one line that the shell says when it exits with status 1."""
    monkeypatch.setattr(sys, "argv", ["dflash-hf", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("dflash-hf: error: ")
    return last


@pytest.mark.parametrize("tied", [False, True])
def test_a_text_that_is_learnt_by_heart_is_accepted_nearly_whole(tmp_path, tokenizer, tied):
    """Answer, train, reload, decode; the target writes 40 tokens, among them many that occur once."""
    folder = save_target(tmp_path / "target", tokenizer, tie_word_embeddings=tied, seed=3)
    prompts = write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": "<31> <9> <40>"}])
    data = tmp_path / "answers.jsonl"
    how = ("--target", folder, "--dtype", "float32", "--max-new-tokens", 40)
    invoke("data", "regenerate", prompts, "--output", data, *how)
    row = json.loads(data.read_text())
    assert len(row["response_ids"]) == 40 and len(set(row["response_ids"])) > 15
    flags = options(
        tmp_path,
        folder,
        data=data,
        eval_prompts=prompts,
        eval_max_new_tokens=40,
        drafter_layers=2,
        max_steps=80,
        learning_rate=6e-3,
        num_anchors=40,
        logging_steps=80,
        warmup_steps=10,
    )
    result = invoke("train", *flags)
    reported = float(result.output.split("best τ ")[1].split(":")[0])
    target = tiny_target(vocab_size=ROWS, tie_word_embeddings=tied, seed=3)
    ids = torch.tensor([row["prompt_ids"]])
    drafter = dflash_hf.attach(target, tmp_path / "out" / "drafter")
    ours = target.generate(ids, assistant_model=drafter, max_new_tokens=40, do_sample=False)
    assert ours.tolist() == plain(target, ids, max_new_tokens=40, do_sample=False).tolist()
    assert ours[0, ids.shape[1] :].tolist() == row["response_ids"]
    tau = drafter.last_statistics.tau
    assert tau >= 3.2 and abs(tau - reported) < 0.3


def test_options_come_from_a_yaml_file_and_flags_win(tmp_path, folder):
    write_jsonl(tmp_path / "data.jsonl", texts())
    settings = tmp_path / "run.yaml"
    flags = options(tmp_path, folder, block_size=5, loss_decay=3.0, sample_from_anchor=True)
    lines = [f"{name.removeprefix('--')}: '{value}'" for name, value in zip(flags[::2], flags[1::2], strict=True)]
    settings.write_text("\n".join(lines))
    invoke("train", settings, "--block_size", 6)
    drafter = DFlashDraftModel.from_pretrained(tmp_path / "out" / "drafter")
    assert (drafter.config.block_size, drafter.config.sample_from_anchor) == (6, True)
    history = json.loads((tmp_path / "out" / "drafter" / "training.json").read_text())
    assert history["settings"]["loss_decay"] == 3.0
    settings.write_text("- a\n- b\n")
    with pytest.raises(ValueError, match=r"run\.yaml: a mapping from options to words was expected"):
        invoke("train", settings)
    for text, words in [("data: [a, b]", "write nested values as JSON"), ("a: b: c", "run.yaml: not YAML")]:
        settings.write_text(text)
        with pytest.raises(ValueError, match=words):
            invoke("train", settings)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--block_sise", "5"], "--block_sise: no such option; did you mean --block_size?"),
        (["--drafting", "both"], "argument --drafting: invalid choice: 'both'"),
        (["--learning_rate", "abc"], "argument --learning_rate/--learning-rate: invalid float value: 'abc'"),
    ],
)
def test_wrong_options_are_named_in_one_line(monkeypatch, capsys, words, message):
    assert message in refused(monkeypatch, capsys, "train", "--data", "d.jsonl", "--output_dir", "out", *words)


def test_the_default_mask_is_a_row_that_the_data_does_not_use_either(tmp_path, tokenizer):
    rows = [*texts(2), {"prompt_ids": [5, 6], "response_ids": [WORDS, WORDS + 1, 8]}]
    folder, _ = run(tmp_path, tokenizer, recipe_arguments(tmp_path, rows), max_steps=1)
    assert DFlashDraftModel.from_pretrained(folder).config.mask_token_id == WORDS + 2
    rows = [*texts(2), {"prompt_ids": [5, 6], "response_ids": list(range(WORDS, ROWS))}]
    with pytest.raises(ValueError, match="so no row is free"):
        run(tmp_path, tokenizer, recipe_arguments(tmp_path, rows))


@pytest.mark.parametrize("loss", ["ce", "kl"])
def test_features_computed_beforehand_are_all_that_the_training_reads(tmp_path, folder, monkeypatch, loss):
    write_jsonl(tmp_path / "data.jsonl", texts())
    flags = options(tmp_path, folder, features=tmp_path / "features", loss=loss, max_steps=4)
    result = invoke("data", "features", *flags)
    assert "all 7 texts" in " ".join(result.output.split())
    monkeypatch.setattr(trainer_module, "target_states", None)
    invoke("train", *flags)
    log = json.loads((tmp_path / "out" / "drafter" / "training.json").read_text())["log"]
    other = tmp_path / "online"
    monkeypatch.undo()
    invoke("train", *options(tmp_path, folder, loss=loss, max_steps=4, output_dir=other))
    online = json.loads((other / "drafter" / "training.json").read_text())["log"]
    assert log[-1]["train_loss"] == pytest.approx(online[-1]["train_loss"], rel=1e-4)


def test_features_of_another_loss_are_refused(tmp_path, folder, monkeypatch, capsys):
    write_jsonl(tmp_path / "data.jsonl", texts())
    flags = options(tmp_path, folder, features=tmp_path / "features")
    invoke("data", "features", *flags)
    line = refused(monkeypatch, capsys, "train", *flags, "--loss", "tv")
    assert "holds features of another soft_labels: False there, True here" in line
    line = refused(monkeypatch, capsys, "data", "features", *options(tmp_path, folder))
    assert "--features" in line


def test_short_and_empty_rows_are_left_out_and_counted(tmp_path, folder):
    rows = [*texts(1), {"prompt_ids": [5], "response_ids": [6]}, say("<5>", "")]
    write_jsonl(tmp_path / "data.jsonl", rows)
    invoke("train", *options(tmp_path, folder, max_steps=5, logging_steps=1))
    history = json.loads((tmp_path / "out" / "drafter" / "training.json").read_text())
    losses = [entry["loss"] for entry in history["log"] if "loss" in entry]
    assert len(losses) == 5 and all(0 < loss < 100 for loss in losses)
    report = " ".join(history["data"])
    assert "documents:  1" in report and "1 fewer than 2 tokens of the target" in report
    assert "1 empty assistant text" in report
    config = DFlashDraftModel.from_pretrained(tmp_path / "out" / "drafter").config
    assert WORDS <= config.mask_token_id < ROWS


def test_one_huge_row_is_cut_and_trained_on(tmp_path, folder):
    huge = say("<9>", words(random_ids(3000).tolist()))
    write_jsonl(tmp_path / "data.jsonl", [*texts(1), huge])
    invoke("train", *options(tmp_path, folder, max_length=48))
    history = json.loads((tmp_path / "out" / "drafter" / "training.json").read_text())
    assert any("cut:        1 documents at 48 tokens" in line for line in history["data"])


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], ["data.jsonl", "the file is empty"]),
        ([{"prompt_ids": [5], "response_ids": [6]}] * 3, ["block_size", "3", "at least 2 tokens"]),
        ([*texts(2), '{"messages": ['], ["data.jsonl, line 3: not JSON"]),
        ([*texts(1), {"prompt_ids": [5], "response_ids": [6, 99]}], ["line 2: token id 99", "Another tokenizer"]),
        ([{"messages": [{"role": "user", "content": "<5>"}]}], ["line 1: no assistant turn"]),
    ],
    ids=["empty file", "all short", "malformed", "other tokenizer", "no answer"],
)
def test_data_that_cannot_work_ends_in_one_line_before_the_first_step(
    tmp_path, folder, monkeypatch, capsys, rows, words
):
    write_jsonl(tmp_path / "data.jsonl", rows)
    line = refused(monkeypatch, capsys, "train", *options(tmp_path, folder))
    for word in words:
        assert word in line
    assert not (tmp_path / "out" / "drafter").exists()


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (2, "mask_token_id=2: it must be a row of the target's embedding (0 to 71) and neither pad, bos nor eos"),
        (72, "mask_token_id=72: it must be a row"),
    ],
)
def test_a_mask_that_cannot_be_ends_in_one_line(tmp_path, folder, monkeypatch, capsys, mask, words):
    write_jsonl(tmp_path / "data.jsonl", texts())
    assert words in refused(monkeypatch, capsys, "train", *options(tmp_path, folder, mask_token_id=mask))


def test_a_target_without_a_free_row_asks_for_a_mask(tmp_path, tokenizer, monkeypatch, capsys):
    folder = tmp_path / "target"
    tiny_target(vocab_size=WORDS).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    write_jsonl(tmp_path / "data.jsonl", texts())
    assert "--mask_token_id" in refused(monkeypatch, capsys, "train", *options(tmp_path, folder))
    invoke("train", *options(tmp_path, folder, mask_token_id=1))
    assert DFlashDraftModel.from_pretrained(tmp_path / "out" / "drafter").config.mask_token_id == 1


def test_the_mask_of_a_real_row_is_drawn(tmp_path, folder, monkeypatch):
    drawn = []
    monkeypatch.setattr(show_mask, "draw_mask", lambda *arguments: drawn.append(arguments))
    write_jsonl(tmp_path / "data.jsonl", texts())
    flags = ("--target", folder, "--row", 6, "--block-size", 4, "--num-anchors", 3, "--length", 12, "--window", 5)
    invoke("data", "show-mask", tmp_path / "data.jsonl", "--output", tmp_path / "mask.png", *flags)
    ((mask, anchors, block_size, length, tokens, path),) = drawn
    # The row is <3> and two words <2> <4>, then eleven words and <2>; a quarter of the picture is prompt.
    row = [*json.loads((tmp_path / "data.jsonl").read_text().splitlines()[6])["messages"][1]["content"].split(), "<2>"]
    assert len(tokens) == length == 12 and tokens[3:] == row[:9] and tokens[1:3] == ["<2>", "<4>"]
    assert len(anchors) == 3 and all(3 <= anchor < 11 for anchor in anchors)
    everything = torch.ones(1, 12, dtype=torch.bool)
    expected = masking.training_mask(torch.tensor([anchors]), 4, everything, window=5, causal=False)
    assert torch.equal(mask, expected[0]) and (block_size, path) == (4, tmp_path / "mask.png")
    with pytest.raises(ValueError, match="row=7: .* has 7 rows, counted from 0"):
        invoke("data", "show-mask", tmp_path / "data.jsonl", *flags[:2], "--row", 7)
