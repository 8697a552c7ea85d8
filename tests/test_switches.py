"""The switches of a drafter in every combination: what a slot predicts, how a block is drafted, what conditions it."""

import functools
import itertools

import pytest
import torch
from oracles import (
    Force,
    at_rate,
    at_slots,
    counting,
    drafter_for,
    hooks_of,
    naive_features,
    plain,
    predicted_forwards,
    prompt_of,
    script,
    square_target,
)
from test_sampling import LAW, SIGNIFICANCE, TOKENS, ChainTarget, acceptance_z, chi_squared_p, sample
from tiny import MASK, draft_cache, sharpen, tiny_target
from torch import nn
from transformers import DynamicCache, LogitsProcessorList, Qwen3Config, RepetitionPenaltyLogitsProcessor

import dflash_hf
from dflash_hf import DFlashConfig, DFlashDraftModel, masking, pairing
from dflash_hf.decoding import Decoding
from dflash_hf.target import Target


SLOTS = {
    "fill-in": {},
    "next-token": {"sample_from_anchor": True},
    "autoregressive": {"sample_from_anchor": True, "drafting": "autoregressive"},
}
CONDITIONING = {"kv": {}, "input": {"conditioning": "input"}}
TAPS = {"layers": [1, 0], "embedding": [-1], "both": [1, -1]}
LAYERS = {
    "full": {},
    "sliding": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6},
}
BLOCK = 5
PROMPT, NEW = 11, 24

every_kind = pytest.mark.parametrize(
    "kind", list(itertools.product(SLOTS, CONDITIONING, LAYERS)), ids=lambda kind: ", ".join(kind)
)


def fields(kind: tuple[str, str, str], taps: str = "layers") -> dict:
    slots, conditioning, layers = kind
    return {
        "num_hidden_layers": 2,
        "target_layer_ids": TAPS[taps],
        **SLOTS[slots],
        **CONDITIONING[conditioning],
        **LAYERS[layers],
    }


@functools.cache
def greedy():
    """A target, a prompt, and the text that the target writes after it."""
    target, ids = square_target(), prompt_of(PROMPT)
    return target, ids, plain(target, ids, max_new_tokens=NEW, do_sample=False)


def speculate(target, drafter, ids, *, cap=None, verifier="rejection", **options):
    method = dflash_hf.custom_generate(drafter, num_assistant_tokens=cap, verifier=verifier)
    return target.generate(ids, custom_generate=method, **{"max_new_tokens": NEW, "do_sample": False, **options})


def script_slots(drafter, target, full, wrong):
    """`script`, whose slots say the token at their own position, for drafters whose slots say the one after it."""
    shift = int(drafter.config.sample_from_anchor)
    return script(drafter, target, full[:, shift:], lambda position, slot: wrong(position + shift, slot + shift))


# ------------------------------------------------------------------------------------------------- a naive drafter
def rotated(states: torch.Tensor, position: int, theta: float) -> torch.Tensor:
    """Rotary embedding of one token's heads `(heads, D)`, pair by pair."""
    half = states.shape[-1] // 2
    angle = position * theta ** (-torch.arange(half) / half)
    a, b = states[:, :half], states[:, half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1)


@torch.no_grad()
def naive_block(drafter: DFlashDraftModel, context: torch.Tensor, embeds: torch.Tensor) -> torch.Tensor:
    """
    Hidden states `(K, H)` of the block `embeds` `(K, H)` after the tapped states `context` `(T, M * H)`.

    Token by token, key by key, with the modules that hold weights and nothing else of the drafter.
    """
    config = drafter.config
    injected = config.conditioning == "kv"
    features = list(drafter.fuse(context))
    num_context = len(features)
    hidden = ([None] * num_context if injected else features) + list(embeds)

    def sees(query: int, key: int, layer) -> bool:
        if layer.self_attn.window is not None and abs(query - key) >= layer.self_attn.window:
            return False
        if query < num_context or layer.self_attn.causal or key < num_context:
            return key <= query
        return True

    for layer in drafter.layers:
        attention = layer.self_attn
        norm = layer.input_layernorm
        source = [features[i] if h is None else norm(h) for i, h in enumerate(hidden)]
        keys, values = [], []
        for i, row in enumerate(source):
            heads = attention.k_norm(attention.k_proj(row).view(-1, config.head_dim))
            keys.append(rotated(heads, i, config.rope_parameters["rope_theta"]))
            values.append(attention.v_proj(row).view(-1, config.head_dim))
        after = []
        for i, row in enumerate(source):
            if hidden[i] is None:
                after.append(None)
                continue
            heads = attention.q_norm(attention.q_proj(row).view(-1, config.head_dim))
            query = rotated(heads, i, config.rope_parameters["rope_theta"])
            seen = [k for k in range(len(source)) if sees(i, k, layer)]
            k, v = (
                torch.stack([states[j] for j in seen]).repeat_interleave(attention.num_key_value_groups, dim=1)
                for states in (keys, values)
            )
            weights = (torch.einsum("hd,khd->hk", query, k) / config.head_dim**0.5).softmax(-1)
            mixed = hidden[i] + attention.o_proj(torch.einsum("hk,khd->hd", weights, v).flatten())
            after.append(mixed + layer.mlp(layer.post_attention_layernorm(mixed)))
        hidden = after
    return drafter.norm(torch.stack(hidden[num_context:]))


@torch.no_grad()
def naive_logits(target, drafter, text: torch.Tensor, drafted: torch.Tensor) -> torch.Tensor:
    """Logits `(n, V)` of the proposals after `text` `(1, T)`; if autoregressive, each follows those of `drafted`."""
    config = drafter.config
    block = torch.full((1, config.block_size), config.mask_token_id)
    block[0, 0] = text[0, -1]
    if config.drafting == "autoregressive":
        block[0, 1:] = drafted[0, : config.block_size - 1]
    context = naive_features(target, text[:, :-1], config.target_layer_ids)[0]
    hidden = naive_block(drafter, context, target.get_input_embeddings()(block)[0])
    first = 0 if config.sample_from_anchor else 1
    return target.get_output_embeddings()(hidden[first:])


@pytest.fixture
def drafts(monkeypatch):
    """Every draft of a call: the text before it, its proposals and their law."""
    noted, draft = [], Decoding.draft

    def noting(self, width):
        text = self.state.texts.ids
        proposals, q = draft(self, width)
        if width == self.drafter.config.num_proposals:
            noted.append((text, proposals, q))
        return proposals, q

    monkeypatch.setattr(Decoding, "draft", noting)
    return noted


# --------------------------------------------------------------------------------------- greedy identity, forwards
@pytest.mark.parametrize("taps", ["layers", "embedding"])
@every_kind
def test_greedy_text_and_number_of_forwards_of_both_models(kind, taps):
    target, ids, full = greedy()
    drafter = drafter_for(target, BLOCK, **fields(kind, taps))
    width = drafter.config.num_proposals
    assert width == (BLOCK - 1 if kind[0] == "fill-in" else BLOCK)
    wrong = at_rate(0.25)
    calls = script_slots(drafter, target, full, wrong)
    with counting(target) as forwards:
        assert speculate(target, drafter, ids).tolist() == full.tolist()
    assert len(forwards) == predicted_forwards(PROMPT, NEW, width + 1, wrong)
    rounds = drafter.last_statistics.rounds
    assert max(r.accepted for r in rounds) == width and min(r.accepted for r in rounds) == 0
    if kind[0] == "autoregressive":
        assert len(calls) == sum(r.proposed for r in rounds)
    else:
        assert len(calls) == sum(r.proposed > 0 for r in rounds)


@pytest.mark.parametrize("slots", ["fill-in", "next-token"])
def test_every_slot_that_predicts_is_used_and_no_other(slots):
    target, ids, full = greedy()
    for mistake in range(1, BLOCK + 1):
        drafter = drafter_for(target, BLOCK, **SLOTS[slots])
        width = drafter.config.num_proposals
        script_slots(drafter, target, full, at_slots(mistake))
        assert speculate(target, drafter, ids).tolist() == full.tolist()
        first = drafter.last_statistics.rounds[0]
        assert (first.proposed, first.accepted) == (width, min(mistake - 1, width))


@pytest.mark.parametrize("slots", SLOTS)
@pytest.mark.parametrize("cap", [1, 3])
def test_a_cap_bounds_the_proposals_of_every_kind(slots, cap):
    target, ids, full = greedy()
    drafter = drafter_for(target, BLOCK, **SLOTS[slots])
    calls = script_slots(drafter, target, full, at_rate(0.2))
    assert speculate(target, drafter, ids, cap=cap).tolist() == full.tolist()
    rounds = drafter.last_statistics.rounds
    assert len(rounds) + 1 == predicted_forwards(PROMPT, NEW, BLOCK + 1, at_rate(0.2), cap)
    assert max(r.proposed for r in rounds) == cap
    if slots == "autoregressive":
        assert len(calls) == sum(r.proposed for r in rounds)


@every_kind
def test_proposals_are_those_of_a_naive_drafter(drafts, kind):
    target, ids, full = greedy()
    drafter = drafter_for(target, BLOCK, **fields(kind, "both"))
    assert speculate(target, drafter, ids).tolist() == full.tolist()
    assert len(drafts) >= 3
    for text, proposals, _ in drafts[:3]:
        assert proposals.tolist() == [naive_logits(target, drafter, text, proposals).argmax(-1).tolist()]
    assert len({token for _, proposals, _ in drafts for token in proposals[0].tolist()}) > 5


# ----------------------------------------------------------------------------------------------------- sampled drafts
@every_kind
def test_each_law_is_what_its_token_was_drawn_from(drafts, kind):
    """With a processor that looks at the text: it is asked about the tokens drafted before too."""
    target, ids, _ = greedy()
    drafter = drafter_for(target, BLOCK, **fields(kind))
    torch.manual_seed(0)
    options = {"do_sample": True, "temperature": 3.0, "top_k": 20, "repetition_penalty": 1.7}
    speculate(target, drafter, ids, **options)
    assert len(drafts) >= 3
    for text, proposals, q in drafts[:3]:
        logits = naive_logits(target, drafter, text, proposals)
        for i, row in enumerate(logits):
            before = torch.cat([text, proposals[:, :i]], dim=1)
            scores = RepetitionPenaltyLogitsProcessor(1.7)(before, row[None].clone())[0] / 3.0
            scores[scores < scores.topk(20).values[-1]] = -float("inf")
            torch.testing.assert_close(q[0, i], scores.softmax(-1), atol=1e-4, rtol=1e-4)
            assert q[0, i, proposals[0, i]] > 0


@pytest.mark.parametrize("kind", [("autoregressive", "kv", "full"), ("next-token", "kv", "full")], ids=", ".join)
def test_matching_proposes_the_likeliest_tokens_after_the_processors(drafts, kind):
    target, ids, _ = greedy()
    drafter = drafter_for(target, BLOCK, **fields(kind))
    torch.manual_seed(0)
    forced = LogitsProcessorList([Force(every=3)])
    speculate(target, drafter, ids, do_sample=True, verifier="match", logits_processor=forced)
    assert len(drafts) >= 3
    for text, proposals, q in drafts:
        logits = naive_logits(target, drafter, text, proposals)
        choices = [3 if (text.shape[1] + i) % 3 == 0 else token for i, token in enumerate(logits.argmax(-1).tolist())]
        assert (proposals.tolist(), q) == ([choices], None)


@pytest.fixture(scope="module")
def chains():
    """The target with the law `LAW` and an autoregressive drafter whose law is its square root, row by row."""
    hidden = 8
    geometry = {"hidden_size": hidden, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": hidden}
    config = Qwen3Config(
        vocab_size=TOKENS + 1, num_hidden_layers=1, intermediate_size=8, pad_token_id=None, **geometry
    )
    target = ChainTarget(config).eval()
    autoregressive = {**SLOTS["autoregressive"], "block_size": 4, "num_hidden_layers": 1, "target_layer_ids": [0]}
    drafter = DFlashDraftModel(DFlashConfig.from_target(config, mask_token_id=TOKENS, **autoregressive)).eval()
    drafter.layers = nn.ModuleList()  # a slot's hidden state is the norm of its token's embedding
    with torch.no_grad():
        table = torch.full((TOKENS + 1, hidden), -1e4)
        table[:TOKENS, :TOKENS] = LAW.log().T
        table[:TOKENS, TOKENS:] = 0.0
        target.lm_head.weight.copy_(table)
        target.get_input_embeddings().weight.copy_(torch.eye(TOKENS + 1, hidden))
        drafter.norm.weight.fill_(0.5 / hidden**0.5)  # the norm brings a unit vector to the length `hidden ** 0.5`
    return target, drafter


@pytest.mark.parametrize(
    ("verifier", "num_tokens"),
    [("rejection", 3_000), ("match", 1_000), pytest.param("rejection", 60_000, marks=pytest.mark.slow)],
)
def test_text_of_autoregressive_drafts_has_the_law_of_the_target(chains, verifier, num_tokens):
    calls = sample(chains, verifier, num_tokens)
    assert chi_squared_p(calls, LAW) > SIGNIFICANCE
    draft_law = LAW.sqrt() / LAW.sqrt().sum(-1, keepdim=True)
    chance = torch.minimum(LAW, draft_law).sum(-1) if verifier == "rejection" else LAW.amax(-1)
    assert abs(acceptance_z(calls, chance)) < 4
    assert max(r.accepted for _, rounds in calls for r in rounds) == 4


def test_a_wrong_law_of_autoregressive_drafts_is_seen(chains, monkeypatch):
    """That of the first slot for all of them."""
    draft = Decoding.draft

    def mistaken(self, width):
        proposals, q = draft(self, width)
        return proposals, q[:, :1].expand_as(q)

    monkeypatch.setattr(Decoding, "draft", mistaken)
    assert chi_squared_p(sample(chains, "rejection", 3_000, seed=3), LAW) < SIGNIFICANCE


# -------------------------------------------------------------------------------------------------- caches and rounds
@every_kind
def test_draft_cache_holds_committed_context_only_after_every_round(monkeypatch, kind):
    target, ids, full = greedy()
    drafter = drafter_for(target, BLOCK, **fields(kind))
    script_slots(drafter, target, full, at_rate(0.3))
    features = naive_features(target, full, drafter.config.target_layer_ids)
    checked, round_ = [], Decoding.round

    @torch.no_grad()
    def checking(self, taps):
        round_(self, taps)
        state = self.state
        covered = state.target.length - state.context.shape[1]
        checked.append(covered)
        fresh = DynamicCache()
        drafter(features.new_zeros(1, 1, drafter.config.hidden_size), features[:, :covered], cache=fresh)
        torch.testing.assert_close(state.context, features[:, covered : state.target.length], atol=1e-4, rtol=1e-4)
        for layer, whole in zip(state.draft.cache.layers, fresh.layers, strict=True):
            assert layer.get_seq_length() == covered
            kept = min(covered, layer.sliding_window - 1) if layer.is_sliding else covered
            for ours, theirs in ((layer.keys, whole.keys), (layer.values, whole.values)):
                torch.testing.assert_close(ours, theirs[..., covered - kept : covered, :], atol=1e-4, rtol=1e-4)

    monkeypatch.setattr(Decoding, "round", checking)
    assert speculate(target, drafter, ids).tolist() == full.tolist()
    assert len(checked) == drafter.last_statistics.target_forwards - 1 and checked[0] == PROMPT


@pytest.mark.parametrize("step", [1, 2, 4])
@pytest.mark.parametrize("conditioning", CONDITIONING)
def test_failure_at_any_step_of_an_autoregressive_draft_leaves_the_cache_at_the_commit_point(
    monkeypatch, conditioning, step
):
    target, ids, full = greedy()
    drafter = drafter_for(target, BLOCK, **fields(("autoregressive", conditioning, "sliding")))
    state, left, round_ = [], [1 + BLOCK + step], Decoding.round  # the prompt, and a round

    def raising(*args):
        left[0] -= 1
        if left[0] == 0:
            raise RuntimeError("broken")

    def noting(self, taps):
        state.append(self.state)
        round_(self, taps)

    monkeypatch.setattr(Decoding, "round", noting)
    drafter.layers[1].register_forward_pre_hook(raising)
    with pytest.raises(RuntimeError, match="broken"):
        speculate(target, drafter, ids)
    last = state[-1]
    held = {layer.get_seq_length() for layer in last.draft.cache.layers}
    assert held == {last.target.length - last.context.shape[1]}
    assert last.context.shape[1] > 0, "the context is the draft cache's only once the whole draft is done"


@pytest.mark.parametrize("kind", list(itertools.product(CONDITIONING, LAYERS)), ids=", ".join)
@pytest.mark.parametrize("slots", SLOTS)
def test_drafting_with_a_cache_equals_a_naive_drafter_on_the_whole_context(slots, kind):
    """In rounds, and in two steps inside the block where it is autoregressive."""
    drafter = drafter_for(greedy()[0], BLOCK, **fields((slots, *kind)))
    config, cache, context = drafter.config, draft_cache(drafter.config), []
    generator = torch.Generator().manual_seed(0)
    for num_new in (7, 1, 4, 2):
        new = torch.randn(1, num_new, 2 * config.hidden_size, generator=generator)
        block = torch.randn(1, BLOCK, config.hidden_size, generator=generator)
        context.append(new)
        steps = [block] if slots != "autoregressive" else block.split(1, dim=1)
        cached = []
        for step in steps:
            with torch.no_grad():
                cached.append(drafter(step, new, cache=cache).last_hidden_state)
            new = new[:, :0]
        cache.crop(-BLOCK)
        with torch.no_grad():
            whole = drafter(block, torch.cat(context, dim=1)).last_hidden_state
        torch.testing.assert_close(torch.cat(cached, dim=1), whole, atol=1e-5, rtol=1e-5)
        naive = naive_block(drafter, torch.cat(context, dim=1)[0], block[0])
        torch.testing.assert_close(whole[0], naive, atol=1e-4, rtol=1e-4)


@every_kind
def test_padding_on_the_left_changes_nothing(drafts, kind):
    target, ids, full = greedy()
    drafter = drafter_for(target, BLOCK, **fields(kind))
    speculate(target, drafter, ids, max_new_tokens=9)
    alone = [proposals.tolist() for _, proposals, _ in drafts]
    drafts.clear()
    padded = torch.cat([torch.zeros(1, 4, dtype=torch.long), ids], dim=1)
    mask = (torch.arange(PROMPT + 4) >= 4).long().unsqueeze(0)
    text = speculate(target, drafter, padded, attention_mask=mask, max_new_tokens=9)
    assert text[:, 4:].tolist() == full[:, : PROMPT + 9].tolist()
    assert [proposals.tolist() for _, proposals, _ in drafts] == alone


# ------------------------------------------------------------------------------------------------- train/serve parity
def text_and_context(kind) -> tuple[DFlashDraftModel, nn.Embedding, torch.Tensor, torch.Tensor]:
    """A drafter, an embedding, a text `(1, 20)`, and tapped states `(1, 20, M * H)` for it."""
    target = tiny_target()
    drafter = drafter_for(target, BLOCK, **fields(kind))
    ids = torch.randint(1, MASK, (1, 20), generator=torch.Generator().manual_seed(3))
    context = torch.randn(1, 20, 2 * drafter.config.hidden_size, generator=torch.Generator().manual_seed(4))
    return drafter, target.get_input_embeddings(), ids, context


def blocks_at(config: DFlashConfig, ids: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
    """What the slots of the blocks at `anchors` `(B, N)` hold, `(B, N, K)`; the text goes on with token 0."""
    offset = torch.arange(config.block_size)
    if config.drafting == "autoregressive":
        longer = nn.functional.pad(ids, (0, config.block_size))
        return longer.gather(1, (anchors.unsqueeze(-1) + offset).flatten(1)).unflatten(1, (-1, config.block_size))
    blocks = torch.full((*anchors.shape, config.block_size), config.mask_token_id)
    blocks[..., 0] = ids.gather(1, anchors)
    return blocks


@torch.no_grad()
def training_draft(drafter, embedding, ids, context, anchors, *, valid=None, document=None, implementation="sdpa"):
    """Hidden states `(B, N, K, H)` of N blocks from one forward, called as a trainer calls it."""
    config = drafter.config
    anchors = torch.tensor(anchors)
    masks = {
        (window, causal): masking.training_mask(
            anchors,
            config.block_size,
            torch.ones_like(ids, dtype=torch.bool) if valid is None else valid,
            window=window,
            causal=causal,
            document=document,
            context_queries=config.conditioning == "input",
            implementation=implementation,
        )
        for window, causal in drafter.layer_kinds()
    }
    slots = anchors.unsqueeze(-1) + torch.arange(config.block_size)
    output = drafter(
        noise_embeds=embedding(blocks_at(config, ids, anchors).flatten(1)),
        context_hidden_states=context,
        position_ids=torch.cat([torch.arange(ids.shape[1]).expand_as(ids), slots.flatten(1)], dim=1),
        attention_mask=masks,
    )
    return output.last_hidden_state.unflatten(1, (-1, config.block_size))


@torch.no_grad()
def inference_draft(drafter, embedding, ids, context, anchor: int) -> torch.Tensor:
    """Hidden states `(1, K, H)` of the block at `anchor`, in two rounds with a cache."""
    cache = draft_cache(drafter.config)
    for start, stop in ((0, anchor // 2), (anchor // 2, anchor)):
        block = blocks_at(drafter.config, ids, torch.tensor([[stop]]))[:, 0]
        hidden, new = [], context[:, start:stop]
        for step in block.split(1 if drafter.config.drafting == "autoregressive" else BLOCK, dim=1):
            hidden.append(drafter(embedding(step), new, cache=cache).last_hidden_state)
            new = new[:, :0]
        cache.crop(-BLOCK)
    return torch.cat(hidden, dim=1)


@every_kind
def test_training_drafts_what_decoding_drafts_at_each_of_its_anchors(kind):
    parts = text_and_context(kind)
    anchors = [2, 7, 9, 18]
    together = training_draft(*parts, [anchors])
    for i, anchor in enumerate(anchors):
        alone = training_draft(*parts, [[anchor]])[:, 0]
        torch.testing.assert_close(together[:, i], alone, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(alone, inference_draft(*parts, anchor), atol=1e-5, rtol=1e-5)


@every_kind
def test_a_block_sees_neither_its_anchors_features_nor_what_follows_nor_other_blocks(kind):
    drafter, embedding, ids, context = text_and_context(kind)
    anchor = 8
    before = training_draft(drafter, embedding, ids, context, [[anchor, 12]])
    disturbed = context.clone()
    disturbed[:, anchor:] += 1.0
    after = training_draft(drafter, embedding, ids, disturbed, [[anchor, 14]])
    torch.testing.assert_close(after[:, 0], before[:, 0], atol=1e-6, rtol=0)
    disturbed[:, anchor - 1] += 1.0
    after = training_draft(drafter, embedding, ids, disturbed, [[anchor, 14]])
    assert (after[:, 0] - before[:, 0]).abs().amax(-1).min() > 1e-4


@pytest.mark.parametrize("layers", LAYERS)
def test_context_that_is_input_sees_what_is_before_it_and_reaches_the_block_through_it(layers):
    """A window of a few tokens in two layers: tokens further away come in through those between."""
    drafter, embedding, ids, context = text_and_context(("fill-in", "input", layers))
    anchor, near = 16, training_draft(drafter, embedding, ids, context, [[16]])
    disturbed = context.clone()
    disturbed[:, 0] += 1.0
    far = training_draft(drafter, embedding, ids, disturbed, [[anchor]])
    assert (far - near).abs().max() > 1e-4


@pytest.mark.parametrize("slots", SLOTS)
def test_padding_and_packed_texts_do_not_reach_a_block_whose_context_is_input(slots):
    drafter, embedding, ids, context = text_and_context((slots, "input", "sliding"))
    document = torch.tensor([[0] * 7 + [1] * 10 + [-1] * 3])
    packed = training_draft(drafter, embedding, ids, context, [[4, 12]], valid=document >= 0, document=document)
    assert packed.isfinite().all()
    first = training_draft(drafter, embedding, ids[:, :7], context[:, :7], [[4]])
    torch.testing.assert_close(packed[:, 0, :3], first[:, 0, :3], atol=1e-5, rtol=1e-5)
    disturbed = context.clone()
    disturbed[:, :7] += 1.0
    disturbed[:, 17:] += 1.0
    again = training_draft(drafter, embedding, ids, disturbed, [[4, 12]], valid=document >= 0, document=document)
    torch.testing.assert_close(again[:, 1], packed[:, 1], atol=1e-6, rtol=0)


@pytest.mark.parametrize("conditioning", CONDITIONING)
def test_gradients_reach_every_weight(conditioning):
    drafter, embedding, _, context = text_and_context(("next-token", conditioning, "sliding"))
    drafter.train()
    # Its name before 5.24.
    getattr(drafter, "activation_checkpointing_enable", drafter.gradient_checkpointing_enable)()
    drafter(embedding(torch.arange(BLOCK).unsqueeze(0)), context).last_hidden_state.square().sum().backward()
    assert all(parameter.grad.abs().max() > 0 for parameter in drafter.parameters())


# -------------------------------------------------------------------------------------------------- the embedding tap
def test_the_tap_of_the_embedding_is_what_the_embedding_gives():
    model = tiny_target()
    target, ids = Target(model), prompt_of(6)
    with target.capture([2, -1]) as taps:
        model(ids)
        target.embed(prompt_of(3))  # of a block: not what the text's features are
        both = taps.concatenate([2, -1])
    torch.testing.assert_close(both, naive_features(model, ids, [2, -1]))
    assert not model.get_input_embeddings()._forward_hooks


def test_a_forward_that_passes_by_the_embedding_is_reported_even_after_a_draft():
    target = Target(tiny_target())
    with target.capture([-1]) as taps:
        target.embed(prompt_of(3))
        with pytest.raises(RuntimeError, match=r"layers \[-1\]"):
            taps.concatenate([-1])


def test_hooks_on_the_embedding_come_and_go():
    model = square_target()
    target, before = Target(model), hooks_of(model)
    target.install_hooks([0, -1])
    target.install_hooks([0, -1])
    assert len(model.get_input_embeddings()._forward_hooks) == len(target.layers[0]._forward_hooks) == 1
    target.remove_hooks()
    assert hooks_of(model) == before


def test_a_prompt_of_embeddings_is_tapped_too():
    target, ids, full = greedy()
    drafter = drafter_for(target, BLOCK, conditioning="input", target_layer_ids=[-1, 0])
    seen = []
    drafter.fc.register_forward_pre_hook(lambda module, args: seen.append(args[0].clone()))
    embeds = target.get_input_embeddings()(ids).detach()
    options = {"inputs_embeds": embeds, "attention_mask": torch.ones_like(ids)}
    assert speculate(target, drafter, ids, **options).tolist() == full.tolist()
    torch.testing.assert_close(seen[0], naive_features(target, ids, [-1, 0]))


# --------------------------------------------------------------------------------------------------- flex attention
@pytest.mark.parametrize("context_queries", [False, True])
@pytest.mark.parametrize(("window", "causal"), [(None, False), (40, True), (200, False)])
@pytest.mark.parametrize("pairs", [1, 2**24])
def test_a_block_mask_is_the_dense_mask(monkeypatch, window, causal, context_queries, pairs):
    from torch.nn.attention.flex_attention import create_block_mask, create_mask

    monkeypatch.setattr(masking, "_PAIRS", pairs)
    length = 400
    anchors = torch.randint(0, length - 1, (2, 50), generator=torch.Generator().manual_seed(0))
    valid = torch.arange(length) < torch.tensor([[400], [357]])
    document = (torch.arange(length) >= 30).long().expand(2, -1)
    make = functools.partial(
        masking.training_mask,
        anchors,
        BLOCK,
        valid,
        window=window,
        causal=causal,
        document=document,
        context_queries=context_queries,
    )
    dense, blocks = make(), make(implementation="flex_attention")
    queries, keys = dense.shape[1:]
    assert blocks.seq_lengths == (queries, keys)
    assert torch.equal(create_mask(blocks.mask_mod, 2, 1, queries, keys, "cpu")[:, 0], dense)
    expected = create_block_mask(lambda b, h, q, k: dense[b, q, k], 2, None, queries, keys, device="cpu")
    assert torch.equal(blocks.to_dense(), expected.to_dense())
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(blocks, name), getattr(expected, name)), name


def test_flex_attention_asks_about_queries_and_keys_beyond_the_end():
    """Up to a multiple of 128; what is there sees nothing and is not seen."""
    blocks = masking.training_mask(
        torch.tensor([[3, 5]]),
        BLOCK,
        torch.ones(1, 9, dtype=torch.bool),
        window=None,
        causal=False,
        context_queries=True,
        implementation="flex_attention",
    )
    inside = blocks.seq_lengths[0]
    asked = torch.tensor([[bool(blocks.mask_mod(0, 0, torch.tensor(q), torch.tensor(k))) for k in (0, inside, 127)]
                          for q in (0, inside - 1, 127)])  # fmt: skip
    assert asked.tolist() == [[True, False, False], [True, False, False], [False, True, True]]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("conditioning", CONDITIONING)
def test_flex_attention_trains_on_the_same_hidden_states(monkeypatch, conditioning):
    """Without the compiler, which transformers puts around it."""
    from torch.nn.attention.flex_attention import flex_attention
    from transformers.integrations import flex_attention as integration

    monkeypatch.setattr(
        integration,
        "compile_friendly_flex_attention",
        lambda *args, training, **kwargs: flex_attention(*args, **kwargs),
    )
    drafter, embedding, ids, context = text_and_context(("next-token", conditioning, "full"))
    drafter.layers = drafter.layers[:1]
    anchors = [[2, 7, 9, 18]]
    dense = training_draft(drafter, embedding, ids, context, anchors)
    drafter.set_attn_implementation("flex_attention")
    flex = training_draft(drafter, embedding, ids, context, anchors, implementation="flex_attention")
    torch.testing.assert_close(flex, dense, atol=1e-5, rtol=1e-5)


# --------------------------------------------------------------------------------------------------------- refusals
AUTOREGRESSIVE = SLOTS["autoregressive"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"drafting": "sequential"}, "drafting='sequential'.*'parallel', 'autoregressive'"),
        ({"conditioning": "none"}, "conditioning='none'.*'kv', 'input'"),
        ({"drafting": "autoregressive"}, "sample_from_anchor=False.*True with drafting='autoregressive'"),
        (
            {**AUTOREGRESSIVE, "num_hidden_layers": 2, "causal_layers": [True, False]},
            r"causal_layers=\[True, False\].*every layer with drafting='autoregressive'",
        ),
        ({"target_layer_ids": [-2, 1]}, r"target_layer_ids=\[-2, 1\].*-1 for the embedding"),
        ({"target_layer_ids": [-1, 4], "num_target_layers": 4}, r"target_layer_ids=\[-1, 4\].*4 layers"),
    ],
)
def test_what_no_drafter_can_be_is_refused_by_field(fields, message):
    with pytest.raises(ValueError, match=message):
        DFlashConfig(**fields)


def test_the_defaults_are_those_of_the_paper():
    config = DFlashConfig()
    assert (config.sample_from_anchor, config.drafting, config.conditioning) == (False, "parallel", "kv")
    assert config.num_proposals == config.block_size - 1
    assert DFlashConfig(**AUTOREGRESSIVE).causal_layers == [True] * 5


def test_switches_survive_saving(tmp_path):
    drafter = drafter_for(tiny_target(), BLOCK, **fields(("autoregressive", "input", "sliding"), "embedding"))
    sharpen(drafter, 0)
    drafter.save_pretrained(tmp_path)
    loaded = DFlashDraftModel.from_pretrained(tmp_path)
    for field in ("sample_from_anchor", "drafting", "conditioning", "target_layer_ids", "causal_layers"):
        assert getattr(loaded.config, field) == getattr(drafter.config, field)
    assert loaded.config.num_proposals == BLOCK


def test_a_drafter_of_deeper_layers_than_the_target_is_refused_beside_an_embedding_tap():
    target = square_target()
    drafter = drafter_for(target, target_layer_ids=[-1, 3], num_target_layers=None)
    with pytest.raises(ValueError, match="taps layer 3, the target has layers 0 to 2"):
        pairing.check(Target(target), drafter)
    pairing.check(Target(target), drafter_for(target, target_layer_ids=[-1]))


def test_flash_attention_is_refused_where_the_context_is_input():
    mask = masking.drafting_mask(4, BLOCK, window=None, causal=False, context_queries=2)
    with pytest.raises(ValueError, match="flash_attention_2.*conditioning='input'"):
        masking.for_backend(mask, "flash_attention_2", torch.float32)
    # The later slots of an autoregressive draft hide nothing.
    assert masking.drafting_mask(4, 1, window=None, causal=True) is None
