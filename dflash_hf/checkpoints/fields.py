"""What the layouts share: where a field may stand, the geometry, RoPE, windows, and heads."""

from collections.abc import Mapping
from typing import Any

from torch import nn


# Fields of the backbone that mean the same in `DFlashConfig`.
BACKBONE = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "max_position_embeddings",
    "attention_bias",
    "attention_dropout",
    "initializer_range",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)
_REQUIRED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
# Fields of a configuration that change the computation in a way that is not implemented, by what they are.
_REFUSED = {
    "quantization_config": "a quantised drafter",
    "q_lora_rank": "multi-head latent attention",
    "kv_lora_rank": "multi-head latent attention",
    "attention_sink_bias": "attention sinks",
    "attention_value_scale": "scaled attention values",
    "partial_rotary_factor": "partial rotary embeddings",
}


# `markov_head_type` of other layouts, and our `proposal_head`.
MARKOV = {"vanilla": "markov", "gated": "gated_markov", "rnn": "rnn_markov"}


class Fields:
    """
    The fields of a `config.json`, of which some may stand in several places.

    Args:
        raw (`dict`): the file.
        *places (`dict`): where to look, the first before the later ones; two that say different things are an error.
    """

    def __init__(self, *places: Mapping[str, Any]):
        self.places = places

    def get(self, name: str, default: Any = None) -> Any:
        """
        The value of a field.

        Raises:
            `ValueError`: when two places say different things.
        """
        found = [place[name] for place in self.places if place.get(name) is not None]
        if any(value != found[0] for value in found[1:]):
            raise ValueError(f"{name} contradicts itself: {' and '.join(map(repr, found))} stand in different places.")
        return found[0] if found else default

    def need(self, name: str) -> Any:
        """
        The value of a field that must be there.

        Raises:
            `ValueError`: when it is not.
        """
        value = self.get(name)
        if value is None:
            raise ValueError(f"{name} is missing; a drafter cannot be used without it.")
        return value

    def integer(self, name: str, default: int | None = None) -> int | None:
        """An integer; `True` is none."""
        value = self.get(name, default)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise ValueError(f"{name}={value!r} is not an integer.")
        return value

    def flag(self, name: str, default: bool | None = None) -> bool | None:
        """A truth value."""
        value = self.get(name, default)
        if value is not None and not isinstance(value, bool):
            raise ValueError(f"{name}={value!r} is neither true nor false.")
        return value

    def refuse(self, **more: str) -> None:
        """Raise `ValueError` for a field that asks for what is not implemented, by its name."""
        for name, what in {**_REFUSED, **more}.items():
            value = self.get(name)
            neutral = value in (None, False, [], {}) or (type(value) in (int, float) and value in (0, 1))
            if not neutral:
                raise ValueError(f"{name}={value!r}: {what}, which this library does not implement.")


def section(raw: Mapping[str, Any], name: str) -> dict:
    """A nested part of a `config.json`, empty if it is not there."""
    value = raw.get(name) or {}
    if not isinstance(value, dict):
        raise ValueError(f"{name}={value!r} is not an object with fields.")
    return value


def backbone(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Geometry and RoPE of the drafter's layers."""
    fields = {name: raw[name] for name in BACKBONE if raw.get(name) is not None}
    missing = [name for name in _REQUIRED if name not in fields]
    if missing:
        raise ValueError(f"{', '.join(missing)} is missing; a drafter's geometry cannot be guessed.")
    if fields.get("head_dim") is None:
        fields["head_dim"] = fields["hidden_size"] // fields["num_attention_heads"]
    return {**fields, "rope_parameters": rope(raw)}


def rope(raw: Mapping[str, Any]) -> dict[str, Any]:
    """
    All spellings: `rope_parameters`, flat or for each kind of layer, or the older `rope_theta` with `rope_scaling`.
    """
    found = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(found, dict):
        raise ValueError(f"rope_parameters={found!r} is not an object with fields.")
    kinds = {kind: value for kind, value in found.items() if kind.endswith("_attention")}
    if kinds:
        wanted = {kind: value for kind, value in kinds.items() if kind in (raw.get("layer_types") or kinds)}
        values = list(wanted.values())
        if not values or not all(isinstance(value, dict) for value in values):
            raise ValueError(f"rope_parameters={found!r} has no entry for the drafter's layers.")
        if any(value != values[0] for value in values[1:]):
            raise ValueError(f"rope_parameters={found!r}: one RoPE for all layers of a drafter is implemented.")
        found = values[0]
    found = _spelled(found)
    older = _spelled(raw.get("rope_scaling") or {})
    if raw.get("rope_parameters") and older["rope_type"] != "default":
        same = {name: value for name, value in found.items() if name != "rope_theta"}
        if same != {name: value for name, value in older.items() if name != "rope_theta"}:
            raise ValueError(f"rope_scaling={raw['rope_scaling']!r} contradicts rope_parameters={found!r}.")
    theta = Fields(found, raw).get("rope_theta")
    if theta is None:
        raise ValueError("rope_theta is missing, at the top level and in rope_parameters alike.")
    if not isinstance(theta, int | float) or isinstance(theta, bool) or theta <= 0:
        raise ValueError(f"rope_theta={theta!r} is not a positive number.")
    found["rope_theta"] = theta
    if found.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(
            f"partial_rotary_factor={found['partial_rotary_factor']!r}: partial rotary embeddings, which this library "
            "does not implement."
        )
    return found


def _spelled(rope: Any) -> dict[str, Any]:
    """RoPE with its kind under one name."""
    if not isinstance(rope, dict):
        raise ValueError(f"rope_scaling={rope!r} is not an object with fields.")
    rope = dict(rope)
    if "type" in rope:
        rope["rope_type"] = rope.pop("type")
    return {"rope_type": "default", **rope}


def attention(raw: Mapping[str, Any], nested: Mapping[str, Any], *, sliding_is_causal: bool = True) -> dict[str, Any]:
    """
    Window and causality of each layer.

    The published rule: `is_causal`, else `causal`, for all layers; else sliding layers are causal inside the block
    and full layers are not. With `use_swa` every layer slides, and none is causal.
    """
    fields = Fields(nested, raw)
    num_layers = raw["num_hidden_layers"]
    layer_types = raw.get("layer_types") or ["full_attention"] * num_layers
    if not isinstance(layer_types, list):
        raise ValueError(f"layer_types={layer_types!r} is not a list.")
    from_layer = raw.get("max_window_layers") or 0
    if not raw.get("layer_types") and raw.get("use_sliding_window") and from_layer < num_layers:
        raise ValueError(
            f"use_sliding_window=True and max_window_layers={from_layer} without layer_types: which layers slide is "
            "not told; write layer_types."
        )
    window = fields.integer("sliding_window")
    if fields.flag("use_swa") and "sliding_attention" not in layer_types:
        layer_types, sliding_is_causal = ["sliding_attention"] * num_layers, False
        window = fields.integer("swa_window_size") or window
    causal_layers = [sliding_is_causal and kind == "sliding_attention" for kind in layer_types]
    for stated in (Fields(raw).flag("is_causal"), Fields(nested).flag("causal")):
        if stated is not None:
            causal_layers = [stated] * num_layers
            break
    return {
        "layer_types": layer_types,
        "sliding_window": window if "sliding_attention" in layer_types else None,
        "causal_layers": causal_layers,
    }


def block(fields: Fields) -> dict[str, Any]:
    """The fields that every layout must have."""
    return {name: fields.need(name) for name in ("block_size", "mask_token_id", "target_layer_ids")} | {
        "num_target_layers": fields.integer("num_target_layers")
    }


def logits(fields: Fields) -> dict[str, Any]:
    """Scale and cap of the proposals' logits."""
    multiplier, cap = fields.get("output_multiplier"), fields.get("final_logit_softcapping")
    return {"output_multiplier": None if multiplier == 1 else multiplier, "final_logit_softcapping": cap or None}


def markov(fields: Fields, confidence: str) -> dict[str, Any]:
    """
    The heads of DSpark.

    Args:
        confidence (`str`): the field that says whether there is a confidence head.
    """
    rank, kind = fields.integer("markov_rank", 0), fields.get("markov_head_type", "vanilla")
    if rank < 0:
        raise ValueError(f"markov_rank={rank}: at least 0.")
    if kind not in MARKOV:
        raise ValueError(f"markov_head_type={kind!r}: one of {', '.join(MARKOV)}.")
    heads: dict[str, Any] = {"proposal_head": MARKOV[kind], "proposal_rank": rank} if rank else {}
    if fields.flag(confidence, False):
        with_markov = fields.flag("confidence_head_with_markov", True)
        if with_markov and not rank:
            raise ValueError("confidence_head_with_markov=True: it needs a Markov head, and markov_rank is 0.")
        heads["confidence_head"] = "markov" if with_markov else "hidden"
    return heads


def written(config: Any) -> dict[str, Any]:
    """Geometry, RoPE (both spellings), windows and special tokens, as a Qwen3 configuration has them."""
    values = {name: getattr(config, name) for name in BACKBONE}
    parameters = dict(config.rope_parameters)
    theta, scaling = parameters.pop("rope_theta"), parameters
    return {
        **values,
        "layer_types": config.layer_types,
        "sliding_window": config.sliding_window,
        "use_sliding_window": config.sliding_window is not None,
        "max_window_layers": config.num_hidden_layers,
        "rope_parameters": dict(config.rope_parameters),
        "rope_theta": theta,
        "rope_scaling": None if scaling.get("rope_type", "default") == "default" else scaling,
        "tie_word_embeddings": False,
        "use_cache": True,
    }


def shapes_logits(config: Any) -> bool:
    """Whether a drafter has a scale or a cap of its own."""
    return config.output_multiplier is not None or config.final_logit_softcapping is not None


def embeddings_lost(config: Any, target: Any) -> list[tuple[bool, str]]:
    """These layouts give a block rows of the target's table, which may not be what its embedding module returns."""
    plain = target is not None and type(target.embedding) is nn.Embedding
    what = "input_embeddings='module' (rows of the table there; pass the target, if its embedding returns just these)"
    return [(config.input_embeddings == "module" and not config.own_embeddings and not plain, what)]


def cannot_say(config: Any, *more: tuple[bool, str]) -> list[str]:
    """
    What of a drafter no other layout can say, and without which its weights are of no use.

    Args:
        *more: whether something holds, and what it is.
    """
    rules = [
        (not config.qk_norm, "qk_norm=False (these layouts norm queries and keys)"),
        (config.conditioning != "kv", f"conditioning={config.conditioning!r}"),
        (config.drafting != "parallel", f"drafting={config.drafting!r}"),
        *more,
    ]
    return [what for holds, what in rules if holds]
