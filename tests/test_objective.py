"""The objective against loops over rows, texts, blocks and slots."""

import itertools
import math
import random

import pytest
import torch
from torch.nn import functional as F

from dflash_hf.objective import (
    IGNORE,
    block_labels,
    cross_entropy,
    decay_weights,
    draw_anchors,
    kl_divergence,
    pace_weights,
    slot_hits,
    sum_in_chunks,
    total_variation,
    valid_anchors,
)


# One of each: a plain row, a row of three packed texts, a row without anything to predict, and padding.
SUPERVISED = torch.tensor(
    [
        [0, 0, 1, 1, 1, 1, 1, 1, 0, 1, 1, 0],
        [0, 1, 1, 1, 0, 1, 1, 1, 1, 1, 1, 1],
        [1, 0, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0],
    ]
).bool()
DOCUMENT = torch.tensor(
    [
        [4] * 11 + [-1],
        [7] * 4 + [2] * 5 + [9] * 3,
        [5] * 6 + [-1] * 6,
    ]
)


def naive_valid(supervised, document) -> list[list[int]]:
    rows = []
    for said, texts in zip(supervised.tolist(), document.tolist(), strict=True):
        rows.append(
            [i for i in range(len(said) - 1) if said[i] and said[i + 1] and texts[i] == texts[i + 1] and texts[i] >= 0]
        )
    return rows


def random_batch(seed: int):
    """Random text in documents, supervision, anchors, and number of slots that predict."""
    draw = random.Random(seed)
    batch, length, num_blocks = draw.randint(1, 3), draw.randint(2, 12), draw.randint(1, 4)
    ids = torch.tensor([[draw.randrange(100) for _ in range(length)] for _ in range(batch)])
    supervised = torch.tensor([[draw.random() < 0.7 for _ in range(length)] for _ in range(batch)])
    borders = torch.tensor([[draw.random() < 0.2 for _ in range(length)] for _ in range(batch)])
    document = borders.long().cumsum(1) + 10 * torch.arange(batch).unsqueeze(1)
    anchors = torch.tensor([[draw.randrange(length) for _ in range(num_blocks)] for _ in range(batch)])
    keep = torch.tensor([[draw.random() < 0.8 for _ in range(num_blocks)] for _ in range(batch)])
    return ids, supervised, document, anchors, keep, draw.randint(1, 6)


# --------------------------------------------------------------------------------------------------------- anchors
def drawn(anchors, keep) -> list[list[int]]:
    return [[a for a, k in zip(*row, strict=True) if k] for row in zip(anchors.tolist(), keep.tolist(), strict=True)]


def test_an_anchor_and_the_token_after_it_are_the_targets_and_of_one_text():
    valid = valid_anchors(SUPERVISED, DOCUMENT)
    assert [row.nonzero().flatten().tolist() for row in valid] == naive_valid(SUPERVISED, DOCUMENT)
    assert naive_valid(SUPERVISED, DOCUMENT) == [[2, 3, 4, 5, 6, 9], [1, 2, 5, 6, 7, 9, 10], []]


@pytest.mark.parametrize("seed", range(10))
def test_valid_anchors_are_those_of_a_loop(seed):
    _, supervised, document, *_ = random_batch(seed)
    valid = valid_anchors(supervised, document)
    assert [row.nonzero().flatten().tolist() for row in valid] == naive_valid(supervised, document)


@pytest.mark.parametrize("num_anchors", [1, 2, 50])
def test_each_text_gets_as_many_distinct_valid_anchors_as_it_can_hold(num_anchors):
    anchors, keep = draw_anchors(SUPERVISED, DOCUMENT, num_anchors, seed=0, step=3)
    for row, texts, valid in zip(
        drawn(anchors, keep), DOCUMENT.tolist(), naive_valid(SUPERVISED, DOCUMENT), strict=True
    ):
        assert row == sorted(set(row)) and set(row) <= set(valid)
        for text in set(texts):
            possible = [i for i in valid if texts[i] == text]
            assert len([i for i in row if texts[i] == text]) == min(num_anchors, len(possible))
    assert [row == sorted(row, reverse=True) for row in keep.tolist()] == [True] * 3, "padding blocks come last"
    assert anchors[~keep].eq(0).all()
    assert anchors.shape[1] == {1: 3, 2: 6, 50: 7}[num_anchors]


def test_a_batch_without_an_anchor_has_one_block_of_padding():
    anchors, keep = draw_anchors(SUPERVISED[2:], DOCUMENT[2:], 4, seed=0, step=0)
    assert (anchors.tolist(), keep.tolist()) == ([[0]], [[False]])


def test_anchors_of_a_text_depend_neither_on_its_batch_nor_on_padding_nor_on_packing():
    lengths = {3: 20, 8: 31, 5: 17}

    def rows(*documents_of_rows, length=80):
        supervised = torch.zeros(len(documents_of_rows), length, dtype=torch.bool)
        document = torch.full((len(documents_of_rows), length), -1)
        starts = {}
        for i, documents in enumerate(documents_of_rows):
            place = 0
            for text in documents:
                document[i, place : place + lengths[text]] = text
                supervised[i, place + 2 : place + lengths[text]] = True
                starts[text] = (i, place)
                place += lengths[text]
        anchors, keep = draw_anchors(supervised, document, 6, seed=11, step=4)
        found = drawn(anchors, keep)
        return {
            text: [a - place for a in found[i] if place <= a < place + lengths[text]]
            for text, (i, place) in starts.items()
        }

    alone = {text: rows([text], length=lengths[text])[text] for text in lengths}
    assert all(len(anchors) == 6 for anchors in alone.values())
    assert rows([3], [8], [5]) == rows([5], [3], [8]) == rows([3, 8, 5]) == rows([8, 5], [3], length=99) == alone


def test_the_draw_depends_on_seed_step_and_text_alone():
    supervised, text = torch.ones(1, 200, dtype=torch.bool), torch.zeros(1, 200, dtype=torch.long)

    def draw(seed, step, document):
        torch.manual_seed(random.randrange(2**31))  # the global generator has no say
        return tuple(drawn(*draw_anchors(supervised, text + document, 5, seed=seed, step=step))[0])

    assert draw(1, 2, 3) == draw(1, 2, 3)
    ways = {draw(*way) for way in itertools.product((0, 1, 42), (-1, 0, 1, 1000), (0, 1, 7))}
    assert len(ways) == 36


def test_every_anchor_and_every_pair_is_drawn_equally_often():
    supervised = torch.tensor([[True, True, True, False, True, True, True, True, False, True, True]])
    (valid,) = naive_valid(supervised, torch.zeros_like(supervised, dtype=torch.long))
    draws, num_anchors = 2000, 3
    document = torch.arange(draws).unsqueeze(1).expand(-1, supervised.shape[1])
    anchors, keep = draw_anchors(supervised.expand(draws, -1), document, num_anchors, seed=0, step=0)
    assert keep.all()
    counts = torch.bincount(anchors.flatten(), minlength=supervised.shape[1])[valid].double()
    expected = draws * num_anchors / len(valid)
    # Without replacement the statistic is (n - 1) / (n - k) smaller than a chi-square of n - 1 degrees.
    statistic = ((counts - expected) ** 2 / expected).sum() * (len(valid) - 1) / (len(valid) - num_anchors)
    assert statistic < 20.5, counts  # 0.1 % of a chi-square with 5 degrees
    triples = torch.bincount((anchors * torch.tensor([121, 11, 1])).sum(1)).double()
    triples = triples[triples > 0]
    assert len(triples) == math.comb(len(valid), 3)
    assert ((triples - draws / 20) ** 2 / (draws / 20)).sum() < 43.8, triples  # 0.1 % with 19 degrees


def test_a_grid_takes_every_nth_valid_place_of_each_text():
    supervised = torch.ones(1, 20, dtype=torch.bool)
    supervised[0, :3] = supervised[0, 9] = False
    document = torch.tensor([[4] * 14 + [6] * 6])
    for step in (0, 5):
        anchors, keep = draw_anchors(supervised, document, 9, seed=step, step=step, grid=4)
        assert drawn(anchors, keep) == [[3, 7, 11, 14, 18]]
    assert drawn(*draw_anchors(supervised, document, 2, seed=0, step=0, grid=4)) == [[3, 7, 14, 18]]
    assert drawn(*draw_anchors(supervised, document, 9, seed=0, step=0, grid=5)) == [[3, 14]]


# ---------------------------------------------------------------------------------------------------------- labels
def naive_labels(ids, supervised, document, anchors, keep, num_predicted):
    """The j-th slot that predicts says the j-th token after the anchor, up to the first without a label."""
    rows = []
    for b in range(len(ids)):
        blocks = []
        for a, kept in zip(anchors[b].tolist(), keep[b].tolist(), strict=True):
            block = []
            for j in range(1, num_predicted + 1):
                goes_on = kept and len(block) == j - 1 and a + j < ids.shape[1]
                if goes_on and supervised[b, a + j] and document[b, a + j] == document[b, a]:
                    block.append(int(ids[b, a + j]))
            blocks.append(block + [IGNORE] * (num_predicted - len(block)))
        rows.append(blocks)
    return torch.tensor(rows)


@pytest.mark.parametrize("seed", range(40))
def test_labels_are_those_of_a_loop(seed):
    batch = random_batch(seed)
    assert torch.equal(block_labels(*batch), naive_labels(*batch))


def test_labels_of_one_block_in_plain_sight():
    ids = torch.arange(10, 20).unsqueeze(0)
    everything, text = torch.ones(1, 10, dtype=torch.bool), torch.zeros(1, 10, dtype=torch.long)
    block = torch.tensor([[3, 8]]), torch.tensor([[True, True]])
    # Fill-in: the block [13, mask, mask, mask] says 14, 15, 16 in slots 1 to 3.
    assert block_labels(ids, everything, text, *block, 3).tolist() == [[[14, 15, 16], [19, IGNORE, IGNORE]]]
    # Next-token: slot 0 predicts too, the token after the anchor.
    assert block_labels(ids, everything, text, *block, 4).tolist() == [
        [[14, 15, 16, 17], [19, IGNORE, IGNORE, IGNORE]]
    ]


def test_labels_end_at_the_first_token_that_is_not_the_targets_and_at_the_border_of_the_text():
    ids = torch.arange(10, 20).unsqueeze(0)
    supervised = torch.tensor([[1, 1, 1, 0, 1, 1, 1, 1, 1, 1]]).bool()
    document = torch.tensor([[0] * 7 + [1] * 3])
    labels = block_labels(ids, supervised, document, torch.tensor([[0, 4, 7]]), torch.tensor([[True, True, False]]), 4)
    assert labels.tolist() == [[[11, 12, IGNORE, IGNORE], [15, 16, IGNORE, IGNORE], [IGNORE] * 4]]


def test_every_drawn_block_has_a_label_and_padding_never_has():
    ids = torch.randint(1, 50, SUPERVISED.shape, generator=torch.Generator().manual_seed(0))
    anchors, keep = draw_anchors(SUPERVISED, DOCUMENT, 50, seed=0, step=0)
    labels = block_labels(ids, SUPERVISED, DOCUMENT, anchors, keep, 4)
    assert torch.equal((labels != IGNORE).any(-1), keep)
    padding = torch.full_like(ids, 99)
    labels = block_labels(torch.where(DOCUMENT < 0, padding, ids), SUPERVISED, DOCUMENT, anchors, keep, 4)
    assert not labels.eq(99).any()


# --------------------------------------------------------------------------------------------------------- weights
@pytest.mark.parametrize(
    ("num_predicted", "decay", "published"),
    [
        (7, 4, [1, 0.779, 0.607, 0.472, 0.368, 0.287, 0.223]),
        (9, 5, [1, 0.819, 0.670, 0.549, 0.449, 0.368, 0.301, 0.247, 0.202]),
        (
            15,
            7,
            [1, 0.867, 0.751, 0.651, 0.565, 0.490, 0.424, 0.368, 0.319, 0.276, 0.240, 0.208, 0.180, 0.156, 0.135],
        ),
    ],
)
def test_weights_are_the_published_ones_and_start_at_one(num_predicted, decay, published):
    weights = decay_weights(num_predicted, decay)
    assert weights[0] == 1.0
    torch.testing.assert_close(weights, torch.tensor(published), atol=6e-4, rtol=0)
    assert weights.sum().item() == pytest.approx({4: 3.735, 5: 4.605, 7: 6.631}[decay], abs=1e-3)


def test_an_infinite_decay_counts_all_slots_alike():
    assert decay_weights(5, math.inf).tolist() == [1.0] * 5


def naive_pace(entropies: list[float], labelled: list[bool], floor: float) -> list[float]:
    reach = []
    for m in range(len(entropies)):
        product = 1.0
        for i in range(m + 1):
            if labelled[i]:
                product *= (1 - floor) * math.exp(-entropies[i]) + floor
        reach.append(product if labelled[m] else 0.0)
    return [sum(reach[j:]) if labelled[j] else 0.0 for j in range(len(entropies))]


@pytest.mark.parametrize("floor", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("seed", range(3))
def test_pace_weights_are_the_sum_of_products_of_a_double_loop(seed, floor):
    generator = torch.Generator().manual_seed(seed)
    entropy = 3 * torch.rand(2, 5, 6, generator=generator)
    labelled = torch.rand(2, 5, 6, generator=generator) < 0.7
    weights = pace_weights(entropy, labelled, floor).flatten(0, 1)
    for row, (e, x) in enumerate(zip(entropy.flatten(0, 1).tolist(), labelled.flatten(0, 1).tolist(), strict=True)):
        assert weights[row].tolist() == pytest.approx(naive_pace(e, x, floor), rel=1e-5)


def test_pace_weights_of_a_drafter_that_is_right_four_times_of_five():
    weights = pace_weights(torch.full((7,), -math.log(0.8)), torch.ones(7, dtype=torch.bool))
    assert [round(w, 2) for w in (weights / weights[0]).tolist()] == [1.0, 0.81, 0.64, 0.48, 0.34, 0.22, 0.1]


def test_no_gradient_flows_through_pace_weights():
    assert not pace_weights(torch.rand(3, 4, requires_grad=True), torch.ones(3, 4).bool()).requires_grad


# ---------------------------------------------------------------------------------------------------------- losses
def law(scores: list[float]) -> list[float]:
    top = max(scores)
    powers = [math.exp(x - top) for x in scores]
    return [power / sum(powers) for power in powers]


def random_slots(seed: int, batch: int = 3):
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(batch, 2, 4, 7, generator=generator)
    soft_labels = 2 * torch.randn(batch, 2, 4, 7, generator=generator)
    labels = torch.randint(0, 7, (batch, 2, 4), generator=generator)
    hidden = torch.rand(batch, 2, 4, generator=generator) < 0.3
    return logits, soft_labels, labels.masked_fill(hidden, IGNORE)


NAIVE = {
    kl_divergence: lambda q, p: sum(a * math.log(a / b) for a, b in zip(p, q, strict=True)),
    total_variation: lambda q, p: 1 - sum(min(a, b) for a, b in zip(p, q, strict=True)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("divergence", NAIVE, ids=lambda f: f.__name__)
def test_divergences_are_those_of_a_loop(divergence, dtype):
    logits, soft_labels, _ = (t.to(dtype) for t in random_slots(0))
    found = divergence(logits, soft_labels)
    assert (found.shape, found.dtype) == ((3, 2, 4), torch.float32)
    for q, p, value in zip(logits.flatten(0, 2), soft_labels.flatten(0, 2), found.flatten().tolist(), strict=True):
        assert value == pytest.approx(NAIVE[divergence](law(q.tolist()), law(p.tolist())), rel=1e-4)
    assert divergence(logits, logits).abs().max() < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cross_entropy_is_that_of_a_loop_and_zero_without_a_label(dtype):
    logits, _, labels = random_slots(1)
    logits = logits.to(dtype)
    found = cross_entropy(logits, labels)
    assert (found.shape, found.dtype) == (labels.shape, torch.float32)
    for q, label, value in zip(logits.flatten(0, 2), labels.flatten().tolist(), found.flatten().tolist(), strict=True):
        expected = 0.0 if label == IGNORE else -math.log(law(q.tolist())[label])
        assert value == pytest.approx(expected, rel=1e-4, abs=1e-7)


def test_a_slot_without_label_has_no_gradient():
    logits, _, labels = random_slots(1)
    logits.requires_grad_()
    cross_entropy(logits, labels).sum().backward()
    assert torch.equal(logits.grad.abs().sum(-1) > 0, labels != IGNORE)


# ----------------------------------------------------------------------------------------------------- sum in chunks
BLOCKS, SLOTS, HIDDEN, WORDS = 7, 3, 5, 11


def head_loss():
    """A head, labels and weights of each block, and `loss_of` over them; the sizes of its calls are noted."""
    generator = torch.Generator().manual_seed(0)
    head = torch.randn(WORDS, HIDDEN, generator=generator)
    labels = torch.randint(0, WORDS, (BLOCKS, SLOTS), generator=generator)
    calls = []

    def loss_of(part, blocks):
        calls.append((len(part), torch.is_grad_enabled()))
        return (cross_entropy(F.linear(part, head), labels[blocks]) * torch.tensor([3.0, 2.0, 1.0])).sum(-1)

    return loss_of, calls


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 50])
def test_chunks_change_neither_the_losses_nor_the_gradient(chunk):
    loss_of, calls = head_loss()
    hidden = torch.randn(BLOCKS, SLOTS, HIDDEN, generator=torch.Generator().manual_seed(1), requires_grad=True)
    upstream = torch.randn(BLOCKS, generator=torch.Generator().manual_seed(2))
    whole = loss_of(hidden, slice(None))
    (expected,) = torch.autograd.grad((whole * upstream).sum(), hidden)
    calls.clear()
    losses = sum_in_chunks(hidden, loss_of, chunk)
    (gradient,) = torch.autograd.grad((losses * upstream).sum(), hidden)
    torch.testing.assert_close(losses, whole)
    torch.testing.assert_close(gradient, expected)
    assert [size for size, _ in calls] == [min(chunk, BLOCKS - start) for start in range(0, BLOCKS, chunk)]


def test_the_logits_of_one_chunk_are_gone_before_the_next():
    head, alive, most = torch.randn(WORDS, HIDDEN), [], []

    class Logits(torch.autograd.Function):
        """A head that keeps what it needs for its backward, as the losses of a language model do."""

        @staticmethod
        def forward(ctx, hidden):
            alive.append(len(hidden))
            most.append(sum(alive))
            return F.linear(hidden, head)

        @staticmethod
        def backward(ctx, gradient):
            alive.remove(len(gradient))
            return gradient @ head

    hidden = torch.randn(BLOCKS, SLOTS, HIDDEN, requires_grad=True)
    losses = sum_in_chunks(hidden, lambda part, _: Logits.apply(part).square().sum((1, 2)), 3)
    assert (most, alive) == ([3, 3, 1], [])
    losses.sum().backward()
    assert len(most) == 3, "nothing is computed again"


def test_without_a_gradient_nothing_is_kept_for_one():
    loss_of, calls = head_loss()
    hidden = torch.randn(BLOCKS, SLOTS, HIDDEN)
    assert not sum_in_chunks(hidden, loss_of, 3).requires_grad
    with torch.no_grad():
        losses = sum_in_chunks(hidden.requires_grad_(), loss_of, 3)
    assert not losses.requires_grad
    assert not any(with_gradient for _, with_gradient in calls)


def test_half_precision_hidden_states_get_a_gradient_of_their_own_dtype():
    hidden = torch.randn(BLOCKS, SLOTS, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    sum_in_chunks(hidden, lambda part, _: part.float().square().sum((1, 2)), 2).sum().backward()
    torch.testing.assert_close(hidden.grad, 2 * hidden.detach())


# ------------------------------------------------------------------------------------------------------------ hits
@pytest.mark.parametrize("seed", range(5))
def test_hits_and_the_right_prefix_are_those_of_a_loop(seed):
    logits, _, labels = random_slots(seed)
    best = logits.argmax(-1)
    right = torch.rand(labels.shape, generator=torch.Generator().manual_seed(seed)) < 0.6
    labels = torch.where(right & (labels != IGNORE), best, labels)
    hits, leading = slot_hits(logits, labels)
    for index in itertools.product(range(3), range(2)):
        block = [b == c for b, c in zip(best[index].tolist(), labels[index].tolist(), strict=True)]
        assert hits[index].tolist() == block
        assert leading[index] == (block + [False]).index(False)


def test_the_right_prefix_is_counted_in_each_block_and_not_from_averages():
    """Two blocks, each slot right in one of them: the product of the averages would say 0.5 + 0.25."""
    logits = F.one_hot(torch.tensor([[1, 2], [3, 4]]), 6).float()
    hits, leading = slot_hits(logits, torch.tensor([[1, 5], [5, 4]]))
    assert hits.tolist() == [[True, False], [False, True]]
    assert leading.tolist() == [1, 0]
