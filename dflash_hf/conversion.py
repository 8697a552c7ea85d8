"""A drafter from one layout to another, and what is to be known of a drafter before it is used."""

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from . import checkpoints, pairing
from .checkpoints import muse, speculators, zlab
from .configuration_dflash import DFlashConfig
from .modeling_dflash import DFlashDraftModel, without_weights
from .target import Target


WRITERS = {"zlab": zlab, "speculators": speculators, "muse": muse}


def convert(
    source: str | os.PathLike,
    folder: str | os.PathLike,
    layout: str,
    *,
    target: PreTrainedModel | None = None,
    lossy: bool = False,
    **kwargs,
) -> list[str]:
    """
    Write a drafter in another layout, into a new folder.

    Args:
        source (`str` or `os.PathLike`): folder or Hub repository of the drafter, in any supported layout.
        folder (`str` or `os.PathLike`): a folder that does not exist yet.
        layout (`str`): `"dflash"` (our own), `"zlab"`, `"speculators"` or `"muse"`.
        target (`PreTrainedModel`, *optional*): for a layout that keeps rows of the target's head.
        lossy (`bool`, *optional*, defaults to `False`): go on where the layout cannot say everything.
        kwargs: of `DFlashDraftModel.from_pretrained`.

    Returns:
        `list[str]`: what is left out.

    Raises:
        `ValueError`: for an unknown layout, for what the layout cannot say at all, and, unless `lossy`, for what it
            would leave out, by name.
        `OSError`: when `folder` exists.
    """
    if layout not in ("dflash", *WRITERS):
        raise ValueError(f"layout={layout!r}: choose one of dflash, {', '.join(WRITERS)}.")
    folder = Path(folder)
    if folder.exists():
        raise FileExistsError(f"{folder} exists; name a folder that does not.")
    drafter = DFlashDraftModel.from_pretrained(source, **{"dtype": "auto", **kwargs, "output_loading_info": False})
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        if layout == "dflash":
            lost: list[str] = []
            drafter.save_pretrained(staging)
        else:
            adapter = None if target is None else Target(target)
            raw, tensors, impossible, lost = WRITERS[layout].write(drafter, adapter)
            if impossible:
                raise ValueError(f"{layout} cannot say {', '.join(impossible)}; the weights would be of no use there.")
            if lost and not lossy:
                raise ValueError(f"{layout} cannot say {', '.join(lost)}. Ask for it (lossy=True) to leave it out.")
            raw["dtype"] = str(drafter.dtype).removeprefix("torch.")
            (staging / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
            tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
            save_file(tensors, staging / "model.safetensors", {"format": "pt"})
        written = checkpoints.read(staging)
        without_weights(written, written.config)  # what cannot be read back is not left behind
        staging.chmod(0o755)
        staging.rename(folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return lost


def inspect(
    source: str | os.PathLike, *, target: PreTrainedModel | None = None, tokenizer=None, **kwargs
) -> dict[str, Any]:
    """
    What a drafter is, without loading its weights.

    Args:
        source (`str` or `os.PathLike`): folder or Hub repository.
        target (`PreTrainedModel`, *optional*), tokenizer (`PreTrainedTokenizerBase`, *optional*): to compare it with.
        kwargs: of `from_pretrained`, about where to find the files.

    Returns:
        `dict`: `layout`, `geometry`, `semantics`, `target`, `tensors`, `normalised` (fields whose value is not in the
        file as it is), `doubtful` and, with a target, `pairing` (what would fail or differs).

    Raises:
        `ValueError`, `OSError`: as `DFlashDraftModel.from_pretrained`.
    """
    checkpoint = checkpoints.read(source, kwargs)
    config, raw = checkpoint.config, checkpoint.raw
    drafter = without_weights(checkpoint, config)
    drafter.draft_token_ids = checkpoint.load("draft_token_ids").get("draft_token_ids")
    nested = {k: v for place in (raw, *(v for v in raw.values() if isinstance(v, dict))) for k, v in place.items()}
    fields = {name: value for name, value in config.to_dict().items() if name not in ("architectures", "dtype")}
    size = sum(torch.Size(stored.shape).numel() for stored in checkpoint.tensors.values())
    dtypes, defaults = sorted({stored.dtype for stored in checkpoint.tensors.values()}), DFlashConfig().to_dict()
    report: dict[str, Any] = {
        "source": checkpoint.source,
        "layout": checkpoint.layout.NAME,
        "geometry": {name: fields[name] for name in (*checkpoints.fields.BACKBONE, "rope_parameters")},
        "semantics": {name: fields[name] for name in SEMANTICS} | {"num_proposals": config.num_proposals},
        "target": {name: fields[name] for name in (*pairing.ORIGIN, "num_target_layers", "target_layer_ids")},
        "tensors": {
            "number": len(checkpoint.tensors),
            "parameters": size,
            "dtypes": dtypes,
            "dropped": list(checkpoint.dropped),
        },
        "normalised": {
            name: fields[name]
            for name in (*SEMANTICS, "target_layer_ids", "rope_parameters", "head_dim")
            if nested.get(name) != fields[name] and (name in nested or fields[name] != defaults[name])
        },
        "doubtful": _doubts(checkpoint),
    }
    if target is not None:
        report["pairing"] = _pairing(Target(target), drafter, tokenizer)
    return report


SEMANTICS = (
    *("block_size", "mask_token_id", "sample_from_anchor", "drafting", "conditioning", "qk_norm", "layer_types"),
    *("sliding_window", "causal_layers", "input_embeddings", "input_embedding_scale", "output_multiplier"),
    *("final_logit_softcapping", "draft_vocab_size", "own_embeddings", "own_head", "proposal_head", "proposal_rank"),
    *("confidence_head", "conv_kernel_size"),
)


def _doubts(checkpoint: checkpoints.Checkpoint) -> list[str]:
    """What a file says, or does not say, that has gone wrong before."""
    config, raw, layout = checkpoint.config, checkpoint.raw, checkpoint.layout
    depth, taps = config.num_target_layers, config.target_layer_ids
    nested = raw.get("dflash_config") or {}
    stated = any("sample_from_anchor" in place or "shift_label" in place for place in (raw, nested))
    rules = [
        (
            depth is not None and max(taps) == depth - 1,
            f"target_layer_ids: layer {max(taps)} is the target's last; some engines give its state before the final "
            "norm, others after it (here: before)",
        ),
        (depth is None, "num_target_layers is not stated: the depth of the target cannot be compared"),
        (
            -1 in taps and layout is speculators,
            "aux_hidden_state_layer_ids has 0, the output of the embedding: some files were written without the shift "
            "by one",
        ),
        (
            layout in (checkpoints.specforge, checkpoints.modelopt)
            and config.proposal_head != "domino"
            and not stated,
            "sample_from_anchor is not stated: taken as True, as DSpark is trained",
        ),
        (
            "is_causal" not in raw and "causal" not in nested and layout is zlab and any(config.causal_layers),
            "causality is not stated: sliding layers are taken as causal inside the block",
        ),
        (
            layout is speculators and raw["speculators_model_type"] == "dspark" and not stated,
            f"sample_from_anchor is not stated: taken as {config.sample_from_anchor}; engines disagree",
        ),
        (
            raw.get("use_sliding_window") is False and config.sliding_window is not None,
            "use_sliding_window is false beside sliding layers: taken as sliding",
        ),
        (config.target_name is None, "the target is not named"),
        (
            config.target_revision is None,
            "the revision of the target is not stated; repositories have been given other weights under one name",
        ),
    ]
    return [what for holds, what in rules if holds]


def _pairing(target: Target, drafter: DFlashDraftModel, tokenizer) -> list[str]:
    """What would fail, or differs, with this target."""
    problems = []
    for check in (
        lambda: pairing.check(target, drafter),
        lambda: pairing.compare_origin(target, drafter, tokenizer, strict=True),
    ):
        try:
            check()
        except ValueError as error:
            problems.append(str(error))
    return problems
