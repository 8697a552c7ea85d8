"""What is measured of a drafter in training: slots that were right, and τ by the real decoding loop."""

from collections.abc import Sequence

import torch
from accelerate import Accelerator

from .. import objective
from ..integration import custom_generate
from ..metrics import GenerationStatistics
from ..modeling_dflash import DFlashDraftModel
from ..target import Target


class Counts:
    """What the slots got right since the last log line."""

    def __init__(self, num_predicted: int, device: torch.device):
        self.num_predicted, self.device = num_predicted, device
        self.reset()

    def reset(self) -> None:
        """Start to count anew."""
        # For each slot: right, labelled; and for blocks with a label in every slot: right prefixes, how many blocks.
        self.slots = torch.zeros(2, self.num_predicted, device=self.device, dtype=torch.long)
        self.blocks = torch.zeros(2, device=self.device, dtype=torch.long)

    def add(self, logits: torch.Tensor, wanted: torch.Tensor, labelled: torch.Tensor) -> None:
        """Count a batch of slots: logits `(..., G, V)`, wanted drafter ids and which slots have a label `(..., G)`."""
        hits, leading = objective.slot_hits(logits, wanted)
        full = labelled.all(-1)
        self.slots += torch.stack([hits & labelled, labelled]).flatten(1, -2).sum(1)
        self.blocks += torch.stack([(leading * full).sum(), full.sum()])

    def summary(self, accelerator: Accelerator) -> dict[str, float]:
        """`accuracy` over all slots, `accuracy_j` of each, `accepted`: the mean right prefix; over all processes."""
        slots = accelerator.reduce(self.slots, reduction="sum").tolist()
        prefix, blocks = accelerator.reduce(self.blocks, reduction="sum").tolist()
        right, labelled = map(sum, slots)
        each = {f"accuracy_{j}": round(r / max(n, 1), 4) for j, (r, n) in enumerate(zip(*slots, strict=True), start=1)}
        return {"accuracy": round(right / max(labelled, 1), 4), "accepted": round(prefix / max(blocks, 1), 4)} | each


def decode_all(
    target: Target,
    drafter: DFlashDraftModel,
    prompts: Sequence[torch.Tensor],
    *,
    max_new_tokens: int,
    block_size: int | None = None,
) -> GenerationStatistics:
    """
    The rounds of the real decoding loop over some prompts `(1, T)`, greedily.

    Args:
        block_size (`int`, *optional*): of the blocks, instead of the one that the drafter was trained with.
    """
    trained_size = drafter.config.block_size
    drafter.config.block_size = block_size or trained_size
    numbers = GenerationStatistics()
    try:
        for prompt in prompts:
            ids = prompt.to(target.model.device)
            target.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                custom_generate=custom_generate(drafter),
                max_new_tokens=max_new_tokens,
                do_sample=False,
            )
            numbers += drafter.last_statistics
    finally:
        drafter.config.block_size = trained_size
    return numbers
