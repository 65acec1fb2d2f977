"""Checkpoints whose weights are what weights in 4 to 8 bits stand for."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from actorium.gpu.families.weight_formats import WeightFormat
from actorium.gpu.weights.online_quantisation import quantise, row_format_of
from actorium.kernels.grouped_rows import dequantise_grouped

SINGLE = "model.safetensors"
PROJECTION = re.compile(r"(_proj|_linear|\.w[123]|in_proj_qkvz?|in_proj_z"
                        r"|kv_a_proj_with_mqa)\.weight$|experts\.\w+_proj$")
APART = re.compile(r"kv_b_proj")
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def dequantised(weight: Tensor, form: WeightFormat) -> Tensor:
    """What a weight in this format stands for, [..., N, K]; itself where it cannot be held so."""
    if weight.shape[-1] % max(form.group, 32):
        return weight
    own = quantise(weight.float(), row_format_of(form))
    return dequantise_grouped(own, weight.dtype)


def write_twin(source: Path, twin: Path, form: WeightFormat, head: WeightFormat | None) -> None:
    """The checkpoint at `source` with what its projections, and its head, are in this format."""
    shutil.copytree(source, twin)
    tensors = load_file(source / SINGLE)
    raw = json.loads((source / "config.json").read_text())
    tied = bool(raw.get("tie_word_embeddings"))
    for name, weight in tensors.items():
        if PROJECTION.search(name) and not APART.search(name):
            turned = weight.dim() == 3 and raw["model_type"] == "gpt_oss"
            own = dequantised(weight.mT if turned else weight, form)
            tensors[name] = own.mT.contiguous() if turned else own
        elif head is not None and name == (EMBED if tied else HEAD):
            tensors[name] = dequantised(weight, head)
    save_file(tensors, twin / SINGLE, {"format": "pt"})
