"""What passes gain: microseconds of a layer of real size without any pass, with all of them, and
with all but one; and how often each pass matches.

A model here is the first layers of a family at the size of one of its checkpoints, with random
weights in bfloat16, or as `--quantization` makes them, and a small vocabulary: one layer of each
kind that it has. Attention over the pages and the recurrences themselves, which no pass changes,
are left out. Variants take turns, and the fastest of many turns counts, since other processes can
only add time. `--seconds` is divided among the cases.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness import Row, Rows, markdown, scenario, take_turns

from actorium.actors.config.parsed_values import PASSES
from actorium.actors.config.tree import Config, DeviceConfig, ModelConfig
from actorium.gpu.models.decoder import Decoder
from actorium.gpu.models.registry import load_model
from actorium.gpu.passes.pass_choice import LayerTimer, Way, way
from actorium.gpu.passes.pass_manager import PassManager

SHARED = {"vocab_size": 512, "max_position_embeddings": 4096, "eos_token_id": 511,
          "rms_norm_eps": 1e-6, "torch_dtype": "bfloat16", "tie_word_embeddings": True}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("Llama-3.2-1B", {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 2048, "intermediate_size": 8192,
        "num_hidden_layers": 2, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 64}),
    "Qwen3": ("Qwen3-0.6B", {
        "architectures": ["Qwen3ForCausalLM"], "hidden_size": 1024, "intermediate_size": 3072,
        "num_hidden_layers": 2, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 128}),
    "Qwen3.5": ("Qwen3.5-0.8B", {
        "architectures": ["Qwen3_5ForCausalLM"], "hidden_size": 1024, "intermediate_size": 3584,
        "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2,
        "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 16,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4}),
    "Gemma 3": ("Gemma-3-1B", {
        "architectures": ["Gemma3ForCausalLM"], "hidden_size": 1152, "intermediate_size": 6912,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 1,
        "head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 512,
        "layer_types": ["sliding_attention", "full_attention"]}),
}
"""Name -> the checkpoint whose layers these are, and its config with fewer of them."""
TOKENS = [1, 32, 256, 2048]
FAMILIES = [*CASES]
FEWEST = 4
"""Turns of a case, of which the first one does not count."""


def model_of(raw: dict[str, Any], threads: int, quantization: str = "auto") -> Decoder:
    """Random weights of this config on the CPU."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHARED | raw))
        config = Config(model=ModelConfig(load_format="dummy", dtype="bfloat16",
                                          quantization=quantization),
                        device=DeviceConfig(device="cpu", threads=threads))
        return load_model(Path(folder), config, torch.device("cpu"), lambda *_: None)


def least(model: Decoder, ways: Sequence[Way], tokens: int, seconds: float) -> list[float]:
    """Microseconds of a layer in each of these ways: the least of the turns that fit."""
    timer = LayerTimer(model, tokens)
    found = take_turns({str(at): partial(timer.seconds, own) for at, own in enumerate(ways)},
                       FEWEST, seconds)
    return [1e6 * min(times[1:]) / len(timer.layers) for times in found.values()]


def measure(name: str, tokens: Sequence[int], seconds: float, threads: int,
            quantization: str = "auto") -> Row:
    """One case, as `results/passes.json` has it."""
    checkpoint, raw = CASES[name]
    model = model_of(raw, threads, quantization)
    report = PassManager(model, PASSES).install()
    matched = [own for own in PASSES if report.matches[own]]
    ways = [way(model, ()), way(model, PASSES),
            *(way(model, tuple(other for other in PASSES if other != own)) for own in matched)]
    found = {n: least(model, ways, n, seconds / len(tokens)) for n in tokens}
    return {
        "family": name, "checkpoint": checkpoint, "layers": len(model.layers),
        "matches": {own: report.matches[own] for own in matched},
        "none": {n: round(us[0], 1) for n, us in found.items()},
        "all": {n: round(us[1], 1) for n, us in found.items()},
        "without": {own: {n: round(us[2 + at], 1) for n, us in found.items()}
                    for at, own in enumerate(matched)}}


def cells(own: Row) -> tuple[list[str], list[list[str]]]:
    """Rows of the two tables: microseconds without any pass and with all, and what a layer takes
    less with a pass, where all others are on."""
    matches = ", ".join(f"`{one}` {count}" for one, count in own["matches"].items())
    return ([f"{own['family']} ({own['checkpoint']}), {own['layers']} of them", matches,
             *(f"{none:,.0f} → {own['all'][n]:,.0f}" for n, none in own["none"].items())],
            [[own["family"], f"`{one}`",
              *(f"{100 * (1 - own['all'][n] / us):+.1f} %" for n, us in without.items())]
             for one, without in own["without"].items()])


def tables(found: Sequence[Row], tokens: Sequence[int]) -> str:
    heads = [f"{n:,} token{'s' * (n > 1)}" for n in tokens]
    rows = [cells(own) for own in found]
    return "\n\n".join((markdown(["layers of", "matches", *heads], [one for one, _ in rows]),
                        markdown(["layers of", "pass", *heads],
                                 [each for _, many in rows for each in many])))


@scenario
def layers(tokens: list[int] = TOKENS, families: list[str] = FAMILIES, seconds: float = 120.0,
           threads: int = 0, quantization: str = "auto") -> Rows:
    """Microseconds of a layer without passes, with all, with all but one; `seconds` of timing.

    threads: 0 = as many as there are cores; quantization: as of `actorium serve`.
    """
    threads = threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    found = []
    for name in families:
        found.append(measure(name, tokens, seconds / len(families), threads, quantization))
        yield found[-1]
    print(tables(found, tokens))
