"""What loading holds at its peak: the weights as they lie in memory, and little beside them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_stored import Kind, stored, tensors_of
from safetensors.torch import save_file

from actorium.gpu.families.architectures import model_tensors, shape_from_config
from actorium.kernels.cpu.native_library import library

PEAK = """
import sys, threading, time
from pathlib import Path
import torch
from actorium.actors.config.tree import Config
from actorium.gpu.models.registry import load_model
from actorium.gpu.passes.pass_manager import PassManager
from actorium.gpu.plan.weight_bytes import weight_bytes
from actorium.kernels.cpu.native_library import library

def held():
    lines = Path("/proc/self/status").read_text().splitlines()
    own = dict(line.split(":", 1) for line in lines)
    return 1024 * sum(int(own[name].split()[0]) for name in ("RssAnon", "RssFile"))

def watch():
    while not done:
        seen.append(held())
        time.sleep(0.001)

library()
torch.ones(64, 64).bfloat16() @ torch.ones(64, 64).bfloat16()
done, seen, before = [], [], held()
threading.Thread(target=watch, daemon=True).start()
model = load_model(Path(sys.argv[1]), Config(), torch.device("cpu"), lambda *_: None)
done.append(True)
print(weight_bytes(model.shape), max(seen) - before)
"""
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16", "vocab_size": 32000,
    "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 12, "head_dim": 64,
    "num_attention_heads": 16, "num_key_value_heads": 4, "max_position_embeddings": 512,
    "tie_word_embeddings": True}
LIBRARIES = 24 << 20
"""Bytes that code takes when it is first run."""
RETURNED = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""For glibc: blocks that are freed go back to the system. What it keeps of them by itself depends
on how threads meet, 0 to 100 MB here, and would hide what the loader holds."""


def write(path: Path, kind: Kind | None) -> None:
    """A checkpoint whose layers hold the same numbers; kind: of the weights of projections."""
    tensors, made = {}, {}
    for spec in model_tensors(shape_from_config(CONFIG, path)):
        weight = torch.randn(spec.shape, generator=torch.Generator().manual_seed(1)) * 0.02
        if kind is None or spec.projection is None:
            tensors[spec.name] = weight.bfloat16()
            continue
        if spec.shape not in made:
            made[spec.shape] = tensors_of(stored(weight, kind), kind)
        tensors |= {f"{spec.module}.{end}": own.clone() for end, own in made[spec.shape].items()}
    save_file(tensors, path / "model.safetensors")
    config = CONFIG if kind is None else {**CONFIG, "quantization_config": kind.config}
    (path / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("kind", [
    None, *(pytest.param(kind, marks=pytest.mark.slow) for kind in (
        Kind("awq", 4, 128), Kind("gptq", 4, 128, ordered=True), Kind("pack-quantized", 4, 128)))],
    ids=str)
def test_loading_holds_the_weights_once(kind: Kind | None, tmp_path: Path) -> None:
    """In memory of its own and in mapped files together: neither both layouts of an embedding that
    is the head, nor pages that have been read already."""
    lib = library()
    if lib is None or not lib.linear_ready():
        pytest.skip("weights in bfloat16 stay as the file has them here")
    write(tmp_path, kind)
    done = subprocess.run([sys.executable, "-c", PEAK, str(tmp_path)], capture_output=True,
                          text=True, check=True, env={**os.environ, **RETURNED})
    planned, peak = map(int, done.stdout.split())
    assert 0.5 * planned < peak < planned + LIBRARIES
