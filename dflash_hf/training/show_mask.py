"""The mask of a real row of the data as a picture: what `dflash-hf data show-mask` draws."""

from pathlib import Path

from transformers import PreTrainedTokenizerBase

from .. import objective
from .data import ConversationDataset
from .plots import draw_mask, mask_of_row


def draw_row(
    data: str | Path,
    tokenizer: PreTrainedTokenizerBase,
    output: str | Path,
    *,
    row: int,
    block_size: int,
    num_anchors: int,
    length: int,
    window: int | None = None,
    causal: bool = False,
    seed: int = 0,
) -> None:
    """
    Draw the mask of the blocks that a training would draw in a row of `data`, cut to `length` tokens.

    The cut keeps a quarter of prompt before the first token that the target wrote.

    Raises:
        `ValueError`: when the data has no such row.
    """
    dataset = ConversationDataset(data, tokenizer, max_length=1 << 30)
    if row >= len(dataset):
        raise ValueError(f"row={row}: {data} has {len(dataset)} rows, counted from 0.")
    start = max(0, int(dataset[row]["supervised"].long().argmax()) - length // 4)
    item = {name: tensor[start : start + length] for name, tensor in dataset[row].items()}
    anchors, keep = objective.draw_anchors(
        item["supervised"].unsqueeze(0), item["document"].unsqueeze(0), num_anchors, seed=seed, step=0
    )
    places = anchors[keep].tolist()
    mask = mask_of_row(item, places, block_size, window, causal)
    tokens = [tokenizer.decode([token]) for token in item["input_ids"].tolist()]
    draw_mask(mask, places, block_size, len(tokens), tokens, output)
