"""
The drafter: a few Qwen3-like layers whose attention looks at [context ; block].

Symbols, here and everywhere in this package: B batch, T committed tokens, K block size (anchor + K - 1 masks),
N blocks trained at once, M tapped target layers, H hidden size, V vocabulary; p = target, q = drafter.
"""

import os
from collections.abc import Callable

import torch
from torch import nn
from transformers import Cache, GenerationConfig, PreTrainedModel
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3MLP,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    eager_attention_forward,
    rotate_half,
)
from transformers.utils import logging

from . import attention, checkpoints, compat, heads, masking  # noqa: F401 (attention registers itself)
from . import cache as caches
from .configuration_dflash import DFlashConfig


logger = logging.get_logger(__name__)


def _rotate(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of `states` (B, heads, n, head_dim) by the last n of the given positions."""
    n = states.shape[-2]
    cos, sin = cos[:, None, -n:], sin[:, None, -n:]
    return states * cos + rotate_half(states) * sin


class DFlashAttention(nn.Module):
    """
    Attention of a block over [context ; block] (paper, section 4.1).

    Queries come from the block alone. Keys and values of the context are projected from the fused features, which
    skip the layer's input norm, the residual stream and the MLP. With `conditioning="input"` the features are part of
    `hidden_states` instead, before the block.
    """

    def __init__(self, config: DFlashConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = self.head_dim**-0.5
        self.causal = config.causal_layers[layer_idx]
        self.window = config.sliding_window if config.layer_types[layer_idx] == "sliding_attention" else None
        # What a backend of transformers assumes when there is no mask; all causality of ours is in the mask.
        self.is_causal = False

        bias = config.attention_bias
        self.q_proj = nn.Linear(config.hidden_size, config.num_attention_heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(config.hidden_size, config.num_key_value_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(config.hidden_size, config.num_key_value_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * self.head_dim, config.hidden_size, bias=bias)
        if config.qk_norm:
            self.q_norm = Qwen3RMSNorm(self.head_dim, eps=config.rms_norm_eps)
            self.k_norm = Qwen3RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        else:
            self.q_norm = self.k_norm = nn.Identity()

    def forward(
        self,
        hidden_states: torch.Tensor,
        features: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | masking.BlockMask | None,
        cache: Cache | None,
    ) -> torch.Tensor:
        """
        Args:
            hidden_states (`torch.Tensor` of shape `(B, slots, H)`): the block, normed.
            features (`torch.Tensor` of shape `(B, new, H)`): committed tokens that the cache does not hold yet.
            rotary (`tuple` of two tensors of shape `(B, new + slots, head_dim)`): cosine and sine.
            attention_mask (*optional*): which of the `T + slots` keys each slot sees, in the form of the backend.

        Returns:
            `torch.Tensor` of shape `(B, slots, H)`.
        """
        batch, num_slots = hidden_states.shape[:2]
        heads = (-1, self.head_dim)
        source = torch.cat([features, hidden_states], dim=1)  # [B, new + slots, H]
        key = _rotate(self.k_norm(self.k_proj(source).unflatten(-1, heads)).transpose(1, 2), *rotary)
        value = self.v_proj(source).unflatten(-1, heads).transpose(1, 2)  # [B, kv heads, new + slots, head_dim]
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        if num_slots == 0:  # the context was only to be remembered
            return hidden_states
        query = _rotate(self.q_norm(self.q_proj(hidden_states).unflatten(-1, heads)).transpose(1, 2), *rotary)

        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        output, _ = attend(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.config.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
        )
        return self.o_proj(output.reshape(batch, num_slots, -1))


class DFlashDecoderLayer(GradientCheckpointingLayer):
    """
    Pre-norm attention over [context ; block] and MLP, in DFlash 2 each between convolutions; arguments as for
    [`DFlashAttention`].
    """

    def __init__(self, config: DFlashConfig, layer_idx: int):
        super().__init__()
        self.self_attn = DFlashAttention(config, layer_idx)
        self.mlp = Qwen3MLP(config)
        convolved = config.conv_kernel_size is not None
        self.attention_conv = heads.DynamicConv(config) if convolved else None
        self.mlp_conv = heads.DynamicConv(config) if convolved else None
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden_states: torch.Tensor, features: torch.Tensor, rotary, attention_mask, cache):
        def attend(normed: torch.Tensor) -> torch.Tensor:
            return self.self_attn(normed, features, rotary, attention_mask, cache)

        hidden_states = hidden_states + _between(self.attention_conv, attend, self.input_layernorm(hidden_states))
        return hidden_states + _between(self.mlp_conv, self.mlp, self.post_attention_layernorm(hidden_states))


def _between(conv: heads.DynamicConv | None, layer: Callable, normed: torch.Tensor) -> torch.Tensor:
    """The output of a sub-layer, with convolutions before and after it, if there are any, and slots."""
    if conv is None or normed.shape[1] == 0:
        return layer(normed)
    normed, kernel = conv(normed)
    return conv.finish(layer(normed), kernel)


class DFlashPreTrainedModel(PreTrainedModel):
    config: DFlashConfig
    config_class = DFlashConfig
    base_model_prefix = "model"
    main_input_name = "noise_embeds"
    supports_gradient_checkpointing = True
    _no_split_modules = ["DFlashDecoderLayer"]
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_flash_attn = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, heads.DynamicConv):  # the identity
            init.zeros_(module.kernel_projection.weight)
            init.zeros_(module.base_kernel[:, 1:])
            init.ones_(module.base_kernel[:, 0])
        elif isinstance(module, heads.CandidateSelector):  # the likeliest token
            init.normal_(module.predecessor_codebook, std=self.config.initializer_range)
            init.zeros_(module.successor_codebook)


class DFlashDraftModel(DFlashPreTrainedModel):
    """
    Proposes a block of tokens in one forward, conditioned on hidden states of the target (paper, section 4.1).

    It is given embeddings and returns hidden states: of the target's embedding, and for the target's head, unless it
    has its own. `last_statistics` holds the numbers of the last `generate` call that used it.

    Example:

    ```python
    >>> from transformers import AutoModelForCausalLM
    >>> import dflash_hf

    >>> target = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-8B", dtype="auto")
    >>> drafter = dflash_hf.attach(target, "z-lab/Qwen3-8B-DFlash-b16")
    >>> target.generate(**inputs, assistant_model=drafter)
    ```
    """

    def __init__(self, config: DFlashConfig):
        super().__init__(config)
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(DFlashDecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = Qwen3RotaryEmbedding(config)
        # Ids of the target tokens that the drafter proposes from; the position in this list is the drafter's id.
        ids = None if config.draft_vocab_size is None else torch.arange(config.draft_vocab_size)
        self.register_buffer("draft_token_ids", ids)
        num_words = config.draft_vocab_size or config.own_vocab_size
        self.embed_tokens = nn.Embedding(config.own_vocab_size, config.hidden_size) if config.own_embeddings else None
        self.lm_head = nn.Linear(config.hidden_size, num_words, bias=False) if config.own_head else None
        self.proposal_head = heads.proposal_head(config, num_words or config.vocab_size)
        self.confidence_head = heads.ConfidenceHead(config) if config.confidence_head else None
        self.last_statistics = None
        # transformers asks an assistant for these before it comes to our error message in `generate`.
        self.generation_config = GenerationConfig()
        self.gradient_checkpointing = False
        self.post_init()

    def fuse(self, context_hidden_states: torch.Tensor) -> torch.Tensor:
        """
        Fuse the tapped hidden states of committed tokens, `(B, new, M * H)`, into features `(B, new, H)`.

        Every committed token passes here once (paper, equation 1).
        """
        return self.hidden_norm(self.fc(context_hidden_states))

    def forward(
        self,
        noise_embeds: torch.Tensor,
        context_hidden_states: torch.Tensor,
        position_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | dict | None = None,
        cache: Cache | None = None,
        past_key_values: Cache | None = None,
    ) -> BaseModelOutputWithPast:
        r"""
        Denoise the slots of a block.

        Args:
            noise_embeds (`torch.Tensor` of shape `(B, slots, H)`):
                Target embeddings of the anchor and the masks (with autoregressive drafting, of the tokens drafted so
                far); when training, of N blocks one after the other. No slots: the cache takes the context in.
            context_hidden_states (`torch.Tensor` of shape `(B, new, M * H)`):
                Tapped hidden states of the committed tokens that the cache does not hold yet.
            position_ids (`torch.LongTensor` of shape `(B, new + slots)`, *optional*):
                Positions of the new committed tokens and of the slots. Default: what follows the cache.
            attention_mask (`torch.Tensor` of shape `(B, T + slots)` or `dict`, *optional*):
                0 for padding. Or, when training without a cache, a mask as of [`~masking.training_mask`] for each
                `(window, causal)` that occurs among the layers: of shape `(B, slots, new + slots)`, or with
                `conditioning="input"` `(B, new + slots, new + slots)`.
            cache (`Cache`, *optional*):
                Keys and values of earlier context. Context *and* block are appended; the caller crops the block.
            past_key_values (`Cache`, *optional*):
                The name of `cache` before transformers 5.24.

        Returns:
            `BaseModelOutputWithPast`: `last_hidden_state` of shape `(B, slots, H)`. The last `config.num_proposals`
            slots of a block predict: the token at their own position, or with `sample_from_anchor` the one after it.
        """
        cache = cache if cache is not None else past_key_values
        features = self.fuse(context_hidden_states)
        num_slots, num_new = noise_embeds.shape[1], features.shape[1]
        num_context = num_new + (cache.get_seq_length() if cache is not None else 0)
        if position_ids is None:
            stop = num_context + num_slots
            position_ids = torch.arange(stop - num_slots - num_new, stop, device=noise_embeds.device).unsqueeze(0)
        if not isinstance(attention_mask, dict):
            attention_mask = self._drafting_masks(
                num_context, num_new, num_slots, attention_mask, cache, noise_embeds.device
            )
        implementation = self.config._attn_implementation
        masks = {
            kind: masking.for_backend(mask, implementation, noise_embeds.dtype)
            for kind, mask in attention_mask.items()
        }

        rotary = self.rotary_emb(noise_embeds, position_ids)
        hidden_states = noise_embeds
        if self.config.conditioning == "input":
            # The features pass through the layers as tokens do, and nothing is injected.
            hidden_states, features = torch.cat([features, noise_embeds], dim=1), features[:, :0]
        for layer in self.layers:
            mask = masks[layer.self_attn.window, layer.self_attn.causal]
            hidden_states = layer(hidden_states, features, rotary, mask, cache)
        hidden_states = self.norm(hidden_states[:, hidden_states.shape[1] - num_slots :])
        return BaseModelOutputWithPast(**{"last_hidden_state": hidden_states, compat.CACHE: cache})

    def _drafting_masks(
        self,
        num_context: int,
        num_new: int,
        num_slots: int,
        padding: torch.Tensor | None,
        cache: Cache | None,
        device: torch.device,
    ) -> dict[tuple[int | None, bool], torch.Tensor | None]:
        """The mask of one block for each kind of layer, over the keys that such a layer gets from its cache."""
        return {
            (window, causal): masking.drafting_mask(
                num_context,
                num_slots,
                window=window,
                causal=causal,
                padding=padding,
                context_queries=num_new if self.config.conditioning == "input" else 0,
                num_keys=caches.num_keys(cache, layer_idx, num_new + num_slots),
                device=device,
            )
            for (window, causal), layer_idx in self.layer_kinds().items()
        }

    def layer_kinds(self) -> dict[tuple[int | None, bool], int]:
        """The `(window, causal)` pairs that occur, each with a layer of its kind: each needs a mask of its own."""
        return {(layer.self_attn.window, layer.self_attn.causal): i for i, layer in enumerate(self.layers)}

    def _supports_logits_to_keep(self) -> bool:
        """Asked of every assistant by transformers; a drafter returns no logits."""
        return False

    def generate(self, *args, **kwargs):
        """A drafter writes no text by itself; this is what `target.generate` reaches when nothing is attached."""
        raise ValueError(
            "assistant_model is a DFlash drafter, but it is not attached to this target. Call "
            "`dflash_hf.attach(target, drafter)` once, then `target.generate(..., assistant_model=drafter)`."
        )

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike, *args, **kwargs):
        """
        Load a drafter from a folder or a Hub repository, in any supported layout.

        Weights come from safetensors only, every tensor must be expected and every expected tensor present, and no
        remote code runs. Arguments are those of `PreTrainedModel.from_pretrained`.

        Raises:
            `ValueError`: for a layout, a field or a tensor that this library does not know; the message names it.
            `OSError`: when there is no configuration or no safetensors file.
        """
        if kwargs.get("trust_remote_code"):
            raise ValueError("trust_remote_code=True: a drafter never needs code from its repository; leave it out.")
        if kwargs.get("use_safetensors") is False:
            raise ValueError("use_safetensors=False: drafters are loaded from safetensors only; leave it out.")
        checkpoint = checkpoints.read(pretrained_model_name_or_path, kwargs)
        config = kwargs.pop("config", None) or checkpoint.config
        without_weights(checkpoint, config)
        kwargs = {name: value for name, value in kwargs.items() if name not in checkpoints.PLACES}
        want_info = kwargs.pop("output_loading_info", False)
        model, info = super().from_pretrained(
            None, *args, config=config, state_dict=checkpoint.load(), output_loading_info=True, **kwargs
        )
        model.name_or_path = model.config._name_or_path = str(pretrained_model_name_or_path)
        return (model, info) if want_info else model


def without_weights(checkpoint: checkpoints.Checkpoint, config: DFlashConfig) -> DFlashDraftModel:
    """The drafter on the meta device; raises `ValueError` unless its tensors are those of the checkpoint."""
    with torch.device("meta"):
        drafter = DFlashDraftModel(config)
    checkpoint.check({name: value.shape for name, value in drafter.state_dict().items()})
    return drafter
