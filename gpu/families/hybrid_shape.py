"""What Qwen3-Next, Qwen3.5 and Qwen3-MoE configs say of recurrent layers and experts."""

from __future__ import annotations

from typing import Any, NamedTuple

from actorium.actors.errors import shown
from actorium.gpu.families.config_fields import Fields


class StateShape(NamedTuple):
    """What one recurrent layer keeps of one sequence."""

    state: tuple[int, ...]
    """The state proper, in the state dtype."""
    columns: tuple[int, int]
    """(W - 1, channels): the last inputs of a convolution of width W, in the model's dtype."""
    inputs: int
    """What a token brings to both, of the layer's first projection: the convolution's channels and
    the gates' inputs (dt). Kept, in the model's dtype, of drafts that may be accepted."""


class DeltaShape(NamedTuple):
    """A GatedDeltaNet layer."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    width: int
    """Of the convolution."""

    @property
    def key_size(self) -> int:
        """Width of all key heads together."""
        return self.key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        """Width of all value heads together."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Of the convolution: queries, keys and values."""
        return 2 * self.key_size + self.value_size

    @property
    def state(self) -> StateShape:
        """What the layer keeps: [HV, V, K], and columns; its inputs are those and b and a."""
        return StateShape((self.value_heads, self.value_dim, self.key_dim),
                          (self.width - 1, self.channels), self.channels + 2 * self.value_heads)


class ExpertShape(NamedTuple):
    """A mixture of experts."""

    number: int
    chosen: int
    """Experts a token goes through."""
    size: int
    """Inner width of each."""
    shared: int
    """Inner width of the expert all tokens go through; 0 = there is none."""
    normalised: bool
    """The weights of the chosen ones add up to 1."""
    shared_gate: bool = True
    """A sigmoid gates what the shared expert gives."""


class Family(NamedTuple):
    """An architecture of this kind."""

    recurrent: bool
    shared: bool
    normalised: bool | None
    """None = the config's norm_topk_prob says."""
    defaults: dict[str, Any]
    """What a config leaves out (transformers' config classes)."""


_DELTA = {
    "head_dim": 256, "num_attention_heads": 16, "max_position_embeddings": 32_768,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "partial_rotary_factor": 0.25,
}
_NEXT = {
    **_DELTA, "vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 5632,
    "num_hidden_layers": 48, "num_key_value_heads": 2, "decoder_sparse_step": 1,
    "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
    "num_experts_per_tok": 10, "num_experts": 512, "norm_topk_prob": True,
}
_DENSE = {
    **_DELTA, "vocab_size": 248_320, "hidden_size": 4096, "intermediate_size": 12_288,
    "num_hidden_layers": 32, "num_key_value_heads": 4, "num_experts": 0,
}
_SPARSE = {
    **_DELTA, "vocab_size": 248_320, "hidden_size": 2048, "intermediate_size": 512,
    "num_hidden_layers": 40, "num_key_value_heads": 2, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512, "num_experts_per_tok": 8, "num_experts": 256,
}
_MOE = {
    "vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 6144,
    "num_hidden_layers": 24, "num_attention_heads": 32, "num_key_value_heads": 4,
    "max_position_embeddings": 32_768, "decoder_sparse_step": 1, "moe_intermediate_size": 768,
    "num_experts_per_tok": 8, "num_experts": 128, "norm_topk_prob": False,
}
_DENSE_FAMILY = Family(True, False, None, _DENSE)
_SPARSE_FAMILY = Family(True, True, True, _SPARSE)
HYBRIDS = {
    "Qwen3NextForCausalLM": Family(True, True, None, _NEXT),
    "Qwen3_5ForCausalLM": _DENSE_FAMILY,
    "Qwen3_5ForConditionalGeneration": _DENSE_FAMILY,
    "Qwen3_5MoeForCausalLM": _SPARSE_FAMILY,
    "Qwen3_5MoeForConditionalGeneration": _SPARSE_FAMILY,
    "Qwen3MoeForCausalLM": Family(False, False, None, _MOE),
}
"""The architectures read here. Of those with images the text part alone is served."""


def text_part(raw: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """The config of the language model, complete."""
    nested = raw.get("text_config")
    if isinstance(nested, dict):
        kept = {key: raw[key] for key in ("dtype", "torch_dtype", "tie_word_embeddings")
                if raw.get(key)}
        raw = {**kept, **nested}
    given = {key: value for key, value in raw.items() if value is not None}
    if "num_experts" not in given and "num_local_experts" in given:
        given["num_experts"] = given["num_local_experts"]
    return {**defaults, **given}


def linear_layers(get: Fields, layers: int) -> tuple[int, ...]:
    """Layers of `layer_types` "linear_attention"; by default all but every fourth."""
    known = ("linear_attention", "full_attention")
    if get.raw.get("layer_types") is None:
        every = get.int("full_attention_interval", 4)
        kinds = [known[(i + 1) % every == 0] for i in range(layers)]
    else:
        kinds = get.kinds("layer_types", known, layers)
    if known[1] not in kinds:
        raise get.bad("layer_types", "a model without full_attention is not supported")
    return tuple(i for i, kind in enumerate(kinds) if kind == known[0])


def delta_shape(get: Fields) -> DeltaShape:
    """Raises `BadModel` naming the field that is wrong."""
    shape = DeltaShape(
        get.int("linear_num_key_heads"), get.int("linear_num_value_heads"),
        get.int("linear_key_head_dim"), get.int("linear_value_head_dim"),
        get.int("linear_conv_kernel_dim"))
    if shape.value_heads % shape.key_heads:
        raise get.bad("linear_num_key_heads",
                      f"{shape.key_heads} does not divide {shape.value_heads} value heads")
    if shape.width < 2:
        raise get.bad("linear_conv_kernel_dim", f"must be at least 2, got {shape.width}")
    return shape


def sparse_layers(get: Fields, layers: int) -> tuple[int, ...]:
    """Layers with experts: every `decoder_sparse_step`-th, but those of `mlp_only_layers`."""
    if not get.raw.get("num_experts"):
        return ()
    every, dense = get.int("decoder_sparse_step", 1), get.raw.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise get.bad("mlp_only_layers", f"must be a list of layers, got {shown(dense)}")
    return tuple(i for i in range(layers) if i not in dense and (i + 1) % every == 0)


def expert_shape(get: Fields, family: Family) -> ExpertShape | None:
    """Raises `BadModel` naming the field that is wrong."""
    if not get.raw.get("num_experts"):
        return None
    count, chosen = get.int("num_experts"), get.int("num_experts_per_tok")
    if chosen > count:
        raise get.bad("num_experts_per_tok", f"{chosen} is more than {count} experts")
    normalised = family.normalised
    if normalised is None:
        normalised = get.flag("norm_topk_prob")
    return ExpertShape(
        count, chosen, get.int("moe_intermediate_size"),
        get.int("shared_expert_intermediate_size") if family.shared else 0, normalised)
