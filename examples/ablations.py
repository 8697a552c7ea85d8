"""The paper's ablations at small scale: each arm changes one thing, all take the same steps. Goes on after a kill.

python ablations.py --data answers.jsonl --prompts prompts.jsonl --steps 600
"""

import argparse
import json
from pathlib import Path

from dflash_hf import reference
from dflash_hf.training import DFlashTrainingArguments, DrafterArguments, recipe
from dflash_hf.training.plots import plot_series


AR = "autoregressive"  # τ in the paper: of MATH-500 / HumanEval / MT-Bench; in table 9 GSM8K stands for MATH-500
ARMS = {  # name: (what differs, whether the paper's τ is above (1) or below (-1) that without it, τ in the paper)
    "base": ({}, 0, "3 layers, 5 taps: 5.64 / 4.61 / 3.18 (tables 6, 7, 13); block 8: 5.21 / 4.61 / 3.29 (table 8)"),
    "5 layers": ({"drafter_layers": 5}, 1, "5.99 / 4.94 / 3.37 (table 6)"),
    "3 taps": ({"num_taps": 3}, -1, "5.38 / 4.47 / 3.07 (table 7)"),
    "anchors on a grid": ({"anchors": "grid"}, -1, "4.94 / 3.86 / 2.80 (table 13)"),
    "block 16": ({"block_size": 16}, 1, "6.33 / 5.29 / 3.50 (table 8)"),
    "block 16, used as 8": ({"block_size": 16, "eval_block_size": 8}, -1, "5.09 / 4.44 / 3.18 (table 8)"),
    "block 8, used as 16": ({"eval_block_size": 16}, -1, "5.02 / 4.28 / 3.09 (table 8)"),
    "features at the input": ({"conditioning": "input"}, -1, "3.5 / 3.5 / 2.6, kv 4.2 / 4.0 / 3.0 (table 9)"),
    "autoregressive, kv": ({"drafting": AR, "block_size": 7}, 1, "4.8 / 4.6 / 3.4 (table 9)"),
    "autoregressive, input": ({"drafting": AR, "block_size": 7, "conditioning": "input"}, 1, "4.2 / 4.3 / 3.1"),
    "no features": ({"conditioning": "none"}, -1, "4.61, of MATH-500 only (table 10)"),
    "without decay": ({"loss_weights": "uniform"}, -1, "below at first, equal at the end (figure 5)"),
    "d-pace": ({"loss_weights": "d-pace"}, 1, "not in this paper, but above in its own (arXiv 2605.18810)"),
    "whole vocabulary": ({"draft_vocab_size": None}, 0, "no shortlist in the paper"),
}  # fmt: skip
parser = argparse.ArgumentParser()
parser.add_argument("--data", required=True)
parser.add_argument("--prompts", required=True)
parser.add_argument("--steps", type=int, default=600)
parser.add_argument("--output", type=Path, default=Path("ablations"))
args = parser.parse_args()
results = args.output / f"{Path(args.data).stem}-{args.steps}-steps.json"
curves = json.loads(results.read_text()) if results.exists() else {}
for name, (change, *_) in ARMS.items():
    if name in curves:
        continue
    target, tokenizer = reference.load_target("bfloat16")
    how = {"block_size": 8, "draft_vocab_size": min(8192, target.config.vocab_size), "num_anchors": 64, **change}
    drafter = {k: how.pop(k) for k in [*how] if k in DrafterArguments.__dataclass_fields__}
    store = args.output / f"features-{drafter.get('num_taps', 5)}-{drafter.get('conditioning') != 'none'}"
    drafter |= {"features": str(store), "mask_token_id": reference.MASK_TOKEN_ID, "eval_prompts": args.prompts}
    how = DFlashTrainingArguments(
        str(args.output / name), max_steps=args.steps, eval_strategy="steps", bf16=True, learning_rate=2e-3,
        eval_steps=args.steps // (4 if name in ("base", "without decay") else 1),
        per_device_train_batch_size=1, save_strategy="no", eval_max_new_tokens=48, **how,
    )  # fmt: skip
    log = recipe.train(target, tokenizer, DrafterArguments(args.data, **drafter), how)[1].state.log_history
    curves[name] = [(entry["epoch"], entry["eval_tau"]) for entry in log if "eval_tau" in entry]
    results.write_text(json.dumps(curves, indent=1))
for name, (_, sign, paper) in ARMS.items():
    gain = curves[name][-1][1] - curves["base"][-1][1]
    agrees = "" if not sign else "too close" if abs(gain) < 0.03 else "agrees" if gain * sign > 0 else "differs"
    print(f"{name:24} tau {curves[name][-1][1]:.2f} {gain:+.2f} {agrees:9}  paper: {paper}")
plot_series({"with": curves["base"], "without": curves["without decay"]}, args.output / "decay.png", x="epoch", y="τ")
