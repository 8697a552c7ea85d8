"""
Published layouts of drafters, one file each.

A layout is `detect(raw) -> bool` and `normalise(raw, tensors) -> fields of DFlashConfig`, pure functions of the dict
in `config.json` and of the tensors that there are, `RENAMES` of tensors (patterns and what takes their place), and if
need be `DROPPED` (patterns of tensors that are not used), `convert(name, tensor)` and `check_loaded(state, dropped)`.
"""

import os
import re
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import safe_open
from transformers import PreTrainedConfig

from ..configuration_dflash import DFlashConfig
from . import deepspec, files, flat, modelopt, muse, refused, specforge, speculators, zlab
from .files import Stored


# The first that recognises a file reads it.
LAYOUTS: tuple[ModuleType, ...] = (flat, muse, speculators, refused, specforge, modelopt, deepspec, zlab)

# Prefixes that exporters put before the names, and what no drafter needs.
_RENAMES = {
    r"^(model|dflash_module|draft_model)\.": "",
    r"^logit_head\.": "",
    r"^midlayer\.": "layers.0.",
    r"^candidate_selector\.(\w+_codebook)(\.weight)?$": r"proposal_head.\1",
    r"^candidate_selector\.": "proposal_head.",
}
_DROPPED = (r"(^|\.)rotary_emb\.",)

_FLOATS = ("BF16", "F16", "F32", "F64")
PLACES = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder", "proxies")


@dataclass
class Checkpoint:
    """
    A drafter on disk or on the Hub, before its weights are loaded.

    Args:
        source (`str`): where it is.
        raw (`dict`): its `config.json`.
        layout (`ModuleType`): of [`LAYOUTS`].
        config (`DFlashConfig`): what it is.
        tensors (`dict[str, Stored]`): where the tensors are, by the names that they have in the model.
        dropped (`dict[str, Stored]`): tensors that are not used.
    """

    source: str
    raw: dict[str, Any]
    layout: ModuleType
    config: DFlashConfig
    tensors: dict[str, Stored]
    dropped: dict[str, Stored]

    def check(self, expected: dict[str, torch.Size]) -> None:
        """
        Raise `ValueError` unless the tensors are exactly those of the model, each with its shape.

        Args:
            expected (`dict[str, torch.Size]`): of the model.
        """
        shapes = {name: stored.shape for name, stored in self.tensors.items()}
        wrong = [(n, shapes[n], list(expected[n])) for n in sorted(shapes.keys() & expected.keys())]
        found = {
            "missing": sorted(expected.keys() - shapes.keys()),
            "unexpected": sorted(shapes.keys() - expected.keys()),
            "of another shape": [_mismatch(name, got, want) for name, got, want in wrong if got != want],
        }
        problems = [f"{kind}: {_listed(names)}" for kind, names in found.items() if names]
        if problems:
            raise ValueError(
                f"{self.source}: the weights are not those of the drafter that its config.json describes. "
                + "; ".join(problems)
            )
        for name, stored in sorted(self.tensors.items()):
            wanted = ("I64", "I32") if name == "draft_token_ids" else _FLOATS
            if stored.dtype not in wanted:
                raise ValueError(
                    f"{self.source}: {stored.name} is {stored.dtype}, not one of {', '.join(wanted)}; quantised "
                    "drafters are not implemented."
                )

    def load(self, *names: str) -> dict[str, torch.Tensor]:
        """
        The tensors, or those of `names` that there are, by the names that they have in the model.

        Raises:
            `ValueError`: when they contradict each other.
        """
        convert = getattr(self.layout, "convert", lambda name, tensor: tensor)
        wanted = {name: stored for name, stored in self.tensors.items() if not names or name in names}
        state = {name: convert(name, tensor) for name, tensor in _opened(wanted).items()}
        if hasattr(self.layout, "check_loaded"):
            try:
                self.layout.check_loaded(state, _opened(self.dropped))
            except ValueError as error:
                raise ValueError(f"{self.source}: {error}") from error
        return state


def _opened(tensors: dict[str, Stored]) -> dict[str, torch.Tensor]:
    found = {}
    for file in sorted({stored.file for stored in tensors.values()}):
        with safe_open(file, "pt") as opened:
            found |= {n: opened.get_tensor(each.name) for n, each in tensors.items() if each.file == file}
    return found


def read(source: str | os.PathLike, arguments: dict[str, Any] | None = None) -> Checkpoint:
    """
    Look at a drafter in any supported layout.

    Args:
        arguments (`dict`, *optional*): keyword arguments of `from_pretrained`; those that say where to look are used.

    Raises:
        `ValueError`: when no layout matches, a field has a value that the layout's rules forbid, or a file is damaged.
        `OSError`: when there is no configuration or no safetensors file.
    """
    where = {name: value for name, value in (arguments or {}).items() if name in PLACES}
    if (os.path.isabs(source) or str(source).startswith(".")) and not os.path.isdir(source):
        raise OSError(f"{source}: there is no such folder.")
    raw, _ = PreTrainedConfig.get_config_dict(source, **where)
    if not isinstance(raw, dict):
        raise ValueError(f"{source}/config.json: a JSON object was expected, not {type(raw).__name__}.")
    if not raw:
        raise OSError(f"{source}: no config.json. A drafter folder holds config.json and model.safetensors.")
    layout = layout_of(raw, str(source))
    stored = files.headers(source, files.find(source, where))
    tensors, dropped = renamed(stored, layout, str(source))
    return Checkpoint(str(source), raw, layout, config_from_dict(raw, str(source), tensors), tensors, dropped)


def layout_of(raw: dict[str, Any], source: str) -> ModuleType:
    """The layout of the dict in a `config.json`; `source` names it in errors."""
    architectures = raw.get("architectures") or []
    if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
        raise ValueError(f"{source}/config.json: architectures={architectures!r} is not a list of names.")
    for layout in LAYOUTS:
        if layout.detect(raw):
            return layout
    raise ValueError(
        f"{source}/config.json: no DFlash layout has model_type={raw.get('model_type')!r} and "
        f"architectures={raw.get('architectures')!r}. Known: "
        + ", ".join(layout.NAME for layout in LAYOUTS if layout is not refused)
    )


def config_from_dict(raw: dict[str, Any], source: str, tensors: dict[str, Stored] | None = None) -> DFlashConfig:
    """The [`DFlashConfig`] of the dict in a `config.json` beside `tensors`; `source` names it in errors."""
    layout = layout_of(raw, source)
    try:
        return DFlashConfig(**layout.normalise(raw, tensors or {}))
    except (ValueError, TypeError, AttributeError, StrictDataclassError) as error:
        raise ValueError(f"{source}/config.json: {' '.join(str(error).split())}") from error


def renamed(stored: dict[str, Stored], layout: ModuleType, source: str) -> tuple[dict[str, Stored], dict[str, Stored]]:
    """The tensors by the names that they have in the model, and those that are dropped."""
    tensors: dict[str, Stored] = {}
    dropped: dict[str, Stored] = {}
    for name, where in stored.items():
        new = name
        for pattern, replacement in {**_RENAMES, **layout.RENAMES}.items():
            new = re.sub(pattern, replacement, new)
        if any(re.search(pattern, new) for pattern in (*_DROPPED, *getattr(layout, "DROPPED", ()))):
            dropped[name] = where
        elif new in tensors:
            raise ValueError(f"{source}: {name} and {tensors[new].name} are both {new}.")
        else:
            tensors[new] = where
    return tensors, dropped


def _mismatch(name: str, got: list[int], want: list[int]) -> str:
    """Both shapes; for the fusion of the taps also what the shapes mean."""
    if name == "fc.weight" and len(got) == 2 and got[0] == want[0]:
        counts = f"{got[1] / got[0]:g} tapped layers, but target_layer_ids names {want[1] / want[0]:g}"
        return f"{name} {got} instead of {want} (it fuses {counts})"
    return f"{name} {got} instead of {want}"


def _listed(names: list[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
