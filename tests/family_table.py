"""
Every family of targets: identical to plain decoding, in the predicted number of target forwards.

    python tests/family_table.py

prints a line for each family and attention backend, with the target forwards for prompts shorter and longer than the
sliding window, alone and in a ragged batch of four, with drafters that are never right, right at 70 %, and always.
Parts of it run as tests. Flex attention runs uncompiled: what torch 2.13 makes of it for a CPU does not always build.
"""

import functools
from collections.abc import Callable

import torch
from oracles import (
    FAMILIES,
    WRAPPED,
    Mistake,
    at_rate,
    counting,
    drafter_for,
    never,
    plain,
    predicted_batch_forwards,
    prompt_of,
    script,
    square_target,
)

import dflash_hf
from dflash_hf.decoding import Decoding


NEW, BLOCK = 64, 5
RATES: dict[str, Mistake] = {"0": lambda index, slot: True, "0.7": at_rate(0.3), "1": never}
BACKENDS = ["eager", "sdpa", "flex_attention"]
LENGTHS = {"short": [5, 3, 1, 4], "long": [20, 9, 14, 2]}  # the sliding window is 8
TARGETS = [*FAMILIES, *WRAPPED]


@functools.cache
def target_of(family: str, attention: str):
    """Raises what transformers raises where the family does not support the backend, or it does not run here."""
    target = square_target(family, attention=attention)
    plain(target, prompt_of(3), max_new_tokens=2, do_sample=False)
    return target


def inputs_of(length: str, batch: int) -> dict[str, torch.Tensor]:
    lengths = LENGTHS[length][:batch]
    ids = torch.zeros(batch, max(lengths), dtype=torch.long)
    for row, number in enumerate(lengths):
        ids[row, max(lengths) - number :] = prompt_of(number, seed=row).clamp(max=50)  # no images
    return {"input_ids": ids, "attention_mask": (ids > 0).long()}


@functools.cache
def text_of(family: str, attention: str, length: str, batch: int) -> torch.Tensor:
    return plain(target_of(family, attention), **inputs_of(length, batch), max_new_tokens=NEW, do_sample=False)


def check(
    family: str, attention: str, length: str, batch: int, rate: str, current_rows: Callable[[], list[int]]
) -> int:
    """Compare one call with plain decoding; the number of its target forwards."""
    target, inputs = target_of(family, attention), inputs_of(length, batch)
    full = text_of(family, attention, length, batch)
    drafter = drafter_for(target, BLOCK)
    offsets = (1 - inputs["attention_mask"]).sum(1).tolist()
    script(drafter, target, full, RATES[rate], offset=offsets, rows=current_rows)
    method = dflash_hf.custom_generate(drafter)
    with counting(target) as calls:
        found = target.generate(**inputs, max_new_tokens=NEW, do_sample=False, custom_generate=method)
    assert found.tolist() == full.tolist()
    columns = inputs["input_ids"].shape[1]
    predicted = predicted_batch_forwards(columns, [full.shape[1]] * batch, BLOCK, RATES[rate])
    assert len(calls) == predicted, (len(calls), predicted)
    return len(calls)


def main() -> None:
    torch.set_num_threads(1)
    torch.compiler.set_stance("force_eager")
    states, draft = [], Decoding.draft
    Decoding.draft = lambda self, width: (states.append(self.state), draft(self, width))[1]
    columns = [(length, batch) for length in LENGTHS for batch in (1, 4)]
    print(f"target forwards for {NEW} tokens, proposals right at {' / '.join(RATES)}; plain decoding has {NEW}")
    print(f"{'family, attention':32}" + "".join(f"{f'{length} prompt, batch {n}':>24}" for length, n in columns))
    for family in TARGETS:
        for attention in BACKENDS:
            name = f"{family}, {attention}"
            try:
                target_of(family, attention)
            except Exception as error:  # of plain decoding: not ours
                print(f"{name:32}  n/a: {type(error).__name__}: {' '.join(str(error).split())[:80]}")
                continue
            counts = []
            for column in columns:
                numbers = [check(family, attention, *column, rate, lambda: states[-1].texts.rows) for rate in RATES]
                counts.append(" / ".join(map(str, numbers)))
            print(f"{name:32}" + "".join(f"{count:>24}" for count in counts) + "  identical, as predicted", flush=True)


if __name__ == "__main__":
    main()
