"""Published layouts that this library knows and does not implement: refused by their names."""

NAME = "not implemented"

RENAMES: dict[str, str] = {}
_WHY = {
    "DFlashLagunaForCausalLM": "Laguna's gates on the attention and norms on every tapped layer",
    "Gemma4DSparkModel": "DeepSpec's Gemma backbone (four norms, shared keys and values, partial rotary embeddings)",
    "KimiK3DSparkModel": "multi-head latent attention",
}


def detect(raw: dict) -> bool:
    architecture = (raw.get("architectures") or [""])[0]
    return architecture in _WHY or "pard_token" in raw or raw.get("model_type") in ("laguna", "gemma4_text")


def normalise(raw: dict, tensors: dict) -> dict:
    architecture = (raw.get("architectures") or [raw.get("model_type")])[0]
    why = _WHY.get(architecture, "another drafter's layout")
    raise ValueError(f"architectures={architecture!r}: {why}, which this library does not implement.")
