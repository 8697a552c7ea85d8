"""Folders of weights that are there whole or not at all."""

import os
import shutil
from pathlib import Path

from ..modeling_dflash import DFlashDraftModel


def replace_folder(new: Path, old: Path) -> None:
    """Put the folder `new` in the place of `old`, which is deleted once `new` is there."""
    aside = old.with_name(f".{old.name}.old")
    shutil.rmtree(aside, ignore_errors=True)
    if old.exists():
        os.replace(old, aside)
    os.replace(new, old)
    shutil.rmtree(aside, ignore_errors=True)


def save_drafter(drafter: DFlashDraftModel, folder: Path) -> None:
    """Save the drafter under a temporary name, then rename it to `folder`."""
    staging = folder.with_name(f".{folder.name}")
    shutil.rmtree(staging, ignore_errors=True)
    drafter.save_pretrained(staging)
    replace_folder(staging, folder)
