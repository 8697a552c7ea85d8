"""What a training run says and how it spends its time: the clock of a step, the time budget, the progress bar."""

import sys
import time

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import TrainerCallback

from ..metrics import Stopwatch


PHASES = ("target", "drafter", "loss", "backward", "optimiser")


def peak_memory_gb(device: torch.device) -> float:
    """Most memory that this process has held so far, in 10^9 bytes: the accelerator's, or the machine's for a CPU."""
    if device.type != "cpu":
        return round(torch.accelerator.max_memory_allocated(device) / 1e9, 3)
    if sys.platform == "win32":
        import psutil

        return round(psutil.Process().memory_info().peak_wset / 1e9, 3)
    import resource  # not on Windows

    unit = 1 if sys.platform == "darwin" else 1024
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9, 3)


class StepClock(TrainerCallback):
    """
    Where the time of the steps goes: the forward of the target (or reading its features), the drafter's forward, head
    and loss, the backward, the optimiser. The trainer marks the end of each phase.
    """

    def __init__(self, device: torch.device):
        self.watch = Stopwatch(device)
        self.reset()

    def reset(self) -> None:
        """Start to count anew."""
        self._spans: list[tuple] = []
        self.steps = self.tokens = 0
        self._begin = time.perf_counter()

    def start(self) -> None:
        """A phase starts now."""
        self._last = self.watch.mark()

    def end(self, phase: str) -> None:
        """The phase ends now and the next one starts."""
        now = self.watch.mark()
        self._spans.append((phase, self._last, now))
        self._last = now

    def on_train_begin(self, args, state, control, **kwargs):
        self.reset()

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self.start()

    def on_optimizer_step(self, args, state, control, **kwargs):
        self.end("optimiser")

    def on_step_end(self, args, state, control, **kwargs):
        self.steps += 1

    def summary(self) -> dict[str, float]:
        """Milliseconds of a step for each phase, and tokens of this process per second, since the last reset."""
        seconds = dict.fromkeys(PHASES, 0.0)
        for phase, start, end in self._spans:
            seconds[phase] += self.watch.seconds(start, end)
        steps = max(1, self.steps)
        figures = {f"ms_{phase}": round(spent * 1e3 / steps, 2) for phase, spent in seconds.items()}
        return figures | {"tokens_per_second": round(int(self.tokens) / (time.perf_counter() - self._begin), 1)}


class TimeBudget(TrainerCallback):
    """
    Stops the training after some minutes of it, those before a resume included (they are in the log).

    All processes follow the clock of the first, read at the end of each step: two clocks would stop at two steps, and
    one process would wait for the other forever.
    """

    def __init__(self, minutes: float, broadcast=lambda value: value):
        self.minutes = minutes
        self._broadcast = broadcast
        self._spent = self._elapsed = 0.0
        self._start = time.monotonic()

    def elapsed(self) -> float:
        """Minutes of training up to the last step."""
        return self._elapsed

    def progress(self) -> float:
        """Share of the budget that is used."""
        return self._elapsed / self.minutes

    def on_train_begin(self, args, state, control, **kwargs):
        self._start = time.monotonic()
        self._spent = next((entry["minutes"] for entry in reversed(state.log_history) if "minutes" in entry), 0.0)
        self._elapsed = self._spent
        if self.progress() >= 1.0:
            raise ValueError(
                f"max_minutes={self.minutes}: used up, {self._spent:.1f} came before this checkpoint; give more."
            )

    def skip(self, seconds: float) -> None:
        """Do not count `seconds` that have just passed: an evaluation."""
        self._start += seconds

    def on_step_end(self, args, state, control, **kwargs):
        self._elapsed = self._broadcast(self._spent + (time.monotonic() - self._start) / 60)
        if self.progress() >= 1.0:
            # As at the last of `max_steps`: what was trained can be gone on from, and is in the log.
            control.should_training_stop = control.should_log = True
            control.should_save = args.save_strategy != "no"


class RichProgress(TrainerCallback):
    """A bar over the steps, or over the minutes of the budget, with the latest figures; each is also a line above."""

    SHOWN = {"loss": ".3f", "accuracy": ".3f", "accepted": ".2f", "tokens_per_second": ".0f", "eval_tau": ".2f"}

    def __init__(self, budget: TimeBudget | None = None):
        self.budget = budget
        self.figures: dict[str, str] = {}
        self.bar: Progress | None = None

    def on_train_begin(self, args, state, control, **kwargs):
        if not state.is_world_process_zero:
            return
        console = Console(stderr=True)
        self.bar = Progress(
            SpinnerColumn(),
            BarColumn(),
            TextColumn("step {task.fields[step]}"),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,  # a log file gets the lines alone
        )
        total = self.budget.minutes if self.budget else state.max_steps
        self.task = self.bar.add_task("", total=total, step=state.global_step)
        self.bar.start()

    def on_step_end(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            done = self.budget.elapsed() if self.budget else state.global_step
            self.bar.update(self.task, completed=done, step=state.global_step)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if self.bar:
            new = {k: f"{k} {logs[k]:{form}}" for k, form in self.SHOWN.items() if k in logs}
            self.figures |= new
            self.bar.update(self.task, description="  ".join(self.figures.values()))
            # A line for a log file, where no bar is drawn.
            self.bar.console.print(f"step {state.global_step}  " + "  ".join(new.values()), highlight=False)

    def close(self) -> None:
        """Give the terminal back, however the training ended."""
        if self.bar:
            self.bar.stop()
