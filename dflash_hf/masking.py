"""Who sees whom in [context ; block]: one predicate, for drafter and training, in each backend's form."""

from typing import NamedTuple

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torch.nn.functional import pad


FLEX_BLOCK = 128  # flex attention asks about queries and keys up to a multiple of this
BLOCKS = "blocks"  # the attention of `attention.py`, whose mask is a `BlocksMask`
_PAIRS = 2**24  # how many pairs of a query and a key are looked at at once to find the blocks that are seen
_NOBODY = -(2**31)  # the `block` of what is beyond the end; no slot and no committed token has it


class Standing(NamedTuple):
    """
    Where queries or keys stand, as tensors that broadcast against each other. Q = queries, KV = keys.

    Fields:
        place (`torch.Tensor` of shape `(B, n)` or `(1, n)`, int64): index in the text, counted without gaps.
        block (same shape, int64): number of the block a slot belongs to, from 0. A committed token is a block of its
            own, with the number `-1 - place`.
        anchor (same shape, int64): place of the anchor of that block; of a committed token, its own place.
        document (same shape, int64): which of several packed texts.
        valid (same shape, bool): False for padding.
    """

    place: torch.Tensor
    block: torch.Tensor
    anchor: torch.Tensor
    document: torch.Tensor
    valid: torch.Tensor


class BlocksMask(NamedTuple):
    """
    Who is seen by the slots of N blocks, without the pairs of two blocks, which never see each other.

    Fields:
        context (`torch.Tensor` of shape `(B, N * K, S)`, bool): which committed tokens each slot sees.
        own (`torch.Tensor` of shape `(B, N, K, K)`, bool): which slots of its block it sees.
    """

    context: torch.Tensor
    own: torch.Tensor


def visible(query: Standing, key: Standing, *, window: int | None, causal: bool) -> torch.Tensor:
    """
    The visibility predicate of DFlash (paper, section 4.1 and figure 4).

    A slot sees the committed tokens strictly *before* its anchor (the anchor has no feature yet when a block is
    drafted) and the slots of its own block: all of them, or if `causal` those up to itself. In a layer with a window,
    only what is less than `window` away. Where committed tokens are queries, each sees the committed tokens up to
    itself.

    Returns:
        `torch.Tensor`, bool, of the shape to which the tensors of `query` and `key` broadcast.
    """
    context = (key.block < 0) & (key.place < query.anchor) & (key.document == query.document) & key.valid
    # Padding sees itself, so that no row of the softmax is empty; its loss has weight zero.
    own = key.block == query.block
    if causal:
        own = own & (key.place <= query.place)
    seen = context | own
    if window is not None:
        seen = seen & ((query.place - key.place).abs() < window)
    return seen


def drafting_mask(
    num_context: int,
    block_size: int,
    *,
    window: int | None,
    causal: bool,
    padding: torch.Tensor | None = None,
    context_queries: int = 0,
    num_keys: int | None = None,
    device: torch.device | None = None,
) -> torch.Tensor | None:
    """
    Mask of one block that follows `num_context` committed tokens; without slots, of the committed tokens alone.

    Args:
        padding (`torch.Tensor` of shape `(B, num_context + block_size)`, *optional*):
            0 for padding, as in `attention_mask`.
        context_queries (`int`, *optional*, defaults to 0):
            How many of the last committed tokens are queries too, before the block.
        num_keys (`int`, *optional*):
            Only the last `num_keys` of `[context ; block]` are keys: what a sliding cache gives back.

    Returns:
        `torch.Tensor` of shape `(B or 1, context_queries + block_size, num_keys)`, bool, or `None` when nothing is
        hidden, so that every backend may take its fastest path.
    """
    if context_queries + block_size == 0:
        return None
    total = num_context + block_size
    num_keys = total if num_keys is None else num_keys
    unordered = context_queries == 0 and (not causal or block_size == 1)
    if unordered and padding is None and (window is None or window >= num_keys):
        return None
    column = torch.arange(total, device=device).unsqueeze(0)
    # Counted without padding, which may also stand between the context and the block.
    place = column if padding is None else padding.cumsum(-1) - 1
    committed = column < num_context
    key = Standing(
        place=place,
        block=torch.where(committed, -1 - column, 0),
        anchor=torch.where(committed, place, place[:, min(num_context, total - 1) :][:, :1]),
        document=torch.zeros_like(place),
        valid=torch.ones_like(committed) if padding is None else padding.bool(),
    )
    key = Standing(*(t[:, total - num_keys :] for t in key))
    query = Standing(*(t[:, -(context_queries + block_size) :] for t in key))
    return _dense(query, key, window=window, causal=causal)


def training_mask(
    anchors: torch.Tensor,
    block_size: int,
    valid: torch.Tensor,
    *,
    window: int | None,
    causal: bool,
    document: torch.Tensor | None = None,
    context_queries: bool = False,
    implementation: str = "sdpa",
) -> torch.Tensor | BlockMask | BlocksMask:
    """
    Mask of N blocks trained at once over one text of S tokens: KV is `[S context tokens | N * K slots]`.

    Args:
        anchors (`torch.Tensor` of shape `(B, N)`, int64): index of each block's anchor in the text.
        valid (`torch.Tensor` of shape `(B, S)`, bool): False for padding.
        document (`torch.Tensor` of shape `(B, S)`, int64, *optional*): packed texts do not see each other.
        context_queries (`bool`, *optional*, defaults to `False`): context tokens are queries too, before the slots.
        implementation (`str`, *optional*, defaults to `"sdpa"`): the attention implementation that the mask is for.

    Returns:
        `torch.Tensor` of shape `(B, N * K, S + N * K)`, with `context_queries` `(B, S + N * K, S + N * K)`, bool. For
        `"flex_attention"` the `BlockMask` of the same queries and keys, for [`BLOCKS`] a [`BlocksMask`]: no tensor of
        that size is made for either.

    Raises:
        `ValueError`: for [`BLOCKS`] with `context_queries`.
    """
    batch, length = valid.shape
    document = torch.zeros_like(valid, dtype=torch.int64) if document is None else document
    slots = _slots(anchors, block_size, document)
    place = torch.arange(length, device=anchors.device).expand(batch, length)
    context = Standing(place, -1 - place, place, document, valid)
    if implementation == BLOCKS:
        if context_queries:
            raise ValueError(
                f"attn_implementation={BLOCKS!r} takes queries in blocks only; conditioning='input' has context "
                "tokens among them. Use 'sdpa', 'eager' or 'flex_attention'."
            )
        blocks = Standing(*(t.unflatten(1, (-1, block_size)) for t in slots))
        kind = {"window": window, "causal": causal}
        return BlocksMask(_dense(slots, context, **kind), _dense(blocks, blocks, **kind))
    key = Standing(*(torch.cat(pair, dim=1) for pair in zip(context, slots, strict=True)))
    query = key if context_queries else slots
    make = _block_mask if implementation == "flex_attention" else _dense
    return make(query, key, window=window, causal=causal)


def _slots(anchors: torch.Tensor, block_size: int, document: torch.Tensor) -> Standing:
    """The slots of the blocks at `anchors`, flattened to N * K."""
    batch, num_blocks = anchors.shape
    shape = (batch, num_blocks, block_size)
    offset = torch.arange(block_size, device=anchors.device)
    block = torch.arange(num_blocks, device=anchors.device)
    slots = Standing(
        place=anchors.unsqueeze(-1) + offset,
        block=block.view(1, -1, 1).expand(shape),
        anchor=anchors.unsqueeze(-1).expand(shape),
        document=document.gather(1, anchors).unsqueeze(-1).expand(shape),
        valid=torch.ones(shape, dtype=torch.bool, device=anchors.device),
    )
    return Standing(*(t.reshape(batch, -1) for t in slots))


def _dense(query: Standing, key: Standing, *, window: int | None, causal: bool) -> torch.Tensor:
    """The predicate for all pairs, `(B, Q, KV)`."""
    query = Standing(*(t.unsqueeze(-1) for t in query))  # [B, Q, 1]
    key = Standing(*(t.unsqueeze(-2) for t in key))  # [B, 1, KV]
    return visible(query, key, window=window, causal=causal)


def _block_mask(query: Standing, key: Standing, *, window: int | None, causal: bool) -> BlockMask:
    """The predicate as a `BlockMask`: flex attention asks it about the pairs of those blocks that are partly seen."""
    lengths = query.place.shape[1], key.place.shape[1]
    query, key = _rounded(query), _rounded(key)
    (batch, num_queries), num_keys = query.place.shape, key.place.shape[1]
    step = FLEX_BLOCK * max(1, _PAIRS // (batch * num_keys * FLEX_BLOCK))
    seen = []
    for start in range(0, num_queries, step):
        rows = Standing(*(t[:, start : start + step] for t in query))
        mask = _dense(rows, key, window=window, causal=causal)
        seen.append(mask.unflatten(2, (-1, FLEX_BLOCK)).unflatten(1, (-1, FLEX_BLOCK)).sum((2, 4)))
    seen = torch.cat(seen, dim=1).unsqueeze(1)  # [B, 1, Q / 128, KV / 128]
    full = seen == FLEX_BLOCK**2

    def mask_mod(b, h, q, k):
        return visible(
            Standing(*(t[b, q] for t in query)), Standing(*(t[b, k] for t in key)), window=window, causal=causal
        )

    partial, full = _ordered((seen > 0) & ~full), _ordered(full)
    return BlockMask.from_kv_blocks(*partial, *full, BLOCK_SIZE=FLEX_BLOCK, mask_mod=mask_mod, seq_lengths=lengths)


def _rounded(standing: Standing) -> Standing:
    """Standing of a multiple of 128 queries or keys: those beyond the end see nothing and are seen by nobody."""
    extra = -standing.place.shape[1] % FLEX_BLOCK
    rounded = Standing(*(pad(t, (0, extra)) for t in standing))
    return rounded._replace(block=pad(standing.block, (0, extra), value=_NOBODY))


def _ordered(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """How many blocks of keys each block of queries sees, and their numbers, the seen ones first; both int32."""
    return blocks.sum(-1, dtype=torch.int32), blocks.int().argsort(dim=-1, descending=True, stable=True).int()


def for_backend(
    mask: torch.Tensor | BlockMask | BlocksMask | None, implementation: str, dtype: torch.dtype
) -> torch.Tensor | BlockMask | BlocksMask | None:
    """
    The form in which an attention implementation of transformers takes a `(B, Q, KV)` bool mask.

    Eager attention adds its mask to the scores, flex takes a `BlockMask`, the others take a bool of shape
    `(B, 1, Q, KV)`. A `BlockMask` or [`BlocksMask`] stays what it is.

    Raises:
        `ValueError`: for flash attention with a mask that it cannot express.
    """
    if mask is None or isinstance(mask, BlockMask | BlocksMask):
        return mask
    if "flash" in implementation:
        raise ValueError(
            f"attn_implementation={implementation!r} takes no mask over [context ; block], and this drafter needs one "
            "(a causal or sliding layer, conditioning='input', or padding). Load the drafter with "
            "attn_implementation='sdpa'."
        )
    if implementation == "flex_attention":
        batch, queries, keys = mask.shape
        whole = pad(mask, (0, -keys % FLEX_BLOCK, 0, -queries % FLEX_BLOCK))
        # One mask may stand for all rows of a batch.
        mod = (lambda b, h, q, k: whole[0, q, k]) if batch == 1 else (lambda b, h, q, k: whole[b, q, k])
        return create_block_mask(mod, batch, None, queries, keys, device=mask.device.type)
    mask = mask.unsqueeze(1)  # [B, 1, Q, KV]
    if implementation == "eager":
        return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
    return mask
