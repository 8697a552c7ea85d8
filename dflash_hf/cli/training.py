"""The commands that make a drafter: train, and data regenerate / features / show-mask."""

import difflib
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from .shared import (
    REFERENCE,
    DtypeOption,
    NewTokensOption,
    Precision,
    TargetOption,
    console,
    load_target,
    load_tokenizer,
    speak,
)


def regenerate(
    prompts: Annotated[str, typer.Argument(help="JSONL of prompts, or a dataset of the Hub as owner/name:split.")],
    output: Annotated[Path, typer.Option(help="JSONL file for the answers; an interrupted run goes on in it.")],
    target: TargetOption = REFERENCE,
    dtype: DtypeOption = Precision.bfloat16,
    max_new_tokens: NewTokensOption = 2048,
    batch_size: Annotated[int, typer.Option(min=1, help="Conversations answered at once.")] = 32,
    do_sample: Annotated[bool, typer.Option(help="Draw the answers; else greedy.")] = False,
    temperature: Annotated[float, typer.Option(help="Of the sampling.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="Of the sampling.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Of the sampling; 0 means all words.")] = 0,
    seed: Annotated[int, typer.Option(help="Of the sampling.")] = 0,
    thinking: Annotated[
        bool | None, typer.Option("--thinking/--no-thinking", help="For chat templates that know it.")
    ] = None,
    shard: Annotated[str, typer.Option(help="i/n: every n-th prompt from the i-th on, for n processes.")] = "0/1",
) -> None:
    """Let the target answer prompts: the data that its drafter is trained on."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    from ..training.regenerate import Regeneration
    from ..training.regenerate import regenerate as run

    part, _, parts = shard.partition("/")
    if not (part.isdecimal() and parts.isdecimal()):
        raise ValueError(f"shard={shard!r}: i/n was expected, 0/2 and 1/2 for two processes.")
    settings = Regeneration(
        max_new_tokens, do_sample, temperature, top_p, top_k, seed, batch_size, thinking, (int(part), int(parts))
    )
    model, tokenizer = load_target(target, dtype)
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task("answers")
        tokens = 0

        def show(done: int, total: int, new_tokens: int) -> None:
            nonlocal tokens
            tokens += new_tokens
            speed = tokens / max(bar.tasks[task].elapsed or 0.0, 1e-9)
            bar.update(task, completed=done, total=total, description=f"answers  {speed:.0f} tokens/s")

        counts = run(model, tokenizer, prompts, output, settings, on_batch=show)
    console.print(f"{output}: " + ", ".join(f"{count} {what}" for what, count in counts.items()))


def features(context: typer.Context) -> None:
    """Compute the features of all rows before training; takes the options of `train`, `--features` among them."""
    from rich.progress import track

    from ..training import recipe

    speak()
    arguments, training_arguments = _training_options(context.args, "dflash-hf data features")
    if arguments.features is None:
        raise ValueError("features: name the folder to keep them in with --features.")
    store, steps = recipe.compute_features(*_training_target(arguments), arguments, training_arguments)
    for _ in track(steps, total=store.missing, description="texts", console=Console(stderr=True)):
        pass
    console.print(f"{store.folder}: all {len(store.lengths)} texts")


def show_mask(
    data: Annotated[str, typer.Argument(help="JSONL file of conversations.")],
    output: Annotated[Path, typer.Option(help="Picture to write, .png or .svg.")] = Path("mask.png"),
    row: Annotated[int, typer.Option(min=0, help="Which row, counted from 0.")] = 0,
    target: TargetOption = REFERENCE,
    block_size: Annotated[int, typer.Option(min=2, help="Slots of a block.")] = 8,
    num_anchors: Annotated[int, typer.Option(min=1, help="Blocks to draw.")] = 6,
    window: Annotated[int | None, typer.Option(min=1, help="Sliding window of the layer.")] = None,
    causal: Annotated[bool, typer.Option(help="A layer that is causal inside the block.")] = False,
    length: Annotated[int, typer.Option(min=8, help="Tokens to show, around the start of the answer.")] = 48,
) -> None:
    """Draw who sees whom in the training of one real row: context, anchors, blocks."""
    from ..training.show_mask import draw_row

    draw_row(
        data, load_tokenizer(target), output, row=row, block_size=block_size, num_anchors=num_anchors, window=window,
        causal=causal, length=length,
    )  # fmt: skip
    console.print(f"drawn {output}")


def train(context: typer.Context) -> None:
    """Train a drafter; `dflash-hf train --help` lists the options, those of transformers' Trainer included."""
    from ..training import recipe

    speak()
    arguments, training_arguments = _training_options(context.args, "dflash-hf train")
    folder, trainer = recipe.train(*_training_target(arguments), arguments, training_arguments)
    if training_arguments.should_save:
        console.print(f"saved {folder}")
        if trainer.best_tau:
            console.print(f"best τ {trainer.best_tau:.2f}: {trainer.best_folder}")


def _training_options(words: list[str], program: str):
    """The two dataclasses of options, from flags, after those of a YAML file if the first word is one."""
    import yaml
    from transformers import HfArgumentParser

    from ..training import DFlashTrainingArguments, DrafterArguments

    if words and words[0].endswith((".yaml", ".yml")):
        # Words as they stand: `no` is a strategy, not False.
        try:
            settings = yaml.load(Path(words[0]).read_text(encoding="utf-8"), yaml.BaseLoader)
        except yaml.YAMLError as error:
            raise ValueError(f"{words[0]}: not YAML ({error}).") from None
        if not isinstance(settings, dict) or not all(isinstance(value, str) for value in settings.values()):
            raise ValueError(
                f"{words[0]}: a mapping from options to words was expected; write nested values as JSON in quotes."
            )
        # Flags come later, so they win.
        given = {name: value for name, value in settings.items() if value not in ("", "null")}
        words = [word for name, value in given.items() for word in (f"--{name}", value)] + words[1:]
    parser = HfArgumentParser((DrafterArguments, DFlashTrainingArguments), prog=program)
    parser.error = _refuse  # the usage would be three screens long
    *options, unknown = parser.parse_args_into_dataclasses(words, return_remaining_strings=True)
    if unknown:
        near = difflib.get_close_matches(unknown[0], parser._option_string_actions, n=1)
        raise ValueError(f"{unknown[0]}: no such option{f'; did you mean {near[0]}?' if near else '.'}")
    return options


def _refuse(message: str) -> NoReturn:
    raise ValueError(message)


def _training_target(arguments):
    """Target and tokenizer of a training; the embedded target has a mask token of its own."""
    from .. import reference

    if arguments.target == REFERENCE and arguments.mask_token_id is None:
        arguments.mask_token_id = reference.MASK_TOKEN_ID
    return load_target(arguments.target, arguments.target_dtype)
