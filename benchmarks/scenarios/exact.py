"""What exactness costs, family by family, as a start with `--exact auto` measures it.

Layers of real sizes with random weights, a few of each model, with as much of its vocabulary as
they are of its layers; and the trained SmolLM2. Steps are those of `gpu/worker/exact_choice.py`.
"""

from __future__ import annotations

import gc
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from harness import Row, Rows, load, machine, markdown, processor, read_json, scenario, write_json

from actorium.actors.config.tree import (
    Config,
    DeviceConfig,
    MemoryConfig,
    ModelConfig,
    SchedulerConfig,
)
from actorium.gpu.step.runner import ModelRunner
from actorium.gpu.worker.device import open_device
from actorium.gpu.worker.exact_choice import CHUNK, LIMIT, SEQUENCES, measured_costs
from actorium.kernels.cpu.native_library import cache_folder

ROOT = Path(__file__).parents[2]
RESULTS, PAGE = ROOT / "benchmarks" / "results" / "exact.json", ROOT / "docs" / "exactness.md"
BEGIN, END = "<!-- table: benchmarks/run.py exact -->", "<!-- end of the table -->"
SHARED: dict[str, Any] = {
    "max_position_embeddings": 4096, "eos_token_id": 1, "rms_norm_eps": 1e-6,
    "torch_dtype": "bfloat16", "tie_word_embeddings": True}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "hidden_size": 1024, "intermediate_size": 3072,
         "num_hidden_layers": 4, "num_attention_heads": 16, "num_key_value_heads": 8,
         "head_dim": 128, "vocab_size": 21_696}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("Qwen3-0.6B", QWEN3),
    "dense, 4 bits": ("Qwen3-0.6B, `--quantization int4`", QWEN3),
    "dense, small heads": ("Llama-3.2-1B", {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 2048, "intermediate_size": 8192,
        "num_hidden_layers": 2, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 64, "vocab_size": 16_032}),
    "sliding windows": ("Gemma-3-1B", {
        "architectures": ["Gemma3ForCausalLM"], "hidden_size": 1152, "intermediate_size": 6912,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 1,
        "head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 512,
        "layer_types": ["sliding_attention", "full_attention"], "vocab_size": 20_160}),
    "mixture of experts": ("OLMoE's sizes as Qwen3-MoE", {
        "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048, "intermediate_size": 1024,
        "moe_intermediate_size": 1024, "num_experts": 64, "num_experts_per_tok": 8,
        "num_hidden_layers": 1, "num_attention_heads": 16, "num_key_value_heads": 16,
        "head_dim": 128, "vocab_size": 3_136, "norm_topk_prob": True}),
    "GatedDeltaNet": ("Qwen3.5-0.8B", {
        "architectures": ["Qwen3_5ForCausalLM"], "hidden_size": 1024, "intermediate_size": 3584,
        "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2,
        "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 16,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4, "vocab_size": 41_344}),
    "Mamba-2": ("Mamba2-780M", {
        "architectures": ["Mamba2ForCausalLM"], "hidden_size": 1536, "num_hidden_layers": 4,
        "num_heads": 48, "head_dim": 64, "state_size": 128, "n_groups": 1, "expand": 2,
        "conv_kernel": 4, "vocab_size": 4_192, "layer_norm_epsilon": 1e-5}),
    "latent attention": ("DeepSeek-V2-Lite, its dense layer", {
        "architectures": ["DeepseekV2ForCausalLM"], "hidden_size": 2048,
        "intermediate_size": 10_944, "moe_intermediate_size": 1408, "num_hidden_layers": 2,
        "num_attention_heads": 16, "num_key_value_heads": 16, "kv_lora_rank": 512,
        "q_lora_rank": None, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
        "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1,
        "first_k_dense_replace": 2, "vocab_size": 7_584}),
}
"""Family -> the checkpoint whose layers these are, and its config with fewer of them."""
TRAINED = {"SmolLM2, trained": ("SmolLM2-135M", "none"),
           "SmolLM2, GGUF in 4 bits": ("SmolLM2-135M, Q4_1", "auto")}
"""Family -> the checkpoint, and `--quantization` of its GGUF file."""
FAMILIES = [*CASES, *TRAINED]


@scenario
def families(families: list[str] = FAMILIES, runs: int = 5, threads: int = 1, gguf: str = "",
             page: bool = True) -> Rows:
    """The costs of each family on this processor, into results/exact.json and docs/exactness.md.

    runs: of which the medians count. gguf: SmolLM2's file; default: in the user's cache. page:
    write the table of all processors that were measured so far.
    """
    for name in families:
        row = measured(name, runs, threads, Path(gguf) if gguf else smollm2())
        remember(row, threads)
        if page:
            write_page(PAGE, read_json(RESULTS))
        yield row


def smollm2() -> Path:
    return cache_folder() / "models" / "smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"


def measured(name: str, runs: int, threads: int, gguf: Path) -> Row:
    """Percent that exactness costs each step of a family."""
    began = load()
    with tempfile.TemporaryDirectory() as folder:
        if name in TRAINED:
            of, quantization = TRAINED[name]
            model = ModelConfig(model=str(gguf), dtype="bfloat16", quantization=quantization)
        else:
            of, raw = CASES[name]
            (Path(folder) / "config.json").write_text(json.dumps(SHARED | raw))
            model = ModelConfig(model=folder, load_format="dummy", dtype="bfloat16",
                                quantization="int4" if "int4" in of else "auto")
        config = Config(model=model, memory=MemoryConfig(max_total_tokens=16_384),
                        device=DeviceConfig(device="cpu", threads=threads, exact="on"),
                        scheduler=SchedulerConfig(max_num_seqs=max(SEQUENCES)))
        opened = open_device(config, 1, lambda *_: None, {})
        costs = median_costs(opened.runner, runs)
    del opened
    gc.collect()
    return {"family": name, "of": of, "percent": costs, "load": [began, load()]}


def median_costs(runner: ModelRunner, runs: int) -> dict[str, float]:
    """Of each step, by its name."""
    by_step: dict[str, list[float]] = {}
    for _ in range(runs):
        for cost in measured_costs(runner, CHUNK):
            by_step.setdefault(cost.step, []).append(cost.percent)
    return {step: round(median(some), 2) for step, some in by_step.items()}


def remember(row: Row, threads: int) -> None:
    """Puts the row into the results of this processor."""
    known = read_json(RESULTS) if RESULTS.is_file() else {}
    own = known.setdefault(processor(), {"machine": machine(), "threads": threads, "families": {}})
    own["families"][row["family"]] = {key: row[key] for key in ("of", "percent", "load")}
    write_json(RESULTS, known)


def table(results: Mapping[str, Any]) -> str:
    """The rows of all processors, for the page."""
    heads = ["family", "layers of", "decodes of 1", "of 32", f"a prompt of {CHUNK}", "`auto`"]
    parts = []
    for name, own in results.items():
        rows: list[Sequence[object]] = []
        for family in (family for family in FAMILIES if family in own["families"]):
            each = own["families"][family]
            percent: dict[str, float] = each["percent"]
            dearest = max(percent.values(), default=0.0)
            # Where states are large, fewer sequences than 32 are measured.
            cells = {"of 32" if step.startswith("decodes") and step != heads[2] else step:
                     f"{own:.1f} %" for step, own in percent.items()}
            rows.append([family, each["of"], *(cells.get(head, "same kernels")
                                               for head in heads[2:5]),
                         "on" if dearest < LIMIT else "off"])
        threads = own["threads"]
        parts.append(f"{name}, {threads} thread{'s' * (threads > 1)}, {own['machine']['at']}:\n\n"
                     f"{markdown(heads, rows)}")
    return "\n\n".join(parts)


def write_page(page: Path, results: Mapping[str, Any]) -> None:
    text = page.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n{table(results)}\n\n{END}{after}")
