"""
Folders of every published layout, at toy size, with random weights.

    python tests/layouts.py FOLDER

writes them all. The target that they are for has 8 layers, 96 words and a hidden size of 32.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from tiny import write_folder, zlab_config, zlab_tensors


Folder = tuple[dict, dict[str, torch.Tensor]]
NESTED = {"mask_token_id": 90, "target_layer_ids": [1, 5]}
WORDS, HIDDEN, RANK = 96, 32, 4
_GEOMETRY = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim"),
    *("num_key_value_heads", "hidden_act", "rms_norm_eps", "max_position_embeddings", "attention_bias"),
)
_YARN = {"factor": 4.0, "original_max_position_embeddings": 128, "rope_type": "yarn"}


def some(*shape: int, seed: int = 5) -> torch.Tensor:
    return 0.25 * torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def zlab(**fields) -> Folder:
    raw = zlab_config(**fields)
    return raw, zlab_tensors(raw)


def zlab_new() -> Folder:
    return zlab(
        block_size=None,
        num_target_layers=None,
        rope_theta=None,
        dflash_config={**NESTED, "block_size": 4, "num_target_layers": 8},
        rope_parameters={"rope_type": "default", "rope_theta": 1000000},
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=4,
        use_sliding_window=True,
    )


def zlab_2(**fields) -> Folder:
    extra = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 8, "selector_top_k": 4}
    raw, tensors = zlab(
        architectures=["DFlash2DraftModel"],
        is_causal=False,
        block_size=None,
        dflash_config={**NESTED, "block_size": 4, **extra},
        layer_types=["sliding_attention"] * 2,
        sliding_window=64,
        use_sliding_window=True,
        **fields,
    )
    return raw, tensors | convolutions() | selector()


def convolutions() -> dict[str, torch.Tensor]:
    tensors = {}
    for i in range(2):
        for seed, conv in enumerate(("attention_conv", "mlp_conv")):
            tensors[f"layers.{i}.{conv}.base_kernel"] = some(2, 2, HIDDEN, seed=seed)
            tensors[f"layers.{i}.{conv}.kernel_projection.weight"] = some(2 * 2 * 2, HIDDEN, seed=seed)
    return tensors


def selector() -> dict[str, torch.Tensor]:
    return {
        "candidate_selector.predecessor_codebook": 4 * some(WORDS, 8, seed=1),
        "candidate_selector.successor_codebook": 4 * some(WORDS, 8, seed=2),
        "candidate_selector.hidden_projection.weight": some(8, HIDDEN),
    }


def markov(kind: str = "vanilla", words: int = WORDS, prefix: str = "markov_head.") -> dict[str, torch.Tensor]:
    tensors = {"markov_w1.weight": 4 * some(WORDS, RANK), "markov_w2.weight": 4 * some(words, RANK, seed=6)}
    if kind == "gated":
        tensors |= {"gate_proj.weight": some(RANK, HIDDEN + RANK), "gate_proj.bias": some(RANK)}
    if kind == "rnn":
        tensors |= {"joint_proj.weight": some(3 * RANK, 2 * RANK + HIDDEN), "joint_proj.bias": some(3 * RANK)}
    return {prefix + name: tensor for name, tensor in tensors.items()}


def confidence(prefix: str = "confidence_head.proj.", size: int = HIDDEN + RANK) -> dict[str, torch.Tensor]:
    return {f"{prefix}weight": some(1, size), f"{prefix}bias": some(1)}


def specforge_dspark(**fields) -> Folder:
    heads = {"markov_rank": RANK, "markov_head_type": "vanilla", "enable_confidence_head": True}
    raw, tensors = zlab(
        architectures=["DSparkDraftModel"],
        auto_map={"AutoModel": "dspark.DSparkDraftModel"},
        dflash_config={**NESTED, "projector_type": "dspark", "attention_mode": "gqa", **heads, **fields},
    )
    return raw, tensors | markov() | confidence()


def specforge_domino(**fields) -> Folder:
    nested = {**NESTED, "projector_type": "domino", "emb_dim": 6, "gru_hidden_dim": 5, "pure_draft_prefix_len": 1}
    raw, tensors = zlab(
        architectures=["DominoDraftModel"],
        auto_map={"AutoModel": "domino.DominoDraftModel"},
        dflash_config={**nested, "shift_label": True, **fields},
    )
    return raw, tensors | {
        "prefix_gru.weight_ih_l0": some(15, HIDDEN),
        "prefix_gru.weight_hh_l0": some(15, 5),
        "embed_proj.0.weight": some(6, HIDDEN + 5),
        "embed_proj.2.weight": 8 * some(WORDS, 6),
    }


def modelopt() -> Folder:
    raw, tensors = zlab(dflash_config={**NESTED, "use_swa": True, "swa_window_size": 4, "causal": False})
    return raw, {f"dflash_module.{name}": tensor for name, tensor in tensors.items()}


def modelopt_dspark(kind: str = "vanilla") -> Folder:
    heads = {"markov_rank": RANK, "markov_head_type": kind, "use_confidence_head": True}
    raw, tensors = zlab(
        architectures=["Qwen3DSparkModel"],
        auto_map=None,
        dflash_config={**NESTED, "projector_type": "dspark", "shift_label": True, **heads},
    )
    return raw, tensors | markov(kind, prefix="") | confidence("confidence_proj.")


def speculators(kind: str = "dflash", **fields) -> Folder:
    old = zlab_config()
    inner = {name: old[name] for name in _GEOMETRY} | {"model_type": "qwen3", "rope_parameters": _rope()}
    proposals = 4 if fields.get("sample_from_anchor") else 3
    raw = {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "block_size": 4,
        "draft_vocab_size": WORDS,
        "aux_hidden_state_layer_ids": [2, 6],
        "mask_token_id": 90,
        "sample_from_anchor": False,
        "sliding_window_non_causal": False,
        "transformer_layer_config": inner,
        "speculators_config": {
            "algorithm": kind,
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": proposals}],
            "verifier": {"name_or_path": "some/target", "architectures": ["Qwen3ForCausalLM"]},
        },
        **fields,
    }
    return raw, zlab_tensors(old)


def _rope() -> dict:
    return {"rope_type": "default", "rope_theta": 1000000}


def speculators_reduced() -> Folder:
    raw, tensors = speculators(draft_vocab_size=40)
    raw["transformer_layer_config"]["model_type"] = "llama"
    ids = torch.arange(40) * 2 + 3
    covered = torch.zeros(WORDS, dtype=torch.bool)
    covered[ids] = True
    own = {"embed_tokens.weight": some(WORDS, HIDDEN), "lm_head.weight": some(40, HIDDEN)}
    return raw, tensors | own | {"d2t": ids - torch.arange(40), "t2d": covered, "verifier_norm.weight": some(HIDDEN)}


def speculators_dspark(kind: str = "vanilla") -> Folder:
    heads = {"markov_rank": RANK, "markov_head_type": kind, "enable_confidence_head": True}
    raw, tensors = speculators("dspark", sample_from_anchor=True, **heads)
    return raw, tensors | markov(kind) | confidence()


def speculators_dflash2() -> Folder:
    extra = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 8, "selector_top_k": 4}
    raw, tensors = speculators("dflash2", **extra, sliding_window_non_causal=True)
    return raw, tensors | convolutions() | selector()


def deepspec(kind: str | None = None) -> Folder:
    rank = 0 if kind is None else RANK
    heads = {"markov_rank": rank, "markov_head_type": kind or "vanilla", "enable_confidence_head": kind is not None}
    raw, tensors = zlab(
        architectures=["Qwen3DSparkModel"], auto_map=None, dflash_config=None, num_anchors=512, **NESTED, **heads
    )
    tensors |= {"embed_tokens.weight": some(WORDS, HIDDEN), "lm_head.weight": some(WORDS, HIDDEN, seed=9)}
    return raw, tensors | (markov(kind) | confidence() if kind else {})


def muse() -> Folder:
    old, tensors = zlab()
    raw = {name: old[name] for name in (*_GEOMETRY, "block_size", "layer_types") if name != "vocab_size"}
    raw |= {**NESTED, "architectures": ["MuseGlimmerAssistantModel"], "model_type": "muse_glimmer_assistant"}
    raw["rope_parameters"] = _rope()
    renames = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    return raw, {renames.get(name, name): tensor for name, tensor in tensors.items()}


# What loads: the folder, the number of its tensors, and how many tokens a block proposes.
LOADED: dict[str, tuple[Callable[[], Folder], int, int]] = {
    "z-lab, older": (zlab, 25, 3),
    "z-lab, newer": (zlab_new, 25, 3),
    "z-lab, biases": (
        lambda: zlab(model_type="gpt_oss", attention_bias=True, rope_scaling=_YARN, rope_theta=150000),
        33,
        3,
    ),
    "z-lab DFlash 2": (zlab_2, 36, 3),
    "SpecForge DSpark": (specforge_dspark, 29, 4),
    "SpecForge Domino": (specforge_domino, 29, 4),
    "SpecForge Domino, fill-in": (lambda: specforge_domino(shift_label=False, pure_draft_prefix_len=0), 29, 3),
    "Model-Optimizer": (modelopt, 25, 3),
    "Model-Optimizer DSpark": (modelopt_dspark, 29, 4),
    "Model-Optimizer DSpark, gated": (lambda: modelopt_dspark("gated"), 31, 4),
    "speculators": (speculators, 25, 3),
    "speculators, shortlist": (speculators_reduced, 30, 3),
    "speculators DSpark": (speculators_dspark, 29, 4),
    "speculators DSpark, gated": (lambda: speculators_dspark("gated"), 31, 4),
    "speculators DSpark, rnn": (lambda: speculators_dspark("rnn"), 31, 4),
    "speculators DFlash 2": (speculators_dflash2, 36, 3),
    "DeepSpec DFlash": (deepspec, 27, 4),
    "DeepSpec DSpark": (lambda: deepspec("vanilla"), 31, 4),
    "DeepSpec DSpark, rnn": (lambda: deepspec("rnn"), 33, 4),
    "transformers": (muse, 25, 3),
}


def with_tensor(folder: Folder, name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Folder:
    raw, tensors = folder
    return raw, {**tensors, name: torch.zeros(shape, dtype=dtype)}


# What is refused, and words of the message.
REFUSED: dict[str, tuple[Callable[[], Folder], list[str]]] = {
    "no layers to tap": (lambda: zlab(dflash_config={"mask_token_id": 90}), ["target_layer_ids is missing"]),
    "three taps for two layers": (
        lambda: (zlab_config(), zlab_tensors(zlab_config(), num_taps=3)),
        ["fc.weight [32, 96] instead of [32, 64]", "fuses 3 tapped layers"],
    ),
    "gates": (
        lambda: with_tensor(zlab(), "layers.0.self_attn.g_proj.weight", 4, 32),
        ["unexpected: layers.0.self_attn.g_proj.weight"],
    ),
    "DFlash 2 as DFlash": (
        lambda: (zlab_config(), zlab_2()[1]),
        ["unexpected:", "layers.0.attention_conv.base_kernel"],
    ),
    "DFlash 2 without its selector": (
        lambda: (zlab_2()[0], zlab()[1] | convolutions()),
        ["missing:", "proposal_head.predecessor_codebook"],
    ),
    "Laguna": (
        lambda: zlab(architectures=["DFlashLagunaForCausalLM"], model_type="laguna"),
        ["DFlashLagunaForCausalLM", "gates"],
    ),
    "DeepSpec for Gemma": (
        lambda: zlab(architectures=["Gemma4DSparkModel"], model_type="gemma4_text", dflash_config=None),
        ["Gemma4DSparkModel", "four norms"],
    ),
    "MiMo": (
        lambda: zlab(dflash_config={**NESTED, "use_swa": True, "attention_sink_bias": True}),
        ["attention_sink_bias=True", "sinks"],
    ),
    "latent attention": (lambda: zlab(kv_lora_rank=16), ["kv_lora_rank=16", "latent attention"]),
    "partial rotary embeddings": (
        lambda: zlab(rope_scaling={"rope_type": "default", "partial_rotary_factor": 0.5}),
        ["partial_rotary_factor=0.5"],
    ),
    "quantised, by its configuration": (
        lambda: zlab(quantization_config={"quant_method": "fp8"}),
        ["quantization_config", "quantised"],
    ),
    "quantised, by its tensors": (
        lambda: (zlab_config(), {**zlab()[1], "fc.weight": torch.zeros(32, 64, dtype=torch.int8)}),
        ["fc.weight is I8", "quantised"],
    ),
    "renamed for quantisation": (
        lambda: with_tensor(zlab(), "fc.weight_scale", 32),
        ["unexpected: fc.weight_scale"],
    ),
    "a shortlist without its ids": (
        lambda: speculators(draft_vocab_size=40),
        ["draft_vocab_size=40", "no tensor d2t"],
    ),
    "more proposals than slots": (
        lambda: speculators(
            speculators_config={"proposal_methods": [{"speculative_tokens": 4}], "verifier": {"name_or_path": "x"}}
        ),
        ["speculative_tokens=4", "proposes 3"],
    ),
    "a method of speculators that is not DFlash": (lambda: speculators("eagle3"), ["speculators_model_type='eagle3'"]),
    "a Markov head of another rank": (
        lambda: (specforge_dspark(markov_rank=5)[0], specforge_dspark()[1]),
        ["proposal_head.markov_w1.weight [96, 4] instead of [96, 5]"],
    ),
    "a Markov head of an unknown kind": (
        lambda: specforge_dspark(markov_head_type="second order"),
        ["markov_head_type='second order'"],
    ),
}


def write(name: str, folder: Path) -> Path:
    """Write the folder of a fixture of `LOADED` or `REFUSED`."""
    raw, tensors = (LOADED.get(name) or REFUSED[name])[0]()
    return write_folder(folder, raw, {key: tensor.contiguous() for key, tensor in tensors.items()})


if __name__ == "__main__":
    for name in (*LOADED, *REFUSED):
        write(name, Path(sys.argv[1]) / name.replace(" ", "-").replace(",", ""))
