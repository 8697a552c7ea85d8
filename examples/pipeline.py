"""A text-generation pipeline with a drafter object."""

import torch
from transformers import pipeline

import dflash_hf
from dflash_hf import reference


target, tokenizer = reference.load_target(torch.bfloat16)
drafter = dflash_hf.attach(target, reference.drafter_folder())
generate = pipeline("text-generation", model=target, tokenizer=tokenizer, assistant_model=drafter)

messages = [{"role": "user", "content": "What is 17 plus 25?"}]
print(generate(messages, max_new_tokens=32, do_sample=False)[0]["generated_text"][-1]["content"])
print(f"tau = {drafter.last_statistics.tau:.2f}")
