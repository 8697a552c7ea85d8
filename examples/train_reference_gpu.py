"""Ten minutes on one GPU: answer prompts, train a drafter, measure it, write it in small shards. On a CPU, a toy.

python train_reference_gpu.py --gguf part1 part2 --prompts p.jsonl --held-out gsm8k.jsonl humaneval.jsonl
"""

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dflash_hf import DFlashDraftModel, evaluation, reference
from dflash_hf.training import DFlashTrainingArguments, DrafterArguments, recipe
from dflash_hf.training.regenerate import Regeneration, regenerate
from dflash_hf.training.sources import read_prompts


parser = argparse.ArgumentParser()
source = parser.add_mutually_exclusive_group(required=True)
source.add_argument("--target", help="folder of the target")
source.add_argument("--gguf", nargs="+", help="the reference target's GGUF file, in one part or several")
parser.add_argument("--prompts", required=True, help="JSONL of prompts to answer")
parser.add_argument("--held-out", nargs="*", default=[], help="JSONL of prompts, the last 64 of which are measured on")
parser.add_argument("--minutes", type=float, default=10.0, help="a quarter for answers, half for training")
parser.add_argument("--block-size", type=int, default=8)
parser.add_argument("--output", type=Path, default=Path("reference_gpu"))
args = parser.parse_args()
args.output.mkdir(parents=True, exist_ok=True)

gpu = torch.accelerator.is_available()
device = torch.accelerator.current_accelerator() if gpu else torch.device("cpu")
folder = args.target or reference.target_from_gguf(args.gguf, args.output / "target")
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval().to(device)
tokenizer = AutoTokenizer.from_pretrained(folder)

answers = args.output / "answers.jsonl"
how = Regeneration(max_new_tokens=256 if gpu else 16, batch_size=512 if gpu else 8)
print(dict(regenerate(model, tokenizer, args.prompts, answers, how, max_minutes=0.25 * args.minutes)))

what = DrafterArguments(
    data=str(answers), block_size=args.block_size, draft_vocab_size=min(8192, model.config.vocab_size), pack=gpu,
    mask_token_id=reference.MASK_TOKEN_ID if args.gguf else None,
)  # fmt: skip
options = DFlashTrainingArguments(
    output_dir=str(args.output), max_minutes=0.5 * args.minutes, max_steps=10**6, learning_rate=1e-3, bf16=True,
    per_device_train_batch_size=4 if gpu else 1, max_length=2048 if gpu else 512, torch_compile=gpu,
    save_strategy="no",
)  # fmt: skip
trained, _ = recipe.train(model, tokenizer, what, options)
drafter = DFlashDraftModel.from_pretrained(trained, dtype=torch.bfloat16).to(device).eval()
drafter.save_pretrained(args.output / "drafter-shards", max_shard_size="15MB")

report = []
for path in args.held_out:
    chats = [tokenizer.apply_chat_template(m, add_generation_prompt=True, return_tensors="pt", return_dict=False)
             for m in read_prompts(path)[-64:]]  # fmt: skip
    prompts = [ids.to(device) for ids in chats]
    report.append(evaluation.compare(model, drafter, prompts, name=Path(path).stem, max_new_tokens=96).summary())
(args.output / "report.json").write_text(json.dumps(report, indent=1) + "\n")
