"""What `dflash-hf train` takes beyond `transformers.TrainingArguments`."""

from dataclasses import dataclass, field

from transformers import TrainingArguments


@dataclass
class DrafterArguments:
    """The drafter to train, its target and its data."""

    data: str = field(metadata={"help": "JSONL file of conversations whose assistant turns the target wrote."})
    target: str = field(
        default="reference", metadata={"help": "A folder, a Hub repository, or `reference` for the embedded target."}
    )
    target_dtype: str = field(default="bfloat16", metadata={"help": "Precision of the frozen target."})
    eval_prompts: str | None = field(
        default=None, metadata={"help": "JSONL file of prompts; acceptance is measured on them by the real loop."}
    )
    num_eval_prompts: int = field(default=16, metadata={"help": "How many of the last rows of `eval_prompts` to use."})
    drafter_layers: int = field(default=3, metadata={"help": "Layers of the drafter."})
    block_size: int = field(default=8, metadata={"help": "Slots of a block: the anchor and block_size - 1 masks."})
    num_taps: int = field(default=5, metadata={"help": "Target layers that condition the drafter."})
    mask_token_id: int | None = field(
        default=None, metadata={"help": "Embedding row that stands for a mask; text must never use it."}
    )
    draft_vocab_size: int | None = field(
        default=None,
        metadata={"help": "Propose only from the most frequent response tokens of the data: so many of them."},
    )
    init: str = field(
        default="target",
        metadata={
            "help": "Start from copies of the target's last layers, or at random.",
            "choices": ["target", "random"],
        },
    )


@dataclass
class DFlashTrainingArguments(TrainingArguments):
    """
    `TrainingArguments` with the fields of the DFlash objective, and the defaults of the published recipe.

    Args:
        num_anchors (`int`, *optional*, defaults to 512): blocks drawn from each row at every visit.
        loss_decay (`float`, *optional*): decay of the slots' weights; default 4, 5, 7 for blocks of 8, 10, 16
            (paper, section 4.2), in between `block_size / 2`.
        max_length (`int`, *optional*, defaults to 3072): longer rows are cut at the end.
        max_minutes (`float`, *optional*): stop after so many minutes of training; the learning rate then reaches its
            end with the clock, however fast the machine is.
        eval_max_new_tokens (`int`, *optional*, defaults to 96): tokens generated for each evaluation prompt.
    """

    num_anchors: int = field(default=512, metadata={"help": "Blocks drawn from each row at every visit."})
    loss_decay: float | None = field(
        default=None, metadata={"help": "Decay of the slots' weights; default by the block size."}
    )
    max_length: int = field(default=3072, metadata={"help": "Longer rows are cut at the end."})
    max_minutes: float | None = field(
        default=None, metadata={"help": "Stop after so many minutes; the learning rate then follows the clock."}
    )
    eval_max_new_tokens: int = field(default=96, metadata={"help": "Tokens generated for each evaluation prompt."})
    learning_rate: float = field(default=6e-4, metadata={"help": "Initial learning rate."})
    lr_scheduler_type: str = field(default="cosine", metadata={"help": "Learning-rate schedule."})
    warmup_steps: float = field(default=0.04, metadata={"help": "Warm-up: a share of all steps, or a number of them."})
    weight_decay: float = field(default=0.0, metadata={"help": "Weight decay."})
    save_total_limit: int | None = field(default=2, metadata={"help": "Checkpoints to keep."})
    logging_steps: float = field(default=20, metadata={"help": "Log every so many steps."})
    train_sampling_strategy: str = field(
        default="group_by_length", metadata={"help": "Rows of like length share a batch, to pad less."}
    )
    remove_unused_columns: bool = field(default=False, metadata={"help": "Keep the columns of the dataset."})
    report_to: str | None = field(default="none", metadata={"help": "Trackers, as in TrainingArguments."})
