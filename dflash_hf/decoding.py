"""
The loop: draft, verify, commit.

At the start of every round each text ends with its anchor, which the target has not seen as input yet; the target's
cache holds exactly the tokens before it; the drafter's cache and the pending context together cover the same tokens.
The rows of a batch are accepted at their own pace, unless something must be asked as plain decoding asks it, and one
that has ended is dropped.
"""

from itertools import pairwise

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import StopStringCriteria
from transformers.generation.streamers import BaseStreamer

from . import cache as caches
from . import compat, memory, options, pairing, verification
from .cache import AlignedCache
from .configuration_dflash import EMBEDDING_TAP
from .drafting import Drafting
from .metrics import GenerationStatistics, RoundRecord, Stopwatch
from .modeling_dflash import DFlashDraftModel
from .outputs import Collector, Forward, Processing, Stopping, Texts
from .prompt import Prompt
from .recurrent import MixerCall
from .state import DecodeState
from .target import Taps, Target


# `generate` fills this in for every call, so it says nothing of what the user wants.
_DEFAULT_CAP = 20

# So far the target's cache may lag behind before it is brought up to date by a forward of its own.
MAX_LAG = 64


class Decoding:
    """One call: the pair, the caller's options, and the state they work on."""

    def __init__(
        self,
        target: Target,
        drafter: DFlashDraftModel,
        prompt: Prompt,
        *,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        config: GenerationConfig,
        verifier: str,
        num_assistant_tokens: int | None,
        min_confidence: float | None,
        streamer: BaseStreamer | None,
    ):
        self.target, self.drafter, self.prompt = target, drafter, prompt
        self.num_rows, self.prompt_columns = prompt.ids.shape
        self.layer_ids = drafter.config.target_layer_ids
        # What follows the end of a text, as `generate` settled it.
        self.pad_id = 0 if config._pad_token_tensor is None else int(config._pad_token_tensor)
        self.stopping = Stopping(criteria, self.pad_id)
        self.processing = Processing(processors, self.stopping.end_ids, self.pad_id)
        self.config = config
        # Where something must be asked as in plain decoding, slot by slot, all rows at one pace. Criteria see nothing
        # else of a single row anyway.
        together = memory.asked_as_plain(
            self.stopping.others if self.num_rows > 1 else (), "the rows of a batch keep one pace"
        )
        self.one_by_one = bool(self.processing.as_plain or together)
        self.sampling = config.do_sample
        self.verifier = verifier
        self.drawing = self.sampling and options.VERIFIERS[verifier]
        asked = None if config.num_assistant_tokens == _DEFAULT_CAP else config.num_assistant_tokens
        self.max_proposals = min(filter(None, (drafter.config.num_proposals, num_assistant_tokens, asked)))
        self.max_length = self.stopping.max_length
        self.collector = Collector(config, self.num_rows, self.prompt_columns, prompt.num_hidden)
        anchor_position = prompt.positions[:, -1:] + 1
        self.state = DecodeState(
            texts=Texts(prompt.ids, [self.prompt_columns] * self.num_rows, list(range(self.num_rows))),
            target=AlignedCache(prompt.cache, self.num_rows),
            draft=caches.take_draft(prompt.cache, drafter.config, self.num_rows),
            anchor_position=anchor_position,
            last_position=anchor_position + (self.max_length - self.prompt_columns - 2),
            position_offsets=prompt.position_offsets,
        )
        self.drafting = Drafting(target, drafter, self.processing, self.drawing, min_confidence)
        # Without end tokens, rows are written on until the last one has stopped, as in plain decoding.
        self.pads = self.stopping.pads or self.num_rows == 1
        self.stopped: list[int | None] = [None] * self.num_rows  # columns at which each row stopped
        self.streamer, self.streamed = streamer, self.prompt_columns
        self.watch = Stopwatch(target.device)
        self.start = self.watch.mark()
        self.more_forwards = 0  # beside those of the rounds: the parts of the prompt, and where a cache lags behind
        self.marks: list[tuple] = []  # one for each round: proposed, counts of each row, and four marks in time

    def prefill(self, taps: Taps) -> None:
        """
        Run the prompt, or what a given cache does not hold of it; its last row gives the first anchor.

        What the drafter needs of it goes into the drafter's cache at once, and nothing else of it is kept.
        """
        state, prompt = self.state, self.prompt
        for part in prompt.parts(self.config.prefill_chunk_size):
            self.more_forwards += 1
            outputs = self.target.model(**part.inputs, return_dict=True)
            if EMBEDDING_TAP in self.layer_ids and prompt.embeds is not None:
                taps.states[EMBEDDING_TAP] = part.inputs["inputs_embeds"]  # the embedding itself is not called then
            state.context, state.context_positions = taps.concatenate(self.layer_ids), part.positions
            state.context_mask, state.context_ends = part.mask, [part.positions.shape[1]] * self.num_rows
            self.absorb()
        ids = state.texts.ids
        logits = outputs.logits[:, -1:].to(ids.device, torch.float32, copy=True)  # [B, 1, V]
        caches.start_recording(prompt.cache)
        caches.start_recording(state.draft.cache)
        state.target = AlignedCache(prompt.cache, self.num_rows, prompt.mask)
        # Where the mixers are unknown, or compiled, a block that is not accepted whole is rolled back whole, and what
        # was accepted is run with the next one: rows must keep one pace then, since a state knows no padding.
        recurrent = state.target.recurrent.indices
        if getattr(self.target.model, "_is_stateful", False) and not recurrent:
            raise ValueError(
                f"{type(self.target.model).__name__} keeps a state that is not in its cache, so that DFlash cannot "
                "roll it back; leave the drafter out."
            )
        self.replays = all(i in taps.mixers for i in recurrent)
        self.one_by_one |= self.num_rows > 1 and not self.replays
        scores = self.processing(state.texts, logits, ids[:, :0])
        first = self._choose(scores)
        forward = Forward(logits, outputs.get("hidden_states"), outputs.get("attentions"))
        self._extend(first, [[token] for token in first[:, 0].tolist()], scores, forward)
        self._go_on()
        self.prefilled = self.watch.mark()
        prompt.is_run()

    def absorb(self) -> None:
        """Take the context into the drafter's cache, without drafting."""
        self.drafting.absorb(self.state)

    def round(self, taps: Taps) -> None:
        """Draft, verify, commit. If it fails half-way, the caches are as before it."""
        state = self.state
        rows = state.texts.rows
        width = min(self.max_proposals, self.max_length - min(state.texts.ends[row] for row in rows) - 1)
        start = self.watch.mark()
        try:
            if state.lag > MAX_LAG:
                self.catch_up()
            with self.processing.trial():
                proposals, q = self.draft(width)
            drafted = self.watch.mark()
            taps.clear()  # of what a processor made the target do
            taps.noting = self.replays
            forward = self.verify(proposals)
            context, calls = taps.concatenate(self.layer_ids)[:, state.lag :], taps.take_calls()
            verified = self.watch.mark()
            accept = self._accept_one_by_one if self.one_by_one else self._accept
            accepted, committed = accept(forward, q, proposals)
        except BaseException:
            state.roll_back()
            raise
        self.commit(context, committed, calls)
        self._go_on()
        counts = list(zip(rows, accepted, committed, strict=True))
        self.marks.append((proposals.shape[1], counts, start, drafted, verified, self.watch.mark()))

    def draft(self, width: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Propose the next tokens, at most `width`; see [`Drafting.propose`]."""
        return self.drafting.propose(self.state, width)

    def verify(self, proposals: torch.Tensor) -> Forward:
        """Run the target on the anchor and `proposals` `(rows, width)`: `width + 1` slots."""
        state, num_slots = self.state, proposals.shape[1] + 1
        inputs = self._inputs(torch.cat([state.unseen, proposals], dim=1), num_logits=num_slots if state.lag else None)
        outputs = self.target.model(**inputs, **self.collector.asked)
        logits = outputs.logits[:, -num_slots:].to(proposals.device, torch.float32)
        windows = caches.windows_of(state.target.cache) if "output_attentions" in self.collector.asked else []
        return Forward(logits, outputs.get("hidden_states"), outputs.get("attentions"), windows)

    def catch_up(self) -> None:
        """Run the target on what its cache lags behind."""
        state = self.state
        self.target.model(**self._inputs(state.unseen[:, :-1], num_logits=1))
        self.more_forwards += 1
        state.target.keep([state.lag] * len(state.texts.rows))
        state.lag = 0

    def _inputs(self, ids: torch.Tensor, num_logits: int | None) -> dict:
        """For a forward of the target on tokens `(rows, n)` after its cache."""
        state = self.state
        positions = state.anchor_position - state.lag + torch.arange(ids.shape[1], device=ids.device)
        # A row that is nearer to the end than others must not ask for positions that the target may not have.
        positions = positions.minimum(state.last_position)
        mask = state.target.mask_with(*ids.shape)
        return self.prompt.later_inputs(ids, positions, state.position_offsets, mask, num_logits)

    def commit(self, context: torch.Tensor, committed: list[int], calls: dict[int, MixerCall]) -> None:
        """
        Move the target's cache, the anchors and the pending context on.

        Args:
            context (`torch.Tensor` of shape `(rows, width + 1, M * H)`): of the block.
            committed (`list[int]`): how many of its tokens each row has passed.
            calls (`dict[int, MixerCall]`): of the recurrent layers.
        """
        state, most = self.state, max(committed)
        steps = torch.arange(most, device=state.anchor.device)
        counts = torch.tensor(committed, device=steps.device).unsqueeze(1)
        mask = (steps < counts).long() if min(committed) < most else None
        num_slots = context.shape[1]
        context, positions = context[:, :most], state.anchor_position + steps
        if self.drafting.over:
            pass  # nobody will ask for it
        elif state.context.shape[1] == 0:
            state.context, state.context_positions = context, positions
            state.context_mask, state.context_ends = mask, committed
        elif self.num_rows == 1:  # nothing was drafted, since the text ends here; its last context may still be left
            state.context = torch.cat([state.context, context], dim=1)
            state.context_positions = torch.cat([state.context_positions, positions], dim=1)
            state.context_ends = [state.context.shape[1]]
        state.anchor_position = state.anchor_position + counts
        if self.replays or min(committed) == num_slots:
            state.target.keep([state.lag + count for count in committed], calls=calls)
            state.lag = 0
        else:
            state.target.roll_back()
            state.lag += most

    def leave_cache(self) -> None:
        """
        Leave the target's cache as plain decoding does, for the caller to go on with.

        Of one row it is so already, and the drafter's goes with it. Of several, the loop's own holds its rows
        elsewhere once they were accepted at different speeds, so every row is computed anew, what follows its end
        included.
        """
        state = self.state
        if self.num_rows > 1:
            self.prompt.run_again(state.texts.ids[:, self.prompt_columns : -1], self.config.prefill_chunk_size)
            return
        if state.lag:
            self.catch_up()
        if not self.drafting.over:
            if state.context.shape[1]:
                self.absorb()
            caches.leave_draft(state.target.cache, self.drafter.config, state.draft)

    def statistics(self) -> GenerationStatistics:
        """
        The numbers of the call, once it is over. Where rows are written on until the last one has stopped, what is cut
        off in the end does not count.
        """
        rounds, room = [], [self.state.texts.ids.shape[1] - self.prompt_columns - 1] * self.num_rows
        for width, counts, *marks in self.marks:
            seconds = [self.watch.seconds(a, b) / len(counts) for a, b in pairwise(marks)]
            for row, accepted, committed in counts:
                used = min(committed, room[row])
                room[row] -= used
                rounds += [RoundRecord(width, accepted, used, *seconds, row)] if used else []
        return GenerationStatistics(
            self.prompt.num_columns,
            self.watch.seconds(self.start, self.prefilled),
            rounds,
            target_forwards=self.more_forwards + len(self.marks),
            texts=self.num_rows,
            calls=1,
        )

    def _accept(
        self, forward: Forward, q: torch.Tensor | None, proposals: torch.Tensor
    ) -> tuple[list[int], list[int]]:
        """
        Extend every text by the longest prefix of `proposals` `(rows, width)` that the target keeps and its own token.

        Returns:
            `(accepted, committed)`: for each row, how many proposals are valid, and how many tokens it got.
        """
        scores = self.processing(self.state.texts, forward.logits, proposals)
        block, accepted, tokens = self._judge(scores, q, proposals)
        new = [row[: count + 1] for row, count in zip(tokens, accepted, strict=True)]
        return accepted, self._extend(block, new, scores, forward)

    def _accept_one_by_one(
        self, forward: Forward, q: torch.Tensor | None, proposals: torch.Tensor
    ) -> tuple[list[int], list[int]]:
        """
        As `_accept`, slot by slot, until a row does not accept or has reached its end: every text grows by as many.

        A prefix of what a row would accept has the target's law too, because where the others stop does not depend on
        what comes later in this one.
        """
        rows, ended = len(proposals), self.stopped.count(None)
        accepted, committed = [0] * rows, 0
        for slot in range(proposals.shape[1] + 1):
            proposal = proposals[:, slot : slot + 1]  # none in the last slot
            law = None if q is None else q[:, slot : slot + 1]
            scores = self.processing(self.state.texts, forward.logits[:, slot : slot + 1], proposal[:, :0])
            block, valid, tokens = self._judge(scores.expand(-1, 1 + proposal.shape[1], -1), law, proposal)
            self._extend(block[:, :1], [row[:1] for row in tokens], scores, forward, slot)
            accepted, committed = [a + b for a, b in zip(accepted, valid, strict=True)], committed + 1
            if not all(valid) or self.stopped.count(None) < ended:
                break
        return accepted, [committed] * rows

    def _extend(
        self, block: torch.Tensor, new: list[list[int]], scores: torch.Tensor, forward: Forward, slot: int = 0
    ) -> list[int]:
        """
        Append the tokens `new` of each row, the first of `block` `(rows, n)`, up to the one that stops its text.

        Args:
            scores (`torch.Tensor` of shape `(rows, n, V)`): of those tokens.
            slot (`int`, *optional*, defaults to 0): of `forward`, that the first of them comes from.

        Returns:
            `list[int]`: how many they were.
        """
        state, texts = self.state, self.state.texts
        self.collector.add(texts, [len(tokens) for tokens in new], scores, forward, slot)
        stops = self.stopping.first_stops(texts, block, new, self.collector.scores_before)
        counts = []
        for row, tokens, stop in zip(texts.rows, new, stops, strict=True):
            if stop is not None and self.stopped[row] is None:
                self.stopped[row] = texts.ends[row] + stop
            room = self.max_length - texts.ends[row]
            counts.append(stop if self.pads and stop else min(len(tokens), room))
        index = torch.tensor(counts, device=block.device).unsqueeze(1) - 1
        state.anchor = block.gather(1, index)
        state.texts = texts.extended(block, counts, self.pad_id)
        self.collector.cut(state.texts)
        return counts

    def _go_on(self) -> None:
        """Stream what is settled, and drop the rows that are done."""
        state, texts = self.state, self.state.texts
        done = [stop for stop in self.stopped if stop is not None]
        last = max(done) if len(done) == self.num_rows else None  # where the longest row stops, once that is known
        if self.pads:
            entries = [i for i, row in enumerate(texts.rows) if self.stopped[row] is None]
        else:
            goal = self.max_length if last is None else last
            entries = [i for i, row in enumerate(texts.rows) if texts.ends[row] < goal]
        writing = [texts.ends[texts.rows[i]] for i in entries]
        self._stream(min([last or texts.ids.shape[1], *writing]))
        state.select(entries)
        if not entries:
            state.texts.ids = state.texts.ids[:, :last]

    def _stream(self, column: int) -> None:
        """Hand what all rows say up to `column` to the streamer: of one row all new tokens, of several one by one."""
        if self.streamer is None or column <= self.streamed:
            return
        new = self.state.texts.ids[:, self.streamed : column].cpu()
        for tokens in [new[0]] if self.num_rows == 1 else new.unbind(1):
            self.streamer.put(tokens)
        self.streamed = column

    def _choose(self, scores: torch.Tensor) -> torch.Tensor:
        """The target's own tokens: argmax or a draw."""
        return verification.draw(scores.softmax(-1)) if self.sampling else scores.argmax(-1)

    def _judge(
        self, scores: torch.Tensor, q: torch.Tensor | None, proposals: torch.Tensor
    ) -> tuple[torch.Tensor, list[int], list[list[int]]]:
        """
        Which of `proposals` `(rows, n)` the target keeps, by its `scores` `(rows, n + 1, V)`.

        Returns:
            `(block, accepted, tokens)`: ids `(rows, n + 1)` that begin with what is kept and the target's own token,
            how many proposals of each row are kept, and `block` as lists. Only here does a round wait for the device,
            and learns what became of the draft.
        """
        if self.drawing:
            jointly = self.verifier == "block" and not self.one_by_one  # which needs the scores of all slots
            accept = verification.block if jointly else verification.rejection
            verdict = accept(scores.softmax(-1), q, proposals)
        else:
            verdict = verification.match(self._choose(scores), proposals)
        block = torch.cat([proposals, verdict.token.unsqueeze(1)], dim=1)
        block = block.scatter(1, verdict.accepted.unsqueeze(1), verdict.token.unsqueeze(1))
        finite = self.drafting.take_finite(verdict.accepted)
        numbers = torch.cat([verdict.accepted.unsqueeze(1), finite, block], dim=1).tolist()
        if not numbers[0][1]:
            self.drafting.end()
        return block, [accepted for accepted, *_ in numbers], [tokens for _, _, *tokens in numbers]


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
    min_confidence: float | None = None,
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
    pairing.check(target, drafter)
    if stop_strings is not None:
        if tokenizer is None:
            raise ValueError("stop_strings need the tokenizer: pass tokenizer=... beside them.")
        stopping_criteria = StoppingCriteriaList([*stopping_criteria, StopStringCriteria(tokenizer, stop_strings)])
    options.check(generation_config, verifier, num_assistant_tokens)
    options.check_confidence(min_confidence, drafter.config)
    options.check_inputs(generation_config, model_kwargs, model.config.model_type, target.text_config.model_type)
    if len(input_ids) > 1 and target.has_adapters_by_row():
        raise ValueError("adapter_names: rows with adapters of their own are not supported; leave the drafter out.")
    prompt = Prompt(target, input_ids, model_kwargs, getattr(generation_config, "_mask_length", None))
    decoding = Decoding(
        target,
        drafter,
        prompt,
        processors=logits_processor,
        criteria=stopping_criteria,
        config=generation_config,
        verifier=verifier,
        num_assistant_tokens=num_assistant_tokens,
        min_confidence=min_confidence,
        streamer=streamer,
    )
    if streamer is not None:
        streamer.put(input_ids.cpu())
    try:
        with target.capture(decoding.layer_ids, mixers=True) as taps:
            decoding.prefill(taps)
            while decoding.state.texts.rows:
                decoding.round(taps)
    except BaseException:
        prompt.put_back()  # of a single row, the cache is at the last commit, once the prompt has been run
        raise
    finally:
        caches.stop_recording(prompt.cache)
    if streamer is not None:
        streamer.end()
    drafter.last_statistics = statistics = decoding.statistics()
    as_dict = generation_config.return_dict_in_generate
    if as_dict or compat.is_of_the_caller(prompt.cache):
        decoding.leave_cache()
    ids = decoding.state.texts.ids
    return decoding.collector.result(ids, prompt.cache, statistics) if as_dict else ids
