"""The shell: parsing and printing only."""

import sys
from pathlib import Path
from typing import Annotated

import typer


app = typer.Typer(
    name="dflash-hf",
    help="DFlash speculative decoding for Hugging Face transformers.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)


@app.callback()
def main() -> None:
    """DFlash speculative decoding for Hugging Face transformers."""


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def train(context: typer.Context) -> None:
    """Train a drafter; `dflash-hf train --help` lists the options, those of transformers' Trainer included."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser

    from . import reference
    from .training import DFlashTrainingArguments, DrafterArguments
    from .training.recipe import train as run

    parser = HfArgumentParser((DrafterArguments, DFlashTrainingArguments), prog="dflash-hf train")
    arguments, training_arguments = parser.parse_args_into_dataclasses(context.args)
    if arguments.target == "reference":
        model, tokenizer = reference.load_target(arguments.target_dtype)
        arguments.target = reference.NAME
        arguments.mask_token_id = arguments.mask_token_id or reference.MASK_TOKEN_ID
    else:
        model = AutoModelForCausalLM.from_pretrained(arguments.target, dtype=arguments.target_dtype)
        tokenizer = AutoTokenizer.from_pretrained(arguments.target)
    folder, _ = run(model, tokenizer, arguments, training_arguments)
    typer.echo(f"saved {folder}")
