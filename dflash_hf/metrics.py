"""What a generate call did, in numbers: rounds, acceptance, times."""

import time
from dataclasses import dataclass, field
from typing import NamedTuple

import torch


class RoundRecord(NamedTuple):
    """
    One round of one text: draft, verify, commit.

    Fields:
        proposed (`int`): proposals that the target verified; 0 for a plain step.
        accepted (`int`): proposals in the longest valid prefix.
        committed (`int`): tokens added to the text, the target's own included; fewer than `accepted + 1` when the
            text ended inside the block.
        draft_seconds, verify_seconds, commit_seconds (`float`): embedding, features, drafter and head; target
            forward; everything else. Texts that are decoded together have equal shares of the time.
        row (`int`): of the batch.
    """

    proposed: int
    accepted: int
    committed: int
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    commit_seconds: float = 0.0
    row: int = 0


@dataclass
class GenerationStatistics:
    """
    The numbers of one call, or of several added up; without arguments, of none.

    Args:
        prompt_tokens (`int`), prefill_seconds (`float`): the prompts' forward, which gives the first new tokens.
        rounds (`list[RoundRecord]`): one for each verification of a text after it. Rounds cut short by the end of the
            text count like the others.
        target_forwards (`int`): forwards of the target, the prompts' included; a text decoded alone needs
            `new_tokens` in plain decoding. Not among them is the one that computes the returned cache of several rows.
        texts (`int`): rows of the batch, in all calls.
        calls (`int`): calls whose numbers are added up here.
    """

    prompt_tokens: int = 0
    prefill_seconds: float = 0.0
    rounds: list[RoundRecord] = field(default_factory=list)
    target_forwards: int = 0
    texts: int = 0
    calls: int = 0

    @property
    def new_tokens(self) -> int:
        """Tokens generated, the first of each text included."""
        return self.texts + self.committed

    @property
    def committed(self) -> int:
        """Tokens committed by the rounds."""
        return sum(r.committed for r in self.rounds)

    @property
    def tau(self) -> float:
        """τ: committed tokens per verification of a text, bonus included; 1.0 when there was no round."""
        return self.committed / len(self.rounds) if self.rounds else 1.0

    def survival(self, k: int) -> float:
        """Share of the rounds with at least `k` proposals that accepted at least `k` of them."""
        eligible = [r for r in self.rounds if r.proposed >= k]
        return sum(r.accepted >= k for r in eligible) / len(eligible) if eligible else 0.0

    def conditional(self, k: int) -> float:
        """Acceptance of proposal `k` among the rounds that accepted the `k - 1` before it."""
        eligible = [r for r in self.rounds if r.proposed >= k and r.accepted >= k - 1]
        return sum(r.accepted >= k for r in eligible) / len(eligible) if eligible else 0.0

    @property
    def decode_seconds(self) -> float:
        """Time of all rounds; the prompt's forward is not in it."""
        return sum(r.draft_seconds + r.verify_seconds + r.commit_seconds for r in self.rounds)

    @property
    def overhead(self) -> float:
        """Share of the rounds' time that is neither draft nor verification."""
        return sum(r.commit_seconds for r in self.rounds) / self.decode_seconds if self.decode_seconds else 0.0

    def __add__(self, other: "GenerationStatistics") -> "GenerationStatistics":
        """Numbers of several calls together."""
        return GenerationStatistics(
            self.prompt_tokens + other.prompt_tokens,
            self.prefill_seconds + other.prefill_seconds,
            self.rounds + other.rounds,
            self.target_forwards + other.target_forwards,
            self.texts + other.texts,
            self.calls + other.calls,
        )


class Stopwatch:
    """Marks in time; on an accelerator they stand in its queue of work, and are read after the call."""

    def __init__(self, device: torch.device):
        self.device = device

    def mark(self) -> "float | torch.Event":
        """Now, as the device sees it."""
        if self.device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(self.device, enable_timing=True)
        event.record()
        return event

    @staticmethod
    def seconds(start: "float | torch.Event", end: "float | torch.Event") -> float:
        """Time between two marks; waits for the second."""
        if isinstance(start, float):
            return end - start
        end.synchronize()
        return start.elapsed_time(end) / 1e3
