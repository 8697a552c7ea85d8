"""Verification has the target's law: exactly, by enumeration of the code's own decisions, and through its sampler.

Toy models are tables of rationals which float32 holds exactly or to 1 part in 10^7. A uniform is enumerated by the
midpoints of the cells of [0, 1) cut in N equal parts: where every decision boundary is a multiple of 1/N, the
share of midpoints on one side is the exact probability. B batch, G proposals, V vocabulary, p target, q drafter.
"""

from fractions import Fraction
from itertools import product
from math import prod

import pytest
import torch

from dflash_hf.verification import (
    Verdict,
    acceptance,
    block,
    draw,
    inverse_cdf,
    longest,
    match,
    reaches,
    rejection,
    residual,
    thresholds,
)


CELLS = 24  # a multiple of every q numerator below, so that p / q is a multiple of 1 / CELLS


@pytest.fixture(autouse=True)
def fixed_seed():
    torch.manual_seed(0)


def rows(*numerators, denominator=8):
    return [tuple(Fraction(n, denominator) for n in row) for row in numerators]


def table(laws):
    """A toy model: the law of the next token given a prefix, which depends on the values and on the length."""
    return lambda prefix: laws[(3 * len(prefix) + sum((i + 1) * x for i, x in enumerate(prefix))) % len(laws)]


P3 = table(rows((5, 2, 1), (0, 3, 5), (1, 1, 6), (8, 0, 0), (2, 6, 0)))
Q3 = table(rows((4, 3, 1), (2, 6, 0), (3, 4, 1), (1, 1, 6)))
ONE_HOT3 = table(rows((0, 8, 0), (8, 0, 0), (0, 0, 8)))
P4 = table(rows((4, 2, 1, 1), (1, 1, 3, 3), (2, 3, 2, 1), (1, 5, 1, 1), (3, 1, 1, 3)))
Q4 = table(rows((1, 3, 3, 1), (3, 2, 2, 1), (1, 1, 3, 3)))
MISTAKEN4 = table(rows((2, 3, 2, 1), (3, 2, 2, 1), (2, 1, 2, 3)))  # what a faulty caller passes for Q4
COIN_P, COIN_Q = table(rows((7, 3), denominator=10)), table(rows((5, 5), denominator=10))
THIRDS_P, THIRDS_Q = table(rows((1, 2), denominator=3)), table(rows((2, 1), denominator=3))


def sequences(vocabulary, length):
    return list(product(range(vocabulary), repeat=length))


def probability(model, tokens):
    return prod((model(tokens[:i])[x] for i, x in enumerate(tokens)), start=Fraction(1))


def law_of(model, length):
    return {s: probability(model, s) for s in sequences(len(model(())), length) if probability(model, s)}


def stack(model, sequences, length):
    """`[rows, length, V]` float32: the model's laws along each sequence."""
    laws = [[[float(v) for v in model(s[:i])] for i in range(length)] for s in sequences]
    return torch.tensor(laws, dtype=torch.float32).reshape(len(sequences), length, len(model(())))


def midpoints(cells):
    return (torch.arange(cells, dtype=torch.float64) + 0.5) / cells


def complete(law, prefix, weight, model, length):
    """Adds to `law` what plain decoding makes of an emitted prefix: all its completions to `length` tokens."""
    for tail in sequences(len(model(())), length - len(prefix)):
        sequence = prefix + tail
        mass = weight * prod((model(sequence[:i])[sequence[i]] for i in range(len(prefix), length)), start=Fraction(1))
        if mass:
            law[sequence] = law.get(sequence, 0) + mass


def rejection_law(p, q, width, *, passed=None, verified=None, cells=CELLS):
    """Exact law of the `width + 1` tokens after one round, and E[accepted], from the code's decisions.

    Proposals are drawn from `q`; the code is told `passed` (default: the truth) and verifies the first
    `verified(proposals)` of them (default: all).
    """
    vocabulary, law, mean = len(p(())), {}, Fraction(0)
    for x in sequences(vocabulary, width):
        weight, g = probability(q, x), width if verified is None else verified(x)
        if not weight:
            continue
        laws = stack(p, [x], g + 1), stack(passed or q, [x], g)
        grid = torch.tensor(sequences(cells, g), dtype=torch.long).reshape(cells**g, g)
        uniforms = midpoints(cells).float()[grid]  # [cells ** g, g]
        accepted = acceptance(
            *(t.expand(cells**g, -1, -1) for t in laws), torch.tensor([x[:g]]).expand(cells**g, -1).long(), uniforms
        )
        for a, count in enumerate(accepted.bincount(minlength=g + 1).tolist()):
            mass = weight * Fraction(count, cells**g)
            mean += a * mass
            for token, value in enumerate(residual(*laws, torch.tensor([a]))[0].tolist()):
                exact = Fraction(value).limit_denominator(64)
                assert abs(exact - Fraction(value)) < Fraction(1, 10**6)
                complete(law, (*x[:a], token), mass * exact, p, width + 1)
    return law, mean


def fraction(value):
    """The rational that a float32 computed from small rationals stands for."""
    exact = Fraction(value).limit_denominator(5000)
    assert abs(exact - Fraction(value)) < Fraction(1, 10**6)
    return exact


def block_law(p, q, width, passed=None):
    """As `rejection_law`, for block verification: from the code's own thresholds and residual laws."""
    vocabulary, law, mean = len(p(())), {}, Fraction(0)
    for x in sequences(vocabulary, width):
        weight = probability(q, x)
        if not weight:
            continue
        laws = stack(p, [x], width + 1), stack(passed or q, [x], width)
        reach = reaches(*laws, torch.tensor([x]).reshape(1, width).long())
        h = [fraction(value) for value in thresholds(*laws, reach)[0].tolist()]
        for a in range(width + 1):
            kept = prod((1 - h[j] for j in range(a, width)), start=Fraction(1)) * (h[a - 1] if a else 1)
            mean += a * weight * kept
            for token, value in enumerate(residual(*laws, torch.tensor([a]), reach[:, a : a + 1])[0].tolist()):
                if kept:
                    complete(law, (*x[:a], token), weight * kept * fraction(value), p, width + 1)
    return law, mean


def match_law(p, q, width, verified=None):
    """Exact law of the `width + 1` tokens after one round of `match`, and E[accepted]; proposals come from `q`."""
    vocabulary, law, mean = len(p(())), {}, Fraction(0)
    for x in sequences(vocabulary, width):
        g = width if verified is None else verified(x)
        choices = sequences(vocabulary, g + 1)
        verdict = match(torch.tensor(choices), torch.tensor([x[:g]]).expand(len(choices), -1).long())
        for c, a, token in zip(choices, verdict.accepted.tolist(), verdict.token.tolist(), strict=True):
            weight = probability(q, x) * prod(p(x[:i])[c[i]] for i in range(g + 1))
            mean += a * weight
            complete(law, (*x[:a], token), weight, p, width + 1)
    return law, mean


def distance(law, other):
    return sum(abs(law.get(s, 0) - other.get(s, 0)) for s in law.keys() | other.keys()) / 2


# ---- the law, by enumeration


@pytest.mark.parametrize("width", [0, 1, 2, 3])
@pytest.mark.parametrize(("p", "q"), [(P3, Q3), (P3, ONE_HOT3), (P3, P3)], ids=["sampled", "one-hot", "equal"])
def test_rejection_has_exactly_the_target_law(p, q, width):
    # Width 3 draws its uniforms from fewer cells where these still hold all ratios: q numerators 1, 2, 3, 4, 6.
    law, mean = rejection_law(p, q, width, cells=CELLS if q is ONE_HOT3 or width < 3 else 12)
    assert law == law_of(p, width + 1)
    assert sum(law.values()) == 1
    assert mean == width or q is not p


def test_rejection_accepts_min_of_p_and_q():
    """Leviathan et al., Theorem 3.5 and Definition 3.1: the acceptance rate is the sum of min(p, q)."""
    _, mean = rejection_law(P3, Q3, 1)
    assert mean == sum(map(min, P3(()), Q3(())))


def test_rejection_accepts_ten_ninths_on_the_published_toy():
    """p = (1/3, 2/3), q = (2/3, 1/3), G = 2 (Sun et al. 2403.10444): 10/9 tokens of an ideal 12/9."""
    law, mean = rejection_law(THIRDS_P, THIRDS_Q, 2)
    assert mean == Fraction(10, 9)
    assert law == law_of(THIRDS_P, 3)


@pytest.mark.parametrize("width", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("p", "q"), [(P3, Q3), (P3, ONE_HOT3), (P3, P3), (P4, Q4)], ids=["sampled", "one-hot", "equal", "of four"]
)
def test_block_verification_has_the_target_law_and_accepts_no_fewer(p, q, width):
    law, mean = block_law(p, q, width)
    expected = law_of(p, width + 1)
    assert all(abs(law.get(s, 0) - expected.get(s, 0)) < Fraction(1, 10**5) for s in law.keys() | expected.keys())
    assert mean == width or q is not p
    assert mean >= rejection_law(p, q, width, cells=CELLS if width < 3 else 12)[1] - Fraction(1, 10**5)


def test_block_verification_accepts_eleven_ninths_on_the_published_toy():
    """Where `rejection` accepts ten ninths: Sun et al., Section 2."""
    law, mean = block_law(THIRDS_P, THIRDS_Q, 2)
    assert abs(mean - Fraction(11, 9)) < Fraction(1, 10**6)
    assert distance(law, law_of(THIRDS_P, 3)) < Fraction(1, 10**6)


def test_wrong_q_gives_block_verification_a_wrong_law():
    law, _ = block_law(P4, Q4, 2, passed=MISTAKEN4)
    assert distance(law, law_of(P4, 3)) > Fraction(2, 100)


def test_reaches_are_the_recursion_also_where_a_token_is_impossible():
    p, q = random_laws(64, 6, 5), random_laws(64, 5, 5, seed=1)
    proposals = torch.randint(0, 5, (64, 5))
    p[7, 2, proposals[7, 2]] = 0.0
    found = reaches(p, q, proposals)
    for row in range(64):
        value = 1.0
        for i in range(5):
            x = proposals[row, i]
            value = min(1.0, value * (p[row, i, x] / q[row, i, x]).item())
            assert found[row, i + 1].item() == pytest.approx(value, rel=1e-4)
    assert (found[7, 3:] == 0).all() and (found[:, 0] == 1).all()


def test_the_longest_kept_prefix_counts_whatever_is_before_it():
    kept = torch.tensor([[1, 0, 1, 0], [0, 0, 0, 0], [0, 0, 0, 1], [1, 1, 0, 0]]).bool()
    assert longest(kept).tolist() == [3, 0, 4, 2]
    assert longest(kept[:, :0]).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("verify", [rejection, block])
def test_proposals_with_a_law_that_is_not_a_number_are_dropped(verify):
    p, q = random_laws(20, 4, 6), torch.full((20, 3, 6), float("nan"))
    verdict = verify(p, q, torch.zeros(20, 3, dtype=torch.long))
    assert (verdict.accepted == 0).all()


@pytest.mark.parametrize("width", [0, 1, 4])
def test_block_verification_keeps_a_perfect_draft_and_never_an_impossible_token(width):
    p = random_laws(50, width + 1, 6)
    proposals = draw(p[:, :width])
    verdict = block(p, p[:, :width].clone(), proposals)
    assert (verdict.accepted == width).all()
    if width:
        p[:, 0] = 0.0
        p[:, 0, 0] = 1.0
        proposals[:, 0] = 1
        verdict = block(p, random_laws(50, width, 6, seed=3), proposals)
        assert (verdict.accepted == 0).all() and (verdict.token == 0).all()


@pytest.mark.parametrize("width", [0, 1, 2, 3])
@pytest.mark.parametrize("q", [Q3, ONE_HOT3], ids=["sampled", "deterministic"])
def test_sample_and_match_has_exactly_the_target_law(q, width):
    law, mean = match_law(P3, q, width)
    assert law == law_of(P3, width + 1)
    if q is ONE_HOT3:  # then both methods accept the same
        assert mean == rejection_law(P3, q, width)[1]


def test_wrong_q_gives_a_wrong_law():
    law, _ = rejection_law(P4, Q4, 2, passed=MISTAKEN4)
    assert sum(law.values()) == 1
    assert distance(law, law_of(P4, 3)) > Fraction(2, 100)


def test_truncation_that_looks_at_the_proposal_biases_rejection_but_not_match():
    """Appendix A of the DSpark paper: verify x_1 only if it is token 0. P(0) becomes 0.85, the target says 0.7."""

    def only_zero(proposals):
        return int(proposals[0] == 0)

    assert rejection_law(COIN_P, COIN_Q, 1, cells=10)[0] == law_of(COIN_P, 2)
    biased, _ = rejection_law(COIN_P, COIN_Q, 1, verified=only_zero, cells=10)
    assert sum(mass for s, mass in biased.items() if s[0] == 0) == Fraction(85, 100)
    assert match_law(COIN_P, COIN_Q, 1, verified=only_zero)[0] == law_of(COIN_P, 2)


def test_truncation_by_earlier_proposals_keeps_the_law():
    def second_after_zero(proposals):
        return 2 if proposals[0] == 0 else 1

    assert rejection_law(P3, Q3, 2, verified=second_after_zero)[0] == law_of(P3, 3)
    assert match_law(P3, Q3, 2, verified=second_after_zero)[0] == law_of(P3, 3)


def test_inverse_cdf_gives_each_token_its_exact_share():
    laws = torch.tensor([[[5, 2, 1], [0, 3, 5]], [[1, 0, 7], [8, 0, 0]]]) / 8  # [2, 2, V]
    tokens = inverse_cdf(laws.expand(CELLS, 2, 2, 3), midpoints(CELLS)[:, None, None].expand(CELLS, 2, 2))
    shares = torch.stack([(tokens == token).sum(0) for token in range(3)], dim=-1) / CELLS
    assert torch.equal(shares, laws)


# ---- the law, through the sampler


def sample(p, q, passed, count, seed, width=2, verify=rejection):
    """`count` independent rounds through `draw` and `verify`, completed with p: codes of `width + 1` tokens."""
    generator = torch.Generator().manual_seed(seed)
    vocabulary = len(p(()))
    code = torch.zeros(count, dtype=torch.long)
    proposals = []
    for i in range(width):
        proposals.append(draw(stack(q, sequences(vocabulary, i), i + 1)[code, -1], generator))
        code = code * vocabulary + proposals[-1]
    proposals = torch.stack(proposals, dim=1)  # [count, G]
    drafts = sequences(vocabulary, width)
    laws = stack(p, drafts, width + 1)[code], stack(passed, drafts, width)[code]
    verdict = verify(*laws, proposals, generator=generator)
    code = torch.zeros(count, dtype=torch.long)
    for i in range(width + 1):
        token = draw(stack(p, sequences(vocabulary, i), i + 1)[code, -1], generator)
        token = torch.where(verdict.accepted == i, verdict.token, token)
        if i < width:
            token = torch.where(verdict.accepted > i, proposals[:, i], token)
        code = code * vocabulary + token
    return code


def p_value(codes, expected):
    """Pearson's chi-squared test of the codes against a law with no empty cell."""
    expected = expected * codes.numel()
    statistic = ((codes.bincount(minlength=expected.numel()) - expected) ** 2 / expected).sum()
    return torch.special.gammaincc(torch.tensor((expected.numel() - 1) / 2, dtype=torch.float64), statistic / 2).item()


@pytest.mark.parametrize("verify", [rejection, block])
def test_sampled_verification_has_the_target_law(verify):
    """Chi-squared over the 64 outcomes of V = 4, G = 2 with n = 54 000 rounds at alpha = 1e-3.

    Power: a shift of the law by a total variation of d has noncentrality of at least 4 n d^2, here 86 at d = 0.02,
    which 63 degrees of freedom reject with a probability of 0.99. The second check plants the shift that is hardest to
    see, the same relative change in every cell; the third a q that is not the law of the proposals.
    """
    law = torch.tensor([float(probability(P4, s)) for s in sequences(4, 3)], dtype=torch.float64)
    codes = sample(P4, Q4, Q4, 54_000, seed=0, verify=verify)
    assert p_value(codes, law) > 1e-3

    order = law.argsort()
    sign = torch.ones_like(law)
    sign[order[::2]] = -1
    up, down = law[sign > 0].sum(), law[sign < 0].sum()
    shifted = law + 0.02 * torch.where(sign > 0, law / up, -law / down)
    assert (shifted - law).abs().sum().item() / 2 == pytest.approx(0.02)
    assert p_value(codes, shifted) < 1e-3

    assert p_value(sample(P4, Q4, MISTAKEN4, 54_000, seed=0, verify=verify), law) < 1e-3


def test_unnormalised_residual_would_be_seen_by_the_draw():
    """p - q has half of the mass here; drawn from as it is, the last token would get the missing half."""
    p = torch.tensor([[[0.5, 0.25, 0.25], [1.0, 0.0, 0.0]]])
    q = torch.tensor([[[0.0, 0.5, 0.5]]])
    accepted = torch.zeros(1, dtype=torch.long)
    assert residual(p, q, accepted).tolist() == [[1.0, 0.0, 0.0]]
    q = torch.tensor([[[0.25, 0.75, 0.0]]])
    assert residual(p, q, accepted).tolist() == [[0.5, 0.0, 0.5]]
    tokens = inverse_cdf(residual(p, q, accepted).expand(CELLS, 3), midpoints(CELLS))
    assert tokens.bincount(minlength=3).tolist() == [CELLS // 2, 0, CELLS // 2]


# ---- single decisions


def random_laws(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).mul(3).softmax(-1)


def one_hot(tokens, vocabulary):
    return torch.nn.functional.one_hot(torch.as_tensor(tokens), vocabulary).float()


def test_impossible_token_is_rejected_even_by_a_uniform_of_zero():
    p, q = one_hot([[0, 0]], 2), torch.tensor([[[0.5, 0.5]]])
    assert acceptance(p, q, torch.tensor([[1]]), torch.zeros(1, 1)).tolist() == [0]
    assert acceptance(p, q, torch.tensor([[0]]), torch.zeros(1, 1)).tolist() == [1]


def test_equality_of_threshold_and_uniform_rejects():
    p, q = torch.tensor([[[0.75, 0.25]] * 2]), torch.tensor([[[0.5, 0.5]]])
    uniforms = torch.tensor([[0.5]])
    assert acceptance(p, q, torch.tensor([[1]]), uniforms).tolist() == [0]
    assert acceptance(p, q, torch.tensor([[1]]), uniforms - 2**-24).tolist() == [1]


def test_nothing_is_accepted_after_a_rejection():
    p, q = one_hot([[0, 1, 2, 3]], 4), one_hot([[0, 2, 2]], 4)
    assert rejection(p, q, torch.tensor([[0, 2, 2]])) == (1, 1)
    assert match(torch.tensor([[0, 1, 2, 3]]), torch.tensor([[0, 2, 2]])) == (1, 1)


def test_each_row_gets_its_own_length_and_the_token_after_it():
    """Row r accepts r proposals; the target's tokens differ at every position and in every row."""
    vocabulary, width = 20, 3
    choices = torch.arange(16).reshape(4, 4)
    proposals = choices[:, :-1].clone()
    for row in range(width):
        proposals[row, row] = 19
    expected = Verdict(torch.arange(4), choices.diagonal())
    for verdict in (
        match(choices, proposals),
        rejection(one_hot(choices, vocabulary), one_hot(proposals, vocabulary), proposals),
    ):
        assert torch.equal(verdict.accepted, expected.accepted)
        assert torch.equal(verdict.token, expected.token)
        assert verdict.accepted.dtype == verdict.token.dtype == torch.int64


def test_rows_of_a_batch_do_not_see_each_other():
    p, q = random_laws(64, 4, 5), random_laws(64, 3, 5, seed=1)
    proposals, uniforms = draw(q), torch.rand(64, 3)
    accepted = acceptance(p, q, proposals, uniforms)
    laws = residual(p, q, accepted)
    tokens = inverse_cdf(laws, uniforms[:, 0])
    assert set(accepted.tolist()) == {0, 1, 2, 3}
    for b in range(64):
        row = slice(b, b + 1)
        assert torch.equal(accepted[row], acceptance(p[row], q[row], proposals[row], uniforms[row]))
        assert torch.equal(laws[row], residual(p[row], q[row], accepted[row]))
        assert torch.equal(tokens[row], inverse_cdf(laws[row], uniforms[row, 0]))


def test_no_proposals_leave_one_token_of_the_target():
    choices = torch.tensor([[4], [2]])
    nothing = torch.empty(2, 0, dtype=torch.long)
    for verdict in (match(choices, nothing), rejection(one_hot(choices, 5), torch.empty(2, 0, 5), nothing)):
        assert verdict.accepted.tolist() == [0, 0]
        assert verdict.token.tolist() == [4, 2]


def test_perfect_drafter_is_always_accepted_and_never_corrected():
    q = random_laws(500, 3, 50)
    proposals = draw(q)
    bonus = torch.arange(500) % 50
    p = torch.cat([q, one_hot(bonus, 50)[:, None]], dim=1)
    assert acceptance(p, q, proposals, torch.full((500, 3), 1 - 2**-24)).eq(3).all()
    verdict = rejection(p, q, proposals)
    assert verdict.accepted.eq(3).all()
    assert torch.equal(verdict.token, bonus)


def test_disjoint_supports_accept_nothing():
    p, q = random_laws(500, 3, 8), random_laws(500, 2, 8, seed=1)
    p[..., 4:], q[..., :4] = 0, 0
    p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    verdict = rejection(p, q, draw(q))
    assert verdict.accepted.eq(0).all()
    assert set(verdict.token.tolist()) == {0, 1, 2, 3}


def test_residual_without_mass_is_the_target():
    p, q = random_laws(3, 3, 4), random_laws(3, 2, 4, seed=1)
    q[0], q[1] = p[0, :2], p[1, :2] * (1 + 2**-20)  # equal, and above by rounding
    laws = residual(p, q, torch.tensor([1, 0, 0]))
    assert torch.equal(laws[:2], torch.stack([p[0, 1], p[1, 0]]))
    assert not torch.equal(laws[2], p[2, 0])
    assert laws.isfinite().all()


def test_residual_is_a_law_and_after_the_last_proposal_it_is_the_target():
    p, q = random_laws(40, 4, 7), random_laws(40, 3, 7, seed=1)
    laws = residual(p, q, torch.arange(40) % 4)
    assert torch.allclose(laws.sum(-1), torch.ones(40), atol=1e-6)
    assert torch.allclose(laws[3::4], p[3::4, 3], atol=1e-6)


def test_rejected_token_is_never_drawn_again():
    p, q = random_laws(2000, 2, 6), random_laws(2000, 1, 6, seed=1)
    proposals = draw(q)
    verdict = rejection(p, q, proposals)
    rejected = verdict.accepted == 0
    assert rejected.any()
    assert (verdict.token != proposals[:, 0])[rejected].all()


@pytest.mark.parametrize("scale", [1.0, 1 - 1e-3, 1 + 1e-3])
def test_token_of_probability_zero_is_never_drawn(scale):
    """Whatever rounding does to the last sum: at u = 0, at the largest u below 1, and between."""
    law = torch.tensor([0.0, 0.0, 0.3, 0.0, 0.7, 0.0, 0.0]) * scale
    uniforms = torch.cat([torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64), midpoints(1000)])
    tokens = inverse_cdf(law.expand(len(uniforms), -1), uniforms)
    assert tokens[:2].tolist() == [2, 4]
    assert set(tokens.tolist()) == {2, 4}


def test_token_of_probability_zero_is_never_drawn_where_sums_round_differently():
    """A parallel sum may add in another order for each token, and so step up or down where there is no probability."""
    law = torch.tensor([0.0, 0.25, 0.0, 0.25, 0.0, 0.0, 0.5, 0.0])
    noise = torch.tensor([0.0, 0.0, 1e-7, 0.0, 2e-7, -1e-7, -2e-7, 1e-7], dtype=torch.float64)
    cumsum = torch.Tensor.cumsum
    near = torch.tensor([0.25, 0.5, 1.0], dtype=torch.float64)[:, None] + torch.arange(-9, 10) * 5e-8
    uniforms = near[near < 1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "cumsum", lambda self, dim, dtype: cumsum(self, dim, dtype=dtype) + noise)
        tokens = inverse_cdf(law.expand(len(uniforms), -1), uniforms)
    assert set(tokens.tolist()) == {1, 3, 6}


def test_uniform_on_a_boundary_belongs_to_the_next_token():
    law = torch.tensor([0.25, 0.25, 0.5])
    assert inverse_cdf(law.expand(3, -1), torch.tensor([0.0, 0.25, 0.5])).tolist() == [0, 1, 2]


def test_tail_below_the_resolution_of_float32_is_drawn_evenly():
    """1024 tokens of probability 2^-30 after one that has all the rest: sums in float32 reach each 64th of them."""
    law = torch.full((1025,), 2.0**-30)
    law[0] = 1 - 2**-20
    uniforms = 1 - (1023.5 - torch.arange(1024, dtype=torch.float64)) * 2.0**-30
    assert torch.equal(inverse_cdf(law.expand(1024, -1), uniforms), torch.arange(1, 1025))
    seen = []
    original = torch.rand
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "rand", lambda *a, **k: seen.append(k["dtype"]) or original(*a, **k))
        draw(law)
    assert seen == [torch.float64]


@pytest.mark.parametrize("shape", [(), (5,), (2, 3), (2, 0)])
def test_draw_keeps_the_leading_shape(shape):
    tokens = torch.full(shape, 3)
    drawn = draw(one_hot(tokens, 7))
    assert drawn.dtype == torch.int64
    assert torch.equal(drawn, tokens)


def test_generator_decides_everything_and_the_global_one_is_left_alone():
    p, q = random_laws(200, 4, 5), random_laws(200, 3, 5, seed=1)
    proposals, state = draw(q), torch.get_rng_state()

    def run(seed):
        return torch.cat(rejection(p, q, proposals, generator=torch.Generator().manual_seed(seed)))

    assert torch.equal(run(0), run(0))
    assert not torch.equal(run(0), run(1))
    assert torch.equal(torch.get_rng_state(), state)


# ---- refusals


@pytest.mark.parametrize("columns", [1, 2, 4])
def test_match_refuses_choices_of_another_width(columns):
    with pytest.raises(ValueError, match="2 proposals need 3 choices"):
        match(torch.zeros(1, columns, dtype=torch.long), torch.zeros(1, 2, dtype=torch.long))


@pytest.mark.parametrize(
    ("p_shape", "q_shape"),
    [((1, 2, 5), (1, 2, 5)), ((1, 3, 5), (1, 3, 5)), ((1, 3, 5), (1, 2, 6)), ((2, 3, 5), (1, 2, 5))],
)
def test_rejection_refuses_other_shapes(p_shape, q_shape):
    with pytest.raises(ValueError, match="over one vocabulary"):
        rejection(torch.zeros(p_shape), torch.zeros(q_shape), torch.zeros(1, 2, dtype=torch.long))


def test_rejection_refuses_half_precision():
    p, q = random_laws(1, 3, 5), random_laws(1, 2, 5)
    for laws in ((p.bfloat16(), q), (p, q.bfloat16()), (p.bfloat16(), q.bfloat16())):
        with pytest.raises(TypeError, match=r"both must be torch\.float32"):
            rejection(*laws, torch.zeros(1, 2, dtype=torch.long))


def test_block_rejects_an_impossible_token_even_by_a_uniform_of_zero(monkeypatch):
    p, q = torch.tensor([[[1.0, 0.0], [1.0, 0.0]]]), torch.tensor([[[0.5, 0.5]]])
    monkeypatch.setattr(torch, "rand", lambda *shape, **kwargs: torch.zeros(*shape, dtype=kwargs.get("dtype")))
    assert block(p, q, torch.tensor([[1]])).accepted.tolist() == [0]
    assert block(p, q, torch.tensor([[0]])).accepted.tolist() == [1]
