"""What stands around the loop: logits processors per slot, stopping per token, streaming, and the returned object."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    GenerationConfig,
    LogitNormalization,
    LogitsProcessorList,
    MaxLengthCriteria,
    MinPLogitsWarper,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)
from transformers.generation import EosTokenCriteria, GenerateDecoderOnlyOutput

from . import compat
from .metrics import GenerationStatistics


# These look at the scores only, not at the text before them, so all slots can pass at once.
_POINTWISE = {
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    LogitNormalization,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
}


@dataclass
class DFlashGenerateOutput(GenerateDecoderOnlyOutput):
    """
    What `generate` returns with `return_dict_in_generate=True`: [`~generation.GenerateDecoderOnlyOutput`] and

    Args:
        acceptance_lengths (`list[list[int]]`): for each row, the tokens committed in each round.
        statistics (`GenerationStatistics`): counts and times of the call.
    """

    acceptance_lengths: list[list[int]] | None = None
    statistics: GenerationStatistics | None = None


class Processing:
    """
    The caller's logits processors, applied at every slot with the text that the slot really follows.

    Args:
        processors (`LogitsProcessorList`): as `generate` prepared them.
    """

    def __init__(self, processors: LogitsProcessorList):
        self.processors = processors
        self.pointwise = all(type(processor) in _POINTWISE for processor in processors)

    def __bool__(self) -> bool:
        return len(self.processors) > 0

    def __call__(self, text: torch.Tensor, logits: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
        """
        Scores of n slots.

        Args:
            text (`torch.LongTensor` of shape `(B, T)`): tokens before the first slot.
            logits (`torch.Tensor` of shape `(B, n, V)`, float32): raw.
            block (`torch.LongTensor` of shape `(B, n - 1)`): tokens between the slots; slot i follows `block[:, :i]`.

        Returns:
            `torch.Tensor` of shape `(B, n, V)`, float32. `logits` is left as it was.
        """
        if not self:
            return logits
        if self.pointwise:
            return self.processors(text, logits.flatten(0, 1).clone()).view_as(logits)
        slots = [
            self.processors(torch.cat([text, block[:, :i]], dim=1), logits[:, i].clone())
            for i in range(logits.shape[1])
        ]
        return torch.stack(slots, dim=1)

    def walk(
        self, text: torch.Tensor, logits: torch.Tensor, pick: Callable[[torch.Tensor], torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Scores of n slots of which each follows what was picked in the one before.

        Args:
            pick: from scores `(..., V)` to tokens `(...)`.

        Returns:
            `(tokens, scores)` of shapes `(B, n)` and `(B, n, V)`.
        """
        if not self or self.pointwise:
            scores = self(text, logits, text[:, :0])
            return pick(scores), scores
        tokens, slots = text[:, :0], []
        for i in range(logits.shape[1]):
            slots.append(self.processors(torch.cat([text, tokens], dim=1), logits[:, i].clone()))
            tokens = torch.cat([tokens, pick(slots[-1]).unsqueeze(1)], dim=1)
        return tokens, torch.stack(slots, dim=1)


class Stopping:
    """
    The caller's stopping criteria, asked after every single token, as plain decoding asks them.

    Length and end tokens are decided on the numbers at hand; only other criteria are called.
    """

    def __init__(self, criteria: StoppingCriteriaList):
        self.max_length = criteria.max_length
        self.eos_ids: set[int] = set()
        self.others = StoppingCriteriaList()
        for criterion in criteria:
            if type(criterion) is EosTokenCriteria:
                self.eos_ids.update(criterion.eos_token_id.flatten().tolist())
            elif type(criterion) is not MaxLengthCriteria:
                self.others.append(criterion)

    def first_stop(
        self, text: torch.Tensor, new: list[int], scores: torch.Tensor, earlier: tuple | None
    ) -> int | None:
        """
        How many of the tokens `new` are used when the text stops among them, or `None` if it goes on.

        Args:
            text (`torch.LongTensor` of shape `(1, T + n)`): the text with the `n` new tokens at its end.
            scores (`torch.Tensor` of shape `(1, n, V)`): of the new tokens, for criteria that look at them.
            earlier (`tuple`, *optional*): scores of the tokens before; `None` if the caller does not collect them,
                and then criteria see none, as in plain decoding.
        """
        start = text.shape[1] - len(new)
        for i, token in enumerate(new, start=1):
            length = start + i
            if token in self.eos_ids or (self.max_length is not None and length >= self.max_length):
                return i
            if self.others:
                seen = None if earlier is None else earlier + scores[:, :i].unbind(1)
                if bool(self.others(text[:, :length], seen).all()):
                    return i
        return None


class Collector:
    """The scores and logits that the caller asked for, one entry for each new token."""

    def __init__(self, config: GenerationConfig):
        self.as_dict = config.return_dict_in_generate
        self.scores: tuple | None = () if self.as_dict and config.output_scores else None
        self.logits: tuple | None = () if self.as_dict and config.output_logits else None

    def add(self, scores: torch.Tensor, logits: torch.Tensor) -> None:
        """Take the rows of `(B, n, V)` tensors, one for each new token; copies, so that no rejected row is kept."""
        if self.scores is not None:
            self.scores += scores.clone().unbind(1)
        if self.logits is not None:
            self.logits += logits.clone().unbind(1)

    def result(self, sequences: torch.Tensor, cache, statistics: GenerationStatistics):
        """What `generate` returns: the tensor, or with `return_dict_in_generate` a [`DFlashGenerateOutput`]."""
        if not self.as_dict:
            return sequences
        return DFlashGenerateOutput(
            sequences=sequences,
            scores=self.scores,
            logits=self.logits,
            acceptance_lengths=[[record.committed for record in statistics.rounds]],
            statistics=statistics,
            **{compat.CACHE: cache},
        )
