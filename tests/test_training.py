"""Training drafts what decoding drafts, on data that says what the target wrote, and survives being interrupted."""

import copy
import json
import time

import pytest
import torch
from tiny import MASK, VOCAB, draft_cache, random_ids, sliding, tiny_drafter, tiny_target
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast, Trainer, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from dflash_hf import DFlashDraftModel, objective
from dflash_hf.target import Target, concatenate
from dflash_hf.training import (
    ConversationDataset,
    DFlashTrainer,
    DFlashTrainingArguments,
    DrafterArguments,
    collate,
    initialise_from_target,
    recipe,
)
from dflash_hf.training.data import read_prompts
from dflash_hf.training.trainer import TimeBudget


KINDS = {
    "full": {},
    "sliding causal": sliding(5, causal=True),
    "sliding bidirectional": sliding(5, causal=False),
    "mixed": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5},
}
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    """Ten words and the marks of a conversation: 16 of the ids of a tiny target."""
    words = ["<pad>", "<bos>", "<eos>", "<user>", "<assistant>", "<end>", *"abcdefghij"]
    model = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    model.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=model,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        chat_template=TEMPLATE,
    )


def training_arguments(folder, **fields) -> DFlashTrainingArguments:
    defaults = {
        "use_cpu": True,
        "per_device_train_batch_size": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        "num_anchors": 4,
        "max_steps": 4,
        "warmup_steps": 0,
        "dataloader_pin_memory": False,
    }
    return DFlashTrainingArguments(output_dir=str(folder), **{**defaults, **fields})


def make_trainer(folder, drafter, target, rows=(), eval_prompts=None, **fields) -> DFlashTrainer:
    return DFlashTrainer(
        drafter,
        training_arguments(folder, **fields),
        target=Target(target),
        eval_prompts=eval_prompts,
        train_dataset=list(rows),
        data_collator=collate,
    )


def rows_of(ids: torch.Tensor, prompt: int = 2) -> list[dict]:
    return [{"input_ids": row, "supervised": [False] * prompt + [True] * (len(row) - prompt)} for row in ids.tolist()]


@pytest.fixture(params=KINDS)
def pair(request, tmp_path):
    """A trainer whose drafter has layers of each kind."""
    target = tiny_target()
    return make_trainer(tmp_path, tiny_drafter(target, **KINDS[request.param]), target)


# ---------------------------------------------------------------------------------------------- train/serve parity
def hidden_states(target, ids: torch.Tensor) -> torch.Tensor:
    """The drafter's context, from the hidden states that transformers itself reports for layers 1 and 2."""
    states = target(ids, output_hidden_states=True).hidden_states
    return torch.cat([states[2], states[3]], dim=-1)


@torch.no_grad()
def inference_draft(drafter, target, ids: torch.Tensor, anchor: int) -> torch.Tensor:
    """What decoding drafts for the anchor `ids[anchor]`, in two rounds with a cache."""
    block_size = drafter.config.block_size
    embedding, context = target.get_input_embeddings(), hidden_states(target, ids[:, :anchor])
    cache = draft_cache(drafter.config)
    for start, stop in ((0, anchor // 2), (anchor // 2, anchor)):
        block = torch.tensor([[int(ids[0, stop])] + [MASK] * (block_size - 1)])
        output = drafter(embedding(block), context[:, start:stop], cache=cache)
        cache.crop(-block_size)
    return output.last_hidden_state


@torch.no_grad()
def training_draft(trainer, ids, anchors, attention_mask=None) -> torch.Tensor:
    mask = torch.ones_like(ids) if attention_mask is None else attention_mask
    return trainer.draft(trainer.model, ids, mask, torch.tensor(anchors))


@pytest.mark.parametrize("anchor", [2, 7, 13, 18])
def test_training_drafts_what_decoding_drafts_at_the_same_anchor(pair, anchor):
    ids = random_ids(1, 20)
    trained = training_draft(pair, ids, [[anchor]])[:, 0]
    drafted = inference_draft(pair.model, pair.target.model, ids, anchor)
    torch.testing.assert_close(trained, drafted, atol=1e-5, rtol=1e-5)


def test_a_block_does_not_depend_on_the_other_blocks(pair):
    ids = random_ids(1, 20)
    together = training_draft(pair, ids, [[3, 5, 6, 14]])
    for i, anchor in enumerate((3, 5, 6, 14)):
        alone = training_draft(pair, ids, [[anchor]])
        torch.testing.assert_close(together[:, i], alone[:, 0], atol=1e-5, rtol=1e-5)


def test_a_row_does_not_depend_on_its_batch_and_its_padding(pair):
    short, long = random_ids(1, 9, seed=1), random_ids(1, 15, seed=2)
    ids = torch.cat([torch.nn.functional.pad(short, (0, 6)), long])
    mask = torch.tensor([[1] * 9 + [0] * 6, [1] * 15])
    together = training_draft(pair, ids, [[2, 7], [4, 12]], mask)
    torch.testing.assert_close(together[:1], training_draft(pair, short, [[2, 7]]), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(together[1:], training_draft(pair, long, [[4, 12]]), atol=1e-5, rtol=1e-5)


def test_text_from_the_anchor_on_does_not_reach_its_block(pair):
    ids, anchor = random_ids(1, 20), 8
    other = ids.clone()
    other[:, anchor + 1 :] = random_ids(1, 20 - anchor - 1, seed=9)
    before = training_draft(pair, ids, [[anchor]])
    torch.testing.assert_close(training_draft(pair, other, [[anchor]]), before, atol=1e-6, rtol=0)
    # The hidden state of the anchor itself is hidden too: only its embedding, in slot 0, may be seen.
    kept = pair.context_hidden_states

    def disturbed(*arguments):
        states = kept(*arguments).clone()
        states[:, anchor:] += 1.0
        return states

    pair.context_hidden_states = disturbed
    torch.testing.assert_close(training_draft(pair, ids, [[anchor]]), before, atol=1e-6, rtol=0)
    other = ids.clone()
    other[:, anchor - 1] = (ids[:, anchor - 1] + 7) % MASK
    pair.context_hidden_states = kept
    assert (training_draft(pair, other, [[anchor]]) - before).abs().max() > 1e-3


# ---------------------------------------------------------------------------------------------------------- features
def test_features_are_the_outputs_of_the_named_layers_in_order(tmp_path):
    target, ids = tiny_target(), random_ids(2, 9)
    trainer = make_trainer(tmp_path, tiny_drafter(target, target_layer_ids=[2, 0]), target)
    states = target(ids, output_hidden_states=True).hidden_states
    features = trainer.context_hidden_states(ids, torch.ones_like(ids))
    torch.testing.assert_close(features, torch.cat([states[3], states[1]], dim=-1), atol=1e-6, rtol=1e-6)
    assert not features.requires_grad


def test_only_the_tapped_layers_are_kept_and_no_hook_stays():
    target = Target(tiny_target())
    with target.capture([0, 2]) as taps:
        target.model(random_ids(1, 9))
        assert taps.keys() == {0, 2}
    assert not any(layer._forward_hooks for layer in target.layers)
    target.model(random_ids(1, 9, seed=1))
    assert concatenate(taps, [0, 2]).shape == (1, 9, 64)


def test_a_hook_that_did_not_fire_is_reported():
    with Target(tiny_target()).capture([1]) as taps, pytest.raises(RuntimeError, match=r"layers \[1\]"):
        concatenate(taps, [1])


# -------------------------------------------------------------------------------------------------------------- loss
def test_the_loss_is_the_objective_over_the_head_of_the_target(tmp_path):
    target = tiny_target()
    trainer = make_trainer(tmp_path, tiny_drafter(target), target, num_anchors=100)
    batch = collate(rows_of(random_ids(2, 12)))
    torch.manual_seed(3)
    loss, logits = trainer.compute_loss(trainer.model, batch, return_outputs=True)
    torch.manual_seed(3)
    anchors, keep = objective.sample_anchors(batch["supervised"], 100)
    assert anchors.tolist() == [list(range(2, 11))] * 2
    states = training_draft(trainer, batch["input_ids"], anchors.tolist())[:, :, 1:]
    torch.testing.assert_close(logits, target.lm_head(states), atol=1e-5, rtol=1e-5)
    labels = objective.block_labels(batch["input_ids"], batch["supervised"], anchors, keep, 4)
    weights = objective.slot_weights(4, 2.0)
    torch.testing.assert_close(loss, objective.weighted_cross_entropy(logits, labels, weights))


@pytest.mark.parametrize(("block_size", "decay"), [(4, 2.0), (8, 4.0), (10, 5.0), (16, 7.0)])
def test_the_decay_is_the_published_one_for_the_block_size(tmp_path, block_size, decay):
    target = tiny_target()
    trainer = make_trainer(tmp_path, tiny_drafter(target, block_size=block_size), target)
    assert torch.equal(trainer.slot_weights, objective.slot_weights(block_size, decay))
    trainer = make_trainer(tmp_path, tiny_drafter(target, block_size=block_size), target, loss_decay=3.0)
    assert torch.equal(trainer.slot_weights, objective.slot_weights(block_size, 3.0))


def test_a_shortlist_scores_and_labels_its_own_tokens_only(tmp_path):
    target = tiny_target()
    drafter = tiny_drafter(target, draft_vocab_size=3)
    drafter.draft_token_ids.copy_(torch.tensor([5, 9, 40]))
    trainer = make_trainer(tmp_path, drafter, target)
    states = torch.randn(2, 32)
    torch.testing.assert_close(trainer.head.logits(states), target.lm_head(states)[:, [5, 9, 40]])
    assert trainer.draft_ids[[5, 9, 40]].tolist() == [0, 1, 2]
    assert (trainer.draft_ids == objective.IGNORE).sum() == VOCAB - 3
    ids = torch.tensor([[1, 1, 9, 5, 40, 7, 9, 9, 5]])
    loss, logits = trainer.compute_loss(drafter, collate(rows_of(ids)), return_outputs=True)
    assert logits.shape[-1] == 3 and loss.isfinite()


def test_the_trainer_refuses_a_drafter_of_another_target(tmp_path):
    with pytest.raises(ValueError, match="hidden_size: the drafter has 32, the target 48"):
        make_trainer(tmp_path, tiny_drafter(tiny_target()), tiny_target(hidden_size=48))


# -------------------------------------------------------------------------------------------------------------- data
def write_jsonl(path, rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def say(*turns):
    """A conversation: user and assistant in turn."""
    return {"messages": [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)]}


def supervised_words(row, tokenizer):
    return [
        tokenizer.convert_ids_to_tokens(token)
        for token, said in zip(row["input_ids"], row["supervised"], strict=True)
        if said
    ]


def test_rows_with_token_ids_are_taken_as_they_are(tmp_path, tokenizer):
    path = write_jsonl(tmp_path / "data", [{**say("a", "b"), "prompt_ids": [3, 9, 5], "response_ids": [7, 8, 9]}])
    assert ConversationDataset(path, tokenizer, 100)[0] == {
        "input_ids": [3, 9, 5, 7, 8, 9],
        "supervised": [False, False, False, True, True, True],
    }


def test_the_target_is_held_to_every_assistant_turn_and_its_end(tmp_path, tokenizer):
    path = write_jsonl(tmp_path / "data", [say("a b", "c d"), say("a", "b c", "d e", "f"), say("a", "b", "c")])
    dataset = ConversationDataset(path, tokenizer, 100)
    assert [supervised_words(row, tokenizer) for row in dataset.rows] == [
        ["c", "d", "<end>"],
        ["b", "c", "<end>", "f", "<end>"],
        ["b", "<end>"],
    ]
    words = tokenizer.convert_ids_to_tokens(dataset[1]["input_ids"])
    assert words == "<user> a <end> <assistant> b c <end> <user> d e <end> <assistant> f <end>".split()
    assert dataset.num_supervised == 10


def test_rows_without_two_tokens_of_the_target_are_skipped_and_counted(tmp_path, tokenizer):
    short = {"prompt_ids": [3], "response_ids": [7]}
    path = write_jsonl(tmp_path / "data", [short, "", say("a", "b c"), say("a b c d e f", "g")])
    dataset = ConversationDataset(path, tokenizer, 9)
    assert len(dataset) == 1
    assert dict(dataset.skipped) == {"fewer than two tokens of the target": 2}


def test_long_rows_are_cut_at_the_end(tmp_path, tokenizer):
    path = write_jsonl(tmp_path / "data", [{"prompt_ids": [3, 4], "response_ids": [6, 7, 8, 9]}])
    assert ConversationDataset(path, tokenizer, 4)[0]["input_ids"] == [3, 4, 6, 7]


@pytest.mark.parametrize(
    "bad",
    [
        "{",
        "[1, 2]",
        "{}",
        json.dumps({"messages": [{"role": "assistant"}]}),
        json.dumps({"messages": [{"role": "user", "content": "a"}]}),
        json.dumps({"messages": []}),
        json.dumps({"prompt_ids": 3, "response_ids": [1]}),
    ],
)
def test_a_malformed_row_is_named_by_file_and_line(tmp_path, tokenizer, bad):
    path = write_jsonl(tmp_path / "data.jsonl", [say("a", "b c"), "", bad])
    with pytest.raises(ValueError, match=r"data\.jsonl, line 3: ") as error:
        ConversationDataset(path, tokenizer, 100)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ 'a' if loop.length == 1 else 'b' }} {{ m.content }} {% endfor %}",
        "{% for m in messages %}{% if m.role == 'user' or loop.last %}{{ m.content }} {% endif %}{% endfor %}",
    ],
)
def test_a_template_that_rewrites_earlier_turns_is_refused(tmp_path, tokenizer, template):
    rewriting = copy.deepcopy(tokenizer)
    rewriting.chat_template = template
    path = write_jsonl(tmp_path / "data", [say("a", "b c", "d", "e f")])
    with pytest.raises(ValueError, match="line 1.*prefix of its continuation"):
        ConversationDataset(path, rewriting, 100)


@pytest.mark.parametrize("rows", [[], [""], [{"prompt_ids": [3], "response_ids": [7]}]])
def test_a_file_without_a_row_to_train_on_is_refused(tmp_path, tokenizer, rows):
    with pytest.raises(ValueError, match="no row to train on.*block_size"):
        ConversationDataset(write_jsonl(tmp_path / "data", rows), tokenizer, 100)


def test_collate_pads_on_the_right_and_says_where():
    rows = [{"input_ids": [5, 6, 7], "supervised": [False, True, True]}, {"input_ids": [8], "supervised": [True]}]
    batch = collate(rows)
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["supervised"].tolist() == [[False, True, True], [True, False, False]]
    assert [batch[k].dtype for k in ("input_ids", "attention_mask", "supervised")] == [
        torch.int64,
        torch.int64,
        torch.bool,
    ]


def test_the_shortlist_holds_the_most_frequent_words_of_the_target(tmp_path, tokenizer):
    path = write_jsonl(tmp_path / "data", [{"prompt_ids": [3, 3, 3, 3], "response_ids": [9, 9, 9, 7, 7, 4]}])
    dataset = ConversationDataset(path, tokenizer, 100)
    assert dataset.most_frequent(1, 64) == [9]
    assert dataset.most_frequent(2, 64) == [7, 9]
    assert dataset.most_frequent(5, 64) == [0, 1, 4, 7, 9]


def test_prompts_are_read_in_each_of_their_spellings(tmp_path):
    turns = say("a", "b", "c")["messages"]
    path = write_jsonl(tmp_path / "p", [{"prompt": "a"}, {"turns": ["a", "z"]}, {"messages": turns}])
    assert read_prompts(path) == [[{"role": "user", "content": "a"}]] * 3
    system = {"role": "system", "content": "s"}
    path = write_jsonl(tmp_path / "q", [{"messages": [system, *turns]}])
    assert read_prompts(path) == [[system, turns[0]]]
    for bad in ({"text": "a"}, {"messages": [system]}, {"turns": []}):
        with pytest.raises(ValueError, match="line 1: a prompt row needs"):
            read_prompts(write_jsonl(tmp_path / "r", [bad]))


# ---------------------------------------------------------------------------------------------------- initialisation
def test_a_drafter_starts_as_the_last_layers_of_its_target():
    target = tiny_target()
    drafter = tiny_drafter(target)
    initialise_from_target(drafter, Target(target), random_ids(2, 16))
    for layer, source in zip(drafter.layers, target.model.layers[-2:], strict=True):
        for name, tensor in source.state_dict().items():
            assert torch.equal(layer.state_dict()[name], tensor), name
    assert torch.equal(drafter.norm.weight, target.model.norm.weight)
    norms = [layer.input_layernorm.weight for layer in target.model.layers[-2:]]
    torch.testing.assert_close(drafter.hidden_norm.weight, (norms[0] + norms[1]) / 2)
    with torch.no_grad():
        context = hidden_states(target, random_ids(2, 16, seed=1))
        fused = drafter.fc(context)
    first, last = (torch.nn.functional.cosine_similarity(fused, tap, dim=-1).mean() for tap in context.chunk(2, -1))
    assert last > 0.7 and last > first + 0.05, "fc passes on the last tap, with noise from all of them"
    assert 0.8 < fused.pow(2).mean().sqrt() < 1.6, "each tap is scaled to size 1, whatever its own"


def test_a_target_without_head_norms_initialises_a_drafter_without_them():
    target = tiny_target("llama")
    drafter = tiny_drafter(target, qk_norm=False)
    initialise_from_target(drafter, Target(target), random_ids(2, 16))
    assert torch.equal(drafter.layers[1].self_attn.q_proj.weight, target.model.layers[3].self_attn.q_proj.weight)


@pytest.mark.parametrize(
    ("family", "config", "words"),
    [
        ("llama", {}, ["self_attn.q_norm.weight", "missing", "qk_norm=False"]),
        ("qwen3", {"intermediate_size": 48}, ["mlp.gate_proj.weight", "[64, 32]", "[48, 32]"]),
        ("qwen3", {"qk_norm": False}, ["self_attn.k_norm.weight"]),
        ("qwen2", {"qk_norm": False}, ["self_attn.k_proj.bias"]),
    ],
)
def test_a_layer_that_cannot_be_copied_is_named(family, config, words):
    target = tiny_target(family)
    with pytest.raises(ValueError, match="init='target'") as error:
        initialise_from_target(tiny_drafter(target, **config), Target(target), random_ids(1, 8))
    for word in words:
        assert word in str(error.value)


# ---------------------------------------------------------------------------------------------------------- training
def test_a_few_steps_lower_the_loss_and_leave_the_target_alone(tmp_path):
    target = tiny_target()
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    torch.manual_seed(0)
    drafter = DFlashDraftModel(tiny_drafter(target).config)
    rows = rows_of(random_ids(1, 16).repeat(4, 1))
    trainer = make_trainer(tmp_path, drafter, target, rows, max_steps=10, learning_rate=1e-2, num_anchors=50)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 10
    assert losses[-1] < 0.5 * losses[0], losses
    assert all(torch.equal(tensor, before[name]) for name, tensor in target.state_dict().items())
    assert not any(p.requires_grad or p.grad is not None for p in target.parameters())
    assert all(p.grad is None or p.grad.isfinite().all() for p in drafter.parameters())
    logged = [entry for entry in trainer.state.log_history if "accuracy" in entry]
    assert len(logged) == 10 and logged[-1]["accuracy"] > logged[0]["accuracy"]
    assert all(0 <= entry["accepted"] <= 3 for entry in logged)


def test_every_tensor_of_the_drafter_learns(tmp_path):
    target = tiny_target()
    drafter = tiny_drafter(target, **KINDS["mixed"])
    trainer = make_trainer(tmp_path, drafter, target)
    trainer.compute_loss(drafter, collate(rows_of(random_ids(2, 16)))).backward()
    idle = [name for name, p in drafter.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert not idle


def test_the_clock_ends_the_training(tmp_path):
    target = tiny_target()
    rows = rows_of(random_ids(4, 12))
    trainer = make_trainer(tmp_path, tiny_drafter(target), target, rows, max_steps=50, max_minutes=1e-7)
    trainer.train()
    assert trainer.state.global_step == 1
    assert trainer.lr_scheduler.get_last_lr()[0] == pytest.approx(0.0, abs=1e-9)


def test_minutes_before_a_resume_count():
    budget = TimeBudget(10.0)

    class State:
        log_history = [{"minutes": 3.0}, {"minutes": 6.0}, {"eval_tau": 2.0}]

    budget.on_train_begin(None, State, None)
    assert budget.progress() == pytest.approx(0.6, abs=0.01)
    budget._start = time.monotonic() - 4.1 * 60

    class Control:
        should_training_stop = False

    budget.on_step_end(None, State, Control)
    assert Control.should_training_stop


# ------------------------------------------------------------------------------------------------------- checkpoints
def recipe_arguments(tmp_path, rows=None, **fields) -> DrafterArguments:
    data = tmp_path / "data.jsonl"
    write_jsonl(data, [say("a b", "c d e f g h"), say("b", "d c b a")] * 2 if rows is None else rows)
    defaults = {"drafter_layers": 1, "block_size": 4, "num_taps": 1, "target": "me/target"}
    return DrafterArguments(data=str(data), **{**defaults, **fields})


def run(tmp_path, tokenizer, arguments=None, **fields):
    fields = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "seed": 5, **fields}
    return recipe.train(
        tiny_target(),
        tokenizer,
        arguments or recipe_arguments(tmp_path),
        training_arguments(tmp_path / "out", **fields),
    )


class Crash(RuntimeError):
    pass


class CrashAt(TrainerCallback):
    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise Crash


def test_the_recipe_saves_a_drafter_that_loads_and_its_settings(tmp_path, tokenizer):
    folder, trainer = run(tmp_path, tokenizer)
    assert folder == tmp_path / "out" / "drafter"
    drafter = DFlashDraftModel.from_pretrained(folder)
    for name, tensor in trainer.model.state_dict().items():
        assert torch.equal(drafter.state_dict()[name], tensor), name
    config = drafter.config
    assert (config.block_size, config.mask_token_id, config.target_layer_ids) == (4, len(tokenizer), [2])
    assert (config.target_name, config.qk_norm) == ("me/target", True)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["checkpoint-2", "checkpoint-4", "drafter"]


def test_a_shortlist_of_the_data_is_saved_with_the_drafter(tmp_path, tokenizer):
    folder, _ = run(tmp_path, tokenizer, recipe_arguments(tmp_path, draft_vocab_size=3), max_steps=1)
    ids = DFlashDraftModel.from_pretrained(folder).draft_token_ids.tolist()
    assert ids == sorted(tokenizer.convert_tokens_to_ids(["c", "d", "<end>"]))


def test_a_crash_while_saving_leaves_the_checkpoint_before_it(tmp_path, tokenizer, monkeypatch):
    save = Trainer._save_checkpoint

    def failing(self, model, trial):
        save(self, model, trial)
        if self.state.global_step == 4:
            raise Crash

    monkeypatch.setattr(Trainer, "_save_checkpoint", failing)
    with pytest.raises(Crash):
        run(tmp_path, tokenizer)
    last = get_last_checkpoint(str(tmp_path / "out"))
    assert last == str(tmp_path / "out" / "checkpoint-2")
    assert not (tmp_path / "out" / "drafter").exists()
    monkeypatch.undo()
    _, trainer = run(tmp_path, tokenizer, resume_from_checkpoint="last")
    assert trainer.state.global_step == 4
    assert not (tmp_path / "out" / ".writing").exists()


def test_a_resumed_training_ends_where_an_unbroken_one_ends(tmp_path, tokenizer, monkeypatch):
    (tmp_path / "whole").mkdir()
    folder, _ = run(tmp_path / "whole", tokenizer)
    whole = DFlashDraftModel.from_pretrained(folder).state_dict()

    (tmp_path / "broken").mkdir()
    train = Trainer.train
    monkeypatch.setattr(Trainer, "train", lambda self, **kw: (self.add_callback(CrashAt(3)), train(self, **kw))[1])
    with pytest.raises(Crash):
        run(tmp_path / "broken", tokenizer)
    monkeypatch.undo()
    folder, trainer = run(tmp_path / "broken", tokenizer, resume_from_checkpoint="last")
    assert trainer.state.global_step == 4
    for name, tensor in DFlashDraftModel.from_pretrained(folder).state_dict().items():
        torch.testing.assert_close(tensor, whole[name], atol=1e-6, rtol=1e-5)


def test_only_the_newest_checkpoints_are_kept(tmp_path, tokenizer):
    run(tmp_path, tokenizer, max_steps=12, save_steps=3, save_total_limit=2)
    kept = sorted(p.name for p in (tmp_path / "out").glob("checkpoint-*"))
    assert kept == ["checkpoint-12", "checkpoint-9"]


def test_checkpoints_of_another_training_are_never_overwritten(tmp_path, tokenizer):
    run(tmp_path, tokenizer, max_steps=2)
    with pytest.raises(ValueError, match="already holds checkpoint-2.*resume_from_checkpoint last"):
        run(tmp_path, tokenizer)


def test_resuming_without_a_checkpoint_is_refused(tmp_path, tokenizer):
    with pytest.raises(ValueError, match="'last'.*holds no checkpoint"):
        run(tmp_path, tokenizer, resume_from_checkpoint="last")
    with pytest.raises(ValueError, match=r"no checkpoint: it has no trainer_state\.json"):
        run(tmp_path, tokenizer, resume_from_checkpoint=str(tmp_path))


@pytest.mark.parametrize("mask", [0, 1, 2, -1, 64])
def test_a_mask_that_text_uses_or_that_is_no_row_is_refused(tmp_path, tokenizer, mask):
    with pytest.raises(ValueError, match=f"mask_token_id={mask}:"):
        run(tmp_path, tokenizer, recipe_arguments(tmp_path, mask_token_id=mask))


def test_without_a_free_row_the_mask_must_be_named(tmp_path, tokenizer):
    target = tiny_target(vocab_size=len(tokenizer))
    with pytest.raises(ValueError, match="no row is free.*--mask_token_id"):
        recipe.train(target, tokenizer, recipe_arguments(tmp_path), training_arguments(tmp_path / "out"))


def test_a_llama_like_target_gives_a_drafter_without_head_norms(tmp_path, tokenizer):
    folder, _ = recipe.train(
        tiny_target("llama"), tokenizer, recipe_arguments(tmp_path), training_arguments(tmp_path / "out", max_steps=1)
    )
    assert not DFlashDraftModel.from_pretrained(folder).config.qk_norm


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"eval_strategy": "steps", "eval_steps": 1}, "eval_strategy='steps' needs prompts"),
        ({"save_strategy": "best", "metric_for_best_model": "tau"}, "save_strategy='best'"),
        ({"max_minutes": 1, "lr_scheduler_type": "constant"}, "lr_scheduler_type='constant'"),
    ],
)
def test_settings_of_the_trainer_that_are_not_honoured_are_refused(tmp_path, fields, words):
    target = tiny_target()
    with pytest.raises(ValueError, match=words):
        make_trainer(tmp_path, tiny_drafter(target), target, **fields)


def test_resuming_with_another_drafter_is_refused(tmp_path, tokenizer):
    run(tmp_path, tokenizer, save_strategy="steps", save_steps=2)
    other = recipe_arguments(tmp_path, block_size=5)
    with pytest.raises(ValueError, match="block_size is 4, the arguments say 5"):
        run(tmp_path, tokenizer, other, save_strategy="steps", save_steps=2, resume_from_checkpoint="last")


def test_a_target_that_computes_otherwise_is_not_copied():
    target = tiny_target("llama", hidden_act="gelu")
    drafter = tiny_drafter(target, hidden_act="silu", qk_norm=False)
    with pytest.raises(ValueError, match="mlp of the target's layer computes something else"):
        initialise_from_target(drafter, Target(target), random_ids(2, 8))


def test_what_the_template_adds_after_the_end_token_carries_no_loss(tmp_path, tokenizer):
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} <eos> <pad> {% endfor %}"
    path = write_jsonl(tmp_path / "data.jsonl", [say("a", "b c")])
    row = ConversationDataset(path, tokenizer, 100)[0]
    said = [i for i, s in zip(row["input_ids"], row["supervised"], strict=True) if s]
    assert tokenizer.convert_ids_to_tokens(said) == ["b", "c", "<eos>"]
    assert tokenizer.convert_ids_to_tokens(row["input_ids"])[-1] == "<pad>"


def test_evaluation_measures_tau_by_the_real_loop(tmp_path):
    target = tiny_target()
    prompt = random_ids(1, 6)
    trainer = make_trainer(tmp_path, tiny_drafter(target), target, eval_max_new_tokens=9, eval_prompts=[prompt])
    metrics = trainer.evaluate()
    numbers = trainer.model.last_statistics
    assert metrics["eval_tau"] == round(8 / len(numbers.rounds), 4)
    assert trainer.model.training


def test_the_drafter_is_saved_in_the_dtype_of_its_target(tmp_path, tokenizer):
    arguments = recipe_arguments(tmp_path)
    target = tiny_target().to(torch.bfloat16)
    folder, trainer = recipe.train(target, tokenizer, arguments, training_arguments(tmp_path / "out", max_steps=1))
    assert DFlashDraftModel.from_pretrained(folder, dtype="auto").dtype == torch.bfloat16
    assert trainer.model.dtype == torch.float32
