"""The features of every text of a dataset on disk, so that the frozen target reads each text once.

A store is one folder for one target, its taps and one dataset:

    features/manifest.json     what the features belong to, and the size of a shard
    features/shard-00000.bin   the features of whole documents, one after the other, in the order of the dataset
    features/done.bin          one byte for each document: 1 once its features are in the shard

`features` appears with all its files at once, by a rename; the shards start as holes, and fill as documents come.
"""

import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from huggingface_hub.utils import WeakFileLock
from torch import nn
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from ..configuration_dflash import DFlashConfig
from ..pairing import json_hash, tokenizer_hash
from ..target import Target
from .data import positions


logger = logging.get_logger(__name__)

_VERSION = 1  # of the layout on disk
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_DATA = "features"
_STAGING, _LOCK = ".creating", ".lock"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """
    What the features of a store belong to; a store opens only for an equal manifest.

    Attributes:
        version (`int`): of the layout on disk.
        target (`str`): name of the target.
        revision (`str`, *optional*): commit of the target, when it comes from the Hub.
        weights_hash (`str`): of a sample of the target's weights.
        layer_ids (`tuple[int, ...]`): the tapped layers.
        soft_labels (`bool`): whether the hidden state after the final norm follows the taps, for soft labels.
        width (`int`): values for each token.
        dtype (`str`): `"bfloat16"`, `"float16"` or `"float32"`.
        tokenizer_hash, template_hash (`str`): of the tokenizer and of its chat template.
        documents, tokens (`int`): size of the dataset.
        data_hash (`str`): of all token ids, in order, and of where each document ends.
    """

    version: int = _VERSION
    target: str
    revision: str | None
    weights_hash: str
    layer_ids: tuple[int, ...]
    soft_labels: bool
    width: int
    dtype: str
    tokenizer_hash: str
    template_hash: str
    documents: int
    tokens: int
    data_hash: str


def manifest_for(
    target: Target, config: DFlashConfig, tokenizer: PreTrainedTokenizerBase, dataset, soft_labels: bool
) -> Manifest:
    """
    The manifest of the features that a drafter of `config` needs of `dataset`.

    Args:
        dataset: has `texts`, the token ids of each document (1-D tensors or lists) in order, and their `lengths`.
        soft_labels (`bool`): whether the hidden state after the final norm is kept, too.
    """
    return Manifest(
        target=target.model.config._name_or_path,
        # Transformers sets it on what it loads from the Hub, and only there.
        revision=getattr(target.model.config, "_commit_hash", None),
        weights_hash=_weights_hash(target.model),
        layer_ids=tuple(config.target_layer_ids),
        soft_labels=soft_labels,
        width=(len(config.target_layer_ids) + soft_labels) * target.hidden_size,
        dtype=str(target.model.dtype).removeprefix("torch."),
        tokenizer_hash=tokenizer_hash(tokenizer),
        template_hash=json_hash(tokenizer.chat_template),
        documents=len(dataset.lengths),
        tokens=sum(dataset.lengths),
        data_hash=_data_hash(dataset.texts),
    )


@torch.no_grad()
def target_states(
    target: Target, layer_ids: Sequence[int], input_ids: torch.Tensor, document: torch.Tensor, *, soft_labels: bool
) -> torch.Tensor:
    """
    What the frozen target says of some rows: the tapped hidden states `(B, S, M * H)`, with `soft_labels` also the one
    after the final norm, `(B, S, M * H + H)`.

    Args:
        input_ids, document (`torch.Tensor` of shape `(B, S)`, int64): tokens, and the text that each belongs to.
    """
    # Positions that start anew keep packed texts apart. Padding comes last, where no token of a text sees it: no mask.
    packed = bool(((document[:, 1:] != document[:, :-1]) & (document[:, 1:] >= 0)).any())
    places = {"position_ids": positions(document)} if packed else {}
    with target.capture(layer_ids) as taps, torch.autocast(input_ids.device.type, enabled=False):
        output = target.decoder(input_ids=input_ids, **places, use_cache=False)
    states = taps.concatenate(layer_ids)
    return torch.cat([states, output.last_hidden_state.to(states)], dim=-1) if soft_labels else states


class FeatureStore:
    """
    Features `(length, width)` of each document, on disk.

    Any number of processes of one machine may read and write one store at the same time. A process that is killed
    loses the document that it was writing, no other. A store that is complete can be read where nothing may be
    written. The object holds no open file: it can be copied, pickled and forked.

    Args:
        folder (`str` or `Path`): of the store; created when there is none.
        manifest (`Manifest`): see [`manifest_for`].
        lengths (`Sequence[int]`): tokens of each document of the dataset.
        shard_bytes (`int`, *optional*, defaults to 1 GiB): size of a shard of a new store. A document never crosses
            shards; a longer one has a shard to itself.

    Raises:
        `ValueError`: when the store is of another manifest (the first field that differs is named), damaged, or the
            folder is something else.
        `OSError`: when the documents that are missing would not fit on the disk.

    Example:
        ```python
        store = FeatureStore("features", manifest_for(target, config, tokenizer, dataset, False), dataset.lengths)
        if not store.has(document):
            store.write(document, features)  # from the target
        features = store.read(document)
        ```
    """

    def __init__(self, folder: str | Path, manifest: Manifest, lengths: Sequence[int], *, shard_bytes: int = 1 << 30):
        self.folder = Path(folder).absolute()
        self.manifest = manifest
        self.lengths = [int(length) for length in lengths]
        _check_arguments(manifest, self.lengths, shard_bytes)
        self.dtype = _DTYPES[manifest.dtype]
        self._token_bytes = self.bytes_needed([1], manifest.width, self.dtype)
        self._data = self.folder / _DATA
        is_new = not self._data.exists()
        if is_new:
            self._check_folder()
            self._check_room(self.lengths)
            self._create(shard_bytes)
        self._open()
        if not is_new:
            self._check_room([length for length, done in zip(self.lengths, self._done(), strict=True) if not done])

    @staticmethod
    def bytes_needed(lengths: Sequence[int], width: int, dtype: torch.dtype) -> int:
        """Bytes on disk of documents of so many tokens, each of `width` values of `dtype`."""
        return sum(lengths) * width * dtype.itemsize

    @property
    def missing(self) -> int:
        """Number of documents that are not there yet."""
        return len(self.lengths) - int(self._done().sum(dtype=np.int64))

    def has(self, document: int) -> bool:
        """Whether the features of `document` are there."""
        self._check(document)
        return bool(self._done()[document])

    def read(self, document: int) -> torch.Tensor:
        """
        The features of `document`: `(length, width)` of the store's dtype, the bytes that were written.

        The tensor is a mapping of the file of its own: what is written into it reaches neither the store nor another
        read, and only what is looked at is loaded.

        Raises:
            `ValueError`: when they are not there yet.
        """
        if not self.has(document):
            raise ValueError(f"document={document}: {self.folder} has no features of it yet; ask `has` first.")
        path, offset = self._place(document)
        size = self.lengths[document] * self._token_bytes
        mapping = np.memmap(path, dtype=np.uint8, mode="c", offset=offset, shape=(size,))
        return torch.from_numpy(mapping).view(self.dtype).view(-1, self.manifest.width)

    def write(self, document: int, features: torch.Tensor) -> None:
        """
        Keep `features` `(length, width)` of `document`.

        What is there already stays as it is. Where two processes write the same document at the same time, each of
        its values is from one of them.

        Raises:
            `ValueError`: when shape or dtype are not those of the document, or a value is not finite.
            `OSError`: when the disk is full, for example; the document is then still missing.
        """
        self._check(document)
        expected = (self.lengths[document], self.manifest.width)
        if tuple(features.shape) != expected or features.dtype != self.dtype:
            raise ValueError(
                f"document={document}: features of shape {tuple(features.shape)} in {features.dtype}, expected are "
                f"{expected} in {self.dtype}. Open a store for the dataset, taps and dtype that are used."
            )
        if not features.isfinite().all():
            raise ValueError(
                f"document={document}: its features are not finite, and are not kept. Use a target dtype with more "
                "range, or leave the text out."
            )
        if self.has(document):
            return
        path, offset = self._place(document)
        # Written through the file, not through a mapping: on a full disk, that is an error and not the end of the
        # process.
        with open(path, "r+b") as shard:
            shard.seek(offset)
            shard.write(features.cpu().contiguous().view(torch.uint8).numpy().data)
            shard.flush()
            os.fsync(shard.fileno())
        # Only now, and a byte and not a bit: processes that mark neighbours do not overwrite each other.
        with open(self._data / "done.bin", "r+b", buffering=0) as done:
            done.seek(document)
            done.write(b"\x01")

    def _check(self, document: int) -> None:
        # Else -1, the document of padding, would be the last one.
        if not 0 <= document < len(self.lengths):
            raise IndexError(f"document={document}: the store has documents 0 to {len(self.lengths) - 1}.")

    def _done(self) -> np.ndarray:
        # Mapped anew: it shows what other processes wrote, and there is nothing for a fork or a pickle to copy.
        return np.memmap(self._data / "done.bin", dtype=np.uint8, mode="r")

    def _place(self, document: int) -> tuple[Path, int]:
        """File of a document, and the byte at which it starts."""
        shard, token = self._places[document]
        return self._data / _shard_name(shard), token * self._token_bytes

    def _check_folder(self) -> None:
        """Raise `ValueError` when the folder of a new store is a file or has other files in it."""
        if not self.folder.exists():
            return
        others = []
        if self.folder.is_dir():
            others = sorted(path.name for path in self.folder.iterdir() if path.name not in (_STAGING, _LOCK))
        if others or not self.folder.is_dir():
            raise ValueError(
                f"{self.folder} is no feature store: it is {f'a folder with {others[0]}' if others else 'a file'}. "
                "Use an empty or a new folder."
            )

    def _check_room(self, missing: list[int]) -> None:
        """Say what the documents to come will take, and raise `OSError` when the disk cannot hold it."""
        needed = sum(missing) * self._token_bytes
        free = shutil.disk_usage(next(path for path in (self.folder, *self.folder.parents) if path.exists())).free
        logger.info(
            f"Features in {self.folder}: {len(missing)} of {len(self.lengths)} documents to come, {sum(missing)} "
            f"tokens of {self._token_bytes} bytes, {needed / 1e9:.2f} GB; {free / 1e9:.2f} GB are free."
        )
        if needed > free:
            raise OSError(
                f"The features of {len(missing)} documents need {needed / 1e9:.2f} GB, {free / 1e9:.2f} GB are free "
                f"for {self.folder}. Use a larger disk, fewer taps or less data, or train without a feature store."
            )

    def _create(self, shard_bytes: int) -> None:
        """Make the files of a store without documents under a temporary name, then rename them."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(self.folder / _LOCK):
            if self._data.exists():  # another process made it while this one waited
                return
            staging = self.folder / _STAGING
            shutil.rmtree(staging, ignore_errors=True)  # whoever made it was killed: the lock is ours
            staging.mkdir()
            for name, size in self._sizes(shard_bytes).items():
                with open(staging / name, "wb") as file:
                    file.truncate(size)  # a hole: it takes room as documents come
            with open(staging / "manifest.json", "w", encoding="utf-8") as file:
                json.dump({**asdict(self.manifest), "shard_bytes": shard_bytes}, file, indent=2)
                file.flush()
                os.fsync(file.fileno())
            os.replace(staging, self._data)

    def _open(self) -> None:
        """Find where each document is; raise `ValueError` for a store of something else, or a damaged one."""
        remedy = "Use another folder, or delete this one."
        try:
            found = json.loads((self._data / "manifest.json").read_text(encoding="utf-8"))
            shard_bytes = found["shard_bytes"]
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{self.folder}: its manifest.json cannot be read ({error!r}). {remedy}") from error
        for field, wanted in json.loads(json.dumps(asdict(self.manifest))).items():
            if found.get(field) != wanted:
                raise ValueError(
                    f"{self.folder} holds features of another {field}: {found.get(field)!r} there, {wanted!r} here. "
                    f"{remedy}"
                )
        for name, size in self._sizes(shard_bytes).items():
            path = self._data / name
            actual = path.stat().st_size if path.is_file() else 0
            if actual != size:
                raise ValueError(f"{self.folder} is damaged: {name} has {actual} bytes, not {size}. {remedy}")
        self._places, _ = _layout(self.lengths, shard_bytes // self._token_bytes)

    def _sizes(self, shard_bytes: int) -> dict[str, int]:
        """Name and bytes of each file of data."""
        _, shards = _layout(self.lengths, shard_bytes // self._token_bytes)
        sizes = {_shard_name(i): tokens * self._token_bytes for i, tokens in enumerate(shards)}
        return {**sizes, "done.bin": len(self.lengths)}


def fill(store: FeatureStore, target: Target, texts: Sequence[Sequence[int]]) -> Iterator[int]:
    """Compute the features that `store` is missing, one text at a time; yields the number of each."""
    manifest = store.manifest
    for i in range(len(texts)):
        if not store.has(i):
            ids = torch.tensor([list(texts[i])], device=target.model.device)
            states = target_states(
                target, list(manifest.layer_ids), ids, torch.full_like(ids, i), soft_labels=manifest.soft_labels
            )
            store.write(i, states[0])
            yield i


def _check_arguments(manifest: Manifest, lengths: list[int], shard_bytes: int) -> None:
    """Raise `ValueError` for what no store can be made of."""
    if manifest.dtype not in _DTYPES:
        raise ValueError(f"dtype={manifest.dtype!r}: features are kept in one of {', '.join(_DTYPES)}.")
    if (len(lengths), sum(lengths)) != (manifest.documents, manifest.tokens):
        raise ValueError(
            f"lengths: {len(lengths)} documents of {sum(lengths)} tokens, the manifest counts {manifest.documents} of "
            f"{manifest.tokens}. Give the lengths of the dataset of the manifest."
        )
    if not lengths or min(lengths) < 1:
        raise ValueError("lengths: there must be a document, and each of at least one token. Leave out empty ones.")
    if shard_bytes < 1:
        raise ValueError(f"shard_bytes={shard_bytes}: at least 1.")


def _layout(lengths: list[int], shard_tokens: int) -> tuple[list[tuple[int, int]], list[int]]:
    """Shard and first token of each document, and the tokens of each shard."""
    places, shards = [], [0]
    for length in lengths:
        if shards[-1] and shards[-1] + length > shard_tokens:
            shards.append(0)
        places.append((len(shards) - 1, shards[-1]))
        shards[-1] += length
    return places, shards


def _shard_name(shard: int) -> str:
    return f"shard-{shard:05d}.bin"


def _weights_hash(model: nn.Module) -> str:
    """Hash of up to 512 values of each parameter and buffer: quick, and other once the model is tuned or quantised."""
    digest = hashlib.sha256()
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        # An odd step: a multiple of the row's length would see one column only.
        step = tensor.numel() // 256 | 1
        sample = tensor.detach().reshape(-1)[::step].cpu().contiguous()
        digest.update(sample.view(torch.uint8).numpy())
    return _short(digest)


def _data_hash(texts: Sequence[Sequence[int]]) -> str:
    digest = hashlib.sha256()
    for ids in texts:
        digest.update(len(ids).to_bytes(8, "little"))
        digest.update(np.asarray(ids, dtype="<i8"))
    return _short(digest)


def _short(digest) -> str:
    return digest.hexdigest()[:16]
