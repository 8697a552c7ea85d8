"""From a target and a file of its answers to a drafter folder: what `dflash-hf train` runs."""

import json
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import fields
from enum import Enum
from pathlib import Path

import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed
from transformers.trainer_utils import get_last_checkpoint
from transformers.utils import logging

from ..configuration_dflash import EMBEDDING_TAP, DFlashConfig
from ..masking import BLOCKS
from ..modeling_dflash import DFlashDraftModel
from ..pairing import origin_of
from ..target import Target
from .arguments import DFlashTrainingArguments, DrafterArguments
from .data import ConversationDataset
from .features import FeatureStore, fill, manifest_for
from .initialisation import initialise_from_target
from .saving import save_drafter
from .sources import read_prompts
from .trainer import DFlashTrainer


logger = logging.get_logger(__name__)

_NEW = ("target", "random")  # what `init_from` says of a drafter without a past


def train(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    arguments: DrafterArguments,
    training_arguments: DFlashTrainingArguments,
) -> tuple[Path, DFlashTrainer]:
    """
    Train a drafter for `model` and save it.

    Args:
        model (`PreTrainedModel`), tokenizer (`PreTrainedTokenizerBase`): the target.
        arguments (`DrafterArguments`), training_arguments (`DFlashTrainingArguments`): all settings.

    Returns:
        `(folder, trainer)`: the folder `<output_dir>/drafter`, which `DFlashDraftModel.from_pretrained` loads, and the
        trainer with its log.

    Raises:
        `ValueError`: for data, geometry or a mask token that cannot work, before the first step; and when
            `output_dir` already holds checkpoints but `resume_from_checkpoint` was not given.
    """
    set_seed(training_arguments.seed)
    output = Path(training_arguments.output_dir)
    checkpoint = _checkpoint(output, training_arguments.resume_from_checkpoint)
    dataset = read_dataset(tokenizer, arguments, training_arguments, model.config)
    target = Target(model)
    if checkpoint is None:
        drafter = _drafter(target, tokenizer, arguments, dataset)
    else:
        drafter = _resumed(checkpoint, _wanted(target, tokenizer, arguments, dataset))
    _check_mask(drafter.config.mask_token_id, dataset)
    drafter.set_attn_implementation(_attention(arguments, drafter.config, training_arguments))
    rows, measured = _split(dataset, arguments.num_eval_rows)
    trainer = DFlashTrainer(
        drafter,
        training_arguments,
        target=target,
        lines=dataset.lines,
        features=open_features(target, drafter.config, tokenizer, dataset, arguments, training_arguments),
        train_dataset=rows,
        eval_dataset=measured,
        eval_prompts=_prompts(tokenizer, arguments, dataset, measured),
    )
    trainer.train(resume_from_checkpoint=checkpoint)
    last = max((entry["step"] for entry in trainer.state.log_history if _is_evaluation(entry)), default=None)
    if (measured or trainer.eval_prompts) and last != trainer.state.global_step:
        trainer.evaluate()
    folder = output / "drafter"
    trained = trainer.saved_drafter()
    if training_arguments.should_save:
        save_drafter(trained, folder)
        _save_history(trainer, arguments, dataset, folder)
    trainer.accelerator.wait_for_everyone()
    return folder, trainer


def read_dataset(
    tokenizer: PreTrainedTokenizerBase,
    arguments: DrafterArguments,
    training_arguments: DFlashTrainingArguments,
    config,
) -> ConversationDataset:
    """The rows of `arguments.data`; `config` is the target's."""
    layers = set(getattr(config.get_text_config(decoder=True), "layer_types", None) or [])
    if arguments.pack and not layers <= {"full_attention", "sliding_attention"}:
        raise ValueError(
            f"pack=True: the target has layers of type {min(layers - {'full_attention', 'sliding_attention'})!r}, "
            "which would carry one text over into the next; leave pack out."
        )
    if arguments.pack and "flash" in str(config._attn_implementation):
        raise ValueError(
            f"pack=True: with several packed rows in a batch, {config._attn_implementation!r} of the target would let "
            "a text see the one before it. Load the target with attn_implementation='sdpa', or leave pack out."
        )
    thinking = arguments.enable_thinking
    dataset = ConversationDataset(
        arguments.data,
        tokenizer,
        training_arguments.max_length,
        pack=arguments.pack,
        chat_template_kwargs=None if thinking is None else {"enable_thinking": thinking},
        vocab_size=config.get_text_config(decoder=True).vocab_size,
    )
    room = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    if room and max(dataset.lengths) > room:
        raise ValueError(
            f"max_length={training_arguments.max_length}: a row has {max(dataset.lengths)} tokens, and the target "
            f"reads {room}. Cut the rows with --max_length {room}."
        )
    return dataset


def open_features(
    target: Target,
    config: DFlashConfig,
    tokenizer: PreTrainedTokenizerBase,
    dataset: ConversationDataset,
    arguments: DrafterArguments,
    training_arguments: DFlashTrainingArguments,
) -> FeatureStore | None:
    """The store of the features that this run needs, if it keeps them."""
    if arguments.features is None:
        return None
    manifest = manifest_for(target, config, tokenizer, dataset, soft_labels=training_arguments.loss != "ce")
    return FeatureStore(arguments.features, manifest, dataset.lengths)


def compute_features(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    arguments: DrafterArguments,
    training_arguments: DFlashTrainingArguments,
) -> tuple[FeatureStore, Iterator[int]]:
    """
    The store for the features of a run, and an iterator that computes what is missing, a text at a time.

    The same arguments as for [`train`]; the training then reads all features. What an interrupted iteration has done
    stays.
    """
    dataset = read_dataset(tokenizer, arguments, training_arguments, model.config)
    target = Target(model)
    config = _wanted(target, tokenizer, arguments, dataset)
    store = open_features(target, config, tokenizer, dataset, arguments, training_arguments)
    return store, fill(store, target, dataset.texts)


def _checkpoint(output: Path, resume: str | None) -> str | None:
    """The checkpoint to go on from; `last` means the newest in `output`."""
    found = get_last_checkpoint(str(output)) if output.is_dir() else None
    if resume is None and found:
        raise ValueError(
            f"output_dir={str(output)!r} already holds {Path(found).name}. Go on from it with "
            "--resume_from_checkpoint last, or choose another output_dir."
        )
    if resume is None and (output / "drafter").exists():
        raise ValueError(f"output_dir={str(output)!r} already holds a drafter. Choose another one, or move it away.")
    if resume == "last":
        if found is None:
            raise ValueError(f"resume_from_checkpoint='last', but {str(output)!r} holds no checkpoint.")
        return found
    if resume is not None and not Path(resume, "trainer_state.json").is_file():
        raise ValueError(f"resume_from_checkpoint={resume!r} is no checkpoint: it has no trainer_state.json.")
    return resume


def _attention(arguments: DrafterArguments, config: DFlashConfig, training_arguments: DFlashTrainingArguments) -> str:
    """The attention implementation of the training."""
    if arguments.attn_implementation is not None:
        return arguments.attn_implementation
    if training_arguments.torch_compile:
        return "flex_attention"
    # The fewest operations, but it keeps all scores for the backward, which the memory of an accelerator may not hold.
    on_cpu = training_arguments.device.type == "cpu"
    return BLOCKS if on_cpu and config.conditioning == "kv" else "sdpa"


def _split(dataset: ConversationDataset, num_eval_rows: int) -> tuple[ConversationDataset, ConversationDataset | None]:
    """The rows to train on, and some to measure on. A line of the file is all on one side."""
    lines = sorted(set(dataset.lines))
    if not 0 <= num_eval_rows < len(lines):
        raise ValueError(
            f"num_eval_rows={num_eval_rows}: the data has {len(lines)} rows, and at least one must be trained on."
        )
    # Drawn, since the file may be in some order; always the same ones, whatever the seed of the training.
    order = torch.randperm(len(lines), generator=torch.Generator().manual_seed(0)).tolist()
    drawn = {lines[i] for i in order[len(lines) - num_eval_rows :]}
    sides = ([], [])
    for document, line in enumerate(dataset.lines):
        sides[line in drawn].append(document)
    return dataset.select(sides[False]), dataset.select(sides[True], pack=False) if drawn else None


def _prompts(
    tokenizer, arguments: DrafterArguments, dataset: ConversationDataset, measured: ConversationDataset | None
) -> list[torch.Tensor]:
    """Prompt ids `(1, T)` to measure τ on: of `eval_prompts`, else of the rows that are measured on."""
    if arguments.num_eval_prompts < 1:
        raise ValueError(f"num_eval_prompts={arguments.num_eval_prompts}: at least 1.")
    if arguments.eval_prompts:
        options = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": False}
        prompts = [
            tokenizer.apply_chat_template(messages, **options, **dataset.chat_template_kwargs)
            for messages in read_prompts(arguments.eval_prompts)
        ]
    else:
        rows = [row for row in measured or [] if not row["supervised"][0]]  # the others have no prompt
        prompts = [row["input_ids"][: int(row["supervised"].long().argmax())].unsqueeze(0) for row in rows]
    return prompts[-arguments.num_eval_prompts :]


# -------------------------------------------------------------------------------------------------------- the drafter
def _drafter(
    target: Target, tokenizer: PreTrainedTokenizerBase, arguments: DrafterArguments, dataset: ConversationDataset
) -> DFlashDraftModel:
    """The drafter before its first step."""
    if arguments.init_from in _NEW:
        drafter = DFlashDraftModel(_configuration(target, tokenizer, arguments, dataset))
        if arguments.init_from == "target":
            initialise_from_target(drafter, target, _sample(dataset))
    else:
        drafter = _continued(arguments)
    if arguments.draft_vocab_size:
        shortlist = dataset.most_frequent(arguments.draft_vocab_size, target.vocab_size)
        drafter.draft_token_ids.copy_(torch.tensor(shortlist))
    return drafter


def _wanted(
    target: Target, tokenizer: PreTrainedTokenizerBase, arguments: DrafterArguments, dataset: ConversationDataset
) -> DFlashConfig:
    """The configuration of the drafter that the arguments describe."""
    if arguments.init_from in _NEW:
        return _configuration(target, tokenizer, arguments, dataset)
    return _continued(arguments).config


def _continued(arguments: DrafterArguments) -> DFlashDraftModel:
    """
    The drafter of `init_from`, with the shortlist and the window that the arguments ask for.

    Neither changes a tensor that is trained: the shortlist selects rows of the frozen head, the window is in the mask.
    """
    found = DFlashDraftModel.from_pretrained(arguments.init_from, dtype=torch.float32)
    _check_kept(arguments, found.config)
    config = found.config.to_dict()
    if arguments.draft_vocab_size:
        config["draft_vocab_size"] = arguments.draft_vocab_size
    if arguments.sliding_window:
        config |= _sliding(arguments.sliding_window, found.config.causal_layers)
    drafter = DFlashDraftModel(DFlashConfig(**{k: v for k, v in config.items() if k != "model_type"}))
    weights = found.state_dict()
    if arguments.draft_vocab_size:
        weights["draft_token_ids"] = drafter.draft_token_ids
    drafter.load_state_dict(weights)
    return drafter


def _check_kept(arguments: DrafterArguments, config: DFlashConfig) -> None:
    """Raise `ValueError` when the arguments ask for something else than the drafter of `init_from` is."""
    no_features = config.target_layer_ids == [EMBEDDING_TAP]
    kept = {
        "drafter_layers": config.num_hidden_layers,
        "block_size": config.block_size,
        "num_taps": len(config.target_layer_ids),
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": config.sample_from_anchor,
        "conditioning": "none" if no_features else config.conditioning,
        "drafting": config.drafting,
    }
    for field in fields(arguments):
        asked = getattr(arguments, field.name)
        if field.name in kept and asked not in (field.default, kept[field.name]):
            raise ValueError(
                f"{field.name}={asked!r}: the drafter of init_from={arguments.init_from!r} has {kept[field.name]!r}, "
                f"and keeps it. Leave {field.name} out, or train a new drafter."
            )


def _sliding(window: int, causal_layers: list[bool]) -> dict:
    """Fields of a configuration whose layers all slide; causality inside the block is another matter."""
    layer_types = ["sliding_attention"] * len(causal_layers)
    return {"layer_types": layer_types, "sliding_window": window, "causal_layers": causal_layers}


def _free_row(target: Target, tokenizer: PreTrainedTokenizerBase, dataset: ConversationDataset) -> int:
    """The first row of the embedding that neither the tokenizer nor the data uses."""
    for row in range(len(tokenizer), target.vocab_size):
        if not dataset.lines_with(row):
            logger.warning("mask_token_id: row %d, the first that neither the tokenizer nor the data uses.", row)
            return row
    raise ValueError(
        f"mask_token_id: the target's embedding has {target.vocab_size} rows and the tokenizer or the data uses all "
        "of them, so no row is free. Name one that text never uses with --mask_token_id."
    )


def _configuration(
    target: Target, tokenizer: PreTrainedTokenizerBase, arguments: DrafterArguments, dataset: ConversationDataset
) -> DFlashConfig:
    """The configuration of a new drafter, with the mask token checked."""
    mask = arguments.mask_token_id
    if mask is None:
        mask = _free_row(target, tokenizer, dataset)
    special = {tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id}
    if mask in special or not 0 <= mask < target.vocab_size:
        raise ValueError(
            f"mask_token_id={mask}: it must be a row of the target's embedding (0 to {target.vocab_size - 1}) and "
            "neither pad, bos nor eos, because text uses those."
        )
    layers = arguments.drafter_layers or 3
    conditioning, drafting = arguments.conditioning or "kv", arguments.drafting or "parallel"
    autoregressive = drafting == "autoregressive"
    causal_layers = [autoregressive] * layers
    special_fields = _sliding(arguments.sliding_window, causal_layers) if arguments.sliding_window else {}
    if conditioning == "none":  # the target's embedding in place of its layers
        special_fields["target_layer_ids"] = [EMBEDDING_TAP]
    like_target, origin = arguments.init_from == "target", origin_of(target.model, tokenizer)
    embedded = arguments.target == "reference"
    origin["target_name"] = Path(target.model.config._name_or_path).name if embedded else arguments.target
    return DFlashConfig.from_target(
        target.model.config,
        mask_token_id=mask,
        num_hidden_layers=layers,
        block_size=arguments.block_size or 8,
        num_taps=arguments.num_taps or 5,
        draft_vocab_size=arguments.draft_vocab_size,
        qk_norm=not like_target or "self_attn.q_norm.weight" in target.layers[-1].state_dict(),
        **origin,
        sample_from_anchor=arguments.sample_from_anchor or autoregressive,
        drafting=drafting,
        conditioning="input" if conditioning == "none" else conditioning,
        **special_fields,
    )


def _check_mask(mask: int, dataset: ConversationDataset) -> None:
    """Raise `ValueError` when the mask token stands in the data: the drafter could not tell it from text."""
    lines = dataset.lines_with(mask)
    if lines:
        raise ValueError(
            f"mask_token_id={mask}: {dataset.path}, line {lines[0]} has this token ({len(lines)} lines have). Name "
            "one that text never uses, or leave the lines out."
        )


def _sample(dataset: ConversationDataset, rows: int = 8, length: int = 128) -> torch.Tensor:
    """Some text of the data, `(rows, length)`, to measure the taps on."""
    ids = [token for i in range(min(8 * rows, len(dataset.lengths))) for token in dataset.texts[i]]
    rows = max(1, min(rows, len(ids) // length))
    length = min(length, len(ids))
    return torch.tensor(ids[: rows * length]).view(rows, length)


def _resumed(checkpoint: str, config: DFlashConfig) -> DFlashDraftModel:
    """The drafter of a checkpoint, with its shortlist, if it is the one that the arguments describe."""
    drafter = DFlashDraftModel.from_pretrained(checkpoint, dtype=torch.float32)
    found, wanted = drafter.config.to_diff_dict(), config.to_diff_dict()
    for field in sorted((set(found) | set(wanted)) - {"architectures", "dtype", "transformers_version"}):
        if found.get(field) != wanted.get(field):
            raise ValueError(
                f"{checkpoint}: its {field} is {found.get(field)!r}, the arguments say {wanted.get(field)!r}. Resume "
                "with the arguments of the first run, or start a new output_dir."
            )
    return drafter


def _save_history(
    trainer: DFlashTrainer, arguments: DrafterArguments, dataset: ConversationDataset, folder: Path
) -> None:
    """Put beside the drafter how it came to be: command, settings, data, log, versions; and the curves."""
    default = type(trainer.args)(output_dir="")
    settings = _settings(arguments, DrafterArguments(data="")) | _settings(trainer.args, default)
    history = {
        "command": shlex.join(
            ["dflash-hf", "train", *(f"--{name}={_word(value)}" for name, value in settings.items())]
        ),
        "settings": settings,
        "data": dataset.report().splitlines()[1:],
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "log": trainer.state.log_history,
    }
    (folder / "training.json").write_text(json.dumps(history, indent=1, default=str) + "\n", encoding="utf-8")
    curves = Path(trainer.args.output_dir, "curves.png")
    if curves.is_file():
        shutil.copy(curves, folder)


def _settings(arguments, default) -> dict:
    """The options of a dataclass of arguments that differ from `default`; no access token is among them."""
    settings = {}
    for field in fields(arguments):
        value = getattr(arguments, field.name)
        if field.init and not field.name.endswith("_token") and value not in (getattr(default, field.name), None):
            settings[field.name] = value.value if isinstance(value, Enum) else value
    return settings


def _word(value) -> str:
    """How an option is written on the command line."""
    return json.dumps(value) if isinstance(value, dict) else str(value)


def _is_evaluation(entry: dict) -> bool:
    return any(name.startswith("eval_") for name in entry)
