"""The shell: parsing and printing only."""

import json
import os
import platform
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text


app = typer.Typer(
    name="dflash-hf",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
# rich leaves colours out by itself when NO_COLOR is set or the output is no terminal.
console = Console(highlight=False)
DRAFTED = "green"

REFERENCE = "reference"
DEMO_PROMPTS = (
    "Write a Python function that returns the n-th Fibonacci number.",
    "A baker sells 12 loaves in the morning and twice as many in the afternoon. How many loaves is that in all?",
    "Explain in a few sentences why the sky is blue.",
)


class Precision(StrEnum):
    """Precisions that the commands load models in."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


TargetOption = Annotated[str, typer.Option(help="A folder, a Hub repository, or `reference` for the embedded target.")]
DrafterOption = Annotated[
    str, typer.Option(help="A folder, a Hub repository, or `reference` for the embedded drafter.")
]
DtypeOption = Annotated[Precision, typer.Option(help="Precision of target and drafter.")]
NewTokensOption = Annotated[int, typer.Option(min=2, help="Tokens to generate at most.")]


def main() -> None:
    """Run the command line; what the user can mend ends in one line and exit status 1."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        app()
    except (ValueError, TypeError, OSError, RuntimeError) as error:
        if os.environ.get("DFLASH_HF_TRACEBACK"):
            raise
        print(f"dflash-hf: error: {' '.join(str(error).split())}", file=sys.stderr)  # noqa: T201
        raise SystemExit(1) from None


@app.callback()
def _about() -> None:
    """DFlash speculative decoding for Hugging Face transformers."""


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


def _device():
    """The accelerator, if there is one."""
    import torch

    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def _load_target(name: str, dtype: str):
    """Target and tokenizer by name."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from . import reference

    if name == REFERENCE:
        if not reference.is_ready():
            console.print(f"Preparing {reference.NAME}: a download of 93 MB and a conversion, once, about a minute.")
        model, tokenizer = reference.load_target(dtype)
        return model.to(_device()), tokenizer
    try:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype).eval()
        return model.to(_device()), AutoTokenizer.from_pretrained(name)
    except OSError as error:
        raise OSError(f"target {name!r}: {error}") from error


def _load(target: str, drafter: str, dtype: str):
    """Target, tokenizer and drafter by name."""
    from . import reference
    from .modeling_dflash import DFlashDraftModel

    model, tokenizer = _load_target(target, dtype)
    folder = reference.drafter_folder() if drafter == REFERENCE else drafter
    try:
        draft_model = DFlashDraftModel.from_pretrained(folder, dtype=dtype)
    except OSError as error:
        raise OSError(f"drafter {str(folder)!r}: {error}") from error
    return model, tokenizer, draft_model.to(model.device).eval()


def _prompt_ids(tokenizer, messages: list[dict]):
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=False)


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="What to say to the model.")],
    target: TargetOption = REFERENCE,
    drafter: DrafterOption = REFERENCE,
    dtype: DtypeOption = Precision.bfloat16,
    max_new_tokens: NewTokensOption = 256,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 for greedy decoding.")] = 0.0,
) -> None:
    """Answer one prompt, streaming; tokens that came from the drafter are coloured."""
    from .integration import attach

    if not prompt.strip():
        raise ValueError("the prompt is empty; give the model something to answer.")
    model, tokenizer, draft_model = _load(target, drafter, dtype)
    attach(model, draft_model)
    ids = _prompt_ids(tokenizer, [{"role": "user", "content": prompt}]).to(model.device)
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


@app.command()
def demo(max_new_tokens: NewTokensOption = 96) -> None:
    """Answer a few prompts with and without the drafter: the same text, fewer target forwards."""
    import torch
    import transformers

    from . import evaluation, reference

    # The answers' proof comes first: in float32 both ways of computing agree to the last token.
    model, tokenizer, drafter = _load(REFERENCE, REFERENCE, "float32")
    console.print(
        f"target {reference.NAME} ({model.num_parameters() / 1e6:.1f} M parameters), drafter of "
        f"{drafter.config.num_hidden_layers} layers ({drafter.num_parameters() / 1e6:.1f} M), blocks of "
        f"{drafter.config.block_size}; torch {torch.__version__} with {torch.get_num_threads()} threads on "
        f"{model.device}, transformers {transformers.__version__}; greedy, at most {max_new_tokens} new tokens\n"
    )
    prompts = [_prompt_ids(tokenizer, [{"role": "user", "content": text}]).to(model.device) for text in DEMO_PROMPTS]
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
    model, _, drafter = _load(REFERENCE, REFERENCE, "bfloat16")
    speed = evaluation.compare(model, drafter, prompts, name="bfloat16", max_new_tokens=max_new_tokens)
    _print_comparison(speed)
    console.print(f"float32: text identical on {identical} of {len(prompts)} prompts")
    if failed:
        raise ValueError(f"{failed} answers differ from plain generate by more than a near-tie.")


@app.command()
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

    from . import evaluation
    from .training.data import read_prompts

    sets = [(path.stem, read_prompts(path)[-last:]) for path in prompts]
    model, tokenizer, draft_model = _load(target, drafter, dtype)
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
        ids = [_prompt_ids(tokenizer, messages).to(model.device) for messages in conversations]
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
    plain, prompts = summary["tokens_per_second"]["plain"], summary["prompts"]
    for method, speed in summary["tokens_per_second"].items():
        forwards = summary["target_forwards"][method]
        tau = (summary["new_tokens"][method] - prompts) / max(1, forwards - prompts)
        table.add_row(method, f"{speed:.1f}", f"{speed / plain:.2f}", str(forwards), f"{tau:.2f}")
    console.print(table)
    ms, tau, even = summary["milliseconds"], summary["tau"], summary["break_even_tau"]
    console.print(
        f"T_target {ms['T_target']:.1f} ms, T_verify {ms['T_verify']:.1f} ms, T_draft {ms['T_draft']:.1f} ms, "
        f"overhead {summary['overhead']:.1%} of decode time. Break-even τ {even:.2f}: "
        f"τ {tau:.2f} {'pays' if tau > even else 'does not pay'}."
    )
    console.print(
        f"τ without the {summary['repetitive_prompts']} answers of which more than 30 % repeats: "
        f"{summary['tau_without_repetitive']:.2f}. Text identical to plain: {summary['identical']} of {prompts}."
    )
    differences = summary["differences"]
    if differences:
        first, largest = differences[0], max(d["gap"] for d in differences)
        console.print(
            f"First difference: prompt {first['prompt']} at new token {first['index']}, logit gap {first['gap']:.2e}; "
            f"largest gap of the {len(differences)}: {largest:.2e}."
        )


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def train(context: typer.Context) -> None:
    """Train a drafter; `dflash-hf train --help` lists the options, those of transformers' Trainer included."""
    from transformers import HfArgumentParser

    from . import reference
    from .training import DFlashTrainingArguments, DrafterArguments
    from .training.recipe import train as run

    parser = HfArgumentParser((DrafterArguments, DFlashTrainingArguments), prog="dflash-hf train")
    arguments, training_arguments = parser.parse_args_into_dataclasses(context.args)
    model, tokenizer = _load_target(arguments.target, arguments.target_dtype)
    if arguments.target == REFERENCE:
        arguments.target = reference.NAME
        if arguments.mask_token_id is None:
            arguments.mask_token_id = reference.MASK_TOKEN_ID
    folder, _ = run(model, tokenizer, arguments, training_arguments)
    console.print(f"saved {folder}")
