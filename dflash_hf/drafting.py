"""Drafting: the block goes through the drafter, and its slots say what they propose."""

import torch
from transformers.utils import logging

from . import compat, verification
from .modeling_dflash import DFlashDraftModel
from .outputs import Processing, Texts
from .proposal import ProposalHead, embed
from .state import DecodeState
from .target import Target, device_of


logger = logging.get_logger(__name__)


class Drafting:
    """
    The drafter during one call.

    Args:
        target (`Target`), drafter (`DFlashDraftModel`): the pair.
        processing (`Processing`): what shapes the proposals' law.
        drawing (`bool`): whether proposals are drawn from it; if not, the likeliest are taken.
        min_confidence (`float`, *optional*): verify no further than to the first proposal that the drafter's
            confidence head gives less.

    Attributes:
        over (`bool`): whether nothing more is drafted in this call.
    """

    def __init__(
        self,
        target: Target,
        drafter: DFlashDraftModel,
        processing: Processing,
        drawing: bool,
        min_confidence: float | None = None,
    ):
        self.target, self.drafter, self.config = target, drafter, drafter.config
        self.processing, self.drawing, self.min_confidence = processing, drawing, min_confidence
        self.head = ProposalHead(drafter, target)
        self.place = device_of(drafter), drafter.dtype
        self.over = False
        self._finite: torch.Tensor | None = None

    def propose(self, state: DecodeState, width: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """
        Propose the next tokens, at most `width`, and take the context into the drafter's cache.

        Returns:
            `(proposals, q)`: ids `(rows, n)`, and where they are drawn, their law, `(rows, n, V)`.
        """
        if width == 0 or self.over:
            none = state.anchor[:, :0]
            return none, torch.zeros(*none.shape, self.target.num_logits, device=none.device)
        if self.config.drafting == "autoregressive":
            proposals, q = self._one_by_one(state, width)
        else:
            block = state.anchor.new_full((len(state.anchor), self.config.block_size), self.config.mask_token_id)
            block[:, :1] = state.anchor
            hidden = self._denoise(state, block)[:, -self.config.num_proposals :]
            proposals, q = self._choose(state.texts, hidden[:, :width], state.anchor[:, 0])
            if self.min_confidence is not None:
                number = self._num_confident(hidden, torch.cat([state.anchor, proposals], dim=1))
                proposals, q = proposals[:, :number], q if q is None else q[:, :number]
        state.absorbed()
        return proposals, q

    def absorb(self, state: DecodeState) -> None:
        """Take the context into the drafter's cache, without drafting."""
        self._denoise(state, state.texts.ids.new_empty(len(state.context), 0))
        state.absorbed()

    def take_finite(self, like: torch.Tensor) -> torch.Tensor:
        """Whether the latest draft was finite, `(rows, 1)`, for `like` `(rows,)`; later ones are asked about anew."""
        finite, self._finite = self._finite, None
        return torch.ones_like(like).unsqueeze(1) if finite is None else finite.expand(len(like), 1)

    def end(self) -> None:
        """Draft no more, since a draft was not finite: the rest is plain decoding."""
        self.over = True
        logger.warning(
            "The drafter's states are not finite (infinite or not a number), so the rest of this text is decoded "
            "without it. A drafter that was trained in bfloat16 may overflow in float16: load it in its own dtype."
        )

    def _num_confident(self, hidden: torch.Tensor, tokens: torch.Tensor) -> int:
        """
        How many of the proposals are worth verifying in some row, for slots `(rows, n, H)` and the anchor with what
        they proposed, `(rows, m + 1)`.

        Of a slot, its hidden state and the tokens before it are looked at, but not its own, so that what is sampled
        keeps its law.
        """
        number = tokens.shape[1] - 1
        head, hidden = self.drafter.confidence_head, hidden[:, :number]
        with_markov = self.config.confidence_head == "markov"
        before = self.drafter.proposal_head.before(tokens[:, :-1].to(hidden.device)) if with_markov else None
        confident = (head(hidden, before) >= self.min_confidence).long().cumprod(1).sum(1)
        return int(confident.max())

    def _one_by_one(self, state: DecodeState, width: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A forward for each proposal; the drafter's cache holds the block's earlier slots meanwhile."""
        tokens, laws = state.anchor, []
        for i in range(width):
            texts = state.texts.followed_by(tokens[:, 1:])
            proposal, q = self._choose(texts, self._denoise(state, tokens[:, -1:], start=i), tokens[:, -1])
            tokens = torch.cat([tokens, proposal], dim=1)
            laws.append(q)
            # What must be asked as in plain decoding is not asked behind the end of a text.
            if self.processing.as_plain and not self.processing.end_ids.isdisjoint(proposal.flatten().tolist()):
                break
            if not proposal.numel():
                break
        return tokens[:, 1:], torch.cat(laws, dim=1) if self.drawing else None

    def _denoise(self, state: DecodeState, ids: torch.Tensor, *, start: int = 0) -> torch.Tensor:
        """Hidden states `(rows, n, H)` of the block's slots from `start` on, which hold `ids` `(rows, n)`."""
        positions = state.anchor_position + torch.arange(start, start + ids.shape[1], device=ids.device)
        mask = state.draft.mask_with(len(ids), state.fresh, start + ids.shape[1])
        new = slice(None) if start == 0 else slice(0, 0)  # the context goes in with the first slots
        return self.drafter(
            noise_embeds=embed(self.drafter, self.target, ids).to(*self.place),
            context_hidden_states=state.context[:, new].to(*self.place),
            position_ids=torch.cat([state.context_positions[:, new], positions], dim=1).to(self.place[0]),
            attention_mask=mask if mask is None else mask.to(self.place[0]),
            **{compat.CACHE: state.draft.cache},
        ).last_hidden_state

    def _choose(
        self, texts: Texts, hidden: torch.Tensor, previous: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """
        Proposals of the slots with hidden states `(rows, n, H)`, the first after `texts`, which end with `previous`
        `(rows,)`, and their law.
        """
        device = texts.ids.device
        finite = hidden.isfinite().all().to(device)
        self._finite = finite if self._finite is None else self._finite & finite
        logits = self.head.logits(hidden)  # [rows, n, shortlist or V]
        correct = self.head.begin(hidden)
        if correct is None and not self.drawing and not self.processing.for_drafts:
            return self.head.greedy(logits).to(device), None
        # A drafter that overflows must not spoil the law of slots that are fine.
        logits = logits.nan_to_num()

        def said(slot: int, tokens: torch.Tensor) -> torch.Tensor:
            """Logits of a slot after the proposals `tokens`."""
            found = correct(slot, logits[:, slot], tokens[:, -1] if slot else previous)
            self._finite = self._finite & ~(found.isnan() | found.isposinf()).any().to(device)
            found = found.nan_to_num(neginf=-torch.inf)  # which is no mistake: a token that is not proposed
            return self.head.over_vocabulary(found, self.target.num_logits).to(device)

        if correct is None:
            said = self.head.over_vocabulary(logits, self.target.num_logits).to(device)
        pick = _draw if self.drawing else _likeliest
        proposals, scores = self.processing.walk(texts, said, hidden.shape[1], pick)
        return proposals, scores.softmax(-1) if self.drawing else None


def _likeliest(scores: torch.Tensor) -> torch.Tensor:
    return scores.argmax(-1)


def _draw(scores: torch.Tensor) -> torch.Tensor:
    return verification.draw(scores.softmax(-1))
