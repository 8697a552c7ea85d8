"""What a drafter is optimised with beyond AdamW: Muon, an average of the weights, and a stop at the first NaN."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn
from transformers import TrainerCallback


AVERAGE_FILE = "ema.safetensors"


# -------------------------------------------------------------------------------------------------------------- Muon
class MuonWithAdamW(torch.optim.Optimizer):
    """
    Muon for one group of parameters and AdamW for the others, as one optimizer.

    The groups and the state of the two are this optimizer's own, so that schedules, state dicts and Accelerate, which
    look only at `param_groups` and `state`, reach both.

    Args:
        muon (`torch.optim.Muon`): with one group.
        adamw (`torch.optim.AdamW`): with any number of groups.
    """

    def __init__(self, muon: torch.optim.Muon, adamw: torch.optim.AdamW):
        super().__init__([*muon.param_groups, *adamw.param_groups], {})
        self._muon, self._adamw = muon, adamw

    def step(self, closure=None):
        """One step of both; `closure` is evaluated once, before them."""
        # Handed over at every step, because `load_state_dict` puts new lists and dicts in place of the old ones.
        self._muon.param_groups, self._adamw.param_groups = self.param_groups[:1], self.param_groups[1:]
        self._muon.state = self._adamw.state = self.state
        loss = self._muon.step(closure)
        self._adamw.step()
        return loss


def muon_with_adamw(
    model: nn.Module,
    lr: float,
    *,
    weight_decay: float = 0.0,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
) -> MuonWithAdamW:
    """
    Muon for the matrices of `model.layers`, AdamW for the rest: norms, biases and `fc`.

    Muon is made for matrices between hidden states. `fc` reads the taps of the target, whose sizes differ by orders
    of magnitude, and is left to AdamW as input layers are (Jordan, "Muon: an optimizer for hidden layers").

    One learning rate serves both: the update of an `(A, B)` matrix is scaled by `0.2 * sqrt(max(A, B))`, which gives
    it the size of an AdamW update (`adjust_lr_fn="match_rms_adamw"`; Liu et al., "Muon is scalable for LLM training").
    A learning rate found for AdamW can be kept. For matrices of 2048 to 4096 the factor is 9 to 13, which is the usual
    "ten times AdamW's learning rate" of Muon without this scaling.

    Muon needs whole matrices. With DDP every process has them and computes the same update. With FSDP 2 they are
    gathered by `DTensor` for the update. FSDP 1 and ZeRO 3 leave vectors, which is refused here. ZeRO 1 and 2 flatten
    the parameters only after this function, so who builds the optimizer for DeepSpeed must refuse it.

    Args:
        model (`nn.Module`): the drafter; parameters without gradient are left out.
        lr (`float`): learning rate of all groups.
        weight_decay (`float`, *optional*, defaults to 0): decoupled, of everything but norms and biases.
        betas (`tuple[float, float]`, *optional*), eps (`float`, *optional*): AdamW's. Muon's momentum stays at 0.95.

    Returns:
        `MuonWithAdamW`: groups in the order Muon, AdamW with weight decay, AdamW without.

    Raises:
        `ValueError`: when no layer has a matrix.
    """
    matrices = [p for p in model.layers.parameters() if p.requires_grad and p.dim() == 2]
    if not matrices:
        raise ValueError(
            "Muon needs whole matrices, but no trainable parameter in `layers` is 2-D: FSDP 1 and DeepSpeed flatten "
            "them. Use DDP or FSDP 2, or the AdamW optimizer."
        )
    ours = set(matrices)
    others = [p for p in model.parameters() if p.requires_grad and p not in ours]
    muon = torch.optim.Muon(matrices, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
    groups = [
        {"params": [p for p in others if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in others if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return MuonWithAdamW(muon, torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps))


# ------------------------------------------------------------------------------------------------ average of weights
class WeightAverage(TrainerCallback):
    """
    Exponential moving average of the trainable weights, in float32, updated after each optimizer step.

    `average = d * average + (1 - d) * weight` with `d = min(decay, (1 + t) / (10 + t))` for t = 0, 1, ... updates, so
    that the first steps do not weigh on it. It starts as the initial weights. Buffers are not averaged.

    The parameters must be whole in every process: with FSDP or DeepSpeed the trainer must refuse it.

    Args:
        model (`nn.Module`): the drafter, not wrapped, on the device where it trains.
        decay (`float`): between 0 and 1, both excluded; 0.999 is usual.

    Raises:
        `ValueError`: for any other decay.
    """

    def __init__(self, model: nn.Module, decay: float):
        if not 0.0 < decay < 1.0:
            raise ValueError(f"ema_decay={decay}: between 0 and 1, both excluded; leave it out for no average.")
        self.decay = decay
        self.updates = 0
        self._weights = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
        self.averages = {name: w.to(torch.float32, copy=True) for name, w in self._weights.items()}

    def on_optimizer_step(self, args, state, control, **kwargs):
        self.update()

    def update(self) -> None:
        """Take the weights as they are now into the average."""
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        current = [weight.float() for weight in self._weights.values()]
        get_ema_multi_avg_fn(decay)(list(self.averages.values()), current, self.updates)
        self.updates += 1

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, the model has the averaged weights; afterwards, also after an exception, its own again."""
        own = {name: weight.clone() for name, weight in self._weights.items()}
        try:
            self._put(self.averages)
            yield
        finally:
            self._put(own)

    def _put(self, weights: dict[str, torch.Tensor]) -> None:
        for name, weight in weights.items():
            self._weights[name].copy_(weight)

    def save(self, folder: str | Path) -> None:
        """Write `ema.safetensors` into a checkpoint folder; one process calls it."""
        path = Path(folder, AVERAGE_FILE)
        partial = path.with_name(AVERAGE_FILE + ".partial")
        save_file(self.averages, partial, {"format": "pt", "updates": str(self.updates)})
        os.replace(partial, path)

    def load(self, folder: str | Path) -> None:
        """
        Go on with the average that a checkpoint folder holds.

        Raises:
            `ValueError`: when it holds none, or the average of another model; the message names the first difference.
        """
        path = Path(folder, AVERAGE_FILE)
        if not path.is_file():
            raise ValueError(
                f"ema_decay={self.decay}: {folder} holds no {AVERAGE_FILE}, its run kept no average of the weights. "
                "Resume without ema_decay, or start a new output_dir."
            )
        with safe_open(path, framework="pt") as file:
            updates = int(file.metadata()["updates"])
            found = {name: file.get_tensor(name) for name in file.keys()}
        for name in sorted(set(found) | set(self.averages)):
            theirs, ours = (list(d[name].shape) if name in d else "missing" for d in (found, self.averages))
            if theirs != ours:
                raise ValueError(
                    f"{path}: {name} is {theirs}, in the model it is {ours}. Resume with the arguments of the first "
                    "run, or start a new output_dir."
                )
        for name, average in found.items():
            self.averages[name].copy_(average)
        self.updates = updates


# ---------------------------------------------------------------------------------------------------------- NaN stops
class FiniteGuard(TrainerCallback):
    """
    Stops the training at the first loss or gradient that is not finite, before the optimizer takes a step from it.

    It waits for the device once per step, where `Trainer` itself would with `logging_nan_inf_filter=True`; set that to
    False.

    Args:
        lines (`Sequence[int]`): line number in the data file of each document, `ConversationDataset.lines`.

    Raises:
        `FloatingPointError`: in the training; it names the step and the lines of the row. Gradients are not looked at
            when a gradient scaler (fp16) is at work, which skips such steps itself.
    """

    def __init__(self, lines: Sequence[int]):
        self.lines = lines
        self._rows: list[tuple[torch.Tensor, torch.Tensor]] = []

    def watch(self, losses: torch.Tensor, document: torch.Tensor) -> None:
        """
        Note the losses of a batch for the check before the next optimizer step; does not wait for the device.

        Args:
            losses (`torch.Tensor` of shape `(B,)`): one for each row.
            document (`torch.Tensor` of shape `(B, S)`, int64): index of the text of each token, -1 for padding.
        """
        self._rows.append((losses.detach(), document))

    def on_pre_optimizer_step(self, args, state, control, *, model, optimizer, **kwargs):
        rows, self._rows = self._rows, []
        step = state.global_step + 1
        losses = torch.cat([losses for losses, _ in rows])
        if not losses.isfinite().all():
            raise FloatingPointError(f"step {step}: {self._first_bad_row(rows)} {_ADVICE}")
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        # Every process comes here with the same gradient, so that all of them stop, not only the one with the row.
        if optimizer.scaler is None and not torch.nn.utils.get_total_norm(gradients).isfinite():
            batch = "; ".join(self._lines_of(row) for _, document in rows for row in document)
            raise FloatingPointError(
                f"step {step}: the gradient is not finite, but the losses of this process are, on {batch}. {_ADVICE}"
            )

    def _first_bad_row(self, rows: list[tuple[torch.Tensor, torch.Tensor]]) -> str:
        losses = torch.cat([losses for losses, _ in rows])
        documents = [row for _, document in rows for row in document]
        bad = (~losses.isfinite()).nonzero().flatten().tolist()
        where = self._lines_of(documents[bad[0]])
        return f"the loss is {losses[bad[0]].item()} on {where} ({len(bad)} of {len(losses)} rows are not finite)."

    def _lines_of(self, document: torch.Tensor) -> str:
        """The lines of the texts in one row, `document` `(S,)`."""
        lines = [str(self.lines[i]) for i in document.unique().tolist() if i >= 0]
        return f"line {lines[0]}" if len(lines) == 1 else f"lines {', '.join(lines)} (packed into one row)"


_ADVICE = (
    "The weights are those before this step. Look at the text there; if nothing is wrong with it, lower learning_rate "
    "or train in a wider dtype."
)
