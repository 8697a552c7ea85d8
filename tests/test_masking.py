"""The mask is the rule of the paper, written once more here as loops over tokens and slots."""

import random
import shutil

import pytest
import torch
from tiny import draft_cache, draft_inputs, sliding, tiny_drafter, tiny_target

from dflash_hf import masking
from dflash_hf.masking import drafting_mask, for_backend, training_mask


def sees(anchor: int, slot: int, key: int, *, window: int | None, causal: bool, same_block: bool | None) -> bool:
    """
    Whether the slot at index `anchor + slot` sees the key at index `key`.

    `same_block` is None for a committed token, else whether the key is a slot of the same block.
    """
    query = anchor + slot
    if window is not None and abs(query - key) >= window:
        return False
    if same_block is None:
        return key < anchor
    return same_block and (key <= query or not causal)


def context_sees(query: int, key: int, *, window: int | None) -> bool:
    """Whether the committed token at index `query`, where it is a query, sees the one at index `key`."""
    return key <= query and (window is None or query - key < window)


def naive_drafting_mask(num_context, block_size, window, causal, padding):
    """`padding[b][k]` is 0 for a committed token that is padding, which no distance counts."""
    rows = []
    for pad in padding:
        place, anchor = [sum(pad[: k + 1]) - 1 for k in range(len(pad))], sum(pad[:num_context])
        rows.append(
            [
                [
                    sees(
                        anchor, i, place[k], window=window, causal=causal, same_block=None if k < num_context else True
                    )
                    and (k >= num_context or bool(pad[k]))
                    for k in range(num_context + block_size)
                ]
                for i in range(block_size)
            ]
        )
    return torch.tensor(rows)


def naive_training_mask(anchors, block_size, valid, window, causal, document):
    masks = []
    for a, v, d in zip(anchors.tolist(), valid.tolist(), document.tolist(), strict=True):
        rows = []
        for n, anchor in enumerate(a):
            for i in range(block_size):
                row = [
                    sees(anchor, i, k, window=window, causal=causal, same_block=None) and v[k] and d[k] == d[anchor]
                    for k in range(len(v))
                ]
                for m, other in enumerate(a):
                    row += [
                        sees(anchor, i, other + j, window=window, causal=causal, same_block=m == n)
                        for j in range(block_size)
                    ]
                rows.append(row)
        masks.append(rows)
    return torch.tensor(masks)


@pytest.mark.parametrize("seed", range(40))
def test_drafting_mask_is_the_rule(seed):
    draw = random.Random(seed)
    num_context, block_size, batch = draw.randint(0, 7), draw.randint(1, 5), draw.randint(1, 3)
    window, causal = draw.choice([None, 1, 2, 3, 5, 20]), draw.random() < 0.5
    total = num_context + block_size
    lengths = [draw.randint(0, num_context) for _ in range(batch)]
    padding = [[int(k >= length) for k in range(total)] for length in lengths]  # on the left
    expected = naive_drafting_mask(num_context, block_size, window, causal, padding)
    got = drafting_mask(num_context, block_size, window=window, causal=causal, padding=torch.tensor(padding))
    assert torch.equal(got.expand_as(expected), expected)

    expected = naive_drafting_mask(num_context, block_size, window, causal, [[1] * total])
    got = drafting_mask(num_context, block_size, window=window, causal=causal)
    if got is None:
        assert expected.all()
    else:
        assert torch.equal(got, expected)


@pytest.mark.parametrize("seed", range(40))
def test_training_mask_is_the_rule(seed):
    draw = random.Random(seed)
    batch, length, block_size = draw.randint(1, 3), draw.randint(2, 12), draw.randint(2, 4)
    num_blocks = draw.randint(1, 3)
    window, causal = draw.choice([None, 1, 2, 3, 5, 20]), draw.random() < 0.5
    anchors = torch.tensor([[draw.randrange(length) for _ in range(num_blocks)] for _ in range(batch)])
    valid = torch.tensor([[k < draw.randint(1, length) for k in range(length)] for _ in range(batch)])
    document = torch.tensor([sorted(draw.randrange(3) for _ in range(length)) for _ in range(batch)])
    expected = naive_training_mask(anchors, block_size, valid, window, causal, document)
    got = training_mask(anchors, block_size, valid, window=window, causal=causal, document=document)
    assert torch.equal(got, expected)

    expected = naive_training_mask(anchors, block_size, valid, window, causal, torch.zeros_like(document))
    assert torch.equal(training_mask(anchors, block_size, valid, window=window, causal=causal), expected)


@pytest.mark.parametrize("seed", range(20))
def test_drafting_mask_with_queries_of_the_context_is_the_rule(seed):
    draw = random.Random(seed)
    num_context, block_size, window = draw.randint(1, 8), draw.randint(1, 4), draw.choice([None, 1, 3, 20])
    causal, num_new, total = draw.random() < 0.5, draw.randint(1, num_context), num_context + block_size
    padding = [[int(k >= draw.randint(0, num_context)) for k in range(total)] for _ in range(2)]
    padding = [[*row[:num_context], *[1] * block_size] for row in padding]
    mask = drafting_mask(
        num_context,
        block_size,
        window=window,
        causal=causal,
        padding=torch.tensor(padding),
        context_queries=num_new,
    )
    assert mask.shape == (2, num_new + block_size, total)
    assert torch.equal(mask[:, num_new:], naive_drafting_mask(num_context, block_size, window, causal, padding))
    for row, pad in zip(mask.tolist(), padding, strict=True):
        place = [sum(pad[: k + 1]) - 1 for k in range(total)]
        for i, query in enumerate(range(num_context - num_new, num_context)):
            if pad[query]:  # what padding sees is of no consequence
                assert row[i] == [
                    context_sees(place[query], place[k], window=window) and k < num_context and bool(pad[k])
                    for k in range(total)
                ]


@pytest.mark.parametrize("seed", range(20))
def test_training_mask_with_queries_of_the_context_is_the_rule(seed):
    draw = random.Random(seed)
    length, block_size, window = draw.randint(2, 9), draw.randint(2, 4), draw.choice([None, 1, 3, 20])
    causal, anchors = draw.random() < 0.5, torch.tensor([[draw.randrange(length) for _ in range(2)] for _ in range(2)])
    valid = torch.tensor([[draw.random() < 0.8 for _ in range(length)] for _ in range(2)])
    document = torch.tensor([sorted(draw.randrange(3) for _ in range(length)) for _ in range(2)])
    mask = training_mask(
        anchors, block_size, valid, window=window, causal=causal, document=document, context_queries=True
    )
    assert torch.equal(mask[:, length:], naive_training_mask(anchors, block_size, valid, window, causal, document))
    for row, v, d in zip(mask.tolist(), valid.tolist(), document.tolist(), strict=True):
        for query in range(length):
            context = [
                context_sees(query, k, window=window) and d[k] == d[query] and (v[k] or k == query)
                for k in range(length)
            ]
            assert row[query] == context + [False] * (2 * block_size)


@pytest.mark.parametrize("context_queries", [0, 2])
@pytest.mark.parametrize("padding", [None, torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1]])])
def test_a_mask_over_the_last_keys_is_the_end_of_the_mask_over_all(context_queries, padding):
    options = {"window": 2, "causal": False, "padding": padding, "context_queries": context_queries}
    whole = drafting_mask(6, 3, **options)
    for num_keys in range(3 + context_queries, 10):
        assert torch.equal(drafting_mask(6, 3, num_keys=num_keys, **options), whole[..., -num_keys:])
    # Nothing is hidden when all the keys there are lie in the window.
    assert drafting_mask(6, 3, window=4, causal=False, num_keys=4) is None
    assert drafting_mask(6, 3, window=4, causal=False, num_keys=5) is not None


def test_a_block_sees_neither_its_anchor_in_the_context_nor_anything_after_it():
    mask = training_mask(torch.tensor([[5, 2]]), 3, torch.ones(1, 9, dtype=torch.bool), window=None, causal=False)
    assert mask.shape == (1, 6, 15)
    assert mask[0, 0].nonzero().flatten().tolist() == [0, 1, 2, 3, 4, 9, 10, 11]
    assert mask[0, 5].nonzero().flatten().tolist() == [0, 1, 12, 13, 14]


def test_every_query_sees_something_even_in_a_block_of_padding():
    valid = torch.zeros(1, 6, dtype=torch.bool)
    for causal in (False, True):
        mask = training_mask(torch.tensor([[0, 3]]), 3, valid, window=1, causal=causal)
        assert mask.any(-1).all()


@pytest.mark.parametrize(
    ("window", "causal", "padding", "none"),
    [
        (None, False, None, True),
        (8, False, None, True),
        (7, False, None, False),
        (None, True, None, False),
        (None, False, torch.ones(1, 8, dtype=torch.long), False),
    ],
)
def test_there_is_no_mask_only_when_nothing_can_be_hidden(window, causal, padding, none):
    mask = drafting_mask(5, 3, window=window, causal=causal, padding=padding)
    assert (mask is None) == none


def test_padding_without_a_zero_hides_nothing():
    assert drafting_mask(5, 3, window=None, causal=False, padding=torch.ones(2, 8, dtype=torch.long)).all()


# ------------------------------------------------------------------------------------------------------ backends
KINDS = {
    "full": {},
    "causal": {"causal_layers": [True, True]},
    "sliding causal": sliding(5, causal=True),
    "sliding bidirectional": sliding(5, causal=False),
    "mixed": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5},
}


def rounds(drafter, padding=None):
    """Drafter outputs of three rounds with a cache, some of them with padded context."""
    cache = draft_cache(drafter.config)
    outputs, total = [], 0
    for seed, num_new in enumerate((6, 1, 3)):
        total += num_new
        mask = None
        if padding is not None:
            mask = torch.ones(2, total + drafter.config.block_size, dtype=torch.long)
            mask[0, :padding] = 0
        inputs = draft_inputs(drafter.config, num_new, batch=2, seed=seed)
        with torch.no_grad():
            outputs.append(drafter(**inputs, attention_mask=mask, cache=cache).last_hidden_state)
        cache.crop(-drafter.config.block_size)
    return torch.cat(outputs, dim=1)


@pytest.mark.parametrize("padding", [None, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_eager_and_sdpa_draft_the_same(kind, padding):
    target = tiny_target()
    drafter = tiny_drafter(target, **KINDS[kind])
    drafter.set_attn_implementation("eager")
    eager = rounds(drafter, padding)
    drafter.set_attn_implementation("sdpa")
    torch.testing.assert_close(rounds(drafter, padding), eager, atol=1e-5, rtol=1e-5)


@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="flex attention compiles C++")
def test_flex_attention_drafts_the_same():
    drafter = tiny_drafter(tiny_target(), **sliding(5, causal=True, num_layers=1))
    inputs = draft_inputs(drafter.config, 6)
    drafter.set_attn_implementation("flex_attention")
    with torch.no_grad():
        flex = drafter(**inputs).last_hidden_state
        drafter.set_attn_implementation("sdpa")
        torch.testing.assert_close(flex, drafter(**inputs).last_hidden_state, atol=1e-5, rtol=1e-5)


def test_masks_are_made_for_the_backend_once_for_each_kind_of_layer(monkeypatch):
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "full_attention", "full_attention"]
    drafter = tiny_drafter(
        tiny_target(),
        num_hidden_layers=5,
        layer_types=kinds,
        sliding_window=5,
        causal_layers=[True, False, True, False, True],
    )
    made = []
    monkeypatch.setattr(masking, "for_backend", lambda *args: made.append(args) or for_backend(*args))
    drafter(**draft_inputs(drafter.config, 6))
    assert len(made) == 3


@pytest.mark.parametrize("implementation", ["flash_attention_2", "flash_attention_3", "kernels-community/flash-attn"])
def test_flash_attention_is_refused_by_name_when_something_is_hidden(implementation):
    mask = drafting_mask(5, 3, window=None, causal=True)
    with pytest.raises(ValueError, match=f"{implementation}.*sdpa"):
        for_backend(mask, implementation, torch.float32)
    assert for_backend(None, implementation, torch.float32) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_eager_mask_is_added_and_stays_finite(dtype):
    mask = drafting_mask(2, 3, window=None, causal=True)
    added = for_backend(mask, "eager", dtype)
    assert added.dtype == dtype and added.shape == (1, 1, 3, 5)
    assert torch.equal(added.squeeze(1) == 0, mask)
    assert added.isfinite().all() and (added[~mask.unsqueeze(1)] < -1e30).all()
