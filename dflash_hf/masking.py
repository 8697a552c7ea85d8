"""Who sees whom in [context ; block]: one predicate, for drafting and for training, in each backend's form."""

from dataclasses import dataclass

import torch


CONTEXT = -1  # the `block` of a key that is a committed token


@dataclass(frozen=True)
class Standing:
    """
    Where queries or keys stand, as tensors that broadcast against each other. Q = queries, KV = keys.

    Attributes:
        index (`torch.Tensor` of shape `(B, n)` or `(1, n)`, int64): place in the text, counted without gaps.
        block (same shape, int64): number of the block a slot belongs to; [`CONTEXT`] for a committed token.
        anchor (same shape, int64): index of the anchor of that block (unused for keys).
        document (same shape, int64): which of several packed texts.
        valid (same shape, bool): False for padding.
    """

    index: torch.Tensor
    block: torch.Tensor
    anchor: torch.Tensor
    document: torch.Tensor
    valid: torch.Tensor


def visible(query: Standing, key: Standing, *, window: int | None, causal: bool) -> torch.Tensor:
    """
    The visibility predicate of DFlash (paper, section 4.1 and figure 4).

    A slot sees the committed tokens strictly *before* its anchor (the anchor has no feature yet when a block is
    drafted) and the slots of its own block: all of them, or if `causal` those up to itself. In a layer with a window,
    only what is less than `window` away.

    Returns:
        `torch.Tensor` of shape `(B, Q, KV)`, bool.
    """

    def q(field: str) -> torch.Tensor:
        return getattr(query, field).unsqueeze(-1)  # [B, Q, 1]

    def k(field: str) -> torch.Tensor:
        return getattr(key, field).unsqueeze(-2)  # [B, 1, KV]

    context = (k("block") == CONTEXT) & (k("index") < q("anchor")) & (k("document") == q("document")) & k("valid")
    # A padding block sees itself, so that no row of the softmax is empty; its loss has weight zero.
    own = k("block") == q("block")
    if causal:
        own = own & (k("index") <= q("index"))
    seen = context | own
    if window is not None:
        distance = q("index") - k("index")
        seen = seen & (distance.abs() < window)
    return seen


def drafting_mask(
    num_context: int,
    block_size: int,
    *,
    window: int | None,
    causal: bool,
    padding: torch.Tensor | None = None,
    device: torch.device | None = None,
) -> torch.Tensor | None:
    """
    Mask of one block that follows `num_context` committed tokens.

    Args:
        padding (`torch.Tensor` of shape `(B, num_context + block_size)`, *optional*):
            0 for padding, as in `attention_mask`.

    Returns:
        `torch.Tensor` of shape `(B or 1, block_size, num_context + block_size)`, bool, or `None` when nothing is
        hidden, so that every backend may take its fastest path.
    """
    total = num_context + block_size
    if not causal and padding is None and (window is None or window >= total):
        return None
    index = torch.arange(total, device=device).unsqueeze(0)
    zeros = torch.zeros_like(index)
    block = torch.where(index < num_context, CONTEXT, 0)
    valid = torch.ones_like(index, dtype=torch.bool) if padding is None else padding.bool()
    key = Standing(index, block, zeros, zeros, valid)
    last = slice(num_context, total)
    query = Standing(index[:, last], block[:, last], zeros[:, last] + num_context, zeros[:, last], valid[:, last])
    return visible(query, key, window=window, causal=causal)


def training_mask(
    anchors: torch.Tensor,
    block_size: int,
    valid: torch.Tensor,
    *,
    window: int | None,
    causal: bool,
    document: torch.Tensor | None = None,
) -> torch.Tensor:
    """
    Mask of N blocks trained at once over one text of S tokens: KV is `[S context tokens | N * K slots]`.

    Args:
        anchors (`torch.Tensor` of shape `(B, N)`, int64): index of each block's anchor in the text.
        valid (`torch.Tensor` of shape `(B, S)`, bool): False for padding.
        document (`torch.Tensor` of shape `(B, S)`, int64, *optional*): packed texts do not see each other.

    Returns:
        `torch.Tensor` of shape `(B, N * K, S + N * K)`, bool.
    """
    batch, length = valid.shape
    document = torch.zeros_like(valid, dtype=torch.int64) if document is None else document
    slots = _slots(anchors, block_size, document)
    index = torch.arange(length, device=anchors.device).expand(batch, length)
    context = Standing(index, torch.full_like(index, CONTEXT), index, document, valid)
    key = Standing(
        *(
            torch.cat([getattr(context, f), getattr(slots, f)], dim=1)
            for f in ("index", "block", "anchor", "document", "valid")
        )
    )
    return visible(slots, key, window=window, causal=causal)


def _slots(anchors: torch.Tensor, block_size: int, document: torch.Tensor) -> Standing:
    """The slots of the blocks at `anchors`, flattened to N * K."""
    batch, num_blocks = anchors.shape
    shape = (batch, num_blocks, block_size)
    offset = torch.arange(block_size, device=anchors.device)
    block = torch.arange(num_blocks, device=anchors.device)
    fields = (
        anchors.unsqueeze(-1) + offset,
        block.view(1, -1, 1).expand(shape),
        anchors.unsqueeze(-1).expand(shape),
        document.gather(1, anchors).unsqueeze(-1).expand(shape),
        torch.ones(shape, dtype=torch.bool, device=anchors.device),
    )
    return Standing(*(field.reshape(batch, -1) for field in fields))


def for_backend(mask: torch.Tensor | None, implementation: str, dtype: torch.dtype) -> torch.Tensor | None:
    """
    The form in which an attention implementation of transformers takes a `(B, Q, KV)` bool mask.

    Eager attention adds its mask to the scores, flex takes a `BlockMask`, the others take a bool of shape
    `(B, 1, Q, KV)`.

    Raises:
        `ValueError`: for flash attention with a mask that it cannot express.
    """
    if mask is None:
        return None
    if "flash" in implementation:
        raise ValueError(
            f"attn_implementation={implementation!r} takes no mask over [context ; block], and this drafter needs one "
            "(a causal or sliding layer, or padding). Load the drafter with attn_implementation='sdpa'."
        )
    if implementation == "flex_attention":
        from torch.nn.attention.flex_attention import create_block_mask

        batch, queries, keys = mask.shape
        return create_block_mask(lambda b, h, q, k: mask[b, q, k], batch, None, queries, keys, device=mask.device.type)
    mask = mask.unsqueeze(1)  # [B, 1, Q, KV]
    if implementation == "eager":
        return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
    return mask
