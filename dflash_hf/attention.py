"""
Attention of blocks that are trained together: scores of [context ; own block] alone.

As one big attention, N blocks of K slots have `N * K * (S + N * K)` scores, nearly all of them masked, because blocks
do not see each other. Here they have `N * K * (S + K)`. Registered with transformers under the name [`BLOCKS`].
"""

import torch
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .masking import BLOCKS, BlocksMask


def blocks_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: BlocksMask | torch.Tensor | None,
    *,
    scaling: float,
    dropout: float = 0.0,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """
    Args:
        query (`torch.Tensor` of shape `(B, heads, N * K, head_dim)`).
        key, value (`torch.Tensor` of shape `(B, kv heads, S + N * K, head_dim)`).
        attention_mask ([`BlocksMask`]): with any other mask, as when decoding, this is SDPA.

    Returns:
        `(output, None)`, output of shape `(B, N * K, heads, head_dim)`.
    """
    if not isinstance(attention_mask, BlocksMask):
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
        )
    context_mask, own_mask = attention_mask
    length, (num_blocks, block_size) = context_mask.shape[-1], own_mask.shape[1:3]
    heads = key.shape[1]
    groups = query.shape[1] // heads
    slots = (num_blocks, block_size)
    # Scaled first: products of long vectors would not fit into float16.
    query = (query * scaling).unflatten(1, (heads, groups)).unflatten(3, slots)  # [B, heads, groups, N, K, head_dim]
    own_key, own_value = (x[:, :, length:].unflatten(2, slots) for x in (key, value))  # [B, heads, N, K, head_dim]
    key, value = key[:, :, :length], value[:, :, :length]

    # All slots meet the context in one product for each head, and the slots of a block each other in small ones.
    to_context = query.flatten(2, 4) @ key.transpose(-1, -2)  # [B, heads, groups * N * K, S]
    by_block = query.transpose(2, 3).flatten(3, 4)  # [B, heads, N, groups * K, head_dim]
    to_own = (by_block @ own_key.transpose(-1, -2)).unflatten(3, (groups, block_size)).transpose(2, 3)
    scores = torch.cat([to_context.unflatten(2, (groups, *slots)), to_own], dim=-1)  # [B, heads, groups, N, K, S + K]
    hidden = ~torch.cat([context_mask.unflatten(1, slots), own_mask], dim=-1)[:, None, None]
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1, dtype=torch.float32).to(value.dtype)
    weights = nn.functional.dropout(weights, dropout, module.training)

    on_context, on_own = weights[..., :length], weights[..., length:]
    output = (on_context.flatten(2, 4) @ value).unflatten(2, (groups, *slots))
    own = on_own.transpose(2, 3).flatten(3, 4) @ own_value  # [B, heads, N, groups * K, head_dim]
    output = output + own.unflatten(3, (groups, block_size)).transpose(2, 3)  # [B, heads, groups, N, K, head_dim]
    return output.flatten(3, 4).flatten(1, 2).transpose(1, 2), None


ALL_ATTENTION_FUNCTIONS.register(BLOCKS, blocks_attention_forward)
