"""What the memory plan needs of a model: numbers of its `config.json`, without torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from actorium.actors.errors import SHOWN, BadConfig, BadModel, shown
from actorium.actors.models.model_dir import max_model_len
from actorium.gpu.families.config_fields import Fields
from actorium.gpu.families.fp8_shape import Fp8Shape, otherwise_quantized, served_fp8
from actorium.gpu.families.hybrid_shape import (
    HYBRIDS,
    ExpertShape,
    delta_shape,
    expert_shape,
    linear_layers,
    sparse_layers,
    text_part,
)
from actorium.gpu.families.mamba_shape import (
    granite_experts,
    granite_fields,
    mamba_layers,
    mamba_shape,
)
from actorium.gpu.families.mla_shape import (
    LatentShape,
    Routing,
    complete,
    deepseek_experts,
    latent_shape,
    sparse_from,
)
from actorium.gpu.families.mtp_shape import mtp_layers

GRANITE_HYBRID = "GraniteMoeHybridForCausalLM"
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1}
"""Bytes of one element."""


class Recurrent(NamedTuple):
    """The recurrent layers of a model; all alike."""

    kind: str
    layers: int
    heads: int
    """Value heads: each has a state of its own."""
    key_heads: int
    """Heads of keys (Mamba-2: groups), shared among the value heads."""
    rows: int
    """Of one head's state: width of a value head."""
    columns: int
    """Of one head's state: width of a key head (Mamba-2: d_state)."""
    keys: int
    """Keys and queries the convolution carries: 2 = both (GatedDeltaNet), as B and C of Mamba-2."""
    width: int
    """Of the convolution."""
    scalars: int
    """Inputs of gates that a token and head has: b and a, or dt."""
    wide: int = 2
    """Numbers of a head that are kept in float32: A_log, dt_bias, and D of Mamba-2."""
    conv_bias: bool = False
    proj_bias: bool = False

    @property
    def state(self) -> int:
        """Elements of one layer's state."""
        return self.heads * self.rows * self.columns

    @property
    def channels(self) -> int:
        """Of the convolution."""
        return self.keys * self.key_heads * self.columns + self.heads * self.rows

    @property
    def inputs(self) -> int:
        """Elements that a token brings to state and convolution."""
        return self.channels + self.scalars * self.heads


@dataclass(frozen=True, slots=True)
class PlanShape:
    """A model, or what one GPU of several holds of it (`split`)."""

    architecture: str
    dtype: str
    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    windows: tuple[int, ...]
    """Of the attention layers, in order; 0 = full attention."""
    intermediate: int
    """Of a dense MLP."""
    max_model_len: int
    tied: bool
    recurrent: Recurrent | None = None
    experts: ExpertShape | None = None
    sparse: int = 0
    """Layers with experts."""
    mtp: int = 0
    """MTP layers that are used of the checkpoint."""
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    output_gate: bool = False
    sandwich_norms: bool = False
    latent: LatentShape | None = None
    """Attention over latents, which every GPU has whole."""
    routing: Routing | None = None
    """Experts are chosen by groups."""
    fp8: Fp8Shape | None = None
    """Weights of projections are in FP8."""
    tp: int = 1
    """GPUs that share the layers; the sizes here are those of one of them."""

    @property
    def itemsize(self) -> int:
        """Bytes of a weight."""
        return BYTES[self.dtype]

    @property
    def kv_row(self) -> int:
        """Numbers that a token leaves in the pages of an attention layer."""
        return self.latent.row if self.latent else 2 * self.kv_heads * self.head_dim

    @property
    def groups(self) -> tuple[tuple[int, int], ...]:
        """(window, attention layers with it), in the order in which the windows first appear."""
        return tuple((window, self.windows.count(window)) for window in dict.fromkeys(self.windows))

    def split(self, tp: int) -> PlanShape:
        """One GPU's part under tensor parallelism: heads, experts' and MLP's widths and the
        vocabulary are divided; kv heads fewer than `tp` are replicated. Raises `BadConfig`."""
        if tp == 1:
            return self
        kv = self.kv_heads
        if kv % tp and tp % kv:
            raise BadConfig(f"--tp: {kv} kv heads cannot be shared out to {tp} GPUs", "tp")
        return replace(
            self, tp=tp, heads=_part(self.heads, tp, "attention heads"), kv_heads=max(1, kv // tp),
            intermediate=-(-self.intermediate // tp), vocab=-(-self.vocab // tp),
            recurrent=self.recurrent and _split_recurrent(self.recurrent, tp),
            experts=self.experts and self.experts._replace(
                size=-(-self.experts.size // tp), shared=-(-self.experts.shared // tp)))


def _part(count: int, tp: int, what: str) -> int:
    if count % tp:
        raise BadConfig(f"--tp: {tp} GPUs cannot share {count} {what} evenly", "tp")
    return count // tp


def _split_recurrent(whole: Recurrent, tp: int) -> Recurrent:
    keys = whole.key_heads
    if keys % tp and tp % keys:
        raise BadConfig(f"--tp: {keys} key heads cannot be shared out to {tp} GPUs", "tp")
    return whole._replace(heads=_part(whole.heads, tp, "value heads"),
                          key_heads=max(1, keys // tp))


# --- config.json ---------------------------------------------------------------------------------

_GEMMA3: dict[str, Any] = {
    "vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
    "max_position_embeddings": 131_072, "tie_word_embeddings": True, "sliding_window": 4096,
}
"""What a config leaves out (transformers' `Gemma3TextConfig`)."""


def read_plan_shape(raw: dict[str, Any], where: Path, dtype: str = "auto",
                    longest: int | None = None, quantization: str = "auto") -> PlanShape:
    """The shape of a parsed `config.json`.

    dtype: of the weights, "auto" = the checkpoint's. longest: max_model_len, None = the model's own
    limit. quantization: see `ModelConfig`. Raises `BadModel` naming the file and the field that is
    missing, wrong or unknown.
    """
    names = raw.get("architectures")
    if (not isinstance(names, list) or not names or not isinstance(names[0], str)
            or not names[0].isidentifier() or len(names[0]) > SHOWN):
        raise BadModel(f"{where}: architectures: must name the model class")
    arch = names[0]
    reader = READERS.get(arch)
    if reader is None:
        raise BadModel(f"{where}: architecture {arch} is not known to the memory plan; "
                       f"known: {', '.join(READERS)}")
    get = Fields(_text(raw, arch), where)
    shape = reader(get, _common(get, arch, _dtype(get, dtype)))
    if shape.heads % shape.kv_heads:
        raise get.bad("num_key_value_heads",
                      f"{shape.kv_heads} does not divide {shape.heads} heads")
    return replace(shape, max_model_len=max_model_len(get.raw, longest),
                   fp8=_fp8(raw, where, quantization))


def _fp8(raw: dict[str, Any], where: Path, quantization: str) -> Fp8Shape | None:
    """Weights in FP8; checkpoints quantised otherwise are not served, but can be planned, unless
    FP8 is to be made of them."""
    if otherwise_quantized(raw) and quantization != "fp8":
        return None
    return served_fp8(raw, where, quantization)


def _text(raw: dict[str, Any], arch: str) -> dict[str, Any]:
    """The config of the language model, complete."""
    if arch == DEEPSEEK_V3:
        return complete(raw)
    if arch == GRANITE_HYBRID:
        return granite_fields(raw)
    if arch in HYBRIDS:
        defaults = HYBRIDS[arch].defaults
    else:
        defaults = _GEMMA3 if arch.startswith("Gemma3") else {}
    return text_part(raw, defaults)


def _dtype(get: Fields, wanted: str) -> str:
    name = wanted
    if wanted == "auto":
        name = get.raw.get("dtype") or get.raw.get("torch_dtype") or "float32"
    if not isinstance(name, str) or name not in ("float32", "bfloat16", "float16"):
        raise get.bad("dtype", f"must be float32, bfloat16 or float16, got {shown(name)}")
    return name


def _common(get: Fields, arch: str, dtype: str) -> PlanShape:
    heads, hidden = get.int("num_attention_heads"), get.int("hidden_size")
    layers = get.layers()
    width = 128 if arch.startswith("Qwen3") else max(1, hidden // heads)
    return PlanShape(
        architecture=arch, dtype=dtype, vocab=get.int("vocab_size"), hidden=hidden,
        layers=layers, heads=heads, kv_heads=get.int("num_key_value_heads", heads),
        head_dim=get.int("head_dim", width), windows=(0,) * layers,
        intermediate=get.int("intermediate_size"), max_model_len=0,
        tied=get.flag("tie_word_embeddings"))


def _llama(get: Fields, shape: PlanShape) -> PlanShape:
    bias = get.flag("attention_bias")
    return replace(shape, qkv_bias=bias, o_bias=bias, mlp_bias=get.flag("mlp_bias"))


def _mistral(get: Fields, shape: PlanShape) -> PlanShape:
    return replace(shape, windows=_windows(get, shape.layers, get.raw.get("sliding_window"), 0))


def _qwen2(get: Fields, shape: PlanShape) -> PlanShape:
    on = get.flag("use_sliding_window")
    first = get.raw.get("max_window_layers", 28) and get.int("max_window_layers", 28)
    return replace(shape, qkv_bias=True, windows=_windows(
        get, shape.layers, get.raw.get("sliding_window") if on else None, first))


def _qwen3(get: Fields, shape: PlanShape) -> PlanShape:
    bias = get.flag("attention_bias")
    return replace(_qwen2(get, shape), qkv_bias=bias, o_bias=bias, qk_norm=True)


def _gemma3(get: Fields, shape: PlanShape) -> PlanShape:
    every = get.int("sliding_window_pattern", 6)
    window = get.int("sliding_window")
    windows = tuple(window if (i + 1) % every else 0 for i in range(shape.layers))
    if get.raw.get("layer_types") is not None:
        windows = _windows(get, shape.layers, window, 0)
    bias = get.flag("attention_bias")
    return replace(shape, windows=windows, qkv_bias=bias, o_bias=bias, qk_norm=True,
                   sandwich_norms=True)


def _windows(get: Fields, layers: int, window: Any, first: int) -> tuple[int, ...]:
    """As layer_types say, else `window` from layer `first` on; none where `window` is None."""
    if window is None:
        return (0,) * layers
    size, kinds = get.int("sliding_window"), get.raw.get("layer_types")
    if kinds is None:
        return tuple(size if i >= first else 0 for i in range(layers))
    known = ("sliding_attention", "full_attention")
    return tuple(size if kind == known[0] else 0
                 for kind in get.kinds("layer_types", known, layers))


def _qwen_hybrid(get: Fields, shape: PlanShape) -> PlanShape:
    """Qwen3-Next, Qwen3.5 and Qwen3-MoE."""
    family = HYBRIDS[shape.architecture]
    bias = get.flag("attention_bias")
    shape = replace(shape, qk_norm=True, qkv_bias=bias, o_bias=bias,
                    experts=expert_shape(get, family),
                    sparse=len(sparse_layers(get, shape.layers)), mtp=mtp_layers(get))
    if not family.recurrent:
        return shape
    delta, count = delta_shape(get), len(linear_layers(get, shape.layers))
    return replace(
        shape, output_gate=True, windows=(0,) * (shape.layers - count),
        recurrent=Recurrent("GatedDeltaNet", count, delta.value_heads, delta.key_heads,
                            delta.value_dim, delta.key_dim, 2, delta.width, 2))


def _deepseek(get: Fields, shape: PlanShape) -> PlanShape:
    """DeepSeek-V3."""
    bias, (experts, routing) = get.flag("attention_bias"), deepseek_experts(get)
    return replace(shape, latent=latent_shape(get), experts=experts, routing=routing,
                   sparse=len(sparse_from(get, shape.layers)), qkv_bias=bias, o_bias=bias,
                   mtp=mtp_layers(get))


def _granite(get: Fields, shape: PlanShape) -> PlanShape:
    """Granite-4 hybrid: Mamba-2."""
    bias, experts = get.flag("attention_bias"), granite_experts(get)
    mamba, count = mamba_shape(get), len(mamba_layers(get, shape.layers))
    recurrent = Recurrent(
        "Mamba-2", count, mamba.heads, mamba.groups, mamba.head_dim, mamba.state_dim, 2,
        mamba.width, 1, 3, mamba.conv_bias, mamba.proj_bias)
    return replace(
        shape, intermediate=get.int("shared_intermediate_size"), qkv_bias=bias, o_bias=bias,
        experts=experts, sparse=shape.layers if experts else 0,
        windows=(0,) * (shape.layers - count), recurrent=recurrent if count else None)


DEEPSEEK_V3 = "DeepseekV3ForCausalLM"
Reader = Callable[[Fields, PlanShape], PlanShape]
READERS: dict[str, Reader] = {
    "LlamaForCausalLM": _llama, "MistralForCausalLM": _mistral, "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3, "Gemma3ForCausalLM": _gemma3,
    "Gemma3ForConditionalGeneration": _gemma3, DEEPSEEK_V3: _deepseek,
    **{name: _qwen_hybrid for name in HYBRIDS},
    GRANITE_HYBRID: _granite,
}
"""Architecture -> what its config says beyond the fields all share."""
