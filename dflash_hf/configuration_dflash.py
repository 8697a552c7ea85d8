"""`DFlashConfig`: what a drafter is, in the flat fields that the native loop of transformers reads too."""

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


LAYER_TYPES = ("full_attention", "sliding_attention")
DRAFTING = ("parallel", "autoregressive")
CONDITIONING = ("kv", "input")
_ROPE = ("default", *(name for name in ROPE_INIT_FUNCTIONS if name != "default"))
INPUT_EMBEDDINGS = ("module", "table")
MARKOV_HEADS = ("markov", "gated_markov", "rnn_markov")
PROPOSAL_HEADS = ("independent", *MARKOV_HEADS, "selector", "domino")
EMBEDDING_TAP = -1  # stands among `target_layer_ids` for the output of the target's embedding


def default_target_layer_ids(num_target_layers: int, num_taps: int) -> list[int]:
    """
    Spread `num_taps` decoder layers evenly between layer 1 and the third layer from the end.

    This is the default of the published recipe; the last layers are left out because the final one is ambiguous (its
    entry in `hidden_states` is taken after the final norm).
    """
    if num_taps == 1:
        return [num_target_layers // 2]
    step = (num_target_layers - 4) / max(1, num_taps - 1)
    ids = [round(1 + i * step) for i in range(num_taps)]
    if num_taps < 1 or step < 0 or len(set(ids)) < num_taps:
        raise ValueError(
            f"num_taps={num_taps}: a target of {num_target_layers} layers does not have that many layers to tap. "
            "Ask for fewer taps (at least one), or pass target_layer_ids."
        )
    return ids


@strict
class DFlashConfig(PreTrainedConfig):
    r"""
    Configuration of a [`DFlashDraftModel`].

    The geometry fields (`hidden_size` to `rope_parameters`) mean what they mean in Qwen3 and describe the *drafter*;
    `hidden_size` equals the target's, because the drafter works on the target's embeddings.

    Args:
        block_size (`int`):
            Slots of a block, K: the anchor and K - 1 masks.
        mask_token_id (`int`):
            Row of the target's embedding that stands for "not known yet". It must be a row that text never uses.
        target_layer_ids (`list[int]`):
            Zero-based decoder layers of the target whose *outputs* condition the drafter, in the order in which they
            are concatenated. Layer `i` is `hidden_states[i + 1]` of the target, and -1 the output of its embedding.
        num_target_layers (`int`, *optional*):
            Number of decoder layers of the target, for checking the pair.
        qk_norm (`bool`, *optional*, defaults to `True`):
            RMSNorm on each head of queries and keys, as in Qwen3. Drafters whose layers start as copies of layers of
            a Llama-type target have none.
        layer_types (`list[str]`, *optional*):
            `"full_attention"` or `"sliding_attention"` for each drafter layer; all full by default.
        sliding_window (`int`, *optional*):
            Keys that a query of a sliding layer sees on each side, itself included.
        causal_layers (`list[bool]`, *optional*):
            Whether the slots of a block see only the slots before them, for each layer. Default: as the published
            drafters were trained, sliding layers are causal inside the block and full layers are not; with
            autoregressive drafting all layers are.
        sample_from_anchor (`bool`, *optional*, defaults to `False`):
            What a slot predicts. `False`, fill-in: the token at its own position, so the anchor's slot predicts
            nothing and a block proposes K - 1 tokens. `True`, next-token: the token after its position, so every slot
            predicts and a block proposes K tokens. Weights trained one way are of no use the other way.
        drafting (`str`, *optional*, defaults to `"parallel"`):
            `"parallel"`: one forward over the anchor and K - 1 masks proposes the block. `"autoregressive"`: a forward
            for each proposal; instead of masks the block holds the tokens drafted so far. This needs
            `sample_from_anchor=True` and only causal layers.
        conditioning (`str`, *optional*, defaults to `"kv"`):
            How the features of committed tokens reach the drafter. `"kv"`: as keys and values in every layer (paper,
            section 4.1). `"input"`: as the input sequence before the block, which passes through all layers, each
            token seeing those before it. A drafter without features of the target is
            `conditioning="input", target_layer_ids=[-1]`.
        input_embeddings (`str`, *optional*, defaults to `"module"`):
            What the slots are given of the anchor and the masks. `"module"`: what the target's embedding module
            returns, with whatever it scales (Gemma) or norms. `"table"`: rows of its weight. What a model multiplies
            after its embedding (Granite, Falcon-H1, MiniCPM) is in neither.
        input_embedding_scale (`float`, *optional*, defaults to 1.0):
            Factor on them.
        output_multiplier, final_logit_softcapping (`float`, *optional*):
            Scale and soft-cap of the proposals' logits. By default they are shaped as the target's are.
        draft_vocab_size (`int`, *optional*):
            Size of the shortlist of target tokens that the drafter proposes from. The ids are the buffer
            `draft_token_ids` of the model. `None`: the whole vocabulary.
        own_embeddings, own_head (`bool`, *optional*, defaults to `False`):
            Whether the drafter has an embedding `embed_tokens` or a head `lm_head` (of the shortlist, if there is one)
            in place of the target's.
        own_vocab_size (`int`, *optional*):
            Rows of these and of the tables of heads below; default: `vocab_size`. Later ids share the last row.
        proposal_head (`str`, *optional*, defaults to `"independent"`):
            What a slot knows of the proposals before it. `"independent"`: nothing. `"markov"`, `"gated_markov"`,
            `"rnn_markov"` (DSpark), `"selector"` (DFlash 2), `"domino"`: see [`~heads`].
        proposal_rank (`int`, *optional*):
            Rank of that head.
        selector_top_k (`int`, *optional*):
            Candidates of a selector.
        domino_state_size (`int`, *optional*), domino_prefix (`int`, *optional*, defaults to 0):
            Size of a Domino head's state, and how many proposals it leaves alone.
        confidence_head (`str`, *optional*):
            What a confidence head looks at: `"hidden"`, the slot's hidden state, or `"markov"`, that and what the
            Markov head has of the token before. `None`: there is none.
        conv_kernel_size, conv_group_size (`int`, *optional*):
            Slots and channels that share a kernel of the convolutions around each sub-layer (DFlash 2). `None`: none.
        target_name, target_revision, tokenizer_hash, template_hash (`str`, *optional*):
            Name and Hub revision of the target that the drafter was trained for, and hashes of its tokenizer and chat
            template, as [`~pairing.origin_of`] finds them: [`attach`] compares them with the target at hand.

    The native loop of transformers (`speculation_type="dflash"`) reads neither `sample_from_anchor` nor `drafting`; it
    is for drafters that leave them at their defaults.

    Raises:
        `ValueError`: when fields contradict each other; the message names the field, its value and the rule.
    """

    model_type = "dflash"
    default_theta = 10000.0

    vocab_size: int = 151936
    hidden_size: int = 2560
    intermediate_size: int = 9728
    num_hidden_layers: int = 5
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    head_dim: int = 128
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 40960
    rope_parameters: dict | None = None
    attention_bias: bool = False
    attention_dropout: float | int = 0.0
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    block_size: int = 16
    mask_token_id: int = 0
    target_layer_ids: list[int] | None = None
    num_target_layers: int | None = None
    qk_norm: bool = True
    layer_types: list[str] | None = None
    sliding_window: int | None = None
    causal_layers: list[bool] | None = None
    sample_from_anchor: bool = False
    drafting: str = "parallel"
    conditioning: str = "kv"
    input_embeddings: str = "module"
    input_embedding_scale: float | int = 1.0
    output_multiplier: float | int | None = None
    final_logit_softcapping: float | int | None = None
    draft_vocab_size: int | None = None
    own_embeddings: bool = False
    own_head: bool = False
    own_vocab_size: int | None = None
    proposal_head: str = "independent"
    proposal_rank: int | None = None
    selector_top_k: int | None = None
    domino_state_size: int | None = None
    domino_prefix: int = 0
    confidence_head: str | None = None
    conv_kernel_size: int | None = None
    conv_group_size: int | None = None
    target_name: str | None = None
    target_revision: str | None = None
    tokenizer_hash: str | None = None
    template_hash: str | None = None

    def __post_init__(self, **kwargs):
        if "dflash_config" in kwargs:
            raise ValueError(
                "dflash_config: a nested configuration is another layout's; DFlashDraftModel.from_pretrained reads it."
            )
        if self.layer_types is None:
            self.layer_types = ["full_attention"] * self.num_hidden_layers
        if self.causal_layers is None:
            autoregressive = self.drafting == "autoregressive"
            self.causal_layers = [autoregressive or kind == "sliding_attention" for kind in self.layer_types]
        if self.target_layer_ids is None:
            self.target_layer_ids = default_target_layer_ids(self.num_target_layers or 36, 5)
        if self.own_vocab_size is None and (self.own_embeddings or self.own_head or self.is_sequential):
            self.own_vocab_size = self.vocab_size
        super().__post_init__(**kwargs)
        self._check()

    def _check(self) -> None:
        """Raise `ValueError` for fields that no drafter can have."""
        taps, sliding = self.target_layer_ids, "sliding_attention" in self.layer_types
        head, group = self.proposal_head, self.conv_group_size
        autoregressive = self.drafting == "autoregressive"
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "max_position_embeddings")
        rope = self.rope_parameters
        rules = [
            *((name, getattr(self, name) >= 1, "at least 1") for name in sizes),
            ("head_dim", self.head_dim >= 2 and self.head_dim % 2 == 0, "an even number, for the rotary embedding"),
            ("rms_norm_eps", self.rms_norm_eps > 0, "more than 0"),
            ("rope_parameters", rope.get("rope_type") in _ROPE, f"a rope_type among {', '.join(_ROPE)}"),
            ("rope_parameters", (rope.get("rope_theta") or 0) > 0, "a rope_theta above 0"),
            (
                "block_size",
                2 <= self.block_size <= max(2, self.max_position_embeddings),
                "a block holds the anchor and at least one mask, so at least 2, and not more than "
                f"max_position_embeddings={self.max_position_embeddings}",
            ),
            ("mask_token_id", self.mask_token_id >= 0, "a row of the target's embedding, so at least 0"),
            ("num_hidden_layers", self.num_hidden_layers >= 1, "at least one drafter layer"),
            ("hidden_act", self.hidden_act in ACT2FN, "an activation that transformers has"),
            ("target_layer_ids", len(taps) >= 1, "at least one target layer to tap"),
            (
                "target_layer_ids",
                all(i >= EMBEDDING_TAP for i in taps) and len(set(taps)) == len(taps),
                "zero-based layer ids, or -1 for the embedding, each once",
            ),
            (
                "target_layer_ids",
                self.num_target_layers is None or all(i < self.num_target_layers for i in taps),
                f"layers of a target of {self.num_target_layers} layers",
            ),
            ("layer_types", len(self.layer_types) == self.num_hidden_layers, "one entry for each drafter layer"),
            ("layer_types", set(self.layer_types) <= set(LAYER_TYPES), f"entries among {LAYER_TYPES}"),
            ("causal_layers", len(self.causal_layers) == self.num_hidden_layers, "one entry for each drafter layer"),
            (
                "sliding_window",
                not sliding or (self.sliding_window or 0) >= 1,
                "a positive window, since layer_types has sliding layers",
            ),
            ("drafting", self.drafting in DRAFTING, f"one of {DRAFTING}"),
            ("conditioning", self.conditioning in CONDITIONING, f"one of {CONDITIONING}"),
            ("input_embeddings", self.input_embeddings in INPUT_EMBEDDINGS, f"one of {INPUT_EMBEDDINGS}"),
            (
                "sample_from_anchor",
                self.sample_from_anchor or not autoregressive,
                "True with drafting='autoregressive', where each slot predicts the token after it",
            ),
            (
                "causal_layers",
                all(self.causal_layers) or not autoregressive,
                "True for every layer with drafting='autoregressive', where later slots are not drafted yet",
            ),
            (
                "num_key_value_heads",
                self.num_key_value_heads >= 1 and self.num_attention_heads % self.num_key_value_heads == 0,
                f"a divisor of num_attention_heads={self.num_attention_heads}",
            ),
            (
                "draft_vocab_size",
                self.draft_vocab_size is None or 1 <= self.draft_vocab_size <= self.vocab_size,
                f"between 1 and vocab_size={self.vocab_size}",
            ),
            (
                "own_vocab_size",
                self.own_vocab_size is None or self.own_vocab_size >= (self.draft_vocab_size or 1),
                "rows for every token that is proposed",
            ),
            ("proposal_head", head in PROPOSAL_HEADS, f"one of {PROPOSAL_HEADS}"),
            (
                "proposal_head",
                head == "independent" or not autoregressive,
                "'independent' with drafting='autoregressive'",
            ),
            (
                "proposal_rank",
                head == "independent" or (self.proposal_rank or 0) >= 1,
                f"the rank of the head, at least 1, with proposal_head={head!r}",
            ),
            (
                "selector_top_k",
                head != "selector" or (self.selector_top_k or 0) >= 1,
                "at least 1 with proposal_head='selector'",
            ),
            (
                "draft_vocab_size",
                head != "selector" or self.draft_vocab_size is None,
                "None with proposal_head='selector', whose candidates are of the whole vocabulary",
            ),
            (
                "domino_state_size",
                head != "domino" or (self.domino_state_size or 0) >= 1,
                "at least 1 with proposal_head='domino'",
            ),
            ("domino_prefix", self.domino_prefix >= 0, "at least 0"),
            (
                "confidence_head",
                self.confidence_head in (None, "hidden")
                or (self.confidence_head == "markov" and head in MARKOV_HEADS),
                "None, 'hidden', or with a Markov head 'markov'",
            ),
            (
                "confidence_head",
                self.confidence_head is None or not autoregressive,
                "None with drafting='autoregressive'",
            ),
            (
                "conv_kernel_size",
                (self.conv_kernel_size is None) == (group is None) and (self.conv_kernel_size or 1) >= 1,
                "at least 1, together with conv_group_size",
            ),
            (
                "conv_group_size",
                group is None or (group >= 1 and self.hidden_size % group == 0),
                f"a divisor of hidden_size={self.hidden_size}",
            ),
            (
                "conditioning",
                self.conditioning == "kv" or self.conv_kernel_size is None,
                "'kv' with convolutions, which are over the block alone",
            ),
            (
                "final_logit_softcapping",
                self.final_logit_softcapping is None or self.final_logit_softcapping > 0,
                "more than 0",
            ),
        ]
        values = vars(self)
        for field, holds, rule in rules:
            if not holds:
                raise ValueError(f"DFlashConfig: {field}={values[field]!r}; the rule: {rule}.")

    @property
    def is_sequential(self) -> bool:
        """Whether a slot knows the proposals before it, so that slots are asked one after the other."""
        return self.proposal_head != "independent"

    @property
    def num_proposals(self) -> int:
        """Tokens that a block proposes (γ), each by one of its last slots: all slots, or all but the anchor's."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    @classmethod
    def from_target(
        cls,
        target_config: PreTrainedConfig,
        *,
        mask_token_id: int,
        num_hidden_layers: int = 5,
        block_size: int = 16,
        num_taps: int = 5,
        **fields,
    ) -> "DFlashConfig":
        """
        Configuration of a fresh drafter with the geometry of its target's layers.

        Args:
            target_config (`PreTrainedConfig`):
                The target's configuration; of a multimodal target, the text part is used.
            mask_token_id (`int`):
                A row of the target's embedding that text never uses.
            num_hidden_layers (`int`, *optional*, defaults to 5), block_size (`int`, *optional*, defaults to 16):
                Size of the drafter.
            num_taps (`int`, *optional*, defaults to 5):
                Number of target layers to tap, spread by [`default_target_layer_ids`] unless `target_layer_ids` is
                given.
            fields:
                Any other field of [`DFlashConfig`].

        Raises:
            `ValueError`: when the target has too few layers for `num_taps`, or a field is invalid.
        """
        text = target_config.get_text_config(decoder=True)
        num_target_layers = text.num_hidden_layers
        heads = text.num_attention_heads
        rope = getattr(text, "rope_parameters", None) or {}
        # Of a target with one RoPE for each kind of layer, the published drafters take that of the full layers.
        rope = rope.get("full_attention", rope)
        inherited = {
            "vocab_size": text.vocab_size,
            "hidden_size": text.hidden_size,
            "intermediate_size": text.intermediate_size,
            "hidden_act": getattr(text, "hidden_act", None) or getattr(text, "hidden_activation", cls.hidden_act),
            "num_attention_heads": heads,
            "num_key_value_heads": getattr(text, "num_key_value_heads", None) or heads,
            "head_dim": getattr(text, "head_dim", None) or text.hidden_size // heads,
            "rms_norm_eps": getattr(text, "rms_norm_eps", cls.rms_norm_eps),
            "max_position_embeddings": text.max_position_embeddings,
            # The target's base; its 3-D and partial variants are not the drafter's.
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": rope.get("rope_theta", cls.default_theta),
                **{k: v for k, v in rope.items() if k not in ("mrope_section", "partial_rotary_factor")},
            },
            "bos_token_id": text.bos_token_id,
            "eos_token_id": text.eos_token_id,
            "pad_token_id": text.pad_token_id,
            "num_target_layers": num_target_layers,
            "num_hidden_layers": num_hidden_layers,
            "block_size": block_size,
            "mask_token_id": mask_token_id,
        }
        if fields.get("target_layer_ids") is None:
            fields["target_layer_ids"] = default_target_layer_ids(num_target_layers, num_taps)
        return cls(**{**inherited, **fields})
