"""The shell: parsing and printing only."""

import os
import sys

import typer

from . import checkpoints, decode, training


app = typer.Typer(
    name="dflash-hf",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    help="DFlash speculative decoding for Hugging Face transformers.",
)
data = typer.Typer(no_args_is_help=True, help="Make, keep and look at training data.")
app.add_typer(data, name="data")

# Options of these go to HfArgumentParser, `--help` too.
_PASSED_ON = {"context_settings": {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}}

for command in (decode.generate, decode.demo, decode.evaluate, checkpoints.inspect, checkpoints.convert):
    app.command()(command)
app.command(**_PASSED_ON)(training.train)
data.command()(training.regenerate)
data.command(**_PASSED_ON)(training.features)
data.command()(training.show_mask)


def main() -> None:
    """Run the command line; what the user can mend ends in one line and exit status 1."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        app()
    except (ValueError, TypeError, OSError, RuntimeError, ImportError, FloatingPointError) as error:
        if os.environ.get("DFLASH_HF_TRACEBACK"):
            raise
        print(f"dflash-hf: error: {' '.join(str(error).split())}", file=sys.stderr)  # noqa: T201
        raise SystemExit(1) from None
