"""Attach a drafter to a target and generate: the same text in fewer target forwards. Runs on the embedded pair."""

import torch

import dflash_hf
from dflash_hf import reference


target, tokenizer = reference.load_target(torch.bfloat16)
drafter = dflash_hf.attach(target, reference.drafter_folder())

messages = [{"role": "user", "content": "Write a Python function that returns the n-th Fibonacci number."}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
output = target.generate(**inputs, assistant_model=drafter, max_new_tokens=64, do_sample=False)

print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :]))
numbers = drafter.last_statistics
print(f"{numbers.new_tokens} tokens in {numbers.target_forwards} target forwards, tau = {numbers.tau:.2f}")
