"""
The loop: draft, verify, commit.

At the start of every round the text ends with the anchor, which the target has not seen as input yet; the target's
cache holds exactly the tokens before it; the drafter's cache and the pending context together cover the same tokens.
"""

from dataclasses import dataclass

import torch
from transformers import Cache, GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import StopStringCriteria
from transformers.generation.logits_process import (
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
from transformers.generation.streamers import BaseStreamer

from . import cache as caches
from . import compat, verification
from .configuration_dflash import EMBEDDING_TAP
from .metrics import GenerationStatistics, RoundRecord, Stopwatch
from .modeling_dflash import DFlashDraftModel
from .outputs import Collector, Processing, Stopping
from .proposal import ProposalHead
from .target import Target, concatenate


# How sampled proposals are verified, and whether they are drawn from the drafter's law rather than its likeliest.
VERIFIERS = {"block": True, "rejection": True, "match": False}

# These keep a memory of what they were shown, and would be shown proposals that are then rejected.
_REMEMBERING = {
    SynthIDTextWatermarkLogitsProcessor: "watermarking_config (SynthID)",
    UnbatchedClassifierFreeGuidanceLogitsProcessor: "guidance_scale",
}

# What `generate` prepares for a text. Anything else of the caller's would be lost after the prompt.
_CARRIED = {"attention_mask", "position_ids", "inputs_embeds", "use_cache", "logits_to_keep", compat.CACHE}

# `generate` fills this in for every call, so it says nothing of what the user wants.
_DEFAULT_CAP = 20


@dataclass
class DecodeState:
    """
    What a call remembers between rounds.

    Args:
        text (`torch.LongTensor` of shape `(1, n)`): all tokens so far; the last is the anchor.
        target_cache, draft_cache (`Cache`): committed tokens before the anchor.
        mask (`torch.LongTensor` of shape `(1, committed_pos)`, *optional*): 0 for padding; `None` without padding.
        committed_pos (`int`): index of the anchor; both caches belong to the tokens before it.
        anchor_position (`torch.LongTensor` of shape `(1, 1)`): what `position_ids` says of the anchor.
        context (`torch.Tensor` of shape `(1, new, M * H)`): tapped hidden states that the drafter has not seen; `None`
            before the prompt.
        context_positions (`torch.LongTensor` of shape `(1, new)`): their positions.
        finished (`bool`): the text has ended.
    """

    text: torch.Tensor
    target_cache: Cache
    draft_cache: Cache
    mask: torch.Tensor | None = None
    committed_pos: int = 0
    anchor_position: torch.Tensor | None = None
    context: torch.Tensor | None = None
    context_positions: torch.Tensor | None = None
    finished: bool = False

    def roll_back(self) -> None:
        """Forget everything that is not committed."""
        caches.crop_to(self.target_cache, self.committed_pos)
        caches.crop_to(self.draft_cache, self.committed_pos - self.context.shape[1])


class Decoding:
    """One call: the pair, the caller's options, and the state they work on."""

    def __init__(
        self,
        target: Target,
        drafter: DFlashDraftModel,
        state: DecodeState,
        *,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        config: GenerationConfig,
        verifier: str,
        num_assistant_tokens: int | None,
        streamer: BaseStreamer | None,
    ):
        self.target, self.drafter, self.state = target, drafter, state
        self.head = ProposalHead(drafter, target)
        self.layer_ids = drafter.config.target_layer_ids
        self.processing = Processing(processors)
        self.stopping = Stopping(criteria)
        self.collector = Collector(config)
        self.streamer = streamer
        self.sampling = config.do_sample
        self.verifier = verifier
        self.drawing = self.sampling and VERIFIERS[verifier]
        caps = [cap for cap in (num_assistant_tokens, config.num_assistant_tokens) if cap not in (None, _DEFAULT_CAP)]
        self.max_proposals = min([drafter.config.num_proposals, *caps])
        self.max_length = self.stopping.max_length
        self.block = torch.full((1, drafter.config.block_size), drafter.config.mask_token_id, device=state.text.device)
        self.watch = Stopwatch(target.device)
        self.start = self.watch.mark()
        self.marks: list[tuple] = []  # one for each round: proposed, accepted, committed, and four marks in time

    def prefill(self, taps: dict[int, torch.Tensor], model_kwargs: dict) -> None:
        """Run the prompt; its last row gives the first anchor."""
        state, model = self.state, self.target.model
        positions = model_kwargs.get("position_ids")
        inputs = model.prepare_inputs_for_generation(state.text, is_first_iteration=True, **model_kwargs)
        if EMBEDDING_TAP in self.layer_ids and inputs.get("inputs_embeds") is not None:
            taps[EMBEDDING_TAP] = inputs["inputs_embeds"]  # the embedding itself is not called then
        outputs = model(**inputs, return_dict=True)
        logits = outputs.logits[:, -1:].to(state.text.device, torch.float32, copy=True)  # [1, 1, V]
        caches.start_recording(state.target_cache)
        state.committed_pos = self.prompt_tokens = caches.length_of(state.target_cache)
        if positions is None:
            positions = torch.arange(state.committed_pos, device=state.text.device).unsqueeze(0)
        state.anchor_position = positions[:, -1:] + 1
        scores = self.processing(state.text, logits, state.text[:, :0])
        state.context = concatenate(taps, self.layer_ids)
        state.context_positions = positions
        first = self._choose(scores)
        ids = first[0].tolist()
        self._extend(first, ids, scores, logits)
        self._stream(ids)
        self.prefilled = self.watch.mark()

    def round(self, taps: dict[int, torch.Tensor]) -> None:
        """Draft, verify, commit. If it fails half-way, the caches are as before it."""
        state = self.state
        width = min(self.max_proposals, self.max_length - state.text.shape[1] - 1)
        start = self.watch.mark()
        try:
            proposals, q = self.draft(width)
            drafted = self.watch.mark()
            logits = self.verify(proposals)
            verified = self.watch.mark()
            scores = self.processing(state.text, logits, proposals)
            verdict = self._judge(scores, q, proposals)
            # The one point of a round where the device has to be waited for.
            accepted, token, *ids = torch.cat([*verdict, proposals[0]]).tolist()
            ids = [*ids[:accepted], token]
            new = torch.cat([proposals[:, :accepted], verdict.token.unsqueeze(1)], dim=1)
            context = concatenate(taps, self.layer_ids)
            committed = self._extend(new, ids, scores, logits)
        except BaseException:
            state.roll_back()
            raise
        self.commit(context[:, :committed])
        self._stream(ids[:committed])
        self.marks.append((width, accepted, committed, start, drafted, verified, self.watch.mark()))

    def draft(self, width: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """
        Propose the next `width` tokens.

        Returns:
            `(proposals, q)`: ids `(1, width)`, and where they are drawn, their law, `(1, width, V)`.
        """
        state = self.state
        if width == 0:
            return state.text[:, :0], state.text.new_zeros((1, 0, self.target.num_logits), dtype=torch.float32)
        if self.drafter.config.drafting == "autoregressive":
            proposals, q = self._draft_one_by_one(width)
        else:
            self.block[:, 0] = state.text[:, -1]
            hidden = self._denoise(self.block)[:, -self.drafter.config.num_proposals :]
            proposals, q = self._propose(state.text, hidden[:, :width])
        caches.crop_to(state.draft_cache, state.committed_pos)
        return proposals, q

    def _draft_one_by_one(self, width: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A forward for each proposal; the draft cache holds the block's earlier slots meanwhile."""
        text, laws = self.state.text, []
        for i in range(width):
            proposal, q = self._propose(text, self._denoise(text[:, -1:], start=i))
            text = torch.cat([text, proposal], dim=1)
            laws.append(q)
        return text[:, -width:], torch.cat(laws, dim=1) if self.drawing else None

    def _denoise(self, ids: torch.Tensor, *, start: int = 0) -> torch.Tensor:
        """Hidden states `(1, n, H)` of the block's slots from `start` on, which hold `ids` `(1, n)`."""
        state = self.state
        positions = state.anchor_position + torch.arange(start, start + ids.shape[1], device=ids.device)
        mask = state.mask
        if mask is not None:
            mask = torch.cat([mask, mask.new_ones((1, start + ids.shape[1]))], dim=1).to(self.drafter.device)
        hidden = self.drafter(
            noise_embeds=self.target.embed(ids).to(self.drafter.device, self.drafter.dtype),
            context_hidden_states=state.context.to(self.drafter.device, self.drafter.dtype),
            position_ids=torch.cat([state.context_positions, positions], dim=1).to(self.drafter.device),
            attention_mask=mask,
            **{compat.CACHE: state.draft_cache},
        ).last_hidden_state
        # New tensors, since a slice would keep the features of the whole prompt.
        state.context = state.context.new_empty((1, 0, state.context.shape[-1]))
        state.context_positions = state.context_positions.new_empty((1, 0))
        return hidden

    def _propose(self, text: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Proposals of the slots with hidden states `(1, n, H)`, the first of which follows `text`, and their law."""
        logits = self.head.logits(hidden)  # [1, n, shortlist or V]
        if not self.drawing and not self.processing:
            return self.head.greedy(logits).to(text.device), None
        logits = self.head.over_vocabulary(logits, self.target.num_logits).to(text.device)
        if not self.drawing:
            return self.processing.walk(text, logits, lambda scores: scores.argmax(-1))[0], None
        proposals, scores = self.processing.walk(text, logits, lambda s: verification.draw(s.softmax(-1)))
        return proposals, scores.softmax(-1)

    def verify(self, proposals: torch.Tensor) -> torch.Tensor:
        """Logits of the target at the anchor and at each proposal, `(1, width + 1, V)` float32."""
        state = self.state
        ids = torch.cat([state.text[:, -1:], proposals], dim=1)
        inputs = {"input_ids": ids, compat.CACHE: state.target_cache, "use_cache": True, "return_dict": True}
        if self.target.takes_positions:
            inputs["position_ids"] = state.anchor_position + torch.arange(ids.shape[1], device=ids.device)
        if state.mask is not None:
            inputs["attention_mask"] = torch.cat([state.mask, torch.ones_like(ids)], dim=1)
        return self.target.model(**inputs).logits.to(state.text.device, torch.float32)

    def commit(self, context: torch.Tensor) -> None:
        """Move both caches and the pending context to the new anchor; `context` is that of the tokens it passes."""
        state, count = self.state, context.shape[1]
        positions = state.anchor_position + torch.arange(count, device=state.text.device)
        if state.context.shape[1]:  # nothing was drafted, so the drafter has not seen the earlier context either
            context = torch.cat([state.context, context], dim=1)
            positions = torch.cat([state.context_positions, positions], dim=1)
        state.context, state.context_positions = context, positions
        state.anchor_position = state.anchor_position + count
        state.committed_pos += count
        if state.mask is not None:
            state.mask = torch.cat([state.mask, state.mask.new_ones((1, count))], dim=1)
        caches.crop_to(state.target_cache, state.committed_pos)

    def statistics(self) -> GenerationStatistics:
        """The numbers of the call, once it is over."""
        seconds = self.watch.seconds
        rounds = [
            RoundRecord(*counts, seconds(start, drafted), seconds(drafted, verified), seconds(verified, end))
            for *counts, start, drafted, verified, end in self.marks
        ]
        return GenerationStatistics(self.prompt_tokens, seconds(self.start, self.prefilled), rounds)

    def _extend(self, new: torch.Tensor, ids: list[int], scores: torch.Tensor, logits: torch.Tensor) -> int:
        """
        Append the tokens `new` `(1, n)`, which are `ids`, up to the first that stops the text; say how many they were.
        """
        state, width = self.state, new.shape[1]
        text = torch.cat([state.text, new], dim=1)
        stop = self.stopping.first_stop(text, ids, scores[:, :width], self.collector.scores)
        count = stop or width
        self.collector.add(scores[:, :count], logits[:, :count])
        state.text = text[:, : text.shape[1] - width + count]
        state.finished = stop is not None
        return count

    def _stream(self, ids: list[int]) -> None:
        """Hand the tokens `ids`, just committed, to the streamer."""
        if self.streamer is not None:
            self.streamer.put(torch.tensor(ids))

    def _choose(self, scores: torch.Tensor) -> torch.Tensor:
        """The target's own tokens: argmax or a draw."""
        return verification.draw(scores.softmax(-1)) if self.sampling else scores.argmax(-1)

    def _judge(self, scores: torch.Tensor, q: torch.Tensor | None, proposals: torch.Tensor) -> verification.Verdict:
        if self.drawing:
            accept = verification.block if self.verifier == "block" else verification.rejection
            return accept(scores.softmax(-1), q, proposals)
        return verification.match(self._choose(scores), proposals)


@torch.no_grad()
def decode(
    model: PreTrainedModel,
    input_ids: torch.LongTensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    *,
    drafter: DFlashDraftModel,
    verifier: str = "block",
    num_assistant_tokens: int | None = None,
    streamer: BaseStreamer | None = None,
    tokenizer=None,
    stop_strings: str | list[str] | None = None,
    **model_kwargs,
):
    """
    The decoding method that `generate` calls with everything prepared; see [`custom_generate`] for the arguments.

    Raises:
        `ValueError`: for a pair that does not fit, and for options that are not supported, by name, before any
            forward.
    """
    target = Target(model)
    target.check_pair(drafter)
    if stop_strings is not None:
        if tokenizer is None:
            raise ValueError("stop_strings need the tokenizer: pass tokenizer=... beside them.")
        stopping_criteria = StoppingCriteriaList([*stopping_criteria, StopStringCriteria(tokenizer, stop_strings)])
    target_cache = model_kwargs.get(compat.CACHE)
    _check_options(logits_processor, generation_config, verifier, num_assistant_tokens)
    _check_inputs(input_ids, generation_config, model_kwargs)
    state = DecodeState(
        text=input_ids,
        target_cache=target_cache,
        draft_cache=caches.new_draft_cache(drafter.config),
        mask=model_kwargs.get("attention_mask"),
    )
    decoding = Decoding(
        target,
        drafter,
        state,
        processors=logits_processor,
        criteria=stopping_criteria,
        config=generation_config,
        verifier=verifier,
        num_assistant_tokens=num_assistant_tokens,
        streamer=streamer,
    )
    if streamer is not None:
        streamer.put(input_ids.cpu())
    try:
        with target.capture(decoding.layer_ids) as taps:
            decoding.prefill(taps, model_kwargs)
            while not state.finished:
                decoding.round(taps)
    finally:
        caches.stop_recording(target_cache)
    if streamer is not None:
        streamer.end()
    drafter.last_statistics = statistics = decoding.statistics()
    return decoding.collector.result(state.text, target_cache, statistics)


def _check_options(
    processors: LogitsProcessorList, config: GenerationConfig, verifier: str, num_assistant_tokens: int | None
) -> None:
    """Refuse by name the options that this loop does not honour."""
    if verifier not in VERIFIERS:
        raise ValueError(f"verifier={verifier!r}: choose one of {', '.join(VERIFIERS)}.")
    for cap in (num_assistant_tokens, config.num_assistant_tokens):
        if cap is not None and cap < 1:
            raise ValueError(f"num_assistant_tokens={cap}: at least 1; for none, leave the drafter out.")
    if config.num_beams > 1:
        raise ValueError(f"num_beams={config.num_beams}: DFlash decodes without beams; leave the drafter out.")
    for option in ("output_attentions", "output_hidden_states", "prefill_chunk_size", "prompt_lookup_num_tokens"):
        if getattr(config, option):
            raise ValueError(f"{option}={getattr(config, option)}: not supported with a DFlash drafter; leave it out.")
    for processor in processors:
        if type(processor) in _REMEMBERING:
            raise ValueError(f"{_REMEMBERING[type(processor)]}: not supported with a DFlash drafter; leave it out.")


def _check_inputs(input_ids: torch.Tensor, config: GenerationConfig, model_kwargs: dict) -> None:
    """Refuse by name the inputs that this loop cannot carry from round to round."""
    if input_ids.shape[0] > 1:
        raise ValueError(
            f"batch of {input_ids.shape[0]} rows (num_return_sequences={config.num_return_sequences}): so far DFlash "
            "decodes one row at a time; call generate for each row."
        )
    unknown = [name for name, value in model_kwargs.items() if value is not None and name not in _CARRIED]
    if unknown:
        raise ValueError(
            f"{', '.join(unknown)}: so far DFlash passes only text on to the target; leave the drafter out."
        )
    positions = model_kwargs.get("position_ids")
    if positions is not None and positions.dim() != 2:
        raise ValueError(
            f"position_ids of shape {tuple(positions.shape)}: so far DFlash knows targets with one position a token."
        )
    cache = model_kwargs.get(compat.CACHE)
    caches.check_can_roll_back(cache)
    if caches.length_of(cache) > 0:
        raise ValueError(
            f"{compat.CACHE}: it already holds {caches.length_of(cache)} tokens, whose hidden states the drafter has "
            "not seen. Pass the whole text without a cache."
        )
