"""The architectures of GGUF files by llama.cpp's names for them (`general.architecture`): which
class of config.json each is, what its keys are called there, and what its tensors are called in a
checkpoint of that class. Data alone, and no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from actorium.actors.errors import shown
from actorium.actors.models import gguf_encoders as encoders
from actorium.actors.models import gguf_fields as fields
from actorium.actors.models import gguf_gemma as gemma
from actorium.actors.models import gguf_keys as keys
from actorium.actors.models import gguf_names as names
from actorium.actors.models.gguf_file import GgufFile
from actorium.actors.models.gguf_keys import RMS, Config, Key, layer_norm_epsilon
from actorium.actors.models.gguf_names import (
    ATTENTION,
    EXPERTS,
    JOINED,
    LATENT,
    LAYER,
    OUTER,
    SPARSE,
    Name,
    experts_at,
)

More = Callable[[GgufFile, str, Config], Config]
"""(file, architecture, config so far) -> further fields."""


class GgufFamily(NamedTuple):
    """An architecture."""

    architecture: str
    """Class name in config.json."""
    layer: dict[str, Name]
    """Modules of a layer, or whole names of tensors."""
    keys: tuple[Key, ...] = ()
    experts: dict[str, Name] = {}
    """Modules of all of a layer's experts; "{}" is the expert's number."""
    changes: dict[str, str] = {}
    """What is done to tensors of a layer to make those of a checkpoint; see `CHANGES` of
    `gpu/weights/gguf_reader.py`."""
    more: More | None = None
    permuted: bool = False
    """Rows of queries and keys lie in pairs, as llama.cpp rotates them for Llama."""
    norm_plus_one: bool = False
    """The 1 that norms add lies in their weights."""
    partial: bool = False
    """A part of each head may be rotated alone."""
    latent: bool = False
    """Attention over latents: heads have other sizes."""
    outer: dict[str, str] = OUTER
    """Modules outside of layers; "{}": of several matrices in one tensor, the number."""
    epsilon: Key = RMS
    """That of its norms."""
    tiled: dict[str, str] = {}
    """Tensors of a layer in which the value heads of a key head do not lie together: its first one
    lies behind the first one of the key head before; which rows they are, or COLUMNS."""
    by_head: dict[str, str] = {}
    """Tensors that have a row for each head, which are tensors of their own; "{}" is its number."""
    numbers: dict[str, str] = {}
    """Keys that have a number for each layer, which are tensors of layers."""
    drafts: dict[str, str] = {}
    """Modules of the layer that drafts, the first of several; {}: none is served."""


HYBRID_SHARED = {f"ffn_{own}.weight": JOINED for own in ("gate", "up", "gate_shexp", "up_shexp")}
EXPANDED = {"attn_k_b.weight": LATENT, "attn_v_b.weight": LATENT}
GATE_ROW = {"ffn_gate_inp_shexp.weight": "row"}
LAYER_NORM = layer_norm_epsilon("layer_norm_eps")
GPT_NORM = layer_norm_epsilon("layer_norm_epsilon")
GPT_OUTER = {**OUTER, "position_embd": "model.embed_positions"}
QWEN3MOE = GgufFamily("Qwen3MoeForCausalLM", names.QWEN_MOE_LAYER, keys.QWEN_EXPERTS, EXPERTS,
                      more=fields.qwen3moe_fields)
NEMOTRON_H = GgufFamily(
    "NemotronHForCausalLM", names.NEMOTRON_H_LAYER, keys.NEMOTRON_H_KEYS, {}, names.RECURRENT,
    fields.nemotron_h_fields, epsilon=GPT_NORM)
STABLELM = GgufFamily(
    "StableLmForCausalLM", LAYER, more=fields.stablelm_fields, partial=True,
    epsilon=LAYER_NORM, by_head={f"attn_{own}_norm": f"self_attn.{own}_norm.norms.{{}}"
                                 for own in "qk"})
LLAMA = GgufFamily("LlamaForCausalLM", LAYER, permuted=True)
UNPAIRED = LLAMA._replace(permuted=False)
FAMILIES = {
    "llama": LLAMA, "internlm2": LLAMA, "xverse": LLAMA, "exaone": UNPAIRED,
    "pangu-embedded": UNPAIRED, "baichuan": LLAMA._replace(more=fields.baichuan_fields),
    "minicpm": GgufFamily("GraniteForCausalLM", LAYER, keys.GRANITE_KEYS,
                          more=fields.minicpm_fields, permuted=True),
    "qwen": GgufFamily("Qwen2ForCausalLM", LAYER, more=fields.qwen_fields),
    "mistral3": GgufFamily("MistralForCausalLM", LAYER, more=fields.mistral3_fields,
                           permuted=True),
    "llama4": GgufFamily("Llama4ForCausalLM", names.LLAMA4_LAYER, keys.LLAMA4_KEYS,
                         experts_at("feed_forward."), more=fields.llama4_fields),
    "qwen2": GgufFamily("Qwen2ForCausalLM", LAYER),
    "qwen3": GgufFamily("Qwen3ForCausalLM", LAYER),
    "qwen2vl": GgufFamily("Qwen2ForCausalLM", LAYER),
    "qwen3vl": GgufFamily("Qwen3ForCausalLM", LAYER),
    "qwen2moe": GgufFamily("Qwen2MoeForCausalLM", names.QWEN2_MOE_LAYER, keys.QWEN_EXPERTS,
                           EXPERTS, GATE_ROW, fields.qwen2moe_fields),
    "qwen3moe": QWEN3MOE, "qwen3vlmoe": QWEN3MOE,
    "gemma2": GgufFamily("Gemma2ForCausalLM", names.GEMMA_LAYER, keys.CAPS,
                         more=gemma.gemma_fields, norm_plus_one=True),
    "gemma3": GgufFamily("Gemma3ForCausalLM", names.GEMMA_LAYER, keys.CAPS,
                         more=gemma.gemma_fields, norm_plus_one=True),
    "gemma3n": GgufFamily("Gemma3nForCausalLM", names.GEMMA3N_LAYER, keys.GEMMA3N_KEYS,
                          more=gemma.gemma3n_fields, outer=names.GEMMA3N_OUTER),
    "gemma4": GgufFamily("Gemma4ForCausalLM", names.GEMMA4_LAYER, keys.GEMMA4_KEYS,
                         experts_at(""), more=gemma.gemma4_fields, outer=names.TOKEN_OUTER),
    "phi3": GgufFamily("Phi3ForCausalLM", {**LAYER, **names.GATE_UP}, more=fields.phi3_fields,
                       partial=True),
    "olmo": GgufFamily("OlmoForCausalLM", LAYER, keys.CLIP, permuted=True, epsilon=LAYER_NORM),
    "olmo2": GgufFamily("Olmo2ForCausalLM", names.AFTER_LAYER, more=fields.olmo2_fields),
    "smollm3": GgufFamily("SmolLM3ForCausalLM", LAYER, permuted=True),
    "apertus": GgufFamily("ApertusForCausalLM", names.APERTUS_LAYER, more=fields.apertus_fields,
                          numbers=names.XIELU),
    "chatglm": GgufFamily("GlmForCausalLM", {**LAYER, **names.GATE_UP}, more=fields.glm_fields,
                          partial=True),
    "glm4": GgufFamily("Glm4ForCausalLM", names.GLM_LAYER, more=fields.glm_fields, partial=True),
    "seed_oss": GgufFamily("SeedOssForCausalLM", names.SEED_LAYER, more=fields.seed_oss_fields),
    "exaone4": GgufFamily("Exaone4ForCausalLM", names.AFTER_LAYER, more=fields.exaone4_fields),
    "granite": GgufFamily("GraniteForCausalLM", LAYER, keys.GRANITE_KEYS,
                          more=fields.granite_fields, permuted=True),
    "granitemoe": GgufFamily(
        "GraniteMoeForCausalLM", {**names.HYBRID_LAYER, **ATTENTION},
        (*keys.GRANITE_KEYS, *keys.LOCAL_EXPERTS), experts_at(SPARSE),
        {f"ffn_{own}_shexp.weight": JOINED for own in ("gate", "up")}, fields.granite_moe_fields,
        permuted=True),
    "granitehybrid": GgufFamily(
        "GraniteMoeHybridForCausalLM", names.HYBRID_LAYER, keys.HYBRID_KEYS, experts_at(SPARSE),
        {**names.RECURRENT, **HYBRID_SHARED}, fields.granite_hybrid_fields, permuted=True),
    "falcon-h1": GgufFamily("FalconH1ForCausalLM", names.FALCON_H1_LAYER, keys.MAMBA2_KEYS, {},
                            names.RECURRENT, fields.falcon_h1_fields),
    "jamba": GgufFamily(
        "JambaForCausalLM", names.JAMBA_LAYER, keys.JAMBA_KEYS, experts_at("feed_forward."),
        names.SCAN, fields.jamba_fields),
    "mamba": GgufFamily("MambaForCausalLM", names.MAMBA_LAYER, keys.MAMBA_KEYS, {}, names.SCAN,
                        fields.mamba_fields),
    "mamba2": GgufFamily("Mamba2ForCausalLM", names.MAMBA2_LAYER, keys.MAMBA_KEYS, {},
                         names.RECURRENT, fields.mamba2_fields),
    "nemotron_h": NEMOTRON_H,
    "nemotron_h_moe": NEMOTRON_H._replace(
        keys=(*keys.NEMOTRON_H_KEYS, *keys.GROUPED_KEYS), experts=experts_at("mixer."),
        drafts=names.NEMOTRON_MTP),
    "qwen3next": GgufFamily(
        "Qwen3NextForCausalLM", names.NEXT_LAYER, (*keys.DELTA_KEYS, *keys.DELTA_EXPERTS), EXPERTS,
        {**names.RECURRENT, **GATE_ROW}, fields.qwen3next_fields, norm_plus_one=True,
        partial=True, drafts=names.QWEN_MTP),
    "qwen35": GgufFamily(
        "Qwen3_5ForCausalLM", names.DELTA_LAYER, keys.DELTA_KEYS, {}, names.RECURRENT,
        fields.qwen35_fields, norm_plus_one=True, partial=True, tiled=names.TILED,
        drafts=names.QWEN_MTP),
    "qwen35moe": GgufFamily(
        "Qwen3_5MoeForCausalLM", names.DELTA_LAYER, (*keys.DELTA_KEYS, *keys.DELTA_EXPERTS),
        EXPERTS, {**names.RECURRENT, **GATE_ROW}, fields.qwen35_fields, norm_plus_one=True,
        partial=True, tiled=names.TILED,
        drafts=names.QWEN_MTP),
    "olmoe": GgufFamily("OlmoeForCausalLM", names.QWEN_MOE_LAYER, keys.QWEN_EXPERTS, EXPERTS,
                        more=fields.olmoe_fields),
    "glm4moe": GgufFamily("Glm4MoeForCausalLM", names.GLM4_MOE_LAYER, keys.GROUPED_KEYS, EXPERTS,
                          more=fields.glm4moe_fields, partial=True, drafts=names.DEEPSEEK_MTP),
    "dots1": GgufFamily("Dots1ForCausalLM", names.GROUPED_LAYER, keys.GROUPED_KEYS, EXPERTS,
                        more=fields.dots1_fields),
    "minimax-m2": GgufFamily(
        "MiniMaxM2ForCausalLM", {**LAYER, "ffn_gate_inp": f"{SPARSE}gate", "exp_probs_b.bias":
                                 f"{SPARSE}e_score_correction_bias"},
        keys.LOCAL_EXPERTS, names.MIXTRAL_EXPERTS, more=fields.minimax_fields, partial=True),
    "ernie4_5": GgufFamily("Ernie4_5ForCausalLM", LAYER, more=fields.ernie_fields),
    "ernie4_5-moe": GgufFamily("Ernie4_5_MoeForCausalLM", names.ERNIE_MOE_LAYER, keys.ERNIE_KEYS,
                               EXPERTS, {"exp_probs_b.bias": "row"}, fields.ernie_fields),
    "hunyuan-dense": GgufFamily("HunYuanDenseV1ForCausalLM", names.HUNYUAN_LAYER),
    "hunyuan-moe": GgufFamily("HunYuanMoEV1ForCausalLM", names.HUNYUAN_MOE_LAYER,
                              keys.HUNYUAN_KEYS, EXPERTS, more=fields.hunyuan_moe_fields),
    "lfm2": GgufFamily("Lfm2ForCausalLM", names.LFM_LAYER, keys.LFM_KEYS, {},
                       names.SHORT_CONVOLUTION, fields.lfm2_fields, outer=names.LFM_OUTER),
    "lfm2moe": GgufFamily(
        "Lfm2MoeForCausalLM", names.LFM_LAYER, keys.LFM_MOE_KEYS,
        experts_at("feed_forward.", ("w1", "w3", "w2")), names.SHORT_CONVOLUTION,
        fields.lfm2_moe_fields, outer=names.LFM_OUTER),
    "gpt-oss": GgufFamily(
        "GptOssForCausalLM", names.GPT_OSS_LAYER, keys.GPT_OSS_KEYS, EXPERTS,
        more=fields.gpt_oss_fields),
    "gpt2": GgufFamily("GPT2LMHeadModel", LAYER, more=fields.gpt2_fields, outer=GPT_OUTER,
                       epsilon=GPT_NORM),
    "gptneox": GgufFamily("GPTNeoXForCausalLM", LAYER, more=fields.gptneox_fields, partial=True,
                          epsilon=LAYER_NORM),
    "starcoder": GgufFamily("GPTBigCodeForCausalLM", LAYER, more=fields.starcoder_fields,
                            outer=GPT_OUTER, epsilon=GPT_NORM),
    "falcon": GgufFamily("FalconForCausalLM", LAYER, more=fields.falcon_fields, epsilon=GPT_NORM),
    "bloom": GgufFamily("BloomForCausalLM", LAYER, epsilon=GPT_NORM,
                        outer={**OUTER, "token_embd_norm": "model.embed_norm"}),
    "mpt": GgufFamily("MptForCausalLM", LAYER, more=fields.mpt_fields, epsilon=GPT_NORM),
    "phi2": GgufFamily("PhiForCausalLM", LAYER, partial=True, epsilon=LAYER_NORM),
    "stablelm": STABLELM, "orion": STABLELM,
    "command-r": GgufFamily("CohereForCausalLM", LAYER, keys.LOGIT_SCALE,
                            more=fields.cohere_fields, epsilon=LAYER_NORM),
    "cohere2": GgufFamily("Cohere2ForCausalLM", LAYER, keys.LOGIT_SCALE,
                          more=fields.cohere2_fields, epsilon=LAYER_NORM),
    "starcoder2": GgufFamily("Starcoder2ForCausalLM", LAYER, more=fields.starcoder2_fields,
                             epsilon=layer_norm_epsilon("norm_epsilon")),
    "codeshell": GgufFamily("Starcoder2ForCausalLM", LAYER, more=fields.starcoder2_fields,
                            epsilon=layer_norm_epsilon("norm_epsilon")),
    "nemotron": GgufFamily("NemotronForCausalLM", LAYER, norm_plus_one=True, partial=True,
                           epsilon=layer_norm_epsilon("norm_eps")),
    "jais2": GgufFamily("Jais2ForCausalLM", LAYER, epsilon=LAYER_NORM),
    "arcee": GgufFamily("ArceeForCausalLM", LAYER, permuted=True),
    "bert": GgufFamily("BertModel", names.ENCODER_LAYER, more=encoders.bert_fields,
                       outer=names.ENCODER_OUTER, epsilon=LAYER_NORM),
    "nomic-bert": GgufFamily("NomicBertModel", names.ENCODER_LAYER, more=encoders.bert_fields,
                             outer=names.ENCODER_OUTER, epsilon=LAYER_NORM),
    "modern-bert": GgufFamily(
        "ModernBertModel", {**LAYER, **names.GATE_UP}, keys.MODERNBERT_KEYS,
        more=encoders.modernbert_fields, outer=names.ENCODER_OUTER,
        epsilon=layer_norm_epsilon("norm_eps")),
    "deepseek2": GgufFamily(
        "DeepseekV3ForCausalLM", names.DEEPSEEK_LAYER, keys.DEEPSEEK_KEYS, EXPERTS, EXPANDED,
        fields.deepseek_fields, latent=True, drafts=names.DEEPSEEK_MTP),
    "mistral4": GgufFamily(
        "Mistral4ForCausalLM", names.DEEPSEEK_LAYER, keys.DEEPSEEK_KEYS, EXPERTS, EXPANDED,
        fields.mistral4_fields, latent=True),
    "deepseek32": GgufFamily(
        "DeepseekV32ForCausalLM", names.INDEXED_LAYER, keys.INDEXED_KEYS, EXPERTS, EXPANDED,
        fields.deepseek_fields, latent=True, drafts=names.DEEPSEEK_MTP),
    "glm-dsa": GgufFamily(
        "GlmMoeDsaForCausalLM", names.INDEXED_LAYER, keys.INDEXED_KEYS, EXPERTS, EXPANDED,
        fields.deepseek_fields, latent=True, drafts=names.DEEPSEEK_MTP),
    "kimi-linear": GgufFamily(
        "KimiLinearForCausalLM", names.KIMI_LAYER, keys.KIMI_KEYS,
        experts_at("mlp.", ("w1", "w3", "w2")), {**EXPANDED, **names.KIMI_CHANGES},
        fields.kimi_fields, latent=True),
}
"""By `general.architecture`."""
VARIANTS: dict[str, tuple[Callable[[GgufFile], object], GgufFamily]] = {
    "llama": (lambda file: file.number("llama.expert_count", 0), GgufFamily(
        "MixtralForCausalLM", {**LAYER, "ffn_gate_inp": f"{SPARSE}gate"}, keys.LOCAL_EXPERTS,
        names.MIXTRAL_EXPERTS, permuted=True)),
    "falcon": (lambda file: "blk.0.attn_norm_2.weight" in file.tensors, FAMILIES["falcon"]._replace(
        layer={**LAYER, "attn_norm_2": "input_layernorm",
               "attn_norm": "post_attention_layernorm"})),
    "granitehybrid": (lambda file: "granitehybrid.embedding_scale" not in file, GgufFamily(
        "BambaForCausalLM", names.BAMBA_LAYER, keys.MAMBA2_KEYS, {}, names.RECURRENT,
        fields.bamba_fields, permuted=True, partial=True)),
}
"""Other classes that have the same name, and which files are theirs."""


def family(file: GgufFile) -> GgufFamily:
    """Of the model. Raises `BadModel` where its architecture is not served."""
    name = file.text("general.architecture")
    if name not in FAMILIES:
        raise file.bad("general.architecture", f"{shown(name)} is not served; served are "
                       f"{', '.join(FAMILIES)}")
    own, count = FAMILIES[name], f"{name}.expert_count"
    if name in VARIANTS and VARIANTS[name][0](file):
        own = VARIANTS[name][1]
    if file.number(count, 0) and not own.experts:
        raise file.bad(count, "mixtures of experts of this architecture are not served")
    return own
