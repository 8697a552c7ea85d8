"""Sampled text has the target's law, through the whole loop.

The target here writes a Markov chain: its law of the next token depends on the last token only and is a table. One
long text then holds as many samples as transitions, and given the counts of their first tokens these are independent.
The drafter's law is one fixed row, another than the target's. p target, q drafter.

Power: chi-squared has (rows x (tokens - 1)) = 12 degrees of freedom, so the bound for p < 0.001 is 32.9. A law at
total variation 0.02 adds at least 4 n 0.02^2 to the mean of the statistic: 48 at n = 30,000, where such a law is
missed in 1 of 50 cases; 96 at the n = 60,000 of the slow runs, where it is practically never missed.
"""

import itertools

import pytest
import torch
from oracles import drafter_for, plain, prompt_of, square_target
from torch import nn
from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    GenerationMixin,
    PreTrainedModel,
    Qwen3Config,
    TypicalLogitsWarper,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

import dflash_hf
from dflash_hf import DFlashConfig, DFlashDraftModel, compat
from dflash_hf.decoding import Decoding


TOKENS = 4
MASK = 4
LAW = torch.tensor([[0.1, 0.4, 0.3, 0.2], [0.28, 0.22, 0.35, 0.15], [0.08, 0.25, 0.52, 0.15], [0.2, 0.32, 0.22, 0.26]])
DRAFT_LAW = torch.tensor([0.15, 0.3, 0.43, 0.12])
SIGNIFICANCE = 1e-3
VERIFIERS = ["block", "rejection", "match"]


class ChainTarget(PreTrainedModel, GenerationMixin):
    """Decoder, layer, head and cache of a causal language model whose logits are a row of a table."""

    config_class = Qwen3Config

    def __init__(self, config):
        super().__init__(config)
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.model.layers = nn.ModuleList([nn.Identity()])
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_decoder(self):
        return self.model

    def forward(
        self,
        input_ids,
        position_ids=None,
        attention_mask=None,
        cache=None,
        past_key_values=None,
        use_cache=None,
        return_dict=None,
    ):
        cache = past_key_values if cache is None else cache
        hidden = self.model.layers[0](self.model.embed_tokens(input_ids))
        cache.update(hidden[:, None], hidden[:, None], 0)
        return CausalLMOutputWithPast(logits=self.lm_head(hidden), **{compat.CACHE: cache})


@pytest.fixture(scope="module")
def pair():
    """The target with the law `LAW`, and a drafter that gives every slot the law `DRAFT_LAW`."""
    hidden = 8
    geometry = {"hidden_size": hidden, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": hidden}
    config = Qwen3Config(vocab_size=MASK + 1, num_hidden_layers=1, intermediate_size=8, pad_token_id=None, **geometry)
    target = ChainTarget(config).eval()
    drafter = DFlashDraftModel(
        DFlashConfig.from_target(config, mask_token_id=MASK, block_size=8, num_hidden_layers=1, target_layer_ids=[0])
    ).eval()
    drafter.layers = nn.ModuleList()  # every slot's hidden state is the norm of its embedding
    with torch.no_grad():
        table = torch.full((MASK + 1, hidden), -1e4)  # the mask is never written
        table[:TOKENS, :TOKENS] = LAW.log().T
        table[:TOKENS, MASK] = DRAFT_LAW.log() / hidden**0.5  # the norm brings a unit vector to this length
        table[:, MASK + 1 :] = 0.0
        target.lm_head.weight.copy_(table)
        target.get_input_embeddings().weight.copy_(torch.eye(MASK + 1, hidden))
        drafter.norm.weight.fill_(1.0)
    return target, drafter


def sample(pair, verifier, num_tokens, *, seed=0, **options):
    """Sampled texts and the records of their rounds, for each call of 1000 tokens."""
    target, drafter = pair
    torch.manual_seed(seed)
    method = dflash_hf.custom_generate(drafter, verifier=verifier)
    options = {"do_sample": True, "top_k": 0, "max_new_tokens": min(num_tokens, 1000), **options}
    calls = []
    for _ in range(-(-num_tokens // 1000)):
        text = target.generate(torch.tensor([[1]]), custom_generate=method, **options)
        calls.append((text[0], drafter.last_statistics.rounds))
    return calls


WARPERS = {"typical_p": TypicalLogitsWarper, "epsilon_cutoff": EpsilonLogitsWarper, "eta_cutoff": EtaLogitsWarper}


def warped(law, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0, **others):
    """What the options make of rows of probabilities, written out; the penalty, where all tokens have been seen."""
    law = law ** (repetition_penalty / temperature)  # the logits are logarithms, all negative
    law = law / law.sum(-1, keepdim=True)
    if top_k:
        law = torch.where(law >= law.topk(top_k, dim=-1).values[..., -1:], law, 0.0)
        law = law / law.sum(-1, keepdim=True)
    if top_p < 1:
        ordered, order = law.sort(dim=-1, descending=True)
        kept = (ordered.cumsum(-1) - ordered < top_p).float()
        law = law * torch.zeros_like(law).scatter(-1, order, kept)
    law = torch.where(law >= min_p * law.amax(-1, keepdim=True), law, 0.0)
    for name, value in others.items():
        law = WARPERS[name](value)(None, law.view(-1, TOKENS).log()).softmax(-1).view_as(law)
    return law / law.sum(-1, keepdim=True)


def chi_squared_p(calls, law):
    """The p-value of the transitions in the texts under `law` `(tokens, tokens)`; 0 if one is impossible."""
    counts = torch.zeros(TOKENS, TOKENS, dtype=torch.float64)
    for text, _ in calls:
        counts.index_put_((text[:-1], text[1:]), torch.ones(len(text) - 1, dtype=torch.float64), accumulate=True)
    expected = counts.sum(1, keepdim=True) * law.double()
    possible = (law > 0) & (expected > 0)
    if counts[~possible].any():
        return 0.0
    assert expected[possible].min() > 5
    statistic = ((counts - expected) ** 2)[possible].div(expected[possible]).sum()
    freedom = (possible.sum(1) - 1).clamp(min=0).sum().double()
    return torch.special.gammaincc(freedom / 2, statistic / 2).item()


def acceptance_z(calls, chance):
    """By how many standard deviations the share of accepted first proposals misses `chance[anchor]`."""
    tried = []
    for text, rounds in calls:
        anchors = itertools.accumulate((r.committed for r in rounds), initial=1)
        pairs = zip(anchors, rounds, strict=False)
        tried += [(chance[text[anchor]].item(), r.accepted >= 1) for anchor, r in pairs if r.proposed]
    expected = sum(c for c, _ in tried)
    return (sum(accepted for _, accepted in tried) - expected) / sum(c * (1 - c) for c, _ in tried) ** 0.5


def check_acceptance(calls, verifier, law, draft_law):
    """The first proposals are accepted as often as they should be; by block verification, at least as often as by
    rejection, since later ones speak for them."""
    overlap = torch.minimum(law, draft_law).sum(-1)
    z = acceptance_z(calls, law[:, draft_law.argmax()] if verifier == "match" else overlap)
    assert -4 < z and (z < 4 or verifier == "block")


def test_block_verification_commits_more_than_rejection(pair):
    means = []
    for verifier in ("block", "rejection"):
        rounds = [r for _, rounds in sample(pair, verifier, 8_000, seed=4) for r in rounds]
        means.append(sum(r.committed for r in rounds) / len(rounds))
    assert means[0] > 1.02 * means[1]


OPTIONS = [
    {"temperature": 0.6},
    {"temperature": 1.5},
    {"top_k": 2},
    {"top_p": 0.7},
    {"temperature": 0.8, "top_k": 3},
    {"min_p": 0.4},
    {"typical_p": 0.6},
    {"epsilon_cutoff": 0.17},
    {"eta_cutoff": 0.35},
]


@pytest.mark.parametrize(
    ("verifier", "num_tokens"),
    [
        ("block", 30_000),
        ("rejection", 10_000),
        ("match", 10_000),
        *(pytest.param(verifier, 60_000, marks=pytest.mark.slow) for verifier in VERIFIERS),
    ],
)
def test_sampled_text_has_the_law_of_the_target(pair, verifier, num_tokens):
    calls = sample(pair, verifier, num_tokens)
    assert chi_squared_p(calls, LAW) > SIGNIFICANCE
    check_acceptance(calls, verifier, LAW, DRAFT_LAW)
    if num_tokens >= 30_000:  # a law that is 0.02 off is seen
        assert chi_squared_p(calls, LAW + torch.tensor([0.01, -0.01, 0.01, -0.01])) < SIGNIFICANCE


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("verifier", VERIFIERS)
def test_options_shape_the_law_of_both_models(pair, verifier, options):
    calls = sample(pair, verifier, 3_000, seed=1, **options)
    law, draft_law = warped(LAW, **options), warped(DRAFT_LAW, **options)
    assert chi_squared_p(calls, law) > SIGNIFICANCE
    check_acceptance(calls, verifier, law, draft_law)
    assert chi_squared_p(calls, LAW) < SIGNIFICANCE


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_processor_that_looks_at_the_text_shapes_the_law(pair, verifier):
    """A processor that is asked slot by slot: no token twice in a row."""

    class NoRepeat:
        def __call__(self, input_ids, scores):
            return scores.scatter(1, input_ids[:, -1:], -float("inf"))

    calls = sample(pair, verifier, 2_000, seed=2, logits_processor=[NoRepeat()])
    law = LAW * (1 - torch.eye(TOKENS))
    assert chi_squared_p(calls, law / law.sum(-1, keepdim=True)) > SIGNIFICANCE


@pytest.mark.parametrize("verifier", ["block", "rejection"])
@pytest.mark.parametrize("mistake", ["not what was drawn from", "not processed"])
def test_wrong_law_of_the_proposals_is_seen(pair, monkeypatch, mistake, verifier):
    draft = Decoding.draft

    def mistaken(self, width):
        proposals, q = draft(self, width)
        if mistake == "not what was drawn from":
            q = q.roll(1, -1)
        else:
            q = torch.cat([DRAFT_LAW, torch.zeros(1)]).expand_as(q).clone()
        return proposals, q

    monkeypatch.setattr(Decoding, "draft", mistaken)
    options = {"temperature": 0.6} if mistake == "not processed" else {}
    calls = sample(pair, verifier, 3_000, seed=3, **options)
    assert chi_squared_p(calls, warped(LAW, **options)) < SIGNIFICANCE


def sample_together(pair, verifier, num_tokens, **options):
    """As `sample`, of four rows that grow in one batch; their prompt has every token."""
    target, drafter = pair
    torch.manual_seed(0)
    method = dflash_hf.custom_generate(drafter, verifier=verifier)
    calls, each = [], min(num_tokens // 4, 1000)
    for _ in range(num_tokens // 4 // each):
        settings = {"do_sample": True, "top_k": 0, "max_new_tokens": each, **options}
        prompts = torch.tensor([[0, 2, 3, 1]]).expand(4, -1)
        mask = torch.ones_like(prompts)  # token 0 is a word here, not padding
        texts = target.generate(prompts, attention_mask=mask, custom_generate=method, **settings)
        assert len({tuple(text.tolist()) for text in texts}) == 4
        calls += [(text[TOKENS - 1 :], None) for text in texts]
    return calls


TOGETHER = [
    {},
    {"temperature": 0.6},
    {"top_k": 2},
    {"top_p": 0.7},
    {"min_p": 0.4},
    {"repetition_penalty": 1.5},
    pytest.param({"repetition_penalty": 1.5, "temperature": 1.2, "top_k": 3}, marks=pytest.mark.slow),
]


def shifted(law: torch.Tensor, distance: float) -> torch.Tensor:
    """Laws at a total-variation distance of `law`, with the same support: the likeliest token gives to the least."""
    likeliest, least = law.argmax(-1, keepdim=True), law.masked_fill(law == 0, 2).argmin(-1, keepdim=True)
    moved = torch.full_like(law[:, :1], distance)
    return law.scatter_add(-1, likeliest, -moved).scatter_add(-1, least, moved)


@pytest.mark.parametrize("num_tokens", [2_000, pytest.param(32_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("options", TOGETHER, ids=str)
@pytest.mark.parametrize("verifier", VERIFIERS)
def test_rows_sampled_together_have_the_law_of_the_target(pair, verifier, options, num_tokens):
    calls = sample_together(pair, verifier, num_tokens, **options)
    law = warped(LAW, **options)
    assert chi_squared_p(calls, law) > SIGNIFICANCE
    if options:
        assert chi_squared_p(calls, LAW) < SIGNIFICANCE
    if num_tokens > 30_000:  # a law that is 0.02 off is seen
        assert chi_squared_p(calls, shifted(law, 0.02)) < SIGNIFICANCE


@pytest.mark.parametrize("verifier", ["block", "rejection"])
def test_wrong_law_of_the_proposals_is_seen_in_rows_sampled_together(pair, monkeypatch, verifier):
    draft = Decoding.draft

    def mistaken(self, width):
        proposals, q = draft(self, width)
        return proposals, q.roll(1, -1)

    monkeypatch.setattr(Decoding, "draft", mistaken)
    assert chi_squared_p(sample_together(pair, verifier, 3_000), LAW) < SIGNIFICANCE


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_seed_fixes_the_text(pair, verifier):
    texts = [sample(pair, verifier, 50, seed=seed)[0][0].tolist() for seed in (5, 5, 6)]
    assert texts[0] == texts[1] != texts[2]


def test_sampling_needs_fewer_forwards_than_tokens(pair):
    for _, rounds in sample(pair, "rejection", 1_000):
        assert sum(r.committed for r in rounds) / len(rounds) > 2.5


@pytest.mark.slow
@pytest.mark.parametrize("verifier", VERIFIERS)
def test_short_texts_of_an_attending_target_have_its_law(verifier):
    """All 64 texts of three tokens, enumerated: the law of each token depends on all tokens before it."""
    target = square_target(vocab_size=TOKENS + 1, num_hidden_layers=2, pad_token_id=None, bos_token_id=None)
    with torch.no_grad():
        target.lm_head.weight.mul_(0.15)
    drafter = drafter_for(target, 4, target_layer_ids=[0], mask_token_id=TOKENS)
    prompt = prompt_of(3) % TOKENS
    options = {"do_sample": True, "top_k": 0, "max_new_tokens": 3, "suppress_tokens": [TOKENS]}
    options["attention_mask"] = torch.ones_like(prompt)  # token 0 is a word here, not padding
    texts = torch.tensor(list(itertools.product(range(TOKENS), repeat=3)))
    with torch.no_grad():
        logits = target(torch.cat([prompt.expand(64, -1), texts], dim=1)).logits[:, 2:5, :TOKENS]
    law = logits.softmax(-1).gather(-1, texts[..., None]).prod(1).squeeze(-1).double()
    method, counts, n = dflash_hf.custom_generate(drafter, verifier=verifier), torch.zeros(64).double(), 8_000
    torch.manual_seed(0)
    for _ in range(n):
        new = target.generate(prompt, custom_generate=method, **options)[0, 3:]
        counts[new @ torch.tensor([16, 4, 1])] += 1
    expected = n * law
    small = expected < 5
    cells = [(counts[~small], expected[~small])]
    if small.any():
        cells.append((counts[small].sum()[None], expected[small].sum()[None]))
    counts, expected = (torch.cat(parts) for parts in zip(*cells, strict=True))
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = torch.tensor(len(counts) - 1.0).double()
    assert torch.special.gammaincc(freedom / 2, statistic / 2) > SIGNIFICANCE
    assert plain(target, prompt, **options).shape == (1, 6)
