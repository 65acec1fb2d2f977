"""Families whose layers have Mamba (arXiv 2312.00752): Mamba itself, Falcon-Mamba, which norms what
the scan takes, and Jamba, which also has attention in some layers, and MLPs, dense or of experts.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from actorium.gpu.families.decoder_config import Fields, completed, decoder_shape, read_experts
from actorium.gpu.families.layer_shapes import MixtureNames
from actorium.gpu.families.mamba_config import bamba_parts, unattended
from actorium.gpu.families.model_shape import ModelShape
from actorium.gpu.families.recurrent_shapes import ScanShape

MAMBA: dict[str, Any] = {
    "vocab_size": 50_280, "hidden_size": 768, "state_size": 16, "num_hidden_layers": 32,
    "layer_norm_epsilon": 1e-5, "expand": 2, "conv_kernel": 4, "use_conv_bias": True,
    "time_step_rank": "auto", "tie_word_embeddings": True, "mixer_rms_eps": 1e-6,
}
"""What a config of Mamba or Falcon-Mamba leaves out, as in transformers."""
JAMBA: dict[str, Any] = {
    "vocab_size": 65_536, "hidden_size": 4096, "intermediate_size": 14_336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "max_position_embeddings": 262_144, "num_experts": 16, "num_experts_per_tok": 2,
    "expert_layer_period": 2, "expert_layer_offset": 1, "attn_layer_period": 8,
    "attn_layer_offset": 4, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2,
    "mamba_dt_rank": "auto", "mamba_conv_bias": True,
}
"""The same of Jamba."""
EXPERTS = MixtureNames("", "router")


def mamba(raw: dict[str, Any], where: Path, dtype: str) -> ModelShape:
    """Reader of Mamba's config: no attention and no MLP in any layer."""
    get = Fields(completed(raw, MAMBA), where)
    shape = unattended(get, dtype, get.float("layer_norm_epsilon"))
    scan = _scan(get, "state_size", "conv_kernel", "expand", "time_step_rank", "use_conv_bias",
                 "use_bias")
    # Falcon-Mamba's config has an `expand` that says something else.
    return replace(shape, recurrence=scan._replace(
        channels=get.int("intermediate_size", scan.channels)))


def falcon_mamba(raw: dict[str, Any], where: Path, dtype: str) -> ModelShape:
    """Reader of Falcon-Mamba's config: Mamba's, with norms without weights."""
    get, shape = Fields(completed(raw, MAMBA), where), mamba(raw, where, dtype)
    assert isinstance(shape.recurrence, ScanShape)
    return replace(shape, recurrence=shape.recurrence._replace(
        norms="plain", norm_eps=get.float("mixer_rms_eps")))


def jamba(raw: dict[str, Any], where: Path, dtype: str) -> ModelShape:
    """Reader of Jamba's config; nothing is rotated."""
    get = Fields(completed(raw, JAMBA), where)
    shape = decoder_shape(get, dtype, ropes=())
    full, sparse = _periodic(get, "attn_layer", shape.layers), _periodic(get, "expert_layer",
                                                                         shape.layers)
    sparse = sparse if get.int("num_experts") > 1 else ()
    scan = _scan(get, "mamba_d_state", "mamba_d_conv", "mamba_expand", "mamba_dt_rank",
                 "mamba_conv_bias", "mamba_proj_bias")
    return replace(
        shape, recurrent=tuple(i for i in range(shape.layers) if i not in full),
        recurrence=scan._replace(norms="weighted", norm_eps=shape.norm_eps)
        if len(full) < shape.layers else None, sparse=sparse,
        experts=read_experts(get, "num_experts", shape.intermediate, False, names=EXPERTS)
        if sparse else None,
        parts=tuple(bamba_parts(i, i in full, i not in full) for i in range(shape.layers)))


def _periodic(get: Fields, name: str, layers: int) -> tuple[int, ...]:
    """Every so many layers, from an offset on. Raises `BadModel`."""
    period, offset = get.int(f"{name}_period"), get.raw[f"{name}_offset"]
    if isinstance(offset, bool) or not isinstance(offset, int) or not 0 <= offset < period:
        raise get.bad(f"{name}_offset", f"must be 0 to {period - 1}, below {name}_period")
    return tuple(range(offset, layers, period))


def _scan(get: Fields, state: str, width: str, expand: str, rank: str, conv_bias: str,
          bias: str) -> ScanShape:
    """Of fields of these names. Raises `BadModel` naming the one that is wrong."""
    hidden, taps = get.int("hidden_size"), get.int(width)
    if taps < 2:
        raise get.bad(width, f"must be at least 2, got {taps}")
    auto = get.raw[rank] == "auto"
    return ScanShape(get.int(expand) * hidden, get.int(state),
                     -(-hidden // 16) if auto else get.int(rank), taps, get.flag(conv_bias),
                     get.flag(bias))
