"""The commands that look at a drafter and write it in another layout: inspect, convert."""

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from .shared import DtypeOption, Precision, console, load_target


class Layout(StrEnum):
    dflash = "dflash"
    zlab = "zlab"
    speculators = "speculators"
    muse = "muse"


SourceArgument = Annotated[str, typer.Argument(help="Folder or Hub repository of a drafter, in any supported layout.")]
RevisionOption = Annotated[str | None, typer.Option(help="Of the repository.")]
WithTarget = Annotated[str | None, typer.Option(help="The target: a folder, a repository, or 'reference'.")]


def inspect(
    source: SourceArgument,
    target: WithTarget = None,
    dtype: DtypeOption = Precision.bfloat16,
    revision: RevisionOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what a drafter is, what of it is doubtful, and with a target what would fail."""
    from .. import conversion

    model, tokenizer = load_target(target, dtype) if target else (None, None)
    where = {} if revision is None else {"revision": revision}
    report = conversion.inspect(source, target=model, tokenizer=tokenizer, **where)
    if as_json:
        typer.echo(json.dumps(report, indent=2))
        return
    for part, found in report.items():
        if not isinstance(found, dict):
            found = {str(i + 1): each for i, each in enumerate(found)} if isinstance(found, list) else {"": found}
        console.print(part, style="bold", highlight=False)
        for name, value in found.items():
            console.print(f"  {name + ': ' if name else ''}{value}", highlight=False, markup=False, soft_wrap=True)


def convert(
    source: SourceArgument,
    folder: Annotated[Path, typer.Argument(help="A folder that does not exist yet.")],
    layout: Annotated[Layout, typer.Option(help="Of the drafter that is written.")] = Layout.dflash,
    target: WithTarget = None,
    dtype: DtypeOption = Precision.bfloat16,
    revision: RevisionOption = None,
    lossy: Annotated[bool, typer.Option(help="Go on where the layout cannot say everything.")] = False,
) -> None:
    """Write a drafter in another layout, for vLLM, SGLang or the native loop of transformers."""
    from .. import conversion

    model = load_target(target, dtype)[0] if target else None
    where = {} if revision is None else {"revision": revision}
    lost = conversion.convert(source, folder, layout.value, target=model, lossy=lossy, **where)
    for each in lost:
        console.print(f"left out: {each}", highlight=False, markup=False, soft_wrap=True)
    console.print(f"{folder}: {layout.value}", highlight=False, markup=False, soft_wrap=True)
