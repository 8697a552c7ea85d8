"""Teach a drafter long texts: answers joined to long conversations, a sliding window, τ by length before and after.

python long_context.py --drafter runs/mine/drafter --data answers.jsonl --prompts prompts.jsonl --minutes 20
"""

import argparse
import json
from functools import partial
from pathlib import Path

from dflash_hf import DFlashDraftModel, reference
from dflash_hf.target import Target
from dflash_hf.training import DFlashTrainingArguments, DrafterArguments, recipe
from dflash_hf.training.measure import decode_all
from dflash_hf.training.plots import plot_series
from dflash_hf.training.sources import messages_of, read_jsonl, read_prompts


def join(conversations: list[list[dict]], length: int) -> list[list[dict]]:
    """One after the other, to conversations of at least `length` tokens."""
    rows = [[]]
    for messages in conversations:
        rows[-1] = rows[-1] + messages
        rows += [[]] if len(render(rows[-1])) >= length else []
    return rows[:-1]


parser = argparse.ArgumentParser()
parser.add_argument("--drafter", default=str(reference.drafter_folder()))
parser.add_argument("--data", required=True)
parser.add_argument("--prompts", required=True)
parser.add_argument("--lengths", type=int, nargs="+", default=[0, 512, 1024, 2048])
parser.add_argument("--window", type=int, default=512)
parser.add_argument("--minutes", type=float, default=20)
parser.add_argument("--output", type=Path, default=Path("long_context"))
args = parser.parse_args()
target, tokenizer = reference.load_target("bfloat16")
render = partial(tokenizer.apply_chat_template, return_dict=False)
answered = [messages_of(row) for _, row in read_jsonl(args.data)]
past, answered = answered[: len(answered) // 4], answered[len(answered) // 4 :]
args.output.mkdir(parents=True, exist_ok=True)
data = args.output / "long.jsonl"
data.write_text("".join(json.dumps({"messages": row}) + "\n" for row in join(answered, max(args.lengths))))
how = DFlashTrainingArguments(
    str(args.output), max_length=max(args.lengths), max_minutes=args.minutes, max_steps=100_000, learning_rate=5e-4,
    per_device_train_batch_size=1, bf16=True, logging_steps=5, save_strategy="no",
)  # fmt: skip
what = DrafterArguments(str(data), init_from=args.drafter, sliding_window=args.window)
tuned, _ = recipe.train(target, tokenizer, what, how)
before, window, after = (DFlashDraftModel.from_pretrained(p, dtype="auto") for p in (args.drafter, tuned, tuned))
window.load_state_dict(before.state_dict())
curves = {"before": [], "before, with the window": [], "after": []}
for length in args.lengths:
    talk = join(past, length) if length else [[]]
    asked = [talk[i % len(talk)] + question for i, question in enumerate(read_prompts(args.prompts))]
    prompts = [render(messages, add_generation_prompt=True, return_tensors="pt") for messages in asked]
    for (name, curve), drafter in zip(curves.items(), (before, window, after), strict=True):
        curve.append((length, decode_all(Target(target), drafter.eval(), prompts, max_new_tokens=48).tau))
        print(f"{length:5} tokens before the question, {name}: tau {curve[-1][1]:.2f}", flush=True)
plot_series(curves, args.output / "tau.png", x="tokens before the question", y="τ")
