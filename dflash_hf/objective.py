"""
The training objective as pure functions: where blocks start, what each slot should say, how much it counts.

Symbols as in `modeling_dflash.py`: B rows, S tokens in a row, N blocks, K slots, G = K - 1 predicted slots.
"""

import torch
from torch.nn import functional as F


IGNORE = -100  # label of a slot without loss


def sample_anchors(
    supervised: torch.Tensor, num_anchors: int, generator: torch.Generator | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Draw up to `num_anchors` anchors in each row, uniformly and without replacement (paper, section 4.2).

    A token can be an anchor when it and the token after it are the target's own words: the first because decoding
    starts from a committed token, the second so that there is something to predict.

    Args:
        supervised (`torch.Tensor` of shape `(B, S)`, bool): the tokens that the target wrote.

    Returns:
        `(anchors, keep)` of shapes `(B, N)`: indices in ascending order, and False where a row had no more anchors.
        N is the largest number that a row needs, so no more than `num_anchors`.
    """
    valid = supervised[:, :-1] & supervised[:, 1:]  # [B, S - 1]
    num_blocks = max(1, min(num_anchors, int(valid.sum(1).max())))
    keys = torch.rand(valid.shape, generator=generator, device=valid.device)
    chosen = torch.where(valid, keys, 2.0).topk(num_blocks, largest=False).indices
    keep = valid.gather(1, chosen)
    # Padding blocks stand at index 0, behind the others.
    order = torch.where(keep, chosen, valid.shape[1]).argsort(dim=1)
    keep = keep.gather(1, order)
    return torch.where(keep, chosen.gather(1, order), 0), keep


def block_labels(
    input_ids: torch.Tensor, supervised: torch.Tensor, anchors: torch.Tensor, keep: torch.Tensor, block_size: int
) -> torch.Tensor:
    """
    Fill-in labels: slot i of the block at anchor a should say token a + i; slot 0 says nothing.

    Returns:
        `torch.Tensor` of shape `(B, N, G)`, int64: labels of slots 1 to K - 1, [`IGNORE`] beyond the row's end,
        outside what the target wrote, and in padding blocks.
    """
    length = input_ids.shape[1]
    index = anchors.unsqueeze(-1) + torch.arange(1, block_size, device=anchors.device)  # [B, N, G]
    inside = index < length
    flat = index.clamp(max=length - 1).flatten(1)
    labels = input_ids.gather(1, flat).view_as(index)
    said = supervised.gather(1, flat).view_as(index)
    return torch.where(inside & said & keep.unsqueeze(-1), labels, IGNORE)


def slot_weights(block_size: int, decay: float | None, device: torch.device | None = None) -> torch.Tensor:
    """
    Weight of each predicted slot, `w_k = exp(-(k - 1) / decay)` for k = 1 .. K - 1 (paper, equation 4).

    The first predicted slot has weight 1: a wrong token makes all after it useless. `decay=None`: all equal.
    """
    k = torch.arange(1, block_size, device=device, dtype=torch.float32)
    return torch.ones_like(k) if decay is None else torch.exp(-(k - 1) / decay)


def weighted_cross_entropy(logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """
    Cross-entropy of the slots, averaged with their weights: `sum w_k CE_k / sum w_k` over all slots with a label.

    Args:
        logits (`torch.Tensor` of shape `(..., G, V)`), labels (`(..., G)`), weights (`(G,)`).

    Returns:
        Scalar, float32; 0 (with a gradient of 0) when no slot has a label.
    """
    loss = F.cross_entropy(
        logits.flatten(0, -2).float(), labels.flatten(), ignore_index=IGNORE, reduction="none"
    ).view(labels.shape)
    weights = weights * (labels != IGNORE)
    return (loss * weights).sum() / weights.sum().clamp(min=torch.finfo(torch.float32).tiny)


def slot_hits(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Which slots were right, and the length of the right prefix of each block.

    Returns:
        `(hits, leading)`: bool `(..., G)`, and int64 `(...)`: the number of slots right before the first wrong one,
        which is what decoding would accept.
    """
    hits = logits.argmax(-1) == labels
    return hits, hits.long().cumprod(-1).sum(-1)
