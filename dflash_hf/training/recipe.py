"""From a target and a file of its answers to a drafter folder: what `dflash-hf train` runs."""

import copy
import os
import shutil
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed
from transformers.trainer_utils import get_last_checkpoint
from transformers.utils import logging

from ..configuration_dflash import DFlashConfig
from ..modeling_dflash import DFlashDraftModel
from ..target import Target
from .arguments import DFlashTrainingArguments, DrafterArguments
from .data import ConversationDataset, collate, read_prompts
from .initialisation import initialise_from_target
from .trainer import DFlashTrainer


logger = logging.get_logger(__name__)


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
    dataset = ConversationDataset(arguments.data, tokenizer, training_arguments.max_length)
    target = Target(model)
    config = _configuration(target, tokenizer, arguments)
    if checkpoint is None:
        drafter = DFlashDraftModel(config)
        if drafter.draft_token_ids is not None:
            shortlist = dataset.most_frequent(arguments.draft_vocab_size, target.vocab_size)
            drafter.draft_token_ids.copy_(torch.tensor(shortlist))
        if arguments.init == "target":
            initialise_from_target(drafter, target, _sample(dataset))
    else:
        drafter = _resumed(checkpoint, config)
    prompts = None
    if arguments.eval_prompts:
        if arguments.num_eval_prompts < 1:
            raise ValueError(f"num_eval_prompts={arguments.num_eval_prompts}: at least 1.")
        prompts = [
            tokenizer.apply_chat_template(m, add_generation_prompt=True, return_tensors="pt", return_dict=False)
            for m in read_prompts(arguments.eval_prompts)[-arguments.num_eval_prompts :]
        ]
    trainer = DFlashTrainer(
        drafter,
        training_arguments,
        target=target,
        eval_prompts=prompts,
        train_dataset=dataset,
        eval_dataset=dataset,  # Trainer wants one to evaluate at all; `DFlashTrainer.evaluate` uses the prompts
        data_collator=collate,
    )
    trainer.train(resume_from_checkpoint=checkpoint)
    if prompts:
        trainer.evaluate()
    return _save(trainer, output), trainer


def _checkpoint(output: Path, resume: str | None) -> str | None:
    """The checkpoint to go on from; `last` means the newest in `output`."""
    found = get_last_checkpoint(str(output)) if output.is_dir() else None
    if resume is None and found:
        raise ValueError(
            f"output_dir={str(output)!r} already holds {Path(found).name}. Go on from it with "
            "--resume_from_checkpoint last, or choose another output_dir."
        )
    if resume == "last":
        if found is None:
            raise ValueError(f"resume_from_checkpoint='last', but {str(output)!r} holds no checkpoint.")
        return found
    if resume is not None and not Path(resume, "trainer_state.json").is_file():
        raise ValueError(f"resume_from_checkpoint={resume!r} is no checkpoint: it has no trainer_state.json.")
    return resume


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


def _configuration(target: Target, tokenizer: PreTrainedTokenizerBase, arguments: DrafterArguments) -> DFlashConfig:
    """The drafter's configuration, with the mask token checked."""
    mask = arguments.mask_token_id
    if mask is None:
        mask = len(tokenizer)
        if mask >= target.vocab_size:
            raise ValueError(
                f"mask_token_id: the target's embedding has {target.vocab_size} rows and the tokenizer uses all of "
                "them, so no row is free. Name one that text never uses with --mask_token_id."
            )
        logger.warning("mask_token_id: row %d, the first that the tokenizer does not use.", mask)
    special = {tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id}
    if mask in special or not 0 <= mask < target.vocab_size:
        raise ValueError(
            f"mask_token_id={mask}: it must be a row of the target's embedding (0 to {target.vocab_size - 1}) and "
            "neither pad, bos nor eos, because text uses those."
        )
    like_target = arguments.init == "target"
    return DFlashConfig.from_target(
        target.model.config,
        mask_token_id=mask,
        num_hidden_layers=arguments.drafter_layers,
        block_size=arguments.block_size,
        num_taps=arguments.num_taps,
        draft_vocab_size=arguments.draft_vocab_size,
        qk_norm=not like_target or "self_attn.q_norm.weight" in target.layers[-1].state_dict(),
        target_name=arguments.target,
    )


def _sample(dataset: ConversationDataset, rows: int = 8, length: int = 128) -> torch.Tensor:
    """Some text of the data, `(rows, length)`, to measure the taps on."""
    ids = [token for row in dataset.rows[: 8 * rows] for token in row["input_ids"]]
    rows = max(1, min(rows, len(ids) // length))
    length = min(length, len(ids))
    return torch.tensor(ids[: rows * length]).view(rows, length)


def _save(trainer: DFlashTrainer, output: Path) -> Path:
    """Save the drafter in the target's dtype under a temporary name, then rename it to `<output>/drafter`."""
    staging, final = output / ".drafter", output / "drafter"
    shutil.rmtree(staging, ignore_errors=True)
    drafter = copy.deepcopy(trainer.accelerator.unwrap_model(trainer.model))
    drafter.to(trainer.target.model.dtype).save_pretrained(staging)
    shutil.rmtree(final, ignore_errors=True)
    os.replace(staging, final)
    return final
