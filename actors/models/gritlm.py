"""GritLM: a decoder of Mistral's kind that completes prompts as any other, and whose tokens attend
to both sides where it embeds; the mean leaves the instruction out (Muennighoff et al., "Generative
Representational Instruction Tuning", arXiv 2402.09906). An engine does one of both."""

from __future__ import annotations

from typing import Any

from actorium.actors.config.tree import ModelConfig
from actorium.actors.models.model_classes import architecture

GRITLM = "GritLM"
"""The class of a copy that vLLM serves for vectors; the published checkpoints name Mistral's."""
INSTRUCTION_END = "<|embed|>\n"
"""Behind it stands what is pooled, before it perhaps `<|user|>` and a line that says what for."""


def is_gritlm(config: dict[str, Any]) -> bool:
    """Whether it is one, by its class or by the code that is published beside its weights."""
    code = config.get("auto_map")
    return architecture(config) == GRITLM or isinstance(code, dict) and any(
        GRITLM.lower() in str(name).lower() for name in code.values())


def completes(config: dict[str, Any], model: ModelConfig) -> bool:
    """Whether an engine of a GritLM completes prompts rather than embeds them: as the settings say,
    else as its class does."""
    asked = model.runner == "pooling" or model.convert not in ("auto", "none")
    return model.runner == "generate" or not asked and architecture(config) != GRITLM


def as_embedder(config: dict[str, Any]) -> dict[str, Any]:
    """The config of a model as it embeds: a GritLM's tokens then attend to all of the prompt."""
    return {**config, "is_causal": False, "sliding_window": None} if is_gritlm(config) else config
