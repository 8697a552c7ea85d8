"""Heads that know the proposals before a slot, and convolutions over the block: naive oracles, and the sampled law."""

import copy
import itertools

import pytest
import torch
from oracles import drafter_for, plain, prompt_of, square_target
from test_sampling import LAW, SIGNIFICANCE, TOKENS, chi_squared_p, pair, sample  # noqa: F401 (a fixture)
from tiny import draft_inputs, tiny_drafter, tiny_target
from torch.nn import functional as F

import dflash_hf
from dflash_hf import DFlashConfig, DFlashDraftModel, heads
from dflash_hf.drafting import Drafting
from dflash_hf.verification import acceptance, reaches, residual, thresholds


HEADS = {
    "markov": {"proposal_head": "markov", "proposal_rank": 3},
    "gated_markov": {"proposal_head": "gated_markov", "proposal_rank": 3},
    "rnn_markov": {"proposal_head": "rnn_markov", "proposal_rank": 3},
    "selector": {"proposal_head": "selector", "proposal_rank": 3, "selector_top_k": 3},
    "domino": {"proposal_head": "domino", "proposal_rank": 3, "domino_state_size": 5, "domino_prefix": 1},
}
SIZE, WORDS, SLOTS = 8, 11, 4


def some(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def head_of(name: str, words: int = WORDS, size: int = SIZE):
    """A head with random weights."""
    geometry = {"hidden_size": size, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": size}
    config = DFlashConfig(**HEADS[name], **geometry, vocab_size=words, num_hidden_layers=1, mask_token_id=1)
    head = heads.proposal_head(config, words)
    with torch.no_grad():
        for seed, parameter in enumerate(head.parameters()):
            parameter.copy_(some(*parameter.shape, seed=seed))
    return head


# ------------------------------------------------------------------------------------------------------ naive oracles
def naive(name: str, head, logits, hidden, tokens, embed) -> torch.Tensor:
    """Logits of the slot after the anchor and proposals `tokens`, written out for one row, from scratch."""
    slot, previous = len(tokens) - 1, tokens[-1]
    logits = logits[slot]
    if name == "markov":
        return logits + head.markov_w2.weight @ head.markov_w1.weight[previous]
    if name == "gated_markov":
        token = head.markov_w1.weight[previous]
        gate = torch.sigmoid(head.gate_proj.weight @ torch.cat([hidden[slot], token]) + head.gate_proj.bias)
        return logits + head.markov_w2.weight @ (gate * token)
    if name == "rnn_markov":
        state = torch.zeros(3)
        for i, token in enumerate(tokens):
            z = torch.cat([state, head.markov_w1.weight[token], hidden[i]])
            g, c, o = (head.joint_proj.weight @ z + head.joint_proj.bias).split(3)
            state = torch.sigmoid(g) * state + (1 - torch.sigmoid(g)) * torch.tanh(c)
        return logits + head.markov_w2.weight @ torch.tanh(o)
    if name == "selector":
        best = sorted(range(WORDS), key=lambda word: -logits[word])[:3]
        query = head.predecessor_codebook[previous] * (head.hidden_projection.weight @ hidden[slot])
        scores = torch.full((WORDS,), -torch.inf)
        for word in best:
            scores[word] = logits[word] + query @ head.successor_codebook[word]
        return scores
    state = torch.zeros(5)
    w_input, w_state = head.prefix_gru.weight_ih_l0, head.prefix_gru.weight_hh_l0
    for token in tokens:
        reset_x, update_x, new_x = (w_input @ embed(token)).split(5)
        reset_h, update_h, new_h = (w_state @ state).split(5)
        update, reset = torch.sigmoid(update_x + update_h), torch.sigmoid(reset_x + reset_h)
        state = (1 - update) * torch.tanh(new_x + reset * new_h) + update * state
    if slot < 1:  # left alone
        return logits
    both = torch.cat([hidden[slot], state])
    return logits + head.embed_proj[2].weight @ F.silu(head.embed_proj[0].weight @ both)


@torch.no_grad()
@pytest.mark.parametrize("name", HEADS)
def test_each_slot_is_corrected_as_written_out(name):
    head, table = head_of(name), some(WORDS, SIZE, seed=9)
    hidden, logits = some(2, SLOTS, SIZE, seed=7), some(2, SLOTS, WORDS, seed=8, scale=3)
    tokens = torch.tensor([[4, 2, 9, 2], [10, 3, 3, 0]])
    correct = head.begin(hidden, lambda ids: table[ids])
    for slot in range(SLOTS):
        found = correct(slot, logits[:, slot], tokens[:, slot])
        for row in range(2):
            sofar = tokens[row, : slot + 1].tolist()
            expected = naive(name, head, logits[row], hidden[row], sofar, lambda token: table[token])
            torch.testing.assert_close(found[row], expected)


@torch.no_grad()
def test_convolution_is_as_written_out():
    config = DFlashConfig(
        **{"hidden_size": 12, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 12},
        **{"conv_kernel_size": 3, "conv_group_size": 4, "num_hidden_layers": 1, "mask_token_id": 1},
    )
    conv = heads.DynamicConv(config)
    for seed, parameter in enumerate(conv.parameters()):
        parameter.copy_(some(*parameter.shape, seed=seed))
    x, y = some(2, 5, 12, seed=3), some(2, 5, 12, seed=4)
    before, kernel = conv(x)
    after = conv.finish(y, kernel)
    projected = (x @ conv.kernel_projection.weight.T).view(2, 5, 2, 3, 3)
    for side, (values, found) in enumerate(((x, before), (y, after))):
        expected = torch.zeros_like(values)
        for b, t, o, c in itertools.product(range(2), range(5), range(3), range(12)):
            if t >= o:
                weight = conv.base_kernel[side, o, c] + projected[b, t, side, o, c // 4]
                expected[b, t, c] += weight * values[b, t - o, c]
        torch.testing.assert_close(found, expected)


DFLASH_2 = {**HEADS["selector"], "conv_kernel_size": 2, "conv_group_size": 16}


def test_a_fresh_dflash_2_is_dflash():
    target = tiny_target()
    drafter, plain_one = tiny_drafter(target, **DFLASH_2), tiny_drafter(target)
    fresh = DFlashDraftModel(drafter.config)
    with torch.no_grad():
        for name, value in plain_one.state_dict().items():
            fresh.get_parameter(name).copy_(value)
    inputs = draft_inputs(drafter.config, 9)
    with torch.no_grad():
        ours, theirs = fresh(**inputs).last_hidden_state, plain_one(**inputs).last_hidden_state
        assert torch.equal(ours, theirs)
        assert not torch.allclose(drafter(**inputs).last_hidden_state, theirs, atol=1e-3)
        hidden, logits = theirs[:, 1:], target.get_output_embeddings()(theirs[:, 1:])
        correct = fresh.proposal_head.begin(hidden, None)
        for slot in range(3):
            assert correct(slot, logits[:, slot], torch.tensor([5])).argmax(-1) == logits[:, slot].argmax(-1)


@pytest.mark.parametrize("name", HEADS)
def test_greedy_proposals_are_the_walk_written_out(name, monkeypatch):
    target = square_target()
    drafter, seen, propose = drafter_for(target, 5, **HEADS[name]), [], Drafting.propose

    def noting(self, state, width):
        proposals, q = propose(self, state, width)
        seen.append((state.texts.ids[0].tolist(), proposals[0].tolist()))
        return proposals, q

    hiddens = []
    drafter.norm.register_forward_hook(lambda m, args, output: hiddens.append(output) if output.shape[1] else None)
    monkeypatch.setattr(Drafting, "propose", noting)
    method = dflash_hf.custom_generate(drafter)
    found = target.generate(prompt_of(6), max_new_tokens=12, do_sample=False, custom_generate=method)
    assert torch.equal(found, plain(target, prompt_of(6), max_new_tokens=12, do_sample=False))
    for (text, proposals), hidden in zip(seen, hiddens, strict=False):
        hidden = hidden[0, 1:]
        with torch.no_grad():
            logits, tokens = target.lm_head(hidden), [text[-1]]
            correct = drafter.proposal_head.begin(hidden[None], target.get_input_embeddings())
            for slot in range(len(proposals)):
                said = correct(slot, logits[None, slot], torch.tensor(tokens[-1:]))
                tokens.append(int(said.argmax()))
        assert proposals == tokens[1:]
    assert len(seen) > 3


# ------------------------------------------------------------------------------------------------------ sampled law
V, G = 3, 2


@torch.no_grad()
def laws(name: str):
    """Path-conditional laws of a head, and a target's: functions from a prefix to `(V,)` float64."""
    head, table = head_of(name, words=V), some(V, SIZE, seed=9)
    hidden, logits = some(1, G, SIZE, seed=7), some(1, G, V, seed=8)

    def q(prefix: tuple[int, ...]) -> torch.Tensor:
        correct, said = head.begin(hidden, lambda ids: table[ids]), None
        for slot, token in enumerate((1, *prefix)):
            said = correct(slot, logits[:, slot], torch.tensor([token]))
        return said[0].softmax(-1)

    return q, lambda prefix: some(V, seed=100 + sum((i + 1) * (t + 1) for i, t in enumerate(prefix))).softmax(-1)


@torch.no_grad()
@pytest.mark.parametrize("verifier", ["rejection", "block"])
@pytest.mark.parametrize("name", ["markov", "gated_markov", "rnn_markov", "selector", "domino"])
def test_one_round_has_exactly_the_targets_law(name, verifier, monkeypatch):
    """All paths of two proposals, all decisions: the law of the first three tokens."""
    monkeypatch.setitem(HEADS["selector"], "selector_top_k", 2)  # a sparse law
    q, p = laws(name)
    found = torch.zeros(V, V, V, dtype=torch.float64)
    for path in itertools.product(range(V), repeat=G):
        q_path = torch.stack([q(path[:i]) for i in range(G)]).unsqueeze(0)
        p_path = torch.stack([p(path[:i]) for i in range(G + 1)]).unsqueeze(0)
        tokens = torch.tensor([path])
        weight = q_path[0].gather(-1, tokens[0, :, None]).prod().double()
        if not weight:
            continue
        if verifier == "block":
            reach = reaches(p_path, q_path, tokens)
            kept = thresholds(p_path, q_path, reach)[0].double()
            share = [(kept[a - 1] if a else 1.0) * (1 - kept[a:]).prod() for a in range(G + 1)]
        else:
            reach = torch.ones(1, G + 1)
            ratio = (p_path[0, :G].gather(-1, tokens[0, :, None]) / q_path[0].gather(-1, tokens[0, :, None])).clamp(
                max=1
            )
            ratio = torch.cat([ratio[:, 0].double(), torch.zeros(1)])
            share = [ratio[:a].prod() * (1 - ratio[a]) for a in range(G + 1)]
            middle = torch.tensor([[0.0, 0.0]])
            assert acceptance(p_path, q_path, tokens, middle) == (0 if not weight else G)
        for a in range(G + 1):
            after = residual(p_path, q_path, torch.tensor([a]), reach[:, a : a + 1])[0].double()
            for rest in itertools.product(range(V), repeat=G - a):
                for token in range(V):
                    text = (*path[:a], token, *rest)
                    mass = weight * share[a] * after[token]
                    for i in range(a + 1, G + 1):
                        mass = mass * p(text[:i])[text[i]].double()
                    found[text] += mass
    expected = torch.stack([p(())[a] * p((a,))[b] * p((a, b)) for a in range(V) for b in range(V)]).view(V, V, V)
    torch.testing.assert_close(found, expected.double(), atol=1e-6, rtol=1e-5)


def with_head(pair, name: str):  # noqa: F811
    """The pair of `test_sampling` with a head on the drafter."""
    target, drafter = pair
    drafter = copy.deepcopy(drafter)
    drafter.proposal_head = head_of(name, words=TOKENS + 1, size=8)
    return target, drafter


@pytest.mark.parametrize("num_tokens", [2_000, pytest.param(32_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("verifier", ["block", "rejection", pytest.param("match", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["markov", pytest.param("rnn_markov", marks=pytest.mark.slow), "selector"])
def test_sampled_text_has_the_targets_law(pair, name, verifier, num_tokens):  # noqa: F811
    calls = sample(with_head(pair, name), verifier, num_tokens)
    assert chi_squared_p(calls, LAW) > SIGNIFICANCE
    accepted = [record.accepted for _, rounds in calls for record in rounds]
    assert 0.1 < sum(accepted) / len(accepted) < 6.9


@pytest.mark.parametrize("verifier", ["block", "rejection"])
def test_law_that_forgets_the_head_is_seen(pair, verifier, monkeypatch):  # noqa: F811
    draft = Drafting._choose

    def forgetful(self, texts, hidden, previous):
        proposals, _ = draft(self, texts, hidden, previous)
        return proposals, self.head.logits(hidden).softmax(-1)

    monkeypatch.setattr(Drafting, "_choose", forgetful)
    assert chi_squared_p(sample(with_head(pair, "markov"), verifier, 4_000), LAW) < SIGNIFICANCE


# ------------------------------------------------------------------------------------------------------------ the rest
@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"proposal_head": "bigram"}, "proposal_head='bigram'"),
        ({"proposal_head": "markov"}, "proposal_rank=None"),
        ({"proposal_head": "selector", "proposal_rank": 2}, "selector_top_k=None"),
        ({**HEADS["selector"], "draft_vocab_size": 8}, "draft_vocab_size=8"),
        ({"proposal_head": "domino", "proposal_rank": 2}, "domino_state_size=None"),
        ({"confidence_head": "markov"}, "confidence_head='markov'"),
        ({"conv_kernel_size": 2}, "conv_kernel_size=2"),
        ({"conv_kernel_size": 2, "conv_group_size": 7}, "conv_group_size=7"),
        ({**HEADS["markov"], "drafting": "autoregressive", "sample_from_anchor": True}, "proposal_head='markov'"),
        ({"conv_kernel_size": 2, "conv_group_size": 16, "conditioning": "input"}, "conditioning='input'"),
        ({"final_logit_softcapping": 0.0}, "final_logit_softcapping=0.0"),
    ],
)
def test_contradictions_are_refused_by_name(fields, words):
    with pytest.raises(ValueError, match=f"DFlashConfig: {words}"):
        drafter_for(square_target(), **fields)


@pytest.mark.parametrize("name", ["markov", "selector"])
def test_tables_with_fewer_rows_than_the_target_share_the_last(name):
    target = square_target()
    drafter = drafter_for(target, 4, **HEADS[name], own_embeddings=True, own_vocab_size=30, mask_token_id=29)
    tables = drafter.embed_tokens.weight, next(drafter.proposal_head.parameters())
    assert [len(table) for table in tables] == [30, 30]
    for options in ({"do_sample": False}, {"do_sample": True, "top_k": 1}):
        found = target.generate(
            prompt_of(6), max_new_tokens=12, custom_generate=dflash_hf.custom_generate(drafter), **options
        )
        assert torch.equal(found, plain(target, prompt_of(6), max_new_tokens=12, **options))


def test_own_embeddings_are_scaled_as_the_configuration_says():
    target = square_target()
    drafter = drafter_for(target, own_embeddings=True, input_embedding_scale=0.5)
    found = dflash_hf.proposal.embed(drafter, dflash_hf.target.Target(target), torch.tensor([[7, 63]]))
    assert torch.equal(found, 0.5 * drafter.embed_tokens.weight[[7, 63]].unsqueeze(0))


@pytest.mark.parametrize(("multiplier", "cap"), [(0.5, None), (None, 2.0), (0.5, 2.0)])
def test_logits_are_shaped_as_the_drafters_configuration_says(multiplier, cap):
    target = square_target("granite")
    drafter = drafter_for(target, output_multiplier=multiplier, final_logit_softcapping=cap)
    head = dflash_hf.proposal.ProposalHead(drafter, dflash_hf.target.Target(target))
    hidden = some(1, 3, 64)
    with torch.no_grad():
        expected = target.lm_head(hidden) * (multiplier or 1)
        expected = expected if cap is None else cap * torch.tanh(expected / cap)
        torch.testing.assert_close(head.logits(hidden), expected)


# ---------------------------------------------------------------------------------------------------------- confidence
def confident_pair(with_markov: bool, **fields):
    """A pair whose confidence is known: that of a slot depends on the slot alone, or on the token before it."""
    target = square_target()
    head = "markov" if with_markov else "hidden"
    drafter = drafter_for(target, 6, **HEADS["markov"], confidence_head=head, **fields)
    with torch.no_grad():
        drafter.confidence_head.proj.bias.fill_(3.0)
    return target, drafter


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("with_markov", [False, True])
def test_no_more_is_verified_than_the_drafter_is_confident_of(with_markov, batch, monkeypatch):
    target, drafter = confident_pair(with_markov)
    ids = torch.cat([prompt_of(6, seed=i) for i in range(batch)])
    expected, number = plain(target, ids, max_new_tokens=20, do_sample=False), Drafting._num_confident
    noted = []

    def noting(self, hidden, tokens):
        found = number(self, hidden, tokens)
        before = drafter.proposal_head.before(tokens[:, :-1]) if with_markov else None
        sure = drafter.confidence_head(hidden[:, : tokens.shape[1] - 1], before) >= 0.5
        runs = [len(list(itertools.takewhile(bool, row))) for row in sure.tolist()]
        assert found == max(runs)
        noted.append(found)
        return found

    monkeypatch.setattr(Drafting, "_num_confident", noting)
    dflash_hf.attach(target, drafter, min_confidence=0.5)
    assert torch.equal(target.generate(ids, assistant_model=drafter, max_new_tokens=20, do_sample=False), expected)
    widths = [record.proposed for record in drafter.last_statistics.rounds if record.row == 0]
    assert len(set(noted)) > 1
    assert widths[: len(noted) - 1] == noted[: len(widths)][: len(noted) - 1]  # nothing is drafted for a last token


@pytest.mark.parametrize("verifier", ["block", "rejection"])
def test_cutting_by_confidence_keeps_the_law(pair, verifier):  # noqa: F811
    target, drafter = with_head(pair, "markov")
    drafter.config = copy.deepcopy(drafter.config)
    drafter.config.confidence_head, drafter.config.proposal_rank = "markov", 3
    drafter.config.proposal_head = "markov"
    drafter.confidence_head = heads.ConfidenceHead(drafter.config)
    with torch.no_grad():
        drafter.confidence_head.proj.weight.copy_(some(1, 8 + 3, seed=3, scale=2))
    method = dflash_hf.custom_generate(drafter, verifier=verifier, min_confidence=0.4)
    torch.manual_seed(0)
    options = {"do_sample": True, "top_k": 0, "max_new_tokens": 1000, "custom_generate": method}
    calls = []
    for _ in range(3):
        calls.append((target.generate(torch.tensor([[1]]), **options)[0], drafter.last_statistics.rounds))
    assert chi_squared_p(calls, LAW) > SIGNIFICANCE
    assert len({record.proposed for _, rounds in calls for record in rounds[:-8]}) > 1


def test_thresholds_that_make_no_sense_are_refused():
    target, drafter = confident_pair(False)
    for value in (-0.1, 1.5):
        with pytest.raises(ValueError, match=f"min_confidence={value}"):
            dflash_hf.attach(target, drafter, min_confidence=value)
    with pytest.raises(ValueError, match="no confidence head"):
        dflash_hf.attach(target, drafter_for(target), min_confidence=0.5)


@pytest.mark.parametrize("options", [{"do_sample": False}, {"do_sample": True, "top_k": 1}], ids=str)
def test_head_that_overflows_ends_the_drafting(options, monkeypatch):
    target, warnings = square_target(), []
    drafter = drafter_for(target, 4, **HEADS["markov"])
    with torch.no_grad():
        drafter.proposal_head.markov_w2.weight.fill_(float("nan"))
    monkeypatch.setattr(dflash_hf.drafting.logger, "warning", lambda *args: warnings.append(args[0]))
    method = dflash_hf.custom_generate(drafter)
    found = target.generate(prompt_of(6), max_new_tokens=12, custom_generate=method, **options)
    assert torch.equal(found, plain(target, prompt_of(6), max_new_tokens=12, **options))
    assert len(warnings) == 1
