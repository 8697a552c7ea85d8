"""What the commands share: options, loading, the console."""

import logging
import sys
from enum import StrEnum
from typing import Annotated

import typer
from rich.console import Console


# rich leaves colours out by itself when NO_COLOR is set or the output is no terminal.
console = Console(highlight=False)
REFERENCE = "reference"


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


def device():
    """The accelerator, if there is one."""
    import torch

    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def load_target(name: str, dtype: str):
    """Target and tokenizer by name."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from .. import reference

    if name == REFERENCE:
        if not reference.is_ready():
            console.print(f"Preparing {reference.NAME}: a download of 93 MB and a conversion, once, about a minute.")
        model, tokenizer = reference.load_target(dtype)
        return model.to(device()), tokenizer
    try:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype).eval()
        return model.to(device()), AutoTokenizer.from_pretrained(name)
    except OSError as error:
        raise OSError(f"target {name!r}: {error}") from error


def load_tokenizer(target: str):
    """Tokenizer of a target by name."""
    from transformers import AutoTokenizer

    from .. import reference

    return AutoTokenizer.from_pretrained(reference.target_folder() if target == REFERENCE else target)


def load(target: str, drafter: str, dtype: str):
    """Target, tokenizer and drafter by name."""
    from .. import reference
    from ..modeling_dflash import DFlashDraftModel

    model, tokenizer = load_target(target, dtype)
    folder = reference.drafter_folder() if drafter == REFERENCE else drafter
    try:
        draft_model = DFlashDraftModel.from_pretrained(folder, dtype=dtype)
    except OSError as error:
        raise OSError(f"drafter {str(folder)!r}: {error}") from error
    return model, tokenizer, draft_model.to(model.device).eval()


def speak() -> None:
    """Show what the library logs for information; for commands whose users want to follow."""
    logger = logging.getLogger("dflash_hf")
    if not any(isinstance(handler, _ToStderr) for handler in logger.handlers):
        logger.addHandler(_ToStderr())
    logger.setLevel(logging.INFO)


class _ToStderr(logging.Handler):
    """Writes to what is the standard error at the time."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr)  # noqa: T201


def prompt_ids(tokenizer, messages: list[dict]):
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=False)
