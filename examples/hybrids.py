"""What it costs to take recurrent layers back to the commit: a random target shaped like Qwen3.5, a scripted drafter.

python hybrids.py
"""

import argparse
import functools
import time

import torch
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig

import dflash_hf
from dflash_hf import DFlashConfig, DFlashDraftModel
from dflash_hf.drafting import Drafting
from dflash_hf.recurrent import RecurrentLayers


parser = argparse.ArgumentParser()
parser.add_argument("--hidden-size", type=int, default=1024)
parser.add_argument("--layers", type=int, default=24)
parser.add_argument("--vocab-size", type=int, default=32_000)
parser.add_argument("--max-new-tokens", type=int, default=64)
parser.add_argument("--prompt-length", type=int, default=256)
parser.add_argument("--dtype", default="float32")
args = parser.parse_args()
torch.manual_seed(0)
sizes = {"hidden_size": args.hidden_size, "num_hidden_layers": args.layers, "vocab_size": args.vocab_size}
config = Qwen3_5TextConfig(**sizes, intermediate_size=3 * args.hidden_size, num_attention_heads=8)
target = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, args.dtype)).eval()
target.generation_config.eos_token_id = None
fields = {"mask_token_id": 0, "block_size": 8, "target_layer_ids": [0], "num_hidden_layers": 1}
drafter = DFlashDraftModel(DFlashConfig.from_target(target.config, **fields)).to(target.dtype).eval()
prompt = torch.randint(1, args.vocab_size, (1, args.prompt_length))
full = target.generate(prompt, max_new_tokens=args.max_new_tokens, do_sample=False)
propose, seconds = Drafting.propose, {"replay": 0.0, "save": 0.0}


def scripted(self, state, width):
    """The first half of each block as the target wants it, the rest wrong."""
    proposals, q = propose(self, state, width)
    right = full[:, state.texts.ends[0] :][:, : width // 2]
    return torch.cat([right, (proposals[:, right.shape[1] :] + 1) % args.vocab_size], dim=1), q


def timed(self, name: str, method, *arguments):
    start = time.perf_counter()
    method(self, *arguments)
    seconds[name] += time.perf_counter() - start


Drafting.propose = scripted
for name in seconds:
    setattr(RecurrentLayers, name, functools.partialmethod(timed, name, getattr(RecurrentLayers, name)))
method = dflash_hf.custom_generate(drafter)
target.generate(prompt, max_new_tokens=args.max_new_tokens, do_sample=False, custom_generate=method)
numbers = drafter.last_statistics
print(f"{numbers.target_forwards} forwards for {numbers.new_tokens} tokens, tau {numbers.tau:.2f}")
for name, spent in seconds.items():
    print(f"{name}: {100 * spent / numbers.decode_seconds:.1f} % of the rounds' time")
