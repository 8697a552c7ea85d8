"""`DFlashTrainer`: `transformers.Trainer` with the DFlash objective over features of a frozen target."""

import math
import os
import shutil
import time
from collections import defaultdict
from pathlib import Path

import torch
from transformers import Trainer, TrainerCallback
from transformers.utils import logging

from .. import masking, objective
from ..modeling_dflash import DFlashDraftModel
from ..proposal import ProposalHead
from ..target import Target, concatenate
from .arguments import DFlashTrainingArguments


logger = logging.get_logger(__name__)

_DECAY = {8: 4.0, 10: 5.0, 16: 7.0}  # paper, section 4.2


class TimeBudget(TrainerCallback):
    """Stops the training after some minutes of it, those before a resume included (they are in the log)."""

    def __init__(self, minutes: float):
        self.minutes = minutes
        self._spent = 0.0
        self._start = time.monotonic()

    def elapsed(self) -> float:
        """Minutes of training so far."""
        return self._spent + (time.monotonic() - self._start) / 60

    def progress(self) -> float:
        """Share of the budget that is used."""
        return self.elapsed() / self.minutes

    def on_train_begin(self, args, state, control, **kwargs):
        self._start = time.monotonic()
        self._spent = next((entry["minutes"] for entry in reversed(state.log_history) if "minutes" in entry), 0.0)

    def on_step_end(self, args, state, control, **kwargs):
        if self.progress() >= 1.0:
            control.should_training_stop = True


class DFlashTrainer(Trainer):
    """
    Trains a drafter against a frozen target.

    Args:
        model (`DFlashDraftModel`): the drafter.
        target (`Target`): the frozen target; it stays outside what Accelerate wraps.
        eval_prompts (`list[torch.Tensor]`, *optional*): prompt ids `(1, T)`; at each evaluation the real decoding
            loop runs on them.
        kwargs: as for `transformers.Trainer`; rows as of [`ConversationDataset`], batches as of [`collate`].
    """

    def __init__(
        self,
        model: DFlashDraftModel,
        args: DFlashTrainingArguments,
        *,
        target: Target,
        eval_prompts: list[torch.Tensor] | None = None,
        **kwargs,
    ):
        target.check_pair(model)
        _check_arguments(args, eval_prompts)
        super().__init__(model, args, **kwargs)
        self.budget = TimeBudget(args.max_minutes) if args.max_minutes else None
        if self.budget:
            self.add_callback(self.budget)
        self.target = target
        self.eval_prompts = eval_prompts
        target.model.requires_grad_(False).eval().to(args.device)
        config = model.config
        decay = args.loss_decay or _DECAY.get(config.block_size, config.block_size / 2)
        self.slot_weights = objective.slot_weights(config.block_size, decay, args.device)
        # Drafter id of each target id, or IGNORE for a token that the drafter cannot propose.
        self.draft_ids = torch.arange(target.vocab_size, device=args.device)
        if model.draft_token_ids is not None:
            shortlist = model.draft_token_ids.to(args.device)
            self.draft_ids = torch.full_like(self.draft_ids, objective.IGNORE)
            self.draft_ids[shortlist] = torch.arange(len(shortlist), device=args.device)
        self.head = ProposalHead(model, target)
        self._progress: dict[str, list[torch.Tensor]] = defaultdict(list)
        self.model_accepts_loss_kwargs = False

    @torch.no_grad()
    def context_hidden_states(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Tapped hidden states of the frozen target, `(B, S, M * H)`."""
        layer_ids = self.model.config.target_layer_ids
        with self.target.capture(layer_ids) as taps, torch.autocast(input_ids.device.type, enabled=False):
            self.target.decoder(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
        return concatenate(taps, layer_ids)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        input_ids, supervised = inputs["input_ids"], inputs["supervised"]
        config = self.model.config
        anchors, keep = objective.sample_anchors(supervised, self.args.num_anchors)
        labels = objective.block_labels(input_ids, supervised, anchors, keep, config.block_size)
        labels = torch.where(labels == objective.IGNORE, labels, self.draft_ids[labels.clamp(min=0)])

        hidden = self.draft(model, input_ids, inputs["attention_mask"], anchors)  # [B, N, K, H]
        logits = self.head.logits(hidden[:, :, 1:])  # [B, N, G, V]
        loss = objective.weighted_cross_entropy(logits, labels, self.slot_weights)
        self._record(logits.detach(), labels)
        return (loss, logits) if return_outputs else loss

    def draft(
        self, model, input_ids: torch.Tensor, attention_mask: torch.Tensor, anchors: torch.Tensor
    ) -> torch.Tensor:
        """
        Hidden states of the blocks at `anchors` `(B, N)`: what inference drafts at each of them, `(B, N, K, H)`.
        """
        config = self.model.config
        batch, length = input_ids.shape
        num_blocks, block_size = anchors.shape[1], config.block_size
        masks = {
            (window, causal): masking.training_mask(
                anchors, block_size, attention_mask.bool(), window=window, causal=causal
            )
            for window, causal in self.model.layer_kinds()
        }
        block_ids = torch.full((batch, num_blocks, block_size), config.mask_token_id, device=input_ids.device)
        block_ids[..., 0] = input_ids.gather(1, anchors)
        slots = anchors.unsqueeze(-1) + torch.arange(block_size, device=anchors.device)  # [B, N, K]
        context = torch.arange(length, device=anchors.device).expand(batch, length)
        output = model(
            noise_embeds=self.target.embed(block_ids.flatten(1)).to(self.model.dtype),
            context_hidden_states=self.context_hidden_states(input_ids, attention_mask).to(self.model.dtype),
            position_ids=torch.cat([context, slots.flatten(1)], dim=1),
            attention_mask=masks,
        )
        return output.last_hidden_state.unflatten(1, (num_blocks, block_size))

    def _record(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        """Keep what the next log line averages: accuracy of the slots and the right prefix of full blocks."""
        hits, leading = objective.slot_hits(logits, labels)
        labelled = labels != objective.IGNORE
        self._progress["accuracy"].append(torch.stack([(hits & labelled).sum(), labelled.sum()]))
        full = labelled.all(-1)
        self._progress["accepted"].append(torch.stack([(leading * full).sum(), full.sum()]))

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add slot accuracy and the mean right prefix (both on training rows) to each log line of the training."""
        if "loss" in logs and self._progress:
            for name, sums in self._progress.items():
                right, count = torch.stack(sums).sum(0).tolist()
                logs[name] = round(right / max(count, 1), 4)
            self._progress.clear()
            if self.budget:
                logs["minutes"] = round(self.budget.elapsed(), 3)
        super().log(logs, start_time)

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix: str = "eval") -> dict[str, float]:
        """Measure τ on the evaluation prompts by the real decoding loop, greedily."""
        from ..integration import custom_generate

        drafter = self.accelerator.unwrap_model(self.model)
        drafter.eval()
        committed = rounds = 0
        for prompt in self.eval_prompts:
            self.target.model.generate(
                prompt.to(self.args.device),
                attention_mask=torch.ones_like(prompt).to(self.args.device),
                custom_generate=custom_generate(drafter),
                max_new_tokens=self.args.eval_max_new_tokens,
                do_sample=False,
            )
            statistics = drafter.last_statistics
            committed += statistics.committed
            rounds += len(statistics.rounds)
        metrics = {f"{metric_key_prefix}_tau": round(committed / max(rounds, 1), 4)}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        drafter.train()
        return metrics

    def create_scheduler(self, num_training_steps: int, optimizer=None):
        """With `max_minutes`, the learning rate follows a cosine over whichever is further: the steps or the clock."""
        if self.budget is None or self.lr_scheduler is not None:
            return super().create_scheduler(num_training_steps, optimizer)
        warmup = min(0.5, self.args.get_warmup_steps(num_training_steps) / num_training_steps)

        def factor(step: int) -> float:
            progress = min(1.0, max(step / num_training_steps, self.budget.progress()))
            if progress < warmup:
                return (progress + 1e-3) / (warmup + 1e-3)
            return 0.5 * (1.0 + math.cos(math.pi * (progress - warmup) / (1.0 - warmup)))

        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer or self.optimizer, factor)
        self._created_lr_scheduler = True
        return self.lr_scheduler

    def _save_checkpoint(self, model, trial) -> None:
        """Write the checkpoint under a name that resuming does not look for, then rename it."""
        root = Path(self.args.output_dir)
        name = f"checkpoint-{self.state.global_step}"
        staging = root / ".writing"
        self.args.output_dir = str(staging)
        try:
            shutil.rmtree(staging, ignore_errors=True)
            super()._save_checkpoint(model, trial)
        finally:
            self.args.output_dir = str(root)
        shutil.rmtree(root / name, ignore_errors=True)
        os.replace(staging / name, root / name)
        shutil.rmtree(staging, ignore_errors=True)
        limit = self.args.save_total_limit
        if limit:
            for old in sorted(root.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))[:-limit]:
                shutil.rmtree(old)


def _check_arguments(args: DFlashTrainingArguments, eval_prompts: list | None) -> None:
    """Refuse by name the settings of `Trainer` that this trainer does not honour."""
    if args.eval_strategy != "no" and not eval_prompts:
        raise ValueError(f"eval_strategy={args.eval_strategy.value!r} needs prompts to measure on: give eval_prompts.")
    if args.load_best_model_at_end or args.save_strategy == "best":
        raise ValueError(
            "load_best_model_at_end and save_strategy='best' are not supported; the last drafter is saved."
        )
    if args.max_minutes and args.lr_scheduler_type != "cosine":
        raise ValueError(
            f"lr_scheduler_type={args.lr_scheduler_type.value!r}: with max_minutes the learning rate follows a cosine "
            "over the clock; leave one of the two out."
        )
    if args.n_gpu > 1:
        raise ValueError(f"{args.n_gpu} GPUs in one process: start one process for one GPU (CUDA_VISIBLE_DEVICES=0).")
