"""What loading holds at its peak: the weights as they lie in memory, and little beside them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_peak import LIBRARIES, peak_of
from helpers_stored import Kind, stored, tensors_of
from helpers_tables import KINDS
from safetensors.torch import save_file

from actorium.gpu.families.architectures import model_tensors, shape_from_config
from actorium.kernels.cpu.native_library import library

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16", "vocab_size": 32000,
    "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 6, "head_dim": 64,
    "num_attention_heads": 16, "num_key_value_heads": 4, "max_position_embeddings": 512,
    "tie_word_embeddings": True}
TINY = {"vocab_size": 256, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1,
        "num_attention_heads": 4}
LOAD = "model = load_model(Path(sys.argv[1]), Config(), torch.device('cpu'), lambda *_: None)"
ONCE_BEFORE = "load_model(Path(sys.argv[2]), Config(), torch.device('cpu'), lambda *_: None)"
"""Of `TINY`: the pages of code that loading such weights runs are there already."""


def write(path: Path, kind: Kind | str | None, **options: Any) -> None:
    """A checkpoint whose layers hold the same numbers; kind: of the weights of projections, by name
    of those of `helpers_tables`."""
    tensors, made = {}, {}
    config = CONFIG | options
    for spec in model_tensors(shape_from_config(config, path)):
        weight = torch.randn(spec.shape, generator=torch.Generator().manual_seed(1)) * 0.02
        if kind is None or spec.projection is None:
            tensors[spec.name] = weight.bfloat16()
            continue
        if spec.shape not in made:
            made[spec.shape] = (KINDS[kind][0](weight)[0] if isinstance(kind, str)
                                else tensors_of(stored(weight, kind), kind))
        tensors |= {f"{spec.module}.{end}": own.clone() for end, own in made[spec.shape].items()}
    save_file(tensors, path / "model.safetensors")
    if kind is not None:
        config["quantization_config"] = (KINDS[kind][1] if isinstance(kind, str)
                                         else kind.config)
    (path / "config.json").write_text(json.dumps(config))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [
    None, *(pytest.param(kind, marks=pytest.mark.slow) for kind in (
        Kind("awq", 4, 128), Kind("gptq", 4, 128, ordered=True), Kind("pack-quantized", 4, 128),
        "nf4, nested", "nvfp4"))],
    ids=str)
def test_loading_holds_the_weights_once(kind: Kind | str | None, tmp_path: Path) -> None:
    """In memory of its own and in mapped files together: neither both layouts of an embedding that
    is the head, nor pages that have been read already."""
    lib = library()
    if lib is None or not lib.linear_ready():  # weights in bf16 stay as the file has them
        pytest.skip("no C compiler" if lib is None else "this processor has no AVX2")
    write(tmp_path, kind)
    (tmp_path / "tiny").mkdir()
    write(tmp_path / "tiny", kind, **TINY)
    planned, peak = peak_of(LOAD, str(tmp_path), str(tmp_path / "tiny"), before=ONCE_BEFORE)
    assert 0.5 * planned < peak < planned + LIBRARIES
