"""What decoding several prompts at once gains on the embedded pair, and where the time of its rounds goes.

python batches.py --prompts prompts.jsonl
"""

import argparse
import time

import torch

import dflash_hf
from dflash_hf import cache, reference
from dflash_hf.metrics import GenerationStatistics
from dflash_hf.training.sources import read_prompts


parser = argparse.ArgumentParser()
parser.add_argument("--prompts", required=True)
parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 2, 4, 8])
parser.add_argument("--num-prompts", type=int, default=8)
parser.add_argument("--max-new-tokens", type=int, default=64)
parser.add_argument("--threads", type=int, default=1)
args = parser.parse_args()
torch.set_num_threads(args.threads)
target, tokenizer = reference.load_target("bfloat16")
drafter = dflash_hf.attach(target, reference.drafter_folder())
target.generation_config.eos_token_id = None  # every row is as long as the others
asked = read_prompts(args.prompts)[-args.num_prompts :]
texts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) for chat in asked]
move, seconds = cache._move_right, [0.0]


def timed(*arguments) -> None:
    """Move the rows of a layer, by the clock."""
    start = time.perf_counter()
    move(*arguments)
    seconds[0] += time.perf_counter() - start


cache._move_right = timed
target.generate(
    **tokenizer(texts[0], return_tensors="pt"), max_new_tokens=8, do_sample=False, pad_token_id=0
)  # warm-up
for size in args.batch_sizes:
    times, numbers, seconds[0] = {"plain": 0.0, "dflash": 0.0}, GenerationStatistics(), 0.0
    for start in range(0, len(texts), size):
        inputs = tokenizer(texts[start : start + size], padding=True, padding_side="left", return_tensors="pt")
        for method in times:
            assistant = {"assistant_model": drafter} if method == "dflash" else {}
            begin = time.perf_counter()
            target.generate(**inputs, **assistant, max_new_tokens=args.max_new_tokens, do_sample=False, pad_token_id=0)
            times[method] += time.perf_counter() - begin
        numbers += drafter.last_statistics
    tokens, moving = len(texts) * args.max_new_tokens, 100 * seconds[0] / numbers.decode_seconds
    print(
        f"batch {size}: plain {tokens / times['plain']:.1f} tokens/s, dflash {tokens / times['dflash']:.1f} "
        f"({times['plain'] / times['dflash']:.2f}x), tau {numbers.tau:.2f}, of the rounds' time "
        f"{100 * numbers.overhead:.1f} % neither draft nor verification, {moving:.1f} % moving rows",
        flush=True,
    )
