"""EAGLE-3 heads (arXiv 2503.01840): their `config.json`, and the tensors of their checkpoints.

Layers are counted in two ways. A list at the top of the config names the layers whose inputs the
head takes; one within `eagle_config` names those whose outputs it takes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from actorium.actors.config.parsed_values import parse_speculative
from actorium.actors.config.tree import Config
from actorium.actors.errors import BadConfig, shown
from actorium.actors.models.model_dir import read_config, resolve
from actorium.gpu.families.decoder_config import Fields
from actorium.gpu.families.llama_config import llama
from actorium.gpu.families.model_shape import EagleShape, ModelShape
from actorium.gpu.families.tensor_names import Renames
from actorium.gpu.families.tensor_specs import (
    ATTENTION,
    EMBED,
    FINAL_NORM,
    HEAD,
    TensorSpec,
    dense_tensors,
    layer_prefix,
    linear_tensors,
)

CLASSES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator",
           "Eagle3DraftModel")
JOIN, HIDDEN_NORM = "fc", "hidden_norm"
"""The projection of the model's hidden states together; the norm of what it gives."""
LAYER = layer_prefix(0)
NORMS = ("input_layernorm", HIDDEN_NORM, "post_attention_layernorm")
"""Of the token's embedding, of the hidden state, and before the MLP."""
NAMES: Renames = ((r"^(model\.)?midlayer\.", LAYER), (r"^model\.fc\.", "fc."))
"""What some checkpoints call tensors otherwise."""
IGNORED = r"^(d2t|t2d|verifier_\w+\..*)$|rotary_emb|^model\.embed_tokens\.weight$"
"""Names of tensors that are read otherwise, or that the model itself has."""
IDS = "eagle_aux_hidden_state_layer_ids"


def read_eagle(shape: ModelShape, config: Config) -> EagleShape | None:
    """The head that drafts for a model of this shape; None where none is asked for.

    Raises `BadConfig` where the two do not fit together, and `BadModel` naming a field.
    """
    asked, model = config.speculation, config.speculation.speculative_model
    if "eagle3" not in parse_speculative(asked.speculative).methods:
        return None
    if not model:
        raise BadConfig("speculative: eagle3 needs --speculative-model, the directory of a head",
                        "speculation.speculative")
    if fault := _unfit(shape):
        raise BadConfig(f"speculative: eagle3: {fault}", "speculation.speculative")
    path = resolve(model)
    return eagle_shape(read_config(path), path / "config.json", shape)


def _unfit(shape: ModelShape) -> str:
    """Why no head can draft for a model of this shape; empty: one can."""
    if shape.by_transformers:
        return "classes of transformers give no hidden states of single layers"
    if shape.altup is not None:
        return f"{shape.architecture} has several streams of hidden states"
    if shape.bidirectional or (shape.pooling is not None and not shape.pooling.generates):
        return f"{shape.architecture} generates nothing"
    if all(group.window for group in shape.groups):
        return f"{shape.architecture} has no layer that attends to all tokens, whose pages it takes"
    return ""


def eagle_shape(raw: dict[str, Any], where: Path, model: ModelShape) -> EagleShape:
    """The shape of the head whose parsed `config.json` this is, for this model. Raises `BadModel`
    naming the field, and `BadConfig` where it is a head of another model."""
    name = (raw.get("architectures") or [""])[0]
    if name not in CLASSES:
        raise BadConfig(f"speculative_model: {where}: architectures: must be one of "
                        f"{', '.join(CLASSES)}, got {shown(name)}", "speculation.speculative_model")
    raw = {**raw, **raw.get("transformer_layer_config", {}), "architectures": ["LlamaForCausalLM"]}
    get = Fields(raw, where)
    get.only(num_hidden_layers=1)
    tokens = get.int("vocab_size")
    if tokens < model.vocabulary:
        raise _other(where, "vocab_size", tokens, f"{model.vocabulary:,} tokens")
    layer = llama({**raw, "vocab_size": get.int("draft_vocab_size", tokens)}, where, model.dtype)
    if (width := get.int("target_hidden_size", layer.hidden)) != model.hidden:
        named = "target_hidden_size" if raw.get("target_hidden_size") else "hidden_size"
        raise _other(where, named, width, f"hidden states of {model.hidden:,}")
    layer = replace(layer, max_model_len=model.max_model_len, tied=False)
    return EagleShape(layer, _taps(get, model.layers), width, get.flag("norm_before_residual"),
                      0 if layer.hidden == width else tokens)


def _other(where: Path, field: str, found: int, model: str) -> BadConfig:
    return BadConfig(f"speculative_model: {where}: {field}: the head is of another model: "
                     f"{found:,}, where this one has {model}", "speculation.speculative_model")


def _taps(get: Fields, layers: int) -> tuple[int, ...]:
    """The layers whose inputs the head takes."""
    nested = get.raw.get("eagle_config")
    nested = nested if isinstance(nested, dict) else {}
    if nested.get("use_aux_hidden_state") is False:
        raise get.bad("eagle_config.use_aux_hidden_state",
                      "only heads over several layers are supported")
    listed, behind = get.raw.get(IDS), 0
    if listed is None:
        listed, behind = nested.get(IDS), 1
    if listed is None:
        listed, behind = [2, layers // 2, layers - 3], 0
    if not isinstance(listed, list) or not listed or not all(
            type(i) is int and 0 <= i + behind < layers for i in listed):
        raise get.bad(IDS, f"must list layers of the model's {layers}, got {shown(listed)}")
    return tuple(i + behind for i in listed)


def eagle_tensors(s: EagleShape) -> list[TensorSpec]:
    """The head's tensors in a float type."""
    own, at = s.layer, f"{LAYER}{ATTENTION}"
    rows = {"q_proj": own.q_size, "k_proj": own.kv_size, "v_proj": own.kv_size}
    specs = [spec for name, count in rows.items()
             for spec in linear_tensors(f"{at}{name}", count, 2 * own.hidden, own.qkv_bias)]
    specs += [*linear_tensors(f"{at}o_proj", own.hidden, own.q_size, own.o_bias),
              *dense_tensors(f"{LAYER}mlp.", own.hidden, own.intermediate, own.mlp_bias),
              *linear_tensors(JOIN, own.hidden, len(s.taps) * s.width),
              *(TensorSpec(f"{name}.weight", (own.hidden,))
                for name in (*(f"{LAYER}{norm}" for norm in NORMS), FINAL_NORM)),
              TensorSpec(HEAD, (own.vocab_size, own.hidden))]
    return [*specs, TensorSpec(EMBED, (s.own_embedding, own.hidden))] if s.own_embedding else specs
