"""Random pairs, batches and options: each call writes what plain decoding writes. The number is the seed."""

import functools
import random

import pytest
import torch
from oracles import (
    FAMILIES,
    Automaton,
    Force,
    StopAt,
    at_rate,
    drafter_for,
    plain,
    prompt_of,
    script,
    square_target,
    word_tokenizer,
)

import dflash_hf
from dflash_hf import compat


RATES = [0.0, 0.1, 0.3, 0.6, 1.0]


@functools.cache
def target_of(family: str, window: int):
    fields = {"sliding_window": window} if "sliding_window" in FAMILIES[family] else {}
    return square_target(family, attention="eager" if family in ("gemma2", "gpt_oss") else "sdpa", **fields)


class Configuration:
    """All that is drawn for a seed."""

    def __init__(self, seed: int):
        draw = self.draw = random.Random(seed)
        self.family, self.window = draw.choice(sorted(FAMILIES)), draw.choice([3, 8, 20])
        self.block, self.rate, self.seed = draw.randint(2, 9), draw.choice(RATES), seed
        self.lengths = [draw.randint(1, 24) for _ in range(draw.choice([1, 1, 2, 3, 4]))]
        self.new = draw.randint(1, 30)
        layers = draw.randint(1, 2)
        self.drafter = {"num_hidden_layers": layers, "target_layer_ids": draw.choice([[0, 1], [1, 0], [0], [-1, 1]])}
        if draw.random() < 0.5:
            self.drafter["layer_types"] = [
                draw.choice(["sliding_attention", "full_attention"]) for _ in range(layers - 1)
            ] + ["sliding_attention"]
            self.drafter["sliding_window"] = draw.choice([2, 5, 12])
        if draw.random() < 0.3:
            self.drafter["draft_vocab_size"] = 32
        if draw.random() < 0.2:
            self.drafter |= {
                "drafting": "autoregressive",
                "causal_layers": [True] * layers,
                "sample_from_anchor": True,
            }

    def options(self, full: torch.Tensor) -> dict:
        """Up to three options, some of which look at the text that is written without them."""
        draw, columns, batch = self.draw, max(self.lengths), len(self.lengths)

        def token():
            return int(full[draw.randrange(batch), columns + draw.randrange(full.shape[1] - columns)])

        known = {
            "eos": {"eos_token_id": [token(), token()]},
            "penalty": {"repetition_penalty": draw.choice([0.8, 1.3])},
            "n-grams": {"no_repeat_ngram_size": draw.choice([2, 3])},
            "bad words": {"bad_words_ids": [[token()], [token(), token()]]},
            "minimum": {"min_new_tokens": draw.randint(1, min(12, self.new)), "eos_token_id": list(range(1, 30))},
            "suppress": {"suppress_tokens": [token(), token()]},
            "one candidate": {"do_sample": True, "top_k": 1},
            "forced": {"logits_processor": [Force(token(), draw.randint(2, 6))]},
            "automaton": {"logits_processor": [Automaton(columns)]},
            "stop": {"stop_strings": [f"<{max(1, token())}>"], "tokenizer": word_tokenizer()},
            "criterion": {
                "stopping_criteria": [
                    StopAt([columns + draw.randint(1, 20) for _ in range(batch)], draw.random() < 0.5)
                ]
            },
            "chunks": {"prefill_chunk_size": draw.randint(1, 9)},
            "cap": {"num_assistant_tokens": draw.randint(1, 5)},
            "dict": {"return_dict_in_generate": True, "output_scores": True, "output_logits": True},
            "states": {"return_dict_in_generate": True, "output_hidden_states": True},
        }
        chosen = [known[name] for name in draw.sample(sorted(known), draw.randint(0, 3))]
        return functools.reduce(lambda all_of, one: {**all_of, **one}, chosen, {})


def prompts(lengths, seed) -> dict:
    ids = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        ids[row, max(lengths) - length :] = prompt_of(length, seed=97 * seed + row)
        mask[row, max(lengths) - length :] = 1
    return {"input_ids": ids, "attention_mask": mask}


def fresh(options: dict) -> dict:
    """The options for one call: an automaton reads one text only."""
    processors = options.get("logits_processor", [])
    new = [Automaton(each.columns) if isinstance(each, Automaton) else each for each in processors]
    return {**options, "logits_processor": new} if new else dict(options)


@pytest.mark.parametrize("seed", [pytest.param(i, marks=pytest.mark.slow if i >= 30 else ()) for i in range(200)])
def test_text_of_a_random_configuration_is_that_of_plain_decoding(seed, rows):
    case = Configuration(seed)
    target, inputs = target_of(case.family, case.window), prompts(case.lengths, seed)
    base = {"max_new_tokens": case.new, "do_sample": False}
    options = {**base, **case.options(plain(target, **inputs, **base))}
    expected = plain(target, **inputs, **fresh(options))
    sequences = expected if isinstance(expected, torch.Tensor) else expected.sequences
    drafter = drafter_for(target, case.block, **case.drafter)
    if drafter.draft_token_ids is None and drafter.config.drafting == "parallel":
        offset = (1 - inputs["attention_mask"]).sum(1).tolist()
        script(drafter, target, sequences, at_rate(case.rate, seed), offset=offset, rows=rows)
    method = dflash_hf.custom_generate(drafter, tokenizer=options.pop("tokenizer", None))
    stop_strings = options.pop("stop_strings", None)
    if stop_strings is None:
        found = target.generate(**inputs, **fresh(options), custom_generate=method)
    else:
        tokenizer = word_tokenizer()
        dflash_hf.attach(target, drafter)
        try:
            found = target.generate(
                **inputs, **fresh(options), assistant_model=drafter, stop_strings=stop_strings, tokenizer=tokenizer
            )
        finally:
            dflash_hf.detach(target)
    if isinstance(expected, torch.Tensor):
        assert found.tolist() == expected.tolist()
        return
    assert found.sequences.tolist() == expected.sequences.tolist()
    columns, ends = max(case.lengths), []
    for row, text in enumerate(sequences[:, columns:].tolist()):
        stops = [i + 1 for i, token in enumerate(text) if token in options.get("eos_token_id", [])]
        stops += [int(c.columns[row]) - columns for c in options.get("stopping_criteria", [])]
        ends.append(columns + min([*stops, len(text)]))
    assert found[compat.CACHE].get_seq_length() == expected[compat.CACHE].get_seq_length()
    for name in ("scores", "logits", "hidden_states"):
        ours, theirs = getattr(found, name), getattr(expected, name)
        assert (ours is None) == (theirs is None)
        assert ours is None or len(ours) == len(theirs)
        for step, (a, b) in enumerate(zip(ours or (), theirs or (), strict=True)):
            for x, y in zip([a] if name != "hidden_states" else a, [b] if name != "hidden_states" else b, strict=True):
                live = [row for row, end in enumerate(ends) if max(case.lengths) + step < end]
                last = (live, -1) if name == "hidden_states" else live
                torch.testing.assert_close(x[last], y[last], atol=1e-3, rtol=1e-3)
