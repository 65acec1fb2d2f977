"""Model classes that configs name, or should have named.

A config without `architectures`, or with that of a model without its head (`LlamaModel`), says by
its `model_type` what it is: its tensors are those of the whole model.
"""

from __future__ import annotations

from typing import Any, NamedTuple

MAX_INT32 = 2**31 - 1
"""The largest size or id that a field may name."""
DEFAULT_POSITIONS = 2048
"""Of the longest sequence, where neither config nor class tell; as vLLM assumes."""
POSITION_FIELDS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length",
                   "max_seq_len", "max_seq_length", "model_max_length", "seq_len")
"""What configs call the length of the longest sequence."""

UNUSED_POSITIONS = 2
"""Rows before the first position's in the tables of RoBERTa and its kin, which their configs
count."""
WITH_UNUSED = ("Roberta", "XLMRoberta", "Camembert", "MPNet")
"""What the names of their classes begin with."""


class ModelClass(NamedTuple):
    """A class of transformers."""

    name: str
    positions: int
    """Length of the longest sequence where a config does not tell."""


MODEL_TYPES = {
    "llama": ModelClass("LlamaForCausalLM", 2048),
    "mistral": ModelClass("MistralForCausalLM", 131_072),
    "ministral": ModelClass("MinistralForCausalLM", 131_072),
    "qwen2": ModelClass("Qwen2ForCausalLM", 32_768),
    "qwen3": ModelClass("Qwen3ForCausalLM", 32_768),
    "qwen3_moe": ModelClass("Qwen3MoeForCausalLM", 32_768),
    "gemma3_text": ModelClass("Gemma3ForCausalLM", 131_072),
    "gemma3": ModelClass("Gemma3ForConditionalGeneration", 131_072),
    "deepseek_v3": ModelClass("DeepseekV3ForCausalLM", 4096),
    "qwen3_next": ModelClass("Qwen3NextForCausalLM", 32_768),
    "qwen3_5_text": ModelClass("Qwen3_5ForCausalLM", 32_768),
    "qwen3_5": ModelClass("Qwen3_5ForConditionalGeneration", 32_768),
    "qwen3_5_moe_text": ModelClass("Qwen3_5MoeForCausalLM", 32_768),
    "qwen3_5_moe": ModelClass("Qwen3_5MoeForConditionalGeneration", 32_768),
    "granite": ModelClass("GraniteForCausalLM", 2048),
    "granitemoehybrid": ModelClass("GraniteMoeHybridForCausalLM", 2048),
    "qwen2_5_vl": ModelClass("Qwen2_5_VLForConditionalGeneration", 32_768),
    "qwen3_vl": ModelClass("Qwen3VLForConditionalGeneration", 128_000),
    "qwen3_vl_moe": ModelClass("Qwen3VLMoeForConditionalGeneration", 128_000),
    "phi3": ModelClass("Phi3ForCausalLM", 4096),
    "olmo2": ModelClass("Olmo2ForCausalLM", 2048),
    "olmo3": ModelClass("Olmo3ForCausalLM", 2048),
    "smollm3": ModelClass("SmolLM3ForCausalLM", 32_768),
    "glm": ModelClass("GlmForCausalLM", 131_072),
    "glm4": ModelClass("Glm4ForCausalLM", 131_072),
    "mixtral": ModelClass("MixtralForCausalLM", 131_072),
    "gemma2": ModelClass("Gemma2ForCausalLM", 8192),
    "qwen2_moe": ModelClass("Qwen2MoeForCausalLM", 32_768),
    "granitemoe": ModelClass("GraniteMoeForCausalLM", 2048),
    "seed_oss": ModelClass("SeedOssForCausalLM", 524_288),
    "exaone4": ModelClass("Exaone4ForCausalLM", 2048),
    "olmoe": ModelClass("OlmoeForCausalLM", 4096),
    "granitemoeshared": ModelClass("GraniteMoeSharedForCausalLM", 2048),
    "mistral3": ModelClass("Mistral3ForConditionalGeneration", 131_072),
    "ministral3": ModelClass("Ministral3ForCausalLM", 262_144),
    "deepseek_v32": ModelClass("DeepseekV32ForCausalLM", 163_840),
    "glm_moe_dsa": ModelClass("GlmMoeDsaForCausalLM", 202_752),
    "mistral4": ModelClass("Mistral4ForCausalLM", 1_048_576),
    "glm4_moe": ModelClass("Glm4MoeForCausalLM", 131_072),
    "minimax_m2": ModelClass("MiniMaxM2ForCausalLM", 196_608),
    "ernie4_5": ModelClass("Ernie4_5ForCausalLM", 131_072),
    "ernie4_5_moe": ModelClass("Ernie4_5_MoeForCausalLM", 131_072),
    "hunyuan_v1_dense": ModelClass("HunYuanDenseV1ForCausalLM", 2048),
    "hunyuan_v1_moe": ModelClass("HunYuanMoEV1ForCausalLM", 2048),
    "dots1": ModelClass("Dots1ForCausalLM", 2048),
    "flex_olmo": ModelClass("FlexOlmoForCausalLM", 4096),
    "deepseek_v2": ModelClass("DeepseekV2ForCausalLM", 2048),
    "llama4_text": ModelClass("Llama4ForCausalLM", 131_072),
    "llama4": ModelClass("Llama4ForConditionalGeneration", 131_072),
    "glm4_moe_lite": ModelClass("Glm4MoeLiteForCausalLM", 202_752),
    "bamba": ModelClass("BambaForCausalLM", 262_144),
    "falcon_h1": ModelClass("FalconH1ForCausalLM", 8192),
    "lfm2": ModelClass("Lfm2ForCausalLM", 128_000),
    "lfm2_moe": ModelClass("Lfm2MoeForCausalLM", 128_000),
    "mamba2": ModelClass("Mamba2ForCausalLM", 32_768),
    "mamba": ModelClass("MambaForCausalLM", 32_768),
    "falcon_mamba": ModelClass("FalconMambaForCausalLM", 32_768),
    "jamba": ModelClass("JambaForCausalLM", 262_144),
    "nemotron_h": ModelClass("NemotronHForCausalLM", 4096),
    "kimi_linear": ModelClass("KimiLinearForCausalLM", 1_048_576),
    "starcoder2": ModelClass("Starcoder2ForCausalLM", 4096),
    "cohere": ModelClass("CohereForCausalLM", 8192),
    "cohere2": ModelClass("Cohere2ForCausalLM", 8192),
    "gpt_neox": ModelClass("GPTNeoXForCausalLM", 2048),
    "gpt2": ModelClass("GPT2LMHeadModel", 1024),
    "phi": ModelClass("PhiForCausalLM", 2048),
    "stablelm": ModelClass("StableLmForCausalLM", 4096),
    "nemotron": ModelClass("NemotronForCausalLM", 4096),
    "olmo": ModelClass("OlmoForCausalLM", 2048),
    "helium": ModelClass("HeliumForCausalLM", 4096),
    "arcee": ModelClass("ArceeForCausalLM", 4096),
    "internlm3": ModelClass("InternLM3ForCausalLM", 32_768),
    "apertus": ModelClass("ApertusForCausalLM", 65_536),
    "gptj": ModelClass("GPTJForCausalLM", 2048),
    "gpt_bigcode": ModelClass("GPTBigCodeForCausalLM", 1024),
    "falcon": ModelClass("FalconForCausalLM", 2048),
    "bloom": ModelClass("BloomForCausalLM", 2048),
    "mpt": ModelClass("MptForCausalLM", 2048),
    "persimmon": ModelClass("PersimmonForCausalLM", 16_384),
    "jais2": ModelClass("Jais2ForCausalLM", 8192),
    "gemma4_text": ModelClass("Gemma4ForCausalLM", 131_072),
    "gemma4": ModelClass("Gemma4ForConditionalGeneration", 131_072),
    "gemma3n_text": ModelClass("Gemma3nForCausalLM", 32_768),
    "gemma3n": ModelClass("Gemma3nForConditionalGeneration", 32_768),
    "vaultgemma": ModelClass("VaultGemmaForCausalLM", 8192),
    "opt": ModelClass("OPTForCausalLM", 2048),
    "gpt_oss": ModelClass("GptOssForCausalLM", 131_072),
    "bert": ModelClass("BertModel", 512),
    "roberta": ModelClass("RobertaModel", 510),
    "camembert": ModelClass("CamembertModel", 510),
    "xlm-roberta": ModelClass("XLMRobertaModel", 510),
    "distilbert": ModelClass("DistilBertModel", 512),
    "mpnet": ModelClass("MPNetModel", 510),
    "nomic_bert": ModelClass("NomicBertModel", 2048),
    "gte": ModelClass("GteModel", 8192),
    "new": ModelClass("NewModel", 8192),
    "modernbert": ModelClass("ModernBertModel", 8192),
    "eurobert": ModelClass("EuroBertModel", 8192),
}
"""By `model_type`."""
_POSITIONS = {own.name: own.positions for own in MODEL_TYPES.values()}


def architecture(config: dict[str, Any]) -> str:
    """The class that a config.json names, or by its `model_type` means; "" where it does not say.
    """
    names = config.get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else ""
    known = MODEL_TYPES.get(str(config.get("model_type")))
    if known is None:
        return name
    family = known.name.partition("For")[0].removesuffix("LMHeadModel")
    plain = name in ("", f"{family}Model", f"{family}TextModel")
    return known.name if plain or name.lower() == known.name.lower() else name


def default_positions(config: dict[str, Any]) -> int:
    """The length of the longest sequence that is assumed where a config does not tell."""
    return _POSITIONS.get(architecture(config), DEFAULT_POSITIONS)
