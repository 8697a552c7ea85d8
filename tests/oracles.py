"""What the decoding loop is compared with: drafters whose mistakes are known, naive loops without caches, counters."""

import functools
import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from tiny import MASK, sharpen
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    LogitsProcessor,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    StoppingCriteria,
)

from dflash_hf import DFlashConfig, DFlashDraftModel


ECHO = 7  # the one token that the echo pair writes

# Hidden size = vocabulary, so that the head is square and some hidden state gives any wanted token.
_SQUARE = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_MIXED = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
_EXPERTS = {"num_experts_per_tok": 2}
_GEMMA = {**_MIXED, "query_pre_attn_scalar": 16, "tie_word_embeddings": False, "final_logit_softcapping": 2.0}
_DELTA = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_ROPE_3D = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [3, 3, 2]}
_PARTIAL_ROPE_3D = {**_ROPE_3D, "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.25}
FAMILIES = {
    "qwen3": {},
    "llama": {},
    "qwen2": {},
    "glm4": {},
    "smollm3": {},
    "mistral": {"sliding_window": 8},
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA,
    "gemma4_text": {
        **_MIXED,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],  # the last is always full
        "tie_word_embeddings": False,
        "final_logit_softcapping": 2.0,
        "global_head_dim": 16,
        "num_global_key_value_heads": 2,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "vocab_size_per_layer_input": 64,
    },
    "gpt_oss": {**_MIXED, **_EXPERTS, "num_local_experts": 4},
    "olmo3": _MIXED,
    "qwen3_moe": {**_EXPERTS, "num_experts": 4, "moe_intermediate_size": 16},
    "phi3": {"sliding_window": 8},
    "hyperclovax": {"logits_scaling": 0.25},
    "granite": {"embedding_multiplier": 12.0, "logits_scaling": 8.0, "residual_multiplier": 0.22},
    "cohere2": {**_MIXED, "logit_scale": 0.0625, "tie_word_embeddings": False},
    "deepseek_v3": {
        **_EXPERTS,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "n_routed_experts": 4,
        "moe_intermediate_size": 16,
        "n_group": 1,
        "topk_group": 1,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
    },
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
    "qwen3_next": {
        **_DELTA,
        **_EXPERTS,
        "num_experts": 4,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    },
    "qwen3_5_text": {**_DELTA, "rope_parameters": _PARTIAL_ROPE_3D},
    "olmo_hybrid": {**_DELTA, "linear_num_key_heads": 4},
    "falcon_h1": {
        "mamba_d_ssm": 64,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_n_groups": 1,
        "mamba_d_state": 8,
        "mamba_chunk_size": 8,
        "lm_head_multiplier": 0.25,
    },
}
HYBRIDS = ["lfm2", "qwen3_next", "qwen3_5_text", "falcon_h1"]

IMAGE, VISION_START, VISION_END = 58, 60, 61  # tokens that the targets below take for an image, its start, its end
_TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": 59,
    "vision_start_token_id": VISION_START,
    "vision_end_token_id": VISION_END,
}
_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 4,
    "num_position_embeddings": 16,
}
# Targets whose text model is a part: the fields of their configuration, and of the text's.
WRAPPED = {
    "qwen3_5": ({"vision_config": _VISION, **_TOKENS}, FAMILIES["qwen3_5_text"]),
    "qwen3_vl": (
        {"vision_config": {**_VISION, "deepstack_visual_indexes": [0]}, **_TOKENS},
        {"rope_parameters": _ROPE_3D},
    ),
    "llava": (
        {
            "image_token_id": IMAGE,
            "vision_feature_layer": -1,
            "vision_config": {
                "model_type": "clip_vision_model",
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 8,
                "patch_size": 4,
            },
        },
        {"model_type": "llama"},
    ),
}


# ------------------------------------------------------------------------------------------------------- models
def square_target(family: str = "qwen3", *, attention: str = "sdpa", seed: int = 0, **overrides) -> PreTrainedModel:
    """A random target of `family` with 3 layers whose head is a square matrix; it never ends a text."""
    if family in WRAPPED:
        fields, text = WRAPPED[family]
        config = AutoConfig.for_model(family, **fields, text_config={**_SQUARE, **text, **overrides})
        auto = AutoModelForImageTextToText
    else:
        config = AutoConfig.for_model(family, **{**_SQUARE, **FAMILIES[family], **overrides})
        auto = AutoModelForCausalLM
    with torch.random.fork_rng():
        torch.manual_seed(seed)  # some families draw vectors too, which `sharpen` only varies
        target = auto.from_config(config, dtype=torch.float32, attn_implementation=attention).eval()
    sharpen(target, seed)
    target.generation_config.update(pad_token_id=0, bos_token_id=1, eos_token_id=None)
    return target


def drafter_for(target: PreTrainedModel, block: int = 4, *, seed: int = 1, **fields) -> DFlashDraftModel:
    """A random drafter of one layer for `target`, with the same attention backend."""
    defaults = {"num_hidden_layers": 1, "target_layer_ids": [0, 1], "mask_token_id": MASK, "block_size": block}
    drafter = DFlashDraftModel(DFlashConfig.from_target(target.config, **{**defaults, **fields})).eval()
    drafter.set_attn_implementation(target.config._attn_implementation)
    sharpen(drafter, seed)
    return drafter


@torch.no_grad()
def echo_pair(block: int = 4, **overrides) -> tuple[PreTrainedModel, DFlashDraftModel]:
    """A target that always writes `ECHO`, by a wide margin, and a drafter that always proposes it."""
    target = square_target(num_hidden_layers=2, **overrides)
    drafter = drafter_for(target, block, target_layer_ids=[0])
    for model in (target, drafter):
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.fill_(1.0)
            elif name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
    target.get_input_embeddings().weight.abs_().add_(0.1)
    # No two rows are alike, so that there are no ties among the others when `ECHO` is banned.
    rows = torch.arange(target.config.vocab_size)
    head = -(0.1 + 0.01 * ((rows - 8) % 64).float())
    head[ECHO] = 1.0
    target.get_output_embeddings().weight.copy_(head[:, None].expand(-1, target.config.hidden_size))
    return target, drafter


class Force(LogitsProcessor):
    """Forces `token` wherever the text before it has a length divisible by `every`."""

    stateless = True

    def __init__(self, token: int = 3, every: int = 5):
        self.token, self.every = token, every

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] % self.every == 0:
            scores = torch.full_like(scores, -float("inf"))
            scores[:, self.token] = 0.0
        return scores


class Automaton(LogitsProcessor):
    """
    Allows what an automaton allows that has read the text so far, token by token; it must never be shown a token that
    it does not allow, nor miss one, nor see one twice. Token t leads from state s to (3 s + t) mod 64.
    """

    def __init__(self, prompt: int, width: int = 6):
        self.columns, self.width, self.states, self.asked = prompt, width, None, []

    def allowed(self, state: int) -> list[int]:
        return [1 + (state + 7 * i) % 62 for i in range(self.width)]

    def __call__(self, input_ids, scores):
        rows = input_ids.tolist()
        if self.states is None:
            self.states = [0] * len(rows)
        else:
            for row, text in enumerate(rows):
                if text[-1] != 0:  # padding of a row that has ended
                    assert text[-1] in self.allowed(self.states[row]), "shown a token that is not allowed"
                    self.states[row] = (3 * self.states[row] + text[-1]) % 64
        assert input_ids.shape[1] == self.columns, "not asked column after column"
        self.columns += 1
        self.asked.append(rows)
        mask = torch.full_like(scores, -float("inf"))
        for row, state in enumerate(self.states):
            mask[row, self.allowed(state)] = 0.0
        return scores + mask


class StopAt(StoppingCriteria):
    """Row b stops at column `columns[b]`."""

    def __init__(self, columns: list[int], stateless: bool = True):
        self.columns, self.stateless = torch.tensor(columns), stateless

    def __call__(self, input_ids, scores, **kwargs):
        return self.columns[: len(input_ids)] <= input_ids.shape[1]


# -------------------------------------------------------------------------------------------- scripted drafters
Mistake = Callable[[int, int], bool]  # (index in the text, slot) to whether the proposal there is wrong


def never(position: int, slot: int) -> bool:
    return False


def at_slots(*slots: int) -> Mistake:
    return lambda position, slot: slot in slots


def at_positions(*positions: int) -> Mistake:
    return lambda position, slot: position in positions


def at_rate(rate: float, seed: int = 0) -> Mistake:
    """Wrong at a fixed random share `rate` of the positions."""
    return lambda position, slot: random.Random(f"{seed} {position}").random() < rate


def script(
    drafter: DFlashDraftModel,
    target: PreTrainedModel,
    text: torch.Tensor,
    wrong: Mistake = never,
    *,
    offset: int | list[int] = 0,
    rows: Callable[[], list[int]] | None = None,
) -> list[torch.Tensor]:
    """
    Make `drafter` propose `text` `(B, n)` by putting its last hidden state where the head finds the wanted token.

    Everything before its last norm still runs, so its cache and its positions are real. `offset` is the number of
    padding tokens before position 0, of all rows or of each; `rows` says which rows of `text` a call is about (all).
    In row b of several, the mistakes are those of the index plus 1000 b. Returns the list in which the positions of
    every draft are noted; calls without positions or without slots are left alone.
    """
    inverse = torch.linalg.pinv(target.get_output_embeddings().weight.detach().double())  # [H, V]
    texts, vocabulary = text.tolist(), inverse.shape[1]
    offsets = [offset] * len(texts) if isinstance(offset, int) else offset
    given: list[bool] = []
    calls: list[torch.Tensor] = []

    def note(module, args, kwargs):
        given.append("position_ids" in kwargs and kwargs["noise_embeds"].shape[1] > 0)
        if given[-1]:
            calls.append(kwargs["position_ids"].clone())

    def replace(module, args, hidden):
        if not given[-1]:
            return None
        wanted = []
        for row, slots in zip(
            rows() if rows else range(len(texts)), calls[-1][:, -hidden.shape[1] :].tolist(), strict=True
        ):
            for slot, position in enumerate(slots):
                index = position + offsets[row]
                token = texts[row][index] if index < len(texts[row]) else 0
                wanted.append((token + 1) % vocabulary if wrong(index + 1000 * row, slot) else token)
        return (100 * inverse[:, wanted].T).view_as(hidden).to(hidden)

    drafter.register_forward_pre_hook(note, with_kwargs=True)
    drafter.norm.register_forward_hook(replace)
    return calls


def predicted_forwards(prompt: int, new: int, block: int, wrong: Mistake = never, cap: int | None = None) -> int:
    """Forwards of the target that `new` greedy tokens need when exactly the proposals in `wrong` are wrong."""
    forwards, anchor, end = 1, prompt, prompt + new
    while anchor < end - 1:
        width = min(block - 1, cap or block - 1, end - anchor - 2)
        right = itertools.takewhile(lambda slot: not wrong(anchor + slot, slot), range(1, width + 1))  # noqa: B023
        anchor += len(list(right)) + 1
        forwards += 1
    return forwards


def predicted_batch_forwards(
    prompt: int,
    ends: list[int],
    block: int,
    wrong: Mistake = never,
    *,
    longest: int | None = None,
    cap: int | None = None,
    one_pace: bool = False,
) -> int:
    """
    Forwards of the target that rows need which start at column `prompt` and end at `ends`, when exactly the proposals
    in `wrong` are wrong (of row b: at the index plus 1000 b) and a row that has ended is dropped.

    `longest` is the length that `generate` was given, `cap` the most proposals of a round; with `one_pace` no row goes
    further than the slowest, nor beyond the end of one.
    """
    forwards, anchors, longest = 1, dict.fromkeys(range(len(ends)), prompt), longest or max(ends)
    anchors = {row: anchor for row, anchor in anchors.items() if anchor < ends[row] - 1}
    while anchors:
        width = min(block - 1, cap or block, longest - min(anchors.values()) - 2)
        steps = {}
        for row, anchor in anchors.items():
            right = itertools.takewhile(
                lambda slot: not wrong(anchor + slot + 1000 * row, slot),  # noqa: B023
                range(1, width + 1),
            )
            steps[row] = min(len(list(right)) + 1, ends[row] - 1 - anchor)
        slowest = min(steps.values())
        anchors = {row: anchor + (slowest if one_pace else steps[row]) for row, anchor in anchors.items()}
        anchors = {row: anchor for row, anchor in anchors.items() if anchor < ends[row] - 1}
        forwards += 1
    return forwards


# -------------------------------------------------------------------------------------------------- naive loops
def plain(target: PreTrainedModel, *args, **options):
    """What the class's own `generate` returns, attached or not."""
    return type(target).generate(target, *args, **options)


@torch.no_grad()
def naive_greedy(target: PreTrainedModel, prompt: torch.Tensor, new: int) -> torch.Tensor:
    """Greedy decoding without any cache."""
    text = prompt
    for _ in range(new):
        text = torch.cat([text, target(text, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    return text


@torch.no_grad()
def naive_features(target: PreTrainedModel, text: torch.Tensor, layer_ids: list[int]) -> torch.Tensor:
    """Outputs of the decoder layers `layer_ids` (not the last), side by side, from one forward over `text`."""
    states = target(text, use_cache=False, output_hidden_states=True).hidden_states
    return torch.cat([states[i + 1] for i in layer_ids], dim=-1)


@torch.no_grad()
def naive_draft(target: PreTrainedModel, drafter: DFlashDraftModel, text: torch.Tensor, width: int) -> torch.Tensor:
    """Logits of `width` proposals after `text`, whose last token is the anchor: no cache, nothing kept."""
    config = drafter.config
    block = torch.full((1, config.block_size), config.mask_token_id)
    block[0, 0] = text[0, -1]
    hidden = drafter(
        noise_embeds=target.get_input_embeddings()(block),
        context_hidden_states=naive_features(target, text[:, :-1], config.target_layer_ids),
    ).last_hidden_state
    return target.get_output_embeddings()(hidden[:, 1 : width + 1])


def naive_rounds(
    target: PreTrainedModel, drafter: DFlashDraftModel, full: torch.Tensor, prompt: int
) -> list[list[int]]:
    """The proposals of every round of a greedy call that writes `full` `(1, n)` after a prompt of `prompt` tokens."""
    rounds, anchor, end = [], prompt, full.shape[1]
    while anchor < end - 1:
        width = min(drafter.config.block_size - 1, end - anchor - 2)
        proposals = naive_draft(target, drafter, full[:, : anchor + 1], width).argmax(-1)[0].tolist()
        truth = full[0, anchor + 1 : anchor + 1 + width].tolist()
        agree = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(proposals, truth, strict=True))
        anchor += len(list(agree)) + 1
        rounds.append(proposals)
    return rounds


# ----------------------------------------------------------------------------------------------------- counters
class Calls(list):
    """One entry for each forward: its keyword arguments."""


@contextmanager
def counting(model: torch.nn.Module) -> Iterator[Calls]:
    """Note every call of `model.forward`."""
    calls, forward = Calls(), model.forward

    @functools.wraps(forward)
    def noting(*args, **kwargs):
        calls.append({key: v.clone() if isinstance(v, torch.Tensor) else v for key, v in kwargs.items()})
        return forward(*args, **kwargs)

    model.forward = noting
    try:
        yield calls
    finally:
        del model.forward


def hooks_of(model: torch.nn.Module) -> dict[str, int]:
    """Number of hooks of every kind on every module that has any."""
    kinds = [name for name in vars(torch.nn.Module()) if name.endswith(("_hooks", "_pre_hooks"))]
    counts = {f"{name}.{kind}": len(getattr(module, kind)) for name, module in model.named_modules() for kind in kinds}
    return {key: count for key, count in counts.items() if count}


def prompt_of(length: int, seed: int = 0) -> torch.Tensor:
    """A random prompt `(1, length)` without pad and mask."""
    return torch.randint(1, MASK, (1, length), generator=torch.Generator().manual_seed(seed))


def word_tokenizer(**special) -> PreTrainedTokenizerFast:
    """Token `i` is the word `<i>`; token 0 is a word by which transformers probes tokenizers for stop strings."""
    words = {"abcdef": 0, **{f"<{i}>": i for i in range(1, 64)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<1>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
