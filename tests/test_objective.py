"""The objective against loops over rows, blocks and slots."""

import math
import random

import pytest
import torch

from dflash_hf.objective import (
    IGNORE,
    block_labels,
    sample_anchors,
    slot_hits,
    slot_weights,
    weighted_cross_entropy,
)


def random_batch(seed: int):
    """Random text, supervision, anchors and block size."""
    draw = random.Random(seed)
    batch, length, num_blocks = draw.randint(1, 3), draw.randint(2, 12), draw.randint(1, 4)
    ids = torch.tensor([[draw.randrange(100) for _ in range(length)] for _ in range(batch)])
    supervised = torch.tensor([[draw.random() < 0.7 for _ in range(length)] for _ in range(batch)])
    anchors = torch.tensor([[draw.randrange(length) for _ in range(num_blocks)] for _ in range(batch)])
    keep = torch.tensor([[draw.random() < 0.8 for _ in range(num_blocks)] for _ in range(batch)])
    return ids, supervised, anchors, keep, draw.randint(2, 6)


# ---------------------------------------------------------------------------------------------------------- labels
def naive_labels(ids, supervised, anchors, keep, block_size):
    rows = []
    for b in range(len(ids)):
        blocks = []
        for a, kept in zip(anchors[b].tolist(), keep[b].tolist(), strict=True):
            block = []
            for slot in range(1, block_size):
                index = a + slot
                said = kept and index < ids.shape[1] and bool(supervised[b, index])
                block.append(int(ids[b, index]) if said else IGNORE)
            blocks.append(block)
        rows.append(blocks)
    return torch.tensor(rows)


@pytest.mark.parametrize("seed", range(30))
def test_slot_i_should_say_token_anchor_plus_i(seed):
    batch = random_batch(seed)
    assert torch.equal(block_labels(*batch), naive_labels(*batch))


def test_labels_of_one_block_in_plain_sight():
    ids = torch.arange(10, 20).unsqueeze(0)
    everything = torch.ones(1, 10, dtype=torch.bool)
    labels = block_labels(ids, everything, torch.tensor([[3, 8]]), torch.tensor([[True, True]]), 4)
    assert labels.tolist() == [[[14, 15, 16], [19, IGNORE, IGNORE]]]


# --------------------------------------------------------------------------------------------------------- weights
@pytest.mark.parametrize(
    ("block_size", "decay", "published"),
    [
        (8, 4, [1, 0.779, 0.607, 0.472, 0.368, 0.287, 0.223]),
        (10, 5, [1, 0.819, 0.670, 0.549, 0.449, 0.368, 0.301, 0.247, 0.202]),
        (
            16,
            7,
            [1, 0.867, 0.751, 0.651, 0.565, 0.490, 0.424, 0.368, 0.319, 0.276, 0.240, 0.208, 0.180, 0.156, 0.135],
        ),
    ],
)
def test_weights_are_the_published_ones_and_start_at_one(block_size, decay, published):
    weights = slot_weights(block_size, decay)
    assert weights[0] == 1.0
    torch.testing.assert_close(weights, torch.tensor(published), atol=6e-4, rtol=0)


def test_without_decay_all_slots_weigh_the_same():
    assert slot_weights(5, None).tolist() == [1.0] * 4


# ------------------------------------------------------------------------------------------------------------ loss
def naive_loss(logits, labels, weights):
    total = norm = 0.0
    for block, said in zip(logits.flatten(0, -3).tolist(), labels.flatten(0, -2).tolist(), strict=True):
        for scores, label, weight in zip(block, said, weights.tolist(), strict=True):
            if label == IGNORE:
                continue
            total += weight * (math.log(sum(math.exp(x) for x in scores)) - scores[label])
            norm += weight
    return total / norm if norm else 0.0


def random_slots(seed: int, batch: int = 3):
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(batch, 2, 4, 7, generator=generator)
    labels = torch.randint(0, 7, (batch, 2, 4), generator=generator)
    hidden = torch.rand(batch, 2, 4, generator=generator) < 0.3
    return logits, labels.masked_fill(hidden, IGNORE)


@pytest.mark.parametrize("decay", [None, 2.0])
@pytest.mark.parametrize("seed", range(5))
def test_the_loss_is_the_weighted_mean_over_labelled_slots(seed, decay):
    logits, labels = random_slots(seed)
    weights = slot_weights(5, decay)
    loss = weighted_cross_entropy(logits, labels, weights)
    assert loss.item() == pytest.approx(naive_loss(logits, labels, weights), rel=1e-5)


def test_the_loss_of_a_batch_is_the_weighted_mean_of_its_rows():
    logits, labels = random_slots(0)
    weights = slot_weights(5, 2.0)
    mass = torch.stack([(weights * (row != IGNORE)).sum() for row in labels])
    rows = torch.stack([weighted_cross_entropy(x, y, weights) for x, y in zip(logits, labels, strict=True)])
    torch.testing.assert_close(weighted_cross_entropy(logits, labels, weights), (mass * rows).sum() / mass.sum())


def test_a_batch_without_labels_costs_nothing_and_has_a_gradient_of_zero():
    logits = torch.randn(2, 3, 4, 7, requires_grad=True)
    loss = weighted_cross_entropy(logits, torch.full((2, 3, 4), IGNORE), slot_weights(5, 4.0))
    loss.backward()
    assert loss.item() == 0.0
    assert torch.equal(logits.grad, torch.zeros_like(logits))


def test_a_slot_without_label_has_no_gradient():
    logits, labels = random_slots(1)
    logits.requires_grad_()
    weighted_cross_entropy(logits, labels, slot_weights(5, 4.0)).backward()
    assert torch.equal(logits.grad.abs().sum(-1) > 0, labels != IGNORE)


def test_the_loss_is_computed_in_float32():
    logits, labels = random_slots(2)
    loss = weighted_cross_entropy(logits.bfloat16(), labels, slot_weights(5, 4.0))
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(naive_loss(logits.bfloat16().float(), labels, slot_weights(5, 4.0)), rel=1e-5)


# --------------------------------------------------------------------------------------------------------- anchors
def valid_anchors(supervised: list[bool]) -> set[int]:
    return {i for i in range(len(supervised) - 1) if supervised[i] and supervised[i + 1]}


@pytest.mark.parametrize("num_anchors", [1, 3, 50])
@pytest.mark.parametrize("seed", range(10))
def test_anchors_are_distinct_valid_and_ascending(seed, num_anchors):
    supervised = random_batch(seed)[1]
    anchors, keep = sample_anchors(supervised, num_anchors, torch.Generator().manual_seed(seed))
    possible = [valid_anchors(row) for row in supervised.tolist()]
    assert anchors.shape == keep.shape == (len(supervised), max(1, min(num_anchors, max(map(len, possible)))))
    for row, kept, valid in zip(anchors.tolist(), keep.tolist(), possible, strict=True):
        chosen = [a for a, k in zip(row, kept, strict=True) if k]
        assert kept == sorted(kept, reverse=True), "padding blocks come last"
        assert chosen == sorted(set(chosen)) and set(chosen) <= valid
        assert len(chosen) == min(num_anchors, len(valid))
        assert all(a == 0 for a, k in zip(row, kept, strict=True) if not k)


def test_a_row_without_an_anchor_gets_a_block_of_padding():
    anchors, keep = sample_anchors(torch.tensor([[True, False, True], [False, True, True]]), 4)
    assert (anchors.tolist(), keep.tolist()) == ([[0], [1]], [[False], [True]])


def test_every_anchor_is_drawn_equally_often():
    supervised = torch.tensor([True, True, True, False, True, True, True, True, False, True, True])
    valid = sorted(valid_anchors(supervised.tolist()))
    draws, num_anchors = 4000, 3
    anchors, keep = sample_anchors(supervised.expand(draws, -1), num_anchors, torch.Generator().manual_seed(0))
    assert keep.all()
    counts = torch.bincount(anchors.flatten(), minlength=len(supervised))[valid].double()
    expected = draws * num_anchors / len(valid)
    # Without replacement the statistic is (n - 1) / (n - k) smaller than a chi-square of n - 1 degrees.
    statistic = ((counts - expected) ** 2 / expected).sum() * (len(valid) - 1) / (len(valid) - num_anchors)
    assert statistic < 20.5, counts  # 0.1 % of a chi-square with 5 degrees
    pairs = torch.tensor([a * 20 + b for a, b, _ in anchors.tolist()]).unique()
    assert len(pairs) == 10  # (first, second) of three out of six, in order: all of them occur


def test_the_generator_decides_the_draw():
    supervised = torch.ones(2, 50, dtype=torch.bool)
    first, again, other = (sample_anchors(supervised, 5, torch.Generator().manual_seed(s))[0] for s in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert not torch.equal(first[0], first[1])


# ------------------------------------------------------------------------------------------------------------ hits
@pytest.mark.parametrize("seed", range(5))
def test_hits_and_the_right_prefix_are_those_of_a_loop(seed):
    logits, labels = random_slots(seed)
    best = logits.argmax(-1)
    right = torch.rand(labels.shape, generator=torch.Generator().manual_seed(seed)) < 0.6
    labels = torch.where(right & (labels != IGNORE), best, labels)
    hits, leading = slot_hits(logits, labels)
    for index in torch.cartesian_prod(torch.arange(3), torch.arange(2)).tolist():
        block = [int(b) == int(c) for b, c in zip(best[tuple(index)], labels[tuple(index)], strict=True)]
        assert hits[tuple(index)].tolist() == block
        assert leading[tuple(index)] == (block + [False]).index(False)
