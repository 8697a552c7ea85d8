"""The weights of a drafter on disk or on the Hub: safetensors only, and looked at before anything is loaded."""

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from transformers.utils import cached_file


ONE, INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "model.pt")


class Stored(NamedTuple):
    """A tensor in a file: which file, under which name there, its shape and dtype."""

    file: Path
    name: str
    shape: list[int]
    dtype: str


def find(source: str | os.PathLike, where: dict[str, Any]) -> list[Path]:
    """
    The safetensors files of a drafter, fetched if it is on the Hub.

    Args:
        where (`dict`): arguments of `from_pretrained` that say where to look.

    Raises:
        `OSError`: when there is none, or one that the index names is missing.
        `ValueError`: when the index cannot be read.
    """

    def at(name: str) -> Path | None:
        options = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_gated_repo": True}
        found = cached_file(source, name, **where, **options)
        return None if found is None else Path(found)

    one = at(ONE)
    if one is not None:
        return [one]
    index = at(INDEX)
    if index is None:
        pickle = next((name for name in _PICKLES if at(name) is not None), None)
        held = f"there is {pickle}, and weights are never read from pickles. Convert it" if pickle else "Add it"
        raise OSError(f"{source}: no {ONE} and no {INDEX}; {held}.")
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        if not all(Path(name).name == name for name in names):
            raise ValueError("it names files in other places")
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(
            f"{source}/{INDEX}: it cannot be read ({error!r}). Copy or download the drafter again."
        ) from error
    files = [(name, at(name)) for name in names]
    missing = [name for name, file in files if file is None]
    if missing:
        raise OSError(f"{source}: {INDEX} names {', '.join(missing)}, which is missing. Copy or download it again.")
    return [file for _, file in files]


def headers(source: str | os.PathLike, files: list[Path]) -> dict[str, Stored]:
    """
    The tensors in `files`, by name.

    Raises:
        `ValueError`: when a file is damaged, or two hold one name.
    """
    found: dict[str, Stored] = {}
    for file in files:
        try:
            with safe_open(file, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118 (not a mapping)
                    part = opened.get_slice(name)
                    if name in found:
                        raise ValueError(f"{source}: {name} is in {found[name].file.name} and in {file.name}.")
                    found[name] = Stored(file, name, list(part.get_shape()), part.get_dtype())
        except SafetensorError as error:
            raise ValueError(
                f"{source}: {file.name} is damaged or incomplete ({error}). Copy or download the drafter again."
            ) from error
    return found
