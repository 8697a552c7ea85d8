"""From the drafter's hidden states to proposals: whose head, over which words, in which shape."""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from .heads import Correct
from .modeling_dflash import DFlashDraftModel
from .target import Target, device_of, softcap


class ProposalHead:
    """
    The head for the drafter: its own or the target's, or the rows of it for the tokens that the drafter proposes from.

    The rows are copied at every call: that takes about as long as one draft's logits, and a copy that outlived the
    call would not notice a head that is changed in place.

    Args:
        drafter (`DFlashDraftModel`), target (`Target`): the pair.
    """

    def __init__(self, drafter: DFlashDraftModel, target: Target):
        config, own = drafter.config, drafter.lm_head is not None
        self.head = drafter.lm_head if own else target.head
        self.device, self.dtype = (device_of(drafter), drafter.dtype) if own else (target.device, target.head_dtype)
        self.shape = _shape_of(drafter, target)
        self.sequence, self._embed = drafter.proposal_head, lambda ids: embed(drafter, target, ids)
        self.token_ids = drafter.draft_token_ids
        self.rows: torch.Tensor | None = None
        self._of_shortlist = own and self.token_ids is not None  # its rows are those words
        if own and self.token_ids is None and config.own_vocab_size != target.num_logits:
            self.token_ids = torch.arange(min(config.own_vocab_size, target.num_logits))
        if self.token_ids is not None:
            self.token_ids = self.token_ids.to(self.device)
            # A head that is a plain matrix, and here, need not compute the rows that nobody reads.
            plain = type(self.head) is nn.Linear and type(self.head.weight) is nn.Parameter
            if not self._of_shortlist and plain and self.head.weight.device == self.device:
                self.rows = self.head.weight.index_select(0, self.token_ids)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of slots `(B, G, H)`, over the shortlist if there is one: `(B, G, V)`, float32."""
        # Of a slice, a linear layer would make one small product for each block, many times slower than a big one.
        hidden = hidden.to(self.device, self.dtype).contiguous()
        if self.rows is not None:
            bias = None if self.head.bias is None else self.head.bias[self.token_ids]
            return self.shape(F.linear(hidden, self.rows, bias).float())
        logits = self.shape(self.head(hidden).float())
        return logits if self.token_ids is None or self._of_shortlist else logits[..., self.token_ids]

    def begin(self, hidden: torch.Tensor) -> Correct | None:
        """
        What makes the logits of a slot from its own and the token before it, for slots `(rows, n, H)` that are asked
        one after the other; `None` where they are independent.
        """
        return None if self.sequence is None else self.sequence.begin(hidden, self._embed)

    def greedy(self, logits: torch.Tensor) -> torch.Tensor:
        """The most likely token of each slot, as ids of the target `(B, G)`."""
        choice = logits.argmax(-1)
        return choice if self.token_ids is None else self.token_ids[choice]

    def over_vocabulary(self, logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
        """Logits over the target's vocabulary, `(..., V)`: -inf for tokens that are never proposed."""
        if self.token_ids is None:
            return logits
        full = logits.new_full((*logits.shape[:-1], vocab_size), float("-inf"))
        full[..., self.token_ids] = logits
        return full


def embed(drafter: DFlashDraftModel, target: Target, ids: torch.Tensor) -> torch.Tensor:
    """Embeddings of `ids` `(B, n)` as the drafter is given them, `(B, n, H)`: its own, or the target's."""
    if drafter.embed_tokens is None:
        return target.embed(ids, drafter.config)
    table = drafter.embed_tokens
    ids = ids.to(device_of(table)).clamp(max=table.num_embeddings - 1)
    return table(ids) * drafter.config.input_embedding_scale


def _shape_of(drafter: DFlashDraftModel, target: Target) -> Callable[[torch.Tensor], torch.Tensor]:
    """What is made of the head's output: by the drafter's configuration, or else as the target does it to its own."""
    config = drafter.config
    multiplier, cap = config.output_multiplier, config.final_logit_softcapping
    if multiplier is None and cap is None:
        return target.shape_logits if drafter.lm_head is None else lambda logits: logits

    def shape(logits: torch.Tensor) -> torch.Tensor:
        logits = logits if multiplier is None else logits * multiplier
        return logits if cap is None else softcap(logits, cap)

    return shape
