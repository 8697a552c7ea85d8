"""Verification: which proposals the target keeps, and the one token it adds. Pure functions of tensors.

B batch, G proposals verified in this round, V vocabulary; p = target, q = drafter. Position i of p is the target's
distribution after the first i proposals, so p has one row more than q: the last is for the bonus token.

- `match`: the target picks a token at every position and keeps the proposals equal to its picks. With argmax picks the
  output is the target's greedy output, with sampled picks it has the target's law, however the proposals were chosen.
- `rejection`: speculative sampling, Algorithm 1 of Leviathan et al. (2211.17192), Algorithm 2 of Chen et al.
  (2302.01318, where p and q swap names). It has the target's law if each proposal was drawn from the q passed here,
  and if whether slot k is verified was decided without looking at proposal k or any later one.
- `block`: a joint decision, Algorithm 2 of Sun et al. (2403.10444): a proposal that `rejection` would drop may be kept
  for the sake of those after it, so that it keeps at least as many on average. Same conditions, same law.

Values of probabilities are not checked, since that would make the device wait: rows must be non-negative and sum to 1.
"""

from typing import NamedTuple

import torch
from torch.nn.functional import pad


class Verdict(NamedTuple):
    """What one round commits in each row: `accepted` proposals, then `token`.

    Fields:
        accepted (`torch.LongTensor` of shape `(B,)`): length of the longest valid prefix of the proposals, 0 to G.
        token (`torch.LongTensor` of shape `(B,)`): the target's own next token, a correction or the bonus.
    """

    accepted: torch.Tensor
    token: torch.Tensor


def match(choices: torch.Tensor, proposals: torch.Tensor) -> Verdict:
    """Keeps the proposals that equal the target's own picks, then adds the pick that follows them.

    Args:
        choices (`torch.LongTensor` of shape `(B, G + 1)`): argmax of p (greedy) or a draw from p, at every position.
        proposals (`torch.LongTensor` of shape `(B, G)`): chosen in any way that does not look at `choices`.

    Raises `ValueError` if the shapes disagree. Greedy case: Leviathan et al., Section 2.2 with an argmax p.
    """
    batch, width = proposals.shape
    if choices.shape != (batch, width + 1):
        raise ValueError(
            f"choices has shape {tuple(choices.shape)}, proposals {tuple(proposals.shape)}: "
            f"{width} proposals need {width + 1} choices in each of {batch} rows, the last one for the bonus token."
        )
    accepted = _prefix_length(choices[:, :-1] == proposals)
    return Verdict(accepted, choices.gather(1, accepted[:, None]).squeeze(1))


def rejection(
    p: torch.Tensor, q: torch.Tensor, proposals: torch.Tensor, *, generator: torch.Generator | None = None
) -> Verdict:
    """Accepts proposal x with probability min(1, p(x) / q(x)); draws the next token from the residual law, or from p.

    Args:
        p (`torch.FloatTensor` of shape `(B, G + 1, V)`): the target after all logits processors, in float32.
        q (`torch.FloatTensor` of shape `(B, G, V)`): the law each proposal was drawn from, in float32.
        proposals (`torch.LongTensor` of shape `(B, G)`): one draw from each q.
        generator (`torch.Generator`, *optional*): on the device of p; the global one if not given.

    Raises `ValueError` if the shapes disagree, `TypeError` if p or q is not float32. Source: Leviathan et al.,
    Algorithm 1.
    """
    _check(p, q, proposals)
    uniforms = torch.rand(proposals.shape, generator=generator, device=p.device)
    accepted = acceptance(p, q, proposals, uniforms)
    return Verdict(accepted, draw(residual(p, q, accepted), generator))


def block(
    p: torch.Tensor, q: torch.Tensor, proposals: torch.Tensor, *, generator: torch.Generator | None = None
) -> Verdict:
    """Accepts the longest prefix i with u_i < h_i, each u_i uniform; draws the next token from the residual law.

    Arguments and errors as of [`rejection`]. Source: Sun et al., Algorithm 2.
    """
    _check(p, q, proposals)
    reach = reaches(p, q, proposals)
    uniforms = torch.rand(proposals.shape, generator=generator, device=p.device)
    accepted = longest(uniforms < thresholds(p, q, reach))
    return Verdict(accepted, draw(residual(p, q, accepted, reach.gather(1, accepted[:, None])), generator))


def reaches(p: torch.Tensor, q: torch.Tensor, proposals: torch.Tensor) -> torch.Tensor:
    """`P_i = min(1, P_{i-1} p(x_i) / q(x_i))` with `P_0 = 1` (Sun et al., Eq. 4): `(B, G + 1)` float32."""
    index = proposals.unsqueeze(-1)
    ratios = p[:, :-1].gather(-1, index).squeeze(-1) / q.gather(-1, index).squeeze(-1)  # [B, G]
    # A walk of logarithms that is held below 0: the sum so far, less the highest that it has been above 0.
    walk = ratios.log().cumsum(-1)
    return pad((walk - walk.cummax(-1).values.clamp(min=0)).exp(), (1, 0), value=1.0)


def thresholds(p: torch.Tensor, q: torch.Tensor, reach: torch.Tensor) -> torch.Tensor:
    """The probability h_i that prefix i is kept unless a longer one is: `(B, G)` float32, from `reach` `(B, G + 1)`.

    Sun et al., Algorithm 2: `h_i = s_i / (s_i + 1 - P_i)` with `s_i = sum(max(0, P_i p - q))` at the position after
    the prefix, 1 where that is 0 / 0; and `h_G = P_G`.
    """
    inner = reach[:, 1:-1]  # [B, G - 1]
    mass = (inner.unsqueeze(-1) * p[:, 1:-1] - q[:, 1:]).clamp(min=0).sum(-1)
    total = mass + 1 - inner
    return torch.cat([torch.where(total == 0, 1.0, mass / total), reach[:, 1:][:, -1:]], dim=1)


def longest(kept: torch.Tensor) -> torch.Tensor:
    """The longest prefix that is kept, whatever happened to shorter ones: `(B, G)` bool to `(B,)` int64, 0 if none."""
    lengths = torch.arange(1, kept.shape[1] + 1, device=kept.device)
    return pad(torch.where(kept, lengths, 0), (1, 0)).amax(-1)


def _check(p: torch.Tensor, q: torch.Tensor, proposals: torch.Tensor) -> None:
    """Raise for laws that do not belong to the proposals."""
    (batch, width), vocabulary = proposals.shape, p.shape[-1]
    if p.shape != (batch, width + 1, vocabulary) or q.shape != (batch, width, vocabulary):
        raise ValueError(
            f"p has shape {tuple(p.shape)}, q {tuple(q.shape)}, proposals {tuple(proposals.shape)}: "
            "these must be (B, G + 1, V), (B, G, V) and (B, G), with both models over one vocabulary."
        )
    if not p.dtype == q.dtype == torch.float32:
        raise TypeError(
            f"p is {p.dtype} and q is {q.dtype}: both must be torch.float32, the softmax of logits.float()."
        )


def acceptance(p: torch.Tensor, q: torch.Tensor, proposals: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """How many proposals are accepted, `(B,)` int64, given `uniforms` `(B, G)` in [0, 1); other shapes as `rejection`.

    Leviathan et al., Algorithm 1: n = min({i - 1 : r_i > p_i(x_i) / q_i(x_i)} and G). Without division, and strict, so
    that a token with p(x) = 0 is rejected even by a uniform that is exactly 0.
    """
    index = proposals.unsqueeze(-1)
    p_x = p[:, :-1].gather(-1, index).squeeze(-1)
    q_x = q.gather(-1, index).squeeze(-1)  # [B, G]
    return _prefix_length(uniforms * q_x < p_x)


def residual(
    p: torch.Tensor, q: torch.Tensor, accepted: torch.Tensor, scale: torch.Tensor | float = 1.0
) -> torch.Tensor:
    """The law of the token after the accepted prefix, norm(max(0, scale p - q)) at that position, `(B, V)` float32.

    Chen et al., (q(x) - p(x))_+ in Algorithm 2; Leviathan et al., p'(x) in Algorithm 1. Past the last proposal
    q = 0, since nothing was proposed there, and the formula gives p itself: the bonus token. Where rounding leaves no
    mass at all, the law is p. `scale` `(B, 1)` is 1 for `rejection`, and for `block` the P of the accepted prefix
    (Sun et al., Eq. 5).
    """
    rows = torch.arange(accepted.shape[0], device=accepted.device)
    p_n = p[rows, accepted]  # [B, V]
    q_n = pad(q, (0, 0, 0, 1))[rows, accepted]  # [B, V]
    excess = (scale * p_n - q_n).clamp(min=0)
    mass = excess.sum(-1, keepdim=True)
    return torch.where(mass > 0, excess / mass, p_n)


def draw(probabilities: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
    """One token from each distribution: `(..., V)` float, each row summing to 1, to `(...)` int64."""
    # A tail of many small probabilities needs the resolution of float64, which MPS does not have.
    dtype = torch.float32 if probabilities.device.type == "mps" else torch.float64
    shape, device = probabilities.shape[:-1], probabilities.device
    return inverse_cdf(probabilities, torch.rand(shape, generator=generator, dtype=dtype, device=device))


def inverse_cdf(probabilities: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """The first token whose cumulative probability exceeds u: `(..., V)` and `(...)` to `(...)` int64.

    Sums in the dtype of `uniforms`. A token of probability 0 is never returned: where rounding leaves u at or beyond
    the last sum, the token is the last one of the support.
    """
    tokens = torch.arange(probabilities.shape[-1], device=probabilities.device)
    support = probabilities > 0
    last = torch.where(support, tokens, 0).amax(-1, keepdim=True)  # [..., 1]
    reached = probabilities.cumsum(-1, dtype=uniforms.dtype) > uniforms.unsqueeze(-1)
    return torch.where(support & reached, tokens, last).amin(-1)


def _prefix_length(valid: torch.Tensor) -> torch.Tensor:
    """Length of the run of true values that starts each row: `(B, G)` bool to `(B,)` int64."""
    return valid.long().cumprod(-1).sum(-1)
