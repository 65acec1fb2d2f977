"""Which architectures are served: what reads each one's `config.json`, and which tensors its
checkpoints have. The memory plan, the worker, the bench and the tests all ask here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from actorium.actors.config.tree import MADE_BITS, STORED, Config
from actorium.actors.errors import SHOWN, BadConfig, BadModel
from actorium.actors.models.gritlm import as_embedder
from actorium.actors.models.model_classes import MODEL_TYPES, architecture
from actorium.actors.models.model_dir import read_config, within
from actorium.actors.models.pooling_shape import PoolingShape, generating_class, read_pooling
from actorium.actors.plugins.entry_points import (
    MODELS,
    LoadedPlugin,
    load_group,
    refuse_faults,
    usable,
)
from actorium.gpu.families import layer_norm_config as ln
from actorium.gpu.families import tensor_names as names
from actorium.gpu.families.decoder_config import ConfigReader
from actorium.gpu.families.deepseek_config import (
    deepseek,
    deepseek_layer,
    deepseek_mtp,
    deepseek_v2,
    deepseek_v32,
    glm4_moe_lite,
    glm_moe_dsa,
)
from actorium.gpu.families.dense_config import (
    ernie4_5,
    exaone4,
    glm,
    glm4,
    hunyuan,
    internlm3,
    olmo2,
    olmo3,
    phi3,
    seed_oss,
    smollm3,
)
from actorium.gpu.families.draft_shape import (
    FLAG,
    PARAM,
    check_draft_model,
    draft_model_config,
)
from actorium.gpu.families.eagle_config import read_eagle
from actorium.gpu.families.encoder_config import READERS, bidirectional
from actorium.gpu.families.fp8_config import served_fp8
from actorium.gpu.families.gemma_config import gemma3n, gemma4, gemma_layer
from actorium.gpu.families.granite_config import (
    granite,
    granite_hybrid,
    granite_hybrid_layer,
    granite_moe,
    granite_moe_shared,
)
from actorium.gpu.families.kimi_config import kimi_linear
from actorium.gpu.families.lfm_config import lfm2, lfm2_moe
from actorium.gpu.families.llama4_config import llama4
from actorium.gpu.families.llama_config import (
    causal_layer,
    gemma2,
    gemma3,
    llama,
    ministral,
    mistral,
    qwen2,
    qwen3,
    vault_gemma,
)
from actorium.gpu.families.mamba_config import bamba, falcon_h1, mamba2, parted_layer
from actorium.gpu.families.mistral_config import ministral3, mistral3, mistral4
from actorium.gpu.families.mixture_config import (
    dots1,
    ernie4_5_moe,
    flex_olmo,
    glm4_moe,
    gpt_oss,
    hunyuan_moe,
    minimax_m2,
    mixtral,
    olmoe,
    qwen2_moe,
)
from actorium.gpu.families.model_shape import ModelShape
from actorium.gpu.families.nemotron_config import nemotron_h, nemotron_h_mtp
from actorium.gpu.families.quant_config import (
    gguf_grouped,
    online_grouped,
    stored_in,
    stored_weights,
)
from actorium.gpu.families.qwen_hybrid_config import (
    HYBRIDS,
    hybrid_layer,
    qwen_hybrid,
    qwen_mtp,
)
from actorium.gpu.families.qwen_vl_config import qwen3_vl, qwen3_vl_moe, qwen25_vl
from actorium.gpu.families.scan_config import falcon_mamba, jamba, mamba
from actorium.gpu.families.tensor_specs import (
    ATTENTION,
    MtpNames,
    TensorSpec,
    embedding_and_head_tensors,
    layer_prefix,
    mtp_tensors,
    score_tensors,
    vision_tensors,
)
from actorium.gpu.families.text_parts import text_model
from actorium.gpu.families.transformers_config import any_decoder, require_class

LayerTensors = Callable[[ModelShape, int, str], list[TensorSpec]]
"""(shape, i, what their names begin with) -> the tensors of the i-th layer."""



class Architecture(NamedTuple):
    """A model class that configs name."""

    read: ConfigReader
    layer: LayerTensors
    names: names.Renames = ()
    """Of tensors that checkpoints call otherwise than `layer` does."""
    mtp: Callable[[ModelShape], MtpNames] | None = None
    """Where checkpoints have the layer that drafts, which as a decoder layer is number
    `ModelShape.layers`; None where the family has none."""
    decoder: str = ""
    """MODULE:CLASS of the `Decoder` that runs it; default: the one that runs layers of these
    tensors. Only plug-ins name one."""


ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": Architecture(llama, causal_layer),
    "MistralForCausalLM": Architecture(mistral, causal_layer),
    "MinistralForCausalLM": Architecture(ministral, causal_layer),
    "Qwen2ForCausalLM": Architecture(qwen2, causal_layer),
    "Qwen3ForCausalLM": Architecture(qwen3, causal_layer),
    "Gemma3ForCausalLM": Architecture(gemma3, causal_layer),
    "Gemma3ForConditionalGeneration": Architecture(gemma3, causal_layer),
    "DeepseekV3ForCausalLM": Architecture(deepseek, deepseek_layer, mtp=deepseek_mtp),
    **{name: Architecture(qwen_hybrid, hybrid_layer, mtp=qwen_mtp) for name in HYBRIDS},
    "GraniteForCausalLM": Architecture(granite, causal_layer),
    "GraniteMoeHybridForCausalLM": Architecture(granite_hybrid, granite_hybrid_layer),
    "Qwen2_5_VLForConditionalGeneration": Architecture(qwen25_vl, causal_layer),
    "Qwen3VLForConditionalGeneration": Architecture(qwen3_vl, causal_layer),
    "Qwen3VLMoeForConditionalGeneration": Architecture(qwen3_vl_moe, hybrid_layer),
    "Phi3ForCausalLM": Architecture(phi3, causal_layer),
    "Olmo2ForCausalLM": Architecture(olmo2, causal_layer),
    "Olmo3ForCausalLM": Architecture(olmo3, causal_layer),
    "SmolLM3ForCausalLM": Architecture(smollm3, causal_layer),
    "GlmForCausalLM": Architecture(glm, causal_layer),
    "Glm4ForCausalLM": Architecture(glm4, causal_layer),
    "MixtralForCausalLM": Architecture(mixtral, hybrid_layer),
    "Gemma2ForCausalLM": Architecture(gemma2, causal_layer),
    "Qwen2MoeForCausalLM": Architecture(qwen2_moe, hybrid_layer),
    "GraniteMoeForCausalLM": Architecture(granite_moe, hybrid_layer),
    "SeedOssForCausalLM": Architecture(seed_oss, causal_layer),
    "Exaone4ForCausalLM": Architecture(exaone4, causal_layer),
    "OlmoeForCausalLM": Architecture(olmoe, hybrid_layer),
    "GraniteMoeSharedForCausalLM": Architecture(granite_moe_shared, granite_hybrid_layer),
    "Mistral3ForConditionalGeneration": Architecture(mistral3, causal_layer),
    "Ministral3ForCausalLM": Architecture(ministral3, causal_layer),
    "DeepseekV32ForCausalLM": Architecture(deepseek_v32, deepseek_layer, mtp=deepseek_mtp),
    "GlmMoeDsaForCausalLM": Architecture(glm_moe_dsa, deepseek_layer, mtp=deepseek_mtp),
    "Mistral4ForCausalLM": Architecture(mistral4, deepseek_layer),
    "Glm4MoeForCausalLM": Architecture(glm4_moe, hybrid_layer, mtp=deepseek_mtp),
    "MiniMaxM2ForCausalLM": Architecture(minimax_m2, hybrid_layer),
    "Ernie4_5ForCausalLM": Architecture(ernie4_5, causal_layer),
    "Ernie4_5_MoeForCausalLM": Architecture(ernie4_5_moe, hybrid_layer),
    "HunYuanDenseV1ForCausalLM": Architecture(hunyuan, causal_layer),
    "HunYuanMoEV1ForCausalLM": Architecture(hunyuan_moe, hybrid_layer),
    "Dots1ForCausalLM": Architecture(dots1, hybrid_layer),
    "FlexOlmoForCausalLM": Architecture(flex_olmo, hybrid_layer),
    "DeepseekV2ForCausalLM": Architecture(deepseek_v2, deepseek_layer),
    "Llama4ForCausalLM": Architecture(llama4, hybrid_layer),
    "Llama4ForConditionalGeneration": Architecture(llama4, hybrid_layer),
    "Glm4MoeLiteForCausalLM": Architecture(glm4_moe_lite, deepseek_layer, mtp=deepseek_mtp),
    "BambaForCausalLM": Architecture(bamba, parted_layer),
    "FalconH1ForCausalLM": Architecture(falcon_h1, parted_layer),
    "Lfm2ForCausalLM": Architecture(lfm2, parted_layer),
    "Lfm2MoeForCausalLM": Architecture(lfm2_moe, parted_layer),
    "Mamba2ForCausalLM": Architecture(mamba2, parted_layer),
    "MambaForCausalLM": Architecture(mamba, parted_layer),
    "FalconMambaForCausalLM": Architecture(falcon_mamba, parted_layer),
    "JambaForCausalLM": Architecture(jamba, parted_layer),
    "NemotronHForCausalLM": Architecture(nemotron_h, parted_layer, mtp=nemotron_h_mtp),
    "KimiLinearForCausalLM": Architecture(kimi_linear, parted_layer, names.KIMI),
    "Starcoder2ForCausalLM": Architecture(ln.starcoder2, causal_layer, names.FEED),
    "CohereForCausalLM": Architecture(ln.cohere, causal_layer),
    "Cohere2ForCausalLM": Architecture(ln.cohere2, causal_layer),
    "GPTNeoXForCausalLM": Architecture(ln.gpt_neox, causal_layer, names.NEOX),
    "GPT2LMHeadModel": Architecture(ln.gpt2, causal_layer, names.GPT2),
    "PhiForCausalLM": Architecture(ln.phi, causal_layer, names.PHI),
    "StableLmForCausalLM": Architecture(ln.stablelm, causal_layer, names.HEAD_NORMS),
    "NemotronForCausalLM": Architecture(ln.nemotron, causal_layer),
    "OlmoForCausalLM": Architecture(ln.olmo, causal_layer),
    "HeliumForCausalLM": Architecture(ln.helium, causal_layer),
    "InternLM3ForCausalLM": Architecture(internlm3, causal_layer),
    "ArceeForCausalLM": Architecture(ln.arcee, causal_layer),
    "ApertusForCausalLM": Architecture(ln.apertus, causal_layer),
    "GPTJForCausalLM": Architecture(ln.gptj, causal_layer, names.GPT),
    "GPTBigCodeForCausalLM": Architecture(ln.gpt_bigcode, causal_layer, names.BIGCODE),
    "FalconForCausalLM": Architecture(ln.falcon, causal_layer, names.FALCON),
    "BloomForCausalLM": Architecture(ln.bloom, causal_layer, names.BLOOM),
    "MptForCausalLM": Architecture(ln.mpt, causal_layer, names.MPT),
    "PersimmonForCausalLM": Architecture(ln.persimmon, causal_layer, names.PERSIMMON),
    "Jais2ForCausalLM": Architecture(ln.jais2, causal_layer),
    "VaultGemmaForCausalLM": Architecture(vault_gemma, causal_layer),
    "OPTForCausalLM": Architecture(ln.opt, causal_layer, names.OPT),
    "GptOssForCausalLM": Architecture(gpt_oss, hybrid_layer),
    "Gemma4ForCausalLM": Architecture(gemma4, gemma_layer),
    "Gemma4ForConditionalGeneration": Architecture(gemma4, gemma_layer),
    "Gemma3nForCausalLM": Architecture(gemma3n, gemma_layer),
    "Gemma3nForConditionalGeneration": Architecture(gemma3n, gemma_layer),
    **{f"{family}Model": Architecture(read, causal_layer, named)
       for family, (read, named) in READERS.items()},
}
"""By the name in a config. Of those with images (ConditionalGeneration) requests are served for
text alone."""
_OWN = frozenset(ARCHITECTURES)
"""Those that no plug-in has added."""


def shape_from_config(
    raw: dict[str, Any], where: Path, dtype: str = "auto", max_model_len: int | None = None,
    quantization: str = "auto", group: int | None = None, head: str = "auto",
    text_only: bool = False, impl: str = "auto", pooling: PoolingShape | None = None,
) -> ModelShape:
    """`ModelShape` of a parsed `config.json`.

    dtype: of the weights, "auto" = the checkpoint's. max_model_len: None = the model's own limit.
    quantization, group, head, impl: see `ModelConfig`. text_only: without what images take.
    pooling: of a model that does not generate, the head is left out. Raises `BadModel` naming the
    file and the field that is missing or wrong, and `BadConfig` for a max_model_len beyond the
    limit.
    """
    raw = raw if pooling is None else as_embedder(raw)
    name, raw = text_model(generating_class(_architecture(raw, where)), raw, where)
    own, raw = name in ARCHITECTURES, {**raw, "architectures": [name]}
    theirs = impl == "transformers" or impl == "auto" and not own
    if theirs and pooling is not None and pooling.head:
        raise BadModel(f"{where}: {unsupported(name)}: heads for scores are served with classes of "
                       "ours alone")
    if theirs:
        require_class(name, raw, where, unsupported(name))
    elif not own:
        raise BadModel(f"{where}: {unsupported(name)}; "
                       "--model-impl transformers serves many others by transformers' classes")
    fp8, stored = served_fp8(raw, where, quantization), stored_weights(raw, where)
    if quantization in STORED:
        if (found := stored_in(raw)) != quantization:
            raise BadConfig(f"--quantization {quantization}: {where.parent} has its weights "
                            f"{f'in {found}' if found else 'unquantised'}: take auto (as they "
                            "are), or fp8, int8 or int4 to quantise them", "model.quantization")
        quantization = "auto"
    bits = 8.0 if fp8 and not fp8.online else stored.bits if stored else 0.0
    shape = (_by_transformers(raw, where, dtype, bits, own) if theirs else
             ARCHITECTURES[name].read(raw, where, dtype))
    shape = bidirectional(shape, raw, where)
    shape = replace(shape, fp8=fp8, max_model_len=within(shape.max_model_len, max_model_len),
                    vision=None if text_only else shape.vision, pooling=pooling)
    if pooling is not None and not pooling.generates:
        shape = replace(shape, tied=True, head_bias=False, mtp_layers=0)
    shape = shape if theirs else shape.simplified()
    specs = () if theirs else model_tensors(shape)
    kept = (gguf_grouped(raw, where) if stored is None else
            stored.estimated if theirs else stored.held(specs))
    if kept is not None and quantization == "auto":
        return replace(shape, grouped=kept)
    if kept is not None and quantization != "none":
        raise BadConfig(f"--quantization {quantization}: {where.parent} has its weights in "
                        f"{kept.source} already: take auto (as they are) or none",
                        "model.quantization")
    if quantization in MADE_BITS:
        grouped = online_grouped(MADE_BITS[quantization], group, head, shape.tied and not theirs,
                                 specs)
        return replace(shape, fp8=None, grouped=grouped)
    return shape


def _by_transformers(raw: dict[str, Any], where: Path, dtype: str, bits: float,
                     own: bool) -> ModelShape:
    """The shape of a model that transformers' class runs. bits: see `any_decoder`; own: we have a
    class for it, too."""
    try:
        return any_decoder(raw, where, dtype, bits)
    except BadModel as error:
        if own:
            raise
        raise BadModel(f"{where}: {unsupported(raw['architectures'][0])}; nor is it by "
                       "transformers' class (--model-impl): "
                       f"{error.message.removeprefix(f'{where}: ')}") from None


def read_shape(path: Path, config: Config) -> ModelShape:
    """The shape of the checkpoint at `path`. Raises `BadModel` and `BadConfig`."""
    if not path.is_dir():
        raise BadModel(f"{path}: no such directory")
    where, model, page = path / "config.json", config.model, config.memory.page_size
    raw = read_config(path)
    add_plugin_families(architecture(raw), config.runtime.plugins)
    shape = shape_from_config(raw, where, model.dtype, model.max_model_len,
                              model.quantization, model.quantization_group,
                              model.quantization_head, model.language_model_only,
                              model.model_impl, read_pooling(path, raw, model))
    if model.enable_return_hidden_states and (shape.by_transformers or shape.altup):
        raise BadConfig("enable_return_hidden_states: " + (
            "classes of transformers give no hidden states of single layers" if shape.altup is None
            else f"{shape.architecture} has several streams of them"),
            "model.enable_return_hidden_states")
    shape = replace(shape, gives_hidden=model.enable_return_hidden_states)
    if shape.chunked and (chunk := max(shape.windows)) % page:
        raise BadConfig(f"page_size: must divide the chunks of {chunk} tokens to which the model "
                        f"attends, got {page}", "memory.page_size")
    return with_drafter(shape, config)


def with_drafter(shape: ModelShape, config: Config) -> ModelShape:
    """The shape with that of the EAGLE-3 head or of the smaller model that is to draft for it, if
    one is asked for. Raises `BadModel` and `BadConfig`."""
    shape = replace(shape, eagle=read_eagle(shape, config))
    own = draft_model_config(config, shape.max_model_len)
    if own is None:
        return shape
    path = Path(own.model.model)
    try:
        draft = read_shape(path, own)
    except BadModel as error:
        raise BadModel(f"{FLAG}: {error.message.removeprefix('model: ')}", PARAM) from None
    check_draft_model(path, draft, shape)
    return replace(shape, draft=draft)


@cache
def load_plugin_families(plugins: str) -> list[LoadedPlugin]:
    """Imports the model families of plug-ins. plugins: the value of `--plugins`."""
    return load_group(plugins, MODELS, lambda value: "" if isinstance(value, Architecture) else
                      f"must be an Architecture, got {type(value).__name__}",
                      lambda name: name in _OWN)


def add_plugin_families(wanted: str, plugins: str) -> None:
    """Adds them to `ARCHITECTURES` where a class is none of these. Raises `BadConfig` if the
    plug-in of just that class cannot be used."""
    if wanted not in ARCHITECTURES:
        loaded = load_plugin_families(plugins)
        refuse_faults(loaded, (), wanted, "model.model")
        ARCHITECTURES.update(usable(loaded))


def _architecture(raw: dict[str, Any], where: Path) -> str:
    name = architecture(raw)
    if not name.isidentifier() or len(name) > SHOWN:
        raise BadModel(f"{where}: architectures: must name the model class, or model_type one of "
                       f"{', '.join(MODEL_TYPES)}")
    return name


def unsupported(name: str) -> str:
    """Says so of a class; names the supported architectures most like it, or else the families, and
    what would help."""
    stems: dict[str, str] = {}
    for own in ARCHITECTURES:
        stems.setdefault(_stem(own), own)
    near = [stems[stem] for stem in get_close_matches(_stem(name), stems, 2)]
    families = [one for one in stems if not any(one != o and one.startswith(o) for o in stems)]
    which = (f"near it is {' or '.join(near)}" if near else
             f"supported are {', '.join(families)} and their kin")
    return (f"architecture {name} is not supported; {which}. A checkpoint with the tensors of a "
            "supported model is served once its config names that class")


def _stem(name: str) -> str:
    """The part of a class name that names the family."""
    return name.partition("For")[0].removesuffix("LMHeadModel").removesuffix("Model")


# --- tensors -------------------------------------------------------------------------------------

def model_tensors(s: ModelShape) -> list[TensorSpec]:
    """Every tensor that the model reads from its checkpoint; those of the layer that drafts last,
    but for those of the tower for images.

    s: of one GPU of several, its parts of them. What is not divided (norms, routers, gates of
    experts, projections to latents) every GPU has whole.
    """
    kind, names = ARCHITECTURES[s.architecture], mtp_names(s)
    specs = [*embedding_and_head_tensors(s), *score_tensors(s)]
    for i in range(s.layers):
        specs += kind.layer(s, i, layer_prefix(i))
    if names is not None:
        specs += [*kind.layer(s, s.layers, names.layer), *mtp_tensors(names, s)]
    return specs if s.vision is None else [*specs, *vision_tensors(s.vision)]


def mtp_names(s: ModelShape) -> MtpNames | None:
    """Where the checkpoint has the layer that drafts; None where the shape has none."""
    if not s.mtp_layers:
        return None
    kind = ARCHITECTURES[s.architecture]
    return kind.mtp(s) if kind.mtp else None


def attention_modules(s: ModelShape) -> list[str]:
    """What the names of the tensors of each layer with keys and values begin with; that of a layer
    that drafts is the last."""
    names = mtp_names(s)
    found = [s.parts[i].attention if s.parts else f"{layer_prefix(i)}{ATTENTION}"
             for i in s.attention_layers if s.owns_kv(i)]
    if names is None:
        return found
    return [*found, s.mtp_parts.attention if s.mtp_parts else f"{names.layer}{ATTENTION}"]
