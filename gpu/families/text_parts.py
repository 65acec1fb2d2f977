"""Checkpoints of text with images, video or sound of which the text part is served, by a class of
ours that computes the same of text alone; requests with the rest get 400."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from actorium.actors.errors import BadModel, shown
from actorium.actors.models.model_classes import MODEL_TYPES
from actorium.actors.models.model_dir import text_config
from actorium.gpu.families.fp8_config import NAME

WITH_TEXT_PART = frozenset((
    "DeepseekVLForConditionalGeneration", "DeepseekVLHybridForConditionalGeneration",
    "Exaone4_5_ForConditionalGeneration", "FuyuForCausalLM", "Glm46VForConditionalGeneration",
    "Glm4vForConditionalGeneration", "Glm4vMoeForConditionalGeneration",
    "GlmAsrForConditionalGeneration", "GlmOcrForConditionalGeneration",
    "GotOcr2ForConditionalGeneration", "HunYuanVLForConditionalGeneration",
    "Idefics2ForConditionalGeneration", "Idefics3ForConditionalGeneration",
    "InternVLForConditionalGeneration",
    "JanusForConditionalGeneration", "Kimi_K25ForConditionalGeneration",
    "Lfm2VlForConditionalGeneration", "LightOnOcrForConditionalGeneration",
    "LlavaForConditionalGeneration", "LlavaNextForConditionalGeneration",
    "LlavaNextVideoForConditionalGeneration", "LlavaOnevisionForConditionalGeneration",
    "MiniCPMOcrForConditionalGeneration", "MiniCPMV4_6ForConditionalGeneration",
    "MiniCPMV4_7ForConditionalGeneration", "MossTranscribeDiarizeForConditionalGeneration",
    "NemotronH_Omni_Reasoning_V3", "Ovis2ForConditionalGeneration",
    "QianfanOCRForConditionalGeneration", "Qwen2AudioForConditionalGeneration",
    "Qwen2VLForConditionalGeneration", "Qwen2_5OmniThinkerForConditionalGeneration",
    "Qwen3ASRForConditionalGeneration", "Qwen3OmniMoeThinkerForConditionalGeneration",
    "SmolVLMForConditionalGeneration", "VibeVoiceAsrForConditionalGeneration",
    "VideoLlama3ForConditionalGeneration", "VideoLlavaForConditionalGeneration",
    "VipLlavaForConditionalGeneration", "VoxtralForConditionalGeneration",
))
"""Classes of transformers whose logits of text are those of the class that runs their text part."""
TEXT_TYPES = {
    "qwen2_vl_text": "Qwen2ForCausalLM", "qwen2_5_omni_text": "Qwen2ForCausalLM",
    "qwen3_omni_moe_text": "Qwen3MoeForCausalLM", "glm4v_text": "Glm4ForCausalLM",
    "glm_ocr_text": "Glm4ForCausalLM", "glm4v_moe_text": "Glm4MoeForCausalLM",
    "hunyuan_vl_text": "HunYuanDenseV1ForCausalLM",
}
"""By the `model_type` of a text part that no class has alone (their ropes have axes, which are one
where there is only text): what runs it."""
ALWAYS: dict[str, dict[str, Any]] = {"glm4v_text": {"attention_bias": True}}
"""What such a type has whatever its config says."""
FLAT = {"Qwen2VLForConditionalGeneration": "qwen2_vl_text"}
"""Classes whose configs of old have the text part's fields beside the others, and its type."""


def text_model(name: str, raw: dict[str, Any], where: Path) -> tuple[str, dict[str, Any]]:
    """(class, config) of what is served of a checkpoint whose class is none of ours: of one with
    more than text its text part. Raises `BadModel`."""
    nested = isinstance(raw.get("text_config"), dict)
    if name not in WITH_TEXT_PART or not (nested or name in FLAT):
        return name, raw
    kind = text_config(raw).get("model_type") if nested else FLAT[name]
    kind = kind if isinstance(kind, str) else ""
    known = MODEL_TYPES[kind].name if kind in MODEL_TYPES else TEXT_TYPES.get(kind)
    if known is None:
        raise BadModel(f"{where}: text_config.model_type: the text part of {name} is served where "
                       f"a class of ours runs it, got {shown(kind)}")
    text = text_part({**raw, "architectures": [known]})
    heads, hidden = text.get("num_attention_heads"), text.get("hidden_size")
    if kind in TEXT_TYPES and isinstance(heads, int) and isinstance(hidden, int) and heads > 0:
        text.setdefault("head_dim", hidden // heads)
    return known, {**text, **ALWAYS.get(kind, {})}


def text_part(raw: dict[str, Any]) -> dict[str, Any]:
    """The text part of this config, with what is said of it outside."""
    text, tied = text_config(raw), "tie_word_embeddings"
    outer = {name: raw[name] for name in ("dtype", "torch_dtype", NAME) if raw.get(name)}
    ropes = {name: {**own, "rope_type": "default"} for name in ("rope_scaling", "rope_parameters")
             if isinstance(own := text.get(name), dict)
             and "mrope" in (own.get("rope_type"), own.get("type"))}
    return {**outer, **text, **ropes, "architectures": raw["architectures"],
            tied: raw.get(tied, text.get(tied))}
