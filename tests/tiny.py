"""Tiny random targets and drafters, and folders of published layouts, all built in memory or in `tmp_path`."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel

from dflash_hf import DFlashConfig, DFlashDraftModel
from dflash_hf.training import DFlashTrainingArguments


VOCAB = 64
MASK = 63

_GEOMETRY = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
# What a family needs beyond the common geometry.
_FAMILIES = {
    "qwen3": {},
    "qwen2": {},
    "llama": {},
    "mistral": {"sliding_window": 8},
    "gemma2": {"sliding_window": 8, "query_pre_attn_scalar": 8},
    "gpt_oss": {"sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
}


@torch.no_grad()
def sharpen(model: torch.nn.Module, seed: int) -> None:
    """Give matrices weights that are large enough for outputs to depend on their inputs, and vary the norms."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            parameter.normal_(0, 0.25, generator=generator)
        else:
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


def tiny_target(family: str = "qwen3", *, seed: int = 0, **overrides) -> PreTrainedModel:
    """A random target of 4 layers and 64 tokens, in float32 and evaluation mode, that never ends a text."""
    config = AutoConfig.for_model(family, **{**_GEOMETRY, **_FAMILIES[family], **overrides})
    target = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    sharpen(target, seed)
    target.generation_config.update(pad_token_id=0, bos_token_id=1, eos_token_id=None)
    return target


def tiny_drafter(target: PreTrainedModel, *, seed: int = 1, **config) -> DFlashDraftModel:
    """A random drafter of 2 layers and blocks of 4 for `target`; almost nothing that it proposes is right."""
    defaults = {"num_hidden_layers": 2, "block_size": 4, "target_layer_ids": [1, 2], "mask_token_id": MASK}
    drafter = DFlashDraftModel(DFlashConfig.from_target(target.config, **{**defaults, **config})).eval()
    sharpen(drafter, seed)
    return drafter


def sliding(window: int, *, causal: bool, num_layers: int = 2) -> dict:
    """Fields of a drafter's configuration whose layers all slide."""
    return {
        "num_hidden_layers": num_layers,
        "layer_types": ["sliding_attention"] * num_layers,
        "sliding_window": window,
        "causal_layers": [causal] * num_layers,
    }


def draft_inputs(config: DFlashConfig, num_context: int, *, batch: int = 1, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random `noise_embeds` of one block and `context_hidden_states` of the tokens before it."""
    generator = torch.Generator().manual_seed(seed)
    taps = len(config.target_layer_ids) * config.hidden_size
    return {
        "noise_embeds": torch.randn(batch, config.block_size, config.hidden_size, generator=generator),
        "context_hidden_states": torch.randn(batch, num_context, taps, generator=generator),
    }


def draft_cache(config: DFlashConfig) -> DynamicCache:
    """A cache for the drafter that can take the block back, also in sliding layers."""
    cache = DynamicCache(config=config)
    cache.activate_past_recording()
    return cache


def random_ids(*shape: int, seed: int = 0) -> torch.Tensor:
    """Token ids of `shape` without pad and mask."""
    return torch.randint(1, MASK, shape, generator=torch.Generator().manual_seed(seed))


# ---------------------------------------------------------------------------------- folders of published layouts
def zlab_config(**overrides) -> dict:
    """`config.json` of a published drafter of the older kind; `None` removes a field."""
    raw = {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "block_size": 4,
        "bos_token_id": 1,
        "dflash_config": {"mask_token_id": 90, "target_layer_ids": [1, 5]},
        "dtype": "bfloat16",
        "eos_token_id": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "hidden_size": 32,
        "initializer_range": 0.02,
        "intermediate_size": 48,
        "layer_types": ["full_attention", "full_attention"],
        "max_position_embeddings": 512,
        "max_window_layers": 2,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "num_target_layers": 8,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 96,
    }
    return {key: value for key, value in {**raw, **overrides}.items() if value is not None}


def zlab_tensors(raw: dict, *, num_taps: int = 2, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random weights with the names and shapes of the published files."""
    hidden, head, inner = raw["hidden_size"], raw["head_dim"], raw["intermediate_size"]
    outputs = {
        "q_proj": raw["num_attention_heads"] * head,
        "k_proj": raw["num_key_value_heads"] * head,
        "v_proj": raw["num_key_value_heads"] * head,
        "o_proj": hidden,
    }
    shapes = {"fc.weight": (hidden, num_taps * hidden), "hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
    for i in range(raw["num_hidden_layers"]):
        layer = f"layers.{i}."
        shapes[layer + "input_layernorm.weight"] = shapes[layer + "post_attention_layernorm.weight"] = (hidden,)
        shapes[layer + "self_attn.q_norm.weight"] = shapes[layer + "self_attn.k_norm.weight"] = (head,)
        shapes[layer + "mlp.gate_proj.weight"] = shapes[layer + "mlp.up_proj.weight"] = (inner, hidden)
        shapes[layer + "mlp.down_proj.weight"] = (hidden, inner)
        for name, rows in outputs.items():
            shapes[f"{layer}self_attn.{name}.weight"] = (rows, outputs["q_proj"] if name == "o_proj" else hidden)
            if raw.get("attention_bias"):
                shapes[f"{layer}self_attn.{name}.bias"] = (rows,)
    generator = torch.Generator().manual_seed(seed)
    return {
        name: 0.25 * torch.randn(shape, generator=generator) + (len(shape) == 1 and "norm" in name)
        for name, shape in shapes.items()
    }


def write_folder(folder: Path, raw: dict, tensors: dict[str, torch.Tensor] | None = None) -> Path:
    """Write a drafter folder: `config.json` and `model.safetensors`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(zlab_tensors(raw) if tensors is None else tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def training_arguments(folder: Path, **fields) -> DFlashTrainingArguments:
    """A few quick steps on the CPU, each logged, nothing saved."""
    defaults = {
        "per_device_train_batch_size": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        "num_anchors": 4,
        "max_steps": 4,
        "warmup_steps": 0,
        "dataloader_pin_memory": False,
        "use_cpu": True,
    }
    return DFlashTrainingArguments(output_dir=str(folder), **{**defaults, **fields})
