"""From the drafter's hidden states to proposals: independent slots, over the whole vocabulary or a shortlist."""

import torch
from torch import nn
from torch.nn import functional as F

from .modeling_dflash import DFlashDraftModel
from .target import Target


class ProposalHead:
    """
    The target's head for the drafter, or its rows for the tokens that the drafter proposes from.

    The rows are copied at every call: that takes about as long as one draft's logits, and a copy that outlived the
    call would not notice a head that is changed in place.

    Args:
        drafter (`DFlashDraftModel`), target (`Target`): the pair.
    """

    def __init__(self, drafter: DFlashDraftModel, target: Target):
        self.head, self.shape = target.head, target.shape_logits
        self.device, self.dtype = target.device, target.head_dtype
        self.token_ids = drafter.draft_token_ids
        self.rows: torch.Tensor | None = None
        if self.token_ids is not None:
            self.token_ids = self.token_ids.to(self.device)
            # A head that is a plain matrix, and here, need not compute the rows that nobody reads.
            plain = type(self.head) is nn.Linear and type(self.head.weight) is nn.Parameter
            if plain and self.head.weight.device == self.device:
                self.rows = self.head.weight.index_select(0, self.token_ids)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of slots `(B, G, H)`, over the shortlist if there is one: `(B, G, V)`, float32."""
        # Of a slice, a linear layer would make one small product for each block, many times slower than a big one.
        hidden = hidden.to(self.device, self.dtype).contiguous()
        if self.rows is not None:
            bias = None if self.head.bias is None else self.head.bias[self.token_ids]
            return self.shape(F.linear(hidden, self.rows, bias).float())
        logits = self.shape(self.head(hidden).float())
        return logits if self.token_ids is None else logits[..., self.token_ids]

    def greedy(self, logits: torch.Tensor) -> torch.Tensor:
        """The most likely token of each slot, as ids of the target `(B, G)`."""
        choice = logits.argmax(-1)
        return choice if self.token_ids is None else self.token_ids[choice]

    def over_vocabulary(self, logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
        """Logits over the target's vocabulary, `(B, G, V)`: -inf for tokens that are never proposed."""
        if self.token_ids is None:
            return logits
        full = logits.new_full((*logits.shape[:-1], vocab_size), float("-inf"))
        full[..., self.token_ids] = logits
        return full
