"""
Published layouts of drafters, one file each: `detect(raw) -> bool` and `normalise(raw) -> fields of DFlashConfig`.

A layout is a pure function from the dict in `config.json` to a dict of [`DFlashConfig`] fields. Tensors keep their
names, `fc`, `hidden_norm`, `layers.*` and `norm`, with or without the prefix `model.`.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import PreTrainedConfig

from ..configuration_dflash import DFlashConfig
from . import flat, zlab


LAYOUTS = (flat, zlab)

_CONFIG_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")


def load_config(name_or_path: str | os.PathLike, arguments: dict) -> DFlashConfig:
    """
    Read `config.json` of a drafter in any supported layout.

    Args:
        arguments (`dict`): keyword arguments of `from_pretrained`; those about where to find files are used.

    Raises:
        `ValueError`: when no layout matches, or a field has a value that the layout's rules forbid.
        `OSError`: when there is no configuration.
    """
    where = {name: arguments[name] for name in _CONFIG_ARGUMENTS if name in arguments}
    raw, _ = PreTrainedConfig.get_config_dict(name_or_path, **where)
    if not isinstance(raw, dict):
        raise ValueError(f"{name_or_path}/config.json: a JSON object was expected, not {type(raw).__name__}.")
    if not raw:
        raise OSError(f"{name_or_path}: no config.json. A drafter folder holds config.json and model.safetensors.")
    return config_from_dict(raw, str(name_or_path))


def config_from_dict(raw: dict, source: str) -> DFlashConfig:
    """The [`DFlashConfig`] of the dict in a `config.json`; `source` names it in errors."""
    for layout in LAYOUTS:
        if layout.detect(raw):
            try:
                return DFlashConfig(**layout.normalise(raw))
            except (ValueError, TypeError, StrictDataclassError) as error:
                raise ValueError(f"{source}/config.json: {' '.join(str(error).split())}") from error
    raise ValueError(
        f"{source}/config.json: no DFlash layout has model_type={raw.get('model_type')!r} and "
        f"architectures={raw.get('architectures')!r}. Known: {', '.join(layout.NAME for layout in LAYOUTS)}."
    )


@contextmanager
def damage_named(source: str | os.PathLike) -> Iterator[None]:
    """Raise `ValueError` that names the folder and the remedy where reading a safetensors file fails."""
    try:
        yield
    except SafetensorError as error:
        raise ValueError(
            f"{source}: the safetensors file is damaged or incomplete ({error}). Copy or download the drafter again."
        ) from error


def check_tensors(source: str | os.PathLike, info: dict) -> None:
    """
    Raise `ValueError` unless every tensor was expected and every expected tensor was there with its shape.

    Args:
        info (`dict`): what `from_pretrained(..., output_loading_info=True)` reports.
    """
    mismatched = [_mismatch(name, list(got), list(want)) for name, got, want in info["mismatched_keys"]]
    found = {
        "missing": sorted(info["missing_keys"]),
        "unexpected": sorted(info["unexpected_keys"]),
        "of another shape": sorted(mismatched),
    }
    problems = [f"{kind}: {', '.join(names)}" for kind, names in found.items() if names]
    if problems:
        raise ValueError(
            f"{source}: the weights are not those of the drafter that its config.json describes. "
            + "; ".join(problems)
        )


def _mismatch(name: str, got: list[int], want: list[int]) -> str:
    """Both shapes; for the fusion of the taps also what the shapes mean."""
    if name == "fc.weight" and got[0] == want[0]:
        counts = f"{got[1] / got[0]:g} tapped layers, but target_layer_ids names {want[1] / want[0]:g}"
        return f"{name} {got} instead of {want} (it fuses {counts})"
    return f"{name} {got} instead of {want}"
