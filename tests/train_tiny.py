"""Trains a tiny drafter for a few steps; started by test_distributed.py, alone or by `accelerate launch`."""

import sys

import torch
from safetensors.torch import save_file
from tiny import random_ids, tiny_drafter, tiny_target

from dflash_hf.target import Target
from dflash_hf.training import DFlashTrainer, DFlashTrainingArguments


output, batch_size, accumulated, *checkpoint = sys.argv[1:]
target = tiny_target()
texts = [random_ids(1, 12 + 3 * i, seed=i)[0].tolist() for i in range(8)]
rows = [
    {"input_ids": ids, "document": [i] * len(ids), "supervised": [False] * 2 + [True] * (len(ids) - 2)}
    for i, ids in enumerate(texts)
]
# Nothing to learn from: with one row for each process, one of them has no anchor in some step.
rows[3]["supervised"] = [False] * (len(texts[3]) - 1) + [True]
arguments = DFlashTrainingArguments(
    output_dir=output,
    use_cpu=True,
    per_device_train_batch_size=int(batch_size),
    max_steps=6,
    logging_steps=1,
    save_steps=3,
    eval_strategy="steps",
    eval_steps=3,
    eval_max_new_tokens=9,
    num_anchors=6,
    learning_rate=1e-2,
    lr_scheduler_type="constant",
    warmup_steps=0,
    train_sampling_strategy="random",
    disable_tqdm=True,
    gradient_accumulation_steps=int(accumulated),
)
trainer = DFlashTrainer(
    tiny_drafter(target),
    arguments,
    target=Target(target),
    lines=list(range(1, 9)),
    train_dataset=rows[:6],
    eval_dataset=rows[6:],
    eval_prompts=[torch.tensor([ids[:4]]) for ids in texts[:3]],
)
trainer.train(resume_from_checkpoint=checkpoint[0] if checkpoint else None)
drafter = trainer.saved_drafter()
if arguments.should_save:
    save_file({k: v.contiguous() for k, v in drafter.state_dict().items()}, f"{output}/weights.safetensors")
    trainer.state.save_to_json(f"{output}/log.json")
