"""What passes gain: microseconds of a layer without any pass, with all of them, and with all but
one, on a layer of the size that real models have; and how often each pass matches.

    python benchmarks/passes.py [--out benchmarks/results/passes.json] [--tokens 1,32,256,2048]
        [--only NAME] [--seconds 120] [--quantization int8]

A model here is the first layers of a family at the size of one of its checkpoints, with random
weights in bfloat16, or as `--quantization` makes them, and a small vocabulary: one layer of each
kind that it has. Attention over the pages and the recurrences themselves, which no pass changes,
are left out. All ways are run by turns, and the least of many turns counts: other processes can
only add. `--seconds` is shared out among the cases.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from actorium.actors.config.pass_names import PASSES
from actorium.actors.config.tree import Config, DeviceConfig, ModelConfig
from actorium.gpu.models.registry import Model, load_model
from actorium.gpu.passes.pass_manager import PassManager
from actorium.gpu.passes.pass_timing import LayerTimer, Way, way

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
TOKENS = (1, 32, 256, 2048)
FEWEST, MOST = 3, 200
"""Turns of a case."""


def model_of(raw: dict[str, Any], threads: int, quantization: str = "auto") -> Model:
    """Random weights of this config on the CPU."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHARED | raw))
        config = Config(model=ModelConfig(load_format="dummy", dtype="bfloat16",
                                          quantization=quantization),
                        device=DeviceConfig(device="cpu", threads=threads))
        return load_model(Path(folder), config, torch.device("cpu"), lambda *_: None)


def least(model: Model, ways: Sequence[Way], tokens: int, seconds: float) -> list[float]:
    """Microseconds of a layer in each of these ways: the least of the turns that fit."""
    timer = LayerTimer(model, tokens)
    found: list[list[float]] = [[] for _ in ways]
    end = time.perf_counter() + seconds
    for turn in range(MOST + 1):
        if turn > FEWEST and time.perf_counter() > end:
            break
        for times, own in zip(found, ways, strict=True):
            times.append(timer.seconds(own))
    return [1e6 * min(times[1:]) / len(timer.layers) for times in found]


def measure(name: str, tokens: Sequence[int], seconds: float, threads: int,
            quantization: str = "auto") -> dict[str, Any]:
    """One case, as `results/passes.json` has it."""
    checkpoint, raw = CASES[name]
    model = model_of(raw, threads, quantization)
    report = PassManager(model, PASSES).install()
    matched = [own for own in PASSES if report.matches[own]]
    ways = [way(model, ()), way(model, PASSES),
            *(way(model, tuple(other for other in PASSES if other != own)) for own in matched)]
    found = {n: least(model, ways, n, seconds / len(tokens)) for n in tokens}
    return {
        "checkpoint": checkpoint, "layers": len(model.layers),
        "matches": {own: report.matches[own] for own in matched},
        "none": {n: round(us[0], 1) for n, us in found.items()},
        "all": {n: round(us[1], 1) for n, us in found.items()},
        "without": {own: {n: round(us[2 + at], 1) for n, us in found.items()}
                    for at, own in enumerate(matched)}}


def table(found: dict[str, dict[str, Any]], tokens: Sequence[int]) -> str:
    """For people: microseconds of a layer, without any pass -> with all."""
    lines = [f"| layers of | matches | {' | '.join(_of(n) for n in tokens)} |",
             "|---|---|" + "---|" * len(tokens)]
    for name, own in found.items():
        matches = ", ".join(f"`{one}` {count}" for one, count in own["matches"].items())
        cells = [f"{_us(own['none'][n])} → {_us(own['all'][n])}" for n in tokens]
        lines.append(f"| {name} ({own['checkpoint']}), {own['layers']} of them | {matches} | "
                     f"{' | '.join(cells)} |")
    return "\n".join(lines)


def table_by_pass(found: dict[str, dict[str, Any]], tokens: Sequence[int]) -> str:
    """For people: what a layer takes less with a pass, where all others are on."""
    lines = [f"| layers of | pass | {' | '.join(_of(n) for n in tokens)} |",
             "|---|---|" + "---|" * len(tokens)]
    for name, own in found.items():
        for one, without in own["without"].items():
            cells = [f"{100 * (1 - own['all'][n] / without[n]):+.1f} %" for n in tokens]
            lines.append(f"| {name} | `{one}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def _of(tokens: int) -> str:
    return f"{tokens:,} token{'s' * (tokens > 1)}"


def _us(number: float) -> str:
    return f"{number:,.0f}"


def main() -> None:
    """Measure all cases, or one."""
    args = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    args.add_argument("--out", type=Path, help="writes what was found, as JSON")
    args.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    args.add_argument("--only", choices=sorted(CASES))
    args.add_argument("--seconds", type=float, default=120.0, help="of all timing together")
    args.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    args.add_argument("--quantization", default="auto", help="as of `actorium serve`")
    given = args.parse_args()
    torch.set_num_threads(given.threads)
    tokens = [int(n) for n in given.tokens.split(",")]
    names = [given.only] if given.only else list(CASES)
    loads = [os.getloadavg()[0]]
    found = {name: measure(name, tokens, given.seconds / len(names), given.threads,
                           given.quantization) for name in names}
    loads.append(os.getloadavg()[0])
    print(f"{table(found, tokens)}\n\n{table_by_pass(found, tokens)}")
    if given.out:
        given.out.write_text(json.dumps({
            "threads": given.threads, "quantization": given.quantization,
            "torch": str(torch.__version__),
            "load": [round(load, 1) for load in loads], "tokens": tokens, "families": found,
        }, indent=1) + "\n")


if __name__ == "__main__":
    main()
