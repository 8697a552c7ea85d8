"""The commands that decode: generate, demo, evaluate."""

import json
import os
import platform
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from .shared import (
    REFERENCE,
    DrafterOption,
    DtypeOption,
    NewTokensOption,
    Precision,
    TargetOption,
    console,
    load,
    prompt_ids,
)


DRAFTED = "green"
DEMO_PROMPTS = (
    "Write a Python function that returns the n-th Fibonacci number.",
    "A baker sells 12 loaves in the morning and twice as many in the afternoon. How many loaves is that in all?",
    "Explain in a few sentences why the sky is blue.",
)


class BlockStreamer:
    """Prints text as it is committed, the tokens that came from the drafter in colour."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.ids: list[int] = []
        self.printed = ""
        self.prompt_seen = False

    def put(self, tokens) -> None:
        if not self.prompt_seen:
            self.prompt_seen = True
            return
        *drafted, own = tokens.flatten().tolist()
        for token, style in [*((t, DRAFTED) for t in drafted), (own, "")]:
            self.ids.append(token)
            text = self.tokenizer.decode(self.ids, skip_special_tokens=True)
            # A character that is spread over several tokens is printed with its last one.
            if not text.endswith("\ufffd"):
                console.print(Text(text[len(self.printed) :], style), end="", soft_wrap=True)
                self.printed = text

    def end(self) -> None:
        text = self.tokenizer.decode(self.ids, skip_special_tokens=True)
        console.print(Text(text[len(self.printed) :]), soft_wrap=True)


def generate(
    prompt: Annotated[str, typer.Argument(help="What to say to the model.")],
    target: TargetOption = REFERENCE,
    drafter: DrafterOption = REFERENCE,
    dtype: DtypeOption = Precision.bfloat16,
    max_new_tokens: NewTokensOption = 256,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 for greedy decoding.")] = 0.0,
) -> None:
    """Answer one prompt, streaming; tokens that came from the drafter are coloured."""
    from ..integration import attach

    if not prompt.strip():
        raise ValueError("the prompt is empty; give the model something to answer.")
    model, tokenizer, draft_model = load(target, drafter, dtype)
    attach(model, draft_model)
    ids = prompt_ids(tokenizer, [{"role": "user", "content": prompt}]).to(model.device)
    sampling = {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
    model.generate(
        ids,
        attention_mask=ids.new_ones(ids.shape),
        assistant_model=draft_model,
        streamer=BlockStreamer(tokenizer),
        max_new_tokens=max_new_tokens,
        **sampling,
    )
    numbers = draft_model.last_statistics
    seconds = numbers.decode_seconds + numbers.prefill_seconds
    console.print(
        f"[{numbers.new_tokens} tokens in {numbers.target_forwards} target forwards, τ {numbers.tau:.2f}, "
        f"{numbers.new_tokens / seconds:.1f} tokens/s]",
        style="dim",
        markup=False,
    )


def demo(max_new_tokens: NewTokensOption = 96) -> None:
    """Answer a few prompts with and without the drafter: the same text, fewer target forwards."""
    import torch
    import transformers

    from .. import evaluation, reference

    # The answers' proof comes first: in float32 both ways of computing agree to the last token.
    model, tokenizer, drafter = load(REFERENCE, REFERENCE, "float32")
    console.print(
        f"target {reference.NAME} ({model.num_parameters() / 1e6:.1f} M parameters), drafter of "
        f"{drafter.config.num_hidden_layers} layers ({drafter.num_parameters() / 1e6:.1f} M), blocks of "
        f"{drafter.config.block_size}; torch {torch.__version__} with {torch.get_num_threads()} threads on "
        f"{model.device}, transformers {transformers.__version__}; greedy, at most {max_new_tokens} new tokens\n"
    )
    prompts = [prompt_ids(tokenizer, [{"role": "user", "content": text}]).to(model.device) for text in DEMO_PROMPTS]
    identical = failed = 0
    for text, prompt in zip(DEMO_PROMPTS, prompts, strict=True):
        console.print(f"> {text}", style="bold")
        ours = evaluation.run(
            model, drafter, prompt, "dflash", max_new_tokens=max_new_tokens, streamer=BlockStreamer(tokenizer)
        )
        plain = evaluation.run(model, drafter, prompt, "plain", max_new_tokens=max_new_tokens)
        difference = evaluation.first_difference(model, prompt, plain.ids, ours.ids)
        identical += difference is None
        verdict = "identical to plain generate"
        if difference:
            failed += difference[1] >= evaluation.NEAR_TIE
            verdict = f"DIFFERS from plain generate at token {difference[0]}: logit gap {difference[1]:.2e}"
        console.print(
            f"[float32: {verdict}; target forwards {plain.forwards} without the drafter, {ours.forwards} with; "
            f"τ {ours.statistics.tau:.2f}; tokens/s {len(plain.ids) / plain.seconds:.1f} without, "
            f"{len(ours.ids) / ours.seconds:.1f} with]\n",
            style="dim",
            markup=False,
        )
    console.print("The same prompts in bfloat16, the precision for speed (half precision may part at near-ties):")
    # Loaded anew: a cast would take the rotary frequencies along, which belong in float32.
    model, _, drafter = load(REFERENCE, REFERENCE, "bfloat16")
    speed = evaluation.compare(model, drafter, prompts, name="bfloat16", max_new_tokens=max_new_tokens)
    _print_comparison(speed)
    console.print(f"float32: text identical on {identical} of {len(prompts)} prompts")
    if failed:
        raise ValueError(f"{failed} answers differ from plain generate by more than a near-tie.")


def evaluate(
    prompts: Annotated[list[Path], typer.Argument(help="JSONL files of prompts: `turns`, `prompt` or `messages`.")],
    target: TargetOption = REFERENCE,
    drafter: DrafterOption = REFERENCE,
    dtype: DtypeOption = Precision.bfloat16,
    max_new_tokens: NewTokensOption = 96,
    last: Annotated[int, typer.Option(min=1, help="Use the last rows of each file, so many.")] = 64,
    output: Annotated[Path | None, typer.Option(help="Write all figures to this JSON file.")] = None,
) -> None:
    """Measure a drafter: τ, target forwards and tokens/s beside plain generate and prompt lookup, in one run."""
    import torch
    import transformers

    from .. import evaluation
    from ..training.sources import read_prompts

    sets = [(path.stem, read_prompts(path)[-last:]) for path in prompts]
    model, tokenizer, draft_model = load(target, drafter, dtype)
    report = {
        "target": target,
        "drafter": drafter,
        "dtype": dtype,
        "max_new_tokens": max_new_tokens,
        "greedy": True,
        "batch": 1,
        "threads": torch.get_num_threads(),
        "device": str(model.device),
        "processor": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "sets": [],
    }
    for name, conversations in sets:
        ids = [prompt_ids(tokenizer, messages).to(model.device) for messages in conversations]
        with console.status(name) as status:
            comparison = evaluation.compare(
                model,
                draft_model,
                ids,
                name=name,
                max_new_tokens=max_new_tokens,
                on_run=lambda i, method, _: status.update(f"{name}: prompt {i + 1} of {len(ids)}, {method}"),  # noqa: B023
            )
        _print_comparison(comparison)
        report["sets"].append(comparison.summary())
    if output:
        temporary = output.with_name(f".{output.name}.writing")
        temporary.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        os.replace(temporary, output)


def _print_comparison(comparison) -> None:
    """A table of methods, and what the times say."""
    summary = comparison.summary()
    table = Table("method", "tokens/s", "x plain", "target forwards", "τ", title=comparison.name)
    calm, prompts = summary["without_repetitive"], summary["prompts"]
    for note, figures in (("", summary), (f", {calm['prompts']} not repetitive", calm)):
        for method, speed in figures["tokens_per_second"].items():
            ratio, forwards = speed / figures["tokens_per_second"]["plain"], figures["target_forwards"][method]
            tau = figures["tau"][method]
            table.add_row(method + note, f"{speed:.1f}", f"{ratio:.2f}", str(forwards), f"{tau:.2f}")
    console.print(table)
    ms, tau, even = summary["milliseconds"], summary["tau"]["dflash"], summary["break_even_tau"]
    console.print(
        f"T_target {ms['T_target']:.1f} ms, T_verify {ms['T_verify']:.1f} ms, T_draft {ms['T_draft']:.1f} ms, "
        f"overhead {summary['overhead']:.1%} of decode time. Break-even τ {even:.2f}: "
        f"τ {tau:.2f} {'pays' if tau > even else 'does not pay'}."
    )
    console.print(
        f"Repetitive are the {prompts - calm['prompts']} answers of which more than 30 % repeats. "
        f"Text identical to plain: {summary['identical']} of {prompts}."
    )
    differences = summary["differences"]
    if differences:
        first, largest = differences[0], max(d["gap"] for d in differences)
        console.print(
            f"First difference: prompt {first['prompt']} at new token {first['index']}, logit gap {first['gap']:.2e}; "
            f"largest gap of the {len(differences)}: {largest:.2e}."
        )
