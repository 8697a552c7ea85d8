"""`DFlashTrainer`: `transformers.Trainer` with the DFlash objective over features of a frozen target."""

import math
import shutil
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
from accelerate.utils import broadcast_object_list
from torch.utils.data import Dataset, Sampler
from transformers import Trainer
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from transformers.utils import is_matplotlib_available, logging

from .. import masking, objective, pairing
from ..configuration_dflash import DFlashConfig
from ..modeling_dflash import DFlashDraftModel
from ..proposal import ProposalHead, embed
from ..target import Target
from .arguments import DFlashTrainingArguments, check_run, check_sharding
from .data import EpochSampler, collate, positions
from .features import FeatureStore, target_states
from .measure import Counts, decode_all
from .optimisation import FiniteGuard, WeightAverage, muon_with_adamw
from .plots import plot_curves
from .progress import RichProgress, StepClock, TimeBudget, peak_memory_gb
from .saving import replace_folder, save_drafter


logger = logging.get_logger(__name__)

_EVALUATION = -1  # the "step" of the anchors that are measured on: always the same ones


def check_trainable(config: DFlashConfig) -> None:
    """Raise `ValueError` for a drafter with parts that are used here, and are not trained here."""
    parts = {
        "proposal_head": config.is_sequential,
        "confidence_head": config.confidence_head is not None,
        "conv_kernel_size": config.conv_kernel_size is not None,
        "own_embeddings": config.own_embeddings,
        "own_head": config.own_head,
    }
    for name, there in parts.items():
        if there:
            raise ValueError(
                f"{name}={getattr(config, name)!r}: drafters with this part are used here, but not trained here; "
                "train them where they come from."
            )


class DFlashTrainer(Trainer):
    """
    Trains a drafter against a frozen target.

    The step, in the order of the methods below: draw anchors and labels, get the features of the rows, draft a block
    at every anchor, score the slots with the target's head.

    Args:
        model (`DFlashDraftModel`): the drafter.
        target (`Target`): the frozen target; it stays outside what Accelerate wraps, whole on every process.
        lines (`Sequence[int]`): line number of each document in the data file, for messages.
        features (`FeatureStore`, *optional*): where the features of each text are kept once they were computed.
        eval_dataset (`Dataset`, *optional*): rows to measure accuracy on at each evaluation.
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
        lines: Sequence[int],
        features: FeatureStore | None = None,
        eval_dataset: Dataset | None = None,
        eval_prompts: Sequence[torch.Tensor] = (),
        **kwargs,
    ):
        pairing.check(target, model)
        check_trainable(model.config)
        check_run(args, eval_dataset, eval_prompts)
        # Trainer evaluates only if it is given a data set; ours may measure on prompts alone.
        super().__init__(model, args, data_collator=collate, eval_dataset=eval_dataset or [], **kwargs)
        check_sharding(
            args, sharded=self.is_fsdp_enabled or self.is_deepspeed_enabled, deepspeed=self.is_deepspeed_enabled
        )
        self.target, self.features = target, features
        self.eval_rows, self.eval_prompts = eval_dataset, eval_prompts
        target.model.requires_grad_(False).eval().to(args.device)
        self.head = ProposalHead(model, target)
        num_predicted = model.config.num_proposals
        # With D-PACE these are only the scale of the loss; see `block_losses`.
        self.slot_weights = objective.decay_weights(num_predicted, args.decay_for(num_predicted), args.device)
        # Drafter id of each target id, or IGNORE for a token that the drafter cannot propose.
        self.draft_ids = torch.arange(target.vocab_size, device=args.device)
        if model.draft_token_ids is not None:
            shortlist = model.draft_token_ids.to(args.device)
            self.draft_ids = torch.full_like(self.draft_ids, objective.IGNORE)
            self.draft_ids[shortlist] = torch.arange(len(shortlist), device=args.device)

        self.clock = StepClock(args.device)
        self.budget = TimeBudget(args.max_minutes, self._from_first_process) if args.max_minutes else None
        self.average = WeightAverage(model, args.ema_decay) if args.ema_decay else None
        self.guard = FiniteGuard(lines)
        for callback in (self.clock, self.guard, self.budget, self.average):
            if callback:
                self.add_callback(callback)
        self.progress = None
        if not args.disable_tqdm:
            self.remove_callback(ProgressCallback)
            self.remove_callback(PrinterCallback)
            self.progress = RichProgress(self.budget)
            self.add_callback(self.progress)
        self._counts = Counts(num_predicted, args.device)
        # `compute_loss` divides by the weight of all slots of the step, over accumulated batches and processes.
        self.model_accepts_loss_kwargs = self.loss_is_scaled_for_ga = True
        self._say_what_is_large()

    def _get_train_sampler(self, train_dataset=None) -> Sampler:
        """
        The sampler of `train_sampling_strategy`, in an order that depends on seed and epoch alone.

        Transformers draws the order by length from the global generator: a run that is resumed inside an epoch would
        go on in the order of another epoch, and train some rows twice and others not at all.
        """
        sampler = super()._get_train_sampler(train_dataset)
        if self.args.train_sampling_strategy == "batch_rebalance":  # has an order for each epoch itself
            return sampler
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        return EpochSampler(sampler, seed, lambda: int(self.state.epoch or 0))

    def train(self, *args, **kwargs):
        """As `transformers.Trainer.train`."""
        try:
            return super().train(*args, **kwargs)
        finally:
            if self.progress:
                self.progress.close()

    # ------------------------------------------------------------------------------------------------------ the step
    def get_batch_samples(self, epoch_iterator, num_batches, device):
        """The batches of one step with their blocks, and the weight of all slots in them, over all processes."""
        batches = [batch for _, batch in zip(range(num_batches), epoch_iterator, strict=False)]
        for batch in batches:
            self.add_blocks(batch, self.state.global_step)
        weight = sum((batch["weight"] for batch in batches), torch.zeros((), device=device))
        return batches, self.accelerator.reduce(weight, reduction="sum")

    def add_blocks(self, batch: dict[str, torch.Tensor], step: int) -> None:
        """Draw the blocks of a batch: adds `anchors` `(B, N)`, `labels` `(B, N, G)` and the slots' total `weight`."""
        supervised, document = batch["supervised"], batch["document"]
        anchors, keep = objective.draw_anchors(
            supervised,
            document,
            self.args.num_anchors,
            seed=self.args.seed,
            step=step,
            grid=self.model.config.block_size if self.args.anchors == "grid" else None,
        )
        num_predicted = self.model.config.num_proposals
        labels = objective.block_labels(batch["input_ids"], supervised, document, anchors, keep, num_predicted)
        batch |= {"anchors": anchors, "labels": labels}
        batch["weight"] = ((labels != objective.IGNORE) * self.slot_weights).sum()

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """
        The loss of a batch: the weighted sum over its slots, divided by the weight of all slots of the step.

        So neither the batch that a text is in, nor gradient accumulation, nor the number of processes changes what a
        text contributes. With D-PACE the divisor is that of the decay: its own weights change with the drafter.
        """
        _, losses = self.losses(model, inputs)
        self.guard.watch(losses.sum(1), inputs["document"])
        # DDP averages the gradients.
        return losses.sum() / num_items_in_batch.clamp(min=1e-6) * self.accelerator.num_processes

    def losses(self, model, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states of the blocks, `(B, N, K, H)`, and the loss of each, `(B, N)`, not divided by anything."""
        self.clock.start()
        states = self.target_states(batch["input_ids"], batch["document"])
        self.clock.end("target")
        hidden = self.draft(model, batch["input_ids"], batch["document"], batch["anchors"], states)
        self.clock.end("drafter")
        losses = self.block_losses(hidden, batch["labels"], batch["anchors"], states)
        self.clock.end("loss")
        self.clock.tokens += (batch["document"] >= 0).sum()
        return hidden, losses

    def target_states(self, input_ids: torch.Tensor, document: torch.Tensor) -> torch.Tensor:
        """What [`features.target_states`] gives for the rows, `(B, S, width)`, or the store has kept of it."""
        texts = [i for i in document.unique().tolist() if i >= 0] if self.features else []
        if self.features and all(map(self.features.has, texts)):
            states = torch.zeros(*document.shape, self.features.manifest.width, dtype=self.features.dtype)
            for i in texts:
                states[(document == i).cpu()] = self.features.read(i)
            return states.to(self.args.device)
        layer_ids = self.model.config.target_layer_ids
        states = target_states(self.target, layer_ids, input_ids, document, soft_labels=self.args.loss != "ce")
        if self.features:
            for i in texts:
                self.features.write(i, states[document == i])
        return states

    def draft(
        self, model, input_ids: torch.Tensor, document: torch.Tensor, anchors: torch.Tensor, states: torch.Tensor
    ) -> torch.Tensor:
        """
        Hidden states of the blocks at `anchors` `(B, N)`: what inference drafts at each of them, `(B, N, K, H)`.
        """
        config = self.model.config
        offsets = torch.arange(config.block_size, device=anchors.device)
        slots = anchors.unsqueeze(-1) + offsets  # [B, N, K]
        if config.drafting == "autoregressive":  # slots hold what was drafted before, which in training is the text
            block_ids = input_ids.gather(1, slots.clamp(max=input_ids.shape[1] - 1).flatten(1)).view_as(slots)
        else:
            block_ids = torch.where(offsets == 0, input_ids.gather(1, anchors).unsqueeze(-1), config.mask_token_id)
        place = positions(document)
        masks = {
            (window, causal): masking.training_mask(
                anchors,
                config.block_size,
                document >= 0,
                document=document,
                window=window,
                causal=causal,
                context_queries=config.conditioning == "input",
                implementation=config._attn_implementation,
            )
            for window, causal in self.model.layer_kinds()
        }
        dtype = next(model.parameters()).dtype
        output = model(
            noise_embeds=embed(self.model, self.target, block_ids.flatten(1)).to(dtype),
            context_hidden_states=states[..., : self.model.fc.in_features].to(dtype),
            position_ids=torch.cat([place, (place.gather(1, anchors).unsqueeze(-1) + offsets).flatten(1)], dim=1),
            attention_mask=masks,
        )
        return output.last_hidden_state.unflatten(1, slots.shape[1:])

    def block_losses(
        self, hidden: torch.Tensor, labels: torch.Tensor, anchors: torch.Tensor, states: torch.Tensor
    ) -> torch.Tensor:
        """The weighted loss of each block, `(B, N)`; counts what the slots got right on the way."""
        num_predicted = labels.shape[-1]
        flat_hidden = hidden[:, :, -num_predicted:].flatten(0, 1)  # [B * N, G, H]
        flat_labels = labels.flatten(0, 1)
        last = states[..., self.model.fc.in_features :]  # empty for cross-entropy
        soft = self._where_predicted(last, anchors, num_predicted) if self.args.loss != "ce" else None

        def loss_of(part: torch.Tensor, blocks: slice) -> torch.Tensor:
            said = flat_labels[blocks]
            labelled = said != objective.IGNORE
            wanted = torch.where(labelled, self.draft_ids[said.clamp(min=0)], objective.IGNORE)
            logits = self.head.logits(part)  # [chunk, G, V]
            self._counts.add(logits.detach(), wanted, labelled)
            if soft is None:
                loss = entropy = objective.cross_entropy(logits, wanted)
            else:
                divergence = objective.kl_divergence if self.args.loss == "kl" else objective.total_variation
                loss = divergence(logits, self.head.logits(soft[blocks]).detach()) * labelled
                entropy = objective.cross_entropy(logits, wanted) if self.args.loss_weights == "d-pace" else None
            weights = self.slot_weights
            if self.args.loss_weights == "d-pace":
                # What the shortlist lacks is never right.
                entropy = entropy.masked_fill(labelled & (wanted == objective.IGNORE), math.inf)
                weights = objective.pace_weights(entropy, labelled, self.args.pace_floor)
            return (loss * weights).sum(-1)

        chunk = max(1, self.args.logits_chunk_size // num_predicted)
        return objective.sum_in_chunks(flat_hidden, loss_of, chunk).view(anchors.shape)

    @staticmethod
    def _where_predicted(last: torch.Tensor, anchors: torch.Tensor, num_predicted: int) -> torch.Tensor:
        """The target's last hidden state where it predicts what each slot should say, `(B * N, G, H)`."""
        places = anchors.unsqueeze(-1) + torch.arange(num_predicted, device=anchors.device)  # [B, N, G]
        places = places.clamp(max=last.shape[1] - 1).flatten(1).unsqueeze(-1).expand(-1, -1, last.shape[-1])
        return last.gather(1, places).unflatten(1, (-1, num_predicted)).flatten(0, 1)

    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = super().training_step(model, inputs, num_items_in_batch)
        self.clock.end("backward")
        return loss

    # ------------------------------------------------------------------------------------------------- what it reports
    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add to each log line of the training what its slots got right and where its time went."""
        if "loss" in logs:
            logs |= self._counts.summary(self.accelerator) | self.clock.summary()
            logs["memory_gb"] = peak_memory_gb(self.args.device)
            self._counts.reset()
            self.clock.reset()
            if self.budget:
                logs["minutes"] = round(self.budget.elapsed(), 3)
        super().log(logs, start_time)

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix: str = "eval") -> dict[str, float]:
        """
        Measure the drafter as it is saved: accuracy on the held-out rows, τ on the prompts by the real decoding
        loop, greedily. The processes share rows and prompts; the best drafter by τ so far is kept in `best`.
        """
        start = time.monotonic()
        drafter = self.saved_drafter()
        metrics = self._accuracy(drafter) | self._tau(drafter)
        if metrics.get("tau", 0.0) > self.best_tau and self.args.should_save:
            save_drafter(drafter, self.best_folder)
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in metrics.items()}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        self._draw_curves()
        self.clock.reset()
        if self.budget:
            self.budget.skip(time.monotonic() - start)
        return metrics

    @property
    def best_folder(self) -> Path:
        """Where the drafter with the best τ of the evaluations is."""
        return Path(self.args.output_dir, "best")

    @property
    def best_tau(self) -> float:
        """τ of the drafter in `best_folder`; 0 without one, also in a run that is resumed into another folder."""
        taus = [entry["eval_tau"] for entry in self.state.log_history if "eval_tau" in entry]
        return max(taus, default=0.0) if self.best_folder.exists() else 0.0

    def saved_drafter(self) -> DFlashDraftModel:
        """
        A copy of the drafter as it is saved: with averaged weights if they are kept, in the target's dtype, whole.

        Where the weights are sharded (FSDP, ZeRO 3) every process gets the copy: decoding then needs no collective
        call, and prompts that take different numbers of rounds cannot make one process wait for another. All
        processes must call it together.
        """
        with self.average.applied() if self.average else nullcontext():
            return self._whole_copy().to(self.target.model.dtype).eval()

    def _whole_copy(self) -> DFlashDraftModel:
        """The drafter in the dtype that is trained, on every process, without what Accelerate put around it."""
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            state = [self.accelerator.get_state_dict(self.model_wrapped)]  # complete on the first process
            broadcast_object_list(state)
        else:
            state = [self.accelerator.unwrap_model(self.model).state_dict()]
        with torch.random.fork_rng(devices=[]):  # its first weights are drawn, and thrown away
            drafter = DFlashDraftModel(self.model.config)
        drafter.to(self.args.device).load_state_dict(state[0])
        return drafter

    @torch.no_grad()
    def _accuracy(self, drafter: DFlashDraftModel) -> dict[str, float]:
        """Loss, accuracy of each slot and mean right prefix on the held-out rows, at the same anchors each time."""
        if not self.eval_rows:
            return {}
        training, self._counts = self._counts, Counts(drafter.config.num_proposals, self.args.device)
        sums = torch.zeros(2, device=self.args.device)
        for i in range(self.args.process_index, len(self.eval_rows), self.args.world_size):
            batch = {name: tensor.to(self.args.device) for name, tensor in collate([self.eval_rows[i]]).items()}
            self.add_blocks(batch, _EVALUATION)
            with self.compute_loss_context_manager():
                _, losses = self.losses(drafter, batch)
            sums += torch.stack([losses.sum(), batch["weight"]])
        loss, weight = self.accelerator.reduce(sums, reduction="sum").tolist()
        metrics = {"loss": round(loss / max(weight, 1e-6), 4)} | self._counts.summary(self.accelerator)
        self._counts = training
        return metrics

    def _tau(self, drafter: DFlashDraftModel) -> dict[str, float]:
        """τ over all prompts."""
        if not self.eval_prompts:
            return {}
        numbers = decode_all(
            self.target,
            drafter,
            self.eval_prompts[self.args.process_index :: self.args.world_size],
            max_new_tokens=self.args.eval_max_new_tokens,
            block_size=self.args.eval_block_size,
        )
        sums = torch.tensor([numbers.committed, len(numbers.rounds)], device=self.args.device)
        committed, rounds = self.accelerator.reduce(sums, reduction="sum").tolist()
        return {"tau": round(committed / max(rounds, 1), 4)}

    def _draw_curves(self) -> None:
        if not is_matplotlib_available():
            logger.warning_once("No curves are drawn without matplotlib: pip install 'dflash_hf[train]'.")
            return
        trained = any("loss" in entry for entry in self.state.log_history)
        if trained and self.args.should_save:
            plot_curves(self.state.log_history, Path(self.args.output_dir, "curves.png"))

    def _say_what_is_large(self) -> None:
        words = len(self.model.draft_token_ids) if self.model.draft_token_ids is not None else self.target.num_logits
        slots = self.args.logits_chunk_size
        logger.info(
            "Logits: at most %d slots x %d words at once, in float32 with their gradient %.2f GB: logits_chunk_size "
            "bounds it. The log has the peak of all memory of the process as memory_gb.",
            slots, words, 2 * 4 * slots * words / 1e9,
        )  # fmt: skip

    def _from_first_process(self, value: float) -> float:
        if self.args.world_size == 1:
            return value
        values = [value]
        broadcast_object_list(values)
        return values[0]

    # ----------------------------------------------------------------------------------------------- optimiser, saving
    def create_optimizer(self, *args, **kwargs):
        """Muon with AdamW if it is asked for, else what `TrainingArguments.optim` says."""
        if self.args.muon and self.optimizer is None:
            self.optimizer = muon_with_adamw(
                self.model,
                self.args.learning_rate,
                weight_decay=self.args.weight_decay,
                betas=(self.args.adam_beta1, self.args.adam_beta2),
                eps=self.args.adam_epsilon,
            )
        return super().create_optimizer(*args, **kwargs)

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
        if self.args.should_save:
            shutil.rmtree(staging, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        self.args.output_dir = str(staging)
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self.args.output_dir = str(root)
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:  # shards alone are no drafter
            drafter = self._whole_copy()
            if self.args.should_save:
                drafter.save_pretrained(staging / name)
        if self.average and self.args.should_save:
            self.average.save(staging / name)
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            replace_folder(staging / name, root / name)
            shutil.rmtree(staging, ignore_errors=True)
            limit = self.args.save_total_limit
            if limit:
                for old in sorted(root.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))[:-limit]:
                    shutil.rmtree(old)
        self.accelerator.wait_for_everyone()

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        if self.average:
            self.average.load(resume_from_checkpoint)
