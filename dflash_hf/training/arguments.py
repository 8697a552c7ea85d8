"""What `dflash-hf train` takes beyond `transformers.TrainingArguments`."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from transformers import TrainingArguments

from ..configuration_dflash import CONDITIONING, DRAFTING


LOSSES = ("ce", "kl", "tv")
WEIGHTS = ("decay", "uniform", "d-pace")
ANCHORS = ("random", "grid")


@dataclass
class DrafterArguments:
    """The drafter to train, its target and its data."""

    data: str = field(metadata={"help": "JSONL file of conversations whose assistant turns the target wrote."})
    target: str = field(
        default="reference", metadata={"help": "A folder, a Hub repository, or `reference` for the embedded target."}
    )
    target_dtype: str = field(default="bfloat16", metadata={"help": "Precision of the frozen target."})
    enable_thinking: bool | None = field(
        default=None, metadata={"help": "Passed to chat templates that know it, when rows are rendered."}
    )
    pack: bool = field(default=False, metadata={"help": "Several texts share a row of max_length, kept apart."})
    features: str | None = field(
        default=None, metadata={"help": "Folder that keeps the target's features on disk, for the next visits."}
    )
    num_eval_rows: int = field(
        default=0, metadata={"help": "So many rows of `data`, drawn, are measured on and not trained on."}
    )
    eval_prompts: str | None = field(
        default=None,
        metadata={"help": "JSONL file of prompts to measure τ on by the real loop; default: those of the eval rows."},
    )
    num_eval_prompts: int = field(default=16, metadata={"help": "How many of the last of them to use."})
    init_from: str = field(
        default="target",
        metadata={
            "help": "`target`: copies of the target's last layers; `random`; or the folder or Hub repository of a "
            "drafter, whose geometry is then kept."
        },
    )
    drafter_layers: int | None = field(default=None, metadata={"help": "Layers of the drafter; default: 3."})
    block_size: int | None = field(
        default=None, metadata={"help": "Slots of a block: the anchor and block_size - 1 masks; default: 8."}
    )
    num_taps: int | None = field(
        default=None, metadata={"help": "Target layers that condition the drafter; default: 5."}
    )
    mask_token_id: int | None = field(
        default=None, metadata={"help": "Embedding row that stands for a mask; text must never use it."}
    )
    draft_vocab_size: int | None = field(
        default=None,
        metadata={"help": "Propose only from the most frequent response tokens of the data: so many of them."},
    )
    attn_implementation: str | None = field(
        default=None,
        metadata={
            "help": "Attention of the drafter in training: blocks, flex_attention, sdpa or eager. Default: "
            "flex_attention with --torch_compile, else blocks on a CPU (not with --conditioning input), else sdpa."
        },
    )
    sliding_window: int | None = field(
        default=None, metadata={"help": "All layers of the drafter see only so many tokens back."}
    )
    sample_from_anchor: bool = field(
        default=False,
        metadata={"help": "Next-token labels: every slot, the anchor's too, predicts the token after it."},
    )
    conditioning: str | None = field(
        default=None,
        metadata={
            "help": "Features as keys and values of every layer (kv, the default), as input sequence of the first, or "
            "no features.",
            "choices": (*CONDITIONING, "none"),
        },
    )
    drafting: str | None = field(
        default=None,
        metadata={
            "help": "A block in one forward (parallel, the default), or token by token.",
            "choices": DRAFTING,
        },
    )


@dataclass
class DFlashTrainingArguments(TrainingArguments):
    """
    `TrainingArguments` with the fields of the DFlash objective, and the defaults of the published recipe.

    Args:
        num_anchors (`int`, *optional*, defaults to 512): blocks drawn from each text at every visit, or as many as it
            can hold.
        anchors (`str`, *optional*, defaults to `"random"`): or `"grid"`, every block_size-th place (an ablation).
        loss (`str`, *optional*, defaults to `"ce"`): cross-entropy with the data's tokens; `"kl"`, `"tv"`: Kullback-
            Leibler divergence from, or total variation to, the target's own distribution.
        loss_weights (`str`, *optional*, defaults to `"decay"`): `"decay"`, `"uniform"` or `"d-pace"` over the slots.
        loss_decay (`float`, *optional*): γ_w of `exp(-(j - 1) / γ_w)`; default 4, 5, 7 for blocks of 8, 10, 16 (paper,
            section 4.2), in between `block_size / 2`.
        loss_base (`float`, *optional*): the same weights as powers g^(j - 1), instead of `loss_decay`.
        pace_floor (`float`, *optional*, defaults to 0.5): α of D-PACE.
        logits_chunk_size (`int`, *optional*, defaults to 4096): slots whose logits exist at once; it bounds the
            largest tensors of the training.
        muon (`bool`, *optional*, defaults to `False`): Muon for the matrices of the layers, AdamW for the rest.
        ema_decay (`float`, *optional*): keep an average of the weights with this decay, and measure and save that.
        max_length (`int`, *optional*, defaults to 3072): longer rows are cut at the end.
        max_minutes (`float`, *optional*): stop after so many minutes of training, evaluations not counted; the
            learning rate then reaches its end with the clock, however fast the machine is.
        eval_block_size (`int`, *optional*): measure τ with blocks of this size instead of the one that is trained.
        eval_max_new_tokens (`int`, *optional*, defaults to 96): tokens generated for each evaluation prompt.
    """

    num_anchors: int = field(default=512, metadata={"help": "Blocks drawn from each text at every visit."})
    anchors: str = field(default="random", metadata={"help": "How they are placed.", "choices": ANCHORS})
    loss: str = field(
        default="ce", metadata={"help": "Against the data's tokens, or the target's distribution.", "choices": LOSSES}
    )
    loss_weights: str = field(default="decay", metadata={"help": "Weights of the slots.", "choices": WEIGHTS})
    loss_decay: float | None = field(
        default=None, metadata={"help": "γ_w of exp(-(j - 1) / γ_w); default by the block size."}
    )
    loss_base: float | None = field(default=None, metadata={"help": "g of g^(j - 1), instead of loss_decay."})
    pace_floor: float = field(default=0.5, metadata={"help": "α of D-PACE, between 0 and 1."})
    logits_chunk_size: int = field(default=4096, metadata={"help": "Slots whose logits exist at once."})
    muon: bool = field(default=False, metadata={"help": "Muon for the matrices of the layers, AdamW for the rest."})
    ema_decay: float | None = field(
        default=None, metadata={"help": "Decay of an average of the weights, which is then measured and saved."}
    )
    max_length: int = field(default=3072, metadata={"help": "Longer rows are cut at the end."})
    max_minutes: float | None = field(
        default=None, metadata={"help": "Stop after so many minutes; the learning rate then follows the clock."}
    )
    eval_block_size: int | None = field(
        default=None, metadata={"help": "Measure τ with blocks of this size, whatever the size that is trained."}
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
    logging_nan_inf_filter: bool = field(
        default=False, metadata={"help": "Off: a loss that is not finite stops the training and names its row."}
    )
    remove_unused_columns: bool = field(default=False, metadata={"help": "Keep the columns of the dataset."})
    report_to: str | None = field(default="none", metadata={"help": "Trackers, as in TrainingArguments."})

    def __post_init__(self):
        # Without an accelerator there is nothing but the CPU; Trainer wants to be told before it allows bf16 there.
        self.use_cpu = self.use_cpu or not torch.accelerator.is_available()
        super().__post_init__()
        rules = [
            ("num_anchors", self.num_anchors >= 1, "at least 1"),
            ("anchors", self.anchors in ANCHORS, f"one of {ANCHORS}"),
            ("loss", self.loss in LOSSES, f"one of {LOSSES}"),
            ("loss_weights", self.loss_weights in WEIGHTS, f"one of {WEIGHTS}"),
            ("loss_decay", self.loss_decay is None or self.loss_decay > 0, "above 0"),
            ("loss_base", self.loss_base is None or 0 < self.loss_base < 1, "between 0 and 1"),
            (
                "loss_base",
                self.loss_base is None or (self.loss_decay is None and self.loss_weights == "decay"),
                "another way to write loss_decay: give one of them, with loss_weights='decay'",
            ),
            (
                "loss_decay",
                self.loss_decay is None or self.loss_weights == "decay",
                f"of no effect with loss_weights={self.loss_weights!r}; leave one of them out",
            ),
            ("pace_floor", 0 < self.pace_floor < 1, "between 0 and 1"),
            (
                "pace_floor",
                self.pace_floor == 0.5 or self.loss_weights == "d-pace",
                "of no effect without loss_weights='d-pace'",
            ),
            ("logits_chunk_size", self.logits_chunk_size >= 1, "at least 1"),
            ("ema_decay", self.ema_decay is None or 0 < self.ema_decay < 1, "between 0 and 1"),
            ("max_length", self.max_length >= 2, "at least 2, the anchor and a token to predict"),
            ("eval_block_size", self.eval_block_size is None or self.eval_block_size >= 2, "at least 2"),
            ("max_minutes", self.max_minutes is None or self.max_minutes > 0, "above 0"),
        ]
        for name, holds, rule in rules:
            if not holds:
                raise ValueError(f"{name}={getattr(self, name)!r}: {rule}.")

    def decay_for(self, num_predicted: int) -> float:
        """γ_w of the weights of `num_predicted` slots."""
        if self.loss_weights == "uniform":
            return math.inf
        if self.loss_base is not None:
            return -1 / math.log(self.loss_base)
        return self.loss_decay or _DECAY.get(num_predicted, (num_predicted + 1) / 2)


_DECAY = {7: 4.0, 9: 5.0, 15: 7.0}  # paper, section 4.2: blocks of 8, 10, 16 with fill-in labels


def check_run(args: DFlashTrainingArguments, eval_rows, eval_prompts: Sequence) -> None:
    """Refuse by name the settings of `Trainer` that this trainer does not honour."""
    if args.eval_strategy != "no" and not eval_rows and not eval_prompts:
        raise ValueError(
            f"eval_strategy={args.eval_strategy.value!r} needs something to measure on: give num_eval_rows or "
            "eval_prompts."
        )
    ignored = {
        "push_to_hub": "push the folder `drafter` when the training is over",
        "label_smoothing_factor": "the losses are those of `loss`",
        "bf16_full_eval": "the drafter is measured as it is saved, in the target's dtype",
        "fp16_full_eval": "the drafter is measured as it is saved, in the target's dtype",
    }
    for name, reason in ignored.items():
        if getattr(args, name):
            raise ValueError(f"{name}={getattr(args, name)!r} has no effect here: {reason}. Leave it out.")
    if args.load_best_model_at_end or args.save_strategy == "best":
        raise ValueError(
            "load_best_model_at_end and save_strategy='best' are not supported: the drafter with the best τ is kept "
            "in `best` anyway."
        )
    if args.max_minutes and args.lr_scheduler_type != "cosine":
        raise ValueError(
            f"lr_scheduler_type={args.lr_scheduler_type.value!r}: with max_minutes the learning rate follows a cosine "
            "over the clock; leave one of the two out."
        )
    if args.max_minutes and args.warmup_steps >= 1:
        raise ValueError(
            f"warmup_steps={args.warmup_steps}: with max_minutes nobody knows the number of steps; give a share of "
            "the training, 0.04 for example."
        )
    if args.n_gpu > 1:
        raise ValueError(f"{args.n_gpu} GPUs in one process: start one process for one GPU (CUDA_VISIBLE_DEVICES=0).")


def check_sharding(args: DFlashTrainingArguments, *, sharded: bool, deepspeed: bool) -> None:
    """Refuse what needs whole weights where they are not."""
    if args.muon and deepspeed:
        raise ValueError(
            "muon=True: DeepSpeed flattens the matrices that Muon needs whole; use DDP or FSDP 2, or leave muon out."
        )
    if args.ema_decay and sharded:
        raise ValueError(
            f"ema_decay={args.ema_decay}: the average needs whole weights in every process; use DDP, or leave "
            "ema_decay out."
        )
