"""The paper's ablations at small scale: each arm changes one thing, all take the same steps. Goes on after a kill.

python ablations.py --data answers.jsonl --prompts prompts.jsonl --steps 600
"""

import argparse
import json
from pathlib import Path

from dflash_hf import reference
from dflash_hf.training import DFlashTrainingArguments, DrafterArguments, recipe
from dflash_hf.training.plots import plot_series


T6, T9, AR = "MATH-500 / HumanEval / MT-Bench", "GSM8K / HumanEval / MT-Bench", "autoregressive"
ARMS = {  # name: (what differs, tau in the paper, on what)
    "base: 3 layers, 5 taps": ({}, "5.64 / 4.61 / 3.18", T6),
    "5 layers": ({"drafter_layers": 5}, "5.99 / 4.94 / 3.37", T6),
    "3 taps": ({"num_taps": 3}, "5.38 / 4.47 / 3.07", T6),
    "anchors on a grid": ({"anchors": "grid"}, "4.94 / 3.86 / 2.80", T6),
    "block 16, used as 8": ({"block_size": 16, "eval_block_size": 8}, "5.09 / 4.44 / 3.18", T6),
    "block 16": ({"block_size": 16}, "6.33 / 5.29 / 3.50", T6),
    "block 8, used as 16": ({"eval_block_size": 16}, "5.02 / 4.28 / 3.09", T6),
    "features at the input": ({"conditioning": "input"}, "3.5 / 3.5 / 2.6, for kv 4.2 / 4.0 / 3.0", T9),
    "autoregressive, kv": ({"drafting": AR, "block_size": 7}, "4.8 / 4.6 / 3.4", T9),
    "autoregressive, input": ({"drafting": AR, "block_size": 7, "conditioning": "input"}, "4.2 / 4.3 / 3.1", T9),
    "no features": ({"conditioning": "none"}, "3.38 (GSM8K), 4.61 (MATH-500)", "table 10"),
    "without decay": ({"loss_weights": "uniform"}, "slower, equal at the end", "figure 5"),
    "d-pace": ({"loss_weights": "d-pace"}, "2.62 after 2.49 with decay", "of another library"),
    "whole vocabulary": ({"draft_vocab_size": None}, "no shortlist", ""),
}  # fmt: skip

parser = argparse.ArgumentParser()
parser.add_argument("--data", required=True)
parser.add_argument("--prompts", required=True)
parser.add_argument("--steps", type=int, default=600)
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--output", type=Path, default=Path("ablations"))
args = parser.parse_args()
results = args.output / "results.json"
results.parent.mkdir(parents=True, exist_ok=True)
curves = json.loads(results.read_text()) if results.exists() else {}

for name, (change, *_) in ARMS.items():
    if name in curves:
        continue
    target, tokenizer = reference.load_target("bfloat16")
    both = {"block_size": 8, "draft_vocab_size": min(8192, target.config.vocab_size), "num_anchors": 128, **change}
    drafter = {k: both.pop(k) for k in [*both] if k in DrafterArguments.__dataclass_fields__}
    what = DrafterArguments(args.data, mask_token_id=reference.MASK_TOKEN_ID, eval_prompts=args.prompts, **drafter)
    how = DFlashTrainingArguments(
        str(args.output / name), max_steps=args.steps, eval_strategy="steps", eval_steps=args.steps // args.epochs,
        per_device_train_batch_size=1, learning_rate=1e-3, bf16=True, save_strategy="no", **both,
    )  # fmt: skip
    log = recipe.train(target, tokenizer, what, how)[1].state.log_history
    curves[name] = [(entry["epoch"], entry["eval_tau"]) for entry in log if "eval_tau" in entry]
    results.write_text(json.dumps(curves, indent=1))
    print(f"{name:24}  tau {curves[name][-1][1]:.2f}   paper: {ARMS[name][1]}  {ARMS[name][2]}", flush=True)
both = {"with decay": curves["base: 3 layers, 5 taps"], "without": curves["without decay"]}
plot_series(both, args.output / "decay.png", x="epoch", y="τ")
