"""
The training objective as pure functions: where blocks start, what each slot should say, how much it counts, how wrong
it is, and the sum of it all without ever holding the logits of all blocks.

Symbols as in `modeling_dflash.py`: B rows, S tokens in a row, N blocks, K slots, V words. G is the number of slots
that predict something: K - 1 with fill-in labels (slot 0 says nothing), K with next-token labels. Either way the j-th
of them, j = 1 .. G, should say the token j places after the anchor.
"""

from collections.abc import Callable

import torch
from torch.nn import functional as F


IGNORE = -100  # label of a slot without loss


# ------------------------------------------------------------------------------------------------------------ anchors
def valid_anchors(supervised: torch.Tensor, document: torch.Tensor) -> torch.Tensor:
    """
    Which tokens can be anchors, `(B, S)` bool: they and the next token of the same text are the target's own words.

    The token itself because decoding starts a block from a committed token, the next so that there is something to
    predict. Blocks may reach beyond the end of a text; what lies there has no label.

    Args:
        supervised (`torch.Tensor` of shape `(B, S)`, bool): the tokens that the target wrote.
        document (`torch.Tensor` of shape `(B, S)`, int64): number of the text that each token belongs to.
    """
    follows = torch.zeros_like(supervised)
    follows[:, :-1] = supervised[:, 1:] & (document[:, 1:] == document[:, :-1])
    return supervised & follows


def draw_anchors(
    supervised: torch.Tensor,
    document: torch.Tensor,
    num_anchors: int,
    *,
    seed: int,
    step: int,
    grid: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Draw up to `num_anchors` anchors in each text, uniformly and without replacement (paper, section 4.2).

    The draw depends on `seed`, `step` and the number of the text alone: not on the batch that the text is in, on the
    number of processes, or on a resume.

    Args:
        grid (`int`, *optional*): no draw; every `grid`-th valid place of a text is an anchor, as in ordinary block
            diffusion (paper, table 13).

    Returns:
        `(anchors, keep)` of shape `(B, N)`: places in the row in ascending order, and False where a row has fewer than
        N (the place is 0 there). N is at least 1.
    """
    valid = valid_anchors(supervised, document).cpu()
    document = document.cpu()
    rows = []
    for places, texts in ((row.nonzero().squeeze(1), text[row]) for row, text in zip(valid, document, strict=True)):
        drawn = [places[:0]]
        for text in texts.unique().tolist():
            here = places[texts == text]
            if grid is not None:
                here = here[(here - here[0]) % grid == 0]
            else:
                # Python's hash of a tuple of integers is the same in every process.
                generator = torch.Generator().manual_seed(hash((seed, step, text)))
                here = here[torch.randperm(len(here), generator=generator)]
            drawn.append(here[:num_anchors])
        rows.append(torch.cat(drawn).sort().values)
    num_blocks = max(1, *map(len, rows))
    anchors = torch.stack([F.pad(row, (0, num_blocks - len(row))) for row in rows])
    keep = torch.stack([torch.arange(num_blocks) < len(row) for row in rows])
    return anchors.to(supervised.device), keep.to(supervised.device)


# ------------------------------------------------------------------------------------------------- labels and weights
def block_labels(
    input_ids: torch.Tensor,
    supervised: torch.Tensor,
    document: torch.Tensor,
    anchors: torch.Tensor,
    keep: torch.Tensor,
    num_predicted: int,
) -> torch.Tensor:
    """
    What each predicting slot should say: the tokens after the anchor, `(B, N, G)` int64.

    [`IGNORE`] from the first token on that the target did not write or that is of another text, and in padding blocks:
    decoding never comes past such a token either.
    """
    length = input_ids.shape[1]
    index = anchors.unsqueeze(-1) + torch.arange(1, num_predicted + 1, device=anchors.device)  # [B, N, G]
    flat = index.clamp(max=length - 1).flatten(1)
    same_text = document.gather(1, flat).view_as(index) == document.gather(1, anchors).unsqueeze(-1)
    said = supervised.gather(1, flat).view_as(index) & same_text & (index < length) & keep.unsqueeze(-1)
    labels = input_ids.gather(1, flat).view_as(index)
    return torch.where(said.long().cumprod(-1).bool(), labels, IGNORE)


def decay_weights(num_predicted: int, decay: float, device: torch.device | None = None) -> torch.Tensor:
    """
    `w_j = exp(-(j - 1) / decay)` for j = 1 .. G (paper, equation 4): a wrong token makes all after it useless.

    The same weights written as powers `g ** (j - 1)` have `decay = -1 / log(g)`; `decay = inf` counts all slots alike.
    """
    return torch.exp(-torch.arange(num_predicted, device=device, dtype=torch.float32) / decay)


def pace_weights(cross_entropy: torch.Tensor, labelled: torch.Tensor, floor: float = 0.5) -> torch.Tensor:
    """
    D-PACE: weights of the slots by what the drafter can do now (arXiv 2605.18810).

    With `q_i = exp(-CE_i)` raised to `(1 - floor) q_i + floor`, slot j counts with the expected length that hangs on
    it, `w_j = sum over m >= j of the product of q_1 .. q_m`. Slots without a label pass it on. No gradient flows.

    Args:
        cross_entropy, labelled (`torch.Tensor` of shape `(..., G)`).
    """
    q = (1 - floor) * torch.exp(-cross_entropy.detach()) + floor
    reach = torch.where(labelled, q, 1.0).cumprod(-1) * labelled  # [..., G]
    return reach.flip(-1).cumsum(-1).flip(-1) * labelled


# ------------------------------------------------------------------------------------------------------------- losses
def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """`-log q(label)` of each slot, `(..., G)` float32; 0 where the label is [`IGNORE`]. Logits are `(..., G, V)`."""
    flat = F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten(), ignore_index=IGNORE, reduction="none")
    return flat.view(labels.shape)


def kl_divergence(logits: torch.Tensor, target_logits: torch.Tensor) -> torch.Tensor:
    """`KL(p || q) = sum p (log p - log q)` of each slot, `(..., G)` float32; both logits are `(..., G, V)`."""
    q, p = logits.float().log_softmax(-1), target_logits.float().log_softmax(-1)
    return F.kl_div(q, p, reduction="none", log_target=True).sum(-1)


def total_variation(logits: torch.Tensor, target_logits: torch.Tensor) -> torch.Tensor:
    """`1 - sum min(p, q)` of each slot, `(..., G)` float32: how often rejection sampling refuses the slot's token."""
    q, p = logits.float().softmax(-1), target_logits.float().softmax(-1)
    return 0.5 * (p - q).abs().sum(-1)


class _SumInChunks(torch.autograd.Function):
    """Sums a loss over chunks of blocks, and takes each chunk's gradient while its logits are still there."""

    @staticmethod
    def forward(ctx, hidden: torch.Tensor, loss_of: Callable, chunk: int, with_gradient: bool) -> torch.Tensor:
        losses, gradients = [], []
        for start in range(0, len(hidden), chunk):
            part = hidden[start : start + chunk].detach()
            with torch.set_grad_enabled(with_gradient):
                part.requires_grad_(with_gradient)
                loss = loss_of(part, slice(start, start + chunk))  # [chunk]
            losses.append(loss.detach())
            if with_gradient:
                gradients.append(torch.autograd.grad(loss, part, torch.ones_like(loss))[0])
        ctx.save_for_backward(*gradients)
        return torch.cat(losses)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        parts = ctx.saved_tensors
        blocks = gradient.split([len(part) for part in parts])
        scaled = [part * g.view(-1, *[1] * (part.dim() - 1)) for part, g in zip(parts, blocks, strict=True)]
        return torch.cat(scaled), None, None, None


def sum_in_chunks(
    hidden: torch.Tensor, loss_of: Callable[[torch.Tensor, slice], torch.Tensor], chunk: int
) -> torch.Tensor:
    """
    The loss of each block, `(blocks,)`, with logits for `chunk` blocks at a time.

    Head and loss of a chunk run forward and backward before the next chunk starts, so that the logits of all blocks,
    the largest tensors of the training, never exist together. Possible because the head is frozen: the only gradient
    to keep is that of `hidden`.

    Args:
        hidden (`torch.Tensor` of shape `(blocks, ...)`): the drafter's output.
        loss_of: takes some blocks of `hidden` and which ones they are, and returns their losses; each block's loss may
            depend on its own hidden states alone.
    """
    return _SumInChunks.apply(hidden, loss_of, chunk, torch.is_grad_enabled() and hidden.requires_grad)


# ------------------------------------------------------------------------------------------------------------ metrics
def slot_hits(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Which slots were right, and the length of the right prefix of each block.

    Returns:
        `(hits, leading)`: bool `(..., G)`, and int64 `(...)`: the number of slots right before the first wrong one,
        which is what decoding would accept.
    """
    hits = logits.argmax(-1) == labels
    return hits, hits.long().cumprod(-1).sum(-1)
