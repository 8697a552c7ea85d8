"""What a call remembers between rounds."""

from dataclasses import dataclass, field

import torch

from .cache import AlignedCache
from .outputs import Texts


@dataclass
class DecodeState:
    """
    What a call remembers between rounds. The tensors of a round have one entry for each row that is being written.

    Args:
        texts (`Texts`): all tokens so far; the last of each row is its anchor.
        target, draft (`AlignedCache`): committed tokens before the anchor.
        anchor (`torch.LongTensor` of shape `(rows, 1)`): the last token of each row.
        anchor_position (`torch.LongTensor` of shape `(rows, 1)`): what `position_ids` says of it.
        last_position (`torch.LongTensor` of shape `(rows, 1)`): of the last token that the target may have to see.
        position_offsets (`torch.LongTensor` of shape `(rows, d, 1)`, *optional*): see [`~prompt.Prompt`].
        lag (`int`): committed tokens before the anchor that the target's cache lacks, since it was rolled back whole.
        context (`torch.Tensor` of shape `(rows, new, M * H)`): tapped hidden states that the drafter has not seen.
        context_positions (`torch.LongTensor` of shape `(rows, new)`): their positions.
        context_mask (`torch.LongTensor` of shape `(rows, new)`, *optional*): 0 for padding among them, which in the
            prompt is on the left and later on the right.
        context_ends (`list[int]`): columns of the context that each row has, what is on the right of them left out.
    """

    texts: Texts
    target: AlignedCache
    draft: AlignedCache
    anchor: torch.Tensor | None = None
    anchor_position: torch.Tensor | None = None
    last_position: torch.Tensor | None = None
    position_offsets: torch.Tensor | None = None
    lag: int = 0
    context: torch.Tensor | None = None
    context_positions: torch.Tensor | None = None
    context_mask: torch.Tensor | None = None
    context_ends: list[int] = field(default_factory=list)

    @property
    def fresh(self) -> int | torch.Tensor:
        """Columns of the context, or their mask where some are padding."""
        return self.context.shape[1] if self.context_mask is None else self.context_mask

    @property
    def unseen(self) -> torch.Tensor:
        """What the target has not seen as input, `(rows, n)`: the anchor, after what its cache lags behind."""
        if not self.lag:
            return self.anchor
        end = self.texts.ends[self.texts.rows[0]]  # rows keep one pace where there is a lag
        return self.texts.ids[self.texts.rows, end - 1 - self.lag : end]

    def absorbed(self) -> None:
        """The context is in the drafter's cache now, and whatever came after it is not."""
        self.draft.keep(self.context_ends, self.context_mask)
        # New tensors, since a slice would keep what it is a slice of.
        self.context = self.context.new_empty(len(self.context), 0, self.context.shape[-1])
        self.context_positions = self.context_positions.new_empty(len(self.context), 0)
        self.context_mask, self.context_ends = None, [0] * len(self.context)

    def roll_back(self) -> None:
        """Forget everything that is not committed."""
        self.target.roll_back()
        self.draft.roll_back()

    def select(self, entries: list[int]) -> None:
        """Go on with these of the rows that are being written."""
        if len(entries) == len(self.texts.rows):
            return
        self.texts.rows = [self.texts.rows[i] for i in entries]
        if not entries:
            return
        self.target.select(entries)
        self.draft.select(entries)
        self.context_ends = [self.context_ends[i] for i in entries]
        by_row = ("anchor", "anchor_position", "last_position", "position_offsets")
        for name in (*by_row, "context", "context_positions", "context_mask"):
            value = getattr(self, name)
            setattr(self, name, value if value is None else value[entries])
