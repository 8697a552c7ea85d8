"""The same prompts decoded by several methods, one after the other for each prompt, and what that gives."""

import statistics as stats
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from ..integration import custom_generate
from ..metrics import GenerationStatistics, Stopwatch
from ..modeling_dflash import DFlashDraftModel


METHODS = ("plain", "dflash", "prompt lookup")
NEAR_TIE = 1e-4  # float32 logits nearer than this may change places by rounding alone


@dataclass
class Run:
    """
    One prompt decoded by one method.

    Args:
        ids (`list[int]`): the new tokens.
        seconds (`float`): of the whole `generate` call, the prompt's forward included.
        forwards (`int`): of the target.
        step_seconds (`list[float]`): time of each target forward after the prompt's.
        statistics (`GenerationStatistics`, *optional*): rounds, for DFlash.
    """

    ids: list[int]
    seconds: float
    forwards: int
    step_seconds: list[float]
    statistics: GenerationStatistics | None = None


class _ForwardClock:
    """Counts and times the forwards of a model while it is open."""

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self.watch = Stopwatch(model.device)
        self.marks: list = []

    def __enter__(self) -> "_ForwardClock":
        self.handles = [
            self.model.register_forward_pre_hook(lambda *_: self.marks.append(self.watch.mark())),
            self.model.register_forward_hook(lambda *_: self.marks.append(self.watch.mark())),
        ]
        return self

    def __exit__(self, *_) -> None:
        for handle in self.handles:
            handle.remove()

    def seconds(self) -> list[float]:
        """Of each forward."""
        return [self.watch.seconds(*pair) for pair in zip(self.marks[::2], self.marks[1::2], strict=True)]


def run(
    target: PreTrainedModel,
    drafter: DFlashDraftModel,
    prompt: torch.Tensor,
    method: str,
    *,
    max_new_tokens: int,
    streamer=None,
) -> Run:
    """
    Decode `prompt` `(1, T)` greedily by `method`, one of [`METHODS`].

    `"plain"` is `generate` of the model with nothing attached, `"prompt lookup"` is transformers' own n-gram
    speculation with its usual 10 tokens.
    """
    options = {"max_new_tokens": max_new_tokens, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    if method == "dflash":
        options["custom_generate"] = custom_generate(drafter, streamer=streamer)
    elif method == "prompt lookup":
        options["prompt_lookup_num_tokens"] = 10
    with _ForwardClock(target) as clock:
        start = time.perf_counter()
        output = type(target).generate(target, prompt, **options)
        ids = output[0, prompt.shape[1] :].tolist()  # waits for the device
        seconds = time.perf_counter() - start
    forwards = clock.seconds()
    return Run(
        ids=ids,
        seconds=seconds,
        forwards=len(forwards),
        step_seconds=forwards[1:],
        statistics=drafter.last_statistics if method == "dflash" else None,
    )


REPETITIVE = 0.3  # an answer of which a greater share repeats is repetitive


def repeated_share(ids: list[int], n: int = 4) -> float:
    """Share of the n-grams that occurred before: text that repeats itself flatters every speculative method."""
    grams = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


@torch.no_grad()
def first_difference(
    target: PreTrainedModel, prompt: torch.Tensor, plain: list[int], other: list[int]
) -> tuple[int, float] | None:
    """
    Where two continuations part, and how near the target was to a tie there.

    Returns:
        `(index, gap)`: index of the first different new token, and the difference of the target's logits of the two
        tokens after the same text, in the target's own precision. `None` when the continuations are equal.
    """
    if plain == other:
        return None
    index = next((i for i, (a, b) in enumerate(zip(plain, other, strict=False)) if a != b), None)
    if index is None:
        return min(len(plain), len(other)), float("inf")
    text = torch.cat([prompt, torch.tensor([plain[:index]], device=prompt.device, dtype=prompt.dtype)], dim=1)
    logits = target(text, use_cache=False).logits[0, -1].float()
    return index, abs(float(logits[plain[index]] - logits[other[index]]))


@dataclass
class Comparison:
    """
    Results over a set of prompts.

    Args:
        name (`str`): of the set.
        runs (`dict[str, list[Run]]`): for each method, one [`Run`] a prompt.
        differences (`list[dict]`): prompts whose DFlash text is not the plain one, with `prompt`, `index`, `gap`.
    """

    name: str
    runs: dict[str, list[Run]] = field(default_factory=dict)
    differences: list[dict] = field(default_factory=list)

    def rounds(self) -> GenerationStatistics:
        """The DFlash rounds of all prompts."""
        return sum((r.statistics for r in self.runs["dflash"]), GenerationStatistics())

    def totals(self, *, repetitive: bool = True) -> dict:
        """
        For each method, over all prompts or without those whose plain answer is [`repetitive`]: new tokens, target
        forwards, new tokens per second of `generate` (prompts included), τ of what is not the prompt's.
        """
        kept = [i for i, r in enumerate(self.runs["plain"]) if repetitive or repeated_share(r.ids) <= REPETITIVE]
        runs = {method: [every[i] for i in kept] for method, every in self.runs.items()}
        tokens = {m: sum(len(r.ids) for r in some) for m, some in runs.items()}
        forwards = {m: sum(r.forwards for r in some) for m, some in runs.items()}
        return {
            "prompts": len(kept),
            "new_tokens": tokens,
            "target_forwards": forwards,
            "tokens_per_second": {m: round(tokens[m] / sum(r.seconds for r in runs[m]), 3) for m in runs if kept},
            "tau": {m: round((tokens[m] - len(kept)) / max(1, forwards[m] - len(kept)), 4) for m in runs if kept},
        }

    def times(self) -> dict[str, float]:
        """
        Median seconds of a plain target step, of a verification, of a draft and of the rest of a round, and what τ
        would just pay for them: break-even τ = (T_draft + T_verify + rest) / T_target.
        """
        rounds = [r for r in self.rounds().rounds if r.proposed]
        target = stats.median(s for r in self.runs["plain"] for s in r.step_seconds)
        verify, draft, rest = (
            stats.median(getattr(r, name) for r in rounds)
            for name in ("verify_seconds", "draft_seconds", "commit_seconds")
        )
        return {
            "T_target": target,
            "T_verify": verify,
            "T_draft": draft,
            "T_rest": rest,
            "overhead": self.rounds().overhead,
            "break_even_tau": (verify + draft + rest) / target,
        }

    def summary(self) -> dict:
        """All figures of this set, ready for JSON."""
        rounds, times = self.rounds(), self.times()
        return {
            "set": self.name,
            **self.totals(),
            "without_repetitive": self.totals(repetitive=False),
            "survival": [round(rounds.survival(k), 4) for k in range(1, 1 + max(r.proposed for r in rounds.rounds))],
            "identical": len(self.runs["plain"]) - len(self.differences),
            "differences": self.differences,
            "milliseconds": {k: round(v * 1e3, 3) for k, v in times.items() if k.startswith("T_")},
            "overhead": round(times["overhead"], 4),
            "break_even_tau": round(times["break_even_tau"], 4),
        }


def compare(
    target: PreTrainedModel,
    drafter: DFlashDraftModel,
    prompts: list[torch.Tensor],
    *,
    name: str,
    max_new_tokens: int,
    on_run: Callable[[int, str, Run], None] = lambda *_: None,
) -> Comparison:
    """
    Decode every prompt by every method, interleaved, so that a drift of the machine's speed meets them alike.

    Each method runs once on the first prompt before anything is counted, to warm up.

    Args:
        prompts (`list[torch.LongTensor]`, each of shape `(1, T)`): prompt ids.
        max_new_tokens (`int`): at least 2, since the first token is the prompt's.

    Raises:
        `ValueError`: for no prompts or too few tokens.
        on_run: called with prompt number, method and [`Run`] after each.
    """
    if not prompts or max_new_tokens < 2:
        raise ValueError(f"{len(prompts)} prompts, max_new_tokens={max_new_tokens}: at least 1 and 2 are needed.")
    for method in METHODS:
        run(target, drafter, prompts[0], method, max_new_tokens=min(8, max_new_tokens))
    comparison = Comparison(name, {method: [] for method in METHODS})
    for number, prompt in enumerate(prompts):
        for method in METHODS:
            result = run(target, drafter, prompt, method, max_new_tokens=max_new_tokens)
            comparison.runs[method].append(result)
            on_run(number, method, result)
        plain, ours = comparison.runs["plain"][-1], comparison.runs["dflash"][-1]
        difference = first_difference(target, prompt, plain.ids, ours.ids)
        if difference:
            index, gap = difference
            comparison.differences.append({"prompt": number, "index": index, "gap": gap})
    return comparison
