"""
Parts that some drafters have beside the layers of DFlash: convolutions over the block, and heads that let a slot know
what was proposed before it.

Symbols: H hidden size, r rank, V vocabulary (or shortlist) of the logits.
"""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from .configuration_dflash import DFlashConfig


# From the number of a slot, its logits `(rows, V)` and the ids `(rows,)` of the tokens before it to its logits.
Correct = Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor]
Embed = Callable[[torch.Tensor], torch.Tensor]


class DynamicConv(nn.Module):
    """
    Causal depth-wise convolution over the slots of a block, whose kernel depends on them (DFlash 2).

    `out[t] = sum_o (base[o] + dynamic[t, o, group]) x[t - o]`, with nothing before the first slot. One kernel acts on
    what goes into a sub-layer, another on what comes out; both are made from what goes in.
    """

    def __init__(self, config: DFlashConfig):
        super().__init__()
        self.size, self.group = config.conv_kernel_size, config.conv_group_size
        self.base_kernel = nn.Parameter(torch.zeros(2, self.size, config.hidden_size))
        num_groups = config.hidden_size // self.group
        self.kernel_projection = nn.Linear(config.hidden_size, 2 * self.size * num_groups, bias=False)

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The input of a sub-layer `(B, slots, H)`, convolved, and the kernel for its output."""
        dynamic = self.kernel_projection(hidden).unflatten(-1, (2, self.size, -1))  # [B, slots, 2, size, groups]
        return self._convolve(hidden, dynamic[:, :, 0], self.base_kernel[0]), dynamic[:, :, 1]

    def finish(self, hidden: torch.Tensor, dynamic: torch.Tensor) -> torch.Tensor:
        """The output of a sub-layer `(B, slots, H)`, convolved."""
        return self._convolve(hidden, dynamic, self.base_kernel[1])

    def _convolve(self, hidden: torch.Tensor, dynamic: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
        kernel = base.to(hidden.dtype) + dynamic.repeat_interleave(self.group, dim=-1)  # [B, slots, size, H]
        earlier = F.pad(hidden, (0, 0, self.size - 1, 0)).unfold(1, self.size, 1).flip(-1)  # [B, slots, H, size]
        return (kernel.transpose(-1, -2) * earlier).sum(-1)


class MarkovHead(nn.Module):
    """
    Adds to a slot's logits what the token before it makes likely, `W2 f(W1[previous])` (DSpark).

    `markov`: f is the identity; `gated_markov`: a gate by the slot's hidden state; `rnn_markov`: a recurrent state
    over the slots so far.
    """

    def __init__(self, config: DFlashConfig, num_words: int):
        super().__init__()
        rank, hidden = config.proposal_rank, config.hidden_size
        self.kind = config.proposal_head
        self.markov_w1 = nn.Embedding(config.own_vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, num_words, bias=False)
        if self.kind == "gated_markov":
            self.gate_proj = nn.Linear(hidden + rank, rank)
        elif self.kind == "rnn_markov":
            self.joint_proj = nn.Linear(2 * rank + hidden, 3 * rank)

    def before(self, previous: torch.Tensor) -> torch.Tensor:
        """`W1[previous]`, `(..., r)`."""
        weight = self.markov_w1.weight
        return self.markov_w1(previous.to(weight.device).clamp(max=len(weight) - 1))

    def begin(self, hidden: torch.Tensor, embed: Embed) -> Correct:
        """For slots with hidden states `(rows, n, H)`, asked one after the other."""
        state = hidden.new_zeros(len(hidden), self.markov_w1.embedding_dim)

        def correct(slot: int, logits: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
            nonlocal state
            token, here = self.before(previous), hidden[:, slot]
            if self.kind == "gated_markov":
                token = torch.sigmoid(self.gate_proj(torch.cat([here, token], dim=-1))) * token
            elif self.kind == "rnn_markov":
                gate, new, token = self.joint_proj(torch.cat([state, token, here], dim=-1)).chunk(3, dim=-1)
                gate, token = torch.sigmoid(gate), torch.tanh(token)
                state = gate * state + (1 - gate) * torch.tanh(new)
            return logits + _fit(self.markov_w2(token), logits)

        return correct


class CandidateSelector(nn.Module):
    """
    Chooses among the likeliest tokens of a slot by how well they follow the token before it (DFlash 2).

    `score(b) = logit(b) + <A[previous] * P h, S[b]>` for the `selector_top_k` likeliest b; no other is proposed.
    """

    def __init__(self, config: DFlashConfig):
        super().__init__()
        rank, words = config.proposal_rank, config.own_vocab_size
        self.top_k = config.selector_top_k
        self.predecessor_codebook = nn.Parameter(torch.zeros(words, rank))
        self.successor_codebook = nn.Parameter(torch.zeros(words, rank))
        self.hidden_projection = nn.Linear(config.hidden_size, rank, bias=False)

    def begin(self, hidden: torch.Tensor, embed: Embed) -> Correct:
        """For slots with hidden states `(rows, n, H)`."""
        projected, last = self.hidden_projection(hidden), len(self.predecessor_codebook) - 1

        def correct(slot: int, logits: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
            likeliest, candidates = logits.topk(min(self.top_k, logits.shape[-1]), dim=-1)  # [rows, k]
            device = projected.device
            query = self.predecessor_codebook[previous.to(device).clamp(max=last)] * projected[:, slot]
            successors = self.successor_codebook[candidates.to(device).clamp(max=last)]  # [rows, k, r]
            scores = likeliest + (successors @ query.unsqueeze(-1)).squeeze(-1).to(logits)
            return torch.full_like(logits, -torch.inf).scatter(-1, candidates, scores)

        return correct


class DominoHead(nn.Module):
    """Adds to a slot's logits what its hidden state and a recurrent state over the tokens before it say (Domino)."""

    def __init__(self, config: DFlashConfig, num_words: int):
        super().__init__()
        rank, size = config.proposal_rank, config.domino_state_size
        self.prefix = config.domino_prefix
        self.prefix_gru = nn.GRU(config.hidden_size, size, batch_first=True, bias=False)
        self.embed_proj = nn.Sequential(
            nn.Linear(config.hidden_size + size, rank, bias=False),
            nn.SiLU(),
            nn.Linear(rank, num_words, bias=False),
        )

    def begin(self, hidden: torch.Tensor, embed: Embed) -> Correct:
        """For slots with hidden states `(rows, n, H)`, asked one after the other; the first few are left alone."""
        state = hidden.new_zeros(1, len(hidden), self.prefix_gru.hidden_size)

        def correct(slot: int, logits: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
            nonlocal state
            said, state = self.prefix_gru(embed(previous.unsqueeze(1)).to(hidden), state)
            if slot < self.prefix:
                return logits
            return logits + _fit(self.embed_proj(torch.cat([hidden[:, slot], said[:, 0]], dim=-1)), logits)

        return correct


class ConfidenceHead(nn.Module):
    """How likely a slot's proposal is accepted if those before it are, before one looks at it (DSpark)."""

    def __init__(self, config: DFlashConfig):
        super().__init__()
        size = config.hidden_size + (config.proposal_rank if config.confidence_head == "markov" else 0)
        self.proj = nn.Linear(size, 1)

    def forward(self, hidden: torch.Tensor, before: torch.Tensor | None) -> torch.Tensor:
        """Of slots `(rows, n, H)`, with what the Markov head has of the tokens before them, `(rows, n)`."""
        features = hidden if before is None else torch.cat([hidden, before], dim=-1)
        return torch.sigmoid(self.proj(features)).squeeze(-1)


def _fit(values: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """What is to be added to `logits`: tables may have more rows of padding than the target, or fewer."""
    return F.pad(values.to(logits), (0, logits.shape[-1] - values.shape[-1]))


def proposal_head(config: DFlashConfig, num_words: int) -> nn.Module | None:
    """What lets a slot know the proposals before it; `None` where slots are independent."""
    if config.proposal_head == "independent":
        return None
    if config.proposal_head == "selector":
        return CandidateSelector(config)
    return DominoHead(config, num_words) if config.proposal_head == "domino" else MarkovHead(config, num_words)
