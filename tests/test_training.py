"""Training drafts what decoding drafts, on every batch the same, and measures what decoding would accept."""

import copy
import io
import math
import time
from types import SimpleNamespace

import pytest
import torch
from oracles import plain, word_tokenizer
from rich.console import Console
from tiny import MASK, VOCAB, random_ids, sliding, tiny_drafter, tiny_target, training_arguments
from torch import nn
from torch.nn import functional as F
from transformers.trainer_callback import ProgressCallback

from dflash_hf import DFlashDraftModel, custom_generate, objective
from dflash_hf.drafting import Drafting
from dflash_hf.masking import BLOCKS
from dflash_hf.target import Target
from dflash_hf.training import (
    DFlashTrainer,
    collate,
    initialise_from_target,
    progress,
)
from dflash_hf.training import trainer as trainer_module
from dflash_hf.training.features import FeatureStore, fill, manifest_for
from dflash_hf.training.measure import Counts, decode_all


KINDS = {
    "full": {},
    "sliding causal": sliding(5, causal=True),
    "sliding bidirectional": sliding(5, causal=False),
    "mixed": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5},
    "next-token": {"sample_from_anchor": True},
    "next-token sliding": {"sample_from_anchor": True, **sliding(5, causal=False)},
    "autoregressive": {"sample_from_anchor": True, "drafting": "autoregressive"},
    "autoregressive sliding": {
        "sample_from_anchor": True,
        "drafting": "autoregressive",
        **sliding(5, causal=True),
    },
    "input": {"conditioning": "input"},
    "input sliding": {"conditioning": "input", "sample_from_anchor": True, **sliding(5, causal=False)},
    "no features": {"conditioning": "input", "target_layer_ids": [-1]},
}


def make_trainer(
    folder, drafter, target, rows=(), *, eval_rows=None, eval_prompts=(), features=None, **fields
) -> DFlashTrainer:
    """Document i is line 10 i + 1 of its file."""
    return DFlashTrainer(
        drafter,
        training_arguments(folder, **fields),
        target=Target(target),
        lines=range(1, 1000, 10),
        features=features,
        train_dataset=list(rows),
        eval_dataset=eval_rows,
        eval_prompts=eval_prompts,
    )


def row_of(*texts: torch.Tensor, first: int = 0, prompt: int = 2) -> dict[str, torch.Tensor]:
    """A row that holds `texts` `(1, n)`, the documents from `first` on, each with a prompt of `prompt` tokens."""
    lengths = [text.shape[1] for text in texts]
    return {
        "input_ids": torch.cat(texts, dim=1)[0],
        "document": torch.repeat_interleave(torch.arange(first, first + len(texts)), torch.tensor(lengths)),
        "supervised": torch.cat([torch.arange(n) >= prompt for n in lengths]),
    }


def rows_of(*lengths: int, prompt: int = 2) -> list[dict[str, torch.Tensor]]:
    """Rows of one random text each."""
    return [row_of(random_ids(1, n, seed=i), first=i, prompt=prompt) for i, n in enumerate(lengths)]


def at(ids: torch.Tensor, anchors: list[list[int]], document=None, num_predicted: int = 3) -> dict:
    """A batch with blocks at chosen `anchors`, every token supervised."""
    document = torch.zeros_like(ids) if document is None else document
    anchors = torch.tensor(anchors)
    everything, keep = document >= 0, torch.ones_like(anchors, dtype=torch.bool)
    labels = objective.block_labels(ids, everything, document, anchors, keep, num_predicted)
    return {"input_ids": ids, "document": document, "anchors": anchors, "labels": labels, "supervised": everything}


def loss_of(trainer, model, batch: dict) -> torch.Tensor:
    """The loss of a step of nothing but this batch; blocks that were drawn already stay."""
    if "labels" not in batch:
        trainer.add_blocks(batch, 0)
    return trainer.compute_loss(model, batch, num_items_in_batch=batch["weight"])


@torch.no_grad()
def hidden_and_losses(trainer, ids, anchors, document=None):
    """Of blocks at chosen anchors: hidden states `(B, N, K, H)` and losses `(B, N)`."""
    return trainer.losses(trainer.model, at(ids, anchors, document, trainer.model.config.num_proposals))


def close(found, expected, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch):
    """The curves of each evaluation take longer than everything else here."""
    monkeypatch.setattr(trainer_module, "plot_curves", lambda *_: None)


@pytest.fixture(params=KINDS)
def pair(request, tmp_path):
    """A trainer whose drafter is of each kind."""
    target = tiny_target()
    return make_trainer(tmp_path, tiny_drafter(target, **KINDS[request.param]), target)


# ---------------------------------------------------------------------------------------------- train/serve parity
def drafts_of_the_loop(monkeypatch, drafter, target, prompt, new: int) -> tuple[torch.Tensor, dict]:
    """
    The text that the real loop writes, and for each anchor the hidden states `(1, n, H)` of the slots that proposed.

    The proposals are replaced by the text itself, wrong at every seventh place; in a block that is drafted token by
    token, the slots after a wrong one are left out.
    """
    full = plain(target, prompt, max_new_tokens=new, do_sample=False)
    drafts, states, propose = {}, [], Drafting.propose

    def choose(self, texts, hidden, previous):
        text, anchor = texts.ids, states[-1].texts.ids.shape[1] - 1
        start = text.shape[1]
        proposals = full[:, start : start + hidden.shape[1]].clone()
        if torch.equal(text, full[:, :start]):
            drafts.setdefault(anchor, []).append(hidden)
        wrong = (torch.arange(start, start + hidden.shape[1]) % 7 == 3).unsqueeze(0)
        return torch.where(wrong, (proposals + 1) % MASK, proposals), None

    monkeypatch.setattr(Drafting, "propose", lambda *args: (states.append(args[1]), propose(*args))[1])
    monkeypatch.setattr(Drafting, "_choose", choose)
    ours = plain(
        target, prompt, max_new_tokens=new, do_sample=False, custom_generate=custom_generate(drafter), use_cache=True
    )
    assert torch.equal(ours, full)
    return full, {anchor: torch.cat(parts, dim=1) for anchor, parts in drafts.items()}


@torch.no_grad()
def test_training_drafts_what_the_loop_drafts_at_each_of_its_anchors_packed_or_not(pair, monkeypatch):
    drafter, target = pair.model, pair.target.model
    ids, drafts = drafts_of_the_loop(monkeypatch, drafter, target, random_ids(1, 6), 24)
    assert len(drafts) >= 6 and max(states.shape[1] for states in drafts.values()) == drafter.config.num_proposals
    before, other = random_ids(1, 11, seed=1), random_ids(1, 9, seed=2)
    batch = collate([row_of(before, ids, other), row_of(ids, first=3), row_of(before, first=4)])
    places = [[11 + a for a in drafts], list(drafts), [0] * len(drafts)]
    states = pair.target_states(batch["input_ids"], batch["document"])
    hidden = pair.draft(pair.model, batch["input_ids"], batch["document"], torch.tensor(places), states)
    assert hidden.shape == (3, len(drafts), 4, 32)
    hidden = hidden[:, :, -drafter.config.num_proposals :]
    for i, slots in enumerate(drafts.values()):
        for row in (0, 1):
            close(hidden[row, i, : slots.shape[1]], slots[0], 1e-4)


def test_a_block_does_not_depend_on_the_other_blocks(pair):
    ids, anchors = random_ids(1, 20), (3, 5, 6, 14)
    together, losses = hidden_and_losses(pair, ids, [anchors])
    for i, anchor in enumerate(anchors):
        alone, loss = hidden_and_losses(pair, ids, [[anchor]])
        close(together[:, i], alone[:, 0])
        close(losses[:, i], loss[:, 0])


def test_text_from_the_anchor_on_reaches_its_block_in_the_labels_alone(pair):
    ids, anchor = random_ids(1, 40), 5
    autoregressive = pair.model.config.drafting == "autoregressive"
    hidden, loss = hidden_and_losses(pair, ids, [[anchor]])
    far, near, before, other = ids.clone(), ids.clone(), ids.clone(), random_ids(1, 40, seed=9)
    end = anchor + 1 + pair.model.config.num_proposals
    far[:, end:], near[:, anchor + 1 :] = other[:, end:], other[:, anchor + 1 :]
    before[:, anchor - 2] = (ids[:, anchor - 2] + 7) % MASK
    close(hidden_and_losses(pair, far, [[anchor]]), (hidden, loss), 1e-6)
    other, another = hidden_and_losses(pair, near, [[anchor]])
    assert (another - loss).abs().min() > 1e-3
    if autoregressive:  # the block holds the text
        close(other[:, :, 0], hidden[:, :, 0], 1e-6)
        assert (other[:, :, 1] - hidden[:, :, 1]).abs().max() > 1e-3
    else:
        close(other, hidden, 1e-6)
    assert (hidden_and_losses(pair, before, [[anchor]])[0] - hidden).abs().amax(-1).min() > 1e-4


def test_features_of_the_anchor_and_after_it_are_not_seen(pair, monkeypatch):
    ids, anchor = random_ids(1, 20), 8
    hidden, _ = hidden_and_losses(pair, ids, [[anchor]])
    states = pair.target_states(ids, torch.zeros_like(ids))
    states[:, anchor:] += 1.0
    monkeypatch.setattr(pair, "target_states", lambda *_: states)
    close(hidden_and_losses(pair, ids, [[anchor]])[0], hidden, 1e-6)
    states[:, anchor - 1] += 1.0
    assert (hidden_and_losses(pair, ids, [[anchor]])[0] - hidden).abs().amax(-1).min() > 1e-4


def test_a_block_is_bidirectional_unless_its_layers_are_causal(tmp_path, monkeypatch):
    """What the last slot holds reaches slot 1, or does not."""
    target, ids = tiny_target(), random_ids(1, 20)
    embed = Target.embed

    def disturbed(self, block, config):
        embeds = embed(self, block, config).clone()
        embeds[:, -1] += 1.0
        return embeds

    for kind, reaches in (("full", True), ("sliding bidirectional", True), ("sliding causal", False)):
        trainer = make_trainer(tmp_path, tiny_drafter(target, **KINDS[kind]), target)
        hidden, _ = hidden_and_losses(trainer, ids, [[8]])
        with monkeypatch.context() as patch:
            patch.setattr(Target, "embed", disturbed)
            other, _ = hidden_and_losses(trainer, ids, [[8]])
        assert ((other - hidden)[:, :, 1].abs().max() > 1e-4) == reaches, kind
        assert (other - hidden)[:, :, -1].abs().max() > 1e-2


def test_neither_padding_nor_a_packed_neighbour_reaches_a_text(pair):
    short, long = random_ids(1, 9, seed=1), random_ids(1, 15, seed=2)
    alone = hidden_and_losses(pair, short, [[2, 7]]), hidden_and_losses(pair, long, [[4, 12]])
    padded = collate([row_of(short), row_of(long, first=1)])
    hidden, losses = hidden_and_losses(pair, padded["input_ids"], [[2, 7], [4, 12]], padded["document"])
    packed = collate([row_of(short, long)])
    packed = hidden_and_losses(pair, packed["input_ids"], [[2, 7, 13, 21]], packed["document"])
    # In a block that is drafted token by token, the slots beyond the end of a text hold what follows it.
    for place in range(2):
        close(losses[place], alone[place][1][0])
        close(packed[1][0, 2 * place : 2 * place + 2], alone[place][1][0])
    if pair.model.config.drafting == "parallel":
        close(hidden, torch.cat([alone[0][0], alone[1][0]]))
        close(packed[0], torch.cat([alone[0][0], alone[1][0]], dim=1))


def test_a_block_holds_the_anchor_and_the_mask_of_the_configuration_at_positions_from_zero(tmp_path):
    target = tiny_target()
    calls = []
    for mask in (MASK, 17):
        drafter = tiny_drafter(target, mask_token_id=mask)
        drafter.register_forward_pre_hook(lambda module, args, kwargs: calls.append(kwargs), with_kwargs=True)
        trainer = make_trainer(tmp_path, drafter, target)
        ids = torch.cat([random_ids(1, 7), random_ids(1, 5, seed=1)], dim=1)
        hidden_and_losses(trainer, ids, [[2, 9]], torch.tensor([[0] * 7 + [1] * 5]))
        blocks = [[int(ids[0, 2]), mask, mask, mask, int(ids[0, 9]), mask, mask, mask]]
        assert torch.equal(calls[-1]["noise_embeds"], target.get_input_embeddings()(torch.tensor(blocks)))
        assert calls[-1]["position_ids"].tolist() == [[*range(7), *range(5), 2, 3, 4, 5, 2, 3, 4, 5]]


@pytest.mark.parametrize("kind", ["sliding causal", "next-token sliding", "autoregressive", "input sliding"])
def test_all_attention_implementations_give_one_loss_and_one_gradient(tmp_path, kind):
    target = tiny_target()
    drafter, results = tiny_drafter(target, **KINDS[kind]), {}
    batch = collate([row_of(random_ids(1, 9), random_ids(1, 12)), row_of(random_ids(1, 14), first=2)])
    implementations = ("eager", "sdpa") if kind == "input sliding" else ("eager", "sdpa", BLOCKS)
    for implementation in implementations:
        drafter.set_attn_implementation(implementation)
        trainer = make_trainer(tmp_path, drafter, target)
        drafter.zero_grad()
        loss = loss_of(trainer, drafter, dict(batch))
        loss.backward()
        results[implementation] = loss, {name: p.grad.clone() for name, p in drafter.named_parameters()}
    for implementation in implementations[1:]:
        close(results[implementation], results["eager"])


# ---------------------------------------------------------------------------------------------------------- features
def test_features_are_the_outputs_of_the_named_layers_in_order(tmp_path):
    target, ids = tiny_target(), random_ids(2, 9)
    trainer = make_trainer(tmp_path, tiny_drafter(target, target_layer_ids=[2, 0]), target)
    states = target(ids, output_hidden_states=True).hidden_states
    features = trainer.target_states(ids, torch.zeros_like(ids))
    close(features, torch.cat([states[3], states[1]], dim=-1))
    assert not features.requires_grad


def test_only_the_tapped_layers_are_kept_and_no_hook_stays():
    target = Target(tiny_target())
    with target.capture([0, 2]) as taps:
        target.model(random_ids(1, 9))
        assert taps.states.keys() == {0, 2}
    assert not any(layer._forward_hooks for layer in target.layers)
    target.model(random_ids(1, 9, seed=1))
    assert taps.concatenate([0, 2]).shape == (1, 9, 64)


def test_a_hook_that_did_not_fire_is_reported():
    with Target(tiny_target()).capture([1]) as taps, pytest.raises(RuntimeError, match=r"layers \[1\]"):
        taps.concatenate([1])


def store_for(folder, drafter, target, texts, *, soft_labels: bool) -> FeatureStore:
    data = SimpleNamespace(texts=[text[0] for text in texts], lengths=[text.shape[1] for text in texts])
    tokenizer = word_tokenizer(chat_template="{{ messages }}")
    manifest = manifest_for(Target(target), drafter.config, tokenizer, data, soft_labels)
    return FeatureStore(folder, manifest, data.lengths)


@pytest.mark.parametrize("loss", ["ce", "kl"])
def test_kept_features_give_the_loss_and_the_gradient_of_computed_ones_to_the_last_bit(tmp_path, monkeypatch, loss):
    target = tiny_target()
    drafter, texts = tiny_drafter(target), [random_ids(1, n, seed=n) for n in (9, 12, 17)]
    batch = collate([row_of(*texts[:2]), row_of(texts[2], first=2)])
    store = store_for(tmp_path / "store", drafter, target, texts, soft_labels=loss == "kl")
    online = make_trainer(tmp_path, drafter, target, loss=loss)
    trainer = make_trainer(tmp_path, drafter, target, loss=loss, features=store)

    def value(trainer):
        drafter.zero_grad()
        found = loss_of(trainer, drafter, dict(batch))
        found.backward()
        return [found.detach(), *(p.grad.clone() for p in drafter.parameters())]

    expected = value(online)
    assert store.missing == 3
    first = value(trainer)
    assert store.missing == 0
    monkeypatch.setattr(trainer_module, "target_states", None)  # the target is not asked again
    second = value(trainer)
    for a, b, c in zip(expected, first, second, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)


def test_features_that_were_filled_beforehand_are_those_of_the_batch(tmp_path, monkeypatch):
    target = tiny_target()
    drafter, texts = tiny_drafter(target), [random_ids(1, n, seed=n) for n in (9, 12, 17)]
    batch = collate([row_of(*texts[:2]), row_of(texts[2], first=2)])
    online = make_trainer(tmp_path, drafter, target, loss="tv")
    store = store_for(tmp_path / "store", drafter, target, texts, soft_labels=True)
    assert list(fill(store, Target(target), [text[0] for text in texts])) == [0, 1, 2]
    trainer = make_trainer(tmp_path, drafter, target, loss="tv", features=store)
    states = online.target_states(batch["input_ids"], batch["document"])
    monkeypatch.setattr(trainer_module, "target_states", None)
    kept = trainer.target_states(batch["input_ids"], batch["document"])
    said = batch["document"] >= 0
    close(kept[said], states[said])
    assert kept[~said].eq(0).all()


# -------------------------------------------------------------------------------------------------------------- loss
WAYS = {
    "decay": ({"loss_decay": 2.0}, lambda q: [math.exp(-j / 2) for j in range(len(q))]),
    "power": ({"loss_base": 0.7}, lambda q: [0.7**j for j in range(len(q))]),
    "uniform": ({"loss_weights": "uniform"}, lambda q: [1.0] * len(q)),
    "d-pace": (
        {"loss_weights": "d-pace", "pace_floor": 0.3},
        lambda q: [sum(math.prod(0.7 * x + 0.3 for x in q[: m + 1]) for m in range(j, len(q))) for j in range(len(q))],
    ),
}


def naive_loss(trainer, batch, divergence: str, weights) -> float:
    """Sum over the slots with a label, from the logits of the whole target, over the sum of the decayed weights."""
    target, ids = trainer.target.model, batch["input_ids"]
    soft_labels = target(ids).logits.double().softmax(-1)
    hidden, _ = trainer.losses(trainer.model, batch)
    drafter = target.lm_head(hidden).double().softmax(-1)  # [B, N, K, V]
    slots = trainer.model.config.num_proposals
    total = mass = 0.0
    for b, n in torch.cartesian_prod(*map(torch.arange, batch["anchors"].shape)).tolist():
        labels = batch["labels"][b, n].tolist()
        anchor = int(batch["anchors"][b, n])
        count = sum(label != objective.IGNORE for label in labels)
        q = drafter[b, n, -slots:][:count]  # slot j says token anchor + j, which the target predicts one place before
        p = soft_labels[b, anchor : anchor + count]
        right = [float(q[j, labels[j]]) for j in range(count)]
        values = {
            "ce": [-math.log(x) for x in right],
            "kl": (p * (p.log() - q.log())).sum(-1).tolist(),
            "tv": (1 - torch.minimum(p, q).sum(-1)).tolist(),
        }[divergence]
        total += sum(w * x for w, x in zip(weights(right), values, strict=True))
        mass += sum(trainer.slot_weights[:count].tolist())
    return total / mass


@pytest.mark.parametrize("weights", WAYS)
@pytest.mark.parametrize("loss", ["ce", "kl", "tv"])
@pytest.mark.parametrize("kind", ["full", "next-token"])
@torch.no_grad()
def test_the_loss_is_the_objective_over_the_logits_of_the_target(tmp_path, loss, weights, kind):
    target = tiny_target()
    fields, naive_weights = WAYS[weights]
    drafter = tiny_drafter(target, **KINDS[kind])
    trainer = make_trainer(tmp_path, drafter, target, loss=loss, logits_chunk_size=7, **fields)
    batch = collate(rows_of(12, 12))
    batch["supervised"][0, 8:] = False
    trainer.add_blocks(batch, 0)
    found = loss_of(trainer, drafter, batch)
    assert found.item() == pytest.approx(naive_loss(trainer, batch, loss, naive_weights), rel=1e-4)


@pytest.mark.parametrize("tied", [False, True])
@torch.no_grad()
def test_the_logits_of_the_soft_labels_are_the_targets_own_with_the_final_norm_once(tmp_path, tied):
    target, ids = tiny_target(tie_word_embeddings=tied), random_ids(2, 9)
    trainer = make_trainer(tmp_path, tiny_drafter(target), target, loss="kl")
    states = trainer.target_states(ids, torch.zeros_like(ids))
    assert states.shape == (2, 9, 3 * 32)
    close(trainer.head.logits(states[..., -32:]), target(ids).logits, 1e-6)


@pytest.mark.parametrize(("block_size", "decay"), [(4, 2.0), (8, 4.0), (10, 5.0), (16, 7.0)])
@pytest.mark.parametrize("kind", ["full", "next-token"])
def test_the_decay_is_the_published_one_for_the_block_size_and_starts_at_the_first_slot_that_predicts(
    tmp_path, block_size, decay, kind
):
    target = tiny_target()
    num_predicted = block_size - 1
    if kind == "next-token":  # a block of one slot less predicts as many
        block_size -= 1
    drafter = tiny_drafter(target, block_size=block_size, **KINDS[kind])
    weights = make_trainer(tmp_path, drafter, target).slot_weights
    assert weights.tolist() == pytest.approx([math.exp(-j / decay) for j in range(num_predicted)])
    weights = make_trainer(tmp_path, drafter, target, loss_decay=3.0).slot_weights
    assert weights.tolist() == pytest.approx([math.exp(-j / 3.0) for j in range(num_predicted)])


def test_decay_and_base_are_two_ways_to_write_the_same_weights(tmp_path):
    for base, decay in ((0.8669, 7.0), (0.8187, 5.0), (0.7788, 4.0)):
        found = training_arguments(tmp_path, loss_base=base).decay_for(16)
        assert found == pytest.approx(decay, rel=1e-3)
        powers = torch.tensor([base**j for j in range(15)])
        close(objective.decay_weights(15, found), powers)
    assert training_arguments(tmp_path, loss_weights="uniform").decay_for(16) == math.inf


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_anchors": 0}, "num_anchors=0: at least 1"),
        ({"loss": "mse"}, r"loss='mse': one of \('ce', 'kl', 'tv'\)"),
        ({"anchors": "all"}, "anchors='all': one of"),
        ({"loss_weights": "equal"}, "loss_weights='equal': one of"),
        ({"loss_decay": 0.0}, "loss_decay=0.0: above 0"),
        ({"loss_base": 1.0}, "loss_base=1.0: between 0 and 1"),
        ({"loss_base": 0.8, "loss_decay": 4.0}, "loss_base=0.8: another way to write loss_decay"),
        ({"loss_base": 0.8, "loss_weights": "uniform"}, "loss_base=0.8: another way to write loss_decay"),
        ({"pace_floor": 0.0}, "pace_floor=0.0: between 0 and 1"),
        ({"logits_chunk_size": 0}, "logits_chunk_size=0: at least 1"),
        ({"ema_decay": 1.0}, "ema_decay=1.0: between 0 and 1"),
        ({"max_length": 1}, "max_length=1: at least 2"),
        ({"max_minutes": 0.0}, "max_minutes=0.0: above 0"),
    ],
)
def test_settings_of_the_objective_that_cannot_be_are_refused_by_name(tmp_path, fields, words):
    with pytest.raises(ValueError, match=words):
        training_arguments(tmp_path, **fields)


def test_slot_zero_carries_a_loss_with_next_token_labels_alone(tmp_path):
    target, ids = tiny_target(), random_ids(1, 12)
    for kind, idle in (("full", 1), ("next-token", 0)):
        trainer = make_trainer(tmp_path, tiny_drafter(target, **KINDS[kind]), target)
        slots = trainer.model.config.num_proposals
        batch = at(ids, [[3, 6]], num_predicted=slots)
        hidden = torch.randn(1, 2, 4, 32, requires_grad=True)
        trainer.block_losses(hidden, batch["labels"], batch["anchors"], torch.zeros(1, 12, 64)).sum().backward()
        used = hidden.grad.abs().sum(-1) > 0
        assert used.tolist() == [[[slot >= idle for slot in range(4)]] * 2], kind
        # A wrong token in slot j of one block costs its weight times as much as in the first.
        size = trainer._counts.slots[1]
        assert size.tolist() == [2] * slots


def test_a_shortlist_scores_and_labels_its_own_tokens_only(tmp_path):
    target = tiny_target()
    drafter = tiny_drafter(target, draft_vocab_size=3)
    drafter.draft_token_ids.copy_(torch.tensor([5, 9, 40]))
    trainer = make_trainer(tmp_path, drafter, target)
    states = torch.randn(2, 32)
    close(trainer.head.logits(states), target.lm_head(states)[:, [5, 9, 40]])
    assert trainer.draft_ids[[5, 9, 40]].tolist() == [0, 1, 2]
    assert (trainer.draft_ids == objective.IGNORE).sum() == VOCAB - 3
    ids = torch.tensor([[1, 1, 9, 5, 40, 7, 9, 9, 5]])
    batch = at(ids, [[2, 4]])
    hidden, losses = trainer.losses(drafter, batch)
    logits = target.lm_head(hidden)[0, :, 1:][..., [5, 9, 40]].log_softmax(-1)
    # Labels 5, 40, 7 and 7, 9, 9; no slot can propose 7.
    expected = [
        -logits[0, 0, 0] - math.exp(-0.5) * logits[0, 1, 2],
        -math.exp(-0.5) * logits[1, 1, 1] - math.exp(-1.0) * logits[1, 2, 1],
    ]
    close(losses[0], torch.stack(expected))
    assert trainer._counts.slots[1].tolist() == [2, 2, 2], "a token that is never proposed is a miss"


def test_a_token_that_the_shortlist_lacks_counts_as_one_that_is_never_right_for_pace_weights(tmp_path):
    target = tiny_target()
    drafter = tiny_drafter(target, draft_vocab_size=3)
    drafter.draft_token_ids.copy_(torch.tensor([5, 9, 40]))
    trainer = make_trainer(tmp_path, drafter, target, loss_weights="d-pace", pace_floor=0.3)
    batch = at(torch.tensor([[1, 1, 9, 5, 7, 40, 9, 9, 5]]), [[2]])
    with torch.no_grad():
        hidden, losses = trainer.losses(drafter, batch)
        q = target.lm_head(hidden)[0, 0, 1:][..., [5, 9, 40]].softmax(-1)
    right = [float(q[0, 0]), 0.0, float(q[2, 2])]
    weights = WAYS["d-pace"][1](right)
    assert losses.item() == pytest.approx(-weights[0] * math.log(right[0]) - weights[2] * math.log(right[2]), rel=1e-4)


def test_the_trainer_refuses_a_drafter_of_another_target(tmp_path):
    with pytest.raises(ValueError, match="hidden_size: the drafter has 32, the target 48"):
        make_trainer(tmp_path, tiny_drafter(tiny_target()), tiny_target(hidden_size=48))


# ------------------------------------------------------------------------------------------------- batch invariance
LENGTHS = (16, 9, 12, 5)


@pytest.mark.parametrize("loss", ["ce", "kl"])
def test_the_loss_of_a_batch_is_the_weighted_mean_of_its_texts_padded_or_packed(tmp_path, loss):
    target = tiny_target()
    drafter = tiny_drafter(target)
    trainer = make_trainer(tmp_path, drafter, target, num_anchors=3, loss=loss)
    rows = rows_of(*LENGTHS)

    def loss_and_weight(batch):
        trainer.add_blocks(batch, 0)
        return loss_of(trainer, drafter, batch), batch["weight"]

    alone = [loss_and_weight(collate([row])) for row in rows]
    expected = sum(loss * weight for loss, weight in alone) / sum(weight for _, weight in alone)
    packed = [row_of(*(row["input_ids"].unsqueeze(0) for row in rows))]
    for batch in map(collate, (rows, rows[::-1], packed)):
        batch["input_ids"][batch["document"] < 0] = 9  # what stands in the padding has no say
        found, weight = loss_and_weight(batch)
        close(found, expected)
        close(weight, sum(weight for _, weight in alone))


def one_step(folder, rows, batch_size: int, accumulation: int, **fields):
    """Weights and log after one step of plain gradient descent with all rows."""
    target = tiny_target()
    fields = {
        "optim": "sgd",
        "learning_rate": 0.1,
        "max_grad_norm": 1e9,
        "max_steps": 1,
        "per_device_train_batch_size": batch_size,
        "gradient_accumulation_steps": accumulation,
        **fields,
    }
    trainer = make_trainer(folder, tiny_drafter(target), target, rows, num_anchors=3, **fields)
    trainer.train()
    log = {name: value for entry in trainer.state.log_history for name, value in entry.items()}
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}, log


def test_accumulating_gradients_gives_the_step_of_one_batch(tmp_path):
    rows = rows_of(*LENGTHS)
    weights, log = one_step(tmp_path, rows, 4, 1)
    before = dict(tiny_drafter(tiny_target()).named_parameters())
    assert all((weights[name] - p).abs().max() > 1e-4 for name, p in before.items())
    for batch_size, accumulation in ((2, 2), (1, 4), (3, 2)):
        others, other_log = one_step(tmp_path, rows, batch_size, accumulation)
        close(others, weights)
        for name in ("loss", "grad_norm", "accuracy", "accepted", "accuracy_1"):
            assert other_log[name] == pytest.approx(log[name], rel=1e-4), name


@pytest.mark.parametrize(
    "fields", [{}, {"loss": "kl"}, {"loss": "tv"}, {"loss_weights": "d-pace"}], ids=lambda f: str(f)
)
def test_a_batch_without_an_anchor_costs_nothing_and_touches_every_weight(tmp_path, fields):
    target = tiny_target()
    drafter = tiny_drafter(target)
    trainer = make_trainer(tmp_path, drafter, target, **fields)
    batch = collate(rows_of(9, 4, prompt=9))
    assert not batch["supervised"].any()
    loss = loss_of(trainer, drafter, batch)
    loss.backward()
    assert loss.item() == 0.0
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in drafter.parameters())


def test_a_row_without_an_anchor_adds_nothing_to_its_batch(tmp_path):
    target = tiny_target()
    drafter = tiny_drafter(target)
    trainer = make_trainer(tmp_path, drafter, target)
    (row,) = rows_of(12)
    nothing = row_of(random_ids(1, 15, seed=5), first=1, prompt=15)
    close(loss_of(trainer, drafter, collate([row, nothing])), loss_of(trainer, drafter, collate([row])))
    assert loss_of(trainer, drafter, collate([row])).item() > 0.1


# ---------------------------------------------------------------------------------------------------- initialisation
def hidden_states(target, ids: torch.Tensor) -> torch.Tensor:
    """The drafter's context, from the hidden states that transformers itself reports for layers 1 and 2."""
    states = target(ids, output_hidden_states=True).hidden_states
    return torch.cat([states[2], states[3]], dim=-1)


def test_a_drafter_starts_as_the_last_layers_of_its_target():
    target = tiny_target()
    drafter = tiny_drafter(target)
    initialise_from_target(drafter, Target(target), random_ids(2, 16))
    for layer, source in zip(drafter.layers, target.model.layers[-2:], strict=True):
        for name, tensor in source.state_dict().items():
            assert torch.equal(layer.state_dict()[name], tensor), name
    assert torch.equal(drafter.norm.weight, target.model.norm.weight)
    norms = [layer.input_layernorm.weight for layer in target.model.layers[-2:]]
    close(drafter.hidden_norm.weight, (norms[0] + norms[1]) / 2)
    with torch.no_grad():
        context = hidden_states(target, random_ids(2, 16, seed=1))
        fused = drafter.fc(context)
    first, last = (F.cosine_similarity(fused, tap, dim=-1).mean() for tap in context.chunk(2, -1))
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


def test_a_target_that_computes_otherwise_is_not_copied():
    target = tiny_target("llama", hidden_act="gelu")
    drafter = tiny_drafter(target, hidden_act="silu", qk_norm=False)
    with pytest.raises(ValueError, match="mlp of the target's layer computes something else"):
        initialise_from_target(drafter, Target(target), random_ids(2, 8))


# ---------------------------------------------------------------------------------------------------------- training
def test_a_few_steps_lower_the_loss_and_leave_the_target_alone(tmp_path):
    target = tiny_target()
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    torch.manual_seed(0)
    drafter = DFlashDraftModel(tiny_drafter(target).config)
    rows = [row_of(random_ids(1, 16), first=i) for i in range(4)]
    trainer = make_trainer(tmp_path, drafter, target, rows, max_steps=10, learning_rate=1e-2, num_anchors=50)
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(logged) == 10
    assert logged[-1]["loss"] < 0.5 * logged[0]["loss"], logged
    assert all(torch.equal(tensor, before[name]) for name, tensor in target.state_dict().items())
    assert not any(p.requires_grad or p.grad is not None for p in target.parameters())
    assert logged[-1]["accuracy"] > logged[0]["accuracy"]
    for entry in logged:
        assert 0 <= entry["accepted"] <= 3
        assert all(0 <= entry[name] <= 1 for name in ("accuracy", "accuracy_1", "accuracy_2", "accuracy_3"))
        assert "accuracy_4" not in entry and "accuracy_0" not in entry
        assert entry["accepted"] <= 3 * entry["accuracy_1"]
        for phase in progress.PHASES:
            assert entry[f"ms_{phase}"] > 0, phase
        assert entry["tokens_per_second"] > 0
        assert 0.05 < entry["memory_gb"] < 500  # torch alone takes the former


def test_every_tensor_of_the_drafter_learns(pair):
    loss_of(pair, pair.model, collate(rows_of(16, 16))).backward()
    idle = [name for name, p in pair.model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert not idle


def test_a_grid_of_anchors_is_the_same_at_each_step(tmp_path):
    target = tiny_target()
    trainer = make_trainer(tmp_path, tiny_drafter(target), target, anchors="grid")
    for step in (0, 7):
        batch = collate(rows_of(16))
        trainer.add_blocks(batch, step)
        assert batch["anchors"].tolist() == [[2, 6, 10, 14]]


def test_at_most_the_asked_number_of_logits_exists_at_once(tmp_path):
    target, sizes = tiny_target(), []
    trainer = make_trainer(tmp_path, tiny_drafter(target), target, num_anchors=10, logits_chunk_size=7)
    logits = trainer.head.logits
    trainer.head.logits = lambda hidden: (sizes.append(hidden.shape[:-1].numel()), logits(hidden))[1]
    loss_of(trainer, trainer.model, collate(rows_of(16, 16))).backward()
    assert sizes == [6] * 10  # blocks of three slots that predict


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_loss_that_is_not_finite_stops_with_step_and_line(tmp_path, accumulation):
    target = tiny_target()
    drafter = tiny_drafter(target)
    trainer = make_trainer(
        tmp_path,
        drafter,
        target,
        rows_of(9, 12, 10, 11),
        per_device_train_batch_size=4 // accumulation,
        gradient_accumulation_steps=accumulation,
    )
    states = trainer.target_states
    trainer.target_states = lambda ids, document: states(ids, document).masked_fill(
        (document == 2).unsqueeze(-1), math.nan if trainer.state.global_step == 1 else 0.5
    )
    with pytest.raises(FloatingPointError, match=r"step 2: the loss is nan on line 21 \(1 of 4 rows"):
        trainer.train()
    assert all(p.isfinite().all() for p in drafter.parameters())


@pytest.mark.parametrize("strategy", ["group_by_length", "random"])
def test_seed_epoch_and_step_decide_the_order_of_the_rows_and_their_anchors(tmp_path, strategy):
    target, rows = tiny_target(), rows_of(*range(26, 34))
    runs = []
    for seed in (1, 1, 2):
        fields = {"max_steps": 4, "per_device_train_batch_size": 4, "seed": seed, "train_sampling_strategy": strategy}
        trainer = make_trainer(tmp_path, tiny_drafter(target), target, rows, **fields)
        torch.rand(len(runs))  # the global generator has no say
        losses, order, anchors = trainer.losses, [], set()

        def noting(model, batch, losses=losses, order=order, anchors=anchors):
            documents = batch["document"][:, 0].tolist()
            order.extend(documents)
            anchors.update(zip(documents, map(tuple, batch["anchors"].tolist()), strict=True))
            return losses(model, batch)

        trainer.losses = noting
        trainer.train()
        assert sorted(order[:8]) == sorted(order[8:]) == list(range(8)), "every row once in each epoch"
        assert order[:8] != order[8:]
        assert len(anchors) == 16, "other anchors at the second visit"
        runs.append((order, anchors))
    assert runs[0] == runs[1]
    assert runs[0][0] != runs[2][0] and not runs[0][1] & runs[2][1]


def test_the_clock_ends_the_training(tmp_path):
    target = tiny_target()
    trainer = make_trainer(tmp_path, tiny_drafter(target), target, rows_of(*[12] * 4), max_steps=50, max_minutes=1e-7)
    trainer.train()
    assert trainer.state.global_step == 1
    assert trainer.state.log_history[0]["minutes"] >= 0


def test_what_was_trained_when_the_clock_ends_is_in_a_checkpoint_and_in_the_log(tmp_path):
    target = tiny_target()
    for strategy in ("steps", "no"):
        fields = {"max_minutes": 1e-7, "save_strategy": strategy, "save_steps": 40, "logging_steps": 40}
        trainer = make_trainer(tmp_path / strategy, tiny_drafter(target), target, rows_of(*[12] * 4), **fields)
        trainer.train()
        assert [entry["step"] for entry in trainer.state.log_history if "loss" in entry] == [1]
        checkpoint = tmp_path / strategy / "checkpoint-1"
        assert checkpoint.exists() == (strategy == "steps")
    weights = DFlashDraftModel.from_pretrained(tmp_path / "steps" / "checkpoint-1").state_dict()
    assert set(weights) == set(trainer.model.state_dict())


def test_the_learning_rate_follows_whichever_is_further_the_steps_or_the_clock(tmp_path):
    target = tiny_target()
    trainer = make_trainer(tmp_path, tiny_drafter(target), target, max_minutes=10, learning_rate=1.0, warmup_steps=0.1)
    trainer.create_optimizer_and_scheduler(num_training_steps=100)
    factor, *others = trainer.lr_scheduler.lr_lambdas
    assert set(others) == {factor}

    def cosine(progress):
        return 0.5 + 0.5 * math.cos(math.pi * (progress - 0.1) / 0.9)

    for step, minutes, expected in [
        (0, 0.0, 1e-3 / 0.101),
        (5, 0.0, 0.051 / 0.101),
        (5, 0.8, 0.081 / 0.101),
        (40, 1.0, cosine(0.4)),
        (40, 7.0, cosine(0.7)),
        (1, 10.0, 0.0),
        (1, 12.0, 0.0),
        (100, 1.0, 0.0),
    ]:
        trainer.budget._elapsed = minutes
        assert factor(step) == pytest.approx(expected, abs=1e-9), (step, minutes)


def test_a_clock_that_has_run_out_is_refused_at_a_resume():
    budget = progress.TimeBudget(2.0)
    with pytest.raises(ValueError, match=r"max_minutes=2.0: used up, 2.5 came before"):
        budget.on_train_begin(None, SimpleNamespace(log_history=[{"minutes": 2.5}]), None)


def test_an_evaluation_does_not_count_as_training(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    target = tiny_target()
    trainer = make_trainer(
        tmp_path, tiny_drafter(target), target, rows_of(12, 12), eval_rows=rows_of(12), max_steps=1, max_minutes=10
    )
    trainer.budget.on_train_begin(None, trainer.state, None)
    accuracy = trainer._accuracy
    monkeypatch.setattr(trainer, "_accuracy", lambda drafter: (now.__setitem__(0, 300.0), accuracy(drafter))[1])
    now[0] = 60.0
    trainer.evaluate()
    now[0] += 30.0
    trainer.budget.on_step_end(trainer.args, trainer.state, SimpleNamespace())
    assert trainer.budget.elapsed() == pytest.approx(1.5)


def test_minutes_before_a_resume_count():
    budget = progress.TimeBudget(10.0)
    state = SimpleNamespace(log_history=[{"minutes": 3.0}, {"minutes": 6.0}, {"eval_tau": 2.0}])
    budget.on_train_begin(None, state, None)
    assert budget.progress() == pytest.approx(0.6, abs=0.01)
    budget._start = time.monotonic() - 4.1 * 60
    control = SimpleNamespace(should_training_stop=False)
    budget.on_step_end(SimpleNamespace(save_strategy="no"), state, control)
    assert control.should_training_stop


def test_all_processes_follow_the_clock_of_the_first():
    budget = progress.TimeBudget(10.0, lambda own: 11.0)
    state, control = SimpleNamespace(log_history=[]), SimpleNamespace(should_training_stop=False)
    budget.on_train_begin(None, state, None)
    budget.on_step_end(SimpleNamespace(save_strategy="no"), state, control)
    assert control.should_training_stop and budget.elapsed() == 11.0


def test_the_bar_shows_step_and_latest_figures_and_ends(tmp_path, monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr(progress, "Console", lambda **_: Console(file=screen, force_terminal=True, width=200))
    target = tiny_target()
    trainer = make_trainer(tmp_path, tiny_drafter(target), target, rows_of(12, 12), max_steps=2, disable_tqdm=False)
    assert not any(isinstance(c, ProgressCallback) for c in trainer.callback_handler.callbacks)
    trainer.train()
    (bar,) = [c.bar for c in trainer.callback_handler.callbacks if isinstance(c, progress.RichProgress)]
    assert bar.finished and not bar.live.is_started
    loss = trainer.state.log_history[-2]["loss"]
    last = screen.getvalue().rsplit("step 2", 1)[1]
    assert f"loss {loss:.3f}" in last and "accepted" in last


def test_where_no_bar_is_drawn_each_log_line_is_one_line_at_once(tmp_path, monkeypatch):
    screen, seen = io.StringIO(), []
    monkeypatch.setattr(progress, "Console", lambda **_: Console(file=screen, force_terminal=False, width=200))
    target = tiny_target()
    trainer = make_trainer(
        tmp_path, tiny_drafter(target), target, rows_of(12, 12), max_steps=2, logging_steps=1, disable_tqdm=False
    )
    step = trainer.training_step
    monkeypatch.setattr(trainer, "training_step", lambda *args: (seen.append(screen.getvalue()), step(*args))[1])
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert seen[1].startswith(f"step 1  loss {losses[0]:.3f}")
    assert screen.getvalue().splitlines()[1].startswith(f"step 2  loss {losses[1]:.3f}")
    assert all(line.startswith("step ") for line in screen.getvalue().splitlines()), "no bar, not even at the end"


def test_a_training_that_fails_gives_the_terminal_back(tmp_path, monkeypatch):
    monkeypatch.setattr(progress, "Console", lambda **_: Console(file=io.StringIO(), force_terminal=True, width=200))
    target = tiny_target()
    trainer = make_trainer(tmp_path, tiny_drafter(target), target, rows_of(12, 12), max_steps=2, disable_tqdm=False)
    monkeypatch.setattr(trainer, "training_step", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert not trainer.progress.bar.live.is_started


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"eval_strategy": "steps", "eval_steps": 1}, "eval_strategy='steps' needs something to measure on"),
        ({"save_strategy": "best", "metric_for_best_model": "tau"}, "save_strategy='best'"),
        ({"max_minutes": 1, "lr_scheduler_type": "constant"}, "lr_scheduler_type='constant'"),
        ({"max_minutes": 1, "warmup_steps": 20}, "warmup_steps=20"),
        ({"push_to_hub": True}, "push_to_hub=True"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor=0.1"),
        ({"bf16_full_eval": True}, "bf16_full_eval=True"),
    ],
)
def test_settings_of_the_trainer_that_are_not_honoured_are_refused(tmp_path, fields, words):
    target = tiny_target()
    with pytest.raises(ValueError, match=words):
        make_trainer(tmp_path, tiny_drafter(target), target, **fields)


# ---------------------------------------------------------------------------------------------------------- measuring
def test_slots_and_right_prefixes_are_counted_as_by_a_loop():
    generator = torch.Generator().manual_seed(0)
    counts, right, labelled_slots, prefixes = Counts(3, torch.device("cpu")), [0] * 3, [0] * 3, []
    for _ in range(4):
        logits = torch.randn(5, 3, 4, generator=generator)
        right_ones = torch.rand(5, 3, generator=generator) < 0.6
        wanted = torch.where(right_ones, logits.argmax(-1), torch.randint(0, 4, (5, 3), generator=generator))
        labelled = torch.arange(3) < torch.randint(0, 4, (5, 1), generator=generator)
        counts.add(logits, wanted.masked_fill(~labelled, objective.IGNORE), labelled)
        for best, want, has in zip(logits.argmax(-1).tolist(), wanted.tolist(), labelled.tolist(), strict=True):
            for j in range(3):
                right[j] += has[j] and best[j] == want[j]
                labelled_slots[j] += has[j]
            if all(has):
                prefixes.append([b == w for b, w in zip(best, want, strict=True)] + [False])
    summary = counts.summary(SimpleNamespace(reduce=lambda tensor, reduction: tensor))
    assert summary == {
        "accuracy": round(sum(right) / sum(labelled_slots), 4),
        "accepted": round(sum(block.index(False) for block in prefixes) / len(prefixes), 4),
        **{f"accuracy_{j + 1}": round(right[j] / labelled_slots[j], 4) for j in range(3)},
    }
    assert 0 < summary["accepted"] < 3


def test_processes_add_up_their_counts_before_they_divide():
    """One process has a block that is right, the other three that are not: a quarter is right, not half."""
    logits = F.one_hot(torch.tensor([[1, 2]]), 4).float()
    right, wrong = Counts(2, torch.device("cpu")), Counts(2, torch.device("cpu"))
    right.add(logits, torch.tensor([[1, 2]]), torch.ones(1, 2).bool())
    wrong.add(logits.expand(3, -1, -1), torch.tensor([[3, 3]] * 3), torch.ones(3, 2).bool())
    reduced = []

    def reduce(tensor, reduction):
        assert reduction == "sum" and tensor.data_ptr() not in reduced, "each tensor is reduced once"
        reduced.append(tensor.data_ptr())
        return tensor + (wrong.slots if tensor.data_ptr() == right.slots.data_ptr() else wrong.blocks)

    summary = right.summary(SimpleNamespace(reduce=reduce))
    assert summary == {"accuracy": 0.25, "accepted": 0.5, "accuracy_1": 0.25, "accuracy_2": 0.25}


def test_evaluation_measures_tau_by_the_real_loop(tmp_path):
    target = tiny_target()
    prompts = [random_ids(1, 6), random_ids(1, 4, seed=3)]
    trainer = make_trainer(tmp_path, tiny_drafter(target), target, eval_max_new_tokens=9, eval_prompts=prompts)
    trainer.model.train()
    tau = trainer.evaluate()["eval_tau"]
    assert trainer.model.training
    rounds = 0
    for prompt in prompts:
        plain(target, prompt, max_new_tokens=9, do_sample=False, custom_generate=custom_generate(trainer.model))
        rounds += len(trainer.model.last_statistics.rounds)
    assert tau == round(16 / rounds, 4)


def test_processes_add_up_tokens_and_rounds_before_they_divide(tmp_path, monkeypatch):
    target = tiny_target()
    trainer = make_trainer(
        tmp_path, tiny_drafter(target), target, eval_max_new_tokens=9, eval_prompts=[random_ids(1, 6)]
    )
    mine = trainer.evaluate()["eval_tau"]
    rounds = len(decode_all(trainer.target, trainer.model, trainer.eval_prompts, max_new_tokens=9).rounds)
    monkeypatch.setattr(trainer.accelerator, "reduce", lambda sums, reduction: sums + torch.tensor([30, 5]))
    assert mine == round(8 / rounds, 4)
    assert trainer.evaluate()["eval_tau"] == round((8 + 30) / (rounds + 5), 4)


def test_evaluation_measures_the_drafter_that_is_saved_and_leaves_the_trained_one_alone(tmp_path, monkeypatch):
    target, measured = tiny_target().to(torch.bfloat16), []
    trainer = make_trainer(
        tmp_path, tiny_drafter(target).float(), target, eval_rows=rows_of(12), eval_prompts=[random_ids(1, 6)]
    )
    for name in ("losses", "_tau"):
        found = getattr(trainer, name)
        noting = lambda drafter, *args, found=found: (measured.append(drafter), found(drafter, *args))[1]  # noqa: E731
        monkeypatch.setattr(trainer, name, noting)
    trainer.model.train()
    trainer.evaluate()
    best = DFlashDraftModel.from_pretrained(tmp_path / "best", dtype="auto")
    for drafter in measured:
        assert drafter.dtype == best.dtype == torch.bfloat16 and not drafter.training
        close(dict(drafter.named_parameters()), dict(best.named_parameters()), 0)
    assert len(measured) == 2 and trainer.model.dtype == torch.float32 and trainer.model.training


def test_what_is_measured_is_free_of_autocast_and_draws_no_random_number(tmp_path):
    """Under bf16, Accelerate wraps the forward that is trained; of a float32 target, the drafter is float32."""
    target = tiny_target()
    trainer = make_trainer(tmp_path, tiny_drafter(target), target, rows_of(12), max_steps=1, bf16=True)
    trainer.train()
    state = torch.get_rng_state()
    saved = trainer.saved_drafter()
    assert torch.equal(torch.get_rng_state(), state)
    saved.save_pretrained(tmp_path / "saved")
    loaded = DFlashDraftModel.from_pretrained(tmp_path / "saved").eval()
    inputs = {
        "noise_embeds": torch.randn(1, 4, 32),
        "context_hidden_states": torch.randn(1, 6, 64),
        "position_ids": torch.arange(10)[None],
    }
    with torch.no_grad():
        found = saved(**inputs).last_hidden_state
        assert found.dtype == torch.float32 and torch.equal(found, loaded(**inputs).last_hidden_state)


def test_evaluation_measures_the_held_out_rows_at_the_same_anchors_each_time(tmp_path):
    target = tiny_target()
    rows = rows_of(30, 12, 25)
    trainer = make_trainer(tmp_path, tiny_drafter(target), target, eval_rows=rows, num_anchors=3, logging_steps=100)
    counted = trainer._counts
    first = trainer.evaluate()
    trainer.state.global_step = 7
    assert trainer.evaluate() == first
    assert trainer._counts is counted and counted.slots.sum() == 0, "what the training counts is left alone"
    batch = collate(rows)
    trainer.add_blocks(batch, -1)
    with torch.no_grad():
        loss = loss_of(trainer, trainer.model, batch)
    assert first["eval_loss"] == pytest.approx(loss.item(), abs=1e-4)
    assert {"eval_accuracy", "eval_accepted", "eval_accuracy_1", "eval_accuracy_3"} < first.keys()
    trainer.add_blocks(other := collate(rows), 0)
    assert not torch.equal(other["anchors"], batch["anchors"])


def test_the_drafter_with_the_best_tau_so_far_is_kept(tmp_path, monkeypatch):
    target = tiny_target()
    trainer = make_trainer(tmp_path, tiny_drafter(target), target, eval_prompts=[random_ids(1, 4)])
    best = {}
    for i, (tau, kept) in enumerate([(1.5, 0), (2.5, 1), (2.0, 1), (2.5, 1), (2.6, 4)]):
        with torch.no_grad():
            trainer.model.norm.weight.fill_(i)
        monkeypatch.setattr(trainer, "_tau", lambda drafter, tau=tau: {"tau": tau})
        trainer.evaluate()
        best = DFlashDraftModel.from_pretrained(tmp_path / "best")
        assert best.norm.weight.eq(kept).all(), i
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["best"]


def test_the_average_is_what_is_measured_and_the_training_goes_on_from_the_weights(tmp_path, monkeypatch):
    target = tiny_target()
    rows = rows_of(12, 12)
    fields = {"ema_decay": 0.5, "max_steps": 3, "eval_strategy": "steps", "eval_steps": 1, "learning_rate": 1e-2}
    trainer = make_trainer(tmp_path, tiny_drafter(target), target, rows, eval_rows=rows, **fields)
    seen, accuracy = [], trainer._accuracy
    monkeypatch.setattr(
        trainer, "_accuracy", lambda drafter: (seen.append(copy.deepcopy(drafter.state_dict())), accuracy(drafter))[1]
    )
    naive, steps = dict(tiny_drafter(target).state_dict()), []
    before_step = trainer.average.update

    def update():
        steps.append({name: p.detach().clone() for name, p in trainer.model.named_parameters()})
        before_step()

    monkeypatch.setattr(trainer.average, "update", update)
    trainer.train()
    assert len(steps) == len(seen) == 3
    for t, weights in enumerate(steps):
        decay = min(0.5, (1 + t) / (10 + t))
        naive = {name: decay * naive[name] + (1 - decay) * weights[name] for name in weights}
        close(seen[t], naive)
        assert (naive["fc.weight"] - weights["fc.weight"]).abs().max() > 1e-4
    straight = make_trainer(tmp_path, tiny_drafter(target), target, rows, max_steps=3, learning_rate=1e-2)
    straight.train()
    close(steps[-1], dict(straight.model.named_parameters()), 1e-7)
    close(steps[-1], dict(trainer.model.named_parameters()), 0)


def test_evaluation_draws_the_curves(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(trainer_module, "is_matplotlib_available", lambda: True)
    monkeypatch.setattr(trainer_module, "plot_curves", lambda log, path: drawn.append((log, path)))
    target = tiny_target()
    trainer = make_trainer(tmp_path, tiny_drafter(target), target, rows_of(12), eval_rows=rows_of(12), max_steps=1)
    trainer.train()
    trainer.evaluate()
    assert drawn == [(trainer.state.log_history, tmp_path / "curves.png")]
    assert [name for entry in drawn[0][0] for name in ("loss", "eval_loss") if name in entry] == ["loss", "eval_loss"]


class Wrapped(nn.Module):
    """What a launcher may put around the drafter."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


def test_a_wrapped_drafter_gives_the_loss_of_the_drafter(tmp_path):
    target = tiny_target()
    trainer = make_trainer(tmp_path, tiny_drafter(target), target)
    batch = collate(rows_of(12))
    close(loss_of(trainer, Wrapped(trainer.model), dict(batch)), loss_of(trainer, trainer.model, dict(batch)))


@pytest.mark.parametrize(
    "fields",
    [
        {"proposal_head": "markov", "proposal_rank": 2},
        {"confidence_head": "hidden"},
        {"conv_kernel_size": 2, "conv_group_size": 16},
        {"own_embeddings": True},
        {"own_head": True},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_drafters_with_parts_that_are_not_trained_here_are_refused_by_name(fields, tmp_path):
    target = tiny_target()
    with pytest.raises(ValueError, match=f"{next(iter(fields))}=.*not trained here"):
        make_trainer(tmp_path, tiny_drafter(target, **fields), target)
